"""Sessions and episodes: the part of an environment server that does not depend on HTTP.

A session is one instance of an environment, with a number. `Sessions` is the table of open
sessions; it limits their number and closes sessions that are idle for too long. `Episodes` plays
episodes in them and answers requests, over HTTP (envs/server.py) or in this process
(envs/local.py).

Everything here runs on one event loop, so the table needs no lock. A session serves one request at
a time. Its lock is an asyncio lock, so a waiting request does not occupy a thread. Calls into a
fast environment (TextCraft: 2 microseconds) run on the loop, because switching to a thread costs
fifty times as much as the step. Other environments run in a pool of threads, so a slow step delays
only its own session.

Session numbers start at a random number in every server process. If they started at 0, a client
that continues after the server restarts could get another client's session without an error.

Read next: envs/server.py, then envclient.py.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any
from urllib.parse import parse_qsl

import anyio
import anyio.to_thread
from starlette.responses import JSONResponse

from envs import EpisodeEndedError, OracleLost, TaskIndexError, error_line
from envs.http import MAX_ANSWER_BYTES
from envs.wire import TOLERANCE

MAX_BODY_BYTES = 1_000_000  # of a request
NUM_THREADS = 128  # for environments that are not fast
RULES = "tutorials/05_add_your_own_environment.md shows what an environment's methods must return"
# Exceptions of an environment that can be the client's fault -> the status and hint of the answer.
REFUSALS: dict[type[Exception], tuple[int, str]] = {
    TaskIndexError: (404, "give the index of a task that exists"),
    EpisodeEndedError: (409, "POST /reset starts the next episode"),
    OracleLost: (409, "the episode can continue: send the next action with POST /step"),
}
log_once = cache(logging.getLogger("envs.server").error)


class Answer(JSONResponse):
    """JSON in ASCII, because a model can write an unpaired surrogate, which UTF-8 cannot encode.
    NumPy numbers become Python numbers. A value that JSON cannot hold (a set, a NaN) raises
    TypeError or ValueError."""

    def render(self, content: Any) -> bytes:
        text = json.dumps(content, allow_nan=False, separators=(",", ":"), default=_for_json)
        return text.encode("ascii")


def _for_json(value: Any) -> Any:
    plain = _to_python(value)
    if plain is value:
        raise TypeError(f"JSON cannot hold a {type(value).__name__}")
    return plain


class ApiError(Exception):
    """An error to send as the answer to a request."""

    def __init__(self, status: int, error: str, hint: str) -> None:
        super().__init__(error)
        self.status, self.error, self.hint = status, error, hint


def failure(problem: str, hint: str = RULES) -> ApiError:
    return ApiError(500, problem, hint)


def error_answer(status: int, error: str, hint: str) -> Answer:
    headers = {"Retry-After": "1"} if status == 429 else None
    return Answer({"error": error, "hint": hint}, status, headers)


def body_too_large() -> Answer:
    error = f"the body is larger than {MAX_BODY_BYTES} bytes"
    return error_answer(413, error, "send a shorter action")


@dataclass
class Session:
    """One instance of the environment."""

    session_id: int
    env: Any = None
    turn: dict | None = None  # result of the episode's latest reset or step
    preview: dict | None = None  # the task that /create showed; dropped at the first /reset
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    last_used: float = field(default_factory=time.monotonic)


class Sessions:
    """The table of sessions. Every method runs on the event loop.

    Args:
        first_id: number of the first session; by default random, below 2^52 to fit a double.
    """

    def __init__(
        self, env_class: Any, max_sessions: int, idle_timeout_s: float, first_id: int | None = None
    ) -> None:
        self.env_class, self.max_sessions = env_class, max_sessions
        self.first_id = secrets.randbelow(2**52) if first_id is None else first_id
        self.idle_timeout_s = idle_timeout_s
        self.table: dict[int, Session] = {}
        self._numbers = itertools.count(self.first_id)
        self._close_tasks: set[asyncio.Task] = set()  # one per evicted session
        self._threads: anyio.CapacityLimiter | None = None

    async def call(self, function: Callable, *arguments: Any, refusals: tuple = ()) -> Any:
        """Call a method of the environment, here or in a thread; its errors become ApiErrors: those
        in `refusals` are the client's fault, any other is a fault of the class."""
        try:
            if self.env_class.IS_FAST:
                return function(*arguments)
            if self._threads is None:  # created here, because it needs a running event loop
                self._threads = anyio.CapacityLimiter(NUM_THREADS)
            return await anyio.to_thread.run_sync(function, *arguments, limiter=self._threads)
        except (Exception, SystemExit) as error:
            for kind, (status, hint) in REFUSALS.items():
                if kind in refusals and isinstance(error, kind):
                    raise ApiError(status, str(error), hint) from error
            problem = f"raises {error_line(error, self.env_class)}"
            raise failure(problem, "reset or close the session") from error

    async def create(self) -> Session:
        if len(self.table) >= self.max_sessions:
            self.evict_idle()
        if len(self.table) >= self.max_sessions:
            raise ApiError(
                429,
                f"{self.max_sessions} sessions are open, the maximum of this server",
                "close sessions, retry later, or start the server with a larger --max-sessions",
            )
        session = Session(next(self._numbers))
        self.table[session.session_id] = session  # counted even while its environment starts
        try:
            async with session.lock:
                session.env = await self.call(self.env_class)
        except BaseException:
            self.table.pop(session.session_id, None)
            raise
        return session

    @asynccontextmanager
    async def use(self, session_id: int) -> AsyncIterator[Session]:
        """Wait for earlier requests to the session, then give this request exclusive use of it.
        ApiError 404 if the session was never created, or was closed or evicted."""
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
        """Close a session after the requests already waiting for it; False if it is not open."""
        session = self.table.pop(session_id, None)
        if session is not None:
            await self._end(session)
        return session is not None

    def evict_idle(self) -> None:
        """Remove idle sessions from the table now, and close them in the background, because an
        environment can hang while it is closed."""
        limit = time.monotonic() - self.idle_timeout_s
        for session in list(self.table.values()):
            if session.last_used < limit and not session.lock.locked():
                task = asyncio.create_task(self._end(self.table.pop(session.session_id)))
                self._close_tasks.add(task)  # the loop does not keep a reference to its tasks
                task.add_done_callback(self._close_tasks.discard)

    async def _end(self, session: Session) -> None:
        """Close the session's environment. A failure is only logged."""
        try:
            async with session.lock:  # asyncio's locks are first come, first served
                if session.env is not None:  # None if the environment did not start
                    await self.call(session.env.close)
        except ApiError as error:
            log_once(f"{self.env_class.__name__}.close() {error}")


