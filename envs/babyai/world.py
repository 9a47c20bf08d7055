"""A level of BabyAI for a text agent: the simulated level, what is seen of it, what can be done.

`Level` plays minigrid's seven primitive actions. `View` is the 7 x 7 cells before the agent, told
in steps (ahead, right); negative is left, so the same words mean the same walk everywhere:

    (6,-3) ... (6, 3)
       :          :           You see: red ball 1 (2 ahead, 1 left), grey door 1 (closed, 4 ahead).
    (0,-3)  A  (0, 3)         A faces up

Walls and closed doors hide what is behind them, by minigrid's rule. Objects are numbered for each
colour and kind, the nearest first; numbers hold for one view, and earlier views are not remembered.

`perform` plays a text action. A walking one ("go to", "pickup", "go through", "toggle and go
through") takes the fewest primitive actions over free cells in view, and stops where something
unexpected happens: the mission ends, the steps are used up, something stands behind a door. "go to"
what is one step ahead plays `done`, because minigrid only checks the mission after an action.
An impossible action says why, costs nothing and changes nothing.
"""

import re
from collections import Counter, deque
from functools import cached_property
from typing import Any, NamedTuple

# ---------------------------------------------------------------------------------------- the level


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
    """One episode. `env` is minigrid's environment; only `act` changes it. Number (1..40), seed and
    `history`, the primitive actions so far, are the whole state.
    """

    def __init__(self, number: int, seed: int) -> None:
        self.number, self.seed, self.name = number, seed, LEVELS[number - 1]
        spec = gymnasium.spec(self.name)
        assert isinstance(spec.entry_point, str)
        make: Any = load_env_creator(spec.entry_point)
        self.env: Any = make(**spec.kwargs)
        self.env.gen_obs = dict  # an empty observation; the view is drawn when it is asked for
        self.env.reset(seed=seed)
        self.history: list[int] = []
        self.reward = 0.0  # of the latest action: 1 - 0.9 * steps / max_steps on success, else 0
        self.terminated = self.truncated = False

    @property
    def ended(self) -> bool:
        return self.terminated or self.truncated

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
        """Where the agent faces: 0 right, 1 down, 2 left, 3 up in the full grid."""
        return int(self.env.agent_dir)

    @property
    def front(self) -> tuple[int, int]:
        """(x, y) of the cell that the agent faces."""
        x, y = self.env.front_pos
        return int(x), int(y)

    @property
    def front_object(self) -> Any:
        """What the agent faces; None is empty floor."""
        return self.env.grid.get(*self.front)

    def act(self, primitive: int) -> None:
        """Plays one primitive action and sets `reward`, `terminated` and `truncated`.

        minigrid checks "open red, then open blue" part by part: once the first part succeeds, the
        second is checked against the same action, which fails it. Such a failure is ignored.
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
    """minigrid's verdict on a part is False at first, then a word."""
    return verdict == "success"


def parts_left(instruction: Any) -> list[Any]:
    """The single instructions ("open the red door") that are not yet fulfilled, in the order in
    which they must or may be done."""
    if not isinstance(instruction, AfterInstr | BeforeInstr | AndInstr):
        return [instruction]
    a, b = (instruction.a_done, instruction.instr_a), (instruction.b_done, instruction.instr_b)
    if isinstance(instruction, AfterInstr):
        order = [b, (False, a[1])]
    else:
        order = [a, b] if isinstance(instruction, AndInstr) else [a, (False, b[1])]
    return [leaf for done, part in order if not _is_done(done) for leaf in parts_left(part)]


# ----------------------------------------------------------------------------------------- the view


SIZE, HALF = 7, 3  # minigrid's agent_view_size
DIRECTIONS = ((1, 0), (0, 1), (-1, 0), (0, -1))  # (x, y) of minigrid's directions 0..3
STEPS = ((1, 0), (0, 1), (-1, 0), (0, -1))  # (ahead, right) of facing ahead, right, back, left
Cell = tuple[int, int]  # (ahead, right)
Pose = tuple[int, int, int]  # (ahead, right, facing); (0, 0, 0) is where the agent stands


class Seen(NamedTuple):
    """An object in view."""

    name: str  # "red ball 1"
    object: Any  # minigrid's object: type, color, for a door is_open and is_locked
    cell: Cell
    position: tuple[int, int]  # (x, y) in the full grid


