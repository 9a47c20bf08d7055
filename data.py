"""Conversations to learn from that the policy did not just play, their tokens, and oracles.

A conversation has the form of AgentGym's data (AgentTraj):

    {"item_id": "textcraft_31", "conversations": [
        {"from": "human", "loss": null, "value": "Goal: ..."},
        {"from": "gpt", "loss": true, "value": "Action: ..."}, ...]}

`encode` turns it into token ids along the same path as sampling (`RolloutHandler`), so that the
policy trains on exactly the sequences it will see. loss_mask is 1 on `gpt` turns with `loss` true.
A run's conversations carry the ids that were sampled: text that is encoded again may come out as
other tokens.

An oracle demonstrates tasks: it is asked over HTTP for a good action, turn by turn. Files of
others, and runs, are read in formats.py.

Read next: sft.py. Lesson: tutorials/14_imitation.md.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from chat import ChatTemplate
from envclient import (
    EnvClient,
    EnvConnectionError,
    EnvPool,
    EnvServerError,
    EnvTimeout,
    StepOutsideEpisode,
    local_server,
)
from envs import Task, env_name, get_env, variant_of
from run.files import build_folder, cache_dir
from run.progress import phase
from trajectory import RolloutHandler

Record = dict[str, Any]  # an AgentTraj conversation, with "return" and "seed" where they are known
Texts = tuple[tuple[str, str], ...]  # (speaker, text) of turns

ROLES = {"human": "user", "gpt": "assistant", "system": "system"}
NAMES = {role: name for name, role in ROLES.items()}
ROUNDING = 1e-6  # returns are sums of increments: a full one may come out a little below 1


def to_agenttraj(item_id: str, messages: list[dict[str, str]]) -> Record:
    """Messages of a trajectory as AgentGym's data has them: loss is null or true, and true for
    assistant turns after the first user turn."""
    turns = []
    for i, message in enumerate(messages):
        loss = True if message["role"] == "assistant" and i > 1 else None
        turns.append({"from": NAMES[message["role"]], "loss": loss, "value": message["content"]})
    return {"item_id": item_id, "conversations": turns}


# ---------------------------------------------------------------------------------- token sequences


@dataclass(frozen=True)
class Example:
    """A trajectory to learn from: its record, as files hold it, and its tokens."""

    record: Record
    trajectory: RolloutHandler
    is_reencoded: bool = False  # another tokenizer sampled it: these tokens are from its text

    @property
    def task_id(self) -> str:
        return str(self.record["item_id"])

    @property
    def total_return(self) -> float | None:
        """The return of the episode; None where it is not noted."""
        return self.record.get("return")

    @cached_property
    def parts(self) -> tuple[Texts, Texts]:
        """The opening, which ends with the first observation, and the turns from the first action
        to the last."""
        prompt, (observation, *turns) = parts_of(self.record)
        if turns[-1]["from"] == "human":  # the answer to the last action is not in the sequence
            turns = turns[:-1]
        opening = tuple((turn["from"], turn["value"]) for turn in [*prompt, observation])
        return opening, tuple((turn["from"], turn["value"]) for turn in turns)


def parts_of(record: Record) -> tuple[list[Any], list[Any]]:
    """The prompt, and the turns: observation and action alternate. The prompt is everything before
    the first action that has loss, except the observation right before that action."""
    turns = record["conversations"]
    is_learned = [turn["from"] == "gpt" and bool(turn.get("loss")) for turn in turns]
    first = is_learned.index(True)
    return turns[: first - 1], turns[first - 1 :]


def encode(chat: ChatTemplate, record: Record) -> Example:
    """A record with its tokens, encoded as sampling would have encoded them. Where a turn has the
    ids that were sampled, and this tokenizer reads them as the same text, they are taken.

    NOTE: an action that a limit cut short ends as if the policy had ended it when it is encoded
    from text; its ids tell.
    """
    before, (opening, *turns) = parts_of(record)
    prompt = [{"role": ROLES[turn["from"]], "content": turn["value"]} for turn in before]
    actions, answers = turns[::2], turns[1::2]
    item_id = str(record["item_id"])
    handler = RolloutHandler(item_id, 0, "", item_id, "", 0, 0, len(actions))
    handler.start(chat, prompt, opening["value"])
    is_reencoded = False
    for i, turn in enumerate(actions):
        handler.next_prompt()
        ids = turn.get("ids")
        if not (ids and has_exact_ids(chat, turn)):
            is_reencoded |= bool(ids)
            ids = chat.action(turn["value"])
        handler.add_action(chat, ids, [0.0] * len(ids))
        if not turn.get("loss"):
            start = handler.turns[-1].action_span[0]
            handler.loss_mask[start:] = [0] * (len(handler.loss_mask) - start)
        if i + 1 < len(actions):
            handler.add_observation(chat, answers[i]["value"])
    handler.stop("success", success=True)
    return Example(record, handler, is_reencoded)


def has_exact_ids(chat: ChatTemplate, turn: dict[str, Any]) -> bool:
    """Whether this tokenizer reads the ids of a turn as its text."""
    is_known = max(turn["ids"]) < len(chat.tokenizer)
    return is_known and chat.text_of(turn["ids"]) == turn["value"]


# ------------------------------------------------------------------------------------------ oracles


NUM_CLIENTS = 4  # episodes side by side
MAX_TURNS = 50  # of a demonstration
NUM_TRIES = 3  # of a demonstration whose environment fails


class OracleStyle(NamedTuple):
    """How an oracle plays a demonstration.

    slips: chance that a wrong move comes before the next right one. A perfect player shows no way
        out of a mistake, and a policy that has only imitated one repeats a failing command until
        its turns are over. A slip is an action that is right later, or was right before; it has
        "loss" false, so its answer and the recovery are shown while the slip is not imitated.
    thoughts: whether it says why it acts; turns without thoughts are a third as long.
    """

    slips: float = 0.0
    thoughts: bool = True


PLAIN = OracleStyle()


def demonstrate(
    client: EnvClient, task: Task, seed: int, style: OracleStyle = PLAIN
) -> Record | None:
    """The oracle plays one task, over HTTP and as text, by the client that training uses; None if
    it failed, knew no move or took more than MAX_TURNS.

    Raises:
        EnvError: the server has no oracle (AgentGym's have none), or is gone.
    """
    play = partial(_play_again, client, task, seed, style.thoughts)
    clean = play(lambda num_done: None)
    if clean is None or not style.slips:
        return clean
    right = [turn["value"] for turn in clean["conversations"] if turn["from"] == "gpt"]
    rng = random.Random(f"slips {task.task_id} {seed}")

    def slip(num_done: int) -> str | None:
        moves = [*right[num_done + 1 :], *right[:num_done][-1:]]  # too early, or again
        return rng.choice(moves) if moves and rng.random() < style.slips else None

    return play(slip)


def _play_again(client: EnvClient, *arguments: Any) -> Record | None:
    """`_play`, up to NUM_TRIES times where the environment fails: a warm start is hours of play."""
    for _ in range(NUM_TRIES - 1):
        with suppress(EnvConnectionError, EnvTimeout, EnvServerError):
            return _play(client, *arguments)
    return _play(client, *arguments)


def _play(
    client: EnvClient, task: Task, seed: int, thoughts: bool, slip: Callable[[int], str | None]
) -> Record | None:
    """One episode of the oracle; `slip` may give a wrong move, after so many right ones."""
    observation, say = client.reset(task.task_index, seed), get_env(client.env).say
    turns = prompt_turns(client.prompt)
    num_done = 0
    for _ in range(MAX_TURNS):
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


def prompt_turns(prompt: Sequence[dict[str, str]]) -> list[dict[str, Any]]:
    """The messages of a prompt as turns, none of which is learned."""
    return [{"from": NAMES[m["role"]], "loss": None, "value": m["content"]} for m in prompt]


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
    style: OracleStyle = PLAIN,
) -> list[Record]:
    """`count` successful demonstrations, no two alike, in the order of `candidates`; fewer if too
    many fail."""
    chosen: list[Record] = []
    with ExitStack() as stack:
        pool = EnvPool(env, list(urls) or [stack.enter_context(local_server(env))])
        stack.callback(pool.close)
        play = partial(demonstrate, style=style)
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
    style: OracleStyle = PLAIN,
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
    settings = [env, source_of(env), variant_of(env), list(urls), ids, count, seed, *style]
    key = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]
    file = cache_dir() / "demonstrations" / f"{env_name(env)}-{key}" / "agenttraj.json"

    def write(folder: Path) -> None:
        records = play_demonstrations(env, tasks, count, seed, urls, style)
        if not records:
            raise ValueError(
                f"the oracle of {env} solved none of {4 * count} tasks in {MAX_TURNS} turns each, "
                "or knew no move; nothing to show"
            )
        (folder / file.name).write_text(json.dumps(records, indent=1), encoding="utf-8")

    if not file.exists():
        build_folder(file.parent, write)
    records: list[Record] = json.loads(file.read_text(encoding="utf-8"))
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
