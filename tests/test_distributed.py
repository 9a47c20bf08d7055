"""Several processes: sharded for real, and the same numbers as one."""

import json
import os
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest
import torch
import two_ranks
from hypothesis import given
from hypothesis import strategies as st
from toy_env import Letters, flags, options, read_metrics, saved_tensors, serve, train_main

from models import load_policy
from reporting.logs import read_log
from run import checkpoint
from scale import distributed

ROOT = Path(__file__).parents[1]
LAUNCH = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
CALM = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TQDM_DISABLE": "1"}


def launch(script, *argv, ranks=2, **options):
    """`script` as several processes; (exit code, stdout, stderr)."""
    argv = [*LAUNCH, str(ranks), "--master-port", str(free_port()), str(ROOT / script), *argv]
    done = subprocess.run(argv, cwd=ROOT, env=CALM, capture_output=True, text=True, **options)
    return done.returncode, done.stdout, done.stderr


def free_port():
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def own_lines(stderr):
    """What train.py itself said on stderr, the launcher's report left out."""
    return [line for line in stderr.splitlines() if line.startswith("train.py: ")]


def test_a_model_that_is_let_go_of_is_nobodys():
    """accelerate keeps what it has prepared: a warm start lay on the card all run long."""
    accelerator = distributed.make_accelerator("no")
    kept, gone = (distributed.shard(accelerator, torch.nn.Linear(2, 2)) for _ in range(2))
    reference = weakref.ref(gone)
    distributed.forget(accelerator, gone)
    del gone
    assert reference() is None and any(model is kept for model in accelerator._models)


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


def write_conversations(path, number):
    turns = [("human", "Goal: craft stick."), ("gpt", "Action: get 1 stick")]
    records = [
        {
            "item_id": f"textcraft_{n}",
            "conversations": [
                {"from": who, "loss": who == "gpt", "value": f"{text} {n}"} for who, text in turns
            ],
        }
        for n in range(number)
    ]
    path.write_text(json.dumps(records))
    return str(path)


def test_a_launcher_of_one_process_trains_and_exports_like_none(tmp_path):
    data, out = write_conversations(tmp_path / "data.json", 2), tmp_path / "out"
    argv = ["--model", "tiny", "--data", data, "--out", str(out), "--epochs", "1"]
    code, _, stderr = launch("warmstart.py", *argv, ranks=1)
    assert code == 0, stderr
    load_policy(str(out))


@pytest.mark.long
def test_a_launcher_of_one_process_leaves_the_run_of_none(tmp_path):
    runs = {}
    with serve() as url:
        for name in ("launched", "alone"):
            (tmp_path / name).mkdir()
            settings = options(tmp_path / name, url, deterministic=True, algorithm="ppo")
            runs[name] = Path(settings["run_dir"])
            if name == "alone":
                assert train_main(flags(**settings)) == 0
            else:
                code, _, stderr = launch("tests/train_toy.py", *flags(**settings), ranks=1)
                assert code == 0, stderr
    metrics = {name: (run / "metrics.jsonl").read_bytes() for name, run in runs.items()}
    assert metrics["launched"] == metrics["alone"]
    tensors = {name: saved_tensors(run, 2)["model"] for name, run in runs.items()}
    for name, tensor in tensors["alone"].items():
        assert torch.equal(tensors["launched"][name], tensor), name


@pytest.mark.long
def test_a_warm_start_of_two_processes_is_that_of_one(tmp_path):
    """warmstart.py from demonstrations to the checkpoint, sharded: the losses of one process, and a
    whole model that anything loads."""
    data = write_conversations(tmp_path / "data.json", 8)
    losses = {}
    for ranks in (1, 2):
        out = tmp_path / f"out{ranks}"
        argv = ["--model", "tiny", "--data", data, "--out", str(out), "--batch-size", "4"]
        if ranks == 1:
            alone = [sys.executable, "warmstart.py", *argv]
            subprocess.run(alone, cwd=ROOT, env=CALM, check=True, capture_output=True)
        else:
            code, _, stderr = launch("warmstart.py", *argv)
            assert code == 0, stderr
        losses[ranks] = json.loads((out / "sft.json").read_text())["losses"]
        load_policy(str(out))
    assert len(losses[1]) == 4
    assert losses[2] == pytest.approx(losses[1], rel=0.02)  # bfloat16 inside
    assert losses[1][-1] < losses[1][0]


