"""What benchmarks share: arguments, a served world, timing, medians, results that say where they
come from, and for those of the update a batch and the step itself."""

import argparse
import contextlib
import datetime
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from batching import Batch, make_batch  # noqa: E402
from chat import ChatTemplate  # noqa: E402
from config import Config  # noqa: E402
from envs import Task, get_env, load_tasks  # noqa: E402
from runtime.files import write_json  # noqa: E402
from runtime.processes import NotReady, child  # noqa: E402
from runtime.rundir import circumstances  # noqa: E402
from trajectory import RolloutHandler  # noqa: E402
from update import Learner, Objective, update_policy  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
T = TypeVar("T")


# --------------------------------------------------------------------------- arguments and results


def arguments(about: str | None, repeats: int | None, out: str) -> argparse.ArgumentParser:
    """The parser of a benchmark with this docstring; `out` is what --out is by default."""
    parser = argparse.ArgumentParser(description=(about or "").splitlines()[0])
    if repeats is not None:
        parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--out", type=Path, help=f"default: benchmarks/results/{out}")
    return parser


class Results:
    """A results file: date, versions, commit, hardware, command, then what was measured."""

    def __init__(self, path: Path) -> None:
        self.path, self.about = path, circumstances()

    def write(self, content: dict[str, Any]) -> None:
        date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
        write_json(self.path, {"date": date} | self.about | content, indent=2)


def show(rows: Iterable[tuple[str, Any]], width: int = 28) -> None:
    """A table of names and figures."""
    for name, value in rows:
        print(f"{name:<{width}}{value!s:>14}")


# ------------------------------------------------------------------------------------ measuring


def seconds_of(work: Callable[[], Any]) -> float:
    """How long it takes, what it has set going on a GPU included."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - began


def in_turn(repeat: int, works: Sequence[T]) -> list[T]:
    """The order of a repeat: nobody is always the one after somebody else.

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
            return re.search(r"(?:listening|running) on http://\S+:(\d+)", said())

        def said() -> str:
            return server.stdout() + server.stderr()

        try:
            port = int(server.wait_until(listening, timeout_s=60.0)[1])
        except NotReady as error:
            raise SystemExit(f"{module} {error}") from None
        yield port, server.process.pid


# ------------------------------------------------------------------------------------- the update


def play(
    chat: ChatTemplate, task: Task, group_id: int, sample: int, max_rounds: int
) -> RolloutHandler:
    """One episode in this process: the oracle, which asks for the wrong thing now and then."""
    rng = random.Random(f"{task.task_id}/{sample}")
    error_rate = rng.random()
    world = get_env("textcraft")()
    handler = RolloutHandler(
        trajectory_id=f"{task.task_id}-{sample}",
        step=1,
        env="textcraft",
        task_id=task.task_id,
        subtask=task.subtask,
        group_id=group_id,
        seed=0,
        max_rounds=max_rounds,
    )
    handler.start(chat, world.PROMPT, world.reset(task.task_index, 0))
    while not handler.stop_reason:
        thought, action = world.oracle()
        if rng.random() < error_rate:
            thought, action = "I look at what I have.", "inventory"
        ids = chat.action(world.say(thought, action))
        turn = handler.add_action(chat, ids, [-0.5] * len(ids))
        observation, turn.reward, terminated, _, info = world.step(action)
        if terminated:
            handler.stop("success" if info["success"] else "failure", info["success"])
        elif len(handler.turns) == max_rounds:
            handler.stop("max_rounds")
        else:
            handler.add_observation(chat, observation)
    return handler


def played_batch(tokenizer: Any, num_tasks: int, samples: int, max_rounds: int) -> Batch:
    """`samples` episodes of each of TextCraft's first goals of depth 1."""
    chat = ChatTemplate(tokenizer)
    tasks = load_tasks("textcraft", "train", subtasks=("depth 1",))[:num_tasks]
    episodes = [
        play(chat, task, group, sample, max_rounds)
        for group, task in enumerate(tasks)
        for sample in range(samples)
    ]
    return make_batch(episodes, tokenizer.pad_token_id or 0)


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
