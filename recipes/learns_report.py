"""What the runs of learns.py came to: a table and a figure of the results that are there.

Seeds of an arm are pooled goal by goal: a goal's value is its mean over samples and seeds. Goals
are then resampled, so an interval says how the result would vary with other goals, not with other
seeds; the seeds' own figures stand beside it, under `per_seed`.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from envs import load_tasks
from recipes.common import difference, percent, plot_curves, write_json
from reporting.scoring import bootstrap

ARMS = ("rl", "sft", "shuffled")
SEEDS = (0, 1, 2)
COLORS = {"rl": "#3a8f5c", "sft": "#d9822b", "shuffled": "#8a8f98"}

Result = dict[str, Any]


def mean_over_seeds(results: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Goals that every seed has a value for -> the mean over seeds.

    >>> mean_over_seeds([{"a": 0.0, "b": 1.0}, {"a": 1.0}])
    {'a': 0.5}
    """
    if not results:
        return {}
    common = set.intersection(*(set(items) for items in results))
    return {item: sum(r[item] for r in results) / len(results) for item in sorted(common)}


def pooled_at(results: Sequence[Result], position: int) -> dict[str, float]:
    """Each goal's mean over seeds in the first (0) or last (-1) held-out evaluation."""
    return mean_over_seeds([result["held_out"][position]["items"] for result in results])


def pooled_curve(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Steps that all seeds evaluated, with the pooled mean and its interval over goals."""
    by_seed = [{e["step"]: e["items"] for e in result["held_out"]} for result in results]
    steps = sorted(set.intersection(*(set(seed) for seed in by_seed)))
    curve = []
    for step in steps:
        items = mean_over_seeds([seed[step] for seed in by_seed])
        curve.append({"step": step, **bootstrap(list(items.values()))})
    return curve


def read_results(folder: Path) -> dict[str, list[Result]]:
    """arm -> results present, by seed.

    Raises:
        ValueError: runs of different length, which must not be pooled.
    """
    by_arm: dict[str, list[Result]] = {arm: [] for arm in ARMS}
    for arm in ARMS:
        for path in sorted(folder.glob(f"{arm}-*.json")):
            by_arm[arm].append(json.loads(path.read_text(encoding="utf-8")))
    steps = {r["steps"] for results in by_arm.values() for r in results}
    if len(steps) > 1:
        raise ValueError(f"{folder} mixes runs of {sorted(steps)} steps; keep one length")
    return by_arm


def analyse(by_arm: Mapping[str, Sequence[Result]]) -> dict[str, Any]:
    """Per arm before, after, difference and curve; between arms the difference after training."""
    arms: dict[str, Any] = {}
    after: dict[str, dict[str, float]] = {}
    for arm, results in by_arm.items():
        if not results:
            continue
        before, after[arm] = pooled_at(results, 0), pooled_at(results, -1)
        arms[arm] = {
            "seeds": [result["seed"] for result in results],
            "before": bootstrap(list(before.values())),
            "after": bootstrap(list(after[arm].values())),
            "difference": difference(before, after[arm]),
            "per_seed": {
                str(r["seed"]): [r["held_out"][i]["avg"]["value"] for i in (0, -1)] for r in results
            },
            "curve": pooled_curve(results),
            "test": analyse_test([result for result in results if result["test"]]),
        }
    against = {
        arm: difference(after[arm], after["rl"]) for arm in after if arm != "rl" and "rl" in after
    }
    return {"arms": arms, "rl_minus": against}


def analyse_test(results: Sequence[Result]) -> dict[str, Any]:
    """The published test split, per depth and over all: before, after, paired difference."""
    if not results:
        return {}
    pooled = {
        when: mean_over_seeds([result["test"][when]["items"] for result in results])
        for when in ("before", "after")
    }
    depth_of = {task.task_id: task.subtask for task in load_tasks("textcraft", "test")}
    rows = {}
    for name in [*sorted(set(depth_of.values())), "all"]:
        before, after = (
            {i: x for i, x in pooled[when].items() if name in ("all", depth_of[i])}
            for when in ("before", "after")
        )
        if before and after:
            rows[name] = {
                "before": bootstrap(list(before.values())),
                "after": bootstrap(list(after.values())),
                "difference": difference(before, after),
            }
    return rows


def missing_runs(by_arm: Mapping[str, Sequence[Result]]) -> list[str]:
    """Arms and seeds of the plan without a result."""
    have = {(arm, result["seed"]) for arm, results in by_arm.items() for result in results}
    return [f"{arm}-{seed}" for arm in ARMS for seed in SEEDS if (arm, seed) not in have]


def held_out_table(analysis: Mapping[str, Any]) -> list[str]:
    """Markdown: one row per arm, its seeds pooled; README shows these lines."""
    lines = ["| arm | seeds | goals | before, % | after, % | difference, points |"]
    lines.append("|---|---|---|---|---|---|")
    for arm, row in analysis["arms"].items():
        seeds = " ".join(map(str, row["seeds"]))
        lines.append(f"| {arm} | {seeds} | {change_cells(row)} |")
    return lines


def split_table(rows: Mapping[str, Any]) -> list[str]:
    """Markdown: one row per depth of the published test split; README shows these lines too."""
    lines = ["| sub-task | goals | before, % | after, % | difference, points |"]
    lines.append("|---|---|---|---|---|")
    return lines + [f"| {name} | {change_cells(each)} |" for name, each in rows.items()]


def change_cells(row: Mapping[str, Any]) -> str:
    """Goals, before, after, difference: four cells of a table."""
    return (
        f"{row['difference']['items']} | {percent(row['before'])} | {percent(row['after'])} | "
        f"{percent(row['difference'], signed=True)}"
    )


def format_report(analysis: Mapping[str, Any], missing: Sequence[str]) -> str:
    """Markdown: held-out goals per arm, between arms, and the published test split."""
    lines = ["Held-out goals:", "", *held_out_table(analysis)]
    for arm, estimate in analysis["rl_minus"].items():
        lines += ["", f"rl minus {arm}, after training: {percent(estimate, signed=True)} points."]
    for arm, row in analysis["arms"].items():
        if row["test"]:
            lines += ["", f"Published test split, arm {arm}, at most 30 turns:", ""]
            lines += split_table(row["test"])
    if missing:
        lines += ["", f"Not run: {' '.join(missing)}. The table is of the others alone."]
    return "\n".join(lines)


def plot(analysis: Mapping[str, Any], missing: Sequence[str], path: Path) -> None:
    """Held-out success over steps: the pooled curve of each arm with its interval over goals."""
    curves = [
        (f"{arm}, seeds {' '.join(map(str, row['seeds']))}", COLORS[arm], row["curve"])
        for arm, row in analysis["arms"].items()
    ]
    note = "95 % intervals over goals" + (f"; not run: {' '.join(missing)}" if missing else "")
    plot_curves(path, curves, "step", ("training step", "held-out goals solved, %"), note)


def report(folder: Path) -> str:
    """Reads `folder`, writes learns.png and report.json into it, returns the table.

    Raises:
        ValueError: there is no result, or they cannot be pooled.
    """
    by_arm = read_results(folder)
    if not any(by_arm.values()):
        raise ValueError(
            f"{folder} holds no result; run: python recipes/learns.py run --arm rl --seed 0"
        )
    missing = missing_runs(by_arm)
    analysis = analyse(by_arm)
    plot(analysis, missing, folder / "learns.png")
    write_json(folder / "report.json", analysis | {"not_run": missing})
    return format_report(analysis, missing)
