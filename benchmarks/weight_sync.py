"""Weight sync: what a stale sampler looks like, what the stream costs, what it holds in memory.

vLLM in bfloat16 and the policy in float32 share this process, as in training on one machine. The
policy's weights are disturbed by seeded noise, every tensor of them, as a large update would, and

    d = mean | log-prob of the sampler - log-prob of the trainer |    of sampled tokens, nats

after real TextCraft openings (`sync.compare`) is taken before and after the weights are sent:

    as loaded    both have just read the same checkpoint
    stale        the policy has moved, the sampler has not
    synced       after sync.send_weights
    reloaded     moved again, saved by models.save_policy, and the sampler told to reload that path
    tied once    the same with a checkpoint that holds a tied output head once, as the embedding,
                 which is how transformers writes it
    repaired     after sync.send_weights once more

Then seconds, in one run and in turn, each for the same weights:

    stream       sync.send_weights
    checkpoint   models.save_policy to a temporary folder, and vLLM's reload_weights of that path
    copy         every tensor, already in bfloat16, copied to memory that is already there: the
                 floor for anything that moves these bytes

and the bytes that the stream keeps alive, which would tell of a second copy of the model: the
weights made for it that have not been freed when the next one is made (`held_at_once`), against the
largest tensor and the whole model; and by how much the process grew meanwhile, vLLM's own buffers
included, memory that it had free before not.

Run it:  python benchmarks/weight_sync.py                  two minutes
         python benchmarks/weight_sync.py --model tiny     half a minute, most of it vLLM's start
It prints a table and writes benchmarks/results/weight_sync-<model>.json. Read next: ../sync.py.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

if TYPE_CHECKING:
    import torch

RESULTS = ROOT / "benchmarks" / "results"
LOOPS = ("stream", "checkpoint", "copy")


class Held:
    """Bytes of the tensors that went by and are still somebody's, seen whenever a new one comes.

    Memory is counted, not tensor objects: whoever keeps a view of a tensor keeps all of it.
    """

    def __init__(self) -> None:
        self.total = self.largest = self.peak = 0
        self._alive: list[tuple[Any, int]] = []  # weak references to memory, its bytes

    def watch(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[Any]:
        """The same stream, watched."""
        from torch.multiprocessing.reductions import StorageWeakRef

        for name, tensor in weights:
            storage = tensor.untyped_storage()
            num_bytes = storage.nbytes()
            self._alive.append((StorageWeakRef(storage), num_bytes))
            del storage
            self._alive = [(ref, n) for ref, n in self._alive if not ref.expired()]
            self.total += num_bytes
            self.largest = max(self.largest, num_bytes)
            self.peak = max(self.peak, sum(n for _, n in self._alive))
            yield name, tensor
            del tensor


def disturb(policy: Any, size: float, seed: int) -> None:
    """Add noise of `size` times a tensor's root mean square to every tensor of the policy."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in policy.parameters():
            noise = torch.randn(p.shape, generator=generator).to(p.device)
            p.add_(size * p.square().mean().sqrt() * noise)


def textcraft_openings(tokenizer: Any, count: int) -> list[list[int]]:
    from chat import ChatTemplate
    from envs import get_env, load_tasks

    chat, openings = ChatTemplate(tokenizer), []
    for task in load_tasks("textcraft", "train")[:count]:
        world = get_env("textcraft")()
        openings.append(chat.opening(world.PROMPT, world.reset(task.task_index, 0)))
    return openings


