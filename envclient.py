"""The client of an environment: `reset` and `step` over HTTP, and a pool of clients over servers.

The world that the agent acts in runs in a server of its own (envs/server.py, or one of AgentGym's),
so that a crash, a leak or a slow browser there does not take the trainer along. A client is one
session at one server, used like a Gymnasium environment whose action is all the model wrote:

    >>> with local_server("textcraft") as url, connect("textcraft", url) as client:
    ...     first_observation = client.reset(task_index=31)
    ...     client.step("Thought: I would rather fly.\\nAction: fly")
    StepResult(observation='Could not execute fly', reward=0.0, terminated=False, truncated=False, \
info={'success': False, 'score': 0.0})

What the policy got wrong comes back as a StepResult that says so; everything else raises a subclass
of EnvError (the table is in runtime/envhttp.py), and after one in the middle of an episode only
reset() goes on. Two rules make the rewards of different worlds one thing: `reward` is the increment
of this turn, an episode's increments sum to a return in 0..1; and `terminated` (the task is over)
is kept apart from `truncated` (the world's own limit cut it); AgentGym's `done` is the first.

Threads: a client belongs to one thread at a time; an EnvPool is shared by all of them.
Read next: rollout.py, which plays many clients at once.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from envs import ParseError, env_name, get_env
from runtime.envhttp import (  # noqa: F401 - callers find the errors here
    BACK_OFF_S,
    ActionRejected,
    AllServersDown,
    EnvConnectionError,
    EnvError,
    EnvProtocolError,
    EnvServerError,
    EnvTimeout,
    NotSupported,
    SessionLost,
    StepOutsideEpisode,
    TooManySessions,
    Transport,
    UnknownTask,
    WrongWorld,
    checked_url,
)
from runtime.envserver import local_server  # noqa: F401


class StepResult(NamedTuple):
    """What one action led to, in Gymnasium's order."""

    observation: str
    reward: float  # of this turn; an episode's rewards sum to 0..1
    terminated: bool  # the task is over
    truncated: bool  # the environment's own limit cut it
    info: dict[str, Any]  # "success", "score"; "parse_error" or "rejected" where the text was bad


def connect(env: str, base_url: str, **options: Any) -> "EnvClient":
    """A client of the server at `base_url`, ours or AgentGym's; options are EnvClient's."""
    return EnvClient(env, base_url, **options)


