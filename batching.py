"""From trajectories of any length to tensors, and from tensors to micro-batches that fit.

Trajectories of one step differ in length several-fold. Padding them all to the longest would spend
most of the update on nothing, so rows are sorted by length and cut into micro-batches of at most
`max_tokens` padded tokens, of which at most one in twenty is padding:

    lengths 212 208 205 | 130 127 126 122 120 | 61 60 ...        |  = one forward and backward pass

A micro-batch is a device's unit of work and nothing else. Losses are sums over policy tokens
divided by a denominator that is counted over the whole mini-batch beforehand, so that any cut gives
the same gradient:

    L = Σ_micro Σ_{b,t} mask · ℓ / N      N = policy tokens of the mini-batch, over all processes

Masks come from lengths, never from token ids: many tokenizers pad with their end-of-turn id, and a
mask made by comparing ids would drop every final end-of-turn.

Shapes: B rows, T = longest row. Read next: `update.py`, which runs the passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from advantages import token_rewards_of
from trajectory import RolloutHandler

MAX_PADDING = 0.05  # of a micro-batch's tokens


@dataclass
class Batch:
    """Trajectories as tensors, padded on the right; row b of every field is trajectory b.

    The first six are what was played; the others are added on the way through a step.
    """

    input_ids: torch.Tensor  # (B, T) int64
    loss_mask: torch.Tensor  # (B, T) float32, 1 on policy tokens
    rollout_log_probs: torch.Tensor  # (B, T) float32
    token_rewards: torch.Tensor  # (B, T) float32, each turn's reward on its last policy token
    lengths: torch.Tensor  # (B,) int64, real tokens of each row
    group_ids: torch.Tensor  # (B,) int64, travels with its row through every reordering
    # (B, T) float32 each; None: not computed, or not needed.
    old_log_probs: torch.Tensor | None = None  # of the policy before the step's first update
    ref_log_probs: torch.Tensor | None = None  # of the frozen reference
    values: torch.Tensor | None = None  # of the critic, before the step's first update
    advantages: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    # (B,) float32 each; of methods that treat a trajectory as a whole.
    weights: torch.Tensor | None = None  # how much each counts in the loss; None: all alike
    ref_sums: torch.Tensor | None = None  # log-prob of its policy tokens under the reference

    def rows(self, index: Sequence[int]) -> Batch:
        """The chosen rows, cut to the longest of them."""
        rows = torch.as_tensor(list(index), dtype=torch.long)
        width = int(self.lengths[rows].max())

        def cut(x: torch.Tensor | None) -> torch.Tensor | None:
            return x if x is None else x[rows, :width] if x.ndim == 2 else x[rows]

        return self._map(cut)

    def to(self, device: Any) -> Batch:
        """The same on another device."""
        return self._map(lambda x: x if x is None else x.to(device))

    def _map(self, change: Callable[[torch.Tensor | None], torch.Tensor | None]) -> Batch:
        return Batch(*(change(getattr(self, f.name)) for f in fields(self)))  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.lengths)


def make_batch(trajectories: Sequence[RolloutHandler], pad_id: int) -> Batch:
    """Tensors of valid trajectories.

    Raises:
        ValueError: there are none, or one has no policy token (it must have been dropped and
            counted before).
    """
    if not trajectories:
        raise ValueError("no trajectories to make a batch of")
    for t in trajectories:
        if not any(t.loss_mask):
            raise ValueError(
                f"{t.trajectory_id} has no policy token; drop empty trajectories before batching"
            )
    width = max(len(t.input_ids) for t in trajectories)

    def padded(rows: list[Sequence[float]], fill: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], dtype=dtype)

    rewards = [
        token_rewards_of(
            [turn.reward for turn in t.turns], [turn.action_span for turn in t.turns], t.loss_mask
        )
        for t in trajectories
    ]
    return Batch(
        input_ids=padded([t.input_ids for t in trajectories], pad_id, torch.long),
        loss_mask=padded([t.loss_mask for t in trajectories], 0, torch.float32),
        rollout_log_probs=padded([t.rollout_log_probs for t in trajectories], 0.0, torch.float32),
        token_rewards=padded([list(r) for r in rewards], 0.0, torch.float32),
        lengths=torch.tensor([len(t.input_ids) for t in trajectories]),
        group_ids=torch.tensor([t.group_id for t in trajectories]),
    )


def even_weights(loss_mask: torch.Tensor) -> torch.Tensor:
    """Weights with which each trajectory counts alike in a mean over tokens: (B,), N / (B·n_b).

        1/N Σ_b w_b Σₜ ℓ = 1/B Σ_b 1/n_b Σₜ ℓ        n_b policy tokens of row b, N of all B rows

    The rows are those of one mini-batch, for that is what N is counted over.

    >>> even_weights(torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]]))  # 4 / (2 · 3), 4 / (2 · 1)
    tensor([0.6667, 2.0000])
    """
    own = loss_mask.sum(1).float()  # (B,)
    return own.mean() / own


def micro_batches(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Cut rows into micro-batches of at most `max_tokens` tokens, padding included, and at most
    MAX_PADDING of padding.

    NOTE: the budget alone leaves 8 to 29 % of padding on real trajectories, the more the larger it
    is: a wide budget reaches from the longest rows to the shortest.

    Args:
        lengths: tokens of each row.
        max_tokens: rows x longest row of a micro-batch; a single row longer than this gets its own.
    Returns:
        Lists of row indices, longest rows first (the first micro-batch is the largest, so that
        running out of memory happens at once and not an hour later); every row is in exactly one.
    """
    cuts: list[list[int]] = []
    tokens = 0  # in the open micro-batch, padding not counted
    for row in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        padded = (len(cuts[-1]) + 1) * lengths[cuts[-1][0]] if cuts else math.inf
        if padded <= max_tokens and tokens + lengths[row] >= (1 - MAX_PADDING) * padded:
            cuts[-1].append(row)
            tokens += lengths[row]
        else:
            cuts.append([row])
            tokens = lengths[row]
    return cuts


def padding_share(lengths: Sequence[int], cuts: Sequence[Sequence[int]]) -> float:
    """Share of the tokens of all micro-batches that are padding, 0..1."""
    padded = sum(len(rows) * max(lengths[i] for i in rows) for rows in cuts)
    tokens = sum(lengths[i] for rows in cuts for i in rows)
    return 1 - tokens / padded if padded else 0.0
