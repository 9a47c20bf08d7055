"""run/rundir.py: what a run does to the machine it runs on, and what it finds in its directory.
Its other files: test_train.py."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from config import Config, Misuse, saved_config
from run import rundir

ROOT = Path(__file__).resolve().parent.parent


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's malloc")
def test_freed_pages_between_live_ones_go_back_to_the_system():
    code = """
import torch
from run.clock import return_freed
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


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "{}", '{"config": null}', '{"config": [1]}', "\xff"]
)
def test_a_config_that_cannot_be_read_is_named_in_one_line(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_text(content, encoding="latin-1")
    with pytest.raises(Misuse) as error:
        saved_config(str(tmp_path))
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_options_of_a_config_are_read_back(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"config": {"seed": 3, "rounds": [2, 4]}}))
    saved = saved_config(str(tmp_path))
    assert (saved.seed, saved.rounds, saved.resume) == (3, (2, 4), True)


def test_a_resumed_run_keeps_how_it_was_begun(tmp_path, monkeypatch):
    """Two resumes: neither takes the first command's place."""
    for number, words in enumerate((["train.py"], ["train.py", "--resume"], ["again", "--resume"])):
        monkeypatch.setattr(sys, "argv", words)
        rundir.open_run(Config(run_dir=str(tmp_path), resume=number > 0)).close()
    said = json.loads((tmp_path / "config.json").read_text())
    assert said["command"] == "again --resume" and said["begun"]["command"] == "train.py"
    assert said["begun"].keys() == {"versions", "git_commit", "hardware", "command"}
    assert said["config"]["resume"] is True


def test_the_commit_of_changed_files_says_so(tmp_path, monkeypatch):
    if shutil.which("git") is None:
        pytest.skip("NOT TESTED: no git")
    folder = tmp_path / "runtime"
    folder.mkdir()
    monkeypatch.setattr(rundir, "__file__", str(folder / "rundir.py"))
    (folder / "rundir.py").write_text("one")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=n@example.org"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    clean = rundir.circumstances()["git_commit"]
    (folder / "rundir.py").write_text("two")
    assert re.fullmatch("[0-9a-f]{40}", clean)
    assert rundir.circumstances()["git_commit"] == f"{clean}-dirty"


def test_a_run_directory_that_not_all_processes_see_is_refused_and_left_as_it_was(
    tmp_path, monkeypatch
):
    """On several nodes without a shared disk each would write its shards to its own."""
    monkeypatch.setattr(rundir.distributed, "gather", lambda seen: [seen, False])
    with pytest.raises(Misuse, match=r"not on a disk that all processes see \(rank 1 does not\)"):
        rundir.open_run(Config(run_dir=str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()
