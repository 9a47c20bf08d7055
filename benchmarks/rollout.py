"""What the rollout loop costs: generated tokens/s with environments, against the engine with none.

A rollout should be as fast as its engine. What can slow it down is our own loop (threads, HTTP,
JSON, bookkeeping) and waiting for environments. 64 trajectories of 8 turns of exactly 30 tokens are
played in three ways on one engine, in one process, one after the other:

    engine      no environment: turn t+1 is submitted the moment turn t ends, with as long a prompt
    collect     rollout.collect: every environment's answer goes back to the engine at once
    lockstep    AgentGym-RL's way: generate for all, step all environments, wait for the slowest

against a real HTTP server in a process of its own whose steps take

    none    0 s          how much our loop costs
    100 ms  0.1 s        whether waiting is hidden behind decoding
    tail    2 s for 5 %, the same ones for every loop     what a slow environment does to the others

    ratio to engine   = tokens/s of collect / tokens/s of engine     goal: at least 0.85 at 100 ms
    ratio to lockstep = tokens/s of collect / tokens/s of lockstep    goal: at least 1.5 at tail

Ratios are taken within a repeat, between runs that follow each other, and the median of five is
reported. `idle` is the share of the time in which the engine had no request at all. Turns of equal
length are the hardest case: all trajectories begin together and so end their turns together, and
what hides waiting in training, that somebody is always in mid-turn, has to arise by itself.

Run it:  python benchmarks/rollout.py            about six minutes on two cores
         python benchmarks/rollout.py --max-num-seqs 32 --out benchmarks/results/rollout-32.json
It prints a table and writes benchmarks/results/rollout.json, or --out. With fewer engine slots than
trajectories somebody always waits to be decoded. Read next: rollout.py at the root.
"""

import argparse
import contextlib
import datetime
import functools
import json
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # before this folder, whose rollout.py is this file

from envs import ENVS, Wire  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "rollout.json"
NUM_TURNS, TOKENS_PER_TURN = 8, 30
LATENCIES = {"none": (0.0, 0.0, 0.0), "100 ms": (0.1, 0.0, 0.0), "tail": (0.0, 0.05, 2.0)}
GOALS = {"ratio_to_engine": ("100 ms", 0.85), "ratio_to_lockstep": ("tail", 1.5)}


class Delay:
    """A world whose steps do nothing but take time; the task index says how much.

    `LATENCIES[name] = (seconds, share, slow_seconds)`: a step sleeps `seconds`, or with probability
    `share` `slow_seconds`. Which steps are slow depends on the episode's seed alone, so that every
    loop meets the same ones.
    """

    PROMPT = [{"role": "system", "content": "Open the box. Answer with the action alone."}]
    WIRE = Wire()
    IS_FAST = False

    @staticmethod
    def num_tasks() -> int:
        return len(LATENCIES)

    @staticmethod
    def subtask(task_index: int) -> str:
        return list(LATENCIES)[task_index]

    @staticmethod
    def parse(model_text: str) -> str:
        return model_text

    def reset(self, task_index: int, seed: int = 0) -> str:
        self._latency = LATENCIES[self.subtask(task_index)]
        self._random = random.Random(seed)
        return "Crafting commands:\n" + 8 * "craft 4 oak planks using 1 oak logs\n" + "\nGoal: box."

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        seconds, share, slow_seconds = self._latency
        time.sleep(slow_seconds if self._random.random() < share else seconds)
        return "Could not execute that. The box is closed.", 0.0, False, False, {"success": False}

    def close(self) -> None:
        """Nothing is held."""


ENVS["delay"] = f"{__name__}:Delay"


@contextlib.contextmanager
def delay_server() -> Iterator[str]:
    """The address of a server of `Delay` in a process of its own, which ends with the block."""
    command = [sys.executable, str(Path(__file__).resolve()), "--serve"]
    server = subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        line = server.stdout.readline() if server.stdout else ""
        if not line.startswith("listening on "):
            raise SystemExit("the environment server did not start; its message is above")
        yield line.split()[2]
    finally:
        if server.stdin:
            server.stdin.close()  # what the server waits for
        server.wait(timeout=10)


