"""Direct preference optimization: favour the better of two trajectories over the worse one.

RLHF learns a reward from pairs, then maximises it under a penalty for moving away from a reference
policy. The maximum has a closed form:

    π*(τ | x) = 1/Z(x) · π_ref(τ | x) · exp( R(x, τ) / β )

Inverting this, every policy implies a reward for which it is optimal, R = β log π/π_ref + β log Z.
In the Bradley-Terry model of a comparison, p(τ⁺ wins) = σ(R⁺ − R⁻), the intractable Z(x) cancels if
both trajectories have the same x. The loss then needs no reward model (arXiv 2305.18290):

    h = (log π_θ(τ⁺) − log π_ref(τ⁺)) − (log π_θ(τ⁻) − log π_ref(τ⁻))        L = −log σ(β h)

For agents τ is a whole trajectory, and log π(τ) sums over the tokens that the policy wrote (arXiv
2403.02502). π_ref is the policy at the start of the iteration. Its log-probs are computed once and
stored with the pairs in `pairs/iteration_001.jsonl`, so a second copy of the model is not needed.

    pair files, runs, experts against experience, or the policy's own play
      ──> 1 pairs, with the reference's log-probs ──> 2 update ──> 3 measure, log, save

The loss depends only on the margin h, so both likelihoods can fall. If the likelihood of the better
trajectory falls far, the policy drifts towards some third behaviour: watch
preference/chosen_log_prob. This happens easily with agents, because a failed trajectory is longer
than a successful one, and most of its actions were right. --sft-coef therefore adds imitation of
the better trajectory (arXiv 2404.19733; RESULTS.md has runs without it).

    python dpo.py --env textcraft                                   # pairs from the policy's play
    python dpo.py --data runs/NAME                                  # pairs from an earlier run
    python dpo.py --expert demos.json --experience runs/NAME        # prefer the expert's episodes
    python dpo.py --pairs pairs.json --model X --warm-start never   # files: docs/data.md

Shapes: P pairs, B = 2P rows. Read first: sft.py. Read next: agentevol.py.
"""

from __future__ import annotations

