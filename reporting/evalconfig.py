"""What an evaluation can be asked: every option of evaluate.py, and what contradicts.

One flat dataclass: a field is a flag, its docstring the help text (runtime/cli.py), with meaning,
unit and the paper's value. What no run can honour is refused before anything is loaded or written:

    >>> EvalConfig(samples=4, temperature=0.0).check()
    Traceback (most recent call last):
    ValueError: --temperature 0 plays 4 times the same; use --samples 1
    >>> EvalConfig().horizons("babyai")  # turns, as the world says
    [20]

Read next: evaluate.py.
"""

import contextlib
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from config import (
    PAPER,
    SMALL_MODELS,
    RunConfig,
    check_addresses,
    complete,
    files_teach,
    has_gpu,
    in_each,
    named,
    parse_command_line,
    saved_config,
    tasks_of,
    with_prompt,
)
from envs import Task, load_tasks, settings_of, variant_of
from envs.http import checked_url
from reporting.scoring import compare
from scale.default_models import best_checkpoint, check_length, check_model

ALL = "all"  # --env all


def _is_free(out: Path) -> bool:
    """Whether a folder is empty, or holds what measured nothing, since no server answered."""
    if not out.is_dir():
        return False
    try:
        return not json.loads((out / "eval.json").read_text(encoding="utf-8"))["items"]
    except (OSError, ValueError, KeyError, TypeError):
        return not any(out.iterdir())


