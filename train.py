"""Train an LLM agent with multi-turn reinforcement learning, in one loop from the first prompt to
the last checkpoint.

    start: load the model, warm it up on demonstrations if needed, evaluate it
                           │
             tasks ──> 1 horizon: how many turns may the agent take in this step?
                           │
    environment servers <──> 2 roll out: the sampler acts, the environments answer, turn by turn
                           │        trajectories: ids, masks, log-probs, rewards
                           3 log-probs of these tokens (trainer, reference), values (critic)
                           │
                           4 advantages: was a token followed by more reward than usual?
                           │
                           5 update: make the tokens with positive advantage a little more likely
                           │
                           6 sync: send the new weights to the sampler and check that they arrived
                           │
                           7 log, evaluate on held-out tasks, save ──> next step

The numbers are the comment banners in `train`. ScalingInter-RL adds banner 1. GRPO, RLOO,
REINFORCE++ and PPO differ in banner 4; PPO also needs a critic, in banners 3 and 5.

    python train.py --env textcraft                                  # two CPU cores
    python train.py --env textcraft --model Qwen/Qwen2.5-3B-Instruct # one large GPU
    accelerate launch --config_file recipes/fsdp2.yaml train.py --env textcraft   # many GPUs
    python train.py --env textcraft --algorithm ppo --rounds 8       # all options: --help

With several processes, each one runs this loop on the same trajectories; scale/distributed.py
explains how they share the work. Ctrl-C saves the run and stops it; `--resume --run-dir DIR`
continues it. Exit codes: 0 done, 1 failure, 2 misuse, 130 stopped by Ctrl-C.

From Python: `from config import options`, `train(options("textcraft", steps=4))`.

Read first: trajectory, advantages, losses. Read next, by banner: 1 schedulers; 2 rollout,
envclient; 3 and 5 batching, update, models; 6 `scale/sync.py`; 7 `run/worker.py`, `run/session.py`.
"""

from __future__ import annotations

import contextlib
import math
import random
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean, pstdev
from typing import Any

import torch

from advantages import ESTIMATORS, anchored_share, overlong_penalty
from batching import Batch, anchors_of, make_batch
from config import (
    GROUP_ALGORITHMS,
    Config,
    Misuse,
    Objective,
    checked,
    config_per_env,
    is_url,
    value_errors_as_misuse,
)
from data import advised
from envs import Task, env_name, tasks_by_env
from losses import (
    kl_estimate,
    kl_penalized_rewards,
    masked_mean,
)
from models import load_critic, load_policy, load_tokenizer
from reporting.metrics import by_env, summarize_trajectories
from rollout import RolloutRequest, TaskOutcomes, draw_requests, num_epochs
from run import rundir
from run.clock import Clock
from run.errors import SyncError
from run.progress import phase
from run.rundir import Run
from run.session import StopRequests, is_due, open_session
from run.session import command_line as run_command
from run.worker import Worker
from sampling.fleet import TeacherServer
from scale import distributed
from scale.default_models import resolve_model
from scale.lora import adapters_off, restart_adapters
from schedulers import rounds_at
from trajectory import RolloutHandler, are_equal, returns_by_group
from update import (
    Learner,
    imitate,
    score_critic,
    score_policy,
    update_critic,
    update_policy,
)
from warmstart import known_outcomes

SUMMARY = (__doc__ or "").split("\n\n")[0]


