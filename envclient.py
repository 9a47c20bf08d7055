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

/create, /reset and every GET are harmless twice, so they are repeated `num_retries` times after a
lost connection or a 5xx. /step never: an action whose answer was lost may have been carried out. A
time-out is not repeated either; the caller goes to another server. 429 means "not done", so any
request waits and repeats.

Read next: rollout.py, which plays many clients at once.
"""

import contextlib
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlencode

from envs import ParseError, Settings, env_name, get_env, settings_of
from envs.http import (
    JSON_HEADERS,
    ExchangeError,
    Line,
    Lost,
    TimedOut,
    Unbelievable,
    checked_url,
    parse,
)
from envs.local import LOCAL, LocalLine
from run.errors import RunFailed
from run.processes import NotReady, child
from run.progress import phase

MAX_CLOSING = 64  # threads that close sessions
BACK_OFF_S, MAX_BACK_OFF_S = 0.2, 2.0  # first and longest pause between tries
# NOTE: uvicorn closes a connection after 5 idle seconds. A /step sent into a closing connection is
# lost and may not be repeated, so we drop idle ones first.
IDLE_CONNECTION_S = 4.0
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
    """429 for longer than busy_wait_s."""


class ActionRejected(EnvError):
    """The server refused what the policy wrote; `EnvClient.step` turns it into a StepResult."""


class NotSupported(EnvError):
    """The server lacks this path, as AgentGym's lack /available_actions, /state and /oracle."""


class AllServersDown(EnvError):
    """No address of a pool can be used."""


UNREACHABLE = (EnvConnectionError, EnvTimeout)
UNANSWERED: dict[type[ExchangeError], tuple[type[EnvError], str]] = {
    TimedOut: (EnvTimeout, "the server is overloaded or hangs"),
    Lost: (EnvConnectionError, "is the server running?"),
    Unbelievable: (EnvProtocolError, "is this the address of an environment server?"),
}
# Ours, then AgentGym's: "The id 7 is not valid.", "The task with environment 7 has been deleted."
_SESSION_LOST = re.compile(r"session \S+ does not exist|\bid \S+ is not valid|has been deleted")


def read_answer(url: str, status: int, content: bytes) -> Any:
    """The JSON value of a good answer; raises the EnvError that any other means."""
    path, body = "/" + url.rpartition("/")[2], content[: 4 * BODY_CHARS].decode(errors="replace")
    try:
        answer = parse(content)
        reason = _reason(answer)
    except ValueError as error:
        answer = None
        reason = f"the answer is not JSON ({error})" if body.strip() else "the answer is empty"
    reports_error = isinstance(answer, dict) and "error" in answer  # AgentGym's, with status 200
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
    elif path == "/step" and (
        # A proxy's 413 is a page and is not about what the policy wrote.
        (status == 413 and reports_error) or (status == 422 and "body.action" in reason)
    ):
        kind, what = ActionRejected, f"The action was refused: {reason}"
    elif reports_error:
        what = f"the server reports an error: {reason}"
    raise kind(what, url, status, body)


