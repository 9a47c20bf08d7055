"""reporting/scoring.py: pass@k is unbiased, intervals cover the truth, the environment decides
what is solved."""

import itertools
import json
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reporting.compare import compare, format_table, paired_bootstrap
from reporting.scoring import estimate_share, pass_at_k, summarize
from trajectory import Trajectory, Turn


def episode_of(task_id, num_turns, success, env="textcraft", subtask="depth 1", stop_reason=None):
    """An episode whose last turn is rewarded if it is a success."""
    episode = Trajectory("t", 0, env, task_id, subtask, group_id=0, seed=0, max_rounds=9)
    episode.turns = [Turn((0, 0), "") for _ in range(num_turns)]
    episode.turns[-1].reward = float(success)
    episode.stop(stop_reason or ("success" if success else "failure"), success)
    return episode


def test_sub_tasks_with_the_same_name_in_two_environments_are_two_rows():
    episodes = [episode_of("a_0", 2, True, "a"), episode_of("b_0", 2, False, "b")]
    rows = summarize(episodes, 1)["subtasks"]
    shares = {name: row["avg"]["value"] for name, row in rows.items()}
    assert shares == {"a: depth 1": 1.0, "b: depth 1": 0.0}


# ----------------------------------------------------------------------------- pass@k


@given(st.integers(1, 9), st.data())
def test_pass_at_k_is_the_share_of_k_subsets_that_hold_a_solved_sample(num_samples, data):
    successes = data.draw(st.lists(st.booleans(), min_size=num_samples, max_size=num_samples))
    k = data.draw(st.integers(1, num_samples))
    subsets = list(itertools.combinations(successes, k))
    share = sum(any(subset) for subset in subsets) / len(subsets)
    assert pass_at_k(num_samples, sum(successes), k) == pytest.approx(share, abs=1e-12)


# -------------------------------------------------------------------------- intervals


def tail(num_items, share, counts):
    """Probability that the number of solved tasks is in `counts`."""
    return sum(math.comb(num_items, k) * share**k * (1 - share) ** (num_items - k) for k in counts)


@pytest.mark.parametrize("num_items", [1, 3, 31, 400])
def test_the_interval_of_a_share_is_exact_covers_95_percent_and_never_falls_with_more_solved(
    num_items,
):
    """Clopper and Pearson: at the lower end, at least k solved tasks have probability 2.5 %; at the
    upper end, at most k."""
    m = num_items
    intervals = [estimate_share([1.0] * k + [0.0] * (m - k)) for k in range(m + 1)]
    lows, highs = ([e[end] for e in intervals] for end in ("low", "high"))
    assert (lows[0], highs[m]) == (0.0, 1.0)
    for k in range(m):
        assert tail(m, highs[k], range(k + 1)) == pytest.approx(0.025, rel=0.01)
        assert tail(m, lows[k + 1], range(k + 1, m + 1)) == pytest.approx(0.025, rel=0.01)
    assert all(a < b for ends in (lows, highs) for a, b in itertools.pairwise(ends))
    for share in (0.01, 0.13, 0.5, 0.9):
        assert tail(m, share, [k for k in range(m + 1) if lows[k] <= share <= highs[k]]) >= 0.95


@pytest.mark.parametrize("num_items", [5, 15])
def test_no_end_falls_when_one_more_sample_is_solved(num_items):
    """Four samples per task. The tasks are solved one after the other, or all of them equally."""
    for order in (lambda n: divmod(n, 4), lambda n: divmod(n, num_items)[::-1]):
        before = {f"t_{i}": 0.25 for i in range(num_items)}
        shares = [[0.0] * num_items]
        for n in range(4 * num_items):
            shares.append(list(shares[-1]))
            shares[-1][order(n)[0]] += 0.25
        pairs = [paired_bootstrap(before, dict(zip(before, row, strict=True))) for row in shares]
        assert all(e["low"] < e["value"] < e["high"] for e in pairs)  # also if no task differs
        for a, b in [*itertools.pairwise(map(estimate_share, shares)), *itertools.pairwise(pairs)]:
            assert a["low"] <= b["low"] and a["high"] <= b["high"]


@pytest.mark.parametrize(("p", "num_items"), [(0.5, 80), (0.08, 40)])
def test_the_interval_of_averaged_samples_covers_the_truth_95_times_in_100(p, num_items):
    generator = random.Random(3)
    num_covered = 0
    for _ in range(400):
        shares = [generator.betavariate(p, 1 - p) for _ in range(num_items)]
        samples = [[generator.random() < share for _ in range(4)] for share in shares]
        e = estimate_share([sum(successes) / 4 for successes in samples])
        num_covered += e["low"] <= p <= e["high"]
    assert 0.95 <= num_covered / 400 <= 0.995


# ------------------------------------------------------------------- paired comparison


def test_pairing_shows_a_difference_although_the_two_intervals_overlap():
    generator = random.Random(0)
    before = {f"t_{i}": generator.random() for i in range(60)}  # tasks differ a lot
    after = {task: min(1.0, share + 0.1) for task, share in before.items()}
    assert estimate_share([*before.values()])["high"] > estimate_share([*after.values()])["low"]
    difference = paired_bootstrap(before, after)
    assert 0.0 < difference["low"] < difference["value"] < difference["high"] < 0.16
    assert difference["items"] == 60


