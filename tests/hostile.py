"""Somebody who means the environment server no good, as a process of its own.

    python tests/hostile.py URL NUM_HALF_OPEN NUM_REQUESTS

opens connections that never finish a request, says `ready`, and then sends requests that no client
should send, again and again while standard input is open. Then it waits for the server to end the
half-open connections, and prints, as JSON, how many it still holds after GIVE_UP_S, and how often
each answer came ("closed", "silent": none).
"""

import contextlib
import itertools
import json
import random
import select
import socket
import sys
import time
from collections import Counter
from urllib.parse import urlsplit

GIVE_UP_S = 30.0
HALVES = (
    b"",
    b"P",
    b"POST /step HTTP/1.1\r\n",
    b"POST /step HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n",
    b"POST /step HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n",
    b'POST /step HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{"id": 1',
    b"POST /step HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{",
)


def post(path: str, body: bytes, *headers: str, length: object = None) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json"]
    lines += [f"Content-Length: {len(body) if length is None else length}", *headers, "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


def get(target: str, *headers: str, method: str = "GET", version: str = "HTTP/1.1") -> bytes:
    return "\r\n".join(
        [f"{method} {target} {version}", "Host: localhost", *headers, "", ""]
    ).encode("latin-1")


def hostile_requests(num: int, seed: int = 0) -> list[bytes]:
    """The worst by hand; as many again as `num` asks for are good ones with bytes changed."""
    valid = b'{"id": 1, "action": "inventory"}'
    bodies = [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b'{"id": ' + b"9" * 100_000 + b', "action": "x"}',
        b'{"id": 1e400, "action": "x"}',
        b'{"id": NaN, "action": "x"}',
        b'{"id": true, "action": "x"}',
        b'{"id": "1", "action": "x"}',
        b'{"id": -1, "action": "x"}',
        b'{"id": 1, "action": 1}',
        b'{"id": 1, "action": null}',
        b'{"id": 1, "action": "\\ud800"}',
        b'{"id": 1, "action": "' + b"x" * 900_000 + b'"}',
        b'{"id": 1, "action": "' + b"x" * 2_000_000 + b'"}',
        b'{"id": 1, "id": 2, "action": {"action": []}}',
    ]
    requests = [post(path, body) for body in bodies for path in ("/step", "/reset")]
    requests += [
        bytes(range(256)) * 4,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(64),  # TLS
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /health\r\n\r\n",
        b"\r\n" * 1000,
        get("/health", version="HTTP/9.9"),
        get("/health", method="BREW"),
        get("*", method="OPTIONS"),
        get("/health", method="TRACE"),
        get("localhost:443", method="CONNECT"),
        get("/" + "a" * 70_000),
        get("/../../etc/passwd"),
        get("/%00%ff%2e%2e/"),
        get("/observation?id=" + "9" * 10_000),
        get("/observation?id=&id=x&id=1"),
        get("/health", "X: " + "a" * 200_000),
        get("/health", *("X: a" for _ in range(20_000))),
        get("/health", "no colon"),
        get("/health", "X: \x00\x01"),
        get("/health", "Origin: http://evil.example"),
        get("/health", "Host: rebound.example"),
        get("/health", "Connection: Upgrade", "Upgrade: websocket", "Sec-WebSocket-Key: x"),
        post("/create", b"{}", "Origin: null"),
        post("/step", valid, length=-1),
        post("/step", valid, length="9" * 30),
        post("/step", valid, length=3),
        post("/step", valid, length="0x10"),
        post("/step", valid, f"Content-Length: {len(valid)}1"),
        post("/step", valid, "Transfer-Encoding: chunked"),
        post("/step", valid, "Transfer-Encoding: gzip, chunked, chunked"),
        post("/step", valid, "Expect: 100-continue", "Content-Encoding: gzip"),
        post("/step", valid, "Episode-Turn: ../../9", "Answer-Seal: 0"),
        post("/nowhere", valid),
        post("/health", valid),
    ]
    rng = random.Random(seed)
    for request in itertools.cycle([post("/step", valid), get("/state?id=1")]):
        if len(requests) >= num:
            return requests[:num]
        changed = bytearray(request)
        for _ in range(rng.randint(1, 8)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        requests.append(bytes(changed))
    raise AssertionError


def ask(address: tuple[str, int], request: bytes) -> str:
    """The status of the answer; "closed" or "silent" for none."""
    try:
        with socket.create_connection(address, timeout=0.5) as connection:
            with contextlib.suppress(ConnectionError):  # answered, and closed, before the end
                connection.sendall(request)
            answer = connection.recv(64)
    except TimeoutError:
        return "silent"
    except ConnectionError:
        return "closed"
    return answer.split(b" ")[1].decode("latin-1") if answer else "closed"


def is_open(connection: socket.socket) -> bool:
    """Nothing came, not even the end."""
    return not select.select([connection], [], [], 0)[0]


def main(url: str, num_half_open: int, num_requests: int) -> None:
    address = (str(urlsplit(url).hostname), int(urlsplit(url).port or 80))
    halves = []
    for i in range(num_half_open):
        halves.append(socket.create_connection(address, timeout=10))
        halves[-1].sendall(HALVES[i % len(HALVES)])
    print("ready", flush=True)
    answers: Counter[str] = Counter()
    for request in itertools.cycle(hostile_requests(num_requests)):
        answers[ask(address, request)] += 1
        if answers.total() >= num_requests and select.select([sys.stdin], [], [], 0)[0]:
            break
    give_up_at = time.monotonic() + GIVE_UP_S
    while (held := sum(map(is_open, halves))) and time.monotonic() < give_up_at:
        time.sleep(0.1)
    print(json.dumps({"half_open_held": held, "answers": dict(answers)}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
