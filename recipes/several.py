"""Several worlds in one run: does one policy learn two, and what does the company cost each?

Crafting (TextCraft's goals of depth 1) and mazes (the laboratory's, BabyAI), and a model of
3M parameters that has imitated a careless teacher in both (recipes/starts/tiny-several). Arms, of
which each plays as many tasks of a world as the others do:

    mixed        both in every step, 8 tasks each
    normalized   the same with --normalize-per-env: advantages whitened within each world
    craft, maze  one of them alone, 8 tasks a step

Held-out goals are crafting goals that RL does not play, every third of the training split's, and
the laboratory's mazes. The teacher has shown those too: words that nobody showed it such a small
model cannot write (a first trial held out goals that he had not shown: nothing moved).

    python recipes/several.py start                        the model, made anew: some 40 minutes
    python recipes/several.py run --arm mixed --seed 0     runs or resumes: results/several/
    python recipes/several.py report                       the table of what is there

A run may be killed at any time; the same command goes on. Read first:
runtime/mixture.py. Read next: laboratory.py, careless.py, evidence.py.
"""

import argparse
import json
import random
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from data import Record  # noqa: E402
from envs import load_tasks  # noqa: E402
from envs.babyai.env import BabyAI  # noqa: E402
from envs.textcraft.env import TextCraft  # noqa: E402
from recipes import careless, laboratory  # noqa: E402
from recipes.common import (  # noqa: E402
    RESULTS,
    Recipe,
    Result,
    markdown,
    mean_over_seeds,
    read_json,
    run,
    write_json,
)
from recipes.evidence import Reading, cell, compare, end, only, seeds_cell, start  # noqa: E402
from recipes.miniature import train_arm  # noqa: E402
from recipes.miniature_plan import read_results  # noqa: E402
from recipes.miniature_report import insert  # noqa: E402

BASE = ROOT / "recipes" / "several.json"
FOLDER = RESULTS / "several"
PAGE = ROOT / "RESULTS.md"
IDS = ROOT / "recipes" / "ids"  # beside this file: where worlds of this module have their lists
VOCABULARY = 1024
CRAFTED, MAZES = 10_000, 4_000  # episodes that are imitated
HELD_OUT = 3  # every so manieth crafting goal


class Craft(TextCraft):
    """TextCraft with the careless teacher's short prompt."""

    NAME = "craft"
    ID_PREFIXES = ("textcraft",)
    PROMPT: ClassVar = read_json(careless.PROMPT_FILE)
    LAPTOP: ClassVar = {"rounds": (3,)}


class Maze(BabyAI):
    """BabyAI with the laboratory's prompt and goals."""

    NAME = "maze"
    ID_PREFIXES = ("babyai",)
    PROMPT: ClassVar = laboratory.read_prompt()
    LAPTOP: ClassVar = {"rounds": (4,)}


CLASSES: dict[str, Any] = {"craft": Craft, "maze": Maze}
WORLDS = {name: f"recipes.several:{each.__name__}" for name, each in CLASSES.items()}
ARMS = {
    "mixed": ("--env", *WORLDS.values(), "--tasks-per-step", "16"),
    "normalized": ("--env", *WORLDS.values(), "--tasks-per-step", "16", "--normalize-per-env"),
    "craft": ("--env", WORLDS["craft"], "--tasks-per-step", "8"),
    "maze": ("--env", WORLDS["maze"], "--tasks-per-step", "8"),
}


# --------------------------------------------------------------------------------------- the start


def craft_goals() -> tuple[list[str], list[str]]:
    """(to train on, held out): ids of the training split's goals of depth 1."""
    tasks = load_tasks("textcraft", "train", subtasks=("depth 1",))
    ids = [task.task_id for task in tasks]
    return [i for n, i in enumerate(ids) if n % HELD_OUT], ids[::HELD_OUT]


def write_ids() -> None:
    IDS.mkdir(exist_ok=True)
    lists = dict(zip(("craft_train", "craft_test"), craft_goals(), strict=True))
    for name, seeds in (("maze_train", "train"), ("maze_test", "held_out")):
        lists[name] = [f"babyai_{i}" for i in laboratory.goals(laboratory.SEEDS[seeds])]
    for name, ids in lists.items():
        rows = ",\n".join(json.dumps({"item_id": each}) for each in ids)
        (IDS / f"{name}.json").write_text(f"[\n{rows}\n]\n", encoding="utf-8")
        print(f"recipes/ids/{name}.json: {len(ids)} tasks")


