"""What lives from the first training step to the last: networks, sampler, environments, task lists.

One `Worker` is one process. It knows how to roll out, score, update, sync, evaluate and save, and
holds no algorithm: which of these happen in a step, and in what order, is written in `train.py`.

    tasks ── requests_of(step) ──> roll_out ──> score ──> update ──> sync ──> evaluate, save
               pure function        engine       policy    optimizer   policy weights
               of the step          + pool       critic                into the engine
                                                 reference

Which tasks a step draws, the seeds of its environments and of its sampling are pure functions of
(seed, step): there is no cursor that a resume could lose (AgentGym-RL repeats or skips tasks
there).

Read next: `checkpoint.py`.
"""

from __future__ import annotations

import contextlib
import math
import random
from collections.abc import Sequence
from typing import Any

import torch

import checkpoint
import rundir
from batching import Batch
from chat import ChatTemplate
from config import Config
from default_models import resolve_model
from engines import Engine, EngineError, SamplingSettings, make_engine
from envclient import EnvPool, local_server
from envs import Task, load_tasks
from evaluate import evaluate_policy
from losses import (
    AdaptiveKLController,
    FixedKLController,
    kl_estimate,
    kl_penalized_rewards,
    masked_mean,
)
from models import describe, load_critic, load_policy, load_tokenizer, num_parameters
from rollout import RolloutRequest, RolloutSettings, RolloutStats, collect
from schedulers import make_scheduler
from sft import SftSettings, warm_start
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

    def __init__(self, config: Config, run: rundir.Run, stack: contextlib.ExitStack) -> None:
        from accelerate import Accelerator

        self.config, self.run = config, run
        self.tasks = load_tasks(config.env, config.split, config.tasks, config.subtasks)
        self.eval_tasks = held_out_tasks(config)
        if not config.deterministic:
            precision = "bf16"
        else:
            precision = "no"
            torch.use_deterministic_algorithms(True, warn_only=True)
        torch.manual_seed(config.seed)
        self.accelerator = Accelerator(mixed_precision=precision)
        start = start_model(config)
        print(f"model: {config.model} ({describe(start)}) from {start}", flush=True)
        self.tokenizer = load_tokenizer(start)
        self.chat = ChatTemplate(self.tokenizer)
        self.pad_id = self.tokenizer.pad_token_id or 0
        urls = config.env_addr or (stack.enter_context(local_server(config.env)),)
        self.pool = stack.enter_context(EnvPool(config.env, urls))
        self.check_budget()

        self.policy, self.optimizer = self.trained(load_policy(start), config.learning_rate)
        self.critic = self.critic_optimizer = self.reference = None
        if config.algorithm == "ppo":
            self.critic, self.critic_optimizer = self.trained(
                load_critic(start), config.critic_learning_rate
            )
        if config.kl_coef or config.kl_loss_coef:
            self.reference = (
                load_policy(start).to(self.accelerator.device).eval().requires_grad_(False)
            )
            self.reference = self.accelerator.prepare_model(self.reference, evaluation_mode=True)
        print(
            f"policy: {num_parameters(self.policy) / 1e6:.1f}M parameters "
            f"on {self.accelerator.device}",
            flush=True,
        )
        if 0 < config.learning_rate_decay_steps < config.steps:
            n = config.learning_rate_decay_steps
            print(
                f"note: from step {n} on the learning rate is 1/{n} of --learning-rate; to go on "
                f"learning until step {config.steps}, raise --learning-rate-decay-steps",
                flush=True,
            )
        # vLLM's stream of random numbers: another one for another seed, and after a resume.
        engine_seed = config.seed + 1_000 * len(checkpoint.steps_saved(run.path))
        options = {"seed": engine_seed} if config.engine == "vllm" else {}
        self.engine: Engine = make_engine(
            config.engine,
            start,
            config.max_trajectory_tokens + 1,
            deterministic=config.deterministic,
            **options,
        )
        stack.callback(self.engine.close)
        self.scheduler = make_scheduler(
            config.rounds_scheduler, config.rounds, config.steps_scaling_inter
        )
        self.kl_controller = FixedKLController(config.kl_coef)
        if config.kl_target is not None:
            self.kl_controller = AdaptiveKLController(
                config.kl_coef, config.kl_target, horizon=10_000
            )
        self.completed_step = 0
        self.best: float | None = None  # held-out success, and the step that had it
        self.best_step: int | None = None

    def trained(self, model: Any, learning_rate: float) -> tuple[Any, Any]:
        """A model and its optimizer, prepared together, as sharding wants them."""
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=learning_rate, weight_decay=0.0, fused=True
        )
        return self.accelerator.prepare(model.train(), optimizer)

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
        with rundir.progress_bar(len(requests), f"step {step} rollout") as tick:
            try:
                return collect(
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
            except EngineError:
                self.run.write_trajectories(f"step_{step:06d}", finished)
                raise

    # 3 to 6: learning

    def score(
        self, batch: Batch
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
        """Banner 3: old log-probs (where the update needs them), reference log-probs, values."""
        c, device = self.config, self.accelerator.device
        several = c.objective.num_optimizer_steps(len(batch)) > 1
        old = ref = values = None
        if several or c.kl_coef:
            old = score_policy(self.policy, batch, c.objective, device)
        if self.reference is not None:
            ref = score_policy(self.reference, batch, c.objective, device)
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
        rundir.return_freed_memory()
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

        The check samples a few tokens from the openings of `probes` and scores them with the
        trainer: a sampler that kept an old weight anywhere, the tied output head for instance, is
        off by 0.5 nats at once.
        Raises:
            TrainingError: the two differ by more than --max-sync-error.
        """
        num_bytes = self.load_into_engine()
        opening = [t.input_ids[: t.turns[0].action_span[0]] for t in probes]
        sampling = SamplingSettings(max_tokens=8, temperature=self.config.temperature, seed=step)
        for i, ids in enumerate(opening):
            self.engine.submit(f"probe-{step}-{i}", ids, sampling)
        differences: list[float] = []
        while self.engine.num_running:
            for g in self.engine.poll():
                ids = opening[int(g.request_id.rsplit("-", 1)[1])]
                input_ids = torch.tensor([ids + g.token_ids], device=self.accelerator.device)
                mask = torch.zeros_like(input_ids)
                mask[:, len(ids) :] = 1
                with torch.no_grad():
                    log_probs, _ = self.policy(input_ids, mask, self.config.temperature)
                expected = log_probs[0, len(ids) :].tolist()
                differences += [abs(a - b) for a, b in zip(expected, g.log_probs, strict=True)]
        mean = sum(differences) / len(differences)
        if not mean <= self.config.max_sync_error:
            raise TrainingError(
                f"after the weight sync of step {step} sampler and trainer differ by {mean:.3f} "
                "nats a token, above "
                f"--max-sync-error {self.config.max_sync_error}: "
                "the sampler holds other weights than the trainer"
            )
        return mean, num_bytes

    def load_into_engine(self) -> int:
        """Every name of the state dict, the tied head included, to the sampler; bytes sent."""
        lm = self.accelerator.unwrap_model(self.policy).lm
        dtype = torch.float32 if self.config.engine == "transformers" else torch.bfloat16
        weights = {name: tensor.detach().to(dtype) for name, tensor in lm.state_dict().items()}
        self.engine.wake()
        self.engine.load_weights(weights.items())
        return sum(w.numel() * w.element_size() for w in weights.values())

    # 7: measuring and keeping

    def evaluate(self, step: int) -> dict[str, float]:
        """Held-out success of the policy as it is now; details go to eval/ and trajectories/."""
        c = self.config
        if not self.eval_tasks:
            return {}
        total = len(self.eval_tasks) * c.eval_samples
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
            )
        self.run.write_json(f"eval/step_{step:06d}.json", summary)
        self.run.write_trajectories(f"eval_{step:06d}", trajectories)
        row = summary["overall"]
        avg = row["avg"]
        if avg["value"] is None:
            raise TrainingError(
                f"step {step}: every held-out trajectory was lost: {summary['lost']['last_error']}"
            )
        print(
            f"step {step}: held-out success {avg['value']:.1%} "
            f"[{avg['low']:.1%}, {avg['high']:.1%}], "
            f"{row['items']} tasks x {c.eval_samples} samples",
            flush=True,
        )
        if self.best is None or avg["value"] > self.best:
            self.best, self.best_step = avg["value"], step
        return {
            "eval/avg": avg["value"],
            "eval/pass": row["pass"]["value"],
            "eval/return_mean": row["return_mean"],
        }

    def save(self, step: int) -> None:
        """A checkpoint of the state after `step`."""
        c = self.config
        parts = {"policy": self._state_of(self.policy, self.optimizer)}
        if self.critic is not None:
            parts["critic"] = self._state_of(self.critic, self.critic_optimizer)
        state = {
            "algorithm": c.algorithm,
            "model": c.model,
            "best": self.best,
            "best_step": self.best_step,
            "kl_controller": self.kl_controller.state_dict(),
        }
        policy = self.accelerator.unwrap_model(self.policy)
        checkpoint.save(self.run.path, step, policy, self.tokenizer, parts, state)
        self.mark_if_best(step)
        checkpoint.prune(self.run.path, c.keep_last)

    def mark_if_best(self, step: int) -> None:
        """Point checkpoints/best at `step` if its evaluation is the best and it was saved."""
        if self.best_step == step and step in checkpoint.steps_saved(self.run.path):
            checkpoint.mark_best(self.run.path, step)

    def restore(self) -> int:
        """With --resume, the newest checkpoint's state; returns the number of steps done."""
        if not self.config.resume:
            return 0
        steps = checkpoint.steps_saved(self.run.path)
        if not steps:
            return 0
        state, parts = checkpoint.load(self.run.path, steps[-1], self.config.algorithm)
        self._load(self.policy, self.optimizer, parts["policy"])
        if self.critic is not None:
            self._load(self.critic, self.critic_optimizer, parts["critic"])
        self.kl_controller.load_state_dict(state["kl_controller"])
        self.best, self.best_step = state["best"], state["best_step"]
        self.completed_step = steps[-1]
        self.load_into_engine()
        print(f"resumed after step {steps[-1]}", flush=True)
        return steps[-1]

    def _state_of(self, model: Any, optimizer: Any) -> dict[str, Any]:
        return {
            "model": self.accelerator.unwrap_model(model).state_dict(),
            "optimizer": optimizer.state_dict(),
        }

    def _load(self, model: Any, optimizer: Any, part: dict[str, Any]) -> None:
        self.accelerator.unwrap_model(model).load_state_dict(part["model"])
        optimizer.load_state_dict(part["optimizer"])


def requests_of(step: int, tasks: Sequence[Task], config: Config) -> list[RolloutRequest]:
    """The step's trajectories to roll: a pure function, so resume cannot lose its place.

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


def held_out_tasks(config: Config) -> list[Task]:
    """The tasks of --eval-tasks, or the test split, restricted to the chosen sub-tasks."""
    if not config.eval_every:
        return []
    subtasks = config.subtasks if config.eval_subtasks is None else config.eval_subtasks
    split = None if config.eval_tasks else "test"
    return load_tasks(config.env, split, config.eval_tasks, subtasks)


def start_model(config: Config) -> str:
    """Path of the weights that RL starts from: as given, or warmed up on demonstrations."""
    if config.warm_start not in ("auto", "never"):
        return config.warm_start
    if config.warm_start == "never" or config.model not in ("smollm2-135m", "tiny"):
        return resolve_model(config.model)
    # Demonstrations may be one level harder than RL's tasks: they teach grammar, not tasks.
    tasks = load_tasks(config.env, config.split, config.tasks)
    levels = sorted({task.subtask for task in tasks})[:2]
    return warm_start(
        config.model, config.env, [t for t in tasks if t.subtask in levels], SftSettings()
    )
