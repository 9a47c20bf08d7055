"""Checkpoints: complete or absent, refused when they cannot be right, loadable by anyone."""

import errno
import io
import json
import os
import pickle
import shutil
import subprocess

import pytest
import torch

from config import Config
from models import load_causal_lm, load_policy, load_tokenizer, save_policy
from run import checkpoint, files, rundir
from run.checkpoint import CheckpointError
from scale.default_models import resolve_model

STATE = {"algorithm": "grpo", "model": "tiny", "best": 0.25, "kl_controller": {}}
SAME = {"algorithm": "grpo", "model": "tiny"}


@pytest.fixture(scope="module")
def model():
    path = resolve_model("tiny")
    return load_policy(path), load_tokenizer(path)


def make_parts(value=1.0):
    """Two small networks and their optimizers, one step taken, all weights `value` before it."""
    parts = {}
    for name in ("policy", "critic"):
        net = torch.nn.Sequential(torch.nn.Linear(40, 30), torch.nn.Linear(30, 1))
        for p in net.parameters():
            torch.nn.init.constant_(p, value)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
        net(torch.ones(2, 40)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        parts[name] = (net, optimizer)
    return parts


@pytest.mark.parametrize("saved_first", [False, True])
def test_a_save_before_the_first_update_does_not_change_it(tmp_path, model, saved_first):
    """Ctrl-C in the first step, or no signal before the first --save-every."""
    (net, _) = make_parts()["policy"]
    start = [p.detach().clone() for p in net.parameters()]
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    if saved_first:
        save(tmp_path, 0, model, parts={"policy": (net, optimizer)})
    net(torch.ones(2, 40)).sum().backward()
    optimizer.step()
    moves = [float((p - q).abs().max()) for p, q in zip(net.parameters(), start, strict=True)]
    assert moves == pytest.approx([0.1] * 4, rel=0.02)  # Adam's first step is the rate itself


def numbers(parts):
    """All weights and moments as one vector."""
    found = []
    for net, optimizer in parts.values():
        found += [p.detach().flatten() for p in net.parameters()]
        found += [
            torch.as_tensor(x, dtype=torch.float32).flatten()
            for state in optimizer.state_dict()["state"].values()
            for x in state.values()
        ]
    return torch.cat(found)


def save(run_dir, step, model, value=1.0, parts=None):
    policy, tokenizer = model
    parts = parts or make_parts(value)
    return checkpoint.save(
        run_dir, step, lambda folder: save_policy(policy, tokenizer, folder), parts, STATE
    )


def load(run_dir, step, expected=SAME):
    """(state, parts) of a checkpoint; the parts held other numbers before."""
    parts = make_parts(value=-3.0)
    state = checkpoint.read_state(run_dir, step, expected)
    checkpoint.load(run_dir, step, parts)
    return state, parts


def steps_and_litter(run_dir):
    """What a run's checkpoints folder holds: (complete steps, everything else)."""
    steps = checkpoint.steps_saved(run_dir)
    names = {checkpoint.folder_of(run_dir, step).name for step in steps}
    others = [p.name for p in (run_dir / "checkpoints").iterdir() if p.name not in names]
    return steps, others


def test_what_was_saved_is_what_is_loaded(tmp_path, model):
    parts = make_parts(0.5)
    save(tmp_path, 7, model, parts=parts)
    state, loaded = load(tmp_path, 7)
    assert state["step"] == 7
    assert state | STATE == state
    assert torch.equal(numbers(loaded), numbers(parts))
    assert steps_and_litter(tmp_path) == ([7], [])


def test_the_next_step_after_loading_is_the_next_step_of_the_saved(tmp_path, model):
    parts = make_parts(0.5)
    save(tmp_path, 7, model, parts=parts)
    _, loaded = load(tmp_path, 7)
    for each in (parts, loaded):
        for net, optimizer in each.values():
            net(torch.full((2, 40), 0.3)).square().sum().backward()
            optimizer.step()
    assert torch.equal(numbers(loaded), numbers(parts))


def test_frozen_weights_are_neither_saved_nor_touched(tmp_path, model):
    """With LoRA the base stays as it is and the checkpoint is small."""

    def half_frozen(value):
        net = make_parts(value)["policy"][0]
        net[0].requires_grad_(False)
        return {"policy": (net, torch.optim.AdamW(net[1].parameters(), lr=0.1))}

    parts = half_frozen(0.5)
    saved = save(tmp_path, 1, model, parts=parts) / "trainer_state/policy/__0_0.distcp"
    whole = save(tmp_path, 2, model) / "trainer_state/policy/__0_0.distcp"
    assert saved.stat().st_size < whole.stat().st_size - 3 * 4 * 40 * 30
    loaded = half_frozen(-3.0)
    frozen = loaded["policy"][0][0].weight
    before = frozen.clone()
    checkpoint.load(tmp_path, 1, loaded)
    assert torch.equal(frozen, before)
    assert torch.equal(loaded["policy"][0][1].weight, parts["policy"][0][1].weight)


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


@pytest.mark.parametrize("target", ["torch.save", "models.save_policy", "run.files.flush"])
def test_a_full_disk_is_one_line_and_leaves_the_last_checkpoint(
    tmp_path, model, monkeypatch, target
):
    save(tmp_path, 1, model)
    with monkeypatch.context() as patch:
        patch.setattr(target, full_disk)
        if target == "models.save_policy":
            patch.setitem(globals(), "save_policy", full_disk)
        with pytest.raises(CheckpointError, match="step 2 could not be written.*No space") as error:
            save(tmp_path, 2, model)
    assert "\n" not in str(error.value)
    assert "Earlier checkpoints are intact" in str(error.value)
    assert steps_and_litter(tmp_path) == ([1], [])
    load(tmp_path, 1)


def test_a_full_disk_while_a_step_is_saved_again_keeps_its_first_version(
    tmp_path, model, monkeypatch
):
    first, second = make_parts(1.0), make_parts(2.0)
    save(tmp_path, 1, model, parts=first)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full_disk)
        with pytest.raises(CheckpointError):
            save(tmp_path, 1, model, parts=second)
    assert torch.equal(numbers(load(tmp_path, 1)[1]), numbers(first))
    save(tmp_path, 1, model, parts=second)
    assert torch.equal(numbers(load(tmp_path, 1)[1]), numbers(second))


