"""A toy environment that a random model learns in a minute: write letters of the alphabet's first
half.

An episode has two turns of any text. A turn's reward is half the share of a..m among its non-blank
characters; a return of 0.9 is success. Random text earns about 0.5 with some variance, so every
algorithm gets a signal from the first step on.
"""

import contextlib
import json
import threading
import time
from pathlib import Path
from unittest import mock

import uvicorn
from starlette.middleware.base import BaseHTTPMiddleware

import envs
from envs import ParseError, Wire
from envs.common import require_task, say
from envs.server import create_app

NAME = "letters"
GOOD = frozenset("abcdefghijklm")


class Letters:
    PROMPT = [{"role": "system", "content": "Write letters."}]
    WIRE = Wire()
    IS_FAST = True
    NUM_TURNS = 2
    say = staticmethod(say)

    @staticmethod
    def num_tasks():
        return 8

    @staticmethod
    def subtask(task_index):
        return "even" if task_index % 2 == 0 else "odd"

    def reset(self, task_index, seed=0):
        require_task(type(self), task_index)
        self.task_index, self.turn, self.score = task_index, 0, 0.0
        return f"craft {task_index}"

    def step(self, action):
        self.turn += 1
        reward = share(action) / self.NUM_TURNS
        self.score += reward
        is_over = self.turn == self.NUM_TURNS
        info = {"success": is_over and self.score >= 0.9, "score": self.score}
        return f"get {self.turn}", reward, is_over, False, info

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
        pass


class NoReward(Letters):
    """Letters without any reward."""

    def step(self, action):
        observation, _, terminated, truncated, _ = super().step(action)
        return observation, 0.0, terminated, truncated, {"success": False, "score": 0.0}


class OracleLetters(Letters):
    """Letters whose oracle can be imitated: its text is only the action."""

    NAME = NAME
    LESSONS = "abc cab ilk gem had lab dim beg fade jade elf mica".split()

    @staticmethod
    def say(thought, action):
        return action

    def oracle(self):
        index = 2 * self.task_index + self.turn
        return "All of it is in the first half.", self.LESSONS[index % len(self.LESSONS)]


def share(text: str) -> float:
    """The share of a..m among the non-blank characters of `text`."""
    characters = [c for c in text if not c.isspace()]
    return sum(c in GOOD for c in characters) / len(characters) if characters else 0.0


@contextlib.contextmanager
def registered(env_class=Letters, name=NAME):
    """Register the environment under `name` for the length of a block."""
    with mock.patch.dict(envs.ENVS, {name: f"{env_class.__module__}:{env_class.__name__}"}):
        yield name


@contextlib.contextmanager
def serve(env_class=Letters, middleware=None, name=NAME):
    """Run a real server of the environment in a thread of this process; yields its base_url.

    `middleware(request, call_next)` can answer instead of the app, to simulate a failing server.
    """
    with registered(env_class, name):
        app = create_app(name, env_class=env_class)
        if middleware is not None:
            app.add_middleware(BaseHTTPMiddleware, dispatch=middleware)
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", lifespan="on"))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started:
            if not thread.is_alive():
                raise RuntimeError("the toy server did not start")
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(timeout=10)


def write_ids(path, num_tasks=8):
    """Write an id list of the first tasks; returns its path as text."""
    path.write_text(json.dumps([{"item_id": f"{NAME}_{i}"} for i in range(num_tasks)]))
    return str(path)


def options(tmp_path, url, **changes):
    """Options of train.py for a run of seconds: `tiny`, short turns, few trajectories."""
    ids = write_ids(tmp_path / "ids.json")
    return {
        "env": NAME,
        "tasks": ids,
        "eval_tasks": ids,
        "env_addr": (url,),
        "model": "tiny",
        "warm_start": "never",
        "engine": "transformers",
        "rounds": (2,),
        "steps": 2,
        "tasks_per_step": 2,
        "group_size": 2,
        "max_tokens_per_turn": 4,
        "max_trajectory_tokens": 128,
        "eval_every": 0,
        "save_every": 1,
        "run_dir": str(tmp_path / "run"),
    } | changes


def flags(**values):
    """Options as command-line arguments."""
    arguments = []
    for name, value in values.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(flag if value else flag.replace("--", "--no-", 1))
        elif isinstance(value, (tuple, list)):
            arguments += [flag, *map(str, value)]
        else:
            arguments += [flag, str(value)]
    return arguments


@contextlib.contextmanager
def fresh_process_state():
    """Restore the state that accelerate and torch set only once per process."""
    import torch
    from accelerate.state import AcceleratorState

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    AcceleratorState._reset_state(reset_partial_state=True)
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(threads)


def train_main(argv):
    """Run `train.py ARGV` in this process; returns the exit code."""
    import train

    with fresh_process_state():
        try:
            return train.command_line(argv)
        except SystemExit as stop:
            return stop.code


def saved_tensors(run_dir, step, part="policy"):
    """{"model": {name: tensor}, "optimizer": ...} of a checkpoint, assembled by torch's tool."""
    import tempfile

    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    from run import checkpoint

    folder = checkpoint.folder_of(Path(run_dir), step) / "trainer_state" / part
    with tempfile.NamedTemporaryFile() as file:
        dcp_to_torch_save(folder, file.name)
        return torch.load(file.name, weights_only=False)


def read_metrics(run_dir):
    lines = (Path(run_dir) / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]
