"""Each path on replay.py's command line is a source: a run, an evaluation or a trajectory file.

    a run          config.json, metrics.jsonl, trajectories/step_*.jsonl and eval_*.jsonl
    an evaluation  eval.json and trajectories.jsonl, or a folder per environment with both
    a file         one trajectory per line, or AgentTraj conversations as .json or .jsonl

Sources are never modified. The page refers to a file by its name in the source's list
("step_000003"), so nothing that the page sends is used as a path. A folder can come from someone
else, so only its regular files are read, and no symbolic links in it are followed.

Read next: overview.py, trajectories.py, server.py.
"""

from __future__ import annotations

import contextlib
import re
import time
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from viewer.trajectories import NUMBER, TEXT, Lines, fits, open_lines, parse

SMALL_SOURCE_BYTES = 20_000_000  # up to this size, listing a source counts the lines of all files
LIVE_S = 600.0  # a run that has not written for longer than this is not live
OPTIONS = {"env": TEXT, "model": TEXT, "steps": NUMBER}  # those that the code reads


FileKind = Literal["train", "eval", "other"]


class NoSource(ValueError):
    """There is nothing to show; the message says what was expected."""


@dataclass(frozen=True)
class TrajectoryFile:
    name: str  # as the page refers to it
    path: Path
    kind: FileKind
    step: int | None


