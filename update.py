"""The passes of one training step: score tokens, and take optimizer steps on the clipped objective.

    J(θ) = 1/N Σ_{b,t} mask · w · min( ρ A, clip(ρ, 1-ε, 1+ε) A ) - β KL(π_θ ‖ π_ref) + c_H H(π_θ)

    ρ = π_θ(token) / π_old(token)
    w = min( π_old / μ, cap )
    N = policy tokens of the mini-batch over all processes, groups without signal included

π_old is the policy when the step began, as the trainer computes it; μ is the policy as the sampler
computed it. The two have the same weights and differ by rounding (0.004 nats a token in bfloat16);
w corrects for that.

    step's batch ──shuffle──> mini-batches ──cut──> micro-batches
                              an optimizer step     a backward each

`--ppo-epochs` E over a batch of M mini-batches takes E·M optimizer steps; the reference reads the
setting and takes one pass whatever it says. When E·M = 1 the policy has not moved before its only
step, so ρ = 1 and π_old is the current policy, detached: the pass that would recompute it is left
out, exactly.

Over several processes every rank holds the whole batch, takes the same mini-batches, and runs its
own share of the micro-batches (`runtime/distributed.py`); N and the sums are global, so that
neither the number of processes nor the cut changes the step.

The samples of a task stay together when mini-batches are cut: a group that is spread over four
mini-batches shares its opening with a quarter of its samples only (`runtime/prefix.py`).

A loss or gradient that is not finite never reaches the optimizer: that mini-batch is skipped and
counted, on every rank alike.

Shapes: B rows, T tokens. Read next: `losses.py` for each term; `train.py` for where the passes
stand in a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from batching import Batch, cut_rows, micro_batches
from losses import kl_estimate, masked_mean, masked_sum, policy_loss, sampler_is_weights, value_loss
from runtime import distributed
from runtime.prefix import group_cuts, pack, shared_share

# Share of a batch's tokens that sharing must save to be faster than padded micro-batches: from 14 %
# on it was faster in every repeat of benchmarks/prefix.py (135M model, two CPU cores), below 6 %
# not in all; rows of different lengths pay earlier, as sharing also saves their padding.
SHARING_PAYS = 0.1


@dataclass(frozen=True)
class Objective:
    """The coefficients of J(θ), and how it is optimised."""

    clip_ratio: float = 0.2
    value_clip: float = 0.5
    entropy_coef: float = 0.0
    kl_loss_coef: float = 0.0
    kl_estimator: str = "k3"
    sampler_is_cap: float = 2.0  # 0 switches the correction off
    temperature: float = 1.0
    max_grad_norm: float = 1.0
    mini_batch_size: int = 64  # trajectories per optimizer step
    ppo_epochs: int = 1
    max_tokens: int = 4096  # tokens per micro-batch, padding included
    share_prefix: bool = True  # compute the opening that a group shares once (runtime/prefix.py)

    def num_optimizer_steps(self, num_rows: int) -> int:
        """Optimizer steps that a batch of `num_rows` trajectories gets."""
        return self.ppo_epochs * math.ceil(num_rows / self.mini_batch_size)


def suited(objective: Objective, batch: Batch) -> Objective:
    """`objective` with prefix sharing left out where the batch shares too little for it to pay."""
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


def cut(batch: Batch, rows: list[int], objective: Objective) -> list[list[int]]:
    """Rows of a mini-batch -> rows of its micro-batches; where it can, one for every rank."""
    cuts = _cut(batch, rows, objective, objective.max_tokens)
    ranks = distributed.world_size()
    if len(cuts) < ranks:
        smaller = math.ceil(sum(_costs(batch, cuts)) / ranks)
        cuts = _cut(batch, rows, objective, smaller)
    return cuts


def _cut(batch: Batch, rows: list[int], objective: Objective, max_tokens: int) -> list[list[int]]:
    if objective.share_prefix:
        return group_cuts(batch, rows, max_tokens)
    by_length = micro_batches(batch.lengths[rows].tolist(), max_tokens)
    return [[rows[i] for i in micro] for micro in by_length]


def _costs(batch: Batch, cuts: list[list[int]]) -> list[int]:
    """Tokens of each micro-batch: what ranks are given equal amounts of."""
    return [int(batch.lengths[rows].sum()) for rows in cuts]


def _own_passes(batch: Batch, cuts: list[list[int]]) -> list[tuple[list[int], bool]]:
    return distributed.own_passes(cuts, _costs(batch, cuts))


def score_policy(policy: Any, batch: Batch, objective: Objective, device: Any) -> torch.Tensor:
    """Log-probs of a whole batch without gradient: (B, T) float32 on the CPU, on every rank."""

    objective = suited(objective, batch)

    def forward(part: Batch) -> torch.Tensor:
        return forward_policy(policy, part, objective, device)[0]

    return _score(forward, batch, cut(batch, list(range(len(batch))), objective), device)


def score_critic(critic: Any, batch: Batch, max_tokens: int, device: Any) -> torch.Tensor:
    """Values of a whole batch without gradient: (B, T) float32 on the CPU, on every rank."""

    def forward(part: Batch) -> torch.Tensor:
        return critic(part.input_ids.to(device), part.loss_mask.to(device))

    padded = Objective(max_tokens=max_tokens, share_prefix=False)
    return _score(forward, batch, cut(batch, list(range(len(batch))), padded), device)


@torch.no_grad()
def _score(
    forward: Callable[[Batch], torch.Tensor], batch: Batch, cuts: list[list[int]], device: Any
) -> torch.Tensor:
    """This rank's rows through `forward`, zeros elsewhere, then the sum over ranks: (B, T)."""
    out = torch.zeros(batch.loss_mask.shape)  # (B, T)
    for rows, counts in _own_passes(batch, cuts):
        scores = forward(batch.rows(rows)).float().cpu()
        if counts:
            out[rows, : scores.shape[1]] = scores
    return distributed.summed(out, device)


