"""What the agent can say and what comes of it: macro actions, made of minigrid's primitive ones.

    turn left, turn right, move forward        one primitive action each
    toggle                                     open or close the door, open the box one step ahead
    drop                                       put down what is carried, one step ahead
    go to OBJECT N                             walk until it is one step ahead
    pickup OBJECT N                            the same, then take it ("pick up" works, too)
    go through DOOR N                          walk through an open door to the cell behind it
    toggle and go through DOOR N               the same for a closed door, or a locked one whose key
                                               is carried
    check available actions                    names them again, costs nothing

OBJECT N is a name of the view at hand ("red ball 1"; without a number the nearest is meant). A
macro action plans the fewest primitive actions over free cells in view and plays them one by one.
It stops where the world surprises it: the mission has ended, the steps are used up, something
stands behind a door that was closed. Turning and walking past other things has no side effects.

"go to" what is one step ahead already waits for one primitive action (minigrid's `done`): the
verifier only looks after an action, and an agent may start in front of its goal.

An action that is impossible, or none at all, says why; it costs no primitive action and changes
nothing.

Read next: envs/babyai/env.py; envs/babyai/oracle.py, which chooses among these.
"""

import re
from typing import NoReturn

from envs.babyai.view import Seen, View, door_state, is_free, plain
from envs.babyai.world import DONE, DROP, FORWARD, LEFT, PICKUP, RIGHT, TOGGLE, Level

TURNS = {"turn left": LEFT, "turn right": RIGHT}
CHECK = "check available actions"
MACRO = re.compile(
    r"(go to|pickup|pick up|go through|toggle and go through) ([a-z ]{1,40}?)( \d+)?"
)


class Impossible(Exception):
    """The action cannot be played now; the message says why."""


def available(level: Level, view: View) -> list[str]:
    """The actions that `perform` would play, each once, in a fixed order."""
    actions = list(TURNS)
    front = level.front_object
    if is_free(front):
        actions.append("move forward")
    for seen in view.objects:
        if not view.has_way(seen):
            continue
        actions.append(f"go to {seen.name}")
        if seen.object.type != "door":
            if not view.carrying:
                actions.append(f"pickup {seen.name}")
        elif seen.object.is_open:
            actions.append(f"go through {seen.name}")
        elif can_toggle(seen.object, view):
            actions.append(f"toggle and go through {seen.name}")
    if can_toggle(front, view):
        actions.append("toggle")
    if view.carrying and front is None:
        actions.append("drop")
    return [*actions, CHECK]


def can_toggle(thing: object, view: View) -> bool:
    """Whether toggling changes it: a box, a door that is not locked or whose key is carried."""
    kind = getattr(thing, "type", None)
    if kind != "door":
        return kind == "box"
    key = view.carrying
    color = getattr(thing, "color", None)
    return door_state(thing) != "locked" or bool(key and key.type == "key" and key.color == color)


def perform(level: Level, view: View, action: str) -> str:
    """Plays an action; returns what happened, in one sentence. CHECK is not played here.

    Raises:
        Impossible: it cannot be played or is no action; nothing has changed.
    """
    if action in TURNS:
        level.act(TURNS[action])
        return f"You {action}."
    if action == "move forward":
        _require_free(level)
        level.act(FORWARD)
        return "You move forward."
    if action == "toggle":
        return _toggle(level, view)
    if action == "drop":
        return _drop(level, view)
    match = MACRO.fullmatch(action[:80])
    if not match:
        shown = action if len(action) <= 60 else action[:60] + "..."
        raise Impossible(f"{shown!r} is no action" if shown else "there is no action")
    verb, seen = match[1], _find(view, f"{match[2]} {(match[3] or ' 1').strip()}")
    if verb == "go to":
        return _go_to(level, view, seen)
    return (
        _go_through(level, view, seen, verb) if "through" in verb else _pick_up(level, view, seen)
    )


def _find(view: View, name: str) -> Seen:
    if name not in view.by_name:
        raise Impossible(f"no {name} is in view")
    return view.by_name[name]


def _way(view: View, seen: Seen) -> list[int]:
    way = view.way(seen)
    if way is None:
        raise Impossible(f"no free way to {seen.name} is in view")
    return way[0]


def _require_free(level: Level) -> None:
    thing = level.front_object
    if not is_free(thing):
        state = door_state(thing) + " " if thing.type == "door" else ""
        raise Impossible(f"a {state}{plain(thing)} is in the way")


def _play(level: Level, moves: list[int]) -> bool:
    """Plays moves until one is blocked or ends the episode; whether all of them were played."""
    for move in moves:
        if level.ended or (move == FORWARD and not is_free(level.front_object)):
            return False
        level.act(move)
    return True


def _go_to(level: Level, view: View, seen: Seen) -> str:
    arrived = _play(level, _way(view, seen) or [DONE])
    return f"You go to {seen.name}." if arrived else f"You stop on the way to {seen.name}."


def _pick_up(level: Level, view: View, seen: Seen) -> str:
    if seen.object.type == "door":
        raise Impossible("a door cannot be picked up")
    if view.carrying:
        raise Impossible(f"you carry a {plain(view.carrying)} already; drop it first")
    if not _play(level, [*_way(view, seen), PICKUP]):
        return f"You stop on the way to {seen.name}."
    return f"You pick up {seen.name}."


def _go_through(level: Level, view: View, seen: Seen, verb: str) -> str:
    door, name = seen.object, seen.name
    if door.type != "door":
        raise Impossible(f"{name} is no door")
    if verb == "go through" and not door.is_open:
        raise Impossible(f"{name} is {door_state(door)}")
    if verb != "go through" and door.is_open:
        raise Impossible(f"{name} is open; go through it")
    if not can_toggle(door, view):
        _refuse_locked(door)
    opening = [] if door.is_open else [TOGGLE]
    arrived = _play(level, [*_way(view, seen), *opening, FORWARD, FORWARD])
    if not door.is_open or not (arrived or opening or level.position == seen.position):
        return f"You stop on the way to {name}."
    doing = "You open and go through" if opening else "You go through"
    if arrived:
        return f"{doing} {name}."
    if level.position != seen.position:
        return f"You open {name}."
    blocker = level.front_object
    why = f": a {plain(blocker)} is in the way" if blocker else ""
    return f"{doing} {name} but stop in the doorway{why}."


def _toggle(level: Level, view: View) -> str:
    thing, position = level.front_object, level.front
    if thing is None or thing.type not in ("door", "box"):
        what = f"a {plain(thing)} cannot be toggled" if thing else "nothing is in front of you"
        raise Impossible(what)
    if not can_toggle(thing, view):
        _refuse_locked(thing)
    level.act(TOGGLE)
    if thing.type == "door":
        return f"You {'open' if thing.is_open else 'close'} the {plain(thing)}."
    inside = level.env.grid.get(*position)
    content = f"a {plain(inside)} is" if inside else "nothing is"
    return f"You open the {plain(thing)}: {content} in it."


def _refuse_locked(door: object) -> NoReturn:
    color = getattr(door, "color", "")
    raise Impossible(f"the {color} door is locked, and you do not carry the {color} key")


def _drop(level: Level, view: View) -> str:
    if not view.carrying:
        raise Impossible("you carry nothing")
    front = level.front_object
    if front is not None:
        raise Impossible(f"there is no free floor ahead but a {plain(front)}")
    level.act(DROP)
    return f"You drop the {plain(view.carrying)}."
