"""Files: how a user's files are read, and atomic writes.

A file or folder that we write is complete or absent, even if the process is killed:

    write .new-xxxx-NAME  ->  flush it to disk  ->  rename it to NAME  ->  flush the folder

The rename is atomic, so a reader sees either the old content or the new content. If the process is
killed before the rename, it leaves a hidden file, which `sweep` deletes.

Read next: `run/checkpoint.py`, which writes folders this way from several processes.
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

UNFINISHED = ".new-"  # prefix of unfinished files and folders


def cache_dir() -> Path:
    """The folder of converted models, warm starts and indices: $AGENT_RL_CACHE or .cache/."""
    return Path(os.environ.get("AGENT_RL_CACHE") or Path(__file__).parents[1] / ".cache")


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside `path`, with the same suffix. When the block ends, the file
    written there is renamed to `path`.

    >>> folder = Path(tempfile.mkdtemp())
    >>> with atomic_path(folder / "a.txt") as new:
    ...     _ = new.write_text("complete")
    >>> [(file.name, file.read_text()) for file in folder.iterdir()]
    [('a.txt', 'complete')]
    """
    make_folder(path.parent)
    new = path.with_name(f"{UNFINISHED}{secrets.token_hex(4)}-{path.name}")
    try:
        yield new
        flush(new)
        os.replace(new, path)
        flush(path.parent)
    finally:
        new.unlink(missing_ok=True)


def read_text(path: str | Path, max_bytes: int = 1 << 26) -> str:
    """The text of a file that the user names. Raises ValueError, naming the file, if it cannot be
    read, is too large, or is not a regular file: reading a pipe or a device might never end."""
    path = Path(path)
    if path.exists() and not path.is_file():
        raise ValueError(f"{path} is a folder, a pipe or a device; give a regular file")
    try:
        if (size := path.stat().st_size) > max_bytes:
            raise ValueError(f"{path} has {size:,} bytes; at most {max_bytes:,} are read")
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as UTF-8 text ({error})") from error


def write_text(path: Path, text: str) -> None:
    with atomic_path(path) as new:
        new.write_text(text, encoding="utf-8")


def write_json(path: Path, content: Any, indent: int = 1) -> None:
    """Write `content` as JSON. Raises ValueError for a number that is not finite."""
    write_text(path, json.dumps(content, indent=indent, allow_nan=False) + "\n")


def build_folder(folder: Path, build: Callable[[Path], None]) -> None:
    """Call `build` with an empty folder and rename the result to `folder`. If another process
    finished first, its result is kept."""
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
    """Make an empty folder beside `folder`; `finish_folder` renames it to `folder`."""
    make_folder(folder.parent)
    new = Path(tempfile.mkdtemp(prefix=UNFINISHED, suffix=f"-{folder.name}", dir=folder.parent))
    new.chmod(0o755)  # mkdtemp makes it private
    return new


def finish_folder(new: Path, folder: Path) -> None:
    """Flush the files in `new` to disk and rename it to `folder`. Raises OSError if `folder`
    already has files."""
    for path in (*new.rglob("*"), new):
        flush(path)
    new.rename(folder)
    flush(folder.parent)


def remove_folder(folder: Path) -> None:
    """Rename the folder, then delete it, so that a killed process does not leave half of it."""
    shutil.rmtree(folder.rename(new_folder(folder)))


def make_folder(folder: Path) -> None:
    """`mkdir -p`, flushed to disk: a power failure must not lose the folder and its files."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        flush(path.parent)


def sweep(folder: Path) -> None:
    """Delete files that killed processes left in `folder`. No process may be writing there now."""
    for unfinished in list(folder.rglob(f"{UNFINISHED}*")):
        if unfinished.is_dir() and not unfinished.is_symlink():
            shutil.rmtree(unfinished, ignore_errors=True)
        else:
            unfinished.unlink(missing_ok=True)


def weights_digest(folder: Path) -> str:
    """Digest of the weight files in a folder; "" if there are none. For speed it covers
    only their names, sizes and 64 samples of 4 KB each, which is enough to detect a change."""
    digest, paths = hashlib.sha256(), sorted(folder.glob("*.safetensors"))
    for path in paths:
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with open(path, "rb") as file:
            for sample in range(64):
                file.seek(size * sample // 64)
                digest.update(file.read(4096))
    return digest.hexdigest() if paths else ""


def flush(path: Path) -> None:
    """Force a file, or the list of names in a folder, onto the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
