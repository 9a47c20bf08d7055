"""What sentinels.py promises: healthy runs pass, collapse warns and stops, one spike does not."""

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

# One healthy step. Every rule's past is then: gradient norm 0.3, entropy 0.1 nats, 95 % valid
# actions, held-out success 50 %, training success 60 %.
HEALTHY = {
    "policy/loss": 0.2,
    "policy/grad_norm": 0.3,
    "policy/optimizer_steps": 4,
    "policy/skipped_steps": 0,
    "critic/skipped_steps": 0,
    "policy/entropy": 0.1,
    "policy/approx_kl": 0.001,
    "policy/kl": 0.02,
    "train/repeated_token_rate": 0.02,
    "train/parse_error_rate": 0.05,
    "train/groups": 8,
    "train/groups_zero_variance": 3,
    "train/success_rate": 0.6,
    "eval/avg": 0.5,
}
BROKEN = {"policy/skipped_steps": 1, "policy/optimizer_steps": 3}
SILENT = {"train/groups_zero_variance": 8, "train/success_rate": 0.0}
# name: (a step at the warn level, one at the stop level, both limits, steps until each alarm);
# the limits are worked by hand from HEALTHY.
CASES = {
    "grad_norm": ({"policy/grad_norm": 4.0}, {"policy/grad_norm": 8e8}, (3.0, 30.0), (1, 3)),
    "non_finite": (BROKEN, BROKEN, (1, 1), (1, 3)),
    "entropy_floor": ({"policy/entropy": 0.005}, {"policy/entropy": 0.0}, (0.01, 0.001), (3, 5)),
    "entropy_explosion": ({"policy/entropy": 1.5}, {"policy/entropy": 4.0}, (1.1, 3.1), (3, 5)),
    "approx_kl": ({"policy/approx_kl": 0.2}, {"policy/approx_kl": 2.0}, (0.1, 1.0), (1, 3)),
    "kl": ({"policy/kl": 2.0}, {"policy/kl": 20.0}, (1.0, 10.0), (3, 5)),
    "repeated_tokens": (
        *({"train/repeated_token_rate": 0.4}, {"train/repeated_token_rate": 0.95}),
        *((0.3, 0.6), (2, 3)),
    ),
    "valid_actions": (
        *({"train/parse_error_rate": 0.5}, {"train/parse_error_rate": 0.9}),
        *((0.665, 0.285), (2, 5)),
    ),
    "held_out": ({"eval/avg": 0.3}, {"eval/avg": 0.2}, (0.375, 0.25), (1, 2)),
    "no_signal": (SILENT, SILENT, (0.05, 0.05), (5, 20)),
}
by_case = pytest.mark.parametrize("name", CASES)


def after_healthy_steps(num_steps=25):
    watch = Sentinels()
    for step in range(1, num_steps + 1):
        assert watch.check(step, HEALTHY) == []
    return watch


def play(watch, name, changes, num_steps):
    """The alarms, or None, of steps that are healthy but for `changes`; only `name` may alarm."""
    heard = []
    for step in range(26, 26 + num_steps):
        alarms = watch.check(step, HEALTHY | changes)
        assert {alarm.name for alarm in alarms} <= {name}
        heard.append(alarms[0] if alarms else None)
    return heard


def severities(watch, name, changes, num_steps):
    return [alarm.severity if alarm else "" for alarm in play(watch, name, changes, num_steps)]


# ------------------------------------------------------------- each sentinel


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000))
def test_a_healthy_run_with_noise_raises_no_alarm(seed):
    rng, watch = random.Random(seed), Sentinels()
    assert set(HEALTHY) <= set(METRICS)
    for step in range(1, 301):
        noisy = {
            n: v * rng.uniform(0.88, 1.12) if n != "train/groups" else v for n, v in HEALTHY.items()
        }
        assert watch.check(step, noisy) == []


@by_case
def test_the_warn_level_warns_once_per_fall_at_the_hand_worked_limit(name):
    changes, _, (warn_at, _), (warn_after, stop_after) = CASES[name]
    watch = after_healthy_steps()
    for _ in range(2):
        *before, alarm = play(watch, name, changes, warn_after)
        assert before == [None] * (warn_after - 1)
        assert (alarm.severity, alarm.limit) == ("warn", pytest.approx(warn_at))
        silent = stop_after - 1 - warn_after
        assert severities(watch, name, changes, silent) == [""] * silent
        assert severities(watch, name, {}, 3) == [""] * 3


@by_case
def test_the_stop_level_stops_once_it_has_held_and_the_message_says_what_to_do(name):
    _, changes, (_, stop_at), (_, stop_after) = CASES[name]
    *before, alarm, again = play(after_healthy_steps(), name, changes, stop_after + 1)
    assert "stop" not in {earlier.severity for earlier in before if earlier}
    assert (alarm.severity, again.severity) == ("stop", "stop")
    assert alarm.limit == pytest.approx(stop_at)
    assert alarm.message.startswith(f"step {25 + stop_after}: {name}: ")
    flags = set(re.findall(r"--[a-z-]+", alarm.message))
    assert flags and flags <= {config.flag(field.name) for field in fields(config.Config)}


@by_case
def test_a_spike_one_step_short_of_stopping_stops_nothing_however_often_it_comes(name):
    _, stop_step, _, (_, stop_after) = CASES[name]
    watch = after_healthy_steps()
    for _ in range(5):
        assert "stop" not in severities(watch, name, stop_step, stop_after - 1)
        assert severities(watch, name, {}, 20) == [""] * 20
    for _ in range(stop_after - 1):  # a step that measured nothing neither counts nor clears
        assert "stop" not in severities(watch, name, stop_step, 1)
        assert watch.check(40, {}) == watch.check(41, dict.fromkeys(HEALTHY)) == []
    assert severities(watch, name, stop_step, 1) == ["stop"]


