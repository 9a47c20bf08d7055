"""Ctrl-C without loss: a rollout stops at once, an update is finished first.

    with StopRequests() as stop:
        with stop.allowed():        no weights change here: KeyboardInterrupt at once
            roll_out()
        update()                    the request is remembered
        if stop.agreed():           all processes get the same answer
            save()

Read next: `run/session.py`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from types import FrameType

from scale import distributed


class StopRequests:
    """Ctrl-C and SIGTERM (which job schedulers send), answered where nothing is lost.

    A second Ctrl-C leaves at once, without saving. A launcher passes Ctrl-C on, so that its
    processes get it twice: under one, two within seconds count as the same request.
    """

    SAME_REQUEST_S = 3.0

    def __init__(self) -> None:
        self.requested = False
        self._allowed = False
        self._when = 0.0
        self._is_launched = "WORLD_SIZE" in os.environ

    def __enter__(self) -> StopRequests:
        signals = (signal.SIGINT, signal.SIGTERM)
        self._before = {s: signal.signal(s, self._on_signal) for s in signals}
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """Around work that may be interrupted."""
        if self.requested:
            raise KeyboardInterrupt
        self._allowed = True
        try:
            yield
        finally:
            self._allowed = False

    def agreed(self) -> bool:
        """Whether any process was asked to stop. Collective."""
        if any(distributed.gather(self.requested)) and not self.requested:
            self.requested, self._when = True, time.monotonic()  # its own may be on its way
        return self.requested

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self.requested:
            is_recent = time.monotonic() - self._when < self.SAME_REQUEST_S
            if is_recent and self._is_launched:
                return
            os.write(2, b"\nstopped without saving\n")
            os._exit(130)
        self.requested, self._when = True, time.monotonic()
        if distributed.rank() == 0:
            os.write(2, b"\nstopping; Ctrl-C again leaves without saving\n")
        if self._allowed:
            raise KeyboardInterrupt
