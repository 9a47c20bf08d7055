"""Lists of trajectories, filtered and sorted by their heads; the samples of a group; one whole.

Read next: server.py, which answers with these; page/trajectory.js, which shows them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from conversations import NAMES, ROLES, to_agenttraj
from envs import ENVS
from trajectory import LOST
from viewer.lines import Lines, Row, opening_of, turns_of
from viewer.sources import Source

SORTS = (
    *("line", "task_id", "subtask", "return", "stop_reason", "num_turns", "num_tokens"),
    *("parse_errors", "advantage"),
)
# How the worlds' prompts have a model speak; what fits neither is action alone.
THOUGHT = re.compile(r"\s*(?:Thought:)?\s*(.*?)\s*\n?\s*Action:\s*(.*)", re.DOTALL)
TAGGED = re.compile(r"\s*(?:<think>)?(.*?)(?:</think>)?\s*<(search|answer)>(.*?)</\2>", re.DOTALL)


# ------------------------------------------------------------------------------------- the list


@dataclass(frozen=True)
class Filter:
    """Which trajectories of a file; an empty field lets all through."""

    subtask: str = ""
    stop_reason: str = ""
    outcome: str = ""  # solved, failed, lost
    task: str = ""  # part of the task's id
    min_return: float | None = None
    max_return: float | None = None
    min_turns: int | None = None
    max_turns: int | None = None
    parse_errors: bool = False

    def lets(self, row: Row) -> bool:
        return (
            self.subtask in ("", row["subtask"])
            and self.stop_reason in ("", row["stop_reason"])
            and self.outcome in ("", outcome_of(row))
            and self.task.casefold() in str(row["task_id"]).casefold()
            and within(self.min_return, row["return"], self.max_return)
            and within(self.min_turns, row["num_turns"], self.max_turns)
            and not (self.parse_errors and not row["parse_errors"])
        )


def outcome_of(row: Row) -> str:
    """
    >>> [outcome_of({"success": s, "stop_reason": r}) for s, r in ((True, "success"),
    ...  (False, "max_rounds"), (False, "env_error"), (None, None))]
    ['solved', 'failed', 'lost', 'unknown']
    """
    if row["stop_reason"] in LOST:
        return "lost"
    return {True: "solved", False: "failed"}.get(row["success"], "unknown")


def within(low: float | None, value: Any, high: float | None) -> bool:
    """What is unknown lies in no range that was asked for."""
    if low is None and high is None:
        return True
    if not isinstance(value, (int, float)):
        return False
    return (low is None or value >= low) and (high is None or value <= high)


def list_rows(
    lines: Lines, chosen: Filter, sort: str = "line", offset: int = 0, limit: int = 200
) -> dict[str, Any]:
    """A page of the list.

    Raises: ValueError: no such order.
    """
    key = sort.removeprefix("-")
    if key not in SORTS:
        raise ValueError(f"cannot sort by {key!r}; choose from {', '.join(SORTS)}")
    matching = [row for row in map(lines.row, range(len(lines))) if chosen.lets(row)]
    matching.sort(key=lambda row: order(row[key]), reverse=sort.startswith("-"))
    kinds = {n: sorted({str(v) for v in lines.columns[n] if v}) for n in ("subtask", "stop_reason")}
    return {
        "total": len(lines),
        "matching": len(matching),
        "broken": lines.broken,
        "rows": matching[offset : offset + limit],
        "subtasks": kinds["subtask"],
        "stop_reasons": kinds["stop_reason"],
    }


def order(value: Any) -> tuple[int, float, str]:
    """Numbers, then words in their natural order (textcraft_9 before textcraft_10), then nothing.

    >>> sorted(["t_10", None, "t_9"], key=order)
    ['t_9', 't_10', None]
    """
    if value is None:
        return (2, 0.0, "")
    if isinstance(value, (int, float)):
        return (0, float(value), "")
    return (1, 0.0, re.sub(r"\d+", lambda found: found[0].zfill(12), str(value)))


def groups_of(lines: Lines) -> list[dict[str, Any]]:
    """The samples of each task side by side, in the order of the file."""
    found: dict[Any, dict[str, Any]] = {}
    for row in map(lines.row, range(len(lines))):
        key = (row["step"], row["group_id"], row["task_id"])
        about = {name: row[name] for name in ("group_id", "task_id", "subtask")}
        found.setdefault(key, about | {"rows": []})["rows"].append(row)
    return list(found.values())


# ---------------------------------------------------------------------------------- one trajectory


def one(source: Source, name: str, number: int) -> dict[str, Any]:
    """Everything about one trajectory that a page shows.

    Raises: KeyError, IndexError: no such file or line.
    """
    lines = source.lines(name)
    row, line = lines.row(number), lines.read(number)
    if isinstance(line.get("conversations"), list):
        line = from_conversation(line)
    tokens = TokenTable(line, source.text_of)
    turns = turns_of(line)
    spans = [span_of(turn) for turn in turns]
    group = group_of(lines, number)
    actions = actions_of(line)
    return {
        "row": row,
        **{n: line.get(n) for n in ("step", "seed", "max_rounds", "env", "weight_version")},
        **{n: line.get(n) for n in ("terminated", "truncated", "first_state")},
        "opening": opening_of(line),
        "opening_tokens": tokens.between(0, spans[0][0] if spans and spans[0] else None),
        "turns": [
            shown_turn(turn, tokens, span, following)
            for turn, (span, following) in zip(turns, pairwise([*spans, None]), strict=True)
        ],
        "group": [lines.row(other) for other in group],
        "parts_at": {
            str(other): parts_at(actions, actions_of(lines.read(other)))
            for other in group
            if other != number
        },
        "agenttraj": agenttraj_of(row, line),
        "command": command_for(line, source.env),
        "previous": number - 1 if number else None,
        "next": number + 1 if number + 1 < len(lines) else None,
        "can_reenact": bool(turns) and command_for(line, source.env) is not None,
    }


def actions_of(line: Mapping[str, Any]) -> list[str]:
    return [str(turn.get("action_text") or "") for turn in turns_of(line)]


def shown_turn(
    turn: Mapping[str, Any],
    tokens: TokenTable,
    span: tuple[int, int] | None,
    following: tuple[int, int] | None,
) -> dict[str, Any]:
    text = str(turn.get("action_text") or "")
    thought, action = apart(text)
    names = ("observation_text", "reward", "parse_error", "generate_s", "env_s", "state")
    return {
        "action_text": text,
        "thought": thought,
        "action": action,
        **{name: turn.get(name) for name in names},
        "action_tokens": tokens.between(*span) if span else None,
        "observation_tokens": tokens.between(span[1], following and following[0]) if span else None,
    }


def apart(text: str) -> tuple[str | None, str | None]:
    """(thought, action) of what a model said.

    >>> apart("Thought: I need wood.\\nAction: get 1 oak log")
    ('I need wood.', 'get 1 oak log')
    >>> apart("Action: look"), apart("look")
    ((None, 'look'), (None, 'look'))
    >>> apart("I wonder. <search>who wrote it</search>")
    ('I wonder.', 'search: who wrote it')
    """
    if found := TAGGED.match(text):
        return found[1].strip() or None, f"{found[2]}: {found[3].strip()}"
    if found := THOUGHT.match(text):
        return found[1].strip() or None, found[2].strip()
    return None, text.strip() or None


def span_of(turn: Mapping[str, Any]) -> tuple[int, int] | None:
    span = turn.get("action_span")
    if isinstance(span, list) and len(span) == 2 and all(isinstance(n, int) for n in span):
        return span[0], span[1]
    return None


class TokenTable:
    """The token lists of a line, cut into pieces with their texts."""

    def __init__(
        self, line: Mapping[str, Any], text_of: Callable[[list[int]], list[str] | None]
    ) -> None:
        self.ids: list[int] | None = line.get("input_ids")
        self.lists = {
            "mask": line.get("loss_mask"),
            "log_prob": line.get("rollout_log_probs"),
            "advantage": line.get("advantages"),
        }
        self.text_of = text_of

    def between(self, start: int, end: int | None) -> dict[str, Any] | None:
        """Tokens start..end - 1, or to the last; None of a trajectory without tokens."""
        if not isinstance(self.ids, list):
            return None
        ids = self.ids[start:end]
        parts = {name: None if x is None else x[start:end] for name, x in self.lists.items()}
        return {"ids": ids, "text": self.text_of(ids), **parts}


def group_of(lines: Lines, number: int) -> list[int]:
    """The lines of the same task and step, this one among them; alone without a group."""
    columns = lines.columns
    group, step, task = (columns[n][number] for n in ("group_id", "step", "task_id"))
    if group is None:
        return [number]
    near = range(max(0, number - 512), min(len(lines), number + 512))  # groups lie together
    same = (group, step, task)
    return [
        n
        for n in near
        if (columns["group_id"][n], columns["step"][n], columns["task_id"][n]) == same
    ]


def parts_at(ours: Sequence[Any], theirs: Sequence[Any]) -> int:
    """The first turn, counted from 1, in which two samples act otherwise; 0: in none.

    >>> parts_at(["a", "b"], ["a", "c"]), parts_at(["a"], ["a", "b"]), parts_at(["a"], ["a"])
    (2, 2, 0)
    """
    for turn, (a, b) in enumerate(zip(ours, theirs, strict=False), start=1):
        if a != b:
            return turn
    return 0 if len(ours) == len(theirs) else min(len(ours), len(theirs)) + 1


# ------------------------------------------------------------------------------------ other formats


def from_conversation(record: Mapping[str, Any]) -> dict[str, Any]:
    """An AgentTraj conversation in the form of our lines; it has no rewards and no tokens."""
    said = [turn for turn in record["conversations"] if isinstance(turn, dict)]
    messages = [
        {"role": ROLES.get(str(t.get("from")), "user"), "content": str(t.get("value", ""))}
        for t in said
    ]
    turns = []
    for i, turn in enumerate(said):
        if turn.get("from") == "gpt" and turn.get("loss"):
            answer = messages[i + 1]["content"] if i + 1 < len(messages) else ""
            turns.append({"action_text": messages[i]["content"], "observation_text": answer})
    return {"task_id": record.get("item_id"), "messages": messages, "turns": turns}


def agenttraj_of(row: Row, line: Mapping[str, Any]) -> dict[str, Any]:
    messages = [
        {"role": m["role"], "content": str(m.get("content", ""))}
        for m in line.get("messages") or ()
        if isinstance(m, dict) and m.get("role") in NAMES
    ]
    return to_agenttraj(str(row["task_id"]), messages)


def task_of(line: Mapping[str, Any], env: str | None) -> tuple[str, int] | None:
    """The world and the index of a trajectory's task; None where its id names none.

    >>> task_of({"env": "textcraft", "task_id": "textcraft_31"}, None)
    ('textcraft', 31)
    """
    env = line.get("env") or env
    number = re.fullmatch(r".*?_(\d{1,12})", str(line.get("task_id")))
    return (str(env), int(number[1])) if env and number else None


def command_for(line: Mapping[str, Any], env: str | None) -> str | None:
    """What plays this task by hand, for a world of the project."""
    task = task_of(line, env)
    if task is None or task[0] not in ENVS:
        return None
    return f"python -m envs.{task[0]} --task-index {task[1]}"
