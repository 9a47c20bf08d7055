"""train.py from the command line: the files of a run, failures, Ctrl-C, resume."""

import contextlib
import json
import math
import os
import signal
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_session import SolvedLater
from toy_env import (
    Letters,
    NoReward,
    flags,
    options,
    read_metrics,
    registered,
    saved_tensors,
    serve,
    train_main,
    write_ids,
)

import update
from batching import make_batch
from config import Config
from engines import EngineError, TransformersEngine
from envclient import EnvPool
from envs import Task
from models import load_policy
from reporting import metrics
from reporting.logs import read_log
from reporting.metrics import summarize_trajectories
from rollout import RolloutLog
from run import checkpoint, worker
from run.clock import Clock
from run.errors import OutOfMemory
from run.files import weights_digest
from scale.default_models import resolve_model
from train import RLWorker, more_requests, requests_of, select, shuffle_rewards
from trajectory import RolloutHandler, Turn


def run_in_process(tmp_path, url, **changes):
    settings = options(tmp_path, url, **changes)
    return train_main(flags(**settings)), Path(settings["run_dir"])


def assert_one_line(text, *contents):
    """Assert that `text` is one line from train.py that contains all of `contents`."""
    assert text.count("\n") == 1 and text.startswith("train.py: "), text
    assert all(content in text for content in contents), text


# --- The files of a run --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run with all features on: PPO, KL in reward and loss, evaluation, states."""
    tmp_path = tmp_path_factory.mktemp("full")
    held_out = write_ids(tmp_path / "held_out.json", num_tasks=2)
    SolvedLater.num_played = -2  # the evaluation at the second temperature, before step 1
    with serve(SolvedLater) as url:
        code, path = run_in_process(
            tmp_path,
            url,
            algorithm="ppo",
            kl_coef=0.1,
            kl_loss_coef=0.1,
            ppo_epochs=2,
            steps=3,
            keep_last=1,
            eval_every=1,
            eval_samples=1,
            eval_tasks=held_out,
            eval_temperatures=(1.0, 0.3),
            record_state=True,
            task_sampling="uncertain",
            overlong_penalty=64,
        )
    assert code == 0
    return path


def test_a_run_directory_contains_all_files_of_the_contract(run_dir):
    names = {str(p.relative_to(run_dir)) for p in run_dir.rglob("*") if p.is_file()}
    steps = ["000001", "000002", "000003"]
    expected = {"config.json", "metrics.jsonl", "timings.jsonl", "reward.png"}
    expected |= {f"trajectories/step_{step}.jsonl" for step in steps}
    expected |= {f"trajectories/eval_{step}.jsonl" for step in ["000000", *steps]}
    expected |= {f"eval/step_{step}.json" for step in ["000000", *steps]}
    expected |= {f"trajectories/eval_{step}_temperature_0.3.jsonl" for step in steps}
    expected |= {f"eval/temperature_0.3/step_{step}.json" for step in steps}
    assert expected <= names
    hidden = {Path(name).name for name in names if Path(name).name.startswith(".")}
    assert hidden <= {".lock", ".metadata"}  # the latter is torch's index of a checkpoint
    config = json.loads((run_dir / "config.json").read_text())
    assert {"config", "versions", "git_commit", "hardware", "command"} <= set(config)
    assert (config["config"]["kl_coef"], config["config"]["rounds"]) == (0.1, [2])
    summary = json.loads((run_dir / "eval/step_000003.json").read_text())
    assert set(summary["overall"]["avg"]) == {"value", "low", "high", "items"}
    cool = json.loads((run_dir / "eval/temperature_0.3/step_000003.json").read_text())
    assert (summary["temperature"], cool["temperature"]) == (1.0, 0.3)


def test_the_best_checkpoint_is_kept_with_the_newest_and_linked(run_dir):
    """With --keep-last 1; step 2 was the best."""
    assert checkpoint.steps_saved(run_dir) == [2, 3]
    assert os.readlink(run_dir / "checkpoints/best") == "step_000002"
    folder = run_dir / "checkpoints/step_000003"
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= set(os.listdir(folder))


