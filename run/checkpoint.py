"""Checkpoints: written aside and renamed, loaded by anyone, resumed exactly, by any number of
processes.

    checkpoints/step_000020/    Hugging Face files: vLLM and transformers load it as it is
        trainer_state/          what only the trainer needs
            state.json          step, algorithm, model, the best so far, the KL controller
            policy/             float32 master weights and optimizer of the policy
                .metadata       which file holds which piece of which parameter
                __0_0.distcp    what rank 0 held; __1_0.distcp what rank 1 held, ...
            critic/             the same of PPO's critic
    checkpoints/best            link to the best by held-out evaluation, never deleted

Every rank writes the parameters it holds (torch.distributed.checkpoint): no process ever needs
room for the whole optimizer. Pieces are addressed by parameter name and offset, so that another
number of processes, one included, reads what it needs from whichever files hold it.

A checkpoint is complete or absent (`run/files.py`): a crash or a full disk in the middle leaves
the one before it untouched, also one of the same step. Data order, horizon, environment and
sampling seeds are pure functions of the step, on every rank, so the step restores them; there is no
cursor and no generator that could be restored wrong.

Read next: `run/session.py`. Lesson: tutorials/07_checkpoint_and_resume.md.
"""

from __future__ import annotations

import json
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

from run import unpickle
from run.errors import CheckpointError
from run.files import aside, finish_folder, new_folder, remove_folder, sweep
from scale import distributed

FORMAT = 2  # of trainer_state
STATE = "trainer_state/state.json"

T = TypeVar("T")
Parts = Mapping[str, tuple[Any, Any]]  # name -> (model, optimizer)

# With LoRA the base never changes: only what is trained is kept.
_TRAINED = StateDictOptions(ignore_frozen_params=True, strict=False)


class Unreadable(CheckpointError):
    """Files of a checkpoint are missing or broken; the one before it may do."""


def steps_saved(run_dir: Path) -> list[int]:
    """Steps that have a complete checkpoint, ascending."""
    folders = {step: folder_of(run_dir, step) for step in _steps_named(run_dir)}
    return [s for s, folder in folders.items() if (folder / STATE).exists()]


