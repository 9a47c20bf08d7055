"""Worlds that answer while somebody looks: an episode played by hand, and one played again.

A world is served as in training, by `python -m envs.server` on this machine, started when it is
first asked for. Played by hand, an episode becomes a trajectory without tokens, as a chat server's
model's is. Re-enacted, the recorded actions are sent to a fresh session: in a deterministic world
each observation must be the recorded one, and the states that nobody recorded are there to draw.

Read next: server.py.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envclient import AllServersDown, EnvClient, EnvError, EnvPool, local_server
from envs import ENVS, get_env, load_tasks
from run.files import make_folder
from trajectory import Trajectory, Turn
from viewer.lines import opening_of, turns_of
from viewer.trajectories import apart, task_of

if TYPE_CHECKING:
    from sampling.chatapi import ChatApi

MAX_SESSIONS = 32  # played at a time; the oldest is closed for one more
MAX_TURNS = 1_000  # of an episode played by hand
MODEL_TOKENS = 512  # of an answer of the model that is let move
SPLITS = ("test", "train")


class PlayError(RuntimeError):
    """What was asked for cannot be played; the message says why."""


@dataclass
class Session:
    """An episode under way."""

    client: EnvClient
    trajectory: Trajectory
    observation: str
    lock: threading.Lock = field(default_factory=threading.Lock)


class Worlds:
    """Servers of worlds, by name, each started when it is first needed; `close` ends them all."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._pools: dict[str, EnvPool] = {}
        self._lock = threading.Lock()

    def client(self, env: str) -> EnvClient:
        """A new session.

        Raises: PlayError: the world cannot be started; the message says how to install it.
        """
        with self._lock:
            try:
                if env not in self._pools:
                    url = self._stack.enter_context(local_server(env))
                    self._pools[env] = self._stack.enter_context(EnvPool(env, [url]))
            except (EnvError, ValueError, ImportError) as error:
                raise PlayError(str(error)) from None
        try:
            return self._pools[env].client()
        except AllServersDown as error:
            with self._lock:  # whoever asks next gets a new server
                self._pools.pop(env, None)
            raise PlayError(f"{error}; try again, a new one is started then") from None
        except EnvError as error:
            raise PlayError(str(error)) from None

    def close(self) -> None:
        self._stack.close()


# -------------------------------------------------------------------------------------- once again


def reenact(worlds: Worlds, line: Mapping[str, Any], env: str | None) -> dict[str, Any]:
    """Play a trajectory's actions in a fresh session and compare what the world says.

    Returns: same, first_difference ({turn, then, now}; turn 0: the first observation), first_state
        and a state for each turn that was played.
    Raises: PlayError: its world or its task is not known here.
    """
    from rollout import state_of  # with torch: seconds that the page's start need not take

    task = task_of(line, env)
    if task is None:
        raise PlayError(f"{line.get('task_id')} names no task of a world")
    name, index = task
    if name not in ENVS:  # a file that is looked at must not decide what is imported
        raise PlayError(f"{name} is no world of this project, and is not started from here")
    opening = opening_of(line)
    recorded = str(opening[-1].get("content", "")) if opening else ""
    with contextlib.closing(worlds.client(name)) as client:
        try:
            seed = line.get("seed")
            now = client.reset(index, seed=seed if isinstance(seed, int) else 0)
            first, states = state_of(client), []
            differs = difference(0, recorded, now)
            for number, turn in enumerate(turns_of(line), start=1):
                then = str(turn.get("observation_text") or "")
                if not then and line.get("stop_reason") == "length":
                    break  # the budget ended inside this turn: the world never heard it
                if differs:
                    break
                result = client.step(str(turn.get("action_text") or ""))
                differs = difference(number, then, result.observation)
                states.append(state_of(client))
                if result.terminated or result.truncated:
                    break
        except (EnvError, ValueError) as error:
            raise PlayError(f"{name} {index}: {error}") from None
    return {
        "same": differs is None,
        "first_difference": differs,
        "first_state": first,
        "states": states,
    }


def difference(turn: int, then: str, now: str) -> dict[str, Any] | None:
    return None if then == now else {"turn": turn, "then": then, "now": now}


# ----------------------------------------------------------------------------------------- by hand


