"""A checkpoint holds the model in a format anyone can load, and everything a resumed run needs.

    checkpoints/step_000020/    Hugging Face files, which vLLM and transformers can load
        trainer_state/
            state.json          step, algorithm, model, best evaluation, sentinels
            SHA256SUMS          checksums of all other files, in the format of `sha256sum`
            policy/  critic/    float32 master weights and optimizer state; critic/ only with PPO
                .metadata       index: which file holds which piece of which parameter
                __0_0.distcp    the pieces that rank 0 held; __1_0.distcp those of rank 1, ...
    checkpoints/best            link to the best checkpoint by held-out evaluation, never deleted

Each rank writes the pieces it holds, so no process needs memory for the full optimizer state. They
are read by name and offset, so a run can be resumed with a different number of processes. A
checkpoint is either complete or absent; after a crash or on a full disk, the previous one is intact
(`run/files.py`). Horizon, seeds and order of tasks depend only on the step number (with
--task-sampling uncertain also on the outcomes so far, which state.json holds), so a resume does not
have to restore a position in the data or the state of a random generator.

Read next: `run/session.py`. Lesson: tutorials/07_checkpoint_and_resume.md.
"""

from __future__ import annotations

import hashlib
import io
import json
import pickle
import re
import shutil
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

from run.errors import CheckpointError
from run.files import atomic_path, finish_folder, new_folder, remove_folder
from scale import distributed

FORMAT = 2  # version of trainer_state/
STATE = "trainer_state/state.json"
CHECKSUMS = "trainer_state/SHA256SUMS"

Parts = Mapping[str, tuple[Any, Any]]  # name -> (model, optimizer)


def _options(model: Any) -> StateDictOptions:
    """With LoRA only the adapters are saved, unless a reset merges them into the base."""
    with_frozen = getattr(model, "resets_adapters", False)
    return StateDictOptions(ignore_frozen_params=not with_frozen, strict=False)


