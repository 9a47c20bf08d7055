"""minigrid's bot, made to end every call, to recover, and to be asked what it will do next.

minigrid ships a planner for BabyAI, `BabyAIBot`: told after each step which primitive action was
played, it suggests the next one. It keeps a stack of subgoals and knows only the cells that the
agent has seen so far, so it looks around and explores as an agent must. It has four weaknesses.

It can push subgoals for ever inside one call.
    Here its stack counts how often it is read and raises `Stuck`: no clock, no signals, the same on
    every machine and in every thread of a server.
It can fail an assertion.
    A bot that fails is replaced by a fresh one. It keeps the cells that were seen, gets only the
    parts of the mission that are left, and first gets rid of what is carried. If even that one
    fails, the next is given a start: unlock the door whose key is known (minigrid's own choice of a
    locked door is the nearest, with or without its key), or open a box (the key may be inside).
It undoes what it did not ask for.
    A door toggled against its plan is left as it is; picked up and dropped things are put back.
It is slow.
    Its search copies its queue at every step; here it does not, and finds the same paths.

A `Pilot` is a level and its bot. It can be copied and fly ahead to the next *deed* of the bot
(pickup, drop, toggle; a part of the mission fulfilled by going somewhere counts, too):

    now  ->  turn, forward, forward, turn, forward  ->  pickup        a Plan: poses, deed, target

Who follows the plan may take another way to the same deed. The pilot then takes over the bot that
flew ahead: left to itself, the bot would see other cells on that way, change its mind, and undo.

Read next: envs/babyai/oracle.py.
"""

from collections import deque
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
from envs.babyai.world import DONE, DROP, FORWARD, PICKUP, TOGGLE, Level, parts_left

MAX_READS = 60  # of a bot's stack in one call; 9 is the most that 199 solved tasks needed
HORIZON = 150  # primitive actions that a copy flies ahead at most
DEEDS = (PICKUP, DROP, TOGGLE)
STARTS = ("", "unlock a door", "open a box")


class Stuck(Exception):
    """The bot went round in circles inside one call."""


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
    """minigrid's bot on the parts of the mission that are left; every call ends."""

    def __init__(self, level: Level, seen: np.ndarray | None = None, start: str = "") -> None:
        super().__init__(level.env)
        self.width = level.env.grid.width
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

    def _breadth_first_search(
        self, initial_states: Any, accept_fn: Any, ignore_blockers: bool
    ) -> tuple[Any, Any, dict]:
        """minigrid's search, the same to the last tie; minigrid's copies the queue at every step,
        which is most of what its bot costs."""
        grid, width, seen = self.mission.unwrapped.grid.grid, self.width, self.vis_mask.tolist()
        queue: deque[Any] = deque(
            (int(i), int(j), int(di), int(dj), None) for i, j, di, dj in initial_states
        )
        before: dict = {}
        while queue:
            i, j, di, dj, previous = queue.popleft()
            here = (i, j)
            if here in before:
                continue
            before[here] = previous
            thing = grid[j * width + i]
            if accept_fn(here, thing):
                path = [here]
                while (place := before[path[-1]]) is not None:
                    path.append(place)
                return path, here, before
            blocks = thing is not None and not (
                thing.is_open if thing.type == "door" else thing.type != "wall" and ignore_blockers
            )
            if seen[i][j] and not blocks:
                for k, m in ((di, dj), (dj, di), (-dj, -di), (-di, -dj)):  # straight on first
                    queue.append((i + k, j + m, k, m, here))
        return None, None, before

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
        """Plays it, whether or not it was `move`, and finds the next move.

        Raises:
            OracleLost: there is none.
        """
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

    def begin_turn(self) -> "Plan":
        """The plan for the turn that begins now, kept until its deed is done or the next turn.

        Raises:
            OracleLost: there is no next move.
        """
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

    def _take_over(self, pilot: "Pilot") -> int:
        """Goes on with the bot of a pilot that flew ahead, perhaps on another way: in its level the
        agent is put where it is in ours. Returns the next move."""
        assert pilot.bot is not None
        ours, theirs = self.level, pilot.level
        theirs.env.agent_pos, theirs.env.agent_dir = ours.env.agent_pos, ours.env.agent_dir
        theirs.env.step_count, theirs.history = ours.env.step_count, ours.history
        _copy_verdicts(ours.env.instrs, theirs.env.instrs)
        if self.bot:
            pilot.bot.vis_mask |= self.bot.vis_mask
        self.level, self.bot = theirs, pilot.bot
        return self.bot.replan(DONE)

    def _copy(self) -> "Pilot":
        """A pilot of its own; what never changes after a level is made is shared."""
        env, plan = self.level.env, self.plan
        shared = [thing for thing in env.grid.grid if thing is not None and thing.type == "wall"]
        shared += [env.room_grid, env.action_space, env.observation_space, env.np_random]
        self.plan = None
        copy = deepcopy(self, {id(thing): thing for thing in shared})
        self.plan = plan
        return copy

    def _fly(self, at_most: int) -> "Plan":
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
