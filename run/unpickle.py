"""Reading a checkpoint of torch.distributed without running what is in it.

A pickle is a program: among other things it can name any function of any module and have it called
with arguments of its choice, while it is "read". torch reads two kinds of pickle in a checkpoint,

    .metadata     which file holds which piece: dataclasses of torch.distributed.checkpoint
    *.distcp      learning rates and the like among the tensors, a small pickle each

both with everything allowed. Checkpoints are copied between machines and people, so here the first
may name the classes that torch writes into it, and nothing else; for the second torch's own
`weights_only` does the same. What names another is refused before anything is called.

Read next: `run/checkpoint.py`, which loads with these two.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import set_element
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

_METADATA = "torch.distributed.checkpoint.metadata"
ALLOWED = {
    *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta")),
    *((_METADATA, f"{kind}StorageMetadata") for kind in ("Tensor", "Chunk", "Bytes")),
    *((_METADATA, name) for name in ("TensorProperties", "_MEM_FORMAT_ENCODING")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),  # looks a name up in a table
    ("pathlib", "PosixPath"),  # where it was saved
    ("pathlib._local", "PosixPath"),  # the same, from Python 3.13
}


class UnsafePickle(RuntimeError):
    """A file names what no checkpoint needs; the message says which, and what to do."""


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BufferedIOBase, path: Path) -> None:
        super().__init__(file)
        self.path = path

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in ALLOWED:
            return super().find_class(module, name)
        raise UnsafePickle(_refusal(self.path, f"names {module}.{name}"))


def read_index(folder: Path) -> Metadata:
    """The index of a checkpoint: which of its files holds which piece of what.

    Raises:
        UnsafePickle: it names something else, or files that are not beside it.
        OSError, ValueError: it cannot be read.
    """
    path = folder / ".metadata"
    try:
        with open(path, "rb") as file:
            index = _Unpickler(file, path).load()
        files = {str(info.relative_path) for info in index.storage_data.values()}
    except (OSError, UnsafePickle):
        raise
    except Exception as error:  # what is no pickle can fail in a dozen ways
        raise ValueError(f"{path} is no index of a checkpoint ({error!r})") from None
    for name in files:
        if Path(name).name != name:
            raise UnsafePickle(_refusal(path, f"points to {name}"))
    return index


class Reader(dcp.FileSystemReader):
    """torch's reader with an index that has been read already."""

    def __init__(self, folder: Path, index: Metadata) -> None:
        super().__init__(folder)
        self.index = index

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self.index


class Planner(dcp.DefaultLoadPlanner):
    """torch's planner, whose values that are no tensors are data alone.

    Raises:
        UnsafePickle: one of them names something else.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        try:
            loaded = torch.load(value, weights_only=True)
        except pickle.UnpicklingError as error:
            first = f"{name} is no plain value: {str(error).splitlines()[0]}"
            raise UnsafePickle(_refusal(self.folder, first)) from None
        set_element(self.original_state_dict, self.mappings[name], loaded)


def _refusal(path: Path, problem: str) -> str:
    return (
        f"{path} {problem}, which no checkpoint of ours does: reading it could run somebody's "
        "code, and it is refused; use a checkpoint that you trust"
    )
