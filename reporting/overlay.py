"""Several runs in one picture: which one learns faster, and by what it is measured.

    training return   over steps  |  over turns played
    held-out success  over steps  |  over turns played      with 95 % intervals

Steps of two runs are seldom worth the same: one plays 10 turns where the other plays 30. Turns
played are what both pay for, hours what one waits for.

Read next: reporting/curves.py.
"""

import os
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from config import Misuse
from reporting.curves import RunFiles
from reporting.figures import PALETTE, band, curve, figure

Y = TypeVar("Y")
# --over -> the label of the axis; where on it a run's steps lie (None: at their numbers).
AXES: Mapping[str, tuple[str, Callable[[RunFiles], Mapping[int, float]] | None]] = {
    "steps": ("training step", None),
    "turns": ("turns played in training (thousands)", RunFiles.turns_played),
    "hours": ("hours of training", RunFiles.hours),
}
# Options that do not say what a run is, only where and how far.
NO_DIFFERENCE = {"run_dir", "resume", "env_addr", "engine_url", "engine_devices", "keep_last"}
MOST_OPTIONS = 5  # in a label
NO_BREAK = "\u00a0"  # a space at which no line ends


def overlay(
    runs: Sequence[RunFiles], out: Path | None = None, over: Sequence[str] = ("steps", "turns")
) -> Path:
    """
    Draw runs over each other.

    Args:
        out: the PNG; None: compare.png in the folder that holds all of them.
        over: names of AXES, a column each.
    Returns: the path of the image.
    Raises:
        Misuse: a run is named twice.
    """
    paths = [run.path.resolve() for run in runs]
    for path, run in zip(paths, runs, strict=True):
        if paths.count(path) > 1:
            raise Misuse(f"{run.path} is named twice")
    out = out or Path(os.path.commonpath([path.parent for path in paths])) / "compare.png"
    labels = labels_of(runs)
    size = (max(5.0, 4.5 * len(over)), 6.0 + 0.2 * len(runs))
    grid = {"nrows": 2, "ncols": len(over), "squeeze": False, "sharex": "col", "sharey": "row"}
    with figure(out, size, **grid) as (picture, axes):
        for column, name in enumerate(over):
            for n, (run, label) in enumerate(zip(runs, labels, strict=True)):
                shift, color = 2.0 * (n - (len(runs) - 1) / 2), PALETTE[n % len(PALETTE)]
                points = _placed(run, name, run.series("train/return_mean"))
                curve(axes[0, column], points, color, label, raw=len(points) < 2)
                held_out = _placed(run, name, run.held_out("avg"))
                band(axes[1, column], held_out, color, label, fill=False, shift=shift)
            axes[1, column].set_xlabel(AXES[name][0])
        axes[0, 0].set(title="Training: return", ylabel="mean (0..1)", ylim=(-0.03, 1.03))
        axes[1, 0].set_title("Held-out tasks: success, 95 % interval")
        axes[1, 0].set(ylabel="share solved (0..1)", ylim=(-0.03, 1.03))
        handles, texts = axes[0, 0].get_legend_handles_labels()
        width = int(12 * size[0])  # characters
        texts = [textwrap.fill(text, width, break_on_hyphens=False) for text in texts]
        picture.legend(handles, texts, loc="outside upper left", fontsize=9.5)
    return out


def _placed(run: RunFiles, over: str, points: Sequence[tuple[int, Y]]) -> list[tuple[float, Y]]:
    """(step, y) -> (where the step lies on the axis, y); steps that were not timed are left out."""
    place_of = AXES[over][1]
    if place_of is None:
        return [(float(step), y) for step, y in points]
    places = place_of(run)
    return [(places[step], y) for step, y in points if step in places]


def labels_of(runs: Sequence[RunFiles]) -> list[str]:
    """
    A run's directory, as much of it as tells it from the others, and its options that differ.

    >>> a, b = ({"algorithm": name, "seed": 1} for name in ("grpo", "rloo"))
    >>> runs = [RunFiles(Path(path), o, [], [], []) for path, o in [("x/run", a), ("y/run", b)]]
    >>> [label.replace(NO_BREAK, " ") for label in labels_of(runs)]
    ['x/run · algorithm grpo', 'y/run · algorithm rloo']
    """
    parts = [run.path.resolve().parts for run in runs]
    depth = 1
    while len({part[-depth:] for part in parts}) < len(runs):
        depth += 1
    names = ["/".join(part[-depth:]) for part in parts]
    keys = dict.fromkeys(key for run in runs for key in run.options)
    differ = [
        key
        for key in keys
        if key not in NO_DIFFERENCE and len({_text(run.options.get(key)) for run in runs}) > 1
    ]
    labels = []
    for name, run in zip(names, runs, strict=True):
        told = [
            f"{key.replace('_', '-')} {_text(run.options.get(key))}".replace(" ", NO_BREAK)
            for key in differ
        ]
        more = [f"and {len(told) - MOST_OPTIONS} more"] if len(told) > MOST_OPTIONS else []
        labels.append(" · ".join([name, *told[:MOST_OPTIONS], *more]))
    return labels


def _text(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(str, value)) or "none"
    return "none" if value is None else str(value).rpartition("/")[2]  # of a file its name
