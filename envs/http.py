"""An HTTP client with hard limits, and checks for the JSON and the addresses that it handles.

Environment servers and chat models are other people's programs, and they can send anything.
`HttpClient.ask` limits the total time and size of an answer and does not follow redirects. `parse`
rejects JSON that is nested too deeply or holds NaN or infinity, and replaces unpaired surrogates,
which a tokenizer cannot encode. `checked_url` rejects addresses that contain a password, because
addresses are written to logs and to config.json.

Read next: `envclient.py` and `sampling/chatapi.py`, which use this client.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import math
import os
import re
import select
import socket
import ssl
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from email.message import Message
from functools import partial
from http.client import HTTPConnection, HTTPException, HTTPResponse, HTTPSConnection, IncompleteRead
from typing import Any
from urllib.parse import unquote, urlsplit

MAX_ANSWER_BYTES = 1 << 20  # an observation has a few kilobytes
MAX_DEPTH = 64  # of nested JSON; the environments' answers need 6
CONNECT_TIMEOUT_S = 5.0  # shorter than the full time-out, for hosts that drop packets
# NOTE: uvicorn closes a connection that is idle for 5 seconds. A /step that is sent while it closes
# is lost and must not be repeated, so we close idle connections earlier.
IDLE_CONNECTION_S = 4.0
JSON_HEADERS = {"Content-Type": "application/json"}


class ExchangeError(Exception):
    """No usable answer arrived; the message gives the reason."""


class ExchangeTimeout(ExchangeError):
    """The answer was not complete in time."""


class ConnectionLost(ExchangeError):
    """The server could not be reached, or the connection broke before the answer was complete."""


class InvalidAnswer(ExchangeError):
    """The answer is not HTTP, or it is too large."""


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str] | Message
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode(errors="replace")


class HttpClient:
    """A client for one address. Threads can share it; each exchange has its own connection.

    It is built on http.client, because the package `requests` costs CPU time at every step, reads
    HTTP_PROXY even for 127.0.0.1, and adds credentials from .netrc.

    Args:
        timeout_s: time limit of one exchange, from connecting to the last byte of the answer.
        max_bytes: size limit of an answer's body.
        proxy_url: the proxy, as `proxy_of` returns it.
        ssl_context: the certificates to trust; by default the system's.
    """

    def __init__(
        self,
        url: str,
        timeout_s: float,
        max_bytes: int = MAX_ANSWER_BYTES,
        *,
        proxy_url: str | None = None,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self.url, self.timeout_s, self.max_bytes = url, timeout_s, max_bytes
        self.is_aborted = False
        self._target, self._proxy = urlsplit(url), urlsplit(proxy_url) if proxy_url else None
        self._ssl_context = ssl_context
        # Every open connection is in one of these two.
        self._idle: list[tuple[float, HTTPConnection]] = []  # (idle since, connection), newest last
        self._in_use: set[socket.socket] = set()

    def ask(
        self,
        method: str,
        path: str,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Answer:
        """Send one request, without retries; return the answer, whatever its status. Raises
        ExchangeError if there is no usable answer."""
        total_s = timeout_s or self.timeout_s
        end = time.monotonic() + total_s
        try:
            connection = self._idle_connection() or self._connect(total_s)
            return self._exchange(connection, end, method, path, content, headers or {})
        except TimeoutError as error:
            raise ExchangeTimeout(f"no answer within {total_s:.3g} s") from error
        except (OSError, IncompleteRead) as error:
            raise ConnectionLost(_one_line(error, headers)) from error
        except (HTTPException, ValueError) as error:
            raise InvalidAnswer(f"the answer is not HTTP ({_one_line(error, headers)})") from error

    def abort(self) -> None:
        """End all exchanges; they and all later ones raise ConnectionLost in their threads."""
        self.is_aborted = True
        for sock in list(self._in_use):
            with contextlib.suppress(OSError):  # the socket was closed in the meantime
                # NOTE: SSLSocket.shutdown would drop the TLS session while another thread reads.
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close idle connections."""
        while self._idle:
            self._idle.pop()[1].close()

    def __del__(self) -> None:
        self.close()

    def _idle_connection(self) -> HTTPConnection | None:
        with contextlib.suppress(IndexError):  # the list is empty; other threads pop from it too
            since, connection = self._idle.pop()
            if time.monotonic() - since < IDLE_CONNECTION_S and not _is_readable(connection):
                return connection
            connection.close()
            self.close()  # the other connections have been idle for longer
        return None

    def _connect(self, total_s: float) -> HTTPConnection:
        target, peer = self._target, self._proxy or self._target
        host, port = peer.hostname or "", peer.port or (443 if peer.scheme == "https" else 80)
        timeout_s = min(CONNECT_TIMEOUT_S, total_s)
        if target.scheme == "http":
            connection = HTTPConnection(host, port, timeout_s)
        else:
            connection = HTTPSConnection(host, port, timeout=timeout_s, context=self._ssl_context)
            if self._proxy:
                headers = self._proxy_headers()
                connection.set_tunnel(target.hostname or "", target.port or 443, headers)
        try:
            connection.connect()
        except TimeoutError as error:
            raise ExchangeTimeout(f"not reached within {timeout_s:.3g} s") from error
        return connection

    def _exchange(
        self,
        connection: HTTPConnection,
        end: float,
        method: str,
        path: str,
        content: bytes | None,
        headers: Mapping[str, str],
    ) -> Answer:
        request_target = self._target.path + path
        if self._proxy and self._target.scheme == "http":
            request_target, headers = self.url + path, {**headers, **self._proxy_headers()}
        sock = connection.sock
        self._in_use.add(sock)
        try:
            if self.is_aborted:
                raise ConnectionLost("this client has been aborted")
            sock.settimeout(max(end - time.monotonic(), 0.001))
            max_bytes = 8 * self.max_bytes  # with framing: a chunk of one byte takes six
            response_class = partial(_Response, end=end, max_bytes=max_bytes)
            connection.response_class = response_class  # type: ignore[assignment]
            connection.request(method, request_target, content, headers)
            response = connection.getresponse()
            body = response.read(self.max_bytes + 1)
            if len(body) > self.max_bytes:
                raise InvalidAnswer(f"the answer is larger than {self.max_bytes} bytes")
            if response.length:
                raise IncompleteRead(body, response.length)
        except BaseException:
            connection.close()  # its unread bytes would be read as the next answer
            raise
        finally:
            self._in_use.discard(sock)
        if connection.sock:  # None if the server asked to close the connection
            self._idle.append((time.monotonic(), connection))
        return Answer(response.status, response.headers, body)

    def _proxy_headers(self) -> dict[str, str]:
        if not self._proxy or not self._proxy.username:
            return {}
        secret = f"{unquote(self._proxy.username)}:{unquote(self._proxy.password or '')}"
        return {"Proxy-Authorization": f"Basic {base64.b64encode(secret.encode()).decode()}"}


