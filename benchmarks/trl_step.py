"""One training step, here and in TRL: seconds to roll out and to update, on the same work.

TRL's GRPOTrainer has no multi-turn loop of its own for an environment behind HTTP; one writes a
`rollout_func`. The one below is what such a function looks like with transformers' generation: all
trajectories in one left-padded batch, the whole history prefilled again each turn, all environments
stepped, next round. It returns ids and `env_mask`, which is our loss_mask.

Equal on both sides: the warm-started checkpoint, the tasks and environment seeds of each step, the
environment server, budgets, sampling temperature, GRPO with token-mean loss, AdamW in float32 under
bfloat16 autocast, one optimizer step per batch, the machine, the sitting. TRL's gradient
checkpointing is off, which makes it faster here. Different is what each library does with it:

                    ours                                    TRL 1.16
    sampler         vLLM in the process, event-driven       transformers `generate`, lockstep
    before update   the sync check's few tokens             -
    update          groups of equal returns left out        all trajectories, micro-batches of 8
                    (--train-on-all keeps them),            padded on both sides
                    micro-batches by token budget

Each side is a process of its own that takes a step when told to, so that the two alternate under
the same conditions; the first step of each is a warm-up and not counted. Sampling differs, hence
also the number of tokens: results are in seconds and in tokens/s.

TRL is not part of the requirements:   pip install 'trl==1.16.*' datasets
Run it:   python benchmarks/trl_step.py --repeats 3         an estimated half hour on two cores
It prints a table and writes benchmarks/results/trl_step.json.
"""

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from config import Config, check, complete  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "trl_step.json"
TRL_VERSION = "1.16"


def step_config(options: argparse.Namespace) -> Config:
    """Our default configuration, with the checkpoint, batch shape and number of steps asked for."""
    config = Config(
        model=options.model,
        warm_start=options.warm_start,
        steps=options.repeats + 1,
        tasks_per_step=options.tasks,
        group_size=options.samples,
        mini_batch_size=options.tasks * options.samples,
        skip_zero_variance=not options.train_on_all,
        eval_every=0,
    )
    config = complete(config)
    check(config)
    return config


def wait_for_turn() -> None:
    """Say that we are ready, and wait until the parent has the other side idle."""
    print("READY", flush=True)
    if not sys.stdin.readline():
        os._exit(1)  # the parent is gone


def report(figures: dict[str, float]) -> None:
    print("STEP " + json.dumps(figures), flush=True)


# -------------------------------------------------------------------------------------------- ours


def run_ours(config: Config) -> None:
    """The steps of train.py from roll out to sync, timed; no evaluation, no files."""
    import rundir
    from batching import make_batch
    from rollout import RolloutStats, collect
    from train import estimate, usable_trajectories
    from worker import Worker

    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        config = replace(config, run_dir=folder)
        run = rundir.open_run(config)
        stack.callback(run.close)
        worker = Worker(config, run, stack)
        for step in range(1, config.steps + 1):
            wait_for_turn()
            began, stats = time.perf_counter(), RolloutStats()
            trajectories = collect(
                worker.engine,
                worker.pool,
                worker.chat,
                worker.requests_of(step),
                worker.settings(max(config.rounds)),
                stats=stats,
            )
            rolled = time.perf_counter()
            usable, _ = usable_trajectories(trajectories, config)
            if usable:
                batch = make_batch(usable, worker.pad_id)
                old, ref, values = worker.score(batch)
                rewards, _ = worker.penalized_rewards(batch, old, ref)
                advantages, returns = estimate(config, rewards, batch, values)
                worker.update(step, batch, advantages, returns, old, ref, values)
                worker.sync(step, usable[: worker.num_probes])
            ended = time.perf_counter()
            report(
                {
                    "rollout_s": rolled - began,
                    "update_s": ended - rolled,
                    "step_s": ended - began,
                    "generated_tokens": stats.generated_tokens,
                    "trained_tokens": sum(len(t.input_ids) for t in usable),
                    "trained_trajectories": len(usable),
                    "success": sum(t.success for t in trajectories) / len(trajectories),
                }
            )


# --------------------------------------------------------------------------------------------- TRL


