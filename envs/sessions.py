"""Sessions: which request may touch which instance of an environment, and what it is answered.

A session is one instance of an environment with a number. `Sessions` is their table: how many may
be open, how long one may be idle. `Episodes` plays in them and answers requests, over HTTP
(envs/server.py) or in this process (envs/local.py).

Everything here runs on one event loop, so the table needs no lock. A session serves one request at
a time, behind an asyncio lock, so waiting costs no thread. Calls into a fast environment
(TextCraft: 2 microseconds) run on the loop, because a hop to a thread costs fifty times the step.
Other environments run in a pool of threads, so a slow step delays only its own session.

Numbers start at random in every server process. If they started at 0, a client that comes back
after a restart would continue somebody else's session, without an error.

Measured: benchmarks/environments.py. Read next: envs/server.py, then envclient.py.
"""

import asyncio
import itertools
import json
import logging
import math
import secrets
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl

import anyio
import anyio.to_thread
from starlette.responses import JSONResponse

from envs import EpisodeEndedError, NotResetError, OracleLost, TaskIndexError

MAX_BODY_BYTES = 1_000_000  # of a request
NUM_THREADS = 128  # for environments that are not fast
RULES = "tutorials/05_add_your_own_environment.md has what an environment's methods return"
# What an environment may raise -> the status and hint of the answer.
REFUSALS: dict[type[Exception], tuple[int, str]] = {
    TaskIndexError: (404, "give the index of a task that exists"),
    NotResetError: (409, "POST /reset starts an episode"),
    EpisodeEndedError: (409, "POST /reset starts the next episode"),
    OracleLost: (409, "the episode goes on; POST /step plays it"),
}
log = logging.getLogger("envs.server")


class Answer(JSONResponse):
    """JSON in ASCII: a model may write half a surrogate pair, which UTF-8 cannot carry. numpy's
    numbers are written as Python's; what JSON cannot carry (a set, a NaN) is an ApiError."""

    def render(self, content: Any) -> bytes:
        try:
            text = json.dumps(content, allow_nan=False, separators=(",", ":"), default=_plain)
        except (TypeError, ValueError, RecursionError) as error:
            raise failure(f"its answer is not JSON ({error})") from error
        return text.encode("ascii")


def _plain(value: Any) -> Any:
    if not hasattr(value, "item"):
        raise TypeError(f"JSON cannot carry {type(value).__name__}")
    return value.item()


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, error: str, hint: str) -> None:
        super().__init__(error)
        self.status, self.error, self.hint = status, error, hint


def failure(what: str, hint: str = RULES) -> ApiError:
    return ApiError(500, f"the environment failed: {what}", hint)


def error_answer(
    status: int, error: str, hint: str, headers: Mapping[str, str] | None = None
) -> Answer:
    more = {"Retry-After": "1"} if status == 429 else {}
    return Answer({"error": error, "hint": hint}, status, more | dict(headers or {}))


def body_too_large(max_bytes: int = MAX_BODY_BYTES) -> Answer:
    error = f"the body is larger than {max_bytes} bytes"
    return error_answer(413, error, "send a shorter action")


@dataclass
class Session:
    """One instance of the environment and what its latest reset or step answered."""

    session_id: int
    env: Any
    turn: dict | None = None
    task_index: int = 0
    has_episode: bool = False  # /reset was called
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    last_used: float = field(default_factory=time.monotonic)


