"""Every option of `train.py`: what it means, its unit, its default here and its value in the paper.

What is not given comes from a preset:

    laptop   the 135M model on a world's shortest tasks, for two cores: without a GPU, and wherever
             one of the small models is asked for
    paper    AgentGym-RL's settings for Qwen2.5-3B: with a GPU
    none     the defaults of the fields below, whatever the machine and the world, and all of the
             world's training tasks: for those who set everything themselves

What belongs to one world stands in its class (envs/__init__.py), what belongs to the update in
`Objective`. What contradicts is in runtime/checks.py, how a run's options are read back in
runtime/saved.py.

Read next: `train.py`.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from envs import env_name, names_of, settings_of
from run.errors import Misuse as Misuse
from run.errors import refusing as refusing

GROUPED, WITH_CRITIC = ("grpo", "rloo"), ("ppo",)  # algorithms; see advantages.ESTIMATORS
Options = TypeVar("Options", bound="RunConfig")
SMALL_MODELS = ("smollm2-135m", "tiny")  # warmed up first, and given short tasks


def flag(name: str) -> str:
    """The option of a field.

    >>> flag("run_dir")
    '--run-dir'
    """
    return "--" + name.replace("_", "-")


@dataclass(frozen=True)
class Portions:
    """In which portions an update goes through its trajectories; each field is an option."""

    temperature: float = 1.0
    """of the sampler, in training and evaluation [paper: 1.0]"""
    max_grad_norm: float = 1.0
    """gradients are clipped to this global norm [paper: 1.0]"""
    mini_batch_size: int = 64
    """trajectories per optimizer step (trajectories) [paper: 8 tasks, i.e. 64]"""
    max_tokens_per_micro_batch: int = 2048
    """tokens of one forward and backward pass, padding included; lower it when memory runs out"""
    share_prefix: bool = True
    """compute what the samples of a task have in common once, where that is faster"""


@dataclass(frozen=True)
class Objective(Portions):
    """What an update maximises; each field is an option of train.py."""

    clip_ratio: float = 0.2
    """epsilon of the clipped objective [paper: 0.2]"""
    value_clip: float = 0.5
    """how far the critic may move from its old value (units of return) [paper: 0.5]"""
    kl_loss_coef: float = 0.0
    """weight of the KL to the start policy in the loss [paper: 1e-3]"""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """of the KL in the loss; the one in the reward is k1 [paper: k3]"""
    entropy_coef: float = 0.0
    """weight of the entropy bonus [paper: 1e-3]"""
    sampler_is_cap: float = 2.0
    """cap of the importance weights from sampler to trainer; 0 switches them off [paper: none]"""
    loss_agg: Literal["token-mean", "seq-mean"] = "token-mean"
    """what counts alike in the policy's loss, a token or a trajectory [paper: seq-mean]"""
    ppo_epochs: int = 1
    """passes over each step's trajectories [paper: 1]"""

    def num_optimizer_steps(self, num_rows: int) -> int:
        """Optimizer steps that a batch of `num_rows` trajectories gets."""
        return self.ppo_epochs * math.ceil(num_rows / self.mini_batch_size)


