"""How many turns should deep search train with, when questions take two to four?

The default model, warmed up on demonstrations of all kinds, on SearchQA's training list (one hop,
bridge, border, three hops: 2, 3, 3 and 4 turns of the oracle). Arms, at equal turns played:

    short      2 turns: a search and an answer, enough for one hop alone
    long       6 turns from the first step
    stepwise   2, then 4, then 6

Measured is exact match on the test list (100, 100, 100 and 50 of them) within 6 turns, so that an
arm that trained with less is not cut where it was; before the first step and after the last, since
an evaluation takes as long as several steps of the long arm.

    python recipes/hops.py run --arm stepwise --seed 0     runs or resumes: results/hops/
    python recipes/hops.py report                          the table of what is there

A run may be killed at any time; the same command goes on. What follows the known options is handed
on to train.py. Read first: tutorials/13_deep_search.md. Read next: miniature.py, evidence.py.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from envs import load_tasks  # noqa: E402
from recipes.common import RESULTS, Recipe, markdown  # noqa: E402
from recipes.evidence import (  # noqa: E402
    Reading,
    at,
    cell,
    common_budget,
    compare,
    only,
    seeds_cell,
    start,
)
from recipes.miniature import train_arm  # noqa: E402
from recipes.miniature_plan import read_results  # noqa: E402

FOLDER = RESULTS / "hops"
MOST = 6  # turns, of the longest arm and of every evaluation
BASE = (
    *("--env", "searchqa", "--preset", "laptop", "--model", "smollm2-135m"),
    *("--tasks", "train", "--eval-tasks", "test", "--eval-rounds", str(MOST)),
    *(
        "--eval-every",
        "1000",
        "--eval-samples",
        "1",
        "--eval-start-samples",
        "1",
        "--save-every",
        "5",
    ),
    *("--max-trajectory-tokens", "3072", "--on-collapse", "warn"),
)
STEPWISE = ("--rounds-scheduler", "scaling_inter_stepwise", "--steps-scaling-inter", "12")
# So many steps play about as many turns: 32 episodes of 2, of 3.2 or of both and what lies between.
STEPS = {"short": 45, "long": 28, "stepwise": 36}
ROUNDS: dict[str, tuple[str, ...]] = {
    "short": ("--rounds", "2"),
    "long": ("--rounds", str(MOST)),
    "stepwise": (*STEPWISE, "--rounds", "2", "4", str(MOST)),
}
# Each arm is measured at its end, and its learning rate falls until there.
ARMS = {
    arm: (*rounds, "--steps", f"{STEPS[arm]}", "--learning-rate-decay-steps", f"{STEPS[arm]}")
    for arm, rounds in ROUNDS.items()
}


def arguments_of(arm: str, seed: int, extra: Sequence[str] = ()) -> list[str]:
    """train.py's, but for --run-dir."""
    return [*BASE, *ARMS[arm], "--seed", str(seed), *extra]


def play(options: argparse.Namespace, extra: Sequence[str]) -> None:
    """One run, or the rest of it; its result."""
    train_arm(options, arguments_of(options.arm, options.seed, extra))


# ----------------------------------------------------------------------------------------- report


def of_kind(reading: Reading, kind: str, kinds: Mapping[str, str]) -> Reading:
    """The questions of one kind alone; "all": every one."""
    return only(reading, lambda task_id: kind in ("all", kinds[task_id]))


def report(folder: Path) -> str:
    """By kind, where each arm stood when all had played as many turns; stepwise against both."""
    results = read_results(folder)
    runs = {
        arm: [found for (name, _), found in sorted(results.items()) if name == arm] for arm in ARMS
    }
    every = [result for found in runs.values() for result in found]
    if not every:
        raise ValueError(f"{folder} is empty; run: python recipes/hops.py run --arm stepwise")
    kinds = {task.task_id: task.subtask for task in load_tasks("searchqa", "test")}
    names, budget = (*dict.fromkeys(kinds.values()), "all"), common_budget(every, "turns")
    spent = at(budget, "turns")
    rows: list[tuple[Any, ...]] = [
        ("start", "", *(cell(every, of_kind(start, name, kinds)) for name in names), "")
    ]
    for arm, found in runs.items():
        if found:
            seeds = " ".join(str(result["seed"]) for result in found)
            shown = [cell(found, of_kind(spent, name, kinds)) for name in names]
            rows.append((arm, seeds, *shown, seeds_cell(found, spent)))
    lines = [f"Test questions answered, %, within {MOST} turns, after {budget:,.0f} turns:", ""]
    lines += markdown(" | ".join(("arm", "seeds", *names, "all, over seeds")), rows)
    told = partial(compare, reading=spent, before=spent)
    for arm in ("short", "long"):
        if runs["stepwise"] and runs[arm]:
            points = told(runs["stepwise"], runs[arm])
            lines += ["", f"stepwise minus {arm}: {points} points."]
    return "\n".join(lines)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arm", choices=ARMS, required=True)


def main(argv: Sequence[str] | None = None) -> int:
    return Recipe("hops", __doc__, FOLDER, add_options, play, report).main(argv)


if __name__ == "__main__":
    sys.exit(main())
