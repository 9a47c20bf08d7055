"""train.py as its user meets it: runs that go well, misuse, servers that fail, Ctrl-C, resume."""

import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from starlette.responses import HTMLResponse, Response
from toy_env import (
    Letters,
    Mute,
    flags,
    fresh_process_state,
    options,
    read_metrics,
    registered,
    saved_tensors,
    serve,
    train_main,
    write_ids,
)

import config
import train
from config import Config
from engines import EngineError, TransformersEngine
from envclient import EnvPool
from envs.textcraft.env import TextCraft
from models import load_policy
from reporting import metrics
from reporting.logs import ALARMS, read_log
from reporting.sentinels import Alarm, Sentinels
from run import checkpoint, session, worker
from run.interrupt import StopRequests
from run.session import TrainingError
from scale.default_models import resolve_model
from scale.sync import SyncError
from train import RLWorker, select
from trajectory import RolloutHandler, Turn

ROOT = Path(__file__).parents[1]
NOWHERE = "http://127.0.0.1:9"


def run_in_process(tmp_path, url, **changes):
    settings = options(tmp_path, url, **changes)
    return train_main(flags(**settings)), Path(settings["run_dir"])


def spawn(argv, **kwargs):
    """`python train.py ARGV` as a process of its own, its output read as text."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "train.py", *argv], cwd=ROOT, env=environment, **pipes, **kwargs
    )


def assert_one_line(text, *contents):
    """`text` is one line of train.py that holds all of `contents`."""
    assert text.count("\n") == 1, text
    assert text.startswith("train.py: "), text
    assert "Traceback" not in text
    for content in contents:
        assert content in text


def below(folder):
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


# --- What a run leaves ---------------------------------------------------------------------------


# Moves the weights whatever the returns are.
ENTROPY = dict(algorithm="reinforce_plus_plus", entropy_coef=0.01)


class Later(Letters):
    """Success is granted from the third episode on, so that step 1 beats step 0."""

    num_ended = 0

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        if terminated:
            type(self).num_ended += 1
            info["success"] = self.num_ended > 2
        return observation, reward, terminated, truncated, info


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run with everything switched on: PPO, KL in reward and loss, evaluation, states."""
    tmp_path = tmp_path_factory.mktemp("full")
    held_out = write_ids(tmp_path / "held_out.json", num_tasks=2)
    Later.num_ended = 0
    with serve(Later) as url:
        code, path = run_in_process(
            tmp_path,
            url,
            algorithm="ppo",
            kl_coef=0.1,
            kl_target=0.01,
            kl_loss_coef=0.1,
            ppo_epochs=2,
            steps=3,
            keep_last=1,
            eval_every=1,
            eval_samples=1,
            eval_tasks=held_out,
            record_state=True,
        )
    assert code == 0
    return path


def test_a_run_directory_holds_what_the_contract_says(run_dir):
    names = {str(p.relative_to(run_dir)) for p in run_dir.rglob("*") if p.is_file()}
    steps = ["000001", "000002", "000003"]
    expected = {"config.json", "metrics.jsonl", "timings.jsonl", "reward.png"}
    expected |= {f"trajectories/step_{step}.jsonl" for step in steps}
    expected |= {f"trajectories/eval_{step}.jsonl" for step in ["000000", *steps]}
    expected |= {f"eval/step_{step}.json" for step in ["000000", *steps]}
    assert expected <= names
    assert (run_dir / "reward.png").read_bytes().startswith(b"\x89PNG")
    hidden = {Path(name).name for name in names if Path(name).name.startswith(".")}
    litter = sorted(hidden - {".lock", ".metadata"})  # the latter is torch's index of a checkpoint
    assert litter == []
    config = json.loads((run_dir / "config.json").read_text())
    assert {"config", "versions", "git_commit", "hardware", "command"} <= set(config)
    assert config["config"]["kl_target"] == 0.01
    assert config["config"]["rounds"] == [2]
    for step in (0, 3):
        summary = json.loads((run_dir / f"eval/step_{step:06d}.json").read_text())
        assert set(summary["overall"]["avg"]) == {"value", "low", "high", "items"}


