"""run/processes.py: a child process ends with its parent. The programs started this way
are tested in test_envclient.py and test_fleet.py."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from run.processes import NotReady, child

ROOT = Path(__file__).resolve().parent.parent
# Prints its process id and that of a child, which does not notice when its parent ends.
PARENT = """
import os, subprocess, sys, time
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("arguments", *sys.argv[1:], flush=True)
print("ready", os.getpid(), grandchild.pid, flush=True)
time.sleep(60)
"""


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(condition):
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A function that makes a module of Python code for `python -m` and returns its name."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def make(code):
        (tmp_path / "child_module.py").write_text(code)
        return "child_module"

    return make


def read_pids(server):
    """Wait for the process ids that PARENT prints."""

    def pids():
        line = server.stdout().rpartition("ready ")[2]
        return list(map(int, line.split())) if line.endswith("\n") else None

    return server.wait_until(pids, 30)


def test_a_child_and_its_own_children_end_with_the_block(module):
    with pytest.raises(ZeroDivisionError), child(module(PARENT), "--port", "1 2") as server:
        pids = read_pids(server)
        assert server.stdout().startswith("arguments --port 1 2\n") and server.stderr() == ""
        assert server.process.pid == pids[0] and all(map(is_alive, pids))
        raise ZeroDivisionError
    wait_until(lambda: not any(map(is_alive, pids)))


def test_a_child_and_its_own_children_end_with_their_parent(module):
    code = """
import sys, time
from run.processes import child
with child(sys.argv[1]) as server:
    server.wait_until(lambda: "ready" in server.stdout(), 30)
    print(server.stdout().rpartition("ready ")[2], flush=True)
    time.sleep(60)
"""
    command = [sys.executable, "-c", code, module(PARENT)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT, text=True) as parent:
        pids = list(map(int, parent.stdout.readline().split()))
        assert len(pids) == 2 and all(map(is_alive, pids))
        os.kill(parent.pid, signal.SIGKILL)
    wait_until(lambda: not any(map(is_alive, pids)))


def test_the_error_contains_the_output_of_a_child_that_failed(module):
    failing = module("import sys; print('loading', flush=True); sys.exit('no such card')")
    with (
        pytest.raises(NotReady, match=r"^exited with code 1 at startup:\nloading\nno such card\n$"),
        child(failing) as server,
    ):
        server.wait_until(lambda: None, 30)
    with (
        pytest.raises(NotReady, match=r"^is not ready after 0.5 s:\nloading\n$"),
        child(module("import time; print('loading', flush=True); time.sleep(60)")) as server,
    ):
        server.wait_until(lambda: None, 0.5)
