"""What fits where: memory and time of a training step by model, context and number of devices.

Arithmetic on shapes, so that a table exists before the GPUs do; on small shapes, where this machine
can, every formula is held against the tensors of a real update. P parameters, P_l of them in one
layer, P_r in LoRA's adapters, W devices, T tokens in a micro-batch (at least one trajectory, so the
context), H hidden, I intermediate, A·D attention size, L layers, V vocabulary, bytes throughout:

    state        full: (4 weights + 4 gradients + 8 moments + 4 reference) P / W
                 LoRA: (4 P + 16 P_r) / W, the reference being the policy without its adapters
    activations  one layer, kept for the backward pass, a token (r = 4: one device computes under
                 autocast and its residual stream is float32; r = 2: FSDP computes in bfloat16):
                     full  r = 4: 26 H +  8 AD + 8 I        r = 2: 16 H + 8 AD + 8 I
                     LoRA  r = 4: 18 H + 10 AD + 8 I        r = 2: 12 H + 8 AD + 8 I
                 all of it:          L layers
                 --gradient-checkpointing:  L r H + one layer + what its backward pass needs
    head         24 bytes a logit of a slice of 512 MB (models.HEAD_BYTES)
    copies       W = 1: autocast's bfloat16 weights, 2 P; in a backward pass with checkpointing
                 a layer's at a time
                 W > 1: gathered bfloat16 weights of the root and of two layers, and gradients of
                 the root (bfloat16) and of a layer (both types)
    sampler      2 P + keys and values, 4 L D A_kv a token; vLLM takes half of the card, and
                 sleeps during the update
    FLOPs        a token, forward: 2 (P - embedding) + 2 L AD T, and 2 V H where the policy spoke;
                 backward: twice that (LoRA: once), recomputation: once; old and reference
                 log-probs: one forward pass each

Which rows are measured: those of `tiny` and `small`, on a CPU, by counting the bytes of live
tensors (what an allocator adds, fragmentation above all, is in MARGIN). The rows of Qwen2.5 are
arithmetic, all of them, times included: no GPU has run them for this table. Times take every
trajectory to be as long as the context and leave out sampling, which is bound by memory traffic and
environments and is often the larger part.

Run:  python recipes/memory.py            print both tables; measuring takes a few minutes
      python recipes/memory.py --write    and write results/memory.json and results/memory.md
Read next: runtime/distributed.py.
"""

import argparse
import json
import subprocess
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_map_only  # noqa: E402

from models import HEAD_BYTES  # noqa: E402
from recipes.common import write_json  # noqa: E402
from runtime.rundir import circumstances  # noqa: E402

RESULTS = ROOT / "recipes" / "results"
GIB = 2**30
GPU_HEAD_BYTES = 512 << 20  # what models.py takes where HEAD_BYTES names no limit
BYTES_PER_LOGIT = 24  # bfloat16, float32, / temperature, log-softmax, entropy, and their gradients
SAMPLER_SHARE = 0.5  # of the card, VLLMEngine's gpu_memory_utilization
SAMPLER_SLEEPS = True  # train.py calls engine.sleep() before the update; no GPU has run it yet
MARGIN = 1.05  # an allocator's losses
POLICY_SHARE = 0.3  # of a trajectory's tokens, sampled ones
TRAJECTORIES = 32 * 8  # a step of the paper
PEAK_FLOPS, MFU = 989e12, 0.4  # H100 and H200, dense bfloat16; the share of it that an update gets
CARDS = (24, 40, 48, 80, 140, 180)  # GiB; 140 is what is sold as 141 GB
CONTEXTS = (4096, 10752, 32768)
DEVICES = (1, 2, 8)
LORA_RANK = 64


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
SMALL = {
    "tiny": Shape("tiny", 1024, 256, 704, 4, 4, 2),  # the model of that name
    "small": Shape("small", 2048, 384, 1536, 8, 6, 2),
}


# -------------------------------------------------------------------------------------- arithmetic


def state_bytes(shape: Shape, devices: int = 1, lora_rank: int = 0) -> dict[str, float]:
    """Bytes that one device holds from step to step; gradients from a backward pass to its step."""
    p = shape.parameters
    if lora_rank:
        r = shape.adapter_parameters(lora_rank)
        parts = {"weights": 4 * (p + r), "gradients": 4 * r, "moments": 8 * r, "reference": 0}
    else:
        parts = {"weights": 4 * p, "gradients": 4 * p, "moments": 8 * p, "reference": 4 * p}
    return {name: num_bytes / devices for name, num_bytes in parts.items()}


