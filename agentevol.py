"""AgentEvol: explore, imitate the successes, and repeat (arXiv 2406.04151).

    demonstrations ──┐
                     ├──> 1 the evolving set ──> 2 imitate it ──> 3 measure
    the policy plays ┘        each iteration adds trajectories with a positive return to the set

Why does this raise the return? It raises a lower bound on the log of the expected return:

    log E_π[R] = log Σ_τ π(τ) R(τ)  ≥  Σ_τ q(τ) log( π(τ) R(τ) / q(τ) )      for any q (Jensen)

with equality if q(τ) ∝ π(τ) R(τ). Two alternating steps raise this bound, as in
expectation-maximisation:

    explore   set q to π weighted by the return: sample trajectories and keep those with R > 0
    learn     maximise E_q[log π(τ)]: imitate those, weighted by R, on the tokens that π wrote

    L(θ) = - 1/N Σ_b w_b Σ_t loss_mask · log π_θ(token_t | tokens_<t)    N tokens with loss_mask 1

w is 1 for a demonstration. Explored trajectories with the same text join the set as one row, whose
w is the sum of their returns: our only estimate of π is how often a text was sampled. If each text
counted once, a rare success would gain as much as a common one.

Each iteration continues from the latest weights and learns from the demonstrations and its own
exploration. The paper instead restarts from the base policy with a growing set (--learn-from base
--merge-with all). An iteration's mistakes then do not stay in the weights, but its progress has to
be learned again. AgentGym's script also trains once before it explores. Here the initial policy
explores first and therefore needs a warm start.

`evolving/iteration_001.jsonl` and the following files hold the set of each iteration, with the
origin, return and weight of each trajectory. Unlike RL, the method has no baseline and no negative
examples: a mistake becomes less likely only because other actions become more likely. On the other
hand, several steps can use the data of one exploration.

    python agentevol.py --env textcraft
    python agentevol.py --data demos.json --iterations 4 --steps 96
    python agentevol.py --env textcraft --learn-from base --merge-with all

Read first: sft.py. Read next: replay.py.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from config import LOW_IN_IMITATION, Misuse, checked
from data import ROUNDING, Example, Record, encode
from reporting.sentinels import Sentinels
from rollout import portion
from run.clock import Clock
from run.methodworker import (
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
    """AgentEvol: explore, imitate the successes, and repeat."""

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
    """demonstrations to begin with: files in the AgentTraj or messages format (docs/data.md),
    or run folders;
    if not given, the environment's oracle demonstrates training tasks, as for the warm start"""
    num_demonstrations: int = 32  # oracle demonstrations per environment, if there is no --data
    iterations: int = 3
    """number of iterations; in each one the policy explores and then trains;
    --steps is divided equally among them"""
    tasks_per_iteration: int = 64  # tasks explored in each iteration
    min_return: float = 0.0
    """drop episodes with a lower return (0..1), including episodes from --data;
    episodes with return 0 are always dropped"""
    keep_per_task: int = 8
    """keep at most this many episodes per task and iteration, those with the highest returns"""
    weighting: Literal["played", "return", "one"] = "played"
    """weight of an explored trajectory: one (1, like a demonstration),
    return (its return), or played (sum of the returns of all samples with the same text)"""
    ignore_returns: bool = False
    """control experiment: keep the first trajectories of each task, as if all returns were 1"""
    merge_with: Literal["all", "demonstrations"] = "demonstrations"
    """add new trajectories to all earlier ones, or only to the demonstrations [paper: all]"""
    learn_from: Literal["base", "last"] = "last"
    """weights at the start of an iteration: the run's initial weights (base),
    or the latest weights (last) [paper: base]"""
    # Training
    steps: int = 12  # total training steps, including those before a resume
    mini_batch_size: int = 64  # trajectories per step
    learning_rate: float = 4e-5  # learning rate at the start of each iteration [paper: 1e-5]
    eval_every: int = 4
    save_every: int = 4  # write a checkpoint every N steps and at the end

    def unused_options(self) -> Iterator[tuple[str, str]]:
        if self.data:
            yield "num_demonstrations", UNUSED_WITH_DATA
        if self.ignore_returns:
            if self.weighting == "return":
                yield "weighting", "use one or played: --ignore-returns ignores returns"
            yield "min_return", "--ignore-returns is set; leave it out"
        if self.iterations == 1:
            yield "learn_from", "it needs at least two --iterations"
            yield "merge_with", "it needs at least two --iterations"

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
    """Evolve; returns the closed run. Raises Misuse only before anything is written."""
    config = checked(config)
    demonstrations = initial_set(config)
    with open_session(config, MethodWorker) as session:
        w = session.worker
        files = IterationFiles.from_session(session)
        session.evaluate_start()
        evolving: list[Example] = []
        for step in session.steps_left():
            clock = Clock(vars(config))
            iteration, step_index = divmod(step - 1, config.steps_per_iteration)
            metrics: dict[str, Any] = {}
            # ------------------------------------------------------------------- 1 the evolving set
            if step_index == 0 or not evolving:
                with clock("time/rollout_s"):
                    evolving, explored = evolve(session, files, step, demonstrations)
            w.sleep_sampler()  # before the weights change, in case it fails
            if step_index == 0:
                metrics |= explored
                if iteration:  # the first iteration begins with the initial weights
                    start_iteration(session, config)

            # --------------------------------------------------------------------------- 2 imitate
            key = f"evolve/{config.seed}/{iteration}"
            rows, epochs = portion(step_index + 1, len(evolving), config.mini_batch_size, key)
            batch = w.batch_of([evolving[row] for row in rows])
            w.set_learning_rates(step_index + 1)
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
    """The demonstrations in the first set, with weight 1. Conversations in --data with a return are
    selected and weighted like explored ones instead. Collective.

    Raises:
        Misuse: no demonstration is left.
    """
    if config.has_saved_inputs:
        return []  # the run has stored them in the set of its first iteration
    selection = []
    for example in read_examples(config):
        total, weight = example.total_return, 1.0
        if total is not None and not -ROUNDING <= total <= 1 + ROUNDING:
            raise Misuse(
                f'--data: conversation {example.task_id}: "return" is {total:g}, expected 0 to 1; '
                "divide all returns by the highest possible return"
            )
        if total is not None and not config.ignore_returns:
            if not is_enough(total, config):
                continue
            weight = 1.0 if config.weighting == "one" else total
        record = example.record | {"origin": DEMONSTRATED, "weight": weight}
        selection.append(replace(example, record=record))
    if not selection:
        raise Misuse(
            f"no return in --data is above 0 and at least --min-return {config.min_return:g}"
        )
    fit = drop_too_long(config, selection, "demonstrations", lambda example: [example])
    return [example.record for example in fit]


