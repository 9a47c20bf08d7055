"""One request to an environment server, and a name for each thing that can go wrong with it.

Everything that can go wrong between the trainer and a world passes through here, and one question
decides what becomes of it: *could the policy have caused it?* A text without an action or one too
long is the policy's doing: reward 0, an observation that says why, and the episode goes on. A dead
server teaches nothing: it raises, and the trajectory is left out and counted, never scored.

    what happens                                what the caller of EnvClient sees
    the text holds no action                    StepResult, reward 0, info["parse_error"]; none sent
    our 413, or 422 about the action            StepResult, reward 0, info["rejected"]
    refused, reset or cut connection            EnvConnectionError
    no whole answer within timeout_s            EnvTimeout
    5xx                                         EnvServerError
    HTML, nothing, a field missing, {"error"}   EnvProtocolError
    an answer to another request (envs/seal.py) EnvProtocolError
    too large, too deep, compressed, no HTTP    EnvProtocolError
    the server does not know the session        SessionLost
    no such task / step outside an episode      UnknownTask / StepOutsideEpisode
    429 for longer than busy_wait_s             TooManySessions
    a server without /oracle and the like       NotSupported
    no address of a pool works                  AllServersDown, with the last error of each
    a server of another world                   WrongWorld, when a pool first uses it

What is repeated: /create, /reset, /close and every GET, `num_retries` times after a lost connection
or a 5xx, as long as timeout_s is not over; they can be done twice without harm (a session created
in vain is evicted by its server).
/step never: an action whose answer was lost may have been carried out. A time-out is not repeated
either, the caller goes to another server. 429 means "not done", so anything waits and repeats.

A status of our servers and the {"error": ...} that AgentGym's send with status 200 become the same
classes.

Read next: envs/exchange.py, which bounds what an answer may cost; envclient.py, which speaks of
episodes instead of requests.
"""

import json
import re
import time
from typing import Any
from urllib.parse import urlencode

from envs.exchange import JSON_HEADERS, Line, Lost, TimedOut, Unbelievable, checked_url, parse
from envs.seal import SEAL_HEADER, TURN_HEADER, problem, seal
from run.errors import RunFailed

BACK_OFF_S, MAX_BACK_OFF_S = 0.2, 2.0  # first and longest pause between tries
# NOTE: uvicorn closes a connection after 5 idle seconds, and a policy may think for longer. A /step
# sent into a closing connection is lost and may not be repeated, so idle ones are dropped first.
IDLE_CONNECTION_S = 4.0
# A session that is not closed is evicted by its server; to tell a hung one is not worth timeout_s.
CLOSE_TIMEOUT_S = 2.0
BODY_CHARS = 500  # of an answer, in error messages


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
        timeout_s: the longest that a request may take, repetitions included, in seconds.
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
        self.is_busy = False  # a request is under way
        self.is_sealing = False  # an answer had a seal, so that each must (envs/seal.py)
        self._line = Line(self.base_url, timeout_s)
        self._last_used = time.monotonic()

    def request(
        self,
        method: str,
        path: str,
        fields: dict[str, Any],
        timeout_s: float | None = None,
        turn: str = "",
    ) -> Any:
        """The JSON of a good answer. Repeats what may be repeated, raises the last EnvError.

        Arguments:
            timeout_s: in place of the transport's own time-out and of its busy_wait_s.
            turn: where the client's episode stands, as a `Turns` says it.
        """
        total_s = timeout_s or self.timeout_s
        now = time.monotonic()
        busy_until = now + (timeout_s or self.busy_wait_s)
        give_up_at = now + total_s
        num_failures, pause = 0, BACK_OFF_S
        self.is_busy = True
        try:
            while True:
                try:
                    left_s = max(give_up_at - time.monotonic(), 0.01)  # a sleep may be long
                    return self._request_once(method, path, fields, left_s, turn)
                except TooManySessions:  # refused, so not done: any request may be repeated
                    again_at = time.monotonic() + pause
                    give_up_at = again_at + total_s  # it has answered, the clock begins again
                    if again_at > busy_until:
                        raise
                except (EnvConnectionError, EnvServerError):
                    num_failures += 1
                    may_repeat = path != "/step" and not self._line.hung_up
                    is_late = time.monotonic() + pause >= give_up_at
                    if not may_repeat or is_late or num_failures > self.num_retries:
                        raise
                time.sleep(pause)
                pause = min(2 * pause, MAX_BACK_OFF_S)
        finally:
            self.is_busy = False

    def renewed(self) -> "Transport":
        """The same, with nothing under way."""
        new = Transport(self.base_url, self.timeout_s, self.num_retries, self.busy_wait_s)
        new.is_sealing = self.is_sealing
        return new

    def hang_up(self) -> None:
        """End what another thread asks: EnvConnectionError there; nothing is asked any more."""
        self._line.hang_up()

    def close(self) -> None:
        self._line.close()

    def _request_once(
        self, method: str, path: str, fields: dict[str, Any], timeout_s: float, turn: str
    ) -> Any:
        url = self.base_url + path
        asked, body, headers = path, None, {TURN_HEADER: turn} if turn else {}
        if method != "GET":
            body, headers = json.dumps(fields).encode(), headers | JSON_HEADERS
        elif fields:
            asked += f"?{urlencode(fields)}"
        if time.monotonic() - self._last_used > IDLE_CONNECTION_S:
            self._line.close()  # drops the connection; the next request opens another
        try:
            answer = self._line.ask(method, asked, body, headers, timeout_s)
        except TimedOut as error:
            what = f"{method}: {error}; the server is overloaded or hangs"
            raise EnvTimeout(what, url) from error
        except Lost as error:
            what = f"{method} lost its connection ({error}); is the server running?"
            raise EnvConnectionError(what, url) from error
        except Unbelievable as error:
            what = f"{method}: {error}; is this the address of an environment server?"
            raise EnvProtocolError(what, url) from error
        finally:
            self._last_used = time.monotonic()
        found = answer.headers.get(SEAL_HEADER)
        expected = seal(method, asked, turn, body or b"", answer.status, answer.body)
        if what := problem(expected, found, answer.status, self.is_sealing):
            raise EnvProtocolError(what, url, answer.status, answer.text)
        self.is_sealing |= found is not None
        return read_answer(url, answer.status, answer.body)


# Ours, then AgentGym's: "The id 7 is not valid.", "The task with environment 7 has been deleted."
_SESSION_LOST = re.compile(r"session \S+ does not exist|\bid \S+ is not valid|has been deleted")


def read_answer(url: str, status: int, content: bytes) -> Any:
    """The JSON value of a good answer, or the error that this answer is."""
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
    elif status == 409 and path == "/oracle":
        kind, what = StepOutsideEpisode, f"the oracle has no answer: {reason}"
    elif status == 409:
        kind, what = StepOutsideEpisode, f"no episode is running: {reason}"
    elif _SESSION_LOST.search(reason) or (status == 404 and path != "/reset"):
        kind, what = SessionLost, "the server does not know this session; reset() opens another"
    elif status == 404:
        kind, what = UnknownTask, f"no such task: {reason}"
    elif path == "/step" and (
        # 413 of a proxy is a page, and no word about what the policy wrote.
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
