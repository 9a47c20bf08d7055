"""Read a file of trajectories: index its lines, group samples, search, show one trajectory.

A line has less than a kilobyte of short fields and many times as much text and tokens. The index
holds only the short fields; the rest is read again when the user opens the trajectory.

Anyone could have written the file. A line in which a field is missing or has another type is
counted and skipped, so all later code can rely on the types in FIELDS.

Read next: overview.py; server.py, which serves these; page/trajectory.js, which shows them.
"""

from __future__ import annotations

import atexit
import json
import math
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any

from conversations import to_record
from data import NAMES, ROLES, Record, parts_of, to_agenttraj
from envs import ENVS
from trajectory import DERIVED_FIELDS, LIST_FIELDS, LOST

if TYPE_CHECKING:
    from viewer.sources import Source

Row = dict[str, Any]
TEXTS = ("trajectory_id", "env", "task_id", "subtask", "stop_reason", "error")
NUMBERS = ("step", "group_id", *DERIVED_FIELDS)
FLAGS = ("success", "used_in_loss")
# The action format of SearchQA. Stopping at the next open tag makes it linear in the text.
TAGGED = re.compile(r"<(search|answer)>((?:(?!<\1>).)*?)</\1>", re.DOTALL)

# The beginning of an action in the other formats.
ACTION = re.compile(r"Action:|(?=<tool_call>|\[TOOL_CALLS\]|\{\"name\"|```)")

# The types of a line's fields, for `fits`.
TEXT, NUMBER, FLAG = (str, NoneType), (int, float, NoneType), (bool, NoneType)
TURN = {
    **{"action_text": str, "observation_text": str, "parse_error": TEXT, "advice": TEXT},
    **{"reward": NUMBER, "generate_s": NUMBER, "env_s": NUMBER, "action_span": ([int], NoneType)},
}
FIELDS = {
    **dict.fromkeys(TEXTS, TEXT) | dict.fromkeys(NUMBERS, NUMBER) | dict.fromkeys(FLAGS, FLAG),
    **{"num_turns": int, "messages": [{"role": str, "content": str}], "turns": [TURN]},
    **dict.fromkeys(LIST_FIELDS, ([*NUMBER], NoneType)) | {"input_ids": ([int], NoneType)},
}


# ----------------------------------------------------------------------------------------- a line


def parse(line: bytes) -> dict[str, Any] | None:
    """A JSON object, or None for anything else. NaN and infinity, which JSON lacks, become None."""
    to_float = lambda digits: x if math.isfinite(x := float(digits)) else None  # noqa: E731
    try:
        value = json.loads(line, parse_constant=lambda _: None, parse_float=to_float)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def trajectory_of(raw: bytes, number: int) -> dict[str, Any] | None:
    """The trajectory in line `number` of a file; None if a field has another type, or if there are
    fewer actions than turns. An AgentTraj conversation is converted."""
    line: Any = parse(raw)
    if line is not None and "trajectory_id" not in line:
        try:
            record = to_record(line, f"line {number}")
        except ValueError:
            return None
        line = record and line_of(record)
    if not fits(line, FIELDS):
        return None
    roles = [message["role"] for message in line["messages"]]
    has_actions = roles.count("assistant") >= len(line["turns"])
    return line if has_actions and set(roles) <= NAMES.keys() else None


