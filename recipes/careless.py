"""A careless teacher of TextCraft: demonstrations of a player who errs, for RL to mend.

The oracle of a world is perfect, and who imitates it well has little left to learn. Here every move
is the oracle's, or with probability --error a wrong one,

    amount    get 1 oak log                 where 2 are needed; one number of a command changed
    other     craft 4 stick using ...       another of the listed commands
    fetch     get 3 oak planks              an ingredient of some listed command

after which the oracle plans anew from where things are. Who imitates that errs as often: it can do
the task and wastes turns, so that the shorter the horizon, the more it fails. The turns say nothing
but the action, which makes them three times shorter than with a thought.

    python recipes/careless.py --out demos.json        9,000 demonstrations, seconds; and how well
                                                       the teacher itself does, in a table

recipes/starts/README.md has the command that trains the tiny model on them. Read next:
warmstart.py.
"""

import argparse
import json
import random
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from data import NAMES, Record  # noqa: E402
from envs import Task, load_tasks  # noqa: E402
from envs.textcraft.env import TextCraft  # noqa: E402
from recipes.common import markdown, write_json  # noqa: E402

PROMPT_FILE = ROOT / "recipes" / "starts" / "tiny-careless" / "prompt.json"
ERROR = 0.3
SHARES = {"depth 1": 0.5, "depth 2": 0.3, "depth 3": 0.2}  # of the demonstrations
MAX_TURNS = 24
BUDGETS = (3, 6, 12, 24)  # turns within which the teacher's success is counted


def wrong_move(action: str, commands: Sequence[str], rng: random.Random) -> str:
    """A move in place of the oracle's; by chance it may be a good one too.

    Args:
        commands: those that the world lists, "craft 4 stick using 2 planks".
    """
    amounts = [m for m in re.finditer(r"\d+", action) if int(m[0]) > 1]
    kind = rng.choice(["amount", "amount", "other", "fetch"] if amounts else ["other", "fetch"])
    if kind == "amount":
        chosen = rng.choice(amounts)
        return (
            f"{action[: chosen.start()]}{rng.randrange(1, int(chosen[0]))}{action[chosen.end() :]}"
        )
    command = rng.choice(commands)
    if kind == "other":
        return command
    return f"get {rng.choice(command.split(' using ')[1].split(', '))}"


def play(
    world: TextCraft,
    task_index: int,
    prompt: list[dict[str, str]],
    error: float,
    rng: random.Random,
    max_turns: int = MAX_TURNS,
) -> tuple[Record, bool]:
    """One episode as an AgentTraj conversation, and whether it was solved in so many turns."""
    observation = world.reset(task_index, seed=rng.randrange(10**9))
    commands = world.state_for_people()["commands"]
    turns: list[dict[str, Any]] = [
        {"from": NAMES[m["role"]], "loss": None, "value": m["content"]} for m in prompt
    ]
    solved = False
    for _ in range(max_turns):
        _, action = world.oracle()
        if rng.random() < error:
            action = wrong_move(action, commands, rng)
        turns.append({"from": "human", "loss": None, "value": observation})
        turns.append({"from": "gpt", "loss": True, "value": f"Action: {action}"})
        observation, _, solved, _, _ = world.step(action)
        if solved:
            break
    return {"item_id": f"textcraft_{task_index}", "conversations": turns}, solved


def demonstrate(
    tasks: Sequence[Task], count: int, error: float, seed: int
) -> tuple[list[Record], dict[str, list[int]]]:
    """`count` solved episodes, sub-tasks drawn by SHARES, and the turns of all that were played by
    sub-task, MAX_TURNS + 1 for those that were not solved."""
    rng, world = random.Random(seed), TextCraft()
    prompt = json.loads(PROMPT_FILE.read_text(encoding="utf-8"))
    by_subtask: dict[str, list[Task]] = {name: [] for name in SHARES}
    for task in tasks:
        by_subtask.get(task.subtask, []).append(task)
    there = [name for name, group in by_subtask.items() if group]
    records: list[Record] = []
    turns: dict[str, list[int]] = {name: [] for name in there}
    while len(records) < count:
        (name,) = rng.choices(there, [SHARES[n] for n in there])
        task = rng.choice(by_subtask[name])
        record, solved = play(world, task.task_index, prompt, error, rng)
        if not solved:
            turns[name].append(MAX_TURNS + 1)
            continue
        turns[name].append((len(record["conversations"]) - len(prompt)) // 2)
        records.append(record)
    return records, turns


def table(turns: dict[str, list[int]]) -> str:
    """How well the teacher does: share of its episodes solved within so many turns.

    >>> print(table({"depth 1": [3, 4]}).splitlines()[-1])
    | depth 1 | 2 | 50.0 | 100.0 | 100.0 | 100.0 |
    """
    rows = [
        (name, len(played))
        + tuple(f"{100 * sum(n <= most for n in played) / len(played):.1f}" for most in BUDGETS)
        for name, played in turns.items()
    ]
    budgets = " | ".join(f"within {most} turns, %" for most in BUDGETS)
    return "\n".join(markdown(f"sub-task | episodes | {budgets}", rows))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="AgentTraj file to write")
    parser.add_argument("--count", type=int, default=9_000, help="demonstrations")
    parser.add_argument("--error", type=float, default=ERROR, help="share of wrong moves, 0 to 1")
    parser.add_argument("--tasks", default=None, help="id list (default: the training split)")
    parser.add_argument("--subtasks", nargs="*", default=(), help="these alone")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    if not 0 <= options.error < 1:
        parser.error(f"--error {options.error} must be at least 0 and less than 1")
    split = None if options.tasks else "train"
    tasks = load_tasks("textcraft", split, options.tasks, tuple(options.subtasks))
    records, turns = demonstrate(tasks, options.count, options.error, options.seed)
    write_json(options.out, records)
    print(f"{table(turns)}\n\nwrote {options.out}: {len(records)} demonstrations")
    return 0


if __name__ == "__main__":
    sys.exit(main())
