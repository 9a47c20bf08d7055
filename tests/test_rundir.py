"""runtime/rundir.py: what a run does to the machine it runs on. Its files: test_train.py."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_freed_pages_between_live_ones_go_back_to_the_system():
    code = """
import torch
from runtime.clock import return_freed
def megabytes():
    return int(open("/proc/self/statm").read().split()[1]) * 4096 // 2**20
before = megabytes()
blocks = [torch.ones(25_000) for _ in range(3_000)]  # 300 MB in blocks of the heap
blocks = blocks[::50]
held = megabytes() - before
return_freed()
print(held, megabytes() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    held, left = map(int, done.stdout.split())
    assert held > 200  # the C library keeps them: if it no longer does, ours can go
    assert left < 100