import json
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
from conversations import (
    RECORD_KEYS,
    check_keys,
    check_record,
    read_objects,
    read_records,
    turns_of,
)
from data import ROUNDING, Example, Record, Texts, encode
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
    """Direct preference optimization on pairs of trajectories."""

    method: ClassVar[str] = "dpo"
    program: ClassVar[str] = "dpo.py"
    folder: ClassVar[str] = "pairs"
    paper_values: ClassVar[dict[str, Any]] = {"learning_rate": 5e-7, "beta": 0.5, "sft_coef": 0.0}

    # The pairs
    pairs: tuple[str, ...] = ()
    """pair files: {"id", "prompt", "chosen", "rejected"} (docs/data.md);
    if none of --pairs, --data and --expert is given, the policy plays to get pairs"""
    data: tuple[str, ...] = ()
    """run folders, or files of conversations with returns;
    each pair is a better and a worse episode of the same task"""
    expert: tuple[str, ...] = ()  # conversations to prefer over those in --experience
    experience: tuple[str, ...] = ()  # the policy's conversations on the tasks of --expert
    min_gap: float = 0.5  # minimum difference between the two returns of a pair (0..1)
    min_return: float = 0.0  # minimum return of the chosen trajectory (0..1)
    pairs_per_task: int = 4
    """maximum number of pairs per task: those with the largest difference in return,
    or with --pairs the first ones in the file"""
    # The loss
    beta: float = 0.1  # strength of the pull towards the reference policy [paper: 0.5]
    loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    """loss function: sigmoid (DPO), ipo (IPO) or hinge (as in SLiC)"""
    sft_coef: float = 1.0
    """weight of the imitation loss per token, which keeps the likelihood of the chosen trajectory
    from falling; 0: DPO without imitation [paper: 0]"""
    # Training
    iterations: int = 6
    """number of iterations; in each one the policy plays and then trains;
    --steps is divided equally among them"""
    tasks_per_iteration: int = 48  # tasks played in each iteration
    steps: int = 18
    """total training steps, including those before a resume;
    one pass over n pairs takes 2n / --mini-batch-size steps, rounded up"""
    mini_batch_size: int = 64  # trajectories per step, two for each pair
    learning_rate: float = 4e-5  # learning rate of the policy (AdamW) [paper: 5e-7]
    eval_every: int = 9
    save_every: int = 9  # write a checkpoint every N steps and at the end

    def check(self) -> None:
        super().check()
        is_even = self.mini_batch_size % 2 == 0
        self.require("mini_batch_size", is_even, "must be even: a pair is two trajectories")
        if bool(self.expert) != bool(self.experience):
            raise Misuse("give --expert and --experience together")
        if sum(map(bool, (self.pairs, self.data, self.expert))) > 1:
            raise Misuse("--pairs, --data and --expert are alternatives; give only one")
        if self.learns_from_play:
            self.require("group_size", self.group_size >= 2, "must be at least 2 to form pairs")

    def unused_options(self) -> Iterator[tuple[str, str]]:
        yield from self.unused_without_play()
        if not self.learns_from_play:
            for name in ("iterations", "tasks_per_iteration", "group_size", "env_weights"):
                yield name, "the pairs come from files, not from play"

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
    """Train on pairs; returns the closed run. Raises Misuse only before anything is written."""
    config = checked(config)
    file_pairs = None if config.learns_from_play else load_pairs(config)
    with open_session(config, MethodWorker) as session:
        w = session.worker
        files = IterationFiles.from_session(session)
        session.evaluate_start()
        pairs, ref_sums, loaded_iteration = list[Pair](), torch.empty(0, 2), -1
        for step in session.steps_left():
            clock = Clock(vars(config))
            iteration, step_index = divmod(step - 1, config.steps_per_iteration)
            metrics: dict[str, Any] = {}
            # ------------------------------------------------------------------------------ 1 pairs
            if loaded_iteration != iteration:
                with clock("time/rollout_s"):
                    pairs, ref_sums, explored = pairs_of_iteration(session, files, step, file_pairs)
                metrics |= explored if step_index == 0 else {}
                loaded_iteration = iteration

            # ----------------------------------------------------------------------------- 2 update
            batch = None
            if not pairs:
                metrics |= {"policy/optimizer_steps": 0, "policy/skipped_steps": 0}
            else:
                key = f"dpo/{config.seed}/{iteration}"
                size = config.mini_batch_size // 2
                rows, epochs = portion(step_index + 1, len(pairs), size, key)
                batch = batch_of([pairs[row] for row in rows], w.pad_id)  # B = 2 rows per pair
                batch.ref_sums = ref_sums[rows].flatten()  # (B,)
                w.sleep_sampler()
                w.set_learning_rates(step)
                objective = w.objective_for(len(batch))
                with clock("time/update_s"):
                    metrics |= prefer(w.policy, batch, objective, config, seed=step)
                metrics |= data_metrics(batch, epochs, clock)

            # ----------------------------------------------------------------- 3 measure, log, save
            metrics |= sync_if_evaluated(session, step, batch, clock)
            metrics |= session.evaluate_if_due(step, clock)
            session.finish_step(step, metrics, clock)
    return session.run


# ---------------------------------------------------------------------------------------- the loss


class PreferenceLoss(NamedTuple):
    """Scalars. `loss` has a gradient; the other fields are detached means over pairs."""

    loss: Tensor
    margin: Tensor  # chosen_reward − rejected_reward = β h; 0 if the policy equals the reference
    accuracy: Tensor  # share of pairs with a margin above 0
    chosen_reward: Tensor  # β (log π − log π_ref) of the chosen trajectory
    rejected_reward: Tensor  # the same for the rejected trajectory


# f(h, β) of `preference_loss`, (P,) -> (P,). To add a loss, add a function here.
PREFERENCES: dict[str, Callable[[Tensor, float], Tensor]] = {
    # DPO (arXiv 2305.18290, eq. 7). NOTE: −log(sigmoid(x)) would be inf below x = −89.
    "sigmoid": lambda h, beta: -logsigmoid(beta * h),
    "ipo": lambda h, beta: (h - 1 / (2 * beta)).square(),  # IPO (arXiv 2310.12036): h has a target
    "hinge": lambda h, beta: (1 - beta * h).relu(),  # as in SLiC (arXiv 2309.06657): 0 if β h ≥ 1
}


