"""A level of BabyAI for a text agent: the simulated level, the agent's view and the text actions.

`Level` plays minigrid's seven primitive actions. `View` holds the 7 x 7 cells in front of the
agent. A cell is given in steps (ahead, right), where a negative number means left. So the same
words describe the same walk, wherever the agent is and whichever way it faces:

    (6,-3) ... (6, 3)
       :          :           You see: red ball 1 (2 ahead, 1 left), grey door 1 (closed, 4 ahead).
    (0,-3)  A  (0, 3)         A faces up

Walls and closed doors hide the cells behind them, by minigrid's rule. Objects of the same color and
kind are numbered, the nearest first. The numbers are valid for one view; earlier views are not
remembered.

`perform` plays a text action. An action that walks ("go to", "pickup", "go through", "toggle and go
through") takes the shortest path over free cells in view. It stops early if the mission ends, if
the steps are used up, or if something blocks the cell behind a door. "go to" an object one step
ahead plays `done`, because minigrid checks the mission only after an action. An impossible action
changes nothing and costs no step; its observation gives the reason.
"""

import re
import zlib
from collections import Counter, deque
from functools import cached_property
from typing import Any, NamedTuple

# -------------------------------------------------------------------------------------------- level


try:
    import gymnasium
    import minigrid  # noqa: F401 - registers the levels
    from gymnasium.envs.registration import load_env_creator
    from minigrid.envs.babyai.core import roomgrid_level
    from minigrid.envs.babyai.core.verifier import AfterInstr, AndInstr, BeforeInstr
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"BabyAI needs {error.name}, which is not installed; run `make setup ENV=babyai`"
    ) from error

from envs.babyai.levels import LEVELS

LEFT, RIGHT, FORWARD, PICKUP, DROP, TOGGLE, DONE = range(7)  # minigrid's numbers

vars(roomgrid_level)["print"] = lambda *_: None  # "Sampling rejected: ..."


class Level:
    """One episode. `env` is minigrid's environment; only `act` changes it. The state is determined
    by the number (1..40), the seed and `history`, the list of primitive actions so far.
    """

    def __init__(self, number: int, seed: int) -> None:
        self.number, self.seed, self.name = number, seed, LEVELS[number - 1]
        spec = gymnasium.spec(self.name)
        assert isinstance(spec.entry_point, str)
        make: Any = load_env_creator(spec.entry_point)
        self.env: Any = make(**spec.kwargs)
        self.env.gen_obs = dict  # minigrid's observations stay empty; `View` computes ours
        self.env.reset(seed=seed)
        self.history: list[int] = []
        self.reward = 0.0  # of the latest action: 1 - 0.9 * steps / max_steps on success, or 0
        self.terminated = self.truncated = False

    @property
    def is_over(self) -> bool:
        return self.terminated or self.truncated

    @property
    def state(self) -> str:
        """A text that is equal for equal states: the agent's place, what it carries, the grid."""
        carried = self.env.carrying.encode() if self.env.carrying else ""
        grid = zlib.crc32(self.env.grid.encode().tobytes())
        return f"{self.position} {self.direction} {carried} {grid}"

    @property
    def mission(self) -> str:
        return str(self.env.mission)

    @property
    def position(self) -> tuple[int, int]:
        """(x, y) of the agent, x to the right and y downwards in the full grid."""
        x, y = self.env.agent_pos
        return int(x), int(y)

    @property
    def direction(self) -> int:
        """The direction that the agent faces in the full grid: 0 right, 1 down, 2 left, 3 up."""
        return int(self.env.agent_dir)

    @property
    def front(self) -> tuple[int, int]:
        """(x, y) of the cell that the agent faces."""
        x, y = self.env.front_pos
        return int(x), int(y)

    @property
    def front_object(self) -> Any:
        """The object in the cell that the agent faces; None for empty floor."""
        return self.env.grid.get(*self.front)

    def act(self, primitive: int) -> None:
        """Play one primitive action and set `reward`, `terminated` and `truncated`.

        In "open red, then open blue", minigrid checks the second part against the same action that
        fulfills the first part, so the second part fails immediately. This method ignores that
        failure.
        """
        was_done = self._first_part_is_done()
        _, reward, terminated, truncated, _ = self.env.step(primitive)
        if terminated and not reward and not was_done and self._first_part_is_done():
            terminated = False
        self.history.append(primitive)
        self.reward, self.terminated = float(reward), bool(terminated)
        self.truncated = bool(truncated) and not self.terminated

    def _first_part_is_done(self) -> bool:
        mission = self.env.instrs
        if isinstance(mission, BeforeInstr):
            return _is_done(mission.a_done)
        return isinstance(mission, AfterInstr) and _is_done(mission.b_done)


