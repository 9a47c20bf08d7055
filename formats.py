"""Read conversations from files and earlier runs into the records that data.py uses.

    AgentTraj   {"item_id": ..., "conversations": [{"from", "loss", "value"}, ...]}
    messages    {"messages": [{"role": "user", "content": ...}, {"role": "assistant", ...}, ...]}
    a run       runs/NAME: the trajectories its policy sampled in training (step_*.jsonl)

A file is a JSON list or has one JSON object per line. Everything is checked here, as it is read. An
error names the file, the line and the problem.

Read next: sft.py. The formats in full: docs/data.md.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from chat import is_encodable
from data import NAMES, ROLES, Record
from run.files import read_text
from trajectory import LOST, RolloutHandler, Trajectory, from_line

Item = TypeVar("Item")
MAX_BYTES = 1 << 32  # per file; its objects need several times as much memory
EXPECTED = (
    'expected {"item_id": ..., "conversations": [{"from", "loss", "value"}, ...]}, or '
    '{"messages": [{"role", "content"}, ...]}, or a line of a run\'s trajectories'
)
MESSAGE_KEYS, TURN_KEYS = ("role", "content", "weight"), ("from", "value", "loss", "ids")
IGNORED_KEYS = (  # of a message or turn: nothing in them is learned
    *("id", "uuid", "name", "model", "date", "timestamp", "created", "created_at", "index"),
    *("type", "status", "source", "language", "finish_reason", "stop_reason", "usage", "metadata"),
)
UNREAD_KEYS = (  # of an object: they would change its conversation
    *("system", "system_prompt", "tools", "functions", "documents", "chat_template_kwargs"),
    *("image", "images", "audio", "audios", "video", "videos"),
)


def read_records(paths: Sequence[Path]) -> Iterator[Record]:
    """The conversations in files and runs, without trajectories that have nothing to learn from.
    Raises ValueError, which names file, line and problem."""
    return read_objects([file for path in paths for file in files_of(path)], to_record)


def files_of(path: Path) -> list[Path]:
    """The file itself, or the training trajectories of a run (not those of its evaluations)."""
    if not path.is_dir():
        return [path]
    files = sorted(path.glob("trajectories/step_*.jsonl"))
    if not files:
        raise ValueError(f"{path} has no trajectories/step_*.jsonl; is it a run?")
    return files


def read_objects(files: Sequence[Path], parse: Callable[[Any, str], Item | None]) -> Iterator[Item]:
    """Yield `parse(object, name)` for each object in the files, unless it is None. Each object has
    its own name, for use if it has no id.

    Raises:
        ValueError: names file, line and problem.
    """
    num_files = Counter(file.name for file in files)
    for file in files:
        name = file.name if num_files[file.name] == 1 else str(file)
        for number, (where, content) in enumerate(_objects_of(file), start=1):
            try:
                item = parse(content, f"{name}:{number}")
            except ValueError as error:
                raise ValueError(f"{file}, {where}: {error}") from None
            if item is not None:
                yield item


def _objects_of(path: Path) -> Iterator[tuple[str, Any]]:
    """("line 3", object) for each object in a file, or ("item 3", object) in a JSON list."""
    number, text = 1, read_text(path, MAX_BYTES)
    try:
        if text.lstrip().startswith("["):
            for index, item in enumerate(json.loads(text), start=1):
                yield f"item {index}", item
            return
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                yield f"line {number}", json.loads(line)
    except (ValueError, RecursionError) as error:
        number = max(number, getattr(error, "lineno", 1))  # for a list, use the error's line
        raise ValueError(f"{path}, line {number} is not JSON ({error})") from None


def to_record(content: Any, name: str) -> Record | None:
    """Convert an object of a file to a record; None for a trajectory with nothing to learn from.

    Args:
        name: item_id for an object without one.
    Raises:
        ValueError: its format is unknown, or it has nothing to learn from.
    """
    if not isinstance(content, dict):
        raise ValueError(f"{str(content)[:60]!r}: {EXPECTED}")
    if "trajectory_id" in content:
        try:
            record = record_of(from_line(content))
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"not a line of a run's trajectories ({str(error)[:200]})") from None
        return check_record(record) if record else None
    check_keys(content)
    turns = content.get("conversations")
    if turns is None and isinstance(content.get("messages"), list):
        turns = turns_of(content["messages"])
    if not isinstance(turns, list):
        raise ValueError(f"{repr(list(content))[:80]}: {EXPECTED}")
    ids = (content.get("item_id"), content.get("id"), name)
    record = {"item_id": str(next(i for i in ids if i is not None)), "conversations": turns}
    total = content.get("return", content.get("reward"))  # "reward" in AgentGym's evaluations
    optional = {"return": total, "seed": content.get("seed")}
    return check_record(
        record | {key: value for key, value in optional.items() if value is not None}
    )


def check_keys(content: dict[str, Any]) -> None:
    """Raise ValueError if an object has a part that would be left out of its conversation."""
    for key in UNREAD_KEYS:
        if content.get(key):
            raise ValueError(f"has {key}, which is not read: write it into a message, or remove it")


def turns_of(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Messages as AgentTraj turns. Assistant turns have loss unless their `weight` is 0."""
    turns = []
    for i, message in enumerate(messages):
        role = str(message.get("role")) if isinstance(message, dict) else "none"
        if role not in NAMES:
            raise ValueError(f"message {i} has role {role[:60]}, not one of {', '.join(NAMES)}")
        if problem := _problem_of_keys(message, MESSAGE_KEYS):
            raise ValueError(f"message {i} {problem}")
        has_loss = role == "assistant" and message.get("weight") != 0
        turns.append({"from": NAMES[role], "loss": has_loss, "value": message.get("content")})
    return turns


