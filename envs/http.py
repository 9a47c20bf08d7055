"""One HTTP exchange that ends, whatever the other side does; and JSON that can be trusted.

Environment servers and chat models are other people's programs. `Line.ask` bounds the time of the
whole answer and its bytes, and follows no redirect. `parse` bounds the JSON: its depth, numbers
that are not finite, half surrogate pairs that no tokenizer can encode. `checked_url` refuses
addresses that hold a password, because addresses end up in logs and in config.json.

Read next: `envclient.py` and `sampling/chatapi.py`, which ask.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import math
import re
import socket
import ssl
import threading
import time
import urllib.request
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import urllib3
from urllib3.exceptions import ConnectTimeoutError, HTTPError, NewConnectionError, ReadTimeoutError

MAX_ANSWER_BYTES = 1 << 20  # an observation is kilobytes
MAX_DEPTH = 64  # of JSON; the environments' answers need 6
CONNECT_TIMEOUT_S = 5.0  # a host that drops packets is not worth the whole time-out
PIECE_BYTES = 1 << 16  # read at a time
JSON_HEADERS = {"Content-Type": "application/json"}


class ExchangeError(Exception):
    """There was no answer, or it cannot be used; the message says why."""


class TimedOut(ExchangeError):
    """The answer was not complete in time."""


class Lost(ExchangeError):
    """The server was not reached, or hung up before its answer was complete."""


class Unbelievable(ExchangeError):
    """The answer is not HTTP, too large, or compressed although we did not ask for that."""


@dataclass(frozen=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode(errors="replace")


class Line:
    """HTTP with one address, any number of exchanges at a time.

    Args:
        timeout_s: the longest that one exchange may take, from connecting to the last byte.
        max_bytes: of the body of one answer.
        maxsize: idle connections that are kept.
        proxy_url: as `proxy_of` returns it.
        ssl_context: the certificates to trust; None: the system's.
    """

    def __init__(
        self,
        url: str,
        timeout_s: float,
        max_bytes: int = MAX_ANSWER_BYTES,
        *,
        maxsize: int = 1,
        proxy_url: str | None = None,
        ssl_context: ssl.SSLContext | None = None,
    ) -> None:
        self.url, self.timeout_s, self.max_bytes = url, timeout_s, max_bytes
        self.hung_up = False
        self._sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._lock = threading.Lock()
        # urllib3, not requests on top of it, which costs CPU time at every step, reads HTTP_PROXY
        # even for 127.0.0.1, and adds credentials from .netrc.
        if proxy_url:
            headers = urllib3.make_headers(proxy_basic_auth=urllib3.util.parse_url(proxy_url).auth)
            self._http: urllib3.PoolManager = urllib3.ProxyManager(
                proxy_url, proxy_headers=headers, maxsize=maxsize, ssl_context=ssl_context
            )
        else:
            self._http = urllib3.PoolManager(maxsize=maxsize, ssl_context=ssl_context)
        self._http.pool_classes_by_scheme = {
            "http": self._tracked(urllib3.HTTPConnectionPool),
            "https": self._tracked(urllib3.HTTPSConnectionPool),
        }

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
        if self.hung_up:
            raise Lost("hung up")
        total_s = timeout_s or self.timeout_s
        connect_s = min(CONNECT_TIMEOUT_S, total_s)
        try:
            response = self._http.request(
                method,
                self.url + path,
                body=content,
                headers=headers,
                timeout=urllib3.Timeout(connect=connect_s, total=total_s),
                retries=False,
                redirect=False,
                preload_content=False,
            )
            try:
                body = self._read_body(response)
                return Answer(response.status, response.headers, body)
            except BaseException:
                response.close()  # its unread rest would be taken for the next answer
                raise
        except NewConnectionError as error:  # refused; urllib3 derives it from the time-out
            raise Lost(_cause(error)) from error
        except ConnectTimeoutError as error:
            raise TimedOut(f"not reached within {connect_s:.3g} s") from error
        except ReadTimeoutError as error:
            raise TimedOut(f"no answer within {total_s:.3g} s") from error
        except (HTTPError, ValueError, OverflowError) as error:  # ValueError: a chunk of -5 bytes
            # A server that hangs up early is an OSError; otherwise it did not send HTTP.
            if isinstance(_root(error), OSError) or "IncompleteRead" in _cause(error):
                raise Lost(_cause(error)) from error
            raise Unbelievable(f"the answer is not HTTP ({_cause(error)})") from error

    def hang_up(self) -> None:
        """End all exchanges, which are Lost in their threads; nothing can be asked any more."""
        self.hung_up = True
        with self._lock:
            sockets = list(self._sockets)
        for connection in sockets:
            _shut(connection)

    def close(self) -> None:
        """Drop idle connections."""
        self._http.clear()

    def _read_body(self, response: urllib3.BaseHTTPResponse) -> bytes:
        encoding = response.headers.get("Content-Encoding", "identity")
        if encoding.lower() != "identity":
            raise Unbelievable(
                f"the answer is encoded ({encoding[:20]}), and we did not ask for it"
            )
        body = bytearray()
        while piece := response.read1(PIECE_BYTES, decode_content=False):
            body += piece
            if len(body) > self.max_bytes:
                raise Unbelievable(f"the answer is larger than {self.max_bytes} bytes")
        return bytes(body)

    def _tracked(self, pool_class: Any) -> Any:
        """`pool_class` whose connections `hang_up` can end, and whose answers end in time."""
        line = self

        class Connection(pool_class.ConnectionCls):
            def connect(self) -> None:
                super().connect()
                with line._lock:
                    line._sockets.add(self.sock)
                if line.hung_up:
                    _shut(self.sock)

            def response_class(self, sock: socket.socket, **options: Any) -> Any:
                response = http.client.HTTPResponse(sock, **options)
                timed = _Timed(response.fp.detach(), sock)
                response.fp = io.BufferedReader(timed)
                return response

        class Pool(pool_class):
            ConnectionCls = Connection

        return Pool


class _Timed(io.RawIOBase):
    """A socket's bytes with one time-out for all of them: a socket's own starts again with every
    byte, so that headers which drip in would never end."""

    def __init__(self, raw: Any, sock: socket.socket) -> None:
        self._raw, self._sock = raw, sock
        self._end = time.monotonic() + (sock.gettimeout() or 0.0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> Any:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError("the time for the whole answer is over")
        self._sock.settimeout(left)
        return self._raw.readinto(buffer)

    def close(self) -> None:
        self._raw.close()
        super().close()


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # closed in the meantime
        # NOTE: not SSLSocket's own, which takes the session from under a thread that reads.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def _root(error: BaseException) -> BaseException:
    while error.__context__ is not None:
        error = error.__context__
    return error


def _cause(error: BaseException) -> str:
    root = _root(error)
    return " ".join(f"{type(root).__name__}: {root}"[:200].split())


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
