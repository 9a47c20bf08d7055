"""The loss of preferences: of two trajectories, the better one gains on the worse.

RLHF learns a reward from pairs and then maximises it under a price for leaving a reference policy.
The maximum is known in closed form,

    π*(τ | x) = 1/Z(x) · π_ref(τ | x) · exp( R(x, τ) / β )

so that a policy says what reward it is the best one for: R = β log π/π_ref + β log Z(x). Put into
the Bradley-Terry model of who wins a comparison, p(τ⁺ wins) = σ(R⁺ − R⁻), log Z(x), which nobody
can compute, drops out where both open with the same x, and what remains is a loss on the policy
alone: direct preference optimization (arXiv 2305.18290). No reward model, no critic, and nothing is
sampled while it learns.

For agents τ is a whole trajectory, of which the policy wrote its actions and the world the rest
(arXiv 2403.02502). Then π* can be had only where the same actions always lead to the same τ: a pair
is of one seed, so that luck is not paired (pairs.py). It is offline: it learns from what was tried,
and where the policy has left that behind, pairs are played anew (dpo.py, --iterations).

Shapes: P pairs. Run it: tests/test_preference_loss.py works each formula by hand. Read next:
pairs.py, dpo.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


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
    "sigmoid": lambda h, beta: -torch.nn.functional.logsigmoid(beta * h),
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
    """Direct Preference Optimization: of two trajectories of a task the better gains on the worse.

        h = (log π(τ⁺) − log π_ref(τ⁺)) − (log π(τ⁻) − log π_ref(τ⁻))
        L = 1/N Σ_pairs f(h)                           f = −log σ(β h), or another of PREFERENCES

    log π(τ) is the sum over *policy tokens alone* (arXiv 2403.02502). The probability of a whole
    trajectory has a factor for each observation as well, but the world chose those, not the agent:
    its transition probabilities are the same under π and π_ref and cancel in the ratio.

    L sees only the difference and does not fix the level of the likelihoods: both may fall, that of
    the chosen trajectory too, as long as the margin grows. Watch chosen_reward.

    Args:
        chosen, rejected: (P,) log π, summed over each trajectory's policy tokens, with gradient.
        ref_chosen, ref_rejected: (P,) the same of the frozen reference.
        beta: β; the smaller, the farther from the reference a pair may pull.
        label_smoothing: ε, how probable it is that a pair is the wrong way round ("conservative"
            DPO): f becomes (1 − ε) f(h) + ε f(−h). Of "sigmoid" alone.
        kind: a key of PREFERENCES.
        denominator: N, pairs of the *whole* mini-batch; None: of this call.
    Raises:
        ValueError: shapes differ or are not (P,), P is 0, or another argument is out of range.
    """
    shapes = [tuple(x.shape) for x in (chosen, rejected, ref_chosen, ref_rejected)]
    if chosen.dim() != 1 or len(set(shapes)) > 1:
        raise ValueError(
            f"chosen, rejected and their references are {shapes}, expected (pairs,) each: sum the "
            "log-probs of a trajectory over its policy tokens"
        )
    if not len(chosen):
        raise ValueError("there are no pairs; skip a mini-batch that has none")
    if not 0 < beta < math.inf:
        raise ValueError(f"beta is {beta}; it must be positive and finite (DPO uses 0.1)")
    if kind not in PREFERENCES:
        raise ValueError(f"kind is {kind!r}; it must be one of {', '.join(PREFERENCES)}")
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing is {label_smoothing}; it must be in [0, 0.5)")
    if label_smoothing and kind != "sigmoid":
        raise ValueError(f"label_smoothing is {label_smoothing}; with {kind} it must be 0")
    num_pairs = len(chosen) if denominator is None else denominator
    if not 0 < num_pairs < math.inf:
        raise ValueError(f"denominator is {num_pairs}; it must be the pairs of the mini-batch")
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
