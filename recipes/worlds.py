"""Does `make train` learn? Run an environment's default training and evaluate it.

The run trains on the environment's short tasks (envs/*/ids) and is evaluated on held-out tasks
before the first step and after the last, at two temperatures. --method runs another program instead
of train.py: `imitation` is sft.py on the demonstrations of the warm start; give it --steps, so that
it takes as long as RL.

    python recipes/worlds.py --env babyai --seed 0
    python recipes/worlds.py --env textcraft --seed 0 --published   # also AgentGym's test split
    python recipes/worlds.py --env textcraft --seed 0 --method dpo
    python recipes/worlds.py --env textcraft --name code --action-format code --steps 5

To resume a stopped run from its last checkpoint, repeat the command. The result is written to
runs/worlds/results, or with --commit to recipes/results/worlds, where tables.py finds it. Options
that this command does not know are passed on to the program. Read next: envs/babyai/env.py,
`LAPTOP`.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from config import Config, checked
from config import options as default_options
from envs import ENVS
from recipes.common import (
    COMMITTED,
    exit_on_interrupt,
    read_json,
    record,
    run,
    run_program,
    write_json,
)
from run.checkpoint import steps_saved
from warmstart import demonstrations_for, settings_for, start_model

RUNS = Path("runs/worlds")
METHODS = ("sft", "dpo", "agentevol")
IMITATION = "imitation"
SAMPLES = ("--eval-samples", "2", "--eval-start-samples", "2")  # the same number before and after
TEMPERATURES = ("1", "0.3")


def start_of(config: Config) -> str:
    """The folder of the weights that the run starts from, after its warm start."""
    from scale import distributed, precision

    accelerator = distributed.make_accelerator(precision.choose("auto").autocast)
    return start_model(config, accelerator)


def published(model: str, config: Config, out: Path) -> dict[str, Any]:
    """The results on AgentGym's test split at both temperatures, with at most as many turns as in
    the paper: {temperature: {max_rounds, samples, items}}. From `out` if they are there already."""
    results = {}
    for temperature in TEMPERATURES:  # one at a time, so that an interrupted recipe goes on
        folder = out / f"temperature_{temperature}"
        if not (folder / "eval.json").exists():
            words = ["--env", config.env, "--model", model, "--temperature", temperature]
            words += ["--max-tokens-per-turn", str(config.max_tokens_per_turn), "--split", "test"]
            words += ["--samples", "2", "--max-rounds", "30", "--max-trajectory-tokens", "4096"]
            run([sys.executable, "evaluate.py", *words, "--out", str(folder)])
        summary = read_json(folder / "eval.json")
        items = {task_id: item["avg"] for task_id, item in summary["items"].items()}
        results[temperature] = {n: summary[n] for n in ("max_rounds", "samples")} | {"items": items}
    return results


def imitation_words(env: str) -> list[str]:
    """Options of sft.py to train on the demonstrations of the warm start again."""
    config, data = checked(default_options(env)), RUNS / f"demonstrations-{env}.json"
    if not data.exists():
        settings = settings_for(config.model, env)
        write_json(data, demonstrations_for(config, settings.num_demonstrations, settings.seed))
    return ["--data", str(data), "--warm-start", "auto", "--eval-rounds", str(max(config.rounds))]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--env", choices=ENVS, required=True, help="environment to train in")
    methods = (*METHODS, IMITATION)
    parser.add_argument("--method", choices=methods, help="run this program instead of train.py")
    parser.add_argument("--seed", type=int, default=0, help="seed of the run (default: 0)")
    parser.add_argument("--name", help="name of the result, for a run with other options")
    parser.add_argument(
        "--published", action="store_true", help="play the published test split, too"
    )
    parser.add_argument("--commit", action="store_true", help="write the result to recipes/results")
    options, extra = parser.parse_known_args()
    os.chdir(ROOT)
    name = f"{options.name or options.env}-{options.seed}"
    folder = COMMITTED / "worlds" if options.commit else RUNS / "results"
    words = ["--env", options.env, "--seed", str(options.seed), "--save-every", "5", *SAMPLES]
    words += ["--eval-temperatures", *TEMPERATURES]
    program = options.method or "train"
    if options.method:
        name, folder = f"{options.method}-{name}", folder / "methods"
    if options.method == IMITATION:
        program, words = "sft", [*words, *imitation_words(options.env)]
    run_dir = RUNS / name
    run_program(f"{program}.py", [*words, *extra], run_dir)
    result = {"env": options.env, "seed": options.seed} | record(run_dir)
    if options.published:
        config = checked(default_options(options.env))
        last = run_dir / f"checkpoints/step_{max(steps_saved(run_dir)):06d}"
        result["test"] = {
            "before": published(start_of(config), config, RUNS / f"start-{options.env}/test"),
            "after": published(str(last), config, run_dir / "test"),
        }
    if options.method:
        result["method"] = options.method
    write_json(folder / f"{name}.json", result)


if __name__ == "__main__":
    exit_on_interrupt(main)
