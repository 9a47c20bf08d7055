"""What a run is busy with, for whoever waits: a bar on a terminal, a line every 30 s elsewhere.

    with phase("warm start", total=32, unit="steps") as tick:
        for batch in batches:
            tick(loss=f"{learn(batch):.2f}")

    step 12/60, 41 min left: rollout: 20/64 episodes, solved 14, 25 s left

A bar goes to stderr, where that is a terminal; a line goes to stdout, as the table of steps does,
unless both are one: `train.py > log` has bar and lines, `train.py 2>&1 | tee log` has lines. A
phase that counts nothing (a server starts, weights are copied) has lines in any case. Of phases
within phases the innermost speaks, and of several processes rank 0.

Read next: `run/clock.py`, which measures the phases of a step.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

EVERY_S = 30.0  # between two lines
LOOK_S = 1.0  # between two looks at the clock
FAIR_SHARE = 0.1  # of a phase, after which the rest is guessed: the first ones to end tell little


class Line:
    """The line that all phases of this process share: what precedes it, and when it was last said.

    Attributes:
        heading: where the run is, said before the phase.
        spoke_at: seconds of the clock at the last line, of a phase or of the run's table.
        open: the phases that are under way, the innermost last.
    """

    def __init__(self) -> None:
        self.heading, self.spoke_at = "", time.monotonic()
        self.open: list[Phase] = []


_line = Line()


def heading(text: str) -> None:
    """Where the run is, as "step 12/60, 41 min left": said before every phase until the next."""
    _line.heading = text


def spoke() -> None:
    """Somebody else has just written a line: the next one need not come before 30 s."""
    _line.spoke_at = time.monotonic()


class Phase:
    """How far a phase is.

    Args:
        label: what is done.
        total: how much there is to do; None where nothing is counted.
        unit: of the total, in the plural.
        clock: seconds.
    """

    def __init__(
        self, label: str, total: float | None, unit: str, clock: Callable[[], float]
    ) -> None:
        self.label, self.total, self.unit, self.clock = label, total, unit, clock
        self.done, self.began = 0.0, clock()
        self.figures: dict[str, str] = {}
        self.bar: Any = None

    def tick(self, done: float = 1.0, **figures: str) -> None:
        """`done` more of the total is done; `figures` say how it goes, as loss="0.21"."""
        self.done += done
        self.figures = self.figures | figures  # another dict: the thread may be reading this one
        if self.bar is not None:
            self.bar.set_postfix(self.figures, refresh=False)
            self.bar.update(round(self.done) - self.bar.n)

    def left_s(self) -> float | None:
        """Seconds that the rest takes if it goes as before; None while there is no telling."""
        if not self.total or self.done < FAIR_SHARE * self.total:
            return None
        return (self.clock() - self.began) * max(self.total - self.done, 0) / self.done

    def line(self) -> str:
        """`warm start: 12/32 steps, loss 0.41, 3 min left`."""
        if self.total is None:
            state = [f"{duration(self.clock() - self.began)} so far"]
        else:
            state = [f"{self.done:.0f}/{self.total:.0f} {self.unit}"]
        state += [f"{name} {value}" for name, value in self.figures.items()]
        left = self.left_s()
        state += [] if left is None else [f"{duration(left)} left"]
        return ": ".join([*filter(None, [_line.heading]), self.label, ", ".join(state)])

    def beat(self) -> None:
        """Say the line if it is time; what a terminal shows gets no older than a second."""
        if _line.open[-1:] != [self]:
            return
        if self.bar is not None:
            self.bar.refresh()
        shown = self.bar is not None and sys.stdout.isatty()
        if not shown and self.clock() - _line.spoke_at >= EVERY_S:
            _line.spoke_at = self.clock()
            # Whoever read our lines may be gone: the run itself will find that out.
            with contextlib.suppress(OSError, ValueError):
                print(self.line(), flush=True)


@contextlib.contextmanager
def phase(
    label: str,
    total: float | None = None,
    unit: str = "",
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Callable[..., None]]:
    """
    Show what the block does for as long as it runs.

    Args: see Phase; an empty label shows nothing, where a phase around this one does.
    Returns: `Phase.tick`, to be called as the block gets on.
    """
    if not label:
        yield lambda done=1.0, **figures: None
        return
    current = Phase(label, total, unit, clock)
    if int(os.environ.get("RANK", 0)) > 0:  # as launchers say it: torch need not be loaded here
        yield current.tick
        return
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(LOOK_S):
            current.beat()

    with contextlib.ExitStack() as stack:
        if total is not None and sys.stderr.isatty():
            current.bar = stack.enter_context(_bar(current))
        if not _line.heading and not _line.open:  # outside of a run there is no silence to break
            _line.spoke_at = clock()
        _line.open.append(current)
        stack.callback(_line.open.remove, current)
        # A daemon, and waited for shortly: a pipe that nobody reads must not keep us from leaving.
        thread = threading.Thread(target=beat, name="phase", daemon=True)
        thread.start()
        stack.callback(thread.join, timeout=LOOK_S)
        stack.callback(ended.set)
        yield current.tick


def _bar(current: Phase) -> Any:
    from tqdm import tqdm

    desc = ": ".join(filter(None, [_line.heading, current.label]))
    options = {"leave": False, "nrows": 20}  # some terminals say 0, and tqdm would hide the bar
    return tqdm(total=current.total, desc=desc, unit=f" {current.unit}", **options)


class Ended(Protocol):
    """An episode that is over."""

    @property
    def success(self) -> bool: ...


@contextlib.contextmanager
def playing(label: str, total: int) -> Iterator[Callable[[Ended], None]]:
    """A phase of `total` episodes; to be called with each one that ended."""
    solved = 0
    with phase(label, total, "episodes") as tick:

        def on_end(episode: Ended) -> None:
            nonlocal solved
            solved += episode.success
            tick(solved=f"{solved}")  # no share: those that are solved end first

        yield on_end


def duration(seconds: float) -> str:
    """
    A time that one waits for, as short as it can be told.

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
