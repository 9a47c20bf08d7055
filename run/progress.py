"""What a run prints while it works: a row for each step, and a line every 30 s in between.

    with phase("warm start", total=32, unit="steps") as tick:
        for batch in batches:
            tick(loss=f"{learn(batch):.2f}")

    step 12/60, 41 min left: rollout: 20/64 episodes, solved 14, 25 s left

Of nested phases the innermost is shown. Each method has its own columns of metrics.

Read next: `run/clock.py`, which measures the phases of a step.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from time import monotonic, sleep
from typing import Any

EVERY_S = 30.0  # between two lines
LOOK_S = 1.0  # between two looks at the clock
FAIR_SHARE = 0.1  # of a phase must be done before the rest is estimated
RECENT = 10  # steps whose time is typical of the next ones

# ------------------------------------------------------------------------------ a line every 30 s


class Phase:
    """How far a phase is. `total` is None where nothing is counted; `unit` is a plural."""

    def __init__(self, label: str, total: float | None, unit: str) -> None:
        self.label, self.total, self.unit = label, total, unit
        self.done, self.began = 0.0, monotonic()
        self.figures: dict[str, str] = {}

    def tick(self, done: float = 1.0, **figures: str) -> None:
        """`done` more of the total is done; `figures` say how it goes, as loss="0.21"."""
        self.done += done
        self.figures = self.figures | figures  # a new dict: the thread may be reading the old one

    def line(self) -> str:
        """`warm start: 12/32 steps, loss 0.41, 3 min left`; what is left, once enough is done."""
        seconds = monotonic() - self.began
        state = [f"{duration(seconds)} so far"]
        if self.total is not None:
            state = [f"{self.done:.0f}/{self.total:.0f} {self.unit}"]
        state += [f"{name} {value}" for name, value in self.figures.items()]
        if self.total and self.done >= FAIR_SHARE * self.total:
            left_s = seconds * max(self.total - self.done, 0) / self.done
            state.append(f"{duration(left_s)} left")
        return f"{self.label}: {', '.join(state)}"


class _Screen:
    """What the phases of this process share."""

    def __init__(self) -> None:
        self.heading = ""
        self.last_s = monotonic()  # when a line was last printed
        self.phases: list[Phase] = []  # under way, the innermost last


_screen = _Screen()


def heading(text: str) -> None:
    """Begin every line with this, as "step 12/60, 41 min left", until the next heading."""
    _screen.heading = text


def spoke() -> None:
    """Another line was just printed: the next one is due in 30 s."""
    _screen.last_s = monotonic()


def _look() -> None:
    """Print the line of the innermost phase if one is due."""
    innermost = _screen.phases[-1:]
    if innermost and monotonic() - _screen.last_s >= EVERY_S:
        spoke()
        start = f"{_screen.heading}: " if _screen.heading else ""
        with contextlib.suppress(OSError, ValueError):  # the reader of a pipe has gone
            print(start + innermost[0].line(), flush=True)


@functools.cache
def _watch() -> None:
    """Start the thread that looks, once per process. It may get stuck in a pipe that nobody reads,
    so nothing waits for it."""

    def look_for_ever() -> None:
        while True:
            sleep(LOOK_S)
            _look()

    threading.Thread(target=look_for_ever, name="progress", daemon=True).start()


@contextlib.contextmanager
def phase(label: str, total: float | None = None, unit: str = "") -> Iterator[Callable[..., None]]:
    """Show what the block does while it runs; yields `Phase.tick`. Only rank 0 shows it.

    With an empty label the phase around this one is shown.
    """
    if not label or int(os.environ.get("RANK", 0)) > 0:
        yield lambda done=1.0, **figures: None
        return
    if not _screen.heading and not _screen.phases:  # outside of a run the silence begins here
        spoke()
    current = Phase(label, total, unit)
    _screen.phases.append(current)
    _watch()
    try:
        yield current.tick
    finally:
        _screen.phases.remove(current)


@contextlib.contextmanager
def playing(label: str, total: int) -> Iterator[Callable[[Any], None]]:
    """A phase of `total` episodes; yields a function to call with each trajectory that ended."""
    solved = 0
    with phase(label, total, "episodes") as tick:

        def on_end(trajectory: Any) -> None:
            nonlocal solved
            solved += trajectory.success
            tick(solved=f"{solved}")  # not as a share: the solved ones end first

        yield on_end


# ------------------------------------------------------------------------ how long it still takes


class TimeLeft:
    """How long a run still takes, from the steps it has made.

        left after step t = (T - t) · median(recent steps, without evaluation)
                            + evaluations still due · median(evaluations)

    The median, because single steps are slow by accident; recent steps, because the horizon grows.
    `steps` is T, `evaluated` the numbers of the steps that an evaluation follows.
    """

    def __init__(self, steps: int, evaluated: Sequence[int] = ()) -> None:
        self.steps, self.evaluated = steps, evaluated
        self.step_s, self.eval_s = deque[float](maxlen=RECENT), deque[float](maxlen=RECENT)

    def note(self, timings: Mapping[str, Any]) -> None:
        """A step's row of timings.jsonl, or the time of an evaluation alone."""
        evaluation = timings.get("time/eval_s")
        if evaluation is not None:
            self.eval_s.append(evaluation)
        if "time/step_s" in timings:
            self.step_s.append(timings["time/step_s"] - (evaluation or 0.0))

    def after(self, step: int) -> float | None:
        """Seconds from the end of `step` to the end of the run; None before a step was timed."""
        if not self.step_s:
            return None
        evaluations = sum(at > step for at in self.evaluated)
        learning = (self.steps - step) * median(self.step_s)
        return learning + evaluations * median(self.eval_s or [0.0])