def fits(value: Any, kind: Any) -> bool:
    """Whether a value from JSON is of this type, of one of these kinds (a tuple), a list of these
    types or of such objects, or an object with such fields (a dict). A missing field is None.

    >>> fits({"a": [1, 2]}, {"a": [int, float], "b": (str, NoneType)}), fits({}, {"a": [int]})
    (True, False)
    """
    if isinstance(kind, tuple):
        return any(fits(value, k) for k in kind)
    if isinstance(kind, list) and isinstance(kind[0], dict):
        return isinstance(value, list) and all(fits(item, *kind) for item in value)
    if isinstance(kind, list):  # of numbers: it can be long, so only its types are compared
        return isinstance(value, list) and set(map(type, value)) <= set(kind)
    if isinstance(kind, dict):
        return isinstance(value, dict) and all(fits(value.get(n), k) for n, k in kind.items())
    return type(value) is kind and (kind is not int or abs(value) < 2**63)


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
    >>> split_action("Two logs. <tool_call>...</tool_call>")
    ('Two logs.', '<tool_call>...</tool_call>')
    >>> split_action("<think>Action: go?</think> <search>who wrote it</search>")
    ('Action: go?', 'search: who wrote it')
    """
    closed, _, answer = text.rpartition("</think>")
    if match := TAGGED.search(answer):
        thought, action = answer[: match.start()], f"{match[1]}: {match[2].strip()}"
    else:
        start = ACTION.search(answer)
        thought, action = (
            (answer[: start.start()], answer[start.end() :]) if start else ("", answer)
        )
    thought = (closed + thought).replace("<think>", "").replace("</think>", "").strip()
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

    def raw(self, number: int) -> bytes:
        with open(self.path, "rb") as file:
            file.seek(self.offsets[number])
            return file.readline()

    def read(self, number: int) -> dict[str, Any]:
        """All fields of trajectory `number`. Raises LookupError if the file has changed."""
        line = trajectory_of(self.raw(number), number)
        if line is None:
            raise LookupError(f"{self.path.name} has changed; reload the page")
        return line

    def keep(self, numbers: Sequence[int]) -> None:
        """Keep only these trajectories in the index."""
        self.rows = [self.rows[n] | {"line": line} for line, n in enumerate(numbers)]
        self.offsets = [self.offsets[n] for n in numbers]


def index(path: Path) -> Lines:
    """The index of a file with one trajectory or conversation per line. Raises: OSError."""
    lines, end = Lines(path, [], [], 0), 0
    with open(path, "rb") as file:
        for raw in file:
            start, end = end, end + len(raw)
            if line := trajectory_of(raw, len(lines)):
                row = {name: line.get(name) for name in (*TEXTS, *NUMBERS, *FLAGS)}
                lines.rows.append({"line": len(lines)} | row)
                lines.offsets.append(start)
            elif raw.strip() and raw.endswith(b"\n"):  # without \n it is still being written
                lines.broken += 1
    return lines


def open_lines(path: Path) -> Lines:
    """The index of a file. The items of a JSON list are first copied to the lines of a temporary
    file. Raises: ValueError or RecursionError if it is not valid JSON."""
    text = path.read_text("utf-8-sig", "replace") if path.suffix == ".json" else ""
    if not text.lstrip().startswith("["):
        return index(path)
    lines = [json.dumps(item) + "\n" for item in json.loads(text)]
    line_file = Path(tempfile.mkdtemp(), path.name)
    atexit.register(shutil.rmtree, line_file.parent, ignore_errors=True)
    line_file.write_text("".join(lines))
    return index(line_file)


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
        "record": record,
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
    for number, offset in enumerate(lines.offsets):
        raw = lines.raw(number)
        can_match = not is_plain or query.encode() in raw.lower()
        line = trajectory_of(raw, number) if can_match else None
        yield offset + len(raw), line and first_hit(line, number, query)


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
    spans = [(*(turn.get("action_span") or ()), None, None)[:2] for turn in line["turns"]]
    starts = [start for start, _ in spans]
    turns = [turn_view(turn) for turn in line["turns"]]
    for turn, (start, end), next_start in zip(turns, spans, [*starts[1:], None], strict=False):
        turn["action_tokens"] = tokens(start, end)
        turn["observation_tokens"] = tokens(end, next_start)
    group = [r for r in lines.rows if r["group_id"] is not None and group_key(r) == group_key(row)]
    actions = {
        r["line"]: [turn["action_text"] for turn in lines.read(r["line"])["turns"]] for r in group
    }
    env, index = task_of(line, source.env) or ("", 0)
    fields = ("seed", "max_rounds", "weight_version", "terminated", "truncated", "first_state")
    return {
        "row": row,
        **{field: line.get(field) for field in fields},
        "opening": opening_of(line),
        "opening_tokens": tokens(0, starts[0] if starts else None),
        "turns": turns,
        "group": group,
        "parts_at": {
            str(n): first_difference(actions[number], actions[n]) for n in actions if n != number
        },
        "agenttraj": line.get("record")
        or to_agenttraj(str(row["task_id"]), line["messages"], len(turns)),
        "command": f"python -m envs.{env} --task-index {index}" if env in ENVS else None,
        "previous": number - 1 if number else None,
        "next": number + 1 if number + 1 < len(lines) else None,
        "can_reenact": bool(turns) and env in ENVS,
    }


def turn_view(turn: Mapping[str, Any]) -> dict[str, Any]:
    """The texts and numbers of a turn."""
    thought, action = split_action(turn["action_text"])
    names = ("action_text", "observation_text", "reward", "parse_error", "advice", "state")
    fields = {name: turn.get(name) for name in (*names, "generate_s", "env_s")}
    fields["kind"] = str(turn.get("kind", "act"))
    return {"thought": thought, "action": action, **fields}


def tokens_between(
    line: Mapping[str, Any],
    text_of: Callable[[list[int]], list[str] | None],
    start: int | None,
    end: int | None,
) -> dict[str, Any] | None:
    """Tokens start..end - 1 with text, mask, log-prob, advantage; None if none were recorded."""
    if None in (line.get(name) for name in ("input_ids", "loss_mask", "rollout_log_probs")):
        return None
    ids, advantages = line["input_ids"][start:end], line.get("advantages")
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
