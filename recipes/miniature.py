"""The paper in miniature: each of its claims in a world small enough for seeds, controls and
intervals on two CPU cores.

In the laboratory (laboratory.py; its options in miniature.json) goals take 1 to 16 moves, held-out
ones are mazes of seeds that nobody was shown, and a model of 3M parameters, which has imitated a
careless teacher, errs as it does. A run takes minutes, not an hour, so that an arm gets seeds. All
arms of one seed see the same goals in the same order, and are measured on held-out goals in 16
turns, however they were trained.

    figure        arms                                        what it asks
    horizons      short, long, stepwise                       does it help to widen the horizon?
    widening      early, stepwise, late                       does it matter when?
    controls      short, shuffled, still                      are the rewards what does it?
    noise         short, five seeds                           what can three seeds show at all?
    teacher       teacher, imitation, filtered, rl            can RL pass a weak teacher?
    compute       start, imitation, rl                        more turns, more samples: what for?
    estimators    grpo, rloo, reinforce_plus_plus, ppo        which advantage? each with the rate,
                                                              of three, that suits it

    python recipes/miniature.py                    what there is, what is missing and how long that
                                                   takes; then runs it, and goes on where it was
    python recipes/miniature.py --figure horizons  one figure's runs
    python recipes/miniature.py status             says what is missing and runs nothing
    python recipes/miniature.py report             tables and pictures of the results that there are

A run may be killed at any time; its result is results/miniature/<arm>-<seed>.json. Two commands may
work side by side: who starts a run marks it. Read next:
laboratory.py, miniature_plan.py, imitation.py, miniature_report.py.
"""

import argparse
import contextlib
import fcntl
import os
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from recipes import laboratory  # noqa: E402
from recipes.common import (  # noqa: E402
    Result,
    circumstances_of,
    exit_code,
    load_config,
    planned,
    read_json,
    read_lines,
    run,
    steps_done,
    train,
    write_json,
)
from recipes.miniature_plan import (  # noqa: E402
    BASE,
    FIGURES,
    FOLDER,
    Arm,
    arm_of,
    read_results,
    status,
    wanted,
)
from recipes.miniature_report import report  # noqa: E402

if TYPE_CHECKING:
    from data import Record


# -------------------------------------------------------------------------------------------- a run


def arguments_of(arm: Arm, seed: int, run_dir: Path, extra: Sequence[str] = ()) -> list[str]:
    """train.py's; an imitation's lesson reads the same ones."""
    words = ["--config", str(BASE), "--seed", str(seed), "--steps", str(arm.steps)]
    return [*words, *arm.words, *extra, "--run-dir", str(run_dir)]