def record_of(trajectory: Trajectory) -> Record | None:
    """Convert a trajectory to a record with the sampled ids; None if it was lost or has no
    action."""
    turns = trajectory.turns
    if trajectory.stop_reason in (None, *LOST) or not turns:
        return None
    conversations = turns_of(trajectory.messages)
    actions = [turn for turn in conversations if turn["from"] == "gpt"]
    for turn in actions[: -len(turns)]:  # examples in the prompt
        turn["loss"] = False
    if isinstance(trajectory, RolloutHandler):
        for turn, sampled in zip(actions[-len(turns) :], turns, strict=False):
            turn["ids"] = trajectory.input_ids[slice(*sampled.action_span)]
    record = {"item_id": trajectory.task_id, "conversations": conversations}
    return record | {"return": trajectory.total_return, "seed": trajectory.seed}


def check_record(record: Record) -> Record:
    """Return the record if it is valid and has something to learn from.

    Raises:
        ValueError: names the invalid turn and the problem.
    """
    turns, name = record["conversations"], f"conversation {record['item_id']}"
    total = record.get("return", 0.0)
    is_number = isinstance(total, int | float) and not isinstance(total, bool)
    if not is_number or not abs(total) <= sys.float_info.max:
        raise ValueError(f'{name}: "return" is {repr(total)[:60]}, expected a finite number')
    for i, turn in enumerate(turns):
        if problem := _problem_of_turn(turn):
            raise ValueError(f"{name}: turn {i} {problem}")
    actions = [i for i, turn in enumerate(turns) if turn["from"] == "gpt" and turn.get("loss")]
    if not actions:
        hint = 'set "loss": true on the gpt turns to imitate'
        raise ValueError(f"{name} has nothing to learn from: {hint}")
    first = actions[0]
    if first == 0 or turns[first - 1]["from"] != "human":
        raise ValueError(f"{name}: no observation precedes its first action")
    for i in range(first, len(turns)):
        expected = "gpt" if (i - first) % 2 == 0 else "human"
        if turns[i]["from"] != expected:
            raise ValueError(f"{name}: turn {i} is from {turns[i]['from']}, expected {expected}")
    return record


def _problem_of_keys(message: dict[str, Any], keys: Sequence[str]) -> str | None:
    """The first part of a message that nothing reads although it may matter for learning."""
    for key, value in message.items():
        has_nothing = value in (None, "", [], {}) or type(value) in (int, float)
        if key in ("loss", "weight"):
            if value not in (None, 0, 1) or (value is not None and key not in keys):
                return f"has {key} {repr(value)[:40]}: use {keys[2]}, which is true or false"
        elif not (has_nothing or key in keys or key in IGNORED_KEYS):
            return f"has {key}, which is not read: write it as text, or remove it"
    return None


def _problem_of_turn(turn: Any) -> str | None:
    if not isinstance(turn, dict) or ("role" in turn and "from" not in turn):
        return 'must have "from" and "value"; for "role" and "content" use the key "messages"'
    if isinstance(turn.get("value"), list):
        return "has a list as its value: join its texts into one"
    if str(turn.get("from")) not in ROLES or not isinstance(turn.get("value"), str):
        return "must be from human, gpt or system, and its value must be text"
    if problem := _problem_of_keys(turn, TURN_KEYS):
        return problem
    ids = turn.get("ids") or []
    if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
        return "has ids that are not token ids: leave them out"
    if not is_encodable(turn["value"]):
        return "contains half of a surrogate pair, which cannot be encoded"
    return None
