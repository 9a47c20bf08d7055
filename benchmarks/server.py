"""How fast the environment server is, and whether it keeps its memory flat.

Three figures, on TextCraft, whose steps cost microseconds, so that the server is what is measured:

    steps/s      64 sessions at once, oracle actions, one process with keep-alive connections
                 as the other end (it shares the machine, so this is a lower bound)
    memory       resident set with 1,000 live sessions against that with none
    leak         resident set over 10,000 create/close cycles; the second half must add nothing

Run it:  python benchmarks/server.py            about a minute
It prints a table and writes benchmarks/results/server.json with date, hardware and settings.
"""

import asyncio
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import sessions  # noqa: E402
from benchmarks.common import Results, arguments, serving, show  # noqa: E402
from envs import get_env  # noqa: E402

NUM_SESSIONS = 64
PLAYED = range(140, 420)  # tasks


def oracle_actions(task_index: int) -> list[str]:
    env = get_env("textcraft")()
    env.reset(task_index)
    return env.state_for_people()["plan"]


def measure_steps(port: int, seconds: float) -> dict[str, Any]:
    plans = {index: oracle_actions(index) for index in PLAYED}
    played = asyncio.run(sessions.play(port, plans, NUM_SESSIONS, seconds))
    if played.num_unsolved:
        raise SystemExit(f"the oracle's plan failed in {played.num_unsolved} episodes")
    latencies = sorted(played.steps + played.resets)
    return {
        "sessions": NUM_SESSIONS,
        "seconds": round(played.elapsed, 1),
        "steps_per_s": round(len(played.steps) / played.elapsed),
        "requests_per_s": round(len(latencies) / played.elapsed),
        "latency_ms_p50": round(1000 * statistics.median(latencies), 1),
        "latency_ms_p99": round(1000 * latencies[int(0.99 * len(latencies))], 1),
    }


def measure_memory(port: int, process_id: int, live: int) -> dict[str, Any]:
    plans: dict[int, list[str]] = {index: [] for index in range(544)}
    before, during = asyncio.run(sessions.hold(port, process_id, plans, live))
    return {"sessions": live, "rss_mb_none": before["python"], "rss_mb_live": during["python"]}


def measure_leak(port: int, process_id: int, cycles: int) -> dict[str, Any]:
    found = asyncio.run(sessions.cycle(port, process_id, range(544), cycles, "inventory"))
    resident = [each["python"] for each in found]
    growth = round(resident[-1] - resident[4], 1)
    return {"cycles": cycles, "rss_mb": resident, "rss_mb_growth_second_half": growth}


def main() -> int:
    parser = arguments(__doc__, None, "server.json")
    parser.add_argument("--seconds", type=float, default=15.0, help="of the throughput part")
    parser.add_argument("--live", type=int, default=1000, help="sessions open at once")
    parser.add_argument("--cycles", type=int, default=10_000)
    options = parser.parse_args()
    results = Results(options.out, "server.json")
    results.about["hardware"] = sessions.hardware()
    words = ["--env", "textcraft", "--port", "0", "--max-sessions"]
    words += [str(max(options.live, NUM_SESSIONS))]
    with serving("envs.server", *words) as (port, process_id):
        memory = measure_memory(port, process_id, options.live)
        steps = measure_steps(port, options.seconds)
        leak = measure_leak(port, process_id, options.cycles)
    results.write({"memory": memory, "throughput": steps, "leak": leak})
    rows = [
        ("steps/s, 64 sessions", steps["steps_per_s"]),
        ("requests/s, resets included", steps["requests_per_s"]),
        ("latency p50 / p99, ms", f"{steps['latency_ms_p50']} / {steps['latency_ms_p99']}"),
        ("RSS with no session, MB", memory["rss_mb_none"]),
        (f"RSS with {options.live:,} sessions, MB", memory["rss_mb_live"]),
        (
            f"RSS growth, second half of {options.cycles:,} cycles, MB",
            leak["rss_mb_growth_second_half"],
        ),
    ]
    machine = results.about["hardware"]
    print(f"TextCraft server, {machine['cores']} cores, {machine['cpu']}")
    show(rows, width=46)
    return 0


if __name__ == "__main__":
    sys.exit(main())
