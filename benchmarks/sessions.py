"""Sessions of an environment's server over HTTP, played at once, held open, opened and closed: what
server.py and environments.py measure with. Names on the wire are AgentGym's, TextCraft's unless a
world's `Wire` is given."""

import asyncio
import contextlib
import json
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httptools

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from envs import Wire  # noqa: E402

Plans = Mapping[int, Sequence[str]]  # task -> actions
PLAIN = Wire()


class Connection:
    """One keep-alive HTTP/1.1 connection with as little client cost as possible."""

    def __init__(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, wire: Wire
    ) -> None:
        self.reader, self.writer, self.wire = reader, writer, wire
        self.seconds = 0.0  # latency of the last request

    @classmethod
    async def open(cls, port: int, wire: Wire = PLAIN) -> "Connection":
        return cls(*await asyncio.open_connection("127.0.0.1", port), wire)

    async def create(self) -> int:
        answer = await self.post("/create", **self.wire.create_body)
        return answer[self.wire.session_field] if isinstance(answer, dict) else answer

    async def reset(self, session_id: int, task: int) -> None:
        wire = self.wire
        await self.post("/reset", **{wire.session_field: session_id, wire.index_field: task})

    async def step(self, session_id: int, action: str) -> bool:
        """Whether the episode has ended."""
        body = {self.wire.session_field: session_id, "action": action}
        return (await self.post("/step", **body))["done"]

    async def close_session(self, session_id: int) -> None:
        await self.post("/close", **{self.wire.session_field: session_id})

    async def post(self, path: str, **body: Any) -> Any:
        started = time.perf_counter()
        content = json.dumps(body).encode()
        head = (
            f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content)}\r\n\r\n"
        )
        self.writer.write(head.encode() + content)
        self.done, self.body = False, b""
        parser = httptools.HttpResponseParser(self)
        while not self.done:
            data = await self.reader.read(65536)
            if not data:
                raise ConnectionError(f"the server closed the connection at POST {path}")
            parser.feed_data(data)
        self.seconds = time.perf_counter() - started
        if parser.get_status_code() != 200:
            raise RuntimeError(f"POST {path} {body}: {parser.get_status_code()} {self.body!r}")
        return json.loads(self.body)

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.done = True

    async def close(self) -> None:
        self.writer.close()
        await self.writer.wait_closed()


class Played:
    """What `play` counted; latencies in seconds."""

    def __init__(self) -> None:
        self.elapsed, self.num_unsolved = 0.0, 0  # plans played whole that did not end the episode
        self.steps: list[float] = []
        self.resets: list[float] = []


async def play(
    port: int, plans: Plans, sessions: int, seconds: float, wire: Wire = PLAIN
) -> Played:
    """Plays the plans in so many sessions at once, created before, until the time is over."""
    opener = await Connection.open(port, wire)  # a connection that waits for 5 s is closed
    ids = [await opener.create() for _ in range(sessions)]
    connections = [await Connection.open(port, wire) for _ in range(sessions)]
    tasks, played = list(plans), Played()
    started = time.perf_counter()

    async def play_one(turn: int, connection: Connection) -> None:
        session_id = ids[turn]
        while time.perf_counter() < started + seconds:
            index = tasks[turn % len(tasks)]
            turn += 1
            await connection.reset(session_id, index)
            played.resets.append(connection.seconds)
            for action in plans[index]:
                done = await connection.step(session_id, action)
                played.steps.append(connection.seconds)
                if done or time.perf_counter() > started + seconds:
                    break
            else:
                played.num_unsolved += 1

    await asyncio.gather(*(play_one(n, each) for n, each in enumerate(connections)))
    played.elapsed = time.perf_counter() - started
    closer = await Connection.open(port, wire)
    for session_id in ids:
        await closer.close_session(session_id)
    for connection in [opener, closer, *connections]:
        await connection.close()
    return played


async def hold(
    port: int, process_id: int, plans: Plans, count: int, wire: Wire = PLAIN
) -> list[dict[str, float]]:
    """Opens `count` sessions, each with a plan played; memory before, and while they live."""
    connection = await Connection.open(port, wire)
    tasks, ids, before = list(plans), [], resident_mb(process_id)
    for number in range(count):
        index = tasks[number % len(tasks)]
        ids.append(await connection.create())
        await connection.reset(ids[-1], index)
        for action in plans[index]:
            if await connection.step(ids[-1], action):
                break
    live = resident_mb(process_id)
    for session_id in ids:
        await connection.close_session(session_id)
    await connection.close()
    return [before, live]


async def cycle(
    port: int,
    process_id: int,
    tasks: Sequence[int],
    cycles: int,
    action: str | None = None,
    wire: Wire = PLAIN,
) -> list[dict[str, float]]:
    """Creates, resets, closes sessions, with one step of `action` if any; memory at each tenth."""
    connection = await Connection.open(port, wire)
    resident = []
    for number in range(1, cycles + 1):
        session_id = await connection.create()
        await connection.reset(session_id, tasks[number % len(tasks)])
        if action:
            await connection.step(session_id, action)
        await connection.close_session(session_id)
        if number % (cycles // 10) == 0:
            resident.append(resident_mb(process_id))
    await connection.close()
    return resident


def resident_mb(process_id: int) -> dict[str, float]:
    """RSS of the process and of all below it, by kind: {"python": ..., "java": ...}. Linux only."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                parents.setdefault(parent, []).append(int(entry.name))
    sizes = {"python": 0.0, "java": 0.0}
    waiting = [process_id]
    while waiting:
        one = waiting.pop()
        waiting += parents.get(one, [])
        with contextlib.suppress(OSError):
            lines = dict(
                line.split(":", 1) for line in Path(f"/proc/{one}/status").read_text().splitlines()
            )
            kind = "java" if lines["Name"].strip() == "java" else "python"
            sizes[kind] += int(lines.get("VmRSS", "0 kB").split()[0]) / 1024
    return {kind: round(size, 1) for kind, size in sizes.items()}


def hardware() -> dict[str, Any]:
    """The processor, by name, and how much of it this process may use."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    cores = len(os.sched_getaffinity(0))
    model = next(names, platform.machine())
    return {"cpu": model, "cores": cores, "python": platform.python_version()}
