"""What the runs of miniature.py came to: tables for RESULTS.md, pictures beside the results.

Read next: evidence.py, which says what an interval is over; miniature_plan.py.
"""

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from recipes.common import (  # noqa: E402
    Result,
    difference,
    markdown,
    mean_over_seeds,
    percent,
)
from recipes.evidence import (  # noqa: E402
    Reading,
    Shares,
    at,
    cell,
    common_budget,
    compare,
    end,
    of_tier,
    seeds_cell,
    shares,
    smallest_effect,
    spent_at,
    spread,
    start,
)
from recipes.laboratory import PLAYED  # noqa: E402
from recipes.miniature_plan import (  # noqa: E402
    ESTIMATORS,
    FIGURES,
    PILOT_SEED,
    RATES,
    pilot,
    pilot_score,
    read_results,
    runs_behind,
)
from reporting.plots import GREEN, GREY, ORANGE, PALETTE, band, figure  # noqa: E402
from reporting.scoring import bootstrap, pass_at_k  # noqa: E402
from run.files import write_text  # noqa: E402

PAGE = ROOT / "RESULTS.md"
Runs = Mapping[str, Sequence[Result]]  # arm -> its results, by seed
LEARNERS = FIGURES["teacher"][1:]

# -------------------------------------------------------------------------------------- the figures


BUDGETS = (4, 8, 16)  # turns that an evaluation's episode may take: its success within each
SOON, LATE = BUDGETS[0], BUDGETS[-1]  # what short horizons train for; all that is played


def horizons(runs: Runs) -> list[str]:
    arms = [name for name in ("short", "long", "stepwise") if runs.get(name)]
    every = [result for name in arms for result in runs[name]]
    lines: list[str] = []
    for unit in ("turns", "seconds"):
        budget = common_budget(every, unit)
        lines += [f"Held-out goals solved, %, after {budget:,.0f} {unit} of training:", ""]
        lines += [*at_budget(runs, arms, every, budget, unit), ""]
        for name in arms:
            if name != "stepwise" and "stepwise" in arms:
                for most in BUDGETS[::2]:
                    reading = at(budget, unit, most)
                    told = compare(runs["stepwise"], runs[name], reading, reading)
                    lines += [f"stepwise minus {name}, in {most} turns: {told} points.", ""]
    lines += ["What the turns were spent on, over whole runs:", ""]
    titles = "arm | turns a step | of them in episodes that failed, % | groups with signal, % | "
    titles += f"in the first {PART} steps | in the last {PART} | tokens per success"
    lines += markdown(titles, [(name, *mechanism(runs[name])) for name in arms])
    return lines


def widening(runs: Runs) -> list[str]:
    """Does it matter when the horizon widens?"""
    arms = [name for name in FIGURES["widening"] if runs.get(name)]
    every = [result for name in arms for result in runs[name]]
    budget = common_budget(every, "turns")
    lines = [f"Held-out goals solved, %, after {budget:,.0f} turns of training:", ""]
    lines += at_budget(runs, arms, every, budget, "turns")
    for name in arms:
        for most in BUDGETS[::2] if name != "stepwise" and "stepwise" in arms else ():
            reading = at(budget, "turns", most)
            told = compare(runs[name], runs["stepwise"], reading, reading)
            lines += ["", f"{name} minus stepwise, in {most} turns: {told} points."]
    return lines


def at_budget(
    runs: Runs, arms: Sequence[str], every: Sequence[Result], budget: float, unit: str
) -> list[str]:
    """A row for the start and for each arm: within 4, 8 and 16 turns, over seeds, by kind."""

    def row(
        name: str, seeds: int | str, results: Sequence[Result], of: Callable[[float], Reading]
    ) -> tuple[str, ...]:
        within = [cell(results, of(most)) for most in BUDGETS]
        spans = [
            seeds_cell(results, of(most)) if seeds else "" for most in (BUDGETS[0], BUDGETS[-1])
        ]
        return (name, str(seeds), *within, *spans, *by_tier(results, of(BUDGETS[-1])))

    rows = [row("start", "", every, lambda most: partial(start, within=most))]
    rows += [
        row(name, len(runs[name]), runs[name], lambda most: at(budget, unit, most)) for name in arms
    ]
    last = BUDGETS[-1]
    titles = ["arm", "seeds", *(f"in {most} turns" for most in BUDGETS)]
    titles += [f"seeds, in {BUDGETS[0]}", f"seeds, in {last}"]
    return markdown(" | ".join([*titles, *(f"{tier}, in {last}" for tier in PLAYED)]), rows)


