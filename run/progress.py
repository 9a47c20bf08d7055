"""Progress on the terminal: a table row after each step, and a line every 30 s in between.

    with phase("warm start", total=32, unit="steps") as tick:
        for batch in batches:
            tick(loss=f"{learn(batch):.2f}")

    step 12/60, 41 min left: rollout: 20/64 episodes, solved 14, 25 s left

When phases are nested, the line shows the innermost one. The table's columns depend on the method.

Read next: `run/clock.py`, which measures the phases of a step.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from time import monotonic, sleep
from typing import Any

EVERY_S = 30.0  # seconds between lines
CHECK_S = 1.0  # seconds between checks whether a line is due
MIN_SHARE = 0.1  # share of a phase that must be done before its remaining time is estimated
RECENT = 10  # number of past steps that predict how long the next ones take

# ------------------------------------------------------------------------------ a line every 30 s


class Phase:
    """Progress of one phase. `total` is None if nothing is counted; `unit` is a plural noun."""

    def __init__(self, label: str, total: float | None, unit: str) -> None:
        self.label, self.total, self.unit = label, total, unit
        self.num_done, self.start_s = 0.0, monotonic()
        self.figures: dict[str, str] = {}

    def tick(self, num_done: float = 1.0, **figures: str) -> None:
        """Count `num_done` more units as done; `figures`, such as loss="0.21", are printed too."""
        self.num_done += num_done
        self.figures = self.figures | figures  # a new dict: the thread may be reading the old one

    def line(self) -> str:
        """`warm start: 12/32 steps, loss 0.41, 3 min left`; the time left is omitted at first."""
        seconds = monotonic() - self.start_s
        state = [f"{duration(seconds)} so far"]
        if self.total is not None:
            state = [f"{self.num_done:.0f}/{self.total:.0f} {self.unit}"]
        state += [f"{name} {value}" for name, value in self.figures.items()]
        if self.total and self.num_done >= MIN_SHARE * self.total:
            left_s = seconds * max(self.total - self.num_done, 0) / self.num_done
            state.append(f"{duration(left_s)} left")
        return f"{self.label}: {', '.join(state)}"


class _Screen:
    """State that all phases of this process share."""

    def __init__(self) -> None:
        self.heading = ""
        self.last_s = monotonic()  # when a line was last printed
        self.phases: list[Phase] = []  # the open ones, innermost last


_screen = _Screen()


def heading(text: str) -> None:
    """Begin every line with this text, such as "step 12/60, 41 min left", until the next call."""
    _screen.heading = text


def restart_interval() -> None:
    """Call this after printing another line: the next progress line is then due in 30 s."""
    _screen.last_s = monotonic()


def _print_if_due() -> None:
    """Print the line of the innermost phase if 30 s have passed."""
    innermost = _screen.phases[-1:]
    if innermost and monotonic() - _screen.last_s >= EVERY_S:
        restart_interval()
        start = f"{_screen.heading}: " if _screen.heading else ""
        with contextlib.suppress(OSError, ValueError):  # stdout is a pipe that nobody reads
            print(start + innermost[0].line(), flush=True)


@functools.cache
def _start_thread() -> None:
    """Start the thread that prints, once per process. It can block on a pipe that nobody reads,
    so nothing waits for it."""

    def print_forever() -> None:
        while True:
            sleep(CHECK_S)
            _print_if_due()

    threading.Thread(target=print_forever, name="progress", daemon=True).start()


@contextlib.contextmanager
def phase(label: str, total: float | None = None, unit: str = "") -> Iterator[Callable[..., None]]:
    """Print the progress of the block while it runs; yields `Phase.tick`. Only rank 0 prints.

    With an empty label, the enclosing phase is printed instead.
    """
    if not label or int(os.environ.get("RANK", 0)) > 0:
        yield lambda num_done=1.0, **figures: None
        return
    if not _screen.heading and not _screen.phases:  # outside a run, the 30 s begin here
        restart_interval()
    current = Phase(label, total, unit)
    _screen.phases.append(current)
    _start_thread()
    try:
        yield current.tick
    finally:
        _screen.phases.remove(current)


@contextlib.contextmanager
def playing(label: str, total: int) -> Iterator[Callable[[Any], None]]:
    """A phase of `total` episodes; yields a function to call with each finished trajectory."""
    num_solved = 0
    with phase(label, total, "episodes") as tick:

        def on_end(trajectory: Any) -> None:
            nonlocal num_solved
            num_solved += trajectory.success
            tick(solved=f"{num_solved}")  # a percentage would mislead: solved episodes end first

        yield on_end


# --------------------------------------------------------------------------------------- time left


class TimeLeft:
    """Estimate of a run's remaining time, from the steps it has done so far.

        left after step t = (T - t) · median(recent steps, without evaluation)
                            + evaluations still due · median(evaluations)

    It uses medians because a single step can be slow by chance, and recent steps because the
    horizon grows. `steps` is T; `eval_steps` are the steps after which the policy is evaluated.
    """

    def __init__(self, steps: int, eval_steps: Sequence[int] = ()) -> None:
        self.steps, self.eval_steps = steps, eval_steps
        self.step_s, self.eval_s = deque[float](maxlen=RECENT), deque[float](maxlen=RECENT)

    def note(self, timings: Mapping[str, Any]) -> None:
        """Record a step's row of timings.jsonl, or only the time of an evaluation."""
        evaluation = timings.get("time/eval_s")
        if evaluation is not None:
            self.eval_s.append(evaluation)
        if "time/step_s" in timings:
            self.step_s.append(timings["time/step_s"] - (evaluation or 0.0))

    def after(self, step: int) -> float | None:
        """Seconds from the end of `step` to the end of the run; None until a step was timed."""
        if not self.step_s:
            return None
        num_evaluations = sum(eval_step > step for eval_step in self.eval_steps)
        training_s = (self.steps - step) * median(self.step_s)
        return training_s + num_evaluations * median(self.eval_s or [0.0])


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

