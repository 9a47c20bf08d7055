"""BabyAI's oracle, which turns the moves of minigrid's bot into text actions with thoughts.

The bot plans in primitive actions, up to 200 per episode, but an agent has only about twenty turns.
So the oracle lets a copy of the bot play ahead to its next *milestone*: a pickup, a drop, a toggle,
or a part of the mission that is fulfilled by going somewhere. It then picks the available text
action that does most of this plan:

    now  ->  turn, forward, forward, turn, forward  ->  pickup    a Plan: poses, milestone, target
     \\__ pickup red ball 1 ____________________________/         rule 1: the same milestone
     \\__ go to grey box 2 ______/                                rule 2: on the path

Rule 1: the action that reaches the milestone with the same object.
Rule 2: otherwise the "go to" or "go through" that ends on the bot's path and leaves fewer steps
    than the bot's next primitive action would. This is tried out in a copy. The number of remaining
    steps falls every turn, so the oracle cannot walk in circles.
Rule 3: otherwise the bot's next primitive action.

The answer depends only on the episode's history, which the oracle replays in a copy of the level.
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
    View,
    VisibleObject,
    available,
    describe,
    remaining_parts,
)

PRIMITIVES = {move: text for text, move in TURNS.items()}
PRIMITIVES |= {FORWARD: "move forward", DROP: "drop", TOGGLE: "toggle"}


class Oracle:
    def __init__(self, level: Level) -> None:
        self._level = level
        self._player: Player | None = None

    def move(self, view: View, turns: list[int]) -> tuple[str, str]:
        """(thought, action) for the current state, as shown by `view`. `turns` holds, for each
        turn so far, the length of the level's history at its start. OracleLost if no good move is
        known.
        """
        history = self._level.history
        try:
            if self._player is None:
                self._player = Player(self._level.number, self._level.seed)
            player = self._player
            for index in range(len(player.level.history), len(history)):
                if index in turns:
                    player.begin_turn()
                player.play(history[index])
            plan = player.begin_turn()
        except OracleLost:
            self._player = None  # start over at the next call: the state may be better by then
            raise
        actions = available(self._level, view)
        entry = next((o for o in view.objects if o.position == plan.target), None)
        action = _milestone_action(plan, entry, actions, player.move)
        target = entry if action else None
        action = action or _path_action(player, plan, view, actions) or PRIMITIVES.get(player.move)
        if action not in actions:
            raise OracleLost(f"the bot's move {player.move} is not possible here")
        return self._thought(view, player, plan, action, target), action

    def _thought(
        self, view: View, player: Player, plan: Plan, action: str, target: VisibleObject | None
    ) -> str:
        part = remaining_parts(self._level.env.instrs)[0]
        carried = describe(view.carrying) if view.carrying else ""
        if isinstance(part, PutNextInstr):
            carries_it = view.carrying in part.desc_move.obj_set
            goal = part.desc_fixed if carries_it else part.desc_move
        else:
            carries_it, goal = False, part.desc
        goal_name = " ".join(word for word in (goal.color, goal.type or "object") if word)
        phrase = action.replace("pickup", "pick up")
        if action == "drop":
            if carries_it:
                return f"I am next to the {goal_name}, so I drop the {carried} here."
            return f"I do not need the {carried} now, so I drop it."
        if target and any(target.object is thing for thing in goal.obj_set):
            return f"I see {target.name}, which is my goal, so I {phrase}."
        milestone = plan.milestone
        thing = self._level.env.grid.get(*plan.target) if milestone in (PICKUP, TOGGLE) else None
        is_key = thing is not None and thing.type == "key"
        needs_key = is_key and milestone == PICKUP and self._has_lock(player, thing)
        if needs_key and target:
            return f"I need {target.name} to open a locked door, so I {phrase}."
        if target and milestone == PICKUP:
            return f"The way is blocked by {target.name}, so I {phrase}."
        if target and target.object.type == "box" and milestone == TOGGLE:
            return f"There may be a key in {target.name}, so I {phrase}."
        if milestone == DROP and not carries_it:
            return f"I want to put down the {carried} elsewhere, so I {phrase}."
        places = [thing.cur_pos for thing in goal.obj_set if thing is not view.carrying]
        if not any(_has_seen(player, place) for place in places):
            return f"I do not see the {goal_name}, so I {phrase} to look for it."
        if needs_key:
            return f"I need the {describe(thing)} to open a locked door, so I {phrase}."
        if thing is not None and thing.type == "door":
            return f"I want to open the {describe(thing)}, so I {phrase}."
        if carries_it:
            return f"I bring the {carried} to the {goal_name}, so I {phrase}."
        if thing is not None and all(thing is not goal_object for goal_object in goal.obj_set):
            return f"The {describe(thing)} is in my way, so I {phrase}."
        return f"I know where the {goal_name} is, so I {phrase}."

    def _has_lock(self, player: Player, key: Any) -> bool:
        """Whether a locked door of the key's color has been in view."""
        grid = self._level.env.grid
        return any(
            thing.is_locked and thing.color == key.color and _has_seen(player, (x, y))
            for x in range(grid.width)
            for y in range(grid.height)
            if (thing := grid.get(x, y)) and thing.type == "door"
        )


