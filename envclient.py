"""The client of an environment: `reset` and `step` over HTTP, and a pool of clients over servers.

The environment runs in a server of its own (envs/server.py, or one of AgentGym's), so that a crash
or a leak there does not take the trainer along. A client is one session at one server, used like a
Gymnasium environment whose action is all the model wrote:

    >>> with local_server("textcraft") as url, connect("textcraft", url) as client:
    ...     first_observation = client.reset(task_index=31)
    ...     client.step("Thought: I would rather fly.\\nAction: fly")
    StepResult(observation='Could not execute fly', reward=0.0, terminated=False, truncated=False, \
info={'success': False, 'score': 0.0})

When something goes wrong, one question decides: *could the policy have caused it?* A text without
an action or one too long is the policy's doing: reward 0, an observation that says why, and the
episode goes on. A dead server teaches nothing: the client raises an EnvError, only reset() goes on,
and the trajectory is left out and counted, never scored.

A client asks again only where the server says that it is full (429), since nothing was done then.
An action whose answer was lost may have been carried out, so no /step is repeated: the pool passes
over a dead server, and rollout.py plays the episode again.

Read next: rollout.py, which plays many clients at once.
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

from envs import ParseError, env_name, get_env, settings_of
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
from run.errors import RunFailed
from run.processes import NotReady, child
from run.progress import phase

MAX_CLOSING = 64  # threads that close sessions
BACK_OFF_S = 0.2  # before a full server is asked again
MISTAKE_WAIT_S = 1.0  # for an address that has never worked: it may be starting beside us
# Servers evict sessions that are not closed, so a hung one is not worth timeout_s.
CLOSE_TIMEOUT_S = 2.0
BODY_CHARS = 500  # of an answer, in error messages


# ------------------------------------------------------------------------------------------ errors


class EnvError(RunFailed):
    """The environment could not do what was asked. `url`, `status` (None: no answer), `body`."""

    def __init__(self, what: str, url: str, status: int | None = None, body: str = "") -> None:
        self.what, self.url, self.status, self.body = what, url, status, body[:BODY_CHARS]
        answer = f" [HTTP {status}: {self.body.strip() or 'empty body'}]" if status else ""
        super().__init__(f"{url}: {what}{answer}")


class EnvConnectionError(EnvError):
    """The server cannot be reached, or hung up before its answer was complete."""


class EnvTimeout(EnvError):
    """The answer was not complete within timeout_s."""


class EnvServerError(EnvError):
    """5xx: the environment itself failed."""


class EnvProtocolError(EnvError):
    """An answer that is not what the wire format promises."""


class SessionLost(EnvError):
    """The server does not know the session (any more): evicted, closed, or the server restarted."""


class UnknownTask(EnvError):
    """reset() was given a task index that the environment does not have."""


class StepOutsideEpisode(EnvError):
    """step() before reset(), or after the episode ended."""


class TooManySessions(EnvError):
    """429: the server is full."""


class ActionRejected(EnvError):
    """The server refused what the policy wrote; `EnvClient.step` turns it into a StepResult."""


class NotSupported(EnvError):
    """The server lacks this path, as AgentGym's lack /available_actions, /state and /oracle."""


class AllServersDown(EnvError):
    """No address of a pool can be used."""


UNREACHABLE = (EnvConnectionError, EnvTimeout)
UNANSWERED: dict[type[ExchangeError], tuple[type[EnvError], str]] = {
    ExchangeTimeout: (EnvTimeout, "the server is overloaded or hangs"),
    ConnectionLost: (EnvConnectionError, "is the server running?"),
    InvalidAnswer: (EnvProtocolError, "is this the address of an environment server?"),
}
# Ours, then AgentGym's: "The id 7 is not valid.", "The task with environment 7 has been deleted."
_SESSION_LOST = re.compile(r"session \S+ does not exist|\bid \S+ is not valid|has been deleted")


