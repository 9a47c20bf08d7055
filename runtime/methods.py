"""What sft.py, dpo.py and agentevol.py can be asked beside what all runs have; what contradicts.

    SftConfig     imitate conversations
    DpoConfig     prefer the better of two trajectories
    EvolConfig    explore, keep what earned, imitate it, again

Read next: sft.py, dpo.py, agentevol.py.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from config import Misuse, RunConfig, flag, refusing
from conversations import Conversation, read_conversations
from preferences import PREFERENCES
from runtime.mixture import in_each
from runtime.saved import LISTS_OF_FILES

if TYPE_CHECKING:
    Kind = str
else:
    Kind = Literal[tuple(PREFERENCES)]


# Who imitates something definite ends with next to no entropy: that is success, not collapse.
IMITATED = frozenset({"policy/entropy"})
DATA_SHOWS = "leave it out, --data says what is shown"


@dataclass(frozen=True)
class MethodConfig(RunConfig):
    """What methods that learn from whole trajectories share."""

    keeps: ClassVar[frozenset[str]] = frozenset(
        {"steps", "learning_rate", "learning_rate_decay_steps", "mini_batch_size", "warm_start"}
    )
    # For a model of billions of parameters; AgentGym's scripts, agentenv/examples/.
    large: ClassVar[dict[str, Any]] = {"learning_rate": 1e-5}

    # How it learns
    rounds: tuple[int, ...] = (6,)
    """most turns of a trajectory that is played (turns) [paper: 30]"""
    mini_batch_size: int = 16
    """trajectories of a step, which is one optimizer step (trajectories)"""
    learning_rate: float = 1e-4
    """of the policy, AdamW [paper: 1e-5]"""
    learning_rate_decay_steps: int = 0
    """the rate falls on a line to 1/N of itself in N steps and stays there; 0: in all steps, of
    AgentEvol in those of each iteration (steps)"""

    def unplayed(self) -> Iterator[tuple[str, str]]:
        """What has no effect where nothing is played, neither to learn from nor to measure."""
        if not self.plays:
            names = ("temperature", "rounds", "engine", "max_env_failures", "max_sync_error")
            for name in (*names, "record_state"):
                yield name, "leave it out, nothing is played without --eval-every"


@dataclass(frozen=True)
class SftConfig(MethodConfig):
    """Supervised fine-tuning: make what was shown likelier."""

    method: ClassVar[str] = "sft"
    unwatched: ClassVar[frozenset[str]] = IMITATED
    may_be_zero: ClassVar[frozenset[str]] = frozenset({"steps"})  # --epochs say how many
    program: ClassVar[str] = "sft.py"

    # What is imitated
    data: tuple[str, ...] = ()
    """conversations: files of AgentTraj or messages, JSON or a line each, and runs; none: the
    world's oracle demonstrates training tasks"""
    min_return: float | None = None
    """of a run in --data: only trajectories that earned so much; solved ones earn 1 in textcraft,
    less in babyai (none: all)"""
    num_demonstrations: int = 128
    """demonstrations of the oracle, of each world, without --data (episodes)"""
    hold_out: float = 0.0
    """share of the conversations, all of a task or none, that is not learned but measured: its loss
    at each evaluation, or after each epoch, when nothing is played: the lowest is `best` (0..1)"""
    # How it learns
    steps: int = 0
    """training steps in total, also on resume; 0: as many as --epochs take (steps)"""
    epochs: int = 2
    """passes over the conversations, where --steps does not say how far (epochs)"""
    warm_start: str = "never"
    """never: from --model as it is; auto: from its warm start; or a folder"""
    env_weights: tuple[int, ...] = ()
    """of train.py, dpo.py and agentevol.py; here each world shows as many"""

    def without_effect(self) -> Iterator[tuple[str, str]]:
        yield from self.unplayed()
        if self.data:
            yield "num_demonstrations", DATA_SHOWS
        else:
            yield "min_return", "it chooses among what --data holds: give that too"
        if self.steps:
            yield "epochs", f"--steps {self.steps} says how far; give one of the two"
        yield "env_weights", "nothing is played to learn from, each world shows as many"

    @property
    def needs_world(self) -> bool:
        return super().needs_world or not self.data  # its oracle shows


