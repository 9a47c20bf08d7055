"""What a run is about to do, in its first lines: a mistake is seen before it has cost hours.

Read next: run/timeleft.py, which says from the first step on how long it takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from config import Config, RunConfig
from runtime.mixture import evaluation_horizons, in_each


def plan(config: RunConfig, path: Path, num_tasks: int, num_held_out: int) -> list[str]:
    """
    Lines to print before anything is loaded.

    Args:
        path: the run's directory.
        num_tasks, num_held_out: tasks to train on, and to measure on.
    """
    c = config
    how = f"adapters of rank {c.lora_rank}" if c.lora_rank else "all weights"
    batch = f"at most {c.trajectories_per_step} trajectories"
    if isinstance(c, Config):
        batch = f"{c.tasks_per_step} tasks x {c.group_size} samples, {horizons(c)}"
    lines = [
        f"run: {c.steps} steps of {c.name}, each of {batch}; files in {path}",
        f"model: {c.model}, {how} learn" + (f", {c.engine} samples" if c.plays else ""),
    ]
    if not c.plays:
        best = "no checkpoint is known as the best (--eval-every)"
        if getattr(c, "hold_out", 0):
            best = "the best checkpoint is the one with the lowest held-out loss"
        return [*lines, f"nothing is played: {best}"]
    worlds = in_each(c)
    tasks = f"tasks: {num_tasks} of {' and '.join(own.env for own in worlds)} to train on"
    if num_held_out and c.eval_every:
        tasks += (
            f"; {num_held_out} held out, {c.eval_samples} samples of each every {c.eval_every} "
            f"steps, {c.samples_at(0)} now, at most {of_each(evaluation_horizons(c))} turns"
        )
    else:
        tasks += "; nothing is held out, so that no checkpoint is known as the best"
    return [*lines, tasks]


def horizons(config: Config) -> str:
    """`at most 10 turns`, or `at most 10, then 20, then 30 turns (100 steps each)`."""
    worlds = in_each(config)
    turns = of_each({own.env: ", then ".join(map(str, own.rounds)) for own in worlds})
    widens = max(len(own.rounds) for own in worlds) > 1
    more = f" ({config.steps_scaling_inter} steps each)" if widens else ""
    return f"at most {turns} turns{more}"


def of_each(values: Mapping[str, object]) -> str:
    """A value, or of several worlds each one's.

    >>> of_each({"textcraft": 7}), of_each({"textcraft": 7, "babyai": 5})
    ('7', '7 (textcraft) and 5 (babyai)')
    """
    if len(values) == 1:
        return str(*values.values())
    return " and ".join(f"{value} ({world})" for world, value in values.items())
