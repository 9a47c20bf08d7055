"""Print the results of an evaluation, and compare two: is the second policy better?

Read first: scoring.py.
"""

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from reporting.scoring import Estimate, estimate_share
from run.files import read_text

NUM_RESAMPLES = 10_000


# ------------------------------------------------------------------------------- a table to print


def format_table(summary: Mapping[str, Any]) -> str:
    """A row per sub-task and one for all tasks; intervals are 95 %."""
    k = summary["samples"]
    width = max([10, *(len(name) + 2 for name in summary["subtasks"])])
    head = f"{'tasks':>6}{f'avg@{k}':>24}{f'pass@{k}':>24}"
    lines = [f"{'sub-task':<{width}}{head}{'turns':>8}"]
    for name, row in [*summary["subtasks"].items(), ("all", summary["overall"])]:
        turns = "-" if row["turns_mean"] is None else f"{row['turns_mean']:.1f}"
        lines.append(f"{name:<{width}}{_cells(row)}{turns:>8}")
    if len(summary["max_rounds"]) > 1:
        lines += ["", f"{'max_rounds':<{width}}{head}"]
        lines += [f"{row['max_rounds']:<{width}}{_cells(row)}" for row in summary["rounds_curve"]]
    if (cost := summary.get("cost")) and cost["attempts"] and cost["attempts"] > 1:
        parts = [f"{name.replace('_', ' ')} {x:.1f}" for name, x in cost.items() if x is not None]
        lines += ["", f"per episode: {', '.join(parts)}"]
    lost = summary["lost"]
    if lost["trajectories"]:
        count = f"{lost['trajectories']} of {lost['of']} trajectories"
        lines += ["", f"lost to infrastructure and not counted above: {count}"]
        lines.append(f"  last error: {lost['last_error']}")
    if lost["items_without_sample"]:
        lines.append("  tasks without a valid sample: " + " ".join(lost["items_without_sample"]))
    return "\n".join(lines)


def _cells(row: Mapping[str, Any]) -> str:
    cells = [f"{row['items']:>6}"]
    for estimate in (row["avg"], row["pass"]):
        cell = "-"
        if estimate["value"] is not None:
            value, low, high = (100 * estimate[key] for key in ("value", "low", "high"))
            cell = f"{value:5.1f} % [{low:4.1f}, {high:5.1f}]"
        cells.append(f"{cell:>24}")
    return "".join(cells)


def percent(estimate: Mapping[str, Any], signed: bool = False) -> str:
    """An estimate in percent; `signed`: a difference in points, with a sign.

    >>> percent({"value": 0.541, "low": 0.48, "high": 0.601})
    '54.1 [48.0, 60.1]'
    """
    if estimate["value"] is None:
        return "-"
    return f"{100 * estimate['value']:{'+' if signed else ''}.1f} {brackets(estimate, signed)}"


def brackets(estimate: Mapping[str, Any], signed: bool = False) -> str:
    """Only the interval; "-" if there is none, as for a single seed."""
    if estimate["low"] is None:
        return "-"
    sign = "+" if signed else ""
    return f"[{100 * estimate['low']:{sign}.1f}, {100 * estimate['high']:{sign}.1f}]"


# ------------------------------------------------------------------------------ two evaluations


def paired_bootstrap(before: Mapping[str, float], after: Mapping[str, float]) -> Estimate:
    """Mean difference after - before over the tasks in both, with its 95 % interval.

    Pairing removes the differences between tasks. Two agents can have wide, overlapping intervals
    and still be clearly different, because one is better on nearly every task.

    The interval is from the 2.5 to the 97.5 percentile of the means of m tasks drawn with
    replacement, 10,000 times. It is too narrow if few tasks differ, and has no width if none does.
    But a kind of task that makes up 1 - q of all tasks, q = 0.025^(1/m), is absent from m draws
    with probability 2.5 %, and could differ by -1 or 1. So the interval contains at least
    q · mean - (1 - q) and q · mean + (1 - q).

    Args:
        before, after: task_id -> a number in 0..1 (the share of solved samples).
    """
    tasks = sorted(before.keys() & after.keys())
    if not tasks:
        return estimate_share([])
    x = np.array([after[task] - before[task] for task in tasks])  # (m,)
    mean, q = float(x.mean()), 0.025 ** (1 / len(x))
    low, high = np.percentile(_resampled_means(x), (2.5, 97.5))
    low, high = min(float(low), q * mean - (1 - q)), max(float(high), q * mean + (1 - q))
    return {"value": mean, "low": low, "high": high, "items": len(x)}


def _resampled_means(x: np.ndarray) -> np.ndarray:
    """(R,). The draws depend only on m, so all tables resample the same tasks."""
    m, generator = len(x), np.random.default_rng(0)
    means = []
    for _ in range(0, NUM_RESAMPLES, 500):  # in slices, to save memory
        weights = generator.multinomial(m, np.full(m, 1 / m), 500) / m  # (500, m)
        means.append(weights @ x)
    return np.concatenate(means)


# Evaluations are comparable only if these settings are equal.
SETTINGS = (
    *("temperature", "samples", "max_rounds", "max_tokens_per_turn", "max_trajectory_tokens"),
    *("seed", "variant"),
)
# Results that do not record these have their defaults.
OPTIONAL_SETTINGS = ("prompt", "action_format", "max_actions_per_turn", "agent", "attempts")


def compare(before_path: str | Path, after_path: str | Path) -> str:
    """One line that says how much better the second result is, on tasks that both contain.

    Raises: ValueError if a file is not the result of a complete evaluation, or the two have no
        task in common.
    """
    a, b = _read_result(before_path), _read_result(after_path)
    before, after = ({task: i["avg"] for task, i in result["items"].items()} for result in (a, b))
    tasks = before.keys() & after.keys()
    if not tasks:
        raise ValueError(f"{before_path} and {after_path} have no task in common")
    means = [100 * statistics.fmean(shares[task] for task in tasks) for shares in (before, after)]
    value, interval = percent(paired_bootstrap(before, after), signed=True).split(" ", 1)
    line = f"{means[0]:.1f} % -> {means[1]:.1f} %: {value} points {interval}"
    line += f", paired over {len(tasks)} tasks"
    if num_left_out := len(before.keys() ^ after.keys()):
        line += f" ({num_left_out} left out because they are in only one file)"
    # Evaluations made during training do not record these settings.
    settings = [*OPTIONAL_SETTINGS, *(name for name in SETTINGS if name in a and name in b)]
    if differing := [name for name in settings if a.get(name) != b.get(name)]:
        line += f"; settings that differ: {', '.join(differing)}"
    return line


def _read_result(path: str | Path) -> dict[str, Any]:
    """Raises: ValueError if the file is not the result of a complete evaluation."""
    try:
        result = json.loads(read_text(path))
        for item in result["items"].values():
            float(item["avg"])
    except (ValueError, RecursionError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{path} is not an eval.json; --compare needs two of them") from None
    if result.get("complete") is False:
        raise ValueError(
            f"{path} is from an evaluation that was stopped early; its episodes are not a fair "
            "sample, since solved episodes are shorter and end first"
        )
    return dict(result)
