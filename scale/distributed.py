"""From one process to many: what is split over ranks, and what every rank holds.

`accelerate launch` (or torchrun) starts the same `train.py` W times; each copy is a *rank*:

    tasks          rank r rolls out every W-th task of the step, with all its samples
    weights        1/W of every parameter, gradient and optimizer moment (FSDP2: DTensors)
    micro-batches  each rank runs forward and backward on its share of a mini-batch

Trajectories are gathered after the rollout, and every rank computes metrics, advantages, the order
of mini-batches and the denominator N from all of them. So g is what one process would get:

    g = Σ_ranks Σ_micro-batches ∇ ℓ / N        FSDP averages over ranks, so losses are times W

Gathering a layer's weights is a *collective*: all ranks must do it, equally often (`rank_passes`),
and an error on one rank must reach the others before they wait for it (`run_on_every_rank`).
Run: torchrun --nproc-per-node 8 train.py --env textcraft. Read next: `update.py`.
Lesson: tutorials/06_from_one_process_to_many.md.
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

TIMEOUT = datetime.timedelta(hours=3)  # one rank may roll out, or warm up a model, alone


def join() -> None:
    """Meet the other ranks, if a launcher started any.

    NOTE: accelerate's "RAM efficient loading", on by default, fills the model with zeros on all
    ranks of a node but one. `shard` cuts what each rank has read, and would cut zeros.
    """
    from accelerate import PartialState

    os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        PartialState(cpu=not torch.cuda.is_available(), timeout=TIMEOUT)


def make_accelerator(mixed_precision: str) -> Any:
    """accelerate's view of this process: its device, its precision, its rank."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    # accelerate allows one precision per process; a second run from Python may want another.
    if AcceleratorState._shared_state and AcceleratorState().mixed_precision != mixed_precision:
        AcceleratorState._reset_state()
    return Accelerator(mixed_precision=mixed_precision, cpu=not torch.cuda.is_available())


def barrier() -> None:
    """Wait until all ranks are here. Collective."""
    if world_size() > 1:
        dist.barrier()


def leave() -> None:
    """Close the connections between ranks.

    NOTE: otherwise gloo's threads abort up to one process in three at its exit. Sharded models lie
    in reference cycles that hold the group, hence the two collections.
    """
    if dist.is_initialized():
        gc.collect()
        dist.destroy_process_group()
        gc.collect()


def world_size() -> int:
    """Number of ranks (W)."""
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:
    """Which one this is, 0 .. W-1. Rank 0 writes the files and prints."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))


def say(line: str) -> None:
    """Print on rank 0."""
    if rank() == 0:
        print(line, flush=True)


# ------------------------------------------------------------------------------- weights in parts


def shard(accelerator: Any, model: Any) -> Any:
    """The model with its parameters cut over the ranks (FSDP2); one process keeps it whole."""
    if world_size() > 1:
        return shard_over_ranks(accelerator, model)
    # NOTE: evaluation mode, or accelerate wraps the model of a launcher's only process.
    return accelerator.prepare_model(model, device_placement=True, evaluation_mode=True)


def shard_over_ranks(accelerator: Any, model: Any) -> Any:
    """`shard` with any number of ranks, one too (benchmarks/gpu.py).

    A layer's parameters are gathered when it runs and dropped after it; the root holds embedding,
    norm and head. In bf16 layers compute in bfloat16 on float32 master weights, and gradients are
    summed in float32. The launcher's `fsdp_reshard_after_forward`, `fsdp_offload_params` and
    `fsdp_activation_checkpointing` apply.
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
    """Drop accelerate's reference to a model that `shard` has prepared."""
    accelerator._models[:] = [kept for kept in accelerator._models if kept is not model]


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A parameter in one piece. Collective if it is sharded."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a parameter."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def clip_grad_norm(parameters: Iterable[torch.nn.Parameter], max_norm: float) -> float:
    """Scale all gradients so that their global norm is at most `max_norm`; the norm before."""
    norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm)
    return float(full_tensor(norm))


# ----------------------------------------------------------------------------------- work in parts


def deal(costs: Sequence[int], ranks: int) -> list[list[int]]:
    """Indices into `costs` for each rank: as many (up to one), with about equal total cost.

    Sorted by cost and dealt out back and forth, so that every rank gets large and small ones:

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
    """This rank's micro-batches as (rows, counts), as many on every rank.

    A rank that got one less repeats the cheapest one, with its loss times 0.
    """
    hands = deal(costs, world_size())
    passes = [(cuts[i], True) for i in hands[rank()]]
    most = max(len(hand) for hand in hands)
    cheapest = min(range(len(costs)), key=lambda i: costs[i])
    return passes + [(cuts[cheapest], False)] * (most - len(passes))


# --------------------------------------------------------------------------- between the ranks


def gather(thing: T) -> list[T]:
    """Every rank's `thing`, in order of rank, on every rank. Collective."""
    if world_size() == 1:
        return [thing]
    things: list[Any] = [None] * world_size()
    dist.all_gather_object(things, thing)
    return things


def sum_over_ranks(tensor: torch.Tensor, device: Any) -> torch.Tensor:
    """Sum of every rank's CPU tensor, on every rank. Collective, and carried out on `device`."""
    if world_size() == 1:
        return tensor
    total = tensor.to(device)
    dist.all_reduce(total)
    return total.to(tensor.device)


def run_on_every_rank(doing: str, work: Callable[[], T]) -> list[T]:
    """Run `work`, which uses no collective, on every rank; all results, in order of rank.

    If one rank was interrupted all raise KeyboardInterrupt; if one failed all raise RankError with
    its message. One process raises what `work` raises.
    """
    if world_size() == 1:
        return [work()]
    result, line, failure = None, "", None
    try:
        result = work()
    except (Exception, KeyboardInterrupt) as error:
        failure, line = error, _line(error)
    reports = gather((line, isinstance(failure, KeyboardInterrupt), result))
    if any(interrupted for _, interrupted, _ in reports):
        raise KeyboardInterrupt from failure
    for number, (line, _, _) in enumerate(reports):
        if line:
            raise RankError(f"rank {number} of {world_size()}, {doing}: {line}") from failure
    return [part for _, _, part in reports]  # type: ignore[misc]


def run_on_rank_0(doing: str, work: Callable[[], T]) -> T:
    """Rank 0 runs `work` while the others wait; its result on every rank.

    Rank 0 raises what `work` raises, the others a RankError.
    """
    if world_size() == 1:
        return work()
    report: list[Any] = ["", None]  # what went wrong, the result
    failure: Exception | None = None
    if rank() == 0:
        try:
            report[1] = work()
        except Exception as error:
            failure, report[0] = error, _line(error)
    dist.broadcast_object_list(report, src=0)
    line, result = report
    if not line:
        return result
    shared = RankError(f"rank 0 of {world_size()}, {doing}: {line}")
    raise (failure or shared) from (failure and shared)  # for `is_known_to_all`


def is_known_to_all(error: BaseException | None) -> bool:
    """Whether all ranks raise `error`, so that rank 0 alone prints it."""
    return isinstance(error, RankError) or (error is not None and is_known_to_all(error.__cause__))


def is_lost_contact(error: BaseException) -> bool:
    """Whether a collective raised this because another rank is gone."""
    names = ("gloo", "nccl", "connection reset by peer", "connection closed by peer", "store")
    return isinstance(error, dist.DistError) or (
        world_size() > 1
        and isinstance(error, RuntimeError)
        and any(name in str(error).lower() for name in names)
    )


def _line(error: BaseException) -> str:
    """An error as one line, with its class."""
    return " ".join(f"{type(error).__name__}: {error}".split())
