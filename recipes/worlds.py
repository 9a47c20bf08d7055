"""Does the same command learn other worlds? The default run of `train.py --env ENV`, measured.

TextCraft has a study of its own (learns.py). Here the default run of another environment, on its
short tasks (envs/ids), is played to its end: held-out tasks before the first step and after the
last, never the best one. The unit of every interval is the task: tasks are resampled, a task's
value being its mean over samples and seeds, and differences are paired by task.

    python recipes/worlds.py run --env babyai --seed 0      runs or resumes: results/worlds/
    python recipes/worlds.py report                         tables and worlds.png of what is there

The run itself is `make train ENV=babyai`; this file adds the figures. It may be killed at any time
and goes on from its last checkpoint. What follows the known options is handed on to train.py.
Read next: config.py, `LAPTOP_OF`, for what the default runs are.
"""

import argparse
import datetime
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from envs import load_tasks  # noqa: E402
from recipes.common import (  # noqa: E402
    carry_out,
    difference,
    load_config,
    plot_curves,
    read_evaluations,
    read_lines,
    write_json,
)
from recipes.learns import CURVE, train  # noqa: E402
from recipes.learns_report import change_cells, mean_over_seeds, pooled_curve  # noqa: E402
from reporting.scoring import bootstrap  # noqa: E402

RESULTS = ROOT / "recipes" / "results"
COLORS = {"babyai": "#4c78a8", "sciworld": "#d9822b", "textcraft": "#3a8f5c"}

Result = dict[str, Any]


def run_world(options: argparse.Namespace, extra: Sequence[str]) -> None:
    """Train to the end (or resume), then write the result."""
    run_dir = options.runs / f"{options.env}-{options.seed}"
    arguments = ["--env", options.env, "--seed", str(options.seed), "--save-every", "5", *extra]
    arguments += ["--run-dir", str(run_dir)]
    config = load_config(arguments)
    train(arguments, run_dir, config.steps)
    about = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
    evaluations = read_evaluations(run_dir)
    steps = [evaluation["step"] for evaluation in evaluations]
    if steps[:1] != [0] or steps[-1] != config.steps:
        raise SystemExit(f"{run_dir}/eval holds steps {steps}, expected 0 to {config.steps}")
    timings = read_lines(run_dir / "timings.jsonl")
    result = {"env": options.env, "seed": options.seed}
    result |= {"date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")}
    result |= {key: about[key] for key in ("command", "git_commit", "hardware", "versions")}
    result |= {"config": about["config"], "steps": config.steps}
    result |= {"hours": round(sum(row.get("time/step_s", 0.0) for row in timings) / 3600, 2)}
    result["curve"] = [
        {"step": row["step"]} | {name: row[name] for name in CURVE if row.get(name) is not None}
        for row in read_lines(run_dir / "metrics.jsonl")
    ]
    result["held_out"] = evaluations
    path = options.results / "worlds" / f"{options.env}-{options.seed}.json"
    write_json(path, result)
    print(f"wrote {path}", flush=True)


def read_results(folder: Path) -> dict[str, list[Result]]:
    """env -> its results, by seed.

    Raises:
        ValueError: there is none, or runs of one environment differ in length.
    """
    by_env: dict[str, list[Result]] = {}
    for path in sorted((folder / "worlds").glob("*-*.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        by_env.setdefault(result["env"], []).append(result)
    if not by_env:
        raise ValueError(f"{folder}/worlds is empty; run: python recipes/worlds.py run")
    for env, results in by_env.items():
        if len(steps := sorted({result["steps"] for result in results})) > 1:
            raise ValueError(f"{env}: runs of {steps} steps must not be pooled; keep one length")
    return by_env


def analyse(env: str, results: Sequence[Result]) -> dict[str, dict[str, Any]]:
    """Before, after, paired difference: the share solved by sub-task and for all, and the mean
    return, which lies in 0..1 too and counts what was reached on the way; seeds are pooled by task.
    """
    subtask_of = {
        task.task_id: task.subtask
        for task in load_tasks(env, file=ROOT / results[0]["config"]["eval_tasks"])
    }
    solved, returns = (
        [mean_over_seeds([r["held_out"][at][measure] for r in results]) for at in (0, -1)]
        for measure in ("items", "returns")
    )
    subtasks = sorted({subtask_of[task_id] for task_id in solved[0]})
    groups = {
        name: [{i: x for i, x in items.items() if subtask_of[i] == name} for items in solved]
        for name in subtasks
    }
    groups |= {"all": solved, "all: mean return": returns}
    return {
        name: {
            "before": bootstrap(list(before.values())),
            "after": bootstrap(list(after.values())),
            "difference": difference(before, after),
        }
        for name, (before, after) in groups.items()
    }


def table(by_env: Mapping[str, Sequence[Result]]) -> list[str]:
    """Markdown: a row per environment and sub-task."""
    lines = [
        "| environment | sub-task | seeds | tasks | before, % | after, % | difference, points |"
    ]
    lines.append("|---|---|---|---|---|---|---|")
    for env, results in by_env.items():
        seeds = " ".join(str(result["seed"]) for result in results)
        for name, row in analyse(env, results).items():
            lines.append(f"| {env} | {name} | {seeds} | {change_cells(row)} |")
    return lines


def report(folder: Path) -> str:
    """Reads the results present, writes worlds.png, returns the table."""
    by_env = read_results(folder)
    curves = [(env, COLORS[env], pooled_curve(results)) for env, results in by_env.items()]
    labels = ("training steps", "held-out tasks solved, %")
    plot_curves(folder / "worlds.png", curves, "step", labels, "95 % intervals over tasks")
    return "\n".join(table(by_env))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="run or resume one environment with one seed")
    running.add_argument("--env", choices=COLORS, required=True)
    running.add_argument("--seed", type=int, default=0)
    running.add_argument("--runs", type=Path, default=Path("runs/worlds"), help="where runs lie")
    reporting = commands.add_parser("report", help="table and figure of the results present")
    for each in (running, reporting):
        each.add_argument("--results", type=Path, default=RESULTS)
    options, extra = parser.parse_known_args(argv)
    return carry_out("worlds.py", options, extra, run_world, report)


if __name__ == "__main__":
    sys.exit(main())
