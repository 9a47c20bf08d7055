"""What replay.py is given becomes a source: a run, an evaluation, or a file of trajectories.

    a run          config.json, metrics.jsonl, trajectories/step_*.jsonl and eval_*.jsonl
    an evaluation  eval.json and trajectories.jsonl, or a folder per environment with both
    a file         a trajectory a line, or AgentTraj conversations as .json or .jsonl

Sources are only read. A page names files as a source lists them ("step_000003"); nothing that a
page sends is used as a path.

Read next: overview.py, trajectories.py, server.py.
"""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from viewer.trajectories import Lines, open_lines, parse

READ_AT_ONCE = 20_000_000  # bytes of files that are indexed just to list how many lines they have
ALIVE_S = 600.0  # a run that has written nothing for longer is not live

FileKind = Literal["train", "eval", "other"]


class NoSource(ValueError):
    """There is nothing to look at; the message says what was expected."""


@dataclass(frozen=True)
class TrajectoryFile:
    name: str  # that pages use
    path: Path
    kind: FileKind
    step: int | None


class Source:
    """One path of the command line; by itself, a file of trajectories."""

    kind: Literal["run", "evaluation", "file"] = "file"

    def __init__(self, number: int, path: Path) -> None:
        self.number, self.path = number, path
        self.name = path.resolve().name
        self._open: dict[str, Lines] = {}
        self._lock = threading.Lock()
        self._tokenizer: Any = None
        self._texts: dict[int, str] = {}

    def files(self) -> list[TrajectoryFile]:
        """All files that are there now, in the order of steps."""
        return [TrajectoryFile(self.path.stem, self.path, "other", None)]

    def config(self) -> dict[str, Any]:
        """The options of the run or evaluation, as far as they are known."""
        return {}

    @property
    def env(self) -> str | None:
        env = self.config().get("env")
        return str(env) if env else None

    def is_live(self) -> bool:
        return False

    def status(self) -> str:
        """How far a run is; "" for what is not a run."""
        return ""

    def state(self) -> str:
        """Changes whenever there is something new to see."""
        files = self.files()
        return "|".join([str(len(files)), *(stamp(file.path) for file in files[-1:])])

    def path_of(self, name: str) -> Path:
        """Raises: KeyError if the source does not list such a file."""
        return {file.name: file.path for file in self.files()}[name]

    def lines(self, name: str) -> Lines:
        """The index of a file, up to date. Raises: KeyError if there is no such file."""
        path = self.path_of(name)
        with self._lock:
            if name in self._open:
                self._open[name].refresh()
            else:
                self._open[name] = open_lines(path)
            return self._open[name]

    def listing(self) -> list[dict[str, Any]]:
        """Its files as pages list them. The number of trajectories is given for files that have
        been indexed, and for all files of a small source."""
        files = self.files()
        is_small = sum(size_of(file.path) for file in files) < READ_AT_ONCE
        listed = []
        for file in files:
            lines = self.lines(file.name) if is_small else self._open.get(file.name)
            count, broken = (None, 0) if lines is None else (len(lines), lines.broken)
            listed.append(
                {"name": file.name, "kind": file.kind, "step": file.step}
                | {"count": count, "broken": broken}
            )
        return listed

    def tokenizer_folders(self) -> list[Path]:
        return [self.path.parent / "tokenizer"]

    def text_of(self, ids: list[int]) -> list[str] | None:
        """The text of each token by itself (part of a character: U+FFFD); None without a
        tokenizer."""
        if self._tokenizer is None:
            self._tokenizer = load_tokenizer(self.tokenizer_folders())
        if self._tokenizer is None:
            return None
        for i in set(ids) - self._texts.keys():
            self._texts[i] = self._tokenizer.decode([i], skip_special_tokens=False)
        return [self._texts[i] for i in ids]


