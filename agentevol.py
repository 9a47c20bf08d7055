"""AgentEvol: explore with what has been learned, keep what earned something, learn it, again
(arXiv 2406.04151).

    demonstrations ──┐
                     ├──> 1 the evolving set ──> 2 imitate it ──> 3 measure
    the policy plays ┘        each iteration: what it explored and earned joins the set

Why should that raise the return? The goal is the chance that a trajectory is a good one,

    log E_π[R] = log Σ_τ π(τ) R(τ)  ≥  Σ_τ q(τ) log( π(τ) R(τ) / q(τ) )      for any q (Jensen)

with equality where q(τ) ∝ π(τ) R(τ). Two steps climb the bound in turn, expectation-maximisation:

    explore   q is what the policy does, weighted by the return: sample, and keep R > 0
    learn     maximise E_q[log π(τ)]: imitation with weights R, over the tokens it wrote

    L(θ) = - 1/N Σ_b w_b Σ_t loss_mask · log π_θ(token_t | tokens_<t)    N tokens with loss_mask 1

w is 1 for a demonstration. Trajectories with the same text join the set as one row, whose w is the
sum of their returns: how often a text was sampled is all that a sample shows of π. A set that
counts each text once would lift the rare success as much as the common one.

An iteration continues from the last one's weights, and its exploration joins the demonstrations.
The paper instead restarts from the base policy, with a set that grows (--learn-from base
--merge-with all): mistakes of an iteration do not stay in the weights, but its progress has to be
made again. AgentGym's script also learns once before it explores; here the first exploration is
the start's, which therefore needs a warm start.

The set of each iteration is in `evolving/iteration_001.jsonl`: where each trajectory is from, what
it earned, how much it counts. Against RL: no baseline and no negative example, so a mistake is
never made less likely, only crowded out; but the data serves several steps.

    python agentevol.py --env textcraft
    python agentevol.py --data demos.json --iterations 4 --steps 96
    python agentevol.py --env textcraft --learn-from base --merge-with all

Read first: sft.py. Read next: train.py.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from config import Misuse, checked
from data import ROUNDING, Example, Record, encode
from reporting.sentinels import Sentinels
from rollout import portion
from run.clock import Clock
from run.methodworker import (
    LOW_IN_IMITATION,
    UNUSED_WITH_DATA,
    IteratedConfig,
    IterationFiles,
    MethodConfig,
    MethodWorker,
    data_metrics,
    drop_too_long,
    read_examples,
    sync_if_evaluated,
)
from run.progress import phase
from run.rundir import Run
from run.session import Session, open_session
from run.session import command_line as run_command
from scale import distributed
from update import imitate

SUMMARY = (__doc__ or "").split("\n\n")[0]
DEMONSTRATED = "demonstration"  # an origin; the others are "iteration 1", "iteration 2", ...


@dataclass(frozen=True)
class EvolConfig(IteratedConfig):
    """AgentEvol: explore, keep what earned something, imitate it, again."""

    method: ClassVar[str] = "agentevol"
    program: ClassVar[str] = "agentevol.py"
    folder: ClassVar[str] = "evolving"
    ignored_by_sentinels: ClassVar[frozenset[str]] = LOW_IN_IMITATION
    paper_values: ClassVar[dict[str, Any]] = MethodConfig.paper_values | {
        "learn_from": "base",
        "merge_with": "all",
    }

    # The evolving set
    data: tuple[str, ...] = ()
    """demonstrations to begin with: files of AgentTraj or messages, and runs; none: the
    environment's oracle demonstrates training tasks, as it did for the warm start"""
    num_demonstrations: int = 32  # of the oracle, per environment, without --data (episodes)
    iterations: int = 3  # times that the policy explores, each followed by as many steps
    tasks_per_iteration: int = 64  # tasks that it explores (tasks)
    min_return: float = 0.0  # least return that is kept, or taken from --data; 0 never is (0..1)
    keep_per_task: int = 8  # of one task and iteration, the best first (trajectories)
    weighting: Literal["played", "return", "one"] = "played"
    """how much a kept trajectory counts: played: its return, as often as it was played alike;
    return: once; one: 1, as a demonstration"""
    ignore_returns: bool = False  # control: keep what is explored first, as if it had earned 1
    merge_with: Literal["all", "demonstrations"] = "demonstrations"
    """what an iteration's exploration joins: all that was there before, or only the demonstrations
    [paper: all]"""
    learn_from: Literal["base", "last"] = "last"
    """the weights that an iteration begins with: the run's start, or the last iteration's [paper:
    base]"""
    # How it learns
    steps: int = 12  # training steps in total, in equal parts (steps)
    mini_batch_size: int = 64  # trajectories of a step (trajectories)
    learning_rate: float = 4e-5  # AdamW, at the beginning of each iteration [paper: 1e-5]
    eval_every: int = 4  # evaluate held-out tasks every N steps, first and after all; 0: never
    save_every: int = 4  # write a checkpoint every N steps, and after the last

    def unused_options(self) -> Iterator[tuple[str, str]]:
        if self.data:
            yield "num_demonstrations", UNUSED_WITH_DATA
        if self.ignore_returns:
            if self.weighting == "return":
                yield "weighting", "one or played, --ignore-returns looks at no return"
            yield "min_return", "leave it out, --ignore-returns looks at no return"
        if self.iterations == 1:
            yield "learn_from", "leave it out, one iteration begins once"
            yield "merge_with", "leave it out, the only iteration joins the demonstrations"

    @property
    def learns_from_play(self) -> bool:
        return True

    @property
    def plays(self) -> bool:
        return True

    @property
    def steps_per_schedule(self) -> int:
        return self.steps_per_iteration