def by_tier(results: Sequence[Result], reading: Reading) -> tuple[str, ...]:
    return tuple(cell(results, reading, tier) for tier in PLAYED)


PART = 30  # steps at the beginning and at the end of a run


def mechanism(results: Sequence[Result]) -> tuple[str, ...]:
    """What the turns went into; the share of groups in which returns differed, so that there was
    something to learn from."""

    def with_signal(part: slice) -> str:
        rows = [row for result in results for row in result["curve"][part]]
        groups = sum(row["train/groups"] for row in rows)
        silent = sum(row["train/groups_zero_variance"] for row in rows)
        return f"{100 * (groups - silent) / groups:.0f}"

    last = [result["curve"][-1] for result in results]
    turns, failed, tokens, successes = (
        sum(row[name] for row in last) for name in ("turns", "failed_turns", "tokens", "successes")
    )
    return (
        f"{turns / sum(len(result['curve']) for result in results):.0f}",
        f"{100 * failed / turns:.0f}",
        *(with_signal(part) for part in (slice(None), slice(PART), slice(-PART, None))),
        f"{tokens / successes:.0f}",
    )


def plain(names: Sequence[str], against: str) -> Callable[[Runs], list[str]]:
    """A table of arms at their ends, and each against one of them; in as many turns as they were
    trained with."""

    def lines_of(runs: Runs) -> list[str]:
        arms = [name for name in names if runs.get(name)]
        first, last = partial(start, within=SOON), partial(end, within=SOON)
        rows = []
        for name in arms:
            minutes = statistics.fmean(r["curve"][-1]["seconds"] for r in runs[name]) / 60
            rows.append(
                (name, " ".join(str(r["seed"]) for r in runs[name]), f"{minutes:.1f}")
                + (cell(runs[name], first), cell(runs[name], last), seeds_cell(runs[name], last))
                + (*(cell(runs[name], last, tier) for tier in PLAYED), cell(runs[name], end))
            )
        titles = f"arm | seeds | minutes | start, in {SOON} turns | end | over seeds | "
        titles += " | ".join(PLAYED) + f" | end, in {LATE} turns"
        lines = markdown(titles, rows)
        for name in arms:
            told = compare(runs[name], runs[name], last, first)
            lines += ["", f"{name} minus its start: {told} points."]
            if against in arms and name != against:
                told = compare(runs[against], runs[name], last, last)
                lines[-1] += f" {against} minus {name}: {told}."
        return lines

    return lines_of


def noise(runs: Runs) -> list[str]:
    """How far apart runs of one arm end that differ in their seed alone."""
    rows = []
    for most in (SOON, LATE):
        ends = [statistics.fmean(end(r, most).values()) for r in runs["short"]]
        starts = [statistics.fmean(start(r, most).values()) for r in runs["short"]]
        gains = [after - before for before, after in zip(starts, ends, strict=True)]
        for name, values in ((f"end, in {most} turns", ends), ("gain over the start", gains)):
            figures = (statistics.fmean(values), spread(values), smallest_effect(values, 3))
            seeds = " ".join(f"{100 * v:.1f}" for v in values)
            rows.append((name, seeds, *(f"{100 * v:.1f}" for v in figures)))
    titles = "short, % | by seed | mean | standard deviation | smallest effect of three seeds"
    return markdown(titles, rows)


def teacher(runs: Runs) -> list[str]:
    """The arms that learn from the weak teacher, or by themselves, beside what it can do itself."""
    lines = plain(LEARNERS, against="rl")(runs)
    budget = common_budget([r for name in LEARNERS for r in runs.get(name, ())], "seconds")
    reading = at(budget, "seconds", SOON)
    told = [
        f"rl minus {name} {compare(runs['rl'], runs[name], reading, reading)}"
        for name in LEARNERS[1:]
        if runs.get("rl") and runs.get(name)
    ]
    if told:
        lines += ["", f"After {budget:.0f} seconds of each, in {SOON} turns: {', '.join(told)}."]
    if not runs.get("teacher"):
        return lines
    own = [cell(runs["teacher"], partial(end, within=most)) for most in BUDGETS]
    said = [f"in {most} turns {share}" for most, share in zip(BUDGETS, own, strict=True)]
    kinds = [f"{t} {cell(runs['teacher'], partial(end, within=SOON), t)}" for t in PLAYED]
    lines += ["", f"The teacher itself, %: {', '.join(said)}; in {SOON} turns {', '.join(kinds)}."]
    for most in (SOON, LATE) if runs.get("rl") else ():
        ours = mean_over_seeds([end(r, most) for r in runs["rl"]])
        taught, gaps = end(runs["teacher"][0], most), []
        for tier in (None, *PLAYED):
            gap = difference(of_tier(taught, tier), of_tier(ours, tier))
            gaps.append(f"{tier or 'all goals'} {percent(gap, signed=True)}")
        lines += ["", f"rl minus the teacher, in {most} turns: {', '.join(gaps)} (goals)."]
    return lines


