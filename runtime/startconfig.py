"""What a warm start by hand can be asked: every option of warmstart.py, and what contradicts.

Read next: `warmstart.py`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

from config import Misuse, flag, refusing
from conversations import Conversation, read_conversations
from envs import load_tasks
from runtime import usage
from runtime.cli import parse_command_line
from runtime.find_model import check_length, check_model


@dataclass(frozen=True)
class SftSettings:
    """How the warm start is trained; part of its cache key."""

    num_demonstrations: int = 128
    slips: float = 0.0  # chance of a wrong move before a right one, which is not imitated
    thoughts: bool = True  # whether the oracle says why it acts
    epochs: int = 2
    learning_rate: float = 1e-4
    batch_size: int = 8  # demonstrations per optimizer step
    max_tokens: int = 2048  # of a micro-batch
    max_trajectory_tokens: int = 2048  # longer demonstrations are left out and counted
    lora_rank: int = 0  # train adapters of this rank, merged into the checkpoint; 0: all weights
    share_prefix: bool = True  # compute the instructions that all have in common once a step
    seed: int = 0

    def num_steps(self, num_records: int) -> int:
        """Optimizer steps over so many demonstrations."""
        return self.epochs * math.ceil(num_records / self.batch_size)


@dataclass(frozen=True)
class StartConfig:
    """A warm start by hand: supervised fine-tuning, without evaluation."""

    env: str = "textcraft"
    """environment whose oracle demonstrates"""
    model: str = "smollm2-135m"
    """what to start from: smollm2-135m, tiny, a path or a hub id"""
    out: str = "runs/sft"
    """folder of the checkpoint; must not exist"""
    data: tuple[str, ...] = ()
    """conversations to imitate: files of AgentTraj or messages, JSON or a line each, and runs;
    without it the oracle demonstrates training tasks"""
    min_return: float | None = None
    """of a run in --data: only trajectories that earned so much; solved ones earn 1 in textcraft,
    less in babyai (none: all)"""
    tasks: str | None = None
    """id list for the oracle; default: the environment's training split"""
    subtasks: tuple[str, ...] = ()
    """only these sub-tasks, e.g. "depth 1" "depth 2" """
    num_demonstrations: int = 128
    slips: float = 0.0
    """chance that the oracle makes a wrong move before a right one: it is not imitated, and what
    follows shows how to go on from it (0..1)"""
    thoughts: bool = True
    """whether the oracle says why it acts; --no-thoughts: turns are actions alone"""
    epochs: int = 2
    learning_rate: float = 1e-4
    batch_size: int = 8
    """demonstrations per optimizer step"""
    max_trajectory_tokens: int = 2048
    lora_rank: int = 0
    """train adapters of this rank and merge them (0: all weights)"""
    share_prefix: bool = True
    """compute what all demonstrations begin with once a step; --no-share-prefix for models whose
    attention is not plain and causal"""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """number format to compute in; auto: the faster one on this machine"""
    seed: int = 0


def start_options(argv: Sequence[str] | None, prog: str, description: str) -> StartConfig:
    """warmstart.py's options, checked, with what they name on this machine. No torch is needed for
    that.

    Raises:
        Misuse: one line that says what to do.
        SystemExit: misuse or --help, see `parse_command_line`.
    """
    config = parse_command_line(StartConfig, argv, prog, description=description)
    positive = ("num_demonstrations", "epochs", "batch_size", "max_trajectory_tokens")
    for name in (*positive, "learning_rate"):
        if not 0 < getattr(config, name) < math.inf:
            raise Misuse(f"{flag(name)} {getattr(config, name)} must be above 0, and finite")
    for name in ("lora_rank", "seed"):
        if getattr(config, name) < 0:
            raise Misuse(f"{flag(name)} {getattr(config, name)} must not be negative")
    if not 0 <= config.slips < 1:
        raise Misuse(f"{flag('slips')} {config.slips} must be a chance, 0 to 1")
    if Path(config.out).exists():
        raise Misuse(f"--out {config.out} exists; choose another folder")
    check_model(config.model)
    check_length(config.model, config.max_trajectory_tokens)
    if config.data:
        named = usage.named(StartConfig, sys.argv[1:] if argv is None else argv)
        if unused := named.keys() & {
            "num_demonstrations",
            "slips",
            "thoughts",
            "tasks",
            "subtasks",
        }:
            told = ", ".join(flag(name) for name in sorted(unused))
            raise Misuse(f"{told} has no effect here: --data says what is shown; leave it out")
        _check_data(config)
    elif config.min_return is not None:
        raise Misuse("--min-return chooses among the trajectories of a run: give it in --data")
    else:
        with refusing():
            split = None if config.tasks else "train"
            load_tasks(config.env, split, config.tasks, config.subtasks)
    return config


def settings_of(config: StartConfig) -> SftSettings:
    """How to train, of all that was asked."""
    names = SftSettings.__dataclass_fields__
    return SftSettings(**{name: value for name, value in asdict(config).items() if name in names})


def data_of(config: StartConfig) -> Iterator[Conversation]:
    """The conversations that --data names."""
    return read_conversations([Path(name) for name in config.data], config.min_return)


def _check_data(config: StartConfig) -> None:
    """Refuse what is not there, or cannot be learned from."""
    given = " ".join(config.data)
    try:
        count = sum(1 for _ in data_of(config))
    except OSError as error:
        problem = f"cannot be read ({error.strerror or error})"
        raise Misuse(f"--data {error.filename or given} {problem}") from error
    except ValueError as error:
        raise Misuse(f"--data {error}") from error
    if not count:
        enough = "" if config.min_return is None else f" that earned {config.min_return:g}"
        raise Misuse(f"--data {given} holds no conversation{enough}")
