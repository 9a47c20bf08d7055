"""The laboratory: an environment, a teacher and a model so small that an RL run takes minutes.

Environment  13 levels of BabyAI in three tiers, by the number of turns the oracle usually needs:

                 near     1 to 3     go to, pick up or open something in the room
                 middle   3 to 10    doors in order, put next to, a key in a box (at most 18)
                 far      10 to 17   unlock a door with a key that is somewhere else (at most 33)

             A level generates a maze from a seed. Seeds 0 to 39 are for training, 40 to 69 are held
             out, 70 to 79 are for choosing settings (development), and the teacher demonstrates
             seeds 100 to 999. The teacher also demonstrates levels 22, 27 and 29. Experiments with
             up to 16 turns do not train on them, because all eight samples of a group fail there;
             those with up to 24 turns train on 27 and 29, but not on 8, 21 and 22.
Teacher      the oracle with three moves in ten replaced by random available actions. A model that
             imitates it makes as many errors, so it fails more often if the horizon is short.
Model        3M parameters and a tokenizer of BabyAI's words. It has imitated the teacher for one
             epoch (recipes/starts/tiny-babyai, 6 MB) and writes only the action. For horizons up to
             24, it has also imitated a more careful teacher, whose random moves it did not imitate
             (tiny-babyai-far). miniature.py makes a start for each of four ways to play.
Ways         plain: an action in each turn. several: up to three actions in a turn. plan: first the
             oracle's next actions. reflect: a careless attempt, then what the oracle would have
             done, and another attempt.

    python recipes/laboratory.py             writes the id lists in recipes/laboratory/
    python recipes/laboratory.py demos.json  writes 1,992 episodes of the careful teacher

Read next: miniature.py, the experiments.
"""

import json
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from agents import ACT, AGAIN, PLAN, REFLECT
from data import NAMES, Record
from envs import OracleLost
from envs.babyai.levels import level_and_seed, task_index_of
from recipes.common import read_json, write_json

FOLDER = ROOT / "recipes" / "laboratory"
TIERS = {"near": (1, 2, 4, 9, 19, 30), "middle": (8, 15, 21, 22, 26), "far": (27, 29)}
PLAYED = {"near": TIERS["near"], "middle": (8, 15, 21, 26)}  # in training and evaluation
LONG = {"near": TIERS["near"], "middle": (15, 26), "far": TIERS["far"]}  # with 24 turns
SHARES = {"near": 0.35, "middle": 0.4, "far": 0.25}  # of the teacher's episodes
SEEDS = {"train": range(40), "held_out": range(40, 70), "development": range(70, 80)}
TEACHER_SEEDS = range(100, 1000)
ERROR = 0.3
MAX_TURNS = 32  # of a demonstration
# How the careful teacher plays
CAREFUL: dict[str, Any] = {"error": 0.15, "max_turns": 40, "hides_errors": True}
CAREFUL_SHARES = {"near": 0.3, "middle": 0.3, "far": 0.4}
MAX_ACTIONS = 3  # in a turn of `several`
MAX_PLANNED = 6  # actions in a plan or a reflection
CARELESS_TURNS, CARELESS_ERROR = 8, 0.6  # of the attempt before a reflection


def tier_of(task_id: str) -> str:
    """The tier of a task's level.

    >>> tier_of("babyai_26"), tier_of("babyai_40")
    ('far', 'near')
    """
    number, _ = level_and_seed(int(task_id.rpartition("_")[2]))
    return next(tier for tier, numbers in TIERS.items() if number in numbers)


def goals(part: str, tiers: Mapping[str, Sequence[int]], **counts: int) -> list[int]:
    """Task indices of the first `counts[tier]` seeds of the tier's levels, seed by seed."""
    levels = [(number, counts[tier]) for tier, numbers in tiers.items() for number in numbers]
    seeds = enumerate(SEEDS[part])
    return [task_index_of(n, seed) for k, seed in seeds for n, count in levels if k < count]


def lists() -> dict[str, list[int]]:
    """The committed id lists. `long_*` are for horizons up to 24, with far goals."""
    held_out = goals("held_out", PLAYED, near=15, middle=15)
    development = goals("development", PLAYED, near=5, middle=5)
    return {
        "train": goals("train", PLAYED, near=40, middle=40),
        "held_out": held_out,
        "development": development,
        "evaluated": held_out + development,
        "long_train": goals("train", LONG, near=20, middle=20, far=40),
        "long_held_out": goals("held_out", LONG, near=8, middle=15, far=30),
        "long_development": goals("development", LONG, near=2, middle=5, far=10),
    }


