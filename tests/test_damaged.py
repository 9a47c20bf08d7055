"""What a disk can do to a run: half a log, a broken checkpoint. It goes on exactly or says why not.

Before that: what is on the disk when, so that a lost power supply does none of this.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
from toy_env import flags, options, read_metrics, serve, train_main

from reporting.logs import LogError, require_steps
from reporting.metrics import MetricsLogger
from run import checkpoint, files

# --- On the disk, in this order ------------------------------------------------------------------


@pytest.fixture
def flushed(monkeypatch):
    """[(path, its size)] of every fsync."""
    seen, fsync = [], os.fsync

    def noted(descriptor):
        seen.append((os.readlink(f"/proc/self/fd/{descriptor}"), os.fstat(descriptor).st_size))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    return seen


def test_a_line_of_a_log_is_on_the_disk_when_it_is_logged(tmp_path, flushed):
    run_dir = tmp_path / "run"
    with MetricsLogger(run_dir) as logger:
        assert {str(tmp_path), str(run_dir)} <= {path for path, _ in flushed}  # the files' names
        for step in (1, 2):
            logger.log(step, {"train/return_mean": 0.5})
            path = run_dir / "metrics.jsonl"
            assert flushed[-1] == (str(path), path.stat().st_size)
            logger.timings(step, {"time/step_s": 1.5})
            path = run_dir / "timings.jsonl"
            assert flushed[-1] == (str(path), path.stat().st_size)


def test_a_new_folder_is_on_the_disk_with_every_folder_above_it_that_is_new(tmp_path, flushed):
    folder = tmp_path / "a" / "b" / "c"
    files.make_folder(folder)
    above = {str(path) for path in (tmp_path, tmp_path / "a", tmp_path / "a" / "b")}
    assert {path for path, _ in flushed} == above
    flushed.clear()
    files.make_folder(folder)
    assert flushed == []


# --- A log that lacks steps ----------------------------------------------------------------------


def write_log(path, *steps):
    path.write_text("".join(json.dumps({"step": step}) + "\n" for step in steps))
    return path


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ((), "lacks step 1"),
        ((1, 2), "lacks step 3"),
        ((1, 3, 4), "lacks step 2"),
        ((1, 2, 2, 3, 4), "holds a step twice"),
        ((1, 2, 3, 4, 5, 6), None),
        ((1, 2, 3, 4), None),
    ],
)
def test_a_log_with_a_hole_is_named_with_what_to_do(tmp_path, steps, said):
    path = write_log(tmp_path / "metrics.jsonl", *steps)
    if said is None:
        require_steps(path, 4)
        return
    with pytest.raises(LogError, match=f"metrics.jsonl {said}, but .* of step 4: put") as error:
        require_steps(path, 4)
    assert "\n" not in str(error.value)


def test_a_log_that_is_gone_lacks_its_first_step_and_before_the_first_step_nothing(tmp_path):
    with pytest.raises(LogError, match="lacks step 1"):
        require_steps(tmp_path / "metrics.jsonl", 1)
    require_steps(tmp_path / "metrics.jsonl", 0)


# --- A run that was damaged, resumed -------------------------------------------------------------


@pytest.fixture(scope="module")
def world():
    with serve() as url:
        yield url


@pytest.fixture(scope="module")
def whole(world, tmp_path_factory):
    """A run of three steps that nothing happened to, with a checkpoint of each."""
    changes = {"deterministic": True, "steps": 3, "save_every": 1, "keep_last": 9}
    changes |= {"algorithm": "reinforce_plus_plus", "learning_rate": 1e-3}
    settings = options(tmp_path_factory.mktemp("whole"), world, **changes)
    assert train_main(flags(**settings)) == 0
    return Path(settings["run_dir"])


@pytest.fixture
def damaged(whole, tmp_path):
    """A copy of it, to be damaged."""
    return shutil.copytree(whole, tmp_path / "run", symlinks=True)


def resume(run_dir):
    return train_main(["--resume", "--run-dir", str(run_dir)])


def test_a_broken_newest_checkpoint_is_said_and_the_run_ends_as_if_it_had_not_been(
    whole, damaged, capsys
):
    broken = checkpoint.folder_of(damaged, 3)
    os.truncate(broken / "trainer_state/policy/__0_0.distcp", 1000)
    assert resume(damaged) == 0
    said = capsys.readouterr().out
    assert f"{broken}/trainer_state cannot be read" in said and "and step 2 is resumed" in said
    assert checkpoint.steps_saved(damaged) == [1, 2, 3]
    assert (damaged / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()


def test_a_log_that_ends_before_the_checkpoint_is_one_line_and_nothing_is_changed(damaged, capsys):
    log = damaged / "metrics.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:1]))
    before = log.read_bytes()
    assert resume(damaged) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{log} lacks step 2, but the newest checkpoint is of step 3" in line
    assert log.read_bytes() == before and len(read_metrics(damaged)) == 1


def test_a_log_with_a_broken_line_inside_is_one_line(damaged, capsys):
    log = damaged / "timings.jsonl"
    log.write_text("{\n" + log.read_text())
    assert resume(damaged) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{log} line 1 is not a JSON object" in line


@pytest.mark.parametrize(
    ("where", "name", "said"),
    [
        ([], "best_step", "it lacks 'best_step'; resume with the version"),
        ([], "kl_controller", "it lacks 'kl_controller'; resume with the version"),
        (["kl_controller"], "value", "it lacks 'value'; resume with the version"),
        (["sentinels"], "best_valid", "best_valid"),
    ],
)
def test_a_state_without_what_this_version_keeps_is_one_line_and_nothing_is_changed(
    damaged, capsys, where, name, said
):
    file = checkpoint.folder_of(damaged, 3) / "trainer_state/state.json"
    state = json.loads(file.read_text())
    inner = state
    for each in where:
        inner = inner[each]
    del inner[name]
    file.write_text(json.dumps(state))
    before = (damaged / "metrics.jsonl").read_bytes()
    assert resume(damaged) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{file} is not what this version writes: " in line and said in line
    assert (damaged / "metrics.jsonl").read_bytes() == before
    assert checkpoint.steps_saved(damaged) == [1, 2, 3]


def test_an_empty_config_is_misuse_that_names_it(damaged, capsys):
    (damaged / "config.json").write_text("")
    assert resume(damaged) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(damaged / "config.json") in line
