"""The same in a terminal: an overview, a list of trajectories, one trajectory turn by turn.

What a model or a world wrote is printed with its control characters made visible: printed as they
are, they could move the cursor, rename the window, or have the terminal answer.
"""

from __future__ import annotations

import shutil
import textwrap
import unicodedata
from collections.abc import Iterable
from typing import Any

from viewer.lines import Row
from viewer.overview import overview
from viewer.sources import Source
from viewer.trajectories import Filter, list_rows, one, outcome_of
from viewer.wrong import what_goes_wrong

MOST_ROWS = 40  # of a list
SHORT = 100  # characters of an example


def visible(text: str) -> str:
    """Control and direction characters as pictures or names; line ends and tabs stay.

    >>> visible("a\\x1b[31mb\\u202ec\\nd")
    'a␛[31mb⟨U+202E⟩c\\nd'
    """
    return "".join(c if c in "\n\t" else shown(c) for c in text)


def shown(character: str) -> str:
    code = ord(character)
    if code < 0x20:
        return chr(0x2400 + code)
    if unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp"):
        return f"⟨U+{code:04X}⟩"
    return character


def overview_text(source: Source, name: str | None) -> str:
    """How the run goes, and what goes wrong in a file of it."""
    about = overview(source)
    lines = [
        f"{source.name}: {about['env'] or 'unknown world'}, {about['model'] or 'model unknown'}"
    ]
    lines += [f"  {sentence}" for sentence in about["headline"]]
    if name is None:
        return visible("\n".join([*lines, "  no trajectories yet"]))
    wrong = what_goes_wrong(source.lines(name))
    lines += ["", f"{name}: {wrong['failures']} of {wrong['episodes']} episodes failed"]
    titles = {"stops": "they ended by", "observations": "the world's last words"}
    titles["repeated"] = "done again right after itself"
    for key, title in titles.items():
        if wrong[key]:
            lines += [f"  {title}:"]
            lines += [f"    {e['count']:4d}  {brief(e['text'])}" for e in wrong[key]]
    return visible("\n".join(lines))


def brief(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= SHORT else text[: SHORT - 1] + "…"


def list_text(source: Source, name: str, only_failures: bool) -> str:
    """The trajectories of a file, one a line."""
    chosen = Filter(outcome="failed" if only_failures else "")
    found = list_rows(source.lines(name), chosen, limit=MOST_ROWS)
    head = f"{'id':22} {'task':20} {'sub-task':16} {'ended':12} {'return':>6} {'turns':>5}"
    lines = [f"{name}: {found['matching']} of {found['total']} trajectories", head]
    lines += [row_text(row) for row in found["rows"]]
    left = found["matching"] - len(found["rows"])
    return visible("\n".join([*lines, *([f"... and {left} more"] if left else [])]))


def row_text(row: Row) -> str:
    score = "-" if row["return"] is None else number_text(row["return"], ".2f")
    cells = (row["trajectory_id"], row["task_id"], row["subtask"] or "-", row["stop_reason"] or "-")
    widths = (22, 20, 16, 12)
    words = (f"{cell!s:{width}.{width}}" for cell, width in zip(cells, widths, strict=True))
    return f"{' '.join(words)} {score:>6} {row['num_turns']:5d}"


def trajectory_text(source: Source, name: str, number: int) -> str:
    """One trajectory, turn by turn."""
    found = one(source, name, number)
    row = found["row"]
    lines = [
        f"{row['trajectory_id']}  {row['task_id']}  {row['subtask'] or ''}  {outcome_of(row)}"
        f"  return {row['return']}  ended by {row['stop_reason']}"
    ]
    if row["error"]:
        lines.append(f"lost: {row['error']}")
    lines += block("before", found["opening"][-1]["content"] if found["opening"] else "")
    for number_of, turn in enumerate(found["turns"], start=1):
        lines += block(f"{number_of} says", turn["action_text"])
        reward = f" ({number_text(turn['reward'], '+.2f')})" if turn["reward"] else ""
        lines += block(f"world{reward}", turn["observation_text"] or "")
    return visible("\n".join(lines))


def number_text(value: Any, form: str) -> str:
    """A number in its form; whatever else stands in its place as it is."""
    return format(value, form) if isinstance(value, int | float) else str(value)


def block(title: str, text: Any) -> list[str]:
    width = max(40, min(100, shutil.get_terminal_size().columns) - 14)
    said = [piece for line in str(text).split("\n") for piece in textwrap.wrap(line, width) or [""]]
    return [f"{title if i == 0 else '':>12}  {piece}" for i, piece in enumerate(said or [""])]


def find(source: Source, trajectory_id: str, within: str | None = None) -> tuple[str, int]:
    """(file, line) of a trajectory, in the newest file that has it, or in one file: an evaluation
    gives the same ids as the step that it comes after.

    Raises: LookupError: there is none; the nearest ids are named.
    """
    import difflib

    known: list[str] = []
    for file in reversed(source.files()):
        if within not in (None, file.name):
            continue
        ids = [str(i) for i in source.lines(file.name).columns["trajectory_id"]]
        if trajectory_id in ids:
            return file.name, ids.index(trajectory_id)
        known += ids
    near = nearest(trajectory_id, known) or difflib.get_close_matches(trajectory_id, known, n=3)
    hint = f"; near it: {', '.join(near)}" if near else ""
    raise LookupError(f"no trajectory is called {trajectory_id}{hint}")


def nearest(name: str, known: Iterable[str]) -> list[str]:
    """Ids that begin as this one does, before their last part."""
    stem = name.rpartition("-")[0]
    return sorted({other for other in known if stem and other.startswith(stem)})[:3]
