"""The worker holds what every training step uses: models, sampler, environments, task lists.

    tasks ── requests ──> roll_out ──> (a method learns) ──> sync ──> evaluate, save
                           engine       policy                policy weights
                           + pool       optimizer             into the engine

There is one `Worker` per process. The programs (`train.py`, `sft.py`, ...) decide which of its
methods a step calls, and in which order. With several processes, each one plays a share of the
tasks and then receives all trajectories (`scale/distributed.py`). Rank 0 writes the files.

Read next: `run/session.py`.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import agents
import formats
from batching import Batch
from chat import ChatTemplate
from config import (
    Config,
    Misuse,
    RunConfig,
    config_per_env,
    evaluation_horizons,
    held_out_tasks,
    prompt_of,
    tasks_of,
    value_errors_as_misuse,
)
from engines import Engine, EngineError
from envclient import EnvPool, EnvPools, NotSupported, StepOutsideEpisode, local_server
from envs import env_name, tasks_by_env
from models import (
    describe,
    load_policy,
    load_tokenizer,
    num_parameters,
    num_trainable,
    stop_ids_of,
)
from reporting.scoring import summarize
from rollout import (
    RolloutLog,
    RolloutRequest,
    RolloutSettings,
    all_samples,
    check_failures,
    collect,
    sampling_seed,
    share_of,
)
from run import checkpoint, clock, rundir
from run.errors import SyncError, TooManyEnvFailures
from run.progress import phase, playing
from sampling.fleet import FleetEngine, ServerOptions, start_servers
from sampling.vllm_engine import make_engine
from scale import distributed, precision, sync
from scale.default_models import is_mixture, model_config
from scale.lora import add_lora, save_adapter
from scale.memory import choose_keep, keep_for_backward, sampler_share
from trajectory import RolloutHandler
from update import Learner
from warmstart import oracle_style, start_model

if TYPE_CHECKING:
    from run.session import StopRequests


class Worker:
    """Policy, sampler, environments and task lists of one process. A run that never plays and
    never evaluates has no sampler and no environments.

    Raises:
        Misuse: an option turns out to be wrong when the tasks, the model or a prompt are loaded.
    """

    openings: list[list[int]]  # first prompt of one task per environment, as token ids
    say_once = staticmethod(cache(distributed.say))
    num_probes = 2  # number of prompts used to check each weight sync
    has_new_weights = False  # since the last step that the session has completed
    stateful: dict[str, Any] = {}  # objects whose `state_dict` a session saves, by name
    pool: EnvPools
    engine: Engine

    def __init__(
        self,
        config: RunConfig,
        run: rundir.Run,
        stack: contextlib.ExitStack,
        stop: StopRequests,
    ) -> None:
        self.config, self.run, self.stop = config, run, stop
        with value_errors_as_misuse():
            self.tasks = tasks_of(config)
            self.eval_tasks = held_out_tasks(config)
        for line in plan(config, run.path, len(self.tasks), len(self.eval_tasks)):
            distributed.say(line)
        self.choose_arithmetic()
        self.choose_start()
        if config.plays:
            self.connect_environments(stack)
        with phase("loading the models"), clock.advice("loading the models"):
            self.load_models()
        if config.plays:
            with phase("starting the sampler"):
                self.engine = self.start_engine(stack)
            stack.push(self.close_engine)

    def choose_arithmetic(self) -> None:
        """Set the seed, deterministic kernels, number format and device."""
        c = self.config
        if c.deterministic:
            torch.use_deterministic_algorithms(True, warn_only=True)
            if torch.cuda.is_available():  # fast attention kernels sum in a varying order
                os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
                for kernel in ("flash", "mem_efficient", "cudnn"):
                    getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(False)
        torch.manual_seed(c.seed)
        self.precision = distributed.run_on_rank_0(
            "timing the processor", lambda: precision.choose(c.precision, c.deterministic)
        )
        distributed.say(f"precision: {self.precision.format} ({self.precision.reason})")
        self.accelerator = distributed.make_accelerator(self.precision.autocast)
        self.device = self.accelerator.device

    def choose_start(self) -> None:
        """Load or make the initial model, with a warm start if it needs one, and its tokenizer."""
        is_alone = distributed.world_size() == 1  # other ranks would wait for an interrupted one
        interruptible = self.stop.allowed() if is_alone else contextlib.nullcontext()
        with interruptible, clock.advice("the warm start"):
            self.start = start_model(self.config, self.accelerator)
        with value_errors_as_misuse():
            self.tokenizer = load_tokenizer(self.start)
            self.chat = ChatTemplate(self.tokenizer, stop_ids_of(self.start))
        distributed.say(f"initial model: {self.start} ({describe(self.start)})")
        self.pad_id = self.tokenizer.pad_token_id or 0

    def connect_environments(self, stack: contextlib.ExitStack) -> None:
        """Connect to the servers of --env-addr, or start local ones, and get one task's first
        prompt from each environment.

        Raises:
            Misuse: the first prompt and one turn do not fit into --max-trajectory-tokens.
        """
        pools, c = {}, self.config
        action_format = formats.action_format(
            c.action_format, c.max_actions_per_turn, self.tokenizer.chat_template
        )
        for config in config_per_env(self.config):
            urls = config.env_addr or (stack.enter_context(local_server(config.env)),)
            with value_errors_as_misuse():
                prompt = prompt_of(config)
                pool = EnvPool(config.env, urls, prompt=prompt, action_format=action_format)
                stack.enter_context(pool)
            pools[env_name(config.env)] = pool
        self.pool = EnvPools(pools)
        self.openings, agent = [], agents.make(c.agent, c.attempts)
        for env, (task, *_) in tasks_by_env(self.tasks).items():
            with self.pool.for_env(env).client() as client:
                observation = client.reset(task.task_index)
                if c.asks_oracle:  # AgentGym's servers have none
                    with contextlib.suppress(StepOutsideEpisode):  # it knows no move for this task
                        client.oracle()
                observation = agent.first_text(observation)
                self.openings.append(self.chat.opening(client.prompt, observation))
                if c.record_state:
                    with contextlib.suppress(NotSupported):  # AgentGym's servers have no /state
                        client.state()
            num_turns, turns = (2, "a plan and a turn") if c.agent == "plan" else (1, "one turn")
            num_tokens = len(self.openings[-1]) + num_turns * c.max_tokens_per_turn
            if num_tokens > c.max_trajectory_tokens:
                raise Misuse(
                    f"--max-trajectory-tokens {c.max_trajectory_tokens} is too small: the first "
                    f"prompt of {task.task_id} and {turns} need {num_tokens} tokens"
                )

    # Models, sampler

    def load_models(self) -> None:
        """Load the policy; subclasses load the other models that their method needs."""
        c = self.config
        self.policy = self.fresh_policy()
        model, ranks = self.policy.model, distributed.world_size()
        line = f"policy: {num_parameters(model) / 1e6:.1f}M parameters on {self.device}"
        if c.lora_rank:
            line += f", {num_trainable(model) / 1e6:.2f}M of them trainable"
        if ranks > 1:
            line += f", sharded over {ranks} processes"
        distributed.say(line)
        if c.lora_rank and is_mixture(model_config(self.start)):
            distributed.say("note: --lora-rank does not train the experts, only layers beside them")
        if 0 < (n := c.learning_rate_decay_steps) < c.steps_per_schedule:
            distributed.say(
                f"note: from step {n} on, the learning rate is only 1/{n} of --learning-rate; "
                f"for a slower decay use --learning-rate-decay-steps {c.steps_per_schedule}"
            )

    def fresh_policy(self) -> Learner:
        """The policy that the run starts from, with a new optimizer."""
        c = self.config
        with value_errors_as_misuse():  # the folder has no model, or adapters do not fit its layers
            policy = load_policy(self.start, c.share_prefix)
            if c.lora_rank:
                add_lora(policy.lm, c.lora_rank, c.seed, c.lora_alpha)
        return self.learner(policy, c.learning_rate)

    def learner(self, model: Any, learning_rate: float) -> Learner:
        """Shard a model over the processes and make its optimizer."""
        checkpointing, is_gpu = self.config.gradient_checkpointing, self.device.type != "cpu"
        keep_for_backward(model, choose_keep(checkpointing, is_gpu, num_parameters(model)))
        model = distributed.shard(self.accelerator, model.train())
        return Learner(self.accelerator, model, self.optimizer_of(model, learning_rate))

    def optimizer_of(self, model: Any, learning_rate: float) -> torch.optim.Optimizer:
        """AdamW for the weights of `model` that are trained."""
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=learning_rate, weight_decay=0.0, fused=True)
        optimizer.register_step_post_hook(lambda *_: setattr(self, "has_new_weights", True))
        return optimizer

    def with_new_optimizer(self, learner: Learner) -> Learner:
        """The same model with a new optimizer."""
        rate = self.config.learning_rate
        return learner._replace(optimizer=self.optimizer_of(learner.model, rate))

    def free_policy(self) -> None:
        """Free the policy's memory before another policy is loaded. This takes some care:
        accelerate keeps a reference to it, and sharded models contain reference cycles."""
        self.has_new_weights = True
        distributed.forget(self.accelerator, self.policy.model)
        del self.policy
        gc.unfreeze()  # vLLM froze every object that existed when it started
        gc.collect()

    def start_engine(self, stack: contextlib.ExitStack) -> Engine:
        """This rank's sampler: in this process, or a client of servers shared by all ranks."""
        c, length = self.config, self.config.max_trajectory_tokens + 1
        server_options = ServerOptions(self.start, length, self.precision.dtype)
        newest = checkpoint.steps_saved(self.run.path)[-1:] or [0]

        def seed_of(rank: int) -> int:
            """vLLM's seed, derived from the run's seed, the rank and the step to resume from."""
            return sampling_seed(c.seed, newest[0], "engine", rank, turn=0) % 2**31

        urls: Sequence[str] = c.engine_url
        if c.engine_devices:
            servers = start_servers(server_options, c.engine_devices, seed=seed_of(0))
            urls = distributed.run_on_rank_0(
                "starting the samplers", lambda: stack.enter_context(servers)
            )
        if urls:
            return FleetEngine(urls, self.run.path / "weights", server_options)
        options: dict[str, Any] = {"dtype": self.precision.dtype}
        if c.engine == "vllm":
            options["seed"] = seed_of(distributed.rank())
            options["gpu_memory_utilization"] = sampler_share(c)
            options["enforce_eager"] = c.enforce_eager
        return make_engine(c.engine, self.start, length, deterministic=c.deterministic, **options)

    def close_engine(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Close the sampler, unless only this rank has failed. In that case vLLM would close the
        process group, which on GPUs waits for all ranks, and the error would never be printed."""
        if error is None or distributed.is_known_to_all(error):
            self.engine.close()

    # Rollouts

    def roll_out(
        self, requests: list[RolloutRequest], earlier: Sequence[RolloutHandler] = ()
    ) -> tuple[list[RolloutHandler], dict[str, float]]:
        """Play all requests; returns the trajectories and the sampler's timings. If the sampler or
        too many episodes fail, the finished trajectories are written to disk first.

        Args:
            earlier: trajectories of the same step, which count in --max-env-failures.
        """
        step, log = requests[0].step, RolloutLog()
        try:
            trajectories = self.play(requests, step - 1, "rollout", log, earlier=earlier)
        except (EngineError, TooManyEnvFailures, distributed.RankError):  # raised on all ranks
            finished = [t for part in distributed.gather(log.trajectories) for t in part]
            self.run.write_trajectories(f"step_{step:06d}", finished)
            raise
        seconds = max(log.seconds, 1e-9)
        return trajectories, {
            "rollout/generated_tokens_per_s": log.generated_tokens / seconds,
            "rollout/engine_idle_share": log.engine_idle_s / seconds,
        }

    def play(
        self,
        requests: Sequence[RolloutRequest],
        weight_version: int,
        label: str,
        log: RolloutLog,
        temperature: float | None = None,
        earlier: Sequence[RolloutHandler] = (),
    ) -> list[RolloutHandler]:
        """`rollout.collect` on all ranks. Each rank plays a share and gets all trajectories, in
        the order of the requests. `log` covers this rank while playing, and all ranks at the end.

        Args:
            temperature: if not given, that of training.
            earlier: see `roll_out`.
        """
        c, ranks = self.config, distributed.world_size()
        share = share_of(requests, distributed.rank(), ranks)
        settings = RolloutSettings(
            max_tokens_per_turn=c.max_tokens_per_turn,
            max_trajectory_tokens=c.max_trajectory_tokens,
            temperature=c.temperature if temperature is None else temperature,
            seed=c.seed,
            max_env_failures=1.0,  # lost trajectories are counted below, over all ranks
            record_state=c.record_state,
            weight_version=weight_version,
            agent=agents.make(c.agent, c.attempts),
            ask_oracle=c.asks_oracle and temperature is None,  # not in evaluations
            oracle_thoughts=c.asks_oracle and oracle_style(c).thoughts,
        )

        def work() -> tuple[list[RolloutHandler], tuple[float, float, int]]:
            with self.stop.allowed():
                handlers = collect(self.engine, self.pool, self.chat, share, settings, log)
                return handlers, (log.seconds, log.engine_idle_s, log.generated_tokens)

        with playing(label, len(share)) as log.on_end:  # includes waiting for the other ranks
            parts = distributed.run_on_every_rank("rolling out", work)
        seconds, idle, generated = zip(*(numbers for _, numbers in parts), strict=True)
        log.seconds, log.engine_idle_s = max(seconds), sum(idle) / ranks
        log.generated_tokens = sum(generated)
        position = {r.trajectory_fields("")["trajectory_id"]: n for n, r in enumerate(requests)}
        handlers = [handler for part, _ in parts for handler in part]
        handlers.sort(key=lambda handler: position[handler.trajectory_id])
        check_failures([*earlier, *handlers], c.max_env_failures)
        if errors := [handler.error for handler in handlers if handler.error]:
            self.say_once(f"note: lost trajectories are not used; last error: {errors[-1]}")
        return handlers

    def evaluate(
        self, step: int, temperature: float
    ) -> tuple[dict[str, Any], list[RolloutHandler]]:
        """Play the held-out tasks with the current policy; returns a summary and trajectories."""
        c = self.config
        horizons, samples = evaluation_horizons(c), c.samples_at(step)
        requests = all_samples(self.eval_tasks, samples, c.seed, step, horizons)
        label = "held-out evaluation"
        trajectories = self.play(requests, step, label, RolloutLog(), temperature)
        longest = [max(horizons.values())]
        summary = summarize(trajectories, samples, longest, step)
        return summary | {"temperature": temperature}, trajectories

    # Learning

    def set_learning_rates(self, step: int) -> None:
        """Linear decay from lr to lr/N over N = `decay_steps` steps, then constant. The decay does
        not depend on --steps, so a finished run can be resumed with more steps."""
        decay_steps = self.decay_steps()
        factor = 1 - min(step - 1, decay_steps - 1) / decay_steps
        for name, (_, optimizer) in self.parts().items():
            for group in optimizer.param_groups:
                group["lr"] = self.learning_rates()[name] * factor

    def decay_steps(self) -> float:
        return self.config.learning_rate_decay_steps or math.inf

    def learning_rates(self) -> dict[str, float]:
        """Learning rate of each model in `parts` at the first step."""
        return {"policy": self.config.learning_rate}

    def parts(self) -> dict[str, tuple[Any, Any]]:
        """The models that are trained and saved: name -> (model, optimizer)."""
        return {"policy": (self.policy.model, self.policy.optimizer)}

    # Sending weights to the sampler, writing them to disk

    def sync(self, step: int, batch: Batch | None = None) -> tuple[float, int]:
        """Send new weights to the sampler. Check them by sampling after a few first prompts, those
        of `batch` or of one task per environment, and scoring the result with the trainer.
        Returns (|sampler - trainer| log-prob of the worst text, averaged over ranks; bytes sent).

        Raises:
            SyncError: the difference exceeds --max-sync-error on some rank.
        """
        c, openings = self.config, self.openings
        if batch is not None:  # each row up to its first action
            ends = batch.loss_mask[: self.num_probes].argmax(1)
            openings = [ids[:end].tolist() for ids, end in zip(batch.input_ids, ends)]
        max_tokens = c.max_trajectory_tokens - sync.NUM_PROBED
        openings = [ids[:max_tokens] for ids in openings]
        name = self.precision.dtype if c.engine == "vllm" else "float32"
        try:
            with phase("weight sync"):
                num_bytes = sync.send_weights(self.policy.model, self.engine, getattr(torch, name))
            differences = sync.compare(
                self.policy.model, self.engine, openings, c.temperature, self.device, seed=step
            )
            return sync.check(differences, c.max_sync_error, step), num_bytes
        except (EngineError, SyncError) as error:
            if not is_mixture(model_config(self.start)):
                raise
            raise type(error)(
                f"{error}; in a mixture of experts, the likely cause is that vLLM does not reload "
                "all weights, or that bfloat16 selects other experts: start a new run with "
                "--engine transformers --precision fp32"
            ) from error

    def sleep_sampler(self) -> None:
        """Free the sampler's memory until new weights wake it."""
        if self.config.plays:
            self.engine.sleep()

    @property
    def needs_start(self) -> bool:
        """Whether a resumed run needs its initial weights. With LoRA it does, since trainer_state/
        holds only the adapters."""
        return bool(self.config.lora_rank)

    @property
    def frozen_weights(self) -> dict[str, str]:
        """The folders whose weights a resumed run reads again."""
        return {"start": self.start} if self.needs_start else {}

    def export(self, folder: Path) -> None:
        """Write the policy as Hugging Face files. Collective."""
        policy = self.policy.model
        sync.export_policy(self.accelerator, policy, self.tokenizer, folder)
        if self.config.lora_rank and not policy.resets_adapters:
            target = folder / "adapter" if distributed.rank() == 0 else None
            lm = self.accelerator.unwrap_model(policy).lm
            save_adapter(lm, target, self.start)


def plan(config: RunConfig, run_dir: Path, num_tasks: int, num_held_out: int) -> list[str]:
    """The first lines that a run prints, so that a wrong option is noticed at once."""
    c, configs = config, config_per_env(config)
    batch = f"up to {c.trajectories_per_step} trajectories per step"
    if isinstance(c, Config):
        turns = " and ".join(", then ".join(map(str, part.rounds)) for part in configs)
        samples = f"{c.group_size} sample{'s' * (c.group_size > 1)}"
        batch = f"{c.tasks_per_step} tasks x {samples} per step, up to {turns} turns"
    weights = f"LoRA adapters of rank {c.lora_rank}" if c.lora_rank else "all weights"
    sampler = f"sampling with {c.engine}" if c.plays else "no sampling"
    evaluation = "none, so no checkpoint will be marked as the best"
    if num_held_out:
        plural = "s" * (c.eval_samples > 1)
        evaluation = (
            f"{num_held_out} held-out tasks, {c.eval_samples} sample{plural} each, every "
            f"{c.eval_every} steps (before step 1: {c.samples_at(0)} each), up to "
            f"{max(evaluation_horizons(c).values())} turns"
        )
        if len(temperatures := c.evaluation_temperatures) > 1:
            evaluation += f", at temperatures {' and '.join(f'{t:g}' for t in temperatures)}"
    elif getattr(c, "hold_out", 0):
        evaluation = "held-out loss; the checkpoint with the lowest loss is the best"
    return [
        f"run: {c.steps} steps of {c.name}, {batch}; files in {run_dir}",
        f"model: {c.model}, training {weights}, {sampler}",
        f"training tasks: {num_tasks} from {' and '.join(part.env for part in configs)}",
        f"evaluation: {evaluation}",
    ]
