"""Multi-turn reinforcement learning of an LLM agent, from the first prompt to the last checkpoint,
in one loop.

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

This is GRPO, PPO, RLOO or REINFORCE++ depending on banner 4 alone, ScalingInter-RL depending on
banner 1 alone.

    python train.py --env textcraft                                  # two CPU cores
    python train.py --env textcraft --model Qwen/Qwen2.5-3B-Instruct # one large GPU
    accelerate launch --config_file recipes/fsdp2.yaml train.py --env textcraft   # many GPUs
    python train.py --env textcraft --algorithm ppo --rounds 8       # all options: --help

With several processes all of them run this loop, line by line, on the same trajectories; what is
split between them is in runtime/distributed.py.

Everything a run writes lies in its directory: metrics, timings, every trajectory, evaluations,
checkpoints and a plot. Ctrl-C stops it after saving; `--resume --run-dir DIR` goes on. Exit codes:
0 done, 1 failure, 2 misuse, 130 stopped by Ctrl-C.

Read first: schedulers, advantages, losses, envclient, rollout, update. Read next: `evaluate.py`.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from advantages import gae, grpo, reinforce_plus_plus, rloo
from batching import Batch, make_batch, micro_batches, padding_share
from config import GROUPED, Config, check, complete, hardware_defaults, named_env
from engines import EngineError
from envclient import EnvError
from plan import requests_of
from reporting.metrics import MetricsLogger, summarize_trajectories
from reporting.plots import plot
from rollout import RolloutStats, TooManyEnvFailures
from runtime import checkpoint, distributed, rundir
from runtime.cli import complain, parse_command_line
from runtime.clock import Clock, OutOfMemory
from runtime.interrupt import StopRequests
from runtime.sync import SyncError
from trajectory import RolloutHandler
from update import suited
from worker import TrainingError, Worker

PROG = "train.py"
MISUSE = (ValueError, FileExistsError, FileNotFoundError, NotADirectoryError, PermissionError)
FAILURES = (
    TrainingError,
    SyncError,
    EngineError,
    EnvError,
    TooManyEnvFailures,
    checkpoint.CheckpointError,
    distributed.RankError,
    OutOfMemory,
)


def main(config: Config) -> int:
    """Train; returns the exit code."""
    # ---------------------------------------------------------------------------------------- setup
    distributed.join()
    run = rundir.open_run(config)
    with contextlib.ExitStack() as stack:
        stack.callback(run.close)
        stop = stack.enter_context(StopRequests())
        try:
            w = Worker(config, run, stack, stop)
        except ValueError:
            run.discard()
            raise
        except KeyboardInterrupt:
            run.discard()
            distributed.say("\nstopped before training began; the same command starts it again")
            return 130
        first = w.restore() + 1
        resume_step = first - 1 if config.resume else None
        logger = MetricsLogger(run.path, resume_step, writes=run.writes)
        stack.callback(logger.close)
        saved = first - 1
        try:
            done = first - 1
            if is_due(done, config.eval_every, config.steps) and w.evaluated_step != done:
                # It is new, was cut short by Ctrl-C, or no checkpoint knows of its evaluation.
                evaluation = w.evaluate(done)
                w.watch(done, evaluation)
                if done:
                    logger.amend(done, evaluation)
                    w.mark_if_best(done)
            for step in range(first, config.steps + 1):
                clock = Clock(vars(config))
                # ------------------------------------------------------------------------ 1 horizon
                max_rounds = w.scheduler.rounds_at(step)

                # ----------------------------------------------------------------------- 2 roll out
                requests = requests_of(step, w.tasks, config)
                stats = RolloutStats()
                with clock("time/rollout_s"):
                    trajectories = w.roll_out(requests, max_rounds, stats)
                if config.shuffle_rewards:
                    shuffle_rewards(trajectories, seed=config.seed + step)
                usable, groups = usable_trajectories(trajectories, config)
                metrics: dict[str, Any] = {
                    "horizon/max_rounds": max_rounds,
                    "data/epoch": w.epoch_of(step),
                }

                if usable:
                    # ------------------------------------------------------------------ 3 log-probs
                    batch = make_batch(usable, w.pad_id)
                    with clock("time/log_probs_s"):
                        old, ref, values = w.score(batch)

                    # ----------------------------------------------------------------- 4 advantages
                    with clock("time/advantages_s"):
                        rewards, kl_metrics = w.penalized_rewards(batch, old, ref)
                        advantages, returns = estimate(config, rewards, batch, values)

                    # --------------------------------------------------------------------- 5 update
                    share = groups["data/signal_share"]
                    with clock("time/update_s"):
                        metrics |= kl_metrics | w.update(
                            step, batch, advantages, returns, old, ref, values, share
                        )

                    # ----------------------------------------------------------------------- 6 sync
                    with clock("time/sync_s"):
                        metrics["sync/log_prob_diff_mean"], num_bytes = w.sync(
                            step, usable[: w.num_probes]
                        )
                    clock.values |= update_speed(batch, config, clock) | {"sync/bytes": num_bytes}
                    keep_advantages(usable, advantages)
                else:
                    distributed.say(f"step {step}: no learning signal, no weight changes")
                    metrics |= {"policy/optimizer_steps": 0, "policy/skipped_steps": 0}

                # ------------------------------------------------------------ 7 log, evaluate, save
                metrics |= summarize_trajectories(trajectories) | groups
                run.write_trajectories(f"step_{step:06d}", trajectories)
                if is_due(step, config.eval_every, config.steps) and not stop.agreed():
                    # An evaluation cut short by Ctrl-C is made up for when the run is resumed.
                    with contextlib.suppress(KeyboardInterrupt), clock("time/eval_s"):
                        metrics |= w.evaluate(step)
                # Logged before saving: a resume drops lines that it has no checkpoint for.
                logger.log(step, metrics)
                w.completed_step = step
                collapse = w.watch(step, metrics)
                is_best = w.best_step == step
                if is_due(step, config.save_every, config.steps) or is_best or collapse:
                    with clock("time/save_s"):
                        w.save(step)
                        saved = step
                show_step(logger, run, step, metrics, clock, stats)
                if collapse:
                    raise TrainingError(collapse)
                if stop.agreed():
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            done = w.completed_step
            if done > saved or not checkpoint.steps_saved(run.path):
                w.save(done)
            distributed.say(
                f"\nstopped after step {done}, saved. Go on with:\n  {run.resume_command()}"
            )
            distributed.meet()
            return 130
        distributed.meet()
    best = run.path / "checkpoints" / "best"
    last = best if best.exists() else checkpoint.folder_of(run.path, config.steps)
    distributed.say(f"done: {run.path}\n  evaluate with: python evaluate.py --model {last}")
    return 0


# ---------------------------------------------------------------------------- pure pieces of a step


def estimate(
    config: Config, token_rewards: torch.Tensor, batch: Batch, values: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Banner 4: rewards -> (advantages, returns), (B, T) each, by the algorithm's own rule."""
    mask, groups = batch.loss_mask, batch.group_ids
    if config.algorithm == "grpo":
        return grpo(token_rewards, mask, groups)
    if config.algorithm == "rloo":
        return rloo(token_rewards, mask, groups)
    if config.algorithm == "reinforce_plus_plus":
        return reinforce_plus_plus(token_rewards, mask, config.gamma)
    if values is None:
        raise ValueError("ppo needs the critic's values")
    return gae(token_rewards, values, mask, config.gamma, config.lam)


