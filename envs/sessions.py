"""Sessions: which request may touch which instance of the world, and when.

A session is one instance of an environment with a number. This file holds the table of sessions,
how many may be open and how long one may be idle, and the episodes that are played in them.

Who waits for whom. All endpoints are coroutines on one event loop, and only that loop touches the
table of sessions, so the table needs no lock. A session is used by one request at a time: each has
an asyncio lock, and who waits for it holds no thread. A call into a fast world (TextCraft: 2
microseconds) runs right there, because a hop to a thread costs fifty times the step; any other
world's calls run in a pool of threads, so a slow step delays its own session only, as long as
fewer than NUM_THREADS steps are slow at once.

Numbers begin at random in every server process. If they began at 0, a client that comes back after
a restart would name a session that is somebody else's by now, and its episode would go on there
without an error; so an old number is unknown, and nobody guesses one.

Measured: benchmarks/server.py. Read next: envs/seal.py (whose episode it is), then envs/limits.py
(what a request may cost).
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
from functools import partial
from typing import Any

import anyio
import anyio.to_thread
from starlette.responses import JSONResponse

from envs import EpisodeEndedError, NotResetError, OracleLost, TaskIndexError, seal

NUM_THREADS = 128  # for worlds that are not fast
CLOSE_WAIT_S = 5.0  # for evicted sessions to be closed
RULES = "tutorials/05_add_your_own_environment.md has what a world's methods return"
log = logging.getLogger("envs.server")


class Answer(JSONResponse):
    """JSON in ASCII: a model may write half a surrogate pair, which UTF-8 cannot carry. numpy's
    numbers and truth values are written as Python's.

    Raises ApiError for what a world says that is no JSON: a set, an array, a NaN.
    """

    def render(self, content: Any) -> bytes:
        dumps = partial(json.dumps, allow_nan=False, separators=(",", ":"), default=_plain)
        try:
            return dumps(content).encode("ascii")
        except (TypeError, ValueError, RecursionError) as error:
            what = f"the environment failed: its answer is no JSON ({error})"
            raise ApiError(500, what, RULES) from error


def _plain(value: Any) -> Any:
    if not hasattr(value, "item"):
        raise TypeError(f"{type(value).__name__} is nothing that JSON can carry")
    return value.item()


class ApiError(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, error: str, hint: str) -> None:
        super().__init__(error)
        self.status, self.error, self.hint = status, error, hint


def error_answer(
    status: int, error: str, hint: str, headers: Mapping[str, str] | None = None
) -> Answer:
    more = {"Retry-After": "1"} if status == 429 else {}
    return Answer({"error": error, "hint": hint}, status, more | dict(headers or {}))


@dataclass
class Session:
    """One instance of the world and what its latest reset or step answered."""

    session_id: int
    env: Any
    turn: dict | None = None
    task_index: int = 0
    has_episode: bool = False  # /reset was called
    episode: str | None = None  # the name that its client gave it, if it did
    num_played: int = 0  # its steps
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
        self._ending: set[asyncio.Future[None]] = set()  # evicted, and not yet closed
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
                "the traceback is in the server's output; the session may be reset or closed",
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
        await self._end(session)
        return True

    async def evict_idle(self) -> None:
        """Out of the table at once; a world that hangs when it is closed is not waited for long."""
        limit = time.monotonic() - self.idle_timeout_s
        for session in list(self.table.values()):
            if session.last_used < limit and not session.lock.locked():
                ending = asyncio.ensure_future(self._end(self.table.pop(session.session_id)))
                self._ending.add(ending)
                ending.add_done_callback(self._has_ended)
        if self._ending:
            await asyncio.wait(self._ending, timeout=CLOSE_WAIT_S)

    async def _end(self, session: Session) -> None:
        async with session.lock:  # asyncio's locks serve in the order of asking
            await self.call(session.env.close)

    def _has_ended(self, ending: asyncio.Future[None]) -> None:
        self._ending.discard(ending)
        ending.cancelled() or ending.exception()  # logged by call()


TURN: tuple[tuple[str, Any], ...] = (
    ("observation", str),
    ("reward", (int, float)),
    ("terminated", bool),
    ("truncated", bool),
    ("info", dict),
)


def problem_of(outcome: Any) -> str | None:
    """What is wrong with what a world's reset or step has returned.

    >>> problem_of((42, 0.0, False, False, {}))
    'gives observation as int, not as str'
    >>> problem_of(("You see a door.", 0.0, False, {}))
    'returns 4 things from step, not observation, reward, terminated, truncated, info'
    """
    names = [name for name, _ in TURN]
    if not isinstance(outcome, tuple) or len(outcome) != len(names):
        count = f"{len(outcome)} things" if isinstance(outcome, tuple) else "one thing"
        return f"returns {count} from step, not {', '.join(names)}"
    for value, (name, expected) in zip(outcome, TURN, strict=True):
        if not isinstance(value, expected) and not is_number_like(value, expected):
            wanted = expected.__name__ if isinstance(expected, type) else "a number"
            return f"gives {name} as {type(value).__name__}, not as {wanted}"
    _, reward, _, _, info = outcome
    if not math.isfinite(reward):
        return f"gives a reward of {reward}, which must be finite"
    solved = info.get("success", False)
    if not isinstance(solved.item() if hasattr(solved, "item") else solved, bool):
        return f"gives info['success'] as {type(solved).__name__}, not as bool"
    return None


def is_number_like(value: Any, expected: Any) -> bool:
    """numpy's numbers and truth values, which many worlds compute with."""
    return expected is not str and expected is not dict and hasattr(value, "item")


def is_move(said: Any) -> bool:
    """Whether an oracle's answer is (thought, action)."""
    return isinstance(said, tuple | list) and [type(part) for part in said] == [str, str]


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

    async def begin(
        self, session: Session, task_index: int, seed: int, turn: str | None = None
    ) -> dict:
        shown = await self.show(session, task_index, seed)
        session.has_episode = True
        session.episode, session.num_played = seal.episode_of(turn), 0
        return shown

    async def step(self, session: Session, action: str, turn: str | None = None) -> dict:
        """Raises ApiError 409 before an episode, after its end, and out of turn (envs/seal.py)."""
        self._require_episode(session)
        if not seal.follows(turn, session.episode, session.num_played):
            raise ApiError(
                409,
                f"{turn or 'a step without a name'} is not the next turn of the episode that is "
                f"played in session {session.session_id}",
                "POST /reset starts another episode; POST /create opens a session of your own",
            )
        if session.turn is not None and session.turn["done"]:
            hint = "POST /reset starts the next episode"
            raise ApiError(409, f"the episode of session {session.session_id} is over", hint)
        outcome = await self._play(session, session.env.step, action)
        session.num_played += 1
        return self._set_turn(session, outcome)

    async def ask(self, session: Session, method: str) -> Any:
        """What a method of the world answers that changes nothing."""
        self._require_episode(session)
        said = await self.sessions.call(getattr(session.env, method))
        if method == "oracle" and not is_move(said):
            what = f"the environment failed: {self.env_class.__name__}.oracle() gives {said!r:.80}"
            raise ApiError(500, f"{what}, not a thought and an action", RULES)
        return said

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
        if problem := problem_of(outcome):
            session.has_episode = False
            what = f"the environment failed: {self.env_class.__name__} {problem}"
            raise ApiError(500, what, RULES)
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
