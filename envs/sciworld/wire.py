"""SciWorld on the wire: what AgentGym's server of this world calls things, and how it counts.

    here       increments of 0..1                 the task is the observation's first line
    the wire   points, 100 are a full return      task_description is a field of its own

Both directions are needed: our server answers AgentGym's clients, our client plays on AgentGym's
servers, whose score of -100 for a wrong focus is an increment of 0 here.

Read next: envs/sciworld/env.py.
"""

from typing import Any

from envs import Wire
from envs.sciworld.tasks import find_task


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
