"""Warm start: supervised fine-tuning on demonstrations, so that reinforcement learning has
something to reinforce.

RL makes likely what already happens sometimes. A model that never writes a valid action earns 0 in
every sample, every group has zero variance, and nothing is learned: SmolLM2-135M, asked cold, wrote
no valid TextCraft action in 240 tries. A few minutes of imitation change that.

    L(θ) = - 1/N Σ_{b,t} loss_mask · log π_θ(token_t | tokens_<t)

loss_mask is 1 on the demonstrated actions, their end-of-turn included, and 0 on prompt and
observations. A demonstration is encoded by the same `RolloutHandler` that sampling uses, so that
the policy is warmed up on exactly the token sequences it will see; there is no second path to drift
away from it.

Demonstrations come from an oracle or from a file; both are AgentTraj conversations
(demonstrations.py).

`train.py` calls `warm_start` for models that need it and keeps the result under a key of model,
data and settings:

    python sft.py --env textcraft --out runs/warm                # the same by hand
    python sft.py --model X --data my_agenttraj.json --out Y     # your own demonstrations

Read next: `train.py`.
"""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from batching import Batch, make_batch, micro_batches
from chat import ChatTemplate
from demonstrations import demonstrations
from envclient import EnvError
from envs import Task, load_tasks
from losses import masked_mean
from models import load_policy, load_tokenizer, save_policy
from runtime.cli import complain, parse_command_line
from runtime.default_models import cache_dir, resolve_model
from runtime.files import build_folder
from trajectory import Conversation, from_agenttraj, read_agenttraj


@dataclass(frozen=True)
class SftSettings:
    """How the warm start is trained; part of its cache key."""

    num_demonstrations: int = 128
    epochs: int = 2
    learning_rate: float = 1e-4
    batch_size: int = 8  # demonstrations per optimizer step
    max_tokens: int = 4096  # padded tokens per micro-batch
    max_trajectory_tokens: int = 2048  # longer demonstrations are left out and counted
    seed: int = 0


def finetune(
    policy: Any,
    batch: Batch,
    settings: SftSettings,
    progress: bool = True,
    steps: int | None = None,
) -> list[float]:
    """Minimise the action loss; returns the loss of every optimizer step (nats per action token).

    The learning rate falls linearly to a tenth over the run. `steps` overrides epochs x batches.
    """
    from tqdm import tqdm

    device = next(policy.parameters()).device
    optimizer = torch.optim.AdamW(policy.parameters(), lr=settings.learning_rate, weight_decay=0.0)
    generator = torch.Generator().manual_seed(settings.seed)
    per_epoch = math.ceil(len(batch) / settings.batch_size)
    total = steps or settings.epochs * per_epoch
    losses: list[float] = []
    policy.train()
    bar = tqdm(total=total, desc="supervised fine-tuning", unit="step", disable=not progress)
    while len(losses) < total:
        order = torch.randperm(len(batch), generator=generator).tolist()
        for start in range(0, len(batch), settings.batch_size):
            if len(losses) == total:
                break
            rows = order[start : start + settings.batch_size]
            denominator = float(batch.loss_mask[rows].sum())
            loss_sum = 0.0
            for micro in micro_batches(batch.lengths[rows].tolist(), settings.max_tokens):
                part = batch.rows([rows[i] for i in micro])
                mask = part.loss_mask.to(device)
                with torch.autocast(device.type, dtype=torch.bfloat16):
                    log_probs, _ = policy(part.input_ids.to(device), mask)
                loss = -masked_mean(log_probs, mask, denominator)
                loss.backward()
                loss_sum += float(loss.detach())
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = settings.learning_rate * (1 - 0.9 * len(losses) / total)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss_sum)
            bar.set_postfix(loss=f"{loss_sum:.3f}")
            bar.update()
    bar.close()
    return losses


def encode(
    chat: ChatTemplate, records: list[Conversation], settings: SftSettings, pad_id: int
) -> Batch:
    """Conversations -> tensors; those over the token limit are left out, and counted in a line."""
    handlers = [from_agenttraj(chat, record) for record in records]
    kept = [h for h in handlers if len(h.input_ids) <= settings.max_trajectory_tokens]
    if len(kept) < len(handlers):
        print(
            f"{len(handlers) - len(kept)} demonstrations over "
            f"{settings.max_trajectory_tokens} tokens left out"
        )
    return make_batch(kept, pad_id)


