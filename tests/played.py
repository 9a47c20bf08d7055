"""Record fifty episodes of each deterministic environment, for tests that re-enact them.

    PYTHONPATH=. python tests/played.py           rewrites tests/data/played/<env>.jsonl

The player mostly follows the oracle, sometimes takes a random available action, and sometimes
writes nonsense. Like the trajectories of a chat server, the files hold no tokens and no states.
test_viewer_play.py re-enacts them.
"""

import contextlib
import random
import sys
from pathlib import Path

from agents import take_result
from envclient import NotSupported
from envs import load_tasks
from run.files import write_text
from trajectory import Trajectory, Turn
from viewer.play import Environments

FOLDER = Path(__file__).parent / "data" / "played"
ENVS = ("textcraft", "babyai", "sciworld")
COUNT, MAX_TURNS = 50, 6


def record(environments: Environments, env: str, number: int) -> Trajectory:
    rng = random.Random(f"{env} {number}")
    task = rng.choice(load_tasks(env, "train"))
    t = Trajectory(f"played-{number:02d}", 0, env, task.task_id, task.subtask, number, 0, MAX_TURNS)
    with contextlib.closing(environments.client(env)) as client:
        observation = client.reset(task.task_index, seed=0)
        t.messages = [*client.prompt]
        while True:
            t.messages.append({"role": "user", "content": observation})
            text = choose_text(client, rng)
            result = client.step(text)
            t.messages.append({"role": "assistant", "content": text})
            turn = Turn(action_span=None, action_text=text)  # type: ignore[arg-type]
            t.turns.append(turn)
            if not take_result(t, turn, result):
                return t
            observation = result.observation


def choose_text(client, rng: random.Random) -> str:
    x = rng.random()
    if x < 0.05:
        return "I do not know what to do."
    if x < 0.1:
        return "Action: fly to the moon"
    if x < 0.3:
        with contextlib.suppress(NotSupported):
            return f"Action: {rng.choice(client.available_actions())}"
    thought, action = client.oracle()
    return f"Thought: {thought}\nAction: {action}"


def main() -> int:
    environments = Environments()
    try:
        for env in ENVS:
            lines = [record(environments, env, number).to_json() for number in range(COUNT)]
            write_text(FOLDER / f"{env}.jsonl", "".join(lines))
    finally:
        environments.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
