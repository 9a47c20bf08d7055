"""SearchQA on the wire: bare answers, where the other worlds' servers send objects.

    POST /create {"id": 0}                  -> 0, the session
    POST /reset  {"env_idx", "id"}          -> "...instructions... Question: ...?"
    POST /step   {"env_idx", "action"}      -> {"observation", "reward", "done", "info", ...}
    GET  /observation?env_idx=              -> the instructions and the question; after a step, what
                                               it was answered

AgentGym's client has no instructions of its own and reads them from /observation; ours has them in
the world's PROMPT, and takes the question alone as the first observation.

AgentGym's server answers a task that it lacks with 500, ours with 404; and there an episode never
ends with a wrong answer, so that `done` is true only of a right one.

Read next: envs/searchqa/env.py.
"""

import re
from typing import Any

from envs import Wire
from envs.searchqa.text import INSTRUCTIONS, QUESTION

_OURS = f"{INSTRUCTIONS}\n\n"
_OPENING = re.compile(rf"^\s*{QUESTION.strip()}", re.MULTILINE)


class SearchWire(Wire):
    """AgentGym's SearchQA server."""

    title = "SearchQA"
    session_field, index_field = "env_idx", "id"
    index_default = None
    shows_task_at_create = False
    create_body = {"id": 0}

    def root(self) -> Any:
        return "ok"

    def create(self, session_id: int, turn: dict | None) -> Any:
        return session_id

    def reset(self, session_id: int, turn: dict, task_index: int) -> Any:
        return self.observation(turn)

    def observation(self, turn: dict) -> Any:
        text = turn["observation"]
        return _OURS + text if text.startswith(QUESTION) else text

    def first_observation(self, answer: Any) -> Any:
        """The question; of AgentGym's prompt what follows the last line that "Question:" opens."""
        text = super().first_observation(answer)
        if not isinstance(text, str):
            return text
        if text.startswith(_OURS):
            return text.removeprefix(_OURS)
        *_, question = _OPENING.split(text)
        return f"{QUESTION}{question.strip()}" if question != text else text
