"""An environment over HTTP: one FastAPI app, one world, many sessions.

Training needs hundreds of episodes side by side, on other machines, in worlds that are slow or
crash; a server per world keeps that out of the trainer. A *session* is one instance of the world
with a number; a client creates it, plays episodes in it, and closes it. Paths, fields and types are
AgentGym's, so its clients work here unchanged:

    POST /create                            -> {"id"}, TextCraft also observation, done, reward
    POST /reset  {"id", "data_idx", "seed"} -> {"id", "observation", "reward", "done", ...}
    POST /step   {"id", "action"}           -> {"observation", "reward", "done", ...}
    GET  /observation?id=   /detail?id=     -> the latest observation; with reward and done
    POST /close  {"id"}                     -> true, then false

("seed" is optional and ours; "..." stands for terminated, truncated, info, subtask.) Beyond
AgentGym: GET /health, /available_actions?id= (a list), /state?id= (a dict), /oracle?id=
({"thought", "action"}). An environment's `WIRE` says where its AgentGym server uses other names.

Errors are status codes with {"error": what was got, "hint": what to do}, so that a failure of the
world is never scored as a failure of the policy.
    404 unknown session or task   409 step before reset or after the end   413 body too large
    422 malformed request         429 too many sessions or connections     500 the world failed
    403 a web page asks: with an Origin, or, where only this machine is served, by another name
    408 a body that does not arrive     409 also a step out of turn, for clients that say which
/create shows a first observation where AgentGym's does, but an episode begins with /reset.

Run it:  python -m envs.server --env textcraft --port 36005
Read next: envs/sessions.py (who waits for whom), envs/seal.py (an answer names its question),
envs/limits.py (what a request may cost), then envclient.py, the other end of the wire.
"""

import argparse
import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import anyio.to_thread
from fastapi import FastAPI, Header, Query, Request
from fastapi.exceptions import RequestValidationError
from pydantic import Field, StrictInt, StrictStr, create_model
from starlette.exceptions import HTTPException

from envs import VERSION, Wire, env_name, get_env
from envs.limits import OWN_FILES, BodyLimit, NoWebPages, bounded_protocol, raise_file_limit
from envs.listening import leave, listen_on, names_of, serve, url_of, warn_of_strangers
from envs.options import parse
from envs.seal import TURN_HEADER, TURN_PATTERN, Sealed
from envs.sessions import Answer, ApiError, Episodes, Sessions, error_answer

TURN = Header(None, alias=TURN_HEADER, pattern=TURN_PATTERN)


def create_app(
    env: str,
    max_sessions: int = 1024,
    idle_timeout_s: float = 1800.0,
    max_body_bytes: int = 1_000_000,
    request_timeout_s: float = 30.0,
    env_class: Any = None,
    first_id: int | None = None,
    hosts: frozenset[str] = frozenset(),
) -> FastAPI:
    """The app that serves `env` (or `env_class` under that name, for tests).

    Arguments:
        max_sessions: sessions that may be open at once; one more /create is answered 429.
        idle_timeout_s: seconds without a request after which a session is closed.
        max_body_bytes: larger request bodies are answered 413.
        request_timeout_s: seconds for a request's body to arrive; then 408.
        first_id: number of the first session; None: at random (envs/sessions.py).
        hosts: names that it answers to, as a request's Host; none: any.

    Raises:
        ValueError: unknown environment.
    """
    name = env if env_class else env_name(env)
    sessions = Sessions(env_class or get_env(env), max_sessions, idle_timeout_s, first_id)
    episodes = Episodes(sessions)
    app = FastAPI(
        title=f"AgentGym environment {episodes.wire.title}",
        version=VERSION,
        lifespan=lambda _: _lifespan(sessions),
    )
    app.add_middleware(BodyLimit, max_body_bytes=max_body_bytes, timeout_s=request_timeout_s)
    app.add_middleware(NoWebPages, hosts=hosts)
    app.add_middleware(Sealed)
    app.state.sessions = sessions
    _add_playing(app, episodes)
    _add_questions(app, episodes)
    _add_health(app, sessions, name)
    for path, (http_method, method) in episodes.wire.paths.items():
        _add_path(app, episodes, path, http_method, method)
    _add_error_handlers(app)
    return app


