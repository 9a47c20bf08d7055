"""Direct preference optimization: of two trajectories of a task, make the better one likelier than
the other, compared with the policy as the iteration began.

    pair files, runs, experts against experience, or the policy's own play
                           │
                           1 pairs: at the beginning of an iteration, with the reference's log-probs
                           │
                           2 update: the margin of the step's pairs grows
                           │
                           3 measure, log, save ──> next step

    h = (log π_θ(τ⁺) − log π_ref(τ⁺)) − (log π_θ(τ⁻) − log π_ref(τ⁻))        L = −log σ(β h)

log π(τ) sums over the tokens that the policy wrote (preferences.py). π_ref is the policy as it was
when the iteration began: its log-probs are computed once, before the first step, and kept with the
pairs in `pairs/iteration_001.jsonl`, so that no second copy of the model is ever held.

A pair is two rows of one group: what both open with is computed once (scale/prefix.py), and a
micro-batch never parts them, for the loss is not a sum over rows.

The loss sees margins alone. Both likelihoods may fall, and where the chosen one's falls far the
policy does something third: watch preference/chosen_log_prob. A failure is longer than a success,
and most of its moves were right ones, so agents unlearn by that: --sft-coef holds the chosen side
up (arXiv 2404.19733; RESULTS.md has what happened without). Offline pairs teach about what was
tried; with --iterations the policy plays anew and is compared with itself.

    python dpo.py --env textcraft                                     # plays for its pairs
    python dpo.py --env textcraft --iterations 3 --steps 30           # anew every 10 steps
    python dpo.py --data runs/NAME                                    # what a run has tried
    python dpo.py --expert demos.json --experience runs/NAME          # a teacher against the policy
    python dpo.py --pairs pairs.json --model X --warm-start never     # files: docs/data.md

Read first: preferences.py, pairs.py. Read next: agentevol.py.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from batching import Batch
from config import Misuse, Objective
from conversations import return_of
from pairs import (
    Pair,
    PairSettings,
    encode_pairs,
    from_agentgym,
    pairs_of,
    pairs_of_experts,
    read_pairs,
    to_agentgym,
    why_left_out,
)
from preferences import preference_loss
from rollout import portion
from run import shell
from run.clock import Clock, advice
from run.methodworker import Kept, MethodWorker, count_learned, fitting, sync_if_measured
from run.progress import phase
from run.rundir import Run
from run.session import Session, TrainingError, at_work
from runtime.methods import DpoConfig, check_method, conversations_of, counted, is_kept
from scale import distributed
from update import Learner, Metrics, forward_policy, optimize, score_policy, suited

SUMMARY = (__doc__ or "").split("\n\n")[0]


def train(config: DpoConfig) -> Run:
    """Prefer as the options say; the run, closed.

    Raises:
        Misuse: an option, or what it names, cannot work; nothing was written.
        KeyboardInterrupt: after Ctrl-C, once all is saved.
        shell.FAILURES: what ended it, in a line; what was saved stays.
    """
    config = shell.checked(config, check_method)
    length = config.steps_per_iteration
    given = given_pairs(config)
    with at_work(config, MethodWorker) as session:
        w = session.worker
        kept = Kept.in_run("pairs", session, length)
        session.evaluate_start()
        judged, known = Judged(), -1
        for step in session.steps_left():
            clock = Clock(vars(config))
            iteration, place = divmod(step - 1, length)
            metrics: dict[str, Any] = {}
            # ------------------------------------------------------------------------------ 1 pairs
            if known != iteration:
                with session.saving_on_failure(), clock("time/rollout_s"):
                    judged, found = pairs_for(session, kept, step, given)
                metrics |= found if place == 0 else {}
                known = iteration

            # ----------------------------------------------------------------------------- 2 update
            batch = None
            if not judged.pairs:
                metrics |= {"policy/optimizer_steps": 0, "policy/skipped_steps": 0}
            else:
                batch, epochs = step_of(w, judged, place + 1, iteration)
                with session.saving_on_failure():
                    w.rest()
                w.set_learning_rates(step)
                with clock("time/update_s"):
                    metrics |= prefer(w.policy, batch, w.portions(len(batch)), config, seed=step)
                metrics |= count_learned(batch, epochs, clock)

            # ----------------------------------------------------------------- 3 measure, log, save
            metrics |= sync_if_measured(session, step, batch, clock)
            metrics |= session.evaluate_if_due(step, clock)
            session.finish_step(step, metrics, clock)
    return session.run


class Judged(NamedTuple):
    """Pairs, and log π_ref of each one's chosen and rejected trajectory."""

    pairs: Sequence[Pair] = ()
    sums: Sequence[tuple[float, float]] = ()