class Sessions:
    """The table of sessions; every method runs on the event loop.

    Args:
        first_id: the first session's number; None: at random, below 2^52 as JSON's doubles are.
    """

    def __init__(
        self, env_class: Any, max_sessions: int, idle_timeout_s: float, first_id: int | None = None
    ) -> None:
        self.env_class, self.max_sessions = env_class, max_sessions
        self.first_id = secrets.randbelow(2**52) if first_id is None else first_id
        self.idle_timeout_s = idle_timeout_s
        self.table: dict[int, Session] = {}
        self._numbers = itertools.count(self.first_id)
        self._num_starting = 0
        self._closing: set[asyncio.Task] = set()  # evicted, and not yet closed
        self._threads: anyio.CapacityLimiter | None = None

    async def call(self, function: Callable, *arguments: Any) -> Any:
        """Call a method of the environment, here or in a thread; its failures become ApiErrors."""
        try:
            if self.env_class.IS_FAST:
                return function(*arguments)
            if self._threads is None:  # needs a running event loop
                self._threads = anyio.CapacityLimiter(NUM_THREADS)
            return await anyio.to_thread.run_sync(function, *arguments, limiter=self._threads)
        except Exception as error:
            for kind, (status, hint) in REFUSALS.items():
                if isinstance(error, kind):
                    raise ApiError(status, str(error), hint) from error
            log.exception("%s failed in the environment", getattr(function, "__name__", function))
            hint = "the traceback is in the server's output; the session may be reset or closed"
            raise failure(f"{type(error).__name__}: {error}", hint) from error

    async def create(self) -> Session:
        if len(self.table) + self._num_starting >= self.max_sessions:
            self.evict_idle()
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
        """The session, for this request alone, after those that came before it. ApiError 404 if it
        was never created, or is closed or evicted."""
        session = self.table.get(session_id)
        if session is None:
            raise ApiError(
                404,
                f"session {session_id} does not exist",
                f"POST /create opens one; sessions unused for {self.idle_timeout_s:g} s are closed",
            )
        async with session.lock:
            session.last_used = time.monotonic()
            try:
                yield session
            finally:
                session.last_used = time.monotonic()

    async def close(self, session_id: int) -> bool:
        """End the session after the requests that already wait for it; False if there is none."""
        session = self.table.pop(session_id, None)
        if session is not None:
            await self._end(session)
        return session is not None

    def evict_idle(self) -> None:
        """Take idle sessions out of the table at once and close them in the background, because
        an environment may hang when it is closed."""
        limit = time.monotonic() - self.idle_timeout_s
        for session in list(self.table.values()):
            if session.last_used < limit and not session.lock.locked():
                closing = asyncio.create_task(self._end(self.table.pop(session.session_id)))
                self._closing.add(closing)
                closing.add_done_callback(self._closing.discard)
                closing.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def _end(self, session: Session) -> None:
        async with session.lock:  # asyncio's locks serve in the order of asking
            await self.call(session.env.close)


TURN: dict[str, Any] = {
    "observation": str,
    "reward": (int, float),
    "terminated": bool,
    "truncated": bool,
    "info": dict,
}


def problem_of(outcome: Any) -> str | None:
    """What is wrong with what a user's environment returned from step.

    >>> problem_of((42, 0.0, False, False, {}))
    'gives observation as int'
    >>> problem_of(("You see a door.", 0.0, False, {}))
    'does not return observation, reward, terminated, truncated, info from step'
    """
    if not isinstance(outcome, tuple) or len(outcome) != len(TURN):
        return f"does not return {', '.join(TURN)} from step"
    for value, (name, expected) in zip(outcome, TURN.items(), strict=True):
        is_numpy = expected not in (str, dict) and hasattr(value, "item")
        if not isinstance(value, expected) and not is_numpy:
            return f"gives {name} as {type(value).__name__}"
    _, reward, _, _, info = outcome
    if not math.isfinite(reward):
        return f"gives a reward of {reward}, which must be finite"
    success = info.get("success", False)
    if not isinstance(success.item() if hasattr(success, "item") else success, bool):
        return f"gives info['success'] as {type(success).__name__}"
    return None


