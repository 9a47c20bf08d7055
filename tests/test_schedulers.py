"""schedulers.py: the closed form, resuming and bad options (trap 11)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from schedulers import check_schedule, rounds_at


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
    horizons = [rounds_at(step, *schedule) for step in range(1, num_steps + 1)]
    assert horizons == literal_rounds(*schedule, num_steps)
    assert horizons == sorted(horizons), "the horizon decreased"


def test_a_run_resumed_at_step_100_uses_20_rounds_for_the_next_100_steps():
    """Trap 11: AgentGym-RL resumes there with 30 rounds, because it restores a counter."""
    horizons = [rounds_at(step, [10, 20, 30], 100) for step in range(101, 202)]
    assert horizons == [20] * 100 + [30]


SCALING = "scaling_inter_stepwise"


@pytest.mark.parametrize(
    ("kind", "rounds", "message"),
    [
        (SCALING, [10, 8, 20], "--rounds 10 8 20 must not decrease"),
        (SCALING, [0, 8], "--rounds 0 8: give one or more integers >= 1"),
        (SCALING, [], "give one or more integers >= 1"),
        ("stepwise", [10], "--rounds 10 never changes"),
        ("fixed", [10, 20, 30], "--rounds 10 20 30 with --rounds-scheduler fixed: give one"),
    ],
)
def test_an_error_names_the_bad_option(kind, rounds, message):
    with pytest.raises(ValueError, match=message):
        check_schedule(kind, rounds)


def test_only_the_control_experiment_may_shrink_the_horizon():
    check_schedule("stepwise", [30, 20, 10])
