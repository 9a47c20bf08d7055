"""Live environments: play an episode by hand, or play a recorded one again.

An environment is served as in training, by `python -m envs.server` on this machine, started when it
is first needed. An episode played by hand becomes a trajectory without tokens, like that of a model
behind a chat server. To re-enact a trajectory, its actions are sent to a fresh session: in a
deterministic environment each observation must equal the recorded one, and the states, which runs
seldom record, are there to draw.

Read next: server.py.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envclient import AllServersDown, EnvClient, EnvError, EnvPool, local_server
from envs import ENVS, get_env, load_tasks
from run.files import make_folder
from trajectory import Trajectory, Turn
from viewer.trajectories import opening_of, split_action, task_of, turns_of

if TYPE_CHECKING:
    from sampling.chatapi import ChatApi

MAX_SESSIONS = 32  # at a time; beyond it the oldest is closed
MAX_TURNS = 1_000  # of an episode played by hand
MODEL_TOKENS = 512  # of a model's answer


class PlayError(RuntimeError):
    """This cannot be played; the message says why."""


@contextlib.contextmanager
def play_errors() -> Any:
    """An environment's errors as PlayError."""
    try:
        yield
    except AllServersDown as error:
        raise PlayError(f"{error}; try again, then a new server is started") from None
    except (EnvError, ValueError, ImportError) as error:
        raise PlayError(str(error)) from None


