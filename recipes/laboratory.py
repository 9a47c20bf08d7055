"""A laboratory for experiments in RL: a world, a teacher and a model so small that a run takes
minutes, and goals without end, so that what is held out is new.

World      13 levels of BabyAI, whose words are few, so that a small model generalizes to new mazes.
           By what the oracle needs on most of their mazes, in turns, they are of three kinds:

               near     1 to 3     go to, pick up or open something in the room
               middle   3 to 10    doors in order, put next to, a key in a box; more in some
               far      8 to 16    unlock a door with a key that lies elsewhere, or behind another

           Level seeds 0 to 39 are trained on, 40 to 54 held out, 100 to 999 the teacher's. Who
           has imitated the teacher solves 3 to 5 % of levels 22, 27 and 29 in 24 turns: groups of
           eight samples all fail there, take most turns and teach nothing. So these three are shown
           by the teacher, and neither trained on nor held out. Small rooms repeat: of the 90 near
           goals held out two begin like one that is trained on, and some like one of the teacher's.
           All arms have them alike.
Teacher    the oracle, but three moves in ten are any of the available ones. Who imitates it errs as
           often, wastes turns, and fails the more, the shorter the horizon.
Model      3M parameters from random weights, its tokenizer made of the world's words (one token
           each): 4,000 episodes of the teacher are imitated once. It comes with the project as
           recipes/starts/tiny-babyai, 6 MB, and writes nothing but the action.

    python recipes/laboratory.py --out runs/tiny-babyai         in a quarter of an hour, again
    python recipes/laboratory.py --write-ids                    the id lists in recipes/laboratory/

Read next: miniature.py, which experiments in it.
"""

import argparse
import json
import random
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from data import NAMES, Record  # noqa: E402
from envs.babyai.levels import level_and_seed, task_index_of  # noqa: E402
from recipes.common import markdown, read_json, run, write_json  # noqa: E402

FOLDER = ROOT / "recipes" / "laboratory"
PROMPT_FILE = FOLDER / "prompt.json"
START = ROOT / "recipes" / "starts" / "tiny-babyai"
TIERS = {"near": (1, 2, 4, 9, 19, 30), "middle": (8, 15, 21, 22, 26), "far": (27, 29)}
PLAYED = {"near": TIERS["near"], "middle": (8, 15, 21, 26)}  # in training and when held out
SHARES = {"near": 0.35, "middle": 0.4, "far": 0.25}  # of the teacher's episodes
SEEDS = {"train": range(40), "held_out": range(40, 55)}
TEACHER_SEEDS = range(100, 1000)
ERROR = 0.3
MAX_TURNS = 32  # of an episode that is shown
VOCABULARY = 512


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


# ------------------------------------------------------------------------------------- the teacher


def show(
    world: Any, task_index: int, rng: random.Random, error: float = ERROR, turns: int = MAX_TURNS
) -> tuple[Record, bool]:
    """One episode of the teacher as an AgentTraj conversation, and whether it was solved."""
    observation, solved = world.reset(task_index), False
    told: list[dict[str, Any]] = [
        {"from": NAMES[m["role"]], "loss": None, "value": m["content"]} for m in read_prompt()
    ]
    for _ in range(turns):
        wrong = rng.random() < error
        action = rng.choice(world.available_actions()) if wrong else world.oracle()[1]
        told.append({"from": "human", "loss": None, "value": observation})
        told.append({"from": "gpt", "loss": True, "value": f"Action: {action}"})
        observation, _, terminated, truncated, info = world.step(action)
        if terminated or truncated:
            solved = info["success"]
            break
    return {"item_id": f"babyai_{task_index}", "conversations": told}, solved


def read_prompt() -> list[dict[str, str]]:
    found: list[dict[str, str]] = read_json(PROMPT_FILE)
    return found


def demonstrate(
    count: int, seed: int = 0, kinds: Sequence[str] = tuple(TIERS)
) -> tuple[list[Record], str, int]:
    """`count` solved episodes on the teacher's own seeds, a table of all that it played, and the
    turns of all, of those too that came to nothing."""
    from envs.babyai.env import BabyAI

    rng, world = random.Random(seed), BabyAI()
    shown: list[Record] = []
    tried: Counter[str] = Counter()
    turns: dict[str, list[int]] = {tier: [] for tier in kinds}
    played = 0
    while len(shown) < count:
        (tier,) = rng.choices(kinds, [SHARES[kind] for kind in kinds])
        index = task_index_of(rng.choice(TIERS[tier]), rng.choice(TEACHER_SEEDS))
        tried[tier] += 1
        try:
            record, solved = show(world, index, rng)
        except RuntimeError:  # the oracle is lost
            continue
        took = sum(t["from"] == "gpt" for t in record["conversations"])
        played += took
        if solved:
            shown.append(record)
            turns[tier].append(took)
    rows = [
        (tier, tried[tier])
        + tuple(
            f"{100 * sum(n <= most for n in turns[tier]) / tried[tier]:.1f}" for most in BUDGETS
        )
        for tier in kinds
    ]
    return shown, "\n".join(markdown(TITLES, rows)), played


BUDGETS = (4, 8, 16, 32)
TITLES = "goals | episodes | " + " | ".join(f"solved in {n} turns, %" for n in BUDGETS)


# --------------------------------------------------------------------------------------- the start


def make_start(out: Path, count: int, kinds: Sequence[str]) -> None:
    """The teacher's episodes, a tokenizer of their words, random weights, imitation."""
    from scale.default_models import build_small

    out.mkdir(parents=True, exist_ok=True)
    records, table, _ = demonstrate(count, kinds=kinds)
    print(table, flush=True)
    write_json(out / "demonstrations.json", records)
    texts = [turn["value"] for record in records[:1000] for turn in record["conversations"]]
    build_small(out / "random", [*texts, *(f"{role}\n" for role in NAMES)], VOCABULARY)
    command = [sys.executable, "warmstart.py", "--model", str(out / "random"), "--epochs", "1"]
    command += ["--data", str(out / "demonstrations.json"), "--batch-size", "16"]
    command += ["--learning-rate", "1.5e-3", "--max-trajectory-tokens", "2400"]
    run([*command, "--out", str(out / "start")])
    shutil.rmtree(out / "random")


def write_ids() -> None:
    for name, seeds in SEEDS.items():
        rows = [json.dumps({"item_id": f"babyai_{index}"}) for index in goals(seeds)]
        (FOLDER / f"{name}.json").write_text("[\n" + ",\n".join(rows) + "\n]\n", encoding="utf-8")
        print(f"{FOLDER / name}.json: {len(rows)} tasks")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="folder to make the start in")
    parser.add_argument("--count", type=int, default=4_000, help="episodes that are imitated")
    parser.add_argument("--kinds", nargs="+", choices=TIERS, default=list(TIERS), help="of goals")
    parser.add_argument("--write-ids", action="store_true")
    options = parser.parse_args(argv)
    if options.write_ids:
        write_ids()
    elif options.out:
        make_start(options.out, options.count, options.kinds)
    else:
        parser.error("give --out or --write-ids")
    return 0


if __name__ == "__main__":
    sys.exit(main())
