"""One GPU: what an update and a step of train.py take there, beside what was computed beforehand.

    update    `update.update_policy` of a model of Qwen2.5's shape with random weights: two
              trajectories of the full context, one in each of two micro-batches. Peak bytes over
              what `scale/memory.py` says, seconds, and the share of the card's bfloat16
              arithmetic (recipes/memory.py counts the operations)
    run       train.py with such a model, sampler and trainer on one card, with the settings of
              recipes/textcraft_3b.sh but fewer and shorter trajectories: seconds and peak bytes of
              each phase, tokens a second, log-probs of sampler and trainer after each sync

Ways of an update: whole as one process has it (autocast), or cut as FSDP2 cuts it (bfloat16 layers
on float32 weights; one rank, so nothing travels); all of its weights or LoRA of rank 64; with each
layer's input kept for the backward pass, or with all of it.

Random weights never say that they have finished: each turn has all its tokens, and no world is ever
solved. So a run tells what a step takes, and nothing of learning.

Run it:  python benchmarks/gpu.py                        3B: minutes on a card of 80 GB or more
         python benchmarks/gpu.py --shape 0.5B           on a smaller one
         python benchmarks/gpu.py --part run -- OPTIONS
OPTIONS are handed to train.py. Without a GPU `--shape tiny` does the same on the processor.
Read next: recipes/memory.py.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from batching import Batch  # noqa: E402
from benchmarks.common import Results, arguments, median, seconds_of, take_step  # noqa: E402
from config import Objective  # noqa: E402
from models import PolicyModel  # noqa: E402
from recipes.common import markdown  # noqa: E402
from recipes.memory import LORA_RANK, PEAK_FLOPS, QWEN, forward_flops  # noqa: E402
from run import clock  # noqa: E402
from scale import distributed  # noqa: E402
from scale.default_models import resolve_model  # noqa: E402
from scale.lora import add_lora  # noqa: E402
from scale.memory import (  # noqa: E402
    GIB,
    POLICY_SHARE,
    Keep,
    Shape,
    keep_for_backward,
    state_bytes,
    transient_bytes,
)
from update import Learner  # noqa: E402

SHAPES = QWEN | {"tiny": Shape("tiny", 1024, 256, 704, 4, 4, 2)}
CONTEXT = 10752  # tokens, as published
PHASES = ("rollout", "log_probs", "update", "sync")
# Weights ("full" or "LoRA"), in parts?, what a layer keeps, the share of CONTEXT.
WAYS: dict[str, tuple[bool, bool, Keep, float]] = {
    "full, checkpointing": (False, False, "inputs", 1.0),
    "full, checkpointing, FSDP2": (False, True, "inputs", 1.0),
    "LoRA, checkpointing": (True, False, "inputs", 1.0),
    "LoRA, checkpointing, FSDP2": (True, True, "inputs", 1.0),
    "full, a quarter of the context": (False, False, "all", 0.25),
}
# train.py's, of the recipe, but for how much is played.
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
    """The same as a policy, with adapters if it has a rank."""
    with torch.device(device):  # 3B are made there in a second
        lm = random_lm(shape)
    if lora_rank:
        add_lora(lm, lora_rank)
    return PolicyModel(lm).train()


def random_batch(shape: Shape, tokens: int) -> Batch:
    """Two rows, whose last tokens are the policy's."""
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
    """Of `random_batch`: one optimizer step, a micro-batch for each row."""
    return Objective(
        mini_batch_size=2,
        max_tokens_per_micro_batch=tokens,
        share_prefix=False,
        entropy_coef=1e-3,
        kl_loss_coef=1e-3,
    )


@contextlib.contextmanager
def group_of_one(wanted: bool) -> Iterator[None]:
    """A process group with this process alone, which FSDP2 asks for."""
    if not wanted:
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        store = torch.distributed.FileStore(str(Path(folder) / "store"), 1)
        torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
        try:
            yield
        finally:
            distributed.leave()


