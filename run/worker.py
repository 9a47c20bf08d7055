"""What lives from the first training step to the last: models, sampler, environments, task lists.

    tasks ── requests ──> roll_out ──> (a method learns) ──> sync ──> evaluate, save
                           engine       policy                policy weights
                           + pool       optimizer             into the engine

One `Worker` per process; which of these happen in a step, and in which order, is written in
`train.py`. With several processes each plays its share of the tasks and then holds all results
(`scale/distributed.py`); rank 0 writes the files.

Read next: `run/session.py`.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

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
from envclient import EnvPool, EnvPools, local_server
from envs import env_name, tasks_by_env
from losses import FixedKLController
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
from run.progress import phase, playing
from sampling.fleet import FleetEngine, Served, start_servers
from sampling.vllm_engine import make_engine
from scale import distributed, precision, sync
from scale.lora import add_lora, save_adapter
from scale.memory import choose_keep, keep_for_backward, sampler_share
from trajectory import RolloutHandler
from update import Learner
from warmstart import start_model

if TYPE_CHECKING:
    from run.session import StopRequests


class Worker:
    """Policy, sampler, environments and task lists of one process. Without play and evaluation it
    has no sampler and no environment.

    Raises:
        Misuse: what only the tasks, the model or the first prompt reveal.
    """

    openings: list[list[int]]  # token ids of one task's opening per environment
    num_probes = 2  # openings that are sampled from and scored again after each weight sync
    kl_controller: FixedKLController | None = None
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
            if config.engine_url:  # those servers may hold another run's weights
                self.load_into_engine()

    def choose_arithmetic(self) -> None:
        """Seed, deterministic kernels, number format, device."""
        c = self.config
        if c.deterministic:
            torch.use_deterministic_algorithms(True, warn_only=True)
            if torch.cuda.is_available():  # fast attention adds in any order
                os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
                for kernel in ("flash", "mem_efficient", "cudnn"):
                    getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(False)
        torch.manual_seed(c.seed)
        self.precision = distributed.run_on_rank_0(
            "timing the processor", lambda: precision.choose(c.precision, c.deterministic)
        )
        distributed.say(f"precision: {self.precision.format} ({self.precision.why})")
        self.accelerator = distributed.make_accelerator(self.precision.autocast)
        self.device = self.accelerator.device

    def choose_start(self) -> None:
        """The model to begin with, warmed up if it needs that, and its tokenizer."""
        is_alone = distributed.world_size() == 1  # other ranks would wait for an interrupted one
        interruptible = self.stop.allowed() if is_alone else contextlib.nullcontext()
        with interruptible, clock.advice("the warm start"):
            self.start = start_model(self.config, self.accelerator)
        with value_errors_as_misuse():
            self.tokenizer = load_tokenizer(self.start)
            self.chat = ChatTemplate(self.tokenizer, stop_ids_of(self.start))
        distributed.say(f"model: {self.config.model} ({describe(self.start)}) from {self.start}")
        self.pad_id = self.tokenizer.pad_token_id or 0

    def connect_environments(self, stack: contextlib.ExitStack) -> None:
        """Pools of the servers of --env-addr, or of servers started here, and an opening of each.

        Raises:
            Misuse: an opening and one turn do not fit --max-trajectory-tokens.
        """
        pools = {}
        for config in config_per_env(self.config):
            urls = config.env_addr or (stack.enter_context(local_server(config.env)),)
            with value_errors_as_misuse():
                pool = stack.enter_context(EnvPool(config.env, urls, prompt=prompt_of(config)))
            pools[env_name(config.env)] = pool
        self.pool = EnvPools(pools)
        c, self.openings = self.config, []
        for env, (task, *_) in tasks_by_env(self.tasks).items():
            with self.pool.of(env).client() as client:
                observation = client.reset(task.task_index)
                self.openings.append(self.chat.opening(client.prompt, observation))
            needed = len(self.openings[-1]) + c.max_tokens_per_turn
            if needed > c.max_trajectory_tokens:
                raise Misuse(
                    f"--max-trajectory-tokens {c.max_trajectory_tokens} is too small: the opening "
                    f"of {task.task_id} and one turn need {needed} tokens"
                )

    # Models, sampler

    def load_models(self) -> None:
        """The policy; subclasses add what their method needs beside it."""
        c = self.config
        self.policy = self.fresh_policy()
        model, ranks = self.policy.model, distributed.world_size()
        about = f"{num_parameters(model) / 1e6:.1f}M parameters on {self.device}"
        if c.lora_rank:
            about += f", {num_trainable(model) / 1e6:.2f}M of them trained"
        if ranks > 1:
            about += f", in parts on {ranks} processes"
        distributed.say(f"policy: {about}")
        if 0 < (n := c.learning_rate_decay_steps) < c.steps_per_schedule:
            distributed.say(
                f"note: from step {n} on the learning rate is 1/{n} of --learning-rate; raise "
                f"--learning-rate-decay-steps to keep learning until step {c.steps_per_schedule}"
            )

    def fresh_policy(self) -> Learner:
        """The policy that the run starts from, with an optimizer that has taken no step."""
        c = self.config
        with value_errors_as_misuse():  # a folder without a model, layers that adapters do not fit
            policy = load_policy(self.start, c.share_prefix)
            if c.lora_rank:
                add_lora(policy.lm, c.lora_rank, c.seed)
        return self.learner(policy, c.learning_rate)

    def learner(self, model: Any, learning_rate: float) -> Learner:
        """A model, sharded over the processes, and its optimizer."""
        keep_for_backward(model, choose_keep(self.config.gradient_checkpointing, self.device))
        model = distributed.shard(self.accelerator, model.train())
        return Learner(self.accelerator, model, _optimizer_of(model, learning_rate))

    def renewed(self, learner: Learner) -> Learner:
        """The same model with an optimizer that has taken no step."""
        return learner._replace(optimizer=_optimizer_of(learner.model, self.config.learning_rate))

    def forget_policy(self) -> None:
        """Free the policy before another takes its place. accelerate keeps a reference, and sharded
        models are reference cycles."""
        distributed.forget(self.accelerator, self.policy.model)
        del self.policy
        gc.unfreeze()  # vLLM froze every object that there was when it started
        gc.collect()

    def start_engine(self, stack: contextlib.ExitStack) -> Engine:
        """This rank's sampler: in this process, or a client of servers that all ranks share."""
        c, length = self.config, self.config.max_trajectory_tokens + 1
        served = Served(self.start, length, self.precision.dtype)
        newest = checkpoint.steps_saved(self.run.path)[-1:] or [0]

        def seed_of(rank: int) -> int:
            """vLLM's seed, from the run's seed, the rank and the step to go on from."""
            return sampling_seed(c.seed, newest[0], "engine", rank, turn=0) % 2**31

        urls: Sequence[str] = c.engine_url
        if c.engine_devices:
            servers = start_servers(served, c.engine_devices, seed=seed_of(0))
            urls = distributed.run_on_rank_0(
                "starting the samplers", lambda: stack.enter_context(servers)
            )
        if urls:
            return FleetEngine(urls, self.run.path / "weights", served)
        options: dict[str, Any] = {"dtype": self.precision.dtype}
        if c.engine == "vllm":
            options["seed"] = seed_of(distributed.rank())
            options["gpu_memory_utilization"] = sampler_share(c)
        return make_engine(c.engine, self.start, length, deterministic=c.deterministic, **options)

    def close_engine(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Close the sampler, unless only this rank has failed: vLLM would close the process group,
        which on GPUs waits for all ranks, and the error would not be printed."""
        is_shared = error is None or isinstance(error, KeyboardInterrupt)
        if is_shared or distributed.world_size() == 1 or distributed.is_known_to_all(error):
            self.engine.close()

    # Playing

    def roll_out(
        self, requests: list[RolloutRequest]
    ) -> tuple[list[RolloutHandler], dict[str, float]]:
        """Play all requests: trajectories, and timings of the sampler. After an engine error the
        finished trajectories are written."""
        step, log = requests[0].step, RolloutLog()
        try:
            trajectories = self.play(requests, step - 1, "rollout", log)
        except (EngineError, distributed.RankError):  # raised on all ranks
            finished = [t for part in distributed.gather(log.ended) for t in part]
            self.run.write_trajectories(f"step_{step:06d}", finished)
            raise
        seconds = max(log.seconds, 1e-9)
        return trajectories, {
            "rollout/generated_tokens_per_s": log.generated_tokens / seconds,
            "rollout/engine_idle_share": log.engine_idle_s / seconds,
        }

    def play(
        self, requests: Sequence[RolloutRequest], weight_version: int, label: str, log: RolloutLog
    ) -> list[RolloutHandler]:
        """`rollout.collect` on all ranks: each plays a share and gets all trajectories, ordered as
        the requests. `log` is this rank's; at the end it holds the numbers of all.
        """
        c, ranks = self.config, distributed.world_size()
        share = share_of(requests, distributed.rank(), ranks)
        settings = RolloutSettings(
            max_tokens_per_turn=c.max_tokens_per_turn,
            max_trajectory_tokens=c.max_trajectory_tokens,
            temperature=c.temperature,
            seed=c.seed,
            max_env_failures=1.0,  # lost ones are counted below, over all ranks
            record_state=c.record_state,
            weight_version=weight_version,
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
        place = {r.trajectory_fields("")["trajectory_id"]: n for n, r in enumerate(requests)}
        handlers = [handler for part, _ in parts for handler in part]
        handlers.sort(key=lambda handler: place[handler.trajectory_id])
        check_failures(handlers, c.max_env_failures)
        return handlers

    def evaluate(self, step: int) -> tuple[dict[str, Any], list[RolloutHandler]]:
        """Held-out tasks played by the policy as it is now: summary and trajectories."""
        c = self.config
        horizons, samples = evaluation_horizons(c), c.samples_at(step)
        requests = all_samples(self.eval_tasks, samples, c.seed, step, horizons)
        trajectories = self.play(requests, step, "held-out evaluation", RolloutLog())
        longest = [max(horizons.values())]
        return summarize(trajectories, samples, longest, step, c.seed), trajectories

    # Learning

    def set_learning_rates(self, step: int) -> None:
        """Linear decay from lr to lr/N over N = `decay_steps` steps, then constant. Independent of
        --steps, so that a run can be resumed to go further."""
        decay_steps = self.decay_steps()
        left = 1 - min(step - 1, decay_steps - 1) / decay_steps
        for name, (_, optimizer) in self.parts().items():
            for group in optimizer.param_groups:
                group["lr"] = self.rates()[name] * left

    def decay_steps(self) -> float:
        return self.config.learning_rate_decay_steps or math.inf

    def rates(self) -> dict[str, float]:
        """The learning rate of each of `parts` at the first step."""
        return {"policy": self.config.learning_rate}

    def parts(self) -> dict[str, tuple[Any, Any]]:
        """What is trained, and saved: name -> (model, optimizer)."""
        return {"policy": (self.policy.model, self.policy.optimizer)}

    # Weights to the sampler, weights to the disk

    def sync(self, step: int, trajectories: Sequence[RolloutHandler]) -> tuple[float, int]:
        """Hand new weights to the sampler; (mean |sampler - trainer| log-prob, bytes).

        Raises:
            SyncError: the two differ by more than --max-sync-error, on some rank.
        """
        probes = trajectories[: self.num_probes]
        return self.sync_probed(step, [t.input_ids[: t.turns[0].action_span[0]] for t in probes])

    def sync_probed(self, step: int, openings: Sequence[list[int]]) -> tuple[float, int]:
        """`sync`, with the tokens to sample after."""
        c = self.config
        num_bytes = self.load_into_engine()
        room = c.max_trajectory_tokens - sync.NUM_PROBED
        openings = [ids[:room] for ids in openings]
        differences = sync.compare(
            self.policy.model, self.engine, openings, c.temperature, self.device, seed=step
        )
        return sync.check(differences, c.max_sync_error, step), num_bytes

    def load_into_engine(self) -> int:
        """Bytes sent. Collective."""
        name = self.precision.dtype if self.config.engine == "vllm" else "float32"
        dtype: torch.dtype = getattr(torch, name)
        with phase("weight sync"):
            return sync.send_weights(self.policy.model, self.engine, dtype)

    def rest(self) -> None:
        """Free the sampler's memory until new weights wake it."""
        if self.config.plays:
            self.engine.sleep()

    @property
    def needs_start(self) -> bool:
        """Whether a resumed run needs the weights that it began with: adapters add to them."""
        return bool(self.config.lora_rank)

    def export(self, folder: Path) -> None:
        """The policy as Hugging Face files. Collective."""
        policy = self.policy.model
        sync.export_policy(self.accelerator, policy, self.tokenizer, folder)
        if self.config.lora_rank:
            target = folder / "adapter" if distributed.rank() == 0 else None
            lm = self.accelerator.unwrap_model(policy).lm
            save_adapter(lm, target, self.start)


def _optimizer_of(model: Any, learning_rate: float) -> torch.optim.Optimizer:
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=learning_rate, weight_decay=0.0, fused=True)


