"""Checkpoints: complete or absent, refused when they cannot be right, loadable by anyone."""

import errno
import json
import os
import shutil
import subprocess

import pytest
import torch

import checkpoint
from checkpoint import CheckpointError
from default_models import resolve_model
from models import load_causal_lm, load_policy, load_tokenizer

STATE = {"algorithm": "grpo", "model": "tiny", "best": 0.25, "kl_controller": {}}


@pytest.fixture(scope="module")
def model():
    path = resolve_model("tiny")
    return load_policy(path), load_tokenizer(path)


def parts_of(policy, value=1.0):
    return {
        "policy": {"model": policy.state_dict(), "optimizer": {"lr": value}},
        "critic": {"model": {"weight": torch.full((3,), value)}, "optimizer": {}},
    }


def save(run_dir, step, model, value=1.0):
    policy, tokenizer = model
    return checkpoint.save(run_dir, step, policy, tokenizer, parts_of(policy, value), STATE)


def steps_and_litter(run_dir):
    """What a run's checkpoints folder holds: (complete steps, everything else)."""
    steps = checkpoint.steps_saved(run_dir)
    names = {checkpoint.folder_of(run_dir, step).name for step in steps}
    others = [p.name for p in (run_dir / "checkpoints").iterdir() if p.name not in names]
    return steps, others


def test_what_was_saved_is_what_is_loaded(tmp_path, model):
    save(tmp_path, 7, model, value=0.5)
    state, parts = checkpoint.load(tmp_path, 7, "grpo")
    assert state["step"] == 7
    assert state | STATE == state
    assert set(parts) == {"policy", "critic"}
    assert parts["policy"]["optimizer"] == {"lr": 0.5}
    assert torch.equal(parts["critic"]["model"]["weight"], torch.full((3,), 0.5))
    saved = model[0].state_dict()
    assert all(torch.equal(parts["policy"]["model"][name], saved[name]) for name in saved)
    assert steps_and_litter(tmp_path) == ([7], [])


def test_the_root_of_a_checkpoint_is_a_hugging_face_model(tmp_path, model):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    policy, tokenizer = model
    folder = save(tmp_path, 1, model)
    lm = AutoModelForCausalLM.from_pretrained(folder)
    assert lm.dtype == torch.bfloat16
    for name, tensor in policy.lm.state_dict().items():
        assert torch.equal(lm.state_dict()[name], tensor.to(torch.bfloat16)), name
    other = AutoTokenizer.from_pretrained(folder)
    assert other.chat_template == tokenizer.chat_template
    assert other("get 2 oak log").input_ids == tokenizer("get 2 oak log").input_ids
    assert load_causal_lm(str(folder)).dtype == torch.float32


# --- A crash or a full disk in the middle --------------------------------------------------------


def full_disk(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("target", ["torch.save", "checkpoint.save_policy", "checkpoint._flush"])
def test_a_full_disk_is_one_line_and_leaves_the_last_checkpoint(
    tmp_path, model, monkeypatch, target
):
    save(tmp_path, 1, model)
    with monkeypatch.context() as patch:
        patch.setattr(target, full_disk)
        with pytest.raises(CheckpointError, match="step 2 could not be written.*No space") as error:
            save(tmp_path, 2, model)
    assert "\n" not in str(error.value)
    assert "Earlier checkpoints are intact" in str(error.value)
    assert steps_and_litter(tmp_path) == ([1], [])
    checkpoint.load(tmp_path, 1, "grpo")


def test_a_full_disk_while_a_step_is_saved_again_keeps_its_first_version(
    tmp_path, model, monkeypatch
):
    save(tmp_path, 1, model, value=1.0)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full_disk)
        with pytest.raises(CheckpointError):
            save(tmp_path, 1, model, value=2.0)
    assert checkpoint.load(tmp_path, 1, "grpo")[1]["policy"]["optimizer"] == {"lr": 1.0}
    save(tmp_path, 1, model, value=2.0)
    assert checkpoint.load(tmp_path, 1, "grpo")[1]["policy"]["optimizer"] == {"lr": 2.0}


def test_ctrl_c_in_the_middle_leaves_nothing_half_written(tmp_path, model, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "save", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 1, model)
    assert steps_and_litter(tmp_path) == ([], [])


