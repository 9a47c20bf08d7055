"""Slow tests of the recipes: the demo, the smoke test of the 3B run, two SLURM nodes."""

import json
import shutil
import socket
import subprocess
import sys

import pytest
from test_recipes import ROOT, printed_commands, script, slurm

ON_A_CPU = pytest.mark.skipif(
    shutil.which("nvidia-smi") is not None, reason="vLLM's GPU build does not run on a CPU"
)


@pytest.mark.long
def test_the_success_rate_rises_in_the_demo(tmp_path):
    run = tmp_path / "run"
    command = [sys.executable, "train.py", "--config", "recipes/demo.json", "--run-dir", str(run)]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    assert process.returncode == 0, process.stderr[-2000:]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    success = [row["train/success_rate"] for row in rows]
    assert len(success) == 24
    assert sum(success[-10:]) / 10 > sum(success[:10]) / 10  # in one run: 0.66 and 0.53
    assert (run / "reward.png").exists()


@ON_A_CPU
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_smoke_test_runs_to_its_end_and_a_second_run_has_nothing_to_do(tmp_path):
    process = script("textcraft_3b.sh", tmp_path, SMOKE="1")
    assert process.returncode == 0, process.stdout + process.stderr
    assert process.stdout.splitlines()[-1] == f"done: {tmp_path}/result.md"
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["after"]["complete"] and result["after"]["overall"]["items"] == 3
    held_out = {i["item_id"] for i in json.loads((tmp_path / "run/held_out.json").read_text())}
    published = set()
    for split in ("train", "test"):
        ids = json.loads((ROOT / f"envs/textcraft/ids/textcraft_{split}.json").read_text())
        published |= {i["item_id"] for i in ids}
    assert held_out and not held_out & published
    second = script("textcraft_3b.sh", tmp_path, SMOKE="1")
    assert not [c for c in printed_commands(second) if "train.py" in c or "evaluate.py" in c]


@ON_A_CPU
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_nodes_of_one_process_train_together(tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    options = "--model tiny --warm-start never --steps 1 --tasks-per-step 2 --group-size 2"
    options += " --rounds 2 --max-tokens-per-turn 16 --eval-every 0 --no-skip-zero-variance"
    on_a_cpu = {"CONFIG": "recipes/fsdp2_cpu.yaml", "GPUS_PER_NODE": "1", "PORT": port}
    process = slurm(tmp_path, *options.split(), **on_a_cpu)
    assert process.returncode == 0, process.stdout + process.stderr
    policy = tmp_path / "run/checkpoints/step_000001/trainer_state/policy"
    assert {p.name for p in policy.glob("*.distcp")} == {"__0_0.distcp", "__1_0.distcp"}
