"""Pictures of states as files: a screenshot in every turn of every line would be most of the file.

A world's `state_for_people` may hold pictures as `data:image/...;base64,` addresses. Before
trajectories are written, each goes to `media/<hash>.png` beside their file, once however many turns
show it, and its place in the state becomes that relative path.

Read next: `runtime/rundir.py`, `replay.py`.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import re
from pathlib import Path
from typing import Any

from runtime.files import write_bytes
from trajectory import Trajectory

FOLDER = "media"
PICTURE = re.compile(r"data:image/(png|jpeg|webp);base64,([A-Za-z0-9+/=\s]+)")


def put_pictures_beside(trajectory: Trajectory, folder: Path) -> None:
    """Replace the pictures in a trajectory's states by paths of files, relative to `folder`."""
    if trajectory.first_state is not None:
        trajectory.first_state = _put(trajectory.first_state, folder)
    for turn in trajectory.turns:
        if turn.state is not None:
            turn.state = _put(turn.state, folder)


def _put(value: Any, folder: Path) -> Any:
    if isinstance(value, dict):
        return {name: _put(part, folder) for name, part in value.items()}
    if isinstance(value, list):
        return [_put(part, folder) for part in value]
    found = PICTURE.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        return value
    try:
        content = base64.b64decode(found[2], validate=False)
    except binascii.Error:  # no picture after all: stays the text that it is
        return value
    name = f"{FOLDER}/{hashlib.sha256(content).hexdigest()[:32]}.{found[1]}"
    if not (folder / name).exists():
        write_bytes(folder / name, content)
    return name
