"""reward.png, a run at a glance, drawn again after every step; and several runs in one picture.

    training return, held-out success with its 95 % interval, the stages of the horizon
    turns per trajectory  |  groups that teach  |  entropy, and KL to the reference

The lower row of other methods: `PANELS`. Light lines are single steps; heavy lines are a running
mean over the past, never the future. The colours are those of Okabe and Ito, which people who
cannot tell red from green can tell apart.

Several runs are laid over each other over steps and over turns played: steps of two runs are seldom
worth the same, since one may play 10 turns where the other plays 30.

Run it: python -m reporting.plots runs/NAME                      draws runs/NAME/reward.png again
        python -m reporting.plots runs/A runs/B --out ab.png     lays runs over each other
        python -m reporting.plots runs/A runs/B --over hours
Read next: reporting/metrics.py for what each number means.
"""

import argparse
import contextlib
import json
import math
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any, TypeVar

from envs import env_name
from reporting.logs import read_log
from run.files import aside

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
    "legend.framealpha": 0.85,  # readable also where it covers a curve
}
Y = TypeVar("Y")
Estimate = Mapping[str, Any]  # {"value", "low", "high"}


# ---------------------------------------------------------------------------------------- drawing


@contextlib.contextmanager
def figure(path: Path, size: tuple[float, float], **grid: Any) -> Iterator[tuple[Any, Any]]:
    """
    A figure in our style, to draw on; saved as `path` (PNG) when the block ends.

    Args:
        size: inches.
        grid: arguments of `matplotlib.pyplot.subplots`, or of `subplot_mosaic` with `mosaic`.
    Returns: the figure and its axes.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    with plt.rc_context(STYLE):
        make = plt.subplot_mosaic if "mosaic" in grid else plt.subplots
        picture, axes = make(figsize=size, layout="constrained", **grid)
        try:
            yield picture, axes
            with aside(path) as new:
                picture.savefig(new, dpi=130)
        finally:
            plt.close(picture)


def curve(
    axis: Any,
    points: Sequence[tuple[float, float]],
    color: str,
    label: str,
    ls: str = "-",
    raw: bool = True,
) -> None:
    """The running mean of (x, y) over a tenth of the points (5 to 50), and the points themselves
    as a light line if `raw`."""
    if not points:
        return
    xs, ys = zip(*points, strict=True)
    window = min(50, max(5, len(ys) // 10))
    if raw:
        axis.plot(xs, ys, color=color, alpha=0.25, lw=1, ls=ls)
    marker = "o" if len(ys) == 1 else None
    axis.plot(xs, running_mean(ys, window), color=color, lw=2, ls=ls, marker=marker, label=label)


def running_mean(values: Sequence[float], window: int) -> list[float]:
    """
    The mean of each value and up to window - 1 values before it.

    >>> running_mean([1.0, 2.0, 6.0, 10.0], window=2)
    [1.0, 1.5, 4.0, 8.0]
    """
    return [
        math.fsum(values[max(0, i + 1 - window) : i + 1]) / min(i + 1, window)
        for i in range(len(values))
    ]


def band(
    axis: Any,
    points: Sequence[tuple[float, Estimate]],
    color: str,
    label: str,
    scale: float = 1.0,
    fill: bool = True,
    shift: float = 0.0,
) -> None:
    """
    A curve of estimates with their intervals; points without a value are left out.

    Args:
        points: (x, estimate).
        scale: of y; 100 for percent.
        fill: shade between the intervals; too much for several curves in one place.
        shift: to the right, in points of the page, so that intervals at one x stand side by side.
    """
    from matplotlib.transforms import ScaledTranslation

    points = [(x, estimate) for x, estimate in points if estimate["value"] is not None]
    xs = [x for x, _ in points]
    middle, low, high = ([scale * e[k] for _, e in points] for k in ("value", "low", "high"))
    moved = axis.transData + ScaledTranslation(shift / 72, 0, axis.figure.dpi_scale_trans)
    if fill:
        axis.fill_between(xs, low, high, color=color, alpha=0.12, lw=0)
    axis.vlines(xs, low, high, color=color, lw=1.2, transform=moved)
    style = {"color": color, "marker": "o", "ms": 4, "lw": 1.8, "transform": moved}
    axis.plot(xs, middle, label=label, **style)
    axis.update_datalim([*zip(xs, low), *zip(xs, high)])  # what is shifted does not count by itself
    axis.autoscale_view()


def plot_estimates(
    path: Path,
    curves: Sequence[tuple[str, str, Sequence[Estimate]]],
    x: str,
    labels: tuple[str, str],
    note: str,
) -> None:
    """
    Several curves of estimates on one axis, in percent.

    Args:
        curves: (label, color, points); a point is an estimate with a field `x`.
        labels: of the two axes.
        note: above the figure.
    """
    with figure(path, (7.5, 4.5)) as (picture, axis):
        for label, color, points in curves:
            band(axis, [(point[x], point) for point in points], color, label, scale=100)
        axis.set(xlabel=labels[0], ylabel=labels[1])
        picture.legend(loc="outside lower center", ncols=len(curves))
        axis.set_title(note, fontsize=9, fontweight="normal", color="#57606a")


def plot_evaluation(summary: Mapping[str, Any], path: Path) -> None:
    """curves.png: success over test-time compute, over turns (left) and over samples (right)."""
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


# ---------------------------------------------------------------------------------------- the data


@dataclass(frozen=True)
class RunFiles:
    """The logs and evaluations of a run.

    Attributes:
        options: from config.json; empty if there is none.
        metrics, timings: the rows of the two logs.
        evaluations: `eval/step_*.json` in the order of steps, none after the last row.
        method: from config.json; "rl" if it does not say.
    """

    path: Path
    options: dict[str, Any]
    metrics: list[dict[str, Any]]
    timings: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    method: str = "rl"

    @property
    def last_step(self) -> int:
        return self.metrics[-1]["step"] if self.metrics else 0

    def series(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of a metric, where it has a value."""
        return [(row["step"], row[name]) for row in self.metrics if row.get(name) is not None]

    def held_out(self, name: str) -> list[tuple[int, Estimate]]:
        """(step, estimate) of the evaluations; name is avg or pass."""
        return [(e["step"], e["overall"][name]) for e in self.evaluations]

    def envs(self) -> list[str]:
        """The environments of a run that plays several, by name; otherwise none."""
        prefix = "train/return_mean/"
        names = {name for row in self.metrics for name in row if name.startswith(prefix)}
        return sorted(name.removeprefix(prefix) for name in names)

    def held_out_in(self, env: str) -> list[tuple[int, Estimate]]:
        """(step, avg) of the evaluations in one of several environments."""
        return [
            (e["step"], row["avg"])
            for e in self.evaluations
            for name, row in e.get("worlds", {}).items()
            if env in (name, env_name(name))
        ]

    def turns_played(self) -> dict[int, float]:
        """Step -> thousands of turns played in training until its end."""
        tasks = self.options.get("tasks_per_step") or self.options.get("tasks_per_iteration", 1)
        episodes = tasks * self.options.get("group_size", 1)
        return cumulative(self.metrics, "train/turns_mean", episodes / 1000)

    def hours(self) -> dict[int, float]:
        """Step -> hours from the start to its end, evaluations included."""
        return cumulative(self.timings, "time/step_s", 1 / 3600)


