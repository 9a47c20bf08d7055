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
from pathlib import Path
from typing import Any

import torch

from engines import Engine, Generation, SamplingSettings
from models import save_policy
from run.errors import SyncError
from scale import distributed
from scale.lora import merged_weights

NUM_PROBED = 8  # tokens sampled after each opening


def whole_weights(policy: Any, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Every name of the policy's state dict, the tied head included, one tensor at a time.

    Collective: a parameter is gathered from all ranks when its turn comes. Adapters (LoRA) are
    merged in float32, before the cast.
    """
    for name, tensor in merged_weights(policy.lm, full=distributed.whole):
        yield name, tensor.detach().to(dtype)


def send_weights(policy: Any, engine: Engine, dtype: torch.dtype) -> int:
    """The policy's weights into this rank's sampler; bytes sent. Collective."""
    num_bytes = 0

    def count() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal num_bytes
        for name, tensor in whole_weights(policy, dtype):
            num_bytes += tensor.numel() * tensor.element_size()
            yield name, tensor

    engine.load_weights(count())
    distributed.meet()  # samplers may be shared: wait until all weights have arrived
    return num_bytes


def export_policy(accelerator: Any, policy: Any, tokenizer: Any, folder: Path | None) -> None:
    """The policy as Hugging Face files in bfloat16, put together on rank 0. Collective.

    Args:
        folder: None on the ranks that do not write.
    """
    weights = {}
    for name, tensor in whole_weights(policy, torch.bfloat16):
        if distributed.rank() == 0:
            weights[name] = tensor.cpu()
    model = accelerator.unwrap_model(policy)

    def write() -> None:
        assert folder is not None
        save_policy(model, tokenizer, folder, weights)

    distributed.first("saving", write)


def compare(
    policy: Any,
    engine: Engine,
    openings: Sequence[list[int]],
    temperature: float,
    device: Any,
    seed: int = 0,
) -> list[float]:
    """d of every rank's sampler: a few tokens sampled after each opening, scored by the trainer.

    Args:
        openings: prompts as token ids, the same on every rank. Collective: a pass each.
    """
    samples = distributed.apart("probing", lambda: _sample(engine, openings, temperature, seed))
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
    """Mean of `compare`'s result.

    Raises:
        SyncError: on some rank it is above `limit` (nats a token), or not a number.
    """
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
        engine.submit(f"probe-{seed}-{i}", ids, sampling)
    done: dict[int, Generation] = {}
    while engine.num_running:
        done |= {int(g.request_id.rsplit("-", 1)[1]): g for g in engine.poll()}
    return [done[i] for i in range(len(openings))]
