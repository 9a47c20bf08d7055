"""Supervised fine-tuning: make what was shown likelier, and nothing else.

    L(θ) = - 1/N Σ_{b,t} loss_mask · log π_θ(token_t | tokens_<t)

loss_mask is 1 on the actions that were shown, their end-of-turn included, and 0 on prompt and
observations, which the agent does not write; N is the number of tokens in the batch with mask 1.

    files, runs, an oracle ──> 1 conversations of the step ──> 2 update ──> 3 measure, log, save

Imitation needs no reward and no exploration, and learns fast. It learns what to do in the states
that were shown; after its own first mistake the agent is in a state that no teacher visited, so
held-out success says more than the loss. For what reinforcement adds, see train.py.

    python sft.py --env textcraft                                  # an oracle's demonstrations
    python sft.py --data mine.jsonl --hold-out 0.1                 # your own: docs/data.md
    python sft.py --data runs/NAME --min-return 1                  # the good episodes of a run
    python sft.py --resume --run-dir runs/NAME                     # goes on where it was stopped

Several processes, adapters, evaluation, Ctrl-C and the run's files are as in train.py. Read first:
data.py. Read next: dpo.py, agentevol.py.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from config import Misuse, checked
from data import Example
from rollout import portion
from run.clock import Clock, advice
from run.methodworker import (
    LOW_IN_IMITATION,
    UNUSED_WITH_DATA,
    MethodConfig,
    MethodWorker,
    data_metrics,
    drop_too_long,
    read_examples,
    sync_if_evaluated,
)
from run.rundir import Run
from run.session import Session, is_due, open_session
from run.session import command_line as run_command
from scale import distributed
from update import imitate, score_policy

SUMMARY = (__doc__ or "").split("\n\n")[0]
DATA = "data.json"  # of a run: a digest of the conversations that it learns from


@dataclass(frozen=True)
class SftConfig(MethodConfig):
    """Supervised fine-tuning: make what was shown likelier."""

    method: ClassVar[str] = "sft"
    program: ClassVar[str] = "sft.py"
    ignored_by_sentinels: ClassVar[frozenset[str]] = LOW_IN_IMITATION
    zero_allowed: ClassVar[frozenset[str]] = frozenset({"steps"})  # --epochs decide then

    # What is imitated
    data: tuple[str, ...] = ()
    """conversations: files of AgentTraj or messages, JSON or a line each, and runs; none: the
    environment's oracle demonstrates training tasks"""
    min_return: float | None = None  # of --data: only what earned at least this (none: all)
    num_demonstrations: int = 128  # of the oracle, per environment, without --data (episodes)
    hold_out: float = 0.0
    """share of the conversations, all of a task or none, that is not learned but measured: its loss
    at each evaluation, or after each epoch when nothing is played; the lowest is `best` (0..1)"""
    # How it learns
    steps: int = 0  # training steps in total, also on resume; 0: as many as --epochs take (steps)
    epochs: int = 2  # passes over the conversations, without --steps (epochs)
    warm_start: str = "never"  # from --model as it is; auto: from its warm start; or a folder
    env_weights: tuple[int, ...] = ()  # of the other programs: each environment shows as many

    def check(self) -> None:
        super().check()
        self.require("hold_out", 0 <= self.hold_out < 1, "must be a share: 0 or more, and below 1")

    def unused_options(self) -> Iterator[tuple[str, str]]:
        yield from self.unused_without_play()
        if self.data:
            yield "num_demonstrations", UNUSED_WITH_DATA
        else:
            yield "min_return", "it chooses from --data: give that too"
        if self.steps:
            yield "epochs", f"--steps {self.steps} decides how far; give one of the two"
        yield "env_weights", "nothing is played to learn from, each environment shows as many"

    @property
    def needs_environment(self) -> bool:
        return super().needs_environment or not self.data  # its oracle demonstrates


