"""
Evaluation: play held-out tasks, print how often they are solved and how sure that is.

    tasks x samples ──> rollout.collect       a local model: token ids, engines.py
                    └─> chatapi.collect_api   a model behind a chat server: messages
    trajectories ─────> scoring.summarize ──> table, eval.json, curves.png

The loop that plays is the one that training uses: the same prompt, the same parsing, the same
budgets. What is measured is defined in reporting/scoring.py: avg@k, pass@k and their 95 %
intervals, per sub-task. Results go to a folder of their own:

    eval.json            per task, per sub-task, overall; the curves over turns and over samples
    trajectories.jsonl   one episode a line, written as it ends
    curves.png           success over test-time compute
    config.json          every option
    tokenizer/           what turns token ids into text; not of a chat server's model

Several `--max-rounds` cost no more than the longest of them (reporting/scoring.py says why);
without the option each environment has the horizon of the paper's evaluation.

`--env all` plays every environment's test split with one model, loaded once, and prints the
benchmark's table beside the paper's numbers (reporting/leaderboard.py):

    <environment>/       eval.json, trajectories.jsonl and curves.png of each
    benchmark.json, benchmark.md    the table, written anew after each environment
    config.json          every option

An environment that cannot start, or dies, does not lose the others: its row says "not measured" and
why, the exit code is 1, and the same command with `--resume` plays what is missing.

How to run:

    .venv/bin/python evaluate.py --env textcraft --model runs/NAME/checkpoints/best --samples 4
    .venv/bin/python evaluate.py --env textcraft --max-rounds 5 10 20 30
    .venv/bin/python evaluate.py --env textcraft --api-base http://127.0.0.1:8000 \\
        --api-model NAME --api-key-env OPENAI_API_KEY
    .venv/bin/python evaluate.py --env all --model runs/NAME/checkpoints/best --out results/NAME
    .venv/bin/python evaluate.py --env all --limit 2
    .venv/bin/python evaluate.py --compare before/eval.json after/eval.json

Exit codes: 0 done, 1 a failure at run time, 2 misuse (one line), 130 stopped by Ctrl-C; what had
ended is written in every case but 2.

Read next: reporting/scoring.py for the numbers, rollout.py for the loop that plays; every option is
in reporting/evalconfig.py.
"""

import contextlib
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from config import prompt_of
from engines import EngineError
from envclient import EnvError, EnvPool, local_server
from envs import ENVS, Task, env_name, load_tasks
from reporting.evalconfig import ALL, EvalConfig, asked, evaluation_options, model_of, trained_on
from reporting.leaderboard import Benchmark, format_markdown, format_text, to_json
from reporting.plots import plot_evaluation
from reporting.scoring import compare, format_table, summarize
from rollout import RolloutLog, RolloutRequest, RolloutSettings, TooManyEnvFailures, collect
from run.errors import complain
from run.files import build_folder, make_folder, write_json, write_text
from run.progress import phase, playing
from run.rundir import TOKENIZER, put_pictures_beside
from trajectory import Trajectory

PROG = "evaluate.py"


def requests_for(
    tasks: Sequence[Task], samples: int, step: int, seed: int, horizons: Mapping[str, int]
) -> list[RolloutRequest]:
    """Every task `samples` times; `seed` goes to the environment, the same for all samples."""
    return [
        RolloutRequest(task, group, sample, seed, step, horizons[task.env])
        for group, task in enumerate(tasks)
        for sample in range(samples)
    ]


def first_of_each_subtask(tasks: Sequence[Task], limit: int | None) -> list[Task]:
    """
    At most `limit` tasks of each sub-task, in their order; None: all.

    >>> [t.task_id for t in first_of_each_subtask(load_tasks("textcraft", "test"), limit=1)]
    ['textcraft_0', 'textcraft_140', 'textcraft_420', 'textcraft_533']
    """
    seen: Counter[str] = Counter()
    chosen = []
    for task in tasks:
        seen[task.subtask] += 1
        if limit is None or seen[task.subtask] <= limit:
            chosen.append(task)
    return chosen


TrajectoryType = TypeVar("TrajectoryType", bound=Trajectory)


def evaluate_policy(
    play: Callable[[Sequence[RolloutRequest], RolloutSettings], list[TrajectoryType]],
    tasks: Sequence[Task],
    samples: int,
    settings: RolloutSettings,
    horizons: Mapping[str, int],
    step: int = 0,
) -> tuple[dict[str, Any], list[TrajectoryType]]:
    """
    Play `tasks` with `samples` each; what a run in training calls.

    Args:
        play: `rollout.collect` of some engine and environments; requests -> trajectories.
        settings: its seed is that of the environments, the sampling and the bootstrap.
        horizons: most turns in each world that the tasks are of.
        step: the training step; names the trajectories and, with the seed, seeds the sampling.
    Returns: the summary and all trajectories, lost ones included.
    Raises: what `play` raises.
    """
    seed = settings.seed
    trajectories = play(requests_for(tasks, samples, step, seed, horizons), settings)
    longest = [max(horizons.values())]
    return summarize(trajectories, samples, longest, step=step, seed=seed), trajectories


