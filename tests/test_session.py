"""run/session.py: a run's state, and how it resumes after interruptions, failures and damage."""

import contextlib
import json
import os
import shutil
import signal
import sys
import time
import weakref
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load, load_file, save_file
from test_sentinels import HEALTHY
from toy_env import Letters, flags, options, read_metrics, serve, train_main, write_ids

from config import Config
from engines import TransformersEngine
from reporting import metrics
from reporting.logs import read_log
from reporting.sentinels import RULES
from run import checkpoint, session
from run.clock import clear_frames
from run.errors import SyncError
from run.rundir import Run
from run.session import StopRequests
from scale import sync
from scale.default_models import resolve_model
from train import RLWorker


@pytest.fixture
def open_session(tmp_path):
    """A function that makes sessions of one run, without models or environments."""
    run = Run(tmp_path, is_new=True)
    (tmp_path / "alarms.jsonl").touch()

    def make(**changes):
        worker = SimpleNamespace(start="tiny", stateful={}, eval_tasks=[])
        return session.Session(Config(**changes), run, worker, stop=None)

    yield make
    run.close()


# --- State of a session --------------------------------------------------------------------------

BROKEN = HEALTHY | {"policy/skipped_steps": 1, "policy/optimizer_steps": 3}
STOP_AFTER = RULES["non_finite"].stop_after


def test_only_a_strictly_better_score_becomes_the_best(open_session):
    run_session, best_steps = open_session(), []
    for step, score in {0: 0.0, 5: 0.0, 10: 0.4, 15: 0.4, 20: 0.3}.items():
        run_session.note_evaluation(step, score)
        best_steps.append(run_session.best_step)
    assert best_steps == [0, 0, 10, 10, 10] and run_session.evaluated_step == 20


def test_the_link_to_the_best_checkpoint_goes_with_it(open_session, tmp_path):
    """Otherwise the next checkpoint of that step would be taken for the best."""
    run_session, best = open_session(), tmp_path / "checkpoints/best"
    (tmp_path / "checkpoints/step_000020").mkdir(parents=True)
    best.symlink_to("step_000040")
    run_session.best_step = 0
    run_session.tidy_up()
    assert not best.is_symlink()


def test_a_failed_pass_holds_no_memory_while_the_run_is_saved():
    class Activations:
        pass

    def forward():
        activations = Activations()
        alive.append(weakref.ref(activations))
        raise RuntimeError("out of memory")

    alive = []
    try:
        forward()
    except RuntimeError as error:
        assert alive[0]() is not None
        clear_frames(error)
    assert alive[0]() is None


def test_a_collapse_names_the_step_the_cause_and_the_best_policy(open_session, capsys, tmp_path):
    run_session = open_session()
    assert run_session.watch(0, HEALTHY) is None and capsys.readouterr().out == ""
    run_session.note_evaluation(0, 0.5)
    run_session.note_evaluation(2, 0.6)
    *earlier, reason = [run_session.watch(step, BROKEN) for step in range(1, STOP_AFTER + 1)]
    assert not any(earlier) and reason.startswith(f"stopped after step {STOP_AFTER}")
    assert "checkpoints/best (step 2)" in reason and "non_finite" in reason and "\n" not in reason
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == ["warn", "stop"]
    alarms = read_log(tmp_path / "alarms.jsonl")
    assert [(row["step"], row["severity"]) for row in alarms][-1] == (STOP_AFTER, "stop")


@pytest.mark.parametrize(("on_collapse", "num_lines"), [("warn", 2), ("off", 0)])
def test_a_run_that_must_not_stop_continues_and_its_sentinels_have_the_same_state(
    open_session, capsys, on_collapse, num_lines
):
    continuing, stopping = open_session(on_collapse=on_collapse), open_session(on_collapse="stop")
    assert not any(continuing.watch(step, BROKEN) for step in range(1, STOP_AFTER + 1))
    assert len(capsys.readouterr().out.splitlines()) == num_lines
    assert any(stopping.watch(step, BROKEN) for step in range(1, STOP_AFTER + 1))
    assert continuing.state_dict() == stopping.state_dict()