@dataclass(frozen=True)
class RunConfig(Portions):
    """What every way to train needs: a world, a model, a sampler, budgets, evaluation, files."""

    method: ClassVar[str] = ""  # what a run is named by, and may be resumed as
    program: ClassVar[str] = ""
    widens: ClassVar[bool] = False  # takes several --rounds
    unwatched: ClassVar[frozenset[str]] = frozenset()  # metrics that no sentinel should see
    may_be_zero: ClassVar[frozenset[str]] = frozenset()  # of what must otherwise be positive
    # What no preset may set, a method's own numbers; and those of them that the paper's preset has.
    keeps: ClassVar[frozenset[str]] = frozenset()
    large: ClassVar[dict[str, Any]] = {}

    # Where the other defaults come from
    preset: Literal["laptop", "paper", "none"] = "laptop"
    """laptop: for two cores, the default without a GPU and for smollm2-135m and tiny anywhere;
    paper: AgentGym-RL's, the default with a GPU; none: each option's own, in config.py"""
    config: str | None = None
    """a run's config.json: its options are the defaults; those given here win"""
    # The world and its tasks
    env: str = "textcraft"
    """environment to act in: textcraft, babyai, sciworld, searchqa, or package.module:Class; or
    several of them (runtime/mixture.py)"""
    env_weights: tuple[int, ...] = ()
    """of several: how many tasks of each follow one another, e.g. 2 1 (none: one of each)"""
    tasks: str | None = None
    """id list of the training tasks: a JSON file, or the name of one of the world's; overrides
    --split"""
    split: Literal["train", "test"] | None = None
    """id list that comes with the environment [paper: train]"""
    subtasks: tuple[str, ...] = ()
    """train on these sub-tasks alone, e.g. --subtasks "depth 1" "depth 2" (all if empty)"""
    env_addr: tuple[str, ...] = ()
    """addresses of environment servers, http://host:port, with several --env NAME=http://host:port;
    none: one is started here; local: no server, the world plays in this process"""
    prompt: str | None = None
    """file with another prompt than the world's: JSON [{"role", "content"}, ...], or a text in
    place of its instruction"""
    # The model
    model: str = "smollm2-135m"
    """smollm2-135m, tiny, a checkpoint folder or a hub id [paper: Qwen/Qwen2.5-3B-Instruct]"""
    engine: Literal["vllm", "transformers"] = "vllm"
    """who samples: vLLM in this process, or plain transformers"""
    engine_url: tuple[str, ...] = ()
    """addresses of vLLM servers that sample, http://host:port; none: a sampler in each process"""
    engine_devices: tuple[str, ...] = ()
    """cards for vLLM servers that sample, e.g. --engine-devices 2 3; started and stopped here"""
    warm_start: str = "auto"
    """auto: supervised fine-tuning on oracle demonstrations for smollm2-135m and tiny, cached;
    never; or a folder"""
    # How it learns
    steps: int = 60
    """training steps in total, also on resume (steps) [paper: 300]"""
    rounds: tuple[int, ...] = (6,)
    """most turns of a trajectory; several for scaling_inter_stepwise [paper: 30, or 10 20 30]"""
    lora_rank: int = 0
    """train low-rank adapters of this rank, not the policy's own weights (0: those; adapters want
    about ten times the learning rate) [paper: 0]"""
    precision: Literal["auto", "bf16", "fp32"] = "auto"
    """number format that the networks compute in; auto: the faster one on this machine, measured"""
    gradient_checkpointing: bool = False
    """keep each layer's input alone for the backward pass: less memory, a third more time [paper:
    on]"""
    max_tokens_per_turn: int = 80
    """sampled tokens per turn (tokens) [paper: 512]"""
    max_trajectory_tokens: int = 1536
    """tokens of a trajectory, the prompt included (tokens) [paper: 10752]"""
    learning_rate: float = 4e-5
    """of the policy, AdamW [paper: 1e-6]"""
    learning_rate_decay_steps: int = 60
    """the rate falls on a line to 1/N of itself in N steps and stays there; 0: constant
    (steps) [paper: 0]"""
    # Limits
    max_sync_error: float = 0.1
    """stop when sampler and trainer log-probs differ by more after a weight sync (mean, nats)"""
    max_env_failures: float = 0.2
    """stop when a larger share of a step's trajectories is lost to the environment (0..1)"""
    on_collapse: Literal["stop", "warn", "off"] = "stop"
    """what the sentinels of a collapsing run do (reporting/sentinels.py)"""
    # Evaluation, files
    eval_every: int = 20
    """evaluate held-out tasks every so many steps, before the first and after the last; 0: never"""
    eval_tasks: str | None = None
    """id list of held-out tasks (none: the test split; for short tasks, the world's short ones)"""
    eval_subtasks: tuple[str, ...] | None = None
    """evaluate these sub-tasks alone (none: those of --subtasks)"""
    eval_samples: int = 4
    """trajectories per held-out task (trajectories) [paper: 1]"""
    eval_start_samples: int = 1
    """the same before the first step, where somebody waits for it (trajectories)"""
    eval_rounds: int | None = None
    """most turns in evaluation (turns; none: the longest of --rounds) [paper: 30]"""
    stop_at: float | None = None
    """end once this share of the held-out tasks is solved (0..1; none: after --steps)"""
    save_every: int = 20
    """write a checkpoint every so many steps, and after the last (steps) [paper: 25]"""
    keep_last: int = 2
    """checkpoints to keep besides the best"""
    run_dir: str | None = None
    """where everything goes (none: runs/<env>-<method>-<date-time>; of files alone, no <env>)"""
    resume: bool = False
    """go on from the newest checkpoint of --run-dir"""
    log_to: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """send each step's row there too; the packages are optional (reporting/trackers.py)"""
    seed: int = 0
    """of task order, environments and sampling"""
    deterministic: bool = False
    """bitwise repeatable (seen on CPUs): transformers engine, float32, sequences sampled alone"""
    record_state: bool = False
    """keep what people look at (inventory, map) in the trajectory files"""

    @property
    def name(self) -> str:
        """What the run is named by, and can be resumed as."""
        return self.method

    @property
    def plays(self) -> bool:
        """Whether it needs a sampler and an environment."""
        return bool(self.eval_every)

    @property
    def needs_world(self) -> bool:
        """Whether somebody plays: the policy, or an oracle for the warm start."""
        return self.plays or (self.warm_start == "auto" and self.model in SMALL_MODELS)

    @property
    def evaluation_rounds(self) -> int:
        return self.eval_rounds or max(self.rounds)

    @property
    def evaluation_subtasks(self) -> tuple[str, ...]:
        return self.subtasks if self.eval_subtasks is None else self.eval_subtasks

    @property
    def episodes_per_step(self) -> int:
        """Episodes that a step plays; 0: it plays none."""
        return 0

    @property
    def trajectories_per_step(self) -> int:
        """Trajectories that a step learns from, at most."""
        return self.mini_batch_size

    def without_effect(self) -> Iterator[tuple[str, str]]:
        """(option, why it changes nothing here), of a method's own."""
        return iter(())

    @property
    def fixed(self) -> frozenset[str]:
        """Options that a resumed run must not change, though others may."""
        return frozenset()

    @property
    def steps_in_a_row(self) -> int:
        """Steps until the learning rate begins anew: all, but for a method that begins again."""
        return self.steps

    def samples_at(self, step: int) -> int:
        """Trajectories per held-out task in the evaluation after `step`."""
        return self.eval_samples if step else min(self.eval_start_samples, self.eval_samples)


