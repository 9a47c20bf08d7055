"""What an environment's answers are called on the wire: the field names of AgentGym's servers.

AgentGym's servers each chose names of their own, and clients depend on them. A `Wire` is the one
place that knows them: our server answers with it and our client reads with it, so each also works
with AgentGym's other half. An environment overrides what differs:

>>> class SearchWire(Wire):
...     session_field, index_field = "env_idx", "id"
>>> SearchWire().reset(3, {"observation": "Who?"}, task_index=0)
{'env_idx': 3, 'observation': 'Who?'}

Read next: envs/server.py.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

TOLERANCE = 1e-6  # of sums of increments: a hundred times 1/100 is not exactly 1


class Outcome(NamedTuple):
    """What an answer of /step says, in Gymnasium's order but for the observation."""

    reward: float  # an increment of 0..1
    terminated: bool
    truncated: bool
    info: dict[str, Any]  # "success", "score", and what the server added


class Wire:
    """Field names and answers of one environment, by default TextCraft's.

    `turn` is the dict {"observation", "reward", "done", "terminated", "truncated", "info",
    "subtask"} of the latest reset or step.
    """

    title = ""  # what AgentGym's servers call themselves
    session_field = "id"
    index_field = "data_idx"
    index_default: int | None = 0  # None: /reset must name a task
    create_body: Mapping[str, Any] = {}  # what our client sends to /create
    shows_task_at_create = False  # /create already answers with an observation
    has_score = False  # /reset and /step also answer the environment's own score, info["score"]
    points = 1  # what the wire calls a full return; SciWorld counts to 100
    solved_from = 1.0  # AgentGym's servers do not say "solved": an end with this return or more
    # More paths: /name -> (GET or POST, the env's method that answers), or (STEP, a method whose
    # dict is added to the answer of a step).
    paths: Mapping[str, tuple[str, str]] = {}
    pays_once = False  # AgentGym's server may play on after the mission is done and paid for

    def root(self) -> Any:
        return f"This is environment {self.title}." if self.title else "This is an environment."

    def create(self, session_id: int, turn: dict | None) -> Any:
        shown = {key: turn[key] for key in ("observation", "done", "reward")} if turn else {}
        return {self.session_field: session_id, **shown}

    def reset(self, session_id: int, turn: dict, task_index: int) -> Any:
        return {self.session_field: session_id, **self.step(turn)}

    def step(self, turn: dict) -> Any:
        return turn | {"score": turn["info"]["score"]} if self.has_score else turn

    def observation(self, turn: dict) -> Any:
        return turn["observation"]

    def close(self, closed: bool) -> Any:
        return closed

    def to_points(self, reward: float) -> float:
        """An increment of 0..1 as the wire shows it; whole numbers as int."""
        points = round(reward * self.points, 9)
        return int(points) if points == int(points) else points

    def first_observation(self, answer: Any) -> Any:
        """What the policy reads first, from the answer of /reset; some answer with a bare text."""
        return answer.get("observation") if isinstance(answer, dict) else answer

    def outcome(self, answer: Mapping[str, Any], earned: float) -> Outcome:
        """What the answer of /step says, of our server or AgentGym's.

        Args:
            earned: sum of the episode's rewards before this step.

        Raises ValueError where a field is missing, has another type, or is out of range: these
        numbers are trained on.
        """
        reward = _number(answer, "reward") / self.points
        if "terminated" not in answer and self.has_score:
            # AgentGym's score may fall to -100, or be reset and earned again: count what is above
            # the sum so far.
            reward = max(0.0, min(1.0, _number(answer, "score") / self.points) - earned)
        score = earned + reward
        if not -TOLERANCE <= score <= 1 + TOLERANCE:
            raise ValueError(f"rewards that sum to 0..1, with this one they sum to {score:g}")
        truncated = _flag(answer, "truncated") if "truncated" in answer else False
        if "terminated" in answer:
            terminated = _flag(answer, "terminated")
        else:
            terminated = _flag(answer, "done") and not truncated
            terminated |= self.pays_once and reward > 0
        # AgentGym's answers hold no info.
        info = {"success": terminated and score > self.solved_from - 1e-9, "score": score}
        if isinstance(answer.get("info"), Mapping):
            info |= answer["info"]
        _flag(info, "success")
        return Outcome(reward, terminated, truncated, info)


def _number(answer: Mapping[str, Any], name: str) -> float:
    value = answer.get(name)
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e9:
        return float(value)
    raise ValueError(f"a finite number {name!r}")


def _flag(answer: Mapping[str, Any], name: str) -> bool:
    value = answer.get(name)
    if not isinstance(value, bool):
        raise ValueError(f"a field {name!r} that is true or false")
    return value