def serve() -> int:
    """The server's process: serves until its standard input closes."""
    from envs.server import main as serve_env

    threading.Thread(target=lambda: (os.read(0, 1), os._exit(0)), daemon=True).start()
    return serve_env(["--env", "delay", "--port", "0"])


def play_engine(engine: Any, openings: Sequence[list[int]], between: list[int]) -> dict[str, float]:
    """The same requests with no environment: prompts grow by what observations would add."""
    from engines import SamplingSettings

    sampling = SamplingSettings(max_tokens=TOKENS_PER_TURN)
    sequences = [list(ids) for ids in openings]
    turns = [0] * len(sequences)
    tokens, began = 0, time.perf_counter()
    for number, ids in enumerate(sequences):
        engine.submit(f"{number}", ids, sampling)
    while engine.num_running:
        for generation in engine.poll():
            number = int(generation.request_id)
            tokens += len(generation.token_ids)
            turns[number] += 1
            sequences[number] += generation.token_ids + between
            if turns[number] < NUM_TURNS:
                engine.submit(generation.request_id, sequences[number], sampling)
    return {"tokens": tokens, "seconds": time.perf_counter() - began, "idle_s": 0.0}


def play_collect(engine: Any, pool: Any, chat: Any, requests: Any, settings: Any) -> dict:
    from rollout import RolloutStats, collect

    stats = RolloutStats()
    collect(engine, pool, chat, requests, settings, stats=stats)
    seconds, idle = stats.seconds, stats.engine_idle_s
    return {"tokens": stats.generated_tokens, "seconds": seconds, "idle_s": idle}


def play_lockstep(engine: Any, pool: Any, chat: Any, requests: Any, settings: Any) -> dict:
    """Rounds: all generate, then all environments answer, then the next round.

    Episodes are collect's own, environment calls have as many threads: only waiting differs.
    """
    from rollout import _Episode

    stopping = threading.Event()
    episodes = [_Episode(pool, chat, request, settings, 0, stopping) for request in requests]
    tokens, idle, began = 0, 0.0, time.perf_counter()

    def answer_all(calls: list[Any]) -> None:
        nonlocal idle
        waited = time.perf_counter()
        for call in [threads.submit(call) for call in calls]:
            call.result()
        idle += time.perf_counter() - waited

    with ThreadPoolExecutor(settings.env_workers) as threads:
        answer_all([episode.reset for episode in episodes])
        playing = {episode.handler.trajectory_id: episode for episode in episodes}
        while playing:
            for name, episode in list(playing.items()):
                sampling = episode.next_request()
                if sampling is None:
                    del playing[name]
                else:
                    engine.submit(name, episode.handler.next_prompt(), sampling)
            while engine.num_running:
                for generation in engine.poll():
                    tokens += len(generation.token_ids)
                    playing[generation.request_id].take(generation)
            answer_all([episode.act for episode in playing.values()])
    return {"tokens": tokens, "seconds": time.perf_counter() - began, "idle_s": idle}


