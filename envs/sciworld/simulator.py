"""What is asked of ScienceWorld in Java: each question is one function of `world`.

`world` is ScienceWorld's own PythonInterface. A `Seat` (envs/sciworld/jvm.py) calls these functions
with its Java process to itself, so each holds the lock from its first line to its last: they fetch
texts, and what can be done with a text afterwards is done elsewhere.

Read next: envs/sciworld/env.py.
"""

import json
from typing import Any

from envs.sciworld.jvm import strings

SIMPLIFICATIONS = (
    "easy",
    "noElectricalAction",
    "openContainers",
    "openDoors",
    "selfWateringFlowerPots",
    "teleportAction",
)


def checked_simplifications(text: str) -> str:
    """`text`, a list of simplifications separated by commas, without blanks.

    Raises:
        ValueError: one of them does not exist.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in SIMPLIFICATIONS:
            known = ", ".join(SIMPLIFICATIONS)
            raise ValueError(f"unknown simplification {name!r} of SciWorld; choose from: {known}")
    return ",".join(names)


def load(world: Any, name: str, variation: int, simplifications: str) -> tuple[str, str]:
    """Starts a task: its description and the first room."""
    world.load(name, variation, simplifications, False)
    return world.getTaskDescription(), world.step("look around")


def play(world: Any, action: str) -> tuple[str, int, bool]:
    """Plays an action: observation, score up to 100, whether the task is over."""
    observation = world.step(action)
    return observation, round(100 * world.getScore()), world.getCompleted()


def solution(world: Any, name: str, variation: int, simplifications: str) -> list[str]:
    """Starts a task and returns the actions of its gold path."""
    world.load(name, variation, simplifications, True)
    return strings(world.getGoldActionSequence())


def valid_actions(world: Any) -> tuple[str, str]:
    """JSON: the objects that can be named here, by number; the actions on all objects there are."""
    seen = world.getPossibleObjectReferentLUTJSON()
    return seen, world.getValidActionObjectCombinationsJSON()


def hint(world: Any) -> tuple[str, list[str]]:
    """JSON: templates of actions; the objects here by name."""
    return world.getPossibleActionsWithIDs(), strings(world.getPossibleObjects())


def progress(world: Any) -> str:
    """ScienceWorld's own report on what has been done towards the goal."""
    return world.getGoalProgressStr()


def surroundings(world: Any) -> tuple[str, str, int]:
    """What is seen, what is held, and the simulator's count of moves, without making one."""
    return world.freeActionLook(), world.freeActionInventory(), world.getNumMoves()


def object_tree(world: Any, folder: str) -> str:
    """Writes `objectTree.json` into `folder`; returns the error, if any."""
    return world.getObjectTree(folder)


def names_in(tree: dict) -> dict:
    """Of an object tree, what contains what: {"name": ..., "contents": [...]}."""
    return {
        "name": tree["name"],
        "contents": [names_in(inner) for inner in (tree.get("contents") or {}).values()],
    }


def possible_actions(seen: str, valid: str) -> list[str]:
    """The actions with at most one object that `valid_actions` answers and the parser takes."""
    things = json.loads(seen)
    # NOTE: "valid" includes what is hidden in closed things, which the parser then refuses.
    found = [
        action["action"]
        for action in json.loads(valid)["validActions"]
        if all(str(number) in things for number in action["obj_ids"])
        or action["action"].endswith("inventory")
        if len(action["obj_ids"]) <= 1
    ]
    return [action for action in dict.fromkeys(found) if action != "reset task"]
