"""Checkpoints: written aside and renamed, loaded by anyone, resumed exactly.

    checkpoints/step_000020/    Hugging Face files: vLLM and transformers load it as it is
        trainer_state/          what only the trainer needs
            state.json          step, algorithm, model, the best so far, the KL controller
            policy.pt           float32 master weights and optimizer of the policy
            critic.pt           the same of PPO's critic
    checkpoints/best            link to the best by held-out evaluation, never deleted

A checkpoint is complete or absent: it is written under a temporary name, flushed to the disk and
renamed, and a crash or a full disk in the middle leaves the one before it untouched. Data order,
horizon and sampling seeds are pure functions of the step, so the step restores them; there is no
cursor that could be restored wrong. The reference loses its place in the data on resume and runs 99
of the next 100 steps at the wrong horizon.

Read next: `train.py`.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError

from models import PolicyModel, save_policy

FORMAT = 1  # of trainer_state; a newer one is refused


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the message says what to do."""


def steps_saved(run_dir: Path) -> list[int]:
    """Steps that have a complete checkpoint, ascending."""
    names = [
        p.name
        for p in (run_dir / "checkpoints").glob("step_*")
        if (p / "trainer_state/state.json").exists()
    ]
    return sorted(int(m.group(1)) for name in names if (m := re.fullmatch(r"step_(\d+)", name)))


def folder_of(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step_{step:06d}"


def save(
    run_dir: Path,
    step: int,
    policy: PolicyModel,
    tokenizer: Any,
    parts: dict[str, dict[str, Any]],
    state: dict[str, Any],
) -> Path:
    """Write the checkpoint of `step` and return its folder.

    Args:
        parts: name -> state dicts, saved as trainer_state/<name>.pt: {"policy": {"model": ...,
            "optimizer": ...}}.
        state: JSON-serialisable rest.
    Raises:
        CheckpointError: the disk is full or refuses; nothing half-written stays behind.
    """
    folder = folder_of(run_dir, step)
    folder.parent.mkdir(parents=True, exist_ok=True)
    tmp = Path(tempfile.mkdtemp(prefix=f".step_{step:06d}-", dir=folder.parent))
    try:
        save_policy(policy, tokenizer, tmp)
        (tmp / "trainer_state").mkdir()
        for name, content in parts.items():
            torch.save(content, tmp / "trainer_state" / f"{name}.pt")
        document = {"format": FORMAT, "step": step, "parts": sorted(parts), **state}
        (tmp / "trainer_state/state.json").write_text(json.dumps(document, indent=1))
        for path in tmp.rglob("*"):
            if path.is_file():
                _flush(path)
        if folder.exists():  # the same step saved again after a resume
            shutil.rmtree(folder)
        tmp.rename(folder)
    except (OSError, RuntimeError, SafetensorError) as error:  # three names of a full disk
        size = sum(p.stat().st_size for p in tmp.rglob("*") if p.is_file()) / 1e9
        free = shutil.disk_usage(folder.parent).free / 1e9
        raise CheckpointError(
            f"checkpoint of step {step} could not be written to {folder.parent}: "
            f"{_first_line(error)} "
            f"({size:.2f} GB written, {free:.2f} GB free). "
            "Earlier checkpoints are intact; make room, then --resume"
        ) from error
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
    return folder


def load(
    run_dir: Path, step: int, algorithm: str, device: Any = "cpu"
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """(state, parts) of a checkpoint, as `save` took them.

    Raises:
        CheckpointError: missing or truncated files, another algorithm, or a newer format.
    """
    folder = folder_of(run_dir, step) / "trainer_state"
    try:
        state = json.loads((folder / "state.json").read_text())
        parts = {
            name: torch.load(folder / f"{name}.pt", map_location=device, weights_only=True)
            for name in state["parts"]
        }
    except (OSError, ValueError, KeyError, RuntimeError, EOFError, UnpicklingError) as error:
        raise CheckpointError(
            f"{folder} cannot be read, it may be truncated: {_first_line(error)}"
        ) from error
    if state["format"] > FORMAT:
        raise CheckpointError(
            f"{folder} has format {state['format']}, this program reads up to {FORMAT}; update it"
        )
    if state["algorithm"] != algorithm:
        raise CheckpointError(
            f"{folder} was trained with --algorithm {state['algorithm']}, not {algorithm}; "
            "use the same or a new run"
        )
    return state, parts


def mark_best(run_dir: Path, step: int) -> None:
    """Point checkpoints/best at `step`, atomically."""
    link = run_dir / "checkpoints" / "best"
    new = link.with_name(".best")
    new.unlink(missing_ok=True)
    new.symlink_to(folder_of(run_dir, step).name)
    os.replace(new, link)


def prune(run_dir: Path, keep_last: int) -> None:
    """Delete all but the newest `keep_last` checkpoints and the best."""
    best = (run_dir / "checkpoints" / "best").resolve().name
    for step in steps_saved(run_dir)[:-keep_last]:
        folder = folder_of(run_dir, step)
        if folder.name != best:
            shutil.rmtree(folder)


def _flush(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
