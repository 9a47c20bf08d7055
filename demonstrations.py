"""Demonstrations: an oracle plays, and what it did is kept in the format that AgentGym's data has.

    {"item_id": "textcraft_31", "conversations": [{"from": "human", "loss": null, "value": ...},
                                                  {"from": "gpt", "loss": true, "value": ...}, ...]}

Every world that wants a warm start answers GET /oracle: a thought and a good action for the current
state. The oracle is asked and its answer is played over HTTP, as text, by the client that training
uses, so that a demonstration shows what the policy would have to write, parsing included, and the
machine that imitates needs no Java and no simulator.

A perfect player shows no way out of a mistake, and who has only imitated one repeats a command that
failed until the turns are over. So some demonstrations slip now and then: see `demonstrate`.

    oracle ──HTTP──> conversations, kept on disk: the same tasks are played once
    conversation ──conversations.from_agenttraj──> a trajectory with its loss mask

They are kept, under a key of what they depend on, so that a run that starts again need not wait
for the oracle (ScienceWorld's thinks for seconds), and its warm start, whose key is their text, is
found even if a server somewhere else would answer differently today.

Read next: warmstart.py, which imitates them.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from config import RunConfig
from conversations import NAMES, Conversation, read_conversations
from envclient import EnvClient, EnvPool, StepOutsideEpisode, local_server
from envs import Task, env_name, get_env, variant_of
from run.files import build_folder, cache_dir
from run.progress import phase
from runtime.mixture import in_each, tasks_of
from runtime.prompts import prompt_of, reprompted

NUM_CLIENTS = 4  # episodes side by side


class Manner(NamedTuple):
    """How an oracle shows what it can.

    slips: chance that a turn is a wrong move before the next right one. What is right later is
        played now, or once more what was right before: crafting without the ingredients, say. Such
        a turn has "loss" false, so that its answer and the way out of it are shown, and it is not
        imitated.
    thoughts: whether it says why it acts; else its turns are the actions alone, which are a third
        as long.
    """

    slips: float = 0.0
    thoughts: bool = True


PLAIN = Manner()
MAX_TURNS = 50  # of an episode that is shown


def demonstrate(
    client: EnvClient, task: Task, seed: int, manner: Manner = PLAIN, max_turns: int = MAX_TURNS
) -> Conversation | None:
    """The oracle plays one task: an AgentTraj conversation, or None if it failed, knew no move or
    took more than `max_turns`.

    Raises:
        EnvError: the server has no oracle (AgentGym's have none), or is gone.
    """
    play = partial(_play, client, task, seed, max_turns, manner.thoughts)
    clean = play(lambda done: None)
    if clean is None or not manner.slips:
        return clean
    right = [turn["value"] for turn in clean["conversations"] if turn["from"] == "gpt"]
    rng = random.Random(f"slips {task.task_id} {seed}")

    def wrong(done: int) -> str | None:
        moves = [*right[done + 1 :], *right[:done][-1:]]  # too early, or again
        return rng.choice(moves) if moves and rng.random() < manner.slips else None

    return play(wrong)


def _play(
    client: EnvClient,
    task: Task,
    seed: int,
    max_turns: int,
    thoughts: bool,
    wrong: Callable[[int], str | None],
) -> Conversation | None:
    """One episode of the oracle, but for what `wrong` says after so many of its moves."""
    observation, say = client.reset(task.task_index, seed), get_env(client.env).say
    turns: list[dict[str, Any]] = [
        {"from": NAMES[m["role"]], "loss": None, "value": m["content"]} for m in client.prompt
    ]
    done = 0
    for _ in range(max_turns):
        text = wrong(done)
        is_right = text is None
        if text is None:
            try:
                thought, action = client.oracle()
            except StepOutsideEpisode:  # it knows no move
                return None
            text = say(thought if thoughts else "", action)
            done += 1
        turns.append({"from": "human", "loss": None, "value": observation})
        turns.append({"from": "gpt", "loss": is_right, "value": text})
        observation, _, terminated, truncated, info = client.step(text)
        if terminated or truncated:
            solved = info["success"] and done  # not by slips alone: nothing would be imitated
            return {"item_id": task.task_id, "conversations": turns} if solved else None
    return None


def candidates(tasks: Sequence[Task], count: int, seed: int) -> Iterator[tuple[Task, int]]:
    """(task, seed) in the order in which they are tried: sub-tasks in turn, each task again with
    another seed once all are used; four times `count`, for those that fail."""
    rng = random.Random(seed)
    by_subtask: dict[str, list[Task]] = {}
    for task in tasks:
        by_subtask.setdefault(task.subtask, []).append(task)
    groups = []
    for group in by_subtask.values():
        rng.shuffle(group)
        groups.append(group)
    for n in range(4 * count):
        turn, which = divmod(n, len(groups))
        group = groups[which]
        yield group[turn % len(group)], seed + turn // len(group)


def play_demonstrations(
    env: str,
    tasks: Sequence[Task],
    count: int,
    seed: int,
    urls: Sequence[str] = (),
    manner: Manner = PLAIN,
) -> list[Conversation]:
    """`count` successful demonstrations, no two alike, in the order of `candidates`; fewer if too
    many fail."""
    chosen: list[Conversation] = []
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
        while len(chosen) < count:
            batch = list(islice(trials, NUM_CLIENTS))
            if not batch:
                break
            for demonstration in threads.map(play, clients, *zip(*batch, strict=True)):
                # Not twice the same: there are worlds in which the seed changes nothing.
                if demonstration is None or demonstration in chosen or len(chosen) == count:
                    continue
                chosen.append(demonstration)
                tick()
    return chosen


def demonstrations(
    env: str,
    tasks: Sequence[Task],
    count: int,
    seed: int,
    urls: Sequence[str] = (),
    manner: Manner = PLAIN,
) -> list[Conversation]:
    """
    `count` oracle demonstrations, played once and then read from the cache.

    Args:
        tasks: what may be shown; sub-tasks get equal parts.
        count: how many; the list is shorter when the oracle fails too often.
        seed: of the choice of tasks, and the first seed of their worlds.
        urls: servers of the environment; none: one is started here.
        manner: whether it errs, and says why it acts.
    Raises:
        ValueError: the oracle failed at every task.
        EnvError: no server, or one without an oracle.
    """
    ids = [task.task_id for task in tasks]
    asked = [env, source_of(env), variant_of(env), list(urls), ids, count, seed, *manner]
    key = hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]
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
    return list(read_conversations([file]))


def shown_in_each(
    config: RunConfig,
    count: int,
    seed: int,
    manner_of: Callable[[str], Manner] = lambda env: PLAIN,
) -> list[Conversation]:
    """`count` demonstrations of each world of a run, of the tasks that it trains on and under its
    prompt: how the oracle plays does not depend on that.

    Args:
        manner_of: world -> how its oracle shows it.
    Raises: as `demonstrations`.
    """
    shown = []
    for own in in_each(config):
        records = demonstrations(
            own.env, tasks_of(own), count, seed, own.env_addr, manner_of(own.env)
        )
        shown += reprompted(records, own.env, prompt_of(own))
    return shown


def source_of(env: str) -> str:
    """Hash of the files that a world's texts are made in, code and lines of data: its package, or
    the file that holds its class alone, and what all worlds share."""
    file = Path(inspect.getfile(get_env(env)))
    shared = Path(inspect.getfile(Task)).parent
    own = [file]
    if (file.parent / "__init__.py").exists():
        own = sorted([*file.parent.rglob("*.py"), *file.parent.rglob("*.jsonl")])
    paths = [*own, shared / "__init__.py", shared / "common.py"]
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()
