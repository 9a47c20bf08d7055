"""The paper in miniature: test its claims with seeds, controls and intervals on two CPU cores.

In the laboratory (laboratory.py; its options are in miniature.json) a run takes minutes, so every
arm has several seeds. For a given seed, all arms train on the same goals in the same order. All
arms are evaluated on held-out goals with 16 turns, or 24 if many are far. FIGURES lists the arms
behind each question.

    python recipes/miniature.py                    start missing runs and resume stopped ones
    python recipes/miniature.py --figure rates     only the runs of one figure
    python recipes/miniature.py status             list the missing runs

Start the command again in another terminal to run two at a time. Results are written to
runs/miniature/results, or with --commit to recipes/results/miniature, where tables.py finds them.
Options that this command does not know are passed on to the programs.
Read next: evidence.py, tables.py.
"""

import argparse
import fcntl
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from conversations import read_records
from data import Record
from recipes import laboratory
from recipes.common import (
    COMMITTED,
    Result,
    exit_on_interrupt,
    markdown,
    read_json,
    read_lines,
    record,
    require_alike,
    run,
    run_program,
    write_json,
)
from recipes.laboratory import is_held_out

BASE = ROOT / "recipes" / "miniature.json"
FOLDER = COMMITTED / "miniature"
RUNS = Path("runs/miniature")
SEEDS = (0, 1, 2)
FIVE_SEEDS = (0, 1, 2, 3, 4)
FEW, MOST, MANY = 4, 16, 24  # turns in which a pilot has to solve a maze
PILOT_SEED = 9  # seed of the runs that choose a learning rate by success on training goals
RATES = (3e-5, 1e-4, 3e-4)
HORIZONS = ("short", "long", "stepwise")
ESTIMATORS = ("grpo", "rloo", "reinforce_plus_plus", "ppo")
METHODS = ("sft", "dpo", "agentevol", "own")
SHORT = ("--rounds", "4", "--eval-every", "60")  # the arm that other arms are compared with
SHORT_STEPS = 180  # plays as many turns as 60 steps of `long`, whose episodes are 3 times as long
WEAK = ("--model", "recipes/starts/tiny-babyai-near")  # its teacher demonstrated only near goals
METHOD = (  # plays as many turns as `short`, including the teacher's
    *("--rounds", "4", "--warm-start", "never", "--mini-batch-size", "64"),
    *("--on-collapse", "warn", "--max-trajectory-tokens", "4096"),
)
EVOLVE = ("--group-size", "8", "--eval-every", "60")


@dataclass(frozen=True)
class Arm:
    """A way to train."""

    options: tuple[str, ...] = ()  # in addition to those of miniature.json
    seeds: tuple[int, ...] = SEEDS
    steps: int = 60
    program: str = "train.py"
    num_demonstrations: int = 0  # episodes of the teacher, passed by --data
    teacher: str = "careless"  # see write_demonstrations


def rate_options(algorithm: str, rate: float) -> tuple[str, ...]:
    """Options for one learning rate. A collapse is a result too, so it does not stop the run."""
    options = ("--algorithm", algorithm, "--learning-rate", f"{rate:g}", "--on-collapse", "warn")
    return options + (("--critic-learning-rate", f"{rate:g}") if algorithm == "ppo" else ())


def pilot(algorithm: str, rate: float) -> str:
    return f"{algorithm}-{rate:g}"


TWICE = ("--eval-temperatures", "1", "0.3", "--eval-start-samples", "1")
# Also on the mazes that choose each arm's learning rate.
EVALUATED = ("--eval-tasks", "recipes/laboratory/evaluated.json", *TWICE)


