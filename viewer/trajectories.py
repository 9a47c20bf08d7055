"""Read a file of trajectories: index its lines, group samples, search, show one trajectory.

A line has less than a kilobyte of short fields and many times as much text and tokens.
`Trajectory.to_line` writes the short fields first, so the index only parses the head of each line:

    {"trajectory_id":...,"return":1.0,...,"messages":[...],"turns":[...],"input_ids":[...],...}
     ^---------------- head ------------^ the rest is read when the user opens the trajectory

Lines that do not start with the head of a trajectory are counted and skipped, so all later code can
rely on the types of the short fields.

Read next: overview.py; server.py, which serves these; page/trajectory.js, which shows them.
"""

from __future__ import annotations

import atexit
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data import ROLES, Record, parts_of, to_agenttraj
from envs import ENVS
from formats import read_objects, to_record
from trajectory import DERIVED_FIELDS, HEAD_END, LOST

if TYPE_CHECKING:
    from viewer.sources import Source

Row = dict[str, Any]
TEXTS = ("trajectory_id", "env", "task_id", "subtask", "stop_reason", "error")
NUMBERS = ("step", "group_id", "success", "used_in_loss", *DERIVED_FIELDS)
TAGGED = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)  # the action format of SearchQA


# ----------------------------------------------------------------------------------------- a line