def preference_loss(
    chosen: Tensor,
    rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    beta: float = 0.1,
    kind: str = "sigmoid",
    denominator: float | None = None,
) -> PreferenceLoss:
    """The loss of pairs, and how far the policy has moved away from the reference on them.

        h = (log π(τ⁺) − log π_ref(τ⁺)) − (log π(τ⁻) − log π_ref(τ⁻))
        L = 1/N Σ_pairs f(h)                           f = −log σ(β h), or another of PREFERENCES

    log π(τ) sums *only over policy tokens*. The probability of a trajectory also has a factor for
    each observation. The environment determines these factors, so they are the same under π and
    π_ref and cancel in the ratio.

    Args:
        chosen, rejected: (P,) log π, summed over each trajectory's policy tokens, with gradient.
        ref_chosen, ref_rejected: (P,) the same for the frozen reference.
        beta: β; smaller values allow the policy to move further from the reference.
        kind: a key of PREFERENCES.
        denominator: N, the number of pairs in the *whole* mini-batch; None: in this call.
    Raises:
        ValueError: the log-probs are per token.
    """
    if chosen.dim() != 1:
        raise ValueError("sum the log-probs of a trajectory over its policy tokens")
    num_pairs = len(chosen) if denominator is None else denominator
    chosen_ratio = chosen - ref_chosen.detach()  # (P,)
    rejected_ratio = rejected - ref_rejected.detach()  # (P,)
    h = chosen_ratio - rejected_ratio  # (P,)
    losses = PREFERENCES[kind](h, beta)  # (P,)
    metrics = (beta * h, (h > 0).to(h.dtype), beta * chosen_ratio, beta * rejected_ratio)
    means = [x.detach().sum() / num_pairs for x in metrics]
    return PreferenceLoss(losses.sum() / num_pairs, *means)