def read_answer(url: str, status: int, content: bytes) -> Any:
    """The JSON value of a good answer; raises the EnvError that any other means."""
    path, body = "/" + url.rpartition("/")[2], content[: 4 * BODY_CHARS].decode(errors="replace")
    try:
        answer = parse(content)
        fields = answer if isinstance(answer, dict) else {}
        parts = [str(fields[key]) for key in ("error", "hint", "detail") if fields.get(key)]
        reason = "; ".join(parts) or "an unexpected answer"
    except ValueError as error:
        answer, fields, reason = None, {}, f"the answer is not JSON ({error})"
    reports_error = "error" in fields  # AgentGym's, with status 200
    if 200 <= status < 300 and answer is not None and not reports_error:
        return answer
    kind: type[EnvError] = EnvProtocolError
    what = f"{reason}; is this the address of an environment server?"
    if status == 429:
        kind, what = TooManySessions, f"the server is full: {reason}"
    elif status in (405, 501) or (status == 404 and "Not Found" in body):
        kind, what = NotSupported, f"this server has no {path}"
    elif status >= 500:
        kind, what = EnvServerError, f"the environment failed: {reason}"
    elif status == 409:
        because = "the oracle has no answer" if path == "/oracle" else "no episode is running"
        kind, what = StepOutsideEpisode, f"{because}: {reason}"
    elif _SESSION_LOST.search(reason) or (status == 404 and path != "/reset"):
        kind, what = SessionLost, "the server does not know this session; reset() opens another"
    elif status == 404:
        kind, what = UnknownTask, f"no such task: {reason}"
    elif status == 413 and reports_error and path == "/step":  # a proxy's 413 is a page
        kind, what = ActionRejected, f"The action was refused: {reason}"
    elif reports_error:
        what = f"the server reports an error: {reason}"
    raise kind(what, url, status, body)


# ------------------------------------------------------------------------------------------ client


class StepResult(NamedTuple):
    """What one action led to, in Gymnasium's order."""

    observation: str
    reward: float  # of this turn; an episode's rewards sum to 0..1
    terminated: bool  # the task is over
    truncated: bool  # the environment's own limit cut it
    info: dict[str, Any]  # "success", "score"; "parse_error" or "rejected" where the text was bad


def connect(env: str, base_url: str, **options: Any) -> "EnvClient":
    """A client of the server at `base_url`, ours or AgentGym's."""
    return EnvClient(env, base_url, **options)


