"""run/plan.py: the first lines of a run say what will happen."""

from dataclasses import replace
from pathlib import Path

from config import Config
from run.plan import plan

CONFIG = Config(
    model="tiny",
    algorithm="rloo",
    engine="vllm",
    steps=300,
    tasks_per_step=32,
    group_size=8,
    rounds=(10, 20, 30),
    steps_scaling_inter=100,
    eval_every=25,
    eval_samples=2,
    eval_rounds=None,
)


def test_the_first_lines_say_steps_batch_horizon_files_model_and_tasks():
    assert plan(CONFIG, Path("runs/mine"), num_tasks=374, num_held_out=100) == [
        "run: 300 steps of rloo, each of 32 tasks x 8 samples, "
        "at most 10, then 20, then 30 turns (100 steps each); files in runs/mine",
        "model: tiny, all weights learn, vllm samples",
        "tasks: 374 of textcraft to train on; 100 held out, 2 samples of each every 25 steps, "
        "1 now, at most 30 turns",
    ]


def test_what_a_run_does_otherwise_is_said_otherwise():
    config = replace(CONFIG, rounds=(6,), lora_rank=16, eval_every=0)
    first, model, tasks = plan(config, Path("runs/mine"), num_tasks=9, num_held_out=0)
    assert ", at most 6 turns; files in" in first
    assert model == "model: tiny, adapters of rank 16 learn, vllm samples"
    assert tasks.endswith("nothing is held out, so that no checkpoint is known as the best")
