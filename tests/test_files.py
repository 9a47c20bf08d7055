"""run/files.py: whole or absent, whatever happens in between."""

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from run import files

ROOT = Path(__file__).resolve().parent.parent


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def killed(code, *arguments):
    """Run Python that kills itself; `die` is `kill -9` of itself."""
    start = "import os, signal, sys\nfrom pathlib import Path\nfrom run import files\n"
    start += "def die(*_, **__): os.kill(os.getpid(), signal.SIGKILL)\n"
    command = [sys.executable, "-c", start + code, *map(str, arguments)]
    assert subprocess.run(command, cwd=ROOT).returncode == -signal.SIGKILL


def test_a_file_is_written_in_utf8_and_its_folders_are_made(tmp_path):
    path = tmp_path / "a" / "b.txt"
    files.write_text(path, "ü\n")
    assert path.read_bytes() == "ü\n".encode()
    files.write_json(path, {"x": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        files.write_json(path, {"x": float("nan")})
    assert path.read_text() == '{\n "x": 1\n}\n' and names(path.parent) == ["b.txt"]


@pytest.mark.parametrize("place", ["os.fsync", "os.replace"])
def test_a_kill_before_the_rename_leaves_the_old_content(tmp_path, place):
    path = tmp_path / "a.txt"
    path.write_text("old")
    killed(f"{place} = die\nfiles.write_text(Path(sys.argv[1]), 'new')", path)
    assert path.read_text() == "old" and len(names(tmp_path)) == 2
    files.sweep(tmp_path)
    assert names(tmp_path) == ["a.txt"]


def test_an_error_in_the_block_leaves_the_old_content_and_no_litter(tmp_path):
    path = tmp_path / "a.png"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), files.aside(path) as new:
        assert new.parent == path.parent and new.suffix == ".png"
        new.write_text("half")
        raise ZeroDivisionError
    assert path.read_text() == "old" and names(tmp_path) == ["a.png"]


# --- Folders -------------------------------------------------------------------------------------


def test_a_new_folder_is_on_the_disk_with_every_folder_above_it_that_is_new(tmp_path, monkeypatch):
    flushed = set()
    monkeypatch.setattr(files, "flush", flushed.add)
    files.make_folder(tmp_path / "a" / "b" / "c")
    assert flushed == {tmp_path, tmp_path / "a", tmp_path / "a" / "b"}


def test_two_builders_at_once_leave_what_one_of_them_built(tmp_path):
    both_built = threading.Barrier(2, timeout=10)
    folder, errors = tmp_path / "cache" / "model", []

    def build(new):
        for name in ("a.txt", "b.txt"):
            (new / name).write_text(threading.current_thread().name)
        both_built.wait()

    def run():
        try:
            files.build_folder(folder, build)
        except BaseException as error:
            errors.append(error)

    builders = [threading.Thread(target=run, name=name) for name in ("one", "two")]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join()
    assert errors == []
    assert names(folder.parent) == ["model"] and names(folder) == ["a.txt", "b.txt"]
    assert (folder / "a.txt").read_text() == (folder / "b.txt").read_text()
    assert folder.stat().st_mode & 0o777 == 0o755, "others may read it"


def test_a_builder_that_fails_leaves_nothing(tmp_path):
    def build(new):
        (new / "a.txt").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        files.build_folder(tmp_path / "model", build)
    assert names(tmp_path) == []


def folder_with(path, text):
    path.mkdir()
    for name in ("a.txt", "b.txt"):
        (path / name).write_text(text)
    return path


# calls of Path.rename that a kill lets happen -> what is found then
@pytest.mark.parametrize(("renames", "content"), [(0, "old"), (1, "old"), (2, "new")])
def test_a_kill_while_a_folder_takes_anothers_place_leaves_one_of_the_two_whole(
    tmp_path, renames, content
):
    old, new = folder_with(tmp_path / "step_1", "old"), folder_with(tmp_path / ".new-1", "new")
    code = """
calls, rename = [], Path.rename
def counted(self, target):
    if len(calls) == int(sys.argv[3]):
        die()
    calls.append(target)
    return rename(self, target)
Path.rename = counted
os.unlink = die  # while the old one is deleted
files.finish_folder(*map(Path, sys.argv[1:3]))
"""
    killed(code, new, old, renames)
    assert old.exists() == (renames != 1)
    for _ in range(2):  # a second time changes nothing
        files.sweep(tmp_path)
        assert names(tmp_path) == ["step_1"]
        assert [(old / name).read_text() for name in names(old)] == [content] * 2


def test_a_kill_in_the_middle_of_a_removal_leaves_nothing_under_the_name(tmp_path):
    folder = folder_with(tmp_path / "step_1", "old")
    killed("os.unlink = die\nfiles.remove_folder(Path(sys.argv[1]))", folder)
    assert not folder.exists() and len(names(tmp_path)) == 1
    files.sweep(tmp_path)
    assert names(tmp_path) == []


def test_sweeping_leaves_alone_what_is_finished(tmp_path):
    finished = folder_with(tmp_path / "eval", "{}")
    (tmp_path / ".lock").touch()
    folder_with(finished / ".new-1-x", "half")
    (finished / ".new-2-c.json").write_text("{")
    (tmp_path / ".new-3-link").symlink_to(finished)
    files.sweep(tmp_path)
    assert names(tmp_path) == [".lock", "eval"] and names(finished) == ["a.txt", "b.txt"]
