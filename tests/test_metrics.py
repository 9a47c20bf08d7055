"""reporting/metrics.py: only defined names are logged, resumed logs are exact, and means are over
valid trajectories."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from reporting import metrics
from reporting.metrics import (
    METRICS,
    PER_ENV,
    MetricsLogger,
    num_repeated_tokens,
    read_log,
    summarize_trajectories,
)
from run import progress
from trajectory import RolloutHandler, Turn

MASK = [0, 0, 0, 1, 1, 0, 0, 1, 1, 1]  # prompt, action, observation, action


def trajectory(group_id, total_return, stop_reason="failure", turns=2, mask=MASK, env="textcraft"):
    """A trajectory whose last turn earns the return."""
    t = RolloutHandler("t", 1, env, "task", "", group_id, 0, 9)
    t.input_ids, t.loss_mask, t.rollout_log_probs = [*range(len(mask))], mask, [0.0] * len(mask)
    t.turns = [Turn((0, 0), "") for _ in range(turns)]
    t.turns[-1].reward, t.used_in_loss = total_return, True
    t.stop(stop_reason, success=stop_reason == "success")
    return t


LOST = trajectory(0, 0.0, "env_error", turns=9, mask=[0] * 500)
LOST.turns[0].parse_error, LOST.used_in_loss = "x", False


# ------------------------------------------------------------- summarize_trajectories


def test_every_step_has_metrics_for_every_environment_of_the_run():
    """Even a step in which all trajectories of one environment were lost."""
    trajectories = [trajectory(0, 1.0, "success"), replace(LOST, env="babyai")]
    summary = summarize_trajectories(trajectories, ["textcraft", "babyai"])
    assert summary["train/return_mean/textcraft"] == 1.0
    assert summary["train/return_mean/babyai"] is None
    summary = summarize_trajectories(trajectories, ["textcraft"])
    assert not any("/textcraft" in name for name in summary)


def test_the_summary_of_a_hand_worked_step():
    trajectories = [
        trajectory(0, 1.0, "success"),
        trajectory(0, 0.5, "max_rounds", turns=4),
        trajectory(1, 0.0),
        trajectory(1, 0.0, "length", mask=[0, 1, *[0] * 8]),
    ]
    trajectories[1].turns[1].parse_error = "no Action: line"
    trajectories[2].num_cut_turns = 2
    trajectories[3].used_in_loss = False
    summary = summarize_trajectories(trajectories)
    expected = {
        "return_mean": 1.5 / 4,
        "action_tokens_mean": (5 + 5 + 5 + 1) / 4,  # trap 15: without prompt and observations
        "trajectory_tokens_mean": 10,
        "success_rate": 0.25,  # a return of 0.5 is not a success
        "turns_mean": 2.5,
        "parse_error_rate": 1 / 10,  # of turns, not trajectories
        "cut_turn_rate": 2 / 10,
        "groups": 2,
        "groups_zero_variance": 1,
        "trajectories_used": 3,
        "env_failures": 0,
        "stop/success": 0.25,
        "stop/env_error": 0.0,
    }
    actual = {name: summary[f"train/{name}"] for name in expected}
    assert actual == pytest.approx(expected)
    train_names = {name for name in METRICS if name.startswith("train/")}
    assert set(summary) == {name for name in train_names if name.rpartition("/")[0] not in PER_ENV}


def test_repeated_tokens_are_counted_within_each_turn():
    """One turn loops over two tokens, the other has four different ones; counts are summed."""
    looping = trajectory(0, 0.0)
    looping.input_ids = [1, 2, *[7, 8] * 6, 20, 21, 22, 23]
    looping.turns = [Turn((2, 14), ""), Turn((14, 18), "")]
    summary = summarize_trajectories([looping])
    assert summary["train/repeated_token_rate"] == 10 / 16
    assert summary["train/turn_tokens_median"] == (12 + 4) / 2
    assert summarize_trajectories([trajectory(0, 1.0)])["train/repeated_token_rate"] == 0


def test_a_plan_is_no_action_that_could_not_be_parsed():
    t = trajectory(0, 1.0, turns=4)
    t.turns[0].kind, t.turns[1].parse_error = "plan", "no Action: line"
    assert summarize_trajectories([t])["train/parse_error_rate"] == 1 / 3


def test_a_trajectory_lost_to_infrastructure_changes_no_mean_and_is_counted():
    """Trap 5: a dead server must not look like a weak policy."""
    valid = [trajectory(0, 1.0, "success"), trajectory(0, 0.0)]
    summary = summarize_trajectories(valid)
    summary_with_lost = summarize_trajectories([*valid, LOST, LOST])
    for name in summary:
        if not name.startswith("train/stop/") and name != "train/env_failures":
            assert summary_with_lost[name] == summary[name], name
    assert summary_with_lost["train/env_failures"] == 2
    assert summary_with_lost["train/stop/env_error"] == 0.5
    summary_of_lost = summarize_trajectories([LOST, replace(LOST, group_id=1)])
    assert summary_of_lost["train/groups"] == summary_of_lost["train/groups_zero_variance"] == 0
    assert summary_of_lost["train/return_mean"] is None  # a mean of no values is not 0


@given(st.lists(st.integers(0, 2), max_size=30))
def test_num_repeated_tokens_agrees_with_its_definition_for_each_token(ids):
    """A token is repeated if it is in a 4-gram that also starts at an earlier position."""
    ngrams = [ids[start : start + 4] for start in range(len(ids) - 3)]
    is_repeated = [ngram in ngrams[:start] for start, ngram in enumerate(ngrams)]
    expected = sum(any(is_repeated[max(0, i - 3) : i + 1]) for i in range(len(ids)))
    assert num_repeated_tokens(ids) == expected


# ------------------------------------------------------------- MetricsLogger


def test_a_row_is_strict_json_with_defined_names_and_an_evaluation_can_be_added(tmp_path):
    logger = MetricsLogger(tmp_path)
    values = {"policy/loss": torch.tensor(float("inf")), "policy/kl": torch.tensor(0.5)}
    for name in ("train/reward", "time/rollout_s"):
        with pytest.raises(ValueError, match=name):
            logger.log(2, {name: 0.5})
    logger.log(2, {"train/turns_mean": 4.0})
    logger.log(3, values | {"policy/entropy": None})
    logger.amend(3, {"eval/avg": 0.75})
    row = {"step": 3, "policy/loss": None, "policy/kl": 0.5, "policy/entropy": None}
    rows = [{"step": 2, "train/turns_mean": 4.0}, row | {"eval/avg": 0.75}]
    assert read_log(tmp_path / "metrics.jsonl") == rows


def write_steps(run_dir, steps, resume_step=None):
    logger = MetricsLogger(run_dir, resume_step)
    for step in steps:
        metrics = {"train/return_mean": step / 7, "policy/loss": 1e-9 / step}
        logger.log(step, metrics)
        logger.show_step(step, metrics, {"time/step_s": 1.0})


@pytest.mark.parametrize("last_line", ["", '{"step": 6, "train/retu', '{"step": 6}'])
def test_a_resumed_log_equals_the_uninterrupted_one_byte_for_byte(tmp_path, monkeypatch, last_line):
    monkeypatch.setattr(metrics, "plot", lambda run_dir: None)
    write_steps(tmp_path / "uninterrupted", range(1, 9))
    write_steps(tmp_path / "resumed", range(1, 6))
    with open(tmp_path / "resumed" / "metrics.jsonl", "a") as file:
        file.write(last_line)  # as a crash leaves it
    write_steps(tmp_path / "resumed", range(4, 9), resume_step=3)
    for name in ("metrics.jsonl", "timings.jsonl"):
        logs = [(tmp_path / run / name).read_bytes() for run in ("uninterrupted", "resumed")]
        assert logs[0] == logs[1]


# ------------------------------------------------------------- the terminal


def test_show_step_writes_timings_prints_the_row_and_draws_the_plot(tmp_path, capsys, monkeypatch):
    logger = MetricsLogger(tmp_path)
    row, timings = {"train/return_mean": 0.5}, {"time/rollout_s": 2.0}
    logger.log(1, row)
    logger.show_step(1, row, timings, last_step=60, left_s=600.0)
    assert read_log(tmp_path / "timings.jsonl") == [{"step": 1, "time/rollout_s": 2.0}]
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setattr(metrics, "plot", lambda run_dir: None)
    for step in range(2, 42):
        logger.show_step(step, row, timings)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1] == progress.table_row(1, row | timings, 60, 600.0)
    assert [i for i, line in enumerate(lines) if line == progress.table_header()] == [0, 21, 42]


def test_with_writes_false_no_file_is_written_and_no_line_printed(tmp_path, capsys):
    logger = MetricsLogger(tmp_path / "run", writes=False)
    logger.log(1, {"train/return_mean": 0.5})
    logger.amend(1, {"eval/avg": 0.5})
    logger.show_step(1, {"train/return_mean": 0.5}, {"time/rollout_s": 2.0})
    assert list((tmp_path / "run").iterdir()) == []
    assert capsys.readouterr().out == ""
