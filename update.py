"""The update: score the tokens of a batch and take optimizer steps on the clipped objective.

    J(θ) = s/N Σ_{b,t} mask · w · min( ρ A, clip(ρ, 1-ε, 1+ε) A ) - β KL(π_θ ‖ π_ref) + c_H H(π_θ)

    ρ = π_θ(token) / π_old(token)        π_old: the policy at the start of the step
    w = min( π_old / μ, cap )            μ: the policy as computed by the sampler
    N = policy tokens in the mini-batch, over all processes
    s = policy tokens in the batch / those in the step; the batch lacks groups with equal returns

With `--loss-agg seq-mean`, all three terms are means over trajectories: `batching.row_weights`
weights each token, and s counts trajectories. KL and entropy are still logged as token means.

    step's batch ──shuffle──> mini-batches ──cut──> micro-batches
                              optimizer step each   backward pass each

With `--ppo-epochs E` and M mini-batches there are E·M optimizer steps. If E·M = 1, the policy does
not change before its only step, so ρ = 1 and π_old is the current policy, detached.

`optimize` is the loop that all methods share: it cuts micro-batches, accumulates and clips
gradients, and steps the optimizer. A method provides `loss_of`, a few lines that run the model on a
micro-batch and compute its loss.

With several processes, every rank has the full batch and the same mini-batches, and runs its share
of the micro-batches (`scale/distributed.py`). N and the sums are global.

Shapes: B rows, T tokens. Read first: `losses.py`. Read next: `models.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from batching import (
    TOKENS_PER_TRAJECTORY,
    Batch,
    cut_micro_batches,
    row_weights,
)
from config import Objective
from losses import imitation_loss, masked_mean, masked_sum, policy_objective, value_loss
from run.progress import phase
from scale import distributed
from scale.prefix import pack, shared_share

# Share prefixes if that saves at least this share of a batch's tokens. In a benchmark (135M model,
# two CPU cores) sharing was faster than padding in every repeat if it saved at least 14 %, but only
# in some repeats if it saved less than 6 %. If row lengths differ, it pays off earlier, because it
# also saves padding.
MIN_SHARED = 0.1

Metrics = dict[str, torch.Tensor]
# (micro-batch, its mini-batch), both on the CPU -> the micro-batch's share of the mini-batch's loss
# and metrics.
LossOf = Callable[[Batch, Batch], tuple[torch.Tensor, Metrics]]


class Learner(NamedTuple):
    """A model in training, possibly sharded, with its optimizer."""

    accelerator: Any
    model: Any
    optimizer: Any


# ---------------------------------------------------------------------- one loop for all methods


def optimize(
    learner: Learner,
    batch: Batch,
    loss_of: LossOf,
    objective: Objective,
    seed: int = 0,
    label: str = "update",
) -> dict[str, float]:
    """Take all optimizer steps on a batch: mini-batches, micro-batches, backward, clip, step.

    If the loss or gradient of a mini-batch is not finite, every rank skips and counts it.

    Args:
        loss_of: must return a sum over rows, divided by a number that all micro-batches of the
            mini-batch share. Then neither the cut nor the number of processes changes the step.
        objective: sizes of mini- and micro-batches, epochs, maximum gradient norm.
        seed: determines the order of the mini-batches.
        label: text of the progress line.
    Returns:
        `optimizer_steps` and `skipped_steps`; the metrics of loss_of, averaged over the optimizer
        steps (maxima if the name begins with "max:"), none if all were skipped; and `grad_norm`
        before clipping, averaged in the same way, or 0.
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
                # FSDP averages gradients over ranks, but we need their sum.
                learner.accelerator.backward(loss * (distributed.world_size() if counts else 0.0))
                if counts:
                    is_finite = is_finite and bool(torch.isfinite(loss))
                    _add(sums, {name: float(value.detach()) for name, value in parts.items()})
                tick(len(rows) / len(passes))  # every rank has the same number of passes
            parameters, limit = learner.model.parameters(), objective.max_grad_norm
            before_clipping = torch.nn.utils.clip_grad_norm_(parameters, limit)
            norm = float(distributed.full_tensor(before_clipping))
            reports = distributed.gather((is_finite and math.isfinite(norm), sums))
            if all(finite for finite, _ in reports):
                learner.optimizer.step()
                norms.append(norm)
                for _, part in reports:
                    _add(totals, part)
            learner.optimizer.zero_grad()
    means = {
        name.removeprefix("max:"): value if name.startswith("max:") else value / len(norms)
        for name, value in totals.items()
    }
    return means | {
        "grad_norm": sum(norms) / len(norms) if norms else 0.0,
        "optimizer_steps": len(norms),
        "skipped_steps": len(mini_batches) - len(norms),
    }


def _add(totals: dict[str, float], numbers: dict[str, float]) -> None:
    """Add to running sums; for names that begin with "max:", update running maxima."""
    for name, number in numbers.items():
        if name.startswith("max:"):
            totals[name] = max(totals.get(name, 0.0), number)
        else:
            totals[name] = totals.get(name, 0.0) + number


