"""Read conversations from files and earlier runs into the records that data.py uses.

    AgentTraj   {"item_id": ..., "conversations": [{"from", "loss", "value"}, ...]}
    messages    {"messages": [{"role": "user", "content": ...}, {"role": "assistant", ...}, ...]}
    a run       runs/NAME: the trajectories its policy sampled in training (step_*.jsonl)

A file is a JSON list or has one JSON object per line. Everything is checked here, as it is read. An
error names the file, the line and the problem. A key that nothing reads is an error, too.

Read next: sft.py. The formats in full: docs/data.md.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from data import NAMES, ROLES, Record, as_turn
from envs.http import encodable
from run.files import read_text
from trajectory import LOST, RolloutHandler, Trajectory, from_line

Item = TypeVar("Item")
MAX_BYTES = 1 << 32  # per file; its objects need several times as much memory
EXPECTED = (
    'expected {"item_id": ..., "conversations": [{"from", "loss", "value"}, ...]}, or '
    '{"messages": [{"role", "content"}, ...]}, or a line of a run\'s trajectories'
)
RECORD_KEYS = ("item_id", "id", "conversations", "messages", "return", "reward", "seed")
MESSAGE_KEYS, TURN_KEYS = ("role", "content", "weight"), ("from", "value", "loss", "ids")
FIRST_KEYS = ("tools",)  # only of the first message, for the chat template
IGNORED_KEYS = (  # may stand anywhere; their values hold nothing to learn from
    *("id", "uuid", "name", "model", "date", "timestamp", "created", "created_at", "index", "idx"),
    *("type", "status", "source", "language", "finish_reason", "stop_reason", "usage", "metadata"),
    *("prompt_id", "category", "topic", "title", "tags", "dataset", "difficulty", "hash", "url"),
    *("success", "score", "rating", "score_chosen", "score_rejected", "num_turns", "num_tokens"),
    *("origin", "ref_chosen", "ref_rejected"),  # in a run's own pairs and evolving sets
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
    turns, messages = content.get("conversations"), content.get("messages")
    if not turns and isinstance(messages, list):
        turns, messages = turns_of(messages), None
    if not isinstance(turns, list) or messages:
        raise ValueError(f"{repr(list(content))[:80]}: {EXPECTED}")
    has_weight = isinstance(content.get("weight"), int | float) and content["weight"] > 0
    check_keys(content, (*RECORD_KEYS, "weight") if has_weight else RECORD_KEYS)
    ids = (content.get("item_id"), content.get("id"), name)
    record = {"item_id": str(next(i for i in ids if i not in (None, ""))), "conversations": turns}
    total = content.get("return", content.get("reward"))  # "reward" in AgentGym's evaluations
    return check_record(record | {"return": total, "seed": content.get("seed")})


def check_keys(part: dict[str, Any], keys: Sequence[str], where: str = "", flag: str = "") -> None:
    """Raise ValueError if an object, a side, a message or a turn has a key that nothing reads, with
    a value that is not empty. It may be meant for learning."""
    if (value := part.get(flag)) not in (None, 0, 1):
        raise ValueError(f"{where}has {flag} {repr(value)[:40]}, expected true or false")
    names = (*keys, *IGNORED_KEYS)
    unread = [k for k, value in part.items() if k not in names and value not in (None, "", [], {})]
    if unread:
        expected = f"(expected: {', '.join(keys)})"
        raise ValueError(
            f"{where}has {', '.join(unread)[:200]}, which is not read {expected}: "
            "write it into a message, or remove it"
        )


def turns_of(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Messages as AgentTraj turns. Assistant turns have loss unless their `weight` is 0."""
    turns = []
    for i, message in enumerate(messages):
        role = str(message.get("role")) if isinstance(message, dict) else "none"
        if role not in NAMES:
            raise ValueError(f"message {i} has role {role[:60]}, not one of {', '.join(NAMES)}")
        keys = MESSAGE_KEYS if i else (*MESSAGE_KEYS, *FIRST_KEYS)
        check_keys(message, keys, f"message {i} ", flag="weight")
        has_loss = role == "assistant" and message.get("weight") != 0
        turns.append(as_turn({"content": None} | message, has_loss))
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
    """Return the record, without fields that are None, if it is valid and can be learned from.

    Raises:
        ValueError: names the invalid turn and the problem.
    """
    record = {key: value for key, value in record.items() if value is not None}
    turns, name = record["conversations"], f"conversation {record['item_id']}"
    total, seed = record.get("return", 0.0), record.get("seed", 0)
    if type(total) not in (int, float) or not abs(total) <= sys.float_info.max:
        raise ValueError(f'{name}: "return" is {repr(total)[:60]}, expected a finite number')
    if type(seed) is not int:
        raise ValueError(f'{name}: "seed" is {repr(seed)[:60]}, expected an integer')
    if encodable(text := json.dumps(record, ensure_ascii=False)) != text:
        raise ValueError(f"{name} contains half of a surrogate pair, which cannot be encoded")
    for i, turn in enumerate(turns):
        if problem := _problem_of_turn(turn):
            raise ValueError(f"{name}: turn {i} {problem}")
        keys = TURN_KEYS if i else (*TURN_KEYS, *FIRST_KEYS)
        check_keys(turn, keys, f"{name}: turn {i} ", flag="loss")
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


def _problem_of_turn(turn: Any) -> str | None:
    if not isinstance(turn, dict) or ("role" in turn and "from" not in turn):
        return 'must have "from" and "value"; for "role" and "content" use the key "messages"'
    if isinstance(turn.get("value"), list):
        return "has a list as its value: join its texts into one"
    if str(turn.get("from")) not in ROLES or not isinstance(turn.get("value"), str):
        return "must be from human, gpt or system, and its value must be text"
    tools = turn.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(name_of(tool), str) for tool in tools):
        return "has tools that are not descriptions of functions as OpenAI writes them"
    ids = turn.get("ids") or []
    if not isinstance(ids, list) or not all(type(i) is int and i >= 0 for i in ids):
        return "has ids that are not token ids: leave them out"
    return None


def name_of(tool: Any) -> Any:
    """The name in {"type": "function", "function": {"name": ..., ...}}; None if there is none."""
    function = tool.get("function") if isinstance(tool, dict) else None
    return function.get("name") if isinstance(function, dict) else None
