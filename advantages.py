"""Advantages: how much better than expected was each token that the policy wrote?

An episode gives few rewards, often only one at its end. A policy gradient needs a number for every
token: a positive advantage makes the token more likely, a negative one less likely, and zero leaves
it unchanged. An *estimator* computes these numbers. It subtracts a baseline from the return:

    gae                  a critic V(s), token by token       GAE          arXiv 1506.02438
    grpo                 mean return of the task's group     DeepSeekMath arXiv 2402.03300
    rloo                 mean return of the *other* samples  RLOO         arXiv 2402.14740
    reinforce_plus_plus  mean over the whole batch           REINFORCE++  arXiv 2501.03262
    distill              none: a teacher's opinion of each token, arXiv 2306.13649
    gigpo                grpo, and per turn the mean return from the same state
                                                             GiGPO        arXiv 2505.10978

In a multi-turn trajectory, tokens of the policy and of the environment alternate:

    tokens     | prompt | action 1 | observation 1 | action 2 | observation 2 | padding |
    loss_mask  | 0 0 0  | 1 1 1    | 0 0 0 0       | 1 1      | 0 0 0         | 0 0     |
    rewards    |        |     r₁   |               |    r₂    |               |         |

(1) Only policy tokens count as time steps. After the last token of action 1, the next time step is
the first token of action 2; observation tokens have no value and add no discount.
(2) The reward of a turn is placed on its last policy token (`token_rewards_of`). The estimators
raise an error if they find a reward on a token that the policy did not write.

An episode that is cut by max_rounds or the token budget counts as finished: the limit is part of
the task, so nothing is bootstrapped after the last token. A row without policy tokens gets zeros
and is left out of all statistics. A group of one has no baseline and raises an error.

Shapes: B trajectories (rows), T tokens, right- or left-padded; values[b, t] is V of the state
before token t. Sums are computed in float64 and returned in float32. All statistics are over the
full batch, so with several processes, each process must hold all rows.

Run it: tutorials/02_advantages.md computes one small batch step by step. docs/differences.md
explains how the published system differs. Read next: losses.py, which uses the advantages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

EPSILON = 1e-6  # ε of grpo and gigpo


def token_rewards_of(
    turns_rewards: list[float], action_spans: list[tuple[int, int]], loss_mask: list[int]
) -> list[float]:
    """Put each turn's reward on the last token that the policy sampled in that turn.

    Args:
        turns_rewards: one reward per turn; they add up to the return.
        action_spans: one [start, end) per turn, token positions in the trajectory.
        loss_mask: T zeros and ones. An end-of-turn token that we appended has mask 0 and never
            gets the reward.
    Returns:
        T floats, at most one of them nonzero per turn; their sum is the trajectory's return.
    Raises:
        ValueError: a turn has a reward but no policy token.

    >>> token_rewards_of([0.0, 1.0], [(1, 3), (4, 7)], [0, 1, 1, 0, 1, 1, 0, 0])
    [0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0]
    """
    token_rewards = [0.0] * len(loss_mask)
    for turn, (reward, (start, end)) in enumerate(zip(turns_rewards, action_spans, strict=True)):
        policy_tokens = [t for t in range(start, end) if loss_mask[t] == 1]
        if policy_tokens:
            token_rewards[policy_tokens[-1]] += reward
        elif reward != 0:
            raise ValueError(
                f"turn {turn} has reward {reward} but no policy token in its action span "
                f"[{start}, {end}), so no token can get the reward; check loss_mask, or leave "
                "the trajectory out"
            )
    return token_rewards


def overlong_penalty(lengths: Tensor, limit: int, buffer: int) -> Tensor:
    """DAPO's soft punishment of long trajectories (arXiv 2503.14476, eq. 13), which begins before
    the token budget cuts them.

        0 up to limit − buffer, then (length − (limit − buffer)) / buffer, at most 1

    Args:
        lengths: (B,) tokens of each trajectory, including prompt and observations.
        limit: the budget, --max-trajectory-tokens.
        buffer: the last tokens of the budget, over which the penalty grows.
    Returns:
        (B,) float32 in 0..1, to subtract from the return.

    >>> overlong_penalty(torch.tensor([70, 90, 100]), limit=100, buffer=20).tolist()
    [0.0, 0.5, 1.0]
    """
    return ((lengths - (limit - buffer)) / buffer).clamp(0.0, 1.0)


@torch.no_grad()
def gae(
    token_rewards: Tensor,
    values: Tensor,
    loss_mask: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
    whiten: bool = True,
) -> tuple[Tensor, Tensor]:
    """Generalized advantage estimation (arXiv 1506.02438, eq. 16), for PPO with a critic.

    Here t⁺ is the next policy token after t. After the last policy token, V and Â are 0:

        δₜ = rₜ + γ V(t⁺) − V(t)
        Âₜ = δₜ + γλ Â(t⁺)
        Rₜ = Âₜ + V(t)                    the critic's target, computed before whitening

    λ = 1 gives return minus V: no bias, but the most variance. λ = 0 relies on the critic's value
    of the next token: little variance, but the critic's errors become bias.

    Args:
        token_rewards: (B, T) float; each turn's reward on its last policy token.
        values: (B, T) float; V of the state before each token, used on policy tokens only.
        loss_mask: (B, T) of 0 and 1.
        gamma: discount per policy token, not per turn: 0.99 leaves 37 % of a reward that comes
            100 tokens later.
        lam: λ.
        whiten: shift and scale Â over the batch to mean 0 and standard deviation 1.
    Returns:
        advantages, returns: (B, T) float32, 0 where loss_mask is 0.
    Raises:
        ValueError: shapes differ, a reward or a policy token's value is not finite, or a token
            with loss_mask 0 has a reward.
    """
    mask = _check(token_rewards, loss_mask, values=values)
    rewards = token_rewards.double()
    values = torch.where(mask, values.double(), 0.0)  # (B, T)
    if not values.isfinite().all():
        row, t = (~values.isfinite()).nonzero()[0].tolist()
        raise ValueError(
            f"values[{row}, {t}] is {values[row, t].item()}, but values must be finite on policy "
            "tokens: lower --critic-learning-rate, or resume from an earlier checkpoint"
        )
    advantages = torch.zeros_like(rewards)  # (B, T)
    next_value = rewards.new_zeros(len(rewards))  # (B,)  V(t⁺)
    next_advantage = torch.zeros_like(next_value)  # (B,)  Â(t⁺)
    for t in reversed(range(rewards.shape[1])):
        delta = rewards[:, t] + gamma * next_value - values[:, t]  # (B,)  δₜ
        advantage = delta + gamma * lam * next_advantage  # (B,)  Âₜ
        # NOTE: a masked token leaves both carried values unchanged. If it discounted them, credit
        # would depend on how many tokens the environment printed.
        next_value = torch.where(mask[:, t], values[:, t], next_value)
        next_advantage = torch.where(mask[:, t], advantage, next_advantage)
        advantages[:, t] = torch.where(mask[:, t], advantage, 0.0)
    returns = advantages + values  # (B, T)  0 on masked tokens
    if whiten:
        advantages = whitened(advantages, mask)
    return advantages.float(), returns.float()


@torch.no_grad()
def gae_by_turn(
    token_rewards: Tensor,
    values: Tensor,
    loss_mask: Tensor,
    gamma: float = 1.0,
    lam: float = 1.0,
    whiten: bool = True,
) -> tuple[Tensor, Tensor]:
    """GAE with turns as time steps (--gae-unit turn): V is read before a turn's first token, and
    all tokens of the turn get its advantage. With λ < 1 by token, little is left of what happens a
    hundred tokens later; by turn, gamma and λ count decisions.

    Args, Returns, Raises: as for `gae`; gamma and λ are per turn.
    """
    mask = _check(token_rewards, loss_mask, values=values)
    first, start = _turns(mask)
    rewards = torch.zeros_like(token_rewards).scatter_add(1, start, token_rewards)
    by_turn = gae(rewards, values, first, gamma, lam, whiten=False)
    advantages, returns = (_over_turns(x, start, mask) for x in by_turn)
    if whiten:
        advantages = whitened(advantages.double(), mask).float()
    return advantages, returns


@torch.no_grad()
def grpo(
    token_rewards: Tensor,
    loss_mask: Tensor,
    group_ids: Tensor,
    scale_by_std: bool = True,
) -> tuple[Tensor, Tensor]:
    """Group-relative advantage (arXiv 2402.03300, section 4.1.2), for training without a critic.

    Trajectory i, with return Rᵢ, is compared with its group G: the samples of the same task and
    seed. All policy tokens of the trajectory get the same advantage:

        Âᵢ = (Rᵢ − mean_G R) / (std_G R + ε)

    std is the unbiased estimate (n − 1), as in the reference code. If all returns of a group are
    equal, its advantages are exactly 0; see `_group_is_constant` for the reason.

    Args:
        token_rewards, loss_mask: (B, T), as for `gae`.
        group_ids: (B,) int64, the task of each row; groups can differ in size.
        scale_by_std: False skips the division by std (Dr. GRPO, arXiv 2503.20783). The division
            gives more weight to tasks that are nearly always solved or nearly always failed.
    Returns:
        advantages, returns: (B, T) float32, 0 where loss_mask is 0; returns hold Rᵢ.
    Raises:
        ValueError: as for `gae`; also if group_ids is not a (B,) tensor of integers, or if a group
            has only one member (rows without policy tokens are not members).
    """
    mask = _check(token_rewards, loss_mask)
    same_group = _same_group(group_ids, mask)  # (B, B)
    trajectory_return = token_rewards.double().sum(1)  # (B,)
    size = same_group.sum(1).clamp(min=1)  # (B,)  1 for rows that are not members
    deviation = trajectory_return - same_group @ trajectory_return / size  # (B,)  Rᵢ − mean_G R
    deviation[_group_is_constant(same_group, trajectory_return)] = 0.0
    if scale_by_std:
        variance = same_group @ deviation.square() / (size - 1).clamp(min=1)  # (B,)
        deviation = deviation / (variance.sqrt() + EPSILON)
    return _on_policy_tokens(deviation, mask), _on_policy_tokens(trajectory_return, mask)


@torch.no_grad()
def rloo(token_rewards: Tensor, loss_mask: Tensor, group_ids: Tensor) -> tuple[Tensor, Tensor]:
    """REINFORCE with a leave-one-out baseline (arXiv 2402.14740, section 3.3).

        Âᵢ = Rᵢ − 1/(n−1) Σ_{j ∈ G, j ≠ i} Rⱼ

    The baseline of a trajectory does not contain its own return, so the gradient is unbiased. The
    result is n/(n−1) times that of grpo with scale_by_std=False.

    Args, Returns, Raises: as for `grpo`.
    """
    mask = _check(token_rewards, loss_mask)
    siblings = _same_group(group_ids, mask).fill_diagonal_(0.0)  # (B, B)  j ∈ G, j ≠ i
    trajectory_return = token_rewards.double().sum(1)  # (B,)
    baseline = siblings @ trajectory_return / siblings.sum(1).clamp(min=1)  # (B,)
    advantage = trajectory_return - baseline  # (B,)
    advantage[_group_is_constant(siblings, trajectory_return)] = 0.0
    return _on_policy_tokens(advantage, mask), _on_policy_tokens(trajectory_return, mask)


@torch.no_grad()
def gigpo(
    token_rewards: Tensor,
    loss_mask: Tensor,
    group_ids: Tensor,
    anchor_ids: Tensor,
    gamma: float = 1.0,
    weight: float = 1.0,
    scale_by_std: bool = True,
) -> tuple[Tensor, Tensor]:
    """GRPO's advantage plus one for each turn (GiGPO, arXiv 2505.10978, eq. 6 to 9). The samples of
    a group often pass through the same states. What a turn did there is compared with what the
    group's other turns did in the same state:

        R_k = Σ_{j ≥ k} γ^(j−k) r_j                 return from turn k on
        Â   = Â_grpo + w (R_k − mean R) / (std R + ε)      over the group's turns from that state

    A turn that is alone in its state, or whose state led to equal returns, gets only Â_grpo.

    Args:
        token_rewards, loss_mask, group_ids, scale_by_std: as for `grpo`.
        anchor_ids: (B, T) int64; tokens of turns that began in the same state have the same number.
        gamma: γ, per turn.
        weight: w.
    Returns, Raises: as for `grpo`.
    """
    advantages, returns = grpo(token_rewards, loss_mask, group_ids, scale_by_std)
    mask = _check(token_rewards, loss_mask, anchor_ids=anchor_ids)
    first, start = _turns(mask)
    rewards = torch.zeros_like(token_rewards).scatter_add(1, start, token_rewards)
    from_turn = _returns_to_go(rewards.double(), first, gamma)  # (B, T)  R, at first tokens
    same_state, count = _states(first, group_ids, anchor_ids)  # (S,), (number of states,)
    x = from_turn[first]  # (S,)

    def mean_by_state(values: Tensor, divisor: Tensor) -> Tensor:
        sums = values.new_zeros(len(count)).scatter_add(0, same_state, values)
        return (sums / divisor.clamp(min=1))[same_state]

    deviation = x - mean_by_state(x, count)  # (S,)
    deviation[deviation.abs() <= 1e-7 + 1e-6 * x.abs()] = 0.0  # float32 rounding
    if scale_by_std:
        deviation /= mean_by_state(deviation.square(), count - 1).sqrt() + EPSILON
    from_turn[first] = deviation
    return advantages + weight * _over_turns(from_turn, start, mask).float(), returns


def anchored_share(loss_mask: Tensor, group_ids: Tensor, anchor_ids: Tensor) -> float:
    """Share of turns that another turn of the group can be compared with, 0..1."""
    first, _ = _turns(loss_mask.bool())
    state, count = _states(first, group_ids, anchor_ids)
    return float((count[state] > 1).double().mean())


@torch.no_grad()
def reinforce_plus_plus(
    token_rewards: Tensor, loss_mask: Tensor, gamma: float = 1.0
) -> tuple[Tensor, Tensor]:
    """REINFORCE++ (arXiv 2501.03262): the return after each token, whitened over the batch.

        Rₜ = rₜ + γ R(t⁺)            t⁺: the next policy token
        Âₜ = (Rₜ − mean R) / std R    over all policy tokens of the batch

    It needs neither a critic nor groups, but it compares easy tasks with hard ones. The paper's
    per-token KL penalty is part of token_rewards (`losses.kl_penalized_rewards`).

    Args, Returns, Raises: as for `gae`; returns hold Rₜ.
    """
    mask = _check(token_rewards, loss_mask)
    returns = _returns_to_go(token_rewards.double(), mask, gamma)
    return whitened(returns, mask).float(), returns.float()


@torch.no_grad()
def distill(
    log_probs: Tensor, teacher_log_probs: Tensor, loss_mask: Tensor
) -> tuple[Tensor, Tensor]:
    """On-policy distillation (arXiv 2306.13649, with the reverse KL): RL with a reward per token.

        Âₜ = log π_teacher(aₜ | sₜ) − log π(aₜ | sₜ)

    The student plays, and the teacher scores the student's own tokens. In a state s, the mean of
    −Âₜ over the student's actions is KL(π ‖ π_teacher). So the policy gradient moves the student
    towards the teacher in the states that the student reaches. SFT on a teacher's episodes never
    shows it the states that follow its own mistakes. A token gets no credit for the states it leads
    to, and the environment's rewards are not used.

    Args:
        log_probs: (B, T) of the student, before the step's first update.
        teacher_log_probs: (B, T), at the same temperature.
        loss_mask: (B, T) of 0 and 1.
    Returns:
        advantages twice, (B, T) float32, 0 where loss_mask is 0.
    """
    reward = torch.where(loss_mask.bool(), teacher_log_probs - log_probs, 0.0).float()
    return reward, reward


def whitened(x: Tensor, mask: Tensor) -> Tensor:
    """x, shifted and scaled to mean 0 and unbiased standard deviation 1 over all policy tokens.

        (x − mean) / √(var + 1e-8)

    The result is 0 where the mask is false, and everywhere if x is constant or has fewer than two
    policy tokens. Values on masked tokens are ignored, even NaN.

    Args:
        x: (B, T) float.
        mask: (B, T) bool.
    Returns:
        (B, T) like x.

    >>> whitened(torch.tensor([[1.0, 3.0, 99.0]]), torch.tensor([[True, True, False]])).tolist()
    [[-0.7071067690849304, 0.7071067690849304, 0.0]]
    """
    policy = x[mask]  # (N,)
    if policy.numel() < 2 or policy.min() == policy.max():
        return torch.zeros_like(x)
    variance, mean = torch.var_mean(policy, correction=1)
    return torch.where(mask, (x - mean) / (variance + 1e-8).sqrt(), 0.0)  # (B, T)


def _returns_to_go(rewards: Tensor, mask: Tensor, gamma: float) -> Tensor:
    """R = r + γ R(next time step) where mask is true, (B, T); 0 elsewhere."""
    returns = torch.zeros_like(rewards)  # (B, T)
    next_return = rewards.new_zeros(len(rewards))  # (B,)  R(t⁺)
    for t in reversed(range(rewards.shape[1])):
        current = rewards[:, t] + gamma * next_return  # (B,)  Rₜ
        next_return = torch.where(mask[:, t], current, next_return)
        returns[:, t] = torch.where(mask[:, t], current, 0.0)
    return returns


def _turns(mask: Tensor) -> tuple[Tensor, Tensor]:
    """The first token of each turn, (B, T) bool, and for each column the column of the latest first
    token, (B, T) int64. Between two turns is at least one token of another author."""
    first = mask.clone()
    first[:, 1:] &= ~mask[:, :-1]
    columns = torch.arange(mask.shape[1], device=mask.device).expand_as(mask)
    return first, torch.where(first, columns, 0).cummax(1).values


def _over_turns(x: Tensor, start: Tensor, mask: Tensor) -> Tensor:
    """(B, T): the value at a turn's first token, for all tokens of the turn; 0 elsewhere."""
    return torch.where(mask, x.gather(1, start), 0.0)


