"""Figures: reward.png shows a run at a glance, curves.png shows an evaluation.

reward.png is redrawn after every step. For train.py its panels are:

    training return, held-out success with its 95 % interval, the stages of the horizon
    turns per trajectory  |  groups whose returns differ  |  entropy, and KL to the reference

`PANELS` lists the lower panels for the other methods. Light lines are single steps; heavy lines are
a running mean over past steps. The palette is Okabe and Ito's; colour-blind readers can tell its
colours apart. To draw several runs in the same charts, use `replay.py A B`.
"""

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from envs import env_name
from reporting.logs import read_log
from run.files import atomic_path

BLUE, ORANGE, GREEN, PURPLE = "#0072b2", "#d55e00", "#009e73", "#cc79a7"
SKY, YELLOW, BLACK, GREY = "#56b4e9", "#e69f00", "#24292f", "#8a8f98"
PALETTE = (BLUE, ORANGE, GREEN, PURPLE, SKY, YELLOW, BLACK)
STYLE: dict[str, Any] = {
    "font.size": 10,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e8eb",
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "legend.facecolor": "white",
    "legend.edgecolor": "none",
    "legend.framealpha": 0.85,  # readable even where it covers a curve
    "legend.fontsize": 9,
}
Estimate = Mapping[str, Any]  # {"value", "low", "high"}


# ---------------------------------------------------------------------------------------- drawing


@contextlib.contextmanager
def figure(path: Path, width: float, height: float) -> Iterator[Any]:
    """A figure in our style (inches), saved as `path` (PNG) when the block ends."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        picture = Figure(figsize=(width, height), layout="constrained")
        yield picture
        with atomic_path(path) as new:
            picture.savefig(new, dpi=130)


def curve(
    axis: Any, points: Sequence[tuple[float, float]], color: str, label: str, ls: str = "-"
) -> None:
    """Draw (x, y) as a light line, and the running mean over a tenth of the points (5 to 50)."""
    if not points:
        return
    xs, ys = zip(*points, strict=True)
    window = min(50, max(5, len(ys) // 10))
    axis.plot(xs, ys, color=color, alpha=0.25, lw=1, ls=ls)
    marker = "o" if len(ys) == 1 else None
    axis.plot(xs, running_mean(ys, window), color=color, lw=2, ls=ls, marker=marker, label=label)


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """The mean of each value with up to window - 1 values before it.

    >>> running_mean([1.0, 2.0, 6.0, 10.0], window=2)
    [1.0, 1.5, 4.0, 8.0]
    """
    windows = [values[max(0, end - window) : end] for end in range(1, len(values) + 1)]
    return [math.fsum(window) / len(window) for window in windows]


def band(
    axis: Any,
    points: Sequence[tuple[float, Estimate]],
    color: str,
    label: str,
    scale: float = 1.0,
    fill: bool = True,
) -> None:
    """Draw estimates (x, estimate) with their intervals; points without a value are left out.

    Args:
        scale: factor on y; 100 for percent.
        fill: shade the intervals; turn this off where several curves overlap.
    """
    points = [(x, estimate) for x, estimate in points if estimate["value"] is not None]
    xs = [x for x, _ in points]
    middle, low, high = ([scale * e[k] for _, e in points] for k in ("value", "low", "high"))
    if fill:
        axis.fill_between(xs, low, high, color=color, alpha=0.12, lw=0)
    axis.vlines(xs, low, high, color=color, lw=1.2)
    axis.plot(xs, middle, color=color, marker="o", ms=4, lw=1.8, label=label)


def plot_evaluation(summary: Mapping[str, Any], path: Path) -> None:
    """Draw curves.png: success against the number of turns (left) and of samples (right)."""
    with figure(path, 10, 4) as picture:
        turns_axis, samples_axis = picture.subplots(ncols=2, sharey=True)
        turns = [(row["max_rounds"], row["avg"]) for row in summary["rounds_curve"]]
        passes = [(point["k"], point) for point in summary["pass_curve"]]
        band(turns_axis, turns, GREEN, f"avg@{summary['samples']} within max_rounds turns")
        band(samples_axis, passes, ORANGE, "pass@k")
        turns_axis.set(xlabel="max_rounds (turns)", ylabel="success (0..1)", ylim=(-0.03, 1.03))
        samples_axis.set(xlabel="samples per task (k)")
        for axis in (turns_axis, samples_axis):
            axis.xaxis.get_major_locator().set_params(integer=True)
            axis.legend()
        picture.suptitle(
            f"{summary.get('env', '')} · {summary.get('model', '')}: "
            f"{summary['overall']['items']} tasks, 95 % intervals over tasks"
        )


# ---------------------------------------------------------------------------------------- the data


@dataclass(frozen=True)
class RunFiles:
    """The data of a run that the figure needs."""

    path: Path
    options: dict[str, Any]
    method: str
    metrics: list[dict[str, Any]]  # rows of metrics.jsonl
    evaluations: list[dict[str, Any]]  # sorted by step
    at_other_temperatures: dict[str, list[dict[str, Any]]]  # name of their folder -> evaluations

    def series(self, name: str) -> list[tuple[int, float]]:
        """(step, value) for every step at which the metric has a value."""
        return [(row["step"], row[name]) for row in self.metrics if row.get(name) is not None]

    def envs(self) -> list[str]:
        """Names of the environments if the run plays several, otherwise an empty list."""
        prefix = "train/return_mean/"
        names = {name for row in self.metrics for name in row if name.startswith(prefix)}
        return sorted(name.removeprefix(prefix) for name in names)

    def held_out_in(self, env: str) -> list[tuple[int, Estimate]]:
        """(step, avg) of every evaluation, in one of several environments."""
        return [
            (e["step"], row["avg"])
            for e in self.evaluations
            for name, row in e["worlds"].items()
            if env == env_name(name)
        ]


def read_run(run_dir: str | Path) -> RunFiles:
    """Raises: FileNotFoundError if there is no metrics.jsonl, LogError or
    ValueError if a file is broken."""
    path = Path(run_dir)
    config = path / "config.json"
    saved = json.loads(config.read_text(encoding="utf-8")) if config.exists() else {}
    metrics = read_log(path / "metrics.jsonl")

    def read_evaluations(folder: Path) -> list[dict[str, Any]]:
        evaluations = [json.loads(f.read_text("utf-8")) for f in folder.glob("step_*.json")]
        return sorted(evaluations, key=lambda e: e["step"])

    options, method = saved.get("config", {}), saved.get("method", "rl")
    others = {f.name: read_evaluations(f) for f in sorted(path.glob("eval/temperature_*"))}
    evaluations = read_evaluations(path / "eval")
    return RunFiles(path, options, method, metrics, evaluations, others)


# ----------------------------------------------------------------------------------------- one run


Panel = Callable[[Any, RunFiles], None]  # draws on an axis


def plot(run_dir: str | Path) -> Path:
    """Draw a run's `reward.png`; returns its path."""
    run = read_run(run_dir)
    target = run.path / "reward.png"
    with figure(target, 9, 6) as picture:
        mosaic = [["main"] * 3, ["left", "middle", "right"]]
        axes = picture.subplot_mosaic(mosaic, height_ratios=[2, 1])
        picture.suptitle(_title(run), fontsize=11)
        draw_main = _draw_envs if run.envs() else _draw_main
        axes["main"].set(ylabel="return and success (0 to 1)", ylim=(-0.03, 1.12))
        axes["main"].set_yticks([0, 0.25, 0.5, 0.75, 1])
        for axis, draw in zip(axes.values(), (draw_main, *PANELS[run.method]), strict=True):
            draw(axis, run)
            axis.set_xlabel("training step")
            axis.xaxis.get_major_locator().set_params(integer=True)
            if not axis.has_data():
                axis.text(0.5, 0.5, "no data yet", transform=axis.transAxes, ha="center")
    return target


