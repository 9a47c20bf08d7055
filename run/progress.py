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
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from time import monotonic
from typing import Any

EVERY_S = 30.0  # between two lines
LOOK_S = 1.0  # between two looks at the clock
FAIR_SHARE = 0.1  # of a phase must be done before the rest is estimated
RECENT = 10  # steps whose time is typical of the next ones

# ------------------------------------------------------------------------------ a line every 30 s


class _Line:
    """What the phases of this process share."""

    def __init__(self) -> None:
        self.heading, self.last_s = "", monotonic()  # when a line was last printed
        self.open: list[Phase] = []  # phases under way, the innermost last


_line = _Line()


def heading(text: str) -> None:
    """Begin every line with this, as "step 12/60, 41 min left", until the next heading."""
    _line.heading = text


def spoke() -> None:
    """Another line was just printed: the next one is due in 30 s."""
    _line.last_s = monotonic()


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

    def left_s(self) -> float | None:
        """Seconds that the rest takes at this rate; None while it is too early to say."""
        if not self.total or self.done < FAIR_SHARE * self.total:
            return None
        return (monotonic() - self.began) * max(self.total - self.done, 0) / self.done

    def line(self) -> str:
        """`warm start: 12/32 steps, loss 0.41, 3 min left`."""
        if self.total is None:
            state = [f"{duration(monotonic() - self.began)} so far"]
        else:
            state = [f"{self.done:.0f}/{self.total:.0f} {self.unit}"]
        state += [f"{name} {value}" for name, value in self.figures.items()]
        left = self.left_s()
        state += [] if left is None else [f"{duration(left)} left"]
        return ": ".join([*filter(None, [_line.heading]), self.label, ", ".join(state)])

    def beat(self) -> None:
        """Print the line if one is due and no inner phase is open."""
        if _line.open[-1:] == [self] and monotonic() - _line.last_s >= EVERY_S:
            spoke()
            with contextlib.suppress(OSError, ValueError):  # the reader of a pipe has gone
                print(self.line(), flush=True)


@contextlib.contextmanager
def phase(label: str, total: float | None = None, unit: str = "") -> Iterator[Callable[..., None]]:
    """Show what the block does while it runs; yields `Phase.tick`. Only rank 0 shows it.

    With an empty label the phase around this one is shown.
    """
    if not label or int(os.environ.get("RANK", 0)) > 0:
        yield lambda done=1.0, **figures: None
        return
    if not _line.heading and not _line.open:  # outside of a run the silence begins here
        spoke()
    current = Phase(label, total, unit)
    _line.open.append(current)
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(LOOK_S):
            current.beat()

    # A daemon, waited for only briefly: it may be stuck in a pipe that nobody reads.
    thread = threading.Thread(target=beat, name="phase", daemon=True)
    thread.start()
    try:
        yield current.tick
    finally:
        ended.set()
        thread.join(timeout=LOOK_S)
        _line.open.remove(current)


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
    """How long a run still takes, from the steps it has made (rows of timings.jsonl).

        left after step t = (T - t) · median(recent steps, without evaluation)
                            + evaluations still due · median(evaluations)

    The median, because single steps are slow by accident; recent steps, because the horizon grows.

    Args:
        steps: number of the last step.
        evaluated: numbers of the steps that an evaluation follows.
    """

    def __init__(self, steps: int, evaluated: Sequence[int] = ()) -> None:
        self.steps, self.evaluated = steps, evaluated
        self.step_s, self.eval_s = deque[float](maxlen=RECENT), deque[float](maxlen=RECENT)

    def note(self, timings: Mapping[str, Any]) -> None:
        """A step's row of timings.jsonl, or the time of an evaluation alone."""
        evaluation, step_s = timings.get("time/eval_s"), timings.get("time/step_s")
        if evaluation is not None:
            self.eval_s.append(evaluation)
        if step_s is not None:
            self.step_s.append(step_s - (evaluation or 0.0))

    def after(self, step: int) -> float | None:
        """Seconds from the end of `step` to the end of the run; None before a step was timed.

        >>> left = TimeLeft(steps=60, evaluated=[20, 40, 60])
        >>> for seconds in (90, 40, 42, 41, 300):
        ...     left.note({"time/step_s": seconds})
        >>> left.note({"time/step_s": 142, "time/eval_s": 100})
        >>> left.after(50)
        520.0
        """
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