def late(steps: int) -> tuple[str, str]:
    """Options to evaluate after two thirds of the steps and at the end. Arms are compared after
    equal turns, which are between the two."""
    return ("--eval-every", str(2 * steps // 3))


def at_rate(name: str, rate: float) -> str:
    return f"{name}-at-{rate:g}"


def widening_options(every: int) -> tuple[str, ...]:
    """Options for a horizon of 4, then 8, then 16 turns that widens every `every` steps."""
    options = ("--rounds-scheduler", "scaling_inter_stepwise", "--rounds", "4", "8", "16")
    return (*options, "--steps-scaling-inter", str(every), "--eval-every", str(every))


ARMS: dict[str, Arm] = {
    "short": Arm(SHORT, steps=SHORT_STEPS),
    "long": Arm(),
    "stepwise": Arm(widening_options(every=32), steps=96),
    "early": Arm(widening_options(every=16), steps=75),  # plays about as many turns as stepwise
    "late": Arm(widening_options(every=48), steps=110),
    "shuffled": Arm((*SHORT, "--shuffle-rewards", "--on-collapse", "warn"), steps=SHORT_STEPS),
    "still": Arm((*SHORT, "--learning-rate", "1e-12"), steps=60),
    "teacher": Arm(seeds=(0,), program="teacher"),
    "sft": Arm(
        (*METHOD, "--learning-rate", "1e-4", "--eval-every", "18"),
        seeds=(0,),
        steps=54,
        program="sft.py",
        num_demonstrations=54 * 64,  # one epoch
    ),
    "dpo": Arm(
        (*METHOD, *EVOLVE, "--iterations", "12", "--tasks-per-iteration", "120")
        + ("--learning-rate", "3e-5", "--sft-coef", "0"),
        seeds=(0, 1),
        steps=180,
        program="dpo.py",
    ),
    # As in the paper: every iteration trains the base model on all data collected so far.
    "agentevol": Arm(
        (*METHOD, *EVOLVE, "--iterations", "4", "--tasks-per-iteration", "320")
        + ("--keep-per-task", "2", "--weighting", "return", "--learning-rate", "1e-4")
        + ("--learn-from", "base", "--merge-with", "all"),
        seeds=(0,),
        steps=240,
        program="agentevol.py",
        num_demonstrations=512,
    ),
    # Few demonstrations; a success counts as often as it was played.
    "own": Arm(
        (*METHOD, *EVOLVE, "--iterations", "24", "--tasks-per-iteration", "60")
        + ("--keep-per-task", "8", "--weighting", "played", "--learning-rate", "2e-4")
        + ("--learn-from", "last", "--merge-with", "demonstrations"),
        steps=240,
        program="agentevol.py",
        num_demonstrations=8,
    ),
} | {
    pilot(name, rate): Arm((*SHORT, *rate_options(name, rate)), (PILOT_SEED,), SHORT_STEPS)
    for name in ESTIMATORS
    for rate in RATES
}
ARMS |= {  # each at the best of three rates, as the pilots showed (tables.estimators)
    name: Arm((*SHORT, *rate_options(name, 1e-4)), steps=SHORT_STEPS) for name in ESTIMATORS
}
ARMS |= {
    at_rate(name, rate): replace(
        ARMS[name],
        options=(
            *(*ARMS[name].options, *rate_options("grpo", rate)),
            *(*EVALUATED, *late(ARMS[name].steps)),
        ),
    )
    for rate in RATES
    for name in HORIZONS
}
# As many updates as `short`, from fewer goals per step, so that the turns are equal, too.
ARMS |= {
    name: Arm(
        (*options, *EVALUATED, "--on-collapse", "warn", *late(SHORT_STEPS)), steps=SHORT_STEPS
    )
    for name, options in {
        "long-often": ("--tasks-per-step", "3"),
        "stepwise-often": ("--tasks-per-step", "4", *widening_options(every=60)),
    }.items()
}
OFTEN = ("long-often", "stepwise-often")
ARMS |= {
    "practise": Arm(
        (*SHORT, *WEAK, "--on-collapse", "warn", *TWICE, "--eval-every", "360"), steps=360
    ),
    # Imitates the policy's own successes in every 60 goals; plays as many episodes as `practise`.
    "filter": Arm(
        (*METHOD, *WEAK, *EVOLVE, "--iterations", "48", "--tasks-per-iteration", "60")
        + ("--learning-rate", "2e-4", *TWICE, "--eval-every", "480"),
        steps=480,
        program="agentevol.py",
        num_demonstrations=8,
        teacher="weak",
    ),
}


@dataclass(frozen=True)
class Choice:
    """An arm whose learning rate is chosen by pilots: the rate that solves the most mazes for
    choosing settings, in at most `within` turns. Pilots play no other mazes."""

    make: Callable[[float], Arm]
    rates: tuple[float, ...]
    within: int
    seeds: tuple[int, ...]
    mazes: str  # id list for choosing
    temperature: float = 1.0  # of the pilots' evaluations
    pilots_from: str = ""  # another arm, whose pilots choose
    falls: bool = False  # the lowest rate at which a pilot solves less than half of its start


def imitate(rate: float) -> Arm:
    """More of the teacher's demonstrations, for about as many seconds as `practise`."""
    return Arm(
        (*METHOD, *WEAK, "--learning-rate", f"{rate:g}", "--eval-every", "144", *TWICE),
        steps=144,
        program="sft.py",
        num_demonstrations=144 * 64,
        teacher="weak",
    )


# Training goals of which a third are far, with horizons of up to 24 turns, and the paper's KL loss.
LONG_GOALS = (
    *("--model", "recipes/starts/tiny-babyai-far", "--tasks", "recipes/laboratory/long_train.json"),
    *("--eval-tasks", "recipes/laboratory/long_held_out.json", "--eval-rounds", "24"),
    *("--max-trajectory-tokens", "3456", "--kl-loss-coef", "1e-3", *TWICE),
)
EVERY_21 = ("--steps-scaling-inter", "21")
CAPS: dict[str, tuple[tuple[str, ...], int]] = {  # options and steps, for about 36,000 turns
    "cap8": (("--rounds", "8"), 96),
    "cap24": (("--rounds", "24"), 44),
    "grow": (
        ("--rounds-scheduler", "scaling_inter_stepwise", "--rounds", "8", "12", "24", *EVERY_21),
        63,
    ),
    "shrink": (("--rounds-scheduler", "stepwise", "--rounds", "24", "12", "8", *EVERY_21), 63),
}


def long_arm(cap: str, rate: float) -> Arm:
    options, steps = CAPS[cap]
    return Arm((*LONG_GOALS, *options, *rate_options("grpo", rate), *late(steps)), steps=steps)


CHOICES = {
    "imitate": Choice(imitate, (1e-4, 3e-4, 1e-3), FEW, SEEDS, "development", temperature=0.3)
}
CHOICES |= {
    cap: Choice(partial(long_arm, cap), (3e-5, 1e-4), MANY, FIVE_SEEDS, "long_development")
    for cap in CAPS
}


# A setting that may destroy the policy: a high rate, and four updates from the same trajectories.
# (At 1e-3 a run solves nothing from its fifth step on.)
HOT: dict[str, tuple[str, tuple[str, ...]]] = {  # cap, options
    "hot-cap8": ("cap8", ()),
    "hot-cap24": ("cap24", ()),
    "hot-grow": ("grow", ()),
    "hot-clamp": ("cap24", ("--kl-clamp", "10")),  # another way to keep the long horizon stable
}


def hot_arm(name: str, rate: float) -> Arm:
    cap, options = HOT[name]
    arm = long_arm(cap, rate)
    return replace(arm, options=(*arm.options, "--mini-batch-size", "16", *options))


CHOICES |= {
    name: Choice(
        *(partial(hot_arm, name), (3e-4, 5e-4), MANY, SEEDS, "long_development"),
        pilots_from="hot-cap24",
        falls=True,
    )
    for name in HOT
}


# Whose turn was it? One update a step; the control is the best `long-at-*`, which is GRPO.
CREDIT: dict[str, tuple[str, ...]] = {
    "gigpo": ("--algorithm", "gigpo"),
    "by-turn": ("--algorithm", "ppo", "--gae-unit", "turn"),
}
# Losses that differ only if a step has several updates, here four, and GRPO as the control.
FOUR = ("--mini-batch-size", "16")
LOSSES: dict[str, tuple[str, ...]] = {
    "grpo-4": FOUR,
    "dapo": (
        *(*FOUR, "--clip-ratio-high", "0.28", "--dynamic-sampling", "2"),
        *("--overlong-penalty", "256"),
    ),
    "dr-grpo": (*FOUR, "--no-scale-by-std", "--loss-agg", "constant"),
    "gspo": (
        *(*FOUR, "--ratio", "sequence", "--clip-ratio", "3e-4", "--clip-ratio-high", "4e-4"),
        *("--loss-agg", "seq-mean"),
    ),
}


def variant(name: str, rate: float) -> Arm:
    options = rate_options("ppo" if name == "by-turn" else "grpo", rate)
    steps = 44 if name == "dapo" else 60  # dapo plays other tasks, too: for about equal turns
    return Arm((*options, *(CREDIT | LOSSES)[name], *TWICE, *late(steps)), steps=steps)


CHOICES |= {
    name: Choice(partial(variant, name), (1e-4, 3e-4), MOST, SEEDS, "development")
    for name in CREDIT | LOSSES
}


# How the policy plays (agents.py), each way from a start that has imitated it. Two attempts of
# eight acts and a reflection are as long as 17 turns.
WAYS: dict[str, tuple[tuple[str, ...], int]] = {  # options and steps, for about 36,000 turns
    "plain": ((), 60),
    "several": (
        ("--max-actions-per-turn", str(laboratory.MAX_ACTIONS))
        + ("--prompt", "recipes/laboratory/prompt_several.json"),
        90,
    ),
    "plan": (("--agent", "plan", "--rounds", "15", "--eval-rounds", "15"), 60),
    "reflect": (
        ("--agent", "reflect", "--attempts", "2", "--rounds", "8", "--eval-rounds", "8"),
        60,
    ),
}
WAY_LIMITS = ("--max-tokens-per-turn", "64", "--max-trajectory-tokens", "4096")
WAY_SHARES = {"near": 0.4, "middle": 0.6}
WAY_STEPS = 125
WAY_START = (
    *("--preset", "none", "--env", "babyai", "--model", "recipes/starts/tiny-babyai"),
    *("--steps", str(WAY_STEPS), "--mini-batch-size", "16", "--learning-rate", "5e-4"),
    *("--learning-rate-decay-steps", str(WAY_STEPS), "--max-tokens-per-micro-batch", "4096"),
    *(*WAY_LIMITS, "--eval-every", "0"),
)


def start_folder(way: str) -> str:
    return str(RUNS / f"start-{way}/checkpoints/step_{WAY_STEPS:06d}")


ARMS |= {
    way: Arm(
        ("--model", start_folder(way), *WAY_LIMITS, *options)
        + ("--on-collapse", "warn", *TWICE, *late(steps)),
        steps=steps,
    )
    for way, (options, steps) in WAYS.items()
}


# A teacher on the student's own turns, or its demonstrations on the same mazes. The teacher is a
# better checkpoint (the end of `plain`, seed 0) or the oracle, which here writes only actions. The
# control is GRPO: `long-at-*`.
def distillation(teacher: str) -> tuple[str, ...]:
    return ("--algorithm", "distill", "--teacher", teacher)


BETTER = str(RUNS / f"plain-0/checkpoints/step_{WAYS['plain'][1]:06d}")
SHOWN = ("--warm-start", "never", "--max-trajectory-tokens", "4096")
DISTILLATION: dict[str, Arm] = {  # about 36,000 turns each, including those of a demonstration
    "from-model": Arm(distillation(BETTER)),
    "from-model-grow": Arm((*distillation(BETTER), *widening_options(every=32)), steps=96),
    "shown-by-model": Arm(SHOWN, SEEDS, 50, "sft.py", 50 * 64, "model"),
    "from-oracle": Arm(distillation("oracle-actions")),
    "from-oracle-grow": Arm(
        (*distillation("oracle-actions"), *widening_options(every=32)), steps=96
    ),
    "shown-by-oracle": Arm(SHOWN, SEEDS, 120, "sft.py", 120 * 64, "oracle"),
}


def distilled(name: str, rate: float) -> Arm:
    arm = DISTILLATION[name]
    options = ("--learning-rate", f"{rate:g}", "--on-collapse", "warn", *TWICE, *late(arm.steps))
    return replace(arm, options=(*arm.options, *options))


CHOICES |= {
    name: Choice(
        *(partial(distilled, name), (1e-4, 5e-4), MOST, SEEDS, "development"),
        pilots_from=name.removesuffix("-grow"),
    )
    for name in DISTILLATION
}


def pilots_of(name: str) -> tuple[str, ...]:
    choice = CHOICES[name]
    return tuple(at_rate(choice.pilots_from or name, rate) for rate in choice.rates)


def pilot_arm(choice: Choice, rate: float) -> Arm:
    arm = choice.make(rate)
    options = (
        *("--eval-tasks", f"recipes/laboratory/{choice.mazes}.json", "--eval-samples", "8"),
        *("--eval-temperatures", f"{choice.temperature:g}", "--eval-start-samples", "4"),
        *("--eval-every", str(arm.steps)),
    )
    return replace(arm, options=(*arm.options, *options), seeds=(PILOT_SEED,))


ARMS |= {
    pilot_name: pilot_arm(choice, rate)
    for name, choice in CHOICES.items()
    for pilot_name, rate in zip(pilots_of(name), choice.rates, strict=True)
    if choice.pilots_from in ("", name)
}


PILOTS = tuple(pilot(algorithm, rate) for algorithm in ESTIMATORS for rate in RATES)
FIGURES: dict[str, tuple[str, ...]] = {
    # does a longer horizon help? or does the learning rate decide, or the number of updates?
    "rates": (*(at_rate(name, rate) for rate in RATES for name in HORIZONS), *OFTEN),
    # RL against imitation of a weak teacher and of one's own successes; imitation at its best rate
    "imitation": ("teacher", *pilots_of("imitate"), "imitate", "filter", "practise"),
    # is there a regime in which it helps to grow the horizon?
    "growth": (*(arm for cap in CAPS for arm in pilots_of(cap)), *CAPS),
    # does it keep a long horizon stable that would fall without it?
    "hot": (*pilots_of("hot-cap24"), *HOT),
    # which turn, which loss?
    "credit": (
        *(at_rate("long", rate) for rate in RATES),
        *(arm for name in CREDIT for arm in pilots_of(name)),
        *CREDIT,
    ),
    "losses": (*(arm for name in LOSSES for arm in pilots_of(name)), *LOSSES),
    # a teacher on one's own turns, its demonstrations, or rewards? does a growing horizon help?
    "distillation": (
        *(at_rate("long", rate) for rate in RATES),
        *(arm for name in DISTILLATION for arm in pilots_of(name)),
        *DISTILLATION,
    ),
    # does it help to plan, to reflect, or to act several times in a turn?
    "ways": tuple(WAYS),
    "widening": ("early", "stepwise", "late"),  # does it matter when?
    "controls": ("short", "shuffled", "still"),  # do the rewards cause the gain?
    "noise": ("short",),  # five seeds: which differences can three seeds show?
    "estimators": (*PILOTS, *ESTIMATORS),  # which advantage? each at the best of three rates
    "methods": (*METHODS, *ESTIMATORS, "stepwise"),  # the other methods, at equal turns
}


# The comparison that each figure is made for. It is written down before the first run; all other
# differences in a figure's tables are there to be looked at, not to be concluded from.
PRIMARY = {
    "rates": "stepwise minus short, each at the rate that solves most development mazes in 16 "
    "turns (mean of three seeds), on held-out mazes in 16 turns, temperature 1, equal turns",
    "imitation": "practise minus imitate, on near held-out mazes (the only ones that the teacher "
    "demonstrates) in 4 turns at the end, temperature 0.3",
    "growth": "grow minus cap24, each at the rate of its pilots, on all held-out mazes in 24 "
    "turns, temperature 1, equal turns, five seeds. Growing helps if the intervals over goals "
    "and over seeds are above 0; it does not help if the one over seeds ends below +3. "
    "After two seeds: if the interval of cap24 minus cap8 over goals, on far mazes, ends "
    "below +8, these goals do not need the long horizon, and the figure needs other goals",
    "hot": "how many of three runs collapse, hot-grow against hot-cap24, at the lowest rate at "
    "which the pilot of hot-cap24 ends below half of its start on development mazes; then their "
    "difference on all held-out mazes in 24 turns, temperature 1, equal turns",
    "credit": "gigpo minus GRPO (long, at the rate that solves most development mazes), on "
    "held-out mazes in 16 turns, temperature 1, equal turns",
    "distillation": "from-model minus GRPO (long, at the rate that solves most development mazes), "
    "on held-out mazes in 16 turns, temperature 1, equal turns",
    "ways": "several minus plain, on held-out mazes in 16 turns, temperature 1, equal turns",
    "losses": "dapo minus grpo-4, each at the rate of its pilots, on held-out mazes in 16 turns, "
    "temperature 1, equal turns",
}


# ----------------------------------------------------------------------------------------- results


Results = dict[tuple[str, int], Result]


def read_results(*folders: Path) -> Results:
    """(arm, seed) -> its result. `short` is also GRPO's arm: it has the same options."""
    results: Results = {}
    for path in sorted(path for folder in folders for path in folder.glob("*-*.json")):
        name, _, seed = path.stem.rpartition("-")
        results[name, int(seed)] = read_json(path)
    for arm in {arm for arm, _ in results}:
        require_alike([results[key] for key in results if key[0] == arm])
    results |= {("grpo", s): results["short", s] for s in SEEDS if ("short", s) in results}
    return results


def best_rate(name: str, results: Results) -> float | None:
    """The rate of a `Choice`; None until its pilots are done, or if none of them falls."""
    choice, keys = CHOICES[name], [(arm, PILOT_SEED) for arm in pilots_of(name)]
    if any(key not in results for key in keys):
        return None
    ends, starts = (
        {
            rate: development(results[key]["held_out"][index], choice.within)
            for rate, key in zip(choice.rates, keys, strict=True)
        }
        for index in (-1, 0)
    )
    if choice.falls:
        half = statistics.fmean(starts.values()) / 2
        return min((rate for rate in choice.rates if ends[rate] < half), default=None)
    return max(choice.rates, key=lambda rate: ends[rate])


def development(evaluation: Mapping[str, Any], within: int) -> float:
    """The share of episodes on development mazes that were solved in so many turns."""
    solved_in = [turns for samples in evaluation["development"].values() for turns in samples]
    return statistics.fmean(0 < turns <= within for turns in solved_in)


def pilot_score(result: Result) -> float:
    """Share of training episodes solved in the last third of the steps."""
    success = [row["train/success_rate"] for row in result["curve"]]
    return statistics.fmean(success[-len(success) // 3 :])


def arm_of(name: str, results: Results) -> Arm | None:
    """The arm with this name. An arm whose learning rate is chosen by pilots does not exist (None)
    until they have run, or if they find no such rate."""
    if name in ARMS:
        return ARMS[name]
    best = best_rate(name, results)
    return None if best is None else CHOICES[name].make(best)


def seeds_of(figure: str, name: str) -> tuple[int, ...]:
    if figure == "noise":
        return FIVE_SEEDS
    if name in CHOICES:
        return CHOICES[name].seeds
    return ARMS[name].seeds if name in ARMS else SEEDS


def run_queue(figures: Sequence[str]) -> list[tuple[str, int]]:
    """The runs behind the figures, each once: the first seed of every arm, then the second seed."""
    runs = dict.fromkeys(
        (position, seed, name)
        for figure in figures
        for name in FIGURES[figure]
        for position, seed in enumerate(seeds_of(figure, name))
    )
    return [(name, seed) for _, seed, name in sorted(runs, key=lambda run: run[0])]


def status(figures: Sequence[str], results: Results) -> str:
    """A table of arms with their finished and missing seeds."""
    runs = run_queue(figures)
    rows = []
    for name in dict.fromkeys(name for name, _ in runs):
        seeds = [seed for n, seed in runs if n == name]
        finished = [str(seed) for seed in seeds if (name, seed) in results]
        missing = [str(seed) for seed in seeds if (name, seed) not in results]
        rows.append((name, " ".join(finished) or "-", " ".join(missing) or "-"))
    return "\n".join(markdown("arm | finished seeds | missing seeds", rows))


# --------------------------------------------------------------------------------------------- runs


def arguments_of(arm: Arm, seed: int, data: Path, extra: Sequence[str] = ()) -> list[str]:
    options = ["--config", str(BASE), "--seed", str(seed), "--steps", str(arm.steps)]
    data_options = ["--data", str(data)] if arm.num_demonstrations else []
    return [*options, *arm.options, *extra, *data_options]


def play(name: str, arm: Arm, seed: int, extra: Sequence[str] = ()) -> Result:
    """Start or resume one run and return its record."""
    if arm.program == "teacher":
        return {"arm": name, "seed": seed} | play_teacher()
    make_weights(arm.options)
    run_dir, data = RUNS / f"{name}-{seed}", RUNS / f"{name}-{seed}-shown.json"
    turns = write_demonstrations(arm, seed, data) if arm.num_demonstrations else 0.0
    run_program(arm.program, arguments_of(arm, seed, data, extra), run_dir)
    result = {"arm": name, "seed": seed} | record(run_dir)
    add_teacher_turns(result, arm, turns)
    set_development_apart(result)
    return result


def set_development_apart(result: Result) -> None:
    """Move the mazes for choosing settings from `solved_in` of each evaluation to another field,
    so that no table counts them as held out."""
    for evaluation in chain(result["held_out"], *result["held_out_at"].values()):
        solved_in = evaluation["solved_in"]
        evaluation["solved_in"] = {i: x for i, x in solved_in.items() if is_held_out(i)}
        evaluation["development"] = {i: x for i, x in solved_in.items() if not is_held_out(i)}


def make_weights(options: Sequence[str]) -> None:
    """Train the weights that options name, unless that is done: BETTER, or the start of a way to
    play. All seeds of an arm use the same weights."""
    if BETTER in options:
        plain = ARMS["plain"]
        make_weights(plain.options)
        with alone("plain-0"):
            run_program(plain.program, arguments_of(plain, 0, Path()), RUNS / "plain-0")
    for way in WAYS:
        if start_folder(way) in options:
            make_start(way)


def make_start(way: str) -> None:
    """Let tiny-babyai imitate the careful teacher, who plays in this way."""
    run_dir = RUNS / f"start-{way}"
    data = run_dir.with_suffix(".json")
    with alone(run_dir.name):
        if not data.exists():
            style = laboratory.CAREFUL | {"shares": WAY_SHARES, "way": way}
            episodes, _ = laboratory.demonstrate(16 * WAY_STEPS, 2, laboratory.PLAYED, **style)
            write_json(data, episodes)
        words = ["--data", str(data), "--prompt", str(laboratory.prompt_file(way))]
        run_program("sft.py", [*WAY_START, *words], run_dir)


@contextmanager
def alone(name: str) -> Iterator[None]:
    """Wait until no other process trains the run with this name."""
    with open(RUNS / f"{name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def write_demonstrations(arm: Arm, seed: int, path: Path) -> float:
    """Write the episodes of the arm's teacher unless the file exists: "careless" on mazes of its
    own, "weak" on near goals alone, "oracle", or "model", a better checkpoint. Returns the turns
    played per episode written, including the turns of failed episodes."""
    about, count, rng_seed = path.with_suffix(".about.json"), arm.num_demonstrations, 10_000 + seed
    demonstrate = partial(laboratory.demonstrate, count, rng_seed)
    if not about.exists():
        mazes, tiers = laboratory.SEEDS["train"], laboratory.TIERS
        if arm.teacher == "model":
            make_weights((BETTER,))
            demonstrations, turns = sampled_from(BETTER, count, seed, path.with_suffix(""))
        elif arm.teacher == "oracle":
            demonstrations, turns = demonstrate(laboratory.PLAYED, mazes, WAY_SHARES, error=0.0)
        elif arm.teacher == "weak":
            demonstrations, turns = demonstrate({"near": tiers["near"]}, mazes)
        else:
            demonstrations, turns = demonstrate(tiers, laboratory.TEACHER_SEEDS)
        write_json(path, demonstrations)
        write_json(about, {"turns": turns})
    turns_per_episode: float = read_json(about)["turns"] / arm.num_demonstrations
    return turns_per_episode


def sampled_from(model: str, count: int, seed: int, out: Path) -> tuple[list[Record], float]:
    """`count` successful episodes of a model on the training mazes, and the turns it played for
    them, including those of failed episodes."""
    options = read_json(BASE)
    words = ["--env", options["env"], "--model", model, "--out", str(out), "--seed", str(seed)]
    words += ["--samples", str(2 * count // len(laboratory.lists()["train"]))]
    names = ("prompt", "tasks", "max_tokens_per_turn", "max_trajectory_tokens")
    words += [x for name in names for x in (f"--{name.replace('_', '-')}", str(options[name]))]
    run([sys.executable, "evaluate.py", *words, "--max-rounds", str(options["rounds"][0])])
    log = out / "trajectories.jsonl"
    episodes = [record for record in read_records([log]) if record["return"] > 0]  # if solved
    if len(episodes) < count:
        raise SystemExit(f"{model} solved only {len(episodes)} of {2 * count} mazes")
    turns = sum(len(line["turns"]) for line in read_lines(log)) * count / len(episodes)
    return random.Random(seed).sample(episodes, count), turns


def add_teacher_turns(result: Result, arm: Arm, turns: float) -> None:
    """Add the teacher's turns to each row of the curve, `turns` per episode. In sft.py an episode
    counts when it is trained on; in agentevol.py all episodes count in the first step."""
    num_used, limit = 0.0, arm.num_demonstrations
    for row in result["curve"]:
        num_used += row.get("train/trajectories_used", 0.0) if arm.program == "sft.py" else limit
        row["turns"] = round(row["turns"] + turns * min(num_used, limit), 1)


def play_teacher(samples: int = 8) -> Result:
    """The weak teacher on held-out goals: careless on near goals, random on the others."""
    from envs.babyai.env import BabyAI

    rng, env, rounds = random.Random("the teacher"), BabyAI(), read_json(BASE)["eval_rounds"]
    solved_in: dict[str, list[int]] = {}
    for index in laboratory.lists()["held_out"]:
        task_id = f"babyai_{index}"
        error = laboratory.ERROR if laboratory.tier_of(task_id) == "near" else 1.0
        for _ in range(samples):
            episode, success = laboratory.play(env, index, rng, error=error, max_turns=rounds)
            turns = sum(turn["from"] == "gpt" for turn in episode["conversations"])
            solved_in.setdefault(task_id, []).append(turns if success else 0)
    return {"hours": 0.0, "curve": [], "held_out": [{"step": 0, "solved_in": solved_in}]}


def run_if_missing(name: str, seed: int, folder: Path, extra: Sequence[str]) -> str:
    """Start or resume the run, and return "run"; return "nothing" if there is nothing to run, or
    "elsewhere" if another process is at it."""
    arm = arm_of(name, read_results(FOLDER, RUNS / "results"))
    if arm is None:
        return "nothing"
    RUNS.mkdir(parents=True, exist_ok=True)
    with open(RUNS / f"{name}-{seed}.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return "elsewhere"
        if (name, seed) in read_results(FOLDER, RUNS / "results"):
            return "nothing"
        write_json(folder / f"{name}-{seed}.json", play(name, arm, seed, extra))
    return "run"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--figure",
        nargs="+",
        choices=FIGURES,
        default=list(FIGURES),
        help="figures whose runs to start or list; if not given, all",
    )
    parser.add_argument("--commit", action="store_true", help="write results to recipes/results")
    arguments = sys.argv[1:]
    command = arguments.pop(0) if arguments[:1] in (["run"], ["status"]) else "run"
    options, extra = parser.parse_known_args(arguments)
    os.chdir(ROOT)
    print(status(options.figure, read_results(FOLDER, RUNS / "results")), flush=True)
    folder = FOLDER if options.commit else RUNS / "results"
    # Repeat until no run is missing, because some runs wait for pilots, which may be elsewhere.
    while command == "run":
        queue = run_queue(options.figure)
        outcomes = {run_if_missing(*run, folder, extra) for run in queue}
        if outcomes == {"nothing"}:
            return
        if "run" not in outcomes:
            time.sleep(30)


if __name__ == "__main__":
    exit_on_interrupt(main)