def update_policy(
    accelerator: Any,
    policy: Any,
    optimizer: Any,
    batch: Batch,
    advantages: torch.Tensor,
    objective: Objective,
    old_log_probs: torch.Tensor | None = None,
    ref_log_probs: torch.Tensor | None = None,
    shuffle_seed: int = 0,
    signal_share: float = 1.0,
) -> dict[str, float]:
    """All optimizer steps of one training step on the policy.

    Args:
        advantages: (B, T) float32.
        old_log_probs: (B, T), or None when there is exactly one optimizer step (then π_old = π_θ).
        ref_log_probs: (B, T) of the frozen reference, needed when kl_loss_coef > 0.
        signal_share: policy tokens of `batch` over those of the step. Groups whose samples all did
            equally well are not in the batch, since their advantages are 0, but they count in N: a
            step in which one group in eight says something is an eighth as sure of its direction.
            Exact for the clipped loss; a KL or entropy term loses what those groups would add.
    Returns:
        `policy/*` and `sampler/*` metrics, means over policy tokens.
    Raises:
        ValueError: old_log_probs is None although the policy moves before the last mini-batch.
    """
    if old_log_probs is None and objective.num_optimizer_steps(len(batch)) > 1:
        raise ValueError(
            "several optimizer steps need old_log_probs, computed before the first of them"
        )
    objective = suited(objective, batch)

    def loss_of(
        rows: list[int], denominator: float
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        part, device = batch.rows(rows), accelerator.device
        mask, sampled = part.loss_mask.to(device), part.rollout_log_probs.to(device)
        pick = _picker(batch, rows, device)
        log_probs, entropy = forward_policy(policy, part, objective, device)  # (B, T) each
        old = pick(old_log_probs) if old_log_probs is not None else log_probs.detach()
        cap = objective.sampler_is_cap
        weights = sampler_is_weights(old, sampled, mask, cap) if cap else None
        surrogate = policy_loss(
            log_probs,
            old,
            pick(advantages),
            mask,
            objective.clip_ratio,
            denominator,
            is_weights=weights,
        )
        loss, sums = surrogate.loss, {}
        mean_entropy = masked_mean(entropy, mask, denominator)
        if objective.entropy_coef:
            loss = loss - objective.entropy_coef * mean_entropy
        if ref_log_probs is not None:
            kl = kl_estimate(log_probs, pick(ref_log_probs), objective.kl_estimator, mask)
            kl = masked_mean(kl, mask, denominator)
            loss = loss + objective.kl_loss_coef * kl
            sums["policy/kl"] = kl
        gap = torch.where(mask.bool(), (old - sampled).abs(), 0.0)
        sums |= {
            "policy/loss": loss,
            "policy/entropy": mean_entropy,
            "policy/clip_frac": surrogate.clip_frac,
            "policy/approx_kl": surrogate.approx_kl,
            "sampler/log_prob_diff_mean": masked_mean(gap, mask, denominator),
            "max:sampler/log_prob_diff_max": gap.max(),
        }
        if weights is not None:
            sums["sampler/is_weight_mean"] = masked_mean(weights, mask, denominator)
        return loss, sums

    cuts_of = partial(cut, batch, objective=objective)
    metrics = _optimize(
        accelerator,
        policy,
        optimizer,
        batch,
        objective,
        shuffle_seed,
        loss_of,
        cuts_of,
        signal_share,
    )
    named = {
        "grad_norm": "policy/grad_norm",
        "steps": "policy/optimizer_steps",
        "skipped": "policy/skipped_steps",
    }
    metrics = {named.get(name, name): value for name, value in metrics.items()}
    return metrics | {"policy/learning_rate": optimizer.param_groups[0]["lr"]}


def update_critic(
    accelerator: Any,
    critic: Any,
    optimizer: Any,
    batch: Batch,
    old_values: torch.Tensor,
    returns: torch.Tensor,
    objective: Objective,
    shuffle_seed: int = 0,
) -> dict[str, float]:
    """All optimizer steps of one training step on PPO's critic; `critic/*` metrics, means over
    policy tokens.

    Args:
        old_values: (B, T) the critic's values before the step.
        returns: (B, T) targets from `advantages.gae`.
    """

    def loss_of(
        rows: list[int], denominator: float
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        part, device = batch.rows(rows), accelerator.device
        pick = _picker(batch, rows, device)
        mask = part.loss_mask.to(device)
        values = critic(part.input_ids.to(device), mask)  # (B, T)
        result = value_loss(
            values, pick(old_values), pick(returns), mask, objective.value_clip, denominator
        )
        return result.loss, {"critic/loss": result.loss, "critic/clip_frac": result.clip_frac}

    cuts_of = partial(cut, batch, objective=replace(objective, share_prefix=False))
    metrics = _optimize(
        accelerator, critic, optimizer, batch, objective, shuffle_seed, loss_of, cuts_of
    )
    kept = {"critic/loss", "critic/clip_frac"}
    shown = {name: value for name, value in metrics.items() if name in kept}
    variance = _variance(returns, batch.loss_mask)
    explained = (
        1 - _variance(returns - old_values, batch.loss_mask) / variance if variance > 0 else 0.0
    )
    return shown | {
        "critic/grad_norm": metrics["grad_norm"],
        "critic/explained_variance": explained,
    }


def _optimize(
    accelerator: Any,
    model: Any,
    optimizer: Any,
    batch: Batch,
    objective: Objective,
    shuffle_seed: int,
    loss_of: Callable[[list[int], float], tuple[torch.Tensor, dict[str, torch.Tensor]]],
    cuts_of: Callable[[list[int]], list[list[int]]],
    signal_share: float = 1.0,
) -> dict[str, float]:
    """Mini-batches, micro-batches, backward, clip, step: shared by the policy and the critic."""
    totals: dict[str, float] = {}
    norms: list[float] = []
    skipped = 0
    mini_batches = list(_mini_batches(batch, objective, shuffle_seed))
    for rows in mini_batches:
        denominator = float(batch.loss_mask[rows].sum())
        sums: dict[str, float] = {}  # of this rank's micro-batches
        finite = True
        for micro, counts in _own_passes(batch, cuts_of(rows)):
            loss, parts = loss_of(micro, denominator)
            # FSDP averages gradients over ranks, and what is wanted is their sum.
            scale = signal_share * distributed.world_size() if counts else 0.0
            accelerator.backward(loss * scale)
            if counts and torch.isfinite(loss):
                _add(sums, {name: float(value.detach()) for name, value in parts.items()})
            elif counts:
                finite = False
        norm = distributed.clip_grad_norm(model.parameters(), objective.max_grad_norm)
        reports = distributed.gather((finite and math.isfinite(norm), sums))
        if all(is_finite for is_finite, _ in reports):
            optimizer.step()
            norms.append(norm)
        else:
            skipped += 1
        optimizer.zero_grad()
        for _, part in reports:
            _add(totals, part)
    means = {
        name.removeprefix("max:"): value if name.startswith("max:") else value / len(mini_batches)
        for name, value in totals.items()
    }
    grad_norm = sum(norms) / len(norms) if norms else 0.0
    return means | {"grad_norm": grad_norm, "steps": len(norms), "skipped": skipped}


def _add(totals: dict[str, float], numbers: dict[str, float]) -> None:
    """Add numbers to running sums; those whose name begins with max: to running maxima."""
    for name, number in numbers.items():
        if name.startswith("max:"):
            totals[name] = max(totals.get(name, 0.0), number)
        else:
            totals[name] = totals.get(name, 0.0) + number


def _mini_batches(batch: Batch, objective: Objective, seed: int) -> Iterator[list[int]]:
    """Row indices of each optimizer step: every row once per epoch, groups in a fresh order."""
    generator = torch.Generator().manual_seed(seed)
    members: dict[int, list[int]] = {}
    for row, group in enumerate(batch.group_ids.tolist()):
        members.setdefault(group, []).append(row)
    groups = list(members.values())
    for _ in range(objective.ppo_epochs):
        order = torch.randperm(len(groups), generator=generator).tolist()
        rows = [row for i in order for row in groups[i]]
        for start in range(0, len(rows), objective.mini_batch_size):
            yield rows[start : start + objective.mini_batch_size]


def _picker(batch: Batch, rows: list[int], device: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """Takes a (B, T) tensor of the batch to the shape and device of a micro-batch."""
    index = torch.tensor(rows)
    return lambda x: cut_rows(x, index, batch.lengths).to(device)


def _variance(x: torch.Tensor, loss_mask: torch.Tensor) -> float:
    """Variance over policy tokens."""
    mean = masked_mean(x, loss_mask)
    return float(masked_sum((x - mean).square(), loss_mask) / loss_mask.sum().clamp(min=1))