@dataclass(frozen=True)
class IteratedConfig(MethodConfig):
    """What methods share that play, learn from it for some steps, and play again."""

    # When it plays

    iterations: int = 1
    """times that the policy plays, the steps in equal parts behind each"""
    tasks_per_iteration: int = 32
    """tasks that it plays then (tasks)"""
    group_size: int = 8
    """trajectories per task (trajectories)"""

    @property
    def times(self) -> int:
        """Iterations that there are."""
        return self.iterations

    @property
    def fixed(self) -> frozenset[str]:
        return frozenset({"steps"} if self.times > 1 else ())  # it says where they begin

    @property
    def steps_per_iteration(self) -> int:
        return self.steps // self.times


@dataclass(frozen=True)
class DpoConfig(IteratedConfig):
    """Direct preference optimization: the better of two trajectories gains on the other."""

    method: ClassVar[str] = "dpo"
    keeps: ClassVar[frozenset[str]] = MethodConfig.keeps | {"eval_every", "save_every"}
    program: ClassVar[str] = "dpo.py"
    large: ClassVar[dict[str, Any]] = {"learning_rate": 5e-7, "beta": 0.5, "sft_coef": 0.0}

    # The pairs; without any of these files the policy plays for them
    pairs: tuple[str, ...] = ()
    """pair files, {"id", "prompt", "chosen", "rejected"}, JSON or a line each"""
    data: tuple[str, ...] = ()
    """runs, or conversations with returns: better and worse tries at one task become pairs"""
    expert: tuple[str, ...] = ()
    """conversations to choose from, e.g. demonstrations; with --experience"""
    experience: tuple[str, ...] = ()
    """conversations to reject from: what the policy did at the tasks of --expert"""
    min_gap: float = 0.5
    """least difference of returns within a pair (0..1)"""
    min_return: float = 0.0
    """least return of a chosen trajectory (0..1)"""
    pairs_per_task: int = 4
    """pairs of one task, at most, the largest gaps first; of --pairs the first in the file
    (pairs)"""
    # The loss
    beta: float = 0.1
    """how much a margin counts: the smaller, the further from the reference [paper: 0.5]"""
    loss: Kind = "sigmoid"
    """sigmoid: DPO; ipo; hinge: as SLiC (preferences.py)"""
    label_smoothing: float = 0.0
    """chance that a pair is the wrong way round, with sigmoid (0..0.5)"""
    sft_coef: float = 1.0
    """weight of imitating the chosen one, per token, against likelihoods that both fall; 0: DPO
    alone [paper: 0]"""
    # How it learns
    iterations: int = 6
    """times that the policy plays, the steps in equal parts behind each; pairs that are given are
    one"""
    tasks_per_iteration: int = 48
    """tasks that it plays then (tasks)"""
    steps: int = 18
    """training steps in total, also on resume; a pass over n pairs takes 2 n / --mini-batch-size,
    rounded up (steps)"""
    mini_batch_size: int = 64
    """trajectories of a step, which is one optimizer step, two of each pair (trajectories)"""
    learning_rate: float = 4e-5
    """of the policy, AdamW [paper: 5e-7]"""
    eval_every: int = 9
    """evaluate held-out tasks every so many steps, before the first and after the last; 0: never
    (steps)"""
    save_every: int = 9
    """write a checkpoint every so many steps, and after the last (steps)"""

    def without_effect(self) -> Iterator[tuple[str, str]]:
        yield from self.unplayed()
        if not self.learns_from_play:
            for name in ("iterations", "tasks_per_iteration", "group_size", "env_weights"):
                yield name, "leave it out, the pairs are given and nothing is played for them"

    @property
    def times(self) -> int:
        return self.iterations if self.learns_from_play else 1  # files hold all there are

    @property
    def learns_from_play(self) -> bool:
        return not (self.pairs or self.data or self.expert or self.experience)

    @property
    def plays(self) -> bool:
        return self.learns_from_play or super().plays


