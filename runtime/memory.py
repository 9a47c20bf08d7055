"""Memory: how much each phase of a step takes, and what to lower when it does not fit.

    rollout      the sampler's weights, keys and values
    log-probs    one micro-batch's activations, layer by layer
    update       those of all layers (--gradient-checkpointing: of one), gradients, moments
    sync         one parameter at a time

Peaks are measured anew in each phase, of the accelerator where there is one, else of the process.
`recipes/memory.py` says beforehand what to expect.

Read next: `runtime/rundir.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import resource
from collections.abc import Iterator
from pathlib import Path

import torch

from config import Config


def peak() -> int:
    """Peak bytes of the accelerator, or of this process where there is none, since the last
    `reset_peak`."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    with contextlib.suppress(OSError, ValueError, IndexError):
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset_peak() -> None:
    """Begin to measure the peak anew, where the system lets us."""
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


class OutOfMemory(RuntimeError):
    """A phase of the step does not fit; the message names the options that make it smaller."""


# Phase -> what to lower, most effective first.
SMALLER = {
    "time/rollout_s": ("max_trajectory_tokens", "tasks_per_step"),
    "time/log_probs_s": ("max_tokens_per_micro_batch",),
    "time/update_s": ("max_tokens_per_micro_batch", "max_trajectory_tokens"),
}


@contextlib.contextmanager
def advice(phase: str, config: Config | None) -> Iterator[None]:
    """Turn a failed allocation, of torch or of the system, into one line that says what to do."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        text = str(error) or type(error).__name__
        lacking = isinstance(error, MemoryError) or any(
            words in text.lower() for words in ("out of memory", "can't allocate memory")
        )
        if not lacking or isinstance(error, OutOfMemory):
            raise
        names = SMALLER.get(phase, ()) if config else ()
        flags = [f"--{n.replace('_', '-')} (now {getattr(config, n)})" for n in names]
        if phase in ("time/log_probs_s", "time/update_s"):
            flags.append("use --gradient-checkpointing, --lora-rank, or more processes")
        smaller = f"; lower {', or '.join(flags)}" if flags else ""
        name = phase.removeprefix("time/").removesuffix("_s")
        raise OutOfMemory(
            f"out of memory in {name}: {text.splitlines()[0][:200]}{smaller}"
        ) from error


def return_freed() -> None:
    """Hand the C library's free pages back to the system, so that the process does not grow.

    Batches differ in length from step to step, and on a CPU torch's buffers come from a heap that
    fragments: what was freed between two live buffers stays with the process unless asked for.
    """
    with contextlib.suppress(OSError, AttributeError):  # another C library looks after itself
        ctypes.CDLL(None).malloc_trim(0)
