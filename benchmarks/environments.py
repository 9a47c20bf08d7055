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
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import sessions  # noqa: E402
from benchmarks.common import Results, arguments, serving, show  # noqa: E402
from envclient import connect, local_server  # noqa: E402

NUM_SESSIONS = 16
GOALS = {"babyai": 1.0, "sciworld": 10.0}
# Tasks of the benchmark's sub-tasks, a few of each; what a plan needs more than this is left out.
TASKS = {
    "babyai": [level + 40 * seed for level in (0, 1, 4, 6, 9, 16, 18, 29) for seed in (50, 51)],
    # boil, thermometer, conductivity, living thing, animal, paint, lifespan: 7 tasks of 23
    "sciworld": [
        *(0, 120, 1436, 2936, 3836, 4168, 4240),
        *(121, 1437, 2937, 3837, 4169, 4241, 1, 122, 2),
    ],
}
MAX_PLAN = 40


def serve(name: str, env: str) -> contextlib.AbstractContextManager[tuple[int, int]]:
    """`ours` or the `plain` server of `env`: its port and process id."""
    if name == "ours":
        return serving("envs.server", "--env", env, "--port", "0")
    app = f"benchmarks.plain_env_server:{env}"
    return serving("uvicorn", "--factory", app, "--port", "0", "--no-access-log")


def oracle_plans(env: str, tasks: list[int]) -> dict[int, list[str]]:
    """Task -> the oracle's actions, at most MAX_PLAN of them."""
    plans = {}
    with local_server(env) as url, connect(env, url) as client:
        for index in tasks:
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


def measure_steps(port: int, plans: sessions.Plans, seconds: float) -> dict[str, float]:
    played = asyncio.run(sessions.play(port, plans, NUM_SESSIONS, seconds))
    return {
        "steps_per_s": round(len(played.steps) / played.elapsed, 2),
        "resets_per_s": round(len(played.resets) / played.elapsed, 2),
        "step_ms_p50": round(1000 * statistics.median(played.steps), 1),
        "seconds": round(played.elapsed, 1),
    }


def measure_sessions(name: str, env: str, plans: sessions.Plans, count: int) -> dict[str, Any]:
    with serve(name, env) as (port, process_id):
        before, live = asyncio.run(sessions.hold(port, process_id, plans, count))
    return {
        "sessions": count,
        "rss_mb_before": before,
        "rss_mb_live": live,
        "rss_mb_per_session": round(sum(live.values()) / count, 1),
    }


def measure_leak(env: str, plans: sessions.Plans, cycles: int) -> dict[str, Any]:
    with serve("ours", env) as (port, process_id):
        resident = asyncio.run(sessions.cycle(port, process_id, list(plans), cycles))
    growth = {kind: round(resident[-1][kind] - resident[4][kind], 1) for kind in resident[0]}
    return {"cycles": cycles, "rss_mb": resident, "rss_mb_growth_second_half": growth}


def measure(env: str, options: argparse.Namespace) -> dict[str, Any]:
    plans = oracle_plans(env, TASKS[env][: options.tasks])
    repeats: list[dict[str, Any]] = []
    for _ in range(options.repeats):
        row: dict[str, Any] = {}
        for name in ("plain", "ours"):
            with serve(name, env) as (port, _):
                row[name] = measure_steps(port, plans, options.seconds)
        row["ratio"] = round(row["ours"]["steps_per_s"] / row["plain"]["steps_per_s"], 2)
        repeats.append(row)
        print(f"{env}: {row['ours']['steps_per_s']} steps/s, {row['ratio']} x plain", flush=True)
    return {
        "sessions": NUM_SESSIONS,
        "throughput": repeats,
        "ratio": statistics.median(row["ratio"] for row in repeats),
        "goal": GOALS[env],
        "memory": measure_sessions("ours", env, plans, options.live),
        "memory_plain": measure_sessions("plain", env, plans, 4),
        "leak": measure_leak(env, plans, options.cycles),
    }


def main() -> int:
    parser = arguments(__doc__, 3, "environments-<env>.json")
    parser.add_argument("--env", choices=GOALS, nargs="+", default=list(GOALS))
    parser.add_argument("--seconds", type=float, default=30.0, help="of each throughput run")
    parser.add_argument("--tasks", type=int, help="how many are played (default: all)")
    parser.add_argument("--live", type=int, default=64, help="sessions open at once")
    parser.add_argument("--cycles", type=int, default=2000)
    options = parser.parse_args()
    for env in options.env:
        name = f"environments-{env}.json"
        results = Results(options.out and options.out / name, name)
        results.about["hardware"] = sessions.hardware()
        found = measure(env, options)
        results.write(found)
        growth = found["leak"]["rss_mb_growth_second_half"]
        print(f"{env}, {NUM_SESSIONS} sessions, {results.about['hardware']['cores']} cores")
        rows = [
            ("steps/s over a plain server's", f"{found['ratio']:g} (goal {found['goal']:g})"),
            (f"MB a session, {options.live} open", found["memory"]["rss_mb_per_session"]),
            ("MB a session, plain server, 4 open", found["memory_plain"]["rss_mb_per_session"]),
            (f"MB gained, second half of {options.cycles} cycles", growth),
        ]
        show(rows, width=46)
    return 0


if __name__ == "__main__":
    sys.exit(main())
