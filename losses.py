"""Losses: how advantages become a gradient, and how the update is kept small.

Tokens are sampled from π_old, the policy at the start of a step. The gradient is taken at the
current policy π. PPO (arXiv 1707.06347, eq. 7) limits how far π can move away from π_old:

    ρₜ = π(aₜ | sₜ) / π_old(aₜ | sₜ) = exp(log_probs − old_log_probs)
    L  = − 1/N Σₜ wₜ · min( ρₜ Aₜ, clip(ρₜ, 1 − ε, 1 + ε) Aₜ )

N is the number of policy tokens in the full mini-batch, and wₜ corrects for the difference between
sampler and trainer. `policy_objective` adds an entropy bonus and a KL penalty. The reward only
measures success, so without a penalty the policy can drift away from the language of its starting
model. KL(π ‖ π_ref) measures this drift. It can be penalized in two places:

    in the reward   r′ₜ = rₜ − β · KLₜ      PPO for language models (arXiv 1909.08593, eq. 2)
    in the loss     L + β · mean KL         GRPO (arXiv 2402.03300, eq. 3)

Every mean in this file is a *token-level mean over a global denominator*. The caller counts the
policy tokens of the full mini-batch, over all micro-batches and processes, and passes this number
as `denominator`. The gradients then add up to the same update, no matter how the batch is split.

Masks select values instead of multiplying them: NaN · 0 is NaN, so one bad logit on a padding token
would spoil the update. A NaN on a policy token is kept, because the training loop must detect it.

Shapes: B trajectories, T tokens, V vocabulary; log_probs[b, t] is the log-probability (float32) of
token t given the tokens before it; loss_mask[b, t] is 1 where the policy sampled token t. Losses
are scalars with a gradient; all other outputs are detached metrics with the same denominator.

Run it: tutorials/02_advantages.md ends with policy_loss; tests/test_losses.py checks each formula
with numbers worked out by hand. Read next: train.py. The preference loss (DPO) is in dpo.py.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from batching import Batch
    from config import Objective

MAX_LOG_RATIO = 20.0  # in nats; exp(20) is 5e8, and float32 overflows at exp(89)


class PolicyLoss(NamedTuple):
    """Scalars. Only loss has a gradient; the others are detached means over policy tokens."""

    loss: Tensor
    clip_frac: Tensor  # share of tokens whose gradient the clip removed
    approx_kl: Tensor  # k3 estimate of KL(π_old ‖ π), nats per token
    dual_clip_frac: Tensor  # share of tokens whose gradient the dual clip removed
    log_ratio_clamp_frac: Tensor  # share of tokens whose log ρ was clamped to ±MAX_LOG_RATIO


class ValueLoss(NamedTuple):
    """Scalars. Only loss has a gradient; clip_frac is the share of tokens with an active clip."""

    loss: Tensor
    clip_frac: Tensor


def check_shapes(first: Tensor, **tensors: Tensor | None) -> None:
    """ValueError if shapes differ; broadcasting (B, T) with (B,) or (T,) would hide the mistake."""
    for name, tensor in tensors.items():
        if tensor is not None and tensor.shape != first.shape:
            raise ValueError(
                f"{name} is {tuple(tensor.shape)}, expected {tuple(first.shape)} as in the first "
                "argument: all must be (trajectories, tokens), with the same token at each position"
            )


def masked_sum(x: Tensor, loss_mask: Tensor) -> Tensor:
    """Sum of x (B, T) over policy tokens, a scalar. Masked values are ignored, even NaN."""
    return torch.where(loss_mask.bool(), x, 0.0).sum()


def masked_mean(x: Tensor, loss_mask: Tensor, denominator: float | None = None) -> Tensor:
    """Sum of x over policy tokens divided by `denominator`, a scalar.

    Args:
        x, loss_mask: (B, T).
        denominator: number of policy tokens in the *full* mini-batch; None: count those in this
            loss_mask (if there are none, the result is 0).

    >>> x, loss_mask = torch.tensor([[1.0, 2.0], [6.0, 9.0]]), torch.tensor([[1, 1], [1, 0]])
    >>> masked_mean(x, loss_mask).item()  # (1 + 2 + 6) / 3
    3.0
    >>> sum(masked_mean(x[i], loss_mask[i]).item() for i in (0, 1)) / 2  # wrong: (1.5 + 6) / 2
    3.75
    >>> sum(masked_mean(x[i], loss_mask[i], denominator=3).item() for i in (0, 1))
    3.0
    """
    if denominator is None:
        return masked_sum(x, loss_mask) / loss_mask.bool().sum().clamp(min=1)
    return masked_sum(x, loss_mask) / denominator


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    clip_ratio: float = 0.2,
    denominator: float | None = None,
    is_weights: Tensor | None = None,
    dual_clip: float = 0.0,
    clip_ratio_high: float | None = None,
    by_sequence: bool = False,
) -> PolicyLoss:
    """PPO's clipped objective (arXiv 1707.06347, eq. 7) as a loss, mean over policy tokens.

        J = min( ρ A, clip(ρ, 1 − ε, 1 + ε′) A )
        J ← max( J, c A )  if A < 0             dual clip (arXiv 1912.09729, eq. 5)
        L = − 1/N Σₜ wₜ Jₜ

    The min makes the clip one-sided. If A > 0, the token is no longer pushed up when ρ > 1 + ε. If
    A < 0, it is no longer pushed down when ρ < 1 − ε. Moving back is not clipped. But for A < 0 the
    gradient there is ρ A: at log ρ = 20, one token decides the step. The dual clip removes it.

    Args:
        log_probs: (B, T) of the current policy, with gradient.
        old_log_probs: (B, T) of the trainer's policy before the step's first update.
        advantages: (B, T).
        loss_mask: (B, T) of 0 and 1.
        clip_ratio: ε.
        denominator: policy tokens in the full mini-batch; None: count those in this call.
        is_weights: (B, T) w from `sampler_is_weights`; None: 1 everywhere.
        dual_clip: c, above 1; 0: no dual clip.
        clip_ratio_high: ε′, usually above ε, so that unlikely tokens can become likely (DAPO, arXiv
            2503.14476, eq. 10); None: ε.
        by_sequence: all tokens of a row have ρ = exp( mean_t (log π − log π_old) ), so that the row
            is clipped as a whole (GSPO, arXiv 2507.18071, eq. 7), but each token has the gradient
            of its own log π, so that it keeps its own advantage and weight (section 4.3; with one
            advantage per row both are the same). A row must not be split between calls. Its clip
            ratios are a thousand times smaller.
    Returns:
        PolicyLoss. NaN on a policy token gives a NaN loss, not an error.
    Raises:
        ValueError: shapes differ.
    """
    check_shapes(
        log_probs,
        old_log_probs=old_log_probs,
        advantages=advantages,
        loss_mask=loss_mask,
        is_weights=is_weights,
    )
    mask = loss_mask.bool()
    # NOTE: select before exp, not only in the mean. The value of where(mask, exp(x), 0) is finite,
    # but its gradient is 0 · inf = NaN. Selecting here blocks the gradient of all masked tokens.
    log_ratio = torch.where(mask, log_probs - old_log_probs.detach(), 0.0)  # (B, T)  log ρ
    log_ratio = log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    token_log_ratio = log_ratio.detach()  # (B, T)
    if by_sequence:
        mean = log_ratio.sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)  # (B, 1)
        own_gradient = log_ratio - token_log_ratio  # (B, T) zeros
        log_ratio = torch.where(mask, mean.detach() + own_gradient, 0.0)
    advantages = advantages.detach()  # (B, T)
    ratio = log_ratio.exp()  # (B, T)  ρ
    unclipped = ratio * advantages  # (B, T)
    high = clip_ratio if clip_ratio_high is None else clip_ratio_high
    clipped = ratio.clamp(1 - clip_ratio, 1 + high) * advantages  # (B, T)
    objective = torch.minimum(unclipped, clipped)  # (B, T)
    is_dual_clipped = (advantages < 0) & (ratio > (dual_clip or math.inf))  # (B, T)
    objective = torch.where(is_dual_clipped, dual_clip * advantages, objective)
    if is_weights is not None:
        objective = objective * is_weights.detach()
    with torch.no_grad():
        clip_frac = masked_mean((clipped < unclipped).to(ratio.dtype), mask, denominator)
        approx_kl = masked_mean(token_log_ratio.exp() - 1 - token_log_ratio, mask, denominator)
        dual_clip_frac = masked_mean(is_dual_clipped, mask, denominator)
        clamp_frac = masked_mean(token_log_ratio.abs() >= MAX_LOG_RATIO, mask, denominator)
    loss = -masked_mean(objective, mask, denominator)
    return PolicyLoss(loss, clip_frac, approx_kl, dual_clip_frac, clamp_frac)


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    loss_mask: Tensor,
    value_clip: float = 0.5,
    denominator: float | None = None,
) -> ValueLoss:
    """Clipped squared error of the critic, mean over policy tokens (as in PPO's released code).

        v_clip = clip(v, v_old − ε, v_old + ε)
        L      = 1/N Σₜ ½ max( (v − R)², (v_clip − R)² )

    Args:
        values: (B, T) of the current critic, with gradient.
        old_values: (B, T) of the critic that the advantages were computed with.
        returns: (B, T) targets R from `advantages.gae`.
        loss_mask: (B, T) of 0 and 1.
        value_clip: ε, in units of the return; math.inf: no clip.
        denominator: as in `policy_loss`.
    """
    check_shapes(values, old_values=old_values, returns=returns, loss_mask=loss_mask)
    mask = loss_mask.bool()
    returns, old_values = returns.detach(), old_values.detach()  # (B, T)
    values = torch.where(mask, values, 0.0)  # (B, T)  blocks the gradient of masked tokens
    values_clipped = values.clamp(old_values - value_clip, old_values + value_clip)  # (B, T)
    error = (values - returns).square()  # (B, T)
    error_clipped = (values_clipped - returns).square()  # (B, T)
    loss = masked_mean(0.5 * torch.maximum(error, error_clipped), mask, denominator)
    clip_frac = masked_mean((error_clipped > error).to(values.dtype), mask, denominator)
    return ValueLoss(loss, clip_frac.detach())


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Entropy of softmax(logits) in nats, computed in float32 or float64.

        H = − Σᵥ pᵥ log pᵥ

    Args:
        logits: (..., V) of any floating type; −inf marks a forbidden token (p log p = 0 there).
    Returns:
        (...) float32, or float64 for float64 logits. Computing it takes a few times the memory of
        the float32 logits. With a large vocabulary, pass a slice of tokens at a time.
    """
    if logits.dtype in (torch.bfloat16, torch.float16):
        logits = logits.float()  # 8 bits of mantissa are too few to sum over a large vocabulary
    log_p = logits.log_softmax(-1)  # (..., V)
    # NOTE: the fill avoids 0 · −inf, which is NaN in value and in gradient.
    return -(log_p.exp() * log_p.masked_fill(log_p == -math.inf, 0.0)).sum(-1)


@torch.no_grad()
def sampler_is_weights(
    old_log_probs: Tensor, rollout_log_probs: Tensor, loss_mask: Tensor, cap: float
) -> Tensor:
    """Truncated importance weights from the sampler's policy to the trainer's.

        wₜ = min( exp(old_log_probs − rollout_log_probs), C )

    In bf16, vLLM and the trainer disagree by about 0.004 nats per token, which makes "on-policy" RL
    off-policy (Yao et al. 2025, "Your Efficient RL Framework Secretly Brings You Off-Policy RL
    Training", a technical report). If they agree, w = 1. The cap limits the variance and adds some
    bias. It only limits large weights: tokens less likely under the trainer keep their w < 1.

    Args:
        old_log_probs: (B, T) of the trainer before the step's first update.
        rollout_log_probs: (B, T) of the engine that sampled the tokens, at the same temperature.
        loss_mask: (B, T) of 0 and 1.
        cap: C, at least 1; the report uses 2.
    Returns:
        (B, T), detached; 0 where loss_mask is 0.
    """
    check_shapes(old_log_probs, rollout_log_probs=rollout_log_probs, loss_mask=loss_mask)
    weights = (old_log_probs - rollout_log_probs).exp().clamp(max=cap)  # (B, T)
    return torch.where(loss_mask.bool(), weights, 0.0)


# ---------------------------------------------------------------- KL in the reward or in the loss


def kl_estimate(
    log_probs: Tensor, ref_log_probs: Tensor, estimator: str, loss_mask: Tensor | None = None
) -> Tensor:
    """Per-token estimate of KL(π ‖ π_ref) from sampled tokens.

    With r = π_ref / π (John Schulman's note "Approximating KL Divergence", joschu.net, 2020):

        k1 = − log r              unbiased, negative on half the tokens
        k2 = ½ (log r)²           biased, never negative
        k3 = (r − 1) − log r      unbiased, never negative (GRPO, eq. 4)

    At log r = 7, k3 is 1089 with gradient −1096: one token decides the step. verl's "low_var_kl" is
    k3 clamped at 10, as with `--kl-clamp 10`. Here log r ≤ 20, only to keep k3 finite.

    These properties hold for the *values*. In a loss on fresh samples, only the gradient of each
    token matters (arXiv 2506.09477): E[∇k1] = 0, so k1 is no penalty; E[∇k2] = ∇KL(π ‖ π_ref);
    E[∇k3] = ∇KL(π_ref ‖ π). So use k1 in the reward, and k2 or k3 in the loss.

    Args:
        log_probs, ref_log_probs: (B, T), nats; the gradient flows through log_probs.
        estimator: "k1", "k2" or "k3".
        loss_mask: (B, T); masked tokens get value 0 and gradient 0. None: no masking.
    Returns:
        (B, T).
    """
    check_shapes(log_probs, ref_log_probs=ref_log_probs, loss_mask=loss_mask)
    log_ratio = ref_log_probs.detach() - log_probs  # (B, T)  log r
    if loss_mask is not None:
        log_ratio = torch.where(loss_mask.bool(), log_ratio, 0.0)
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    log_ratio = log_ratio.clamp(max=MAX_LOG_RATIO)
    return log_ratio.expm1() - log_ratio  # k3; expm1: r − 1 without cancellation near r = 1


@torch.no_grad()
def kl_penalized_rewards(
    token_rewards: Tensor,
    log_probs: Tensor,
    ref_log_probs: Tensor,
    loss_mask: Tensor,
    kl_coef: float,
    estimator: str = "k1",
) -> Tensor:
    """KL in the reward: r′ₜ = rₜ − β · KLₜ on every policy token (arXiv 1909.08593, eq. 2).

    The advantage estimator then treats the penalty like any other reward. Rewards on masked tokens
    are not changed, so advantages.py still rejects a misplaced reward.

    Args:
        token_rewards, log_probs, ref_log_probs, loss_mask: (B, T).
        kl_coef: β.
        estimator: as in `kl_estimate`.
    Returns:
        (B, T), detached.
    """
    check_shapes(token_rewards, log_probs=log_probs)
    return token_rewards - kl_coef * kl_estimate(log_probs, ref_log_probs, estimator, loss_mask)


# --------------------------------------------------------------- the loss of an optimizer step


def policy_objective(
    log_probs: Tensor,
    entropy: Tensor,
    batch: Batch,
    objective: Objective,
    denominator: float,
    weights: Tensor | None = None,
    loss_scale: float = 1.0,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of an RL step on one micro-batch, and its metrics. A further term is added to
    `penalty`; its option belongs in Objective, its metric in the glossary.

        L = share · L_clip − c_H · mean H + β · mean KL(π ‖ π_ref)

    Args:
        log_probs, entropy: (B, T) each, of the current policy, with gradient.
        batch: has advantages. Without old_log_probs, π_old is the current policy; without
            ref_log_probs, there is no reference.
        denominator: policy tokens in the full mini-batch.
        weights: (B,) from `batching.row_weights`, for means over trajectories; None: over tokens.
        loss_scale: factor of L_clip: the share of the step's policy tokens (with seq-mean: rows)
            that are in the batch, times the weight of `train.keep_num_steps`.
            Groups with equal returns are left out of the batch, because their advantages are 0.
            They still count here: if returns differ in only one group of eight, L_clip is scaled by
            about 1/8. The other terms are means over the batch.
    Returns:
        The loss, a scalar with gradient, and metrics. Summed over all micro-batches, a metric is a
        mean over policy tokens; metrics whose name begins with "max:" are maxima instead.
    """
    mask, cap, is_weights = batch.loss_mask, objective.sampler_is_cap, None
    old_log_probs = log_probs.detach() if batch.old_log_probs is None else batch.old_log_probs
    if cap:
        is_weights = sampler_is_weights(old_log_probs, batch.rollout_log_probs, mask, cap)

    def weighted(x: Tensor) -> Tensor:
        return x if weights is None else x * weights[:, None]

    assert batch.advantages is not None
    clipped = policy_loss(
        log_probs,
        old_log_probs,
        # A positive factor on A scales the token's loss; the clip stays active in the same places.
        weighted(batch.advantages),
        mask,
        objective.clip_ratio,
        denominator,
        is_weights,
        objective.dual_clip,
        objective.clip_ratio_high,
        by_sequence=objective.ratio == "sequence",
    )
    gap = torch.where(mask.bool(), (old_log_probs - batch.rollout_log_probs).abs(), 0.0)
    metrics = {
        "policy/entropy": masked_mean(entropy, mask, denominator),
        "policy/clip_frac": clipped.clip_frac,
        "policy/approx_kl": clipped.approx_kl,
        "policy/dual_clip_frac": clipped.dual_clip_frac,
        "policy/log_ratio_clamp_frac": clipped.log_ratio_clamp_frac,
        "sampler/log_prob_diff_mean": masked_mean(gap, mask, denominator),
        "max:sampler/log_prob_diff_max": gap.max(),
    }
    if is_weights is not None:
        metrics["sampler/is_weight_mean"] = masked_mean(is_weights, mask, denominator)
    penalty = torch.zeros_like(clipped.loss)
    if c_entropy := objective.entropy_coef:
        penalty = penalty - c_entropy * masked_mean(weighted(entropy), mask, denominator)
    if (ref := batch.ref_log_probs) is not None:
        limit = objective.kl_clamp or math.inf  # beyond it, a token's KL has no gradient
        kl = kl_estimate(log_probs, ref, objective.kl_estimator, mask).clamp(max=limit)  # (B, T)
        if beta := objective.kl_loss_coef:
            metrics["policy/kl"] = masked_mean(kl, mask, denominator)
            penalty = penalty + beta * masked_mean(weighted(kl), mask, denominator)
        metrics["max:policy/kl_max"] = kl_estimate(log_probs.detach(), ref, "k3", mask).max()
        metrics["policy/kl_clamp_frac"] = masked_mean(kl >= limit, mask, denominator)
    metrics["policy/loss"] = clipped.loss + penalty
    return clipped.loss * loss_scale + penalty, metrics


# ----------------------------------------------------------------------------- weighted imitation


def imitation_loss(
    log_probs: Tensor, loss_mask: Tensor, denominator: float | None, weights: Tensor | None = None
) -> Tensor:
    """Negative log-likelihood of the demonstrated actions, mean over their tokens, a scalar.

        L = − 1/N Σ_b w_b Σₜ log π(aₜ | sₜ)

    With w = 1, all demonstrations are imitated equally. If the trajectories are the agent's own
    and the weights are their returns, minimizing L maximizes E[R log π] (AgentEvol, arXiv
    2406.04151). A failed trajectory has w = 0 and contributes no gradient. N counts all policy
    tokens, including those with w = 0.

    Args:
        log_probs, loss_mask, denominator: as in `policy_loss`.
        weights: (B,), one per trajectory; None: 1 everywhere.
    """
    check_shapes(log_probs, loss_mask=loss_mask)
    if weights is not None:
        log_probs = log_probs * weights.detach()[:, None]  # (B, T)
    return -masked_mean(log_probs, loss_mask, denominator)
