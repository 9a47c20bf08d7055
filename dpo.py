"""Direct preference optimization: of two trajectories of a task, make the better one likelier than
the other, compared with the policy as the iteration began.

RLHF learns a reward from pairs, then maximises it under a penalty for leaving a reference policy.
The maximum is known in closed form,

    π*(τ | x) = 1/Z(x) · π_ref(τ | x) · exp( R(x, τ) / β )

Inverting this, every policy implies a reward for which it is optimal, R = β log π/π_ref + β log Z.
In the Bradley-Terry model of a comparison, p(τ⁺ wins) = σ(R⁺ − R⁻), the intractable Z(x) cancels if
both trajectories have the same x, and a loss on the policy alone remains (arXiv 2305.18290):

    h = (log π_θ(τ⁺) − log π_ref(τ⁺)) − (log π_θ(τ⁻) − log π_ref(τ⁻))        L = −log σ(β h)

For agents τ is a whole trajectory and log π(τ) sums over the tokens that the policy wrote (arXiv
2403.02502). π_ref is the policy at the start of the iteration: its log-probs are computed once and
kept with the pairs in `pairs/iteration_001.jsonl`, so there is never a second copy of the model.

    pair files, runs, experts against experience, or the policy's own play
      ──> 1 pairs, with the reference's log-probs ──> 2 update ──> 3 measure, log, save

The loss sees margins alone: both likelihoods may fall, and if the chosen one falls far the policy
does some third thing: watch preference/chosen_log_prob. A failure is longer than a success, and
most of its moves were right, so agents unlearn by that: --sft-coef holds the chosen side up (arXiv
2404.19733; RESULTS.md shows runs without it).

    python dpo.py --env textcraft                                     # plays for its pairs
    python dpo.py --data runs/NAME                                    # what a run has tried
    python dpo.py --expert demos.json --experience runs/NAME          # a teacher against the policy
    python dpo.py --pairs pairs.json --model X --warm-start never     # files: docs/data.md

Shapes: P pairs, B = 2P rows. Read first: sft.py. Read next: agentevol.py.
"""

from __future__ import annotations

import json
import math
import random
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import combinations, product
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from batching import Batch, make_batch
from chat import ChatTemplate
from config import Misuse, Objective, checked, value_errors_as_misuse
from data import ROUNDING, Example, Record, Texts, encode
from formats import check_record, read_objects, read_records, turns_of
from rollout import portion
from run.clock import Clock, advice
from run.methodworker import (
    IteratedConfig,
    IterationFiles,
    MethodWorker,
    chat_of,
    data_metrics,
    drop_too_long,
    encode_all,
    sync_if_evaluated,
)
from run.progress import phase
from run.rundir import Run
from run.session import Session, TrainingError, open_session
from run.session import command_line as run_command
from scale import distributed
from update import (
    Learner,
    Metrics,
    decide_sharing,
    forward_policy,
    optimize,
    policy_metrics,
    score_policy,
)

SUMMARY = (__doc__ or "").split("\n\n")[0]


# ----------------------------------------------------------------------------------------- options


