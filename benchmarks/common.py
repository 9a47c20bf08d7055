"""What benchmarks share: arguments, timing, medians, results with their circumstances, a served
environment, and the learner of those that measure the update."""

import argparse
import contextlib
import datetime
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from batching import Batch  # noqa: E402
from config import Config, Objective  # noqa: E402
from models import load_policy  # noqa: E402
from run.files import write_json  # noqa: E402
from run.processes import child  # noqa: E402
from run.rundir import circumstances  # noqa: E402
from scale import distributed, precision  # noqa: E402
from update import Learner, update_policy  # noqa: E402

T = TypeVar("T")


def arguments(about: str | None, repeats: int) -> argparse.ArgumentParser:
    """The parser of a benchmark with this docstring."""
    parser = argparse.ArgumentParser(description=(about or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--out", type=Path, help="file to write (default: in runs/benchmarks)")
    parser.add_argument("--commit", action="store_true", help="write to benchmarks/results")
    return parser


class Results:
    """A results file: date, versions, commit, hardware, command, then what was measured."""

    def __init__(self, options: argparse.Namespace, name: str) -> None:
        folder = ROOT / ("benchmarks/results" if options.commit else "runs/benchmarks")
        self.path, self.about = options.out or folder / name, circumstances()
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, content: dict[str, Any]) -> None:
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        write_json(self.path, {"date": date} | self.about | content, indent=2)


def show(rows: Iterable[tuple[str, Any]], width: int = 28) -> None:
    """A table of names and figures."""
    for name, value in rows:
        print(f"{name:<{width}}{value!s:>14}")


def seconds_of(work: Callable[[], Any]) -> float:
    """How long it takes, including what it started on a GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def in_turn(repeat: int, works: Sequence[T]) -> list[T]:
    """The order of a repeat, rotated, so that no work always follows the same other one.

    >>> in_turn(0, "abc"), in_turn(1, "abc")
    (['a', 'b', 'c'], ['b', 'c', 'a'])
    """
    first = repeat % len(works)
    return [*works[first:], *works[:first]]


def median(figures: Iterable[float], digits: int) -> float:
    """Of the repeats' figures; ratios are taken within a repeat, as a machine's speed drifts."""
    return round(statistics.median(figures), digits)


@contextlib.contextmanager
def serving(module: str, *words: str) -> Iterator[tuple[int, int]]:
    """`python -m MODULE WORDS`, a server on a free port: its port and process id."""
    with child(module, *words, cwd=ROOT) as server:

        def listening() -> re.Match[str] | None:
            text = server.stdout() + server.stderr()
            return re.search(r"(?:listening|running) on http://\S+:(\d+)", text)

        port = int(server.wait_until(listening, timeout_s=60.0)[1])
        yield port, server.process.pid


def make_learner(path: str) -> Learner:
    """The policy of a checkpoint as training has it, with AdamW."""
    accelerator = distributed.make_accelerator(precision.choose("auto").autocast)
    model = distributed.shard(accelerator, load_policy(path).train())
    adamw = partial(torch.optim.AdamW, lr=1e-6, weight_decay=0.0, fused=True)
    return Learner(accelerator, model, adamw(model.parameters()))


def one_step(batch_size: int, max_tokens: int) -> Objective:
    """train.py's objective, with one optimizer step for the whole batch."""
    c = Config()
    return Objective(
        clip_ratio=c.clip_ratio,
        sampler_is_cap=c.sampler_is_cap,
        mini_batch_size=batch_size,
        max_tokens_per_micro_batch=max_tokens,
    )


def take_step(learner: Learner, batch: Batch, objective: Objective) -> dict[str, float]:
    """`update.update_policy`, which must not have skipped anything."""
    metrics = update_policy(learner, batch, objective)
    if metrics["policy/skipped_steps"]:
        raise SystemExit("the update was skipped: its loss or gradient is not finite")
    return metrics
