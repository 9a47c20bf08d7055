"""Distributed training: split the work over processes, and get the same gradient as with one.

`accelerate launch` (or torchrun) starts the same `train.py` W times. Each process is a *rank*, and
the ranks share the work:

    tasks          each rank rolls out every W-th task of the step, with all samples of the task
    weights        each rank holds 1/W of every parameter, gradient and moment (FSDP2: DTensors)
    micro-batches  each rank runs forward and backward on its share of a mini-batch

Trajectories are gathered after the rollout, so every rank computes the same metrics, advantages,
mini-batches and denominator N. The gradient g is the same as that of a single process:

    g = Σ_ranks Σ_micro-batches ∇ ℓ / N        FSDP averages over ranks, so we multiply ℓ by W

Gathering a layer's weights is a *collective*: every rank must call it the same number of times
(`rank_passes`). If one rank fails, the others must find out before they wait for it
(`run_on_every_rank`).
Run: torchrun --nproc-per-node 8 train.py --env textcraft. Read next: `update.py`.
Lesson: tutorials/06_from_one_process_to_many.md.
"""

from __future__ import annotations

import datetime
import gc
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as shard_module
from torch.distributed.tensor import DTensor, distribute_tensor

from run.errors import RankError, SyncError, TooManyEnvFailures, TrainingError, one_line
from scale.memory import keep_for_backward

T = TypeVar("T")

TIMEOUT = datetime.timedelta(hours=3)  # long enough for one rank to roll out or train a warm start


def join() -> None:
    """Connect to the other ranks if a launcher started several.

    NOTE: accelerate's "RAM efficient loading" is on by default and loads the weights on one rank
    per node; the others get zeros. Our `shard` needs the weights on every rank, so we turn it off.
    """
    from accelerate import PartialState

    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        PartialState(cpu=not torch.cuda.is_available(), timeout=TIMEOUT)


def make_accelerator(mixed_precision: str) -> Any:
    """accelerate's object for this process: device, precision and rank."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    # accelerate allows one precision per process, but a second run from Python may use another.
    if AcceleratorState._shared_state and AcceleratorState().mixed_precision != mixed_precision:
        AcceleratorState._reset_state()
    return Accelerator(mixed_precision=mixed_precision, cpu=not torch.cuda.is_available())


def barrier() -> None:
    """Wait until all ranks have called this. Collective."""
    if world_size() > 1:
        dist.barrier()


def leave() -> None:
    """Close the connections between ranks.

    NOTE: without this, gloo's threads abort up to a third of processes at exit. Sharded models are
    part of reference cycles that keep the process group alive, so we collect garbage twice.
    """
    if dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()
        gc.collect()


def world_size() -> int:
    """Number of ranks (W)."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Number of this rank, 0 .. W-1. Rank 0 writes the files and prints."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))


def say(line: str) -> None:
    """Print on rank 0."""
    if rank() == 0:
        print(line, flush=True)


# -------------------------------------------------------------------------------- sharded weights


def shard(accelerator: Any, model: Any) -> Any:
    """Shard the parameters of the model over the ranks (FSDP2); with one rank, do not shard."""
    if world_size() > 1:
        return shard_over_ranks(accelerator, model)
    # NOTE: without evaluation_mode, accelerate would wrap the model if a launcher starts one rank.
    return accelerator.prepare_model(model, device_placement=True, evaluation_mode=True)