def cumulative(rows: Sequence[Mapping[str, Any]], name: str, scale: float) -> dict[int, float]:
    sums = accumulate(scale * (row.get(name) or 0.0) for row in rows)
    return {0: 0.0} | {row["step"]: total for row, total in zip(rows, sums, strict=True)}


def read_run(run_dir: str | Path) -> RunFiles:
    """
    The files of a run.

    Raises:
        FileNotFoundError: it has no metrics.jsonl.
        ValueError: one of the files is not a run's.
    """
    path = Path(run_dir)
    options: dict[str, Any] = {}
    method = "rl"
    if (path / "config.json").exists():
        saved = json.loads((path / "config.json").read_text(encoding="utf-8"))
        options, method = saved.get("config", saved), saved.get("method", method)
    metrics = read_log(path / "metrics.jsonl")
    timings = read_log(path / "timings.jsonl") if (path / "timings.jsonl").exists() else []
    evaluations = [json.loads(file.read_text("utf-8")) for file in path.glob("eval/step_*.json")]
    # A run that was cut back on resume may hold evaluations of steps that it will do again.
    last = metrics[-1]["step"] if metrics else 0
    evaluations = sorted((e for e in evaluations if e["step"] <= last), key=lambda e: e["step"])
    return RunFiles(path, options, metrics, timings, evaluations, method)


# ----------------------------------------------------------------------------------------- one run


Panel = Callable[[Any, RunFiles], None]  # draws on an axis


