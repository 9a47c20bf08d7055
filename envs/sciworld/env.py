"""SciWorld: elementary-school science experiments in a house of ten places, in plain text.

The agent reads a task ("Your task is to boil water ...") and solves it by walking, looking, picking
things up, pouring, heating and connecting. ScienceWorld (https://arxiv.org/abs/2203.07540)
simulates temperature, states of matter, circuits, mixtures, plants, animals and inheritance.

Description: There are 30 kinds of task with 7,207 variations. Each variation also exists in
    ScienceWorld's easy mode (list: envs/sciworld/tasks.py). The simulator is the Java program of
    the PyPI package `scienceworld`; many sessions share a few Java processes
    (envs/sciworld/jvm.py).
Action Space: The actions listed in PROMPT below; in an easy task also "teleport to PLACE". "wait"
    lets ten units of time pass, "wait1" one. The name of an object can include its place ("orange
    in bowl"). If a name fits several objects, the observation lists them with numbers, and the next
    action is a number. "reset task" has no effect; otherwise the agent could earn the same progress
    twice.
Observation Space: The first observation is the task in one line, followed by the room. Each later
    observation is the result of the action.
Rewards: ScienceWorld scores progress from 0 to 100. The reward is the increase over the highest
    score so far, divided by 100. Focusing on the wrong object scores -100: the reward is 0 and the
    episode is over. info["score"] is ScienceWorld's score; info["success"] is true if it is 100.
Episode End: Terminated when the task is done or has failed. Truncated after 100 actions, or after
    200 in Matter (boil, melt, ...) and in the kinds of task that AgentGym leaves out.
Arguments: reset(task_index, seed=0). The variation determines the start. The seed determines later
    random events (how bees move). The same (task_index, seed, actions) gives the same observations.
Id Lists: ids/sciworld_*.json, written once by envs/sciworld/__main__.py at commit 7b8c4ed. They
    respect ScienceWorld's split (tasks.py).
    test, train                 200 and 2,120 tasks, as in AgentGym-RL; `test` also has its number
                                of tasks per topic. Within a topic, each kind of task gets a number
                                of tasks proportional to its variations, and at least one.
                                AgentGym-RL's choice of variations is not published, so we drew them
                                with a fixed seed.
    short_test, short_train     a curriculum for a laptop: easy tasks that the oracle solves within
                                6 actions, the same number of each kind. The kinds are finding a
                                living thing, a non-living thing, a plant or an animal, and
                                comparing life spans.

Differences from AgentGym's server, whose results are therefore not comparable: its limit counts the
simulator's moves (ten for "wait", none for looking around), so tasks that need slow freezing cannot
be solved there. Its reward for focusing on the wrong object is -100.

    env = SciWorld()
    print(env.reset(task_index=2936))     # find a living thing
    thought, action = env.oracle()        # 'open door to ...'
    observation, reward, terminated, truncated, info = env.step(action)

Read next: envs/sciworld/jvm.py, then envs/sciworld/tasks.py.
"""

import json
import random
import re
import tempfile
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

import envs.sciworld.jvm as jvm
from envs import Wire
from envs.common import ANSWER, Stage, action_line, require_task, say, tool, version_of
from envs.sciworld.jvm import Seat, shared_pool
from envs.sciworld.oracle import EXHAUSTED, Play, rewrite, thought
from envs.sciworld.tasks import NUM_TASKS, find_task, is_easy, max_actions, topic


