"""Measure memory and time of an update and of a training step on one GPU.

    update    `update.update_policy` on a model with Qwen2.5's shape and random weights: two
              full-context trajectories, one per micro-batch. Measures seconds, the share of peak
              bfloat16 FLOPS, and peak memory compared with the formula in `scale/memory.py`
    run       train.py with a model of the same kind, with sampler and trainer on one card. The
              settings are those of recipes/textcraft_3b.sh, but with fewer and shorter
              trajectories. Measures the seconds of each phase

An update is measured both unsharded (autocast) and sharded with FSDP2 (bfloat16 layers, float32
weights; with only one rank, nothing is communicated). A model with random weights never ends a turn
early and solves nothing, so a run measures the cost of a step and not learning.

Run it:  python benchmarks/gpu.py                        3B: minutes on a card of 80 GB or more
         python benchmarks/gpu.py --shape 0.5B           on a smaller card
         python benchmarks/gpu.py -- OPTIONS             pass OPTIONS to train.py
Without a GPU, `--shape tiny --context 1024` runs everything on a small scale.
Read next: recipes/memory.py.
"""

import contextlib
import gc
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch

from batching import Batch
from benchmarks.common import make_parser, median, write_result
from config import Objective
from models import PolicyModel
from recipes.common import markdown, read_lines
from recipes.memory import LORA_RANK, PEAK_FLOPS, QWEN, forward_flops
from run import clock
from scale import distributed
from scale.default_models import resolve_model
from scale.lora import add_lora
from scale.memory import (
    POLICY_SHARE,
    Keep,
    Shape,
    keep_for_backward,
    state_bytes,
    transient_bytes,
)
from update import Learner, update_policy

SHAPES = QWEN | {"tiny": Shape("tiny", 1024, 256, 704, 4, 4, 2)}
CONTEXT = 10752  # tokens, as published
PHASES = ("rollout", "log_probs", "update", "sync")
# (LoRA, sharded by FSDP2, what a layer keeps for the backward pass, share of the context)
SETUPS: dict[str, tuple[bool, bool, Keep, float]] = {
    "full, checkpointing": (False, False, "inputs", 1.0),
    "full, checkpointing, FSDP2": (False, True, "inputs", 1.0),
    "LoRA, checkpointing": (True, False, "inputs", 1.0),
    "LoRA, checkpointing, FSDP2": (True, True, "inputs", 1.0),
    "full, a quarter of the context": (False, False, "all", 0.25),
}
RUNS = {"full": (), "LoRA": ("--lora-rank", str(LORA_RANK))}
STEPS = 3
# Options of train.py: those of the recipe, but with fewer and shorter episodes.
RUN = (
    *("--env", "textcraft", "--preset", "paper", "--gradient-checkpointing"),
    *("--rounds-scheduler", "fixed", "--rounds", "4", "--tasks-per-step", "8"),
    *("--group-size", "8", "--mini-batch-size", "32", "--steps", "1000"),
    *("--max-tokens-per-micro-batch", "10752", "--eval-every", "0", "--save-every", "1000"),
    *("--no-skip-zero-variance", "--on-collapse", "warn"),
)
ON_CPU = ("--engine", "transformers", "--max-tokens-per-turn", "16", "--tasks-per-step", "1")


# ------------------------------------------------------------------------------------- an update


def random_lm(shape: Shape) -> Any:
    """A causal language model of this shape with random weights, on torch's default device."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        tie_word_embeddings=shape.tied,
        max_position_embeddings=32768,
    )
    return Qwen2ForCausalLM(config)


def random_policy(shape: Shape, lora_rank: int = 0, device: Any = "cpu") -> PolicyModel:
    with torch.device(device):  # initializing 3B parameters on a GPU takes a second
        lm = random_lm(shape)
    if lora_rank:
        add_lora(lm, lora_rank)
    return PolicyModel(lm).train()


def random_batch(shape: Shape, tokens: int) -> Batch:
    """Two rows; the policy's tokens come last."""
    mask = torch.zeros(2, tokens)
    mask[:, -int(POLICY_SHARE * tokens) :] = 1
    return Batch(
        input_ids=torch.randint(0, shape.vocab, (2, tokens)),
        loss_mask=mask,
        rollout_log_probs=-mask,
        token_rewards=torch.zeros_like(mask),
        lengths=torch.tensor([tokens, tokens]),
        group_ids=torch.tensor([0, 1]),
        ref_log_probs=-mask,
        advantages=torch.randn(2, tokens) * mask,
    )