Columns = Sequence[tuple[str, str, int, str]]  # heading, metric, width, format

CELLS = {  # heading -> metric, width, format; "signal": groups whose returns differ / all groups
    "return": ("train/return_mean", 9, ".3f"),
    "success": ("train/success_rate", 9, ".1%"),
    "turns": ("train/turns_mean", 7, ".1f"),
    "signal": ("signal", 8, ""),
    "loss": ("policy/loss", 10, ".4f"),
    "kl": ("policy/kl", 9, ".5f"),
    "entropy": ("policy/entropy", 9, ".3f"),
    "grad": ("policy/grad_norm", 9, ".3f"),
    "rollout s": ("time/rollout_s", 11, ".1f"),
    "update s": ("time/update_s", 10, ".1f"),
    "eval": ("eval/avg", 8, ".1%"),
    "epoch": ("data/epoch", 8, ".2f"),
    "held-out loss": ("eval/loss", 15, ".4f"),
    "margin": ("preference/margin", 9, ".3f"),
    "accuracy": ("preference/accuracy", 10, ".1%"),
    "log-prob chosen": ("preference/chosen_log_prob", 17, ".2f"),
    "rejected": ("preference/rejected_log_prob", 10, ".2f"),
    "set size": ("data/evolving", 10, ""),
}
_IMITATION = ("loss", "entropy", "grad", "epoch")
_PREFERENCE = ("margin", "accuracy", "log-prob chosen", "rejected")
_END = ("update s", "eval")
HEADINGS = {
    "rl": (
        *("return", "success", "turns", "signal"),
        *("loss", "kl", "entropy", "grad", "rollout s", *_END),
    ),
    "sft": (*_IMITATION, "held-out loss", *_END),
    "dpo": ("loss", *_PREFERENCE, "grad", "return", *_END),
    "agentevol": ("return", "success", "set size", *_IMITATION, *_END),
}
STEP_WIDTH, TIME_LEFT_WIDTH = 9, 11  # of "1000/1000" and "25.5 days"
HEADER_EVERY = 20  # rows


def columns_of(method: str, envs: Sequence[str] = ()) -> Columns:
    """A method's columns. With several environments there is one return column for each, instead
    of the mean return and the success rate.

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
    return "".join(["step".rjust(STEP_WIDTH), *cells, "time left".rjust(TIME_LEFT_WIDTH)])


def table_row(
    step: int,
    values: Mapping[str, Any],
    last_step: int | None = None,
    left_s: float | None = None,
    columns: Columns = COLUMNS,
) -> str:
    """One aligned row of metrics and timings, ending with the time left. A value that is missing
    or not finite is printed as "-"."""
    cells = [(f"{step}/{last_step}" if last_step else str(step)).rjust(STEP_WIDTH)]
    for _, name, width, spec in columns:
        cell, value = "-", values.get(name)
        if name == "signal" and values.get("train/groups") is not None:
            groups = values["train/groups"]
            cell = f"{groups - values.get('train/groups_zero_variance', 0)}/{groups}"
        elif value is not None and math.isfinite(value):
            cell = format(value, spec)
        cells.append(cell.rjust(width))
    return "".join([*cells, (duration(left_s) if left_s else "-").rjust(TIME_LEFT_WIDTH)])


# ------------------------------------------------------------------------- a terminal that closes


class _Output:
    """A text stream that drops what it cannot write any more."""

    def __init__(self, name: str, stream: Any) -> None:
        # None: closed before the program started.
        self._name, self._stream = name, stream or open(os.devnull, "w")  # noqa: SIM115

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._stream, name)
        return functools.partial(self._try, value) if name in ("write", "flush") else value

    def _try(self, action: Callable[..., Any], *arguments: str) -> Any:
        try:
            return action(*arguments)
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())
            note = f"note: {self._name} is closed; the program continues, and Ctrl-C stops it"
            print(note, file=sys.stdout if self is sys.stderr else sys.stderr, flush=True)


@contextlib.contextmanager
def output_that_can_close() -> Iterator[None]:
    """In this block, printing does not fail if its reader is gone, for example `head` or a
    terminal: a run goes on for hours without it."""
    stdout: Any = _Output("standard output", sys.stdout)
    stderr: Any = _Output("standard error", sys.stderr)
    with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        yield
