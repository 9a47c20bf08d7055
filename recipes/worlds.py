"""Does `make train` learn, in each environment? The default runs, measured.

The default run of an environment (its short tasks, envs/*/ids) is played to its end and measured on
held-out tasks before the first step and after the last. The same for sft.py, dpo.py, agentevol.py.

    python recipes/worlds.py --env babyai --seed 0
    python recipes/worlds.py --env textcraft --seed 0 --method dpo

Stopped runs continue from their last checkpoint. The result goes to runs/worlds/results, with
--commit to recipes/results/worlds; tables.py makes tables and worlds.png. Options that this command
does not know go to the program. Read next: envs/babyai/env.py, `LAPTOP`.
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
SAMPLES = ("--eval-samples", "2", "--eval-start-samples", "2")  # as many before as after


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--env", choices=ENVS, required=True)
    parser.add_argument("--method", choices=METHODS, help="instead of train.py")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--commit", action="store_true", help="write to recipes/results")
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
