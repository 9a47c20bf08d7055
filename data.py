"""Trajectories to learn from that the policy did not just play: files, earlier runs, an oracle.

    AgentTraj   {"item_id": "textcraft_31", "conversations": [
                    {"from": "human", "loss": null, "value": "Goal: ..."},
                    {"from": "gpt", "loss": true, "value": "Action: ..."}, ...]}
    messages    {"messages": [{"role": "user", "content": ...}, {"role": "assistant", ...}, ...]}
    a run       runs/NAME, what its policy sampled in training: trajectories/step_*.jsonl
    an oracle   asked over HTTP for a good action, turn by turn

Each format is checked once, where it is read, and becomes an AgentTraj record; a record becomes
token ids once, along the same path as sampling (`RolloutHandler`), so that the policy trains on
exactly the sequences it will see. loss_mask is 1 on `gpt` turns with `loss` true. A run's records
carry the ids that were sampled: text that is encoded again may come out as other tokens.

Read next: sft.py. Lesson: tutorials/14_imitation.md; formats in full: docs/data.md.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from chat import ChatTemplate, is_sound
from config import RunConfig, in_each, prompt_of, tasks_of
from envclient import EnvClient, EnvPool, StepOutsideEpisode, local_server
from envs import Task, env_name, get_env, variant_of
from run.files import build_folder, cache_dir
from run.progress import phase
from trajectory import LOST, RolloutHandler, Trajectory, from_line

Record = dict[str, Any]  # an AgentTraj conversation, with "return" and "seed" where they are known

ROLES = {"human": "user", "gpt": "assistant", "system": "system"}
NAMES = {role: name for name, role in ROLES.items()}
EXPECTED = (
    'expected {"item_id": ..., "conversations": [{"from", "loss", "value"}, ...]}, or '
    '{"messages": [{"role", "content"}, ...]}, or a line of a run\'s trajectories'
)
ROUNDING = 1e-6  # returns are sums of increments: a full one may come out a little below 1


@dataclass(frozen=True)
class Example:
    """A trajectory to learn from: its record, as files hold it, and its tokens."""

    record: Record
    trajectory: RolloutHandler

    @property
    def task_id(self) -> str:
        return str(self.record.get("item_id"))

    @cached_property
    def total_return(self) -> float | None:
        return return_of(self.record)

    @cached_property
    def parts(self) -> tuple[tuple[tuple[str, str], ...], tuple[tuple[str, str], ...]]:
        """(speaker, text) of the opening, which ends with the first observation, and of the turns
        from the first action to the last."""
        prompt, (observation, *turns) = parts_of(self.record)
        if turns[-1]["from"] == "human":  # the answer to the last action is not in the sequence
            turns = turns[:-1]
        opening = tuple((turn["from"], turn["value"]) for turn in [*prompt, observation])
        return opening, tuple((turn["from"], turn["value"]) for turn in turns)


# ------------------------------------------------------------------------------------------- files


def read_records(
    paths: Sequence[Path],
    min_return: float | None = None,
    counts: Counter[str] | None = None,
) -> Iterator[Record]:
    """The conversations of files and runs, checked.

    Args:
        min_return: leave out what earned less; every record must then have a return.
        counts: the number of records "read" and "left out" is added here.
    Raises:
        ValueError: names file, line and what is wrong there.
        OSError: a file cannot be read.
    """
    for where, content, name in items_of([file for path in paths for file in files_of(path)]):
        try:
            record = to_record(content, name, min_return)
            if counts is not None:
                counts.update(["read"] if record else ["read", "left out"])
            if record is not None:
                parts_of(record)
                yield record
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None


def files_of(path: Path) -> list[Path]:
    """The file itself, or the training trajectories of a run (not those of its evaluations)."""
    if not path.is_dir():
        return [path]
    files = sorted(path.glob("trajectories/step_*.jsonl"))
    if not files:
        raise ValueError(f"{path} holds no trajectories/step_*.jsonl; is it a run?")
    return files


def items_of(files: Sequence[Path]) -> Iterator[tuple[str, Any, str]]:
    """(where it is, object, name if it has no id of its own) for each object in the files. No two
    names are equal."""
    num_named = Counter(file.name for file in files)
    for file in files:
        name = file.name if num_named[file.name] == 1 else str(file)
        for place, (where, content) in enumerate(_objects_of(file), start=1):
            yield f"{file}, {where}", content, f"{name}:{place}"


def _objects_of(path: Path) -> Iterator[tuple[str, Any]]:
    """(place, object) of a file that is a JSON list, or has a JSON object on each line."""
    where = "line 1"
    try:
        with path.open(encoding="utf-8-sig") as file:
            while (sign := file.read(1)).isspace():
                pass
            file.seek(0)
            if sign == "[":
                for number, item in enumerate(json.load(file), start=1):
                    yield f"item {number}", item
                return
            for number, line in enumerate(file, start=1):
                if line.strip():
                    where = f"line {number}"
                    yield where, json.loads(line)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not text in UTF-8 ({error})") from None
    except (ValueError, RecursionError) as error:  # ValueError: a number of 5,000 digits
        if isinstance(error, json.JSONDecodeError) and error.lineno > 1:
            where = f"line {error.lineno}"
        raise ValueError(f"{path}, {where} is not JSON ({error})") from None


# ----------------------------------------------------------------------------------------- formats


def to_record(content: Any, name: str, min_return: float | None = None) -> Record | None:
    """An object of a file as an AgentTraj record; None if it is a trajectory with nothing to learn,
    or earned less than `min_return`.

    Args:
        name: its item_id, if it has none.
    Raises:
        ValueError: it has none of the formats.
    """
    if not isinstance(content, dict):
        raise ValueError(f"{str(content)[:60]!r}: {EXPECTED}")
    if "trajectory_id" in content:
        try:
            record = record_of(from_line(content))
        except (ValueError, TypeError, AttributeError, OverflowError) as error:
            raise ValueError(f"not a line of a run's trajectories ({str(error)[:200]})") from None
    else:
        record = _of_foreign(content, name)
        if min_return is not None and "return" not in record:
            raise ValueError("--min-return needs a return in each record, and this has none")
    total = None if record is None else return_of(record)
    is_enough = min_return is None or total is None or total > min_return - ROUNDING
    return record if is_enough else None


def _of_foreign(content: dict[str, Any], name: str) -> Record:
    if "reward" in content and "return" not in content:  # the name in AgentGym's evaluations
        content = content | {"return": content["reward"]}
    ids = (content.get("item_id"), content.get("id"), name)
    item_id = next(item_id for item_id in ids if item_id is not None)
    if isinstance(content.get("conversations"), list):
        return content | {"item_id": item_id}
    if not isinstance(content.get("messages"), list):
        raise ValueError(f"{repr(list(content))[:80]}: {EXPECTED}")
    record = {"item_id": str(item_id), "conversations": turns_of(content["messages"])}
    return record | {key: content[key] for key in ("return", "seed") if key in content}


def return_of(record: Record) -> float | None:
    """The return of the episode; None where it is not noted.

    Raises:
        ValueError: it is not a finite number.
    """
    if "return" not in record:
        return None
    total = record["return"]
    is_number = isinstance(total, int | float) and not isinstance(total, bool)
    if not is_number or not abs(total) <= sys.float_info.max:
        problem = f'"return" is {repr(total)[:60]}, expected a finite number'
        raise ValueError(f"conversation {record.get('item_id')}: {problem}")
    return float(total)


def turns_of(messages: Sequence[Any]) -> list[dict[str, Any]]:
    """Messages as AgentTraj turns: an assistant's is learned unless its `weight` is 0."""
    turns = []
    for i, message in enumerate(messages):
        role = message.get("role") if isinstance(message, dict) else None
        if not isinstance(role, str) or role not in NAMES:
            raise ValueError(
                f"message {i} has role {repr(role)[:60]}, not one of {', '.join(NAMES)}"
            )
        has_loss = role == "assistant" and bool(message.get("weight", 1))
        turns.append({"from": NAMES[role], "loss": has_loss, "value": message.get("content")})
    return turns


