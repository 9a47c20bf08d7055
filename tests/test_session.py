"""run/session.py: what a run knows of itself, and how it goes on after whatever happened to it."""

import contextlib
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load, load_file, save_file
from test_sentinels import HEALTHY, stormy_run
from toy_env import Letters, flags, options, read_metrics, serve, train_main, write_ids

from config import Config
from losses import AdaptiveKLController
from reporting.logs import read_log
from reporting.sentinels import RULES
from run import checkpoint, session
from run.rundir import Run
from run.session import StopRequests
from run.worker import Worker
from scale.default_models import resolve_model


@pytest.fixture
def open_session(tmp_path):
    """Makes sessions of one run, without models and environments."""
    run = Run(tmp_path, is_new=True)
    (tmp_path / "alarms.jsonl").touch()

    def make(kl_controller=None, **changes):
        worker = SimpleNamespace(start="tiny", kl_controller=kl_controller, eval_tasks=[])
        return session.Session(Config(**changes), run, worker, stop=None)

    yield make
    run.close()


# --- What it knows of itself ---------------------------------------------------------------------

BROKEN = HEALTHY | {"policy/skipped_steps": 1, "policy/optimizer_steps": 3}
STOP_AFTER = RULES["non_finite"].stop_after


def test_only_what_is_strictly_better_is_the_best(open_session):
    own = open_session()
    scores = {0: 0.0, 5: 0.0, 10: 0.4, 15: 0.4, 20: 0.3}
    bests = []
    for step, score in scores.items():
        own.note_evaluation(step, score)
        bests.append(own.best_step)
    assert bests == [0, 0, 10, 10, 10] and own.evaluated_step == 20


def test_a_collapse_names_the_step_the_cause_and_the_best_policy(open_session, capsys, tmp_path):
    own = open_session()
    assert own.watch(0, HEALTHY) is None and capsys.readouterr().out == ""
    own.note_evaluation(0, 0.5)
    own.note_evaluation(2, 0.6)
    *before, reason = [own.watch(step, BROKEN) for step in range(1, STOP_AFTER + 1)]
    assert not any(before) and reason.startswith(f"stopped after step {STOP_AFTER}")
    assert "checkpoints/best (step 2)" in reason and "non_finite" in reason and "\n" not in reason
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["warn", "stop"]
    alarms = read_log(tmp_path / "alarms.jsonl")
    assert [(row["step"], row["severity"]) for row in alarms][-1] == (STOP_AFTER, "stop")


@pytest.mark.parametrize(("on_collapse", "lines"), [("warn", 2), ("off", 0)])
def test_a_run_that_was_told_to_goes_on_and_its_sentinels_learn_all_the_same(
    open_session, capsys, on_collapse, lines
):
    own, other = open_session(on_collapse=on_collapse), open_session(on_collapse="stop")
    assert not any(own.watch(step, BROKEN) for step in range(1, STOP_AFTER + 1))
    assert len(capsys.readouterr().out.splitlines()) == lines
    assert any(other.watch(step, BROKEN) for step in range(1, STOP_AFTER + 1))
    assert own.state_dict() == other.state_dict()


def test_a_resumed_session_knows_what_an_uninterrupted_one_knows(open_session, capsys):
    def controller():
        return AdaptiveKLController(0.1, 0.02, horizon=100)

    whole = open_session(controller(), on_collapse="stop")
    whole.worker.kl_controller.update(1.0, 64)
    whole.note_evaluation(0, 0.25)
    rows = list(stormy_run(seed=4, num_steps=70))
    for step, row in rows[:40]:
        whole.watch(step, row)
    state = whole.state_dict()
    resumed = open_session(controller(), on_collapse="stop")
    resumed.load_state_dict(json.loads(json.dumps(state | {"step": 40}, allow_nan=False)))
    assert resumed.state_dict() == state
    assert resumed.worker.kl_controller.value > 0.1
    capsys.readouterr()
    printed = []
    for own in (whole, resumed):
        reasons = [own.watch(step, row) for step, row in rows[40:]]
        printed.append((reasons, capsys.readouterr().out))
    assert printed[0] == printed[1] and printed[0][1]


# --- A run of three steps, and copies of it ------------------------------------------------------


@pytest.fixture(scope="module")
def url():
    with serve() as url:
        yield url


@pytest.fixture(scope="module")
def whole(url, tmp_path_factory):
    """A run of three steps that nothing happened to, with a checkpoint of each; it learns whatever
    the returns are."""
    tmp_path = tmp_path_factory.mktemp("whole")
    held_out = write_ids(tmp_path / "held_out.json", num_tasks=2)
    settings = options(
        tmp_path,
        url,
        algorithm="reinforce_plus_plus",
        entropy_coef=0.01,
        deterministic=True,
        learning_rate=1e-3,
        learning_rate_decay_steps=2,
        max_sync_error=1e-4,
        steps=3,
        save_every=1,
        keep_last=9,
        eval_every=1,
        eval_samples=1,
        eval_tasks=held_out,
    )
    assert train_main(flags(**settings)) == 0
    return Path(settings["run_dir"])


@pytest.fixture
def damaged(whole, tmp_path):
    """A copy of it, to be damaged."""
    return shutil.copytree(whole, tmp_path / "run", symlinks=True)


def resume(run_dir, *words):
    return train_main(["--resume", "--run-dir", str(run_dir), *words])


def log_of(*lines):
    def damage(run_dir):
        path = run_dir / "metrics.jsonl"
        rows = path.read_text().splitlines(keepends=True)
        path.write_text("".join(rows[line] for line in lines))

    return damage


