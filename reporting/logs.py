"""Logs as files: one JSON object with a `step` on each line, read back and cut back.

A crash can only cut the last line short: a bad last line is left out, any other is an error.

Read next: reporting/metrics.py, which writes them.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from run.files import write_text

ALARMS = "alarms.jsonl"  # the sentinels' alarms while the run went on


class LogError(ValueError):
    """A log is not as its run must have written it; the message says what to do."""


def require_steps(path: Path, last_step: int) -> None:
    """Raise LogError unless the log holds each of the steps 1 to `last_step`, once.

    A log is flushed before the checkpoint of its step gets its name, so no crash can cause this.
    """
    steps = [row["step"] for row in read_log(path)] if path.exists() else []
    steps = [step for step in steps if step <= last_step]
    if steps != list(range(1, last_step + 1)):
        missing = sorted(set(range(1, last_step + 1)) - set(steps))
        problem = f"lacks step {missing[0]}" if missing else "holds a step twice"
        raise LogError(
            f"{path} {problem}, but the newest checkpoint is of step {last_step}: put a copy of "
            "the log back, or move later checkpoints out of the run to resume from an earlier one"
        )


def truncate_log(path: Path, last_step: int, then: str = "") -> None:
    """Keep the lines of steps <= last_step, byte for byte, and add `then`."""
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
                f"{path} line {number} is not a JSON object with a step: {line[:80]!r}; mend or "
                "remove it"
            )