def test_the_best_checkpoint_is_kept_beside_the_newest_and_linked(run_dir):
    assert checkpoint.steps_saved(run_dir) == [1, 3]
    assert os.readlink(run_dir / "checkpoints/best") == "step_000001"
    folder = run_dir / "checkpoints/step_000003"
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(os.listdir(folder))
    assert {"policy", "critic", "state.json"} == set(os.listdir(folder / "trainer_state"))


def test_a_trajectory_line_has_the_contracts_fields(run_dir):
    text = (run_dir / "trajectories/step_000002.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["trajectory_id"] for line in lines] == [
        f"s000002-t000{task}-k0{sample}" for task in (0, 1) for sample in (0, 1)
    ]
    line = lines[0]
    assert set(line) >= set(
        "trajectory_id step env task_id subtask group_id seed max_rounds messages input_ids "
        "loss_mask rollout_log_probs advantages turns return success terminated truncated "
        "stop_reason weight_version used_in_loss".split()
    )
    assert set(line["turns"][0]) == set(
        "action_span action_text observation_text reward parse_error generate_s env_s state".split()
    )
    assert line["turns"][0]["state"]["turn"] == 1
    assert line["return"] == pytest.approx(sum(turn["reward"] for turn in line["turns"]))
    assert (line["weight_version"], line["used_in_loss"]) == (1, True)
    length = len(line["input_ids"])
    for name in ("loss_mask", "rollout_log_probs", "advantages"):
        assert len(line[name]) == length
    for mask, log_prob, advantage in zip(
        line["loss_mask"], line["rollout_log_probs"], line["advantages"], strict=True
    ):
        assert mask or (log_prob, advantage) == (0.0, 0.0)
    covered = [i for turn in line["turns"] for i in range(*turn["action_span"])]
    assert covered == [i for i in range(length) if line["loss_mask"][i]]


# Logged by sft.py, dpo.py or agentevol.py alone (test_methods.py).
OF_OTHER_METHODS = {"data/pairs", "data/evolving", "data/evolving_weight", "eval/loss"}


def test_logged_names_are_the_glossarys_and_no_name_of_it_is_never_logged(run_dir):
    logged = [name for line in read_metrics(run_dir) for name in line]
    of_others = {n for n in metrics.METRICS if n.startswith("preference/")} | OF_OTHER_METHODS
    of_others |= set(filter(metrics.is_of_an_env, metrics.METRICS))  # tests/test_mixture.py
    assert set(logged) - {"step"} == set(metrics.METRICS) - of_others
    text = (run_dir / "timings.jsonl").read_text()
    timed = [name for line in text.splitlines() for name in json.loads(line)]
    assert set(timed) - {"step"} == set(metrics.TIMINGS)


def test_ppo_epochs_are_optimizer_steps_and_the_learning_rate_is_the_stated_one(run_dir):
    for line in read_metrics(run_dir):
        assert line["policy/optimizer_steps"] == 2
        assert line["policy/learning_rate"] == pytest.approx(4e-5 * (1 - (line["step"] - 1) / 60))


def test_a_step_without_signal_changes_no_weight_is_logged_and_the_schedule_goes_on(
    tmp_path, capsys
):
    with serve(Mute) as url:
        code, run_dir = run_in_process(
            tmp_path,
            url,
            rounds_scheduler="scaling_inter_stepwise",
            rounds=(1, 2),
            steps_scaling_inter=1,
        )
    assert code == 0
    assert "step 1: no learning signal" in capsys.readouterr().out
    for line, rounds in zip(read_metrics(run_dir), (1, 2), strict=True):
        assert line["horizon/max_rounds"] == line["train/turns_mean"] == rounds
        assert line["policy/optimizer_steps"] == line["train/trajectories_used"] == 0
        assert line["train/groups_zero_variance"] == line["train/groups"] == 2
    saved = saved_tensors(run_dir, 2)["model"]
    start = dict(load_policy(resolve_model("tiny")).named_parameters())
    assert all(torch.equal(saved[name], start[name]) for name in start)


def played(group_id, solved, num_tokens):
    """A trajectory of one turn with `num_tokens` sampled."""
    t = RolloutHandler("t", 1, "fake", "fake_0", "easy", group_id, 0, 3)
    t.input_ids, t.loss_mask = [0] * (num_tokens + 2), [0, 0] + [1] * num_tokens
    t.rollout_log_probs = [0.0] * (num_tokens + 2)
    t.turns.append(Turn((2, num_tokens + 2), "go", reward=float(solved)))
    t.stop("success" if solved else "failure", solved)
    return t


