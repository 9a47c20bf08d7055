"""The passes of one training step: score tokens, and take optimizer steps on the clipped objective.

    J(θ) = s/N Σ_{b,t} mask · w · min( ρ A, clip(ρ, 1-ε, 1+ε) A ) - β KL(π_θ ‖ π_ref) + c_H H(π_θ)

    ρ = π_θ(token) / π_old(token)        π_old: the policy when the step began
    w = min( π_old / μ, cap )            μ: the policy as the sampler computed it
    N = policy tokens of the mini-batch over all processes
    s = policy tokens of the batch over those of the step, groups without signal included

With `--loss-agg seq-mean` all three terms are means over trajectories, each token weighted by
`batching.seq_mean_weights`, and s counts trajectories; KL and entropy are logged by token.

    step's batch ──shuffle──> mini-batches ──cut──> micro-batches
                              an optimizer step     a backward each

`--ppo-epochs` E over M mini-batches takes E·M optimizer steps. When E·M = 1 the policy has not
moved before its only step: ρ = 1, and π_old is the current policy, detached.

`optimize` is the one loop that cuts, accumulates, clips and steps. A method is a `loss_of`: a few
lines that run the model on a micro-batch and ask losses.py for its loss.

Over several processes every rank holds the whole batch, takes the same mini-batches and runs its
share of the micro-batches (`scale/distributed.py`); N and the sums are global.

Shapes: B rows, T tokens. Read first: `losses.py`. Read next: `models.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from batching import Batch, cut_micro_batches, padding_share, seq_mean_weights
from config import Objective
from losses import LossInput, imitation_loss, masked_mean, masked_sum, policy_objective, value_loss
from run.progress import phase
from scale import distributed
from scale.prefix import pack, shared_share

# Share of a batch's tokens that sharing must save to be faster than padded micro-batches: from 14 %
# on it was faster in every repeat of a benchmark (135M model, two CPU cores), below 6 %
# not in all; rows of different lengths pay earlier, as sharing also saves their padding.
SHARING_PAYS = 0.1

Metrics = dict[str, torch.Tensor]
# (micro-batch, its mini-batch), on the CPU -> the micro-batch's share of the mini-batch's loss, and
# of what is logged.
LossOf = Callable[[Batch, Batch], tuple[torch.Tensor, Metrics]]


class Learner(NamedTuple):
    """A model in training, whole or in parts, and what moves it."""

    accelerator: Any
    model: Any
    optimizer: Any


# ---------------------------------------------------------------------- one loop for every method


def optimize(
    learner: Learner,
    batch: Batch,
    loss_of: LossOf,
    objective: Objective,
    seed: int = 0,
    label: str = "update",
) -> dict[str, float]:
    """All optimizer steps on a batch: mini-batches, micro-batches, backward, clip, step.

    A loss or gradient that is not finite never reaches the optimizer: that mini-batch is skipped
    and counted, on every rank alike.

    Args:
        loss_of: must be a sum over rows divided by a count of the mini-batch, so that neither the
            cut nor the number of processes changes the step.
        objective: sizes of mini- and micro-batches, epochs, the norm to clip to.
        seed: of the order of the mini-batches.
        label: of the progress line.
    Returns:
        What loss_of measures, as means over mini-batches (names with "max:" as maxima);
        `grad_norm`, before clipping, a mean over `optimizer_steps`; and `skipped_steps`.
    """
    totals: dict[str, float] = {}
    norms: list[float] = []
    mini_batches = list(_mini_batches(batch, objective, seed))
    with phase(label, len(batch) * objective.ppo_epochs, "trajectories") as tick:
        for rows in mini_batches:
            mini_batch, sums, is_finite = batch.rows(rows), dict[str, float](), True
            passes = _rank_passes(batch, rows, objective)
            for micro, counts in passes:
                loss, parts = loss_of(batch.rows(micro), mini_batch)
                # FSDP averages gradients over ranks, and we want their sum.
                learner.accelerator.backward(loss * (distributed.world_size() if counts else 0.0))
                if counts and torch.isfinite(loss):
                    _add(sums, {name: float(value.detach()) for name, value in parts.items()})
                elif counts:
                    is_finite = False
                tick(len(rows) / len(passes))  # every rank takes as many passes
            norm = distributed.clip_grad_norm(learner.model.parameters(), objective.max_grad_norm)
            reports = distributed.gather((is_finite and math.isfinite(norm), sums))
            if all(finite for finite, _ in reports):
                learner.optimizer.step()
                norms.append(norm)
            learner.optimizer.zero_grad()
            for _, part in reports:
                _add(totals, part)
    means = {
        name.removeprefix("max:"): value if name.startswith("max:") else value / len(mini_batches)
        for name, value in totals.items()
    }
    return means | {
        "grad_norm": sum(norms) / len(norms) if norms else 0.0,
        "optimizer_steps": len(norms),
        "skipped_steps": len(mini_batches) - len(norms),
    }


def _add(totals: dict[str, float], numbers: dict[str, float]) -> None:
    """Add to running sums; names that begin with max: are running maxima."""
    for name, number in numbers.items():
        if name.startswith("max:"):
            totals[name] = max(totals.get(name, 0.0), number)
        else:
            totals[name] = totals.get(name, 0.0) + number


def _mini_batches(batch: Batch, objective: Objective, seed: int) -> Iterator[list[int]]:
    """Row indices of each optimizer step: every row once per epoch, groups in a fresh order. A
    group's samples stay neighbours, so that they can share their opening (scale/prefix.py)."""
    generator = torch.Generator().manual_seed(seed)
    members: dict[int, list[int]] = {}
    for row, group in enumerate(batch.group_ids.tolist()):
        members.setdefault(group, []).append(row)
    groups = list(members.values())
    for _ in range(objective.ppo_epochs):
        order = torch.randperm(len(groups), generator=generator).tolist()
        rows = [row for i in order for row in groups[i]]
        parts = math.ceil(len(rows) / objective.mini_batch_size)
        for n in range(parts):  # of equal sizes: a rest of a few rows would count as much as 64
            yield rows[n * len(rows) // parts : (n + 1) * len(rows) // parts]


def _rank_passes(
    batch: Batch, rows: list[int], objective: Objective
) -> list[tuple[list[int], bool]]:
    """This rank's micro-batches of these rows, and whether each counts."""
    limit, share = objective.max_tokens_per_micro_batch, objective.share_prefix
    cuts = cut_micro_batches(batch, rows, limit, share, distributed.world_size())
    return distributed.rank_passes(cuts, [int(batch.lengths[micro].sum()) for micro in cuts])


def padding_of(batch: Batch, objective: Objective, seed: int = 0) -> float:
    """Share of padding in the micro-batches that `optimize` makes, 0..1; packed rows have none."""
    objective = decide_sharing(objective, batch)
    if objective.share_prefix:
        return 0.0
    limit, ranks = objective.max_tokens_per_micro_batch, distributed.world_size()
    cuts: list[list[int]] = []
    for rows in _mini_batches(batch, objective, seed):
        cuts += cut_micro_batches(batch, rows, limit, num_ranks=ranks)
    return padding_share(batch.lengths.tolist(), cuts)


# --------------------------------------------------------------------------------------- the policy


def decide_sharing(objective: Objective, batch: Batch) -> Objective:
    """`objective` without prefix sharing where the batch shares too little for it to pay."""
    if objective.share_prefix and shared_share(batch) < SHARING_PAYS:
        return replace(objective, share_prefix=False)
    return objective


def forward_policy(
    policy: Any, batch: Batch, objective: Objective, device: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of one micro-batch, (B, T) float32 each on `device`."""
    temperature = objective.temperature
    if not objective.share_prefix:
        return policy(batch.input_ids.to(device), batch.loss_mask.to(device), temperature)
    g = pack(batch)
    log_probs, entropy = policy(
        g.input_ids.to(device),
        g.loss_mask.to(device),
        temperature,
        g.position_ids.to(device),
        g.parts,
        g.source.to(device),
    )
    columns = g.columns.to(device)  # back from (1, L) to (B, T); padding reads column 0, which is 0
    return log_probs[0, columns], entropy[0, columns]


def score_policy(policy: Any, batch: Batch, objective: Objective, device: Any) -> torch.Tensor:
    """Log-probs of a whole batch without gradient: (B, T) float32 on the CPU, on every rank."""
    objective = decide_sharing(objective, batch)
    return _score(lambda part: forward_policy(policy, part, objective, device)[0], batch, objective)


def update_policy(
    learner: Learner, batch: Batch, objective: Objective, seed: int = 0, signal_share: float = 1.0
) -> dict[str, float]:
    """All optimizer steps of one training step on the policy.

    Args:
        batch: with advantages; with old_log_probs unless there is exactly one optimizer step (then
            π_old = π_θ); with ref_log_probs when kl_loss_coef > 0.
        signal_share: s, see `losses.policy_objective`.
    Returns:
        `policy/*` and `sampler/*` metrics, means over policy tokens.
    """
    has_old = batch.old_log_probs is not None
    assert has_old or objective.num_optimizer_steps(len(batch)) == 1, "the policy moves before this"
    objective, device = decide_sharing(objective, batch), learner.accelerator.device

    def loss_of(part: Batch, mini_batch: Batch) -> tuple[torch.Tensor, Metrics]:
        log_probs, entropy = forward_policy(learner.model, part, objective, device)  # (B, T) each
        b = part.to(device)
        assert b.advantages is not None
        weights = None
        if objective.loss_agg == "seq-mean":
            weights = seq_mean_weights(part.loss_mask, mini_batch.loss_mask).to(device)  # (B,)
        scored = LossInput(
            log_probs=log_probs,
            entropy=entropy,
            old_log_probs=log_probs.detach() if b.old_log_probs is None else b.old_log_probs,
            rollout_log_probs=b.rollout_log_probs,
            ref_log_probs=b.ref_log_probs,
            advantages=b.advantages,
            loss_mask=b.loss_mask,
            weights=weights,
        )
        return policy_objective(scored, objective, _num_tokens(mini_batch), signal_share)

    return policy_metrics(optimize(learner, batch, loss_of, objective, seed), learner)


def imitate(
    learner: Learner, batch: Batch, objective: Objective, seed: int = 0, label: str = "update"
) -> dict[str, float]:
    """All optimizer steps of weighted imitation on a batch.

        L = - 1/N Σ_b w_b Σ_t loss_mask · log π_θ(token_t | tokens_<t)

    Args:
        batch: with `weights`, or without: then w = 1, which is supervised fine-tuning.
        label: see `optimize`.
    Returns:
        `policy/*` metrics, means over policy tokens.
    """
    objective, device = decide_sharing(objective, batch), learner.accelerator.device

    def loss_of(part: Batch, mini_batch: Batch) -> tuple[torch.Tensor, Metrics]:
        with learner.accelerator.autocast():
            log_probs, entropy = forward_policy(learner.model, part, objective, device)
        b, num_tokens = part.to(device), _num_tokens(mini_batch)
        loss = imitation_loss(log_probs, b.loss_mask, num_tokens, b.weights)
        return loss, {"loss": loss, "entropy": masked_mean(entropy, b.loss_mask, num_tokens)}

    return policy_metrics(optimize(learner, batch, loss_of, objective, seed, label), learner)


def policy_metrics(metrics: dict[str, float], learner: Learner) -> dict[str, float]:
    """What `optimize` returns, under the names that are logged, with the learning rate."""
    named = {name if "/" in name else f"policy/{name}": value for name, value in metrics.items()}
    return named | {"policy/learning_rate": learner.optimizer.param_groups[0]["lr"]}


def _num_tokens(batch: Batch) -> float:
    """Policy tokens (N)."""
    return float(batch.loss_mask.sum())


# --------------------------------------------------------------------------------------- the critic


def score_critic(critic: Any, batch: Batch, objective: Objective, device: Any) -> torch.Tensor:
    """Values of a whole batch without gradient: (B, T) float32 on the CPU, on every rank."""
    padded = replace(objective, share_prefix=False)
    return _score(
        lambda part: critic(part.input_ids.to(device), part.loss_mask.to(device)), batch, padded
    )


def update_critic(
    learner: Learner, batch: Batch, objective: Objective, seed: int = 0
) -> dict[str, float]:
    """All optimizer steps of one training step on PPO's critic.

    Args:
        batch: with values, the critic's before the step, and returns, targets from `gae`.
    Returns:
        `critic/*` metrics, means over policy tokens.
    """
    device, values, returns = learner.accelerator.device, batch.values, batch.returns
    assert values is not None and returns is not None

    def loss_of(part: Batch, mini_batch: Batch) -> tuple[torch.Tensor, Metrics]:
        b = part.to(device)
        assert b.values is not None and b.returns is not None
        result = value_loss(
            learner.model(b.input_ids, b.loss_mask),  # (B, T)
            b.values,
            b.returns,
            b.loss_mask,
            objective.value_clip,
            _num_tokens(mini_batch),
        )
        return result.loss, {"critic/loss": result.loss, "critic/clip_frac": result.clip_frac}

    padded = replace(objective, share_prefix=False)
    metrics = optimize(learner, batch, loss_of, padded, seed, label="critic's update")
    variance = _variance(returns, batch.loss_mask)
    unexplained = _variance(returns - values, batch.loss_mask)
    measured = {name: value for name, value in metrics.items() if "/" in name}
    return measured | {
        "critic/grad_norm": metrics["grad_norm"],
        "critic/skipped_steps": metrics["skipped_steps"],
        "critic/explained_variance": 1 - unexplained / variance if variance > 0 else 0.0,
    }


def _variance(x: torch.Tensor, loss_mask: torch.Tensor) -> float:
    """Variance over policy tokens."""
    mean = masked_mean(x, loss_mask)
    return float(masked_sum((x - mean).square(), loss_mask) / loss_mask.sum().clamp(min=1))


@torch.no_grad()
def _score(
    forward: Callable[[Batch], torch.Tensor], batch: Batch, objective: Objective
) -> torch.Tensor:
    """This rank's rows through `forward`, zeros elsewhere, then the sum over ranks: (B, T)."""
    out = torch.zeros(batch.loss_mask.shape)  # (B, T)
    device: Any = "cpu"
    for rows, counts in _rank_passes(batch, list(range(len(batch))), objective):
        scores = forward(batch.rows(rows))
        device = scores.device
        if counts:
            out[rows, : scores.shape[1]] = scores.float().cpu()
    return distributed.sum_over_ranks(out, device)
