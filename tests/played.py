"""Fifty recorded episodes of each deterministic world, and how they were recorded.

    PYTHONPATH=. python tests/played.py           writes tests/data/played/<world>.jsonl anew

A careless player: mostly the oracle, sometimes another available action, sometimes nonsense. The
files hold no tokens and no states, as those of an API's model; test_viewer_play.py plays them
again.
"""

import contextlib
import random
import sys
from pathlib import Path

from envclient import NotSupported
from envs import load_tasks
from rollout import take_result
from run.files import write_text
from trajectory import Trajectory, Turn
from viewer.play import Environments

FOLDER = Path(__file__).parent / "data" / "played"
WORLDS = ("textcraft", "babyai", "sciworld")
COUNT, TURNS = 50, 6


def record(environments: Environments, env: str, number: int) -> Trajectory:
    rng = random.Random(f"{env} {number}")
    task = rng.choice(load_tasks(env, "train"))
    t = Trajectory(f"played-{number:02d}", 0, env, task.task_id, task.subtask, number, 0, TURNS)
    with contextlib.closing(environments.client(env)) as client:
        observation = client.reset(task.task_index, seed=0)
        t.messages = [*client.prompt]
        while True:
            t.messages.append({"role": "user", "content": observation})
            text = say(client, rng)
            result = client.step(text)
            t.messages.append({"role": "assistant", "content": text})
            turn = Turn(action_span=None, action_text=text)  # type: ignore[arg-type]
            t.turns.append(turn)
            if not take_result(t, turn, result):
                return t
            observation = result.observation


def say(client, rng: random.Random) -> str:
    kind = rng.random()
    if kind < 0.05:
        return "I do not know what to do."
    if kind < 0.1:
        return "Action: fly to the moon"
    if kind < 0.3:
        with contextlib.suppress(NotSupported):
            return f"Action: {rng.choice(client.available_actions())}"
    thought, action = client.oracle()
    return f"Thought: {thought}\nAction: {action}"


def main() -> int:
    environments = Environments()
    try:
        for env in WORLDS:
            lines = [record(environments, env, number).to_json() for number in range(COUNT)]
            write_text(FOLDER / f"{env}.jsonl", "".join(lines))
    finally:
        environments.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