def train(config: Config) -> Run:
    """Train with these options. Returns the finished run; all its files are in `run.path`.

    Raises:
        Misuse: an option, or a file or server that it names, is wrong; nothing was written.
        KeyboardInterrupt: the user pressed Ctrl-C; everything is saved.
        RunFailed: training ended early; earlier checkpoints remain.
    """
    c = config = checked(config)
    with open_session(config, RLWorker) as session:
        w = session.worker
        session.evaluate_start()
        for step in session.steps_left():
            clock = Clock(vars(config))
            # ---------------------------------------------------------------------------- 1 horizon
            horizons = w.rounds_at(step)

            # --------------------------------------------------------------------------- 2 roll out
            requests = requests_of(step, w.tasks, config, horizons, w.task_outcomes)
            with clock("time/rollout_s"):
                trajectories, speed = w.roll_out(requests)
                trajectories += w.replace_tasks_without_signal(step, trajectories, horizons)
            if c.shuffle_rewards:
                shuffle_rewards(trajectories, seed=c.seed + step)
            clock.values |= speed
            usable, num_compared, signal = select(trajectories, config)
            if c.asks_oracle:
                usable = advised(w.chat, usable, c.max_trajectory_tokens, seed=c.seed + step)
                signal["data/policy_tokens"] = sum(sum(t.loss_mask) for t in usable)
            metrics = by_env("horizon/max_rounds", horizons, max)
            metrics |= w.note_outcomes(trajectories) | {"data/epoch": w.epoch_of(step)}

            if usable:
                # ---------------------------------------------------------------------- 3 log-probs
                batch = make_batch(usable, w.pad_id)
                objective, step_weight = keep_num_steps(config, len(usable), num_compared)
                with clock("time/log_probs_s"):
                    w.sleep_sampler()  # until sync wakes it
                    w.score(batch, objective)

                # --------------------------------------------------------------------- 4 advantages
                # Each of the first three does something only with its option.
                with clock("time/advantages_s"):
                    metrics |= w.penalize_kl(batch) | w.penalize_length(batch, usable)
                    metrics |= w.anchor(batch, usable)
                    batch.advantages, batch.returns = ESTIMATORS[c.algorithm](batch, c)
                    if w.teacher is not None:
                        gap = masked_mean(batch.advantages, batch.loss_mask)
                        metrics["policy/teacher_kl"] = -float(gap)

                with session.saving_on_failure():
                    # --------------------------------------------------------------------- 5 update
                    with clock("time/update_s"):
                        loss_scale = step_weight * signal["data/signal_share"]
                        metrics |= w.update(step, batch, objective, loss_scale)
                        w.require_own_weights(step, metrics)
                    num_trained = int(batch.lengths.sum()) * c.ppo_epochs
                    seconds = max(clock.values["time/update_s"], 1e-9)
                    clock.values["update/tokens_per_s"] = num_trained / seconds

                    # ----------------------------------------------------------------------- 6 sync
                    with clock("time/sync_s"):
                        difference, clock.values["sync/bytes"] = w.sync(step, batch)
                        metrics["sync/log_prob_diff_mean"] = difference

                for t, row in zip(usable, batch.advantages, strict=True):
                    t.advantages = row[: len(t.input_ids)].tolist()
            else:
                distributed.say(f"step {step}: no learning signal, weights unchanged")
                metrics |= {"policy/optimizer_steps": 0, "policy/skipped_steps": 0}
            w.reset_adapters_if_due(step)  # the sampler already has the merged weights

            # ---------------------------------------------------------------- 7 log, evaluate, save
            metrics |= summarize_trajectories(trajectories, list(horizons)) | signal
            session.run.write_trajectories(f"step_{step:06d}", trajectories)
            metrics |= session.evaluate_if_due(step, clock)
            session.finish_step(step, metrics, clock)
    return session.run


# --------------------------------------------------------------------------------- pieces of a step


def requests_of(
    step: int,
    tasks: Sequence[Task],
    config: Config,
    horizons: Mapping[str, int],
    outcomes: TaskOutcomes | None = None,
) -> list[RolloutRequest]:
    """The step's rollout requests: `rollout.draw_requests`, a pure function of the step and of the
    outcomes so far, if they are counted."""
    c = config
    size = c.tasks_per_step, c.group_size
    return draw_requests(step, tasks, *size, c.seed, step, horizons, c.env_weights, outcomes)