def _is_done(verdict: object) -> bool:
    """Whether a part is fulfilled. minigrid's verdict on it is first False and later a word."""
    return verdict == "success"


def remaining_parts(instruction: Any) -> list[Any]:
    """The unfinished parts of a mission ("open the red door"), in an order that completes it."""
    if not isinstance(instruction, AfterInstr | BeforeInstr | AndInstr):
        return [instruction]
    a, b = (instruction.a_done, instruction.instr_a), (instruction.b_done, instruction.instr_b)
    if isinstance(instruction, AfterInstr):
        order = [b, (False, a[1])]
    else:
        order = [a, b] if isinstance(instruction, AndInstr) else [a, (False, b[1])]
    return [leaf for verdict, p in order if not _is_done(verdict) for leaf in remaining_parts(p)]


# --------------------------------------------------------------------------------------------- view


SIZE, HALF = 7, 3  # minigrid's agent_view_size
DIRECTIONS = ((1, 0), (0, 1), (-1, 0), (0, -1))  # (x, y) of minigrid's directions 0..3
STEPS = ((1, 0), (0, 1), (-1, 0), (0, -1))  # (ahead, right) of facing ahead, right, back, left
Cell = tuple[int, int]  # (ahead, right)
Pose = tuple[int, int, int]  # (ahead, right, facing); (0, 0, 0) is the agent's pose


class VisibleObject(NamedTuple):
    """An object in view, with its name and its place."""

    name: str  # "red ball 1"
    object: Any  # minigrid's object with type and color; a door has is_open and is_locked
    cell: Cell
    position: tuple[int, int]  # (x, y) in the full grid


def door_state(door: Any) -> str:
    """ "open", "closed" or "locked"."""
    return "open" if door.is_open else "locked" if door.is_locked else "closed"


def describe(thing: Any) -> str:
    """Color and kind of an object, without a number: "red ball", "wall"."""
    return "wall" if thing.type == "wall" else f"{thing.color} {thing.type}"


def is_free(thing: Any) -> bool:
    """Whether the agent can stand in a cell with this content: empty floor or an open door."""
    return thing is None or (thing.type == "door" and thing.is_open)


