"""The options of a training run: what they mean, their defaults, and the command line.

Each option is a field of a dataclass. The comment beside it, or the string below it, is its --help
text. `RunConfig` holds the options that all methods need, and `Config` adds those of train.py.
sft.py, dpo.py and agentevol.py declare further options. A command line is parsed once
(`read_command_line`) and checked once (`checked`). Options that the user leaves out get their
values from a preset:

    laptop   a 135M model on the environment's short tasks, for two CPU cores: the default without
             a GPU, and for the small models (smollm2-135m, tiny) on every machine
    paper    AgentGym-RL's settings for Qwen2.5-3B: the default with a GPU
    one-gpu  settings with which another project trained the same model on one GPU (LoRA)
    none     the defaults in this file, and all training tasks of the environment

Read next: data.py.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import pydantic
import tyro
from tyro.constructors import PrimitiveConstructorSpec

import envs
import formats
from envs import Task, env_name, names_of, settings_of
from envs.http import checked_url
from envs.local import LOCAL, check_local
from run.errors import Misuse as Misuse
from run.errors import value_errors_as_misuse as value_errors_as_misuse
from run.files import read_text
from scale.default_models import SMALL_MODELS, check_length, check_model
from schedulers import check_schedule

T = TypeVar("T", bound=Any)
Options = TypeVar("Options", bound="RunConfig")
# `--env textcraft babyai` is stored as "textcraft+babyai".
EnvNames = Annotated[
    str,
    PrimitiveConstructorSpec(
        nargs="*",
        metavar="NAME ...",
        instance_from_str="+".join,
        is_instance=lambda value: isinstance(value, str),
        str_from_instance=names_of,
    ),
]


EngineName = Literal["vllm", "transformers"]
# vLLM has no wheel for a Mac; transformers samples more slowly, on every machine.
DEFAULT_ENGINE: EngineName = "vllm" if importlib.util.find_spec("vllm") else "transformers"


def flag(name: str) -> str:
    """--run-dir for "run_dir"."""
    return "--" + name.replace("_", "-")


# ------------------------------------------------------------------------------------- the options


@dataclass(frozen=True)
class UpdateOptions:
    """Options of an update, shared by all methods: batches, memory, gradients."""

    temperature: float = 1.0  # sampling temperature in training and evaluation [paper: 1.0]
    max_grad_norm: float = 1.0  # clip gradients to this global norm [paper: 1.0]
    mini_batch_size: int = 64  # trajectories per optimizer step [paper: 64, from 8 tasks]
    max_tokens_per_micro_batch: int = 2048
    """maximum tokens per forward and backward pass, with padding; lower it if memory runs out"""
    share_prefix: bool = True
    """compute the common prefix of a task's samples only once, if that is faster"""


@dataclass(frozen=True)
class Objective(UpdateOptions):
    """Options of an RL update: the loss and its penalties."""

    clip_ratio: float = 0.2  # clip range epsilon of the policy ratio [paper: 0.2]
    clip_ratio_high: float | None = None
    """upper end of the clip range, if it is another one (DAPO: 0.28);
    if not given, --clip-ratio [paper: 0.2]"""
    ratio: Literal["token", "sequence"] = "token"
    """clip the policy ratio of each token, or of a trajectory as a whole (sequence: GSPO, with
    --clip-ratio 3e-4 --clip-ratio-high 4e-4 and --loss-agg seq-mean)"""
    dual_clip: float = 3.0
    """leave out tokens with a negative advantage whose policy ratio is above this (acts only if a
    step has several optimizer steps: before the first, ratios are 1); 0: off [paper: 0]"""
    value_clip: float = 0.5  # clip range of the critic's values, in units of return [paper: 0.5]
    kl_loss_coef: float = 0.0
    """weight of the KL term (against the initial policy) in the loss [paper: 1e-3]"""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"  # estimator for the KL loss term [paper: k3]
    kl_clamp: float = 0.0  # limit of a token's KL in the loss (nats); 0: no limit [paper: 10]
    entropy_coef: float = 0.0  # weight of the entropy bonus in the loss [paper: 1e-3]
    sampler_is_cap: float = 2.0
    """cap on the importance weights (trainer's probability / sampler's probability);
    0: do not use weights [paper: no weights]"""
    loss_agg: Literal["token-mean", "seq-mean", "constant"] = "token-mean"
    """average the policy loss over all tokens (token-mean); over trajectories, each with the same
    weight (seq-mean); or over trajectories, each token with the same weight (constant: Dr. GRPO)
    [paper: seq-mean]"""
    ppo_epochs: int = 1  # passes over each step's trajectories [paper: 1]

    def num_optimizer_steps(self, num_rows: int) -> int:
        """Number of optimizer steps on a batch of `num_rows` trajectories."""
        return self.ppo_epochs * math.ceil(num_rows / self.mini_batch_size)


