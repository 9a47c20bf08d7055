"""A child process that cannot outlive us, however we end.

    us ── the only open end of a pipe ──> its standard input, which a thread of its own waits on

The kernel closes our end when we die, SIGKILL included; the thread then ends the child and all that
it has started. PR_SET_PDEATHSIG exists only on Linux, fires when the *thread* that started the
child ends, and needs preexec_fn, which can deadlock beside torch's threads.

Read next: `envclient.py` and `sampling/fleet.py`, which start one.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import IO, Any, TypeVar

T = TypeVar("T")
TAIL_BYTES = 4000  # of what a child wrote, in messages

# `python -m MODULE` in a process group of its own, which ends when standard input does.
_RUN_WHILE_STDIN_IS_OPEN = """
import os, runpy, signal, sys, threading
end = lambda: (os.read(0, 1), os.killpg(0, signal.SIGKILL))
threading.Thread(target=end, daemon=True).start()
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


class NotReady(RuntimeError):
    """A child ended, or took too long, before it was ready; the message has its output."""


class Child:
    """A running process; `stdout()` and `stderr()` are the ends of what it wrote."""

    def __init__(self, process: subprocess.Popen[bytes], out: IO[bytes], err: IO[bytes]) -> None:
        self.process, self._out, self._err = process, out, err
        self._started = time.monotonic()

    def stdout(self) -> str:
        return _tail(self._out)

    def stderr(self) -> str:
        return _tail(self._err)

    def wait_until(self, ready: Callable[[], T | None], timeout_s: float) -> T:
        """The first true answer of `ready`; NotReady when the child ends, or `timeout_s` after its
        start."""
        while not (answer := ready()):
            how = f"is not up after {timeout_s:g} s"
            if self.process.poll() is not None:
                how = f"exited with {self.process.returncode} at its start"
            elif time.monotonic() < self._started + timeout_s:
                time.sleep(0.05)
                continue
            raise NotReady(f"{how}:\n{self.stdout()}{self.stderr()}")
        return answer


def python_path() -> str:
    """PYTHONPATH as absolute paths, for a process in another folder."""
    paths = os.environ.get("PYTHONPATH")
    return os.pathsep.join(map(os.path.abspath, paths.split(os.pathsep))) if paths else ""


@contextlib.contextmanager
def child(module: str, *arguments: str, **options: Any) -> Iterator[Child]:
    """`python -m MODULE ARGUMENTS`, ended with the block, and with this process.

    It is terminated, after 10 s killed, and what it has started is killed with it. Ctrl-C in the
    terminal does not reach it, so a run can finish its step. `options` go to Popen.
    """
    command = [sys.executable, "-c", _RUN_WHILE_STDIN_IS_OPEN, module, *arguments]
    if path := python_path():
        options["env"] = (options.get("env") or os.environ) | {"PYTHONPATH": path}
    # Files, not pipes: a child that writes into a full pipe would wait for a reader.
    with (
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=err,
            start_new_session=True,
            **options,
        ) as process,
    ):
        try:
            yield Child(process, out, err)
        finally:
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=10)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def _tail(file: IO[bytes]) -> str:
    """The end of a file that another process writes (pread leaves their common offset alone)."""
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), TAIL_BYTES, max(0, size - TAIL_BYTES)).decode(errors="replace")