def plot(run_dir: str | Path, target: Path | None = None) -> Path:
    """
    Draw a run from `metrics.jsonl`, `eval/step_*.json` and `config.json`.

    Args:
        target: the image; None: `reward.png` of the run.
    Returns: the path of the image.
    Raises: FileNotFoundError if the run has no `metrics.jsonl`.
    """
    run = read_run(run_dir)
    target = target or run.path / "reward.png"
    mosaic = [["main"] * 3, ["left", "middle", "right"]]
    with figure(target, (9, 6), mosaic=mosaic, height_ratios=[2, 1]) as (picture, axes):
        picture.suptitle(_title(run), fontsize=11)
        draw_main = _draw_envs if run.envs() else _draw_main
        panels = PANELS.get(run.method, PANELS["rl"])
        for axis, draw in zip(axes.values(), (draw_main, *panels), strict=True):
            draw(axis, run)
            axis.set_xlabel("training step")
            axis.xaxis.get_major_locator().set_params(integer=True)
            if not axis.has_data():
                axis.text(0.5, 0.5, "nothing logged yet", transform=axis.transAxes, ha="center")
    return target


def _draw_main(axis: Any, run: RunFiles) -> None:
    """How well it does on the tasks it trains on and on held-out tasks."""
    axis.set(ylabel="share (0..1)", ylim=(-0.03, 1.12), yticks=[0, 0.25, 0.5, 0.75, 1])
    returns, successes = run.series("train/return_mean"), run.series("train/success_rate")
    curve(axis, returns, BLUE, "training: return")
    if successes != returns:  # one curve where the only reward is 1 for success
        curve(axis, successes, SKY, "training: success", ls="--")
    samples = run.evaluations[-1]["samples"] if run.evaluations else 1
    # pass@k grows with k, and the start is often measured with fewer samples.
    same = {e["step"] for e in run.evaluations if e["samples"] == samples}
    passes = [(step, e["value"]) for step, e in run.held_out("pass") if step in same]
    passes = [(step, value) for step, value in passes if value is not None]
    if passes and samples > 1:
        label = f"held-out tasks: pass@{samples}"
        axis.plot(*zip(*passes, strict=True), color=PURPLE, lw=1.2, ls="--", label=label)
    if any(e["value"] is not None for _, e in run.held_out("avg")):
        band(axis, run.held_out("avg"), ORANGE, f"held-out tasks: avg@{samples}, 95 % interval")
    horizon = run.series("horizon/max_rounds")
    stages = [(turns, next(group)[0]) for turns, group in groupby(horizon, key=lambda p: p[1])]
    for turns, step in stages if len(stages) > 1 else []:
        axis.axvline(step - 0.5, color=GREY, ls=":", lw=1.2)
        axis.annotate(
            f"at most {turns} turn{'s' * (turns > 1)}",
            (step - 0.5, 1.1),
            (4, 0),
            textcoords="offset points",
            color="#57606a",
            fontsize=8.5,
            va="top",
        )
    if axis.get_legend_handles_labels()[0]:
        axis.legend(loc="best", fontsize=9)


def _draw_envs(axis: Any, run: RunFiles) -> None:
    """The same of each of several environments; the return in training is dashed."""
    axis.set(ylabel="share (0..1)", ylim=(-0.03, 1.12), yticks=[0, 0.25, 0.5, 0.75, 1])
    for env, color in zip(run.envs(), PALETTE, strict=False):
        points = run.series(f"train/return_mean/{env}")
        curve(axis, points, color, f"{env}, training: return", ls="--", raw=False)
        band(axis, run.held_out_in(env), color, f"{env}, held-out tasks: avg, 95 % interval")
    axis.legend(loc="best", fontsize=9)


def _draw_turns(axis: Any, run: RunFiles) -> None:
    axis.set_title("Turns per trajectory")
    curve(axis, run.series("train/turns_mean"), BLUE, "mean")
    if horizon := run.series("horizon/max_rounds"):
        steps, turns = zip(*horizon, strict=True)
        axis.step(steps, turns, where="mid", color=GREY, ls="--", lw=1.4, label="at most")
        axis.set_ylim(0, 1.45 * max(turns))  # room for the legend above the line
        axis.legend(loc="upper right", ncols=2, fontsize=8.5)


def _draw_signal(axis: Any, run: RunFiles) -> None:
    """Where all samples of a task have the same return, comparing them teaches nothing."""
    axis.set_title("Share of groups that teach")
    rows = [row for row in run.metrics if row.get("train/groups")]
    flat = [row.get("train/groups_zero_variance", 0) / row["train/groups"] for row in rows]
    shares = [(row["step"], 1 - share) for row, share in zip(rows, flat, strict=True)]
    curve(axis, shares, GREEN, "groups whose returns differ")
    axis.set_ylim(-0.05, 1.05)


