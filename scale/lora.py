"""LoRA: train two thin matrices beside every weight matrix instead of the matrix itself.

`--lora-rank r` freezes the model and adds an adapter to each linear layer (arXiv 2106.09685):

    W' = W + (α/r) B A        W (out, in) frozen,  A (r, in) and B (out, r) trained
    A ~ U(-1/√in, 1/√in), B = 0        at the start W' = W, so the first policy is the base model
    α = 2 r by default                 α/r is 2 for every r; `--lora-alpha` sets another α

With P parameters in the model and P_r in the adapters, full training needs 20 P bytes (float32
weights, gradient, two moments, reference). LoRA needs 4 P + 16 P_r, because the model without its
adapters is the reference (`adapters_off`). Samplers and checkpoints hold ordinary models, in which
W' replaces W (`merged_weights`). The output head has no adapter: it is often tied to the embedding,
and merging would untie them. According to "LoRA Without Regret" (Schulman et al., 2025), with
policy gradients rank 1 learns as well as full training, at about 10 times the learning rate.

`--reset-adapter-every N` makes W' the new W after every N steps and starts new adapters (ReLoRA,
arXiv 2307.05695). The reference then moves: the KL term limits how far N steps go, not the run.

Run: `python train.py --lora-rank 16`. Read next: `engines.py`.
"""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from scale.distributed import full_tensor, shard_like

ALPHA_PER_RANK = 2  # α/r by default
# peft changes the model in place: in the state dict q_proj.weight becomes q_proj.base_layer.weight,
# followed by q_proj.lora_A.default.weight and q_proj.lora_B.default.weight.
ADAPTER = "default"
FILE = "adapter_model.safetensors"


def add_lora(lm: Any, rank: int, seed: int = 0, alpha: float | None = None) -> None:
    """Freeze `lm` and add adapters to all its linear layers except the output head, in place.

    Args:
        lm: a causal LM from transformers; its output does not change before training.
        seed: determines A; the global random state is not changed.
        alpha: α; None: 2 r.
    Raises:
        ValueError: there is no linear layer to adapt.
    """
    head = lm.get_output_embeddings()
    targets = [n for n, m in lm.named_modules() if isinstance(m, nn.Linear) and m is not head]
    if not targets:
        raise ValueError(f"--lora-rank {rank}: {type(lm).__name__} has no linear layers to adapt")
    from peft import LoraConfig, inject_adapter_in_model  # the import takes seconds

    alpha = alpha or ALPHA_PER_RANK * rank
    config = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=0.0, target_modules=targets)
    with torch.random.fork_rng(devices=[]):  # peft uses the global random state to fill A and B
        inject_adapter_in_model(config, lm, adapter_name=ADAPTER)
    for layer in _adapted_layers(lm).values():
        layer.lora_A.float()  # peft creates them in the dtype of W
        layer.lora_B.float()
    _initialize(lm, seed)


def restart_adapters(lm: Any, seed: int) -> None:
    """Make W' the base weights and start new adapters, in place: the output stays the same up to
    rounding. The optimizer's state no longer fits. Collective if the model is sharded."""
    state = lm.state_dict()
    for name, w in merged_weights(lm):
        base = state.get(f"{name.removesuffix('.weight')}.base_layer.weight")
        if base is not None:
            base.copy_(shard_like(w, base))
    _initialize(lm, seed)


def _initialize(lm: Any, seed: int) -> None:
    """Fill A with random numbers and B with zeros."""
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in lm.state_dict().items():
        if ".lora_A." in name:  # (r, in)
            bound = tensor.shape[1] ** -0.5
            a = torch.empty(tensor.shape).uniform_(-bound, bound, generator=generator)
            tensor.copy_(shard_like(a.to(tensor.device), tensor))
        elif ".lora_B." in name:  # (out, r)
            tensor.zero_()


def is_adapter(name: str) -> bool:
    """True if this name in a state dict belongs to an adapter."""
    return ".lora_A." in name or ".lora_B." in name


@contextlib.contextmanager
def adapters_off(module: nn.Module) -> Iterator[None]:
    """Inside this context, `module` computes exactly like the base model, the reference.

    NOTE: peft's `enable_adapters` would also set requires_grad, which does not work on the
    parameters of a sharded model. So we only set the flag that `forward` reads.
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
    """The state dict of the model with merged adapters (W' instead of W), one tensor at a time.

    Collective if the model is sharded: every rank must iterate to the end.

    Yields:
        (name, tensor) for all names of the base model, in its order. The tied output head is
        included. Weights are merged in float32 and returned in the dtype of W. A weight without an
        adapter is yielded without a copy.
    """
    layers, state = _adapted_layers(lm), lm.state_dict()
    for name, tensor in state.items():
        if is_adapter(name):
            continue
        w = full_tensor(tensor.detach())
        prefix, _, suffix = name.rpartition(".base_layer.")
        if prefix and suffix == "weight":
            a = full_tensor(state[f"{prefix}.lora_A.{ADAPTER}.weight"].detach()).float()  # (r, in)
            b = full_tensor(state[f"{prefix}.lora_B.{ADAPTER}.weight"].detach()).float()  # (out, r)
            scale = layers[prefix].scaling[ADAPTER]  # α/r
            w = (w.float() + scale * (b @ a)).to(w.dtype)  # W' = W + (α/r) B A, (out, in)
        yield (f"{prefix}.{suffix}" if prefix else name), w


def save_adapter(
    lm: Any, folder: Path | None, base_model_path: str, dtype: torch.dtype = torch.float32
) -> None:
    """Write only the adapters, in files that `peft.PeftModel.from_pretrained(base, folder)` loads.

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
    config.target_modules = sorted(config.target_modules)  # a set, whose order varies between runs
    config.save_pretrained(str(folder))


def load_adapter(lm: Any, folder: Path) -> None:
    """Load adapters written by `save_adapter` into their base model, in place. ValueError if they
    belong to another architecture.
    """
    from safetensors.torch import load_file

    tensors = load_file(folder / FILE)
    config = json.loads((folder / "adapter_config.json").read_text())
    add_lora(lm, config["r"], alpha=config["lora_alpha"])
    state = {_peft_name(name): t for name, t in lm.state_dict().items() if is_adapter(name)}
    if {n: t.shape for n, t in state.items()} != {n: t.shape for n, t in tensors.items()}:
        raise ValueError(f"the adapters in {folder} do not fit {type(lm).__name__}")
    for name, tensor in state.items():
        tensor.copy_(tensors[name])


def _adapted_layers(module: nn.Module) -> dict[str, Any]:
    return {name: layer for name, layer in module.named_modules() if hasattr(layer, "lora_A")}


def _peft_name(name: str) -> str:
    """Name of an adapter weight in peft's files."""
    return "base_model.model." + name.replace(f".{ADAPTER}.", ".")