def compute(runs: Runs) -> list[str]:
    """What more turns and more samples buy: the start, and the ends of two arms."""
    within, samples = (1, 2, 4, 6, 8, 12, 16), (1, 2)
    rows, more = [], []
    for name, results, place, _ in compared(runs):
        evaluations = [result["held_out"][place] for result in results]
        rows.append((name, *(over_goals(evaluations, shares, n) for n in within)))
        more.append((name, *(over_goals(evaluations, passes, k) for k in samples)))
    lines = markdown(
        "% solved within | " + " | ".join("1 turn" if n == 1 else f"{n} turns" for n in within),
        rows,
    )
    return [*lines, "", *markdown("% solved by one of | " + " | ".join(map(str, samples)), more)]


def compared(runs: Runs) -> list[tuple[str, Sequence[Result], int, str]]:
    """(name, results, which of their evaluations, color) of what `compute` compares."""
    every = [result for arm in FIGURES["compute"] for result in runs.get(arm, ())]
    parts = [("start", every, 0, GREY)]
    colors = {"imitation": ORANGE, "rl": GREEN}
    return parts + [(n, runs[n], -1, color) for n, color in colors.items() if runs.get(n)]


def over_goals(
    evaluations: Sequence[Any], of: Callable[[Mapping[str, Any], int], Shares], n: int
) -> str:
    return percent(bootstrap(list(mean_over_seeds([of(e, n) for e in evaluations]).values())))


def passes(evaluation: Mapping[str, Any], k: int) -> Shares:
    """The chance that one of k samples solves each goal."""
    return {
        i: pass_at_k(len(samples), sum(turns > 0 for turns in samples), k)
        for i, samples in evaluation["solved_in"].items()
        if len(samples) >= k
    }


# ----------------------------------------------------------------------------------------- pictures


Panel = tuple[str, str | None, int]  # title, kind of goal (None: all), turns allowed
ALL: Panel = (f"all held-out goals, in {LATE} turns", None, LATE)
AT_ONCE: Panel = (f"all held-out goals, in {SOON} turns", None, SOON)
KINDS: tuple[Panel, ...] = tuple((f"{t} goals, in {LATE} turns", t, LATE) for t in PLAYED)


