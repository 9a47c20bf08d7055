"""Where prefix sharing stops paying: the update's speed with it over that without it.

A group of G = 8 samples has an opening of p tokens in common and own parts of n tokens each. Packed
into one row (`scale/prefix.py`) it saves the share s of its tokens:

    s = 1 - (p + G n) / (G (p + n))        at most 1 - 1/G, when there is nothing but an opening

and pays for it with a gather, a scatter and attention in G + 1 pieces. So the same trajectories go
through `update.update_policy` with `share_prefix` on and off, in turn, and

    ratio = seconds without sharing / seconds with it       above 1: sharing pays

    equal       constructed groups whose rows all have the same length; s is swept
    unequal     the same, own parts from half to one and a half times n. Without sharing they need
                padding, whose share is in the table: part of the ratio is saved padding
    first turn  real groups: 4 TextCraft goals, the opening and one action each
    whole       the same goals played for up to six turns (as in update.py)

Of the constructed rows only the lengths matter; their ids are random. 24 tokens of an own part are
the policy's, the next 16 an observation's, and so on, about as in TextCraft. Tokens are those of
the trajectories, padding not, an opening counted once per sample: both sides do the same work by
this measure. What is timed is forward, loss, backward and the gradient's norm. The optimizer's step
is left out: it costs the same on both sides, and the less it has to share with, the more it hides.

    crossover = the s at which the line between neighbouring points of the sweep crosses ratio 1

Run it:  python benchmarks/prefix.py --model tiny              a minute
         python benchmarks/prefix.py --model smollm2-135m      about a quarter of an hour, two cores
It prints a table and writes benchmarks/results/prefix-<model>.json, anew after every measurement,
so that a run that is stopped has not been for nothing. Read next: scale/prefix.py.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

import update  # noqa: E402
from batching import Batch, padding_share  # noqa: E402
from benchmarks import common, groups  # noqa: E402
from config import Config, Objective  # noqa: E402
from models import load_tokenizer, num_parameters  # noqa: E402
from scale.default_models import resolve_model  # noqa: E402
from scale.prefix import opening_length, pack  # noqa: E402

SHARES = (0.0, 0.05, 0.15, 0.3, 0.5, 0.7)  # of the tokens, that sharing is to save
UNEQUAL = (0.05, 0.3, 0.7)
QUICK = (0.05, 0.5)


@dataclass
class Case:
    """One line of the table: a batch, and what is known of it before anything is timed."""

    name: str
    batch: Batch
    facts: dict[str, Any]


def facts_of(batch: Batch, shared: Objective, unshared: Objective) -> dict[str, Any]:
    """What each side computes of a batch, as `update.cut` cuts it."""
    rows = list(range(len(batch)))
    cuts, padded_cuts = (update.cut(batch, rows, each) for each in (shared, unshared))
    lengths = batch.lengths.tolist()
    openings = [opening_length(batch.rows(part)) for part in cuts]
    packed = sum(pack(batch.rows(part)).input_ids.numel() for part in cuts)
    return {
        "rows": len(batch),
        "tokens": sum(lengths),
        "policy_tokens": int(batch.loss_mask.sum()),
        "openings": sorted(openings),
        "shortest": min(lengths),
        "longest": max(lengths),
        "shared_tokens": packed,
        "saved": round(1 - packed / sum(lengths), 4),  # s
        "shared_micro_batches": len(cuts),
        "unshared_micro_batches": len(padded_cuts),
        "unshared_padding": round(padding_share(lengths, padded_cuts), 4),
    }


def cases_of(options: argparse.Namespace, path: str, sides: dict[str, Objective]) -> list[Case]:
    """The sweeps on constructed groups, and real goals played for a turn and to the end."""
    tokenizer = load_tokenizer(path)
    batches: list[tuple[str, Batch]] = []
    for name, shares, spread in (("equal", SHARES, 0.0), ("unequal", UNEQUAL, 0.5)):
        for share in QUICK[: 1 if spread else None] if options.quick else shares:
            p, owns = groups.shape(share, options.length, spread)
            batches.append((name, groups.construct(p, owns, options.groups, len(tokenizer))))
    for name, rounds in (("first turn", 1), ("whole", max(Config().rounds))):
        batches.append(
            (name, groups.played_batch(tokenizer, num_real(options), groups.GROUP, rounds))
        )
    for _, batch in batches:
        per_row = torch.randn(len(batch), 1, generator=torch.Generator().manual_seed(0))
        batch.advantages = per_row * batch.loss_mask  # (B, T)
    return [Case(name, batch, facts_of(batch, *sides.values())) for name, batch in batches]


def num_real(options: argparse.Namespace) -> int:
    """TextCraft goals that are played."""
    return 1 if options.quick else 4


# ---------------------------------------------------------------------------------------- measuring


def time_both(
    learner: update.Learner, batch: Batch, sides: dict[str, Objective], turn: int
) -> dict[str, float]:
    """Seconds and gradient norm of one gradient of each side; neither is always the second."""
    timed: dict[str, float] = {}
    for side in list(sides)[:: -1 if turn % 2 else 1]:

        def gradient(side: str = side) -> None:
            metrics = common.take_step(learner, batch, sides[side])
            timed[f"{side}_grad_norm"] = metrics["policy/grad_norm"]

        timed[f"{side}_s"] = common.seconds_of(gradient)
    return dict(sorted(timed.items()))


def measure(
    options: argparse.Namespace, note: Callable[[dict[str, Any]], None] = lambda measured: None
) -> dict[str, Any]:
    """All cases in every repeat; `note` is given what there is after each measurement."""
    update.SHARING_PAYS = 0.0  # what is to be found here: share wherever there is an opening
    path = resolve_model(options.model)
    # One gradient of the whole batch.
    shared = common.one_step(1 << 30, Config().max_tokens_per_micro_batch)
    sides = {"shared": shared, "unshared": replace(shared, share_prefix=False)}
    learner = common.make_learner(path, moves=False)
    cases = cases_of(options, path, sides)
    measured: dict[str, Any] = {
        "settings": {
            "model": options.model,
            "parameters": num_parameters(learner.model),
            "device": str(learner.accelerator.device),
            "group": groups.GROUP,
            "groups_constructed": options.groups,
            "groups_real": num_real(options),
            "length_constructed": options.length,
            "policy_run": groups.POLICY_RUN,
            "observation_run": groups.OBSERVATION_RUN,
            "max_tokens": shared.max_tokens_per_micro_batch,
            "repeats": options.repeats,
        },
        "cases": [{"name": case.name} | case.facts | {"repeats": []} for case in cases],
    }
    print("warming up", flush=True)
    time_both(learner, cases[0].batch, sides, 0)  # kernels, allocator
    for repeat in range(options.repeats):
        for number, (case, row) in enumerate(zip(cases, measured["cases"], strict=True)):
            timed = time_both(learner, case.batch, sides, repeat + number)
            row["repeats"].append(timed)
            print(
                f"repeat {repeat + 1} of {options.repeats}: {case.name}, {row['saved']:.3f} of the "
                f"tokens saved: ratio {timed['unshared_s'] / timed['shared_s']:.2f}",
                flush=True,
            )
            note(measured)
    return measured


# ---------------------------------------------------------------------------------------- the table


def summarize(measured: dict[str, Any]) -> dict[str, Any]:
    """Medians over the repeats, ratios taken within a repeat; cases not timed yet are left out.

    `if_tokens_were_all` is the ratio that would come out if time went with the tokens of a row
    (padding left out): 1 / (1 - s).

    >>> times = {"shared_s": 2.0, "unshared_s": 3.0, "shared_grad_norm": 1.0}
    >>> times["unshared_grad_norm"] = 1.02
    >>> case = {"name": "equal", "tokens": 90, "saved": 0.5, "unshared_padding": 0.0}
    >>> summarize({"cases": [case | {"repeats": [times]}]})["rows"][0]["ratio"]
    1.5
    """
    rows = []
    for case in measured["cases"]:
        repeats = case["repeats"]
        if not repeats:
            continue
        tokens = case["tokens"]
        norms = [(r["shared_grad_norm"], r["unshared_grad_norm"]) for r in repeats]
        row = {"name": case["name"], "saved": case["saved"], "tokens": tokens}
        for side in ("shared", "unshared"):
            speeds = (tokens / r[f"{side}_s"] for r in repeats)
            row[f"{side}_tokens_per_s"] = common.median(speeds, 1)
        row["ratio"] = common.median((r["unshared_s"] / r["shared_s"] for r in repeats), 3)
        row["if_tokens_were_all"] = round(1 / (1 - case["saved"]), 3)
        row["unshared_padding"] = case["unshared_padding"]
        # The same gradient in another order of bfloat16 sums, or the ratio means nothing.
        row["grad_norm_differs"] = round(max(abs(a - b) / b if b else 0.0 for a, b in norms), 4)
        rows.append(row)
    found = {
        name: crossover([(row["saved"], row["ratio"]) for row in rows if row["name"] == name])
        for name in ("equal", "unequal")
    }
    return {"rows": rows, "crossover": found}


def crossover(points: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """From which share of tokens saved on the ratio stays above 1, by linear interpolation.

    Args:
        points: (share saved, ratio).
    Returns:
        {"at": the share, or None; "says": what that means}. The ratio may cross 1 more than once
        when it is near 1 and noisy; the last crossing is the one from which on sharing pays.

    >>> crossover([(0.0, 0.9), (0.1, 1.1), (0.5, 1.8)])
    {'at': 0.05, 'says': 'sharing pays above it'}
    >>> crossover([(0.05, 1.02), (0.5, 1.8)])
    {'at': None, 'says': 'sharing pays at every share measured, from 0.05 up'}
    >>> crossover([(0.05, 0.8), (0.5, 0.9)])
    {'at': None, 'says': 'sharing does not pay at the highest share measured, 0.5'}
    """
    points = sorted(points)
    below = [i for i, (_, ratio) in enumerate(points) if ratio < 1]
    if not points:
        return {"at": None, "says": "nothing measured"}
    if not below:
        says = f"sharing pays at every share measured, from {points[0][0]:g} up"
        return {"at": None, "says": says}
    if below[-1] == len(points) - 1:
        says = f"sharing does not pay at the highest share measured, {points[-1][0]:g}"
        return {"at": None, "says": says}
    (s0, r0), (s1, r1) = points[below[-1]], points[below[-1] + 1]
    return {"at": round(s0 + (s1 - s0) * (1 - r0) / (r1 - r0), 4), "says": "sharing pays above it"}


def format_table(summary: dict[str, Any]) -> str:
    columns = (
        ("saved", "saved"),
        ("tokens", "tokens"),
        ("shared_tokens_per_s", "shared/s"),
        ("unshared_tokens_per_s", "unshared/s"),
        ("ratio", "ratio"),
        ("if_tokens_were_all", "1/(1-s)"),
        ("unshared_padding", "padding"),
    )
    lines = [f"{'':<12}" + "".join(f"{title:>12}" for _, title in columns)]
    for row in summary["rows"]:
        lines.append(f"{row['name']:<12}" + "".join(f"{row[key]!s:>12}" for key, _ in columns))
    for name, found in summary["crossover"].items():
        at = "" if found["at"] is None else f"{found['at']}: "
        lines.append(f"crossover, {name}: {at}{found['says']}")
    return "\n".join(lines)


def main() -> int:
    parser = common.arguments(__doc__, 3, "prefix-<model>.json")
    parser.add_argument("--model", choices=("tiny", "smollm2-135m"), default="tiny")
    parser.add_argument("--length", type=int, default=224, help="tokens of a constructed row")
    parser.add_argument("--groups", type=int, default=2, help="groups of a constructed batch")
    parser.add_argument(
        "--quick", action="store_true", help="few points and one real group: does it run?"
    )
    options = parser.parse_args()
    results = common.Results(options.out, f"prefix-{options.model}.json")

    def write(measured: dict[str, Any]) -> None:
        results.write({"summary": summarize(measured)} | measured)

    print(format_table(summarize(measure(options, write))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