def test_an_update_that_is_not_finite_is_broken_and_the_means_of_its_step_are_not_believed():
    """They are sums that lack what came after the break: too small, whatever the policy does."""
    means = {"policy/entropy": 0.0, "policy/kl": 1e9, "policy/approx_kl": 1e9}
    for broken in ({"policy/loss": math.nan}, {"policy/grad_norm": math.inf}, BROKEN | means):
        heard = severities(after_healthy_steps(), "non_finite", broken, 3)
        assert heard == ["warn", "", "stop"]


# ------------------------------------------------------- healthy although it looks ill


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
def test_steps_without_a_problem_raise_no_alarm_for_however_long(changes):
    watch = after_healthy_steps()
    assert [a for step in range(30, 130) for a in watch.check(step, HEALTHY | changes)] == []


def rows_of(name, *values):
    return [{name: value} for value in values]


ERRORS, LUCKY = "train/parse_error_rate", {"train/groups": 8, "train/success_rate": 0.5}
NEVER_SOLVED = [{"train/groups": 8} | SILENT] * 40
# Rows, and the alarms that the last of them raises.
RUNS = {
    "four gradients are no past": (rows_of("policy/grad_norm", *[0.3] * 4, 500.0), []),
    "five are one": (rows_of("policy/grad_norm", *[0.3] * 5, 500.0), ["warn"]),
    "an ordinary one after tiny ones": (rows_of("policy/grad_norm", *[1e-4] * 20, 0.9), []),
    "ten times the least": (rows_of("policy/grad_norm", *[1e-4] * 20, 1.0), ["warn"]),
    "never more than a few valid": (rows_of(ERRORS, *[0.85, 1.0, 1.0, 1.0, 1.0] * 9), []),
    "a success of a few percent": (rows_of("eval/avg", 0.02, 0.09, 0.0, 0.0, 0.0), []),
    "against the best, not the last": (rows_of("eval/avg", 0.5, 0.8, 0.65, 0.5), ["warn"]),
    "twice below half the best": (rows_of("eval/avg", 0.8, 0.5, 0.4, 0.39), ["stop"]),
    "a recovery between": (rows_of("eval/avg", 0.8, 0.39, 0.8, 0.3), ["warn"]),
    "never solved: no stop": (NEVER_SOLVED, []),
    "one lucky step is no standard": ([*NEVER_SOLVED[:4], LUCKY, *NEVER_SOLVED], []),
    "the median of ten": (
        rows_of("policy/entropy", *[9.0] * 3, None, *[0.5] * 7, 0.05, 0.05, 0.05),
        ["warn"],
    ),
    "not quite a tenth": (rows_of("policy/entropy", *[9.0] * 3, *[0.5] * 7, *[0.051] * 9), []),
}


@pytest.mark.parametrize("case", RUNS)
def test_a_run_is_measured_against_its_own_past(case):
    rows, expected = RUNS[case]
    watch = Sentinels()
    heard = [[a.severity for a in watch.check(step, row)] for step, row in enumerate(rows)]
    assert heard[-1] == expected
    assert ["stop"] not in heard[:-1]


# ------------------------------------------------------------- state


def stormy_run(seed, num_steps):
    """Metrics of a run that gets everything wrong in turn, with gaps."""
    rng = random.Random(seed)
    mood = {}
    for step in range(1, num_steps + 1):
        if step > 12 and rng.random() < 0.1:
            case = CASES[rng.choice(list(CASES))]
            mood = rng.choice([{}, case[0], case[1]])
        row = {n: v for n, v in (HEALTHY | mood).items() if rng.random() > 0.1}
        yield step, row | {n: None for n in row if rng.random() < 0.05}


def test_a_run_resumed_anywhere_raises_exactly_the_alarms_of_an_uninterrupted_one():
    heard = set()
    for seed in range(20):
        rows = list(stormy_run(seed, 300))
        watch, states, alarms = Sentinels(), [], []
        for step, row in rows:
            states.append(json.dumps(watch.state_dict(), allow_nan=False))
            alarms.append(watch.check(step, row))
        for cut in range(0, 300, 41):
            resumed = Sentinels()
            resumed.load_state_dict(json.loads(states[cut]))
            assert [resumed.check(step, row) for step, row in rows[cut:]] == alarms[cut:]
        heard |= {(a.name, a.severity) for step in alarms for a in step}
    # Otherwise silence would have been compared with silence.
    assert heard == {(name, severity) for name in RULES for severity in ("warn", "stop")}


# ------------------------------------------------------------- recorded runs


RECORDED = Path(__file__).parent / "data" / "sentinels.jsonl"  # 60 steps of TextCraft each


@pytest.mark.parametrize(
    ("name", "expected"),
    [("rl-0", []), ("sft-0", []), ("shuffled-0", [(45, "warn", 0.411), (60, "stop", 0.274)])],
)
def test_a_recorded_run_raises_alarms_only_if_its_rewards_were_shuffled(name, expected):
    """Its held-out success is 54.8, 48.0, 44.8, 17.5, 11.9 %."""
    rows = [json.loads(line) for line in RECORDED.read_text().splitlines()]
    rows = [row for row in rows if row.pop("run") == name]
    assert len(rows) == 61
    watch = Sentinels()
    heard = [(row["step"], alarm) for row in rows for alarm in watch.check(row["step"], row)]
    assert {alarm.name for _, alarm in heard} <= {"held_out"}
    assert [(step, a.severity, round(a.limit, 3)) for step, a in heard] == expected
