"""agentevol.py: which trajectories join the evolving set, their weights, and the policy that an
iteration begins with."""

import json
import weakref
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
from fakes import byte_tokenizer
from methods_toy import conversation, run, settings, write_lines
from toy_env import read_metrics, saved_tensors

import agentevol
from agentevol import EvolConfig, select, texts_of
from chat import ChatTemplate
from config import Misuse
from conversations import to_record
from data import encode
from run.methodworker import IterationFiles, MethodWorker


def explored(task, total, text):
    return conversation(task, text, **{"return": total})


def test_the_best_of_each_task_join_once_with_their_weights():
    records = [
        explored(0, 0.2, "aa"),
        explored(0, 1.0, "ab"),
        explored(0, 0.5, "ac"),
        explored(0, 0.7, "ad"),
        explored(1, 0.6, "ae"),
        explored(1, 0.6, "ae"),  # the same again
        explored(2, 0.0, "af"),
    ]
    once = EvolConfig(keep_per_task=2, min_return=0.1, weighting="return")
    selection = select(records, once, "iteration 1")
    assert [(r["item_id"], r["weight"], r["origin"]) for r in selection] == [
        ("letters_0", 1.0, "iteration 1"),
        ("letters_0", 0.7, "iteration 1"),
        ("letters_1", 0.6, "iteration 1"),
    ]
    equal = select(records, replace(once, weighting="one"), "x")
    assert [r["weight"] for r in equal] == [1.0] * 3
    control = EvolConfig(ignore_returns=True, keep_per_task=2, weighting="one")
    blind = select(records, control, "x")
    assert [(r["return"], r["weight"]) for r in blind] == [(0.2, 1), (1, 1), (0.6, 1), (0, 1)]
    perfect = select(records, replace(once, min_return=1.0), "x")
    assert [r["return"] for r in perfect] == [1.0], "the minimum is included"
    assert select(records[-1:], EvolConfig(), "x") == [], "a return of 0 never joins"
    # A text of the set does not join again and does not count towards keep_per_task.
    second = select(records, replace(once, keep_per_task=1), "x", selection[:1])
    assert [r["return"] for r in second] == [0.7, 0.6]


def test_equal_trajectories_add_their_returns():
    """The weighted rows give E[R log π] over all samples, with one row per different text. A text
    that the set already contains joins again."""
    records = [explored(0, 0.5, "ab"), explored(0, 1.0, "ac"), explored(1, 0.5, "ad")]
    records += [explored(0, 0.5, "ab"), explored(1, 0.0, "ae"), explored(0, 0.5, "ab")]
    config = EvolConfig(keep_per_task=8, weighting="played")
    selection = select(records, config, "x")
    log_prob = {texts_of(record): -1.0 - i for i, record in enumerate(records)}
    expected = sum(record["return"] * log_prob[texts_of(record)] for record in records)
    weighted = sum(record["weight"] * log_prob[texts_of(record)] for record in selection)
    assert len(selection) == 3 and weighted == pytest.approx(expected)
    assert select(records, config, "x", selection) == selection
    blind = replace(config, ignore_returns=True)  # the control differs only in the returns
    assert sorted(r["weight"] for r in select(records, blind, "x")) == [1.0, 1.0, 1.0, 3.0]
    # Equal texts can have different returns, and two tasks can have equal texts.
    records = [explored(0, total, "ab") for total in (1.0, 0.0, 0.25, 0.0)]
    other_task = explored(0, 0.1, "ab") | {"item_id": "letters_9"}
    assert [r["weight"] for r in select([*records, other_task], config, "x")] == [1.25, 0.1]


def test_the_return_of_a_demonstration_is_its_weight(tmp_path):
    records = [conversation(0), explored(1, 0.5, "ab"), explored(2, 0.1, "cd")]
    data = write_lines(tmp_path / "data.jsonl", records)
    config = EvolConfig(model="tiny", data=data, min_return=0.2, eval_every=0)
    for changes, weights in (
        ({}, [1.0, 0.5]),
        ({"weighting": "one"}, [1.0, 1.0]),
        ({"ignore_returns": True}, [1.0, 1.0, 1.0]),
    ):
        records = agentevol.initial_set(replace(config, **changes))
        expected = [(f"letters_{n}", weight) for n, weight in enumerate(weights)]
        assert [(r["item_id"], r["weight"]) for r in records] == expected
    for total, problem in ((0.1, "no return in --data is above 0"), (100, "100, expected 0 to 1")):
        write_lines(tmp_path / "data.jsonl", [explored(1, total, "ab")])
        with pytest.raises(Misuse, match=problem):
            agentevol.initial_set(config)


