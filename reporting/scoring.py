"""
Scores: how often does the agent solve a task, and how certain is that number?

Every held-out task i = 1..m is played k times; n_i of the episodes are valid, c_i solve the task.

    avg@k   = (1/m) Σ_i c_i / n_i                            a mean over tasks, not over samples
    pass@k' = (1/m) Σ_i [1 - C(n_i - c_i, k') / C(n_i, k')]  unbiased for every k' <= n_i (Chen et
                                                             al. 2021, arXiv 2107.03374, eq. 1)

pass@k' is the chance that at least one of k' samples, drawn without replacement from the n_i,
solves the task. The environment decides what is solved (`info["success"]`); a score above 0 is not
enough. Episodes lost to a dead server say nothing about the policy, so they are left out and
counted separately.

Intervals. Tasks differ far more than samples of one task, so tasks are resampled: draw m tasks with
replacement 10,000 times, and take the 2.5 and 97.5 percentiles of the means. In two cases these
percentiles would be too narrow:
- All tasks have the same value v. Let q = 0.025^(1/m). If the share of tasks with this value
  were below q, the chance of drawing m of them in a row would be below 2.5 %. So the interval is
  [q·v, q·v + 1 - q]; for v = 0 and v = 1 it is Clopper and Pearson's.
- All but one to four tasks have the value 0 (or all but one to four have 1). Let [low, high] be
  Clopper and Pearson's interval for the share of these exceptions, and d their mean distance from 0
  (or 1). The interval of the mean is [low · d, high] (or [1 - high, 1 - low · d]). Its wide end
  allows for exceptions at distance 1.

A curve over turns needs only one run. The policy never sees the horizon, and turn n depends only on
the turns before it. So an episode under max_rounds N is the first N turns of the same episode under
a longer horizon: it is solved within N turns if and only if it is solved and has at most N turns.

    >>> none_of_31 = bootstrap([0.0] * 31)
    >>> none_of_31["low"], round(none_of_31["high"], 3)
    (0.0, 0.112)

Shapes: m tasks, R resamples; weights (R, m) times values (m,) gives R means.
Read next: evaluate.py, which plays the episodes and prints these numbers.
"""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from run.files import read_text
from trajectory import LOST, Trajectory

Estimate = dict[str, Any]  # {"value", "low", "high": float or None, "items": int}

NUM_RESAMPLES = 10_000
FEW = 5  # with fewer tasks that differ from the rest, percentiles are not reliable


# -------------------------------------------------------------------------------------- intervals


def bootstrap(
    values: Sequence[float], seed: int = 0, bounds: tuple[float, float] = (0.0, 1.0)
) -> Estimate:
    """Mean over items with its 95 % interval, by the percentile bootstrap.

    Args:
        values: one number per item (task).
        bounds: smallest and largest possible value.
    Returns: value, low, high, items; the first three are None if there are no items.
    """
    if not len(values):
        return {"value": None, "low": None, "high": None, "items": 0}
    x = np.asarray(values, dtype=np.float64)  # (m,)
    if np.ptp(x) == 0:
        q = 0.025 ** (1 / len(x))
        low, high = (q * x[0] + (1 - q) * bound for bound in bounds)
    else:
        low, high = _interval_of_few(x, bounds) or np.percentile(
            _resampled_means(x, seed), (2.5, 97.5)
        )
    return {"value": float(x.mean()), "low": float(low), "high": float(high), "items": len(x)}


def _resampled_means(x: np.ndarray, seed: int) -> np.ndarray:
    """(R,). The draws depend only on m and the seed, so all tables resample the same tasks."""
    if len(x) <= 300:
        return _resamples(len(x), seed) @ x
    generator = np.random.default_rng(seed)  # in slices, to save memory
    slices = (_draw(generator, len(x), 500) for _ in range(0, NUM_RESAMPLES, 500))
    return np.concatenate([weights @ x for weights in slices])


@lru_cache(maxsize=8)
def _resamples(num_items: int, seed: int) -> np.ndarray:
    return _draw(np.random.default_rng(seed), num_items, NUM_RESAMPLES)


