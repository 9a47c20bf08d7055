"""Where prefix sharing stops paying: the update's speed with it over that without it.

A group of G = 8 samples has an opening of p tokens in common and own parts of n tokens each. Packed
into one row (`runtime/prefix.py` at the root) it saves the share s of its tokens:

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
so that a run that is stopped has not been for nothing. Read next: ../prefix.py.
"""

from __future__ import annotations

import argparse
import datetime
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # before this folder, whose runtime/prefix.py is this file

if TYPE_CHECKING:
    from batching import Batch

RESULTS = ROOT / "benchmarks" / "results"
GROUP = 8  # samples of a task (G)
SHARES = (0.0, 0.05, 0.15, 0.3, 0.5, 0.7)  # of the tokens, that sharing is to save
UNEQUAL = (0.05, 0.3, 0.7)
QUICK = (0.05, 0.5)
POLICY_RUN, OBSERVATION_RUN = 24, 16  # tokens of an own part


@dataclass
class Case:
    """One line of the table: a batch, and what is known of it before anything is timed."""

    name: str
    batch: Batch
    facts: dict[str, Any]


# --------------------------------------------------------------------------------------- the groups


def shape(share: float, length: int, spread: float = 0.0) -> tuple[int, list[int]]:
    """Opening p and the 8 own parts of rows of `length` tokens on average, so that s is `share`.

    Args:
        spread: own parts go from (1 - spread) to (1 + spread) times their mean.

    >>> shape(0.5, 256)
    (146, [110, 110, 110, 110, 110, 110, 110, 110])
    >>> shape(0.5, 256, spread=0.5)
    (146, [55, 71, 86, 102, 118, 134, 149, 165])
    """
    p = max(1, round(share * length * GROUP / (GROUP - 1)))  # a row's first token is nobody's
    n = length - p
    if n < 1:
        raise ValueError(f"8 samples can save at most {1 - 1 / GROUP} of their tokens, not {share}")
    factors = [1 + spread * (2 * i / (GROUP - 1) - 1) for i in range(GROUP)]
    return p, [max(1, round(n * factor)) for factor in factors]


def construct(p: int, owns: Sequence[int], groups: int, vocabulary: int, seed: int = 0) -> Batch:
    """`groups` groups of random ids: an opening of p tokens and own parts of the given lengths."""
    import torch

    from batching import Batch

    generator = torch.Generator().manual_seed(seed)
    width, rows = p + max(owns), groups * len(owns)
    ids = torch.zeros(rows, width, dtype=torch.long)
    mask = torch.zeros(rows, width)
    period = POLICY_RUN + OBSERVATION_RUN
    policy_speaks = (torch.arange(max(owns)) % period < POLICY_RUN).float()
    for group in range(groups):
        opening = torch.randint(3, vocabulary, (p,), generator=generator)
        for i, n in enumerate(owns):
            row = group * len(owns) + i
            ids[row, :p] = opening
            ids[row, p : p + n] = torch.randint(3, vocabulary, (n,), generator=generator)
            mask[row, p : p + n] = policy_speaks[:n]
    return Batch(
        input_ids=ids,
        loss_mask=mask,
        rollout_log_probs=-0.5 * mask,
        token_rewards=torch.zeros_like(mask),
        lengths=torch.tensor([p + n for n in owns] * groups),
        group_ids=torch.arange(groups).repeat_interleave(len(owns)),
    )


def real_batches(tokenizer: Any, num_tasks: int, max_rounds: int) -> dict[str, Batch]:
    """The same TextCraft goals played for one turn and to the end."""
    from batching import make_batch
    from benchmarks.update import play
    from chat import ChatTemplate
    from envs import load_tasks

    chat = ChatTemplate(tokenizer)
    tasks = load_tasks("textcraft", "train", subtasks=("depth 1",))[:num_tasks]
    return {
        name: make_batch(
            [
                play(chat, task, group, sample, rounds)
                for group, task in enumerate(tasks)
                for sample in range(GROUP)
            ],
            tokenizer.pad_token_id or 0,
        )
        for name, rounds in (("first turn", 1), ("whole", max_rounds))
    }


def facts_of(batch: Batch, shared: Any, unshared: Any) -> dict[str, Any]:
    """What each side computes of a batch, as `update.cut` cuts it."""
    from batching import padding_share
    from runtime.prefix import opening_length, pack
    from update import cut

    rows = list(range(len(batch)))
    cuts, padded_cuts = (cut(batch, rows, each) for each in (shared, unshared))
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


# ---------------------------------------------------------------------------------------- measuring


class NoStep:
    """An optimizer that leaves the weights alone: what is measured is how the gradient is made."""

    param_groups = [{"lr": 0.0}]

    def __init__(self, module: Any) -> None:
        self._module = module

    def step(self) -> None:
        """The weights stay."""

    def zero_grad(self) -> None:
        self._module.zero_grad()