def multi_turn_rollout(
    model: Any, chat: Any, pool: Any, requests: list[Any], config: Config
) -> list[Any]:
    """Lockstep rounds with transformers' generation; one RolloutHandler per request.

    The handlers are ours: they hold ids and masks, and cost nothing beside the generation.
    """
    from concurrent.futures import ThreadPoolExecutor

    import torch

    from trajectory import RolloutHandler

    clients = [pool.client() for _ in requests]
    horizon = max(config.rounds)
    handlers = [
        RolloutHandler(
            f"{r.task.task_id}-{r.sample}",
            r.step,
            config.env,
            r.task.task_id,
            r.task.subtask,
            r.group_id,
            r.seed,
            horizon,
        )
        for r in requests
    ]
    with ThreadPoolExecutor(64) as threads:

        def reset(i: int) -> None:
            observation = clients[i].reset(requests[i].task.task_index, seed=requests[i].seed)
            handlers[i].start(chat, clients[i].prompt, observation)

        def step(i: int) -> None:
            handler, turn = handlers[i], handlers[i].turns[-1]
            result = clients[i].step(turn.action_text)
            turn.reward = float(result.reward)
            if result.terminated or result.truncated:
                handler.stop("success" if result.info["success"] else "failure")
                handler.success = bool(result.info["success"])
            elif len(handler.turns) == horizon:
                handler.stop("max_rounds")
            else:
                ids = chat.observation(result.observation)
                room = config.max_trajectory_tokens - len(handler.input_ids) - len(ids)
                if room <= config.max_tokens_per_turn:
                    handler.stop("length")
                else:
                    handler.add_observation(chat, result.observation)

        list(threads.map(reset, range(len(requests))))
        while playing := [i for i, handler in enumerate(handlers) if not handler.stop_reason]:
            prompts = [handlers[i].input_ids for i in playing]
            width = max(map(len, prompts))
            ids = torch.tensor([[0] * (width - len(p)) + p for p in prompts], device=model.device)
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
            with torch.no_grad():
                out = model.generate(
                    input_ids=ids,
                    attention_mask=mask.to(model.device),
                    max_new_tokens=config.max_tokens_per_turn,
                    do_sample=True,
                    temperature=config.temperature,
                    top_k=0,
                    top_p=1.0,
                    eos_token_id=list(chat.stop_token_ids),
                    pad_token_id=chat.end_of_turn,
                )
            for i, row in zip(playing, out[:, width:].tolist(), strict=True):
                ends = [n for n, token in enumerate(row, start=1) if token in chat.stop_token_ids]
                sampled = row[: ends[0]] if ends else row
                handlers[i].add_action(chat, sampled, [0.0] * len(sampled))
            list(threads.map(step, playing))
        list(threads.map(lambda client: client.close(), clients))
    return handlers