class EnvClient(contextlib.AbstractContextManager["EnvClient"]):
    """One session of one server, for one thread at a time; nothing is sent before open() or the
    first reset().

    Args:
        env: as for envs.get_env; says how text is parsed and what is called what on the wire.
        base_url: http://HOST:PORT of the server, or "local": an environment in this process.
        timeout_s: the longest that a request may take, in seconds.
        prompt: other messages before the first observation than the environment's own.
    """

    def __init__(
        self,
        env: str,
        base_url: str,
        *,
        timeout_s: float = 60.0,
        prompt: list[dict[str, str]] | None = None,
    ) -> None:
        env_class = get_env(env)
        self.base_url = LOCAL if base_url == LOCAL else checked_url(base_url)
        self.env, self.timeout_s = env, timeout_s
        self.prompt: list[dict[str, str]] = prompt or env_class.PROMPT
        self._parse, self._wire = env_class.parse, env_class.WIRE
        self._http: HttpClient | LocalClient = (
            LocalClient(env) if base_url == LOCAL else self._new_http_client()
        )
        self._is_asking = False  # a request is under way
        self._session_id: int | None = None
        self._is_running = False  # between reset() and the end of the episode
        self._is_closed = False
        self._score = 0.0  # sum of this episode's rewards

    @property
    def is_open(self) -> bool:
        """Whether the server holds a session of ours."""
        return self._session_id is not None

    def open(self) -> None:
        """Create the session now; reset() does it where this was not called."""
        if self._is_closed:
            raise ValueError(f"{self.base_url}: this client is closed; connect() gives a new one")
        if self._session_id is None:
            answer = self._request("POST", "/create", dict(self._wire.create_body))
            self._session_id = self._field(answer, "/create", self._wire.session_field, int)

    def served_env(self) -> str | None:
        """The environment that the server says it serves. AgentGym's servers do not say, and a
        proxy may say anything."""
        try:
            answer = self._request("GET", "/health", {})
        except UNREACHABLE:
            raise
        except EnvError:
            return None
        return answer.get("env") if isinstance(answer, dict) else None

    def reset(self, task_index: int, seed: int = 0) -> str:
        """Begin an episode; returns its first observation. `seed` varies what the task leaves open;
        AgentGym's servers ignore it. A session that the server has forgotten is replaced."""
        self._is_running = False
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
        """Play the action in `model_text`. Reward 0 if it holds none (then nothing is sent) or the
        server refuses it. After an EnvError only reset() goes on."""
        if not self._is_running:
            raise StepOutsideEpisode("no episode is running; call reset()", self.base_url + "/step")
        try:
            action = self._parse(model_text)
        except ParseError as error:
            return self._refusal(str(error), "parse_error")
        try:
            answer = self._call("POST", "/step", action=action)
            observation = self._field(answer, "/step", "observation", str)
            try:
                outcome = self._wire.outcome(answer, self._score)
            except ValueError as error:
                raise self._unexpected(answer, "/step", str(error)) from error
        except ActionRejected as error:
            return self._refusal(error.what, "rejected")
        except EnvError:
            self._is_running = False
            raise
        self._score += outcome.reward
        self._is_running = not (outcome.terminated or outcome.truncated)
        return StepResult(observation, *outcome)

    def observation(self) -> str:
        return self._field(self._call("GET", "/observation"), "/observation", "observation", str)

    def available_actions(self) -> list[str]:
        """What the current state accepts; like state() and oracle() NotSupported by AgentGym."""
        answer = self._call("GET", "/available_actions")
        return self._field(answer, "/available_actions", "actions", list)

    def state(self) -> dict[str, Any]:
        """What a person wants to see of the current state."""
        answer = self._call("GET", "/state")
        if not isinstance(answer, dict):
            raise self._unexpected(answer, "/state", "an object")
        return answer

    def oracle(self) -> tuple[str, str]:
        """(thought, action): a good move now."""
        answer = self._call("GET", "/oracle")
        return tuple(self._field(answer, "/oracle", name, str) for name in ("thought", "action"))

    def close(self) -> bool:
        """Free the session; True if the server says it did. Never raises EnvError. A request under
        way in another thread ends at once, as an EnvConnectionError that no pool counts."""
        self._is_closed, self._is_running, was_open = True, False, False
        session_id, self._session_id = self._session_id, None
        if self._is_asking and isinstance(self._http, HttpClient):
            busy_http, self._http = self._http, self._new_http_client()
            busy_http.abort()
        if session_id is not None:
            timeout_s = min(self.timeout_s, CLOSE_TIMEOUT_S)
            with contextlib.suppress(EnvError):
                fields = {self._wire.session_field: session_id}
                was_open = self._request("POST", "/close", fields, timeout_s) is True
        self._http.close()
        return was_open

    def __exit__(self, *exception: object) -> None:
        self.close()

    def note_failure(self, error: EnvError) -> None:
        """Called with each error that a server has caused."""

    def _refusal(self, message: str, kind: str) -> StepResult:
        """The policy's fault: the environment has not moved, and the policy reads why."""
        info = {"success": False, "score": self._score, kind: message}
        return StepResult(message, 0.0, False, False, info)

    def _call(self, method: str, path: str, **fields: Any) -> Any:
        if self._session_id is None:
            raise StepOutsideEpisode("there is no session yet; call reset()", self.base_url)
        return self._request(method, path, {self._wire.session_field: self._session_id, **fields})

    def _field(self, answer: Any, path: str, name: str, kind: Any) -> Any:
        """answer[name], or the answer itself: AgentGym's /observation is a bare string."""
        value = answer[name] if isinstance(answer, dict) and name in answer else answer
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise self._unexpected(answer, path, f"a field {name!r}")
        return value

    def _unexpected(self, answer: Any, path: str, expected: str) -> EnvProtocolError:
        what = f"the answer should hold {expected}; is this a {self.env} server, and is it well?"
        error = EnvProtocolError(what, self.base_url + path, 200, repr(answer))
        self.note_failure(error)
        return error

    def _new_http_client(self) -> HttpClient:
        return HttpClient(self.base_url, self.timeout_s)

    def _request(
        self, method: str, path: str, fields: dict[str, Any], timeout_s: float | None = None
    ) -> Any:
        """The JSON of a good answer; EnvError for any other."""
        http, url, query, body, headers = self._http, self.base_url + path, "", None, None
        if method != "GET":
            body, headers = json.dumps(fields).encode(), JSON_HEADERS
        elif fields:
            query = f"?{urlencode(fields)}"
        self._is_asking = True
        until = time.monotonic() + self.timeout_s
        try:
            while True:
                answer = http.ask(method, path + query, body, headers, timeout_s or self.timeout_s)
                is_full = answer.status == 429 and path not in ("/create", "/close")
                if not is_full or time.monotonic() > until:
                    return read_answer(url, answer.status, answer.body)
                time.sleep(BACK_OFF_S)  # nothing was done, so anything may be asked again
        except ExchangeError as error:
            kind, hint = UNANSWERED[type(error)]
            unanswered = kind(f"{method}: {error}; {hint}", url)
            if http is self._http:  # otherwise close() has ended it, and no server failed
                self.note_failure(unanswered)
            raise unanswered from error
        except EnvError as error:
            self.note_failure(error)
            raise
        finally:
            self._is_asking = False