@dataclass(frozen=True)
class DpoConfig(IteratedConfig):
    """Direct preference optimization: the better of two trajectories gains on the other."""

    method: ClassVar[str] = "dpo"
    program: ClassVar[str] = "dpo.py"
    folder: ClassVar[str] = "pairs"
    paper_values: ClassVar[dict[str, Any]] = {"learning_rate": 5e-7, "beta": 0.5, "sft_coef": 0.0}

    # The pairs; without any of these files the policy plays for them
    pairs: tuple[str, ...] = ()  # pair files, {"id", "prompt", "chosen", "rejected"}
    data: tuple[str, ...] = ()  # runs, or conversations with returns: tries at a task become pairs
    expert: tuple[str, ...] = ()  # conversations to choose from; with --experience
    experience: tuple[str, ...] = ()  # to reject from: what the policy did at the tasks of --expert
    min_gap: float = 0.5  # least difference of returns within a pair (0..1)
    min_return: float = 0.0  # least return of a chosen trajectory (0..1)
    pairs_per_task: int = 4  # at most: the largest gaps, or of --pairs the first in the file
    # The loss
    beta: float = 0.1  # the smaller, the further from the reference [paper: 0.5]
    loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"  # sigmoid: DPO; hinge: as SLiC
    label_smoothing: float = 0.0  # chance that a pair is the wrong way round (sigmoid; 0..0.5)
    sft_coef: float = 1.0
    """weight of imitating the chosen one, per token, against likelihoods that both fall; 0: DPO
    alone [paper: 0]"""
    # How it learns
    iterations: int = 6  # times that the policy plays; pairs from files are one iteration
    tasks_per_iteration: int = 48  # tasks that it plays then (tasks)
    steps: int = 18
    """training steps in total, also on resume; a pass over n pairs takes 2 n / --mini-batch-size,
    rounded up (steps)"""
    mini_batch_size: int = 64  # trajectories of a step, two of each pair (trajectories)
    learning_rate: float = 4e-5  # of the policy, AdamW [paper: 5e-7]
    eval_every: int = 9  # evaluate held-out tasks every N steps, first and after all; 0: never
    save_every: int = 9  # write a checkpoint every N steps, and after the last

    def check(self) -> None:
        super().check()
        self.require("min_gap", 0 <= self.min_gap <= 1, "must be a difference of returns, 0 to 1")
        self.require("beta", 0 < self.beta < math.inf, "must be above 0, and finite")
        self.require("label_smoothing", 0 <= self.label_smoothing < 0.5, "must be in [0, 0.5)")
        if self.label_smoothing and self.loss != "sigmoid":
            raise Misuse("--label-smoothing needs --loss sigmoid; leave it out")
        is_even = self.mini_batch_size % 2 == 0
        self.require("mini_batch_size", is_even, "must be even: a pair is two trajectories")
        if bool(self.expert) != bool(self.experience):
            raise Misuse("--expert needs --experience, and the reverse")
        if sum(map(bool, (self.pairs, self.data, self.expert))) > 1:
            raise Misuse("--pairs, --data and --expert each say where pairs come from; give one")
        if self.learns_from_play:
            self.require("group_size", self.group_size >= 2, "leaves no second one to compare")

    def unused_options(self) -> Iterator[tuple[str, str]]:
        yield from self.unused_without_play()
        if not self.learns_from_play:
            for name in ("iterations", "tasks_per_iteration", "group_size", "env_weights"):
                yield name, "leave it out, the pairs are given and nothing is played for them"

    @property
    def num_iterations(self) -> int:
        return self.iterations if self.learns_from_play else 1

    @property
    def learns_from_play(self) -> bool:
        return not (self.pairs or self.data or self.expert or self.experience)

    @property
    def plays(self) -> bool:
        return self.learns_from_play or super().plays


# ---------------------------------------------------------------------------------------- the loop


def train(config: DpoConfig) -> Run:
    """Prefer as the options say; the run, closed. Raises Misuse before anything is written."""
    config = checked(config)
    file_pairs = None if config.learns_from_play else load_pairs(config)
    with open_session(config, MethodWorker) as session:
        w = session.worker
        files = IterationFiles.from_session(session)
        session.evaluate_start()
        pairs, ref_sums, current = list[Pair](), torch.empty(0, 2), -1
        for step in session.steps_left():
            clock = Clock(vars(config))
            iteration, place = divmod(step - 1, config.steps_per_iteration)
            metrics: dict[str, Any] = {}
            # ------------------------------------------------------------------------------ 1 pairs
            if current != iteration:
                with session.saving_on_failure(), clock("time/rollout_s"):
                    pairs, ref_sums, played = pairs_of_iteration(session, files, step, file_pairs)
                metrics |= played if place == 0 else {}
                current = iteration

            # ----------------------------------------------------------------------------- 2 update
            batch = None
            if not pairs:
                metrics |= {"policy/optimizer_steps": 0, "policy/skipped_steps": 0}
            else:
                key = f"dpo/{config.seed}/{iteration}"
                size = config.mini_batch_size // 2
                chosen, epochs = portion(place + 1, len(pairs), size, key)
                batch = batch_of([pairs[i] for i in chosen], w.pad_id)  # B = 2 rows a pair
                batch.ref_sums = ref_sums[chosen].flatten()  # (B,)
                with session.saving_on_failure():
                    w.sleep_sampler()
                w.set_learning_rates(step)
                with clock("time/update_s"):
                    metrics |= prefer(
                        w.policy, batch, w.objective_for(len(batch)), config, seed=step
                    )
                metrics |= data_metrics(batch, epochs, clock)

            # ----------------------------------------------------------------- 3 measure, log, save
            metrics |= sync_if_evaluated(session, step, batch, clock)
            metrics |= session.evaluate_if_due(step, clock)
            session.finish_step(step, metrics, clock)
    return session.run


