"""
Evaluation: play held-out tasks and print the success rate with its confidence interval.

    tasks x samples ──> rollout.collect       a local model: token ids, engines.py
                    └─> chatapi.collect_api   a model behind a chat server: messages
    trajectories ─────> scoring.summarize ──> table, eval.json, trajectories.jsonl, curves.png

Evaluation uses the same rollout loop as training. `--env all` plays the test split of every
environment with one model, writes a folder of results for each environment, and compares all
results with the paper's numbers in a table (benchmark.md). If an environment fails, the remaining
ones are still played; run the same command with `--resume` to play the missing ones.

How to run:

    .venv/bin/python evaluate.py --env textcraft --model runs/NAME/checkpoints/best --samples 4
    .venv/bin/python evaluate.py --env textcraft --max-rounds 5 10 20 30
    .venv/bin/python evaluate.py --env textcraft --api-base http://127.0.0.1:8000 \\
        --api-model NAME --api-key-env OPENAI_API_KEY
    .venv/bin/python evaluate.py --env all --model runs/NAME/checkpoints/best --out results/NAME
    .venv/bin/python evaluate.py --compare before/eval.json after/eval.json

Exit codes: 0 done, 1 a failure at run time, 2 misuse (one line), 130 stopped by Ctrl-C. Finished
episodes are always written, except with exit code 2.

Read next: chat.py. The numbers: reporting/scoring.py, compare.py.
"""

import contextlib
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import agents
import formats
from config import (
    DEFAULT_ENGINE,
    PAPER,
    SMALL_MODELS,
    EngineName,
    RunConfig,
    check_addresses,
    check_attempts,
    check_engine,
    check_format,
    check_ranges,
    complete,
    config_per_env,
    flag_values,
    has_gpu,
    learns_only_from_files,
    parse_command_line,
    prompt_of,
    saved_config,
    tasks_of,
    with_prompt,
)
from engines import EngineError
from envclient import EnvError, EnvPool, local_server
from envs import ENVS, Task, env_name, load_tasks, settings_of, variant_of
from envs.http import checked_url, key_in
from reporting.compare import OPTIONAL_SETTINGS, compare, format_table
from reporting.leaderboard import Benchmark, format_markdown, to_json
from reporting.plots import plot_evaluation
from reporting.scoring import summarize
from rollout import (
    RolloutLog,
    RolloutRequest,
    RolloutSettings,
    TooManyEnvFailures,
    all_samples,
    collect,
)
from run.errors import Misuse, one_line, print_error, value_errors_as_misuse
from run.files import build_folder, make_folder, write_json, write_text
from run.progress import phase, playing
from run.rundir import TOKENIZER
from scale.default_models import best_checkpoint, check_length, check_model
from trajectory import Trajectory

PROG = "evaluate.py"
ALL = "all"  # --env all
FAILURES = (EngineError, EnvError, ImportError, OSError)  # ImportError: a package is not installed


# ----------------------------------------------------------------------------------------- options