def test_ctrl_c_in_the_middle_leaves_nothing_half_written(tmp_path, model, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("run.files.flush", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 1, model)
    assert steps_and_litter(tmp_path) == ([], [])


def test_what_a_killed_process_left_half_written_is_removed_by_the_next_save(tmp_path, model):
    left = tmp_path / "checkpoints/.new-abcd-step_000001/trainer_state"
    left.mkdir(parents=True)
    (left / "state.json").write_text("{}")
    assert checkpoint.steps_saved(tmp_path) == []
    save(tmp_path, 2, model)
    assert steps_and_litter(tmp_path) == ([2], [])


def test_a_disk_that_is_really_full_leaves_the_last_checkpoint(tmp_path, model):
    """A 60 MB disk holds a few checkpoints of `tiny` (7 MB each) and not one more."""
    disk = tmp_path / "disk"
    disk.mkdir()
    options = ["-t", "tmpfs", "-o", "size=60m", "tmpfs", str(disk)]
    mounted = shutil.which("mount") and subprocess.run(["mount", *options], capture_output=True)
    if not mounted or mounted.returncode:
        pytest.skip("no right to mount a small disk: the full disk is only simulated here")
    try:
        saved = []
        with pytest.raises(CheckpointError, match="could not be written") as error:
            for step in range(1, 30):
                save(disk, step, model)
                saved.append(step)
        assert "\n" not in str(error.value)
        assert saved
        assert steps_and_litter(disk) == (saved, [])
        load(disk, saved[-1])
    finally:
        subprocess.run(["umount", str(disk)], check=True)


# --- A checkpoint that cannot be right -----------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["policy/.metadata", "policy/__0_0.distcp", "critic/__0_0.distcp", "state.json"]
)
@pytest.mark.parametrize("keep", [0, 3, 100, 0.5])
def test_a_truncated_file_is_named_in_one_line(tmp_path, model, name, keep):
    folder = save(tmp_path, 3, model)
    path = folder / "trainer_state" / name
    size = int(keep * path.stat().st_size) if isinstance(keep, float) else keep
    os.truncate(path, size)
    with pytest.raises(CheckpointError, match="step_000003.*truncated") as error:
        load(tmp_path, 3)
    assert "\n" not in str(error.value)


def test_a_file_of_the_right_length_with_garbage_in_it_is_an_error_too(tmp_path, model):
    path = save(tmp_path, 3, model) / "trainer_state/policy/__0_0.distcp"
    path.write_bytes(b"x" * path.stat().st_size)
    with pytest.raises(CheckpointError, match=r"step_000003.*policy.*cannot be read") as error:
        load(tmp_path, 3)
    assert "\n" not in str(error.value)


