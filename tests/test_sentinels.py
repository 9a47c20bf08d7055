"""What sentinels.py promises: healthy runs pass, collapse warns and stops, one spike does not."""

import copy
import doctest
import json
import math
import random
import re
from dataclasses import fields
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reporting import metrics, sentinels
from reporting.metrics import METRICS, repeated_tokens
from reporting.sentinels import RULES, Sentinels

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "recipes" / "results"

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


def severities(watch, name, changes, num_steps):
    """[what `name` said] of steps that are healthy but for `changes`; nobody else may speak."""
    said = []
    for step in range(26, 26 + num_steps):
        alarms = watch.check(step, HEALTHY | changes)
        assert {alarm.name for alarm in alarms} <= {name}
        said.append(alarms[0].severity if alarms else "")
    return said


# ------------------------------------------------------------- each sentinel


def test_every_rule_has_its_case_here():
    assert list(CASES) == list(RULES)


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
def test_the_warn_level_warns_once_and_at_the_hand_worked_limit(name):
    warn_step, _, (warn_at, _), (warn_after, stop_after) = CASES[name]
    watch = after_healthy_steps()
    said = severities(watch, name, warn_step, stop_after - 1)
    assert said == [""] * (warn_after - 1) + ["warn"] + [""] * (stop_after - 1 - warn_after)
    again = after_healthy_steps()
    (alarm,) = [a for s in range(warn_after) for a in again.check(s, HEALTHY | warn_step)]
    assert (alarm.name, alarm.severity) == (name, "warn")
    assert alarm.limit == pytest.approx(warn_at)


@pytest.mark.parametrize("name", [n for n, case in CASES.items() if case[0] != case[1]])
def test_the_warn_level_alone_never_stops_a_run(name):
    said = severities(after_healthy_steps(), name, CASES[name][0], 60)
    assert sorted(filter(None, said)) == ["warn"]


@by_case
def test_the_stop_level_stops_when_it_has_held_and_goes_on_saying_so(name):
    warn_step, stop_step, (_, stop_at), (warn_after, stop_after) = CASES[name]
    watch = after_healthy_steps()
    said = severities(watch, name, stop_step, stop_after + 2)
    assert said[stop_after - 1 :] == ["stop"] * 3
    assert "stop" not in said[: stop_after - 1]
    alarm = watch.check(99, HEALTHY | stop_step)[0]
    assert (alarm.severity, alarm.limit) == ("stop", pytest.approx(stop_at))


@by_case
def test_a_spike_one_step_short_of_stopping_stops_nothing_however_often_it_comes(name):
    _, stop_step, _, (_, stop_after) = CASES[name]
    watch = after_healthy_steps()
    for _ in range(5):
        assert "stop" not in severities(watch, name, stop_step, stop_after - 1)
        assert severities(watch, name, {}, 20) == [""] * 20


@by_case
def test_a_second_fall_warns_again(name):
    warn_step, _, _, (warn_after, _) = CASES[name]
    watch = after_healthy_steps()
    for _ in range(2):
        assert severities(watch, name, warn_step, warn_after)[-1] == "warn"
        assert severities(watch, name, {}, 3) == [""] * 3


@by_case
@pytest.mark.parametrize("missing", [{}, dict.fromkeys(HEALTHY)], ids=["absent", "None"])
def test_a_step_that_measured_nothing_neither_counts_nor_clears_a_streak(name, missing):
    _, stop_step, _, (_, stop_after) = CASES[name]
    watch = after_healthy_steps()
    for _ in range(stop_after - 1):
        assert "stop" not in [a.severity for a in watch.check(30, HEALTHY | stop_step)]
        assert watch.check(31, missing) == []
    assert [a.severity for a in watch.check(32, HEALTHY | stop_step)] == ["stop"]


# ------------------------------------------------------------- healthy although it looks ill


def test_nothing_is_judged_before_there_is_a_past_to_compare_with():
    watch = Sentinels()
    wild = [0.01, 900.0, 0.3, 70.0, 0.2]
    for step, value in enumerate(wild):
        metrics = {"policy/grad_norm": value, "policy/entropy": value}
        metrics |= {"eval/avg": 0.0, "train/parse_error_rate": 1.0}
        assert watch.check(step, metrics) == []


