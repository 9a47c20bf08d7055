"""How fast the environment server is, and whether it keeps its memory flat.

Three figures, on TextCraft, whose steps cost microseconds, so that the server is what is measured:

    steps/s      64 sessions at once, oracle actions, one process with keep-alive connections
                 as the other end (it shares the machine, so this is a lower bound)
    memory       resident set with 1,000 live sessions against that with none
    leak         resident set over 10,000 create/close cycles; the second half must add nothing

Run it:  python benchmarks/server.py            about a minute
It prints a table and writes benchmarks/results/server.json with date, hardware and settings.
"""

import argparse
import asyncio
import datetime
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httptools

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from envs.textcraft.env import TextCraft  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "server.json"
NUM_SESSIONS, NUM_LIVE, NUM_CYCLES = 64, 1000, 10_000


class Connection:
    """One keep-alive HTTP/1.1 connection with as little client cost as possible."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer
        self.seconds: list[float] = []  # latency of each request

    @classmethod
    async def open(cls, port: int) -> "Connection":
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def post(self, path: str, body: dict) -> Any:
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
        self.seconds.append(time.perf_counter() - started)
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


def oracle_actions(task_index: int) -> list[str]:
    env = TextCraft()
    env.reset(task_index)
    return env.state_for_people()["plan"]


async def measure_steps(port: int, seconds: float) -> dict:
    """Plays tasks in NUM_SESSIONS sessions until the time is over."""
    plans = {index: oracle_actions(index) for index in range(140, 420)}
    connections = [await Connection.open(port) for _ in range(NUM_SESSIONS)]
    num_steps, deadline = 0, time.perf_counter() + seconds

    async def play(number: int, connection: Connection) -> None:
        nonlocal num_steps
        session_id = (await connection.post("/create", {}))["id"]
        connection.seconds.clear()
        index = 140 + number
        while time.perf_counter() < deadline:
            index = 140 + (index - 139) % 280
            await connection.post("/reset", {"id": session_id, "data_idx": index})
            for action in plans[index]:
                answer = await connection.post("/step", {"id": session_id, "action": action})
                num_steps += 1
            if answer["reward"] != 1:
                raise RuntimeError(f"the oracle's plan for task {index} failed: {answer}")
        await connection.post("/close", {"id": session_id})

    started = time.perf_counter()
    await asyncio.gather(*(play(number, each) for number, each in enumerate(connections)))
    elapsed = time.perf_counter() - started
    latencies = sorted(second for each in connections for second in each.seconds)
    for connection in connections:
        await connection.close()
    return {
        "sessions": NUM_SESSIONS,
        "seconds": round(elapsed, 1),
        "steps_per_s": round(num_steps / elapsed),
        "requests_per_s": round(len(latencies) / elapsed),
        "latency_ms_p50": round(1000 * statistics.median(latencies), 1),
        "latency_ms_p99": round(1000 * latencies[int(0.99 * len(latencies))], 1),
    }


def resident_mb(process_id: int) -> float:
    for line in Path(f"/proc/{process_id}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return round(int(line.split()[1]) / 1024, 1)
    raise RuntimeError(f"no VmRSS for process {process_id}; this benchmark needs Linux")


async def measure_memory(port: int, process_id: int) -> dict:
    """Opens NUM_LIVE sessions with an episode each."""
    connection = await Connection.open(port)
    before = resident_mb(process_id)
    ids = []
    for index in range(NUM_LIVE):
        ids.append((await connection.post("/create", {}))["id"])
        await connection.post("/reset", {"id": ids[-1], "data_idx": index % 544})
    live = resident_mb(process_id)
    for session_id in ids:
        await connection.post("/close", {"id": session_id})
    await connection.close()
    return {"sessions": NUM_LIVE, "rss_mb_none": before, "rss_mb_live": live}


async def measure_leak(port: int, process_id: int) -> dict:
    """Creates and closes sessions; the resident set after each tenth."""
    connection = await Connection.open(port)
    resident = []
    for cycle in range(1, NUM_CYCLES + 1):
        session_id = (await connection.post("/create", {}))["id"]
        await connection.post("/reset", {"id": session_id, "data_idx": cycle % 544})
        await connection.post("/step", {"id": session_id, "action": "inventory"})
        await connection.post("/close", {"id": session_id})
        if cycle % (NUM_CYCLES // 10) == 0:
            resident.append(resident_mb(process_id))
    await connection.close()
    growth = round(resident[-1] - resident[4], 1)
    return {"cycles": NUM_CYCLES, "rss_mb": resident, "rss_mb_growth_second_half": growth}


def hardware() -> dict:
    model = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    cores = len(os.sched_getaffinity(0))
    return {"cpu": model, "cores": cores, "python": platform.python_version()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=15.0, help="of the throughput part")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    command = [sys.executable, "-m", "envs.server", "--env", "textcraft", "--port", "0"]
    command += ["--max-sessions", str(NUM_LIVE)]
    server = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        line = server.stdout.readline() if server.stdout else ""
        if not line.startswith("listening on "):
            raise SystemExit("the server did not start; its message is above")
        port = int(line.split()[2].rpartition(":")[2])
        results = {
            "memory": asyncio.run(measure_memory(port, server.pid)),
            "throughput": asyncio.run(measure_steps(port, options.seconds)),
            "leak": asyncio.run(measure_leak(port, server.pid)),
        }
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(timeout=10)
    machine = hardware()
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(
        json.dumps({"date": date, "hardware": machine} | results, indent=2) + "\n"
    )
    steps, memory, leak = results["throughput"], results["memory"], results["leak"]
    rows = [
        ("steps/s, 64 sessions", steps["steps_per_s"]),
        ("requests/s, resets included", steps["requests_per_s"]),
        ("latency p50 / p99, ms", f"{steps['latency_ms_p50']} / {steps['latency_ms_p99']}"),
        ("RSS with no session, MB", memory["rss_mb_none"]),
        ("RSS with 1,000 sessions, MB", memory["rss_mb_live"]),
        ("RSS growth, cycles 5,001-10,000, MB", leak["rss_mb_growth_second_half"]),
    ]
    print(f"TextCraft server, {machine['cores']} cores, {machine['cpu']}")
    for name, value in rows:
        print(f"{name:<38}{value:>14}")


if __name__ == "__main__":
    main()
