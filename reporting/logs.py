"""Log files: one JSON object with a `step` per line. A resumed run reads them and cuts them back.

A crash can only cut the last line short, so a bad last line is skipped; any other bad line is an
error.

Read next: reporting/metrics.py, which writes these files.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from run.errors import RunFailed
from run.files import write_text

ALARMS = "alarms.jsonl"  # log of the sentinels' alarms


class LogError(RunFailed):
    """A log file is damaged; the message says what to do."""


def require_steps(path: Path, last_step: int) -> None:
    """Raise LogError unless the log has every step from 1 to `last_step` exactly once.

    A crash cannot cause this, since a step is flushed to the log before its checkpoint is renamed.
    """
    steps = [row["step"] for row in read_log(path)] if path.exists() else []
    steps = [step for step in steps if step <= last_step]
    if steps != list(range(1, last_step + 1)):
        missing = sorted(set(range(1, last_step + 1)) - set(steps))
        problem = f"lacks step {missing[0]}" if missing else "has a step twice"
        raise LogError(
            f"{path} {problem}, but the newest checkpoint is of step {last_step}: put a copy of "
            "the log back, or move the newest checkpoints away to resume from an earlier one"
        )


def truncate_log(path: Path, last_step: int, new_line: str = "") -> None:
    """Keep the lines of steps <= last_step, byte for byte, and append `new_line`."""
    if path.exists():
        lines = [line + "\n" for line, row in _parsed_lines(path) if row["step"] <= last_step]
        write_text(path, "".join(lines) + new_line)


def read_log(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a log. Raises LogError if a line other than the last is not valid."""
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
                f"{path} line {number} is not a JSON object with a step: {line[:80]!r}; repair or "
                "remove it"
            )