# ----------------------------------------------------------------------------------------------
# The command line


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 done, 1 a failure at run time, 2 misuse, 130 stopped by Ctrl-C."""
    with contextlib.ExitStack() as stack:
        try:
            config = evaluation_options(argv, PROG)
            if config.compare:
                print(compare(*config.compare))
                return 0
            out = stack.enter_context(_folder(config))
            if config.env == ALL:
                kept = _complete_families(config)
                play = _player(config, out, stack) if kept.keys() < ENVS.keys() else _nothing
            else:
                split = None if config.tasks else config.split or "test"
                tasks = load_tasks(config.env, split, config.tasks, config.subtasks)
                pool = _pool(config, config.env, stack)
                play = _player(config, out, stack)
        except ValueError as error:
            complain(PROG, error)
            return 2
        except FAILURES as error:
            complain(PROG, error)
            return 1
        except KeyboardInterrupt:
            return 130
        options = {"command": sys.argv, **asdict(config), "model": model_of(config)}
        write_json(out / "config.json", options)
        if config.env == ALL:
            return _measure_all(config, play, kept, out)
        summary, outcome = _measure(config, play, pool, tasks, out)
        print(format_table(summary))
        if outcome.problem:
            complain(PROG, outcome.problem)
        return outcome.exit_code


@contextlib.contextmanager
def _folder(config: EvalConfig) -> Iterator[Path]:
    """Where the results go, made and writable, before anything that takes time is started.

    What never began leaves no folder behind, so that the same command can be given again.
    Raises: ValueError if nothing can be written there.
    """
    env = ALL if config.env == ALL else env_name(config.env)
    out = Path(config.out or f"runs/eval-{env}-{time.strftime('%Y%m%d-%H%M%S')}")
    made = [path for path in (out, *out.parents) if not path.exists()]  # innermost first
    try:
        try:
            make_folder(out)
            with tempfile.TemporaryFile(dir=out):
                pass
        except OSError as error:
            raise ValueError(f"--out {out}: nothing can be written there: {error}") from None
        yield out
    finally:
        with contextlib.suppress(OSError):  # the first that is not empty ends it
            for path in made:
                path.rmdir()


FAILURES = (EngineError, EnvError, ImportError, OSError)  # ImportError: an environment's package

# Pool, requests, settings and what to call with each trajectory that ends.
Play = Callable[
    [EnvPool, Sequence[RolloutRequest], RolloutSettings, Callable[[Trajectory], None]],
    Sequence[Trajectory],
]


class Outcome(NamedTuple):
    """How playing one environment went."""

    exit_code: int
    problem: str | None


def _player(config: EvalConfig, out: Path, stack: contextlib.ExitStack) -> Play:
    """What plays requests in any environment. Whatever is started here, `stack` closes; a local
    model's tokenizer is put into `out`."""
    if config.api_base:
        from sampling.chatapi import ChatApi, collect_api

        base, key = config.api_base, os.environ.get(config.api_key_env or "")
        return lambda pool, r, s, progress: collect_api(
            ChatApi(base, model_of(config), key), pool, r, s, progress
        )

    import torch

    from chat import ChatTemplate
    from models import load_tokenizer, stop_ids_of
    from sampling.vllm_engine import make_engine
    from scale import precision
    from scale.default_models import resolve_model

    path = resolve_model(model_of(config))
    tokenizer = load_tokenizer(path)
    chat = ChatTemplate(tokenizer, stop_ids_of(path))
    kind = "transformers" if config.deterministic else config.engine
    with phase("starting the sampler"):
        options: dict[str, Any] = {"seed": config.seed} if kind == "vllm" else {}
        options["dtype"] = precision.choose("auto", config.deterministic).dtype  # as a run's
        if torch.cuda.is_available() and kind == "vllm":  # nothing else of ours is on the card
            options["gpu_memory_utilization"] = 0.9
        length = config.max_trajectory_tokens
        engine = make_engine(kind, path, length, config.deterministic, **options)
    stack.callback(engine.close)
    build_folder(out / TOKENIZER, tokenizer.save_pretrained)
    return lambda pool, r, s, progress: collect(engine, pool, chat, r, s, RolloutLog(progress))


def _nothing(*_: Any) -> list[Trajectory]:
    """A player for when all has been played; no model is loaded."""
    return []


def _pool(config: EvalConfig, env: str, stack: contextlib.ExitStack) -> EnvPool:
    """Clients of --env-addr, or of a server that is started here and dies with us.

    Raises: EnvError if nobody answers, or with another world.
    """
    addresses = list(config.env_addr) or [stack.enter_context(local_server(env))]
    pool = EnvPool(env, addresses, prompt=prompt_of(config))
    stack.callback(pool.close)
    pool.client().close()  # before a model is loaded
    return pool


# ----------------------------------------------------------------------------------------------
# One environment


