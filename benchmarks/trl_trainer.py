"""GRPO with TRL: a `rollout_func` that plays whole episodes, and the trainer around it.

What one writes to train a multi-turn agent with TRL 1.16 and transformers' generation: all
trajectories in one left-padded batch, the whole history prefilled again each turn, all environments
stepped, next round. It returns ids and `env_mask`, which is our loss_mask.

One side of trl_step.py, which runs it in a process of its own.
"""

# mypy: disable-error-code="import-not-found, import-untyped"
# TRL and datasets are not among the requirements.

import os
import tempfile
import time
import warnings
from collections.abc import Callable
from typing import Any

from config import Config


def multi_turn_rollout(
    model: Any, chat: Any, pool: Any, requests: list[Any], config: Config
) -> list[Any]:
    """Lockstep rounds with transformers' generation; one RolloutHandler per request.

    The handlers are ours: they hold ids and masks, and cost nothing beside the generation.
    """
    from concurrent.futures import ThreadPoolExecutor

    import torch

    from rollout import take_result
    from trajectory import RolloutHandler

    clients = [pool.client() for _ in requests]
    handlers = [RolloutHandler(**r.heading(config.env)) for r in requests]
    with ThreadPoolExecutor(64) as threads:

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


def trainer_settings(config: Config, folder: str) -> Any:
    """Our options in TRL's words: the same objective, optimizer and batch."""
    import torch
    from trl import GRPOConfig

    from scale.precision import choose

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


Rollout = Callable[[list[str], Any], dict[str, Any]]


def make_rollout(
    config: Config, chat: Any, pool: Any, plan: dict[int, list[Any]], figures: dict[str, float]
) -> Rollout:
    """TRL's `rollout_func`, which plays what our trainer would play in that step.

    Args:
        plan: step -> its requests.
        figures: gets what was played, and the seconds that took.
    """
    from trl.models import unwrap_model_for_generation

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        began = time.perf_counter()
        step = trainer.state.global_step + 1
        by_id: dict[str, list[Any]] = {}
        for request in plan[step]:
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

    return rollout


def make_turns(
    figures: dict[str, float],
    wait_for_turn: Callable[[], None],
    report: Callable[[dict[str, float]], None],
) -> Any:
    """A callback that waits for its turn before each step and reports after it."""
    from transformers import TrainerCallback

    class Turns(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            wait_for_turn()
            figures["began"] = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            step_s = time.perf_counter() - figures.pop("began")
            update_s = step_s - figures["rollout_s"]
            report(figures | {"step_s": step_s, "update_s": update_s})

    return Turns()


def run_trl(
    config: Config,
    start: str,
    wait_for_turn: Callable[[], None],
    report: Callable[[dict[str, float]], None],
) -> None:
    """GRPOTrainer on the same requests; a callback times its steps, the rollout itself.

    Args:
        start: folder of the warm-started checkpoint.
        wait_for_turn: called before each step.
        report: takes the figures of each step.
    """
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    warnings.filterwarnings("ignore", message="TRL currently supports vLLM")  # not used here
    from datasets import Dataset
    from datasets.table import InMemoryTable
    from trl import GRPOTrainer

    from chat import ChatTemplate
    from config import horizons_of
    from envclient import EnvPool, local_server
    from envs import load_tasks
    from models import load_tokenizer
    from train import requests_of

    tokenizer = load_tokenizer(start)
    tasks = load_tasks(config.env, config.split, config.tasks, config.subtasks)
    horizons, steps = horizons_of(config), range(1, config.steps + 1)
    plan = {step: requests_of(step, tasks, config, horizons) for step in steps}
    figures: dict[str, float] = {}

    def returned(episode_return: list[float], **_: Any) -> list[float]:
        return episode_return

    rows = [r.task.task_id for step in plan.values() for r in step[:: config.group_size]]
    # A name of its own spares `datasets` the hashing of its content, which pyarrow 26 breaks.
    dataset = Dataset(InMemoryTable.from_pydict({"prompt": rows}), fingerprint="trl_step")
    with (
        tempfile.TemporaryDirectory() as folder,
        local_server(config.env) as url,
        EnvPool(config.env, [url]) as pool,
    ):
        trainer = GRPOTrainer(
            model=start,
            reward_funcs=returned,
            args=trainer_settings(config, folder),
            train_dataset=dataset,
            processing_class=tokenizer,
            rollout_func=make_rollout(config, ChatTemplate(tokenizer), pool, plan, figures),
            callbacks=[make_turns(figures, wait_for_turn, report)],
        )
        trainer.train()