def step_of(worker: MethodWorker, judged: Judged, turn: int, iteration: int) -> tuple[Batch, float]:
    """The pairs of an iteration's `turn`-th step, and the epochs that are done with it."""
    per_step, key = worker.config.mini_batch_size // 2, f"dpo/{worker.config.seed}/{iteration}"
    chosen, epochs = portion(turn, len(judged.pairs), per_step, key)
    batch = encode_pairs(worker.chat, [judged.pairs[place] for place in chosen], worker.pad_id)
    batch.ref_sums = torch.tensor([each for place in chosen for each in judged.sums[place]])
    return batch, epochs


# ------------------------------------------------------------------------------------------ pairs


def settings_of(config: DpoConfig) -> PairSettings:
    return PairSettings(config.min_gap, config.min_return, config.pairs_per_task, config.seed)


def given_pairs(config: DpoConfig) -> list[Pair] | None:
    """The pairs of files and runs; None: the policy plays for them. Collective.

    Raises:
        Misuse: a file that cannot be read, or holds no pair; says why none is left.
    """
    if config.learns_from_play:
        return None
    if is_kept(config):
        return []  # the run has them already, with the reference's log-probs
    distributed.join()
    counts: Counter[str] = Counter()

    def read() -> list[Pair]:
        settings = settings_of(config)
        if config.pairs:
            return read_pairs([Path(name) for name in config.pairs], settings, counts)
        if config.data:
            return pairs_of(conversations_of("data", config.data), settings, counts)
        expert = conversations_of("expert", config.expert)
        experience = conversations_of("experience", config.experience)
        return pairs_of_experts(expert, experience, settings, counts)

    try:
        found, left_out = distributed.first("reading pairs", lambda: (read(), why_left_out(counts)))
    except (ValueError, OSError) as error:
        raise Misuse(str(error)) from error
    if not found:
        problem = f"no pair left ({left_out or 'nothing was given'})"
        if not config.pairs:
            problem += (
                '; tries at one task have one "item_id", or "id", and open with the same words'
            )
        raise Misuse(problem)
    if config.min_gap != DpoConfig.min_gap and all(pair.gap is None for pair in found):
        least = f"--min-gap {config.min_gap:g}"
        raise Misuse(f"{least} compares returns, and no pair here has both; leave it out")
    if config.min_return and all(return_of(pair.chosen) is None for pair in found):
        least = f"--min-return {config.min_return:g}"
        raise Misuse(f"{least} chooses by return, and nothing here has one; leave it out")
    distributed.say(f"{len(found)} pairs" + (f"; left out: {left_out}" if left_out else ""))
    return fitting(config, found, "pairs", lambda pair: (pair.chosen, pair.rejected))


def within_reach(pairs: Sequence[Pair], config: DpoConfig, iteration: int) -> list[Pair]:
    """As many as the iteration's steps take, by chance: of what none of them comes to nobody need
    ask the reference."""
    most = config.steps_per_iteration * config.mini_batch_size // 2
    if len(pairs) <= most:
        return list(pairs)
    distributed.say(
        f"{most} of {len(pairs)} pairs, as many as {config.steps_per_iteration} steps take; a run "
        "that is given more steps later goes over these again"
    )
    chance = random.Random(f"dpo/{config.seed}/{iteration}")
    return [pairs[place] for place in sorted(chance.sample(range(len(pairs)), most))]


def pairs_for(
    session: Session[MethodWorker],
    kept: Kept,
    step: int,
    given: Sequence[Pair] | None,
) -> tuple[Judged, dict[str, Any]]:
    """An iteration's pairs with the reference's log-probs, and metrics of how they came: found in
    the run, or made by the policy as it is now, which is the reference. None at all: what it played
    earned alike, there is nothing to prefer.

    Raises:
        TrainingError: there is no pair in the first iteration, and says why; or the run has lost
            those of an iteration that has begun.
    """
    w, config = session.worker, session.config
    assert isinstance(config, DpoConfig)
    iteration, place = divmod(step - 1, config.steps_per_iteration)

    def make() -> tuple[list[dict[str, Any]], dict[str, Any]]:
        counts: Counter[str] = Counter()
        metrics: dict[str, Any] = {}
        found = list(given) if given is not None else []
        if given is None:
            said, metrics = w.explore(
                iteration + 1, step, config.tasks_per_iteration, config.group_size
            )
            found = pairs_of(said, settings_of(config), counts)
        left_out = why_left_out(counts)
        if not found:
            problem = f"iteration {iteration + 1}: no pair left ({left_out or 'none given'})"
            if not iteration and given is None:
                problem += (
                    "; begin with a model that solves some of its tasks and not all (--model, "
                    "--warm-start), play more of them (--tasks-per-iteration, --group-size), or "
                    "lower --min-gap"
                )
            if not iteration:
                raise TrainingError(problem)
            distributed.say(f"{problem}; its steps change no weight")
            return [], {"metrics": metrics | {"data/pairs": 0}, "left_out": counted(counts)}
        distributed.say(
            f"iteration {iteration + 1}: {len(found)} pairs"
            + (f"; left out: {left_out}" if left_out else "")
        )
        found = within_reach(found, config, iteration)
        sums = reference_of(w, found)
        lines = [
            to_agentgym(pair) | {"ref_chosen": sums[2 * i], "ref_rejected": sums[2 * i + 1]}
            for i, pair in enumerate(found)
        ]
        metrics |= {"data/pairs": len(found)}
        return lines, {"metrics": metrics, "left_out": counted(counts)}

    lines, summary = kept.of(iteration + 1, None if place else make)
    pairs = [from_agentgym(line, str(line["id"])) for line in lines]
    sums = [(line["ref_chosen"], line["ref_rejected"]) for line in lines]
    return Judged(pairs, sums), summary["metrics"]


