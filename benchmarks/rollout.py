"""What the rollout loop costs: generated tokens/s with environments, against the engine with none.

A rollout should be as fast as its engine. What can slow it down is our own loop (threads, HTTP,
JSON, bookkeeping) and waiting for environments. 64 trajectories of 8 turns of exactly 30 tokens are
played in three ways on one engine, in one process, one after the other:

    engine      no environment: turn t+1 is submitted the moment turn t ends, with as long a prompt
    collect     rollout.collect: every environment's answer goes back to the engine at once
    lockstep    generate for all, step all environments, wait for the slowest

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
With fewer engine slots than trajectories some trajectory always waits to be decoded.
Read next: rollout.py at the root.
"""

import argparse
import functools
import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # before this folder, whose rollout.py is this file

from benchmarks.common import Results, arguments, median  # noqa: E402
from chat import ChatTemplate  # noqa: E402
from engines import SamplingSettings  # noqa: E402
from envclient import EnvPool, local_server  # noqa: E402
from envs import Task, Wire  # noqa: E402
from envs.textcraft.env import TextCraft  # noqa: E402
from models import load_tokenizer  # noqa: E402
from rollout import (  # noqa: E402
    RolloutLog,
    RolloutRequest,
    RolloutSettings,
    _Episode,
    collect,
)
from sampling.vllm_engine import VLLMEngine  # noqa: E402
from scale.default_models import resolve_model  # noqa: E402

NUM_TURNS, TOKENS_PER_TURN = 8, 30
LATENCIES = {"none": (0.0, 0.0, 0.0), "100 ms": (0.1, 0.0, 0.0), "tail": (0.0, 0.05, 2.0)}
WORLD = "benchmarks.rollout:Delay"
GOALS = {"ratio_to_engine": ("100 ms", 0.85), "ratio_to_lockstep": ("tail", 1.5)}


class Delay(TextCraft):
    """An environment whose steps only take time; the task index says how much.

    `LATENCIES[name] = (seconds, share, slow_seconds)`: a step sleeps `seconds`, or with probability
    `share` `slow_seconds`. Which steps are slow depends on the episode's seed alone, so that every
    loop meets the same ones.
    """

    NAME = "delay"
    PROMPT = [{"role": "system", "content": "Open the box. Answer with the action alone."}]
    WIRE = Wire()  # type: ignore[assignment]
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


# ---------------------------------------------------------------------------------- the three loops


def play_engine(engine: Any, openings: Sequence[list[int]], between: list[int]) -> dict[str, float]:
    """The same requests with no environment: prompts grow by what observations would add."""
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


def play_collect(
    engine: Any, pool: EnvPool, chat: ChatTemplate, requests: list[RolloutRequest], settings: Any
) -> dict[str, float]:
    """The loop that training runs."""
    log = RolloutLog()
    collect(engine, pool, chat, requests, settings, log)
    return {"tokens": log.generated_tokens, "seconds": log.seconds, "idle_s": log.engine_idle_s}


def play_lockstep(
    engine: Any, pool: EnvPool, chat: ChatTemplate, requests: list[RolloutRequest], settings: Any
) -> dict[str, float]:
    """Rounds: all generate, then all environments answer, then the next round.

    Episodes are collect's own, environment calls have as many threads: only waiting differs.
    """
    stopping = threading.Event()
    episodes = [_Episode(pool, chat, request, settings, stopping) for request in requests]
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


def make_engine(path: str, max_num_seqs: int) -> VLLMEngine:
    """vLLM, told to go on after an end-of-turn, so that every turn has the same length."""
    engine = VLLMEngine(path, max_model_len=2048, max_num_seqs=max_num_seqs)
    engine._params = functools.partial(engine._params, ignore_eos=True)
    return engine


