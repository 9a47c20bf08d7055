"""Errors that end a run in one line for the user, and the exit codes of every program.

    0    done
    1    RunFailed: something failed at run time (also OSError: the disk is full or gone)
    2    Misuse: an option, or what it names, cannot work; nothing was written
    130  stopped by Ctrl-C, after saving

Any other exception is a bug and shows its traceback.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


class Misuse(ValueError):
    """An option, or what it names, cannot work; the message says what to do."""


class RunFailed(RuntimeError):
    """A run cannot go on; the message says why, in one line."""


class TrainingError(RunFailed):
    """Training itself cannot continue, for example because it collapsed."""


class EngineError(RunFailed):
    """The sampler failed."""


class SyncError(RunFailed):
    """The sampler holds other weights than the trainer."""


class RankError(RunFailed):
    """Something failed on one rank; every rank raises this, naming it."""


class CheckpointError(RunFailed):
    """A checkpoint cannot be written or read."""


class OutOfMemory(RunFailed):
    """A phase of the step does not fit; the message names the options that make it smaller."""


class TooManyEnvFailures(RunFailed):
    """More trajectories were lost to the environment servers than a run may ignore."""


@contextlib.contextmanager
def value_errors_as_misuse() -> Iterator[None]:
    """Turn a ValueError raised inside into Misuse; elsewhere a ValueError is a bug."""
    try:
        yield
    except ValueError as error:
        raise Misuse(str(error)) from error


def print_error(prog: str, problem: object) -> None:
    """Print one line on stderr, however many lines the problem's own text has."""
    print(f"{prog}: {' '.join(str(problem).split())}", file=sys.stderr, flush=True)
