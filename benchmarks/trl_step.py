"""Compare a training step with TRL's: seconds for the rollout and the update on the same tasks.

TRL's GRPOTrainer has no multi-turn loop for an environment behind HTTP, so a user writes a
`rollout_func`. Ours samples with transformers (`play_lockstep`). Each round generates one turn for
all trajectories in one left-padded batch, which prefills the complete history again, and then steps
all environments. The function returns token ids and `env_mask`, which is our loss_mask.

The same on both sides: initial weights, tasks and seeds, token budgets, temperature, GRPO with
token-mean loss, AdamW in float32, number format, one optimizer step per batch. TRL's gradient
checkpointing is off, which makes it faster here. The differences:

                    ours (train.py itself)                  TRL 1.16
    sampler         vLLM, in-process, event-driven          transformers `generate`, lockstep
    update          without groups of equal returns         all trajectories, micro-batches of 8
                    (--train-on-all keeps them),            padded on both sides
                    micro-batches by token budget

The first step on each side is a warm-up and is not counted. The two sides sample different numbers
of tokens, so results are given in seconds and in tokens/s.

TRL is not in the requirements:   pip install 'trl==1.16.*' datasets
Run it:   python benchmarks/trl_step.py --repeats 3         about half an hour on two cores
          python benchmarks/trl_step.py --tasks 2 --repeats 5 --train-on-all --out FILE
"""

# mypy: disable-error-code="import-not-found, import-untyped"

import importlib.metadata
import os
import subprocess
import sys
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch

from agents import take_result
from benchmarks.common import make_parser, median, write_result
from chat import ChatTemplate
from config import Config, options
from envclient import EnvPool, local_server
from envs import load_tasks
from models import load_tokenizer
from recipes.common import read_lines
from rollout import draw_requests
from scale.distributed import make_accelerator
from scale.precision import choose
from trajectory import RolloutHandler
from warmstart import start_model

TRL_VERSION = "1.16"
Figures = dict[str, float]


# -------------------------------------------------------------------------------------------- ours


