"""Batching turns trajectories into tensors and cuts them into micro-batches that fit into memory.

The trajectories of a step differ several-fold in length. If all were padded to the longest, most of
the computation would be wasted on padding. So we sort rows by length and cut them into
micro-batches of at most `max_tokens` tokens with at most 5 % padding:

    lengths 212 208 205 | 130 127 126 122 120 | 61 60 ...        |  ends a micro-batch

Each micro-batch is one forward and one backward pass. The cut does not change the gradient, because
the loss is a sum over policy tokens divided by N, and all micro-batches use the same N:

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

# The divisor of --loss-agg constant. Like the learning rate, it only scales the loss.
TOKENS_PER_TRAJECTORY = 100.0
MAX_PADDING = 0.05  # maximum share of padding in a micro-batch


@dataclass
class Batch:
    """Trajectories as tensors, padded on the right; row b of every field is trajectory b.

    The first six fields come from the trajectories; a step computes the others.
    """

    input_ids: torch.Tensor  # (B, T) int64
    loss_mask: torch.Tensor  # (B, T) float32, 1 on policy tokens
    rollout_log_probs: torch.Tensor  # (B, T) float32
    token_rewards: torch.Tensor  # (B, T) float32, each turn's reward on its last policy token
    lengths: torch.Tensor  # (B,) int64, number of tokens in each row without padding
    group_ids: torch.Tensor  # (B,) int64, the task of each row
    # (B, T) float32 each; None if not computed or not needed.
    old_log_probs: torch.Tensor | None = None  # of the policy before the step's first update
    ref_log_probs: torch.Tensor | None = None  # of the frozen reference
    teacher_log_probs: torch.Tensor | None = None  # with --algorithm distill
    values: torch.Tensor | None = None  # of the critic before the step's first update
    advantages: torch.Tensor | None = None
    returns: torch.Tensor | None = None
    anchor_ids: torch.Tensor | None = None  # (B, T) int64, `anchors_of`; only for gigpo
    # (B,) float32 each; for methods with one number per trajectory.
    weights: torch.Tensor | None = None  # weight in the loss; None: equal weights
    # Sum of the reference's log-probs over policy tokens; rows 2i and 2i + 1 are a pair (dpo.py).
    ref_sums: torch.Tensor | None = None

    def rows(self, index: Sequence[int]) -> Batch:
        """The rows with these indices, without the columns that are padding in all of them."""
        rows = torch.as_tensor(list(index), dtype=torch.long)
        width = int(self.lengths[rows].max())
        return self._map(lambda x: x[rows, :width] if x.ndim == 2 else x[rows])

    def to(self, device: Any) -> Batch:
        """A copy on another device."""
        return self._map(lambda x: x.to(device))

    def _map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Batch:
        values = (getattr(self, f.name) for f in fields(self))
        return Batch(*(x if x is None else change(x) for x in values))  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.lengths)


def make_batch(trajectories: Sequence[RolloutHandler], pad_id: int) -> Batch:
    """The trajectories as tensors. Each trajectory must have at least one policy token."""
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


def anchors_of(trajectories: Sequence[RolloutHandler]) -> torch.Tensor:
    """For each token of a turn, a number for the state in which the turn began, (B, T) int64
    (`Turn.state_after`). All samples of a group begin in the same state. Turns of another kind or
    of another attempt have different numbers, because they are not alternatives to each other."""
    numbers: dict[tuple[str, int, str], int] = {}
    anchors = torch.zeros(len(trajectories), max(len(t.input_ids) for t in trajectories)).long()
    for row, t in zip(anchors, trajectories, strict=True):
        attempt, state = 0, ""
        for turn in t.turns:
            key = turn.kind, attempt, state
            row[slice(*turn.action_span)] = numbers.setdefault(key, len(numbers))
            attempt, state = attempt + (turn.kind == "reflect"), turn.state_after
    return anchors


def row_weights(
    loss_mask: torch.Tensor, mini_batch_mask: torch.Tensor, constant: float | None = None
) -> torch.Tensor:
    """Weights that turn a mean over tokens into a mean over trajectories: (B,), N / (M · n_b).

        1/N Σ_b w_b Σₜ ℓ = 1/M Σ_b 1/n_b Σₜ ℓ        n_b policy tokens of row b

    Args:
        loss_mask: (B, T) of the micro-batch.
        mini_batch_mask: (M, T) of the mini-batch, with N policy tokens in M rows.
        constant: replaces n_b. A mean over a trajectory's own tokens makes each token of a long
            failure count less; dividing by a constant does not (Dr. GRPO, arXiv 2503.20783).

    >>> mini_batch = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]])
    >>> row_weights(mini_batch, mini_batch)  # 4 / (2 · 3), 4 / (2 · 1)
    tensor([0.6667, 2.0000])
    >>> row_weights(mini_batch, mini_batch, constant=10)
    tensor([0.2000, 0.2000])
    """
    num_tokens = loss_mask.sum(1)  # (B,)
    divisor = num_tokens if constant is None else torch.full_like(num_tokens, constant)
    return mini_batch_mask.sum(1).float().mean() / divisor


# --------------------------------------------------------------------------------- micro-batches


def cut_micro_batches(
    batch: Batch,
    rows: Sequence[int],
    max_tokens: int,
    share_prefix: bool = False,
    num_ranks: int = 1,
) -> list[list[int]]:
    """Distribute rows of a mini-batch over micro-batches; each row is in exactly one.

    Args:
        max_tokens: limit per micro-batch, including padding; a row or pair that exceeds it gets a
            micro-batch of its own.
        share_prefix: each micro-batch will be packed into one row (`scale/prefix.py`), so put only
            rows with the same opening together.
        num_ranks: make at least this many micro-batches if possible, one for each process.
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
    """Cut rows into micro-batches of at most `max_tokens` tokens, including padding. In each
    micro-batch, the share of padding is at most MAX_PADDING.

    NOTE: the token limit alone would leave 8 to 29 % padding on real trajectories. The share grows
    with the limit, because a large micro-batch holds both long and short rows.

    Returns:
        Row indices, longest rows first. The first micro-batch is the largest, so a run with too
        little memory fails at once and not an hour later.
    """
    cuts: list[list[int]] = []
    tokens = 0  # in the current micro-batch, without padding
    for row in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        padded = (len(cuts[-1]) + 1) * lengths[cuts[-1][0]] if cuts else math.inf
        if padded <= max_tokens and tokens + lengths[row] >= (1 - MAX_PADDING) * padded:
            cuts[-1].append(row)
            tokens += lengths[row]
        else:
            cuts.append([row])
            tokens = lengths[row]
    return cuts