def test_a_trajectory_line_has_the_tokens_and_numbers_of_training(run_dir):
    lines = read_log(run_dir / "trajectories/step_000002.jsonl")
    ids = [f"s000002-t{task}-k{sample}" for task in ("0000", "0001") for sample in ("00", "01")]
    assert [line["trajectory_id"] for line in lines] == ids
    line = lines[0]
    assert line["turns"][0]["state"]["turn"] == 1
    assert (line["weight_version"], line["used_in_loss"]) == (1, True)
    (eval_line, *_) = read_log(run_dir / "trajectories/eval_000002.jsonl")
    assert eval_line["weight_version"] == 2
    tokens = zip(line["loss_mask"], line["rollout_log_probs"], line["advantages"], strict=True)
    assert all(mask or numbers == [0.0, 0.0] for mask, *numbers in tokens)
    assert any(line["advantages"])


# Logged only by sft.py, dpo.py or agentevol.py, or with --algorithm gigpo or distill.
OTHER_METRICS = {"data/pairs", "data/evolving", "data/evolving_weight", "eval/loss"}
OTHER_METRICS |= {"data/anchored_share", "policy/teacher_kl"}
OTHER_METRICS |= {name for name in metrics.METRICS if name.startswith("preference/")}


def test_a_run_logs_exactly_the_names_in_the_glossary(run_dir):
    metric_names = {name for line in read_metrics(run_dir) for name in line} - {"step"}
    # tests/test_mixture.py covers the names per environment.
    per_env = {n for n in metrics.METRICS if n.rpartition("/")[0] in metrics.PER_ENV}
    assert metric_names == set(metrics.METRICS) - OTHER_METRICS - per_env
    timing_names = {name for line in read_log(run_dir / "timings.jsonl") for name in line}
    assert timing_names - {"step"} == set(metrics.TIMINGS)
    assert {line["policy/optimizer_steps"] for line in read_metrics(run_dir)} == {2}  # trap 3


class Percent(NoReward):
    step = staticmethod(lambda action: ("", 33, True, False, {"success": True}))


def test_the_error_of_lost_trajectories_is_printed_once(tmp_path, capsys):
    with serve(Percent) as url:
        code, _ = run_in_process(tmp_path, url, max_env_failures=1.0)
    assert code == 0 and capsys.readouterr().out.count("not used; last error: ") == 1


def test_a_step_that_loses_too_many_trajectories_ends_the_run_but_writes_them(tmp_path):
    with serve(Percent) as url:
        code, path = run_in_process(tmp_path, url)
    assert code == 1
    assert (path / "trajectories/step_000001.jsonl").read_text().count('"env_error"') > 0


def test_a_step_whose_whole_update_is_skipped_does_not_end_the_run(tmp_path, monkeypatch):
    objective, calls = update.policy_objective, []

    def first_is_nan(log_probs, *args):
        calls.append(log_probs)
        return objective(log_probs * math.nan if len(calls) == 1 else log_probs, *args)

    monkeypatch.setattr(update, "policy_objective", first_is_nan)
    with serve() as url:
        code, run_dir = run_in_process(tmp_path, url)
    first, second = read_metrics(run_dir)
    assert code == 0
    assert (first["policy/skipped_steps"], first["policy/optimizer_steps"]) == (1, 0)
    assert (second["policy/skipped_steps"], second["policy/optimizer_steps"]) == (0, 1)


def test_a_step_without_signal_changes_no_weights_but_is_logged_and_counts_in_the_schedule(
    tmp_path, capsys
):
    with serve(NoReward) as url:
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
    final_weights = saved_tensors(run_dir, 2)["model"]
    initial_weights = dict(load_policy(resolve_model("tiny")).named_parameters())
    assert all(torch.equal(final_weights[name], value) for name, value in initial_weights.items())


def test_a_prompt_over_the_budget_is_reported_in_one_line_and_leaves_no_files(tmp_path, capsys):
    with serve() as url:
        settings = options(tmp_path, url, max_trajectory_tokens=12)
        paths_before = sorted(tmp_path.rglob("*"))
        assert train_main(flags(**settings)) == 2
        message = "--max-trajectory-tokens 12 is too small", "letters_0"
        assert_one_line(capsys.readouterr().err, *message)
        assert sorted(tmp_path.rglob("*")) == paths_before
        settings |= {"agent": "plan", "max_trajectory_tokens": 45}
        assert train_main(flags(**settings)) == 2
    assert_one_line(capsys.readouterr().err, "letters_0 and a plan and a turn need")


