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


def test_every_rule_has_its_case_and_reads_metrics_that_exist():
    assert list(CASES) == list(RULES)
    assert set(HEALTHY) <= set(METRICS)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10_000))
def test_a_healthy_run_with_noise_raises_no_alarm(seed):
    rng, watch = random.Random(seed), Sentinels()
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
    assert "\n" not in alarm.message and f"{alarm.limit:.3g}" in alarm.message
    flags = set(re.findall(r"--[a-z-]+", alarm.message))
    assert flags and flags <= {"--" + f.name.replace("_", "-") for f in fields(config.Config)}


@by_case
def test_a_spike_one_step_short_of_stopping_stops_nothing_however_often_it_comes(name):
    _, stop_step, _, (_, stop_after) = CASES[name]
    watch = after_healthy_steps()
    for _ in range(5):
        assert "stop" not in severities(watch, name, stop_step, stop_after - 1)
        assert severities(watch, name, {}, 20) == [""] * 20


@by_case
def test_a_step_that_measured_nothing_neither_counts_nor_clears_a_streak(name):
    _, stop_step, _, (_, stop_after) = CASES[name]
    watch = after_healthy_steps()
    for _ in range(stop_after - 1):
        assert "stop" not in [a.severity for a in watch.check(30, HEALTHY | stop_step)]
        assert watch.check(31, {}) == watch.check(31, dict.fromkeys(HEALTHY)) == []
    assert [a.severity for a in watch.check(32, HEALTHY | stop_step)] == ["stop"]


# ------------------------------------------------------- healthy although it looks ill


SOLVED = {"train/groups_zero_variance": 8, "train/success_rate": 1.0}
CREDIT = {"train/groups_zero_variance": 7, "train/success_rate": 0.0}
LOST = {"train/groups": 0, "train/groups_zero_variance": 0, "train/success_rate": None}
IDLE = dict.fromkeys(HEALTHY) | {"policy/optimizer_steps": 0, "policy/skipped_steps": 0}


@pytest.mark.parametrize(
    "changes", [SOLVED, CREDIT, LOST, IDLE], ids=["all", "part", "lost", "idle"]
)
def test_steps_without_a_problem_raise_no_alarm_for_however_long(changes):
    """All is solved; a return without success; all was lost; no update was made."""
    watch = after_healthy_steps()
    assert [a for step in range(30, 130) for a in watch.check(step, HEALTHY | changes)] == []


def check_all(rows):
    watch = Sentinels()
    return [[a.severity for a in watch.check(step, row)] for step, row in enumerate(rows)]


NEVER = {
    "nothing to compare with": [
        {"policy/grad_norm": x, "policy/entropy": x, "eval/avg": 0.0, "train/parse_error_rate": 1.0}
        for x in (0.01, 900.0, 0.3, 70.0, 0.2)
    ],
    "four good steps set no standard": [{"train/parse_error_rate": 0.0}] * 4
    + [{"train/parse_error_rate": 1.0}] * 2,
    "never more than a few valid actions": [
        {"train/parse_error_rate": 1.0 if step % 5 else 0.85} for step in range(50)
    ],
    "a held-out success of a few percent": [{"eval/avg": x} for x in (0.02, 0.09, 0.0, 0.0, 0.0)],
    "small gradients, then an ordinary one": [{"policy/grad_norm": 1e-4}] * 20
    + [{"policy/grad_norm": 0.9}],
}


@pytest.mark.parametrize("case", NEVER)
def test_runs_that_cannot_fall_are_left_alone(case):
    assert check_all(NEVER[case]) == [[]] * len(NEVER[case])


def test_five_measurements_make_a_past():
    gradients = [{"policy/grad_norm": x} for x in (0.3, 0.3, 0.3, 0.3, 500.0, 500.0)]
    assert check_all(gradients) == [[]] * 5 + [["warn"]]
    valid = [{"train/parse_error_rate": x} for x in (0.0,) * 5 + (1.0,) * 2]
    assert check_all(valid) == [[]] * 6 + [["warn"]]
    small = [{"policy/grad_norm": 1e-4}] * 20 + [{"policy/grad_norm": 1.0}]
    assert check_all(small)[-1] == ["warn"]  # 10 times the least median


def test_a_sustained_rise_of_the_gradient_becomes_the_new_normal_below_the_stop_level():
    watch = after_healthy_steps()
    assert severities(watch, "grad_norm", {"policy/grad_norm": 5.0}, 21)[0] == "warn"
    assert watch.check(60, HEALTHY | {"policy/grad_norm": 40.0}) == []  # 8 times 5.0


def test_a_run_that_never_solved_anything_is_warned_and_not_stopped():
    """Nor is one that had one lucky step."""
    lucky = {"train/groups_zero_variance": 7, "train/success_rate": 0.5}
    for luck in ({}, lucky):
        rows = [{"train/groups": 8} | SILENT | (luck if n == 30 else {}) for n in range(100)]
        said = [x for alarms in check_all(rows) for x in alarms]
        assert set(said) == {"warn"}


