"""run/rundir.py: a run's directory, what lies in it, and how it was begun."""

import contextlib
import json
import re
import shutil
import subprocess
import sys

import pytest

from config import Config, Misuse
from run import rundir


def test_a_resumed_run_keeps_how_it_was_begun(tmp_path, monkeypatch):
    """Two resumes: neither takes the first command's place."""
    for number, words in enumerate((["train.py"], ["train.py", "--resume"], ["again", "--resume"])):
        monkeypatch.setattr(sys, "argv", words)
        rundir.open_run(Config(run_dir=str(tmp_path), resume=number > 0)).close()
    about = json.loads((tmp_path / "config.json").read_text())
    assert about["command"] == "again --resume" and about["begun"]["command"] == "train.py"
    assert about["begun"].keys() == {"versions", "git_commit", "hardware", "command"}
    assert about["config"]["resume"] is True


def test_a_directory_that_another_run_uses_is_refused(tmp_path):
    first, second = Config(run_dir=str(tmp_path)), Config(run_dir=str(tmp_path), resume=True)
    in_use = pytest.raises(Misuse, match="in use by another process")
    with contextlib.closing(rundir.open_run(first)), in_use:
        rundir.open_run(second)


def test_the_commit_of_changed_files_says_so(tmp_path, monkeypatch):
    if shutil.which("git") is None:
        pytest.skip("NOT TESTED: no git")
    monkeypatch.setattr(rundir, "__file__", str(tmp_path / "rundir.py"))
    (tmp_path / "rundir.py").write_text("one")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=n@example.org"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    clean = rundir.provenance()["git_commit"]
    (tmp_path / "rundir.py").write_text("two")
    assert re.fullmatch("[0-9a-f]{40}", clean)
    assert rundir.provenance()["git_commit"] == f"{clean}-dirty"


def test_a_run_directory_that_not_all_processes_see_is_refused_and_left_as_it_was(
    tmp_path, monkeypatch
):
    """On several nodes without a shared disk each would write its shards to its own."""
    monkeypatch.setattr(rundir.distributed, "gather", lambda seen: [seen, False])
    with pytest.raises(Misuse, match=r"not on a disk that all processes share \(rank 1 cannot"):
        rundir.open_run(Config(run_dir=str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()