def usable_trajectories(
    trajectories: Sequence[RolloutHandler], config: Config
) -> tuple[list[RolloutHandler], dict[str, Any]]:
    """The trajectories that enter the loss, and how many were left out.

    Out go: those the infrastructure lost or without a policy token; for algorithms that compare
    within a group, groups left with one member and, with --skip-zero-variance, groups whose returns
    are all equal (advantage 0).
    """
    valid = [t for t in trajectories if t.is_valid]
    compared = valid
    if config.algorithm in GROUPED:
        size = Counter(t.group_id for t in valid)
        compared = valid = [t for t in valid if size[t.group_id] > 1]
        if config.skip_zero_variance:
            returns: dict[int, set[float]] = {}
            for t in valid:
                returns.setdefault(t.group_id, set()).add(t.total_return)
            valid = [t for t in valid if len(returns[t.group_id]) > 1]
    for t in valid:
        t.used_in_loss = True
    used, all_tokens = (sum(sum(t.loss_mask) for t in each) for each in (valid, compared))
    return valid, {"data/policy_tokens": used, "data/signal_share": used / max(all_tokens, 1)}


def shuffle_rewards(trajectories: Sequence[RolloutHandler], seed: int) -> None:
    """The control: every trajectory gets another one's rewards, turn by turn; what it did no longer
    matters.

    The multiset of returns stays, so that signal, step sizes and group variances look alike.
    """
    valid = [t for t in trajectories if t.is_valid]
    returns = [t.total_return for t in valid]
    random.Random(seed).shuffle(returns)
    for t, value in zip(valid, returns, strict=True):
        for turn in t.turns:
            turn.reward = 0.0
        t.turns[-1].reward = value