DAMAGES = {
    "the log has a hole": (log_of(0, 2), 1, "metrics.jsonl lacks step 2"),
    "the log repeats a step": (log_of(0, 1, 1, 2), 1, "has a step twice"),
    "an empty config": (lambda run: (run / "config.json").write_text(""), 2, "config.json"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_run_that_cannot_go_on_says_so_in_a_line_and_stays_as_it_is(damaged, capsys, damage):
    do_damage, code, words = DAMAGES[damage]
    do_damage(damaged)
    before = (damaged / "metrics.jsonl").read_bytes()
    assert resume(damaged) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line and (damaged / "metrics.jsonl").read_bytes() == before
    assert checkpoint.steps_saved(damaged) == [1, 2, 3]


def test_from_the_checkpoint_before_it_a_run_ends_the_same(whole, damaged):
    shutil.rmtree(checkpoint.folder_of(damaged, 3))
    assert resume(damaged) == 0
    assert (damaged / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert checkpoint.steps_saved(damaged) == [1, 2, 3]
    # The learning rate falls in a line and never to zero (trap 12).
    assert [row["policy/learning_rate"] for row in read_metrics(damaged)] == [1e-3, 5e-4, 5e-4]


def test_a_resumed_run_is_not_measured_with_other_weights_than_its_own(
    damaged, capsys, monkeypatch
):
    """It was evaluated before the next comparison, and `best` could move by that."""
    monkeypatch.setattr(Worker, "load_into_engine", lambda own: 0)  # the sampler stays at the start
    assert resume(damaged, "--steps", "4") == 1
    assert "the sampler's weights differ from the trainer's" in capsys.readouterr().err
    assert len(read_metrics(damaged)) == 3


# --- The end of a run ----------------------------------------------------------------------------


class Learned(Letters):
    """Its tasks are solved once eight episodes have ended: after the first evaluation."""

    played = 0

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        type(self).played += terminated
        solved = terminated and self.played > 8
        return observation, reward, terminated, truncated, info | {"success": solved}


def test_a_run_ends_saved_once_held_out_success_is_reached(tmp_path, capsys):
    Learned.played = 0
    with serve(Learned) as url:
        changes = dict(steps=3, save_every=3, eval_every=1, eval_samples=1, stop_at=0.9)
        assert train_main(flags(**options(tmp_path, url, **changes))) == 0
        assert "--stop-at 0.9" in capsys.readouterr().out
        assert (tmp_path / "run/checkpoints/best").resolve().name == "step_000001"
        assert resume(tmp_path / "run") == 0, "a resumed one has nothing left to do"
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [1]


def test_with_adapters_the_base_is_the_reference_and_a_resumed_run_is_the_whole_one(
    tmp_path, url, capsys
):
    """And notices if the base that its adapters stand on has been changed."""
    model = tmp_path / "model"
    shutil.copytree(resolve_model("tiny"), model)
    settings = options(
        tmp_path,
        url,
        model=str(model),
        algorithm="reinforce_plus_plus",
        entropy_coef=0.01,
        lora_rank=4,
        kl_loss_coef=0.1,
        learning_rate=1e-2,
        deterministic=True,
    )
    assert train_main(flags(**settings | {"run_dir": str(tmp_path / "whole")})) == 0
    assert train_main(flags(**settings | {"steps": 1})) == 0
    weights = model / "model.safetensors"
    right = weights.read_bytes()
    save_file({name: tensor + 0.01 for name, tensor in load(right).items()}, weights)
    assert train_main(flags(**settings, resume=True)) == 1
    assert "have changed since this run began" in capsys.readouterr().err
    weights.write_bytes(right)
    assert train_main(flags(**settings, resume=True)) == 0
    logs = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("run", "whole")]
    assert logs[0] == logs[1]
    first, last = read_metrics(tmp_path / "run")
    assert first["policy/kl"] == 0 < last["policy/kl"]  # the start policy is the base, exactly
    assert last["sync/log_prob_diff_mean"] < 1e-5  # the sampler has the adapters
    folder = checkpoint.folder_of(tmp_path / "run", 2)
    assert (folder / "adapter/adapter_config.json").exists()
    size = sum(p.stat().st_size for p in (folder / "trainer_state").rglob("*") if p.is_file())
    assert size < (folder / "model.safetensors").stat().st_size
    base, merged = load(right), load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.allclose(base[name], merged[name].float(), atol=2e-3)  # saved as bfloat16


# --- Ctrl-C --------------------------------------------------------------------------------------


def interrupt(number=signal.SIGINT):
    os.kill(os.getpid(), number)
    time.sleep(0.01)  # the handler runs between two byte codes


def test_ctrl_c_is_answered_at_once_where_it_does_no_harm_and_later_elsewhere():
    with StopRequests() as stop:
        interrupt()  # in an update: remembered
        assert stop.agreed()
        with pytest.raises(KeyboardInterrupt), stop.allowed():
            pytest.fail("the next rollout must not begin")
    with StopRequests() as stop, pytest.raises(KeyboardInterrupt), stop.allowed():
        interrupt()
        pytest.fail("a rollout is interrupted on the spot")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("launched", [False, True])
def test_a_second_ctrl_c_leaves_at_once_and_a_launchers_copy_of_the_first_is_ignored(
    launched, monkeypatch, capfd
):
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if launched:
        monkeypatch.setenv("WORLD_SIZE", "1")
    leaves = contextlib.nullcontext() if launched else pytest.raises(SystemExit, match="130")
    with StopRequests() as stop, leaves:
        interrupt()
        interrupt(signal.SIGTERM)
        assert launched and stop.agreed()
    assert ("stopped without saving" in capfd.readouterr().err) == (not launched)
