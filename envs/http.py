"""One HTTP exchange that ends, whatever the other side does; and JSON that can be trusted.

Environment servers and chat models are other people's programs. `Line.ask` bounds the time of the
whole answer and its bytes, and follows no redirect. `parse` bounds the JSON: its depth, numbers
that are not finite, half surrogate pairs that no tokenizer can encode. `checked_url` refuses
addresses that hold a password, because addresses end up in logs and in config.json.

Read next: `envclient.py` and `sampling/chatapi.py`, which ask.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import math
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

MAX_ANSWER_BYTES = 1 << 20  # an observation is kilobytes
MAX_DEPTH = 64  # of JSON; the environments' answers need 6
CONNECT_TIMEOUT_S = 5.0  # a host that drops packets is not worth the whole time-out
# NOTE: uvicorn closes a connection after 5 idle seconds. A /step sent into a closing connection is
# lost and may not be repeated, so we drop idle ones first.
IDLE_CONNECTION_S = 4.0
JSON_HEADERS = {"Content-Type": "application/json"}


class ExchangeError(Exception):
    """There was no answer, or it cannot be used; the message says why."""


class TimedOut(ExchangeError):
    """The answer was not complete in time."""


class Lost(ExchangeError):
    """The server was not reached, or hung up before its answer was complete."""


class Unbelievable(ExchangeError):
    """The answer is not HTTP, or too large."""


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str] | Message
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode(errors="replace")


class Line:
    """HTTP with one address, any number of exchanges at a time.

    It stands on http.client, not on requests, which costs CPU time at every step, reads HTTP_PROXY
    even for 127.0.0.1, and adds credentials from .netrc.

    Args:
        timeout_s: the longest that one exchange may take, from connecting to the last byte.
        max_bytes: of the body of one answer.
        proxy_url: as `proxy_of` returns it.
        ssl_context: the certificates to trust; None: the system's.
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
        self.hung_up = False
        self._to, self._proxy = urlsplit(url), urlsplit(proxy_url) if proxy_url else None
        self._ssl_context = ssl_context
        # Every connection, or the socket of one, is in one of the two.
        self._idle: list[tuple[float, HTTPConnection]] = []  # since when; the newest last
        self._in_use: set[socket.socket] = set()

    def ask(
        self,
        method: str,
        path: str,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Answer:
        """The answer to one request, whatever its status; nothing is repeated. ExchangeError
        otherwise."""
        total_s = timeout_s or self.timeout_s
        end = time.monotonic() + total_s
        try:
            connection = self._idle_connection() or self._connect(total_s)
            return self._exchange(connection, end, method, path, content, headers or {})
        except TimeoutError as error:
            raise TimedOut(f"no answer within {total_s:.3g} s") from error
        except (OSError, IncompleteRead) as error:
            raise Lost(_one_line(error)) from error
        except (HTTPException, ValueError) as error:
            raise Unbelievable(f"the answer is not HTTP ({_one_line(error)})") from error

    def hang_up(self) -> None:
        """End all exchanges, which are Lost in their threads; nothing can be asked any more."""
        self.hung_up = True
        for sock in list(self._in_use):
            with contextlib.suppress(OSError):  # closed in the meantime
                # NOTE: not SSLSocket's own, which takes the session from under a thread that reads.
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Drop idle connections."""
        while self._idle:
            self._idle.pop()[1].close()

    def __del__(self) -> None:
        self.close()

    def _idle_connection(self) -> HTTPConnection | None:
        with contextlib.suppress(IndexError):  # none is idle; other threads take from the list too
            since, connection = self._idle.pop()
            if time.monotonic() - since < IDLE_CONNECTION_S and not _has_news(connection):
                return connection
            connection.close()
            self.close()  # the others have been idle for longer
        return None

    def _connect(self, total_s: float) -> HTTPConnection:
        to, via = self._to, self._proxy or self._to
        host, port = via.hostname or "", via.port or (443 if via.scheme == "https" else 80)
        timeout_s = min(CONNECT_TIMEOUT_S, total_s)
        if to.scheme == "http":
            connection = HTTPConnection(host, port, timeout_s)
        else:
            connection = HTTPSConnection(host, port, timeout=timeout_s, context=self._ssl_context)
            if self._proxy:
                connection.set_tunnel(to.hostname or "", to.port or 443, self._proxy_headers())
        try:
            connection.connect()
        except TimeoutError as error:
            raise TimedOut(f"not reached within {timeout_s:.3g} s") from error
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
        target = self._to.path + path
        if self._proxy and self._to.scheme == "http":
            target, headers = self.url + path, {**headers, **self._proxy_headers()}
        sock = connection.sock
        self._in_use.add(sock)
        try:
            if self.hung_up:
                raise Lost("hung up")
            sock.settimeout(max(end - time.monotonic(), 0.001))
            connection.response_class = partial(_Response, end=end)  # type: ignore[assignment]
            connection.request(method, target, content, headers)
            response = connection.getresponse()
            body = response.read(self.max_bytes + 1)
            if len(body) > self.max_bytes:
                raise Unbelievable(f"the answer is larger than {self.max_bytes} bytes")
            if response.length:
                raise IncompleteRead(body, response.length)
        except BaseException:
            connection.close()  # the unread rest would be taken for the next answer
            raise
        finally:
            self._in_use.discard(sock)
        if connection.sock:  # otherwise the server asked to close it
            self._idle.append((time.monotonic(), connection))
        return Answer(response.status, response.headers, body)

    def _proxy_headers(self) -> dict[str, str]:
        if not self._proxy or not self._proxy.username:
            return {}
        secret = f"{unquote(self._proxy.username)}:{unquote(self._proxy.password or '')}"
        return {"Proxy-Authorization": f"Basic {base64.b64encode(secret.encode()).decode()}"}


class _Response(HTTPResponse):
    """An answer whose headers and body must have arrived at `end`. A socket's own time-out starts
    again with every byte, so that headers which drip in would never end."""

    def __init__(self, sock: socket.socket, end: float, **options: Any) -> None:
        super().__init__(sock, **options)
        self.fp = io.BufferedReader(_Timed(self.fp.detach(), sock, end))


class _Timed(io.RawIOBase):
    """The bytes of a socket until `end`, in time.monotonic() seconds."""

    def __init__(self, raw: Any, sock: socket.socket, end: float) -> None:
        self._raw, self._sock, self._end = raw, sock, end

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> Any:
        left_s = self._end - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        self._sock.settimeout(left_s)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


def _has_news(connection: HTTPConnection) -> bool:
    """Whether something has come without being asked for: usually the end of the connection, which
    a server may close after an error, or sooner than ours."""
    waiting = select.poll()
    waiting.register(connection.sock, select.POLLIN)
    return bool(waiting.poll(0))


def _one_line(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}"[:200].split())


# ----------------------------------------------------------------------------------------- content


def parse(body: bytes) -> Any:
    """The JSON value of an answer, its text made encodable. ValueError: it is not JSON, deeper than
    MAX_DEPTH, or holds NaN or infinity."""
    try:
        return _checked(json.loads(body.decode(errors="replace")), MAX_DEPTH)
    except RecursionError:
        raise ValueError("brackets in brackets, thousands of them") from None


def _checked(value: Any, depth: int) -> Any:
    if isinstance(value, str):
        return encodable(value)
    if isinstance(value, float) and not math.isfinite(value):  # NaN, 1e999
        raise ValueError(f"{value} is not a finite number")
    if isinstance(value, list | dict) and depth == 0:
        raise ValueError(f"brackets in brackets, more than {MAX_DEPTH}")
    if isinstance(value, list):
        return [_checked(item, depth - 1) for item in value]
    if isinstance(value, dict):
        return {encodable(key): _checked(item, depth - 1) for key, item in value.items()}
    return value


def encodable(text: str) -> str:
    """`text` with half surrogate pairs replaced: JSON can hold them, no tokenizer and no file can.

    >>> encodable("a \\ud83d b \\ud83d\\ude00")
    'a � b 😀'
    """
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


# ----------------------------------------------------------------------------------------- address


def checked_url(url: str, flag: str = "") -> str:
    """`url` without a final slash. ValueError, which names `flag`: it is not an http address, or
    may hold a secret, which is not repeated.

    >>> checked_url("http://127.0.0.1:36005/")
    'http://127.0.0.1:36005'
    """
    flag = flag and f"{flag} "
    if re.search(r"[@?#]", url):
        raise ValueError(
            f"{flag}an address is http://HOST:PORT/PATH alone: a user, password or key in it would "
            "be written to config.json; --api-key-env names the variable of a chat server's key"
        )
    with contextlib.suppress(ValueError):  # a port that is not a number
        if re.fullmatch(r"https?://[^/\s]+(/\S*)?", url) and urlsplit(url).port != 0:
            return url.rstrip("/")
    raise ValueError(f"{flag}{url!r} is not an address; expected http://HOST:PORT")


def proxy_of(url: str) -> str | None:
    """The proxy that this user's environment (HTTPS_PROXY, NO_PROXY) names for `url`."""
    parts, proxies = urlsplit(url), urllib.request.getproxies()
    if urllib.request.proxy_bypass(parts.netloc):
        return None
    return proxies.get(parts.scheme) or proxies.get("all")
