"""Serve an environment over HTTP: one environment, many sessions.

Training plays hundreds of episodes in parallel, in environments that can be slow or crash. A server
keeps both problems out of the trainer. A client creates a session, which is one instance of the
environment, plays episodes in it and closes it. Paths, fields and types are those of AgentGym, so
AgentGym's clients work unchanged:

    POST /create                            -> {"id"}; TextCraft adds observation, done, reward
    POST /reset  {"id", "data_idx", "seed"} -> {"id", "observation", "reward", "done", ...}
    POST /step   {"id", "action"}           -> {"observation", "reward", "done", ...}
    GET  /observation?id=                   -> the latest observation
    GET  /detail?id=                        -> the same with reward and done
    POST /close  {"id"}                     -> true, or false if it is not open

"..." stands for terminated, truncated, info and subtask. AgentGym has neither the optional "seed"
nor these paths: GET /health, /available_actions?id= (a list), /state?id= (a dict) and /oracle?id=
({"thought", "action"}). If AgentGym's server for an environment uses other names, the class's
`WIRE` defines them.

An error is a status code with the body {"error": what happened, "hint": what to do}, so a failure
of the environment is never counted as a failure of the policy. Status codes: 403 request from a web
page, 404 unknown session or task, 409 step before reset or after the end, 413 body too large, 422
malformed body, 429 too many sessions, 500 the environment failed.

Run it:  python -m envs.server --env textcraft --port 36005
Read next: envs/sessions.py (the order in which requests run), then envclient.py, the client.
"""

import argparse
import asyncio
import json
import os
import re
import resource
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import anyio.to_thread
import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from envs import ENVS, VERSION, ClassError, call_class, env_name, get_env
from envs.sessions import (
    MAX_BODY_BYTES,
    Answer,
    Episodes,
    Sessions,
    body_too_large,
    error_answer,
    log_once,
    query_fields,
)

MAX_FILES = 65_536  # some machines allow a billion, and programs that close them all become slow
LOCAL_NAMES = frozenset({"127.0.0.1", "localhost", "[::1]"})  # Host names of this machine


def create_app(
    env: str,
    max_sessions: int = 1024,
    idle_timeout_s: float = 1800.0,
    env_class: Any = None,
    first_id: int | None = None,
    hosts: frozenset[str] = frozenset(),
) -> Starlette:
    """The app that serves `env`, or `env_class` under that name. It answers only requests whose
    Host header is in `hosts`; with an empty set it answers all."""
    name = env if env_class else env_name(env)
    sessions = Sessions(env_class or get_env(env), max_sessions, idle_timeout_s, first_id)
    call_class(sessions.env_class, "open_shared")  # if a package is missing, fail now
    episodes = Episodes(sessions)
    start_time = time.monotonic()

    async def root(_: Request) -> Answer:
        return Answer(episodes.wire.root())

    async def health(_: Request) -> Answer:
        return Answer(
            {
                "env": name,
                "version": VERSION,
                "live_sessions": len(sessions.table),
                "max_sessions": max_sessions,
                "uptime_s": round(time.monotonic() - start_time, 3),
            }
        )

    async def play(request: Request) -> Response:
        try:
            if request.method == "GET":
                fields: Any = query_fields(request.url.query)
            else:
                fields = json.loads(await request.body() or b"{}")
        except (ValueError, RecursionError):
            return error_answer(422, "the body is not JSON", "send a JSON object in UTF-8")
        return await episodes.answer(request.method, request.url.path, fields)

    return Starlette(
        routes=[
            Route("/", root),
            Route("/health", health),
            Route("/{path:path}", play, methods=["GET", "POST"]),
        ],
        middleware=[Middleware(Guard, hosts=hosts)],
        lifespan=lambda _: _lifespan(sessions),
    )


CLOSE_S = 5.0  # for all environments to close when the server ends


@asynccontextmanager
async def _lifespan(sessions: Sessions) -> AsyncIterator[None]:
    """Close idle sessions regularly, and at the end all sessions and the shared resources."""

    async def sweep() -> None:
        while True:
            await asyncio.sleep(min(sessions.idle_timeout_s / 4, 30.0))
            sessions.evict_idle()

    sweeper = asyncio.create_task(sweep())
    yield
    sweeper.cancel()
    closing = [asyncio.ensure_future(sessions.close(session)) for session in list(sessions.table)]
    if closing:  # an environment that hangs must not keep the others or the server
        await asyncio.wait(closing, timeout=CLOSE_S)
    try:
        await anyio.to_thread.run_sync(call_class, sessions.env_class, "close_shared")
    except ClassError as error:
        log_once(str(error))


# ------------------------------------------------------ which requests are accepted, and their size


