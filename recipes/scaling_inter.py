"""Does widening the horizon help? Short, long and stepwise horizons for the same amount of play.

ScalingInter-RL begins with few turns, where an episode is cheap and credit is near, and widens the
horizon as the policy can use it. A fair comparison must not hand the long horizon more experience:
arms differ in turns per episode, so they are stopped at an equal number of *turns played*, not of
steps.

    short       every episode at most 2 turns: many cheap steps, a fifth of the goals out of reach
    long        at most 8: every goal in reach, few steps, many turns spent being lost
    stepwise    2, then 4, then 8: train.py --rounds-scheduler scaling_inter_stepwise

Goals are train.py's own, of crafting depth 1, which take the oracle 2 to 4 turns. All arms start
from the same weights, see the same tasks in the same order, and are evaluated on the same held-out
goals with 8 turns, however they were trained.
The published system reports 50.5 % -> 57.0 % (SciWorld) and 34.0 % -> 38.3 % (Deep Search) for the
7B model, one seed each, at equal steps.

train.py counts steps, so each arm runs it in pieces of a few steps and resumes: after each piece
the turns played are added up from metrics.jsonl, and the next piece is as long as the budget still
allows. An arm therefore ends within about one step's turns of the budget; how far is in the result.

    python recipes/scaling_inter.py run --arm short          runs or resumes one arm
    python recipes/scaling_inter.py run --arm all            one after the other
    python recipes/scaling_inter.py report                   table and results/scaling_inter.png

With the 135M model an arm of 3,600 turns takes 35 to 40 minutes on two cores; what follows the
known options is handed on to train.py. Read next: schedulers.py, tutorials/04_horizon.md.
"""

import argparse
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from recipes.common import (  # noqa: E402
    RESULTS,
    Recipe,
    Result,
    change_cells,
    circumstances_of,
    difference,
    load_config,
    markdown,
    percent,
    read_evaluations,
    read_lines,
    results_of,
    run,
    steps_done,
    write_json,
    write_result,
)
from reporting.figures import plot_estimates  # noqa: E402
from reporting.scoring import bootstrap  # noqa: E402

SHORT, MIDDLE, LONG = 2, 4, 8
STEPS_PER_HORIZON = 6
HORIZONS = {
    "short": ["--rounds", str(SHORT)],
    "long": ["--rounds", str(LONG)],
    "stepwise": ["--rounds-scheduler", "scaling_inter_stepwise"]
    + ["--rounds", str(SHORT), str(MIDDLE), str(LONG)]
    + ["--steps-scaling-inter", str(STEPS_PER_HORIZON)],
}
ARMS = tuple(HORIZONS)
PIECE = 6  # steps between evaluations, and the longest piece
COLORS = {"short": "#d9822b", "long": "#4c78a8", "stepwise": "#3a8f5c"}


def arm_arguments(arm: str, seed: int, run_dir: Path, extra: Sequence[str] = ()) -> list[str]:
    """train.py's arguments of an arm, without `--steps` and `--resume`.

    >>> arm_arguments("short", 0, Path("runs/x"))[-4:]
    ['--rounds', '2', '--run-dir', 'runs/x']
    """
    if arm not in HORIZONS:
        raise ValueError(f"--arm {arm} is unknown; choose one of: all {' '.join(ARMS)}")
    arguments = ["--env", "textcraft", "--seed", str(seed)]
    arguments += ["--eval-rounds", str(LONG), "--eval-samples", "2"]
    arguments += ["--eval-start-samples", "2"]
    # Arms take different numbers of steps: a rate that falls by steps would favour the short ones.
    arguments += ["--learning-rate-decay-steps", "0"]
    arguments += ["--eval-every", str(PIECE), "--save-every", str(PIECE)]
    return [*arguments, *HORIZONS[arm], *extra, "--run-dir", str(run_dir)]


def turns_by_step(metrics: Sequence[Mapping[str, Any]], per_step: int) -> list[int]:
    """Turns played in each step: mean turns of the step's trajectories times their number.

    Args:
        per_step: trajectories rolled per step; those lost to the environment played no turn that
            the policy could learn from and are not counted.
    """
    turns = []
    for row in metrics:
        lost = row.get("train/env_failures") or 0
        turns.append(round((row["train/turns_mean"] or 0.0) * (per_step - lost)))
    return turns


def next_piece(turns: Sequence[int], budget: int, horizon: int, per_step: int) -> int:
    """Steps to take now: up to the next evaluation, and no more than the budget has room for.

    Args:
        turns: played in each step so far.
        horizon: `max_rounds` of the next step; a step may be as long as per_step x horizon turns,
            and is expected to be as long as the last one.
    Returns: 0 when the budget is used up, or nearer than half a step.

    >>> next_piece([], budget=1000, horizon=4, per_step=64), next_piece([100] * 9, 1000, 4, 64)
    (4, 1)
    """
    left = budget - sum(turns)
    expected = turns[-1] if turns and turns[-1] else per_step * horizon
    room = math.floor(left / expected + 0.5)
    until_evaluation = PIECE - len(turns) % PIECE
    return max(0, min(room, until_evaluation))