class _Response(HTTPResponse):
    """An answer whose headers and body must be complete by the time `end`. A socket time-out is not
    enough: it restarts with every byte, so headers could trickle in forever. The bytes are
    limited, too: http.client reads a chunk of size -1 until the connection ends."""

    def __init__(self, sock: socket.socket, end: float, max_bytes: int, **options: Any) -> None:
        super().__init__(sock, **options)
        self.fp = io.BufferedReader(_Limited(self.fp.detach(), sock, end, max_bytes))


class _Limited(io.RawIOBase):
    """Reads up to max_bytes from a socket, until the time `end`, in seconds of time.monotonic()."""

    def __init__(self, raw: Any, sock: socket.socket, end: float, max_bytes: int) -> None:
        self._raw, self._sock, self._end, self._max_bytes = raw, sock, end, max_bytes

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> Any:
        remaining_s = self._end - time.monotonic()
        if remaining_s <= 0:
            raise TimeoutError
        self._sock.settimeout(remaining_s)
        num_bytes = self._raw.readinto(buffer)
        self._max_bytes -= num_bytes
        if self._max_bytes < 0:
            raise InvalidAnswer("the answer is too large")
        return num_bytes

    def close(self) -> None:
        self._raw.close()
        super().close()


def _is_readable(connection: HTTPConnection) -> bool:
    """Whether an idle connection has something to read. Usually this means that the server has
    closed it, after an error or after a shorter idle time than ours."""
    poll = select.poll()
    poll.register(connection.sock, select.POLLIN)
    return bool(poll.poll(0))


