"""The environment client: `reset` and `step` over HTTP, and a pool of clients for several servers.

The environment runs in a separate server process (envs/server.py, or one of AgentGym's), so a crash
or a memory leak there does not stop the trainer. A client is one session on one server. It works
like a Gymnasium environment whose action is the full text that the model wrote:

    >>> with local_server("textcraft") as url, connect("textcraft", url) as client:
    ...     first_observation = client.reset(task_index=31)
    ...     client.step("Thought: I would rather fly.\\nAction: fly")
    StepResult(observation='Could not execute fly', reward=0.0, terminated=False, truncated=False, \
info={'success': False, 'score': 0.0, 'anchor': '', 'failed': True})

When something goes wrong, the question is: *could the policy have caused it?* If its text is too
long or contains no action, the policy gets reward 0 and an observation that explains the mistake,
and the episode continues. If the server failed, the client raises an EnvError. The episode is then
over, but never scored as a failure of the policy.

A client repeats a request only if the server is full (429), because a full server executes nothing.
It never repeats a /step whose answer was lost, because the action may have been executed. Instead
the pool avoids the dead server, and rollout.py plays the episode again.

Read next: formats.py.
"""

import contextlib
import json
import re
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

from envs import ClassError, ParseError, env_name, get_env, settings_of
from envs.http import (
    JSON_HEADERS,
    ConnectionLost,
    ExchangeError,
    ExchangeTimeout,
    HttpClient,
    InvalidAnswer,
    checked_url,
    parse,
)
from envs.local import LOCAL, LocalClient
from formats import REACT, ActionFormat
from run.errors import RunFailed
from run.processes import NotReady, child
from run.progress import phase

MAX_CLOSING = 64  # threads that close sessions
BACK_OFF_S = 0.2  # wait before a full server gets the next request
FIRST_WAIT_S = 1.0  # wait for addresses that have never worked: the server may be starting
CLOSE_TIMEOUT_S = 2.0  # short, because servers evict a session that is not closed
BODY_CHARS = 500  # characters of an answer shown in error messages


# ------------------------------------------------------------------------------------------ errors


class EnvError(RunFailed):
    """A request to an environment failed. `status` is None if there was no answer."""

    def __init__(self, problem: str, url: str, status: int | None = None, body: str = "") -> None:
        self.problem, self.url, self.status, self.body = problem, url, status, body[:BODY_CHARS]
        answer = f"HTTP {status}: {self.body.strip()}".rstrip(": ")
        super().__init__(f"{url}: {problem}{f' [{answer}]' if status else ''}")


class EnvConnectionError(EnvError):
    """The server cannot be reached, or it closed the connection before its answer was complete."""


class EnvTimeout(EnvError):
    """The answer was not complete within timeout_s."""


class EnvServerError(EnvError):
    """5xx: the environment itself failed."""


class EnvProtocolError(EnvError):
    """The answer does not follow the wire format."""


class SessionLost(EnvError):
    """The server does not know the session: it was evicted, closed or lost in a restart."""


class UnknownTask(EnvError):
    """reset() was given a task index that the environment does not have."""


class StepOutsideEpisode(EnvError):
    """step() before reset(), or after the episode ended."""


class TooManySessions(EnvError):
    """429: the server is full."""


class ActionRejected(EnvError):
    """The server refused what the policy wrote; `EnvClient.step` turns it into a StepResult."""


class NotSupported(EnvError):
    """The server lacks this path. AgentGym's lack /available_actions, /state and /oracle."""


class AllServersDown(EnvError):
    """No server of a pool can be used."""


UNREACHABLE = (EnvConnectionError, EnvTimeout)
NO_ANSWER: dict[type[ExchangeError], tuple[type[EnvError], str]] = {
    ExchangeTimeout: (EnvTimeout, "the environment {} hangs, or its server is overloaded"),
    ConnectionLost: (EnvConnectionError, "is the server running?"),
    InvalidAnswer: (EnvProtocolError, "shorten the texts of {}, or check the server's address"),
}
# Our servers' text, then AgentGym's: "The id 7 is not valid.", "The task with environment 7 has
# been deleted."
_SESSION_LOST = re.compile(r"session \S+ does not exist|\bid \S+ is not valid|has been deleted")


