"""
Scores: from played episodes to "how often is a task solved, and how sure is that number?"

Every held-out task i = 1..m is played k times; n_i of the episodes are valid, c_i solve the task.

    avg@k   = (1/m) Σ_i c_i / n_i                            a mean over tasks, not over samples
    pass@k' = (1/m) Σ_i [1 - C(n_i - c_i, k') / C(n_i, k')]  unbiased for every k' <= n_i (Chen et
                                                             al. 2021, arXiv 2107.03374, eq. 1)

The second is the chance that k' samples drawn without replacement from the n_i hold a solved one.
"Solved" is what the environment calls solved (`info["success"]`), never a score above 0.

Every number has an interval over tasks (intervals.py).

Test-time compute in turns costs one run. The policy is never told the horizon, and what is sampled
in turn n depends on nothing after it; so an episode under max_rounds N is the first N turns of the
same episode under a longer horizon. The longest is played, then cut:

    solved within N   <=>   solved, in at most N turns

An episode that a dead server ended says nothing about the policy: it is in no number, and how many
there were is part of the result.

    >>> summary = summarize([], samples=4)
    >>> summary["overall"]["avg"]
    {'value': None, 'low': None, 'high': None, 'items': 0}

Read next: evaluate.py, which plays the episodes and prints these numbers.
"""

import json
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reporting.figures import GREEN, ORANGE, band, figure
from reporting.intervals import Estimate, bootstrap, paired_bootstrap
from trajectory import LOST, Trajectory


def pass_at_k(num_samples: int, num_solved: int, k: int) -> float:
    """
    Chance that k of the samples, drawn without replacement, hold a solved one.

    >>> pass_at_k(num_samples=4, num_solved=1, k=2)
    0.5

    Raises: ValueError unless 0 <= num_solved <= num_samples and 1 <= k <= num_samples.
    """
    if not (0 <= num_solved <= num_samples and 1 <= k <= num_samples):
        raise ValueError(
            f"pass@{k} of {num_solved} solved among {num_samples} samples is not defined; "
            "expected 0 <= solved <= samples and 1 <= k <= samples"
        )
    return 1.0 - math.comb(num_samples - num_solved, k) / math.comb(num_samples, k)


# ----------------------------------------------------------------------------------------------
# Trajectories to a summary


@dataclass(frozen=True)
class Item:
    """One task: the valid trajectories played on it, cut at some horizon."""

    subtask: str
    solved: list[bool]
    returns: list[float]
    turns: list[int]

    @property
    def avg(self) -> float:
        return sum(self.solved) / len(self.solved)


def _items(trajectories: Sequence[Trajectory], horizon: float = math.inf) -> dict[str, Item]:
    """task_id -> what happened within `horizon` turns; tasks without a valid sample are absent."""
    items: dict[str, Item] = {}
    for t in trajectories:
        if t.stop_reason is None or t.stop_reason in LOST:
            continue
        item = items.setdefault(t.task_id, Item(t.subtask, [], [], []))
        turns = [turn for n, turn in enumerate(t.turns, start=1) if n <= horizon]
        item.solved.append(t.success and len(t.turns) <= horizon)
        item.returns.append(sum(turn.reward for turn in turns))
        item.turns.append(len(turns))
    return items


def _pass_estimate(items: Sequence[Item], k: int, seed: int) -> Estimate:
    """pass@k over the tasks that have at least k valid samples."""
    enough = [item for item in items if len(item.solved) >= k]
    chances = [pass_at_k(len(item.solved), sum(item.solved), k) for item in enough]
    return bootstrap(chances, seed=seed)


def _row(items: Sequence[Item], samples: int, seed: int) -> dict[str, Any]:
    """One row of the table."""
    trajectories = sum(len(item.solved) for item in items)
    turns = sum(sum(item.turns) for item in items)
    returns = [sum(item.returns) / len(item.returns) for item in items]
    return {
        "items": len(items),
        "trajectories": trajectories,
        "avg": bootstrap([item.avg for item in items], seed=seed),
        "pass": _pass_estimate(items, samples, seed),
        "return_mean": sum(returns) / len(returns) if returns else None,
        "turns_mean": turns / trajectories if trajectories else None,
    }