def test_the_sixth_gradient_norm_is_the_first_to_be_judged():
    watch = Sentinels()
    for step in range(5):
        assert watch.check(step, {"policy/grad_norm": 500.0 if step == 4 else 0.3}) == []
    assert [a.name for a in watch.check(6, {"policy/grad_norm": 500.0})] == ["grad_norm"]


def test_a_good_start_of_four_steps_sets_no_standard_yet():
    for good, expected in ((4, []), (5, ["valid_actions"])):
        watch = Sentinels()
        for step in range(good):
            watch.check(step, {"train/parse_error_rate": 0.0})
        bad = [
            a.name for step in range(2) for a in watch.check(step, {"train/parse_error_rate": 1.0})
        ]
        assert bad == expected


def test_partial_credit_is_signal_although_nobody_succeeds():
    watch = after_healthy_steps()
    credit = {"train/groups_zero_variance": 7, "train/success_rate": 0.0}
    assert severities(watch, "no_signal", credit, 50) == [""] * 50


def test_a_sustained_rise_of_the_gradient_becomes_the_new_normal_below_the_stop_level():
    watch = after_healthy_steps()
    assert severities(watch, "grad_norm", {"policy/grad_norm": 5.0}, 21)[0] == "warn"
    alarms = watch.check(60, HEALTHY | {"policy/grad_norm": 40.0})  # 8 times 5.0
    assert alarms == []


def test_gradients_of_almost_nothing_do_not_make_an_ordinary_one_look_like_an_explosion():
    watch = Sentinels()
    for step in range(20):
        watch.check(step, {"policy/grad_norm": 1e-4})
    assert watch.check(20, {"policy/grad_norm": 0.9}) == []
    assert watch.check(21, {"policy/grad_norm": 1.0})[0].limit == pytest.approx(1.0)


def test_a_step_without_learning_signal_is_not_a_broken_update():
    watch = after_healthy_steps()
    for step in range(30, 60):
        assert watch.check(step, {"policy/optimizer_steps": 0, "policy/skipped_steps": 0}) == []


def test_a_step_without_signal_between_broken_updates_does_not_excuse_them():
    watch = after_healthy_steps()
    broken = {"policy/optimizer_steps": 0, "policy/skipped_steps": 4, "policy/grad_norm": 0.0}
    no_signal = {"policy/optimizer_steps": 0, "policy/skipped_steps": 0}
    said = [
        [a.severity for a in watch.check(step, metrics)]
        for step, metrics in enumerate([broken, no_signal, broken, no_signal, broken])
    ]
    assert said == [["warn"], [], [], [], ["stop"]]


def test_a_run_that_solves_everything_is_not_a_run_without_signal():
    watch = after_healthy_steps()
    solved = {"train/groups_zero_variance": 8, "train/success_rate": 1.0}
    assert severities(watch, "no_signal", solved, 100) == [""] * 100


def test_a_run_that_never_solved_anything_is_warned_of_and_not_stopped():
    watch = Sentinels()
    said = [a for step in range(100) for a in watch.check(step, {"train/groups": 8} | SILENT)]
    assert [a.severity for a in said] == ["warn"]
    assert "never stops" in said[0].message
    assert "--warm-start" in said[0].message


def test_one_lucky_step_does_not_count_as_success_that_could_be_lost():
    watch = Sentinels()
    for step in range(100):
        lucky = {"train/groups_zero_variance": 7, "train/success_rate": 0.5} if step == 30 else {}
        alarms = watch.check(step, {"train/groups": 8} | SILENT | lucky)
        assert "stop" not in [a.severity for a in alarms]


def test_a_step_whose_trajectories_were_all_lost_says_nothing_about_signal():
    watch = after_healthy_steps()
    lost = {"train/groups": 0, "train/groups_zero_variance": 0, "train/success_rate": None}
    for step in range(30, 60):
        assert watch.check(step, lost) == []


def test_a_model_that_starts_without_valid_actions_has_not_collapsed():
    watch = Sentinels()
    for step in range(50):
        rate = 1.0 if step % 5 else 0.85  # mostly none, at times 15 % valid
        assert watch.check(step, {"train/parse_error_rate": rate}) == []


def test_valid_actions_that_were_learned_and_lost_are_noticed():
    watch = Sentinels()
    said = []
    for step in range(40):
        errors = max(1 - step / 20, 0.1) if step < 30 else 1.0
        said += watch.check(step, {"train/parse_error_rate": errors})
    assert [(a.severity, a.limit) for a in said] == [
        ("warn", pytest.approx(0.63)),  # 0.7 of 90 %
        *[("stop", pytest.approx(0.27))] * 6,
    ]


