"""The same in a terminal: an overview, a list of trajectories, one trajectory turn by turn."""

from __future__ import annotations

import shutil
import textwrap
from typing import Any

from viewer.overview import overview, what_goes_wrong
from viewer.sources import Source
from viewer.trajectories import Filter, list_rows, outcome_of, trajectory_view

MAX_ROWS = 40  # of a list
MAX_EXAMPLE = 100  # characters


def printable(text: str) -> str:
    """Control characters made visible: a model's text must not move the cursor, rename the window,
    or make the terminal answer.

    >>> printable("a\\x1b[31mb\\u202ec\\nd")
    'a⟨U+001B⟩[31mb⟨U+202E⟩c\\nd'
    """
    return "".join(c if c in "\n\t" or c.isprintable() else f"⟨U+{ord(c):04X}⟩" for c in text)


def overview_text(source: Source, name: str | None) -> str:
    """How the run goes, and what goes wrong in the file `name`."""
    about = overview(source)
    lines = [f"{source.name}: {about['env'] or 'unknown'}, {about['model'] or 'model unknown'}"]
    lines += [f"  {sentence}" for sentence in about["headline"]]
    if name is None:
        return printable("\n".join([*lines, "  no trajectories yet"]))
    wrong = what_goes_wrong(source.lines(name))
    lines += ["", f"{name}: {wrong['failures']} of {wrong['episodes']} episodes failed"]
    for key, title in (
        ("stops", "stopped by"),
        ("observations", "last observation"),
        ("repeated", "repeated action"),
    ):
        if wrong[key]:
            lines += [f"  {title}:"]
            texts = [" ".join(entry["text"].split())[:MAX_EXAMPLE] for entry in wrong[key]]
            lines += [f"    {e['count']:4d}  {t}" for e, t in zip(wrong[key], texts, strict=True)]
    return printable("\n".join(lines))


def list_text(source: Source, name: str, only_failures: bool) -> str:
    """The trajectories of a file, one a line."""
    chosen = Filter(outcome="failed" if only_failures else "")
    table = list_rows(source.lines(name), chosen, limit=MAX_ROWS)
    lines = [
        f"{name}: {table['matching']} of {table['total']} trajectories",
        f"{'id':22} {'task':20} {'sub-task':16} {'ended':12} {'return':>6} {'turns':>5}",
    ]
    for row in table["rows"]:
        score = "-" if row["return"] is None else format_number(row["return"], ".2f")
        names, widths = ("trajectory_id", "task_id", "subtask", "stop_reason"), (22, 20, 16, 12)
        cells = [f"{row[n] or '-'!s:{w}.{w}}" for n, w in zip(names, widths, strict=True)]
        lines.append(f"{' '.join(cells)} {score:>6} {row['num_turns']:5d}")
    if more := table["matching"] - len(table["rows"]):
        lines.append(f"... and {more} more")
    return printable("\n".join(lines))


def trajectory_text(source: Source, name: str, number: int) -> str:
    """One trajectory, turn by turn."""
    view = trajectory_view(source, name, number)
    row = view["row"]
    lines = [
        f"{row['trajectory_id']}  {row['task_id']}  {row['subtask'] or ''}  {outcome_of(row)}"
        f"  return {row['return']}  stopped by {row['stop_reason']}"
    ]
    if row["error"]:
        lines.append(f"lost: {row['error']}")
    lines += block("observation", view["opening"][-1]["content"] if view["opening"] else "")
    for turn_number, turn in enumerate(view["turns"], start=1):
        lines += block(f"action {turn_number}", turn["action_text"])
        reward = f" ({format_number(turn['reward'], '+.2f')})" if turn["reward"] else ""
        lines += block(f"observation{reward}", turn["observation_text"] or "")
    return printable("\n".join(lines))


def format_number(value: Any, form: str) -> str:
    """A number in its form; anything else that a file holds in its place, as it is."""
    return format(value, form) if isinstance(value, int | float) else str(value)


def block(title: str, text: Any) -> list[str]:
    """Wrapped text with a title on the left."""
    width = max(40, min(100, shutil.get_terminal_size().columns) - 22)
    pieces = [p for line in str(text).split("\n") for p in textwrap.wrap(line, width) or [""]]
    return [f"{title if i == 0 else '':>20}  {piece}" for i, piece in enumerate(pieces)]


def find(source: Source, trajectory_id: str, within: str | None = None) -> tuple[str, int]:
    """(file, line) of a trajectory, in the newest file that has it, or in the file `within`: an
    evaluation has the same ids as the step before it.

    Raises: LookupError if there is none; similar ids are named.
    """
    similar: list[str] = []
    for file in reversed(source.files()):
        if within in (None, file.name):
            ids = [str(i) for i in source.lines(file.name).columns["trajectory_id"]]
            if trajectory_id in ids:
                return file.name, ids.index(trajectory_id)
            similar += [i for i in ids if i.startswith(trajectory_id.rpartition("-")[0])]
    raise LookupError(f"no trajectory {trajectory_id}; similar: {', '.join(similar[:3]) or 'none'}")