@dataclass(frozen=True)
class Config(RunConfig, Objective):
    """Train an LLM agent with multi-turn reinforcement learning."""

    method: ClassVar[str] = "rl"
    program: ClassVar[str] = "train.py"
    widens: ClassVar[bool] = True

    # The algorithm
    algorithm: Literal["grpo", "ppo", "rloo", "reinforce_plus_plus"] = "grpo"
    """advantage estimator and what goes with it [paper: grpo]"""
    rounds_scheduler: Literal["fixed", "scaling_inter_stepwise"] = "fixed"
    """how the horizon changes during training [paper: both]"""
    steps_scaling_inter: int = 100
    """training steps at each horizon of scaling_inter_stepwise (steps) [paper: 100]"""
    tasks_per_step: int = 8
    """tasks drawn per step (tasks) [paper: 32]"""
    group_size: int = 8
    """trajectories per task (trajectories) [paper: 8]"""
    critic_learning_rate: float = 1e-4
    """of PPO's critic, AdamW [paper: 1e-5]"""
    gamma: float = 1.0
    """discount per policy token (ppo, reinforce_plus_plus) [paper: 1.0]"""
    lam: float = 1.0
    """GAE lambda (ppo) [paper: 1.0]"""
    kl_coef: float = 0.0
    """weight of the KL to the start policy in the reward [paper: 0.0]"""
    kl_target: float | None = None
    """adapt kl_coef to keep the KL here (nats per token; none: kl_coef is fixed)"""
    skip_zero_variance: bool = True
    """leave groups with equal returns out of the update (grpo, rloo): their advantages are 0,
    unless --kl-coef or --normalize-per-env moves them"""
    normalize_per_env: bool = False
    """whiten advantages within each world, so that of several none sets the others' scale"""
    shuffle_rewards: bool = False
    """control: trajectories swap rewards at random within a step; nothing should be learned"""

    @property
    def name(self) -> str:
        return self.algorithm

    @property
    def unwatched(self) -> frozenset[str]:  # type: ignore[override]
        # Equal returns in a group are a warning only where rewards are compared within it.
        watched = self.algorithm in GROUPED
        return frozenset() if watched else frozenset({"train/groups_zero_variance"})

    @property
    def plays(self) -> bool:
        return True

    @property
    def episodes_per_step(self) -> int:
        return self.tasks_per_step * self.group_size

    @property
    def trajectories_per_step(self) -> int:
        return self.episodes_per_step

    @property
    def needs_critic(self) -> bool:
        return self.algorithm in WITH_CRITIC


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
    "entropy_coef": 1e-3,
    "loss_agg": "seq-mean",  # its scripts: a mean per micro-batch, one trajectory in each
    "save_every": 25,
    "eval_every": 25,
}
LISTS = ("tasks", "eval_tasks", "subtasks")  # of a world's laptop settings: what it plays


