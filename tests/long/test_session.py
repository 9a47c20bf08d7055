"""`kill -9`, wherever it strikes: what is resumed ends as if nothing had happened.

A run is a process of its own (tests/train_toy.py) that kills itself at a named place in a named
step, or is killed from outside at a random moment. Resumed, it must leave byte for byte what an
uninterrupted run leaves: metrics, trajectories, evaluations, checkpoints, and no file more.
"""

import hashlib
import json
import multiprocessing
import os
import random
import signal
import time

import pytest
import train_toy
from safetensors import safe_open
from test_distributed import CALM, ROOT
from toy_env import Letters, flags, options, read_metrics, serve, write_ids

from reporting.logs import read_log
from run import checkpoint

pytestmark = pytest.mark.long

QWEN2 = "transformers.models.qwen2.modeling_qwen2"  # what `tiny` is
SIGKILLED = -signal.SIGKILL


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
    "mini_batch_size": 2,
    "deterministic": True,
    "learning_rate": 1e-3,
    "max_tokens_per_turn": 2,
    "eval_every": 1,
    "eval_samples": 1,
    "keep_last": 9,
    "seed": 7,  # see the first test
}


@pytest.fixture(scope="module")
def forkserver():
    """Starts processes that have imported everything: a start takes a second, not ten."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train_toy", "accelerate", "tyro", QWEN2])
    with pytest.MonkeyPatch.context() as patch:
        for name, value in CALM.items():
            patch.setenv(name, value)
        patch.setenv("PYTHONPATH", f"{ROOT}:{ROOT / 'tests'}")
        first = context.Process(target=train_toy.forked, args=(["--help"], os.devnull))
        first.start()
        first.join()
    return context


class Runs:
    """Runs of train.py in the served environment, each in a folder of its own."""

    def __init__(self, url, held_out, forkserver, new_folder):
        self.url, self.held_out, self.forkserver = url, held_out, forkserver
        self.new_folder, self.whole = new_folder, {}

    def settings(self, folder, **changes):
        folder.mkdir(exist_ok=True)
        return options(folder, self.url, **(KILLABLE | {"eval_tasks": self.held_out} | changes))

    def start(self, folder, *argv):
        (folder / "watch").unlink(missing_ok=True)
        argv = ["--watch", str(folder / "watch"), *map(str, argv)]
        args = (argv, str(folder / "out"))
        process = self.forkserver.Process(target=train_toy.forked, args=args)
        process.start()
        return process

    def run(self, folder, *argv):
        """The exit code."""
        process = self.start(folder, *argv)
        process.join()
        return process.exitcode

    def resume(self, folder, *before):
        return self.run(folder, *before, "--resume", "--run-dir", folder / "run")

    def uninterrupted(self, **changes):
        """Where a run with these options lies to which nothing happens, and what it leaves."""
        key = str(changes)
        if key not in self.whole:
            folder = self.new_folder("whole")
            assert self.run(folder, *flags(**self.settings(folder, **changes))) == 0
            self.whole[key] = folder, left_by(folder / "run")
        return self.whole[key]

    def kill(self, folder, place, step, **changes):
        """Start a run that dies at a place, or resume it if it is there."""
        begin = flags(**self.settings(folder, **changes))
        if (folder / "run").exists():
            begin = ["--resume", "--run-dir", folder / "run"]
        assert self.run(folder, "--kill-at", place, step, *begin) == SIGKILLED, output(folder)
        assert_nothing_half_written(folder / "run")

    def go_on(self, folder):
        """Resume it to its end; what it left."""
        assert self.resume(folder) == 0, output(folder)
        return left_by(folder / "run")


@pytest.fixture(scope="module")
def runs(forkserver, tmp_path_factory):
    held_out = write_ids(tmp_path_factory.mktemp("ids") / "held_out.json", num_tasks=2)
    with serve(Lucky) as url:
        yield Runs(url, held_out, forkserver, tmp_path_factory.mktemp)


def output(folder):
    return (folder / "out").read_text()


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
    best = run_dir / "checkpoints/best"
    return {
        "metrics": (run_dir / "metrics.jsonl").read_bytes(),
        "alarms": (run_dir / "alarms.jsonl").read_bytes(),
        "trajectories": trajectories,
        "evaluations": {p.name: p.read_text() for p in sorted((run_dir / "eval").iterdir())},
        "best": os.readlink(best) if best.is_symlink() else None,
        "checkpoints": {p.name: content_of(p) for p in folders(run_dir)},
        "files": sorted(str(p.relative_to(run_dir)) for p in run_dir.rglob("*")),
    }


def folders(run_dir):
    return sorted((run_dir / "checkpoints").glob("step_*"))


def content_of(folder):
    """A checkpoint's content; `read_state` refuses one that is not whole."""
    run_dir, step = folder.parents[1], int(folder.name.removeprefix("step_"))
    state = checkpoint.read_state(run_dir, step, {"algorithm": "ppo"})
    with safe_open(folder / "model.safetensors", "pt") as weights:
        assert weights.keys()
    files = [p for p in folder.rglob("*") if p.is_file()]
    return {"state": state} | {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in files
        if p.name not in (".metadata", "state.json")  # torch's index holds paths
    }