def _draw_entropy_and_kl(axis: Any, run: RunFiles) -> None:
    """Entropy, and the KL on its own axis on the right."""
    axis.set_title("Entropy, nats a token")
    curve(axis, run.series("policy/entropy"), BLUE, "entropy")
    axis.set_ylim(bottom=0)
    kl = run.series("policy/kl")
    if not kl:  # only runs with a KL term have one
        return
    axis.set_title("Entropy")
    axis.set_title("KL to start", loc="right", color=ORANGE)
    axis.tick_params(axis="y", colors=BLUE)
    kl_axis = axis.twinx()
    kl_axis.spines["right"].set_visible(True)
    kl_axis.grid(False)
    kl_axis.tick_params(axis="y", colors=ORANGE)
    curve(kl_axis, kl, ORANGE, "KL")
    kl_axis.set_ylim(bottom=0)


def _panel(title: str, *series: tuple[str, str]) -> Panel:
    """A panel of metrics with their labels."""

    def draw(axis: Any, run: RunFiles) -> None:
        axis.set_title(title)
        logged = [(run.series(name), label) for name, label in series if run.series(name)]
        for (points, label), color in zip(logged, (BLUE, ORANGE), strict=False):
            curve(axis, points, color, label)
        if len(logged) > 1:
            axis.legend(loc="best", fontsize=8.5)

    return draw


_LOSS = _panel("Loss, nats a token", ("policy/loss", "learned"), ("eval/loss", "held out"))
PANELS: dict[str, tuple[Panel, Panel, Panel]] = {
    "rl": (_draw_turns, _draw_signal, _draw_entropy_and_kl),
    "sft": (_LOSS, _draw_entropy_and_kl, _panel("Gradient norm", ("policy/grad_norm", "norm"))),
    "agentevol": (
        _LOSS,
        _draw_entropy_and_kl,
        _panel("Evolving set", ("data/evolving", "trajectories")),
    ),
    "dpo": (
        _panel("Margin, nats", ("preference/margin", "margin")),
        _panel("Share of pairs in order", ("preference/accuracy", "share")),
        _panel(
            "Log-probs, nats",
            ("preference/chosen_log_prob", "chosen"),
            ("preference/rejected_log_prob", "rejected"),
        ),
    ),
}


def _title(run: RunFiles) -> str:
    """`textcraft · grpo · scaling_inter_stepwise 10 20 30 · smollm2-135m   (120 steps)`."""
    o = run.options
    rounds = " ".join(map(str, o.get("rounds") or []))
    scheduler, model = o.get("rounds_scheduler"), o.get("model")
    parts = [
        o.get("env"),
        o.get("algorithm") or (run.method if run.method != "rl" else None),
        f"{scheduler} {rounds}" if scheduler and rounds else scheduler,
        Path(model).name if model and Path(model).is_absolute() else model,
    ]
    title = " · ".join(str(part) for part in parts if part) or run.path.resolve().name
    return f"{title}   ({run.last_step} steps)"


# ------------------------------------------------------------------------------------ several runs


# --over -> the label of the axis, and where on it a run's steps lie (None: at their numbers).
AXES: Mapping[str, tuple[str, Callable[[RunFiles], Mapping[int, float]] | None]] = {
    "steps": ("training step", None),
    "turns": ("turns played in training (thousands)", RunFiles.turns_played),
    "hours": ("hours of training", RunFiles.hours),
}
# Options that say where a run is and how far it goes, not what it is.
IGNORED = {"run_dir", "resume", "env_addr", "engine_url", "engine_devices", "keep_last"}
MAX_OPTIONS = 5  # in a label
NO_BREAK = "\u00a0"  # a space at which no line ends


