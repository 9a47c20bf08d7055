"""A world's whole test list before a run and after it, which trains on a part of the kinds alone.

    textcraft    AgentGym's published split, 100 goals of all depths, with at most 30 turns
    searchqa     questions of one hop, two and three, with at most 8

So what a run forgets shows as well, and what it can do with kinds that it never played.

    evaluate_test     both evaluations, played once and kept beside the run
    analyse_test      by kind and over all: before, after, difference paired by task; seeds pooled
    split_table       its lines in RESULTS.md

Read first: learns.py or worlds.py, which ask for it.
"""

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from envs import load_tasks
from recipes.common import (
    Result,
    change,
    change_cells,
    item_shares,
    markdown,
    mean_over_seeds,
    read_json,
    read_lines,
    run,
)


class TestList(NamedTuple):
    what: str
    rounds: tuple[int, ...]  # most turns; of several each is measured, and the last is shown


TESTS = {
    "textcraft": TestList("Published test split", (6, 30)),
    "searchqa": TestList("Test questions of one hop to three", (8,)),
}


def evaluate_test_split(
    env: str, model: str, folder: Path, seed: int, samples: int
) -> dict[str, Any]:
    """evaluate.py on a world's test list; kept in `folder`, and played again only where what is
    there is of another model, checkpoint, number of samples or turns, or seed."""
    words = ["--env", env, "--split", "test", "--model", model]
    words += ["--max-rounds", *map(str, TESTS[env].rounds), "--samples", str(samples)]
    words += ["--max-tokens-per-turn", "80", "--seed", str(seed)]
    if not was_played(folder, words):
        aside = folder.with_name(f".{folder.name}")
        shutil.rmtree(aside, ignore_errors=True)
        run([sys.executable, "evaluate.py", *words, "--out", str(aside)])
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)
    summary = read_json(folder / "eval.json")
    rows = {"all": summary["overall"], **summary["subtasks"]}
    found = {
        "max_rounds": TESTS[env].rounds[-1],
        "samples": samples,
        "rows": {
            name: {key: row[key] for key in ("items", "avg", "turns_mean")}
            for name, row in rows.items()
        },
        "items": item_shares(summary),
    }
    if env == "textcraft":
        lines = read_lines(folder / "trajectories.jsonl")
        found["crafted_ingredient"] = crafted_ingredient(lines)
    return found


def was_played(folder: Path, words: Sequence[str]) -> bool:
    """Whether `folder` holds all of an evaluation with these words."""
    if not (folder / "eval.json").exists():
        return False
    command: list[str] = read_json(folder / "config.json")["command"]
    return command[1 : command.index("--out")] == list(words)


def crafted_ingredient(trajectories: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Episodes per sub-task in which something was crafted before, or without, the goal."""
    counts: dict[str, int] = {}
    for line in trajectories:
        before_goal = line["turns"][:-1] if line["success"] else line["turns"]
        crafted = any(turn["observation_text"].startswith("Crafted") for turn in before_goal)
        counts[line["subtask"]] = counts.get(line["subtask"], 0) + crafted
    return counts


def evaluate_test(env: str, seed: int, run_dir: Path, config: Any, samples: int) -> Result:
    """A world's test list before a run and after it; {} for no samples."""
    from run.checkpoint import folder_of
    from scale.distributed import make_accelerator
    from scale.precision import choose
    from warmstart import start_model

    if not samples:
        return {}
    accelerator = make_accelerator(choose(config.precision).autocast)
    start = start_model(config, accelerator)  # out of the cache: the run made it
    last = str(folder_of(run_dir, config.steps))
    before = run_dir.parent / f"test-start-{env}-{seed}"  # every arm's
    return {
        "before": evaluate_test_split(env, start, before, seed, samples),
        "after": evaluate_test_split(env, last, run_dir / "test", seed, samples),
    }


def analyse_test(env: str, results: Sequence[Result]) -> dict[str, Any]:
    """A world's test list, by kind and over all: before, after, paired difference."""
    if not results:
        return {}
    pooled = [
        mean_over_seeds([result["test"][when]["items"] for result in results])
        for when in ("before", "after")
    ]
    kind_of = {task.task_id: task.subtask for task in load_tasks(env, "test")}
    rows = {}
    for name in [*dict.fromkeys(kind_of.values()), "all"]:
        before, after = (
            {i: x for i, x in items.items() if name in ("all", kind_of[i])} for items in pooled
        )
        if before and after:
            rows[name] = change(before, after)
    return rows


def split_table(rows: Mapping[str, Any]) -> list[str]:
    """Markdown: one row per kind of a test list; RESULTS.md shows these lines too."""
    titles = "sub-task | goals | before, % | after, % | difference, points"
    return markdown(titles, ((name, *change_cells(each)) for name, each in rows.items()))