def _draw(generator: np.random.Generator, num_items: int, rows: int) -> np.ndarray:
    """Weight of each item in each resample, (rows, num_items): its number of draws over
    num_items."""
    return generator.multinomial(num_items, np.full(num_items, 1 / num_items), rows) / num_items


def _interval_of_few(x: np.ndarray, bounds: tuple[float, float]) -> tuple[float, float] | None:
    """The interval if all but one to four items have the value of one bound, otherwise None. It
    rarely applies to differences (-1 to 1): most of them are 0, which is not a bound."""
    for bound, opposite in (bounds, bounds[::-1]):
        outliers = x[x != bound]
        if 0 < len(outliers) < min(FEW, len(x) / 2):
            low, high = binomial_interval(len(outliers), len(x))
            ends = bound + low * (outliers.mean() - bound), bound + high * (opposite - bound)
            return min(ends), max(ends)
    return None


def binomial_interval(successes: int, trials: int) -> tuple[float, float]:
    """Clopper and Pearson's 95 % interval of a share. It contains the shares for which at least
    this many successes, and at most this many, both have a probability of at least 2.5 %.

    >>> [round(end, 3) for end in binomial_interval(1, 31)]
    [0.001, 0.167]
    """

    def share_where(count: int, probability: float) -> float:
        """The share at which `count` or fewer successes have this probability, by bisection."""
        low, high = 0.0, 1.0
        for _ in range(60):
            p = (low + high) / 2
            terms = [
                math.comb(trials, k) * p**k * (1 - p) ** (trials - k) for k in range(count + 1)
            ]
            low, high = (p, high) if sum(terms) > probability else (low, p)
        return (low + high) / 2

    return share_where(successes - 1, 0.975), share_where(successes, 0.025)


def paired_bootstrap(before: Mapping[str, float], after: Mapping[str, float]) -> Estimate:
    """Mean difference after - before over the tasks in both, with its 95 % interval.

    Pairing removes the differences between tasks. Two agents can have wide, overlapping intervals
    and still be clearly different, because one is better on nearly every task.

    Args:
        before, after: task_id -> a number in 0..1 (the share of solved samples).
    """
    tasks = sorted(before.keys() & after.keys())
    return bootstrap([after[task] - before[task] for task in tasks], bounds=(-1.0, 1.0))


# ------------------------------------------------------------------------ trajectories to a summary


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """Chance that at least one of k samples, drawn without replacement, is solved.

    >>> pass_at_k(num_samples=4, num_solved=1, k=2)
    0.5
    """
    return 1.0 - math.comb(num_samples - num_solved, k) / math.comb(num_samples, k)


@dataclass(frozen=True)
class Item:
    """One task and its valid trajectories, cut at some horizon."""

    env: str
    subtask: str
    successes: list[bool] = field(default_factory=list)
    returns: list[float] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)

    @property
    def avg(self) -> float:
        return _mean(self.successes)


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def _items(trajectories: Sequence[Trajectory], horizon: float = math.inf) -> dict[str, Item]:
    """task_id -> its results within `horizon` turns; tasks without a valid sample are absent."""
    items: dict[str, Item] = {}
    for t in trajectories:
        if not _is_lost(t):
            item = items.setdefault(t.task_id, Item(t.env, t.subtask))
            turns = [turn for n, turn in enumerate(t.turns, start=1) if n <= horizon]
            item.successes.append(t.success and len(t.turns) <= horizon)
            item.returns.append(sum(turn.reward for turn in turns))
            item.turns.append(len(turns))
    return items


def _is_lost(trajectory: Trajectory) -> bool:
    return trajectory.stop_reason is None or trajectory.stop_reason in LOST


def _pass_estimate(items: Sequence[Item], k: int, seed: int) -> Estimate:
    """pass@k over the tasks that have at least k valid samples."""
    tasks = [item.successes for item in items if len(item.successes) >= k]
    return bootstrap([pass_at_k(len(successes), sum(successes), k) for successes in tasks], seed)


