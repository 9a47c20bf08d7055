"""What recipes share: results as small files, differences with intervals, one kind of figure.

The unit of every interval is the goal: goals are resampled, a goal's value is its mean over samples
and seeds, and differences are paired by goal.
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from reporting.scoring import paired_bootstrap  # noqa: E402


def load_config(arguments: Sequence[str]) -> Any:
    """The `Config` that train.py makes of these arguments."""
    import torch

    from config import Config, check, complete, hardware_defaults, named_env
    from runtime.cli import parse_command_line

    default = hardware_defaults(torch.cuda.is_available(), named_env(arguments))
    config = complete(parse_command_line(Config, arguments, "recipe", default))
    check(config)
    return config


def run(command: Sequence[str]) -> None:
    """A command of this project, shown before it runs.

    Raises:
        SystemExit: it did not end well; its message is above.
    """
    print(f"$ {shlex.join(command)}", flush=True)
    code = subprocess.run(command, cwd=ROOT).returncode
    if code:
        raise SystemExit(code)


def carry_out(
    prog: str,
    options: argparse.Namespace,
    extra: Sequence[str],
    run: Callable[[argparse.Namespace, Sequence[str]], None],
    report: Callable[[Path], str],
) -> int:
    """`run` or `report`; returns the exit code: 0 done, 2 misuse, 130 stopped by Ctrl-C."""
    try:
        if options.command == "run":
            os.chdir(ROOT)
            run(options, extra)
        elif extra:
            raise ValueError(f"unknown arguments: {' '.join(extra)}")
        else:
            print(report(options.results))
    except ValueError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command goes on from the last checkpoint", file=sys.stderr)
        return 130
    return 0


# ------------------------------------------------------------------------------------------- files


def write_json(path: Path, content: Any) -> None:
    """Aside and renamed; paths inside the checkout lose its place on this machine."""
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.name}")
    text = json.dumps(content, indent=1).replace(f"{ROOT}/", "")
    aside.write_text(text + "\n", encoding="utf-8")
    aside.rename(path)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a .jsonl file; none where there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def item_shares(summary: Mapping[str, Any]) -> dict[str, float]:
    """task_id -> share of its samples that were solved, of an evaluation's summary."""
    return {task_id: item["avg"] for task_id, item in summary["items"].items()}


def read_evaluations(run_dir: Path) -> list[dict[str, Any]]:
    """Held-out evaluations of a run: step, mean with interval, share and mean return by goal."""
    found = []
    for path in sorted((run_dir / "eval").glob("step_*.json")):
        summary = json.loads(path.read_text(encoding="utf-8"))
        overall = summary["overall"]
        found.append(
            {"step": summary["step"], "avg": overall["avg"], "pass": overall["pass"]}
            | {"samples": summary["samples"], "items": item_shares(summary)}
            | {"returns": {i: item["return_mean"] for i, item in summary["items"].items()}}
        )
    return found


# --------------------------------------------------------------------------------- words and curves


def difference(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, Any]:
    """Paired bootstrap over the goals that both have."""
    both = before.keys() & after.keys()
    return paired_bootstrap({i: before[i] for i in both}, {i: after[i] for i in both})


def percent(estimate: Mapping[str, Any], signed: bool = False) -> str:
    """`54.1 [48.0, 60.1]`, in percent or points."""
    if estimate["value"] is None:
        return "-"
    sign = "+" if signed else ""
    value, low, high = (f"{100 * estimate[key]:{sign}.1f}" for key in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def plot_curves(
    path: Path,
    curves: Sequence[tuple[str, str, Sequence[Mapping[str, Any]]]],
    x: str,
    labels: tuple[str, str],
    note: str,
) -> None:
    """Lines with their intervals as bands, in percent; written aside and renamed.

    Args:
        curves: (label, color, points); a point has `value`, `low`, `high` and the field `x`.
        labels: of the two axes.
        note: above the figure.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7.5, 4.5), constrained_layout=True)
    for label, color, points in curves:
        points = [point for point in points if point["value"] is not None]
        xs = [point[x] for point in points]
        value, low, high = ([100 * p[key] for p in points] for key in ("value", "low", "high"))
        axis.fill_between(xs, low, high, color=color, alpha=0.13, lw=0)
        axis.plot(xs, value, color=color, marker="o", ms=4, lw=1.8, label=label)
    axis.set(xlabel=labels[0], ylabel=labels[1])
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(color="#e6e8eb")
    axis.set_axisbelow(True)
    axis.legend(frameon=False, loc="upper left")
    axis.set_title(note, fontsize=9, color="#57606a")
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".{path.stem}.tmp.png")
    figure.savefig(aside, dpi=130)
    plt.close(figure)
    os.replace(aside, path)
