"""Environments, in which an agent acts, and their lists of tasks.

An environment gives the agent a task and a first observation, answers each action with the next
observation and a reward, and reports when the episode is over. It is a single class without a base
class. To write your own, copy `envs/textcraft/env.py`. `envs/common.py` has helpers that several
environments share, and `envs/server.py` serves any environment over HTTP. Each environment has a
folder:

    envs/NAME/__init__.py         exports the class as `World`
    envs/NAME/ids/NAME_*.json     id lists; NAME_train and NAME_test are the splits
    envs/NAME/requirements.txt    optional: extra packages, installed by `make setup ENV=NAME`

Your own environment can be anywhere on PYTHONPATH; its name is then `package.module:Class`. The
class has these members:

    PROMPT            messages before the first observation: [{"role": ..., "content": ...}]
    WIRE              a `Wire`: the field names that AgentGym uses for this environment over HTTP
    IS_FAST           True if no call waits or computes for longer than a millisecond
    num_tasks() -> number of tasks; their indices are 0 .. num_tasks() - 1       (static)
    reset(task_index, seed=0) -> observation
    step(action) -> observation, reward, terminated, truncated, info    (Gymnasium's order)
    available_actions() -> list of the actions that the current state accepts
    parse(model_text) -> action, a str; raises ParseError, whose message the policy reads  (static)
    say(thought, action) -> text from which parse reads exactly that action                (static)
    oracle() -> (thought, action), a good move from the current state
    subtask(task_index) -> name of the group that evaluation tables put the task in  (class)
    state_for_people() -> dict that the viewer shows beside an episode
    close()

`reward` is the reward of this turn. After every step, the rewards of an episode sum to 0..1, and
`info["success"]` tells whether the task is solved. Two more entries of `info` are optional:
"failed", if the action had no effect, so that later actions of the same turn are not played; and
"anchor", a short text that names the state, for --algorithm gigpo. A <think> ... </think> in the
policy's text is cut off before parse reads it. Optional members are the fields of `Settings`, in
capitals; NAME; TOOLS and RULES, which are the actions as functions and the rest of the prompt
(formats.py); the class methods open_shared() and close_shared(), for resources that all sessions
share; and the static method variant(), which returns a text with the options and simulator version
that affect what the agent reads. A trainer imports the class on a machine that may lack the
simulator, so import the simulator only where it is used.

    >>> tasks = load_tasks("textcraft", split="test", subtasks=("depth 1",))
    >>> len(tasks), tasks[-1]
    (31, Task(task_id='textcraft_30', task_index=30, subtask='depth 1', env='textcraft'))

Read next: envs/textcraft/env.py, then envs/server.py; tutorials/05_add_your_own_environment.md.
"""

import contextlib
import inspect
import json
import os
import re
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from string import Formatter
from typing import Any

import pydantic

from envs.http import encodable
from envs.wire import Wire as Wire
from run.errors import RunFailed
from run.files import read_text

VERSION = "0.1.0"
FIRST = ("textcraft", "babyai", "sciworld")  # tables list these first, then the others by name


def envs_in(folder: Path) -> dict[str, str]:
    """Map the name of each environment that has a folder in `folder` to "envs.NAME:World"."""
    names = sorted(path.parent.name for path in folder.glob("*/__init__.py"))
    names.sort(key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))
    return {name: f"envs.{name}:World" for name in names}


ENVS = envs_in(Path(__file__).parent)
REQUIRED = (
    *("PROMPT", "WIRE", "IS_FAST", "num_tasks", "reset", "step", "available_actions", "parse"),
    *("say", "oracle", "subtask", "state_for_people", "close"),
)


class ParseError(ValueError):
    """The policy's text does not contain an action. The policy reads this error's message."""


class ClassError(ValueError, RunFailed):
    """A method called on an environment's class, without an instance, fails or returns no text."""

    def __init__(self, env_class: Any, problem: str) -> None:
        self.env = f"environment {env_class.__module__}:{env_class.__name__}"
        rule = "envs/__init__.py says what it takes, returns and raises"
        self.problem = f"the class {problem}; {rule}"
        super().__init__(f"{self.env}: {self.problem}")


class TaskIndexError(IndexError):
    """reset() got a task index that the environment does not have."""


class NotResetError(RuntimeError):
    """step() or a method that reads the state was called before reset()."""


class EpisodeEndedError(RuntimeError):
    """step() was called after the end of the episode."""