def plan(config: RunConfig, run_dir: Path, num_tasks: int, num_held_out: int) -> list[str]:
    """The first lines of a run, so that a mistake is seen before it has cost hours."""
    c, envs = config, config_per_env(config)
    batch = f"at most {c.trajectories_per_step} trajectories"
    if isinstance(c, Config):
        turns = " and ".join(", then ".join(map(str, own.rounds)) for own in envs)
        batch = f"{c.tasks_per_step} tasks x {c.group_size} samples, at most {turns} turns"
    learns = f"adapters of rank {c.lora_rank}" if c.lora_rank else "all weights"
    sampler = f"{c.engine} samples" if c.plays else "nothing is played"
    held_out = "nothing is held out, so no checkpoint will be known as the best"
    if num_held_out:
        held_out = (
            f"{num_held_out} held out, {c.eval_samples} samples of each every {c.eval_every} "
            f"steps, {c.samples_at(0)} now, at most {max(evaluation_horizons(c).values())} turns"
        )
    elif getattr(c, "hold_out", 0):
        held_out = "the best checkpoint is the one with the lowest held-out loss"
    tasks = f"{num_tasks} of {' and '.join(own.env for own in envs)} to train on"
    return [
        f"run: {c.steps} steps of {c.name}, each of {batch}; files in {run_dir}",
        f"model: {c.model}, {learns} learn, {sampler}",
        f"tasks: {tasks}; {held_out}",
    ]