@contextlib.contextmanager
def marked(path: Path) -> Iterator[bool]:
    """Whether nobody else is at this run; nobody will be inside."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def play(name: str, arm: Arm, seed: int, runs: Path, extra: Sequence[str]) -> Result:
    """One run, or the rest of it; what is kept of it."""
    if arm.learner == "none":
        return {"arm": name, "seed": seed} | play_teacher()
    run_dir = runs / f"{name}-{seed}"
    arguments = arguments_of(arm, seed, run_dir, extra)
    steps = planned(arguments).steps
    if arm.learner == "train":
        train(arguments, run_dir, steps)
    elif steps_done(run_dir) < steps:
        inner = [sys.executable, str(Path(__file__).resolve()), "learn", arm.learner, *arguments]
        run(inner + (["--resume"] if (run_dir / "config.json").exists() else []))
    return {"arm": name, "seed": seed} | record(run_dir, steps)


def train_arm(options: argparse.Namespace, arguments: Sequence[str]) -> None:
    """Train --arm with --seed to its end, or the rest of it, and write its result: for recipes
    whose every arm is train.py with these arguments."""
    name = f"{options.arm}-{options.seed}"
    run_dir = options.runs / name
    steps = planned(arguments).steps
    train([*arguments, "--run-dir", str(run_dir)], run_dir, steps)
    result = {"arm": options.arm, "seed": options.seed} | record(run_dir, steps)
    write_json(options.results / f"{name}.json", result)
    print(f"wrote {options.results / name}.json", flush=True)


CURVE = (
    "train/success_rate",
    "train/turns_mean",
    "train/parse_error_rate",
    "train/groups",
    "train/groups_zero_variance",
    "train/trajectories_used",
    "horizon/max_rounds",
    "policy/entropy",
    "policy/grad_norm",
)


def record(run_dir: Path, steps: int) -> Result:
    """Circumstances, options, a row for each step, and in how many turns each held-out goal was
    solved (0: it was not) by each sample, at each evaluation.

    A row adds to the metrics what was spent in all so far: seconds (without evaluations and files),
    turns, those of them in episodes that failed, tokens; and the episodes that succeeded.
    """
    timings = {row["step"]: row for row in read_lines(run_dir / "timings.jsonl")}
    config = read_json(run_dir / "config.json")["config"]
    spent = dict.fromkeys(("turns", "failed_turns", "tokens", "successes", "seconds"), 0.0)
    curve = []
    for row in read_lines(run_dir / "metrics.jsonl"):
        step = row["step"]
        if not step:
            continue
        for line in read_lines(run_dir / "trajectories" / f"step_{step:06d}.jsonl"):
            turns = len(line["turns"])
            spent["turns"] += turns
            spent["failed_turns"] += 0 if line["success"] else turns
            spent["tokens"] += sum(
                turn["action_span"][1] - turn["action_span"][0] for turn in line["turns"]
            )
            spent["successes"] += line["success"]
        took = timings.get(step, {})  # lost where the run was killed right behind a checkpoint
        spent["seconds"] += took.get("time/step_s", 0.0)
        spent["seconds"] -= sum(took.get(f"time/{name}_s", 0.0) for name in ("eval", "save"))
        kept = {name: round(row[name], 5) for name in CURVE if row.get(name) is not None}
        curve.append({"step": step} | {n: round(v, 1) for n, v in spent.items()} | kept)
    held_out = [
        {"step": int(path.stem.rpartition("_")[2]), "solved_in": solved_in(read_lines(path))}
        for path in sorted((run_dir / "trajectories").glob("eval_*.jsonl"))
    ]
    at = [evaluation["step"] for evaluation in held_out]
    if at[:1] != [0] or at[-1] != steps:
        raise SystemExit(f"{run_dir} was evaluated at steps {at}, expected 0 to {steps}")
    hours = round(sum(row.get("time/step_s", 0.0) for row in timings.values()) / 3600, 3)
    about = {"steps": steps, "hours": hours, **circumstances_of(run_dir), "config": config}
    return about | {"curve": curve, "held_out": held_out}


def solved_in(trajectories: Sequence[dict[str, Any]]) -> dict[str, list[int]]:
    """task_id -> the turns that each sample took, 0 where it did not solve the task.

    >>> solved_in([{"task_id": "a", "success": True, "turns": [0, 0], "stop_reason": "success"},
    ...            {"task_id": "a", "success": False, "turns": [0], "stop_reason": "max_rounds"}])
    {'a': [2, 0]}
    """
    from trajectory import LOST

    found: dict[str, list[int]] = {}
    for line in trajectories:
        if line["stop_reason"] not in LOST:
            turns = len(line["turns"]) if line["success"] else 0
            found.setdefault(line["task_id"], []).append(turns)
    return found


# ----------------------------------------------------------------------------- the imitations' runs


def learn(learner: str, arguments: Sequence[str]) -> None:
    """A run of an arm that imitates, in this process."""
    from recipes import imitation

    config = load_config(arguments)
    if learner == "own":
        imitation.imitate(config, imitation.of_its_own)
        return
    from envs import load_tasks

    near = [
        task.task_index
        for task in load_tasks(config.env, file=config.tasks)
        if laboratory.tier_of(task.task_id) == "near"
    ]
    per_step = config.tasks_per_step * config.group_size

    def shown_at(step: int) -> list["Record"]:
        rng = random.Random(f"taught {config.seed} {step}")
        return teach(near, per_step, config.evaluation_rounds, rng)

    imitation.imitate(config, imitation.of_what_is_shown(shown_at, per_step))


def teach(indices: Sequence[int], count: int, horizon: int, rng: random.Random) -> list["Record"]:
    """What the careless teacher shows: `count` solved episodes of at most so many turns."""
    from envs import OracleLost
    from envs.babyai.env import BabyAI

    world = BabyAI()
    shown: list[Record] = []
    while len(shown) < count:
        with contextlib.suppress(OracleLost):
            record, solved = laboratory.show(world, rng.choice(indices), rng, turns=horizon)
            shown += [record] if solved else []
    return shown


def play_teacher(samples: int = 8) -> Result:
    """The weak teacher on what is held out: careless where it knows what to do, which is on near
    goals; any available action on the others."""
    from envs.babyai.env import BabyAI

    rng, world, rounds = random.Random("the teacher"), BabyAI(), read_json(BASE)["eval_rounds"]
    solved: dict[str, list[int]] = {}
    for index in laboratory.goals(laboratory.SEEDS["held_out"]):
        task_id = f"babyai_{index}"
        error = laboratory.ERROR if laboratory.tier_of(task_id) == "near" else 1.0
        for _ in range(samples):
            record, success = laboratory.show(world, index, rng, error=error, turns=rounds)
            turns = sum(turn["from"] == "gpt" for turn in record["conversations"])
            solved.setdefault(task_id, []).append(turns if success else 0)
    return {"hours": 0.0, "curve": [], "held_out": [{"step": 0, "solved_in": solved}]}


# ----------------------------------------------------------------------------------------- commands


def run_missing(figures: Sequence[str], folder: Path, runs: Path, extra: Sequence[str]) -> None:
    """One run after the other; those that somebody else is at are left to them. Passes over the
    list until one finds nothing to do: an estimator's runs wait for its pilots."""
    while [run for run in wanted(figures) if run_if_missing(*run, folder, runs, extra)]:
        pass


