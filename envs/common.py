"""What the text environments share: where an episode stands, the line that holds an action.

These are small things to use, not a frame to fit into. Read next: envs/textcraft/env.py.
"""

import argparse
import re
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from envs import EpisodeEndedError, NotResetError, ParseError, TaskIndexError


class Stage:
    """Where a session stands: before the first reset, in an episode, after its end."""

    def __init__(self) -> None:
        self.has_episode = False
        self.ended = False

    def begin(self) -> None:
        self.has_episode, self.ended = True, False

    def end(self) -> None:
        self.ended = True

    def require_episode(self) -> None:
        if not self.has_episode:
            raise NotResetError("no episode has been started; call reset(task_index) first")

    def require_running(self) -> None:
        self.require_episode()
        if self.ended:
            raise EpisodeEndedError("this episode is over; call reset(task_index) to play again")


def require_task(env_class: Any, task_index: int) -> None:
    last = env_class.num_tasks() - 1
    if not 0 <= task_index <= last:
        name = env_class.__name__
        raise TaskIndexError(f"task index {task_index} does not exist; {name} has 0 to {last}")


ANSWER = "Answer in exactly two lines:\nThought: why\nAction: one action"  # read by action_line


def action_line(model_text: str, drop: str = "", trim: tuple[str, str] = ("", "")) -> str:
    """The action of the one 'Action:' line; ParseError if there is not exactly one, or it is empty.
    Removes what matches `drop`, squeezes blanks, strips the characters of `trim` from both ends.

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


def say(thought: str, action: str) -> str:
    """What `action_line` reads the action from; without a thought its line alone.

    >>> action_line(say("It is near.", "get 2 oak log"))
    'get 2 oak log'
    >>> say("", "get 2 oak log")
    'Action: get 2 oak log'
    """
    return f"Thought: {thought}\nAction: {action}" if thought else f"Action: {action}"


def version_of(package: str) -> str:
    """The version of a package; "" where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def oracle_turns(env: Any, task_index: int, at_most: int) -> int:
    """Actions that the oracle needs to solve the task; at_most + 1 if it fails or needs more."""
    env.reset(task_index)
    for turn in range(1, at_most + 1):
        _, _, terminated, truncated, info = env.step(env.oracle()[1])
        if terminated or truncated:
            return turn if info["success"] else at_most + 1
    return at_most + 1


def play(env: Any, task_index: int, seed: int) -> None:
    """An episode in the terminal; an empty line asks the oracle, ? what can be done."""
    print("\n\n".join(message["content"] for message in env.PROMPT))
    print("\n(An empty line lets the oracle play, ? lists what can be done, Ctrl-D ends.)\n")
    print(env.reset(task_index, seed))
    ended, total = False, 0.0
    while not ended:
        action = input("> ").strip()
        if action == "?":
            print("\n".join(env.available_actions()))
            continue
        if not action:
            thought, action = env.oracle()
            print(f"{thought}\n> {action}")
        observation, reward, terminated, truncated, _ = env.step(action)
        ended, total = terminated or truncated, total + reward
        print(observation)
    print(f"return {total:g}")


def command_line(env_class: Any, name: str, task_index: int) -> None:
    """`python -m envs.NAME`: play `task_index` in the terminal."""
    last = env_class.num_tasks() - 1
    parser = argparse.ArgumentParser(
        prog=f"python -m envs.{name}", description=f"Play {env_class.__name__}."
    )
    parser.add_argument(
        "--task-index", type=int, default=task_index, help=f"0 to {last} (default: {task_index})"
    )
    parser.add_argument("--seed", type=int, default=0, help="what a task leaves open (default: 0)")
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