@dataclass(frozen=True)
class RunConfig(UpdateOptions):
    """Options that all methods need: environment, model, sampler, limits, evaluation, files."""

    method: ClassVar[str] = ""  # recorded in config.json; a run resumes only with its method
    program: ClassVar[str] = ""
    ignored_by_sentinels: ClassVar[frozenset[str]] = frozenset()  # names of metrics
    zero_allowed: ClassVar[frozenset[str]] = frozenset()  # may be 0 although POSITIVE lists them
    outside_presets: ClassVar[frozenset[str]] = frozenset()  # options that presets do not set
    paper_values: ClassVar[dict[str, Any]] = {}  # what --preset paper sets for this method only

    # Defaults
    preset: Literal["laptop", "paper", "one-gpu", "none"] = "laptop"
    """values for the options that you leave out:
    laptop (for two CPU cores; the default without a GPU and for smollm2-135m and tiny),
    paper (AgentGym-RL's values; the default otherwise), one-gpu (LoRA; one run of another project
    solved 82 of TextCraft's 100 test tasks with them), or none (the defaults in config.py)"""
    config: str | None = None  # config.json of another run; its options become the defaults
    # The environment and its tasks
    env: EnvNames = "textcraft"
    """one or more of textcraft, babyai, sciworld, searchqa, webarena,
    or your own package.module:Class"""
    env_weights: tuple[int, ...] = ()
    """number of tasks to draw from each environment in turn, e.g. 2 1;
    if not given, one from each"""
    tasks: str | None = None
    """training tasks: a JSON file with a list of ids,
    or the name of one of the environment's own lists; if not given, see --split"""
    split: Literal["train", "test"] | None = None
    """split to train on [paper: train];
    if not given, short tasks for smollm2-135m and tiny, otherwise the train split"""
    subtasks: tuple[str, ...] = ()
    """train only on these sub-tasks, e.g. "depth 1"; if not given, on all"""
    env_addr: tuple[str, ...] = ()
    """URLs of running environment servers (for several environments, NAME=http://...),
    or `local` to run the environment in this process without a server;
    if not given, a server is started on this machine"""
    prompt: str | None = None
    """file with a prompt to use instead of the environment's: either JSON messages
    [{"role", "content"}, ...], or plain text, which replaces only the instruction"""
    action_format: formats.Name = "react"
    """how the policy writes an action: react (a Thought and an Action line), function_calling
    (JSON, in the style of the model's chat template), or code (a line of Python)"""
    max_actions_per_turn: int = 1
    """let a turn have several actions, which are played until one fails or the episode ends"""
    agent: Literal["plain", "plan", "reflect"] = "plain"
    """what the policy writes besides actions: nothing (plain), a plan before the first (plan), or
    a reflection after a failed attempt, which starts the task again (reflect)"""
    attempts: int = 2  # at a task with --agent reflect; each has up to --rounds turns
    # The model
    model: str = "smollm2-135m"
    """smollm2-135m, tiny, a checkpoint folder, or a hub id [paper: Qwen2.5-3B]"""
    engine: EngineName = DEFAULT_ENGINE
    """library that samples the actions; if not given, vllm if it is installed"""
    enforce_eager: bool = False
    """make vLLM skip compilation; it starts a minute or two sooner but samples more slowly"""
    engine_url: tuple[str, ...] = ()
    """URLs of running vLLM servers, http://host:port; if not given, sample in this process"""
    engine_devices: tuple[str, ...] = ()
    """GPUs on which to start vLLM servers, e.g. 2 3; if not given, sample in this process"""
    warm_start: str = "auto"
    """how to get the initial policy: auto (first fine-tune smollm2-135m or tiny on demonstrations;
    the result is cached), never (start from --model as it is),
    or a checkpoint folder to start from"""
    # Training
    steps: int = 60  # total training steps, including those before a resume [paper: 300]
    rounds: tuple[int, ...] = (6,)
    """maximum turns per episode; give several values for a growing horizon [paper: 10 20 30]"""
    lora_rank: int = 0
    """rank of LoRA adapters (raise --learning-rate tenfold for them);
    0: train all weights [paper: 0]"""
    lora_alpha: int | None = None  # adapters count alpha / rank times; if not given, twice
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """number format to compute in; auto: bf16 on a GPU that supports it;
    on a CPU, whichever format is faster when timed"""
    gradient_checkpointing: bool = False
    """recompute activations in the backward pass: saves memory but is a third slower [paper: on]"""
    max_tokens_per_turn: int = 80  # maximum sampled tokens per turn [paper: 512]
    max_trajectory_tokens: int = 1536
    """maximum tokens per trajectory, including the prompt [paper: 10752]"""
    learning_rate: float = 4e-5  # learning rate of the policy (AdamW) [paper: 1e-6]
    learning_rate_decay_steps: int = 60
    """decay the learning rate linearly to 1/N of its value over N steps, then hold it constant;
    0: no decay [paper: 0]"""
    # Limits
    max_sync_error: float = 0.1
    """stop if sampler and trainer log-probs differ by more than this on average (nats)"""
    max_env_failures: float = 0.2
    """stop if an environment loses more than this share of a step's trajectories (0..1)"""
    on_collapse: Literal["stop", "warn", "off"] = "stop"  # what to do at signs of training collapse
    # Evaluation, files
    eval_every: int = 20
    """evaluate on held-out tasks before the first step, every N steps, and at the end; 0: never"""
    eval_tasks: str | None = None
    """held-out tasks, in the same format as --tasks;
    if not given, short held-out tasks for smollm2-135m and tiny, otherwise the test split"""
    eval_subtasks: tuple[str, ...] | None = None
    """evaluate only on these sub-tasks; if not given, on those of --subtasks"""
    eval_samples: int = 4  # episodes per held-out task [paper: 1]
    eval_start_samples: int = 1
    """episodes per held-out task in the evaluation before the first step"""
    eval_rounds: int | None = None
    """maximum turns per evaluation episode [paper: 30]; if not given, the largest of --rounds"""
    eval_temperatures: tuple[float, ...] = ()
    """sampling temperatures of the evaluations; the first one decides which checkpoint is the best;
    if not given, --temperature"""
    stop_at: float | None = None
    """stop when held-out success reaches this (0..1); if not given, never"""
    save_every: int = 20
    """write a checkpoint every N steps and at the end; kill -9 loses the steps since [paper: 25]"""
    keep_last: int = 2  # how many of the latest checkpoints to keep, besides the best
    run_dir: str | None = None
    """folder of the run; if not given, runs/<env>-<method>-<date-time>"""
    resume: bool = False  # continue the run in --run-dir from its latest checkpoint
    log_to: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """also send each step's metrics to these trackers; install their packages first"""
    seed: int = 0  # seed for task order, environments and sampling
    deterministic: bool = False
    """make the run bitwise repeatable (tested on CPUs):
    sample with transformers in float32, one sequence at a time"""
    record_state: bool = False  # record the environment's state (inventory, map) for the viewer

    @property
    def name(self) -> str:
        """Short name, used for the run's folder and its first log line."""
        return self.method

    @property
    def plays(self) -> bool:
        """Whether the policy plays episodes, for training or evaluation."""
        return bool(self.eval_every)

    @property
    def asks_oracle(self) -> bool:
        """Whether the environment's oracle says what it would do at each turn of the policy."""
        return getattr(self, "teacher", None) in ORACLES

    @property
    def needs_environment(self) -> bool:
        """Whether the policy plays, or the oracle demonstrates for the warm start."""
        return self.plays or (self.warm_start == "auto" and self.model in SMALL_MODELS)

    @property
    def evaluation_rounds(self) -> int:
        return self.eval_rounds or max(self.rounds)

    @property
    def evaluation_temperatures(self) -> tuple[float, ...]:
        return self.eval_temperatures or (self.temperature,)

    @property
    def evaluation_subtasks(self) -> tuple[str, ...]:
        return self.subtasks if self.eval_subtasks is None else self.eval_subtasks

    @property
    def trajectories_per_step(self) -> int:
        """Maximum number of trajectories in one update."""
        return self.mini_batch_size

    @property
    def fixed_on_resume(self) -> frozenset[str]:
        """Options in CHANGEABLE_ON_RESUME that this method does not allow to change."""
        return frozenset()

    @property
    def steps_per_schedule(self) -> int:
        """Length of the learning-rate schedule; AgentEvol restarts it in each iteration."""
        return self.steps

    def samples_at(self, step: int) -> int:
        """Episodes per held-out task in the evaluation after `step`."""
        return self.eval_samples if step else min(self.eval_start_samples, self.eval_samples)

    def check(self) -> None:
        """Raise ValueError for impossible values and combinations."""
        check_ranges(self)
        check_environments(self)
        check_attempts(self.agent, self.attempts)
        if self.stop_at is not None and not (self.stop_at and self.eval_every):
            raise Misuse("--stop-at needs evaluations: it and --eval-every must both be above 0")
        turn, trajectory = self.max_tokens_per_turn, self.max_trajectory_tokens
        if turn >= trajectory:
            limit = f"--max-trajectory-tokens {trajectory}"
            raise Misuse(f"--max-tokens-per-turn {turn} must be below {limit}")
        if self.engine_url and self.engine_devices:
            raise Misuse("--engine-url and --engine-devices cannot be combined; give only one")
        if (self.engine_url or self.engine_devices) and self.engine != "vllm":
            need = "need --engine vllm, without --deterministic"
            raise Misuse(f"--engine-url and --engine-devices {need}")
        if self.plays and not self.engine_url:
            check_engine(self.engine)
        for name in self.log_to:
            if importlib.util.find_spec(name) is None:
                raise Misuse(f"--log-to {name} needs a package: pip install {name}")

    def unused_options(self) -> Iterator[tuple[str, str]]:
        """(option, reason) for each option without effect in this run; shown if the user set it."""
        return iter(())

    def notes(self) -> Iterator[str]:
        """Warnings about a run that is valid but perhaps not what the user meant."""
        return iter(())


