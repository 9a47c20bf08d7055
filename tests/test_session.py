"""run/session.py: what a run knows of itself, and how it goes on after whatever happened to it."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors.torch import load_file, save_file
from test_sentinels import HEALTHY, stormy_run
from toy_env import Letters, flags, options, read_metrics, serve, train_main, write_ids

from config import Config
from losses import AdaptiveKLController
from reporting.logs import read_log
from reporting.metrics import MetricsLogger
from reporting.sentinels import RULES, Alarm
from run import checkpoint, session
from run.errors import TrainingError
from run.rundir import Run
from scale.default_models import resolve_model
from train import RLWorker

ROOT = Path(__file__).resolve().parents[1]


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
    for step, score, best in [
        (0, 0.0, 0),
        (5, 0.0, 0),
        (10, 0.4, 10),
        (15, 0.4, 10),
        (20, 0.3, 10),
    ]:
        own.note_evaluation(step, score)
        assert (own.best_step, own.evaluated_step) == (best, step)


@pytest.mark.parametrize(
    ("evaluations", "best"),
    [
        ([], "--eval-every 0"),
        ([(0, 0.5), (2, 0.5)], "the one it began with"),
        ([(0, 0.5), (2, 0.6)], "checkpoints/best (step 2)"),
    ],
)
def test_a_collapse_names_the_step_the_cause_and_the_best_policy(
    open_session, capsys, tmp_path, evaluations, best
):
    own = open_session()
    assert own.watch(0, HEALTHY) is None and capsys.readouterr().out == ""
    for step, score in evaluations:
        own.note_evaluation(step, score)
    reasons = [own.watch(step, BROKEN) for step in range(1, STOP_AFTER + 1)]
    assert reasons[:-1] == [None] * (STOP_AFTER - 1)
    assert reasons[-1].startswith(f"stopped after step {STOP_AFTER}") and best in reasons[-1]
    assert "non_finite" in reasons[-1] and "\n" not in reasons[-1]
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


def test_a_collapse_that_an_evaluation_made_up_for_on_resume_shows_stops_the_run(
    open_session, monkeypatch
):
    own, amended = open_session(steps=4, eval_every=2), []
    own.completed_step, own.logger = 2, SimpleNamespace(amend=lambda *row: amended.append(row))
    monkeypatch.setattr(own, "evaluate", lambda step: {"eval/avg": 0.1})
    monkeypatch.setattr(own, "tidy_up", lambda: None)
    alarm = Alarm("held_out", 0.0, 0.1, "stop", "all is lost")
    monkeypatch.setattr(own.sentinels, "check", lambda *_: [alarm])
    with pytest.raises(TrainingError, match="after step 2.*all is lost"):
        own.evaluate_start()
    assert amended == [(2, {"eval/avg": 0.1})]


def test_a_line_of_a_log_is_on_the_disk_before_a_checkpoint_of_its_step_can_be(
    tmp_path, monkeypatch
):
    flushed, fsync = [], os.fsync

    def noted(descriptor):
        flushed.append((os.readlink(f"/proc/self/fd/{descriptor}"), os.fstat(descriptor).st_size))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    with MetricsLogger(tmp_path / "run") as logger:
        assert {str(tmp_path), str(tmp_path / "run")} <= {path for path, _ in flushed}
        logger.log(1, {"train/return_mean": 0.5})
        path = tmp_path / "run/metrics.jsonl"
        assert flushed[-1] == (str(path), path.stat().st_size)


# --- A run that was damaged ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def url():
    with serve() as url:
        yield url


@pytest.fixture(scope="module")
def whole(url, tmp_path_factory):
    """A run of three steps that nothing happened to, with a checkpoint of each."""
    tmp_path = tmp_path_factory.mktemp("whole")
    held_out = write_ids(tmp_path / "held_out.json", num_tasks=2)
    settings = options(
        tmp_path,
        url,
        algorithm="reinforce_plus_plus",
        deterministic=True,
        learning_rate=1e-3,
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
    "the log ends early": (log_of(0), 1, "metrics.jsonl lacks step 2"),
    "the log has a hole": (log_of(0, 2), 1, "metrics.jsonl lacks step 2"),
    "the log repeats a step": (log_of(0, 1, 1, 2), 1, "holds a step twice"),
    "the log is gone": (lambda run: (run / "metrics.jsonl").unlink(), 1, "lacks step 1"),
    "a log that is not JSON": (
        lambda run: (run / "timings.jsonl").write_text("{\n{}\n"),
        1,
        "timings.jsonl line 1 is not",
    ),
    "an empty config": (lambda run: (run / "config.json").write_text(""), 2, "config.json"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_run_that_cannot_go_on_says_so_in_a_line_and_stays_as_it_is(damaged, capsys, damage):
    do_damage, code, words = DAMAGES[damage]
    do_damage(damaged)
    log = damaged / "metrics.jsonl"
    before = log.read_bytes() if log.exists() else None
    assert resume(damaged) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
    assert (log.read_bytes() if log.exists() else None) == before
    assert checkpoint.steps_saved(damaged) == [1, 2, 3]


def test_from_the_checkpoint_before_it_a_run_ends_the_same(whole, damaged):
    shutil.rmtree(checkpoint.folder_of(damaged, 3))
    assert resume(damaged) == 0
    assert (damaged / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    assert checkpoint.steps_saved(damaged) == [1, 2, 3]


def test_evaluations_say_which_weights_played(whole):
    for step in range(4):
        lines = read_log(whole / f"trajectories/eval_00000{step}.jsonl")
        assert {line["weight_version"] for line in lines} == {step}


# --- The end of a run ----------------------------------------------------------------------------


class Learned(Letters):
    """Its tasks are solved once eight episodes have ended: after the first evaluation."""

    played = 0

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        type(self).played += terminated
        solved = terminated and self.played > 8
        return observation, reward, terminated, truncated, info | {"success": solved}


class Easy(Learned):
    played = 100


@pytest.mark.parametrize(("env", "last"), [(Learned, 1), (Easy, 0)])
def test_a_run_ends_saved_once_held_out_success_is_reached(tmp_path, capsys, env, last):
    with serve(env) as url:
        changes = dict(steps=3, save_every=3, eval_every=1, eval_samples=1, stop_at=0.9)
        assert train_main(flags(**options(tmp_path, url, **changes))) == 0
        assert "--stop-at 0.9" in capsys.readouterr().out
        best = tmp_path / "run/checkpoints/best"
        assert best.resolve().name == f"step_{last:06d}"
        if last:
            assert [line["step"] for line in read_metrics(tmp_path / "run")] == [1]
            assert resume(tmp_path / "run") == 0, "a resumed one has nothing left to do"
            assert len(read_metrics(tmp_path / "run")) == 1


def test_weights_that_are_not_finite_end_the_run_and_the_last_checkpoint_stays(
    tmp_path, url, capsys, monkeypatch
):
    update = RLWorker.update

    def poison(self, step, *rest):
        metrics = update(self, step, *rest)
        if step == 2:
            next(self.policy.model.parameters()).data.fill_(math.nan)
        return metrics

    monkeypatch.setattr(RLWorker, "update", poison)
    assert train_main(flags(**options(tmp_path, url, steps=3, save_every=1))) == 1
    assert "step 2: weights of the policy are not finite" in capsys.readouterr().err
    assert checkpoint.steps_saved(tmp_path / "run") == [1]


def test_a_run_that_needs_the_weights_it_began_with_notices_others(tmp_path, url, capsys):
    """Adapters, and a reference, stand on them; without either the run has all that it needs."""
    model = tmp_path / "model"
    shutil.copytree(resolve_model("tiny"), model)
    settings = options(tmp_path, url, steps=2, save_every=1, model=str(model), lora_rank=2)
    assert train_main(flags(**settings | {"steps": 1})) == 0
    weights = model / "model.safetensors"
    save_file({name: tensor + 0.01 for name, tensor in load_file(weights).items()}, weights)
    assert train_main(flags(**settings, resume=True)) == 1
    assert "holds other weights than when this run began" in capsys.readouterr().err


def test_a_tracker_that_cannot_be_reached_leaves_no_run_behind(tmp_path, url, capsys, monkeypatch):
    def unreachable(*_):
        raise session.TrackerError("wandb is not to be reached")

    settings = options(tmp_path, url, steps=1)
    with monkeypatch.context() as patch:
        patch.setattr(session, "Trackers", unreachable)
        assert train_main(flags(**settings)) == 1
    assert "wandb is not to be reached" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    assert train_main(flags(**settings)) == 0


# --- Ctrl-C --------------------------------------------------------------------------------------


@pytest.mark.parametrize("launched", [False, True])
def test_a_second_ctrl_c_leaves_at_once_and_a_launchers_copy_of_the_first_is_ignored(launched):
    code = (
        "import os, signal, time; from run.session import StopRequests\n"
        "with StopRequests() as stop:\n"
        "    os.kill(os.getpid(), signal.SIGINT); os.kill(os.getpid(), signal.SIGTERM)\n"
        "    time.sleep(0.1); print('still here', stop.agreed())\n"
    )
    variables = {k: v for k, v in os.environ.items() if k != "WORLD_SIZE"}
    variables |= {"WORLD_SIZE": "1"} if launched else {}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, text=True)
    assert done.returncode == (0 if launched else 130)
    assert ("still here True" in done.stdout) == launched
    assert ("stopped without saving" in done.stderr) == (not launched)
