"""A server of an environment on this machine, for as long as a block runs.

    >>> from envclient import connect
    >>> with local_server("textcraft", max_sessions=8) as url, connect("textcraft", url) as client:
    ...     client.reset(task_index=0).splitlines()[0]
    'Crafting commands:'

The server is a process of its own: the trainer's Python lock, its memory and its Ctrl-C stay apart
from the world's. Read next: envs/server.py.
"""

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from envs import Settings, settings_of
from envs.http import EnvError
from run.processes import NotReady, child
from run.progress import phase

ROOT = Path(__file__).parents[1]


@contextmanager
def local_server(env: str, start_timeout_s: float | None = None, **flags: Any) -> Iterator[str]:
    """`python -m envs.server --env ENV` on a free port of this machine; yields its base_url.

    The server is stopped when the block ends and dies with this process however that ends.

    Arguments:
        start_timeout_s: seconds until the server must say that it listens; None: the world's.
        flags: further options of envs.server, as max_sessions=64, idle_timeout_s=600, port=36005.

    Raises:
        EnvError: it did not start; the message ends with what it wrote.
    """
    words = ["--env", env]
    for flag, value in {"port": 0, **flags}.items():
        words += [f"--{flag.replace('_', '-')}", str(value)]
    name = f"local {env} server"
    if start_timeout_s is None:
        start_timeout_s = Settings.start_timeout_s
        with suppress(ValueError):  # no such world: the server says so
            start_timeout_s = settings_of(env).start_timeout_s
    with child("envs.server", *words, cwd=ROOT) as server:

        def listening() -> re.Match[str] | None:
            return re.search(r"listening on (\S+)", server.stdout())

        try:
            with phase(f"starting a server of {env}"):
                url = server.wait_until(listening, start_timeout_s)[1]
        except NotReady as error:
            raise EnvError(str(error), name) from None
        try:
            yield url
        finally:
            code, wrote = server.process.poll(), server.stderr()
            if code is not None or wrote:  # warnings, tracebacks
                how = "ran" if code is None else f"died with {code}"
                print(f"{name} {how}; stderr ends with:\n{wrote}", file=sys.stderr)