class View:
    """The agent's view from its current pose in `level`.

    `cells` maps each visible cell (ahead, right), including the agent's, to minigrid's object or to
    None for empty floor. `objects` lists the objects in view, without walls.
    """

    def __init__(self, level: Level) -> None:
        self.carrying = level.env.carrying
        self._origin, self._direction = level.position, level.direction
        self.cells = self._visible_cells(level.env)
        self.objects = self._number_objects()
        self.by_name = {entry.name: entry for entry in self.objects}

    def absolute(self, pose: Pose) -> tuple[tuple[int, int], int]:
        """Position (x, y) and direction 0..3 in the full grid."""
        (x, y), (dx, dy) = self._origin, DIRECTIONS[self._direction]
        ahead, right, facing = pose
        position = (x + dx * ahead - dy * right, y + dy * ahead + dx * right)
        return position, (self._direction + facing) % 4

    def _visible_cells(self, env: Any) -> dict[Cell, Any]:
        view, is_visible = env.gen_obs_grid()  # (column, row), from the left and from the far end
        cells: dict[Cell, Any] = {}
        for column in range(SIZE):
            for row in range(SIZE):
                cell = (SIZE - 1 - row, column - HALF)
                (x, y), _ = self.absolute((*cell, 0))
                if is_visible[column, row] and 0 <= x < env.grid.width and 0 <= y < env.grid.height:
                    cells[cell] = view.get(column, row)
        cells[0, 0] = env.grid.get(*self._origin)  # minigrid's view has the carried object there
        return cells

    def _number_objects(self) -> list[VisibleObject]:
        """The objects in view, the nearest first. At equal distance the one that is less far ahead
        comes first, then the one further left."""
        counts: Counter[str] = Counter()
        objects = []
        for ahead, right in sorted(self.cells, key=lambda cell: (cell[0] + abs(cell[1]), *cell)):
            thing = self.cells[ahead, right]
            if thing is None or thing.type == "wall" or (ahead, right) == (0, 0):
                continue
            kind = describe(thing)
            counts[kind] += 1
            name, (position, _) = f"{kind} {counts[kind]}", self.absolute((ahead, right, 0))
            objects.append(VisibleObject(name, thing, (ahead, right), position))
        return objects

    @cached_property
    def reachable(self) -> dict[Pose, tuple[Pose, int] | None]:
        """Maps every pose that can be reached over free cells in view, nearest first, to the pose
        before it and the primitive action from there. The current pose maps to None."""
        predecessors: dict[Pose, tuple[Pose, int] | None] = {(0, 0, 0): None}
        queue = deque(predecessors)
        while queue:
            pose = ahead, right, facing = queue.popleft()
            cell = (ahead + STEPS[facing][0], right + STEPS[facing][1])
            moves = [
                (LEFT, (ahead, right, (facing - 1) % 4)),
                (RIGHT, (ahead, right, (facing + 1) % 4)),
            ]
            if cell in self.cells and is_free(self.cells[cell]):
                moves.insert(0, (FORWARD, (*cell, facing)))
            for move, next_pose in moves:
                if next_pose not in predecessors:
                    predecessors[next_pose] = pose, move
                    queue.append(next_pose)
        return predecessors

    def path(self, target: VisibleObject) -> tuple[list[int], Pose] | None:
        """The shortest list of primitive actions after which the agent faces the object, and the
        agent's pose at the end. None if no free path is in view."""
        ahead, right = target.cell
        ends = {(ahead - a, right - r, facing) for facing, (a, r) in enumerate(STEPS)}
        end = next((pose for pose in self.reachable if pose in ends), None)  # the nearest pose
        if end is None:
            return None
        moves: list[int] = []
        step = self.reachable[end]
        while step is not None:
            pose, move = step
            moves.append(move)
            step = self.reachable[pose]
        return moves[::-1], end

    def words(self) -> str:
        """The view as text: one line each for the objects, the walls and the carried object."""
        lines = []
        if (door := self.cells[0, 0]) is not None:
            lines.append(f"You stand in the open {describe(door)}.")
        names = ", ".join(f"{o.name} ({_state_and_place(o)})" for o in self.objects)
        lines.append(f"You see: {names or 'no objects'}.")
        walls = [
            f"{steps} {side}"
            for side, (ahead, right) in (("ahead", (1, 0)), ("left", (0, -1)), ("right", (0, 1)))
            if (steps := self._steps_to_wall(ahead, right))
        ]
        if walls:
            lines.append(f"Walls: {', '.join(walls)}.")
        carrying = f"a {describe(self.carrying)}" if self.carrying else "nothing"
        lines.append(f"You carry {carrying}.")
        return "\n".join(lines)

    def _steps_to_wall(self, ahead: int, right: int) -> int:
        """Steps to the first wall in this direction; 0 if an object hides it or none is in view."""
        for steps in range(1, SIZE):
            cell = (ahead * steps, right * steps)
            if cell not in self.cells:
                return 0
            if self.cells[cell] is not None and self.cells[cell].type == "wall":
                return steps
        return 0