def has_gpu(devices: Path = Path("/dev")) -> bool:
    """Whether this machine shows a card to a torch that is made for one.

    torch itself is not asked: to import it takes seconds, and this decides what `--help` shows.
    """
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    if not any(devices.glob("nvidia[0-9]*")) and not (devices / "dxg").exists():
        return False
    torch = importlib.util.find_spec("torch")  # found, not imported
    made_for = Path(torch.origin).with_name("version.py") if torch and torch.origin else None
    return bool(made_for and re.search(r"^cuda\b.*= *'", made_for.read_text(), re.MULTILINE))


def preset_of(model: str | None = None) -> str:
    """The preset of this machine; the small models bring theirs wherever they are asked for."""
    return "laptop" if model in SMALL_MODELS or not has_gpu() else "paper"


def with_preset(
    preset: str,
    env: str = Config.env,
    kind: type[Options] = Config,  # type: ignore[assignment]
) -> Options:
    """The defaults of a preset for `env`, as far as `kind` has such options and leaves them to it.
    Of several worlds the largest number that one of them sets; each keeps its own horizon.

    Raises:
        ValueError: there is no such preset, or no such world.
    """
    own = kind.__dataclass_fields__.keys() - kind.keeps - set(LISTS)
    large, found = kind.large if preset == "paper" else {}, []
    for name in names_of(env):
        world = settings_of(name)
        presets = {"laptop": world.laptop, "paper": {**PAPER, **world.paper}, "none": {}}
        if preset not in presets:
            raise ValueError(f"--preset {preset} is not known; choose one of {', '.join(presets)}")
        found.append({n: v for n, v in presets[preset].items() if n in own} | large)
    numbers = found[0]
    if len(found) > 1:
        names = {name for each in found for name in each}
        numbers = {n: _largest([each.get(n, getattr(kind, n)) for each in found]) for n in names}
        numbers["rounds"] = ()  # each world's own
    return replace(kind(preset=preset, env=env), **with_one_horizon(numbers, kind))  # type: ignore[arg-type]


def _largest(numbers: Sequence[Any]) -> Any:
    """Of those that say something; None where none does."""
    return max((number for number in numbers if number is not None), default=None)


def with_one_horizon(found: dict[str, Any], kind: type[RunConfig]) -> dict[str, Any]:
    """What a preset or another run says, for methods that play with one horizon: the longest."""
    rounds = found.get("rounds")
    return found | {"rounds": (max(rounds),)} if rounds and not kind.widens else found


def options(env: str = Config.env, **changes: Any) -> Config:
    """What the command line starts from on this machine, changed: options for `train.train`.

    >>> options("babyai", model="tiny", steps=4).rounds  # turns, of the laptop preset for babyai
    (5,)
    """
    preset = changes.get("preset") or preset_of(changes.get("model"))
    return replace(with_preset(preset, env, Config), **changes)


def complete(config: Options) -> Options:
    """Fill in what follows from other options: id lists, and what --deterministic implies."""
    if config.deterministic:
        config = replace(config, engine="transformers")
    if len(names_of(config.env)) > 1:
        return config  # each world has its own lists: runtime/mixture.py
    own = f"{env_name(config.env)}="  # may stand before an address of one world too
    config = replace(config, env_addr=tuple(a.removeprefix(own) for a in config.env_addr))
    if config.tasks is not None:
        config = replace(config, split=None)
    elif config.split is None:
        lists = {n: v for n, v in settings_of(config.env).laptop.items() if n in LISTS}
        if config.model in SMALL_MODELS and config.preset != "none" and lists:
            given = {name: getattr(config, name) for name in LISTS if getattr(config, name)}
            config = replace(config, **(lists | given))
        else:
            config = replace(config, split="train")
    return config