# The environment's own player as --teacher, with thoughts and without
ORACLES = ("oracle", "oracle-actions")
LOW_IN_IMITATION = frozenset({"policy/entropy"})  # close to 0 is success there, not collapse
# Algorithms that compare the samples of a task, those with a critic, and those that use an option.
GROUP_ALGORITHMS, CRITIC_ALGORITHMS = ("grpo", "rloo", "gigpo"), ("ppo",)
USED_BY = {
    "gamma": ("ppo", "reinforce_plus_plus", "gigpo"),
    "gigpo_weight": ("gigpo",),
    "lam": ("ppo",),
    "critic_learning_rate": CRITIC_ALGORITHMS,
    "value_clip": CRITIC_ALGORITHMS,
    "skip_zero_variance": ("grpo", "rloo"),  # gigpo compares turns, too, so it drops no group
    "scale_by_std": ("grpo", "gigpo"),
    "dynamic_sampling": GROUP_ALGORITHMS,
}


@dataclass(frozen=True)
class Config(RunConfig, Objective):
    """Train an LLM agent with multi-turn reinforcement learning."""

    method: ClassVar[str] = "rl"
    program: ClassVar[str] = "train.py"

    # The algorithm
    algorithm: Literal["grpo", "ppo", "rloo", "reinforce_plus_plus", "gigpo", "distill"] = "grpo"
    """advantage estimator; ppo also trains a critic; distill learns from --teacher instead of
    rewards [paper: grpo]"""
    teacher: str | None = None
    """(distill) checkpoint folder or hub id of a model with the same tokenizer, which scores the
    policy's own tokens, or the URL of a vLLM server with such a model; or oracle, the
    environment's own player, whose action is imitated in the states that the policy reaches
    (oracle-actions: without its thoughts)"""
    gae_unit: Literal["token", "turn"] = "token"
    """(ppo) what a time step is: with turn, all tokens of a turn have the same advantage, and
    --gamma and --lam are per turn"""
    gigpo_weight: float = 1.0
    """(gigpo) weight of the comparison between turns that began in the same state"""
    rounds_scheduler: Literal["fixed", "scaling_inter_stepwise", "stepwise"] = "fixed"
    """fixed: keep the same horizon; scaling_inter_stepwise: move to the next value of --rounds
    every --steps-scaling-inter steps; stepwise: the same, but they may decrease (a control
    experiment) [paper: the first two]"""
    steps_scaling_inter: int = 100  # steps at each horizon, unless it is fixed [paper: 100]
    tasks_per_step: int = 8  # tasks drawn per step [paper: 32]
    group_size: int = 8  # trajectories per task [paper: 8]
    task_sampling: Literal["uniform", "uncertain"] = "uniform"
    """uniform: play all tasks in turn; uncertain: draw a task with probability proportional to
    p (1 - p), where p is its estimated success rate (see docs/commands.md) [paper: uniform]"""
    critic_learning_rate: float = 1e-4  # learning rate of PPO's critic (AdamW) [paper: 1e-5]
    gamma: float = 1.0  # discount factor per policy token (ppo, reinforce_plus_plus) [paper: 1.0]
    lam: float = 1.0  # lambda of generalized advantage estimation (ppo) [paper: 1.0]
    kl_coef: float = 0.0
    """weight of the KL penalty (against the initial policy) in the reward [paper: 0.0]"""
    reset_adapter_every: int = 0
    """after every N steps, merge the LoRA adapters into the model, take the result as the new
    reference, and continue with new adapters and a new optimizer; 0: never [paper: 0]"""
    skip_zero_variance: bool = True
    """(grpo, rloo) leave out groups whose returns are all equal: their advantages are 0;
    ignored with --kl-coef or --overlong-penalty, because the advantages may not be 0"""
    dynamic_sampling: int = 0
    """(grpo, rloo, gigpo) replace each task whose samples all earned the same return, in at most
    N more rounds of rollouts per step (DAPO); 0: off"""
    keep_uncertain: float = 1.0
    """train only on this share of a step's groups, those with the largest spread of returns
    (StarPO-S); 1: on all"""
    scale_by_std: bool = True
    """(grpo) divide advantages by the standard deviation of the group's returns; Dr. GRPO does not
    [paper: on]"""
    overlong_penalty: int = 0
    """subtract up to 1 from the return of a trajectory that ends within the last N tokens of
    --max-trajectory-tokens, or is cut there (DAPO); 0: off"""
    shuffle_rewards: bool = False
    """control experiment: shuffle each step's rewards, so that nothing can be learned"""

    @property
    def name(self) -> str:
        return self.algorithm

    @property
    def ignored_by_sentinels(self) -> frozenset[str]:  # type: ignore[override]
        # Groups of equal returns matter only to algorithms that compare within a group.
        is_grouped = self.algorithm in GROUP_ALGORITHMS
        ignored = frozenset(() if is_grouped else ("train/groups_zero_variance",))
        return ignored | (LOW_IN_IMITATION if self.asks_oracle else frozenset())

    @property
    def plays(self) -> bool:
        return True

    @property
    def pays_within_groups(self) -> bool:
        """Whether advantages can differ within a group of equal returns."""
        by_turn = self.algorithm == "gigpo"
        return bool(by_turn or self.kl_coef or self.overlong_penalty)

    @property
    def trajectories_per_step(self) -> int:
        return self.tasks_per_step * self.group_size

    @property
    def needs_critic(self) -> bool:
        return self.algorithm in CRITIC_ALGORITHMS

    def check(self) -> None:
        super().check()
        for c in config_per_env(self):
            check_schedule(c.rounds_scheduler, c.rounds)
        if 0 < self.sampler_is_cap < 1:
            raise Misuse(f"--sampler-is-cap {self.sampler_is_cap} must be 0 (off) or at least 1")
        if self.clip_ratio_high is not None and self.clip_ratio_high < self.clip_ratio:
            raise Misuse(f"--clip-ratio-high {self.clip_ratio_high} is below --clip-ratio")
        if (self.algorithm == "distill") != (self.teacher is not None):
            raise Misuse(
                "--algorithm distill and --teacher need each other "
                "(--teacher None drops the one in --config)"
            )
        if self.teacher and is_url(self.teacher):
            check_addresses("teacher", (self.teacher,))
            if self.temperature != 1:
                raise Misuse("a --teacher on a server scores at --temperature 1")
        if self.teacher and self.kl_coef:
            raise Misuse("--kl-coef changes rewards, but a --teacher replaces them: leave it out")
        if not self.keep_uncertain:
            raise Misuse("--keep-uncertain must be above 0")
        if self.keep_uncertain < 1 and self.group_size < 2:
            raise Misuse("--keep-uncertain compares the samples of a task: --group-size 2 or more")
        if self.dynamic_sampling and self.algorithm not in GROUP_ALGORITHMS:
            raise Misuse(f"--dynamic-sampling compares samples; {self.algorithm} does not")
        if self.gae_unit == "turn" and not self.needs_critic:
            raise Misuse("--gae-unit turn needs --algorithm ppo")
        if self.overlong_penalty > self.max_trajectory_tokens:
            raise Misuse("--overlong-penalty must be at most --max-trajectory-tokens")
        if 0 < self.dual_clip <= 1:
            raise Misuse(f"--dual-clip {self.dual_clip} must be 0 (off) or above 1")
        if self.group_size < 2 and self.algorithm in GROUP_ALGORITHMS:
            raise Misuse(f"--group-size 1: {self.algorithm} compares samples; give at least 2")
        if self.reset_adapter_every and not self.lora_rank:
            raise Misuse("--reset-adapter-every needs LoRA adapters: set --lora-rank")
        if self.kl_loss_coef and self.kl_estimator == "k1":
            raise Misuse("--kl-estimator k1 has no gradient in expectation; use k2 or k3")

    def unused_options(self) -> Iterator[tuple[str, str]]:
        for name, users in USED_BY.items():
            if self.algorithm not in users:
                yield name, f"only --algorithm {' or '.join(users)} uses it"
        if self.rounds_scheduler == "fixed":
            yield "steps_scaling_inter", "--rounds-scheduler is fixed"
        for name in () if self.kl_loss_coef else ("kl_estimator", "kl_clamp"):
            yield name, "--kl-loss-coef is 0"
        num_kept = math.ceil(self.keep_uncertain * self.tasks_per_step) * self.group_size
        if self.asks_oracle:
            unused = ("clip_ratio", "kl_loss_coef", "entropy_coef", "loss_agg", "sampler_is_cap")
            for name in (*unused, "clip_ratio_high", "ratio", "dual_clip"):
                yield name, "the oracle's actions are imitated (losses.imitation_loss)"
        elif self.num_optimizer_steps(num_kept) == 1:
            for name in ("clip_ratio_high", "ratio"):
                yield name, "the only update of a step has ratio 1; lower --mini-batch-size"
        for name in ("overlong_penalty", "shuffle_rewards") if self.teacher else ():
            yield name, "a --teacher replaces the rewards"
        if self.agent != "reflect":
            yield "attempts", f"--agent {self.agent} has one"
        if self.mini_batch_size > (n := self.trajectories_per_step):
            yield "mini_batch_size", f"a step has only {n} trajectories"

    def notes(self) -> Iterator[str]:
        last_change = self.steps_scaling_inter * (len(self.rounds) - 1)
        if self.rounds_scheduler != "fixed" and self.steps <= last_change:
            steps = f"but --steps is {self.steps}"
            yield f"the last of --rounds begins only after step {last_change}, {steps}"


