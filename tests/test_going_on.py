"""What a resumed run must notice: other weights to stand on, other options, a collapse that its
last evaluation shows; and a run that was refused late, which must leave nothing."""

import json
import os
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from toy_env import (
    flags,
    fresh_process_state,
    options,
    read_metrics,
    registered,
    serve,
    train_main,
    write_ids,
)

import train
from advantages import grpo, whiten_each
from config import Config, Misuse, as_kept, saved_config
from engines import EngineError
from envs import Task
from reporting.logs import read_log
from reporting.metrics import summarize_trajectories
from reporting.sentinels import Alarm, Sentinels
from rollout import RolloutHandler, draw, epochs
from run import checkpoint, session
from run.files import marks_of
from scale.default_models import resolve_model
from train import usable_trajectories
from trajectory import Turn, are_equal

MOVING = dict(algorithm="reinforce_plus_plus", entropy_coef=0.01)  # whatever the returns are


def resume(run_dir, *words):
    return train_main(["--resume", "--run-dir", str(run_dir), *words])


# --- The weights that it began with --------------------------------------------------------------


def a_start(folder):
    """A model's folder of its own, that may change."""
    tiny = Path(resolve_model("tiny"))
    folder.mkdir()
    for file in tiny.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


def disturb(folder):
    file = folder / "model.safetensors"
    weights = {name: tensor + 0.01 for name, tensor in load_file(file).items()}
    save_file(weights, file, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("changes", "needs_it"),
    [({"lora_rank": 2}, True), ({"kl_loss_coef": 0.1}, True), ({}, False)],
    ids=["adapters", "a reference", "weights of its own"],
)
def test_a_run_that_needs_the_weights_it_began_with_refuses_others(
    tmp_path, capsys, changes, needs_it
):
    """Adapters went on over another base, without a word."""
    start = a_start(tmp_path / "start")
    with serve() as url:
        told = options(tmp_path, url, model=str(start), steps=1, **MOVING, **changes)
        assert train_main(flags(**told)) == 0
        before = read_metrics(told["run_dir"])
        disturb(start)
        code = resume(told["run_dir"], "--steps", "2")
    said = capsys.readouterr().err
    assert code == (1 if needs_it else 0), said
    assert ("holds other weights than when this run began" in said) == needs_it
    if needs_it:
        assert read_metrics(told["run_dir"]) == before


def test_a_run_that_fetched_its_model_knows_it_again_when_the_hubs_cache_has_it(
    tmp_path, monkeypatch
):
    """At the first start the model is an id, at the next a folder: the marks were those of nothing,
    and every run of the paper preset whose first start downloaded its model refused to go on."""
    weights = a_start(tmp_path / "snapshot")
    monkeypatch.setattr(session, "resolve_model", {"org/model": str(weights)}.get)
    own = SimpleNamespace(start="org/model", kl_controller=None, eval_tasks=[])
    run = SimpleNamespace(path=tmp_path)
    begun = session.Session(Config(), run, own, stop=None)
    assert begun.start_marks == marks_of(weights) != ""


def test_a_link_is_kept_as_what_it_leads_to(tmp_path):
    """`checkpoints/best` of a run that goes on is another folder tomorrow."""
    for step in (1, 2):
        (tmp_path / f"step_{step}").mkdir()
    best = tmp_path / "best"
    best.symlink_to("step_1")
    config = Config(model=str(best), warm_start=str(best))
    kept = as_kept(config)
    assert kept.model == kept.warm_start == str(tmp_path / "step_1")


def test_marks_tell_a_large_file_by_a_look_at_many_places(tmp_path):
    file = tmp_path / "model.safetensors"
    content = bytearray(os.urandom(1_000_000))
    file.write_bytes(content)
    before = marks_of(tmp_path)
    assert marks_of(tmp_path) == before
    content[:] = bytes(255 - byte for byte in content)
    file.write_bytes(content)
    assert marks_of(tmp_path) != before
    assert marks_of(tmp_path / "nowhere") == ""


# --- Its last evaluation -------------------------------------------------------------------------


