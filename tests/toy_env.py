"""A world that a random model learns in a minute: write letters from the first half of the alphabet.

Description
    Two turns. A random text has about half of its letters in a..m, so that the very first step's
    returns already differ and every algorithm has something to compare.
Action Space
    Any text.
Observation Space
    A short sentence that names the turn.
Rewards
    For each turn half the share of a..m among the characters that are not blank, so that returns
    lie in 0..1.
Episode End
    Terminated after the second turn; success from a return of 0.9.
"""

import contextlib
import itertools
import threading
import time

import uvicorn

import envs
from envs import EpisodeEndedError, NotResetError, ParseError, TaskIndexError, Wire
from envs.server import create_app

NAME = "letters"
GOOD = frozenset("abcdefghijklm")


class Letters:
    PROMPT = [{"role": "system", "content": "Write letters."}]
    WIRE = Wire()
    IS_FAST = True
    NUM_TURNS = 2

    def __init__(self):
        self.turn = None

    @staticmethod
    def num_tasks():
        return 8

    @staticmethod
    def subtask(task_index):
        return "even" if task_index % 2 == 0 else "odd"

    def reset(self, task_index, seed=0):
        if not 0 <= task_index < self.num_tasks():
            raise TaskIndexError(f"task {task_index} does not exist; 0 to {self.num_tasks() - 1} do")
        self.task_index, self.turn, self.score = task_index, 0, 0.0
        return f"craft {task_index}"

    def step(self, action):
        self.require_running()
        self.turn += 1
        reward = share(action) / self.NUM_TURNS
        self.score += reward
        ended = self.turn == self.NUM_TURNS
        info = {"success": ended and self.score >= 0.9, "score": self.score}
        return f"get {self.turn}", reward, ended, False, info

    def require_running(self):
        if self.turn is None:
            raise NotResetError("reset() starts an episode")
        if self.turn == self.NUM_TURNS:
            raise EpisodeEndedError("the episode is over; reset() starts the next one")

    def available_actions(self):
        return ["a"]

    @staticmethod
    def parse(model_text):
        if not model_text.strip():
            raise ParseError("Write at least one letter.")
        return model_text

    def oracle(self):
        return "a is in the first half.", "abc"

    def state_for_people(self):
        return {"turn": self.turn, "score": self.score}

    def close(self):
        self.turn = None


class Mute(Letters):
    """The same world, in which nothing is ever rewarded."""

    def step(self, action):
        observation, _, terminated, truncated, _ = super().step(action)
        return observation, 0.0, terminated, truncated, {"success": False, "score": 0.0}


def share(text: str) -> float:
    """Share of a..m among the characters of `text` that are not blank."""
    characters = [c for c in text if not c.isspace()]
    return sum(c in GOOD for c in characters) / len(characters) if characters else 0.0


@contextlib.contextmanager
def registered(env_class=Letters):
    """`envs` knows the world as "letters" for as long as the block runs."""
    envs.ENVS[NAME] = f"{env_class.__module__}:{env_class.__name__}"
    try:
        yield NAME
    finally:
        del envs.ENVS[NAME]


@contextlib.contextmanager
def serve(env_class=Letters, middleware=None):
    """A real server of the world, in a thread of this process; yields its base_url.

    `middleware(request, call_next)` may answer in the app's place, to play a server that fails.
    """
    with registered(env_class):
        app = create_app(NAME, env_class=env_class)
        if middleware is not None:
            app.middleware("http")(middleware)
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", lifespan="on"))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        for _ in itertools.count():
            if server.started:
                break
            if not thread.is_alive():
                raise RuntimeError("the toy server did not start")
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(timeout=10)