def run_trl(config: Config, start: str) -> None:
    """GRPOTrainer on the same requests; a callback times its steps, the rollout itself."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    warnings.filterwarnings("ignore", message="TRL currently supports vLLM")  # not used here
    import torch
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer
    from trl.models import unwrap_model_for_generation

    from chat import ChatTemplate
    from envclient import EnvPool, local_server
    from envs import load_tasks
    from models import load_tokenizer
    from worker import Worker

    tokenizer = load_tokenizer(start)
    chat = ChatTemplate(tokenizer)
    plan = Worker.__new__(Worker)  # of its parts only `requests_of`, a function of (seed, step)
    plan.config = config
    plan.tasks = load_tasks(config.env, config.split, config.tasks, config.subtasks)
    requests_of = {step: plan.requests_of(step) for step in range(1, config.steps + 1)}
    figures: dict[str, float] = {}
    size = config.tasks_per_step * config.group_size

    class Turns(TrainerCallback):
        """Waits for its turn before each step and reports after it."""

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            wait_for_turn()
            figures["began"] = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            step_s = time.perf_counter() - figures.pop("began")
            update_s = step_s - figures["rollout_s"]
            report(figures | {"step_s": step_s, "update_s": update_s})

    def rollout_func(prompts: list[str], trainer: Any) -> dict[str, Any]:
        began = time.perf_counter()
        step = trainer.state.global_step + 1
        by_id: dict[str, list[Any]] = {}
        for request in requests_of[step]:
            by_id.setdefault(request.task.task_id, []).append(request)
        requests = [by_id[prompt].pop() for prompt in prompts]  # KeyError: another step's tasks
        with unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator) as model:
            handlers = multi_turn_rollout(model, chat, pool, requests, config)
        figures["rollout_s"] = time.perf_counter() - began
        figures["generated_tokens"] = sum(sum(h.loss_mask) for h in handlers)
        figures["trained_tokens"] = sum(len(h.input_ids) for h in handlers)
        figures["trained_trajectories"] = len(handlers)
        figures["success"] = sum(h.success for h in handlers) / len(handlers)
        first = [h.turns[0].action_span[0] for h in handlers]
        return {
            "prompt_ids": [h.input_ids[:n] for h, n in zip(handlers, first, strict=True)],
            "completion_ids": [h.input_ids[n:] for h, n in zip(handlers, first, strict=True)],
            "env_mask": [h.loss_mask[n:] for h, n in zip(handlers, first, strict=True)],
            "logprobs": None,  # on-policy, as with TRL's own transformers generation
            "episode_return": [h.total_return for h in handlers],
        }

    def returned(episode_return: list[float], **_: Any) -> list[float]:
        return episode_return

    rows = [r.task.task_id for step in requests_of.values() for r in step[:: config.group_size]]
    # A name of its own spares `datasets` the hashing of its content, which pyarrow 26 breaks.
    dataset = Dataset(InMemoryTable.from_pydict({"prompt": rows}), fingerprint="trl_step")
    micro = next(n for n in (8, 4, 2, 1) if size % n == 0)
    with (
        tempfile.TemporaryDirectory() as folder,
        local_server(config.env) as url,
        EnvPool(config.env, [url]) as pool,
    ):
        arguments = GRPOConfig(
            output_dir=folder,
            model_init_kwargs={"dtype": "float32"},
            use_cpu=not torch.cuda.is_available(),
            bf16=True,
            gradient_checkpointing=False,
            learning_rate=config.learning_rate,
            lr_scheduler_type="constant",
            optim="adamw_torch_fused",
            weight_decay=0.0,
            max_grad_norm=config.max_grad_norm,
            epsilon=config.clip_ratio,
            beta=config.kl_loss_coef,
            loss_type="dapo",  # the mean over all tokens of the batch, as ours
            temperature=config.temperature,
            num_generations=config.group_size,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=size // micro,
            max_completion_length=config.max_trajectory_tokens,
            shuffle_dataset=False,
            max_steps=config.steps,
            seed=config.seed,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = GRPOTrainer(
            model=start,
            reward_funcs=returned,
            args=arguments,
            train_dataset=dataset,
            processing_class=tokenizer,
            rollout_func=rollout_func,
            callbacks=[Turns()],
        )
        trainer.train()


# ------------------------------------------------------------------------------------------ parent


class Side:
    """One of the two processes: started once, then one step each time it is asked."""

    def __init__(self, name: str, arguments: list[str], start: str) -> None:
        command = [sys.executable, str(Path(__file__).resolve()), *arguments]
        self.name = name
        self.process = subprocess.Popen(
            [*command, "--side", name, "--start", start],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
        )
        self.read_until("READY")

    def step(self, is_last: bool) -> dict[str, float]:
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        figures = json.loads(self.read_until("STEP "))
        if not is_last:
            self.read_until("READY")
        return figures

    def read_until(self, mark: str) -> str:
        """The rest of the next line that begins with `mark`; other lines are libraries talking."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith(mark):
                return line[len(mark) :]
        raise SystemExit(f"the {self.name} side ended early; its message is above")

    def close(self) -> None:
        if self.process.stdin:
            self.process.stdin.close()
        try:
            self.process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            self.process.kill()


def trl_version() -> str:
    """The installed TRL.

    Raises:
        SystemExit: none, another one than this benchmark was written for, or without datasets.
    """
    how = f"install it with: pip install 'trl=={TRL_VERSION}.*' datasets"
    try:
        version = importlib.metadata.version("trl")
        importlib.metadata.version("datasets")
    except importlib.metadata.PackageNotFoundError as error:
        raise SystemExit(f"trl_step.py needs {error.name}, which is not installed; {how}") from None
    if not version.startswith(f"{TRL_VERSION}."):
        raise SystemExit(f"trl_step.py is written for TRL {TRL_VERSION}, found {version}; {how}")
    return version