def record_of(trajectory: Trajectory) -> Record | None:
    """A played trajectory as a record, with the ids that were sampled; None if it was lost, or the
    policy never spoke."""
    turns = trajectory.turns
    total = return_of({"item_id": trajectory.task_id, "return": trajectory.total_return})
    if trajectory.stop_reason in (None, *LOST) or not turns:
        return None
    conversations = turns_of(trajectory.messages)
    actions = [turn for turn in conversations if turn["from"] == "gpt"]
    for turn in actions[: -len(turns)]:  # the prompt's examples
        turn["loss"] = False
    if isinstance(trajectory, RolloutHandler):
        for turn, sampled in zip(actions[-len(turns) :], turns, strict=False):
            turn["ids"] = trajectory.input_ids[slice(*sampled.action_span)]
    record = {"item_id": trajectory.task_id, "conversations": conversations}
    return record | {"return": total, "seed": trajectory.seed}


def to_agenttraj(item_id: str, messages: list[dict[str, str]]) -> Record:
    """Messages of a trajectory as AgentGym's data has them: loss is null or true, and true for
    assistant turns after the first user turn."""
    turns = []
    for i, message in enumerate(messages):
        loss = True if message["role"] == "assistant" and i > 1 else None
        turns.append({"from": NAMES[message["role"]], "loss": loss, "value": message["content"]})
    return {"item_id": item_id, "conversations": turns}