TURN: dict[str, Any] = {
    "observation": str,
    "reward": (int, float),
    "terminated": bool,
    "truncated": bool,
    "info": dict,
}


def as_turn(outcome: Any) -> dict[str, Any]:
    """Turn the tuple that a user's step() returned into a dict. ApiError if its types are wrong.

    >>> as_turn(("You see a door.", 0.0, False, {}))
    Traceback (most recent call last):
    envs.sessions.ApiError: returns 4 values; expected observation, reward, terminated, \
truncated, info
    """
    values = outcome if isinstance(outcome, tuple | list) else ()
    if len(values) != len(TURN):
        result = f"{len(values)} values" if values else f"{outcome!r:.60}"
        raise failure(f"returns {result}; expected {', '.join(TURN)}")
    turn = {name: _to_python(value) for name, value in zip(TURN, values, strict=True)}
    for name, value in turn.items():
        if not isinstance(value, TURN[name]):
            raise failure(f"returns {value!r:.40} ({type(value).__name__}) as {name}")
    if not abs(turn["reward"]) <= 1 + TOLERANCE:  # also NaN, and integers too large for a float
        raise failure(f"returns the reward {turn['reward']!r:.40}; expected a number from -1 to 1")
    success = turn["info"].get("success")
    if not isinstance(_to_python(success), bool):
        raise failure(f"returns {success!r:.40} as info['success']; expected a bool")
    return turn


