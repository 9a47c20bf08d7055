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

Intervals. Tasks differ far more than samples of one task, so an interval says how the mean over
tasks could vary with other tasks. Let x_1..x_m be the tasks' shares c_i / n_i (or their pass@k').
Add an imaginary task, which is never solved for the lower end and always solved for the upper end:

    low  =  2.5 % quantile of Σ_i w_i x_i + w_0 · 0      w ~ Dirichlet(1, ..., 1): weights that
    high = 97.5 % quantile of Σ_i w_i x_i + w_0 · 1      sum to 1, all of them equally likely

(Learned-Miller and Thomas 2019, arXiv 1905.06208). If every x_i is 0 or 1, this is Clopper and
Pearson's exact interval. One more solved sample never moves an end down.

A curve over turns needs only one run. The policy never sees the horizon, and turn n depends only on
the turns before it. So an episode under max_rounds N is the first N turns of the same episode under
a longer horizon: it is solved within N turns if and only if it is solved and has at most N turns.

    >>> none_of_31 = estimate_share([0.0] * 31)
    >>> none_of_31["low"], round(none_of_31["high"], 3)
    (0.0, 0.112)

Read next: compare.py, which prints these numbers and compares two evaluations.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trajectory import LOST, Trajectory, Turn

Estimate = dict[str, Any]  # {"value", "low", "high": float or None, "items": int}

ANGLES = (np.arange(1024) + 0.5) / 1024 * math.pi / 2  # midpoints, to integrate over 0..π/2


# -------------------------------------------------------------------------------------- intervals


def estimate_share(shares: Sequence[float]) -> Estimate:
    """Mean over tasks with its 95 % interval, as explained above.

    Args:
        shares: one number in 0..1 per task.
    Returns: value, low, high, items; the first three are None if there are no tasks.
    """
    if not len(shares):
        return {"value": None, "low": None, "high": None, "items": 0}
    x = np.asarray(shares, dtype=np.float64)  # (m,)
    low, high = _quantile(0.025, [*x, 0.0]), _quantile(0.975, [*x, 1.0])
    return {"value": float(x.mean()), "low": low, "high": high, "items": len(x)}


def _quantile(probability: float, values: Sequence[float]) -> float:
    """The t at which P(Σ_i w_i values_i <= t) has this probability, by bisection."""
    x, counts = np.unique(values, return_counts=True)  # (D,) distinct values
    low, high = float(x[0]), float(x[-1])
    while high - low > 1e-9:
        t = (low + high) / 2
        low, high = (t, high) if _probability_below(t, x, counts) < probability else (low, t)
    return (low + high) / 2


def _probability_below(t: float, x: np.ndarray, counts: np.ndarray) -> float:
    """P(Σ_i w_i x_i <= t), where x_i occurs counts_i times.

    The weights are w_i = e_i / Σ e with e_i ~ Exp(1). With c_i = x_i - t this is P(Σ_i e_i c_i <=
    0), which follows from the sum's characteristic function (Gil-Pelaez 1951):

        P = 1/2 - 1/π ∫_0^∞ sin(Σ_i atan(u c_i)) / Π_i sqrt(1 + u² c_i²) du/u

    With u = tan φ / |c|, du/u is 2 dφ / sin 2φ.
    """
    c = x - t  # (D,)
    uc = np.outer(np.tan(ANGLES), c / math.sqrt(counts @ c**2))  # (U, D)
    sine = np.sin(np.arctan(uc) @ counts)  # (U,)
    product = np.exp(-np.log1p(uc**2) @ counts / 2)  # (U,) 1 / Π
    return 0.5 - float(np.mean(sine * product / np.sin(2 * ANGLES)))


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
            turns, num_acts = list[Turn](), 0
            for turn in t.turns:
                num_acts = 0 if turn.kind == "reflect" else num_acts + (turn.kind == "act")
                if num_acts <= horizon:  # it limits the acts of each attempt
                    turns.append(turn)
            item.successes.append(t.success and t.num_acts <= horizon)
            item.returns.append(sum(turn.reward for turn in turns))
            item.turns.append(len(turns))
    return items


def _is_lost(trajectory: Trajectory) -> bool:
    return trajectory.stop_reason is None or trajectory.stop_reason in LOST


def _pass_estimate(items: Sequence[Item], k: int) -> Estimate:
    """pass@k over the tasks that have at least k valid samples."""
    tasks = [item.successes for item in items if len(item.successes) >= k]
    return estimate_share([pass_at_k(len(successes), sum(successes), k) for successes in tasks])


def _row(items: Sequence[Item], samples: int) -> dict[str, Any]:
    turns = [n for item in items for n in item.turns]
    return {
        "items": len(items),
        "trajectories": len(turns),
        "avg": estimate_share([item.avg for item in items]),
        "pass": _pass_estimate(items, samples),
        "return_mean": _mean([_mean(item.returns) for item in items]) if items else None,
        "turns_mean": _mean(turns) if turns else None,
    }


def _cost(trajectories: Sequence[Trajectory]) -> dict[str, float | None]:
    """What an episode took on average; a chat server does not tell the tokens."""
    masks = [mask for t in trajectories if (mask := getattr(t, "loss_mask", None))]
    attempts = [1 + sum(turn.kind == "reflect" for turn in t.turns) for t in trajectories]
    return {
        "attempts": _mean(attempts) if attempts else None,
        "turns": _mean([len(t.turns) for t in trajectories]) if attempts else None,
        "sampled_tokens": _mean(list(map(sum, masks))) if masks else None,
    }


def summarize(
    trajectories: Sequence[Trajectory],
    samples: int,
    max_rounds: Sequence[int] = (),
    step: int = 0,
) -> dict[str, Any]:
    """The content of `eval/step_*.json`.

    Args:
        trajectories: all that were played, including lost ones; their number per task can differ.
        samples: k, the number of samples requested per task.
        max_rounds: horizons of the curve over turns; the episodes were played with the longest.
        step: training step, 0 for an evaluation by evaluate.py.
    Returns:
        `overall`: a row {items, trajectories, avg, pass, return_mean, turns_mean}, in which avg
            and pass are {value, low, high, items}.
        `worlds` {environment: row}, `subtasks` {name: row}.
        `pass_curve` over k', `rounds_curve` over turns.
        `cost` {attempts, turns, sampled_tokens}: means per episode.
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
        "overall": _row(tasks, samples),
        "worlds": {name: _row(env_items, samples) for name, env_items in by_env.items()},
        "subtasks": {name: _row(by_subtask[name], samples) for name in sorted(by_subtask)},
        "pass_curve": [{"k": k} | _pass_estimate(tasks, k) for k in range(1, samples + 1)],
        "rounds_curve": [
            {"max_rounds": n} | _row(list(_items(trajectories, n).values()), samples)
            for n in sorted(max_rounds)
        ],
        "cost": _cost([t for t in trajectories if not _is_lost(t)]),
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
