"""A file of trajectories: the heads of its lines, the samples of a group, one whole.

A run writes less than a kilobyte of facts about a trajectory and many times that of text and
tokens. `Trajectory.to_line` writes the facts first, so the index only parses the head of each line:

    {"trajectory_id":...,"return":1.0,...,"messages":[...],"turns":[...],"input_ids":[...],...}
     ^---------------- head ------------^ the rest is read when somebody opens the trajectory

A line whose head is not that of a trajectory is counted and skipped, so everything after the index
can rely on the types of a row.

Read next: overview.py; server.py, which answers with these; page/trajectory.js, which shows them.
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
TAGGED = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)  # how SearchQA's prompt asks


# ----------------------------------------------------------------------------------------- a line


def parse(line: bytes) -> dict[str, Any] | None:
    """A JSON object; None for anything else. NaN and infinity, which JSON lacks, become None."""
    try:
        value = json.loads(line, parse_constant=lambda _: None)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def head_of(line: bytes) -> Row | None:
    """The short facts of a line; None if the line is not a whole trajectory."""
    is_whole = line.rstrip().endswith(b"}")
    end = line.find(HEAD_END.encode()) if is_whole else -1
    head = parse(line[:end] + b"}") if end > 0 else parse(line)
    if head is None or not isinstance(head.get("num_turns"), int):
        return None
    row = {name: head.get(name) for name in (*TEXTS, *NUMBERS)}
    has_texts = all(isinstance(row[name], str | None) for name in TEXTS)
    has_numbers = all(isinstance(row[name], int | float | None) for name in NUMBERS)
    return row if has_texts and has_numbers else None


def outcome_of(row: Row) -> str:
    """solved, failed, lost or unknown."""
    if row["stop_reason"] in LOST:
        return "lost"
    return {True: "solved", False: "failed"}.get(row["success"], "unknown")


def opening_of(line: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages before the first turn: the prompt, which may hold answers of its own, and the
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
    """Environment and index of a trajectory's task; None if its id does not name one.

    >>> task_of({"env": "textcraft", "task_id": "textcraft_31"}, None)
    ('textcraft', 31)
    """
    env = line.get("env") or env
    _, _, number = str(line.get("task_id")).rpartition("_")
    return (env, int(number)) if env and re.fullmatch(r"\d{1,12}", number) else None


# -------------------------------------------------------------------------------------- the index


@dataclass
class Lines:
    """The trajectories of a .jsonl file, as it was when it was indexed."""

    path: Path
    rows: list[Row]  # the head of each; "line" counts from 0
    offsets: list[int]  # where each begins, in bytes
    broken: int  # lines that are not trajectories

    def __len__(self) -> int:
        return len(self.rows)

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

    def keep(self, numbers: Sequence[int]) -> None:
        """Drop all other trajectories from the index."""
        self.rows = [self.rows[n] | {"line": line} for line, n in enumerate(numbers)]
        self.offsets = [self.offsets[n] for n in numbers]


def index(path: Path) -> Lines:
    """The index of a file with a trajectory on each line. Raises: OSError."""
    lines, end = Lines(path, [], [], 0), 0
    with open(path, "rb") as file:
        for line in file:
            start, end = end, end + len(line)
            if row := head_of(line):
                lines.rows.append({"line": len(lines)} | row)
                lines.offsets.append(start)
            elif line.strip() and line.endswith(b"\n"):  # without an end, it is still being written
                lines.broken += 1
    return lines


def open_lines(path: Path) -> Lines:
    """The index of a file. AgentTraj conversations, as one JSON list or one a line, are first
    written as trajectories to a temporary file; what is no conversation is counted as broken.

    Raises: ValueError if the file is not JSON; the message says where.
    """
    with open(path, "rb") as file:
        is_agenttraj = path.suffix == ".json" or "conversations" in (parse(file.readline()) or {})
    if not is_agenttraj:
        return index(path)
    lines = [f"{line}\n" for line in read_objects([path], _line_in)]
    converted = Path(tempfile.mkdtemp(), path.name)
    atexit.register(shutil.rmtree, converted.parent, ignore_errors=True)
    converted.write_text("".join(lines))
    return index(converted)


def _line_in(content: Any, name: str) -> str | None:
    try:
        record = to_record(content, name)
    except ValueError:
        return "broken"
    return json.dumps(line_of(record)) if record else None


def line_of(record: Record) -> dict[str, Any]:
    """An AgentTraj conversation in the form of our lines; it has no rewards and no tokens."""
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
    """The samples of each task side by side, in the order of the file."""
    groups: dict[Any, dict[str, Any]] = {}
    for row in lines.rows:
        about = {name: row[name] for name in ("group_id", "task_id", "subtask")}
        groups.setdefault(group_key(row), about | {"rows": []})["rows"].append(row)
    return list(groups.values())


def group_key(row: Row) -> tuple[Any, ...]:
    return row["step"], row["group_id"], row["task_id"]


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
            yield done, first_hit(json.loads(line), number, wanted)


def first_hit(line: Mapping[str, Any], number: int, wanted: str) -> dict[str, Any] | None:
    """The first place in a trajectory where the text stands; turn 0 is before the first turn."""
    places = [(0, str(line.get("task_id")))]
    places += [(0, message["content"]) for message in opening_of(line)]
    for place, turn in enumerate(line["turns"], start=1):
        places += [(place, turn["action_text"]), (place, turn["observation_text"])]
    for place, text in places:
        if (at := text.casefold().find(wanted)) >= 0:
            excerpt = text[max(0, at - 60) : at + len(wanted) + 60]
            return {"line": number, "turn": place, "excerpt": excerpt}
    return None


# --------------------------------------------------------------------------------- one trajectory


def trajectory_view(source: Source, name: str, number: int) -> dict[str, Any]:
    """Everything that a page shows of one trajectory. Raises: KeyError, IndexError."""
    lines = source.lines(name)
    row, line = lines.rows[number], lines.read(number)
    tokens = partial(tokens_between, line, source.text_of)
    turns, actions = line["turns"], actions_of(line)
    starts = [(turn.get("action_span") or [None])[0] for turn in turns]
    group = [r for r in lines.rows if r["group_id"] is not None and group_key(r) == group_key(row)]
    env, index = task_of(line, source.env) or ("", 0)
    facts = ("seed", "max_rounds", "weight_version", "terminated", "truncated", "first_state")
    return {
        "row": row,
        **{fact: line.get(fact) for fact in facts},
        "opening": opening_of(line),
        "opening_tokens": tokens(0, starts[0] if starts else None),
        "turns": [
            turn_view(turn, tokens, next_start)
            for turn, next_start in zip(turns, [*starts[1:], None], strict=False)
        ],
        "group": group,
        "parts_at": {
            str(other["line"]): first_difference(actions, actions_of(lines.read(other["line"])))
            for other in group
            if other is not row
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
    """Tokens start..end - 1 with their texts and numbers; None of a trajectory without tokens."""
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


def first_difference(ours: Sequence[str], theirs: Sequence[str]) -> int:
    """The first turn, counted from 1, in which two samples act differently; 0 if there is none.

    >>> first_difference(["a", "b"], ["a", "c"]), first_difference(["a"], ["a", "b"])
    (2, 2)
    >>> first_difference(["a"], ["a"])
    0
    """
    pairs = enumerate(zip_longest(ours, theirs), start=1)
    return next((turn for turn, (a, b) in pairs if a != b), 0)
