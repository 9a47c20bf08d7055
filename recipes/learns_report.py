"""What the runs of learns.py came to: a table and a figure of the results that are there.

Seeds of an arm are pooled goal by goal: a goal's value is its mean over samples and seeds. Goals
are then resampled, so an interval says how the result would vary with other goals, not with other
seeds; the seeds' own figures stand beside it, under `per_seed`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from recipes.common import (
    Result,
    change,
    change_cells,
    difference,
    markdown,
    of_both,
    percent,
    pooled_at,
    pooled_curve,
    require_alike,
    results_of,
    write_json,
)
from recipes.published import analyse_test, split_table
from reporting.plots import plot_estimates

ARMS = ("rl", "sft", "shuffled")
SEEDS = (0, 1, 2)
COLORS = {"rl": "#3a8f5c", "sft": "#d9822b", "shuffled": "#8a8f98"}


def read_results(folder: Path) -> dict[str, list[Result]]:
    """arm -> results present, by seed.

    Raises:
        ValueError: runs of different length, which must not be pooled.
    """
    by_arm = {arm: results_of(folder, arm) for arm in ARMS}
    steps = {r["steps"] for results in map(require_alike, by_arm.values()) for r in results}
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
            **change(before, after[arm]),
            "per_seed": {
                str(r["seed"]): [r["held_out"][i]["avg"]["value"] for i in (0, -1)] for r in results
            },
            "curve": pooled_curve(results),
            "test": analyse_test("textcraft", [result for result in results if result["test"]]),
        }
    against = {arm: paired_after(by_arm[arm], by_arm["rl"]) for arm in after if arm != "rl"}
    return {"arms": arms, "rl_minus": {arm: found for arm, found in against.items() if found}}


def paired_after(others: Sequence[Result], ours: Sequence[Result]) -> dict[str, Any]:
    """The difference after training over the seeds that both have; {}: none."""
    pairs = of_both(ours, others)
    return difference(*(pooled_at(side, -1) for side in reversed(pairs))) if pairs[0] else {}


def missing_runs(by_arm: Mapping[str, Sequence[Result]]) -> list[str]:
    """Arms and seeds of the plan without a result."""
    have = {(arm, result["seed"]) for arm, results in by_arm.items() for result in results}
    return [f"{arm}-{seed}" for arm in ARMS for seed in SEEDS if (arm, seed) not in have]


def held_out_table(analysis: Mapping[str, Any]) -> list[str]:
    """Markdown: one row per arm, its seeds pooled; RESULTS.md shows these lines."""
    return markdown(
        "arm | seeds | goals | before, % | after, % | difference, points",
        (
            (arm, " ".join(map(str, row["seeds"])), *change_cells(row))
            for arm, row in analysis["arms"].items()
        ),
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
    plot_estimates(path, curves, "step", ("training step", "held-out goals solved, %"), note)


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
