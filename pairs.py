"""Preference pairs: of two tries at one task, which was better? What DPO learns from.

A return says how good a trajectory was, a pair only that it was better than another one. That is
all that direct preference optimization asks for (arXiv 2305.18290; of whole trajectories of agents
arXiv 2403.02502). Nothing is sampled while it trains, so that pairs can come from anywhere:

    x  prompt, first observation       the same in both, token for token
       ├─ a₀ o₁ a₁ o₂ a₂    return 1
       ├─ a₀ o₁ a₁          return 0.5    1 > 0 is a pair, the gap is 1; with a min_gap of 0.5
       └─ a₀                return 0      1 > 0.5 and 0.5 > 0 are two more

Both sides must be of one task and open with the same prompt and first observation, x. A task that
is played with another seed may be another world, and who came further there may just have had the
easier one: such a pair teaches luck. The method's equation stands on it too: log Z(x), which nobody
can compute, is in the reward of both sides and drops out of their difference only where x is the
same. Trajectories that note their seeds are compared where these are the same; an opening alone
does not tell, where the world leaves to chance what comes later. What it says then may differ: it
answers other actions, and is not learned.

Left out, and counted: gaps that may be noise, chosen sides that earned too little to be an example,
sides on which the policy said the same (the world told them apart), what another pair says already,
and what a task has beyond its share, lest those that were played most decide alone.

    pairs_of           a run, all its samples of a task against each other
    pairs_of_experts   chosen from demonstrations, rejected from what the policy did
    read_pairs         a file, a JSON list or an object a line, as agents' data has it:
        {"id": "textcraft_31", "prompt": [{"from": "human", "value": "Goal: ..."}],
         "chosen": [{"from": "gpt", "value": ...}, {"from": "human", ...}, ...], "rejected": [...]}
        or messages ({"role", "content"}), or texts; or no prompt, and two whole conversations

`encode_pairs` makes rows 2i and 2i + 1 of pair i, by the path that sampling takes; both are of the
group i, so that `scale/prefix.py` computes x once. Read next: dpo.py.
"""

from __future__ import annotations

import json
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Any

from batching import Batch, make_batch
from chat import ChatTemplate
from conversations import (
    ROUNDING,
    Conversation,
    as_agenttraj,
    from_agenttraj,
    items_of,
    parts_of,
    return_of,
)
from trajectory import RolloutHandler

SIDES = ("chosen", "rejected")
EXPECTED = (
    'expected {"id", "prompt", "chosen", "rejected"}, each a list of {"from", "value"} or '
    '{"role", "content"}, or a text'
)


@dataclass(frozen=True)
class Pair:
    """Two trajectories of one task that open alike; the chosen one is better."""

    task_id: str
    chosen: Conversation
    rejected: Conversation
    gap: float | None = None  # difference of returns; None where they are unknown


@dataclass(frozen=True)
class PairSettings:
    """Which pairs are taken. Returns are compared up to ROUNDING."""

    min_gap: float = 0.5  # least difference of returns; equal ones never make a pair
    min_return: float = 0.0  # the chosen one's
    pairs_per_task: int = 4
    seed: int = 0  # of the choice among equal gaps


# ------------------------------------------------------------------------------- from trajectories


def pairs_of(
    conversations: Iterable[Conversation], settings: PairSettings, counts: Counter[str]
) -> list[Pair]:
    """Who earned more against who earned less, among all that have task and opening in common.

    The result does not depend on the order of what is given.

    Args:
        counts: what is left out is added here: per pair, and as "no partner" per opening at which
            nobody was better than another.
    Raises:
        ValueError: a conversation that is none, or has no return; says which.
    """
    groups = _grouped(conversations)
    for members in groups.values():
        for side in members:
            if side.earned is None:
                raise ValueError(
                    f'conversation {side.task_id} has no "return"; expected one as a run\'s '
                    "trajectories have it, since the better of two is asked for"
                )
        members.sort(key=lambda side: -(side.earned or 0.0))  # so that the better comes first
    found = {key: _of_one_seed(combinations(members, 2), counts) for key, members in groups.items()}
    return _select(found, settings, counts)


def pairs_of_experts(
    expert: Iterable[Conversation],
    experience: Iterable[Conversation],
    settings: PairSettings,
    counts: Counter[str],
) -> list[Pair]:
    """What an expert did against what the policy did from the same opening.

    Where one of the two has no return the expert counts as better, unless it said the same.

    Raises:
        ValueError: a conversation that is none; says which.
    """
    experts, others = _grouped(expert), _grouped(experience)
    keys = experts.keys() | others.keys()
    met = {key: product(experts.get(key, ()), others.get(key, ())) for key in keys}
    found = {key: _of_one_seed(candidates, counts) for key, candidates in met.items()}
    return _select(found, settings, counts)


Said = tuple[tuple[str, str], ...]  # (speaker, text)


@dataclass(frozen=True)
class _Side:
    """A conversation as what makes it comparable."""

    record: Conversation
    task_id: str
    opening: Said  # prompt and first observation
    own: Said  # from the first action to the last
    earned: float | None
    seed: int | None  # of the world, where it is known


