"""reporting/sentinels.py: a healthy run raises no alarm, a collapse causes a warning and then stops
the run, and a single spike does not stop it."""

import json
import math
import random
import re
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import config
from reporting.metrics import METRICS
from reporting.sentinels import RULES, Sentinels

# One healthy step. After many of these the history is: gradient norm 0.3, entropy 0.1 nats, 95 %
# valid actions, held-out success 50 %, training success 60 %.
HEALTHY = {
    "policy/loss": 0.2,
    "policy/grad_norm": 0.3,
    "policy/optimizer_steps": 4,
    "policy/skipped_steps": 0,
    "critic/skipped_steps": 0,
    "policy/entropy": 0.1,
    "policy/approx_kl": 0.001,
    "policy/kl": 0.02,
    "policy/kl_max": 50.0,
    "train/cut_turn_rate": 0.1,
    "train/turn_tokens_median": 60.0,
    "train/repeated_token_rate": 0.02,
    "train/parse_error_rate": 0.05,
    "train/groups": 8,
    "train/groups_zero_variance": 3,
    "train/success_rate": 0.6,
    "eval/avg": 0.5,
}
BROKEN = {"policy/skipped_steps": 1, "policy/optimizer_steps": 3}
NO_SIGNAL = {"train/groups_zero_variance": 8, "train/success_rate": 0.0}
# name: (a step that warns, a step that stops, both limits, number of steps until each alarm);
# the limits are hand-worked from HEALTHY.
CASES = {
    "grad_norm": ({"policy/grad_norm": 4.0}, {"policy/grad_norm": 8e8}, (3.0, 30.0), (1, 3)),
    "non_finite": (BROKEN, BROKEN, (1, 1), (1, 3)),
    "entropy_floor": ({"policy/entropy": 0.005}, {"policy/entropy": 0.0}, (0.01, 0.001), (3, 5)),
    "entropy_explosion": ({"policy/entropy": 1.5}, {"policy/entropy": 4.0}, (1.1, 3.1), (3, 5)),
    "approx_kl": ({"policy/approx_kl": 0.2}, {"policy/approx_kl": 2.0}, (0.1, 1.0), (1, 3)),
    "kl": ({"policy/kl": 2.0}, {"policy/kl": 20.0}, (1.0, 10.0), (3, 5)),
    "kl_max": ({"policy/kl_max": 2e3}, {"policy/kl_max": 2e5}, (1e3, 1e5), (3, 5)),
    "cut_turns": ({"train/cut_turn_rate": 0.4}, {"train/cut_turn_rate": 0.9}, (0.3, 0.6), (3, 5)),
    "short_turns": (
        *({"train/turn_tokens_median": 8}, {"train/turn_tokens_median": 1}, (12, 1.2), (3, 5)),
    ),
    "long_turns": (
        *({"train/turn_tokens_median": 200}, {"train/turn_tokens_median": 800}),
        *((180, 600), (3, 5)),
    ),
    "repeated_tokens": (
        *({"train/repeated_token_rate": 0.4}, {"train/repeated_token_rate": 0.95}),
        *((0.3, 0.6), (2, 3)),
    ),
    "valid_actions": (
        *({"train/parse_error_rate": 0.5}, {"train/parse_error_rate": 0.9}),
        *((0.665, 0.285), (2, 5)),
    ),
    "held_out": ({"eval/avg": 0.3}, {"eval/avg": 0.2}, (0.375, 0.25), (1, 2)),
    "no_signal": (NO_SIGNAL, NO_SIGNAL, (0.05, 0.05), (5, 20)),
}
for_each_rule = pytest.mark.parametrize("name", CASES)


def after_healthy_steps(num_steps=25):
    sentinels = Sentinels()
    for step in range(1, num_steps + 1):
        assert sentinels.check(step, HEALTHY) == []
    return sentinels


def check_steps(sentinels, name, changes, num_steps):
    """The alarm or None of each step; the steps are healthy except for `changes`. Only rule `name`
    raises alarms."""
    results = []
    for step in range(26, 26 + num_steps):
        alarms = sentinels.check(step, HEALTHY | changes)
        assert {alarm.name for alarm in alarms} <= {name}
        results.append(alarms[0] if alarms else None)
    return results


def severities(sentinels, name, changes, num_steps):
    alarms = check_steps(sentinels, name, changes, num_steps)
    return [alarm.severity if alarm else "" for alarm in alarms]