def door_state(door: Any) -> str:
    """ "open", "closed" or "locked"."""
    return "open" if door.is_open else "locked" if door.is_locked else "closed"


def plain(thing: Any) -> str:
    """Colour and kind of an object without a number: "red ball", "wall"."""
    return "wall" if thing.type == "wall" else f"{thing.color} {thing.type}"


def is_free(thing: Any) -> bool:
    """Whether one can stand there: empty floor or an open door."""
    return thing is None or (thing.type == "door" and thing.is_open)


class View:
    """What can be seen from the pose in which `level` is now.

    `cells` maps each visible (ahead, right), the agent's own cell included, to minigrid's object,
    None for empty floor. `objects` are all but walls.
    """

    def __init__(self, level: Level) -> None:
        self.carrying = level.env.carrying
        self._origin, self._direction = level.position, level.direction
        self.cells = self._visible(level.env)
        self.objects = self._named()
        self.by_name = {seen.name: seen for seen in self.objects}

    def absolute(self, pose: Pose) -> tuple[tuple[int, int], int]:
        """Position (x, y) and direction 0..3 in the full grid."""
        (x, y), (dx, dy) = self._origin, DIRECTIONS[self._direction]
        ahead, right, facing = pose
        position = (x + dx * ahead - dy * right, y + dy * ahead + dx * right)
        return position, (self._direction + facing) % 4

    def _visible(self, env: Any) -> dict[Cell, Any]:
        view, is_visible = env.gen_obs_grid()  # (column, row) from the left and from far ahead
        cells: dict[Cell, Any] = {}
        for column in range(SIZE):
            for row in range(SIZE):
                cell = (SIZE - 1 - row, column - HALF)
                (x, y), _ = self.absolute((*cell, 0))
                if is_visible[column, row] and 0 <= x < env.grid.width and 0 <= y < env.grid.height:
                    cells[cell] = view.get(column, row)
        cells[0, 0] = env.grid.get(*self._origin)  # there minigrid shows what is carried
        return cells

    def _named(self) -> list[Seen]:
        """The nearest first; of equally near ones the less far ahead, then the further left."""
        counts: Counter[str] = Counter()
        objects = []
        for ahead, right in sorted(self.cells, key=lambda cell: (cell[0] + abs(cell[1]), *cell)):
            thing = self.cells[ahead, right]
            if thing is None or thing.type == "wall" or (ahead, right) == (0, 0):
                continue
            kind = plain(thing)
            counts[kind] += 1
            position, _ = self.absolute((ahead, right, 0))
            objects.append(Seen(f"{kind} {counts[kind]}", thing, (ahead, right), position))
        return objects

    @cached_property
    def reachable(self) -> dict[Pose, tuple[Pose, int] | None]:
        """Every pose that free cells in view lead to, nearest first, with the pose before it and
        the primitive action between the two (None for the pose now)."""
        reached: dict[Pose, tuple[Pose, int] | None] = {(0, 0, 0): None}
        queue = deque(reached)
        while queue:
            pose = ahead, right, facing = queue.popleft()
            cell = (ahead + STEPS[facing][0], right + STEPS[facing][1])
            moves = [
                (LEFT, (ahead, right, (facing - 1) % 4)),
                (RIGHT, (ahead, right, (facing + 1) % 4)),
            ]
            if cell in self.cells and is_free(self.cells[cell]):
                moves.insert(0, (FORWARD, (*cell, facing)))
            for move, after in moves:
                if after not in reached:
                    reached[after] = pose, move
                    queue.append(after)
        return reached

    def way(self, seen: Seen) -> tuple[list[int], Pose] | None:
        """The fewest primitive actions to face the object, and the pose at their end; None if no
        free way is in view."""
        ahead, right = seen.cell
        ends = {(ahead - a, right - r, facing) for facing, (a, r) in enumerate(STEPS)}
        end = next((pose for pose in self.reachable if pose in ends), None)  # the nearest
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
        """Three lines: objects, walls, what is carried."""
        lines = []
        if (here := self.cells[0, 0]) is not None:
            lines.append(f"You stand in the open {plain(here)}.")
        seen = ", ".join(f"{s.name} ({_state_and_place(s)})" for s in self.objects)
        lines.append(f"You see: {seen or 'no objects'}.")
        walls = [
            f"{steps} {side}"
            for side, (ahead, right) in (("ahead", (1, 0)), ("left", (0, -1)), ("right", (0, 1)))
            if (steps := self._steps_to_wall(ahead, right))
        ]
        if walls:
            lines.append(f"Walls: {', '.join(walls)}.")
        carrying = f"a {plain(self.carrying)}" if self.carrying else "nothing"
        lines.append(f"You carry {carrying}.")
        return "\n".join(lines)

    def _steps_to_wall(self, ahead: int, right: int) -> int:
        """0 if something else comes first or no wall is in view."""
        for steps in range(1, SIZE):
            cell = (ahead * steps, right * steps)
            if cell not in self.cells:
                return 0
            if self.cells[cell] is not None and self.cells[cell].type == "wall":
                return steps
        return 0


