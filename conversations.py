"""Conversations: what was said, in the formats that people keep it in, and back as a trajectory.

Whoever imitates needs texts of agents that others have collected. They come as

    AgentTraj   {"item_id": "textcraft_31", "conversations": [
                    {"from": "human", "loss": null, "value": "Goal: ..."},
                    {"from": "gpt", "loss": true, "value": "Action: ..."}, ...]}
    messages    {"messages": [{"role": "user", "content": ...}, {"role": "assistant", ...}, ...]}
    a run       runs/NAME, what its policy sampled while it trained: trajectories/step_*.jsonl

in a file that is a JSON list, or holds one of them a line. All become AgentTraj, and an AgentTraj
becomes a trajectory by the path that sampling takes (`RolloutHandler`), so that imitation sees the
very tokens that the policy will. Turns of `gpt` with `loss` true are learned (loss_mask 1), and of
messages every assistant's but for those with `weight` 0. What an episode earned comes along as
"return": always from a run, with the world's "seed", and from a file where its records have them.
A record's task is its "item_id" or "id"; one that has neither is of a task of its own.

What a policy has sampled comes back with the ids that it sampled: text that is encoded again may
come out as other tokens. Ids are taken where this tokenizer reads them as the same text; a model
with another one has to encode again, which is counted. (An action that a limit had cut then ends as
if the policy had ended it: its text does not tell.)

A file is read a line, or a chunk of a list, at a time. Read next: sft.py.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

from chat import ChatTemplate
from trajectory import LOST, RolloutHandler, Trajectory, from_line

Conversation = dict[str, Any]

ROLES = {"human": "user", "gpt": "assistant", "system": "system"}
NAMES = {role: name for name, role in ROLES.items()}
EXPECTED = (
    'expected {"item_id": ..., "conversations": [{"from", "loss", "value"}, ...]}, or '
    '{"messages": [{"role", "content"}, ...]}, or a line of a run\'s trajectories'
)
CHUNK = 1 << 20  # characters read at once of a JSON list
BLANKS = re.compile(r"\s*")
ROUNDING = 1e-6  # returns are sums of increments: one of 1 may be a little less
LONGEST = 64 * CHUNK  # of one conversation: what is longer is no conversation, but a broken file


# ------------------------------------------------------------------------------------------- files


def read_conversations(
    paths: Sequence[Path],
    min_return: float | None = None,
    counts: Counter[str] | None = None,
) -> Iterator[Conversation]:
    """The conversations of files and runs, one after the other, checked.

    Args:
        min_return: leave out what earned less; every record must then have a return.
        counts: how many were "read", and of them "left out", is added here.
    Raises:
        ValueError: a line that names file, line and what is wrong there.
        OSError: a file cannot be read.
    """
    for file, number, content, name in items_of([f for path in paths for f in files_of(path)]):
        try:
            record = as_agenttraj(content, name, min_return)
            if counts is not None:
                counts.update(["read"] if record else ["read", "left out"])
            if record is not None:
                parts_of(record)
                yield record
        except ValueError as error:
            raise ValueError(f"{file}, line {number}: {error}") from None


def files_of(path: Path) -> list[Path]:
    """The file itself; of a run what it has trained on, and not what it was measured on."""
    if not path.is_dir():
        return [path]
    found = sorted(path.glob("trajectories/step_*.jsonl"))
    if not found:
        raise ValueError(f"{path} holds no trajectories/step_*.jsonl; is it a run?")
    return found


def items_of(files: Sequence[Path]) -> Iterator[tuple[Path, int, Any, str]]:
    """(file, line, object, what to call it if it has no id) of all files: no two names are equal,
    also where a list stands on one line, or two folders hold files of one name."""
    of_name = Counter(file.name for file in files)
    for file in files:
        called = file.name if of_name[file.name] == 1 else file
        for place, (number, content) in enumerate(objects_of(file), start=1):
            yield file, number, content, f"{called}:{place}"


def objects_of(path: Path) -> Iterator[tuple[int, Any]]:
    """(line, object) of a file that is a JSON list or holds a JSON object on each line.

    Raises:
        ValueError: it is neither.
    """
    with path.open(encoding="utf-8-sig") as file:
        try:
            first = _first_sign(file)
            yield from _list_items(path, file) if first == "[" else _lines(path, file)
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not text in UTF-8 ({error})") from None


def _first_sign(file: TextIO) -> str:
    """The first character that is no blank; the file is at its beginning again."""
    sign = " "
    while sign.isspace():
        sign = file.read(1)
    file.seek(0)
    return sign


def _lines(path: Path, file: TextIO) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(file, start=1):
        if line.strip():
            try:
                yield number, json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ValueError(f"{path}, line {number} is no JSON ({error})") from None


def _list_items(path: Path, file: TextIO) -> Iterator[tuple[int, Any]]:
    """What a JSON list holds, a chunk of text at a time."""
    decoder, text, place, number = json.JSONDecoder(), "", 0, 1
    ahead = "["  # what may come: the list, its first item or end, a comma or its end, an item
    while True:
        begin = BLANKS.match(text, place).end()  # type: ignore[union-attr]
        number += text.count("\n", place, begin)
        place, problem = begin, "the list does not end with ]"
        sign = text[place : place + 1]
        if sign == "]" and ahead in ("item or ]", ", or ]"):
            break
        if sign and ahead in ("[", ", or ]"):
            if sign != ahead[0]:
                raise ValueError(f"{path}, line {number}: expected {ahead}, got {sign!r}")
            place, ahead = place + 1, "item or ]" if sign == "[" else "item"
            continue
        if sign:
            try:
                item, end = decoder.raw_decode(text, place)
            except RecursionError:
                raise ValueError(f"{path}, line {number}: nested too deep") from None
            except ValueError as error:  # or it goes on in the next chunk
                problem = f"no JSON ({getattr(error, 'msg', error)})"
            else:
                yield number, item
                number += text.count("\n", place, end)
                place, ahead = end, ", or ]"
                continue
        more = file.read(max(CHUNK, len(text) - place))
        if not more or len(text) - place > LONGEST:
            raise ValueError(f"{path}, line {number}: {problem}")
        text, place = text[place:] + more, 0
    if (text[place + 1 :] + file.read(CHUNK)).strip():
        raise ValueError(f"{path}, line {number}: something stands behind the list's end")


# ------------------------------------------------------------------------------------------ formats


def as_agenttraj(content: Any, name: str, min_return: float | None = None) -> Conversation | None:
    """What a file holds as an AgentTraj conversation; None for a trajectory that shows nothing, or
    earned less than `min_return`.

    Args:
        name: its item_id, if it has none.
    Raises:
        ValueError: it is none of the formats.
    """
    if not isinstance(content, dict):
        raise ValueError(f"{str(content)[:60]!r}: {EXPECTED}")
    if "trajectory_id" in content:
        return _of_trajectory(content, min_return)
    if "reward" in content and "return" not in content:  # as AgentGym's evaluations note it
        content = content | {"return": content["reward"]}
    if min_return is not None and "return" not in content:
        raise ValueError("--min-return asks for a return, which this lacks; a run's lines have one")
    noted = (content.get("item_id"), content.get("id"), name)  # the last: nobody's but its own
    item_id = next(each for each in noted if each is not None)
    if isinstance(content.get("conversations"), list):
        record = content | {"item_id": item_id}
    elif isinstance(content.get("messages"), list):
        record = _of_messages(content["messages"], str(item_id))
        record |= {name: content[name] for name in ("return", "seed") if name in content}
    else:
        raise ValueError(f"{repr(list(content))[:80]}: {EXPECTED}")
    return record if _is_enough(return_of(record), min_return) else None


def return_of(record: Conversation) -> float | None:
    """What the episode earned; None where nobody has noted it.

    Raises:
        ValueError: what is noted is no finite number.
    """
    if "return" not in record:
        return None
    earned = record["return"]
    is_number = isinstance(earned, int | float) and not isinstance(earned, bool)
    if not is_number or not abs(earned) <= sys.float_info.max:
        told = f'"return" is {repr(earned)[:60]}, expected a finite number'
        raise ValueError(f"conversation {record.get('item_id')}: {told}")
    return float(earned)


def unit_return_of(record: Conversation) -> float | None:
    """`return_of`, where a return is a weight, and must be on one scale with what is explored.

    Raises:
        ValueError: it is none from 0 to 1.
    """
    earned = return_of(record)
    if earned is not None and not -ROUNDING <= earned <= 1 + ROUNDING:
        raise ValueError(
            f'conversation {record.get("item_id")}: "return" is {earned:g}, expected 0 to 1: '
            "divide returns by the highest there can be"
        )
    return earned


def _is_enough(earned: float | None, min_return: float | None) -> bool:
    return min_return is None or earned is None or earned > min_return - ROUNDING


def _of_messages(messages: Sequence[Any], item_id: str) -> Conversation:
    turns = []
    for i, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str) or role not in NAMES:
            told = repr(role)[:60]
            raise ValueError(f"message {i} has the role {told}, not one of {', '.join(NAMES)}")
        has_loss = role == "assistant" and bool(message.get("weight", 1))
        turns.append({"from": NAMES[role], "loss": has_loss, "value": message.get("content")})
    return {"item_id": item_id, "conversations": turns}


def _of_trajectory(line: dict[str, Any], min_return: float | None) -> Conversation | None:
    """A line of a run, with the ids that were sampled; None: it was lost, said nothing, or earned
    too little."""
    try:
        return _of_played(from_line(line), min_return)
    except (ValueError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"no line of a run's trajectories ({str(error)[:200]})") from None


def _of_played(
    played: Trajectory | RolloutHandler, min_return: float | None
) -> Conversation | None:
    earned = return_of({"item_id": played.task_id, "return": played.total_return})
    turns = played.turns
    if played.stop_reason in (None, *LOST) or not turns or not _is_enough(earned, min_return):
        return None
    record = _of_messages(played.messages, played.task_id)
    said = [turn for turn in record["conversations"] if turn["from"] == "gpt"]
    prompt, actions = said[: -len(turns)], said[-len(turns) :]
    for turn in prompt:
        turn["loss"] = False
    if isinstance(played, RolloutHandler):
        for turn, sampled in zip(actions, turns, strict=False):
            start, end = sampled.action_span
            turn["ids"] = played.input_ids[start:end]
    return record | {"return": earned, "seed": played.seed}


def to_agenttraj(item_id: str, messages: list[dict[str, str]]) -> Conversation:
    """Messages of a trajectory as an AgentTraj conversation; assistant turns after the first user
    turn get loss."""
    turns = []
    for i, message in enumerate(messages):
        loss = True if message["role"] == "assistant" and i > 1 else None
        turns.append({"from": NAMES[message["role"]], "loss": loss, "value": message["content"]})
    return {"item_id": item_id, "conversations": turns}


# ------------------------------------------------------------------------------------- trajectories


def parts_of(record: Conversation) -> tuple[list[Any], list[Any]]:
    """The prompt, and what follows: an observation, an action, in turn. All before the first action
    that has loss, less the observation right before it, is the prompt.

    Raises:
        ValueError: there is nothing to learn, or it is no conversation; says which turn.
    """
    turns, name = record["conversations"], f"conversation {record.get('item_id')}"
    for i, turn in enumerate(turns):
        is_turn = isinstance(turn, dict) and isinstance(turn.get("value"), str)
        if not is_turn or str(turn.get("from")) not in ROLES:
            raise ValueError(f"{name}: turn {i} must {_what_a_turn_must(turn)}")
        ids = turn.get("ids")
        if ids is not None and not (isinstance(ids, list) and all(map(_is_id, ids))):
            raise ValueError(f"{name}: turn {i}: ids must be a list of token ids, from 0 on")
        if not is_sound(turn["value"]):
            raise ValueError(f"{name}: turn {i} holds half of a surrogate pair, which is no text")
    actions = [i for i, turn in enumerate(turns) if turn["from"] == "gpt" and turn.get("loss")]
    if not turns:
        raise ValueError(f"{name} is empty")
    if not actions:
        unsaid = any(turn["from"] == "gpt" and "loss" not in turn for turn in turns)
        told = '; what is to be learned says "loss": true' if unsaid else ""
        raise ValueError(f"{name} has no gpt turn with loss: nothing to learn from{told}")
    first = actions[0]
    if first == 0 or turns[first - 1]["from"] != "human":
        raise ValueError(f"{name}: no observation stands before its first action")
    for i in range(first, len(turns)):
        expected = "gpt" if (i - first) % 2 == 0 else "human"
        if turns[i]["from"] != expected:
            raise ValueError(f"{name}: turn {i} is from {turns[i]['from']}, expected {expected}")
    return turns[: first - 1], turns[first - 1 :]


def _what_a_turn_must(turn: Any) -> str:
    """Be, with what to change where it is a known other format."""
    if isinstance(turn, dict) and "role" in turn and "from" not in turn:
        return 'have "from" and "value"; lists of "role" and "content" go by "messages"'
    is_in_parts = isinstance(turn, dict) and isinstance(turn.get("value"), list)
    told = "; this one's is a list: join the texts of its parts" if is_in_parts else ""
    return f"be from human, gpt or system, with a value{told}"


def _is_id(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def is_sound(text: str) -> bool:
    """No half of a surrogate pair, which JSON can hold and no tokenizer takes."""
    return text.isascii() or text.encode("utf-8", "ignore").decode() == text


def from_agenttraj(chat: ChatTemplate, record: Conversation, env: str = "") -> RolloutHandler:
    """An AgentTraj conversation as a trajectory, encoded like a sampled one.

    Raises:
        ValueError: as `parts_of`.
    """
    before, (opening, *turns) = parts_of(record)
    prompt = [{"role": ROLES[turn["from"]], "content": turn["value"]} for turn in before]
    actions, answers = turns[::2], turns[1::2]
    item_id = str(record.get("item_id"))
    handler = RolloutHandler(item_id, 0, env, item_id, "", 0, 0, len(actions))
    handler.start(chat, prompt, opening["value"])
    for i, turn in enumerate(actions):
        handler.next_prompt()
        ids = ids_of(chat, turn)
        handler.add_action(chat, ids, [0.0] * len(ids))
        if not turn.get("loss"):
            start = handler.turns[-1].action_span[0]
            handler.loss_mask[start:] = [0] * (len(handler.loss_mask) - start)
        if i + 1 < len(actions):
            handler.add_observation(chat, answers[i]["value"])
    handler.stop("success", success=True)
    return handler


def ids_of(chat: ChatTemplate, turn: Conversation) -> list[int]:
    """The ids that were sampled, where this tokenizer reads them as what was said; or new ones."""
    return turn["ids"] if has_exact_ids(chat, turn) else chat.action(turn["value"])


def was_encoded_again(handler: RolloutHandler, record: Conversation) -> bool:
    """Whether a trajectory has other ids than those that were sampled."""
    said = [turn for turn in parts_of(record)[1] if turn["from"] == "gpt"]
    return any(
        "ids" in turn and handler.input_ids[slice(*made.action_span)] != turn["ids"]
        for turn, made in zip(said, handler.turns, strict=True)
    )


def has_exact_ids(chat: ChatTemplate, turn: Conversation) -> bool:
    ids = turn.get("ids")
    if not ids or max(ids) >= len(chat.tokenizer):
        return False
    return chat.text_of(ids) == turn["value"]
