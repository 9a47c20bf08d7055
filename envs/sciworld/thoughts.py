"""A sentence of reasoning for each action of a known solution, for demonstrations.

ScienceWorld can generate a solution of the task at hand, but only its actions. A small model that
learns from demonstrations should write a thought before each action, so one is made up. It says
what the action is good for, or on the way somewhere which room comes at the end; it does not name
an object that the reader has not met.

    >>> path = ["open door to kitchen", "go to kitchen", "pick up thermometer"]
    >>> for position in range(3):
    ...     print(thought(path, position))
    I should go on in the kitchen, so I open the door to kitchen.
    I should go on in the kitchen, so I go there.
    I need the thermometer, so I pick it up.

Read next: envs/sciworld/env.py, whose oracle() uses it.
"""

import re
from collections.abc import Sequence

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
    """The thought of an action that leads to another room; empty for any other action. It names
    the room at the end of the way, not what is there: the reader has not seen that yet."""
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
