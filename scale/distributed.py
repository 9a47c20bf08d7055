"""From one process to many: what is split over them, what is summed, and what all must know.

`accelerate launch` (or torchrun) starts the same `train.py` W times; every copy is a *rank*. Ranks
differ in three things only:

    tasks          rank r rolls out every W-th task of the step with an engine and environment
                   sessions of its own; all samples of a task stay on one rank
    weights        each rank holds 1/W of every parameter, gradient and optimizer moment (FSDP2:
                   a parameter is a DTensor, cut along its first dimension)
    micro-batches  each rank runs forward and backward on its share of a mini-batch

Everything else is the same everywhere, because trajectories are gathered once, right after the
rollout, and what follows is computed on all of them by every rank: metrics, advantages (group
means, whitening), the order of mini-batches, the denominator N. Token lists are small beside
weights, and nothing that is computed twice can differ between ranks:

    rollout on r ──gather──> all trajectories ──> advantages ──> micro-batches, dealt out
                                                                   │
                    g = Σ_ranks Σ_own micro-batches ∇ ℓ / N  <─────┘    reduce-scatter: each rank
                                                                        receives its part of the sum

FSDP averages gradients over ranks, so losses are multiplied by W: with one denominator for all, the
result is the sum that one process would have got. Averaging per-rank means instead, as most
trainers do, gives a token on a rank with few of them more weight.

Gathering a layer's weights is a *collective*: all ranks must do it, the same number of times. A
rank with less work therefore repeats a small micro-batch with its loss times 0 (`own_passes`). And
where ranks work apart, an error on one must reach the others before they wait for it in a
collective: `apart` runs a function on every rank and gathers results and errors together.

Run:   accelerate launch --config_file recipes/fsdp2_cpu.yaml train.py --env textcraft --model tiny
       torchrun --nproc-per-node 8 train.py --env textcraft
Read next: `update.py`. Lesson: tutorials/06_from_one_process_to_many.md.
"""

from __future__ import annotations

import datetime
import gc
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as shard_module
from torch.distributed.tensor import DTensor

from run.errors import RankError
from scale.memory import keep_for_backward

T = TypeVar("T")

# The longest that ranks may wait for each other: one may roll out, or warm up a model, alone.
TIMEOUT = datetime.timedelta(hours=3)


def join() -> None:
    """Meet the other ranks, if a launcher started any.

    NOTE: accelerate's launcher asks by default for "RAM efficient loading": transformers then fills
    the model with zeros on all ranks of a node but one, for accelerate to broadcast the weights
    later. `shard` cuts the weights that each rank has read, and would cut zeros, without an error.
    """
    from accelerate import PartialState

    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        PartialState(cpu=not torch.cuda.is_available(), timeout=TIMEOUT)


def make_accelerator(mixed_precision: str) -> Any:
    """accelerate's view of this process: its device, its precision, its rank."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    # A process has one precision, for accelerate; a second run from Python may want another.
    if AcceleratorState._shared_state and AcceleratorState().mixed_precision != mixed_precision:
        AcceleratorState._reset_state()
    return Accelerator(mixed_precision=mixed_precision, cpu=not torch.cuda.is_available())


def meet() -> None:
    """Wait until all ranks are here. Collective."""
    if world_size() > 1:
        dist.barrier()


def leave() -> None:
    """Close the connections between ranks.

    NOTE: with gloo's threads alive at interpreter exit, up to one process in three aborts after its
    work is done ("terminate called without an active exception"). Sharded models are part of
    reference cycles that hold the group, hence the two collections.
    """
    if dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()
        gc.collect()


def world_size() -> int:
    """Number of ranks (W)."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Which one this is, 0 .. W-1. Rank 0 writes the files and speaks."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))


def say(line: str) -> None:
    """Print on rank 0."""
    if rank() == 0:
        print(line, flush=True)


# ------------------------------------------------------------------------------- weights in parts


def shard(accelerator: Any, model: Any) -> Any:
    """The model with its parameters cut over the ranks (FSDP2); one process keeps it whole.

    A layer's parameters are gathered when it runs and dropped after it, layer by layer; what
    belongs to no layer (embedding, norm, head) forms the root. In bf16 layers compute in bfloat16
    on float32 master weights, and gradients are summed in float32.

    Options of accelerate's FSDP config are read from the launcher's environment:
    `fsdp_reshard_after_forward`, `fsdp_offload_params`, `fsdp_activation_checkpointing`.
    """
    if world_size() == 1:
        # NOTE: a launcher's only process is "distributed" for accelerate, which would wrap the
        # model for gradients to be averaged, and hide its attributes. Evaluation mode does not.
        return accelerator.prepare_model(model, device_placement=True, evaluation_mode=True)
    return shard_over_ranks(accelerator, model)


def shard_over_ranks(accelerator: Any, model: Any) -> Any:
    """`shard` with however many ranks the group has, one too (benchmarks/gpu.py)."""
    from accelerate.utils import FullyShardedDataParallelPlugin

    options = FullyShardedDataParallelPlugin(fsdp_version=2)
    if options.activation_checkpointing:
        keep_for_backward(model, "inputs")
    device = accelerator.device
    mesh = dist.device_mesh.init_device_mesh(device.type, (world_size(),))
    if accelerator.mixed_precision == "bf16":
        precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    else:
        precision = MixedPrecisionPolicy()
    settings: dict[str, Any] = dict(mesh=mesh, mp_policy=precision)
    if device.type != "cpu":
        settings["offload_policy"] = options.cpu_offload
    names = set(getattr(model, "lm", getattr(model, "backbone", model))._no_split_modules)
    for module in list(model.modules()):
        if type(module).__name__ in names:
            shard_module(module, reshard_after_forward=options.reshard_after_forward, **settings)
    return shard_module(model, **settings)