def test_a_collapse_that_an_evaluation_shows_on_resume_stops_the_run(tmp_path, capsys, monkeypatch):
    """The evaluation had failed; made up for on resume, what it showed was said, no more."""
    evaluate, cut = session.Session.evaluate, []

    def once_failing(self, step):
        if step == 2 and not cut:
            cut.append(step)
            raise EngineError("the sampler is gone")
        return evaluate(self, step)

    def check(self, step, metrics):
        is_bad = step == 2 and "eval/avg" in metrics
        return [Alarm("held_out", 0.0, 0.1, "stop", f"step {step}: all is lost")] if is_bad else []

    monkeypatch.setattr(session.Session, "evaluate", once_failing)
    monkeypatch.setattr(Sentinels, "check", check)
    pictures = []
    monkeypatch.setattr("reporting.metrics.plot", lambda run_dir: pictures.append(run_dir))
    held_out = write_ids(tmp_path / "held_out.json", num_tasks=2)
    every = {"eval_every": 2, "eval_samples": 1, "eval_tasks": held_out, "steps": 4}
    with serve() as url:
        told = options(tmp_path, url, **every)
        assert train_main(flags(**told)) == 1
        drawn = len(pictures)
        capsys.readouterr()
        assert resume(told["run_dir"]) == 1
        captured = capsys.readouterr()
        assert "stop: step 2: all is lost" in captured.out
        assert "stopped after step 2, the run is collapsing" in captured.err
        rows = read_metrics(told["run_dir"])
        assert [row["step"] for row in rows] == [1, 2]
        assert rows[-1]["eval/avg"] is not None and len(pictures) == drawn + 1
        assert resume(told["run_dir"], "--on-collapse", "warn") == 0
    assert len(read_metrics(told["run_dir"])) == 4


def test_the_best_is_marked_again_where_a_later_one_cannot_be_read(tmp_path):
    """Its link led to what is put away; then nothing protected the older best from pruning."""
    held_out = write_ids(tmp_path / "held_out.json", num_tasks=2)
    every = {"eval_every": 1, "eval_samples": 1, "eval_tasks": held_out, "save_every": 1}
    with serve() as url:
        told = options(tmp_path, url, steps=3, keep_last=9, **every, **MOVING)
        assert train_main(flags(**told)) == 0
        folder = Path(told["run_dir"]) / "checkpoints"
        for step, best in ((1, 1), (2, 1), (3, 3)):
            state = folder / f"step_{step:06d}" / checkpoint.STATE
            content = json.loads(state.read_text()) | {"best": 1.0, "best_step": best}
            state.write_text(json.dumps(content))
        checkpoint.mark_best(folder.parent, 3)
        (folder / "step_000003/trainer_state/policy/.metadata").write_bytes(b"")
        assert resume(told["run_dir"]) == 0
    assert (folder / "unreadable_step_000003").exists() and (folder / "step_000003").exists()
    assert os.readlink(folder / "best") == "step_000001"


def test_evaluations_say_which_weights_played(tmp_path):
    held_out = write_ids(tmp_path / "held_out.json", num_tasks=2)
    every = {"eval_every": 1, "eval_samples": 1, "eval_tasks": held_out, "steps": 2}
    with serve() as url:
        told = options(tmp_path, url, **every, **MOVING)
        assert train_main(flags(**told)) == 0
    folder = Path(told["run_dir"]) / "trajectories"
    versions = [
        {line["weight_version"] for line in read_log(folder / f"eval_{step:06d}.jsonl")}
        for step in (0, 1, 2)
    ]
    assert versions == [{0}, {1}, {2}]


# --- Other options, and what is refused late -----------------------------------------------------


def test_from_python_too_a_resumed_run_keeps_its_options(tmp_path):
    with serve() as url, registered(), fresh_process_state():
        told = options(tmp_path, url, steps=1, **MOVING)
        train.train(Config(**told))
        before = (tmp_path / "run/config.json").read_text()
        kept = saved_config(str(tmp_path / "run"))
        with pytest.raises(Misuse, match="leave out --seed"):
            train.train(replace(kept, seed=5))
        assert (tmp_path / "run/config.json").read_text() == before
        train.train(replace(kept, steps=2))
    assert len(read_metrics(tmp_path / "run")) == 2


def test_a_tracker_that_cannot_be_reached_leaves_no_run_behind(tmp_path, capsys, monkeypatch):
    """The same command was refused then: the directory held a run."""

    def unreachable(*_):
        raise session.TrackerError("wandb is not to be reached")

    with serve() as url:
        told = options(tmp_path, url, steps=1)
        with monkeypatch.context() as patch:
            patch.setattr(session, "Trackers", unreachable)
            assert train_main(flags(**told)) == 1
        assert "wandb is not to be reached" in capsys.readouterr().err
        assert not (tmp_path / "run").exists()
        assert train_main(flags(**told)) == 0