class RunSource(Source):
    """The directory of a run."""

    kind = "run"

    def files(self) -> list[TrajectoryFile]:
        files = []
        for path in sorted((self.path / "trajectories").glob("*.jsonl")):
            match = re.fullmatch(r"(step|eval)_(\d+)", path.stem)
            kind: FileKind = "other" if not match else "train" if match[1] == "step" else "eval"
            files.append(TrajectoryFile(path.stem, path, kind, int(match[2]) if match else None))
        return sorted(files, key=lambda f: (f.step is None, f.step or 0, f.kind != "eval", f.name))

    def config(self) -> dict[str, Any]:
        saved = read_json(self.path / "config.json")
        options = saved.get("config")
        return {"algorithm": saved.get("method")} | options if isinstance(options, dict) else {}

    def is_live(self) -> bool:
        """Whether it wrote something lately and has steps left."""
        written = max(map(mtime, (self.path, *self._logs())))
        steps = self.config().get("steps")
        is_done = isinstance(steps, int) and self.last_step() >= steps
        return time.time() - written < ALIVE_S and not is_done

    def status(self) -> str:
        steps = self.config().get("steps")
        status = f"{self.last_step()} of {steps} steps" if steps else ""
        if self.is_live():
            status += f", written {time.time() - mtime(self._logs()[0]):.0f} s ago"
        return status

    def last_step(self) -> int:
        """By its log, or by its trajectories: some methods do not play in every step."""
        played = [file.step or 0 for file in self.files() if file.kind == "train"]
        return max([0, *played, *(row["step"] for row in read_log(self._logs()[0], tail=16_384))])

    def state(self) -> str:
        return "|".join([super().state(), *map(stamp, self._logs()), stamp(self.path / "eval")])

    def _logs(self) -> tuple[Path, Path]:
        return self.path / "metrics.jsonl", self.path / "timings.jsonl"

    def tokenizer_folders(self) -> list[Path]:
        checkpoints = sorted((self.path / "checkpoints").glob("step_*"), reverse=True)
        model = self.config().get("model")
        return [self.path / "tokenizer", *checkpoints, *([Path(model)] if model else [])]


class EvaluationSource(Source):
    """Results of evaluate.py: of one environment, or a folder for each."""

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


def open_source(number: int, path: Path) -> Source:
    """The source at `path`. Raises: NoSource if there is nothing to look at."""
    if not path.exists():
        raise NoSource(f"{path}: no such file or directory")
    if path.is_file():
        if path.suffix not in (".json", ".jsonl"):
            raise NoSource(f"{path} is neither .jsonl (trajectories) nor .json (AgentTraj)")
        source = Source(number, path)
        try:
            lines = source.lines(path.stem)
        except ValueError as error:
            raise NoSource(str(error)) from None
        if not lines:
            raise NoSource(f"{path} holds no trajectory ({lines.broken} broken lines)")
        return source
    if (path / "trajectories").is_dir() or (path / "metrics.jsonl").exists():
        return RunSource(number, path)
    evaluation = EvaluationSource(number, path)
    if evaluation.files():
        return evaluation
    runs = sorted(p.parent.name for p in path.glob("*/trajectories"))
    hint = f"; there are runs in it: {', '.join(runs[:5])}" if runs else ""
    if (path / "config.json").exists():
        hint = "; a run is there, but it has written no trajectory yet"
    raise NoSource(f"{path} holds no run and no evaluation{hint}")


def load_tokenizer(folders: Iterable[Path]) -> Any:
    """From the first folder with a readable tokenizer.json, without a model library; else None."""
    from tokenizers import Tokenizer

    for path in (folder / "tokenizer.json" for folder in folders):
        if path.is_file():
            with contextlib.suppress(Exception):  # the library raises nothing more precise
                return Tokenizer.from_file(str(path))
    return None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty if there is none."""
    with contextlib.suppress(OSError):
        return parse(path.read_bytes()) or {}
    return {}


def read_log(path: Path, tail: int | None = None) -> list[dict[str, Any]]:
    """The rows of a log, or of its last `tail` bytes; broken lines, which a crash may leave, are
    skipped."""
    try:
        with path.open("rb") as file:
            if tail:
                file.seek(max(0, path.stat().st_size - tail))
            rows = map(parse, file.read().splitlines())
            return [row for row in rows if row is not None and isinstance(row.get("step"), int)]
    except OSError:
        return []


def size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def mtime(path: Path) -> float:
    return path.stat().st_mtime if path.exists() else 0.0


def stamp(path: Path) -> str:
    """Changes when the file does."""
    return f"{size_of(path)}.{mtime(path)}"