def test_a_run_that_resets_its_adapters_is_resumed_exactly(tmp_path):
    """It is stopped at the step of the reset, and again one step later."""
    lora = dict(lora_rank=4, lora_alpha=16, reset_adapter_every=2, kl_loss_coef=0.1)
    method = dict(algorithm="reinforce_plus_plus", deterministic=True, learning_rate=1e-2)
    runs = tmp_path / "run", tmp_path / "uninterrupted"
    with serve() as url:
        settings = options(tmp_path, url, **lora, **method, steps=4)
        assert train_main(flags(**settings | {"run_dir": str(runs[1])})) == 0
        for steps in (2, 3, 4):
            changes = {"steps": steps} | ({"resume": True} if steps > 2 else {})
            assert train_main(flags(**settings | changes)) == 0
    assert read_metrics(runs[0]) == read_metrics(runs[1])
    rows = read_metrics(runs[0])
    assert [row["policy/kl"] > 0 for row in rows] == [False, True, False, True]
    assert max(row["sync/log_prob_diff_mean"] for row in rows) < 1e-5
    assert not (checkpoint.folder_of(runs[0], 4) / "adapter").exists()
    assert not saved_tensors(runs[0], 4).get("optimizer"), "the optimizer is new, too"


class SolvedIfEven(Letters):
    """Every second task is always solved, the others never."""

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        return observation, reward, terminated, truncated, {"success": self.task_index % 2 == 0}


def test_a_run_that_draws_uncertain_tasks_is_resumed_exactly(tmp_path, monkeypatch):
    """It fails in its fourth step, after the outcomes of that step have been counted."""
    method = dict(algorithm="reinforce_plus_plus", task_sampling="uncertain", deterministic=True)
    runs, update = (tmp_path / "run", tmp_path / "uninterrupted"), RLWorker.update

    def failing_update(self, step, *args):
        if step == 4:
            raise EngineError("a failure before the weights change")
        return update(self, step, *args)

    with serve(SolvedIfEven) as url:
        settings = options(tmp_path, url, **method, steps=6, save_every=6, tasks_per_step=3)
        assert train_main(flags(**settings | {"run_dir": str(runs[1])})) == 0
        with monkeypatch.context() as patch:
            patch.setattr(RLWorker, "update", failing_update)
            assert train_main(flags(**settings)) == 1
        assert checkpoint.steps_saved(runs[0]) == [3]
        assert train_main(["--resume", "--run-dir", str(runs[0])]) == 0
    logs = [sorted(run.glob("trajectories/*.jsonl")) for run in runs]
    tasks = [[[t["task_id"] for t in read_log(log)] for log in of_run] for of_run in logs]
    assert len(tasks[0]) == 6 and tasks[0] == tasks[1]
    assert read_metrics(runs[0]) == read_metrics(runs[1])
    uncertainties = [row["data/task_uncertainty"] for row in read_metrics(runs[0])]
    assert uncertainties[0] == 0.25 and max(uncertainties[4:]) < 0.25, "all tasks are known"


def test_an_evaluation_samples_at_its_temperature_and_a_rollout_at_that_of_training(monkeypatch):
    """Trap 17: a policy sampled at another temperature solves another share of the tasks."""
    settings, task = [], Task("textcraft_1", 1, "", "textcraft")
    monkeypatch.setattr(worker, "collect", lambda *args: settings.append(args[4]) or [])
    w = SimpleNamespace(config=Config(temperature=0.8, eval_samples=1), eval_tasks=[task])
    w.engine = w.pool = w.chat = None
    w.stop, w.play = SimpleNamespace(allowed=contextlib.nullcontext), partial(worker.Worker.play, w)
    worker.Worker.evaluate(w, 2, 0.3)
    w.play(requests_of(1, [task], w.config, {"textcraft": 5}), 0, "rollout", RolloutLog())
    assert [s.temperature for s in settings] == [0.3, 0.8]