# ------------------------------------------------------------------------------------------ presets

PAPER: dict[str, Any] = {
    "model": "Qwen/Qwen2.5-3B-Instruct",
    "warm_start": "never",
    "split": "train",
    "rounds_scheduler": "scaling_inter_stepwise",
    "rounds": (10, 20, 30),
    "steps_scaling_inter": 100,
    "steps": 300,
    "tasks_per_step": 32,
    "group_size": 8,
    "mini_batch_size": 64,
    "max_tokens_per_turn": 512,
    "max_trajectory_tokens": 10752,
    "max_tokens_per_micro_batch": 16384,
    "gradient_checkpointing": True,
    "learning_rate": 1e-6,
    "critic_learning_rate": 1e-5,
    "learning_rate_decay_steps": 0,
    "kl_loss_coef": 1e-3,
    "kl_clamp": 10.0,
    "dual_clip": 0.0,
    "entropy_coef": 1e-3,
    "loss_agg": "seq-mean",  # its scripts average over micro-batches of one trajectory each
    "save_every": 25,
    "eval_every": 25,
}
# Another project's run on one GPU, not ours: exp32_horizon in Vadim-Lagresle/rl-gym-workout, 82 of
# TextCraft's 100 test tasks with one seed. Its schedules are in epochs of 374 tasks / 4 tasks per
# step = 93.5 steps. Options that are not listed here, such as token limits, are those of PAPER.
ONE_GPU: dict[str, Any] = {
    "lora_rank": 8,
    "lora_alpha": 32,
    "reset_adapter_every": 374,  # 4 epochs
    "steps_scaling_inter": 1403,  # 15 epochs, so --rounds changes after 15 and 30
    "steps": 7480,  # 80 epochs
    "tasks_per_step": 4,
    "group_size": 16,
    "learning_rate": 3e-6,
    "kl_loss_coef": 1e-2,
    "kl_clamp": 0.0,
    "save_every": 94,
    "eval_every": 94,
}
LIST_OPTIONS = ("tasks", "eval_tasks", "subtasks")  # set by `complete`, not `with_preset`


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def preset_of(model: str | None = None) -> str:
    """The default preset: paper with a GPU, except for the small models; otherwise laptop."""
    return "laptop" if model in SMALL_MODELS or not has_gpu() else "paper"


