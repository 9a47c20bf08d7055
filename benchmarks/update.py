"""Measure the overhead of an update: tokens/s of update_policy compared with a bare loop.

    ours    update.update_policy: shuffling, micro-batches, clipped loss, metrics, gradient norm,
            optimizer step
    bare    only forward and backward of the same loss on the same micro-batches

    ratio = tokens/s of ours / tokens/s of bare, median of interleaved repeats     target: 0.9

Tokens include prompts and observations but not padding. The batch resembles that of a training
step: 8 TextCraft goals, each played 8 times for at most 6 turns by an oracle that makes mistakes.

Run it:  python benchmarks/update.py --model tiny               about a minute
         python benchmarks/update.py --model smollm2-135m       about ten minutes on two cores
Read next: update.py at the root.
"""

import random
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # first, because this folder also has an update.py and a rollout.py

import torch  # noqa: E402

from advantages import grpo  # noqa: E402
from batching import Batch, cut_micro_batches, make_batch  # noqa: E402
from benchmarks.common import make_parser, median, seconds_of, take_step, write_result  # noqa: E402
from chat import ChatTemplate  # noqa: E402
from config import Config, Objective  # noqa: E402
from envs import Task, load_tasks  # noqa: E402
from envs.textcraft.env import TextCraft  # noqa: E402
from losses import policy_loss, sampler_is_weights  # noqa: E402
from models import load_policy, load_tokenizer, num_parameters  # noqa: E402
from rollout import RolloutRequest  # noqa: E402
from scale import distributed, precision  # noqa: E402
from scale.default_models import resolve_model  # noqa: E402
from scale.prefix import pack  # noqa: E402
from trajectory import RolloutHandler  # noqa: E402
from update import Learner, forward_policy  # noqa: E402

MAX_ROUNDS = max(Config().rounds)


def play(chat: ChatTemplate, task: Task, group_id: int, sample: int) -> RolloutHandler:
    """One in-process episode of an oracle that sometimes wastes a turn."""
    rng = random.Random(f"{task.task_id}/{sample}")
    error_rate = rng.random()
    env = TextCraft()
    request = RolloutRequest(task, group_id, sample, 0, 1, MAX_ROUNDS)
    handler = RolloutHandler(**request.trajectory_fields("textcraft"))
    handler.start(chat, env.PROMPT, env.reset(task.task_index, 0))
    while not handler.stop_reason:
        thought, action = env.oracle()
        if rng.random() < error_rate:
            thought, action = "I look at what I have.", "inventory"
        ids = chat.action(env.say(thought, action))
        turn = handler.add_action(chat, ids, [-0.5] * len(ids))
        observation, turn.reward, terminated, _, info = env.step(action)
        if terminated:
            handler.stop("success" if info["success"] else "failure", info["success"])
        elif len(handler.turns) == MAX_ROUNDS:
            handler.stop("max_rounds")
        else:
            handler.add_observation(chat, observation)
    return handler


def oracle_batch(tokenizer: Any, num_tasks: int) -> Batch:
    """8 episodes for each of the first `num_tasks` TextCraft goals of depth 1."""
    chat = ChatTemplate(tokenizer)
    tasks = load_tasks("textcraft", "train", subtasks=("depth 1",))[:num_tasks]
    episodes = [play(chat, task, n, sample) for n, task in enumerate(tasks) for sample in range(8)]
    return make_batch(episodes, tokenizer.pad_token_id or 0)


def bare(policy: Any, batch: Batch, cuts: list[list[int]], objective: Objective) -> None:
    """Only the loss and its gradient on the micro-batches `cuts`."""
    device = next(policy.parameters()).device
    denominator = float(batch.loss_mask.sum())
    is_bf16 = precision.choose("auto").format == "bf16"  # as in `ours`
    for rows in cuts:
        micro = batch.rows(rows).to(device)
        mask = micro.loss_mask
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=is_bf16):
            log_probs, _ = forward_policy(policy, batch.rows(rows), objective, device)
        old = log_probs.detach()
        weights = sampler_is_weights(old, micro.rollout_log_probs, mask, objective.sampler_is_cap)
        assert micro.advantages is not None
        clipped = policy_loss(
            log_probs,
            old,
            micro.advantages,
            mask,
            objective.clip_ratio,
            denominator,
            is_weights=weights,
        )
        clipped.loss.backward()
    policy.zero_grad()


def measure(model: str, num_tasks: int, num_repeats: int) -> dict[str, Any]:
    """Run the two loops alternately on one batch."""
    path = resolve_model(model)
    batch = oracle_batch(load_tokenizer(path), num_tasks)
    batch.advantages, _ = grpo(batch.token_rewards, batch.loss_mask, batch.group_ids)
    accelerator = distributed.make_accelerator(precision.choose("auto").autocast)
    policy = distributed.shard(accelerator, load_policy(path).train())
    adamw = torch.optim.AdamW(policy.parameters(), lr=1e-6, weight_decay=0.0, fused=True)
    learner = Learner(accelerator, policy, adamw)
    plain = load_policy(path).train().to(accelerator.device)
    c = Config()
    # One optimizer step, so `ours` has the same micro-batches as `bare`.
    objective = Objective(
        clip_ratio=c.clip_ratio,
        sampler_is_cap=c.sampler_is_cap,
        mini_batch_size=len(batch),
        max_tokens_per_micro_batch=c.max_tokens_per_micro_batch,
    )
    rows = list(range(len(batch)))
    cuts = cut_micro_batches(
        batch, rows, objective.max_tokens_per_micro_batch, objective.share_prefix
    )
    loops: dict[str, Callable[[], None]] = {
        "ours": partial(take_step, learner, batch, objective),
        "bare": partial(bare, plain, batch, cuts, objective),
    }
    for work in loops.values():
        work()  # warm up kernels, allocator and optimizer state
    repeats = []
    for repeat in range(num_repeats):
        repeats.append({f"{name}_s": seconds_of(work) for name, work in loops.items()})
        print(f"repeat {repeat + 1} of {num_repeats}: {repeats[-1]}", flush=True)
    return {
        "settings": {"model": model, "parameters": num_parameters(plain)},
        "batch": {
            "trajectories": len(batch),
            "tokens": int(batch.lengths.sum()),
            "policy_tokens": int(batch.loss_mask.sum()),
            "micro_batches": len(cuts),
            "computed_tokens": sum(pack(batch.rows(r)).input_ids.numel() for r in cuts),
        },
        "repeats": repeats,
    }


def summarize(record: dict[str, Any]) -> dict[str, float]:
    """Medians over the repeats; ratios are taken within a repeat."""
    tokens, repeats = record["batch"]["tokens"], record["repeats"]
    return {
        "ours_tokens_per_s": median((tokens / r["ours_s"] for r in repeats), 1),
        "bare_tokens_per_s": median((tokens / r["bare_s"] for r in repeats), 1),
        "ratio": median((r["bare_s"] / r["ours_s"] for r in repeats), 3),
    }


def main() -> int:
    parser = make_parser(__doc__, 5)
    parser.add_argument(
        "--model", choices=("tiny", "smollm2-135m"), default="tiny", help="model to update"
    )
    parser.add_argument("--tasks", type=int, default=8, help="number of goals in the batch")
    options = parser.parse_args()
    record = measure(options.model, options.tasks, options.repeats)
    summary = summarize(record)
    write_result(options, f"update_{options.model}.json", {"summary": summary} | record)
    for name, value in (summary | record["batch"]).items():
        print(f"{name:<28}{value:>14}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