def test_the_horizon_is_a_function_of_the_step_and_counts_nothing():
    """Trap 11: a resumed run asks for its first step like an uninterrupted one."""
    c = Config(
        rounds_scheduler="scaling_inter_stepwise", rounds=(10, 20, 30), steps_scaling_inter=100
    )
    w = SimpleNamespace(config=c)
    horizons = [RLWorker.rounds_at(w, n)["textcraft"] for n in (101, 1, 201, 200, 100)]
    assert horizons == [20, 10, 30, 20, 10]


# --- The trajectories in the loss ----------------------------------------------------------------


def make_trajectory(group_id, *rewards, num_tokens=10):
    """A trajectory with one turn of `num_tokens` sampled tokens per reward."""
    t = RolloutHandler("t", 1, "letters", "letters_0", "easy", group_id, 0, 3)
    for reward in rewards:
        start = len(t.input_ids)
        t.input_ids += [0] * num_tokens
        t.turns.append(Turn((start, start + num_tokens), "go", reward=reward))
    t.loss_mask, t.rollout_log_probs = [1] * len(t.input_ids), [0.0] * len(t.input_ids)
    t.stop("failure")
    return t


def test_the_signal_share_is_relative_to_the_trajectories_that_were_compared():
    mixed_group = [make_trajectory(0, 1.0, num_tokens=10), make_trajectory(0, 0.0, num_tokens=20)]
    equal_group = [make_trajectory(1, 1.0, num_tokens=30), make_trajectory(1, 1.0, num_tokens=40)]
    single = make_trajectory(2, 1.0, num_tokens=50)  # the environment lost its sibling
    failure = make_trajectory(2, 0.0, num_tokens=60)
    failure.stop_reason = "env_error"
    trajectories = [*mixed_group, *equal_group, single, failure]
    usable, num_compared, metrics = select(trajectories, Config())
    assert usable == mixed_group and num_compared == 4
    assert [t.used_in_loss for t in trajectories] == [True] * 2 + [False] * 4
    assert metrics == {"data/policy_tokens": 30, "data/signal_share": 30 / 100}
    _, _, metrics = select(trajectories, Config(loss_agg="seq-mean"))
    assert metrics == {"data/policy_tokens": 30, "data/signal_share": 2 / 4}
    _, _, metrics = select(trajectories, Config(loss_agg="constant"))
    assert metrics["data/signal_share"] == 2 / 4
    keeping = ("kl_coef", 0.1), ("overlong_penalty", 9)
    for changes in ({"skip_zero_variance": False}, *({name: value} for name, value in keeping)):
        usable, _, metrics = select(trajectories, Config(**changes))
        assert usable == mixed_group + equal_group and metrics["data/signal_share"] == 1.0
    usable, num_compared, metrics = select(trajectories, Config(algorithm="ppo"))
    assert usable == [*mixed_group, *equal_group, single] and metrics["data/signal_share"] == 1.0
    assert num_compared == 5


class OneTaskPays(Letters):
    """Only the second task pays a reward, so all other groups are silent."""

    def step(self, action):
        observation, reward, *ends, info = super().step(action)
        return observation, reward * (self.task_index == 1), *ends, info


def test_silent_groups_take_no_optimizer_steps_away_and_few_rows_count_more(tmp_path, monkeypatch):
    """Trap 28: 16 trajectories in mini-batches of 4 are four steps. Only two of them have a signal,
    which is enough for two steps, each with twice the weight."""
    shares, update = [], RLWorker.update

    def update_with_share(self, step, batch, objective, share):
        shares.append(share)
        return update(self, step, batch, objective, share)

    monkeypatch.setattr(RLWorker, "update", update_with_share)
    sizes = {"tasks_per_step": 8, "group_size": 2, "mini_batch_size": 4}
    with serve(OneTaskPays) as url:
        _, run_dir = run_in_process(tmp_path, url, steps=1, deterministic=True, **sizes)
    (line,) = read_metrics(run_dir)
    assert (line["train/trajectories_used"], line["policy/optimizer_steps"]) == (2, 2)
    assert shares == [2 * line["data/signal_share"]]


