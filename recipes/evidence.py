"""How certain is a difference between runs?

An evaluation records the number of turns in which each sample solved its held-out goal. This gives
the share of goals solved within n turns, for every n. To compare runs at equal cost, we choose a
budget of turns and interpolate each goal's success between the evaluations before and after it.

Three things could have been different, so a difference of two arms has three 95 % intervals:

    goals     other goals of the same kinds. d_i is the difference for goal i, averaged over seeds:
              the paired bootstrap of reporting/compare.py
    kinds     other kinds of goals. Goals come in kinds that are alike (a level of mazes, a family
              of items), and all goals of a kind can gain or lose together. With C kinds, D_c = the
              sum of d_i - d over the goals of kind c, and m goals in all:
              d ± t(C-1) · √(C/(C-1) · Σ_c D_c²) / m
    seeds     other runs. d ± t(f) · s · √(1/n_a + 1/n_b), where n_a and n_b are the runs of the two
              arms. s is the standard deviation between runs of one arm, pooled over all arms of a
              figure with f degrees of freedom in all. Two runs cannot agree more closely than their
              evaluations, so s is at least the noise of an evaluation.

A run's gain is measured from the start that it shares with others. All evaluations of these weights
are pooled, because a run that subtracts its own single one adds its noise.

Read next: miniature.py, tables.py.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from recipes.common import Result
from reporting.compare import brackets, paired_bootstrap, percent
from reporting.scoring import estimate_share

Shares = dict[str, float]  # task_id -> share of its samples solved
Reading = Callable[[Result], Shares]  # the shares of a run at its start, its end, or a budget
KindOf = Callable[[str], str]  # task_id -> its kind


# ------------------------------------------------------------------------------------ reading a run


def shares(evaluation: Mapping[str, Any], within: float = math.inf) -> Shares:
    """The share of each goal's samples that were solved in at most `within` turns.

    >>> shares({"solved_in": {"a": [3, 0, 7, 16]}}, within=7)
    {'a': 0.5}
    """
    if within == math.inf and "items" in evaluation:
        return dict(evaluation["items"])
    return {
        task_id: sum(0 < turns <= within for turns in samples) / len(samples)
        for task_id, samples in evaluation["solved_in"].items()
    }


def evaluations(result: Result, temperature: str = "") -> list[Any]:
    """The held-out evaluations of a run, at the first temperature ("") or at another one."""
    return list(result["held_out_at"][temperature] if temperature else result["held_out"])


def start(result: Result, within: float = math.inf, temperature: str = "") -> Shares:
    return shares(evaluations(result, temperature)[0], within)


def end(result: Result, within: float = math.inf, temperature: str = "") -> Shares:
    """The last evaluation, never the best one."""
    return shares(evaluations(result, temperature)[-1], within)


def only(reading: Reading, accept: Callable[[str], bool]) -> Reading:
    """A reading restricted to the goals whose task_id `accept` accepts."""
    return lambda result: {i: v for i, v in reading(result).items() if accept(i)}


def spent_at(result: Result, step: int, unit: str) -> float:
    """Turns, tokens or seconds that the run had spent at the end of a step, 0 before step 1."""
    if step == 0:
        return 0.0
    return next(float(row[unit]) for row in result["curve"] if row["step"] == step)


def at(budget: float, unit: str, within: float = math.inf, temperature: str = "") -> Reading:
    """The shares of a run, goal by goal, at the point where it had spent `budget`. Between two
    evaluations this averages both, so it is slightly less noisy than an evaluation.

    Raises:
        ValueError: the run never spent that much.
    """

    def reading(result: Result) -> Shares:
        points = [
            (spent_at(result, e["step"], unit), shares(e, within))
            for e in evaluations(result, temperature)
        ]
        for (x0, before), (x1, after) in zip(points, points[1:], strict=False):
            if x0 <= budget <= x1:
                weight = (budget - x0) / (x1 - x0) if x1 > x0 else 0.0
                common = before.keys() & after.keys()
                return {i: (1 - weight) * before[i] + weight * after[i] for i in common}
        raise ValueError(f"{result['arm']}-{result['seed']} has not played {budget:.0f} {unit}")

    return reading


def common_budget(results: Sequence[Result], unit: str) -> float:
    """The largest budget that every run has reached at its end."""
    return min(float(result["curve"][-1][unit]) for result in results)


# -------------------------------------------------------------------------------------- three means


def mean_over_seeds(results: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The mean over seeds of each goal for which every seed has a value.

    >>> mean_over_seeds([{"a": 0.0, "b": 1.0}, {"a": 1.0}])
    {'a': 0.5}
    """
    common = set.intersection(*(set(items) for items in results))
    return {item: sum(r[item] for r in results) / len(results) for item in sorted(common)}


def pooled(results: Sequence[Result], reading: Reading) -> Shares:
    """A reading of each run, averaged over seeds goal by goal."""
    return mean_over_seeds([reading(result) for result in results])


@cache
def t_quantile(probability: float, freedom: float) -> float:
    """Quantile of Student's t, by bisection of its distribution function for t = √f · tan x:

        P(T <= t) = 1/2 + 1/2 ∫_0^x cos^(f-1) / ∫_0^(π/2) cos^(f-1)

    >>> round(t_quantile(0.975, 2), 2), round(t_quantile(0.975, 24), 2)
    (4.3, 2.06)
    """

    def integral(x: float) -> float:
        return float(np.mean(np.cos((np.arange(4000) + 0.5) / 4000 * x) ** (freedom - 1))) * x

    low, high, total = 0.0, math.pi / 2, integral(math.pi / 2)
    for _ in range(40):
        x = (low + high) / 2
        low, high = (x, high) if 0.5 + integral(x) / total / 2 < probability else (low, x)
    return math.sqrt(freedom) * math.tan(low)


