"""Will it fit? The bytes of a training step by the model's shape, before anything is loaded.

P parameters, P_l of them in one layer, P_r in LoRA's adapters, W devices, T tokens in a micro-batch
(at least one trajectory), H hidden, I intermediate, A·D attention size, L layers, V vocabulary;
bytes:

    state        full: (4 weights + 4 gradients + 8 moments + 4 reference) P / W
                 LoRA: (4 P + 16 P_r) / W, the reference being the policy without its adapters
    activations  one layer, kept for the backward pass: KEPT and 8 I a token. One device computes
                 under autocast and its residual stream is float32 (r = 4 bytes), FSDP in bfloat16
                 (r = 2). On a GPU all of it, L layers. What is computed again needs one layer at a
                 time, with its backward pass, beside what each layer keeps of a token: r H with
                 --gradient-checkpointing; on a CPU also its products, 4 H + 4 A·D + 4 A_kv·D + 4 I,
                 and with LoRA the adapters' (4 H + 2 A·D + 4 A_kv·D + 4 I)
    head         24 bytes a logit of a slice of 512 MB (models.HEAD_BYTES)
    copies       W = 1: autocast's bfloat16 weights, 2 P, or with checkpointing a layer's at a time
                 W > 1: gathered bfloat16 weights of the root and of two layers, and gradients of
                 the root (bfloat16) and of a layer (both types)
    sampler      2 P + keys and values, 4 L D A_kv a token

`tests/measure_memory.py` holds them against the tensors of real updates. `scale/room.py` compares
their sum with what the machine has; `recipes/memory.py` tabulates them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Keep = Literal["all", "products", "inputs"]  # what a layer keeps for its backward pass
GIB = 2**30
GPU_HEAD_BYTES = 512 << 20  # what models.py takes where HEAD_BYTES names no limit
BYTES_PER_LOGIT = 24  # bfloat16, float32, / temperature, log-softmax, entropy, and their gradients
SAMPLER_SHARE = 0.5  # of the card, at most (room.sampler_share); it sleeps in the update
MARGIN = 1.05  # an allocator's losses, fragmentation above all
CPU_CACHE_AT_MOST = 2 * GIB  # of keys and values
SMALL_CACHE = GIB // 2  # what a small model may fill
SEQUENCES = 64  # that vLLM runs side by side in this process
POLICY_SHARE = 0.3  # of a trajectory's tokens, sampled ones
# (LoRA?, several devices?) -> bytes a token that a layer keeps: this many times H, and A·D. Frozen
# matrices and norms keep no input; the adapters keep theirs.
KEPT = {(False, False): (26, 8), (False, True): (16, 8)}
KEPT |= {(True, False): (18, 10), (True, True): (12, 8)}


@dataclass(frozen=True)
class Shape:
    """What decides the size of a decoder of Qwen2's kind."""

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
        """P_l: matrices, biases of q, k and v, two norms."""
        biases = sum(out for _, out in self.linears[:3])
        return sum(a * b for a, b in self.linears) + biases + 2 * self.hidden

    @property
    def root_parameters(self) -> int:
        """What belongs to no layer: embedding, last norm, head."""
        return self.vocab * self.hidden * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        """P."""
        return self.layers * self.layer_parameters + self.root_parameters

    def adapter_parameters(self, rank: int) -> int:
        """P_r: A (r, in) and B (out, r) beside each matrix of each layer."""
        return self.layers * rank * sum(a + b for a, b in self.linears)


