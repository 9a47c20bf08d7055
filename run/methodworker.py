"""Code shared by sft.py, dpo.py and agentevol.py, which learn from whole trajectories.

    MethodConfig, IteratedConfig   common options
    MethodWorker                   a worker that batches examples, and plays to get new ones
    read_examples, drop_too_long   examples from --data or an oracle, within the token limit
    IterationFiles                 the data of each iteration, runs/NAME/<name>/iteration_001.jsonl

Each iteration builds its data once: an evolving set, or pairs with the reference's log-probs. The
policy that produced this data changes in the following steps, so the run stores the data. If the
run is killed at any point, it reads the data back when it is resumed.

Read first: run/worker.py. Read next: sft.py, dpo.py, agentevol.py.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

from batching import Batch, make_batch
from chat import ChatTemplate
from config import (
    FILE_OPTIONS,
    Misuse,
    Objective,
    RunConfig,
    UpdateOptions,
    config_per_env,
    flag,
    held_out_tasks,
    horizons_of,
    saved_config,
    value_errors_as_misuse,
)
from conversations import MAX_BYTES, read_records, record_of
from data import ROUNDING, Example, Record, encode
from envs import names_of
from models import load_tokenizer, stop_ids_of
from reporting.metrics import summarize_trajectories
from rollout import draw_requests
from run.clock import Clock
from run.files import read_text, write_json, write_text
from run.progress import phase
from run.session import Session, TrainingError, is_due
from run.worker import Worker
from scale import distributed
from warmstart import base_model_path, demonstrations_for

UNUSED_WITH_DATA = "--data replaces the oracle; leave it out"


# ----------------------------------------------------------------------------------------- options


@dataclass(frozen=True)
class MethodConfig(RunConfig):
    """Options shared by all methods that learn from whole trajectories."""

    outside_presets: ClassVar[frozenset[str]] = frozenset(
        {"steps", "learning_rate", "learning_rate_decay_steps", "mini_batch_size", "warm_start"}
    )
    # For models with billions of parameters, from AgentGym's scripts in agentenv/examples/.
    paper_values: ClassVar[dict[str, Any]] = {"learning_rate": 1e-5}

    # Training
    rounds: tuple[int, ...] = (6,)
    """maximum turns per episode, a single number [paper: 30]"""
    mini_batch_size: int = 16  # trajectories per training step (one optimizer step)
    learning_rate: float = 1e-4  # learning rate of the policy (AdamW) [paper: 1e-5]
    learning_rate_decay_steps: int = 0
    """decay the learning rate linearly to 1/N of its value over N steps, then hold it constant;
    0: decay over all steps (in agentevol.py, over the steps of each iteration)"""

    @property
    def learns_from_play(self) -> bool:
        """Whether the policy learns from trajectories that it has sampled, at --temperature."""
        return False

    def unused_without_play(self) -> Iterator[tuple[str, str]]:
        """Options without effect if the policy plays neither in training nor in evaluation."""
        if not self.plays:
            names = ("temperature", "rounds", "engine", "max_env_failures", "max_sync_error")
            for name in (*names, "record_state"):
                yield name, "with --eval-every 0 the policy never plays; leave it out"

    def check(self) -> None:
        super().check()
        for c in config_per_env(self):
            if len(c.rounds) != 1 or c.rounds[0] < 1:
                raise Misuse(f"--rounds: {self.program} needs one number of at least 1")
        value = getattr(self, "min_return", None)
        is_valid = value is None or (math.isfinite(value) and (value >= 0 or self.method == "sft"))
        self.require("min_return", is_valid, "must be finite and not below 0")
        for name in FILE_OPTIONS:
            for file in getattr(self, name, ()):
                if not self.has_saved_inputs and not os.access(file, os.R_OK):
                    raise Misuse(f"{flag(name)} {file} does not exist or cannot be read")

    def require(self, name: str, is_valid: bool, problem: str) -> None:
        if not is_valid:
            raise Misuse(f"{flag(name)} {getattr(self, name)} {problem}")

    def notes(self) -> Iterator[str]:
        """Differences between this run and a run that it learns from."""
        starts = [Path(start).resolve() for start in (self.model, self.warm_start)]
        for name in FILE_OPTIONS:
            for file in getattr(self, name, ()):
                try:
                    source = saved_config(file, RunConfig)
                except Misuse:  # not a run
                    continue
                prefix = f"{flag(name)} {file} was played"
                if not set(names_of(source.env)) & set(names_of(self.env)):
                    yield f"{prefix} in {source.env}, but this run plays {self.env}: set --env"
                elif not any(start.is_relative_to(Path(file).resolve()) for start in starts):
                    best = f"--model {file}/checkpoints/best"
                    yield f"{prefix} by the policy trained there: {best} continues from it"

    @property
    def has_saved_inputs(self) -> bool:
        """Whether a resumed run has stored its data, so that it does not read the files again."""
        return False


@dataclass(frozen=True)
class IteratedConfig(MethodConfig):
    """Options of methods that play, learn from the episodes for some steps, and play again."""

    outside_presets: ClassVar[frozenset[str]] = MethodConfig.outside_presets | {
        "eval_every",
        "save_every",
    }
    folder: ClassVar[str] = ""  # folder in the run for the data of its iterations

    # Playing
    iterations: int = 1
    """number of iterations; in each one the policy plays and then trains;
    --steps is divided equally among them"""
    tasks_per_iteration: int = 32  # tasks played in each iteration
    group_size: int = 8  # trajectories per task

    def check(self) -> None:
        super().check()
        steps, iterations = self.steps, self.num_iterations
        if steps % iterations:
            raise Misuse(f"--steps {steps} is not a multiple of --iterations {iterations}")

    @property
    def num_iterations(self) -> int:
        return self.iterations

    @property
    def fixed_on_resume(self) -> frozenset[str]:
        """With several iterations, --steps determines where each begins."""
        return frozenset({"steps"} if self.num_iterations > 1 else ())

    @property
    def steps_per_iteration(self) -> int:
        return self.steps // self.num_iterations

    @property
    def has_saved_inputs(self) -> bool:
        files = Path(self.run_dir or "") / self.folder / "iteration_001.json"
        return self.resume and files.exists()


# ------------------------------------------------------------------------------------------ worker


class MethodWorker(Worker):
    """A worker that batches examples, and plays to get new ones."""

    config: MethodConfig

    @property
    def needs_start(self) -> bool:
        return super().needs_start or getattr(self.config, "learn_from", "") == "base"

    def batch_of(self, examples: Sequence[Example]) -> Batch:
        """Examples as a batch, each with the "weight" of its record, or 1 without one."""
        batch = make_batch([example.trajectory for example in examples], self.pad_id)
        batch.weights = torch.tensor([float(e.record.get("weight", 1.0)) for e in examples])
        return batch

    def explore(self, step: int) -> tuple[list[Example], dict[str, Any]]:
        """Play at the start of an iteration, before `step`. Returns the trajectories that were not
        lost, as examples, and metrics of all trajectories."""
        c = self.config
        assert isinstance(c, IteratedConfig)
        iteration, horizons = (step - 1) // c.steps_per_iteration + 1, horizons_of(c)
        size = (c.tasks_per_iteration, c.group_size)
        requests = draw_requests(
            iteration, self.tasks, *size, c.seed, step, horizons, c.env_weights
        )
        self.sync(step)
        trajectories, _ = self.roll_out(requests)
        self.run.write_trajectories(f"step_{step:06d}", trajectories)
        records = [(record_of(t), t) for t in trajectories if t.is_valid]
        examples = [Example(record, t) for record, t in records if record is not None]
        return examples, summarize_trajectories(trajectories, list(horizons))

    def objective_for(self, num_rows: int) -> Objective:
        """Options for one optimizer step on `num_rows` rows."""
        values = {name: getattr(self.config, name) for name in UpdateOptions.__dataclass_fields__}
        if not self.config.learns_from_play:
            values["temperature"] = 1.0
        return Objective(**values | {"mini_batch_size": num_rows})

    def decay_steps(self) -> float:
        """The option's value; if it is 0 all steps, so that more steps mean a slower decay."""
        return self.config.learning_rate_decay_steps or self.config.steps_per_schedule


