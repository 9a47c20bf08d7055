"""The client of an environment: it turns HTTP into `reset` and `step`, and every failure into a named error.

The world the agent acts in runs in a server of its own (envs/server.py, or one of AgentGym's), so
that a crash, a leak or a slow browser there does not take the trainer along. What can go wrong
between the two passes through this file, and one question decides what becomes of it: *could the
policy have caused it?* A wrong action, unreadable text, a text too long are the policy's doing:
reward 0, an observation that says why, and the episode goes on. A dead server teaches nothing: it
raises, and the trajectory is left out and counted, never scored. (One user of the reference system
lost 1172 of 1280 episodes at reset, and all went into GRPO as failures of the policy.)

    what happens                                   what the caller sees
    the text holds no action                       StepResult, reward 0, info["parse_error"]; nothing sent
    413, or 422 about the action                   StepResult, reward 0, info["rejected"]
    refused, reset or cut connection               EnvConnectionError
    silence for timeout_s                          EnvTimeout
    5xx                                            EnvServerError
    HTML, nothing, a field missing, {"error"}      EnvProtocolError
    the server does not know the session           SessionLost
    no such task / step outside an episode         UnknownTask / StepOutsideEpisode
    429 for longer than busy_wait_s                TooManySessions
    an address without /oracle and the like        NotSupported
    no address of a pool answers                   AllServersDown, with the last error of each

What is repeated: /create, /reset, /close and every GET, `num_retries` times after a lost connection
or a 5xx; they can be done twice without harm (a session created in vain is evicted by its server).
/step never: an action whose answer was lost may have been carried out. A time-out is not repeated
here either, the caller goes to another server. 429 means "not done", so anything waits and repeats.

AgentGym's clients (agentenv/envs/*.py) assert status 200, which drops the server's message, and wait
up to 2400 s. Its servers report errors as HTTP 200 {"error": ...} and know only `done`; both are
understood here: `terminated` is `done` unless the server says more, `truncated` stays apart, and
`reward` is this turn's increment.

    >>> with local_server("textcraft") as url, connect("textcraft", url) as client:
    ...     first_observation = client.reset(task_index=31)
    ...     thought, action = client.oracle()
    ...     client.step(f"Thought: {thought}\\nAction: fly")
    StepResult(observation='Could not execute fly', reward=0.0, terminated=False, truncated=False, \
info={'success': False, 'score': 0.0})

Threads: a client is one session and one connection, used by one thread at a time (not always the
same one); an EnvPool is shared by all. Read next: rollout.py, which plays many clients at once.
"""

import json
import math
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Self

import requests
import urllib3

from envs import ParseError, get_env

CONNECT_TIMEOUT_S = 5.0  # a host that drops packets is not worth timeout_s
BACK_OFF_S, MAX_BACK_OFF_S = 0.2, 2.0  # first and longest pause of a client between tries
# NOTE: uvicorn closes a connection after 5 idle seconds, and a policy may think for longer. A /step
# sent into a closing connection is lost and may not be repeated, so idle ones are dropped first.
IDLE_CONNECTION_S = 4.0
BODY_CHARS = 500  # of an answer, in error messages


class EnvError(Exception):
    """The environment could not do what was asked. `url`, `status` (None: no answer), `body`."""

    def __init__(self, what: str, url: str, status: int | None = None, body: str = "") -> None:
        self.what, self.url, self.status, self.body = what, url, status, body[:BODY_CHARS]
        answer = f" [HTTP {status}: {self.body.strip() or 'empty body'}]" if status else ""
        super().__init__(f"{url}: {what}{answer}")


class EnvConnectionError(EnvError):
    """The server cannot be reached, or hung up before its answer was complete."""


class EnvTimeout(EnvError):
    """The server was silent for timeout_s."""


class EnvServerError(EnvError):
    """5xx: the environment itself failed."""


class EnvProtocolError(EnvError):
    """An answer that is not what the wire format promises."""


class SessionLost(EnvError):
    """The server does not know the session (any more): evicted, closed, or the server restarted."""


class UnknownTask(EnvError):
    """reset() was given a task index that the environment does not have."""


class StepOutsideEpisode(EnvError):
    """step() before reset(), or after the episode was over."""


class TooManySessions(EnvError):
    """429 for longer than busy_wait_s."""


class ActionRejected(EnvError):
    """The server refused what the policy wrote; `EnvClient.step` turns it into a StepResult."""


