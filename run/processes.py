"""Child processes that end when their parent ends, even if the parent is killed.

    parent ── the only writing end of a pipe ──> the child's standard input, read by a thread

When the parent dies, even by SIGKILL, the kernel closes its end of the pipe. The child's thread
notices this and kills the child and all processes that the child has started. The alternative,
PR_SET_PDEATHSIG, exists only on Linux, fires when the *thread* that started the child ends, and
needs preexec_fn, which can deadlock with torch's threads.

Read next: `envclient.py` and `sampling/fleet.py`, which start child processes.
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
TAIL_BYTES = 4000  # of the child's output, in error messages

# `python -m MODULE`, which kills its process group when standard input is closed.
_RUN_WHILE_STDIN_IS_OPEN = """
import os, runpy, signal, sys, threading
end = lambda: (os.read(0, 1), os.killpg(0, signal.SIGKILL))
threading.Thread(target=end, daemon=True).start()
runpy.run_module(sys.argv.pop(1), run_name="__main__", alter_sys=True)
"""


class NotReady(RuntimeError):
    """A child ended or timed out before it was ready; the message includes its output."""


class Child:
    """A running process; `stdout()` and `stderr()` return the end of its output."""

    def __init__(self, process: subprocess.Popen[bytes], out: IO[bytes], err: IO[bytes]) -> None:
        self.process, self._out, self._err = process, out, err
        self._start_s = time.monotonic()

    def stdout(self) -> str:
        return _tail(self._out)

    def stderr(self) -> str:
        return _tail(self._err)

    def stop(self) -> None:
        """Terminate the process, and kill it and the processes that it started after 10 s."""
        self.process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def wait_until(self, condition: Callable[[], T | None], timeout_s: float) -> T:
        """Wait until `condition()` is true and return its value. Raises NotReady if the child ends
        first, or `timeout_s` after its start."""
        while not (value := condition()):
            problem = f"is not ready after {timeout_s:g} s"
            if self.process.poll() is not None:
                problem = f"exited with code {self.process.returncode} at startup"
            elif time.monotonic() < self._start_s + timeout_s:
                time.sleep(0.05)
                continue
            raise NotReady(f"{problem}:\n{self.stdout()}{self.stderr()}")
        return value


def python_path() -> str:
    """PYTHONPATH with absolute paths, so that it also works from another folder."""
    paths = os.environ.get("PYTHONPATH")
    return os.pathsep.join(map(os.path.abspath, paths.split(os.pathsep))) if paths else ""


@contextlib.contextmanager
def child(module: str, *arguments: str, **options: Any) -> Iterator[Child]:
    """Run `python -m MODULE ARGUMENTS` until the block or this process ends.

    The child is then terminated, and killed if it still runs after 10 s; the processes that it
    started are killed too. Ctrl-C in the terminal does not reach it, so a run can finish its step.
    `options` are passed to Popen.
    """
    command = [sys.executable, "-c", _RUN_WHILE_STDIN_IS_OPEN, module, *arguments]
    if path := python_path():
        options["env"] = (options.get("env") or os.environ) | {"PYTHONPATH": path}
    # Files instead of pipes: a child that writes to a full pipe blocks until someone reads it.
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
        running = Child(process, out, err)
        try:
            yield running
        finally:
            running.stop()


def _tail(file: IO[bytes]) -> str:
    """The end of a file that the child writes (pread does not move the offset they share)."""
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), TAIL_BYTES, max(0, size - TAIL_BYTES)).decode(errors="replace")