def curves(
    path: Path,
    runs: Runs,
    names: Sequence[str],
    unit: str,
    label: str,
    panels: Sequence[Panel],
) -> None:
    """Held-out success over what was spent, seeds pooled by goal; a teacher's as a line."""
    size = (4.0 * len(panels), 4.2)
    with figure(path, size, ncols=len(panels), squeeze=False) as (picture, axes):
        for axis, (title, tier, within) in zip(axes[0], panels, strict=True):
            colors = (*PALETTE, GREY)[: len(names)]
            for place, (name, color) in enumerate(zip(names, colors, strict=True)):
                if runs.get(name):
                    points = pooled(runs[name], unit, tier, within)
                    band(axis, points, color, name, 100, fill=False, shift=3.0 * place)
            for taught in runs.get("teacher", ()):
                solved = of_tier(end(taught, within), tier)
                value = 100 * statistics.fmean(solved.values())
                axis.axhline(value, color=GREY, linestyle="--", label="the teacher")
            axis.set_title(title)
            axis.margins(x=max(0.05, 0.012 * len(names)))  # points are shifted, not to hide others
            axis.set(ylabel="solved, %", xlabel=label)
            axis.locator_params(axis="x", nbins=5)
        lines = axes[0][0].get_legend_handles_labels()
        rows = -(-len(lines[0]) // 6)  # more than six names are wider than the picture
        picture.legend(*lines, loc="outside lower center", ncols=-(-len(lines[0]) // rows))


def pooled(
    results: Sequence[Result], unit: str, tier: str | None, within: int
) -> list[tuple[float, dict[str, Any]]]:
    """(mean spent, estimate over goals) at each evaluation that all seeds have."""
    steps = set.intersection(*({e["step"] for e in r["held_out"]} for r in results))
    points = []
    for step in sorted(steps):
        found = [shares(e, within) for r in results for e in r["held_out"] if e["step"] == step]
        goals = mean_over_seeds([of_tier(f, tier) for f in found])
        spent = statistics.fmean(spent_at(r, step, unit) for r in results)
        points.append((spent, bootstrap(list(goals.values()))))
    return points


def plot_compute(path: Path, runs: Runs) -> None:
    """Success over turns and over samples."""
    with figure(path, (9.5, 4.0), ncols=2, sharey=True) as (_, (left, right)):
        for name, results, place, color in compared(runs):
            evaluations = [r["held_out"][place] for r in results]
            for axis, xs, of in ((left, range(1, 17), shares), (right, (1, 2), passes)):
                points = [
                    (x, bootstrap(list(mean_over_seeds([of(e, x) for e in evaluations]).values())))
                    for x in xs
                ]
                band(axis, points, color, name, scale=100)
        left.set(xlabel="turns allowed", ylabel="held-out goals solved, %")
        right.set(xlabel="samples, one of which solves it", xticks=(1, 2))
        left.legend(loc="best")


# --------------------------------------------------------------------------------------- the report


def estimators(runs: Runs) -> list[str]:
    rows = []
    for algorithm in ESTIMATORS:
        found = [runs.get(pilot(algorithm, rate)) for rate in RATES]
        rows.append((algorithm, *(f"{100 * pilot_score(f[0]):.1f}" if f else "-" for f in found)))
    rates = " | ".join(f"{rate:g}" for rate in RATES)
    lines = [f"Success on training goals in the last third of a pilot, %, seed {PILOT_SEED}:", ""]
    lines += markdown(f"estimator | {rates}", rows)
    if not any(runs.get(algorithm) for algorithm in ESTIMATORS):
        return lines
    return [*lines, "", "With the best of them:", "", *plain(ESTIMATORS, against="grpo")(runs)]


TABLES: dict[str, Callable[[Runs], list[str]]] = {
    "horizons": horizons,
    "widening": widening,
    "controls": plain(FIGURES["controls"], against="short"),
    "noise": noise,
    "teacher": teacher,
    "compute": compute,
    "estimators": estimators,
}


def draw(name: str, runs: Runs, folder: Path) -> None:
    """The figure's picture; `noise` and `widening` have none."""
    path, turns = folder / f"{name}.png", "turns played in training"
    if name == "horizons":
        curves(path, runs, FIGURES[name], "turns", turns, (AT_ONCE, ALL, KINDS[-1]))
    elif name == "teacher":
        seconds = "seconds of training"
        curves(path, runs, LEARNERS, "seconds", seconds, (AT_ONCE, ALL))
    elif name == "estimators":
        curves(path, runs, ESTIMATORS, "turns", turns, (AT_ONCE, ALL))
    elif name == "controls":
        curves(path, runs, FIGURES[name], "turns", turns, (AT_ONCE, ALL))
    elif name == "compute":
        plot_compute(path, runs)


def report(names: Sequence[str], folder: Path, page: Path = PAGE) -> str:
    """The tables of figures that have results; into the page too, between their markers, and
    pictures beside the results."""
    results = read_results(folder)
    parts = []
    for name in names:
        runs = runs_behind(name, results)
        if not any(runs.values()):
            continue
        table = "\n".join(TABLES[name](runs))
        draw(name, runs, folder)
        insert(page, name, table)
        parts.append(f"{name}\n\n{table}")
    return "\n\n".join(parts) or f"no results in {folder}; python recipes/miniature.py makes them"


def insert(page: Path, name: str, table: str) -> None:
    """Put a table between its markers on the page, if it has them."""
    first, last = f"<!-- miniature {name} -->\n", f"<!-- end {name} -->"
    text = page.read_text(encoding="utf-8")
    if first in text:
        before, _, rest = text.partition(first)
        after = rest.partition(last)[2]
        write_text(page, f"{before}{first}{table}\n{last}{after}")
