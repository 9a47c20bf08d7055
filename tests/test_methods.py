"""sft.py, dpo.py and agentevol.py: each learns, is killed and goes on with the same, refuses in a
line; and what their updates compute is independent of how they are cut."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
import weakref
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_distributed import launch
from toy_env import Shown, flags, fresh_process_state, options, read_metrics, serve
from two_ranks import make_batch, make_policy

import agentevol
import dpo
import sft
import update
from chat import ChatTemplate
from config import Misuse, Objective, complete, with_preset
from conversations import as_agenttraj, from_agenttraj
from engines import EngineError
from evaluate import main as evaluate_main
from models import load_tokenizer
from pairs import Pair
from preferences import preference_loss
from reporting.metrics import METRICS
from rollout import portion
from run import checkpoint, methodworker
from run.clock import Clock, OutOfMemory
from run.methodworker import Kept, openings_of
from run.rundir import open_run
from run.session import Session, TrainingError
from runtime.checks import remarks
from runtime.cli import training_options
from runtime.methods import DpoConfig, EvolConfig, SftConfig, check_method
from runtime.mixture import held_out_tasks
from scale import distributed
from scale.default_models import resolve_model
from update import Learner, imitate, score_policy

ROOT = Path(__file__).parents[1]
PROGRAMS = {"sft": sft, "dpo": dpo, "agentevol": agentevol}
# What each can be asked so that it runs in seconds.
OWN = {
    "sft": {"num_demonstrations": 8, "hold_out": 0.2, "mini_batch_size": 4, "learning_rate": 3e-3},
    "dpo": {
        "tasks_per_iteration": 8,
        "group_size": 4,
        "iterations": 2,
        "min_gap": 0.05,
        "sft_coef": 0.0,
        "mini_batch_size": 8,
        "learning_rate": 1e-3,
    },
    "agentevol": {
        "tasks_per_iteration": 4,
        "group_size": 4,
        "iterations": 2,
        "min_return": 0.4,
        "keep_per_task": 2,
        "weighting": "return",
        "merge_with": "all",
        "learn_from": "base",
        "num_demonstrations": 4,
        "mini_batch_size": 8,
        "learning_rate": 3e-3,
    },
}


def settings(method, tmp_path, url, **changes):
    tmp_path.mkdir(exist_ok=True)
    values = options(tmp_path, url, steps=4, deterministic=True, max_tokens_per_turn=4)
    del values["tasks_per_step"], values["engine"]
    if method == "sft":
        del values["group_size"]
    values |= OWN[method] | changes
    given = {"data", "pairs", "expert"} & changes.keys()
    if values.get("data") and "num_demonstrations" not in changes:
        values.pop("num_demonstrations", None)
    if not values["eval_every"] and (method == "sft" or (method == "dpo" and given)):
        # Nothing is played.
        values.pop("rounds") if "rounds" not in changes else None
        values.pop("engine", None)
    if method == "agentevol" and values["iterations"] == 1:
        for name in {"learn_from", "merge_with"} - changes.keys():
            del values[name]
    if {"pairs", "expert"} & changes.keys() and "min_gap" not in changes:  # some have no returns
        del values["min_gap"]
    if given and method == "dpo":
        for name in {"iterations", "tasks_per_iteration", "group_size"} - changes.keys():
            values.pop(name, None)
    if not changes.get("steps", 1):
        return values
    return {name: v for name, v in values.items() if name != "epochs" or "epochs" in changes}


def run(method, values):
    """The exit code of the program, in this process."""
    with fresh_process_state():
        try:
            return PROGRAMS[method].command_line(flags(**values))
        except SystemExit as stop:
            return stop.code


@pytest.fixture(scope="module")
def url():
    with serve(Shown) as url:
        yield url


# --- Each learns (trap 2) -------------------------------------------------------------------------


def held_out_returns(run_dir):
    found = sorted((Path(run_dir) / "eval").glob("step_*.json"))
    return [json.loads(path.read_text())["overall"]["return_mean"] for path in found]


PREFERRING = {"steps": 20, "iterations": 4, "group_size": 8, "min_gap": 0.1, "mini_batch_size": 32}
PREFERRING |= {"learning_rate": 3e-3, "learning_rate_decay_steps": 1000}


@pytest.mark.long
@pytest.mark.parametrize(
    ("method", "changes", "margin"),
    [
        # Random text earns 0.5; three seeds of each gained what stands behind it.
        ("sft", {"steps": 20, "num_demonstrations": 16, "hold_out": 0.0}, 0.2),  # 0.35 to 0.45
        ("dpo", PREFERRING, 0.2),  # three seeds: training returns from 0.48 to 0.86, 0.86, 0.78
        ("agentevol", {"steps": 30, "iterations": 2, "num_demonstrations": 16}, 0.08),
    ],
)
def test_the_return_rises(method, changes, margin, tmp_path, url):
    changes |= {"max_tokens_per_turn": 6, "eval_every": changes["steps"], "eval_samples": 4}
    changes |= {"eval_start_samples": 4, "deterministic": False, "engine": "transformers"}
    values = settings(method, tmp_path, url, **changes)
    assert run(method, values) == 0
    before, after = held_out_returns(values["run_dir"])
    assert after - before > margin, (before, after)


def test_what_rl_does_not_log_one_of_these_does(whole):
    lines = [s for left in whole.values() for s in left["metrics"].splitlines()]
    logged = {name for line in lines for name in json.loads(line)}
    own = {n for n in METRICS if n.startswith("preference/")}
    own |= {"data/pairs", "data/evolving", "data/evolving_weight", "eval/loss"}
    assert own <= logged


# --- A run that is killed goes on with the same ---------------------------------------------------


class Killed(BaseException):
    """Ends a run where it stands: nothing is saved for it."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory, url):
    """method -> what a run leaves to which nothing happens."""
    found = {}
    for method in PROGRAMS:
        values = settings(method, tmp_path_factory.mktemp(method), url, eval_every=2)
        assert run(method, values) == 0
        found[method] = left_by(values["run_dir"])
    return found


def left_by(run_dir):
    """What a run wrote and no clock has measured."""
    path = Path(run_dir)
    kept = [p for name in ("pairs", "evolving") for p in sorted((path / name).glob("*"))]
    return {
        "metrics": (path / "metrics.jsonl").read_bytes(),
        "alarms": (path / "alarms.jsonl").read_bytes(),
        "evaluations": [p.read_text() for p in sorted((path / "eval").glob("*.json"))],
        "kept": {p.name: p.read_text() for p in kept},
    }


# (owner, name, which call of it is not reached)
PLACES = {
    "while it explores or reads": (methodworker.MethodWorker, "roll_out", 1),
    "before an iteration's summary is written": (methodworker, "write_json", 1),
    "in the second iteration's exploration": (methodworker.MethodWorker, "roll_out", 2),
    "before the second summary": (methodworker, "write_json", 2),
    "in the first update": (update, "optimize", 1),
    "in the last update": (update, "optimize", 4),
    "between logging and saving": (Session, "watch", 3),
    "before a checkpoint gets its name": (checkpoint, "finish_folder", 2),
    "in an evaluation": (Session, "evaluate", 2),
}


# With a checkpoint of every third step what is lost may lie before an iteration.
KILLS = [
    *((method, place, 3) for method in ("dpo", "agentevol") for place in PLACES),
    *(("sft", place, 3) for place, (owner, *_) in PLACES.items() if owner in (update, Session)),
    *((method, "in the last update", 1) for method in PROGRAMS),
]
AT_ONCE = [  # the others are `long`
    ("dpo", "before the second summary", 3),
    ("agentevol", "in the second iteration's exploration", 3),
    ("sft", "in the last update", 1),
]


@pytest.mark.parametrize(
    ("method", "place", "save_every"),
    [pytest.param(*kill, marks=[] if kill in AT_ONCE else pytest.mark.long) for kill in KILLS],
)
def test_killed_anywhere_it_goes_on_to_the_same_bytes(
    method, place, save_every, whole, tmp_path, url, monkeypatch
):
    owner, name, number = PLACES[place]
    original, calls = getattr(owner, name), Counter()

    def die(*args, **kwargs):
        calls[name] += 1
        if calls[name] == number:
            raise Killed
        return original(*args, **kwargs)

    values = settings(method, tmp_path, url, eval_every=2, save_every=save_every)
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, die)
        if owner is update:  # where it was imported to
            patch.setattr(dpo, name, die)
        with pytest.raises(Killed):
            run(method, values)
    assert run(method, {"resume": True, "run_dir": values["run_dir"]}) == 0
    left = left_by(values["run_dir"])
    for part in ("metrics", "evaluations", "kept"):
        assert left[part] == whole[method][part], part