# --- A run of three steps, and copies of it ------------------------------------------------------


@pytest.fixture(scope="module")
def url():
    with serve() as url:
        yield url


def start(tmp_path, url, **changes):
    """Start a run of three steps; returns its exit code. The entropy bonus changes its weights even
    if all returns are equal. Each step takes two optimizer steps."""
    settings = options(
        tmp_path,
        url,
        algorithm="reinforce_plus_plus",
        entropy_coef=0.01,
        kl_coef=0.1,
        mini_batch_size=2,
        deterministic=True,
        learning_rate=1e-3,
        learning_rate_decay_steps=2,
        max_sync_error=1e-4,
        steps=3,
        keep_last=9,
        eval_every=1,
        eval_samples=1,
        eval_tasks=write_ids(tmp_path / "held_out.json", num_tasks=2),
    )
    return train_main(flags(**settings | changes))


@pytest.fixture(scope="module")
def uninterrupted(url, tmp_path_factory):
    """The uninterrupted run, with a checkpoint of each step."""
    tmp_path = tmp_path_factory.mktemp("uninterrupted")
    assert start(tmp_path, url) == 0
    return tmp_path / "run"


@pytest.fixture
def run_copy(uninterrupted, tmp_path):
    """A copy of that run, which a test can damage."""
    return shutil.copytree(uninterrupted, tmp_path / "run", symlinks=True)


def resume(run_dir, *words):
    return train_main(["--resume", "--run-dir", str(run_dir), *words])


def log_of(*lines):
    """A function that rewrites a run's log with only these lines."""

    def damage(run_dir):
        path = run_dir / "metrics.jsonl"
        rows = path.read_text().splitlines(keepends=True)
        path.write_text("".join(rows[line] for line in lines))

    return damage


