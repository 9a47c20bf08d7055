"""
Scores: how often is a task solved, and how sure is that number?

Every held-out task i = 1..m is played k times; n_i of the episodes are valid, c_i solve the task.

    avg@k   = (1/m) Σ_i c_i / n_i                            a mean over tasks, not over samples
    pass@k' = (1/m) Σ_i [1 - C(n_i - c_i, k') / C(n_i, k')]  unbiased for every k' <= n_i (Chen et
                                                             al. 2021, arXiv 2107.03374, eq. 1)

The second is the chance that k' samples drawn without replacement from the n_i hold a solved one.
"Solved" is what the environment calls solved (`info["success"]`), never a score above 0. Episodes
that a dead server ended say nothing about the policy: they are in no number and are counted.

Intervals. Tasks differ far more than samples of one task, so tasks are resampled: draw m tasks with
replacement 10,000 times, take the 2.5 and the 97.5 percentile of the means. Two cases in which the
percentiles claim too much:
- All tasks have the same value v. With q = 0.025^(1/m): if fewer than a share q of all tasks had
  this value, m tasks that all have it would turn up in less than 2.5 % of the draws. So the mean
  lies in [q·v, q·v + 1 - q], which for v = 0 and v = 1 is Clopper and Pearson's interval.
- All but one to four tasks are unsolved (or solved). The share of tasks that differ has Clopper and
  Pearson's interval [low, high]; the mean lies between low times the difference that was seen and
  high times the largest that is possible.

Curves over turns cost one run: the policy is never told the horizon, and what is sampled in turn n
depends on nothing after it, so an episode under max_rounds N is the first N turns of the same
episode under a longer horizon: solved within N <=> solved, in at most N turns.

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

from trajectory import LOST, Trajectory

Estimate = dict[str, Any]  # {"value", "low", "high": float or None, "items": int}

NUM_RESAMPLES = 10_000
FEW = 5  # fewer tasks than this that differ from all others say too little for percentiles


# -------------------------------------------------------------------------------------- intervals


def bootstrap(
    values: Sequence[float], seed: int = 0, bounds: tuple[float, float] = (0.0, 1.0)
) -> Estimate:
    """Mean over items with its 95 % percentile interval.

    Args:
        values: one number per item (task).
        bounds: the range that such a number can have.
    Returns: value, low, high, items; the first three are None for no items.
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
    """(R,); the draws depend only on m and the seed, so equal tasks are drawn in every table."""
    if len(x) <= 300:
        return _resamples(len(x), seed) @ x
    generator = np.random.default_rng(seed)  # a slice at a time, to spare memory
    slices = (_draw(generator, len(x), 500) for _ in range(0, NUM_RESAMPLES, 500))
    return np.concatenate([weights @ x for weights in slices])


@lru_cache(maxsize=8)
def _resamples(num_items: int, seed: int) -> np.ndarray:
    return _draw(np.random.default_rng(seed), num_items, NUM_RESAMPLES)


def _draw(generator: np.random.Generator, num_items: int, rows: int) -> np.ndarray:
    """How often each item is drawn, over the number of items: (rows, num_items)."""
    return generator.multinomial(num_items, np.full(num_items, 1 / num_items), rows) / num_items


def _interval_of_few(x: np.ndarray, bounds: tuple[float, float]) -> tuple[float, float] | None:
    """The interval if all but one to four items lie at the same bound, otherwise None. It never
    applies to differences, -1 to 1: most of them are 0, which is not a bound."""
    for bound, other in (bounds, bounds[::-1]):
        away = x[x != bound]
        if 0 < len(away) < min(FEW, len(x) / 2):
            low, high = binomial_interval(len(away), len(x))
            ends = bound + low * (away.mean() - bound), bound + high * (other - bound)
            return min(ends), max(ends)
    return None


def binomial_interval(successes: int, trials: int) -> tuple[float, float]:
    """Clopper and Pearson's 95 % interval of a share: the shares for which seeing so many successes
    or more, and so many or fewer, both have a chance of at least 2.5 %.

    >>> [round(end, 3) for end in binomial_interval(1, 31)]
    [0.001, 0.167]
    """

    def share_where(count: int, chance: float) -> float:
        """The share under which `count` or fewer successes have that chance, by bisection."""
        low, high = 0.0, 1.0
        for _ in range(60):
            p = (low + high) / 2
            terms = [
                math.comb(trials, k) * p**k * (1 - p) ** (trials - k) for k in range(count + 1)
            ]
            low, high = (p, high) if sum(terms) > chance else (low, p)
        return (low + high) / 2

    return share_where(successes - 1, 0.975), share_where(successes, 0.025)


