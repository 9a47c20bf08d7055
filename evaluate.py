"""
Evaluation: play held-out tasks, print how often they are solved and how sure that is.

    tasks x samples ──> rollout.collect       a local model: token ids, engines.py
                    └─> chatapi.collect_api   a model behind a chat server: messages
    trajectories ─────> scoring.summarize ──> table, eval.json, curves.png

The loop that plays is the one that training uses: the same prompt, the same parsing, the same
budgets. What is measured is defined in scoring.py: avg@k, pass@k and their 95 % intervals, per
sub-task. Results go to a folder of their own:

    eval.json            per task, per sub-task, overall; the curves over turns and over samples
    trajectories.jsonl   one episode a line, written as it ends
    curves.png           success over test-time compute
    config.json          every option

Several `--max-rounds` cost no more than the longest of them (scoring.py says why).

The reference (AgentGym-RL, `verl/agent_trainer/main_generation.py`) needs a GPU and the weights,
ends with an empty batch when the batch size divides the number of tasks, and keeps no log of single
items. Its scripts evaluate searchqa with 30 turns after training with at most 10; here the horizon
is an option that the result names.

How to run:

    .venv/bin/python evaluate.py --env textcraft --model runs/NAME/checkpoints/best --samples 4
    .venv/bin/python evaluate.py --env textcraft --max-rounds 5 10 20 30
    .venv/bin/python evaluate.py --env textcraft --api-base http://127.0.0.1:8000 --api-model NAME
    .venv/bin/python evaluate.py --compare before/eval.json after/eval.json

Exit codes: 0 done, 1 a failure at run time, 2 misuse (one line), 130 stopped by Ctrl-C; what had
ended is written in every case but 2.

Read next: scoring.py for the numbers, rollout.py for the loop that plays.
"""

import contextlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from chatapi import ApiError, ChatApi, collect_api
from cli import complain, parse_command_line
from envclient import EnvError, EnvPool, local_server
from envs import Task, load_tasks
from rollout import EngineError, RolloutRequest, RolloutSettings, TooManyEnvFailures, collect
from scoring import compare, format_table, plot_curves, summarize
from trajectory import RolloutHandler, Trajectory

PROG = "evaluate.py"


def requests_for(tasks: Sequence[Task], samples: int, step: int, seed: int) -> list[RolloutRequest]:
    """Every task `samples` times; `seed` goes to the environment, the same for all samples."""
    return [
        RolloutRequest(task=task, group_id=group, sample=sample, seed=seed, step=step)
        for group, task in enumerate(tasks)
        for sample in range(samples)
    ]


def evaluate_policy(
    engine: Any,
    pool: EnvPool,
    chat: Any,
    tasks: Sequence[Task],
    samples: int,
    settings: RolloutSettings,
    step: int = 0,
    seed: int = 0,
    progress: Callable[[RolloutHandler], None] | None = None,
    collect: Callable[..., list[RolloutHandler]] = collect,
) -> tuple[dict[str, Any], list[RolloutHandler]]:
    """
    Play `tasks` with `samples` each under `settings.max_rounds`; what train.py calls.

    Args:
        engine, pool, chat: as `rollout.collect` takes them.
        step: the training step; names the trajectories and, with `seed`, seeds the sampling.
        seed: of the environments, the sampling (in place of settings.seed) and the bootstrap.
        collect: `rollout.collect`, or what shares the requests out over processes.
    Returns: the summary and all trajectories, lost ones included.
    Raises: EngineError, TooManyEnvFailures as `rollout.collect`.
    """
    requests = requests_for(tasks, samples, step, seed)
    settings = replace(settings, seed=seed)
    trajectories = collect(engine, pool, chat, requests, settings, progress=progress)
    summary = summarize(trajectories, samples, [settings.max_rounds], step=step, seed=seed)
    return summary, trajectories


# ----------------------------------------------------------------------------------------------
# The command line