def test_the_share_of_tokens_with_signal_counts_what_could_be_compared():
    undecided = [played(0, True, 10), played(0, False, 20)]
    decided = [played(1, True, 30), played(1, True, 40)]
    alone = played(2, True, 50)  # its sibling was lost to the environment
    lost = played(2, False, 60)
    lost.stop_reason = "env_error"
    trajectories = [*undecided, *decided, alone, lost]
    used, num_compared, counts = select(trajectories, Config())
    assert used == undecided and num_compared == 4
    assert counts == {"data/policy_tokens": 30, "data/signal_share": 30 / 100}
    _, _, counts = select(trajectories, Config(loss_agg="seq-mean"))
    assert counts == {"data/policy_tokens": 30, "data/signal_share": 2 / 4}
    used, _, counts = select(trajectories, Config(skip_zero_variance=False))
    assert used == undecided + decided and counts["data/signal_share"] == 1.0
    used, *_ = select(trajectories, Config(kl_coef=0.1))  # by which equal ones differ
    assert used == undecided + decided
    used, num_compared, counts = select(trajectories, Config(algorithm="ppo"))
    assert used == [*undecided, *decided, alone] and counts["data/signal_share"] == 1.0
    assert num_compared == 5


@pytest.mark.parametrize(("decay_steps", "rates"), [(2, [1e-3, 5e-4, 5e-4]), (0, [1e-3] * 3)])
def test_the_learning_rate_falls_on_a_line_and_never_to_zero(tmp_path, capsys, decay_steps, rates):
    with serve() as url:
        code, run_dir = run_in_process(
            tmp_path, url, steps=3, learning_rate=1e-3, learning_rate_decay_steps=decay_steps
        )
    assert code == 0
    assert [line["policy/learning_rate"] for line in read_metrics(run_dir)] == rates
    note = "raise --learning-rate-decay-steps"
    assert (note in capsys.readouterr().out) == bool(decay_steps)


# --- Misuse: exit code 2, one line, nothing left behind ------------------------------------------


def test_a_prompt_over_the_budget_is_one_line_and_leaves_nothing(tmp_path, capsys):
    with serve() as url:
        settings = options(tmp_path, url, max_trajectory_tokens=12)
        before = below(tmp_path)
        assert train_main(flags(**settings)) == 2
    assert_one_line(capsys.readouterr().err, "--max-trajectory-tokens 12 is too small", "letters_0")
    assert below(tmp_path) == before


def test_from_python_the_same_options_are_checked_and_the_run_is_returned(tmp_path):
    with serve() as url, fresh_process_state():
        settings = options(tmp_path, url, steps=1, **ENTROPY)
        with pytest.raises(config.Misuse, match="--group-size 1 leaves grpo"):
            train.train(Config(**settings | {"algorithm": "grpo", "group_size": 1}))
        assert not (tmp_path / "run").exists()
        run = train.train(Config(**settings))
    assert run.path == tmp_path / "run"
    assert run.best == run.path / "checkpoints/step_000001"


def test_a_value_error_in_the_middle_of_a_step_is_a_bug_with_its_traceback(tmp_path, monkeypatch):
    """Misuse is found by the checks of options; what breaks later must say where."""

    def broken(self, *_):
        raise ValueError("shapes (3,) and (4,)")

    monkeypatch.setattr(train.RLWorker, "update", broken)
    with serve() as url, pytest.raises(ValueError, match="shapes") as error:
        run_in_process(tmp_path, url, **ENTROPY)
    assert not isinstance(error.value, config.Misuse)
    assert (tmp_path / "run/config.json").exists()


# --- Servers and engines that fail: exit code 1, one line that names them ------------------------


@pytest.fixture
def impatient(monkeypatch):
    """Time-outs and waits of a second instead of minutes."""
    pool = partial(EnvPool, timeout_s=1.5, dead_wait_s=0.5, back_off_s=0.05)
    monkeypatch.setattr(worker, "EnvPool", pool)


async def nothing():
    await asyncio.sleep(6.0)
    return Response(status_code=504)


async def internal_error():
    return Response("boom", status_code=500)


