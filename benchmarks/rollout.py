"""Measure the cost of the rollout loop: tokens/s with environments compared with the bare engine.

One engine generates 64 trajectories of 8 turns, each turn with exactly 30 tokens, in two ways:

    engine      without environments: each turn is submitted as soon as the previous turn ends, with
                a prompt of the same length as below
    collect     rollout.collect: each observation is passed to the engine as soon as it arrives

The environments run behind an HTTP server in a child process. Their steps take

    latency         question                        target
    none    0 s     how much does our loop cost?
    100 ms  0.1 s   is the waiting hidden?          0.85 of the engine's speed

Turns of equal length are the hardest case: all trajectories begin and end their turns at the same
time, so the engine often has nothing to decode.

Run it:  python benchmarks/rollout.py            a few minutes on two cores
         python benchmarks/rollout.py --max-num-seqs 32 --out benchmarks/results/rollout-32.json
If there are fewer engine slots than trajectories, some trajectory is always ready to be decoded.
Read next: rollout.py at the root.
"""

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # first, because this folder also has a rollout.py

from benchmarks.common import make_parser, median, write_result
from chat import ChatTemplate
from engines import SamplingSettings
from envclient import EnvPool, local_server
from envs import Task, Wire
from envs.textcraft.env import TextCraft
from models import load_tokenizer
from rollout import RolloutLog, RolloutRequest, RolloutSettings, collect
from sampling.vllm_engine import VLLMEngine
from scale.default_models import resolve_model

TRAJECTORIES, NUM_TURNS, TOKENS_PER_TURN = 64, 8, 30
LATENCIES = {"none": 0.0, "100 ms": 0.1}  # seconds of a step
ENV = "benchmarks.rollout:Delay"
Figures = dict[str, float]  # tokens, seconds


class Delay(TextCraft):
    """An environment whose steps only wait. The task index selects the latency."""

    NAME = "delay"
    PROMPT = [{"role": "system", "content": "Open the box. Answer with the action alone."}]
    WIRE = Wire()  # type: ignore[assignment]
    IS_FAST = False

    def __init__(self) -> None:
        """Unlike TextCraft's, does not load the recipes, which every thread would read."""

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
        return "Crafting commands:\n" + 8 * "craft 4 oak planks using 1 oak logs\n" + "\nGoal: box."

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        time.sleep(self._latency)
        return "Could not execute that. The box is closed.", 0.0, False, False, {"success": False}


# ------------------------------------------------------------------------------------ the two loops


def play_engine(engine: VLLMEngine, opening: list[int], observation: list[int]) -> Figures:
    """The same requests without environments: the ids of a fixed `observation` follow each turn."""
    sampling = SamplingSettings(max_tokens=TOKENS_PER_TURN)
    sequences = [list(opening) for _ in range(TRAJECTORIES)]
    turns = [0] * TRAJECTORIES
    tokens, start = 0, time.perf_counter()
    for number, ids in enumerate(sequences):
        engine.submit(f"{number}", ids, sampling)
    while engine.num_running:
        for generation in engine.poll():
            number = int(generation.request_id)
            tokens += len(generation.token_ids)
            turns[number] += 1
            sequences[number] += generation.token_ids + observation
            if turns[number] < NUM_TURNS:
                engine.submit(generation.request_id, sequences[number], sampling)
    return {"tokens": tokens, "seconds": time.perf_counter() - start}


# ---------------------------------------------------------------------------------------- measuring


def measure(model: str, max_num_seqs: int, num_repeats: int) -> list[dict[str, Any]]:
    """One item per repeat: latency -> loop -> its figures."""
    path = resolve_model(model)
    chat = ChatTemplate(load_tokenizer(path))
    chat.stop_token_ids = ()  # vLLM goes on after an end-of-turn, so all turns are equally long
    engine = VLLMEngine(path, max_model_len=2048, max_num_seqs=max_num_seqs)
    engine._params = partial(engine._params, ignore_eos=True)
    settings = RolloutSettings(
        max_tokens_per_turn=TOKENS_PER_TURN,
        max_trajectory_tokens=2048,
        env_workers=TRAJECTORIES,
    )
    env = Delay()
    opening = chat.opening(Delay.PROMPT, env.reset(0))
    observation = [chat.end_of_turn] + chat.observation(env.step("")[0])

    def timed(name: str, loop: Callable[[], Figures]) -> Figures:
        engine._llm.reset_prefix_cache()  # as after a weight sync
        figures = loop()
        expected = TRAJECTORIES * NUM_TURNS * TOKENS_PER_TURN
        if figures["tokens"] != expected:
            raise SystemExit(f"{name}: {figures['tokens']} tokens, expected {expected}")
        print(f"  {name} {expected / figures['seconds']:,.0f} tokens/s", flush=True)
        return figures

    def compare(pool: EnvPool, repeat: int, index: int) -> dict[str, Figures]:
        task = Task(f"delay_{index}", index, Delay.subtask(index))
        seeds = enumerate(range(1000 * repeat, 1000 * repeat + TRAJECTORIES))
        requests = [RolloutRequest(task, 0, k, seed, repeat, NUM_TURNS) for k, seed in seeds]

        def play_collect() -> Figures:
            log = RolloutLog()
            collect(engine, pool, chat, requests, settings, log)
            return {"tokens": log.generated_tokens, "seconds": log.seconds}

        loops: dict[str, Callable[[], Figures]] = {
            "engine": partial(play_engine, engine, opening, observation),
            "collect": play_collect,
        }
        print(f"repeat {repeat + 1} of {num_repeats}, {task.subtask}:", flush=True)
        return {name: timed(name, loop) for name, loop in loops.items()}

    try:
        with local_server(ENV) as url, EnvPool(ENV, [url]) as pool:
            play_engine(engine, opening, observation)  # warm up kernels and allocator
            return [
                {latency: compare(pool, repeat, n) for n, latency in enumerate(LATENCIES)}
                for repeat in range(num_repeats)
            ]
    finally:
        engine.close()


def summarize(repeats: Sequence[dict[str, Any]]) -> dict[str, Figures]:
    """Medians over the repeats per latency; ratios are taken within a repeat."""
    table = {}
    for latency in repeats[0]:
        rows = [repeat[latency] for repeat in repeats]
        speed = {loop: [r[loop]["tokens"] / r[loop]["seconds"] for r in rows] for loop in rows[0]}
        column = {loop: median(values, 1) for loop, values in speed.items()}
        ratios = (a / b for a, b in zip(speed["collect"], speed["engine"], strict=True))
        column["ratio_to_engine"] = median(ratios, 3)
        table[latency] = column
    return table


def main() -> int:
    parser = make_parser(__doc__, 5)
    parser.add_argument("--model", default="tiny", help="model name or folder (default: tiny)")
    parser.add_argument(
        "--max-num-seqs", type=int, default=64, help="maximum number of sequences decoded at once"
    )
    options = parser.parse_args()
    repeats = measure(options.model, options.max_num_seqs, options.repeats)
    table = summarize(repeats)
    settings = {"model": options.model, "max_num_seqs": options.max_num_seqs}
    result = {"settings": settings, "summary": table, "repeats": repeats}
    write_result(options, "rollout.json", result)
    print(f"\n{'':<28}" + "".join(f"{latency:>12}" for latency in table))
    for name in table["none"]:
        print(f"{name:<28}" + "".join(f"{column[name]:>12}" for column in table.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