class OracleLost(RuntimeError):
    """oracle() knows no good move from this state; the episode itself can continue."""


@dataclass(frozen=True)
class Task:
    """One task of an environment, with the names that id lists, trajectories and tables use."""

    task_id: str  # "textcraft_31"
    task_index: int  # 31
    subtask: str  # "depth 1"
    env: str = ""  # "textcraft"


@dataclass(frozen=True)
class Tool:
    """A kind of action as a function that the policy can call (formats.py).

    >>> tool = Tool("get", "get {count:d} {item}", "fetch an item", {"count": "", "item": ""})
    >>> tool.is_integer("count"), tool.is_integer("item")
    (True, False)
    """

    name: str
    template: str  # the action, as `parse` returns it; {x:d} is an integer, {x} a text
    about: str = ""  # what it does
    arguments: Mapping[str, str] = field(default_factory=dict)  # name -> what it means

    def is_integer(self, argument: str) -> bool:
        return f"{{{argument}:d}}" in self.template


@dataclass(frozen=True)
class Settings:
    """Optional members of an environment's class; the class names them in capitals (HORIZON)."""

    horizon: pydantic.PositiveInt = 30  # maximum turns of an episode in the paper's evaluation
    # Defaults of train.py's options that are specific to this environment, for --preset paper and
    # for --preset laptop (no GPU). "tasks" and "eval_tasks" name id lists of the environment.
    paper: Mapping[str, Any] = field(default_factory=dict)
    laptop: Mapping[str, Any] = field(default_factory=dict)
    package: str | None = None  # must be importable on the machine that runs the environment
    start_timeout_s: float = 60.0  # maximum time until its server listens
    id_prefixes: tuple[str, ...] = ()  # beginnings of its task ids; by default its name


def get_env(name: str) -> Any:
    """Import and return an environment's class. `name` is a key of ENVS or "package.module:Class".
    Raises ValueError if the class does not exist or lacks a member."""
    if not re.fullmatch(r"\w+(\.\w+)*:\w+", ENVS.get(name, name)):
        choices = ", ".join(sorted(ENVS))
        raise ValueError(
            f"unknown environment {name!r}; choose one of: {choices}; or give package.module:Class"
        )
    module_name, _, class_name = ENVS.get(name, name).partition(":")
    try:
        module = import_module(module_name)
    except (Exception, SystemExit) as error:  # a user's file can raise anything
        cause = f"{module_name} cannot be imported ({type(error).__name__}: {error})"
        is_absent = f"{module_name}.".startswith(f"{getattr(error, 'name', None)}.")
        hint = "; is its folder on PYTHONPATH?" if is_absent else ""
        raise ValueError(f"environment {name}: {cause}{hint}") from error
    env_class = getattr(module, class_name, None)
    if not inspect.isclass(env_class):
        raise ValueError(f"environment {name}: {module_name} has no class {class_name}")
    if problem := _problem_of_class(env_class):  # type: ignore[arg-type]
        raise ValueError(f"environment {name}: the class {problem}")
    return env_class


@cache
def _problem_of_class(env_class: Any) -> str | None:
    """Check a user's class without starting an episode; return the first problem, or None. Raises
    ClassError if parse, say, subtask or variant is the problem."""
    if missing := [name for name in REQUIRED if not hasattr(env_class, name)]:
        return f"lacks {', '.join(missing)}"
    if not isinstance(env_class.WIRE, Wire):
        return "has a WIRE that is not a Wire(); see envs/wire.py"
    if problem := problem_of_messages(env_class.PROMPT):
        return f"has an unusable PROMPT: {problem}"
    if problem := _problem_of_tools(env_class):
        return problem
    try:
        inspect.signature(env_class).bind()
        num_tasks = env_class.num_tasks()
    except (Exception, SystemExit) as error:
        problem = "fails in __init__ or num_tasks, which take no arguments"
        return f"{problem} ({error_line(error, env_class)})"
    if not isinstance(num_tasks, int) or num_tasks < 1:
        return f"returns {num_tasks!r:.40} from num_tasks(); expected an int above 0"
    call_static(env_class, "subtask", 0)
    call_static(env_class, "variant")
    for text in ("", "look", call_static(env_class, "say", "It may help.", "look")):
        with contextlib.suppress(ParseError):
            call_static(env_class, "parse", text)
    return None


