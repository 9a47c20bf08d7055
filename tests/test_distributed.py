"""Several processes: sharded for real, and the same numbers as one."""

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
CALM = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TQDM_DISABLE": "1"}
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
    """`script` as several processes; (exit code, stdout, stderr)."""
    command = [*LAUNCH, str(ranks), str(ROOT / script), *argv]
    done = subprocess.run(
        command, cwd=ROOT, env=CALM, capture_output=True, text=True, timeout=timeout
    )
    return done.returncode, done.stdout, done.stderr


def own_lines(stderr):
    """What train.py itself wrote to stderr, without the launcher's report."""
    return [line for line in stderr.splitlines() if line.startswith("train.py: ")]


def settings_for(tmp_path, url, **changes):
    tmp_path.mkdir(exist_ok=True)
    return options(tmp_path, url, **(SMALL | changes))


def trajectories(run_dir, step):
    return read_log(Path(run_dir) / f"trajectories/step_{step:06d}.jsonl")


# --- An update on the same trajectories ----------------------------------------------------------


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """case -> (result of one process, result of two)."""
    cases = json.dumps(list(two_ranks.CASES))
    folders = [tmp_path_factory.mktemp(name) for name in ("one", "two")]
    alone = [sys.executable, "tests/two_ranks.py", str(folders[0]), cases]
    subprocess.run(alone, cwd=ROOT, env=CALM, check=True, capture_output=True)
    code, _, stderr = launch("tests/two_ranks.py", str(folders[1]), cases)
    assert code == 0, stderr
    return {
        case: tuple(torch.load(f / f"{case}.pt", weights_only=False) for f in folders)
        for case in two_ranks.CASES
    }


@pytest.mark.parametrize("case", two_ranks.CASES)
def test_two_processes_take_the_step_of_one(results, case):
    """SGD at a large rate: a difference in any gradient shows in the weights (trap 14)."""
    one, two = results[case]
    assert (one["ranks"], two["ranks"]) == (1, 2)
    assert one["kinds"] == ["Parameter"]
    assert two["kinds"] == ["DTensor"]  # really sharded
    for name, value in one["metrics"].items():
        assert two["metrics"][name] == pytest.approx(value, rel=1e-5, abs=1e-7), name
    for name, scores in one["scores"].items():
        torch.testing.assert_close(two["scores"][name], scores, rtol=1e-5, atol=1e-5)
    start = dict(two_ranks.make_policy(two_ranks.CASES[case][1]).named_parameters())
    moved = 0.0
    for name, weight in one["weights"].items():
        largest = weight.abs().max()
        torch.testing.assert_close(two["weights"][name], weight, rtol=0, atol=1e-5 * largest)
        if name.startswith("policy."):
            before = start[name.removeprefix("policy.")].detach()
            moved = max(moved, float((weight - before).abs().max()))
    if case == "not finite":
        assert moved == 0.0
        assert two["metrics"]["policy/skipped_steps"] == 1
    else:
        assert moved > 1e-3
    if case == "epochs":  # trap 3: 11 rows in mini-batches of 4 are 3 steps a pass
        assert two["metrics"]["policy/optimizer_steps"] == 6


def test_each_of_two_ranks_holds_half_of_the_parameters_and_of_the_optimizer(results):
    one, two = (result["held"] for result in results["adam"])
    assert (len(one), len(two)) == (1, 2)
    assert one[0]["optimizer"] == 2 * one[0]["parameters"]  # Adam's two moments
    for kind in ("parameters", "optimizer"):
        assert sum(rank[kind] for rank in two) == one[0][kind]
        for rank in two:
            assert rank[kind] == pytest.approx(one[0][kind] / 2, rel=0.02)


# --- Dealing out, and meeting again --------------------------------------------------------------


@given(st.lists(st.integers(1, 10_000), max_size=40), st.integers(1, 9))
def test_every_item_is_dealt_once_and_hands_differ_by_one_at_most(costs, ranks):
    hands = distributed.deal(costs, ranks)
    assert sorted(i for hand in hands for i in hand) == list(range(len(costs)))
    sizes = [len(hand) for hand in hands]
    assert max(sizes) - min(sizes) <= 1
    if costs:
        loads = [sum(costs[i] for i in hand) for hand in hands]
        assert max(loads) - min(loads) <= 2 * max(costs)


def test_every_rank_does_as_many_passes_and_each_micro_batch_counts_once(monkeypatch):
    """A rank with one pass less would leave the others waiting in a collective for ever."""
    monkeypatch.setattr(distributed, "world_size", lambda: 3)
    for num_cuts in (1, 3, 5):
        passes = []
        for rank in range(3):
            monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
            cuts = [[i] for i in range(num_cuts)]
            passes.append(distributed.rank_passes(cuts, range(10, 10 + num_cuts)))
        assert len({len(each) for each in passes}) == 1
        counted = sorted(rows[0] for each in passes for rows, counts in each if counts)
        assert counted == list(range(num_cuts))


