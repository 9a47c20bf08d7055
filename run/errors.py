"""Errors that stop a run and are shown to the user as one line, and the exit codes of all programs.

    0    done
    1    RunFailed: something failed at run time (also OSError: the disk is full or gone)
    2    Misuse: an option, or a file that it names, is not usable; nothing was written
    130  stopped by Ctrl-C, SIGTERM or SIGHUP, after saving

Any other exception is a bug and shows its traceback.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator


class Misuse(ValueError):
    """An option, or a file that it names, is not usable; the message says what to do."""


class RunFailed(RuntimeError):
    """A run cannot continue; the message says why in one line."""


class TrainingError(RunFailed):
    """Training cannot continue, for example because the policy collapsed."""


class EngineError(RunFailed):
    """The sampler failed."""


class SyncError(RunFailed):
    """Sampler and trainer have different weights."""


class RankError(RunFailed):
    """One rank failed; every rank raises this error, which names that rank."""


class CheckpointError(RunFailed):
    """A checkpoint cannot be written or read."""


class OutOfMemory(RunFailed):
    """A phase of the step does not fit into memory; the message names options that reduce it."""


class TooManyEnvFailures(RunFailed):
    """The environment servers lost more trajectories than --max-env-failures allows."""


@contextlib.contextmanager
def value_errors_as_misuse() -> Iterator[None]:
    """Turn a ValueError raised in this block into Misuse; elsewhere a ValueError is a bug."""
    try:
        yield
    except ValueError as error:
        raise Misuse(str(error)) from error


def one_line(error: BaseException) -> str:
    """The class and the text of an error."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def print_error(prog: str, problem: object) -> None:
    """Print the problem on stderr as one line, even if its text has several."""
    print(f"{prog}: {' '.join(str(problem).split())}", file=sys.stderr, flush=True)
