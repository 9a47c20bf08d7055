"""Sessions: which request may touch which instance of the world, and when.

A session is one instance of an environment with a number. This file holds the table of sessions,
the episodes that are played in them, and the three limits that keep a server alive: how many may be
open, how long one may be idle, how large a request body may be.

Who waits for whom. All endpoints are coroutines on one event loop, and only that loop touches the
table of sessions, so the table needs no lock. A session is used by one request at a time: each has
an asyncio lock, and who waits for it holds no thread. A call into a fast world (TextCraft: 2
microseconds) runs right there, because a hop to a thread costs fifty times the step; any other
world's calls run in a pool of threads, so a slow step delays its own session only, as long as
fewer than NUM_THREADS steps are slow at once.

Numbers begin at random in every server process. If they began at 0, a client that comes back after
a restart would name a session that is somebody else's by now, and its episode would go on there
without an error; so an old number is unknown, and nobody guesses one.

Measured: benchmarks/server.py. Read next: envs/server.py, the paths.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import anyio
import anyio.to_thread
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from envs import EpisodeEndedError, NotResetError, OracleLost, TaskIndexError

NUM_THREADS = 128  # for worlds that are not fast
DRAIN_BYTES = 16_000_000  # what is read and dropped of a too large body, so the client sees the 413
log = logging.getLogger("envs.server")


class Answer(JSONResponse):
    """JSON in ASCII: a model may write half a surrogate pair, which UTF-8 cannot carry."""

    def render(self, content: Any) -> bytes:
        return json.dumps(content, allow_nan=False, separators=(",", ":")).encode("ascii")


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, error: str, hint: str) -> None:
        super().__init__(error)
        self.status, self.error, self.hint = status, error, hint


def error_answer(status: int, error: str, hint: str) -> Answer:
    headers = {"Retry-After": "1"} if status == 429 else None
    return Answer({"error": error, "hint": hint}, status, headers)


@dataclass
class Session:
    """One instance of the world and what its latest reset or step answered."""

    session_id: int
    env: Any
    turn: dict | None = None
    task_index: int = 0
    has_episode: bool = False  # /reset was called
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    last_used: float = field(default_factory=time.monotonic)


class Sessions:
    """The table of sessions; every method runs on the event loop."""

    def __init__(
        self,
        env_class: Any,
        max_sessions: int,
        idle_timeout_s: float,
        first_id: int | None = None,
    ) -> None:
        """first_id: the first session's number; None: at random, exact in a double as JSON is."""
        self.env_class, self.max_sessions = env_class, max_sessions
        self.first_id = secrets.randbelow(2**52) if first_id is None else first_id
        self.idle_timeout_s = idle_timeout_s
        self.table: dict[int, Session] = {}
        self._numbers = itertools.count(self.first_id)
        self._num_starting = 0
        self._threads: anyio.CapacityLimiter | None = None

    async def call(self, function: Callable, *arguments: Any) -> Any:
        """Runs a method of the world, here or in a thread; its failures become ApiErrors."""
        try:
            if self.env_class.IS_FAST:
                return function(*arguments)
            if self._threads is None:
                self._threads = anyio.CapacityLimiter(NUM_THREADS)
            return await anyio.to_thread.run_sync(function, *arguments, limiter=self._threads)
        except TaskIndexError as error:
            raise ApiError(404, str(error), "give the index of a task that exists") from error
        except NotResetError as error:
            raise ApiError(409, str(error), "POST /reset starts an episode") from error
        except OracleLost as error:
            raise ApiError(409, str(error), "the episode goes on; POST /step plays it") from error
        except EpisodeEndedError as error:
            raise ApiError(409, str(error), "POST /reset starts the next episode") from error
        except Exception as error:
            log.exception("%s failed in the environment", getattr(function, "__name__", function))
            raise ApiError(
                500,
                f"the environment failed: {type(error).__name__}: {error}",
                "the traceback is in the server's log; the session may be reset or closed",
            ) from error

    async def create(self) -> Session:
        if len(self.table) + self._num_starting >= self.max_sessions:
            await self.evict_idle()
        if len(self.table) + self._num_starting >= self.max_sessions:
            raise ApiError(
                429,
                f"{self.max_sessions} sessions are open, the most this server allows",
                "close sessions, retry later, or start the server with a larger --max-sessions",
            )
        self._num_starting += 1
        try:
            env = await self.call(self.env_class)
        finally:
            self._num_starting -= 1
        session = Session(next(self._numbers), env)
        self.table[session.session_id] = session
        return session

    @asynccontextmanager
    async def use(self, session_id: int) -> AsyncIterator[Session]:
        """The session, for this request alone, after those that came before it.

        Raises:
            ApiError: 404 if there is no such session: never created, closed, or evicted.
        """
        session = self.table.get(session_id)
        if session is None:
            raise ApiError(
                404,
                f"session {session_id} does not exist",
                f"POST /create opens one; sessions unused for {self.idle_timeout_s:g} s are closed",
            )
        async with session.lock:
            try:
                session.last_used = time.monotonic()
                yield session
            finally:
                session.last_used = time.monotonic()

    async def close(self, session_id: int) -> bool:
        """Ends the session after the requests that already wait for it; False if there is none."""
        session = self.table.pop(session_id, None)
        if session is None:
            return False
        async with session.lock:  # asyncio's locks serve in the order of asking
            await self.call(session.env.close)
        return True

    async def evict_idle(self) -> None:
        limit = time.monotonic() - self.idle_timeout_s
        for session in list(self.table.values()):
            if session.last_used < limit and not session.lock.locked():
                with contextlib.suppress(ApiError):  # logged by call(); it is out of the table
                    await self.close(session.session_id)


