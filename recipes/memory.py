"""What fits where: memory and time of a training step by model, context and number of devices.

Arithmetic on shapes, so that there is a table before there are GPUs. P parameters, P_l of them in
one layer, P_r in LoRA's adapters, W devices, T tokens in a micro-batch (at least one trajectory, so
the context), H hidden, I intermediate, A·D attention size, L layers, V vocabulary; bytes:

    state        full: (4 weights + 4 gradients + 8 moments + 4 reference) P / W
                 LoRA: (4 P + 16 P_r) / W, the reference being the policy without its adapters
    activations  one layer, kept for the backward pass: KEPT and 8 I a token. One device computes
                 under autocast and its residual stream is float32 (r = 4 bytes), FSDP in bfloat16
                 (r = 2). All of it: L layers; with --gradient-checkpointing L r H a token, one
                 layer and what its backward pass needs
    head         24 bytes a logit of a slice of 512 MB (models.HEAD_BYTES)
    copies       W = 1: autocast's bfloat16 weights, 2 P, or with checkpointing a layer's at a time
                 W > 1: gathered bfloat16 weights of the root and of two layers, and gradients of
                 the root (bfloat16) and of a layer (both types)
    sampler      2 P + keys and values, 4 L D A_kv a token
    FLOPs        a token, forward: 2 (P - embedding) + 2 L AD T, and 2 V H where the policy spoke;
                 backward: twice that (LoRA: once), recomputation: once; old and reference
                 log-probs: one forward pass each; sampling, often the larger part: not counted

tests/measure_memory.py holds the formulas against the tensors of real updates of small models on a
CPU; the table says what it found. No GPU has run the rows of Qwen2.5.

Run:  python recipes/memory.py            print the page
      python recipes/memory.py --write    and write results/memory.json and results/memory.md
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from recipes.common import RESULTS, Result, markdown, read_json, write_json  # noqa: E402
from runtime.files import write_text  # noqa: E402
from runtime.rundir import circumstances  # noqa: E402

GIB = 2**30
GPU_HEAD_BYTES = 512 << 20  # what models.py takes where HEAD_BYTES names no limit
BYTES_PER_LOGIT = 24  # bfloat16, float32, / temperature, log-softmax, entropy, and their gradients
SAMPLER_SHARE = 0.5  # of the card: VLLMEngine's gpu_memory_utilization; it sleeps in the update
MARGIN = 1.05  # an allocator's losses, fragmentation above all
POLICY_SHARE = 0.3  # of a trajectory's tokens, sampled ones
TRAJECTORIES = 32 * 8  # a step of the paper
PEAK_FLOPS, MFU = 989e12, 0.4  # H100 and H200, dense bfloat16; the share of it that an update gets
CARDS = (24, 40, 48, 80, 140, 180)  # GiB; 140 is what is sold as 141 GB
CONTEXTS, DEVICES, LORA_RANK = (4096, 10752, 32768), (1, 2, 8), 64
# (LoRA?, several devices?) -> bytes a token that a layer keeps: this many times H, and A·D. Frozen
# matrices and norms keep no input; the adapters keep theirs.
KEPT = {(False, False): (26, 8), (False, True): (16, 8)}
KEPT |= {(True, False): (18, 10), (True, True): (12, 8)}
HEADING = "## Arithmetic\n"  # of results/memory.md; above it stands what was measured


@dataclass(frozen=True)
class Shape:
    """What decides the size of a Qwen2 model."""

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


QWEN = {
    "0.5B": Shape("0.5B", 151936, 896, 4864, 24, 14, 2),
    "1.5B": Shape("1.5B", 151936, 1536, 8960, 28, 12, 2),
    "3B": Shape("3B", 151936, 2048, 11008, 36, 16, 2),
    "7B": Shape("7B", 152064, 3584, 18944, 28, 28, 4, tied=False),
}


# -------------------------------------------------------------------------------------- arithmetic


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
    checkpointing: bool = True,
    head_bytes: int = GPU_HEAD_BYTES,
) -> float:
    """Most bytes of an update beside the state: activations, head, copies of weights.

    `tokens` is T of the micro-batch; POLICY_SHARE of them have logits.
    """
    r = 4 if devices == 1 else 2
    h, i, vocab = shape.hidden, shape.intermediate, shape.vocab
    times_h, times_ad = KEPT[lora_rank > 0, devices > 1]
    layer = times_h * h + times_ad * shape.heads * shape.head_dim + 8 * i
    layer += 2 * lora_rank * len(shape.linears) + 4 * shape.heads + 8  # log-sum-exp, 1/rms
    layer *= tokens
    inputs = shape.layers * r * h * tokens
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
    if not checkpointing:
        return copies + shape.layers * layer + max(end, backward, head) + rotary
    if devices == 1 and lora_rank:
        copies = layer_copy  # autocast keeps copies of what is trained alone
    moments = [
        copies + inputs + max(forward, head / 2),  # forward; logits have no gradients yet
        layer_copy + inputs + max(end, head),  # the backward pass begins
        layer_copy + inputs + layer + backward,  # it is in a layer, computed again
    ]
    return max(moments) + rotary


def update_bytes(
    shape: Shape, tokens: int, devices: int = 1, lora_rank: int = 0, checkpointing: bool = True
) -> float:
    """Most bytes that the trainer takes on one device."""
    state = sum(state_bytes(shape, devices, lora_rank).values())
    return state + transient_bytes(shape, tokens, devices, lora_rank, checkpointing)


def cache_bytes(shape: Shape, tokens: int) -> int:
    """Keys and values of one sequence in the sampler, bfloat16."""
    return 4 * shape.layers * shape.kv_heads * shape.head_dim * tokens


def card_bytes(shape: Shape, tokens: int, devices: int = 1, lora_rank: int = 0) -> float:
    """The smallest card, in bytes, that holds trainer (with checkpointing) and sampler together.

    The sampler has its share of the card beside the trainer's state, and leaves it in the update.
    """
    update = MARGIN * update_bytes(shape, tokens, devices, lora_rank)
    sampler = 2 * shape.parameters + cache_bytes(shape, tokens) + 2 * GIB  # one sequence at least
    beside = MARGIN * sum(state_bytes(shape, devices, lora_rank).values())
    return max(beside / (1 - SAMPLER_SHARE), sampler / SAMPLER_SHARE, update)


def step_flops(shape: Shape, tokens: int, lora_rank: int = 0) -> float:
    """Of a step's TRAJECTORIES of `tokens` tokens, with checkpointing and without sampling."""
    body = 2 * shape.layers * shape.layer_parameters
    attention = 2 * shape.layers * shape.heads * shape.head_dim * tokens
    head = 2 * shape.vocab * shape.hidden * POLICY_SHARE
    forward = (body + attention + head) * tokens * TRAJECTORIES
    return forward * (2 + 1 + (1 if lora_rank else 2) + 1)  # scores, forward, backward, again