class EnvClient(contextlib.AbstractContextManager["EnvClient"]):
    """One session of one server; nothing is sent before open() or the first reset().

    Arguments:
        env: as for envs.get_env; says how text is parsed and what is called what on the wire.
        base_url: http://HOST:PORT of the server.
        timeout_s: the longest silence of the server that is waited for, in seconds.
        num_retries: repetitions of a request that is safe to repeat.
        busy_wait_s: how long 429 is waited for, in seconds.
        parse: another action format than the environment's own: text -> action, or ParseError.
        on_failure, on_close: called with each error raised, and once by close(); for EnvPool.

    Raises ValueError for an unknown environment, or an address that is no URL.
    """

    def __init__(
        self,
        env: str,
        base_url: str,
        *,
        timeout_s: float = 60.0,
        num_retries: int = 2,
        busy_wait_s: float = 60.0,
        parse: Callable[[str], str] | None = None,
        on_failure: Callable[[EnvError], None] = lambda error: None,
        on_close: Callable[["EnvClient"], None] = lambda client: None,
    ) -> None:
        env_class = get_env(env)
        self.env = env
        self._transport = Transport(base_url, timeout_s, num_retries, busy_wait_s)
        self.base_url = self._transport.base_url
        self.prompt: list[dict[str, str]] = env_class.PROMPT
        self.parse: Callable[[str], str] = parse or env_class.parse
        self._wire = env_class.WIRE
        self._on_failure, self._on_close = on_failure, on_close
        self._session_id: int | None = None
        self._is_running = False  # between reset() and the end of the episode
        self._is_closed = False
        self._score = 0.0  # sum of this episode's rewards

    def open(self) -> None:
        """Create the session now; reset() does it where this was not called."""
        if self._is_closed:
            raise ValueError(f"{self.base_url}: this client is closed; connect() gives a new one")
        if self._session_id is None:
            answer = self._request("POST", "/create", {})
            self._session_id = self._field(answer, "/create", self._wire.session_field, int)

    def check_world(self) -> None:
        """Raise WrongWorld if the server says that it serves another world; AgentGym's say
        nothing. Without this, one world's policy plays in another, and learns from it."""
        with contextlib.suppress(NotSupported):
            answer = self._request("GET", "/health", {})
            served = answer.get("env") if isinstance(answer, dict) else None
            if served is not None and served != env_name(self.env):
                what = f"this server is of {served}, not of {env_name(self.env)}: see --env-addr"
                raise WrongWorld(what, self.base_url + "/health")

    def reset(self, task_index: int, seed: int = 0) -> str:
        """Begin an episode and return its first observation.

        `seed` varies what the task leaves open; AgentGym's servers ignore it. A session that the
        server has forgotten is replaced by a new one.

        Raises:
            UnknownTask: the environment has no task `task_index`.
            EnvError: see runtime/envhttp.py.
        """
        self._is_running = False
        self.open()
        body = {self._wire.index_field: task_index, "seed": seed}
        try:
            answer = self._call("POST", "/reset", **body)
        except SessionLost:
            self._session_id = None
            self.open()
            answer = self._call("POST", "/reset", **body)
        if isinstance(answer, dict):
            answer = self._wire.first_observation(answer)
        observation = self._field(answer, "/reset", "observation", str)
        self._score, self._is_running = 0.0, True
        return observation

    def step(self, model_text: str) -> StepResult:
        """Play the action that `model_text` holds.

        Raises:
            StepOutsideEpisode: there is no running episode; call reset() first.
            EnvError: see runtime/envhttp.py. The episode is lost: only reset() goes on from there.
        """
        if not self._is_running:
            raise StepOutsideEpisode("no episode is running; call reset()", self.base_url + "/step")
        try:
            action = self.parse(model_text)
        except ParseError as error:
            return self._unheard(str(error), "parse_error")
        try:
            answer = self._call("POST", "/step", action=action)
            observation = self._field(answer, "/step", "observation", str)
            try:
                outcome = self._wire.outcome(answer, self._score)
            except ValueError as error:
                raise self._unexpected(answer, "/step", str(error)) from error
        except ActionRejected as error:
            return self._unheard(error.what, "rejected")
        except EnvError:
            self._is_running = False
            raise
        self._score += outcome.reward
        self._is_running = not (outcome.terminated or outcome.truncated)
        return StepResult(observation, *outcome)

    def observation(self) -> str:
        """The latest observation of the world, as the server keeps it."""
        return self._field(self._call("GET", "/observation"), "/observation", "observation", str)

    def available_actions(self) -> list[str]:
        """The actions that the current state accepts. NotSupported by AgentGym's servers."""
        answer = self._call("GET", "/available_actions")
        return self._field(answer, "/available_actions", "actions", list)

    def state(self) -> dict[str, Any]:
        """What a person wants to see of the current state. NotSupported by AgentGym's servers."""
        answer = self._call("GET", "/state")
        if not isinstance(answer, dict):
            raise self._unexpected(answer, "/state", "an object")
        return answer

    def oracle(self) -> tuple[str, str]:
        """(thought, action): a good move now. NotSupported by AgentGym's servers."""
        answer, path = self._call("GET", "/oracle"), "/oracle"
        return tuple(self._field(answer, path, name, str) for name in ("thought", "action"))

    def close(self) -> bool:
        """Free the session; True if the server says it did. Never raises EnvError: a server that
        cannot be told evicts idle sessions by itself."""
        if self._is_closed:
            return False
        was_open = False
        try:
            if self._session_id is not None:
                was_open = self._call("POST", "/close") is True
        except EnvError:
            pass  # told to on_failure; nothing is left to be done with this session
        finally:
            self._is_closed, self._is_running, self._session_id = True, False, None
            self._transport.close()
            self._on_close(self)
        return was_open

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _unheard(self, message: str, kind: str) -> StepResult:
        """The policy's own fault: the world has not moved, and the policy reads why."""
        info = {"success": False, "score": self._score, kind: message}
        return StepResult(message, 0.0, False, False, info)

    def _call(self, method: str, path: str, **fields: Any) -> Any:
        """A request about this session."""
        if self._session_id is None:
            raise StepOutsideEpisode("there is no session yet; call reset()", self.base_url)
        return self._request(method, path, {self._wire.session_field: self._session_id, **fields})

    def _field(self, answer: Any, path: str, name: str, kind: Any) -> Any:
        """answer[name]; a bare value is taken as it is (AgentGym's /observation is a string)."""
        value = answer[name] if isinstance(answer, dict) and name in answer else answer
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self._unexpected(answer, path, f"a field {name!r}")
        return value

    def _unexpected(self, answer: Any, path: str, expected: str) -> EnvProtocolError:
        what = f"the answer should hold {expected}; is this the address of a {self.env} server?"
        error = EnvProtocolError(what, self.base_url + path, 200, repr(answer))
        self._on_failure(error)
        return error

    def _request(self, method: str, path: str, fields: dict[str, Any]) -> Any:
        try:
            return self._transport.request(method, path, fields)
        except EnvError as error:
            self._on_failure(error)
            raise


@dataclass
class _Address:
    url: str
    load: int = 0  # clients open
    num_failures: int = 0  # since it last worked
    retry_at: float = 0.0  # time.monotonic() from when on it may be used
    is_probed: bool = False  # after failures one client at a time tries it
    last_error: EnvError | None = None
    is_checked: bool = False  # it serves this world