async def html():
    return HTMLResponse("<html>Welcome to nginx</html>")


@pytest.mark.parametrize(
    ("answer", "said"),
    [(internal_error, "HTTP 500: boom"), (html, "Welcome to nginx"), (nothing, "1.5 s")],
)
def test_a_server_that_fails_in_mid_episode_is_one_line_that_names_it(
    tmp_path, capsys, impatient, answer, said
):
    async def fail_at_step(request, call_next):
        return await (answer() if request.url.path == "/step" else call_next(request))

    with serve(middleware=fail_at_step) as url:
        code, run_dir = run_in_process(tmp_path, url)
        assert code == 1
        assert_one_line(capsys.readouterr().err, "4 of 4 trajectories were lost", url, said)
    assert checkpoint.steps_saved(run_dir) == []


def test_a_server_that_is_not_there_is_one_line_that_names_it(tmp_path, capsys, impatient):
    with registered():
        code, _ = run_in_process(tmp_path, NOWHERE)
    assert code == 1
    assert_one_line(capsys.readouterr().err, NOWHERE)
    assert not (tmp_path / "run").exists()  # so that the same command can be given again


@pytest.mark.parametrize(
    "error",
    [
        EngineError("the sampler is gone"),
        EngineError("vLLM failed in a step: CUDA out of memory"),  # clock.py's OutOfMemory
        TrainingError("all lost"),
    ],
)
def test_a_step_whose_evaluation_fails_is_saved_and_evaluated_on_resume(
    tmp_path, capsys, monkeypatch, error
):
    """The step had been learned, and with it all since the last checkpoint was lost."""
    evaluate, failed = session.Session.evaluate, []

    def failing(self, step):
        if step == 2 and not failed:
            failed.append(step)
            raise error
        return evaluate(self, step)

    monkeypatch.setattr(session.Session, "evaluate", failing)
    with serve() as url:
        every = {"steps": 4, "eval_every": 2, "save_every": 100}
        code, run_dir = run_in_process(tmp_path, url, **every)
        told = capsys.readouterr()
        assert code == 1 and "Go on with" in told.out
        assert_one_line(told.err, str(error))
        assert checkpoint.steps_saved(run_dir) == [2]
        assert train_main(flags(resume=True, run_dir=str(run_dir))) == 0
    rows = read_metrics(run_dir)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row.get("eval/avg") is not None for row in rows] == [False, True, False, True]


def test_few_lost_trajectories_are_left_out_and_counted(tmp_path, impatient):
    """Trap 5: a lost episode counted as a failure of the policy, in its group's baseline.

    Session 0 looks at the budget, 1 to 8 are the step's; only a lost episode opens another one.
    """
    lost = set()

    async def lose_one_session(request, call_next):
        if request.url.path == "/step":
            body = json.loads(await request.body())
            lost.update([body["id"]] if not lost else [])
            if body["id"] in lost or body["id"] > 8:
                return Response("boom", status_code=500)
        return await call_next(request)

    with serve(middleware=lose_one_session, first_id=0) as url:
        code, run_dir = run_in_process(
            tmp_path, url, steps=1, tasks_per_step=2, group_size=4, max_env_failures=0.5
        )
    assert code == 0
    (line,) = read_metrics(run_dir)
    text = (run_dir / "trajectories/step_000001.jsonl").read_text()
    trajectories = [json.loads(t) for t in text.splitlines()]
    failed = [t for t in trajectories if t["stop_reason"] == "env_error"]
    assert line["train/env_failures"] == len(failed) == 1
    assert line["train/trajectories_used"] == sum(t["used_in_loss"] for t in trajectories) == 7
    assert not failed[0]["used_in_loss"]
    assert "HTTP 500: boom" in failed[0]["error"]
    played = [t["return"] for t in trajectories if t not in failed]
    assert line["train/return_mean"] == pytest.approx(sum(played) / 7)