def keep_advantages(trajectories: Sequence[RolloutHandler], advantages: torch.Tensor) -> None:
    """Write each row's advantages into its trajectory, for the files and the replay."""
    for t, row in zip(trajectories, advantages, strict=True):
        t.advantages = [round(float(a), 6) for a in row[: len(t.input_ids)]]


def is_due(step: int, every: int, last: int) -> bool:
    return bool(every) and (step % every == 0 or step == last)


def update_speed(batch: Batch, config: Config, clock: Clock) -> dict[str, float]:
    lengths = batch.lengths.tolist()
    objective = suited(config.objective, batch)
    cuts = [] if objective.share_prefix else micro_batches(lengths, objective.max_tokens)
    trained = sum(lengths) * config.ppo_epochs
    return {
        "update/tokens_per_s": trained / max(clock.values["time/update_s"], 1e-9),
        "update/padding_share": padding_share(lengths, cuts),
    }


def show_step(
    logger: MetricsLogger,
    run: rundir.Run,
    step: int,
    metrics: dict[str, Any],
    clock: Clock,
    stats: RolloutStats,
) -> None:
    seconds = max(stats.seconds, 1e-9)
    timings = clock.values | {
        "time/step_s": clock.total(),
        "rollout/generated_tokens_per_s": stats.generated_tokens / seconds,
        "rollout/engine_idle_share": stats.engine_idle_s / seconds,
        "memory/peak_bytes": clock.peak_bytes(),
    }
    logger.timings(step, timings)
    logger.print_row(step, metrics, timings)
    if run.writes:
        plot(run.path)


def command_line(argv: Sequence[str] | None = None) -> int:
    """Parse, check, run; misuse is one line and exit code 2, a failure one line and exit code 1."""
    first_lines = (__doc__ or "").split("\n\n")[0]
    default = hardware_defaults(torch.cuda.is_available(), named_env(argv))
    config = parse_command_line(Config, argv, PROG, default, first_lines)
    try:
        if config.resume:  # what is not given again is what the run was started with
            saved = rundir.saved_config(config.run_dir)
            config = parse_command_line(Config, argv, PROG, saved)
            rundir.check_unchanged(config, saved)
        config = complete(config)
        check(config)
        code = main(config)
        distributed.leave()
        return code
    except FAILURES as error:
        return fail(error, 1)
    except MISUSE as error:
        return fail(error, 2)
    except OSError as error:  # the disk is full or gone
        return fail(error, 1)
    except RuntimeError as error:
        if not distributed.is_lost_contact(error):
            raise
        gone = "lost contact with another process, which says why, or its launcher does"
        return fail(RuntimeError(f"{gone} (exitcode -9: out of memory, most likely)"), 1)


def fail(error: Exception, code: int) -> int:
    """Say what went wrong, once; the exit code."""
    if distributed.world_size() == 1 and not distributed.rank():
        complain(PROG, error)
        return code
    if distributed.rank() == 0:
        complain(PROG, error)
    elif not distributed.is_known_to_all(error):
        time.sleep(3)  # when rank 0 says the same, the launcher has ended this process by then
        complain(PROG, f"rank {distributed.rank()}: {error}")
    os._exit(code)  # the others may be gone: nothing here can be closed in order


if __name__ == "__main__":
    sys.exit(command_line())