def measure(way: str, shape: Shape, context: int, repeats: int) -> dict[str, Any]:
    """One way's figures; `peak_gb` None: it did not fit."""
    has_lora, in_parts, keep, share = WAYS[way]
    tokens, rank = int(context * share), LORA_RANK if has_lora else 0
    state = state_bytes(shape, 1, rank) | {"reference": 0.0}
    rest = transient_bytes(shape, tokens, 2 if in_parts else 1, rank, keep)
    passes = 1 + (1 if rank else 2) + (1 if keep == "inputs" else 0)
    own = sum(state.values())
    row: dict[str, Any] = {"way": way, "tokens": tokens, "peak_gb": None, "state_gb": None}
    row |= {"state_formula_gb": _gb(own), "formula_gb": _gb(own + rest)}
    try:
        with group_of_one(in_parts):
            peak, held, seconds = _updates(shape, tokens, rank, in_parts, keep, repeats)
    except torch.OutOfMemoryError:
        return row
    flops, took = passes * 2 * forward_flops(shape, tokens), median(seconds, 6)
    row |= {"peak_gb": _gb(peak), "state_gb": _gb(held), "ratio": round(peak / (own + rest), 3)}
    row |= {"seconds": round(took, 3), "tokens_per_s": round(2 * tokens / took)}
    return row | {"share_of_peak_flops": round(flops / took / PEAK_FLOPS, 3)}


def _updates(
    shape: Shape, tokens: int, rank: int, in_parts: bool, keep: Keep, repeats: int
) -> tuple[int, int, list[float]]:
    """Peak bytes of an update; of weights, gradients and moments; seconds of `repeats` of them."""
    torch.manual_seed(0)
    accelerator = distributed.make_accelerator("bf16")
    model: Any = random_policy(shape, rank, accelerator.device)
    keep_for_backward(model, keep)
    if in_parts:
        model = distributed.shard_over_ranks(accelerator, model)
    else:
        model = distributed.shard(accelerator, model)
    learning = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=1e-6, weight_decay=0.0, fused=True)
    learner, batch = Learner(accelerator, model, optimizer), random_batch(shape, tokens)
    objective = one_at_a_time(tokens)
    step = partial(take_step, learner, batch, objective)
    step()  # the optimizer makes its moments
    clock.reset_peak()
    seconds = [seconds_of(step) for _ in range(repeats)]
    moments = [m for state in optimizer.state.values() for m in state.values() if m.ndim]
    held = [*model.parameters(), *learning, *moments]  # a gradient is as large as its weight
    return clock.peak(), sum(distributed.local(t).nbytes for t in held), seconds


def free() -> None:
    """What the last model has left: sharded ones lie in cycles."""
    gc.collect()
    clock.return_freed()


# ----------------------------------------------------------------------------------------- a run