# -------------------------------------------------------------------------------------------- pool


@dataclass(eq=False)
class Address:
    """One server as the pool knows it."""

    url: str
    clients: set[EnvClient] = field(default_factory=set)  # not closed; some open their session
    rest_s: float = 0.0  # the latest pause after a failure; 0: it works
    rests_until: float = 0.0  # time.monotonic() from which it may be used
    tried_by: EnvClient | None = None  # after a failure one client tries it
    last_error: EnvError | None = None
    has_worked: bool = False


class EnvPool(contextlib.AbstractContextManager["EnvPool"]):
    """Clients spread over several servers of one environment; shared by all threads.

    A new client goes to the address with the fewest. An address that cannot be reached rests for
    back_off_s, doubled with each further failure up to half of dead_wait_s; then one client tries
    it while the others go elsewhere. A full one (429) rests for a moment. A server that has worked
    may be restarting, so the pool waits for it; an address that never worked is a mistake.

    Args:
        dead_wait_s: how long client() waits, in seconds, for servers that have worked before.
        busy_wait_s: how long 429 is waited for, in seconds.
        options: of every EnvClient: timeout_s, prompt.
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
        self._changed = threading.Condition()  # guards all of it, addresses included

    def client(self, avoid: Collection[str] = ()) -> EnvClient:
        """An open session on the least loaded address that works, preferably not in `avoid`;
        close() it after use.

        Raises:
            TooManySessions: every server answered 429 for busy_wait_s.
            AllServersDown: no address worked, for dead_wait_s where one had worked before; names
                each with its last error. Or the pool was closed.
        """
        started = time.monotonic()
        while True:
            client = self._pick(started, avoid)
            address = client.address
            try:
                client.open()
                served = env_name(self.env) if address.has_worked else client.served_env()
            except EnvError:
                client.close()
                continue  # note_failure() has seen it: another address is next
            if served not in (None, env_name(self.env)):
                client.close()
                what = f"this server is of {served}, not of {env_name(self.env)}: see --env-addr"
                raise EnvError(what, address.url)
            with self._changed:
                address.has_worked, address.last_error, address.tried_by = True, None, None
                address.rest_s = address.rests_until = 0.0
                self._changed.notify_all()
            return client

    def of(self, env: str) -> "EnvPool":
        """This pool; EnvPools has several."""
        return self

    def is_in_use(self) -> bool:
        """Whether sessions of ours are open, whose end would make room for another."""
        with self._changed:
            return any(c.is_open for address in self.addresses for c in address.clients)

    def close(self) -> None:
        """Close every open client; threads that wait for one get AllServersDown."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            clients = [client for address in self.addresses for client in address.clients]
        # In parallel, so that hung servers cost one time-out, not one each.
        with ThreadPoolExecutor(min(len(clients), MAX_CLOSING) or 1) as threads:
            list(threads.map(lambda client: client.close(), clients))

    def __exit__(self, *exception: object) -> None:
        self.close()

    def note_failure(self, address: Address, error: EnvError) -> None:
        """Let the address rest if the error is the server's, not one session's."""
        is_down = isinstance(error, UNREACHABLE)
        is_down |= error.url.endswith("/create") and error.status != 429
        with self._changed:
            now, address.last_error = time.monotonic(), error
            if isinstance(error, TooManySessions):
                address.rests_until = max(address.rests_until, now + BACK_OFF_S)
            elif is_down and now >= address.rests_until:  # many notice one crash: count it once
                longest_s = max(self.dead_wait_s / 2, self.back_off_s)
                address.rest_s = min(2 * address.rest_s or self.back_off_s, longest_s)
                address.rests_until = now + address.rest_s

    def release(self, client: "_PooledClient") -> None:
        with self._changed:
            client.address.clients.discard(client)
            if client.address.tried_by is client:
                client.address.tried_by = None
            self._changed.notify_all()

    def _pick(self, started: float, avoid: Collection[str]) -> "_PooledClient":
        """Wait for an address that may be used; a new client of it."""
        with self._changed:
            while True:
                now = time.monotonic()
                free = [a for a in self.addresses if a.tried_by is None]
                usable = [a for a in free if now >= a.rests_until]
                if usable and not self._is_closed:
                    address = min(usable, key=lambda a: (a.url in avoid, len(a.clients)))
                    client = _PooledClient(self, address)
                    address.clients.add(client)
                    if address.rest_s:
                        address.tried_by = client
                    return client
                error, patience_s = self._why_none_is_usable()
                if now >= started + patience_s:
                    raise error
                wake_at = [started + patience_s, *(a.rests_until for a in free)]
                self._changed.wait(min(wake_at) - now)

    def _why_none_is_usable(self) -> tuple[EnvError, float]:
        """What to raise if that lasts for so many seconds."""
        where, errors = ", ".join(self.urls), [address.last_error for address in self.addresses]
        if self._is_closed:
            return AllServersDown("the pool is closed", where), 0.0
        full = [str(error) for error in errors if isinstance(error, TooManySessions)]
        if full:
            what = f"full for {self.busy_wait_s:g} s; raise --max-sessions or add servers"
            return TooManySessions(what, where, 429, full[0]), self.busy_wait_s
        lines = "".join(f"\n  {address.last_error}" for address in self.addresses)
        what = f"no {self.env} server can be used; last errors:{lines}"
        has_worked = any(address.has_worked for address in self.addresses)
        is_mistake = not has_worked and all(isinstance(error, UNREACHABLE) for error in errors)
        return AllServersDown(what, where), MISTAKE_WAIT_S if is_mistake else self.dead_wait_s


