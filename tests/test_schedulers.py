"""schedulers.py: tables worked out on paper, every boundary, and resuming (trap 11)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedulers import FixedRoundsScheduler, RoundsScheduler, StepRoundsScheduler, make_scheduler

# The released schedules: rounds, steps per horizon, and step -> rounds worked out on paper.
RELEASED = {
    "textcraft": ([10, 20, 30], 100, {1: 10, 100: 10, 101: 20, 200: 20, 201: 30, 300: 30, 301: 30}),
    "babyai": ([6, 13, 20], 100, {1: 6, 50: 6, 100: 6, 101: 13, 150: 13, 201: 20, 9999: 20}),
    "searchqa": ([5, 8, 10], 100, {1: 5, 99: 5, 100: 5, 101: 8, 200: 8, 201: 10}),
    "webarena": ([8, 12, 15], 80, {1: 8, 80: 8, 81: 12, 160: 12, 161: 15, 100: 12, 201: 15}),
}


@pytest.mark.parametrize("env", RELEASED)
def test_the_released_schedules_give_the_hand_worked_rounds(env):
    rounds, steps_scaling_inter, table = RELEASED[env]
    scheduler = StepRoundsScheduler(steps_scaling_inter, rounds)
    assert {step: scheduler.rounds_at(step) for step in table} == table


def literal_rounds(rounds, steps_scaling_inter, num_steps):
    """The paper's recursion: after every Δ steps, go to the next horizon if there is one."""
    phase, steps_in_phase, horizons = 0, 0, []
    for _ in range(num_steps):
        if steps_in_phase == steps_scaling_inter:
            steps_in_phase = 0
            if phase + 1 < len(rounds):
                phase += 1
        horizons.append(rounds[phase])
        steps_in_phase += 1
    return horizons


schedules = st.tuples(
    st.lists(st.integers(1, 60), min_size=1, max_size=6).map(sorted), st.integers(1, 25)
)


@given(schedules, st.integers(1, 200))
def test_the_closed_form_equals_the_literal_recursion(schedule, num_steps):
    rounds, steps_scaling_inter = schedule
    scheduler = StepRoundsScheduler(steps_scaling_inter, rounds)
    horizons = [scheduler.rounds_at(step) for step in range(1, num_steps + 1)]
    assert horizons == literal_rounds(rounds, steps_scaling_inter, num_steps)
    assert horizons == sorted(horizons), "the horizon decreased"


def play(scheduler: RoundsScheduler, num_steps: int) -> list[int]:
    horizons = []
    for _ in range(num_steps):
        horizons.append(scheduler.get_rounds())
        scheduler.step()
    return horizons


# Trap 11: when AgentGym-RL resumes at step 100 of [10, 20, 30] @ 100, it uses 30 rounds instead of
# 20 for 99 of the next 100 steps.


def test_a_run_resumed_at_step_100_uses_20_rounds_for_the_next_100_steps():
    scheduler = StepRoundsScheduler(100, [10, 20, 30])
    scheduler.set_global_steps(100)
    assert play(scheduler, 101) == [20] * 100 + [30]


@pytest.mark.parametrize("num_steps", range(26))
def test_resuming_at_any_step_equals_the_uninterrupted_run(num_steps):
    uninterrupted = play(StepRoundsScheduler(7, [2, 4, 8]), 26)
    first, second = (StepRoundsScheduler(7, [2, 4, 8]) for _ in range(2))
    horizons = play(first, num_steps)
    second.load_state_dict(first.state_dict())
    assert horizons + play(second, 26 - num_steps) == uninterrupted


def test_fixed_rounds_never_change_and_steps_are_still_counted():
    scheduler = FixedRoundsScheduler(30)
    assert play(scheduler, 5) == [30] * 5
    with pytest.raises(ValueError, match=r"set_global_steps\(-1\)"):
        scheduler.set_global_steps(-1)
    assert scheduler.state_dict() == {"global_steps": 5}


SCALING = "scaling_inter_stepwise"


@pytest.mark.parametrize(
    ("kind", "rounds", "interval", "message"),
    [
        (SCALING, [10, 8, 20], 100, "--rounds 10 8 20 must not decrease"),
        (SCALING, [0, 8], 100, "--rounds 0 8 must be integers >= 1"),
        (SCALING, [], 100, "--rounds is empty"),
        ("fixed", [], 100, "--rounds is empty"),
        ("fixed", [-3], 100, "--rounds -3 must be integers >= 1"),
        ("fixed", [10, 20, 30], 100, "--rounds 10 20 30 with --rounds-scheduler fixed: give one"),
        (SCALING, [10, 20], 0, "--steps-scaling-inter 0 must be an integer >= 1"),
    ],
)
def test_an_error_names_the_bad_option(kind, rounds, interval, message):
    with pytest.raises(ValueError, match=message):
        make_scheduler(kind, rounds, interval)


@pytest.mark.parametrize("scheduler", [FixedRoundsScheduler(3), StepRoundsScheduler(5, [1, 2])])
@pytest.mark.parametrize("step", [0, -1])
def test_training_steps_are_counted_from_1(scheduler, step):
    with pytest.raises(ValueError, match=r"training steps are integers counted from 1"):
        scheduler.rounds_at(step)
