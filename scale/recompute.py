"""What a forward pass keeps for the backward pass, and what is computed again there.

The backward pass of a layer needs what its forward pass computed. To keep all of it is fast and
takes most of the memory of an update; the other ends are here (bytes of a layer and token under
autocast, H = 576 and I = 1536 as in SmolLM2-135M, by `scale/memory.py`):

    all        every tensor that a gradient needs                            31.9 kB
    products   its input, results of matrix products and of attention        13.9 kB
    inputs     its input alone (--gradient-checkpointing)                     2.3 kB

Between two products stand norms, rotations, activations and conversions: many bytes and little
arithmetic, so that computing them again costs a CPU about what it saves by touching less memory.
`inputs` repeats the products too, up to a third more time. Gradients are the same, to the bit.

Models of transformers only, whose layers can be computed again (GradientCheckpointingLayer).
Source of the second: torch.utils.checkpoint.create_selective_checkpoint_contexts.

Read next: `update.py`, which runs both passes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from scale.memory import Keep

aten = torch.ops.aten
PRODUCTS = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def keep_for_backward(model: Any, keep: Keep) -> None:
    """Choose what each layer of a PolicyModel or CriticModel keeps when it is in training."""
    lm = getattr(model, "lm", getattr(model, "backbone", model))
    if keep == "all":
        return
    how: dict[str, Any] = {"use_reentrant": False}
    if keep == "products":
        how["context_fn"] = partial(create_selective_checkpoint_contexts, _is_kept)
    lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs=how)


def what_to_keep(checkpointing: bool, device: torch.device) -> Keep:
    """The default of a device: on a GPU the layers are too quick for a choice at each operation."""
    if checkpointing:
        return "inputs"
    return "products" if device.type == "cpu" else "all"


def _is_kept(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if operation in PRODUCTS:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
