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
split between them is in runtime/distributed.py.

Everything a run writes lies in its directory: metrics, timings, every trajectory, evaluations,
checkpoints and a plot. Ctrl-C stops it after saving; `--resume --run-dir DIR` goes on. Exit codes:
0 done, 1 failure, 2 misuse, 130 stopped by Ctrl-C.

From Python: `from config import options`, `train(options("textcraft", steps=4))`.

Read first: trajectory, advantages, losses. Read next: schedulers, rollout, update, `worker.py`.
"""

from __future__ import annotations

import sys

from runtime.cli import complain, refuse_misuse, say_remarks, training_options
from runtime.malloc import begin_with_tcmalloc

PROG, SUMMARY = "train.py", (__doc__ or "").split("\n\n")[0]
if __name__ == "__main__":  # before the imports below take their seconds
    refuse_misuse(PROG, lambda: training_options(None, PROG, SUMMARY))
    begin_with_tcmalloc()

import os
import random
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from advantages import ESTIMATORS, estimate
from batching import make_batch
from config import Config, Misuse, complete, refusing
from engines import EngineError
from envclient import EnvError
from envs import Task
from reporting.logs import read_log
from reporting.metrics import summarize_trajectories
from rollout import RolloutRequest, TooManyEnvFailures
from runtime import checkpoint, distributed
from runtime.checks import check, check_here
from runtime.clock import Clock, OutOfMemory
from runtime.prompts import with_prompt
from runtime.rundir import Run, python
from runtime.saved import as_kept
from runtime.sync import SyncError
from session import TrainingError, at_work
from trajectory import RolloutHandler
from update import padding_of

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


def train(config: Config) -> Run:
    """Train as the options say; the run, closed: `run.path` holds all that it left.

    Raises:
        Misuse: an option, or what it names, cannot work; nothing was written.
        KeyboardInterrupt: after Ctrl-C, once all is saved.
        FAILURES: what ended it, in a line; what was saved stays.
    """
    with refusing():
        config = complete(with_prompt(config))
    check(config)
    check_here(config)
    config = config if config.resume else as_kept(config)
    with at_work(config) as session:
        w = session.worker
        session.evaluate_start()
        for step in session.steps_left():
            clock = Clock(vars(config))
            # ---------------------------------------------------------------------------- 1 horizon
            max_rounds = w.scheduler.rounds_at(step)

            # --------------------------------------------------------------------------- 2 roll out
            requests = requests_of(step, w.tasks, config)
            with clock("time/rollout_s"):
                trajectories, log = w.roll_out(requests, max_rounds)
            if config.shuffle_rewards:
                shuffle_rewards(trajectories, seed=config.seed + step)
            usable, signal = usable_trajectories(trajectories, config)
            metrics = {"horizon/max_rounds": max_rounds, "data/epoch": w.epoch_of(step)}

            if usable:
                # ---------------------------------------------------------------------- 3 log-probs
                batch = make_batch(usable, w.pad_id)
                with clock("time/log_probs_s"):
                    w.score(batch)

                # --------------------------------------------------------------------- 4 advantages
                with clock("time/advantages_s"):
                    metrics |= w.penalize_kl(batch)
                    # The estimator takes the ones that its parameters name.
                    given = vars(batch) | {"gamma": config.gamma, "lam": config.lam}
                    batch.advantages, batch.returns = estimate(config.algorithm, given)

                # ------------------------------------------------------------------------- 5 update
                with clock("time/update_s"):
                    metrics |= w.update(step, batch, signal["data/signal_share"])

                # --------------------------------------------------------------------------- 6 sync
                with clock("time/sync_s"):
                    metrics["sync/log_prob_diff_mean"], num_bytes = w.sync(step, usable)

                trained = int(batch.lengths.sum()) * config.ppo_epochs
                clock.values |= {
                    "update/tokens_per_s": trained / max(clock.values["time/update_s"], 1e-9),
                    "update/padding_share": padding_of(batch, config, seed=step),
                    "sync/bytes": num_bytes,
                }
                keep_advantages(usable, batch.advantages)
            else:
                distributed.say(f"step {step}: no learning signal, no weight changes")
                metrics |= {"policy/optimizer_steps": 0, "policy/skipped_steps": 0}

            # ---------------------------------------------------------------- 7 log, evaluate, save
            metrics |= summarize_trajectories(trajectories) | signal
            session.run.write_trajectories(f"step_{step:06d}", trajectories)
            metrics |= session.evaluate_if_due(step, clock)
            session.finish_step(step, metrics, clock, log)
    return session.run


# ---------------------------------------------------------------------------- pure pieces of a step


def requests_of(step: int, tasks: Sequence[Task], config: Config) -> list[RolloutRequest]:
    """The step's trajectories to roll: a pure function, so that a resume cannot lose its place.

        position(t, n) = (t - 1) · tasks_per_step + n            n-th task of step t
        epoch, index   = divmod(position, number of tasks)
        task(t, n)     = order_epoch[index]                      order: shuffled by (seed, epoch)

    Tasks are drawn without replacement, epoch by epoch; all samples of a task share the
    environment's seed.
    """
    requests = []
    for n in range(config.tasks_per_step):
        position = (step - 1) * config.tasks_per_step + n
        epoch, index = divmod(position, len(tasks))
        order = random.Random(f"{config.seed}/{epoch}").sample(range(len(tasks)), len(tasks))
        task, env_seed = tasks[order[index]], config.seed * 1_000_003 + position
        requests += [RolloutRequest(task, n, k, env_seed, step) for k in range(config.group_size)]
    return requests


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
    if ESTIMATORS[config.algorithm].needs_group:
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
    """The control: every trajectory gets another one's return, on its last turn; what it did no
    longer matters.

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
    """Write each row's advantages into its trajectory, as they were trained on; files round them
    (`trajectory.rounded`)."""
    for t, row in zip(trajectories, advantages, strict=True):
        t.advantages = row[: len(t.input_ids)].tolist()


