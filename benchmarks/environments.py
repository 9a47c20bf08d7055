"""How fast the worlds' servers are against others, and whether they stay small.

    steps/s    16 sessions (SearchQA: 32) at once over HTTP, the same tasks and the same actions (an
               oracle's) on our server and on another, in turns; the median of the ratios
    sessions   what 64 sessions (SearchQA: 1,000) hold that have each played an episode, the Java
               processes below the server included, against the other server's with 4
    leak       the same sum over 2,000 create/reset/close cycles; the second half must add nothing

The other server is a plain one (`plain_env_server.py`) of BabyAI and SciWorld, and of SearchQA our
own with a retriever that answers a constant (`retrieval.py`, which measures more of it). Sessions
are created before the clock starts. Resets count, on both sides: a training run waits for them as
it waits for steps.

Run it:  python benchmarks/environments.py --env babyai      (or sciworld, searchqa; some minutes)
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

from benchmarks import retrieval, sessions  # noqa: E402
from benchmarks.common import Results, arguments, serving, show  # noqa: E402
from envclient import connect, local_server  # noqa: E402
from envs import get_env  # noqa: E402
from envs.searchqa.questions import FIRST_OWN  # noqa: E402

NUM_SESSIONS = {"babyai": 16, "sciworld": 16, "searchqa": 32}
LIVE = {"babyai": 64, "sciworld": 64, "searchqa": 1000}
OTHER = {"babyai": "a plain server", "sciworld": "a plain server", "searchqa": "a constant answer"}
GOALS = {"babyai": 1.0, "sciworld": 10.0, "searchqa": 0.5}
# Tasks of the benchmark's sub-tasks, a few of each; what a plan needs more than this is left out.
TASKS = {
    "babyai": [level + 40 * seed for level in (0, 1, 4, 6, 9, 16, 18, 29) for seed in (50, 51)],
    # boil, thermometer, conductivity, living thing, animal, paint, lifespan: 7 tasks of 23
    "sciworld": [
        *(0, 120, 1436, 2936, 3836, 4168, 4240),
        *(121, 1437, 2937, 3837, 4169, 4241, 1, 122, 2),
    ],
    "searchqa": [FIRST_OWN + 177 * n for n in range(32)],  # of all kinds
}
MAX_PLAN = 40


def serve(name: str, env: str) -> contextlib.AbstractContextManager[tuple[int, int]]:
    """`ours` or the `other` server of `env`: its port and process id."""
    if name == "ours":
        return serving("envs.server", "--env", env, "--port", "0")
    if env == "searchqa":
        return serving("benchmarks.retrieval", "--constant")
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


def measure_steps(env: str, port: int, plans: sessions.Plans, seconds: float) -> dict[str, float]:
    playing = sessions.play(port, plans, NUM_SESSIONS[env], seconds, get_env(env).WIRE)
    played = asyncio.run(playing)
    return {
        "steps_per_s": round(len(played.steps) / played.elapsed, 2),
        "resets_per_s": round(len(played.resets) / played.elapsed, 2),
        "step_ms_p50": round(1000 * statistics.median(played.steps), 1),
        "seconds": round(played.elapsed, 1),
    }


def measure_sessions(name: str, env: str, plans: sessions.Plans, count: int) -> dict[str, Any]:
    wire = get_env(env).WIRE
    with serve(name, env) as (port, process_id):
        if env == "searchqa":  # the pages of its index that it maps are no session's
            asyncio.run(sessions.hold(port, process_id, plans, len(plans), wire))
        before, live = asyncio.run(sessions.hold(port, process_id, plans, count, wire))
    return {
        "sessions": count,
        "rss_mb_before": before,
        "rss_mb_live": live,
        "rss_mb_per_session": round(sum(live.values()) / count, 1),
        "rss_mb_of_sessions": round(sum(live.values()) - sum(before.values()), 1),
    }


def measure_leak(env: str, plans: sessions.Plans, cycles: int) -> dict[str, Any]:
    with serve("ours", env) as (port, process_id):
        cycling = sessions.cycle(port, process_id, list(plans), cycles, wire=get_env(env).WIRE)
        resident = asyncio.run(cycling)
    growth = {kind: round(resident[-1][kind] - resident[4][kind], 1) for kind in resident[0]}
    return {"cycles": cycles, "rss_mb": resident, "rss_mb_growth_second_half": growth}


def measure(env: str, options: argparse.Namespace) -> dict[str, Any]:
    plans = oracle_plans(env, TASKS[env][: options.tasks])
    repeats: list[dict[str, Any]] = []
    for _ in range(options.repeats):
        row: dict[str, Any] = {}
        for name in ("other", "ours"):
            with serve(name, env) as (port, _):
                row[name] = measure_steps(env, port, plans, options.seconds)
        row["ratio"] = round(row["ours"]["steps_per_s"] / row["other"]["steps_per_s"], 2)
        repeats.append(row)
        told = f"{row['ratio']} times those of {OTHER[env]}"
        print(f"{env}: {row['ours']['steps_per_s']} steps/s, {told}", flush=True)
    found = {
        "sessions": NUM_SESSIONS[env],
        "throughput": repeats,
        "ratio": statistics.median(row["ratio"] for row in repeats),
        "goal": GOALS[env],
        "memory": measure_sessions("ours", env, plans, options.live or LIVE[env]),
        "memory_other": measure_sessions("other", env, plans, 4),
        "leak": measure_leak(env, plans, options.cycles),
    }
    if env == "searchqa":
        found["retrieval"] = retrieval.measure(options.repeats)
    return found


def main() -> int:
    parser = arguments(__doc__, 3, "environments-<env>.json")
    parser.add_argument("--env", choices=GOALS, nargs="+", default=list(GOALS))
    parser.add_argument("--seconds", type=float, default=30.0, help="of each throughput run")
    parser.add_argument("--tasks", type=int, help="how many are played (default: all)")
    parser.add_argument("--live", type=int, help="sessions open at once")
    parser.add_argument("--cycles", type=int, default=2000)
    options = parser.parse_args()
    for env in options.env:
        name = f"environments-{env}.json"
        results = Results(options.out and options.out / name, name)
        results.about["hardware"] = sessions.hardware()
        found = measure(env, options)
        results.write(found)
        growth = found["leak"]["rss_mb_growth_second_half"]
        memory, other = found["memory"], found["memory_other"]
        print(f"{env}, {NUM_SESSIONS[env]} sessions, {results.about['hardware']['cores']} cores")
        rows = [
            (f"steps/s over {OTHER[env]}'s", f"{found['ratio']:g} (goal {found['goal']:g})"),
            (f"MB a session, {memory['sessions']} open", memory["rss_mb_per_session"]),
            (f"MB that these {memory['sessions']} added", memory["rss_mb_of_sessions"]),
            ("MB a session, the other server, 4 open", other["rss_mb_per_session"]),
            (f"MB gained, second half of {options.cycles} cycles", growth),
        ]
        for name, ratio in found.get("retrieval", {}).items():
            rows.append((f"retrieval, {name}", f"{ratio} (goal {retrieval.GOALS[name]:g})"))
        show(rows, width=46)
    return 0


if __name__ == "__main__":
    sys.exit(main())
