"""Short runs of sft.py, dpo.py and agentevol.py in the toy environment: options and results."""

import json
from pathlib import Path

from toy_env import flags, fresh_process_state, options

import agentevol
import dpo
import sft

PROGRAMS = {"sft": sft, "dpo": dpo, "agentevol": agentevol}
METHOD_OPTIONS = {
    "sft": {"num_demonstrations": 8, "hold_out": 0.2, "mini_batch_size": 4, "learning_rate": 3e-3},
    "dpo": {
        "tasks_per_iteration": 4,
        "group_size": 4,
        "iterations": 2,
        "min_gap": 0.05,
        "sft_coef": 0.0,
        "mini_batch_size": 8,
        "learning_rate": 1e-3,
    },
    "agentevol": {
        "tasks_per_iteration": 4,
        "group_size": 4,
        "iterations": 2,
        "min_return": 0.4,
        "keep_per_task": 2,
        "weighting": "return",
        "merge_with": "all",
        "learn_from": "base",
        "num_demonstrations": 4,
        "mini_batch_size": 8,
        "learning_rate": 3e-3,
    },
}


def settings(method, tmp_path, url, **changes):
    """Options for a run of four steps."""
    tmp_path.mkdir(exist_ok=True)
    values = options(tmp_path, url, steps=4, deterministic=True, max_tokens_per_turn=4)
    for name in ("tasks_per_step", "engine", "group_size"):
        del values[name]
    return values | METHOD_OPTIONS[method] | changes


def run(method, values):
    """Run the program in this process; returns its exit code."""
    with fresh_process_state():
        try:
            return PROGRAMS[method].command_line(flags(**values))
        except SystemExit as stop:
            return stop.code


def results_of(run_dir):
    """The files of a run, except those with times."""
    path = Path(run_dir)
    data_files = [p for name in ("pairs", "evolving") for p in sorted((path / name).glob("*"))]
    return {
        "metrics": (path / "metrics.jsonl").read_bytes(),
        "evaluations": [p.read_text() for p in sorted((path / "eval").glob("*.json"))],
        "data": {p.name: p.read_text() for p in data_files},
    }


def conversation(n, text="abc", **extra):
    """An episode of task `n` of the toy environment with two actions, both `text`."""
    turns = [("human", f"craft {n}"), ("gpt", text), ("human", "get 1"), ("gpt", text)]
    turns = [{"from": name, "loss": name == "gpt", "value": value} for name, value in turns]
    return {"item_id": f"letters_{n}", "conversations": turns, **extra}


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return (str(path),)
