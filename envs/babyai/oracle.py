"""The oracle of BabyAI: minigrid's bot speaks in macro actions and says why.

The bot (envs/babyai/bot.py) thinks in primitive actions, up to 200 an episode; an agent of the text
world has some twenty turns. So the oracle lets a copy of the bot fly ahead to its next deed and
looks for the one available action that does most of it:

    now  ->  turn, forward, forward, turn, forward  ->  pickup        the bot's way
     \\__ pickup red ball 1 ____________________________/             rule 1: the same deed
     \\__ go to grey box 2 ______/                                    rule 2: on the way

Rule 1: an action that does what the bot is about to do with that very thing.
Rule 2: otherwise the "go to" or "go through" that ends where the bot will pass and leaves it fewer
    steps than its next primitive action would. That is tried out in a copy, since from another
    place the bot may choose another way. The count goes down every turn until the deed is done, so
    there is no going in circles.
Rule 3: otherwise the bot's next primitive action.

The oracle answers from the state at hand, however it was reached: its own pilot plays the primitive
actions of the episode once more, in a level with the same number and seed, and only when it is
asked. The episode is read and never touched, and the answer depends on nothing but its history.

The thought is one sentence that a template makes from the state: what is sought, whether it has
been seen, what is done about it. A small model can learn to write it.

Read next: tests/test_babyai_oracle.py, which says how often it wins.
"""

from typing import Any

from minigrid.envs.babyai.core.verifier import PutNextInstr

from envs import OracleLost
from envs.babyai.actions import available
from envs.babyai.bot import Pilot, Plan
from envs.babyai.view import DIRECTIONS, Seen, View, plain
from envs.babyai.world import (
    DONE,
    DROP,
    FORWARD,
    LEFT,
    PICKUP,
    RIGHT,
    TOGGLE,
    Level,
    parts_left,
)

PRIMITIVES = {
    LEFT: "turn left",
    RIGHT: "turn right",
    FORWARD: "move forward",
    DROP: "drop",
    TOGGLE: "toggle",
}


class Oracle:
    """Good moves for one episode of a level, whatever has been played in it."""

    def __init__(self, level: Level) -> None:
        self._level = level
        self._pilot: Pilot | None = None

    def move(self, view: View, turns: list[int]) -> tuple[str, str]:
        """(thought, action) for the state that `view` shows.

        Arguments:
            turns: the length of the level's history at the start of each turn so far.

        Raises:
            OracleLost: no good move is known.
        """
        history = self._level.history
        try:
            if self._pilot is None:
                self._pilot = Pilot(self._level.number, self._level.seed)
            pilot = self._pilot
            for played in range(len(pilot.level.history), len(history)):
                if played in turns:
                    pilot.begin_turn()
                pilot.tell(history[played])
            plan = pilot.begin_turn()
        except OracleLost:
            self._pilot = None  # the next question starts over: the state may be a better one
            raise
        actions = available(self._level, view)
        seen = next((s for s in view.objects if s.position == plan.target), None)
        action = _same_deed(plan, seen, actions, pilot.move)
        target = seen if action else None
        action = action or _on_the_way(pilot, plan, view, actions) or PRIMITIVES.get(pilot.move)
        if action not in actions:
            raise OracleLost(f"the bot's move {pilot.move} is not possible here")
        return self._thought(view, pilot, plan, action, target), action

    def _thought(
        self, view: View, pilot: Pilot, plan: Plan, action: str, target: Seen | None
    ) -> str:
        part = parts_left(self._level.env.instrs)[0]
        carried = plain(view.carrying) if view.carrying else ""
        if isinstance(part, PutNextInstr):
            bring = view.carrying in part.desc_move.obj_set
            goal = part.desc_fixed if bring else part.desc_move
        else:
            bring, goal = False, part.desc
        wanted = " ".join(word for word in (goal.color, goal.type or "object") if word)
        deed = action.replace("pickup", "pick up")
        if action == "drop":
            if bring:
                return f"I am next to the {wanted}, so I drop the {carried} here."
            return f"I do not need the {carried} now, so I drop it."
        if target and any(target.object is thing for thing in goal.obj_set):
            return f"I see {target.name}, which is my goal, so I {deed}."
        thing = self._level.env.grid.get(*plan.target) if plan.deed in (PICKUP, TOGGLE) else None
        is_key = thing is not None and thing.type == "key"
        needs_key = is_key and plan.deed == PICKUP and self._has_lock(pilot, thing)
        if needs_key and target:
            return f"I need {target.name} to open a locked door, so I {deed}."
        if target and plan.deed == PICKUP:
            return f"The way is blocked by {target.name}, so I {deed}."
        if target and target.object.type == "box" and plan.deed == TOGGLE:
            return f"There may be a key in {target.name}, so I {deed}."
        if plan.deed == DROP and not bring:
            return f"I want to put down the {carried} elsewhere, so I {deed}."
        if not any(_has_seen(pilot, place) for place in _where(self._level, goal)):
            return f"I do not see the {wanted}, so I {deed} to look for it."
        if needs_key:
            return f"I need the {plain(thing)} to open a locked door, so I {deed}."
        if thing is not None and thing.type == "door":
            return f"I want to open the {plain(thing)}, so I {deed}."
        if bring:
            return f"I bring the {carried} to the {wanted}, so I {deed}."
        if thing is not None and all(thing is not other for other in goal.obj_set):
            return f"The {plain(thing)} is in my way, so I {deed}."
        return f"I know where the {wanted} is, so I {deed}."

    def _has_lock(self, pilot: Pilot, key: Any) -> bool:
        """Whether a locked door of the key's color has been in view."""
        grid = self._level.env.grid
        return any(
            thing.is_locked and thing.color == key.color and _has_seen(pilot, (x, y))
            for x in range(grid.width)
            for y in range(grid.height)
            if (thing := grid.get(x, y)) and thing.type == "door"
        )