def opening_length(batch: Batch) -> int:
    """Number p of leading tokens that all rows share and that the policy did not sample."""
    width = int(batch.lengths.min())
    is_equal = (batch.input_ids[:, :width] == batch.input_ids[:1, :width]).all(0)
    is_observed = (batch.loss_mask[:, :width] == 0).all(0)
    ends = (~(is_equal & is_observed)).nonzero()
    return int(ends[0]) if len(ends) else width


def _cut_groups(batch: Batch, rows: Sequence[int], max_tokens: int) -> list[list[int]]:
    """One or more micro-batches per group, each short enough when packed into one row."""
    cuts: list[list[int]] = []
    for group in sorted({int(batch.group_ids[i]) for i in rows}):
        members = [i for i in rows if int(batch.group_ids[i]) == group]
        p = opening_length(batch.rows(members))
        tails = {i: int(batch.lengths[i]) - p for i in members}
        num_cuts = len(_fill(tails, max_tokens - p))
        # The longest pass sets the peak memory, so find the smallest limit without extra passes.
        limits = range(max(max_tokens - p, 0) + 1)
        limit = bisect_left(limits, True, key=lambda n: len(_fill(tails, n)) <= num_cuts)
        cuts += _fill(tails, limit)
    return cuts


def _fill(tails: dict[int, int], limit: int) -> list[list[int]]:
    """Put rows into micro-batches, in order. `tails` holds each row's tokens after the opening;
    their sum per micro-batch is at most `limit`."""
    cuts: list[list[int]] = []
    length = 0
    for row, tokens in tails.items():
        if cuts and length + tokens <= limit:
            cuts[-1].append(row)
            length += tokens
        else:
            cuts.append([row])
            length = tokens
    return cuts


def _cut_pairs(
    batch: Batch, rows: Sequence[int], max_tokens: int, share_prefix: bool
) -> list[list[int]]:
    """Keep pairs together, because the loss of a pair is not a sum over its rows. A packed row
    holds one pair; a padded micro-batch holds pairs of similar length."""
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