@pytest.mark.long
@pytest.mark.parametrize("method", PROGRAMS)
def test_a_process_that_is_killed_for_real_goes_on_to_the_same(method, tmp_path, url, whole):
    values = settings(method, tmp_path, url, eval_every=2, save_every=3)
    command = [sys.executable, "tests/start_method.py", method]
    for words, lines in ((flags(**values), 2), (["--resume", "--run-dir", values["run_dir"]], 3)):
        process = subprocess.Popen([*command, *words], cwd=ROOT)
        log = Path(values["run_dir"]) / "metrics.jsonl"
        while not log.exists() or len(log.read_bytes().splitlines()) < lines:
            assert process.poll() is None, "it ended before it could be killed"
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert run(method, {"resume": True, "run_dir": values["run_dir"]}) == 0
    left = left_by(values["run_dir"])
    assert left["metrics"] == whole[method]["metrics"]
    assert left["kept"] == whole[method]["kept"]


@pytest.mark.long
@pytest.mark.parametrize("method", PROGRAMS)
def test_two_processes_play_and_learn_as_one(method, tmp_path, url):
    """What is played and kept is the same; the metrics are, up to the order of sums."""
    left = {}
    for ranks in (1, 2):
        values = settings(method, tmp_path / str(ranks), url, steps=2, eval_every=2)
        if ranks == 1:
            assert run(method, values) == 0
        else:
            code, _, stderr = launch("tests/start_method.py", method, *flags(**values))
            assert code == 0, stderr
        left[ranks] = left_by(values["run_dir"]), read_metrics(values["run_dir"])
    (one, first), (two, second) = left[1], left[2]
    assert two["kept"].keys() == one["kept"].keys()
    # The first iteration; the second begins with weights that differ in their last digits.
    for name in (name for name in one["kept"] if "001.jsonl" in name):
        ours, theirs = ([json.loads(s) for s in k["kept"][name].splitlines()] for k in (one, two))
        for a, b in zip(ours, theirs, strict=True):
            for part in ("ref_chosen", "ref_rejected"):
                assert b.pop(part, 0.0) == pytest.approx(a.pop(part, 0.0), rel=1e-5)
            assert a == b
    for name, value in first[0].items():
        assert second[0][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_a_new_run_takes_no_iteration_of_anothers_for_its_own(tmp_path):
    """One that was killed in its first iteration goes on with that."""
    kept = Kept(tmp_path / "pairs", writes=True)
    for iteration in (1, 2):
        kept.of(iteration, lambda: ([{"n": 1}], {}))
    run, left = SimpleNamespace(path=tmp_path, writes=True), []
    for resume in (True, False):
        config = SimpleNamespace(resume=resume)
        session = SimpleNamespace(run=run, config=config, completed_step=0)
        Kept.in_run("pairs", session, steps_per_iteration=3)
        left.append([path.name for path in sorted(kept.folder.iterdir())])
    assert left == [["iteration_001.json", "iteration_001.jsonl"], []]


def test_what_a_later_policy_made_is_forgotten_and_what_is_lost_is_named(tmp_path):
    kept = Kept(tmp_path, writes=True)
    for iteration in (1, 2, 3):
        assert kept.of(iteration, lambda: ([{"n": 1}], {"a": 2})) == ([{"n": 1}], {"a": 2})
    kept.forget_after(2)
    assert kept.of(2, lambda: pytest.fail("it is there")) == ([{"n": 1}], {"a": 2})
    assert kept.of(3, lambda: ([], {})) == ([], {})
    (tmp_path / "iteration_002.json").unlink()
    with pytest.raises(TrainingError, match="iteration_002.json is gone"):
        kept.of(2)


def test_a_run_of_one_method_is_not_resumed_by_another(tmp_path, url, capsys):
    values = settings("sft", tmp_path, url, steps=1)
    assert run("sft", values) == 0
    capsys.readouterr()
    assert run("dpo", {"resume": True, "run_dir": values["run_dir"]}) == 2
    error = capsys.readouterr().err
    assert "holds a run of sft, not of dpo.py" in error and len(error.splitlines()) == 1
    assert run("sft", values) == 2
    assert "add --resume" in capsys.readouterr().err


def test_more_steps_are_refused_where_they_would_move_the_iterations(tmp_path, url, capsys):
    values = settings("agentevol", tmp_path, url, steps=2)
    assert run("agentevol", values) == 0
    capsys.readouterr()
    again = {"resume": True, "run_dir": values["run_dir"], "steps": 4}
    assert run("agentevol", again) == 2
    assert "leave out --steps" in capsys.readouterr().err
    one = settings("dpo", tmp_path / "one", url, steps=2, iterations=1)
    assert run("dpo", one) == 0
    assert run("dpo", again | {"run_dir": one["run_dir"]}) == 0
    assert len(read_metrics(one["run_dir"])) == 4


def test_a_run_can_be_measured_and_learned_from_by_the_others(tmp_path, url):
    """What dpo.py has played is data for sft.py, and evaluate.py takes its best checkpoint."""
    first = settings("dpo", tmp_path / "a", url, eval_every=4)
    assert run("dpo", first) == 0
    data = {"data": (first["run_dir"],), "min_return": 0.4, "hold_out": 0.0}
    second = settings("sft", tmp_path / "b", url, steps=1, **data)
    assert run("sft", second) == 0
    earned = [row["return"] for row in played(first["run_dir"])]
    enough = sum(r >= 0.4 for r in earned)
    assert 0 < enough < len(earned)
    assert json.loads((tmp_path / "b/run/data.json").read_text())["conversations"] == enough
    third = settings("dpo", tmp_path / "c", url, data=(first["run_dir"],))
    assert run("dpo", third) == 0
    assert not list((tmp_path / "c/run/trajectories").glob("*"))  # it played nothing
    with fresh_process_state():
        words = ["--run", first["run_dir"], "--out", str(tmp_path / "eval"), "--deterministic"]
        assert evaluate_main([*words, "--env-addr", url, "--samples", "1"]) == 0


def played(run_dir):
    files = sorted(Path(run_dir).glob("trajectories/step_*.jsonl"))
    return [json.loads(line) for path in files for line in path.read_text().splitlines()]


# --- SFT ------------------------------------------------------------------------------------------


def test_every_conversation_is_seen_once_an_epoch():
    for count, per_turn in ((10, 4), (7, 3), (5, 5), (3, 8), (17, 16)):
        steps = -(-count // per_turn)
        for epoch in range(5):
            taken = [portion(epoch * steps + n + 1, count, per_turn, "x") for n in range(steps)]
            assert sorted(row for rows, _ in taken for row in rows) == list(range(count))
            assert all(len(rows) <= per_turn for rows, _ in taken)
            sizes = [len(rows) for rows, _ in taken]
            assert max(sizes) - min(sizes) <= 1, "one of a rest would count as much as many"
            done = [epochs for _, epochs in taken]
            assert done == sorted(done) and done[-1] == epoch + 1
    assert portion(3, 10, 4, "x") != portion(3, 10, 4, "y")


def test_steps_follow_from_epochs_and_the_rate_falls_over_them(tmp_path, url):
    values = settings("sft", tmp_path, url, steps=0, epochs=3, num_demonstrations=5, hold_out=0.0)
    assert run("sft", values) == 0
    rows = read_metrics(values["run_dir"])
    assert len(rows) == 3 * 2  # five conversations, at most four a step
    saved = json.loads((tmp_path / "run/config.json").read_text())
    assert saved["method"] == "sft" and saved["config"]["steps"] == 6
    rates = [row["policy/learning_rate"] for row in rows]
    assert rates == pytest.approx([3e-3 * (1 - n / 6) for n in range(6)])
    assert [row["data/epoch"] for row in rows] == pytest.approx([0.4, 1, 1.4, 2, 2.4, 3])
    assert [row["train/trajectories_used"] for row in rows] == [2, 3] * 3


def test_epochs_are_counted_of_what_fits(tmp_path, url, capsys):
    data = tmp_path / "data.jsonl"
    texts = ["ab"] * 4 + ["ab" * 400] * 4
    records = [conversation(n, text) for n, text in enumerate(texts)]
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    changes = {"data": (str(data),), "steps": 0, "epochs": 2, "max_trajectory_tokens": 200}
    assert run("sft", settings("sft", tmp_path, url, hold_out=0.0, **changes)) == 0
    assert "4 of 8 conversations have more than 200 tokens" in capsys.readouterr().out
    assert [row["data/epoch"] for row in read_metrics(str(tmp_path / "run"))] == [1, 2]


@pytest.mark.parametrize(
    ("kind", "words", "thinks"),
    [
        (EvolConfig, {}, False),  # smollm2-135m comes with a start that was shown actions alone
        (EvolConfig, {"model": "tiny"}, True),  # and tiny with none
        (EvolConfig, {"warm_start": "never"}, True),
        (SftConfig, {}, True),  # which begins with no warm start
        (SftConfig, {"warm_start": "auto"}, False),
    ],
)
def test_the_oracle_shows_as_it_did_to_the_start_that_the_run_begins_with(kind, words, thinks):
    config = replace(with_preset("laptop", "textcraft", kind), env_addr=("local",), **words)
    shown = methodworker.shown_by(complete(replace(config, num_demonstrations=8)))
    turns = [turn for record in shown for turn in record["conversations"] if turn["loss"]]
    assert len(shown) == 8 and {"Thought:" in turn["value"] for turn in turns} == {thinks}
    slips = [t for r in shown for t in r["conversations"][2:] if t["loss"] is False]
    assert bool(slips) is not thinks, "the start's slips too"


def test_a_weight_in_a_file_is_of_another_set_and_does_not_count_here(tmp_path):
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps(conversation(1, weight="high")) + "\n")
    (record,) = methodworker.shown_by(SftConfig(data=(str(data),)))
    assert "weight" not in record


def test_what_is_held_out_is_measured_and_never_learned(tmp_path, url, capsys):
    values = settings("sft", tmp_path, url, eval_every=2, hold_out=0.25, num_demonstrations=8)
    assert run("sft", values) == 0
    rows = read_metrics(values["run_dir"])
    assert [row.get("eval/loss") is not None for row in rows] == [False, True, False, True]
    assert "step 0: held-out loss 7.0" in capsys.readouterr().out  # nats of a random model
    assert max(row["train/trajectories_used"] for row in rows) <= 6
    learned, held_out = sft.parted([str(n) for n in range(8)], 0.25, seed=0)
    assert len(held_out) == 2 and not set(learned) & set(held_out)
    with pytest.raises(Misuse, match="--hold-out 0.9 leaves none of 1"):
        sft.parted(["a"], 0.9, seed=0)


def test_without_a_world_the_loss_is_measured_each_epoch_and_the_lowest_is_the_best(
    tmp_path, url, capsys, monkeypatch
):
    """Nothing is played, so that no success could tell which checkpoint to take."""
    losses = iter([4.0, 3.0, 2.0, 2.5, 2.0])
    monkeypatch.setattr(sft, "loss_on", lambda worker, hidden: next(losses))
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps(conversation(n, id=n)) + "\n" for n in range(10)))
    values = settings("sft", tmp_path / "a", url, data=(str(file),), hold_out=0.2, steps=8)
    values |= {"eval_every": 0, "keep_last": 1, "save_every": 100, "mini_batch_size": 4}
    del values["env_addr"]
    assert run("sft", values) == 0
    path = Path(values["run_dir"])
    assert [row.get("eval/loss") for row in read_metrics(path)] == [
        *(None, 3.0, None, 2.0),  # eight conversations, four at a time
        *(None, 2.5, None, 2.0),  # as good as the best is not better
    ]
    assert (path / "checkpoints/best").resolve().name == "step_000004"
    said = capsys.readouterr().out
    assert "10 conversations: " in said and " of them learned" in said
    assert "the best checkpoint is the one with the lowest held-out loss" in said
    assert f"--run {path} --env letters  (or the world that its texts are of)" in said


