"""What a run is busy with and how long it takes: a line every 30 s.

    with phase("warm start", total=32, unit="steps") as tick:
        for batch in batches:
            tick(loss=f"{learn(batch):.2f}")

    step 12/60, 41 min left: rollout: 20/64 episodes, solved 14, 25 s left

Of nested phases the innermost is shown, and of several processes rank 0 shows.

Read next: `run/clock.py`, which measures the phases of a step.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import median
from time import monotonic
from typing import Any

EVERY_S = 30.0  # between two lines
LOOK_S = 1.0  # between two looks at the clock
FAIR_SHARE = 0.1  # of a phase, after which the rest is guessed: the first ones to end tell little
RECENT = 10  # steps whose time is typical of the next ones


class _Line:
    """What the phases of this process share."""

    def __init__(self) -> None:
        self.heading, self.last_s = "", monotonic()  # when a line was last printed
        self.open: list[Phase] = []  # phases under way, the innermost last


_line = _Line()


def heading(text: str) -> None:
    """Where the run is, as "step 12/60, 41 min left": begins every line until the next heading."""
    _line.heading = text


def spoke() -> None:
    """Somebody else has just printed a line: the next one is due in 30 s."""
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
        """Print the line if one is due."""
        if _line.open[-1:] == [self] and monotonic() - _line.last_s >= EVERY_S:
            spoke()
            with contextlib.suppress(OSError, ValueError):  # nobody reads our lines any more
                print(self.line(), flush=True)


@contextlib.contextmanager
def phase(label: str, total: float | None = None, unit: str = "") -> Iterator[Callable[..., None]]:
    """Show what the block does while it runs; yields `Phase.tick`, to be called as it gets on.

    An empty label shows nothing, so that the phase around this one is shown.
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

    # A daemon, waited for only briefly: a pipe that nobody reads must not keep us from leaving.
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


class TimeLeft:
    """How long a run still takes, from the steps it has made (rows of timings.jsonl).

        left after step t = (T - t) · median(recent steps, without evaluation)
                            + evaluations still due · median(evaluations)

    A median, since single steps are slow for reasons of their own; of recent steps, since the
    horizon grows.

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
    """A time to wait for, as short as it can be told.

    >>> [duration(s) for s in (0, 89, 91, 41 * 60, 3 * 3600, 100 * 3600)]
    ['0 s', '89 s', '2 min', '41 min', '3.0 h', '4.2 days']
    """
    if seconds < 90:
        return f"{seconds:.0f} s"
    if seconds < 90 * 60:
        return f"{seconds / 60:.0f} min"
    if seconds < 72 * 3600:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 86400:.1f} days"
