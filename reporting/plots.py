"""Pictures: one style for all, and reward.png, a run in four panels, drawn again after every step.

    return and success of the training trajectories  |  held-out success with its 95 % interval
    turns per trajectory, under the horizon          |  entropy, and KL to the reference

Light lines are single steps, heavy ones a running mean over the past (never the future).

Run it: .venv/bin/python -m reporting.plots runs/NAME    draws runs/NAME/reward.png again
Read next: reporting/metrics.py for what each number means; reporting/scoring.py for the
evaluations' own curves.
"""

import contextlib
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from reporting.logs import read_log
from runtime.files import aside

BLUE, ORANGE, GREEN, GREY = "#2f6fb5", "#d9822b", "#3a8f5c", "#8a8f98"
STYLE: dict[str, Any] = {
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


@contextlib.contextmanager
def figure(path: Path, size: tuple[float, float], **grid: Any) -> Iterator[tuple[Any, Any]]:
    """
    A figure in our style, to draw on; it is `path` (PNG), whole, when the block ends.

    Args:
        size: inches.
        grid: as `matplotlib.pyplot.subplots` takes them: nrows, ncols, sharey.
    Returns: the figure and its axes.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context(STYLE):
        picture, axes = plt.subplots(figsize=size, constrained_layout=True, **grid)
        try:
            yield picture, axes
            with aside(path) as new:
                picture.savefig(new, dpi=130)
        finally:
            plt.close(picture)


def band(
    axis: Any,
    points: Sequence[tuple[float, Mapping[str, Any]]],
    color: str,
    label: str,
    scale: float = 1.0,
) -> None:
    """
    A curve of estimates with their intervals; points without a value are left out.

    Args:
        points: (x, {"value", "low", "high"}).
        scale: of all y; 100 for percent.
    """
    points = [(x, estimate) for x, estimate in points if estimate["value"] is not None]
    xs = [x for x, _ in points]
    middle, low, high = ([scale * e[k] for _, e in points] for k in ("value", "low", "high"))
    axis.fill_between(xs, low, high, color=color, alpha=0.12, lw=0)
    axis.vlines(xs, low, high, color=color, lw=1.2)
    axis.plot(xs, middle, color=color, marker="o", ms=4, lw=1.8, label=label)


def plot_estimates(
    path: Path,
    curves: Sequence[tuple[str, str, Sequence[Mapping[str, Any]]]],
    x: str,
    labels: tuple[str, str],
    note: str,
) -> None:
    """
    Several curves of estimates on one axis, in percent.

    Args:
        curves: (label, color, points); a point has `value`, `low`, `high` and the field `x`.
        labels: of the two axes.
        note: above the figure.
    """
    with figure(path, (7.5, 4.5)) as (_, axis):
        for label, color, points in curves:
            band(axis, [(point[x], point) for point in points], color, label, scale=100)
        axis.set(xlabel=labels[0], ylabel=labels[1])
        axis.legend(loc="upper left")
        axis.set_title(note, fontsize=9, fontweight="normal", color="#57606a")


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

    Returns: the path of the image. Raises FileNotFoundError when the run has no `metrics.jsonl`.
    """
    run_dir = Path(run_dir)
    rows = read_log(run_dir / "metrics.jsonl")
    target = run_dir / "reward.png"
    with figure(target, (11, 7), nrows=2, ncols=2) as (picture, axes):
        picture.suptitle(_title(run_dir, rows), fontsize=12)
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
        kl_lines = _entropy_and_kl(entropy_axis, rows)
        for axis in axes.flat:
            axis.set_xlabel("training step")
            axis.xaxis.get_major_locator().set_params(integer=True)
            lines = axis.get_legend_handles_labels()[0]
            lines += kl_lines if axis is entropy_axis else []
            if lines:
                axis.legend(handles=lines, loc="best")
            else:
                axis.annotate("nothing logged yet", (0.4, 0.5), (0.4, 0.5), "axes fraction")
    return target


def _entropy_and_kl(axis: Any, rows: list[dict[str, Any]]) -> list[Any]:
    """Entropy, and the KL on an axis of its own on the right; the lines of the latter."""
    axis.set(title="Entropy", ylabel="entropy (nats per token)")
    _curve(axis, rows, "policy/entropy", "entropy", BLUE)
    axis.set_ylim(bottom=0)
    if not _series(rows, "policy/kl")[0]:  # only runs with a KL term have one
        return []
    axis.set_title("Entropy and KL to the reference")
    kl_axis = axis.twinx()
    kl_axis.spines["right"].set_visible(True)
    kl_axis.grid(False)
    kl_axis.set_ylabel("KL (nats per token)", color=ORANGE)
    kl_axis.tick_params(axis="y", colors=ORANGE)
    _curve(kl_axis, rows, "policy/kl", "KL", ORANGE)
    return kl_axis.get_legend_handles_labels()[0]


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
    samples = max([e["samples"] for e in evaluations], default=1)
    for name, color in (("avg", GREEN), ("pass", ORANGE))[: 1 if samples == 1 else 2]:
        points = [(e["step"], e["overall"][name]) for e in evaluations]
        if any(estimate["value"] is not None for _, estimate in points):
            label = f"{name}@{evaluations[-1]['samples']}, 95 % interval over tasks"
            band(axis, points, color, label)


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