def test_a_poor_evaluation_is_measured_against_the_best_and_not_the_last():
    watch = Sentinels()
    said = []
    for step, success in enumerate([0.5, 0.8, 0.65, 0.5, 0.4, 0.39, 0.41, 0.8, 0.3]):
        said.append([a.severity for a in watch.check(step, {"eval/avg": success})])
    assert said == [[], [], [], ["warn"], [], ["stop"], [], [], ["warn"]]


def test_a_held_out_success_of_a_few_percent_cannot_fall_far_enough_to_alarm():
    watch = Sentinels()
    for step, success in enumerate([0.02, 0.09, 0.0, 0.0, 0.0]):
        assert watch.check(step, {"eval/avg": success}) == []


def test_entropy_is_compared_with_the_median_of_the_first_ten_measured_steps():
    watch = Sentinels()
    for step in range(10):
        watch.check(2 * step, {"policy/entropy": None})
        watch.check(2 * step + 1, {"policy/entropy": 9.0 if step < 3 else 0.5})
    low = [a for step in range(3) for a in watch.check(50 + step, {"policy/entropy": 0.04})]
    assert [a.limit for a in low] == [pytest.approx(0.05)]
    assert "entropy 0.04 nats, at the start 0.5" in low[0].message


# ------------------------------------------------------------- numbers that are not finite


