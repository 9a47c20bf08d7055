"""Several worlds in one run: one policy, which plays each of them.

    --env textcraft babyai --env-weights 2 1

    in_each(config)      the options as each world sees them
    tasks_of(config)     all worlds' training tasks; whose turn it is, rollout.py says
    horizons_of(config)  how many turns an episode may take, by world

What is a world's own stays its own: the lists of tasks, the horizon and its schedule, the prompt,
the demonstrations that a warm start begins with, the addresses of its servers, returns and success
in the log. What is the run's is one number for all: where the worlds' presets differ, in how many
samples a task has, say, or how long a trajectory may be, the largest. `best` is the checkpoint with
the highest mean over worlds, each counted once, however many tasks it has.

A batch then holds worlds whose returns are scaled and spread differently. GRPO and RLOO compare
within a group, which is of one task; REINFORCE++ and PPO whiten over the batch, worlds mixed.
`--normalize-per-env` whitens within each world instead (advantages.py; AgentRL, arXiv 2510.04206).

Read first: config.py. Read next: run/worker.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from config import Options, RunConfig, complete, with_preset
from envs import Task, env_name, load_tasks, names_of

# What speaks of one world's tasks, and cannot be said of several at once.
OF_ONE_WORLD = ("tasks", "eval_tasks", "subtasks", "eval_subtasks", "prompt")


def in_each(config: Options) -> list[Options]:
    """The options as each world of the run sees them, complete: its lists, horizon and addresses.

    >>> from config import options
    >>> [(own.env, own.rounds, own.tasks) for own in in_each(options("textcraft+babyai"))]
    [('textcraft', (7,), 'short_train'), ('babyai', (5,), 'simple_train')]
    >>> [own.rounds for own in in_each(options("textcraft+babyai", rounds=(9,)))]
    [(9,), (9,)]
    """
    names = names_of(config.env)
    if len(names) == 1:
        return [config]
    return [
        complete(
            replace(
                config,
                env=name,
                env_weights=(),
                rounds=config.rounds or with_preset(config.preset, name, type(config)).rounds,
                env_addr=addresses_in(config.env_addr, name),
            )
        )
        for name in names
    ]


def addresses_in(given: Sequence[str], name: str) -> tuple[str, ...]:
    """Of `--env-addr NAME=URL ...` those of one world.

    >>> addresses_in(["babyai=http://a:1", "textcraft=http://b:1"], "babyai")
    ('http://a:1',)
    """
    begins = f"{env_name(name)}="
    return tuple(each.removeprefix(begins) for each in given if each.startswith(begins))


def check_mixture(config: RunConfig) -> None:
    """Refuse what several worlds cannot be asked.

    Raises:
        ValueError: one line that says what to do.
    """
    names = names_of(config.env)
    listed = " ".join(names)
    if len(names) == 1:
        if config.env_weights:
            raise ValueError("--env-weights shares steps out among several --env; leave it out")
        return
    called = [env_name(name) for name in names]
    if len(set(called)) < len(called):
        raise ValueError(f"--env {listed} names a world twice")
    weights = config.env_weights
    if weights and (len(weights) != len(names) or min(weights) < 1):
        given = " ".join(map(str, weights))
        raise ValueError(
            f"--env-weights {given}: give each of {listed} a whole number of at least 1"
        )
    for option in OF_ONE_WORLD:
        if getattr(config, option):
            raise ValueError(
                f"--{option.replace('_', '-')} is one world's, and --env names {len(names)}; "
                "leave it out, of --config too: each plays its own lists, under its own prompt"
            )
    for address in config.env_addr:
        if address.partition("=")[0] not in called:
            raise ValueError(f"--env-addr {address}: say whose it is, {called[0]}=http://host:port")


def tasks_of(config: RunConfig) -> list[Task]:
    """Training tasks of all worlds, one world after the other.

    Raises:
        ValueError: two worlds call a task the same, so that nobody could tell whose it was.
    """
    tasks = [
        task
        for own in in_each(config)
        for task in load_tasks(own.env, own.split, own.tasks, own.subtasks)
    ]
    whose: dict[str, str] = {}
    for task in tasks:
        if whose.setdefault(task.task_id, task.env) != task.env:
            raise ValueError(
                f"{whose[task.task_id]} and {task.env} both have a task {task.task_id}; "
                "give one of them an ID_PREFIXES of its own"
            )
    return tasks


def held_out_tasks(config: RunConfig) -> list[Task]:
    """The tasks of --eval-tasks, or the test split, restricted to the chosen sub-tasks; of all
    worlds."""
    if not config.eval_every:
        return []
    return [
        task
        for own in in_each(config)
        for task in load_tasks(
            own.env,
            None if own.eval_tasks else "test",
            own.eval_tasks,
            own.evaluation_subtasks,
        )
    ]


def horizons_of(config: RunConfig) -> dict[str, int]:
    """World -> most turns of an episode that is played to explore: its longest horizon."""
    return {env_name(own.env): max(own.rounds) for own in in_each(config)}


def evaluation_horizons(config: RunConfig) -> dict[str, int]:
    """World -> most turns of an episode that measures."""
    return {env_name(own.env): own.evaluation_rounds for own in in_each(config)}