def test_a_disk_that_is_really_full_leaves_the_last_checkpoint(tmp_path, model):
    """A 60 MB disk holds a few checkpoints of `tiny` (20 MB each) and not one more."""
    disk = tmp_path / "disk"
    disk.mkdir()
    options = ["-t", "tmpfs", "-o", "size=60m", "tmpfs", str(disk)]
    mounted = shutil.which("mount") and subprocess.run(["mount", *options], capture_output=True)
    if not mounted or mounted.returncode:
        pytest.skip("no right to mount a small disk: the full disk is only simulated here")
    try:
        saved = []
        with pytest.raises(CheckpointError, match="could not be written") as error:
            for step in range(1, 10):
                save(disk, step, model)
                saved.append(step)
        assert "\n" not in str(error.value)
        assert saved
        assert steps_and_litter(disk) == (saved, [])
        checkpoint.load(disk, saved[-1], "grpo")
    finally:
        subprocess.run(["umount", str(disk)], check=True)


# --- A checkpoint that cannot be right -----------------------------------------------------------


@pytest.mark.parametrize("name", ["policy.pt", "critic.pt", "state.json"])
@pytest.mark.parametrize("keep", [0, 3, 100, 0.5])
def test_a_truncated_file_is_named_in_one_line(tmp_path, model, name, keep):
    folder = save(tmp_path, 3, model)
    path = folder / "trainer_state" / name
    size = int(keep * path.stat().st_size) if isinstance(keep, float) else keep
    os.truncate(path, size)
    with pytest.raises(CheckpointError, match="step_000003.*truncated") as error:
        checkpoint.load(tmp_path, 3, "grpo")
    assert "\n" not in str(error.value)


def test_files_that_are_missing_are_an_error_and_not_a_crash(tmp_path, model):
    folder = save(tmp_path, 3, model)
    (folder / "trainer_state" / "policy.pt").unlink()
    with pytest.raises(CheckpointError, match="step_000003"):
        checkpoint.load(tmp_path, 3, "grpo")
    with pytest.raises(CheckpointError, match="step_000009"):
        checkpoint.load(tmp_path, 9, "grpo")


def test_a_newer_format_is_refused(tmp_path, model):
    state = save(tmp_path, 1, model) / "trainer_state" / "state.json"
    document = json.loads(state.read_text())
    state.write_text(json.dumps(document | {"format": checkpoint.FORMAT + 1}))
    with pytest.raises(CheckpointError, match="has format 2, this program reads up to 1"):
        checkpoint.load(tmp_path, 1, "grpo")


def test_another_algorithm_is_refused(tmp_path, model):
    save(tmp_path, 1, model)
    with pytest.raises(CheckpointError, match="trained with --algorithm grpo, not ppo"):
        checkpoint.load(tmp_path, 1, "ppo")


# --- Which ones are kept -------------------------------------------------------------------------


def fake(run_dir, *steps):
    for step in steps:
        folder = checkpoint.folder_of(run_dir, step) / "trainer_state"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text("{}")


def test_prune_keeps_the_newest_and_the_best(tmp_path):
    fake(tmp_path, 1, 2, 3, 4, 5)
    checkpoint.mark_best(tmp_path, 2)
    checkpoint.prune(tmp_path, keep_last=2)
    assert steps_and_litter(tmp_path) == ([2, 4, 5], ["best"])
    assert (tmp_path / "checkpoints/best").resolve().name == "step_000002"
    checkpoint.mark_best(tmp_path, 5)
    checkpoint.prune(tmp_path, keep_last=1)
    assert steps_and_litter(tmp_path) == ([5], ["best"])
    assert (tmp_path / "checkpoints/best").resolve().name == "step_000005"


def test_prune_without_a_best_keeps_the_newest(tmp_path):
    fake(tmp_path, 1, 2, 3)
    checkpoint.prune(tmp_path, keep_last=1)
    assert checkpoint.steps_saved(tmp_path) == [3]


def test_a_folder_without_its_state_is_no_checkpoint(tmp_path):
    fake(tmp_path, 2, 10)
    (tmp_path / "checkpoints/step_000011").mkdir()
    (tmp_path / "checkpoints/.step_000012-abc/trainer_state").mkdir(parents=True)
    assert checkpoint.steps_saved(tmp_path) == [2, 10]
    assert checkpoint.steps_saved(tmp_path / "nowhere") == []