def test_an_engine_that_fails_is_one_line_and_finished_trajectories_are_saved(
    tmp_path, capsys, monkeypatch
):
    polls = []
    poll = TransformersEngine.poll

    def failing_poll(engine):
        polls.append(engine.num_running)
        if len(polls) > 6:  # four first turns, one at a time, then two second turns
            raise EngineError("out of memory")
        return poll(engine)

    monkeypatch.setattr(TransformersEngine, "poll", failing_poll)
    with serve() as url:
        code, run_dir = run_in_process(tmp_path, url, deterministic=True)
    assert code == 1
    assert_one_line(capsys.readouterr().err, "out of memory")
    assert (run_dir / "trajectories/step_000001.jsonl").exists()
    assert read_metrics(run_dir) == []


@pytest.mark.parametrize(
    ("part", "error", "saved"),
    [
        ("score", torch.OutOfMemoryError("CUDA out of memory"), 2),  # no weight has changed
        ("score", EngineError("it cannot give its memory back"), 2),
        ("roll_out", MemoryError("Unable to allocate 9 GB"), 2),
        ("sync", SyncError("sampler and trainer differ"), 3),  # the third step has been learned
        ("sync", EngineError("the sampler is gone"), 3),
    ],
)
def test_what_fails_before_or_after_a_step_learns_loses_no_step(
    tmp_path, capsys, monkeypatch, part, error, saved
):
    whole, calls = getattr(RLWorker, part), []

    def failing(own, *given):
        calls.append(1)
        if len(calls) == 3:
            raise error
        return whole(own, *given)

    with serve() as url:
        with monkeypatch.context() as patch:
            patch.setattr(RLWorker, part, failing)
            # An evaluation is due where it fails, and is made up for.
            code, run_dir = run_in_process(tmp_path, url, steps=4, save_every=4, eval_every=3)
        captured = capsys.readouterr()
        assert code == 1
        assert str(error) in captured.err and len(captured.err.splitlines()) == 1
        assert checkpoint.steps_saved(run_dir) == [saved]
        assert f"--resume --run-dir {run_dir}" in captured.out
        assert train_main(["--resume", "--run-dir", str(run_dir)]) == 0
    rows = read_metrics(run_dir)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row.get("eval/avg") is not None for row in rows] == [False, False, True, True]


# --- Ctrl-C --------------------------------------------------------------------------------------


@pytest.mark.long
def test_ctrl_c_in_a_rollout_saves_and_prints_a_command_that_goes_on(tmp_path):
    resets = []

    async def count_resets(request, call_next):
        resets.extend([1] if request.url.path == "/reset" else [])
        return await call_next(request)

    with serve(TextCraft, count_resets, name="textcraft") as url:
        settings = options(
            tmp_path,
            url,
            env="textcraft",
            subtasks=("depth 1",),
            steps=1,
            deterministic=True,
            rounds=(3,),
            max_tokens_per_turn=24,
            max_trajectory_tokens=1000,
        )
        settings["tasks"] = "envs/textcraft/ids/textcraft_family_train.json"
        process = spawn(flags(**settings))
        give_up_at = time.monotonic() + 120
        while len(resets) < 5 and process.poll() is None and time.monotonic() < give_up_at:
            time.sleep(0.01)  # one reset looks at the budget, four begin the rollout
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 130, out + err
        assert "Traceback" not in err
        assert err.strip() == "stopping; Ctrl-C again leaves without saving"
        assert "stopped after step 0, saved" in out
        run_dir = Path(settings["run_dir"])
        assert checkpoint.steps_saved(run_dir) == [0]
        assert read_metrics(run_dir) == []

        command = shlex.split(out.splitlines()[-1])
        again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "resumed after step 0" in again.stdout
    assert [line["step"] for line in read_metrics(run_dir)] == [1]
    assert checkpoint.steps_saved(run_dir) == [0, 1]


def interrupt():
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.01)  # the handler runs between two byte codes


def test_ctrl_c_is_answered_at_once_where_it_does_no_harm_and_later_elsewhere():
    with StopRequests() as stop:
        interrupt()  # in an update: remembered
        assert stop.requested
        with pytest.raises(KeyboardInterrupt), stop.allowed():
            pytest.fail("the next rollout must not begin")
    with StopRequests() as stop, pytest.raises(KeyboardInterrupt), stop.allowed():
        interrupt()
        pytest.fail("a rollout is interrupted on the spot")
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_in_an_update_finishes_the_step_first(tmp_path, capsys, monkeypatch):
    update = train.RLWorker.update

    def interrupted_update(self, step, *rest):
        interrupt()
        return update(self, step, *rest)

    monkeypatch.setattr(train.RLWorker, "update", interrupted_update)
    with serve() as url:
        code, run_dir = run_in_process(tmp_path, url, steps=3, save_every=3)
    assert code == 130
    assert "stopped after step 1, saved" in capsys.readouterr().out
    assert checkpoint.steps_saved(run_dir) == [1]
    assert [line["step"] for line in read_metrics(run_dir)] == [1]


