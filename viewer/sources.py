"""What replay.py is given becomes a source: a run, an evaluation, or a file of trajectories.

    a run          config.json, metrics.jsonl, trajectories/step_*.jsonl and eval_*.jsonl
    an evaluation  eval.json and trajectories.jsonl, or a folder per environment with both
    a file         a trajectory a line, or AgentTraj conversations as .json or .jsonl

Sources are only read. A page names files as a source lists them ("step_000003"); nothing that a
page sends is used as a path.

Read next: overview.py, trajectories.py, server.py.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from reporting.logs import read_log
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
        self._open: dict[str, tuple[str, Lines]] = {}  # stamp of each file when it was indexed

    def files(self) -> list[TrajectoryFile]:
        """All files that are there now, in the order of steps."""
        return [TrajectoryFile(self.path.stem, self.path, "other", None)]

    def config(self) -> dict[str, Any]:
        """The options of the run or evaluation, as far as they are known."""
        return {}

    @property
    def env(self) -> str | None:
        return self.config().get("env")

    def is_live(self) -> bool:
        return False

    def status(self) -> str:
        """How far a run is; "" for what is not a run."""
        return ""

    def logs(self) -> list[Path]:
        """What the overview reads, besides the trajectories."""
        return []

    def state(self) -> str:
        """Changes whenever there is something new to see."""
        return "|".join(stamp(path) for path in [*(f.path for f in self.files()), *self.logs()])

    def lines(self, name: str) -> Lines:
        """The index of a file, up to date. Raises: KeyError if the source lists no such file."""
        path = {file.name: file.path for file in self.files()}[name]
        now = stamp(path)
        if name not in self._open or self._open[name][0] != now:
            self._open[name] = now, open_lines(path)
        return self._open[name][1]

    def listing(self) -> list[dict[str, Any]]:
        """Its files as pages list them. The number of trajectories is given for files that have
        been indexed, and for all files of a small source."""
        files, listed = self.files(), []
        is_small = sum(file.path.stat().st_size for file in files) < READ_AT_ONCE
        for file in files:
            about = {"name": file.name, "kind": file.kind, "step": file.step}
            if is_small or file.name in self._open:
                lines = self.lines(file.name)
                about |= {"count": len(lines), "broken": lines.broken}
            listed.append(about)
        return listed

    @cached_property
    def tokenizer(self) -> Any:
        """The one kept with the run or evaluation, read without a model library; else None."""
        from tokenizers import Tokenizer

        for folder in (self.path, *self.path.resolve().parents[:2]):
            if (file := folder / "tokenizer" / "tokenizer.json").is_file():
                return Tokenizer.from_file(str(file))
        return None

    def text_of(self, ids: list[int]) -> list[str] | None:
        """The text of each token by itself (part of a character: U+FFFD); None without a
        tokenizer."""
        if self.tokenizer is None:
            return None
        texts: list[str] = self.tokenizer.decode_batch([[i] for i in ids], False)
        return texts


class RunSource(Source):
    """The directory of a run."""

    kind = "run"

    def files(self) -> list[TrajectoryFile]:
        files = []
        for path in (self.path / "trajectories").glob("*.jsonl"):
            match = re.fullmatch(r"(step|eval)_(\d+)", path.stem)
            kind: FileKind = "other" if not match else "train" if match[1] == "step" else "eval"
            files.append(TrajectoryFile(path.stem, path, kind, int(match[2]) if match else None))
        return sorted(files, key=lambda f: (f.step is None, f.step or 0, f.kind != "eval", f.name))

    def config(self) -> dict[str, Any]:
        saved = read_json(self.path / "config.json")
        return {"algorithm": saved.get("method")} | saved.get("config", {})

    def is_live(self) -> bool:
        """Whether it wrote something lately and has steps left."""
        written = max(path.stat().st_mtime for path in (self.path, *self.logs()) if path.exists())
        steps = self.config().get("steps")
        is_done = steps is not None and self.last_step() >= steps
        return time.time() - written < ALIVE_S and not is_done

    def status(self) -> str:
        steps, log = self.config().get("steps"), self.logs()[0]
        parts = [f"{self.last_step()} of {steps} steps"] if steps else []
        if log.exists() and self.is_live():
            parts.append(f"written {time.time() - log.stat().st_mtime:.0f} s ago")
        return ", ".join(parts)

    def last_step(self) -> int:
        """By its log, or by its trajectories: some methods do not play in every step."""
        played = [file.step or 0 for file in self.files() if file.kind == "train"]
        return max([0, *played, *(row["step"] for row in rows_of(self.logs()[0])[-1:])])

    def logs(self) -> list[Path]:
        return [self.path / name for name in ("metrics.jsonl", "timings.jsonl", "eval")]


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
    if (path / "config.json").exists():  # a run that has written nothing else yet
        return RunSource(number, path)
    runs = sorted(p.parent.name for p in path.glob("*/trajectories"))
    hint = f"; there are runs in it: {', '.join(runs[:5])}" if runs else ""
    raise NoSource(f"{path} holds no run and no evaluation{hint}")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty if there is none."""
    return (parse(path.read_bytes()) if path.is_file() else None) or {}


def rows_of(log: Path) -> list[dict[str, Any]]:
    return read_log(log) if log.exists() else []


def stamp(path: Path) -> str:
    """Changes when the file does, also by another file under its name."""
    if not path.exists():
        return ""
    about = path.stat()
    return f"{about.st_size}.{about.st_mtime_ns}.{about.st_ino}"
