"""What lives from the first training step to the last: models, sampler, environments, task lists.

One `Worker` is one process. It knows how to roll out, score, update, sync, evaluate and save, and
holds no algorithm: which of these happen in a step, and in what order, is written in `train.py`.

    tasks ── train.requests_of ──> roll_out ──> score ──> update ──> sync ──> evaluate, save
               pure function        engine       policy    optimizer   policy weights
               of the step          + pool       critic                into the engine
                                                 reference

Over several processes each has a Worker. They roll out, evaluate and score apart, on their share of
the work, and all of them then hold all results (`runtime/distributed.py`); rank 0 writes the files.

What a run keeps on disk, and how it goes on from there, is in `session.py`: read next.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from batching import Batch
from chat import ChatTemplate
from config import Config, Misuse, refusing
from engines import Engine, EngineError
from envclient import EnvPool, local_server
from envs import load_tasks
from evaluate import evaluate_policy
from kl import AdaptiveKLController, FixedKLController, kl_estimate, kl_penalized_rewards
from losses import masked_mean
from models import describe, load_critic, load_policy, load_tokenizer, num_parameters, num_trained
from reporting.plan import plan
from rollout import (
    RolloutLog,
    RolloutRequest,
    RolloutSettings,
    check_failures,
    collect,
    sampling_seed,
)
from runtime import checkpoint, distributed, malloc, precision, rundir, sync
from runtime.checks import held_out_tasks
from runtime.fleet import FleetEngine
from runtime.interrupt import StopRequests
from runtime.lora import adapters_off, add_lora, save_adapter
from runtime.phases import phase, playing
from runtime.prompts import prompt_of
from runtime.recompute import keep_for_backward, what_to_keep
from runtime.servers import Served, start_servers
from runtime.vllm_engine import make_engine
from schedulers import make_scheduler
from sft import start_model
from trajectory import RolloutHandler
from update import Learner, score_critic, score_policy, update_critic, update_policy


class Worker:
    """What lives from the first step to the last: networks, sampler, environments, task lists.

    Raises:
        Misuse: what only the tasks, the model or the first prompt reveal.
    """

    num_probes = 2  # openings that are sampled from and scored again after each weight sync

    def __init__(
        self,
        config: Config,
        run: rundir.Run,
        stack: contextlib.ExitStack,
        stop: StopRequests,
    ) -> None:
        self.config, self.run, self.stop = config, run, stop
        ranks = distributed.world_size()
        if config.tasks_per_step % ranks:
            raise Misuse(
                f"--tasks-per-step {config.tasks_per_step} must be a multiple of the {ranks} "
                "processes: each rolls out as many tasks as the others"
            )
        with refusing():
            self.tasks = load_tasks(config.env, config.split, config.tasks, config.subtasks)
            self.eval_tasks = held_out_tasks(config)
        for line in plan(config, run.path, len(self.tasks), len(self.eval_tasks)):
            distributed.say(line)
        if config.deterministic:
            torch.use_deterministic_algorithms(True, warn_only=True)
        torch.manual_seed(config.seed)
        self.precision = distributed.first(
            "timing the processor", lambda: precision.choose(config.precision, config.deterministic)
        )
        distributed.say(f"precision: {self.precision.format} ({self.precision.why})")
        if not torch.cuda.is_available() and (better := malloc.advice()):
            distributed.say(f"note: {better}")
        self.accelerator = distributed.make_accelerator(self.precision.autocast)
        self.device = self.accelerator.device
        alone = ranks == 1  # others would wait for a rank that was interrupted
        with self.stop.allowed() if alone else contextlib.nullcontext():
            self.start = start_model(config, self.accelerator)
        with refusing():
            self.tokenizer = load_tokenizer(self.start)
            self.chat = ChatTemplate(self.tokenizer)
        distributed.say(f"model: {config.model} ({describe(self.start)}) from {self.start}")
        self.pad_id = self.tokenizer.pad_token_id or 0
        urls = config.env_addr or (stack.enter_context(local_server(config.env)),)
        with refusing():
            pool = EnvPool(config.env, urls, prompt=prompt_of(config))
            self.pool = stack.enter_context(pool)
        self.check_budget()
        with phase("loading the models"):
            self.load_models()
        with phase("starting the sampler"):
            self.engine = self.start_engine(stack)
        stack.callback(self.engine.close)
        self.scheduler = make_scheduler(
            config.rounds_scheduler, config.rounds, config.steps_scaling_inter
        )
        self.kl_controller = FixedKLController(config.kl_coef)
        if config.kl_target is not None:
            self.kl_controller = AdaptiveKLController(
                config.kl_coef, config.kl_target, horizon=10_000
            )
        if config.engine_url:  # they may hold what another run has left there
            self.load_into_engine()

    # Models, sampler

    def load_models(self) -> None:
        """The policy, PPO's critic and the frozen reference, as far as the options ask for them."""
        c = self.config
        with refusing():  # a folder without a model, layers that adapters do not fit
            policy = load_policy(self.start, c.share_prefix)
            if c.lora_rank:
                add_lora(policy.lm, c.lora_rank, c.seed)
        self.policy = self.learner(policy, c.learning_rate)
        self.critic: Learner | None = None
        if c.needs_critic:
            self.critic = self.learner(load_critic(self.start), c.critic_learning_rate)
        self.has_reference = bool(c.kl_coef or c.kl_loss_coef)
        self.reference: Any = None
        if self.has_reference and not c.lora_rank:
            frozen = load_policy(self.start, c.share_prefix).to(self.device).eval()
            self.reference = distributed.shard(self.accelerator, frozen.requires_grad_(False))
        model, ranks = self.policy.model, distributed.world_size()
        line = f"policy: {num_parameters(model) / 1e6:.1f}M parameters on {self.device}"
        line += f", {num_trained(model) / 1e6:.2f}M of them trained" if c.lora_rank else ""
        distributed.say(line + (f", in parts on {ranks} processes" if ranks > 1 else ""))
        if 0 < c.learning_rate_decay_steps < c.steps:
            n = c.learning_rate_decay_steps
            distributed.say(
                f"note: from step {n} on the learning rate is 1/{n} of --learning-rate; to go on "
                f"learning until step {c.steps}, raise --learning-rate-decay-steps"
            )

    def learner(self, model: Any, learning_rate: float) -> Learner:
        """A model, in parts where there are several processes, and its optimizer."""
        keep_for_backward(model, what_to_keep(self.config.gradient_checkpointing, self.device))
        model = distributed.shard(self.accelerator, model.train())
        learning = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(learning, lr=learning_rate, weight_decay=0.0, fused=True)
        return Learner(self.accelerator, model, optimizer)

    def start_engine(self, stack: contextlib.ExitStack) -> Engine:
        """This rank's sampler: in this process, or its line to servers that all ranks share."""
        c = self.config
        length = c.max_trajectory_tokens + 1
        served = Served(self.start, length, self.precision.dtype)
        # vLLM's stream of random numbers: another one for another seed, rank or step to go on from.
        saved = checkpoint.steps_saved(self.run.path)[-1:] or [0]

        def seed_of(rank: int) -> int:
            return sampling_seed(c.seed, saved[0], "engine", rank, turn=0) % 2**31

        urls: Sequence[str] = c.engine_url
        if c.engine_devices:
            enter = stack.enter_context
            urls = distributed.first(
                "starting the samplers",
                lambda: enter(start_servers(served, c.engine_devices, seed=seed_of(0))),
            )
        if urls:
            return FleetEngine(urls, self.run.path / "weights", served)
        options: dict[str, Any] = {}
        if c.engine == "vllm":
            options = {"seed": seed_of(distributed.rank()), "dtype": self.precision.dtype}
        return make_engine(c.engine, self.start, length, deterministic=c.deterministic, **options)

    def check_budget(self) -> None:
        """Refuse a token budget that the first prompt alone fills."""
        c, task = self.config, self.tasks[0]
        with self.pool.client() as client:
            observation = client.reset(task.task_index)
            needed = len(self.chat.opening(client.prompt, observation)) + c.max_tokens_per_turn
        if needed > c.max_trajectory_tokens:
            raise Misuse(
                f"--max-trajectory-tokens {c.max_trajectory_tokens} is too small: the opening of "
                f"{task.task_id} and one turn need {needed} tokens"
            )

    # 2: playing

    def epoch_of(self, step: int) -> float:
        return step * self.config.tasks_per_step / len(self.tasks)

    def settings(self, max_rounds: int) -> RolloutSettings:
        c = self.config
        return RolloutSettings(
            max_rounds=max_rounds,
            max_tokens_per_turn=c.max_tokens_per_turn,
            max_trajectory_tokens=c.max_trajectory_tokens,
            temperature=c.temperature,
            seed=c.seed,
            max_env_failures=c.max_env_failures,
            record_state=c.record_state,
        )

    def roll_out(
        self, requests: list[RolloutRequest], max_rounds: int
    ) -> tuple[list[RolloutHandler], RolloutLog]:
        """Banner 2, with a progress bar; on an engine error what has finished is kept."""
        step, log = requests[0].step, RolloutLog()
        settings = replace(self.settings(max_rounds), weight_version=step - 1)
        try:
            return self.play(requests, settings, "rollout", log), log
        except (EngineError, distributed.RankError):
            self.run.write_trajectories(f"step_{step:06d}", log.ended)
            raise

    def play(
        self,
        requests: Sequence[RolloutRequest],
        settings: RolloutSettings,
        label: str,
        log: RolloutLog,
    ) -> list[RolloutHandler]:
        """`rollout.collect`, shared out: each rank plays all samples of every W-th task, and all
        get all results, in the order of the requests."""
        ranks, rank = distributed.world_size(), distributed.rank()
        share = [r for r in requests if r.group_id % ranks == rank]
        own = replace(settings, max_env_failures=1.0)  # lost ones are counted over all ranks

        def work() -> tuple[list[RolloutHandler], tuple[float, float, int]]:
            with self.stop.allowed():
                handlers = collect(self.engine, self.pool, self.chat, share, own, log)
                return handlers, (log.seconds, log.engine_idle_s, log.generated_tokens)

        with playing(label, len(share)) as log.on_end:  # and waiting for the others
            parts = distributed.apart("rolling out", work)
        seconds, idle, generated = zip(*(numbers for _, numbers in parts), strict=True)
        log.seconds, log.engine_idle_s = max(seconds), sum(idle) / ranks
        log.generated_tokens = sum(generated)
        place = {r.heading("", 0)["trajectory_id"]: n for n, r in enumerate(requests)}
        handlers = [handler for part, _ in parts for handler in part]
        handlers.sort(key=lambda handler: place[handler.trajectory_id])
        check_failures(handlers, settings.max_env_failures)
        return handlers

    # 3 to 6: learning

    def score(self, batch: Batch) -> None:
        """Banner 3: old log-probs (where the policy moves more than once, see update.py), reference
        log-probs, values."""
        c, policy, device = self.config, self.policy.model, self.device
        self.engine.sleep()  # its memory is the trainer's until new weights wake it
        with phase("log-probs"):
            if c.kl_coef or c.num_optimizer_steps(len(batch)) > 1:
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

    def update(self, step: int, batch: Batch, signal_share: float = 1.0) -> dict[str, float]:
        """Banner 5: optimizer steps on the critic, if there is one, and on the policy.

        A `Config` is an `Objective`; the step is the seed of the mini-batches' order.
        """
        self.set_learning_rates(step)
        metrics: dict[str, float] = {}
        if self.critic is not None:
            metrics |= update_critic(self.critic, batch, self.config, seed=step)
        metrics |= update_policy(self.policy, batch, self.config, step, signal_share)
        return metrics

    def set_learning_rates(self, step: int) -> None:
        """A function of the step alone, not of --steps: a run resumed to go further than it was
        first meant to equals one that was meant to from the start."""
        c = self.config
        decay_steps = c.learning_rate_decay_steps or math.inf
        left = 1 - min(step - 1, decay_steps - 1) / decay_steps
        rates = {"policy": c.learning_rate, "critic": c.critic_learning_rate}
        for name, (_, optimizer) in self.parts().items():
            for group in optimizer.param_groups:
                group["lr"] = rates[name] * left

    def sync(self, step: int, trajectories: Sequence[RolloutHandler]) -> tuple[float, int]:
        """Banner 6: new weights into the sampler; (mean |sampler - trainer| log-prob, bytes).

        Raises:
            SyncError: the two differ by more than --max-sync-error, on some rank.
        """
        c = self.config
        num_bytes = self.load_into_engine()
        probes = trajectories[: self.num_probes]
        openings = [t.input_ids[: t.turns[0].action_span[0]] for t in probes]
        differences = sync.compare(
            self.policy.model, self.engine, openings, c.temperature, self.device, seed=step
        )
        return sync.check(differences, c.max_sync_error, step), num_bytes

    def load_into_engine(self) -> int:
        """The policy's weights to the sampler; bytes sent. Collective."""
        word = self.precision.dtype if self.config.engine == "vllm" else "float32"
        dtype: torch.dtype = getattr(torch, word)
        with phase("weight sync"):
            return sync.send_weights(self.policy.model, self.engine, dtype)

    # 7: measuring, and what a checkpoint holds

    def evaluate(self, step: int) -> tuple[dict[str, Any], list[RolloutHandler]]:
        """Held-out tasks played by the policy as it is now: summary and trajectories."""
        c = self.config

        def play(
            requests: Sequence[RolloutRequest], settings: RolloutSettings
        ) -> list[RolloutHandler]:
            return self.play(requests, settings, "held-out evaluation", RolloutLog())

        settings = self.settings(c.evaluation_rounds)
        return evaluate_policy(play, self.eval_tasks, c.samples_at(step), settings, step)

    def export(self, folder: Path) -> None:
        """The policy as Hugging Face files. Collective."""
        policy = self.policy.model
        sync.export_policy(self.accelerator, policy, self.tokenizer, folder)
        if self.config.lora_rank:
            target = folder / "adapter" if distributed.rank() == 0 else None
            lm = self.accelerator.unwrap_model(policy).lm
            save_adapter(lm, target, self.start, full=distributed.whole)

    def parts(self) -> dict[str, tuple[Any, Any]]:
        """What is trained: name -> (model, optimizer)."""
        learners = {"policy": self.policy, "critic": self.critic}
        return {n: (ln.model, ln.optimizer) for n, ln in learners.items() if ln is not None}
