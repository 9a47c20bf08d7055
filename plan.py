"""Which tasks a step plays, from which weights a run starts, and on what it is measured.

All of it is a pure function of the options and of the step's number:

    position(t, n) = (t - 1) · tasks_per_step + n            n-th task of step t
    epoch, index   = divmod(position, number of tasks)
    task(t, n)     = order_epoch[index]                      order: shuffled by (seed, epoch)

so that a resumed run, on any number of processes, needs nothing but the step to go on where it was;
AgentGym-RL keeps a cursor, does not restore it, and repeats or skips tasks.

Read next: `worker.py`, which rolls these requests out.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from config import Config
from envs import Task, load_tasks
from rollout import RolloutRequest
from runtime.default_models import resolve_model
from sft import SftSettings, warm_start


def requests_of(step: int, tasks: Sequence[Task], config: Config) -> list[RolloutRequest]:
    """The step's trajectories to roll: a pure function, so resume cannot lose its place.

    Tasks are drawn without replacement, epoch by epoch; all samples of a task share the
    environment's seed.
    """
    requests = []
    for n in range(config.tasks_per_step):
        position = (step - 1) * config.tasks_per_step + n
        epoch, index = divmod(position, len(tasks))
        order = random.Random(f"{config.seed}/{epoch}").sample(range(len(tasks)), len(tasks))
        task, env_seed = tasks[order[index]], config.seed * 1_000_003 + position
        requests += [RolloutRequest(task, n, k, env_seed, step) for k in range(config.group_size)]
    return requests


def held_out_tasks(config: Config) -> list[Task]:
    """The tasks of --eval-tasks, or the test split, restricted to the chosen sub-tasks."""
    if not config.eval_every:
        return []
    subtasks = config.subtasks if config.eval_subtasks is None else config.eval_subtasks
    split = None if config.eval_tasks else "test"
    return load_tasks(config.env, split, config.eval_tasks, subtasks)


def start_model(config: Config) -> str:
    """Path of the weights that RL starts from: as given, or warmed up on demonstrations."""
    if config.warm_start not in ("auto", "never"):
        return config.warm_start
    if config.warm_start == "never" or config.model not in ("smollm2-135m", "tiny"):
        return resolve_model(config.model)
    tasks = load_tasks(config.env, config.split, config.tasks)
    names = shown_subtasks(sorted({task.subtask for task in tasks}), config.subtasks)
    shown = [task for task in tasks if task.subtask in names]
    return warm_start(config.model, config.env, shown, SftSettings(), config.env_addr)


def shown_subtasks(names: Sequence[str], chosen: Sequence[str]) -> list[str]:
    """Sub-tasks of the demonstrations: the chosen ones (none: all), and where they are levels, one
    more. Demonstrations may be harder than RL's tasks: they teach grammar, not tasks.

    >>> shown_subtasks(["depth 1", "depth 2", "depth 3"], ["depth 1"])
    ['depth 1', 'depth 2']
    >>> shown_subtasks(["GoTo", "Pickup", "SynthLoc"], ["GoTo"])
    ['GoTo']
    """
    wanted = set(chosen or names)
    for name in chosen:
        word, _, level = name.rpartition(" ")
        if level.isdigit():
            wanted.add(f"{word} {int(level) + 1}")
    return [name for name in names if name in wanted]