def layer_activations(shape: Shape, devices: int = 1, lora_rank: int = 0) -> int:
    """Bytes a token that one layer keeps for its backward pass."""
    h, ad = shape.hidden, shape.heads * shape.head_dim
    if lora_rank:  # frozen matrices and norms keep no input; the adapters keep theirs
        kept = 18 * h + 10 * ad if devices == 1 else 12 * h + 8 * ad
        kept += 2 * lora_rank * len(shape.linears)
    else:
        kept = 26 * h + 8 * ad if devices == 1 else 16 * h + 8 * ad
    return kept + 8 * shape.intermediate + 4 * shape.heads + 8  # + log-sum-exp, 1/rms of two norms


def transient_bytes(
    shape: Shape,
    tokens: int,
    policy_tokens: int,
    devices: int = 1,
    lora_rank: int = 0,
    checkpointing: bool = True,
    head_bytes: int = GPU_HEAD_BYTES,
) -> float:
    """Most bytes of an update beside the state: activations, head, copies of weights.

    Args:
        tokens: T of the micro-batch.
        policy_tokens: those whose logits are computed.
    """
    r = 4 if devices == 1 else 2
    h, i, vocab = shape.hidden, shape.intermediate, shape.vocab
    layer = layer_activations(shape, devices, lora_rank) * tokens
    inputs = shape.layers * r * h * tokens
    end = (20 if lora_rank else 24) * h * tokens  # last norm, its gradient, the last layer's
    backward = (10 * h + 6 * i if lora_rank and devices == 1 else 2 * h + 4 * i) * tokens
    logits = min(policy_tokens, max(1, head_bytes // (4 * vocab))) * vocab
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
    spoken = int(POLICY_SHARE * tokens)
    return state + transient_bytes(shape, tokens, spoken, devices, lora_rank, checkpointing)


def cache_bytes(shape: Shape, tokens: int) -> int:
    """Keys and values of one sequence in the sampler, bfloat16."""
    return 4 * shape.layers * shape.kv_heads * shape.head_dim * tokens


def card_bytes(shape: Shape, tokens: int, devices: int = 1, lora_rank: int = 0) -> float:
    """The smallest card, in bytes, that holds trainer (with checkpointing) and sampler together."""
    update = MARGIN * update_bytes(shape, tokens, devices, lora_rank)
    sampler = 2 * shape.parameters + cache_bytes(shape, tokens) + 2 * GIB  # one sequence at least
    beside = update  # what the trainer holds while the sampler has its share
    if SAMPLER_SLEEPS:
        beside = MARGIN * sum(state_bytes(shape, devices, lora_rank).values())
    return max(beside / (1 - SAMPLER_SHARE), sampler / SAMPLER_SHARE, update)


def step_flops(shape: Shape, tokens: int, lora_rank: int = 0, checkpointing: bool = True) -> float:
    """Of a training step without sampling: TRAJECTORIES trajectories of `tokens` tokens."""
    body = 2 * shape.layers * shape.layer_parameters
    attention = 2 * shape.layers * shape.heads * shape.head_dim * tokens
    head = 2 * shape.vocab * shape.hidden * POLICY_SHARE
    forward = (body + attention + head) * tokens * TRAJECTORIES
    passes = (
        2 + 1 + (1 if lora_rank else 2) + int(checkpointing)
    )  # scores, forward, backward, again
    return forward * passes


def arithmetic_rows() -> Iterator[dict[str, Any]]:
    """One row for each model, context, number of devices, and full or LoRA."""
    for shape in QWEN.values():
        for tokens in CONTEXTS:
            for devices in DEVICES:
                for rank in (0, LORA_RANK):
                    flops = step_flops(shape, tokens, rank)
                    needed = card_bytes(shape, tokens, devices, rank)
                    yield {
                        "model": shape.name,
                        "context": tokens,
                        "devices": devices,
                        "trains": f"LoRA {rank}" if rank else "full",
                        "state_bytes": sum(state_bytes(shape, devices, rank).values()),
                        "update_bytes": update_bytes(shape, tokens, devices, rank, False),
                        "update_checkpointing_bytes": update_bytes(shape, tokens, devices, rank),
                        "sampler_weights_bytes": 2 * shape.parameters,
                        "cache_bytes_per_sequence": cache_bytes(shape, tokens),
                        "smallest_card_gib": next((c for c in CARDS if c * GIB >= needed), None),
                        "flops": flops,
                        "seconds": flops / (devices * PEAK_FLOPS * MFU),
                    }


# --------------------------------------------------------------------------------------- measuring


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that are born inside it and not yet gone; keeps the maximum."""

    def __init__(self, known: list[torch.Tensor]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen = {t.untyped_storage()._cdata for t in known}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, self._see, result)
        return result

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self._seen or not num_bytes:
            return
        self._seen.add(key)
        self.live += num_bytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._gone, key, num_bytes)

    def _gone(self, key: int, num_bytes: int) -> None:
        self._seen.discard(key)
        self.live -= num_bytes


def build(shape: Shape, lora_rank: int = 0) -> Any:
    """A policy of this shape with random weights."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from models import PolicyModel
    from runtime.lora import add_lora

    config = Qwen2Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        tie_word_embeddings=shape.tied,
    )
    lm = Qwen2ForCausalLM(config)
    if lora_rank:
        add_lora(lm, lora_rank)
    return PolicyModel(lm).train()


def measure(
    shape: Shape,
    tokens: int = 1024,
    lora_rank: int = 0,
    checkpointing: bool = False,
    bfloat16: bool = False,
) -> dict[str, int]:
    """State and peak of a real update (update.update_policy) of two micro-batches, one process.

    Args:
        bfloat16: the whole model in it, as FSDP's layers compute, in place of autocast; what is
            kept for the backward pass is then that of several devices.
    """
    from batching import Batch
    from runtime import distributed
    from update import Objective, update_policy

    torch.manual_seed(0)
    model = build(shape, lora_rank)
    if checkpointing:
        distributed.checkpoint_activations(model)
    accelerator = distributed.make_accelerator("bf16")
    policy = model.bfloat16() if bfloat16 else distributed.shard(accelerator, model)
    learning = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=1e-6, fused=True)
    mask = torch.zeros(2, tokens)
    mask[:, -int(POLICY_SHARE * tokens) :] = 1
    noise = torch.randn(2, tokens) * mask
    batch = Batch(
        torch.randint(0, shape.vocab, (2, tokens)),
        mask,
        -mask,
        torch.zeros_like(mask),
        torch.tensor([tokens, tokens]),
        torch.tensor([0, 1]),
    )
    objective = Objective(
        mini_batch_size=2,
        max_tokens=tokens,
        share_prefix=False,
        entropy_coef=1e-3,
        kl_loss_coef=1e-3,
    )

    def update() -> None:
        update_policy(accelerator, policy, optimizer, batch, noise, objective, ref_log_probs=-mask)

    update()  # the optimizer makes its moments
    moments = [m for state in optimizer.state.values() for m in state.values() if m.ndim]
    known = [*policy.parameters(), *policy.buffers(), *moments, noise, mask]
    with LiveBytes([*known, *vars(batch).values()]) as live:
        update()
    gradients = sum(p.nbytes for p in learning)
    return {
        "weights": sum(p.nbytes for p in policy.parameters()),
        "gradients": gradients,
        "moments": sum(m.nbytes for m in moments),
        "transient": live.peak - gradients,
    }


