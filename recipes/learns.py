"""Does it learn? Reinforcement learning against the two explanations that must be ruled out.

A curve that rises proves little by itself. Three arms start from the same warm-started weights and
are measured on the same held-out goals, three seeds each:

    rl         train.py with its defaults
    sft        more imitation instead: as many optimizer steps on fresh demonstrations of the same
               training goals, 32 a step: what fits into the time of RL's rollout and update, and
               in all fifteen times what the warm start saw
    shuffled   train.py --shuffle-rewards: trajectories swap rewards at random, so that updates are
               as large and as many, and carry no information

    rl above its own start            something changed for the better
    rl above sft                      and more of what the warm start did would not have done it
    shuffled at or below its start    and the rewards are what did it

The sft arm runs through the very same update: with advantages of 1 on demonstrated tokens and
π_old = π_θ the policy gradient is the gradient of the imitation loss,

    ∇ 1/N Σ ρ·1 = 1/N Σ ∇ log π_θ(token)          ρ = π_θ / stopgrad(π_θ)

so optimizer, clipping, precision and micro-batches are equal. It gets a grid of learning rates
(RL's and the warm start's), and the best of them *on the reported goals* stands for it, an
advantage that RL does not have. Every arm's figure is that of its last step.

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
Read next: learns_report.py; demonstrations.py.
"""

import argparse
import datetime
import json
import shutil
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from recipes.common import (  # noqa: E402
    carry_out,
    item_shares,
    load_config,
    read_evaluations,
    read_lines,
    run,
    write_json,
)
from recipes.learns_report import ARMS, Result, report  # noqa: E402

RESULTS = ROOT / "recipes" / "results" / "learns"
SFT_LEARNING_RATES = (4e-5, 1e-4)  # RL's, and the warm start's
CURVE = (
    "train/return_mean",
    "train/success_rate",
    "train/turns_mean",
    "train/trajectories_used",
    "policy/loss",
    "policy/entropy",
    "policy/grad_norm",
    "data/policy_tokens",
)


# ------------------------------------------------------------------------------------------ an arm


def arm_arguments(arm: str, seed: int, run_dir: Path, extra: Sequence[str] = ()) -> list[str]:
    """train.py's arguments of an arm; `sft` reads the same ones.

    >>> arm_arguments("shuffled", 1, Path("runs/learns/shuffled-1"))[-3:]
    ['--run-dir', 'runs/learns/shuffled-1', '--shuffle-rewards']
    """
    if arm not in ARMS:
        raise ValueError(f"--arm {arm} is unknown; choose one of: {' '.join(ARMS)}")
    arguments = ["--env", "textcraft", "--seed", str(seed), "--eval-every", "15"]
    arguments += ["--save-every", "5", *extra, "--run-dir", str(run_dir)]
    return arguments + (["--shuffle-rewards"] if arm == "shuffled" else [])


def steps_done(run_dir: Path) -> int:
    """Steps that a run has saved."""
    from runtime.checkpoint import steps_saved

    return max(steps_saved(run_dir), default=0)


def train(arguments: Sequence[str], run_dir: Path, steps: int) -> None:
    """train.py with these arguments, from its last checkpoint if there is one.

    Raises:
        SystemExit: it did not end well; its message is above.
    """
    if steps_done(run_dir) >= steps:
        print(f"{run_dir} is complete ({steps} steps)", flush=True)
        return
    if (run_dir / "config.json").exists():
        arguments = ["--resume", "--run-dir", str(run_dir), "--steps", str(steps)]
    run([sys.executable, "train.py", *arguments])


