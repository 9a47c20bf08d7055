"""What scale/memory.py says of an update, measured: the bytes of live tensors, on a CPU.

    .venv/bin/python tests/measure_memory.py           prints the table, in a few minutes
    .venv/bin/python tests/measure_memory.py --write   and writes it to recipes/results/memory.*

Two small models take a real update. What an allocator adds, fragmentation above all, is in
`scale.memory.MARGIN`.
"""

import json
import subprocess
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch.utils._python_dispatch import TorchDispatchMode  # noqa: E402
from torch.utils._pytree import tree_map_only  # noqa: E402

from benchmarks.gpu import SHAPES, one_at_a_time, random_batch, random_policy  # noqa: E402
from models import HEAD_BYTES  # noqa: E402
from recipes.common import RESULTS, Result, markdown, read_json, write_json  # noqa: E402
from recipes.memory import HEADING  # noqa: E402
from run.files import write_text  # noqa: E402
from scale import distributed  # noqa: E402
from scale.memory import (  # noqa: E402
    Keep,
    Shape,
    keep_for_backward,
    state_bytes,
    transient_bytes,
)
from update import Learner, update_policy  # noqa: E402

SMALL = {
    "tiny": SHAPES["tiny"],  # the model of that name
    "small": Shape("small", 2048, 384, 1536, 8, 6, 2),
}
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
    bfloat16: bool = False,
) -> dict[str, int]:
    """State of this process, and the peak of a real update of two micro-batches if it is alone.

    Args:
        bfloat16: the whole model in it, as FSDP's layers compute, in place of autocast; what is
            kept for the backward pass is then that of several devices.
    """
    torch.manual_seed(0)
    model = random_policy(shape, lora_rank)
    keep_for_backward(model, keep)
    accelerator = distributed.make_accelerator("bf16")
    policy = model.bfloat16() if bfloat16 else distributed.shard(accelerator, model)
    learning = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(learning, lr=1e-6, fused=True)
    learner, batch = Learner(accelerator, policy, optimizer), random_batch(shape, tokens)
    objective = one_at_a_time(tokens)
    update_policy(learner, batch, objective)  # the optimizer makes its moments
    moments = [m for state in optimizer.state.values() for m in state.values() if m.ndim]
    held = zip(STATE, (list(policy.parameters()), learning, moments), strict=True)
    found = {name: sum(distributed.local(t).nbytes for t in tensors) for name, tensors in held}
    if distributed.world_size() == 1:
        inputs = [x for x in vars(batch).values() if x is not None]
        with LiveBytes([*policy.parameters(), *policy.buffers(), *moments, *inputs]) as live:
            update_policy(learner, batch, objective)
        found["transient"] = live.peak - found["gradients"]
    return found


def measure_in_two(shape: Shape, tokens: int, lora_rank: int) -> dict[str, int]:
    """`measure` in two processes: of each part, what the one holds that holds more."""
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file"]
    command += [str(ROOT / "recipes/fsdp2_cpu.yaml"), __file__]
    command += ["--measure", shape.name, str(tokens), str(lora_rank)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    if ended.returncode:
        raise SystemExit(f"measure_memory.py: two processes failed:\n{ended.stderr[-2000:]}")
    held = json.loads(ended.stdout.strip().splitlines()[-1])
    return {name: max(each[name] for each in held) for name in STATE}


def measured_rows(tokens: int = 1024) -> Iterator[Result]:
    """One process with all of an update, two with the state, beside what the formulas say."""
    hows: tuple[Keep | None, ...] = ("all", "products", "inputs", None)
    for shape, rank, how in product(SMALL.values(), (0, 8), hows):
        devices = 2 if how is None else 1
        state = state_bytes(shape, devices, rank)
        expected = {name: state[name] for name in STATE}
        if how is None:
            found = measure_in_two(shape, tokens, rank)
        else:
            found = measure(shape, tokens, rank, how)
            head = HEAD_BYTES["cpu"]
            expected["transient"] = transient_bytes(shape, tokens, 1, rank, how, head)
        yield {
            "model": shape.name,
            "context": tokens,
            "devices": devices,
            "trains": f"LoRA {rank}" if rank else "full",
            "keep": how,
            "measured": found,
            "formula": expected,
        }


def report(rows: Sequence[Result]) -> str:
    """The page's part on what was measured. MB are 10⁶ bytes."""
    lines = []
    for row in rows:
        found, formula = row["measured"], row["formula"]
        names = ("model", "context", "devices", "trains", "keep")
        line = [row[key] or "-" for key in names]
        for part in STATE:
            expected = "" if found[part] == formula[part] else f" ({formula[part] / 1e6:.2f})"
            line.append(f"{found[part] / 1e6:.2f}{expected}")
        if peak := found.get("transient"):
            line.append(f"{peak / 1e6:.1f} ({formula['transient'] / 1e6:.1f})")
            line.append(f"{peak / formula['transient']:.2f}")
        else:
            line += ["not measured", "-"]
        lines.append(line)
    titles = "model | tokens | processes | trains | a layer keeps | weights | gradients | moments"
    table = markdown(f"{titles} | the rest of the peak | measured / formula", lines)
    return f"""# Memory and time of a training step

## Measured on a CPU

MB (10⁶ bytes) of one process; of two, the one that holds more. Weights, gradients and moments agree
with the formulas of `scale/memory.py` to the byte (a number in brackets would be the formula's).
The rest of the peak of an update is activations, logits and copies of weights, in brackets by
formula. What a layer keeps for its backward pass: all, as on a GPU; products and its input, as on a
CPU; its input alone, as with `--gradient-checkpointing`.

{chr(10).join(table)}

"""


def main(argv: list[str]) -> int:
    if argv[:1] == ["--measure"]:  # one of the two processes of `measure_in_two`
        distributed.join()
        name, tokens, rank = argv[1:]
        held = distributed.gather(measure(SMALL[name], int(tokens), int(rank)))
        distributed.say(json.dumps(held))
        distributed.meet()
        distributed.leave()
        return 0
    rows = list(measured_rows())
    text = report(rows)
    print(text)
    if argv == ["--write"]:
        page = RESULTS / "memory.md"
        arithmetic = page.read_text(encoding="utf-8").partition(HEADING)[2]
        write_text(page, text + HEADING + arithmetic)
        saved = read_json(RESULTS / "memory.json")
        write_json(RESULTS / "memory.json", saved | {"measured": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