def with_preset(
    preset: str,
    env: str = Config.env,
    kind: type[Options] = Config,  # type: ignore[assignment]
) -> Options:
    """Options of class `kind` with the values that a preset has for `env`.

    With several environments, each number is the largest among them, and --rounds stays empty
    because each environment has its own. Raises ValueError for an unknown preset or environment.
    """
    names = kind.__dataclass_fields__.keys() - kind.outside_presets - set(LIST_OPTIONS)
    settings = []
    for name in names_of(env):
        laptop, paper = settings_of(name).laptop, settings_of(name).paper
        presets: dict[str, Any] = {"laptop": laptop, "paper": {**PAPER, **paper}, "none": {}}
        presets["one-gpu"] = presets["paper"] | ONE_GPU
        if preset not in presets:
            raise ValueError(f"--preset {preset} is not one of {', '.join(presets)}")
        options = Config.__dataclass_fields__.keys() | kind.__dataclass_fields__.keys()
        if unknown := {*laptop, *paper} - options:
            raise Misuse(f"environment {name}: LAPTOP or PAPER has unknown options: {unknown}")
        values = {n: v for n, v in presets[preset].items() if n in kind.__dataclass_fields__}
        config = validated(values, f"environment {name}: {preset.upper()}", kind)
        method_values = kind.paper_values if preset in ("paper", "one-gpu") else {}
        settings.append({n: getattr(config, n) for n in values if n in names} | method_values)
    numbers: dict[str, Any] = {}
    for name in {name for setting in settings for name in setting}:
        candidates = [setting.get(name, getattr(kind, name)) for setting in settings]
        numbers[name] = max((v for v in candidates if v is not None), default=None)
    if len(settings) > 1:
        numbers["rounds"] = ()  # see `config_per_env`
    return replace(kind(preset=preset, env=env), **with_one_horizon(numbers, kind))  # type: ignore[arg-type]


def with_one_horizon(options: dict[str, Any], kind: type[RunConfig]) -> dict[str, Any]:
    """Reduce several --rounds to the largest, for methods without a horizon schedule."""
    if options.get("rounds") and "rounds_scheduler" not in kind.__dataclass_fields__:
        return options | {"rounds": (max(options["rounds"]),)}
    return options


def options(env: str = Config.env, **changes: Any) -> Config:
    """Options for `train.train`: the command line's defaults on this machine, with `changes`.

    >>> options("babyai", model="tiny", steps=4).rounds  # the laptop preset's turns for babyai
    (5,)
    """
    preset = changes.get("preset") or preset_of(changes.get("model"))
    return replace(with_preset(preset, env, Config), **changes)


def complete(config: Options) -> Options:
    """Fill in options that others imply: the task lists, and the engine for --deterministic."""
    if config.deterministic:
        config = replace(config, engine="transformers")
    if len(names_of(config.env)) > 1:
        return config  # `config_per_env` completes the options of each environment
    if config.tasks is not None:
        return replace(config, split=None)
    if config.split is not None:
        return config
    lists = {n: v for n, v in settings_of(config.env).laptop.items() if n in LIST_OPTIONS}
    if config.model not in SMALL_MODELS or config.preset == "none" or not lists:
        return replace(config, split="train")
    user_lists = {name: getattr(config, name) for name in LIST_OPTIONS if getattr(config, name)}
    return replace(config, **(lists | user_lists))


# ----------------------------------------------------------------------------- several environments

# With `--env textcraft babyai --env-weights 2 1` one policy learns in both environments. Each has
# its own task lists, horizon, prompt and servers. `best` is the checkpoint with the highest mean
# of the environments' held-out success.
SINGLE_ENV_OPTIONS = ("tasks", "eval_tasks", "subtasks", "eval_subtasks", "prompt")


def config_per_env(config: Options) -> list[Options]:
    """The complete options of the run for each of its environments.

    >>> [(c.env, c.rounds, c.tasks) for c in config_per_env(options("textcraft+babyai"))]
    [('textcraft', (7,), 'short_train'), ('babyai', (5,), 'simple_train')]
    >>> [c.rounds for c in config_per_env(options("textcraft+babyai", rounds=(9,)))]
    [(9,), (9,)]
    """
    names, configs = names_of(config.env), []
    if len(names) == 1:
        return [config]
    for name in names:
        rounds = config.rounds or with_preset(config.preset, name, type(config)).rounds
        prefix = f"{env_name(name)}="
        addresses = tuple(a.removeprefix(prefix) for a in config.env_addr if a.startswith(prefix))
        one_env = replace(config, env=name, env_weights=(), rounds=rounds, env_addr=addresses)
        configs.append(complete(one_env))
    return configs


def tasks_of(config: RunConfig) -> list[Task]:
    """Training tasks, one environment after the other. Raises ValueError if two environments have
    the same task id."""
    tasks: list[Task] = []
    for c in config_per_env(config):
        tasks += envs.load_tasks(c.env, c.split, c.tasks, c.subtasks)
    env_of: dict[str, str] = {}
    for task in tasks:
        first_env = env_of.setdefault(task.task_id, task.env)
        if first_env != task.env:
            problem = f"{first_env} and {task.env} both have a task {task.task_id}"
            raise ValueError(f"{problem}; change ID_PREFIXES of one of them")
    return tasks


def held_out_tasks(config: RunConfig) -> list[Task]:
    """The tasks of --eval-tasks or of the test split, limited to the sub-tasks of evaluation."""
    tasks: list[Task] = []
    for c in config_per_env(config) if config.eval_every else ():
        split = None if c.eval_tasks else "test"
        tasks += envs.load_tasks(c.env, split, c.eval_tasks, c.evaluation_subtasks)
    return tasks


def horizons_of(config: RunConfig) -> dict[str, int]:
    """Environment -> maximum turns of a training episode at the end of the schedule."""
    return {env_name(c.env): max(c.rounds) for c in config_per_env(config)}


def evaluation_horizons(config: RunConfig) -> dict[str, int]:
    """Environment -> maximum turns of an evaluation episode."""
    return {env_name(c.env): c.evaluation_rounds for c in config_per_env(config)}


# ------------------------------------------------------------------------------------------- checks

