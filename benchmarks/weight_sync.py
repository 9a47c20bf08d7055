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
It prints a table and writes benchmarks/results/weight_sync-<model>.json.
Read next: scale/sync.py.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402

from benchmarks import common  # noqa: E402
from chat import ChatTemplate  # noqa: E402
from envs import get_env, load_tasks  # noqa: E402
from models import load_policy, load_tokenizer, num_parameters, save_policy  # noqa: E402
from run import clock  # noqa: E402
from sampling.vllm_engine import VLLMEngine  # noqa: E402
from scale import sync  # noqa: E402
from scale.default_models import resolve_model  # noqa: E402

DTYPE = torch.bfloat16  # the sampler's


class Held:
    """Bytes of the tensors that went by and are still somebody's, seen whenever a new one comes.

    Memory is counted, not tensor objects: whoever keeps a view of a tensor keeps all of it.
    """

    def __init__(self) -> None:
        self.total = self.largest = self.peak = 0
        self._alive: list[tuple[Any, int]] = []  # weak references to memory, its bytes

    def watch(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[Any]:
        """The same stream, watched."""
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
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in policy.parameters():
            noise = torch.randn(p.shape, generator=generator).to(p.device)
            p.add_(size * p.square().mean().sqrt() * noise)


def textcraft_openings(tokenizer: Any, count: int) -> list[list[int]]:
    chat, openings = ChatTemplate(tokenizer), []
    for task in load_tasks("textcraft", "train")[:count]:
        world = get_env("textcraft")()
        openings.append(chat.opening(world.PROMPT, world.reset(task.task_index, 0)))
    return openings


class Pair:
    """The trainer's policy in float32, and a sampler in bfloat16 of the same checkpoint."""

    def __init__(self, model: str, num_openings: int, folder: Path) -> None:
        path = resolve_model(model)
        self.folder = folder
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.tokenizer = load_tokenizer(path)
        self.openings = textcraft_openings(self.tokenizer, num_openings)
        print("starting vLLM", flush=True)
        self.engine = VLLMEngine(path, max_model_len=1024, dtype="bfloat16")
        self.engine._llm.llm_engine.vllm_config.load_config.use_tqdm_on_load = False
        self.policy = load_policy(path).to(self.device).eval()

    def compare(self) -> float:
        """d, of the openings' tokens."""
        (d,) = sync.compare(self.policy, self.engine, self.openings, 1.0, self.device)
        return d

    def send(self) -> int:
        return sync.send_weights(self.policy, self.engine, DTYPE)

    def reload(self, name: str) -> None:
        """The sampler reads a checkpoint."""
        where = {"weights_path": str(self.folder / name)}
        self.engine._llm.llm_engine.collective_rpc("reload_weights", kwargs=where)
        self.engine._llm.reset_prefix_cache()

    def save(self) -> None:
        save_policy(self.policy, self.tokenizer, self.folder / "ours")

    # What is timed

    def stream(self) -> dict[str, float]:
        return {"stream_s": common.seconds_of(self.send)}

    def checkpoint(self) -> dict[str, float]:
        return {
            "save_s": common.seconds_of(self.save),
            "reload_s": common.seconds_of(lambda: self.reload("ours")),
        }

    def copy(self) -> dict[str, float]:
        seconds = 0.0
        for _, weight in sync.whole_weights(self.policy, DTYPE):
            there = torch.empty_like(weight).fill_(1)  # its pages are there too
            seconds += common.seconds_of(partial(there.copy_, weight))
        return {"copy_s": seconds}


def differences(pair: Pair, noise: float) -> tuple[dict[str, float], Held, int]:
    """d at each point of the story above; what the first stream held, what the last one grew."""
    d: dict[str, float] = {}

    def note(name: str) -> None:
        d[name] = pair.compare()
        print(f"{name}: sampler and trainer differ by {d[name]:.4f} nats", flush=True)

    note("as_loaded")
    disturb(pair.policy, noise, seed=1)
    note("stale")
    held, plain = Held(), sync.whole_weights
    try:
        sync.whole_weights = lambda policy, dtype: held.watch(plain(policy, dtype))
        pair.send()
    finally:
        sync.whole_weights = plain
    note("synced")
    disturb(pair.policy, noise, seed=2)
    pair.checkpoint()
    note("reloaded")
    disturb(pair.policy, noise, seed=3)
    pair.policy.lm.save_pretrained(pair.folder / "tied_once")
    pair.reload("tied_once")
    note("tied_once")
    clock.reset_peak()
    before = clock.peak()
    pair.send()
    growth = clock.peak() - before
    note("repaired")
    return d, held, growth


def times(pair: Pair, num_repeats: int) -> list[dict[str, float]]:
    """Seconds of each way, in turn."""
    repeats = []
    for repeat in range(num_repeats):
        timed: dict[str, float] = {}
        for way in common.in_turn(repeat, (pair.stream, pair.checkpoint, pair.copy)):
            timed |= way()
        repeats.append(dict(sorted(timed.items())))
        figures = ", ".join(f"{name[:-2]} {seconds:.3f} s" for name, seconds in timed.items())
        print(f"repeat {repeat + 1} of {num_repeats}: {figures}", flush=True)
    return repeats


def measure(options: argparse.Namespace) -> dict[str, Any]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        pair = Pair(options.model, options.openings, folder)
        stack.callback(pair.engine.close)
        d, held, growth = differences(pair, options.noise)
        repeats = times(pair, options.repeats)
        num_bytes = pair.send()
        files = sum(file.stat().st_size for file in (folder / "ours").iterdir())
    return {
        "settings": {
            "model": options.model,
            "parameters": num_parameters(pair.policy),
            "device": str(pair.device),
            "sampler": "bfloat16",
            "trainer": "float32",
            "openings": options.openings,
            "noise": options.noise,
            "repeats": options.repeats,
        },
        "log_prob_difference": {name: round(value, 5) for name, value in d.items()},
        "bytes": {
            "sent": num_bytes,
            "checkpoint_folder": files,
            "largest_tensor": held.largest,
            "held_at_once": held.peak,
            "process_peak_growth": growth,
        },
        "repeats": repeats,
    }


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
    gigabytes = sizes["sent"] / 1e9

    def of(figure: Callable[[dict[str, float]], float], digits: int) -> float:
        return common.median((figure(r) for r in repeats), digits)

    def whole(r: dict[str, float]) -> float:
        return r["save_s"] + r["reload_s"]

    names = ("stream_s", "save_s", "reload_s", "copy_s")
    return {name: common.median((r[name] for r in repeats), 4) for name in names} | {
        "checkpoint_s": of(whole, 4),
        "gigabytes": round(gigabytes, 4),
        "stream_gigabytes_per_s": of(lambda r: gigabytes / r["stream_s"], 3),
        "copy_gigabytes_per_s": of(lambda r: gigabytes / r["copy_s"], 3),
        "checkpoint_over_stream": of(lambda r: whole(r) / r["stream_s"], 2),
        "stream_over_copy": of(lambda r: r["stream_s"] / r["copy_s"], 2),
        "held_share": round(sizes["held_at_once"] / sizes["sent"], 4),  # of the whole model
        "largest_tensor_share": round(sizes["largest_tensor"] / sizes["sent"], 4),
    }


def main() -> int:
    parser = common.arguments(__doc__, 5, "weight_sync-<model>.json")
    parser.add_argument("--model", default="smollm2-135m", help="tiny, smollm2-135m or a path")
    parser.add_argument("--openings", type=int, default=8, help="prompts that are compared on")
    parser.add_argument("--noise", type=float, default=0.1, help="of a tensor's root mean square")
    options = parser.parse_args()
    results = common.Results(options.out, f"weight_sync-{Path(options.model).name}.json")
    measured = measure(options)
    summary = summarize(measured)
    results.write({"summary": summary} | measured)
    common.show((measured["log_prob_difference"] | summary | measured["bytes"]).items())
    return 0


if __name__ == "__main__":
    sys.exit(main())