# ------------------------------------------------------------- each sentinel


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000))
def test_a_healthy_run_with_noise_raises_no_alarm(seed):
    rng, sentinels = random.Random(seed), Sentinels()
    assert set(HEALTHY) <= set(METRICS)
    for step in range(1, 301):
        noisy_step = {
            n: v * rng.uniform(0.88, 1.12) if n != "train/groups" else v for n, v in HEALTHY.items()
        }
        assert sentinels.check(step, noisy_step) == []


@for_each_rule
def test_the_warn_limit_warns_once_per_streak_at_the_hand_worked_value(name):
    changes, _, (warn_at, _), (warn_after, stop_after) = CASES[name]
    sentinels = after_healthy_steps()
    for _ in range(2):
        *earlier, alarm = check_steps(sentinels, name, changes, warn_after)
        assert earlier == [None] * (warn_after - 1)
        assert (alarm.severity, alarm.limit) == ("warn", pytest.approx(warn_at))
        num_silent = stop_after - 1 - warn_after
        assert severities(sentinels, name, changes, num_silent) == [""] * num_silent
        assert severities(sentinels, name, {}, 3) == [""] * 3


@for_each_rule
def test_the_stop_limit_stops_after_enough_steps_and_the_message_says_what_to_do(name):
    _, changes, (_, stop_at), (_, stop_after) = CASES[name]
    *earlier, alarm, next_alarm = check_steps(after_healthy_steps(), name, changes, stop_after + 1)
    assert "stop" not in {warning.severity for warning in earlier if warning}
    assert (alarm.severity, next_alarm.severity) == ("stop", "stop")
    assert alarm.limit == pytest.approx(stop_at)
    assert alarm.message.startswith(f"step {25 + stop_after}: {name}: ")
    flags = set(re.findall(r"--[a-z-]+", alarm.message))
    assert flags and flags <= {config.flag(field.name) for field in fields(config.Config)}


@for_each_rule
def test_spikes_that_are_one_step_too_short_never_stop_the_run(name):
    _, stop_step, _, (_, stop_after) = CASES[name]
    sentinels = after_healthy_steps()
    for _ in range(5):
        assert "stop" not in severities(sentinels, name, stop_step, stop_after - 1)
        assert severities(sentinels, name, {}, 20) == [""] * 20
    for _ in range(stop_after - 1):  # a step without the metric does not change the streak
        assert "stop" not in severities(sentinels, name, stop_step, 1)
        assert sentinels.check(40, {}) == sentinels.check(41, dict.fromkeys(HEALTHY)) == []
    assert severities(sentinels, name, stop_step, 1) == ["stop"]


def test_a_non_finite_update_counts_as_broken_and_the_means_of_its_step_are_ignored():
    """These means lack the skipped mini-batches, so they do not describe the policy."""
    means = {"policy/entropy": 0.0, "policy/kl": 1e9, "policy/approx_kl": 1e9}
    broken_steps = [{"policy/loss": math.nan}, {"policy/grad_norm": math.inf}, BROKEN | means]
    for broken in (*broken_steps, {"critic/skipped_steps": 1}):
        alarms = severities(after_healthy_steps(), "non_finite", broken, 3)
        assert alarms == ["warn", "", "stop"]


# ------------------------------------------------------- healthy steps that look unusual


@pytest.mark.parametrize(
    "changes",
    [
        {"train/groups_zero_variance": 8, "train/success_rate": 1.0},
        {"train/groups_zero_variance": 7, "train/success_rate": 0.0},
        {"train/groups": 0, "train/groups_zero_variance": 0, "train/success_rate": None},
        dict.fromkeys(HEALTHY) | {"policy/optimizer_steps": 0, "policy/skipped_steps": 0},
    ],
    ids=["all solved", "a return without success", "all lost", "no update"],
)
def test_unusual_but_healthy_steps_never_raise_an_alarm(changes):
    sentinels = after_healthy_steps()
    assert [a for step in range(30, 130) for a in sentinels.check(step, HEALTHY | changes)] == []


def rows_of(name, *values):
    return [{name: value} for value in values]