# ---------------------------------------------------------------------------------- token sequences


def parts_of(record: Record) -> tuple[list[Any], list[Any]]:
    """The prompt, and the turns: observation and action alternate. The prompt is everything before
    the first action that has loss, except the observation right before that action.

    Raises:
        ValueError: it is not a conversation, or has nothing to learn; says which turn.
    """
    turns, name = record["conversations"], f"conversation {record.get('item_id')}"
    for i, turn in enumerate(turns):
        if problem := _problem_of_turn(turn):
            raise ValueError(f"{name}: turn {i} {problem}")
    if not turns:
        raise ValueError(f"{name} is empty")
    actions = [i for i, turn in enumerate(turns) if turn["from"] == "gpt" and turn.get("loss")]
    if not actions:
        is_unmarked = any(turn["from"] == "gpt" and "loss" not in turn for turn in turns)
        hint = '; mark the turns to learn with "loss": true' if is_unmarked else ""
        raise ValueError(f"{name} has no gpt turn with loss: nothing to learn from{hint}")
    first = actions[0]
    if first == 0 or turns[first - 1]["from"] != "human":
        raise ValueError(f"{name}: there is no observation before its first action")
    for i in range(first, len(turns)):
        expected = "gpt" if (i - first) % 2 == 0 else "human"
        if turns[i]["from"] != expected:
            raise ValueError(f"{name}: turn {i} is from {turns[i]['from']}, expected {expected}")
    return turns[: first - 1], turns[first - 1 :]


def _problem_of_turn(turn: Any) -> str | None:
    if not isinstance(turn, dict):
        return "is not an object"
    if "role" in turn and "from" not in turn:
        return 'must have "from" and "value"; a list of "role" and "content" is named "messages"'
    value, ids = turn.get("value"), turn.get("ids") or []
    if isinstance(value, list):
        return "has a list as its value: join the texts of its parts"
    if str(turn.get("from")) not in ROLES or not isinstance(value, str):
        return "must be from human, gpt or system, with a text as its value"
    if not is_sound(value):
        return "holds half of a surrogate pair, which cannot be encoded"
    if not isinstance(ids, list) or not all(type(n) is int and n >= 0 for n in ids):
        return "has ids that are not a list of token ids"
    return None


def encode(chat: ChatTemplate, record: Record) -> Example:
    """A record with its tokens, encoded as sampling would have encoded them. Where a turn has the
    ids that were sampled, and this tokenizer reads them as the same text, they are taken.

    NOTE: an action that a limit cut short ends as if the policy had ended it when it is encoded
    from text; its ids tell.

    Raises:
        ValueError: as `parts_of`.
    """
    before, (opening, *turns) = parts_of(record)
    prompt = [{"role": ROLES[turn["from"]], "content": turn["value"]} for turn in before]
    actions, answers = turns[::2], turns[1::2]
    item_id = str(record.get("item_id"))
    handler = RolloutHandler(item_id, 0, "", item_id, "", 0, 0, len(actions))
    handler.start(chat, prompt, opening["value"])
    for i, turn in enumerate(actions):
        handler.next_prompt()
        ids = turn["ids"] if has_exact_ids(chat, turn) else chat.action(turn["value"])
        handler.add_action(chat, ids, [0.0] * len(ids))
        if not turn.get("loss"):
            start = handler.turns[-1].action_span[0]
            handler.loss_mask[start:] = [0] * (len(handler.loss_mask) - start)
        if i + 1 < len(actions):
            handler.add_observation(chat, answers[i]["value"])
    handler.stop("success", success=True)
    return Example(record, handler)