def save_random_model(shape: Shape, folder: Path) -> None:
    """Random weights in bfloat16 with the tokenizer of `tiny`, which knows the first few ids of
    those that such a model says."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(resolve_model("tiny"))
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        torch.set_default_dtype(torch.bfloat16)
        try:
            lm = random_lm(shape)
        finally:
            torch.set_default_dtype(torch.float32)
    lm.config.eos_token_id = lm.generation_config.eos_token_id = tokenizer.eos_token_id
    lm.config.pad_token_id = lm.generation_config.pad_token_id = tokenizer.pad_token_id
    lm.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def play(model: Path, steps: int, words: Sequence[str]) -> tuple[list[dict[str, float]], float]:
    """The timings of a run's first steps, and the most GiB that the card held meanwhile; it is
    killed then, so that no checkpoint is written.

    Raises:
        SystemExit: it ended before.
    """
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        command = [sys.executable, "train.py", *RUN, "--model", str(model), "--run-dir", str(run)]
        process = subprocess.Popen([*command, *words], cwd=ROOT, start_new_session=True)
        most = 0
        try:
            while process.poll() is None and len(rows := _rows(run)) < steps:
                time.sleep(0.5)
                if torch.cuda.is_available():
                    free, total = torch.cuda.mem_get_info()
                    most = max(most, total - free)
            if len(rows := _rows(run)) < steps:
                code = process.returncode
                raise SystemExit(f"train.py ended with {code} after {len(rows)} of {steps} steps")
            return rows, round(most / GIB, 1)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait()


def _rows(run: Path) -> list[dict[str, float]]:
    """A row for each step that has ended: its metrics and its timings."""
    rows: list[dict[str, float]] = []
    with contextlib.suppress(OSError):
        timings, metrics = (
            [json.loads(line) for line in (run / name).read_text().splitlines()]
            for name in ("timings.jsonl", "metrics.jsonl")
        )
        of_step = {row["step"]: row for row in metrics}
        rows = [of_step.get(row["step"], {}) | row for row in timings if row["step"]]
    return rows


def _gb(num_bytes: float) -> float:
    return round(num_bytes / 1e9, 2)


# ---------------------------------------------------------------------------------------- tables


def update_table(rows: Sequence[dict[str, Any]]) -> list[str]:
    titles = "way | tokens | state, GB (formula) | peak, GB (formula) | measured / formula"
    lines = []
    for row in rows:
        line = [row["way"], row["tokens"]]
        if row["peak_gb"] is None:
            line += [f"- ({row['state_formula_gb']})", f"out of memory ({row['formula_gb']})"]
            lines.append([*line, "-", "-", "-", "-"])
            continue
        line += [f"{row['state_gb']} ({row['state_formula_gb']})"]
        line += [f"{row['peak_gb']} ({row['formula_gb']})", f"{row['ratio']:.2f}"]
        line += [f"{row['seconds']:.2f}", row["tokens_per_s"], f"{row['share_of_peak_flops']:.0%}"]
        lines.append(line)
    return markdown(f"{titles} | seconds | tokens/s | of the arithmetic", lines)


def run_table(runs: Mapping[str, Sequence[dict[str, Any]]]) -> list[str]:
    """Medians over the steps after the first, and the largest peak of each phase."""
    lines = []
    for name, rows in runs.items():
        later = rows[1:] or rows
        line: list[object] = [name]
        for phase in PHASES:
            peak = max(row.get(f"memory/{phase}_bytes", 0) for row in rows) / 1e9
            seconds = f"{statistics.median(row[f'time/{phase}_s'] for row in later):.1f}"
            line.append(f"{seconds} ({peak:.1f})" if peak else seconds)
        line.append(f"{statistics.median(row['time/step_s'] for row in later):.1f}")
        for key in ("rollout/generated_tokens_per_s", "update/tokens_per_s"):
            line.append(round(statistics.median(row[key] for row in later)))
        lines.append(line)
    titles = "trains | " + " | ".join(f"{phase}, s" for phase in PHASES)
    return markdown(f"{titles} | step, s | sampled/s | trained/s", lines)


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments(__doc__, 3)
    parser.add_argument("--shape", choices=SHAPES, default="3B")
    parser.add_argument("--part", choices=("both", "update", "run"), default="both")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--context", type=int, default=CONTEXT)
    parser.add_argument("--runs", nargs="+", choices=("full", "LoRA"), default=["full", "LoRA"])
    parser.add_argument("--run-steps", type=int, default=3)
    parser.add_argument("words", nargs="*", help="more options for train.py, after --")
    o = parser.parse_args(argv)
    shape, on_gpu = SHAPES[o.shape], torch.cuda.is_available()
    if not on_gpu and o.shape != "tiny":
        raise SystemExit("no GPU that torch can use; --shape tiny does the same on the processor")
    results = Results(o, f"gpu-{o.shape}.json")
    found: dict[str, Any] = {
        "shape": o.shape,
        "words": o.words,
        "update": [],
        "runs": {},
        "card_gib": {},
    }
    if o.part != "run":
        for way in o.ways:
            found["update"].append(measure(way, shape, o.context, o.repeats))
            free()
            print("\n".join(update_table(found["update"][-1:])), flush=True)
            results.write(found)
    if o.part != "update":
        with tempfile.TemporaryDirectory() as folder:
            save_random_model(shape, Path(folder))
            free()
            for name in o.runs:
                lora = ("--lora-rank", f"{LORA_RANK}") if name == "LoRA" else ()
                words = [*lora, *(() if on_gpu else ON_CPU), *o.words]
                rows, most = play(Path(folder), o.run_steps, words)
                found["runs"][name], found["card_gib"][name] = rows, most
                results.write(found)
    print("\n".join(["", *update_table(found["update"]), "", *run_table(found["runs"])]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