@dataclass(frozen=True)
class EvalConfig:
    """Measure an agent on held-out tasks: avg@k, pass@k, per sub-task, with 95 % intervals."""

    env: str = "textcraft"
    """environment (name), or `all`: every one in turn, in a table beside the paper's numbers"""
    tasks: str | None = None
    """id list to play instead of --split (JSON file)"""
    split: Literal["train", "test"] | None = None
    """id list that comes with the environment (without it: test)"""
    subtasks: tuple[str, ...] = ()
    """play these sub-tasks alone, e.g. --subtasks "depth 1" "depth 2" (names; without it: all)"""
    limit: int | None = None
    """play the first tasks of each sub-task alone, for a quick look (count; without it: all)"""
    run: str | None = None
    """a run of train.py: measure its best checkpoint as it measures itself, on its held-out tasks
    (those it trains on, where it has none); what is given beside it wins (folder)"""
    model: str | None = None
    """smollm2-135m, tiny, a checkpoint folder or a hub id (without it: smollm2-135m on a
    CPU, Qwen/Qwen2.5-3B-Instruct on a GPU; paper: Qwen2.5-3B and 7B)"""
    engine: Literal["vllm", "transformers"] = "vllm"
    """what samples from --model"""
    api_base: str | None = None
    """base URL of an OpenAI-compatible chat server, in place of --model (URL)"""
    api_model: str | None = None
    """model name to ask that server for"""
    api_key_env: str | None = None
    """environment variable that holds the server's key (name; without it: no key is sent)"""
    samples: int = 1
    """episodes per task, k of avg@k and pass@k (count; paper: 1)"""
    max_rounds: tuple[int, ...] = ()
    """turns an episode may take; several give the curve over turns at the cost of the longest
    (turns; without it the world's own, the paper's where it has one: 20 babyai, 30 the others)"""
    temperature: float = 1.0
    """sampling temperature, 0 takes the most probable token (paper: 1.0)"""
    seed: int = 0
    """of environments, sampling and bootstrap"""
    max_tokens_per_turn: int = 512
    """longest answer of the policy (tokens; paper: 512, or 200)"""
    max_trajectory_tokens: int = 8192
    """longest episode, prompt included (tokens; paper: 10752 for textcraft); not for --api-base"""
    env_addr: tuple[str, ...] = ()
    """addresses of running environment servers (URLs; without it: one is started here; local:
    none, the world plays in this process)"""
    prompt: str | None = None
    """file with another prompt than the world's: JSON [{"role", "content"}, ...], or a text in
    place of its instruction"""
    env_workers: int = 32
    """environment calls, or with --api-base episodes, under way at a time (count)"""
    max_env_failures: float = 0.2
    """share of trajectories lost to servers above which the run fails (0..1)"""
    record_state: bool = False
    """keep what people look at (inventory, map) in the trajectory file, for replay.py"""
    deterministic: bool = False
    """repeatable: transformers engine, every sequence sampled alone from its own seed; slow"""
    out: str | None = None
    """new folder for the results (without it: runs/eval-<env>-<date-time>/)"""
    resume: bool = False
    """with --env all: families that --out holds complete are not played again"""
    compare: tuple[str, ...] = ()
    """two eval.json: print the paired difference and stop"""

    def horizons(self, env: str) -> list[int]:
        """--max-rounds, ascending; without it the horizon of `env`, a world's name."""
        return sorted(set(self.max_rounds)) or [settings_of(env).horizon]

    def check(self) -> None:
        """Raises ValueError for a value out of range or options that contradict each other."""
        rules = (
            (len(self.compare) in (0, 2), f"--compare takes two files, got {len(self.compare)}"),
            (self.samples >= 1, f"--samples {self.samples} must be at least 1"),
            (
                min(self.max_rounds, default=1) >= 1,
                f"--max-rounds {' '.join(map(str, self.max_rounds))} must be counts of at least 1",
            ),
            (self.limit is None or self.limit >= 1, f"--limit {self.limit} must be at least 1"),
            (
                self.temperature >= 0 and math.isfinite(self.temperature),
                f"--temperature {self.temperature} must be 0 or more",
            ),
            (
                self.temperature > 0 or self.samples == 1,
                f"--temperature 0 plays {self.samples} times the same; use --samples 1",
            ),
            (self.seed >= 0, f"--seed {self.seed} must be 0 or more"),
            (
                1 <= self.max_tokens_per_turn < self.max_trajectory_tokens,
                f"--max-tokens-per-turn {self.max_tokens_per_turn} must be at least 1 and below "
                f"--max-trajectory-tokens {self.max_trajectory_tokens}",
            ),
            (self.env_workers >= 1, f"--env-workers {self.env_workers} must be at least 1"),
            (
                0 <= self.max_env_failures <= 1,
                f"--max-env-failures {self.max_env_failures} must be a share, 0 to 1",
            ),
            (
                not (self.tasks and self.split),
                f"--tasks {self.tasks} and --split {self.split} both name tasks; give one",
            ),
            (
                not (self.model and self.api_base),
                f"--model {self.model} and --api-base {self.api_base} exclude each other",
            ),
            (
                bool(self.api_base) == bool(self.api_model),
                "--api-base and --api-model go together: where the server is, what to ask it for",
            ),
            (
                self.api_base or not self.api_key_env,
                "--api-key-env has a use only with --api-base",
            ),
            (
                not self.api_key_env or os.environ.get(self.api_key_env),
                f"--api-key-env {self.api_key_env}: this environment variable is not set",
            ),
            (
                not (self.api_base and self.deterministic),
                "--deterministic is not possible with --api-base: the server decides",
            ),
            (
                not self.resume or (self.env == ALL and self.out),
                "--resume goes with --env all and --out: which folder to go on with",
            ),
        )
        for holds, problem in rules:
            if not holds:
                raise ValueError(problem)
        check_addresses("env_addr", self.env_addr, self.env)
        if self.api_base:
            checked_url(self.api_base, "--api-base")
        if self.env == ALL:
            self._check_all()
        out = Path(self.out or "")
        if self.resume:
            if not (out / "benchmark.json").exists():
                raise ValueError(
                    f"--resume: --out {out} holds no results of --env all to go on with; leave "
                    "out --resume to begin"
                )
        elif self.out and out.exists() and not _is_free(out):
            raise ValueError(f"--out {out} exists and is not empty; choose a new folder")

    def _check_all(self) -> None:
        """Raises ValueError for options that name servers or tasks of one environment."""
        for flag, value in (
            ("--env-addr", self.env_addr),
            ("--tasks", self.tasks),
            ("--subtasks", self.subtasks),
            ("--split train", self.split == "train"),
            ("--prompt", self.prompt),
        ):
            if value:
                raise ValueError(
                    f"{flag} is not possible with --env all, which starts a server for each "
                    "environment and plays its test split"
                )


def model_of(config: EvalConfig) -> str:
    """The name of what plays."""
    return config.api_model or config.model or (PAPER["model"] if has_gpu() else SMALL_MODELS[0])


