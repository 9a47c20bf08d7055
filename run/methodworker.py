"""What sft.py, dpo.py and agentevol.py share: methods that learn from whole trajectories.

    MethodConfig, IteratedConfig   their common options
    MethodWorker                   a worker that makes batches of examples, and explores
    read_examples, drop_too_long   --data or an oracle, as examples within the token limit
    IterationFiles                 what an iteration made, in runs/NAME/<name>/iteration_001.jsonl

An iteration's material (an evolving set, or pairs with the reference's log-probs) is made once, by
a policy that the following steps change. It is written into the run, so that a run killed at any
point finds it again and goes on with the same.

Read first: run/worker.py. Read next: sft.py, dpo.py, agentevol.py.
"""

from __future__ import annotations

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
from data import ROUNDING, Example, Record, encode
from envs import names_of
from formats import read_records, record_of
from models import load_tokenizer, stop_ids_of
from reporting.metrics import summarize_trajectories
from rollout import draw_requests
from run.clock import Clock
from run.files import write_json, write_text
from run.progress import phase
from run.session import Session, TrainingError, is_due
from run.worker import Worker
from scale import distributed
from warmstart import base_model_path, demonstrations_for

# Imitating something definite ends with almost no entropy: that is success, not collapse.
LOW_IN_IMITATION = frozenset({"policy/entropy"})
AT_LEAST_1 = (
    *("epochs", "num_demonstrations", "iterations", "tasks_per_iteration"),
    *("pairs_per_task", "keep_per_task"),
)
UNUSED_WITH_DATA = "leave it out, --data says what is shown"


# ----------------------------------------------------------------------------------------- options


@dataclass(frozen=True)
class MethodConfig(RunConfig):
    """What methods that learn from whole trajectories share."""

    outside_presets: ClassVar[frozenset[str]] = frozenset(
        {"steps", "learning_rate", "learning_rate_decay_steps", "mini_batch_size", "warm_start"}
    )
    # For a model of billions of parameters; AgentGym's scripts, agentenv/examples/.
    paper_values: ClassVar[dict[str, Any]] = {"learning_rate": 1e-5}

    # How it learns
    rounds: tuple[int, ...] = (6,)  # most turns of a trajectory (turns) [paper: 30]
    mini_batch_size: int = 16  # trajectories of a step, which is one optimizer step (trajectories)
    learning_rate: float = 1e-4  # of the policy, AdamW [paper: 1e-5]
    learning_rate_decay_steps: int = 0
    """linear decay to 1/N of the rate in N steps, then constant; 0: over all steps, for AgentEvol
    over those of each iteration (steps)"""

    @property
    def learns_from_play(self) -> bool:
        """Whether the policy samples, at --temperature, what it learns from."""
        return False

    def unused_without_play(self) -> Iterator[tuple[str, str]]:
        """Options without effect where nothing is played, neither to learn from nor to measure."""
        if not self.plays:
            names = ("temperature", "rounds", "engine", "max_env_failures", "max_sync_error")
            for name in (*names, "record_state"):
                yield name, "leave it out, nothing is played without --eval-every"

    def check(self) -> None:
        super().check()
        for c in config_per_env(self):
            if len(c.rounds) != 1 or c.rounds[0] < 1:
                raise Misuse(f"--rounds: {self.program} needs one number, at least 1")
        least = getattr(self, "min_return", None)
        is_fine = least is None or (math.isfinite(least) and (least >= 0 or self.method == "sft"))
        self.require("min_return", is_fine, "must be finite, and no return is below 0")
        for name in AT_LEAST_1:
            self.require(name, getattr(self, name, 1) >= 1, "must be at least 1")
        for name in FILE_OPTIONS:
            for file in getattr(self, name, ()):
                if not self.has_saved_inputs and not os.access(file, os.R_OK):
                    raise Misuse(f"{flag(name)} {file} is not there, or may not be read")

    def require(self, name: str, is_fine: bool, problem: str) -> None:
        if not is_fine:
            raise Misuse(f"{flag(name)} {getattr(self, name)} {problem}")

    def notes(self) -> Iterator[str]:
        """How a run to learn from was played, where that differs from this run."""
        starts = [Path(start).resolve() for start in (self.model, self.warm_start)]
        for name in FILE_OPTIONS:
            for file in getattr(self, name, ()):
                try:
                    played = saved_config(file, RunConfig)
                except Misuse:  # it is not a run
                    continue
                how = f"{flag(name)} {file} was played"
                if not set(names_of(played.env)) & set(names_of(self.env)):
                    yield f"{how} in {played.env}, this run plays {self.env}: give --env"
                elif not any(start.is_relative_to(Path(file).resolve()) for start in starts):
                    best = f"--model {file}/checkpoints/best"
                    yield f"{how} by {played.model}, as trained there: {best} goes on from it"

    @property
    def has_saved_inputs(self) -> bool:
        """Whether a resumed run holds what its files gave it, so that they are not read again."""
        return False


