"""LoRA: train two thin matrices beside every weight matrix instead of the matrix itself.

`--lora-rank r` freezes the model and corrects each linear layer of its body (arXiv 2106.09685):

    W' = W + (α/r) B A        W (out, in) frozen,  A (r, in) and B (out, r) trained
    A ~ U(-1/√in, 1/√in), B = 0        W' = W at the start: the first policy is the base model
    α = 2 r                            α/r is 2 whatever the rank

With P parameters, and P_r in the adapters, full training takes 20 P bytes (weights, gradient, two
moments, reference; float32) and LoRA 4 P + 16 P_r: the reference is `adapters_off`. Samplers and
checkpoints hold ordinary models: `merged_weights` puts W' in the place of W. The output head is not
adapted: it is often the embedding, and merging would separate the two. "LoRA Without Regret"
(Schulman et al., 2025): for policy gradients rank 1 learns like full training, at about 10 times
the learning rate. Run: `python train.py --lora-rank 16`. Read next: `engines.py`.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scale.distributed import full_tensor

ALPHA_PER_RANK = 2  # α/r
# peft adapts the model in place: q_proj.weight becomes, in a state dict, q_proj.base_layer.weight,
# q_proj.lora_A.default.weight and q_proj.lora_B.default.weight.
ADAPTER = "default"
FILE = "adapter_model.safetensors"


def add_lora(lm: Any, rank: int, seed: int = 0) -> None:
    """Freeze `lm` and put adapters beside all linear layers of its body, in place.

    Args:
        lm: a causal LM of transformers; it stays the same object and computes the same as before.
        seed: decides A; the global random numbers are neither used nor advanced.
    Raises:
        ValueError: the body has no linear layer.
    """
    head = lm.get_output_embeddings()
    targets = [n for n, m in lm.named_modules() if isinstance(m, nn.Linear) and m is not head]
    if not targets:
        raise ValueError(f"--lora-rank {rank}: {type(lm).__name__} has no linear layers to adapt")
    from peft import LoraConfig, inject_adapter_in_model  # takes seconds

    config = LoraConfig(
        r=rank, lora_alpha=ALPHA_PER_RANK * rank, lora_dropout=0.0, target_modules=targets
    )
    with torch.random.fork_rng(devices=[]):  # peft fills A and B on the CPU with global numbers
        inject_adapter_in_model(config, lm, adapter_name=ADAPTER)
    generator = torch.Generator().manual_seed(seed)
    for layer in _adapted_layers(lm).values():
        layer.lora_A.float()  # peft made them in the dtype of W
        layer.lora_B.float()
        a = layer.lora_A[ADAPTER].weight  # (r, in)
        bound = layer.in_features**-0.5
        with torch.no_grad():
            a.copy_(torch.empty(a.shape).uniform_(-bound, bound, generator=generator))


def is_adapter(name: str) -> bool:
    """Whether a name of a state dict is an adapter's."""
    return ".lora_A." in name or ".lora_B." in name


@contextlib.contextmanager
def adapters_off(module: nn.Module) -> Iterator[None]:
    """Inside, `module` is exactly the base model: the frozen reference.

    NOTE: not peft's `enable_adapters`, which also sets requires_grad: a sharding wrapper has
    parameters of its own. Only the flag that `forward` reads is set.
    """
    layers = list(_adapted_layers(module).values())
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def merged_weights(lm: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The state dict of the model that `lm` acts as, one tensor at a time: W' in the place of W.

    Collective if the model is sharded: every rank has to iterate, to the end.

    Yields:
        (name, tensor) for every name the base model had, in its order, the tied output head
        included; merged in float32, in the dtype of W. What was not merged is the live weight.
    """
    layers, state = _adapted_layers(lm), lm.state_dict()
    for name, tensor in state.items():
        if is_adapter(name):
            continue
        w = full_tensor(tensor.detach())
        prefix, _, rest = name.rpartition(".base_layer.")
        if prefix and rest == "weight":
            a = full_tensor(state[f"{prefix}.lora_A.{ADAPTER}.weight"].detach()).float()  # (r, in)
            b = full_tensor(state[f"{prefix}.lora_B.{ADAPTER}.weight"].detach()).float()  # (out, r)
            scale = layers[prefix].scaling[ADAPTER]  # α/r
            w = (w.float() + scale * (b @ a)).to(w.dtype)  # W' = W + (α/r) B A, (out, in)
        yield (f"{prefix}.{rest}" if prefix else name), w


def save_adapter(
    lm: Any, folder: Path | None, base_model_path: str, dtype: torch.dtype = torch.float32
) -> None:
    """Write the adapters alone, as `peft.PeftModel.from_pretrained(base, folder)` loads them.

    Collective if the model is sharded; `folder` is None on the ranks that do not write.
    """
    from safetensors.torch import save_file

    tensors = {}
    for name, tensor in lm.state_dict().items():
        if is_adapter(name):
            tensors[_peft_name(name)] = full_tensor(tensor.detach()).to("cpu", dtype).contiguous()
    if folder is None:
        return
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    config = copy.copy(lm.peft_config[ADAPTER])
    config.base_model_name_or_path, config.inference_mode = base_model_path, True
    config.task_type = "CAUSAL_LM"
    config.target_modules = sorted(config.target_modules)  # a set: in another order in every run
    config.save_pretrained(str(folder))


def load_adapter(lm: Any, folder: Path) -> None:
    """Put the adapters that `save_adapter` wrote beside the layers of their base model, in place.
    ValueError: they belong to another architecture.
    """
    from safetensors.torch import load_file

    tensors = load_file(folder / FILE)
    add_lora(lm, max(tensor.shape[0] for name, tensor in tensors.items() if ".lora_A." in name))
    state = {_peft_name(name): t for name, t in lm.state_dict().items() if is_adapter(name)}
    if {n: t.shape for n, t in state.items()} != {n: t.shape for n, t in tensors.items()}:
        raise ValueError(f"the adapters in {folder} do not fit {type(lm).__name__}")
    for name, tensor in state.items():
        tensor.copy_(tensors[name])


def _adapted_layers(module: nn.Module) -> dict[str, Any]:
    return {name: layer for name, layer in module.named_modules() if hasattr(layer, "lora_A")}


def _peft_name(name: str) -> str:
    """An adapter's name in peft's files."""
    return "base_model.model." + name.replace(f".{ADAPTER}.", ".")