# --- Resume: the same as if nothing had happened (traps 11 and 13) -------------------------------


def what_repeats(run_dir):
    """Everything a run wrote that may not depend on whether it was interrupted."""
    trajectories = {}
    for path in sorted((run_dir / "trajectories").iterdir()):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            for turn in line["turns"]:
                del turn["generate_s"], turn["env_s"]
        trajectories[path.name] = lines
    evaluations = {p.name: p.read_text() for p in sorted((run_dir / "eval").iterdir())}
    state = checkpoint.read_state(run_dir, 4, {"algorithm": "ppo"})
    del state["files"]  # torch's index holds paths, so that its size depends on theirs
    parts = {name: saved_tensors(run_dir, 4, name) for name in state["parts"]}
    return (
        (run_dir / "metrics.jsonl").read_text().splitlines(),
        trajectories,
        evaluations,
        state,
        parts,
    )


RESUMABLE = {
    "algorithm": "ppo",  # the one with most to restore: a critic, two optimizers,
    "kl_coef": 0.1,  # a reference and a KL controller
    "kl_target": 0.001,
    "mini_batch_size": 2,
    "deterministic": True,
    "learning_rate": 1e-3,
    "tasks_per_step": 3,  # 8 tasks: the third step crosses an epoch
    "rounds_scheduler": "scaling_inter_stepwise",
    "rounds": (1, 2),
    "steps_scaling_inter": 2,
    "eval_every": 1,
    "eval_samples": 1,
    "keep_last": 9,
}


def resumable(tmp_path, url, steps, **changes):
    tmp_path.mkdir(exist_ok=True)
    held_out = write_ids(tmp_path / "held_out.json", num_tasks=2)
    return options(tmp_path, url, **RESUMABLE, steps=steps, eval_tasks=held_out, **changes)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("uninterrupted")
    with serve() as url:
        settings = resumable(tmp_path, url, steps=4)
        assert train_main(flags(**settings)) == 0
    result = what_repeats(Path(settings["run_dir"]))
    assert [json.loads(line)["horizon/max_rounds"] for line in result[0]] == [1, 1, 2, 2]
    return result


def assert_same(run_dir, uninterrupted):
    lines, trajectories, evaluations, state, parts = what_repeats(run_dir)
    assert lines == uninterrupted[0]
    assert trajectories == uninterrupted[1]
    assert evaluations == uninterrupted[2]
    assert state == uninterrupted[3]
    for name, part in uninterrupted[4].items():
        assert parts[name]["optimizer"]["param_groups"] == part["optimizer"]["param_groups"]
        for kind in (lambda p: p["model"], lambda p: p["optimizer"]["state"]):
            torch.testing.assert_close(kind(parts[name]), kind(part), rtol=0, atol=0)


@pytest.mark.long
@pytest.mark.parametrize("stops", [(2,), (1, 3)], ids=["at the boundary", "inside both stages"])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, uninterrupted, stops):
    with serve() as url:
        settings = resumable(tmp_path, url, steps=stops[0])
        assert train_main(flags(**settings)) == 0
        for steps in (*stops[1:], 4):
            argv = ["--resume", "--run-dir", settings["run_dir"], "--steps", str(steps)]
            assert train_main(argv) == 0
    assert_same(Path(settings["run_dir"]), uninterrupted)


def test_a_resumed_run_is_not_measured_with_other_weights_than_its_own(
    tmp_path, capsys, monkeypatch
):
    """It was evaluated before the next comparison, and `best` could move by that."""
    with serve() as url:
        values = {"steps": 2, "save_every": 2, "eval_every": 0, "learning_rate": 1e-2}
        code, run_dir = run_in_process(tmp_path, url, **values)
        assert code == 0
        with monkeypatch.context() as patch:  # the sampler stays at the start
            patch.setattr(worker.Worker, "load_into_engine", lambda own: 0)
            again = ["--resume", "--run-dir", str(run_dir), "--steps", "3"]
            assert train_main(again) == 1
        assert "the sampler holds other weights than the trainer" in capsys.readouterr().err
        assert len(read_metrics(run_dir)) == 2
        assert train_main(again) == 0


