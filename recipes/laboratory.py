"""The laboratory: an environment, a teacher and a model so small that an RL run takes minutes.

Environment  13 levels of BabyAI in three tiers, by the number of turns the oracle usually needs:

                 near     1 to 3     go to, pick up or open something in the room
                 middle   3 to 10    doors in order, put next to, a key in a box (at most 16)
                 far      8 to 16    unlock a door with a key that is somewhere else (at most 20)

             A level generates a maze from a seed. Seeds 0 to 39 are for training, 40 to 54 are held
             out, 70 to 74 are for choosing settings (development), and the teacher demonstrates
             seeds 100 to 999. The teacher also demonstrates
             levels 22, 27 and 29, on which RL does not train, because all eight samples of a group
             fail there.
Teacher      the oracle with three moves in ten replaced by random available actions. A model that
             imitates it makes as many errors, so it fails more often if the horizon is short.
Model        3M parameters and a tokenizer of BabyAI's words. It has imitated the teacher for one
             epoch (recipes/starts/tiny-babyai, 6 MB) and writes only the action.

    python recipes/laboratory.py        writes the id lists in recipes/laboratory/

Read next: miniature.py, the experiments.
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
PLAYED = {"near": TIERS["near"], "middle": (8, 15, 21, 26)}  # in training and evaluation
SHARES = {"near": 0.35, "middle": 0.4, "far": 0.25}  # of the teacher's episodes
SEEDS = {"train": range(40), "held_out": range(40, 55), "development": range(70, 75)}
LISTS = {  # the committed id lists
    "train": SEEDS["train"],
    "held_out": SEEDS["held_out"],
    "evaluated": (*SEEDS["held_out"], *SEEDS["development"]),
}
TEACHER_SEEDS = range(100, 1000)
ERROR = 0.3
MAX_TURNS = 32  # of a demonstration


def tier_of(task_id: str) -> str:
    """The tier of a task's level.

    >>> tier_of("babyai_26"), tier_of("babyai_40")
    ('far', 'near')
    """
    number, _ = level_and_seed(int(task_id.rpartition("_")[2]))
    return next(tier for tier, numbers in TIERS.items() if number in numbers)


def is_held_out(task_id: str) -> bool:
    """Whether a task's maze is held out, and not one for choosing settings.

    >>> is_held_out("babyai_1600"), is_held_out("babyai_2800")
    (True, False)
    """
    return level_and_seed(int(task_id.rpartition("_")[2]))[1] in SEEDS["held_out"]


def goals(seeds: Sequence[int]) -> list[int]:
    """Task indices of the PLAYED levels, seed by seed."""
    numbers = [number for levels in PLAYED.values() for number in levels]
    return [task_index_of(number, seed) for seed in seeds for number in numbers]


def play(
    env: Any,
    task_index: int,
    rng: random.Random,
    error: float = ERROR,
    max_turns: int = MAX_TURNS,
    hides_errors: bool = False,
) -> tuple[Record, bool]:
    """An episode of the teacher as an AgentTraj conversation, and whether it succeeded.

    Args:
        error: probability of a random move.
        hides_errors: random moves are not to be imitated.
    """
    observation, success = env.reset(task_index), False
    messages: list[dict[str, Any]] = [
        {"from": NAMES[m["role"]], "loss": None, "value": m["content"]}
        for m in read_json(PROMPT_FILE)
    ]
    for _ in range(max_turns):
        is_random = rng.random() < error
        action = rng.choice(env.available_actions()) if is_random else env.oracle()[1]
        messages.append({"from": "human", "loss": None, "value": observation})
        is_shown = not (is_random and hides_errors)
        messages.append({"from": "gpt", "loss": is_shown, "value": f"Action: {action}"})
        observation, _, terminated, truncated, info = env.step(action)
        if terminated or truncated:
            success = info["success"]
            break
    return {"item_id": f"babyai_{task_index}", "conversations": messages}, success


def demonstrate(
    count: int,
    seed: int = 0,
    tiers: Sequence[str] = tuple(TIERS),
    seeds: Sequence[int] = TEACHER_SEEDS,
) -> tuple[list[Record], int]:
    """`count` successful episodes, and the number of turns played, including failed episodes."""
    from envs.babyai.env import BabyAI

    rng, env = random.Random(seed), BabyAI()
    demonstrations: list[Record] = []
    num_turns = 0
    while len(demonstrations) < count:
        (tier,) = rng.choices(tiers, [SHARES[tier] for tier in tiers])
        index = task_index_of(rng.choice(TIERS[tier]), rng.choice(seeds))
        try:
            episode, success = play(env, index, rng)
        except OracleLost:
            continue
        num_turns += sum(turn["from"] == "gpt" for turn in episode["conversations"])
        demonstrations += [episode] if success else []
    return demonstrations, num_turns


if __name__ == "__main__":
    for name, seeds in LISTS.items():
        rows = [json.dumps({"item_id": f"babyai_{index}"}) for index in goals(seeds)]
        (FOLDER / f"{name}.json").write_text("[\n" + ",\n".join(rows) + "\n]\n", encoding="utf-8")
        print(f"{FOLDER / name}.json: {len(rows)} tasks")