def our_steps(words: list[str]) -> list[Figures]:
    """Run train.py and read the timings of its steps."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "train.py", *words, "--run-dir", str(run)]
        subprocess.run(command, cwd=ROOT, check=True)
        steps = []
        for timing in read_lines(run / "timings.jsonl"):
            if not (step := timing["step"]):
                continue
            trajectories = read_lines(run / f"trajectories/step_{step:06d}.jsonl")
            trained = [line for line in trajectories if line["used_in_loss"]]
            step_s = timing["time/step_s"] - timing.get("time/save_s", 0.0)
            rollout_s = timing["time/rollout_s"]
            figures = {
                "rollout_s": rollout_s,
                "update_s": step_s - rollout_s,
                "step_s": step_s,
                "generated_tokens": sum(sum(line["loss_mask"]) for line in trajectories),
                "trained_tokens": sum(len(line["input_ids"]) for line in trained),
                "trained_trajectories": len(trained),
                "success": sum(line["success"] for line in trajectories) / len(trajectories),
            }
            steps.append(with_speeds(figures))
        return steps[1:]


def with_speeds(figures: Figures) -> Figures:
    """Add tokens/s, which stay comparable when the two sides process different amounts."""
    return figures | {
        "generated_per_s": figures["generated_tokens"] / figures["rollout_s"],
        "trained_per_s": figures["trained_tokens"] / figures["update_s"],
    }


# --------------------------------------------------------------------------------------------- TRL


def play_lockstep(
    model: Any, chat: ChatTemplate, pool: EnvPool, requests: list[Any], config: Config
) -> list[RolloutHandler]:
    """Lockstep rounds with transformers' generation. Our RolloutHandlers keep the ids and masks,
    which costs little time compared with the generation."""
    clients = [pool.client() for _ in requests]
    handlers = [RolloutHandler(**r.trajectory_fields(config.env)) for r in requests]

    def reset(i: int) -> None:
        observation = clients[i].reset(requests[i].task.task_index, seed=requests[i].seed)
        handlers[i].start(chat, clients[i].prompt, observation)

    def step(i: int) -> None:
        handler, turn = handlers[i], handlers[i].turns[-1]
        result = clients[i].step(turn.action_text)
        if take_result(handler, turn, result):
            ids = chat.observation(result.observation)
            room = config.max_trajectory_tokens - len(handler.input_ids) - len(ids)
            if room <= config.max_tokens_per_turn:
                handler.stop("length")
            else:
                handler.add_observation(chat, result.observation)

    with ThreadPoolExecutor(64) as threads:
        list(threads.map(reset, range(len(requests))))
        while playing := [i for i, handler in enumerate(handlers) if not handler.stop_reason]:
            prompts = [handlers[i].input_ids for i in playing]
            for i, sampled in zip(playing, generate(model, chat, prompts, config), strict=True):
                handlers[i].add_action(chat, sampled, [0.0] * len(sampled))
            list(threads.map(step, playing))
        list(threads.map(lambda client: client.close(), clients))
    return handlers


def generate(
    model: Any, chat: ChatTemplate, prompts: list[list[int]], config: Config
) -> list[list[int]]:
    """Sample one turn for each prompt, in one left-padded batch."""
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
    turns = []
    for row in out[:, width:].tolist():
        ends = [n for n, token in enumerate(row, start=1) if token in chat.stop_token_ids]
        turns.append(row[: ends[0]] if ends else row)
    return turns


def trainer_settings(config: Config, folder: str) -> Any:
    """TRL's options for the same objective, optimizer and batch."""
    from trl import GRPOConfig

    size = config.tasks_per_step * config.group_size
    micro = next(n for n in (8, 4, 2, 1) if size % n == 0)
    return GRPOConfig(
        output_dir=folder,
        model_init_kwargs={"dtype": "float32"},
        use_cpu=not torch.cuda.is_available(),
        bf16=choose("auto").format == "bf16",
        gradient_checkpointing=False,
        learning_rate=config.learning_rate,
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        weight_decay=0.0,
        max_grad_norm=config.max_grad_norm,
        epsilon=config.clip_ratio,
        beta=config.kl_loss_coef,
        loss_type="dapo",  # mean over all tokens of the batch, as in our loss
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


def trl_steps(config: Config, start: str) -> list[Figures]:
    """Train with GRPOTrainer on the same requests. A callback times the steps; `rollout` times
    itself."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    warnings.filterwarnings("ignore", message="TRL currently supports vLLM")  # we do not use it
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from transformers import TrainerCallback
    from trl import GRPOTrainer
    from trl.models import unwrap_model_for_generation

    tasks = load_tasks(config.env, config.split, config.tasks, config.subtasks)
    size, horizons = (config.tasks_per_step, config.group_size), {config.env: config.rounds[0]}
    plan = {
        step: draw_requests(step, tasks, *size, config.seed, step, horizons, config.env_weights)
        for step in range(1, config.steps + 1)
    }
    tokenizer = load_tokenizer(start)
    chat, steps, figures = ChatTemplate(tokenizer), list[Figures](), Figures()

    class Timer(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            figures["start"] = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            step_s = time.perf_counter() - figures.pop("start")
            update_s = step_s - figures["rollout_s"]
            steps.append(with_speeds(figures | {"step_s": step_s, "update_s": update_s}))

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        start_s = time.perf_counter()
        by_id: dict[str, list[Any]] = {}
        for request in plan[trainer.state.global_step + 1]:
            by_id.setdefault(request.task.task_id, []).append(request)
        requests = [by_id[prompt].pop() for prompt in prompts]
        with unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator) as model:
            handlers = play_lockstep(model, chat, pool, requests, config)
        figures["rollout_s"] = time.perf_counter() - start_s
        figures["generated_tokens"] = sum(sum(h.loss_mask) for h in handlers)
        figures["trained_tokens"] = sum(len(h.input_ids) for h in handlers)
        figures["trained_trajectories"] = len(handlers)
        figures["success"] = sum(h.success for h in handlers) / len(handlers)
        lengths = [h.turns[0].action_span[0] for h in handlers]  # of the prompts
        return {
            "prompt_ids": [h.input_ids[:n] for h, n in zip(handlers, lengths, strict=True)],
            "completion_ids": [h.input_ids[n:] for h, n in zip(handlers, lengths, strict=True)],
            "env_mask": [h.loss_mask[n:] for h, n in zip(handlers, lengths, strict=True)],
            "logprobs": None,  # on-policy, as with TRL's transformers generation
            "episode_return": [h.total_return for h in handlers],
        }

    rows = [r.task.task_id for step in plan.values() for r in step[:: config.group_size]]
    # With a fingerprint `datasets` does not hash the content, which fails with pyarrow 26.
    dataset = Dataset(InMemoryTable.from_pydict({"prompt": rows}), fingerprint="trl_step")
    with (
        tempfile.TemporaryDirectory() as folder,
        local_server(config.env) as url,
        EnvPool(config.env, [url]) as pool,
    ):
        GRPOTrainer(
            model=start,
            reward_funcs=lambda episode_return, **_: episode_return,
            args=trainer_settings(config, folder),
            train_dataset=dataset,
            processing_class=tokenizer,
            rollout_func=rollout,
            callbacks=[Timer()],
        ).train()
    return steps[1:]


# ---------------------------------------------------------------------------------------- measuring


def trl_version() -> str:
    hint = f"install it with: pip install 'trl=={TRL_VERSION}.*' datasets"
    try:
        version = importlib.metadata.version("trl")
        importlib.metadata.version("datasets")
    except importlib.metadata.PackageNotFoundError as error:
        raise SystemExit(f"trl_step.py: {error.name} is not installed; {hint}") from None
    if not version.startswith(f"{TRL_VERSION}."):
        raise SystemExit(f"trl_step.py is written for TRL {TRL_VERSION}, found {version}; {hint}")
    return version


def summarize(ours: list[Figures], trl: list[Figures]) -> dict[str, Figures]:
    """Medians per side, and the median over repeats of TRL's value divided by ours."""
    names = list(ours[0])
    return {
        "ours": {name: median((row[name] for row in ours), 3) for name in names},
        "trl": {name: median((row[name] for row in trl), 3) for name in names},
        "trl_over_ours": {
            name: median((b[name] / a[name] for a, b in zip(ours, trl, strict=True)), 2)
            for name in names
            if name.endswith(("_s", "per_s")) and all(row[name] for row in ours)
        },
    }


def main() -> int:
    parser = make_parser(__doc__, 3)
    parser.add_argument(
        "--model", choices=("smollm2-135m", "tiny"), default="smollm2-135m", help="model to train"
    )
    parser.add_argument("--tasks", type=int, default=8, help="tasks per step")
    parser.add_argument(
        "--train-on-all",
        action="store_true",
        help="also train on groups whose returns are all equal",
    )
    o = parser.parse_args()
    version = trl_version()
    shape: dict[str, Any] = {"tasks_per_step": o.tasks, "group_size": 8}
    shape |= {"mini_batch_size": o.tasks * 8, "steps": o.repeats + 1, "eval_every": 0}
    shape |= {"model": o.model, "save_every": o.repeats + 1}
    words = [w for name, v in shape.items() for w in (f"--{name.replace('_', '-')}", str(v))]
    words += ["--no-skip-zero-variance"] if o.train_on_all else []
    config = options("textcraft", **shape)
    ours = our_steps(words)
    start = start_model(config, make_accelerator(choose("auto").autocast))
    trl = trl_steps(config, start)
    table = summarize(ours, trl)
    settings = {"model": o.model, "start": start.removeprefix(f"{ROOT}/"), "tasks": o.tasks}
    settings |= {"train_on_all": o.train_on_all, "trl": version}
    repeats = [{"ours": a, "trl": b} for a, b in zip(ours, trl, strict=True)]
    result = {"settings": settings, "summary": table, "repeats": repeats}
    write_result(o, "trl_step.json", result)
    print(f"\n{f'median of {len(repeats)}':<24}{'ours':>12}{'TRL':>12}{'TRL / ours':>12}")
    for name in table["ours"]:
        ratio = table["trl_over_ours"].get(name, "")
        print(f"{name:<24}{table['ours'][name]:>12.1f}{table['trl'][name]:>12.1f}{ratio:>12}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
