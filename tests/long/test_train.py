"""Ctrl-C during a rollout of train.py."""

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from toy_env import flags, options, read_metrics, serve

from envs.textcraft.env import TextCraft
from run import checkpoint

pytestmark = pytest.mark.long
ROOT = Path(__file__).parents[2]


def test_ctrl_c_during_a_rollout_saves_and_prints_a_command_that_resumes_the_run(tmp_path):
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
        command = [sys.executable, "train.py", *flags(**settings)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)
        deadline = time.monotonic() + 120
        while len(resets) < 5 and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)  # one reset checks the token budget, four start the rollout
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
        assert process.returncode == 130, out + err
        assert "Traceback" not in err
        assert err.strip() == "stopping; press Ctrl-C again to exit without saving"
        assert "stopped after step 0; a checkpoint is saved" in out
        run_dir = Path(settings["run_dir"])
        assert checkpoint.steps_saved(run_dir) == [0]
        assert read_metrics(run_dir) == []

        command = shlex.split(out.splitlines()[-1])
        second_run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert second_run.returncode == 0, second_run.stdout + second_run.stderr
    assert "resumed after step 0" in second_run.stdout
    assert [line["step"] for line in read_metrics(run_dir)] == [1]
    assert checkpoint.steps_saved(run_dir) == [0, 1]
