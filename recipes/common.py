"""Helpers shared by the recipes: start or resume a run, and summarize it as a JSON record.

A record says how the run was started (command, commit, hardware, options) and holds one row per
step and each task's result in every held-out evaluation. evidence.py compares records.
"""

import datetime
import json
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from agentevol import EvolConfig
from config import CHANGEABLE_ON_RESUME, Config
from dpo import DpoConfig
from run.checkpoint import steps_saved
from run.files import write_text
from sft import SftConfig
from trajectory import LOST

CLASSES = (SftConfig, DpoConfig, EvolConfig, Config)
COMMITTED = ROOT / "recipes" / "results"
# Options that no longer exist, and their value in all committed runs.
RETIRED = {"kl_target": None, "normalize_per_env": False}
CURVE = (
    *("train/return_mean", "train/success_rate", "train/turns_mean", "train/parse_error_rate"),
    *("train/groups", "train/groups_zero_variance", "train/groups_mixed"),
    *("train/trajectories_used", "train/stop/max_rounds", "train/cut_turn_rate"),
    *("horizon/max_rounds", "policy/loss", "policy/entropy", "policy/grad_norm"),
    *("policy/kl", "policy/kl_max", "data/policy_tokens", "data/anchored_share"),
)
Result = dict[str, Any]


def write_json(path: Path, content: Any) -> None:
    """Write atomically, with each innermost list or object on one line. Paths inside the checkout
    become relative to it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content, indent=1).replace(f"{ROOT}/", "")
    text = re.sub(r"[\[{][^\[\]{}]*[\]}]", lambda match: re.sub(r"\n *", " ", match[0]), text)
    write_text(path, text + "\n")
    print(f"wrote {path}", flush=True)


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects in a .jsonl file; an empty list if the file does not exist."""
    if not path.exists():
        return []
    # NOTE: splitlines would also cut at U+2028, which JSON does not escape.
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines if line]


def markdown(titles: str, rows: Sequence[Sequence[Any]]) -> list[str]:
    """The lines of a Markdown table.

    >>> print(*markdown("arm | goals", [("rl", 63)]), sep="\\n")
    | arm | goals |
    |---|---|
    | rl | 63 |
    """
    rule = "|" + "---|" * (titles.count("|") + 1)
    return [f"| {titles} |", rule, *(f"| {' | '.join(map(str, row))} |" for row in rows)]


def exit_on_interrupt(main: Callable[[], None]) -> None:
    try:
        main()
    except KeyboardInterrupt:
        print("stopped; repeat the command to continue from the last checkpoint", file=sys.stderr)
        sys.exit(130)


def run(command: Sequence[str]) -> None:
    """Run a command of this project. If it fails, exit with its exit code."""
    print(f"$ {shlex.join(command)}", flush=True)
    if code := subprocess.run(command, cwd=ROOT).returncode:
        raise SystemExit(code)


def run_program(program: str, arguments: Sequence[str], run_dir: Path) -> None:
    """Start train.py or another method's program, or resume it from its last checkpoint.

    Raises:
        SystemExit: the run failed, also if `run_dir` holds an unfinished run with other options.
    """
    words = [*arguments, "--run-dir", str(run_dir)]
    if (run_dir / "config.json").exists():
        words.append("--resume")
        steps = read_json(run_dir / "config.json")["config"]["steps"]
        if max(steps_saved(run_dir), default=0) >= steps:
            print(f"{run_dir} is complete", flush=True)
            return
    run([sys.executable, program, *words])


