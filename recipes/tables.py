"""Generate the tables of numbers and the pictures in README.md and RESULTS.md from results.

In a page, table NAME is between `<!-- table NAME -->` and `<!-- end NAME -->`.

    python recipes/tables.py                  rewrite the tables in the pages, and the pictures
    python recipes/tables.py --show rates     print a table, including the results in runs/

A test fails when a page is out of date. Read first: evidence.py, which explains the intervals.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks import gpu
from envs import call_static, get_env
from envs.babyai.levels import LEVELS, level_and_seed
from envs.sciworld.tasks import find_task
from envs.textcraft.recipes import recipe_book
from formats import FORMATS
from recipes import memory, miniature, worlds
from recipes.common import (
    COMMITTED,
    Result,
    commits_of,
    markdown,
    read_json,
    require_alike,
)
from recipes.evidence import (
    Comparison,
    KindOf,
    Reading,
    Shares,
    Spread,
    at,
    cell,
    common_budget,
    compare,
    end,
    mean_over_seeds,
    only,
    pooled,
    sampling_variance,
    shares,
    spent_at,
    spread,
    start,
)
from recipes.laboratory import PLAYED, TIERS, tier_of
from recipes.miniature import (
    ESTIMATORS,
    HORIZONS,
    MANY,
    OFTEN,
    PILOT_SEED,
    PRIMARY,
    RATES,
    at_rate,
    pilot,
    pilot_score,
)
from reporting.compare import brackets
from reporting.plots import GREY, PALETTE, band, figure
from reporting.scoring import estimate_share
from run.files import write_text

BENCHMARKS = ROOT / "benchmarks" / "results"
PAGES = ("README.md", "RESULTS.md", "recipes/results/memory.md")
COLORS = {"textcraft": "#3a8f5c", "babyai": "#4c78a8", "sciworld": "#d9822b", "searchqa": "#cc79a7"}
TASKS = {
    "textcraft": "TextCraft (a former default), new families of goals",
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


def kind_in(env: str) -> KindOf:
    """task_id -> the kind of an environment's task: goals of a kind are alike."""

    def kind(task_id: str) -> str:
        index = int(task_id.rpartition("_")[2])
        if env == "textcraft":  # dark_oak_door -> door
            return recipe_book().goals[index].rpartition("_")[2]
        if env == "babyai":
            return LEVELS[level_and_seed(index)[0] - 1]
        if env == "sciworld":
            return find_task(index)[0].name
        return str(call_static(get_env(env), "subtask", index))

    return cache(kind)


KIND_NAMES = {"textcraft": "families", "babyai": "levels", "sciworld": "kinds", "searchqa": "kinds"}


@cache
def starts_of(env: str) -> tuple[Result, ...]:
    """All evaluations of the weights that the default runs of an environment start from."""
    methods = ("dpo", "agentevol") if env == "textcraft" else ()
    results = [r for m in methods for r in results_of("worlds/methods", f"{m}-{env}")]
    return (*results_of("worlds", env), *results)


def changes(
    env: str,
    before: Sequence[Result],
    after: Sequence[Result],
    at_start: Reading,
    at_end: Reading,
    samples: int = 2,
) -> list[tuple[str, int, str, str, Comparison]]:
    """Rows (sub-task, number of tasks, before, after, difference): one for each sub-task with more
    than one task, then one for all. `before` are evaluations of the same weights."""

    def subtask(task_id: str) -> str:
        return str(call_static(get_env(env), "subtask", int(task_id.rpartition("_")[2])))

    rows = []
    for name in (*sorted({subtask(task_id) for task_id in at_end(after[0])}), "all"):
        accept = partial(is_in, name, subtask)
        first, last = only(at_start, accept), only(at_end, accept)
        if (num_tasks := len(last(after[0]))) > 1:
            run_spread = spread([after], last, samples)
            gain = compare(after, before, last, first, kind_in(env), run_spread, is_start=True)
            rows.append((name, num_tasks, cell(before, first), cell(after, last), gain))
    return rows


def is_in(name: str, part_of: KindOf, task_id: str) -> bool:
    return name in ("all", part_of(task_id))


def default_runs() -> list[str]:
    rows = []
    for env in COLORS:
        results = results_of("worlds", env)
        cells = changes(env, starts_of(env), results, start, end)
        rows += [(env, name, seeds_in(results), *row) for name, *row in cells]
    commits = "; ".join(f"{env}: {commits_of(results_of('worlds', env))}" for env in COLORS)
    return [*markdown(f"environment | sub-task | seeds | {CHANGE}", rows), "", f"{commits}."]


