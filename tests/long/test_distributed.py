"""Complete runs with several processes: resume, Ctrl-C, one process, a vLLM per rank."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from test_distributed import ENVIRON, LAUNCH, ROOT, launch, settings_for, trajectories
from toy_env import Letters, flags, options, read_metrics, saved_tensors, serve, train_main

from run import checkpoint

pytestmark = pytest.mark.long


def run_on(ranks, argv):
    if ranks == 0:  # without a launcher
        assert train_main(argv) == 0
    else:
        code, _, stderr = launch("tests/train_toy.py", *argv, ranks=ranks)
        assert code == 0, stderr


def test_a_launcher_with_one_process_gives_the_same_run_as_no_launcher(tmp_path):
    runs = {}
    with serve() as url:
        for name, ranks in (("launcher", 1), ("no launcher", 0)):
            settings = settings_for(tmp_path / name, url, algorithm="ppo")
            runs[name] = Path(settings["run_dir"])
            run_on(ranks, flags(**settings))
    metrics = {name: (run / "metrics.jsonl").read_bytes() for name, run in runs.items()}
    assert metrics["launcher"] == metrics["no launcher"]
    tensors = {name: saved_tensors(run, 2)["model"] for name, run in runs.items()}
    for name, tensor in tensors["no launcher"].items():
        assert torch.equal(tensors["launcher"][name], tensor), name


def test_a_run_can_be_resumed_with_another_number_of_processes(tmp_path):
    """The weights, the optimizer's moments and the position in the data are restored."""
    with serve() as url:
        changes = {"steps": 3, "algorithm": "ppo", "kl_coef": 0.01, "eval_every": 0}
        uninterrupted = settings_for(tmp_path / "uninterrupted", url, **changes)
        run_on(0, flags(**uninterrupted))
        settings = settings_for(tmp_path, url, **changes)
        run_on(0, flags(**(settings | {"steps": 1})))
        for ranks, steps in ((2, "2"), (0, "3")):
            run_on(ranks, ["--resume", "--run-dir", settings["run_dir"], "--steps", steps])
    runs = [Path(options["run_dir"]) for options in (uninterrupted, settings)]
    lines = [read_metrics(run) for run in runs]
    assert len(lines[1]) == 3
    for name in ("train/return_mean", "policy/loss", "policy/kl", "critic/loss", "data/epoch"):
        assert lines[1][2][name] == pytest.approx(lines[0][2][name], rel=1e-3, abs=1e-5), name
    for part in ("policy", "critic"):
        a, b = (saved_tensors(run, 3, part) for run in runs)
        for name, tensor in a["model"].items():
            torch.testing.assert_close(b["model"][name], tensor, rtol=1e-2, atol=1e-4)
        assert a["optimizer"]["state"].keys() == b["optimizer"]["state"].keys()


class Slow(Letters):
    """An environment that is slow, so a rollout can be interrupted."""

    def step(self, action):
        time.sleep(0.2)
        return super().step(action)


def test_ctrl_c_saves_once(tmp_path):
    """The terminal interrupts every process, and the launcher sends a second signal."""
    with serve(Slow) as url:
        settings = settings_for(tmp_path, url, steps=50, eval_every=0, save_every=50)
        process = subprocess.Popen(
            [*LAUNCH, "2", "tests/train_toy.py", *flags(**settings)],
            cwd=ROOT,
            env=ENVIRON,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        log = Path(settings["run_dir"]) / "metrics.jsonl"
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and not (log.exists() and log.read_text().strip()):
            time.sleep(0.1)
        os.killpg(process.pid, signal.SIGINT)
        stdout, stderr = process.communicate(timeout=60)
    assert "--resume" in stdout, stderr
    steps = checkpoint.steps_saved(Path(settings["run_dir"]))
    assert [read_metrics(settings["run_dir"])[-1]["step"]] == steps


def run_with_vllm(tmp_path, **changes):
    """Run two processes whose samplers get each step's weights; returns (run folder, actions)."""
    settings = options(
        tmp_path,
        "http://127.0.0.1:9",
        env="textcraft",
        engine="vllm",
        algorithm="reinforce_plus_plus",
        entropy_coef=0.01,
        learning_rate=1e-3,
        steps=2,
        max_tokens_per_turn=8,
        max_trajectory_tokens=1000,
        eval_every=2,
        eval_samples=1,
        **changes,
    )
    del settings["env_addr"]  # every rank also starts an environment server
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps([{"item_id": "textcraft_31"}, {"item_id": "textcraft_32"}]))
    code, stdout, stderr = launch("train.py", *flags(**settings), timeout=280)
    assert code == 0, stdout + stderr
    for line in read_metrics(settings["run_dir"]):
        assert line["policy/optimizer_steps"] == 1
        assert line["train/trajectories_used"] == 4
        assert line["sampler/log_prob_diff_mean"] < 0.05
        assert line["sync/log_prob_diff_mean"] < 0.05
    assert "eval/avg" in line
    assert checkpoint.steps_saved(Path(settings["run_dir"])) == [1, 2]
    first = trajectories(settings["run_dir"], 1)
    return Path(settings["run_dir"]), {t["turns"][0]["action_text"] for t in first}


def test_every_rank_samples_with_a_separate_vllm(tmp_path):
    _, actions = run_with_vllm(tmp_path)
    assert len(actions) == 4  # the engines use different random numbers