class ScienceWorldWire(Wire):
    """AgentGym's SciWorld server gives up to 100 points and sends the task in a separate field."""

    title = "ScienceWorld"
    index_default = None
    shows_task_at_create = False
    has_score = True
    points = 100
    paths = {
        "/step_visual": ("STEP", "visual"),
        "/action_hint": ("GET", "action_hint"),
        "/goals": ("GET", "goals"),
        "/task_description": ("GET", "task_description"),
        "/object_tree": ("GET", "object_tree"),
    }

    def reset(self, session_id: int, turn: dict, task_index: int) -> Any:
        kind, variation = find_task(task_index)
        description, _, observation = turn["observation"].partition("\n")
        return {
            self.session_field: session_id,
            **self.step(turn),
            "task_name": kind.name,
            "var_num": variation,
            "task_description": description,
            "observation": observation,
            "deleted": False,
        }

    def first_observation(self, answer: Any) -> Any:
        if not isinstance(answer, dict) or "task_description" not in answer:
            return super().first_observation(answer)
        return f"{answer['task_description']}\n{answer.get('observation')}"


MAX_CHARACTERS = 1000  # of an action
# The simulator drops articles, and Java's trim() control characters: "the reset task" resets.
RESET = re.compile(r"(?:[\s\x00-\x1f]|(?:an?|the)\b)*reset\b", re.IGNORECASE)
NOT_UNDERSTOOD = "No known action matches that input."  # the simulator's answer
VERBS = (
    "look at, look in, examine, read, open, close, pick up, put down, drop, mix, activate, "
    "deactivate, disconnect, eat, flush, focus on"
).split(", ")
SEEN = "as you see it"
NO_RESTART = "This world cannot be reset; go on with the task."
TELEPORT_HINT = "You can also: teleport to PLACE"