def default_runs_summary() -> list[str]:
    rows = []
    for env, text in TASKS.items():
        results = results_of("worlds", env)
        *_, before_all, after_all, gain = changes(env, starts_of(env), results, start, end)[-1]
        kinds = f"{gain.kinds['kinds']} {KIND_NAMES[env]}" if gain.kinds["kinds"] > 1 else "-"
        intervals = [brackets(e, signed=True) for e in (gain.goals, gain.kinds, gain.seeds)]
        counts = f"{gain.goals['items']}; {kinds}; {len(results)}"
        ends = (before_all.split()[0], after_all.split()[0])
        rows.append((text, counts, *ends, f"{100 * gain.goals['value']:+.1f}", *intervals))
    titles = "environment | tasks; kinds; seeds | before, % | after, % | difference, points"
    return markdown(f"{titles} | over tasks | over kinds | over seeds", rows)


def default_runs_of_methods() -> list[str]:
    rows = []
    for method in worlds.METHODS:
        results = results_of("worlds/methods", f"{method}-textcraft")
        head = (f"`{method}.py --env textcraft`", seeds_in(results), results[0]["steps"])
        before = results if method == "sft" else starts_of("textcraft")
        cells = changes("textcraft", before, results, start, end)
        rows += [(*head, *row) for row in cells]
    return markdown(f"program | seeds | steps | sub-task | {CHANGE}", rows)


def published_split(env: str) -> list[str]:
    """The published test tasks before and after training, by sub-task and temperature."""
    results = [result for result in results_of("worlds", env) if result.get("test")]
    rows = []
    for temperature in results[0]["test"]["after"]:
        first, last = (partial(published, when, temperature) for when in ("before", "after"))
        samples = results[0]["test"]["after"][temperature]["samples"]
        cells = changes(env, results, results, first, last, samples)
        rows += [(temperature, *row) for row in cells]
    return markdown(f"temperature | sub-task | {CHANGE}", rows)


def published(when: str, temperature: str, result: Result) -> Shares:
    return dict(result["test"][when][temperature]["items"])


def against_imitation(env: str) -> list[str]:
    """The default run, against imitation of its warm start's demonstrations for as long: on its
    held-out tasks and on the published ones, at both temperatures."""
    arms = {"RL": results_of("worlds", env)}
    arms["imitation"] = results_of("worlds/methods", f"{worlds.IMITATION}-{env}")
    if len({len(results) for results in arms.values()}) > 1:
        return []
    rows, before = [], all_results(arms)
    for temperature in worlds.TEMPERATURES:
        other = "" if temperature == worlds.TEMPERATURES[0] else temperature
        readings: dict[str, tuple[Reading, Reading]] = {
            "held-out": (partial(start, temperature=other), partial(end, temperature=other)),
            "published": (
                partial(published, "before", temperature),
                partial(published, "after", temperature),
            ),
        }
        for tasks, (first, last) in readings.items():
            run_spread = spread(list(arms.values()), last, SAMPLES)
            versus = partial(compare, kind_of=kind_in(env), run_spread=run_spread)
            pairs = [(f"{a} − start", results, before, first, True) for a, results in arms.items()]
            pairs.append(("RL − imitation", arms["RL"], arms["imitation"], last, False))
            for name, runs, base, read, is_start in pairs:
                difference = versus(runs, base, last, read, is_start=is_start)
                cells = (cell(base, read), cell(runs, last), difference)
                rows.append((tasks, temperature, name, *cells))
    titles = "tasks | temperature | difference | from, % | to, % | points"
    hours = ", ".join(f"{arm} {fmean(r['hours'] for r in rs):.1f}" for arm, rs in arms.items())
    note = f"Seeds {seeds_in(arms['RL'])}; hours: {hours}; {commits_of(before)}."
    return [*markdown(titles, rows), "", note]


def formats() -> list[str]:
    """Three ways to write an action, after equal warm starts and then five steps of RL."""
    rows = []
    for name in FORMATS:
        if not (results := results_of("worlds", name)):
            return []
        first = [result["curve"][0] for result in results]
        valid = 100 * (1 - fmean(row["train/parse_error_rate"] for row in first))
        tokens = fmean(row["tokens"] / row["turns"] for row in first)
        shares = (cell(results, start), cell(results, end))
        rows.append((name, seeds_in(results), f"{valid:.1f}", f"{tokens:.1f}", *shares))
    titles = "format | seeds | turns with a valid action, % | sampled tokens per turn"
    return markdown(f"{titles} | held-out goals after the warm start, % | after RL, %", rows)


def controls_of_default() -> list[str]:
    """An earlier default run and its controls. RESULTS.md names the commit with their recipe."""
    arms = {arm: results_of("learns", arm) for arm in ("rl", "sft", "shuffled")}
    every = [result for results in arms.values() for result in results]
    run_spread = spread([arms["rl"]], end, arms["rl"][0]["held_out"][-1]["samples"])
    rows = []
    for arm, results in arms.items():
        gain = compare(results, every, end, start, kind_in("textcraft"), run_spread, is_start=True)
        rows.append((arm, seeds_in(results), gain.goals["items"], cell(results, end), str(gain)))
    titles = "arm | seeds | tasks | after, % | difference from the start, points"
    return [f"Start, %: {cell(every, start)}", "", *markdown(titles, rows)]


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
LIMITS = {ALL_TURNS: (FEW_TURNS, 8, ALL_TURNS), 24: (8, 12, 24)}  # by the evaluation's horizon
LEARNERS = ("practise", "imitate", "filter")
SAMPLES = 2  # of each goal in an evaluation
COOL = "0.3"  # the second temperature of evaluations
level_of = kind_in("babyai")


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


