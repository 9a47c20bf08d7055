"""Pictures of states as files: a screenshot in every turn of every line would be most of the file.

A world's `state_for_people` may hold pictures as `data:image/...;base64,` addresses. Before
trajectories are written, each goes to `media/<hash>.png` beside their file, once however many turns
show it, and its place in the state becomes that relative path.

Read next: `run/rundir.py`, `replay.py`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from run.files import write_bytes
from trajectory import Trajectory

FOLDER = "media"
ADDRESS = re.compile(r"data:image/(png|jpeg|webp);base64,([A-Za-z0-9+/=\s]+)")  # of a picture
PATH = re.compile(rf"{FOLDER}/([0-9a-f]{{32}}\.(?:png|jpeg|webp))")  # of one that was put beside


def put_pictures_beside(trajectory: Trajectory, folder: Path) -> None:
    """Replace the pictures in a trajectory's states by paths of files, relative to `folder`."""

    def kept(text: str) -> str:
        found = ADDRESS.fullmatch(text)
        return put_beside(found[1], found[2], folder) or text if found else text

    if trajectory.first_state is not None:
        trajectory.first_state = texts_changed(trajectory.first_state, kept)
    for turn in trajectory.turns:
        if turn.state is not None:
            turn.state = texts_changed(turn.state, kept)


def put_beside(kind: str, encoded: str, folder: Path) -> str | None:
    """Write a picture, if it is not there; its path. None: it is none after all."""
    try:
        content = base64.b64decode(encoded)
    except binascii.Error:
        return None
    name = f"{FOLDER}/{hashlib.sha256(content).hexdigest()[:32]}.{kind}"
    if not (folder / name).exists():
        write_bytes(folder / name, content)
    return name


def texts_changed(value: Any, change: Callable[[str], str]) -> Any:
    """JSON with each of its texts changed, names of fields not.

    >>> texts_changed({"a": ["b", 1, None]}, str.upper)
    {'a': ['B', 1, None]}
    """
    if isinstance(value, dict):
        return {name: texts_changed(part, change) for name, part in value.items()}
    if isinstance(value, list):
        return [texts_changed(part, change) for part in value]
    return change(value) if isinstance(value, str) else value