def arithmetic_rows() -> list[Result]:
    """A row for each model, context, number of devices, and full or LoRA."""
    return [row(*case) for case in product(QWEN.values(), CONTEXTS, DEVICES, (0, LORA_RANK))]


def row(shape: Shape, tokens: int, devices: int, rank: int) -> Result:
    """One line of the table; a card of None is larger than CARDS."""
    flops, needed = step_flops(shape, tokens, rank), card_bytes(shape, tokens, devices, rank)
    return {
        "model": shape.name,
        "context": tokens,
        "devices": devices,
        "trains": f"LoRA {rank}" if rank else "full",
        "state_bytes": sum(state_bytes(shape, devices, rank).values()),
        "update_bytes": update_bytes(shape, tokens, devices, rank, checkpointing=False),
        "update_checkpointing_bytes": update_bytes(shape, tokens, devices, rank),
        "sampler_weights_bytes": 2 * shape.parameters,
        "cache_bytes_per_sequence": cache_bytes(shape, tokens),
        "smallest_card_gib": next((c for c in CARDS if c * GIB >= needed), None),
        "flops": flops,
        "seconds": flops / (devices * PEAK_FLOPS * MFU),
    }


# ---------------------------------------------------------------------------------------- showing


def arithmetic_table(rows: Sequence[Result]) -> str:
    """GB are 10⁹ bytes; a dash is no card of CARDS."""
    lines = []
    for row in rows:
        sizes = (f"{value / 1e9:.1f}" for name, value in row.items() if "bytes" in name)
        state, update, checkpointing, weights, cache = sizes
        line = [row[key] for key in ("model", "context", "devices", "trains")]
        line += [state, update, checkpointing, f"{weights} + {cache}"]
        line += [row["smallest_card_gib"] or "-"]
        lines.append([*line, f"{row['flops'] / 1e15:.0f}", f"{row['seconds'] / 60:.1f}"])
    titles = "model | context | GPUs | trains | state | update | update, checkpointing"
    titles += " | sampler: weights + a sequence | card, GiB | PFLOP a step | minutes a step"
    return "\n".join(markdown(titles, lines))


def report(rows: Sequence[Result]) -> str:
    """The page's part on the formulas."""
    cards, share = ", ".join(map(str, CARDS)), f"{SAMPLER_SHARE:.0%}"
    speed = f"{MFU:.0%} of {PEAK_FLOPS / 1e12:.0f} TFLOP/s a GPU"
    return f"""{HEADING}
Not measured: no GPU has run these rows. GB (10⁹ bytes) a GPU.

- state: weights, gradients, moments and the reference.
- update: the most that an update takes, state included, with one trajectory of the full context in
  a micro-batch; without and with `--gradient-checkpointing`.
- card: the smallest of {cards} GiB that holds the update, with checkpointing, beside the sampler,
  which takes {share} of the card and leaves it during the update; 140 is sold as 141 GB.
- PFLOP and minutes: {TRAJECTORIES} trajectories of the full length, scored twice and trained on
  once, with checkpointing, at {speed}, which is an assumption. Sampling is not in
  them, and real trajectories are shorter.

{arithmetic_table(rows)}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--write", action="store_true", help="write results/memory.json and .md")
    options = parser.parse_args()
    rows, page = arithmetic_rows(), RESULTS / "memory.md"
    measured, _, _ = page.read_text(encoding="utf-8").partition(HEADING)
    text = measured + report(rows)
    print(text, end="")
    if options.write:
        write_text(page, text)
        saved = read_json(RESULTS / "memory.json")
        write_json(RESULTS / "memory.json", saved | {"arithmetic": rows} | circumstances())
    return 0


if __name__ == "__main__":
    sys.exit(main())
