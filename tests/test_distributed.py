"""scale/distributed.py: two processes with a sharded model give the same numbers as one."""

import json
import os
import subprocess
import sys
import weakref
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import two_ranks
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from toy_env import flags, options, read_metrics, serve, train_main

from reporting.logs import read_log
from run import checkpoint
from run.errors import Misuse
from scale import distributed
from train import RLWorker

ROOT = Path(__file__).parents[1]
LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
ENVIRON = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TQDM_DISABLE": "1"}
SMALL = {
    "deterministic": True,
    "tasks_per_step": 4,
    "group_size": 3,
    "learning_rate": 1e-3,
    "kl_loss_coef": 0.1,
    "eval_every": 2,
    "eval_samples": 1,
}


def launch(script, *argv, ranks=2, timeout=120):
    """Run `script` as several processes: (exit code, stdout, stderr)."""
    command = [*LAUNCH, str(ranks), str(ROOT / script), *argv]
    process = subprocess.run(
        command, cwd=ROOT, env=ENVIRON, capture_output=True, text=True, timeout=timeout
    )
    return process.returncode, process.stdout, process.stderr


def error_lines(stderr):
    """The lines that train.py wrote to stderr, without the launcher's report."""
    return [line for line in stderr.splitlines() if line.startswith("train.py: ")]


def settings_for(tmp_path, url, **changes):
    tmp_path.mkdir(exist_ok=True)
    return options(tmp_path, url, **(SMALL | changes))


def trajectories(run_dir, step):
    return read_log(Path(run_dir) / f"trajectories/step_{step:06d}.jsonl")


# --- An update on the same trajectories ----------------------------------------------------------


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """case -> (result of one process, result of two processes)."""
    cases = json.dumps(list(two_ranks.CASES))
    folders = [tmp_path_factory.mktemp(name) for name in ("one", "two")]
    command = [sys.executable, "tests/two_ranks.py", str(folders[0]), cases]
    subprocess.run(command, cwd=ROOT, env=ENVIRON, check=True, capture_output=True)
    code, _, stderr = launch("tests/two_ranks.py", str(folders[1]), cases)
    assert code == 0, stderr
    return {
        case: tuple(torch.load(f / f"{case}.pt", weights_only=False) for f in folders)
        for case in two_ranks.CASES
    }


@pytest.mark.parametrize("case", two_ranks.CASES)
def test_two_processes_take_the_same_step_as_one(results, case):
    """With a large learning rate, a difference in any gradient shows in the weights (trap 14)."""
    single, sharded = results[case]
    assert (single["ranks"], sharded["ranks"]) == (1, 2)
    assert single["kinds"] == ["Parameter"]
    assert sharded["kinds"] == ["DTensor"]
    for name, value in single["metrics"].items():
        assert sharded["metrics"][name] == pytest.approx(value, rel=1e-5, abs=1e-7), name
    for name, scores in single["scores"].items():
        torch.testing.assert_close(sharded["scores"][name], scores, rtol=1e-5, atol=1e-5)
    start = dict(two_ranks.make_policy(two_ranks.CASES[case][1]).named_parameters())
    change = 0.0
    for name, weight in single["weights"].items():
        largest = weight.abs().max()
        torch.testing.assert_close(sharded["weights"][name], weight, rtol=0, atol=1e-5 * largest)
        if name.startswith("policy."):
            before = start[name.removeprefix("policy.")].detach()
            change = max(change, float((weight - before).abs().max()))
    if case == "not finite":
        assert change == 0.0
        assert sharded["metrics"]["policy/skipped_steps"] == 1
    else:
        assert change > 1e-3
    if case == "epochs":  # trap 3: 11 rows in mini-batches of 4 are 3 steps per epoch
        assert sharded["metrics"]["policy/optimizer_steps"] == 6


def test_each_of_two_ranks_holds_half_of_the_parameters_and_of_the_optimizer(results):
    single, sharded = (result["held"] for result in results["adam"])
    assert (len(single), len(sharded)) == (1, 2)
    assert single[0]["optimizer"] == 2 * single[0]["parameters"]  # Adam's two moments
    for kind in ("parameters", "optimizer"):
        assert sum(rank[kind] for rank in sharded) == single[0][kind]
        for rank in sharded:
            assert rank[kind] == pytest.approx(single[0][kind] / 2, rel=0.02)


# --- Work and communication ----------------------------------------------------------------------


@given(st.lists(st.integers(1, 10_000), max_size=40), st.integers(1, 9))
def test_every_item_is_dealt_once_and_hands_differ_by_at_most_one(costs, ranks):
    hands = distributed.deal(costs, ranks)
    assert sorted(i for hand in hands for i in hand) == list(range(len(costs)))
    sizes = [len(hand) for hand in hands]
    assert max(sizes) - min(sizes) <= 1
    if costs:
        loads = [sum(costs[i] for i in hand) for hand in hands]
        assert max(loads) - min(loads) <= 2 * max(costs)


def test_all_ranks_have_the_same_number_of_passes_and_each_micro_batch_counts_once(monkeypatch):
    """If one rank had fewer passes, the others would wait in a collective for ever."""
    monkeypatch.setattr(distributed, "world_size", lambda: 3)
    for num_cuts in (1, 3, 5):
        passes = []
        for rank in range(3):
            monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
            cuts = [[i] for i in range(num_cuts)]
            passes.append(distributed.rank_passes(cuts, range(10, 10 + num_cuts)))
        assert len({len(of_rank) for of_rank in passes}) == 1
        rows = sorted(rows[0] for of_rank in passes for rows, counts in of_rank if counts)
        assert rows == list(range(num_cuts))