def read_answer(url: str, status: int, content: bytes) -> Any:
    """The JSON value of a successful answer. Raises the matching EnvError for any other answer."""
    path, body = "/" + url.rpartition("/")[2], content[: 4 * BODY_CHARS].decode(errors="replace")
    try:
        answer = parse(content)
        fields = answer if isinstance(answer, dict) else {}
        parts = [str(fields[key]) for key in ("error", "hint", "detail") if fields.get(key)]
        reason = "; ".join(parts) or "an unexpected answer"
    except ValueError as error:
        answer, fields, parts, reason = None, {}, [], f"the answer is not JSON ({error})"
    reports_error = "error" in fields  # AgentGym's servers report errors with status 200
    if 200 <= status < 300 and answer is not None and not reports_error:
        return answer
    kind: type[EnvError] = EnvProtocolError
    problem = f"{reason}; is this the address of an environment server?"
    if status == 429:
        kind, problem = TooManySessions, f"the server is full: {reason}"
    elif status in (405, 501) or (status == 404 and "Not Found" in body):
        kind, problem = NotSupported, f"this server has no {path}"
    elif status >= 500:
        kind, problem = EnvServerError, f"the environment failed: {reason}"
    elif status == 409:
        state = "the oracle has no answer" if path == "/oracle" else "no episode is running"
        kind, problem = StepOutsideEpisode, f"{state}: {reason}"
    elif _SESSION_LOST.search(reason) or (status == 404 and path != "/reset"):
        kind, problem = SessionLost, "the server does not know this session; reset() opens another"
    elif status == 404:
        kind, problem = UnknownTask, f"no such task: {reason}"
    elif status == 413 and reports_error and path == "/step":  # a proxy's 413 is not our JSON
        kind, problem = ActionRejected, f"The action was refused: {reason}"
    elif reports_error:
        problem = f"the server reports an error: {reason}"
    raise kind(problem, url, status, "" if parts and reason in problem else body)


# ------------------------------------------------------------------------------------------ client


class StepResult(NamedTuple):
    """The result of one action, in Gymnasium's order."""

    observation: str
    reward: float  # for this turn only; an episode's rewards sum to 0..1
    terminated: bool  # the task is over
    truncated: bool  # the environment's own limit cut the episode
    info: dict[str, Any]  # "success", "score"; also "parse_error" or "rejected" for an invalid text

    @property
    def is_refusal(self) -> bool:
        """Whether the text was invalid, so that nothing was played."""
        return "parse_error" in self.info or "rejected" in self.info


def connect(env: str, base_url: str, **options: Any) -> "EnvClient":
    """A client of the server at `base_url`, ours or AgentGym's."""
    return EnvClient(env, base_url, **options)