def _states(first: Tensor, group_ids: Tensor, anchor_ids: Tensor) -> tuple[Tensor, Tensor]:
    """(S,) a number for group and state of each turn, and how many turns have each number."""
    groups = group_ids[:, None].expand_as(anchor_ids)[first]  # (S,)
    pairs = torch.stack([groups, anchor_ids[first]])  # (2, S)
    _, number, count = torch.unique(pairs, dim=1, return_inverse=True, return_counts=True)
    return number, count


def _same_group(group_ids: Tensor, mask: Tensor) -> Tensor:
    """(B, B) float64: 1 where row and column belong to the same group, 0 elsewhere."""
    if group_ids.shape != mask.shape[:1] or group_ids.is_floating_point():
        raise ValueError(
            f"group_ids must hold one integer per row, shape ({mask.shape[0]},); got "
            f"{tuple(group_ids.shape)} of {group_ids.dtype}"
        )
    is_member = mask.any(1)  # (B,)
    is_same = (group_ids[:, None] == group_ids[None, :]) & is_member[:, None] & is_member[None, :]
    is_alone = is_same.sum(1) == 1  # (B,)
    if is_alone.any():
        raise ValueError(
            f"groups {sorted(group_ids[is_alone].tolist())} have one trajectory each; a group "
            "baseline needs at least two: drop these rows, or raise --group-size"
        )
    return is_same.double()


