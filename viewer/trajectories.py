"""A file of trajectories: the index of its lines, lists of them, the samples of a group, one whole.

A run writes less than a kilobyte of facts about a trajectory and many times that of text and
tokens. `Trajectory.to_line` writes the facts first, so the index only parses the head of each line:

    {"trajectory_id":...,"return":1.0,...,"messages":[...],"turns":[...],"input_ids":[...],...}
     ^---------------- head ------------^ the rest is read when somebody opens the trajectory

A file that has grown is read on from the end of the index. A file that was replaced or cut back (a
resumed run does both) is read again. Lines that are not trajectories are counted and skipped.

Read next: overview.py; server.py, which answers with these; page/trajectory.js, which shows them.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import math
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from data import NAMES, ROLES, to_agenttraj
from envs import ENVS
from trajectory import COUNTED, HEAD_END, LOST

if TYPE_CHECKING:
    from viewer.sources import Source

Row = dict[str, Any]
COLUMNS = (
    *("trajectory_id", "step", "env", "task_id", "subtask", "group_id", "success"),
    *("stop_reason", "used_in_loss", "error", *COUNTED),
)
SORTS = (
    *("line", "task_id", "subtask", "return", "stop_reason", "num_turns", "num_tokens"),
    *("parse_errors", "advantage"),
)
TAIL = 1 << 16  # bytes before the end of the index that must be unchanged to read on from there
NEARBY = 512  # lines in which the samples of one group are looked for
# The formats in which the environments' prompts ask a model to answer.
THOUGHT = re.compile(r"\s*(?:Thought:)?\s*(.*?)\s*\n?\s*Action:\s*(.*)", re.DOTALL)
TAGGED = re.compile(r"\s*(?:<think>)?(.*?)(?:</think>)?\s*<(search|answer)>(.*?)</\2>", re.DOTALL)


# ----------------------------------------------------------------------------------------- a line


def _finite(number: str) -> float | None:
    value = float(number)  # 1e999 is infinite, which no JSON answer may hold
    return value if math.isfinite(value) else None


def parse(line: bytes | str) -> dict[str, Any] | None:
    """A JSON object; None for anything else. NaN and infinity become None."""
    try:
        value = json.loads(line, parse_constant=lambda _: None, parse_float=_finite)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def head_of(line: bytes) -> Row | None:
    """The columns of a line; None if the line is not a trajectory."""
    end = line.find(HEAD_END.encode())
    if end > 0 and line.startswith(b'{"trajectory_id"') and line.rstrip().endswith(b"}"):
        head = parse(line[:end] + b"}")
        if head is not None and "num_turns" in head:
            return {name: head.get(name) for name in COLUMNS}
    whole = parse(line)
    return None if whole is None else row_of(whole)


def row_of(line: Mapping[str, Any]) -> Row | None:
    """The columns of a trajectory without a head."""
    turns = line.get("turns")
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        return None
    return {name: line.get(name) for name in COLUMNS} | {"num_turns": len(turns)}


def turns_of(line: Mapping[str, Any]) -> list[dict[str, Any]]:
    turns = line.get("turns")
    return [turn for turn in turns if isinstance(turn, dict)] if isinstance(turns, list) else []


def opening_of(line: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages before the first turn: the prompt, which may hold answers of its own, and the
    first observation."""
    messages = [m for m in line.get("messages") or () if isinstance(m, dict)]
    answers = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    num_turns = len(turns_of(line))
    return messages[: answers[-num_turns]] if 0 < num_turns <= len(answers) else messages


def split_action(text: str) -> tuple[str | None, str | None]:
    """(thought, action) of a model's answer.

    >>> split_action("Thought: I need wood.\\nAction: get 1 oak log")
    ('I need wood.', 'get 1 oak log')
    >>> split_action("Action: look"), split_action("look")
    ((None, 'look'), (None, 'look'))
    >>> split_action("I wonder. <search>who wrote it</search>")
    ('I wonder.', 'search: who wrote it')
    """
    if match := TAGGED.match(text):
        return match[1].strip() or None, f"{match[2]}: {match[3].strip()}"
    if match := THOUGHT.match(text):
        return match[1].strip() or None, match[2].strip()
    return None, text.strip() or None


def task_of(line: Mapping[str, Any], env: str | None) -> tuple[str, int] | None:
    """Environment and index of a trajectory's task; None if its id does not name one.

    >>> task_of({"env": "textcraft", "task_id": "textcraft_31"}, None)
    ('textcraft', 31)
    """
    env = line.get("env") or env
    number = re.fullmatch(r".*?_(\d{1,12})", str(line.get("task_id")))
    return (str(env), int(number[1])) if env and number else None


# -------------------------------------------------------------------------------------- the index