def train(config: SftConfig) -> Run:
    """Imitate as the options say; the run, closed. Raises Misuse before anything is written."""
    config = checked(config)
    examples = read_examples(config, config.min_return)
    digest = digest_of(examples)
    learned, held_out = split_examples(
        config, drop_too_long(config, examples, "conversations", lambda e: [e])
    )
    epoch = math.ceil(len(learned) / config.mini_batch_size)  # steps
    config = replace(config, steps=config.steps or config.epochs * epoch)
    require_same_data(digest, config)
    with open_session(config, MethodWorker) as session:
        w = session.worker
        session.run.write_json(DATA, digest)
        session.evaluate_start()
        if held_out and not session.completed_step:
            loss = loss_on(w, held_out)
            distributed.say(f"step 0: held-out loss {loss:.4f} nats a token")
            note_loss(session, 0, loss)
        for step in session.steps_left():
            clock = Clock(vars(config))
            # ---------------------------------------------------------------------- 1 conversations
            key = f"sft/{config.seed}"
            rows, epochs = portion(step, len(learned), config.mini_batch_size, key)
            batch = w.batch_of([learned[row] for row in rows])

            # ----------------------------------------------------------------------------- 2 update
            with session.saving_on_failure():
                w.sleep_sampler()
            w.set_learning_rates(step)
            with clock("time/update_s"):
                metrics = imitate(w.policy, batch, w.objective_for(len(batch)), seed=step)
            metrics |= data_metrics(batch, epochs, clock)
            metrics |= {"train/trajectories_used": len(batch)}

            # ---------------------------------------------------------------- 3 measure, log, save
            if held_out and is_due(step, config.eval_every or epoch, config.steps):
                in_time = advice("time/log_probs_s", vars(config))  # where memory is short
                with session.saving_on_failure(weights_changed=True), in_time:
                    metrics["eval/loss"] = loss_on(w, held_out)
                    note_loss(session, step, metrics["eval/loss"])
            metrics |= sync_if_evaluated(session, step, batch, clock)
            metrics |= session.evaluate_if_due(step, clock)
            session.finish_step(step, metrics, clock)
    return session.run


def split_examples(
    config: SftConfig, examples: Sequence[Example]
) -> tuple[list[Example], list[Example]]:
    """What is learned, and what is held out."""
    tasks = choose_held_out([example.task_id for example in examples], config.hold_out, config.seed)
    held_out = [example for example in examples if example.task_id in tasks]
    if held_out:
        distributed.say(f"held out: {len(held_out)} conversations of {len(tasks)} tasks")
    return [example for example in examples if example.task_id not in tasks], held_out


def choose_held_out(task_ids: Sequence[str], share: float, seed: int) -> set[str]:
    """Tasks with this share of the conversations, or a little less. All of a task is held out or
    nothing: a run has tried it several times, often in the same words.

    >>> sorted(choose_held_out([*"abacadebaf"], 0.2, seed=0))
    ['b']

    Raises:
        Misuse: nothing would be left to learn.
    """
    sizes = Counter(task_ids)
    wanted, held_out = max(1, round(share * len(task_ids))) if share else 0, set[str]()
    for task in random.Random(f"hold out {seed}").sample(list(sizes), len(sizes)):
        if sum(sizes[other] for other in held_out) + sizes[task] <= wanted:
            held_out.add(task)
    if wanted and not held_out:  # every task has more than the share: take the smallest
        held_out = {min(sizes, key=lambda task: sizes[task])}
    if len(held_out) == len(sizes):
        raise Misuse(f"--hold-out {share} leaves none of {len(sizes)} tasks to learn from")
    return held_out


def loss_on(worker: MethodWorker, examples: Sequence[Example]) -> float:
    """The loss on held-out examples (nats per action token). Collective."""
    worker.sleep_sampler()
    total, tokens, size = 0.0, 0.0, worker.config.mini_batch_size
    for start in range(0, len(examples), size):
        batch = worker.batch_of(examples[start : start + size])
        objective = worker.objective_for(len(batch))
        log_probs = score_policy(worker.policy.model, batch, objective, worker.device)  # (B, T)
        total -= float((log_probs * batch.loss_mask).sum())
        tokens += float(batch.loss_mask.sum())
    return total / tokens


def note_loss(session: Session[MethodWorker], step: int, loss: float) -> None:
    """When nothing is played, the lowest held-out loss decides which checkpoint is the best."""
    if not session.config.plays:
        session.note_evaluation(step, -loss)


def digest_of(examples: Sequence[Example]) -> dict[str, Any]:
    digest = hashlib.sha256()
    for example in examples:
        digest.update(json.dumps(example.record, sort_keys=True).encode())
    return {"conversations": len(examples), "sha256": digest.hexdigest()}


def require_same_data(digest: dict[str, Any], config: SftConfig) -> None:
    """Refuse to resume with other conversations than the run began with."""
    path = Path(config.run_dir or "") / DATA

    def is_same() -> bool:
        return not path.exists() or bool(json.loads(path.read_text(encoding="utf-8")) == digest)

    if config.resume and not distributed.run_on_rank_0("comparing the data", is_same):
        raise Misuse(f"--data is not what {config.run_dir} began with; start a new run")


def command_line(argv: Sequence[str] | None = None) -> int:
    """Parse, check, run; the exit code."""
    return run_command(argv, SUMMARY, SftConfig, train)


if __name__ == "__main__":
    sys.exit(command_line())
