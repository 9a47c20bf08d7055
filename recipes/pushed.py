"""Which way do advantages push a behaviour: to where it earns, or away from it?

    python recipes/pushed.py runs/NAME --says "focus on" --steps 1 15 25 32
    python recipes/pushed.py runs/NAME --says "focus on" --subtask Classification --out pushed.json

The trajectories of a run's steps are parted into those in which the policy said so and the others;
for each part: how many, what they earned, and the mean of their advantages, as GRPO has them and as
it has them without the division by the group's standard deviation (scale_by_std=False; RLOO's are
n/(n-1) times these). A behaviour that earns more than its siblings should be pushed up. Where the
division makes small differences as loud as large ones, it need not be: tutorials/02 has such a run.

A group whose returns are equal has no advantages and is left out of the means. Read next:
advantages.py.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from advantages import grpo  # noqa: E402
from recipes.common import markdown, read_lines, write_json  # noqa: E402
from run.errors import complain  # noqa: E402
from trajectory import LOST  # noqa: E402


class Played(NamedTuple):
    """What is asked of a trajectory."""

    group: Any
    earned: float  # its return
    said: bool


def played(path: Path, says: str, subtask: str | None) -> Iterator[Played]:
    """Of a file of trajectories those that count; with a sub-task, of that alone."""
    for line in read_lines(path):
        if line["stop_reason"] in LOST or subtask not in (None, line["subtask"]):
            continue
        said = any(says in turn["action_text"] for turn in line["turns"])
        yield Played((path.name, line["group_id"]), line["return"], said)


def pushed(trajectories: Sequence[Played]) -> dict[str, dict[str, float | int | None]]:
    """Of those that said it and of the others: trajectories, their mean return, the mean advantage
    with and without the division.

    >>> close = [Played(0, 0.25, False), Played(0, 0.25, False), Played(0, 0.17, True)]
    >>> far = [Played(1, 1.0, True), Played(1, 0.25, False), Played(1, 0.25, False)]
    >>> said = pushed([*close, *close, *far])["said"]
    >>> said["return"], said["divided"], said["plain"]
    (0.447, -0.476, 0.131)
    """
    members: dict[Any, list[Played]] = {}
    for one in trajectories:
        members.setdefault(one.group, []).append(one)
    # Groups of equal returns have no advantages, one of a single member no siblings.
    kept = [t for group in members.values() if len({t.earned for t in group}) > 1 for t in group]
    number = {group: n for n, group in enumerate(members)}
    ids = torch.tensor([number[t.group] for t in kept], dtype=torch.int64)
    returns = torch.tensor([[0.0, t.earned] for t in kept]).reshape(-1, 2)
    mask = torch.tensor([[0, 1]] * len(kept)).reshape(-1, 2)
    advantages = {
        column: grpo(returns, mask, ids, scale_by_std=divides)[0][:, 1].tolist() if kept else []
        for column, divides in (("divided", True), ("plain", False))
    }
    found: dict[str, dict[str, float | int | None]] = {}
    for name, wanted in (("said", True), ("not said", False)):
        earned = [t.earned for t in trajectories if t.said == wanted]
        row: dict[str, float | int | None] = {"trajectories": len(earned)}
        row["return"] = round(fmean(earned), 3) if earned else None
        for column, values in advantages.items():
            own = [a for a, t in zip(values, kept, strict=True) if t.said == wanted]
            row[column] = round(fmean(own), 3) if own else None
        found[name] = row
    return found


def report(run: Path, says: str, steps: Sequence[int], subtask: str | None) -> list[dict[str, Any]]:
    """A row for each stretch of the run that begins at one of `steps`, or at its first.

    Raises:
        ValueError: the run has no trajectories of a step.
    """
    files = {int(p.stem[5:]): p for p in sorted((run / "trajectories").glob("step_*.jsonl"))}
    if not files:
        raise ValueError(f"{run} holds no trajectories/step_*.jsonl; is it a run?")
    ends = sorted({*steps, 1, max(files) + 1})
    rows = []
    for first, after in pairwise(ends):
        taken = [
            one
            for step, path in files.items()
            if first <= step < after
            for one in played(path, says, subtask)
        ]
        rows.append({"steps": [first, after - 1]} | pushed(taken))
    return rows


def table(rows: Sequence[dict[str, Any]], says: str) -> list[str]:
    lines = []
    for row in rows:
        for name, words in (("said", f"`{says}`"), ("not said", "others")):
            cells = row[name]
            shown = [
                f"{cells[c]:+.3f}" if cells[c] is not None else "-" for c in ("divided", "plain")
            ]
            earned = "-" if cells["return"] is None else f"{cells['return']:.2f}"
            steps = f"{row['steps'][0]} to {row['steps'][1]}"
            lines.append((steps, words, cells["trajectories"], earned, *shown))
    titles = "steps | trajectories with | how many | return | advantage, divided | undivided"
    return markdown(titles, lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, help="folder of a run of train.py")
    parser.add_argument("--says", required=True, help="text in one of the policy's turns")
    parser.add_argument("--steps", type=int, nargs="+", default=(), help="where stretches begin")
    parser.add_argument("--subtask", help="of this sub-task alone")
    parser.add_argument("--out", type=Path, help="file for the numbers")
    options = parser.parse_args(argv)
    try:
        rows = report(options.run, options.says, options.steps, options.subtask)
    except (OSError, ValueError, KeyError) as error:
        complain("pushed.py", error)
        return 2
    print("\n".join(table(rows, options.says)))
    if options.out:
        about = {"says": options.says, "subtask": options.subtask, "rows": rows}
        write_json(options.out, about)
    return 0


if __name__ == "__main__":
    sys.exit(main())