def _has_seen(player: Player, position: tuple[int, int]) -> bool:
    """Whether the cell (x, y) of the full grid has been in view."""
    return player.bot is not None and bool(player.bot.vis_mask[tuple(position)])


def _milestone_action(
    plan: Plan, target: VisibleObject | None, actions: list[str], move: int
) -> str | None:
    """Rule 1: the available action that reaches the plan's milestone, or None."""
    if move == DROP:
        return "drop"
    if target is None:
        return None
    if plan.milestone == PICKUP:
        action = f"pickup {target.name}"
    elif plan.milestone == TOGGLE and plan.walks_on and not getattr(target.object, "is_open", True):
        action = f"toggle and go through {target.name}"
    elif move == TOGGLE:
        action = "toggle"
    elif move == DONE or (plan.milestone in (TOGGLE, DONE) and target.cell != (1, 0)):
        action = f"go to {target.name}"
    else:
        return None
    return action if action in actions else None


def _path_action(player: Player, plan: Plan, view: View, actions: list[str]) -> str | None:
    """Rule 2: the available action that gets furthest along the plan's path, or None."""
    path_positions = {position for position, _ in plan.poses}
    best, min_steps = None, len(plan.poses) - 1  # steps that remain after the bot's next move
    for target in view.objects:
        path = view.path(target)
        if path is None or not path[0]:
            continue
        (x, y), direction = view.absolute(path[1])
        dx, dy = DIRECTIONS[direction]
        for action, end, final_moves in (
            (f"go to {target.name}", (x, y), []),
            (f"go through {target.name}", (x + 2 * dx, y + 2 * dy), [FORWARD, FORWARD]),
        ):
            if action in actions and end in path_positions:
                num_steps = player.num_steps_after([*path[0], *final_moves], limit=min_steps)
                if num_steps < min_steps:
                    best, min_steps = action, num_steps
    return best


# ----------------------------------------------------------------------------------- minigrid's bot


MAX_READS = 60  # of the bot's stack in one call; at most 9 were needed in 199 solved tasks
HORIZON = 150  # maximum primitive actions that a copy plays ahead
OBJECT_MOVES = (PICKUP, DROP, TOGGLE)
FIRST_SUBGOALS = ("", "unlock a door", "open a box")


class Stuck(Exception):
    """The bot is in an endless loop inside one call."""


# Exceptions of a bot that does not know what to do: failed asserts, errors from a None where it
# expects a place, and Stuck.
BOT_ERRORS = (
    *(AssertionError, AttributeError, IndexError, TypeError, ValueError),
    *(DisappearedBoxError, Stuck),
)


class _Stack(list):
    """The bot's subgoals, the next one last. Raises Stuck if it is read too often in one call."""

    reads = 0

    def __getitem__(self, index: SupportsIndex | slice) -> Any:
        self.reads += 1
        if self.reads > MAX_READS:
            raise Stuck
        return super().__getitem__(index)


class _OpenBox(Subgoal):
    """Toggles the box ahead. The bot then raises an error, and a new bot replaces it."""

    def replan_before_action(self) -> int:
        assert self.fwd_cell is not None and self.fwd_cell.type == "box"
        return TOGGLE