def test_a_run_of_files_alone_is_not_named_by_a_world(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for every, name in ((0, "sft-"), (2, "textcraft-sft-")):
        run = open_run(complete(SftConfig(data=("mine.jsonl",), model="tiny", eval_every=every)))
        run.close()
        assert run.path.name.startswith(name)


def test_the_page_of_data_says_what_each_count_of_left_out_pairs_means():
    page = (ROOT / "docs/data.md").read_text(encoding="utf-8")
    counted = set(re.findall(r'counts\["([^"]+)"\]', (ROOT / "pairs.py").read_text("utf-8")))
    assert {"gap", "no partner", "two seeds"} < counted
    assert [name for name in counted if f"`{name}`" not in page] == []


def test_what_is_left_out_of_a_file_is_counted(tmp_path, capsys):
    file = tmp_path / "data.jsonl"
    returns = (0.0, 0.4, 0.5, 1.0, 0.1)
    records = [conversation(n) | {"return": earned} for n, earned in enumerate(returns)]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert len(methodworker.shown_by(SftConfig(data=(str(file),)), 0.5)) == 2
    said = capsys.readouterr().out
    assert (
        "3 of 5 conversations are left out: lost, or without a turn, or a return below 0.5" in said
    )
    assert len(methodworker.shown_by(SftConfig(data=(str(file),)))) == 5
    assert "left out" not in capsys.readouterr().out


def test_whose_run_it_learns_from_and_where_it_begins_is_noted(tmp_path):
    saved = {"config": {"env": "textcraft", "model": "tiny"}}
    (tmp_path / "config.json").write_text(json.dumps(saved))
    given, small = (str(tmp_path),), {"model": "smollm2-135m"}
    (line,) = remarks(complete(SftConfig(data=given, **small)))
    assert "was played by tiny, and this run trains smollm2-135m" in line
    (line,) = remarks(complete(SftConfig(data=given, model="tiny")))
    assert "was played by what it has learned to be, and this run trains tiny" in line
    best = tmp_path / "checkpoints/best"
    assert f"--model {best}" in line  # what it advises is what needs no advice
    for start in ({"model": str(best)}, {"model": "tiny", "warm_start": str(best)}):
        assert not any("was played by" in line for line in remarks(SftConfig(data=given, **start)))
    files = {"data": ("mine.jsonl",), "model": "tiny", "eval_every": 0}
    (line,) = remarks(complete(DpoConfig(**files)))
    assert "tiny begins from its warm start in textcraft, which files do not need" in line
    assert not remarks(complete(DpoConfig(**files, warm_start="never")))


@pytest.mark.parametrize("share", [0.07, 0.1, 0.25, 0.5])
def test_a_task_is_learned_or_held_out_and_never_both(share):
    """A run has tried each several times: the same words would be on both sides."""
    tasks = [f"{n % 17}" for n in range(100)]
    learned, held_out = sft.parted(tasks, share, seed=3)
    assert not {tasks[n] for n in learned} & {tasks[n] for n in held_out}
    assert 0 < len(held_out) <= round(share * 100) and len(learned) + len(held_out) == 100
    few = sft.parted(["a"] * 9 + ["b"] * 5, 0.01, seed=0)  # every task is more than its share
    assert few == (list(range(9)), list(range(9, 14)))


def test_given_pairs_that_do_not_fit_are_found_before_there_is_a_run(tmp_path, url, capsys):
    pair = {"prompt": "p", "chosen": "a", "rejected": "b"}
    long, longer = pair | {"chosen": "a" * 900}, pair | {"rejected": "b" * 901}
    file = tmp_path / "pairs.json"
    file.write_text(json.dumps([long, longer]))
    values = settings("dpo", tmp_path, url, pairs=(str(file),))
    assert run("dpo", values) == 2
    assert "leaves none of 2 pairs; raise it" in capsys.readouterr().err
    assert not Path(values["run_dir"]).exists()
    file.write_text(json.dumps([long, pair]))
    assert run("dpo", values | {"steps": 1}) == 0
    assert "1 of 2 pairs have more than" in capsys.readouterr().out


def test_a_least_return_is_refused_where_nothing_has_a_return(tmp_path, url, capsys):
    """It left out nothing, without a word."""
    file = tmp_path / "pairs.json"
    file.write_text(json.dumps([{"prompt": "p", "chosen": "a", "rejected": "b"}]))
    values = settings("dpo", tmp_path, url, pairs=(str(file),), min_return=0.5)
    assert run("dpo", values) == 2
    assert "--min-return 0.5 chooses by return, and nothing here has" in capsys.readouterr().err
    assert not Path(values["run_dir"]).exists()


def test_a_pair_with_a_side_over_the_limit_is_left_out_and_counted(capsys):
    said = conversation(0, "a"), conversation(0, "b"), conversation(0, "ccc")
    pairs = [Pair("a", said[2], said[0]), Pair("b", said[0], said[2]), Pair("c", *said[:2])]

    def fit(limit):
        config = DpoConfig(model="tiny", warm_start="never", max_trajectory_tokens=limit)
        return methodworker.fitting(config, pairs, "pairs", lambda p: (p.chosen, p.rejected))

    with fresh_process_state():
        chat = ChatTemplate(load_tokenizer(resolve_model("tiny")))
        longest = len(from_agenttraj(chat, said[2]).input_ids)
        assert fit(longest) == pairs
        capsys.readouterr()
        assert fit(longest - 1) == pairs[2:]
        assert f"2 of 3 pairs have more than {longest - 1} tokens" in capsys.readouterr().out
        with pytest.raises(Misuse, match="--max-trajectory-tokens 5 leaves none of 3 pairs"):
            fit(5)


def test_the_reference_is_asked_of_no_more_pairs_than_the_steps_take(tmp_path, url, capsys):
    file = tmp_path / "pairs.json"
    rows = [{"prompt": "p", "chosen": "a" * (1 + n), "rejected": "b"} for n in range(9)]
    file.write_text(json.dumps(rows))
    own = {"pairs": (str(file),), "steps": 2, "mini_batch_size": 4}
    values = settings("dpo", tmp_path, url, **own)
    assert run("dpo", values) == 0
    kept = tmp_path / "run/pairs/iteration_001.jsonl"
    texts = [json.loads(line)["chosen"][0]["value"] for line in kept.read_text().splitlines()]
    assert len(set(texts)) == len(texts) == 4
    assert "4 of 9 pairs, as many as 2 steps take" in capsys.readouterr().out
    assert run("dpo", {"resume": True, "run_dir": values["run_dir"], "steps": 4}) == 0
    rows = read_metrics(values["run_dir"])
    assert [row["data/epoch"] for row in rows] == [0.5, 1.0, 1.5, 2.0]


def test_ctrl_c_is_heard_while_the_reference_is_asked():
    class Worker:
        config = DpoConfig(mini_batch_size=2)
        stop = SimpleNamespace(agreed=lambda: True)

        def rest(self):
            pass

    with pytest.raises(KeyboardInterrupt):
        dpo.reference_of(Worker(), [None])


def test_where_the_reference_lacks_memory_the_advice_is_what_makes_that_smaller(monkeypatch):
    class Worker:
        config = DpoConfig(max_tokens_per_micro_batch=2048)
        stop, chat, pad_id = SimpleNamespace(agreed=lambda: False), None, 0

        def rest(self):
            pass

    def full(*given):
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(dpo, "encode_pairs", full)
    with Clock({})("time/rollout_s"), pytest.raises(OutOfMemory) as lacking:
        dpo.reference_of(Worker(), [None])
    assert "out of memory in log_probs" in str(lacking.value)
    assert "lower --max-tokens-per-micro-batch (now 2048)" in str(lacking.value)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (DpoConfig(pairs=("x",)), 1.0),
        (DpoConfig(), 0.2),
        (EvolConfig(), 0.2),  # fitted at another, each iteration would play sharper than the last
        (SftConfig(), 1.0),
    ],
)
def test_what_the_policy_did_not_sample_is_scored_at_temperature_1(config, expected):
    worker = methodworker.MethodWorker.__new__(methodworker.MethodWorker)
    worker.config = replace(config, temperature=0.2)
    assert worker.portions(4).temperature == expected


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--rounds", "3"], "--rounds"),
        (["--max-env-failures", "0.5"], "--max-env-failures"),
        (["--temperature", "0.5"], "--temperature"),
        (["--engine", "transformers"], "--engine"),
    ],
)
def test_what_nobody_plays_with_is_refused(tmp_path, words, named):
    data = tmp_path / "data.json"
    data.write_text(json.dumps([conversation(0)]))
    words = ["--data", str(data), "--eval-every", "0", *words, *SMALL]
    with pytest.raises(Misuse, match=f"^{named} has no effect here"):
        training_options(words, "sft.py", "", SftConfig, check_method)


