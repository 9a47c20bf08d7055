"""A laboratory for experiments in RL: an environment, a teacher and a model so small that a run
takes minutes, with goals without end, so that held-out ones are new.

Environment  13 levels of BabyAI, of three kinds by the turns that the oracle needs:

                 near     1 to 3     go to, pick up or open something in the room
                 middle   3 to 10    doors in order, put next to, a key in a box
                 far      8 to 16    unlock a door with a key that lies elsewhere

             Level seeds 0 to 39 are for training, 40 to 54 held out, 100 to 999 the teacher's. Only
             the teacher shows levels 22, 27 and 29: groups of eight samples fail there alike.
Teacher      the oracle, but three moves in ten are any of the available ones. A model that imitates
             it errs as often and wastes turns: the shorter the horizon, the more it fails.
Model        3M parameters, a tokenizer of BabyAI's own words; it has imitated the teacher once
             (recipes/starts/tiny-babyai, 6 MB) and writes nothing but the action.

    python recipes/laboratory.py        writes the id lists in recipes/laboratory/

Read next: miniature.py, which experiments in it.
"""

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from data import NAMES, Record  # noqa: E402
from envs import OracleLost  # noqa: E402
from envs.babyai.levels import level_and_seed, task_index_of  # noqa: E402
from recipes.common import read_json  # noqa: E402

FOLDER = ROOT / "recipes" / "laboratory"
PROMPT_FILE = FOLDER / "prompt.json"
TIERS = {"near": (1, 2, 4, 9, 19, 30), "middle": (8, 15, 21, 22, 26), "far": (27, 29)}
PLAYED = {"near": TIERS["near"], "middle": (8, 15, 21, 26)}  # in training and when held out
SHARES = {"near": 0.35, "middle": 0.4, "far": 0.25}  # of the teacher's episodes
SEEDS = {"train": range(40), "held_out": range(40, 55)}
TEACHER_SEEDS = range(100, 1000)
ERROR = 0.3
MAX_TURNS = 32  # of an episode that is shown


def tier_of(task_id: str) -> str:
    """
    >>> tier_of("babyai_26"), tier_of("babyai_40")
    ('far', 'near')
    """
    number, _ = level_and_seed(int(task_id.rpartition("_")[2]))
    return next(tier for tier, numbers in TIERS.items() if number in numbers)


def goals(seeds: Sequence[int]) -> list[int]:
    """Task indices of the levels that are played, seed by seed."""
    numbers = [number for levels in PLAYED.values() for number in levels]
    return [task_index_of(number, seed) for seed in seeds for number in numbers]


def show(
    env: Any, task_index: int, rng: random.Random, error: float = ERROR, turns: int = MAX_TURNS
) -> tuple[Record, bool]:
    """One episode of the teacher as an AgentTraj conversation, and whether it was solved."""
    observation, solved = env.reset(task_index), False
    record: list[dict[str, Any]] = [
        {"from": NAMES[m["role"]], "loss": None, "value": m["content"]}
        for m in read_json(PROMPT_FILE)
    ]
    for _ in range(turns):
        is_wrong = rng.random() < error
        action = rng.choice(env.available_actions()) if is_wrong else env.oracle()[1]
        record.append({"from": "human", "loss": None, "value": observation})
        record.append({"from": "gpt", "loss": True, "value": f"Action: {action}"})
        observation, _, terminated, truncated, info = env.step(action)
        if terminated or truncated:
            solved = info["success"]
            break
    return {"item_id": f"babyai_{task_index}", "conversations": record}, solved


def demonstrate(
    count: int,
    seed: int = 0,
    kinds: Sequence[str] = tuple(TIERS),
    seeds: Sequence[int] = TEACHER_SEEDS,
    turns: int = MAX_TURNS,
) -> tuple[list[Record], int]:
    """`count` solved episodes, and the turns of all that were played, failed ones included."""
    from envs.babyai.env import BabyAI

    rng, env = random.Random(seed), BabyAI()
    shown: list[Record] = []
    played = 0
    while len(shown) < count:
        (tier,) = rng.choices(kinds, [SHARES[kind] for kind in kinds])
        index = task_index_of(rng.choice(TIERS[tier]), rng.choice(seeds))
        try:
            record, solved = show(env, index, rng, turns=turns)
        except OracleLost:
            continue
        played += sum(turn["from"] == "gpt" for turn in record["conversations"])
        shown += [record] if solved else []
    return shown, played


if __name__ == "__main__":
    for name, seeds in SEEDS.items():
        rows = [json.dumps({"item_id": f"babyai_{index}"}) for index in goals(seeds)]
        (FOLDER / f"{name}.json").write_text("[\n" + ",\n".join(rows) + "\n]\n", encoding="utf-8")
        print(f"{FOLDER / name}.json: {len(rows)} tasks")