@dataclass(frozen=True)
class EvalConfig:
    """Measure avg@k and pass@k on held-out tasks, overall and by sub-task, with 95 % intervals."""

    zero_allowed: ClassVar[frozenset[str]] = frozenset({"temperature"})

    env: str = "textcraft"
    """environment, or `all` to evaluate on every one and compare with the paper's numbers"""
    tasks: str | None = None
    """JSON file with the ids of the tasks to play, instead of --split"""
    split: Literal["train", "test"] | None = None
    """split to play; if not given, the test split"""
    subtasks: tuple[str, ...] = ()
    """play only these sub-tasks, e.g. "depth 1" "depth 2"; if not given, all"""
    limit: int | None = None
    """play at most this many tasks per sub-task, for a quick look; if not given, all"""
    run: str | None = None
    """folder of a run: evaluate its best checkpoint with the run's settings and held-out tasks
    (its training tasks if it has no held-out tasks); other options override the run's"""
    model: str | None = None
    """smollm2-135m, tiny, a checkpoint folder or a hub id [paper: Qwen2.5-3B and 7B];
    if not given, smollm2-135m on a CPU and Qwen/Qwen2.5-3B-Instruct on a GPU"""
    engine: EngineName = DEFAULT_ENGINE
    """library that samples from --model; if not given, vllm if it is installed"""
    api_base: str | None = None
    """base URL of an OpenAI-compatible chat server whose model to evaluate, instead of --model"""
    api_model: str | None = None
    """model name to send to that server"""
    api_key_env: str | None = None
    """name of the environment variable with the server's key; if not given, no key is sent"""
    samples: int = 1
    """episodes per task: the k of avg@k and pass@k [paper: 1]"""
    max_rounds: tuple[int, ...] = ()
    """maximum turns per episode [paper: 20 in babyai, 30 in the others];
    if not given, the environment's own maximum; give several values to get the success rate
    within each number of turns, from the same episodes"""
    temperature: tuple[float, ...] = (1.0,)
    """sampling temperature; 0: always the most probable token; give several values to play the
    tasks at each, with results in a folder per temperature [paper: 1.0]"""
    seed: int = 0
    """seed for environments and sampling"""
    max_tokens_per_turn: int = 512
    """maximum sampled tokens per turn [paper: 200 in sciworld, 512 in the others]"""
    max_trajectory_tokens: int = 8192
    """maximum tokens per episode, including the prompt [paper: 10752 for textcraft];
    no effect with --api-base"""
    env_addr: tuple[str, ...] = ()
    """URLs of running environment servers,
    or `local` to run the environment in this process without a server;
    if not given, a server is started on this machine"""
    prompt: str | None = None
    """file with a prompt to use instead of the environment's: either JSON messages
    [{"role", "content"}, ...], or plain text, which replaces only the instruction"""
    action_format: formats.Name = "react"
    """how the model writes an action: react (a Thought and an Action line), function_calling
    (JSON, in the style of its chat template), or code (a line of Python)"""
    max_actions_per_turn: int = 1
    """let a turn have several actions, which are played until one fails or the episode ends"""
    agent: agents.Name = "plain"
    """what the model writes besides actions: nothing (plain), a plan before the first (plan), or
    a reflection after a failed attempt, which starts the task again (reflect)"""
    attempts: int = 2
    """attempts at a task with --agent reflect; each has up to --max-rounds turns"""
    env_workers: int = 32
    """maximum number of simultaneous environment calls (with --api-base, simultaneous episodes)"""
    max_env_failures: float = 0.2
    """fail if more than this share of the trajectories is lost to failing servers (0..1)"""
    record_state: bool = False
    """record the environment's state (inventory, map) with the trajectories, for replay.py"""
    deterministic: bool = False
    """make results repeatable, but slow: sample with transformers, one sequence at a time,
    each with its own seed"""
    out: str | None = None
    """new folder for the results; if not given, runs/eval-<env>-<date-time>"""
    resume: bool = False
    """with --env all: skip environments whose results in --out are already complete"""
    compare: tuple[str, ...] = ()
    """two eval.json files: print the paired difference between them and exit"""

    def horizons(self, env: str) -> list[int]:
        """--max-rounds in ascending order, or by default the horizon of `env`."""
        return sorted(set(self.max_rounds)) or [settings_of(env).horizon]

    def model_name(self) -> str:
        default = PAPER["model"] if has_gpu() else SMALL_MODELS[0]
        return self.api_model or self.model or default

    def check(self) -> None:
        """Raises Misuse if a value is out of range or options contradict each other."""
        c, out = self, Path(self.out or "")
        check_ranges(c)
        check_attempts(c.agent, c.attempts)
        if not (c.api_base or c.deterministic):
            check_engine(c.engine)
        is_all = c.env == ALL
        has_task_options = c.env_addr or c.tasks or c.subtasks or c.prompt or c.split == "train"
        has_results = (out / "benchmark.json").exists()
        is_taken = c.out and out.exists() and (not out.is_dir() or any(out.iterdir()))
        problems = {
            f"--compare needs two files, got {len(c.compare)}": len(c.compare) not in (0, 2),
            "--temperature 0 makes all samples of a task equal; use --samples 1": (
                c.samples > 1 and 0 in c.temperature
            ),
            "--env all needs a single --temperature": is_all and len(c.temperature) > 1,
            "--agent reflect needs a single --max-rounds, because an attempt ends there": (
                c.agent == "reflect" and len(c.max_rounds) > 1
            ),
            "--max-tokens-per-turn must be below --max-trajectory-tokens": (
                c.max_tokens_per_turn >= c.max_trajectory_tokens
            ),
            "--tasks and --split both name tasks; give only one": c.tasks and c.split,
            "--model and --api-base cannot be combined; give only one": c.model and c.api_base,
            "give --api-base and --api-model together": bool(c.api_base) != bool(c.api_model),
            "--deterministic is not possible with --api-base": c.api_base and c.deterministic,
            "--env all starts a server for each environment and plays its test split; leave out "
            "--env-addr, --tasks, --subtasks, --split train and --prompt": (
                is_all and has_task_options
            ),
            f"--resume needs --env all and its earlier results in --out; {out} holds no results": (
                c.resume and not (is_all and has_results)
            ),
            f"--out {out} exists and is not empty; choose a new folder": is_taken and not c.resume,
        }
        for problem, is_wrong in problems.items():
            if is_wrong:
                raise Misuse(problem)
        with value_errors_as_misuse():
            key_in(c.api_key_env)
            check_addresses("env_addr", c.env_addr, c.env)
            if c.api_base:
                checked_url(c.api_base, "--api-base")


