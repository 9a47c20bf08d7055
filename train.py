"""Multi-turn reinforcement learning of an LLM agent, from the first prompt to the last checkpoint,
in one loop.

    start: a model, warmed up on demonstrations where it needs that; held-out tasks, measured
                           │
             tasks ──> 1 horizon: how many turns may the agent take at this step?
                           │
    environment servers <──> 2 roll out: sampler and environments take turns, token by token
                           │        trajectories: ids, masks, log-probs, rewards
                           3 log-probs: what the trainer, the reference and the critic say of the
                           same tokens
                           │
                           4 advantages: was a token followed by more reward than usual?
                           │
                           5 update: make those tokens more likely, a little
                           │
                           6 sync: hand the new weights to the sampler, and check that they arrived
                           │
                           7 log, evaluate on held-out tasks, save ──> next step

Banner 1 makes it ScalingInter-RL. Banner 4 makes it GRPO, RLOO, REINFORCE++ or PPO, which also asks
for a critic in 3 and 5.

    python train.py --env textcraft                                  # two CPU cores
    python train.py --env textcraft --model Qwen/Qwen2.5-3B-Instruct # one large GPU
    accelerate launch --config_file recipes/fsdp2.yaml train.py --env textcraft   # many GPUs
    python train.py --env textcraft --algorithm ppo --rounds 8       # all options: --help

With several processes all of them run this loop, line by line, on the same trajectories; what is
split between them is in scale/distributed.py.

Everything a run writes lies in its directory: metrics, timings, every trajectory, evaluations,
checkpoints and a plot. Ctrl-C stops it after saving; `--resume --run-dir DIR` goes on. Exit codes:
0 done, 1 failure, 2 misuse, 130 stopped by Ctrl-C.

From Python: `from config import options`, `train(options("textcraft", steps=4))`.

Read first: trajectory, advantages, losses. Read next: schedulers, rollout, update, `run/worker.py`.
"""

from __future__ import annotations

import sys

from config import Config
from runtime.cli import begin

SUMMARY = (__doc__ or "").split("\n\n")[0]
if __name__ == "__main__":  # before the imports below take their seconds
    begin(Config, SUMMARY)

import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from advantages import ESTIMATORS, estimate, whiten_each
from batching import make_batch
from envs import Task
from order import RolloutRequest, draw
from reporting.metrics import by_world, summarize_trajectories
from rlworker import RLWorker
from run import shell
from run.clock import Clock
from run.rundir import Run
from run.session import at_work
from scale import distributed
from trajectory import RolloutHandler, are_equal
from update import padding_of


def train(config: Config) -> Run:
    """Train as the options say; the run, closed: `run.path` holds all that it left.

    Raises:
        Misuse: an option, or what it names, cannot work; nothing was written.
        KeyboardInterrupt: after Ctrl-C, once all is saved.
        shell.FAILURES: what ended it, in a line; what was saved stays.
    """
    config = shell.checked(config)
    with at_work(config, RLWorker) as session:
        w = session.worker
        session.evaluate_start()
        for step in session.steps_left():
            clock = Clock(vars(config))
            # ---------------------------------------------------------------------------- 1 horizon
            horizons = w.rounds_at(step)

            # --------------------------------------------------------------------------- 2 roll out
            requests = requests_of(step, w.tasks, config, horizons)
            with session.before_learning(), clock("time/rollout_s"):
                trajectories, log = w.roll_out(requests)
            if config.shuffle_rewards:
                shuffle_rewards(trajectories, seed=config.seed + step)
            usable, num_compared, signal = usable_trajectories(trajectories, config)
            metrics = by_world("horizon/max_rounds", horizons, max)
            metrics["data/epoch"] = w.epoch_of(step)

            if usable:
                # ---------------------------------------------------------------------- 3 log-probs
                batch = make_batch(usable, w.pad_id)
                objective, each = in_as_many_steps(config, len(usable), num_compared)
                with session.before_learning(), clock("time/log_probs_s"):
                    w.score(batch, objective)

                # --------------------------------------------------------------------- 4 advantages
                with clock("time/advantages_s"):
                    metrics |= w.penalize_kl(batch)
                    # The estimator takes the ones that its parameters name.
                    given = vars(batch) | {"gamma": config.gamma, "lam": config.lam}
                    batch.advantages, batch.returns = estimate(config.algorithm, given)
                    if config.normalize_per_env:
                        worlds = [t.env for t in usable]
                        whitened = whiten_each(batch.advantages, batch.loss_mask, worlds)
                        batch.advantages = whitened

                # ------------------------------------------------------------------------- 5 update
                with clock("time/update_s"):
                    metrics |= w.update(step, batch, objective, each * signal["data/signal_share"])

                # --------------------------------------------------------------------------- 6 sync
                with session.after_learning(), clock("time/sync_s"):
                    difference, clock.values["sync/bytes"] = w.sync(step, usable)
                    metrics["sync/log_prob_diff_mean"] = difference

                trained = int(batch.lengths.sum()) * config.ppo_epochs
                clock.values |= {
                    "update/tokens_per_s": trained / max(clock.values["time/update_s"], 1e-9),
                    "update/padding_share": padding_of(batch, objective, seed=step),
                }
                keep_advantages(usable, batch.advantages)
            else:
                distributed.say(f"step {step}: no learning signal, no weight changes")
                metrics |= {"policy/optimizer_steps": 0, "policy/skipped_steps": 0}

            # ---------------------------------------------------------------- 7 log, evaluate, save
            metrics |= summarize_trajectories(trajectories, list(horizons)) | signal
            session.run.write_trajectories(f"step_{step:06d}", trajectories)
            metrics |= session.evaluate_if_due(step, clock)
            session.finish_step(step, metrics, clock, log)
    return session.run


