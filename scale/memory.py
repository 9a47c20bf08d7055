"""Memory: estimate the bytes that a training step needs, before anything is loaded.

The formulas use the model's shape: P parameters, P_r parameters in LoRA adapters, W devices, T
tokens in a micro-batch (at least one trajectory), H hidden size, I intermediate size, A·D attention
size, L layers, V vocabulary:

    state        full: (4 weights + 4 gradients + 8 moments + 4 reference) P / W
                 LoRA: (4 P + 16 P_r) / W; the reference is the policy without its adapters
    activations  tensors that each layer keeps for its backward pass: `keep_for_backward`
    head         24 bytes per logit of one slice (models.HEAD_BYTES)
    copies       W = 1: autocast's bfloat16 weights; W > 1: gathered weights and their gradients
    sampler      2 P + keys and values, 4 L D A_kv per token

`tests/measure_memory.py` compares the formulas with real updates, and `recipes/memory.py` makes a
table from them. Read next: `run/clock.py`, which measures the peak memory of a run.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from config import Misuse, RunConfig, is_url
from scale.default_models import is_mixture, model_config

Keep = Literal["all", "products", "inputs"]  # tensors that a layer keeps for its backward pass

GIB = 2**30
GPU_HEAD_BYTES = 512 << 20  # logits of a slice on devices that are not in models.HEAD_BYTES
SMALL_MODEL = 20_000_000  # parameters; below, a CPU has memory for all tensors of a layer
CPU_HEAD_BYTES = 24 << 20  # models.HEAD_BYTES["cpu"]
BYTES_PER_LOGIT = 24  # bfloat16, float32, / temperature, log-softmax, entropy, and their gradients
POLICY_SHARE = 0.3  # share of a trajectory's tokens that the policy sampled
SEQUENCES = 64  # maximum number of sequences that vLLM samples at the same time in this process
MAX_CPU_CACHE = 2 * GIB  # keys and values
SMALL_CACHE = GIB // 2  # keys and values that a small model always gets
SAMPLER_SHARE = 0.5  # maximum share of a GPU's memory; the sampler sleeps during the update
MIN_SAMPLER_SHARE = 0.1
MARGIN = 1.05  # fragmentation of torch's allocator
CONTEXT = 0.05  # share for CUDA and its graphs (an H200 used 81 GB; the other formulas give 76)
PROGRAMS = 1.5 * GIB  # Python, torch and vLLM in a CPU process
# The heap of a CPU process fragments: a laptop run of 15 steps peaked at 9.1 GB (formulas: 5.6).
CPU_MARGIN = 1.6
# The formulas are approximate: refuse a run only if it needs this many times the available memory.
TOLERANCE = 1.25
# (LoRA?, several devices?) -> bytes per token that a layer keeps, as multiples of H and of A·D.
# Frozen matrices and norms keep no input; adapters do. FSDP's residual stream is in bfloat16.
LAYER_FACTORS = {(False, False): (26, 8), (False, True): (16, 8)}
LAYER_FACTORS |= {(True, False): (18, 10), (True, True): (12, 8)}


@dataclass(frozen=True)
class Shape:
    """Sizes of a decoder like Qwen2."""

    name: str
    vocab: int  # V
    hidden: int  # H
    intermediate: int  # I
    layers: int  # L
    heads: int  # A
    kv_heads: int  # A_kv
    tied: bool = True  # the output head is the embedding

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def linears(self) -> tuple[tuple[int, int], ...]:
        """(in, out) of a layer's seven matrices: q, k, v, o, gate, up, down."""
        h, i, kv = self.hidden, self.intermediate, self.kv_heads * self.head_dim
        return ((h, h), (h, kv), (h, kv), (h, h), (h, i), (h, i), (i, h))

    @property
    def layer_parameters(self) -> int:
        """Parameters of a layer: matrices, biases of q, k and v, two norms."""
        biases = sum(out for _, out in self.linears[:3])
        return sum(a * b for a, b in self.linears) + biases + 2 * self.hidden

    @property
    def root_parameters(self) -> int:
        """Parameters outside the layers: embedding, last norm, head."""
        return self.vocab * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        """All parameters, P."""
        return self.layers * self.layer_parameters + self.root_parameters

    def adapter_parameters(self, rank: int) -> int:
        """P_r: A (r, in) and B (out, r) beside each matrix of each layer."""
        return self.layers * rank * sum(a + b for a, b in self.linears)