def test_data_of_a_world_can_be_imitated_without_its_package(tmp_path, monkeypatch):
    data = tmp_path / "data.json"
    data.write_text(json.dumps([conversation(0)]))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    words = ["--env", "sciworld", *SMALL]
    given = ["--data", str(data), "--eval-every", "0"]
    found = training_options([*words, *given], "sft.py", "", SftConfig, check_method)
    assert not found.needs_world
    for more in (["--eval-every", "0"], given[:2]):  # its oracle shows; it is measured
        with pytest.raises(Misuse, match="needs the package scienceworld"):
            training_options([*words, *more], "sft.py", "", SftConfig, check_method)


def test_returns_on_another_scale_are_no_weights(tmp_path):
    data = tmp_path / "data.json"
    data.write_text(json.dumps([conversation(0, **{"return": 100})]))
    with pytest.raises(Misuse, match='"return" is 100, expected 0 to 1'):
        agentevol.demonstrated(EvolConfig(data=(str(data),)))


def test_a_resumed_run_notices_other_data(tmp_path, url, capsys):
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(conversation(n)) + "\n" for n in range(4)))
    values = settings("sft", tmp_path, url, data=(str(data),), steps=2, hold_out=0.0)
    assert run("sft", values) == 0
    data.write_text("".join(json.dumps(conversation(n)) + "\n" for n in range(5)))
    capsys.readouterr()
    assert run("sft", {"resume": True, "run_dir": values["run_dir"], "steps": 4}) == 2
    assert "is not what" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["sft", "dpo", "agentevol"])
def test_files_that_show_held_out_tasks_are_noted(method, capsys):
    kind = {"sft": SftConfig, "dpo": DpoConfig, "agentevol": EvolConfig}[method]
    config = complete(kind(data=("files",)))  # which fitting has read
    learned = {"textcraft_0", *(task.task_id for task in held_out_tasks(config)[:2])}
    for other, noted in (
        (config, True),
        (replace(config, data=()), False),  # the world's own lists: checks.py
        (replace(config, eval_every=0), False),
    ):
        methodworker.say_what_is_held_out(other, learned)
        said = "note: 2 of the 129 held-out tasks are in the files that it learns from"
        assert (said in capsys.readouterr().out) == noted


def test_what_fits_is_compared_with_what_is_held_out(tmp_path, capsys):
    config = complete(SftConfig(model="tiny", data=("files",)))
    held_out = held_out_tasks(config)[0].task_id
    records = [conversation(0) | {"item_id": held_out}, conversation(1)]
    assert methodworker.fitting(config, records, "conversations") == records
    assert "note: 1 of the 129 held-out tasks" in capsys.readouterr().out


def conversation(n, text="abc", **more):
    turns = [("human", f"craft {n}"), ("gpt", text), ("human", "get 1"), ("gpt", text)]
    said = [{"from": who, "loss": who == "gpt", "value": value} for who, value in turns]
    return {"item_id": f"letters_{n}", "conversations": said, **more}


# --- Imitation with weights -----------------------------------------------------------------------


def learner(rank=0):
    accelerator = distributed.make_accelerator("no")
    model = distributed.shard(accelerator, make_policy(rank).train())
    learning = [p for p in model.parameters() if p.requires_grad]
    return Learner(accelerator, model, torch.optim.SGD(learning, lr=1.0))