class Bot(BabyAIBot):
    """minigrid's bot for the remaining parts of the mission, with workarounds for three weaknesses:

    - The bot can push subgoals forever inside one call. `_Stack` counts how often it is read and
      raises `Stuck`. A time limit would depend on the speed of the machine.
    - The bot can fail an assertion. A new bot then replaces it. The new bot knows the cells that
      were in view, gets the remaining parts of the mission, and first puts down a carried object.
      If it fails as well, the next bot starts with a subgoal: unlock a door whose key was in view,
      or open a box.
    - The bot undoes actions that it did not plan. This class does not undo an unplanned toggle.
    """

    stack: Any

    def __init__(
        self, level: Level, vis_mask: np.ndarray | None = None, first_subgoal: str = ""
    ) -> None:
        super().__init__(level.env)
        self.stack = self._guarded_stack = _Stack(self.stack)
        if vis_mask is not None:
            self.vis_mask |= vis_mask
        self._process_obs()
        if level.env.carrying:
            self._empty_hands(level)
        if first_subgoal == "unlock a door":
            _, place, _ = self._shortest_path(self._can_unlock, try_with_blockers=True)
            door = level.env.grid.get(*place)
            self.stack += [OpenSubgoal(self), GoNextToSubgoal(self, door, reason="Open")]
        if first_subgoal == "open a box":
            description = ObjDesc("box")
            description.find_matching_objs(level.env)
            self.stack += [_OpenBox(self), GoNextToSubgoal(self, description)]

    def _process_instr(self, instr: Any) -> None:
        for part in reversed(remaining_parts(instr)):
            super()._process_instr(part)

    def _empty_hands(self, level: Level) -> None:
        part = remaining_parts(level.env.instrs)[0]
        if isinstance(part, PutNextInstr) and level.env.carrying in part.desc_move.obj_set:
            del self.stack[-2:]  # "go to it" and "pick it up" are done
        else:
            place = self._find_drop_pos()
            self.stack += [DropSubgoal(self), GoNextToSubgoal(self, place)]

    def _can_unlock(self, _: tuple[int, int], thing: Any) -> bool:
        """Whether `thing` is a locked door whose key is or was in view."""
        if thing is None or thing.type != "door" or not thing.is_locked:
            return False
        grid = self.mission.unwrapped.grid
        things = (grid.get(int(x), int(y)) for x, y in np.argwhere(self.vis_mask))
        return any(t and t.type == "key" and t.color == thing.color for t in things)

    def replan(self, action_taken: int | None = None) -> int:
        """The next move. `action_taken` DONE keeps the subgoals as if nothing had been played."""
        self._guarded_stack.reads = 0
        return int(super().replan(action_taken))

    def next_move(self, primitive: int) -> int:
        """The bot's next move after `primitive` was played, planned or not."""
        subgoal = self.stack[-1] if self.stack else None
        is_unplanned = primitive == TOGGLE and isinstance(subgoal, GoNextToSubgoal)
        return self.replan(DONE if is_unplanned else primitive)


