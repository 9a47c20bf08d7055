"""Estimate memory and time of a training step from model, context length and number of GPUs.

Memory comes from the formulas in `scale/memory.py`. Time comes from FLOPs:

    forward, a token   2 (P - embedding) + 2 L·A·D·T, plus 2 V·H for each token of the policy
    step, in forwards  1 forward + 2 backward (LoRA: 1) + 1 recomputation + 2 log-probs (old and
                       reference); sampling is not counted and often takes longer

    P parameters, L layers, T tokens of context, H hidden size, A·D heads x head size, V vocabulary

A test compares the formulas with the tensors in real updates of a small model. benchmarks/gpu.py
measures memory and seconds of a 3B model with random weights on a GPU.

Run:  python recipes/memory.py            print the table that results/memory.md shows
"""

import sys
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from recipes.common import markdown
from scale.memory import (
    GIB,
    POLICY_SHARE,
    Shape,
    cache_bytes,
    card_bytes,
    state_bytes,
    transient_bytes,
)

TRAJECTORIES = 32 * 8  # per step in the paper
PEAK_FLOPS, MFU = 989e12, 0.4  # H100 and H200, dense bfloat16; share of it that we assume
CARDS = (24, 40, 48, 80, 140, 180)  # GiB; 140 is sold as 141 GB
CONTEXTS, DEVICES, LORA_RANK = (4096, 10752, 32768), (1, 2, 8), 64
QWEN = {
    "0.5B": Shape("0.5B", 151936, 896, 4864, 24, 14, 2),
    "1.5B": Shape("1.5B", 151936, 1536, 8960, 28, 12, 2),
    "3B": Shape("3B", 151936, 2048, 11008, 36, 16, 2),
    "7B": Shape("7B", 152064, 3584, 18944, 28, 28, 4, tied=False),
}


def forward_flops(shape: Shape, tokens: int) -> float:
    """FLOPs of a forward pass over one trajectory."""
    body = 2 * shape.layers * shape.layer_parameters
    attention = 2 * shape.layers * shape.heads * shape.head_dim * tokens
    head = 2 * shape.vocab * shape.hidden * POLICY_SHARE
    return (body + attention + head) * tokens


def row(shape: Shape, tokens: int, devices: int, rank: int) -> list[object]:
    """A row of the table. GB are 10⁹ bytes; a dash means that no card in CARDS is large enough."""
    passes = 2 + 1 + (1 if rank else 2) + 1  # log-probs, forward, backward, recomputation
    flops = forward_flops(shape, tokens) * TRAJECTORIES * passes
    min_bytes = card_bytes(shape, tokens, devices, rank)
    state = sum(state_bytes(shape, devices, rank).values())
    updates = (state + transient_bytes(shape, tokens, devices, rank, k) for k in ("all", "inputs"))
    sampler = (2 * shape.parameters, cache_bytes(shape, tokens))
    return [
        *(shape.name, tokens, devices, f"LoRA {rank}" if rank else "full"),
        *(f"{size / 1e9:.1f}" for size in (state, *updates)),
        " + ".join(f"{size / 1e9:.1f}" for size in sampler),
        next((card for card in CARDS if card * GIB >= min_bytes), "-"),
        f"{flops / 1e15:.0f}",
        f"{flops / (devices * PEAK_FLOPS * MFU) / 60:.1f}",
    ]


def arithmetic() -> list[str]:
    """The table: a row per model, context, number of devices, and full training or LoRA."""
    titles = "model | context | GPUs | trains | state | update | update, checkpointing"
    titles += " | sampler: weights + a sequence | card, GiB | PFLOP a step | minutes a step"
    cases = product(QWEN.values(), CONTEXTS, DEVICES, (0, LORA_RANK))
    return markdown(titles, [row(*case) for case in cases])


if __name__ == "__main__":
    print("\n".join(arithmetic()))