def test_a_set_that_keeps_all_gains_only_new_texts_and_its_weights_reach_the_loss(tmp_path):
    """The second iteration plays what the first one played. It begins in a resumed run, which does
    not read the demonstrations again."""
    chat = ChatTemplate(byte_tokenizer())
    played = [encode(chat, record) for record in (explored(0, 0.5, "ab"), explored(1, 0.0, "cd"))]
    worker = SimpleNamespace(chat=chat, explore=lambda step: (played, {}), pad_id=0)
    config = EvolConfig(steps=2, iterations=2, weighting="return", merge_with="all")
    session = SimpleNamespace(worker=worker, config=config)
    files = IterationFiles(tmp_path, writes=True)
    initial = [conversation(2, origin="demonstration", weight=1.0)]
    first, metrics = agentevol.evolve(session, files, 1, initial)
    assert MethodWorker.batch_of(worker, first).weights.tolist() == [1.0, 0.5]
    assert MethodWorker.batch_of(worker, played).weights.tolist() == [1.0, 1.0]
    assert (metrics["train/trajectories_used"], metrics["data/evolving_weight"]) == (1, 0.75)
    second, metrics = agentevol.evolve(session, files, 2, [])
    assert [e.record for e in second] == [e.record for e in first]
    assert (metrics["train/trajectories_used"], metrics["data/evolving_weight"]) == (0, 0.75)
    worker.explore = None  # a resumed run reads the set back
    assert agentevol.evolve(session, files, 2, []) == (second, metrics)


def sets_of(tmp_path):
    files = sorted((tmp_path / "run/evolving").glob("iteration_*.jsonl"))
    return [[json.loads(line) for line in f.read_text("utf-8").splitlines()] for f in files]


def test_each_iteration_adds_successes_and_begins_with_the_base_policy(tmp_path, url, monkeypatch):
    forget, models = MethodWorker.free_policy, []

    def free_and_check(worker):
        models.append(weakref.ref(worker.policy.model))
        forget(worker)
        assert models[-1]() is None, "something still holds the last policy"

    monkeypatch.setattr(MethodWorker, "free_policy", free_and_check)
    values = settings("agentevol", tmp_path, url)
    assert run("agentevol", values) == 0
    assert len(models) == 1  # the first iteration begins with the initial weights
    rows, sets = read_metrics(values["run_dir"]), sets_of(tmp_path)
    assert sets[1][: len(sets[0])] == sets[0]  # no trajectory leaves the set
    for index, records in enumerate(sets):
        summary = json.loads((tmp_path / f"run/evolving/iteration_00{index + 1}.json").read_text())
        assert summary["origins"] == Counter(r["origin"] for r in records)
        assert rows[2 * index]["data/evolving"] == len(records)
        assert rows[2 * index]["data/epoch"] * len(records) <= 8.001, "one mini-batch of it"
        for record in records:
            assert to_record(record, "x")  # AgentTraj with more fields
            if record["origin"] == "demonstration":
                assert record["weight"] == 1.0
            else:
                assert record["weight"] == record["return"] > 0.4
                assert all("ids" in t for t in record["conversations"] if t["from"] == "gpt")
    # Both iterations begin with the same random weights.
    assert rows[0]["policy/entropy"] == pytest.approx(rows[2]["policy/entropy"], abs=0.05)
    assert rows[1]["policy/entropy"] < rows[0]["policy/entropy"]
    rates = [row["policy/learning_rate"] for row in rows]
    assert rates == pytest.approx([3e-3, 1.5e-3] * 2)  # and with a new schedule
    (state,) = (tmp_path / "run").glob("checkpoints/step_000004/trainer_state/state.json")
    sentinels = json.loads(state.read_text())["sentinels"]
    assert len(sentinels["grad_norms"]) == 2, "the base policy's low success is not a collapse"


def test_iterations_can_continue_from_the_last_and_join_only_the_demonstrations(tmp_path, url):
    changes = {"learn_from": "last", "merge_with": "demonstrations"}
    values = settings("agentevol", tmp_path, url, **changes)
    assert run("agentevol", values) == 0
    rows = read_metrics(values["run_dir"])
    assert rows[2]["policy/entropy"] < rows[0]["policy/entropy"] - 0.01
    states = saved_tensors(values["run_dir"], 4)["optimizer"]["state"].values()
    assert {int(state["step"]) for state in states} == {2}, "each iteration has a new optimizer"
    for number, records in enumerate(sets_of(tmp_path), start=1):
        origins = Counter(r["origin"] for r in records)
        assert set(origins) == {"demonstration", f"iteration {number}"}
        assert origins["demonstration"] == 4
