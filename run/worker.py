"""What lives from the first training step to the last: models, sampler, environments, task lists.

One `Worker` is one process. It knows how to roll out, score, update, sync, evaluate and save, and
holds no algorithm: which of these happen in a step, and in what order, is written in `train.py`.

    tasks ── requests ──> roll_out ──> (a method learns) ──> sync ──> evaluate, save
                           engine       policy                policy weights
                           + pool       optimizer             into the engine

What reinforcement learning needs beside that, a critic, a reference, a horizon, is in train.py.

Over several processes each has a Worker. They roll out, evaluate and score apart, on their share of
the work, and all of them then hold all results (`scale/distributed.py`); rank 0 writes the files.

What a run keeps on disk, and how it goes on from there, is in `run/session.py`: read next.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from chat import ChatTemplate
from config import Misuse, RunConfig, refusing
from engines import Engine, EngineError
from envclient import EnvPool, EnvPools, local_server
from envs import env_name, tasks_by_world
from evaluate import evaluate_policy
from losses import FixedKLController
from models import (
    describe,
    load_policy,
    load_tokenizer,
    num_parameters,
    num_trained,
    stop_ids_of,
)
from rollout import (
    RolloutLog,
    RolloutRequest,
    RolloutSettings,
    check_failures,
    collect,
    sampling_seed,
    share_of,
)
from run import checkpoint, clock, rundir
from run.interrupt import StopRequests
from run.plan import plan
from run.progress import phase, playing
from runtime.mixture import evaluation_horizons, held_out_tasks, in_each, tasks_of
from runtime.prompts import prompt_of
from sampling.fleet import FleetEngine, Served, start_servers
from sampling.vllm_engine import make_engine
from scale import distributed, precision, sync
from scale.lora import add_lora, save_adapter
from scale.memory import keep_for_backward, sampler_share, what_to_keep
from trajectory import RolloutHandler
from update import Learner
from warmstart import start_model


class Worker:
    """What lives from the first step to the last: policy, sampler, environments, task lists. A
    method that plays nothing, and evaluates nothing, gets no sampler and no environment.

    Raises:
        Misuse: what only the tasks, the model or the first prompt reveal.
    """

    openings: list[list[int]]  # a task's of each world, as token ids
    num_probes = 2  # openings that are sampled from and scored again after each weight sync
    kl_controller: FixedKLController | None = None  # of a method that has one
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
        ranks = distributed.world_size()
        with refusing():
            self.tasks = tasks_of(config)
            self.eval_tasks = held_out_tasks(config)
        for line in plan(config, run.path, len(self.tasks), len(self.eval_tasks)):
            distributed.say(line)
        if config.deterministic:
            torch.use_deterministic_algorithms(True, warn_only=True)
            if torch.cuda.is_available():  # whose fast attention adds in any order, with a warning
                os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
                for fast in ("flash", "mem_efficient", "cudnn"):
                    getattr(torch.backends.cuda, f"enable_{fast}_sdp")(False)
        torch.manual_seed(config.seed)
        self.precision = distributed.first(
            "timing the processor", lambda: precision.choose(config.precision, config.deterministic)
        )
        distributed.say(f"precision: {self.precision.format} ({self.precision.why})")
        self.accelerator = distributed.make_accelerator(self.precision.autocast)
        self.device = self.accelerator.device
        alone = ranks == 1  # others would wait for a rank that was interrupted
        allowed = self.stop.allowed() if alone else contextlib.nullcontext()
        with allowed, clock.advice("the warm start"):
            self.start = start_model(config, self.accelerator)
        with refusing():
            self.tokenizer = load_tokenizer(self.start)
            self.chat = ChatTemplate(self.tokenizer, stop_ids_of(self.start))
        distributed.say(f"model: {config.model} ({describe(self.start)}) from {self.start}")
        self.pad_id = self.tokenizer.pad_token_id or 0
        if config.plays:
            pools = {env_name(own.env): open_pool(own, stack) for own in in_each(config)}
            self.pool = EnvPools(pools)
            self.check_budget()
        with phase("loading the models"), clock.advice("loading the models"):
            self.load_models()
        if not config.plays:
            return
        with phase("starting the sampler"):
            self.engine = self.start_engine(stack)
        stack.push(self.close_engine)
        if config.engine_url:  # they may hold what another run has left there
            self.load_into_engine()

    # Models, sampler

    def load_models(self) -> None:
        """The policy, as it begins: what a method needs beside it, its worker adds."""
        c = self.config
        self.policy = self.fresh_policy()
        model, ranks = self.policy.model, distributed.world_size()
        line = f"policy: {num_parameters(model) / 1e6:.1f}M parameters on {self.device}"
        line += f", {num_trained(model) / 1e6:.2f}M of them trained" if c.lora_rank else ""
        distributed.say(line + (f", in parts on {ranks} processes" if ranks > 1 else ""))
        if 0 < c.learning_rate_decay_steps < c.steps_in_a_row:
            n = c.learning_rate_decay_steps
            distributed.say(
                f"note: from step {n} on the learning rate is 1/{n} of --learning-rate; to go on "
                f"learning until step {c.steps_in_a_row}, raise --learning-rate-decay-steps"
            )

    def fresh_policy(self) -> Learner:
        """The policy that the run starts from, with an optimizer that has seen nothing."""
        c = self.config
        with refusing():  # a folder without a model, layers that adapters do not fit
            policy = load_policy(self.start, c.share_prefix)
            if c.lora_rank:
                add_lora(policy.lm, c.lora_rank, c.seed)
        return self.learner(policy, c.learning_rate)

    def learner(self, model: Any, learning_rate: float) -> Learner:
        """A model, in parts where there are several processes, and its optimizer."""
        keep_for_backward(model, what_to_keep(self.config.gradient_checkpointing, self.device))
        model = distributed.shard(self.accelerator, model.train())
        return Learner(self.accelerator, model, _optimizer_of(model, learning_rate))

    def forget_policy(self) -> None:
        """Free the policy before another takes its place: accelerate keeps what it has prepared,
        and sharded models lie in cycles."""
        distributed.forget(self.accelerator, self.policy.model)
        del self.policy
        gc.unfreeze()  # vLLM has frozen what was there when it started, cycles too
        gc.collect()

    def renewed(self, learner: Learner) -> Learner:
        """The same model with an optimizer that has seen nothing."""
        return learner._replace(optimizer=_optimizer_of(learner.model, self.config.learning_rate))

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
        options: dict[str, Any] = {"dtype": self.precision.dtype}
        if c.engine == "vllm":
            options["seed"] = seed_of(distributed.rank())
            options["gpu_memory_utilization"] = sampler_share(c)
        return make_engine(c.engine, self.start, length, deterministic=c.deterministic, **options)

    def close_engine(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """At the end of a run. vLLM closes the processes' group with it, which on GPUs waits for
        all ranks: after an error of this one alone, which the others do not know of, it is left to
        the end of the process, so that the error is said."""
        is_shared = error is None or isinstance(error, KeyboardInterrupt)
        is_shared |= distributed.world_size() == 1 or distributed.is_known_to_all(error)
        if is_shared:
            self.engine.close()

    def check_budget(self) -> None:
        """Refuse a token budget that a world's first prompt alone fills."""
        c, self.openings = self.config, []
        for world, (task, *_) in tasks_by_world(self.tasks).items():
            with self.pool.of(world).client() as client:
                observation = client.reset(task.task_index)
                self.openings.append(self.chat.opening(client.prompt, observation))
            needed = len(self.openings[-1]) + c.max_tokens_per_turn
            if needed > c.max_trajectory_tokens:
                raise Misuse(
                    f"--max-trajectory-tokens {c.max_trajectory_tokens} is too small: the opening "
                    f"of {task.task_id} and one turn need {needed} tokens"
                )

    # Playing

    def settings(self) -> RolloutSettings:
        c = self.config
        return RolloutSettings(
            max_tokens_per_turn=c.max_tokens_per_turn,
            max_trajectory_tokens=c.max_trajectory_tokens,
            temperature=c.temperature,
            seed=c.seed,
            max_env_failures=c.max_env_failures,
            record_state=c.record_state,
        )

    def roll_out(self, requests: list[RolloutRequest]) -> tuple[list[RolloutHandler], RolloutLog]:
        """All requests, with a progress bar; on an engine error what has finished, on any rank, is
        kept."""
        step, log = requests[0].step, RolloutLog()
        settings = replace(self.settings(), weight_version=step - 1)
        try:
            return self.play(requests, settings, "rollout", log), log
        except (EngineError, distributed.RankError):  # all ranks are here
            ended = [t for own in distributed.gather(log.ended) for t in own]
            self.run.write_trajectories(f"step_{step:06d}", ended)
            raise

    def play(
        self,
        requests: Sequence[RolloutRequest],
        settings: RolloutSettings,
        label: str,
        log: RolloutLog,
    ) -> list[RolloutHandler]:
        """`rollout.collect`, shared out: each rank plays its share of the tasks, and
        all get all results, in the order of the requests."""
        ranks, rank = distributed.world_size(), distributed.rank()
        share = share_of(requests, rank, ranks)
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
        place = {r.heading("")["trajectory_id"]: n for n, r in enumerate(requests)}
        handlers = [handler for part, _ in parts for handler in part]
        handlers.sort(key=lambda handler: place[handler.trajectory_id])
        check_failures(handlers, settings.max_env_failures)
        return handlers

    # Learning

    def set_learning_rates(self, step: int) -> None:
        """A function of the step alone, not of --steps: a run resumed to go further than it was
        first meant to equals one that was meant to from the start."""
        decay_steps = self.decay_steps()
        left = 1 - min(step - 1, decay_steps - 1) / decay_steps
        for name, (_, optimizer) in self.parts().items():
            for group in optimizer.param_groups:
                group["lr"] = self.rates()[name] * left

    def decay_steps(self) -> float:
        """In how many steps the rate falls to almost nothing."""
        return self.config.learning_rate_decay_steps or math.inf

    def rates(self) -> dict[str, float]:
        """The learning rates that `parts` begin with."""
        return {"policy": self.config.learning_rate}

    def sync(self, step: int, trajectories: Sequence[RolloutHandler]) -> tuple[float, int]:
        """New weights into the sampler; (mean |sampler - trainer| log-prob, bytes).

        Raises:
            SyncError: the two differ by more than --max-sync-error, on some rank.
        """
        probes = trajectories[: self.num_probes]
        return self.sync_probed(step, [t.input_ids[: t.turns[0].action_span[0]] for t in probes])

    def sync_probed(self, step: int, openings: Sequence[list[int]]) -> tuple[float, int]:
        """`sync`, where there are token ids to sample behind but no trajectories."""
        c = self.config
        num_bytes = self.load_into_engine()
        room = c.max_trajectory_tokens - sync.NUM_PROBED  # the sampler takes no longer ones
        cut = [ids[:room] for ids in openings]
        differences = sync.compare(
            self.policy.model, self.engine, cut, c.temperature, self.device, seed=step
        )
        return sync.check(differences, c.max_sync_error, step), num_bytes

    def load_into_engine(self) -> int:
        """The policy's weights to the sampler; bytes sent. Collective."""
        word = self.precision.dtype if self.config.engine == "vllm" else "float32"
        dtype: torch.dtype = getattr(torch, word)
        with phase("weight sync"):
            return sync.send_weights(self.policy.model, self.engine, dtype)

    def rest(self) -> None:
        """The sampler's memory is the trainer's until new weights wake it."""
        if self.config.plays:
            self.engine.sleep()

    @contextlib.contextmanager
    def room_to_save(self) -> Iterator[None]:
        """On a GPU the sampler sleeps while a checkpoint is written, if an optimizer has done
        nothing yet: it gets its state then, and gradients for it, as large as the weights. A
        sampler that fails is another phase's trouble."""
        is_fresh = not all(optimizer.state for _, optimizer in self.parts().values())
        if not (is_fresh and self.config.plays and self.device.type != "cpu"):
            yield
            return
        with contextlib.suppress(EngineError):
            self.rest()
        yield
        with contextlib.suppress(EngineError):
            self.load_into_engine()

    # Measuring, and what a checkpoint holds

    def evaluate(self, step: int) -> tuple[dict[str, Any], list[RolloutHandler]]:
        """Held-out tasks played by the policy as it is now: summary and trajectories."""
        c = self.config

        def play(
            requests: Sequence[RolloutRequest], settings: RolloutSettings
        ) -> list[RolloutHandler]:
            return self.play(requests, settings, "held-out evaluation", RolloutLog())

        horizons = evaluation_horizons(c)
        tasks, samples = self.eval_tasks, c.samples_at(step)
        settings = replace(self.settings(), weight_version=step)
        return evaluate_policy(play, tasks, samples, settings, horizons, step)

    @property
    def returns_to_start(self) -> bool:
        """Whether a resumed run needs the weights that it began with: adapters stand on them."""
        return bool(self.config.lora_rank)

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
        return {"policy": (self.policy.model, self.policy.optimizer)}


def open_pool(config: RunConfig, stack: contextlib.ExitStack) -> EnvPool:
    """The servers of one world: those that are given, or one that is started here."""
    urls = config.env_addr or (stack.enter_context(local_server(config.env)),)
    with refusing():
        return stack.enter_context(EnvPool(config.env, urls, prompt=prompt_of(config)))


def _optimizer_of(model: Any, learning_rate: float) -> torch.optim.Optimizer:
    learning = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(learning, lr=learning_rate, weight_decay=0.0, fused=True)
