"""Figures: one style for all, and what they are made of: curves, estimates with their intervals.

The colours are those of Okabe and Ito, which people who do not see red and green apart can tell
from each other. Light lines are single steps, heavy ones a running mean over the past (never the
future).

Read next: reporting/plots.py, a run in one picture.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

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
    "legend.facecolor": "white",  # it may lie over a curve, and must be read all the same
    "legend.edgecolor": "none",
    "legend.framealpha": 0.85,
}


@contextlib.contextmanager
def figure(path: Path, size: tuple[float, float], **grid: Any) -> Iterator[tuple[Any, Any]]:
    """
    A figure in our style, to draw on; it is `path` (PNG), whole, when the block ends.

    Args:
        size: inches.
        grid: as `matplotlib.pyplot.subplots` takes them: nrows, ncols, sharey; or `mosaic`, as
            `subplot_mosaic` takes it, with its own.
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
    """
    The running mean of (x, y) over a tenth of them (5 to 50); where `raw`, themselves too, light.
    """
    if not points:
        return
    xs, ys = zip(*points, strict=True)
    window = min(50, max(5, len(ys) // 10))
    if raw:
        axis.plot(xs, ys, color=color, alpha=0.25, lw=1, ls=ls)
    marker = "o" if len(ys) == 1 else None
    axis.plot(xs, running_mean(ys, window), color=color, lw=2, ls=ls, marker=marker, label=label)


def band(
    axis: Any,
    points: Sequence[tuple[float, Mapping[str, Any]]],
    color: str,
    label: str,
    scale: float = 1.0,
    fill: bool = True,
    shift: float = 0.0,
) -> None:
    """
    A curve of estimates with their intervals; points without a value are left out.

    Args:
        points: (x, {"value", "low", "high"}).
        scale: of all y; 100 for percent.
        fill: shade between the intervals, which several curves in one place do not bear.
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
    with figure(path, (7.5, 4.5)) as (picture, axis):
        for label, color, points in curves:
            band(axis, [(point[x], point) for point in points], color, label, scale=100)
        axis.set(xlabel=labels[0], ylabel=labels[1])
        picture.legend(loc="outside lower center", ncols=len(curves))  # covers no curve
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