POSITIVE = (
    *("steps", "tasks_per_step", "group_size", "mini_batch_size", "ppo_epochs"),
    *("max_tokens_per_micro_batch", "max_tokens_per_turn", "max_trajectory_tokens"),
    *("temperature", "learning_rate", "critic_learning_rate", "max_grad_norm"),
    *("clip_ratio", "clip_ratio_high", "value_clip", "max_sync_error", "save_every", "keep_last"),
    *("eval_samples", "eval_start_samples", "eval_rounds", "eval_temperatures", "lora_alpha"),
    *("max_actions_per_turn", "attempts", "steps_scaling_inter"),
    *("samples", "limit", "env_workers"),  # of evaluate.py
    *("epochs", "num_demonstrations", "iterations", "tasks_per_iteration"),  # of other methods
    *("pairs_per_task", "keep_per_task", "beta", "rounds", "env_weights", "max_rounds"),
)
NOT_NEGATIVE = (
    *("seed", "lora_rank", "reset_adapter_every", "sampler_is_cap", "dual_clip", "eval_every"),
    *("learning_rate_decay_steps", "kl_coef", "kl_loss_coef", "kl_clamp", "entropy_coef"),
    *("sft_coef", "overlong_penalty", "gigpo_weight", "dynamic_sampling"),
)
FRACTIONS = ("gamma", "lam", "max_env_failures", "stop_at", "min_gap", "keep_uncertain")
# The largest value of an option. vLLM accepts temperatures up to 2, NumPy seeds of 32 bits. A list
# of so many steps or episodes still fits into memory.
TEMPERATURES = ("temperature", "eval_temperatures")
LIMITS: dict[str, int] = dict.fromkeys(FRACTIONS, 1) | {"seed": 2**32 - 1}
LIMITS |= dict.fromkeys(TEMPERATURES, 2)
LIMITS |= dict.fromkeys(("steps", "tasks_per_step", "group_size", "ppo_epochs"), 10**6)
LIMITS |= dict.fromkeys(("eval_samples", "eval_start_samples", "samples"), 10**6)
LIMITS |= dict.fromkeys(("rounds", "eval_rounds", "max_rounds", "env_weights"), 10**6)
LIMITS |= dict.fromkeys(("epochs", "iterations", "num_demonstrations"), 10**6)
LARGEST = 10**9  # of all other options
MIN_TEMPERATURE = 0.01  # vLLM replaces a smaller one, so its log-probs would be wrong


def checked(config: Options) -> Options:
    """The options as config.json will hold them: complete, checked, and with absolute paths.

    Raises Misuse with one line that names the option, its value and what to do. Writes nothing.
    """
    with value_errors_as_misuse():
        config = complete(with_prompt(config))
        config.check()
        for c in config_per_env(config):
            if c.needs_environment and c.env_addr in ((), (LOCAL,)):
                check_package(c.env)
        tasks_of(config)
        held_out_tasks(config)
        check_run_dir(config)
        check_model(config.model)
        if (start := config.warm_start) not in ("auto", "never"):
            if not Path(start).is_dir():
                raise Misuse(f"--warm-start {start} is not auto, never, or a folder")
            check_model(start, "--warm-start")
        teacher = getattr(config, "teacher", None)
        if teacher and not (config.asks_oracle or is_url(teacher)):
            check_model(teacher, "--teacher")
        check_length(config.model, config.max_trajectory_tokens + 1)
        config = with_absolute_paths(config)
    if config.resume:
        check_resumed(config)
    return config


def check_engine(name: str) -> None:
    """Raise Misuse if the sampler is not installed."""
    if name == "vllm" and DEFAULT_ENGINE != "vllm":
        raise Misuse("--engine vllm: vLLM is not installed; use --engine transformers")


def check_ranges(config: Any) -> None:
    """Raise Misuse for a number outside its range."""
    for name in (*POSITIVE, *NOT_NEGATIVE, *FRACTIONS):
        setting = getattr(config, name, None)  # None: not set, or not an option here
        values = setting if isinstance(setting, tuple) else (setting,)
        if name in TEMPERATURES and len({f"{t or 0:g}" for t in values}) < len(values):
            raise Misuse(f"{flag(name)} has the same temperature twice")
        for value in values:
            if value is None or (value == 0 and name in config.zero_allowed):
                continue
            if name in POSITIVE and not value > 0:
                raise Misuse(f"{flag(name)} {value} must be above 0")
            if not 0 <= value <= (limit := LIMITS.get(name, LARGEST)):
                raise Misuse(f"{flag(name)} {value} must be between 0 and {limit:,}")
            if name in TEMPERATURES and value < MIN_TEMPERATURE:
                raise Misuse(f"{flag(name)} {value} must be at least {MIN_TEMPERATURE}")


def check_environments(config: RunConfig) -> None:
    """Raise ValueError for environments, weights or addresses that contradict each other."""
    names, weights = names_of(config.env), config.env_weights
    short_names = [env_name(name) for name in names]
    if len(set(short_names)) < len(short_names):
        raise Misuse(f"--env {' '.join(names)} names an environment twice")
    if weights and len(weights) != len(names):
        raise Misuse(f"--env-weights {weights}: give one integer of at least 1 for each --env")
    if len(names) > 1:
        for name in SINGLE_ENV_OPTIONS:
            if getattr(config, name):
                raise Misuse(f"{flag(name)} needs a single environment; --env names {len(names)}")
        for address in config.env_addr:
            if address.partition("=")[0] not in short_names:
                example = f"{short_names[0]}=http://host:port"
                raise Misuse(f"--env-addr {address}: name its environment, as in {example}")
    for c in config_per_env(config):
        check_format(c.env, c.action_format, c.max_actions_per_turn)
        check_addresses("env_addr", c.env_addr, c.env)
    check_addresses("engine_url", config.engine_url)
    if len(set(config.engine_devices)) < len(config.engine_devices):
        raise Misuse(f"--engine-devices {' '.join(config.engine_devices)} names a GPU twice")


def check_format(env: str, action_format: str, max_actions: int) -> None:
    if problem := formats.problem_of_format(env, action_format, max_actions):
        raise Misuse(f"--action-format {action_format}: {problem}")


def check_attempts(agent: str, attempts: int) -> None:
    if agent == "reflect" and attempts == 1:
        raise Misuse("--agent reflect needs at least two --attempts")


def check_addresses(name: str, addresses: Sequence[str], env: str = "") -> None:
    """Raise ValueError unless each is a URL or, for --env-addr, the word `local`."""
    for address in addresses:
        if name == "env_addr" and address == LOCAL:
            if len(addresses) > 1:
                raise ValueError(f"--env-addr {LOCAL} is not a server; give it without any URL")
            check_local(env)
        else:
            checked_url(address, flag(name))


