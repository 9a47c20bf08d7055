"""Warm starts that come with the project: nobody waits for the minutes that making one takes.

    recipes/starts/<model>-<env>/adapter_model.safetensors    LoRA's adapters, bfloat16, 5 MB
                                 adapter_config.json          their rank, in peft's format
                                 sft.json                     how they were trained, and on what

One is used in place of training where training would see the same: the same model, demonstrations
(by the hash of their texts) and settings. Another list of tasks, another prompt, a change of the
world's texts: then it is made here. recipes/starts/README.md has the command that made them.

Read next: `warmstart.py`, which asks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from conversations import Conversation
from envs import env_name
from runtime.startconfig import SftSettings

STARTS = Path(__file__).parents[1] / "recipes" / "starts"
ABOUT = "sft.json"


def hash_of(records: Sequence[Conversation]) -> str:
    """Of the demonstrations' tasks and texts."""
    return hashlib.sha256(json.dumps(records).encode()).hexdigest()


def settings_for(model: str, env: str) -> SftSettings:
    """How a warm start of `model` in `env` is trained: as the one that comes with the project was,
    where there is one."""
    about = _about(model, env)
    return SftSettings(**about["settings"]) if about else SftSettings()


def shipped(
    model: str, env: str, records: Sequence[Conversation], settings: SftSettings
) -> Path | None:
    """The folder of the adapters that training on these would make; None where none come with the
    project."""
    about = _about(model, env)
    if not about or about["records"] != hash_of(records):
        return None
    return _folder(model, env) if SftSettings(**about["settings"]) == settings else None


def _folder(model: str, env: str) -> Path:
    return STARTS / f"{model}-{env_name(env)}"


def _about(model: str, env: str) -> dict[str, Any] | None:
    file = _folder(model, env) / ABOUT
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None
