"""Files and folders that are whole or absent, although a process can be killed at any instant.

    write .new-xxxx-NAME  ->  flush it to the disk  ->  rename to NAME  ->  flush the folder

The rename is atomic: a reader finds the old content or the new one. A kill before it leaves a
hidden file that `sweep` removes.

Read next: `run/checkpoint.py`, whose folders many processes write this way.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ASIDE = ".new-"  # prefix of anything unfinished


def cache_dir() -> Path:
    """Where converted models, warm starts and indices are kept: $AGENT_RL_CACHE or .cache/."""
    return Path(os.environ.get("AGENT_RL_CACHE") or Path(__file__).parents[1] / ".cache")


@contextlib.contextmanager
def aside(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to, with its suffix; it becomes `path` when the block ends.

    >>> folder = Path(tempfile.mkdtemp())
    >>> with aside(folder / "a.txt") as new:
    ...     _ = new.write_text("whole")
    >>> [(file.name, file.read_text()) for file in folder.iterdir()]
    [('a.txt', 'whole')]
    """
    make_folder(path.parent)
    new = path.with_name(f"{ASIDE}{secrets.token_hex(4)}-{path.name}")
    try:
        yield new
        flush(new)
        os.replace(new, path)
        flush(path.parent)
    finally:
        new.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    with aside(path) as new:
        new.write_text(text, encoding="utf-8")


def write_json(path: Path, content: Any, indent: int = 1) -> None:
    """`content` as JSON; a number that is not finite is a ValueError."""
    write_text(path, json.dumps(content, indent=indent, allow_nan=False) + "\n")


def build_folder(folder: Path, build: Callable[[Path], None]) -> None:
    """Run `build(new)` on an empty folder and rename it to `folder`; if another process was faster,
    its result stays."""
    new = new_folder(folder)
    try:
        build(new)
        finish_folder(new, folder)
    except OSError:
        if not folder.is_dir():
            raise
    finally:
        shutil.rmtree(new, ignore_errors=True)


def new_folder(folder: Path) -> Path:
    """An empty folder beside `folder`, to be renamed to it."""
    make_folder(folder.parent)
    new = Path(tempfile.mkdtemp(prefix=ASIDE, suffix=f"-{folder.name}", dir=folder.parent))
    new.chmod(0o755)  # mkdtemp lets nobody else read
    return new


def finish_folder(new: Path, folder: Path) -> None:
    """Rename `new` to `folder`, once its files are on the disk; OSError if that one has files."""
    for path in (*new.rglob("*"), new):
        flush(path)
    new.rename(folder)
    flush(folder.parent)


def remove_folder(folder: Path) -> None:
    """Renamed first: a kill must not leave half of it under its name."""
    shutil.rmtree(folder.rename(new_folder(folder)))


def make_folder(folder: Path) -> None:
    """`mkdir -p`, with the names flushed to the disk: a file is lost with the folder it is in."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        flush(path.parent)


def sweep(folder: Path) -> None:
    """Delete what killed processes left in `folder`; nobody may be writing there."""
    for unfinished in list(folder.rglob(f"{ASIDE}*")):
        if unfinished.is_dir() and not unfinished.is_symlink():
            shutil.rmtree(unfinished, ignore_errors=True)
        else:
            unfinished.unlink(missing_ok=True)


def weights_digest(folder: Path) -> str:
    """Digest of names, sizes and 64 places of each weight file in a folder; "" where there are
    none. Other weights differ there, and reading so little takes no time."""
    digest, paths = hashlib.sha256(), sorted(folder.glob("*.safetensors"))
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with open(path, "rb") as file:
            for place in range(64):
                file.seek(size * place // 64)
                digest.update(file.read(4096))
    return digest.hexdigest() if paths else ""


def flush(path: Path) -> None:
    """Have the system write a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