def train_sft(config: Any, learning_rate: float) -> None:
    """The control: the loop of train.py with demonstrations in place of rollouts.

    Evaluation, checkpoints, files and resume are train.py's own; so is the update, with advantage 1
    on every demonstrated token. Each step sees demonstrations that no step before it saw.
    """
    import torch

    from demonstrations import demonstrations
    from reporting.metrics import MetricsLogger
    from runtime import rundir
    from runtime.clock import Clock
    from sft import SftSettings, encode
    from train import is_due
    from worker import Worker

    # The sampler's correction has no meaning for tokens that nobody sampled.
    config = replace(config, learning_rate=learning_rate, sampler_is_cap=0.0)
    if config.ppo_epochs != 1 or config.mini_batch_size < config.tasks_per_step * config.group_size:
        raise ValueError(
            "the sft arm takes one optimizer step per step, as the rl arm's defaults do"
        )
    per_step = max(1, config.tasks_per_step * config.group_size // 2)
    settings = SftSettings(max_trajectory_tokens=config.max_trajectory_tokens)
    with ExitStack() as stack:
        run_of = rundir.open_run(config)
        stack.callback(run_of.close)
        worker = Worker(config, run_of, stack)
        first = worker.restore() + 1
        logger = MetricsLogger(run_of.path, resume_step=first - 1 if config.resume else None)
        stack.callback(logger.close)
        # Seeds far from the warm start's, which are small numbers.
        seed = 1_000_000 * (config.seed + 1)
        records = demonstrations(config.env, worker.tasks, config.steps * per_step, seed)
        if len(records) < config.steps * per_step:
            raise SystemExit(
                f"only {len(records)} of {config.steps * per_step} demonstrations succeeded"
            )
        if not run_of.has_evaluation(0):
            worker.evaluate(0)
        for step in range(first, config.steps + 1):
            clock = Clock()
            chosen = records[(step - 1) * per_step : step * per_step]
            batch = encode(worker.chat, chosen, settings, worker.pad_id)
            batch.group_ids = torch.arange(len(batch))  # no two of them need open alike
            ones = batch.loss_mask.clone()
            with clock("time/update_s"):
                metrics: dict[str, Any] = worker.update(step, batch, ones, ones, None, None, None)
            # Nobody sampled these tokens: their rollout_log_probs are 0, so the mean distance to
            # them is the imitation loss; the surrogate with advantage 1 and ρ = 1 is always -1.
            metrics["policy/loss"] = metrics["sampler/log_prob_diff_mean"]
            metrics = {name: value for name, value in metrics.items() if name.startswith("policy/")}
            metrics["data/policy_tokens"] = int(batch.loss_mask.sum())
            if is_due(step, config.eval_every, config.steps):
                worker.load_into_engine()
                metrics |= worker.evaluate(step)
            logger.log(step, metrics)
            if is_due(step, config.save_every, config.steps):
                worker.save(step)
            logger.timings(step, clock.values | {"time/step_s": clock.total()})
            print(f"step {step} of {config.steps}: loss {metrics['policy/loss']:.4f}", flush=True)


def run_sft(arguments: Sequence[str], run_dir: Path, rates: Sequence[float]) -> dict[float, Path]:
    """One run per learning rate, each in a directory of its own; resumes what is unfinished."""
    folders = {}
    for rate in rates:
        folder = run_dir.with_name(f"{run_dir.name}-lr{rate:g}")
        folders[rate] = folder
        config = replace(load_config(arguments), run_dir=str(folder))
        if steps_done(folder) >= config.steps:
            print(f"{folder} is complete ({config.steps} steps)", flush=True)
            continue
        # A process of its own: an engine in this one would keep its memory for the next rate.
        inner = [sys.executable, str(Path(__file__).resolve()), "train-sft", f"{rate:g}"]
        inner += [*arguments, "--run-dir", str(folder)]
        run(inner + (["--resume"] if (folder / "config.json").exists() else []))
    return folders


# --------------------------------------------------------------------------------- what it came to


def evaluate_test_split(model: str, folder: Path, seed: int, samples: int) -> dict[str, Any]:
    """evaluate.py on the published test split under 30 turns; kept in `folder`, played once."""
    if not (folder / "eval.json").exists():
        aside = folder.with_name(f".{folder.name}")
        shutil.rmtree(aside, ignore_errors=True)
        command = [sys.executable, "evaluate.py", "--env", "textcraft", "--split", "test"]
        command += ["--model", model, "--max-rounds", "6", "30", "--samples", str(samples)]
        command += ["--max-tokens-per-turn", "80", "--seed", str(seed), "--out", str(aside)]
        run(command)
        aside.rename(folder)
    summary = json.loads((folder / "eval.json").read_text(encoding="utf-8"))
    rows = {"all": summary["overall"], **summary["subtasks"]}
    return {
        "max_rounds": 30,
        "samples": samples,
        "rows": {name: {"items": row["items"], "avg": row["avg"]} for name, row in rows.items()},
        "items": item_shares(summary),
        "crafted_ingredient": crafted_ingredient(read_lines(folder / "trajectories.jsonl")),
    }


def crafted_ingredient(trajectories: Sequence[dict[str, Any]]) -> dict[str, int]:
    """Episodes per sub-task in which something was crafted before, or without, the goal."""
    counts: dict[str, int] = {}
    for line in trajectories:
        before_goal = line["turns"][:-1] if line["success"] else line["turns"]
        crafted = any(turn["observation_text"].startswith("Crafted") for turn in before_goal)
        counts[line["subtask"]] = counts.get(line["subtask"], 0) + crafted
    return counts


def collect_result(arm: str, seed: int, run_dir: Path, config: Any, test_samples: int) -> Result:
    """Everything the report needs of one finished run, small enough to commit."""
    from plan import start_model
    from runtime.checkpoint import folder_of
    from runtime.rundir import circumstances

    about = json.loads((run_dir / "config.json").read_text(encoding="utf-8"))
    evaluations = read_evaluations(run_dir)
    steps = [evaluation["step"] for evaluation in evaluations]
    if steps[:1] != [0] or steps[-1] != config.steps:
        raise SystemExit(f"{run_dir}/eval holds steps {steps}, expected 0 to {config.steps}")
    start, last = start_model(config), folder_of(run_dir, config.steps)
    test = {}
    if test_samples:
        model_of = {"before": (start, run_dir.parent / f"test-start-{seed}")}
        model_of["after"] = (str(last), run_dir / "test")
        for name, (model, folder) in model_of.items():
            test[name] = evaluate_test_split(model, folder, seed, test_samples)
    metrics = read_lines(run_dir / "metrics.jsonl")
    timings = read_lines(run_dir / "timings.jsonl")
    return {
        "arm": arm,
        "seed": seed,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": about["command"],
        "git_commit": about["git_commit"],
        "hardware": about["hardware"],
        "versions": about["versions"],
        "recipe": circumstances()["command"],
        "config": about["config"],
        "steps": config.steps,
        "hours": round(sum(row.get("time/step_s", 0.0) for row in timings) / 3600, 2) or None,
        "curve": [
            {"step": row["step"]} | {name: row[name] for name in CURVE if row.get(name) is not None}
            for row in metrics
        ],
        "held_out": evaluations,
        "test": test,
    }


def run_arm(options: argparse.Namespace, extra: Sequence[str]) -> None:
    """Train (or resume), evaluate, write the result."""
    run_dir = options.runs / f"{options.arm}-{options.seed}"
    arguments = arm_arguments(options.arm, options.seed, run_dir, extra)
    config = load_config(arguments)
    grid: dict[str, Any] = {}
    if options.arm == "sft":
        folders = run_sft(arguments, run_dir, options.learning_rates)
        final = {rate: read_evaluations(folder)[-1] for rate, folder in folders.items()}
        best = max(final, key=lambda rate: final[rate]["avg"]["value"])
        grid = {f"{rate:g}": evaluation["avg"] for rate, evaluation in final.items()}
        grid = {"learning_rates": grid, "chosen": f"{best:g}"}
        run_dir = folders[best]
    else:
        train(arguments, run_dir, config.steps)
    result = collect_result(options.arm, options.seed, run_dir, config, options.test_samples)
    path = options.results / f"{options.arm}-{options.seed}.json"
    write_json(path, result | grid)
    print(f"wrote {path}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    argv = list(sys.argv[1:] if argv is None else argv)
    if argv[:1] == ["train-sft"]:  # how run_sft starts a run of its own
        with suppress(KeyboardInterrupt):
            train_sft(load_config(argv[2:]), learning_rate=float(argv[1]))
            return 0
        return 130
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    running = commands.add_parser("run", help="run or resume one arm with one seed")
    running.add_argument("--arm", choices=ARMS, required=True)
    running.add_argument("--seed", type=int, required=True)
    running.add_argument("--runs", type=Path, default=Path("runs/learns"), help="where runs lie")
    running.add_argument(
        "--learning-rates", type=float, nargs="+", default=list(SFT_LEARNING_RATES), help="of sft"
    )
    running.add_argument(
        "--test-samples", type=int, default=1, help="of the test split; 0: skip it"
    )
    reporting = commands.add_parser("report", help="table and figure of the results present")
    for each in (running, reporting):
        each.add_argument("--results", type=Path, default=RESULTS)
    options, extra = parser.parse_known_args(argv)
    return carry_out("learns.py", options, extra, run_arm, report)


if __name__ == "__main__":
    sys.exit(main())