def _state_and_place(seen: Seen) -> str:
    ahead, right = seen.cell
    words = [door_state(seen.object)] if seen.object.type == "door" else []
    if ahead:
        words.append(f"{ahead} ahead")
    if right:
        words.append(f"{abs(right)} {'right' if right > 0 else 'left'}")
    return ", ".join(words)


def grid_rows(level: Level) -> list[str]:
    """The whole level for people, two letters a cell: kind (Wall, Key, bAll, Box, Door, Locked
    door, Open door) and color (Red, Green, Blue, Purple, Yellow, grEy); the agent is an arrow.

    minigrid's own `pprint_grid` writes green and grey alike, and open doors without a color.
    """
    grid, agent = level.env.grid, tuple(level.position)
    return [
        "".join(
            2 * ARROWS[level.direction] if (x, y) == agent else _letters(grid.get(x, y))
            for x in range(grid.width)
        )
        for y in range(grid.height)
    ]


ARROWS = (">", "v", "<", "^")  # of minigrid's directions
LETTERS = {"wall": "W", "key": "K", "ball": "A", "box": "B", "door": "D"}


def _letters(thing: Any) -> str:
    if thing is None:
        return "  "
    kind = LETTERS.get(thing.type, "?")
    if thing.type == "door" and (thing.is_open or thing.is_locked):
        kind = "O" if thing.is_open else "L"
    return kind + ("E" if thing.color == "grey" else thing.color[0].upper())


# -------------------------------------------------------------------------------------- the actions


TURNS = {"turn left": LEFT, "turn right": RIGHT}
CHECK = "check available actions"
LOCKED = "the {0} door is locked, and you do not carry the {0} key"
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
        if view.way(seen) is None:
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


def can_toggle(thing: Any, view: View) -> bool:
    """Whether toggling changes it: a box, a door that is not locked or whose key is carried."""
    if thing is None or thing.type != "door":
        return thing is not None and thing.type == "box"
    key = view.carrying
    has_key = bool(key and key.type == "key" and key.color == thing.color)
    return door_state(thing) != "locked" or has_key


def perform(level: Level, view: View, action: str) -> str:
    """Plays an action (not CHECK) and says what happened; Impossible if it cannot be played."""
    if action in TURNS:
        level.act(TURNS[action])
        return f"You {action}."
    if action == "move forward":
        thing = level.front_object
        if not is_free(thing):
            state = door_state(thing) + " " if thing.type == "door" else ""
            raise Impossible(f"a {state}{plain(thing)} is in the way")
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
    name = f"{match[2]} {(match[3] or ' 1').strip()}"
    if name not in view.by_name:
        raise Impossible(f"no {name} is in view")
    verb, seen = match[1], view.by_name[name]
    if verb == "go to":
        return _go_to(level, view, seen)
    if "through" in verb:
        return _go_through(level, view, seen, verb)
    return _pick_up(level, view, seen)


def _way(view: View, seen: Seen) -> list[int]:
    way = view.way(seen)
    if way is None:
        raise Impossible(f"no free way to {seen.name} is in view")
    return way[0]


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
        raise Impossible(LOCKED.format(door.color))
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
        raise Impossible(LOCKED.format(thing.color))
    level.act(TOGGLE)
    if thing.type == "door":
        return f"You {'open' if thing.is_open else 'close'} the {plain(thing)}."
    inside = level.env.grid.get(*position)
    content = f"a {plain(inside)} is" if inside else "nothing is"
    return f"You open the {plain(thing)}: {content} in it."


def _drop(level: Level, view: View) -> str:
    if not view.carrying:
        raise Impossible("you carry nothing")
    front = level.front_object
    if front is not None:
        raise Impossible(f"there is no free floor ahead but a {plain(front)}")
    level.act(DROP)
    return f"You drop the {plain(view.carrying)}."
