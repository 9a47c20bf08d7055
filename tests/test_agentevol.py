"""agentevol.py: which trajectories join the evolving set, how much they count, and whose weights an
iteration begins with."""

import json
import weakref
from collections import Counter
from dataclasses import replace

import pytest
from methods_toy import conversation, run, settings, write_lines
from toy_env import Shown, read_metrics, serve

import agentevol
from agentevol import EvolConfig, select, texts_of
from config import Misuse
from formats import to_record
from run.methodworker import MethodWorker


@pytest.fixture(scope="module")
def url():
    with serve(Shown) as url:
        yield url


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
    chosen = select(records, once, "iteration 1")
    assert [(r["item_id"], r["weight"], r["origin"]) for r in chosen] == [
        ("letters_0", 1.0, "iteration 1"),
        ("letters_0", 0.7, "iteration 1"),
        ("letters_1", 0.6, "iteration 1"),
    ]
    ones = select(records, replace(once, weighting="one"), "x")
    assert [r["weight"] for r in ones] == [1.0] * 3
    control = EvolConfig(ignore_returns=True, keep_per_task=2, weighting="one")
    blind = select(records, control, "x")
    assert [(r["return"], r["weight"]) for r in blind] == [(0.2, 1), (1, 1), (0.6, 1), (0, 1)]
    perfect = select(records, replace(once, min_return=1.0), "x")
    assert [r["return"] for r in perfect] == [1.0], "at least so much, as in sft.py and dpo.py"
    assert select(records[-1:], EvolConfig(), "x") == [], "and never what earned nothing"
    # What the set has already does not join again, and takes no place of what is new.
    again = select(records, replace(once, keep_per_task=1), "x", chosen[:1])
    assert [r["return"] for r in again] == [0.7, 0.6]


def test_what_is_played_alike_counts_as_often():
    """E[R log π] over all that was played, term by term, with one row for each different text. It
    may be in the set already, too."""
    records = [explored(0, 0.5, "ab"), explored(0, 1.0, "ac"), explored(1, 0.5, "ad")]
    records += [explored(0, 0.5, "ab"), explored(1, 0.0, "ae"), explored(0, 0.5, "ab")]
    played = EvolConfig(keep_per_task=8, weighting="played")
    chosen = select(records, played, "x")
    log_prob = {texts_of(record): -1.0 - at for at, record in enumerate(records)}
    expected = sum(record["return"] * log_prob[texts_of(record)] for record in records)
    kept = sum(record["weight"] * log_prob[texts_of(record)] for record in chosen)
    assert len(chosen) == 3 and kept == pytest.approx(expected)
    assert select(records, played, "x", chosen) == chosen
    blind = replace(played, ignore_returns=True)  # the control differs in the returns alone
    assert sorted(r["weight"] for r in select(records, blind, "x")) == [1.0, 1.0, 1.0, 3.0]
    # Chance pays the same text differently, and two tasks may read alike.
    records = [explored(0, total, "ab") for total in (1.0, 0.0, 0.25, 0.0)]
    other = explored(0, 0.1, "ab") | {"item_id": "letters_9"}
    assert [r["weight"] for r in select([*records, other], played, "x")] == [1.25, 0.1]


def test_demonstrations_with_a_return_count_by_it(tmp_path):
    records = [conversation(0), explored(1, 0.5, "ab"), explored(2, 0.1, "cd")]
    data = write_lines(tmp_path / "data.jsonl", records)
    config = EvolConfig(model="tiny", data=data, min_return=0.2, eval_every=0)
    assert [(r["item_id"], r["weight"]) for r in agentevol.initial_set(config)] == [
        *(("letters_0", 1.0), ("letters_1", 0.5))
    ]
    for bad, problem in ((0.1, "no return in --data is above 0"), (100, "100, expected 0 to 1")):
        write_lines(tmp_path / "data.jsonl", [explored(1, bad, "ab")])
        with pytest.raises(Misuse, match=problem):
            agentevol.initial_set(config)


def sets_of(tmp_path):
    files = sorted((tmp_path / "run/evolving").glob("iteration_*.jsonl"))
    return [[json.loads(line) for line in f.read_text("utf-8").splitlines()] for f in files]


def test_the_set_grows_by_what_earned_and_each_iteration_begins_at_the_base(
    tmp_path, url, monkeypatch
):
    forget, forgotten = MethodWorker.free_policy, []

    def watched(worker):
        forgotten.append(weakref.ref(worker.policy.model))
        forget(worker)
        assert forgotten[-1]() is None, "something still holds the last policy"

    monkeypatch.setattr(MethodWorker, "free_policy", watched)
    values = settings("agentevol", tmp_path, url)
    assert run("agentevol", values) == 0
    assert len(forgotten) == 1  # the first iteration begins with the start as it is
    rows, sets = read_metrics(values["run_dir"]), sets_of(tmp_path)
    assert sets[1][: len(sets[0])] == sets[0]  # nothing leaves it
    for place, records in enumerate(sets):
        summary = json.loads((tmp_path / f"run/evolving/iteration_00{place + 1}.json").read_text())
        assert summary["origins"] == Counter(r["origin"] for r in records)
        assert rows[2 * place]["data/evolving"] == len(records)
        for record in records:
            assert to_record(record, "x")  # AgentTraj, and more
            if record["origin"] == "demonstration":
                assert record["weight"] == 1.0
            else:
                assert record["weight"] == record["return"] > 0.4
                assert all("ids" in t for t in record["conversations"] if t["from"] == "gpt")
    # Both iterations begin with the same weights: their first loss is that of a random model.
    assert rows[0]["policy/entropy"] == pytest.approx(rows[2]["policy/entropy"], abs=0.05)
    assert rows[1]["policy/entropy"] < rows[0]["policy/entropy"]
    rates = [row["policy/learning_rate"] for row in rows]
    assert rates == pytest.approx([3e-3, 1.5e-3] * 2)  # and with a fresh schedule


def test_an_iteration_may_go_on_from_the_last_and_join_the_demonstrations_alone(tmp_path, url):
    changes = {"learn_from": "last", "merge_with": "demonstrations"}
    values = settings("agentevol", tmp_path, url, **changes)
    assert run("agentevol", values) == 0
    rows = read_metrics(values["run_dir"])
    assert rows[2]["policy/entropy"] < rows[0]["policy/entropy"] - 0.01
    for number, records in enumerate(sets_of(tmp_path), start=1):
        origins = Counter(r["origin"] for r in records)
        assert set(origins) == {"demonstration", f"iteration {number}"}
        assert origins["demonstration"] == 4
