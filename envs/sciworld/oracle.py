"""SciWorld's oracle: ScienceWorld's solutions, rewritten to use only what the agent has read.

ScienceWorld generates a solution of each task, its gold path, from the simulator's complete state:
"go to outside", "focus on baby baby mouse". But an agent that goes outside has not seen a mouse
yet, and "look around" calls it "a baby mouse". A policy that imitates the gold path would learn to
name objects that it has not seen. So `rewrite` plays the path, inserts "look around" before an
action on an object that no text has named, and uses the names from the texts:

    >>> text_names = names("Here you see:\\n\\ta baby mouse\\n\\ta flower pot 2 (containing soil)")
    >>> name_in_text("baby baby mouse", text_names)
    'baby mouse'
    >>> name_in_text("flower pot 2 containing soil", text_names)
    'flower pot 2'

If the simulator does not accept the text's name, the gold path's name stays. If the rewritten path
does not end at the full score, the gold path is used unchanged. A gold path walks through every
door, even if the agent may teleport; in that case one "teleport" replaces the walk. `thought`
explains the purpose of an action, or names the room at the end of a walk. It does not name an
object before the agent has met it:

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
TWO_OBJECTS = re.compile(
    r"(?P<verb>move|pour|dunk|use|connect|disconnect) (?P<a>.+) (?P<by>to|into|in|on) (?P<b>.+)"
)
ONE_OBJECT = re.compile(
    r"(?P<verb>focus on|pick up|put down|look at|look in|read|eat|mix|activate|deactivate|open"
    r"|close) (?!door to )(?P<a>.+)"
)
STAGES = "egg|seed|seedling|baby|young|juvenile|adult|reproducing|dead"
REFUSALS = ("No known action", "Ambiguous request")

Play = Callable[[str], tuple[str, int, bool]]  # action -> (observation, score up to 100, completed)


def names(text: str) -> set[str]:
    """The names of the objects in a text: "a jug (containing nothing)" gives "jug"."""
    noun = r"\b(?:an?|the) (?:substance called )?(.+?)(?= in the | \(| is\b|[,.()\n]|$)"
    return set(re.findall(noun, text.lower()))


def name_in_text(name: str, text_names: Collection[str]) -> str | None:
    """The name in `text_names` of the object that the simulator calls `name`. None if no name, or
    more than one, fits."""
    name = re.sub(r" in inventory$", "", name)
    name = re.sub(r" containing .*$", "", name)
    candidates = (name, re.sub(rf"^(?:{STAGES}) ", "", name))  # "egg parrot" is a parrot egg
    for candidate in candidates:
        if candidate in text_names:
            return candidate
    for candidate in candidates:
        longer = [text_name for text_name in text_names if f" {candidate} " in f" {text_name} "]
        if len(longer) == 1:
            return longer[0]
    return None


def rewrite(
    path: Sequence[str],
    start: Callable[[], tuple[str, Play]],
    limit: int,
    can_teleport: bool = False,
) -> list[str]:
    """`path` with the names that the agent has read, and with the "look around" actions that show
    them. Returns `path` itself if the result does not end at score 100 within `limit` actions.

    Args:
        start: starts the task again; returns the first text and a function that plays an action.
    """
    for variant in (with_teleports(path), path) if can_teleport else (path,):
        fixed_names: set[str] = set()  # the simulator does not accept the texts' names for these
        while True:
            actions, score, refused_names = _rewrite_once(variant, start, fixed_names)
            if not refused_names:
                break
            fixed_names |= refused_names
        if score >= 100 and len(actions) <= limit:
            return actions
    return list(path)


def with_teleports(path: Sequence[str]) -> list[str]:
    """`path` with one "teleport" instead of each walk through doors and rooms.

    >>> with_teleports(["open door to hallway", "go to hallway", "go to kitchen", "focus on stove"])
    ['teleport to kitchen', 'focus on stove']
    """
    result: list[str] = []
    for is_walk, actions in groupby(path, lambda a: a.startswith(("go to ", "open door to "))):
        part = list(actions)
        rooms = [action.removeprefix("go to ") for action in part if action.startswith("go to ")]
        result += [f"teleport to {rooms[-1]}"] if is_walk and rooms else part
    return result


def _rewrite_once(
    path: Sequence[str], start: Callable[[], tuple[str, Play]], fixed_names: set[str]
) -> tuple[list[str], int, set[str]]:
    """Returns (actions, score, refused names). Stops at the first action in which the simulator
    refuses a new name, or a new name fails the task. `fixed_names` are not replaced."""
    actions: list[str] = []
    text, play = start()
    text_names, has_looked, score = names(text), True, 0

    def act(action: str) -> tuple[str, bool]:
        nonlocal has_looked, score
        actions.append(action)
        observation, score, completed = play(action)
        text_names.update(names(observation))
        if action == LOOK or action.startswith(("go to ", "teleport to ")):
            has_looked = action == LOOK
        return observation, completed

    for position, action in enumerate(path):
        objects = objects_of(action)
        if not has_looked and any(name_in_text(name, text_names) is None for name in objects):
            act(LOOK)
        number_follows = position + 1 < len(path) and path[position + 1].isdigit()
        new = {} if number_follows else {name: name_in_text(name, text_names) for name in objects}
        new = {old: name for old, name in new.items() if old not in fixed_names and name != old}
        new_action = rename_objects(action, {old: name for old, name in new.items() if name})
        observation, completed = act(new_action)
        if new_action != action and (score < 0 or observation.startswith(REFUSALS)):
            return actions, score, set(new)
        if completed or score < 0:
            break
    return actions, score, set()


def objects_of(action: str) -> list[str]:
    """The objects that an action uses. Doors and places do not count."""
    match = TWO_OBJECTS.fullmatch(action) or ONE_OBJECT.fullmatch(action)
    return [text for key, text in match.groupdict().items() if key in "ab"] if match else []


def rename_objects(action: str, new_names: dict[str, str]) -> str:
    match = TWO_OBJECTS.fullmatch(action) or ONE_OBJECT.fullmatch(action)
    if not match:
        return action
    words = match.groupdict()
    return " ".join(new_names.get(text, text) for text in words.values())


# (pattern of an action, thought); the first pattern that matches is used.
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
    """The reason for the action path[position], in one sentence."""
    action = path[position]
    if text := _walk_thought(path, position):
        return text
    for pattern, text in THOUGHTS:
        if match := re.fullmatch(pattern, action):
            return text.format(*match.groups(), action=action)
    return f"The next thing to do is to {action}."


def _walk_thought(path: Sequence[str], position: int) -> str:
    """The thought for an action that leads to another room; "" for any other action."""
    place = ""
    for action in path[position:]:
        if match := re.fullmatch(r"(?:go|teleport) to (.*)", action):
            place = match[1]
        elif not action.startswith(("open door to ", "look around", "close door to ")):
            break
    step = re.fullmatch(r"(go|teleport|open door) to (.*)", path[position])
    if not step or not place:
        return ""
    if step[1] == "open door":
        return f"I should go on in the {place}, so I open the door to {step[2]}."
    if step[2] == place:
        return f"I should go on in the {place}, so I {step[1]} there."
    return f"I should go on in the {place}, so I {step[1]} to the {step[2]} first."
