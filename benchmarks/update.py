"""How much of the update's time is the mathematics: tokens/s of update_policy over a bare loop.

    ours    update.update_policy: shuffling, micro-batches, clipped loss, metrics, gradient norm,
            optimizer step
    bare    forward and backward of the same loss on the same micro-batches, nothing else
    padded  ours without prefix sharing: groups are not packed, rows are sorted and padded

    ratio = tokens/s of ours / tokens/s of bare, median of five interleaved rounds     goal: 0.9

Tokens are those of the trajectories, prompts and observations included, padding not; the openings
that a group shares count once per trajectory, so that `ours` and `padded` do the same work by this
measure and their ratio is what sharing saves. The batch has the shape of a training step: 8
TextCraft goals of depth 1, each played 8 times for at most 6 turns by an oracle that errs, so that
rows end early where it solved the goal and run to the horizon where it did not.

Run it:  python benchmarks/update.py --model tiny               about a minute
         python benchmarks/update.py --model smollm2-135m       about ten minutes on two cores
Read next: update.py at the root.
"""

import argparse
import random
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # before this folder, whose update.py is this file

import torch  # noqa: E402

from advantages import grpo  # noqa: E402
from batching import Batch, cut, make_batch  # noqa: E402
from benchmarks import common  # noqa: E402
from chat import ChatTemplate  # noqa: E402
from config import Config, Objective  # noqa: E402
from envs import Task, get_env, load_tasks  # noqa: E402
from losses import policy_loss, sampler_is_weights  # noqa: E402
from models import load_policy, load_tokenizer, num_parameters  # noqa: E402
from scale.default_models import resolve_model  # noqa: E402
from scale.prefix import pack  # noqa: E402
from trajectory import RolloutHandler  # noqa: E402
from update import forward_policy  # noqa: E402

GOAL = 0.9


def play(
    chat: ChatTemplate, task: Task, group_id: int, sample: int, max_rounds: int
) -> RolloutHandler:
    """One episode in this process: the oracle, which asks for the wrong thing now and then."""
    rng = random.Random(f"{task.task_id}/{sample}")
    error_rate = rng.random()
    world = get_env("textcraft")()
    handler = RolloutHandler(
        trajectory_id=f"{task.task_id}-{sample}",
        step=1,
        env="textcraft",
        task_id=task.task_id,
        subtask=task.subtask,
        group_id=group_id,
        seed=0,
        max_rounds=max_rounds,
    )
    handler.start(chat, world.PROMPT, world.reset(task.task_index, 0))
    while not handler.stop_reason:
        thought, action = world.oracle()
        if rng.random() < error_rate:
            thought, action = "I look at what I have.", "inventory"
        ids = chat.action(world.say(thought, action))
        turn = handler.add_action(chat, ids, [-0.5] * len(ids))
        observation, turn.reward, terminated, _, info = world.step(action)
        if terminated:
            handler.stop("success" if info["success"] else "failure", info["success"])
        elif len(handler.turns) == max_rounds:
            handler.stop("max_rounds")
        else:
            handler.add_observation(chat, observation)
    return handler


def played_batch(tokenizer: Any, num_tasks: int, samples: int, max_rounds: int) -> Batch:
    """`samples` episodes of each of TextCraft's first goals of depth 1."""
    chat = ChatTemplate(tokenizer)
    tasks = load_tasks("textcraft", "train", subtasks=("depth 1",))[:num_tasks]
    episodes = [
        play(chat, task, group, sample, max_rounds)
        for group, task in enumerate(tasks)
        for sample in range(samples)
    ]
    return make_batch(episodes, tokenizer.pad_token_id or 0)