def _problem_of_tools(env_class: Any) -> str | None:
    tools = getattr(env_class, "TOOLS", ())
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Tool) for tool in tools):
        return "has TOOLS that are not a list of Tool; envs.common.tool makes one"
    if tools and not isinstance(getattr(env_class, "RULES", None), str):
        return "has TOOLS but no RULES, the text of the prompt before the list of functions"
    for tool in tools:
        fields = [part for part in Formatter().parse(tool.template) if part[1]]
        if {name for _, name, _, _ in fields} != {*tool.arguments}:
            other = f"other arguments than {', '.join(tool.arguments) or 'none'}"
            return f"has the tool {tool.name}: {tool.template!r} needs {other}"
        if any(kind not in ("", "d") for _, _, kind, _ in fields):
            return f"has the tool {tool.name}: {tool.template!r} may use only {{x}} and {{x:d}}"
    return None


def call_static(env_class: Any, method: str, *arguments: Any) -> str:
    """Call parse, say, subtask or variant; returns its text, or "" if the class lacks it. Raises as
    `call_class` does, and ClassError if the method returns something else."""
    text = call_class(env_class, method, *arguments)
    if not isinstance(text, str):
        raise ClassError(env_class, f"returns {text!r:.60} from {method}()")
    return encodable(text)


def call_class(env_class: Any, method: str, *arguments: Any) -> Any:
    """Call a method without an instance; "" if the class lacks it. Raises the ParseError of parse,
    and ClassError if the method raises anything else."""
    try:
        return getattr(env_class, method, str)(*arguments)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if isinstance(error, ParseError) and method == "parse":
            raise ParseError(encodable(str(error))) from error
        problem = f"fails in {method}() ({error_line(error, env_class)})"
        raise ClassError(env_class, problem) from error


def error_line(error: BaseException, env_class: Any) -> str:
    """The error's type and message, and the line of the class's module that led to it."""
    module, trace = env_class.__module__, traceback.walk_tb(error.__traceback__)
    lines = [line for frame, line in trace if frame.f_globals.get("__name__") == module]
    where = f" at {module}, line {lines[-1]}" if lines else ""
    text = " ".join("".join(traceback.format_exception_only(error)).split())
    return text.removeprefix(f"{type(error).__module__}.") + where


