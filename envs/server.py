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
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, NoReturn

import anyio.to_thread
import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.routing import Route

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

    async def answer(request: Request) -> Answer:
        path, is_get = request.url.path, request.method != "POST"
        if problem := refusal(request, hosts):
            hint = "send requests from a program, to the address that the server printed"
            return error_answer(403, problem, hint)
        if is_get and path == "/":
            return Answer(episodes.wire.root())
        if is_get and path == "/health":
            state = {"live_sessions": len(sessions.table), "max_sessions": max_sessions}
            return Answer({"env": name, "version": VERSION, **state})
        try:
            body = await read_body(request)
            if len(body) > MAX_BODY_BYTES:
                return body_too_large()
            fields = query_fields(request.url.query) if is_get else json.loads(body or b"{}")
        except (ValueError, RecursionError, ClientDisconnect):
            return error_answer(422, "the body is not JSON", "send a JSON object in UTF-8")
        return await episodes.answer(request.method, path, fields)

    return Starlette(
        routes=[Route("/{path:path}", answer, methods=["GET", "POST"])],
        lifespan=lambda _: _lifespan(sessions),
    )


def refusal(request: Request, hosts: frozenset[str]) -> str:
    """Why a request is refused; "" if it is not. A web page's request has an Origin header or,
    after DNS rebinding, the page's name as Host."""
    if "origin" in request.headers:
        return "requests from web pages are refused"
    host = re.sub(r":\d*$", "", request.headers.get("host", "")).lower()
    is_known = not hosts or host in hosts
    return "" if is_known else f"this server does not answer to the name {host!r}"


async def read_body(request: Request) -> bytes:
    """Read the body. If it is too large, also read and drop the rest, because a client that is
    still sending would not see the answer 413."""
    body = bytearray()
    async for chunk in request.stream():
        if len(body) <= MAX_BODY_BYTES:
            body += chunk
    return bytes(body)


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


# ----------------------------------------------------------------------- an app on a port


class _Server(uvicorn.Server):
    """A uvicorn server that prints `line` as soon as it listens."""

    line = ""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            print(self.line, flush=True)


def serve(app: Starlette, listener: socket.socket, line: str) -> int:
    """Serve `app` until SIGTERM or Ctrl-C; return the exit code. Print `line` as soon as clients
    can connect."""
    # Every connection is an open file, and the usual limit of 1,024 is reached soon.
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_files = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    with suppress(ValueError):  # macOS may have a lower limit of its own
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
    server.line = line
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
    is_local = host in ("127.0.0.1", "localhost", "::1")
    task = f"serve {env}"
    try:
        hosts = LOCAL_NAMES if is_local else frozenset()
        app = create_app(env, options.max_sessions, options.idle_timeout_s, hosts=hosts)
        task += f" on {host}:{options.port}"
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, options.port), family=family, backlog=2048)
    except (OSError, ImportError, RuntimeError, ValueError) as error:
        hint = "; --port 0 picks a free port" if "in use" in str(error) else ""
        print(f"envs.server: cannot {task}: {error}{hint}", file=sys.stderr)
        return 1
    if not is_local:
        warning = f"{host} can be reached from other machines without a password"
        print(f"envs.server: warning: {warning}", file=sys.stderr)
    url = f"http://{f'[{host}]' if ':' in host else host}:{listener.getsockname()[1]}"
    return serve(app, listener, f"listening on {url} (env {env}, version {VERSION})")


if __name__ == "__main__":
    leave(main())