class EnvClient(contextlib.AbstractContextManager["EnvClient"]):
    """One session on one server, for one thread at a time. It sends nothing before open() or the
    first reset().

    Args:
        env: name of the environment; its class parses the text and defines the wire format.
        base_url: http://HOST:PORT of the server, or "local" to run the environment in this process.
        timeout_s: time limit of a request, in seconds.
        prompt: messages before the first observation; if None, those of the action format.
        action_format: how the policy writes its actions.
    """

    def __init__(
        self,
        env: str,
        base_url: str,
        *,
        timeout_s: float = 60.0,
        prompt: list[dict[str, Any]] | None = None,
        action_format: ActionFormat = REACT,
    ) -> None:
        env_class = get_env(env)
        self.base_url = LOCAL if base_url == LOCAL else checked_url(base_url)
        self.env, self.timeout_s = env, timeout_s
        self.action_format = action_format
        self.prompt: list[dict[str, Any]] = prompt or action_format.prompt(env_class)
        self._class, self._wire = env_class, env_class.WIRE
        self._http: HttpClient | LocalClient = (
            LocalClient(env) if base_url == LOCAL else self._new_http_client()
        )
        self._is_asking = False  # a request is being sent or waits for its answer
        self._session_id: int | None = None
        self._is_running = False  # between reset() and the end of the episode
        self._is_closed = False
        self.score = 0.0  # sum of this episode's rewards

    @property
    def is_open(self) -> bool:
        """Whether this client has a session at the server."""
        return self._session_id is not None

    def open(self) -> None:
        """Create the session now; otherwise the first reset() does it."""
        if self._is_closed:
            raise ValueError(f"{self.base_url}: this client is closed; connect() makes a new one")
        if self._session_id is None:
            answer = self._request("POST", "/create", dict(self._wire.create_body))
            self._session_id = self._field(answer, "/create", self._wire.session_field, int)

    def served_env(self) -> str | None:
        """The environment's name in the server's /health; None if it is not there: AgentGym's
        servers have no /health, and a proxy can answer anything."""
        try:
            answer = self._request("GET", "/health", {})
        except UNREACHABLE:
            raise
        except EnvError:
            return None
        return answer.get("env") if isinstance(answer, dict) else None

    def reset(self, task_index: int, seed: int = 0) -> str:
        """Begin an episode; returns its first observation. `seed` varies the details that the task
        does not fix; AgentGym's servers ignore it. If the server has lost the session, reset()
        opens a new one."""
        self._is_running = False
        self.open()
        body = {self._wire.index_field: task_index, "seed": seed}
        try:
            answer = self._call("POST", "/reset", **body)
        except SessionLost:
            self._session_id = None
            self.open()
            answer = self._call("POST", "/reset", **body)
        try:
            observation = self._wire.first_observation(answer)
        except ValueError as error:
            raise self._unexpected(answer, "/reset", str(error)) from error
        if self._wire.first_from_observation:
            observation = self._call("GET", "/observation")
        observation = self._field(observation, "/reset", "observation", str)
        self.score, self._is_running = 0.0, True
        return observation

    def step(self, model_text: str) -> StepResult:
        """Play the action in `model_text`. The reward is 0 if the text contains no action
        (then nothing is sent) or the server refuses it. Several actions are played in order until
        one fails or ends the episode; the result has the last observation and the sum of their
        rewards. After an EnvError, call reset()."""
        if not self._is_running:
            raise StepOutsideEpisode("no episode is running; call reset()", self.base_url + "/step")
        try:
            actions = self.action_format.parse(self._class, model_text)
        except ParseError as error:
            return self._refusal(str(error), "parse_error")
        except ClassError as error:
            self._is_running = False
            raise EnvServerError(error.problem, error.env) from error
        reward, num_played, has_failed, state = 0.0, 0, False, ""
        while num_played < len(actions) and self._is_running and not has_failed:
            result = self._play(actions[num_played])
            reward += result.reward
            num_played += 1
            has_failed = bool(result.info.get("failed")) or result.is_refusal
            if not has_failed:
                state = result.info.get("anchor", result.observation)
        if num_played > 1 and has_failed:  # earlier actions have changed the state
            info = {k: v for k, v in result.info.items() if k != "failed"}
            result = result._replace(info={"anchor": state} | info)
        if num_played < len(actions) and self._is_running:
            note = f"Action {num_played} of {len(actions)} failed, so the others were not played."
            result = result._replace(observation=f"{result.observation}\n{note}")
        return result._replace(reward=reward)

    def say(self, thought: str, action: str) -> str:
        """Write a thought and an action as the policy should."""
        return self.action_format.say(self._class, thought, action)

    def _play(self, action: str) -> StepResult:
        try:
            answer = self._call("POST", "/step", action=action)
            observation = self._field(answer, "/step", "observation", str)
            try:
                outcome = self._wire.outcome(answer, self.score)
            except ValueError as error:
                raise self._unexpected(answer, "/step", str(error)) from error
        except ActionRejected as error:
            return self._refusal(error.problem, "rejected")
        except EnvError:
            self._is_running = False
            raise
        self.score += outcome.reward
        self._is_running = not (outcome.terminated or outcome.truncated)
        return StepResult(observation, *outcome)

    def observation(self) -> str:
        return self._field(self._call("GET", "/observation"), "/observation", "observation", str)

    def available_actions(self) -> list[str]:
        """Actions that the current state accepts. With AgentGym's servers, this method, state()
        and oracle() raise NotSupported."""
        answer = self._call("GET", "/available_actions")
        return self._field(answer, "/available_actions", "actions", list)

    def state(self) -> dict[str, Any]:
        """The current state, human-readable."""
        answer = self._call("GET", "/state")
        if not isinstance(answer, dict):
            raise self._unexpected(answer, "/state", "an object")
        return answer

    def oracle(self) -> tuple[str, str]:
        """(thought, action): a good move in the current state."""
        answer = self._call("GET", "/oracle")
        return tuple(self._field(answer, "/oracle", name, str) for name in ("thought", "action"))

    def close(self) -> bool:
        """Free the session; True if the server confirms it. Never raises EnvError. A request
        running in another thread ends immediately with an EnvConnectionError, which the pool does
        not count as a failure of the server."""
        self._is_closed, self._is_running, was_open = True, False, False
        session_id, self._session_id = self._session_id, None
        if self._is_asking and isinstance(self._http, HttpClient):
            busy_http, self._http = self._http, self._new_http_client()
            busy_http.abort()
        if session_id is not None:
            timeout_s = min(self.timeout_s, CLOSE_TIMEOUT_S)
            with contextlib.suppress(EnvError):
                fields = {self._wire.session_field: session_id}
                answer = self._request("POST", "/close", fields, timeout_s)
                was_open = self._wire.was_open(answer)
        self._http.close()
        return was_open

    def __exit__(self, *exception: object) -> None:
        self.close()

    def note_failure(self, error: EnvError) -> None:
        """Called with each error that a server causes; a pool's client overrides it."""

    def _refusal(self, message: str, kind: str) -> StepResult:
        """The result of an invalid text: the state stays the same; the policy reads the reason."""
        info = {"success": False, "score": self.score, kind: message}
        return StepResult(message, 0.0, False, False, info)

    def _call(self, method: str, path: str, **fields: Any) -> Any:
        if self._session_id is None:
            raise StepOutsideEpisode("there is no session yet; call reset()", self.base_url)
        return self._request(method, path, {self._wire.session_field: self._session_id, **fields})

    def _field(self, answer: Any, path: str, name: str, kind: Any) -> Any:
        """answer[name]; outside /step and /oracle, also the answer itself, since AgentGym's
        /observation is a bare string."""
        bare = None if path in ("/step", "/oracle") else answer
        value = answer.get(name, bare) if isinstance(answer, dict) else bare
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self._unexpected(answer, path, f"a field {name!r}")
        return value

    def _unexpected(self, answer: Any, path: str, expected: str) -> EnvProtocolError:
        problem = f"the environment {self.env} should return {expected}"
        error = EnvProtocolError(problem, self.base_url + path, 200, repr(answer))
        self.note_failure(error)
        return error

    def _new_http_client(self) -> HttpClient:
        return HttpClient(self.base_url, self.timeout_s)

    def _request(
        self, method: str, path: str, fields: dict[str, Any], timeout_s: float | None = None
    ) -> Any:
        """The JSON value of a successful answer; raises EnvError for any other."""
        http, url, query, body, headers = self._http, self.base_url + path, "", None, None
        if method != "GET":
            body, headers = json.dumps(fields).encode(), JSON_HEADERS
        elif fields:
            query = f"?{urlencode(fields)}"
        self._is_asking = True
        deadline = time.monotonic() + self.timeout_s
        try:
            while True:
                answer = http.ask(method, path + query, body, headers, timeout_s or self.timeout_s)
                is_full = answer.status == 429 and path not in ("/create", "/close")
                if not is_full or time.monotonic() > deadline:
                    return read_answer(url, answer.status, answer.body)
                time.sleep(BACK_OFF_S)  # the full server did nothing, so a repeat is safe
        except ExchangeError as error:
            kind, hint = NO_ANSWER[type(error)]
            env_error = kind(f"{method}: {error}; {hint.format(self.env)}", url)
            if http is self._http:  # otherwise close() ended the request, and no server failed
                self.note_failure(env_error)
            raise env_error from error
        except EnvError as error:
            self.note_failure(error)
            raise
        finally:
            self._is_asking = False