Candidate = tuple[_Side, _Side]  # chosen, rejected
Group = tuple[str, Said]  # task, opening


def _side(record: Conversation) -> _Side:
    prompt, (observation, *turns) = parts_of(record)
    opening = tuple((turn["from"], turn["value"]) for turn in [*prompt, observation])
    own = tuple((turn["from"], turn["value"]) for turn in turns)
    own = own[: len(own) - (len(own) + 1) % 2]  # what the world said last is not encoded either
    task_id, seed = str(record.get("item_id")), record.get("seed")
    return _Side(record, task_id, opening, own, return_of(record), seed)


def _of_one_seed(candidates: Iterable[Candidate], counts: Counter[str]) -> list[Candidate]:
    """Without those of which it is known that they played the task under two seeds, counted: the
    opening may be the same where the world goes on differently (ScienceWorld's leaves much to
    chance)."""
    known = list(candidates)
    kept = [(a, b) for a, b in known if a.seed == b.seed or None in (a.seed, b.seed)]
    if len(kept) < len(known):
        counts["two seeds"] += len(known) - len(kept)
    return kept


def _grouped(records: Iterable[Conversation]) -> dict[Group, list[_Side]]:
    """By task and opening, each group in an order that depends only on its members."""
    groups: dict[Group, list[_Side]] = defaultdict(list)
    for side in map(_side, records):
        groups[side.task_id, side.opening].append(side)
    for members in groups.values():
        members.sort(key=lambda side: json.dumps(side.record, sort_keys=True))
    return groups


def _select(
    found: dict[Group, list[Candidate]], settings: PairSettings, counts: Counter[str]
) -> list[Pair]:
    """The best candidates of each task: largest gap first, chance among equals."""
    tasks: dict[str, list[Candidate]] = defaultdict(list)
    for group in sorted(found):
        gaps = [_gap(*candidate) for candidate in found[group]]
        if any(gap is None or gap > ROUNDING for gap in gaps):
            tasks[group[0]] += found[group]
        else:
            counts["no partner"] += 1
    ordered: list[Candidate] = []
    for task_id, candidates in tasks.items():
        random.Random(f"{settings.seed}/{task_id}").shuffle(candidates)
        ordered += sorted(candidates, key=lambda pair: -round(_gap(*pair) or 0.0, 6))
    return list(_kept(ordered, settings, counts))


def _kept(
    candidates: Iterable[Candidate], settings: PairSettings, counts: Counter[str]
) -> Iterator[Pair]:
    """Those that may be learned from; each of the others is counted once."""
    per_task: Counter[str] = Counter()
    seen: set[tuple[Said, Said, Said]] = set()
    for chosen, rejected in candidates:
        gap, texts = _gap(chosen, rejected), (chosen.opening, chosen.own, rejected.own)
        if gap is not None and gap <= max(ROUNDING, settings.min_gap - ROUNDING):
            counts["gap"] += 1
        elif chosen.earned is not None and chosen.earned < settings.min_return - ROUNDING:
            counts["low return"] += 1
        elif chosen.own[::2] == rejected.own[::2] or texts in seen:
            counts["equal texts"] += 1
        elif per_task[chosen.task_id] >= settings.pairs_per_task:
            counts["over pairs per task"] += 1
        else:
            per_task[chosen.task_id] += 1
            seen.add(texts)
            yield _pair(chosen, rejected)


def _pair(chosen: _Side, rejected: _Side) -> Pair:
    """One opening for both, where they differ in what is not said (`loss` null or false)."""
    shared = chosen.record["conversations"][: len(chosen.opening)]
    own = rejected.record["conversations"][len(chosen.opening) :]
    other = rejected.record | {"conversations": shared + own}
    return Pair(chosen.task_id, chosen.record, other, _gap(chosen, rejected))


def _gap(chosen: _Side, rejected: _Side) -> float | None:
    if chosen.earned is None or rejected.earned is None:
        return None
    return chosen.earned - rejected.earned


# ------------------------------------------------------------------------------------------- files


def read_pairs(paths: Sequence[Path], settings: PairSettings, counts: Counter[str]) -> list[Pair]:
    """The pairs of files, in their order; of a task the first ones.

    Raises:
        ValueError: a line that names file, line and what is wrong there; or no pair is left.
        OSError: a file cannot be read.
    """
    pairs = list(_kept(_candidates_of(paths), settings, counts))
    if not pairs:
        named, why = " ".join(map(str, paths)), why_left_out(counts) or "it is empty"
        raise ValueError(f"{named}: no pair left ({why})")
    return pairs


def to_agentgym(pair: Pair) -> dict[str, Any]:
    """The object of a pair file from which `read_pairs` makes this pair again."""
    length = len(_side(pair.chosen).opening)
    content: dict[str, Any] = {"id": pair.chosen.get("item_id", pair.task_id)}
    content["prompt"] = pair.chosen["conversations"][:length]
    for name, record in zip(SIDES, (pair.chosen, pair.rejected), strict=True):
        # `loss` is written out: an action without it is learned.
        content[name] = [{"loss": None, **turn} for turn in record["conversations"][length:]]
        if "return" in record:
            content[f"{name}_return"] = record["return"]
    return content


