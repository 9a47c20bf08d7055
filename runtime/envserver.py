"""A server of an environment on this machine, for as long as a block runs.

    >>> from envclient import connect
    >>> with local_server("textcraft", max_sessions=8) as url, connect("textcraft", url) as client:
    ...     client.reset(task_index=0).splitlines()[0]
    'Crafting commands:'

The server is a process of its own: the trainer's Python lock, its memory and its Ctrl-C stay apart
from the world's. Read next: envs/server.py.
"""

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from runtime.envhttp import EnvError

# The server runs under these lines, not plain `-m envs.server`, so that it cannot outlive us: its
# standard input is a pipe that only we hold open, and the kernel closes it however we die, SIGKILL
# included. PR_SET_PDEATHSIG would do less: it is Linux's alone, fires when the *thread* that began
# the child ends, and needs preexec_fn, which may deadlock beside the threads of torch and vLLM.
_RUN_WHILE_STDIN_IS_OPEN = """
import os, runpy, threading
threading.Thread(target=lambda: (os.read(0, 1), os._exit(0)), daemon=True).start()
runpy.run_module("envs.server", run_name="__main__", alter_sys=True)
"""


@contextmanager
def local_server(env: str, start_timeout_s: float = 60.0, **flags: Any) -> Iterator[str]:
    """`python -m envs.server --env ENV` on a free port of this machine; yields its base_url.

    The server is stopped when the block ends and dies with this process however that ends. Ctrl-C
    does not reach it, so that a run can finish its step and save.

    Arguments:
        start_timeout_s: seconds until the server must say that it listens.
        flags: further options of envs.server, as max_sessions=64, idle_timeout_s=600, port=36005.

    Raises:
        EnvError: it did not start; the message ends with what it wrote to stderr.
    """
    flags = {"port": 0, **flags}
    command = [sys.executable, "-c", _RUN_WHILE_STDIN_IS_OPEN, "--env", env]
    for flag, value in flags.items():
        command += [f"--{flag.replace('_', '-')}", str(value)]
    name = f"local {env} server"
    # Files, not pipes: nobody need read them for the server to go on writing.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        server = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=err,
            cwd=Path(__file__).parents[1],
            start_new_session=True,
        )
        match = None
        try:
            give_up_at = time.monotonic() + start_timeout_s
            while not (match := re.search(r"listening on (\S+)", _tail(out))):
                if server.poll() is not None:
                    raise EnvError(f"exited with {server.returncode} at start:\n{_tail(err)}", name)
                if time.monotonic() > give_up_at:
                    what = f"not listening after {start_timeout_s:g} s:\n{_tail(err)}"
                    raise EnvError(what, name)
                time.sleep(0.02)
            yield match[1]
        finally:
            if match and (server.poll() is not None or _tail(err)):  # warnings, tracebacks
                code = server.poll()
                how = "ran" if code is None else f"died with {code}"
                print(f"{name} {how}; stderr ends with:\n{_tail(err)}", file=sys.stderr)
            server.terminate()
            try:
                server.wait(timeout=8)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
            if server.stdin:
                server.stdin.close()


def _tail(file: Any, num_bytes: int = 2000) -> str:
    """The end of a file that another process writes (pread leaves their common offset alone)."""
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), num_bytes, max(0, size - num_bytes)).decode(errors="replace")