def more_requests(
    step: int,
    number: int,
    counts: Mapping[str, int],
    tasks: Sequence[Task],
    config: Config,
    horizons: Mapping[str, int],
    outcomes: TaskOutcomes | None = None,
) -> list[RolloutRequest]:
    """Requests for as many more tasks of each environment as `counts` says, in the step's
    `number`-th round of --dynamic-sampling. They come from a stream of their own, a function of
    step and round, so that no later step depends on how many tasks were replaced."""
    c, t = config, (step - 1) * config.dynamic_sampling + number
    size = c.tasks_per_step, c.group_size
    first_group, first_sample = number * c.tasks_per_step, number * c.tasks_per_step * c.group_size
    requests: list[RolloutRequest] = []
    for env, own in tasks_by_env(tasks).items():
        drawn = draw_requests(t, own, *size, c.seed + 1, step, horizons, outcomes=outcomes)
        requests += [
            replace(r, group_id=first_group + r.group_id, sample=first_sample + r.sample)
            for r in drawn[: counts.get(env, 0) * c.group_size]
        ]
        first_group += counts.get(env, 0)  # for the next environment
    return requests


def select(
    trajectories: Sequence[RolloutHandler], config: Config
) -> tuple[list[RolloutHandler], int, dict[str, Any]]:
    """Choose the trajectories that enter the loss. Returns them, the number of trajectories before
    --skip-zero-variance dropped any, and metrics.

    Dropped: trajectories that were lost to the infrastructure or have no policy tokens. Algorithms
    that compare within a group also drop groups with a single member and, with
    --skip-zero-variance, groups with equal returns, because their advantages are zero. With
    --kl-coef or --overlong-penalty they may not be zero, so they are kept.
    --dynamic-sampling drops them always, and --keep-uncertain the groups with the smallest spread
    of returns. The loss is then a mean over what remains, as if nothing else had been played.
    """
    usable = [t for t in trajectories if t.is_valid]
    needs_group = config.algorithm in GROUP_ALGORITHMS
    if needs_group:
        size = Counter(t.group_id for t in usable)
        usable = [t for t in usable if size[t.group_id] > 1]
    if config.keep_uncertain < 1:
        returns = returns_by_group(usable)
        ranked = sorted(returns, key=lambda group: -pstdev(returns[group]))
        kept = set(ranked[: math.ceil(config.keep_uncertain * len(ranked))])
        usable = [t for t in usable if t.group_id in kept]
    compared = usable
    if needs_group:
        returns = returns_by_group(compared)
        may_skip = config.skip_zero_variance and not config.pays_within_groups
        if config.dynamic_sampling or may_skip:
            usable = [t for t in compared if not are_equal(returns[t.group_id])]
        if config.dynamic_sampling:
            compared = usable
    for t in usable:
        t.used_in_loss = True
    num_tokens, all_tokens = (sum(sum(t.loss_mask) for t in ts) for ts in (usable, compared))
    share = num_tokens / max(all_tokens, 1)
    if config.loss_agg != "token-mean":  # the loss is a mean over trajectories
        share = len(usable) / max(len(compared), 1)
    return usable, len(compared), {"data/policy_tokens": num_tokens, "data/signal_share": share}


def keep_num_steps(config: Config, num_rows: int, num_compared: int) -> tuple[Config, float]:
    """Shrink mini_batch_size so that the remaining rows take as many optimizer steps as the full
    batch would. Returns the new options and a weight for each step. The weight exceeds 1 if there
    are too few rows for that many steps.

    The loss is already scaled down by the share of rows that remain. Taking fewer optimizer steps
    as well would count the dropped rows twice. (The weight is for the policy loss. A KL loss and an
    entropy bonus are means over the rows that remain, in as many steps as there are.)

    >>> results = [keep_num_steps(Config(mini_batch_size=64), n, 256) for n in (256, 64, 6)]
    >>> [(objective.mini_batch_size, round(weight, 2)) for objective, weight in results]
    [(64, 1.0), (16, 1.0), (2, 1.33)]
    """
    steps = math.ceil(num_compared / config.mini_batch_size)
    objective = replace(config, mini_batch_size=math.ceil(num_rows / steps))
    return objective, steps / math.ceil(num_rows / objective.mini_batch_size)


