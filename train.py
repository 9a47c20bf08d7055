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

    python train.py --env textcraft                                       # two CPU cores, about an hour
    python train.py --env textcraft --model Qwen/Qwen2.5-3B-Instruct      # one large GPU
    python train.py --env textcraft --algorithm ppo --rounds 8            # any option: python train.py --help

Everything a run writes lies in its directory: metrics, timings, every trajectory, evaluations,
checkpoints and a plot. Ctrl-C stops it after saving; `--resume --run-dir DIR` goes on. Exit codes:
0 done, 1 failure, 2 misuse, 130 stopped by Ctrl-C.

Read first: schedulers, advantages, losses, envclient, rollout, update. Read next: `evaluate.py`.
"""

from __future__ import annotations

import contextlib
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch

import checkpoint
import rundir
from advantages import gae, grpo, reinforce_plus_plus, rloo
from batching import Batch, make_batch, micro_batches, padding_share
from chat import ChatTemplate
from config import GROUPED, Config, check, complete, hardware_defaults
from engines import Engine, EngineError, SamplingSettings, make_engine
from envclient import EnvError, EnvPool, local_server
from envs import Task, load_tasks
from evaluate import evaluate_policy
from losses import (
    AdaptiveKLController,
    FixedKLController,
    kl_estimate,
    kl_penalized_rewards,
    masked_mean,
)
from metrics import MetricsLogger, plot, summarize_trajectories
from models import describe, load_critic, load_policy, load_tokenizer, num_parameters, resolve_model
from rollout import (
    RolloutHandler,
    RolloutRequest,
    RolloutSettings,
    RolloutStats,
    TooManyEnvFailures,
    collect,
)
from schedulers import make_scheduler
from sft import SftSettings, warm_start
from update import score, update_critic, update_policy


class TrainingError(RuntimeError):
    """The run cannot go on; one line says why."""


def main(config: Config) -> int:
    """Train; returns the exit code."""
    # ---------------------------------------------------------------------------------------- setup
    run = rundir.open_run(config)
    with contextlib.ExitStack() as stack:
        stack.callback(run.close)
        stop = stack.enter_context(rundir.StopRequests())
        t = Trainer(config, run, stack)
        first = t.restore() + 1
        logger = MetricsLogger(run.path, resume_step=first - 1 if config.resume else None)
        stack.callback(logger.close)
        saved = first - 1
        try:
            if is_due(first - 1, config.eval_every, config.steps) and not run.has_evaluation(
                first - 1
            ):
                with stop.allowed():
                    t.evaluate(first - 1)
            for step in range(first, config.steps + 1):
                clock = Clock()
                # ------------------------------------------------------------------------ 1 horizon
                max_rounds = t.scheduler.rounds_at(step)

                # ----------------------------------------------------------------------- 2 roll out
                requests = t.requests_of(step)
                stats = RolloutStats()
                with stop.allowed(), clock("time/rollout_s"):
                    trajectories = t.roll_out(requests, max_rounds, stats)
                if config.shuffle_rewards:
                    shuffle_rewards(trajectories, seed=config.seed + step)
                usable, groups = usable_trajectories(trajectories, config)
                metrics: dict[str, Any] = {
                    "horizon/max_rounds": max_rounds,
                    "data/epoch": t.epoch_of(step),
                }

                if usable:
                    # ------------------------------------------------------------------ 3 log-probs
                    batch = make_batch(usable, t.pad_id)
                    with clock("time/log_probs_s"):
                        old, ref, values = t.score(batch)

                    # ----------------------------------------------------------------- 4 advantages
                    with clock("time/advantages_s"):
                        rewards, kl_metrics = t.penalized_rewards(batch, old, ref)
                        advantages, returns = estimate(config, rewards, batch, values)

                    # --------------------------------------------------------------------- 5 update
                    with clock("time/update_s"):
                        metrics |= kl_metrics | t.update(
                            step, batch, advantages, returns, old, ref, values
                        )

                    # ----------------------------------------------------------------------- 6 sync
                    with clock("time/sync_s"):
                        metrics["sync/log_prob_diff_mean"], num_bytes = t.sync(
                            step, usable[: t.num_probes]
                        )
                    clock.values |= update_speed(batch, config, clock) | {"sync/bytes": num_bytes}
                    keep_advantages(usable, advantages)
                else:
                    print(
                        f"step {step}: no trajectory carries a signal; no weight changes",
                        flush=True,
                    )
                    metrics |= {"policy/optimizer_steps": 0, "policy/skipped_steps": 0}

                # ------------------------------------------------------------ 7 log, evaluate, save
                metrics |= summarize_trajectories(trajectories) | groups
                run.write_trajectories(f"step_{step:06d}", trajectories)
                if is_due(step, config.eval_every, config.steps) and not stop.requested:
                    # An evaluation cut short by Ctrl-C is made up for when the run is resumed.
                    with (
                        contextlib.suppress(KeyboardInterrupt),
                        stop.allowed(),
                        clock("time/eval_s"),
                    ):
                        metrics |= t.evaluate(step)
                logger.log(
                    step, metrics
                )  # before saving: a resume drops lines it has no checkpoint for
                t.completed_step = step
                if is_due(step, config.save_every, config.steps):
                    with clock("time/save_s"):
                        t.save(step)
                        saved = step
                show_step(logger, run, step, metrics, clock, stats)
                if stop.requested:
                    raise KeyboardInterrupt
        except KeyboardInterrupt:
            done = t.completed_step
            if done > saved or not checkpoint.steps_saved(run.path):
                t.save(done)
            print(
                f"\nstopped after step {done}, saved. Go on with:\n  {run.resume_command()}",
                flush=True,
            )
            return 130
    print(
        f"done: {run.path}\n  evaluate with: python evaluate.py --model {run.path}/checkpoints/best"
    )
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
    if config.algorithm in GROUPED:
        size = Counter(t.group_id for t in valid)
        valid = [t for t in valid if size[t.group_id] > 1]
        if config.skip_zero_variance:
            returns: dict[int, set[float]] = {}
            for t in valid:
                returns.setdefault(t.group_id, set()).add(t.total_return)
            valid = [t for t in valid if len(returns[t.group_id]) > 1]
    for t in valid:
        t.used_in_loss = True
    return valid, {"data/policy_tokens": sum(sum(t.loss_mask) for t in valid)}


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
    cuts = micro_batches(lengths, config.max_tokens_per_micro_batch)
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
        "memory/peak_bytes": rundir.peak_memory(),
    }
    logger.timings(step, timings)
    logger.print_row(step, metrics, timings)
    plot(run.path)


class Clock:
    """Seconds by phase: `with clock("time/rollout_s"): ...`."""

    def __init__(self) -> None:
        self.values: dict[str, float] = {}
        self._began = time.perf_counter()

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        began = time.perf_counter()
        yield
        self.values[name] = time.perf_counter() - began

    def total(self) -> float:
        return time.perf_counter() - self._began


# ---------------------------------------------------------------------- models, engine, environment


class Trainer:
    """What lives from the first step to the last: the networks, the sampler, the environments, the
    task lists.

    It holds no algorithm: the order of things is in `main`.
    """

    num_probes = (
        2  # trajectories whose openings are sampled and scored again after each weight sync
    )

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
            f"policy: {num_parameters(self.policy) / 1e6:.1f}M parameters on {self.accelerator.device}",
            flush=True,
        )
        self.engine: Engine = make_engine(
            config.engine,
            start,
            config.max_trajectory_tokens + 1,
            deterministic=config.deterministic,
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
        self.best: float | None = None

    def trained(self, model: Any, learning_rate: float) -> tuple[Any, Any]:
        """A model and its optimizer, prepared together (a sharded model wants its optimizer with
        it)."""
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
                f"--max-trajectory-tokens {self.config.max_trajectory_tokens} is too small: the opening of "
                f"{self.tasks[0].task_id} and one turn need {needed} tokens"
            )

    # 1, 2: which tasks, and playing them

    def requests_of(self, step: int) -> list[RolloutRequest]:
        """The step's trajectories to roll: a pure function of (seed, step), so resume cannot lose
        its place.

        Tasks are drawn without replacement, epoch by epoch; all samples of a task share the
        environment's seed.
        """
        c = self.config
        requests = []
        for n in range(c.tasks_per_step):
            position = (step - 1) * c.tasks_per_step + n
            epoch, index = divmod(position, len(self.tasks))
            order = random.Random(f"{c.seed}/{epoch}").sample(
                range(len(self.tasks)), len(self.tasks)
            )
            task, env_seed = self.tasks[order[index]], c.seed * 1_000_003 + position
            requests += [RolloutRequest(task, n, k, env_seed, step) for k in range(c.group_size)]
        return requests

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
        """Banner 2, with a progress bar; on an engine error the finished trajectories are saved
        first."""
        step, finished = requests[0].step, []
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
        """Banner 3: old log-probs (only where the update needs them), reference log-probs, values;
        (B, T) each."""
        c, device = self.config, self.accelerator.device
        several = c.objective.num_optimizer_steps(len(batch)) > 1
        limit, tau = c.max_tokens_per_micro_batch, c.temperature
        old = score(self.policy, batch, limit, device, tau) if several or c.kl_coef else None
        ref = (
            score(self.reference, batch, limit, device, tau) if self.reference is not None else None
        )
        values = score(self.critic, batch, limit, device) if self.critic is not None else None
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
    ) -> dict[str, float]:
        """Banner 5: optimizer steps on the critic, if there is one, and on the policy."""
        c, metrics = self.config, {}
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
        )
        return metrics

    def sync(self, step: int, probes: Sequence[RolloutHandler]) -> tuple[float, int]:
        """Banner 6: new weights into the sampler; returns (mean |sampler - trainer| log-prob,
        bytes).

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
                f"after the weight sync of step {step} sampler and trainer differ by {mean:.3f} nats a token, above "
                f"--max-sync-error {self.config.max_sync_error}: the sampler holds other weights than the trainer"
            )
        return mean, num_bytes

    def load_into_engine(self) -> int:
        """Stream every name of the state dict, the tied head included, to the sampler; bytes sent."""
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
            f"step {step}: held-out success {avg['value']:.1%} [{avg['low']:.1%}, {avg['high']:.1%}], "
            f"{row['items']} tasks x {c.eval_samples} samples",
            flush=True,
        )
        self.is_best = self.best is None or avg["value"] > self.best
        self.best = max(self.best or 0.0, avg["value"])
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
            "kl_controller": self.kl_controller.state_dict(),
        }
        policy = self.accelerator.unwrap_model(self.policy)
        checkpoint.save(self.run.path, step, policy, self.tokenizer, parts, state)
        if getattr(self, "is_best", False) and is_due(step, c.eval_every, c.steps):
            checkpoint.mark_best(self.run.path, step)
        checkpoint.prune(self.run.path, c.keep_last)

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
        self.best, self.completed_step = state["best"], steps[-1]
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


