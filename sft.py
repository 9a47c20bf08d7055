"""Supervised fine-tuning: increase the likelihood of demonstrated actions.

    L(θ) = - 1/N Σ_{b,t} loss_mask · log π_θ(token_t | tokens_<t)

loss_mask is 1 on the tokens of demonstrated actions, including the end of the turn, and 0 on
prompts and observations, which the agent does not write. N is the number of tokens with mask 1 in
the batch.

    files, runs, an oracle ──> 1 conversations of the step ──> 2 update ──> 3 measure, log, save

Imitation needs neither a reward nor exploration, and it is fast. But the agent learns what to do
only in states that occur in the demonstrations. After its first mistake it is in a state that
no demonstration visits, so held-out success is more informative than the loss. train.py shows what
reinforcement learning adds.

    python sft.py --env textcraft                                  # an oracle's demonstrations
    python sft.py --data mine.jsonl --hold-out 0.1                 # your own: docs/data.md
    python sft.py --data runs/NAME --min-return 1                  # successful episodes of a run
    python sft.py --resume --run-dir runs/NAME                     # continue a stopped run

Several processes, LoRA, evaluation, Ctrl-C and the run's files work as in train.py. Read first:
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

from config import LOW_IN_IMITATION, Misuse, checked
from data import Example
from rollout import portion
from run.clock import Clock, advice
from run.methodworker import (
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
DATA = "data.json"  # file in the run: a hash of its conversations


@dataclass(frozen=True)
class SftConfig(MethodConfig):
    """Supervised fine-tuning on demonstrations."""

    method: ClassVar[str] = "sft"
    program: ClassVar[str] = "sft.py"
    ignored_by_sentinels: ClassVar[frozenset[str]] = LOW_IN_IMITATION
    zero_allowed: ClassVar[frozenset[str]] = frozenset({"steps"})  # then --epochs decides

    # The demonstrations
    data: tuple[str, ...] = ()
    """conversations to imitate: files in the AgentTraj or messages format (docs/data.md),
    or run folders;
    if not given, the environment's oracle demonstrates training tasks"""
    min_return: float | None = None
    """use only conversations with at least this return; if not given, all"""
    num_demonstrations: int = 128  # oracle demonstrations per environment, if there is no --data
    hold_out: float = 0.0
    """share of the conversations to hold out (0..1); those of the same task stay together;
    the held-out loss is measured at each evaluation;
    with --eval-every 0, it is measured after each epoch, and the lowest loss determines `best`"""
    # Training
    steps: int = 0  # total training steps, including those before a resume; 0: use --epochs
    epochs: int = 2  # passes over the conversations, if --steps is 0
    warm_start: str = "never"
    """how to get the initial policy: never (start from --model as it is),
    auto (do a warm start, as train.py does), or a checkpoint folder to start from"""
    env_weights: tuple[int, ...] = ()  # no effect: --num-demonstrations is per environment

    def check(self) -> None:
        super().check()
        self.require("hold_out", 0 <= self.hold_out < 1, "must be at least 0 and below 1")

    def unused_options(self) -> Iterator[tuple[str, str]]:
        yield from self.unused_without_play()
        if self.data:
            yield "num_demonstrations", UNUSED_WITH_DATA
        else:
            yield "min_return", "it selects from --data, which is not set"
        if self.steps:
            yield "epochs", f"--steps {self.steps} already sets the length"
        yield "env_weights", "every environment contributes the same number of demonstrations"

    @property
    def needs_environment(self) -> bool:
        return super().needs_environment or not self.data  # for the oracle


