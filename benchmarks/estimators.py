"""How long do the advantages take, next to a training step? The goal: under 1 %.

The estimators are written to be read: a loop over time, vectorised over trajectories. This prints
what that costs on a small batch (64 trajectories of 1,024 tokens) and a large one (256 of 4,096),
and which share of a step it is. Each number is the fastest of several runs after a warm-up; the
slowest estimator on the large batch decides. The exit code is 1 if it misses the goal.

    python benchmarks/estimators.py                  # of a step of 60 s; --step-s says otherwise
    python benchmarks/estimators.py --run runs/textcraft-grpo-...    # median step of a real run
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from advantages import gae, grpo, reinforce_plus_plus, rloo  # noqa: E402
from benchmarks.common import seconds_of  # noqa: E402
from reporting.metrics import read_log  # noqa: E402

SHAPES = ((64, 1024), (256, 4096))  # (trajectories, tokens)
GOAL = 0.01  # of a step
GROUP_SIZE = 8


def make_batch(num_trajectories: int, num_tokens: int, device: str) -> dict[str, torch.Tensor]:
    """Turns of about 50 policy tokens and 50 observation tokens, one reward at the end."""
    torch.manual_seed(0)
    turn = torch.arange(num_tokens) // 50  # (T,)
    loss_mask = ((turn + torch.arange(num_trajectories)[:, None]) % 2).long()  # (B, T)
    last = num_tokens - 1 - loss_mask.flip(1).argmax(1)  # (B,)
    token_rewards = torch.zeros(num_trajectories, num_tokens)
    token_rewards[torch.arange(num_trajectories), last] = torch.rand(num_trajectories)
    batch = {
        "token_rewards": token_rewards,
        "values": torch.rand(num_trajectories, num_tokens),
        "loss_mask": loss_mask,
        "group_ids": torch.arange(num_trajectories) // GROUP_SIZE,
    }
    return {name: tensor.to(device) for name, tensor in batch.items()}


def fastest_s(call: Callable[[], tuple[torch.Tensor, torch.Tensor]], repeats: int) -> float:
    """Seconds of the fastest of `repeats` runs. Reading a result waits for the device."""

    def work() -> None:
        call()[0].sum().item()

    work()
    return min(seconds_of(work) for _ in range(repeats))


def timed(device: str, repeats: int) -> Iterator[tuple[str, str, float]]:
    """(shape, estimator, seconds) of each estimator on each batch."""
    for num_trajectories, num_tokens in SHAPES:
        rewards, values, mask, groups = make_batch(num_trajectories, num_tokens, device).values()
        calls: dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor]]] = {
            "gae": partial(gae, rewards, values, mask, gamma=0.99, lam=0.95),
            "grpo": partial(grpo, rewards, mask, groups),
            "rloo": partial(rloo, rewards, mask, groups),
            "reinforce_plus_plus": partial(reinforce_plus_plus, rewards, mask, gamma=0.99),
        }
        for name, call in calls.items():
            yield f"{num_trajectories} x {num_tokens}", name, fastest_s(call, repeats)


def step_seconds(run_dir: Path) -> float:
    """Median time/step_s of a run; the first step is left out where there are more."""
    path = run_dir / "timings.jsonl"
    if not path.is_file():
        raise ValueError(f"{path} does not exist; --run must be a run directory of train.py")
    seconds = [line["time/step_s"] for line in read_log(path) if line.get("time/step_s")]
    if not seconds:
        raise ValueError(f"{path} has no time/step_s; the run has not finished a step yet")
    return statistics.median(seconds[1:] or seconds)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--step-s", type=float, default=60.0, help="seconds of one training step")
    source.add_argument("--run", type=Path, help="run directory whose timings.jsonl is read")
    parser.add_argument("--device", default="cpu", help="where the tensors live (default: cpu)")
    parser.add_argument("--repeats", type=int, default=5, help="timed runs each (default: 5)")
    args = parser.parse_args()
    try:
        step_s = args.step_s if args.run is None else step_seconds(args.run)
    except ValueError as error:
        parser.error(str(error))
    if step_s <= 0 or args.repeats < 1:
        parser.error(f"--step-s {step_s} and --repeats {args.repeats} must be positive")
    print(f"one step takes {step_s:.1f} s; {args.device}, {torch.get_num_threads()} threads")
    print(f"{'batch':>12}  {'estimator':<20} {'ms':>8}  {'share of step':>13}")
    worst = 0.0
    for shape, name, seconds in timed(args.device, args.repeats):
        worst = max(worst, seconds / step_s)
        print(f"{shape:>12}  {name:<20} {seconds * 1e3:8.1f}  {seconds / step_s:13.3%}")
    met = worst < GOAL
    print(f"slowest: {worst:.3%} of a step; goal under {GOAL:.0%}: {'met' if met else 'MISSED'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