def _title(run: RunFiles) -> str:
    """`textcraft · grpo · up to 10, 20, 30 turns · smollm2-135m   (120 steps)`."""
    o = run.options
    rounds = f"up to {', '.join(map(str, o['rounds']))} turns" if o.get("rounds") else ""
    model = Path(o.get("model") or "").name
    parts = [o.get("env"), o.get("algorithm") or run.method, rounds, model]
    last_step = run.metrics[-1]["step"] if run.metrics else 0
    return f"{' · '.join(str(part) for part in parts if part)}   ({last_step} steps)"


def _draw_main(axis: Any, run: RunFiles) -> None:
    """Draw return and success in training, and success on held-out tasks."""
    returns, successes = run.series("train/return_mean"), run.series("train/success_rate")
    curve(axis, returns, BLUE, "training: return (bold: running mean)")
    if successes != returns:  # the two are equal if the only reward is 1 for success
        curve(axis, successes, SKY, "training: success", ls="--")
    samples = run.evaluations[-1]["samples"] if run.evaluations else 1
    if samples > 1:
        # pass@k grows with k, and the first evaluation often has fewer samples.
        comparable = [e for e in run.evaluations if e["samples"] == samples]
        steps = [e["step"] for e in comparable]
        passes = [e["overall"]["pass"]["value"] for e in comparable]
        label = f"held-out tasks: pass@{samples}"
        axis.plot(steps, passes, color=PURPLE, lw=1.2, ls="--", label=label)
    if avg := [(e["step"], e["overall"]["avg"]) for e in run.evaluations]:
        band(axis, avg, ORANGE, f"held-out tasks: avg@{samples}, 95 % interval")
    for name, evaluations in run.at_other_temperatures.items():
        avg = [(e["step"], e["overall"]["avg"]) for e in evaluations]
        band(axis, avg, GREEN, f"the same at {name.replace('_', ' ')}", fill=False)
    horizon = run.series("horizon/max_rounds")
    stages = [(turns, next(group)[0]) for turns, group in groupby(horizon, key=lambda p: p[1])]
    for turns, step in stages if len(stages) > 1 else []:
        axis.axvline(step - 0.5, color=GREY, ls=":", lw=1.2)
        axis.text(step - 0.5, 1.1, f" up to {turns} turn{'s' * (turns > 1)}", va="top")
    if axis.get_legend_handles_labels()[0]:
        axis.legend(loc="best")