ERRORS, LUCKY = "train/parse_error_rate", {"train/groups": 8, "train/success_rate": 0.5}
NEVER_SOLVED = [{"train/groups": 8} | NO_SIGNAL] * 40
# Rows, and the alarms that the last of them raises.
RUNS = {
    "four gradient norms are too few": (rows_of("policy/grad_norm", *[0.3] * 4, 500.0), []),
    "five are enough": (rows_of("policy/grad_norm", *[0.3] * 5, 500.0), ["warn"]),
    "a normal one after tiny ones": (rows_of("policy/grad_norm", *[1e-4] * 20, 0.9), []),
    "ten times the smallest median": (rows_of("policy/grad_norm", *[1e-4] * 20, 1.0), ["warn"]),
    "always few valid actions": (rows_of(ERRORS, *[0.85, 1.0, 1.0, 1.0, 1.0] * 9), []),
    "a success of a few percent": (rows_of("eval/avg", 0.02, 0.09, 0.0, 0.0, 0.0), []),
    "compared with the best, not the last": (rows_of("eval/avg", 0.5, 0.8, 0.65, 0.5), ["warn"]),
    "twice below half the best": (rows_of("eval/avg", 0.8, 0.5, 0.4, 0.39), ["stop"]),
    "a recovery between": (rows_of("eval/avg", 0.8, 0.39, 0.8, 0.3), ["warn"]),
    "never solved, so no stop": (NEVER_SOLVED, []),
    "one lucky step is not the best": ([*NEVER_SOLVED[:4], LUCKY, *NEVER_SOLVED], []),
    "the median of ten": (
        rows_of("policy/entropy", *[9.0] * 3, None, *[0.5] * 7, 0.05, 0.05, 0.05),
        ["warn"],
    ),
    "cut from the start": (rows_of("train/cut_turn_rate", *[0.9] * 10, *[1.0] * 30), []),
    "just above a tenth": (rows_of("policy/entropy", *[9.0] * 3, *[0.5] * 7, *[0.051] * 9), []),
}


@pytest.mark.parametrize("case", RUNS)
def test_a_run_is_compared_with_its_own_past(case):
    rows, expected = RUNS[case]
    sentinels = Sentinels()
    alarms = [[a.severity for a in sentinels.check(step, row)] for step, row in enumerate(rows)]
    assert alarms[-1] == expected
    assert ["stop"] not in alarms[:-1]


# ------------------------------------------------------------- state


def unstable_run(seed, num_steps):
    """Metrics of a run with one problem after the other, and with missing values."""
    rng = random.Random(seed)
    problem = {}
    for step in range(1, num_steps + 1):
        if step > 12 and rng.random() < 0.1:
            case = CASES[rng.choice(list(CASES))]
            problem = rng.choice([{}, case[0], case[1]])
        row = {n: v for n, v in (HEALTHY | problem).items() if rng.random() > 0.1}
        yield step, row | {n: None for n in row if rng.random() < 0.05}


def test_a_run_resumed_anywhere_raises_exactly_the_alarms_of_an_uninterrupted_one():
    all_alarms = set()
    for seed in range(20):
        rows = list(unstable_run(seed, 300))
        sentinels, states, alarms = Sentinels(), [], []
        for step, row in rows:
            states.append(json.dumps(sentinels.state_dict(), allow_nan=False))
            alarms.append(sentinels.check(step, row))
        for cut in range(0, 300, 41):
            resumed = Sentinels()
            resumed.load_state_dict(json.loads(states[cut]))
            assert [resumed.check(step, row) for step, row in rows[cut:]] == alarms[cut:]
        all_alarms |= {(a.name, a.severity) for step in alarms for a in step}
    # Every rule must have raised both alarms, or the comparison would prove little.
    assert all_alarms == {(name, severity) for name in RULES for severity in ("warn", "stop")}


# ------------------------------------------------------------- recorded runs


RECORDED = Path(__file__).parent / "data" / "sentinels.jsonl"  # 60 steps of TextCraft each


@pytest.mark.parametrize(
    ("name", "expected"),
    [("rl-0", []), ("sft-0", []), ("shuffled-0", [(45, "warn", 0.411), (60, "stop", 0.274)])],
)
def test_a_recorded_run_raises_alarms_only_if_its_rewards_were_shuffled(name, expected):
    """The shuffled run's held-out success is 54.8, 48.0, 44.8, 17.5, 11.9 %."""
    rows = [json.loads(line) for line in RECORDED.read_text().splitlines()]
    rows = [row for row in rows if row.pop("run") == name]
    assert len(rows) == 61
    sentinels = Sentinels()
    alarms = [(row["step"], alarm) for row in rows for alarm in sentinels.check(row["step"], row)]
    assert {alarm.name for _, alarm in alarms} <= {"held_out"}
    assert [(step, a.severity, round(a.limit, 3)) for step, a in alarms] == expected