def prefer(
    learner: Learner, batch: Batch, objective: Objective, config: DpoConfig, seed: int = 0
) -> dict[str, float]:
    """One optimizer step on pairs.

    Args:
        batch: rows 2i and 2i + 1 are the chosen and rejected side of pair i; ref_sums is set.
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
        ref = b.ref_sums[0::2], b.ref_sums[1::2]
        result = preference_loss(chosen, rejected, *ref, config.beta, config.loss, num_pairs)
        num_tokens = b.loss_mask[0::2].sum(1)  # (P,) of the chosen rows
        imitation = -(chosen / num_tokens).sum() / num_pairs
        loss = result.loss + config.sft_coef * imitation
        metrics = {f"preference/{n}": x for n, x in result._asdict().items() if n != "loss"}
        return loss, metrics | {
            "policy/loss": loss,
            "preference/sft_loss": imitation.detach(),
            "preference/chosen_log_prob": chosen.detach().sum() / num_pairs,
            "preference/rejected_log_prob": rejected.detach().sum() / num_pairs,
        }

    return policy_metrics(optimize(learner, batch, loss_of, objective, seed), learner)


# --------------------------------------------------------------------------------------- the pairs
# Both sides of a pair have the same task and the same opening x, i.e. prompt and first observation:
#
#     x ├─ a₀ o₁ a₁ o₂ a₂    return 1
#       ├─ a₀ o₁ a₁          return 0.5    1 > 0 is a pair with a gap of 1; with min_gap 0.5,
#       └─ a₀                return 0      1 > 0.5 and 0.5 > 0 are pairs too
#
# If the environment seeds are known, they must be equal. Otherwise the better trajectory might
# have had an easier episode, and the pair would reward luck.


class Pair(NamedTuple):
    """Two trajectories of one task with the same opening; `chosen` is better."""

    chosen: Example
    rejected: Example

    @property
    def task_id(self) -> str:
        return self.chosen.task_id

    @property
    def gap(self) -> float | None:
        """Difference of returns; None if one is unknown."""
        better, worse = self.chosen.total_return, self.rejected.total_return
        return None if better is None or worse is None else better - worse


Group = tuple[str, Texts]  # task, opening


def pairs_of(examples: Iterable[Example], config: DpoConfig, counts: Counter[str]) -> list[Pair]:
    """Pair trajectories of the same task and opening, with the higher return as chosen. The result
    does not depend on the order of `examples`.

    Args:
        counts: the numbers of pairs left out are added here, by reason; "no partner" counts
            openings at which no trajectory is better than another.
    Raises:
        ValueError: an example has no return; the message names it.
    """
    candidates = {}
    for key, members in _group_by_opening(examples).items():
        if any(example.total_return is None for example in members):
            raise ValueError(f'conversation {key[0]} has no "return" to compare it by')
        members.sort(key=lambda example: -(example.total_return or 0.0))
        candidates[key] = [Pair(*pair) for pair in combinations(members, 2)]
    return _select(candidates, config, counts)


def pairs_of_experts(
    expert: Iterable[Example],
    experience: Iterable[Example],
    config: DpoConfig,
    counts: Counter[str],
) -> list[Pair]:
    """Pair an expert's trajectories with the policy's from the same opening. If a return is
    unknown, the expert counts as better, unless both have the same actions."""
    experts, policy = _group_by_opening(expert), _group_by_opening(experience)
    candidates = {
        key: [Pair(*pair) for pair in product(experts.get(key, ()), policy.get(key, ()))]
        for key in experts.keys() | policy.keys()
    }
    return _select(candidates, config, counts)


def _group_by_opening(examples: Iterable[Example]) -> dict[Group, list[Example]]:
    """Group by task and opening. The order within a group depends only on its members."""
    groups: dict[Group, list[Example]] = defaultdict(list)
    for example in sorted(examples, key=lambda e: json.dumps(e.record, sort_keys=True)):
        groups[example.task_id, example.parts[0]].append(example)
    return groups


def _select(
    candidates: dict[Group, list[Pair]], config: DpoConfig, counts: Counter[str]
) -> list[Pair]:
    """The best pairs of each task: largest gap first, equal gaps in random order."""
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
    """The pairs to learn from. All other pairs are counted, each under one reason."""
    usable: list[Pair] = []
    per_task: Counter[str] = Counter()
    texts: set[tuple[Texts, Texts, Texts]] = set()
    for pair in pairs:
        total = pair.chosen.total_return
        (opening, better), (_, worse) = pair.chosen.parts, pair.rejected.parts
        if pair.gap is not None and pair.gap <= max(ROUNDING, config.min_gap - ROUNDING):
            counts["gap"] += 1
        elif total is not None and total < config.min_return - ROUNDING:
            counts["low return"] += 1
        elif better[::2] == worse[::2] or (opening, better, worse) in texts:  # [::2]: the actions
            counts["equal texts"] += 1
        elif per_task[pair.task_id] >= config.pairs_per_task:
            counts["over pairs per task"] += 1
        else:
            per_task[pair.task_id] += 1
            texts.add((opening, better, worse))
            usable.append(pair)
    return usable


def batch_of(pairs: Sequence[Pair], pad_id: int) -> Batch:
    """Rows 2i and 2i + 1 are the chosen and rejected side of pair i. They form group i, so that
    their opening is computed only once (scale/prefix.py)."""
    sides = [(i, example) for i, pair in enumerate(pairs) for example in pair]
    return make_batch([replace(e.trajectory, group_id=i) for i, e in sides], pad_id)


def pairs_of_iteration(
    session: Session[MethodWorker],
    files: IterationFiles,
    step: int,
    file_pairs: Sequence[Pair] | None,
) -> tuple[list[Pair], Tensor, dict[str, Any]]:
    """An iteration's pairs, the reference's log-probs (P, 2), and metrics of the pairs. They are
    read from the run if it has them. Otherwise they are made now: the current policy is the
    reference.

    Args:
        file_pairs: pairs from files; None: the policy plays.
    Raises:
        TrainingError: the first iteration has no pairs, or the pairs of an iteration that has begun
            are missing from the run.
    """
    w, config = session.worker, session.config
    assert isinstance(config, DpoConfig)
    iteration, step_index = divmod(step - 1, config.steps_per_iteration)
    if (saved := files.read(iteration + 1, must_exist=step_index > 0)) is not None:
        lines, summary = saved
        pairs = [parse_pair(line, str(line["id"]), w.chat, trust_ids=True) for line in lines]
        sums = [(line["ref_chosen"], line["ref_rejected"]) for line in lines]
        return pairs, torch.tensor(sums).reshape(-1, 2), summary["metrics"]
    counts: Counter[str] = Counter()
    metrics: dict[str, Any] = {}
    pairs = list(file_pairs or ())
    if file_pairs is None:
        examples, metrics = w.explore(step)
        pairs = pairs_of(examples, config, counts)
    distributed.say(f"iteration {iteration + 1}: {describe(pairs, counts)}")
    if not pairs and not iteration:
        raise TrainingError(
            f"{describe(pairs, counts)}; start from a model that solves some but not all of its "
            "tasks (--model, --warm-start), play more (--tasks-per-iteration, --group-size), or "
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
    reasons = ", ".join(f"{count} {reason}" for reason, count in counts.most_common())
    return f"{len(pairs)} pairs; left out: {reasons or 'none'}"


def sample_for_steps(pairs: list[Pair], config: DpoConfig, iteration: int) -> list[Pair]:
    """Sample as many pairs as this iteration uses, so that the rest need no reference log-probs."""
    limit = config.steps_per_iteration * config.mini_batch_size // 2
    if len(pairs) <= limit:
        return pairs
    distributed.say(f"the steps of this iteration use {limit} of these pairs, sampled at random")
    rng = random.Random(f"dpo/{config.seed}/{iteration}")
    return [pairs[index] for index in sorted(rng.sample(range(len(pairs)), limit))]


def reference_sums(worker: MethodWorker, pairs: Sequence[Pair]) -> Tensor:
    """log π of both sides of each pair under the current policy, summed over policy tokens, (P, 2).
    Collective.

    Raises:
        KeyboardInterrupt: Ctrl-C was pressed; the weights have not changed.
    """
    worker.sleep_sampler()
    sums: list[Tensor] = []
    size, total = worker.config.mini_batch_size // 2, 2 * len(pairs)
    memory_advice = advice("time/log_probs_s", vars(worker.config))
    with memory_advice, phase("the reference's log-probs", total, "trajectories") as tick:
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

PAIR_KEYS = ("id", "item_id", "prompt", "chosen", "rejected", "chosen_return", "rejected_return")


def load_pairs(config: DpoConfig) -> list[Pair]:
    """The pairs from files and runs. Collective.

    Raises:
        Misuse: a file cannot be read, or no pair is left; the message says why.
    """
    if config.has_saved_inputs:
        return []  # the run has stored them, with the reference's log-probs
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
            raise ValueError(f"{report}; a pair needs the same item_id and the same opening")
        distributed.say(report)
        return pairs

    with value_errors_as_misuse():
        pairs = distributed.run_on_rank_0("reading pairs", read)
    return drop_too_long(config, pairs, "pairs", lambda pair: pair)


def read_pairs(
    chat: ChatTemplate, paths: Sequence[Path], config: DpoConfig, counts: Counter[str]
) -> list[Pair]:
    """The pairs in files, in order; at most the first --pairs-per-task of each task.

        {"id": "textcraft_31", "prompt": [{"from": "human", "value": "Goal: ..."}],
         "chosen": [{"from": "gpt", "value": ...}, {"from": "human", ...}, ...], "rejected": [...]}

    Messages ({"role", "content"}) and plain texts are accepted too. Without a prompt, both sides
    are whole conversations.

    Raises:
        ValueError: names file, line and problem.
    """
    return _filter(read_objects(paths, partial(parse_pair, chat=chat)), config, counts)


def parse_pair(content: Any, name: str, chat: ChatTemplate, trust_ids: bool = False) -> Pair:
    """Convert an object of a pair file to a pair; `name` is the task of an object without an id.

    Raises:
        ValueError: it is not a pair; the message says why.
    """
    sides = ("chosen", "rejected")
    if not isinstance(content, dict) or not all(side in content for side in sides):
        text = repr(content)[:80]
        raise ValueError(f'{text}: expected {{"id", "prompt", "chosen", "rejected"}}')
    records = {side: content[side] if isinstance(content[side], dict) else {} for side in sides}
    check_keys(content, PAIR_KEYS)
    parts = (content, *records.values())
    for key in ("item_id", "seed"):
        values = sorted({str(part[key]) for part in parts if part.get(key) is not None})
        if len(values) > 1:
            raise ValueError(f"both sides need the same {key}, not {' and '.join(values)}")
    ids = [part["item_id"] for part in parts if part.get("item_id") is not None]
    ids += [task_id for task_id in (content.get("id"), name) if task_id is not None]
    prompt = [] if content.get("prompt") is None else _turns(content["prompt"], "human")
    prompt = [turn | {"loss": False} for turn in prompt]
    start, texts = str(prompt[-1].get("value")) if prompt else "", [content[side] for side in sides]
    if start and all(isinstance(text, str) and text.startswith(start) for text in texts):
        raise ValueError("both sides repeat the prompt: cut it off, or write them as messages")
    examples = []
    for side in sides:
        try:
            turns = _turns(content[side], "gpt")
            turns = [{"loss": True, **t} if t.get("from") == "gpt" else t for t in turns]
            fields = records[side]
            total = content.get(f"{side}_return", fields.get("return", fields.get("reward")))
            record = {"item_id": str(ids[0]), "conversations": _join(prompt, turns)}
            examples.append(encode(chat, check_record(record | {"return": total}), trust_ids))
        except ValueError as error:
            raise ValueError(f"{side}: {error}") from None
    pair = Pair(*examples)
    if pair.chosen.parts[0] != pair.rejected.parts[0]:
        raise ValueError("chosen and rejected must be equal before the first action")
    return pair


def _turns(content: Any, speaker: str) -> list[dict[str, Any]]:
    """Convert text, messages, turns or a conversation to turns."""
    if isinstance(content, dict):
        check_keys(content, RECORD_KEYS)
        content = content.get("conversations", content.get("messages", content))
    if isinstance(content, str) and content:
        content = [{"from": speaker, "value": content}]
    is_list = isinstance(content, list) and all(isinstance(turn, dict) for turn in content)
    if not content or not is_list:
        raise ValueError(
            f"{repr(content)[:60]}: expected text, or a list of "
            '{"from", "value"} or {"role", "content"}'
        )
    return turns_of(content) if any("role" in turn for turn in content) else content


def _join(prompt: list[dict[str, Any]], turns: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The conversation of a side. If its turns repeat the prompt, they are the whole conversation,
    perhaps with a system text before the prompt."""
    opening, texts = ([(t.get("from"), t.get("value")) for t in part] for part in (prompt, turns))
    if opening and texts[0][0] != "gpt":
        start = 1 if texts[0][0] == "system" != opening[0][0] else 0
        end = start + len(opening)
        if texts[start:end] == opening:
            return [turn | {"loss": False} for turn in turns[:end]] + turns[end:]
        if opening[-1][0] == "human":
            raise ValueError("it neither answers nor repeats the prompt: leave the prompt out")
    return prompt + turns


def format_pair(pair: Pair) -> Record:
    """The object of a pair file that `parse_pair` converts back to this pair."""
    length = len(pair.chosen.parts[0])
    prompt = pair.chosen.record["conversations"][:length]
    line: Record = {"id": pair.task_id, "prompt": prompt}
    for name, example in zip(("chosen", "rejected"), pair, strict=True):
        # Write `loss` explicitly, because an action without it would be learned.
        turns = example.record["conversations"][length:]
        line[name] = [{"loss": None, **turn} for turn in turns]
        if "return" in example.record:
            line[f"{name}_return"] = example.record["return"]
    return line


def command_line(argv: Sequence[str] | None = None) -> int:
    """Parse, check and run; returns the exit code."""
    return run_command(argv, SUMMARY, DpoConfig, train)


if __name__ == "__main__":
    sys.exit(command_line())