def summarize(repeats: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Medians per side, and TRL over ours, the median of the repeats' ratios.

    Where groups of equal returns left us nothing to train on, no time of the update or of the whole
    step is compared.

    >>> both = {"ours": {"step_s": 2.0}, "trl": {"step_s": 5.0}}
    >>> summarize([both, both])
    {'ours': {'step_s': 2.0}, 'trl': {'step_s': 5.0}, 'trl_over_ours': {'step_s': 2.5}}
    """
    names = list(repeats[0]["ours"])
    table = {
        side: {name: round(statistics.median(r[side][name] for r in repeats), 3) for name in names}
        for side in ("ours", "trl")
    }
    trained = all(r["ours"].get("trained_tokens", 1) for r in repeats)
    compared = ["rollout_s", "generated_per_s"]
    compared += ["update_s", "step_s", "trained_per_s"] if trained else []
    table["trl_over_ours"] = {
        name: round(statistics.median(r["trl"][name] / r["ours"][name] for r in repeats), 2)
        for name in names
        if name in compared
    }
    return table


def with_speeds(figures: dict[str, float]) -> dict[str, float]:
    """Adds tokens/s: comparable where the two sides generated or trained on different amounts."""
    return figures | {
        "generated_per_s": figures["generated_tokens"] / figures["rollout_s"],
        "trained_per_s": figures["trained_tokens"] / figures["update_s"],
    }


def compare(options: argparse.Namespace, arguments: list[str], start: str) -> list[dict]:
    """A warm-up step of each side, then the repeats, the sides in turn."""
    sides: list[Side] = []
    repeats = []
    try:
        for name in ("ours", "trl"):
            print(f"starting {name} ...", flush=True)
            sides.append(Side(name, arguments, start))
        for n in range(options.repeats + 1):
            row = {}
            for side in sides:
                row[side.name] = figures = with_speeds(side.step(is_last=n == options.repeats))
                label = f"repeat {n} of {options.repeats}" if n else "warm-up"
                print(
                    f"{label}: {side.name:<5} rollout {figures['rollout_s']:.1f} s, "
                    f"update {figures['update_s']:.1f} s, success {figures['success']:.0%}",
                    flush=True,
                )
            if n:
                repeats.append(row)
    except KeyboardInterrupt:
        if not repeats:
            raise
        print(f"stopped: the figures are of {len(repeats)} repeats", flush=True)
    finally:
        for side in sides:
            side.close()
    return repeats


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=("smollm2-135m", "tiny"), default="smollm2-135m")
    parser.add_argument(
        "--warm-start", default="auto", help="as train.py: auto, never, or a folder"
    )
    parser.add_argument("--tasks", type=int, default=8, help="tasks per step")
    parser.add_argument("--samples", type=int, default=8, help="trajectories per task")
    parser.add_argument("--repeats", type=int, default=3, help="steps, after one to warm up")
    parser.add_argument("--train-on-all", action="store_true", help="keep groups of equal returns")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--side", choices=("ours", "trl"), help=argparse.SUPPRESS)
    parser.add_argument("--start", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        config = replace(step_config(options), warm_start=options.start)
        run_ours(config) if options.side == "ours" else run_trl(config, options.start)
        return 0
    version = trl_version()
    from rundir import circumstances
    from worker import start_model

    config = step_config(options)
    start = start_model(config)  # trained here if it is not in the cache yet
    about = circumstances()
    about["versions"]["trl"] = version
    repeats = compare(options, sys.argv[1:], start)
    table = summarize(repeats)
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    settings = {
        "model": options.model,
        "start": start.removeprefix(f"{ROOT}/"),
        "tasks": options.tasks,
    }
    settings |= {"samples": options.samples, "train_on_all": options.train_on_all}
    document = {"date": date} | about | {"settings": settings, "summary": table, "repeats": repeats}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(document, indent=2) + "\n")
    print(f"\n{'median of ' + str(len(repeats)):<24}{'ours':>12}{'TRL':>12}{'TRL / ours':>12}")
    for name in table["ours"]:
        ratio = table["trl_over_ours"].get(name, "")
        print(f"{name:<24}{table['ours'][name]:>12.1f}{table['trl'][name]:>12.1f}{ratio:>12}")
    if table["ours"]["trained_trajectories"] < table["trl"]["trained_trajectories"]:
        print("ours left groups of equal returns out of the update; --train-on-all keeps them")
    return 0


if __name__ == "__main__":
    sys.exit(main())
