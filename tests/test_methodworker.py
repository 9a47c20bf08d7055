"""run/methodworker.py: sft.py, dpo.py and agentevol.py resume after a kill with the same results,
read their data once, and report misuse in one line."""

import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from methods_toy import PROGRAMS, conversation, results_of, run, settings, write_lines
from toy_env import fresh_process_state, read_metrics

import agentevol
import dpo
import update
from agentevol import EvolConfig
from config import Misuse, complete, with_preset
from dpo import DpoConfig
from engines import EngineError
from evaluate import main as evaluate_main
from reporting.metrics import METRICS
from run import methodworker
from run.methodworker import IterationFiles, MethodWorker
from run.session import TrainingError
from scale import sync
from sft import SftConfig


@pytest.fixture(scope="module")
def runs(tmp_path_factory, url):
    """method -> the folder of an undisturbed run."""
    folders = {}
    for method in PROGRAMS:
        values = settings(method, tmp_path_factory.mktemp(method), url, eval_every=2)
        assert run(method, values) == 0
        folders[method] = values["run_dir"]
    return folders


@pytest.fixture(scope="module")
def uninterrupted(runs):
    """method -> the results of an undisturbed run."""
    return {method: results_of(folder) for method, folder in runs.items()}


def test_these_methods_log_the_metrics_that_rl_does_not_log(uninterrupted):
    lines = [line for results in uninterrupted.values() for line in results["metrics"].splitlines()]
    logged = {name for line in lines for name in json.loads(line)}
    expected = {name for name in METRICS if name.startswith("preference/")}
    expected |= {"data/pairs", "data/evolving", "data/evolving_weight", "eval/loss"}
    assert expected <= logged


# --- A killed run resumes with the same results (trap 13) -----------------------------------------


class Killed(BaseException):
    """Ends a run at once, without saving anything."""


@pytest.mark.parametrize(
    ("method", "owner", "name", "fatal_call"),
    [
        ("dpo", methodworker, "write_json", 2),  # before the second iteration's summary
        ("agentevol", MethodWorker, "roll_out", 2),  # in the second iteration's exploration
        ("sft", update, "optimize", 4),  # in the last update
    ],
)
def test_a_killed_run_resumes_to_the_same_bytes(
    method, owner, name, fatal_call, uninterrupted, tmp_path, url, monkeypatch
):
    original, calls = getattr(owner, name), Counter()

    def die(*args, **kwargs):
        calls[name] += 1
        if calls[name] == fatal_call:
            raise Killed
        return original(*args, **kwargs)

    # With a checkpoint every third step, the lost steps can belong to an earlier iteration.
    values = settings(method, tmp_path, url, eval_every=2, save_every=3)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, die)
        with pytest.raises(Killed):
            run(method, values)
    assert run(method, {"resume": True, "run_dir": values["run_dir"]}) == 0
    results = results_of(values["run_dir"])
    for part in results:
        assert results[part] == uninterrupted[method][part], part


def test_a_failure_at_the_start_of_an_iteration_loses_no_step(tmp_path, url, capsys, monkeypatch):
    """An iteration begins with a weight sync and the reference's log-probs; both can fail. The run
    then resumes only with the same method and the same number of steps."""
    values = settings("dpo", tmp_path, url, steps=2, save_every=100)
    original, fails = dpo.reference_sums, iter([False, True])  # in the second iteration

    def fail_in_second_iteration(*args):
        if next(fails):
            raise EngineError("the sampler is gone")
        return original(*args)

    with monkeypatch.context() as patch:
        patch.setattr(dpo, "reference_sums", fail_in_second_iteration)
        assert run("dpo", values) == 1
    assert (tmp_path / "run/checkpoints/step_000001").is_dir()
    resume = {"resume": True, "run_dir": values["run_dir"]}
    assert run("sft", resume) == 2
    assert "holds a run of dpo" in capsys.readouterr().err
    assert run("dpo", resume | {"steps": 4}) == 2
    assert "leave out --steps" in capsys.readouterr().err
    assert run("dpo", resume) == 0
    assert [row["step"] for row in read_metrics(values["run_dir"])] == [1, 2]


def test_exploration_compares_the_sampler_with_the_trained_policy(
    tmp_path, url, capsys, monkeypatch
):
    """Trap 20: without this check the run would learn from an old policy's trajectories."""
    options = {"eval_every": 0, "learning_rate": 3e-2, "learn_from": "last", "min_return": 0.0}
    values = settings("agentevol", tmp_path, url, save_every=100, **options)
    monkeypatch.setattr(sync, "send_weights", lambda *args: 0)
    assert run("agentevol", values) == 1
    assert "weights differ from the trainer's" in capsys.readouterr().err
    assert (tmp_path / "run/checkpoints/step_000002").is_dir()


