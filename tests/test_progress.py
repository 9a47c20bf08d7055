"""What progress.py promises: the best is strictly better, a resumed run knows what it did."""

import json
from pathlib import Path

import pytest
from test_sentinels import HEALTHY, stormy_run

from losses import AdaptiveKLController, FixedKLController
from reporting.sentinels import RULES
from run.steplines import Progress

BROKEN = {"policy/skipped_steps": 1, "policy/optimizer_steps": 3}


def progress_of(kl_controller=None):
    return Progress(Path("runs/mine"), "smollm2-135m", kl_controller or FixedKLController(0.1))


def stopping_step(progress, on_collapse="stop"):
    """What is said of the third broken update in a row."""
    for step in range(1, RULES["non_finite"].stop_after):
        _, reason = progress.watch(step, HEALTHY | BROKEN, on_collapse)
        assert reason is None
    return progress.watch(step + 1, HEALTHY | BROKEN, on_collapse)


def test_only_what_is_strictly_better_is_the_best():
    progress = progress_of()
    assert (progress.best, progress.best_step, progress.evaluated_step) == (None, None, None)
    for step, avg, best in [(0, 0.0, 0), (5, 0.0, 0), (10, 0.4, 10), (15, 0.4, 10), (20, 0.3, 10)]:
        progress.note_evaluation(step, avg)
        assert (progress.best_step, progress.evaluated_step) == (best, step)
    assert progress.best == 0.4


def test_a_healthy_step_says_nothing():
    assert progress_of().watch(1, HEALTHY, "stop") == ([], None)


def test_a_warning_is_a_line_and_no_reason_to_stop():
    alarms, reason = progress_of().watch(1, HEALTHY | BROKEN, "stop")
    assert [alarm.severity for alarm in alarms] == ["warn"]
    assert "step 1: non_finite" in alarms[0].message
    assert reason is None


@pytest.mark.parametrize(
    ("evaluations", "best"),
    [
        ([], "nothing was evaluated (--eval-every 0)"),
        ([(0, 0.5), (2, 0.5)], "the best policy so far is the one it began with, smollm2-135m"),
        ([(0, 0.5), (2, 0.6)], "the best checkpoint is runs/mine/checkpoints/best (step 2)"),
    ],
)
def test_a_collapse_names_the_step_the_cause_and_the_best_policy(evaluations, best):
    progress = progress_of()
    for step, avg in evaluations:
        progress.note_evaluation(step, avg)
    alarms, reason = stopping_step(progress)
    assert alarms[0].severity == "stop" and alarms[0].message.startswith("step 3: non_finite: ")
    assert "\n" not in reason
    assert reason.startswith("stopped after step 3, the run is collapsing: step 3: non_finite: ")
    assert f"; {best}" in reason
    assert reason.endswith("--resume with --on-collapse warn goes on all the same")


def test_a_run_that_was_asked_to_warn_goes_on():
    alarms, reason = stopping_step(progress_of(), "warn")
    assert alarms[0].severity == "stop"
    assert reason is None


def test_a_run_that_was_asked_for_nothing_hears_nothing_and_the_sentinels_learn_all_the_same():
    progress, listened_to = progress_of(), progress_of()
    assert stopping_step(progress, "off") == ([], None)
    stopping_step(listened_to)
    assert progress.state_dict() == listened_to.state_dict()


def test_a_state_has_the_fields_of_every_checkpoint_and_json_keeps_it():
    controller = AdaptiveKLController(0.1, 0.02, horizon=100)
    progress = progress_of(controller)
    progress.note_evaluation(0, 0.25)
    controller.update(1.0, 64)
    progress.watch(1, HEALTHY | BROKEN, "stop")
    state = progress.state_dict()
    assert set(state) == {"best", "best_step", "evaluated_step", "kl_controller", "sentinels"}
    assert json.loads(json.dumps(state, allow_nan=False)) == state

    resumed = progress_of(AdaptiveKLController(0.1, 0.02, horizon=100))
    assert resumed.state_dict() != state
    resumed.load_state_dict(state | {"algorithm": "grpo", "step": 1})
    assert resumed.state_dict() == state
    assert resumed.kl_controller.value == controller.value > 0.1


@pytest.mark.parametrize("cut", [0, 13, 40, 70])
def test_a_resumed_run_says_what_an_uninterrupted_one_says(cut):
    rows = list(stormy_run(seed=4, num_steps=70))
    first, whole = progress_of(), progress_of()
    for step, row in rows[:cut]:
        assert first.watch(step, row, "stop") == whole.watch(step, row, "stop")
    resumed = progress_of()
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict())))
    said = [resumed.watch(step, row, "stop") for step, row in rows[cut:]]
    assert said == [whole.watch(step, row, "stop") for step, row in rows[cut:]]
    assert cut == 70 or any(alarms for alarms, _ in said)
