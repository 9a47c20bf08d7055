"""One HTTP exchange that ends, however the other side behaves; and JSON that can be believed.

The server of a world, a sampler, a chat model: each is another's program, on another's machine
perhaps. What it sends is bounded before it is used, in one place for all three:

    bytes        counted as they leave the socket: headers, chunk sizes and trailers are bytes too
    total time   one clock for the whole answer; a socket's own time-out begins again with each byte
    encoding     none is asked for, so none is undone: a bomb of zeros stays as small as it came
    redirects    are not followed, but handed over as the answer that they are
    JSON         depth, numbers that are none, half characters (`parse`)

An address has the same enemies on our side: what holds a password ends up in logs, in config.json
and in messages, so `checked_url` lets none in.

Read next: `envs/http.py` and `sampling/chatapi.py`, which ask.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import io
import json
import math
import re
import socket
import threading
import time
import urllib.request
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import urllib3
from urllib3.connection import HTTPConnection, HTTPSConnection
from urllib3.exceptions import (
    ConnectTimeoutError,
    HTTPError,
    InvalidChunkLength,
    InvalidHeader,
    NewConnectionError,
    ReadTimeoutError,
)

# An observation is kilobytes, and our own servers refuse more than a megabyte. JSON takes up to 25
# times its length in memory ("[],[],..."), so an answer costs 25 MB at the most.
MAX_ANSWER_BYTES = 1 << 20
MAX_DEPTH = 64  # of JSON; the worlds' answers need 6
CONNECT_TIMEOUT_S = 5.0  # a host that drops packets is not worth timeout_s
PIECE_BYTES = 1 << 16  # read at a time
JSON_HEADERS = {"Content-Type": "application/json"}


class ExchangeError(Exception):
    """There was no answer, or none to be used; the message says why."""


class TimedOut(ExchangeError):
    """The answer was not complete in time."""


class Lost(ExchangeError):
    """The server was not reached, or hung up before its answer was complete."""


class Unbelievable(ExchangeError, HTTPError):  # urllib3 lets its own errors through
    """The answer is no HTTP, too large, or in an encoding that was not asked for."""


class NotFinite(ValueError):
    """JSON that holds NaN or infinity."""


@dataclass(frozen=True)
class Answer:
    """Whole, and within its bounds."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode(errors="replace")


class Line:
    """HTTP with one address, any number of exchanges at a time.

    Args:
        url: as `checked_url` returns it.
        timeout_s: the longest that one exchange may take, from connecting to the last byte.
        max_bytes: of one answer, its headers included.
        options: of urllib3's pool: `maxsize` (idle connections that are kept), `ssl_context`;
            `proxy_url`.
    """

    def __init__(
        self, url: str, timeout_s: float, max_bytes: int = MAX_ANSWER_BYTES, **options: Any
    ) -> None:
        self.url, self.timeout_s, self.max_bytes = url, timeout_s, max_bytes
        self.hung_up = False
        self._open: weakref.WeakSet[socket.socket] = weakref.WeakSet()
        self._lock = threading.Lock()  # of both
        # NOTE: urllib3, not requests on top of it: every step pays for that layer, in CPU time that
        # the sampler needs. It reads neither HTTP_PROXY, which would apply even to 127.0.0.1, nor
        # .netrc, which adds credentials.
        proxy = options.pop("proxy_url", None)
        if proxy:
            auth = urllib3.util.parse_url(proxy).auth
            options["proxy_headers"] = urllib3.make_headers(proxy_basic_auth=auth)
        self._http = (
            urllib3.ProxyManager(proxy, **options) if proxy else urllib3.PoolManager(**options)
        )
        pools: dict[str, Any] = {
            "http": functools.partial(_HttpPool, line=self),
            "https": functools.partial(_HttpsPool, line=self),
        }
        self._http.pool_classes_by_scheme = pools

    def ask(
        self,
        method: str,
        path: str,
        content: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
    ) -> Answer:
        """The answer to one request, whatever its status; nothing is repeated.

        Raises:
            TimedOut, Lost, Unbelievable: see there.
        """
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
                return Answer(response.status, response.headers, self._body_of(response))
            except BaseException:
                response.close()  # what is left unread would be taken for the next answer
                raise
        except Unbelievable:
            raise
        except ConnectTimeoutError as error:
            if isinstance(error, NewConnectionError):  # refused: urllib3 counts it as a time-out
                raise Lost(_cause(error)) from error
            raise TimedOut(f"not reached within {connect_s:.3g} s") from error
        except ReadTimeoutError as error:
            raise TimedOut(f"no answer within {total_s:.3g} s") from error
        except HTTPError as error:
            if any(map(_is_no_http, _chain(error))):
                raise Unbelievable(f"the answer is not HTTP ({_cause(error)})") from error
            raise Lost(_cause(error)) from error
        except (ValueError, OverflowError) as error:  # a chunk of -5 bytes
            raise Unbelievable(f"the answer is not HTTP ({_cause(error)})") from error

    def hang_up(self) -> None:
        """End what is under way, in any thread: it is Lost there; nothing is asked any more."""
        with self._lock:
            self.hung_up = True
            for connection in self._open:
                _shut(connection)

    def close(self) -> None:
        """Drop idle connections."""
        self._http.clear()

    def opened(self, connection: socket.socket) -> None:
        """`hang_up` ends this connection too."""
        with self._lock:
            self._open.add(connection)
            if self.hung_up:
                _shut(connection)

    def _body_of(self, response: urllib3.BaseHTTPResponse) -> bytes:
        encoding = response.headers.get("Content-Encoding", "identity")
        if encoding.lower() != "identity":
            raise Unbelievable(f"the answer is encoded ({encoding[:20]}), which nobody asked for")
        return b"".join(response.stream(PIECE_BYTES, decode_content=False))


