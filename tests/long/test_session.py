"""A run that is killed with `kill -9` at any point and resumed ends like an uninterrupted run.

Each run is a separate process (tests/train_toy.py) that kills itself at a given place in a given
step. After it is resumed, its files must equal those of an uninterrupted run byte for byte:
metrics, trajectories, evaluations, checkpoints. There must be no other files.
"""

import hashlib
import json
import multiprocessing
import os
import signal

import pytest
import train_toy
from safetensors import safe_open
from test_distributed import ENVIRON, ROOT
from toy_env import Letters, flags, options, read_metrics, serve, write_ids

from reporting.logs import read_log
from run import checkpoint

pytestmark = pytest.mark.long

QWEN2 = "transformers.models.qwen2.modeling_qwen2"  # the architecture of `tiny`


class Lucky(Letters):
    """About half of all random texts succeed, so that evaluations differ."""

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        info["success"] = terminated and self.score >= 0.5
        return observation, reward, terminated, truncated, info


KILLABLE = {
    "algorithm": "ppo",  # it has the most state: two networks and optimizers, a reference,
    "kl_coef": 0.1,
    "task_sampling": "uncertain",  # and the tasks' outcomes
    "steps": 3,
    "mini_batch_size": 2,
    "deterministic": True,
    "learning_rate": 1e-3,
    "max_tokens_per_turn": 2,
    "eval_every": 1,
    "eval_samples": 1,
    "keep_last": 1,
    "seed": 61,  # see the first test
}


@pytest.fixture(scope="module")
def forkserver():
    """Starts processes with all modules imported, so that a start takes one second, not ten."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train_toy", "accelerate", "tyro", QWEN2])
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRON.items():
            patch.setenv(name, value)
        patch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests'}")
        first = context.Process(target=train_toy.main_in_fork, args=(["--help"], os.devnull))
        first.start()
        first.join()
    return context


class Runs:
    """Starts runs of train.py in the served environment, each in a given folder."""

    def __init__(self, forkserver, settings):
        self.forkserver, self.settings = forkserver, settings

    def run(self, folder, *toy_options):
        """Start the run in a folder, or resume it; returns its exit code. `toy_options` are
        options of train_toy.py."""
        argv = flags(**self.settings | {"run_dir": str(folder / "run")})
        if (folder / "run").exists():
            argv = ["--resume", "--run-dir", str(folder / "run")]
        args = ([*map(str, toy_options), *argv], str(folder / "out"))
        process = self.forkserver.Process(target=train_toy.main_in_fork, args=args)
        process.start()
        process.join()
        return process.exitcode

    def kill(self, folder, place, step):
        code = self.run(folder, "--kill-at", place, step)
        assert code == -signal.SIGKILL, (place, (folder / "out").read_text())

    def finish(self, folder):
        """Run it to the end; returns the content of its files."""
        assert self.run(folder) == 0, (folder / "out").read_text()
        return files_of(folder / "run")


@pytest.fixture(scope="module")
def runs(forkserver, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ids")
    held_out = write_ids(folder / "held_out.json", num_tasks=2)
    with serve(Lucky) as url:
        yield Runs(forkserver, options(folder, url, eval_tasks=held_out, **KILLABLE))


@pytest.fixture(scope="module")
def uninterrupted(runs, tmp_path_factory):
    """The content of an uninterrupted run's files."""
    return runs.finish(tmp_path_factory.mktemp("uninterrupted"))


# --- Content of a run's files --------------------------------------------------------------------


def files_of(run_dir):
    """The content of all files of a run, except for measured times."""
    trajectories = {}
    for path in sorted((run_dir / "trajectories").iterdir()):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        for line in lines:
            for turn in line["turns"]:
                del turn["generate_s"], turn["env_s"]
        trajectories[path.name] = lines
    return {
        "metrics": (run_dir / "metrics.jsonl").read_text(),
        "trajectories": trajectories,
        "evaluations": {p.name: p.read_text() for p in sorted((run_dir / "eval").iterdir())},
        "best": os.readlink(run_dir / "checkpoints/best"),
        "files": sorted(str(p.relative_to(run_dir)) for p in run_dir.rglob("*")),
        **{step: content_of(run_dir, step) for step in checkpoint.steps_saved(run_dir)},
    }


