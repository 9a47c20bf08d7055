"""What goes wrong: the commonest ends of the episodes that failed, each with where to look.

Read next: trajectories.py.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from trajectory import LOST
from viewer.lines import Lines, opening_of, parse, turns_of
from viewer.trajectories import apart

MOST = 6  # entries of each list
EXAMPLES = 8  # lines of each entry
MOST_FAILURES = 400  # that are read; more of them say the same
LONGEST = 300  # characters of a text
PIECE = 4 << 20  # bytes of a file that are looked through at a time


def what_goes_wrong(lines: Lines) -> dict[str, Any]:
    """Of the failures in a file: what the world said last, what was done again and again, and what
    ended them. An episode that the infrastructure lost is no failure of the policy."""
    valid = [n for n in range(len(lines)) if lines.columns["stop_reason"][n] not in LOST]
    failed = [n for n in valid if lines.columns["success"][n] is False]
    last: dict[str, list[int]] = defaultdict(list)
    again: Counter[str] = Counter()
    where: dict[str, list[int]] = defaultdict(list)
    for number in failed[:MOST_FAILURES]:
        line = lines.read(number)
        turns = turns_of(line)
        if text := last_words(turns):
            last[text].append(number)
        for text, times in repeated_actions(turns).items():
            again[text] += times
            where[text].append(number)
    stops: dict[str, list[int]] = defaultdict(list)
    for number in failed:
        stops[str(lines.columns["stop_reason"][number])].append(number)
    return {
        "episodes": len(valid),
        "failures": len(failed),
        "observations": entries({text: (len(n), n) for text, n in last.items()}),
        "repeated": entries({text: (times, where[text]) for text, times in again.items()}),
        "stops": entries({text: (len(n), n) for text, n in stops.items()}),
    }


def entries(found: Mapping[str, tuple[int, list[int]]]) -> list[dict[str, Any]]:
    ordered = sorted(found.items(), key=lambda item: (-item[1][0], item[0]))[:MOST]
    return [{"text": t, "count": n, "lines": lines[:EXAMPLES]} for t, (n, lines) in ordered]


def last_words(turns: Iterable[Mapping[str, Any]]) -> str:
    """The last thing that the world said in an episode, in short."""
    said = [str(turn.get("observation_text") or "") for turn in turns]
    return next((text.strip()[:LONGEST] for text in reversed(said) if text.strip()), "")


def repeated_actions(turns: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Actions that an episode took again right after themselves, and how often.

    >>> repeated_actions([{"action_text": "Action: look"}] * 3 + [{"action_text": "Action: go"}])
    {'look': 2}
    """
    texts = [(apart(str(turn.get("action_text") or ""))[1] or "")[:LONGEST] for turn in turns]
    again = Counter(b for a, b in zip(texts, texts[1:], strict=False) if a == b and b)
    return dict(again)


def search(lines: Lines, text: str) -> Iterable[tuple[int, dict[str, Any] | None]]:
    """(bytes done, hit or None) for each line: where `text` was said, in any case of letters.

    A line is parsed only where its bytes hold the text, so that most are passed over at the speed
    of reading.
    """
    wanted = text.casefold()
    plain = is_plain(text)
    for number, done, line in lines.whole_lines():
        if plain and wanted.encode() not in line.lower():
            yield done, None
            continue
        yield done, hit_in(parse(line) or {}, number, wanted)


def is_plain(text: str) -> bool:
    """Whether JSON writes a text in one way only: no quotes, no line ends, no other letters."""
    return text.isascii() and text.isprintable() and not set(text) & set('"\\')


def may_hold(path: Path, text: str) -> bool:
    """Whether a file's bytes hold a text, in any case of letters; True where they cannot tell.

    Much less work than to index the file, and most files hold no rare text.
    """
    if not is_plain(text):
        return True
    wanted, rest = text.lower().encode(), b""
    with open(path, "rb") as file:
        while piece := file.read(PIECE):
            if wanted in rest + piece.lower():
                return True
            rest = piece[-len(wanted) :].lower()
    return False


def hit_in(line: Mapping[str, Any], number: int, wanted: str) -> dict[str, Any] | None:
    """The first place of a trajectory where the text stands; turn 0 is before the first."""
    for turn, said in enumerate(said_in(line)):
        for part in said:
            at = part.casefold().find(wanted)
            if at >= 0:
                excerpt = part[max(0, at - 60) : at + len(wanted) + 60]
                name = line.get("trajectory_id") or line.get("item_id")
                return {"line": number, "trajectory_id": name, "turn": turn, "excerpt": excerpt}
    return None


def said_in(line: Mapping[str, Any]) -> Iterable[list[str]]:
    """What was said: before the first turn, then turn by turn."""
    if isinstance(line.get("conversations"), list):
        yield [str(t.get("value", "")) for t in line["conversations"] if isinstance(t, dict)]
        return
    opening = (str(message.get("content", "")) for message in opening_of(line))
    yield [str(line.get("task_id", "")), *opening]
    for turn in turns_of(line):
        yield [str(turn.get("action_text") or ""), str(turn.get("observation_text") or "")]