def test_files_that_are_missing_are_an_error_and_not_a_crash(tmp_path, model):
    folder = save(tmp_path, 3, model)
    (folder / "trainer_state/policy/__0_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"step_000003.*__0_0.distcp is missing"):
        load(tmp_path, 3)
    with pytest.raises(CheckpointError, match="step_000009"):
        load(tmp_path, 9)


@pytest.mark.parametrize(("offset", "words"), [(1, "reads 2; update it"), (-1, "older version")])
def test_another_format_is_refused(tmp_path, model, offset, words):
    state = save(tmp_path, 1, model) / "trainer_state" / "state.json"
    document = json.loads(state.read_text())
    state.write_text(json.dumps(document | {"format": checkpoint.FORMAT + offset}))
    with pytest.raises(CheckpointError, match=words):
        load(tmp_path, 1)


def test_another_algorithm_or_model_is_refused(tmp_path, model):
    save(tmp_path, 1, model)
    with pytest.raises(CheckpointError, match="trained with --algorithm grpo, not ppo"):
        load(tmp_path, 1, SAME | {"algorithm": "ppo"})
    with pytest.raises(CheckpointError, match="trained with --model tiny, not Qwen/Qwen2.5-3B"):
        load(tmp_path, 1, SAME | {"model": "Qwen/Qwen2.5-3B"})


def test_weights_of_another_shape_are_refused_in_one_line(tmp_path, model):
    save(tmp_path, 1, model)
    parts = make_parts()
    net = torch.nn.Sequential(torch.nn.Linear(41, 30), torch.nn.Linear(30, 1))
    parts["policy"] = (net, torch.optim.AdamW(net.parameters()))
    with pytest.raises(CheckpointError, match="cannot be read") as error:
        checkpoint.load(tmp_path, 1, parts)
    assert "\n" not in str(error.value)


# --- A checkpoint that would run code ------------------------------------------------------------


class Trap:
    """Unpickled, it makes a file: what any code of anybody could do."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def refusal(tmp_path, step=3):
    """What is said of a checkpoint that is set; nothing of it has run."""
    with pytest.raises(CheckpointError, match="could run somebody's code") as error:
        load(tmp_path, step)
    assert not (tmp_path / "ran").exists() and "\n" not in str(error.value)
    assert not isinstance(error.value, checkpoint.Unreadable), "no reason to go on with another one"
    return str(error.value)


def test_an_index_that_would_run_code_is_refused_by_name(tmp_path, model):
    folder = save(tmp_path, 3, model) / "trainer_state"
    path = folder / "policy/.metadata"
    path.write_bytes(pickle.dumps(Trap(tmp_path / "ran")).ljust(path.stat().st_size))
    assert f"{path} names posix.mkdir" in refusal(tmp_path)
    pickle.loads(path.read_bytes())
    assert (tmp_path / "ran").exists()  # read without care it runs


def test_an_index_that_points_out_of_its_folder_is_refused(tmp_path, model):
    path = save(tmp_path, 3, model) / "trainer_state/policy/.metadata"
    index = pickle.loads(path.read_bytes())
    for info in index.storage_data.values():
        info.relative_path = "../critic/__0_0.distcp"
    path.write_bytes(pickle.dumps(index))
    state = path.parents[1] / "state.json"
    document = json.loads(state.read_text())
    document["files"]["policy/.metadata"] = path.stat().st_size
    state.write_text(json.dumps(document))
    assert f"{path} points to ../critic" in refusal(tmp_path)


def test_a_value_beside_the_tensors_that_would_run_code_is_refused(tmp_path, model):
    """A learning rate is a pickle of its own inside the file of tensors."""
    path = save(tmp_path, 3, model) / "trainer_state/policy/__0_0.distcp"
    index = pickle.loads((path.parent / ".metadata").read_bytes())
    (info,) = [v for k, v in index.storage_data.items() if k.fqn == "optimizer.param_groups.0.lr"]
    trap = io.BytesIO()
    torch.save(Trap(tmp_path / "ran"), trap)
    content = path.read_bytes()
    assert len(trap.getvalue()) <= info.length + 200
    grown = len(trap.getvalue()) - info.length
    for other in index.storage_data.values():
        other.offset += grown if other.offset > info.offset else 0
    after = content[info.offset + info.length :]
    path.write_bytes(content[: info.offset] + trap.getvalue() + after)
    info.length += grown
    (path.parent / ".metadata").write_bytes(pickle.dumps(index))
    state = path.parents[1] / "state.json"
    document = json.loads(state.read_text())
    for name in document["files"]:
        document["files"][name] = (state.parent / name).stat().st_size
    state.write_text(json.dumps(document))
    said = refusal(tmp_path)
    assert str(path.parent) in said and "optimizer.param_groups.0.lr is no plain value" in said


# --- The newest that can be read -----------------------------------------------------------------


def load_newest(run_dir, parts):
    return checkpoint.load_newest(run_dir, SAME, parts)


def test_the_newest_checkpoint_is_loaded(tmp_path, model):
    for step in (1, 12, 7):
        save(tmp_path, step, model, value=step)
    parts = make_parts(-3.0)
    step, state = load_newest(tmp_path, parts)
    assert step == state["step"] == 12
    assert torch.equal(numbers(parts), numbers(make_parts(12)))
    assert checkpoint.load_newest(tmp_path / "nowhere", SAME, parts) is None


def test_a_step_whose_second_saving_was_killed_between_two_names_is_loaded_as_it_was(
    tmp_path, model, monkeypatch
):
    first = make_parts(1.0)
    save(tmp_path, 1, model, parts=first)

    class Killed(BaseException):
        """Nothing is tidied up after it, as after `kill -9`."""

    def killed(new, folder):
        folder.rename(folder.with_name(files.BEFORE + folder.name))
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "finish_folder", killed)
        patch.setattr(checkpoint.shutil, "rmtree", lambda *_, **__: None)
        with pytest.raises(Killed):
            save(tmp_path, 1, model, value=2.0)
    assert checkpoint.steps_saved(tmp_path) == []
    (tmp_path / "config.json").write_text("{}")
    rundir.open_run(Config(run_dir=str(tmp_path), resume=True)).close()  # as --resume does first
    parts = make_parts(-3.0)
    step, _ = load_newest(tmp_path, parts)
    assert step == 1 and torch.equal(numbers(parts), numbers(first))
    assert steps_and_litter(tmp_path) == ([1], [])


BREAKS = {
    "no state": lambda folder: (folder / "trainer_state/state.json").unlink(),
    "an empty state": lambda folder: (folder / "trainer_state/state.json").write_text(""),
    "a state of nothing": lambda folder: (folder / "trainer_state/state.json").write_text("{}"),
    "a list of files that is none": lambda folder: (folder / "trainer_state/state.json").write_text(
        '{"format": 2, "files": 3}'
    ),
    "a file cut short": lambda folder: os.truncate(
        folder / "trainer_state/policy/__0_0.distcp", 100
    ),
    "a file of the critic lost": lambda folder: (
        folder / "trainer_state/critic/__0_0.distcp"
    ).unlink(),
    "garbage": lambda folder: (folder / "trainer_state/critic/__0_0.distcp").write_bytes(
        b"x" * (folder / "trainer_state/critic/__0_0.distcp").stat().st_size
    ),
}


@pytest.mark.parametrize("cause", BREAKS)
def test_a_broken_checkpoint_is_named_put_away_and_the_one_before_is_loaded(
    tmp_path, model, capsys, cause
):
    save(tmp_path, 1, model, value=1.0)
    broken = save(tmp_path, 2, model, value=2.0)
    checkpoint.mark_best(tmp_path, 2)
    BREAKS[cause](broken)
    parts = make_parts(-3.0)
    step, _ = load_newest(tmp_path, parts)
    assert step == 1
    assert torch.equal(numbers(parts), numbers(make_parts(1.0)))
    said = capsys.readouterr()
    (line,) = said.out.splitlines()
    assert said.err == ""
    assert str(broken) in line and "it is now unreadable_step_000002, and step 1 is" in line
    assert steps_and_litter(tmp_path) == ([1], ["unreadable_step_000002"])
    checkpoint.prune(tmp_path, keep_last=1)  # what cannot be read is none of those to keep
    assert checkpoint.steps_saved(tmp_path) == [1]


def test_without_any_checkpoint_that_can_be_read_the_newest_is_named_and_all_stay(tmp_path, model):
    for step in (1, 2):
        BREAKS["a file cut short"](save(tmp_path, step, model))
    with pytest.raises(CheckpointError, match=r"step_000002.*truncated.*start a new run") as error:
        load_newest(tmp_path, make_parts())
    assert "\n" not in str(error.value)
    assert steps_and_litter(tmp_path) == ([1, 2], [])


def test_a_checkpoint_of_another_run_or_with_code_in_it_is_not_passed_over(tmp_path, model):
    save(tmp_path, 1, model)
    folder = save(tmp_path, 2, model)
    with pytest.raises(CheckpointError, match="not ppo"):
        checkpoint.load_newest(tmp_path, SAME | {"algorithm": "ppo"}, make_parts())
    path = folder / "trainer_state/policy/.metadata"
    path.write_bytes(pickle.dumps(Trap(tmp_path / "ran")).ljust(path.stat().st_size))
    with pytest.raises(CheckpointError, match="somebody's code"):
        load_newest(tmp_path, make_parts())
    assert checkpoint.steps_saved(tmp_path) == [1, 2]


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
    (tmp_path / "checkpoints/.new-abcd-step_000012/trainer_state").mkdir(parents=True)
    assert checkpoint.steps_saved(tmp_path) == [2, 10]
    assert checkpoint.steps_saved(tmp_path / "nowhere") == []