def over_kinds(differences: Mapping[str, float], kind_of: KindOf) -> dict[str, Any]:
    """The mean of the goals' differences with its interval over kinds; fewer than four kinds say
    too little about others for an interval.

    >>> differences = {"a1": 0.5, "a2": 0.5, "b1": 0.0, "b2": 0.0, "c1": 0.5, "d1": 0.5}
    >>> estimate = over_kinds(differences, kind_of=lambda task_id: task_id[0])
    >>> [round(estimate[name], 2) for name in ("value", "low", "high")]
    [0.33, -0.15, 0.81]
    """
    mean = statistics.fmean(differences.values())
    sums: dict[str, float] = defaultdict(float)
    for task_id, difference in differences.items():
        sums[kind_of(task_id)] += difference - mean
    count = len(sums)
    if count < 4 or not any(sums.values()):  # nothing to estimate a spread from
        return {"value": mean, "low": None, "high": None, "kinds": count}
    error = math.sqrt(count / (count - 1) * sum(x**2 for x in sums.values())) / len(differences)
    half = t_quantile(0.975, count - 1) * error
    return {"value": mean, "low": mean - half, "high": mean + half, "kinds": count}


@dataclass(frozen=True)
class Spread:
    """How far apart runs of one arm are: a standard deviation and its degrees of freedom."""

    deviation: float
    freedom: int

    def interval(self, value: float, variance: float) -> dict[str, Any]:
        """`variance`: that of the value, in units of the squared deviation."""
        if not self.freedom or not self.deviation:
            return {"value": value, "low": None, "high": None}
        half = t_quantile(0.975, self.freedom) * self.deviation * math.sqrt(variance)
        return {"value": value, "low": value - half, "high": value + half}

    def detectable(self, seeds: int, power: float = 0.8) -> float:
        """The true difference of two arms of so many seeds each whose interval excludes 0 with
        this probability."""
        quantiles = (t_quantile(p, self.freedom) for p in (0.975, power))
        return sum(quantiles) * self.deviation * math.sqrt(2 / seeds)


def spread(arms: Sequence[Sequence[Result]], reading: Reading, samples: int) -> Spread:
    """The spread of runs within arms, pooled. `samples`: per goal and evaluation."""
    squares, freedom, noise = 0.0, 0, []
    for results in arms:
        means = [statistics.fmean(reading(result).values()) for result in results]
        squares += sum((mean - statistics.fmean(means)) ** 2 for mean in means)
        freedom += len(means) - 1
        noise.append(sampling_variance([reading(result) for result in results], samples))
    variance = squares / freedom if freedom else 0.0
    return Spread(math.sqrt(max(variance, statistics.fmean(noise))), freedom)


def sampling_variance(goals: Sequence[Shares], samples: int) -> float:
    """The variance of an evaluation's mean over goals that sampling alone causes.

    Args:
        goals: the shares of several runs of one arm; with one sample per goal, only their
            differences show the noise, and they include that of training.

    >>> round(sampling_variance([{"a": 0.5, "b": 0.5}], samples=2), 3)
    0.125
    """
    if samples == 1:
        samples, goals = len(goals), [mean_over_seeds(goals)]
        return samples * sampling_variance(goals, samples) if samples > 1 else 0.0
    sums = [sum(p * (1 - p) for p in run.values()) / len(run) ** 2 for run in goals]
    return statistics.fmean(sums) / (samples - 1)


# ------------------------------------------------------------------------------------------- words


@dataclass(frozen=True)
class Comparison:
    """The difference of two groups of runs, with its three intervals."""

    goals: dict[str, Any]
    kinds: dict[str, Any]
    seeds: dict[str, Any]

    def __str__(self) -> str:
        """`+3.1 (goals [+1.0, +5.2]; kinds [-0.5, +6.7]; seeds [-2.0, +8.2])`"""
        parts = [
            f"{name} {brackets(estimate, signed=True)}" for name, estimate in vars(self).items()
        ]
        return f"{100 * self.goals['value']:+.1f} ({'; '.join(parts)})"


def compare(
    runs: Sequence[Result],
    baseline: Sequence[Result],
    reading: Reading,
    base_reading: Reading,
    kind_of: KindOf,
    run_spread: Spread,
    is_start: bool = False,
) -> Comparison:
    """`runs` minus `baseline`.

    Args:
        is_start: the baseline is a start: evaluations of the same weights, whose mean is uncertain
            only because evaluations are; we neglect that.
    """
    after, before = pooled(runs, reading), pooled(baseline, base_reading)
    common = after.keys() & before.keys()
    differences = {i: after[i] - before[i] for i in sorted(common)}
    variance = 1 / len(runs) + (0 if is_start else 1 / len(baseline))
    return Comparison(
        paired_bootstrap(before, after),
        over_kinds(differences, kind_of),
        run_spread.interval(statistics.fmean(differences.values()), variance),
    )


def cell(results: Sequence[Result], reading: Reading) -> str:
    """`53.1 [48.2, 58.0]`: mean over goals and seeds, with its interval over goals."""
    return percent(estimate_share(list(pooled(results, reading).values())))