def parse_options(argv: Sequence[str] | None) -> EvalConfig:
    """Parse the options and check them, including the files and models that they name.

    Raises: Misuse; SystemExit from `parse_command_line`.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    arguments = flag_values(argv)
    (env, *_) = [*arguments.get("env", []), None]
    run = arguments.get("run")
    start = settings_of_run(run[0], set(arguments), env) if run else None
    config = parse_command_line(EvalConfig, argv, PROG, start)
    config.check()
    if config.compare:
        return config
    with value_errors_as_misuse():
        for env in ENVS if config.env == ALL else [config.env]:
            check_format(env, config.action_format, config.max_actions_per_turn)
        if config.env != ALL:
            config = with_prompt(config)
            tasks_to_play(config)
        if not config.api_base:
            check_model(config.model_name())
            check_length(config.model_name(), config.max_trajectory_tokens)
    return config


def tasks_to_play(config: EvalConfig) -> list[Task]:
    split = None if config.tasks else config.split or "test"
    return load_tasks(config.env, split, config.tasks, config.subtasks)


def settings_of_run(folder: str, named_options: set[str], env: str | None = None) -> EvalConfig:
    """The options with which a run evaluates its policy.

    Args:
        named_options: options on the command line; options of the run that contradict them are
            left out.
        env: the environment to evaluate, if the run plays several.
    Raises: Misuse if there is no run, it has no checkpoint, or --env is missing.
    """
    if not (Path(folder) / "config.json").exists():
        raise Misuse(f"--run {folder} holds no run; give a folder that train.py created")
    c = complete(saved_config(folder, RunConfig))
    if len(configs := config_per_env(c)) > 1:
        matches = [env_config for env_config in configs if env_config.env == env]
        if not matches:
            names = " or ".join(env_config.env for env_config in configs)
            raise Misuse(f"--run {folder} plays several environments: choose one, --env {names}")
        c, named_options = matches[0], named_options - {"env"}
    checkpoint = best_checkpoint(Path(folder))
    if checkpoint is None and "model" not in named_options:
        raise Misuse(f"--run {folder} has no checkpoint yet; give a --model")
    shared = ["env", "prompt", "action_format", "max_actions_per_turn", "engine", "seed"]
    shared += ["agent", "attempts"]
    shared += ["max_tokens_per_turn", "max_trajectory_tokens"]
    config = EvalConfig(
        run=folder,
        model=str(checkpoint),
        max_rounds=(c.evaluation_rounds,),
        samples=c.eval_samples,
        temperature=c.evaluation_temperatures,
        **{name: getattr(c, name) for name in shared},
    )
    if "env" in named_options and env not in (None, c.env):
        # Use that environment's prompt and horizon.
        return replace(config, env=env, prompt=None, max_rounds=())
    if named_options & {"tasks", "split"}:
        return config
    if not c.eval_every and not c.eval_tasks:
        return replace(config, tasks=c.tasks, split=c.split, subtasks=c.subtasks)
    return replace(config, tasks=c.eval_tasks, subtasks=c.evaluation_subtasks)


def num_trained_on(config: EvalConfig, tasks: Sequence[Task]) -> int:
    """How many of `tasks` are training tasks of --run; 0 if that run learns from files."""
    train_ids = set[str]()
    with contextlib.suppress(ValueError, OSError):  # the run's id list no longer exists
        if config.run:
            saved = json.loads((Path(config.run) / "config.json").read_text(encoding="utf-8"))
            if not learns_only_from_files(saved.get("method", ""), saved["config"]):
                options = complete(saved_config(config.run, RunConfig))
                train_ids = {task.task_id for task in tasks_of(options)}
    return sum(task.task_id in train_ids for task in tasks)


def only_temperature(config: EvalConfig) -> float:
    (temperature,) = config.temperature
    return temperature


def conditions(config: EvalConfig, env: str) -> dict[str, Any]:
    """The settings that a result depends on, as fields of eval.json."""
    names = ["seed", "samples", "limit"]
    names += ["max_tokens_per_turn", "max_trajectory_tokens"]
    fields: dict[str, Any] = {"env": env, "model": config.model_name()}
    fields |= {name: getattr(config, name) for name in names}
    fields["temperature"] = only_temperature(config)
    fields["max_rounds"] = config.horizons(env)
    weights = Path(config.model_name())
    if weights.is_dir():
        fields["weights"] = str(weights.resolve())  # `best` is a link
    if config.api_base:
        fields["api_base"] = config.api_base
    if config.prompt:
        fields["prompt"] = config.prompt
    if config.action_format != formats.REACT.name or config.max_actions_per_turn > 1:
        fields["action_format"] = config.action_format
        fields["max_actions_per_turn"] = config.max_actions_per_turn
    if config.agent != agents.PLAIN.name:
        fields["agent"] = config.agent
        fields["attempts"] = agents.make(config.agent, config.attempts).attempts
    if not config.env_addr and (variant := variant_of(env)):
        fields["variant"] = variant  # known only if this program starts the server
    return fields


# ----------------------------------------------------------------------------------------- playing


def first_of_each_subtask(tasks: Sequence[Task], limit: int | None) -> list[Task]:
    """The first `limit` tasks of each sub-task, in their order; None: all."""
    counts: Counter[str] = Counter()
    selection = []
    for task in tasks:
        counts[task.subtask] += 1
        if limit is None or counts[task.subtask] <= limit:
            selection.append(task)
    return selection


# A function of the pool, the requests, the settings and a callback for each trajectory that ends.
Play = Callable[
    [EnvPool, Sequence[RolloutRequest], RolloutSettings, Callable[[Trajectory], None]],
    Sequence[Trajectory],
]


def start_player(config: EvalConfig, out: Path, stack: contextlib.ExitStack) -> Play:
    """Start the sampler; returns a function that plays requests in any environment. `stack` closes
    the sampler. Writes the options and, for a local model, its tokenizer to `out`."""
    options = {"command": sys.argv, **asdict(config), "model": config.model_name()}
    if config.api_base:
        from sampling.chatapi import ChatApi, collect_api

        base, key = config.api_base, key_in(config.api_key_env)
        write_json(out / "config.json", options)
        return lambda pool, r, s, progress: collect_api(
            ChatApi(base, config.model_name(), key), pool, r, s, progress
        )

    import torch

    from chat import ChatTemplate
    from models import load_tokenizer, stop_ids_of
    from sampling.vllm_engine import make_engine
    from scale import precision
    from scale.default_models import resolve_model

    kind = "transformers" if config.deterministic else config.engine
    with value_errors_as_misuse(), phase("starting the sampler"):
        path = resolve_model(config.model_name())
        tokenizer = load_tokenizer(path)
        chat = ChatTemplate(tokenizer, stop_ids_of(path))
        settings: dict[str, Any] = {"seed": config.seed} if kind == "vllm" else {}
        settings["dtype"] = precision.choose("auto", config.deterministic).dtype  # as in training
        if torch.cuda.is_available() and kind == "vllm":  # the sampler has the GPU to itself
            settings["gpu_memory_utilization"] = 0.9
        length = config.max_trajectory_tokens
        engine = make_engine(kind, path, length, config.deterministic, **settings)
    stack.callback(engine.close)
    build_folder(out / TOKENIZER, tokenizer.save_pretrained)
    write_json(out / "config.json", options)
    return lambda pool, r, s, progress: collect(engine, pool, chat, r, s, RolloutLog(progress))


def start_pool(config: EvalConfig, env: str, stack: contextlib.ExitStack) -> EnvPool:
    """Clients of the servers of --env-addr, or of a server started here; `stack` closes them.

    Raises: EnvError if no server answers, or one serves a different environment.
    """
    addresses = list(config.env_addr) or [stack.enter_context(local_server(env))]
    pool = EnvPool(env, addresses, prompt=prompt_of(config), action_format=format_of(config))
    stack.callback(pool.close)
    pool.client().close()  # fails before a model is loaded
    return pool


def format_of(config: EvalConfig) -> formats.ActionFormat:
    """How the model writes its actions. A chat server describes functions in its own way."""
    if config.action_format != formats.FunctionCalling.name:
        return formats.action_format(config.action_format, config.max_actions_per_turn)
    if config.api_base:
        return formats.FunctionCalling(config.max_actions_per_turn, in_template=True)
    from models import load_tokenizer
    from scale.default_models import resolve_model

    with value_errors_as_misuse():
        template = load_tokenizer(resolve_model(config.model_name())).chat_template
    return formats.action_format(config.action_format, config.max_actions_per_turn, template)


def measure(
    config: EvalConfig, play: Play, pool: EnvPool, tasks: Sequence[Task], out: Path
) -> tuple[dict[str, Any], int, str | None]:
    """Play one environment and write the results. Episodes that have ended are saved even if an
    error follows. Returns the summary, the exit code, and the error message or None."""
    fields = conditions(config, pool.env)
    settings = RolloutSettings(
        max_tokens_per_turn=config.max_tokens_per_turn,
        max_trajectory_tokens=config.max_trajectory_tokens,
        temperature=fields["temperature"],
        seed=config.seed,
        env_workers=config.env_workers,
        max_env_failures=config.max_env_failures,
        record_state=config.record_state,
        agent=agents.make(config.agent, config.attempts),
    )
    tasks = first_of_each_subtask(tasks, config.limit)
    horizons = {env_name(pool.env): fields["max_rounds"][-1]}
    requests = all_samples(tasks, config.samples, config.seed, 0, horizons)
    title = f"{fields['model']} on {fields['env']}: {len(tasks)} tasks x {config.samples}"
    print(f"{title}, results in {out}", flush=True)
    if count := num_trained_on(config, tasks):
        fields["trained_on"] = count
        note = f"{config.run} trains on {count} of these; for held-out tasks use --split test"
        print(f"note: {note}", flush=True)
    trajectories: list[Trajectory] = []
    exit_code, problem = 0, None
    with (
        open(out / "trajectories.jsonl", "w", encoding="utf-8") as log,
        playing(f"evaluation in {pool.env}", len(requests)) as tick,
    ):

        def progress(trajectory: Trajectory) -> None:
            trajectories.append(trajectory)
            log.write(trajectory.to_json())
            log.flush()
            tick(trajectory)

        try:
            play(pool, requests, settings, progress)
        except KeyboardInterrupt:
            exit_code = 130
            problem = f"stopped; {len(trajectories)} of {len(requests)} episodes had ended"
        except Exception as error:  # save the hours of play before any failure
            is_expected = isinstance(error, EngineError | EnvError | TooManyEnvFailures)
            exit_code, problem = 1, str(error) if is_expected else one_line(error)
        os.fsync(log.fileno())
    # Sort, so that the same episodes give the same file.
    trajectories.sort(key=lambda trajectory: trajectory.trajectory_id)
    summary = fields | {"complete": problem is None}
    summary |= summarize(trajectories, config.samples, fields["max_rounds"])
    write_json(out / "eval.json", summary)
    plot_evaluation(summary, out / "curves.png")
    return summary, exit_code, problem


# --------------------------------------------------------------------------------- the command line


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the options, evaluate, print the table; returns the exit code."""
    try:
        config = parse_options(argv)
        if config.compare:
            print(compare(*config.compare))
            return 0
        results = complete_results(config)
        name = ALL if config.env == ALL else env_name(config.env)
        out = Path(config.out or f"runs/eval-{name}-{time.strftime('%Y%m%d-%H%M%S')}")
        make_folder(out)
    except (ValueError, OSError) as error:  # OSError: the folder is not writable
        print_error(PROG, error)
        return 2
    try:
        with contextlib.ExitStack() as stack:
            if config.env == ALL:
                return measure_all(config, results, out, stack)
            pool = start_pool(config, config.env, stack)
            play = start_player(config, out, stack)
            return measure_temperatures(config, play, pool, out)
    except (Misuse, *FAILURES) as error:
        print_error(PROG, error)
        return 2 if isinstance(error, Misuse) else 1
    except KeyboardInterrupt:
        return 130
    finally:
        with contextlib.suppress(OSError):  # if it is empty, the same --out can be used again
            out.rmdir()


