"""An app on a port until it is told to stop: what the env server and a retrieval service share.

Read next: envs/limits.py, what a stranger's request may cost; envs/server.py.
"""

import os
import signal
import socket
import sys
from typing import Any, NoReturn

import uvicorn
from fastapi import FastAPI

from envs.limits import end_unread_answers

LOCAL = frozenset({"127.0.0.1", "localhost", "[::1]"})  # what this machine calls itself


def names_of(host: str) -> frozenset[str]:
    """Names, as a request's Host, that whoever listens on this address answers to; none: any."""
    return LOCAL if host in ("127.0.0.1", "localhost", "::1") else frozenset()


def listen_on(host: str, port: int, timeout_s: float) -> socket.socket:
    """A listening socket; port 0 takes a free one.

    Args: timeout_s: how long a client may take to receive what it is sent.
    Raises: OSError: the port is taken, the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=2048)
    end_unread_answers(listener, timeout_s)
    return listener


def url_of(host: str, listener: socket.socket) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"


def warn_of_strangers(program: str, host: str, what_they_can: str) -> None:
    """Where an address can be reached from other machines, say so."""
    if not names_of(host):
        print(
            f"{program}: warning: {host} can be reached from other machines, and there is no "
            f"password; anyone there can {what_they_can}",
            file=sys.stderr,
        )


class _Server(uvicorn.Server):
    """Says where it listens once it does."""

    line = ""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            print(self.line, flush=True)


def serve(app: FastAPI, listener: socket.socket, protocol: Any, line: str) -> int:
    """Until SIGTERM or Ctrl-C; the exit code.

    Args:
        protocol: envs/limits.py's bounded one.
        line: printed once clients can connect.
    """
    config = uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=5,
    )
    server = _Server(config)
    server.line = line
    # uvicorn stops on SIGTERM and then raises it again; taken here, the exit code is 0.
    signal.signal(signal.SIGTERM, lambda *_: setattr(server, "should_exit", True))
    try:
        server.run(sockets=[listener])
    except KeyboardInterrupt:
        return 130
    return 0 if server.started else 1


def leave(code: int) -> NoReturn:
    """End this process now. Python would wait for threads first, and a world that hangs in one of
    them never lets go."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