class Episodes:
    """Answers requests by playing in sessions; an episode lasts from /reset to its end."""

    def __init__(self, sessions: Sessions) -> None:
        self.sessions, self.env_class = sessions, sessions.env_class
        self.wire = sessions.env_class.WIRE
        self.num_tasks = sessions.env_class.num_tasks()  # loads what all sessions share, now
        # Requests that only ask: path -> (HTTP method, the environment's method that answers).
        self._questions: dict[str, tuple[str, str]] = {
            "/available_actions": ("GET", "available_actions"),
            "/state": ("GET", "state_for_people"),
            "/oracle": ("GET", "oracle"),
            **self.wire.paths,
        }
        self._methods = dict.fromkeys(("/create", "/reset", "/step", "/close"), "POST")
        self._methods |= dict.fromkeys(("/observation", "/detail"), "GET")
        for path, (kind, _) in self._questions.items():
            self._methods[path] = "GET" if kind == "GET" else "POST"

    async def answer(self, method: str, path: str, fields: Any) -> Answer:
        """The answer to a request; `fields` are those of its body or of its query."""
        try:
            if self._methods.get(path) != method:
                is_known = path in self._methods
                status, why = (405, "Method Not Allowed") if is_known else (404, "Not Found")
                raise ApiError(status, f"{method} {path}: {why}", "envs/server.py lists the paths")
            return Answer(await self._answer(path, fields))
        except ApiError as error:
            return error_answer(error.status, error.error, error.hint)

    async def _answer(self, path: str, fields: Any) -> Any:
        wire = self.wire
        if path == "/create":
            return await self._create()
        session_id = _field(fields, wire.session_field, int)
        if path == "/close":
            return wire.close(await self.sessions.close(session_id))
        if path == "/reset":
            task_index = _field(fields, wire.index_field, int, wire.index_default)
            seed = _field(fields, "seed", int, 0)
            async with self.sessions.use(session_id) as session:
                turn = await self._reset(session, task_index, seed)
                session.has_episode = True
                return wire.reset(session_id, turn, task_index)
        kind, method = self._questions.get(path, ("STEP" if path == "/step" else "", ""))
        action = _field(fields, "action", str) if kind == "STEP" else ""
        async with self.sessions.use(session_id) as session:
            if session.turn is None or path not in ("/observation", "/detail"):
                self._require_episode(session)
            if kind == "STEP":
                answer = wire.step(await self._step(session, action))
                return answer | await self._ask(session, method) if method else answer
            if method:
                return await self._ask(session, method)
            turn = session.turn or {}
            if path == "/observation":
                return wire.observation(turn)
            return {k: turn[k] for k in ("observation", "done", "reward")} | {"deleted": False}

    async def _create(self) -> Any:
        session = await self.sessions.create()
        if not self.wire.shows_task_at_create:
            return self.wire.create(session.session_id, None)
        # As AgentGym: the n-th session shows task n. An episode begins with /reset all the same.
        number = session.session_id - self.sessions.first_id
        try:
            async with self.sessions.use(session.session_id):
                turn = await self._reset(session, number % self.num_tasks)
        except ApiError:  # its client will never learn of this session
            await self.sessions.close(session.session_id)
            raise
        return self.wire.create(session.session_id, turn)

    async def _reset(self, session: Session, task_index: int, seed: int = 0) -> dict:
        observation = await self._play(session, session.env.reset, task_index, seed)
        session.task_index = task_index
        info = {"success": False, "score": 0}
        return self._set_turn(session, (observation, 0, False, False, info))

    async def _step(self, session: Session, action: str) -> dict:
        if session.turn is not None and session.turn["done"]:
            hint = "POST /reset starts the next episode"
            raise ApiError(409, f"the episode of session {session.session_id} is over", hint)
        return self._set_turn(session, await self._play(session, session.env.step, action))

    async def _ask(self, session: Session, method: str) -> Any:
        answer = await self.sessions.call(getattr(session.env, method))
        if method != "oracle":
            return answer
        if not isinstance(answer, tuple | list) or [type(part) for part in answer] != [str, str]:
            name = self.env_class.__name__
            raise failure(f"{name}.oracle() gives {answer!r:.80}, not a thought and an action")
        return {"thought": answer[0], "action": answer[1]}

    async def _play(self, session: Session, function: Callable, *arguments: Any) -> Any:
        try:
            return await self.sessions.call(function, *arguments)
        except ApiError as error:
            if error.status == 500:  # its state is unknown: only a reset repairs it
                session.has_episode = False
            raise

    def _require_episode(self, session: Session) -> None:
        if not session.has_episode:
            fields = f"{self.wire.session_field} and {self.wire.index_field}"
            what = f"session {session.session_id} has no episode"
            raise ApiError(409, what, f"POST /reset with {fields} starts one")

    def _set_turn(self, session: Session, outcome: tuple) -> dict:
        if problem := problem_of(outcome):
            session.has_episode = False
            raise failure(f"{self.env_class.__name__} {problem}")
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


def _field(fields: Any, name: str, kind: type, default: Any = None) -> Any:
    """fields[name], of exactly this type; ApiError 422 if it is missing or something else."""
    value = fields.get(name, default) if isinstance(fields, dict) else None
    if type(value) is kind:
        return value
    problem = (
        f"expected {kind.__name__}, got {value!r:.80}" if value is not None else "Field required"
    )
    raise ApiError(422, f"body.{name}: {problem}", "send a JSON object, or a query with GET")


def query_fields(query: str) -> dict[str, Any]:
    """The fields of a GET request; whole numbers as int.

    >>> query_fields("id=7&name=x")
    {'id': 7, 'name': 'x'}
    """
    pairs = parse_qsl(query)
    return {k: int(v) if v.removeprefix("-").isdecimal() and len(v) < 20 else v for k, v in pairs}
