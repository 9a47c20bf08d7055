"""How much of imitation's and of DPO's step is the mathematics, and what shared openings save.

    imitate   update.imitate on whole groups; bare: forward and backward of the same micro-batches
    dpo       dpo.prefer on pairs; bare: the same of its loss, with the same pairs in a micro-batch
    shared    dpo.prefer with packed openings over padded pairs, where the opening is a third of a
              trajectory's tokens

    ratios of tokens/s, medians of interleaved rounds      goals: 0.9, 0.9, 1.2

Tokens are those of the trajectories, padding not; an opening counts once for each side, so that
both ways of computing a pair do the same work by this measure. Pairs and groups are played by an
oracle of TextCraft that errs (groups.py); those of `shared` are random ids of the wanted shape.

Run it:  python benchmarks/methods.py --model tiny               about a minute
         python benchmarks/methods.py --model smollm2-135m       some ten minutes on two cores
It prints a table and writes benchmarks/results/methods_<model>.json. Read next: update.py.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

import dpo  # noqa: E402
import update  # noqa: E402
from batching import Batch  # noqa: E402
from benchmarks import common, groups  # noqa: E402
from config import Config, Objective  # noqa: E402
from dpo import DpoConfig, preference_loss  # noqa: E402
from losses import imitation_loss  # noqa: E402
from models import load_policy, load_tokenizer, num_parameters  # noqa: E402
from scale.default_models import resolve_model  # noqa: E402
from update import cut, forward_policy  # noqa: E402

GOALS = {"imitate": 0.9, "dpo": 0.9, "shared": 1.2}
OPENING, OWN = 120, 240  # tokens: the opening is a third of a trajectory
Loop = Callable[[], Any]


def bare(
    policy: Any,
    accelerator: Any,
    batch: Batch,
    cuts: list[list[int]],
    objective: Objective,
    pairs: bool,
) -> None:
    """The loss and its gradient of the micro-batches `cuts`, and nothing else.

    Args:
        accelerator: the learner's, so that both sides compute in one number format."""
    device = accelerator.device
    tokens = float(batch.loss_mask.sum())
    for rows in cuts:
        part = batch.rows(rows).to(device)
        with accelerator.autocast():
            log_probs, _ = forward_policy(policy, batch.rows(rows), objective, device)
        if pairs:
            assert part.ref_sums is not None
            sums = torch.where(part.loss_mask.bool(), log_probs, 0.0).sum(1)
            ref = part.ref_sums
            sides = (sums[0::2], sums[1::2], ref[0::2], ref[1::2])
            loss = preference_loss(*sides, denominator=len(batch) / 2).loss
        else:
            loss = imitation_loss(log_probs, part.loss_mask, tokens)
        loss.backward()
    policy.zero_grad()


def with_reference(batch: Batch) -> Batch:
    """Any will do: what is measured does not depend on it."""
    batch.ref_sums = -batch.loss_mask.sum(1)
    return batch


def loops_of(options: argparse.Namespace) -> tuple[dict[str, dict[str, Loop]], dict[str, Any]]:
    """Name -> the two loops that are compared, ours first; and facts."""
    path, rounds = resolve_model(options.model), max(Config().rounds)
    tokenizer = load_tokenizer(path)
    played = groups.played_batch(tokenizer, options.tasks, 8, rounds)
    pairs = with_reference(groups.played_batch(tokenizer, 4 * options.tasks, 2, rounds))
    made = groups.construct(OPENING, (OWN, OWN), 4 * options.tasks, len(tokenizer))
    made = with_reference(made)
    learner = common.make_learner(path)
    accelerator = learner.accelerator
    plain = load_policy(path).train().to(accelerator.device)
    config = DpoConfig(sft_coef=0.0)

    def objective_of(batch: Batch, share: bool = True) -> Objective:
        made_for = common.one_step(len(batch), options.max_tokens)
        return update.suited(replace(made_for, share_prefix=share), batch)

    def prefer(batch: Batch, share: bool) -> Loop:
        return lambda: dpo.prefer(learner, batch, objective_of(batch, share), config)

    imitated, preferred = objective_of(played), objective_of(pairs)
    rows, pair_rows = list(range(len(played))), list(range(len(pairs)))
    cuts = cut(played, rows, imitated)
    pair_cuts = dpo.pair_cuts(pairs, pair_rows, preferred)
    loops: dict[str, dict[str, Loop]] = {
        "imitate": {
            "ours": lambda: update.imitate(learner, played, imitated),
            "other": lambda: bare(plain, accelerator, played, cuts, imitated, pairs=False),
        },
        "dpo": {
            "ours": prefer(pairs, True),
            "other": lambda: bare(plain, accelerator, pairs, pair_cuts, preferred, pairs=True),
        },
        "shared": {"ours": prefer(made, True), "other": prefer(made, False)},
    }
    batches = {"imitate": played, "dpo": pairs, "shared": made}
    facts = {"model": options.model, "parameters": num_parameters(plain)}
    facts |= {"max_tokens": options.max_tokens, "device": str(accelerator.device)}
    facts |= {"mixed_precision": str(accelerator.mixed_precision)}
    facts |= {f"{name}_tokens": int(batch.lengths.sum()) for name, batch in batches.items()}
    return loops, facts


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Each pair of loops on one batch, in turn."""
    loops, facts = loops_of(options)
    measured: dict[str, Any] = {"settings": facts, "repeats": {name: [] for name in loops}}
    for name, both in loops.items():
        for work in both.values():
            common.seconds_of(work)  # kernels, allocator, the optimizer's state
        for repeat in range(options.repeats):
            order = common.in_turn(repeat, list(both))
            timed = {each: common.seconds_of(both[each]) for each in order}
            measured["repeats"][name].append({f"{each}_s": timed[each] for each in both})
            figures = ", ".join(f"{each} {seconds:.2f} s" for each, seconds in timed.items())
            print(f"{name}, repeat {repeat + 1} of {options.repeats}: {figures}", flush=True)
    return measured


def summarize(measured: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Medians of the ratios, which are taken within a repeat.

    >>> rows = [{"ours_s": 2.0, "other_s": 1.8}, {"ours_s": 2.0, "other_s": 2.0}]
    >>> summarize({"repeats": {"imitate": rows}})
    {'imitate': {'ratio': 0.95, 'goal': 0.9, 'met': True}}
    """
    found = {}
    for name, repeats in measured["repeats"].items():
        ratio = common.median((r["other_s"] / r["ours_s"] for r in repeats), 3)
        found[name] = {"ratio": ratio, "goal": GOALS[name], "met": ratio >= GOALS[name]}
    return found


def main() -> int:
    parser = common.arguments(__doc__, 5, "methods_<model>.json")
    parser.add_argument("--model", choices=("tiny", "smollm2-135m"), default="tiny")
    parser.add_argument("--tasks", type=int, default=4, help="goals in the batch of groups")
    parser.add_argument("--max-tokens", type=int, default=Config().max_tokens_per_micro_batch)
    options = parser.parse_args()
    results = common.Results(options.out, f"methods_{options.model}.json")
    measured = measure(options)
    summary = summarize(measured)
    results.write({"summary": summary} | measured)
    common.show((name, f"{row['ratio']} (goal {row['goal']})") for name, row in summary.items())
    return 0


if __name__ == "__main__":
    sys.exit(main())