def paired_bootstrap(before: Mapping[str, float], after: Mapping[str, float]) -> Estimate:
    """Mean difference after - before over the tasks that both have, with its 95 % interval.

    Pairing removes what makes tasks differ: two agents can have wide, overlapping intervals and
    still differ for certain, because one is better on nearly every task.

    Args:
        before, after: task_id -> a number in 0..1 (the share of solved samples).
    """
    both = sorted(before.keys() & after.keys())
    return bootstrap([after[task] - before[task] for task in both], bounds=(-1.0, 1.0))


# ------------------------------------------------------------------------ trajectories to a summary


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """Chance that k of the samples, drawn without replacement, hold a solved one.

    >>> pass_at_k(num_samples=4, num_solved=1, k=2)
    0.5
    """
    return 1.0 - math.comb(num_samples - num_solved, k) / math.comb(num_samples, k)


@dataclass(frozen=True)
class Item:
    """One task: the valid trajectories played on it, cut at some horizon."""

    env: str
    subtask: str
    solved: list[bool] = field(default_factory=list)
    returns: list[float] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)

    @property
    def avg(self) -> float:
        return _mean(self.solved)


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers)


def _items(trajectories: Sequence[Trajectory], horizon: float = math.inf) -> dict[str, Item]:
    """task_id -> what happened within `horizon` turns; tasks without a valid sample are absent."""
    items: dict[str, Item] = {}
    for t in trajectories:
        if not _is_lost(t):
            item = items.setdefault(t.task_id, Item(t.env, t.subtask))
            turns = [turn for n, turn in enumerate(t.turns, start=1) if n <= horizon]
            item.solved.append(t.success and len(t.turns) <= horizon)
            item.returns.append(sum(turn.reward for turn in turns))
            item.turns.append(len(turns))
    return items


def _is_lost(trajectory: Trajectory) -> bool:
    return trajectory.stop_reason is None or trajectory.stop_reason in LOST


