"""Does it learn? Reinforcement learning against the two explanations that must be ruled out.

A curve that rises proves little by itself. Three arms start from the same warm-started weights and
are measured on the same held-out goals, three seeds each:

    rl         train.py with the defaults of the time: goals of depth 1, six turns, 60 steps
    sft        more imitation instead: as many optimizer steps on fresh demonstrations of the same
               training goals, 32 a step: what fits into the time of RL's rollout and update, and
               in all ten times what the warm start saw
    shuffled   train.py --shuffle-rewards: trajectories swap rewards at random, so that updates are
               as large and as many, and carry no information

    rl above its own start            something changed for the better
    rl above sft                      and more of what the warm start did would not have done it
    shuffled at or below its start    and the rewards are what did it

The sft arm runs through the very same loop of optimizer steps (imitation.py). It may be given
several learning rates (--learning-rates; RL's and the warm start's if nothing is said), and the
best of them *on the reported goals* stands for it, an advantage that RL does not have. Every arm's
figure is that of its last step.

What is measured, before and after: held-out goals of families that share no recipe with the
training goals, 4 samples each, as the run itself measures them every 15 steps; and AgentGym's
published TextCraft test split, 100 goals of all depths, of which training saw depth 1 alone.
The unit of every interval is the goal: goals are resampled, a goal's value being its mean over
samples and seeds, and differences are paired by goal.

    python recipes/learns.py run --arm rl --seed 0    runs or resumes: results/learns/rl-0.json
    python recipes/learns.py report                   table and learns.png of what is there

Each run takes 1.0 to 1.3 hours on two CPU cores (the sft arm that for each learning rate;
`shuffled`, whose episodes grow long as it fails, 2.6), and half an hour for each evaluation of the
published split, which --test-samples 0 leaves out. It may be killed at any time and goes on from
its last checkpoint. What follows the known options is handed on to train.py, for all arms alike.
Read next: imitation.py, learns_report.py; data.py.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from recipes.common import (  # noqa: E402
    RESULTS,
    Recipe,
    load_config,
    planned,
    read_evaluations,
    record,
    run,
    steps_done,
    train,
    write_result,
)
from recipes.imitation import imitate, of_a_teacher  # noqa: E402
from recipes.learns_report import ARMS, report  # noqa: E402
from recipes.published import evaluate_test  # noqa: E402

if TYPE_CHECKING:
    from config import Config
    from data import Record
    from run.worker import Worker

SFT_LEARNING_RATES = (4e-5, 1e-4)  # RL's, and the warm start's
# The default run when the study began; today's plays goals of two depths (worlds.py measures it).
STUDY: tuple[str, ...] = (
    "--tasks",
    "family_train",
    "--eval-tasks",
    "family_test",
    "--subtasks",
    "depth 1",
)
STUDY += ("--rounds", "6", "--steps", "60", "--learning-rate-decay-steps", "60")
STUDY += ("--eval-samples", "4")


# ------------------------------------------------------------------------------------------ an arm


def arm_arguments(arm: str, seed: int, run_dir: Path, extra: Sequence[str] = ()) -> list[str]:
    """train.py's arguments of an arm; `sft` reads the same ones.

    >>> arm_arguments("shuffled", 1, Path("runs/learns/shuffled-1"))[-3:]
    ['--run-dir', 'runs/learns/shuffled-1', '--shuffle-rewards']
    """
    if arm not in ARMS:
        raise ValueError(f"--arm {arm} is unknown; choose one of: {' '.join(ARMS)}")
    arguments = ["--env", "textcraft", "--seed", str(seed), *STUDY, "--eval-every", "15"]
    arguments += ["--eval-start-samples", "4"]  # as many as after: the two are compared
    arguments += ["--save-every", "5", *extra, "--run-dir", str(run_dir)]
    return arguments + (["--shuffle-rewards"] if arm == "shuffled" else [])


def train_sft(config: "Config") -> None:
    """The control: fresh demonstrations of the oracle, as many as fit into RL's time."""
    from data import demonstrations

    def records(worker: "Worker", count: int) -> list["Record"]:
        seed = 1_000_000 * (config.seed + 1)  # far from the warm start's, which are small numbers
        return demonstrations(config.env, worker.tasks, count, seed, config.env_addr)

    per_step = max(1, config.tasks_per_step * config.group_size // 2)
    imitate(config, of_a_teacher(records, per_step))


def run_sft(
    arguments: Sequence[str], run_dir: Path, steps: int, rates: Sequence[float]
) -> dict[float, Path]:
    """One run per learning rate, each in a directory of its own; resumes what is unfinished."""
    folders = {rate: run_dir.with_name(f"{run_dir.name}-lr{rate:g}") for rate in rates}
    for rate, folder in folders.items():
        if steps_done(folder) >= steps:
            print(f"{folder} is complete ({steps} steps)", flush=True)
            continue
        # A process of its own: an engine in this one would keep its memory for the next rate.
        inner = [sys.executable, str(Path(__file__).resolve()), "train-sft", *arguments]
        inner += ["--learning-rate", f"{rate:g}", "--on-collapse", "off", "--run-dir", str(folder)]
        run(inner + (["--resume"] if (folder / "config.json").exists() else []))
    return folders


# --------------------------------------------------------------------------------- what it came to


def run_arm(options: argparse.Namespace, extra: Sequence[str]) -> None:
    """Train (or resume), evaluate, write the result."""
    from run.rundir import circumstances

    name = f"{options.arm}-{options.seed}"
    run_dir = options.runs / name
    arguments = arm_arguments(options.arm, options.seed, run_dir, extra)
    config = planned(arguments)
    grid: dict[str, Any] = {}
    if options.arm == "sft":
        folders = run_sft(arguments, run_dir, config.steps, options.learning_rates)
        final = {rate: read_evaluations(folder)[-1]["avg"] for rate, folder in folders.items()}
        best = max(final, key=lambda rate: final[rate]["value"])
        grid = {"learning_rates": {f"{rate:g}": avg for rate, avg in final.items()}}
        grid |= {"chosen": f"{best:g}"}
        run_dir = folders[best]
    else:
        train(arguments, run_dir, config.steps)
    result = {"arm": options.arm, "seed": options.seed} | record(run_dir, config.steps)
    result |= {"recipe": circumstances()["command"]}
    result["test"] = evaluate_test("textcraft", options.seed, run_dir, config, options.test_samples)
    write_result(options.results / f"{name}.json", result | grid)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--arm", choices=ARMS, required=True)
    parser.add_argument(
        "--learning-rates", type=float, nargs="+", default=list(SFT_LEARNING_RATES), help="of sft"
    )
    parser.add_argument("--test-samples", type=int, default=1, help="of the test split; 0: skip it")


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["train-sft"]:  # how run_sft starts a run of its own
        with suppress(KeyboardInterrupt):
            train_sft(load_config(argv[1:]))
            return 0
        return 130
    recipe = Recipe("learns", __doc__, RESULTS / "learns", add_options, run_arm, report)
    return recipe.main(argv)


if __name__ == "__main__":
    sys.exit(main())