def assert_same(left, expected):
    for name in ("metrics", "trajectories", "evaluations", "best", "files"):
        assert left[name] == expected[name], name
    for step, content in expected["checkpoints"].items():
        for name, value in content.items():
            assert left["checkpoints"][step][name] == value, (step, name)
    assert left["checkpoints"].keys() == expected["checkpoints"].keys()


def assert_nothing_half_written(run_dir):
    """What a process that was killed leaves to whoever looks before it is resumed."""
    for folder in folders(run_dir):
        content_of(folder)
    best = run_dir / "checkpoints/best"
    assert not best.is_symlink() or best.exists()
    for path in [*run_dir.glob("trajectories/[!.]*"), *run_dir.glob("metrics.jsonl")]:
        assert all(json.loads(line) for line in path.read_text().splitlines())
    for path in run_dir.glob("eval/[!.]*"):
        json.loads(path.read_text())


def test_the_runs_that_are_killed_have_something_to_lose(runs):
    """Step 2 is the best, step 0 is better than step 1, and the KL controller adapts."""
    _, left = runs.uninterrupted(steps=2)
    scores = [json.loads(e)["overall"]["avg"]["value"] for e in left["evaluations"].values()]
    assert scores == [0.5, 0.0, 1.0]
    assert left["best"] == "step_000002"
    states = [content["state"] for content in left["checkpoints"].values()]
    assert [s["best_step"] for s in states] == [0, 2]
    assert states[0]["kl_controller"] != states[1]["kl_controller"]
    assert len(left["metrics"].splitlines()) == 2


# --- Killed at a place ---------------------------------------------------------------------------


def slow(*case):
    return pytest.param(case, marks=pytest.mark.slow)


# Where a run is killed, and killed again when it is resumed, in which steps.
KILLS = [
    [("between the evaluation's two files", 0)],
    [("in the rollout", 1)],  # there is no checkpoint to go back to
    [("between the policy's log-probs and the critic's", 2)],
    [("between two optimizer steps", 2)],
    [("in the middle of the weight sync", 2)],
    [("in the evaluation", 2)],
    slow(("before the step is logged", 2)),
    [("between logging and saving", 2)],
    [("after the policy's files", 2)],
    [("in the middle of the optimizer's file", 2)],
    slow(("before the checkpoint gets its name", 2)),
    [("before the best is marked", 2)],
    slow(("while the best is marked", 2)),
    slow(("before pruning", 1)),
    slow(("between saving and the timings", 1)),
    slow(("before the picture is drawn", 1)),
    [("in the rollout", 2), ("while weights are restored", 0)],
    [("between logging and saving", 2), ("while the log is truncated", 0)],
    [
        ("in the middle of the optimizer's file", 1),
        ("after the policy's files", 1),
        ("in the evaluation", 2),
        ("between saving and the timings", 2),
    ],
]