def evolve(
    session: Session[MethodWorker], files: IterationFiles, step: int, initial: Sequence[Record]
) -> tuple[list[Example], dict[str, Any]]:
    """The set of the iteration that contains `step`, and its metrics. They are read from the run if
    it has them; otherwise the current policy explores, and its good trajectories join the set.

    Raises:
        TrainingError: the set of an iteration that has begun is missing from the run.
    """
    w, config = session.worker, session.config
    assert isinstance(config, EvolConfig)
    iteration, step_index = divmod(step - 1, config.steps_per_iteration)
    saved = files.read(iteration + 1, must_exist=step_index > 0)
    if saved is None:
        previous = list(initial)
        if iteration and (last_set := files.read(iteration, must_exist=True)):
            previous = last_set[0]
        if config.merge_with == "demonstrations":
            previous = [record for record in previous if record["origin"] == DEMONSTRATED]
        examples, metrics = w.explore(step)
        explored = [example.record for example in examples]
        new = select(explored, config, f"iteration {iteration + 1}", previous)
        evolving = previous + new
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
    return [encode(w.chat, record, trust_ids=True) for record in records], summary["metrics"]


def select(
    explored: Sequence[Record], config: EvolConfig, origin: str, previous: Sequence[Record] = ()
) -> list[Record]:
    """The best explored records of each task, with their origin and weight, to join the set.

    Records with the same text join as one record. With --weighting played, its weight is the sum of
    their returns, because q(τ) ∝ π(τ) R(τ). With the other weightings, a text joins only if the set
    does not contain it yet. Otherwise an easy task would gain weight in each iteration.
    """
    is_blind, is_summed = config.ignore_returns, config.weighting == "played"
    good = [r for r in explored if is_blind or is_enough(r["return"], config)]
    sums: dict[Any, float] = defaultdict(float)
    for record in good:
        sums[record["item_id"], texts_of(record)] += 1.0 if is_blind else record["return"]
    selection: list[Record] = []
    per_task: Counter[str] = Counter()
    joined: set[Any] = set()
    old_texts = set() if is_summed else {texts_of(record) for record in previous}
    # The sort is stable: records with equal returns stay in the order they were played.
    for record in good if is_blind else sorted(good, key=lambda r: -r["return"]):
        task, texts = record["item_id"], texts_of(record)
        is_new = (task, texts) not in joined and texts not in old_texts
        if is_new and per_task[task] < config.keep_per_task:
            per_task[task] += 1
            joined.add((task, texts))
            single = 1.0 if is_blind or config.weighting == "one" else record["return"]
            weight = sums[task, texts] if is_summed else single
            selection.append(record | {"origin": origin, "weight": weight})
    return selection


def texts_of(record: Record) -> tuple[str, ...]:
    """Observations and actions up to the last action; the answer to it is not always recorded."""
    values = [turn["value"] for turn in record["conversations"]]
    return tuple(values[: -1 if record["conversations"][-1]["from"] == "human" else None])


def is_enough(total: float, config: EvolConfig) -> bool:
    """Whether a return is at least --min-return, and above 0 because weight 0 teaches nothing."""
    return total > ROUNDING and total > config.min_return - ROUNDING


def start_iteration(session: Session[MethodWorker], config: EvolConfig) -> None:
    """Set the weights for a new iteration: the run's initial ones, or the latest ones with a fresh
    optimizer. The sampler must be asleep."""
    worker = session.worker
    if config.learn_from == "last":
        worker.policy = worker.with_new_optimizer(worker.policy)
        return
    with phase("reloading the base policy"):
        worker.free_policy()
        worker.policy = worker.fresh_policy()
    session.sentinels = Sentinels()


def command_line(argv: Sequence[str] | None = None) -> int:
    """Parse, check and run; returns the exit code."""
    return run_command(argv, SUMMARY, EvolConfig, train)


if __name__ == "__main__":
    sys.exit(command_line())