def weights_after(update_of, rank=0):
    with fresh_process_state():
        update.SHARING_PAYS, before = 0.0, update.SHARING_PAYS
        try:
            made = learner(rank)
            metrics = update_of(made)
        finally:
            update.SHARING_PAYS = before
        return metrics, {n: p.detach().clone() for n, p in made.model.named_parameters()}


OBJECTIVE = Objective(mini_batch_size=64, max_grad_norm=1e9, share_prefix=False)
CUTS = [
    {"max_tokens_per_micro_batch": 10_000},
    {"max_tokens_per_micro_batch": 14},
    {"max_tokens_per_micro_batch": 40, "share_prefix": True},
    {"max_tokens_per_micro_batch": 10_000, "share_prefix": True},
]


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("changes", CUTS)
def test_weighted_imitation_is_the_slow_sum_whatever_the_cut(changes, rank):
    batch = make_batch()
    batch.weights = torch.tensor([1.0, 0.0, 0.5, 2.0, 1.0, 0.3, 0.0, 1.0, 0.7, 1.0, 0.1])
    metrics, weights = weights_after(
        lambda made: imitate(made, batch, replace(OBJECTIVE, **changes)), rank
    )

    def slowly(made):
        total, tokens = torch.zeros(()), float(batch.loss_mask.sum())
        for row in range(len(batch)):
            one = batch.rows([row])
            log_probs, _ = made.model(one.input_ids, one.loss_mask, 1.0)
            for t in range(int(one.lengths)):
                if one.loss_mask[0, t]:
                    total = total - batch.weights[row] * log_probs[0, t] / tokens
        total.backward()
        made.optimizer.step()
        return float(total.detach())

    loss, expected = weights_after(slowly, rank)
    assert metrics["policy/loss"] == pytest.approx(loss, rel=1e-5)
    assert_equal(weights, expected)


def assert_equal(weights, expected):
    for name, weight in expected.items():
        largest = weight.abs().max()
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=float(1e-5 * largest))


# --- Preferences ----------------------------------------------------------------------------------


def pair_batch():
    """Four pairs of different lengths, the two of a pair with one opening of three tokens."""
    batch = make_batch().rows([0, 1, 2, 3, 5, 6, 9, 10])
    batch.group_ids = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
    for row in range(0, 8, 2):
        batch.input_ids[row + 1, :3] = batch.input_ids[row, :3]
    batch.loss_mask[:, :4] = 0.0
    batch.loss_mask[:, 4] = 1.0
    generator = torch.Generator().manual_seed(5)
    batch.ref_sums = -torch.rand(8, generator=generator) * 40
    return batch


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("changes", CUTS)
@pytest.mark.parametrize("kind", ["sigmoid", "ipo", "hinge"])
def test_a_step_of_preferences_is_the_slow_one_whatever_the_cut(kind, changes, rank):
    batch, config = pair_batch(), DpoConfig(beta=0.2, loss=kind, sft_coef=0.3)
    metrics, weights = weights_after(
        lambda made: dpo.prefer(made, batch, replace(OBJECTIVE, **changes), config), rank
    )

    def slowly(made):
        sums, tokens = [], []
        for row in range(len(batch)):
            one = batch.rows([row])
            log_probs, _ = made.model(one.input_ids, one.loss_mask, 1.0)
            own = [log_probs[0, t] for t in range(int(one.lengths)) if one.loss_mask[0, t]]
            sums.append(sum(own[1:], own[0]))
            tokens.append(len(own))
        losses = []
        for i in range(0, len(batch), 2):
            one = [x.reshape(1) for x in (sums[i], sums[i + 1])]
            ref = [batch.ref_sums[i + k].reshape(1) for k in (0, 1)]
            losses.append(preference_loss(*one, *ref, 0.2, 0.0, kind).loss)
            losses[-1] = losses[-1] - 0.3 * sums[i] / tokens[i]
        loss = sum(losses) / len(losses)
        loss.backward()
        made.optimizer.step()
        chosen = [float(s.detach()) for s in sums[::2]]
        return float(loss.detach()), sum(chosen) / len(chosen)

    (loss, chosen), expected = weights_after(slowly, rank)
    assert metrics["policy/loss"] == pytest.approx(loss, rel=1e-5)
    assert metrics["preference/chosen_log_prob"] == pytest.approx(chosen, rel=1e-5)
    assert metrics["policy/optimizer_steps"] == 1
    assert_equal(weights, expected)


def test_micro_batches_never_part_a_pair():
    batch = pair_batch()
    for budget in (1, 20, 30, 64, 10_000):
        for share in (False, True):
            objective = Objective(max_tokens_per_micro_batch=budget, share_prefix=share)
            cuts = dpo.pair_cuts(batch, list(range(8)), objective)
            assert sorted(row for cut in cuts for row in cut) == list(range(8))
            for cut in cuts:
                assert all(b == a + 1 and a % 2 == 0 for a, b in zip(cut[::2], cut[1::2]))
                longest = int(batch.lengths[cut].max())
                assert len(cut) == 2 or len(cut) * longest <= budget
                assert not share or len(cut) == 2


def test_the_reference_is_the_policy_before_its_first_step(tmp_path, url):
    """The first margin is 0, of each iteration; no pair is of two tasks or two openings."""
    values = settings("dpo", tmp_path, url, mini_batch_size=64)  # each step takes all pairs
    assert run("dpo", values) == 0
    rows = read_metrics(values["run_dir"])
    for row in (rows[0], rows[2]):
        assert row["preference/margin"] == pytest.approx(0, abs=1e-4)
        assert row["policy/loss"] == pytest.approx(0.693147, abs=1e-4)
        assert row["data/pairs"] > 0 and row["train/return_mean"] > 0
    for row in (rows[1], rows[3]):
        assert row["preference/margin"] > 0.001 and "data/pairs" not in row
    text = (tmp_path / "run/pairs/iteration_001.jsonl").read_text()
    lines = [json.loads(s) for s in text.splitlines()]
    assert len(lines) == rows[0]["data/pairs"]
    for line in lines:
        assert line["chosen_return"] >= line["rejected_return"] + 0.05 - 1e-6
        assert line["ref_chosen"] < 0 and line["ref_rejected"] < 0


def test_pairs_that_a_run_has_kept_are_a_pair_file(tmp_path, url):
    first = settings("dpo", tmp_path / "a", url, iterations=1, steps=1)
    assert run("dpo", first) == 0
    file = tmp_path / "a/run/pairs/iteration_001.jsonl"
    second = settings("dpo", tmp_path / "b", url, steps=1, pairs=(str(file),), min_gap=0.05)
    assert run("dpo", second) == 0
    again = tmp_path / "b/run/pairs/iteration_001.jsonl"
    assert again.read_text() == file.read_text()  # references too: the same model


def test_an_expert_is_preferred_to_what_the_policy_did(tmp_path, url, capsys):
    files = {}
    for name, text in (("expert", "abc"), ("experience", "xyz")):
        files[name] = (str(tmp_path / f"{name}.jsonl"),)
        Path(files[name][0]).write_text(
            "".join(json.dumps(conversation(n, text)) + "\n" for n in range(3))
        )
    values = settings("dpo", tmp_path, url, steps=6, **files)
    assert run("dpo", values) == 0
    assert "3 pairs" in capsys.readouterr().out
    rows = read_metrics(values["run_dir"])
    assert (
        rows[-1]["preference/accuracy"] == pytest.approx(1.0)
        and rows[-1]["preference/margin"] > 0.05
    )


# --- AgentEvol ------------------------------------------------------------------------------------


def explored(task, earned, text):
    return conversation(task, text, **{"return": earned})