def _to_python(value: Any) -> Any:
    """Convert a number or flag of numpy or torch to Python; return any other value unchanged."""
    with contextlib.suppress(AttributeError, ValueError, RuntimeError):  # also a longer array
        return value.item()
    return value


def first_turn(observation: Any) -> dict[str, Any]:
    return as_turn((observation, 0, False, False, {"success": False, "score": 0}))


class Episodes:
    """Plays episodes in the sessions and answers requests. An episode starts with /reset."""

    def __init__(self, sessions: Sessions) -> None:
        self.sessions, self.env_class = sessions, sessions.env_class
        self.wire = sessions.env_class.WIRE
        self.num_tasks = sessions.env_class.num_tasks()  # also loads the data of all sessions
        self._answers: dict[tuple[str, str], Callable] = {
            ("POST", "/create"): self._create,
            ("POST", "/reset"): self._reset,
            ("POST", "/step"): self._step,
            ("POST", "/close"): self._close,
            ("GET", "/observation"): self._observation,
            ("GET", "/detail"): self._detail,
            ("GET", "/available_actions"): partial(self._ask, method="available_actions"),
            ("GET", "/state"): partial(self._ask, method="state_for_people"),
            ("GET", "/oracle"): self._oracle,
        }
        if self.wire.list_path:
            self._answers["GET", self.wire.list_path] = self._list
        for path, (kind, method) in self.wire.paths.items():
            if kind == "STEP":
                self._answers["POST", path] = partial(self._step, extra_method=method)
            else:
                self._answers[kind, path] = partial(self._ask, method=method)

    async def answer(self, method: str, path: str, fields: Any) -> Answer:
        """Answer one request; `fields` is its parsed body or query."""
        names = {"/create": "__init__", "/state": "state_for_people"}
        name = f"{self.env_class.__name__}.{names.get(path, path[1:])}()"
        try:
            if (method, path) not in self._answers:
                raise ApiError(404, f"{method} {path}: Not Found", "envs/server.py lists the paths")
            answer = Answer(await self._answers[method, path](fields))
            if (size := len(answer.body)) > MAX_ANSWER_BYTES:
                raise failure(f"returns {size} bytes as JSON; the limit is {MAX_ANSWER_BYTES}")
            return answer
        except ApiError as error:
            problem = f"{name} {error.error}" if error.status == 500 else error.error
            return error_answer(error.status, problem, error.hint)
        except Exception as error:  # JSON cannot hold a value, or a user's WIRE lacks one
            problem = f"{name} returns what cannot be sent ({type(error).__name__}: {error})"
            return error_answer(500, problem, RULES)

    async def _create(self, fields: Any) -> Any:
        session = await self.sessions.create()
        if not self.wire.shows_task_at_create:
            return self.wire.create(session.session_id, None)
        # As in AgentGym, the n-th session shows task n. Its client still has to POST /reset.
        number = session.session_id - self.sessions.first_id
        try:
            turn = await self._play(session, "reset", number % self.num_tasks, 0)
        except ApiError:  # the client does not get this session's number and cannot close it
            await self.sessions.close(session.session_id)
            raise
        session.preview = turn
        return self.wire.create(session.session_id, turn)

    async def _reset(self, fields: Any) -> Any:
        session_id = self._session_id(fields)
        task_index = _field(fields, self.wire.index_field, int, self.wire.index_default)
        seed = _field(fields, "seed", int, 0)
        async with self.sessions.use(session_id) as session:
            turn = await self._play(session, "reset", task_index, seed)
            session.preview = None
            session.turn = turn | {"subtask": self.env_class.subtask(task_index)}
            return self.wire.reset(session_id, session.turn, task_index)

    async def _step(self, fields: Any, extra_method: str = "") -> Any:
        """`extra_method`: a method of the environment; its dict is added to the answer."""
        action = _field(fields, "action", str)
        if extra_method:  # AgentGym's server reads the policy's text there
            action = action.replace("</s>", "").rpartition("Action:")[2].strip()
        async with self._episode(fields) as (session, turn):
            if turn["done"]:
                hint = "POST /reset starts the next episode"
                raise ApiError(409, f"the episode of session {session.session_id} is over", hint)
            session.turn = turn | await self._play(session, "step", action)
            answer = self.wire.step(session.turn)
            if extra_method:
                answer = answer | await self.sessions.call(getattr(session.env, extra_method))
            return answer

    async def _close(self, fields: Any) -> Any:
        return self.wire.close(await self.sessions.close(self._session_id(fields)))

    async def _list(self, fields: Any) -> Any:
        return list(self.sessions.table)

    async def _observation(self, fields: Any) -> Any:
        async with self._episode(fields, before_reset=True) as (_, turn):
            return self.wire.observation(turn)

    async def _detail(self, fields: Any) -> Any:
        async with self._episode(fields, before_reset=True) as (_, turn):
            detail = {name: turn[name] for name in ("observation", "done", "reward")}
            return detail | {"deleted": False}

    async def _ask(self, fields: Any, method: str) -> Any:
        async with self._episode(fields) as (session, turn):
            refusals = (OracleLost, EpisodeEndedError) if turn["done"] else (OracleLost,)
            result = await self.sessions.call(getattr(session.env, method), refusals=refusals)
        kind = {"available_actions": list, "state_for_people": dict}.get(method, object)
        if not isinstance(result, kind):
            raise failure(f"returns {result!r:.60}; expected a {kind.__name__}")
        return result

    async def _oracle(self, fields: Any) -> Any:
        answer = await self._ask(fields, "oracle")
        if not isinstance(answer, tuple | list) or [type(part) for part in answer] != [str, str]:
            raise failure(f"returns {answer!r:.60}; expected a thought and an action")
        return {"thought": answer[0], "action": answer[1]}

    def _session_id(self, fields: Any) -> int:
        return _field(fields, self.wire.session_field, int)

    @asynccontextmanager
    async def _episode(
        self, fields: Any, before_reset: bool = False
    ) -> AsyncIterator[tuple[Session, dict]]:
        """The session that a request names, and its latest turn. With `before_reset` the turn can
        also be the task that /create showed."""
        session_id = self._session_id(fields)
        async with self.sessions.use(session_id) as session:
            turn = session.turn or (session.preview if before_reset else None)
            if turn is None:
                names = f"{self.wire.session_field} and {self.wire.index_field}"
                hint = f"POST /reset with {names} starts one"
                raise ApiError(409, f"session {session_id} has no episode", hint)
            yield session, turn

    async def _play(self, session: Session, method: str, *arguments: Any) -> dict:
        """Call reset or step and convert its result to a turn."""
        read, refusals = (as_turn, ()) if method == "step" else (first_turn, (TaskIndexError,))
        try:
            call = self.sessions.call
            turn = read(await call(getattr(session.env, method), *arguments, refusals=refusals))
        except ApiError as error:
            if error.status == 500:  # the environment's state is unknown until the next reset
                session.turn = session.preview = None
            raise
        reward = self.wire.to_points(turn["reward"])
        return turn | {"reward": reward, "done": turn["terminated"] or turn["truncated"]}


def _field(fields: Any, name: str, kind: type, default: Any = None) -> Any:
    """fields[name]; ApiError 422 if it is missing or its type is not exactly `kind`."""
    value = fields.get(name, default) if isinstance(fields, dict) else None
    if type(value) is kind:
        return value
    problem = "Field required" if value is None else f"expected {kind.__name__}, got {value!r:.80}"
    raise ApiError(422, f"body.{name}: {problem}", "send a JSON object or, with GET, a query")


def query_fields(query: str) -> dict[str, Any]:
    """The fields of a GET request; integers become int.

    >>> query_fields("id=7&name=x")
    {'id': 7, 'name': 'x'}
    """
    pairs = parse_qsl(query)
    return {k: int(v) if v.removeprefix("-").isdecimal() and len(v) < 20 else v for k, v in pairs}