def duration(seconds: float) -> str:
    """
    >>> [duration(s) for s in (0, 89.4, 90, 41 * 60, 5399, 5400, 3 * 3600, 72 * 3600)]
    ['0 s', '89 s', '2 min', '41 min', '90 min', '1.5 h', '3.0 h', '3.0 days']
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    if seconds < 72 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.1f} days"


# -------------------------------------------------------------------------------- a row for a step

Columns = Sequence[tuple[str, str, int, str]]  # heading, name, width, format

CELLS = {  # heading -> name, width, format; "signal": groups that carry signal / groups
    "return": ("train/return_mean", 9, ".3f"),
    "success": ("train/success_rate", 9, ".1%"),
    "turns": ("train/turns_mean", 7, ".1f"),
    "signal": ("signal", 8, ""),
    "loss": ("policy/loss", 10, ".4f"),
    "kl": ("policy/kl", 10, ".5f"),
    "entropy": ("policy/entropy", 9, ".3f"),
    "grad": ("policy/grad_norm", 9, ".3f"),
    "rollout s": ("time/rollout_s", 11, ".1f"),
    "update s": ("time/update_s", 10, ".1f"),
    "eval": ("eval/avg", 8, ".1%"),
    "epoch": ("data/epoch", 8, ".2f"),
    "held-out loss": ("eval/loss", 15, ".4f"),
    "margin": ("preference/margin", 9, ".3f"),
    "ordered": ("preference/accuracy", 9, ".1%"),
    "log-prob chosen": ("preference/chosen_log_prob", 17, ".2f"),
    "rejected": ("preference/rejected_log_prob", 10, ".2f"),
    "set": ("data/evolving", 7, ""),
}
_IMITATION = ("loss", "entropy", "grad", "epoch")
_PREFERENCE = ("margin", "ordered", "log-prob chosen", "rejected")
_END = ("update s", "eval")
HEADINGS = {
    "rl": (
        *("return", "success", "turns", "signal"),
        *("loss", "kl", "entropy", "grad", "rollout s", *_END),
    ),
    "sft": (*_IMITATION, "held-out loss", *_END),
    "dpo": ("loss", *_PREFERENCE, "grad", "return", *_END),
    "agentevol": ("return", "success", "set", *_IMITATION, *_END),
}
STEP, LEFT = 9, 10  # widths of "1000/1000" and "25.5 days"
HEADER_EVERY = 20


def columns_of(method: str, envs: Sequence[str] = ()) -> Columns:
    """A method's columns; of several environments each return, instead of means and success.

    >>> [head for head, *_ in columns_of("rl", ["textcraft", "babyai"])][:3]
    ['textcraft', 'babyai', 'turns']
    """
    columns: list[tuple[str, str, int, str]] = []
    for head in HEADINGS[method]:
        name, width, spec = CELLS[head]
        if head == "return" and len(envs) > 1:
            columns += [(env, f"{name}/{env}", max(width, len(env) + 2), spec) for env in envs]
        elif head != "success" or len(envs) < 2:
            columns.append((head, name, width, spec))
    return columns


COLUMNS = columns_of("rl")


def table_header(columns: Columns = COLUMNS) -> str:
    cells = [head.rjust(width) for head, _, width, _ in columns]
    return "".join(["step".rjust(STEP), *cells, "left".rjust(LEFT)])


def table_row(
    step: int,
    values: Mapping[str, Any],
    last_step: int | None = None,
    left_s: float | None = None,
    columns: Columns = COLUMNS,
) -> str:
    """One aligned line of metrics and timings, with the time that the run still takes. "-" stands
    for what is missing or not finite."""
    cells = [(f"{step}/{last_step}" if last_step else str(step)).rjust(STEP)]
    for _, name, width, spec in columns:
        cell, value = "-", values.get(name)
        if name == "signal" and values.get("train/groups") is not None:
            groups = values["train/groups"]
            cell = f"{groups - values.get('train/groups_zero_variance', 0)}/{groups}"
        elif value is not None and math.isfinite(value):
            cell = format(value, spec)
        cells.append(cell.rjust(width))
    return "".join([*cells, (duration(left_s) if left_s else "-").rjust(LEFT)])
