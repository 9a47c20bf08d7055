"""From trajectories of any length to tensors, and from tensors to micro-batches that fit.

Trajectories of one step differ in length several-fold, and padding all of them to the longest would
spend most of the update on nothing. Rows are therefore sorted by length and cut into micro-batches
of at most `max_tokens` padded tokens, of which at most one in twenty is padding:

    lengths 212 208 205 | 130 127 126 122 120 | 61 60 ...        |  = one forward and backward pass

A micro-batch is a unit of work for the device and nothing else. Losses are sums over policy tokens
divided by a number that is counted over the whole mini-batch, so every cut gives the same gradient:

    L = Σ_micro Σ_{b,t} mask · ℓ / N      N = policy tokens of the mini-batch, over all processes

Masks come from lengths, never from token ids: many tokenizers pad with their end-of-turn id.

Shapes: B rows, T = longest row. Read next: `update.py`, which runs the passes.
"""

from __future__ import annotations

import math
from bisect import bisect_left
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

    The first six hold what was played; the others are added on the way through a step.
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
    # Log-prob of the policy tokens under the reference: rows 2i and 2i + 1 are a pair (dpo.py).
    ref_sums: torch.Tensor | None = None

    def rows(self, index: Sequence[int]) -> Batch:
        """The chosen rows, cut to the longest of them."""
        rows = torch.as_tensor(list(index), dtype=torch.long)
        width = int(self.lengths[rows].max())
        return self._map(lambda x: x[rows, :width] if x.ndim == 2 else x[rows])

    def to(self, device: Any) -> Batch:
        """The same on another device."""
        return self._map(lambda x: x.to(device))

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        values = (getattr(self, f.name) for f in fields(self))
        return Batch(*(x if x is None else change(x) for x in values))  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.lengths)


def make_batch(trajectories: Sequence[RolloutHandler], pad_id: int) -> Batch:
    """Tensors of trajectories, each with at least one policy token."""
    width = max(len(t.input_ids) for t in trajectories)

    def padded(rows: list[list[Any]], fill: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor([[*row, *[fill] * (width - len(row))] for row in rows], dtype=dtype)

    rewards = [
        token_rewards_of([u.reward for u in t.turns], [u.action_span for u in t.turns], t.loss_mask)
        for t in trajectories
    ]
    return Batch(
        input_ids=padded([t.input_ids for t in trajectories], pad_id, torch.long),
        loss_mask=padded([t.loss_mask for t in trajectories], 0, torch.float32),
        rollout_log_probs=padded([t.rollout_log_probs for t in trajectories], 0.0, torch.float32),
        token_rewards=padded(rewards, 0.0, torch.float32),
        lengths=torch.tensor([len(t.input_ids) for t in trajectories]),
        group_ids=torch.tensor([t.group_id for t in trajectories]),
    )


def seq_mean_weights(loss_mask: torch.Tensor, mini_batch_mask: torch.Tensor) -> torch.Tensor:
    """Weights with which each trajectory counts alike in a mean over tokens: (B,), N / (M · n_b).

        1/N Σ_b w_b Σₜ ℓ = 1/M Σ_b 1/n_b Σₜ ℓ        n_b policy tokens of row b

    Args:
        loss_mask: (B, T) of a micro-batch.
        mini_batch_mask: (M, T) of its mini-batch, N policy tokens in M rows.

    >>> mini_batch = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
    >>> seq_mean_weights(mini_batch, mini_batch)  # 4 / (2 · 3), 4 / (2 · 1)
    tensor([0.6667, 2.0000])
    """
    return mini_batch_mask.sum(1).float().mean() / loss_mask.sum(1)


# --------------------------------------------------------------------------------- micro-batches


def cut_micro_batches(
    batch: Batch,
    rows: Sequence[int],
    max_tokens: int,
    share_prefix: bool = False,
    num_ranks: int = 1,
) -> list[list[int]]:
    """Rows of a mini-batch -> rows of its micro-batches: each row in exactly one.

    Args:
        max_tokens: of a micro-batch, padding included; a row (or pair) that is longer gets its own.
        share_prefix: rows of a micro-batch are packed into one and must open alike.
        num_ranks: cut into that many if possible, so that every process has one.
    """
    if batch.ref_sums is not None:
        return _cut_pairs(batch, rows, max_tokens, share_prefix)

    def cut_at(limit: int) -> list[list[int]]:
        if share_prefix:
            return _cut_groups(batch, rows, limit)
        by_length = cut_by_length(batch.lengths[list(rows)].tolist(), limit)
        return [[rows[i] for i in micro] for micro in by_length]

    cuts = cut_at(max_tokens)
    if len(cuts) < num_ranks:
        total = int(batch.lengths[list(rows)].sum())
        finer = cut_at(min(max_tokens, math.ceil(total / num_ranks)))
        cuts = finer if len(finer) > len(cuts) else cuts
    return cuts


def cut_by_length(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Cut rows into micro-batches of at most `max_tokens` tokens, padding included, and at most
    MAX_PADDING of padding.

    NOTE: the budget alone leaves 8 to 29 % of padding on real trajectories, the more the larger it
    is: a wide budget reaches from the longest rows to the shortest.

    Returns:
        Row indices, longest rows first: the first micro-batch is the largest, so that running out
        of memory happens at once and not an hour later.
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


def opening_length(batch: Batch) -> int:
    """Tokens at the start that all rows share and no policy has sampled (p)."""
    width = int(batch.lengths.min())
    same = (batch.input_ids[:, :width] == batch.input_ids[:1, :width]).all(0)
    observed = (batch.loss_mask[:, :width] == 0).all(0)
    differs = (~(same & observed)).nonzero()
    return int(differs[0]) if len(differs) else width


def _cut_groups(batch: Batch, rows: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Rows that share an opening, one group each, cut where the packed row is too long."""
    cuts: list[list[int]] = []
    for group in sorted({int(batch.group_ids[i]) for i in rows}):
        members = [i for i in rows if int(batch.group_ids[i]) == group]
        p = opening_length(batch.rows(members))
        own = {i: int(batch.lengths[i]) - p for i in members}
        fewest = len(_fill(own, max_tokens - p))
        # As many passes, as even as they can be: the longest decides how much memory a step takes.
        rooms = range(max(max_tokens - p, 0) + 1)
        cuts += _fill(own, bisect_left(rooms, True, key=lambda r: len(_fill(own, r)) <= fewest))
    return cuts


def _fill(own: dict[int, int], room: int) -> list[list[int]]:
    """Rows in their order, put together as long as their own tokens fit into `room`."""
    cuts: list[list[int]] = []
    length = 0
    for row, tokens in own.items():
        if cuts and length + tokens <= room:
            cuts[-1].append(row)
            length += tokens
        else:
            cuts.append([row])
            length = tokens
    return cuts


def _cut_pairs(
    batch: Batch, rows: Sequence[int], max_tokens: int, share_prefix: bool
) -> list[list[int]]:
    """Whole pairs, because their loss is not a sum over rows. A packed row is one pair; padded,
    pairs of similar length lie together."""
    pairs = sorted(
        {row - row % 2 for row in rows},
        key=lambda row: (-int(batch.lengths[row : row + 2].max()), row),
    )
    cuts: list[list[int]] = []
    for row in pairs:
        longest = int(batch.lengths[cuts[-1]].max()) if cuts else 0
        if cuts and not share_prefix and (len(cuts[-1]) + 2) * longest <= max_tokens:
            cuts[-1] += [row, row + 1]
        else:
            cuts.append([row, row + 1])
    return cuts
