"""A world in this process: `--env-addr local`, for a world that needs no other one.

    EnvClient ── Transport ── HTTP ── envs.server ── Episodes ── the world
    EnvClient ── LocalTransport ───────────────────── Episodes ── the world

Everything above and below the wire is the same code, so rewards, errors and limits are what a
server's would be; what is saved is the wire, and what is lost is its wall: a world that leaks,
crashes or computes for long does so in the trainer.

Every client has an instance of the world for itself, as a session of a server is one. Calls of a
fast world (`IS_FAST`) come one at a time, as they do on a server's event loop.

Read first: `envclient.py`, `envs/sessions.py`.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Coroutine
from functools import cache
from typing import Any

from envs import get_env
from envs.http import Transport, read_answer
from envs.sessions import Answer, ApiError, Episodes, Sessions, error_answer

LOCAL = "local"  # the address of a world in this process
MAX_BODY_BYTES = 1_000_000  # of a request, as at a server
QUESTIONS = ("oracle", "available_actions", "state")  # GET, of an episode


def check_local(env: str) -> None:
    """Raise ValueError for a world that plays outside the process that asks it."""
    if hasattr(get_env(env), "close_shared"):
        raise ValueError(
            f"--env-addr {LOCAL}: {env} needs what its server starts and ends (a Java process, an "
            "index); leave --env-addr out"
        )


def transport_to(
    env: str, base_url: str, timeout_s: float, num_retries: int, busy_wait_s: float
) -> Transport | LocalTransport:
    """The way to the world: over HTTP with these limits, or none at all."""
    if base_url == LOCAL:
        return LocalTransport(env)
    return Transport(base_url, timeout_s, num_retries, busy_wait_s)


class LocalTransport:
    """A session of a world in this process, asked as `Transport` asks a server.

    One thread at a time. Nothing is waited for and nothing repeated, and what a call does cannot be
    cut short: a step that never ends never ends.
    """

    base_url = LOCAL
    timeout_s = num_retries = busy_wait_s = 0
    is_busy = False  # for who wants to hang up: there is nothing to be hung up
    is_sealing = False  # nothing stands in between

    def __init__(self, env: str) -> None:
        self.env = env
        world = get_env(env)
        self._sessions = Sessions(_called_here(world), max_sessions=1, idle_timeout_s=math.inf)
        self._episodes = Episodes(self._sessions)
        self._lock = _lock_of(world)

    def request(self, method: str, path: str, fields: dict[str, Any], *_: Any, **__: Any) -> Any:
        """The JSON of a good answer, or the EnvError that a server's answer would be."""
        if method == "POST" and len(json.dumps(fields)) > MAX_BODY_BYTES:
            error = f"the body is larger than {MAX_BODY_BYTES} bytes"
            answer = error_answer(413, error, "send a shorter action")
        else:
            with self._lock:
                answer = _finished(self._answer(path.removeprefix("/"), fields))
        return read_answer(f"{LOCAL}:{self.env}{path}", answer.status_code, bytes(answer.body))

    def renewed(self) -> LocalTransport:
        return self

    def hang_up(self) -> None:
        """Nothing: who asks in this process has to wait."""

    def close(self) -> None:
        """Nothing: /close has freed the world."""

    async def _answer(self, what: str, fields: dict[str, Any]) -> Answer:
        """What envs/server.py answers to the path `what`."""
        wire, episodes = self._episodes.wire, self._episodes
        session_id = fields.get(wire.session_field, -1)
        try:
            if what == "create":
                return Answer({wire.session_field: (await self._sessions.create()).session_id})
            if what == "close":
                return Answer(wire.close(await self._sessions.close(session_id)))
            if what == "health":
                return Answer({})
            async with self._sessions.use(session_id) as session:
                if what == "reset":
                    task_index = fields[wire.index_field]
                    turn = await episodes.begin(session, task_index, fields.get("seed", 0))
                    return Answer(wire.reset(session_id, turn, task_index))
                if what == "step":
                    return Answer(wire.step(await episodes.step(session, fields["action"])))
                if what == "observation":
                    return Answer(wire.observation(episodes.latest(session)))
                if what not in QUESTIONS:
                    return error_answer(404, f"/{what}: Not Found", "")
                method = {"state": "state_for_people"}.get(what, what)
                said = await episodes.ask(session, method)
                if what == "oracle":
                    said = {"thought": said[0], "action": said[1]}
                return Answer(said)
        except ApiError as error:
            return error_answer(error.status, error.error, error.hint)


def _lock_of(world: Any) -> Any:
    """What calls take turns with: those of a fast world with all others, as on a server; else those
    of one session, for who closes it, after Ctrl-C, must wait for the call under way."""
    return _shared_lock(world) if world.IS_FAST else threading.Lock()


@cache
def _shared_lock(world: Any) -> Any:
    return threading.Lock()


@cache
def _called_here(world: Any) -> Any:
    """The world as one whose calls `Sessions` makes in the thread that asks."""
    return type(world.__name__, (world,), {"IS_FAST": True})


def _finished(answer: Coroutine[Any, Any, Answer]) -> Answer:
    """The result of a coroutine that waits for nothing: nobody else uses this session."""
    try:
        answer.send(None)
    except StopIteration as stop:
        return stop.value
    raise RuntimeError("a world in this process had to be waited for")
