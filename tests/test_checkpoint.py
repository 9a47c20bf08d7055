"""run/checkpoint.py: complete or absent, refused if damaged or unsafe, and resumed exactly."""

import errno
import json
import math
import os
import pickle
import shutil
import subprocess

import pytest
import torch

from models import load_policy, load_tokenizer, save_policy
from run import checkpoint
from run.checkpoint import CheckpointError
from scale.default_models import resolve_model

STATE = {"algorithm": "grpo", "model": "tiny", "best": 0.25, "task_outcomes": {}}
EXPECTED = {"algorithm": "grpo", "model": "tiny"}


@pytest.fixture(scope="module")
def model():
    path = resolve_model("tiny")
    return load_policy(path), load_tokenizer(path)


def make_parts(value=1.0):
    """Two small networks whose weights begin at `value`, and their optimizers after one step."""
    parts = {name: new_network(value) for name in ("policy", "critic")}
    for net, optimizer in parts.values():
        net(torch.ones(2, 40)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return parts


def new_network(value):
    """A network with all weights `value`, and a new optimizer."""
    net = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 1))
    for p in net.parameters():
        torch.nn.init.constant_(p, value)
    return net, torch.optim.AdamW(net.parameters(), lr=0.1)


def numbers(parts):
    """All weights and moments as one vector."""
    tensors = []
    for net, optimizer in parts.values():
        tensors += [p.detach().flatten() for p in net.parameters()]
        tensors += [
            torch.as_tensor(x, dtype=torch.float32).flatten()
            for state in optimizer.state_dict()["state"].values()
            for x in state.values()
        ]
    return torch.cat(tensors)


def save(run_dir, step, model, value=1.0, parts=None):
    policy, tokenizer = model
    return checkpoint.save(
        run_dir,
        step,
        lambda folder: save_policy(policy, tokenizer, folder),
        parts or make_parts(value),
        STATE,
    )


def load_newest(run_dir, expected=EXPECTED):
    """(step, state, parts) of the newest checkpoint, loaded into parts with other numbers."""
    parts = make_parts(value=-3.0)
    step, state = checkpoint.load_newest(run_dir, expected, parts)
    return step, state, parts


def steps_and_other_files(run_dir):
    """The contents of a run's checkpoints folder: (complete steps, names of all other files)."""
    steps = checkpoint.steps_saved(run_dir)
    names = {checkpoint.folder_of(run_dir, step).name for step in steps}
    other_files = [p.name for p in (run_dir / "checkpoints").iterdir() if p.name not in names]
    return steps, other_files


def test_after_loading_the_next_step_is_the_same_as_without_saving(tmp_path, model):
    parts = make_parts(0.5)
    save(tmp_path, 7, model, parts=parts)
    step, state, loaded = load_newest(tmp_path)
    assert step == state["step"] == 7 and state | STATE == state
    assert torch.equal(numbers(loaded), numbers(parts))
    for net, optimizer in (*parts.values(), *loaded.values()):
        net(torch.full((2, 40), 0.3)).square().sum().backward()
        optimizer.step()
    assert torch.equal(numbers(loaded), numbers(parts))
    assert checkpoint.load_newest(tmp_path / "nowhere", EXPECTED, parts) is None


def test_a_checkpoint_from_before_the_first_update_leads_to_the_same_update(tmp_path, model):
    """This happens after Ctrl-C in the first step, or if no early step had any signal."""
    saved, loaded = new_network(1.0), new_network(-3.0)
    save(tmp_path, 0, model, parts={"policy": saved})
    checkpoint.load(tmp_path, 0, {"policy": loaded})
    for net, optimizer in (saved, loaded):
        net(torch.ones(2, 40)).sum().backward()
        optimizer.step()
        moves = [float((p.detach() - 1.0).abs().max()) for p in net.parameters()]
        assert moves == pytest.approx([0.1] * 4, rel=0.02)  # Adam's first step moves by lr


# --- A full disk, broken weights -----------------------------------------------------------------


