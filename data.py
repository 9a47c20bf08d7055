"""Training conversations: their format, their tokens, and the oracles that demonstrate tasks.

A conversation has the format of AgentGym's data (AgentTraj):

    {"item_id": "textcraft_31", "conversations": [
        {"from": "human", "loss": null, "value": "Goal: ..."},
        {"from": "gpt", "loss": true, "value": "Action: ..."}, ...]}

`encode` tokenizes a conversation with the same code as sampling does (`RolloutHandler`).
The policy therefore trains on exactly the sequences that it will see when it plays. loss_mask is 1
on `gpt` turns with `loss` true. A conversation from a run contains the sampled ids, because
encoding its text again can produce different tokens.

An oracle demonstrates tasks: at each turn, the environment server names a good action.
conversations.py reads conversations from files and earlier runs.

Read next: warmstart.py. Lesson: tutorials/14_imitation.md.
"""

from __future__ import annotations

import hashlib
import inspect
import json
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
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
from envs import ParseError, Task, env_name, get_env, variant_of
from formats import REACT, ActionFormat
from run.files import build_folder, cache_dir
from run.progress import phase
from trajectory import RolloutHandler

Record = dict[str, Any]  # an AgentTraj conversation, with "return" and "seed" if known
Texts = tuple[tuple[str, str], ...]  # (speaker, text) of turns

ROLES = {"human": "user", "gpt": "assistant", "system": "system"}
NAMES = {role: name for name, role in ROLES.items()}
ROUNDING = 1e-6  # a return is a sum of increments, so 1 can come out slightly lower


def to_agenttraj(item_id: str, messages: list[dict[str, str]], num_turns: int) -> Record:
    """Convert a trajectory's messages to AgentGym's format: loss is true for the assistant turns
    that were played, the last `num_turns`, and null for all others, also in a prompt's examples."""
    assistant = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    played = set(assistant[len(assistant) - num_turns :])
    turns = [as_turn(message, True if i in played else None) for i, message in enumerate(messages)]
    return {"item_id": item_id, "conversations": turns}


# ---------------------------------------------------------------------------------- token sequences


@dataclass(frozen=True)
class Example:
    """A trajectory to learn from: its record, as in a file, and its tokens."""

    record: Record
    trajectory: RolloutHandler
    is_reencoded: bool = False  # its ids were not usable, so its text was encoded again

    @property
    def task_id(self) -> str:
        return str(self.record["item_id"])

    @property
    def total_return(self) -> float | None:
        """The return of the episode, or None if unknown."""
        return self.record.get("return")

    @cached_property
    def parts(self) -> tuple[Texts, Texts]:
        """The opening (through the first observation), and the turns from the first to the last
        action."""
        prompt, (observation, *turns) = parts_of(self.record)
        if turns[-1]["from"] == "human":  # the sequence ends with the last action
            turns = turns[:-1]
        opening = tuple((turn["from"], turn["value"]) for turn in [*prompt, observation])
        return opening, tuple((turn["from"], turn["value"]) for turn in turns)


def parts_of(record: Record) -> tuple[list[Any], list[Any]]:
    """The prompt, and the turns after it: observations and actions that alternate, starting with
    the observation before the first action that has loss."""
    turns = record["conversations"]
    is_learned = [turn["from"] == "gpt" and bool(turn.get("loss")) for turn in turns]
    first = is_learned.index(True)
    return turns[: first - 1], turns[first - 1 :]


def encode(chat: ChatTemplate, record: Record, trust_ids: bool = False) -> Example:
    """Encode a record as sampling would have done. Its sampled ids are used if they are exact or
    `trust_ids`: this run has sampled or checked them before. If not, the record loses them.

    NOTE: without ids, an action that was cut at a token limit is encoded with an end-of-turn token,
    as if the policy had ended it.
    """
    is_reencoded = not trust_ids and not has_exact_ids(chat, record)
    if is_reencoded:
        texts = [{k: v for k, v in t.items() if k != "ids"} for t in record["conversations"]]
        record = record | {"conversations": texts}
    prompt_part, (opening, *turns) = parts_of(record)
    prompt = [as_message(turn) for turn in prompt_part]
    actions, answers = turns[::2], turns[1::2]
    item_id = str(record["item_id"])
    handler = RolloutHandler(item_id, 0, "", item_id, "", 0, 0, len(actions))
    handler.start(chat, prompt, opening["value"])
    for i, turn in enumerate(actions):
        handler.next_prompt()
        ids = turn.get("ids") or chat.action(turn["value"])
        handler.add_action(chat, ids, [0.0] * len(ids))
        if not turn.get("loss"):
            start = handler.turns[-1].action_span[0]
            handler.loss_mask[start:] = [0] * (len(handler.loss_mask) - start)
        if i + 1 < len(actions):
            handler.add_observation(chat, answers[i]["value"])
    handler.stop("success", success=True)
    return Example(record, handler, is_reencoded)