def _one_line(error: BaseException, headers: Mapping[str, str] | None) -> str:
    key = (headers or {}).get("Authorization", "").removeprefix("Bearer ")  # servers repeat it
    return " ".join(masked(f"{type(error).__name__}: {error}", key)[:200].split())


# ----------------------------------------------------------------------------------------- content


def parse(body: bytes) -> Any:
    """Parse the JSON of an answer and make its strings encodable. Raises ValueError if it is not
    JSON, is nested deeper than MAX_DEPTH, or holds NaN or infinity."""
    try:
        return _check_json(json.loads(body.decode(errors="replace")), MAX_DEPTH)
    except RecursionError:
        raise ValueError("brackets are nested thousands of levels deep") from None


def _check_json(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, float) and not math.isfinite(value):  # NaN, 1e999
        raise ValueError(f"{value} is not a finite number")
    if isinstance(value, list | dict) and depth == 0:
        raise ValueError(f"brackets are nested more than {MAX_DEPTH} levels deep")
    if isinstance(value, list):
        return [_check_json(item, depth - 1) for item in value]
    if isinstance(value, dict):
        return {encodable(key): _check_json(item, depth - 1) for key, item in value.items()}
    return value


def encodable(text: str) -> str:
    """Replace unpaired surrogates, which JSON can hold but a tokenizer or a file cannot.

    >>> encodable("a \\ud83d b \\ud83d\\ude00")
    'a � b 😀'
    """
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


# ----------------------------------------------------------------------------------------- address


def checked_url(url: str, flag: str = "") -> str:
    """Check an address and remove its final slash. Raises ValueError if it is not an HTTP address
    or may contain a secret. The message names the option `flag` and never repeats a secret.

    >>> checked_url("http://127.0.0.1:36005/")
    'http://127.0.0.1:36005'
    """
    flag = flag and f"{flag} "
    if re.search(r"[@?#]", url):
        raise ValueError(
            f"{flag}expected http://HOST:PORT/PATH without a user name, password or key, which "
            "would be written to config.json; for a chat server's key use --api-key-env VARIABLE"
        )
    with contextlib.suppress(ValueError):  # urlsplit raises it if the port is not a number
        if re.fullmatch(r"https?://[^/\s]+(/\S*)?", url) and urlsplit(url).port != 0:
            return url.rstrip("/")
    raise ValueError(f"{flag}{url!r} is not an address; expected http://HOST:PORT")


def key_in(variable: str | None) -> str | None:
    """The key in the environment variable that --api-key-env names; None if it names none. Raises
    ValueError if the variable holds no key. A line break would end the header that sends the key,
    and the error would print it."""
    key = os.environ.get(variable or "", "")
    if variable and not re.fullmatch("[!-~]+", key):
        problem = "this variable is not set, or its value contains blanks or line breaks"
        raise ValueError(f"--api-key-env {variable}: {problem}")
    return key or None


def masked(text: str, key: str | None) -> str:
    """`text` with every copy of the key replaced, also if it is escaped as in JSON or a URL.

    >>> masked("401: invalid key sk-1/2; see /login?key=sk-1%2F2", "sk-1/2")
    '401: invalid key ***; see /login?key=***'
    """
    forms = (rf"(?:\\?{re.escape(c)}|%{ord(c):02x}|\\u{ord(c):04x})" for c in key or "")
    return re.sub("".join(forms), "***", text, flags=re.IGNORECASE) if key else text


def proxy_of(url: str) -> str | None:
    """The proxy for `url` according to the user's environment variables (HTTPS_PROXY, NO_PROXY)."""
    parts, proxies = urlsplit(url), urllib.request.getproxies()
    if urllib.request.proxy_bypass(parts.netloc):
        return None
    return proxies.get(parts.scheme) or proxies.get("all")