def demonstrate(crafted: int, mazes: int) -> tuple[list[Record], list[str]]:
    """Episodes of both teachers, mixed by chance; and texts that hold the words of all."""
    tasks = [
        t
        for side in ("train", "test")
        for t in load_tasks("textcraft", file=IDS / f"craft_{side}.json")
    ]
    crafting, _ = careless.demonstrate(tasks, crafted, careless.ERROR, seed=0)
    walking, table, _ = laboratory.demonstrate(mazes)
    print(table, flush=True)
    texts = [turn["value"] for r in (*crafting, *walking[:1000]) for turn in r["conversations"]]
    shown = [*crafting, *walking]
    random.Random(0).shuffle(shown)
    return shown, texts


def make_start(out: Path, crafted: int, mazes: int) -> None:
    """What the teachers show, a tokenizer of their words, random weights, imitation."""
    from scale.default_models import build_small

    shown, texts = demonstrate(crafted, mazes)
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "demonstrations.json", shown)
    build_small(out / "random", [*texts, "system\n", "user\n", "assistant\n"], VOCABULARY)
    command = [sys.executable, "warmstart.py", "--model", str(out / "random"), "--epochs", "1"]
    command += ["--data", str(out / "demonstrations.json"), "--batch-size", "16"]
    command += ["--learning-rate", "1.5e-3", "--max-trajectory-tokens", "2400"]
    run([*command, "--out", str(out / "start")])
    shutil.rmtree(out / "random")


# ------------------------------------------------------------------------------------------ a run


def play(options: argparse.Namespace, extra: Sequence[str]) -> None:
    """One run, or the rest of it; its result."""
    words = ["--config", str(BASE), *ARMS[options.arm], "--seed", str(options.seed), *extra]
    train_arm(options, words)


# ----------------------------------------------------------------------------------------- report


def of_world(reading: Reading, world: str) -> Reading:
    """The goals of one world alone."""
    prefix = f"{CLASSES[world].ID_PREFIXES[0]}_"
    return only(reading, lambda task_id: task_id.startswith(prefix))


def start_of(world: str, runs: Sequence[Result]) -> Reading:
    """What the start solves of a world: all arms begin with the same weights, so the mean of their
    first evaluations of a seed."""

    def read(result: Result) -> dict[str, float]:
        plays = [r for r in runs if r["seed"] == result["seed"] and r["arm"] not in alone]
        return mean_over_seeds([of_world(start, world)(r) for r in plays])

    alone = WORLDS.keys() - {world}  # arms that never see it
    return read


def report(folder: Path, page: Path = PAGE) -> str:
    """The table of what is there, and each world in company minus alone; into the page too."""
    text = table(folder)
    insert(page, "several", text)
    return text


def table(folder: Path) -> str:
    results = read_results(folder)
    runs = {
        arm: [found for (name, _), found in sorted(results.items()) if name == arm] for arm in ARMS
    }
    if not any(runs.values()):
        raise ValueError(f"{folder} is empty; run: python recipes/several.py run --arm mixed")
    rows, told = [], list[str]()
    for world in WORLDS:
        begun, ended = start_of(world, list(results.values())), of_world(end, world)
        for arm, found in runs.items():
            if found and (arm not in WORLDS or arm == world):
                rows.append((world, *row_of(arm, found, begun, ended)))
        for arm in ("mixed", "normalized"):
            if runs[arm] and runs[world]:
                points = compare(runs[arm], runs[world], ended, ended)
                told += ["", f"{world}, {arm} minus alone: {points} points."]
        if runs["mixed"] and runs["normalized"]:
            points = compare(runs["normalized"], runs["mixed"], ended, ended)
            told += ["", f"{world}, normalized minus mixed: {points} points."]
    titles = "world | arm | seeds | before, % | after, % | over seeds | difference, points"
    return "\n".join([*markdown(titles, rows), *told])


def row_of(arm: str, runs: Sequence[Result], begun: Reading, ended: Reading) -> tuple[Any, ...]:
    seeds = " ".join(str(result["seed"]) for result in runs)
    before, after = cell(runs, begun), cell(runs, ended)
    return arm, seeds, before, after, seeds_cell(runs, ended), compare(runs, runs, ended, begun)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arm", choices=ARMS, required=True)


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["start"]:
        parser = argparse.ArgumentParser(description="Make the model that the arms begin with.")
        parser.add_argument("--out", type=Path, default=Path("runs/several-start"))
        parser.add_argument("--crafted", type=int, default=CRAFTED, help="episodes of crafting")
        parser.add_argument("--mazes", type=int, default=MAZES, help="episodes in mazes")
        parser.add_argument("--write-ids", action="store_true", help="the id lists, and no model")
        options = parser.parse_args(argv[1:])
        work = partial(make_start, options.out, options.crafted, options.mazes)
        (write_ids if options.write_ids else work)()
        return 0
    return Recipe("several", __doc__, FOLDER, add_options, play, report).main(argv)


if __name__ == "__main__":
    sys.exit(main())