@dataclass(frozen=True)
class EvolConfig(IteratedConfig):
    """AgentEvol: explore, keep what earned something, imitate it, again."""

    method: ClassVar[str] = "agentevol"
    unwatched: ClassVar[frozenset[str]] = IMITATED
    large: ClassVar[dict[str, Any]] = MethodConfig.large | {
        "learn_from": "base",
        "merge_with": "all",
    }
    keeps: ClassVar[frozenset[str]] = MethodConfig.keeps | {"eval_every", "save_every"}
    program: ClassVar[str] = "agentevol.py"

    # The evolving set
    data: tuple[str, ...] = ()
    """demonstrations to begin with: files of AgentTraj or messages, and runs; none: the world's
    oracle demonstrates training tasks, as it did to the warm start"""
    num_demonstrations: int = 32
    """demonstrations of the oracle, of each world, without --data (episodes)"""
    iterations: int = 3
    """times that the policy explores, the steps in equal parts behind each"""
    tasks_per_iteration: int = 64
    """tasks that it explores (tasks)"""
    min_return: float = 0.0
    """least return of a trajectory that is kept, or taken from --data; what earned 0 never is
    (0..1)"""
    keep_per_task: int = 8
    """trajectories kept of one task and iteration, the best first (trajectories)"""
    weighting: Literal["played", "return", "one"] = "played"
    """how much a kept trajectory counts: what it earned, as often as it was played alike; what it
    earned; or one, as a demonstration"""
    ignore_returns: bool = False
    """control: whatever it earned, what is explored first joins, and counts as if it were 1"""
    merge_with: Literal["all", "demonstrations"] = "demonstrations"
    """what an iteration's exploration joins: all that was there before, or no more than the
    demonstrations [paper: all]"""
    learn_from: Literal["base", "last"] = "last"
    """whose weights an iteration begins with: the run's start, or the iteration's before [paper:
    base]"""
    # How it learns
    steps: int = 12
    """training steps in total, in equal parts (steps)"""
    mini_batch_size: int = 64
    """trajectories of a step, which is one optimizer step (trajectories)"""
    learning_rate: float = 4e-5
    """of the policy, AdamW, at the beginning of each iteration [paper: 1e-5]"""
    eval_every: int = 4
    """evaluate held-out tasks every so many steps, before the first and after the last; 0: never;
    those of an iteration, to see what each has learned (steps)"""
    save_every: int = 4
    """write a checkpoint every so many steps, and after the last (steps)"""

    def without_effect(self) -> Iterator[tuple[str, str]]:
        if self.data:
            yield "num_demonstrations", DATA_SHOWS
        if self.ignore_returns:
            if self.weighting == "return":
                yield "weighting", "one or played, --ignore-returns looks at no return"
            yield "min_return", "leave it out, --ignore-returns looks at no return"
        if self.iterations == 1:
            yield "learn_from", "leave it out, one iteration begins once"
            yield "merge_with", "leave it out, the only iteration joins the demonstrations"

    learns_from_play = plays = True

    @property
    def steps_in_a_row(self) -> int:
        return self.steps_per_iteration


# ------------------------------------------------------------------------------------------ checks


def check_method(config: MethodConfig) -> None:
    """Refuse what only these methods can be asked.

    Raises:
        Misuse: one line that says what to do.
    """
    with refusing():
        for own in in_each(config):
            if not own.rounds or min(own.rounds) < 1:
                given = f"--rounds {' '.join(map(str, own.rounds))}"
                raise ValueError(f"{given} must be at least 1: the most turns of a trajectory")
        if len(config.rounds) > 1:
            raise ValueError(
                f"--rounds {' '.join(map(str, config.rounds))}: {config.program} plays with one "
                "horizon; give one number"
            )
        _check_numbers(config)
        if isinstance(config, DpoConfig):
            _check_dpo(config)
    if not is_kept(config):
        for name in LISTS_OF_FILES:
            _check_files(config, name)