def has_exact_ids(chat: ChatTemplate, record: Record) -> bool:
    """Whether this tokenizer decodes all ids in a record to the texts beside them. A control token
    decodes to text, too, so a file could hide one in a turn; then the result is False."""
    sampled = [(turn["ids"], turn["value"]) for turn in record["conversations"] if turn.get("ids")]
    return all(
        max(ids) < len(chat.tokenizer) and chat.text_of(ids) == text and chat.is_action(ids)
        for ids, text in sampled
    )


# ------------------------------------------------------------------------------------------ oracles


NUM_CLIENTS = 4  # concurrent episodes
MAX_TURNS = 50  # per demonstration
NUM_ATTEMPTS = 3  # per demonstration, if the environment fails


class OracleStyle(NamedTuple):
    """Options of an oracle's demonstrations.

    slips: probability of a wrong move before the next right one (0..1). A perfect player never
        shows how to recover from a mistake. A policy that imitated only perfect play repeats a
        failing command until its turns are used up. A slip is an action that will be right later
        or was right before. It has "loss" false: the policy sees its result and the recovery, but
        does not imitate the slip itself.
    thoughts: whether the oracle explains its actions; without thoughts a turn is a third as long.
    """

    slips: float = 0.0
    thoughts: bool = True


PLAIN = OracleStyle()


def demonstrate(
    client: EnvClient, task: Task, seed: int, style: OracleStyle = PLAIN
) -> Record | None:
    """Let the oracle play one task as text over HTTP, through the same client as in training.
    Returns None if it failed, knew no move, or needed more than MAX_TURNS.

    Raises:
        EnvError: the server has no oracle (AgentGym's servers have none), or is not reachable.
    """
    play = partial(_play_with_retries, client, task, seed, style.thoughts)
    perfect = play(lambda num_done: None)
    if perfect is None or not style.slips:
        return perfect
    right = [turn["value"] for turn in perfect["conversations"] if turn["from"] == "gpt"]
    rng = random.Random(f"slips {task.task_id} {seed}")

    def slip(num_done: int) -> str | None:
        moves = [*right[num_done + 1 :], *right[:num_done][-1:]]  # too early, or again
        return rng.choice(moves) if moves and rng.random() < style.slips else None

    return play(slip)


def _play_with_retries(client: EnvClient, *arguments: Any) -> Record | None:
    """Call `_play`; retry if the environment fails, because a warm start can take hours."""
    for _ in range(NUM_ATTEMPTS - 1):
        with suppress(EnvConnectionError, EnvTimeout, EnvServerError):
            return _play(client, *arguments)
    return _play(client, *arguments)


def _play(
    client: EnvClient, task: Task, seed: int, thoughts: bool, slip: Callable[[int], str | None]
) -> Record | None:
    """One episode of the oracle. `slip(num_done)` returns a wrong move to make next, or None."""
    observation = client.reset(task.task_index, seed)
    turns = prompt_turns(client.prompt)
    num_done = 0
    for _ in range(MAX_TURNS):
        text = slip(num_done)
        is_right = text is None
        if text is None:
            try:
                thought, action = client.oracle()
            except StepOutsideEpisode:  # the oracle knows no move
                return None
            text = client.say(thought if thoughts else "", action)
            num_done += 1
        turns.append({"from": "human", "loss": None, "value": observation})
        turns.append({"from": "gpt", "loss": is_right, "value": text})
        observation, _, terminated, truncated, info = client.step(text)
        if terminated or truncated:
            # An episode solved by slips alone has no action to imitate.
            is_solved = info["success"] and num_done
            return {"item_id": task.task_id, "conversations": turns} if is_solved else None
    return None


def advised(
    chat: ChatTemplate, trajectories: Sequence[RolloutHandler], max_tokens: int, seed: int
) -> list[RolloutHandler]:
    """Examples for imitating an oracle in the states that the policy reaches (DAgger, arXiv
    1011.0686): each trajectory up to one of its turns, drawn at random, and then what the oracle
    would have written there. Only these tokens have loss_mask 1. Trajectories without advice that
    fits into `max_tokens` are left out."""
    examples = []
    for t in trajectories:
        turns = [(turn.action_span[0], chat.action(turn.advice)) for turn in t.turns if turn.advice]
        turns = [(start, ids) for start, ids in turns if start + len(ids) < max_tokens]
        t.used_in_loss = bool(turns)
        if turns:
            start, ids = random.Random(f"{seed} {t.trajectory_id}").choice(turns)
            example = replace(t, messages=[], turns=[], input_ids=t.input_ids[:start], _prompts=[])
            example.loss_mask, example.rollout_log_probs = [0] * start, [0.0] * start
            example.add_action(chat, ids, [0.0] * len(ids))
            examples.append(example)
    return examples


def check_say(
    env_class: Any, thought: str, action: str, action_format: ActionFormat = REACT
) -> None:
    """Raise ValueError if parse() does not read the action in the text that say() writes."""
    text = action_format.say(env_class, thought, action)
    try:
        (result,) = action_format.parse(env_class, text)
    except ParseError as error:
        result = f"ParseError: {error}"
    if result != action:
        wrote = f"{env_class.__name__}.say() wrote {text!r:.80} for {action!r:.40}"
        raise ValueError(f"{wrote}, but parse() read {result!r:.80}")