def shape_of(name: str, config: Mapping[str, Any]) -> Shape | None:
    """The shape that a model's config.json tells of; None if it is of another kind."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    sizes: list[Any] = [config.get(key) for key in (*names, "num_attention_heads")]
    if not all(isinstance(size, int) and size > 0 for size in sizes) or "num_experts" in config:
        return None
    vocab, hidden, intermediate, layers, heads = sizes
    kv_heads = config.get("num_key_value_heads") or heads
    tied = bool(config.get("tie_word_embeddings", False))
    return Shape(name, vocab, hidden, intermediate, layers, heads, kv_heads, tied)


def state_bytes(shape: Shape, devices: int = 1, lora_rank: int = 0) -> dict[str, float]:
    """Bytes that one device holds from step to step; gradients from a backward pass to its step."""
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
    """Most bytes of an update beside the state: activations, head, copies of weights.

    `tokens` is T of the micro-batch; POLICY_SHARE of them have logits. `keep`: see
    `scale/recompute.py`, whose names these are.
    """
    r = 4 if devices == 1 else 2
    h, i, vocab = shape.hidden, shape.intermediate, shape.vocab
    times_h, times_ad = KEPT[lora_rank > 0, devices > 1]
    layer = times_h * h + times_ad * shape.heads * shape.head_dim + 8 * i
    layer += 2 * lora_rank * len(shape.linears) + 4 * shape.heads + 8  # log-sum-exp, 1/rms
    layer *= tokens
    kept = r * h
    if keep == "products":
        outs = sum(out for _, out in shape.linears)  # bfloat16, as is attention's result
        kept += 2 * outs + 2 * shape.heads * shape.head_dim + 4 * shape.heads
        if lora_rank:  # both products of the adapters beside each matrix
            kept += 2 * outs + 2 * lora_rank * len(shape.linears)
    inputs = shape.layers * kept * tokens
    again = (kept - r * h) * tokens  # kept of a layer that is whole once more
    end = (20 if lora_rank else 24) * h * tokens  # last norm, its gradient, the last layer's
    backward = (10 * h + 6 * i if lora_rank and devices == 1 else 2 * h + 4 * i) * tokens
    logits = min(int(POLICY_SHARE * tokens), max(1, head_bytes // (4 * vocab))) * vocab
    head = BYTES_PER_LOGIT * logits + 8 * h * tokens
    rotary = 2 * shape.head_dim * r * tokens
    forward = (14 * h + 8 * i) * tokens  # a layer's own tensors, none of them kept
    if devices == 1:
        copies, layer_copy = 2 * shape.parameters, 2 * shape.layer_parameters
    else:
        copies = (2 + 2) * shape.root_parameters + (2 * 2 + 2 + 4) * shape.layer_parameters
        layer_copy = copies
    if keep == "all":
        return copies + shape.layers * layer + max(end, backward, head) + rotary
    if devices == 1 and lora_rank:
        copies = layer_copy  # autocast keeps copies of what is trained alone
    moments = [
        copies + inputs + max(forward, head / 2),  # forward; logits have no gradients yet
        layer_copy + inputs + max(end, head),  # the backward pass begins
        layer_copy + inputs - again + layer + backward,  # it is in a layer, computed again
    ]
    return max(moments) + rotary


def update_bytes(
    shape: Shape, tokens: int, devices: int = 1, lora_rank: int = 0, keep: Keep = "inputs"
) -> float:
    """Most bytes that the trainer takes on one device."""
    state = sum(state_bytes(shape, devices, lora_rank).values())
    return state + transient_bytes(shape, tokens, devices, lora_rank, keep)


def cache_bytes(shape: Shape, tokens: int) -> int:
    """Keys and values of one sequence in the sampler, bfloat16."""
    return 4 * shape.layers * shape.kv_heads * shape.head_dim * tokens


def cpu_cache_bytes(shape: Shape | None, tokens: int, sequences: int, dtype: str) -> int:
    """Keys and values that the sampler gets on a CPU: a quarter of what its sequences could fill,
    or, of a small model, what twice as many could.

    Openings are kept once for a group and most trajectories end early; where that is not enough,
    vLLM lets some wait. Those that wait for their worlds are in no sequence, and yet what they have
    said should stay: else every turn reads its whole history again.

    Args:
        shape: None: of a model that nobody knows.
        tokens: of the longest sequence.
        sequences: that run side by side.
    """
    if shape is None:
        return CPU_CACHE_AT_MOST
    most = sequences * cache_bytes(shape, tokens) * (2 if dtype == "float32" else 1)
    least = most // sequences + GIB // 8  # the longest sequence fits, whatever else
    return max(min(most // 4, CPU_CACHE_AT_MOST), min(2 * most, SMALL_CACHE), least)


def card_bytes(shape: Shape, tokens: int, devices: int = 1, lora_rank: int = 0) -> float:
    """The smallest card, in bytes, that holds trainer (with checkpointing) and sampler together.

    The sampler has its share of the card beside the trainer's state, and leaves it in the update.
    """
    update = MARGIN * update_bytes(shape, tokens, devices, lora_rank)
    sampler = 2 * shape.parameters + cache_bytes(shape, tokens) + 2 * GIB  # one sequence at least
    beside = MARGIN * sum(state_bytes(shape, devices, lora_rank).values())
    return max(beside / (1 - SAMPLER_SHARE), sampler / SAMPLER_SHARE, update)
