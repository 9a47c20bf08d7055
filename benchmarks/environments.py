"""How fast the servers of BabyAI and SciWorld are against plain ones, and whether they stay small.

    steps/s    16 sessions at once over HTTP, the same tasks and the same actions (an oracle's) on
               our server and on `plain_env_server.py`, in turns; the median of the ratios
    sessions   what 64 sessions hold that have each played an episode, the Java processes below the
               server included, against the plain server's with 4
    leak       the same sum over 2,000 create/reset/close cycles; the second half must add nothing

Sessions are created before the clock starts. Resets count, on both sides: a training run waits for
them as it waits for steps.

Run it:  python benchmarks/environments.py --env babyai      (or sciworld; some minutes)
It prints a table and writes benchmarks/results/environments-<env>.json.
"""

import argparse
import asyncio
import contextlib
import datetime
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from server import Connection, hardware  # noqa: E402

from envclient import connect, local_server  # noqa: E402
from runtime.rundir import circumstances  # noqa: E402

OURS, PLAIN = ["-m", "envs.server", "--port", "0"], ["benchmarks/plain_env_server.py"]
NUM_SESSIONS = 16
GOALS = {"babyai": 1.0, "sciworld": 10.0}
# Tasks of the benchmark's sub-tasks, a few of each; what a plan needs more than this is left out.
TASKS = {
    "babyai": [level + 40 * seed for level in (0, 1, 4, 6, 9, 16, 18, 29) for seed in (50, 51)],
    # boil, thermometer, conductivity, living thing, animal, paint, lifespan: 7 tasks of 23
    "sciworld": [
        0,
        120,
        1436,
        2936,
        3836,
        4168,
        4240,
        121,
        1437,
        2937,
        3837,
        4169,
        4241,
        1,
        122,
        2,
    ],
}
MAX_PLAN = 40


@contextlib.contextmanager
def serve(command: list[str], env: str) -> Iterator[tuple[int, int]]:
    """A server process; yields its port and process id."""
    whole = [sys.executable, *command, "--env", env]
    # A session of its own, so that Java processes can be counted and, at the end, stopped.
    server = subprocess.Popen(
        whole, cwd=ROOT, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        line = server.stdout.readline() if server.stdout else ""
        if not line.startswith("listening on "):
            raise SystemExit("the server did not start; its message is above")
        yield int(line.split()[2].rpartition(":")[2]), server.pid
    finally:
        server.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(timeout=15)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)


def oracle_plans(env: str) -> dict[int, list[str]]:
    """Task -> the oracle's actions, at most MAX_PLAN of them."""
    plans = {}
    with local_server(env) as url, connect(env, url) as client:
        for index in TASKS[env]:
            client.reset(index)
            plan: list[str] = []
            ended = False
            while not ended and len(plan) < MAX_PLAN:
                _, action = client.oracle()
                plan.append(action)
                result = client.step(f"Action: {action}")
                ended = result.terminated or result.truncated
            plans[index] = plan
    return plans


async def measure_steps(port: int, plans: dict[int, list[str]], seconds: float) -> dict:
    """Plays the plans in NUM_SESSIONS sessions until the time is over."""
    opener = await Connection.open(port)  # a connection that waits for 5 s is closed
    ids = [(await opener.post("/create", {}))["id"] for _ in range(NUM_SESSIONS)]
    connections = [await Connection.open(port) for _ in range(NUM_SESSIONS)]
    tasks, step_seconds, num_resets = list(plans), list[float](), 0
    started = time.perf_counter()
    deadline = started + seconds

    async def play(number: int, connection: Connection) -> None:
        nonlocal num_resets
        turn = number
        while time.perf_counter() < deadline:
            index = tasks[turn % len(tasks)]
            turn += 1
            await connection.post("/reset", {"id": ids[number], "data_idx": index})
            num_resets += 1
            for action in plans[index]:
                answer = await connection.post("/step", {"id": ids[number], "action": action})
                step_seconds.append(connection.seconds[-1])
                if answer["done"] or time.perf_counter() > deadline:
                    break

    await asyncio.gather(*(play(number, each) for number, each in enumerate(connections)))
    elapsed = time.perf_counter() - started
    closer = await Connection.open(port)
    for session_id in ids:
        await closer.post("/close", {"id": session_id})
    for connection in [opener, closer, *connections]:
        await connection.close()
    return {
        "steps_per_s": round(len(step_seconds) / elapsed, 2),
        "resets_per_s": round(num_resets / elapsed, 2),
        "step_ms_p50": round(1000 * statistics.median(step_seconds), 1),
        "seconds": round(elapsed, 1),
    }