def _reason(answer: Any) -> str:
    """What an error answer says: our "error" and "hint", or FastAPI's "detail"."""
    if not isinstance(answer, dict):
        return "an unexpected answer"
    if isinstance(answer.get("detail"), list):  # [{"loc": ["body", "action"], "msg": ...}, ...]
        items = [item for item in answer["detail"] if isinstance(item, dict)]
        return "; ".join(f"{'.'.join(map(str, i.get('loc', [])))}: {i.get('msg')}" for i in items)
    parts = [str(answer[key]) for key in ("error", "hint", "detail") if answer.get(key)]
    return "; ".join(parts) or "an unexpected answer"


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
        timeout_s: the longest that a request may take, repetitions included, in seconds.
        num_retries: repetitions of a request that is safe to repeat.
        busy_wait_s: how long 429 is waited for, in seconds.
        parse: another action format than the environment's own: text -> action, or ParseError.
        prompt: other messages before the first observation than the environment's own.
        on_failure, on_close, tells_close: for EnvPool: called with each error raised, and once by
            close(); whether close() tells the server.
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
        tells_close: Callable[[], bool] = lambda: True,
    ) -> None:
        env_class = get_env(env)
        self.env, self.timeout_s, self.busy_wait_s = env, timeout_s, busy_wait_s
        self.num_retries = 0 if base_url == LOCAL else num_retries
        self.base_url = LOCAL if base_url == LOCAL else checked_url(base_url)
        self.prompt: list[dict[str, str]] = prompt or env_class.PROMPT
        self.parse: Callable[[str], str] = parse or env_class.parse
        self._wire = env_class.WIRE
        self._on_failure, self._on_close, self._tells_close = on_failure, on_close, tells_close
        self._line: Line | LocalLine = LocalLine(env) if base_url == LOCAL else self._new_line()
        self._is_asking = False  # a request is under way
        self._last_asked = time.monotonic()
        self._session_id: int | None = None
        self._is_running = False  # between reset() and the end of the episode
        self._is_closed = False
        self._score = 0.0  # sum of this episode's rewards

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
            return answer.get("env") if isinstance(answer, dict) else None
        except (*UNREACHABLE, TooManySessions):
            raise
        except EnvError:
            return None

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
            action = self.parse(model_text)
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
        if self._is_closed:
            return False
        self._is_closed, self._is_running, was_open = True, False, False
        if self._is_asking and isinstance(self._line, Line):
            busy_line, self._line = self._line, self._new_line()
            busy_line.hang_up()
        self.num_retries = 0
        try:
            if self._session_id is not None and self._tells_close():
                fields = {self._wire.session_field: self._session_id}
                timeout_s = min(self.timeout_s, CLOSE_TIMEOUT_S)
                was_open = self._request("POST", "/close", fields, timeout_s) is True
        except EnvError:
            pass  # _request has called on_failure
        finally:
            self._session_id = None
            self._line.close()
            self._on_close(self)
        return was_open

    def __exit__(self, *exception: object) -> None:
        self.close()

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
        self._on_failure(error)
        return error

    def _new_line(self) -> Line:
        return Line(self.base_url, self.timeout_s)

    def _request(
        self, method: str, path: str, fields: dict[str, Any], timeout_s: float | None = None
    ) -> Any:
        """The JSON of a good answer; repeats what may be repeated, then raises the last EnvError.
        `timeout_s` replaces both the client's time-out and its busy_wait_s."""
        line, total_s, pause = self._line, timeout_s or self.timeout_s, BACK_OFF_S
        busy_until = time.monotonic() + (timeout_s or self.busy_wait_s)
        give_up_at = time.monotonic() + total_s
        num_failures = 0
        self._is_asking = True
        try:
            while True:
                try:
                    remaining_s = max(give_up_at - time.monotonic(), 0.01)  # a sleep may be long
                    return self._request_once(line, method, path, fields, remaining_s)
                except TooManySessions:  # not done: any request may be repeated
                    again_at = time.monotonic() + pause
                    give_up_at = again_at + total_s  # it has answered, so the clock restarts
                    if again_at > busy_until:
                        raise
                except (EnvConnectionError, EnvServerError):
                    num_failures += 1
                    may_repeat = path != "/step" and not line.hung_up
                    is_late = time.monotonic() + pause >= give_up_at
                    if not may_repeat or is_late or num_failures > self.num_retries:
                        raise
                time.sleep(pause)
                pause = min(2 * pause, MAX_BACK_OFF_S)
        except EnvError as error:
            if line is self._line:  # otherwise close() has ended it, and no server failed
                self._on_failure(error)
            raise
        finally:
            self._is_asking = False

    def _request_once(
        self, line: Line | LocalLine, method: str, path: str, fields: dict, timeout_s: float
    ) -> Any:
        url, query, body, headers = self.base_url + path, "", None, None
        if method != "GET":
            body, headers = json.dumps(fields).encode(), JSON_HEADERS
        elif fields:
            query = f"?{urlencode(fields)}"
        if time.monotonic() - self._last_asked > IDLE_CONNECTION_S:
            line.close()  # drops the connection; the next request opens another
        try:
            answer = line.ask(method, path + query, body, headers, timeout_s)
        except ExchangeError as error:
            kind, hint = UNANSWERED[type(error)]
            raise kind(f"{method}: {error}; {hint}", url) from error
        finally:
            self._last_asked = time.monotonic()
        return read_answer(url, answer.status, answer.body)


