"""AgentEvol: explore with what has been learned, keep what earned something, learn it, again
(arXiv 2406.04151).

    demonstrations ──┐
                     ├──> 1 the evolving set ──> 2 imitate it ──> 3 measure
    the policy plays ┘        each iteration: what it explored and earned joins the set

Why that should raise the return. What is wanted is the chance that a trajectory is a good one,

    log E_π[R] = log Σ_τ π(τ) R(τ)  ≥  Σ_τ q(τ) log( π(τ) R(τ) / q(τ) )      for any q (Jensen)

and the right side is equal to the left where q(τ) ∝ π(τ) R(τ). So two steps climb it in turn,
expectation-maximisation:

    explore   q is what the policy does, weighted by what it earned: sample, and keep R > 0
    learn     maximise E_q[log π(τ)]: imitation with the weights R, over the tokens it wrote

    L(θ) = - 1/N Σ_b w_b Σ_t loss_mask · log π_θ(token_t | tokens_<t)    w = R for each time that
                                                                         it was played so, and 1
                                                                         for a demonstration
(N: tokens of the batch with loss_mask 1.) What an iteration played alike joins the set as one row
that counts as often: q is π R, and how often is all that a sample shows of π. A set in which each
text counts once lifts the rare success beside the common one, and pulls the policy apart.

An iteration goes on from the weights of the one before, and what it explored joins the
demonstrations. The paper learns anew from the base policy each time, which is where the run began,
its warm start included, from a set that grows (--learn-from base --merge-with all): nothing of an
iteration's mistakes is left in the weights, and as far as the last one came has to be gone again.
Without exploration it is behaviour cloning, and it is no more than that where what is explored
never enters the set: of each iteration the run keeps the set, with where each trajectory is from,
what it earned and how much it counts, in `evolving/iteration_001.jsonl`.

Against RL: no baseline and no negative example, so that a mistake is never made less likely, only
crowded out; and an iteration's data is used for several steps, for imitation need not be on-policy.

(AgentGym's script learns before it explores for the first time, and makes an epoch of each set;
here the first exploration is the start's, which wants a warm start, and iterations have as many
steps.)

    python agentevol.py --env textcraft
    python agentevol.py --data demos.json --iterations 4 --steps 96
    python agentevol.py --env textcraft --learn-from base --merge-with all
    python agentevol.py --resume --run-dir runs/NAME

Read first: sft.py. Read next: train.py.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from config import Misuse, refusing
from conversations import ROUNDING, Conversation, unit_return_of
from reporting.sentinels import Sentinels
from rollout import portion
from run import shell
from run.clock import Clock
from run.methodworker import (
    Kept,
    MethodWorker,
    count_learned,
    fitting,
    shown_by,
    sync_if_measured,
)
from run.progress import phase
from run.rundir import Run
from run.session import Session, at_work
from runtime.methods import EvolConfig, check_method, is_kept
from scale import distributed
from update import imitate

SUMMARY = (__doc__ or "").split("\n\n")[0]

DEMONSTRATED = "demonstration"  # an origin; others are "iteration 1", "iteration 2", ...


def train(config: EvolConfig) -> Run:
    """Evolve as the options say; the run, closed.

    Raises:
        Misuse: an option, or what it names, cannot work; nothing was written.
        KeyboardInterrupt: after Ctrl-C, once all is saved.
        shell.FAILURES: what ended it, in a line; what was saved stays.
    """
    config = shell.checked(config, check_method)
    length = config.steps_per_iteration
    given = demonstrated(config)
    with at_work(config, MethodWorker) as session:
        w = session.worker
        kept = Kept.in_run("evolving", session, length)
        session.evaluate_start()
        evolving: list[Conversation] = []
        for step in session.steps_left():
            clock = Clock(vars(config))
            iteration, place = divmod(step - 1, length)
            metrics: dict[str, Any] = {}
            # ------------------------------------------------------------------- 1 the evolving set
            if place == 0 or not evolving:
                with session.saving_on_failure(), clock("time/rollout_s"):
                    evolving, found = evolve(session, kept, step, given)
                    w.rest()  # while the weights are still those of a step
                if place == 0:
                    metrics |= found
                    if iteration:  # the first begins with the start as it is
                        begin_again(w, config)
                        if config.learn_from == "base":
                            session.sentinels = Sentinels()

            # --------------------------------------------------------------------------- 2 imitate
            key = f"evolve/{config.seed}/{iteration}"
            rows, epochs = portion(place + 1, len(evolving), config.mini_batch_size, key)
            batch = w.batch_of([evolving[row] for row in rows])
            with session.saving_on_failure():
                w.rest()
            w.set_learning_rates(place + 1)
            with clock("time/update_s"):
                metrics |= imitate(w.policy, batch, w.portions(len(batch)), seed=step)
            metrics |= count_learned(batch, epochs, clock)

            # ----------------------------------------------------------------- 3 measure, log, save
            metrics |= sync_if_measured(session, step, batch, clock)
            metrics |= session.evaluate_if_due(step, clock)
            session.finish_step(step, metrics, clock)
    return session.run


# ------------------------------------------------------------------------------ the evolving set


def demonstrated(config: EvolConfig) -> list[Conversation]:
    """What the set begins with: demonstrations, each counting 1, and of --data what has a return
    by that, as what is explored. Collective.

    Raises:
        Misuse: nothing is left of it.
    """
    if is_kept(config):
        return []  # the run has them already, in the set of its first iteration
    found = []
    for record in shown_by(config):
        with refusing():
            earned = unit_return_of(record)
        if earned is None or config.ignore_returns:
            found.append(record | {"origin": DEMONSTRATED, "weight": 1.0})
        elif is_enough(earned, config):
            weight = 1.0 if config.weighting == "one" else earned
            found.append(record | {"origin": DEMONSTRATED, "weight": weight})
    if not found:
        raise Misuse(f"nothing in --data {what_is_enough(config)}")
    return fitting(config, found, "demonstrations")


def evolve(
    session: Session[MethodWorker], kept: Kept, step: int, given: Sequence[Conversation]
) -> tuple[list[Conversation], dict[str, Any]]:
    """The set of a step's iteration, and metrics of how it came: found in the run, or what was
    there before and what the policy, as it is now, has explored.

    Raises:
        TrainingError: the run has lost the set of an iteration that has begun.
    """
    w, config = session.worker, session.config
    assert isinstance(config, EvolConfig)
    iteration, place = divmod(step - 1, config.steps_per_iteration)

    def make() -> tuple[list[Conversation], dict[str, Any]]:
        before = kept.of(iteration)[0] if iteration else list(given)
        if config.merge_with == "demonstrations":
            before = [record for record in before if record["origin"] == DEMONSTRATED]
        said, metrics = w.explore(
            iteration + 1, step, config.tasks_per_iteration, config.group_size
        )
        new = selected(said, config, f"iteration {iteration + 1}", before)
        evolving = before + new
        origins = Counter(record["origin"] for record in evolving)
        told = ", ".join(f"{count} from {origin}" for origin, count in origins.items())
        distributed.say(f"iteration {iteration + 1}: {len(evolving)} trajectories, {told}")
        if not new:
            count = sum(config.ignore_returns or is_enough(r["return"], config) for r in said)
            which = what_is_enough(config)
            which += " and is not in the set already" if count else ""
            whole = config.merge_with == "all"
            rest = "the set stays as it was" if whole else "the demonstrations are the set"
            distributed.say(
                f"iteration {iteration + 1}: nothing of {len(said)} explored {which}; {rest}"
            )
        metrics |= {
            "train/trajectories_used": len(new),
            "data/evolving": len(evolving),
            "data/evolving_weight": sum(record["weight"] for record in evolving) / len(evolving),
        }
        return evolving, {"metrics": metrics, "origins": dict(origins)}

    evolving, summary = kept.of(iteration + 1, None if place else make)
    return evolving, summary["metrics"]


def selected(
    said: Sequence[Conversation],
    config: EvolConfig,
    origin: str,
    before: Sequence[Conversation] = (),
) -> list[Conversation]:
    """What of an iteration's exploration joins the set: of each task the best, each with its origin
    and its weight. What was played alike joins as one, with the sum of what it earned each time,
    for q(τ) ∝ π(τ) R(τ), and π is seen in nothing else. Without --weighting played it counts once,
    and not at all where the set had it before (an easy task would count once more each time)."""
    chosen: list[Conversation] = []
    per_task: Counter[str] = Counter()
    blind, played = config.ignore_returns, config.weighting == "played"
    good = [r for r in said if blind or is_enough(r["return"], config)]
    sums: dict[Any, float] = {}
    for record in good:
        earned = 1.0 if blind else record["return"]
        sums[_alike(record)] = sums.get(_alike(record), 0.0) + earned
    joined: set[Any] = set()
    had = set() if played else {_texts(record) for record in before}
    for record in good if blind else sorted(good, key=lambda r: -r["return"]):  # stable: as played
        alike, task = _alike(record), record["item_id"]
        if per_task[task] >= config.keep_per_task or alike in joined or alike[1] in had:
            continue
        per_task[task] += 1
        joined.add(alike)
        once = 1.0 if blind or config.weighting == "one" else record["return"]
        chosen.append(record | {"origin": origin, "weight": sums[alike] if played else once})
    return chosen


def _alike(record: Conversation) -> tuple[str, tuple[str, ...]]:
    return record["item_id"], _texts(record)


def is_enough(earned: float, config: EvolConfig) -> bool:
    """--min-return, and in any case something: what counts 0 teaches nothing."""
    return earned > ROUNDING and earned > config.min_return - ROUNDING


def what_is_enough(config: EvolConfig) -> str:
    least = config.min_return
    return f"earned --min-return {least:g}" if least else "earned anything"


def _texts(record: Conversation) -> tuple[str, ...]:
    """What the world said and what was answered, up to the last action; the world's last word is
    not always kept."""
    values = [turn["value"] for turn in record["conversations"]]
    return tuple(values[: -1 if record["conversations"][-1]["from"] == "human" else None])


def begin_again(worker: MethodWorker, config: EvolConfig) -> None:
    """An iteration's first weights: the run's start, or, with a fresh optimizer, the last ones. The
    sampler rests by then."""
    if config.learn_from == "base":
        with phase("back to the base policy"):
            worker.forget_policy()
            worker.policy = worker.fresh_policy()
    else:
        worker.policy = worker.renewed(worker.policy)


# --------------------------------------------------------------------------------- the command line


def command_line(argv: Sequence[str] | None = None) -> int:
    """Parse, check, run; the exit code."""
    return shell.command_line(argv, SUMMARY, EvolConfig, train, check_method)


if __name__ == "__main__":
    sys.exit(command_line())