def bare(policy: Any, batch: Batch, cuts: list[list[int]], objective: Objective) -> None:
    """The loss and its gradient of the micro-batches `cuts`, and nothing else."""
    device = next(policy.parameters()).device
    denominator = float(batch.loss_mask.sum())
    for rows in cuts:
        part = batch.rows(rows).to(device)
        mask = part.loss_mask
        with torch.autocast(device.type, dtype=torch.bfloat16):
            log_probs, _ = forward_policy(policy, batch.rows(rows), objective, device)
        old = log_probs.detach()
        weights = sampler_is_weights(old, part.rollout_log_probs, mask, objective.sampler_is_cap)
        assert part.advantages is not None
        clipped = policy_loss(
            log_probs,
            old,
            part.advantages,
            mask,
            objective.clip_ratio,
            denominator,
            is_weights=weights,
        )
        clipped.loss.backward()
    policy.zero_grad()


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """The three loops on one batch, in turn."""
    path, rounds = resolve_model(options.model), max(Config().rounds)
    batch = played_batch(load_tokenizer(path), options.tasks, options.samples, rounds)
    batch.advantages, _ = grpo(batch.token_rewards, batch.loss_mask, batch.group_ids)
    learner = common.make_learner(path)
    plain = load_policy(path).train().to(learner.accelerator.device)
    # One optimizer step: the cuts of ours are those of bare.
    objective = common.one_step(len(batch), options.max_tokens)
    padded = replace(objective, share_prefix=False)
    rows = list(range(len(batch)))
    cuts, padded_cuts = (
        cut(batch, rows, o.max_tokens_per_micro_batch, o.share_prefix) for o in (objective, padded)
    )
    loops: dict[str, Callable[[], Any]] = {
        "ours": lambda: common.take_step(learner, batch, objective),
        "bare": lambda: bare(plain, batch, cuts, objective),
        "padded": lambda: common.take_step(learner, batch, padded),
    }
    for work in loops.values():
        common.seconds_of(work)  # kernels, allocator, the optimizer's state
    repeats = []
    for repeat in range(options.repeats):
        order = common.in_turn(repeat, list(loops))
        timed = {name: common.seconds_of(loops[name]) for name in order}
        repeats.append({f"{name}_s": timed[name] for name in loops})
        figures = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in timed.items())
        print(f"repeat {repeat + 1} of {options.repeats}: {figures}", flush=True)
    settings = {"model": options.model, "parameters": num_parameters(plain)}
    settings |= {"max_tokens": options.max_tokens, "device": str(learner.accelerator.device)}
    facts = {"trajectories": len(batch), "tokens": int(batch.lengths.sum())}
    facts |= {"policy_tokens": int(batch.loss_mask.sum()), "micro_batches": len(cuts)}
    facts |= {"computed_tokens": sum(pack(batch.rows(r)).input_ids.numel() for r in cuts)}
    return {"settings": settings, "batch": facts, "repeats": repeats}


def summarize(measured: dict[str, Any]) -> dict[str, Any]:
    """Medians over the repeats; ratios are taken within a repeat.

    >>> rows = [{"ours_s": 2.0, "bare_s": 1.8, "padded_s": 4.0}]
    >>> rows.append({"ours_s": 2.5, "bare_s": 2.5, "padded_s": 5.0})
    >>> summarize({"batch": {"tokens": 90}, "repeats": rows})
    {'ours_tokens_per_s': 40.5, 'bare_tokens_per_s': 43.0, 'padded_tokens_per_s': 20.2, \
'ratio': 0.95, 'goal': 0.9, 'met': True, 'ours_over_padded': 2.0}
    """
    tokens, repeats = measured["batch"]["tokens"], measured["repeats"]
    ratio = common.median((r["bare_s"] / r["ours_s"] for r in repeats), 3)
    speeds = {
        f"{name}_tokens_per_s": common.median((tokens / r[f"{name}_s"] for r in repeats), 1)
        for name in ("ours", "bare", "padded")
    }
    sharing = common.median((r["padded_s"] / r["ours_s"] for r in repeats), 2)
    verdict = {"ratio": ratio, "goal": GOAL, "met": ratio >= GOAL}
    return speeds | verdict | {"ours_over_padded": sharing}


def main() -> int:
    parser = common.arguments(__doc__, 5)
    parser.add_argument("--model", choices=("tiny", "smollm2-135m"), default="tiny")
    parser.add_argument("--tasks", type=int, default=8, help="goals in the batch")
    parser.add_argument("--samples", type=int, default=8, help="trajectories per goal")
    parser.add_argument("--max-tokens", type=int, default=Config().max_tokens_per_micro_batch)
    options = parser.parse_args()
    results = common.Results(options, f"update_{options.model}.json")
    measured = measure(options)
    summary = summarize(measured)
    results.write({"summary": summary} | measured)
    common.show((summary | measured["batch"]).items())
    return 0


if __name__ == "__main__":
    sys.exit(main())
