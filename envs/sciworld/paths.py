"""A known solution, retold so that a reader could have found it: look first, then say what is seen.

ScienceWorld generates a solution of a task, its gold path, from all that the simulator knows:

    go to outside        focus on baby baby mouse

But who goes outside is told nothing of what is there, and who looks around there sees "a baby
mouse". Imitating such a path means to name animals unseen. Retold:

    go to outside        look around        focus on baby mouse

`retell` plays the path in a world of its own. Before an action on a thing that no text has named
yet it looks around, once a room, and then calls each thing what it was called there:

    >>> shown = names("Here you see:\\n\\ta baby mouse\\n\\ta flower pot 2 (containing soil)")
    >>> as_shown("baby baby mouse", shown), as_shown("flower pot 2 containing soil", shown)
    ('baby mouse', 'flower pot 2')
    >>> as_shown("blue jay", shown) is None
    True

Where the simulator does not take the shown name the gold path's stays, and if the retold path does
not end at full score, all of the gold path. Gold paths walk through every door on the way, also
where the task lets one teleport; then the way is told as one action:

    >>> by_teleport(["open door to hallway", "go to hallway", "go to kitchen", "focus on stove"])
    ['teleport to kitchen', 'focus on stove']

Read next: envs/sciworld/env.py, whose oracle() uses it.
"""

import re
from collections.abc import Callable, Collection, Sequence
from itertools import groupby

LOOK = "look around"
TWO_THINGS = re.compile(
    r"(?P<verb>move|pour|dunk|use|connect|disconnect) (?P<a>.+) (?P<by>to|into|in|on) (?P<b>.+)"
)
ONE_THING = re.compile(
    r"(?P<verb>focus on|pick up|put down|look at|look in|read|eat|mix|activate|deactivate|open"
    r"|close) (?!door to )(?P<a>.+)"
)
STAGES = "egg|seed|seedling|baby|young|juvenile|adult|reproducing|dead"
REFUSED = ("No known action", "Ambiguous request")

Play = Callable[[str], tuple[str, int, bool]]  # action -> (observation, score up to 100, completed)


def names(text: str) -> set[str]:
    """What a text calls the things in it: "a jug (containing nothing)" is a jug."""
    noun = r"\b(?:an?|the) (?:substance called )?(.+?)(?= in the | \(| is\b|[,.()\n]|$)"
    return set(re.findall(noun, text.lower()))


def as_shown(name: str, shown: Collection[str]) -> str | None:
    """The shown name of the thing that the simulator calls `name`; None: there is none, or two."""
    name = re.sub(r" in inventory$", "", name)
    name = re.sub(r" containing .*$", "", name)
    candidates = (name, re.sub(rf"^(?:{STAGES}) ", "", name))  # "egg parrot" is a parrot egg
    for candidate in candidates:
        if candidate in shown:
            return candidate
    for candidate in candidates:
        longer = [each for each in shown if f" {candidate} " in f" {each} "]
        if len(longer) == 1:
            return longer[0]
    return None


def retell(
    path: Sequence[str],
    start: Callable[[], tuple[str, Play]],
    at_most: int,
    can_teleport: bool = False,
) -> list[str]:
    """`path` with the names that a reader has met and the looks that it takes to meet them.

    Args:
        path: actions of a solution.
        start: begins the task anew, in a world that nobody else plays in; returns its first text
            and a function that plays an action.
        at_most: actions that an episode may have.
        can_teleport: whether the task has the action "teleport to".

    Returns:
        Actions that end at score 100; `path` itself if none were found.
    """
    for way in (by_teleport(path), path) if can_teleport else (path,):
        kept: set[str] = set()  # names that the simulator does not take otherwise
        while True:
            told, score, refused = _tell(way, start, kept)
            if not refused:
                break
            kept |= refused
        if score >= 100 and len(told) <= at_most:
            return told
    return list(path)


def by_teleport(path: Sequence[str]) -> list[str]:
    """`path` with each way through doors and rooms as one action."""
    told: list[str] = []
    for is_way, actions in groupby(path, lambda a: a.startswith(("go to ", "open door to "))):
        part = list(actions)
        rooms = [action.removeprefix("go to ") for action in part if action.startswith("go to ")]
        told += [f"teleport to {rooms[-1]}"] if is_way and rooms else part
    return told


def _tell(
    path: Sequence[str], start: Callable[[], tuple[str, Play]], kept: set[str]
) -> tuple[list[str], int, set[str]]:
    """(actions, score, names to keep); it stops where a new name is refused or fails the task."""
    told: list[str] = []
    text, play = start()
    shown, has_looked, score = names(text), True, 0

    def act(action: str) -> tuple[str, bool]:
        nonlocal has_looked, score
        told.append(action)
        observation, score, completed = play(action)
        shown.update(names(observation))
        if action == LOOK or action.startswith(("go to ", "teleport to ")):
            has_looked = action == LOOK
        return observation, completed

    for position, action in enumerate(path):
        things = things_of(action)
        if not has_looked and any(as_shown(name, shown) is None for name in things):
            act(LOOK)
        answers_follow = position + 1 < len(path) and path[position + 1].isdigit()
        new = {} if answers_follow else {name: as_shown(name, shown) for name in things}
        new = {name: other for name, other in new.items() if name not in kept and other != name}
        said = renamed(action, {name: other for name, other in new.items() if other})
        observation, completed = act(said)
        if said != action and (score < 0 or observation.startswith(REFUSED)):
            return told, score, set(new)
        if completed or score < 0:
            break
    return told, score, set()


def things_of(action: str) -> list[str]:
    """The things that an action is done to; none for doors and places, waiting, looking around."""
    match = TWO_THINGS.fullmatch(action) or ONE_THING.fullmatch(action)
    return [text for key, text in match.groupdict().items() if key in "ab"] if match else []


def renamed(action: str, other_names: dict[str, str]) -> str:
    """`action` with other names for its things."""
    match = TWO_THINGS.fullmatch(action) or ONE_THING.fullmatch(action)
    if not match:
        return action
    words = match.groupdict()
    return " ".join(other_names.get(text, text) for text in words.values())
