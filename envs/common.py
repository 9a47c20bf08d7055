"""Helpers for text environments: track a session's stage, parse actions, play in a terminal.

An environment does not have to use any of them. Read next: envs/textcraft/env.py.
"""

import argparse
import re
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from envs import EpisodeEndedError, NotResetError, ParseError, TaskIndexError, Tool, call_static


class Stage:
    """The stage of a session: before its first reset, in an episode, or after the episode's end."""

    def __init__(self) -> None:
        self.has_episode = False
        self.is_over = False

    def begin(self) -> None:
        self.has_episode, self.is_over = True, False

    def end(self) -> None:
        self.is_over = True

    def require_episode(self) -> None:
        if not self.has_episode:
            raise NotResetError("no episode has been started; call reset(task_index) first")

    def require_running(self) -> None:
        self.require_episode()
        if self.is_over:
            raise EpisodeEndedError("this episode is over; call reset(task_index) to play again")


def require_task(env_class: Any, task_index: int) -> None:
    last = env_class.num_tasks() - 1
    if not 0 <= task_index <= last:
        name = env_class.__name__
        raise TaskIndexError(f"task index {task_index} does not exist; {name} has 0 to {last}")


ANSWER = "Answer in exactly two lines:\nThought: why\nAction: one action"  # read by action_line


def action_line(model_text: str, drop: str = "", trim: tuple[str, str] = ("", "")) -> str:
    """Return the action on the text's only 'Action:' line. Removes every match of `drop`, reduces
    each run of whitespace to one space, and strips the characters in `trim` from the left and right
    end. Raises ParseError if there is not exactly one such line, or if its action is empty.

    >>> action_line("Thought: why not\\nAction:  get 2  oak log.", drop="[^a-z0-9, ]")
    'get 2 oak log'
    """
    lines = re.findall(r"Action:\s*(.*?)(?=\n|$)", model_text, re.DOTALL)
    if len(lines) > 1:
        raise ParseError(f"Got {len(lines)} 'Action:' lines, expected one. Give one action.")
    text = re.sub(drop, "", lines[0]) if lines and drop else "".join(lines)
    before, after = trim
    action = " ".join(text.split()).lstrip(before + " ").rstrip(after + " ")
    if not action:
        raise ParseError("No action found. End your answer with a line 'Action: ...'.")
    return action


def action_in(env_class: Any, model_text: str) -> str:
    """The action that the environment's parse reads in the policy's text. Raises ParseError, and
    ClassError if parse breaks its rules."""
    return call_static(env_class, "parse", without_thought(model_text))


# A mark before a thought, or one behind it, which matches a group.
THOUGHT_MARK = re.compile(
    r"(?i)<(/)?(?:seed:)?(?:think|thinking|thought|reasoning)>|\[(/)?THINK]|◁(/)?think▷"
    r"|<\|(?:begin|(end))_of_thought\|>|<\|(?:START|(END))_THINKING\|>"
    r"|<\|channel>thought|(<channel\|>)|<\|channel\|>(?:analysis|(final))<\|message\|>"
)


def without_thought(model_text: str) -> str:
    """The text after the policy's thought, which reasoning models write as <think> ... </think> or
    between other marks. Raises ParseError if the thought does not end.

    >>> without_thought("<think>Action: fly? No.</think>\\nAction: go")
    '\\nAction: go'
    """
    *_, last = [None, *THOUGHT_MARK.finditer(model_text)]
    if last and not last.lastindex:
        raise ParseError("Your thought does not end. Write </think> and then the action.")
    return model_text[last.end() :] if last else model_text


def say(thought: str, action: str) -> str:
    """Write a thought and an action as text that `action_line` reads; an empty thought is omitted.

    >>> action_line(say("It is near.", "get 2 oak log"))
    'get 2 oak log'
    >>> say("", "get 2 oak log")
    'Action: get 2 oak log'
    """
    return f"Thought: {thought}\nAction: {action}" if thought else f"Action: {action}"


def tool(template: str, about: str = "", meaning: str = "", name: str = "") -> Tool:
    """A Tool whose arguments all have this meaning; by default it has the name of the action.

    >>> tool("go to {place}", meaning="as you see it")
    Tool(name='go_to', template='go to {place}', about='', arguments={'place': 'as you see it'})
    """
    arguments = dict.fromkeys(re.findall(r"\{(\w+)", template), meaning)
    return Tool(name or template.partition(" {")[0].replace(" ", "_"), template, about, arguments)


def version_of(package: str) -> str:
    """The version of a package; "" if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def play(env: Any, task_index: int, seed: int) -> None:
    """Play an episode in the terminal. An empty line plays the oracle's action; ? lists actions."""
    print("\n\n".join(message["content"] for message in env.PROMPT))
    print("\n(Enter plays the oracle's action, ? lists the available actions, Ctrl-D quits.)\n")
    print(env.reset(task_index, seed))
    is_over, total = False, 0.0
    while not is_over:
        action = input("> ").strip()
        if action == "?":
            print("\n".join(env.available_actions()))
            continue
        if not action:
            thought, action = env.oracle()
            print(f"{thought}\n> {action}")
        observation, reward, terminated, truncated, _ = env.step(action)
        is_over, total = terminated or truncated, total + reward
        print(observation)
    print(f"return {total:g}")


def command_line(env_class: Any, package: str, task_index: int) -> None:
    """`python -m PACKAGE`: play one task in the terminal, by default `task_index`."""
    last = env_class.num_tasks() - 1
    parser = argparse.ArgumentParser(
        prog=f"python -m {package}",
        description=f"Play a {env_class.__name__} task in the terminal.",
    )
    parser.add_argument(
        "--task-index",
        type=int,
        default=task_index,
        help=f"task to play, 0 to {last} (default: {task_index})",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="random seed of the episode (default: 0)"
    )
    arguments = parser.parse_args()
    env = env_class()
    try:
        play(env, arguments.task_index, arguments.seed)
    except TaskIndexError as error:
        parser.error(str(error))
    except (ModuleNotFoundError, RuntimeError) as error:  # no simulator, no Java, a lost oracle
        parser.exit(1, f"{parser.prog}: {error}\n")
    except (EOFError, KeyboardInterrupt):
        print()
    finally:
        env.close()
        getattr(env_class, "close_shared", lambda: None)()