def all_results(runs: Runs) -> list[Result]:
    return [result for results in runs.values() for result in results]


def config_of(runs: Runs) -> Mapping[str, Any]:
    """The options of one of the runs."""
    return all_results(runs)[0]["config"]


@cache
def evaluations_of(model: str, temperature: str) -> tuple[Result, ...]:
    """The laboratory's runs whose first evaluation measures these weights on held-out mazes."""
    results = laboratory_results(include_uncommitted).values()
    runs = [r for r in results if r["curve"] and r["config"]["model"] == model]
    runs = [r for r in runs if r["held_out"][0]["solved_in"]]
    return tuple(r for r in runs if not temperature or r.get("held_out_at"))


def start_of(runs: Runs, temperature: str = "") -> tuple[Result, ...]:
    return evaluations_of(config_of(runs)["model"], temperature)


def in_tier(tier: str) -> Callable[[str], bool]:
    return lambda task_id: tier_of(task_id) == tier


def reading_of(runs: Runs, unit: str, temperature: str = "") -> Callable[[float], Reading]:
    """Turns -> a reading of goals solved within so many turns: at the ends of the runs, or with a
    unit at the largest budget that all of them reach."""
    if not unit:
        return lambda limit: partial(end, within=limit, temperature=temperature)
    budget = common_budget(all_results(runs), unit)
    return lambda limit: at(budget, unit, limit, temperature)


def spread_in(runs: Runs, reading: Reading, pair: Sequence[str] = ()) -> Spread:
    """The spread of the runs in a figure, without arms that collapsed, whose spread is another;
    but always with the arms of `pair`."""
    base = fmean(pooled(start_of(runs), start).values())
    alive = [
        results
        for arm, results in runs.items()
        if arm in pair or fmean(pooled(results, end).values()) > base / 2
    ]
    return spread(alive or list(runs.values()), reading, SAMPLES)


def limits_of(runs: Runs) -> tuple[int, ...]:
    """The numbers of turns within which a table counts success; the last one is the horizon of
    the evaluations."""
    return LIMITS[config_of(runs)["eval_rounds"]]


def comparison(
    runs: Runs,
    pairs: Sequence[tuple[str, str]],
    unit: str = "",
    tiers_in_all_turns: bool = False,
    temperature: str = "",
) -> list[str]:
    """Two tables: the success of each arm, and its differences from its start and other arms.

    Args:
        pairs: (arm, the arm to subtract or "its start").
        unit: compare runs at the largest budget in this unit that all of them reach; with "", at
            their ends.
        tiers_in_all_turns: the columns by tier count success in the most turns, not the fewest.
    """
    limits = limits_of(runs)
    few, most = limits[0], limits[-1]
    tier_limit = most if tiers_in_all_turns else few
    reading, before = reading_of(runs, unit, temperature), start_of(runs, temperature)
    spreads = {n: spread_in(runs, reading(n)) for n in (few, most)}

    def first(limit: int) -> Reading:
        return partial(start, within=limit, temperature=temperature)

    tiers = [t for t in TIERS if only(first(most), in_tier(t))(before[0])]
    rows = [["start", f"{len(before)} evaluations"], *([arm, seeds_in(runs[arm])] for arm in runs)]
    for row, (rs, f) in zip(
        rows, [(before, first), *((rs, reading) for rs in runs.values())], strict=True
    ):
        row += [cell(rs, f(n)) for n in limits]
        row += [over_seeds(rs, f(n), spreads[n]) if f is reading else "" for n in spreads]
        row += [cell(rs, only(f(tier_limit), in_tier(tier))) for tier in tiers]
    titles = "arm | seeds | " + " | ".join(f"in {n} turns" for n in limits)
    titles += f" | over seeds, in {few} | over seeds, in {most}"
    titles += "".join(f" | {tier}, in {tier_limit}" for tier in tiers)
    lines = []
    if unit:
        budget = common_budget(all_results(runs), unit)
        spent = f"{budget:,.0f} {unit.rstrip('s')}s"
        lines = [f"Held-out goals solved, %, after {spent} of training:", ""]
    lines += [*markdown(titles, rows), ""]
    gains = []
    for arm, baseline in pairs:
        is_start = baseline == "its start"
        base, read = (before, first) if is_start else (runs[baseline], reading)
        cells = [
            compare(runs[arm], base, reading(n), read(n), level_of, run_spread, is_start)
            for n, run_spread in spreads.items()
        ]
        gains.append((f"{arm} − {baseline}", *cells))
    titles = f"difference, points | in {few} turns | in {most} turns"
    goals = first(most)(before[0])
    kinds = f"{len({level_of(i) for i in goals})} levels"
    note = f"{len(goals)} goals of {kinds}; {commits_of(all_results(runs))}."
    return [*lines, *markdown(titles, gains), "", note]


