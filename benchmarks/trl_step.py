"""One training step, here and in TRL: seconds to roll out and to update, on the same work.

TRL's GRPOTrainer has no multi-turn loop of its own for an environment behind HTTP; one writes a
`rollout_func`. The one in trl_trainer.py is what it looks like with transformers' generation: all
trajectories in one left-padded batch, the whole history prefilled again each turn, all environments
stepped, next round. It returns ids and `env_mask`, which is our loss_mask.

Equal on both sides: the warm-started checkpoint, the tasks and environment seeds of each step, the
environment server, budgets, sampling temperature, GRPO with token-mean loss, AdamW in float32, the
number format that this machine is faster in, one optimizer step per batch, the machine, the
sitting. TRL's gradient checkpointing is off, which makes it faster here. Different is what each
library does with it:

                    ours                                    TRL 1.16
    sampler         vLLM in the process, event-driven       transformers `generate`, lockstep
    before update   the sync check's few tokens             -
    update          groups of equal returns left out        all trajectories, micro-batches of 8
                    (--train-on-all keeps them),            padded on both sides
                    micro-batches by token budget

Each side is a process of its own that takes a step when told to, so that the two alternate under
the same conditions; the first step of each is a warm-up and not counted. Sampling differs, hence
also the number of tokens: results are in seconds and in tokens/s.

TRL is not part of the requirements:   pip install 'trl==1.16.*' datasets
Run it:   python benchmarks/trl_step.py --repeats 3         an estimated half hour on two cores
It prints a table and writes benchmarks/results/trl_step.json.
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.common import Results, arguments, median  # noqa: E402
from config import Config, complete  # noqa: E402

TRL_VERSION = "1.16"


def step_config(options: argparse.Namespace) -> Config:
    """Our default configuration, with the checkpoint, batch shape and number of steps asked for."""
    config = Config(
        model=options.model,
        warm_start=options.warm_start,
        steps=options.repeats + 1,
        tasks_per_step=options.tasks,
        group_size=options.samples,
        mini_batch_size=options.tasks * options.samples,
        skip_zero_variance=not options.train_on_all,
        eval_every=0,
    )
    config = complete(config)
    config.check()
    return config


def wait_for_turn() -> None:
    """Say that we are ready, and wait until the parent has the other side idle."""
    print("READY", flush=True)
    if not sys.stdin.readline():
        os._exit(1)  # the parent is gone


def report(figures: dict[str, float]) -> None:
    print("STEP " + json.dumps(figures), flush=True)


# -------------------------------------------------------------------------------------------- ours


def run_ours(config: Config) -> None:
    """The steps of train.py from roll out to sync, timed; no evaluation, no files."""
    from advantages import estimate
    from batching import make_batch
    from run.session import at_work
    from train import RLWorker, in_as_many_steps, requests_of, usable_trajectories

    with (
        tempfile.TemporaryDirectory() as folder,
        at_work(replace(config, run_dir=folder), RLWorker) as session,
    ):
        w = session.worker
        for step in session.steps_left():
            wait_for_turn()
            began = time.perf_counter()
            requests = requests_of(step, w.tasks, config, w.rounds_at(step))
            trajectories, log = w.roll_out(requests)
            rolled = time.perf_counter()
            usable, num_compared, signal = usable_trajectories(trajectories, config)
            if usable:
                batch = make_batch(usable, w.pad_id)
                objective, each = in_as_many_steps(config, len(usable), num_compared)
                w.score(batch, objective)
                w.penalize_kl(batch)
                given = vars(batch) | {"gamma": config.gamma, "lam": config.lam}
                batch.advantages, batch.returns = estimate(config.algorithm, given)
                w.update(step, batch, objective, each * signal["data/signal_share"])
                w.sync(step, usable)
            ended = time.perf_counter()
            report(
                {
                    "rollout_s": rolled - began,
                    "update_s": ended - rolled,
                    "step_s": ended - began,
                    "generated_tokens": log.generated_tokens,
                    "trained_tokens": sum(len(t.input_ids) for t in usable),
                    "trained_trajectories": len(usable),
                    "success": sum(t.success for t in trajectories) / len(trajectories),
                }
            )


# ------------------------------------------------------------------------------------------ parent


class Side:
    """One of the two processes: started once, then one step each time it is asked."""

    def __init__(self, name: str, words: list[str], start: str, program: Path) -> None:
        command = [sys.executable, str(program.resolve()), *words]
        self.name = name
        self.process = subprocess.Popen(
            [*command, "--side", name, "--start", start],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self.read_until("READY")

    def step(self, is_last: bool) -> dict[str, float]:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        figures = json.loads(self.read_until("STEP "))
        if not is_last:
            self.read_until("READY")
        return figures

    def read_until(self, mark: str) -> str:
        """The rest of the next line that begins with `mark`; other lines are libraries talking."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(mark):
                return line[len(mark) :]
        raise SystemExit(f"the {self.name} side ended early; its message is above")

    def close(self) -> None:
        if self.process.stdin:
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=20)
        self.process.kill()