def test_a_model_that_is_forgotten_is_freed():
    """accelerate keeps what it has prepared: a warm start stayed on the card all run long."""
    accelerator = distributed.make_accelerator("no")
    kept, gone = (distributed.shard(accelerator, torch.nn.Linear(2, 2)) for _ in range(2))
    reference = weakref.ref(gone)
    distributed.forget(accelerator, gone)
    del gone
    assert reference() is None and any(model is kept for model in accelerator._models)


def test_every_rank_rolls_out_as_many_tasks(monkeypatch):
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    with pytest.raises(Misuse, match="--tasks-per-step 3 must be a multiple of the 2 processes"):
        RLWorker(SimpleNamespace(tasks_per_step=3), None, None, None)


def test_all_ranks_know_what_rank_0_failed_with(monkeypatch):
    """The others raise a RankError and save what is done, which takes rank 0 too."""
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(distributed.dist, "broadcast_object_list", lambda things, src: None)
    monkeypatch.setattr(distributed, "rank", lambda: 0)
    with pytest.raises(ZeroDivisionError) as failed:
        distributed.run_on_rank_0("dividing", lambda: 1 / 0)
    assert distributed.is_known_to_all(failed.value)
    assert not distributed.is_known_to_all(ZeroDivisionError())


# --- train.py ------------------------------------------------------------------------------------


def test_a_run_of_two_processes_is_that_of_one(tmp_path):
    with serve() as url:
        settings = [settings_for(tmp_path / "one", url)]
        settings += [settings_for(tmp_path / "two", url, env=settings[0]["env"])]
        assert train_main(flags(**settings[0])) == 0
        code, stdout, stderr = launch("tests/train_toy.py", *flags(**settings[1]))
    assert code == 0, stderr
    assert "sharded over 2 processes" in stdout
    assert stdout.count("done: ") == 1  # rank 0 prints
    one, two = runs = [Path(s["run_dir"]) for s in settings]

    # Sampling is seeded by seed, step, task and sample, never by rank.
    for a, b in zip(*(trajectories(run, 1) for run in runs), strict=True):
        assert a["trajectory_id"] == b["trajectory_id"] and a["input_ids"] == b["input_ids"]
        assert a["turns"][0]["observation_text"] == b["turns"][0]["observation_text"]
        assert a["return"] == b["return"]
        assert b["advantages"] == pytest.approx(a["advantages"], abs=1e-6)

    # The first step's metrics are the same, later ones stay close.
    metrics = [read_metrics(run) for run in runs]
    for before, after, tolerance in zip(*metrics, (1e-5, 1e-3), strict=True):
        assert before.keys() == after.keys()
        for name, value in before.items():
            if name.startswith(("sync/", "sampler/")):  # rounding errors themselves
                assert after[name] < 1e-5 or after[name] == pytest.approx(value, rel=1e-4)
            else:
                assert after[name] == pytest.approx(value, rel=tolerance, abs=1e-7), name

    # Rank 0 writes each file once; of a checkpoint's state each rank writes its part.
    names = [{str(p.relative_to(run)) for p in run.rglob("*") if p.is_file()} for run in runs]
    assert names[0] <= names[1]
    assert all(name.endswith("__1_0.distcp") for name in names[1] - names[0])
    weights = [load_file(checkpoint.folder_of(run, 2) / "model.safetensors") for run in runs]
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("broken", [0, 1])
def test_an_error_on_one_rank_stops_all_with_one_line_that_names_it(tmp_path, broken):
    """Rank 0 waits for the trajectories of a rank that has none to give. Those that the other has
    finished are kept, whichever of them writes."""
    with serve() as url:
        settings = settings_for(tmp_path, url, eval_every=0)
        code, _, stderr = launch(
            "tests/train_toy.py", "--fail-on-rank", str(broken), *flags(**settings)
        )
    assert code != 0
    (line,) = own_lines(stderr)
    assert f"rank {broken} of 2" in line and "this rank's sampler broke" in line
    kept = trajectories(settings["run_dir"], 1)
    assert len(kept) == settings["tasks_per_step"] * settings["group_size"] // 2


def test_a_rank_that_is_killed_ends_the_others_with_a_line(tmp_path):
    with serve() as url:
        settings = settings_for(tmp_path, url)
        code, _, stderr = launch("tests/train_toy.py", "--kill-rank", "1", *flags(**settings))
    assert code != 0
    assert "Traceback" not in "".join(own_lines(stderr))
    assert "-9" in stderr  # the launcher tells how it ended
    assert checkpoint.steps_saved(Path(settings["run_dir"])) in ([], [1])
