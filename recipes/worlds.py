"""Does `make train` learn, and in other worlds too? Their default runs, measured.

The default run of `train.py --env ENV`, on the world's short tasks (envs/*/ids), is played to its
end: held-out tasks before the first step and after the last, never the best one. The unit of every
interval is the task: tasks are resampled, a task's value being its mean over samples and seeds, and
differences are paired by task.

TextCraft's and SearchQA's are measured on all kinds of test tasks as well (published.py). The
default runs of sft.py, dpo.py and agentevol.py are measured likewise, on the held-out tasks.

    python recipes/worlds.py run --env babyai --seed 0      runs or resumes: results/worlds/
    python recipes/worlds.py run --env textcraft --method dpo              results/worlds/methods/
    python recipes/worlds.py report                         tables and worlds.png of what is there

The run itself is `make train ENV=babyai`; this file adds the figures. It may be killed at any time
and goes on from its last checkpoint. What follows the known options is handed on to train.py.
Read next: envs/babyai/env.py, `LAPTOP`, for what the default runs are.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from envs import load_tasks  # noqa: E402
from recipes import published  # noqa: E402
from recipes.common import (  # noqa: E402
    RESULTS,
    Recipe,
    Result,
    change,
    change_cells,
    markdown,
    planned,
    pooled_at,
    pooled_curve,
    read_json,
    record,
    require_alike,
    results_of,
    train,
    write_result,
)
from recipes.methods import learned_from  # noqa: E402
from reporting.plots import plot_estimates  # noqa: E402

COLORS = {
    "babyai": "#4c78a8",
    "sciworld": "#d9822b",
    "textcraft": "#3a8f5c",
    "searchqa": "#cc79a7",
}
METHODS = ("sft", "dpo", "agentevol")


def run_world(options: argparse.Namespace, extra: Sequence[str]) -> None:
    """Train to the end (or resume), then write the result."""
    from agentevol import EvolConfig
    from dpo import DpoConfig
    from sft import SftConfig

    kinds = {kind.method: kind for kind in (SftConfig, DpoConfig, EvolConfig)}
    kind, folder = kinds.get(options.method), options.results / "worlds"
    name = f"{options.env}-{options.seed}"
    if kind:
        name, folder = f"{options.method}-{name}", folder / "methods"
    run_dir = options.runs / name
    arguments = ["--env", options.env, "--seed", str(options.seed), "--save-every", "5", *extra]
    arguments += ["--run-dir", str(run_dir)]
    config = planned(arguments, kind)
    if not config.steps and config.data:
        raise ValueError("--data: how many steps its epochs take is not known here; give --steps")
    steps = config.steps or config.epochs * -(-config.num_demonstrations // config.mini_batch_size)
    if "--epochs" in arguments:  # counted
        at = arguments.index("--epochs")
        del arguments[at : at + 2]
    arguments += ["--steps", str(steps)]
    arguments += ["--eval-start-samples", str(config.eval_samples)]  # both are compared
    train(arguments, run_dir, steps, kind)
    result = {"env": options.env, "seed": options.seed} | record(run_dir, steps)
    if kind:
        result |= {"method": options.method} | learned_from(run_dir)
    elif options.env in published.TESTS:
        result["test"] = published.evaluate_test(
            options.env, options.seed, run_dir, config, options.test_samples
        )
    write_result(folder / f"{name}.json", result)


def read_results(folder: Path) -> dict[str, list[Result]]:
    """env -> its results, by seed.

    Raises:
        ValueError: there is none, or runs of one environment differ in more than the seed.
    """
    by_env = {env: found for env in COLORS if (found := results_of(folder / "worlds", env))}
    if not by_env:
        raise ValueError(f"{folder}/worlds is empty; run: python recipes/worlds.py run")
    for env, results in by_env.items():
        try:
            require_alike(results)
        except ValueError as error:
            raise ValueError(f"{env}: {error}") from None
    return by_env


def analyse(env: str, results: Sequence[Result]) -> dict[str, dict[str, Any]]:
    """Before, after, paired difference: the share solved by sub-task and for all, and the mean
    return, which lies in 0..1 too and counts what was reached on the way; seeds are pooled by task.
    """
    kept = results[0]["config"]["eval_tasks"]  # a list of the world's goes by its name
    subtask_of = {
        task.task_id: task.subtask
        for task in load_tasks(env, file=ROOT / kept if (ROOT / kept).exists() else kept)
    }
    before, after = (pooled_at(results, position) for position in (0, -1))

    def part(items: Mapping[str, float], subtask: str) -> dict[str, float]:
        return {i: x for i, x in items.items() if subtask_of[i] == subtask}

    subtasks = sorted({subtask_of[task_id] for task_id in before})
    rows = {name: change(part(before, name), part(after, name)) for name in subtasks}
    rows["all"] = change(before, after)
    rows["all: mean return"] = change(*(pooled_at(results, at, "returns") for at in (0, -1)))
    return rows


def table(by_env: Mapping[str, Sequence[Result]]) -> list[str]:
    """Markdown: a row per environment and sub-task."""
    rows = [
        (env, name, " ".join(str(result["seed"]) for result in results), *change_cells(row))
        for env, results in by_env.items()
        for name, row in analyse(env, results).items()
    ]
    titles = "environment | sub-task | seeds | tasks | before, % | after, % | difference, points"
    return markdown(titles, rows)


def tried_table(folder: Path) -> list[str]:
    """Markdown: of each short trial, worlds/tried/*.json, its last ten steps beside the same steps
    of the default run, whose goals are the same. Chosen by these: training goals, no test goal."""
    rows = []
    for path in sorted((folder / "worlds" / "tried").glob("*.json")):
        trial = read_json(path)
        last = range(trial["steps"] - 9, trial["steps"] + 1)
        default = read_json(folder / "worlds" / f"{trial['env']}-{trial['seed']}.json")
        curves = [
            [row for row in result["curve"] if row["step"] in last] for result in (trial, default)
        ]
        cells = []
        for name, scale, digits in (
            ("train/success_rate", 100, 0),
            ("train/trajectories_used", 1, 0),
            ("policy/entropy", 1, 2),
        ):
            means = [fmean(scale * row[name] for row in curve if name in row) for curve in curves]
            cells.append(f"{means[0]:.{digits}f} ({means[1]:.{digits}f})")
        rows.append((f"`{trial['options']}`", f"{last[0]} to {last[-1]}", *cells))
    titles = "instead of the default | steps | solved, % | trajectories that teach, of 64"
    return markdown(f"{titles} | entropy, nats a token", rows) if rows else []


def methods_table(folder: Path) -> list[str]:
    """Markdown: a row per method and sub-task, of its default runs."""
    rows = []
    for method in METHODS:
        by_env: dict[str, list[Result]] = {}
        for result in results_of(folder / "worlds" / "methods", method):
            by_env.setdefault(result["env"], []).append(result)
        for env, results in by_env.items():
            seeds = " ".join(str(result["seed"]) for result in require_alike(results))
            analysed = analyse(env, results)
            del analysed["all: mean return"]
            for name, row in analysed.items():
                program = f"`{method}.py --env {env}`"
                rows.append((program, name, seeds, results[0]["steps"], *change_cells(row)))
    titles = "program | sub-task | seeds | steps | tasks | before, % | after, %"
    return markdown(f"{titles} | difference, points", rows) if rows else []


def tried_methods_table(folder: Path) -> list[str]:
    """Markdown: of each trial of another method in TextCraft, worlds/methods/tried/*.json, what it
    solved of the training goals that it played first and last, others each time; then of the
    default runs."""
    rows, own = [], folder / "worlds" / "methods"
    for path in (*sorted((own / "tried").glob("*.json")), *sorted(own.glob("*-textcraft-0.json"))):
        trial = {"options": "--env textcraft"} | read_json(path)
        if "played" not in trial:  # sft.py plays nothing to learn from
            continue
        ends = trial["played"][:1] + trial["played"][1:][-1:]
        cells = [
            ", ".join(
                f"{100 * each[name][1] / each[name][0]:.0f} % of {each[name][0]}" for each in ends
            )
            for name in ("depth 1", "depth 2")
        ]
        command = f"`{trial['method']}.py {trial['options']}`"
        rows.append((command, f"{trial['steps']} of {trial['config']['steps']}", *cells))
    titles = "command | steps done | depth 1: solved of the tries first, last | depth 2"
    return markdown(titles, rows) if rows else []


def report(folder: Path) -> str:
    """Reads the results present, writes worlds.png, returns the table."""
    by_env = read_results(folder)
    curves = [(env, COLORS[env], pooled_curve(results)) for env, results in by_env.items()]
    labels = ("training steps", "held-out tasks solved, %")
    plot_estimates(folder / "worlds.png", curves, "step", labels, "95 % intervals over tasks")
    lines = table(by_env)
    for env, test in published.TESTS.items():
        if tested := tested_runs(by_env, env):
            lines += ["", f"{test.what}, at most {test.rounds[-1]} turns:", ""]
            lines += published.split_table(published.analyse_test(env, tested))
    if methods := methods_table(folder):
        lines += ["", "The other methods, their default runs:", "", *methods]
    if trials := tried_methods_table(folder):
        lines += ["", "Tried with them, once each:", "", *trials]
    if trials := tried_table(folder):
        lines += [
            "",
            "Tried, once each (in brackets the default, same seed and goals):",
            "",
            *trials,
        ]
    return "\n".join(lines)


def tested_runs(by_env: Mapping[str, Sequence[Result]], env: str) -> list[Result]:
    """Those of a world that its test list was played before and after."""
    return [result for result in by_env.get(env, ()) if result.get("test")]


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--env", choices=COLORS, required=True)
    parser.add_argument("--method", choices=METHODS, help="instead of train.py's")
    parser.add_argument(
        "--test-samples", type=int, default=1, help="of TextCraft's and SearchQA's; 0: skip it"
    )


def main(argv: Sequence[str] | None = None) -> int:
    return Recipe("worlds", __doc__, RESULTS, add_options, run_world, report).main(argv)


if __name__ == "__main__":
    sys.exit(main())
