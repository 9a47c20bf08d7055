"""reward.png: a run in four panels, drawn again after every step.

    return and success of the training trajectories  |  held-out success with its 95 % interval
    turns per trajectory, under the horizon          |  entropy, and KL to the reference

Light lines are single steps, heavy ones a running mean over the past (never the future).

Run it: .venv/bin/python -m reporting.plots runs/NAME    draws runs/NAME/reward.png again
Read next: reporting/metrics.py for what each number means; reporting/scoring.py for the
evaluations' own curves.
"""

import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from reporting.metrics import read_log

BLUE, ORANGE, GREEN, GREY = "#2f6fb5", "#d9822b", "#3a8f5c", "#8a8f98"


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """
    Mean of each value and up to window - 1 values before it: the curve never shows the future.

    >>> running_mean([1.0, 2.0, 6.0, 10.0], window=2)
    [1.0, 1.5, 4.0, 8.0]
    """
    return [
        math.fsum(values[max(0, i + 1 - window) : i + 1]) / min(i + 1, window)
        for i in range(len(values))
    ]


def plot(run_dir: str | Path) -> Path:
    """
    Draw `reward.png` from `metrics.jsonl`, `eval/step_*.json` and `config.json`.

    Written under another name and renamed: a viewer never sees half a file.
    Returns: the path of the image. Raises FileNotFoundError when the run has no `metrics.jsonl`.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    run_dir = Path(run_dir)
    rows = read_log(run_dir / "metrics.jsonl")
    style: Any = {
        "font.size": 9.5,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "grid.color": "#e6e8eb",
        "axes.axisbelow": True,
        "axes.titlelocation": "left",
        "axes.titleweight": "bold",
        "legend.frameon": False,
    }
    with plt.rc_context(style):
        figure, axes = plt.subplots(2, 2, figsize=(11, 7), constrained_layout=True)
        figure.suptitle(_title(run_dir, rows), fontsize=12)
        (reward_axis, eval_axis), (turns_axis, entropy_axis) = axes

        reward_axis.set(
            title="Training: return and success", ylabel="share (0..1)", ylim=(-0.03, 1.03)
        )
        _curve(reward_axis, rows, "train/return_mean", "return", BLUE)
        # Dashed: where the only reward is 1 for success, the two curves coincide.
        _curve(reward_axis, rows, "train/success_rate", "success", GREEN, ls="--")

        eval_axis.set(title="Held-out tasks", ylabel="share solved (0..1)", ylim=(-0.03, 1.03))
        last_step = rows[-1]["step"] if rows else 0
        _held_out(eval_axis, [e for e in _evaluations(run_dir) if e["step"] <= last_step])

        turns_axis.set(title="Turns per trajectory", ylabel="turns")
        _curve(turns_axis, rows, "train/turns_mean", "mean turns", BLUE)
        steps, horizon = _series(rows, "horizon/max_rounds")
        turns_axis.step(
            steps, horizon, where="mid", color=GREY, ls="--", lw=1.4, label="horizon (max_rounds)"
        )
        turns_axis.set_ylim(bottom=0)

        entropy_axis.set(title="Entropy", ylabel="entropy (nats per token)")
        _curve(entropy_axis, rows, "policy/entropy", "entropy", BLUE)
        entropy_axis.set_ylim(bottom=0)
        kl_axis = None
        if _series(rows, "policy/kl")[0]:  # only runs with a KL term have one
            entropy_axis.set_title("Entropy and KL to the reference")
            kl_axis = entropy_axis.twinx()
            kl_axis.spines["right"].set_visible(True)
            kl_axis.grid(False)
            kl_axis.set_ylabel("KL (nats per token)", color=ORANGE)
            kl_axis.tick_params(axis="y", colors=ORANGE)
            _curve(kl_axis, rows, "policy/kl", "KL", ORANGE)

        for axis in axes.flat:
            axis.set_xlabel("training step")
            axis.xaxis.get_major_locator().set_params(integer=True)
            lines, labels = axis.get_legend_handles_labels()
            if axis is entropy_axis and kl_axis is not None:
                more_lines, more_labels = kl_axis.get_legend_handles_labels()
                lines, labels = lines + more_lines, labels + more_labels
            if labels:
                axis.legend(lines, labels, loc="best")
            else:
                axis.annotate("nothing logged yet", (0.4, 0.5), (0.4, 0.5), "axes fraction")

        target = run_dir / "reward.png"
        aside = target.with_name(".reward.tmp.png")
        figure.savefig(aside, dpi=130)
        plt.close(figure)
    os.replace(aside, target)
    return target


def _series(rows: list[dict[str, Any]], name: str) -> tuple[list[int], list[float]]:
    """Steps and values of one metric where it has a value."""
    points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
    return [step for step, _ in points], [value for _, value in points]


def _curve(
    axis: Any, rows: list[dict[str, Any]], name: str, label: str, color: str, ls: str = "-"
) -> None:
    """The raw values, light, and their running mean over a tenth of the run (5 to 50 steps)."""
    steps, values = _series(rows, name)
    if not steps:
        return
    window = min(50, max(5, len(steps) // 10))
    axis.plot(steps, values, color=color, alpha=0.25, lw=1, ls=ls)
    marker = "o" if len(steps) == 1 else None
    mean = running_mean(values, window)
    axis.plot(steps, mean, color=color, lw=2, ls=ls, marker=marker, label=label)


def _evaluations(run_dir: Path) -> list[dict[str, Any]]:
    """The overall results of `eval/step_*.json`, by step."""
    found = (
        json.loads(path.read_text(encoding="utf-8")) for path in run_dir.glob("eval/step_*.json")
    )
    return sorted(found, key=lambda evaluation: evaluation["step"])


def _held_out(axis: Any, evaluations: list[dict[str, Any]]) -> None:
    """avg@k with its interval, and pass@k where k > 1."""
    for name, color in (("avg", GREEN), ("pass", ORANGE)):
        if name == "pass" and all(evaluation["samples"] == 1 for evaluation in evaluations):
            continue  # pass@1 is avg@1
        points = [(e["step"], e["overall"][name]) for e in evaluations]
        points = [(step, estimate) for step, estimate in points if estimate["value"] is not None]
        if not points:
            continue
        steps = [step for step, _ in points]
        middle, low, high = ([e[key] for _, e in points] for key in ("value", "low", "high"))
        label = f"{name}@{evaluations[-1]['samples']}, 95 % interval over tasks"
        axis.fill_between(steps, low, high, color=color, alpha=0.12, lw=0)
        axis.vlines(steps, low, high, color=color, lw=1.2)
        axis.plot(steps, middle, color=color, marker="o", ms=4, lw=1.8, label=label)


def _title(run_dir: Path, rows: list[dict[str, Any]]) -> str:
    """`textcraft · grpo · scaling_inter_stepwise 10 20 30 · smollm2-135m   (120 steps)`."""
    parts = [run_dir.resolve().name]
    if (run_dir / "config.json").exists():
        config = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
        config = config.get("config", config)
        rounds = " ".join(map(str, config.get("rounds") or []))
        names = [config.get(key) for key in ("env", "algorithm", "rounds_scheduler", "model")]
        names[2] = f"{names[2]} {rounds}" if names[2] and rounds else names[2]
        parts = [str(name) for name in names if name] or parts
    return " · ".join(parts) + f"   ({rows[-1]['step'] if rows else 0} steps)"


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print(
            "usage: python -m reporting.plots RUN_DIR    draws RUN_DIR/reward.png", file=sys.stderr
        )
        raise SystemExit(2)
    try:
        print(plot(sys.argv[1]))
    except (OSError, ValueError) as error:
        print(f"plots: {error}", file=sys.stderr)
        raise SystemExit(1) from None