def shuffle_rewards(trajectories: Sequence[RolloutHandler], seed: int) -> None:
    """A control experiment: permute the returns among the trajectories, so that a trajectory's
    return no longer depends on its actions. The return is paid on the last turn."""
    valid = [t for t in trajectories if t.is_valid]
    returns = [t.total_return for t in valid]
    random.Random(seed).shuffle(returns)
    for t, value in zip(valid, returns, strict=True):
        for turn in t.turns:
            turn.reward = 0.0
        t.turns[-1].reward = value


# ---------------------------------------------------------------- what RL adds to run/worker.py


class RLWorker(Worker):
    """A worker that scores trajectories and learns from advantages. It adds

        critic         for PPO: predicts the return after each token
        teacher        for distillation: scores the policy's tokens
        reference      a frozen copy of the initial policy; with LoRA, the policy without its
                       adapters, so --reset-adapter-every moves it
        task_outcomes  with --task-sampling uncertain: how often each task was solved

    Raises:
        Misuse: an option does not fit the tasks, the model or the first prompt.
    """

    config: Config

    def __init__(
        self, config: Config, run: rundir.Run, stack: contextlib.ExitStack, stop: StopRequests
    ) -> None:
        ranks = distributed.world_size()
        if config.tasks_per_step % ranks:
            raise Misuse(
                f"--tasks-per-step {config.tasks_per_step} must be a multiple of the {ranks} "
                "processes, because each one rolls out the same number of tasks"
            )
        super().__init__(config, run, stack, stop)
        self.task_outcomes: TaskOutcomes | None = None
        if config.task_sampling == "uncertain":
            self.task_outcomes = TaskOutcomes(known_outcomes(config, self.start))
            self.stateful = {"task_outcomes": self.task_outcomes}

    def load_models(self) -> None:
        """Load the policy and, if the options need them, PPO's critic and the frozen reference."""
        super().load_models()
        c = self.config
        self.critic: Learner | None = None
        if c.needs_critic:
            self.critic = self.learner(load_critic(self.start), c.critic_learning_rate)
        self.teacher: Callable[[Batch], torch.Tensor] | None = None
        if c.teacher and not c.asks_oracle:
            with value_errors_as_misuse():
                self.teacher = self.load_teacher(c.teacher)
        self.policy.model.resets_adapters = bool(c.reset_adapter_every)
        self.has_reference = bool(c.kl_coef or c.kl_loss_coef) and not c.asks_oracle
        self.reference: Any = None
        if self.has_reference and not c.lora_rank:
            frozen = load_policy(self.start, c.share_prefix).eval()
            self.reference = distributed.shard(self.accelerator, frozen.requires_grad_(False))

    def load_teacher(self, name: str) -> Callable[[Batch], torch.Tensor]:
        """A function that scores a batch with another model, here or on a server."""
        c = self.config
        if is_url(name):
            return TeacherServer(name, self.tokenizer, c.max_trajectory_tokens).score
        path = resolve_model(name)
        if load_tokenizer(path).get_vocab() != self.tokenizer.get_vocab():
            raise Misuse(f"--teacher {name} has another tokenizer than the policy")
        frozen = load_policy(path, c.share_prefix).eval().requires_grad_(False)
        model = distributed.shard(self.accelerator, frozen)
        return lambda batch: score_policy(model, batch, c, self.device)

    @property
    def needs_start(self) -> bool:
        """Also true with a frozen reference, which is loaded from the initial weights."""
        return super().needs_start or self.has_reference

    @property
    def frozen_weights(self) -> dict[str, str]:
        teacher = self.config.teacher
        if not teacher or self.config.asks_oracle or is_url(teacher):
            return super().frozen_weights
        return super().frozen_weights | {"teacher": resolve_model(teacher)}

    def rounds_at(self, step: int) -> dict[str, int]:
        """Environment name -> maximum number of turns at this step."""
        return {
            env_name(c.env): rounds_at(step, c.rounds, c.steps_scaling_inter)
            for c in config_per_env(self.config)
        }

    def epoch_of(self, step: int) -> float:
        """Passes over the tasks after a step; with several environments, the minimum over them."""
        c, counts = self.config, [len(tasks) for tasks in tasks_by_env(self.tasks).values()]
        return min(num_epochs(step, counts, c.tasks_per_step, c.env_weights))

    def note_outcomes(self, trajectories: Sequence[RolloutHandler]) -> dict[str, float]:
        """With --task-sampling uncertain, count a step's outcomes. Returns the mean p (1 - p) that
        its tasks had before. All processes have all trajectories, and so the same counts."""
        if not self.task_outcomes:
            return {}
        task_ids = {t.task_id for t in trajectories}
        uncertainty = fmean(self.task_outcomes.variance(task_id) for task_id in task_ids)
        self.task_outcomes.update(trajectories)
        return {"data/task_uncertainty": uncertainty}

    def replace_tasks_without_signal(
        self, step: int, trajectories: Sequence[RolloutHandler], horizons: Mapping[str, int]
    ) -> list[RolloutHandler]:
        """With --dynamic-sampling N, replace each task whose samples all earned the same return
        with another one (DAPO, arXiv 2503.14476, section 3.2), in at most N rounds. Lost samples
        do not count: a task with fewer than two others is replaced, too."""

        def count_without_signal(played: Sequence[RolloutHandler]) -> Counter[str]:
            returns = returns_by_group([t for t in played if t.is_valid])
            env_of = {t.group_id: t.env for t in played}
            silent = {g for g in env_of if len(returns.get(g, ())) < 2 or are_equal(returns[g])}
            return Counter(env_of[group] for group in silent)

        c, more, number = self.config, list[RolloutHandler](), 0
        counts = count_without_signal(trajectories) if c.dynamic_sampling else Counter()
        while counts and number < c.dynamic_sampling:
            number += 1
            tasks = self.tasks, c, horizons, self.task_outcomes
            requests = more_requests(step, number, counts, *tasks)
            latest, _ = self.roll_out(requests, earlier=[*trajectories, *more])
            more += latest
            counts = count_without_signal(latest)
        if counts:
            left = counts.total()
            distributed.say(f"step {step}: {left} tasks without signal could not be replaced")
        return more

    def learning_rates(self) -> dict[str, float]:
        return super().learning_rates() | {"critic": self.config.critic_learning_rate}

    def parts(self) -> dict[str, tuple[Any, Any]]:
        """The trained models: name -> (model, optimizer)."""
        parts = super().parts()
        if self.critic is not None:
            parts["critic"] = (self.critic.model, self.critic.optimizer)
        return parts

    def score(self, batch: Batch, objective: Objective) -> None:
        """Banner 3: compute old log-probs, reference log-probs and values. Old log-probs are only
        needed for the KL penalty, or if the step takes several optimizer steps (update.py)."""
        c, policy, device = self.config, self.policy.model, self.device
        with phase("log-probs"):
            needs_old = c.kl_coef or self.teacher or objective.num_optimizer_steps(len(batch)) > 1
            # Without them the loss uses its own log-probs, detached. (Imitation has no ratio.)
            if needs_old and not c.asks_oracle:
                batch.old_log_probs = score_policy(policy, batch, c, device)
            if self.teacher is not None:
                batch.teacher_log_probs = self.teacher(batch)
            if self.reference is not None:
                batch.ref_log_probs = score_policy(self.reference, batch, c, device)
            elif self.has_reference:  # LoRA: the base model without adapters needs no second copy
                with adapters_off(policy):
                    batch.ref_log_probs = score_policy(policy, batch, c, device)
            if self.critic is not None:
                batch.values = score_critic(self.critic.model, batch, c, device)

    def penalize_kl(self, batch: Batch) -> dict[str, float]:
        """With --kl-coef, subtract the KL penalty from the rewards. Returns its metrics."""
        old, ref, mask = batch.old_log_probs, batch.ref_log_probs, batch.loss_mask
        coef = self.config.kl_coef
        if old is None or ref is None or not coef:
            return {}
        batch.token_rewards = kl_penalized_rewards(batch.token_rewards, old, ref, mask, coef)
        return {"policy/kl": float(masked_mean(kl_estimate(old, ref, "k3"), mask))}

    def penalize_length(
        self, batch: Batch, trajectories: Sequence[RolloutHandler]
    ) -> dict[str, float]:
        """With --overlong-penalty, subtract it from the reward of each row's last policy token. A
        trajectory that the budget cut has no place for its next observation, which can be long: it
        loses 1, although it may end far below the budget."""
        c = self.config
        if not c.overlong_penalty:
            return {}
        penalty = overlong_penalty(batch.lengths, c.max_trajectory_tokens, c.overlong_penalty)
        penalty[torch.tensor([t.stop_reason == "length" for t in trajectories])] = 1.0
        positions = torch.arange(batch.loss_mask.shape[1])  # (T,)
        last = (batch.loss_mask * positions).argmax(1)  # (B,)
        batch.token_rewards[torch.arange(len(batch)), last] -= penalty
        return {"data/overlong_penalty": float(penalty.mean())}

    def anchor(self, batch: Batch, trajectories: Sequence[RolloutHandler]) -> dict[str, float]:
        """With --algorithm gigpo, number the states in which turns began."""
        if self.config.algorithm != "gigpo":
            return {}
        batch.anchor_ids = anchors = anchors_of(trajectories)
        share = anchored_share(batch.loss_mask, batch.group_ids, anchors)
        return {"data/anchored_share": share}

    def update(
        self, step: int, batch: Batch, objective: Objective, loss_scale: float = 1.0
    ) -> dict[str, float]:
        """Banner 5: take optimizer steps on the critic (PPO) and on the policy. The step number
        seeds the order of the mini-batches."""
        self.set_learning_rates(step)
        metrics: dict[str, float] = {}
        if self.critic is not None:
            metrics |= update_critic(self.critic, batch, objective, seed=step)
        if self.config.asks_oracle:
            return imitate(self.policy, batch, objective, seed=step)
        return metrics | update_policy(self.policy, batch, objective, step, loss_scale)

    def require_own_weights(self, step: int, metrics: Mapping[str, float]) -> None:
        """SyncError if the update found that the step's tokens were sampled with other weights than
        those of the last sync. A skipped update and imitation do not measure that."""
        gap, limit = metrics.get("sampler/log_prob_diff_mean", 0.0), self.config.max_sync_error
        if not gap <= limit:
            raise SyncError(
                f"the tokens of step {step} have log-probs that differ by {gap:.3f} nats from the "
                f"trainer's, above --max-sync-error {limit}: the sampler has changed its weights "
                "since the last sync; does another run use the same server, or has it restarted?"
            )

    def reset_adapters_if_due(self, step: int) -> None:
        """Merge the adapters into the base, so that the reference becomes the current policy."""
        if is_due(step, self.config.reset_adapter_every, 0):
            restart_adapters(self.policy.model.lm, seed=self.config.seed + step)
            self.policy = self.with_new_optimizer(self.policy)
            self.has_new_weights = True
            distributed.say(f"step {step}: adapters merged; this policy is the new reference")


# --------------------------------------------------------------------------------- the command line


def command_line(argv: Sequence[str] | None = None) -> int:
    """Parse the options and train; returns the exit code."""
    return run_command(argv, SUMMARY, Config, train)


if __name__ == "__main__":
    sys.exit(command_line())