def measure_temperatures(config: EvalConfig, play: Play, pool: EnvPool, out: Path) -> int:
    """Play one environment at each temperature and print the tables. Returns the exit code."""
    several, exit_code = len(config.temperature) > 1, 0
    for temperature in config.temperature:
        folder = out / f"temperature_{temperature:g}" if several else out
        make_folder(folder)
        at_one = replace(config, temperature=(temperature,))
        summary, exit_code, problem = measure(at_one, play, pool, tasks_to_play(config), folder)
        print(format_table(summary))
        if problem:
            print_error(PROG, problem)
            break
    return exit_code


def complete_results(config: EvalConfig) -> dict[str, dict[str, Any]]:
    """The results that --resume does not repeat: environment -> its eval.json.

    Raises: Misuse if the results in --out come from different options.
    """
    results = {}
    for env in ENVS if config.resume else ():
        path = Path(str(config.out), env, "eval.json")
        if path.exists():
            summary = json.loads(path.read_text(encoding="utf-8"))
            now = conditions(config, env)
            for name in dict.fromkeys([*now, "api_base", *OPTIONAL_SETTINGS]):
                if summary.get(name) != (value := now.get(name)):
                    raise Misuse(
                        f"--resume: {path} was measured with {name} {summary.get(name)}, "
                        f"not {value}; choose another --out"
                    )
            if summary["complete"]:
                results[env] = summary
    return results


