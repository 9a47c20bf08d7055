"""What a command line names becomes a source: a run, an evaluation, or a file of trajectories.

    a run          config.json, metrics.jsonl, trajectories/step_*.jsonl and eval_*.jsonl
    an evaluation  eval.json and trajectories.jsonl; or a folder of each environment with both
    a file         trajectories a line, or AgentTraj conversations as .json or .jsonl

All of it is only read. Files have names ("step_000003"), and only names that a source has listed
lead to a path: nothing that a page sends is ever a path.

Read next: overview.py, trajectories.py, server.py.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from viewer.lines import Lines, parse, row_of
from viewer.tokens import Decoder, find_decoder

MOST_ROWS = 200_000  # whose heads are held at a time, over all files
READ_AT_ONCE = 20_000_000  # bytes of a source's files that a list of them may read
ALIVE_S = 600.0  # a run that has written nothing for longer is not live

FileKind = Literal["train", "eval", "other"]


class NoSource(ValueError):
    """What was named holds nothing to look at; the message says what would."""


@dataclass(frozen=True)
class TrajectoryFile:
    """A file of trajectories under the name that pages use."""

    name: str
    path: Path
    kind: FileKind
    step: int | None


class Source:
    """One thing that the command line named."""

    kind: Literal["run", "evaluation", "file"] = "file"

    def __init__(self, number: int, path: Path) -> None:
        self.number, self.path = number, path
        self.name = path.resolve().name
        self._open: OrderedDict[str, Lines] = OrderedDict()
        self._lock = threading.Lock()
        self._decoder: Decoder | None = None

    # What it is made of

    def files(self) -> list[TrajectoryFile]:
        """All there are now, in the order of steps."""
        return [TrajectoryFile(self.path.stem, self.path, "other", None)]

    def config(self) -> dict[str, Any]:
        """The options that it was made with, as far as they are known."""
        return {}

    @property
    def env(self) -> str | None:
        env = self.config().get("env")
        return str(env) if env else None

    def is_live(self) -> bool:
        return False

    def state(self) -> str:
        """What its version is made of: changes whenever there is something new to see."""
        newest = self.files()[-1:]
        return "|".join([f"{len(self.files())}", *(stamp(file.path) for file in newest)])

    # Reading

    def lines(self, name: str) -> Lines:
        """The index of a file, up to date.

        Raises: KeyError: no such file here.
        """
        return self._index(name, {file.name: file.path for file in self.files()}[name])

    def _index(self, name: str, path: Path) -> Lines:
        with self._lock:
            lines = self._open.pop(name, None)
            if lines is None or lines.path != path:
                lines = open_lines(path)
            else:
                lines.refresh()
            self._open[name] = lines
            while sum(map(len, self._open.values())) > MOST_ROWS and len(self._open) > 1:
                self._open.popitem(last=False)
            return lines

    def listing(self) -> list[dict[str, Any]]:
        """Its files as pages list them. How many trajectories one has is told where it has been
        read, or where all of them together are read in no time."""
        files = self.files()
        is_small = sum(size_of(file.path) for file in files) < READ_AT_ONCE
        shown = []
        for file in files:
            lines = self._index(file.name, file.path) if is_small else self._open.get(file.name)
            about = {"name": file.name, "kind": file.kind, "step": file.step}
            about["count"] = None if lines is None else len(lines)
            about["broken"] = 0 if lines is None else lines.broken
            shown.append(about)
        return shown

    def text_of(self, ids: list[int]) -> list[str] | None:
        """Each token's text; None without the tokenizer."""
        if self._decoder is None:
            self._decoder = find_decoder(self.tokenizer_folders())
        return None if self._decoder is None else self._decoder.texts(ids)

    def tokenizer_folders(self) -> list[Path]:
        return [self.path.parent / "tokenizer"]


class RunSource(Source):
    """The directory of a run."""

    kind = "run"

    def files(self) -> list[TrajectoryFile]:
        found = []
        for path in sorted((self.path / "trajectories").glob("*.jsonl")):
            match = re.fullmatch(r"(step|eval)_(\d+)", path.stem)
            kind: FileKind = "other" if not match else "train" if match[1] == "step" else "eval"
            found.append(TrajectoryFile(path.stem, path, kind, int(match[2]) if match else None))
        return sorted(found, key=lambda f: (f.step is None, f.step or 0, f.kind != "eval", f.name))

    def config(self) -> dict[str, Any]:
        about = read_json(self.path / "config.json")
        known = about.get("config")
        return {"algorithm": about.get("method")} | known if isinstance(known, dict) else {}

    def is_live(self) -> bool:
        """Whether it is likely to go on: it wrote a moment ago and is not at its end."""
        written = max((mtime(path) for path in (self.path, *self._logs())), default=0.0)
        steps = self.config().get("steps")
        done = self.last_step()
        return time.time() - written < ALIVE_S and not (isinstance(steps, int) and done >= steps)

    def last_step(self) -> int:
        """Of its files of trajectories, or, as not every method plays at each step, of its log."""
        played = max((f.step or 0 for f in self.files() if f.kind == "train"), default=0)
        return max([played, *(row["step"] for row in last_rows(self.path / "metrics.jsonl"))])

    def state(self) -> str:
        return "|".join([super().state(), *map(stamp, self._logs()), stamp(self.path / "eval")])

    def _logs(self) -> tuple[Path, Path]:
        return self.path / "metrics.jsonl", self.path / "timings.jsonl"

    def tokenizer_folders(self) -> list[Path]:
        newest = sorted((self.path / "checkpoints").glob("step_*"), reverse=True)
        model = self.config().get("model")
        return [self.path / "tokenizer", *newest, *([Path(model)] if model else [])]


