"""Environments: what the agent acts in, a folder each, and the lists of tasks.

An environment is one class without a base class; `envs/textcraft/env.py` is the example to copy,
`envs/common.py` holds what several share, `envs/server.py` puts any of them behind HTTP. A folder:

    envs/NAME/__init__.py         exports the class as `World`
    envs/NAME/ids/NAME_*.json     id lists; NAME_train and NAME_test are the splits
    envs/NAME/requirements.txt    optional: packages that it alone needs, `make setup ENV=NAME`

or the same anywhere on PYTHONPATH, named `package.module:Class`. The class has:

    PROMPT            messages before the first observation: [{"role": ..., "content": ...}]
    WIRE              a `Wire`: the names that AgentGym's client of it puts on the wire
    IS_FAST           True if no call waits or computes for longer than a millisecond
    num_tasks() -> tasks are numbered 0 .. num_tasks() - 1       (static)
    reset(task_index, seed=0) -> observation
    step(action) -> observation, reward, terminated, truncated, info    (Gymnasium's order)
    available_actions() -> list of actions that the current state accepts
    parse(model_text) -> action, or ParseError with what to tell the policy      (static)
    say(thought, action) -> text that parse reads the action from                (static)
    oracle() -> (thought, action), a good move from the current state
    subtask(task_index) -> the name under which evaluation tables group the task  (class)
    state_for_people() -> dict, what a person wants to see while looking at an episode
    close()

`reward` is this turn's increment, an episode's increments sum to 0..1, and `info["success"]` says
whether the task is solved. Optional: the numbers of `Settings` in capitals; NAME; class methods
open_shared() and close_shared() for what all sessions share, and variant() -> options and simulator
version that change its texts. Trainers import the class too, on machines without the simulator:
import that where it is used.

    >>> tasks = load_tasks("textcraft", split="test", subtasks=("depth 1",))
    >>> len(tasks), tasks[-1]
    (31, Task(task_id='textcraft_30', task_index=30, subtask='depth 1', env='textcraft'))

Read next: envs/textcraft/env.py, then envs/server.py; tutorials/05_add_your_own_environment.md.
"""

import inspect
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from envs.wire import Wire as Wire

VERSION = "0.1.0"
FIRST = ("textcraft", "babyai", "sciworld")  # the order of tables; the others follow by name


def envs_in(folder: Path) -> dict[str, str]:
    """Name of each environment with a folder in there -> "envs.NAME:World"."""
    names = sorted(path.parent.name for path in folder.glob("*/__init__.py"))
    names.sort(key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))
    return {name: f"envs.{name}:World" for name in names}


ENVS = envs_in(Path(__file__).parent)
REQUIRED = (
    *("PROMPT", "WIRE", "IS_FAST", "num_tasks", "reset", "step", "available_actions", "parse"),
    *("say", "oracle", "subtask", "state_for_people", "close"),
)


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
    env: str = ""  # "textcraft"


@dataclass(frozen=True)
class Settings:
    """The numbers that an environment's class may hold, each under its name in capitals."""

    horizon: int = 30  # turns of an episode in the paper's evaluation
    # Options of train.py with other defaults here: in the paper's scripts; without a GPU, where
    # "tasks" and "eval_tasks" name id lists of this environment.
    paper: Mapping[str, Any] = field(default_factory=dict)
    laptop: Mapping[str, Any] = field(default_factory=dict)
    package: str | None = None  # what must be importable where the environment runs
    start_timeout_s: float = 60.0  # until its server must say that it listens
    id_prefixes: tuple[str, ...] = ()  # what its task ids begin with; by default its name