def at_both_temperatures(
    runs: Runs,
    pairs: Sequence[tuple[str, str]],
    unit: str = "",
    tiers_in_all_turns: bool = False,
    title: str = "Temperature",
) -> list[str]:
    """The tables of `comparison` at both temperatures, each after its title."""
    lines = []
    for temperature in ("", COOL):
        tables = comparison(runs, pairs, unit, tiers_in_all_turns, temperature)
        lines += [f"{title} {temperature or 1}:", "", *tables, ""]
    return lines[:-1]


def rate_of(results: Sequence[Result]) -> str:
    return f"{results[0]['config']['learning_rate']:g}"


def cpu_minutes(results: Sequence[Result]) -> str:
    return f"{fmean(result['curve'][-1]['cpu_seconds'] for result in results) / 60:.0f}"


def from_start(arms: Sequence[str]) -> list[tuple[str, str]]:
    return [(arm, "its start") for arm in arms]


def over_seeds(results: Sequence[Result], reading: Reading, run_spread: Spread) -> str:
    """The interval of an arm's mean over seeds."""
    mean = fmean(pooled(results, reading).values())
    return brackets(run_spread.interval(mean, 1 / len(results)))


def by_level(runs: Runs, unit: str) -> list[str]:
    """Success of each arm, level by level. The 15 mazes of a level are too few for an interval
    that says more than that the large differences are real."""
    within = limits_of(runs)[-1]
    reading, first = reading_of(runs, unit), partial(start, within=within)
    before = start_of(runs)
    rows = []
    levels = {level_of(task_id) for task_id in first(before[0])}
    numbers = (number for tier in TIERS.values() for number in tier)
    for name in (LEVELS[number - 1] for number in numbers if LEVELS[number - 1] in levels):
        tier = tier_of(f"babyai_{LEVELS.index(name)}")
        accept = partial(is_in, name, level_of)
        means = [fmean(pooled(before, only(first, accept)).values())]
        means += [fmean(pooled(rs, only(reading(within), accept)).values()) for rs in runs.values()]
        level = name.removeprefix("BabyAI-").rpartition("-")[0]
        rows.append((level, tier, *(f"{100 * x:.0f}" for x in means)))
    return markdown(f"% solved in {within} turns | tier | start | {' | '.join(runs)}", rows)


def development(result: Result) -> Shares:
    """The shares of the mazes that choose a setting, at the end of a run."""
    return shares({"solved_in": result["held_out"][-1]["development"]}, ALL_TURNS)


def best_rates(runs: Runs) -> dict[str, str]:
    """Horizon -> the arm whose runs solve most development mazes, among its learning rates."""
    means = {arm: fmean(pooled(results, development).values()) for arm, results in runs.items()}
    arms = {h: [at_rate(h, rate) for rate in RATES if at_rate(h, rate) in means] for h in HORIZONS}
    return {h: max(names, key=lambda name: means[name]) for h, names in arms.items() if names}


