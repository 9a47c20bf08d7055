"""Environments: the worlds the agent acts in, one file each, and the lists of tasks.

An environment is one class with no base class; what it must have is the list below, and
`envs/textcraft/env.py` is the example to copy (`envs/common.py` holds what worlds share).
`envs/server.py` gives any such class HTTP and sessions, so adding a world is one file, one line in
`ENVS` and its id lists in `envs/ids/`.

    PROMPT            messages before the first observation: [{"role": ..., "content": ...}]
    WIRE              a `Wire`: the names that AgentGym's client of this world puts on the wire
    IS_FAST           True if no call waits or computes for longer than a millisecond
    num_tasks         tasks are numbered 0 .. num_tasks - 1
    reset(task_index, seed=0) -> observation
    step(action) -> observation, reward, terminated, truncated, info    (Gymnasium's order)
    available_actions() -> list of actions that the current state accepts
    parse(model_text) -> action, or ParseError with what to tell the policy      (static)
    oracle() -> (thought, action), a good move from the current state
    subtask(task_index) -> the name under which evaluation tables group the task  (class)
    state_for_people() -> dict, what a person wants to see while looking at an episode
    close()
    open_shared(), close_shared()    optional, of the class: what all sessions of a server use
    variant() -> str                 optional, of the class: options and simulator version, which
                                     decide the world's texts beside its source

Trainers import the class too, for its texts and numbers, on machines that lack what the world needs
to run: a module imports its simulator where it is used.

`reward` is the increment of this turn, the increments of an episode sum to 0..1, and
`info["success"]` says whether the task is solved (AgentGym-RL keeps the last score only, which
loses every earlier increment). Misuse has one named exception each, so that a server can answer
409 and 404 instead of guessing from a message.

Id lists have the format of AgentGym-RL's data set, `[{"item_id": "textcraft_31"}, ...]`: the
number after the last underscore is the task index.

    >>> tasks = load_tasks("textcraft", split="test", subtasks=("depth 1",))
    >>> len(tasks), tasks[-1]
    (31, Task(task_id='textcraft_30', task_index=30, subtask='depth 1'))

Read next: envs/textcraft/env.py, then envs/server.py.
"""

import inspect
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

VERSION = "0.1.0"
ENVS = {
    "textcraft": "envs.textcraft.env:TextCraft",
    "babyai": "envs.babyai.env:BabyAI",
    "sciworld": "envs.sciworld.env:SciWorld",
}


class ParseError(ValueError):
    """The policy's text holds no action; the message is shown to the policy."""


class TaskIndexError(IndexError):
    """reset() was given a task index that the environment does not have."""


class NotResetError(RuntimeError):
    """step() or a question about the state came before reset()."""


class EpisodeEndedError(RuntimeError):
    """step() came after the episode terminated."""


class OracleLost(RuntimeError):
    """oracle() knows no good move from here; the episode itself goes on."""


@dataclass(frozen=True)
class Task:
    """One task of an environment, as id lists, trajectories and tables name it."""

    task_id: str  # "textcraft_31"
    task_index: int  # 31
    subtask: str  # "depth 1"


class Wire:
    """The field names and answers of one AgentGym server; each method returns the JSON answer.

    `turn` is the dict {"observation", "reward", "done", "terminated", "truncated", "info",
    "subtask"} of the latest reset or step. The defaults are TextCraft's; another world overrides
    what differs (SearchQA names the session `env_idx` and the task `id`; BabyAI adds `score`).
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


def get_env(name: str) -> Any:
    """The environment class called `name`, imported only now.

    Raises:
        ValueError: `name` is not in ENVS.
    """
    if name not in ENVS:
        raise ValueError(f"unknown environment {name!r}; choose one of: {', '.join(sorted(ENVS))}")
    module, _, class_name = ENVS[name].partition(":")
    return getattr(import_module(module), class_name)


def ids_dir(env: str) -> Path:
    """Where the id lists of `env` are: `ids/` beside its class."""
    return Path(inspect.getfile(get_env(env))).parent / "ids"


def load_tasks(
    env: str,
    split: str | None = None,
    file: str | Path | None = None,
    subtasks: Sequence[str] = (),
) -> list[Task]:
    """The tasks of an id list, in its order; all tasks of `env` if no list is named.

    Arguments:
        env: name in ENVS.
        split: reads `envs/ids/<env>_<split>.json` ("train", "test", ...).
        file: reads this id list instead; excludes `split`.
        subtasks: keep only tasks of these sub-tasks.

    Raises:
        ValueError: unknown env, split or sub-task; a file that is missing, not an id list, or
            names a task twice or one the environment lacks; nothing left after filtering.
    """
    env_class = get_env(env)
    if split is not None and file is not None:
        raise ValueError(f"got split {split!r} and file {str(file)!r}; give one of the two")
    if split is not None:
        file = ids_dir(env) / f"{env}_{split}.json"
        if not file.exists():
            known = sorted(p.stem.removeprefix(env + "_") for p in file.parent.glob("*.json"))
            raise ValueError(f"{env} has no split {split!r}; choose one of: {', '.join(known)}")
    num_tasks = env_class.num_tasks()
    if file is None:
        ids = [f"{env}_{index}" for index in range(num_tasks)]
    else:
        ids = _read_ids(Path(file))
    tasks: dict[int, Task] = {}
    for task_id in ids:
        digits = task_id.rpartition("_")[2]
        if not (digits.isascii() and digits.isdigit() and int(digits) < num_tasks):
            raise ValueError(
                f"{file}: {task_id!r} is no task of {env}; "
                f"expected '{env}_N' with N below {num_tasks}"
            )
        if int(digits) in tasks:
            raise ValueError(f"{file}: {task_id!r} is listed twice; a task may appear once")
        tasks[int(digits)] = Task(task_id, int(digits), env_class.subtask(int(digits)))
    known_subtasks = sorted({env_class.subtask(index) for index in range(num_tasks)})
    for name in subtasks:
        if name not in known_subtasks:
            raise ValueError(
                f"unknown sub-task {name!r} of {env}; choose from: {', '.join(known_subtasks)}"
            )
    chosen = [task for task in tasks.values() if not subtasks or task.subtask in subtasks]
    if not chosen:
        raise ValueError(
            f"no task left: {file or env} holds {len(tasks)}, none of {list(subtasks)}"
        )
    return chosen


def _read_ids(path: Path) -> list[str]:
    """The item_id strings of an id list; further keys of an entry are ignored."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read the id list {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); expected {_ID_FORMAT}") from error
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) and isinstance(entry.get("item_id"), str) for entry in entries
    ):
        raise ValueError(f"{path} is not an id list; expected {_ID_FORMAT}")
    return [entry["item_id"] for entry in entries]


_ID_FORMAT = '[{"item_id": "textcraft_0"}, ...]'
