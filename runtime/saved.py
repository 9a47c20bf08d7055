"""A run's options, read back from what it left: for `--resume`.

Read first: `config.py`, the options.
"""

from __future__ import annotations

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from config import Config, Misuse, flag

# How far, where and how much at a time: what a resumed run may change.
CHANGEABLE = {
    *("steps", "env_addr", "run_dir", "resume", "save_every", "keep_last", "record_state"),
    *("engine_url", "engine_devices", "on_collapse", "log_to"),
    *("max_tokens_per_micro_batch", "gradient_checkpointing", "precision"),
}


def saved_config(run_dir: str | None) -> Config:
    """The options that the run in `run_dir` was started with.

    Raises:
        Misuse: no --run-dir was given, or it holds no run.
    """
    if not run_dir:
        raise Misuse("--resume needs --run-dir, the run to go on with")
    path = Path(run_dir) / "config.json"
    if not path.exists():
        raise Misuse(f"--run-dir {run_dir} holds no run to resume")
    known = {f.name for f in fields(Config)}
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))["config"]
        options: dict[str, Any] = {
            n: tuple(v) if isinstance(v, list) else v for n, v in saved.items() if n in known
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Misuse(
            f"{path} is not the config.json of a run ({error}); put its copy back, or start anew"
        ) from None
    return replace(Config(**options), run_dir=run_dir, resume=True)


def check_unchanged(given: Config, saved: Config) -> None:
    """Raise Misuse for an option given on resume that the run was not started with."""
    changed = [
        flag(f.name)
        for f in fields(Config)
        if f.name not in CHANGEABLE and getattr(given, f.name) != getattr(saved, f.name)
    ]
    if changed:
        raise Misuse(
            f"--resume keeps the run's own options; leave out {' '.join(changed)}, "
            "or start a new run"
        )