def measure(options: argparse.Namespace) -> dict[str, Any]:
    import torch

    from engines import VLLMEngine
    from models import load_policy, load_tokenizer, num_parameters, save_policy
    from runtime import clock, sync
    from runtime.default_models import resolve_model

    path, dtype = resolve_model(options.model), torch.bfloat16
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = load_tokenizer(path)
    openings = textcraft_openings(tokenizer, options.openings)
    with contextlib.ExitStack() as stack:
        print("starting vLLM", flush=True)
        engine = VLLMEngine(path, max_model_len=1024, dtype="bfloat16")
        stack.callback(engine.close)
        engine._llm.llm_engine.vllm_config.load_config.use_tqdm_on_load = False
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        policy = load_policy(path).to(device).eval()
        difference: dict[str, float] = {}

        def compare(name: str) -> None:
            (difference[name],) = sync.compare(policy, engine, openings, 1.0, device)
            print(f"{name}: sampler and trainer differ by {difference[name]:.4f} nats", flush=True)

        def stream() -> dict[str, float]:
            return {"stream_s": seconds_of(lambda: sync.send_weights(policy, engine, dtype))}

        def reload(where: Path) -> None:
            engine._llm.llm_engine.collective_rpc(
                "reload_weights", kwargs={"weights_path": str(where)}
            )
            engine._llm.reset_prefix_cache()

        def checkpoint() -> dict[str, float]:
            where = folder / "ours"
            return {
                "save_s": seconds_of(lambda: save_policy(policy, tokenizer, where)),
                "reload_s": seconds_of(lambda: reload(where)),
            }

        def copy() -> dict[str, float]:
            seconds = 0.0
            for _, weight in sync.whole_weights(policy, dtype):
                there = torch.empty_like(weight).fill_(1)  # its pages are there too
                seconds += seconds_of(lambda to=there, w=weight: to.copy_(w))
            return {"copy_s": seconds}

        compare("as_loaded")
        disturb(policy, options.noise, seed=1)
        compare("stale")
        held, plain = Held(), sync.whole_weights
        try:
            sync.whole_weights = lambda policy, dtype: held.watch(plain(policy, dtype))
            stream()
        finally:
            sync.whole_weights = plain
        compare("synced")
        disturb(policy, options.noise, seed=2)
        checkpoint()
        compare("reloaded")
        disturb(policy, options.noise, seed=3)
        policy.lm.save_pretrained(folder / "tied_once")
        reload(folder / "tied_once")
        compare("tied_once")
        clock.reset_peak()
        before = clock.peak()
        stream()
        process_bytes = clock.peak() - before
        compare("repaired")

        loops: dict[str, Callable[[], dict[str, float]]] = {
            "stream": stream,
            "checkpoint": checkpoint,
            "copy": copy,
        }
        repeats = []
        for repeat in range(options.repeats):
            first = repeat % len(LOOPS)  # nobody is always the one after somebody else
            timed: dict[str, float] = {}
            for name in LOOPS[first:] + LOOPS[:first]:
                timed |= loops[name]()
            repeats.append(dict(sorted(timed.items())))
            figures = ", ".join(f"{name[:-2]} {seconds:.3f} s" for name, seconds in timed.items())
            print(f"repeat {repeat + 1} of {options.repeats}: {figures}", flush=True)
        num_bytes = sync.send_weights(policy, engine, dtype)
        files = sum(file.stat().st_size for file in (folder / "ours").iterdir())
    return {
        "settings": {
            "model": options.model,
            "parameters": num_parameters(policy),
            "device": str(device),
            "sampler": "bfloat16",
            "trainer": "float32",
            "openings": options.openings,
            "noise": options.noise,
            "repeats": options.repeats,
        },
        "log_prob_difference": {name: round(d, 5) for name, d in difference.items()},
        "bytes": {
            "sent": num_bytes,
            "checkpoint_folder": files,
            "largest_tensor": held.largest,
            "held_at_once": held.peak,
            "process_peak_growth": process_bytes,
        },
        "repeats": repeats,
    }


def seconds_of(work: Callable[[], Any]) -> float:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def summarize(measured: dict[str, Any]) -> dict[str, Any]:
    """Medians over the repeats; ratios are taken within a repeat.

    >>> row = {"stream_s": 0.5, "save_s": 1.0, "reload_s": 0.5, "copy_s": 0.1}
    >>> sizes = {"sent": 10**9, "largest_tensor": 10**8, "held_at_once": 2 * 10**8}
    >>> for name, value in summarize({"bytes": sizes, "repeats": [row]}).items():
    ...     print(name, value)
    stream_s 0.5
    save_s 1.0
    reload_s 0.5
    copy_s 0.1
    checkpoint_s 1.5
    gigabytes 1.0
    stream_gigabytes_per_s 2.0
    copy_gigabytes_per_s 10.0
    checkpoint_over_stream 3.0
    stream_over_copy 5.0
    held_share 0.2
    largest_tensor_share 0.1
    """
    repeats, sizes = measured["repeats"], measured["bytes"]

    def median(figure: Callable[[dict[str, float]], float], digits: int) -> float:
        return round(statistics.median(figure(r) for r in repeats), digits)

    def whole(r: dict[str, float]) -> float:
        return r["save_s"] + r["reload_s"]

    gigabytes = sizes["sent"] / 1e9
    names = ("stream_s", "save_s", "reload_s", "copy_s")
    return {name: median(lambda r, name=name: r[name], 4) for name in names} | {
        "checkpoint_s": median(whole, 4),
        "gigabytes": round(gigabytes, 4),
        "stream_gigabytes_per_s": median(lambda r: gigabytes / r["stream_s"], 3),
        "copy_gigabytes_per_s": median(lambda r: gigabytes / r["copy_s"], 3),
        "checkpoint_over_stream": median(lambda r: whole(r) / r["stream_s"], 2),
        "stream_over_copy": median(lambda r: r["stream_s"] / r["copy_s"], 2),
        "held_share": round(sizes["held_at_once"] / sizes["sent"], 4),  # of the whole model
        "largest_tensor_share": round(sizes["largest_tensor"] / sizes["sent"], 4),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2-135m", help="tiny, smollm2-135m or a path")
    parser.add_argument("--openings", type=int, default=8, help="prompts that are compared on")
    parser.add_argument("--noise", type=float, default=0.1, help="of a tensor's root mean square")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, help="default: results/weight_sync-<model>.json")
    options = parser.parse_args()
    from runtime.rundir import circumstances

    about = circumstances()
    measured = measure(options)
    summary = summarize(measured)
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    out = options.out or RESULTS / f"weight_sync-{Path(options.model).name}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    document = {"date": date} | about | {"summary": summary} | measured
    out.write_text(json.dumps(document, indent=2) + "\n")
    for name, value in (measured["log_prob_difference"] | summary | measured["bytes"]).items():
        print(f"{name:<28}{value!s:>14}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
