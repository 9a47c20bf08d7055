"""Servers that answer as no server should, and what that costs each of our HTTP clients.

ENDLESS  answers that do not end by themselves, byte by byte: the time-out must end them
HEAVY    answers that are too much, or too strange: the bounds must end them
serving  one of them, at an address of its own, whatever is asked

    python tests/hostile_answers.py    asks, with each client in this process, for all of them; the
                                       addresses come on standard input, what it cost goes to
                                       standard output (test_exchange.py)
"""

import contextlib
import gzip
import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

HEAD = b"HTTP/1.1 200 OK\r\n"
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"
DRIP_S, SLOW_DRIP_S = 0.1, 4.0  # between two bytes of a drip


def whole(body: bytes, extra: bytes = b"") -> Callable[[socket.socket], None]:
    """An answer that is good HTTP."""
    head = HEAD + b"Connection: close\r\n" + extra
    return exactly(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)


def exactly(data: bytes) -> Callable[[socket.socket], None]:
    return lambda connection: connection.sendall(data)


def flood(head: bytes, piece: bytes, count: int = 1 << 40) -> Callable[[socket.socket], None]:
    def send(connection: socket.socket) -> None:
        connection.sendall(head)
        for _ in range(count):
            connection.sendall(piece)

    return send


def drip(head: bytes, piece: bytes, pause_s: float = DRIP_S) -> Callable[[socket.socket], None]:
    def send(connection: socket.socket) -> None:
        connection.sendall(head)
        while True:
            connection.sendall(piece)
            time.sleep(pause_s)

    return send


def silence(connection: socket.socket) -> None:
    while connection.recv(1 << 16):
        pass