@pytest.mark.parametrize("case", ["grpo lora", "ppo lora"])
def test_with_adapters_the_base_does_not_move_on_any_rank(results, case):
    start = dict(two_ranks.make_policy(4).named_parameters())
    frozen = {f"policy.{name}": p for name, p in start.items() if not p.requires_grad}
    assert frozen
    for result in results[case]:
        assert all(torch.equal(result["weights"][name], p) for name, p in frozen.items())


def test_epochs_are_optimizer_steps_on_two_processes_too(results):
    """Trap 3: 11 rows in mini-batches of 4 are 3 steps a pass."""
    for result in results["epochs"]:
        assert result["metrics"]["policy/optimizer_steps"] == 6


def test_each_of_two_ranks_holds_half_of_the_parameters_and_of_the_optimizer(results):
    one, two = (result["held"] for result in results["adam"])
    assert len(one) == 1
    assert len(two) == 2
    assert one[0]["optimizer"] == 2 * one[0]["parameters"]  # Adam's two moments
    for kind in ("parameters", "optimizer"):
        assert sum(rank[kind] for rank in two) == one[0][kind]
        for rank in two:
            assert rank[kind] == pytest.approx(one[0][kind] / 2, rel=0.02)


# --- Dealing out ---------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 10_000), max_size=40), st.integers(1, 9))
def test_every_item_is_dealt_once_and_hands_differ_by_one_at_most(costs, ranks):
    hands = distributed.deal(costs, ranks)
    assert sorted(i for hand in hands for i in hand) == list(range(len(costs)))
    sizes = [len(hand) for hand in hands]
    assert max(sizes) - min(sizes) <= 1
    if costs:
        loads = [sum(costs[i] for i in hand) for hand in hands]
        assert max(loads) - min(loads) <= 2 * max(costs)


@pytest.mark.parametrize("num_cuts", [1, 2, 3, 5])
def test_every_rank_does_as_many_passes_and_each_micro_batch_counts_once(monkeypatch, num_cuts):
    """A rank with one pass less would leave the others waiting in a collective for ever."""
    cuts = [[i] for i in range(num_cuts)]
    costs = [10 + i for i in range(num_cuts)]
    monkeypatch.setattr(distributed, "world_size", lambda: 3)
    passes = []
    for rank in range(3):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        passes.append(distributed.own_passes(cuts, costs))
    assert len({len(each) for each in passes}) == 1
    counted = sorted(rows[0] for each in passes for rows, counts in each if counts)
    assert counted == list(range(num_cuts))


def test_one_process_needs_no_group():
    assert distributed.gather("x") == ["x"]
    assert distributed.apart("playing", lambda: 3) == [3]
    assert distributed.first("opening", lambda: 4) == 4
    with pytest.raises(ZeroDivisionError):
        distributed.apart("playing", lambda: 1 / 0)


def test_what_rank_0_failed_with_alone_all_know(monkeypatch):
    """The others raise a RankError and save what is done, together with rank 0 or for ever."""
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(distributed.dist, "broadcast_object_list", lambda things, src: None)
    monkeypatch.setattr(distributed, "rank", lambda: 0)
    with pytest.raises(ZeroDivisionError) as failed:
        distributed.first("dividing", lambda: 1 / 0)
    assert distributed.is_known_to_all(failed.value)


# --- train.py ------------------------------------------------------------------------------------

SMALL = {
    "deterministic": True,
    "tasks_per_step": 4,
    "group_size": 3,
    "learning_rate": 1e-3,
    "kl_loss_coef": 0.1,
    "eval_every": 2,
    "eval_samples": 1,
    "skip_zero_variance": False,
}