def require_alike(results: Sequence[Result]) -> Sequence[Result]:
    """Return the results if they can be pooled: their options must be equal, except the seed and
    options that do not affect training. An option that did not exist yet when a run was made counts
    as equal if the other run has its default. Otherwise ValueError names the differences."""
    # Task lists were renamed, which does not matter because results are paired by task id. A run
    # whose demonstrations are in a file ignores num_demonstrations. The preset has set options.
    ignored = CHANGEABLE_ON_RESUME - {"steps", "learning_rate_decay_steps"}
    ignored |= {"seed", "config", "preset", "tasks", "eval_tasks", "data", "num_demonstrations"}
    # An evaluation records its step and its number of samples.
    ignored |= {"eval_start_samples", "eval_every"}
    defaults = {f.name: f.default for k in CLASSES for f in fields(k)} | RETIRED
    defaults = json.loads(json.dumps(defaults))
    configs = [r["config"] | {"steps": r["steps"]} for r in results if "config" in r]
    for config in configs[1:]:
        names = sorted((config.keys() | configs[0].keys()) - ignored)
        pairs = {n: [c.get(n, defaults.get(n)) for c in (configs[0], config)] for n in names}
        if differing := [f"{n} {a} and {b}" for n, (a, b) in pairs.items() if a != b]:
            text = ", ".join(differing)
            raise ValueError(f"cannot pool runs that differ in more than the seed: {text}")
    return results


def commits_of(results: Sequence[Result]) -> str:
    """`1 run at 3ee8f6a, 2 at 8efbf3c`"""
    counts = Counter(result["git_commit"][:7] for result in results if "git_commit" in result)
    first, *others = [f"{count} at {commit}" for commit, count in counts.items()]
    run = "run" if first.startswith("1 ") else "runs"
    return ", ".join([first.replace(" at", f" {run} at"), *others])


def record(run_dir: Path) -> Result:
    """The record of a finished run.

    Each row of its curve has the step's metrics and the totals up to that step: turns, sampled
    tokens, and seconds of CPU time. `held_out` has the evaluations at the first temperature, and
    `held_out_at` those at others.

    Raises:
        SystemExit: the evaluation at the beginning or at the end of the run is missing.
    """
    description = read_json(run_dir / "config.json")
    steps = description["config"]["steps"]
    timings = {row["step"]: row for row in read_lines(run_dir / "timings.jsonl")}
    totals = dict.fromkeys(("turns", "tokens", "cpu_seconds"), 0.0)
    curve = []
    for row in read_lines(run_dir / "metrics.jsonl"):
        if not (step := row["step"]):
            continue
        for line in read_lines(run_dir / "trajectories" / f"step_{step:06d}.jsonl"):
            totals["turns"] += len(line["turns"])
            totals["tokens"] += sum(line["loss_mask"])
        timing = timings.get(step, {})  # missing if the run was killed right after a checkpoint
        totals["cpu_seconds"] += timing.get("time/cpu_s", 0.0)
        metrics = {name: round(row[name], 5) for name in CURVE if row.get(name) is not None}
        curve.append({"step": step} | {n: round(v, 1) for n, v in totals.items()} | metrics)
    held_out = read_evaluations(run_dir, "")
    evaluated = [summary["step"] for summary in held_out]
    if evaluated[:1] != [0] or evaluated[-1] != steps:
        raise SystemExit(f"{run_dir} was evaluated at steps {evaluated}, expected 0 to {steps}")
    keys = ("command", "git_commit", "hardware", "versions", "begun", "config")
    step_seconds = [row["time/step_s"] for row in timings.values() if "time/step_s" in row]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **{key: description[key] for key in keys if key in description},
        "steps": steps,
        "hours": round(sum(step_seconds) / 3600, 3),
        "curve": curve,
        "held_out": held_out,
        "held_out_at": {
            path.name.removeprefix("temperature_"): read_evaluations(run_dir, path.name)
            for path in sorted((run_dir / "eval").glob("temperature_*"))
        },
    }


def read_evaluations(run_dir: Path, folder: str) -> list[Result]:
    """The held-out evaluations of a run in one folder of `eval/`, by step: for each task, the
    number of turns in which each sample solved it (0: not solved)."""
    results = []
    suffix = f"_{folder}" if folder else ""
    for path in sorted((run_dir / "eval" / folder).glob("step_*.json")):
        summary, solved_in = read_json(path), dict[str, list[int]]()
        name = f"eval_{summary['step']:06d}{suffix}.jsonl"
        for line in read_lines(run_dir / "trajectories" / name):
            if line["stop_reason"] not in LOST:
                turns = len(line["turns"]) if line["success"] else 0
                solved_in.setdefault(line["task_id"], []).append(turns)
        names = ("step", "samples", "temperature")
        about = {name: summary[name] for name in names if name in summary}
        results.append(about | {"solved_in": solved_in})
    return results