class Play:
    """Episodes that somebody plays, and what they are saved as."""

    def __init__(self, worlds: Worlds, folder: Path, model: ChatApi | None = None) -> None:
        self.worlds, self.folder, self.model = worlds, folder, model
        self._sessions: dict[str, Session] = {}

    def list_worlds(self) -> dict[str, Any]:
        """What can be played, and what a world lacks: how many test tasks it has, the index of the
        first of them, and of its last task at all."""
        found = []
        for env in ENVS:
            about: dict[str, Any]
            try:
                tested = load_tasks(env, "test")
                about = {"tasks": len(tested), "first": tested[0].task_index, "why_not": None}
                about["last"] = get_env(env).num_tasks() - 1
            except (ImportError, OSError, ValueError) as error:
                about = {"why_not": f"{error}; make setup ENV={env}"}
            found.append({"env": env} | about)
        return {"worlds": found, "model": self.model and self.model.model}

    def new(self, env: str, task_index: int) -> dict[str, Any]:
        """Raises: PlayError: no such world or task."""
        from rollout import state_of

        if env not in ENVS:
            raise PlayError(f"no world is called {env!r}; there are {', '.join(ENVS)}")
        client = self.worlds.client(env)
        try:
            observation, state = client.reset(task_index), state_of(client)
        except EnvError as error:
            client.close()
            raise PlayError(str(error)) from None
        task_id = f"{env}_{task_index}"
        subtask = next((t.subtask for t in all_tasks(env) if t.task_id == task_id), "")
        t = Trajectory(f"played-{int(time.time())}", 0, env, task_id, subtask, 0, 0, MAX_TURNS)
        t.messages = [*client.prompt, {"role": "user", "content": observation}]
        t.first_state = state
        while len(self._sessions) >= MAX_SESSIONS:
            self.close(next(iter(self._sessions)))
        name = secrets.token_hex(8)
        self._sessions[name] = Session(client, t, observation)
        return self.show(name)

    def show(self, name: str) -> dict[str, Any]:
        """Where an episode stands."""
        session = self._of(name)
        t = session.trajectory
        try:
            available = None if t.stop_reason else session.client.available_actions()
        except EnvError:  # it cannot list them, or does not answer: what is known is shown
            available = None
        return {
            "session": name,
            "prompt": list(session.client.prompt),
            "observation": session.observation,
            "first_state": t.first_state,
            "state": t.turns[-1].state if t.turns else t.first_state,
            "available": available,
            "turns": [shown(turn) for turn in t.turns],
            "done": t.stop_reason is not None,
            "reward": t.total_return,
            "success": t.success,
        }

    def step(self, name: str, text: str) -> dict[str, Any]:
        """Play what was typed; a bare action is written as a model would write it."""
        from rollout import state_of, take_result

        session = self._of(name)
        if "Action:" not in text and "<" not in text:
            text = f"Action: {text}"
        with session.lock:
            t = session.trajectory
            if t.stop_reason:
                raise PlayError("this episode has ended; begin a new one")
            began = time.perf_counter()
            try:
                result = session.client.step(text)
            except EnvError as error:
                raise PlayError(str(error)) from None
            # Nobody sampled tokens to point into.
            turn = Turn(action_span=None, action_text=text)  # type: ignore[arg-type]
            turn.env_s = time.perf_counter() - began
            with contextlib.suppress(EnvError):  # the world has moved: the turn counts without it
                turn.state = state_of(session.client)
            t.messages.append({"role": "assistant", "content": text})
            t.turns.append(turn)
            session.observation = result.observation
            if take_result(t, turn, result):
                t.messages.append({"role": "user", "content": result.observation})
        return self.show(name)

    def oracle(self, name: str) -> dict[str, Any]:
        """Raises: PlayError: the world has none, or it is at its wits' end."""
        try:
            thought, action = self._of(name).client.oracle()
        except EnvError as error:
            raise PlayError(str(error)) from None
        return {"thought": thought, "action": action}

    def let_model_move(self, name: str) -> dict[str, Any]:
        """Raises: PlayError: there is none, or it does not answer."""
        if self.model is None:
            raise PlayError("no model was named; start with --api-base URL --api-model NAME")
        messages = self._of(name).trajectory.messages
        try:
            text = self.model.complete(messages, MODEL_TOKENS, 1.0, secrets.randbelow(2**31))
        except RuntimeError as error:
            raise PlayError(str(error)) from None
        return self.step(name, text)

    def save(self, name: str) -> dict[str, Any]:
        """Append the episode to played.jsonl; one that is under way ends there."""
        t = self._of(name).trajectory
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

    def _of(self, name: str) -> Session:
        try:
            return self._sessions[name]
        except KeyError:
            raise PlayError("this episode is closed; begin a new one") from None


def all_tasks(env: str) -> Sequence[Any]:
    return [task for split in SPLITS for task in load_tasks(env, split)]


def shown(turn: Turn) -> dict[str, Any]:
    thought, action = apart(turn.action_text)
    names = ("action_text", "observation_text", "reward", "parse_error", "env_s", "state")
    return {"thought": thought, "action": action, **{n: getattr(turn, n) for n in names}}