def content_of(run_dir, step):
    """The content of a checkpoint, which must be complete."""
    folder = checkpoint.folder_of(run_dir, step)
    with safe_open(folder / "model.safetensors", "pt") as weights:
        assert weights.keys()
    content = {"state": checkpoint.read_state(run_dir, step, {"algorithm": "ppo"})}
    with_paths = (".metadata", "state.json", "SHA256SUMS")  # the sums include that of the index
    for path in folder.rglob("*"):
        if path.is_file() and path.name not in with_paths:
            name = str(path.relative_to(folder))
            content[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return content


def assert_equal(files, expected):
    for name in files.keys() | expected.keys():
        assert files[name] == expected[name], name


def test_the_runs_have_state_that_a_kill_could_lose(uninterrupted):
    """Step 2 is the best, step 0 is better than step 1, and outcomes are counted."""
    evaluations = uninterrupted["evaluations"].values()
    scores = [json.loads(e)["overall"]["avg"]["value"] for e in evaluations]
    assert scores[:3] == [0.5, 0.0, 1.0] and uninterrupted["best"] == "step_000002"
    states = [uninterrupted[step]["state"] for step in (2, 3)]
    assert states[0]["task_outcomes"] != states[1]["task_outcomes"]


# --- Kills ---------------------------------------------------------------------------------------

# Places and steps at which one run is killed, each time after it was resumed.
KILLS = {
    "before there is a checkpoint": [
        ("between the evaluation's two files", 0),
        ("in the rollout", 1),
        ("between two optimizer steps", 1),
        ("between logging and saving", 1),
        ("while the log is truncated", 0),
        ("in the middle of the optimizer's file", 1),
        ("before the checkpoint gets its name", 1),
    ],
    "with a checkpoint to resume from": [
        ("between saving and the timings", 1),
        ("while weights are restored", 0),
        ("between two optimizer steps", 2),
        ("in the evaluation", 2),
        ("between logging and saving", 2),
        ("while the best is marked", 2),
        ("in the middle of pruning", 0),
    ],
}


@pytest.mark.parametrize("kills", KILLS)
def test_a_killed_and_resumed_run_ends_like_an_uninterrupted_one(
    runs, uninterrupted, tmp_path, kills
):
    for place, step in KILLS[kills]:
        runs.kill(tmp_path, place, step)
    assert_equal(runs.finish(tmp_path), uninterrupted)
    steps = [row["step"] for row in read_log(tmp_path / "run/timings.jsonl")]
    assert steps == sorted(set(steps))
    assert {1, 2, 3} - set(steps) <= {1, 2}  # a line of timings can be lost


def test_a_killed_and_resumed_run_repeats_an_evaluation_that_ctrl_c_interrupted(
    runs, uninterrupted, tmp_path
):
    """The resumed run evaluates step 2, adds it to the log's line and marks step 2 as the best."""
    assert runs.run(tmp_path, "--interrupt-at", "in the evaluation", 2) == 130
    assert "eval/avg" not in read_metrics(tmp_path / "run")[-1]
    runs.kill(tmp_path, "while the log is amended", 0)
    runs.kill(tmp_path, "in the rollout", 3)
    # Step 2 was saved before its evaluation, so its state does not contain the result.
    files = runs.finish(tmp_path)
    assert files[2].pop("state") != uninterrupted[2]["state"]
    checkpoint_2 = {k: v for k, v in uninterrupted[2].items() if k != "state"}
    assert_equal(files, uninterrupted | {2: checkpoint_2})