class _Bounded:
    """A connection of urllib3 whose answers are bounded, and that its line can end."""

    def __init__(self, *args: Any, line: Line, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._line = line

    def connect(self) -> None:
        super().connect()  # type: ignore[misc]
        self._line.opened(self.sock)  # type: ignore[attr-defined]

    def response_class(self, sock: socket.socket, **kwargs: Any) -> http.client.HTTPResponse:
        response = http.client.HTTPResponse(sock, **kwargs)
        response.fp = io.BufferedReader(
            _BoundedReader(response.fp.detach(), sock, self._line.max_bytes)
        )
        return response


class _HttpConnection(_Bounded, HTTPConnection):  # type: ignore[misc]  # a class there
    pass


class _HttpsConnection(_Bounded, HTTPSConnection):  # type: ignore[misc]
    pass


class _HttpPool(urllib3.HTTPConnectionPool):
    ConnectionCls = _HttpConnection


class _HttpsPool(urllib3.HTTPSConnectionPool):
    ConnectionCls = _HttpsConnection


class _BoundedReader(io.RawIOBase):
    """What a connection sends in answer to one request; its clock begins when this is made.

    The socket's time-out is by then what is left of the exchange's (urllib3.Timeout's `total`).
    """

    def __init__(self, raw: io.RawIOBase, connection: socket.socket, max_bytes: int) -> None:
        self._raw, self._connection = raw, connection
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._end = time.monotonic() + (connection.gettimeout() or 0.0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left_s = self._end - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the time for the whole answer is over")
        self._connection.settimeout(left_s)
        count = self._raw.readinto(buffer)
        self._num_bytes += count or 0
        if self._num_bytes > self._max_bytes:
            raise Unbelievable(f"the answer is larger than {self._max_bytes} bytes")
        return count

    def close(self) -> None:
        self._raw.close()
        super().close()


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # closed in the meantime
        # NOTE: not SSLSocket's own, which takes the session from under a thread that reads.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__context__


def _is_no_http(error: BaseException) -> bool:
    """A server that hangs up early is http.client.BadStatusLine, and OSError, too."""
    kinds = (http.client.BadStatusLine, http.client.LineTooLong, InvalidChunkLength, InvalidHeader)
    headers = type(error) is http.client.HTTPException  # more than 100 of them
    return headers or (isinstance(error, kinds) and not isinstance(error, OSError))


def _cause(error: BaseException) -> str:
    *_, root = _chain(error)
    return " ".join(f"{type(root).__name__}: {root}"[:200].split())


# ----------------------------------------------------------------------------------------- content


def parse(body: bytes) -> Any:
    """The JSON value of an answer.

    Raises:
        ValueError: it is none, or deeper than MAX_DEPTH.
        NotFinite: a number is not finite.
    """
    try:
        root = [json.loads(body.decode(errors="replace"), parse_constant=_no_number)]
    except RecursionError:
        raise ValueError("brackets in brackets, thousands of them") from None
    # Mended in place: a copy would double what a hostile answer costs.
    level: list[list[Any] | dict[str, Any]] = [root]
    for _ in range(MAX_DEPTH + 1):
        level = [inner for value in level for inner in _mend(value)]
    if level:
        raise ValueError(f"brackets in brackets, more than {MAX_DEPTH}")
    return root[0]


def _no_number(name: str) -> float:
    raise NotFinite(f"{name} is not a finite number")


def _mend(value: list[Any] | dict[str, Any]) -> Iterator[list[Any] | dict[str, Any]]:
    """Make the strings of one list or object encodable; yields the lists and objects in it."""
    if isinstance(value, dict):
        for key in [key for key in value if encodable(key) != key]:
            value[encodable(key)] = value.pop(key)
    places: Any = value.items() if isinstance(value, dict) else enumerate(value)
    for place, item in places:
        if isinstance(item, str):
            value[place] = encodable(item)
        elif isinstance(item, float) and not math.isfinite(item):  # 1e999
            raise NotFinite(f"{item} is not a finite number")
        elif isinstance(item, list | dict):
            yield item


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
    """`url` without a final slash.

    Args:
        flag: named in the message, as "--env-addr".
    Raises:
        ValueError: it is no http address, or one that may hold a secret, which is not repeated.

    >>> checked_url("http://127.0.0.1:36005/")
    'http://127.0.0.1:36005'
    """
    flag = flag and f"{flag} "
    if re.search(r"[@?#]", url):
        raise ValueError(
            f"{flag}an address is http://HOST:PORT/PATH alone: a user, password or key in it would "
            "be written to config.json; --api-key-env names the variable of a chat server's key"
        )
    with contextlib.suppress(ValueError):  # a port that is no number
        if re.fullmatch(r"https?://[^/\s]+(/\S*)?", url) and urlsplit(url).port != 0:
            return url.rstrip("/")
    raise ValueError(f"{flag}{url!r} is not an address; expected http://HOST:PORT")


def proxy_of(url: str) -> str | None:
    """The proxy that this user's environment (HTTPS_PROXY, NO_PROXY) names for `url`."""
    parts, proxies = urlsplit(url), urllib.request.getproxies()
    if urllib.request.proxy_bypass(parts.netloc):
        return None
    return proxies.get(parts.scheme) or proxies.get("all")