# ---------------------------------------------------------------------------------------- the loss


class PreferenceLoss(NamedTuple):
    """Scalars. loss carries the gradient; the rest are detached means over pairs."""

    loss: Tensor
    margin: Tensor  # chosen_reward − rejected_reward = β h; 0 where the policy is the reference
    accuracy: Tensor  # share of pairs with a margin above 0
    chosen_reward: Tensor  # β (log π − log π_ref) of the better trajectory
    rejected_reward: Tensor  # of the worse one


# f(h, β), (P,) -> (P,), of `preference_loss`. A new kind is a function here.
PREFERENCES: dict[str, Callable[[Tensor, float], Tensor]] = {
    # DPO (arXiv 2305.18290, eq. 7). NOTE: −log(sigmoid(x)) would be inf from x = −89 on.
    "sigmoid": lambda h, beta: -logsigmoid(beta * h),
    "ipo": lambda h, beta: (h - 1 / (2 * beta)).square(),  # IPO (arXiv 2310.12036): aims at one h
    "hinge": lambda h, beta: (1 - beta * h).relu(),  # as SLiC (arXiv 2309.06657): done at β h = 1
}


def preference_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    beta: float = 0.1,
    label_smoothing: float = 0.0,
    kind: str = "sigmoid",
    denominator: float | None = None,
) -> PreferenceLoss:
    """The loss of pairs, and how far the policy has moved on them.

        h = (log π(τ⁺) − log π_ref(τ⁺)) − (log π(τ⁻) − log π_ref(τ⁻))
        L = 1/N Σ_pairs f(h)                           f = −log σ(β h), or another of PREFERENCES

    log π(τ) is the sum over *policy tokens alone*. The probability of a whole trajectory has a
    factor for each observation as well, but those are the environment's: they are the same under π
    and π_ref, and cancel in the ratio.

    Args:
        chosen, rejected: (P,) log π, summed over each trajectory's policy tokens, with gradient.
        ref_chosen, ref_rejected: (P,) the same of the frozen reference.
        beta: β; the smaller, the farther from the reference a pair may pull.
        label_smoothing: ε, how probable it is that a pair is the wrong way round ("conservative"
            DPO): f becomes (1 − ε) f(h) + ε f(−h). With "sigmoid" only.
        kind: a key of PREFERENCES.
        denominator: N, pairs of the *whole* mini-batch; None: of this call.
    Raises:
        ValueError: log-probs by token.
    """
    if chosen.dim() != 1:
        raise ValueError("sum the log-probs of a trajectory over its policy tokens")
    num_pairs = len(chosen) if denominator is None else denominator
    chosen_ratio = chosen - ref_chosen.detach()  # (P,)
    rejected_ratio = rejected - ref_rejected.detach()  # (P,)
    h = chosen_ratio - rejected_ratio  # (P,)
    losses = PREFERENCES[kind](h, beta)  # (P,)
    if label_smoothing:
        swapped = PREFERENCES[kind](-h, beta)  # (P,)
        losses = (1 - label_smoothing) * losses + label_smoothing * swapped
    metrics = (beta * h, (h > 0).to(h.dtype), beta * chosen_ratio, beta * rejected_ratio)
    means = [x.detach().sum() / num_pairs for x in metrics]
    return PreferenceLoss(losses.sum() / num_pairs, *means)