def prompt_turns(prompt: Sequence[dict[str, str]]) -> list[dict[str, Any]]:
    """The messages of a prompt as turns without loss."""
    return [as_turn(message, None) for message in prompt]


def as_turn(message: dict[str, Any], loss: bool | None) -> dict[str, Any]:
    """A message as a turn; tools that it describes stay with it."""
    turn = {"from": NAMES[message["role"]], "loss": loss, "value": message["content"]}
    return turn | ({"tools": message["tools"]} if "tools" in message else {})


def as_message(turn: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `as_turn`."""
    message = {"role": ROLES[turn["from"]], "content": turn["value"]}
    return message | ({"tools": turn["tools"]} if "tools" in turn else {})


def candidates(tasks: Sequence[Task], count: int, seed: int) -> Iterator[tuple[Task, int]]:
    """(task, seed) in the order to try them. Sub-tasks alternate, and a task is repeated, with the
    next seed, after all others of its sub-task. Yields 4 * `count` pairs, because some fail."""
    rng = random.Random(seed)
    by_subtask: dict[str, list[Task]] = {}
    for task in tasks:
        by_subtask.setdefault(task.subtask, []).append(task)
    groups = list(by_subtask.values())
    for group in groups:
        rng.shuffle(group)
    for n in range(4 * count):
        cycle, index = divmod(n, len(groups))
        group = groups[index]
        yield group[cycle % len(group)], seed + cycle // len(group)


def play_demonstrations(
    env: str,
    tasks: Sequence[Task],
    count: int,
    seed: int,
    urls: Sequence[str] = (),
    style: OracleStyle = PLAIN,
    action_format: ActionFormat = REACT,
) -> list[Record]:
    """`count` different successful demonstrations in the order of `candidates`, or fewer if too
    many fail. ValueError if all fail and parse() does not read what say() writes."""
    records: list[Record] = []
    with ExitStack() as stack:
        addresses = list(urls) or [stack.enter_context(local_server(env))]
        pool = EnvPool(env, addresses, action_format=action_format)
        stack.callback(pool.close)
        play = partial(demonstrate, style=style)
        clients = [pool.client() for _ in range(NUM_CLIENTS)]
        threads = ThreadPoolExecutor(NUM_CLIENTS)
        # On Ctrl-C do not wait for episodes: closing the server ends them.
        stack.callback(threads.shutdown, wait=False, cancel_futures=True)
        tick = stack.enter_context(phase("demonstrations", count, "episodes"))
        trials = candidates(tasks, count, seed)
        while len(records) < count and (batch := list(islice(trials, NUM_CLIENTS))):
            for record in threads.map(play, clients, *zip(*batch, strict=True)):
                # Skip duplicates: in some environments the seed changes nothing.
                if record is not None and record not in records and len(records) < count:
                    records.append(record)
                    tick()
        if not records:
            with suppress(StepOutsideEpisode):  # the oracle knows no move
                clients[0].reset(tasks[0].task_index, seed)
                check_say(get_env(env), *clients[0].oracle(), action_format)
    return records


def demonstrations(
    env: str,
    tasks: Sequence[Task],
    count: int,
    seed: int,
    urls: Sequence[str] = (),
    style: OracleStyle = PLAIN,
    action_format: ActionFormat = REACT,
) -> list[Record]:
    """`count` oracle demonstrations, played once and then cached. A resumed run therefore does not
    wait for the oracle (ScienceWorld's takes seconds per move) and finds the same warm start.

    Args:
        tasks: sub-tasks get equal shares.
        seed: selects the tasks, and is the first seed of their episodes.
        urls: servers of the environment; if empty, one is started.
    Raises:
        ValueError: the oracle failed at every task.
        EnvError: there is no server, or it has no oracle.
    """
    ids = [task.task_id for task in tasks]
    settings = [env, source_of(env), variant_of(env), list(urls), ids, count, seed, *style]
    settings.append(repr(action_format))
    key = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:16]
    file = cache_dir() / "demonstrations" / f"{env_name(env)}-{key}" / "agenttraj.json"

    def write(folder: Path) -> None:
        records = play_demonstrations(env, tasks, count, seed, urls, style, action_format)
        if not records:
            raise ValueError(
                f"the oracle of {env} solved none of {4 * count} tasks: it knew no move, or needed "
                f"more than {MAX_TURNS} turns"
            )
        (folder / file.name).write_text(json.dumps(records, indent=1), encoding="utf-8")

    if not file.exists():
        build_folder(file.parent, write)
    records: list[Record] = json.loads(file.read_text(encoding="utf-8"))
    return records


def source_of(env: str) -> str:
    """Hash of the files that define an environment's texts: its package or the file of its class,
    and the code that all environments share."""
    file = Path(inspect.getfile(get_env(env)))
    shared = Path(inspect.getfile(Task)).parent
    files = [file]
    if (file.parent / "__init__.py").exists():
        kinds = (".py", ".jsonl", ".toml", ".html")
        files = sorted(path for path in file.parent.rglob("*") if path.suffix in kinds)
    paths = [*files, shared / "__init__.py", shared / "common.py"]
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()
