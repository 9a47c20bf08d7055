"""An environment in this process: `--env-addr local`, for one that needs no process of its own.

    EnvClient ── Line ── HTTP ── envs.server ── Episodes ── the environment
    EnvClient ── LocalLine ──────────────────── Episodes ── the environment

All the rest is the same code, so rewards, errors and limits are a server's. This saves the wire's
cost and loses its protection: an environment that leaks, crashes or computes for long does so in
the trainer. Read first: `envclient.py`, `envs/sessions.py`.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping
from functools import cache
from typing import Any

from envs import get_env
from envs.http import Answer
from envs.sessions import MAX_BODY_BYTES, Episodes, Sessions, body_too_large, query_fields

LOCAL = "local"  # the address of an environment in this process


def check_local(env: str) -> None:
    """Raise ValueError for an environment that runs in another process than the one that asks."""
    if hasattr(get_env(env), "close_shared"):
        raise ValueError(
            f"--env-addr {LOCAL}: {env} needs what its server starts and ends (a Java process, an "
            "index); leave --env-addr out"
        )


class LocalLine:
    """An environment in this process, asked as a `Line` asks a server, by one thread at a time.
    Nothing can be cut short: a step that never ends never ends."""

    def __init__(self, env: str) -> None:
        env_class = get_env(env)
        sessions = Sessions(_called_here(env_class), max_sessions=1, idle_timeout_s=math.inf)
        self._episodes = Episodes(sessions)
        # Fast environments take turns with all others, as on a server's event loop. The rest wait
        # only for whoever closes the session after Ctrl-C.
        self._lock = _shared_lock(env_class) if env_class.IS_FAST else threading.Lock()

    def ask(
        self,
        method: str,
        path: str,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Answer:
        """What a server would answer."""
        path, _, query = path.partition("?")
        fields = query_fields(query) if content is None else json.loads(content)
        with self._lock:
            if content and len(content) > MAX_BODY_BYTES:
                answer = body_too_large()
            else:
                answer = _result(self._episodes.answer(method, path, fields))
        return Answer(answer.status_code, {}, bytes(answer.body))

    def close(self) -> None:
        """Nothing: /close has freed the environment."""


@cache
def _shared_lock(env_class: Any) -> Any:
    return threading.Lock()


@cache
def _called_here(env_class: Any) -> Any:
    """The environment as one whose calls `Sessions` makes in the thread that asks."""
    return type(env_class.__name__, (env_class,), {"IS_FAST": True})


def _result(coroutine: Any) -> Any:
    """The result of a coroutine that never waits, because nobody else uses this session."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("an environment in this process had to be waited for")