# --------------------------------------------------------------------------------- the command line


def where_to_look(run: Run) -> str:
    """The last words of a run: how it began and ended, and what lies where."""
    has_played = any(run.path.glob("trajectories/step_*.jsonl"))
    lines = {
        "mean return": first_and_last(read_log(run.path / "metrics.jsonl")),
        "the curve": run.path / "reward.png",
        "what it did": f"{python()} replay.py {run.path}" if has_played else None,
        "every number": run.path / "metrics.jsonl",
        "measure it": f"{python()} evaluate.py --run {run.path}",
    }
    words = [f"  {name:<14}{where}" for name, where in lines.items() if where]
    return "\n".join([f"done: {run.path}", *words])


def first_and_last(rows: Sequence[dict[str, Any]]) -> str | None:
    """The mean return at both ends of a run; None where one step tells.

    >>> first_and_last([{"train/return_mean": mean} for mean in (0.25, 0.5, 0.75, 0.75)])
    '0.375 in the first 2 steps, 0.750 in the last 2'
    """
    means = [row["train/return_mean"] for row in rows if row.get("train/return_mean") is not None]
    count = min(5, len(means) // 2)
    if not count:
        return None
    first, last = (sum(part) / count for part in (means[:count], means[-count:]))
    return f"{first:.3f} in the first {count} steps, {last:.3f} in the last {count}"


def command_line(argv: Sequence[str] | None = None) -> int:
    """Parse, check, run; misuse is one line and exit code 2, a failure one line and exit code 1."""
    try:
        config = training_options(argv, PROG, SUMMARY)
        say_remarks(config, argv)
        run = train(config)
        distributed.say(where_to_look(run))
        distributed.leave()
        return 0
    except KeyboardInterrupt:
        distributed.leave()
        return 130
    except Misuse as error:
        return fail(error, 2)
    except (*FAILURES, OSError) as error:  # OSError: the disk is full or gone
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