def of_another_version(run_dir):
    folder = checkpoint.folder_of(run_dir, 3)
    (path,) = folder.rglob("state.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"sentinels": {"counter": 1}}))
    (path.parent / "SHA256SUMS").unlink()


DAMAGES = {
    "a checkpoint of another version": (of_another_version, 1, "saved by another version"),
    "the log has a hole": (log_of(0, 2), 1, "metrics.jsonl lacks step 2"),
    "the log repeats a step": (log_of(0, 1, 1, 2), 1, "has a step twice"),
    "an empty config": (lambda run: (run / "config.json").write_text(""), 2, "config.json"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_run_is_refused_with_one_line_and_not_changed(run_copy, capsys, damage):
    do_damage, code, message = DAMAGES[damage]
    do_damage(run_copy)
    log = (run_copy / "metrics.jsonl").read_bytes()
    assert resume(run_copy) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line and (run_copy / "metrics.jsonl").read_bytes() == log
    assert checkpoint.steps_saved(run_copy) == [1, 2, 3]


def test_a_run_resumed_from_an_earlier_checkpoint_ends_the_same(uninterrupted, run_copy):
    shutil.rmtree(checkpoint.folder_of(run_copy, 3))
    assert resume(run_copy) == 0
    logs = [(run_dir / "metrics.jsonl").read_bytes() for run_dir in (run_copy, uninterrupted)]
    assert logs[0] == logs[1]
    assert checkpoint.steps_saved(run_copy) == [1, 2, 3]
    # The learning rate decays linearly and never reaches zero (trap 12).
    assert [row["policy/learning_rate"] for row in read_metrics(run_copy)] == [1e-3, 5e-4, 5e-4]


def test_a_resumed_run_deletes_what_lost_steps_wrote(run_copy):
    """Otherwise sft.py --data learns from the episodes of a policy that no longer exists."""
    for step in (2, 3):
        shutil.rmtree(checkpoint.folder_of(run_copy, step))
    for step in (1, 2):  # at another temperature
        path = run_copy / f"eval/temperature_0.5/step_00000{step}.json"
        path.parent.mkdir(exist_ok=True)
        path.touch()
    assert resume(run_copy, "--steps", "1") == 0
    paths = [p for folder in ("trajectories", "eval") for p in (run_copy / folder).rglob("*.json*")]
    names = [path.name for path in paths]
    expected = ["eval_000000.jsonl", "eval_000001.jsonl", "step_000000.json", "step_000001.json"]
    assert sorted(names) == [*expected, "step_000001.json", "step_000001.jsonl"]


def test_a_resumed_run_is_not_evaluated_with_wrong_weights_in_the_sampler(
    run_copy, capsys, monkeypatch
):
    """An evaluation before the next weight check could change `best`."""
    # The sampler keeps the initial weights.
    monkeypatch.setattr(sync, "send_weights", lambda *args: 0)
    assert resume(run_copy, "--steps", "4") == 1
    assert "the sampler's weights differ from the trainer's" in capsys.readouterr().err
    assert len(read_metrics(run_copy)) == 3


def test_a_run_whose_sampler_cannot_be_synced_stops_before_its_first_step(
    tmp_path, url, capsys, monkeypatch
):
    """vLLM on a CPU reloads the experts of a mixture wrongly; a resumed run would fail again."""
    model = shutil.copytree(resolve_model("tiny"), tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"num_experts": 4}))

    def load_noise(engine, weights):
        for p in engine.lm.parameters():
            torch.nn.init.normal_(p)

    monkeypatch.setattr(TransformersEngine, "load_weights", load_noise)
    assert train_main(flags(**options(tmp_path, url, model=str(model), lora_rank=4))) == 1
    output = capsys.readouterr()
    assert "--lora-rank does not train the experts" in output.out
    (line,) = output.err.splitlines()
    assert "before step 1" in line and "--engine transformers" in line and "resume" not in line
    assert not (tmp_path / "run").exists()


OOM = torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    ("owner", "method", "call", "error", "saved_step"),
    [
        (RLWorker, "roll_out", 2, KeyError("in an environment's code"), 1),
        (torch.optim.AdamW, "step", 3, OOM, 1),  # the first optimizer step of step 2
        (torch.optim.AdamW, "step", 4, OOM, 2),  # the second one
        (RLWorker, "sync", 3, SyncError("sampler and trainer differ"), 2),
        (metrics, "plot", 2, KeyError("in a figure"), 2),
    ],
)
def test_an_error_at_any_point_loses_no_step(
    url, uninterrupted, tmp_path, capsys, monkeypatch, owner, method, call, error, saved_step
):
    original, calls = getattr(owner, method), []

    def failing(*args):
        calls.append(1)
        if len(calls) == call:
            raise error
        return original(*args)

    is_bug, run_dir = isinstance(error, KeyError), tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(owner, method, failing)
        with pytest.raises(KeyError) if is_bug else contextlib.nullcontext():  # a traceback
            assert start(tmp_path, url, save_every=3) == 1
    captured = capsys.readouterr()
    assert is_bug or (str(error) in captured.err and captured.err.count("\n") == 1)
    assert checkpoint.steps_saved(run_dir) == [saved_step]
    assert f"stopped after step {saved_step}; a checkpoint is saved" in captured.out
    assert f"--resume --run-dir {run_dir}" in captured.out
    assert resume(run_dir) == 0
    rows, expected_rows = read_metrics(run_dir), read_metrics(uninterrupted)
    assert [row["step"] for row in rows] == [1, 2, 3] and "eval/avg" in rows[1]
    if call != 4:  # then step 2 ends after the first of its two optimizer steps
        assert rows[-1] == expected_rows[-1]


# --- The end of a run ----------------------------------------------------------------------------


class SolvedLater(Letters):
    """Tasks are only solved after eight episodes, so not before the second evaluation."""

    num_played = 0

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        type(self).num_played += terminated
        is_solved = terminated and self.num_played > 8
        return observation, reward, terminated, truncated, info | {"success": is_solved}


def test_a_run_is_saved_and_ends_when_held_out_success_reaches_stop_at(tmp_path, capsys):
    SolvedLater.num_played = 0
    with serve(SolvedLater) as url:
        changes = dict(steps=3, save_every=3, eval_every=1, eval_samples=1, stop_at=0.9)
        assert train_main(flags(**options(tmp_path, url, **changes))) == 0
        assert "--stop-at 0.9" in capsys.readouterr().out
        assert (tmp_path / "run/checkpoints/best").resolve().name == "step_000001"
        assert resume(tmp_path / "run") == 0, "the resumed run has nothing left to do"
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [1]