def shape_of(name: str, config: Mapping[str, Any]) -> Shape | None:
    """The shape in a config.json; None if the architecture is not a decoder like Qwen2."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    sizes: list[Any] = [config.get(key) for key in (*names, "num_attention_heads")]
    if not all(isinstance(size, int) and size > 0 for size in sizes) or is_mixture(config):
        return None
    vocab, hidden, intermediate, layers, heads = sizes
    kv_heads = config.get("num_key_value_heads") or heads
    tied = bool(config.get("tie_word_embeddings", False))
    return Shape(name, vocab, hidden, intermediate, layers, heads, kv_heads, tied)


# --------------------------------------------------------------------------------- the formulas


def state_bytes(shape: Shape, devices: int = 1, lora_rank: int = 0) -> dict[str, float]:
    """Bytes per device that stay allocated between steps (gradients: until the optimizer step)."""
    p, r = shape.parameters, shape.adapter_parameters(lora_rank)
    parts = {"weights": 4 * (p + r), "gradients": 4 * (r or p), "moments": 8 * (r or p)}
    parts["reference"] = 0 if lora_rank else 4 * p
    return {name: num_bytes / devices for name, num_bytes in parts.items()}


def transient_bytes(
    shape: Shape,
    tokens: int,
    devices: int = 1,
    lora_rank: int = 0,
    keep: Keep = "inputs",
    head_bytes: int = GPU_HEAD_BYTES,
) -> float:
    """Peak bytes of an update on top of the state, for a micro-batch of `tokens` tokens."""
    r = 4 if devices == 1 else 2  # bytes per element of the residual stream
    h, i, vocab = shape.hidden, shape.intermediate, shape.vocab
    times_h, times_ad = LAYER_FACTORS[lora_rank > 0, devices > 1]
    layer = times_h * h + times_ad * shape.heads * shape.head_dim + 8 * i
    layer += 2 * lora_rank * len(shape.linears) + 4 * shape.heads + 8  # log-sum-exp, 1/rms
    layer *= tokens
    saved = r * h  # bytes per token and layer with checkpointing
    if keep == "products":
        outs = sum(out for _, out in shape.linears)  # bfloat16, like the result of attention
        saved += 2 * outs + 2 * shape.heads * shape.head_dim + 4 * shape.heads
        if lora_rank:  # both products of each adapter
            saved += 2 * outs + 2 * lora_rank * len(shape.linears)
    inputs = shape.layers * saved * tokens
    duplicate = (saved - r * h) * tokens  # counted twice for the layer being recomputed
    end = (20 if lora_rank else 24) * h * tokens  # last norm, its gradient, the last layer's
    backward = (10 * h + 6 * i if lora_rank and devices == 1 else 2 * h + 4 * i) * tokens
    logits = min(int(POLICY_SHARE * tokens), max(1, head_bytes // (4 * vocab))) * vocab
    head = BYTES_PER_LOGIT * logits + 8 * h * tokens
    rotary = 2 * shape.head_dim * r * tokens
    forward = (14 * h + 8 * i) * tokens  # temporary tensors of a layer
    if devices == 1:
        copies, layer_copy = 2 * shape.parameters, 2 * shape.layer_parameters
    else:
        copies = (2 + 2) * shape.root_parameters + (2 * 2 + 2 + 4) * shape.layer_parameters
        layer_copy = copies
    if keep == "all":
        return copies + shape.layers * layer + max(end, backward, head) + rotary
    if devices == 1 and lora_rank:
        copies = layer_copy  # autocast only keeps copies of trained weights
    moments = [
        copies + inputs + max(forward, head / 2),  # forward pass; logits have no gradients yet
        layer_copy + inputs + max(end, head),  # start of the backward pass
        layer_copy + inputs - duplicate + layer + backward,  # inside a recomputed layer
    ]
    return max(moments) + rotary


def cache_bytes(shape: Shape, tokens: int) -> int:
    """Bytes of keys and values of one sequence in the sampler, in bfloat16."""
    return 4 * shape.layers * shape.kv_heads * shape.head_dim * tokens


def cpu_cache_bytes(shape: Shape | None, tokens: int, sequences: int, dtype: str) -> int:
    """Bytes of vLLM's cache of keys and values on a CPU; `shape` is None if unknown.

    The cache is a quarter of what its sequences could fill, because groups share their openings and
    most trajectories end early. When the cache is full, some sequences wait. A small model gets
    more, so it can keep the history of trajectories that wait for their environments.
    """
    if shape is None:
        return MAX_CPU_CACHE
    longest = cache_bytes(shape, tokens) * (2 if dtype == "float32" else 1)
    full = sequences * longest
    usual = max(min(full // 4, MAX_CPU_CACHE), min(2 * full, SMALL_CACHE))
    return max(usual, longest + GIB // 8)  # the longest sequence always fits


def card_bytes(shape: Shape, tokens: int, devices: int = 1, lora_rank: int = 0) -> float:
    """Memory in bytes of the smallest GPU that holds trainer (with checkpointing) and sampler."""
    state = sum(state_bytes(shape, devices, lora_rank).values())
    update = state + transient_bytes(shape, tokens, devices, lora_rank)
    sampler = 2 * shape.parameters + cache_bytes(shape, tokens) + 2 * GIB  # at least one sequence
    return max(MARGIN * state / (1 - SAMPLER_SHARE), sampler / SAMPLER_SHARE, MARGIN * update)


# ------------------------------------------------------------ tensors kept for the backward pass

aten = torch.ops.aten
PRODUCTS = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
}


def keep_for_backward(model: Any, keep: Keep) -> None:
    """Choose the tensors that each layer of a PolicyModel or CriticModel keeps for its backward
    pass. All choices give bitwise identical gradients.

    all        everything: 31.9 kB per token and layer of SmolLM2-135M
    products   the layer's input and the results of matrix products and attention: 13.9 kB; a CPU
               recomputes the norms, rotations and activations between them, which takes 10 to 25 %
               more time for SmolLM2-135M and 40 % for `tiny`
    inputs     only the layer's input: 2.3 kB, at up to a third more time (--gradient-checkpointing)
    """
    if keep == "all":
        return

    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_saved = operation in PRODUCTS
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    options: dict[str, Any] = {"use_reentrant": False}
    if keep == "products":
        options["context_fn"] = partial(create_selective_checkpoint_contexts, policy)
    lm = getattr(model, "lm", getattr(model, "backbone", model))
    lm.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)


def choose_keep(checkpointing: bool, is_gpu: bool, parameters: int) -> Keep:
    if checkpointing:
        return "inputs"
    # On a GPU, deciding at every operation would take longer than the operations themselves.
    return "all" if is_gpu or parameters < SMALL_MODEL else "products"


# ------------------------------------------------------------------------------- memory of a run


class DeviceMemory(NamedTuple):
    """Memory of this process's GPU, or of the machine if there is no GPU."""

    total: float  # bytes
    is_gpu: bool


