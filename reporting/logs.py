"""Logs as files: one JSON object with a `step` on each line, read back and cut back.

A crash cuts the last line short, never another one: so a bad last line is left out, and any other
is an error that names it.

Read next: reporting/metrics.py, which writes them.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from runtime.files import write_text


def truncate_log(path: Path, last_step: int, then: str = "") -> None:
    """Keep the lines of steps <= last_step, byte for byte, and add `then`; what a crash cut short
    goes too."""
    if path.exists():
        kept = [line + "\n" for line, row in _parsed_lines(path) if row["step"] <= last_step]
        write_text(path, "".join(kept) + then)


def read_log(path: str | Path) -> list[dict[str, Any]]:
    """The objects of a log. Raises ValueError for a bad line that is not a cut-short last one."""
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
            raise ValueError(
                f"{path} line {number} is not a JSON object with a step: {line[:80]!r}; "
                "a crash cuts only the last line short, so mend or remove this one"
            )
