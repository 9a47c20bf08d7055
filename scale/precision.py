"""Precision: a run computes in bf16 or fp32; `auto` measures once which is faster here.

    bf16    master weights in float32; matrix products and the sampler's weights in bfloat16
    fp32    everything in float32

bfloat16 is much faster on hardware that multiplies matrices in this format (a GPU, AMX). Other
processors convert numbers back and forth, which can be slower than float32. CPU flags do not show
which case applies, so `auto` times a small model in both formats and stores the result. Weights,
gradients, moments and checkpoints are float32 in both cases, so a run can be resumed in the other
format. Read next: `models.py`.
"""

from __future__ import annotations

import json
import platform
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
# The timed model and batch: two layers of SmolLM2-135M, a micro-batch and its policy tokens.
SHAPE = SHAPES["smollm2-135m"] | {"num_hidden_layers": 2, "vocab_size": 8192}
ROWS, TOKENS, ACTION = 2, 256, 64
REPEATS = 3


class Precision(NamedTuple):
    """A format and the reason for choosing it."""

    format: Format
    reason: str

    @property
    def dtype(self) -> str:
        """Type of the sampler's weights, as named by torch and vLLM."""
        return "bfloat16" if self.format == "bf16" else "float32"

    @property
    def autocast(self) -> str:
        """The format's name in accelerate."""
        return "bf16" if self.format == "bf16" else "no"


def choose(option: Literal["auto", "bf16", "fp32"], deterministic: bool = False) -> Precision:
    """The format for `--precision option` on this machine. Measures at most once per machine."""
    if deterministic:
        return Precision("fp32", "--deterministic")
    if option != "auto":
        return Precision(option, f"--precision {option}")
    if torch.cuda.is_available():
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return Precision("bf16", "on a GPU")
        return Precision("fp32", "this GPU has no bfloat16")  # e.g. a T4; vLLM would also refuse
    seconds = _cached_times()
    faster, slower = sorted(FORMATS, key=seconds.__getitem__)
    ratio = seconds[slower] / seconds[faster]
    return Precision(faster, f"measured here: {ratio:.1f} times as fast as {slower}")


def _cached_times() -> dict[Format, float]:
    """`time_formats` on this processor, from the cache if it was measured before."""
    file = cache_dir() / "precision.json"
    times = {}
    with suppress(OSError, ValueError):  # no file, or a damaged one
        times = json.loads(file.read_text(encoding="utf-8"))
    key = f"{_processor()}, one thread, torch {torch.__version__}"
    if key not in times:
        times[key] = time_formats()
        write_json(file, times)
    return times[key]


def _processor() -> str:
    """The processor's name and its bfloat16 flags, which a virtual machine can hide."""
    file = Path("/proc/cpuinfo")
    if not file.exists():  # not Linux
        return platform.processor()
    core = file.read_text(encoding="utf-8").split("\n\n")[0]
    return " ".join(re.findall(r"(?<=model name\t: ).*|amx_\w+|avx512_bf16", core))


def time_formats() -> dict[Format, float]:
    """CPU seconds of a forward and backward pass in each format, the best of a few repeats.

    We measure CPU time on one thread: on a busy machine, several threads would wait for each other,
    and the slower format could win. We time a model instead of one matrix product, because norms,
    conversions and attention also take time.
    """
    from transformers import LlamaConfig, LlamaModel

    with torch.random.fork_rng(devices=[]):  # leave the run's random numbers unchanged
        lm = LlamaModel(LlamaConfig(**SHAPE))
        head = torch.nn.Linear(SHAPE["hidden_size"], SHAPE["vocab_size"], bias=False)
        tokens = torch.randint(SHAPE["vocab_size"], (ROWS, TOKENS))

    def seconds(name: Format) -> float:
        start = time.process_time()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=name == "bf16"):
            states = lm(input_ids=tokens, use_cache=False).last_hidden_state[:, -ACTION:]
            loss = head(states).float().logsumexp(-1).mean()
        loss.backward()
        return time.process_time() - start

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        times = [{name: seconds(name) for name in FORMATS} for _ in range(REPEATS + 1)][1:]
    finally:
        torch.set_num_threads(threads)
    return {name: min(t[name] for t in times) for name in FORMATS}
