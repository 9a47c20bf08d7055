"""What methods that learn from whole trajectories add to a worker: conversations as batches, play
for new ones, and what an iteration has made, kept in the run.

    conversations ──batch_of──> Batch          encoded as sampling encodes
    tasks ──explore──> conversations           the policy as it is now plays, with returns
    make ──Kept──> runs/NAME/<name>/iteration_001.jsonl, .json

An iteration's material (an evolving set, pairs with what the reference thinks of them) is made
once, by a policy that the steps after it change. So it lies in the run: a run that was killed
anywhere finds it again, and goes on with the same.

Read first: run/worker.py. Read next: sft.py, dpo.py, agentevol.py.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from batching import Batch, make_batch
from chat import ChatTemplate
from config import Misuse, Objective, Portions, refusing
from conversations import Conversation, as_agenttraj, from_agenttraj, was_encoded_again
from demonstrations import shown_in_each
from models import load_tokenizer, stop_ids_of
from reporting.metrics import summarize_trajectories
from rollout import draw
from run.clock import Clock
from run.files import write_json, write_text
from run.progress import phase
from run.session import Session, TrainingError, is_due
from run.worker import Worker
from runtime.methods import EvolConfig, MethodConfig, SftConfig, conversations_of
from runtime.mixture import held_out_tasks, horizons_of, in_each
from runtime.saved import LISTS_OF_FILES
from scale import distributed
from warmstart import given_model, manner_in

Lines = list[dict[str, Any]]
Item = TypeVar("Item")


class MethodWorker(Worker):
    """A worker that encodes conversations, and plays for new ones."""

    config: MethodConfig

    def batch_of(self, records: Sequence[Conversation]) -> Batch:
        """Conversations as a batch, each weighted by its "weight", 1 where it has none."""
        batch = make_batch([from_agenttraj(self.chat, r) for r in records], self.pad_id)
        batch.weights = torch.tensor([float(r.get("weight", 1.0)) for r in records])
        return batch

    def explore(
        self, turn: int, step: int, num_tasks: int, group_size: int
    ) -> tuple[list[Conversation], dict[str, Any]]:
        """The policy plays for the `turn`-th time: what says something, as conversations with their
        returns, and the metrics of all."""
        c, size = self.config, (num_tasks, group_size)
        horizons = horizons_of(c)
        requests = draw(turn, self.tasks, *size, c.seed, step, horizons, c.env_weights)
        self.sync_probed(step, self.openings)
        played, _ = self.roll_out(requests)
        self.run.write_trajectories(f"step_{step:06d}", played)
        said = [as_agenttraj(t.to_line(), t.trajectory_id) for t in played if t.is_valid]
        return [r for r in said if r is not None], summarize_trajectories(played, list(horizons))

    @property
    def returns_to_start(self) -> bool:
        """Also where each iteration learns from there."""
        return super().returns_to_start or getattr(self.config, "learn_from", "") == "base"

    def portions(self, num_rows: int) -> Objective:
        """How an update of so many rows, which is one optimizer step, is cut."""
        own = {name: getattr(self.config, name) for name in Portions.__dataclass_fields__}
        if not getattr(self.config, "learns_from_play", False):
            own["temperature"] = 1.0  # what is learned from was not sampled at --temperature
        return Objective(**own | {"mini_batch_size": num_rows})

    def decay_steps(self) -> float:
        """Without an option all of --steps: a run that is given more then falls more slowly."""
        return self.config.learning_rate_decay_steps or self.config.steps_in_a_row


def alone(record: Conversation) -> list[Conversation]:
    return [record]


def fitting(
    config: MethodConfig,
    records: Sequence[Item],
    what: str,
    sides: Callable[[Item], Sequence[Conversation]] = alone,  # type: ignore[assignment]
) -> list[Item]:
    """Those of at most --max-trajectory-tokens, found before there is a run; how much they are,
    what was left out, what had to be encoded again for this tokenizer, is said. Collective.

    Args:
        what: to call them.
        sides: of a record, all of which must fit.
    Raises:
        Misuse: no model, a conversation that is none, or nothing is left.
    """
    limit, path = config.max_trajectory_tokens, given_model(config)
    with refusing():
        chat = ChatTemplate(load_tokenizer(path), stop_ids_of(path))

    def look() -> tuple[list[int], int, int, int]:
        kept, again, tokens, learned = [], 0, 0, 0
        with phase(f"encoding {what}", len(records), what) as tick:
            for place, record in enumerate(records):
                encoded = [(from_agenttraj(chat, side), side) for side in sides(record)]
                if all(len(handler.input_ids) <= limit for handler, _ in encoded):
                    kept.append(place)
                    again += any(was_encoded_again(handler, side) for handler, side in encoded)
                    tokens += sum(len(handler.input_ids) for handler, _ in encoded)
                    learned += sum(sum(handler.loss_mask) for handler, _ in encoded)
                tick()
        return kept, again, tokens, learned

    with refusing():
        kept, again, tokens, learned = distributed.first("encoding", look)
    if len(kept) < len(records):
        out = f"{len(records) - len(kept)} of {len(records)} {what}"
        distributed.say(f"{out} have more than {limit} tokens and are left out")
    if again:
        distributed.say(f"{again} {what} of another tokenizer are encoded again, from text")
    if not kept:
        raise Misuse(
            f"--max-trajectory-tokens {limit} leaves none of {len(records)} {what}; raise it"
        )
    distributed.say(f"{len(kept):,} {what}: {tokens:,} tokens, {learned:,} of them learned")
    fit = [records[place] for place in kept]
    say_what_is_held_out(config, {str(s.get("item_id")) for r in fit for s in sides(r)})
    return fit


def say_what_is_held_out(config: MethodConfig, learned: Collection[str]) -> None:
    """A note where files or runs show tasks that are measured. (What the world's own lists have in
    common checks.py notes, before anything is read.)"""
    if any(getattr(config, name, ()) for name in LISTS_OF_FILES):
        held_out = {task.task_id for task in held_out_tasks(config)}
        if both := held_out & set(learned):
            distributed.say(
                f"note: {len(both)} of the {len(held_out)} held-out tasks are in the files that it "
                "learns from: success there says little about others (--eval-tasks)"
            )


def shown_by(config: SftConfig | EvolConfig, min_return: float | None = None) -> list[Conversation]:
    """The conversations of --data, or the oracle's. Collective.

    Args:
        min_return: leave out what in --data earned less; all there must then have a return.
    Raises:
        Misuse: a file that cannot be read or learned from; nothing in it; the oracle failed.
    """
    data, count = config.data, config.num_demonstrations

    def read() -> tuple[list[Conversation], Counter[str]]:
        counts: Counter[str] = Counter()
        if data:
            found = list(conversations_of("data", data, min_return, counts))
            # A weight there is AgentEvol's own, of another set; here all begin alike.
            found = [{n: v for n, v in each.items() if n != "weight"} for each in found]
            if not found:
                enough = "" if min_return is None else f" that earned {min_return:g}"
                raise ValueError(f"--data {' '.join(data)} holds no conversation{enough}")
            return found, counts
        return shown_in_each(config, count, config.seed, partial(manner_in, config)), counts

    distributed.join()
    with refusing():
        records, counts = distributed.first("reading what is shown", read)
    if out := counts["left out"]:
        why = "lost, or without a turn"
        why += "" if min_return is None else f", or a return below {min_return:g}"
        distributed.say(f"{out:,} of {counts['read']:,} conversations are left out: {why}")
    wanted = count * len(in_each(config))
    if not data and len(records) < wanted:
        distributed.say(
            f"the oracle showed {len(records)} of {wanted}: else it failed, or did the same"
        )
    return records


def count_learned(batch: Batch, epochs: float, clock: Clock) -> dict[str, Any]:
    """Metrics of what an update has learned from; its speed goes to the clock."""
    seconds = max(clock.values["time/update_s"], 1e-9)
    clock.values["update/tokens_per_s"] = int(batch.lengths.sum()) / seconds
    return {"data/policy_tokens": int(batch.loss_mask.sum()), "data/epoch": epochs}


def openings_of(batch: Batch, count: int) -> list[list[int]]:
    """What the first rows say before their first action: ids to sample behind."""
    rows = min(count, len(batch))
    first = [int(batch.loss_mask[row].argmax()) for row in range(rows)]
    return [batch.input_ids[row, : first[row]].tolist() for row in range(rows)]


def sync_if_measured(
    session: Session[Any], step: int, batch: Batch | None, clock: Clock
) -> dict[str, Any]:
    """The policy's weights to the sampler, checked there, where the step is evaluated next."""
    config, worker = session.config, session.worker
    if not config.plays or not is_due(step, config.eval_every, config.steps):
        return {}
    if batch is None:  # nothing has changed since they were sent
        return {}
    with session.saving_on_failure(learned=True), clock("time/sync_s"):
        difference, num_bytes = worker.sync_probed(step, openings_of(batch, worker.num_probes))
        clock.values["sync/bytes"] = num_bytes
        return {"sync/log_prob_diff_mean": difference}
    return {}