def summarize(
    trajectories: Sequence[Trajectory],
    samples: int,
    max_rounds: Sequence[int] = (),
    step: int = 0,
    seed: int = 0,
) -> dict[str, Any]:
    """
    The content of `eval/step_*.json`.

    Args:
        trajectories: all that were played, lost ones included; tasks may differ in their number.
        samples: k, the samples asked for per task.
        max_rounds: horizons of the curve over turns; the longest is the one that was played.
        step: training step, 0 for an evaluation of its own.
        seed: of the bootstrap.
    Returns:
        `overall`, `worlds` {name: row} and `subtasks` {name: row}, a row being {items,
        trajectories, avg, pass, return_mean, turns_mean} with avg, pass = {value, low, high,
        items}; `pass_curve` over k' and `rounds_curve` over turns; `items` {task_id: counts};
        `stop_reasons`; `lost`.
    """
    items = _items(trajectories)
    world_of = {t.task_id: t.env for t in trajectories}
    worlds: dict[str, set[str]] = defaultdict(set)  # that have a sub-task of this name
    for task_id, item in items.items():
        worlds[item.subtask].add(world_of[task_id])
    by_subtask: dict[str, list[Item]] = defaultdict(list)
    by_world: dict[str, list[Item]] = defaultdict(list)
    for task_id, item in items.items():
        world, name = world_of[task_id], item.subtask
        by_subtask[name if len(worlds[name]) == 1 else f"{world}: {name}"].append(item)
        by_world[world].append(item)
    lost = [t for t in trajectories if t.stop_reason is None or t.stop_reason in LOST]
    return {
        "step": step,
        "samples": samples,
        "max_rounds": sorted(max_rounds),
        "overall": _row(list(items.values()), samples, seed),
        "worlds": {name: _row(own, samples, seed) for name, own in by_world.items()},
        "subtasks": {name: _row(by_subtask[name], samples, seed) for name in sorted(by_subtask)},
        "pass_curve": [
            {"k": k} | _pass_estimate(list(items.values()), k, seed) for k in range(1, samples + 1)
        ],
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
                "return_mean": sum(item.returns) / len(item.returns),
                "turns_mean": sum(item.turns) / len(item.turns),
            }
            for task_id, item in items.items()
        },
    }


# ----------------------------------------------------------------------------------------------
# A summary for people


def format_table(summary: Mapping[str, Any]) -> str:
    """One row per sub-task and one for all; intervals are 95 %."""
    k = summary["samples"]
    width = max([10, *(len(name) + 2 for name in summary["subtasks"])])
    lines = [f"{'sub-task':<{width}}{'items':>6}{f'avg@{k}':>24}{f'pass@{k}':>24}{'turns':>8}"]
    for name, row in [*summary["subtasks"].items(), ("all", summary["overall"])]:
        turns = "-" if row["turns_mean"] is None else f"{row['turns_mean']:.1f}"
        avg, passed = _aligned(row["avg"]), _aligned(row["pass"])
        lines.append(f"{name:<{width}}{row['items']:>6}{avg:>24}{passed:>24}{turns:>8}")
    if len(summary["max_rounds"]) > 1:
        lines += ["", f"{'max_rounds':<{width}}{'items':>6}{f'avg@{k}':>24}{f'pass@{k}':>24}"]
        for row in summary["rounds_curve"]:
            avg, passed = _aligned(row["avg"]), _aligned(row["pass"])
            lines.append(f"{row['max_rounds']:<{width}}{row['items']:>6}{avg:>24}{passed:>24}")
    lost = summary["lost"]
    if lost["trajectories"]:
        lines += [
            "",
            f"lost to infrastructure: {lost['trajectories']} of {lost['of']} trajectories",
        ]
        lines.append(f"  in no number above; last error: {lost['last_error']}")
    if lost["items_without_sample"]:
        lines.append("  tasks without any sample: " + " ".join(lost["items_without_sample"]))
    return "\n".join(lines)