def _group_is_constant(same_group: Tensor, trajectory_return: Tensor) -> Tensor:
    """(B,) bool: all returns in the row's group are equal, up to float32 rounding.

    NOTE: rewards are float32, where 0.1 + 0.2 and 0.3 differ by 1e-8. Dividing this difference by
    grpo's ε = 1e-6 would give an advantage of 0.01 although the trajectories did equally well.
    """
    same_return = torch.isclose(
        trajectory_return[:, None], trajectory_return[None, :], rtol=1e-6, atol=1e-7
    )  # (B, B)
    return ~(same_group.bool() & ~same_return).any(1)


def _on_policy_tokens(per_row: Tensor, mask: Tensor) -> Tensor:
    """Spread (B,) over each row's policy tokens: (B, T) float32, 0 elsewhere."""
    return torch.where(mask, per_row[:, None], 0.0).float()


def _check(token_rewards: Tensor, loss_mask: Tensor, **tensors: Tensor) -> Tensor:
    """Reject inputs that would silently train on nothing or on NaN; returns loss_mask as bool."""
    for name, tensor in {"loss_mask": loss_mask, **tensors}.items():
        if token_rewards.ndim != 2 or tensor.shape != token_rewards.shape:
            raise ValueError(
                f"token_rewards is {tuple(token_rewards.shape)} and {name} is "
                f"{tuple(tensor.shape)}; both must have the same shape (trajectories, tokens)"
            )
    if not ((loss_mask == 0) | (loss_mask == 1)).all():
        raise ValueError("loss_mask must hold only 0 and 1: 1 on tokens that the policy sampled")
    mask = loss_mask.bool()
    not_finite = "rewards must be finite: leave out trajectories whose environment failed"
    misplaced = (
        "loss_mask is 0 there, so no policy token would learn from it: put each turn's reward "
        "on its last policy token (token_rewards_of)"
    )
    for is_bad, problem in (
        (~token_rewards.isfinite(), not_finite),
        ((token_rewards != 0) & ~mask, misplaced),
    ):
        if is_bad.any():
            row, t = is_bad.nonzero()[0].tolist()
            reward = token_rewards[row, t].item()
            raise ValueError(f"token_rewards[{row}, {t}] is {reward}, but {problem}")
    return mask