# ----------------------------------------------------------------------------------------- reading


def chat_of(config: MethodConfig) -> ChatTemplate:
    """The chat template of the run's model. Collective."""
    path = base_model_path(config)
    with value_errors_as_misuse():
        return ChatTemplate(load_tokenizer(path), stop_ids_of(path))


def encode_all(chat: ChatTemplate, records: Iterable[Record]) -> list[Example]:
    """Encode records, with a progress line."""
    records, examples = list(records), []
    with phase("encoding", len(records), "conversations") as tick:
        for record in records:
            try:
                examples.append(encode(chat, record))
            except ValueError as error:
                raise ValueError(f"conversation {record['item_id']}: {error}") from None
            tick()
    return examples


def read_examples(config: Any, min_return: float | None = None) -> list[Example]:
    """The conversations of --data, or the oracle's demonstrations. Collective.

    Args:
        config: options with `data` and `num_demonstrations`.
        min_return: leave out lower returns; every conversation in --data must then have a return.
    Raises:
        Misuse: a file cannot be read or learned from, no conversation is left, or the oracle fails.
    """
    distributed.join()
    chat = chat_of(config)

    def read() -> list[Example]:
        if not config.data:
            records = demonstrations_for(config, config.num_demonstrations, config.seed)
            distributed.say(f"{len(records)} demonstrations by the oracle")
            return encode_all(chat, records)
        records = list(read_records([Path(path) for path in config.data]))
        if min_return is not None and not all("return" in record for record in records):
            raise ValueError("--min-return needs a return in each conversation of --data")
        good = [r for r in records if min_return is None or r["return"] > min_return - ROUNDING]
        if not good:
            problem = f" with a return of at least {min_return:g}" if records else ""
            raise ValueError(f"--data {' '.join(config.data)} holds no conversation{problem}")
        if num_out := len(records) - len(good):
            num = f"{num_out:,} of {len(records):,}"
            distributed.say(f"{num} conversations are below --min-return and are left out")
        return encode_all(chat, good)

    with value_errors_as_misuse():
        return distributed.run_on_rank_0("reading the conversations", read)