def train(config: EvolConfig) -> Run:
    """Evolve as the options say; the run, closed. Raises Misuse before anything is written."""
    config = checked(config)
    demonstrations = initial_set(config)
    with open_session(config, MethodWorker) as session:
        w = session.worker
        files = IterationFiles.from_session(session)
        session.evaluate_start()
        evolving: list[Example] = []
        for step in session.steps_left():
            clock = Clock(vars(config))
            iteration, place = divmod(step - 1, config.steps_per_iteration)
            metrics: dict[str, Any] = {}
            # ------------------------------------------------------------------- 1 the evolving set
            with session.saving_on_failure():
                if place == 0 or not evolving:
                    with clock("time/rollout_s"):
                        evolving, explored = evolve(session, files, step, demonstrations)
                w.sleep_sampler()  # while the weights are still those of a step
            if place == 0:
                metrics |= explored
                if iteration:  # the first begins with the start as it is
                    start_iteration(session, config)

            # --------------------------------------------------------------------------- 2 imitate
            key = f"evolve/{config.seed}/{iteration}"
            rows, epochs = portion(place + 1, len(evolving), config.mini_batch_size, key)
            batch = w.batch_of([evolving[row] for row in rows])
            w.set_learning_rates(place + 1)
            with clock("time/update_s"):
                metrics |= imitate(w.policy, batch, w.objective_for(len(batch)), seed=step)
            metrics |= data_metrics(batch, epochs, clock)

            # ----------------------------------------------------------------- 3 measure, log, save
            metrics |= sync_if_evaluated(session, step, batch, clock)
            metrics |= session.evaluate_if_due(step, clock)
            session.finish_step(step, metrics, clock)
    return session.run


# ------------------------------------------------------------------------------ the evolving set


def initial_set(config: EvolConfig) -> list[Record]:
    """The demonstrations that the set begins with, of weight 1; what has a return in --data counts
    by it, like exploration. Collective.

    Raises:
        Misuse: nothing is left of it.
    """
    if config.has_saved_inputs:
        return []  # the run holds them already, in the set of its first iteration
    chosen = []
    for example in read_examples(config):
        total, weight = example.total_return, 1.0
        if total is not None and not -ROUNDING <= total <= 1 + ROUNDING:
            raise Misuse(
                f'--data: conversation {example.task_id}: "return" is {total:g}, expected 0 to 1: '
                "divide returns by the highest possible one"
            )
        if total is not None and not config.ignore_returns:
            if not is_enough(total, config):
                continue
            weight = 1.0 if config.weighting == "one" else total
        noted = {"origin": DEMONSTRATED, "weight": weight}
        chosen.append(replace(example, record=example.record | noted))
    if not chosen:
        raise Misuse(f"nothing in --data earned more than 0 and --min-return {config.min_return:g}")
    fit = drop_too_long(config, chosen, "demonstrations", lambda example: [example])
    return [example.record for example in fit]