def test_the_best_of_each_task_join_once_with_their_weights():
    said = [
        explored(0, 0.2, "aa"),
        explored(0, 1.0, "ab"),
        explored(0, 0.5, "ac"),
        explored(0, 0.7, "ad"),
        explored(1, 0.6, "ae"),
        explored(1, 0.6, "ae"),  # the same again
        explored(2, 0.0, "af"),
    ]
    once = EvolConfig(keep_per_task=2, min_return=0.1, weighting="return")
    chosen = agentevol.selected(said, once, "iteration 1")
    found = [(r["item_id"], r["weight"], r["origin"]) for r in chosen]
    assert sorted(found) == [
        ("letters_0", 0.7, "iteration 1"),
        ("letters_0", 1.0, "iteration 1"),
        ("letters_1", 0.6, "iteration 1"),
    ]
    ones = agentevol.selected(said, replace(once, weighting="one"), "x")
    assert {r["weight"] for r in ones} == {1.0} and len(ones) == 3
    blind = EvolConfig(ignore_returns=True, keep_per_task=2, weighting="one")
    control = [(r["item_id"], r["return"]) for r in agentevol.selected(said, blind, "x")]
    assert control == [("letters_0", 0.2), ("letters_0", 1.0), ("letters_1", 0.6), ("letters_2", 0)]
    assert {r["weight"] for r in agentevol.selected(said, blind, "x")} == {1.0}
    perfect = agentevol.selected(said, replace(once, min_return=1.0), "x")
    assert [r["return"] for r in perfect] == [1.0], "at least so much, as in sft.py and dpo.py"
    assert agentevol.selected(said[-1:], EvolConfig(), "x") == [], "and never what earned nothing"
    # What the set has already does not join again, and takes no place of what is new.
    again = agentevol.selected(said, replace(once, keep_per_task=1), "x", chosen[:1])
    assert [r["return"] for r in again] == [0.7, 0.6]


def test_what_is_played_alike_counts_as_often():
    """E[R log π] over all that was played, term by term, though a row each different one is kept:
    how often is all that shows how likely it is. It may be in the set already, too."""
    said = [explored(0, 0.5, "ab"), explored(0, 1.0, "ac"), explored(1, 0.5, "ad")]
    said += [explored(0, 0.5, "ab"), explored(1, 0.0, "ae"), explored(0, 0.5, "ab")]
    played = EvolConfig(keep_per_task=8, weighting="played")
    chosen = agentevol.selected(said, played, "x")
    assert len(chosen) == 3
    log_prob = {agentevol._texts(record): -1.0 - at for at, record in enumerate(said)}
    expected = sum(record["return"] * log_prob[agentevol._texts(record)] for record in said)
    kept = sum(record["weight"] * log_prob[agentevol._texts(record)] for record in chosen)
    assert kept == pytest.approx(expected)
    assert agentevol.selected(said, played, "x", chosen) == chosen
    blind = replace(played, ignore_returns=True)  # the control differs in the returns alone
    weights = [record["weight"] for record in agentevol.selected(said, blind, "x")]
    assert sorted(weights) == [1.0, 1.0, 1.0, 3.0] and len(said) == 6
    # A world with chance pays the same text differently, and two tasks may read alike.
    said = [explored(0, earned, "ab") for earned in (1.0, 0.0, 0.25, 0.0)]
    other = explored(0, 0.1, "ab") | {"item_id": "letters_9"}
    chosen = agentevol.selected([*said, other], played, "x")
    assert [record["weight"] for record in chosen] == [1.25, 0.1]


@pytest.mark.parametrize(("learn_from", "times"), [("base", 1), ("last", 0)])
def test_the_sentinels_begin_anew_where_the_weights_do(
    tmp_path, url, monkeypatch, learn_from, times
):
    anew, make = [], agentevol.Sentinels
    monkeypatch.setattr(agentevol, "Sentinels", lambda: anew.append(1) or make())
    values = settings("agentevol", tmp_path, url, learn_from=learn_from, steps=2)
    assert run("agentevol", values) == 0
    assert len(anew) == times


def test_the_set_grows_by_what_earned_and_each_iteration_begins_at_the_base(tmp_path, url):
    values = settings("agentevol", tmp_path, url)
    assert run("agentevol", values) == 0
    rows = read_metrics(values["run_dir"])
    sets = [
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for path in sorted((tmp_path / "run/evolving").glob("iteration_*.jsonl"))
    ]
    summaries = [
        json.loads((tmp_path / f"run/evolving/iteration_00{n}.json").read_text()) for n in (1, 2)
    ]
    assert sets[1][: len(sets[0])] == sets[0]  # nothing leaves it
    for place, (records, summary) in enumerate(zip(sets, summaries, strict=True)):
        origins = Counter(r["origin"] for r in records)
        assert summary["origins"] == origins and origins["demonstration"] == 4
        assert rows[2 * place]["data/evolving"] == len(records)
        assert all(as_agenttraj(r, "x") for r in records)  # AgentTraj, and more
        for record in records:
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
    last = settings("agentevol", tmp_path / "last", url, learn_from="last")
    assert run("agentevol", last) == 0
    on = read_metrics(last["run_dir"])
    assert on[2]["policy/entropy"] < rows[2]["policy/entropy"] - 0.01


def test_exploration_may_join_the_demonstrations_alone(tmp_path, url):
    values = settings("agentevol", tmp_path, url, merge_with="demonstrations")
    assert run("agentevol", values) == 0
    origins = [
        json.loads((tmp_path / f"run/evolving/iteration_00{n}.json").read_text())["origins"]
        for n in (1, 2)
    ]
    for number, found in enumerate(origins, start=1):
        assert set(found) == {"demonstration", f"iteration {number}"}
        assert found["demonstration"] == 4


def test_an_iteration_in_which_nothing_earned_leaves_the_demonstrations_and_says_so(
    tmp_path, url, capsys
):
    values = settings("agentevol", tmp_path, url, min_return=1.0)
    assert run("agentevol", values) == 0
    said = capsys.readouterr().out
    assert "iteration 1: nothing of 16 explored earned --min-return 1; the set stays" in said
    assert [row.get("data/evolving") for row in read_metrics(values["run_dir"])] == [4, None] * 2


# --- Misuse, one line each ------------------------------------------------------------------------


