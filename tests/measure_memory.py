"""The bytes of live tensors in an update of a small model, on a CPU: what scale/memory.py computes,
measured. What an allocator adds, fragmentation above all, is in `scale.memory.MARGIN`."""

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
    """Counts the bytes of tensors that are born inside it and not yet gone; keeps the maximum."""

    def __init__(self, known: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen = {t.untyped_storage()._cdata for t in known}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        tree_map_only(torch.Tensor, self._see, result)
        return result

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, num_bytes = storage._cdata, storage.nbytes()
        if key in self._seen or not num_bytes:
            return
        self._seen.add(key)
        self.live += num_bytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._gone, key, num_bytes)

    def _gone(self, key: int, num_bytes: int) -> None:
        self._seen.discard(key)
        self.live -= num_bytes


def measure(
    shape: Shape,
    tokens: int = 1024,
    lora_rank: int = 0,
    keep: Keep = "all",
) -> dict[str, int]:
    """Bytes of the state, and of the rest of the peak of an update of two micro-batches."""
    torch.manual_seed(0)
    model = random_policy(shape, lora_rank)
    keep_for_backward(model, keep)
    accelerator = distributed.make_accelerator("bf16")
    policy = distributed.shard(accelerator, model)
    learning = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=1e-6, fused=True)
    learner, batch = Learner(accelerator, policy, optimizer), random_batch(shape, tokens)
    objective = one_at_a_time(tokens)
    update_policy(learner, batch, objective)  # the optimizer makes its moments
    moments = [m for state in optimizer.state.values() for m in state.values() if m.ndim]
    held = zip(STATE, (list(policy.parameters()), learning, moments), strict=True)
    found = {name: sum(distributed.local_part(t).nbytes for t in tensors) for name, tensors in held}
    inputs = [x for x in vars(batch).values() if x is not None]
    with LiveBytes([*policy.parameters(), *policy.buffers(), *moments, *inputs]) as live:
        update_policy(learner, batch, objective)
    return found | {"transient": live.peak - found["gradients"]}
