"""runtime/malloc.py: a program begins anew with tcmalloc where there is one, once and as it was."""

import os
import subprocess
import sys

import pytest

from runtime import malloc

PROGRAM = """
import os, sys
from runtime import malloc
malloc.FOLDERS = (sys.argv[1],)
print("begins", os.getpid())
malloc.begin_with_tcmalloc()
print("goes on", os.getpid(), sys.argv[2:], os.environ["LD_PRELOAD"], malloc.advice())
"""


@pytest.fixture
def library(tmp_path):
    """One that the loader takes: this system's tcmalloc, else a copy of any library."""
    path = tmp_path / malloc.NAME
    path.symlink_to(malloc.tcmalloc() or f"/proc/self/exe-{malloc.NAME}")
    return path


def begin(folder, *words, **environment):
    kept = {n: v for n, v in os.environ.items() if n not in ("LD_PRELOAD", "AGENT_RL_MALLOC")}
    command = [sys.executable, "-u", "-c", PROGRAM, str(folder), *words]
    ended = subprocess.run(command, env=kept | environment, capture_output=True, text=True)
    return ended.stdout.splitlines(), ended.stderr


def test_the_same_command_begins_anew_in_the_same_process(tmp_path, library):
    lines, _ = begin(tmp_path, "--a", "b c")
    starts = [line for line in lines if line.startswith("begins")]
    assert len(starts) == 2 and starts[0] == starts[1]
    number = starts[0].split()[1]
    assert lines[-1] == f"goes on {number} ['--a', 'b c'] {library} None"


def test_what_was_preloaded_before_still_is(tmp_path, library):
    lines, _ = begin(tmp_path, LD_PRELOAD="libm.so.6")
    assert f"{library}:libm.so.6" in lines[-1]


@pytest.mark.parametrize("reason", ["none there", "asked not to", "has it"])
def test_it_goes_on_as_it_is_where(reason, tmp_path, library):
    environment = {"LD_PRELOAD": ""}
    if reason == "none there":
        library.unlink()
    elif reason == "asked not to":
        environment["AGENT_RL_MALLOC"] = "system"
    else:
        environment["LD_PRELOAD"] = "libtcmalloc_other.so"
    lines, _ = begin(tmp_path, **environment)
    assert len(lines) == 2
    assert ("apt-get install" in lines[1]) == (reason == "none there")