def as_in_run(folder: str, given: set[str], env: str | None = None) -> EvalConfig:
    """The options under which a run measures itself.

    Args:
        given: options that the command line names; those they exclude are not taken over.
        env: of a run in several worlds, the one to play.
    Raises: ValueError: no run lies there, it has no checkpoint, or one of its worlds must be named.
    """
    if not (Path(folder) / "config.json").exists():
        raise ValueError(f"--run {folder} holds no run; give the folder that train.py has made")
    c = complete(saved_config(folder, RunConfig))
    if len(worlds := in_each(c)) > 1:
        found = [own for own in worlds if own.env == env]
        if not found:
            listed = " or ".join(own.env for own in worlds)
            raise ValueError(f"--run {folder} plays several worlds: name one, --env {listed}")
        c, given = found[0], given - {"env"}
    checkpoint = best_checkpoint(Path(folder))
    if checkpoint is None and "model" not in given:
        raise ValueError(f"--run {folder} has no checkpoint yet; name a --model")
    own = EvalConfig(run=folder, env=c.env, prompt=c.prompt, engine=c.engine)
    own = replace(own, model=str(checkpoint), max_rounds=(c.evaluation_rounds,))
    own = replace(own, temperature=c.temperature, max_tokens_per_turn=c.max_tokens_per_turn)
    own = replace(own, max_trajectory_tokens=c.max_trajectory_tokens)
    own = replace(own, seed=c.seed, samples=c.eval_samples)
    if "env" in given and env not in (None, c.env):  # another world: with its own words and turns
        return replace(own, env=env, prompt=None, max_rounds=())
    if given & {"tasks", "split"}:
        return own
    if not c.eval_every and not c.eval_tasks:
        return replace(own, tasks=c.tasks, split=c.split, subtasks=c.subtasks)
    return replace(own, tasks=c.eval_tasks, subtasks=c.evaluation_subtasks)


def trained_on(config: EvalConfig, tasks: Sequence[Task]) -> int:
    """How many of the tasks the run of --run trains on, as its options say; 0 where files teach,
    which are not read."""
    trained = set[str]()
    with contextlib.suppress(ValueError, OSError):  # its list is gone
        if config.run:
            saved = json.loads((Path(config.run) / "config.json").read_text(encoding="utf-8"))
            if not files_teach(saved.get("method", ""), saved["config"]):
                own = complete(saved_config(config.run, RunConfig))
                trained = {task.task_id for task in tasks_of(own)}
    return sum(task.task_id in trained for task in tasks)


def asked(config: EvalConfig, env: str) -> dict[str, Any]:
    """What a result depends on, as eval.json names it."""
    options = ("temperature", "seed", "samples", "limit")
    budgets = ("max_tokens_per_turn", "max_trajectory_tokens")
    folder = Path(model_of(config))
    variant = variant_of(env)
    return (
        {"env": env, "model": model_of(config)}
        | ({"weights": str(folder.resolve())} if folder.is_dir() else {})  # `best` is a link
        | ({"api_base": config.api_base} if config.api_base else {})
        | {name: getattr(config, name) for name in options + budgets}
        | {"max_rounds": config.horizons(env)}
        | ({"prompt": config.prompt} if config.prompt else {})
        | ({"variant": variant} if variant and not config.env_addr else {})  # of our own server
    )


def evaluation_options(argv: Sequence[str] | None, prog: str) -> EvalConfig:
    """evaluate.py's options, checked, with what they name on this machine.

    Raises:
        ValueError: one line that says what to do.
        SystemExit: misuse or --help, see `config.parse_command_line`.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    given = named(words)
    (env, *_) = [*given.get("env", []), None]
    start = as_in_run(given["run"][0], set(given), env) if given.get("run") else None
    config = parse_command_line(EvalConfig, words, prog, start)
    config.check()
    if config.compare:
        compare(*config.compare)
        return config
    if config.env != ALL:
        config = with_prompt(config)
        split = None if config.tasks else config.split or "test"
        load_tasks(config.env, split, config.tasks, config.subtasks)
    if not config.api_base:
        check_model(model_of(config))
        check_length(model_of(config), config.max_trajectory_tokens)
    return config
