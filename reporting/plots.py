"""reward.png: a run at a glance, drawn again after every step; and several runs in one picture.

    training return, held-out success with its 95 % interval, the stages of the horizon
    turns per trajectory  |  groups that teach  |  entropy, and KL to the reference

Of other methods than reinforcement learning the lower row is

    sft.py        loss, and that of what is held out  |  entropy  |  gradient norm
    dpo.py        margin  |  pairs in the right order  |  log-probs of chosen and rejected
    agentevol.py  loss  |  entropy  |  trajectories in the evolving set

Run it: python -m reporting.plots runs/NAME                      draws runs/NAME/reward.png again
        python -m reporting.plots runs/A runs/B --out ab.png     lays runs over each other
        python -m reporting.plots runs/A runs/B --over hours
Read next: reporting/overlay.py for several runs; reporting/metrics.py for what each number means;
reporting/scoring.py for the evaluations' own curves.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NoReturn

from config import Misuse
from reporting.curves import RunFiles, read_run
from reporting.figures import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PALETTE,
    PURPLE,
    SKY,
    band,
    curve,
    figure,
)
from reporting.logs import LogError
from reporting.overlay import AXES, overlay

MOSAIC = [["main"] * 3, ["left", "middle", "right"]]


Panel = Callable[[Any, RunFiles], None]


def plot(run_dir: str | Path, target: Path | None = None) -> Path:
    """
    Draw a run from `metrics.jsonl`, `eval/step_*.json` and `config.json`.

    Args:
        target: the image; None: `reward.png` of the run.
    Returns: the path of the image. Raises FileNotFoundError when the run has no `metrics.jsonl`.
    """
    run = read_run(run_dir)
    target = target or run.path / "reward.png"
    with figure(target, (9, 6), mosaic=MOSAIC, height_ratios=[2, 1]) as (picture, axes):
        picture.suptitle(_title(run), fontsize=11)
        _main(axes["main"], run)
        for place, draw in zip(MOSAIC[1], _panels(run), strict=True):
            draw(axes[place], run)
        for axis in axes.values():
            axis.set_xlabel("training step")
            axis.xaxis.get_major_locator().set_params(integer=True)
            if not axis.has_data():
                axis.text(0.5, 0.5, "nothing logged yet", transform=axis.transAxes, ha="center")
    return target


def _panels(run: RunFiles) -> tuple[Panel, Panel, Panel]:
    """The lower row, as the run's method has it."""
    loss = _curves("Loss, nats a token", ("policy/loss", "learned"), ("eval/loss", "held out"))
    if run.method == "sft":
        return loss, _entropy_and_kl, _curves("Gradient norm", ("policy/grad_norm", "norm"))
    if run.method == "agentevol":
        return loss, _entropy_and_kl, _curves("Evolving set", ("data/evolving", "trajectories"))
    if run.method == "dpo":
        return (
            _curves("Margin, nats", ("preference/margin", "margin")),
            _curves("Share of pairs in order", ("preference/accuracy", "share")),
            _curves(
                "Log-probs, nats",
                ("preference/chosen_log_prob", "chosen"),
                ("preference/rejected_log_prob", "rejected"),
            ),
        )
    return _turns, _signal, _entropy_and_kl


def _curves(title: str, *series: tuple[str, str]) -> Panel:
    """A panel of metrics, each with its label."""

    def draw(axis: Any, run: RunFiles) -> None:
        axis.set_title(title)
        drawn = [(run.series(name), label) for name, label in series if run.series(name)]
        for (points, label), color in zip(drawn, (BLUE, ORANGE), strict=False):
            curve(axis, points, color, label)
        if len(drawn) > 1:
            axis.legend(loc="best", fontsize=8.5)

    return draw


def _main(axis: Any, run: RunFiles) -> None:
    """How well it does, on the tasks it trains on and on those it never saw."""
    axis.set(ylabel="share (0..1)", ylim=(-0.03, 1.12), yticks=[0, 0.25, 0.5, 0.75, 1])
    if run.worlds():
        _each_world(axis, run)
        return
    returns, successes = run.series("train/return_mean"), run.series("train/success_rate")
    curve(axis, returns, BLUE, "training: return")
    if successes != returns:  # where the only reward is 1 for success, they are one curve
        curve(axis, successes, SKY, "training: success", ls="--")
    samples = run.evaluations[-1]["samples"] if run.evaluations else 1
    # Of as many samples alone: the start is often measured with fewer, and solves fewer by that.
    alike = {e["step"] for e in run.evaluations if e["samples"] == samples}
    tries = [(step, e["value"]) for step, e in run.held_out("pass") if step in alike]
    tries = [(step, value) for step, value in tries if value is not None]
    if tries and samples > 1:
        label = f"held-out tasks: pass@{samples}"
        axis.plot(*zip(*tries, strict=True), color=PURPLE, lw=1.2, ls="--", label=label)
    if any(e["value"] is not None for _, e in run.held_out("avg")):
        label = f"held-out tasks: avg@{samples}, 95 % interval"
        band(axis, run.held_out("avg"), ORANGE, label)
    stages = [(value, list(group)) for value, group in groupby(_horizon(run), key=lambda p: p[1])]
    for turns, steps in stages if len(stages) > 1 else []:
        axis.axvline(steps[0][0] - 0.5, color=GREY, ls=":", lw=1.2)
        axis.annotate(
            f"at most {turns} turn{'s' * (turns > 1)}",
            (steps[0][0] - 0.5, 1.1),
            (4, 0),
            textcoords="offset points",
            color="#57606a",
            fontsize=8.5,
            va="top",
        )
    if axis.get_legend_handles_labels()[0]:
        axis.legend(loc="best", fontsize=9)