def _measure(
    config: EvalConfig, play: Play, pool: EnvPool, tasks: Sequence[Task], out: Path
) -> tuple[dict[str, Any], Outcome]:
    """Play, then write the three files of `out`; what has ended is written whatever happens."""
    about = asked(config, pool.env)
    settings = RolloutSettings(
        max_tokens_per_turn=config.max_tokens_per_turn,
        max_trajectory_tokens=config.max_trajectory_tokens,
        temperature=config.temperature,
        seed=config.seed,
        env_workers=config.env_workers,
        max_env_failures=config.max_env_failures,
        record_state=config.record_state,
    )
    tasks = first_of_each_subtask(tasks, config.limit)
    horizons = {env_name(pool.env): about["max_rounds"][-1]}
    requests = requests_for(tasks, config.samples, 0, config.seed, horizons)
    what = f"{about['model']} on {about['env']}: {len(tasks)} tasks x {config.samples}"
    print(f"{what}, results in {out}", flush=True)
    if known := trained_on(config, tasks):
        about["trained_on"] = known
        told = f"{config.run} trains on {known} of these; held-out ones: --split test"
        print(f"note: {told}", flush=True)
    ended: list[Trajectory] = []
    outcome = Outcome(0, None)
    with (
        open(out / "trajectories.jsonl", "w", encoding="utf-8") as log,
        playing(f"evaluation in {pool.env}", len(requests)) as tick,
    ):

        def progress(trajectory: Trajectory) -> None:
            ended.append(trajectory)
            put_pictures_beside(trajectory, out)
            log.write(trajectory.to_json())
            log.flush()
            tick(trajectory)

        try:
            play(pool, requests, settings, progress)
        except KeyboardInterrupt:
            outcome = Outcome(130, f"stopped; {len(ended)} of {len(requests)} episodes had ended")
        except (EngineError, EnvError, TooManyEnvFailures) as error:
            outcome = Outcome(1, str(error))
        except Exception as error:  # of the sampler, of a full disk: hours of play are kept
            outcome = Outcome(1, f"{type(error).__name__}: {error}")
        os.fsync(log.fileno())  # before the result that is made of it
    summary = about | {"complete": outcome.problem is None}
    # In one order, whoever ended first: the bootstrap draws the same tasks for the same episodes.
    ended.sort(key=lambda trajectory: trajectory.trajectory_id)
    summary |= summarize(ended, config.samples, about["max_rounds"], seed=config.seed)
    write_json(out / "eval.json", summary)
    plot_evaluation(summary, out / "curves.png")
    return summary, outcome


# ----------------------------------------------------------------------------------------------
# Every environment in turn


def _complete_families(config: EvalConfig) -> dict[str, dict[str, Any]]:
    """
    What --resume need not play again: environment -> its eval.json.

    Raises: ValueError if --out holds a result of other options; one table of both would lie.
    """
    families = {}
    for env in ENVS if config.resume else ():
        path = Path(str(config.out), env, "eval.json")
        if not path.exists():
            continue
        try:
            summary = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            summary = None
        if not isinstance(summary, dict):
            raise ValueError(
                f"--resume: {path} is no result; remove {path.parent} to have it played again"
            )
        for name, value in asked(config, env).items():
            if summary.get(name) != value:
                raise ValueError(
                    f"--resume: {path} was measured with {name} {summary.get(name)}, "
                    f"not {value}; choose another --out"
                )
        if summary.get("complete"):
            families[env] = summary
    return families


def _measure_all(config: EvalConfig, play: Play, kept: Mapping[str, Any], out: Path) -> int:
    """One environment after the other; the table is on disk after each. Returns the exit code."""
    table = Benchmark(model_of(config), config.samples, config.temperature, config.seed)
    table.families = {env: kept.get(env, "not played yet") for env in ENVS}
    _write_table(table, out)
    exit_code = 0
    for env in [env for env in ENVS if env not in kept]:
        summary: dict[str, Any] = {}
        try:
            with contextlib.ExitStack() as stack:
                tasks = load_tasks(env, "test")
                pool = _pool(config, env, stack)
                (out / env).mkdir(exist_ok=True)
                summary, outcome = _measure(config, play, pool, tasks, out / env)
        except (ValueError, *FAILURES) as error:  # the others can still be measured
            outcome = Outcome(1, str(error))
        except KeyboardInterrupt:
            outcome = Outcome(130, "stopped while its server started or ended")
        table.families[env] = outcome.problem or summary
        _write_table(table, out)
        if outcome.problem:
            complain(PROG, f"{env}: {outcome.problem}")
        exit_code = max(exit_code, outcome.exit_code)
        if outcome.exit_code == 130:
            break
    print(format_text(table))
    return exit_code


def _write_table(table: Benchmark, out: Path) -> None:
    write_json(out / "benchmark.json", to_json(table))
    write_text(out / "benchmark.md", format_markdown(table))


if __name__ == "__main__":
    sys.exit(main())