BAD_FILES = {
    "broken.json": "{oops",
    "field.jsonl": '{"item_id": "a"}\n',
    "role.jsonl": '{"messages": [{"role": "robot", "content": "a"}]}\n',
    "empty.jsonl": '{"item_id": "a", "conversations": []}\n',
    "nothing.jsonl": "",
    "alternate.jsonl": json.dumps(
        {
            "item_id": "a",
            "conversations": [
                {"from": "human", "loss": None, "value": "a"},
                {"from": "gpt", "loss": True, "value": "a"},
                {"from": "gpt", "loss": True, "value": "a"},
            ],
        }
    ),
    "no_loss.jsonl": json.dumps(
        {"item_id": "a", "conversations": [{"from": "human", "loss": None, "value": "a"}]}
    ),
    "sharegpt.jsonl": json.dumps(
        {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "a"}]}
    ),
    "roles.jsonl": json.dumps({"conversations": [{"role": "user", "content": "a"}]}),
    "parts.jsonl": json.dumps({"messages": [{"role": "user", "content": [{"text": "a"}]}]}),
    "two_tasks.jsonl": json.dumps(
        {"chosen": conversation(1), "rejected": conversation(2, "xyz"), "prompt": None}
    ),
    "equal.jsonl": json.dumps(
        {"chosen": conversation(1), "rejected": conversation(1), "prompt": None}
    ),
    "no_gap.jsonl": "".join(
        json.dumps(conversation(1, text, **{"return": 0.5})) + "\n" for text in ("ab", "cd")
    ),
}
REFUSED = [
    ("sft", {"data": ("nosuch.json",)}, "--data nosuch.json is not there"),
    ("sft", {"data": ("FILES/broken.json",)}, "broken.json, line 1 is no JSON"),
    ("sft", {"data": ("FILES/field.jsonl",)}, "field.jsonl, line 1: ['item_id']: expected"),
    ("sft", {"data": ("FILES/role.jsonl",)}, "line 1: message 0 has the role 'robot'"),
    ("sft", {"data": ("FILES/empty.jsonl",)}, "line 1: conversation a is empty"),
    ("sft", {"data": ("FILES/alternate.jsonl",)}, "turn 2 is from gpt, expected human"),
    ("sft", {"data": ("FILES/no_loss.jsonl",)}, "has no gpt turn with loss"),
    ("sft", {"data": ("FILES/nothing.jsonl",)}, "holds no conversation"),
    ("sft", {"data": ("FILES/sharegpt.jsonl",)}, 'what is to be learned says "loss": true'),
    ("sft", {"data": ("FILES/roles.jsonl",)}, 'lists of "role" and "content" go by "messages"'),
    ("sft", {"data": ("FILES/parts.jsonl",)}, "this one's is a list: join the texts of its parts"),
    ("sft", {"hold_out": 1.0}, "--hold-out 1 must be a share: 0 or more, and below 1"),
    ("sft", {"steps": 0, "epochs": 0}, "--epochs 0 must be at least 1"),
    ("sft", {"max_trajectory_tokens": 9}, "leaves none of 8 conversations; raise it"),
    ("sft", {"rounds": (2, 4), "eval_every": 2}, "sft.py plays with one horizon"),
    ("sft", {"rounds": (0,), "eval_every": 2}, "--rounds 0 must be at least 1"),
    ("sft", {"min_return": float("nan"), "data": ("FILES/no_gap.jsonl",)}, "--min-return nan"),
    ("sft", {"epochs": 3}, "--epochs has no effect here: --steps 4 says how far"),
    (
        "sft",
        {"data": ("FILES/no_gap.jsonl",), "num_demonstrations": 3},
        "--num-demonstrations has no effect here",
    ),
    ("dpo", {"beta": float("inf")}, "--beta inf must be above 0, and finite"),
    ("dpo", {"min_gap": -0.5}, "--min-gap -0.5 must be a difference"),
    ("dpo", {"pairs": ("FILES",)}, "Is a directory"),
    ("agentevol", {"min_return": -1.0}, "--min-return -1 must be finite, and no return is below 0"),
    ("agentevol", {"ignore_returns": True}, "--min-return has no effect here"),
    ("agentevol", {"learn_from": "last", "iterations": 1}, "--learn-from has no effect here"),
    (
        "agentevol",
        {"merge_with": "demonstrations", "iterations": 1},
        "--merge-with has no effect here",
    ),
    ("dpo", {"beta": 0}, "--beta 0 must be above 0"),
    ("dpo", {"label_smoothing": 0.5}, "--label-smoothing 0.5 must be below 0.5"),
    ("dpo", {"label_smoothing": 0.1, "loss": "ipo"}, "is of --loss sigmoid alone"),
    ("dpo", {"mini_batch_size": 5}, "--mini-batch-size 5 counts trajectories, two of each pair"),
    ("dpo", {"steps": 5}, "--steps 5 cannot be cut into --iterations 2 equal parts; give 4 or 6"),
    ("dpo", {"steps": 1}, "--steps 1 cannot be cut into --iterations 2 equal parts; give 2"),
    ("dpo", {"steps": -1}, "--steps -1 must be above 0"),
    ("dpo", {"expert": ("FILES/equal.jsonl",)}, "--expert and --experience belong together"),
    ("dpo", {"pairs": ("FILES/equal.jsonl",), "iterations": 2}, "--iterations has no effect here"),
    ("dpo", {"pairs": ("FILES/two_tasks.jsonl",)}, "a pair of two tasks"),
    ("dpo", {"pairs": ("FILES/equal.jsonl",)}, "no pair left (1 equal texts)"),
    ("dpo", {"data": ("FILES/no_gap.jsonl",)}, "no pair left (1 no partner)"),
    ("dpo", {"group_size": 1}, "--group-size 1 leaves no second trajectory"),
    ("agentevol", {"keep_per_task": 0}, "--keep-per-task 0 must be at least 1"),
    ("agentevol", {"data": ("FILES/broken.json",)}, "broken.json, line 1 is no JSON"),
]


@pytest.mark.parametrize(("method", "changes", "words"), REFUSED)
def test_misuse_is_one_line_and_leaves_nothing(method, changes, words, tmp_path, url, capsys):
    files = tmp_path / "files"
    files.mkdir()
    for name, text in BAD_FILES.items():
        (files / name).write_text(text)
    changes = {
        name: tuple(v.replace("FILES", str(files)) if isinstance(v, str) else v for v in value)
        if isinstance(value, tuple)
        else value
        for name, value in changes.items()
    }
    values = settings(method, tmp_path, url, **changes)
    assert run(method, values) == 2
    error = capsys.readouterr().err
    assert words in error, error
    assert len(error.splitlines()) == 1 and error.startswith(f"{method}.py: ")
    assert not Path(values["run_dir"]).exists()


def test_a_later_iteration_without_a_pair_changes_no_weight_and_the_run_goes_on(
    tmp_path, url, capsys, monkeypatch
):
    """As a step of RL without signal; killed within it, it is gone on with."""
    pairs, times = dpo.pairs_of, []

    def none_the_second_time(said, settings, counts):
        times.append(1)
        found = pairs(said, settings, counts)
        return found if len(times) == 1 else []

    monkeypatch.setattr(dpo, "pairs_of", none_the_second_time)
    values = settings("dpo", tmp_path, url, eval_every=4, save_every=3)
    assert run("dpo", values) == 0
    assert "iteration 2: no pair left (" in capsys.readouterr().out
    whole = (tmp_path / "run/metrics.jsonl").read_bytes()
    rows = read_metrics(values["run_dir"])
    assert [row["policy/optimizer_steps"] for row in rows] == [1, 1, 0, 0]
    assert [row.get("data/pairs", -1) > 0 for row in rows] == [True, False, False, False]
    shutil.rmtree(tmp_path / "run/checkpoints/step_000004")
    assert run("dpo", {"resume": True, "run_dir": values["run_dir"]}) == 0
    assert (tmp_path / "run/metrics.jsonl").read_bytes() == whole
    assert len(times) == 2


@pytest.mark.parametrize("part", ["load_into_engine", "reference_of"])
def test_what_fails_before_an_iteration_learns_loses_no_step_done(
    part, tmp_path, url, capsys, monkeypatch
):
    """Iterations begin with a weight sync and a pass of the reference, either of which may fail;
    the steps since the last checkpoint would have been learned again."""
    values = settings("dpo", tmp_path, url, eval_every=4, save_every=100)
    fails = iter([False, True])  # in the second iteration
    where = methodworker.MethodWorker if part == "load_into_engine" else dpo
    whole = getattr(where, part)
    lost = EngineError("the sampler is gone")

    def perhaps(worker, *given):
        if next(fails):
            raise lost
        return whole(worker, *given)

    with monkeypatch.context() as patch:
        patch.setattr(where, part, perhaps)
        assert run("dpo", values) == 1
    assert "left the weights as step 2 made them, saved" in capsys.readouterr().out
    assert (tmp_path / "run/checkpoints/step_000002").is_dir()
    assert run("dpo", {"resume": True, "run_dir": values["run_dir"]}) == 0
    assert [row["step"] for row in read_metrics(values["run_dir"])] == [1, 2, 3, 4]


def test_what_explores_is_compared_with_what_was_learned(tmp_path, url, capsys, monkeypatch):
    """Without evaluation nothing was, and an old policy's trajectories would have been learned."""
    more = {"eval_every": 0, "learning_rate": 3e-2, "learn_from": "last", "min_return": 0.0}
    more["save_every"] = 100
    values = settings("agentevol", tmp_path, url, **more)
    monkeypatch.setattr(methodworker.MethodWorker, "load_into_engine", lambda own: 0)
    assert run("agentevol", values) == 1
    said = capsys.readouterr()
    assert "the sampler holds other weights than the trainer" in said.err
    assert "left the weights as step 2 made them, saved" in said.out


def test_a_gap_of_returns_that_nobody_noted_is_refused(tmp_path, url, capsys):
    file = tmp_path / "pairs.jsonl"
    file.write_text(json.dumps({"prompt": "a", "chosen": "b", "rejected": "c"}) + "\n")
    values = settings("dpo", tmp_path, url, pairs=(str(file),), min_gap=0.2)
    assert run("dpo", values) == 2
    assert "--min-gap 0.2 compares returns, and no pair here has both" in capsys.readouterr().err


SMALL = ("--model", "tiny", "--max-trajectory-tokens", "1024")