@asynccontextmanager
async def _lifespan(sessions: Sessions) -> AsyncIterator[None]:
    """What all sessions share is there first and goes last; idle sessions are swept out."""

    async def sweep() -> None:
        while True:
            await asyncio.sleep(min(sessions.idle_timeout_s / 4, 30.0))
            await sessions.evict_idle()

    env_class = sessions.env_class
    if hasattr(env_class, "open_shared"):
        await anyio.to_thread.run_sync(env_class.open_shared)
    sweeper = asyncio.create_task(sweep())
    yield
    sweeper.cancel()
    for session_id in list(sessions.table):
        with contextlib.suppress(ApiError):  # logged by call(); the others are closed all the same
            await sessions.close(session_id)
    if hasattr(env_class, "close_shared"):
        await anyio.to_thread.run_sync(env_class.close_shared)


def _body(wire: Wire, name: str, **fields: Any) -> type:
    """The type of a request body that names a session, under this world's field names."""
    session_id: Any = (StrictInt, Field(alias=wire.session_field))
    return create_model(name, session_id=session_id, **fields)


def _step_body(wire: Wire) -> type:
    return _body(wire, "StepBody", action=(StrictStr, ...))


def _add_playing(app: FastAPI, episodes: Episodes) -> None:
    """/create, /reset, /step, /close."""
    sessions, wire = episodes.sessions, episodes.wire
    index_default = ... if wire.index_default is None else wire.index_default
    task_index = (StrictInt, Field(index_default, alias=wire.index_field))
    reset_body = _body(wire, "ResetBody", task_index=task_index, seed=(StrictInt, 0))

    @app.post("/create")
    async def create() -> Answer:
        session = await sessions.create()
        turn = None
        if wire.shows_task_at_create:  # as AgentGym: the n-th session's is task n
            number = session.session_id - sessions.first_id
            try:
                async with sessions.use(session.session_id):
                    turn = await episodes.show(session, number % episodes.num_tasks)
            except ApiError:  # nobody will ever hear of this session
                await sessions.close(session.session_id)
                raise
        return Answer(wire.create(session.session_id, turn))

    @app.post("/reset")
    @_takes(reset_body)
    async def reset(body: Any, turn: str | None = TURN) -> Answer:
        async with sessions.use(body.session_id) as session:
            shown = await episodes.begin(session, body.task_index, body.seed, turn)
            return Answer(wire.reset(session.session_id, shown, body.task_index))

    @app.post("/step")
    @_takes(_step_body(wire))
    async def step(body: Any, turn: str | None = TURN) -> Answer:
        async with sessions.use(body.session_id) as session:
            return Answer(wire.step(await episodes.step(session, body.action, turn)))

    @app.post("/close")
    @_takes(_body(wire, "CloseBody"))
    async def close(body: Any) -> Answer:
        return Answer(wire.close(await sessions.close(body.session_id)))


def _add_questions(app: FastAPI, episodes: Episodes) -> None:
    """What changes nothing: /observation, /detail; /available_actions, /state, /oracle."""
    sessions, wire = episodes.sessions, episodes.wire
    session_query = Query(alias=wire.session_field)

    @app.get("/observation")
    async def observation(session_id: int = session_query) -> Answer:
        async with sessions.use(session_id) as session:
            return Answer(wire.observation(episodes.latest(session)))

    @app.get("/detail")
    async def detail(session_id: int = session_query) -> Answer:
        async with sessions.use(session_id) as session:
            turn = episodes.latest(session)
            keys = ("observation", "done", "reward")
            return Answer({key: turn[key] for key in keys} | {"deleted": False})

    @app.get("/oracle")
    async def oracle(session_id: int = session_query) -> Answer:
        async with sessions.use(session_id) as session:
            thought, action = await episodes.ask(session, "oracle")
            return Answer({"thought": thought, "action": action})

    _add_path(app, episodes, "/available_actions", "GET", "available_actions")
    _add_path(app, episodes, "/state", "GET", "state_for_people")


