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
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envclient import AllServersDown, EnvClient, EnvError, EnvPool, local_server
from envs import ENVS, get_env, load_tasks
from run.errors import RunFailed
from run.files import make_folder
from trajectory import Trajectory, Turn
from viewer.trajectories import opening_of, split_action, task_of

if TYPE_CHECKING:
    from sampling.chatapi import ChatApi

MAX_TURNS = 1_000  # of an episode played by hand
MODEL_TOKENS = 512  # of a model's answer


class PlayError(RuntimeError):
    """This cannot be played; the message says why."""


@contextlib.contextmanager
def play_errors() -> Iterator[None]:
    """Errors of an environment or a model as PlayError."""
    try:
        yield
    except AllServersDown as error:
        raise PlayError(f"{error}; try again, then a new server is started") from None
    except (RunFailed, ValueError, ImportError) as error:
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

    Returns: first_difference ({turn, then, now}; turn 0 is the first observation) or None,
        first_state, and a state for each turn that was played.
    Raises: PlayError if its environment or task is not known here.
    """
    from rollout import state_of  # imports torch, which would delay the page's start by seconds

    task = task_of(line, env)
    if task is None:
        raise PlayError(f"{line.get('task_id')!r} does not name a task of an environment")
    then, difference, states = opening_of(line)[-1]["content"], None, []
    with contextlib.closing(environments.client(task[0])) as client, play_errors():
        now = client.reset(task[1], seed=line.get("seed") or 0)
        first_state = state_of(client)
        if now != then:
            difference = {"turn": 0, "then": then, "now": now}
        for number, turn in enumerate(line["turns"], start=1):
            then = turn["observation_text"]
            was_cut = not then and line.get("stop_reason") == "length"  # by the budget: not played
            if was_cut or difference:
                break
            result = client.step(turn["action_text"])
            states.append(state_of(client))
            if result.observation != then:
                difference = {"turn": number, "then": then, "now": result.observation}
            if result.terminated or result.truncated:
                break
    return {"first_difference": difference, "first_state": first_state, "states": states}


class Play:
    """Episodes played by hand; `save` appends them to `folder`/played.jsonl."""

    def __init__(
        self, environments: Environments, folder: Path, model: ChatApi | None = None
    ) -> None:
        self.environments, self.folder, self.model = environments, folder, model
        self._sessions: dict[str, tuple[EnvClient, Trajectory]] = {}

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
        name, subtask = f"played-{int(time.time())}", get_env(env).subtask(task_index)
        t = Trajectory(name, 0, env, f"{env}_{task_index}", subtask, 0, 0, MAX_TURNS)
        t.messages = [*client.prompt, {"role": "user", "content": observation}]
        t.first_state = state
        session = secrets.token_hex(8)
        self._sessions[session] = client, t
        return self._show(session)

    def step(self, session: str, text: str) -> dict[str, Any]:
        """Play what was typed; a bare action is written as a model would write it."""
        from rollout import state_of, take_result

        client, t = self._session(session)
        if t.stop_reason:
            raise PlayError("this episode has ended; begin a new one")
        if "Action:" not in text and "<" not in text:
            text = f"Action: {text}"
        began = time.perf_counter()
        with play_errors():
            result = client.step(text)
        turn = Turn(action_span=None, action_text=text)  # type: ignore[arg-type] # no tokens
        turn.env_s = time.perf_counter() - began
        turn.state = state_of(client)
        t.messages.append({"role": "assistant", "content": text})
        t.turns.append(turn)
        if take_result(t, turn, result):
            t.messages.append({"role": "user", "content": result.observation})
        return self._show(session)

    def oracle(self, session: str) -> dict[str, Any]:
        with play_errors():
            thought, action = self._session(session)[0].oracle()
        return {"thought": thought, "action": action}

    def let_model_act(self, session: str) -> dict[str, Any]:
        if self.model is None:
            raise PlayError("no model was named; start with --api-base URL --api-model NAME")
        messages, seed = self._session(session)[1].messages, secrets.randbelow(2**31)
        with play_errors():
            text = self.model.complete(messages, MODEL_TOKENS, 1.0, seed)
        return self.step(session, text)

    def save(self, session: str) -> dict[str, Any]:
        """Append the episode to played.jsonl; this ends it."""
        t = self._session(session)[1]
        if not t.stop_reason:
            t.stop("max_rounds")
        path = self.folder / "played.jsonl"
        make_folder(path.parent)
        with open(path, "a", encoding="utf-8", errors="replace") as file:
            file.write(t.to_json())
        self.close(session)
        return {"path": str(path)}

    def close(self, session: str) -> None:
        if session in self._sessions:
            self._sessions.pop(session)[0].close()

    def _session(self, session: str) -> tuple[EnvClient, Trajectory]:
        if session not in self._sessions:
            raise PlayError("this episode is closed; begin a new one")
        return self._sessions[session]

    def _show(self, session: str) -> dict[str, Any]:
        client, t = self._session(session)
        available = None
        with contextlib.suppress(EnvError):  # some environments cannot list their actions
            available = None if t.stop_reason else client.available_actions()
        last = t.turns[-1] if t.turns else None
        return {
            "session": session,
            "prompt": list(client.prompt),
            "observation": last.observation_text if last else t.messages[-1]["content"],
            "state": last.state if last else t.first_state,
            "available": available,
            "turns": [played_turn(turn) for turn in t.turns],
            "done": t.stop_reason is not None,
            "reward": t.total_return,
            "success": t.success,
        }


def played_turn(turn: Turn) -> dict[str, Any]:
    thought, action = split_action(turn.action_text)
    names = ("action_text", "observation_text", "reward", "parse_error", "env_s")
    return {"thought": thought, "action": action, **{n: getattr(turn, n) for n in names}}