def late_mean(results: Sequence[Result], name: str, digits: int) -> str:
    """The mean of a metric over the last sixth of the steps. Steps without an update have none; if
    there are no others, "-"."""
    rows = [row for r in results for row in r["curve"][-len(r["curve"]) // 6 :]]
    values = [row[name] for row in rows if name in row]
    return f"{fmean(values):.{digits}f}" if values else "-"


def rates() -> list[str]:
    runs, titles = runs_of("rates"), "arm | seeds | development, in 16 turns | entropy at the end"
    lines, rows = [], []
    if not runs:
        return []
    for arm, results in runs.items():
        entropy = late_mean(results, "policy/entropy", 2)
        rows.append([arm, seeds_in(results), cell(results, development), entropy])
    for temperature in ("", COOL):
        reading = reading_of(runs, "turns", temperature)
        for n in (FEW_TURNS, ALL_TURNS):
            titles += f" | in {n}, temperature {temperature or 1}"
            for row, results in zip(rows, runs.values(), strict=True):
                row.append(cell(results, reading(n)))
    lines += [*markdown(titles, rows), ""]
    arms = miniature.FIGURES["rates"]
    if any(len(runs.get(arm, ())) < len(miniature.SEEDS) for arm in arms):
        return lines
    best = best_rates(runs)
    chosen = {horizon: runs[arm] for horizon, arm in best.items()}
    in_all_turns = reading_of(chosen, "turns")(ALL_TURNS)
    lines += [*primary("rates", chosen, ("stepwise", "short"), in_all_turns), ""]
    pairs = [("stepwise", "short"), ("stepwise", "long"), ("long", "short")]
    title = "Each horizon at its best rate, temperature"
    lines += [*at_both_temperatures(chosen, pairs, "turns", True, title=title), ""]
    equal = {arm: runs[arm] for arm in (at_rate("short", 1e-4), *OFTEN)}
    pairs = [(arm, at_rate("short", 1e-4)) for arm in OFTEN]
    lines += ["Equal turns and equal updates (180), learning rate 1e-4:", ""]
    return [*lines, *comparison(equal, pairs, "turns", True), "", *by_level(runs, "turns")]


def primary(figure_name: str, runs: Runs, pair: tuple[str, str], reading: Reading) -> list[str]:
    """The comparison that a figure was made for, and how large a difference it could find."""
    (a, b), run_spread = (runs[arm] for arm in pair), spread_in(runs, reading, pair)
    difference = compare(a, b, reading, reading, level_of, run_spread)
    text = f"Primary comparison: {PRIMARY[figure_name]}. Result: {difference}."
    if not run_spread.freedom:
        return [text]
    effect = 100 * run_spread.detectable(min(len(a), len(b)))
    return [f"{text} A true difference of {effect:.1f} points would be found with power 0.8."]


def imitation() -> list[str]:
    """RL, more demonstrations by a weak teacher, and imitation of the policy's own successes."""
    runs = runs_of("imitation")
    arms = {arm: runs[arm] for arm in LEARNERS}
    near = only(reading_of(arms, "", COOL)(FEW_TURNS), in_tier("near"))
    lines = [*primary("imitation", arms, ("practise", "imitate"), near), ""]
    pairs = [*from_start(LEARNERS), ("practise", "imitate"), ("practise", "filter")]
    lines += [*at_both_temperatures(arms, pairs), ""]
    rows = []
    for arm, results in arms.items():
        for temperature in ("", COOL):
            cells = []
            for tier in PLAYED:
                reading = only(reading_of(arms, "", temperature)(FEW_TURNS), in_tier(tier))
                teacher = only(partial(end, within=FEW_TURNS), in_tier(tier))
                noise = spread_in(arms, reading)
                cells.append(
                    compare(results, runs["teacher"], reading, teacher, level_of, noise, True)
                )
            rows.append((arm, rate_of(results), cpu_minutes(results), temperature or 1, *cells))
    titles = "arm | learning rate | CPU minutes | temperature"
    titles += "".join(f" | minus the teacher, {tier}, in {FEW_TURNS} turns" for tier in PLAYED)
    return [*lines, *markdown(titles, rows)]


def growth(name: str, arms: Sequence[str]) -> list[str]:
    """Is there a regime in which it helps to grow the horizon?

    Args:
        arms: the short horizon, the long one, the growing one, and another one that may be stable.
    """
    runs = {arm: results for arm, results in runs_of(name).items() if arm in arms}
    short, long, grow, other = arms
    is_missing = any(len(runs.get(a, ())) < len(miniature.seeds_of(name, a)) for a in (long, grow))
    if is_missing or len(runs) < len(arms):  # the primary comparison has all its seeds
        return []
    reading = reading_of(runs, "turns")(MANY)
    lines = [*primary(name, runs, (grow, long), reading), ""]
    far = only(reading, in_tier("far"))
    gap = compare(runs[long], runs[short], far, far, level_of, spread_in(runs, far, (long, short)))
    lines += [f"Do far mazes need the long horizon? {long} − {short} there: {gap}.", ""]
    pairs = [(long, short), (grow, short), (grow, long), (grow, other)]
    lines += [*at_both_temperatures(runs, pairs, "turns", True), ""]
    lines += ["Equal numbers of steps, temperature 1:", ""]
    lines += [*comparison(runs, pairs, "step", True), ""]
    titles = "arm | learning rate | groups with mixed outcomes, % | episodes cut by the horizon, %"
    titles += " | turns cut at their limit, % | entropy at the end | KL at the end"
    titles += " | runs that collapsed, after how many turns | CPU minutes"
    rows = []
    for arm, results in runs.items():
        curve = [row for result in results for row in result["curve"]]
        mixed = sum(r["train/groups_mixed"] for r in curve) / sum(r["train/groups"] for r in curve)
        cuts = [
            fmean(row[x] for row in curve) for x in ("train/stop/max_rounds", "train/cut_turn_rate")
        ]
        late = [late_mean(results, x, 3) for x in ("policy/entropy", "policy/kl")]
        falls = [f"{turns:,.0f}" for turns in map(collapse, results) if turns]
        cells = [*(f"{100 * x:.0f}" for x in (mixed, *cuts)), *late]
        cells += [
            f"{len(falls)} of {len(results)}: {', '.join(falls) or '-'}",
            cpu_minutes(results),
        ]
        rows.append((arm, rate_of(results), *cells))
    return [*lines, *by_level(runs, "turns"), "", *markdown(titles, rows)]


def plot_ends(name: str, arms: Sequence[str], unit: str, within: int, path: Path) -> None:
    """Success by tier at equal budgets (`reading_of`): an arm's mean, its runs as small dots, and
    the start; where the figure has a teacher, its success as a line."""
    results_of = runs_of(name)
    runs = {arm: results_of[arm] for arm in arms}
    tiers = [t for t in TIERS if only(start, in_tier(t))(next(iter(runs.values()))[0])]
    with figure(path, 9, 4.2) as picture:
        axes = picture.subplots(ncols=2, sharey=True)
        for axis, temperature in zip(axes, ("", COOL), strict=True):
            reading = reading_of(runs, unit, temperature)(within)
            first = partial(start, within=within, temperature=temperature)
            for i, tier in enumerate(tiers):
                accept = in_tier(tier)
                before = fmean(pooled(start_of(runs, temperature), only(first, accept)).values())
                label = "start" if i == 0 else ""
                axis.bar(i, 100 * before, width=0.8, color=GREY, alpha=0.25, label=label)
                for j, ((arm, results), color) in enumerate(zip(runs.items(), PALETTE)):
                    x = i + 0.18 * (j - (len(runs) - 1) / 2)
                    values = [100 * fmean(only(reading, accept)(r).values()) for r in results]
                    axis.plot([x] * len(values), values, ".", color=color, alpha=0.5)
                    label = arm if i == 0 else ""
                    axis.plot(x, fmean(values), "o", color=color, markersize=8, label=label)
                for teacher in results_of.get("teacher", ()):
                    value = 100 * fmean(only(partial(end, within=within), accept)(teacher).values())
                    label = "the teacher" if i == 0 else ""
                    axis.hlines(value, i - 0.4, i + 0.4, GREY, "--", label=label)
            axis.set_xticks(range(len(tiers)), tiers)
            axis.grid(visible=False, axis="x")
            axis.set_title(f"held-out goals in {within} turns, temperature {temperature or 1}")
        axes[0].set(ylabel="solved, %", ylim=(0, 100))
        lines = axes[0].get_legend_handles_labels()
        picture.legend(*lines, loc="outside lower center", ncols=5)


def against(
    name: str, arms: Sequence[str], control: str, others: Sequence[tuple[str, str]] = ()
) -> list[str]:
    """Each of the arms against a control, GRPO ("long" is the best rate of that horizon), and
    `others`, pairs of arms."""
    runs = runs_of(name)
    if control == "long" and all(at_rate("long", rate) in runs for rate in RATES):
        runs = {**runs, "long": runs[best_rates(runs)["long"]]}
    runs = {arm: runs[arm] for arm in (control, *arms) if arm in runs}
    if len(runs) <= len(arms) or len({len(results) for results in runs.values()}) > 1:
        return []
    reading = reading_of(runs, "turns")(ALL_TURNS)
    lines = [*primary(name, runs, (arms[0], control), reading), ""]
    pairs = [*((arm, control) for arm in arms), *others]
    lines += [*at_both_temperatures(runs, pairs, "turns", True), ""]
    titles = "arm | learning rate | entropy at the end | turns that began in another's state, %"
    rows = []
    for arm, results in runs.items():
        shares = [r.get("data/anchored_share") for x in results for r in x["curve"]]
        shares = [share for share in shares if share is not None]
        anchored = f"{100 * fmean(shares):.0f}" if shares else "-"
        entropy = late_mean(results, "policy/entropy", 3)
        rows.append((arm, rate_of(results), entropy, anchored, cpu_minutes(results)))
    return [*lines, *markdown(f"{titles} | CPU minutes", rows)]


def ways() -> list[str]:
    """Four ways to play. Each has a start of its own: the same weights play each differently."""
    runs = runs_of("ways")
    if any(len(runs.get(arm, ())) < len(miniature.SEEDS) for arm in miniature.WAYS):
        return []
    reading = reading_of(runs, "turns")(math.inf)
    lines = [*primary("ways", runs, ("several", "plain"), reading), ""]
    rows = []
    for temperature in ("", COOL):
        first = partial(start, temperature=temperature)
        reading = reading_of(runs, "turns", temperature)(math.inf)
        run_spread = spread_in(runs, reading)
        for arm, results in runs.items():
            gain = compare(results, results, reading, first, level_of, run_spread, is_start=True)
            lead = compare(results, runs["plain"], reading, reading, level_of, run_spread)
            shares = (cell(results, first), cell(results, reading))
            cells = (temperature or 1, arm, seeds_in(results), *shares, gain)
            rows.append((*cells, "-" if arm == "plain" else lead, *cost(results)))
    titles = "temperature | arm | seeds | before, % | after, % | difference from its start, points"
    titles += " | minus plain | turns per episode | sampled tokens per turn"
    return [*lines, *markdown(titles, rows), "", f"{commits_of(all_results(runs))}."]


def cost(results: Sequence[Result]) -> tuple[str, str]:
    """Turns per episode and sampled tokens per turn, in the last sixth of the steps."""
    late = [r["curve"][-len(r["curve"]) // 6 :] for r in results]
    turns, tokens = (sum(c[-1][x] - c[0][x] for c in late) for x in ("turns", "tokens"))
    per_episode = fmean(row["train/turns_mean"] for curve in late for row in curve)
    return f"{per_episode:.1f}", f"{tokens / turns:.1f}"


def collapse(result: Result) -> float:
    """Turns after which a run solves, over five steps, less than half of what it solved in its
    first five, and never more again; 0 if that does not happen."""
    success, turns = ([row[x] for row in result["curve"]] for x in ("train/success_rate", "turns"))
    means = [fmean(success[i : i + 5]) for i in range(len(success) - 4)]
    alive = [i for i, mean in enumerate(means) if mean >= means[0] / 2]
    return 0.0 if alive[-1] == len(means) - 1 else float(turns[alive[-1] + 5])


def plot_rates(path: Path) -> None:
    """Success over the learning rate, for each horizon and two temperatures."""
    runs = runs_of("rates")
    with figure(path, 9, 4.2) as picture:
        axes = picture.subplots(ncols=2)
        for axis, limit in zip(axes, (FEW_TURNS, ALL_TURNS), strict=True):
            for temperature, line in (("", "-"), (COOL, "--")):
                reading = reading_of(runs, "turns", temperature)(limit)
                for horizon, color in zip(HORIZONS, PALETTE, strict=False):
                    arms = [(rate, runs.get(at_rate(horizon, rate), ())) for rate in RATES]
                    seeds = [(x, [100 * fmean(reading(r).values()) for r in rs]) for x, rs in arms]
                    points = [(x, fmean(values)) for x, values in seeds if values]
                    label = f"{horizon}, temperature {temperature or 1}"
                    axis.plot(
                        *zip(*points, strict=True), line, color=color, marker="o", label=label
                    )
                    for x, values in seeds if not temperature else ():  # each run as a small dot
                        axis.plot([x] * len(values), values, ".", color=color, alpha=0.4)
                first = partial(start, within=limit, temperature=temperature)
                value = 100 * fmean(pooled(start_of(runs, temperature), first).values())
                axis.axhline(
                    value, color=GREY, ls=line, label=f"start, temperature {temperature or 1}"
                )
            axis.set_title(f"held-out goals, in {limit} turns")
            axis.set(ylabel="solved, %", xlabel="learning rate", xscale="log")
            axis.set_xticks(RATES, [f"{rate:g}" for rate in RATES])
            axis.minorticks_off()
        lines = axes[0].get_legend_handles_labels()
        picture.legend(*lines, loc="outside lower center", ncols=4)


TRAINED = ("short", "long", "stepwise", "early", "late", *LEARNERS)


def noise() -> list[str]:
    """How far apart runs are that differ only in their seed, and what that allows to see."""
    results = laboratory_results(include_uncommitted)
    arms = [
        [r for (arm, _), r in results.items() if arm == name]
        for name in (*TRAINED, *ESTIMATORS[1:])
    ]
    rows = []
    for limit in (FEW_TURNS, ALL_TURNS):
        reading: Reading = partial(end, within=limit)
        five = [fmean(reading(r).values()) for r in arms[0]]
        pool = spread(arms, reading, SAMPLES)
        variances = [sampling_variance([reading(r) for r in arm], SAMPLES) for arm in arms]
        values = (statistics.stdev(five), math.sqrt(fmean(variances)), pool.deviation)
        effects = [pool.detectable(seeds) for seeds in (3, 5, 10)]
        seeds = " ".join(f"{100 * v:.1f}" for v in five)
        cells = [f"{100 * v:.1f}" for v in (*values, *effects)]
        rows.append((f"in {limit} turns", seeds, *cells))
    titles = "% solved | five runs of short | their standard deviation | noise of an evaluation"
    titles += f" | standard deviation within {len(arms)} arms | difference found with power 0.8: "
    return markdown(titles + "3 seeds | 5 seeds | 10 seeds", rows)


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
    return comparison(runs_of("methods"), pairs, "turns", True)


def controls() -> list[str]:
    arms = miniature.FIGURES["controls"]
    pairs = [*from_start(arms), ("short", "shuffled"), ("short", "still")]
    return comparison(runs_of("controls"), pairs)


def widening() -> list[str]:
    pairs = [("early", "stepwise"), ("late", "stepwise"), ("late", "early")]
    return comparison(runs_of("widening"), pairs, "turns", True)


def plot_laboratory(name: str, path: Path) -> None:
    """Plot held-out success over turns played in training."""
    runs = {arm: results for arm, results in runs_of(name).items() if "-" not in arm}  # no pilots
    panels = (FEW_TURNS, ALL_TURNS)
    offset = 0.01 * max(r["curve"][-1]["turns"] for r in all_results(runs))
    with figure(path, 4.0 * len(panels), 4.2) as picture:
        axes = picture.subplots(ncols=len(panels))
        for axis, limit in zip(axes, panels, strict=True):
            colors = (*PALETTE, GREY, "#a0522d")
            for i, ((arm, results), color) in enumerate(zip(runs.items(), colors)):
                points = curve_of(results, "turns", limit)
                shifted = [(x + i * offset, estimate) for x, estimate in points]  # no overlap
                band(axis, shifted, color, arm, 100, fill=False)
            axis.set_title(f"held-out goals, in {limit} turns")
            axis.set(ylabel="solved, %", xlabel="turns played in training")
            axis.locator_params(axis="x", nbins=5)
        lines = axes[0].get_legend_handles_labels()
        picture.legend(*lines, loc="outside lower center", ncols=min(5, len(lines[0])))


def curve_of(
    results: Sequence[Result], unit: str = "", within: float = math.inf
) -> list[tuple[float, dict[str, Any]]]:
    """For each evaluation that all seeds have: (mean of `unit` spent so far, or the step if there
    is no unit; estimate over goals)."""
    by_seed = [{e["step"]: shares(e, within) for e in r["held_out"]} for r in results]
    points = []
    for step in sorted(set.intersection(*(set(seed) for seed in by_seed))):
        goals = mean_over_seeds([seed[step] for seed in by_seed])
        x = fmean(spent_at(r, step, unit) for r in results) if unit else step
        points.append((x, estimate_share(list(goals.values()))))
    return points


# ------------------------------------------------------------------------------------- benchmarks


def speed() -> list[str]:
    """The results of the benchmarks, each with its command."""

    def read(name: str) -> Any:
        return read_json(BENCHMARKS / f"{name}.json")

    rows = []
    for name, slots, options in (("rollout", 64, ""), ("rollout-32", 32, " --max-num-seqs 32")):
        text = f"rollout loop, 64 trajectories, {slots} engine slots: tokens/s relative to"
        speeds = (read(name)["summary"][delay]["ratio_to_engine"] for delay in ("none", "100 ms"))
        values = "; ".join(f"{ratio:.2f}" for ratio in speeds)
        command = f"`python benchmarks/rollout.py{options}`"
        rows.append((f"{text} the bare engine, steps of 0 and 100 ms", values, "-; 0.85", command))
    for name, work, options in (
        ("trl_step", "the default step", " --repeats 3"),
        ("trl_step-equal", "equal work", " --tasks 2 --repeats 5 --train-on-all"),
    ):
        times = read(name)["summary"]["trl_over_ours"]
        ratios = "; ".join(f"{times[f'{part}_s']:.1f}" for part in ("rollout", "update", "step"))
        text = f"TRL 1.16's GRPOTrainer with transformers, {work}: its time divided by ours, "
        text += "rollout; update; step"
        rows.append((text, ratios, "-", f"`python benchmarks/trl_step.py{options}`"))
    return markdown("measurement | value | target | command", rows)


# ------------------------------------------------------------------------------------------ pages

TABLES: dict[str, Callable[[], list[str]]] = {
    "short": default_runs_summary,
    "worlds": default_runs,
    "textcraft-test": partial(published_split, "textcraft"),
    "formats": formats,
    "default": partial(against_imitation, "textcraft"),
    "searchqa-test": partial(published_split, "searchqa"),
    "learns": controls_of_default,
    "worlds-methods": default_runs_of_methods,
    "rates": rates,
    "imitation": imitation,
    "growth": partial(growth, "growth", ("cap8", "cap24", "grow", "shrink")),
    "hot": partial(growth, "hot", ("hot-cap8", "hot-cap24", "hot-grow", "hot-clamp")),
    "credit": partial(against, "credit", tuple(miniature.CREDIT), "long"),
    "losses": partial(against, "losses", tuple(miniature.LOSSES)[1:], "grpo-4"),
    "distillation": partial(
        against,
        "distillation",
        tuple(miniature.DISTILLATION),
        "long",
        (
            *(("from-model", "shown-by-model"), ("from-model-grow", "from-model")),
            *(("from-oracle", "shown-by-oracle"), ("from-oracle-grow", "from-oracle")),
        ),
    ),
    "ways": ways,
    "widening": widening,
    "noise": noise,
    "controls": controls,
    "estimators": estimators,
    "methods": methods,
    "speed": speed,
    "arithmetic": memory.arithmetic,
    "gpu-update": lambda: gpu.update_table(read_json(BENCHMARKS / "gpu-3B.json")["update"]),
    "gpu-run": lambda: gpu.run_table(read_json(BENCHMARKS / "gpu-3B.json")["runs"]),
}
PICTURES = ("controls", "estimators", "methods")


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
    plot_rates(miniature.FOLDER / "rates.png")
    plot_ends("growth", tuple(miniature.CAPS), "turns", MANY, miniature.FOLDER / "growth.png")
    plot_ends("imitation", LEARNERS, "", FEW_TURNS, miniature.FOLDER / "imitation.png")
    for name in PICTURES:
        plot_laboratory(name, miniature.FOLDER / f"{name}.png")


if __name__ == "__main__":
    main()