Item = TypeVar("Item")


def drop_too_long(
    config: MethodConfig,
    items: Sequence[Item],
    plural: str,
    examples_of: Callable[[Item], Sequence[Example]],
) -> list[Item]:
    """The items whose examples all have at most --max-trajectory-tokens tokens. Prints the number
    of tokens and the number of items left out, before a run is created.

    Args:
        plural: what the printed lines call the items.
    Raises:
        Misuse: no item is left.
    """
    limit = config.max_trajectory_tokens
    lengths = [max(len(e.trajectory.input_ids) for e in examples_of(item)) for item in items]
    fit = [item for item, length in zip(items, lengths, strict=True) if length <= limit]
    if not fit:
        raise Misuse(f"--max-trajectory-tokens {limit} leaves none of the {plural}; raise it")
    if num_out := len(items) - len(fit):
        distributed.say(f"{num_out} {plural} have more than {limit} tokens and are left out")
    examples = [example for item in fit for example in examples_of(item)]
    if num_reencoded := sum(example.is_reencoded for example in examples):
        distributed.say(f"{num_reencoded} trajectories have unusable ids and are encoded again")
    turns = [(e.trajectory, turn) for e in examples for turn in e.trajectory.turns]
    texts = [turn.action_text for t, turn in turns if t.loss_mask[turn.action_span[0]]]
    if num := sum(not text.strip() for text in texts):
        distributed.say(f"note: {num:,} of {len(texts):,} actions are empty: this teaches silence")
    num_tokens = sum(len(e.trajectory.input_ids) for e in examples)
    num_learned = sum(sum(e.trajectory.loss_mask) for e in examples)
    distributed.say(
        f"{len(fit):,} {plural}: {num_tokens:,} tokens, {num_learned:,} of them trained on"
    )
    held_out = {task.task_id for task in held_out_tasks(config)}
    if overlap := held_out & {example.task_id for example in examples}:
        distributed.say(
            f"note: {len(overlap)} of the {len(held_out)} held-out tasks are also trained on: "
            "success on them proves little (see --eval-tasks)"
        )
    return fit