def shard_over_ranks(accelerator: Any, model: Any) -> Any:
    """Shard over any number of ranks, even one (benchmarks/gpu.py).

    The parameters of a layer are gathered before it runs and dropped afterwards; the root holds
    embedding, norm and head. In bf16, layers compute in bfloat16 with float32 master weights, and
    gradients are summed in float32. The launcher's options `fsdp_reshard_after_forward`,
    `fsdp_offload_params` and `fsdp_activation_checkpointing` apply.
    """
    from accelerate.utils import FullyShardedDataParallelPlugin

    options = FullyShardedDataParallelPlugin(fsdp_version=2)
    if options.activation_checkpointing:
        keep_for_backward(model, "inputs")
    device = accelerator.device
    settings: dict[str, Any] = {
        "mesh": dist.device_mesh.init_device_mesh(device.type, (world_size(),))
    }
    if accelerator.mixed_precision == "bf16":
        settings["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
    if device.type != "cpu":
        settings["offload_policy"] = options.cpu_offload
    names = set(getattr(model, "lm", getattr(model, "backbone", model))._no_split_modules)
    for module in list(model.modules()):
        if type(module).__name__ in names:
            shard_module(module, reshard_after_forward=options.reshard_after_forward, **settings)
    return shard_module(model, **settings)


def forget(accelerator: Any, model: Any) -> None:
    """Drop accelerate's reference to a model that `shard` prepared, to free its memory."""
    accelerator._models[:] = [other for other in accelerator._models if other is not model]


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor of a parameter. Collective if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """A full tensor, the same on every rank, sharded like `other` if that is sharded."""
    if not isinstance(other, DTensor):
        return tensor
    return distribute_tensor(tensor, other.device_mesh, other.placements, src_data_rank=None)


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# ------------------------------------------------------------------------------------- split work


def deal(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Distribute items over ranks: equal numbers (± 1) with about equal total costs.

    Items are sorted by cost and dealt out back and forth, so each rank gets cheap and costly ones.
    The result holds indices into `costs`:

    >>> deal([10, 80, 50, 60], ranks=2)
    [[1, 0], [3, 2]]
    """
    hands: list[list[int]] = [[] for _ in range(ranks)]
    by_cost = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    for n, item in enumerate(by_cost):
        turn, seat = divmod(n, ranks)
        hands[seat if turn % 2 == 0 else ranks - 1 - seat].append(item)
    return hands


def rank_passes(cuts: Sequence[T], costs: Sequence[int]) -> list[tuple[T, bool]]:
    """This rank's micro-batches as (rows, counts); every rank gets the same number.

    A rank with one micro-batch fewer repeats the cheapest one with `counts` False, which tells the
    caller to multiply its loss by 0.
    """
    hands = deal(costs, world_size())
    passes = [(cuts[i], True) for i in hands[rank()]]
    num_passes = max(len(hand) for hand in hands)
    cheapest = min(range(len(costs)), key=lambda i: costs[i])
    return passes + [(cuts[cheapest], False)] * (num_passes - len(passes))


# --------------------------------------------------------------------- communication between ranks


def gather(item: T) -> list[T]:
    """Every rank's `item`, in order of rank, on every rank. Collective."""
    if world_size() == 1:
        return [item]
    items: list[Any] = [None] * world_size()
    dist.all_gather_object(items, item)
    return items


def sum_over_ranks(tensor: torch.Tensor, device: Any) -> torch.Tensor:
    """Sum of every rank's CPU tensor, on every rank, computed on `device`. Collective."""
    if world_size() == 1:
        return tensor
    total = tensor.to(device)
    dist.all_reduce(total)
    return total.to(tensor.device)


def run_on_every_rank(activity: str, work: Callable[[], T]) -> list[T]:
    """Run `work` on every rank and return all results, in order of rank.

    `work` must not use collectives. If a rank is interrupted, every rank raises KeyboardInterrupt.
    If a rank fails, every rank raises RankError with its message. With one rank, errors are raised
    unchanged.
    """
    if world_size() == 1:
        return [work()]
    result, line, failure = None, "", None
    try:
        result = work()
    except (Exception, KeyboardInterrupt) as error:
        failure, line = error, one_line(error)
    reports = gather((line, isinstance(failure, KeyboardInterrupt), result))
    if any(is_interrupted for _, is_interrupted, _ in reports):
        raise KeyboardInterrupt from failure
    for number, (line, _, _) in enumerate(reports):
        if line:
            raise RankError(f"rank {number} of {world_size()}, {activity}: {line}") from failure
    return [part for _, _, part in reports]  # type: ignore[misc]


def run_on_rank_0(activity: str, work: Callable[[], T]) -> T:
    """Run `work` on rank 0 while the others wait, and return its result on every rank.

    If `work` fails, rank 0 raises its error and the others raise a RankError.
    """
    if world_size() == 1:
        return work()
    report: list[Any] = ["", None]  # error message, result
    failure: Exception | None = None
    if rank() == 0:
        try:
            report[1] = work()
        except Exception as error:
            failure, report[0] = error, one_line(error)
    dist.broadcast_object_list(report, src=0)
    line, result = report
    if not line:
        return result
    shared = RankError(f"rank 0 of {world_size()}, {activity}: {line}")
    raise (failure or shared) from (failure and shared)  # for `is_known_to_all`


def is_known_to_all(error: BaseException | None) -> bool:
    """True if all ranks raise `error`: they can still use collectives, and only rank 0 has to print
    it. Apart from RankError, the errors named here follow from numbers gathered from all ranks."""
    shared = RankError | KeyboardInterrupt | TooManyEnvFailures | SyncError | TrainingError
    is_shared = world_size() == 1 or isinstance(error, shared)
    return is_shared or (error is not None and is_known_to_all(error.__cause__))


def is_lost_contact(error: RuntimeError) -> bool:
    """True if a collective raised this error because another rank is gone."""
    names = ("gloo", "nccl", "connection reset by peer", "connection closed by peer", "store")
    is_named = any(name in str(error).lower() for name in names)
    return isinstance(error, dist.DistError) or (world_size() > 1 and is_named)