def prefer(
    learner: Learner, batch: Batch, objective: Objective, config: DpoConfig, seed: int = 0
) -> dict[str, float]:
    """One optimizer step on pairs.

    Args:
        batch: rows 2i and 2i + 1 are chosen and rejected of pair i; with ref_sums.
    Returns:
        `policy/*` and `preference/*` metrics, means over pairs.
    """
    objective, device = decide_sharing(objective, batch), learner.accelerator.device

    def loss_of(part: Batch, mini_batch: Batch) -> tuple[Tensor, Metrics]:
        num_pairs = len(mini_batch) / 2
        log_probs, _ = forward_policy(learner.model, part, objective, device)  # (B, T)
        b = part.to(device)
        assert b.ref_sums is not None
        sums = torch.where(b.loss_mask.bool(), log_probs, 0.0).sum(1)  # (B,)  log π(τ)
        chosen, rejected = sums[0::2], sums[1::2]  # (P,) each
        ref_chosen, ref_rejected = b.ref_sums[0::2], b.ref_sums[1::2]
        result = preference_loss(
            *(chosen, rejected, ref_chosen, ref_rejected),
            *(config.beta, config.label_smoothing, config.loss, num_pairs),
        )
        num_tokens = b.loss_mask[0::2].sum(1)  # (P,) of the chosen ones
        imitation = -(chosen / num_tokens).sum() / num_pairs
        loss = result.loss + config.sft_coef * imitation
        moved = {f"preference/{n}": x for n, x in result._asdict().items() if n != "loss"}
        return loss, moved | {
            "policy/loss": loss,
            "preference/sft_loss": imitation.detach(),
            "preference/chosen_log_prob": chosen.detach().sum() / num_pairs,
            "preference/rejected_log_prob": rejected.detach().sum() / num_pairs,
        }

    return policy_metrics(optimize(learner, batch, loss_of, objective, seed), learner)


# --------------------------------------------------------------------------------------- the pairs
# Both sides of a pair have one task and the same opening x, the prompt and first observation:
#
#     x ├─ a₀ o₁ a₁ o₂ a₂    return 1
#       ├─ a₀ o₁ a₁          return 0.5    1 > 0 is a pair, the gap is 1; with a min_gap of 0.5
#       └─ a₀                return 0      1 > 0.5 and 0.5 > 0 are two more
#
# An environment's seed must be the same too, where it is known: otherwise the better one may have
# had the easier episode, and the pair teaches luck.


class Pair(NamedTuple):
    """Two trajectories of one task that open alike; the chosen one is better."""

    chosen: Example
    rejected: Example

    @property
    def task_id(self) -> str:
        return self.chosen.task_id

    @property
    def gap(self) -> float | None:
        """Difference of returns; None where one is unknown."""
        better, worse = self.chosen.total_return, self.rejected.total_return
        return None if better is None or worse is None else better - worse


Group = tuple[str, Texts]  # task, opening


def pairs_of(examples: Iterable[Example], config: DpoConfig, counts: Counter[str]) -> list[Pair]:
    """Trajectories that earned more against those that earned less, of the same task and opening.
    The result does not depend on the order of `examples`.

    Args:
        counts: what is left out is added here, per pair; "no partner" counts openings at which no
            trajectory was better than another.
    Raises:
        ValueError: an example without a return; says which.
    """
    candidates = {}
    for key, members in _group_by_opening(examples).items():
        if any(example.total_return is None for example in members):
            problem = f'conversation {key[0]} has no "return", which decides which of two is better'
            raise ValueError(problem)
        members.sort(key=lambda example: -(example.total_return or 0.0))
        candidates[key] = [Pair(*two) for two in combinations(members, 2)]
    return _select(candidates, config, counts)


def pairs_of_experts(
    expert: Iterable[Example],
    experience: Iterable[Example],
    config: DpoConfig,
    counts: Counter[str],
) -> list[Pair]:
    """What an expert did against what the policy did from the same opening. Where one of the two
    has no return the expert counts as better, unless it said the same."""
    experts, others = _group_by_opening(expert), _group_by_opening(experience)
    candidates = {
        key: [Pair(*two) for two in product(experts.get(key, ()), others.get(key, ()))]
        for key in experts.keys() | others.keys()
    }
    return _select(candidates, config, counts)


