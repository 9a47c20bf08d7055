"""The number format of a run: bf16 or fp32, measured once per machine.

    bf16    float32 master weights, products under autocast; the sampler's weights in bfloat16
    fp32    everything in float32

bfloat16 is far faster on hardware that multiplies matrices in it (a GPU, AMX). Elsewhere numbers
are converted back and forth, and it may be slower. CPU flags do not tell which, so `auto` times a
small model in both formats and remembers the result. Weights, gradients, moments and checkpoints
are float32 either way: a run may be resumed in the other format. Read next: `models.py`.
"""

from __future__ import annotations

import json
import re
import time
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

import torch

from run.files import cache_dir, write_json
from scale.default_models import SHAPES

Format = Literal["bf16", "fp32"]
FORMATS: tuple[Format, ...] = ("bf16", "fp32")
# What is timed: two layers of SmolLM2-135M, a micro-batch and its policy tokens.
SHAPE = SHAPES["smollm2-135m"] | {"num_hidden_layers": 2, "vocab_size": 8192}
ROWS, TOKENS, ACTION = 2, 256, 64
REPEATS = 3


class Precision(NamedTuple):
    """A format, and why it was chosen."""

    format: Format
    why: str

    @property
    def dtype(self) -> str:
        """Of the sampler's weights, as torch and vLLM call it."""
        return "bfloat16" if self.format == "bf16" else "float32"

    @property
    def autocast(self) -> str:
        """accelerate's name for it."""
        return "bf16" if self.format == "bf16" else "no"


def choose(asked: Literal["auto", "bf16", "fp32"], deterministic: bool = False) -> Precision:
    """The format that `--precision asked` means on this machine; measures at most once."""
    if deterministic:
        return Precision("fp32", "--deterministic")
    if asked != "auto":
        return Precision(asked, f"--precision {asked}")
    if torch.cuda.is_available():
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return Precision("bf16", "on a GPU")
        return Precision("fp32", "this GPU has no bfloat16")  # a T4; vLLM would refuse it too
    seconds = _measured()
    faster, slower = sorted(FORMATS, key=seconds.__getitem__)
    ratio = seconds[slower] / seconds[faster]
    return Precision(faster, f"measured here: {ratio:.1f} times as fast as {slower}")


def _measured() -> dict[Format, float]:
    """Seconds of a small model's pass in each format on this processor, from the cache if known."""
    file = cache_dir() / "precision.json"
    known = {}
    with suppress(OSError, ValueError):  # no file, or a damaged one
        known = json.loads(file.read_text(encoding="utf-8"))
    key = f"{_processor()}, one thread, torch {torch.__version__}"
    if key not in known:
        known[key] = time_formats()
        write_json(file, known)
    return known[key]


def _processor() -> str:
    """Model name and the flags that matter: a virtual machine may hide some."""
    facts = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0]  # of one core
    return " ".join(re.findall(r"(?<=model name\t: ).*|amx_\w+|avx512_bf16", facts))


def time_formats() -> dict[Format, float]:
    """Processor seconds of a forward and backward pass per format, the best of some repeats.

    On one thread and in processor time: beside other processes, two threads wait for each other,
    and the slower format may win. A model, not a product: norms, conversions and attention count.
    """
    from transformers import LlamaConfig, LlamaModel

    with torch.random.fork_rng(devices=[]):  # the run's random numbers must not move
        lm = LlamaModel(LlamaConfig(**SHAPE))
        head = torch.nn.Linear(SHAPE["hidden_size"], SHAPE["vocab_size"], bias=False)
        tokens = torch.randint(SHAPE["vocab_size"], (ROWS, TOKENS))

    def seconds(name: Format) -> float:
        began = time.process_time()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=name == "bf16"):
            states = lm(input_ids=tokens, use_cache=False).last_hidden_state[:, -ACTION:]
            loss = head(states).float().logsumexp(-1).mean()
        loss.backward()
        return time.process_time() - began

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        times = [{name: seconds(name) for name in FORMATS} for _ in range(REPEATS + 1)][1:]
    finally:
        torch.set_num_threads(threads)
    return {name: min(t[name] for t in times) for name in FORMATS}