def get_env(name: str) -> Any:
    """The environment class called `name`, imported only now: a key of ENVS, or
    "package.module:Class". ValueError if there is none, or the class lacks something."""
    if name in ENVS:
        module_name, _, class_name = ENVS[name].partition(":")
        return getattr(import_module(module_name), class_name)
    if not re.fullmatch(r"\w+(\.\w+)*:\w+", name):
        known = ", ".join(sorted(ENVS))
        raise ValueError(
            f"unknown environment {name!r}; choose one of: {known}; or give package.module:Class"
        )
    module_name, _, class_name = name.partition(":")
    try:
        module = import_module(module_name)
    except Exception as error:  # a user's file may raise anything
        what = f"{module_name} cannot be imported ({type(error).__name__}: {error})"
        raise ValueError(f"environment {name}: {what}; is its folder on PYTHONPATH?") from error
    env_class = getattr(module, class_name, None)
    if not inspect.isclass(env_class):
        raise ValueError(f"environment {name}: {module_name} has no class {class_name}")
    if problem := _problem_of(env_class):  # type: ignore[arg-type]
        raise ValueError(f"environment {name}: the class {problem}")
    return env_class


@cache
def _problem_of(env_class: Any) -> str | None:
    """What a user's class lacks, as far as one can see without playing."""
    if missing := [name for name in REQUIRED if not hasattr(env_class, name)]:
        return f"lacks {', '.join(missing)}"
    if not isinstance(env_class.WIRE, Wire):
        return "has a WIRE that is not a Wire(); see envs/wire.py"
    if problem := problem_of_messages(env_class.PROMPT):
        return f"has an unusable PROMPT: {problem}"
    try:
        count, subtask = env_class.num_tasks(), env_class.subtask(0)
    except ImportError:
        return None  # the simulator, which a trainer may lack
    except Exception as error:
        return f"fails at num_tasks() or subtask(0), called on it ({type(error).__name__}: {error})"
    if not isinstance(count, int) or count < 1 or not isinstance(subtask, str):
        return f"has {count!r} tasks, the first of sub-task {subtask!r:.40}: a number and a text"
    return None