def train_to(folder: Path, model: str, records: list[Conversation], settings: SftSettings) -> None:
    """Fine-tune `model` and save a checkpoint, with its data and losses beside it."""
    path = resolve_model(model)
    tokenizer, policy = load_tokenizer(path), load_policy(path)
    if torch.cuda.is_available():
        policy.to("cuda")
    batch = encode(ChatTemplate(tokenizer), records, settings, tokenizer.pad_token_id or 0)
    losses = finetune(policy, batch, settings)
    save_policy(policy, tokenizer, folder)
    (folder / "sft.json").write_text(
        json.dumps({"model": model, "settings": asdict(settings), "losses": losses})
    )
    (folder / "sft_data.json").write_text(json.dumps(records, indent=1))
    print(f"action loss {losses[0]:.3f} -> {sum(losses[-8:]) / len(losses[-8:]):.3f} nats a token")


def warm_start(
    model: str, env: str, tasks: list[Task], settings: SftSettings, urls: Sequence[str] = ()
) -> str:
    """Path of `model` warmed up on oracle demonstrations of `tasks`; trained once, then cached.

    `urls` are servers of the environment; none: one is started here.
    """
    records = demonstrations(env, tasks, settings.num_demonstrations, settings.seed, urls)
    key = hashlib.sha256(json.dumps([model, records, asdict(settings)]).encode()).hexdigest()[:16]
    folder = cache_dir() / "warm_starts" / f"{Path(model).name}-{env}-{key}"
    if not folder.exists():
        print(
            f"warm start: {len(records)} demonstrations, {settings.epochs} epochs, then cached",
            flush=True,
        )
        build_folder(folder, lambda tmp: train_to(tmp, model, records, settings))
    return str(folder)


@dataclass
class Config:
    """Supervised fine-tuning on demonstrations."""

    env: str = "textcraft"
    """environment whose oracle demonstrates"""
    model: str = "smollm2-135m"
    """what to start from: smollm2-135m, tiny, a path or a hub id"""
    out: str = "runs/sft"
    """folder of the checkpoint; must not exist"""
    data: str | None = None
    """AgentTraj JSON file; without it the oracle demonstrates training tasks"""
    tasks: str | None = None
    """id list for the oracle; default: the environment's training split"""
    subtasks: tuple[str, ...] = ()
    """only these sub-tasks, e.g. "depth 1" "depth 2" """
    num_demonstrations: int = 128
    epochs: int = 2
    learning_rate: float = 1e-4
    batch_size: int = 8
    """demonstrations per optimizer step"""
    max_trajectory_tokens: int = 2048
    seed: int = 0


def main(config: Config) -> int:
    out = Path(config.out)
    if out.exists():
        raise ValueError(f"--out {out} exists; choose another folder")
    for name in ("num_demonstrations", "epochs", "batch_size", "learning_rate"):
        if not getattr(config, name) > 0:
            flag = name.replace("_", "-")
            raise ValueError(f"--{flag} {getattr(config, name)} must be above 0")
    if config.max_trajectory_tokens < 1:
        raise ValueError(f"--max-trajectory-tokens {config.max_trajectory_tokens} must be above 0")
    names = SftSettings.__dataclass_fields__
    settings = SftSettings(
        **{name: value for name, value in asdict(config).items() if name in names}
    )
    if config.data:
        records = read_agenttraj(Path(config.data))
    else:
        split = None if config.tasks else "train"
        tasks = load_tasks(config.env, split=split, file=config.tasks, subtasks=config.subtasks)
        records = demonstrations(config.env, tasks, config.num_demonstrations, config.seed)
    build_folder(out, lambda tmp: train_to(tmp, config.model, records, settings))
    print(f"saved {out}")
    return 0


def command_line(argv: Sequence[str] | None = None) -> int:
    """Parse, run; misuse is one line and exit code 2, a server that fails one line and code 1."""
    first_lines = (__doc__ or "").split("\n\n")[0]
    config = parse_command_line(Config, argv, "sft.py", description=first_lines)
    try:
        return main(config)
    except (ValueError, OSError) as error:
        complain("sft.py", error)
        return 2
    except EnvError as error:
        complain("sft.py", error)
        return 1


if __name__ == "__main__":
    sys.exit(command_line())