class Kept:
    """What each iteration has made, in a folder of the run: lines, and a summary that is written
    last."""

    def __init__(self, folder: Path, writes: bool) -> None:
        self.folder, self.writes = folder, writes

    @classmethod
    def in_run(cls, name: str, session: Session[Any], steps_per_iteration: int) -> Kept:
        """That of a run which begins, without anything, or goes on: what iterations later than its
        own made is dropped."""
        kept = cls(session.run.path / name, session.run.writes)
        begun = session.completed_step // steps_per_iteration + 1
        kept.forget_after(begun if session.config.resume else 0)
        return kept

    def of(
        self, iteration: int, make: Callable[[], tuple[Lines, dict[str, Any]]] | None = None
    ) -> tuple[Lines, dict[str, Any]]:
        """The iteration's lines and summary: found, or made and written. Collective.

        Raises:
            TrainingError: they are not there, and there is no way to make them any more.
        """
        found = distributed.first(
            "reading what an iteration has made", lambda: self._read(iteration)
        )
        if found is not None:
            return found
        if make is None:
            raise TrainingError(
                f"{self._path(iteration, 'json')} is gone, which the iteration learns from: put a "
                "copy back, or start a new run"
            )
        lines, summary = make()
        if self.writes:
            text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
            write_text(self._path(iteration, "jsonl"), text)
            write_json(self._path(iteration, "json"), summary)
        distributed.meet()
        return lines, summary

    def forget_after(self, iteration: int) -> None:
        """Drop what later iterations made, of a policy that a resumed run has not got any more."""
        if self.writes:
            for path in sorted(self.folder.glob("iteration_*")):
                found = re.fullmatch(r"iteration_(\d+)\.jsonl?", path.name)  # no copy of somebody's
                if found and int(found[1]) > iteration:
                    path.unlink()

    def _path(self, iteration: int, kind: str) -> Path:
        return self.folder / f"iteration_{iteration:03d}.{kind}"

    def _read(self, iteration: int) -> tuple[Lines, dict[str, Any]] | None:
        summary = self._path(iteration, "json")
        if not summary.exists():
            return None
        text = self._path(iteration, "jsonl").read_text(encoding="utf-8")
        # NOTE: not splitlines, which also cuts at U+2028, and JSON leaves that as it is.
        lines = [json.loads(line) for line in text.split("\n") if line]
        return lines, json.loads(summary.read_text(encoding="utf-8"))