def evolve(
    session: Session[MethodWorker], files: IterationFiles, step: int, first: Sequence[Record]
) -> tuple[list[Example], dict[str, Any]]:
    """The set of a step's iteration, and metrics of how it came about: read back from the run, or
    the set before and what the policy, as it is now, explores.

    Raises:
        TrainingError: the run has lost the set of an iteration that has begun.
    """
    w, config = session.worker, session.config
    assert isinstance(config, EvolConfig)
    iteration, place = divmod(step - 1, config.steps_per_iteration)
    saved = files.read(iteration + 1, must_exist=place > 0)
    if saved is None:
        before = list(first)
        if iteration and (last := files.read(iteration, must_exist=True)):
            before = last[0]
        if config.merge_with == "demonstrations":
            before = [record for record in before if record["origin"] == DEMONSTRATED]
        examples, metrics = w.explore(step)
        explored = [example.record for example in examples]
        new = select(explored, config, f"iteration {iteration + 1}", before)
        evolving = before + new
        origins = Counter(record["origin"] for record in evolving)
        counts = ", ".join(f"{count} from {origin}" for origin, count in origins.items())
        distributed.say(f"iteration {iteration + 1}: {len(evolving)} trajectories, {counts}")
        metrics |= {
            "train/trajectories_used": len(new),
            "data/evolving": len(evolving),
            "data/evolving_weight": sum(record["weight"] for record in evolving) / len(evolving),
        }
        saved = evolving, {"metrics": metrics, "origins": dict(origins)}
        files.write(iteration + 1, *saved)
    records, summary = saved
    return [encode(w.chat, record) for record in records], summary["metrics"]


def select(
    explored: Sequence[Record], config: EvolConfig, origin: str, before: Sequence[Record] = ()
) -> list[Record]:
    """The explored records that join the set, each with its origin and weight: the best of each
    task. Equal texts join as one; with --weighting played its weight is the sum of what they
    earned, for q(τ) ∝ π(τ) R(τ). Otherwise it counts once, and not again if the set had it before:
    an easy task would gain weight with each iteration."""
    blind, played = config.ignore_returns, config.weighting == "played"
    good = [r for r in explored if blind or is_enough(r["return"], config)]
    sums: dict[Any, float] = defaultdict(float)
    for record in good:
        sums[record["item_id"], texts_of(record)] += 1.0 if blind else record["return"]
    chosen: list[Record] = []
    per_task: Counter[str] = Counter()
    joined: set[Any] = set()
    texts_before = set() if played else {texts_of(record) for record in before}
    for record in good if blind else sorted(good, key=lambda r: -r["return"]):  # stable: as played
        task, texts = record["item_id"], texts_of(record)
        is_new = (task, texts) not in joined and texts not in texts_before
        if is_new and per_task[task] < config.keep_per_task:
            per_task[task] += 1
            joined.add((task, texts))
            once = 1.0 if blind or config.weighting == "one" else record["return"]
            weight = sums[task, texts] if played else once
            chosen.append(record | {"origin": origin, "weight": weight})
    return chosen


def texts_of(record: Record) -> tuple[str, ...]:
    """Observations and actions up to the last action: the answer to it is not always kept."""
    values = [turn["value"] for turn in record["conversations"]]
    return tuple(values[: -1 if record["conversations"][-1]["from"] == "human" else None])


def is_enough(total: float, config: EvolConfig) -> bool:
    """--min-return, and in any case above 0: with weight 0 nothing would be learned from it."""
    return total > ROUNDING and total > config.min_return - ROUNDING


def start_iteration(session: Session[MethodWorker], config: EvolConfig) -> None:
    """An iteration's first weights: the run's start, or the last ones with a fresh optimizer. The
    sampler is asleep by then."""
    worker = session.worker
    if config.learn_from == "last":
        worker.policy = worker.renewed(worker.policy)
        return
    with phase("back to the base policy"):
        worker.forget_policy()
        worker.policy = worker.fresh_policy()
    session.sentinels = Sentinels()


def command_line(argv: Sequence[str] | None = None) -> int:
    """Parse, check, run; the exit code."""
    return run_command(argv, SUMMARY, EvolConfig, train)


if __name__ == "__main__":
    sys.exit(command_line())