def train(config: SftConfig) -> Run:
    """Imitate the demonstrations; returns the closed run. Raises Misuse only before writing."""
    config = checked(config)
    examples = read_examples(config, config.min_return)
    digest = digest_of(examples)
    examples = drop_too_long(config, examples, "conversations", lambda e: [e])
    training, held_out = split_examples(config, examples)
    steps_per_epoch = math.ceil(len(training) / config.mini_batch_size)
    config = replace(config, steps=config.steps or config.epochs * steps_per_epoch)
    require_same_data(digest, config)
    with open_session(config, MethodWorker) as session:
        w = session.worker
        session.run.write_json(DATA, digest)
        session.evaluate_start()
        if held_out and not session.completed_step:
            loss = loss_on(w, held_out)
            distributed.say(f"step 0: held-out loss {loss:.4f} nats per token")
            note_loss(session, 0, loss)
        for step in session.steps_left():
            clock = Clock(vars(config))
            # ---------------------------------------------------------------------- 1 conversations
            key = f"sft/{config.seed}"
            rows, epochs = portion(step, len(training), config.mini_batch_size, key)
            batch = w.batch_of([training[row] for row in rows])

            # ----------------------------------------------------------------------------- 2 update
            w.sleep_sampler()
            w.set_learning_rates(step)
            with clock("time/update_s"):
                metrics = imitate(w.policy, batch, w.objective_for(len(batch)), seed=step)
            metrics |= data_metrics(batch, epochs, clock)
            metrics |= {"train/trajectories_used": len(batch)}

            # ---------------------------------------------------------------- 3 measure, log, save
            if held_out and is_due(step, config.eval_every or steps_per_epoch, config.steps):
                memory_advice = advice("time/log_probs_s", vars(config))
                with session.saving_on_failure(), memory_advice:
                    metrics["eval/loss"] = loss_on(w, held_out)
                    note_loss(session, step, metrics["eval/loss"])
            metrics |= sync_if_evaluated(session, step, batch, clock)
            metrics |= session.evaluate_if_due(step, clock)
            session.finish_step(step, metrics, clock)
    return session.run


def split_examples(
    config: SftConfig, examples: Sequence[Example]
) -> tuple[list[Example], list[Example]]:
    """Training and held-out conversations."""
    tasks = choose_held_out([example.task_id for example in examples], config.hold_out, config.seed)
    held_out = [example for example in examples if example.task_id in tasks]
    if held_out:
        distributed.say(f"held out: {len(held_out)} conversations of {len(tasks)} tasks")
    return [example for example in examples if example.task_id not in tasks], held_out


def choose_held_out(task_ids: Sequence[str], share: float, seed: int) -> set[str]:
    """Choose tasks that have this share of the conversations, or slightly less. A task is never
    split, because a run has several episodes of it, often with the same text.

    >>> sorted(choose_held_out([*"abacadebaf"], 0.2, seed=0))
    ['b']

    Raises:
        Misuse: no task would be left to train on.
    """
    sizes = Counter(task_ids)
    limit, held_out = max(1, round(share * len(task_ids))) if share else 0, set[str]()
    for task in random.Random(f"hold out {seed}").sample(list(sizes), len(sizes)):
        if sum(sizes[name] for name in held_out) + sizes[task] <= limit:
            held_out.add(task)
    if limit and not held_out:  # every task exceeds the share: take the smallest
        held_out = {min(sizes, key=lambda task: sizes[task])}
    if len(held_out) == len(sizes):
        raise Misuse(f"--hold-out {share} leaves none of {len(sizes)} tasks to train on")
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
    """Unless the policy plays, the lowest held-out loss determines the best checkpoint."""
    if not session.config.plays:
        session.note_evaluation(step, -loss)


def digest_of(examples: Sequence[Example]) -> dict[str, Any]:
    digest = hashlib.sha256()
    for example in examples:
        digest.update(json.dumps(example.record, sort_keys=True).encode())
    return {"conversations": len(examples), "sha256": digest.hexdigest()}


def require_same_data(digest: dict[str, Any], config: SftConfig) -> None:
    """Raise Misuse if a run is resumed with other conversations than it began with."""
    path = Path(config.run_dir or "") / DATA

    def is_same() -> bool:
        text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
        is_new = not any(path.parent.glob("checkpoints/step_*"))  # nothing has been learned yet
        return is_new or text == json.dumps(digest, indent=1) + "\n"

    if config.resume and not distributed.run_on_rank_0("comparing the data", is_same):
        raise Misuse(f"--data or {path} has changed: restore it, or start a new run")


def command_line(argv: Sequence[str] | None = None) -> int:
    """Parse, check and run; returns the exit code."""
    return run_command(argv, SUMMARY, SftConfig, train)


if __name__ == "__main__":
    sys.exit(command_line())