def check_package(env: str) -> None:
    """Raise ValueError if the package that runs the environment is not installed."""
    package = settings_of(env).package
    if package and not importlib.util.find_spec(package.partition(".")[0]):
        advice = f"run `make setup ENV={env}`" if env in envs.ENVS else f"install {package}"
        raise ValueError(f"--env {env} needs the package {package}: {advice}, or give --env-addr")


def check_run_dir(config: RunConfig) -> None:
    """Raise Misuse for a folder that already holds a run or that cannot be created."""
    path = Path(config.run_dir or "runs")
    if config.run_dir and not config.resume and os.path.exists(path / "config.json"):
        advice = "add --resume to continue it, or choose another folder"
        raise Misuse(f"--run-dir {path} already holds a run; {advice}")
    parent = next(p for p in (path, *path.absolute().parents) if os.path.exists(p))
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise Misuse(f"--run-dir {path} cannot be created: {parent} is not a writable folder")


def notes(config: RunConfig) -> Iterator[str]:
    """Warnings about a run that is valid but perhaps not what the user meant."""
    if (config.tasks or config.split) and not learns_only_from_files(config.method, vars(config)):
        held_out = {task.task_id for task in held_out_tasks(config)}
        if overlap := held_out & {task.task_id for task in tasks_of(config)}:
            num = f"{len(overlap)} of the {len(held_out)}"
            yield f"{num} held-out tasks are also trained on: success on them proves little"
    yield from config.notes()


# --------------------------------------------------------------------------------- the command line


def parse_command_line(
    kind: type[T], argv: Sequence[str] | None, prog: str, default: T | None = None, about: str = ""
) -> T:
    """Parse a command line into a dataclass, with a flag for every field. A field whose flag is not
    given has its value in `default`, or the class's own default if `default` is None.

    Raises Misuse if the arguments cannot be read, and SystemExit with code 0 after --help.
    """
    box = io.StringIO()
    defaults: dict[str, Any] = {} if default is None else {"default": default}
    if issubclass(kind, RunConfig):  # --help lists the run before the details of an update
        details, options = Objective.__dataclass_fields__, kind.__dataclass_fields__
        in_order = sorted(options, key=lambda name: name in details)
        kind.__dataclass_fields__ = {name: options[name] for name in in_order}
    try:
        with contextlib.redirect_stderr(box):
            return tyro.cli(kind, prog=prog, args=argv, description=about or None, **defaults)
    except SystemExit as stop:
        if not stop.code:
            raise
    # tyro draws a box and lists similar names: keep the message and the first name.
    _, *lines = (line.strip("│╭╮╰╯─ ") for line in box.getvalue().splitlines())
    problem = " ".join(takewhile(bool, lines))
    if "Perhaps you meant:" in lines:
        problem += f"; did you mean {lines[lines.index('Perhaps you meant:') + 1].split()[0]}?"
    raise Misuse(f"{problem}; see --help")


def flag_values(argv: Sequence[str]) -> dict[str, list[str]]:
    """Field -> values, for each option on a command line.

    >>> flag_values(["--rounds", "3", "6", "--seed=1", "--no-resume"])
    {'rounds': ['3', '6'], 'seed': ['1'], 'resume': []}
    """
    fields: dict[str, list[str]] = {}
    values: list[str] = []
    for word in argv:
        if word.startswith("--"):
            name, _, value = word[2:].partition("=")
            values = [value] if value else []
            fields[name.replace("-", "_").removeprefix("no_")] = values
        else:
            values.append(word)
    return fields