# --- Signal --------------------------------------------------------------------------------------


def played(group_id, rewards, num_tokens=2):
    """A trajectory of a turn for each reward."""
    t = RolloutHandler("t", 1, "fake", "fake_0", "easy", group_id, 0, 3)
    length = num_tokens * len(rewards)
    t.input_ids, t.loss_mask, t.rollout_log_probs = [0] * length, [1] * length, [0.0] * length
    for n, reward in enumerate(rewards):
        t.turns.append(Turn((n * num_tokens, (n + 1) * num_tokens), "go", reward=reward))
    t.stop("failure", False)
    return t


def test_equal_scores_that_were_paid_in_other_parts_are_no_signal():
    """SciWorld pays as it goes: 0.1 + 0.2 is not 0.3, but nobody did better than anybody."""
    equal = [played(0, [0.1, 0.2]), played(0, [0.3])]
    other = [played(1, [0.1, 0.2]), played(1, [0.31])]
    used, _, counts = usable_trajectories([*equal, *other], Config())
    assert used == other and counts["data/signal_share"] == 6 / 12
    assert summarize_trajectories([*equal, *other])["train/groups_zero_variance"] == 1
    rewards = torch.tensor([[0.1, 0.2], [0.3, 0.0]])
    advantages, _ = grpo(rewards, torch.ones(2, 2), torch.zeros(2, dtype=torch.int64))
    assert not advantages.any(), "as the estimator has it"


@pytest.mark.parametrize("least", [0.0, 0.01, 0.3, 1.0])
def test_what_counts_as_equal_is_what_the_estimator_has_no_advantage_for(least):
    limit = 1e-7 + 1e-6 * least
    for gap in (0.0, limit / 3, limit * 3):
        rewards = torch.tensor([[least], [least + gap]], dtype=torch.float64)
        advantages, _ = grpo(rewards, torch.ones(2, 1), torch.zeros(2, dtype=torch.int64))
        assert are_equal([least, least + gap]) == (not advantages.any())


def test_whitening_within_a_world_sees_the_groups_that_say_nothing():
    """Without them their world's advantages were divided by a larger deviation, and then scaled
    down once more by the share of signal over all worlds."""
    trajectories = [played(0, [1.0]), played(0, [0.0]), *(played(1, [1.0]) for _ in range(4))]
    used, _, counts = usable_trajectories(trajectories, Config(normalize_per_env=True))
    assert used == trajectories and counts["data/signal_share"] == 1.0
    rewards = torch.zeros(6, 2)
    rewards[[0, 2, 3, 4, 5], 1] = 1.0
    groups = torch.tensor([0, 0, 1, 1, 1, 1])
    advantages, _ = grpo(rewards, torch.ones(6, 2), groups)
    whole = whiten_each(advantages, torch.ones(6, 2), ["a"] * 6)
    part = whiten_each(advantages[:2], torch.ones(2, 2), ["a"] * 2)
    assert whole[0, 0] > 1.5 * part[0, 0]


@pytest.mark.parametrize("algorithm", ["ppo", "reinforce_plus_plus"])
def test_equal_groups_are_no_silence_to_what_compares_no_groups(algorithm):
    """With one sample a task every group is equal: a run whose returns rose was stopped."""
    config = Config(algorithm=algorithm, group_size=1)
    step = {"train/groups": 8, "train/groups_zero_variance": 8}
    stopped = {}
    for name, unwatched in (("all", frozenset()), ("its own", config.unwatched)):
        watch = Sentinels()
        for n in range(60):
            row = step | {"train/success_rate": 0.125 if n < 8 else 0.0}
            seen = {key: value for key, value in row.items() if key not in unwatched}
            stopped[name] = [a.name for a in watch.check(n, seen) if a.severity == "stop"]
            if stopped[name]:
                break
    assert stopped == {"all": ["no_signal"], "its own": []}
    assert not Config(algorithm="grpo").unwatched


def test_the_epoch_of_several_worlds_is_that_of_the_least():
    tasks = [Task(f"a{n}", n, "", "a") for n in range(9)]
    tasks += [Task(f"b{n}", n, "", "b") for n in range(5)]
    taken = Counter()
    for turn in range(1, 8):
        for request in draw(turn, tasks, 4, 1, 0, turn, {"a": 1, "b": 1}, (3, 1)):
            taken[request.task.env] += 1
        found = epochs(turn, [9, 5], 4, (3, 1))
        assert found == pytest.approx([taken["a"] / 9, taken["b"] / 5])