@dataclass(frozen=True)
class EvalConfig:
    """Measure an agent on held-out tasks: avg@k, pass@k, per sub-task, with 95 % intervals."""

    env: str = "textcraft"
    """environment (name)"""
    tasks: str | None = None
    """id list to play instead of --split (JSON file)"""
    split: Literal["train", "test"] | None = None
    """id list that comes with the environment (without it: test)"""
    subtasks: tuple[str, ...] = ()
    """play these sub-tasks alone, e.g. --subtasks "depth 1" "depth 2" (names; without it: all)"""
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
    max_rounds: tuple[int, ...] = (30,)
    """turns an episode may take; several give the curve over turns at the cost of the longest
    (turns; paper: 30 textcraft, sciworld, searchqa; 20 babyai; 15 webarena)"""
    temperature: float = 1.0
    """sampling temperature, 0 takes the most probable token (paper: 1.0)"""
    seed: int = 0
    """of environments, sampling and bootstrap"""
    max_tokens_per_turn: int = 512
    """longest answer of the policy (tokens; paper: 512, or 200)"""
    max_trajectory_tokens: int = 8192
    """longest episode, prompt included (tokens; paper: 10752 for textcraft); not for --api-base"""
    env_addr: tuple[str, ...] = ()
    """addresses of running environment servers (URLs; without it: one is started here)"""
    env_workers: int = 32
    """environment calls, or with --api-base episodes, under way at a time (count)"""
    max_env_failures: float = 0.2
    """share of trajectories lost to servers above which the run fails (0..1)"""
    deterministic: bool = False
    """repeatable: transformers engine, every sequence sampled alone from its own seed; slow"""
    out: str | None = None
    """new folder for the results (without it: runs/eval-<env>-<date-time>/)"""
    compare: tuple[str, ...] = ()
    """two eval.json: print the paired difference and stop"""

    def check(self) -> None:
        """Raises ValueError for a value out of range or options that contradict each other."""
        rules = (
            (len(self.compare) in (0, 2), f"--compare takes two files, got {len(self.compare)}"),
            (self.samples >= 1, f"--samples {self.samples} must be at least 1"),
            (
                self.max_rounds and min(self.max_rounds) >= 1,
                f"--max-rounds {_words(self.max_rounds)} must be one or more counts of at least 1",
            ),
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
        )
        for holds, problem in rules:
            if not holds:
                raise ValueError(problem)
        for flag, url in [("--env-addr", url) for url in self.env_addr] + [
            ("--api-base", self.api_base or "http://")
        ]:
            if not url.startswith(("http://", "https://")):
                raise ValueError(f"{flag} {url} is not a URL; expected http://HOST:PORT")
        out = Path(self.out or "")
        if self.out and out.exists() and not (out.is_dir() and not any(out.iterdir())):
            raise ValueError(f"--out {self.out} exists and is not empty; choose a new folder")


def _words(values: Sequence[Any]) -> str:
    return " ".join(map(str, values)) or "(nothing)"


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 done, 1 a failure at run time, 2 misuse, 130 stopped by Ctrl-C."""
    config = parse_command_line(EvalConfig, argv, prog=PROG)
    with contextlib.ExitStack() as stack:
        try:
            config.check()
            if config.compare:
                print(compare(*config.compare))
                return 0
            split = None if config.tasks else config.split or "test"
            tasks = load_tasks(config.env, split, config.tasks, config.subtasks)
            play, model = _player(config, stack)
        except ValueError as error:
            complain(PROG, error)
            return 2
        except (EngineError, EnvError, OSError) as error:
            complain(PROG, error)
            return 1
        except KeyboardInterrupt:
            return 130
        return _run(config, tasks, play, model)


Play = Callable[
    [Sequence[RolloutRequest], RolloutSettings, Callable[[Trajectory], None]], Sequence[Trajectory]
]


def _player(config: EvalConfig, stack: contextlib.ExitStack) -> tuple[Play, str]:
    """What plays requests, and the model's name. Whatever is started here, `stack` closes."""
    if config.api_base:
        key = os.environ[config.api_key_env] if config.api_key_env else None
        api = ChatApi(config.api_base, str(config.api_model), key)
        pool = _pool(config, stack)
        return lambda r, s, p: collect_api(api, pool, r, s, p), str(config.api_model)

    import torch

    from chat import ChatTemplate
    from default_models import resolve_model
    from engines import make_engine
    from models import load_tokenizer

    default = "Qwen/Qwen2.5-3B-Instruct" if torch.cuda.is_available() else "smollm2-135m"
    model = config.model or default
    path = resolve_model(model)
    chat = ChatTemplate(load_tokenizer(path))
    kind = "transformers" if config.deterministic else config.engine
    engine = make_engine(kind, path, config.max_trajectory_tokens, config.deterministic)
    stack.callback(engine.close)
    pool = _pool(config, stack)
    return lambda r, s, p: collect(engine, pool, chat, r, s, p), model


