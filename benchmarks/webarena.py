"""Compare WebArena's server with a plain one: speed, memory, and what resets leave behind.

The plain server is PlainWebArena in environments.py: a Chromium for each session, and a pause of
1.5 seconds after each reset and action, as in AgentGym's.

    speed    Both servers play the oracle's actions of the same 16 tasks, with 1 and 8 sessions.
             Resets count as time, not as steps. Also: seconds of a reset and of a step.
    memory   All processes of a server with 16 sessions, each of which has been reset once.
    resets   Our server: memory, processes and open files after 100, 200, ... 500 resets. Each is
             followed by one step, so that the pages differ.

Memory is PSS: a page that n processes share counts as 1/n in each. Use chromium-headless-shell:
with a complete Chromium a session needs two processes instead of one.

Run it:  python benchmarks/webarena.py                                     25 minutes
         python benchmarks/webarena.py --parts resets --num-resets 20      a short try
Read next: envs/webarena/browser.py.
"""

import asyncio
import math
import os
import sys
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import requests

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import make_parser, median, write_result  # noqa: E402
from benchmarks.environments import oracle_plans, serve, steps_per_s  # noqa: E402
from envs.webarena.browser import find_browser  # noqa: E402

Plans = dict[int, list[str]]  # task -> the oracle's actions
SERVERS = ("plain", "ours")
REST_S = 5.0  # before memory is measured


def speed(options: Any, plans: Plans) -> dict[str, Any]:
    rows = []
    seconds: dict[str, Any] = defaultdict(lambda: defaultdict(list))
    for _ in range(options.repeats):
        row = {}
        for server in SERVERS:
            with serve(server, "webarena") as port:
                for n in options.sessions:
                    name = f"{server}, {n}"
                    play = steps_per_s("webarena", port, plans, options.seconds, n, seconds[name])
                    row[name] = round(asyncio.run(play), 3)
                    print(f"{name} sessions: {row[name]:g} steps/s", flush=True)
        rows.append(row)
    ratios = {
        str(n): median((row[f"ours, {n}"] / row[f"plain, {n}"] for row in rows), 2)
        for n in options.sessions
    }
    times = {
        f"{name}, {path}": spread(by_path[path])
        for name, by_path in seconds.items()
        for path in ("/reset", "/step")
    }
    return {"steps_per_s": rows, "ratio": ratios, "seconds": times}


def spread(values: list[float]) -> dict[str, float]:
    p95 = sorted(values)[math.ceil(0.95 * len(values)) - 1]
    return {"number": len(values), "median": median(values, 3), "p95": round(p95, 3)}


def memory(options: Any, plans: Plans) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for server in SERVERS:
        with serve(server, "webarena") as port:
            for session, task in zip(open_sessions(port, options.num_idle), 2 * list(plans)):
                post(port, "/reset", env_idx=session, idx=task)
            time.sleep(REST_S)
            result[server] = usage()
        print(f"{server}, {options.num_idle} idle sessions: {result[server]}", flush=True)
    ratio = round(result["ours"]["memory_mb"] / result["plain"]["memory_mb"], 3)
    return {"sessions": options.num_idle} | result | {"ratio": ratio}


def resets(options: Any, plans: Plans) -> dict[str, Any]:
    rows, interval = {}, max(1, options.num_resets // 5)
    with serve("ours", "webarena") as port:
        sessions, tasks = open_sessions(port, 4), list(plans)
        for n in range(options.num_resets):
            session, task = sessions[n % len(sessions)], tasks[n % len(tasks)]
            post(port, "/reset", env_idx=session, idx=task)
            post(port, "/step", env_idx=session, action=plans[task][0])
            if (n + 1) % interval == 0:
                rows[str(n + 1)] = usage()
                print(f"after {n + 1} resets: {rows[str(n + 1)]}", flush=True)
    return rows


def open_sessions(port: int, number: int) -> list[int]:
    return [post(port, "/create")["env_idx"] for _ in range(number)]


def post(port: int, path: str, **body: Any) -> Any:
    answer = requests.post(f"http://127.0.0.1:{port}{path}", json=body, timeout=120)
    answer.raise_for_status()
    return answer.json()


def usage() -> dict[str, int]:
    """Of the running server: all processes that this one has started, and those that they have."""
    processes = psutil.Process().children(recursive=True)
    num_bytes = num_files = 0
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # it has just ended
            num_bytes += process.memory_full_info().pss
            num_files += process.num_fds()
    return {"memory_mb": num_bytes >> 20, "processes": len(processes), "files": num_files}


PARTS = {"speed": speed, "memory": memory, "resets": resets}


def main() -> int:
    parser = make_parser(__doc__, 3)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--sessions", nargs="+", type=int, default=[1, 8], help="of speed")
    parser.add_argument("--seconds", type=float, default=60.0, help="per run of speed")
    parser.add_argument("--num-idle", type=int, default=16, help="sessions of memory (up to 32)")
    parser.add_argument("--num-resets", type=int, default=500)
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        os.environ["TMPDIR"] = folder  # the plain server's browsers leave files there
        plans = oracle_plans("webarena")
        result = {part: PARTS[part](options, plans) for part in options.parts}
    write_result(options, "webarena.json", {"browser": Path(find_browser()).name} | result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