def test_compare_reports_the_difference_tasks_left_out_and_settings_that_differ(tmp_path):
    def write(name, *shares, **options):
        items = {f"t_{i}": {"avg": share} for i, share in enumerate(shares)}
        (tmp_path / name).write_text(json.dumps({"items": items} | options))
        return tmp_path / name

    before, after = write("a.json", 0.0, 0.5, 1.0), write("b.json", 1.0, 1.0, attempts=5)
    line = compare(before, after)
    assert line.startswith("25.0 % -> 100.0 %: +75.0 points [")
    assert "paired over 2 tasks (1 left out because they are in only one file)" in line
    assert line.endswith("settings that differ: attempts")
    assert "differ" not in compare(before, before)
    write("b.json", 0.0, complete=False)
    with pytest.raises(ValueError, match=r"b.json is from an evaluation that was stopped"):
        compare(before, after)
    after.write_text("[]")
    with pytest.raises(ValueError, match=r"b.json is not an eval.json"):
        compare(before, after)


# --------------------------------------------------------------------------- summarize


def test_a_score_above_0_is_not_success():
    """Trap 17: a base 7B model scores in 24.5 % of SciWorld's tasks and completes 1.5 %."""
    episode = episode_of("t_0", 2, False, stop_reason="max_rounds")
    episode.turns[0].reward, episode.turns[1].reward = 0.3, 0.4
    overall = summarize([episode], 1)["overall"]
    assert overall["return_mean"] == pytest.approx(0.7)
    assert overall["avg"]["value"] == overall["pass"]["value"] == 0.0


def test_a_hand_worked_summary_with_unequal_numbers_of_samples():
    trajectories = [
        episode_of("t_0", 3, True),
        episode_of("t_0", 5, False),
        episode_of("t_1", 2, True, subtask="depth 2"),
        episode_of("t_1", 2, True, subtask="depth 2"),
        episode_of("t_1", 4, False, subtask="depth 2"),
        episode_of("t_2", 1, False),
        episode_of("t_2", 9, False, stop_reason="env_error"),
    ]
    summary = summarize(trajectories, samples=2)
    # The mean is over tasks (1/2, 2/3, 0), not over the 6 episodes.
    assert summary["overall"]["avg"]["value"] == pytest.approx((1 / 2 + 2 / 3 + 0) / 3)
    # pass@2 is 1 for t_0 and for t_1 (two of three solved); t_2 has only one valid sample.
    assert summary["overall"]["pass"]["value"] == pytest.approx(1.0)
    assert summary["overall"]["pass"]["items"] == 2
    assert [point["items"] for point in summary["pass_curve"]] == [3, 2]
    assert summary["pass_curve"][0]["value"] == pytest.approx(summary["overall"]["avg"]["value"])
    assert summary["overall"]["turns_mean"] == pytest.approx((3 + 5 + 2 + 2 + 4 + 1) / 6)
    assert summary["items"]["t_1"] == {
        "subtask": "depth 2",
        "samples": 3,
        "solved": 2,
        "avg": pytest.approx(2 / 3),
        "return_mean": pytest.approx(2 / 3),
        "turns_mean": pytest.approx(8 / 3),
    }
    assert list(summary["subtasks"]) == ["depth 1", "depth 2"]
    assert summary["subtasks"]["depth 1"]["items"] == 2
    assert summary["subtasks"]["depth 1"]["avg"]["value"] == pytest.approx(0.25)


def test_lost_trajectories_change_no_number_and_are_reported():
    """Trap 5, in evaluation: a dead server is not a failure of the agent."""
    healthy = [episode_of("t_0", 2, True), episode_of("t_1", 2, False)]
    lost = [
        episode_of("t_0", 1, False, stop_reason="env_error"),
        episode_of("t_2", 1, False, stop_reason="engine_error"),
    ]
    lost[1].error = "http://x: HTTP 500"
    summary = summarize([*healthy, *lost], 1)
    assert summary["overall"] == summarize(healthy, 1)["overall"]
    assert summary["lost"] == {
        "trajectories": 2,
        "of": 4,
        "items_without_sample": ["t_2"],
        "last_error": "http://x: HTTP 500",
    }
    assert "lost to infrastructure and not counted above: 2 of 4 trajectories" in format_table(
        summary
    )
    json.dumps(summarize(lost, 2, max_rounds=[3]), allow_nan=False)  # all trajectories are lost


def test_the_curve_over_turns_uses_the_same_episodes_cut_at_each_horizon():
    trajectories = [
        episode_of("t_0", 2, True),
        episode_of("t_1", 5, True),
        episode_of("t_2", 8, False, stop_reason="max_rounds"),
        episode_of("t_3", 3, False),
    ]
    summary = summarize(trajectories, 1, max_rounds=[8, 2, 4, 5])
    curve = summary["rounds_curve"]
    assert [row["max_rounds"] for row in curve] == [2, 4, 5, 8]
    assert [row["avg"]["value"] for row in curve] == [0.25, 0.25, 0.5, 0.5]
    assert curve[0]["turns_mean"] == 2.0
    assert curve[1]["turns_mean"] == pytest.approx((2 + 4 + 4 + 3) / 4)
    assert curve[1]["return_mean"] == 0.25  # t_1 gets its reward only in turn 5
    assert curve[-1]["avg"] == summary["overall"]["avg"]


def test_the_cost_of_several_attempts_is_printed():
    two = episode_of("t_0", 4, False)
    two.turns[1].kind, two.loss_mask = "reflect", [0, 1, 1]  # a chat server tells no tokens
    text = format_table(summarize([two, episode_of("t_1", 2, True)], 1, [3]))
    assert text.endswith("per episode: attempts 1.5, turns 3.0, sampled tokens 2.0")