Columns = tuple[tuple[str, str, str], ...]  # heading, name, format

# "signal": groups that carry signal / groups.
COLUMNS: Columns = (
    ("return", "train/return_mean", "8.3f"),
    ("success", "train/success_rate", "8.1%"),
    ("turns", "train/turns_mean", "6.1f"),
    ("signal", "signal", "7"),
    ("loss", "policy/loss", "9.4f"),
    ("kl", "policy/kl", "9.5f"),
    ("entropy", "policy/entropy", "8.3f"),
    ("grad", "policy/grad_norm", "8.3f"),
    ("rollout s", "time/rollout_s", "10.1f"),
    ("update s", "time/update_s", "9.1f"),
    ("eval", "eval/avg", "7.1%"),
)
_RETURN, _SUCCESS, _, _, _LOSS, _, _ENTROPY, _GRAD, _, *_TIMES = COLUMNS
_IMITATION = (_LOSS, _ENTROPY, _GRAD, ("epoch", "data/epoch", "7.2f"))
COLUMNS_OF: dict[str, Columns] = {
    "rl": COLUMNS,
    "sft": (*_IMITATION, ("held-out loss", "eval/loss", "13.4f"), *_TIMES),
    "dpo": (
        _LOSS,
        ("margin", "preference/margin", "8.3f"),
        ("ordered", "preference/accuracy", "8.1%"),
        ("log-prob chosen", "preference/chosen_log_prob", "15.2f"),
        ("rejected", "preference/rejected_log_prob", "9.2f"),
        _GRAD,
        _RETURN,
        *_TIMES,
    ),
    "agentevol": (_RETURN, _SUCCESS, ("set", "data/evolving", "6"), *_IMITATION, *_TIMES),
}
STEP, LEFT = 9, 10  # widths of "1000/1000" and "25.5 days"
HEADER_EVERY = 20


def columns_of(method: str, envs: Sequence[str] = ()) -> Columns:
    """A method's columns; of several environments each return, instead of means and success.

    >>> [head for head, *_ in columns_of("rl", ["textcraft", "babyai"])][:3]
    ['textcraft', 'babyai', 'turns']
    """
    if len(envs) < 2:
        return COLUMNS_OF[method]
    returns = [(env, f"train/return_mean/{env}", "8.3f") for env in envs]
    columns: list[tuple[str, str, str]] = []
    for column in COLUMNS_OF[method]:
        columns += returns if column == _RETURN else [] if column == _SUCCESS else [column]
    return tuple(columns)


def table_header(columns: Columns = COLUMNS) -> str:
    cells = [head.rjust(_width(head, spec)) for head, _, spec in columns]
    return "".join(["step".rjust(STEP), *cells, "left".rjust(LEFT)])


def table_row(
    step: int,
    values: Mapping[str, Any],
    last_step: int | None = None,
    left_s: float | None = None,
    columns: Columns = COLUMNS,
) -> str:
    """One aligned line of metrics and timings; "-" stands for what is missing or not finite.

    Args:
        last_step: of the run; the first cell is then 12/60.
        left_s: seconds that the run still takes.
    """
    cells = [(str(step) if last_step is None else f"{step}/{last_step}").rjust(STEP)]
    for head, name, spec in columns:
        cells.append(_cell(values, name, spec).rjust(_width(head, spec)))
    return "".join([*cells, (duration(left_s) if left_s else "-").rjust(LEFT)])


def _cell(values: Mapping[str, Any], name: str, spec: str) -> str:
    if name == "signal" and values.get("train/groups") is not None:
        flat = values.get("train/groups_zero_variance", 0)
        return f"{values['train/groups'] - flat}/{values['train/groups']}"
    value = values.get(name)
    if value is None or not math.isfinite(value):
        return "-"
    return format(value, spec).strip()


def _width(head: str, spec: str) -> int:
    return max(len(head) + 2, int(spec.split(".")[0]) + 1)