@pytest.mark.parametrize("name", ["policy/loss", "policy/grad_norm"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_loss_or_gradient_that_is_not_finite_is_a_broken_update(name, value):
    watch = after_healthy_steps()
    said = severities(watch, "non_finite", {name: value}, 3)
    assert said == ["warn", "", "stop"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_any_other_number_that_is_not_finite_was_not_measured(value):
    watch, told = after_healthy_steps(), after_healthy_steps()
    others = {n: value for n in HEALTHY if n not in ("policy/loss", "policy/grad_norm")}
    assert watch.check(26, HEALTHY | others) == []
    told.check(26, {n: v for n, v in HEALTHY.items() if n not in others})
    assert watch.state_dict() == told.state_dict()
    assert value not in str(watch.state_dict()).split()


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


def test_tensors_of_one_element_are_numbers():
    torch = pytest.importorskip("torch")
    watch = after_healthy_steps()
    said = watch.check(26, {"policy/approx_kl": torch.tensor(0.5)})
    assert [(a.name, a.value) for a in said] == [("approx_kl", 0.5)]
    json.dumps(watch.state_dict())


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


def resumed_at(cut, rows):
    """Alarms after step `cut` of a run whose sentinels went through a checkpoint there."""
    before, after = Sentinels(), Sentinels()
    for step, row in rows[:cut]:
        before.check(step, row)
    after.load_state_dict(json.loads(json.dumps(before.state_dict(), allow_nan=False)))
    return [alarm for step, row in rows[cut:] for alarm in after.check(step, row)]


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 10_000))
def test_a_run_resumed_anywhere_raises_exactly_the_alarms_of_an_uninterrupted_one(seed):
    rows = list(stormy_run(seed, 70))
    watch = Sentinels()
    whole = [watch.check(step, row) for step, row in rows]
    for cut in range(len(rows) + 1):
        assert resumed_at(cut, rows) == [a for alarms in whole[cut:] for a in alarms]


def test_the_stormy_runs_sound_every_alarm_at_both_levels():
    """Else the test above would compare silence with silence."""
    heard = set()
    for seed in range(20):
        watch = Sentinels()
        for step, row in stormy_run(seed, 300):
            heard |= {(a.name, a.severity) for a in watch.check(step, row)}
    assert heard >= {(name, s) for name in RULES for s in ("warn", "stop")}


def test_a_state_is_a_copy_in_both_directions():
    watch = after_healthy_steps()
    state = watch.state_dict()
    kept = copy.deepcopy(state)
    watch.check(26, HEALTHY | {"policy/grad_norm": 8e8})
    assert state == kept
    watch.load_state_dict(state)
    state["grad_norms"].append(1e9)
    state["warn_streaks"]["kl"] = 7
    assert watch.state_dict() == kept


def test_the_state_stays_small_however_long_the_run():
    assert len(json.dumps(after_healthy_steps(2000).state_dict())) < 2000


def test_the_state_in_the_checkpoints_of_earlier_versions_is_taken():
    state = {
        "warn_streaks": {"kl": 2},
        "stop_streaks": {"kl": 0},
        "grad_norms": [0.3] * 20,
        "entropies": [0.1] * 10,
        "valid_rates": [0.95] * 5,
        "success_rates": [0.6] * 5,
        "best_valid": 0.95,
        "best_success": 0.6,
        "best_held_out": 0.5,
    }
    watch = Sentinels()
    watch.load_state_dict(state)
    assert watch.state_dict() == state
    assert [a.name for a in watch.check(26, HEALTHY | {"policy/kl": 2.0})] == ["kl"]


def test_a_state_of_other_fields_is_refused_by_name():
    state = Sentinels().state_dict()
    state["best_reward"] = state.pop("best_success")
    with pytest.raises(ValueError, match=r"best_reward.*expected.*best_success.*start a new run"):
        Sentinels().load_state_dict(state)


# ------------------------------------------------------------- messages and names


@by_case
def test_a_message_is_one_line_with_the_step_the_limit_and_what_to_do(name):
    config = pytest.importorskip("config")
    _, stop_step, _, (_, stop_after) = CASES[name]
    watch = after_healthy_steps()
    said = [a for s in range(26, 26 + stop_after) for a in watch.check(s, HEALTHY | stop_step)]
    assert [a.severity for a in said] == ["warn", "stop"]
    options = {"--" + f.name.replace("_", "-") for f in fields(config.Config)}
    for alarm in said:
        assert "\n" not in alarm.message
        assert f"{alarm.limit:.3g}" in alarm.message
        flags = set(re.findall(r"--[a-z-]+", alarm.message))
        assert flags
        assert flags <= options
    assert said[-1].message.startswith(f"step {25 + stop_after}: {name}: ")
    assert "--model RUN/checkpoints/best" in said[-1].message


def test_a_whole_message_reads():
    watch = after_healthy_steps()
    (alarm,) = watch.check(57, HEALTHY | {"policy/grad_norm": 240.0})
    assert alarm.message == (
        "step 57: grad_norm: gradient norm 240, lately 0.3 (warns at 3, stops at 30 if 3 in a "
        "row); lower --learning-rate or --max-grad-norm"
    )


def test_only_defined_metrics_are_read():
    class Spy(dict):
        asked = set()

        def get(self, name, default=None):
            self.asked.add(name)
            return super().get(name, default)

    after_healthy_steps().check(26, Spy(HEALTHY))
    assert Spy.asked == set(HEALTHY)  # each case above therefore reaches its sentinel
    assert Spy.asked - {"train/repeated_token_rate"} <= set(METRICS)


def test_the_docstrings_examples_run():
    results = [doctest.testmod(module) for module in (sentinels, metrics)]
    assert sum(result.attempted for result in results) >= 6
    assert all(result.attempted and not result.failed for result in results)


# ------------------------------------------------------------- the recorded runs


def recorded(name):
    """(step, metrics) of a committed run of the `learns` recipe, evaluations included.

    The curve keeps how many trajectories entered the loss; with groups of equal returns left out,
    that is the number of groups with signal.
    """
    run = json.loads((RESULTS / "learns" / f"{name}.json").read_text())
    held_out = {row["step"]: row["avg"]["value"] for row in run["held_out"]}
    yield 0, {"eval/avg": held_out[0]}
    groups, size = run["config"]["tasks_per_step"], run["config"]["group_size"]
    for row in run["curve"]:
        if row.get("train/trajectories_used") is not None:
            signal = row["train/trajectories_used"] // size
            row |= {"train/groups": groups, "train/groups_zero_variance": groups - signal}
        yield row["step"], row | {"eval/avg": held_out.get(row["step"])}


@pytest.mark.parametrize("name", ["rl-0", "rl-1", "rl-2", "sft-0"])
def test_the_recorded_healthy_runs_raise_no_alarm_at_all(name):
    watch = Sentinels()
    rows = list(recorded(name))
    assert len(rows) == 61
    assert [alarm for step, row in rows for alarm in watch.check(step, row)] == []
    state = watch.state_dict()  # and they were looked at
    assert len(state["grad_norms"]) == 20
    assert len(state["entropies"]) == 10
    assert state["best_held_out"] > 0.65


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"policy/grad_norm": 8e8}, "grad_norm"),
        ({"policy/entropy": 1e-6}, "entropy_floor"),
        ({"policy/entropy": 6.0}, "entropy_explosion"),
        ({"train/groups_zero_variance": 8, "train/success_rate": 0.0}, "no_signal"),
        ({"eval/avg": 0.1}, "held_out"),
    ],
)
def test_a_recorded_run_that_collapses_at_step_31_is_stopped_for_that_reason(change, name):
    watch = Sentinels()
    stops = set()
    for step, row in recorded("rl-0"):
        gone = {n: v for n, v in change.items() if step > 30 and row.get(n) is not None}
        stops |= {a.name for a in watch.check(step, row | gone) if a.severity == "stop"}
    assert stops == {name}


