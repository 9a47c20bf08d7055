"""One request to an environment server, and a name for each thing that can go wrong with it.

Everything that can go wrong between the trainer and a world passes through here, and one question
decides what becomes of it: *could the policy have caused it?* A text without an action or one too
long is the policy's doing: reward 0, an observation that says why, and the episode goes on. A dead
server teaches nothing: it raises, and the trajectory is left out and counted, never scored.

    what happens                                what the caller of EnvClient sees
    the text holds no action                    StepResult, reward 0, info["parse_error"]; none sent
    413, or 422 about the action                StepResult, reward 0, info["rejected"]
    refused, reset or cut connection            EnvConnectionError
    silence for timeout_s                       EnvTimeout
    5xx                                         EnvServerError
    HTML, nothing, a field missing, {"error"}   EnvProtocolError
    the server does not know the session        SessionLost
    no such task / step outside an episode      UnknownTask / StepOutsideEpisode
    429 for longer than busy_wait_s             TooManySessions
    a server without /oracle and the like       NotSupported
    no address of a pool works                  AllServersDown, with the last error of each
    a server of another world                   WrongWorld, when a pool first uses it

What is repeated: /create, /reset, /close and every GET, `num_retries` times after a lost connection
or a 5xx; they can be done twice without harm (a session created in vain is evicted by its server).
/step never: an action whose answer was lost may have been carried out. A time-out is not repeated
either, the caller goes to another server. 429 means "not done", so anything waits and repeats.

A status of our servers and the {"error": ...} that AgentGym's send with status 200 become the same
classes.

Read next: envclient.py, which speaks of episodes instead of requests.
"""

import json
import re
import time
from typing import Any

import urllib3
from urllib3.exceptions import HTTPError, NewConnectionError
from urllib3.exceptions import TimeoutError as HTTPTimeout

CONNECT_TIMEOUT_S = 5.0  # a host that drops packets is not worth timeout_s
BACK_OFF_S, MAX_BACK_OFF_S = 0.2, 2.0  # first and longest pause between tries
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


class WrongWorld(EnvError):
    """The server serves another world than the client plays."""


class NotSupported(EnvError):
    """The server lacks this path, as AgentGym's lack /available_actions, /state and /oracle."""


class AllServersDown(EnvError):
    """No address of a pool can be used."""


class Transport:
    """A connection to one server; used by one thread at a time, not always the same one.

    Arguments:
        base_url: http://HOST:PORT of the server.
        timeout_s: the longest silence of the server that is waited for, in seconds.
        num_retries: repetitions of a request that is safe to repeat.
        busy_wait_s: how long 429 is waited for, in seconds.

    Raises:
        ValueError: `base_url` is no URL.
    """

    def __init__(
        self, base_url: str, timeout_s: float, num_retries: int, busy_wait_s: float
    ) -> None:
        self.base_url = checked_url(base_url)
        self.timeout_s, self.num_retries, self.busy_wait_s = timeout_s, num_retries, busy_wait_s
        # NOTE: urllib3, not requests on top of it: every step pays for that layer, in CPU time that
        # the sampler needs. It reads neither HTTP_PROXY, which would apply even to 127.0.0.1, nor
        # .netrc, which adds credentials.
        connect_s = min(CONNECT_TIMEOUT_S, timeout_s)
        timeout = urllib3.Timeout(connect=connect_s, read=timeout_s)
        self._http = urllib3.PoolManager(timeout=timeout, retries=False)
        self._last_used = time.monotonic()

    def request(self, method: str, path: str, fields: dict[str, Any]) -> Any:
        """The JSON of a good answer. Repeats what may be repeated, raises the last EnvError."""
        give_up_at = time.monotonic() + self.busy_wait_s
        num_failures, pause = 0, BACK_OFF_S
        while True:
            try:
                return self._request_once(method, path, fields)
            except TooManySessions:  # refused, so not done: any request may be repeated
                if time.monotonic() + pause > give_up_at:
                    raise
            except (EnvConnectionError, EnvServerError):
                num_failures += 1
                if path == "/step" or num_failures > self.num_retries:
                    raise
            time.sleep(pause)
            pause = min(2 * pause, MAX_BACK_OFF_S)

    def close(self) -> None:
        self._http.clear()

    def _request_once(self, method: str, path: str, fields: dict[str, Any]) -> Any:
        url = self.base_url + path
        if time.monotonic() - self._last_used > IDLE_CONNECTION_S:
            self._http.clear()  # drops the connection; the next request opens another
        sent: dict[str, Any] = {"fields": fields}
        if method != "GET":
            sent = {"body": json.dumps(fields), "headers": {"Content-Type": "application/json"}}
        try:
            answer = self._http.request(method, url, redirect=False, **sent)
        except HTTPError as error:
            # A refused connection is a NewConnectionError, which urllib3 counts as a time-out.
            if isinstance(error, HTTPTimeout) and not isinstance(error, NewConnectionError):
                what = f"no answer within {self.timeout_s:g} s; the server is overloaded or hangs"
                raise EnvTimeout(f"{method} {what}", url) from error
            what = f"{method} lost its connection ({_root_cause(error)}); is the server running?"
            raise EnvConnectionError(what, url) from error
        finally:
            self._last_used = time.monotonic()
        return _read_answer(url, answer.status, answer.data.decode(errors="replace"))


# Ours, then AgentGym's: "The id 7 is not valid.", "The task with environment 7 has been deleted."
_SESSION_LOST = re.compile(r"session \S+ does not exist|\bid \S+ is not valid|has been deleted")


def _read_answer(url: str, status: int, body: str) -> Any:
    """The JSON value of a good answer, or the error that this answer is."""
    path = "/" + url.rpartition("/")[2]
    try:
        answer = encodable(json.loads(body))
        reason = _reason(answer)
    except (ValueError, RecursionError):  # the second: brackets in brackets, thousands of them
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
    elif status == 409 and path == "/oracle":
        kind, what = StepOutsideEpisode, f"the oracle has no answer: {reason}"
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


def encodable(value: Any) -> Any:
    """JSON with half surrogate pairs replaced: it can hold them, no tokenizer and no file can."""
    if isinstance(value, str):
        return (
            value
            if value.isascii()
            else value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        )
    if isinstance(value, dict):
        return {encodable(key): encodable(item) for key, item in value.items()}
    return [encodable(item) for item in value] if isinstance(value, list) else value


def _reason(answer: Any) -> str:
    """What an error answer says: our "error" and "hint", or FastAPI's "detail"."""
    if not isinstance(answer, dict):
        return "an unexpected answer"
    if isinstance(answer.get("detail"), list):  # [{"loc": ["body", "action"], "msg": ...}, ...]
        items = [item for item in answer["detail"] if isinstance(item, dict)]
        return "; ".join(f"{'.'.join(map(str, i.get('loc', [])))}: {i.get('msg')}" for i in items)
    parts = [str(answer[key]) for key in ("error", "hint", "detail") if answer.get(key)]
    return "; ".join(parts) or "an unexpected answer"


def _root_cause(error: BaseException) -> str:
    while error.__context__ is not None:
        error = error.__context__
    return f"{type(error).__name__}: {error}"


def checked_url(url: str) -> str:
    """`url` without a final slash; ValueError if it is no http URL."""
    if not re.fullmatch(r"https?://[^/\s]+(/\S*)?", url):
        raise ValueError(f"{url!r} is not an address; expected http://HOST:PORT")
    return url.rstrip("/")