def _pool(config: EvalConfig, stack: contextlib.ExitStack) -> EnvPool:
    """Clients of --env-addr, or of a server that is started here and dies with us."""
    addresses = list(config.env_addr) or [stack.enter_context(local_server(config.env))]
    pool = EnvPool(config.env, addresses)
    stack.callback(pool.close)
    return pool


def _run(config: EvalConfig, tasks: Sequence[Task], play: Play, model: str) -> int:
    """Play, then write and print; what has ended is written whatever happens."""
    from tqdm import tqdm

    out = Path(config.out or f"runs/eval-{config.env}-{time.strftime('%Y%m%d-%H%M%S')}")
    out.mkdir(parents=True, exist_ok=True)
    resolved = {"command": sys.argv, **asdict(config), "model": model}
    (out / "config.json").write_text(json.dumps(resolved, indent=2) + "\n", encoding="utf-8")
    settings = RolloutSettings(
        max_rounds=max(config.max_rounds),
        max_tokens_per_turn=config.max_tokens_per_turn,
        max_trajectory_tokens=config.max_trajectory_tokens,
        temperature=config.temperature,
        seed=config.seed,
        env_workers=config.env_workers,
        max_env_failures=config.max_env_failures,
    )
    requests = requests_for(tasks, config.samples, step=0, seed=config.seed)
    print(f"{model} on {config.env}: {len(tasks)} tasks x {config.samples}, results in {out}")
    ended: list[Trajectory] = []
    exit_code, problem = 0, None
    with (
        open(out / "trajectories.jsonl", "w", encoding="utf-8") as log,
        tqdm(total=len(requests), unit="episode", disable=None, leave=False) as bar,
    ):

        def progress(trajectory: Trajectory) -> None:
            ended.append(trajectory)
            log.write(json.dumps(trajectory.to_line(), ensure_ascii=False) + "\n")
            log.flush()
            bar.set_postfix(solved=sum(t.success for t in ended), refresh=False)
            bar.update()

        try:
            play(requests, settings, progress)
        except KeyboardInterrupt:
            exit_code, problem = 130, f"stopped; {len(ended)} of {len(requests)} episodes had ended"
        except (EngineError, EnvError, ApiError, TooManyEnvFailures) as error:
            exit_code, problem = 1, str(error)
    summary = {
        "env": config.env,
        "model": model,
        "temperature": config.temperature,
        "seed": config.seed,
        "complete": len(ended) == len(requests),
    } | summarize(ended, config.samples, sorted(set(config.max_rounds)), seed=config.seed)
    _write_json(out / "eval.json", summary)
    plot_curves(summary, out / "curves.png")
    print(format_table(summary))
    if problem:
        complain(PROG, problem)
    return exit_code


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    aside = path.with_name(path.name + ".tmp")
    aside.write_text(json.dumps(content, indent=2, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(aside, path)


if __name__ == "__main__":
    sys.exit(main())