def _aligned(estimate: Estimate) -> str:
    if estimate["value"] is None:
        return "-"
    value, low, high = (100 * estimate[key] for key in ("value", "low", "high"))
    return f"{value:5.1f} % [{low:4.1f}, {high:5.1f}]"


def percent(estimate: Mapping[str, Any], signed: bool = False) -> str:
    """
    In percent, or with a sign in points.

    >>> percent({"value": 0.541, "low": 0.48, "high": 0.601})
    '54.1 [48.0, 60.1]'
    """
    if estimate["value"] is None:
        return "-"
    sign = "+" if signed else ""
    value, low, high = (f"{100 * estimate[key]:{sign}.1f}" for key in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def plot_curves(summary: Mapping[str, Any], path: Path) -> None:
    """Success over test-time compute: over turns (left) and over samples (right)."""
    with figure(path, (10, 4), ncols=2, sharey=True) as (picture, (left, right)):
        turns = [(row["max_rounds"], row["avg"]) for row in summary["rounds_curve"]]
        band(left, turns, GREEN, f"avg@{summary['samples']} within max_rounds turns")
        band(right, [(point["k"], point) for point in summary["pass_curve"]], ORANGE, "pass@k")
        for axis in (left, right):
            axis.xaxis.get_major_locator().set_params(integer=True)
            axis.legend()
        left.set(xlabel="max_rounds (turns)", ylabel="share solved (0..1)", ylim=(-0.03, 1.03))
        right.set(xlabel="samples per task (k)")
        picture.suptitle(
            f"{summary.get('env', '')} · {summary.get('model', '')}: "
            f"{summary['overall']['items']} tasks, 95 % intervals over tasks"
        )


def compare(before_path: str | Path, after_path: str | Path) -> str:
    """
    One line: how much better the second result is, on the tasks that both have.

    Raises: ValueError when a file is no result of an evaluation, or no task is in both.
    """
    shares, results = [], []
    for path in (before_path, after_path):
        try:
            results.append(json.loads(Path(path).read_text(encoding="utf-8")))
            items = results[-1]["items"]
            shares.append({task_id: float(item["avg"]) for task_id, item in items.items()})
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            why = error.strerror if isinstance(error, OSError) else "no items with an avg each"
            raise ValueError(
                f"{path} is not a result of evaluate.py ({why}); --compare takes two eval.json"
            ) from None
        if results[-1].get("complete") is False:
            raise ValueError(
                f"{path} is of an evaluation that was stopped: what ended first is no fair sample, "
                "since solved episodes are shorter; let it end"
            )
    before, after = shares
    both = before.keys() & after.keys()
    if not both:
        raise ValueError(f"{before_path} and {after_path} have no task in common")
    pick = [{task: share[task] for task in both} for share in shares]
    d = paired_bootstrap(pick[0], pick[1])
    left_out = len(before.keys() | after.keys()) - len(both)
    means = [100 * sum(share.values()) / len(share) for share in pick]
    return (
        f"{means[0]:.1f} % -> {means[1]:.1f} %: {100 * d['value']:+.1f} points "
        f"[{100 * d['low']:+.1f}, {100 * d['high']:+.1f}], paired over {d['items']} tasks"
        + (f" ({left_out} tasks in one file only, left out)" if left_out else "")
        + _differing(*results)
    )


# Settings of an evaluation that change what its shares mean.
SETTINGS = ("temperature", "samples", "max_rounds", "max_tokens_per_turn", "max_trajectory_tokens")


def _differing(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """`; measured otherwise: max_rounds [30] and [5]`, or nothing."""
    both = before.keys() & after.keys()
    told = [
        f"{name} {before[name]} and {after[name]}"
        for name in SETTINGS
        if name in both and before[name] != after[name]
    ]
    told += [
        f"another {name} of the world"
        for name in ("prompt", "seed", "variant")
        if before.get(name) != after.get(name) and (name == "prompt" or name in both)
    ]
    return f"; measured otherwise: {', '.join(told)}" if told else ""