class EnvPool(contextlib.AbstractContextManager["EnvPool"]):
    """Clients spread over several servers of one environment; shared by all threads.

    A new client goes to the address with the fewest. An address that cannot be reached is left
    alone for back_off_s, twice as long after each further failure, up to max_back_off_s; then one
    client tries it while the others go elsewhere. A full one (429) is left alone for a moment.

    Arguments:
        dead_wait_s: how long client() waits, in seconds, when no address can be used; long enough
            for a server to be restarted.
        options: of every EnvClient: timeout_s, num_retries, busy_wait_s, parse.

    Raises ValueError for no address, one that is no URL, or the same twice.
    """

    def __init__(
        self,
        env: str,
        urls: Sequence[str],
        *,
        dead_wait_s: float = 10.0,
        back_off_s: float = 0.5,
        max_back_off_s: float = 30.0,
        busy_wait_s: float = 60.0,
        **options: Any,
    ) -> None:
        self.env, self.urls = env, [checked_url(url) for url in urls]
        if not self.urls or len(set(self.urls)) < len(self.urls):
            raise ValueError(f"--env-addr {' '.join(urls)}: give each server's address once")
        self.prompt: list[dict[str, str]] = get_env(env).PROMPT
        self.dead_wait_s, self.busy_wait_s = dead_wait_s, busy_wait_s
        self.back_off_s, self.max_back_off_s = back_off_s, max_back_off_s
        self._options = options
        self._addresses = [_Address(url) for url in self.urls]
        self._clients: set[EnvClient] = set()
        self._changed = threading.Condition()  # guards both

    def client(self) -> EnvClient:
        """An open session on the least loaded address that works; close() it after use.

        Raises:
            TooManySessions: every server answered 429 for busy_wait_s.
            AllServersDown: no address worked for dead_wait_s; names each with its last error.
        """
        started = time.monotonic()
        while True:
            address = self._pick(started)
            client = EnvClient(
                self.env,
                address.url,
                busy_wait_s=0.0,  # a full server is passed over, not waited for
                on_failure=partial(self._note_failure, address),
                on_close=partial(self._release, address),
                **self._options,
            )
            try:
                client.open()
                if not address.is_checked:
                    client.check_world()
                    address.is_checked = True
            except BaseException as error:
                client.close()
                if isinstance(error, EnvError) and not isinstance(error, WrongWorld):
                    continue  # on_failure has noted it: another address is next
                raise
            client._transport.busy_wait_s = self.busy_wait_s
            with self._changed:
                address.num_failures, address.is_probed, address.last_error = 0, False, None
                address.retry_at = 0.0
                self._clients.add(client)
                self._changed.notify_all()
            return client

    def close(self) -> None:
        """Close every client that is still open."""
        with self._changed:
            clients = list(self._clients)
        with ThreadPoolExecutor(max_workers=16) as threads:
            list(threads.map(EnvClient.close, clients))

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _pick(self, started: float) -> _Address:
        """Wait for an address that may be used and count a client to it."""
        with self._changed:
            while True:
                now = time.monotonic()
                usable = [a for a in self._addresses if now >= a.retry_at and not a.is_probed]
                if usable:
                    address = min(usable, key=lambda a: a.load)
                    address.load += 1
                    address.is_probed = address.num_failures > 0
                    return address
                is_full = any(isinstance(a.last_error, TooManySessions) for a in self._addresses)
                give_up_at = started + (self.busy_wait_s if is_full else self.dead_wait_s)
                if now >= give_up_at:
                    raise self._nothing_usable()
                wake_at = [a.retry_at for a in self._addresses if not a.is_probed]
                self._changed.wait(min([give_up_at, *wake_at]) - now)

    def _nothing_usable(self) -> EnvError:
        errors = [address.last_error for address in self._addresses]
        where = ", ".join(self.urls)
        if all(isinstance(error, TooManySessions) for error in errors):
            what = f"full for {self.busy_wait_s:g} s; raise --max-sessions or add servers"
            return TooManySessions(what, where, 429, str(errors[0]))
        lines = "".join(
            f"\n  {address.url} ({address.num_failures} failures): {address.last_error}"
            for address in self._addresses
        )
        return AllServersDown(f"no {self.env} server can be used; last errors:{lines}", where)

    def _note_failure(self, address: _Address, error: EnvError) -> None:
        """Leave the address alone for a while if the error is the server's, not one session's."""
        is_down = isinstance(error, (EnvConnectionError, EnvTimeout))
        is_down = is_down or (error.url.endswith("/create") and error.status != 429)
        with self._changed:
            now = time.monotonic()
            address.last_error = error
            if isinstance(error, TooManySessions):
                address.retry_at = max(address.retry_at, now + BACK_OFF_S)
            elif is_down and now >= address.retry_at:  # many notice one crash: count it once
                address.num_failures += 1
                pause = self.back_off_s * 2 ** min(address.num_failures - 1, 20)
                address.retry_at = now + min(pause, self.max_back_off_s)

    def _release(self, address: _Address, client: EnvClient) -> None:
        with self._changed:
            address.load -= 1
            if client not in self._clients:  # it never opened: whoever waits may try now
                address.is_probed = False
            self._clients.discard(client)
            self._changed.notify_all()