def from_agentgym(content: Any, name: str) -> Pair:
    """The pair of an object of a pair file; `name` is its id if it has none.

    Raises:
        ValueError: it is none; says what is wrong.
    """
    return _pair(*_candidate(content, name))


def _candidates_of(paths: Sequence[Path]) -> Iterator[Candidate]:
    for path, number, content, name in items_of(paths):
        try:
            yield _candidate(content, name)
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None


def _candidate(content: Any, name: str) -> Candidate:
    """Both sides of an object of a pair file; `name` is its id if it has none."""
    if not isinstance(content, dict) or not all(side in content for side in SIDES):
        shown = list(content) if isinstance(content, dict) else content
        raise ValueError(f"{repr(shown)[:80]}: {EXPECTED}")
    noted = [content[side].get("item_id") for side in SIDES if isinstance(content[side], dict)]
    noted = [each for each in [content.get("item_id"), *noted] if each is not None]
    if len(noted) < len(SIDES) and "item_id" not in content:  # else it numbers the line
        noted = [each for each in [content.get("id"), *noted] if each is not None]
    if len(set(map(str, noted))) > 1:
        told = ", ".join(str(each)[:60] for each in noted)
        raise ValueError(f"a pair of two tasks ({told}), expected two trajectories of one")
    item_id, sides, part = noted[0] if noted else name, [], "prompt"
    try:
        prompt = None if content.get(part) is None else _prompt(content[part])
        for part in SIDES:
            sides.append(_side(_record(content, part, item_id, prompt)))
    except ValueError as error:
        raise ValueError(f"{part}: {error}") from None
    chosen, rejected = sides
    if chosen.opening != rejected.opening:
        raise ValueError(
            "chosen and rejected open with different prompts, expected the same messages up to the "
            "first observation"
        )
    return chosen, rejected


def _prompt(content: Any) -> list[dict[str, Any]]:
    """What stands before both sides, the first observation last; nothing of it is learned."""
    turns = _turns(content, "human")
    if turns[-1].get("from") != "human":
        told = repr(turns[-1].get("from"))[:60]
        raise ValueError(f"ends with a turn from {told}, expected human, the first observation")
    return [turn | {"loss": False} if turn.get("loss") else turn for turn in turns]


def _record(
    content: dict[str, Any], side: str, item_id: Any, prompt: list[dict[str, Any]] | None
) -> Conversation:
    """One side as a conversation: behind the prompt, or whole where there is none."""
    given = content[side]
    turns = _turns(given, "gpt")
    for i, turn in enumerate(turns if prompt is not None else ()):
        expected = "human" if i % 2 else "gpt"
        if turn.get("from") != expected:
            told = repr(turn.get("from"))[:60]
            raise ValueError(f"turn {i} is from {told}, expected {expected}")
    turns = [{"loss": True, **turn} if turn.get("from") == "gpt" else turn for turn in turns]
    record = {"item_id": item_id, "conversations": [*(prompt or ()), *turns]}
    of_side = given.get("return", given.get("reward")) if isinstance(given, dict) else None
    earned = content.get(f"{side}_return", of_side)
    return record if earned is None else record | {"return": earned}


def _turns(content: Any, speaker: str) -> list[dict[str, Any]]:
    """A text, messages or turns, by themselves or in a conversation, as turns."""
    if isinstance(content, dict):
        content = content.get("conversations", content.get("messages"))
    if isinstance(content, str) and content:
        return [{"from": speaker, "loss": speaker == "gpt", "value": content}]
    if not content:
        raise ValueError(f"it is empty, {EXPECTED}")
    if not isinstance(content, list) or not all(isinstance(turn, dict) for turn in content):
        raise ValueError(f"{repr(content)[:60]}: {EXPECTED}")
    if any("role" in turn for turn in content):
        return (as_agenttraj({"messages": content}, "") or {})["conversations"]
    return content


# ------------------------------------------------------------------------------------------ tensors


def encode_pairs(
    chat: ChatTemplate,
    pairs: Sequence[Pair],
    pad_id: int,
) -> Batch:
    """Pairs -> tensors: rows 2i and 2i + 1 are chosen and rejected of pair i, group_ids are i.

    Args:
        pad_id: any id; masks come from lengths.
    Raises:
        ValueError: a side is no conversation.
        RuntimeError: two sides do not begin with the same tokens.
    """
    handlers: list[RolloutHandler] = []
    for place, pair in enumerate(pairs):
        sides = [from_agenttraj(chat, record) for record in (pair.chosen, pair.rejected)]
        openings = [side.input_ids[: side.turns[0].action_span[0]] for side in sides]
        if openings[0] != openings[1]:
            raise RuntimeError(f"pair {pair.task_id}: its sides do not open with the same tokens")
        for side in sides:
            side.group_id = place
        handlers += sides
    return make_batch(handlers, pad_id)


def why_left_out(counts: Counter[str]) -> str:
    """What was left out, in words: '12 gap, 3 equal texts'."""
    return ", ".join(f"{count} {why}" for why, count in counts.most_common() if count)