class NotSupported(EnvError):
    """The server lacks this path, as AgentGym's lack /available_actions, /state and /oracle."""


class AllServersDown(EnvError):
    """No address of a pool can be used."""


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


class EnvClient:
    """One session of one server; nothing is sent before open() or the first reset().

    Arguments:
        env: name in envs.ENVS; says how text is parsed and what the fields on the wire are called.
        base_url: http://HOST:PORT of the server.
        timeout_s: the longest silence of the server that is waited for, in seconds.
        num_retries: repetitions of a request that is safe to repeat.
        busy_wait_s: how long 429 is waited for, in seconds.
        parse: another action format than the environment's own: model text -> action, or ParseError.
        on_failure, on_close: called with each error raised, and once by close(); for EnvPool.

    Raises:
        ValueError: unknown environment, or an address that is no URL.
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
        self.base_url = _checked_url(base_url)
        self.prompt: list[dict[str, str]] = env_class.PROMPT
        self.parse: Callable[[str], str] = parse or env_class.parse
        self.timeout_s, self.num_retries, self.busy_wait_s = timeout_s, num_retries, busy_wait_s
        self._wire = env_class.WIRE
        self._on_failure, self._on_close = on_failure, on_close
        self._http = requests.Session()
        # NOTE: without this HTTP_PROXY applies even to 127.0.0.1, and .netrc adds credentials.
        self._http.trust_env = False
        self._last_used = time.monotonic()
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

    def reset(self, task_index: int, seed: int = 0) -> str:
        """Begin an episode and return its first observation.

        `seed` varies what the task leaves open; AgentGym's servers ignore it. A session that the
        server has forgotten is replaced by a new one.

        Raises:
            UnknownTask: the environment has no task `task_index`.
            EnvError: whatever else the table above names.
        """
        self._is_running = False
        self.open()
        body = {self._wire.index_field: task_index, "seed": seed}
        try:
            answer = self._request("POST", "/reset", self._addressed(body))
        except SessionLost:
            self._session_id = None
            self.open()
            answer = self._request("POST", "/reset", self._addressed(body))
        observation = self._field(answer, "/reset", "observation", str)
        self._score, self._is_running = 0.0, True
        return observation

    def step(self, model_text: str) -> StepResult:
        """Play the action that `model_text` holds.

        Raises:
            StepOutsideEpisode: there is no running episode; call reset() first.
            EnvError: whatever else the table above names. The episode is lost then: its state at
                the server is unknown, and only reset() goes on from there.
        """
        if not self._is_running:
            raise StepOutsideEpisode("no episode is running; call reset()", self.base_url + "/step")
        try:
            action = self.parse(model_text)
        except ParseError as error:
            return self._unheard(str(error), "parse_error")
        try:
            answer = self._request("POST", "/step", self._addressed({"action": action}))
            observation = self._field(answer, "/step", "observation", str)
            reward = float(self._field(answer, "/step", "reward", (int, float)))
            if not math.isfinite(reward):
                raise self._unexpected(answer, "/step", f"a finite reward, got {reward}")
            truncated = bool(answer.get("truncated", False))
            if "terminated" in answer:
                terminated = self._field(answer, "/step", "terminated", bool)
            else:
                terminated = self._field(answer, "/step", "done", bool) and not truncated
        except ActionRejected as error:
            return self._unheard(error.what, "rejected")
        except EnvError:
            self._is_running = False
            raise
        self._score += reward
        self._is_running = not (terminated or truncated)
        # AgentGym's answers hold no info: solved is what pays in full.
        info = {"success": terminated and self._score >= 1.0, "score": self._score}
        return StepResult(
            observation, reward, terminated, truncated, info | (answer.get("info") or {})
        )

    def observation(self) -> str:
        """The latest observation of the world, as the server keeps it."""
        answer = self._request("GET", "/observation", self._addressed({}))
        return self._field(answer, "/observation", "observation", str)

    def available_actions(self) -> list[str]:
        """The actions that the current state accepts. NotSupported by AgentGym's servers."""
        answer = self._request("GET", "/available_actions", self._addressed({}))
        return self._field(answer, "/available_actions", "actions", list)

    def state(self) -> dict[str, Any]:
        """What a person wants to see of the current state. NotSupported by AgentGym's servers."""
        answer = self._request("GET", "/state", self._addressed({}))
        if not isinstance(answer, dict):
            raise self._unexpected(answer, "/state", "an object")
        return answer

    def oracle(self) -> tuple[str, str]:
        """(thought, action): a good move now. NotSupported by AgentGym's servers."""
        answer = self._request("GET", "/oracle", self._addressed({}))
        return (
            self._field(answer, "/oracle", "thought", str),
            self._field(answer, "/oracle", "action", str),
        )

    def close(self) -> bool:
        """Free the session; True if the server says it did. Never raises EnvError: a server that
        cannot be told evicts idle sessions by itself."""
        if self._is_closed:
            return False
        was_open = False
        try:
            if self._session_id is not None:
                was_open = self._request("POST", "/close", self._addressed({})) is True
        except EnvError:
            pass  # told to on_failure; nothing is left to be done with this session
        finally:
            self._is_closed, self._is_running, self._session_id = True, False, None
            self._http.close()
            self._on_close(self)
        return was_open

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _unheard(self, message: str, kind: str) -> StepResult:
        """The policy's own fault: the world has not moved, and the policy reads why."""
        info = {"success": False, "score": self._score, kind: message}
        return StepResult(message, 0.0, False, False, info)

    def _addressed(self, body: dict[str, Any]) -> dict[str, Any]:
        if self._session_id is None:
            raise StepOutsideEpisode("there is no session yet; call reset()", self.base_url)
        return {self._wire.session_field: self._session_id, **body}

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
        """The JSON of a good answer. Repeats what may be repeated; raises the last error."""
        give_up_at = time.monotonic() + self.busy_wait_s
        num_failures, pause = 0, BACK_OFF_S
        while True:
            try:
                return self._request_once(method, path, fields)
            except TooManySessions as error:  # refused, so not done: any request may be repeated
                if time.monotonic() + pause > give_up_at:
                    self._on_failure(error)
                    raise
            except (EnvConnectionError, EnvServerError) as error:
                num_failures += 1
                if path == "/step" or num_failures > self.num_retries:
                    self._on_failure(error)
                    raise
            except EnvError as error:
                self._on_failure(error)
                raise
            time.sleep(pause)
            pause = min(2 * pause, MAX_BACK_OFF_S)

    def _request_once(self, method: str, path: str, fields: dict[str, Any]) -> Any:
        url = self.base_url + path
        if time.monotonic() - self._last_used > IDLE_CONNECTION_S:
            self._http.close()  # drops the connection; the session object opens another
        try:
            response = self._http.request(
                method,
                url,
                timeout=(min(CONNECT_TIMEOUT_S, self.timeout_s), self.timeout_s),
                allow_redirects=False,
                **({"params": fields} if method == "GET" else {"json": fields}),  # type: ignore[arg-type]
            )
        except requests.RequestException as error:
            if isinstance(error, requests.Timeout) or _is_read_timeout(error):
                what = f"no answer within {self.timeout_s:g} s; the server is overloaded or hangs"
                raise EnvTimeout(f"{method} {what}", url) from error
            what = f"{method} lost its connection ({_root_cause(error)}); is the server running?"
            raise EnvConnectionError(what, url) from error
        finally:
            self._last_used = time.monotonic()
        return _read_answer(url, response.status_code, response.text)


