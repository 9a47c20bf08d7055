"""What the agent sees: a window of 7 x 7 cells in front of it, names for the objects, words.

The agent stands at the middle of the window's near edge. All is told from where it stands, in steps
ahead and to the right (negative: to the left), so the same words mean the same turn and walk
wherever the agent is:

    (ahead, right)     (6,-3) ... (6, 3)
                          :          :
                       (1,-3) ... (1, 3)
                       (0,-3)  A  (0, 3)       A faces up

Walls and closed doors hide what is behind them, by minigrid's own rule: light spreads from the
agent's row away from it, and along each row to both sides.

Objects are numbered for each colour and kind, the nearest first (steps ahead plus steps aside; of
equally near ones the one less far ahead, then the one further left). Numbers hold for one view
only: after every action they are given anew.

    You see: red ball 1 (2 ahead, 1 left), grey door 1 (closed, 4 ahead).

There is no memory of earlier views, neither in the words nor in the paths: the agent may go where
it sees a free way now. What it saw before stands in the conversation.

Read next: envs/babyai/actions.py.
"""

from collections import deque
from typing import Any, NamedTuple

from envs.babyai.world import FORWARD, LEFT, RIGHT, Level

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

    `cells` maps each visible (ahead, right) to minigrid's object there, None for empty floor, the
    agent's own cell included (an open door may be there). `objects` are all but walls.
    """

    def __init__(self, level: Level) -> None:
        self.carrying = level.env.carrying
        self._origin, self._direction = level.position, level.direction
        self.cells = self._visible(level.env.grid)
        self.objects = self._named()
        self.by_name = {seen.name: seen for seen in self.objects}
        self._reached: dict[Pose, tuple[Pose, int] | None] | None = None

    def absolute(self, pose: Pose) -> tuple[tuple[int, int], int]:
        """Position (x, y) and direction 0..3 in the full grid."""
        (x, y), (dx, dy) = self._origin, DIRECTIONS[self._direction]
        ahead, right, facing = pose
        position = (x + dx * ahead - dy * right, y + dy * ahead + dx * right)
        return position, (self._direction + facing) % 4

    def _visible(self, grid: Any) -> dict[Cell, Any]:
        width, height, things = grid.width, grid.height, grid.grid
        (x, y), (dx, dy) = self._origin, DIRECTIONS[self._direction]
        cells: dict[Cell, Any] = {}
        lit = [False] * SIZE  # of the row at hand; index HALF is straight ahead
        lit[HALF] = True
        for ahead in range(SIZE):
            row: list[Any] = []
            for right in range(-HALF, HALF + 1):
                i, j = x + dx * ahead - dy * right, y + dy * ahead + dx * right
                inside = 0 <= i < width and 0 <= j < height
                row.append(things[j * width + i] if inside else OUTSIDE)
            lit_next = [False] * SIZE
            for order, side in ((range(SIZE - 1), 1), (range(SIZE - 1, 0, -1), -1)):
                for k in order:
                    if lit[k] and (row[k] is None or row[k].see_behind()):
                        lit[k + side] = lit_next[k + side] = lit_next[k] = True
            for k in range(SIZE):
                if lit[k] and row[k] is not OUTSIDE:
                    cells[ahead, k - HALF] = row[k]
            lit = lit_next
        return cells

    def _named(self) -> list[Seen]:
        found = [
            (ahead + abs(right), ahead, right)
            for (ahead, right), thing in self.cells.items()
            if thing is not None and thing.type != "wall" and (ahead or right)
        ]
        counts: dict[str, int] = {}
        objects = []
        for _, ahead, right in sorted(found):
            thing = self.cells[ahead, right]
            kind = plain(thing)
            counts[kind] = counts.get(kind, 0) + 1
            position, _ = self.absolute((ahead, right, 0))
            objects.append(Seen(f"{kind} {counts[kind]}", thing, (ahead, right), position))
        return objects

    def reachable(self) -> dict[Pose, tuple[Pose, int] | None]:
        """Every pose that free cells in view lead to, nearest first, with the pose before it and
        the primitive action between the two (None for the pose now)."""
        if self._reached is None:
            self._reached = {(0, 0, 0): None}
            queue = deque(self._reached)
            while queue:
                pose = ahead, right, facing = queue.popleft()
                cell = (ahead + STEPS[facing][0], right + STEPS[facing][1])
                moves = [
                    (FORWARD, (*cell, facing)),
                    (LEFT, (ahead, right, (facing - 1) % 4)),
                    (RIGHT, (ahead, right, (facing + 1) % 4)),
                ]
                if cell not in self.cells or not is_free(self.cells[cell]):
                    del moves[0]
                for move, after in moves:
                    if after not in self._reached:
                        self._reached[after] = pose, move
                        queue.append(after)
        return self._reached

    def has_way(self, seen: Seen) -> bool:
        """Whether a free way leads to a cell beside the object."""
        reached = self.reachable()
        ahead, right = seen.cell
        return any((ahead - a, right - r, 0) in reached for a, r in STEPS)

    def way(self, seen: Seen) -> tuple[list[int], Pose] | None:
        """The fewest primitive actions to face the object, and the pose at their end; None if no
        free way is in view."""
        reached = self.reachable()
        ahead, right = seen.cell
        ends = {
            (ahead - a, right - r, facing)
            for facing, (a, r) in enumerate(STEPS)
            if (ahead - a, right - r, facing) in reached
        }
        if not ends:
            return None
        end = next(pose for pose in reached if pose in ends)  # breadth first: the nearest
        moves: list[int] = []
        step = reached[end]
        while step is not None:
            pose, move = step
            moves.append(move)
            step = reached[pose]
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
    """The whole level for people, a row of text for each row of cells, two letters a cell: kind
    (Wall, Key, bAll, Box, Door, Locked door, Open door), color (Red, Green, Blue, Purple, Yellow,
    grEy); the agent is an arrow, >> vv << or ^^.

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


class _Outside:
    """Beyond the grid; opaque as a wall."""

    type = "wall"

    @staticmethod
    def see_behind() -> bool:
        return False


OUTSIDE = _Outside()