def forget(accelerator: Any, model: Any) -> None:
    """Let go of a model that `shard` has seen: accelerate keeps what it has prepared."""
    accelerator._models[:] = [kept for kept in accelerator._models if kept is not model]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A parameter in one piece on this device. Collective when it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def clip_grad_norm(parameters: Iterable[torch.nn.Parameter], max_norm: float) -> float:
    """Scale all gradients so that their global norm is at most `max_norm`; the norm before."""
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    return float(whole(norm))


# ----------------------------------------------------------------------------------- work in parts


def deal(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Items for each rank: equally many (up to one), with about equal total cost.

    Sorted by cost and dealt out back and forth, so that every rank gets large and small ones:

    >>> deal([10, 80, 50, 60], ranks=2)
    [[1, 0], [3, 2]]

    Returns:
        `ranks` lists of indices into `costs`, each with its costliest first.
    """
    hands: list[list[int]] = [[] for _ in range(ranks)]
    by_cost = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    for n, item in enumerate(by_cost):
        turn, seat = divmod(n, ranks)
        hands[seat if turn % 2 == 0 else ranks - 1 - seat].append(item)
    return hands


def own_passes(cuts: Sequence[T], costs: Sequence[int]) -> list[tuple[T, bool]]:
    """This rank's micro-batches as (rows, counts): as many on every rank.

    A rank that got one less repeats the cheapest one, and its loss must not count.
    """
    hands = deal(costs, world_size())
    passes = [(cuts[i], True) for i in hands[rank()]]
    most = max(len(hand) for hand in hands)
    cheapest = min(range(len(costs)), key=lambda i: costs[i])
    return passes + [(cuts[cheapest], False)] * (most - len(passes))


# ------------------------------------------------------------------------- what all ranks must know


def gather(thing: T) -> list[T]:
    """Every rank's `thing`, in order of rank, on every rank. Collective."""
    if world_size() == 1:
        return [thing]
    things: list[Any] = [None] * world_size()
    dist.all_gather_object(things, thing)
    return things


def summed(tensor: torch.Tensor, device: Any) -> torch.Tensor:
    """Sum of every rank's CPU tensor, on every rank. Collective, and carried out on `device`."""
    if world_size() == 1:
        return tensor
    total = tensor.to(device)
    dist.all_reduce(total)
    return total.to(tensor.device)


def apart(doing: str, work: Callable[[], T]) -> list[T]:
    """Run `work`, which uses no collective, on every rank; the results of all, in order of rank.

    This is where ranks meet again: if one was interrupted all raise KeyboardInterrupt, and if one
    failed all raise RankError with its message. One process raises what `work` raises.
    """
    if world_size() == 1:
        return [work()]
    result: T | None = None
    failure: BaseException | None = None
    try:
        result = work()
    except (Exception, KeyboardInterrupt) as error:
        failure = error
    reports = gather((None if failure is None else _line(failure), result))
    lines = [line for line, _ in reports if line is not None]
    if INTERRUPTED in lines:
        raise KeyboardInterrupt from failure
    for number, (line, _) in enumerate(reports):
        if line is not None:
            message = f"rank {number} of {world_size()}, {doing}: {line}"
            raise RankError(message) from failure
    return [part for _, part in reports]  # type: ignore[misc]


def first(doing: str, work: Callable[[], T]) -> T:
    """Rank 0 runs `work` while the others wait; its result on every rank.

    Rank 0 raises what `work` raises, the others a RankError.
    """
    if world_size() == 1:
        return work()
    report: list[Any] = [None, None]
    failure: BaseException | None = None
    if rank() == 0:
        try:
            report[1] = work()
        except Exception as error:
            failure, report[0] = error, _line(error)
    dist.broadcast_object_list(report, src=0)
    if report[0] is None:
        return report[1]
    known = RankError(f"rank 0 of {world_size()}, {doing}: {report[0]}")
    if failure is not None:
        raise failure from known  # so that rank 0 knows that the others do (is_known_to_all)
    raise known


def is_known_to_all(error: BaseException | None) -> bool:
    """Do all ranks raise `error`, so that rank 0 alone need say it?"""
    return isinstance(error, RankError) or (error is not None and is_known_to_all(error.__cause__))


def is_lost_contact(error: BaseException) -> bool:
    """Is this what a collective raises when another rank is gone?"""
    names = ("gloo", "nccl", "connection reset by peer", "connection closed by peer", "store")
    return isinstance(error, dist.DistError) or (
        world_size() > 1
        and isinstance(error, RuntimeError)
        and any(name in str(error).lower() for name in names)
    )


INTERRUPTED = "KeyboardInterrupt"


def _line(error: BaseException) -> str:
    """An error as one line, with its class where the message alone would not say what it is."""
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    return " ".join(f"{type(error).__name__}: {error}".split())