def problem_of_messages(messages: Any) -> str | None:
    """Check the messages that precede the first observation; return the first problem, or None.

    >>> problem_of_messages([{"role": "system", "content": "Play."}])
    >>> problem_of_messages([{"role": "user", "content": "Play."}])[:47]
    'the roles are user; expected system, or user an'
    """
    expected = 'expected a list of {"role": ..., "content": ...}'
    if not isinstance(messages, list | tuple) or not messages:
        return f"{expected}, got {messages!r:.80}"
    for message in messages:
        fields = message if isinstance(message, Mapping) else {}
        if {key: type(part) for key, part in fields.items()} != {"role": str, "content": str}:
            return f"{expected}, got {message!r:.80}"
        if message["content"] != encodable(message["content"]):
            return f"{message!r:.80} holds half of a surrogate pair"
    roles = [message["role"] for message in messages]
    turns = roles[1:] if roles[0] == "system" else roles
    if turns == ["user", "assistant"] * (len(turns) // 2):
        return None
    return (
        f"the roles are {', '.join(roles)}; expected system, or user and assistant in turn, "
        "because the first observation follows as a user message"
    )


def names_of(env: str) -> list[str]:
    """The environments of a run: "textcraft+babyai" names two."""
    return env.split("+")


def env_name(env: str) -> str:
    """The short name of `env` in task ids, file names and tables: its key in ENVS. A class outside
    the repository uses its NAME, or by default the class name in lower case."""
    if env in ENVS:
        return env
    if "+" in env:
        return "+".join(map(env_name, names_of(env)))
    env_class = get_env(env)
    return getattr(env_class, "NAME", env_class.__name__.lower())


def variant_of(env: str) -> str:
    """The options and simulator version that affect what the agent reads; "" by default."""
    return call_static(get_env(env), "variant")


def settings_of(env: str) -> Settings:
    """The settings that the class of `env` defines, with defaults for the rest. ValueError if one
    has the wrong type."""
    env_class = get_env(env)
    numbers = {
        name: getattr(env_class, name.upper())
        for name in Settings.__dataclass_fields__
        if hasattr(env_class, name.upper())
    }
    try:
        values = {"id_prefixes": (env_name(env),)} | numbers
        return pydantic.TypeAdapter(Settings).validate_python(values)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        name, value = str(first["loc"][0]).upper(), first["input"]
        raise ValueError(f"environment {env}: {name} {value!r:.60}: {first['msg']}") from error


def ids_dir(env: str) -> Path:
    """The folder with the id lists of `env`: `ids/` beside the file of its class."""
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
    """The tasks of an id list, in its order; without a list, all tasks of `env`.

    Lists have the format of AgentGym-RL's data set, `[{"item_id": "textcraft_31"}, ...]`.

    Args:
        split: name of one of the environment's id lists ("train", "test", ...).
        file: path of any id list, or the name of one of the environment's lists; give this or
            `split`.
        subtasks: keep only tasks of these sub-tasks.

    Raises ValueError for an unknown environment, split or sub-task; for a file that is missing, is
    not an id list, lists a task twice, or lists a task that does not exist; and if no task is
    selected.
    """
    env_class, name = get_env(env), env_name(env)
    path = _id_list(env, split, file)
    prefixes, num_tasks = settings_of(env).id_prefixes, env_class.num_tasks()
    prefix = prefixes[0]
    ids = _read_ids(path, prefix) if path else [f"{prefix}_{index}" for index in range(num_tasks)]
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
            raise ValueError(f"{path}: {task_id!r} is listed twice; list each task once")
        tasks[index] = Task(task_id, index, call_static(env_class, "subtask", index), name)
    indices = range(num_tasks) if subtasks else ()
    subtasks_of_env = {call_static(env_class, "subtask", index) for index in indices}
    for subtask in subtasks:
        if subtask not in subtasks_of_env:
            choices = ", ".join(sorted(subtasks_of_env))
            raise ValueError(f"unknown sub-task {subtask!r} of {name}; choose from: {choices}")
    selection = [task for task in tasks.values() if not subtasks or task.subtask in subtasks]
    if not selection:
        problem = f"none of its {len(tasks)} tasks is in the sub-tasks {list(subtasks)}"
        raise ValueError(f"no task left: {path or name}: {problem if tasks else 'it has no tasks'}")
    return selection


def tasks_by_env(tasks: Sequence[Task]) -> dict[str, list[Task]]:
    """Group tasks by environment, in the order in which the environments first appear."""
    by_env: dict[str, list[Task]] = {}
    for task in tasks:
        by_env.setdefault(task.env, []).append(task)
    return by_env


def name_of_list(env: str, file: str) -> str:
    """A name of an id list that is valid in any working directory: its short name if it is one of
    the environment's lists, otherwise its absolute path. ValueError if the file does not exist."""
    path = Path(os.path.abspath(_id_list(env, None, file) or file))
    return next((name for name, list_path in id_lists(env).items() if list_path == path), str(path))


def _id_list(env: str, split: str | None, file: str | Path | None) -> Path | None:
    """The path of the id list that `split` or `file` names; None (all tasks) if neither is set."""
    if split is not None and file is not None:
        raise ValueError(f"got split {split!r} and file {str(file)!r}; give one of the two")
    lists, name = id_lists(env), env_name(env)
    choices = ", ".join(lists) or "none"
    if split is not None and split not in lists:
        path = ids_dir(env) / f"{name}_{split}.json"
        raise ValueError(f"{name} has no split {split!r} ({path}); choose from: {choices}")
    if file is None:
        return None if split is None else lists[split]
    path = Path(file)
    if not path.exists() and path.parent.name in ("", "ids"):  # also "ids/" of another checkout
        path = lists.get(path.name.removesuffix(".json").removeprefix(f"{name}_"), path)
    if not path.exists():
        problem = f"cannot read the id list {path.absolute()}: no such file"
        raise ValueError(f"{problem}; lists of {name}: {choices}")
    return path


def _read_ids(path: Path, prefix: str) -> list[str]:
    """The item_id strings of an id list; other keys of an entry are ignored."""
    expected = f'expected [{{"item_id": "{prefix}_0"}}, ...]'
    text = read_text(path)
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON ({error}); {expected}") from error
    if not isinstance(entries, list) or not all(
        isinstance(entry, dict) and isinstance(entry.get("item_id"), str) for entry in entries
    ):
        raise ValueError(f"{path} is not an id list; {expected}")
    return [entry["item_id"] for entry in entries]
