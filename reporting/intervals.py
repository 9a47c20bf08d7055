"""
Intervals: how sure is a mean over tasks, and a difference between two agents on the same tasks?

Tasks differ far more than samples of one task, so the unit that is resampled is the task: draw m
tasks with replacement 10,000 times, take the 2.5 and the 97.5 percentile of the means.

When all tasks agree (0 of 31 solved) no resample shows any spread, and the percentiles would claim
certainty. With q = 0.025^(1/m): if fewer than a share q of all tasks had this value v, m tasks that
all have it would turn up in less than 2.5 % of the draws. So the mean lies in [q·v, q·v + 1 - q],
which for v = 0 and v = 1 is the exact binomial interval of Clopper and Pearson.

Where all but one to four are unsolved, or all but so few solved, the percentiles still claim too
much: 1 of 31 would be at most 9.7 %, though if 16 % are, so few are seen three times in a hundred.
There the share of tasks that differ has the exact interval [low, high], and the mean lies between
low times what they differ by and high times the most that they could.

Shapes: m tasks, R resamples; weights (R, m) times values (m,) gives R means.
Read next: scoring.py, which makes such means of episodes.
"""

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

Estimate = dict[str, Any]  # {"value", "low", "high": float or None, "items": int}

NUM_RESAMPLES = 10_000
FEW = 5  # tasks that differ from all others: fewer say too little for percentiles


def _resampled_means(x: np.ndarray, num_resamples: int, seed: int) -> np.ndarray:
    """(num_resamples,); the draws depend on number and seed alone, so equal tasks are drawn in
    every table."""
    if len(x) <= 300:
        return _resamples(len(x), num_resamples, seed) @ x
    generator = np.random.default_rng(seed)  # many tasks: a slice at a time, and none is kept
    slices = [min(500, num_resamples - done) for done in range(0, num_resamples, 500)]
    return np.concatenate([_draw(generator, len(x), rows) @ x for rows in slices])


@lru_cache(maxsize=8)
def _resamples(num_items: int, num_resamples: int, seed: int) -> np.ndarray:
    return _draw(np.random.default_rng(seed), num_items, num_resamples)


def _draw(generator: np.random.Generator, num_items: int, rows: int) -> np.ndarray:
    """How often each item is drawn, over the number of items: (rows, num_items)."""
    return generator.multinomial(num_items, np.full(num_items, 1 / num_items), rows) / num_items


def bootstrap(
    values: Sequence[float],
    num_resamples: int = NUM_RESAMPLES,
    seed: int = 0,
    bounds: tuple[float, float] = (0.0, 1.0),
) -> Estimate:
    """
    Mean over items with its 95 % percentile interval.

    Args:
        values: one number per item (task).
        bounds: the range that such a number can have.
    Returns: value, low, high, items; the first three are None for no items.

    >>> none_of_31 = bootstrap([0.0] * 31)
    >>> none_of_31["low"], round(none_of_31["high"], 3)
    (0.0, 0.112)
    """
    if not len(values):
        return {"value": None, "low": None, "high": None, "items": 0}
    x = np.asarray(values, dtype=np.float64)  # (m,)
    few = _few(x, bounds)
    if np.ptp(x) == 0:
        q = 0.025 ** (1 / len(x))
        low, high = (q * x[0] + (1 - q) * bound for bound in bounds)
    elif few is not None:
        low, high = few
    else:
        low, high = np.percentile(_resampled_means(x, num_resamples, seed), (2.5, 97.5))
    return {"value": float(x.mean()), "low": float(low), "high": float(high), "items": len(x)}


def _few(x: np.ndarray, bounds: tuple[float, float]) -> tuple[float, float] | None:
    """The interval of a mean of items of which all but one to four lie at the same bound; None of
    others. Of differences, -1 to 1, none: most of them are 0, which is no bound."""
    for bound, other in (bounds, bounds[::-1]):
        away = x[x != bound]
        if 0 < len(away) < min(FEW, len(x) / 2):
            low, high = binomial_interval(len(away), len(x))
            ends = bound + low * (away.mean() - bound), bound + high * (other - bound)
            return min(ends), max(ends)
    return None


def binomial_interval(successes: int, trials: int) -> tuple[float, float]:
    """
    Clopper and Pearson's 95 % interval of a share: the shares under which so many successes, or
    more, and so many, or fewer, are no rarer than 2.5 %.

    >>> [round(end, 3) for end in binomial_interval(1, 31)]
    [0.001, 0.167]
    """

    def at_most(count: int, share: float) -> float:  # falls as the share grows
        return sum(
            math.comb(trials, k) * share**k * (1 - share) ** (trials - k) for k in range(count + 1)
        )

    def where(count: int, chance: float) -> float:
        """The share under which `count` or fewer have that chance, by halving."""
        low, high = 0.0, 1.0
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if at_most(count, middle) > chance else (low, middle)
        return (low + high) / 2

    return (
        0.0 if successes == 0 else where(successes - 1, 0.975),
        1.0 if successes == trials else where(successes, 0.025),
    )


def paired_bootstrap(
    before_by_item: Mapping[str, float],
    after_by_item: Mapping[str, float],
    n: int = NUM_RESAMPLES,
    seed: int = 0,
) -> Estimate:
    """
    Mean difference after - before over the same tasks, with its 95 % interval.

    Pairing removes what makes tasks differ: two agents can have wide, overlapping intervals and
    still differ for certain, because one is better on nearly every task.

    Args:
        before_by_item, after_by_item: task_id -> a number in 0..1 (the share of solved samples).
    Raises: ValueError if the two do not hold the same tasks.
    """
    if before_by_item.keys() != after_by_item.keys():
        only = sorted(before_by_item.keys() ^ after_by_item.keys())
        raise ValueError(
            f"{len(only)} tasks are in one of the two only, first {only[0]}; pair them"
        )
    differences = [after_by_item[task] - before_by_item[task] for task in sorted(before_by_item)]
    return bootstrap(differences, n, seed, bounds=(-1.0, 1.0))
