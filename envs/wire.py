"""What a world's answers are called on the wire: the field names of AgentGym's servers.

AgentGym's server of each world chose names of its own, and clients depend on them. A `Wire` is the
one place that knows them: our server answers with it, our client reads with it, so each of the two
also works with AgentGym's other half. A world overrides what differs:

>>> class SearchWire(Wire):
...     session_field, index_field = "env_idx", "id"
>>> SearchWire().reset(3, {"observation": "Who?"}, task_index=0)
{'env_idx': 3, 'observation': 'Who?'}

Read next: envs/server.py.
"""

from collections.abc import Mapping
from typing import Any


class Wire:
    """The field names and answers of one world, TextCraft's by default; each method returns the
    JSON answer.

    `turn` is the dict {"observation", "reward", "done", "terminated", "truncated", "info",
    "subtask"} of the latest reset or step.
    """

    title = "TextCraft"
    session_field = "id"
    index_field = "data_idx"
    index_default: int | None = 0  # None: /reset must name a task
    shows_task_at_create = True  # /create already answers with an observation
    has_score = False  # /reset and /step also answer the world's own score, info["score"]
    points = 1  # what the wire calls a full return; SciWorld counts to 100
    solved_from = 1.0  # AgentGym's servers do not say "solved": an end with this return or more
    # More paths: /name -> (GET or POST, the env's method that answers), or (STEP, a method whose
    # dict is added to the answer of a step).
    paths: Mapping[str, tuple[str, str]] = {}
    pays_once = False  # AgentGym's server may play on after the mission is done and paid for

    def root(self) -> Any:
        return f"This is environment {self.title}."

    def create(self, session_id: int, turn: dict | None) -> Any:
        answer: dict[str, Any] = {self.session_field: session_id}
        if turn is not None:
            answer |= {key: turn[key] for key in ("observation", "done", "reward")}
        return answer

    def reset(self, session_id: int, turn: dict, task_index: int) -> Any:
        return {self.session_field: session_id, **self.step(turn)}

    def step(self, turn: dict) -> Any:
        return turn | {"score": turn["info"]["score"]} if self.has_score else turn

    def observation(self, turn: dict) -> Any:
        return turn["observation"]

    def close(self, closed: bool) -> Any:
        return closed

    def to_points(self, reward: float) -> float:
        """An increment (an episode's sum to 0..1) as the wire shows it; whole numbers as int."""
        points = round(reward * self.points, 9)
        return int(points) if points == int(points) else points

    def first_observation(self, answer: dict) -> Any:
        """What the policy reads first, from the answer of /reset."""
        return answer.get("observation")