@pytest.mark.long
def test_a_resumed_sampler_has_a_stream_of_its_own_however_many_checkpoints_are_left(
    tmp_path, monkeypatch
):
    """vLLM's seed. Counting the checkpoints that are left repeats a stream once old ones go."""
    seeds, make = [], worker.make_engine

    def seen(kind, *arguments, **options):
        seeds.append(options.get("seed"))
        return make("transformers", *arguments)

    monkeypatch.setattr(worker, "make_engine", seen)
    with serve() as url:
        settings = options(tmp_path, url, engine="vllm", steps=1, keep_last=1, **ENTROPY)
        assert train_main(flags(**settings)) == 0
        for steps in (2, 3, 4):
            argv = ["--resume", "--run-dir", settings["run_dir"], "--steps", str(steps)]
            assert train_main(argv) == 0
    assert len(set(seeds)) == len(seeds) == 4


# --- Adapters, sentinels, memory -----------------------------------------------------------------


def test_with_adapters_the_base_is_the_reference_and_the_export_is_merged(tmp_path):
    """Trained with rank 4, resumed: a small state, a whole model, and a folder for peft."""
    changes = {"lora_rank": 4, "kl_loss_coef": 0.1, "learning_rate": 1e-2, "deterministic": True}
    changes |= {"algorithm": "reinforce_plus_plus", "entropy_coef": 0.01}
    with serve() as url:
        code, run_dir = run_in_process(tmp_path, url, steps=1, **changes)
        assert code == 0
        argv = ["--resume", "--run-dir", str(run_dir), "--steps", "3"]
        assert train_main(argv) == 0
        _, whole = run_in_process(tmp_path, url, steps=3, **changes, run_dir=str(tmp_path / "b"))
    assert (run_dir / "metrics.jsonl").read_text() == (whole / "metrics.jsonl").read_text()
    first, last = read_metrics(run_dir)[0], read_metrics(run_dir)[-1]
    assert first["policy/kl"] == 0  # the start policy is the base, exactly
    assert last["policy/kl"] > 0
    assert last["sync/log_prob_diff_mean"] < 1e-5  # the sampler has the adapters
    folder = run_dir / "checkpoints/step_000003"
    assert set(os.listdir(folder / "adapter")) >= {"adapter_config.json"}
    size = sum(p.stat().st_size for p in (folder / "trainer_state").rglob("*") if p.is_file())
    assert size < (folder / "model.safetensors").stat().st_size
    base = load_policy(resolve_model("tiny")).lm.state_dict()
    merged = load_policy(str(folder)).lm.state_dict()
    assert base.keys() == merged.keys()
    assert not torch.allclose(base["model.layers.0.mlp.up_proj.weight"],
                              merged["model.layers.0.mlp.up_proj.weight"], atol=1e-4)  # fmt: skip


@pytest.fixture
def alarmed(monkeypatch):
    """A sentinel that wants to stop the run at step 2."""

    def check(self, step, metrics):
        if step < 2:
            return []
        return [Alarm("entropy_floor", 0.0, 0.1, "stop", f"step {step}: entropy is 0.0")]

    monkeypatch.setattr(Sentinels, "check", check)


def test_a_collapsing_run_stops_saved_and_names_its_best_checkpoint(tmp_path, capsys, alarmed):
    held_out = write_ids(tmp_path / "held_out.json", num_tasks=2)
    changes = {"eval_every": 1, "eval_samples": 1, "eval_tasks": held_out, "save_every": 1}
    Later.num_ended = 0
    with serve(Later) as url:
        code, run_dir = run_in_process(tmp_path, url, steps=4, **changes)
    assert code == 1
    captured = capsys.readouterr()
    assert "stop: step 2: entropy is 0.0" in captured.out
    best = f"the best checkpoint is {run_dir / 'checkpoints/best'}"
    assert_one_line(captured.err, "stopped after step 2", "entropy is 0.0", best, "--on-collapse")
    assert checkpoint.steps_saved(run_dir) == [1, 2]
    assert [line["step"] for line in read_metrics(run_dir)] == [1, 2]