def _state_and_place(entry: VisibleObject) -> str:
    ahead, right = entry.cell
    words = [door_state(entry.object)] if entry.object.type == "door" else []
    if ahead:
        words.append(f"{ahead} ahead")
    if right:
        words.append(f"{abs(right)} {'right' if right > 0 else 'left'}")
    return ", ".join(words)


def grid_rows(level: Level) -> list[str]:
    """The complete level as text for display, with two letters per cell. The first is the kind
    (Wall, Key, bAll, Box, Door, Locked door, Open door), the second the color (Red, Green, Blue,
    Purple, Yellow, grEy). The agent is an arrow.

    minigrid's `pprint_grid` uses the same letter for green and grey and shows open doors without a
    color.
    """
    grid, agent = level.env.grid, tuple(level.position)
    return [
        "".join(
            2 * ARROWS[level.direction] if (x, y) == agent else _letters(grid.get(x, y))
            for x in range(grid.width)
        )
        for y in range(grid.height)
    ]


ARROWS = (">", "v", "<", "^")  # for minigrid's directions 0..3
LETTERS = {"wall": "W", "key": "K", "ball": "A", "box": "B", "door": "D"}


def _letters(thing: Any) -> str:
    if thing is None:
        return "  "
    kind = LETTERS.get(thing.type, "?")
    if thing.type == "door" and (thing.is_open or thing.is_locked):
        kind = "O" if thing.is_open else "L"
    return kind + ("E" if thing.color == "grey" else thing.color[0].upper())


# ------------------------------------------------------------------------------------------ actions


TURNS = {"turn left": LEFT, "turn right": RIGHT}
CHECK = "check available actions"
LOCKED = "the {0} door is locked, and you do not carry the {0} key"
WALK = re.compile(r"(go to|pickup|pick up|go through|toggle and go through) ([a-z ]{1,40}?)( \d+)?")


class Impossible(Exception):
    """The action cannot be played now; the agent reads the message, which gives the reason."""


def available(level: Level, view: View) -> list[str]:
    """The actions that `perform` can play now, without repeats and in a fixed order."""
    actions = list(TURNS)
    front = level.front_object
    if is_free(front):
        actions.append("move forward")
    for entry in view.objects:
        if view.path(entry) is None:
            continue
        actions.append(f"go to {entry.name}")
        if entry.object.type != "door":
            if not view.carrying:
                actions.append(f"pickup {entry.name}")
        elif entry.object.is_open:
            actions.append(f"go through {entry.name}")
        elif can_toggle(entry.object, view):
            actions.append(f"toggle and go through {entry.name}")
    if can_toggle(front, view):
        actions.append("toggle")
    if view.carrying and front is None:
        actions.append("drop")
    return [*actions, CHECK]


def can_toggle(thing: Any, view: View) -> bool:
    """Whether toggling changes the object: true for a box, and for a door that is not locked or
    whose key the agent carries."""
    if thing is None or thing.type != "door":
        return thing is not None and thing.type == "box"
    key = view.carrying
    has_key = bool(key and key.type == "key" and key.color == thing.color)
    return door_state(thing) != "locked" or has_key


