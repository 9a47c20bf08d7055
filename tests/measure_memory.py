"""Measures the bytes of live tensors during an update of a small model on a CPU, to compare them
with the computation in scale/memory.py. Fragmentation and other overhead of an allocator are not
measured; `scale.memory.MARGIN` covers them."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from benchmarks.gpu import SHAPES, one_at_a_time, random_batch, random_policy
from scale import distributed
from scale.memory import Keep, Shape, keep_for_backward
from update import Learner, update_policy

TINY = SHAPES["tiny"]  # the model of that name
STATE = ("weights", "gradients", "moments")


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of live tensors that were created inside it, and their peak."""

    def __init__(self, existing_tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._storages = {t.untyped_storage()._cdata for t in existing_tensors}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, self._count, result)
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self._storages or not num_bytes:
            return
        self._storages.add(key)
        self.live += num_bytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._discard, key, num_bytes)

    def _discard(self, key: int, num_bytes: int) -> None:
        self._storages.discard(key)
        self.live -= num_bytes


def measure(
    shape: Shape,
    tokens: int = 1024,
    lora_rank: int = 0,
    keep: Keep = "all",
) -> dict[str, int]:
    """Bytes of weights, gradients and moments, and of the transient tensors at the peak of an
    update of two micro-batches."""
    torch.manual_seed(0)
    model = random_policy(shape, lora_rank)
    keep_for_backward(model, keep)
    accelerator = distributed.make_accelerator("bf16")
    policy = distributed.shard(accelerator, model)
    trainable = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=1e-6, fused=True)
    learner, batch = Learner(accelerator, policy, optimizer), random_batch(shape, tokens)
    objective = one_at_a_time(tokens)
    update_policy(learner, batch, objective)  # the optimizer creates its moments
    moments = [m for state in optimizer.state.values() for m in state.values() if m.ndim]
    parts = zip(STATE, (list(policy.parameters()), trainable, moments), strict=True)
    sizes = {name: sum(distributed.local_part(t).nbytes for t in ts) for name, ts in parts}
    inputs = [x for x in vars(batch).values() if x is not None]
    with LiveBytes([*policy.parameters(), *policy.buffers(), *moments, *inputs]) as live:
        update_policy(learner, batch, objective)
    return sizes | {"transient": live.peak - sizes["gradients"]}
