"""The oracle of BabyAI: minigrid's bot speaks in text actions and says why.

The bot thinks in primitive actions, up to 200 an episode; an agent here has some twenty turns. So a
copy of the bot plays ahead to its next *deed* (pickup, drop, toggle, or a part of the mission
fulfilled by going somewhere), and the oracle picks the available action that does most of it:

    now  ->  turn, forward, forward, turn, forward  ->  pickup        a Plan: poses, deed, target
     \\__ pickup red ball 1 ____________________________/             rule 1: the same deed
     \\__ go to grey box 2 ______/                                    rule 2: on the way

Rule 1: an action that does what the bot is about to do with that very thing.
Rule 2: otherwise the "go to" or "go through" that ends on the bot's way and leaves fewer steps than
    its next primitive action would, tried out in a copy. The count falls every turn: no circles.
Rule 3: otherwise the bot's next primitive action.

The answer depends on the episode's history alone, which is replayed in a level of the oracle's own.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any, NamedTuple, SupportsIndex

import numpy as np
from minigrid.envs.babyai.core.verifier import ObjDesc, PutNextInstr
from minigrid.utils.baby_ai_bot import (
    BabyAIBot,
    DisappearedBoxError,
    DropSubgoal,
    GoNextToSubgoal,
    OpenSubgoal,
    Subgoal,
)

from envs import OracleLost
from envs.babyai.world import (
    DIRECTIONS,
    DONE,
    DROP,
    FORWARD,
    PICKUP,
    TOGGLE,
    TURNS,
    Level,
    Seen,
    View,
    available,
    parts_left,
    plain,
)

PRIMITIVES = {move: text for text, move in TURNS.items()}
PRIMITIVES |= {FORWARD: "move forward", DROP: "drop", TOGGLE: "toggle"}


class Oracle:
    def __init__(self, level: Level) -> None:
        self._level = level
        self._pilot: Pilot | None = None

    def move(self, view: View, turns: list[int]) -> tuple[str, str]:
        """(thought, action) for the state that `view` shows; `turns` is the length of the level's
        history at the start of each turn so far. OracleLost if no good move is known."""
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
        places = [thing.cur_pos for thing in goal.obj_set if thing is not view.carrying]
        if not any(_has_seen(pilot, place) for place in places):
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
    return pilot.bot is not None and bool(pilot.bot.vis_mask[tuple(position)])


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


# ----------------------------------------------------------------------------------- minigrid's bot


MAX_READS = 60  # of a bot's stack in one call; 9 is the most that 199 solved tasks needed
HORIZON = 150  # primitive actions that a copy flies ahead at most
DEEDS = (PICKUP, DROP, TOGGLE)
STARTS = ("", "unlock a door", "open a box")


class Stuck(Exception):
    """The bot goes round in circles inside one call."""


# What a lost bot raises: its asserts, what comes of None where it expects a place, Stuck.
BOT_ERRORS = (
    *(AssertionError, AttributeError, IndexError, TypeError, ValueError),
    *(DisappearedBoxError, Stuck),
)


class _Stack(list):
    """The bot's subgoals, the next one last; raises Stuck if read too often in one call."""

    reads = 0

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        self.reads += 1
        if self.reads > MAX_READS:
            raise Stuck
        return super().__getitem__(index)


class _OpenBox(Subgoal):
    """Toggles the box ahead; the bot then counts itself lost, and a fresh one takes over."""

    def replan_before_action(self) -> int:
        assert self.fwd_cell is not None and self.fwd_cell.type == "box"
        return TOGGLE