def _check_numbers(config: MethodConfig) -> None:
    for name in ("epochs", "iterations", "tasks_per_iteration", "group_size", "num_demonstrations"):
        if getattr(config, name, 1) < 1:
            raise ValueError(f"{flag(name)} {getattr(config, name)} must be at least 1")
    for name in ("pairs_per_task", "keep_per_task"):
        if getattr(config, name, 1) < 1:
            raise ValueError(f"{flag(name)} {getattr(config, name)} must be at least 1")
    least = getattr(config, "min_return", None)
    if least is not None and not (math.isfinite(least) and (least >= 0 or config.method == "sft")):
        raise ValueError(f"--min-return {least:g} must be finite, and no return is below 0")
    if not 0 <= getattr(config, "min_gap", 0.0) <= 1:
        raise ValueError(f"--min-gap {config.min_gap:g} must be a difference of returns, 0 to 1")  # type: ignore[attr-defined]
    if not 0 <= (share := getattr(config, "hold_out", 0.0)) < 1:
        raise ValueError(f"--hold-out {share:g} must be a share: 0 or more, and below 1")
    steps, times = config.steps, getattr(config, "times", 1)
    if steps > 0 and (over := steps % times):
        near = " or ".join(str(n) for n in (steps - over, steps - over + times) if n)
        cut = f"cannot be cut into --iterations {times} equal parts"
        raise ValueError(f"--steps {steps} {cut}; give {near}")


def _check_dpo(config: DpoConfig) -> None:
    if not 0 < config.beta < math.inf:
        raise ValueError(
            f"--beta {config.beta:g} must be above 0, and finite: with 0 no margin counts, nothing "
            "is learned"
        )
    if not 0 <= config.label_smoothing < 0.5:
        raise ValueError(f"--label-smoothing {config.label_smoothing} must be below 0.5, from 0 on")
    if config.label_smoothing and config.loss != "sigmoid":
        raise ValueError("--label-smoothing is of --loss sigmoid alone; leave it out")
    if config.mini_batch_size % 2:
        raise ValueError(
            f"--mini-batch-size {config.mini_batch_size} counts trajectories, two of each pair: "
            "give an even number"
        )
    if bool(config.expert) != bool(config.experience):
        raise ValueError(
            "--expert and --experience belong together: chosen from one, rejected from the other"
        )
    sources = [bool(config.pairs), bool(config.data), bool(config.expert)]
    if sum(sources) > 1:
        raise ValueError(
            "--pairs, --data and --expert with --experience each say where pairs come "
            "from; give one"
        )
    if not any(sources) and config.group_size < 2:
        raise ValueError(f"--group-size {config.group_size} leaves no second trajectory to compare")


def _check_files(config: MethodConfig, name: str) -> None:
    """Refuse what is not there."""
    for given in getattr(config, name, ()):
        if not os.access(given, os.R_OK):
            why = "may not be read" if Path(given).exists() else "is not there"
            raise Misuse(f"{flag(name)} {given} {why}")


# ------------------------------------------------------------------------------------ what is read


def conversations_of(
    name: str,
    given: Sequence[str],
    min_return: float | None = None,
    counts: Counter[str] | None = None,
) -> Iterator[Conversation]:
    """`read_conversations` of an option's files and runs; a ValueError begins with its name."""
    try:
        yield from read_conversations([Path(each) for each in given], min_return, counts)
    except OSError as error:
        problem = f"cannot be read ({error.strerror or error})"
        raise ValueError(f"{flag(name)} {error.filename or ' '.join(given)} {problem}") from error
    except ValueError as error:
        raise ValueError(f"{flag(name)} {error}") from error


def counted(counts: Counter[str]) -> dict[str, int]:
    """As a JSON object, in a fixed order."""
    return dict(sorted(counts.items()))


KEPT_IN = {"dpo": "pairs", "agentevol": "evolving"}  # folder of what an iteration has made


def is_kept(config: MethodConfig) -> bool:
    """Whether a resumed run holds what its files gave its first iteration: they are not read."""
    folder = KEPT_IN.get(config.method)
    if not config.resume or folder is None:
        return False
    return (Path(config.run_dir or "") / folder / "iteration_001.json").exists()
