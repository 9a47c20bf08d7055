"""SFT, DPO and AgentEvol beside the estimators of RL: from one start, at equal turns played.

The laboratory's (laboratory.py): ten levels of BabyAI, held-out mazes, a model of 3M parameters
that has imitated a careless teacher. Every method begins with it, plays with at most 4 turns, and
may spend as many turns as `short` does in miniature.py, those of a teacher included, also where he
failed:

    sft          fresh episodes of the teacher, each seen once
    dpo          pairs of what the policy has just played, twelve times
    agentevol    512 episodes of the teacher; explores four times, learns from the start each time
    few          the same with 64 of his episodes and more of its own: his errors weigh less
    last         few, but an iteration goes on from the one before, and what it explores joins the
                 demonstrations alone; twelve short ones, as many as dpo has
    own          last with next to none of them (8), and all its successes, each counted as often as
                 it was played alike; twice as many iterations
    cloning      a control of agentevol: those 512 alone, for as many steps as an iteration has
    unweighted   another one: of each task what it explored first joins, whatever that earned: all
                 returns are 1, so that more joins

and grpo, rloo, reinforce_plus_plus, ppo and stepwise from miniature.py's results. RL's learning
rate was chosen by pilots and does not fall; these methods' was not tuned, and falls to 0 over their
steps.

    python recipes/methods.py run --method sft --seed 0     runs or resumes: results/methods/
    python recipes/methods.py report                        table and picture of what is there

A run may be killed at any time; the same command goes on. What follows the known options is handed
on to the method's program. Read next: miniature.py, evidence.py.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from recipes import laboratory  # noqa: E402
from recipes.common import (  # noqa: E402
    RESULTS,
    Recipe,
    Result,
    markdown,
    planned,
    read_json,
    read_lines,
    train,
    write_json,
)
from recipes.evidence import Shares, common_budget, compare, end, start  # noqa: E402
from recipes.miniature import record  # noqa: E402
from recipes.miniature_plan import BASE, ESTIMATORS, SEEDS, read_results  # noqa: E402
from recipes.miniature_plan import FOLDER as MINIATURE  # noqa: E402
from recipes.miniature_report import (  # noqa: E402
    ALL,
    AT_ONCE,
    LATE,
    SOON,
    at_budget,
    curves,
    insert,
)

FOLDER = RESULTS / "methods"
PAGE = ROOT / "RESULTS.md"
TURNS = (
    *("--rounds", "4", "--warm-start", "never", "--mini-batch-size", "64"),
    *(
        "--on-collapse",
        "warn",
        "--max-trajectory-tokens",
        "4096",
    ),  # all but 3 in 3,456 of the teacher's fit
)


@dataclass(frozen=True)
class Arm:
    """A program, its words beside those of miniature.json, and how many episodes it is shown."""

    program: str
    words: tuple[str, ...]
    steps: int
    shown: int = 0


EVOLVE = (
    *("--iterations", "4", "--group-size", "8", "--keep-per-task", "2"),
    *("--learn-from", "base", "--merge-with", "all"),
    *("--learning-rate", "1e-4", "--eval-every", "60"),
)
BROAD, ONCE = ("--tasks-per-iteration", "320"), ("--weighting", "return")
ARMS = {
    "sft": Arm("sft.py", ("--learning-rate", "1e-4", "--eval-every", "18"), 54, 54 * 64),
    "dpo": Arm(
        "dpo.py",
        ("--iterations", "12", "--tasks-per-iteration", "120", "--group-size", "8")
        + ("--learning-rate", "3e-5", "--sft-coef", "0", "--eval-every", "60"),
        180,
    ),
    "agentevol": Arm("agentevol.py", (*EVOLVE, *BROAD, *ONCE), 240, 512),
    "few": Arm("agentevol.py", (*EVOLVE, *ONCE, "--tasks-per-iteration", "360"), 240, 64),
    "last": Arm(
        "agentevol.py",
        ("--iterations", "12", "--tasks-per-iteration", "120", "--group-size", "8")
        + ("--learn-from", "last", "--merge-with", "demonstrations")
        + ("--keep-per-task", "2", *ONCE, "--learning-rate", "1e-4", "--eval-every", "60"),
        240,
        64,
    ),
    "own": Arm(
        "agentevol.py",
        ("--iterations", "24", "--tasks-per-iteration", "60", "--group-size", "8")
        + ("--keep-per-task", "8", "--weighting", "played")
        + ("--learn-from", "last", "--merge-with", "demonstrations")
        + ("--learning-rate", "2e-4", "--eval-every", "60"),
        240,
        8,
    ),
    "cloning": Arm("sft.py", ("--learning-rate", "1e-4", "--eval-every", "60"), 60, 512),
    "unweighted": Arm(
        "agentevol.py", (*EVOLVE, *BROAD, "--ignore-returns", "--weighting", "one"), 240, 512
    ),
}
OTHERS = (*ESTIMATORS, "stepwise")  # of miniature.py


# -------------------------------------------------------------------------------------------- a run


def arguments_of(arm: Arm, seed: int, run_dir: Path, extra: Sequence[str] = ()) -> list[str]:
    """The program's."""
    words = ["--config", str(BASE), "--seed", str(seed), "--steps", str(arm.steps)]
    words += [*TURNS, *arm.words, *extra, "--run-dir", str(run_dir)]
    return words + (["--data", str(shown_file(run_dir))] if arm.shown else [])