def test_a_run_may_go_on_all_the_same(tmp_path, capsys, alarmed):
    with serve() as url:
        code, run_dir = run_in_process(tmp_path, url, steps=2, save_every=2)
        assert code == 1
        log = run_dir / ALARMS
        two, later = log.read_text(), {"step": 3, "severity": "stop", "name": "x", "text": "lost"}
        with open(log, "a") as file:
            file.write(json.dumps(later) + "\n")  # of a step that no checkpoint knows
        argv = ["--resume", "--run-dir", str(run_dir), "--steps", "3", "--on-collapse", "warn"]
        assert train_main(argv) == 0
    assert "stop: step 3: entropy is 0.0" in capsys.readouterr().out
    assert read_log(log) == [
        {"step": step, "severity": "stop", "name": "entropy_floor"}
        | {"text": f"step {step}: entropy is 0.0"}
        for step in (2, 3)
    ]
    assert log.read_text().startswith(two)


def test_ctrl_c_before_training_begins_leaves_no_run_behind(tmp_path, capsys, monkeypatch):
    """The warm start takes minutes; it is not something to wait for."""

    def interrupted(config, accelerator):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)
        raise AssertionError("was not interrupted")

    monkeypatch.setattr(worker, "start_model", interrupted)
    with serve() as url:
        code, run_dir = run_in_process(tmp_path, url, steps=1)
    assert code == 130
    assert not (run_dir / "config.json").exists()
    assert "stopped before training began" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("phase", "error", "flags_named"),
    [
        ("update", torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
         ["--max-tokens-per-micro-batch (now 2048)", "--gradient-checkpointing"]),
        ("update", RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to ..."),
         ["--max-tokens-per-micro-batch (now 2048)", "--max-trajectory-tokens (now 128)"]),
        ("roll_out", MemoryError(), ["--max-trajectory-tokens (now 128)"]),
        # Another process has the card: no option of ours helps, and the error says whose it is.
        ("load_models", torch.OutOfMemoryError("CUDA out of memory. Process 4344 has 105.39 GiB"),
         ["in loading the models: CUDA out of memory. Process 4344"]),
    ],
)  # fmt: skip
def test_out_of_memory_is_one_line_that_names_what_to_lower(
    tmp_path, capsys, monkeypatch, phase, error, flags_named
):
    def too_much(*_, **__):
        raise error

    monkeypatch.setattr(train.RLWorker, phase, too_much)
    with serve() as url:
        code, _ = run_in_process(tmp_path, url, **ENTROPY)
    assert code == 1
    assert_one_line(capsys.readouterr().err, "out of memory in", *flags_named)


# --- The real thing ------------------------------------------------------------------------------


@pytest.mark.long
def test_two_steps_through_vllm_and_http(tmp_path):
    """One process that starts its own environment server; vLLM samples, real HTTP in between."""
    settings = options(
        tmp_path,
        NOWHERE,
        env="textcraft",
        engine="vllm",
        algorithm="reinforce_plus_plus",  # needs no variance among the returns, which are all 0;
        entropy_coef=0.01,  # the entropy bonus is what moves the weights
        learning_rate=1e-3,
        subtasks=("depth 1",),
        max_tokens_per_turn=16,
        max_trajectory_tokens=1000,
        eval_every=2,
        eval_samples=1,
    )
    del settings["env_addr"]
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps([{"item_id": "textcraft_31"}, {"item_id": "textcraft_32"}]))
    process = spawn(flags(**settings))
    out, err = process.communicate(timeout=280)
    assert process.returncode == 0, out + err
    assert "Traceback" not in err
    run_dir = Path(settings["run_dir"])
    lines = read_metrics(run_dir)
    assert [line["step"] for line in lines] == [1, 2]
    for line in lines:
        assert line["policy/optimizer_steps"] == 1
        assert line["train/env_failures"] == 0
        assert line["train/trajectories_used"] == 4
        assert line["sampler/log_prob_diff_mean"] < 0.05  # bfloat16 on both sides
        assert line["sync/log_prob_diff_mean"] < 0.05
    assert "eval/avg" in lines[1]
    assert checkpoint.steps_saved(run_dir) == [1, 2]