class SciWorld:
    """One ScienceWorld session; see the module docstring."""

    PROMPT: ClassVar = [
        {
            "role": "system",
            "content": "You do science tasks in a house. Each turn is one action:\n"
            "look around, look at OBJ, look in OBJ, read OBJ\n"
            "open OBJ, close OBJ, go to PLACE\n"
            "pick up OBJ, put down OBJ, move OBJ to OBJ\n"
            "pour OBJ into OBJ, dunk OBJ into OBJ, mix OBJ\n"
            "activate OBJ, deactivate OBJ, use OBJ on OBJ\n"
            "connect OBJ to OBJ, disconnect OBJ\n"
            "eat OBJ, flush OBJ, wait, wait1, inventory, task\n"
            "focus on OBJ: only on what the task says; a wrong focus fails the task\n"
            "Open a door before you go through it. If you are asked which object you mean, the "
            "action is its number.\n" + ANSWER,
        }
    ]
    RULES = (
        "You do science tasks in a house. Open a door before you go through it. If you are asked "
        "which object you mean, choose its number. Focus only on what the task says; a wrong "
        "focus fails the task."
    )
    TOOLS = (
        *map(tool, ("look around", "wait", "wait1", "inventory", "task")),
        *(tool(f"{verb} {{object}}", meaning=SEEN) for verb in VERBS),
        tool("move {object} to {other}", meaning=SEEN),
        tool("pour {object} into {other}", meaning=SEEN),
        tool("dunk {object} into {other}", meaning=SEEN),
        tool("use {object} on {other}", meaning=SEEN),
        tool("connect {object} to {other}", meaning=SEEN),
        tool("pour {object} in {other}", "the same as pour", SEEN, name="pour_in"),
        tool("use {object}", meaning=SEEN, name="use_alone"),
        tool("go to {place}", meaning=SEEN),
        tool("teleport to {place}", "only if you are told that you can", SEEN),
        tool("{number:d}", meaning="of the object that you mean", name="choose"),
    )
    WIRE = ScienceWorldWire()
    IS_FAST = False
    HORIZON = 30
    PACKAGE = "scienceworld"
    PAPER: ClassVar = {
        "tasks_per_step": 16,
        "max_tokens_per_turn": 200,
        "max_trajectory_tokens": 9216,
    }
    LAPTOP: ClassVar = {
        "tasks": "short_train",
        "eval_tasks": "short_test",
        "rounds": (8,),
        "group_size": 4,
        "mini_batch_size": 32,
        "steps": 40,
        "max_trajectory_tokens": 3072,
        "eval_samples": 2,
    }

    say = staticmethod(say)

    def __init__(self) -> None:
        self._stage = Stage()
        self._seat: Seat | None = None

    @staticmethod
    def num_tasks() -> int:
        return NUM_TASKS

    subtask = staticmethod(topic)

    @staticmethod
    def variant() -> str:
        return f"scienceworld {version_of('scienceworld')}"

    @staticmethod
    def open_shared() -> None:
        """Start a Java process, so that a server without Java fails at startup."""
        shared_pool().seat().release()

    close_shared = staticmethod(jvm.close_shared_pool)

    def reset(self, task_index: int, seed: int = 0) -> str:
        """Start an episode and return the first observation. Raises JvmLost if the Java process
        fails; the next reset uses another one."""
        require_task(type(self), task_index)
        self._stage = Stage()  # if an error occurs below, the session has no episode
        if self._seat is not None and self._seat.is_lost:
            self.close()
        if self._seat is None:
            self._seat = shared_pool().seat()
        self._task_index, self._seed = task_index, seed
        self._kind, self._variation = find_task(task_index)
        self._actions: list[str] = []
        self._path: list[str] | None = None
        self._score = self._best_score = 0
        description, room = self._seat.call(jvm.load, *self._task, seed=self._java_seed(0))
        self._description = " ".join(description.split())
        hint = f"\n{TELEPORT_HINT}" if is_easy(task_index) else ""
        self._observation = room
        self._stage.begin()
        return f"{self._description}\n{room}{hint}"

    @property
    def _task(self) -> tuple[str, int, str]:
        """The arguments of ScienceWorld's load(). The easy mode removes the actions on circuits;
        that part of it is switched off in tasks about electricity."""
        simplifications = jvm.EASY if is_easy(self._task_index) else ""
        if self._kind.topic == "Electricity":
            simplifications = simplifications.replace("noElectricalAction,", "")
        return self._kind.name, self._variation, simplifications

    def _java_seed(self, num_actions: int) -> int:
        """The seed for a call into Java, from the task, the seed and the number of past actions."""
        name = f"sciworld {self._task_index} {self._seed} {num_actions}"
        return random.Random(name).getrandbits(48)

    def _java(self) -> Seat:
        self._stage.require_episode()
        assert self._seat is not None  # every episode has a seat
        return self._seat

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """Play one action; return observation, reward, terminated, truncated, info."""
        self._stage.require_running()
        action = action.encode("utf-8", "replace").decode()
        score, completed = self._score, False
        if RESET.match(action):
            self._observation = NO_RESTART
        elif len(action) > MAX_CHARACTERS:
            self._observation = NOT_UNDERSTOOD
        else:
            java_seed = self._java_seed(len(self._actions))
            outcome = self._java().call(jvm.play, action, seed=java_seed)
            self._observation, score, completed = outcome
        self._actions.append(action)
        gain = max(0, score - self._best_score)
        self._best_score += gain
        self._score = score
        terminated = completed or score < 0
        truncated = not terminated and len(self._actions) >= max_actions(self._task_index)
        if terminated or truncated:
            self._stage.end()
        info = {"success": score >= 100, "score": score}
        if self._observation in (NOT_UNDERSTOOD, NO_RESTART):
            info["failed"] = True
        return self._observation, gain / 100, terminated, truncated, info

    @staticmethod
    def parse(model_text: str) -> str:
        """The action on the 'Action:' line, without surrounding quotes or a full stop."""
        return action_line(model_text, trim=("\"'`*", "\"'`*."))

    def available_actions(self) -> list[str]:
        """The few hundred actions that name at most one object; thousands more name two. If the
        simulator asks for a number, returns the numbers to choose from."""
        java = self._java()
        if numbers := re.findall(r"^(\d+):\t", self._observation, re.MULTILINE):
            return numbers
        return java.call(jvm.possible_actions)

    def oracle(self) -> tuple[str, str]:
        """A thought and the next action of ScienceWorld's solution, rewritten with the names that
        the observations use (envs/sciworld/oracle.py).

        The first call generates the solution in a second simulator, which takes 0.1 to 10 seconds.
        The oracle skips actions of the solution that have been played. It does not plan again: if
        other actions have changed the environment, the remaining ones may not reach the goal. After
        the last action it looks around. ScienceWorld's solutions fail for freeze 11 and 19, and in
        the easy mode for most variations of grow-fruit and some of melt."""
        self._stage.require_running()
        path = self._solution()
        position = 0
        for action in self._actions:
            position += position < len(path) and action == path[position]
        if position == len(path):
            return EXHAUSTED, "look around"
        return thought(path, position), path[position]

    def _solution(self) -> list[str]:
        if self._path is None:
            seat = shared_pool().seat()
            try:
                path = seat.call(jvm.solution, *self._task, seed=self._java_seed(0))

                def start() -> tuple[str, Play]:
                    """Start the task again, with the same random events as in this episode."""
                    load, act, turn = jvm.load, jvm.play, count()
                    text = "\n".join(seat.call(load, *self._task, seed=self._java_seed(0)))
                    return text, lambda a: seat.call(act, a, seed=self._java_seed(next(turn)))

                limit = max_actions(self._task_index)
                self._path = rewrite(path, start, limit, is_easy(self._task_index))
            finally:
                seat.release()
        return self._path

    def state_for_people(self) -> dict:
        """Task, progress, room, inventory and a tree of all objects, for display."""
        room, inventory, moves = self._java().call(jvm.surroundings)
        report = self.goals()["goals"]
        goals = re.findall(r"^\d+\t(true|false)\t[^\t]*\t(.*)$", report, re.MULTILINE)
        return {
            "goal": self._description,
            "task": self._kind.name,
            "variation": self._variation,
            "subtask": self._kind.topic,
            "score": self._score,
            "success": self._score >= 100,
            "goals": [{"done": flag == "true", "goal": goal} for flag, goal in goals],
            "look": room,
            "inventory": inventory,
            "num_turns": len(self._actions),
            "moves": moves,
            "objects": jvm.names_in(self.object_tree()["object_tree"]),
        }

    # The following methods answer the additional paths of AgentGym's server.

    def visual(self) -> dict:
        """The object tree, the inventory and the simulator's count of moves."""
        _, inventory, moves = self._java().call(jvm.surroundings)
        return self.object_tree() | {"inventory": inventory, "moves": moves}

    def action_hint(self) -> dict:
        """Templates of actions, and the names of the objects in the room."""
        templates = json.loads(self._java().call(lambda sim: sim.getPossibleActionsWithIDs()))
        actions = sorted(template["action_example"] for template in templates)
        objects = self._java().call(lambda sim: jvm.strings(sim.getPossibleObjects()))
        return {
            "possible_actions": [action for action in actions if action != "reset task"],
            "possible_objects": objects,
        }

    def goals(self) -> dict:
        """ScienceWorld's report on the progress towards the goal."""
        return {"goals": self._java().call(lambda sim: sim.getGoalProgressStr())}

    def task_description(self) -> dict:
        self._java()
        return {"task_description": self._description}

    def object_tree(self) -> dict:
        """All objects with all their properties: 150 kB of JSON."""
        with tempfile.TemporaryDirectory() as folder:  # Java writes the tree to a file
            if error := self._java().call(lambda sim: sim.getObjectTree(folder)):
                raise RuntimeError(f"ScienceWorld failed to write the object tree: {error}")
            text = (Path(folder) / "objectTree.json").read_text(encoding="utf-8")
        return {"object_tree": json.loads(text)}

    def close(self) -> None:
        """Free this session's memory in Java; a later reset takes a new seat."""
        self._stage = Stage()
        seat, self._seat = self._seat, None
        if seat is not None:
            seat.release()