# -------------------------------------------------------------------------------------------- pool


@dataclass(eq=False)
class Address:
    """One server as the pool knows it."""

    url: str
    load: int = 0  # clients, including those that are opening their session
    num_failures: int = 0  # since it last worked
    retry_at: float = 0.0  # time.monotonic() from which it may be used
    is_probed: bool = False  # after failures one client at a time tries it
    last_error: EnvError | None = None
    has_worked: bool = False

    def may_answer(self) -> bool:
        return time.monotonic() >= self.retry_at or not isinstance(self.last_error, EnvTimeout)


class EnvPool(contextlib.AbstractContextManager["EnvPool"]):
    """Clients spread over several servers of one environment; shared by all threads.

    A new client goes to the address with the fewest. An address that cannot be reached rests for
    back_off_s, doubled with each further failure up to max_back_off_s; then one client tries it
    while the others go elsewhere. A full one (429) rests for a moment. A server that has worked may
    be restarting, so the pool waits for it; an address that never worked is a mistake and raises at
    once.

    Args:
        dead_wait_s: how long client() waits, in seconds, for servers that have worked before.
        busy_wait_s: how long 429 is waited for, in seconds.
        options: of every EnvClient: timeout_s, num_retries, parse, prompt.
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
        self.addresses = [Address(u if u == LOCAL else checked_url(u, "--env-addr")) for u in urls]
        if not urls or len({a.url for a in self.addresses}) < len(self.addresses):
            raise ValueError(f"--env-addr {' '.join(urls)}: give each server's address once")
        self.env, self.urls = env, [address.url for address in self.addresses]
        self.prompt: list[dict[str, str]] = options.get("prompt") or get_env(env).PROMPT
        self.dead_wait_s, self.busy_wait_s = dead_wait_s, busy_wait_s
        self.back_off_s, self.max_back_off_s = back_off_s, max_back_off_s
        self._options = options
        self._clients: dict[EnvClient, bool] = {}  # not yet closed -> whether its session is open
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
            address = self._pick(started, avoid)
            client = EnvClient(
                self.env,
                address.url,
                busy_wait_s=0.0,  # a full server is passed over, not waited for
                on_failure=partial(self._note_failure, address),
                on_close=partial(self._release, address),
                tells_close=address.may_answer,
                **self._options,
            )
            with self._changed:
                self._clients[client] = False
            try:
                client.open()
                served = env_name(self.env) if address.has_worked else client.served_env()
            except EnvError:
                client.close()
                continue  # on_failure has noted it: another address is next
            except BaseException:
                client.close()
                raise
            if served not in (None, env_name(self.env)):
                client.close()
                what = f"this server is of {served}, not of {env_name(self.env)}: see --env-addr"
                raise EnvError(what, address.url)
            client.busy_wait_s = self.busy_wait_s
            with self._changed:
                self._clients[client] = True
                address.num_failures, address.is_probed, address.last_error = 0, False, None
                address.retry_at, address.has_worked = 0.0, True
                self._changed.notify_all()
            return client

    def of(self, env: str) -> "EnvPool":
        """This pool; EnvPools has several."""
        return self

    def is_in_use(self) -> bool:
        """Whether sessions of ours are open, whose end would make room for another."""
        with self._changed:
            return any(self._clients.values())

    def close(self) -> None:
        """Close every open client; threads that wait for one get AllServersDown."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            clients = [*self._clients]
        # In parallel, so that hung servers cost one time-out, not one each.
        with ThreadPoolExecutor(min(len(clients), MAX_CLOSING) or 1) as threads:
            list(threads.map(EnvClient.close, clients))

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _pick(self, started: float, avoid: Collection[str]) -> Address:
        """Wait for an address that may be used and count a client to it."""
        with self._changed:
            while True:
                now = time.monotonic()
                usable = [a for a in self.addresses if now >= a.retry_at and not a.is_probed]
                if self._is_closed:
                    raise self._nothing_usable()
                if usable:
                    address = min(usable, key=lambda a: (a.url in avoid, a.load))
                    address.load += 1
                    address.is_probed = address.num_failures > 0
                    return address
                give_up_at = started + self._patience_s()
                if now >= give_up_at:
                    raise self._nothing_usable()
                wake_at = [a.retry_at for a in self.addresses if not a.is_probed]
                self._changed.wait(min([give_up_at, *wake_at]) - now)

    def _note_failure(self, address: Address, error: EnvError) -> None:
        """Let the address rest if the error is the server's, not one session's."""
        is_down = isinstance(error, UNREACHABLE)
        is_down |= error.url.endswith("/create") and error.status != 429
        with self._changed:
            now = time.monotonic()
            address.last_error = error
            if isinstance(error, TooManySessions):
                address.retry_at = max(address.retry_at, now + BACK_OFF_S)
            elif is_down and now >= address.retry_at:  # many notice one crash: count it once
                address.num_failures += 1
                pause = self.back_off_s * 2 ** min(address.num_failures - 1, 20)
                address.retry_at = now + min(pause, self.max_back_off_s)

    def _release(self, address: Address, client: EnvClient) -> None:
        with self._changed:
            address.load -= 1
            if not self._clients.pop(client, False):  # it was being opened: others may try now
                address.is_probed = False
            self._changed.notify_all()

    def _patience_s(self) -> float:
        errors = [address.last_error for address in self.addresses]
        if any(isinstance(error, TooManySessions) for error in errors):
            return self.busy_wait_s
        has_worked = any(address.has_worked for address in self.addresses)
        is_mistake = not has_worked and all(isinstance(error, UNREACHABLE) for error in errors)
        return 0.0 if is_mistake else self.dead_wait_s

    def _nothing_usable(self) -> EnvError:
        where = ", ".join(self.urls)
        if self._is_closed:
            return AllServersDown("the pool is closed", where)
        errors = [address.last_error for address in self.addresses]
        full = [str(error) for error in errors if isinstance(error, TooManySessions)]
        if full:
            what = f"full for {self.busy_wait_s:g} s; raise --max-sessions or add servers"
            return TooManySessions(what, where, 429, full[0])
        lines = "".join(
            f"\n  {address.url} ({address.num_failures} failures): {address.last_error}"
            for address in self.addresses
        )
        return AllServersDown(f"no {self.env} server can be used; last errors:{lines}", where)