def problem_of_messages(messages: Any) -> str | None:
    """What is wrong with the messages before a first observation.

    >>> problem_of_messages([{"role": "system", "content": "Play."}])
    >>> problem_of_messages([{"role": "user", "content": "Play."}])[:47]
    'the roles are user; expected system, or user an'
    """
    for message in messages if isinstance(messages, list | tuple) and messages else [None]:
        fields = message if isinstance(message, Mapping) else {}
        if not all(isinstance(fields.get(key), str) for key in ("role", "content")):
            return f'expected a list of {{"role": ..., "content": ...}}, got {message!r:.80}'
    roles = [message["role"] for message in messages]
    turns = roles[1:] if roles[0] == "system" else roles
    if turns == ["user", "assistant"] * (len(turns) // 2):
        return None
    return (
        f"the roles are {', '.join(roles)}; expected system, or user and assistant in turn, "
        "since the first observation follows as a user's message"
    )


def names_of(env: str) -> list[str]:
    """The environments of a run: "textcraft+babyai" names two."""
    return env.split("+")


def env_name(env: str) -> str:
    """What task ids, file names and tables call `env`: its key in ENVS; for a class outside, its
    NAME, or the class's own name in lower case."""
    if env in ENVS:
        return env
    if "+" in env:
        return "+".join(map(env_name, names_of(env)))
    env_class = get_env(env)
    return getattr(env_class, "NAME", env_class.__name__.lower())


def variant_of(env: str) -> str:
    """The options and simulator version that its texts depend on, if the class says so."""
    return str(getattr(get_env(env), "variant", str)())


def settings_of(env: str) -> Settings:
    """What the class of `env` sets, with defaults for the rest."""
    env_class = get_env(env)
    numbers = {
        name: getattr(env_class, name.upper())
        for name in Settings.__dataclass_fields__
        if hasattr(env_class, name.upper())
    }
    return Settings(**{"id_prefixes": (env_name(env),)} | numbers)


def ids_dir(env: str) -> Path:
    """Where the id lists of `env` are: `ids/` beside its class."""
    return Path(inspect.getfile(get_env(env))).parent / "ids"


def id_lists(env: str) -> dict[str, Path]:
    """The id lists of `env` by name: "train" is NAME_train.json."""
    name = env_name(env)
    paths = sorted(ids_dir(env).glob(f"{name}_*.json"))
    return {path.stem.removeprefix(f"{name}_"): path for path in paths}


def load_tasks(
    env: str,
    split: str | None = None,
    file: str | Path | None = None,
    subtasks: Sequence[str] = (),
) -> list[Task]:
    """The tasks of an id list, in its order; all tasks of `env` if no list is named.

    Lists have the format of AgentGym-RL's data set, `[{"item_id": "textcraft_31"}, ...]`.

    Args:
        split: an id list of the environment ("train", "test", ...).
        file: any id list, or the name of one of the environment's; excludes `split`.
        subtasks: keep only tasks of these sub-tasks.

    Raises ValueError for an unknown env, split or sub-task; a file that is missing, is not an id
    list, or names a task twice or one that does not exist; nothing left after filtering.
    """
    env_class, name = get_env(env), env_name(env)
    path = _id_list(env, split, file)
    prefixes, num_tasks = settings_of(env).id_prefixes, env_class.num_tasks()
    ids = _read_ids(path) if path else [f"{prefixes[0]}_{index}" for index in range(num_tasks)]
    tasks: dict[int, Task] = {}
    for task_id in ids:
        match = re.fullmatch(r"(.*)_([0-9]{1,18})", task_id)
        if not match or match[1] not in prefixes or int(match[2]) >= num_tasks:
            expected = " or ".join(f"'{prefix}_N'" for prefix in prefixes)
            raise ValueError(
                f"{path}: {task_id!r} is not a task of {name}; expected {expected} "
                f"with N below {num_tasks}"
            )
        index = int(match[2])
        if index in tasks:
            raise ValueError(f"{path}: {task_id!r} is listed twice; a task may appear once")
        tasks[index] = Task(task_id, index, env_class.subtask(index), name)
    subtasks_of_env = {env_class.subtask(index) for index in range(num_tasks)} if subtasks else ()
    for subtask in subtasks:
        if subtask not in subtasks_of_env:
            choices = ", ".join(sorted(subtasks_of_env))
            raise ValueError(f"unknown sub-task {subtask!r} of {name}; choose from: {choices}")
    chosen = [task for task in tasks.values() if not subtasks or task.subtask in subtasks]
    if not chosen:
        raise ValueError(
            f"no task left: {path or name} holds {len(tasks)}, none of {list(subtasks)}"
        )
    return chosen


def tasks_by_env(tasks: Sequence[Task]) -> dict[str, list[Task]]:
    """Environment -> its tasks, in the order of their first ones."""
    by_env: dict[str, list[Task]] = {}
    for task in tasks:
        by_env.setdefault(task.env, []).append(task)
    return by_env


def name_of_list(env: str, file: str) -> str:
    """A name of the list that holds in every folder: its own if it is one of the environment's,
    otherwise the whole path. ValueError if there is no such file."""
    path = Path(os.path.abspath(_id_list(env, None, file) or file))
    return next((name for name, own in id_lists(env).items() if own == path), str(path))


def _id_list(env: str, split: str | None, file: str | Path | None) -> Path | None:
    """The path of the id list that is meant; None for all tasks."""
    if split is not None and file is not None:
        raise ValueError(f"got split {split!r} and file {str(file)!r}; give one of the two")
    lists, name = id_lists(env), env_name(env)
    known = ", ".join(lists) or "none"
    if split is not None and split not in lists:
        where = ids_dir(env) / f"{name}_{split}.json"
        raise ValueError(f"{name} has no split {split!r}, which would be {where}; it has: {known}")
    if file is None:
        return None if split is None else lists[split]
    path = Path(file)
    if not path.exists() and path.parent.name in ("", "ids"):  # also "ids/" of another checkout
        path = lists.get(path.name.removesuffix(".json").removeprefix(f"{name}_"), path)
    if not path.exists():
        what = f"cannot read the id list {path.absolute()}: no such file; lists of {name}: {known}"
        raise ValueError(what)
    return path


def _read_ids(path: Path) -> list[str]:
    """The item_id strings of an id list; further keys of an entry are ignored."""
    expected = 'expected [{"item_id": "textcraft_0"}, ...]'
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read the id list {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); {expected}") from error
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) and isinstance(entry.get("item_id"), str) for entry in entries
    ):
        raise ValueError(f"{path} is not an id list; {expected}")
    return [entry["item_id"] for entry in entries]