class Bot(BabyAIBot):
    """minigrid's bot on the parts of the mission that are left, with its weaknesses mended:

    - It can push subgoals for ever inside one call. `_Stack` counts how often it is read and raises
      `Stuck`; a clock would differ from machine to machine.
    - It can fail an assertion. A fresh bot replaces it, which keeps the cells that were seen, gets
      the parts of the mission that are left, and first puts down what is carried. If even that one
      fails, the next is given a start: unlock the door whose key is known, or open a box.
    - It undoes what it did not ask for. A door toggled against its plan is left as it is.
    """

    stack: Any

    def __init__(self, level: Level, seen: np.ndarray | None = None, start: str = "") -> None:
        super().__init__(level.env)
        self.stack = self._counted = _Stack(self.stack)
        if seen is not None:
            self.vis_mask |= seen
        self._process_obs()
        if level.env.carrying:
            self._empty_hands(level)
        if start == "unlock a door":
            _, place, _ = self._shortest_path(self._can_unlock, try_with_blockers=True)
            door = level.env.grid.get(*place)
            self.stack += [OpenSubgoal(self), GoNextToSubgoal(self, door, reason="Open")]
        if start == "open a box":
            description = ObjDesc("box")
            description.find_matching_objs(level.env)
            self.stack += [_OpenBox(self), GoNextToSubgoal(self, description)]

    def _process_instr(self, instr: Any) -> None:
        for part in reversed(parts_left(instr)):
            super()._process_instr(part)

    def _empty_hands(self, level: Level) -> None:
        part = parts_left(level.env.instrs)[0]
        if isinstance(part, PutNextInstr) and level.env.carrying in part.desc_move.obj_set:
            del self.stack[-2:]  # go to it, pick it up: done already
        else:
            place = self._find_drop_pos()
            self.stack += [DropSubgoal(self), GoNextToSubgoal(self, place)]

    def _can_unlock(self, _: tuple[int, int], thing: Any) -> bool:
        """Whether it is a locked door whose key lies somewhere in sight or memory."""
        if thing is None or thing.type != "door" or not thing.is_locked:
            return False
        grid = self.mission.unwrapped.grid
        things = (grid.get(int(x), int(y)) for x, y in np.argwhere(self.vis_mask))
        return any(t and t.type == "key" and t.color == thing.color for t in things)

    def replan(self, action_taken: int | None = None) -> int:
        """The next move; `action_taken` DONE changes no subgoal, as if nothing had been played."""
        self._counted.reads = 0
        return int(super().replan(action_taken))

    def hear(self, primitive: int) -> int:
        """The next move after `primitive`."""
        top = self.stack[-1] if self.stack else None
        unplanned = primitive == TOGGLE and isinstance(top, GoNextToSubgoal)
        return self.replan(DONE if unplanned else primitive)


