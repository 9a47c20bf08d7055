"""Weight sync: after an update the sampler must hold the trainer's weights, every one of them.

The trainer keeps float32 master weights, over several processes in parts; each sampler keeps a
whole copy in its own type. The weights go over one at a time, so no second copy ever exists:

    for each name:   W_r on rank r  ──all-gather──>  W  ──merge adapters, cast──>  sampler

A sync can fail silently: vLLM, given weights without the name of a tied output head, keeps the old
head and samples on, off-policy. So after every sync a few tokens are sampled and scored again:

    d = 1/N Σ_t | log μ(y_t) - log π_θ(y_t) |     about 0.004 in bfloat16, 1e-6 in float32

and a run stops at d > --max-sync-error. Read next: `sampling/vllm_engine.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from engines import Engine, Generation, SamplingSettings
from models import save_policy
from run.errors import SyncError
from scale import distributed
from scale.lora import merged_weights

NUM_PROBED = 8  # tokens sampled after each opening


def send_weights(policy: Any, engine: Engine, dtype: torch.dtype) -> int:
    """The policy's weights into this rank's sampler; bytes sent. Collective."""
    num_bytes = 0

    def stream() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal num_bytes
        for name, tensor in merged_weights(policy.lm):
            cast = tensor.detach().to(dtype)
            num_bytes += cast.nbytes
            yield name, cast

    engine.load_weights(stream())
    distributed.barrier()  # samplers may be shared: wait until all weights have arrived
    return num_bytes


def export_policy(accelerator: Any, policy: Any, tokenizer: Any, folder: Path | None) -> None:
    """The policy as Hugging Face files in bfloat16, written by rank 0; others need no `folder`."""
    weights = {}
    for name, tensor in merged_weights(policy.lm):
        if distributed.rank() == 0:
            weights[name] = tensor.detach().to(torch.bfloat16).cpu()
    model = accelerator.unwrap_model(policy)
    write = partial(save_policy, model, tokenizer, cast(Path, folder), weights)
    distributed.run_on_rank_0("saving", write)


def compare(
    policy: Any,
    engine: Engine,
    openings: Sequence[list[int]],
    temperature: float,
    device: Any,
    seed: int = 0,
) -> list[float]:
    """d of every rank's sampler: a few tokens sampled after each opening, scored by the trainer.

    Collective. `openings` are token ids, the same on every rank.
    """
    samples = distributed.run_on_every_rank(
        "probing", lambda: _sample(engine, openings, temperature, seed)
    )
    differences: list[float] = []
    for ids, g in zip(openings, samples[distributed.rank()], strict=True):
        input_ids = torch.tensor([ids + g.token_ids], device=device)  # (1, T)
        mask = torch.zeros_like(input_ids)
        mask[:, len(ids) :] = 1
        with torch.no_grad():
            log_probs, _ = policy(input_ids, mask, temperature)
        expected = log_probs[0, len(ids) :].tolist()
        differences += [abs(a - b) for a, b in zip(expected, g.log_probs, strict=True)]
    return distributed.gather(sum(differences) / len(differences))


def check(differences: Sequence[float], limit: float, step: int) -> float:
    """Mean of `compare`'s result; SyncError if a rank's is above `limit` or not a number."""
    bad = [rank for rank, d in enumerate(differences) if not d <= limit]
    if bad:
        whose = f" of rank {bad[0]}" if len(differences) > 1 else ""
        raise SyncError(
            f"after the weight sync of step {step} sampler and trainer{whose} differ by "
            f"{differences[bad[0]]:.3f} nats a token, above --max-sync-error {limit}: "
            "the sampler holds other weights than the trainer"
        )
    return math.fsum(differences) / len(differences)


def _sample(
    engine: Engine, openings: Sequence[list[int]], temperature: float, seed: int
) -> list[Generation]:
    """A few sampled tokens after each opening, in that order."""
    sampling = SamplingSettings(max_tokens=NUM_PROBED, temperature=temperature, seed=seed)
    for i, ids in enumerate(openings):
        engine.submit(f"{i}", ids, sampling)
    done: list[Generation] = []
    while engine.num_running:
        done += engine.poll()
    return sorted(done, key=lambda generation: int(generation.request_id))