class Lines:
    """The index of one .jsonl file; `refresh` brings it up to date. Raises: OSError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tail = ""
        self.forget()
        self.refresh()

    def __len__(self) -> int:
        return len(self.offsets)

    def row(self, number: int) -> Row:
        """The head of trajectory `number`, counted from 0."""
        return {"line": number} | {name: self.columns[name][number] for name in COLUMNS}

    def read(self, number: int) -> dict[str, Any]:
        """The whole of trajectory `number`. Raises LookupError if the file has changed."""
        with open(self.path, "rb") as file:
            file.seek(self.offsets[number])
            line = parse(file.readline())
        if line is None:
            raise LookupError(f"{self.path.name} has changed; look again")
        return line

    def whole_lines(self) -> Iterator[tuple[int, int, bytes]]:
        """(number, bytes so far, line) of every trajectory."""
        with open(self.path, "rb") as file:
            for number, offset in enumerate(self.offsets):
                file.seek(offset)
                line = file.readline()
                yield number, offset + len(line), line

    def refresh(self) -> None:
        """Index the lines that were added; all lines if the file was replaced or cut back."""
        with open(self.path, "rb") as file:
            if self._tail_of(file) != self.tail:
                self.forget()
            file.seek(self.indexed)
            for line in iter(file.readline, b""):
                if not line.endswith(b"\n") and parse(line) is None:
                    break  # still being written
                if line.strip():
                    self.add(head_of(line))
                self.indexed += len(line)
            self.tail = self._tail_of(file)

    def forget(self) -> None:
        self.offsets: list[int] = []  # where each trajectory's line begins, in bytes
        self.columns: dict[str, list[Any]] = {name: [] for name in COLUMNS}
        self.indexed = 0  # bytes read so far
        self.broken = 0  # lines that are not trajectories
        self.tail = hashlib.sha256(b"").hexdigest()  # of the last TAIL bytes before `indexed`

    def add(self, row: Row | None) -> None:
        """Add the line that begins at `indexed`."""
        if row is None:
            self.broken += 1
            return
        self.offsets.append(self.indexed)
        for name, column in self.columns.items():
            value = row[name]
            column.append(sys.intern(value) if isinstance(value, str) else value)

    def keep(self, numbers: Sequence[int]) -> None:
        """Drop all other trajectories from the index."""
        self.offsets = [self.offsets[n] for n in numbers]
        self.columns = {name: [c[n] for n in numbers] for name, c in self.columns.items()}

    def _tail_of(self, file: BinaryIO) -> str:
        """A hash of the last bytes that were indexed: a file that was copied over this one keeps
        its name and inode, and may begin alike."""
        file.seek(max(0, self.indexed - TAIL))
        return hashlib.sha256(file.read(min(self.indexed, TAIL))).hexdigest()


def open_lines(path: Path) -> Lines:
    """The index of a file. AgentTraj conversations, as one JSON list or one a line, are first
    written as trajectories to a temporary file.

    Raises: ValueError if a .json file is not JSON.
    """
    with open(path, "rb") as file:
        is_agenttraj = path.suffix == ".json" or "conversations" in (parse(file.readline()) or {})
    if not is_agenttraj:
        return Lines(path)
    try:
        content = path.read_bytes()
        is_list = path.suffix == ".json"
        records = json.loads(content) if is_list else [parse(x) for x in content.splitlines()]
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    converted = Path(tempfile.mkdtemp(), path.name)
    atexit.register(shutil.rmtree, converted.parent, ignore_errors=True)
    records = records if isinstance(records, list) else [records]
    lines = [json.dumps(from_conversation(record)) + "\n" for record in records]
    converted.write_text("".join(lines))
    return Lines(converted)


def from_conversation(record: Any) -> dict[str, Any]:
    """An AgentTraj conversation in the form of our lines; it has no rewards and no tokens."""
    if not isinstance(record, dict) or not isinstance(record.get("conversations"), list):
        return {}  # counted as broken
    values = [turn for turn in record["conversations"] if isinstance(turn, dict)]
    messages = [
        {"role": ROLES.get(str(t.get("from")), "user"), "content": str(t.get("value", ""))}
        for t in values
    ]
    turns = []
    for i, turn in enumerate(values):
        if turn.get("from") == "gpt" and turn.get("loss"):
            answer = messages[i + 1]["content"] if i + 1 < len(messages) else ""
            turns.append({"action_text": messages[i]["content"], "observation_text": answer})
    task_id = record.get("item_id", "")
    about = {"trajectory_id": task_id, "task_id": task_id, "return": record.get("return")}
    return about | {"messages": messages, "turns": turns}


# ------------------------------------------------------------------------------------------ lists


@dataclass(frozen=True)
class Filter:
    """Which trajectories to list; an empty field accepts all."""

    subtask: str = ""
    stop_reason: str = ""
    outcome: str = ""  # solved, failed, lost
    task: str = ""  # part of the task's id
    min_return: float | None = None
    max_return: float | None = None
    min_turns: float | None = None
    max_turns: float | None = None
    parse_errors: bool = False

    def accepts(self, row: Row) -> bool:
        return (
            self.subtask in ("", row["subtask"])
            and self.stop_reason in ("", row["stop_reason"])
            and self.outcome in ("", outcome_of(row))
            and self.task.casefold() in str(row["task_id"]).casefold()
            and is_within(self.min_return, row["return"], self.max_return)
            and is_within(self.min_turns, row["num_turns"], self.max_turns)
            and not (self.parse_errors and not row["parse_errors"])
        )


def outcome_of(row: Row) -> str:
    """solved, failed, lost or unknown."""
    if row["stop_reason"] in LOST:
        return "lost"
    return {True: "solved", False: "failed"}.get(row["success"], "unknown")


def is_within(low: float | None, value: Any, high: float | None) -> bool:
    """Whether a number lies in a range. An unknown value lies in no range that has an end."""
    if low is None and high is None:
        return True
    if not isinstance(value, (int, float)):
        return False
    return (low is None or value >= low) and (high is None or value <= high)


def list_rows(
    lines: Lines, chosen: Filter, sort: str = "line", offset: int = 0, limit: int = 200
) -> dict[str, Any]:
    """A page of the list, sorted by one of SORTS ("-return": descending).

    Raises: ValueError if `sort` is not one of them.
    """
    key = sort.removeprefix("-")
    if key not in SORTS:
        raise ValueError(f"cannot sort by {key!r}; choose from {', '.join(SORTS)}")
    matching = [row for row in map(lines.row, range(len(lines))) if chosen.accepts(row)]
    matching.sort(key=lambda row: sort_key(row[key]), reverse=sort.startswith("-"))
    kinds = {n: sorted({str(v) for v in lines.columns[n] if v}) for n in ("subtask", "stop_reason")}
    return {
        "total": len(lines),
        "matching": len(matching),
        "broken": lines.broken,
        "rows": matching[offset : offset + limit],
        "subtasks": kinds["subtask"],
        "stop_reasons": kinds["stop_reason"],
    }


def sort_key(value: Any) -> tuple[int, float, str]:
    """Numbers, then text in natural order (textcraft_9 before textcraft_10), then None.

    >>> sorted(["t_10", None, "t_9"], key=sort_key)
    ['t_9', 't_10', None]
    """
    if value is None:
        return (2, 0.0, "")
    if isinstance(value, (int, float)):
        return (0, float(value), "")
    return (1, 0.0, re.sub(r"\d+", lambda digits: digits[0].zfill(12), str(value)))


def groups_of(lines: Lines) -> list[dict[str, Any]]:
    """The samples of each task side by side, in the order of the file."""
    groups: dict[Any, dict[str, Any]] = {}
    for row in map(lines.row, range(len(lines))):
        key = (row["step"], row["group_id"], row["task_id"])
        about = {name: row[name] for name in ("group_id", "task_id", "subtask")}
        groups.setdefault(key, about | {"rows": []})["rows"].append(row)
    return list(groups.values())


# ----------------------------------------------------------------------------------------- search


def search(lines: Lines, text: str) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """(bytes done, hit or None) for each line, ignoring case.

    Most lines are skipped at the speed of reading: where JSON can write the text in one way only, a
    line is parsed only if its bytes hold the text.
    """
    wanted = text.casefold()
    is_plain = text.isascii() and text.isprintable() and not set(text) & set('"\\')
    for number, done, line in lines.whole_lines():
        if is_plain and wanted.encode() not in line.lower():
            yield done, None
        else:
            yield done, first_hit(parse(line) or {}, number, wanted)


def first_hit(line: Mapping[str, Any], number: int, wanted: str) -> dict[str, Any] | None:
    """The first place in a trajectory where the text stands; turn 0 is before the first turn."""
    for turn, texts in enumerate(texts_of(line)):
        for text in texts:
            at = text.casefold().find(wanted)
            if at >= 0:
                excerpt = text[max(0, at - 60) : at + len(wanted) + 60]
                name = line.get("trajectory_id")
                return {"line": number, "trajectory_id": name, "turn": turn, "excerpt": excerpt}
    return None


def texts_of(line: Mapping[str, Any]) -> Iterator[list[str]]:
    """All text: before the first turn, then turn by turn."""
    opening = (str(message.get("content", "")) for message in opening_of(line))
    yield [str(line.get("task_id", "")), *opening]
    for turn in turns_of(line):
        yield [str(turn.get("action_text") or ""), str(turn.get("observation_text") or "")]


# --------------------------------------------------------------------------------- one trajectory


def trajectory_view(source: Source, name: str, number: int) -> dict[str, Any]:
    """Everything that a page shows of one trajectory. Raises: KeyError, IndexError."""
    lines = source.lines(name)
    row, line = lines.row(number), lines.read(number)
    tokens = partial(tokens_between, line, source.text_of)
    turns = turns_of(line)
    spans = [span_of(turn) for turn in turns]
    group = group_of(lines, number)
    actions = actions_of(line)
    env, index = task_of(line, source.env) or ("", 0)
    return {
        "row": row,
        **{n: line.get(n) for n in ("step", "seed", "max_rounds", "env", "weight_version")},
        **{n: line.get(n) for n in ("terminated", "truncated", "first_state")},
        "opening": opening_of(line),
        "opening_tokens": tokens(0, spans[0][0] if spans and spans[0] else None),
        "turns": [
            turn_view(turn, tokens, span, following)
            for turn, (span, following) in zip(turns, pairwise([*spans, None]), strict=True)
        ],
        "group": [lines.row(other) for other in group],
        "parts_at": {
            str(other): first_difference(actions, actions_of(lines.read(other)))
            for other in group
            if other != number
        },
        "agenttraj": agenttraj_of(row, line),
        "command": f"python -m envs.{env} --task-index {index}" if env in ENVS else None,
        "previous": number - 1 if number else None,
        "next": number + 1 if number + 1 < len(lines) else None,
        "can_reenact": bool(turns) and env in ENVS,
    }


def actions_of(line: Mapping[str, Any]) -> list[str]:
    return [str(turn.get("action_text") or "") for turn in turns_of(line)]


def turn_view(
    turn: Mapping[str, Any],
    tokens: Callable[[int, int | None], dict[str, Any] | None],
    span: tuple[int, int] | None,
    following: tuple[int, int] | None,
) -> dict[str, Any]:
    text = str(turn.get("action_text") or "")
    thought, action = split_action(text)
    names = ("observation_text", "reward", "parse_error", "generate_s", "env_s", "state")
    return {
        "action_text": text,
        "thought": thought,
        "action": action,
        **{name: turn.get(name) for name in names},
        "action_tokens": tokens(*span) if span else None,
        "observation_tokens": tokens(span[1], following and following[0]) if span else None,
    }


def span_of(turn: Mapping[str, Any]) -> tuple[int, int] | None:
    span = turn.get("action_span")
    if isinstance(span, list) and len(span) == 2 and all(isinstance(n, int) for n in span):
        return span[0], span[1]
    return None


def tokens_between(
    line: Mapping[str, Any],
    text_of: Callable[[list[int]], list[str] | None],
    start: int,
    end: int | None,
) -> dict[str, Any] | None:
    """Tokens start..end - 1 with their texts and numbers; None of a trajectory without tokens."""
    if not isinstance(line.get("input_ids"), list):
        return None
    ids = line["input_ids"][start:end]
    names = {"mask": "loss_mask", "log_prob": "rollout_log_probs", "advantage": "advantages"}
    lists = {name: line.get(column) for name, column in names.items()}
    parts = {name: None if x is None else x[start:end] for name, x in lists.items()}
    return {"ids": ids, "text": text_of(ids), **parts}


def group_of(lines: Lines, number: int) -> list[int]:
    """The lines of the same step, group and task, this one among them."""
    keys = list(
        zip(*(lines.columns[name] for name in ("group_id", "step", "task_id")), strict=True)
    )
    if keys[number][0] is None:
        return [number]
    nearby = range(max(0, number - NEARBY), min(len(lines), number + NEARBY))
    return [n for n in nearby if keys[n] == keys[number]]


def first_difference(ours: Sequence[Any], theirs: Sequence[Any]) -> int:
    """The first turn, counted from 1, in which two samples act differently; 0 if there is none.

    >>> first_difference(["a", "b"], ["a", "c"]), first_difference(["a"], ["a", "b"])
    (2, 2)
    >>> first_difference(["a"], ["a"])
    0
    """
    for turn, (a, b) in enumerate(zip(ours, theirs, strict=False), start=1):
        if a != b:
            return turn
    return 0 if len(ours) == len(theirs) else min(len(ours), len(theirs)) + 1


def agenttraj_of(row: Row, line: Mapping[str, Any]) -> dict[str, Any]:
    messages = [
        {"role": m["role"], "content": str(m.get("content", ""))}
        for m in line.get("messages") or ()
        if isinstance(m, dict) and m.get("role") in NAMES
    ]
    return to_agenttraj(str(row["task_id"]), messages)