def run_if_missing(name: str, seed: int, folder: Path, runs: Path, extra: Sequence[str]) -> bool:
    """Whether there was something to do."""
    path = folder / f"{name}-{seed}.json"
    with marked(runs / f"{name}-{seed}.lock") as ours:
        results = read_results(folder)
        arm = arm_of(name, results)
        if not ours or arm is None or (name, seed) in results:
            return False
        write_json(path, play(name, arm, seed, runs, extra))
        print(f"wrote {path}", flush=True)
        return True


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["learn"]:  # how an imitation's run is started
        with contextlib.suppress(KeyboardInterrupt):
            learn(argv[1], argv[2:])
            return 0
        return 130
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", nargs="?", choices=("run", "status", "report"), default="run")
    parser.add_argument("--figure", nargs="+", choices=FIGURES, default=list(FIGURES))
    parser.add_argument("--results", type=Path, default=FOLDER)
    parser.add_argument("--runs", type=Path, default=Path("runs/miniature"), help="where runs lie")
    if not argv or argv[0].startswith("--"):  # or a value further on is taken for the command
        argv = argv if "--help" in argv else ["run", *argv]
    options, extra = parser.parse_known_args(argv)
    if extra and options.command != "run":
        parser.error(f"unknown arguments: {' '.join(extra)}")
    os.chdir(ROOT)

    def work() -> None:
        if options.command == "report":
            print(report(options.figure, options.results))
            return
        print(status(options.figure, options.results), flush=True)
        if options.command == "run":
            run_missing(options.figure, options.results, options.runs, extra)

    return exit_code("miniature", work)


if __name__ == "__main__":
    sys.exit(main())
