"""A malloc that suits tensors, for a run on a CPU.

Each phase of a step asks for buffers of megabytes and frees them, in other sizes each time. The C
library hands large ones back to the system at once, which then has to clear every page anew, and
keeps gaps between the others. tcmalloc keeps pages by size: with it an update of the 135M model
took in 1.46 times as many tokens a second, in 2 GB less (benchmarks/default_run.py). So a program
that learns or samples begins once more with it, where the system has it:

    apt-get install libtcmalloc-minimal4       (AGENT_RL_MALLOC=system: not to)

Which malloc a process has is decided before its first line, by LD_PRELOAD: hence the new beginning,
which keeps the process's number. Read next: `run/clock.py`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

NAME = "libtcmalloc_minimal.so.4"
FOLDERS = ("/usr/lib/*-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib")


def tcmalloc() -> Path | None:
    """Its library, where this system has it."""
    root = Path("/")
    found = (f for folder in FOLDERS for f in root.glob(f"{folder[1:]}/{NAME}"))
    return next(found, None)


def has_tcmalloc() -> bool:
    """Whether this process was begun with it."""
    return "tcmalloc" in os.environ.get("LD_PRELOAD", "")


def advice() -> str | None:
    """A line for who could have it, and has not."""
    if has_tcmalloc() or os.environ.get("AGENT_RL_MALLOC") == "system":
        return None
    if tcmalloc():  # begun as a library, or by a program of somebody else's
        return f"LD_PRELOAD={NAME} makes updates on a CPU faster, and they take less memory"
    return "apt-get install libtcmalloc-minimal4 makes updates faster, and they take less memory"


def begin_with_tcmalloc() -> None:
    """Begin this process anew with tcmalloc, the same command in the same place, unless it has
    that, or is not to, or there is none. To be called before anything is loaded or opened."""
    library = tcmalloc()
    if library is None or has_tcmalloc() or os.environ.get("AGENT_RL_MALLOC") == "system":
        return
    before = os.environ.get("LD_PRELOAD")
    preload = f"{library}:{before}" if before else str(library)
    words = [sys.executable, *sys.orig_argv[1:]]
    os.execve(sys.executable, words, os.environ | {"LD_PRELOAD": preload})