class Pilot:
    """A level and what to do next in it, one primitive action (`move`) after the other."""

    def __init__(self, number: int, seed: int) -> None:
        self.level = Level(number, seed)
        self.bot: Bot | None = None
        self.plan: Plan | None = None
        self._planned_at = -1  # the length of the history when `plan` was made
        self.move = self._fresh_move()

    def tell(self, primitive: int) -> None:
        """Plays it, whether or not it was `move`, and finds the next move, or OracleLost."""
        target, plan = self.level.front, self.plan
        self.level.act(primitive)
        if self.level.ended:
            return
        if primitive in DEEDS:
            self.plan = None
        move = DONE
        try:
            if plan and plan.after and primitive == plan.deed and target == plan.target:
                move = self._take_over(plan.after)
            elif self.bot:
                move = self.bot.hear(primitive)
        except BOT_ERRORS:
            pass  # lost: a fresh bot takes over
        self.move = self._fresh_move() if move == DONE else move

    def begin_turn(self) -> Plan:
        """The plan for the turn that begins now, kept until its deed is done or the next turn."""
        now, plan = len(self.level.history), self.plan
        if plan is None or self._planned_at != now:
            self.plan, self._planned_at = None, now
            if plan and plan.before and self.level.front == plan.target:  # the last turn went there
                try:
                    self.move = self._take_over(plan.before)
                except BOT_ERRORS:
                    self.move = self._fresh_move()
            plan = self.plan = self._copy()._fly(HORIZON)
        return plan

    def steps_left_after(self, moves: list[int], at_most: int) -> int:
        """How many primitive actions the bot takes to its next deed once `moves` were played;
        `at_most` if it takes so many or more."""
        pilot = self._copy()
        try:
            for move in moves:
                pilot.tell(move)
                if pilot.level.ended:
                    return 0
            plan = pilot._fly(at_most)
        except OracleLost:
            return at_most
        return at_most if plan.deed is None else len(plan.poses)

    def _fresh_move(self) -> int:
        seen = self.bot.vis_mask if self.bot else None
        for start in STARTS:
            try:
                self.bot = Bot(self.level, seen, start)
                return self.bot.replan()
            except BOT_ERRORS:
                continue
        self.bot = None
        raise OracleLost(f"no way to {self.level.mission!r} is known from here")

    def _take_over(self, pilot: Pilot) -> int:
        """Goes on with the bot of a pilot that flew ahead, whose agent is put where ours is: on
        another way to the same deed our own bot would see other cells and change its mind. Returns
        the next move."""
        assert pilot.bot is not None
        ours, theirs = self.level, pilot.level
        theirs.env.agent_pos, theirs.env.agent_dir = ours.env.agent_pos, ours.env.agent_dir
        theirs.env.step_count, theirs.history = ours.env.step_count, ours.history
        _copy_verdicts(ours.env.instrs, theirs.env.instrs)
        if self.bot:
            pilot.bot.vis_mask |= self.bot.vis_mask
        self.level, self.bot = theirs, pilot.bot
        return self.bot.replan(DONE)

    def _copy(self) -> Pilot:
        """A pilot of its own; what never changes after a level is made is shared."""
        env, plan = self.level.env, self.plan
        shared = [thing for thing in env.grid.grid if thing is not None and thing.type == "wall"]
        shared += [env.room_grid, env.action_space, env.observation_space, env.np_random]
        self.plan = None
        copy = deepcopy(self, {id(thing): thing for thing in shared})
        self.plan = plan
        return copy

    def _fly(self, at_most: int) -> Plan:
        """Follows the bot up to and including its next deed, for `at_most` steps before it."""
        level, num_parts = self.level, len(parts_left(self.level.env.instrs))
        poses: list[tuple[tuple[int, int], int]] = []
        while len(poses) < at_most:
            move, target = self.move, level.front
            before = self._copy() if move in DEEDS else None
            try:
                self.tell(move)
            except OracleLost:
                return Plan(poses, move if before else None, target, False, before, None)
            if before:
                walks_on = level.ended or self.move == FORWARD
                return Plan(poses, move, target, walks_on, before, None if level.ended else self)
            poses.append((level.position, level.direction))
            if level.ended or len(parts_left(level.env.instrs)) < num_parts:
                return Plan(poses, DONE, level.front, False, None, None)
        return Plan(poses, None, level.front, False, None, None)


class Plan(NamedTuple):
    """The bot's way to its next deed."""

    poses: list[tuple[tuple[int, int], int]]  # (position, direction) after each primitive action
    deed: int | None  # PICKUP, DROP, TOGGLE; DONE: a part is fulfilled by going; None: not in sight
    target: tuple[int, int]  # the cell ahead at that time
    walks_on: bool  # after a toggle: the bot goes through, or nothing is left to do
    before: Pilot | None  # about to do the deed
    after: Pilot | None  # after it


def _copy_verdicts(ours: Any, theirs: Any) -> None:
    """Which parts of the mission are fulfilled."""
    for name in ("a_done", "b_done"):
        if hasattr(ours, name):
            setattr(theirs, name, getattr(ours, name))
    for name in ("instr_a", "instr_b"):
        if hasattr(ours, name):
            _copy_verdicts(getattr(ours, name), getattr(theirs, name))