def _draw_envs(axis: Any, run: RunFiles) -> None:
    """Draw each of several environments: training return (dashed) and held-out success."""
    for env, color in zip(run.envs(), PALETTE, strict=False):
        curve(axis, run.series(f"train/return_mean/{env}"), color, f"{env}, training: return", "--")
        band(axis, run.held_out_in(env), color, f"{env}, held-out tasks: avg, 95 % interval")
    axis.legend(loc="best")


def _draw_turns(axis: Any, run: RunFiles) -> None:
    axis.set_title("Turns per trajectory")
    curve(axis, run.series("train/turns_mean"), BLUE, "mean")
    if horizon := run.series("horizon/max_rounds"):
        steps, turns = zip(*horizon, strict=True)
        axis.step(steps, turns, where="mid", color=GREY, ls="--", lw=1.4, label="limit")
        axis.set_ylim(0, 1.45 * max(turns))  # room for the legend above the line
        axis.legend(loc="upper right", ncols=2)


def _draw_signal(axis: Any, run: RunFiles) -> None:
    """Draw the share of groups whose returns differ; in the others all advantages are 0."""
    axis.set_title("Groups whose returns differ")
    rows = [row for row in run.metrics if row.get("train/groups")]
    shares = [
        (row["step"], 1 - row["train/groups_zero_variance"] / row["train/groups"]) for row in rows
    ]
    curve(axis, shares, GREEN, "share of groups")
    axis.set_ylim(-0.05, 1.05)


def _draw_entropy_and_kl(axis: Any, run: RunFiles) -> None:
    """Draw the entropy, and the KL with a second y axis on the right."""
    axis.set_title("Entropy (nats per token)")
    curve(axis, run.series("policy/entropy"), BLUE, "entropy")
    axis.set_ylim(bottom=0)
    if kl := run.series("policy/kl"):  # only logged by runs with a KL term
        axis.set_title("Entropy")
        axis.set_title("KL to reference", loc="right", color=ORANGE)
        axis.tick_params(axis="y", colors=BLUE)
        kl_axis = axis.twinx()
        kl_axis.spines["right"].set_visible(True)
        kl_axis.grid(False)
        kl_axis.tick_params(axis="y", colors=ORANGE)
        curve(kl_axis, kl, ORANGE, "KL")
        kl_axis.set_ylim(bottom=0)


def _panel(title: str, **names: str) -> Panel:
    """A panel that draws metrics; `names` is label -> metric."""

    def draw(axis: Any, run: RunFiles) -> None:
        axis.set_title(title)
        for (label, name), color in zip(names.items(), (BLUE, ORANGE), strict=False):
            curve(axis, run.series(name), color, label)
        if len(axis.get_legend_handles_labels()[0]) > 1:
            axis.legend(loc="best")

    return draw


_LOSS = _panel("Loss (nats per token)", **{"training": "policy/loss", "held-out": "eval/loss"})
_GRADIENT = _panel("Gradient norm", norm="policy/grad_norm")
_LOG_PROBS = {"chosen": "preference/chosen_log_prob", "rejected": "preference/rejected_log_prob"}
PANELS: dict[str, tuple[Panel, Panel, Panel]] = {
    "rl": (_draw_turns, _draw_signal, _draw_entropy_and_kl),
    "sft": (_LOSS, _draw_entropy_and_kl, _GRADIENT),
    "agentevol": (_LOSS, _draw_entropy_and_kl, _panel("Evolving set", size="data/evolving")),
    "dpo": (
        _panel("Margin (nats)", margin="preference/margin"),
        _panel("Accuracy (share of pairs)", accuracy="preference/accuracy"),
        _panel("Log-probs (nats)", **_LOG_PROBS),
    ),
}