def test_a_forgotten_model_is_freed():
    """accelerate refers to every model it prepares: a warm start would stay on the GPU."""
    accelerator = distributed.make_accelerator("no")
    first, second = (distributed.shard(accelerator, torch.nn.Linear(2, 2)) for _ in range(2))
    reference = weakref.ref(second)
    distributed.forget(accelerator, second)
    del second
    assert reference() is None and any(model is first for model in accelerator._models)


def test_the_number_of_tasks_must_be_a_multiple_of_the_number_of_ranks(monkeypatch):
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    with pytest.raises(Misuse, match="--tasks-per-step 3 must be a multiple of the 2 processes"):
        RLWorker(SimpleNamespace(tasks_per_step=3), None, None, None)


def test_a_failure_of_rank_0_is_known_to_all(monkeypatch):
    """The other ranks raise a RankError and save the run, which rank 0 must take part in."""
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(distributed.dist, "broadcast_object_list", lambda things, src: None)
    monkeypatch.setattr(distributed, "rank", lambda: 0)
    with pytest.raises(ZeroDivisionError) as failure:
        distributed.run_on_rank_0("dividing", lambda: 1 / 0)
    assert distributed.is_known_to_all(failure.value)
    assert not distributed.is_known_to_all(ZeroDivisionError())


# --- train.py ------------------------------------------------------------------------------------


def test_a_run_with_two_processes_equals_a_run_with_one(tmp_path):
    with serve() as url:
        settings = [
            settings_for(tmp_path / name, url, task_sampling="uncertain") for name in ("one", "two")
        ]
        assert train_main(flags(**settings[0])) == 0
        code, stdout, stderr = launch("tests/train_toy.py", *flags(**settings[1]))
    assert code == 0, stderr
    assert "sharded over 2 processes" in stdout
    assert stdout.count("done: ") == 1  # rank 0 prints
    runs = [Path(s["run_dir"]) for s in settings]

    # Sampling is seeded by seed, step, task and sample, not by rank.
    for a, b in zip(*(trajectories(run, 1) for run in runs), strict=True):
        assert a["trajectory_id"] == b["trajectory_id"] and a["input_ids"] == b["input_ids"]
        assert a["turns"][0]["observation_text"] == b["turns"][0]["observation_text"]
        assert a["return"] == b["return"]
        assert b["advantages"] == pytest.approx(a["advantages"], abs=1e-6)

    # Both processes count the outcomes of all tasks, so they agree on the tasks of the next step.
    tasks = [[line["task_id"] for line in trajectories(run, 2)] for run in runs]
    assert tasks[0] == tasks[1]

    # The metrics of the first step are equal, those of later steps are close.
    metrics = [read_metrics(run) for run in runs]
    for expected, actual, tolerance in zip(*metrics, (1e-5, 1e-3), strict=True):
        assert expected.keys() == actual.keys()
        for name, value in expected.items():
            if name.startswith(("sync/", "sampler/")):  # rounding errors themselves
                assert actual[name] < 1e-5 or actual[name] == pytest.approx(value, rel=1e-4)
            else:
                assert actual[name] == pytest.approx(value, rel=tolerance, abs=1e-7), name

    # Rank 0 writes each file once, and each rank writes its part of the trainer state.
    names = [{str(p.relative_to(run)) for p in run.rglob("*") if p.is_file()} for run in runs]
    assert names[0] <= names[1]
    assert all(name.endswith("__1_0.distcp") for name in names[1] - names[0])
    weights = [load_file(checkpoint.folder_of(run, 2) / "model.safetensors") for run in runs]
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=1e-2, atol=1e-3)

    # A log that is damaged stops both processes, although only rank 0 reads it.
    (runs[1] / "metrics.jsonl").write_text("")
    resume = ["--resume", "--run-dir", str(runs[1]), "--steps", "3", "--env-addr"]
    with serve() as url:
        code, _, stderr = launch("tests/train_toy.py", *resume, url)
    (line,) = error_lines(stderr)
    assert code != 0 and "metrics.jsonl" in line and "lost contact" not in line


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_on_one_rank_stops_all_with_one_line_that_names_the_rank(tmp_path, rank):
    """Rank 0 would wait for the trajectories of the failed rank. The finished trajectories of the
    other rank are saved in both cases."""
    with serve() as url:
        settings = settings_for(tmp_path, url, eval_every=0)
        code, _, stderr = launch(
            "tests/train_toy.py", "--fail-on-rank", str(rank), *flags(**settings)
        )
    assert code != 0
    (line,) = error_lines(stderr)
    assert f"rank {rank} of 2" in line and "this rank's sampler broke" in line
    finished = trajectories(settings["run_dir"], 1)
    assert len(finished) == settings["tasks_per_step"] * settings["group_size"] // 2


def test_killing_one_rank_ends_the_others_without_a_traceback(tmp_path):
    with serve() as url:
        settings = settings_for(tmp_path, url)
        code, _, stderr = launch("tests/train_toy.py", "--kill-rank", "1", *flags(**settings))
    assert code != 0
    assert "Traceback" not in "".join(error_lines(stderr))
    assert "-9" in stderr  # the signal, reported by the launcher
    assert checkpoint.steps_saved(Path(settings["run_dir"])) in ([], [1])
