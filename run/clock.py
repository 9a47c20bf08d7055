"""Seconds and peak memory of each phase of a step, and what to lower when one does not fit.

    rollout      the sampler's weights, keys and values
    log-probs    activations of one micro-batch, layer by layer
    update       those of all layers (--gradient-checkpointing: of one), gradients, moments
    sync         one parameter at a time

The peak is the accelerator's if there is one, else the process's; `recipes/memory.py` predicts it.

Read next: `run/rundir.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import resource
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from run.errors import OutOfMemory

MEASURED = ("rollout", "log_probs", "update", "sync")
MEMORY_OF = {f"time/{phase}_s": f"memory/{phase}_bytes" for phase in MEASURED}
# phase -> what to lower, most effective first
SMALLER = {
    "time/rollout_s": ("max_trajectory_tokens", "tasks_per_step"),
    "time/log_probs_s": ("max_tokens_per_micro_batch",),
    "time/update_s": ("max_tokens_per_micro_batch", "max_trajectory_tokens"),
}

# Of a sampler that sleeps: torch still counts them as allocated, the card does not.
asleep_bytes = 0


class Clock:
    """Seconds and peak bytes by phase.

    >>> clock = Clock()
    >>> with clock("time/update_s"):
    ...     pass
    >>> sorted(clock.values)
    ['memory/update_bytes', 'time/update_s']

    Args:
        options: the run's options by name, for the advice of `OutOfMemory`.
    """

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self.options = options or {}
        self.values: dict[str, float] = {}
        self._began = time.perf_counter()

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Measure the block as the phase `name`; OutOfMemory if an allocation in it fails."""
        reset_peak()
        began = time.perf_counter()
        with advice(name, self.options):
            yield
        self.values[name] = time.perf_counter() - began
        if name in MEMORY_OF:
            self.values[MEMORY_OF[name]] = peak()
            return_freed()

    def total(self) -> float:
        """Seconds since this clock was made."""
        return time.perf_counter() - self._began

    def peak_bytes(self) -> float:
        return max(self.values.get(name, 0) for name in MEMORY_OF.values())


def peak() -> int:
    """Peak bytes since the last `reset_peak`."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() - asleep_bytes
    with contextlib.suppress(OSError, IndexError):  # some sandboxes lack the line
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(OSError):  # not every container lets us
        Path("/proc/self/clear_refs").write_text("5")


@contextlib.contextmanager
def advice(phase: str, options: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Turn a failed allocation into OutOfMemory, one line that says what to lower."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        text = str(error) or type(error).__name__
        words = ("out of memory", "can't allocate memory")
        is_memory = isinstance(error, MemoryError) or any(w in text.lower() for w in words)
        if not is_memory or isinstance(error, OutOfMemory):
            raise
        options = options or {}
        names = [name for name in SMALLER.get(phase, ()) if name in options]
        flags = [f"--{name.replace('_', '-')} (now {options[name]})" for name in names]
        if phase in ("time/log_probs_s", "time/update_s"):
            flags.append("use --gradient-checkpointing, --lora-rank, or more processes")
        smaller = f"; lower {', or '.join(flags)}" if flags else ""
        name = phase.removeprefix("time/").removesuffix("_s")
        raise OutOfMemory(
            f"out of memory in {name}: {text.splitlines()[0][:200]}{smaller}"
        ) from error


def return_freed() -> None:
    """Hand free memory back to the card and the system, so that no phase pays for another's.

    torch keeps what it has freed, and a sampler on the same card finds none: after the first update
    of a 3B model on an H200 vLLM could not wake. On a CPU the heap fragments, and freed pages
    between live buffers stay with the process.
    """
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    with contextlib.suppress(OSError, AttributeError):  # not glibc
        ctypes.CDLL(None).malloc_trim(0)