def held_parts(shape: Shape, lora_rank: int = 0) -> list[dict[str, int]]:
    """Bytes of weights, gradients and moments on every rank of this launch, after one backward."""
    from runtime import distributed

    policy = distributed.shard(distributed.make_accelerator("bf16"), build(shape, lora_rank))
    learning = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=1e-6, fused=True)
    ids = torch.randint(0, shape.vocab, (1, 32))
    log_probs, _ = policy(ids, (torch.arange(32) > 8).long()[None])
    log_probs.sum().backward()
    optimizer.step()

    def num_bytes(tensors: Any) -> int:
        return sum(distributed.local(t).nbytes for t in tensors)

    moments = (m for state in optimizer.state.values() for m in state.values() if m.ndim)
    own = {
        "weights": num_bytes(policy.parameters()),
        "gradients": num_bytes(p.grad for p in learning if p.grad is not None),
        "moments": num_bytes(moments),
    }
    return distributed.gather(own)


def held_by_two(shape: Shape, lora_rank: int = 0) -> list[dict[str, int]]:
    """`held_parts` in two processes on the CPU."""
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += ["--config_file", str(ROOT / "recipes/fsdp2_cpu.yaml"), __file__]
    command += ["--held", shape.name, str(lora_rank)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if ended.returncode:
        raise SystemExit(f"memory.py: two processes failed:\n{ended.stderr[-2000:]}")
    return json.loads(ended.stdout.strip().splitlines()[-1])


def measured_rows(tokens: int = 1024) -> Iterator[dict[str, Any]]:
    """The formulas against real tensors: one process with all of an update, two with the state."""
    for shape in SMALL.values():
        for rank in (0, 8):
            for checkpointing in (False, True):
                found = measure(shape, tokens, rank, checkpointing)
                state = state_bytes(shape, 1, rank)
                spoken = int(POLICY_SHARE * tokens)
                expected = transient_bytes(
                    shape, tokens, spoken, 1, rank, checkpointing, HEAD_BYTES["cpu"]
                )
                yield {
                    "model": shape.name,
                    "context": tokens,
                    "devices": 1,
                    "trains": f"LoRA {rank}" if rank else "full",
                    "checkpointing": checkpointing,
                    "measured": found,
                    "formula": {k: state[k] for k in found if k in state} | {"transient": expected},
                }
            held = held_by_two(shape, rank)
            yield {
                "model": shape.name,
                "context": tokens,
                "devices": 2,
                "trains": f"LoRA {rank}" if rank else "full",
                "checkpointing": None,
                "measured": {k: max(each[k] for each in held) for k in held[0]},
                "formula": {k: v for k, v in state_bytes(shape, 2, rank).items() if k in held[0]},
            }


# ---------------------------------------------------------------------------------------- showing


def arithmetic_table(rows: list[dict[str, Any]]) -> str:
    """GB are 10⁹ bytes; a dash is no card of CARDS."""
    lines = [
        "| model | context | GPUs | trains | state | update | update, checkpointing | "
        "sampler: weights + a sequence | card, GiB | PFLOP a step | minutes a step |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        state, update, checkpointing, weights, cache = (
            f"{row[key] / 1e9:.1f}"
            for key in (
                "state_bytes",
                "update_bytes",
                "update_checkpointing_bytes",
                "sampler_weights_bytes",
                "cache_bytes_per_sequence",
            )
        )
        lines.append(
            f"| {row['model']} | {row['context']} | {row['devices']} | {row['trains']} | {state} | "
            f"{update} | {checkpointing} | {weights} + {cache} | {row['smallest_card_gib'] or '-'} "
            f"| {row['flops'] / 1e15:.0f} | {row['seconds'] / 60:.1f} |"
        )
    return "\n".join(lines)


def measured_table(rows: list[dict[str, Any]]) -> str:
    """MB are 10⁶ bytes; measured / formula where both are."""
    lines = [
        "| model | tokens | processes | trains | checkpointing | weights | gradients | moments | "
        "the rest of the peak | measured / formula |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        found, formula = row["measured"], row["formula"]
        cells = [
            f"{found[k] / 1e6:.2f}{'' if found[k] == formula[k] else f' ({formula[k] / 1e6:.2f})'}"
            for k in ("weights", "gradients", "moments")
        ]
        rest, ratio = "not measured", "-"
        if "transient" in found:
            rest = f"{found['transient'] / 1e6:.1f} ({formula['transient'] / 1e6:.1f})"
            ratio = f"{found['transient'] / formula['transient']:.2f}"
        how = {True: "yes", False: "no", None: "-"}[row["checkpointing"]]
        lines.append(
            f"| {row['model']} | {row['context']} | {row['devices']} | {row['trains']} | {how} | "
            f"{' | '.join(cells)} | {rest} | {ratio} |"
        )
    return "\n".join(lines)


def report(arithmetic: list[dict[str, Any]], measured: list[dict[str, Any]]) -> str:
    """The page results/memory.md."""
    cards, share = ", ".join(map(str, CARDS)), f"{SAMPLER_SHARE:.0%}"
    leaves = "leaves" if SAMPLER_SLEEPS else "keeps"
    speed = f"{MFU:.0%} of {PEAK_FLOPS / 1e12:.0f} TFLOP/s a GPU"
    return f"""# Memory and time of a training step

## Measured on a CPU

MB (10⁶ bytes) of one process; of two, the one that holds more. Weights, gradients and moments agree
with the formulas of `recipes/memory.py` to the byte (a number in brackets would be the formula's).
The rest of the peak of an update is activations, logits and copies of weights, in brackets by
formula.

{measured_table(measured)}

## Arithmetic

Not measured: no GPU has run these rows. GB (10⁹ bytes) a GPU.

- state: weights, gradients, moments and the reference.
- update: the most that an update takes, state included, with one trajectory of the full context in
  a micro-batch; without and with `--gradient-checkpointing`.
- card: the smallest of {cards} GiB that holds the update, with checkpointing, beside the sampler,
  which takes {share} of the card and {leaves} it during the update; 140 is sold as 141 GB.
- PFLOP and minutes: {TRAJECTORIES} trajectories of the full length, scored twice and trained on
  once, with checkpointing, at {speed}, which is an assumption. Sampling is not in
  them, and real trajectories are shorter.

{arithmetic_table(arithmetic)}
"""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--write", action="store_true", help="write results/memory.json and .md")
    parser.add_argument("--held", nargs=2, metavar=("SHAPE", "RANK"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.held:  # one of the two processes of `held_by_two`
        from runtime import distributed

        distributed.join()
        held = held_parts(SMALL[options.held[0]], int(options.held[1]))
        distributed.say(json.dumps(held))
        distributed.meet()
        distributed.leave()
        return 0
    arithmetic, measured = list(arithmetic_rows()), list(measured_rows())
    text = report(arithmetic, measured)
    print(text)
    if options.write:
        content = {"measured": measured, "arithmetic": arithmetic, **circumstances()}
        write_json(RESULTS / "memory.json", content)
        (RESULTS / "memory.md").write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