class Player:
    """A level and a bot that knows the next primitive action in it (`move`)."""

    def __init__(self, number: int, seed: int) -> None:
        self.level = Level(number, seed)
        self.bot: Bot | None = None
        self.plan: Plan | None = None
        self._plan_time = -1  # the length of the history when `plan` was made
        self.move = self._move_of_new_bot()

    def play(self, primitive: int) -> None:
        """Play `primitive`, which can differ from `move`, and set the next `move`. Raises
        OracleLost if there is none."""
        target, plan = self.level.front, self.plan
        self.level.act(primitive)
        if self.level.is_over:
            return
        if primitive in OBJECT_MOVES:
            self.plan = None
        move = DONE
        try:
            if plan and plan.after and primitive == plan.milestone and target == plan.target:
                move = self._adopt(plan.after)
            elif self.bot:
                move = self.bot.next_move(primitive)
        except BOT_ERRORS:
            pass  # a new bot takes over
        self.move = self._move_of_new_bot() if move == DONE else move

    def begin_turn(self) -> Plan:
        """The plan for the turn that starts now, valid until its milestone or the next turn."""
        now, plan = len(self.level.history), self.plan
        if plan is None or self._plan_time != now:
            self.plan, self._plan_time = None, now
            if plan and plan.before and self.level.front == plan.target:  # the last turn went there
                try:
                    self.move = self._adopt(plan.before)
                except BOT_ERRORS:
                    self.move = self._move_of_new_bot()
            plan = self.plan = self._copy()._play_ahead(HORIZON)
        return plan

    def num_steps_after(self, moves: list[int], limit: int) -> int:
        """Number of primitive actions from the end of `moves` to the bot's next milestone; `limit`
        if there are at least that many."""
        player = self._copy()
        try:
            for move in moves:
                player.play(move)
                if player.level.is_over:
                    return 0
            plan = player._play_ahead(limit)
        except OracleLost:
            return limit
        return limit if plan.milestone is None else len(plan.poses)

    def _move_of_new_bot(self) -> int:
        vis_mask = self.bot.vis_mask if self.bot else None
        for first_subgoal in FIRST_SUBGOALS:
            try:
                self.bot = Bot(self.level, vis_mask, first_subgoal)
                return self.bot.replan()
            except BOT_ERRORS:
                continue
        self.bot = None
        raise OracleLost(f"no way to {self.level.mission!r} is known from here")

    def _adopt(self, player: Player) -> int:
        """Continue with the level and the bot of a player that played ahead, after moving its agent
        to our agent's pose. Our bot could change its plan, because it took another path to the same
        milestone and saw other cells. Returns the next move."""
        assert player.bot is not None
        source, target = self.level, player.level
        target.env.agent_pos, target.env.agent_dir = source.env.agent_pos, source.env.agent_dir
        target.env.step_count, target.history = source.env.step_count, source.history
        _copy_verdicts(source.env.instrs, target.env.instrs)
        if self.bot:
            player.bot.vis_mask |= self.bot.vis_mask
        self.level, self.bot = target, player.bot
        return self.bot.replan(DONE)

    def _copy(self) -> Player:
        """A copy that can be played separately. It shares the objects that never change."""
        env, plan = self.level.env, self.plan
        shared = [thing for thing in env.grid.grid if thing is not None and thing.type == "wall"]
        shared += [env.room_grid, env.action_space, env.observation_space, env.np_random]
        self.plan = None
        copy = deepcopy(self, {id(thing): thing for thing in shared})
        self.plan = plan
        return copy

    def _play_ahead(self, limit: int) -> Plan:
        """Play the bot's moves until its next milestone is done, but at most `limit` before it."""
        level, num_parts = self.level, len(remaining_parts(self.level.env.instrs))
        poses: list[tuple[tuple[int, int], int]] = []
        while len(poses) < limit:
            move, target = self.move, level.front
            before = self._copy() if move in OBJECT_MOVES else None
            try:
                self.play(move)
            except OracleLost:
                return Plan(poses, move if before else None, target, False, before, None)
            if before:
                walks_on = level.is_over or self.move == FORWARD
                return Plan(poses, move, target, walks_on, before, None if level.is_over else self)
            poses.append((level.position, level.direction))
            if level.is_over or len(remaining_parts(level.env.instrs)) < num_parts:
                return Plan(poses, DONE, level.front, False, None, None)
        return Plan(poses, None, level.front, False, None, None)


class Plan(NamedTuple):
    """The bot's path to its next milestone."""

    poses: list[tuple[tuple[int, int], int]]  # (position, direction) after each primitive action
    # PICKUP, DROP or TOGGLE; DONE: a part of the mission is fulfilled by going somewhere; None:
    # not reached within the limit.
    milestone: int | None
    target: tuple[int, int]  # the cell ahead of the agent at the milestone
    walks_on: bool  # after a toggle, the bot goes through the door or the episode is over
    before: Player | None  # the player just before the milestone
    after: Player | None  # the player just after it


def _copy_verdicts(source: Any, target: Any) -> None:
    """Copy which parts of the mission are fulfilled."""
    for name in ("a_done", "b_done"):
        if hasattr(source, name):
            setattr(target, name, getattr(source, name))
    for name in ("instr_a", "instr_b"):
        if hasattr(source, name):
            _copy_verdicts(getattr(source, name), getattr(target, name))
