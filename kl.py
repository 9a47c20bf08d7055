"""KL: how far the policy has moved from where it began, and what that costs it.

A reward says what to do and nothing of how. Left alone, a policy that is paid for success drifts
away from the language it started with. KL(π ‖ π_ref) measures the drift, in nats per token, from
the sampled tokens alone; two places can make it cost something:

    in the reward   r′ₜ = rₜ − β · KLₜ      PPO for language models (arXiv 1909.08593, eq. 2)
    in the loss     L + β · mean KL         GRPO (arXiv 2402.03300, eq. 3)

and β can be fixed, or steered so that the KL stays near a target.

Shapes: B trajectories, T tokens. Read next: losses.py, which adds the second kind.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from runtime.lazytorch import no_grad, torch

if TYPE_CHECKING:
    from torch import Tensor


def kl_estimate(
    log_probs: Tensor, ref_log_probs: Tensor, estimator: str, loss_mask: Tensor | None = None
) -> Tensor:
    """Per-token estimate of KL(π ‖ π_ref) from sampled tokens.

    With r = π_ref / π, after Schulman's note "Approximating KL Divergence" (joschu.net, 2020):

        k1 = − log r              unbiased, negative on half the tokens
        k2 = ½ (log r)²           biased, never negative
        k3 = (r − 1) − log r      unbiased, never negative (verl: "low_var_kl"; GRPO, eq. 4)

    That is about *values*. As a loss on fresh samples, what counts is the gradient, token by token
    (arXiv 2506.09477): E[∇k1] = 0, no penalty at all; E[∇k2] = ∇KL(π ‖ π_ref); E[∇k3] =
    ∇KL(π_ref ‖ π). So k1 belongs into the reward, k2 or k3 into the loss.

    Args:
        log_probs, ref_log_probs: (B, T), nats; the gradient flows through log_probs.
        estimator: "k1", "k2" or "k3".
        loss_mask: (B, T); given, masked tokens are 0 in value and gradient whatever they hold.
    Returns:
        (B, T).
    Raises:
        ValueError: estimator is none of the three, or shapes differ.
    """
    check_shapes(log_probs, ref_log_probs=ref_log_probs, loss_mask=loss_mask)
    log_ratio = ref_log_probs.detach() - log_probs  # (B, T)  log r
    if loss_mask is not None:
        log_ratio = torch.where(loss_mask.bool(), log_ratio, 0.0)
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    if estimator == "k3":
        return log_ratio.expm1() - log_ratio  # expm1: r − 1 without cancellation near r = 1
    raise ValueError(f"KL estimator is {estimator!r}; it must be one of k1, k2, k3")


@no_grad
def kl_penalized_rewards(
    token_rewards: Tensor,
    log_probs: Tensor,
    ref_log_probs: Tensor,
    loss_mask: Tensor,
    kl_coef: float,
    estimator: str = "k1",
) -> Tensor:
    """KL in the reward: r′ₜ = rₜ − β · KLₜ on every policy token (arXiv 1909.08593, eq. 2).

    The estimator then spreads the penalty as it does any reward. Rewards on masked tokens are
    handed through untouched, so that a misplaced one still fails in advantages.py.

    Args:
        token_rewards, log_probs, ref_log_probs, loss_mask: (B, T).
        kl_coef: β; a KL controller's `value`.
        estimator: as in `kl_estimate`.
    Returns:
        (B, T), detached.
    """
    check_shapes(token_rewards, log_probs=log_probs)
    return token_rewards - kl_coef * kl_estimate(log_probs, ref_log_probs, estimator, loss_mask)


class FixedKLController:
    """β that never changes."""

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, observed_kl: float, num_steps: int) -> None:
        """Nothing to adapt."""

    def state_dict(self) -> dict[str, float]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.value = state["value"]


class AdaptiveKLController(FixedKLController):
    """β steered so that the observed KL stays near a target (arXiv 1909.08593, section 2.2).

        e = clip( KL / target − 1, −0.2, 0.2 )
        β ← β · (1 + e · num_steps / horizon)

    Args:
        kl_coef: β at the start, positive (a product never leaves 0).
        target: KL in nats, in the unit of what `update` is given.
        horizon: number of trajectories over which β may change by a factor of about 1.2.
    Raises:
        ValueError: an argument is not positive.
    """

    def __init__(self, kl_coef: float, target: float, horizon: float) -> None:
        for name, number in (("kl_coef", kl_coef), ("target", target), ("horizon", horizon)):
            if not number > 0:
                raise ValueError(f"{name} is {number}; the adaptive controller needs it positive")
        super().__init__(kl_coef)
        self.target = target
        self.horizon = horizon

    def update(self, observed_kl: float, num_steps: int) -> None:
        """Adapt β to the KL observed over num_steps trajectories (all processes together)."""
        if not math.isfinite(observed_kl):
            raise ValueError(
                f"observed KL is {observed_kl}; the coefficient would stay non-finite for good"
            )
        error = min(max(observed_kl / self.target - 1, -0.2), 0.2)
        factor = 1 + error * num_steps / self.horizon
        if factor <= 0:
            raise ValueError(
                f"{num_steps} trajectories in one update are too many for horizon {self.horizon}: "
                f"the KL coefficient would turn negative; make horizon at least {num_steps}"
            )
        self.value *= factor


def check_shapes(first: Tensor, **others: Tensor | None) -> None:
    """NOTE: broadcasting turns (B, T) against (B,) or (T,) into a number that means nothing."""
    for name, tensor in others.items():
        if tensor is not None and tensor.shape != first.shape:
            raise ValueError(
                f"{name} is {tuple(tensor.shape)}, expected {tuple(first.shape)} like the first "
                "argument: all are (trajectories, tokens), aligned to the token"
            )