def measure_all(
    config: EvalConfig, results: Mapping[str, Any], out: Path, stack: contextlib.ExitStack
) -> int:
    """Evaluate all environments in turn and write the table after each one. Returns the exit
    code."""
    temperature = only_temperature(config)
    table = Benchmark(config.model_name(), config.samples, temperature, config.seed)
    table.families = {env: results.get(env, "not played yet") for env in ENVS}
    missing, final_code = [env for env in ENVS if env not in results], 0
    if missing:
        play = start_player(config, out, stack)
        write_table(table, out)
    for env in missing:
        summary: dict[str, Any] = {}
        try:
            with contextlib.ExitStack() as env_stack:
                tasks = load_tasks(env, "test")
                pool = start_pool(config, env, env_stack)
                (out / env).mkdir(exist_ok=True)
                summary, exit_code, problem = measure(config, play, pool, tasks, out / env)
        except (ValueError, *FAILURES) as error:  # the remaining environments can still be played
            exit_code, problem = 1, str(error)
        except KeyboardInterrupt:
            exit_code, problem = 130, "stopped while its server was starting or ending"
        table.families[env] = problem or summary
        write_table(table, out)
        if problem:
            print_error(PROG, f"{env}: {problem}")
        final_code = max(final_code, exit_code)
        if exit_code == 130:
            break
    print(format_markdown(table))
    return final_code


def write_table(table: Benchmark, out: Path) -> None:
    write_json(out / "benchmark.json", to_json(table))
    write_text(out / "benchmark.md", format_markdown(table))


if __name__ == "__main__":
    sys.exit(main())