def reference_of(worker: MethodWorker, pairs: Sequence[Pair]) -> list[float]:
    """log π of both sides of each pair under the policy as it is now: sums over policy tokens.
    Collective.

    Raises:
        KeyboardInterrupt: Ctrl-C came, which no weight waits for.
    """
    worker.rest()
    sums: list[float] = []
    size, total = worker.config.mini_batch_size // 2, 2 * len(pairs)
    in_time = advice("time/log_probs_s", vars(worker.config))  # where memory is short
    with in_time, phase("the reference's log-probs", total, "trajectories") as tick:
        for start in range(0, len(pairs), size):
            if worker.stop.agreed():
                raise KeyboardInterrupt
            part = encode_pairs(worker.chat, pairs[start : start + size], worker.pad_id)
            objective = worker.portions(len(part))
            log_probs = score_policy(worker.policy.model, part, objective, worker.device)  # (B, T)
            sums += (log_probs * part.loss_mask).sum(1).tolist()
            tick(len(part))
    return sums


# -------------------------------------------------------------------------------------- the update


def prefer(
    learner: Learner, batch: Batch, objective: Objective, config: DpoConfig, seed: int = 0
) -> dict[str, float]:
    """One optimizer step on pairs.

    Args:
        batch: rows 2i and 2i + 1 are chosen and rejected of pair i; with ref_sums.
    Returns:
        `policy/*` and `preference/*` metrics, means over pairs.
    """
    objective, device = suited(objective, batch), learner.accelerator.device

    def loss_of(part: Batch, num_pairs: float) -> tuple[torch.Tensor, Metrics]:
        log_probs, _ = forward_policy(learner.model, part, objective, device)  # (B, T)
        b = part.to(device)
        assert b.ref_sums is not None
        mask = b.loss_mask.bool()
        sums = torch.where(mask, log_probs, 0.0).sum(1)  # (B,)  log π(τ)
        chosen, rejected = sums[0::2], sums[1::2]  # (P,) each
        result = preference_loss(
            chosen,
            rejected,
            b.ref_sums[0::2],
            b.ref_sums[1::2],
            config.beta,
            config.label_smoothing,
            config.loss,
            num_pairs,
        )
        loss = result.loss
        imitation = -(chosen / mask[0::2].sum(1)).sum() / num_pairs  # per token of each
        if config.sft_coef:
            loss = loss + config.sft_coef * imitation
        return loss, {
            "policy/loss": loss,
            "preference/sft_loss": imitation.detach(),
            "preference/margin": result.margin,
            "preference/accuracy": result.accuracy,
            "preference/chosen_reward": result.chosen_reward,
            "preference/rejected_reward": result.rejected_reward,
            "preference/chosen_log_prob": chosen.detach().sum() / num_pairs,
            "preference/rejected_log_prob": rejected.detach().sum() / num_pairs,
        }

    metrics = optimize(
        learner, batch, loss_of, objective, seed, count=lambda b: len(b) / 2, cuts_of=pair_cuts
    )
    named = {name if "/" in name else f"policy/{name}": value for name, value in metrics.items()}
    return named | {"policy/learning_rate": learner.optimizer.param_groups[0]["lr"]}


def pair_cuts(batch: Batch, rows: Sequence[int], objective: Objective) -> list[list[int]]:
    """Rows of a mini-batch -> rows of its micro-batches, in which every pair is whole.

    With shared openings a pair is a packed row and a micro-batch; padded, pairs of like length lie
    together. A pair over the budget gets its own.
    """
    pairs = sorted(
        {row - row % 2 for row in rows},
        key=lambda row: (-int(batch.lengths[row : row + 2].max()), row),
    )
    if objective.share_prefix:
        return [[row, row + 1] for row in pairs]
    cuts: list[list[int]] = []
    for row in pairs:
        longest = int(batch.lengths[cuts[-1]].max()) if cuts else 0
        if cuts and (len(cuts[-1]) + 2) * longest <= objective.max_tokens_per_micro_batch:
            cuts[-1] += [row, row + 1]
        else:
            cuts.append([row, row + 1])
    return cuts


# --------------------------------------------------------------------------------- the command line


def command_line(argv: Sequence[str] | None = None) -> int:
    """Parse, check, run; the exit code."""
    return shell.command_line(argv, SUMMARY, DpoConfig, train, check_method)


if __name__ == "__main__":
    sys.exit(command_line())