class Source:
    """One path on the command line. This base class is a single file of trajectories."""

    kind: Literal["run", "evaluation", "file"] = "file"
    evaluations: tuple[str, ...] = ()  # patterns of the files with scores

    def __init__(self, number: int, path: Path) -> None:
        self.number, self.path = number, path
        self.name = path.resolve().name
        self._indexed: dict[str, tuple[str, Lines]] = {}  # name -> version of the file, its index

    def files(self) -> list[TrajectoryFile]:
        """All files that exist now, in the order of steps."""
        return [TrajectoryFile(self.path.stem, self.path, "other", None)]

    def objects(self, *patterns: str) -> list[dict[str, Any]]:
        """The JSON object in each of these files; {} for anything else."""
        return [parse(path.read_bytes()) or {} for path in regular_files(self.path, *patterns)]

    def rows(self, log: str) -> list[dict[str, Any]]:
        """The rows of a log; lines that are not a JSON object with a step are skipped."""
        text = b"".join(path.read_bytes() for path in regular_files(self.path, log))
        rows = [parse(line) or {} for line in text.splitlines()]
        return [row for row in rows if fits(row, {"step": int})]

    def config(self) -> dict[str, Any]:
        """The options of the run or evaluation; empty if unknown."""
        return {}

    @property
    def env(self) -> str | None:
        return self.config().get("env")

    def is_live(self) -> bool:
        return False

    def status(self) -> str:
        """The progress of a run; "" for other sources."""
        return ""

    def logs(self) -> list[Path]:
        """Files that the overview reads, besides the trajectories."""
        return []

    def state(self) -> str:
        """A string that changes whenever there is something new to show."""
        paths = [*(f.path for f in self.files()), *self.logs()]
        return "|".join(file_version(path) for path in paths)

    def lines(self, name: str) -> Lines:
        """The current index of a file. Raises: KeyError if the source has no such file."""
        return self._lines({file.name: file for file in self.files()}[name])

    def _lines(self, file: TrajectoryFile) -> Lines:
        version = file_version(file.path)
        if file.name not in self._indexed or self._indexed[file.name][0] != version:
            self._indexed[file.name] = version, open_lines(file.path)
        return self._indexed[file.name][1]

    def listing(self) -> list[dict[str, Any]]:
        """The files for the page's list. Indexed files, and all files of a small source, come with
        their number of trajectories."""
        files, rows = self.files(), []
        is_small = sum(file.path.stat().st_size for file in files) < SMALL_SOURCE_BYTES
        for file in files:
            row = {"name": file.name, "kind": file.kind, "step": file.step}
            if is_small or file.name in self._indexed:
                lines = self._lines(file)
                row |= {"count": len(lines), "broken": lines.broken}
            rows.append(row)
        return rows

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer saved with the run or evaluation, or None. Needs only `tokenizers`."""
        from tokenizers import Tokenizer

        for folder in (self.path, *self.path.resolve().parents[:2]):
            for file in regular_files(folder, "tokenizer/tokenizer.json"):
                with contextlib.suppress(Exception):  # a damaged file raises a bare Exception
                    return Tokenizer.from_file(str(file))
        return None

    def text_of(self, ids: list[int]) -> list[str] | None:
        """The text of each single token (U+FFFD for part of a character); None without a
        tokenizer."""
        if self.tokenizer is None:
            return None
        batch = [[i] if 0 <= i < 2**32 else [] for i in ids]  # the range that the library accepts
        return list(self.tokenizer.decode_batch(batch, False))


class RunSource(Source):
    """The directory of a run."""

    kind = "run"
    evaluations = ("eval/step_*.json",)

    def files(self) -> list[TrajectoryFile]:
        files = []
        for path in regular_files(self.path, "trajectories/[!.]*.jsonl"):
            match = re.fullmatch(r"(step|eval)_(\d+)", path.stem)
            kind: FileKind = "other" if not match else "train" if match[1] == "step" else "eval"
            files.append(TrajectoryFile(path.stem, path, kind, int(match[2]) if match else None))
        return sorted(files, key=lambda f: (f.step is None, f.step or 0, f.kind != "eval", f.name))

    def config(self) -> dict[str, Any]:
        for saved in self.objects("config.json"):
            if fits(saved.get("config"), OPTIONS):
                return {"algorithm": saved.get("method")} | saved["config"]
        return {}

    def is_live(self) -> bool:
        """Whether the run has written something recently and has steps left."""
        paths = [path for path in (self.path, *self.logs()) if path.exists()]
        last_write = max(path.stat().st_mtime for path in paths)
        steps = self.config().get("steps")
        is_done = steps is not None and self.last_step() >= steps
        return time.time() - last_write < LIVE_S and not is_done

    def status(self) -> str:
        steps, log = self.config().get("steps"), self.logs()[0]
        parts = [f"{self.last_step()} of {steps} steps"] if steps else []
        if log.exists() and self.is_live():
            parts.append(f"written {time.time() - log.stat().st_mtime:.0f} s ago")
        return ", ".join(parts)

    def last_step(self) -> int:
        """The last step in the log or among the trajectories; some methods do not roll out in
        every step."""
        file_steps = [file.step or 0 for file in self.files() if file.kind == "train"]
        return max([0, *file_steps, *(row["step"] for row in self.rows("metrics.jsonl")[-1:])])

    def logs(self) -> list[Path]:
        return [self.path / name for name in ("metrics.jsonl", "timings.jsonl", "eval")]


class EvaluationSource(Source):
    """Results of evaluate.py for one environment, or a folder per environment."""

    kind = "evaluation"
    evaluations = ("eval.json", "*/eval.json")

    def files(self) -> list[TrajectoryFile]:
        paths = regular_files(self.path, "trajectories.jsonl", "*/trajectories.jsonl")
        names = ["trajectories" if p.parent == self.path else p.parent.name for p in paths]
        return [TrajectoryFile(*pair, "eval", None) for pair in zip(names, paths, strict=True)]

    def config(self) -> dict[str, Any]:
        saved = self.objects("config.json", "eval.json")
        return next((options for options in saved if options and fits(options, OPTIONS)), {})


def open_source(number: int, path: Path) -> Source:
    """The source at `path`. Raises: NoSource if there is nothing to show."""
    if not path.exists():
        raise NoSource(f"{path}: no such file or directory")
    if path.is_file():
        if path.suffix not in (".json", ".jsonl"):
            raise NoSource(f"{path} is neither .jsonl (trajectories) nor .json (AgentTraj)")
        source = Source(number, path)
        try:
            lines = source.lines(path.stem)
        except (ValueError, RecursionError) as error:
            raise NoSource(f"{path} is not JSON ({error})") from None
        if not lines:
            raise NoSource(f"{path} contains no trajectories ({lines.broken} broken lines)")
        return source
    if (path / "trajectories").is_dir() or (path / "metrics.jsonl").exists():
        return RunSource(number, path)
    evaluation = EvaluationSource(number, path)
    if evaluation.files():
        return evaluation
    if (path / "config.json").exists():  # a run that has not written anything else yet
        return RunSource(number, path)
    runs = sorted(p.parent.name for p in path.glob("*/trajectories"))
    hint = f"; it contains runs: {', '.join(runs[:5])}" if runs else ""
    raise NoSource(f"{path} contains neither a run nor an evaluation{hint}")


def regular_files(folder: Path, *patterns: str) -> list[Path]:
    """The files in `folder`, or in folders in it, that match: no symbolic links, pipes or devices,
    and no names that cannot be shown."""
    paths = [path for pattern in patterns for path in sorted(folder.glob(pattern))]
    paths = [p for p in paths if p.is_file() and not p.is_symlink()]
    paths = [p for p in paths if p.parent == folder or not p.parent.is_symlink()]
    return [path for path in paths if str(path.relative_to(folder)).isprintable()]


def file_version(path: Path) -> str:
    """A string that changes when the file changes or is replaced."""
    if not path.exists():
        return ""
    stat = path.stat()
    return f"{stat.st_size}.{stat.st_mtime_ns}.{stat.st_ino}"
