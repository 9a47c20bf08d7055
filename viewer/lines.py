"""A file of trajectories, read line by line at need: where each line begins, and its head.

A run writes less than a kilobyte of facts for each trajectory, and what was said and its tokens
are many times that. A list wants the facts alone, and `Trajectory.to_line` writes them first:

    {"trajectory_id":...,"return":1.0,...,"messages":[...],"turns":[...],"input_ids":[...],...}
     ^---------------- head ------------^ what was said                 token by token

So the index of a file is, for each line, its place and its head; the rest is read when somebody
opens that trajectory. A file that grows is read on from where its index ends; one that was replaced
or cut back (a resumed run does both) is read anew. A line that is no JSON object is counted as
broken and left out. Of a large file the index is kept in the cache folder.

Lines of before, with the tokens in front, and AgentTraj conversations are read whole: slower, and
otherwise the same.

Read next: sources.py, which knows what files a run has.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from run.files import cache_dir, write_text
from trajectory import COUNTED, HEAD_END

COLUMNS = (
    *("trajectory_id", "step", "env", "task_id", "subtask", "group_id", "success"),
    *("stop_reason", "used_in_loss", "error", *COUNTED),
)
WORTH_KEEPING = 4 << 20  # bytes of a file whose index is kept; a smaller one is read in no time
FORMAT = 2  # of a kept index
BEGINNING = 256  # bytes that tell one file of a name from the next
END = 1 << 16  # and as many before the place that was read to
NOTHING = hashlib.sha256(b"").hexdigest()

Row = dict[str, Any]


def parse(line: bytes | str) -> dict[str, Any] | None:
    """A JSON object; None for anything else. What JSON has no word for (NaN) becomes None."""
    try:
        found = json.loads(line, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def head_of(line: bytes) -> Row | None:
    """The columns of a line; None if it is broken."""
    end = line.find(HEAD_END.encode())
    if end > 0 and line.startswith(b'{"trajectory_id"') and line.rstrip().endswith(b"}"):
        head = parse(line[:end] + b"}")
        if head is not None and "num_turns" in head:
            return {name: head.get(name) for name in COLUMNS}
    whole = parse(line)
    return None if whole is None else row_of(whole)


def row_of(line: Mapping[str, Any]) -> Row | None:
    """The columns of a trajectory that lacks them, or of an AgentTraj conversation."""
    if isinstance(line.get("conversations"), list):
        said = [turn for turn in line["conversations"] if isinstance(turn, dict)]
        row = dict.fromkeys(COLUMNS)
        task_id = str(line.get("item_id", ""))
        row |= {"trajectory_id": task_id, "task_id": task_id, "return": line.get("return")}
        row["num_turns"] = sum(t.get("from") == "gpt" and t.get("loss") is True for t in said)
        return row
    turns = line.get("turns")
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        return None
    row = {name: line.get(name) for name in COLUMNS}
    row["num_turns"] = len(turns)
    row["parse_errors"] = sum(turn.get("parse_error") is not None for turn in turns)
    ids, mask, advantages = (line.get(n) for n in ("input_ids", "loss_mask", "advantages"))
    row["num_tokens"] = len(ids) if isinstance(ids, list) else None
    if isinstance(advantages, list) and isinstance(mask, list):
        own = [a for a, m in zip(advantages, mask, strict=False) if m and a is not None]
        row["advantage"] = sum(own) / len(own) if own else None
    return row


def turns_of(line: Mapping[str, Any]) -> list[dict[str, Any]]:
    turns = line.get("turns")
    return [turn for turn in turns if isinstance(turn, dict)] if isinstance(turns, list) else []


def opening_of(line: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages before the first turn: the prompt, which may hold answers of its own, and the
    first observation."""
    messages = [m for m in line.get("messages") or () if isinstance(m, dict)]
    spoken = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    num_turns = len(turns_of(line))
    return messages[: spoken[-num_turns]] if 0 < num_turns <= len(spoken) else messages