def kind_of(arm: Arm) -> Any:
    """The class of its program's options."""
    from agentevol import EvolConfig
    from dpo import DpoConfig
    from sft import SftConfig

    kinds = (SftConfig, DpoConfig, EvolConfig)
    return next(kind for kind in kinds if kind.program == arm.program)


def shown_file(run_dir: Path) -> Path:
    return run_dir.with_name(f"{run_dir.name}-shown.json")


def play(options: argparse.Namespace, extra: Sequence[str]) -> None:
    """One run, or the rest of it; its result."""
    arm, name = ARMS[options.method], f"{options.method}-{options.seed}"
    run_dir = options.runs / name
    shown_turns = 0.0
    if arm.shown:
        shown_turns = show(shown_file(run_dir), arm.shown, options.seed)
    words = arguments_of(arm, options.seed, run_dir, extra)
    steps = planned(words, kind_of(arm)).steps
    train(words, run_dir, steps, kind_of(arm))
    result = {"arm": options.method, "seed": options.seed} | record(run_dir, steps)
    count_shown(result, arm, shown_turns)
    result |= learned_from(run_dir)
    write_json(options.results / f"{name}.json", result)
    print(f"wrote {options.results / name}.json", flush=True)


def show(path: Path, count: int, seed: int) -> float:
    """Write the teacher's episodes, if they are not there; what one has cost in turns, his failures
    on the way included."""
    about = path.with_suffix(".about.json")
    if not about.exists() or read_json(about)["episodes"] != count:
        shown, table, turns = laboratory.demonstrate(count, seed=10_000 + seed)
        print(table, flush=True)
        write_json(path, shown)
        write_json(about, {"episodes": count, "turns": turns})
    cost: float = read_json(about)["turns"] / count
    return cost


def count_shown(result: Result, arm: Arm, turns: float) -> None:
    """Add to each row's turns those that the teacher has played by then: of sft.py's episodes the
    ones that were learned, of agentevol.py's all, from the beginning; none is played twice."""
    seen = 0.0
    for row in result["curve"]:
        seen += row.get("train/trajectories_used", 0.0) if arm.program == "sft.py" else arm.shown
        row["turns"] = round(row["turns"] + turns * min(seen, arm.shown), 1)


def learned_from(run_dir: Path) -> Result:
    """What the iterations of a run had: what was played and solved, pairs of DPO, AgentEvol's
    sets."""
    found: Result = {}
    if files := sorted((run_dir / "trajectories").glob("step_*.jsonl")):
        found["played"] = [solved_in(path) for path in files]
    if made := sorted((run_dir / "pairs").glob("iteration_*.json")):
        found["pairs"] = [read_json(path)["metrics"]["data/pairs"] for path in made]
    if (run_dir / "evolving").exists():
        found["evolved"] = evolved(run_dir / "evolving")
    return found


def solved_in(path: Path) -> dict[str, list[int]]:
    """Of a file of trajectories: sub-task -> [tries, of them solved]."""
    counts: dict[str, list[int]] = {}
    for row in read_lines(path):
        own = counts.setdefault(row["subtask"], [0, 0])
        own[0] += 1
        own[1] += bool(row["success"])
    return dict(sorted(counts.items()))