# Our words, then AgentGym's: "The id 7 is not valid.", "The task with environment 7 has been deleted."
_SESSION_LOST = re.compile(r"session \S+ does not exist|\bid \S+ is not valid|has been deleted")


def _read_answer(url: str, status: int, body: str) -> Any:
    """The JSON value of a good answer, or the error that this answer is."""
    path = "/" + url.rpartition("/")[2]
    try:
        answer = json.loads(body)
        reason = _reason(answer)
    except ValueError:
        answer, reason = None, "the answer is not JSON" if body.strip() else "the answer is empty"
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
        kind, what = StepOutsideEpisode, f"no episode is running: {reason}"
    elif _SESSION_LOST.search(reason) or (status == 404 and path != "/reset"):
        kind, what = SessionLost, "the server does not know this session; reset() opens another"
    elif status == 404:
        kind, what = UnknownTask, f"no such task: {reason}"
    elif path == "/step" and (status == 413 or (status == 422 and "body.action" in reason)):
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


def _is_read_timeout(error: requests.RequestException) -> bool:
    """requests calls silence in the middle of a body a ConnectionError."""
    return any(isinstance(argument, urllib3.exceptions.ReadTimeoutError) for argument in error.args)


def _root_cause(error: BaseException) -> str:
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {error}"


