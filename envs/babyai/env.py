"""BabyAI: complete a mission in a grid of rooms with doors and keys, described in words.

The agent gets a mission such as "go to the red ball" or "put the green box next to a grey door
after you open the blue door". It sees only the seven by seven cells in front of it, so it has to
look around, find keys and clear its path.

Description: 40 levels of BabyAI (https://arxiv.org/abs/1810.08272), simulated by minigrid. They
    range from one room to nine rooms with locked doors; envs/babyai/levels.py lists them.
Action Space: turn left, turn right, move forward, toggle, drop, check available actions. Other
    actions walk as far as needed: go to OBJECT N, pickup OBJECT N, go through DOOR N, toggle and go
    through DOOR N (envs/babyai/world.py).
Observation Space: The first observation starts with the goal, later ones start with the result of
    the action. Then come the objects in view with their distances in steps, the walls, the carried
    object, and the list of actions that are possible now. After an impossible action the
    observation has only the reason and this list.
Rewards: 1 - 0.9 * steps / max_steps for the action that completes the mission, otherwise 0. `steps`
    counts minigrid's primitive actions; max_steps (16 to 2880) depends on the level. An impossible
    action does not count as a step.
Episode End: Terminated when the mission is completed or has failed (on a few levels, opening the
    wrong door or picking up the wrong object fails it). Truncated after max_steps primitive
    actions.
Arguments: reset(task_index, seed=0). The index determines the task; `seed` has no effect.
Id Lists: ids/babyai_*.json, written once by envs/babyai/__main__.py at commit 7b8c4ed.
    test, train                 90 and 810 tasks, as in AgentGym-RL: 18 levels with seeds 0 to 4
                                (test) or 5 to 49 (train). We inferred the levels from the published
                                counts (levels.py).
    simple_test, simple_train   a curriculum for a laptop: GoTo and Pickup tasks that the oracle
                                solves in 1, 2 or 3 turns, each equally often if a level has enough
                                of them. A test task shares neither its seed nor its first
                                observation with a training task.

Differences from AgentGym's server, whose results are therefore not comparable:
    Any positive return is a success; AgentGym's server ends an episode only after a reward above
    0.5. A walk stops when the mission is fulfilled; there, moves that follow can lose the reward.
    "go through" ends one cell further. Walks use only cells in view. Of objects at the same
    distance, the one less far ahead has the lower number; there, the one further ahead. Doors are
    named without their state. "then" and "after you" in a mission are shown; there, they read
    "and". We correct minigrid's wrong verdict on level 16. "toggle" also opens boxes, which level
    26 needs, and closes doors. We rewrote what the agent reads, with a third fewer words. Level 4
    is a 6 x 6 room, as its name says.

    >>> env = BabyAI()
    >>> print(env.reset(task_index=3))
    Your goal: go to the blue key
    You see: blue key 1 (2 ahead, 1 left).
    Walls: 4 ahead, 2 left, 3 right.
    You carry nothing.
    Available actions: ["turn left", "turn right", "move forward", "go to blue key 1", \
"pickup blue key 1", "check available actions"]
    >>> env.oracle()
    ('I see blue key 1, which is my goal, so I go to blue key 1.', 'go to blue key 1')
    >>> env.step("go to blue key 1")[:4]
    ('You go to blue key 1.\\nThe goal is reached.', 0.925, True, False)

Read next: envs/babyai/levels.py, then envs/babyai/world.py.
"""

import base64
import io
import json
from typing import Any, ClassVar

from envs import Wire
from envs.babyai.levels import LEVELS, NUM_SEEDS, SUBTASKS, level_and_seed
from envs.common import ANSWER, Stage, action_line, require_task, say, tool, version_of

MAX_ACTION_CHARS = 200  # a longer text is not an action


class BabyAIWire(Wire):
    """AgentGym's server adds a score and answers /observation with a dict."""

    title = "BabyAI"
    index_default = None
    shows_task_at_create = False
    has_score = True
    first_reward_ends = True  # its episodes continue after a reward of 0.5 or less
    min_success_return = 1e-6
    paths = {"/render": ("POST", "render")}

    def reset(self, session_id: int, turn: dict, task_index: int) -> Any:
        return super().reset(session_id, turn, task_index) | {"deleted": False}

    def observation(self, turn: dict) -> Any:
        answer = {key: turn[key] for key in ("observation", "reward", "done")}
        return answer | {"score": turn["info"]["score"], "deleted": False}