def was_encoded_again(example: Example) -> bool:
    """Whether its tokens differ from those that were sampled."""
    actions = parts_of(example.record)[1][1::2]
    trajectory = example.trajectory
    return any(
        turn.get("ids") and trajectory.input_ids[slice(*made.action_span)] != turn["ids"]
        for turn, made in zip(actions, trajectory.turns, strict=True)
    )


def has_exact_ids(chat: ChatTemplate, turn: dict[str, Any]) -> bool:
    ids = turn.get("ids")
    if not ids or max(ids) >= len(chat.tokenizer):
        return False
    return chat.text_of(ids) == turn["value"]


# ------------------------------------------------------------------------------------------ oracles


NUM_CLIENTS = 4  # episodes side by side
MAX_TURNS = 50  # of a demonstration


class Manner(NamedTuple):
    """How an oracle plays a demonstration.

    slips: chance that a wrong move comes before the next right one. A perfect player shows no way
        out of a mistake, and a policy that has only imitated one repeats a failing command until
        its turns are over. A slip is an action that is right later, or was right before; it has
        "loss" false, so its answer and the recovery are shown while the slip is not imitated.
    thoughts: whether it says why it acts; turns without thoughts are a third as long.
    """

    slips: float = 0.0
    thoughts: bool = True


PLAIN = Manner()


def demonstrate(
    client: EnvClient, task: Task, seed: int, manner: Manner = PLAIN, max_turns: int = MAX_TURNS
) -> Record | None:
    """The oracle plays one task, over HTTP and as text, by the client that training uses; None if
    it failed, knew no move or took more than `max_turns`.

    Raises:
        EnvError: the server has no oracle (AgentGym's have none), or is gone.
    """
    play = partial(_play, client, task, seed, max_turns, manner.thoughts)
    clean = play(lambda num_done: None)
    if clean is None or not manner.slips:
        return clean
    right = [turn["value"] for turn in clean["conversations"] if turn["from"] == "gpt"]
    rng = random.Random(f"slips {task.task_id} {seed}")

    def slip(num_done: int) -> str | None:
        moves = [*right[num_done + 1 :], *right[:num_done][-1:]]  # too early, or again
        return rng.choice(moves) if moves and rng.random() < manner.slips else None

    return play(slip)


def _play(
    client: EnvClient,
    task: Task,
    seed: int,
    max_turns: int,
    thoughts: bool,
    slip: Callable[[int], str | None],
) -> Record | None:
    """One episode of the oracle; `slip` may give a wrong move, after so many right ones."""
    observation, say = client.reset(task.task_index, seed), get_env(client.env).say
    turns: list[dict[str, Any]] = [
        {"from": NAMES[m["role"]], "loss": None, "value": m["content"]} for m in client.prompt
    ]
    num_done = 0
    for _ in range(max_turns):
        text = slip(num_done)
        is_right = text is None
        if text is None:
            try:
                thought, action = client.oracle()
            except StepOutsideEpisode:  # it knows no move
                return None
            text = say(thought if thoughts else "", action)
            num_done += 1
        turns.append({"from": "human", "loss": None, "value": observation})
        turns.append({"from": "gpt", "loss": is_right, "value": text})
        observation, _, terminated, truncated, info = client.step(text)
        if terminated or truncated:
            # Solved by slips alone, there would be nothing to imitate.
            is_solved = info["success"] and num_done
            return {"item_id": task.task_id, "conversations": turns} if is_solved else None
    return None


def candidates(tasks: Sequence[Task], count: int, seed: int) -> Iterator[tuple[Task, int]]:
    """(task, seed) in the order in which they are tried: sub-tasks in turn, and a task again with
    the next seed once all are used; four times `count`, as some fail."""
    rng = random.Random(seed)
    by_subtask: dict[str, list[Task]] = {}
    for task in tasks:
        by_subtask.setdefault(task.subtask, []).append(task)
    groups = list(by_subtask.values())
    for group in groups:
        rng.shuffle(group)
    for n in range(4 * count):
        turn, place = divmod(n, len(groups))
        group = groups[place]
        yield group[turn % len(group)], seed + turn // len(group)