class EvaluationSource(Source):
    """What evaluate.py has written: of one environment, or a folder of each."""

    kind = "evaluation"

    def files(self) -> list[TrajectoryFile]:
        paths = [self.path / "trajectories.jsonl", *sorted(self.path.glob("*/trajectories.jsonl"))]
        return [
            TrajectoryFile(
                "trajectories" if path.parent == self.path else path.parent.name, path, "eval", None
            )
            for path in paths
            if path.is_file()
        ]

    def config(self) -> dict[str, Any]:
        return read_json(self.path / "config.json") or read_json(self.path / "eval.json")

    def tokenizer_folders(self) -> list[Path]:
        model = self.config().get("model")
        return [self.path / "tokenizer", *([Path(str(model))] if model else [])]


class Conversations(Lines):
    """AgentTraj as one JSON list: it is read whole, and each record is a line."""

    def refresh(self) -> None:
        identity = (self.path.stat().st_ino, stamp(self.path))
        if identity == self.identity:
            return
        self._forget()
        try:
            records = json.loads(self.path.read_bytes(), parse_constant=lambda _: None)
        except (ValueError, RecursionError) as error:
            raise NoSource(f"{self.path} is not JSON: {error}") from None
        self._records: list[dict[str, Any]] = []
        for record in records if isinstance(records, list) else [records]:
            row = row_of(record) if isinstance(record, dict) else None
            if row is None:
                self.broken += 1
                continue
            self._records.append(record)
            self.offsets.append(0)
            for name, column in self.columns.items():
                column.append(row.get(name))
        self.identity, self.indexed = identity, self.path.stat().st_size

    def read(self, number: int) -> dict[str, Any]:
        return self._records[number]

    def whole_lines(self) -> Any:
        for number, record in enumerate(self._records):
            done = self.indexed * (number + 1) // len(self._records)
            yield number, done, json.dumps(record, ensure_ascii=False).encode("utf-8", "replace")


def open_lines(path: Path) -> Lines:
    return Conversations.open(path) if path.suffix == ".json" else Lines.open(path)


def open_source(number: int, path: Path) -> Source:
    """What lies at `path`.

    Raises: NoSource: nothing that can be looked at; the message says what was expected.
    """
    if not path.exists():
        raise NoSource(f"{path}: no such file or directory{_nearest(path)}")
    if path.is_file():
        if path.suffix not in (".json", ".jsonl"):
            raise NoSource(f"{path} is neither .jsonl (trajectories) nor .json (AgentTraj)")
        source = Source(number, path)
        name = source.files()[0].name
        if not len(source.lines(name)):
            raise NoSource(f"{path} holds no trajectory ({source.lines(name).broken} broken lines)")
        return source
    if (path / "trajectories").is_dir() or (path / "metrics.jsonl").exists():
        return RunSource(number, path)
    evaluation = EvaluationSource(number, path)
    if evaluation.files():
        return evaluation
    inside = sorted(p.parent.name for p in path.glob("*/trajectories"))
    hint = f"; there are runs in it: {', '.join(inside[:5])}" if inside else ""
    if (path / "config.json").exists():
        hint = "; a run is there, but it has written no trajectory yet"
    raise NoSource(f"{path} holds no run and no evaluation{hint}")


def _nearest(path: Path) -> str:
    import difflib

    names = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    near = difflib.get_close_matches(path.name, names, n=3, cutoff=0.5)
    return f"; there are {', '.join(str(path.parent / name) for name in near)}" if near else ""


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is none."""
    try:
        return parse(path.read_bytes()) or {}
    except OSError:
        return {}


def size_of(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def last_rows(path: Path, num_bytes: int = 16_384) -> list[dict[str, Any]]:
    """The steps at a log's end, read without the rest; none where there is no log."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - num_bytes))
            rows = map(parse, file.read().splitlines())
            return [row for row in rows if row is not None and isinstance(row.get("step"), int)]
    except OSError:
        return []


def mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def stamp(path: Path) -> str:
    """Changes when the file does."""
    try:
        stat = path.stat()
    except OSError:
        return "-"
    return f"{stat.st_size}.{stat.st_mtime_ns}"