def test_a_poor_evaluation_is_measured_against_the_best_and_not_the_last():
    successes = [0.5, 0.8, 0.65, 0.5, 0.4, 0.39, 0.41, 0.8, 0.3]
    said = check_all([{"eval/avg": x} for x in successes])
    assert said == [[], [], [], ["warn"], [], ["stop"], [], [], ["warn"]]


def test_entropy_is_compared_with_the_median_of_the_first_ten_measured_steps():
    watch = Sentinels()
    for step in range(10):
        watch.check(2 * step, {"policy/entropy": None})
        watch.check(2 * step + 1, {"policy/entropy": 9.0 if step < 3 else 0.5})
    (alarm,) = [a for step in range(3) for a in watch.check(50 + step, {"policy/entropy": 0.04})]
    assert alarm.limit == pytest.approx(0.05)


# ------------------------------------------------------------- numbers that are not finite


@pytest.mark.parametrize(
    ("name", "value"), [("policy/loss", math.nan), ("policy/grad_norm", math.inf)]
)
def test_a_loss_or_gradient_that_is_not_finite_is_a_broken_update(name, value):
    watch = after_healthy_steps()
    assert severities(watch, "non_finite", {name: value}, 3) == ["warn", "", "stop"]


def test_any_other_number_that_is_not_finite_was_not_measured():
    watch, other = after_healthy_steps(), after_healthy_steps()
    changes = {n: math.nan for n in HEALTHY if n not in ("policy/loss", "policy/grad_norm")}
    assert watch.check(26, HEALTHY | changes) == []
    other.check(26, {n: v for n, v in HEALTHY.items() if n not in changes})
    assert watch.state_dict() == other.state_dict()


def test_the_means_of_a_step_with_skipped_mini_batches_are_not_believed():
    """They are sums that lack what came after the break: too small, whatever the policy does."""
    watch = after_healthy_steps()
    partial = BROKEN | {"policy/entropy": 0.0, "policy/kl": 1e9, "policy/approx_kl": 1e9}
    for step in range(10):
        assert {a.name for a in watch.check(step, HEALTHY | partial)} <= {"non_finite"}


def test_spikes_between_broken_updates_stop_the_run_as_the_published_collapse_would():
    """Gradient norm 8e8, NaN, 8e8, NaN, ...: neither is three in a row of everything."""
    watch = after_healthy_steps()
    stopped = []
    for step in range(26, 36):
        collapse = {"policy/grad_norm": 8e8} if step % 2 else BROKEN | {"policy/grad_norm": 0.0}
        stopped += [step for a in watch.check(step, HEALTHY | collapse) if a.severity == "stop"]
    assert stopped[0] == 31


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


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10_000))
def test_a_run_resumed_anywhere_raises_exactly_the_alarms_of_an_uninterrupted_one(seed):
    rows = list(stormy_run(seed, 70))
    watch, states, alarms = Sentinels(), [], []
    for step, row in rows:
        states.append(json.dumps(watch.state_dict(), allow_nan=False))
        alarms.append(watch.check(step, row))
    for cut, state in enumerate(states):
        resumed = Sentinels()
        resumed.load_state_dict(json.loads(state))
        assert [resumed.check(step, row) for step, row in rows[cut:]] == alarms[cut:]
    assert len(states[-1]) < 2000


def test_the_stormy_runs_sound_every_alarm_at_both_levels():
    """Otherwise the test above would compare silence with silence."""
    heard = set()
    for seed in range(20):
        watch = Sentinels()
        for step, row in stormy_run(seed, 300):
            heard |= {(a.name, a.severity) for a in watch.check(step, row)}
    assert heard >= {(name, s) for name in RULES for s in ("warn", "stop")}


# ------------------------------------------------------------- recorded runs


RECORDED = Path(__file__).parent / "data" / "sentinels.jsonl"  # 60 steps of TextCraft each


def recorded(name):
    """(step, metrics) of a run; `shuffled-0` is a control with shuffled rewards."""
    rows = [json.loads(line) for line in RECORDED.read_text().splitlines()]
    return [(row["step"], row) for row in rows if row.pop("run") == name]


@pytest.mark.parametrize("name", ["rl-0", "sft-0"])
def test_the_recorded_healthy_runs_raise_no_alarm_at_all(name):
    watch, rows = Sentinels(), recorded(name)
    assert len(rows) == 61
    assert [alarm for step, row in rows for alarm in watch.check(step, row)] == []


def test_the_shuffled_control_is_noticed_at_45_and_stopped_at_60():
    """Held-out success 54.8, 48.0, 44.8, 17.5, 11.9 %: limits 41.1 and 27.4 %."""
    watch = Sentinels()
    said = [(step, a) for step, row in recorded("shuffled-0") for a in watch.check(step, row)]
    assert [(step, a.name, a.severity) for step, a in said] == [
        (45, "held_out", "warn"),
        (60, "held_out", "stop"),
    ]
    assert said[0][1].limit == pytest.approx(0.75 * 0.5476, abs=1e-4)
