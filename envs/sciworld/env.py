"""SciWorld: do elementary-school science in a house of ten places, in plain text.

The agent reads a task ("Your task is to boil water ...") and walks, looks, picks up, pours, heats
and connects until it is done. ScienceWorld (https://arxiv.org/abs/2203.07540) simulates
temperature, states of matter, circuits, mixtures, plants, animals and inheritance.

Description: 30 kinds of task with 7,207 variations, each also in ScienceWorld's easy mode;
    envs/sciworld/tasks.py numbers them. The simulator is the Java program of the PyPI package
    `scienceworld`; many sessions share a few Java processes (envs/sciworld/jvm.py).
Action Space: the lines of PROMPT below; in an easy task also "teleport to PLACE". "wait" lets ten
    units of time pass, "wait1" one. An object may be named with where it is ("orange in bowl").
    Where a name fits several objects they are listed with numbers, and the number is the next
    action. "reset task", which would let progress be earned again, does nothing.
Observation Space: first the task in one line, then the room; after that what each action led to.
Rewards: ScienceWorld scores progress from 0 to 100. The reward is the increase over the highest
    score so far, divided by 100. A wrong focus scores -100: reward 0, and the episode is over.
    info["score"] is ScienceWorld's own; info["success"] says that it is 100.
Episode End: terminated when the task is done or has failed. Truncated after 100 actions; 200 for
    Matter (boil, melt, ...) and the kinds that AgentGym leaves out.
Arguments: reset(task_index, seed=0). The variation fixes the start; the seed decides what comes
    after it by chance (how bees wander). (task index, seed, actions) fix every text.
Id Lists: ids/sciworld_*.json, made once by the program of commit 7b8c4ed, __main__.py. They obey
    ScienceWorld's own split (tasks.py).
    test, train                 AgentGym-RL's sizes, 200 and 2,120, with its counts for each topic.
                                Which variations it took is not published; ours are drawn with a
                                fixed seed. Inside a topic each kind of task has its share.
    short_test, short_train     a curriculum for a laptop: easy tasks that the oracle solves within
                                6 actions, as many of each kind, of finding a living thing, a
                                non-living thing, a plant or an animal, and of comparing life spans.

Differences from AgentGym's server, whose numbers are therefore not the same: there the limit counts
simulator moves ("wait" makes ten, looking around none), so slow freezing cannot be solved; and a
wrong focus is a reward of -100.

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
from envs.common import ANSWER, Stage, action_line, require_task, say, version_of
from envs.sciworld.jvm import Seat, shared_pool
from envs.sciworld.oracle import EXHAUSTED, Play, retell, thought
from envs.sciworld.tasks import NUM_TASKS, find_task, is_easy, max_actions, topic


class ScienceWorldWire(Wire):
    """AgentGym's SciWorld server: points to 100, the task apart from the first observation."""

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
NOT_UNDERSTOOD = "No known action matches that input."  # the simulator's own words
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
        """A server without Java fails at its start, not at the first reset."""
        shared_pool().seat().release()

    close_shared = staticmethod(jvm.close_shared_pool)

    def reset(self, task_index: int, seed: int = 0) -> str:
        """Starts the episode and returns the first observation. JvmLost if the Java process
        failed; the next reset goes to another one."""
        require_task(type(self), task_index)
        self._stage = Stage()  # what fails below leaves no episode behind
        if self._seat is not None and self._seat.is_lost:
            self.close()
        if self._seat is None:
            self._seat = shared_pool().seat()
        self._task_index, self._seed = task_index, seed
        self._kind, self._variation = find_task(task_index)
        self._actions: list[str] = []
        self._path: list[str] | None = None
        self._score = self._best_score = 0
        description, room = self._seat.call(jvm.load, *self._task, seed=self._chance(0))
        self._description = " ".join(description.split())
        hint = f"\n{TELEPORT_HINT}" if is_easy(task_index) else ""
        self._observation = room
        self._stage.begin()
        return f"{self._description}\n{room}{hint}"

    @property
    def _task(self) -> tuple[str, int, str]:
        """What ScienceWorld's load() takes. Circuits cannot be built without their actions, so
        noElectricalAction is left out where they are the task."""
        simplified = jvm.EASY if is_easy(self._task_index) else ""
        if self._kind.topic == "Electricity":
            simplified = simplified.replace("noElectricalAction,", "")
        return self._kind.name, self._variation, simplified

    def _chance(self, num_actions: int) -> int:
        """The seed of a call into Java: fixed by task, seed and number of actions so far."""
        name = f"sciworld {self._task_index} {self._seed} {num_actions}"
        return random.Random(name).getrandbits(48)

    def _java(self) -> Seat:
        self._stage.require_episode()
        assert self._seat is not None  # an episode has one
        return self._seat

    def step(self, action: str) -> tuple[str, float, bool, bool, dict]:
        """Plays one action: observation, reward, terminated, truncated, info."""
        self._stage.require_running()
        action = action.encode("utf-8", "replace").decode()
        score, completed = self._score, False
        if re.match(r"\s*reset\b", action, re.IGNORECASE):
            self._observation = NO_RESTART
        elif len(action) > MAX_CHARACTERS:
            self._observation = NOT_UNDERSTOOD
        else:
            chance = self._chance(len(self._actions))
            outcome = self._java().call(jvm.play, action, seed=chance)
            self._observation, score, completed = outcome
        self._actions.append(action)
        gained = max(0, score - self._best_score)
        self._best_score += gained
        self._score = score
        terminated = completed or score < 0
        truncated = not terminated and len(self._actions) >= max_actions(self._task_index)
        if terminated or truncated:
            self._stage.end()
        info = {"success": score >= 100, "score": score}
        return self._observation, gained / 100, terminated, truncated, info

    @staticmethod
    def parse(model_text: str) -> str:
        """The action of the one 'Action:' line, without quotes around it or a full stop."""
        return action_line(model_text, trim=("\"'`*", "\"'`*."))

    def available_actions(self) -> list[str]:
        """Actions with at most one object, a few hundred; those with two would be thousands.
        Numbers, if one is asked for."""
        java = self._java()
        if numbers := re.findall(r"^(\d+):\t", self._observation, re.MULTILINE):
            return numbers
        return java.call(jvm.possible_actions)

    def oracle(self) -> tuple[str, str]:
        """A thought and the next action of a solution that ScienceWorld generates, retold in names
        that the observations use (envs/sciworld/oracle.py).

        The first call generates it in a second world, which takes 0.1 to 10 seconds. Actions of it
        that have been played are passed over. Nothing is planned anew: after other actions that
        change the world, the rest may not lead to the goal. When nothing is left the oracle looks
        around. ScienceWorld's own solutions fail for freeze 11 and 19, and in the easy mode for
        most variations of grow-fruit and some of melt."""
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
            guide = shared_pool().seat()
            try:
                path = guide.call(jvm.solution, *self._task, seed=self._chance(0))

                def start() -> tuple[str, Play]:
                    """The task from its beginning, with the chances that this episode has."""
                    begin, act, turn = jvm.load, jvm.play, count()
                    text = "\n".join(guide.call(begin, *self._task, seed=self._chance(0)))
                    return text, lambda a: guide.call(act, a, seed=self._chance(next(turn)))

                at_most = max_actions(self._task_index)
                self._path = retell(path, start, at_most, is_easy(self._task_index))
            finally:
                guide.release()
        return self._path

    def state_for_people(self) -> dict:
        """Task, progress, what is carried, what is seen, and a tree of all objects, for display."""
        seen, held, moves = self._java().call(jvm.surroundings)
        report = self.goals()["goals"]
        goals = re.findall(r"^\d+\t(true|false)\t[^\t]*\t(.*)$", report, re.MULTILINE)
        return {
            "goal": self._description,
            "task": self._kind.name,
            "variation": self._variation,
            "subtask": self._kind.topic,
            "score": self._score,
            "success": self._score >= 100,
            "goals": [{"done": done == "true", "goal": goal} for done, goal in goals],
            "look": seen,
            "inventory": held,
            "num_turns": len(self._actions),
            "moves": moves,
            "objects": jvm.names_in(self.object_tree()["object_tree"]),
        }

    # What AgentGym's further paths answer.

    def visual(self) -> dict:
        """The object tree, the inventory and the simulator's count of moves."""
        _, held, moves = self._java().call(jvm.surroundings)
        return self.object_tree() | {"inventory": held, "moves": moves}

    def action_hint(self) -> dict:
        """Templates of actions, and the objects here by name."""
        templates = json.loads(self._java().call(lambda world: world.getPossibleActionsWithIDs()))
        actions = sorted(template["action_example"] for template in templates)
        objects = self._java().call(lambda world: jvm.strings(world.getPossibleObjects()))
        return {
            "possible_actions": [action for action in actions if action != "reset task"],
            "possible_objects": objects,
        }

    def goals(self) -> dict:
        """ScienceWorld's own report on what has been done towards the goal."""
        return {"goals": self._java().call(lambda world: world.getGoalProgressStr())}

    def task_description(self) -> dict:
        self._java()
        return {"task_description": self._description}

    def object_tree(self) -> dict:
        """All objects with all that the simulator knows of them: 150 kB of JSON."""
        with tempfile.TemporaryDirectory() as folder:  # Java writes it to a file
            if error := self._java().call(lambda world: world.getObjectTree(folder)):
                raise RuntimeError(f"ScienceWorld gave no object tree: {error}")
            text = (Path(folder) / "objectTree.json").read_text(encoding="utf-8")
        return {"object_tree": json.loads(text)}

    def close(self) -> None:
        """Frees Java's memory of it; a later reset starts anew."""
        self._stage = Stage()
        seat, self._seat = self._seat, None
        if seat is not None:
            seat.release()
