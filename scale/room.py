"""Is there room for a run? Its bytes by the formulas, against what the machine has.

    a GPU     the trainer's state and one update; beside the state the sampler, which leaves the
              card during the update
    a CPU     all of it in one process, its libraries, and what a heap loses between buffers

The formulas are close and no more, so a run is refused only where it clearly cannot fit, and one
that may not is told so in a line. Cheap to ask: no model is loaded for it.

Read next: `run/clock.py`, the peaks that were reached.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from config import Config, Misuse, RunConfig, flag, has_gpu
from runtime.find_model import model_config
from runtime.malloc import has_tcmalloc
from scale.memory import (
    GIB,
    GPU_HEAD_BYTES,
    MARGIN,
    SAMPLER_SHARE,
    SEQUENCES,
    Keep,
    Shape,
    cache_bytes,
    cpu_cache_bytes,
    shape_of,
    state_bytes,
    transient_bytes,
)

CPU_HEAD_BYTES = 24 << 20  # models.HEAD_BYTES
# Of a CPU process, beside what the formulas count: Python, torch and vLLM; vLLM's keys and values.
PROGRAMS = 1.5 * GIB
# What a heap loses between buffers, with the C library's malloc and tcmalloc: over fifteen steps
# the laptop's run peaked at 9.1 GB where the parts are 5.6 (benchmarks/default_run.py).
CPU_MARGIN, TCMALLOC_MARGIN = 1.6, 1.25
CONTEXT, LEAST_SHARE = 0.05, 0.1  # of a card: CUDA's own and graphs; vLLM's, whatever is left
CLEARLY = 1.25  # so many times the memory are refused; less is a warning


class Room(NamedTuple):
    """Bytes of the machine, or of its first card; of `free`, other processes may take."""

    total: float
    free: float
    what: str  # "this machine", "the GPU"
    is_gpu: bool


class Need(NamedTuple):
    """Bytes that a run takes there: from step to step, and at most."""

    state: float
    peak: float
    held: float  # of `state` while the agent plays: all but gradients


def check_room(config: RunConfig, room: Room | None = None) -> str | None:
    """A warning if the run may not fit; None if it will, or if nobody knows.

    Raises:
        Misuse: it clearly does not; the line names what to lower.
    """
    shape = shape_of(config.model, model_config(config.model) or {})
    room = room or room_here()
    if shape is None or room is None:
        return None
    need = needed(config, shape, room.is_gpu)
    if room.is_gpu:  # an H200 held 81 GB where the parts are 76
        need = need._replace(peak=need.peak + CONTEXT * room.total)
    said = (
        f"{config.model} with these options needs about {need.peak / 1e9:.3g} GB "
        f"({need.state / 1e9:.3g} GB of it weights and optimizer)"
    )
    if max(need.state, need.peak / CLEARLY) > room.total:
        have = f"{room.what} has {room.total / 1e9:.3g} GB"
        raise Misuse(f"out of memory before it begins: {said}, {have}; {advice(config, room)}")
    if need.peak > room.free:
        have = f"{room.what} has {room.free / 1e9:.3g} GB free of {room.total / 1e9:.3g}"
        return f"memory may not suffice: {said}, {have}; if it does not, {advice(config, room)}"
    return None


def needed(config: RunConfig, shape: Shape, is_gpu: bool) -> Need:
    """The bytes of a run, on each card or on the machine.

    Args:
        shape: of the policy, and of PPO's critic.
    """
    c, world = config, int(os.environ.get("WORLD_SIZE", 1))
    rank = c.lora_rank
    parts = state_bytes(shape, world, rank)
    rl = c if isinstance(c, Config) else None
    if not (rl and (rl.kl_coef or rl.kl_loss_coef)):
        parts["reference"] = 0
    state = sum(parts.values())
    gradients = parts["gradients"] * (2 if rl and rl.needs_critic else 1)
    if rl and rl.needs_critic:
        state += sum(parts[name] for name in ("weights", "gradients", "moments"))
    in_step = c.trajectories_per_step * c.max_trajectory_tokens
    at_once = c.max_trajectory_tokens * (2 if c.method == "dpo" else 1)  # no pair is parted
    tokens = min(max(c.max_tokens_per_micro_batch, at_once), in_step)
    head = GPU_HEAD_BYTES if is_gpu else CPU_HEAD_BYTES
    keep: Keep = "inputs" if c.gradient_checkpointing else "all" if is_gpu else "products"
    update = transient_bytes(shape, tokens, world, rank, keep, head)
    sequence = cache_bytes(shape, c.max_trajectory_tokens)
    sampler = 0.0 if c.engine_url or c.engine_devices else 2 * shape.parameters + sequence
    if is_gpu:
        beside = (MARGIN * state + sampler) if sampler else 0.0
        stays = 2 * shape.parameters if c.engine == "transformers" else 0  # it never sleeps
        peak = max(beside, sampler / SAMPLER_SHARE, MARGIN * (state + update) + stays)
        return Need(state, peak, state - gradients)
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    own = 0.0
    if sampler and c.engine == "vllm":  # float32 unless it was asked not to be
        dtype = "bfloat16" if c.precision == "bf16" else "float32"
        own = cpu_cache_bytes(shape, c.max_trajectory_tokens, SEQUENCES, dtype)
    return Need(
        state * processes,
        heap_margin() * processes * (state + update + sampler + own + PROGRAMS),
        (state - gradients) * processes,
    )


def sampler_share(config: RunConfig, room: Room | None = None) -> float:
    """Of a card, what vLLM may take beside the trainer: half of it, or what weights, moments and
    reference leave, since it takes its memory back after each update while they are there. It is
    also there when the trainer scores what was sampled after a sync (`sync.compare`), for which
    autocast, or FSDP of what belongs to no layer, makes copies in bfloat16."""
    shape = shape_of(config.model, model_config(config.model) or {})
    room = room or room_here()
    if shape is None or room is None or not room.is_gpu:
        return SAMPLER_SHARE
    held = MARGIN * needed(config, shape, is_gpu=True).held
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        held += 2 * 2 * shape.root_parameters  # of policy and reference
    elif not config.lora_rank:
        held += 2 * shape.parameters
    return max(min(SAMPLER_SHARE, 1 - held / room.total - CONTEXT), LEAST_SHARE)


def advice(config: RunConfig, room: Room) -> str:
    """The first of some smaller settings that fits, or that none does."""
    shape = shape_of(config.model, model_config(config.model) or {})
    for smaller, words in _smaller(config):
        if shape and needed(smaller, shape, room.is_gpu).peak <= room.total:
            return f"try {words}"
    return "take a smaller --model" + (", or more cards" if room.is_gpu else "")


def _smaller(config: RunConfig) -> Iterator[tuple[RunConfig, str]]:
    """Cheaper settings with the words that ask for them, the least costly first."""
    tokens = max(config.max_trajectory_tokens, 1024)
    fewer, checkpointing, lora = "max_tokens_per_micro_batch", "gradient_checkpointing", "lora_rank"
    smaller: dict[str, Any] = {}
    smaller |= {fewer: tokens} if config.max_tokens_per_micro_batch > tokens else {}
    smaller |= {} if config.gradient_checkpointing else {checkpointing: True}
    smaller |= {} if config.lora_rank else {lora: 16}
    for names in ([fewer], [checkpointing], [fewer, checkpointing], [lora, fewer, checkpointing]):
        changes = {name: smaller[name] for name in names if name in smaller}
        words = [flag(name) if v is True else f"{flag(name)} {v}" for name, v in changes.items()]
        if words:
            yield replace(config, **changes), " ".join(words)


# ----------------------------------------------------------------------------------- the machine


def heap_margin() -> float:
    """Of the malloc that this process runs with: what it takes over what it is asked for."""
    return TCMALLOC_MARGIN if has_tcmalloc() else CPU_MARGIN


def room_here() -> Room | None:
    """Of this process's GPU if torch can use one, else of the machine; None where nothing tells."""
    if has_gpu():
        import torch  # a run on this card is about to begin: it needs it anyway

        if torch.cuda.is_available():  # not where the driver is broken, or too old
            free, total = torch.cuda.mem_get_info(int(os.environ.get("LOCAL_RANK", 0)))
            return Room(total, free, "the GPU", is_gpu=True)
    return cpu_room()


def cpu_room(root: Path = Path("/")) -> Room | None:
    """Memory of the machine, or of the control group of this process where that is less."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        sizes = {name: int(rest.split()[0]) * 1024 for name, rest in (s.split(":") for s in lines)}
        total, free = sizes["MemTotal"], sizes["MemAvailable"]
    except (OSError, ValueError, KeyError, IndexError):
        return None
    what = "this machine"
    for limit, used in _limits(root):
        if limit < total:
            total, free, what = limit, min(free, limit - used), "this container"
    return Room(total, max(free, 0), what, is_gpu=False)


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, used) in bytes of each control group that holds this process and has a limit."""
    groups = root / "sys/fs/cgroup"
    try:
        names = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        names = []
    own = next((line.split(":", 2)[2].strip("/") for line in names if ":memory:" in line), None)
    own = own or next((line[3:].strip("/") for line in names if line.startswith("0::")), "")
    folders = [groups, groups / "memory"]
    for part in Path(own).parts:
        folders += [folders[-2] / part, folders[-1] / part]
    for folder in folders:
        for limit, used in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            try:
                yield int((folder / limit).read_text()), int((folder / used).read_text())
            except (OSError, ValueError):  # no such group, or "max"
                continue