# ------------------------------------------------------------------------------------ the choice


# The choices of --algorithm: functions of a Batch and a Config. To add one, write a function above,
# add an entry here, and add its name to config.py (also to GROUP_ALGORITHMS or CRITIC_ALGORITHMS).
ESTIMATORS: dict[str, Callable[[Any, Any], tuple[Tensor, Tensor]]] = {
    "grpo": lambda b, c: grpo(
        b.token_rewards, b.loss_mask, b.group_ids, scale_by_std=c.scale_by_std
    ),
    "ppo": lambda b, c: (gae_by_turn if c.gae_unit == "turn" else gae)(
        b.token_rewards, b.values, b.loss_mask, c.gamma, c.lam
    ),
    "rloo": lambda b, c: rloo(b.token_rewards, b.loss_mask, b.group_ids),
    "gigpo": lambda b, c: gigpo(
        *(b.token_rewards, b.loss_mask, b.group_ids, b.anchor_ids),
        *(c.gamma, c.gigpo_weight),
        scale_by_std=c.scale_by_std,
    ),
    # An oracle has no log-probs; its action is imitated as it is.
    "distill": lambda b, c: (
        (b.loss_mask, b.loss_mask)
        if c.asks_oracle
        else distill(b.old_log_probs, b.teacher_log_probs, b.loss_mask)
    ),
    "reinforce_plus_plus": lambda b, c: reinforce_plus_plus(b.token_rewards, b.loss_mask, c.gamma),
}
