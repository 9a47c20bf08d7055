"""sft.py, dpo.py and agentevol.py in the toy environment, in seconds: options, runs, results."""

import json
from pathlib import Path

from toy_env import flags, fresh_process_state, options

import agentevol
import dpo
import sft

PROGRAMS = {"sft": sft, "dpo": dpo, "agentevol": agentevol}
OWN = {
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
    """Options of a run of four steps."""
    tmp_path.mkdir(exist_ok=True)
    values = options(tmp_path, url, steps=4, deterministic=True, max_tokens_per_turn=4)
    for name in ("tasks_per_step", "engine", "group_size"):
        del values[name]
    return values | OWN[method] | changes


def run(method, values):
    """The exit code of the program, in this process."""
    with fresh_process_state():
        try:
            return PROGRAMS[method].command_line(flags(**values))
        except SystemExit as stop:
            return stop.code


def left_by(run_dir):
    """What a run wrote, apart from times."""
    path = Path(run_dir)
    kept = [p for name in ("pairs", "evolving") for p in sorted((path / name).glob("*"))]
    return {
        "metrics": (path / "metrics.jsonl").read_bytes(),
        "evaluations": [p.read_text() for p in sorted((path / "eval").glob("*.json"))],
        "kept": {p.name: p.read_text() for p in kept},
    }


def conversation(n, text="abc", **more):
    """An episode of the toy environment's task `n`, both of whose actions are `text`."""
    turns = [("human", f"craft {n}"), ("gpt", text), ("human", "get 1"), ("gpt", text)]
    said = [{"from": who, "loss": who == "gpt", "value": value} for who, value in turns]
    return {"item_id": f"letters_{n}", "conversations": said, **more}


def write_lines(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return (str(path),)
