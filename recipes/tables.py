"""Generate the tables of numbers and the pictures in README.md and RESULTS.md from results.

In a page, table NAME is between `<!-- table NAME -->` and `<!-- end NAME -->`.

    python recipes/tables.py                  rewrite the tables in the pages, and the pictures
    python recipes/tables.py --show horizons  print a table, including the results in runs/

A test fails when a page is out of date. Read first: evidence.py, which explains the intervals.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import gpu  # noqa: E402
from envs import load_tasks  # noqa: E402
from recipes import memory, miniature, worlds  # noqa: E402
from recipes.common import COMMITTED, Result, markdown, read_json, require_alike  # noqa: E402
from recipes.evidence import (  # noqa: E402
    Reading,
    Shares,
    at,
    cell,
    change,
    common_budget,
    compare,
    end,
    gains_by_seed,
    mean_over_seeds,
    only,
    over_seeds,
    pooled,
    seeds_cell,
    shares,
    smallest_effect,
    spent_at,
    start,
)
from recipes.laboratory import PLAYED, tier_of  # noqa: E402
from recipes.miniature import ESTIMATORS, PILOT_SEED, RATES, pilot, pilot_score  # noqa: E402
from reporting.plots import GREY, PALETTE, band, figure  # noqa: E402
from reporting.scoring import (  # noqa: E402
    brackets,
    estimate_share,
    paired_bootstrap,
    pass_at_k,
    percent,
)
from run.files import write_text  # noqa: E402

BENCHMARKS = ROOT / "benchmarks" / "results"
PAGES = ("README.md", "RESULTS.md", "recipes/results/memory.md")
COLORS = {"textcraft": "#3a8f5c", "babyai": "#4c78a8", "sciworld": "#d9822b", "searchqa": "#cc79a7"}
TASKS = {
    "textcraft": "TextCraft, new families of goals",
    "babyai": "BabyAI GoTo and Pickup, new seeds",
    "sciworld": "SciWorld, test variations",
    "searchqa": "SearchQA one hop, new countries",
}
CHANGE = "tasks | before, % | after, % | difference, points"
include_uncommitted = False  # set by --show


def results_of(folder: str, name: str) -> list[Result]:
    """The results in `<name>-<seed>.json` of a results folder, in the order of their seeds."""
    folders = [COMMITTED / folder]
    if include_uncommitted:
        folders.append(ROOT / worlds.RUNS / folder.replace("worlds", "results"))
    paths = sorted(path for parent in folders for path in parent.glob(f"{name}-[0-9].json"))
    return list(require_alike([read_json(path) for path in paths]))


def seeds_in(results: Sequence[Result]) -> str:
    return " ".join(str(result["seed"]) for result in results)


# -------------------------------------------------------------------------------- the default runs


def by_kind(kind_of: Mapping[str, str], before: Shares, after: Shares) -> list[list[str]]:
    """Rows (kind, its four cells): one for each kind with more than one task, then one for all."""
    rows = []
    for name in [*dict.fromkeys(kind_of.values()), "all"]:
        evaluations = [
            {i: x for i, x in items.items() if name in ("all", kind_of[i])}
            for items in (before, after)
        ]
        if len(evaluations[0]) > 1:
            rows.append([name, *change(*evaluations)])
    return rows


def by_subtask(results: Sequence[Result]) -> list[list[str]]:
    """`by_kind` for runs in one environment, whose kinds are its sub-tasks."""
    env, name = results[0]["env"], results[0]["config"]["eval_tasks"]
    tasks = load_tasks(env, file=ROOT / name if (ROOT / name).exists() else name)
    kind_of = {t.task_id: t.subtask for t in sorted(tasks, key=lambda task: task.subtask)}
    return by_kind(kind_of, pooled(results, start), pooled(results, end))


def default_runs() -> list[str]:
    rows = []
    for env in COLORS:
        results = results_of("worlds", env)
        rows += [(env, name, seeds_in(results), *cells) for name, *cells in by_subtask(results)]
    return markdown(f"environment | sub-task | seeds | {CHANGE}", rows)


def default_runs_summary() -> list[str]:
    rows = []
    for env, text in TASKS.items():
        results = results_of("worlds", env)
        tasks, *cells = change(pooled(results, start), pooled(results, end))
        gains = gains_by_seed([start(r) for r in results], [end(r) for r in results])
        by_seed = " ".join(f"{100 * gain:+.1f}" for gain in gains)
        interval = brackets(over_seeds(gains), signed=True)
        rows.append((text, tasks, *cells, f"{by_seed}; {interval}"))
    return markdown(f"environment | {CHANGE} | each seed; over seeds", rows)


def default_runs_of_methods() -> list[str]:
    rows = []
    for method in worlds.METHODS:
        results = results_of("worlds/methods", f"{method}-textcraft")
        head = (f"`{method}.py --env textcraft`", seeds_in(results), results[0]["steps"])
        rows += [(*head, name, *cells) for name, *cells in by_subtask(results)]
    return markdown(f"program | seeds | steps | sub-task | {CHANGE}", rows)


def published_split(env: str) -> list[str]:
    """The published test tasks before and after training, by sub-task."""
    results = [result for result in results_of("worlds", env) if result.get("test")]
    before, after = (
        mean_over_seeds([result["test"][when]["items"] for result in results])
        for when in ("before", "after")
    )
    kind_of = {task.task_id: task.subtask for task in load_tasks(env, "test")}
    rows = by_kind(kind_of, before, after)
    return markdown(f"sub-task | {CHANGE}", rows)


def controls_of_default() -> list[str]:
    """An earlier default run and its controls. RESULTS.md names the commit with their recipe."""
    rows = []
    for arm in ("rl", "sft", "shuffled"):
        results = results_of("learns", arm)
        rows.append((arm, seeds_in(results), *change(pooled(results, start), pooled(results, end))))
    return markdown(f"arm | seeds | {CHANGE}", rows)


def plot_worlds(path: Path) -> None:
    with figure(path, 7.5, 4.5) as picture:
        axis = picture.subplots()
        for env, color in COLORS.items():
            band(axis, curve_of(results_of("worlds", env)), color, env, scale=100)
        axis.set(xlabel="training steps", ylabel="held-out tasks solved, %")
        axis.set_title("95 % intervals over tasks", fontsize=9, fontweight="normal")
        picture.legend(loc="outside lower center", ncols=len(COLORS))


# --------------------------------------------------------------------------------- the laboratory

Runs = Mapping[str, Sequence[Result]]  # arm -> its results, by seed
FEW_TURNS, ALL_TURNS = 4, 16  # the short training horizon; the horizon of every evaluation
TURN_LIMITS = (FEW_TURNS, 8, ALL_TURNS)
LEARNERS = ("rl", "imitation", "filtered")
NUM_EDGE_STEPS = 30  # first and last steps of a run that `mechanism` reads


@cache
def laboratory_results(uncommitted: bool) -> miniature.Results:
    folders = [miniature.FOLDER] + [ROOT / miniature.RUNS / "results"] * uncommitted
    return miniature.read_results(*folders)


def runs_of(name: str) -> Runs:
    """The arms of a figure that have results."""
    results = laboratory_results(include_uncommitted)
    runs: dict[str, list[Result]] = {}
    for arm in miniature.FIGURES[name]:
        keys = [(arm, seed) for seed in miniature.seeds_of(name, arm)]
        runs[arm] = [results[key] for key in keys if key in results]
    return {arm: arm_results for arm, arm_results in runs.items() if arm_results}


def in_tier(reading: Reading, tier: str) -> Reading:
    return only(reading, lambda task_id: tier_of(task_id) == tier)


def comparison(
    runs: Runs, pairs: Sequence[tuple[str, str]], unit: str = "", tier_limit: int = FEW_TURNS
) -> list[str]:
    """Two tables: the success of each arm, and its differences from its start and other arms.

    Args:
        pairs: (arm, the arm to subtract or "its start").
        unit: compare runs at the largest budget in this unit ("turns", "seconds") that all of them
            reach; with "", at their ends.
        tier_limit: maximum turns in which a goal counts as solved in the columns by tier.
    """
    budget = common_budget([r for results in runs.values() for r in results], unit) if unit else 0

    def reading_within(limit: int) -> Reading:
        return at(budget, unit, limit) if unit else partial(end, within=limit)

    trained = [result for results in runs.values() for result in results if result["curve"]]
    rows = [state_row("start", trained, lambda limit: partial(start, within=limit), tier_limit)]
    rows += [state_row(arm, results, reading_within, tier_limit) for arm, results in runs.items()]
    titles = "arm | seeds | minutes | " + " | ".join(f"in {n} turns" for n in TURN_LIMITS)
    titles += f" | over seeds, in {FEW_TURNS} | over seeds, in {ALL_TURNS}"
    titles += "".join(f" | {tier}, in {tier_limit}" for tier in PLAYED)
    lines = (
        [f"Held-out goals solved, %, after {budget:,.0f} {unit} of training:", ""] if unit else []
    )
    lines += [*markdown(titles, rows), ""]
    gains = []
    for arm, baseline in pairs:
        cells = []
        for n in (FEW_TURNS, ALL_TURNS):
            base_reading = reading_within(n) if baseline in runs else partial(start, within=n)
            base_runs = runs.get(baseline, runs[arm])
            cells.append(compare(runs[arm], base_runs, reading_within(n), base_reading))
        gains.append((f"{arm} − {baseline}", *cells))
    titles = f"difference, points | in {FEW_TURNS} turns | in {ALL_TURNS} turns"
    return lines + markdown(titles, gains)


def from_start(arms: Sequence[str]) -> list[tuple[str, str]]:
    return [(arm, "its start") for arm in arms]


def state_row(
    arm: str, results: Sequence[Result], reading_within: Callable[[int], Reading], tier_limit: int
) -> list[str]:
    seconds = [result["curve"][-1]["seconds"] for result in results if result["curve"]]
    is_start, seed_limits = arm == "start", (FEW_TURNS, ALL_TURNS)
    row = [arm, "" if is_start else seeds_in(results)]
    row += ["" if is_start or not seconds else f"{statistics.fmean(seconds) / 60:.0f}"]
    row += [cell(results, reading_within(n)) for n in TURN_LIMITS]
    row += ["" if is_start else seeds_cell(results, reading_within(n)) for n in seed_limits]
    return row + [cell(results, in_tier(reading_within(tier_limit), tier)) for tier in PLAYED]


def horizons() -> list[str]:
    runs = runs_of("horizons")
    pairs = [("stepwise", "short"), ("stepwise", "long")]
    lines = comparison(runs, pairs, "turns", ALL_TURNS)
    titles = "arm | turns a step | in failed episodes, % | groups with signal, %"
    titles += f" | in the first {NUM_EDGE_STEPS} steps | in the last {NUM_EDGE_STEPS}"
    titles += " | tokens per success"
    rows = [(arm, *mechanism(results)) for arm, results in runs.items()]
    return [*lines, "", *markdown(titles, rows)]


def mechanism(results: Sequence[Result]) -> tuple[str, ...]:
    """Turns per step, share of them in failed episodes, groups with signal, tokens per success."""

    def signal_share(steps: slice) -> str:
        rows = [row for result in results for row in result["curve"][steps]]
        groups = sum(row["train/groups"] for row in rows)
        zero_variance = sum(row["train/groups_zero_variance"] for row in rows)
        return f"{100 * (groups - zero_variance) / groups:.0f}"

    last = [result["curve"][-1] for result in results]
    turns, failed, tokens, successes = (
        sum(row[name] for row in last) for name in ("turns", "failed_turns", "tokens", "successes")
    )
    parts = (slice(None), slice(NUM_EDGE_STEPS), slice(-NUM_EDGE_STEPS, None))
    return (
        f"{turns / sum(len(result['curve']) for result in results):.0f}",
        f"{100 * failed / turns:.0f}",
        *(signal_share(steps) for steps in parts),
        f"{tokens / successes:.0f}",
    )


def noise() -> list[str]:
    """The spread over runs of one arm that differ only in their seed."""
    runs, rows = runs_of("noise")["short"], []
    for limit in (FEW_TURNS, ALL_TURNS):
        ends = [statistics.fmean(end(r, limit).values()) for r in runs]
        starts = [statistics.fmean(start(r, limit).values()) for r in runs]
        gains = [after - before for before, after in zip(starts, ends, strict=True)]
        for name, values in ((f"end, in {limit} turns", ends), ("gain over the start", gains)):
            seeds = " ".join(f"{100 * v:.1f}" for v in values)
            mean, deviation = statistics.fmean(values), statistics.stdev(values)
            spread = (mean, deviation, smallest_effect(values, 3))
            rows.append((name, seeds, *(f"{100 * v:.1f}" for v in spread)))
    titles = "short, % | by seed | mean | standard deviation | smallest visible difference"
    return markdown(titles, rows)


def teacher() -> list[str]:
    runs = runs_of("teacher")
    lines = comparison(runs, [*from_start(LEARNERS), ("rl", "imitation"), ("rl", "filtered")])
    rows = []
    for tier in ("all", *PLAYED):
        cells = []
        for limit in (FEW_TURNS, ALL_TURNS):
            reading: Reading = partial(end, within=limit)
            reading = reading if tier == "all" else in_tier(reading, tier)
            gap = paired_bootstrap(reading(runs["teacher"][0]), pooled(runs["rl"], reading))
            cells.append(percent(gap, signed=True))
        rows.append((tier, *cells))
    titles = f"rl − teacher, points (over goals) | in {FEW_TURNS} turns | in {ALL_TURNS} turns"
    return [*lines, "", *markdown(titles, rows)]


def compute() -> list[str]:
    """Success with more turns and more samples, for the start and for two arms at their ends."""
    runs, limits = runs_of("compute"), (1, 2, 4, 6, 8, 12, 16)
    cases = {"start": (0, [r for results in runs.values() for r in results])}
    cases |= {arm: (-1, list(results)) for arm, results in runs.items()}
    rows = []
    for name, (index, results) in cases.items():
        evaluations = [result["held_out"][index] for result in results]
        columns = [mean_over_seeds([shares(e, n) for e in evaluations]) for n in limits]
        columns.append(mean_over_seeds([pass_at_2(e) for e in evaluations]))
        rows.append((name, *(percent(estimate_share(list(goals.values()))) for goals in columns)))
    turns = " | ".join("1 turn" if n == 1 else f"{n} turns" for n in limits)
    return markdown(f"% solved within | {turns} | one of two samples, {ALL_TURNS} turns", rows)


def pass_at_2(evaluation: Mapping[str, Any]) -> Shares:
    """For each goal the probability that at least one of two samples solves it."""
    return {
        task_id: pass_at_k(len(samples), sum(turns > 0 for turns in samples), 2)
        for task_id, samples in evaluation["solved_in"].items()
        if len(samples) >= 2
    }


def estimators() -> list[str]:
    runs = runs_of("estimators")
    pilots = [
        (a, *(f"{100 * pilot_score(runs[pilot(a, rate)][0]):.1f}" for rate in RATES))
        for a in ESTIMATORS
    ]
    rates = " | ".join(f"{rate:g}" for rate in RATES)
    lines = [f"Success on training goals in the last third of a pilot, %, seed {PILOT_SEED}:", ""]
    lines += [*markdown(f"estimator | {rates}", pilots), "", "With the best rate of each:", ""]
    pairs = [*from_start(ESTIMATORS), *(("grpo", baseline) for baseline in ESTIMATORS[1:])]
    return lines + comparison({a: runs[a] for a in ESTIMATORS}, pairs)


def methods() -> list[str]:
    pairs = [(method, "grpo") for method in miniature.METHODS] + [("own", "dpo")]
    pairs = [*from_start(miniature.METHODS), *pairs]
    return comparison(runs_of("methods"), pairs, "turns", ALL_TURNS)


def controls() -> list[str]:
    arms = miniature.FIGURES["controls"]
    pairs = [*from_start(arms), ("short", "shuffled"), ("short", "still")]
    return comparison(runs_of("controls"), pairs)


def widening() -> list[str]:
    pairs = [("early", "stepwise"), ("late", "stepwise")]
    return comparison(runs_of("widening"), pairs, "turns", ALL_TURNS)


def plot_laboratory(name: str, path: Path) -> None:
    """Plot held-out success over turns or seconds of training, with the teacher as a line."""
    runs = {arm: results for arm, results in runs_of(name).items() if "-" not in arm}  # no pilots
    curves = {arm: results for arm, results in runs.items() if results[0]["curve"]}
    unit, label = ("turns", "turns played in training")
    if name == "teacher":
        unit, label = ("seconds", "seconds of training")
    panels = [("all held-out", "", FEW_TURNS), ("all held-out", "", ALL_TURNS)]
    panels += [("middle", "middle", ALL_TURNS)] if name == "horizons" else []
    offset = 0.01 * max(r["curve"][-1][unit] for results in curves.values() for r in results)
    with figure(path, 4.0 * len(panels), 4.2) as picture:
        axes = picture.subplots(ncols=len(panels))
        for axis, (title, tier, limit) in zip(axes, panels, strict=True):
            colors = (*PALETTE, GREY, "#a0522d")
            for i, ((arm, results), color) in enumerate(zip(curves.items(), colors)):
                points = curve_of(results, unit, tier, limit)
                shifted = [(x + i * offset, estimate) for x, estimate in points]  # no overlap
                band(axis, shifted, color, arm, 100, fill=False)
            for result in runs.get("teacher", ()):
                value = 100 * statistics.fmean(end(result, limit).values())
                axis.axhline(value, color=GREY, linestyle="--", label="the teacher")
            axis.set_title(f"{title} goals, in {limit} turns")
            axis.set(ylabel="solved, %", xlabel=label)
            axis.locator_params(axis="x", nbins=5)
        lines = axes[0].get_legend_handles_labels()
        picture.legend(*lines, loc="outside lower center", ncols=min(5, len(lines[0])))


def curve_of(
    results: Sequence[Result], unit: str = "", tier: str = "", within: float = math.inf
) -> list[tuple[float, dict[str, Any]]]:
    """For each evaluation that all seeds have: (mean of `unit` spent so far, or the step if there
    is no unit; estimate over goals)."""
    by_seed = [{e["step"]: shares(e, within) for e in r["held_out"]} for r in results]
    points = []
    for step in sorted(set.intersection(*(set(seed) for seed in by_seed))):
        goals = mean_over_seeds([seed[step] for seed in by_seed])
        goals = {i: v for i, v in goals.items() if not tier or tier == tier_of(i)}
        x = statistics.fmean(spent_at(r, step, unit) for r in results) if unit else step
        points.append((x, estimate_share(list(goals.values()))))
    return points


# ------------------------------------------------------------------------------------- benchmarks


def speed() -> list[str]:
    """The results of the benchmarks, each with its command."""

    def read(name: str) -> Any:
        return read_json(BENCHMARKS / f"{name}.json")

    rows = []
    for name, slots, options in (("rollout", 64, ""), ("rollout-32", 32, " --max-num-seqs 32")):
        no_delay, delay, tail = (read(name)["summary"][key] for key in ("none", "100 ms", "tail"))
        text = f"rollout loop, 64 trajectories, {slots} engine slots: tokens/s relative to"
        command = f"`python benchmarks/rollout.py{options}`"
        ratios = f"{no_delay['ratio_to_engine']:.2f}; {delay['ratio_to_engine']:.2f}"
        rows.append((f"{text} the bare engine, steps of 0 and 100 ms", ratios, "-; 0.85", command))
        ratio = f"{tail['ratio_to_lockstep']:.1f}"
        rows.append((f"{text} a lockstep loop, 5 % of steps take 2 s", ratio, "1.5", command))
    for model, options in (("tiny", ""), ("smollm2-135m", " --tasks 4 --repeats 3")):
        text = f"update, {model}: tokens/s relative to a bare forward and backward pass"
        command = f"`python benchmarks/update.py --model {model}{options}`"
        rows.append((text, read(f"update_{model}")["summary"]["ratio"], "0.9", command))
    for name, work, options in (
        ("trl_step", "the default step", " --repeats 3"),
        ("trl_step-equal", "equal work", " --tasks 2 --repeats 5 --train-on-all"),
    ):
        times = read(name)["summary"]["trl_over_ours"]
        ratios = "; ".join(f"{times[f'{part}_s']:.1f}" for part in ("rollout", "update", "step"))
        text = f"TRL 1.16's GRPOTrainer with transformers, {work}: its time divided by ours, "
        text += "rollout; update; step"
        rows.append((text, ratios, "-", f"`python benchmarks/trl_step.py{options}`"))
    for env in ("babyai", "sciworld", "searchqa"):
        result = read(f"environments-{env}")
        text = f"{env}'s server, {result['sessions']} sessions: steps/s relative to a plain server"
        command = f"`python benchmarks/environments.py --env {env}`"
        rows.append((text, f"{result['ratio']:g}", "-", command))
    return markdown("measurement | value | target | command", rows)


# ------------------------------------------------------------------------------------------ pages

TABLES: dict[str, Callable[[], list[str]]] = {
    "short": default_runs_summary,
    "worlds": default_runs,
    "textcraft-test": partial(published_split, "textcraft"),
    "searchqa-test": partial(published_split, "searchqa"),
    "learns": controls_of_default,
    "worlds-methods": default_runs_of_methods,
    "horizons": horizons,
    "widening": widening,
    "noise": noise,
    "controls": controls,
    "teacher": teacher,
    "compute": compute,
    "estimators": estimators,
    "methods": methods,
    "speed": speed,
    "arithmetic": memory.arithmetic,
    "gpu-update": lambda: gpu.update_table(read_json(BENCHMARKS / "gpu-3B.json")["update"]),
    "gpu-run": lambda: gpu.run_table(read_json(BENCHMARKS / "gpu-3B.json")["runs"]),
}
PICTURES = ("horizons", "controls", "teacher", "estimators", "methods")


def with_tables(text: str) -> str:
    """A page with its tables regenerated."""
    for name, table in TABLES.items():
        opening, closing = f"<!-- table {name} -->\n", f"<!-- end {name} -->"
        if opening in text:
            before, _, tail = text.partition(opening)
            table_text = "\n".join(table()) + "\n"
            text = before + opening + table_text + closing + tail.partition(closing)[2]
    return text


def main() -> None:
    global include_uncommitted
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--show",
        choices=TABLES,
        nargs="+",
        help="print these tables, including the results in runs/, and write nothing",
    )
    options = parser.parse_args()
    if options.show:
        include_uncommitted = True
        print("\n\n".join("\n".join(TABLES[name]()) for name in options.show))
        return
    for page in PAGES:
        write_text(ROOT / page, with_tables((ROOT / page).read_text(encoding="utf-8")))
    plot_worlds(COMMITTED / "worlds.png")
    for name in PICTURES:
        plot_laboratory(name, miniature.FOLDER / f"{name}.png")


if __name__ == "__main__":
    main()
