"""Warm start: supervised fine-tuning on demonstrations, so that reinforcement learning has
something to reinforce.

RL makes likely what already happens sometimes. A model that never writes a valid action earns 0 in
every sample, every group has zero variance, and nothing is learned: SmolLM2-135M, asked cold, wrote
no valid TextCraft action in 240 tries. A few minutes of imitation change that.

    L(θ) = - 1/N Σ_{b,t} loss_mask · log π_θ(token_t | tokens_<t)

loss_mask is 1 on the demonstrated actions, their end-of-turn included, and 0 on prompt and
observations. A demonstration is encoded by the same `RolloutHandler` that sampling uses, so that
the policy is warmed up on exactly the token sequences it will see; there is no second path to drift
away from it. The loop is RL's own, `update.optimize`, with another loss: it trains whole or sharded
models, all weights or adapters.

A run begins with `start_model`, which has an oracle demonstrate (demonstrations.py), warms up the
small models and keeps the result under a key of model, data and settings. By hand, for a folder
that `--warm-start` takes (imitation as a method, evaluated and resumable, is sft.py):

    python warmstart.py --env textcraft --out runs/warm

Read next: `train.py`, `sft.py`.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from batching import Batch, make_batch
from chat import ChatTemplate
from config import SMALL_MODELS, Misuse, Objective, RunConfig, refusing
from conversations import Conversation, from_agenttraj, was_encoded_again
from demonstrations import PLAIN, Manner, demonstrations, shown_in_each
from envclient import EnvError
from envs import env_name, load_tasks
from models import load_policy, load_tokenizer, stop_ids_of
from run.errors import complain
from run.files import build_folder, cache_dir, write_json
from run.progress import phase
from runtime import starts
from runtime.startconfig import SftSettings, StartConfig, data_of, settings_of, start_options
from scale import distributed, precision
from scale.default_models import resolve_model
from scale.lora import add_lora, load_adapter, save_adapter
from scale.memory import keep_for_backward, what_to_keep
from scale.sync import export_policy
from update import Learner, suited
from update import imitate as imitate_batch

PROG, SUMMARY = "warmstart.py", (__doc__ or "").split("\n\n")[0]


def imitate(
    learner: Learner,
    batch: Batch,
    settings: SftSettings,
    steps: int | None = None,
    on_step: Callable[[float], None] = lambda loss: None,
) -> list[float]:
    """Minimise the action loss; returns the loss of every optimizer step (nats per action token).

    The learning rate falls linearly to a tenth over the run.

    Args:
        steps: overrides epochs x batches.
        on_step: called with each step's loss.
    """
    generator = torch.Generator().manual_seed(settings.seed)
    total = steps or settings.num_steps(len(batch))
    objective = Objective(
        mini_batch_size=settings.batch_size,
        max_tokens_per_micro_batch=settings.max_tokens,
        share_prefix=settings.share_prefix,
    )
    objective = suited(objective, batch)
    losses: list[float] = []
    learner.model.train()
    while len(losses) < total:
        order = torch.randperm(len(batch), generator=generator).tolist()
        for start in range(0, len(batch), settings.batch_size):
            if len(losses) == total:
                break
            for group in learner.optimizer.param_groups:
                group["lr"] = settings.learning_rate * (1 - 0.9 * len(losses) / total)
            rows = batch.rows(order[start : start + settings.batch_size])
            losses.append(imitate_batch(learner, rows, objective, label="")["policy/loss"])
            on_step(losses[-1])
    return losses


def encode(
    chat: ChatTemplate, records: list[Conversation], settings: SftSettings, pad_id: int
) -> Batch:
    """Conversations -> tensors; those over the token limit are left out, and counted in a line."""
    handlers = [from_agenttraj(chat, record) for record in records]
    kept = [h for h in handlers if len(h.input_ids) <= settings.max_trajectory_tokens]
    limit = settings.max_trajectory_tokens
    if len(kept) < len(handlers):
        out = f"{len(handlers) - len(kept)} of {len(handlers)} demonstrations"
        distributed.say(f"{out} have more than {limit} tokens and are left out")
    if not kept:
        raise ValueError(f"--max-trajectory-tokens {limit} leaves no demonstration; raise it")
    again = sum(map(was_encoded_again, handlers, records))
    if again:
        distributed.say(f"{again} trajectories of another tokenizer were encoded again, from text")
    return make_batch(kept, pad_id)


def train_to(
    folder: Path | None,
    model: str,
    records: list[Conversation],
    settings: SftSettings,
    accelerator: Any,
) -> None:
    """Fine-tune `model` and save a checkpoint, with its data and losses beside it, and adapters
    also by themselves. Collective.

    Args:
        folder: where to; None on the ranks that do not write.
    """
    with refusing():  # no such model, a template that cannot be cut, data that teaches nothing
        path = resolve_model(model)
        tokenizer, policy = load_tokenizer(path), load_policy(path, settings.share_prefix)
        if settings.lora_rank:
            add_lora(policy.lm, settings.lora_rank, settings.seed)
        chat = ChatTemplate(tokenizer, stop_ids_of(path))
        batch = encode(chat, records, settings, tokenizer.pad_token_id or 0)
    keep_for_backward(policy, what_to_keep(False, accelerator.device))
    policy = distributed.shard(accelerator, policy.train())
    learning = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=settings.learning_rate, weight_decay=0.0)
    total = settings.num_steps(len(batch))
    with phase("warm start", total, "steps") as tick:

        def show(loss: float) -> None:
            tick(loss=f"{loss:.3f}")

        losses = imitate(Learner(accelerator, policy, optimizer), batch, settings, on_step=show)
    export_policy(accelerator, policy, tokenizer, folder)
    if settings.lora_rank:
        target = folder / "adapter" if folder is not None else None
        save_adapter(policy.lm, target, model, distributed.whole, torch.bfloat16)
    if folder is not None:
        sft = {"model": model, "settings": asdict(settings), "losses": losses}
        sft["records"] = starts.hash_of(records)
        write_json(folder / "sft.json", sft)
        write_json(folder / "sft_data.json", records)
    distributed.forget(accelerator, policy)
    last = sum(losses[-8:]) / len(losses[-8:])
    distributed.say(f"action loss {losses[0]:.3f} -> {last:.3f} nats a token")


def unpack(folder: Path | None, model: str, adapters: Path, accelerator: Any) -> None:
    """Save the checkpoint that `model` is with these adapters. Collective."""
    path = resolve_model(model)
    tokenizer, policy = load_tokenizer(path), load_policy(path)
    load_adapter(policy.lm, adapters)
    policy = distributed.shard(accelerator, policy)
    export_policy(accelerator, policy, tokenizer, folder)
    distributed.forget(accelerator, policy)


def build(folder: Path, train: Callable[[Path | None], None]) -> None:
    """`train` into `folder`, which exists when all of it is there. Collective."""
    if distributed.rank() == 0:
        build_folder(folder, train)
    else:
        train(None)
    distributed.meet()


def warm_start(
    model: str,
    env: str,
    demonstrate: Callable[[], list[Conversation]],
    settings: SftSettings,
    accelerator: Any,
) -> str:
    """Path of `model` warmed up on what `demonstrate` shows of `env`; trained once, or come with
    the project, then cached. Collective."""

    def play() -> tuple[list[Conversation], bool]:
        with refusing():
            records = demonstrate()
        return records, folder_of(records).exists()

    def folder_of(records: list[Conversation]) -> Path:
        key = hashlib.sha256(json.dumps([model, records, asdict(settings)]).encode())
        name = f"{Path(model).name}-{env_name(env)}-{key.hexdigest()[:16]}"
        return cache_dir() / "warm_starts" / name

    records, is_there = distributed.first("demonstrations", play)
    folder = folder_of(records)
    if is_there:
        return str(folder)
    about = f"{len(records)} demonstrations, {settings.epochs} epochs"
    adapters = starts.shipped(model, env, records, settings)
    if adapters is not None:
        distributed.say(f"warm start: {about}; comes with the project, nothing to train")
        make = partial(unpack, model=model, adapters=adapters, accelerator=accelerator)
    else:
        steps = settings.num_steps(len(records))
        distributed.say(f"warm start: {about}, {steps} steps; made once, then cached")
        make = partial(
            train_to, model=model, records=records, settings=settings, accelerator=accelerator
        )
    build(folder, make)
    return str(folder)


def manner_of(settings: SftSettings) -> Manner:
    """How the oracle shows what such a start imitates."""
    return Manner(settings.slips, settings.thoughts)


def manner_in(config: RunConfig, env: str) -> Manner:
    """How a run's oracle shows one of its worlds: as it did to the start that the run begins with,
    lest it teach another way to speak; plainly where the run begins with none. Of several worlds
    each has the slips and thoughts of a run of its own."""
    if config.warm_start != "auto" or config.model not in SMALL_MODELS:
        return PLAIN
    return manner_of(starts.settings_for(config.model, env))


def given_model(config: RunConfig) -> str:
    """Path of the model that the options name, before any warm start here. Collective."""
    if config.warm_start not in ("auto", "never"):
        return config.warm_start
    with refusing():
        return distributed.first("fetching the model", lambda: resolve_model(config.model))


def start_model(config: RunConfig, accelerator: Any) -> str:
    """Path of the weights that RL starts from: as given, or warmed up on demonstrations.
    Collective."""
    path = given_model(config)
    if config.warm_start != "auto" or config.model not in SMALL_MODELS:
        return path
    settings = starts.settings_for(config.model, config.env)
    count, seed = settings.num_demonstrations, settings.seed  # of several worlds one for all
    show = partial(shown_in_each, config, count, seed, partial(manner_in, config))
    return warm_start(config.model, config.env, show, settings, accelerator)


def main(config: StartConfig) -> int:
    settings = settings_of(config)
    distributed.join()
    accelerator = distributed.make_accelerator(precision.choose(config.precision).autocast)

    def shown() -> list[Conversation]:
        if config.data:
            return list(data_of(config))
        split = None if config.tasks else "train"
        tasks = load_tasks(config.env, split, config.tasks, config.subtasks)
        count, manner = settings.num_demonstrations, manner_of(settings)
        return demonstrations(config.env, tasks, count, settings.seed, manner=manner)

    with refusing():
        records = distributed.first("demonstrations", shown)
    train = partial(
        train_to,
        model=config.model,
        records=records,
        settings=settings,
        accelerator=accelerator,
    )
    build(Path(config.out), train)
    distributed.say(f"saved {config.out}")
    return 0


def command_line(argv: Sequence[str] | None = None) -> int:
    """Parse, run; misuse is one line and exit code 2, a failure at run time one line and code 1."""
    try:
        code = main(start_options(argv, PROG, SUMMARY))
        distributed.leave()
        return code
    except Misuse as error:
        complain(PROG, error)
        return 2
    except KeyboardInterrupt:
        complain(PROG, "stopped; nothing was saved")
        return 130
    # The last two: the disk is full or gone.
    except (EnvError, distributed.RankError, OSError, SafetensorError) as error:
        complain(PROG, error)
        return 1


if __name__ == "__main__":
    sys.exit(command_line())
