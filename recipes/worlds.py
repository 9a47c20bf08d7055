"""Does `make train` learn? Run an environment's default training and evaluate it.

The run trains on the environment's short tasks (envs/*/ids) and is evaluated on held-out tasks
before the first step and after the last. --method runs another program instead of train.py.

    python recipes/worlds.py --env babyai --seed 0
    python recipes/worlds.py --env textcraft --seed 0 --method dpo

To resume a stopped run from its last checkpoint, repeat the command. The result is written to
runs/worlds/results, or with --commit to recipes/results/worlds, where tables.py finds it. Options
that this command does not know are passed on to the program. Read next: envs/babyai/env.py,
`LAPTOP`.
"""

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from envs import ENVS  # noqa: E402
from recipes.common import COMMITTED, exit_on_interrupt, record, run_program, write_json  # noqa: E402

RUNS = Path("runs/worlds")
METHODS = ("sft", "dpo", "agentevol")
SAMPLES = ("--eval-samples", "2", "--eval-start-samples", "2")  # the same number before and after


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--env", choices=ENVS, required=True, help="environment to train in")
    parser.add_argument("--method", choices=METHODS, help="run this program instead of train.py")
    parser.add_argument("--seed", type=int, default=0, help="seed of the run (default: 0)")
    parser.add_argument("--commit", action="store_true", help="write the result to recipes/results")
    options, extra = parser.parse_known_args()
    os.chdir(ROOT)
    name = f"{options.env}-{options.seed}"
    folder = COMMITTED / "worlds" if options.commit else RUNS / "results"
    if options.method:
        name, folder = f"{options.method}-{name}", folder / "methods"
    words = ["--env", options.env, "--seed", str(options.seed), "--save-every", "5", *SAMPLES]
    run_program(f"{options.method or 'train'}.py", [*words, *extra], RUNS / name)
    result = {"env": options.env, "seed": options.seed} | record(RUNS / name)
    if options.method:
        result["method"] = options.method
    write_json(folder / f"{name}.json", result)


if __name__ == "__main__":
    exit_on_interrupt(main)