def resident_mb(process_id: int) -> dict[str, float]:
    """RSS of the process and of all below it, by kind: {"python": ..., "java": ...}."""
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


async def measure_sessions(
    port: int, process_id: int, plans: dict[int, list[str]], count: int
) -> dict:
    """Opens `count` sessions, each with an episode played, and keeps them."""
    connection = await Connection.open(port)
    before, ids = resident_mb(process_id), []
    tasks = list(plans)
    for number in range(count):
        index = tasks[number % len(tasks)]
        ids.append((await connection.post("/create", {}))["id"])
        await connection.post("/reset", {"id": ids[-1], "data_idx": index})
        for action in plans[index]:
            if (await connection.post("/step", {"id": ids[-1], "action": action}))["done"]:
                break
    live = resident_mb(process_id)
    for session_id in ids:
        await connection.post("/close", {"id": session_id})
    await connection.close()
    total = sum(live.values())
    return {
        "sessions": count,
        "rss_mb_before": before,
        "rss_mb_live": live,
        "rss_mb_per_session": round(total / count, 1),
    }


async def measure_leak(port: int, process_id: int, tasks: list[int], cycles: int) -> dict:
    """Creates, resets and closes sessions; the resident set after each tenth."""
    connection = await Connection.open(port)
    resident = []
    for cycle in range(1, cycles + 1):
        session_id = (await connection.post("/create", {}))["id"]
        body = {"id": session_id, "data_idx": tasks[cycle % len(tasks)]}
        await connection.post("/reset", body)
        await connection.post("/close", {"id": session_id})
        if cycle % (cycles // 10) == 0:
            resident.append(resident_mb(process_id))
    await connection.close()
    growth = {kind: round(resident[-1][kind] - resident[4][kind], 1) for kind in resident[0]}
    return {"cycles": cycles, "rss_mb": resident, "rss_mb_growth_second_half": growth}


def measure(env: str, seconds: float, repeats: int, cycles: int) -> dict[str, Any]:
    plans = oracle_plans(env)
    rounds = []
    for _ in range(repeats):
        row = {}
        for name, command in (("plain", PLAIN), ("ours", OURS)):
            with serve(command, env) as (port, _):
                row[name] = asyncio.run(measure_steps(port, plans, seconds))
        row["ratio"] = round(row["ours"]["steps_per_s"] / row["plain"]["steps_per_s"], 2)
        rounds.append(row)
        print(f"{env}: {row['ours']['steps_per_s']} steps/s, {row['ratio']} x plain", flush=True)
    results: dict[str, Any] = {
        "sessions": NUM_SESSIONS,
        "throughput": rounds,
        "ratio": statistics.median(row["ratio"] for row in rounds),
        "goal": GOALS[env],
    }
    with serve(OURS, env) as (port, process_id):
        results["memory"] = asyncio.run(measure_sessions(port, process_id, plans, 64))
    with serve(PLAIN, env) as (port, process_id):
        results["memory_plain"] = asyncio.run(measure_sessions(port, process_id, plans, 4))
    with serve(OURS, env) as (port, process_id):
        results["leak"] = asyncio.run(measure_leak(port, process_id, list(plans), cycles))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--env", choices=GOALS, nargs="+", default=list(GOALS))
    parser.add_argument("--seconds", type=float, default=30.0, help="of each throughput run")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--cycles", type=int, default=2000)
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    for env in options.env:
        results = measure(env, options.seconds, options.repeats, options.cycles)
        about = {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
        about |= circumstances() | {"hardware": hardware()}
        path = options.out / f"environments-{env}.json"
        path.write_text(json.dumps(about | results, indent=1) + "\n", encoding="utf-8")
        ours, plain = results["memory"], results["memory_plain"]
        rows = [
            ("steps/s over a plain server's", f"{results['ratio']:g} (goal {results['goal']:g})"),
            ("MB a session, 64 open", ours["rss_mb_per_session"]),
            ("MB a session, plain server, 4 open", plain["rss_mb_per_session"]),
            (
                f"MB gained, second half of {options.cycles} cycles",
                results["leak"]["rss_mb_growth_second_half"],
            ),
        ]
        print(f"{env}, {NUM_SESSIONS} sessions, {about['hardware']['cores']} cores")
        for name, value in rows:
            print(f"  {name:<46}{value}")


if __name__ == "__main__":
    main()