def held_out_tasks(config: Config) -> list[Task]:
    """The tasks of --eval-tasks, or the environment's test split, restricted to the chosen
    sub-tasks."""
    if not config.eval_every:
        return []
    subtasks = config.subtasks if config.eval_subtasks is None else config.eval_subtasks
    split = None if config.eval_tasks else "test"
    return load_tasks(config.env, split, config.eval_tasks, subtasks)


def start_model(config: Config) -> str:
    """Path of the weights that RL starts from: as given, or warmed up on demonstrations of the
    training tasks."""
    if config.warm_start not in ("auto", "never"):
        return config.warm_start
    if config.warm_start == "never" or config.model not in ("smollm2-135m", "tiny"):
        return resolve_model(config.model)
    # Demonstrations may be one level harder than what RL trains on: they teach the grammar, not the
    # tasks.
    tasks = load_tasks(config.env, config.split, config.tasks)
    levels = sorted({task.subtask for task in tasks})[:2]
    return warm_start(
        config.model, config.env, [t for t in tasks if t.subtask in levels], SftSettings()
    )


def command_line() -> int:
    """Parse, check, run; misuse is one line and exit code 2, a failure one line and exit code 1."""
    import tyro

    config = tyro.cli(
        Config, default=hardware_defaults(torch.cuda.is_available()), description=__doc__
    )
    try:
        if config.resume:
            config = rundir.resumed_config(config)
        config = complete(config)
        check(config)
        return main(config)
    except (ValueError, FileExistsError, FileNotFoundError) as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2
    except (
        TrainingError,
        EngineError,
        EnvError,
        TooManyEnvFailures,
        checkpoint.CheckpointError,
        OSError,
    ) as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(command_line())
