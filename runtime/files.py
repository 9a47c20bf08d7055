"""Files that are whole or absent: written aside, flushed to the disk, renamed.

A process can be killed between any two instructions, and a reader may look at any moment. So
nothing is ever written under the name it will be read by:

    write .NAME.xxxx  ->  flush and fsync  ->  rename to NAME  ->  fsync the folder

The rename is atomic: NAME is the old content or the new one. Whatever dies before it leaves a
hidden file that nobody reads.

Read next: `checkpoint.py`, whose folders are written the same way.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def aside(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to, with its suffix; it becomes `path` when the block ends.

    >>> folder = Path(tempfile.mkdtemp())
    >>> with aside(folder / "a.txt") as new:
    ...     _ = new.write_text("whole")
    >>> [(file.name, file.read_text()) for file in folder.iterdir()]
    [('a.txt', 'whole')]
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.stem}-{os.getpid()}{path.suffix}")
    try:
        yield new
        flush(new)
        os.replace(new, path)
        flush(path.parent)
    finally:
        new.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """`text` in UTF-8."""
    with aside(path) as new:
        new.write_text(text, encoding="utf-8")


def write_json(path: Path, content: Any, indent: int = 1) -> None:
    """`content` as JSON; a number that is not finite is a ValueError."""
    write_text(path, json.dumps(content, indent=indent, allow_nan=False) + "\n")


def build_folder(folder: Path, build: Callable[[Path], None]) -> None:
    """Run `build(new)` on an empty folder beside `folder`, which then gets the name."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    new = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        build(new)
        if not folder.exists():  # another process may have been faster; its result is as good
            new.rename(folder)
    finally:
        shutil.rmtree(new, ignore_errors=True)


def flush(path: Path) -> None:
    """Have the system write a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