def _row(items: Sequence[Item], samples: int, seed: int) -> dict[str, Any]:
    turns = [n for item in items for n in item.turns]
    return {
        "items": len(items),
        "trajectories": len(turns),
        "avg": bootstrap([item.avg for item in items], seed),
        "pass": _pass_estimate(items, samples, seed),
        "return_mean": _mean([_mean(item.returns) for item in items]) if items else None,
        "turns_mean": _mean(turns) if turns else None,
    }


def summarize(
    trajectories: Sequence[Trajectory],
    samples: int,
    max_rounds: Sequence[int] = (),
    step: int = 0,
    seed: int = 0,
) -> dict[str, Any]:
    """The content of `eval/step_*.json`.

    Args:
        trajectories: all that were played, including lost ones; their number per task can differ.
        samples: k, the number of samples requested per task.
        max_rounds: horizons of the curve over turns; the episodes were played with the longest.
        step: training step, 0 for an evaluation by evaluate.py.
        seed: seed of the bootstrap.
    Returns:
        `overall`: a row {items, trajectories, avg, pass, return_mean, turns_mean}, in which avg
            and pass are {value, low, high, items}.
        `worlds` {environment: row}, `subtasks` {name: row}.
        `pass_curve` over k', `rounds_curve` over turns.
        `items` {task_id: counts}, `stop_reasons`, `lost`.
    """
    items = _items(trajectories)
    tasks = list(items.values())
    num_envs = Counter(subtask for _, subtask in {(item.env, item.subtask) for item in tasks})
    by_env: dict[str, list[Item]] = defaultdict(list)
    by_subtask: dict[str, list[Item]] = defaultdict(list)
    for item in tasks:
        by_env[item.env].append(item)
        is_unique = num_envs[item.subtask] == 1
        by_subtask[item.subtask if is_unique else f"{item.env}: {item.subtask}"].append(item)
    lost_trajectories = [t for t in trajectories if _is_lost(t)]
    return {
        "step": step,
        "samples": samples,
        "max_rounds": sorted(max_rounds),
        "overall": _row(tasks, samples, seed),
        "worlds": {name: _row(env_items, samples, seed) for name, env_items in by_env.items()},
        "subtasks": {name: _row(by_subtask[name], samples, seed) for name in sorted(by_subtask)},
        "pass_curve": [{"k": k} | _pass_estimate(tasks, k, seed) for k in range(1, samples + 1)],
        "rounds_curve": [
            {"max_rounds": n} | _row(list(_items(trajectories, n).values()), samples, seed)
            for n in sorted(max_rounds)
        ],
        "stop_reasons": dict(sorted(Counter(str(t.stop_reason) for t in trajectories).items())),
        "lost": {
            "trajectories": len(lost_trajectories),
            "of": len(trajectories),
            "items_without_sample": sorted({t.task_id for t in lost_trajectories} - items.keys()),
            "last_error": next((t.error for t in reversed(lost_trajectories) if t.error), None),
        },
        "items": {
            task_id: {
                "subtask": item.subtask,
                "samples": len(item.successes),
                "solved": sum(item.successes),
                "avg": item.avg,
                "return_mean": _mean(item.returns),
                "turns_mean": _mean(item.turns),
            }
            for task_id, item in items.items()
        },
    }


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


# Evaluations are comparable only if these settings are equal.
SETTINGS = (
    *("temperature", "samples", "max_rounds", "max_tokens_per_turn", "max_trajectory_tokens"),
    *("seed", "variant", "prompt"),
)


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
    means = [100 * _mean([shares[task] for task in tasks]) for shares in (before, after)]
    value, interval = percent(paired_bootstrap(before, after), signed=True).split(" ", 1)
    line = f"{means[0]:.1f} % -> {means[1]:.1f} %: {value} points {interval}"
    line += f", paired over {len(tasks)} tasks"
    if num_left_out := len(before.keys() ^ after.keys()):
        line += f" ({num_left_out} left out because they are in only one file)"
    # Evaluations made during training do not record these settings.
    settings = [name for name in SETTINGS if name == "prompt" or (name in a and name in b)]
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