# --------------------------------------------------------------------------------- pieces of a step


def requests_of(
    step: int, tasks: Sequence[Task], config: Config, horizons: Mapping[str, int]
) -> list[RolloutRequest]:
    """The step's trajectories to roll: `order.draw`, a pure function of the step."""
    c = config
    size = c.tasks_per_step, c.group_size
    return draw(step, tasks, *size, c.seed, step, horizons, c.env_weights)


def usable_trajectories(
    trajectories: Sequence[RolloutHandler], config: Config
) -> tuple[list[RolloutHandler], int, dict[str, Any]]:
    """The trajectories that enter the loss, of how many that were compared, and their share.

    Out go: those the infrastructure lost or without a policy token; for algorithms that compare
    within a group, groups left with one member and, with --skip-zero-variance, groups whose returns
    are all equal: their advantages are 0, but where --kl-coef takes from each what it has drifted,
    or --normalize-per-env shifts them all.
    """
    valid = [t for t in trajectories if t.is_valid]
    compared = valid
    if ESTIMATORS[config.algorithm].needs_group:
        size = Counter(t.group_id for t in valid)
        compared = valid = [t for t in valid if size[t.group_id] > 1]
        if config.skip_zero_variance and not (config.kl_coef or config.normalize_per_env):
            returns: dict[int, list[float]] = {}
            for t in valid:
                returns.setdefault(t.group_id, []).append(t.total_return)
            valid = [t for t in valid if not are_equal(returns[t.group_id])]
    for t in valid:
        t.used_in_loss = True
    used, all_tokens = (sum(sum(t.loss_mask) for t in each) for each in (valid, compared))
    share = used / max(all_tokens, 1)
    if config.loss_agg == "seq-mean":  # a mean over trajectories, then
        share = len(valid) / max(len(compared), 1)
    return valid, len(compared), {"data/policy_tokens": used, "data/signal_share": share}


def in_as_many_steps(config: Config, num_rows: int, num_compared: int) -> tuple[Config, float]:
    """Options by which what is left of a step's trajectories is learned in as many optimizer steps
    as all would be, and how many of those each stands for where they cannot be as many. Each is
    scaled by the share that is left; fewer would count what was left out a second time.

    >>> made = [in_as_many_steps(Config(mini_batch_size=64), n, 256) for n in (256, 64, 6)]
    >>> [(objective.mini_batch_size, round(each, 2)) for objective, each in made]
    [(64, 1.0), (16, 1.0), (2, 1.33)]
    """
    steps = math.ceil(num_compared / config.mini_batch_size)
    objective = replace(config, mini_batch_size=math.ceil(num_rows / steps))
    return objective, steps / math.ceil(num_rows / objective.mini_batch_size)


def shuffle_rewards(trajectories: Sequence[RolloutHandler], seed: int) -> None:
    """The control: every trajectory gets another one's return, on its last turn; what it did no
    longer matters. The multiset of returns stays; fewer groups are silent then.
    """
    valid = [t for t in trajectories if t.is_valid]
    returns = [t.total_return for t in valid]
    random.Random(seed).shuffle(returns)
    for t, value in zip(valid, returns, strict=True):
        for turn in t.turns:
            turn.reward = 0.0
        t.turns[-1].reward = value


def keep_advantages(trajectories: Sequence[RolloutHandler], advantages: torch.Tensor) -> None:
    """Write each row's advantages into its trajectory, as they were trained on; files round them
    (`trajectory.rounded`)."""
    for t, row in zip(trajectories, advantages, strict=True):
        t.advantages = row[: len(t.input_ids)].tolist()


# --------------------------------------------------------------------------------- the command line


def command_line(argv: Sequence[str] | None = None) -> int:
    """Parse, check, run; the exit code."""
    return shell.command_line(argv, SUMMARY, Config, train)


if __name__ == "__main__":
    sys.exit(command_line())