def read_command_line(
    argv: Sequence[str] | None, kind: type[Options], summary: str = ""
) -> tuple[Options, list[str]]:
    """The options of a command line, not yet checked, and a note for each option without effect.

    Raises what `parse_command_line` raises, and Misuse for an option file that cannot be read.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    user_values = {name: " ".join(values) for name, values in flag_values(words).items()}
    movable: tuple[str, ...] = ()
    if "--resume" in words:  # the defaults are the options that the run was started with
        default = saved_config(user_values.get("run_dir"), kind)
        movable = ("env_addr", "engine_url", "engine_devices", "log_to")  # without a value: none
        if {"engine_url", "engine_devices"} & user_values.keys():  # the one replaces the other
            default = replace(default, engine_url=(), engine_devices=())
    else:
        with value_errors_as_misuse():
            default = _defaults_for(user_values, kind)
    config = parse_command_line(kind, words, kind.program, default, summary)
    for name, value in user_values.items():
        is_empty = not value and name not in movable and getattr(config, name, None) == ()
        if is_empty:  # an empty shell variable, perhaps
            raise Misuse(f"{flag(name)} needs at least one value; leave it out to get its default")
    unused = {name: reason for name, reason in _unused_options(config) if name in user_values}
    return config, [f"{flag(name)} has no effect here: {why}" for name, why in unused.items()]


def _unused_options(config: RunConfig) -> Iterator[tuple[str, str]]:
    if config.deterministic and config.engine == "vllm":
        yield "engine", "--deterministic samples with transformers"
    has_servers = config.engine_url or config.engine_devices
    if config.deterministic or config.engine != "vllm" or has_servers:
        yield "enforce_eager", "it applies only to vLLM in this process"
    if config.tasks:
        yield "split", f"--tasks {config.tasks} names the tasks"
    if not config.eval_every:
        names = ("tasks", "subtasks", "samples", "start_samples", "rounds", "temperatures")
        for name in names:
            yield f"eval_{name}", "--eval-every is 0"
    if not config.lora_rank:
        yield "lora_alpha", "--lora-rank is 0"
    yield from config.unused_options()


def _defaults_for(user_values: Mapping[str, str], kind: type[Options]) -> Options:
    """Values for the options not on the command line: from --config first, then from a preset."""
    saved = dict[str, Any]()
    if file := user_values.get("config"):
        if "preset" in user_values:
            raise Misuse("--config and --preset both set the defaults; give only one")
        _, saved = options_in(Path(file), f"--config {file}", kind)
        saved = {n: v for n, v in saved.items() if n not in PER_RUN_OPTIONS} | {"config": file}
    values = saved | {name: value for name, value in user_values.items() if value}
    env, model = values.get("env", Config.env).replace(" ", "+"), values.get("model")
    return replace(with_preset(values.get("preset") or preset_of(model), env, kind), **saved)


# --------------------------------------------------------------------------------- options in files

# A resumed run may change how long it runs, where it runs, and how it uses memory.
CHANGEABLE_ON_RESUME = {
    *("steps", "learning_rate_decay_steps", "stop_at", "on_collapse", "save_every", "keep_last"),
    *("env_addr", "engine_url", "engine_devices", "run_dir", "resume", "log_to", "record_state"),
    *("max_tokens_per_micro_batch", "gradient_checkpointing", "precision", "enforce_eager"),
}
PER_RUN_OPTIONS = {"config", "run_dir", "resume"}  # --config does not copy them
FILE_OPTIONS = ("data", "pairs", "expert", "experience")  # of sft.py, dpo.py and agentevol.py


def options_in(path: Path, where: str, kind: type[RunConfig]) -> tuple[str, dict[str, Any]]:
    """The method and the options in a run's config.json, or in a JSON object of options. If the run
    used another method, only the options that all methods share and the presets of `kind` may set.

    Raises Misuse, with a message that begins with `where`, if the file holds no options, or holds a
    name or value that this version does not have.
    """
    if not path.exists():
        raise Misuse(f"{where}: there is no run, {path} does not exist")
    try:
        content = json.loads(read_text(path))
        method, options = content.get("method", Config.method), content.get("config", content)
        if method != kind.method:
            shared = RunConfig.__dataclass_fields__.keys() - kind.outside_presets
            options = with_one_horizon({n: v for n, v in options.items() if n in shared}, kind)
        unknown = options.keys() - kind.__dataclass_fields__.keys()
    except (ValueError, RecursionError, AttributeError) as error:  # AttributeError: not an object
        raise Misuse(f"{where}: {path.name} cannot be read as a run's options ({error})") from error
    if unknown:
        raise Misuse(f"{where}: this version has no option {', '.join(sorted(unknown))}")
    config = validated(options, where, kind)
    return method, {name: getattr(config, name) for name in options}


def validated(options: Mapping[str, Any], where: str, kind: type[Options]) -> Options:
    """The options as a `kind`. Raises Misuse, with a message that begins with `where`, for a value
    of the wrong type."""
    try:
        text = json.dumps(options, default=repr)  # a value that JSON cannot hold becomes a string
        return pydantic.TypeAdapter(kind).validate_json(text, strict=True)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        raise Misuse(f"{where}: {first['loc'][0]} {first['input']!r}: {first['msg']}") from None


def saved_config(run_dir: str | None, kind: type[Options]) -> Options:
    """The options that the run in `run_dir` was started with. With RunConfig as `kind` it reads a
    run of any method. Raises Misuse if the folder holds no run, or a run of another method."""
    if not run_dir:
        raise Misuse("--resume needs --run-dir, the folder of the run to continue")
    method, saved = options_in(Path(run_dir) / "config.json", f"--run-dir {run_dir}", kind)
    if kind.method not in ("", method):
        raise Misuse(f"--run-dir {run_dir} holds a run of {method}, not of {kind.program}")
    return replace(kind(**saved), run_dir=run_dir, resume=True)


def with_absolute_paths(config: Options) -> Options:
    """The options with absolute paths, because a run can be resumed from another folder.
    Idempotent. Raises ValueError if an id list does not exist."""
    changes: dict[str, Any] = {}
    for name in ("tasks", "eval_tasks"):
        if (file := getattr(config, name)) is not None:
            changes[name] = envs.name_of_list(config.env, file)
    for name in ("model", "warm_start", "teacher"):
        folder = getattr(config, name, None)
        if (
            folder
            and folder not in (*SMALL_MODELS, "auto", "never", *ORACLES)
            and Path(folder).is_dir()
        ):
            # Resolve links: checkpoints/best of a run that continues can point elsewhere later.
            changes[name] = os.path.realpath(folder)
    for name in FILE_OPTIONS:
        if files := getattr(config, name, ()):
            changes[name] = tuple(map(os.path.abspath, files))
    return replace(config, **changes)


def is_url(text: str) -> bool:
    return text.startswith(("http://", "https://"))


def learns_only_from_files(method: str, options: Mapping[str, Any]) -> bool:
    """Whether a run trains only on files. AgentEvol never does: it also explores."""
    return method != "agentevol" and any(options.get(name) for name in FILE_OPTIONS)


def check_resumed(config: RunConfig) -> None:
    """Raise Misuse for changes that a resumed run does not allow, and for too few --steps."""
    saved = complete(saved_config(config.run_dir, type(config)))
    free = CHANGEABLE_ON_RESUME - config.fixed_on_resume
    if all(is_url(getattr(c, "teacher", None) or "") for c in (config, saved)):
        free |= {"teacher"}  # it can have moved
    changed = [f.name for f in fields(config) if getattr(config, f.name) != getattr(saved, f.name)]
    if flags := " ".join(flag(name) for name in changed if name not in free):
        raise Misuse(f"--resume keeps the run's options; leave out {flags}, or start a new run")
    checkpoints = Path(config.run_dir or "").glob("checkpoints/step_*")
    steps = [int(path.name[5:]) for path in checkpoints if path.name[5:].isdecimal()]
    last_step = max(steps, default=0)
    if 0 < config.steps < last_step:  # 0: --epochs sets the number
        raise Misuse(f"--steps {config.steps}: this run is at step {last_step}; give at least that")


def with_prompt(config: T) -> T:
    """Replace the file name in --prompt with the messages in the file, as JSON, so that config.json
    records the prompt itself. Idempotent. Raises ValueError for a file that cannot be read, or
    whose messages cannot precede a first observation."""
    file = config.prompt
    if file is None or file.startswith("[") or len(names_of(config.env)) > 1:
        return config
    try:
        text = read_text(file).strip()
        messages = json.loads(text) if text.startswith("[") else None
        json.dumps(messages, ensure_ascii=False).encode()  # not if it has half a surrogate pair
    except (ValueError, RecursionError) as error:
        raise Misuse(f"--prompt {file} cannot be read ({error})") from error
    if not text:
        raise Misuse(f"--prompt {file} is empty")
    if messages is None:
        if config.action_format != "react" or config.max_actions_per_turn > 1:
            raise Misuse(
                f"--prompt {file} replaces the text that describes the actions; with "
                "--action-format or --max-actions-per-turn, give messages as JSON"
            )
        first_message, *examples = envs.get_env(config.env).PROMPT
        messages = [first_message | {"content": text}, *examples]
    elif problem := envs.problem_of_messages(messages):
        raise Misuse(f"--prompt {file}: {problem}")
    return replace(config, prompt=json.dumps(messages, ensure_ascii=False))


def prompt_of(config: Any) -> list[dict[str, str]] | None:
    """The messages of --prompt, or None to use the environment's prompt."""
    return json.loads(config.prompt) if config.prompt else None