def _add_path(app: FastAPI, episodes: Episodes, path: str, http_method: str, method: str) -> None:
    """A path that answers what a method of the world returns; see `Wire.paths`."""
    sessions, wire = episodes.sessions, episodes.wire

    async def by_query(session_id: int = Query(alias=wire.session_field)) -> Answer:
        async with sessions.use(session_id) as session:
            return Answer(await episodes.ask(session, method))

    @_takes(_body(wire, "CloseBody"))
    async def by_body(body: Any) -> Answer:
        async with sessions.use(body.session_id) as session:
            return Answer(await episodes.ask(session, method))

    @_takes(_step_body(wire))
    async def with_step(body: Any, turn: str | None = TURN) -> Answer:
        async with sessions.use(body.session_id) as session:
            answer = wire.step(await episodes.step(session, body.action, turn))
            return Answer(answer | await episodes.ask(session, method))

    endpoint = {"GET": by_query, "POST": by_body, "STEP": with_step}[http_method]
    verb = "GET" if http_method == "GET" else "POST"
    app.add_api_route(path, endpoint, methods=[verb], name=method)


def _add_health(app: FastAPI, sessions: Sessions, name: str) -> None:
    """/ and /health, which need no session."""
    started = time.monotonic()

    @app.get("/")
    async def root() -> Answer:
        return Answer(sessions.env_class.WIRE.root())

    @app.get("/health")
    async def health() -> Answer:
        return Answer(
            {
                "env": name,
                "version": VERSION,
                "live_sessions": len(sessions.table),
                "max_sessions": sessions.max_sessions,
                "uptime_s": round(time.monotonic() - started, 3),
            }
        )


def _takes(model: type) -> Callable:
    """Makes `model` the type of the endpoint's `body`, which is only known when the app is made."""

    def annotate(endpoint: Callable) -> Callable:
        endpoint.__annotations__["body"] = model
        return endpoint

    return annotate


def _add_error_handlers(app: FastAPI) -> None:
    """Every error leaves as {"error", "hint"}, those of FastAPI and Starlette included."""

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Answer:
        return error_answer(error.status, error.error, error.hint)

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> Answer:
        problems = [
            f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}"
            for item in error.errors()
        ]
        return error_answer(422, "; ".join(problems), "GET /docs shows each path's fields")

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Answer:
        if error.status_code == 400:  # FastAPI's word for a body that is no JSON at all
            return error_answer(422, "the body is not JSON", "send a JSON object in UTF-8")
        where = f"{request.method} {request.url.path}: {error.detail}"
        return error_answer(error.status_code, where, "GET /docs lists the paths")


def _max_connections(options: argparse.Namespace) -> int:
    """As many as were asked for, if so many files may be open."""
    asked = getattr(options, "max_connections", 2 * options.max_sessions + 256)
    files = raise_file_limit()
    possible = max(files - OWN_FILES, files // 2)
    if asked > possible:
        print(
            f"envs.server: warning: {possible} connections at once, not {asked}: this process may "
            "open no more files; ulimit -Hn says how many",
            file=sys.stderr,
        )
    return min(asked, possible)


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    options = parse(arguments)
    try:
        app = create_app(
            options.env,
            options.max_sessions,
            options.idle_timeout_s,
            options.max_body_bytes,
            options.request_timeout_s,
            hosts=names_of(options.host),
        )
        if hasattr(get_env(options.env), "open_shared"):  # what is missing is said in one line
            get_env(options.env).open_shared()
        listener = listen_on(options.host, options.port, options.request_timeout_s)
    except (OSError, ImportError, RuntimeError, ValueError) as error:
        where = f"{options.host}:{options.port}"
        free = "; --port 0 takes a free one" if "in use" in str(error) else ""
        why = f"cannot serve {options.env} on {where}: {error}{free}"
        print(f"envs.server: {why}", file=sys.stderr)
        return 1
    warn_of_strangers("envs.server", options.host, "open and play sessions")
    protocol = bounded_protocol(_max_connections(options), options.request_timeout_s)
    url = url_of(options.host, listener)
    return serve(
        app, listener, protocol, f"listening on {url} (env {options.env}, version {VERSION})"
    )


if __name__ == "__main__":
    leave(main())