def overlay(
    runs: Sequence[RunFiles], out: Path | None = None, over: Sequence[str] = ("steps", "turns")
) -> Path:
    """
    Draw runs over each other: training return above held-out success.

    Args:
        out: the PNG; None: compare.png in the folder that holds all of them.
        over: names of AXES, a column each.
    Returns: the path of the image.
    Raises: ValueError if a run is named twice.
    """
    paths = [run.path.resolve() for run in runs]
    if len(set(paths)) < len(paths):
        raise ValueError("a run is named twice")
    out = out or Path(os.path.commonpath([path.parent for path in paths])) / "compare.png"
    size = (max(5.0, 4.5 * len(over)), 6.0 + 0.2 * len(runs))
    grid = {"nrows": 2, "ncols": len(over), "squeeze": False, "sharex": "col", "sharey": "row"}
    with figure(out, size, **grid) as (picture, axes):
        for column, name in enumerate(over):
            for n, (run, label) in enumerate(zip(runs, labels_of(runs), strict=True)):
                shift, color = 2.0 * (n - (len(runs) - 1) / 2), PALETTE[n % len(PALETTE)]
                points = _place(run, name, run.series("train/return_mean"))
                curve(axes[0, column], points, color, label, raw=len(points) < 2)
                held_out = _place(run, name, run.held_out("avg"))
                band(axes[1, column], held_out, color, label, fill=False, shift=shift)
            axes[1, column].set_xlabel(AXES[name][0])
        axes[0, 0].set(title="Training: return", ylabel="mean (0..1)", ylim=(-0.03, 1.03))
        axes[1, 0].set_title("Held-out tasks: success, 95 % interval")
        axes[1, 0].set(ylabel="share solved (0..1)", ylim=(-0.03, 1.03))
        handles, texts = axes[0, 0].get_legend_handles_labels()
        texts = [textwrap.fill(t, int(12 * size[0]), break_on_hyphens=False) for t in texts]
        picture.legend(handles, texts, loc="outside upper left", fontsize=9.5)
    return out


def _place(run: RunFiles, over: str, points: Sequence[tuple[int, Y]]) -> list[tuple[float, Y]]:
    """(step, y) -> (place of the step on the axis, y); steps without a time are left out."""
    place_of = AXES[over][1]
    if place_of is None:
        return [(float(step), y) for step, y in points]
    places = place_of(run)
    return [(places[step], y) for step, y in points if step in places]


def labels_of(runs: Sequence[RunFiles]) -> list[str]:
    """
    Each run's directory, as much of its path as tells it from the others, and the options in which
    they differ.

    >>> a, b = ({"algorithm": name, "seed": 1} for name in ("grpo", "rloo"))
    >>> runs = [RunFiles(Path(path), o, [], [], []) for path, o in [("x/run", a), ("y/run", b)]]
    >>> [label.replace(NO_BREAK, " ") for label in labels_of(runs)]
    ['x/run · algorithm grpo', 'y/run · algorithm rloo']
    """
    parts = [run.path.resolve().parts for run in runs]
    depth = 1
    while len({part[-depth:] for part in parts}) < len(runs):
        depth += 1
    keys = dict.fromkeys(key for run in runs for key in run.options if key not in IGNORED)
    differing = [k for k in keys if len({_option_text(run.options.get(k)) for run in runs}) > 1]
    labels = []
    for part, run in zip(parts, runs, strict=True):
        options = [
            f"{key.replace('_', '-')} {_option_text(run.options.get(key))}".replace(" ", NO_BREAK)
            for key in differing
        ]
        if len(options) > MAX_OPTIONS:
            options[MAX_OPTIONS:] = [f"and {len(options) - MAX_OPTIONS} more"]
        labels.append(" · ".join(["/".join(part[-depth:]), *options]))
    return labels


def _option_text(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    return "none" if value is None else str(value).rpartition("/")[2]  # of a path its name


# -------------------------------------------------------------------------------- the command line


def main(argv: Sequence[str] | None = None) -> int:
    """Draw; returns the exit code: 0 done, 1 the disk failed, 2 misuse."""
    parser = argparse.ArgumentParser("plots", description="Draw a run, or several over each other.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="directory that train.py wrote")
    parser.add_argument(
        "--out", type=Path, help="PNG file; default: RUN/reward.png, or compare.png beside the runs"
    )
    parser.add_argument(
        "--over",
        nargs="+",
        choices=list(AXES),
        default=["steps", "turns"],
        help="what several runs are drawn over, a column each (default: steps turns)",
    )
    options = parser.parse_args(argv)
    if options.out and options.out.suffix != ".png":
        parser.error(f"--out {options.out} must end in .png")
    try:
        if len(options.runs) == 1:
            print(plot(options.runs[0], options.out))
        else:
            print(overlay([read_run(run) for run in options.runs], options.out, options.over))
    except (FileNotFoundError, NotADirectoryError) as error:
        print(f"plots: {error.filename} is not there: give directories of runs", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"plots: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"plots: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
