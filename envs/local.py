"""Run an environment inside the trainer's process instead of behind a server: `--env-addr local`.

    EnvClient ── HttpClient ── HTTP ── envs.server ── Episodes ── the environment
    EnvClient ── LocalClient ──────────────────────── Episodes ── the environment

Everything else is the same code, so rewards, errors and limits are the same as with a server.
Running locally saves the cost of HTTP but gives up its protection: an environment that leaks
memory, hangs or is slow does so inside the trainer. Read first: `envclient.py`,
`envs/sessions.py`.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Mapping
from functools import cache
from typing import Any

from envs import call_class, get_env
from envs.http import Answer
from envs.sessions import MAX_BODY_BYTES, Episodes, Sessions, body_too_large, query_fields

LOCAL = "local"  # the address of an environment in this process


def check_local(env: str) -> None:
    """Raise ValueError if the environment needs resources that only its server manages."""
    if hasattr(get_env(env), "close_shared"):
        raise ValueError(
            f"--env-addr {LOCAL}: {env} needs a server, which starts and stops its shared "
            "resources (a Java process, an index); leave --env-addr out"
        )


class LocalClient:
    """Has the interface of `HttpClient`, but calls an environment in this process. Only one thread
    may use it at a time. There is no time-out: a step that never returns blocks its caller
    forever."""

    def __init__(self, env: str) -> None:
        env_class = get_env(env)
        sessions = Sessions(_without_threads(env_class), max_sessions=1, idle_timeout_s=math.inf)
        self._episodes = Episodes(sessions)
        # All sessions of a fast environment share one lock, as they share a server's event loop. In
        # a slow environment each session has its own lock, which is contended only when another
        # thread closes the session on Ctrl-C.
        self._lock = _shared_lock(env_class) if env_class.IS_FAST else threading.Lock()

    def ask(
        self,
        method: str,
        path: str,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Answer:
        """Return the answer that a server would send."""
        path, _, query = path.partition("?")
        fields = query_fields(query) if content is None else json.loads(content)
        with self._lock:
            if content and len(content) > MAX_BODY_BYTES:
                answer = body_too_large()
            else:
                answer = _result(self._episodes.answer(method, path, fields))
        return Answer(answer.status_code, {}, bytes(answer.body))

    def close(self) -> None:
        """Does nothing, because /close has freed the environment."""


@cache
def _shared_lock(env_class: Any) -> Any:
    return threading.Lock()


@cache
def _without_threads(env_class: Any) -> Any:
    """Open the shared resources; return a subclass that `Sessions` calls in the current thread."""
    call_class(env_class, "open_shared")
    members = {"IS_FAST": True, "__module__": env_class.__module__}
    return type(env_class.__name__, (env_class,), members)


def _result(coroutine: Any) -> Any:
    """Run a coroutine that never waits (nobody else uses this session) and return its result."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("a call of an environment in this process waited for something")
