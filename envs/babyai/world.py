"""A level of BabyAI, one primitive action at a time: minigrid's world as the text world uses it.

minigrid knows seven primitive actions (turn left, turn right, forward, pick up, drop, toggle, done)
and a verifier that says after each of them whether the mission succeeded or failed. `Level` keeps
both and changes three things around them.

One verdict is corrected. "Open the red door, then open the blue door" asks its parts one after the
other: once the first succeeds, the second is asked *about the same action*. A strict part fails on
every door that is not its own, so the toggle that rightly opened the red door fails the blue part:
in OpenDoorsOrderN4Debug every mission of two parts ends as a failure at the first correct door.
Here a failure in the very action that fulfilled the first part is none:

    action       part 1      part 2      minigrid    here
    open red     success     failure     failure     goes on
    open grey    -           failure     failure     failure
    open blue    -           success     success     success

Two costs are saved. minigrid draws up the agent's 7 x 7 x 3 observation after every primitive
action; the text needs one view at the end of a macro action (envs/babyai/view.py), so that work is
switched off. And it prints a line whenever a level it drew is rejected, which would fill the log of
a server; that print is silenced.

A level is built anew for each episode (0.1 ms) instead of being reset: nothing can be inherited.

Read next: envs/babyai/view.py, what the agent sees of it.
"""

from typing import Any

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
    """One episode of level `number` (1..40) with this seed.

    `env` is minigrid's environment, to be read by everyone and changed by `act` alone. `history`
    holds the primitive actions so far: with number and seed they are the whole state.
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
        """Plays one primitive action; then `reward`, `terminated`, `truncated` are those of it."""
        was_done = self._first_part_is_done()
        _, reward, terminated, truncated, _ = self.env.step(primitive)
        if terminated and not reward and not was_done and self._first_part_is_done():
            terminated = False  # see the module docstring
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
    if isinstance(instruction, AfterInstr):
        order = [(instruction.b_done, instruction.instr_b), (False, instruction.instr_a)]
    elif isinstance(instruction, BeforeInstr):
        order = [(instruction.a_done, instruction.instr_a), (False, instruction.instr_b)]
    elif isinstance(instruction, AndInstr):
        order = [
            (instruction.a_done, instruction.instr_a),
            (instruction.b_done, instruction.instr_b),
        ]
    else:
        return [instruction]
    return [leaf for verdict, part in order if not _is_done(verdict) for leaf in parts_left(part)]