def test_iteration_files_are_written_read_and_dropped(tmp_path):
    files = IterationFiles(tmp_path, writes=True)
    lines = [{"a": "b\u2028c\x85d\r\ne\u2029"}, {"a": 1}]  # other line separators stay in the text
    for iteration in (1, 2, 3):
        assert files.read(iteration, must_exist=False) is None
        files.write(iteration, lines, {"n": iteration})
        result, summary = files.read(iteration, must_exist=True)
        assert result == lines and summary["n"] == iteration
    (tmp_path / "iteration_003.json.bak").write_text("{}")  # a user's copy
    files.drop_after(2)
    assert {path.name[10:] for path in tmp_path.iterdir()} == {
        *("001.json", "001.jsonl", "002.json", "002.jsonl", "003.json.bak")
    }
    lines, summary = (tmp_path / f"iteration_002.{kind}" for kind in ("jsonl", "json"))
    for path, text in (
        *((lines, ""), (lines, '{"a": 2}\n'), (lines, None)),
        *((summary, ""), (summary, "[]"), (summary, summary.read_text().replace('"n": 2,', ""))),
    ):
        before = path.read_text()
        path.unlink() if text is None else path.write_text(text)
        with pytest.raises(TrainingError, match="has changed since the run wrote it"):
            files.read(2, must_exist=True)
        path.write_text(before)
    (tmp_path / "iteration_002.json").unlink()
    for data_of, config in (
        (dpo.pairs_of_iteration, DpoConfig(steps=4, iterations=2)),
        (agentevol.evolve, EvolConfig(steps=4, iterations=2)),
    ):
        session = SimpleNamespace(worker=None, config=config)
        with pytest.raises(TrainingError, match="iteration_002.json is missing"):
            data_of(session, files, 4, None)  # the iteration has begun with step 3


@pytest.mark.parametrize(
    ("resume", "completed_step", "remaining"), [(False, 0, 0), (True, 1, 1), (True, 2, 2)]
)
def test_a_resumed_run_keeps_the_data_that_its_policy_has_made(
    tmp_path, resume, completed_step, remaining
):
    """Iterations of two steps: the policy after step 2 made the data of the second iteration."""
    for n in (1, 2, 3):
        IterationFiles(tmp_path / "pairs", writes=True).write(n, [], {})
    run, config = SimpleNamespace(path=tmp_path, writes=True), DpoConfig(steps=6, iterations=3)
    config = replace(config, resume=resume)
    session = SimpleNamespace(config=config, run=run, completed_step=completed_step)
    files = IterationFiles.from_session(session)
    assert [files.read(n, must_exist=False) is not None for n in (1, 2, 3)] == [
        n <= remaining for n in (1, 2, 3)
    ]


# --- Data -----------------------------------------------------------------------------------------


