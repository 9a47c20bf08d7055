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
It prints a table and writes benchmarks/results/update_<model>.json. Read next: ../update.py.
"""

import argparse
import datetime
import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # before this folder, whose update.py is this file

from chat import ChatTemplate  # noqa: E402
from config import Config  # noqa: E402
from envs import Task, get_env, load_tasks  # noqa: E402
from rollout import RolloutHandler  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
GOAL = 0.9


def play(
    chat: ChatTemplate, task: Task, group_id: int, sample: int, max_rounds: int
) -> RolloutHandler:
    """One episode in this process: the oracle, which asks for the wrong thing now and then."""
    rng = random.Random(f"{task.task_id}/{sample}")
    error_rate = rng.random()
    world = get_env("textcraft")()
    handler = RolloutHandler(
        f"{task.task_id}-{sample}",
        1,
        "textcraft",
        task.task_id,
        task.subtask,
        group_id,
        0,
        max_rounds,
    )
    handler.start(chat, world.PROMPT, world.reset(task.task_index, 0))
    while not handler.stop_reason:
        thought, action = world.oracle()
        if rng.random() < error_rate:
            thought, action = "I look at what I have.", "inventory"
        ids = chat.action(f"Thought: {thought}\nAction: {action}")
        turn = handler.add_action(chat, ids, [-0.5] * len(ids))
        observation, turn.reward, terminated, _, info = world.step(action)
        if terminated:
            handler.stop("success" if info["success"] else "failure", info["success"])
        elif len(handler.turns) == max_rounds:
            handler.stop("max_rounds")
        else:
            handler.add_observation(chat, observation)
    return handler


def measure(options: argparse.Namespace) -> dict[str, Any]:
    import torch
    from accelerate import Accelerator

    from advantages import grpo
    from batching import make_batch, padding_share
    from losses import policy_loss, sampler_is_weights
    from models import load_policy, load_tokenizer, num_parameters
    from runtime.default_models import resolve_model
    from runtime.prefix import pack
    from update import Objective, cut, forward_policy, update_policy

    path = resolve_model(options.model)
    tokenizer, default = load_tokenizer(path), Config()
    chat = ChatTemplate(tokenizer)
    tasks = load_tasks("textcraft", "train", subtasks=("depth 1",))[: options.tasks]
    trajectories = [
        play(chat, task, group, sample, max(default.rounds))
        for group, task in enumerate(tasks)
        for sample in range(options.samples)
    ]
    batch = make_batch(trajectories, tokenizer.pad_token_id or 0)
    advantages, _ = grpo(batch.token_rewards, batch.loss_mask, batch.group_ids)
    objective = Objective(
        mini_batch_size=len(batch),  # one optimizer step: the cuts of ours are those of bare
        max_tokens=options.max_tokens,
        sampler_is_cap=default.sampler_is_cap,
        clip_ratio=default.clip_ratio,
    )
    padded = replace(objective, share_prefix=False)
    accelerator = Accelerator(mixed_precision="bf16")
    device = accelerator.device
    policy = load_policy(path).train()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, weight_decay=0.0, fused=True)
    policy, optimizer = accelerator.prepare(policy, optimizer)
    plain = load_policy(path).train().to(device)
    rows_in_order = list(range(len(batch)))
    cuts, padded_cuts = (cut(batch, rows_in_order, each) for each in (objective, padded))
    lengths = batch.lengths.tolist()

    def ours(how: Objective) -> None:
        metrics = update_policy(accelerator, policy, optimizer, batch, advantages, how)
        if metrics["policy/skipped_steps"]:
            raise SystemExit("the update was skipped: its loss or gradient is not finite")

    def bare() -> None:
        denominator = float(batch.loss_mask.sum())
        for rows in cuts:
            part = batch.rows(rows)
            mask, sampled = part.loss_mask.to(device), part.rollout_log_probs.to(device)
            with torch.autocast(device.type, dtype=torch.bfloat16):
                log_probs, _ = forward_policy(plain, part, objective, device)
            old = log_probs.detach()
            weights = sampler_is_weights(old, sampled, mask, objective.sampler_is_cap)
            wanted = advantages[rows, : mask.shape[1]].to(device)
            loss = policy_loss(
                log_probs, old, wanted, mask, objective.clip_ratio, denominator, is_weights=weights
            ).loss
            loss.backward()
        plain.zero_grad()

    loops: list[tuple[str, Callable[[], None]]] = [
        ("ours", lambda: ours(objective)),
        ("bare", bare),
        ("padded", lambda: ours(padded)),
    ]

    def seconds_of(work: Callable[[], None]) -> float:
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - began

    for _, work in loops:
        seconds_of(work)  # kernels, allocator, the optimizer's state
    repeats = []
    for repeat in range(options.repeats):
        first = repeat % len(loops)  # nobody is always the one after somebody else
        timed = {name: seconds_of(work) for name, work in loops[first:] + loops[:first]}
        repeats.append({f"{name}_s": timed[name] for name, _ in loops})
        figures = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in timed.items())
        print(f"repeat {repeat + 1} of {options.repeats}: {figures}", flush=True)
    return {
        "settings": {"model": options.model, "parameters": num_parameters(plain)}
        | {"max_tokens": options.max_tokens, "device": str(device)},
        "batch": {
            "trajectories": len(batch),
            "tokens": sum(lengths),
            "policy_tokens": int(batch.loss_mask.sum()),
            "shortest": min(lengths),
            "longest": max(lengths),
            "micro_batches": len(cuts),
            "computed_tokens": sum(pack(batch.rows(rows)).input_ids.numel() for rows in cuts),
            "padded_micro_batches": len(padded_cuts),
            "padded_padding_share": round(padding_share(lengths, padded_cuts), 4),
            "padding_share_of_one_batch": round(1 - sum(lengths) / len(lengths) / max(lengths), 4),
        },
        "repeats": repeats,
    }


def summarize(measured: dict[str, Any]) -> dict[str, Any]:
    """Medians over the repeats; ratios are taken within a repeat.

    >>> rows = [{"ours_s": 2.0, "bare_s": 1.8, "padded_s": 4.0}]
    >>> rows.append({"ours_s": 2.5, "bare_s": 2.5, "padded_s": 5.0})
    >>> summarize({"batch": {"tokens": 90}, "repeats": rows})
    {'ours_tokens_per_s': 40.5, 'bare_tokens_per_s': 43.0, 'padded_tokens_per_s': 20.2, \
'ratio': 0.95, 'goal': 0.9, 'met': True, 'ours_over_padded': 2.0}
    """
    tokens, repeats = measured["batch"]["tokens"], measured["repeats"]
    ratio = round(statistics.median(r["bare_s"] / r["ours_s"] for r in repeats), 3)
    speeds = {
        f"{name}_tokens_per_s": round(
            statistics.median(tokens / r[f"{name}_s"] for r in repeats), 1
        )
        for name in ("ours", "bare", "padded")
    }
    sharing = round(statistics.median(r["padded_s"] / r["ours_s"] for r in repeats), 2)
    verdict = {"ratio": ratio, "goal": GOAL, "met": ratio >= GOAL}
    return speeds | verdict | {"ours_over_padded": sharing}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=("tiny", "smollm2-135m"), default="tiny")
    parser.add_argument("--tasks", type=int, default=8, help="goals in the batch")
    parser.add_argument("--samples", type=int, default=8, help="trajectories per goal")
    parser.add_argument("--max-tokens", type=int, default=Config().max_tokens_per_micro_batch)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="default: results/update_<model>.json")
    options = parser.parse_args()
    from runtime.rundir import circumstances

    about = circumstances()
    measured = measure(options)
    summary = summarize(measured)
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    out = options.out or RESULTS / f"update_{options.model}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    document = {"date": date} | about | {"summary": summary} | measured
    out.write_text(json.dumps(document, indent=2) + "\n")
    for name, value in (summary | measured["batch"]).items():
        print(f"{name:<28}{value!s:>12}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
