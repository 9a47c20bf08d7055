"""What a stranger's request may cost: time, bytes, connections, files; and who may ask at all.

A server that trains for days also meets port scans, browsers, and clients that died in the middle
of a request. Each limit here ends one way of wearing it out, and the others play on:

    bounded_protocol    a request's head that does not come, or has no end; too many connections
    BodyLimit           a body that does not come, or is too large
    NoWebPages          a page in somebody's browser
    raise_file_limit    a connection is an open file, and the usual limit of 1,024 is soon reached

uvicorn ends what is idle after an answer (its timeout_keep_alive); what is idle before one, or is
too much, is ended here. Read next: envs/server.py, which puts them around the paths.
"""

import asyncio
import re
import resource
import socket
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.auto import AutoHTTPProtocol

from envs.sessions import error_answer

MAX_HEAD_BYTES = 65_536  # request line and headers; a client's are 200
DRAIN_BYTES = 16_000_000  # what is read and dropped of a too large body, so the client sees the 413
MAX_FILES = 65_536  # some machines allow a billion, which tools that close all of them feel
OWN_FILES = 128  # open beside the connections: libraries, logs, pipes, what a world needs


def raise_file_limit() -> int:
    """How many files this process may open from now on: as many as it may allow itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = MAX_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_FILES)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
        soft = allowed
    return MAX_FILES if soft == resource.RLIM_INFINITY else soft


def end_unread_answers(listener: socket.socket, timeout_s: float) -> None:
    """The kernel ends connections of `listener` whose client does not take its answer."""
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * timeout_s))


def bounded_protocol(max_connections: int, timeout_s: float) -> Any:
    """uvicorn's class of a connection, with an end to what it waits for; one class a server.

    A connection *waits* from its opening, or from the first byte after an answer, until a request's
    head is complete: for timeout_s at most. Beyond max_connections the one that waits longest makes
    room; where all are at work, the newest one is let in to be told 429.
    """
    waiting: dict[Any, asyncio.TimerHandle] = {}  # the longest first
    base: Any = AutoHTTPProtocol

    class Bounded(base):
        num_bytes = 0  # since the last complete head, while waiting

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            if len(self.connections) > max_connections:
                if waiting:
                    next(iter(waiting)).give_up()
                else:
                    error = f"{max_connections} connections are open, the most this server allows"
                    hint = "retry later, or start the server with a larger --max-connections"
                    self.app = error_answer(429, error, hint, {"Connection": "close"})
            self.wait()

        def data_received(self, data: bytes) -> None:
            before = self.cycle  # of request and answer; uvicorn makes it when a head is complete
            super().data_received(data)
            if self.cycle is not before:
                self.stop_waiting()
            elif before is None or before.response_complete:
                self.num_bytes += len(data)
                self.wait()
                if self.num_bytes > MAX_HEAD_BYTES:
                    self.give_up()

        def connection_lost(self, error: Exception | None) -> None:
            super().connection_lost(error)
            self.stop_waiting()

        def wait(self) -> None:
            if self not in waiting:
                waiting[self] = self.loop.call_later(timeout_s, self.give_up)

        def stop_waiting(self) -> None:
            self.num_bytes = 0
            if self in waiting:
                waiting.pop(self).cancel()

        def give_up(self) -> None:
            self.stop_waiting()
            self.transport.abort()

    return Bounded


def name_in(host: str) -> str:
    """The name in a Host header, without the port.

    >>> name_in("LocalHost:8610"), name_in("[::1]:80")
    ('localhost', '[::1]')
    """
    return re.sub(r":\d*$", "", host).lower()


class NoWebPages:
    """ASGI middleware: a page in somebody's browser must neither play here nor read along.

    Its requests carry an Origin; and one whose own name was made to mean this machine (DNS
    rebinding) carries that name as Host. `hosts`: the names to answer to; none: to any.
    """

    def __init__(self, app: ASGIApp, hosts: frozenset[str]) -> None:
        self.app, self.hosts = app, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
            host = name_in(headers.get(b"host", ""))
            problem = "requests of web pages are refused" if b"origin" in headers else ""
            if self.hosts and host not in self.hosts:
                problem = f"this server does not answer to the name {host!r}"
            if problem:
                hint = "ask from a program, at the address that the server printed"
                await error_answer(403, problem, hint)(scope, receive, send)
                return
        await self.app(scope, receive, send)


class BodyLimit:
    """ASGI middleware: reads the body itself and stops at the limits, so neither a missing nor a
    wrong Content-Length makes the server hold more than `max_body_bytes` a request, or wait for
    longer than `timeout_s`."""

    def __init__(self, app: ASGIApp, max_body_bytes: int, timeout_s: float) -> None:
        self.app, self.max_body_bytes, self.timeout_s = app, max_body_bytes, timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] in ("GET", "HEAD"):
            await self.app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self.timeout_s):
                body, num_bytes = await self._read(receive)
        except TimeoutError:
            error = f"the body did not arrive within {self.timeout_s:g} s"
            answer = error_answer(408, error, "send all of it at once", {"Connection": "close"})
            await answer(scope, receive, send)
            return
        if body is None:
            return
        if num_bytes > self.max_body_bytes:
            error = f"the body is larger than {self.max_body_bytes} bytes"
            await error_answer(413, error, "send a shorter action")(scope, receive, send)
            return
        replay: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive_body() -> Message:
            return replay.pop() if replay else await receive()

        await self.app(scope, receive_body, send)

    async def _read(self, receive: Receive) -> tuple[bytes | None, int]:
        """(as much of the body as the limit allows, or None if the client left; its length)"""
        body, num_bytes, more = bytearray(), 0, True
        while more and num_bytes <= DRAIN_BYTES:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None, 0
            num_bytes += len(message.get("body", b""))
            if num_bytes <= self.max_body_bytes:
                body += message.get("body", b"")
            more = message.get("more_body", False)
        return bytes(body), num_bytes