def check_memory(config: RunConfig, memory: DeviceMemory | None = None) -> None:
    """Raise Misuse, with advice, if a run clearly does not fit into memory. A model of unknown
    size is accepted."""
    shape = shape_of(config.model, model_config(config.model))
    memory = memory or device_memory()
    if shape is None or (peak := required_bytes(config, shape, memory)) / TOLERANCE <= memory.total:
        return
    advice = ["a lower --max-tokens-per-micro-batch"]
    advice += [] if config.gradient_checkpointing else ["--gradient-checkpointing"]
    advice += [] if config.lora_rank else ["--lora-rank 16"]
    raise Misuse(
        f"this run would run out of memory: {config.model} with these options needs about "
        f"{peak / 1e9:.3g} GB, but {'the GPU' if memory.is_gpu else 'this machine'} has "
        f"{memory.total / 1e9:.3g} GB; try {', '.join(advice)} or a smaller --model"
    )


def state_of(config: RunConfig, shape: Shape) -> dict[str, float]:
    """`state_bytes` of a run, counting a critic, a reference and a teacher only if the run has
    them."""
    devices = int(os.environ.get("WORLD_SIZE", 1))
    parts = state_bytes(shape, devices, config.lora_rank)
    if getattr(config, "needs_critic", False):  # it has no adapters
        critic = state_bytes(shape, devices, 0)
        parts |= {name: parts[name] + critic[name] for name in ("weights", "gradients", "moments")}
    if not (getattr(config, "kl_coef", 0) or getattr(config, "kl_loss_coef", 0)):
        parts["reference"] = 0
    teacher = getattr(config, "teacher", None)
    if teacher and not config.asks_oracle and not is_url(teacher):
        teacher_shape = shape_of(teacher, model_config(teacher))
        parts["teacher"] = 4 * teacher_shape.parameters / devices if teacher_shape else 0
    return parts