class Environments:
    """Servers of environments by name, each started when it is first needed; `close` ends all."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._pools: dict[str, EnvPool] = {}
        self._lock = threading.Lock()

    def client(self, env: str) -> EnvClient:
        """A new session. Raises: PlayError if the environment cannot be started."""
        if env not in ENVS:  # what is imported must not depend on a file that is only looked at
            raise PlayError(f"{env!r} is not one of the environments: {', '.join(ENVS)}")
        with self._lock, play_errors():
            if env not in self._pools:
                url = self._stack.enter_context(local_server(env))
                self._pools[env] = self._stack.enter_context(EnvPool(env, [url]))
            try:
                return self._pools[env].client()
            except AllServersDown:
                del self._pools[env]
                raise

    def close(self) -> None:
        self._stack.close()


def reenact(environments: Environments, line: Mapping[str, Any], env: str | None) -> dict[str, Any]:
    """Play a trajectory's actions in a fresh session and compare the observations.

    Returns: same, first_difference ({turn, then, now}; turn 0 is the first observation),
        first_state, and a state for each turn that was played.
    Raises: PlayError if its environment or task is not known here.
    """
    from rollout import state_of  # imports torch, which would delay the page's start by seconds

    task = task_of(line, env)
    if task is None:
        raise PlayError(f"{line.get('task_id')!r} does not name a task of an environment")
    opening, seed = opening_of(line), line.get("seed")
    then = str(opening[-1].get("content", "")) if opening else ""
    difference, states = None, []
    with contextlib.closing(environments.client(task[0])) as client, play_errors():
        now = client.reset(task[1], seed=seed if isinstance(seed, int) else 0)
        first_state = state_of(client)
        if now != then:
            difference = {"turn": 0, "then": then, "now": now}
        for number, turn in enumerate(turns_of(line), start=1):
            then = str(turn.get("observation_text") or "")
            was_cut = not then and line.get("stop_reason") == "length"  # by the budget: not played
            if was_cut or difference:
                break
            result = client.step(str(turn.get("action_text") or ""))
            states.append(state_of(client))
            if result.observation != then:
                difference = {"turn": number, "then": then, "now": result.observation}
            if result.terminated or result.truncated:
                break
    return {
        "same": difference is None,
        "first_difference": difference,
        "first_state": first_state,
        "states": states,
    }


@dataclass
class Session:
    """An episode under way."""

    client: EnvClient
    trajectory: Trajectory
    observation: str
    lock: threading.Lock = field(default_factory=threading.Lock)


class Play:
    """Episodes played by hand; `save` appends them to `folder`/played.jsonl."""

    def __init__(
        self, environments: Environments, folder: Path, model: ChatApi | None = None
    ) -> None:
        self.environments, self.folder, self.model = environments, folder, model
        self._sessions: dict[str, Session] = {}

    def list_environments(self) -> dict[str, Any]:
        """What can be played (number of test tasks, index of the first one and of the last task of
        all), and what an environment lacks to be played."""
        listed = []
        for env in ENVS:
            about: dict[str, Any]
            try:
                tests = load_tasks(env, "test")
                about = {"tasks": len(tests), "first": tests[0].task_index, "why_not": None}
                about["last"] = get_env(env).num_tasks() - 1
            except (ImportError, OSError, ValueError) as error:
                about = {"why_not": f"{error}; make setup ENV={env}"}
            listed.append({"env": env} | about)
        return {"worlds": listed, "model": self.model and self.model.model}

    def new(self, env: str, task_index: int) -> dict[str, Any]:
        from rollout import state_of

        client = self.environments.client(env)
        try:
            with play_errors():
                observation, state = client.reset(task_index), state_of(client)
        except PlayError:
            client.close()
            raise
        task_id = f"{env}_{task_index}"
        tasks = [task for split in ("test", "train") for task in load_tasks(env, split)]
        subtask = next((task.subtask for task in tasks if task.task_id == task_id), "")
        t = Trajectory(f"played-{int(time.time())}", 0, env, task_id, subtask, 0, 0, MAX_TURNS)
        t.messages = [*client.prompt, {"role": "user", "content": observation}]
        t.first_state = state
        while len(self._sessions) >= MAX_SESSIONS:
            self.close(next(iter(self._sessions)))
        name = secrets.token_hex(8)
        self._sessions[name] = Session(client, t, observation)
        return self.show(name)

    def show(self, name: str) -> dict[str, Any]:
        session = self._session(name)
        t, available = session.trajectory, None
        with contextlib.suppress(EnvError):  # some environments cannot list their actions
            available = None if t.stop_reason else session.client.available_actions()
        return {
            "session": name,
            "prompt": list(session.client.prompt),
            "observation": session.observation,
            "first_state": t.first_state,
            "state": t.turns[-1].state if t.turns else t.first_state,
            "available": available,
            "turns": [played_turn(turn) for turn in t.turns],
            "done": t.stop_reason is not None,
            "reward": t.total_return,
            "success": t.success,
        }

    def step(self, name: str, text: str) -> dict[str, Any]:
        """Play what was typed; a bare action is written as a model would write it."""
        from rollout import state_of, take_result

        session = self._session(name)
        if "Action:" not in text and "<" not in text:
            text = f"Action: {text}"
        with session.lock:
            t = session.trajectory
            if t.stop_reason:
                raise PlayError("this episode has ended; begin a new one")
            began = time.perf_counter()
            with play_errors():
                result = session.client.step(text)
            turn = Turn(action_span=None, action_text=text)  # type: ignore[arg-type] # no tokens
            turn.env_s = time.perf_counter() - began
            with contextlib.suppress(EnvError):  # the turn counts, also without its state
                turn.state = state_of(session.client)
            t.messages.append({"role": "assistant", "content": text})
            t.turns.append(turn)
            session.observation = result.observation
            if take_result(t, turn, result):
                t.messages.append({"role": "user", "content": result.observation})
        return self.show(name)

    def oracle(self, name: str) -> dict[str, Any]:
        with play_errors():
            thought, action = self._session(name).client.oracle()
        return {"thought": thought, "action": action}

    def let_model_act(self, name: str) -> dict[str, Any]:
        if self.model is None:
            raise PlayError("no model was named; start with --api-base URL --api-model NAME")
        messages = self._session(name).trajectory.messages
        try:
            text = self.model.complete(messages, MODEL_TOKENS, 1.0, secrets.randbelow(2**31))
        except RuntimeError as error:
            raise PlayError(str(error)) from None
        return self.step(name, text)

    def save(self, name: str) -> dict[str, Any]:
        """Append the episode to played.jsonl; this ends it."""
        t = self._session(name).trajectory
        if not t.stop_reason:
            t.stop("max_rounds")
        path = self.folder / "played.jsonl"
        make_folder(path.parent)
        with open(path, "a", encoding="utf-8", errors="replace") as file:
            file.write(t.to_json())
        self.close(name)
        return {"path": str(path)}

    def close(self, name: str) -> None:
        session = self._sessions.pop(name, None)
        if session:
            session.client.close()

    def _session(self, name: str) -> Session:
        if name not in self._sessions:
            raise PlayError("this episode is closed; begin a new one")
        return self._sessions[name]


def played_turn(turn: Turn) -> dict[str, Any]:
    thought, action = split_action(turn.action_text)
    names = ("action_text", "observation_text", "reward", "parse_error", "env_s", "state")
    return {"thought": thought, "action": action, **{n: getattr(turn, n) for n in names}}