def test_other_programs_can_evaluate_a_run_and_learn_from_it(runs, tmp_path, url, monkeypatch):
    """A run of dpo.py is data for sft.py and dpo.py, and evaluate.py measures its checkpoint."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(runs["dpo"], "source")
    data = {"data": ("source",), "steps": 1}
    assert run("sft", settings("sft", tmp_path / "b", url, min_return=0.4, **data)) == 0
    files = sorted(Path("source/trajectories").glob("step_*.jsonl"))
    rows = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    num_good = sum(row["return"] >= 0.4 for row in rows)
    assert 0 < num_good < len(rows)
    assert len({row["task_id"] for row in rows}) == 8, "each iteration plays the next four tasks"
    assert json.loads(Path("b/run/data.json").read_text())["conversations"] == num_good
    values = settings("dpo", tmp_path / "c", url, **data)
    assert run("dpo", values) == 0
    assert not list(Path("c/run/trajectories").glob("*"))  # it played nothing
    with fresh_process_state():
        words = ["--run", "source", "--out", str(tmp_path / "eval"), "--deterministic"]
        assert evaluate_main([*words, "--env-addr", url, "--samples", "1"]) == 0
    shutil.rmtree("source")  # the run of dpo.py stores its pairs
    assert run("dpo", {"resume": True, "run_dir": values["run_dir"], "steps": 2}) == 0
    assert len(read_metrics(values["run_dir"])) == 2


@pytest.mark.parametrize(
    ("config", "has_thoughts"),
    [
        # The start shipped for smollm2-135m has no thoughts; tiny has no shipped start.
        (with_preset("laptop", "textcraft", EvolConfig), False),
        (replace(with_preset("laptop", "textcraft", EvolConfig), model="tiny"), True),
        (with_preset("laptop", "textcraft", SftConfig), True),  # no warm start
    ],
)
def test_the_oracle_uses_the_style_of_the_warm_start(config, has_thoughts, monkeypatch):
    monkeypatch.setattr(methodworker, "chat_of", lambda config: None)
    monkeypatch.setattr(methodworker, "encode_all", lambda chat, records: list(records))
    config = complete(replace(config, env_addr=("local",), num_demonstrations=8))
    records = methodworker.read_examples(config)
    turns = [turn for record in records for turn in record["conversations"] if turn["loss"]]
    assert len(records) == 8 and {"Thought:" in turn["value"] for turn in turns} == {has_thoughts}
    slips = [t for r in records for t in r["conversations"][2:] if t["loss"] is False]
    assert bool(slips) is not has_thoughts, "the start has slips and no thoughts"


def test_conversations_are_selected_by_return_and_their_weights_are_ignored(tmp_path):
    records = [conversation(n, weight=n + 1) | {"return": n / 4} for n in range(5)]
    data = write_lines(tmp_path / "data.jsonl", records)
    config = SftConfig(model="tiny", data=data)
    examples = methodworker.read_examples(config, 0.5)
    assert [example.task_id for example in examples] == ["letters_2", "letters_3", "letters_4"]
    assert all("weight" not in example.record for example in examples)
    assert len(methodworker.read_examples(config)) == 5
    write_lines(tmp_path / "data.jsonl", [*records, conversation(6)])
    with pytest.raises(Misuse, match="needs a return in each"):
        methodworker.read_examples(config, 0.5)


def test_only_the_policys_own_samples_are_scored_at_the_sampling_temperature():
    """Otherwise each iteration would sample from a sharper policy than the last."""
    worker = MethodWorker.__new__(MethodWorker)
    for config, expected in (
        (DpoConfig(pairs=("x",)), 1.0),
        (DpoConfig(), 0.2),
        (EvolConfig(), 0.2),
        (SftConfig(), 1.0),
    ):
        worker.config = replace(config, temperature=0.2)
        assert worker.objective_for(4).temperature == expected


def test_a_run_that_goes_back_to_its_base_policy_needs_the_initial_weights_on_resume():
    worker = MethodWorker.__new__(MethodWorker)
    for learn_from in ("base", "last"):
        worker.config = EvolConfig(learn_from=learn_from)
        assert worker.needs_start == (learn_from == "base")


# --- Iterations of dpo.py -------------------------------------------------------------------------


def test_the_reference_is_the_policy_at_the_start_of_each_iteration(tmp_path, url):
    """The first margin is 0, and the stored pairs are a pair file with the same log-probs."""
    values = settings("dpo", tmp_path, url, mini_batch_size=64)  # each step uses all pairs
    assert run("dpo", values) == 0
    rows = read_metrics(values["run_dir"])
    assert [row["data/epoch"] for row in rows] == [1, 2, 1, 2]
    rates = [row["policy/learning_rate"] for row in rows]
    assert rates == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])  # one schedule for all iterations
    for row in (rows[0], rows[2]):
        assert row["preference/margin"] == pytest.approx(0, abs=1e-4)
        assert row["policy/loss"] == pytest.approx(0.693147, abs=1e-4)
        assert row["data/pairs"] > 0 and row["train/return_mean"] > 0
    for row in (rows[1], rows[3]):
        assert row["preference/margin"] > 0.001 and "data/pairs" not in row
    file = tmp_path / "run/pairs/iteration_001.jsonl"
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert len(lines) == rows[0]["data/pairs"]
    for line in lines:
        assert line["chosen_return"] >= line["rejected_return"] + 0.05 - 1e-6
        assert line["ref_chosen"] < 0 and line["ref_rejected"] < 0
    values = settings("dpo", tmp_path / "b", url, steps=1, pairs=(str(file),), mini_batch_size=64)
    assert run("dpo", values) == 0
    assert (tmp_path / "b/run/pairs/iteration_001.jsonl").read_text() == file.read_text()


def test_an_iteration_without_pairs_makes_no_update_and_the_first_one_ends_the_run(
    tmp_path, url, capsys, monkeypatch
):
    original, calls = dpo.pairs_of, []

    def none_on_second_call(*args):
        calls.append(1)
        return original(*args) if len(calls) == 1 else []

    monkeypatch.setattr(dpo, "pairs_of", none_on_second_call)
    values = settings("dpo", tmp_path, url, steps=2)
    assert run("dpo", values) == 0
    assert "iteration 2: 0 pairs; left out: " in capsys.readouterr().out
    metrics = (tmp_path / "run/metrics.jsonl").read_bytes()
    rows = read_metrics(values["run_dir"])
    assert [row["policy/optimizer_steps"] for row in rows] == [1, 0]
    shutil.rmtree(tmp_path / "run/checkpoints/step_000002")  # as if killed in it
    assert run("dpo", {"resume": True, "run_dir": values["run_dir"]}) == 0
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == metrics and len(calls) == 2
    assert run("dpo", settings("dpo", tmp_path / "b", url)) == 1
    assert "start from a model that solves some" in capsys.readouterr().err


# --- Misuse ---------------------------------------------------------------------------------------


def test_empty_answers_are_counted(tmp_path, url, capsys):
    data = write_lines(tmp_path / "data.json", [conversation(1), conversation(2, " ")])
    assert run("sft", settings("sft", tmp_path, url, data=data, steps=1)) == 0
    assert "2 of 4 actions are empty" in capsys.readouterr().out


def test_empty_data_is_reported_in_one_line_and_creates_no_run(tmp_path, url, capsys):
    for changes, words in (
        ({"data": write_lines(tmp_path / "data.json", [])}, "holds no conversation"),
        ({"max_trajectory_tokens": 9}, "leaves none of the conversations; raise it"),
    ):
        values = settings("sft", tmp_path, url, **changes)
        assert run("sft", values) == 2
        error = capsys.readouterr().err
        assert words in error and len(error.splitlines()) == 1
        assert not Path(values["run_dir"]).exists()