class Guard:
    """ASGI middleware that refuses requests from web pages and limits the size of the body.

    A web page's request has an Origin header or, after DNS rebinding, the page's name as Host.

    Args:
        hosts: the Host names to accept; an empty set accepts all.
    """

    def __init__(
        self, app: ASGIApp, hosts: frozenset[str] = frozenset(), max_bytes: int = MAX_BODY_BYTES
    ) -> None:
        self.app, self.hosts, self.max_bytes = app, hosts, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        host = re.sub(r":\d*$", "", headers.get(b"host", b"").decode("latin-1")).lower()
        hint = "send requests from a program, to the address that the server printed"
        if b"origin" in headers:
            refusal = error_answer(403, "requests from web pages are refused", hint)
            await refusal(scope, receive, send)
        elif self.hosts and host not in self.hosts:
            refusal = error_answer(403, f"this server does not answer to the name {host!r}", hint)
            await refusal(scope, receive, send)
        elif len(body := await self._read(receive)) > self.max_bytes:
            await body_too_large(self.max_bytes)(scope, receive, send)
        else:
            pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

            async def receive_body() -> Message:
                return pending.pop() if pending else await receive()

            await self.app(scope, receive_body, send)

    async def _read(self, receive: Receive) -> bytes:
        """Read the body. If it is too large, also read and drop the rest, because a client that is
        still sending would not see the answer 413."""
        body, has_more = bytearray(), True
        while has_more:
            message = await receive()
            if len(body) <= self.max_bytes:
                body += message.get("body", b"")
            has_more = message.get("more_body", False)
        return bytes(body)


def hosts_of(host: str) -> frozenset[str]:
    """The Host names that a server bound to `host` accepts; an empty set means all."""
    return LOCAL_NAMES if host in ("127.0.0.1", "localhost", "::1") else frozenset()


# ----------------------------------------------------------------------- an app on a port


class _Server(uvicorn.Server):
    """A uvicorn server that prints `line` as soon as it listens."""

    line = ""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            print(self.line, flush=True)


def listen_on(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 picks a free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=2048)


def serve(app: Any, host: str, listener: socket.socket, program: str, about: str) -> int:
    """Serve `app` until SIGTERM or Ctrl-C; return the exit code. As soon as clients can connect,
    print a line with the address and `about`."""
    if not hosts_of(host):
        print(
            f"{program}: warning: {host} can be reached from other machines without a password",
            file=sys.stderr,
        )
    # Every connection is an open file, and the usual limit of 1,024 is reached soon.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_files = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, hard))
    config = uvicorn.Config(
        app,
        ws="none",
        log_level="warning",
        access_log=False,
        limit_concurrency=num_files * 3 // 4,  # the rest is for files of the environment
        timeout_graceful_shutdown=5,
    )
    server = _Server(config)
    url = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
    server.line = f"listening on {url} ({about})"
    # uvicorn stops on SIGTERM and then raises it again. With our own handler the exit code is 0.
    signal.signal(signal.SIGTERM, lambda *_: setattr(server, "should_exit", True))
    try:
        server.run(sockets=[listener])
    except KeyboardInterrupt:
        return 130
    return 0 if server.started else 1


def leave(code: int) -> NoReturn:
    """Exit without waiting for threads, because an environment can hang in one of them."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


# ----------------------------------------------------------------------- the command line


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m envs.server",
        description="Serve one environment over HTTP.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    # argparse would print its usage first.
    parser.error = lambda message: parser.exit(2, f"envs.server: {message}\n")  # type: ignore
    choices = f"environment to serve: {', '.join(sorted(ENVS))}, or package.module:Class"
    parser.add_argument("--env", required=True, default=argparse.SUPPRESS, help=choices)
    parser.add_argument("--host", default="127.0.0.1", help="address to bind")
    parser.add_argument("--port", type=int, default=36005, help="port; 0 picks a free one")
    parser.add_argument(
        "--max-sessions",
        type=int,
        default=1024,
        help="maximum number of open sessions; opening more fails with status 429",
    )
    parser.add_argument(
        "--idle-timeout-s",
        type=float,
        default=1800.0,
        help="close a session after this many seconds without a request",
    )
    options = parser.parse_args(arguments)
    for name in ("max_sessions", "idle_timeout_s"):
        if not 0 < (value := getattr(options, name)) < float("inf"):
            parser.error(f"--{name.replace('_', '-')} {value} must be above 0")
    if not 0 <= options.port <= 65535:
        parser.error(f"--port {options.port} is not a port; choose 0 to 65535")
    try:
        get_env(options.env)
    except ValueError as error:
        parser.error(f"--env: {error}")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    env, host = options.env, options.host
    task = f"serve {env}"
    try:
        app = create_app(env, options.max_sessions, options.idle_timeout_s, hosts=hosts_of(host))
        task += f" on {host}:{options.port}"
        listener = listen_on(host, options.port)
    except (OSError, ImportError, RuntimeError, ValueError) as error:
        hint = "; --port 0 picks a free port" if "in use" in str(error) else ""
        print(f"envs.server: cannot {task}: {error}{hint}", file=sys.stderr)
        return 1
    return serve(app, host, listener, "envs.server", f"env {env}, version {VERSION}")


if __name__ == "__main__":
    leave(main())