def measure(
    options: argparse.Namespace, note: Callable[[dict[str, Any]], None] = lambda measured: None
) -> dict[str, Any]:
    """All cases in every repeat; `note` is given what there is after each measurement."""
    import torch
    from accelerate import Accelerator

    import update
    from config import Config
    from models import load_policy, load_tokenizer, num_parameters
    from runtime.default_models import resolve_model
    from update import Objective, update_policy

    update.SHARING_PAYS = 0.0  # what is to be found here: share wherever there is an opening
    default, path = Config(), resolve_model(options.model)
    shared = Objective(
        mini_batch_size=1 << 30,  # one gradient of the whole batch
        max_tokens=default.max_tokens_per_micro_batch,
        sampler_is_cap=default.sampler_is_cap,
        clip_ratio=default.clip_ratio,
    )
    unshared = replace(shared, share_prefix=False)
    accelerator = Accelerator(mixed_precision="bf16")
    device = accelerator.device
    policy = accelerator.prepare(load_policy(path).train())
    optimizer = NoStep(policy)
    vocabulary = accelerator.unwrap_model(policy).lm.config.vocab_size

    batches: list[tuple[str, Batch]] = []
    for share in QUICK if options.quick else SHARES:
        p, owns = shape(share, options.length)
        batches.append(("equal", construct(p, owns, options.groups, vocabulary)))
    for share in QUICK[:1] if options.quick else UNEQUAL:
        p, owns = shape(share, options.length, spread=0.5)
        batches.append(("unequal", construct(p, owns, options.groups, vocabulary)))
    num_tasks = 1 if options.quick else 4
    batches += real_batches(load_tokenizer(path), num_tasks, max(default.rounds)).items()
    cases = [Case(name, batch, facts_of(batch, shared, unshared)) for name, batch in batches]

    def seconds_of(batch: Batch, advantages: Any, how: Objective) -> tuple[float, float]:
        """(seconds, gradient norm) of one gradient."""
        if device.type == "cuda":
            torch.cuda.synchronize()
        began = time.perf_counter()
        metrics = update_policy(accelerator, policy, optimizer, batch, advantages, how)
        if device.type == "cuda":
            torch.cuda.synchronize()
        if metrics["policy/skipped_steps"]:
            raise SystemExit("the update was skipped: its loss or gradient is not finite")
        return time.perf_counter() - began, metrics["policy/grad_norm"]

    def both(case: Case, repeat: int) -> dict[str, float]:
        batch = case.batch
        generator = torch.Generator().manual_seed(0)
        per_row = torch.randn(len(batch), 1, generator=generator)
        advantages = per_row * batch.loss_mask  # (B, T)
        sides = [("shared", shared), ("unshared", unshared)]
        timed = {}
        for side, how in sides if repeat % 2 == 0 else sides[::-1]:
            timed[f"{side}_s"], timed[f"{side}_grad_norm"] = seconds_of(batch, advantages, how)
        return dict(sorted(timed.items()))

    measured: dict[str, Any] = {
        "settings": {
            "model": options.model,
            "parameters": num_parameters(policy),
            "device": str(device),
            "group": GROUP,
            "groups_constructed": options.groups,
            "groups_real": num_tasks,
            "length_constructed": options.length,
            "policy_run": POLICY_RUN,
            "observation_run": OBSERVATION_RUN,
            "max_tokens": shared.max_tokens,
            "repeats": options.repeats,
        },
        "cases": [{"name": case.name} | case.facts | {"repeats": []} for case in cases],
    }
    print("warming up", flush=True)
    both(cases[0], 0)  # kernels, allocator
    for repeat in range(options.repeats):
        for number, (case, row) in enumerate(zip(cases, measured["cases"], strict=True)):
            timed = both(case, repeat + number)  # neither side is always the second
            row["repeats"].append(timed)
            ratio = timed["unshared_s"] / timed["shared_s"]
            print(
                f"repeat {repeat + 1} of {options.repeats}: {case.name}, "
                f"{row['saved']:.3f} of the tokens saved: shared {timed['shared_s']:.2f} s, "
                f"unshared {timed['unshared_s']:.2f} s, ratio {ratio:.2f}",
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
        speed = {
            side: round(statistics.median(tokens / r[f"{side}_s"] for r in repeats), 1)
            for side in ("shared", "unshared")
        }
        ratio = statistics.median(r["unshared_s"] / r["shared_s"] for r in repeats)
        rows.append(
            {
                "name": case["name"],
                "saved": case["saved"],
                "tokens": tokens,
                "shared_tokens_per_s": speed["shared"],
                "unshared_tokens_per_s": speed["unshared"],
                "ratio": round(ratio, 3),
                "if_tokens_were_all": round(1 / (1 - case["saved"]), 3),
                "unshared_padding": case["unshared_padding"],
                # The same gradient in another order of bfloat16 sums, or the ratio means nothing.
                "grad_norm_differs": round(max(abs(a - b) / b if b else 0.0 for a, b in norms), 4),
            }
        )
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
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", choices=("tiny", "smollm2-135m"), default="tiny")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--length", type=int, default=224, help="tokens of a constructed row")
    parser.add_argument("--groups", type=int, default=2, help="groups of a constructed batch")
    parser.add_argument(
        "--quick", action="store_true", help="few points and one real group: does it run?"
    )
    parser.add_argument("--out", type=Path, help="default: results/prefix-<model>.json")
    options = parser.parse_args()
    from runtime.rundir import circumstances

    about = circumstances()
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    out = options.out or RESULTS / f"prefix-{options.model}.json"
    out.parent.mkdir(parents=True, exist_ok=True)

    def write(measured: dict[str, Any]) -> None:
        document = {"date": date} | about | {"summary": summarize(measured)} | measured
        out.write_text(json.dumps(document, indent=2) + "\n")

    measured = measure(options, write)
    print(format_table(summarize(measured)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