def _checked_url(url: str) -> str:
    if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", url):
        raise ValueError(f"{url!r} is not an address; expected http://HOST:PORT")
    return url.rstrip("/")


@dataclass
class _Address:
    url: str
    load: int = 0  # clients open
    num_failures: int = 0  # since it last worked
    retry_at: float = 0.0  # time.monotonic() from when on it may be used
    is_probed: bool = False  # after failures one client at a time tries it
    last_error: EnvError | None = None


class EnvPool:
    """Clients spread over several servers of one environment; shared by all threads.

    A new client goes to the address with the fewest. An address that cannot be reached is left
    alone for back_off_s, twice as long after each further failure, up to max_back_off_s; then one
    client tries it while the others go elsewhere. A full one (429) is left alone for a moment.

    Arguments:
        env: name in envs.ENVS.
        urls: addresses of servers, each http://HOST:PORT.
        dead_wait_s: how long client() waits, in seconds, when no address can be used; long enough
            for a server to be restarted.
        options: of every EnvClient: timeout_s, num_retries, busy_wait_s, parse.

    Raises:
        ValueError: no address, one that is no URL, or the same twice.
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
        self.env, self.urls = env, [_checked_url(url) for url in urls]
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
            except BaseException as error:
                client.close()
                if isinstance(error, EnvError):
                    continue  # on_failure has noted it: another address is next
                raise
            client.busy_wait_s = self.busy_wait_s
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

    def __enter__(self) -> Self:
        return self

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
            return TooManySessions(
                "every server is full; raise --max-sessions or add servers", where, 429, str(errors[0])
            )
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
            elif is_down and now >= address.retry_at:  # many clients notice one crash: count it once
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


# The server runs under this line instead of plain `-m envs.server` so that it cannot outlive us: its
# standard input is a pipe that only we hold open, and the kernel closes it however we die, SIGKILL
# included. PR_SET_PDEATHSIG would do less: it is Linux's alone, fires when the *thread* that started
# the child ends, and needs preexec_fn, which may deadlock beside the threads of torch and vLLM.
_RUN_WHILE_STDIN_IS_OPEN = """
import os, runpy, threading
threading.Thread(target=lambda: (os.read(0, 1), os._exit(0)), daemon=True).start()
runpy.run_module("envs.server", run_name="__main__", alter_sys=True)
"""


@contextmanager
def local_server(env: str, start_timeout_s: float = 60.0, **flags: Any) -> Iterator[str]:
    """`python -m envs.server --env ENV` on a free port of this machine; yields its base_url.

    The server is stopped when the block ends and dies with this process however that ends. Ctrl-C
    does not reach it, so that a run can finish its step and save.

    Arguments:
        start_timeout_s: seconds until the server must say that it listens.
        flags: further options of envs.server, as max_sessions=64, idle_timeout_s=600, port=36005.

    Raises:
        EnvError: it did not start; the message ends with what it wrote to stderr.
    """
    flags = {"port": 0, **flags}
    options = [w for name, value in flags.items() for w in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-c", _RUN_WHILE_STDIN_IS_OPEN, "--env", env, *options]
    name = f"local {env} server"
    # Files, not pipes: nobody need read them for the server to go on writing.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        server = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=err,
            cwd=Path(__file__).parent,
            start_new_session=True,
        )
        match = None
        try:
            give_up_at = time.monotonic() + start_timeout_s
            while not (match := re.search(r"listening on (\S+)", _tail(out))):
                if server.poll() is not None:
                    raise EnvError(f"exited with {server.returncode} at start:\n{_tail(err)}", name)
                if time.monotonic() > give_up_at:
                    what = f"not listening after {start_timeout_s:g} s:\n{_tail(err)}"
                    raise EnvError(what, name)
                time.sleep(0.02)
            yield match[1]
        finally:
            if match and (server.poll() is not None or _tail(err)):  # warnings, tracebacks
                code = server.poll()
                how = "ran" if code is None else f"died with {code}"
                print(f"{name} {how}; stderr ends with:\n{_tail(err)}", file=sys.stderr)
            server.terminate()
            try:
                server.wait(timeout=8)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
            if server.stdin:
                server.stdin.close()


def _tail(file: Any, num_bytes: int = 2000) -> str:
    """The end of a file that another process writes (pread leaves their common offset alone)."""
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), num_bytes, max(0, size - num_bytes)).decode(errors="replace")
