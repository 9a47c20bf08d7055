"""How certain is a difference between runs?

An evaluation records the number of turns in which each sample solved its held-out goal. This gives
the share of goals solved within n turns, for every n. To compare runs at equal cost, we choose a
budget of turns or seconds, and interpolate each goal's success between the evaluations before and
after it.

A difference has two 95 % intervals:

    goals    shows the uncertainty about other goals of the same kind; a goal's value is its mean
             over samples and seeds (reporting/scoring.py)
    seeds    mean ± t(n-1) s/√n over the values of the n seeds; shows the uncertainty about other
             seeds, and is wide for n = 3, where t(2) is 4.3

Differences are paired, by goal and by seed. Read next: miniature.py, tables.py.
"""

import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from recipes.common import Result
from reporting.scoring import brackets, estimate_share, paired_bootstrap, percent

Shares = dict[str, float]  # task_id -> share of its samples solved
Reading = Callable[[Result], Shares]  # the shares of a run at its start, its end, or a budget
# The 97.5 % points of Student's t for n seeds. The last one is also used for n > 10, where it is
# slightly too wide.
T = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78, 6: 2.57, 7: 2.45, 8: 2.36, 9: 2.31, 10: 2.26}


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


def start(result: Result, within: float = math.inf) -> Shares:
    return shares(result["held_out"][0], within)


def end(result: Result, within: float = math.inf) -> Shares:
    """The last evaluation, never the best one."""
    return shares(result["held_out"][-1], within)


def only(reading: Reading, accept: Callable[[str], bool]) -> Reading:
    """A reading restricted to the goals whose task_id `accept` accepts."""
    return lambda result: {i: v for i, v in reading(result).items() if accept(i)}


def spent_at(result: Result, step: int, unit: str) -> float:
    """Turns, tokens or seconds that the run had spent at the end of a step."""
    return next((float(row[unit]) for row in result["curve"] if row["step"] == step), 0.0)


def at(budget: float, unit: str, within: float = math.inf) -> Reading:
    """The shares of a run, goal by goal, at the point where it had spent `budget`.

    Raises:
        ValueError: the run never spent that much.
    """

    def reading(result: Result) -> Shares:
        evaluations = result["held_out"]
        points = [(spent_at(result, e["step"], unit), shares(e, within)) for e in evaluations]
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


# ---------------------------------------------------------------------------------- goals and seeds


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


def gains_by_seed(before: Sequence[Shares], after: Sequence[Shares]) -> list[float]:
    """Each seed's difference of means over goals."""
    pairs = zip(before, after, strict=True)
    return [statistics.fmean(b.values()) - statistics.fmean(a.values()) for a, b in pairs]


def over_seeds(values: Sequence[float]) -> dict[str, Any]:
    """Mean of the seeds' values with Student's interval; one seed has no interval.

    >>> {name: round(v, 2) for name, v in over_seeds([0.4, 0.5, 0.6]).items()}
    {'value': 0.5, 'low': 0.25, 'high': 0.75}
    """
    mean, n = statistics.fmean(values), len(values)
    if n == 1:
        return {"value": mean, "low": None, "high": None}
    half = T[min(n, 10)] * statistics.stdev(values) / math.sqrt(n)
    return {"value": mean, "low": mean - half, "high": mean + half}


def smallest_effect(values: Sequence[float], seeds: int) -> float:
    """The difference between two arms of n seeds each at which the interval over seeds just
    excludes 0: t(n-1) · s · √(2/n). s is the standard deviation of `values`."""
    return T[min(seeds, 10)] * statistics.stdev(values) * math.sqrt(2 / seeds)


# ------------------------------------------------------------------------------------------- words


def change(before: Mapping[str, float], after: Mapping[str, float]) -> list[str]:
    """Four cells of a table: number of goals, before, after, difference."""
    gain = paired_bootstrap(before, after)
    ends = [percent(estimate_share(list(items.values()))) for items in (before, after)]
    return [str(gain["items"]), *ends, percent(gain, signed=True)]


def cell(results: Sequence[Result], reading: Reading) -> str:
    """`53.1 [48.2, 58.0]`: mean over goals and seeds, with its interval over goals."""
    return percent(estimate_share(list(pooled(results, reading).values())))


def seeds_cell(results: Sequence[Result], reading: Reading) -> str:
    return brackets(over_seeds([statistics.fmean(reading(r).values()) for r in results]))


def compare(
    runs: Sequence[Result], baseline: Sequence[Result], reading: Reading, base_reading: Reading
) -> str:
    """`+3.1 (goals [+1.0, +5.2]; seeds [-2.0, +8.2])`: the difference between two arms, or between
    two readings of one arm, paired by goal and by seed. Seeds that only one arm has are left out;
    the text then names the remaining seeds."""
    sides = [{result["seed"]: result for result in arm} for arm in (runs, baseline)]
    common = sorted(sides[0].keys() & sides[1].keys())
    if not common:
        return "- (no seed in common)"
    a = [reading(sides[0][seed]) for seed in common]
    b = [base_reading(sides[1][seed]) for seed in common]
    goals = paired_bootstrap(mean_over_seeds(b), mean_over_seeds(a))
    gains = gains_by_seed(b, a)
    text = f"goals {brackets(goals, signed=True)}; seeds {brackets(over_seeds(gains), signed=True)}"
    if len(common) < max(map(len, sides)):
        text += f"; only seed{'s' * (len(common) > 1)} {' '.join(map(str, common))}"
    return f"{100 * goals['value']:+.1f} ({text})"
