"""What `python -m envs.server` is told: the world, the address, and the limits that keep it alive.

Read next: envs/limits.py, which sets the limits of requests; envs/sessions.py, those of sessions.
"""

import argparse
from collections.abc import Callable
from typing import Any

from envs import ENVS, get_env


def positive(kind: type) -> Callable:
    def convert(text: str) -> Any:
        if not 0 < kind(text) < float("inf"):
            raise ValueError
        return kind(text)

    convert.__name__ = f"positive {kind.__name__}"
    return convert


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The options; misuse ends the process with one line and exit code 2."""
    parser = argparse.ArgumentParser(
        prog="python -m envs.server",
        description="Serve one environment over HTTP.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    # argparse prints its usage and an error; misuse is one line here.
    parser.error = lambda message: parser.exit(2, f"envs.server: {message}\n")  # type: ignore
    known = f"which world to serve: {', '.join(sorted(ENVS))}, or package.module:Class"
    parser.add_argument("--env", required=True, default=argparse.SUPPRESS, help=known)
    parser.add_argument("--host", default="127.0.0.1", help="address to bind")
    parser.add_argument("--port", type=int, default=36005, help="0 takes a free port")
    _add_limits(parser)
    options = parser.parse_args(arguments)
    if not 0 <= options.port <= 65535:
        parser.error(f"--port {options.port} is not a port; choose 0 to 65535")
    try:
        get_env(options.env)
    except ValueError as error:
        parser.error(f"--env: {error}")
    except ImportError:
        pass  # the world is there and lacks a package: main() says so
    return options


def _add_limits(parser: argparse.ArgumentParser) -> None:
    sessions = parser.add_argument_group(
        "sessions", "a session is one instance of the world, in which a client plays its episodes"
    )
    sessions.add_argument(
        "--max-sessions", type=positive(int), default=1024, help="open at once; beyond it, 429"
    )
    sessions.add_argument(
        "--idle-timeout-s",
        type=positive(float),
        default=1800.0,
        help="seconds without a request after which a session is closed: its client has died",
    )
    requests = parser.add_argument_group(
        "requests", "what a request may cost, whoever sends it; the trainer's stay far below"
    )
    requests.add_argument(
        "--max-body-bytes",
        type=positive(int),
        default=1_000_000,
        help="of a request's body; a larger one is answered 413",
    )
    requests.add_argument(
        "--request-timeout-s",
        type=positive(float),
        default=30.0,
        help="seconds for a request to arrive, head and body each; then its connection is closed",
    )
    requests.add_argument(
        "--max-connections",
        type=positive(int),
        default=argparse.SUPPRESS,
        help="open at once; those that ask nothing make room, beyond it 429 "
        "(default: two for each of --max-sessions, and 256)",
    )
