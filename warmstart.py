"""Warm start: fine-tune on demonstrations first, so that reinforcement learning has successes to
reinforce.

RL can only reinforce actions that the policy sometimes samples. If a model never writes a
valid action, every sample earns 0, every group has zero variance, and nothing is learned. Without a
warm start, SmolLM2-135M did not write a single valid TextCraft action in 240 attempts. A few
minutes of imitation change that.

    L(θ) = - 1/N Σ_{b,t} loss_mask · log π_θ(token_t | tokens_<t)

A run begins with `start_model`. For the small models, an oracle demonstrates tasks (data.py), the
model is trained on the demonstrations, and the result is cached under a hash of the model, the data
and the settings. The project ships some of these results as LoRA adapters (recipes/starts/). An
adapter is used if model, data and settings match. `--warm-start` also accepts a folder, for example
a checkpoint of sft.py.

Every run begins here, so this code is separate from sft.py, which is a complete program with
evaluation and resume. Read next: conversations.py, sft.py.
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
from formats import ActionFormat, FunctionCalling, action_format
from models import load_policy, load_tokenizer, num_parameters, stop_ids_of
from run.files import build_folder, cache_dir, write_json
from run.progress import phase
from scale import distributed
from scale.default_models import resolve_model
from scale.lora import add_lora, load_adapter, save_adapter
from scale.memory import choose_keep, keep_for_backward
from scale.sync import export_policy
from update import Learner, decide_sharing
from update import imitate as imitate_batch

STARTS = Path(__file__).parent / "recipes" / "starts"  # <model>-<env>/: adapters and these two:
OUTCOMES = "outcomes.json"  # {task id: [solved, played]}, how well it plays the training tasks
ABOUT = "sft.json"  # settings and losses of the training, and a hash of its demonstrations


@dataclass(frozen=True)
class SftSettings:
    """Settings of a warm start; part of its cache key."""

    num_demonstrations: int = 128
    slips: float = 0.0  # see data.OracleStyle
    thoughts: bool = True  # see data.OracleStyle
    epochs: int = 2
    learning_rate: float = 1e-4
    batch_size: int = 8  # demonstrations per optimizer step
    max_tokens: int = 2048  # per micro-batch
    max_trajectory_tokens: int = 2048  # longer demonstrations are left out
    lora_rank: int = 0  # rank of adapters, merged into the checkpoint; 0: all weights
    share_prefix: bool = True  # compute the prefix of all demonstrations once per step
    seed: int = 0

    def num_steps(self, num_records: int) -> int:
        """Number of optimizer steps for `num_records` demonstrations."""
        return self.epochs * math.ceil(num_records / self.batch_size)


# ---------------------------------------------------------------------------------------- training


def imitate(
    learner: Learner,
    batch: Batch,
    settings: SftSettings,
    on_step: Callable[[float], None] = lambda loss: None,
) -> list[float]:
    """Minimise the loss on action tokens. The learning rate falls linearly to a tenth of its start.

    Returns:
        The loss of every optimizer step (nats per action token), also passed to `on_step`.
    """
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
    """Records -> tensors. Leaves out records above the token limit and prints how many."""
    limit = settings.max_trajectory_tokens
    trajectories = [encode(chat, record).trajectory for record in records]
    fit = [t for t in trajectories if len(t.input_ids) <= limit]
    if not fit:
        raise ValueError(f"all demonstrations exceed {limit} tokens; use --warm-start never")
    if num_out := len(records) - len(fit):
        distributed.say(f"{num_out} demonstrations have more than {limit} tokens and are left out")
    return make_batch(fit, pad_id)


def train_and_save(
    folder: Path | None, model: str, records: list[Record], settings: SftSettings, accelerator: Any
) -> None:
    """Fine-tune `model`; save the checkpoint, the losses and, with LoRA, also the adapters alone.
    Collective.

    Args:
        folder: destination; None on ranks that do not write.
    """
    with value_errors_as_misuse():  # a missing model, an unusable template, useless data
        path = resolve_model(model)
        tokenizer, policy = load_tokenizer(path), load_policy(path, settings.share_prefix)
        if settings.lora_rank:
            add_lora(policy.lm, settings.lora_rank, settings.seed)
        chat = ChatTemplate(tokenizer, stop_ids_of(path))
        batch = batch_of(chat, records, settings, tokenizer.pad_token_id or 0)
    is_gpu = accelerator.device.type != "cpu"
    keep_for_backward(policy, choose_keep(False, is_gpu, num_parameters(policy)))
    policy = distributed.shard(accelerator, policy.train())
    trainable = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=settings.learning_rate, weight_decay=0.0)
    with phase("warm start", settings.num_steps(len(batch)), "steps") as tick:
        learner = Learner(accelerator, policy, optimizer)
        losses = imitate(learner, batch, settings, lambda loss: tick(loss=f"{loss:.3f}"))
    export_policy(accelerator, policy, tokenizer, folder)
    if settings.lora_rank:
        target = folder / "adapter" if folder is not None else None
        save_adapter(policy.lm, target, model, torch.bfloat16)
    if folder is not None:
        about = {"model": model, "settings": asdict(settings), "losses": losses}
        write_json(folder / ABOUT, about | {"records": record_hash(records)})
    distributed.forget(accelerator, policy)
    distributed.say(f"action loss {losses[0]:.3f} -> {losses[-1]:.3f} nats per token")


def merge_adapters(folder: Path | None, model: str, adapters: Path, accelerator: Any) -> None:
    """Merge adapters into `model` and save the checkpoint. Collective."""
    path = resolve_model(model)
    tokenizer, policy = load_tokenizer(path), load_policy(path)
    load_adapter(policy.lm, adapters)
    policy = distributed.shard(accelerator, policy)
    export_policy(accelerator, policy, tokenizer, folder)
    distributed.forget(accelerator, policy)


# ------------------------------------------------------------------------- at the start of a run


def needs_warm_start(config: RunConfig) -> bool:
    return config.warm_start == "auto" and config.model in SMALL_MODELS


def base_model_path(config: RunConfig) -> str:
    """Path of the model in the options, before any warm start by this run. Collective."""
    if config.warm_start not in ("auto", "never"):
        return config.warm_start
    with value_errors_as_misuse():
        return distributed.run_on_rank_0("fetching the model", lambda: resolve_model(config.model))


def demonstrations_for(config: RunConfig, count: int, seed: int) -> list[Record]:
    """`count` demonstrations of training tasks for each environment of a run, with its prompt.

    The oracle uses the style of the run's warm start, so that the policy does not learn two styles.
    Without a warm start it uses the default style.
    """
    records = []
    for c in config_per_env(config):
        written = format_of(c)
        prompt, num_replaced = prompt_of(c), len(written.prompt(get_env(c.env)))
        style = oracle_style(c)
        for record in demonstrations(c.env, tasks_of(c), count, seed, c.env_addr, style, written):
            if prompt is not None:  # the oracle ignores the prompt
                turns = prompt_turns(prompt) + record["conversations"][num_replaced:]
                record = record | {"conversations": turns}
            records.append(record)
    return records


def oracle_style(config: RunConfig) -> OracleStyle:
    """How the oracle plays for a run: in the style of its warm start, or the default style. With
    --teacher oracle-actions it has no thoughts, also in the warm start."""
    needed = needs_warm_start(config)
    settings = settings_for(config.model, config.env) if needed else SftSettings()
    has_thoughts = getattr(config, "teacher", None) != "oracle-actions"
    return OracleStyle(settings.slips, settings.thoughts and has_thoughts)


def format_of(config: RunConfig) -> ActionFormat:
    """How the policy of a run writes its actions. The model's chat template can decide that."""
    template = None
    if config.action_format == FunctionCalling.name:
        is_folder = config.warm_start not in ("auto", "never")
        path = config.warm_start if is_folder else resolve_model(config.model)
        template = load_tokenizer(path).chat_template
    return action_format(config.action_format, config.max_actions_per_turn, template)


