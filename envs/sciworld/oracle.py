"""ScienceWorld's solutions, retold so that a reader could have found them, with a thought each.

ScienceWorld generates a solution, its gold path, from all that the simulator knows: "go to
outside", "focus on baby baby mouse". Whoever goes outside has seen no mouse yet, and looking around
shows "a baby mouse"; imitating the path means naming things unseen. `retell` plays the path, looks
around before an action on a thing that no text has named, and calls each thing what the text does:

    >>> shown = names("Here you see:\\n\\ta baby mouse\\n\\ta flower pot 2 (containing soil)")
    >>> as_shown("baby baby mouse", shown), as_shown("flower pot 2 containing soil", shown)
    ('baby mouse', 'flower pot 2')

Where the simulator does not take the shown name the gold path's stays; if the retold path does not
end at full score, so does all of the gold path. A gold path walks through every door, also where
the task lets one teleport; then the way becomes one action. `thought` says what an action is good
for, or which room comes at the end of the way, and names no object before it was met:

    >>> path = ["open door to kitchen", "go to kitchen", "pick up thermometer"]
    >>> for position in range(3):
    ...     print(thought(path, position))
    I should go on in the kitchen, so I open the door to kitchen.
    I should go on in the kitchen, so I go there.
    I need the thermometer, so I pick it up.
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
    """`path` with the names that a reader has met and the looks that it takes to meet them; `path`
    itself if that does not end at score 100 within `at_most` actions.

    Args:
        start: begins the task anew; returns its first text and a function that plays an action.
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
    """`path` with each way through doors and rooms as one action.

    >>> by_teleport(["open door to hallway", "go to hallway", "go to kitchen", "focus on stove"])
    ['teleport to kitchen', 'focus on stove']
    """
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
    match = TWO_THINGS.fullmatch(action) or ONE_THING.fullmatch(action)
    if not match:
        return action
    words = match.groupdict()
    return " ".join(other_names.get(text, text) for text in words.values())


# (pattern of an action, thought); the first that matches is used.
THOUGHTS = (
    (r"focus on (.*)", "The {0} is what the task asks for, so I focus on it."),
    (r"pick up (.*)", "I need the {0}, so I pick it up."),
    (r"put down (.*)", "I do not need to hold the {0} any more, so I put it down."),
    (r"move (.*) to (.*)", "The {0} has to be in the {1}, so I move it there."),
    (r"pour (.*) (?:into|in) (.*)", "What is in the {0} has to be in the {1}, so I pour it."),
    (r"dunk (.*) (?:into|in) (.*)", "I need the {0} to touch what is in the {1}, so I dunk it."),
    (r"mix (.*)", "All that is needed is in the {0}, so I mix it."),
    (r"use (.*) on (.*)", "The {0} works on the {1}, so I use it."),
    (r"connect (.*) to (.*)", "The circuit needs {0} joined to {1}, so I connect them."),
    (r"disconnect (.*)", "The {0} must not be in the circuit, so I disconnect it."),
    (r"activate (.*)", "I need the {0} switched on, so I activate it."),
    (r"deactivate (.*)", "I need the {0} switched off, so I deactivate it."),
    (r"open (.*)", "I need what is behind or in the {0}, so I open it."),
    (r"close (.*)", "The {0} should be shut, so I close it."),
    (r"read (.*)", "The {0} may say something useful, so I read it."),
    (r"look around", "I want to see what is here, so I look around."),
    (r"(?:look at|examine) (.*)", "I want to know the state of the {0}, so I look at it."),
    (r"look in (.*)", "I want to see what is in the {0}, so I look inside."),
    (r"inventory", "I want to know what I carry, so I check my inventory."),
    (r"wait[0-9]*", "This needs time, so I wait."),
    (r"[0-9]+", "I am asked which one I mean, and number {action} will do, so I choose it."),
)
EXHAUSTED = "I have done all that I know of and the task is not solved, so I look around."


def thought(path: Sequence[str], position: int) -> str:
    """Why to do path[position], in one sentence; the path is a list of actions."""
    action = path[position]
    if way := _on_the_way(path, position):
        return way
    for pattern, text in THOUGHTS:
        if match := re.fullmatch(pattern, action):
            return text.format(*match.groups(), action=action)
    return f"The next thing to do is to {action}."


def _on_the_way(path: Sequence[str], position: int) -> str:
    """The thought of an action that leads to another room; empty for any other action."""
    place = ""
    for action in path[position:]:
        if match := re.fullmatch(r"(?:go|teleport) to (.*)", action):
            place = match[1]
        elif not action.startswith(("open door to ", "look around", "close door to ")):
            break
    now = re.fullmatch(r"(go|teleport|open door) to (.*)", path[position])
    if not now or not place:
        return ""
    if now[1] == "open door":
        return f"I should go on in the {place}, so I open the door to {now[2]}."
    if now[2] == place:
        return f"I should go on in the {place}, so I {now[1]} there."
    return f"I should go on in the {place}, so I {now[1]} to the {now[2]} first."