def _group_by_opening(examples: Iterable[Example]) -> dict[Group, list[Example]]:
    """By task and opening, each group in an order that depends only on its members."""
    groups: dict[Group, list[Example]] = defaultdict(list)
    for example in sorted(examples, key=lambda e: json.dumps(e.record, sort_keys=True)):
        groups[example.task_id, example.parts[0]].append(example)
    return groups


def _select(
    candidates: dict[Group, list[Pair]], config: DpoConfig, counts: Counter[str]
) -> list[Pair]:
    """The best pairs of each task: largest gap first, chance among equals."""
    tasks: dict[str, list[Pair]] = defaultdict(list)
    for group in sorted(candidates):
        pairs = []
        for pair in candidates[group]:
            seeds = {example.record.get("seed") for example in pair}
            if len(seeds - {None}) > 1:
                counts["two seeds"] += 1
            else:
                pairs.append(pair)
        if any(pair.gap is None or pair.gap > ROUNDING for pair in pairs):
            tasks[group[0]] += pairs
        else:
            counts["no partner"] += 1
    ordered: list[Pair] = []
    for task_id, pairs in tasks.items():
        random.Random(f"{config.seed}/{task_id}").shuffle(pairs)
        ordered += sorted(pairs, key=lambda pair: -round(pair.gap or 0.0, 6))
    return _filter(ordered, config, counts)


def _filter(pairs: Iterable[Pair], config: DpoConfig, counts: Counter[str]) -> list[Pair]:
    """The pairs to learn from; each of the others is counted once."""
    usable: list[Pair] = []
    per_task: Counter[str] = Counter()
    seen: set[tuple[Texts, Texts, Texts]] = set()
    for pair in pairs:
        total = pair.chosen.total_return
        (opening, better), (_, worse) = pair.chosen.parts, pair.rejected.parts
        if pair.gap is not None and pair.gap <= max(ROUNDING, config.min_gap - ROUNDING):
            counts["gap"] += 1
        elif total is not None and total < config.min_return - ROUNDING:
            counts["low return"] += 1
        elif better[::2] == worse[::2] or (opening, better, worse) in seen:  # [::2]: the actions
            counts["equal texts"] += 1
        elif per_task[pair.task_id] >= config.pairs_per_task:
            counts["over pairs per task"] += 1
        else:
            per_task[pair.task_id] += 1
            seen.add((opening, better, worse))
            usable.append(pair)
    return usable


def batch_of(pairs: Sequence[Pair], pad_id: int) -> Batch:
    """Rows 2i and 2i + 1 are chosen and rejected of pair i, and form group i, so that their opening
    is computed once (scale/prefix.py)."""
    sides = [(i, example) for i, pair in enumerate(pairs) for example in pair]
    return make_batch([replace(e.trajectory, group_id=i) for i, e in sides], pad_id)


def pairs_of_iteration(
    session: Session[MethodWorker],
    files: IterationFiles,
    step: int,
    file_pairs: Sequence[Pair] | None,
) -> tuple[list[Pair], Tensor, dict[str, Any]]:
    """An iteration's pairs, the reference's log-probs (P, 2), and metrics of how they came about:
    read back from the run, or made by the policy as it is now, which is the reference.

    Args:
        file_pairs: pairs from files; None: the policy plays.
    Raises:
        TrainingError: there is no pair in the first iteration, and why; or the run has lost those
            of an iteration that has begun.
    """
    w, config = session.worker, session.config
    assert isinstance(config, DpoConfig)
    iteration, place = divmod(step - 1, config.steps_per_iteration)
    if (saved := files.read(iteration + 1, must_exist=place > 0)) is not None:
        lines, summary = saved
        pairs = [parse_pair(line, str(line["id"]), w.chat) for line in lines]
        sums = [(line["ref_chosen"], line["ref_rejected"]) for line in lines]
        return pairs, torch.tensor(sums).reshape(-1, 2), summary["metrics"]
    counts: Counter[str] = Counter()
    metrics: dict[str, Any] = {}
    pairs = list(file_pairs or ())
    if file_pairs is None:
        played, metrics = w.explore(step)
        pairs = pairs_of(played, config, counts)
    distributed.say(f"iteration {iteration + 1}: {describe(pairs, counts)}")
    if not pairs and not iteration:
        raise TrainingError(
            f"{describe(pairs, counts)}; start from a model that solves some of its tasks and not "
            "all (--model, --warm-start), play more (--tasks-per-iteration, --group-size), or "
            "lower --min-gap"
        )
    pairs = sample_for_steps(pairs, config, iteration)
    ref_sums = reference_sums(w, pairs) if pairs else torch.empty(0, 2)
    lines = [
        format_pair(pair) | {"ref_chosen": ref_chosen, "ref_rejected": ref_rejected}
        for pair, (ref_chosen, ref_rejected) in zip(pairs, ref_sums.tolist(), strict=True)
    ]
    metrics |= {"data/pairs": len(pairs)}
    summary = {"metrics": metrics, "left_out": dict(sorted(counts.items()))}
    files.write(iteration + 1, lines, summary)
    return pairs, ref_sums, metrics


