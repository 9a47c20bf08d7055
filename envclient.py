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
of EnvError (the table is in envs/http.py), and after one in the middle of an episode only
reset() goes on. Two rules make the rewards of different worlds one thing: `reward` is the increment
of this turn, an episode's increments sum to a return in 0..1; and `terminated` (the task is over)
is kept apart from `truncated` (the world's own limit cut it); AgentGym's `done` is the first.

Threads: a client belongs to one thread at a time; an EnvPool is shared by all of them.
Read next: rollout.py, which plays many clients at once.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

from envs import ParseError, env_name, get_env
from envs.addresses import Address, Addresses
from envs.http import (  # noqa: F401 - callers find the errors here
    CLOSE_TIMEOUT_S,
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
)
from envs.launch import local_server  # noqa: F401
from envs.local import transport_to
from envs.seal import Turns

MAX_CLOSING = 64  # threads that close sessions


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
        base_url: http://HOST:PORT of the server, or "local": no server, a world in this process.
        timeout_s: the longest that a request may take, repetitions included, in seconds.
        num_retries: repetitions of a request that is safe to repeat.
        busy_wait_s: how long 429 is waited for, in seconds.
        parse: another action format than the environment's own: text -> action, or ParseError.
        prompt: other messages before the first observation than the environment's own.
        on_failure, on_close: called with each error raised, and once by close(); for EnvPool.
        tries_at_close: how often close() tells the server (None: 1 + num_retries); for EnvPool.

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
        prompt: list[dict[str, str]] | None = None,
        on_failure: Callable[[EnvError], None] = lambda error: None,
        on_close: Callable[["EnvClient"], None] = lambda client: None,
        tries_at_close: Callable[[], int | None] = lambda: None,
    ) -> None:
        env_class = get_env(env)
        self.env = env
        self._transport = transport_to(env, base_url, timeout_s, num_retries, busy_wait_s)
        self.base_url = self._transport.base_url
        self.prompt: list[dict[str, str]] = prompt or env_class.PROMPT
        self.parse: Callable[[str], str] = parse or env_class.parse
        self._wire = env_class.WIRE
        self._on_failure, self._on_close = on_failure, on_close
        self._tries_at_close = tries_at_close
        self._session_id: int | None = None
        self._is_running = False  # between reset() and the end of the episode
        self._is_closed = False
        self._score = 0.0  # sum of this episode's rewards
        self._turns = Turns()

    def open(self) -> None:
        """Create the session now; reset() does it where this was not called."""
        if self._is_closed:
            raise ValueError(f"{self.base_url}: this client is closed; connect() gives a new one")
        if self._session_id is None:
            answer = self._request("POST", "/create", dict(self._wire.create_body))
            self._session_id = self._field(answer, "/create", self._wire.session_field, int)

    def check_world(self) -> None:
        """Raise WrongWorld if the server says that it serves another world; AgentGym's say
        nothing, a proxy anything. Without this, one world's policy would learn from another."""
        with contextlib.suppress(NotSupported, EnvProtocolError, EnvServerError, ActionRejected):
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
            EnvError: see envs/http.py.
        """
        self._is_running = False
        self._turns.begin()
        self.open()
        body = {self._wire.index_field: task_index, "seed": seed}
        try:
            answer = self._call("POST", "/reset", **body)
        except SessionLost:
            self._session_id = None
            self.open()
            answer = self._call("POST", "/reset", **body)
        observation = self._wire.first_observation(answer)
        observation = self._field(observation, "/reset", "observation", str)
        self._score, self._is_running = 0.0, True
        return observation

    def step(self, model_text: str) -> StepResult:
        """Play the action that `model_text` holds.

        Raises:
            StepOutsideEpisode: there is no running episode; call reset() first.
            EnvError: see envs/http.py. The episode is lost: only reset() goes on from there.
        """
        if not self._is_running:
            raise StepOutsideEpisode("no episode is running; call reset()", self.base_url + "/step")
        try:
            action = self.parse(model_text)
        except ParseError as error:
            return self._unheard(str(error), "parse_error")
        try:
            answer = self._call("POST", "/step", action=action)
            self._turns.played += 1
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
        """Free the session; True if the server says it did.

        Never raises EnvError, and takes CLOSE_TIMEOUT_S at most: a server that cannot be told
        evicts idle sessions by itself. What another thread is asking ends there at once, as an
        EnvConnectionError that no pool counts.
        """
        if self._is_closed:
            return False
        self._is_closed, self._is_running, was_open = True, False, False
        if self._transport.is_busy:
            abandoned, self._transport = self._transport, self._transport.renewed()
            abandoned.hang_up()
        tries = self._tries_at_close()
        if tries:
            self._transport.num_retries = tries - 1
        try:
            if self._session_id is not None and tries != 0:
                fields = {self._wire.session_field: self._session_id}
                timeout_s = min(self._transport.timeout_s, CLOSE_TIMEOUT_S)
                was_open = self._request("POST", "/close", fields, timeout_s) is True
        except EnvError:
            pass  # told to on_failure; nothing is left to be done with this session
        finally:
            self._session_id = None
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
        what = f"the answer should hold {expected}; is this a {self.env} server, and is it well?"
        error = EnvProtocolError(what, self.base_url + path, 200, repr(answer))
        self._on_failure(error)
        return error

    def _request(
        self, method: str, path: str, fields: dict[str, Any], timeout_s: float | None = None
    ) -> Any:
        transport = self._transport
        try:
            return transport.request(method, path, fields, timeout_s, turn=str(self._turns))
        except EnvError as error:
            if transport is self._transport:  # else close() has ended it, and no server failed
                self._on_failure(error)
            raise


def close_all(clients: Iterable[EnvClient]) -> None:
    """Close clients at once, so that servers that hang cost one time-out, not one each."""
    todo = list(clients)
    with ThreadPoolExecutor(min(len(todo), MAX_CLOSING) or 1) as threads:
        list(threads.map(EnvClient.close, todo))


class EnvPool(contextlib.AbstractContextManager["EnvPool"]):
    """Clients spread over several servers of one environment; shared by all threads.

    A new client goes to the address with the fewest; one that fails is left alone for a while
    (envs/addresses.py).

    Arguments:
        dead_wait_s: how long client() waits, in seconds, for servers that have worked before; long
            enough for one to be restarted. Where nobody has ever listened it does not wait.
        back_off_s, max_back_off_s: first and longest rest of an address that failed, in seconds.
        busy_wait_s: how long 429 is waited for, in seconds.
        options: of every EnvClient: timeout_s, num_retries, parse, prompt.

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
        self.addresses = Addresses(
            env,
            urls,
            dead_wait_s=dead_wait_s,
            busy_wait_s=busy_wait_s,
            back_off_s=back_off_s,
            max_back_off_s=max_back_off_s,
        )
        self.env, self.urls = env, [address.url for address in self.addresses.all]
        self.prompt: list[dict[str, str]] = options.get("prompt") or get_env(env).PROMPT
        self.busy_wait_s, self._options = busy_wait_s, options
        self._opening: set[EnvClient] = set()
        self._clients: set[EnvClient] = set()  # open
        self._lock = threading.Lock()  # guards both

    def client(self, avoid: Collection[str] = ()) -> EnvClient:
        """An open session on the least loaded address that works; close() it after use. Those in
        `avoid` come last.

        Raises:
            TooManySessions: every server answered 429 for busy_wait_s.
            AllServersDown: no address worked, for dead_wait_s where one had worked before; names
                each with its last error. Or the pool was closed.
        """
        started = time.monotonic()
        while True:
            address = self.addresses.pick(started, avoid)
            client = EnvClient(
                self.env,
                address.url,
                busy_wait_s=0.0,  # a full server is passed over, not waited for
                on_failure=partial(self.addresses.note_failure, address),
                on_close=partial(self._release, address),
                tries_at_close=address.tries_at_close,
                **self._options,
            )
            client._transport.is_sealing = address.is_sealing
            with self._lock:
                self._opening.add(client)
            try:
                client.open()
                address.is_sealing |= client._transport.is_sealing
                if not address.is_checked:
                    client.check_world()
                    address.is_checked = True
            except BaseException as error:
                client.close()
                if isinstance(error, EnvError) and not isinstance(error, WrongWorld):
                    continue  # on_failure has noted it: another address is next
                raise
            client._transport.busy_wait_s = self.busy_wait_s
            with self._lock:
                self._opening.discard(client)
                self._clients.add(client)
            self.addresses.note_success(address)
            return client

    def of(self, world: str) -> "EnvPool":
        """The pool of a world: this one, as all tasks are of one."""
        return self

    def close(self) -> None:
        """Close every client that is still open; whoever waits for one gets AllServersDown."""
        self.addresses.close()
        with self._lock:
            clients = self._opening | self._clients
        close_all(clients)

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _release(self, address: Address, client: EnvClient) -> None:
        with self._lock:
            has_opened = client in self._clients
            self._clients.discard(client)
            self._opening.discard(client)
        self.addresses.release(address, has_opened)


class EnvPools:
    """A pool for each of several worlds, by the name that tasks have of it."""

    def __init__(self, pools: Mapping[str, EnvPool]) -> None:
        self._pools = pools

    def of(self, world: str) -> "EnvPool":
        return self._pools[world]
