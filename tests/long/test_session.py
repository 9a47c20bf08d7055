"""`kill -9`, wherever it strikes: what is resumed ends as if nothing had happened.

A run is a process of its own (tests/train_toy.py) that kills itself at a named place in a named
step. Resumed, it must leave byte for byte what an uninterrupted run leaves: metrics, trajectories,
evaluations, checkpoints, and no file more.
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

QWEN2 = "transformers.models.qwen2.modeling_qwen2"  # what `tiny` is


class Lucky(Letters):
    """Every other random text is a success, so that evaluations differ."""

    def step(self, action):
        observation, reward, terminated, truncated, info = super().step(action)
        info["success"] = terminated and self.score >= 0.5
        return observation, reward, terminated, truncated, info


KILLABLE = {
    "algorithm": "ppo",  # has most to lose: two networks and optimizers, a reference,
    "kl_coef": 0.1,  # and a KL controller
    "kl_target": 0.001,
    "steps": 3,
    "mini_batch_size": 2,
    "deterministic": True,
    "learning_rate": 1e-3,
    "max_tokens_per_turn": 2,
    "eval_every": 1,
    "eval_samples": 1,
    "keep_last": 1,
    "seed": 7,  # see the first test
}


@pytest.fixture(scope="module")
def forkserver():
    """Starts processes that have imported everything: a start takes a second, not ten."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train_toy", "accelerate", "tyro", QWEN2])
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ENVIRON.items():
            patch.setenv(name, value)
        patch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests'}")
        first = context.Process(target=train_toy.forked, args=(["--help"], os.devnull))
        first.start()
        first.join()
    return context


class Runs:
    """Runs of train.py in the served environment, each in a folder of its own."""

    def __init__(self, forkserver, settings):
        self.forkserver, self.settings = forkserver, settings

    def run(self, folder, *before):
        """Begin the run in a folder, or go on with it: its exit code.

        `before` goes to train_toy.py.
        """
        argv = flags(**self.settings | {"run_dir": str(folder / "run")})
        if (folder / "run").exists():
            argv = ["--resume", "--run-dir", str(folder / "run")]
        args = ([*map(str, before), *argv], str(folder / "out"))
        process = self.forkserver.Process(target=train_toy.forked, args=args)
        process.start()
        process.join()
        return process.exitcode

    def kill(self, folder, place, step):
        code = self.run(folder, "--kill-at", place, step)
        assert code == -signal.SIGKILL, (place, (folder / "out").read_text())

    def finish(self, folder):
        """Run it to its end; what it leaves."""
        assert self.run(folder) == 0, (folder / "out").read_text()
        return left_by(folder / "run")


@pytest.fixture(scope="module")
def runs(forkserver, tmp_path_factory):
    folder = tmp_path_factory.mktemp("ids")
    held_out = write_ids(folder / "held_out.json", num_tasks=2)
    with serve(Lucky) as url:
        yield Runs(forkserver, options(folder, url, eval_tasks=held_out, **KILLABLE))


@pytest.fixture(scope="module")
def whole(runs, tmp_path_factory):
    """What a run left to which nothing happened."""
    return runs.finish(tmp_path_factory.mktemp("whole"))


# --- What is compared ----------------------------------------------------------------------------


def left_by(run_dir):
    """Everything that a run wrote, without what a clock has measured."""
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
    """A checkpoint's content, which must be whole."""
    folder = checkpoint.folder_of(run_dir, step)
    with safe_open(folder / "model.safetensors", "pt") as weights:
        assert weights.keys()
    content = {"state": checkpoint.read_state(run_dir, step, {"algorithm": "ppo"})}
    for path in folder.rglob("*"):
        if path.is_file() and path.name not in (".metadata", "state.json"):  # the index has paths
            name = str(path.relative_to(folder))
            content[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return content


def assert_same(left, expected):
    for name in left.keys() | expected.keys():
        assert left[name] == expected[name], name


def test_the_runs_that_are_killed_have_something_to_lose(whole):
    """Step 2 is the best, step 0 is better than step 1, and the KL controller adapts."""
    scores = [json.loads(e)["overall"]["avg"]["value"] for e in whole["evaluations"].values()]
    assert scores[:3] == [0.5, 0.0, 1.0] and whole["best"] == "step_000002"
    assert whole[2]["state"]["kl_controller"] != whole[3]["state"]["kl_controller"]


# --- Killed at a place ---------------------------------------------------------------------------

# Where one run is killed, and killed again each time it is resumed, in which steps.
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
    "with one to go back to": [
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
def test_a_run_that_is_killed_ends_as_if_it_had_not_been(runs, whole, tmp_path, kills):
    for place, step in KILLS[kills]:
        runs.kill(tmp_path, place, step)
    assert_same(runs.finish(tmp_path), whole)
    timed = [row["step"] for row in read_log(tmp_path / "run/timings.jsonl")]
    assert timed == sorted(set(timed))
    assert {1, 2, 3} - set(timed) <= {1, 2}  # a line of times may be lost


def test_an_evaluation_that_ctrl_c_cut_short_is_made_up_for_by_a_run_that_is_killed(
    runs, whole, tmp_path
):
    """The resumed run evaluates step 2, amends its line in the log and marks it as the best."""
    assert runs.run(tmp_path, "--interrupt-at", "in the evaluation", 2) == 130
    assert "eval/avg" not in read_metrics(tmp_path / "run")[-1]
    runs.kill(tmp_path, "while the log is amended", 0)
    runs.kill(tmp_path, "in the rollout", 3)
    # Step 2 was saved before its evaluation, so its state cannot know of it.
    left = runs.finish(tmp_path)
    assert left[2].pop("state") != whole[2]["state"]
    assert_same(left, whole | {2: {k: v for k, v in whole[2].items() if k != "state"}})