def perform(level: Level, view: View, action: str) -> str:
    """Play a text action (not CHECK) and return its result as text. Raises Impossible."""
    if action in TURNS:
        level.act(TURNS[action])
        return f"You {action}."
    if action == "move forward":
        thing = level.front_object
        if not is_free(thing):
            state = door_state(thing) + " " if thing.type == "door" else ""
            raise Impossible(f"a {state}{describe(thing)} is in the way")
        level.act(FORWARD)
        return "You move forward."
    if action == "toggle":
        return _toggle(level, view)
    if action == "drop":
        return _drop(level, view)
    match = WALK.fullmatch(action[:80])
    if not match:
        quote = action if len(action) <= 60 else action[:60] + "..."
        raise Impossible(f"{quote!r} is no action" if quote else "there is no action")
    name = f"{match[2]} {(match[3] or ' 1').strip()}"
    if name not in view.by_name:
        raise Impossible(f"no {name} is in view")
    verb, target = match[1], view.by_name[name]
    if verb == "go to":
        return _go_to(level, view, target)
    if "through" in verb:
        return _go_through(level, view, target, verb)
    return _pick_up(level, view, target)


def _path(view: View, target: VisibleObject) -> list[int]:
    path = view.path(target)
    if path is None:
        raise Impossible(f"no free way to {target.name} is in view")
    return path[0]


def _play(level: Level, moves: list[int]) -> bool:
    """Play moves until one is blocked or the episode is over; return whether all were played."""
    for move in moves:
        if level.is_over or (move == FORWARD and not is_free(level.front_object)):
            return False
        level.act(move)
    return True


def _go_to(level: Level, view: View, target: VisibleObject) -> str:
    is_there = _play(level, _path(view, target) or [DONE])
    return f"You go to {target.name}." if is_there else f"You stop on the way to {target.name}."


def _pick_up(level: Level, view: View, target: VisibleObject) -> str:
    if target.object.type == "door":
        raise Impossible("a door cannot be picked up")
    if view.carrying:
        raise Impossible(f"you carry a {describe(view.carrying)} already; drop it first")
    if not _play(level, [*_path(view, target), PICKUP]):
        return f"You stop on the way to {target.name}."
    return f"You pick up {target.name}."


def _go_through(level: Level, view: View, target: VisibleObject, verb: str) -> str:
    door, name = target.object, target.name
    if door.type != "door":
        raise Impossible(f"{name} is no door")
    if verb == "go through" and not door.is_open:
        raise Impossible(f"{name} is {door_state(door)}")
    if verb != "go through" and door.is_open:
        raise Impossible(f"{name} is open; go through it")
    if not can_toggle(door, view):
        raise Impossible(LOCKED.format(door.color))
    toggles = [] if door.is_open else [TOGGLE]
    is_through = _play(level, [*_path(view, target), *toggles, FORWARD, FORWARD])
    if not door.is_open or not (is_through or toggles or level.position == target.position):
        return f"You stop on the way to {name}."
    clause = "You open and go through" if toggles else "You go through"
    if is_through:
        return f"{clause} {name}."
    if level.position != target.position:
        return f"You open {name}."
    blocker = level.front_object
    reason = f": a {describe(blocker)} is in the way" if blocker else ""
    return f"{clause} {name} but stop in the doorway{reason}."


def _toggle(level: Level, view: View) -> str:
    thing, position = level.front_object, level.front
    if thing is None or thing.type not in ("door", "box"):
        reason = f"a {describe(thing)} cannot be toggled" if thing else "nothing is in front of you"
        raise Impossible(reason)
    if not can_toggle(thing, view):
        raise Impossible(LOCKED.format(thing.color))
    level.act(TOGGLE)
    if thing.type == "door":
        return f"You {'open' if thing.is_open else 'close'} the {describe(thing)}."
    inside = level.env.grid.get(*position)
    content = f"a {describe(inside)} is" if inside else "nothing is"
    return f"You open the {describe(thing)}: {content} in it."


def _drop(level: Level, view: View) -> str:
    if not view.carrying:
        raise Impossible("you carry nothing")
    front = level.front_object
    if front is not None:
        raise Impossible(f"there is no free floor ahead but a {describe(front)}")
    level.act(DROP)
    return f"You drop the {describe(view.carrying)}."
