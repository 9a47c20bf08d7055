"""What no run can honour, refused before anything is loaded or written, in one line each.

    check        options by themselves and together
    check_given  options that were given and change nothing
    check_here   what they name, on this machine: tasks, model, memory, directory
    remarks      what is allowed and perhaps not meant

Read first: `config.py`, the options.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import json
import math
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import fields
from pathlib import Path

from advantages import ESTIMATORS
from config import Config, Misuse, RunConfig, flag, refusing
from envs import ENVS, names_of, settings_of
from envs.http import checked_url
from envs.local import LOCAL, check_local
from runtime.find_model import check_length, check_model, is_at_hub
from runtime.mixture import check_mixture, held_out_tasks, in_each, tasks_of
from runtime.saved import LISTS_OF_FILES, files_teach
from scale.memory import check_room
from schedulers import make_scheduler

POSITIVE = (
    *("steps", "tasks_per_step", "group_size", "mini_batch_size", "ppo_epochs"),
    *("max_tokens_per_micro_batch", "max_tokens_per_turn", "max_trajectory_tokens"),
    *("temperature", "learning_rate", "critic_learning_rate", "max_grad_norm"),
    *("clip_ratio", "value_clip", "max_sync_error", "save_every", "keep_last"),
    *("eval_samples", "eval_start_samples"),
)
NOT_NEGATIVE = ("seed", "lora_rank", "sampler_is_cap", "eval_every", "learning_rate_decay_steps")


def check(config: RunConfig) -> None:
    """Refuse what cannot work.

    Raises:
        Misuse: one line, naming the flag, what it got and what to do.
    """
    with refusing():
        check_mixture(config)
        worlds = in_each(config)
        for own in worlds:
            if isinstance(own, Config):
                make_scheduler(own.rounds_scheduler, own.rounds, own.steps_scaling_inter)
        _check_ranges(config)
        _check_trackers(config)
        for name in ("engine_url", "engine_devices"):
            check_addresses(name, getattr(config, name))
        for own in worlds:
            check_addresses("env_addr", own.env_addr, own.env)
        _check_together(config)
        for own in worlds:
            if isinstance(own, Config):
                _check_rl(own)


def _check_trackers(config: RunConfig) -> None:
    """The packages of --log-to are optional: each must be there, by the name that it has here."""
    for name in config.log_to:
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"--log-to {name} needs the package: pip install {name}")


def _check_ranges(config: RunConfig) -> None:
    """Each number by itself."""
    known = [field.name for field in fields(config)]
    for name in filter(known.__contains__, POSITIVE):
        if name in config.may_be_zero and not getattr(config, name):
            continue
        if not 0 < getattr(config, name) < math.inf:
            raise ValueError(f"{flag(name)} {getattr(config, name)} must be above 0, and finite")
    coefficients = [name for name in known if name.endswith("_coef")]
    for name in [*filter(known.__contains__, NOT_NEGATIVE), *coefficients]:
        if not 0 <= getattr(config, name) < math.inf:
            raise ValueError(f"{flag(name)} {getattr(config, name)} must not be negative")
    for name in filter(known.__contains__, ("gamma", "lam", "max_env_failures")):
        if not 0 <= getattr(config, name) <= 1:
            raise ValueError(f"{flag(name)} {getattr(config, name)} must lie between 0 and 1")
    if config.stop_at is not None and not 0 < config.stop_at <= 1:
        raise ValueError(f"--stop-at {config.stop_at} must be a share of solved tasks, 0 to 1")
    if config.eval_rounds is not None and config.eval_rounds < 1:
        raise ValueError(f"--eval-rounds {config.eval_rounds} must be at least 1")


def check_addresses(name: str, given: Sequence[str], env: str = "") -> None:
    """Raise ValueError unless each is an address, given once, or all is `local`.

    Args:
        name: of the option; that of `env`'s servers may be `local`.
    """
    twice = sorted({each for each in given if given.count(each) > 1})
    if twice:
        raise ValueError(f"{flag(name)} {' '.join(given)}: {twice[0]} stands there twice")
    if name == "env_addr" and LOCAL in given:
        if len(given) > 1:
            raise ValueError(f"{flag(name)} {' '.join(given)}: {LOCAL} is no server; give it alone")
        check_local(env)
    elif name != "engine_devices":
        for address in given:
            checked_url(address, flag(name))


def _check_rl(config: Config) -> None:
    """What train.py alone is asked."""
    if 0 < config.sampler_is_cap < 1:
        raise ValueError(f"--sampler-is-cap {config.sampler_is_cap} must be 0 (off) or at least 1")
    if config.rounds_scheduler != "fixed" and len(config.rounds) < 2:
        raise ValueError(
            f"--rounds {config.rounds[0]} with --rounds-scheduler {config.rounds_scheduler} never "
            "changes; give several numbers, or choose fixed"
        )
    if config.group_size < 2 and ESTIMATORS[config.algorithm].needs_group:
        others = " or ".join(name for name, e in ESTIMATORS.items() if not e.needs_group)
        raise ValueError(
            f"--group-size {config.group_size} leaves {config.algorithm} no other sample to "
            f"compare with; use 2 or more, or --algorithm {others}"
        )
    if config.kl_target is not None and not (config.kl_target > 0 and config.kl_coef > 0):
        raise ValueError(
            "--kl-target adapts the KL in the reward: it must be above 0, and so must --kl-coef"
        )
    if config.kl_loss_coef and config.kl_estimator == "k1":
        raise ValueError("--kl-estimator k1 has no gradient in expectation as a loss; use k2 or k3")


def _check_together(config: RunConfig) -> None:
    """Options that contradict each other."""
    if config.stop_at is not None and not config.eval_every:
        raise ValueError("--stop-at waits for held-out success; set --eval-every above 0")
    if config.max_tokens_per_turn >= config.max_trajectory_tokens:
        raise ValueError(
            f"--max-tokens-per-turn {config.max_tokens_per_turn} does not fit into "
            f"--max-trajectory-tokens {config.max_trajectory_tokens}"
        )
    if config.engine_url and config.engine_devices:
        raise ValueError(
            "--engine-url and --engine-devices exclude each other: servers that run already, or "
            "ones to start"
        )
    if (config.engine_url or config.engine_devices) and config.engine != "vllm":
        why = "--deterministic" if config.deterministic else f"--engine {config.engine}"
        raise ValueError(f"--engine-url and --engine-devices are vLLM servers; leave out {why}")
    if config.resume and not config.run_dir:
        raise ValueError("--resume needs --run-dir, the run to go on with")


# ------------------------------------------------------------------------------- without effect


def check_given(config: RunConfig, given: Collection[str]) -> None:
    """Refuse options that were given and change nothing.

    Args:
        config: before `complete`, which may replace them.
        given: fields that the command line names.
    Raises:
        Misuse: each of them, and what would give it an effect.
    """
    said = []
    for name, why in _without_effect(config):
        if name in given:
            option = flag(f"no_{name}" if getattr(config, name) is False else name)
            said.append(f"{option} has no effect here: {why}")
    if said:
        raise Misuse("; ".join(said))


def _without_effect(c: RunConfig) -> Iterator[tuple[str, str]]:
    """(field, why it changes nothing)."""
    if isinstance(c, Config):
        yield from _without_effect_in_rl(c)
    if c.deterministic and c.engine == "vllm":
        yield "engine", "leave it out, --deterministic samples with transformers"
    if c.tasks:
        yield "split", f"--tasks {c.tasks} says which tasks; give one of the two"
    yield from c.without_effect()


def _without_effect_in_rl(c: Config) -> Iterator[tuple[str, str]]:
    for name, users in _users().items():
        if c.algorithm not in users:
            others = f"--algorithm {' or '.join(users)}"
            yield name, f"leave it out with --algorithm {c.algorithm}; it works with {others}"
    if c.rounds_scheduler == "fixed":
        yield (
            "steps_scaling_inter",
            "leave it out, or take --rounds-scheduler scaling_inter_stepwise",
        )
    if not c.kl_loss_coef:
        yield "kl_estimator", "leave it out, or set --kl-loss-coef, whose KL it estimates, above 0"


def _users() -> dict[str, list[str]]:
    """Option -> the algorithms that it works with, for options that some lack."""
    takes = {
        name: inspect.signature(estimator.function).parameters
        for name, estimator in ESTIMATORS.items()
    }
    users = {option: [n for n in ESTIMATORS if option in takes[n]] for option in ("gamma", "lam")}
    for option in ("critic_learning_rate", "value_clip"):
        users[option] = [n for n, estimator in ESTIMATORS.items() if estimator.needs_critic]
    users["skip_zero_variance"] = [n for n, e in ESTIMATORS.items() if e.needs_group]
    return users


def remarks(config: RunConfig, given: Collection[str] = ()) -> list[str]:
    """Lines about what will run and is perhaps not meant.

    Args:
        given: fields that the command line names.
    """
    c, lines = config, list[str]()
    if isinstance(c, Config):
        lines += _remarks_on_rl(c, given)
    unused = [
        flag(n)
        for n in ("eval_tasks", "eval_subtasks", "eval_samples", "eval_rounds")
        if n in given
    ]
    if not c.eval_every and unused:
        lines.append(f"{' '.join(unused)} wait for --eval-every above 0")
    with contextlib.suppress(ValueError):  # a list that is not there is refused elsewhere
        held_out = {task.task_id for task in held_out_tasks(c)} if c.tasks or c.split else set()
        held_out = set() if files_teach(c.method, vars(c)) else held_out  # nobody has read them yet
        if trained_on := held_out & {task.task_id for task in tasks_of(c)}:
            lines.append(
                f"{len(trained_on)} of the {len(held_out)} held-out tasks are also trained on: "
                "success there says little about others (--tasks, --eval-tasks)"
            )
    lines += _remarks_on_data(c)
    if is_at_hub(c.model):
        lines.append(f"--model {c.model} is not on this machine: it comes from the model hub")
    if may_not_fit := check_room(c):
        lines.append(may_not_fit)
    return lines


def _remarks_on_rl(c: Config, given: Collection[str]) -> list[str]:
    lines = []
    changes_at = c.steps_scaling_inter * (len(c.rounds) - 1)
    if c.rounds and c.rounds_scheduler != "fixed" and c.steps <= changes_at:
        lines.append(
            f"--rounds {' '.join(map(str, c.rounds))} reaches {c.rounds[-1]} turns after step "
            f"{changes_at}, this run ends with step {c.steps}; see --steps-scaling-inter"
        )
    if "mini_batch_size" in given and c.mini_batch_size > c.episodes_per_step:
        lines.append(
            f"--mini-batch-size {c.mini_batch_size} is more than a step's "
            f"{c.episodes_per_step} trajectories: one optimizer step takes them all"
        )
    return lines


def _remarks_on_data(c: RunConfig) -> Iterator[str]:
    """What a run to learn from had otherwise; a start that files do not need."""
    given = [(name, file) for name in LISTS_OF_FILES for file in getattr(c, name, ())]
    starts = [Path(start).resolve() for start in (c.model, c.warm_start)]
    for name, file in given:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # no run
            saved = json.loads((Path(file) / "config.json").read_text(encoding="utf-8"))["config"]
            played = names_of(saved["env"])
            if not set(played) & set(names_of(c.env)):
                yield (
                    f"{flag(name)} {file} played {' '.join(played)}, and this run plays {c.env}: a "
                    "run gives its conversations alone, --env and --model are yours to say"
                )
            elif not any(start.is_relative_to(Path(file).resolve()) for start in starts):
                who = saved["model"] if saved["model"] != c.model else "what it has learned to be"
                yield (
                    f"{flag(name)} {file} was played by {who}, and this run trains {c.model} from "
                    f"its beginning: --model {file}/checkpoints/best goes on from there"
                )
    if given and not c.plays and c.needs_world:
        yield (
            f"--model {c.model} begins from its warm start in {c.env}, which files do not need: "
            "--env says of which world, --warm-start never begins from the model as it is"
        )


# ------------------------------------------------------------------------------ what options name


def check_here(config: RunConfig) -> None:
    """Refuse tasks, models and directories that are not there or will not do on this machine.

    Args:
        config: complete.
    Raises:
        Misuse: one line, naming the flag, what it got and what to do.
    """
    with refusing():
        for own in in_each(config):
            if config.needs_world and own.env_addr in ((), (LOCAL,)):
                check_package(own.env)
        tasks_of(config)
        held_out_tasks(config)
    check_run_dir(config)
    check_model(config.model)
    if config.warm_start not in ("auto", "never"):
        if not Path(config.warm_start).is_dir():
            raise Misuse(
                f"--warm-start {config.warm_start} is neither auto, never, nor a checkpoint folder"
            )
        check_model(config.warm_start, "--warm-start")
    check_length(config.model, config.max_trajectory_tokens + 1)
    check_room(config)


def check_package(env: str) -> None:
    """Raise ValueError where what the world needs to be played is not installed."""
    package = settings_of(env).package
    try:
        if not package or importlib.util.find_spec(package):
            return
    except ModuleNotFoundError:  # package.module, without the package
        pass
    how = f"run `make setup ENV={env}`" if env in ENVS else f"pip install what gives {package}"
    raise ValueError(f"--env {env} needs the package {package}: {how}, or give --env-addr")


def check_run_dir(config: RunConfig) -> None:
    """Refuse a directory that holds a run, or that cannot be made."""
    path = Path(config.run_dir or "runs")
    if config.run_dir:
        holds_run = (path / "config.json").exists()
        if holds_run and not config.resume:
            raise Misuse(
                f"--run-dir {path} holds a run; add --resume to go on with it, or choose another"
            )
        if config.resume and not holds_run:
            raise Misuse(f"--run-dir {path} holds no run to resume")
    there = next(p for p in (path, *path.absolute().parents) if p.exists())
    if not there.is_dir() or not os.access(there, os.W_OK):
        why = "may not be written to" if there.is_dir() else "is no folder"
        raise Misuse(f"--run-dir {path} cannot be made: {there} {why}")
