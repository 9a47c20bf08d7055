"""Weight sync: copy all weights from trainer to sampler after every update, and check the result.

The trainer holds float32 master weights, sharded if there are several ranks. Each sampler holds a
full copy, usually in another dtype. Weights are sent one at a time, so the trainer never holds a
second copy of the model:

    for each name:   W_r on rank r  ──all-gather──>  W  ──merge adapters, cast──>  sampler

A sync can fail silently. For example, if the tied output head is not sent under its own name, vLLM
keeps the old head, and sampling continues off-policy. So before step 1 and after every sync we
sample a few short texts and score their tokens with the trainer:

    d = 1/N Σ_t | log μ(y_t) - log π_θ(y_t) |     about 0.004 in bfloat16, 1e-6 in float32

The run stops if the d of one text exceeds --max-sync-error. (A small error can pass here;
`RLWorker.require_own_weights` also compares all tokens of a step.)

Read next: `sampling/vllm_engine.py`.
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
    """Send the policy's weights to this rank's sampler; returns the number of bytes. Collective."""
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
    """Write the policy as Hugging Face files in bfloat16. Only rank 0 writes and needs `folder`."""
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
    """Sample a few tokens after each opening, with every sampler, and score them with the trainer.

    Collective. `openings` are token ids, the same on every rank. Returns d of every rank, that of
    its worst sample.
    """
    num_samples = max(len(openings), engine.num_samplers)
    openings = [openings[n % len(openings)] for n in range(num_samples)]
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
        pairs = zip(expected, g.log_probs, strict=True)
        differences.append(math.fsum(abs(a - b) for a, b in pairs) / len(expected))
    return distributed.gather(max(differences))


def check(differences: Sequence[float], limit: float, step: int) -> float:
    """The mean of `differences`; SyncError if one of them is above `limit` or not a number."""
    bad = [rank for rank, d in enumerate(differences) if not d <= limit]
    if bad:
        of_rank = f" of rank {bad[0]}" if len(differences) > 1 else ""
        when = f"after the weight sync of step {step}" if step else "before step 1"
        raise SyncError(
            f"{when}, sampler and trainer{of_rank} differ by "
            f"{differences[bad[0]]:.3f} nats per token, above --max-sync-error {limit}: "
            "the sampler's weights differ from the trainer's"
        )
    return math.fsum(differences) / len(differences)


def _sample(
    engine: Engine, openings: Sequence[list[int]], temperature: float, seed: int
) -> list[Generation]:
    """Sample a few tokens after each opening; results in the order of the openings."""
    sampling = SamplingSettings(max_tokens=NUM_PROBED, temperature=temperature, seed=seed)
    for i, ids in enumerate(openings):
        engine.submit(f"{i}", ids, sampling)
    generations: list[Generation] = []
    while engine.num_running:
        generations += engine.poll()
    return sorted(generations, key=lambda generation: int(generation.request_id))
