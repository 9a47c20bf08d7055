"""What a resumed run must notice: other weights to stand on, other options, a collapse that its
last evaluation shows; and a run that was refused late, which must leave nothing."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from toy_env import (
    flags,
    options,
    read_metrics,
    serve,
    train_main,
    write_ids,
)

from advantages import grpo, whiten_each
from config import Config
from engines import EngineError
from reporting.metrics import summarize_trajectories
from reporting.sentinels import Alarm, Sentinels
from rollout import RolloutHandler
from run import checkpoint, session
from run.files import marks_of
from scale.default_models import resolve_model
from train import select
from trajectory import Turn

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


# --- Other options, and what is refused late -----------------------------------------------------


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
    used, _, counts = select([*equal, *other], Config())
    assert used == other and counts["data/signal_share"] == 6 / 12
    assert summarize_trajectories([*equal, *other])["train/groups_zero_variance"] == 1
    rewards = torch.tensor([[0.1, 0.2], [0.3, 0.0]])
    advantages, _ = grpo(rewards, torch.ones(2, 2), torch.zeros(2, dtype=torch.int64))
    assert not advantages.any(), "as the estimator has it"


def test_whitening_within_a_world_sees_the_groups_that_say_nothing():
    """Without them their world's advantages were divided by a larger deviation, and then scaled
    down once more by the share of signal over all worlds."""
    trajectories = [played(0, [1.0]), played(0, [0.0]), *(played(1, [1.0]) for _ in range(4))]
    used, _, counts = select(trajectories, Config(normalize_per_env=True))
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