def one_at_a_time(tokens: int) -> Objective:
    """The objective for `random_batch`: one optimizer step, one micro-batch per row."""
    return Objective(
        mini_batch_size=2,
        max_tokens_per_micro_batch=tokens,
        share_prefix=False,
        entropy_coef=1e-3,
        kl_loss_coef=1e-3,
    )


def seconds_of(work: Callable[[], Any]) -> float:
    """Wall-clock seconds that `work` takes, including the GPU kernels that it starts."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


def take_step(learner: Learner, batch: Batch, objective: Objective) -> None:
    """Run `update.update_policy`. A skipped optimizer step is an error here."""
    if update_policy(learner, batch, objective)["policy/skipped_steps"]:
        raise SystemExit("the update was skipped: its loss or gradient is not finite")


def measure(setup: str, shape: Shape, context: int, repeats: int) -> dict[str, Any]:
    """One row of the update table: measured memory and seconds, and their formulas."""
    has_lora, is_sharded, keep, share = SETUPS[setup]
    tokens, rank = int(context * share), LORA_RANK if has_lora else 0
    torch.manual_seed(0)
    accelerator = distributed.make_accelerator("bf16")
    model: Any = random_policy(shape, rank, accelerator.device)
    keep_for_backward(model, keep)
    shard = distributed.shard_over_ranks if is_sharded else distributed.shard
    model = shard(accelerator, model)
    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-6, weight_decay=0.0, fused=True)
    learner, batch = Learner(accelerator, model, optimizer), random_batch(shape, tokens)
    step = partial(take_step, learner, batch, one_at_a_time(tokens))
    step()  # the optimizer allocates its moments
    clock.reset_peak()
    seconds = median((seconds_of(step) for _ in range(repeats)), 6)
    moments = [m for state in optimizer.state.values() for m in state.values() if m.ndim]
    state_tensors = [*model.parameters(), *trainable, *moments]  # trainable: as large as gradients

    formulas = state_bytes(shape, 1, rank) | {"reference": 0.0}
    state = sum(formulas.values())
    peak_formula = state + transient_bytes(shape, tokens, 2 if is_sharded else 1, rank, keep)
    passes = 1 + (1 if rank else 2) + (1 if keep == "inputs" else 0)
    flops = passes * 2 * forward_flops(shape, tokens)
    return {
        "way": setup,
        "tokens": tokens,
        "state_gb": in_gb(sum(distributed.local_part(t).nbytes for t in state_tensors)),
        "state_formula_gb": in_gb(state),
        "peak_gb": in_gb(clock.peak()),
        "formula_gb": in_gb(peak_formula),
        "ratio": round(clock.peak() / peak_formula, 3),
        "seconds": round(seconds, 3),
        "tokens_per_s": round(2 * tokens / seconds),
        "share_of_peak_flops": round(flops / seconds / PEAK_FLOPS, 3),
    }


def in_gb(num_bytes: float) -> float:
    return round(num_bytes / 1e9, 2)


def measure_updates(shape: Shape, context: int, repeats: int) -> list[dict[str, Any]]:
    """All rows of the update table. FSDP2 needs a process group, here of one process."""
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        store = torch.distributed.FileStore(str(Path(folder) / "store"), 1)
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
        rows = []
        for setup in SETUPS:
            rows.append(measure(setup, shape, context, repeats))
            print("\n".join(update_table(rows[-1:])), flush=True)
            gc.collect()  # sharded models contain reference cycles
            clock.release_memory()
        distributed.leave()
    return rows


# ----------------------------------------------------------------------------------------- a run


def save_random_model(shape: Shape, folder: Path) -> None:
    """Save random weights in bfloat16 with the tokenizer of `tiny`, whose vocabulary is smaller."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(resolve_model("tiny"))
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        lm = random_lm(shape).to(torch.bfloat16)
    lm.config.eos_token_id = lm.generation_config.eos_token_id = tokenizer.eos_token_id
    lm.config.pad_token_id = lm.generation_config.pad_token_id = tokenizer.pad_token_id
    lm.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def play(model: Path, words: Sequence[str]) -> list[dict[str, float]]:
    """The timings of a run's first STEPS steps. The run is then killed, before any checkpoint."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "train.py", *RUN, "--model", str(model), "--run-dir", str(run)]
        process = subprocess.Popen([*command, *words], cwd=ROOT, start_new_session=True)
        rows: list[dict[str, float]] = []
        try:
            while len(rows) < STEPS:
                if process.poll() is not None:
                    raise SystemExit(f"train.py ended after {len(rows)} of {STEPS} steps")
                time.sleep(0.5)
                rows = [row for row in read_lines(run / "timings.jsonl") if row["step"]]
            return rows
        finally:
            with contextlib.suppress(ProcessLookupError):  # the process has ended
                os.killpg(process.pid, 9)
            process.wait()


# ---------------------------------------------------------------------------------------- tables


def update_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    titles = "setup | tokens | state, GB (formula) | peak, GB (formula) | measured / formula"
    lines = [
        (
            *(row["way"], row["tokens"]),
            f"{row['state_gb']} ({row['state_formula_gb']})",
            f"{row['peak_gb']} ({row['formula_gb']})",
            *(f"{row['ratio']:.2f}", f"{row['seconds']:.2f}", row["tokens_per_s"]),
            f"{row['share_of_peak_flops']:.0%}",
        )
        for row in rows
    ]
    return markdown(f"{titles} | seconds | tokens/s | of peak FLOPS", lines)


def run_table(runs: Mapping[str, Sequence[dict[str, Any]]]) -> list[str]:
    """Medians over the steps after the first."""
    seconds = [f"time/{phase}_s" for phase in (*PHASES, "step")]
    speeds = ("rollout/generated_tokens_per_s", "update/tokens_per_s")
    lines = []
    for name, rows in runs.items():
        m = {key: statistics.median(row[key] for row in rows[1:]) for key in (*seconds, *speeds)}
        lines.append([name, *(f"{m[s]:.1f}" for s in seconds), *(round(m[s]) for s in speeds)])
    titles = " | ".join(f"{phase}, s" for phase in (*PHASES, "step"))
    return markdown(f"trains | {titles} | sampled tokens/s | trained tokens/s", lines)


def main() -> int:
    parser = make_parser(__doc__, 3)
    parser.add_argument("--shape", choices=SHAPES, default="3B", help="size of the model")
    parser.add_argument("--context", type=int, default=CONTEXT, help="tokens per trajectory")
    parser.add_argument("words", nargs="*", help="options for train.py; write -- before them")
    o = parser.parse_args()
    shape, on_gpu = SHAPES[o.shape], torch.cuda.is_available()
    if not on_gpu and o.shape != "tiny":
        raise SystemExit("torch finds no GPU; on a CPU use --shape tiny")
    updates = measure_updates(shape, o.context, o.repeats)
    with tempfile.TemporaryDirectory() as folder:
        save_random_model(shape, Path(folder))
        clock.release_memory()
        words = [*(() if on_gpu else ON_CPU), *o.words]
        runs = {name: play(Path(folder), [*lora, *words]) for name, lora in RUNS.items()}
    result = {"shape": o.shape, "words": o.words, "update": updates, "runs": runs}
    write_result(o, f"gpu-{o.shape}.json", result)
    print("\n".join(["", *update_table(updates), "", *run_table(runs)]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
