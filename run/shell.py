"""How a program that trains is run from a shell: its options, its last words, its exit codes.

    0    done; the last lines say what lies where
    1    a failure at run time, in one line
    2    misuse: an option, or what it names, cannot work; one line, and nothing was written
    130  stopped by Ctrl-C, once all is saved

What only one method can be asked is in its own options. Read next: run/session.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from config import Misuse, Options, RunConfig, complete, refusing
from engines import EngineError
from envclient import EnvError
from envs import names_of
from reporting.logs import read_log
from rollout import TooManyEnvFailures
from run import checkpoint
from run.clock import OutOfMemory
from run.errors import complain
from run.rundir import Run, python
from run.session import TrainingError
from runtime.checks import check, check_here
from runtime.cli import say_remarks, training_options
from runtime.prompts import with_prompt
from runtime.saved import as_kept, check_unchanged, saved_config
from scale import distributed
from scale.sync import SyncError

FAILURES = (
    TrainingError,
    SyncError,
    EngineError,
    EnvError,
    TooManyEnvFailures,
    checkpoint.CheckpointError,
    distributed.RankError,
    OutOfMemory,
    SafetensorError,  # the disk is full
)


def checked(config: Options, check_own: Callable[[Options], None] = lambda config: None) -> Options:
    """Options that were made in Python, complete and checked like those of a command line.

    Raises:
        Misuse: one of them, or what it names, cannot work.
    """
    with refusing():
        config = complete(with_prompt(config))
    check(config)
    check_own(config)
    check_here(config)
    config = as_kept(config)
    if config.resume:
        check_unchanged(config, saved_config(config.run_dir, type(config)))
    return config


def command_line(
    argv: Sequence[str] | None,
    summary: str,
    kind: type[Options],
    train: Callable[[Options], Run],
    check_own: Callable[[Options], None] = lambda config: None,
) -> int:
    """Parse, check, run; misuse is one line and exit code 2, a failure one line and exit code 1."""
    prog = kind.program
    try:
        config = training_options(argv, prog, summary, kind, check_own)
        say_remarks(config, argv)
        run = train(config)
        distributed.say(where_to_look(run, config))
        distributed.leave()
        return 0
    except KeyboardInterrupt:
        distributed.leave()
        return 130
    except Misuse as error:
        return fail(prog, error, 2)
    except (*FAILURES, OSError) as error:  # OSError: the disk is full or gone
        return fail(prog, error, 1)
    except RuntimeError as error:
        if not distributed.is_lost_contact(error):
            raise
        gone = "lost contact with another process, which says why, or its launcher does"
        return fail(prog, RuntimeError(f"{gone} (exitcode -9: out of memory, most likely)"), 1)


def fail(prog: str, error: Exception, code: int) -> int:
    """Say what went wrong, once; the exit code."""
    if distributed.world_size() == 1 and not distributed.rank():
        complain(prog, error)
        return code
    if distributed.rank() == 0:
        complain(prog, error)
    elif not distributed.is_known_to_all(error):
        time.sleep(3)  # when rank 0 says the same, the launcher has ended this process by then
        complain(prog, f"rank {distributed.rank()}: {error}")
    os._exit(code)  # the others may be gone: nothing here can be closed in order


def where_to_look(run: Run, config: RunConfig) -> str:
    """The last words of a run: how it began and ended, and what lies where."""
    has_played = any(run.path.glob("trajectories/*.jsonl"))
    first, *more = names_of(config.env)
    world = f" --env {first}" if more else ""  # of several one at a time is measured
    if not config.needs_world:  # it learned from files, of whatever world
        world = f" --env {first}  (or the world that its texts are of)"
    lines: dict[str, str | Path | None] = {
        "mean return": first_and_last(read_log(run.path / "metrics.jsonl")),
        "the curve": run.path / "reward.png",
        "what it did": f"{python()} replay.py {run.path}" if has_played else None,
        "every number": run.path / "metrics.jsonl",
        "measure it": f"{python()} evaluate.py --run {run.path}{world}",
    }
    words = [f"  {name:<14}{where}" for name, where in lines.items() if where]
    return "\n".join([f"done: {run.path}", *words])


def first_and_last(rows: Sequence[dict[str, Any]]) -> str | None:
    """The mean return at both ends of a run; None where one step tells.

    >>> first_and_last([{"train/return_mean": mean} for mean in (0.25, 0.5, 0.75, 0.75)])
    '0.375 in the first 2 steps, 0.750 in the last 2'

    What iterations explore are other tasks each time:

    >>> first_and_last([{"train/return_mean": mean} for mean in (0.25, 0.5)])
    '0.250 of the first tasks it played, 0.500 of the last'
    """
    means = [row["train/return_mean"] for row in rows if row.get("train/return_mean") is not None]
    count = min(5, len(means) // 2)
    if not count:
        return None
    if count < 2:  # of iterations that explore there are few
        return f"{means[0]:.3f} of the first tasks it played, {means[-1]:.3f} of the last"
    first, last = (sum(part) / count for part in (means[:count], means[-count:]))
    return f"{first:.3f} in the first {count} steps, {last:.3f} in the last {count}"