# ------------------------------------------------------------------------------------------- steps


def data_metrics(batch: Batch, epochs: float, clock: Clock) -> dict[str, Any]:
    """Metrics of an update's data. Its speed goes to the clock."""
    seconds = max(clock.values["time/update_s"], 1e-9)
    clock.values["update/tokens_per_s"] = int(batch.lengths.sum()) / seconds
    return {"data/policy_tokens": int(batch.loss_mask.sum()), "data/epoch": epochs}


def sync_if_evaluated(
    session: Session[Any], step: int, batch: Batch | None, clock: Clock
) -> dict[str, Any]:
    """If an evaluation follows, send the weights to the sampler and compare its log-probs.

    Args:
        batch: the batch of the update; None: the weights have not changed since the last sync.
    """
    config, worker = session.config, session.worker
    if batch is None or not (config.plays and is_due(step, config.eval_every, config.steps)):
        return {}
    with session.saving_on_failure(), clock("time/sync_s"):
        difference, clock.values["sync/bytes"] = worker.sync(step, batch)
        return {"sync/log_prob_diff_mean": difference}
    return {}


@dataclass(frozen=True)
class IterationFiles:
    """The data of each iteration, in a folder of the run: a file of lines, then a summary with
    their digest, which is written last."""

    folder: Path
    writes: bool

    @classmethod
    def from_session(cls, session: Session[Any]) -> IterationFiles:
        """The files of a run. A resumed run deletes the data of iterations after its checkpoint,
        because the policy that made it is lost; a new run deletes all data."""
        c = session.config
        assert isinstance(c, IteratedConfig)
        files = cls(session.run.path / c.folder, session.run.writes)
        current = session.completed_step // c.steps_per_iteration + 1
        files.drop_after(current if c.resume else 0)
        return files

    def read(self, iteration: int, must_exist: bool) -> tuple[list[Record], dict[str, Any]] | None:
        """The iteration's lines and summary; None if they do not exist yet. Collective.

        Raises:
            TrainingError: they have changed, or are missing although `must_exist`. They cannot be
                made again, because the policy has changed since.
        """
        summary = self._path(iteration, "json")

        def work() -> tuple[list[Record], dict[str, Any]] | None:
            if not summary.exists():
                return None
            lines = self._path(iteration, "jsonl")
            try:
                text, about = read_text(lines, MAX_BYTES), json.loads(read_text(summary))
                is_same = about.pop("sha256") == _digest(text, about)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                is_same = False
            if not is_same:
                problem = f"{lines} or {summary.name} has changed since the run wrote it"
                raise TrainingError(f"{problem}: restore both, or start a new run")
            # NOTE: splitlines would also split at U+2028, which JSON leaves unescaped.
            return [json.loads(line) for line in text.split("\n") if line], about

        content = distributed.run_on_rank_0("reading an iteration's data", work)
        if content is None and must_exist:
            raise TrainingError(f"{summary} is missing: restore it, or start a new run")
        return content

    def write(self, iteration: int, lines: Sequence[Record], summary: dict[str, Any]) -> None:
        """Write the lines, then the summary. Collective."""
        if self.writes:
            text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
            write_text(self._path(iteration, "jsonl"), text)
            sha256 = _digest(text, summary)
            write_json(self._path(iteration, "json"), summary | {"sha256": sha256})
        distributed.barrier()

    def drop_after(self, iteration: int) -> None:
        for path in sorted(self.folder.glob("iteration_*")) if self.writes else ():
            match = re.fullmatch(r"iteration_(\d+)\.jsonl?", path.name)  # not a user's copy
            if match and int(match[1]) > iteration:  # in sorted order: the summary first
                path.unlink()

    def _path(self, iteration: int, kind: str) -> Path:
        return self.folder / f"iteration_{iteration:03d}.{kind}"


def _digest(text: str, summary: dict[str, Any]) -> str:
    return hashlib.sha256((text + json.dumps(summary)).encode()).hexdigest()