def is_held_out(task_id: str) -> bool:
    """Whether a task's maze is held out, and not one for choosing settings.

    >>> is_held_out("babyai_1600"), is_held_out("babyai_2800")
    (True, False)
    """
    return level_and_seed(int(task_id.rpartition("_")[2]))[1] in SEEDS["held_out"]


def prompt_file(way: str) -> Path:
    """The messages before a task, for a way to play."""
    return FOLDER / ("prompt_several.json" if way == "several" else "prompt.json")


def play(
    env: Any,
    task_index: int,
    rng: random.Random,
    error: float = ERROR,
    max_turns: int = MAX_TURNS,
    hides_errors: bool = False,
    way: str = "plain",
) -> tuple[Record, bool]:
    """An episode of the teacher as an AgentTraj conversation, and whether it succeeded.

    Args:
        error: probability of a random move.
        hides_errors: random moves are not to be imitated.
        way: plain, several, plan or reflect.
    """
    messages: list[dict[str, Any]] = [
        {"from": NAMES[m["role"]], "loss": None, "value": m["content"]}
        for m in read_json(prompt_file(way))
    ]

    def add(text: str, answer: str, is_shown: bool = True) -> None:
        messages.append({"from": "human", "loss": None, "value": text})
        messages.append({"from": "gpt", "loss": is_shown, "value": answer})

    def attempt(text: str, error: float, max_turns: int) -> tuple[str, bool]:
        """Play until the episode ends; returns the last observation and whether it succeeded."""
        for _ in range(max_turns):
            is_random = rng.random() < error
            lines = []
            for _ in range(rng.randint(1, MAX_ACTIONS) if way == "several" else 1):
                action = rng.choice(env.available_actions()) if is_random else env.oracle()[1]
                lines.append(f"Action: {action}")
                observation, _, terminated, truncated, info = env.step(action)
                ends, success = terminated or truncated, bool(info.get("success"))
                if ends or info.get("failed"):
                    break
            add(text, "\n".join(lines), not (is_random and hides_errors))
            text = observation
            if ends:
                return text, success
        return text, False

    plan = plan_of(env, task_index) if way in ("plan", "reflect") else ""
    text, success = env.reset(task_index), False
    if way == "reflect":
        text, success = attempt(text, CARELESS_ERROR, CARELESS_TURNS)
        if not success:
            add(f"{text}\n{REFLECT}", plan)
            text = f"{AGAIN}\n{env.reset(task_index)}"
    if way == "plan":
        add(f"{text}\n{PLAN}", plan)
        text = ACT
    if not success:
        _, success = attempt(text, error, max_turns)
    return {"item_id": f"babyai_{task_index}", "conversations": messages}, success


def plan_of(env: Any, task_index: int) -> str:
    """The first actions of the oracle in this task, as a text."""
    env.reset(task_index)
    actions: list[str] = []
    for _ in range(MAX_PLANNED):
        actions.append(env.oracle()[1])
        _, _, terminated, truncated, _ = env.step(actions[-1])
        if terminated or truncated:
            break
    return "Plan: " + ", ".join(actions)


def demonstrate(
    count: int,
    seed: int = 0,
    tiers: Mapping[str, Sequence[int]] = TIERS,
    seeds: Sequence[int] = TEACHER_SEEDS,
    shares: Mapping[str, float] = SHARES,
    **style: Any,
) -> tuple[list[Record], int]:
    """`count` successful episodes, and the number of turns played, including failed episodes.

    Args:
        style: further arguments of `play`.
    """
    from envs.babyai.env import BabyAI

    rng, env = random.Random(seed), BabyAI()
    demonstrations: list[Record] = []
    num_turns = 0
    while len(demonstrations) < count:
        (tier,) = rng.choices(list(tiers), [shares[tier] for tier in tiers])
        index = task_index_of(rng.choice(tiers[tier]), rng.choice(seeds))
        try:
            episode, success = play(env, index, rng, **style)
        except OracleLost:
            continue
        answers = [turn for turn in episode["conversations"] if turn["from"] == "gpt"]
        num_turns += len(answers)
        if success and any(answer["loss"] for answer in answers):
            demonstrations.append(episode)
    return demonstrations, num_turns


if __name__ == "__main__":
    for path in sys.argv[1:]:
        episodes, _ = demonstrate(1992, 1, LONG, shares=CAREFUL_SHARES, **CAREFUL)
        write_json(Path(path), episodes)
    for name, indices in lists().items():
        rows = [json.dumps({"item_id": f"babyai_{index}"}) for index in indices]
        (FOLDER / f"{name}.json").write_text("[\n" + ",\n".join(rows) + "\n]\n", encoding="utf-8")
        print(f"{FOLDER / name}.json: {len(rows)} tasks")