class Episodes:
    """Plays in sessions that are in use: each has an episode only from /reset to its end."""

    def __init__(self, sessions: Sessions) -> None:
        self.sessions, self.env_class = sessions, sessions.env_class
        self.wire = sessions.env_class.WIRE
        self.num_tasks = sessions.env_class.num_tasks()  # loads what all sessions share, now

    async def show(self, session: Session, task_index: int, seed: int = 0) -> dict:
        """Resets the world; the turn, as `Wire` describes it. `begin` makes it an episode."""
        observation = await self._play(session, session.env.reset, task_index, seed)
        session.task_index = task_index
        info = {"success": False, "score": 0}
        return self._set_turn(session, (observation, 0, False, False, info))

    async def begin(self, session: Session, task_index: int, seed: int) -> dict:
        turn = await self.show(session, task_index, seed)
        session.has_episode = True
        return turn

    async def step(self, session: Session, action: str) -> dict:
        """Raises ApiError 409 before an episode and after its end."""
        self._require_episode(session)
        if session.turn is not None and session.turn["done"]:
            hint = "POST /reset starts the next episode"
            raise ApiError(409, f"the episode of session {session.session_id} is over", hint)
        return self._set_turn(session, await self._play(session, session.env.step, action))

    async def ask(self, session: Session, method: str) -> Any:
        """What a method of the world answers that changes nothing."""
        self._require_episode(session)
        return await self.sessions.call(getattr(session.env, method))

    def latest(self, session: Session) -> dict:
        """The turn of the latest reset or step."""
        if session.turn is None:
            self._require_episode(session)
        return session.turn or {}

    async def _play(self, session: Session, function: Callable, *arguments: Any) -> Any:
        try:
            return await self.sessions.call(function, *arguments)
        except ApiError as error:
            if error.status == 500:  # the world is in an unknown state: only a reset repairs it
                session.has_episode = False
            raise

    def _require_episode(self, session: Session) -> None:
        if not session.has_episode:
            raise ApiError(
                409,
                f"session {session.session_id} has no episode",
                f"POST /reset with {self.wire.session_field} and {self.wire.index_field} "
                "starts one",
            )

    def _set_turn(self, session: Session, outcome: tuple) -> dict:
        observation, reward, terminated, truncated, info = outcome
        session.turn = {
            "observation": observation,
            "reward": self.wire.to_points(reward),
            "done": terminated or truncated,
            "terminated": terminated,
            "truncated": truncated,
            "info": info,
            "subtask": self.env_class.subtask(session.task_index),
        }
        return session.turn


class NoWebPages:
    """ASGI middleware: a page in somebody's browser must neither play here nor read along.

    Its requests carry an Origin; and one whose own name was made to mean this machine (DNS
    rebinding) carries that name as Host. `hosts`: the names to answer to; none: to any.
    """

    def __init__(self, app: ASGIApp, hosts: frozenset[str]) -> None:
        self.app, self.hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
            host = re.sub(r":\d*$", "", headers.get(b"host", "")).lower()
            problem = "requests of web pages are refused" if b"origin" in headers else ""
            if self.hosts and host not in self.hosts:
                problem = f"this server does not answer to the name {host!r}"
            if problem:
                hint = "ask from a program, at the address that the server printed"
                await error_answer(403, problem, hint)(scope, receive, send)
                return
        await self.app(scope, receive, send)


class BodyLimit:
    """ASGI middleware: reads the body itself and stops at the limit, so neither a missing nor a
    wrong Content-Length makes the server hold more than `max_body_bytes` a request."""

    def __init__(self, app: ASGIApp, max_body_bytes: int) -> None:
        self.app, self.max_body_bytes = app, max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
            await self.app(scope, receive, send)
            return
        body, num_bytes, more = bytearray(), 0, True
        while more and num_bytes <= DRAIN_BYTES:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            num_bytes += len(message.get("body", b""))
            if num_bytes <= self.max_body_bytes:
                body += message.get("body", b"")
            more = message.get("more_body", False)
        if num_bytes > self.max_body_bytes:
            error = f"the body is larger than {self.max_body_bytes} bytes"
            await error_answer(413, error, "send a shorter action")(scope, receive, send)
            return
        replay: list[Message] = [{"type": "http.request", "body": bytes(body), "more_body": False}]

        async def receive_body() -> Message:
            return replay.pop() if replay else await receive()

        await self.app(scope, receive_body, send)
