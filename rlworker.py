"""What reinforcement learning adds to a worker: a horizon, a critic, a reference, a penalty for
leaving it.

    worker     policy, sampler, environments
    critic     PPO's: what return it expects after each token
    reference  the policy that the run began with, frozen; with LoRA the policy without its adapters
    schedulers how many turns the agent may take at step t, one for each world
    kl         the weight of the KL penalty in the reward, fixed or steered

Banners 3 to 5 of train.py. Read first: run/worker.py. Read next: update.py.
"""

from __future__ import annotations

import contextlib
from typing import Any

from batching import Batch
from config import Config, Misuse
from envs import env_name, tasks_by_world
from kl import AdaptiveKLController, FixedKLController, kl_estimate, kl_penalized_rewards
from losses import Objective, masked_mean
from models import load_critic, load_policy
from order import epochs
from run import rundir
from run.interrupt import StopRequests
from run.progress import phase
from run.worker import Worker
from runtime.mixture import in_each
from scale import distributed
from scale.lora import adapters_off
from schedulers import make_scheduler
from update import Learner, score_critic, score_policy, update_critic, update_policy


class RLWorker(Worker):
    """A worker that scores what was played and learns from advantages.

    Raises:
        Misuse: what only the tasks, the model or the first prompt reveal.
    """

    config: Config
    kl_controller: FixedKLController

    def __init__(
        self,
        config: Config,
        run: rundir.Run,
        stack: contextlib.ExitStack,
        stop: StopRequests,
    ) -> None:
        ranks = distributed.world_size()
        if config.tasks_per_step % ranks:
            raise Misuse(
                f"--tasks-per-step {config.tasks_per_step} must be a multiple of the {ranks} "
                "processes: each rolls out as many tasks as the others"
            )
        super().__init__(config, run, stack, stop)
        self.schedulers = {
            env_name(own.env): make_scheduler(
                own.rounds_scheduler, own.rounds, own.steps_scaling_inter
            )
            for own in in_each(config)
        }
        self.kl_controller = FixedKLController(config.kl_coef)
        if config.kl_target is not None:
            self.kl_controller = AdaptiveKLController(
                config.kl_coef, config.kl_target, horizon=10_000
            )

    def load_models(self) -> None:
        """The policy, PPO's critic and the frozen reference, as far as the options ask for them."""
        super().load_models()
        c = self.config
        self.critic: Learner | None = None
        if c.needs_critic:
            self.critic = self.learner(load_critic(self.start), c.critic_learning_rate)
        self.has_reference = bool(c.kl_coef or c.kl_loss_coef)
        self.reference: Any = None
        if self.has_reference and not c.lora_rank:
            frozen = load_policy(self.start, c.share_prefix).eval()
            self.reference = distributed.shard(self.accelerator, frozen.requires_grad_(False))

    def rounds_at(self, step: int) -> dict[str, int]:
        """World -> how many turns the agent may take there at this step."""
        return {world: each.rounds_at(step) for world, each in self.schedulers.items()}

    @property
    def returns_to_start(self) -> bool:
        """Also where a reference is loaded from there."""
        return super().returns_to_start or self.has_reference

    def epoch_of(self, step: int) -> float:
        """Passes over the tasks, after a step; of several worlds that of the least."""
        c, counts = self.config, [len(own) for own in tasks_by_world(self.tasks).values()]
        return min(epochs(step, counts, c.tasks_per_step, c.env_weights))

    def rates(self) -> dict[str, float]:
        return super().rates() | {"critic": self.config.critic_learning_rate}

    def parts(self) -> dict[str, tuple[Any, Any]]:
        """What is trained: name -> (model, optimizer)."""
        parts = super().parts()
        if self.critic is not None:
            parts["critic"] = (self.critic.model, self.critic.optimizer)
        return parts

    def score(self, batch: Batch, objective: Objective) -> None:
        """Banner 3: old log-probs (where the policy moves more than once, see update.py), reference
        log-probs, values."""
        c, policy, device = self.config, self.policy.model, self.device
        self.rest()
        with phase("log-probs"):
            if c.kl_coef or objective.num_optimizer_steps(len(batch)) > 1:
                batch.old_log_probs = score_policy(policy, batch, c, device)
            if self.reference is not None:
                batch.ref_log_probs = score_policy(self.reference, batch, c, device)
            elif self.has_reference:  # with LoRA: the base, without a second copy of it
                with adapters_off(policy):
                    batch.ref_log_probs = score_policy(policy, batch, c, device)
            if self.critic is not None:
                batch.values = score_critic(self.critic.model, batch, c, device)

    def penalize_kl(self, batch: Batch) -> dict[str, float]:
        """With --kl-coef, take the KL to the start policy off the step's rewards."""
        old, ref = batch.old_log_probs, batch.ref_log_probs
        if old is None or ref is None or not self.config.kl_coef:
            return {}
        controller, mask = self.kl_controller, batch.loss_mask
        coef = controller.value
        batch.token_rewards = kl_penalized_rewards(batch.token_rewards, old, ref, mask, coef)
        observed = float(masked_mean(kl_estimate(old, ref, "k3"), mask))
        controller.update(observed, len(batch))
        return {"kl/coef": coef, "policy/kl": observed}

    def update(
        self, step: int, batch: Batch, objective: Objective, signal_share: float = 1.0
    ) -> dict[str, float]:
        """Banner 5: optimizer steps on the critic, if there is one, and on the policy.

        The step is the seed of the mini-batches' order.
        """
        self.set_learning_rates(step)
        metrics: dict[str, float] = {}
        if self.critic is not None:
            metrics |= update_critic(self.critic, batch, objective, seed=step)
        metrics |= update_policy(self.policy, batch, objective, step, signal_share)
        return metrics