def describe(pairs: Sequence[Pair], counts: Counter[str]) -> str:
    """'3 pairs; left out: 12 gap, 3 equal texts'."""
    left_out = ", ".join(f"{count} {why}" for why, count in counts.most_common())
    return f"{len(pairs)} pairs; left out: {left_out or 'none'}"


def sample_for_steps(pairs: list[Pair], config: DpoConfig, iteration: int) -> list[Pair]:
    """Sample as many pairs as this iteration will use; the rest is not scored under the
    reference."""
    most = config.steps_per_iteration * config.mini_batch_size // 2
    if len(pairs) <= most:
        return pairs
    distributed.say(f"{most} of these pairs are used, as many as its steps take")
    rng = random.Random(f"dpo/{config.seed}/{iteration}")
    return [pairs[place] for place in sorted(rng.sample(range(len(pairs)), most))]


def reference_sums(worker: MethodWorker, pairs: Sequence[Pair]) -> Tensor:
    """log π of both sides of each pair under the policy as it is now, summed over policy tokens:
    (P, 2). Collective.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed; no weight has changed.
    """
    worker.sleep_sampler()
    sums: list[Tensor] = []
    size, total = worker.config.mini_batch_size // 2, 2 * len(pairs)
    in_time = advice("time/log_probs_s", vars(worker.config))  # where memory is short
    with in_time, phase("the reference's log-probs", total, "trajectories") as tick:
        for start in range(0, len(pairs), size):
            if worker.stop.agreed():
                raise KeyboardInterrupt
            part = batch_of(pairs[start : start + size], worker.pad_id)
            objective = worker.objective_for(len(part))
            log_probs = score_policy(worker.policy.model, part, objective, worker.device)  # (B, T)
            sums.append((log_probs * part.loss_mask).sum(1))
            tick(len(part))
    return torch.cat(sums).reshape(-1, 2)


# ------------------------------------------------------------------------------------------- files


def load_pairs(config: DpoConfig) -> list[Pair]:
    """The pairs of files and runs. Collective.

    Raises:
        Misuse: a file that cannot be read, or no pair is left, and why.
    """
    if config.has_saved_inputs:
        return []  # the run holds them already, with the reference's log-probs
    distributed.join()
    chat = chat_of(config)

    def examples(files: Sequence[str]) -> list[Example]:
        return encode_all(chat, read_records([Path(file) for file in files]))

    def read() -> list[Pair]:
        counts: Counter[str] = Counter()
        if config.pairs:
            pairs = read_pairs(chat, [Path(file) for file in config.pairs], config, counts)
        elif config.data:
            pairs = pairs_of(examples(config.data), config, counts)
        else:
            expert, experience = examples(config.expert), examples(config.experience)
            pairs = pairs_of_experts(expert, experience, config, counts)
        report = describe(pairs, counts)
        if not pairs:
            raise ValueError(f"{report}; a pair needs one item_id and the same opening")
        distributed.say(report)
        return pairs

    with value_errors_as_misuse():
        pairs = distributed.run_on_rank_0("reading pairs", read)
    return drop_too_long(config, pairs, "pairs", lambda pair: pair)


