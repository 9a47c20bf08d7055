"""run/files.py: whole or absent, whatever happens in between."""

import os
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
    """Run Python that is to kill itself; `die` is `kill -9` of itself."""
    start = "import os, signal, sys\nfrom pathlib import Path\nfrom runtime import files\n"
    start += "def die(*_, **__): os.kill(os.getpid(), signal.SIGKILL)\n"
    command = [sys.executable, "-c", start + code, *map(str, arguments)]
    assert subprocess.run(command, cwd=ROOT).returncode == -signal.SIGKILL


# --- Files ---------------------------------------------------------------------------------------


def test_a_file_is_written_in_utf8_and_its_folders_are_made(tmp_path):
    path = tmp_path / "a" / "b.txt"
    files.write_text(path, "ü\n")
    assert path.read_bytes() == "ü\n".encode()
    files.write_json(path, {"x": 1})
    assert path.read_text() == '{\n "x": 1\n}\n'
    assert names(path.parent) == ["b.txt"]


@pytest.mark.parametrize("place", ["files.flush", "os.fsync", "os.replace"])
def test_a_kill_before_the_rename_leaves_the_old_content(tmp_path, place):
    path = tmp_path / "a.txt"
    path.write_text("old")
    killed(f"{place} = die\nfiles.write_text(Path(sys.argv[1]), 'new')", path)
    assert path.read_text() == "old"
    visible = [name for name in names(tmp_path) if not name.startswith(".")]
    assert visible == ["a.txt"] and len(names(tmp_path)) == 2
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


def test_a_number_that_json_does_not_know_is_refused_before_anything_is_written(tmp_path):
    path = tmp_path / "a.json"
    path.write_text("old")
    with pytest.raises(ValueError, match="not JSON compliant"):
        files.write_json(path, {"x": float("nan")})
    assert path.read_text() == "old" and names(tmp_path) == ["a.json"]


def test_a_link_is_replaced_and_not_what_it_points_to(tmp_path):
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        with files.aside(tmp_path / "best") as new:
            new.symlink_to(name)
        assert os.readlink(tmp_path / "best") == name
    assert names(tmp_path) == ["best", "one", "two"]


def test_who_reads_while_two_write_sees_one_of_them_whole(tmp_path):
    path = tmp_path / "a.txt"
    texts = ["a" * 100_000, "b" * 200_000]
    path.write_text(texts[0])

    def write(text):
        for _ in range(20):
            files.write_text(path, text)

    writers = [threading.Thread(target=write, args=(text,)) for text in texts]
    for writer in writers:
        writer.start()
    while any(writer.is_alive() for writer in writers):
        assert path.read_text() in texts
    assert names(tmp_path) == ["a.txt"]


# --- Folders -------------------------------------------------------------------------------------


def test_a_folder_has_its_name_only_when_it_is_built(tmp_path):
    folder = tmp_path / "cache" / "model"

    def build(new):
        assert not folder.exists() and new.parent == folder.parent
        (new / "part").mkdir()
        (new / "part" / "a.txt").write_text("whole")

    files.build_folder(folder, build)
    assert (folder / "part" / "a.txt").read_text() == "whole"
    assert names(folder.parent) == ["model"]
    assert folder.stat().st_mode & 0o777 == 0o755, "others may read it"


def test_a_builder_that_fails_leaves_nothing(tmp_path):
    def build(new):
        (new / "a.txt").write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        files.build_folder(tmp_path / "model", build)
    assert names(tmp_path) == []


@pytest.mark.parametrize("place", ["Path.write_text", "os.fsync", "Path.rename"])
def test_a_builder_that_is_killed_leaves_nothing_under_the_name(tmp_path, place):
    build = "lambda new: (new / 'a.txt').write_text('half')"
    killed(f"{place} = die\nfiles.build_folder(Path(sys.argv[1]), {build})", tmp_path / "model")
    assert [name for name in names(tmp_path) if not name.startswith(".new-")] == []
    files.sweep(tmp_path)
    assert names(tmp_path) == []


def test_two_builders_at_once_leave_what_one_of_them_built(tmp_path):
    both_built = threading.Barrier(2, timeout=10)

    def build(new):
        for name in ("a.txt", "b.txt"):
            (new / name).write_text(threading.current_thread().name)
        both_built.wait()

    errors = []

    def run():
        try:
            files.build_folder(tmp_path / "model", build)
        except BaseException as error:
            errors.append(error)

    builders = [threading.Thread(target=run, name=name) for name in ("one", "two")]
    for builder in builders:
        builder.start()
    for builder in builders:
        builder.join()
    assert errors == []
    assert names(tmp_path) == ["model"] and names(tmp_path / "model") == ["a.txt", "b.txt"]
    first, second = ((tmp_path / "model" / name).read_text() for name in ("a.txt", "b.txt"))
    assert first == second


def folder_with(path, text):
    path.mkdir()
    for name in ("a.txt", "b.txt"):
        (path / name).write_text(text)
    return path


def test_a_finished_folder_takes_the_place_of_the_one_before(tmp_path):
    old = folder_with(tmp_path / "step_1", "old")
    new = files.new_folder(old)
    (new / "a.txt").write_text("new")
    files.finish_folder(new, old)
    assert names(tmp_path) == ["step_1"] and names(old) == ["a.txt"]
    assert (old / "a.txt").read_text() == "new"


def test_a_kill_while_the_one_before_is_deleted_finds_the_new_one_in_its_place(tmp_path):
    old, new = folder_with(tmp_path / "step_1", "old"), folder_with(tmp_path / ".new-1", "new")
    code = "os.unlink = die\nfiles.finish_folder(*map(Path, sys.argv[1:]))"
    killed(code, new, old)
    assert [(old / name).read_text() for name in names(old)] == ["new", "new"]
    files.sweep(tmp_path)
    assert names(tmp_path) == ["step_1"]


@pytest.mark.parametrize("when", [0, 1, 2])
def test_a_kill_before_between_or_after_the_two_renames_leaves_one_of_the_two_whole(tmp_path, when):
    old, new = folder_with(tmp_path / "step_1", "old"), folder_with(tmp_path / ".new-1", "new")
    code = """
renames, rename = [], Path.rename
def counted(self, target):
    if len(renames) == int(sys.argv[3]):
        die()
    renames.append(target)
    return rename(self, target)
Path.rename = counted
files.finish_folder(*map(Path, sys.argv[1:3]))
die()
"""
    killed(code, new, old, when)
    assert old.exists() == (when != 1)
    for _ in range(2):  # a second time changes nothing
        files.sweep(tmp_path)
        assert names(tmp_path) == ["step_1"]
        content = "new" if when == 2 else "old"
        assert [(old / name).read_text() for name in names(old)] == [content] * 2


def test_a_kill_in_the_middle_of_a_removal_leaves_nothing_under_the_name(tmp_path):
    folder = folder_with(tmp_path / "step_1", "old")
    killed("os.unlink = die\nfiles.remove_folder(Path(sys.argv[1]))", folder)
    assert not folder.exists() and len(names(tmp_path)) == 1
    files.sweep(tmp_path)
    assert names(tmp_path) == []


def test_sweeping_leaves_alone_what_is_finished(tmp_path):
    kept = folder_with(tmp_path / "eval", "{}")
    (tmp_path / ".lock").touch()
    folder_with(kept / ".new-1-x", "half")
    (kept / ".new-2-c.json").write_text("{")
    (tmp_path / ".new-3-link").symlink_to(kept)
    files.sweep(tmp_path)
    assert names(tmp_path) == [".lock", "eval"] and names(kept) == ["a.txt", "b.txt"]