def _has_seen(pilot: Pilot, position: tuple[int, int]) -> bool:
    """Whether that cell (x, y) of the full grid has been in view."""
    return pilot.bot is not None and bool(pilot.bot.vis_mask[position])


def _where(level: Level, goal: Any) -> list[tuple[int, int]]:
    """The cells (x, y) where things of this description lie now."""
    places = (thing.cur_pos for thing in goal.obj_set if thing is not level.env.carrying)
    return [(int(x), int(y)) for x, y in places]


def _same_deed(plan: Plan, seen: Seen | None, actions: list[str], move: int) -> str | None:
    """Rule 1."""
    if move == DROP:
        return "drop"
    if seen is None:
        return None
    if plan.deed == PICKUP:
        action = f"pickup {seen.name}"
    elif plan.deed == TOGGLE and plan.walks_on and not getattr(seen.object, "is_open", True):
        action = f"toggle and go through {seen.name}"
    elif move == TOGGLE:
        action = "toggle"
    elif move == DONE or (plan.deed in (TOGGLE, DONE) and seen.cell != (1, 0)):
        action = f"go to {seen.name}"
    else:
        return None
    return action if action in actions else None


def _on_the_way(pilot: Pilot, plan: Plan, view: View, actions: list[str]) -> str | None:
    """Rule 2."""
    passed = {position for position, _ in plan.poses}
    best, fewest = None, len(plan.poses) - 1  # what the next primitive action leaves to do
    for seen in view.objects:
        way = view.way(seen)
        if way is None or not way[0]:
            continue
        (x, y), direction = view.absolute(way[1])
        dx, dy = DIRECTIONS[direction]
        for action, end, more in (
            (f"go to {seen.name}", (x, y), []),
            (f"go through {seen.name}", (x + 2 * dx, y + 2 * dy), [FORWARD, FORWARD]),
        ):
            if action in actions and end in passed:
                left = pilot.steps_left_after([*way[0], *more], at_most=fewest)
                if left < fewest:
                    best, fewest = action, left
    return best