class _PooledClient(EnvClient):
    """A client whose pool hears of its failures and of its end."""

    def __init__(self, pool: EnvPool, address: Address) -> None:
        super().__init__(pool.env, address.url, **pool.options)
        self.pool, self.address = pool, address

    def note_failure(self, error: EnvError) -> None:
        self.pool.note_failure(self.address, error)

    def close(self) -> bool:
        is_resting = time.monotonic() < self.address.rests_until
        if is_resting and isinstance(self.address.last_error, EnvTimeout):
            self._session_id = None  # telling a hung server would cost another time-out
        try:
            return super().close()
        finally:
            self.pool.release(self)


class EnvPools:
    """A pool for each of several environments, by the name in Task.env."""

    def __init__(self, pools: Mapping[str, EnvPool]) -> None:
        self._pools = pools

    def of(self, env: str) -> "EnvPool":
        return self._pools[env]


# ---------------------------------------------------------------------------------- a local server


@contextlib.contextmanager
def local_server(env: str, **flags: Any) -> Iterator[str]:
    """`python -m envs.server --env ENV` on a free port of this machine; yields its base_url.

    A process of its own, so that its Python lock, memory and Ctrl-C are not the trainer's. It ends
    with the block, and with this process however that ends.

    Args:
        flags: further options of envs.server, as max_sessions=64, idle_timeout_s=600, port=36005.

    Raises EnvError if it did not start; the message ends with what it wrote.
    """
    words, name = ["--env", env], f"local {env} server"
    for flag, value in {"port": 0, **flags}.items():
        words += [f"--{flag.replace('_', '-')}", str(value)]
    with child("envs.server", *words, cwd=Path(__file__).parent) as server:
        try:
            with phase(f"starting a server of {env}"):
                url = server.wait_until(
                    lambda: re.search(r"listening on (\S+)", server.stdout()),
                    settings_of(env).start_timeout_s,
                )[1]
        except NotReady as error:
            raise EnvError(str(error), name) from None
        try:
            yield url
        finally:
            code, wrote = server.process.poll(), server.stderr()
            if code is not None or wrote:  # warnings, tracebacks
                how = "ran" if code is None else f"died with {code}"
                print(f"{name} {how}; stderr ends with:\n{wrote}", file=sys.stderr)
