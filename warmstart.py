"""Warm start: supervised fine-tuning on demonstrations, so that reinforcement learning has
something to reinforce.

RL makes likely what already happens sometimes. A model that never writes a valid action earns 0 in
every sample, every group has zero variance, and nothing is learned: SmolLM2-135M, asked cold, wrote
no valid TextCraft action in 240 tries. A few minutes of imitation change that.

    L(θ) = - 1/N Σ_{b,t} loss_mask · log π_θ(token_t | tokens_<t)

A run begins with `start_model`, which has an oracle demonstrate (data.py), warms up the small
models and caches the result under a key of model, data and settings. The project comes with some
(recipes/starts/): LoRA adapters, used where training would see the same model, texts and settings.
`--warm-start` also takes a folder, for example a checkpoint of sft.py.

It stands apart from sft.py, which is a whole run with evaluation and resume, because every run
begins here. Read next: train.py, sft.py.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from batching import Batch, make_batch
from chat import ChatTemplate
from config import (
    SMALL_MODELS,
    Objective,
    RunConfig,
    config_per_env,
    prompt_of,
    tasks_of,
    value_errors_as_misuse,
)
from data import OracleStyle, Record, demonstrations, encode, prompt_turns
from envs import env_name, get_env
from models import load_policy, load_tokenizer, stop_ids_of
from run.files import build_folder, cache_dir, write_json
from run.progress import phase
from scale import distributed
from scale.default_models import resolve_model
from scale.lora import add_lora, load_adapter, save_adapter
from scale.memory import choose_keep, keep_for_backward
from scale.sync import export_policy
from update import Learner, decide_sharing
from update import imitate as imitate_batch

STARTS = Path(__file__).parent / "recipes" / "starts"  # <model>-<env>/: adapters, and ABOUT
ABOUT = "sft.json"  # how a start was trained, and a hash of its demonstrations


@dataclass(frozen=True)
class SftSettings:
    """How a warm start is trained; part of its cache key."""

    num_demonstrations: int = 128
    slips: float = 0.0  # chance of a wrong move, not imitated, so that recovering is shown (0..1)
    thoughts: bool = True  # whether the oracle says why it acts
    epochs: int = 2
    learning_rate: float = 1e-4
    batch_size: int = 8  # demonstrations per optimizer step
    max_tokens: int = 2048  # of a micro-batch
    max_trajectory_tokens: int = 2048  # longer demonstrations are left out and counted
    lora_rank: int = 0  # train adapters, merged into the checkpoint (0: all weights)
    share_prefix: bool = True  # compute what all demonstrations begin with once a step
    seed: int = 0

    def num_steps(self, num_records: int) -> int:
        """Optimizer steps over so many demonstrations."""
        return self.epochs * math.ceil(num_records / self.batch_size)


# ---------------------------------------------------------------------------------------- training


def imitate(
    learner: Learner,
    batch: Batch,
    settings: SftSettings,
    on_step: Callable[[float], None] = lambda loss: None,
) -> list[float]:
    """Minimise the action loss; returns the loss of every optimizer step (nats per action token),
    which `on_step` is called with too. The learning rate falls linearly to a tenth."""
    generator = torch.Generator().manual_seed(settings.seed)
    total = settings.num_steps(len(batch))
    objective = Objective(
        mini_batch_size=settings.batch_size,
        max_tokens_per_micro_batch=settings.max_tokens,
        share_prefix=settings.share_prefix,
    )
    objective = decide_sharing(objective, batch)
    losses: list[float] = []
    learner.model.train()
    for _ in range(settings.epochs):
        order = torch.randperm(len(batch), generator=generator).tolist()
        for start in range(0, len(batch), settings.batch_size):
            for group in learner.optimizer.param_groups:
                group["lr"] = settings.learning_rate * (1 - 0.9 * len(losses) / total)
            rows = batch.rows(order[start : start + settings.batch_size])
            losses.append(imitate_batch(learner, rows, objective, label="")["policy/loss"])
            on_step(losses[-1])
    return losses


def batch_of(
    chat: ChatTemplate, records: Sequence[Record], settings: SftSettings, pad_id: int
) -> Batch:
    """Records -> tensors; those over the token limit are left out and counted in a line."""
    limit = settings.max_trajectory_tokens
    trajectories = [encode(chat, record).trajectory for record in records]
    fit = [t for t in trajectories if len(t.input_ids) <= limit]
    if not fit:
        raise ValueError(f"no demonstration has at most {limit} tokens: --warm-start never")
    if num_out := len(records) - len(fit):
        distributed.say(f"{num_out} demonstrations have more than {limit} tokens and are left out")
    return make_batch(fit, pad_id)


def train_and_save(
    folder: Path | None, model: str, records: list[Record], settings: SftSettings, accelerator: Any
) -> None:
    """Fine-tune `model` and save a checkpoint, with its losses beside it, and adapters also by
    themselves. Collective.

    Args:
        folder: where to; None on the ranks that do not write.
    """
    with (
        value_errors_as_misuse()
    ):  # no such model, a template that cannot be cut, data that teaches nothing
        path = resolve_model(model)
        tokenizer, policy = load_tokenizer(path), load_policy(path, settings.share_prefix)
        if settings.lora_rank:
            add_lora(policy.lm, settings.lora_rank, settings.seed)
        chat = ChatTemplate(tokenizer, stop_ids_of(path))
        batch = batch_of(chat, records, settings, tokenizer.pad_token_id or 0)
    keep_for_backward(policy, choose_keep(False, accelerator.device))
    policy = distributed.shard(accelerator, policy.train())
    learning = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=settings.learning_rate, weight_decay=0.0)
    with phase("warm start", settings.num_steps(len(batch)), "steps") as tick:
        learner = Learner(accelerator, policy, optimizer)
        losses = imitate(learner, batch, settings, lambda loss: tick(loss=f"{loss:.3f}"))
    export_policy(accelerator, policy, tokenizer, folder)
    if settings.lora_rank:
        target = folder / "adapter" if folder is not None else None
        save_adapter(policy.lm, target, model, torch.bfloat16)
    if folder is not None:
        about = {"model": model, "settings": asdict(settings), "losses": losses}
        write_json(folder / ABOUT, about | {"records": hash_of(records)})
    distributed.forget(accelerator, policy)
    distributed.say(f"action loss {losses[0]:.3f} -> {losses[-1]:.3f} nats a token")


def merge_adapters(folder: Path | None, model: str, adapters: Path, accelerator: Any) -> None:
    """Save the checkpoint that `model` is with these adapters. Collective."""
    path = resolve_model(model)
    tokenizer, policy = load_tokenizer(path), load_policy(path)
    load_adapter(policy.lm, adapters)
    policy = distributed.shard(accelerator, policy)
    export_policy(accelerator, policy, tokenizer, folder)
    distributed.forget(accelerator, policy)


# ---------------------------------------------------------------------------------------- of a run


def needs_warm_start(config: RunConfig) -> bool:
    return config.warm_start == "auto" and config.model in SMALL_MODELS


def base_model_path(config: RunConfig) -> str:
    """Path of the model that the options name, before any warm start here. Collective."""
    if config.warm_start not in ("auto", "never"):
        return config.warm_start
    with value_errors_as_misuse():
        return distributed.run_on_rank_0("fetching the model", lambda: resolve_model(config.model))


def demonstrations_for(config: RunConfig, count: int, seed: int) -> list[Record]:
    """`count` demonstrations of each environment of a run, of its training tasks and under its
    prompt. The oracle demonstrates as it did for the start that the run begins with, so that it
    does not teach a second way of speaking; plainly if the run begins with none."""
    records = []
    for c in config_per_env(config):
        prompt, num_replaced = prompt_of(c), len(get_env(c.env).PROMPT)
        settings = settings_for(c.model, c.env) if needs_warm_start(c) else SftSettings()
        style = OracleStyle(settings.slips, settings.thoughts)
        for record in demonstrations(c.env, tasks_of(c), count, seed, c.env_addr, style):
            if prompt is not None:  # the oracle plays the same under any prompt
                turns = prompt_turns(prompt) + record["conversations"][num_replaced:]
                record = record | {"conversations": turns}
            records.append(record)
    return records


def start_model(config: RunConfig, accelerator: Any) -> str:
    """Path of the weights that a run starts from: as given, or warmed up on demonstrations, one
    start for all environments. Collective."""
    path = base_model_path(config)
    if not needs_warm_start(config):
        return path
    settings = settings_for(config.model, config.env)
    count, seed = settings.num_demonstrations, settings.seed
    show = partial(demonstrations_for, config, count, seed)
    return warm_start(config.model, config.env, show, settings, accelerator)


def warm_start(
    model: str,
    env: str,
    demonstrate: Callable[[], list[Record]],
    settings: SftSettings,
    accelerator: Any,
) -> str:
    """Path of `model` warmed up on what `demonstrate` returns: trained once, or shipped with the
    project, then cached. Collective."""
    with value_errors_as_misuse():
        records = distributed.run_on_rank_0("demonstrations", demonstrate)
    key = hashlib.sha256(json.dumps([model, records, asdict(settings)]).encode())
    name = f"{Path(model).name}-{env_name(env)}-{key.hexdigest()[:16]}"
    folder = cache_dir() / "warm_starts" / name
    if distributed.run_on_rank_0("looking for the warm start", folder.exists):
        return str(folder)
    about = f"warm start: {len(records)} demonstrations, {settings.epochs} epochs"
    if adapters := shipped_adapters(model, env, records, settings):
        distributed.say(f"{about}; comes with the project, nothing to train")
        make = partial(merge_adapters, model=model, adapters=adapters, accelerator=accelerator)
    else:
        steps = settings.num_steps(len(records))
        distributed.say(f"{about}, {steps} steps; made once, then cached")
        make = partial(
            train_and_save, model=model, records=records, settings=settings, accelerator=accelerator
        )
    if distributed.rank() == 0:
        build_folder(folder, make)
    else:
        make(None)
    distributed.barrier()
    return str(folder)


# ------------------------------------------------------------------ starts shipped with the project


def hash_of(records: Sequence[Record]) -> str:
    return hashlib.sha256(json.dumps(records).encode()).hexdigest()


def shipped_start_info(model: str, env: str) -> dict[str, Any]:
    """How the project's own start of this model and environment was trained; {} if it has none."""
    file = STARTS / f"{model}-{env_name(env)}" / ABOUT
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def settings_for(model: str, env: str) -> SftSettings:
    """How a warm start of `model` in `env` is trained: like the shipped one, if there is one."""
    return SftSettings(**shipped_start_info(model, env).get("settings", {}))


def shipped_adapters(
    model: str, env: str, records: Sequence[Record], settings: SftSettings
) -> Path | None:
    """The folder of the adapters that training on these records would give; None if the project has
    none."""
    about = shipped_start_info(model, env)
    is_same = about.get("records") == hash_of(records) and about["settings"] == asdict(settings)
    return STARTS / f"{model}-{env_name(env)}" if is_same else None
