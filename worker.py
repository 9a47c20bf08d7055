"""What lives from the first training step to the last: networks, sampler, environments, task lists.

One `Worker` is one process. It knows how to roll out, score, update, sync, evaluate and save, and
holds no algorithm: which of these happen in a step, and in what order, is written in `train.py`.

    tasks ── plan.requests_of ──> roll_out ──> score ──> update ──> sync ──> evaluate, save
               pure function        engine       policy    optimizer   policy weights
               of the step          + pool       critic                into the engine
                                                 reference

Over several processes each has a Worker. They roll out, evaluate and score apart, on their share of
the work, and all of them then hold all results (`runtime/distributed.py`); rank 0 writes the files.

Which tasks a step draws, the seeds of its environments and of its sampling are pure functions of
(seed, step): there is no cursor that a resume could lose (AgentGym-RL repeats or skips tasks
there).

Read next: `runtime/checkpoint.py`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from batching import Batch
from chat import ChatTemplate
from config import Config
from engines import Engine, EngineError, make_engine
from envclient import EnvPool, local_server
from envs import load_tasks
from evaluate import evaluate_policy
from losses import (
    AdaptiveKLController,
    FixedKLController,
    kl_estimate,
    kl_penalized_rewards,
    masked_mean,
)
from models import (
    describe,
    load_critic,
    load_policy,
    load_tokenizer,
    num_parameters,
    num_trained,
    save_policy,
)
from plan import held_out_tasks, start_model
from reporting.sentinels import Sentinels
from rollout import (
    RolloutRequest,
    RolloutSettings,
    RolloutStats,
    check_failures,
    collect,
)
from runtime import checkpoint, clock, distributed, rundir, sync
from runtime.fleet import FleetEngine
from runtime.interrupt import StopRequests
from runtime.lora import adapters_off, add_lora, save_adapter
from runtime.servers import start_servers
from schedulers import make_scheduler
from trajectory import RolloutHandler
from update import score_critic, score_policy, update_critic, update_policy


class TrainingError(RuntimeError):
    """The run cannot go on; one line says why."""


class Worker:
    """What lives from the first step to the last: networks, sampler, environments, task lists.

    Raises:
        ValueError: misuse that only the tasks, the model or the first prompt reveal.
    """

    num_probes = 2  # openings that are sampled from and scored again after each weight sync

    def __init__(
        self,
        config: Config,
        run: rundir.Run,
        stack: contextlib.ExitStack,
        stop: StopRequests | None = None,
    ) -> None:
        self.config, self.run, self.stop = config, run, stop or StopRequests()
        ranks = distributed.world_size()
        if config.tasks_per_step % ranks:
            raise ValueError(
                f"--tasks-per-step {config.tasks_per_step} must be a multiple of the {ranks} "
                "processes: each rolls out as many tasks as the others"
            )
        self.tasks = load_tasks(config.env, config.split, config.tasks, config.subtasks)
        self.eval_tasks = held_out_tasks(config)
        if not config.deterministic:
            precision = "bf16"
        else:
            precision = "no"
            torch.use_deterministic_algorithms(True, warn_only=True)
        torch.manual_seed(config.seed)
        self.accelerator = distributed.make_accelerator(precision)
        self.device = self.accelerator.device
        alone = distributed.world_size() == 1  # others would wait for a rank that was interrupted
        with self.stop.allowed() if alone else contextlib.nullcontext():
            start = distributed.first("warm start", lambda: start_model(config))
        distributed.say(f"model: {config.model} ({describe(start)}) from {start}")
        self.tokenizer = load_tokenizer(start)
        self.chat = ChatTemplate(self.tokenizer)
        self.pad_id = self.tokenizer.pad_token_id or 0
        urls = config.env_addr or (stack.enter_context(local_server(config.env)),)
        self.pool = stack.enter_context(EnvPool(config.env, urls))
        self.check_budget()

        self.start = start
        policy = load_policy(start)
        if config.lora_rank:
            add_lora(policy.lm, config.lora_rank, config.seed)
        self.policy, self.optimizer = self.trained(policy, config.learning_rate)
        self.critic = self.critic_optimizer = self.reference = None
        if config.algorithm == "ppo":
            self.critic, self.critic_optimizer = self.trained(
                load_critic(start), config.critic_learning_rate
            )
        self.has_reference = bool(config.kl_coef or config.kl_loss_coef)
        if self.has_reference and not config.lora_rank:
            frozen = load_policy(start).to(self.device).eval().requires_grad_(False)
            self.reference = distributed.shard(self.accelerator, frozen)
        distributed.say(
            f"policy: {num_parameters(self.policy) / 1e6:.1f}M parameters on {self.device}"
            + (
                f", {num_trained(self.policy) / 1e6:.2f}M of them trained"
                if config.lora_rank
                else ""
            )
            + (f", in parts on {ranks} processes" if ranks > 1 else "")
        )
        if 0 < config.learning_rate_decay_steps < config.steps:
            n = config.learning_rate_decay_steps
            distributed.say(
                f"note: from step {n} on the learning rate is 1/{n} of --learning-rate; to go on "
                f"learning until step {config.steps}, raise --learning-rate-decay-steps"
            )
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
        self.sentinels = Sentinels()
        if config.engine_url:  # they may hold what another run has left there
            self.load_into_engine()
        self.completed_step = 0
        self.best: float | None = None  # held-out success, and the step that had it
        self.best_step: int | None = None
        self.evaluated_step: int | None = None  # the last whose evaluation best and sentinels know

    def start_engine(self, stack: contextlib.ExitStack) -> Engine:
        """This rank's sampler: in this process, or its line to servers that all ranks share."""
        c = self.config
        length = c.max_trajectory_tokens + 1
        # vLLM's stream of random numbers: another one for another seed or rank, and after a resume.
        seed = c.seed + 1_000 * len(checkpoint.steps_saved(self.run.path))
        urls: Sequence[str] = c.engine_url
        if c.engine_devices:
            enter = stack.enter_context
            urls = distributed.first(
                "starting the samplers",
                lambda: enter(start_servers(self.start, c.engine_devices, length, seed=seed)),
            )
        if urls:
            return FleetEngine(urls, self.run.path / "weights", self.start, length)
        options = {"seed": seed + 1_000_000 * distributed.rank()} if c.engine == "vllm" else {}
        return make_engine(c.engine, self.start, length, deterministic=c.deterministic, **options)

    def trained(self, model: Any, learning_rate: float) -> tuple[Any, Any]:
        """A model, in parts where there are several processes, and its optimizer."""
        if self.config.gradient_checkpointing:
            distributed.checkpoint_activations(model)
        model = distributed.shard(self.accelerator, model.train())
        learning = [p for p in model.parameters() if p.requires_grad]
        return model, torch.optim.AdamW(learning, lr=learning_rate, weight_decay=0.0, fused=True)

    def check_budget(self) -> None:
        """Refuse a token budget that the first prompt alone fills."""
        with self.pool.client() as client:
            observation = client.reset(self.tasks[0].task_index)
            needed = (
                len(self.chat.opening(client.prompt, observation)) + self.config.max_tokens_per_turn
            )
        if needed > self.config.max_trajectory_tokens:
            raise ValueError(
                f"--max-trajectory-tokens {self.config.max_trajectory_tokens} is too small: "
                "the opening of "
                f"{self.tasks[0].task_id} and one turn need {needed} tokens"
            )

    # 1, 2: which tasks, and playing them

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
        self, requests: list[RolloutRequest], max_rounds: int, stats: RolloutStats
    ) -> list[RolloutHandler]:
        """Banner 2, with a progress bar; on an engine error what has finished is kept."""
        step = requests[0].step
        finished: list[RolloutHandler] = []
        num_own = len(self.own_requests(requests))
        with rundir.progress_bar(num_own, f"step {step} rollout") as tick:
            try:
                return self.collect(
                    self.engine,
                    self.pool,
                    self.chat,
                    requests,
                    self.settings(max_rounds),
                    progress=tick,
                    weight_version=step - 1,
                    stats=stats,
                    finished=finished,
                )
            except (EngineError, distributed.RankError):
                self.run.write_trajectories(f"step_{step:06d}", finished)
                raise

    def collect(
        self,
        engine: Engine,
        pool: EnvPool,
        chat: ChatTemplate,
        requests: Sequence[RolloutRequest],
        settings: RolloutSettings,
        stats: RolloutStats | None = None,
        **others: Any,
    ) -> list[RolloutHandler]:
        """`rollout.collect`, shared out: each rank plays its tasks, all get the results."""
        stats = stats if stats is not None else RolloutStats()
        own = replace(settings, max_env_failures=1.0)  # lost ones are counted over all ranks

        def play() -> tuple[list[RolloutHandler], RolloutStats]:
            with self.stop.allowed():
                share = self.own_requests(requests)
                return collect(engine, pool, chat, share, own, stats=stats, **others), stats

        parts = distributed.apart("rolling out", play)
        if len(parts) > 1:
            stats.seconds = max(s.seconds for _, s in parts)
            stats.engine_idle_s = sum(s.engine_idle_s for _, s in parts) / len(parts)
            stats.generated_tokens = sum(s.generated_tokens for _, s in parts)
        place = {r.heading("", 0)["trajectory_id"]: n for n, r in enumerate(requests)}
        handlers = [handler for part, _ in parts for handler in part]
        handlers.sort(key=lambda handler: place[handler.trajectory_id])
        check_failures(handlers, settings.max_env_failures)
        return handlers

    def own_requests(self, requests: Sequence[RolloutRequest]) -> list[RolloutRequest]:
        """This rank's: all samples of every W-th task."""
        ranks, rank = distributed.world_size(), distributed.rank()
        return [r for r in requests if r.group_id % ranks == rank]

    # 3 to 6: learning

    def score(
        self, batch: Batch
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Banner 3: old log-probs (where the update needs them), reference log-probs, values."""
        c, device = self.config, self.device
        self.engine.sleep()  # its memory is the trainer's until the weight sync
        several = c.objective.num_optimizer_steps(len(batch)) > 1
        old = ref = values = None
        if several or c.kl_coef:
            old = score_policy(self.policy, batch, c.objective, device)
        if self.reference is not None:
            ref = score_policy(self.reference, batch, c.objective, device)
        elif self.has_reference:  # with LoRA: the base, without a second copy of it
            with adapters_off(self.policy):
                ref = score_policy(self.policy, batch, c.objective, device)
        if self.critic is not None:
            values = score_critic(self.critic, batch, c.max_tokens_per_micro_batch, device)
        return old, ref, values

    def penalized_rewards(
        self, batch: Batch, old: torch.Tensor | None, ref: torch.Tensor | None
    ) -> tuple[torch.Tensor, dict[str, float]]:
        """The step's rewards, less the KL to the start policy where --kl-coef asks for it."""
        if old is None or ref is None or not self.config.kl_coef:
            return batch.token_rewards, {}
        coef = self.kl_controller.value
        rewards = kl_penalized_rewards(batch.token_rewards, old, ref, batch.loss_mask, coef)
        observed = float(masked_mean(kl_estimate(old, ref, "k3"), batch.loss_mask))
        self.kl_controller.update(observed, len(batch))
        return rewards, {"kl/coef": coef, "policy/kl": observed}

    def update(
        self,
        step: int,
        batch: Batch,
        advantages: torch.Tensor,
        returns: torch.Tensor,
        old: torch.Tensor | None,
        ref: torch.Tensor | None,
        values: torch.Tensor | None,
        signal_share: float = 1.0,
    ) -> dict[str, float]:
        """Banner 5: optimizer steps on the critic, if there is one, and on the policy."""
        c = self.config
        self.set_learning_rates(step)
        metrics: dict[str, float] = {}
        if self.critic is not None and values is not None:
            metrics |= update_critic(
                self.accelerator,
                self.critic,
                self.critic_optimizer,
                batch,
                values,
                returns,
                c.objective,
                step,
            )
        kl_reference = ref if c.kl_loss_coef else None
        metrics |= update_policy(
            self.accelerator,
            self.policy,
            self.optimizer,
            batch,
            advantages,
            c.objective,
            old,
            kl_reference,
            step,
            signal_share,
        )
        clock.return_freed()
        return metrics

    def set_learning_rates(self, step: int) -> None:
        """A function of the step alone, not of --steps: a run resumed to go further than it was
        first meant to equals one that was meant to from the start."""
        c = self.config
        decay_steps = c.learning_rate_decay_steps or math.inf
        left = 1 - min(step - 1, decay_steps - 1) / decay_steps
        for optimizer, rate in (
            (self.optimizer, c.learning_rate),
            (self.critic_optimizer, c.critic_learning_rate),
        ):
            for group in optimizer.param_groups if optimizer is not None else ():
                group["lr"] = rate * left

    def sync(self, step: int, probes: Sequence[RolloutHandler]) -> tuple[float, int]:
        """Banner 6: new weights into the sampler; (mean |sampler - trainer| log-prob, bytes).

        Raises:
            SyncError: the two differ by more than --max-sync-error, on some rank.
        """
        c = self.config
        num_bytes = self.load_into_engine()
        openings = [t.input_ids[: t.turns[0].action_span[0]] for t in probes]
        differences = sync.compare(
            self.policy, self.engine, openings, c.temperature, self.device, seed=step
        )
        return sync.check(differences, c.max_sync_error, step), num_bytes

    def load_into_engine(self) -> int:
        """The policy's weights to the sampler; bytes sent. Collective."""
        dtype = torch.float32 if self.config.engine == "transformers" else torch.bfloat16
        return sync.send_weights(self.policy, self.engine, dtype)

    # 7: measuring and keeping

    def evaluate(self, step: int) -> dict[str, float]:
        """Held-out success of the policy as it is now; details go to eval/ and trajectories/."""
        c = self.config
        if not self.eval_tasks:
            return {}
        total = math.ceil(len(self.eval_tasks) * c.eval_samples / distributed.world_size())
        with rundir.progress_bar(total, f"step {step} evaluation") as tick:
            summary, trajectories = evaluate_policy(
                self.engine,
                self.pool,
                self.chat,
                self.eval_tasks,
                c.eval_samples,
                self.settings(c.evaluation_rounds),
                step=step,
                seed=c.seed,
                progress=tick,
                collect=self.collect,
            )
        self.run.write_json(f"eval/step_{step:06d}.json", summary)
        self.run.write_trajectories(f"eval_{step:06d}", trajectories)
        row = summary["overall"]
        avg = row["avg"]
        if avg["value"] is None:
            raise TrainingError(
                f"step {step}: every held-out trajectory was lost: {summary['lost']['last_error']}"
            )
        distributed.say(
            f"step {step}: held-out success {avg['value']:.1%} "
            f"[{avg['low']:.1%}, {avg['high']:.1%}], "
            f"{row['items']} tasks x {c.eval_samples} samples"
        )
        self.evaluated_step = step
        if self.best is None or avg["value"] > self.best:
            self.best, self.best_step = avg["value"], step
        return {
            "eval/avg": avg["value"],
            "eval/pass": row["pass"]["value"],
            "eval/return_mean": row["return_mean"],
        }

    def save(self, step: int) -> None:
        """A checkpoint of the state after `step`. Collective."""
        state = self.identity() | {
            "best": self.best,
            "best_step": self.best_step,
            "evaluated_step": self.evaluated_step,
            "kl_controller": self.kl_controller.state_dict(),
            "sentinels": self.sentinels.state_dict(),
        }
        checkpoint.save(self.run.path, step, self.export, self.parts(), state)
        self.tidy_up(step)

    def tidy_up(self, step: int) -> None:
        """What follows a checkpoint's rename, and what a kill in between has left to do."""

        def prune() -> None:
            checkpoint.remove_left_over(self.run.path)
            checkpoint.prune(self.run.path, self.config.keep_last)

        self.mark_if_best(step)
        distributed.first("pruning", prune)

    def export(self, folder: Path) -> None:
        """The policy as Hugging Face files, put together on rank 0. Collective."""
        weights = {}
        for name, tensor in sync.whole_weights(self.policy, torch.bfloat16):
            if distributed.rank() == 0:
                weights[name] = tensor.cpu()
        policy = self.accelerator.unwrap_model(self.policy)
        distributed.first("saving", lambda: save_policy(policy, self.tokenizer, folder, weights))
        if self.config.lora_rank:
            target = folder / "adapter" if distributed.rank() == 0 else None
            save_adapter(policy.lm, target, self.start, full=distributed.whole)

    def parts(self) -> dict[str, tuple[Any, Any]]:
        """What is trained: name -> (model, optimizer)."""
        parts = {"policy": (self.policy, self.optimizer)}
        if self.critic is not None:
            parts["critic"] = (self.critic, self.critic_optimizer)
        return parts

    def identity(self) -> dict[str, Any]:
        """What a checkpoint and the run that resumes it must have in common."""
        c = self.config
        return {"algorithm": c.algorithm, "model": c.model, "lora_rank": c.lora_rank}

    def watch(self, step: int, metrics: Mapping[str, Any]) -> str | None:
        """Print what the sentinels see in a step; why the run must stop, if it must."""
        alarms = self.sentinels.check(step, metrics)
        if self.config.on_collapse == "off":
            return None
        for alarm in alarms:
            distributed.say(f"{alarm.severity}: {alarm.message}")
        stops = [alarm for alarm in alarms if alarm.severity == "stop"]
        if not stops or self.config.on_collapse == "warn":
            return None
        best = "nothing was evaluated (--eval-every 0), so that no checkpoint is known as the best"
        if self.best_step == 0:
            best = f"the best policy so far is the one it began with, {self.start}"
        elif self.best_step is not None:
            link = self.run.path / "checkpoints/best"
            best = f"the best checkpoint is {link} (step {self.best_step})"
        return (
            f"stopped after step {step}, the run is collapsing: {stops[0].message}; {best}; "
            "--resume with --on-collapse warn goes on all the same"
        )

    def mark_if_best(self, step: int) -> None:
        """Point checkpoints/best at `step` if its evaluation is the best and it was saved."""

        def mark() -> None:
            if self.best_step == step and step in checkpoint.steps_saved(self.run.path):
                checkpoint.mark_best(self.run.path, step)

        distributed.first("saving", mark)

    def restore(self) -> int:
        """With --resume, the newest checkpoint's state; returns the number of steps done."""
        if not self.config.resume:
            return 0
        steps = checkpoint.steps_saved(self.run.path)
        if not steps:
            return 0
        state = checkpoint.read_state(self.run.path, steps[-1], self.identity())
        checkpoint.load(self.run.path, steps[-1], self.parts())
        self.kl_controller.load_state_dict(state["kl_controller"])
        self.sentinels.load_state_dict(state["sentinels"])
        self.best, self.best_step = state["best"], state["best_step"]
        self.evaluated_step = state["evaluated_step"]
        self.completed_step = steps[-1]
        self.load_into_engine()
        self.tidy_up(steps[-1])
        distributed.say(f"resumed after step {steps[-1]}")
        return steps[-1]