def evolved(folder: Path) -> list[dict[str, list[float]]]:
    """What each iteration of AgentEvol has learned from: origin -> [trajectories, their mean
    weight]."""
    found = []
    for path in sorted(folder.glob("iteration_*.jsonl")):
        weights: dict[str, list[float]] = {}
        for row in read_lines(path):
            weights.setdefault(row["origin"], []).append(row["weight"])
        found.append({each: [len(w), round(fmean(w), 4)] for each, w in weights.items()})
    return found


# ------------------------------------------------------------------------------------------ report


def runs_in(folder: Path, miniature: Path = MINIATURE) -> dict[str, list[Result]]:
    """Arm -> its results by seed: these methods', and RL's of miniature.py."""
    own, others = read_results(folder), read_results(miniature)
    found = {name: [own[name, s] for s in SEEDS if (name, s) in own] for name in ARMS}
    found |= {name: [others[name, s] for s in SEEDS if (name, s) in others] for name in OTHERS}
    return {name: results for name, results in found.items() if results}


def report(folder: Path, page: Path = PAGE, miniature: Path = MINIATURE) -> str:
    """The table of what is there, into the page too, and the picture."""
    runs = runs_in(folder, miniature)
    if not any(name in ARMS for name in runs):
        raise ValueError(f"{folder} is empty; run: python recipes/methods.py run --method sft")
    text = "\n".join(table(runs))
    left = ("few", "last", "cloning", "unweighted", "reinforce_plus_plus")  # of eight colours
    drawn = [name for name in runs if name not in left]
    panels = (AT_ONCE, ALL)
    curves(folder / "methods.png", runs, drawn, "turns", "turns played in training", panels)
    insert(page, "methods", text)
    return text


def table(runs: dict[str, list[Result]]) -> list[str]:
    """At the turns that all of the long arms have played; each against its start, GRPO, and
    AgentEvol against its controls."""
    long = [name for name in runs if name != "cloning"]  # which is short by design
    every = [result for name in long for result in runs[name]]
    budget = common_budget(every, "turns")
    lines = [f"Held-out goals solved, %, after {budget:,.0f} turns, a teacher's included:", ""]
    lines += at_budget(runs, long, every, budget, "turns")
    for name in ARMS:
        if name in runs:
            lines += ["", f"{name} minus its start: {points(runs[name], runs[name], start)}."]
    pairs = [(name, "grpo") for name in ("sft", "dpo", "agentevol")]
    pairs += [("agentevol", other) for other in ("few", "cloning", "unweighted", "sft")]
    pairs += [("last", "few"), *(("own", other) for other in ("last", "grpo", "dpo"))]
    for name, other in pairs:
        if name in runs and other in runs:
            told = points(runs[name], runs[other], end)
            lines += ["", f"{name} minus {other}, at their ends: {told}."]
    for name in ("agentevol", "few", "unweighted"):
        for result in runs.get(name, ())[:1]:  # one shows how a set grows
            said = f"What {name} learned from, seed {result['seed']} (trajectories x mean weight):"
            lines += ["", said, "", *sets_of(result["evolved"])]
    for name in ("last", "own"):
        for result in runs.get(name, ()):
            sets = result["evolved"]
            new = [str(count) for parts in sets for _, (count, _) in list(parts.items())[1:]]
            said = f"What {name} joined to {sets[-1]['demonstration'][0]} demonstrations"
            lines += ["", f"{said}, seed {result['seed']}, by iteration: {' '.join(new)}."]
    return lines


def points(
    results: Sequence[Result], others: Sequence[Result], where: Callable[..., Shares]
) -> str:
    """The ends of results minus what others have there, within few turns and within many."""
    told = [
        f"in {most} turns "
        + compare(results, others, partial(end, within=most), partial(where, within=most))
        for most in (SOON, LATE)
    ]
    return f"{', '.join(told)} points"


def sets_of(found: Sequence[dict[str, list[float]]]) -> list[str]:
    """A row of each iteration, a column of each origin."""
    origins = list(found[-1])
    rows = []
    for number, parts in enumerate(found, start=1):
        cells = [f"{parts[o][0]} x {parts[o][1]:.2f}" if o in parts else "" for o in origins]
        rows.append((number, sum(count for count, _ in parts.values()), *cells))
    return markdown(" | ".join(["iteration", "all", *origins]), rows)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--method", choices=ARMS, required=True)


def main(argv: Sequence[str] | None = None) -> int:
    return Recipe("methods", __doc__, FOLDER, add_options, play, report).main(argv)


if __name__ == "__main__":
    sys.exit(main())