class EnvPools:
    """A pool for each of several environments, by the name in Task.env."""

    def __init__(self, pools: Mapping[str, EnvPool]) -> None:
        self._pools = pools

    def of(self, env: str) -> "EnvPool":
        return self._pools[env]


# ---------------------------------------------------------------------------------- a local server


@contextlib.contextmanager
def local_server(env: str, start_timeout_s: float | None = None, **flags: Any) -> Iterator[str]:
    """`python -m envs.server --env ENV` on a free port of this machine; yields its base_url.

    A process of its own, so that its Python lock, memory and Ctrl-C are not the trainer's. It ends
    with the block, and with this process however that ends.

    Args:
        start_timeout_s: seconds until the server must say that it listens; None: the environment's.
        flags: further options of envs.server, as max_sessions=64, idle_timeout_s=600, port=36005.

    Raises EnvError if it did not start; the message ends with what it wrote.
    """
    words = ["--env", env]
    for flag, value in {"port": 0, **flags}.items():
        words += [f"--{flag.replace('_', '-')}", str(value)]
    name = f"local {env} server"
    if start_timeout_s is None:
        start_timeout_s = Settings.start_timeout_s
        with contextlib.suppress(ValueError):  # an unknown environment: the server says so
            start_timeout_s = settings_of(env).start_timeout_s
    with child("envs.server", *words, cwd=Path(__file__).parent) as server:
        try:
            with phase(f"starting a server of {env}"):
                url = server.wait_until(
                    lambda: re.search(r"listening on (\S+)", server.stdout()), start_timeout_s
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
