"""Evidence from runs: what share of held-out goals was solved, and how sure is a difference?

A run keeps, for every evaluation, in how many turns each sample of each held-out goal was solved.
So "solved within n turns" is known for every n, and the state of a run at a budget (of turns
played, of seconds) is found by going in a line from the evaluation before it to the one after it,
goal by goal.

Two kinds of interval, both 95 %, stand beside a figure:

    goals    goals resampled, a goal's value being its mean over samples and seeds: what other goals
             of this kind would give
    seeds    mean ± t(n-1) s/√n over the n seeds' own figures: what other seeds would give; wide
             where n is 3, as t(2) is 4.3

Differences are paired, by goal and by seed. Read next: miniature_report.py.
"""

import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from recipes.common import Result, difference, mean_over_seeds, of_both, percent  # noqa: E402
from recipes.laboratory import tier_of  # noqa: E402
from reporting.scoring import bootstrap  # noqa: E402

Shares = dict[str, float]  # task_id -> share of its samples solved
Reading = Callable[[Result], Shares]  # of a run: where it began, where it ended, ...
T = {1: 12.71, 2: 4.30, 3: 3.18, 4: 2.78, 5: 2.57, 6: 2.45, 7: 2.36, 8: 2.31, 9: 2.26}


def student(freedom: int) -> float:
    """The 97.5 % point of Student's t; from 10 degrees of freedom on by the normal one's expansion,
    which is off by 0.003 there.

    >>> student(2), round(student(10), 2), round(student(30), 2)
    (4.3, 2.23, 2.04)
    """
    return T[freedom] if freedom in T else 1.96 + 2.372 / freedom + 2.823 / freedom**2


# ------------------------------------------------------------------------------------ reading a run


def shares(evaluation: Mapping[str, Any], within: float = math.inf) -> Shares:
    """The share of each goal's samples that were solved in at most so many turns.

    >>> shares({"solved_in": {"a": [3, 0, 7, 16]}}, within=7)
    {'a': 0.5}
    """
    return {
        task_id: sum(0 < turns <= within for turns in samples) / len(samples)
        for task_id, samples in evaluation["solved_in"].items()
    }


def start(result: Result, within: float = math.inf) -> Shares:
    return shares(result["held_out"][0], within)


def end(result: Result, within: float = math.inf) -> Shares:
    return shares(result["held_out"][-1], within)


def only(reading: Reading, keeps: Callable[[str], bool]) -> Reading:
    """A reading of some goals alone."""
    return lambda result: {i: v for i, v in reading(result).items() if keeps(i)}


def spent_at(result: Result, step: int, unit: str) -> float:
    """Turns, tokens or seconds until the end of a step."""
    return next((float(row[unit]) for row in result["curve"] if row["step"] == step), 0.0)


def at(budget: float, unit: str, within: float = math.inf) -> Reading:
    """Where a run stood when it had spent so much, goal by goal; of what was solved in so many
    turns.

    Raises:
        ValueError: it was never that far.
    """

    def reading(result: Result) -> Shares:
        evaluations = result["held_out"]
        points = [(spent_at(result, e["step"], unit), shares(e, within)) for e in evaluations]
        for (x0, before), (x1, after) in zip(points, points[1:], strict=False):
            if x0 <= budget <= x1:
                part = (budget - x0) / (x1 - x0) if x1 > x0 else 0.0
                both = before.keys() & after.keys()
                return {i: (1 - part) * before[i] + part * after[i] for i in both}
        raise ValueError(f"{result['arm']}-{result['seed']} has not played {budget:.0f} {unit}")

    return reading


def common_budget(results: Sequence[Result], unit: str) -> float:
    """What every run has spent at its end."""
    return min(float(result["curve"][-1][unit]) for result in results)


# ---------------------------------------------------------------------------------- goals and seeds


def of_tier(found: Shares, tier: str | None) -> Shares:
    return {i: v for i, v in found.items() if tier is None or tier_of(i) == tier}


def over_seeds(values: Sequence[float]) -> dict[str, Any]:
    """Mean of the seeds' figures, and Student's interval.

    >>> {name: round(v, 2) for name, v in over_seeds([0.4, 0.5, 0.6]).items()}
    {'value': 0.5, 'low': 0.25, 'high': 0.75}
    >>> over_seeds([0.4])["low"] is None
    True
    """
    mean, n = statistics.fmean(values), len(values)
    if n == 1:
        return {"value": mean, "low": None, "high": None}
    half = student(n - 1) * statistics.stdev(values) / math.sqrt(n)
    return {"value": mean, "low": mean - half, "high": mean + half}


def brackets(estimate: Mapping[str, Any], signed: bool = False) -> str:
    if estimate["low"] is None:
        return "-"
    sign = "+" if signed else ""
    return f"[{100 * estimate['low']:{sign}.1f}, {100 * estimate['high']:{sign}.1f}]"


def cell(results: Sequence[Result], reading: Reading, tier: str | None = None) -> str:
    """`53.1 [48.2, 58.0]`: mean over goals and seeds, interval over goals."""
    found = [of_tier(reading(result), tier) for result in results]
    return percent(bootstrap(list(mean_over_seeds(found).values())))


def seeds_cell(results: Sequence[Result], reading: Reading) -> str:
    return brackets(over_seeds([statistics.fmean(reading(r).values()) for r in results]))


def compare(
    ours: Sequence[Result], others: Sequence[Result], reading: Reading, before: Reading
) -> str:
    """`+3.1 (goals [+1.0, +5.2]; seeds [-2.0, +8.2])`: the first minus the second, paired by goal
    and by seed; of seeds that one side lacks neither counts, and that is said."""
    ours, others, most = *of_both(ours, others), max(len(ours), len(others))
    if not ours:
        return "- (no seed in common)"
    a, b = [reading(r) for r in ours], [before(r) for r in others]
    goals = difference(mean_over_seeds(b), mean_over_seeds(a))
    means = [[statistics.fmean(found.values()) for found in side] for side in (a, b)]
    pairs = [after - earlier for after, earlier in zip(*means, strict=True)]
    told = f"goals {brackets(goals, signed=True)}; seeds {brackets(over_seeds(pairs), signed=True)}"
    if len(ours) < most:
        told += f"; of seed {' '.join(str(r['seed']) for r in ours)} alone"
    return f"{100 * goals['value']:+.1f} ({told})"


def spread(values: Sequence[float]) -> float:
    return statistics.stdev(values) if len(values) > 1 else math.nan


def smallest_effect(values: Sequence[float], seeds: int) -> float:
    """The difference of two arms, so many seeds each, whose 95 % interval, paired by seed as
    `compare` has it, just leaves 0: t(n-1) · s · √(2/n), s as these values have it."""
    return student(seeds - 1) * spread(values) * math.sqrt(2 / seeds)