def run_arm(arm: str, options: argparse.Namespace, extra: Sequence[str]) -> None:
    """train.py in pieces until the budget of turns is played; then the arm's result file."""
    from schedulers import make_scheduler

    run_dir = options.runs / f"{arm}-{options.seed}"
    arguments = arm_arguments(arm, options.seed, run_dir, extra)
    config = load_config(arguments)
    scheduler = make_scheduler(config.rounds_scheduler, config.rounds, config.steps_scaling_inter)
    per_step = config.tasks_per_step * config.group_size
    while True:
        turns = turns_by_step(finished_steps(run_dir), per_step)
        horizon = scheduler.rounds_at(len(turns) + 1)
        piece = next_piece(turns, options.turns, horizon, per_step)
        print(f"{arm}: {sum(turns)} of {options.turns} turns in {len(turns)} steps", flush=True)
        if not piece:
            break
        command = [sys.executable, "train.py", *arguments, "--steps", str(len(turns) + piece)]
        if (run_dir / "config.json").exists():
            command.append("--resume")
        run(command)
    result = {"arm": arm, "seed": options.seed, "budget_turns": options.turns}
    result |= circumstances_of(run_dir)
    result |= {"turns": turns, "points": evaluation_points(run_dir, turns)}
    write_result(options.results / "scaling_inter" / f"{arm}-{options.seed}.json", result)


def run_arms(options: argparse.Namespace, extra: Sequence[str]) -> None:
    """One arm, or all of them one after the other."""
    for arm in ARMS if options.arm == "all" else (options.arm,):
        run_arm(arm, options, extra)


def finished_steps(run_dir: Path) -> list[dict[str, Any]]:
    """Lines of metrics.jsonl up to the last checkpoint; a resumed run drops the ones after it."""
    last = steps_done(run_dir)
    return [row for row in read_lines(run_dir / "metrics.jsonl") if row["step"] <= last]


def evaluation_points(run_dir: Path, turns: Sequence[int]) -> list[dict[str, Any]]:
    """Every evaluation with the turns played before it and each goal's share of solved samples."""
    points = []
    for evaluation in read_evaluations(run_dir):
        if (step := evaluation["step"]) <= len(turns):
            point = {"step": step, "turns": sum(turns[:step]), "items": evaluation["items"]}
            points.append(point | {"avg": bootstrap(list(evaluation["items"].values()))})
    return points


def read_results(folder: Path) -> list[Result]:
    """The arms present, in the order of ARMS.

    Raises:
        ValueError: there is none, or budgets differ.
    """
    found = [result for arm in ARMS for result in results_of(folder / "scaling_inter", arm)]
    if not found:
        raise ValueError(
            f"{folder}/scaling_inter is empty; run: python recipes/scaling_inter.py run"
        )
    budgets = sorted({result["budget_turns"] for result in found})
    if len(budgets) > 1:
        raise ValueError(f"{folder}/scaling_inter mixes budgets of {budgets} turns; keep one")
    return found


def format_report(results: Sequence[Result]) -> str:
    """Markdown: one row per arm and seed, and the stepwise arm against the two fixed ones."""
    rows, last = [], {}
    for r in results:
        first, end = r["points"][0], r["points"][-1]
        last[r["arm"], r["seed"]] = end["items"]
        row = {"before": first["avg"], "after": end["avg"]}
        row["difference"] = difference(first["items"], end["items"])
        played = (len(r["turns"]), sum(r["turns"]))
        rows.append((r["arm"], r["seed"], *played, *change_cells(row)[1:]))
    lines = markdown(
        "arm | seed | steps | turns played | before, % | after, % | difference, points", rows
    )
    for (arm, seed), items in last.items():
        if arm != "stepwise" and ("stepwise", seed) in last:
            change = percent(difference(items, last["stepwise", seed]), signed=True)
            lines += ["", f"stepwise minus {arm}, seed {seed}: {change} points."]
    missing = [arm for arm in ARMS if arm not in {r["arm"] for r in results}]
    if missing:
        lines += ["", f"Not run: {' '.join(missing)}."]
    return "\n".join(lines)


def plot(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Held-out success over turns played; one line per arm and seed, intervals over goals."""
    curves = [
        (
            f"{r['arm']}, seed {r['seed']}",
            COLORS[r["arm"]],
            [{"turns": point["turns"], **point["avg"]} for point in r["points"]],
        )
        for r in results
    ]
    budget = results[0]["budget_turns"]
    note = f"95 % intervals over goals; every arm stops within a step of {budget:,} turns"
    labels = ("turns played in training", f"held-out goals solved in {LONG} turns, %")
    plot_estimates(path, curves, "turns", labels, note)


def report(folder: Path) -> str:
    """Reads the arms present, writes scaling_inter.png and .json, returns the table."""
    results = read_results(folder)
    plot(results, folder / "scaling_inter.png")
    rows = [
        r | {"points": [{k: v for k, v in p.items() if k != "items"} for p in r["points"]]}
        for r in results
    ]
    write_json(folder / "scaling_inter.json", rows)
    return format_report(results)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arm", choices=("all", *ARMS), default="all")
    parser.add_argument("--turns", type=int, default=3_600, help="environment turns of each arm")


def main(argv: Sequence[str] | None = None) -> int:
    return Recipe("scaling_inter", __doc__, RESULTS, add_options, run_arms, report).main(argv)


if __name__ == "__main__":
    sys.exit(main())
