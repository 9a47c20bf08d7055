"""Several environments in one run: the order of tasks, per-environment options, and the log."""

import json
import sys
from collections import Counter
from dataclasses import replace
from statistics import fmean

import pytest
import toy_env
from toy_env import flags, fresh_process_state, read_metrics, train_main

import agentevol
from config import (
    config_per_env,
    evaluation_horizons,
    held_out_tasks,
    horizons_of,
    options,
    tasks_of,
)
from reporting.plots import read_run
from rollout import draw_requests
from run.worker import plan

MODULE = """
from toy_env import Letters


class Near(Letters):
    "Letters of the first half, in two turns."

    NAME = "near"
    LAPTOP = {"tasks": "train", "eval_tasks": "test", "rounds": (2,), "group_size": 2}

    @staticmethod
    def say(thought, action):
        return action


class Far(Near):
    "Letters of the first quarter, in three turns; the reward is divided by ten."

    NAME = "far"
    NUM_TURNS = 3
    PROMPT = [{"role": "system", "content": "Write first letters."}]
    LAPTOP = {"tasks": "train", "eval_tasks": "test", "rounds": (3,), "group_size": 4}

    def reset(self, task_index, seed=0):
        self.total = 0.0
        return super().reset(task_index, seed)

    def step(self, action):
        observation, _, is_over, truncated, info = super().step(action)
        letters = [c for c in action if not c.isspace()]
        reward = sum(c in "abcdefg" for c in letters) / max(len(letters), 1) / self.NUM_TURNS
        self.total += reward
        info["success"] = is_over and self.total >= 0.9
        return observation, 0.1 * reward, is_over, truncated, info


class Twin(Near):
    ID_PREFIXES = ("near",)
    NAME = "twin"
"""
NAMES = ("mixed_envs:Near", "mixed_envs:Far")
LOCAL = ("near=local", "far=local")


@pytest.fixture
def env_names(tmp_path, monkeypatch):
    """Two environments outside the project, with their id lists; returns their names."""
    (tmp_path / "mixed_envs.py").write_text(MODULE)
    (tmp_path / "ids").mkdir()
    for name, prefix in (("near", "near"), ("far", "far"), ("twin", "near")):
        for split, indices in (("train", range(5)), ("test", range(5, 8))):
            ids = [{"item_id": f"{prefix}_{index}"} for index in indices]
            (tmp_path / "ids" / f"{name}_{split}.json").write_text(json.dumps(ids))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("AGENT_RL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delitem(sys.modules, "mixed_envs", raising=False)
    return NAMES


def run_arguments(folder, **changes):
    """Command-line arguments of a run in both environments, with their own lists and horizons."""
    shared = {"env": NAMES, "env_addr": LOCAL, "tasks_per_step": 3, "env_weights": (2, 1)}
    settings = toy_env.options(folder, "", **shared, **changes)
    for name in {"tasks", "eval_tasks", "rounds", "group_size"} - changes.keys():
        del settings[name]
    return flags(**settings)


def json_lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_each_environment_has_its_lists_and_horizon_and_shares_all_other_options(env_names):
    config = options(
        "+".join(env_names), env_addr=("far=local", "near=http://a:1", "near=http://b:1")
    )
    near, far = config_per_env(config)
    assert (near.rounds, far.rounds) == ((2,), (3,))
    assert (near.env_addr, far.env_addr) == (("http://a:1", "http://b:1"), ("local",))
    assert (near.tasks, near.eval_tasks) == ("train", "test")
    assert near.group_size == far.group_size == config.group_size == 4, "the largest"
    assert [t.task_id for t in tasks_of(config)][4:6] == ["near_4", "far_0"]
    assert Counter(t.env for t in held_out_tasks(config)) == {"near": 3, "far": 3}
    requests = draw_requests(4, tasks_of(config), 6, 2, 0, 4, horizons_of(config), (2, 1))
    assert Counter((r.task.env, r.max_rounds) for r in requests) == {("near", 2): 8, ("far", 3): 4}
    assert horizons_of(replace(config, rounds=(7,))) == {"near": 7, "far": 7}
    assert evaluation_horizons(replace(config, eval_rounds=9)) == {"near": 9, "far": 9}
    assert "up to 2 and 3 turns" in plan(config, "runs/x", 10, 6)[0]


def test_two_environments_that_share_a_task_id_are_refused(env_names):
    config = options(f"{NAMES[0]}+mixed_envs:Twin")
    with pytest.raises(ValueError, match="near and twin both have a task near_0;"):
        tasks_of(config)


def test_a_run_plays_evaluates_and_logs_every_environment(env_names, tmp_path, capsys):
    folder = tmp_path / "run"
    argv = run_arguments(tmp_path, eval_every=2, eval_samples=1)
    assert train_main(argv) == 0
    output = capsys.readouterr().out
    assert "held-out success in near" in output and "held-out success in far" in output
    lines = json_lines(folder / "trajectories" / "step_000001.jsonl")
    counts = Counter((line["env"], line["max_rounds"], len(line["turns"])) for line in lines)
    assert counts == {(NAMES[0], 2, 2): 8, (NAMES[1], 3, 3): 4}, "2 tasks and 1 task, 4 samples"
    prompts = {line["env"]: line["messages"][0]["content"] for line in lines}
    assert prompts == {NAMES[0]: "Write letters.", NAMES[1]: "Write first letters."}
    row = read_metrics(folder)[-1]
    for name in ("train/return_mean", "train/turns_mean"):
        assert row[f"{name}/near"] != row[f"{name}/far"]
    assert row["horizon/max_rounds"] == 3
    assert (row["horizon/max_rounds/near"], row["horizon/max_rounds/far"]) == (2, 3)
    assert row["eval/avg"] == pytest.approx(fmean([row["eval/avg/near"], row["eval/avg/far"]]))
    summary = json.loads((folder / "eval" / "step_000002.json").read_text())
    assert [row["items"] for row in summary["worlds"].values()] == [3, 3]
    run_files = read_run(folder)
    assert run_files.envs() == ["far", "near"]
    assert [step for step, _ in run_files.held_out_in("far")] == [0, 2]


def test_agentevol_explores_every_environment(env_names, tmp_path):
    changes = dict(iterations=1, tasks_per_iteration=3, group_size=2, num_demonstrations=2)
    argv = run_arguments(tmp_path, min_return=0.001, keep_per_task=1, **changes)
    index = argv.index("--tasks-per-step")
    with fresh_process_state():
        assert agentevol.command_line(argv[:index] + argv[index + 2 :]) == 0
    lines = json_lines(tmp_path / "run" / "evolving" / "iteration_001.jsonl")
    counts = Counter((line["origin"], line["item_id"].partition("_")[0]) for line in lines)
    assert {env for _, env in counts} == {"near", "far"} and len(counts) == 4, counts