def test_only_the_groups_with_the_largest_spread_are_kept():
    groups = [
        [make_trajectory(g, r) for r in returns]
        for g, returns in enumerate(([0.0, 1.0], [0.4, 0.6], [0.5, 0.5], [0.0, 0.6]))
    ]
    trajectories = [t for group in groups for t in group]
    usable, num_compared, metrics = select(trajectories, Config(keep_uncertain=0.5))
    assert usable == groups[0] + groups[3] and num_compared == 4
    assert metrics["data/signal_share"] == 1.0
    usable, *_ = select(trajectories[:6], Config(keep_uncertain=0.5))
    assert usable == groups[0] + groups[1], "half of three groups are two"
    silent = [make_trajectory(g, 1.0) for g in (4, 4, 5, 5)]  # groups of the step, too
    usable, num_compared, _ = select([*trajectories, *silent], Config(keep_uncertain=0.5))
    assert usable == groups[0] + groups[1] + groups[3] and num_compared == 6
    usable, num_compared, metrics = select(trajectories, Config(dynamic_sampling=1))
    assert usable == groups[0] + groups[1] + groups[3]
    assert (num_compared, metrics["data/signal_share"]) == (6, 1.0)


def test_tasks_without_signal_are_replaced_from_a_stream_of_their_own(capsys):
    """Group 1 of two is dull, and so is its first replacement. The second round ends the search. A
    lost sample is no signal."""
    c = Config(dynamic_sampling=2, tasks_per_step=2, group_size=2)
    tasks = [Task(f"letters_{i}", i, "", "letters") for i in range(5)]
    played = []

    def roll_out(requests, earlier):
        assert len(earlier) == 4 + sum(map(len, played))
        played.append(requests)
        is_dull = len(played) == 1 or always_dull
        return [
            make_trajectory(r.group_id, float(r.sample % 2 and not is_dull)) for r in requests
        ], 0

    worker = SimpleNamespace(config=c, tasks=tasks, task_outcomes=None, roll_out=roll_out)
    first = [make_trajectory(0, 0.0), make_trajectory(0, 1.0)]
    first += [make_trajectory(1, 1.0), make_trajectory(1, 1.0)]
    for always_dull in (False, True):
        played.clear()
        more = RLWorker.replace_tasks_without_signal(worker, 3, first, {"letters": 3})
        assert [t.group_id for t in more] == [2, 2, 4, 4]
        assert ("1 tasks without signal" in capsys.readouterr().out) == always_dull
    again = more_requests(3, 2, {"letters": 1}, tasks, c, {"letters": 3})
    assert played[1] == again and again[0].seed != played[0][0].seed
    assert {r.step for r in again} == {3}
    played.clear()
    first[3] = make_trajectory(1, 0.0)
    first[3].stop_reason = "env_error"
    more = RLWorker.replace_tasks_without_signal(worker, 3, first, {"letters": 3})
    assert more[0].group_id == 2


def test_a_task_is_replaced_by_one_of_its_environment():
    c = Config(dynamic_sampling=1, tasks_per_step=4, group_size=2)
    tasks = [Task(f"{env}_{i}", i, "", env) for env in ("near", "far") for i in range(5)]
    requests = more_requests(1, 1, {"far": 2, "near": 1}, tasks, c, {"near": 3, "far": 9})
    assert [r.task.env for r in requests] == ["near"] * 2 + ["far"] * 4
    assert [r.group_id for r in requests] == [4, 4, 5, 5, 6, 6]


def test_replaced_tasks_have_random_numbers_of_their_own():
    """Each step and round draws others than the first draw did, and continues its sample numbers,
    on which the sampler's random numbers depend."""
    c = Config(dynamic_sampling=2, tasks_per_step=2, group_size=2)
    tasks, horizons = [Task(f"t_{i}", i, "", "textcraft") for i in range(9)], {"textcraft": 5}
    counts, pairs = {"textcraft": 2}, [(s, n) for s in (1, 2, 3) for n in (1, 2)]
    draws = [more_requests(*pair, counts, tasks, c, horizons) for pair in pairs]
    draws += [requests_of(step, tasks, c, horizons) for step in range(1, 10)]
    seeds = [seed for draw in draws for seed in {r.seed for r in draw}]
    assert len(seeds) == len({*seeds}) == 2 * len(draws)
    for step, n in ((0, 1), (1, 2)):
        assert {r.sample for r in draws[step]} == {4 * n, 4 * n + 1}