def make_benchmark_engine(path: str, max_num_seqs: int) -> Any:
    """vLLM, told to go on after an end-of-turn, so that every turn has the same length."""
    from engines import VLLMEngine

    engine = VLLMEngine(path, max_model_len=2048, max_num_seqs=max_num_seqs)
    engine._params = functools.partial(engine._params, ignore_eos=True)
    return engine


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All repeats; {"repeats": [{latency: {loop: {tokens, seconds, idle_s}}}], ...}."""
    from chat import ChatTemplate
    from envclient import EnvPool
    from envs import Task
    from models import load_tokenizer
    from rollout import RolloutRequest, RolloutSettings
    from runtime.default_models import resolve_model

    path = resolve_model("tiny")
    chat = ChatTemplate(load_tokenizer(path))
    chat.stop_token_ids = ()
    engine = make_benchmark_engine(path, options.max_num_seqs)
    settings = RolloutSettings(
        max_rounds=NUM_TURNS,
        max_tokens_per_turn=TOKENS_PER_TURN,
        max_trajectory_tokens=2048,
        env_workers=max(64, options.trajectories),
    )
    world = Delay()
    opening = chat.opening(Delay.PROMPT, world.reset(0))
    between = [chat.end_of_turn] + chat.observation(world.step("")[0])
    expected = options.trajectories * NUM_TURNS * TOKENS_PER_TURN
    repeats: list[dict[str, Any]] = []
    with contextlib.ExitStack() as stack:
        stack.callback(engine.close)
        url = stack.enter_context(delay_server())
        pool = stack.enter_context(EnvPool("delay", [url]))
        play_engine(engine, [opening] * options.trajectories, between)  # kernels, allocator
        for repeat in range(options.repeats):
            row: dict[str, Any] = {}
            for index, latency in enumerate(LATENCIES):
                task = Task(f"delay_{index}", index, latency)
                requests = [
                    RolloutRequest(task, 0, n, seed=1000 * repeat + n, step=repeat)
                    for n in range(options.trajectories)
                ]
                loops = {
                    "engine": lambda: play_engine(
                        engine, [opening] * options.trajectories, between
                    ),
                    "collect": lambda r=requests: play_collect(engine, pool, chat, r, settings),
                    "lockstep": lambda r=requests: play_lockstep(engine, pool, chat, r, settings),
                }
                row[latency] = {}
                for name, loop in loops.items():
                    engine._llm.reset_prefix_cache()  # as after a weight sync
                    run = row[latency][name] = loop()
                    if run["tokens"] != expected:
                        raise SystemExit(f"{name}: {run['tokens']} tokens, expected {expected}")
                    speed = run["tokens"] / run["seconds"]
                    where = f"repeat {repeat + 1} of {options.repeats}, {latency}"
                    print(f"{where}: {name} {speed:,.0f} tokens/s", flush=True)
            repeats.append(row)
    lengths = {"opening": len(opening), "between_turns": len(between)}
    return {"prompt_tokens": lengths, "repeats": repeats}


def summarize(repeats: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Medians per latency; ratios are taken within a repeat, then the median over repeats.

    >>> run = lambda seconds: {"tokens": 100, "seconds": seconds, "idle_s": seconds / 4}
    >>> summarize([{"tail": {"engine": run(1), "collect": run(2), "lockstep": run(6)}}])["tail"]
    {'engine': 100.0, 'collect': 50.0, 'lockstep': 16.7, 'ratio_to_engine': 0.5, \
'ratio_to_lockstep': 3.0, 'collect_idle': 0.25, 'lockstep_idle': 0.25}
    """
    table = {}
    for latency in repeats[0]:
        rows = [repeat[latency] for repeat in repeats]
        speed = {
            loop: [row[loop]["tokens"] / row[loop]["seconds"] for row in rows] for loop in rows[0]
        }
        column: dict[str, float] = {
            loop: round(statistics.median(values), 1) for loop, values in speed.items()
        }
        for other in ("engine", "lockstep"):
            ratios = [a / b for a, b in zip(speed["collect"], speed[other], strict=True)]
            column[f"ratio_to_{other}"] = round(statistics.median(ratios), 3)
        for loop in ("collect", "lockstep"):
            shares = [row[loop]["idle_s"] / row[loop]["seconds"] for row in rows]
            column[f"{loop}_idle"] = round(statistics.median(shares), 3)
        table[latency] = column
    return table


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--trajectories", type=int, default=64)
    parser.add_argument("--max-num-seqs", type=int, default=64, help="the engine decodes at a time")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        return serve()
    from runtime.rundir import circumstances

    about = circumstances()
    measured = measure(options)
    table = summarize(measured["repeats"])
    goals = {
        name: {"latency": latency, "goal": goal, "got": table[latency][name]}
        | {"met": table[latency][name] >= goal}
        for name, (latency, goal) in GOALS.items()
    }
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    setting = {"trajectories": options.trajectories, "turns": NUM_TURNS, "model": "tiny"}
    setting |= {"tokens_per_turn": TOKENS_PER_TURN, "latencies": LATENCIES}
    setting |= {"max_num_seqs": options.max_num_seqs}
    document = {"date": date} | about | {"settings": setting, "summary": table, "goals": goals}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(document | measured, indent=2) + "\n")
    print(f"\n{'':<28}" + "".join(f"{latency:>12}" for latency in table))
    for name in next(iter(table.values())):
        print(f"{name:<28}" + "".join(f"{table[latency][name]:>12}" for latency in table))
    for name, goal in goals.items():
        verdict = "met" if goal["met"] else "MISSED"
        print(f"{name} at {goal['latency']}: {goal['got']}, goal {goal['goal']}: {verdict}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