# ---------------------------------------------------------------------------------------- measuring


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """All repeats; {"repeats": [{latency: {loop: {tokens, seconds, idle_s}}}], ...}."""
    path, n = resolve_model(options.model), options.trajectories
    chat = ChatTemplate(load_tokenizer(path))
    chat.stop_token_ids = ()
    engine = make_engine(path, options.max_num_seqs)
    settings = RolloutSettings(
        max_tokens_per_turn=TOKENS_PER_TURN,
        max_trajectory_tokens=2048,
        env_workers=max(64, n),
    )
    world = Delay()
    opening = chat.opening(Delay.PROMPT, world.reset(0))
    between = [chat.end_of_turn] + chat.observation(world.step("")[0])

    def compare(pool: EnvPool, repeat: int, index: int) -> dict[str, dict[str, float]]:
        task = Task(f"delay_{index}", index, Delay.subtask(index))
        seeds = range(1000 * repeat, 1000 * repeat + n)
        numbered = enumerate(seeds)
        requests = [RolloutRequest(task, 0, k, s, repeat, NUM_TURNS) for k, s in numbered]
        playing = (engine, pool, chat, requests, settings)
        loops = {
            "engine": functools.partial(play_engine, engine, [opening] * n, between),
            "collect": functools.partial(play_collect, *playing),
            "lockstep": functools.partial(play_lockstep, *playing),
        }
        print(f"repeat {repeat + 1} of {options.repeats}, {task.subtask}:", flush=True)
        return {name: timed(name, engine, loop, n) for name, loop in loops.items()}

    try:
        with local_server(WORLD) as url, EnvPool(WORLD, [url]) as pool:
            play_engine(engine, [opening] * n, between)  # kernels, allocator
            repeats = [
                {latency: compare(pool, repeat, i) for i, latency in enumerate(LATENCIES)}
                for repeat in range(options.repeats)
            ]
    finally:
        engine.close()
    lengths = {"opening": len(opening), "between_turns": len(between)}
    return {"prompt_tokens": lengths, "repeats": repeats}


def timed(
    name: str, engine: VLLMEngine, loop: Callable[[], dict[str, float]], trajectories: int
) -> dict[str, float]:
    """One loop, which must have generated what all of them do."""
    engine._llm.reset_prefix_cache()  # as after a weight sync
    run = loop()
    expected = trajectories * NUM_TURNS * TOKENS_PER_TURN
    if run["tokens"] != expected:
        raise SystemExit(f"{name}: {run['tokens']} tokens, expected {expected}")
    print(f"  {name} {run['tokens'] / run['seconds']:,.0f} tokens/s", flush=True)
    return run


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
        speed = {loop: [r[loop]["tokens"] / r[loop]["seconds"] for r in rows] for loop in rows[0]}
        column = {loop: median(values, 1) for loop, values in speed.items()}
        for other in ("engine", "lockstep"):
            ratios = (a / b for a, b in zip(speed["collect"], speed[other], strict=True))
            column[f"ratio_to_{other}"] = median(ratios, 3)
        for loop in ("collect", "lockstep"):
            shares = (r[loop]["idle_s"] / r[loop]["seconds"] for r in rows)
            column[f"{loop}_idle"] = median(shares, 3)
        table[latency] = column
    return table


def main() -> int:
    parser = arguments(__doc__, 5)
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--trajectories", type=int, default=64)
    parser.add_argument("--max-num-seqs", type=int, default=64, help="the engine decodes at a time")
    options = parser.parse_args()
    results = Results(options, "rollout.json")
    measured = measure(options)
    table = summarize(measured["repeats"])
    setting = {"trajectories": options.trajectories, "turns": NUM_TURNS, "model": options.model}
    setting |= {"tokens_per_turn": TOKENS_PER_TURN, "latencies": LATENCIES}
    setting |= {"max_num_seqs": options.max_num_seqs}
    results.write({"settings": setting, "summary": table} | measured)
    print(f"\n{'':<28}" + "".join(f"{latency:>12}" for latency in table))
    for name in next(iter(table.values())):
        print(f"{name:<28}" + "".join(f"{table[latency][name]:>12}" for latency in table))
    for name, (latency, goal) in GOALS.items():
        figure = table[latency][name]
        verdict = "met" if figure >= goal else "MISSED"
        print(f"{name} at {latency}: {figure}, goal {goal}: {verdict}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