def test_the_penalty_for_length_is_paid_on_the_last_policy_token():
    trajectories = [make_trajectory(0, 1.0, num_tokens=n) for n in (6, 9, 5)]
    trajectories[2].stop_reason = "length"  # a long observation did not fit
    batch = make_batch(trajectories, pad_id=0)
    batch.loss_mask[:, -1] = 0
    rewards = batch.token_rewards.clone()
    worker = SimpleNamespace(config=Config(overlong_penalty=4, max_trajectory_tokens=10))
    metrics = RLWorker.penalize_length(worker, batch, trajectories)
    difference = batch.token_rewards - rewards
    assert difference.nonzero().tolist() == [[1, 7], [2, 4]]
    assert (difference[1, 7], difference[2, 4]) == (-0.75, -1.0)
    assert metrics["data/overlong_penalty"] == pytest.approx(1.75 / 3)


def test_returns_that_differ_only_by_rounding_give_no_signal():
    """SciWorld pays in parts, and 0.1 + 0.2 differs from 0.3 in floating point."""
    equal_group = [make_trajectory(0, 0.1, 0.2), make_trajectory(0, 0.3)]
    other_group = [make_trajectory(1, 0.1, 0.2), make_trajectory(1, 0.31)]
    usable, _, _ = select(equal_group + other_group, Config())
    assert [t.group_id for t in usable] == [1, 1]
    assert summarize_trajectories(equal_group)["train/groups_zero_variance"] == 1


def test_shuffled_rewards_are_those_of_valid_trajectories_in_another_order():
    """A lost trajectory would add a return of 0."""
    ts = [make_trajectory(0, 0.0, float(n)) for n in range(1, 9)]
    lost = make_trajectory(0, 0.25, 0.5)
    lost.stop_reason = "env_error"
    shuffle_rewards([*ts, lost], seed=0)
    assert [turn.reward for turn in lost.turns] == [0.25, 0.5]
    returns = [t.total_return for t in ts]
    assert sorted(returns) == [*range(1, 9)] != returns
    assert all(t.turns[0].reward == 0 and t.turns[-1].reward == t.total_return for t in ts)


def test_every_modern_switch_at_once_runs_and_logs_its_share(tmp_path):
    with serve() as url:
        code, run_dir = run_in_process(
            tmp_path,
            url,
            algorithm="gigpo",
            gamma=0.9,
            mini_batch_size=2,
            clip_ratio_high=0.3,
            ratio="sequence",
            loss_agg="constant",
            scale_by_std=False,
            dynamic_sampling=1,
            keep_uncertain=0.5,
        )
    lines = read_metrics(run_dir)
    assert code == 0 and [line["policy/optimizer_steps"] for line in lines] == [1, 1]
    assert all(0 < line["data/anchored_share"] <= 1 for line in lines)
    assert all(line["data/signal_share"] == 1 for line in lines)


def test_a_teacher_equal_to_the_student_teaches_nothing_and_another_tokenizer_is_refused(
    tmp_path, capsys
):
    with serve() as url:
        code, run_dir = run_in_process(tmp_path, url, algorithm="distill", teacher="tiny", steps=1)
        (line,) = read_metrics(run_dir)
        assert code == 0 and abs(line["policy/teacher_kl"]) < 1e-6
        state = run_dir / "checkpoints/step_000001/trainer_state/state.json"
        frozen = {"teacher": weights_digest(Path(resolve_model("tiny")))}
        assert json.loads(state.read_text())["frozen"] == frozen  # a resume compares it
        capsys.readouterr()
        settings = {"algorithm": "distill", "teacher": "recipes/starts/tiny-babyai", "steps": 1}
        (tmp_path / "other").mkdir()
        code, _ = run_in_process(tmp_path / "other", url, **settings)
    assert code == 2
    assert_one_line(capsys.readouterr().err, "has another tokenizer than the policy")


