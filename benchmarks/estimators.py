"""How long do the advantages take, next to a training step? The goal: under 1 %.

The estimators are written to be read: a loop over time, vectorised over trajectories. This prints
what that costs on a small batch (64 trajectories of 1,024 tokens) and a large one (256 of 4,096),
and which share of a step it is. Each number is the fastest of several runs after a warm-up; the
slowest estimator on the large batch decides. The exit code is 1 if it misses the goal.

    python benchmarks/estimators.py --step-s 60
    python benchmarks/estimators.py --run runs/textcraft-grpo-...    # median step of a real run
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from advantages import gae, grpo, reinforce_plus_plus, rloo

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
    call()[0].sum().item()
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()[0].sum().item()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def step_seconds(run_dir: Path) -> float:
    """Median time/step_s of a run; the first step is left out where there are more."""
    path = run_dir / "timings.jsonl"
    if not path.is_file():
        raise ValueError(f"{path} does not exist; --run must be a run directory of train.py")
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    seconds = [line["time/step_s"] for line in lines if line.get("time/step_s")]
    if not seconds:
        raise ValueError(f"{path} has no time/step_s; the run has not finished a step yet")
    return statistics.median(seconds[1:] or seconds)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--step-s", type=float, help="seconds of one training step")
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
    for num_trajectories, num_tokens in SHAPES:
        batch = make_batch(num_trajectories, num_tokens, args.device)
        rewards, values, mask, groups = batch.values()
        calls: dict[str, Callable[[], tuple[torch.Tensor, torch.Tensor]]] = {
            "gae": partial(gae, rewards, values, mask, gamma=0.99, lam=0.95),
            "grpo": partial(grpo, rewards, mask, groups),
            "rloo": partial(rloo, rewards, mask, groups),
            "reinforce_plus_plus": partial(reinforce_plus_plus, rewards, mask, gamma=0.99),
        }
        for name, call in calls.items():
            seconds = fastest_s(call, args.repeats)
            worst = max(worst, seconds / step_s)
            shape = f"{num_trajectories} x {num_tokens}"
            print(f"{shape:>12}  {name:<20} {seconds * 1e3:8.1f}  {seconds / step_s:13.3%}")
    met = worst < GOAL
    print(f"slowest: {worst:.3%} of a step; goal under {GOAL:.0%}: {'met' if met else 'MISSED'}")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
