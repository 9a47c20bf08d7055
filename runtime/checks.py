"""What no run can honour, refused before anything is loaded or written, in one line each.

Read first: `config.py`, the options.
"""

from __future__ import annotations

import importlib.util
import math
from dataclasses import fields
from pathlib import Path

from advantages import ESTIMATORS
from config import Config, flag, refusing
from schedulers import make_scheduler

POSITIVE = (
    *("steps", "tasks_per_step", "group_size", "mini_batch_size", "ppo_epochs"),
    *("max_tokens_per_micro_batch", "max_tokens_per_turn", "max_trajectory_tokens"),
    *("temperature", "learning_rate", "critic_learning_rate", "max_grad_norm"),
    *("clip_ratio", "value_clip", "max_sync_error", "eval_samples", "save_every", "keep_last"),
)
NOT_NEGATIVE = ("lora_rank", "sampler_is_cap", "eval_every", "learning_rate_decay_steps")


def check(config: Config) -> None:
    """Refuse what cannot work.

    Raises:
        Misuse: one line, naming the flag, what it got and what to do.
    """
    with refusing():
        make_scheduler(config.rounds_scheduler, config.rounds, config.steps_scaling_inter)
        _check_ranges(config)
        _check_trackers(config)
        _check_together(config)


def _check_trackers(config: Config) -> None:
    """The packages of --log-to are optional: each must be there, by the name that it has here."""
    for name in config.log_to:
        if importlib.util.find_spec(name) is None:
            raise ValueError(f"--log-to {name} needs the package: pip install {name}")


def _check_ranges(config: Config) -> None:
    """Each number by itself."""
    for name in POSITIVE:
        if not 0 < getattr(config, name) < math.inf:
            raise ValueError(f"{flag(name)} {getattr(config, name)} must be above 0, and finite")
    coefficients = [f.name for f in fields(config) if f.name.endswith("_coef")]
    for name in [*NOT_NEGATIVE, *coefficients]:
        if not 0 <= getattr(config, name) < math.inf:
            raise ValueError(f"{flag(name)} {getattr(config, name)} must not be negative")
    for name in ["gamma", "lam", "max_env_failures"]:
        if not 0 <= getattr(config, name) <= 1:
            raise ValueError(f"{flag(name)} {getattr(config, name)} must lie between 0 and 1")
    if config.eval_rounds is not None and config.eval_rounds < 1:
        raise ValueError(f"--eval-rounds {config.eval_rounds} must be at least 1")
    if 0 < config.sampler_is_cap < 1:
        raise ValueError(f"--sampler-is-cap {config.sampler_is_cap} must be 0 (off) or at least 1")


def _check_together(config: Config) -> None:
    """Options that contradict each other."""
    if config.group_size < 2 and ESTIMATORS[config.algorithm].needs_group:
        others = " or ".join(name for name, e in ESTIMATORS.items() if not e.needs_group)
        raise ValueError(
            f"--group-size {config.group_size} leaves {config.algorithm} no other sample to "
            f"compare with; use 2 or more, or --algorithm {others}"
        )
    if config.max_tokens_per_turn >= config.max_trajectory_tokens:
        raise ValueError(
            f"--max-tokens-per-turn {config.max_tokens_per_turn} does not fit into "
            f"--max-trajectory-tokens {config.max_trajectory_tokens}"
        )
    if config.kl_target is not None and not (config.kl_target > 0 and config.kl_coef > 0):
        raise ValueError(
            "--kl-target adapts the KL in the reward: it must be above 0, and so must --kl-coef"
        )
    if config.kl_loss_coef and config.kl_estimator == "k1":
        raise ValueError("--kl-estimator k1 has no gradient in expectation as a loss; use k2 or k3")
    if (
        config.warm_start not in ("auto", "never")
        and not Path(config.warm_start, "config.json").exists()
    ):
        raise ValueError(
            f"--warm-start {config.warm_start} is neither auto, never, nor a checkpoint folder"
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