def parse(line: bytes) -> dict[str, Any] | None:
    """A JSON object, or None for anything else. NaN and infinity, which JSON lacks, become None."""
    try:
        value = json.loads(line, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def head_of(line: bytes) -> Row | None:
    """The short fields of a line; None if the line is not a complete trajectory."""
    is_complete = line.rstrip().endswith(b"}")
    end = line.find(HEAD_END.encode()) if is_complete else -1
    head = parse(line[:end] + b"}") if end > 0 else parse(line)
    if head is None or not isinstance(head.get("num_turns"), int):
        return None
    row = {name: head.get(name) for name in (*TEXTS, *NUMBERS)}
    has_texts = all(isinstance(row[name], str | None) for name in TEXTS)
    has_numbers = all(isinstance(row[name], int | float | None) for name in NUMBERS)
    return row if has_texts and has_numbers else None


def outcome_of(row: Row) -> str:
    """Outcome of a trajectory: solved, failed, lost or unknown."""
    if row["stop_reason"] in LOST:
        return "lost"
    return {True: "solved", False: "failed"}.get(row["success"], "unknown")


def opening_of(line: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages before the first turn: the prompt, which can contain example answers, and the
    first observation."""
    messages: list[dict[str, Any]] = line["messages"]
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    num_turns = len(line["turns"])
    return messages[: answers[-num_turns]] if num_turns else messages


def split_action(text: str) -> tuple[str | None, str | None]:
    """(thought, action) of a model's answer.

    >>> split_action("Thought: I need wood.\\nAction: get 1 oak log")
    ('I need wood.', 'get 1 oak log')
    >>> split_action("Action: look"), split_action("look")
    ((None, 'look'), (None, 'look'))
    >>> split_action("<think>I wonder.</think> <search>who wrote it</search>")
    ('I wonder.', 'search: who wrote it')
    """
    if match := TAGGED.search(text):
        thought, action = text[: match.start()], f"{match[1]}: {match[2].strip()}"
    else:
        thought, mark, action = text.partition("Action:")
        if not mark:
            thought, action = "", text
    thought = thought.replace("<think>", "").replace("</think>", "").strip()
    return thought.removeprefix("Thought:").strip() or None, action.strip() or None


def task_of(line: Mapping[str, Any], env: str | None) -> tuple[str, int] | None:
    """(environment, index) of a trajectory's task; None if its id does not name a task.

    >>> task_of({"env": "textcraft", "task_id": "textcraft_31"}, None)
    ('textcraft', 31)
    """
    env = line.get("env") or env
    _, _, number = str(line.get("task_id")).rpartition("_")
    return (env, int(number)) if env and re.fullmatch(r"\d{1,12}", number) else None


# -------------------------------------------------------------------------------------- the index


@dataclass
class Lines:
    """The index of a .jsonl file of trajectories."""

    path: Path
    rows: list[Row]  # the head of each trajectory; "line" counts from 0
    offsets: list[int]  # start of each trajectory, in bytes
    broken: int  # number of lines that are not trajectories

    def __len__(self) -> int:
        return len(self.rows)

    def read(self, number: int) -> dict[str, Any]:
        """All fields of trajectory `number`. Raises LookupError if the file has changed."""
        with open(self.path, "rb") as file:
            file.seek(self.offsets[number])
            line = parse(file.readline())
        if line is None:
            raise LookupError(f"{self.path.name} has changed; reload the page")
        return line

    def raw_lines(self) -> Iterator[tuple[int, int, bytes]]:
        """(number, bytes read so far, line) of every trajectory."""
        with open(self.path, "rb") as file:
            for number, offset in enumerate(self.offsets):
                file.seek(offset)
                line = file.readline()
                yield number, offset + len(line), line

    def keep(self, numbers: Sequence[int]) -> None:
        """Keep only these trajectories in the index."""
        self.rows = [self.rows[n] | {"line": line} for line, n in enumerate(numbers)]
        self.offsets = [self.offsets[n] for n in numbers]


def index(path: Path) -> Lines:
    """The index of a file with one trajectory per line. Raises: OSError."""
    lines, end = Lines(path, [], [], 0), 0
    with open(path, "rb") as file:
        for line in file:
            start, end = end, end + len(line)
            if row := head_of(line):
                lines.rows.append({"line": len(lines)} | row)
                lines.offsets.append(start)
            elif line.strip() and line.endswith(b"\n"):  # without \n it is still being written
                lines.broken += 1
    return lines


def open_lines(path: Path) -> Lines:
    """The index of a file. AgentTraj conversations (one JSON list, or one per line) are converted
    to trajectories in a temporary file; entries that are not conversations count as broken.

    Raises: ValueError if the file is not JSON; the message says where.
    """
    with open(path, "rb") as file:
        is_agenttraj = path.suffix == ".json" or "conversations" in (parse(file.readline()) or {})
    if not is_agenttraj:
        return index(path)
    lines = [f"{line}\n" for line in read_objects([path], _convert)]
    trajectory_file = Path(tempfile.mkdtemp(), path.name)
    atexit.register(shutil.rmtree, trajectory_file.parent, ignore_errors=True)
    trajectory_file.write_text("".join(lines))
    return index(trajectory_file)


def _convert(content: Any, name: str) -> str | None:
    try:
        record = to_record(content, name)
    except ValueError:
        return "broken"
    return json.dumps(line_of(record)) if record else None


def line_of(record: Record) -> dict[str, Any]:
    """An AgentTraj conversation as a trajectory line without rewards and tokens."""
    turns = parts_of(record)[1][1:]
    values = [turn["value"] for turn in turns]
    pairs = zip_longest(values[::2], values[1::2], fillvalue="")
    task_id = str(record["item_id"])
    return {
        **{"trajectory_id": task_id, "task_id": task_id, "return": record.get("return")},
        "num_turns": len(values[::2]),
        "messages": [
            {"role": ROLES[turn["from"]], "content": turn["value"]}
            for turn in record["conversations"]
        ],
        "turns": [{"action_text": action, "observation_text": answer} for action, answer in pairs],
    }


# -------------------------------------------------------------------------------- groups, search


def groups_of(lines: Lines) -> list[dict[str, Any]]:
    """The trajectories by group, in the order of the file."""
    groups: dict[Any, dict[str, Any]] = {}
    for row in lines.rows:
        fields = {name: row[name] for name in ("group_id", "task_id", "subtask")}
        groups.setdefault(group_key(row), fields | {"rows": []})["rows"].append(row)
    return list(groups.values())


def group_key(row: Row) -> tuple[Any, ...]:
    return row["step"], row["group_id"], row["task_id"]


def search(lines: Lines, text: str) -> Iterator[tuple[int, dict[str, Any] | None]]:
    """(bytes read so far, hit or None) for each line, ignoring case.

    Most lines are not parsed: if JSON needs no escapes for the text, a line can match only if its
    bytes contain the text.
    """
    query = text.casefold()
    is_plain = text.isascii() and text.isprintable() and not set(text) & set('"\\')
    for number, num_bytes, line in lines.raw_lines():
        if is_plain and query.encode() not in line.lower():
            yield num_bytes, None
        else:
            yield num_bytes, first_hit(json.loads(line), number, query)


def first_hit(line: Mapping[str, Any], number: int, query: str) -> dict[str, Any] | None:
    """The first match in a trajectory; turn 0 means before the first turn."""
    texts = [(0, str(line.get("task_id")))]
    texts += [(0, message["content"]) for message in opening_of(line)]
    for turn_number, turn in enumerate(line["turns"], start=1):
        texts += [(turn_number, turn["action_text"]), (turn_number, turn["observation_text"])]
    for turn_number, text in texts:
        if (start := text.casefold().find(query)) >= 0:
            excerpt = text[max(0, start - 60) : start + len(query) + 60]
            return {"line": number, "turn": turn_number, "excerpt": excerpt}
    return None


# --------------------------------------------------------------------------------- one trajectory


def trajectory_view(source: Source, name: str, number: int) -> dict[str, Any]:
    """The data of one trajectory for the page. Raises: KeyError, IndexError."""
    lines = source.lines(name)
    row, line = lines.rows[number], lines.read(number)
    tokens = partial(tokens_between, line, source.text_of)
    turns, actions = line["turns"], actions_of(line)
    starts = [(turn.get("action_span") or [None])[0] for turn in turns]
    group = [r for r in lines.rows if r["group_id"] is not None and group_key(r) == group_key(row)]
    env, index = task_of(line, source.env) or ("", 0)
    fields = ("seed", "max_rounds", "weight_version", "terminated", "truncated", "first_state")
    return {
        "row": row,
        **{field: line.get(field) for field in fields},
        "opening": opening_of(line),
        "opening_tokens": tokens(0, starts[0] if starts else None),
        "turns": [
            turn_view(turn, tokens, next_start)
            for turn, next_start in zip(turns, [*starts[1:], None], strict=False)
        ],
        "group": group,
        "parts_at": {
            str(sibling["line"]): first_difference(actions, actions_of(lines.read(sibling["line"])))
            for sibling in group
            if sibling is not row
        },
        "agenttraj": to_agenttraj(str(row["task_id"]), line["messages"]),
        "command": f"python -m envs.{env} --task-index {index}" if env in ENVS else None,
        "previous": number - 1 if number else None,
        "next": number + 1 if number + 1 < len(lines) else None,
        "can_reenact": bool(turns) and env in ENVS,
    }


def actions_of(line: Mapping[str, Any]) -> list[str]:
    return [turn["action_text"] for turn in line["turns"]]


def turn_view(
    turn: Mapping[str, Any],
    tokens: Callable[[int | None, int | None], dict[str, Any] | None],
    next_start: int | None,
) -> dict[str, Any]:
    thought, action = split_action(turn["action_text"])
    start, end = turn.get("action_span") or (None, None)
    names = ("action_text", "observation_text", "reward", "parse_error", "generate_s", "env_s")
    return {
        **{name: turn.get(name) for name in (*names, "state")},
        "thought": thought,
        "action": action,
        "action_tokens": tokens(start, end),
        "observation_tokens": tokens(end, next_start),
    }


def tokens_between(
    line: Mapping[str, Any],
    text_of: Callable[[list[int]], list[str] | None],
    start: int | None,
    end: int | None,
) -> dict[str, Any] | None:
    """Tokens start..end - 1 with text, mask, log-prob, advantage; None if none were recorded."""
    if line.get("input_ids") is None:
        return None
    ids, advantages = line["input_ids"][start:end], line["advantages"]
    return {
        "ids": ids,
        "text": text_of(ids),
        "mask": line["loss_mask"][start:end],
        "log_prob": line["rollout_log_probs"][start:end],
        "advantage": advantages and advantages[start:end],
    }


def first_difference(actions_a: Sequence[str], actions_b: Sequence[str]) -> int:
    """The first turn, counted from 1, in which two samples act differently; 0 if there is none.

    >>> first_difference(["a", "b"], ["a", "c"]), first_difference(["a"], ["a", "b"])
    (2, 2)
    >>> first_difference(["a"], ["a"])
    0
    """
    pairs = enumerate(zip_longest(actions_a, actions_b), start=1)
    return next((turn for turn, (a, b) in pairs if a != b), 0)