def settings_for(tmp_path, url, **changes):
    tmp_path.mkdir(exist_ok=True)
    settings = SMALL | changes
    if settings.get("algorithm") == "ppo":  # it has no groups, and the option is refused
        del settings["skip_zero_variance"]
    return options(tmp_path, url, **settings)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The same run of two steps with 1 and with 2 processes: their directories."""
    tmp_path = tmp_path_factory.mktemp("runs")
    with serve() as url:
        one = settings_for(tmp_path / "one", url)
        two = settings_for(tmp_path / "two", url, env=one["env"])
        assert train_main(flags(**one)) == 0
        code, stdout, stderr = launch("tests/train_toy.py", *flags(**two))
    assert code == 0, stderr
    assert "in parts on 2 processes" in stdout
    assert stdout.count("done: ") == 1  # rank 0 speaks
    return Path(one["run_dir"]), Path(two["run_dir"])


def trajectories(run_dir, step):
    text = (run_dir / f"trajectories/step_{step:06d}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.long
def test_the_first_steps_trajectories_do_not_depend_on_the_number_of_processes(runs):
    """Sampling is seeded by seed, step, task and sample, never by rank."""
    one, two = (trajectories(run, 1) for run in runs)
    assert [t["trajectory_id"] for t in one] == [t["trajectory_id"] for t in two]
    for a, b in zip(one, two, strict=True):
        assert a["input_ids"] == b["input_ids"]
        assert a["turns"][0]["observation_text"] == b["turns"][0]["observation_text"]
        assert a["return"] == b["return"]
        assert b["advantages"] == pytest.approx(a["advantages"], abs=1e-6)


def test_its_metrics_are_those_of_one_process_and_later_ones_stay_close(runs):
    one, two = (read_metrics(run) for run in runs)
    for step, tolerance in ((0, 1e-5), (1, 1e-3)):
        assert one[step].keys() == two[step].keys()
        for name, value in one[step].items():
            if name.startswith(("sync/", "sampler/")):  # rounding errors themselves
                assert two[step][name] < 1e-5 or two[step][name] == pytest.approx(value, rel=1e-4)
            else:
                assert two[step][name] == pytest.approx(value, rel=tolerance, abs=1e-7), name


def test_rank_0_writes_each_file_once(runs):
    one, two = runs
    names = [{str(p.relative_to(run)) for p in run.rglob("*") if p.is_file()} for run in runs]
    extra = names[1] - names[0]
    assert names[0] <= names[1]
    assert all(name.endswith("__1_0.distcp") for name in extra)
    assert len(read_metrics(two)) == 2
    folders = [checkpoint.folder_of(run, 2) for run in (one, two)]
    from safetensors.torch import load_file

    weights = [load_file(folder / "model.safetensors") for folder in folders]
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=1e-2, atol=1e-3)


@pytest.mark.long
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1)])
def test_a_run_goes_on_with_another_number_of_processes(tmp_path, before, after):
    """The weights, both optimizer moments and the place in the data go on."""
    with serve() as url:
        settings = settings_for(tmp_path, url, steps=3, algorithm="ppo", kl_coef=0.01)
        whole = settings_for(tmp_path / "whole", url, steps=3, algorithm="ppo", kl_coef=0.01)
        assert train_main(flags(**whole)) == 0

        def go(ranks, argv):
            if ranks == 1:
                assert train_main(argv) == 0
            else:
                code, _, stderr = launch("tests/train_toy.py", *argv, ranks=ranks)
                assert code == 0, stderr

        go(before, flags(**(settings | {"steps": 2})))
        go(after, ["--resume", "--run-dir", settings["run_dir"], "--steps", "3"])
    one, two = (Path(each["run_dir"]) for each in (whole, settings))
    lines = read_metrics(one), read_metrics(two)
    assert len(lines[1]) == 3
    for name in ("train/return_mean", "policy/loss", "policy/kl", "critic/loss", "data/epoch"):
        assert lines[1][2][name] == pytest.approx(lines[0][2][name], rel=1e-3, abs=1e-5), name
    for part in ("policy", "critic"):
        a, b = (saved_tensors(run, 3, part) for run in (one, two))
        for name, tensor in a["model"].items():
            torch.testing.assert_close(b["model"][name], tensor, rtol=1e-2, atol=1e-4)
        assert a["optimizer"]["state"].keys() == b["optimizer"]["state"].keys()


def test_a_number_of_processes_that_does_not_divide_the_tasks_is_one_line(tmp_path):
    with serve() as url:
        settings = settings_for(tmp_path, url, tasks_per_step=3)
        code, _, stderr = launch("tests/train_toy.py", *flags(**settings))
    assert code != 0
    assert own_lines(stderr) == [
        "train.py: --tasks-per-step 3 must be a multiple of the 2 processes: "
        "each rolls out as many tasks as the others"
    ]
    assert not Path(settings["run_dir"]).exists()


@pytest.mark.parametrize("broken", [0, 1])
def test_an_error_on_one_rank_stops_all_with_one_line_that_names_it(tmp_path, broken):
    """Rank 0 waits for the trajectories of a rank that has none to give. What the other has played
    to its end is kept, whichever of them writes."""
    with serve() as url:
        settings = settings_for(tmp_path, url, eval_every=0)
        began = time.monotonic()
        code, stdout, stderr = launch(
            *("tests/train_toy.py", "--fail-on-rank", str(broken)),
            *flags(**settings),
            timeout=120,
        )
    assert code != 0
    lines = own_lines(stderr)
    assert len(lines) == 1, lines
    said = "EngineError: this rank's sampler broke"
    assert said in lines[0] and f"rank {broken} of 2, rolling out: {said}" in lines[0]
    assert time.monotonic() - began < 100
    kept = read_log(Path(settings["run_dir"]) / "trajectories/step_000001.jsonl")
    assert len(kept) == settings["tasks_per_step"] * settings["group_size"] // 2


def test_a_rank_that_is_killed_ends_the_others_with_a_line(tmp_path):
    with serve() as url:
        settings = settings_for(tmp_path, url)
        code, stdout, stderr = launch(
            "tests/train_toy.py", "--kill-rank", "1", *flags(**settings), timeout=120
        )
    assert code != 0
    assert "Traceback" not in "".join(own_lines(stderr))
    assert "-9" in stderr  # the launcher says how it ended
    assert checkpoint.steps_saved(Path(settings["run_dir"])) in ([], [1])


@pytest.mark.long
def test_ctrl_c_saves_once_and_resumes_to_the_same_numbers(tmp_path):
    """The terminal interrupts every process, and the launcher passes it on a second time."""
    with serve(Slow) as url:
        settings = settings_for(tmp_path, url, steps=50, eval_every=0, save_every=50)
        argv = [*LAUNCH, "2", "--master-port", str(free_port()), "tests/train_toy.py"]
        process = subprocess.Popen(
            [*argv, *flags(**settings)],
            cwd=ROOT,
            env=CALM,
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
    assert "saved. Go on with:" in stdout, stderr
    saved = checkpoint.steps_saved(Path(settings["run_dir"]))
    assert len(saved) == 1
    lines = read_metrics(settings["run_dir"])
    assert [line["step"] for line in lines][-1] == saved[0]


class Slow(Letters):
    """An environment that leaves time to interrupt a rollout."""

    def step(self, action):
        time.sleep(0.2)
        return super().step(action)


@pytest.mark.long
def test_every_rank_samples_with_a_vllm_of_its_own(tmp_path):
    """Both engines live beside the trainer's process group and get every step's weights."""
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
    )
    del settings["env_addr"]  # every rank starts an environment server, too
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps([{"item_id": "textcraft_31"}, {"item_id": "textcraft_32"}]))
    code, stdout, stderr = launch("train.py", *flags(**settings), timeout=280)
    assert code == 0, stdout + stderr
    for line in read_metrics(settings["run_dir"]):
        assert line["policy/optimizer_steps"] == 1
        assert line["train/trajectories_used"] == 4
        assert line["sampler/log_prob_diff_mean"] < 0.05
        assert line["sync/log_prob_diff_mean"] < 0.05
    first = trajectories(Path(settings["run_dir"]), 1)
    texts = {t["turns"][0]["action_text"] for t in first}
    assert len(texts) == 4  # the engines draw different random numbers
