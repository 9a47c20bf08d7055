"""Supervised fine-tuning: make what was shown likelier, and nothing else.

    L(θ) = - 1/N Σ_{b,t} loss_mask · log π_θ(token_t | tokens_<t)

loss_mask is 1 on the actions that were shown, their end-of-turn included, and 0 on prompt and
observations: an agent does not write what the world says; N is how many tokens of the batch have
the 1. A conversation is encoded by the path that sampling takes, token for token
(conversations.py).

    files, runs, an oracle ──> 1 conversations of the step ──> 2 update ──> 3 measure, log, save

Imitation needs no reward and no exploration, and learns fast. It learns to do what was shown where
it was shown; after its own first mistake the agent is where no teacher has been, and held-out
success says more than the loss. What reinforcement adds to it: train.py.

    python sft.py --env textcraft                                  # an oracle's demonstrations
    python sft.py --data mine.jsonl --hold-out 0.1                 # your own: docs/data.md
    python sft.py --data runs/NAME --min-return 1                  # what earned so much in a run
    python sft.py --resume --run-dir runs/NAME                     # goes on where it was stopped

Several processes, adapters, evaluation, Ctrl-C and the run's files are as in train.py. Read first:
conversations.py. Read next: dpo.py, agentevol.py.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from config import Misuse
from conversations import Conversation
from rollout import portion
from run import shell
from run.clock import Clock, advice
from run.methodworker import MethodWorker, count_learned, fitting, shown_by, sync_if_measured
from run.rundir import Run
from run.session import Session, at_work, is_due
from runtime.methods import SftConfig, check_method
from scale import distributed
from update import imitate, score_policy

SUMMARY = (__doc__ or "").split("\n\n")[0]

DATA = "data.json"  # of a run: which conversations it learns from


def train(config: SftConfig) -> Run:
    """Imitate as the options say; the run, closed.

    Raises:
        Misuse: an option, or what it names, cannot work; nothing was written.
        KeyboardInterrupt: after Ctrl-C, once all is saved.
        shell.FAILURES: what ended it, in a line; what was saved stays.
    """
    config = shell.checked(config, check_method)
    records = shown_by(config, config.min_return)
    fit = fitting(config, records, "conversations")  # which decides how many steps there are
    parts = parted([str(r.get("item_id")) for r in fit], config.hold_out, config.seed)
    shown, hidden = ([fit[i] for i in part] for part in parts)
    if hidden:
        tasks = len({str(record.get("item_id")) for record in hidden})
        distributed.say(f"held out: {len(hidden)} of {len(fit)} conversations, of {tasks} tasks")
    epoch = math.ceil(len(shown) / config.mini_batch_size)  # steps
    config = replace(config, steps=config.steps or config.epochs * epoch)
    require_same(records, config)
    with at_work(config, MethodWorker) as session:
        w = session.worker
        session.run.write_json(DATA, digest_of(records))
        session.evaluate_start()
        if hidden and not session.completed_step:
            loss = loss_on(w, hidden)
            distributed.say(f"step 0: held-out loss {loss:.4f} nats a token")
            note_loss(session, 0, loss)
        for step in session.steps_left():
            clock = Clock(vars(config))
            # ---------------------------------------------------------------------- 1 conversations
            key = f"sft/{config.seed}"
            rows, epochs = portion(step, len(shown), config.mini_batch_size, key)
            batch = w.batch_of([shown[row] for row in rows])

            # ----------------------------------------------------------------------------- 2 update
            with session.saving_on_failure():
                w.rest()
            w.set_learning_rates(step)
            with clock("time/update_s"):
                metrics = imitate(w.policy, batch, w.portions(len(batch)), seed=step)
            metrics |= count_learned(batch, epochs, clock)
            metrics |= {"train/trajectories_used": len(batch)}

            # ---------------------------------------------------------------- 3 measure, log, save
            if hidden and is_due(step, config.eval_every or epoch, config.steps):
                in_time = advice("time/log_probs_s", vars(config))  # where memory is short
                with session.saving_on_failure(learned=True), in_time:
                    metrics["eval/loss"] = loss_on(w, hidden)
                    note_loss(session, step, metrics["eval/loss"])
            metrics |= sync_if_measured(session, step, batch, clock)
            metrics |= session.evaluate_if_due(step, clock)
            session.finish_step(step, metrics, clock)
    return session.run


def parted(tasks: Sequence[str], share: float, seed: int) -> tuple[list[int], list[int]]:
    """Which conversations are learned, and which are held out: all of a task on one side, for a run
    has tried each several times, and what is learned word for word would be measured.

    Args:
        tasks: each conversation's.

    >>> learned, held_out = parted(["a", "b", "a", "c", "a", "d", "e", "b", "a", "f"], 0.2, seed=0)
    >>> held_out, sorted(learned + held_out) == list(range(10))
    ([1, 7], True)

    Raises:
        Misuse: nothing would be left to learn.
    """
    members: dict[str, list[int]] = {}
    for place, task in enumerate(tasks):
        members.setdefault(task, []).append(place)
    wanted, held_out = max(1, round(share * len(tasks))) if share else 0, list[int]()
    for task in random.Random(f"hold out {seed}").sample(list(members), len(members)):
        if len(held_out) + len(members[task]) <= wanted:
            held_out += members[task]
    if wanted and not held_out:  # every task has more: the smallest
        held_out = min(members.values(), key=len)
    learned = sorted(set(range(len(tasks))) - set(held_out))
    if not learned:
        raise Misuse(
            f"--hold-out {share} leaves none of {len(tasks)} conversations ({len(members)} tasks) "
            "to learn from"
        )
    return learned, sorted(held_out)


def loss_on(worker: MethodWorker, records: Sequence[Conversation]) -> float:
    """The loss of what is not learned (nats a token of its actions). Collective."""
    worker.rest()
    total, tokens, size = 0.0, 0.0, worker.config.mini_batch_size
    for start in range(0, len(records), size):
        batch = worker.batch_of(records[start : start + size])
        objective = worker.portions(len(batch))
        log_probs = score_policy(worker.policy.model, batch, objective, worker.device)  # (B, T)
        total -= float((log_probs * batch.loss_mask).sum())
        tokens += float(batch.loss_mask.sum())
    return total / tokens


def note_loss(session: Session[MethodWorker], step: int, loss: float) -> None:
    """Where nothing is played the lowest held-out loss says which checkpoint is the best."""
    if not session.config.plays:
        session.note_evaluation(step, -loss)


def digest_of(records: Sequence[Conversation]) -> dict[str, Any]:
    """What tells the conversations from others."""
    digest = hashlib.sha256()
    for record in records:
        digest.update(json.dumps(record, sort_keys=True).encode())
    return {"conversations": len(records), "sha256": digest.hexdigest()}


def require_same(records: Sequence[Conversation], config: SftConfig) -> None:
    """A resumed run learns from what it began with, or not at all.

    Raises:
        Misuse: the files have changed since.
    """
    path = Path(config.run_dir or "") / DATA

    def is_same() -> bool:
        if not config.resume or not path.exists():
            return True
        return bool(json.loads(path.read_text(encoding="utf-8")) == digest_of(records))

    if not distributed.first("comparing the data", is_same):
        what = f"--data {' '.join(config.data)}" if config.data else "what the oracle shows"
        raise Misuse(f"{what} is not what {config.run_dir} began with; start a new run")


def command_line(argv: Sequence[str] | None = None) -> int:
    """Parse, check, run; the exit code."""
    return shell.command_line(argv, SUMMARY, SftConfig, train, check_method)


if __name__ == "__main__":
    sys.exit(command_line())