def test_the_shuffled_control_is_noticed_at_45_and_stopped_at_60():
    """Held-out success 54.8, 48.0, 44.8, 17.5, 11.9 %: limits 41.1 and 27.4 %."""
    watch = Sentinels()
    said = [(step, a) for step, row in recorded("shuffled-0") for a in watch.check(step, row)]
    assert [(step, a.name, a.severity) for step, a in said] == [
        (45, "held_out", "warn"),
        (60, "held_out", "stop"),
    ]
    assert said[0][1].limit == pytest.approx(0.75 * 0.5476, abs=1e-4)
    assert "held-out success" in said[0][1].message


HORIZONS = [
    RESULTS / f"miniature/{arm}-{seed}.json"
    for arm in ("short", "long", "stepwise")
    for seed in (0, 1, 2)
]


@pytest.mark.parametrize("path", HORIZONS, ids=lambda path: path.stem)
def test_the_recorded_evaluations_of_the_horizons_raise_no_alarm(path):
    watch = Sentinels()
    evaluations = json.loads(path.read_text())["held_out"]
    assert len(evaluations) >= 4
    for evaluation in evaluations:
        solved = [turns > 0 for samples in evaluation["solved_in"].values() for turns in samples]
        assert watch.check(evaluation["step"], {"eval/avg": sum(solved) / len(solved)}) == []


# ------------------------------------------------------------- repeated_tokens


def literal_repeated(ids, n=4):
    """The definition, token by token: in an n-gram that also starts somewhere to its left."""

    def again(start):
        return any(ids[k : k + n] == ids[start : start + n] for k in range(start))

    starts = range(len(ids) - n + 1)
    return sum(any(again(s) for s in starts if s <= i < s + n) for i in range(len(ids)))


@given(st.lists(st.integers(0, 2), max_size=30))
def test_repeated_tokens_is_its_definition_token_by_token(ids):
    assert repeated_tokens(ids) == (literal_repeated(ids), len(ids))


@pytest.mark.parametrize(
    ("text", "repeated"),
    [
        ("", 0),
        ("aaaa", 0),  # one 4-gram: short actions give 0
        ("aaaaa", 4),
        ("a" * 100, 99),
        ("ab" * 50, 98),
        ("abcdefgh", 0),
        ("abcdXabcd", 4),
        ("abcdXabcdYabcd", 8),
        ("abcXabc", 0),  # three in a row are no 4-gram
        ("abcdeXabcde", 5),  # two 4-grams that overlap: their five tokens count once
    ],
)
def test_hand_worked_repetitions(text, repeated):
    assert repeated_tokens([ord(c) for c in text]) == (repeated, len(text))


def test_what_an_agent_ordinarily_says_is_far_below_the_limit():
    """The oracle's actions, split into words and into characters: no tokenizer lies outside."""
    from envs.textcraft.env import TextCraft

    env, rates = TextCraft(), {}
    for split in (r"\w+|\S", r"(?s)."):
        repeated = total = 0
        for task in range(40):
            env.reset(task, 0)
            thought, action = env.oracle()
            tokens = re.findall(split, f"Thought: {thought}\nAction: {action}")
            vocabulary = {token: i for i, token in enumerate(dict.fromkeys(tokens))}
            counted = repeated_tokens([vocabulary[token] for token in tokens])
            repeated, total = repeated + counted[0], total + counted[1]
        rates[split] = repeated / total
    words, characters = rates.values()
    assert words < 0.05
    assert 0.1 < characters < RULES["repeated_tokens"].warn