@pytest.mark.parametrize("teacher", ["oracle", "oracle-actions"])
def test_an_oracle_is_imitated_in_the_states_that_the_policy_reaches(tmp_path, teacher):
    with serve() as url:
        settings = {"algorithm": "distill", "teacher": teacher, "learning_rate": 3e-3}
        code, run_dir = run_in_process(tmp_path, url, steps=3, **settings)
    assert code == 0
    losses = [line["policy/loss"] for line in read_metrics(run_dir)]
    assert losses[2] < losses[0]  # nats per token of what the oracle would have written
    for t in read_log(run_dir / "trajectories/step_000001.jsonl"):
        for turn in t["turns"]:  # also after the policy's own first turn
            assert "abc" in turn["advice"]
            assert ("first half" in turn["advice"]) == (teacher == "oracle")


# --- Failures: exit code 1, one line, no step lost -----------------------------------------------


def test_a_server_that_is_not_running_is_named_in_one_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(worker, "EnvPool", partial(EnvPool, timeout_s=1.5, dead_wait_s=0.5))
    with registered():
        code, _ = run_in_process(tmp_path, "http://127.0.0.1:9")
    assert code == 1
    assert_one_line(capsys.readouterr().err, "http://127.0.0.1:9")
    assert not (tmp_path / "run").exists()  # so the same command can be used again


def test_an_engine_failure_is_reported_in_one_line_and_ended_trajectories_are_saved(
    tmp_path, capsys, monkeypatch
):
    calls, poll = [], TransformersEngine.poll

    def failing_poll(engine):
        calls.append(1)
        if len(calls) > 6:  # four first turns, one at a time, then two second turns
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
    ("phase", "error", "contents"),
    [
        ("time/update_s", torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
         ["--max-tokens-per-micro-batch (now 2048)", "--gradient-checkpointing"]),
        ("time/update_s", RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried"),
         ["--max-tokens-per-micro-batch (now 2048)", "--max-trajectory-tokens (now 1536)"]),
        # Another process uses the GPU: none of our options helps, and the error names the process.
        ("loading the models", torch.OutOfMemoryError("CUDA out of memory. Process 4344 has 105"),
         ["in loading the models: CUDA out of memory. Process 4344"]),
    ],
)  # fmt: skip
def test_out_of_memory_is_reported_in_one_line_with_the_options_to_change(phase, error, contents):
    with pytest.raises(OutOfMemory) as error_info, Clock(vars(Config()))(phase):
        raise error
    assert all(words in str(error_info.value) for words in contents)
    with pytest.raises(RuntimeError, match="shapes"), Clock()(phase):
        raise RuntimeError("shapes differ")


@pytest.mark.parametrize("gap", [0.3, math.nan])
def test_a_step_sampled_with_other_weights_than_the_trainers_ends_the_run(
    tmp_path, url, monkeypatch, capsys, gap
):
    """Trap 20: the sampler changed its weights between the sync and the rollout."""
    measured = {"sampler/log_prob_diff_mean": gap}
    monkeypatch.setattr("train.update_policy", lambda *args: update.update_policy(*args) | measured)
    code, path = run_in_process(tmp_path, url, max_sync_error=0.2)
    assert code == 1 and f"differ by {gap:.3f} nats" in capsys.readouterr().err
    (row,) = read_metrics(path)
    assert "sampler/log_prob_diff_mean" in row, "the log says what ended the run"


# --- Ctrl-C --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("phase", "steps"), [("roll_out", []), ("update", [1])])
def test_ctrl_c_ends_a_rollout_at_once_but_an_update_finishes_its_step(
    tmp_path, capsys, monkeypatch, phase, steps
):
    original = getattr(RLWorker, phase)

    def interrupted(*args):
        os.kill(os.getpid(), signal.SIGINT)
        return original(*args)

    monkeypatch.setattr(RLWorker, phase, interrupted)
    with serve() as url:
        code, run_dir = run_in_process(tmp_path, url, steps=3, save_every=3)
    assert code == 130
    last = max(steps, default=0)
    assert f"stopped after step {last}; a checkpoint is saved" in capsys.readouterr().out
    assert checkpoint.steps_saved(run_dir) == [last]
    assert [line["step"] for line in read_metrics(run_dir)] == steps


def test_ctrl_c_before_training_begins_leaves_no_run_behind(tmp_path, capsys, monkeypatch):
    """Ctrl-C interrupts the warm start, which can take minutes."""

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
