"""sft.py: an update on weighted conversations, epochs, and held-out conversations."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from methods_toy import conversation, run, settings, write_lines
from test_dpo import CUTS, OBJECTIVE, assert_equal, make_learner, weights_after
from toy_env import fresh_process_state, read_metrics
from two_ranks import make_batch

import sft
from config import Misuse
from reporting import sentinels
from reporting.sentinels import Rule
from rollout import portion
from update import imitate, score_policy

# --- The loss -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("changes", "rank"), [(cut, rank) for cut in CUTS for rank in (0, 4)])
def test_weighted_imitation_equals_a_slow_sum_for_all_micro_batch_sizes(changes, rank):
    """Trap 14."""

    batch = make_batch()
    batch.weights = torch.tensor([1.0, 0.0, 0.5, 2.0, 1.0, 0.3, 0.0, 1.0, 0.7, 1.0, 0.1])
    metrics, weights = weights_after(
        lambda learner: imitate(learner, batch, replace(OBJECTIVE, **changes)), rank
    )

    def slow_update(learner):
        total, tokens = torch.zeros(()), float(batch.loss_mask.sum())
        for row in range(len(batch)):
            example = batch.rows([row])
            log_probs, _ = learner.model(example.input_ids, example.loss_mask, 1.0)
            for t in range(int(example.lengths)):
                if example.loss_mask[0, t]:
                    total = total - batch.weights[row] * log_probs[0, t] / tokens
        total.backward()
        learner.optimizer.step()
        return float(total.detach())

    loss, expected = weights_after(slow_update, rank)
    assert metrics["policy/loss"] == pytest.approx(loss, rel=1e-5)
    assert_equal(weights, expected)


# --- Epochs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("count", "size"), [(10, 4), (7, 3), (5, 5), (3, 8), (17, 16)])
def test_every_conversation_is_used_once_per_epoch(count, size):
    steps = -(-count // size)
    for epoch in range(5):
        portions = [portion(epoch * steps + n + 1, count, size, "x") for n in range(steps)]
        assert sorted(row for rows, _ in portions for row in rows) == list(range(count))
        sizes = [len(rows) for rows, _ in portions]
        assert max(sizes) <= size
        assert max(sizes) - min(sizes) <= 1, "a row in a small batch would have a larger weight"
        progress = [epochs for _, epochs in portions]
        assert progress == sorted(progress) and progress[-1] == epoch + 1


def test_epochs_of_short_enough_conversations_set_the_steps_and_the_learning_rate(
    tmp_path, url, capsys, monkeypatch
):
    # Imitation can lower the entropy to 0. The sentinels' entropy floor is only for exploration.
    monkeypatch.setattr(sentinels, "FIRST_STEPS", 1)
    monkeypatch.setitem(sentinels.RULES, "entropy_floor", Rule(2, 2, 1, 1, "", falls=True))
    texts = ["ab"] * 5 + ["ab" * 400] * 3
    records = [conversation(n, text) for n, text in enumerate(texts)]
    data = {"data": write_lines(tmp_path / "data.jsonl", records), "max_trajectory_tokens": 200}
    values = settings("sft", tmp_path, url, steps=0, epochs=3, hold_out=0.0, **data)
    assert run("sft", values) == 0
    assert "3 conversations have more than 200 tokens" in capsys.readouterr().out
    rows = read_metrics(values["run_dir"])
    assert json.loads((tmp_path / "run/config.json").read_text())["config"]["steps"] == 6
    rates = [row["policy/learning_rate"] for row in rows]
    assert rates == pytest.approx([3e-3 * (1 - n / 6) for n in range(6)])
    assert [row["data/epoch"] for row in rows] == pytest.approx([0.4, 1, 1.4, 2, 2.4, 3])
    assert [row["train/trajectories_used"] for row in rows] == [2, 3] * 3


def test_a_resumed_run_notices_other_data(tmp_path, url, capsys):
    data = write_lines(tmp_path / "data.jsonl", [conversation(n) for n in range(4)])
    values = settings("sft", tmp_path, url, data=data, steps=2, hold_out=0.0)
    assert run("sft", values) == 0
    resume = {"resume": True, "run_dir": values["run_dir"], "steps": 4}
    write_lines(tmp_path / "data.jsonl", [conversation(n) for n in range(5)])
    assert run("sft", resume) == 2
    assert "--data or " in capsys.readouterr().err
    write_lines(tmp_path / "data.jsonl", [conversation(n) for n in range(4)])
    (tmp_path / "run/data.json").unlink()
    assert run("sft", resume) == 2


# --- Held out -------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.07, 0.1, 0.25, 0.5])
def test_a_task_is_never_both_learned_and_held_out(share):
    """A run has several episodes of a task, so the same words would be on both sides."""
    tasks = [f"{n % 17}" for n in range(100)]
    held_out = sft.choose_held_out(tasks, share, seed=3)
    assert 0 < sum(task in held_out for task in tasks) <= round(share * 100)
    assert sft.choose_held_out(["a"] * 9 + ["b"] * 5, 0.01, seed=0) == {"b"}  # all exceed the share
    with pytest.raises(Misuse, match="leaves none of 1"):
        sft.choose_held_out(["a"], share, seed=0)


def test_the_held_out_loss_is_a_mean_over_the_action_tokens_of_all_batches():
    batch = make_batch()
    with fresh_process_state():
        worker = SimpleNamespace(
            device="cpu",
            config=sft.SftConfig(mini_batch_size=4),  # 11 rows: parts of 4, 4 and 3
            batch_of=batch.rows,
            sleep_sampler=lambda: None,
            objective_for=lambda num_rows: replace(OBJECTIVE, mini_batch_size=num_rows),
            policy=make_learner(),
        )
        loss = sft.loss_on(worker, range(len(batch)))
        log_probs = score_policy(worker.policy.model, batch, OBJECTIVE, "cpu")
    expected = -log_probs[batch.loss_mask == 1].mean()
    assert loss == pytest.approx(float(expected), rel=1e-5) and loss > 0


def test_without_an_environment_the_lowest_held_out_loss_is_the_best(tmp_path, url, monkeypatch):
    """Without play there is no success rate to choose a checkpoint by."""
    losses = iter([4.0, 3.0, 2.0, 2.5])
    monkeypatch.setattr(sft, "loss_on", lambda worker, held_out: next(losses))
    data = write_lines(tmp_path / "data.jsonl", [conversation(n, id=n) for n in range(10)])
    values = settings("sft", tmp_path / "a", url, data=data, hold_out=0.2, steps=6)
    values |= {"eval_every": 0, "keep_last": 1, "save_every": 100, "mini_batch_size": 4}
    del values["env_addr"]
    assert run("sft", values) == 0
    path = Path(values["run_dir"])
    rows = read_metrics(path)
    assert [row.get("eval/loss") for row in rows] == [None, 3.0, None, 2.0, None, 2.5]
    assert max(row["train/trajectories_used"] for row in rows) == 4
    assert (path / "checkpoints/best").resolve().name == "step_000004"