def _mini_batches(batch: Batch, objective: Objective, seed: int) -> Iterator[list[int]]:
    """Row indices of each optimizer step. Every epoch visits all rows once, in a new order of the
    groups. Samples of a group stay together, so they can share their opening (scale/prefix.py)."""
    generator = torch.Generator().manual_seed(seed)
    members: dict[int, list[int]] = {}
    for row, group in enumerate(batch.group_ids.tolist()):
        members.setdefault(group, []).append(row)
    groups = list(members.values())
    for _ in range(objective.ppo_epochs):
        order = torch.randperm(len(groups), generator=generator).tolist()
        rows = [row for i in order for row in groups[i]]
        parts = math.ceil(len(rows) / objective.mini_batch_size)
        # Equal sizes, because even a small last mini-batch would take a full optimizer step.
        for n in range(parts):
            yield rows[n * len(rows) // parts : (n + 1) * len(rows) // parts]


def _rank_passes(
    batch: Batch, rows: list[int], objective: Objective
) -> list[tuple[list[int], bool]]:
    """This rank's micro-batches of these rows; see `distributed.rank_passes`."""
    limit, share = objective.max_tokens_per_micro_batch, objective.share_prefix
    cuts = cut_micro_batches(batch, rows, limit, share, distributed.world_size())
    return distributed.rank_passes(cuts, [int(batch.lengths[micro].sum()) for micro in cuts])


# --------------------------------------------------------------------------------------- the policy


def decide_sharing(objective: Objective, batch: Batch) -> Objective:
    """`objective`, but without prefix sharing if it would save too few tokens of the batch."""
    if objective.share_prefix and shared_share(batch) < MIN_SHARED:
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
    columns = g.columns.to(device)  # maps (1, L) back to (B, T); padding reads column 0, which is 0
    return log_probs[0, columns], entropy[0, columns]


def score_policy(policy: Any, batch: Batch, objective: Objective, device: Any) -> torch.Tensor:
    """Log-probs of a full batch without gradient: (B, T) float32 on the CPU, on every rank."""
    objective = decide_sharing(objective, batch)
    return _score(lambda part: forward_policy(policy, part, objective, device)[0], batch, objective)


def update_policy(
    learner: Learner, batch: Batch, objective: Objective, seed: int = 0, loss_scale: float = 1.0
) -> dict[str, float]:
    """Take all optimizer steps of one training step on the policy.

    Args:
        batch: needs advantages; old_log_probs, unless there is exactly one optimizer step (then
            π_old = π_θ); and ref_log_probs if kl_loss_coef > 0.
        loss_scale: s, see `losses.policy_objective`.
    Returns:
        `policy/*` and `sampler/*` metrics, means over policy tokens.
    """
    has_old = batch.old_log_probs is not None
    assert has_old or objective.num_optimizer_steps(len(batch)) == 1, "old_log_probs are needed"
    assert batch.ref_log_probs is not None or not objective.kl_loss_coef, "ref_log_probs are needed"
    objective, device = decide_sharing(objective, batch), learner.accelerator.device

    def loss_of(part: Batch, mini_batch: Batch) -> tuple[torch.Tensor, Metrics]:
        log_probs, entropy = forward_policy(learner.model, part, objective, device)  # (B, T) each
        weights = None
        if objective.loss_agg != "token-mean":
            constant = TOKENS_PER_TRAJECTORY if objective.loss_agg == "constant" else None
            weights = row_weights(part.loss_mask, mini_batch.loss_mask, constant).to(device)  # (B,)
        num_tokens = _num_tokens(mini_batch)
        return policy_objective(
            log_probs, entropy, part.to(device), objective, num_tokens, weights, loss_scale
        )

    return policy_metrics(optimize(learner, batch, loss_of, objective, seed), learner)


def imitate(
    learner: Learner, batch: Batch, objective: Objective, seed: int = 0, label: str = "update"
) -> dict[str, float]:
    """Take all optimizer steps of weighted imitation (`losses.imitation_loss`) on a batch.

    Args:
        batch: `weights` holds w; None means w = 1, which is supervised fine-tuning.
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
    """The metrics of `optimize` under their names in the log, plus the learning rate."""
    logged = {name if "/" in name else f"policy/{name}": value for name, value in metrics.items()}
    return logged | {"policy/learning_rate": learner.optimizer.param_groups[0]["lr"]}


def _num_tokens(batch: Batch) -> float:
    """Number of policy tokens (N)."""
    return float(batch.loss_mask.sum())


# --------------------------------------------------------------------------------------- the critic


def score_critic(critic: Any, batch: Batch, objective: Objective, device: Any) -> torch.Tensor:
    """Values of a full batch without gradient: (B, T) float32 on the CPU, on every rank."""
    padded = replace(objective, share_prefix=False)
    return _score(
        lambda part: critic(part.input_ids.to(device), part.loss_mask.to(device)), batch, padded
    )


def update_critic(
    learner: Learner, batch: Batch, objective: Objective, seed: int = 0
) -> dict[str, float]:
    """Take all optimizer steps of one training step on PPO's critic.

    Args:
        batch: needs `values` (from the critic before the step) and `returns` (targets from `gae`).
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
    metrics = optimize(learner, batch, loss_of, padded, seed, label="critic update")
    variance = _variance(returns, batch.loss_mask)
    unexplained = _variance(returns - values, batch.loss_mask)
    critic_metrics = {name: value for name, value in metrics.items() if "/" in name}
    return critic_metrics | {
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
    """Run `forward` on this rank's rows and sum over ranks, (B, T)."""
    out = torch.zeros(batch.loss_mask.shape)  # (B, T)
    device: Any = "cpu"
    for rows, counts in _rank_passes(batch, list(range(len(batch))), objective):
        scores = forward(batch.rows(rows))
        device = scores.device
        if counts:
            out[rows, : scores.shape[1]] = scores.float().cpu()
    return distributed.sum_over_ranks(out, device)