class BabyAI:
    """One BabyAI session; see the module docstring."""

    PROMPT: ClassVar = [
        {
            "role": "system",
            "content": "You move through rooms to reach a goal. Each turn is one action:\n"
            "turn left, turn right, move forward\n"
            "go to OBJECT N, pickup OBJECT N\n"
            "go through DOOR N, toggle and go through DOOR N\n"
            "toggle (a door or box ahead), drop, check available actions\n"
            "Name things as you see them, as in: go to red ball 1. You see only what is before "
            "you; a locked door needs the key of its color.\n" + ANSWER,
        }
    ]
    RULES = (
        "You move through rooms to reach a goal. Name things as you see them, as in: red ball 1. "
        "You see only what is before you; a locked door needs the key of its color."
    )
    TOOLS = (
        *map(tool, ("turn left", "turn right", "move forward", "drop", "check available actions")),
        tool("toggle", "open or close the door or box ahead"),
        tool("go to {thing}", meaning="as in: red ball 1"),
        tool("pickup {thing}", meaning="as in: red ball 1"),
        tool("go through {door}", meaning="as in: red door 1"),
        tool("toggle and go through {door}", meaning="as in: red door 1"),
    )
    WIRE = BabyAIWire()
    IS_FAST = False
    HORIZON = 20
    PACKAGE = "minigrid"
    PAPER: ClassVar = {
        "rounds": (6, 13, 20),
        "tasks_per_step": 32,
        "group_size": 4,
        "mini_batch_size": 32,
        "max_trajectory_tokens": 9216,
    }
    LAPTOP: ClassVar = {
        "tasks": "simple_train",
        "eval_tasks": "simple_test",
        "rounds": (5,),
        "group_size": 4,
        "mini_batch_size": 32,
        "max_trajectory_tokens": 2048,
        "eval_samples": 2,
    }

    say = staticmethod(say)

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._stage = Stage()
        self._level: Any = None  # envs.babyai.world.Level, not imported here as it needs minigrid
        self._view: Any = None
        self._oracle: Any = None
        self._actions: list[str] = []
        self._turns: list[int] = []  # primitive actions before each turn
        self._score = 0.0

    @staticmethod
    def num_tasks() -> int:
        return len(LEVELS) * NUM_SEEDS

    @staticmethod
    def subtask(task_index: int) -> str:
        return SUBTASKS[task_index % len(SUBTASKS)]

    @staticmethod
    def variant() -> str:
        return f"minigrid {version_of('minigrid')}"

    @staticmethod
    def open_shared() -> None:
        """Import minigrid, so that a server without minigrid fails at startup."""
        import envs.babyai.world  # noqa: F401

    def reset(self, task_index: int, seed: int = 0) -> str:
        """Start an episode and return the first observation."""
        require_task(type(self), task_index)
        from envs.babyai.world import Level

        self._forget()
        self._level = Level(*level_and_seed(task_index))
        self._stage.begin()
        return f"Your goal: {self._level.mission}\n{self._look()}"

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """Play one action; return observation, reward, terminated, truncated, info."""
        self._stage.require_running()
        from envs.babyai.world import CHECK, Impossible, perform

        level = self._level
        action = " ".join(action.lower().split()) if len(action) <= MAX_ACTION_CHARS else "too long"
        self._turns.append(len(level.history))
        reward, is_over, failed = 0.0, False, {}
        if action == CHECK:
            observation = self._actions_line()
        else:
            try:
                result = perform(level, self._view, action)
            except Impossible as reason:
                observation = f"Not possible: {reason}.\n{self._actions_line()}"
                failed = {"failed": True}
            else:
                reward, is_over = level.reward, level.is_over
                observation = f"{result}\n{self._end_line() if is_over else self._look()}"
        if is_over:
            self._stage.end()
            self._actions = []
        self._score += reward
        info = {"success": reward > 0, "score": self._score, "anchor": level.state} | failed
        return observation, reward, is_over and level.terminated, is_over and level.truncated, info

    def _look(self) -> str:
        from envs.babyai.world import View, available

        self._view = View(self._level)
        self._actions = available(self._level, self._view)
        return f"{self._view.words()}\n{self._actions_line()}"

    def _actions_line(self) -> str:
        return f"Available actions: {json.dumps(self._actions)}"

    def _end_line(self) -> str:
        if self._level.reward > 0:
            return "The goal is reached."
        if self._level.terminated:
            return "The goal can no longer be reached."
        return f"All {self._level.env.max_steps} steps are used up."

    @staticmethod
    def parse(model_text: str) -> str:
        """The action on the 'Action:' line: only lower case, digits, commas and single spaces."""
        return action_line(model_text, drop="[^A-Za-z0-9, ]").lower()

    def available_actions(self) -> list[str]:
        self._stage.require_episode()
        return list(self._actions)

    def oracle(self) -> tuple[str, str]:
        """A thought and a text action that makes progress on the plan of minigrid's bot."""
        self._stage.require_running()
        from envs.babyai.oracle import Oracle

        if self._oracle is None:
            self._oracle = Oracle(self._level)
        return self._oracle.move(self._view, self._turns)

    def state_for_people(self) -> dict:
        """Mission, grid, position of the agent and progress, for display."""
        from envs.babyai.world import grid_rows

        self._stage.require_episode()
        level = self._level
        carrying = level.env.carrying
        return {
            "level": level.name,
            "level_seed": level.seed,
            "mission": level.mission,
            "carrying": f"{carrying.color} {carrying.type}" if carrying else None,
            "position": list(level.position),
            "direction": ("right", "down", "left", "up")[level.direction],
            "steps": len(level.history),
            "max_steps": int(level.env.max_steps),
            "grid": grid_rows(level),
            "available_actions": list(self._actions),
            "score": self._score,
            "success": self._score > 0,
        }

    def render(self) -> str:
        """The level as a PNG in a data URL, with 32 pixels per cell; cells in view are lighter."""
        self._stage.require_episode()
        from PIL import Image

        frame = self._level.env.get_frame(highlight=True, tile_size=32)  # (height, width, 3) uint8
        file = io.BytesIO()
        Image.fromarray(frame).save(file, format="PNG")
        return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode("ascii")

    def close(self) -> None:
        self._forget()
