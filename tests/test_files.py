"""run/files.py: files and folders are complete or absent, even after a kill or an error."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from run import files

ROOT = Path(__file__).resolve().parent.parent


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def run_until_killed(code, *arguments):
    """Run Python code in a process that kills itself by calling `die` (`kill -9`)."""
    start = "import os, signal, sys\nfrom pathlib import Path\nfrom run import files\n"
    start += "def die(*_, **__): os.kill(os.getpid(), signal.SIGKILL)\n"
    command = [sys.executable, "-c", start + code, *map(str, arguments)]
    assert subprocess.run(command, cwd=ROOT).returncode == -signal.SIGKILL


def make_folder(path, text):
    path.mkdir()
    for name in ("a.txt", "b.txt"):
        (path / name).write_text(text)
    return path


def test_a_users_file_is_read_only_if_reading_it_ends(tmp_path):
    (tmp_path / "text").write_bytes("\ufeffü".encode())
    assert files.read_text(tmp_path / "text") == "ü"
    os.mkfifo(tmp_path / "pipe")
    os.truncate(tmp_path / "text", 1 << 40)
    for name in ("pipe", ".", "text", "/dev/zero", "nosuch"):
        with pytest.raises(ValueError, match=name):
            files.read_text(tmp_path / name)


def test_a_file_is_written_in_utf8_and_missing_folders_are_made(tmp_path, monkeypatch):
    flushed, flush = set(), files.flush
    monkeypatch.setattr(files, "flush", lambda path: (flushed.add(path), flush(path)))
    path = tmp_path / "a" / "b" / "c.txt"
    files.write_text(path, "ü\n")
    assert path.read_bytes() == "ü\n".encode()
    assert {tmp_path, tmp_path / "a", path.parent} <= flushed, "a lost folder loses its files"
    files.write_json(path, {"x": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        files.write_json(path, {"x": float("nan")})
    assert path.read_text() == '{\n "x": 1\n}\n' and names(path.parent) == ["c.txt"]


@pytest.mark.parametrize("function", ["os.fsync", "os.replace"])
def test_a_kill_before_the_rename_leaves_the_old_content(tmp_path, function):
    path = tmp_path / "a.txt"
    path.write_text("old")
    run_until_killed(f"{function} = die\nfiles.write_text(Path(sys.argv[1]), 'new')", path)
    assert path.read_text() == "old" and len(names(tmp_path)) == 2
    files.sweep(tmp_path)
    assert names(tmp_path) == ["a.txt"]


def test_an_error_leaves_the_old_content_and_no_unfinished_files(tmp_path):
    path = tmp_path / "a.png"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), files.atomic_path(path) as new:
        assert new.parent == path.parent and new.suffix == ".png"
        new.write_text("half")
        raise ZeroDivisionError

    def build(new):
        (new / "a.txt").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        files.build_folder(tmp_path / "model", build)
    assert path.read_text() == "old" and names(tmp_path) == ["a.png"]


def test_if_two_processes_build_a_folder_the_first_result_is_kept(tmp_path):
    folder = tmp_path / "cache" / "model"

    def build(new):
        files.build_folder(folder, lambda first: (first / "a.txt").write_text("first"))
        (new / "a.txt").write_text("second")

    files.build_folder(folder, build)
    assert names(folder.parent) == ["model"] and names(folder) == ["a.txt"]
    assert (folder / "a.txt").read_text() == "first"
    assert folder.stat().st_mode & 0o777 == 0o755, "other users can read it"


def test_a_kill_during_a_removal_leaves_nothing_under_the_name(tmp_path):
    folder = make_folder(tmp_path / "step_1", "old")
    run_until_killed("os.unlink = die\nfiles.remove_folder(Path(sys.argv[1]))", folder)
    assert not folder.exists() and len(names(tmp_path)) == 1
    files.sweep(tmp_path)
    assert names(tmp_path) == []


def test_sweep_deletes_only_unfinished_files(tmp_path):
    finished = make_folder(tmp_path / "eval", "{}")
    (tmp_path / ".lock").touch()
    make_folder(finished / ".new-1-x", "half")
    (finished / ".new-2-c.json").write_text("{")
    (tmp_path / ".new-3-link").symlink_to(finished)
    files.sweep(tmp_path)
    assert names(tmp_path) == [".lock", "eval"] and names(finished) == ["a.txt", "b.txt"]