def trl_version(program: str = "trl_step.py") -> str:
    """The installed TRL.

    Raises:
        SystemExit: none, another one than this benchmark was written for, or without datasets.
    """
    how = f"install it with: pip install 'trl=={TRL_VERSION}.*' datasets"
    try:
        version = importlib.metadata.version("trl")
        importlib.metadata.version("datasets")
    except importlib.metadata.PackageNotFoundError as error:
        raise SystemExit(f"{program} needs {error.name}, which is not installed; {how}") from None
    if not version.startswith(f"{TRL_VERSION}."):
        raise SystemExit(f"{program} is written for TRL {TRL_VERSION}, found {version}; {how}")
    return version


def summarize(repeats: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Medians per side, and TRL over ours, the median of the repeats' ratios.

    Where groups of equal returns left us nothing to train on, no time of the update or of the whole
    step is compared.

    >>> both = {"ours": {"step_s": 2.0}, "trl": {"step_s": 5.0}}
    >>> summarize([both, both])
    {'ours': {'step_s': 2.0}, 'trl': {'step_s': 5.0}, 'trl_over_ours': {'step_s': 2.5}}
    """
    names = list(repeats[0]["ours"])
    table = {
        side: {name: median((r[side][name] for r in repeats), 3) for name in names}
        for side in ("ours", "trl")
    }
    trained = all(r["ours"].get("trained_tokens", 1) for r in repeats)
    compared = ["rollout_s", "generated_per_s"]
    compared += ["update_s", "step_s", "trained_per_s"] if trained else []
    table["trl_over_ours"] = {
        name: median((r["trl"][name] / r["ours"][name] for r in repeats), 2)
        for name in names
        if name in compared
    }
    return table


def with_speeds(figures: dict[str, float]) -> dict[str, float]:
    """Adds tokens/s: comparable where the two sides generated or trained on different amounts."""
    return figures | {
        "generated_per_s": figures["generated_tokens"] / figures["rollout_s"],
        "trained_per_s": figures["trained_tokens"] / figures["update_s"],
    }


def compare(options: argparse.Namespace, words: list[str], start: str) -> list[dict[str, Any]]:
    """A warm-up step of each side, then the repeats, the sides in turn."""
    sides: list[Side] = []
    repeats: list[dict[str, Any]] = []
    try:
        for name in ("ours", "trl"):
            print(f"starting {name} ...", flush=True)
            sides.append(Side(name, words, start, Path(__file__)))
        for n in range(options.repeats + 1):
            row = {}
            for side in sides:
                row[side.name] = figures = with_speeds(side.step(is_last=n == options.repeats))
                label = f"repeat {n} of {options.repeats}" if n else "warm-up"
                print(
                    f"{label}: {side.name:<5} rollout {figures['rollout_s']:.1f} s, "
                    f"update {figures['update_s']:.1f} s, success {figures['success']:.0%}",
                    flush=True,
                )
            if n:
                repeats.append(row)
    except KeyboardInterrupt:
        if not repeats:
            raise
        print(f"stopped: the figures are of {len(repeats)} repeats", flush=True)
    finally:
        for side in sides:
            side.close()
    return repeats


def parse() -> argparse.Namespace:
    parser = arguments(__doc__, 3, "trl_step.json")
    parser.add_argument("--model", choices=("smollm2-135m", "tiny"), default="smollm2-135m")
    parser.add_argument(
        "--warm-start", default="auto", help="as train.py: auto, never, or a folder"
    )
    parser.add_argument("--tasks", type=int, default=8, help="tasks per step")
    parser.add_argument("--samples", type=int, default=8, help="trajectories per task")
    parser.add_argument("--train-on-all", action="store_true", help="keep groups of equal returns")
    parser.add_argument("--side", choices=("ours", "trl"), help=argparse.SUPPRESS)
    parser.add_argument("--start", help=argparse.SUPPRESS)
    return parser.parse_args()


def run_side(options: argparse.Namespace) -> None:
    """This process is one of the two sides."""
    config = replace(step_config(options), warm_start=options.start)
    if options.side == "ours":
        run_ours(config)
    else:
        from benchmarks.trl_trainer import run_trl

        run_trl(config, options.start, wait_for_turn, report)


def main() -> int:
    options = parse()
    if options.side:
        run_side(options)
        return 0
    version = trl_version()
    from scale.distributed import make_accelerator
    from scale.precision import choose
    from warmstart import start_model

    accelerator = make_accelerator(choose("auto").autocast)
    start = start_model(step_config(options), accelerator)  # trained if it is not yet
    results = Results(options.out, "trl_step.json")
    results.about["versions"]["trl"] = version
    repeats = compare(options, sys.argv[1:], start)
    table = summarize(repeats)
    settings = {"model": options.model, "start": start.removeprefix(f"{ROOT}/")}
    settings |= {"tasks": options.tasks, "samples": options.samples}
    settings |= {"train_on_all": options.train_on_all}
    results.write({"settings": settings, "summary": table, "repeats": repeats})
    print(f"\n{'median of ' + str(len(repeats)):<24}{'ours':>12}{'TRL':>12}{'TRL / ours':>12}")
    for name in table["ours"]:
        ratio = table["trl_over_ours"].get(name, "")
        print(f"{name:<24}{table['ours'][name]:>12.1f}{table['trl'][name]:>12.1f}{ratio:>12}")
    if table["ours"]["trained_trajectories"] < table["trl"]["trained_trajectories"]:
        print("ours left groups of equal returns out of the update; --train-on-all keeps them")
    return 0


if __name__ == "__main__":
    sys.exit(main())