def _each_world(axis: Any, run: RunFiles) -> None:
    """The same of each of several worlds: its return in training, dashed, and what is solved of its
    held-out tasks."""
    for world, color in zip(run.worlds(), PALETTE, strict=False):
        points = run.series(f"train/return_mean/{world}")
        curve(axis, points, color, f"{world}, training: return", ls="--", raw=False)
        band(axis, run.held_out_in(world), color, f"{world}, held-out tasks: avg, 95 % interval")
    axis.legend(loc="best", fontsize=9)


def _horizon(run: RunFiles) -> list[tuple[int, float]]:
    return run.series("horizon/max_rounds")


def _turns(axis: Any, run: RunFiles) -> None:
    axis.set_title("Turns per trajectory")
    curve(axis, run.series("train/turns_mean"), BLUE, "mean")
    horizon = _horizon(run)
    if horizon:
        steps, turns = zip(*horizon, strict=True)
        axis.step(steps, turns, where="mid", color=GREY, ls="--", lw=1.4, label="at most")
        axis.set_ylim(0, 1.45 * max(turns))  # room for the legend above the line
        axis.legend(loc="upper right", ncols=2, fontsize=8.5)


def _signal(axis: Any, run: RunFiles) -> None:
    """Where all samples of a task end alike, comparing them teaches nothing."""
    axis.set_title("Share of groups that teach")
    groups = [row for row in run.metrics if row.get("train/groups")]
    flat = [(row["step"], row.get("train/groups_zero_variance", 0)) for row in groups]
    shares = [
        (step, 1 - n / row["train/groups"]) for (step, n), row in zip(flat, groups, strict=True)
    ]
    curve(axis, shares, GREEN, "groups whose returns differ")
    axis.set_ylim(-0.05, 1.05)


def _entropy_and_kl(axis: Any, run: RunFiles) -> None:
    """Entropy, and the KL on an axis of its own on the right."""
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


def _title(run: RunFiles) -> str:
    """`textcraft · grpo · scaling_inter_stepwise 10 20 30 · smollm2-135m   (120 steps)`.

    A run keeps a model's folder by its whole path, of which the name is shown.
    """
    rounds = " ".join(map(str, run.options.get("rounds") or []))
    names = [run.options.get(key) for key in ("env", "algorithm", "rounds_scheduler", "model")]
    names[1] = names[1] or (run.method if run.method != "rl" else None)
    names[2] = f"{names[2]} {rounds}" if names[2] and rounds else names[2]
    names[3] = Path(names[3]).name if names[3] and Path(names[3]).is_absolute() else names[3]
    parts = [str(name) for name in names if name] or [run.path.resolve().name]
    return " · ".join(parts) + f"   ({run.last_step} steps)"


# --------------------------------------------------------------------------------- the command line


class _OneLine(argparse.ArgumentParser):
    """Misuse is one line."""

    def error(self, message: str) -> NoReturn:
        raise Misuse(f"{message}; see --help")


def command_line(argv: Sequence[str] | None = None) -> int:
    """Draw; the exit code: 0 done, 1 the disk failed, 2 misuse."""
    parser = _OneLine(prog="plots", description="Draw a run, or several over each other.")
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
    try:
        given = parser.parse_args(argv)
        if given.out and given.out.suffix != ".png":
            raise Misuse(f"--out {given.out} must end in .png")
        try:
            if len(given.runs) == 1:
                print(plot(given.runs[0], given.out))
            else:
                print(overlay([read_run(run) for run in given.runs], given.out, given.over))
        except (FileNotFoundError, NotADirectoryError) as error:
            raise Misuse(
                f"{error.filename} is not there: give directories that train.py wrote"
            ) from None
        except (LogError, ValueError) as error:
            raise Misuse(str(error)) from None
    except Misuse as error:
        print(f"plots: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"plots: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(command_line())