def _pass_estimate(items: Sequence[Item], k: int, seed: int) -> Estimate:
    """pass@k over the tasks that have at least k valid samples."""
    enough = [item for item in items if len(item.solved) >= k]
    chances = [pass_at_k(len(item.solved), sum(item.solved), k) for item in enough]
    return bootstrap(chances, seed)


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
        trajectories: all that were played, lost ones included; tasks may differ in their number.
        samples: k, the samples asked for per task.
        max_rounds: horizons of the curve over turns; the longest is the one that was played.
        step: training step, 0 for an evaluation of its own.
        seed: of the bootstrap.
    Returns:
        `overall`, `worlds` {environment: row} and `subtasks` {name: row}, a row being {items,
        trajectories, avg, pass, return_mean, turns_mean} with avg, pass = {value, low, high,
        items}; `pass_curve` over k' and `rounds_curve` over turns; `items` {task_id: counts};
        `stop_reasons`; `lost`.
    """
    items = _items(trajectories)
    every = list(items.values())
    num_envs = Counter(subtask for _, subtask in {(item.env, item.subtask) for item in every})
    by_env: dict[str, list[Item]] = defaultdict(list)
    by_subtask: dict[str, list[Item]] = defaultdict(list)
    for item in every:
        by_env[item.env].append(item)
        is_unique = num_envs[item.subtask] == 1
        by_subtask[item.subtask if is_unique else f"{item.env}: {item.subtask}"].append(item)
    lost = [t for t in trajectories if _is_lost(t)]
    return {
        "step": step,
        "samples": samples,
        "max_rounds": sorted(max_rounds),
        "overall": _row(every, samples, seed),
        "worlds": {name: _row(own, samples, seed) for name, own in by_env.items()},
        "subtasks": {name: _row(by_subtask[name], samples, seed) for name in sorted(by_subtask)},
        "pass_curve": [{"k": k} | _pass_estimate(every, k, seed) for k in range(1, samples + 1)],
        "rounds_curve": [
            {"max_rounds": n} | _row(list(_items(trajectories, n).values()), samples, seed)
            for n in sorted(max_rounds)
        ],
        "stop_reasons": dict(sorted(Counter(str(t.stop_reason) for t in trajectories).items())),
        "lost": {
            "trajectories": len(lost),
            "of": len(trajectories),
            "items_without_sample": sorted({t.task_id for t in lost} - items.keys()),
            "last_error": next((t.error for t in reversed(lost) if t.error), None),
        },
        "items": {
            task_id: {
                "subtask": item.subtask,
                "samples": len(item.solved),
                "solved": sum(item.solved),
                "avg": item.avg,
                "return_mean": _mean(item.returns),
                "turns_mean": _mean(item.turns),
            }
            for task_id, item in items.items()
        },
    }


# ---------------------------------------------------------------------------- a summary for people


def format_table(summary: Mapping[str, Any]) -> str:
    """One row per sub-task and one for all; intervals are 95 %."""
    k = summary["samples"]
    width = max([10, *(len(name) + 2 for name in summary["subtasks"])])
    head = f"{'items':>6}{f'avg@{k}':>24}{f'pass@{k}':>24}"
    lines = [f"{'sub-task':<{width}}{head}{'turns':>8}"]
    for name, row in [*summary["subtasks"].items(), ("all", summary["overall"])]:
        turns = "-" if row["turns_mean"] is None else f"{row['turns_mean']:.1f}"
        lines.append(f"{name:<{width}}{_cells(row)}{turns:>8}")
    if len(summary["max_rounds"]) > 1:
        lines += ["", f"{'max_rounds':<{width}}{head}"]
        lines += [f"{row['max_rounds']:<{width}}{_cells(row)}" for row in summary["rounds_curve"]]
    lost = summary["lost"]
    if lost["trajectories"]:
        of = f"{lost['trajectories']} of {lost['of']} trajectories"
        lines += ["", f"lost to infrastructure: {of}"]
        lines.append(f"  in no number above; last error: {lost['last_error']}")
    if lost["items_without_sample"]:
        lines.append("  tasks without any sample: " + " ".join(lost["items_without_sample"]))
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
    """In percent; signed: in points, with a sign.

    >>> percent({"value": 0.541, "low": 0.48, "high": 0.601})
    '54.1 [48.0, 60.1]'
    """
    if estimate["value"] is None:
        return "-"
    return f"{100 * estimate['value']:{'+' if signed else ''}.1f} {brackets(estimate, signed)}"


def brackets(estimate: Mapping[str, Any], signed: bool = False) -> str:
    """The interval alone, which one seed does not have."""
    if estimate["low"] is None:
        return "-"
    sign = "+" if signed else ""
    return f"[{100 * estimate['low']:{sign}.1f}, {100 * estimate['high']:{sign}.1f}]"


# Settings of an evaluation that change what its shares mean.
SETTINGS = (
    *("temperature", "samples", "max_rounds", "max_tokens_per_turn", "max_trajectory_tokens"),
    *("seed", "variant", "prompt"),
)


def compare(before_path: str | Path, after_path: str | Path) -> str:
    """One line: how much better the second result is, on the tasks that both have.

    Raises: ValueError if a file is not a result of a whole evaluation, or no task is in both.
    """
    a, b = _read_result(before_path), _read_result(after_path)
    before, after = ({task: i["avg"] for task, i in result["items"].items()} for result in (a, b))
    both = before.keys() & after.keys()
    if not both:
        raise ValueError(f"{before_path} and {after_path} have no task in common")
    means = [100 * _mean([shares[task] for task in both]) for shares in (before, after)]
    value, interval = percent(paired_bootstrap(before, after), signed=True).split(" ", 1)
    line = f"{means[0]:.1f} % -> {means[1]:.1f} %: {value} points {interval}"
    line += f", paired over {len(both)} tasks"
    if num_left_out := len(before.keys() ^ after.keys()):
        line += f" ({num_left_out} tasks in one file only, left out)"
    # A run's own evaluations do not repeat its settings.
    settings = [name for name in SETTINGS if name == "prompt" or (name in a and name in b)]
    if differing := [name for name in settings if a.get(name) != b.get(name)]:
        line += f"; measured with another {', '.join(differing)}"
    return line


def _read_result(path: str | Path) -> dict[str, Any]:
    """Raises: ValueError if the file is not a result of a whole evaluation."""
    try:
        result = json.loads(Path(path).read_text(encoding="utf-8"))
        for item in result["items"].values():
            float(item["avg"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        raise ValueError(f"{path} is not an eval.json, which --compare takes two of") from None
    if result.get("complete") is False:
        raise ValueError(
            f"{path} is of an evaluation that was stopped; its episodes are not a fair sample, "
            "since solved episodes are shorter and end first"
        )
    return dict(result)