@dataclass
class Lines:
    """The index of one file; `refresh` brings it up to date.

    Attributes:
        indexed: bytes read so far; the next line begins there.
        broken: lines that are no trajectory.
        identity: of the file that was read, so that its successor of the same name is noticed.
        end: hash of the last bytes that were read, for the same reason.
    """

    path: Path
    offsets: list[int] = field(default_factory=list)
    columns: dict[str, list[Any]] = field(default_factory=lambda: {name: [] for name in COLUMNS})
    indexed: int = 0
    broken: int = 0
    identity: tuple[int, str] | None = None
    end: str = NOTHING

    @classmethod
    def open(cls, path: Path) -> Lines:
        """The file's index, from the cache folder where it was kept; up to date.

        Raises: OSError: it cannot be read.
        """
        lines = cls(path)
        if path.stat().st_size >= WORTH_KEEPING:
            lines._load()
        lines.refresh()
        return lines

    def __len__(self) -> int:
        return len(self.offsets)

    def row(self, number: int) -> Row:
        """The head of line `number`, counted from 0 without the broken ones."""
        return {"line": number} | {name: self.columns[name][number] for name in COLUMNS}

    def read(self, number: int) -> dict[str, Any]:
        """The whole of line `number`.

        Raises: IndexError: there is none. LookupError: the file is another now.
        """
        with open(self.path, "rb") as file:
            file.seek(self.offsets[number])
            found = parse(file.readline())
        if found is None:
            raise LookupError(f"{self.path.name} has changed; look again")
        return found

    def whole_lines(self) -> Iterator[tuple[int, int, bytes]]:
        """(number, bytes so far, line) of every line."""
        with open(self.path, "rb") as file:
            for number, offset in enumerate(self.offsets):
                file.seek(offset)
                line = file.readline()
                yield number, offset + len(line), line

    def refresh(self) -> None:
        """Read what has come since, or all of it where the file is another."""
        with open(self.path, "rb") as file:
            stat = os.fstat(file.fileno())
            identity = (stat.st_ino, hashlib.sha256(file.read(BEGINNING)).hexdigest())
            same = stat.st_size >= self.indexed and self._is_same(identity)
            if not same or self._end_of(file) != self.end:
                self._forget()
            if stat.st_size == self.indexed:
                return
            self.identity, before = identity, self.indexed
            file.seek(self.indexed)
            for line in iter(file.readline, b""):
                if not line.endswith(b"\n") and parse(line) is None:
                    break  # being written
                self._add(line)
            self.end = self._end_of(file)
        if self.indexed - before >= WORTH_KEEPING:
            self._save()

    def _is_same(self, identity: tuple[int, str]) -> bool:
        """Whether it is the file that was read, grown or not."""
        if self.identity is None or self.indexed < BEGINNING:  # its beginning has grown as well
            return self.identity is None or identity[0] == self.identity[0]
        return identity == self.identity

    def _end_of(self, file: BinaryIO) -> str:
        """What tells the last bytes that were read from others: a file that was copied over this
        one keeps its name and inode, and may well begin alike."""
        first = max(0, self.indexed - END)
        file.seek(first)
        return hashlib.sha256(file.read(self.indexed - first)).hexdigest()

    def _forget(self) -> None:
        self.offsets, self.columns = [], {name: [] for name in COLUMNS}
        self.indexed, self.broken, self.identity, self.end = 0, 0, None, NOTHING

    def _add(self, line: bytes) -> None:
        row = head_of(line) if line.strip() else None
        if row is None:
            self.broken += bool(line.strip())
        else:
            self.offsets.append(self.indexed)
            for name in COLUMNS:
                value = row[name]
                self.columns[name].append(sys.intern(value) if isinstance(value, str) else value)
        self.indexed += len(line)

    # ----------------------------------------------------------------------- kept in the cache

    def _kept_at(self) -> Path:
        key = hashlib.sha256(str(self.path.resolve()).encode("utf-8", "surrogateescape"))
        return cache_dir() / "replay" / f"{key.hexdigest()[:32]}.json"

    def _load(self) -> None:
        try:
            kept = parse(self._kept_at().read_bytes())
        except OSError:
            return
        if kept is None or kept.get("format") != FORMAT:
            return
        self.offsets, self.columns = kept["offsets"], kept["columns"]
        self.indexed, self.broken = kept["indexed"], kept["broken"]
        self.identity, self.end = (kept["identity"][0], kept["identity"][1]), kept["end"]

    def _save(self) -> None:
        kept = {"format": FORMAT, "offsets": self.offsets, "columns": self.columns}
        kept |= {"indexed": self.indexed, "broken": self.broken}
        kept |= {"identity": self.identity, "end": self.end}
        with contextlib.suppress(OSError):  # nobody may write there: it is read again next time
            write_text(self._kept_at(), json.dumps(kept))