@pytest.mark.parametrize("kind", [SftConfig, DpoConfig, EvolConfig])
def test_every_preset_and_every_runs_options_are_a_command_line(kind, tmp_path):
    """The paper's horizons widen; a method with one takes the longest."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"config": {"rounds": [4, 8], "env": "textcraft"}}))
    for words, rounds in (
        (["--preset", "paper"], (30,)),
        (["--preset", "laptop"], (7,)),
        (["--preset", "none"], (6,)),
        (["--config", str(config)], (8,)),
    ):
        found = training_options([*words, *SMALL], kind.program, "", kind, check_method)
        rate = kind.large["learning_rate"] if "paper" in words else kind.learning_rate
        assert (found.rounds, found.learning_rate) == (rounds, rate)


def test_nobody_is_said_to_train_on_tasks_where_files_teach(tmp_path):
    """129 held-out tasks were "also trained on" by a file of one conversation."""
    file = tmp_path / "data.json"
    file.write_text(json.dumps([conversation(0)]))
    lists = ("--tasks", "short_test", "--eval-tasks", "short_test", *SMALL)
    for words, is_said in (((), True), (("--data", str(file)), False)):
        asked = [*words, *lists]
        found = training_options(asked, "sft.py", "", SftConfig, check_method)
        lines = remarks(found)
        assert any("also trained on" in line for line in lines) == is_said


def test_epochs_that_are_given_win_over_another_runs_steps(tmp_path):
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"method": "sft", "config": {"steps": 6, "epochs": 2}}))
    words = ["--config", str(config), *SMALL]
    other = tmp_path / "other.json"
    other.write_text(json.dumps([conversation(0)]))  # six steps were counted of other data
    for more, steps, epochs in (
        ([], 6, 2),
        (["--epochs", "9"], 0, 9),
        (["--steps", "7"], 7, 2),
        (["--data", str(other)], 0, 2),
        (["--data", str(other), "--steps", "7"], 7, 2),
        (["--mini-batch-size", "4"], 0, 2),
        (["--num-demonstrations", "512"], 0, 2),
        (["--hold-out", "0.5"], 0, 2),
        (["--env", "textcraft", "babyai"], 0, 2),  # twice as many demonstrations
    ):
        found = training_options([*words, *more], "sft.py", "", SftConfig, check_method)
        assert (found.steps, found.epochs) == (steps, epochs)


def test_a_copy_in_the_folder_of_iterations_is_left_alone(tmp_path):
    """The run itself asks for one, where a file is gone."""
    kept = Kept(tmp_path, writes=True)
    for number in (1, 2):
        kept.of(number, lambda: ([{"a": 1}], {}))
    (tmp_path / "iteration_002.json.bak").write_text("{}")
    (tmp_path / "iteration_old.json").write_text("{}")
    kept.forget_after(1)
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [
        *("iteration_001.json", "iteration_001.jsonl", "iteration_002.json.bak"),
        "iteration_old.json",
    ]


def test_text_with_other_ends_of_lines_is_kept_whole(tmp_path):
    kept, lines = Kept(tmp_path, writes=True), [{"a": "b\u2028c\x85d\r\ne\u2029"}, {"a": 1}]
    kept.of(1, lambda: (lines, {}))
    assert kept.of(1, lambda: pytest.fail("it is there"))[0] == lines


def test_the_policy_before_is_freed_when_an_iteration_begins_again(tmp_path, url, monkeypatch):
    seen, forget = [], methodworker.MethodWorker.forget_policy

    def watched(worker):
        seen.append(weakref.ref(worker.policy.model))
        forget(worker)
        assert seen[-1]() is None, "something still holds it"

    monkeypatch.setattr(methodworker.MethodWorker, "forget_policy", watched)
    values = settings("agentevol", tmp_path, url, iterations=4)
    assert run("agentevol", values) == 0
    assert len(seen) == 3  # the first iteration begins with the start as it is


def test_an_imitators_entropy_may_fall_to_nothing(tmp_path, url):
    """The sentinels' floor is for policies that explore."""
    for kind in (SftConfig, EvolConfig):
        assert "policy/entropy" in kind.unwatched
    data = tmp_path / "one.json"
    data.write_text(json.dumps([conversation(0)] * 2))
    changes = {"data": (str(data),), "steps": 60, "hold_out": 0.0, "learning_rate": 1e-2}
    values = settings("sft", tmp_path, url, save_every=100, **changes)
    assert run("sft", values) == 0
    assert read_metrics(values["run_dir"])[-1]["policy/entropy"] < 0.07  # 1 % of the beginning's


def test_a_run_is_gone_on_with_by_its_own_command_though_files_have_moved(
    tmp_path, url, monkeypatch
):
    """Relative paths are the same files; dpo.py has in the run what its pairs' files gave."""
    monkeypatch.chdir(tmp_path)
    both = [
        json.dumps(conversation(n, text, **{"return": r}))
        for n in range(3)
        for text, r in (("abc", 1.0), ("xyz", 0.0))
    ]
    Path("tried.jsonl").write_text("\n".join(both))
    values = settings("dpo", tmp_path, url, data=("tried.jsonl",), steps=2)
    assert run("dpo", values) == 0
    assert run("dpo", values | {"resume": True, "steps": 3}) == 0
    Path("tried.jsonl").unlink()
    assert run("dpo", {"resume": True, "run_dir": values["run_dir"], "steps": 4}) == 0
    assert len(read_metrics(values["run_dir"])) == 4


def test_what_has_a_return_counts_by_it_among_the_demonstrations(tmp_path, url):
    data = tmp_path / "data.jsonl"
    records = [conversation(0), conversation(1, "ab", **{"return": 0.5})]
    records += [conversation(2, "cd", **{"return": 0.1})]
    data.write_text("\n".join(map(json.dumps, records)))
    config = EvolConfig(data=(str(data),), min_return=0.2)
    found = agentevol.demonstrated(config)
    assert [(r["item_id"], r["weight"]) for r in found] == [("letters_0", 1.0), ("letters_1", 0.5)]
    with pytest.raises(Misuse, match="nothing in --data earned --min-return 0.9"):
        data.write_text(json.dumps(records[1]))
        agentevol.demonstrated(replace(config, min_return=0.9))


def test_no_pair_in_what_the_policy_played_ends_the_run_with_the_reason(tmp_path, url, capsys):
    values = settings("dpo", tmp_path, url, min_gap=1.0)
    assert run("dpo", values) == 1
    error = capsys.readouterr().err
    assert "iteration 1: no pair left (" in error and " gap" in error
    assert "begin with a model that solves some of its tasks" in error


def test_options_are_checked_from_python_too():
    with pytest.raises(Misuse, match="--beta -1 must be above 0"):
        check_method(DpoConfig(beta=-1.0))
    check_method(SftConfig())
    check_method(EvolConfig())


def test_probes_end_where_the_first_action_begins():
    batch = pair_batch()
    for ids, row in zip(openings_of(batch, 2), (0, 1), strict=True):
        assert ids == batch.input_ids[row, :4].tolist()


def test_log_probs_of_the_reference_are_those_that_scoring_gives(monkeypatch):
    batch = pair_batch()

    class Worker:
        device = "cpu"
        config = DpoConfig(mini_batch_size=6)  # eight rows: a part of six, and one of two
        stop = SimpleNamespace(agreed=lambda: False)
        chat = pad_id = None

        def rest(self):
            pass

        def portions(self, rows):
            return replace(OBJECTIVE, mini_batch_size=rows)

    with fresh_process_state():
        Worker.policy = learner()
        monkeypatch.setattr(
            dpo,
            "encode_pairs",
            lambda _, pairs, __: batch.rows([r for n in pairs for r in (2 * n, 2 * n + 1)]),
        )
        sums = dpo.reference_of(Worker(), range(4))
        whole = score_policy(Worker.policy.model, batch, OBJECTIVE, "cpu")
    assert sums == pytest.approx((whole * batch.loss_mask).sum(1).tolist(), rel=1e-5)


def test_adapters_are_what_is_learned_with_lora(tmp_path, url):
    for method in PROGRAMS:
        values = settings(method, tmp_path / method, url, lora_rank=2, iterations=1, steps=2)
        values.pop("iterations") if method == "sft" else None
        assert run(method, values) == 0
        folder = tmp_path / method / "run/checkpoints/step_000002"
        assert (folder / "adapter/adapter_model.safetensors").exists()
