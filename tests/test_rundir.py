"""run/rundir.py: a run's directory, its lock and its provenance."""

import contextlib
import json
import re
import shlex
import shutil
import subprocess
import sys

import pytest

from config import Config, Misuse
from run import rundir


def test_a_resumed_run_keeps_the_provenance_of_its_start(tmp_path, monkeypatch):
    """It is resumed twice, and the first command is still there."""
    commands = (["train.py"], ["train.py", "--resume"], ["again", "--resume"])
    for number, command in enumerate(commands):
        monkeypatch.setattr(sys, "argv", command)
        (tmp_path / ".new-1-step_000001").touch()  # from a killed process
        rundir.open_run(Config(run_dir=str(tmp_path), resume=number > 0)).close()
    about = json.loads((tmp_path / "config.json").read_text())
    assert about["command"] == "again --resume" and about["begun"]["command"] == "train.py"
    assert about["begun"].keys() == {"versions", "git_commit", "hardware", "command"}
    assert about["config"]["resume"] is True
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "config.json"]


def test_a_directory_that_another_run_uses_is_refused(tmp_path):
    first, second = Config(run_dir=str(tmp_path)), Config(run_dir=str(tmp_path), resume=True)
    is_refused = pytest.raises(Misuse, match="in use by another process")
    with contextlib.closing(rundir.open_run(first)), is_refused:
        rundir.open_run(second)


def test_a_directory_that_cannot_be_used_is_named(tmp_path):
    """It cannot be created, its name is too long, or its lock is a link to another file."""
    file = tmp_path / "file"
    file.write_text("text")
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/.lock").symlink_to(file)
    for path in ("/proc/x", f"{tmp_path}/{'x' * 300}", f"{file}/run", f"{tmp_path}/linked"):
        with pytest.raises(Misuse, match=f"--run-dir {path} cannot be"):
            rundir.open_run(Config(run_dir=path))
    assert file.read_text() == "text"


def test_the_commit_is_marked_as_dirty_if_files_have_changed(tmp_path, monkeypatch):
    if shutil.which("git") is None:
        pytest.skip("NOT TESTED: no git")
    monkeypatch.setattr(rundir, "__file__", str(tmp_path / "rundir.py"))
    (tmp_path / "rundir.py").write_text("one")
    git = ["git", "-C", str(tmp_path), "-c", "user.name=n", "-c", "user.email=n@example.org"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *command], check=True)
    clean = rundir.provenance()["git_commit"]
    (tmp_path / "rundir.py").write_text("two")
    assert re.fullmatch("[0-9a-f]{40}", clean)
    assert rundir.provenance()["git_commit"] == f"{clean}-dirty"


def test_a_run_directory_that_some_process_cannot_see_is_refused_and_deleted(tmp_path, monkeypatch):
    """On several nodes without a shared disk, each would write its shards to its own disk."""
    monkeypatch.setattr(rundir.distributed, "gather", lambda is_visible: [is_visible, False])
    with pytest.raises(Misuse, match=r"not on a disk that all processes share \(rank 1 cannot"):
        rundir.open_run(Config(run_dir=str(tmp_path / "run")))
    assert not (tmp_path / "run").exists()


def test_the_resume_command_works_in_the_folder_where_the_run_was_started(tmp_path, monkeypatch):
    folder = tmp_path / "a folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("PYTHONPATH", "my worlds")
    with contextlib.closing(rundir.open_run(Config(run_dir="my run"))) as run:
        command = run.resume_command()
    assert shlex.split(command)[0] == f"PYTHONPATH={folder}/my worlds"
    assert shlex.split(command)[-1] == "my run"
    subprocess.run(f"{command} --help", shell=True, check=True, stdout=subprocess.DEVNULL)


def test_the_resume_command_preloads_tcmalloc_as_make_train_did(tmp_path, monkeypatch):
    monkeypatch.setenv("LD_PRELOAD", "/lib/libtcmalloc_minimal.so.4:/lib/libgomp.so.1")
    with contextlib.closing(rundir.open_run(Config(run_dir=str(tmp_path)))) as run:
        assert run.resume_command().startswith("LD_PRELOAD=/lib/libtcmalloc_minimal.so.4 ")