def folder_of(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step_{step:06d}"


def steps_saved(run_dir: Path) -> list[int]:
    """Steps that have a checkpoint, ascending."""
    names = [p.name for p in (run_dir / "checkpoints").glob("step_*")]
    return sorted(int(m.group(1)) for name in names if (m := re.fullmatch(r"step_(\d+)", name)))


# ------------------------------------------------------------------------------------------ writing


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
        state: other values for state.json; must be JSON-serialisable.
    Raises:
        CheckpointError: weights or moments are not finite, or the disk is full or not writable; no
            partial checkpoint is left behind.
    """
    _require_finite(step, parts)
    folder = folder_of(run_dir, step)
    tmp: Path | None = None
    document = {"format": FORMAT, "step": step, "parts": sorted(parts), **state}
    try:
        tmp = new = distributed.run_on_rank_0("saving", lambda: new_folder(folder))
        export(new)
        for name, part in parts.items():
            _write(new / "trainer_state" / name, part)
        text = json.dumps(document, indent=1)
        distributed.run_on_rank_0("saving", lambda: (new / STATE).write_text(text))
        sums = "".join(f"{line}\n" for line in _checksums_of(new))
        distributed.run_on_rank_0("saving", lambda: (new / CHECKSUMS).write_text(sums))
        distributed.run_on_rank_0("saving", lambda: finish_folder(new, folder))
    # ValueError: transformers refuses to save this model. A full disk can raise any of the others.
    except (OSError, RuntimeError, SafetensorError, ValueError, CheckpointException) as error:
        free = shutil.disk_usage(run_dir).free / 1e9
        raise CheckpointError(
            f"the checkpoint of step {step} could not be written to {folder.parent}: "
            f"{_first_line(error)} ({free:.2f} GB free). "
            "Earlier checkpoints are intact; free some disk space, then --resume"
        ) from error
    finally:
        if tmp is not None and distributed.rank() == 0:
            shutil.rmtree(tmp, ignore_errors=True)
    return folder


def _require_finite(step: int, parts: Parts) -> None:
    """Refuse weights and moments that are NaN or infinite: no run could continue from them, and
    they would replace the last good checkpoint."""
    for name, (model, optimizer) in parts.items():
        trained = [p for p in model.parameters() if p.requires_grad]
        moments = [x for state in optimizer.state.values() for x in state.values()]
        tensors = [distributed.local_part(x) for x in trained + moments if torch.is_tensor(x)]
        if not all(distributed.gather(all(bool(x.isfinite().all()) for x in tensors))):
            raise CheckpointError(
                f"step {step} is not saved, because the weights of the {name} or their moments are "
                "not finite. Earlier checkpoints are intact: start a new run from the last one, "
                "with a lower --learning-rate"
            )


def _write(folder: Path, part: tuple[Any, Any]) -> None:
    model, optimizer = part
    # If the optimizer has no state yet, get_state_dict would create one by taking a step, with
    # gradients as large as the weights.
    optimizers = (optimizer,) if optimizer.state else ()
    model_state, optimizer_state = get_state_dict(model, optimizers, options=_options(model))
    with warnings.catch_warnings(action="ignore"):  # torch warns about calls that it makes itself
        dcp.save(
            {"model": model_state, "optimizer": optimizer_state},
            storage_writer=dcp.FileSystemWriter(folder, sync_files=True),
            no_dist=distributed.world_size() == 1,
        )


def _checksums_of(folder: Path) -> list[str]:
    """A line of SHA256SUMS for each file. Collective: each rank reads a share of the files."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file())

    def work() -> list[str]:
        lines = []
        for path in paths[distributed.rank() :: distributed.world_size()]:
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            lines.append(f"{digest}  {path.relative_to(folder)}")
        return lines

    parts = distributed.run_on_every_rank("computing checksums", work)
    return [line for part in parts for line in part]


def mark_best(run_dir: Path, step: int) -> None:
    """Point checkpoints/best at `step`."""
    best = run_dir / "checkpoints" / "best"
    if best.is_dir() and not best.is_symlink():
        distributed.say(f"{best} is a folder, as in a copied run; replacing it by a link")
        remove_folder(best)
    with atomic_path(best) as new:
        new.symlink_to(folder_of(run_dir, step).name)


def prune(run_dir: Path, keep_last: int) -> None:
    """Delete all but the newest `keep_last` checkpoints and the best one."""
    best = (run_dir / "checkpoints" / "best").resolve().name
    for step in steps_saved(run_dir)[:-keep_last]:
        folder = folder_of(run_dir, step)
        if folder.name == best:
            continue
        if folder.is_symlink():
            distributed.say(f"deleting the link {folder}, but not its target {folder.resolve()}")
            folder.unlink()
        else:
            remove_folder(folder)


# ------------------------------------------------------------------------------------------ reading


def load_newest(
    run_dir: Path, expected: Mapping[str, Any], parts: Parts
) -> tuple[int, dict[str, Any]] | None:
    """Load the newest checkpoint: (step, state), or None if there is none. Collective.

    Raises:
        CheckpointError: it cannot be read, or belongs to another kind of run. An older checkpoint
            is never used silently; the message says how to resume from it.
    """
    steps = steps_saved(run_dir)
    if not steps:
        return None
    _verify(folder_of(run_dir, steps[-1]))
    state = distributed.run_on_rank_0("resuming", partial(read_state, run_dir, steps[-1], expected))
    load(run_dir, steps[-1], parts)
    return steps[-1], state


def _verify(folder: Path) -> None:
    """Compare the files of a checkpoint with their checksums. Collective."""
    path = folder / CHECKSUMS
    if not path.exists():
        distributed.say(f"note: {folder} has no checksums, so damage to it may not be noticed")
        return
    expected = path.read_text(errors="replace").splitlines()
    if changed := set(expected) - set(_checksums_of(folder)):
        name = min(line[66:] for line in changed)  # after the digest and two blanks
        raise _unreadable(folder, f"{name} is missing or has changed since it was written")


def read_state(run_dir: Path, step: int, expected: Mapping[str, Any]) -> dict[str, Any]:
    """Read the `state` of a checkpoint and check that it belongs to this kind of run.

    Args:
        expected: values that the saved state must have, e.g. {"algorithm": "grpo"}.
    Raises:
        CheckpointError: it cannot be read, or has a different algorithm, model or format.
    """
    path = folder_of(run_dir, step) / STATE
    try:
        state: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        saved_format = state.get("format")
    except (OSError, ValueError, AttributeError) as error:
        raise _unreadable(path, error) from error
    if saved_format != FORMAT:
        raise CheckpointError(
            f"{path.parent} has format {saved_format}, but this program reads {FORMAT}: "
            "resume with the version that wrote it, or start a new run"
        )
    for name, value in expected.items():
        if (saved := state.get(name)) != value:
            option = f"--{name.replace('_', '-')} {saved}"
            raise CheckpointError(
                f"{path.parent} was trained with {option}, not {value}; start a new run"
            )
    return state


def load(run_dir: Path, step: int, parts: Parts) -> None:
    """Load the saved weights and optimizer states into `parts`. Collective.

    Raises:
        CheckpointError: they cannot be read, or do not fit these models.
    """
    folder = folder_of(run_dir, step) / "trainer_state"
    for name, (model, optimizer) in parts.items():
        reader = _Reader(folder / name)
        index = distributed.run_on_rank_0("resuming", reader.read_metadata)
        has_state = any(key.startswith("optimizer.") for key in index.state_dict_metadata)
        optimizers = (optimizer,) if has_state else ()
        model_state, optimizer_state = get_state_dict(model, optimizers, options=_options(model))
        try:
            with warnings.catch_warnings(action="ignore"):  # as in `_write`
                dcp.load(
                    {"model": model_state, "optimizer": optimizer_state},
                    storage_reader=reader,
                    planner=_Planner(),
                    no_dist=distributed.world_size() == 1,
                )
        except (OSError, RuntimeError, ValueError, CheckpointException) as error:
            raise _unreadable(folder / name, error) from error
        set_state_dict(
            model,
            optimizers,
            model_state_dict=model_state,
            optim_state_dict=optimizer_state,
            options=_options(model),
        )


# Unpickling can call any function that the pickle names, and people share checkpoints. torch
# unpickles the index, and the values that are not tensors, without restrictions. Here the index can
# only name the classes that torch writes into it, and the values are read with `weights_only`.

_ALLOWED = {
    "torch.distributed.checkpoint.metadata": {
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata"),
        *("ChunkStorageMetadata", "BytesStorageMetadata", "TensorProperties"),
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch": {"Size", *(name for name, x in vars(torch).items() if isinstance(x, torch.dtype))},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath"},
    "pathlib._local": {"PosixPath"},  # the same, from Python 3.13 on
}


class _IndexUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which our checkpoints never name")


class _Reader(dcp.FileSystemReader):
    """torch's reader, with a safe way to read the index."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / ".metadata"
        try:
            with open(path, "rb") as file:
                index = _IndexUnpickler(file).load()
            for place in index.storage_data.values():
                if Path(place.relative_path).name != str(place.relative_path):
                    raise ValueError(f"it points outside its folder: {place.relative_path}")
            return index
        except Exception as error:  # a broken pickle can raise almost anything
            raise _unreadable(path, error) from error


class _Planner(dcp.DefaultLoadPlanner):
    """torch's planner, with a safe way to read the values that are not tensors."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        try:
            data = torch.load(value, weights_only=True)
        except pickle.UnpicklingError:  # its message advises weights_only=False, which is unsafe
            raise ValueError(
                f"{name} is not plain data, as all values in our checkpoints are"
            ) from None
        set_element(self.original_state_dict, self.mappings[name], data)


def _unreadable(path: Path, error: BaseException | str) -> CheckpointError:
    folder = next(p for p in (path, *path.parents) if p.parent.name == "checkpoints")
    return CheckpointError(
        f"{path} cannot be used: {_first_line(error)}; put a copy back, or move {folder} away to "
        "resume from the previous checkpoint"
    )


def _first_line(error: BaseException | str) -> str:
    """The cause of an error, without torch's per-rank report and tracebacks."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return (str(error).strip() or type(error).__name__).splitlines()[0]