ENDLESS = {
    "silence": silence,
    "drip of a body": drip(HEAD + b"Content-Length: 100000\r\n\r\n", b"1"),
    "slow drip of a body": drip(HEAD + b"Content-Length: 100000\r\n\r\n", b"1", SLOW_DRIP_S),
    "drip of a body without length": drip(HEAD + b"\r\n", b" "),
    "drip of a header": drip(HEAD + b"X-", b"y"),
    "drip of headers": drip(HEAD, b"X: y\r\n"),
    "drip of chunks": drip(CHUNKED, b"1\r\n1\r\n"),
    "drip of a chunk's size": drip(CHUNKED + b"1;", b"x"),
    "drip of trailers": drip(CHUNKED + b"2\r\n{}\r\n0\r\n", b"X: y\r\n"),
    "drip of 100 Continue": drip(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
}

MEGABYTE = 1 << 20
HEAVY = {
    "200 MB with a length": flood(
        HEAD + b"Content-Length: %d\r\n\r\n" % (200 * MEGABYTE), b" " * MEGABYTE, 200
    ),
    "200 MB without": flood(HEAD + b"\r\n", b" " * MEGABYTE, 200),
    "200 MB in chunks": flood(CHUNKED, b"100000\r\n" + b" " * MEGABYTE + b"\r\n", 200),
    "one chunk of 16 TB": exactly(CHUNKED + b"ffffffffff\r\nxxx"),
    "gzip bomb": whole(gzip.compress(b"0" * (200 * MEGABYTE)), b"Content-Encoding: gzip\r\n"),
    "headers without end": flood(HEAD, b"X: y\r\n" * 1000),
    "a header without end": flood(HEAD + b"X: ", b"y" * MEGABYTE),
    "a status without end": flood(b"HTTP/1.1 ", b"2" * MEGABYTE),
    "trailers without end": flood(CHUNKED + b"0\r\nX: ", b"y" * MEGABYTE),
    "chunks of nonsense": exactly(CHUNKED + b"zz\r\nxxx"),
    "a chunk of -5 bytes": exactly(CHUNKED + b"-5\r\nxxx"),
    "two lengths": exactly(HEAD + b"Content-Length: 5\r\nContent-Length: 7\r\n\r\n[1,2]"),
    "too long a length": exactly(HEAD + b"Content-Length: 700\r\n\r\n[1,2]"),
    "too short a length": exactly(HEAD + b"Content-Length: 7\r\n\r\n" + b"[1]" * 9),
    "an early close": exactly(b""),
    "an early close in a header": exactly(HEAD + b"Content-Le"),
    "an early close in a chunk": exactly(CHUNKED + b"5\r\n[1"),
    "no HTTP": exactly(b"SSH-2.0-OpenSSH_9.6\r\n"),
    "a redirect to itself": exactly(
        b"HTTP/1.1 307 Go\r\nLocation: /create\r\nContent-Length: 0\r\n\r\n"
    ),
    "deep JSON": whole(b"[" * 500_000),
    "JSON that grows": whole(b"[" + b"[]," * 340_000 + b"[]]"),
    "objects that grow": whole(b"[" + b"{}," * 340_000 + b"{}]"),
    "NaN": whole(b'{"id": NaN}'),
    "infinity": whole(b'{"id": 1e999}'),
    "a number of a million digits": whole(b'{"id": 1' + b"0" * 1_000_000 + b"}"),
    "half a surrogate pair": whole(b'{"id": "\\ud83d"}'),
    "bytes that are no text": whole(b'{"id": "\xff\xfe"}'),
    "nothing": whole(b""),
}


@contextlib.contextmanager
def serving(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """`answer` is called with each connection, once something has been asked; yields the URL."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)

    def handle(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            connection.recv(1 << 16)
            answer(connection)
            connection.shutdown(socket.SHUT_WR)
            silence(connection)  # a close with unread bytes would be a reset

    def accept() -> None:
        with contextlib.suppress(OSError):  # until it is closed
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=handle, args=(connection,), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()


# ------------------------------------------------------------------------------------- the clients


def environment(url: str, timeout_s: float) -> Callable[[], object]:
    from envclient import connect

    return connect("textcraft", url, timeout_s=timeout_s).open


def chat(url: str, timeout_s: float) -> Callable[[], object]:
    from sampling.chatapi import ChatApi

    api = ChatApi(url, "m", timeout_s=timeout_s, max_retries=0)
    return partial(api.complete, [{"role": "user", "content": "hello"}], 16, 1.0, seed=3)


CLIENTS = {"environment": environment, "chat": chat}


def peak_bytes() -> int:
    (line,) = [x for x in Path("/proc/self/status").read_text().split("\n") if "VmHWM" in x]
    return int(line.split()[1]) << 10


def outcome(ask: Callable[[], object]) -> dict[str, object]:
    """Seconds, and what came of it: the name of an error class of ours."""
    from engines import EngineError
    from envclient import EnvError

    began = time.perf_counter()
    try:
        ask()
        came = "an answer"
    except (EnvError, EngineError) as error:
        came = f"{type(error).__name__}: {error}"[:300]
    return {"s": time.perf_counter() - began, "outcome": came}


def main() -> None:
    """{"timeout_s": ..., "endless": {name: URL}, "heavy": {name: URL}} -> [cost of each]"""
    given = json.load(sys.stdin)
    costs = []
    for client, asking in CLIENTS.items():
        outcome(asking("http://127.0.0.1:9", 1.0))  # what is imported is none of the answers' cost
        for kind in ("heavy", "endless"):
            asks = {name: asking(url, given["timeout_s"]) for name, url in given[kind].items()}
            # One after the other to measure memory; at the same time where waiting is all.
            with ThreadPoolExecutor(1 if kind == "heavy" else len(asks)) as threads:
                for name, found in zip(asks, threads.map(cost, asks.values()), strict=True):
                    costs.append({"client": client, "kind": kind, "name": name, **found})
    json.dump(costs, sys.stdout)


def cost(ask: Callable[[], object]) -> dict[str, object]:
    """Also by how many bytes this process grew at its peak."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = peak_bytes()
    found = outcome(ask)
    return {**found, "bytes": peak_bytes() - before}


if __name__ == "__main__":
    main()