def test_with_lora_the_base_is_the_reference_and_a_resumed_run_equals_an_uninterrupted_one(
    tmp_path, url, capsys
):
    """A resumed run also notices that the base model of its adapters has changed."""
    model = shutil.copytree(resolve_model("tiny"), tmp_path / "model")
    settings = options(
        tmp_path,
        url,
        model=str(model),
        algorithm="reinforce_plus_plus",
        entropy_coef=0.01,
        lora_rank=4,
        kl_loss_coef=0.1,
        learning_rate=1e-2,
        deterministic=True,
    )
    assert train_main(flags(**settings | {"run_dir": str(tmp_path / "uninterrupted")})) == 0
    assert train_main(flags(**settings | {"steps": 1})) == 0
    weights = model / "model.safetensors"
    base_bytes = weights.read_bytes()
    save_file({name: tensor + 0.01 for name, tensor in load(base_bytes).items()}, weights)
    assert train_main(flags(**settings, resume=True)) == 1
    assert "have changed since this run began" in capsys.readouterr().err
    weights.write_bytes(base_bytes)
    assert train_main(flags(**settings, resume=True)) == 0
    logs = [(tmp_path / name / "metrics.jsonl").read_text() for name in ("run", "uninterrupted")]
    assert logs[0] == logs[1]
    first, last = read_metrics(tmp_path / "run")
    assert first["policy/kl"] == 0 < last["policy/kl"]  # the initial policy equals the base
    assert last["sync/log_prob_diff_mean"] < 1e-5  # the sampler has the adapters
    folder = checkpoint.folder_of(tmp_path / "run", 2)
    assert (folder / "adapter/adapter_config.json").exists()
    size = sum(p.stat().st_size for p in (folder / "trainer_state").rglob("*") if p.is_file())
    assert size < (folder / "model.safetensors").stat().st_size
    base, merged = load(base_bytes), load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.allclose(base[name], merged[name].float(), atol=2e-3)  # saved as bfloat16


# --- Ctrl-C --------------------------------------------------------------------------------------


def send_signal(number=signal.SIGINT):
    os.kill(os.getpid(), number)
    time.sleep(0.01)  # lets the signal handler run


def test_ctrl_c_interrupts_a_rollout_at_once_and_waits_for_the_end_of_an_update():
    with StopRequests() as stop:
        send_signal()  # during an update: remembered
        assert stop.agreed()
        with pytest.raises(KeyboardInterrupt), stop.allowed():
            pytest.fail("the next rollout must not begin")
    with StopRequests() as stop, pytest.raises(KeyboardInterrupt), stop.allowed():
        send_signal()
        pytest.fail("the rollout must be interrupted at once")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_sighup_is_heard_once_unless_it_was_ignored_at_the_start():
    """A closing terminal sends it twice, the second time through the shell. nohup ignores it."""
    old_handler = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    with StopRequests() as stop:
        send_signal(signal.SIGHUP)
        send_signal(signal.SIGHUP)
        assert stop.agreed()
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with StopRequests() as stop:
        send_signal(signal.SIGHUP)
        assert not stop.agreed()
    signal.signal(signal.SIGHUP, old_handler)


@pytest.mark.parametrize("is_launched", [False, True])
def test_a_second_ctrl_c_exits_at_once_and_a_launchers_copy_of_the_first_is_ignored(
    is_launched, monkeypatch, capfd
):
    monkeypatch.setattr(os, "_exit", sys.exit)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if is_launched:
        monkeypatch.setenv("WORLD_SIZE", "1")
    expected = contextlib.nullcontext() if is_launched else pytest.raises(SystemExit, match="130")
    with StopRequests() as stop, expected:
        send_signal(signal.SIGTERM)
        send_signal()
        assert is_launched and stop.agreed()
    assert ("stopped without saving" in capfd.readouterr().err) == (not is_launched)