@dataclass(frozen=True)
class IteratedConfig(MethodConfig):
    """What methods share that play, learn from it for some steps, and play again."""

    outside_presets: ClassVar[frozenset[str]] = MethodConfig.outside_presets | {
        "eval_every",
        "save_every",
    }
    folder: ClassVar[str] = ""  # of the run, with what each iteration made

    # When it plays
    iterations: int = 1  # times that the policy plays, each followed by as many steps
    tasks_per_iteration: int = 32  # tasks that it plays then (tasks)
    group_size: int = 8  # trajectories per task (trajectories)

    def check(self) -> None:
        super().check()
        steps, times = self.steps, self.num_iterations
        if steps % times:
            raise Misuse(f"--steps {steps} is not a multiple of --iterations {times}")

    @property
    def num_iterations(self) -> int:
        return self.iterations

    @property
    def fixed_on_resume(self) -> frozenset[str]:
        """Of several iterations --steps says where they begin."""
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
    """A worker that makes batches of examples, and plays for new ones."""

    config: MethodConfig

    @property
    def needs_start(self) -> bool:
        return super().needs_start or getattr(self.config, "learn_from", "") == "base"

    def batch_of(self, examples: Sequence[Example]) -> Batch:
        """Examples as a batch, each with the "weight" of its record (1 where it has none)."""
        batch = make_batch([example.trajectory for example in examples], self.pad_id)
        batch.weights = torch.tensor([float(e.record.get("weight", 1.0)) for e in examples])
        return batch

    def explore(self, step: int) -> tuple[list[Example], dict[str, Any]]:
        """The policy plays for a new iteration, before `step`: what it played, without lost
        trajectories, and the metrics of all."""
        c = self.config
        assert isinstance(c, IteratedConfig)
        turn, horizons = (step - 1) // c.steps_per_iteration + 1, horizons_of(c)
        size = (c.tasks_per_iteration, c.group_size)
        requests = draw_requests(turn, self.tasks, *size, c.seed, step, horizons, c.env_weights)
        self.sync_probed(step, self.openings)
        played, _ = self.roll_out(requests)
        self.run.write_trajectories(f"step_{step:06d}", played)
        records = [(record_of(t), t) for t in played if t.is_valid]
        examples = [Example(record, t) for record, t in records if record is not None]
        return examples, summarize_trajectories(played, list(horizons))

    def objective_for(self, num_rows: int) -> Objective:
        """How an update of so many rows, which is one optimizer step, is cut."""
        values = {name: getattr(self.config, name) for name in UpdateOptions.__dataclass_fields__}
        if not self.config.learns_from_play:
            values["temperature"] = 1.0
        return Objective(**values | {"mini_batch_size": num_rows})

    def decay_steps(self) -> float:
        """Without the option all of --steps: a run that is given more then decays more slowly."""
        return self.config.learning_rate_decay_steps or self.config.steps_per_schedule


# ----------------------------------------------------------------------------------------- reading


def chat_of(config: MethodConfig) -> ChatTemplate:
    """The chat template of the model that the options name. Collective."""
    path = base_model_path(config)
    with value_errors_as_misuse():
        return ChatTemplate(load_tokenizer(path), stop_ids_of(path))


def encode_all(chat: ChatTemplate, records: Iterable[Record]) -> list[Example]:
    """Records with their tokens, with a progress line."""
    records, examples = list(records), []
    with phase("encoding", len(records), "conversations") as tick:
        for record in records:
            examples.append(encode(chat, record))
            tick()
    return examples


def read_examples(config: Any, min_return: float | None = None) -> list[Example]:
    """The conversations of --data, or the oracle's demonstrations. Collective.

    Args:
        config: with `data` and `num_demonstrations`.
        min_return: leave out what earned less; all in --data must then have a return.
    Raises:
        Misuse: a file that cannot be read or learned from; nothing in it; the oracle failed.
    """
    distributed.join()
    chat = chat_of(config)

    def read() -> list[Example]:
        if not config.data:
            records = demonstrations_for(config, config.num_demonstrations, config.seed)
            distributed.say(f"the oracle gave {len(records)} demonstrations")
            return encode_all(chat, records)
        records = list(read_records([Path(path) for path in config.data]))
        chosen = records
        if min_return is not None:
            if not all("return" in record for record in records):
                raise ValueError("--min-return needs a return in each conversation of --data")
            chosen = [r for r in records if r["return"] > min_return - ROUNDING]
        if not chosen:
            which = f" that earned {min_return:g}" if records else ""
            raise ValueError(f"--data {' '.join(config.data)} holds no conversation{which}")
        if num_out := len(records) - len(chosen):
            distributed.say(f"{num_out:,} of {len(records):,} conversations earned less: left out")
        return encode_all(chat, chosen)

    with value_errors_as_misuse():
        return distributed.run_on_rank_0("reading what is shown", read)


Item = TypeVar("Item")


