"""The field names and answers of each environment over HTTP, as in AgentGym's servers.

Each of AgentGym's servers uses different field names, and clients depend on them. A `Wire` holds
the names for one environment. Our server uses it to write answers and our client to read them, so
our server works with AgentGym's clients and our client with AgentGym's servers. An environment
overrides the members that differ:

>>> class SearchWire(Wire):
...     session_field, index_field = "env_idx", "id"
>>> SearchWire().reset(3, {"observation": "Who?"}, task_index=0)
{'env_idx': 3, 'observation': 'Who?'}

Read next: envs/server.py.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

TOLERANCE = 1e-6  # rounding error of summed rewards: 1/100 added a hundred times is not exactly 1
CLIENT_KEYS = ("parse_error", "rejected")  # of info: only our client writes them, for invalid texts


class Outcome(NamedTuple):
    """The result of /step without the observation, in Gymnasium's order."""

    reward: float  # an increment of 0..1
    terminated: bool
    truncated: bool
    info: dict[str, Any]  # "success", "score", and what the server adds, except CLIENT_KEYS


class Wire:
    """Field names and answers of one environment; the defaults are TextCraft's.

    `turn` is a dict with the result of the latest reset or step: {"observation", "reward", "done",
    "terminated", "truncated", "info", "subtask"}.
    """

    title = ""  # name of AgentGym's server, in its answer to GET /
    session_field = "id"
    index_field = "data_idx"
    index_default: int | None = 0  # None: /reset must name a task
    create_body: Mapping[str, Any] = {}  # the body that our client sends to /create
    shows_task_at_create = False  # the answer of /create already holds an observation
    has_score = False  # the answers of /reset and /step also hold info["score"], as "score"
    points = 1  # the maximum return over HTTP; 100 in SciWorld
    min_success_return = 1.0  # AgentGym does not report success, so we infer it from the return
    # Additional paths: /name -> (GET or POST, the method of the environment that answers), or
    # (STEP, a method that returns a dict, which is added to the answer of a step).
    paths: Mapping[str, tuple[str, str]] = {}
    list_path = ""  # GET this path to list the numbers of the open sessions
    first_from_observation = False  # our client reads the first observation from GET /observation
    first_reward_ends = False  # our client ends an episode on AgentGym's server at its first reward

    def root(self) -> Any:
        return f"This is environment {self.title}." if self.title else "This is an environment."

    def create(self, session_id: int, turn: dict | None) -> Any:
        task = {key: turn[key] for key in ("observation", "done", "reward")} if turn else {}
        return {self.session_field: session_id, **task}

    def reset(self, session_id: int, turn: dict, task_index: int) -> Any:
        return {self.session_field: session_id, **self.step(turn)}

    def step(self, turn: dict) -> Any:
        return turn | {"score": turn["info"]["score"]} if self.has_score else turn

    def observation(self, turn: dict) -> Any:
        return turn["observation"]

    def close(self, was_open: bool) -> Any:
        return was_open

    def was_open(self, answer: Any) -> bool:
        """Whether a session was open, from the answer of /close."""
        return answer is True

    def to_points(self, reward: float) -> float:
        """A reward of 0..1 in the points that HTTP answers use; a whole number becomes an int."""
        points = round(reward * self.points, 9)
        return int(points) if points == int(points) else points

    def first_observation(self, answer: Any) -> Any:
        """The first observation, from the answer of /reset; some answers are plain text. Raises
        ValueError as `outcome` does if the answer reports a failure."""
        return answer.get("observation") if isinstance(answer, dict) else answer

    def outcome(self, answer: Mapping[str, Any], past_return: float) -> Outcome:
        """Read an answer of /step from our server or from AgentGym's.

        Args:
            past_return: sum of the episode's rewards before this step.

        Raises ValueError if a field is missing, has the wrong type, or is out of range, because the
        policy is trained on these numbers. Its message completes "the answer should hold ...".
        """
        reward = _number(answer, "reward") / self.points
        if "terminated" not in answer and self.has_score:
            # AgentGym's score can fall to -100, or start again from 0. Count only the part that
            # exceeds the return so far.
            reward = max(0.0, min(1.0, _number(answer, "score") / self.points) - past_return)
        score = past_return + reward
        if not -TOLERANCE <= score <= 1 + TOLERANCE:
            hint = "; a penalty must not bring the sum below 0" if score < 0 else ""
            raise ValueError(f"rewards that sum to 0..1 after every step, not to {score:g}{hint}")
        truncated = _flag(answer, "truncated") if "truncated" in answer else False
        if "terminated" in answer:
            terminated = _flag(answer, "terminated")
        else:
            terminated = _flag(answer, "done") and not truncated
            terminated |= self.first_reward_ends and reward > 0
        # AgentGym's answers do not contain "info".
        info = {"success": terminated and score > self.min_success_return - 1e-9, "score": score}
        if isinstance(answer.get("info"), Mapping):
            info |= {k: v for k, v in answer["info"].items() if k not in CLIENT_KEYS}
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