def required_bytes(config: RunConfig, shape: Shape, memory: DeviceMemory) -> float:
    """Peak bytes of a run, per GPU or on the machine."""
    c, state = config, sum(state_of(config, shape).values())
    step_tokens = c.trajectories_per_step * c.max_trajectory_tokens
    row = c.max_trajectory_tokens * (2 if c.method == "dpo" else 1)  # a pair is not split
    tokens = min(max(c.max_tokens_per_micro_batch, row), step_tokens)
    keep = choose_keep(c.gradient_checkpointing, memory.is_gpu, shape.parameters)
    head = GPU_HEAD_BYTES if memory.is_gpu else CPU_HEAD_BYTES
    devices = int(os.environ.get("WORLD_SIZE", 1))
    rank = 0 if getattr(c, "needs_critic", False) else c.lora_rank
    update = transient_bytes(shape, tokens, devices, rank, keep, head)
    sampler = 0.0
    if not (c.engine_url or c.engine_devices):
        sampler = 2 * shape.parameters + cache_bytes(shape, c.max_trajectory_tokens)
    if memory.is_gpu:
        awake = sampler if c.engine == "transformers" else 0  # vLLM sleeps during the update
        return MARGIN * state + max(sampler, MARGIN * update + awake) + CONTEXT * memory.total
    if sampler and c.engine == "vllm":
        dtype = "bfloat16" if c.precision == "bf16" else "float32"
        sampler += cpu_cache_bytes(shape, c.max_trajectory_tokens, SEQUENCES, dtype)
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return CPU_MARGIN * processes * (state + update + sampler + PROGRAMS)


def sampler_share(config: RunConfig, memory: DeviceMemory | None = None) -> float:
    """The share of a GPU's memory that vLLM can use next to the trainer, at most half.

    When vLLM wakes after an update, the GPU also holds the trainer's weights, moments and
    reference, and during `sync.compare` also bfloat16 copies of weights.
    """
    shape = shape_of(config.model, model_config(config.model))
    memory = memory or device_memory()
    if shape is None or not memory.is_gpu:
        return SAMPLER_SHARE
    parts = state_of(config, shape)
    trainer = MARGIN * (sum(parts.values()) - parts["gradients"])
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        trainer += 2 * 2 * shape.root_parameters  # of policy and reference
    elif not config.lora_rank:
        trainer += 2 * shape.parameters
    return max(min(SAMPLER_SHARE, 1 - trainer / memory.total - CONTEXT), MIN_SAMPLER_SHARE)


def device_memory() -> DeviceMemory:
    """The memory of this process's GPU if torch can use one, or of the machine or container."""
    if torch.cuda.is_available():
        _, total = torch.cuda.mem_get_info(int(os.environ.get("LOCAL_RANK", 0)))
        return DeviceMemory(total, is_gpu=True)
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with suppress(OSError, ValueError):  # no control group, or "max": no limit
        total = min(total, int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return DeviceMemory(total, is_gpu=False)
