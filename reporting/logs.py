"""Logs as files: one JSON object with a `step` on each line, read back and cut back.

A crash cuts the last line short, never another one: so a bad last line is left out, and any other
is an error that names it.

Read next: reporting/metrics.py, which writes them.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from run.files import write_text

ALARMS = "alarms.jsonl"  # what the sentinels said while the run went on


class LogError(ValueError):
    """A log is not what its run must have written; the message names it and says what to do."""


def require_steps(path: Path, last_step: int) -> None:
    """Raises LogError unless the log holds each of the steps 1 to `last_step`, once.

    A log is flushed to the disk before the checkpoint of its step gets its name, so that no crash
    leaves one behind the other. What is missing was lost otherwise, and a run that went on would
    draw its curves with a hole.
    """
    steps = [row["step"] for row in read_log(path)] if path.exists() else []
    found = [step for step in steps if step <= last_step]
    if found != list(range(1, last_step + 1)):
        missing = sorted(set(range(1, last_step + 1)) - set(found))
        problem = f"lacks step {missing[0]}" if missing else "holds a step twice"
        raise LogError(
            f"{path} {problem}, but the newest checkpoint is of step {last_step}: put a copy of "
            "the log back, or move checkpoints of later steps than the log's out of the run to go "
            "on from an earlier one"
        )


def truncate_log(path: Path, last_step: int, then: str = "") -> None:
    """Keep the lines of steps <= last_step, byte for byte, and add `then`; what a crash cut short
    goes too."""
    if path.exists():
        kept = [line + "\n" for line, row in _parsed_lines(path) if row["step"] <= last_step]
        write_text(path, "".join(kept) + then)


def read_log(path: str | Path) -> list[dict[str, Any]]:
    """The objects of a log. Raises LogError for a bad line that is not a cut-short last one."""
    return [row for _, row in _parsed_lines(Path(path))]


def _parsed_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            yield line, row
        elif number < len(lines):
            raise LogError(
                f"{path} line {number} is not a JSON object with a step: {line[:80]!r}; "
                "a crash cuts only the last line short, so mend or remove this one"
            )
