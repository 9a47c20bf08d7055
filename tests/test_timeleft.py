"""run/timeleft.py: a run says how long it still takes, and a resumed one says the same."""

import pytest

from run.timeleft import RECENT, TimeLeft


def fed(left, rows):
    for row in rows:
        left.note(row)
    return left


def test_before_a_step_was_timed_nothing_is_said():
    left = TimeLeft(60, [20, 40, 60])
    assert left.after(0) is None
    left.note({"time/eval_s": 50.0})
    assert left.after(0) is None


def test_steps_left_and_evaluations_due_are_what_is_left():
    left = fed(TimeLeft(60, [20, 40, 60]), [{"time/eval_s": 50.0}, {"time/step_s": 10.0}])
    assert left.after(1) == 59 * 10 + 3 * 50
    assert left.after(20) == 40 * 10 + 2 * 50  # the one after step 20 is over
    assert left.after(59) == 10 + 50
    assert left.after(60) == 0


def test_a_steps_own_evaluation_is_counted_once():
    left = fed(TimeLeft(10, [5, 10]), [{"time/step_s": 70.0, "time/eval_s": 60.0}])
    assert left.after(5) == 5 * 10 + 60


def test_one_slow_step_moves_nothing_and_a_horizon_that_grew_is_noticed():
    steady = [{"time/step_s": 10.0}] * 9
    left = fed(TimeLeft(100, []), [*steady, {"time/step_s": 500.0}])
    assert left.after(10) == 900
    fed(left, [{"time/step_s": 20.0}] * RECENT)
    assert left.after(20) == 1600


def test_an_evaluation_that_was_never_timed_is_taken_for_a_rollout_of_its_size():
    rows = [{"time/step_s": 30.0, "time/rollout_s": 20.0}]
    assert fed(TimeLeft(10, [10], eval_share=3.0), rows).after(9) == 30 + 3 * 20
    rows.append({"time/eval_s": 100.0})
    assert fed(TimeLeft(10, [10], eval_share=3.0), rows).after(9) == 30 + 100


def test_explorations_that_begin_an_iteration_are_counted_apart_from_its_steps():
    """The first step of AgentEvol explores for minutes; 239 more of those would be hours."""
    left = TimeLeft(240, [120, 240], exploring=range(1, 241, 60))
    fed(left, [{"step": 1, "time/step_s": 320.0, "time/rollout_s": 300.0}])
    assert left.after(1) == 239 * 20 + 3 * 300
    fed(left, [{"step": 2, "time/step_s": 20.0}])
    assert left.after(60) == 180 * 20 + 3 * 300  # step 61 begins with one
    assert left.after(61) == 179 * 20 + 2 * 300
    resumed = {"step": 3, "time/step_s": 21.0, "time/rollout_s": 1.0}  # what it read, not played
    fed(left, [resumed])
    assert left.after(181) == 59 * 20


@pytest.mark.parametrize("cut", [3, 12, 25])
def test_a_resumed_run_that_reads_its_timings_says_what_an_uninterrupted_one_says(cut):
    rows = [{"time/step_s": 10.0 + n % 7, "time/rollout_s": 5.0} for n in range(30)]
    for n in range(4, 30, 5):
        rows[n] = rows[n] | {"time/eval_s": 8.0 + n, "time/step_s": 20.0 + n}
    whole = fed(TimeLeft(40, range(5, 41, 5)), rows)
    resumed = fed(fed(TimeLeft(40, range(5, 41, 5)), rows[:cut]), rows[cut:])
    assert resumed.after(30) == whole.after(30)
