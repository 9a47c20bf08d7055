"""A clock measures the time and peak memory of each phase of a step.

The memory of each phase is dominated by:

    rollout      the sampler's weights, keys and values
    log-probs    activations of one micro-batch, one layer at a time
    update       activations of all layers (one with --gradient-checkpointing), gradients, moments
    sync         one parameter at a time

The peak is that of the accelerator, or of the process if there is none; `recipes/memory.py`
predicts it. If a phase runs out of memory, the error says which options to lower.

Read next: `run/rundir.py`.
"""

from __future__ import annotations

import contextlib
import ctypes
import resource
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from run.errors import OutOfMemory

MEASURED_PHASES = ("rollout", "log_probs", "update", "sync")
MEMORY_OF = {f"time/{phase}_s": f"memory/{phase}_bytes" for phase in MEASURED_PHASES}
# phase -> options to lower, most effective first
OPTIONS_TO_LOWER = {
    "time/rollout_s": ("max_trajectory_tokens", "tasks_per_step"),
    "time/log_probs_s": ("max_tokens_per_micro_batch",),
    "time/update_s": ("max_tokens_per_micro_batch", "max_trajectory_tokens"),
}

# Memory of a sleeping sampler. torch counts it as allocated, although it is free on the GPU.
asleep_bytes = 0


class Clock:
    """Measures seconds and peak bytes per phase.

    >>> clock = Clock()
    >>> with clock("time/update_s"):
    ...     pass
    >>> sorted(clock.values)
    ['memory/update_bytes', 'time/update_s']

    Args:
        options: the run's options by name; an `OutOfMemory` error says which ones to lower.
    """

    def __init__(self, options: Mapping[str, Any] | None = None) -> None:
        self.options = options or {}
        self.values: dict[str, float] = {}
        self.cpu_s: dict[str, float] = {}  # phase -> CPU seconds of this process and its threads
        self._start_s = time.perf_counter()

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Measure the block as phase `name`. Raises OutOfMemory if an allocation in it fails."""
        reset_peak()
        start_s, start_cpu_s = time.perf_counter(), time.process_time()
        with advice(name, self.options):
            yield
        self.values[name] = time.perf_counter() - start_s
        self.cpu_s[name] = time.process_time() - start_cpu_s
        if name in MEMORY_OF:
            self.values[MEMORY_OF[name]] = peak()
            release_memory()

    def total(self) -> float:
        """Seconds since this clock was created."""
        return time.perf_counter() - self._start_s

    def peak_bytes(self) -> float:
        return max(self.values.get(name, 0) for name in MEMORY_OF.values())


def peak() -> int:
    """Peak bytes since the last `reset_peak`."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() - asleep_bytes
    with contextlib.suppress(OSError, IndexError):  # some sandboxes do not report VmHWM
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    unit = 1 if sys.platform == "darwin" else 1024  # bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
    with contextlib.suppress(OSError):  # some containers forbid it
        Path("/proc/self/clear_refs").write_text("5")


@contextlib.contextmanager
def advice(phase: str, options: Mapping[str, Any] | None = None) -> Iterator[None]:
    """Turn a failed allocation into OutOfMemory, whose message names the options to lower."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        text = str(error) or type(error).__name__
        phrases = ("out of memory", "can't allocate memory")
        is_memory = isinstance(error, MemoryError) or any(p in text.lower() for p in phrases)
        if not is_memory or isinstance(error, OutOfMemory):
            raise
        options = options or {}
        names = [name for name in OPTIONS_TO_LOWER.get(phase, ()) if name in options]
        flags = [f"--{name.replace('_', '-')} (now {options[name]})" for name in names]
        if phase in ("time/log_probs_s", "time/update_s"):
            flags.append("use --gradient-checkpointing, --lora-rank, or more processes")
        what_to_lower = f"; lower {', or '.join(flags)}" if flags else ""
        name = phase.removeprefix("time/").removesuffix("_s")
        raise OutOfMemory(
            f"out of memory in {name}: {text.splitlines()[0][:200]}{what_to_lower}"
        ) from error


def clear_frames(error: BaseException | None) -> None:
    """Free what the frames of an error's traceback hold: after a failed pass, its activations."""
    while error:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    release_memory()


def release_memory() -> None:
    """Return freed memory to the GPU and the system, so that the next phase can use it.

    torch keeps GPU memory that its tensors no longer use, so a sampler on the same GPU can run out:
    after the first update of a 3B model on an H200, vLLM could not wake up. On a CPU the heap
    becomes fragmented, and the process keeps freed pages that lie between live buffers.
    """
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    with contextlib.suppress(OSError, AttributeError):  # malloc_trim is only in glibc
        ctypes.CDLL(None).malloc_trim(0)