def full_disk(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("target", ["torch.save", "export", "run.files.flush"])
def test_a_full_disk_gives_a_one_line_error_and_leaves_the_last_checkpoint(
    tmp_path, model, monkeypatch, target
):
    first = make_parts(1.0)
    save(tmp_path, 1, model, parts=first)
    with monkeypatch.context() as patch:
        if target == "export":
            patch.setitem(globals(), "save_policy", full_disk)
        else:
            patch.setattr(target, full_disk)
        message = "step 2 could not be written.*No space.*Earlier checkpoints are intact"
        with pytest.raises(CheckpointError, match=message) as error:
            save(tmp_path, 2, model, value=2.0)
    assert "\n" not in str(error.value)
    assert steps_and_other_files(tmp_path) == ([1], [])
    assert torch.equal(numbers(load_newest(tmp_path)[2]), numbers(first))


@pytest.mark.parametrize("where", ["weights", "moments"])
def test_numbers_that_are_not_finite_do_not_replace_the_last_checkpoint(tmp_path, model, where):
    """No run could continue from them, and the last good checkpoints would be deleted."""
    save(tmp_path, 1, model)
    parts = make_parts()
    bias = parts["critic"][0][1].bias
    (bias.data if where == "weights" else parts["critic"][1].state[bias]["exp_avg"])[:] = math.nan
    with pytest.raises(CheckpointError, match="step 2 is not saved.* weights of the critic"):
        save(tmp_path, 2, model, parts=parts)
    assert steps_and_other_files(tmp_path) == ([1], [])


# --- Damaged checkpoints, and those of another kind of run ---------------------------------------


def state_file(folder, name):
    return folder / "trainer_state" / name


@pytest.mark.parametrize(
    ("name", "end"), [("state.json", 100), ("policy/.metadata", 50), ("critic/__0_0.distcp", -1)]
)
def test_a_broken_checkpoint_is_named_in_one_line_and_not_skipped(tmp_path, model, name, end):
    """It has no checksums, like one of an older version."""
    save(tmp_path, 1, model, value=1.0)
    broken = save(tmp_path, 2, model, value=2.0)
    file = state_file(broken, name)
    file.write_bytes(file.read_bytes()[:end])
    (broken / checkpoint.CHECKSUMS).unlink()
    with pytest.raises(CheckpointError, match=f"move {broken} away") as error:
        load_newest(tmp_path)
    assert "\n" not in str(error.value)
    shutil.rmtree(broken)
    step, _, parts = load_newest(tmp_path)
    assert step == 1 and torch.equal(numbers(parts), numbers(make_parts(1.0)))


def test_one_changed_byte_in_any_file_is_noticed(tmp_path, model):
    folder = save(tmp_path, 1, model)
    subprocess.run(["sha256sum", "--quiet", "-c", checkpoint.CHECKSUMS], cwd=folder, check=True)
    for file in [path for path in folder.rglob("*") if path.is_file()]:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        original = file.rename(tmp_path / "original")
        file.write_bytes(content)
        name = "" if file.name == "SHA256SUMS" else str(file.relative_to(folder))
        with pytest.raises(CheckpointError, match=f"{folder} cannot be used: {name}"):
            load_newest(tmp_path)
        original.replace(file)
    assert load_newest(tmp_path)[0] == 1


@pytest.mark.parametrize(
    ("changes", "expected", "message"),
    [
        ({"format": checkpoint.FORMAT + 1}, {}, "has format"),
        ({}, {"algorithm": "ppo"}, "trained with --algorithm grpo, not ppo"),
    ],
)
def test_a_checkpoint_of_another_kind_of_run_is_refused_and_not_skipped(
    tmp_path, model, changes, expected, message
):
    save(tmp_path, 1, model)
    state = save(tmp_path, 2, model) / checkpoint.STATE
    state.write_text(json.dumps(json.loads(state.read_text()) | changes))
    (state.parent / "SHA256SUMS").unlink()
    with pytest.raises(CheckpointError, match=message):
        load_newest(tmp_path, EXPECTED | expected)
    assert steps_and_other_files(tmp_path) == ([1, 2], [])


# --- A checkpoint that would run code ------------------------------------------------------------


class Trap:
    """Unpickling it creates a folder, as a stand-in for malicious code."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_code_in_a_checkpoint_is_not_run(tmp_path, model):
    """Neither code in the index nor code in a value that is not a tensor."""
    trap, saved_parts, parts = Trap(tmp_path / "ran"), make_parts(), make_parts()
    saved_parts["policy"][1].param_groups[0]["extra"] = trap
    parts["policy"][1].param_groups[0]["extra"] = 0.0
    folder = save(tmp_path, 3, model, parts=saved_parts)
    message = "trainer_state/policy.*our checkpoints"
    with pytest.raises(CheckpointError, match=message):
        checkpoint.load(tmp_path, 3, parts)
    index = state_file(folder, "policy/.metadata")
    index.write_bytes(pickle.dumps(trap).ljust(index.stat().st_size))
    with pytest.raises(CheckpointError, match=message) as error:
        checkpoint.load(tmp_path, 3, parts)
    assert not (tmp_path / "ran").exists() and "\n" not in str(error.value)


# --- Pruning -------------------------------------------------------------------------------------


def test_prune_keeps_the_newest_and_the_best_and_what_a_link_points_to(tmp_path):
    """A checkpoint was moved to another disk; `best` became a folder when the run was copied."""
    assert checkpoint.steps_saved(tmp_path) == []
    for step in range(1, 6):
        checkpoint.folder_of(tmp_path, step).mkdir(parents=True)
    moved = checkpoint.folder_of(tmp_path, 3).rename(tmp_path / "moved")
    checkpoint.folder_of(tmp_path, 3).symlink_to(moved)
    (tmp_path / "checkpoints/best/trainer_state").mkdir(parents=True)
    checkpoint.mark_best(tmp_path, 2)
    checkpoint.prune(tmp_path, keep_last=2)
    assert moved.exists()
    assert steps_and_other_files(tmp_path) == ([2, 4, 5], ["best"])
    assert (tmp_path / "checkpoints/best").resolve().name == "step_000002"