def folder_of(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step_{step:06d}"


def save(
    run_dir: Path,
    step: int,
    export: Callable[[Path], None],
    parts: Parts,
    state: Mapping[str, Any],
) -> Path:
    """Write the checkpoint of `step` and return its folder. Collective.

    Args:
        export: writes the Hugging Face files into a folder; called on every rank.
        parts: name -> (model, optimizer), saved as trainer_state/<name>/.
        state: JSON-serialisable rest.
    Raises:
        CheckpointError: the disk is full or refuses; nothing half-written stays behind.
    """
    folder = folder_of(run_dir, step)
    tmp: Path | None = None
    try:
        tmp = distributed.first("saving", lambda: _folder_aside(folder))
        export(tmp)
        for name, part in parts.items():
            _write(tmp / "trainer_state" / name, part)
        document = {"format": FORMAT, "step": step, "parts": sorted(parts), **state}
        distributed.first("saving", lambda: _complete(tmp, folder, document))
    # Four names of a full disk, the last is no Exception; ValueError: what transformers does not
    # want to save.
    except (OSError, RuntimeError, SafetensorError, ValueError, CheckpointException) as error:
        written = tmp.rglob("*") if tmp else ()
        size = sum(p.stat().st_size for p in written if p.is_file()) / 1e9
        free = shutil.disk_usage(run_dir).free / 1e9
        raise CheckpointError(
            f"checkpoint of step {step} could not be written to {folder.parent}: "
            f"{_first_line(error)} "
            f"({size:.2f} GB written, {free:.2f} GB free). "
            "Earlier checkpoints are intact; make room, then --resume"
        ) from error
    finally:
        if tmp is not None and distributed.rank() == 0:
            shutil.rmtree(tmp, ignore_errors=True)
    return folder


def _folder_aside(folder: Path) -> Path:
    sweep(folder.parents[1])
    tmp = new_folder(folder)
    (tmp / "trainer_state").mkdir()
    return tmp


def _write(folder: Path, part: tuple[Any, Any]) -> None:
    fresh = not part[1].state
    model, optimizer = get_state_dict(*part, options=_TRAINED)
    if fresh:
        # NOTE: of an optimizer that has done nothing torch takes a step, without gradients, to have
        # a state to save; that must not count as one, or a save before the first update changes it.
        for state in part[1].state.values():
            if "step" in state:
                state["step"].zero_()
    writer = dcp.FileSystemWriter(folder, sync_files=True)
    with warnings.catch_warnings(action="ignore"):  # torch's remarks on its own calls
        dcp.save(
            {"model": model, "optimizer": optimizer},
            storage_writer=writer,
            no_dist=distributed.world_size() == 1,
        )


def _complete(tmp: Path, folder: Path, document: dict[str, Any]) -> None:
    """The last file, which makes it a checkpoint, and its name."""
    trainer = tmp / "trainer_state"
    files = [p for p in trainer.rglob("*") if p.is_file()]
    sizes = {str(p.relative_to(trainer)): p.stat().st_size for p in files}
    (trainer / "state.json").write_text(json.dumps(document | {"files": sizes}, indent=1))
    finish_folder(tmp, folder)  # the same step may be saved again after a resume


def load_newest(
    run_dir: Path, expected: Mapping[str, Any], parts: Parts
) -> tuple[int, dict[str, Any]] | None:
    """Load the newest checkpoint that can be read: (step, state), or None if there is none at all.

    A newer one that cannot be read is named in a line and renamed to unreadable_step_000020, so
    that it does not count as one of the newest to keep. Collective.
    Raises:
        CheckpointError: none can be read; or the newest that can is not of this kind of run.
    """
    broken: dict[int, str] = {}
    for step in reversed(_steps_named(run_dir)):
        try:
            state = _on_first_rank(partial(read_state, run_dir, step, expected))
            load(run_dir, step, parts)
        except Unreadable as error:
            broken[step] = str(error)
            continue
        for newer, problem in broken.items():
            put_away = distributed.first("resuming", partial(_put_away, run_dir, newer))
            distributed.say(f"{problem}; it is now {put_away.name}, and step {step} is resumed")
        return step, state
    if broken:
        first = next(iter(broken.values()))
        raise CheckpointError(
            f"{first}; no checkpoint of {run_dir} can be read: put a copy back, or start a new run"
        )
    return None


def _steps_named(run_dir: Path) -> list[int]:
    """Steps of which there is a folder, complete or not, ascending."""
    names = [p.name for p in (run_dir / "checkpoints").glob("step_*")]
    return sorted(int(m.group(1)) for name in names if (m := re.fullmatch(r"step_(\d+)", name)))


def _on_first_rank(read: Callable[[], T]) -> T:
    """The result of rank 0 on every rank, and its `Unreadable` too: all must go on from the same
    checkpoint. Collective."""

    def verdict() -> tuple[T | None, str | None]:
        try:
            return read(), None
        except Unreadable as error:
            return None, str(error)

    result, problem = distributed.first("resuming", verdict)
    if problem is not None:
        raise Unreadable(problem)
    return result  # type: ignore[return-value]


def _put_away(run_dir: Path, step: int) -> Path:
    folder = folder_of(run_dir, step)
    put_away = folder.with_name(f"unreadable_{folder.name}")
    if put_away.exists():
        remove_folder(put_away)
    best = run_dir / "checkpoints" / "best"
    if best.resolve() == folder.resolve():
        best.unlink()
    folder.rename(put_away)
    return put_away


def read_state(run_dir: Path, step: int, expected: Mapping[str, Any]) -> dict[str, Any]:
    """The `state` of a checkpoint, once all its files are there and it is of this kind of run.

    Args:
        expected: what must agree with the saved state, e.g. {"algorithm": "grpo"}.
    Raises:
        Unreadable: missing or truncated files.
        CheckpointError: another algorithm or model, another format.
    """
    path = folder_of(run_dir, step) / STATE
    folder = path.parent
    try:
        state = json.loads(path.read_text(encoding="utf-8"))
        written_by, sizes = int(state["format"]), dict(state.get("files", {}))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Unreadable(_unreadable(path, error)) from error
    if written_by != FORMAT:
        older = "an older version of this program wrote it; resume with that one, or start anew"
        newer = f"this program reads {FORMAT}; update it"
        why = newer if written_by > FORMAT else older
        raise CheckpointError(f"{folder} has format {written_by}: {why}")
    for name, size in sizes.items():
        file = folder / name
        found = file.stat().st_size if file.exists() else None
        if found != size:
            problem = "missing" if found is None else f"{found} bytes long instead of {size}"
            raise Unreadable(_unreadable(folder, f"{name} is {problem}"))
    for name, value in expected.items():
        if name not in state:
            raise Unreadable(_unreadable(path, f"it says nothing of {name}"))
        if state[name] != value:
            flag = "--" + name.replace("_", "-")
            raise CheckpointError(
                f"{folder} was trained with {flag} {state[name]}, not {value}; "
                "use the same or a new run"
            )
    return state


def load(run_dir: Path, step: int, parts: Parts) -> None:
    """Put the saved weights and optimizer states into `parts`, however many processes hold them.

    Collective.
    Raises:
        Unreadable: they do not fit these models, or cannot be read.
        CheckpointError: they hold more than data (run/unpickle.py).
    """
    folder = folder_of(run_dir, step) / "trainer_state"
    for name, part in parts.items():
        index = _on_first_rank(partial(_read_index, folder / name))
        model, optimizer = get_state_dict(*part, options=_TRAINED)
        try:
            with warnings.catch_warnings(action="ignore"):  # torch's remarks on its own calls
                dcp.load(
                    {"model": model, "optimizer": optimizer},
                    storage_reader=unpickle.Reader(folder / name, index),
                    planner=unpickle.Planner(folder / name),
                    no_dist=distributed.world_size() == 1,
                )
        except (OSError, RuntimeError, ValueError, CheckpointException) as error:
            cause = _cause(error)
            if isinstance(cause, unpickle.UnsafePickle):
                raise CheckpointError(str(cause)) from None
            raise Unreadable(_unreadable(folder / name, cause)) from error
        set_state_dict(*part, model_state_dict=model, optim_state_dict=optimizer, options=_TRAINED)


def _read_index(folder: Path) -> Metadata:
    try:
        return unpickle.read_index(folder)
    except unpickle.UnsafePickle as error:
        raise CheckpointError(str(error)) from None
    except (OSError, ValueError) as error:
        raise Unreadable(_unreadable(folder, error)) from error


def mark_best(run_dir: Path, step: int) -> None:
    """Point checkpoints/best at `step`, atomically."""
    with aside(run_dir / "checkpoints" / "best") as new:
        new.symlink_to(folder_of(run_dir, step).name)


def prune(run_dir: Path, keep_last: int) -> None:
    """Delete all but the newest `keep_last` checkpoints and the best, and what kills have left."""
    sweep(run_dir)
    best = (run_dir / "checkpoints" / "best").resolve().name
    for step in steps_saved(run_dir)[:-keep_last]:
        folder = folder_of(run_dir, step)
        if folder.name != best:
            remove_folder(folder)


def _unreadable(path: Path, error: BaseException | str) -> str:
    return f"{path} cannot be read, it may be truncated: {_first_line(error)}"


def _cause(error: BaseException) -> BaseException:
    """What happened; torch wraps it into a report by rank, with tracebacks."""
    causes = (
        [c for c, _ in error.failures.values()] if isinstance(error, CheckpointException) else []
    )
    return causes[0] if causes else error


def _first_line(error: BaseException | str) -> str:
    cause = _cause(error) if isinstance(error, BaseException) else error
    return (str(cause).strip() or type(cause).__name__).splitlines()[0]
