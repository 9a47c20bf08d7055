"""Live environments: play an episode yourself, or re-enact a recorded one.

As in training, `python -m envs.server` serves the environment; it is started on first use. An
episode that a person plays becomes a trajectory without tokens, like one from a chat server. To
re-enact a trajectory, its actions are sent to a new session. In a deterministic environment, each
observation must equal the recorded one. Re-enacting also produces the states that the page
draws; few runs record them.

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
from envs import ENVS, ParseError, get_env, load_tasks
from envs.common import action_in
from run.errors import RunFailed
from run.files import make_folder
from trajectory import Trajectory, Turn
from viewer.trajectories import opening_of, task_of, turn_view

if TYPE_CHECKING:
    from sampling.chatapi import ChatApi

MAX_TURNS = 1_000  # of an episode that a person plays
MODEL_TOKENS = 512  # maximum length of a model's answer


class PlayError(RuntimeError):
    """The episode cannot be played; the message gives the reason."""


@contextlib.contextmanager
def play_errors() -> Iterator[None]:
    """Turn errors of an environment or a model into PlayError."""
    try:
        yield
    except AllServersDown as error:
        raise PlayError(f"{error}; try again to start a new server") from None
    except (RunFailed, ValueError, ImportError) as error:
        raise PlayError(str(error)) from None


class Environments:
    """Environment servers by name, each started on first use; `close` stops them all."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._pools: dict[str, EnvPool] = {}
        self._lock = threading.Lock()

    def client(self, env: str) -> EnvClient:
        """A new session. Raises: PlayError if the environment cannot be started."""
        if env not in ENVS:  # `env` can come from a file, which must not choose what is imported
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


NOT_ACTIONS = (
    "these turns are plans, reflections or actions in another format, which only the run that made "
    "them could play"
)


def reenact(environments: Environments, line: Mapping[str, Any], env: str | None) -> dict[str, Any]:
    """Play a trajectory's actions in a new session and compare the observations.

    Returns: first_difference ({turn, then, now}; turn 0 is the first observation) or None,
        first_state, and a state for each turn that was played.
    Raises: PlayError if its environment or task is unknown.
    """
    from rollout import state_of  # here, because importing torch would delay the page by seconds

    task = task_of(line, env)
    if task is None:
        raise PlayError(f"{line.get('task_id')!r} does not name a task of an environment")
    if any(turn.get("kind", "act") != "act" for turn in line["turns"]):
        raise PlayError(NOT_ACTIONS)
    recorded, difference, states = opening_of(line)[-1]["content"], None, []
    with contextlib.closing(environments.client(task[0])) as client, play_errors():
        observation = client.reset(task[1], seed=line.get("seed") or 0)
        first_state = state_of(client)
        if observation != recorded:
            difference = {"turn": 0, "then": recorded, "now": observation}
        for number, turn in enumerate(line["turns"], start=1):
            recorded = turn["observation_text"]
            # The token budget cut this turn, so it was not played.
            was_cut = not recorded and line.get("stop_reason") == "length"
            if was_cut or difference:
                break
            result = client.step(turn["action_text"])
            if result.is_refusal and not turn.get("parse_error"):
                raise PlayError(NOT_ACTIONS)
            states.append(state_of(client))
            if result.observation != recorded:
                difference = {"turn": number, "then": recorded, "now": result.observation}
            if result.terminated or result.truncated:
                break
    return {"first_difference": difference, "first_state": first_state, "states": states}


class Play:
    """Episodes that a person plays; `save` appends them to `folder`/played.jsonl."""

    def __init__(
        self, environments: Environments, folder: Path, model: ChatApi | None = None
    ) -> None:
        self.environments, self.folder, self.model = environments, folder, model
        self._sessions: dict[str, tuple[EnvClient, Trajectory]] = {}

    def list_environments(self) -> dict[str, Any]:
        """All environments and the model's name. Each environment comes with its number of test
        tasks, the index of the first test task and the highest task index, or the reason why it
        cannot be played."""
        environments = []
        for env in ENVS:
            fields: dict[str, Any] = {"env": env, "why_not": None}
            try:
                tests = load_tasks(env, "test")
                fields |= {"tasks": len(tests), "first": tests[0].task_index}
                fields["last"] = get_env(env).num_tasks() - 1
            except (ImportError, OSError, ValueError) as error:
                fields["why_not"] = f"{error}; run `make setup ENV={env}`"
            environments.append(fields)
        return {"worlds": environments, "model": self.model and self.model.model}

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
        """Play the typed text; a bare action is written as the environment wants it."""
        from agents import take_result
        from rollout import state_of

        client, t = self._session(session)
        if t.stop_reason:
            raise PlayError("this episode has ended; start a new one")
        try:
            action_in(get_env(t.env), text)
        except ParseError:
            text = client.say("", text)
        start = time.perf_counter()
        with play_errors():
            result = client.step(text)
        turn = Turn(action_span=None, action_text=text)  # type: ignore[arg-type] # no tokens
        turn.env_s = time.perf_counter() - start
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
            raise PlayError("no model given; start replay.py with --api-base URL --api-model NAME")
        messages, seed = self._session(session)[1].messages, secrets.randbelow(2**31)
        with play_errors():
            text = self.model.complete(messages, MODEL_TOKENS, 1.0, seed)
        return self.step(session, text)

    def save(self, session: str) -> dict[str, Any]:
        """End the episode and append it to played.jsonl."""
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
            raise PlayError("this episode is closed; start a new one")
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
            # The time to generate is not shown, since a person may have typed the action.
            "turns": [turn_view(vars(turn) | {"generate_s": None}) for turn in t.turns],
            "done": t.stop_reason is not None,
            "reward": t.total_return,
            "success": t.success,
        }