# -------------------------------------------------------------------------------------------- pool


@dataclass(eq=False)
class Address:
    """The pool's record of one server."""

    url: str
    clients: set[EnvClient] = field(default_factory=set)  # open, or still opening
    pause_s: float = 0.0  # length of the current pause after a failure; 0: the server works
    paused_until: float = 0.0  # time.monotonic() at which the pause ends
    prober: EnvClient | None = None  # the one client that tests the server after a pause
    last_error: EnvError | None = None
    has_worked: bool = False


class EnvPool(contextlib.AbstractContextManager["EnvPool"]):
    """Clients spread over several servers of one environment; shared by all threads.

    A new client goes to the server with the fewest clients. A server that cannot be reached is
    paused for back_off_s: no new client goes to it. Each further failure doubles the pause, up to
    half of dead_wait_s. After the pause one client tests the server while the others use different
    ones. A full server (429) is paused for BACK_OFF_S. If all servers are down, the pool waits,
    since one may be restarting. If no server ever worked, it waits only briefly, since the
    addresses are probably mistyped.

    Args:
        dead_wait_s: how long client() waits for servers that worked before, in seconds.
        busy_wait_s: how long client() waits for full servers, in seconds.
        options: passed to every EnvClient (timeout_s, prompt).
    """

    def __init__(
        self,
        env: str,
        urls: Sequence[str],
        *,
        dead_wait_s: float = 10.0,
        back_off_s: float = 0.5,
        busy_wait_s: float = 60.0,
        **options: Any,
    ) -> None:
        self.addresses = [Address(u if u == LOCAL else checked_url(u, "--env-addr")) for u in urls]
        self.env, self.urls = env, [address.url for address in self.addresses]
        if not urls or len(set(self.urls)) < len(urls):
            raise ValueError(f"--env-addr {' '.join(urls)}: give each server's address once")
        self.dead_wait_s, self.back_off_s, self.busy_wait_s = dead_wait_s, back_off_s, busy_wait_s
        self.options = options
        self._is_closed = False
        self._changed = threading.Condition()  # guards the pool and its addresses

    def client(self, avoid: Collection[str] = ()) -> EnvClient:
        """An open session on the working server with the fewest clients; servers in `avoid` are
        a last resort. Call its close() after use.

        Raises:
            TooManySessions: every server answered 429 for busy_wait_s.
            AllServersDown: no server works, or the pool is closed. The message has the last error
                of each server. Servers that worked before get dead_wait_s to come back.
        """
        start = time.monotonic()
        while True:
            client = self._pick(start, avoid)
            address = client.address
            try:
                client.open()
                served_env = env_name(self.env) if address.has_worked else client.served_env()
            except EnvError:
                client.close()
                continue  # note_failure() has recorded it, so _pick() takes another address
            if served_env not in (None, env_name(self.env)):
                client.close()
                problem = f"this server serves {served_env}, not {env_name(self.env)}"
                raise EnvError(f"{problem}: see --env-addr", address.url)
            with self._changed:
                address.has_worked, address.last_error, address.prober = True, None, None
                address.pause_s = address.paused_until = 0.0
                self._changed.notify_all()
            return client

    def for_env(self, env: str) -> "EnvPool":
        """This pool, for any name; EnvPools has a pool per name."""
        return self

    def is_in_use(self) -> bool:
        """Whether the pool has open sessions. When one ends, a full server has room again."""
        with self._changed:
            return any(c.is_open for address in self.addresses for c in address.clients)

    def close(self) -> None:
        """Close every open client; threads that wait for one get AllServersDown."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            clients = [client for address in self.addresses for client in address.clients]
        # In parallel, so that several hung sessions cost only one time-out.
        with ThreadPoolExecutor(min(len(clients), MAX_CLOSING) or 1) as threads:
            list(threads.map(lambda client: client.close(), clients))

    def __exit__(self, *exception: object) -> None:
        self.close()

    def note_failure(self, address: Address, error: EnvError) -> None:
        """Pause the address if the error concerns the server, not only one session."""
        is_down = isinstance(error, UNREACHABLE)
        is_down |= error.url.endswith("/create") and error.status != 429
        with self._changed:
            now = time.monotonic()
            if not (is_down and address.pause_s):  # the first error names what made it hang
                address.last_error = error
            if isinstance(error, TooManySessions):
                address.paused_until = max(address.paused_until, now + BACK_OFF_S)
            elif is_down and now >= address.paused_until:  # many clients report the same crash
                max_pause_s = max(self.dead_wait_s / 2, self.back_off_s)
                address.pause_s = min(2 * address.pause_s or self.back_off_s, max_pause_s)
                address.paused_until = now + address.pause_s

    def release(self, client: "_PooledClient") -> None:
        with self._changed:
            client.address.clients.discard(client)
            if client.address.prober is client:
                client.address.prober = None
            self._changed.notify_all()

    def _pick(self, start: float, avoid: Collection[str]) -> "_PooledClient":
        """Wait until an address can be used; returns a new client for it."""
        with self._changed:
            while True:
                now = time.monotonic()
                free = [a for a in self.addresses if a.prober is None]
                usable = [a for a in free if now >= a.paused_until]
                if usable and not self._is_closed:
                    address = min(usable, key=lambda a: (a.url in avoid, len(a.clients)))
                    client = _PooledClient(self, address)
                    address.clients.add(client)
                    if address.pause_s:
                        address.prober = client
                    return client
                error, max_wait_s = self._unusable_error()
                if now >= start + max_wait_s:
                    raise error
                wake_times = [start + max_wait_s, *(a.paused_until for a in free)]
                self._changed.wait(min(wake_times) - now)

    def _unusable_error(self) -> tuple[EnvError, float]:
        """An error that says why no address can be used, and the seconds to wait before raising
        it."""
        urls, errors = ", ".join(self.urls), [address.last_error for address in self.addresses]
        if self._is_closed:
            return AllServersDown("the pool is closed", urls), 0.0
        full = [str(error) for error in errors if isinstance(error, TooManySessions)]
        if full:
            problem = f"full for {self.busy_wait_s:g} s; raise --max-sessions or add servers"
            return TooManySessions(problem, urls, 429, full[0]), self.busy_wait_s
        lines = "".join(f"\n  {address.last_error}" for address in self.addresses)
        problem = f"no {self.env} server can be used; last errors:{lines}"
        has_worked = any(address.has_worked for address in self.addresses)
        is_mistake = not has_worked and all(isinstance(error, UNREACHABLE) for error in errors)
        return AllServersDown(problem, urls), FIRST_WAIT_S if is_mistake else self.dead_wait_s


class _PooledClient(EnvClient):
    """A client that tells its pool when it fails and when it is closed."""

    def __init__(self, pool: EnvPool, address: Address) -> None:
        super().__init__(pool.env, address.url, **pool.options)
        self.pool, self.address = pool, address

    def note_failure(self, error: EnvError) -> None:
        self.pool.note_failure(self.address, error)

    def close(self) -> bool:
        is_paused = time.monotonic() < self.address.paused_until
        if is_paused and isinstance(self.address.last_error, EnvTimeout):
            self._session_id = None  # do not send /close to a hung server: it would time out again
        try:
            return super().close()
        finally:
            self.pool.release(self)


class EnvPools:
    """One pool per environment, found by the name in Task.env."""

    def __init__(self, pools: Mapping[str, EnvPool]) -> None:
        self._pools = pools

    def for_env(self, env: str) -> "EnvPool":
        return self._pools[env]


# ---------------------------------------------------------------------------------- a local server


@contextlib.contextmanager
def local_server(env: str, **flags: Any) -> Iterator[str]:
    """Run `python -m envs.server --env ENV` on a free port of this machine; yields its base_url.

    The server is a separate process, with its own Python lock, memory and handling of Ctrl-C. It
    ends with the block, or when this process ends for any reason.

    Args:
        flags: other options of envs.server, e.g. max_sessions=64, idle_timeout_s=600, port=36005.

    Raises EnvError if the server does not start; the message ends with the server's output.
    """
    arguments, name = ["--env", env], f"local {env} server"
    for flag, value in {"port": 0, **flags}.items():
        arguments += [f"--{flag.replace('_', '-')}", str(value)]
    with child("envs.server", *arguments, cwd=Path(__file__).parent) as server:
        try:
            with phase(f"starting a {env} server"):
                url = server.wait_until(
                    lambda: re.search(r"listening on (\S+)", server.stdout()),
                    settings_of(env).start_timeout_s,
                )[1]
        except NotReady as error:
            raise EnvError(str(error), name) from None
        try:
            yield url
        finally:
            exit_code = server.process.poll()
            server.stop()  # closing its resources can fail, too
            stderr = server.stderr()
            if exit_code is not None or stderr:  # warnings, tracebacks
                status = "ran" if exit_code is None else f"died with exit code {exit_code}"
                print(f"{name} {status}; stderr ends with:\n{stderr}", file=sys.stderr)