@pytest.mark.parametrize("places", KILLS, ids=lambda places: places[-1][0])
def test_a_run_that_is_killed_ends_as_if_it_had_not_been(runs, tmp_path, places):
    _, expected = runs.uninterrupted(steps=2)
    for place, step in places:
        runs.kill(tmp_path, place, step, steps=2)
    assert_same(runs.go_on(tmp_path), expected)
    timed = [row["step"] for row in read_log(tmp_path / "run/timings.jsonl")]
    assert timed == sorted(set(timed))
    lost = {1, 2} - set(timed)  # a line of times may be lost
    assert lost <= {step for _, step in places}


@pytest.mark.parametrize("place", ["before pruning", "in the middle of pruning"])
def test_a_run_killed_before_it_has_tidied_up_is_tidied_up_on_resume(runs, tmp_path, place):
    """It was the last step: no other one saves, marks the best and prunes."""
    _, expected = runs.uninterrupted(steps=2, keep_last=1)
    assert list(expected["checkpoints"]) == ["step_000002"]
    runs.kill(tmp_path, place, 2, steps=2, keep_last=1)
    assert_same(runs.go_on(tmp_path), expected)


@pytest.mark.parametrize(
    ("place", "step"),
    [
        ("while the log is amended", 0),
        ("in the rollout", 3),
    ],
)
def test_an_evaluation_that_ctrl_c_cut_short_is_made_up_for_by_a_run_that_is_killed(
    runs, tmp_path, place, step
):
    """The resumed run evaluates step 2, amends its line in the log and marks it as the best."""
    _, expected = runs.uninterrupted(steps=3)
    argv = flags(**runs.settings(tmp_path, steps=3))
    assert runs.run(tmp_path, "--interrupt-at", "in the evaluation", 2, *argv) == 130
    assert "eval/avg" not in read_metrics(tmp_path / "run")[-1]
    runs.kill(tmp_path, place, step)
    left = runs.go_on(tmp_path)
    # Step 2 was saved before its evaluation, so its state cannot know of it.
    others = {k: v for k, v in expected["checkpoints"].items() if k != "step_000002"}
    assert left["checkpoints"].pop("step_000002")
    assert_same(left, expected | {"checkpoints": others})


# --- Killed at random moments --------------------------------------------------------------------


def moments(folder):
    """[(seconds, step, phase)] of the last process: what it was doing from when on."""
    path = folder / "watch"
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [(float(when), int(step), phase) for when, step, phase in lines]


def start_of_rollout(folder):
    return next((when for when, step, _ in moments(folder) if step == 1), None)


@pytest.mark.slow
@pytest.mark.parametrize("case", range(20))
def test_a_run_killed_at_a_random_moment_ends_as_if_it_had_not_been(runs, tmp_path, case):
    """At any moment between the first rollout and the end, drawn with the case as the seed."""
    changes = {"steps": 4, "save_every": 1 + case % 2, "keep_last": 1 + case // 2 % 2}
    whole, expected = runs.uninterrupted(**changes)
    delay = random.Random(case).uniform(0, moments(whole)[-1][0] - start_of_rollout(whole))
    exitcode, attempt = None, 0
    while exitcode != SIGKILLED:  # on a machine that has become faster a run may end first
        attempt += 1
        folder = tmp_path / str(attempt)
        process = runs.start(folder, *flags(**runs.settings(folder, **changes)))
        while process.is_alive() and start_of_rollout(folder) is None:
            time.sleep(0.005)
        time.sleep(max(0.0, start_of_rollout(folder) + delay - time.monotonic()))
        process.kill()
        process.join()
        exitcode, delay = process.exitcode, delay / 2
    print(f"killed in {moments(folder)[-1]}")
    assert_nothing_half_written(folder / "run")
    assert_same(runs.go_on(folder), expected)