def drop_too_long(
    config: MethodConfig,
    items: Sequence[Item],
    what: str,
    examples_of: Callable[[Item], Sequence[Example]],
) -> list[Item]:
    """The items whose examples all have at most --max-trajectory-tokens tokens. How many tokens
    they have, and what was left out, is printed before there is a run.

    Args:
        what: the plural to call them by.
    Raises:
        Misuse: nothing is left.
    """
    limit = config.max_trajectory_tokens
    lengths = [max(len(e.trajectory.input_ids) for e in examples_of(item)) for item in items]
    fit = [item for item, length in zip(items, lengths, strict=True) if length <= limit]
    if not fit:
        raise Misuse(f"--max-trajectory-tokens {limit} leaves none of the {what}; raise it")
    if num_out := len(items) - len(fit):
        distributed.say(f"{num_out} {what} have more than {limit} tokens and are left out")
    examples = [example for item in fit for example in examples_of(item)]
    if num_again := sum(example.is_reencoded for example in examples):
        distributed.say(f"{num_again} trajectories of another tokenizer are encoded from text")
    num_tokens = sum(len(e.trajectory.input_ids) for e in examples)
    num_learned = sum(sum(e.trajectory.loss_mask) for e in examples)
    distributed.say(f"{len(fit):,} {what}: {num_tokens:,} tokens, {num_learned:,} of them learned")
    held_out = {task.task_id for task in held_out_tasks(config)}
    if both := held_out & {example.task_id for example in examples}:
        distributed.say(
            f"note: it learns from {len(both)} of the {len(held_out)} held-out tasks: success "
            "there says little about others (--eval-tasks)"
        )
    return fit


# ------------------------------------------------------------------------------------------- steps


def data_metrics(batch: Batch, epochs: float, clock: Clock) -> dict[str, Any]:
    """Metrics of what an update has learned from; its speed goes to the clock."""
    seconds = max(clock.values["time/update_s"], 1e-9)
    clock.values["update/tokens_per_s"] = int(batch.lengths.sum()) / seconds
    return {"data/policy_tokens": int(batch.loss_mask.sum()), "data/epoch": epochs}


def sync_if_evaluated(
    session: Session[Any], step: int, batch: Batch | None, clock: Clock
) -> dict[str, Any]:
    """Send the weights to the sampler, and compare there, if the step is evaluated next.

    Args:
        batch: what was learned; None: nothing has changed since the last time.
    """
    config, worker = session.config, session.worker
    if batch is None or not (config.plays and is_due(step, config.eval_every, config.steps)):
        return {}
    with session.saving_on_failure(weights_changed=True), clock("time/sync_s"):
        rows = range(min(len(batch), worker.num_probes))
        lengths = [int(batch.loss_mask[row].argmax()) for row in rows]  # up to the first action
        openings = [batch.input_ids[row, : lengths[row]].tolist() for row in rows]
        difference, num_bytes = worker.sync_probed(step, openings)
        clock.values["sync/bytes"] = num_bytes
        return {"sync/log_prob_diff_mean": difference}
    return {}


@dataclass(frozen=True)
class IterationFiles:
    """What each iteration has made, in a folder of the run: lines, and a summary that is written
    last."""

    folder: Path
    writes: bool

    @classmethod
    def from_session(cls, session: Session[Any]) -> IterationFiles:
        """Those of a run, without what it made after the step that it goes on from: that policy is
        gone. A new run begins with none."""
        c = session.config
        assert isinstance(c, IteratedConfig)
        files = cls(session.run.path / c.folder, session.run.writes)
        current = session.completed_step // c.steps_per_iteration + 1
        files.drop_after(current if c.resume else 0)
        return files

    def read(self, iteration: int, must_exist: bool) -> tuple[list[Record], dict[str, Any]] | None:
        """The iteration's lines and summary; None if it has not made them. Collective.

        Raises:
            TrainingError: they must exist, as the policy that made them has changed since.
        """
        summary = self._path(iteration, "json")

        def work() -> tuple[list[Record], dict[str, Any]] | None:
            if not summary.exists():
                return None
            text = self._path(iteration, "jsonl").read_text(encoding="utf-8")
            # NOTE: not splitlines, which also cuts at U+2028, and JSON leaves that as it is.
            lines = [json.loads(line) for line in text.split("\n") if line]
            return lines, json.loads(summary.read_text(encoding="utf-8"))

        content = distributed.run_on_rank_0("reading what an iteration has made", work)
        if content is None and must_exist:
            raise TrainingError(f"{summary} is gone: put a copy back, or start a new run")
        return content

    def write(self, iteration: int, lines: Sequence[Record], summary: dict[str, Any]) -> None:
        """Collective."""
        if self.writes:
            text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
            write_text(self._path(iteration, "jsonl"), text)
            write_json(self._path(iteration, "json"), summary)
        distributed.barrier()

    def drop_after(self, iteration: int) -> None:
        for path in sorted(self.folder.glob("iteration_*")) if self.writes else ():
            match = re.fullmatch(r"iteration_(\d+)\.jsonl?", path.name)  # not a user's copy
            if match and int(match[1]) > iteration:  # a summary before its lines
                path.unlink()

    def _path(self, iteration: int, kind: str) -> Path:
        return self.folder / f"iteration_{iteration:03d}.{kind}"