def play_demonstrations(
    env: str,
    tasks: Sequence[Task],
    count: int,
    seed: int,
    urls: Sequence[str] = (),
    manner: Manner = PLAIN,
) -> list[Record]:
    """`count` successful demonstrations, no two alike, in the order of `candidates`; fewer if too
    many fail."""
    chosen: list[Record] = []
    with ExitStack() as stack:
        pool = EnvPool(env, list(urls) or [stack.enter_context(local_server(env))])
        stack.callback(pool.close)
        play = partial(demonstrate, manner=manner)
        clients = [pool.client() for _ in range(NUM_CLIENTS)]
        threads = ThreadPoolExecutor(NUM_CLIENTS)
        # Ctrl-C waits for no episode: the server ends next, and its clients with it.
        stack.callback(threads.shutdown, wait=False, cancel_futures=True)
        tick = stack.enter_context(phase("demonstrations", count, "episodes"))
        trials = candidates(tasks, count, seed)
        while len(chosen) < count and (batch := list(islice(trials, NUM_CLIENTS))):
            for record in threads.map(play, clients, *zip(*batch, strict=True)):
                # In some environments the seed changes nothing: never the same twice.
                if record is not None and record not in chosen and len(chosen) < count:
                    chosen.append(record)
                    tick()
    return chosen


def demonstrations(
    env: str,
    tasks: Sequence[Task],
    count: int,
    seed: int,
    urls: Sequence[str] = (),
    manner: Manner = PLAIN,
) -> list[Record]:
    """`count` oracle demonstrations, played once and then read from the cache: a resumed run does
    not wait for the oracle (ScienceWorld's thinks for seconds), and finds the same warm start.

    Args:
        tasks: sub-tasks get equal shares.
        seed: of the choice of tasks, and the first seed of their episodes.
        urls: servers of the environment; none: one is started here.
    Raises:
        ValueError: the oracle failed at every task.
        EnvError: no server, or one without an oracle.
    """
    ids = [task.task_id for task in tasks]
    settings = [env, source_of(env), variant_of(env), list(urls), ids, count, seed, *manner]
    key = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]
    file = cache_dir() / "demonstrations" / f"{env_name(env)}-{key}" / "agenttraj.json"

    def write(folder: Path) -> None:
        records = play_demonstrations(env, tasks, count, seed, urls, manner)
        if not records:
            raise ValueError(
                f"the oracle of {env} solved none of {4 * count} tasks in {MAX_TURNS} turns each, "
                "or knew no move; nothing to show"
            )
        (folder / file.name).write_text(json.dumps(records, indent=1), encoding="utf-8")

    if not file.exists():
        build_folder(file.parent, write)
    return list(read_records([file]))


def demonstrations_for(
    config: RunConfig,
    count: int,
    seed: int,
    manner_of: Callable[[str], Manner] = lambda env: PLAIN,
) -> list[Record]:
    """`count` demonstrations of each environment of a run, of its training tasks and under its
    prompt (the oracle plays the same under any prompt).

    Args:
        manner_of: environment -> how its oracle plays.
    """
    records = []
    for c in in_each(config):
        prompt, num_replaced = prompt_of(c), len(get_env(c.env).PROMPT)
        manner = manner_of(c.env)
        for record in demonstrations(c.env, tasks_of(c), count, seed, c.env_addr, manner):
            if prompt is not None:
                turns = record["conversations"][num_replaced:]
                opening = [
                    {"from": NAMES[m["role"]], "loss": None, "value": m["content"]} for m in prompt
                ]
                record = record | {"conversations": opening + turns}
            records.append(record)
    return records


def source_of(env: str) -> str:
    """Hash of the files that make an environment's texts: its package, or the file of its class,
    and what all environments share."""
    file = Path(inspect.getfile(get_env(env)))
    shared = Path(inspect.getfile(Task)).parent
    files = [file]
    if (file.parent / "__init__.py").exists():
        files = sorted([*file.parent.rglob("*.py"), *file.parent.rglob("*.jsonl")])
    paths = [*files, shared / "__init__.py", shared / "common.py"]
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()