def start_model(config: RunConfig, accelerator: Any) -> str:
    """Path of the weights that a run starts from: the model in its options, or that model after a
    warm start on all environments of the run together. Collective."""
    path = base_model_path(config)
    if not needs_warm_start(config):
        return path
    settings = settings_for(config.model, config.env)
    count, seed = settings.num_demonstrations, settings.seed
    demonstrate = partial(demonstrations_for, config, count, seed)
    return warm_start(config.model, config.env, demonstrate, settings, accelerator)


def warm_start(
    model: str,
    env: str,
    demonstrate: Callable[[], list[Record]],
    settings: SftSettings,
    accelerator: Any,
) -> str:
    """Path of `model` after training on the records that `demonstrate` returns. The result is
    cached: it is trained only once, or comes with the project. Collective."""
    with value_errors_as_misuse():
        records = distributed.run_on_rank_0("demonstrations", demonstrate)
    key = hashlib.sha256(json.dumps([model, records, asdict(settings)]).encode())
    name = f"{Path(model).name}-{env_name(env)}-{key.hexdigest()[:16]}"
    folder = cache_dir() / "warm_starts" / name
    if distributed.run_on_rank_0("looking for the warm start", folder.exists):
        return str(folder)
    passes = f"{settings.epochs} epoch{'s' * (settings.epochs > 1)}"
    about = f"warm start: {len(records)} demonstrations, {passes}"
    if adapters := shipped_adapters(model, env, records, settings):
        distributed.say(f"{about}; shipped with the project, nothing to train")
        make = partial(merge_adapters, model=model, adapters=adapters, accelerator=accelerator)
    else:
        steps = settings.num_steps(len(records))
        distributed.say(f"{about}, {steps} steps; trained once, then cached")
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


def record_hash(records: Sequence[Record]) -> str:
    return hashlib.sha256(json.dumps(records).encode()).hexdigest()


def shipped_start_info(model: str, env: str) -> dict[str, Any]:
    """The ABOUT file of the shipped warm start for this model and environment; {} without one."""
    file = STARTS / f"{model}-{env_name(env)}" / ABOUT
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}


def settings_for(model: str, env: str) -> SftSettings:
    """Settings for a warm start of `model` in `env`: the shipped start's, if there is one."""
    return SftSettings(**shipped_start_info(model, env).get("settings", {}))


def shipped_adapters(
    model: str, env: str, records: Sequence[Record], settings: SftSettings
) -> Path | None:
    """Folder of the shipped adapters, or None if they were trained on other data or settings."""
    about = shipped_start_info(model, env)
    is_same = about.get("records") == record_hash(records) and about["settings"] == asdict(settings)
    return STARTS / f"{model}-{env_name(env)}" if is_same else None


def known_outcomes(config: RunConfig, start: str) -> dict[str, list[int]]:
    """{task id: [solved, played]} measured with the initial weights in `start`; {} unless they are
    a shipped start. One that this machine trained has a file ABOUT, a shipped one has none."""
    file = STARTS / f"{config.model}-{env_name(config.env)}" / OUTCOMES
    is_shipped = needs_warm_start(config) and not (Path(start) / ABOUT).exists()
    return json.loads(file.read_text(encoding="utf-8")) if is_shipped and file.exists() else {}