def read_pairs(
    chat: ChatTemplate, paths: Sequence[Path], config: DpoConfig, counts: Counter[str]
) -> list[Pair]:
    """The pairs of files, in their order; of a task the first ones.

        {"id": "textcraft_31", "prompt": [{"from": "human", "value": "Goal: ..."}],
         "chosen": [{"from": "gpt", "value": ...}, {"from": "human", ...}, ...], "rejected": [...]}

    Messages ({"role", "content"}) and texts will do as well; without a prompt, two whole
    conversations.

    Raises:
        ValueError: names file, line and what is wrong there.
        OSError: a file cannot be read.
    """
    return _filter(read_objects(paths, partial(parse_pair, chat=chat)), config, counts)


def parse_pair(content: Any, name: str, chat: ChatTemplate) -> Pair:
    """The pair of an object of a pair file; `name` is its task if it says none.

    Raises:
        ValueError: it is not a pair; says why.
    """
    sides = ("chosen", "rejected")
    if not isinstance(content, dict) or not all(side in content for side in sides):
        found = repr(content)[:80]
        raise ValueError(f'{found}: expected {{"id", "prompt", "chosen", "rejected"}}')
    records = {side: content[side] if isinstance(content[side], dict) else {} for side in sides}
    ids = [o["item_id"] for o in (content, *records.values()) if o.get("item_id") is not None]
    if len(set(map(str, ids))) > 1:
        raise ValueError(f"a pair of two tasks, {' and '.join(map(str, ids))}; expected one")
    ids += [task_id for task_id in (content.get("id"), name) if task_id is not None]
    prompt = [] if content.get("prompt") is None else _turns(content["prompt"], "human")
    prompt = [turn | {"loss": False} for turn in prompt]
    examples = []
    for side in sides:
        try:
            turns = _turns(content[side], "gpt")
            turns = [{"loss": True, **t} if t.get("from") == "gpt" else t for t in turns]
            record = {"item_id": str(ids[0]), "conversations": prompt + turns}
            whole = records[side]
            total = content.get(f"{side}_return", whole.get("return", whole.get("reward")))
            if total is not None:
                record["return"] = total
            examples.append(encode(chat, check_record(record)))
        except ValueError as error:
            raise ValueError(f"{side}: {error}") from None
    pair = Pair(*examples)
    if pair.chosen.parts[0] != pair.rejected.parts[0]:
        raise ValueError("chosen and rejected differ before the first action, expected one opening")
    return pair


def _turns(content: Any, speaker: str) -> list[dict[str, Any]]:
    """A text, messages or turns, by themselves or in a conversation, as turns."""
    if isinstance(content, dict):
        content = content.get("conversations", content.get("messages"))
    if isinstance(content, str) and content:
        content = [{"from": speaker, "value": content}]
    is_list = isinstance(content, list) and all(isinstance(turn, dict) for turn in content)
    if not content or not is_list:
        raise ValueError(
            f"{repr(content)[:60]}: expected a text, or a list of "
            '{"from", "value"} or {"role", "content"}'
        )
    return turns_of(content) if any("role" in turn for turn in content) else content


def format_pair(pair: Pair) -> Record:
    """The object of a pair file from which `parse_pair` makes this pair again."""
    length = len(pair.chosen.parts[0])
    prompt = pair.chosen.record["conversations"][:length]
    line: Record = {"id": pair.task_id, "prompt": prompt}
    for name, example in zip(("chosen", "rejected"), pair, strict=True):
        # `loss` is written out: an action without it is learned.
        turns = example.record["conversations"][length:]
        line[name] = [{"loss": None, **turn} for turn in turns]
        if "return" in example.record:
            line[f"{name}_return"] = example.record["return"]
    return line


def command_line(argv: Sequence[str] | None = None) -> int:
    """Parse, check, run; the exit code."""
    return run_command(argv, SUMMARY, DpoConfig, train)


if __name__ == "__main__":
    sys.exit(command_line())
