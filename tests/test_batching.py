"""batching.py: each row is in one micro-batch, keeps its data, and loses nothing to padding."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agents import take_result
from batching import (
    MAX_PADDING,
    Batch,
    anchors_of,
    cut_by_length,
    cut_micro_batches,
    make_batch,
    opening_length,
)
from envclient import StepResult
from trajectory import RolloutHandler, Turn

PAD = 99
lengths_and_budget = st.tuples(
    st.lists(st.integers(1, 50), min_size=1, max_size=30), st.integers(1, 200)
)


def trajectory(drawing, group_id=0, rewards=()):
    """A trajectory from a drawing in which `a` is a sampled token; each run of `a` is a turn."""
    mask = [int(c == "a") for c in drawing]
    n = len(mask)
    starts = [i for i in range(n) if mask[i] and not (i and mask[i - 1])]
    ends = [i + 1 for i in range(n) if mask[i] and not (i + 1 < n and mask[i + 1])]
    rewards = [*rewards, *[0.0] * len(starts)]
    handler = RolloutHandler(f"t{group_id}", 1, "fake", "fake_0", "easy", group_id, 0, 3)
    handler.input_ids = [10 * (group_id + 1) + i for i in range(n)]
    handler.loss_mask = mask
    handler.rollout_log_probs = [-(i + 1) / 8 if m else 0.0 for i, m in enumerate(mask)]
    handler.turns = [Turn(span, "", reward=r) for span, r in zip(zip(starts, ends), rewards)]
    return handler


TRAJECTORIES = [
    trajectory("ppaaoaao", 0, [0.25, 0.75]),
    trajectory("paoa", 1, [0.0, 1.0]),
    trajectory("ppaao", 0, [0.5]),
    trajectory("pa", 1),
]


def test_a_turns_tokens_carry_the_state_in_which_it_began():
    """The reported state; the observation, if none is reported; 0 for the start of every sample."""
    first, second = trajectory("paaoaoa"), trajectory("paoa")
    for turn, state in zip([*first.turns, *second.turns], ["1 log", None, "", None, None]):
        turn.anchor, turn.observation_text = state, "Got 1 log"
    second.turns[0].observation_text = "1 log"
    assert anchors_of([first, second]).tolist() == [[0, 0, 0, 0, 1, 0, 2], [0, 0, 0, 1, 0, 0, 0]]


def test_a_refused_text_leaves_the_state_and_turns_of_another_kind_or_attempt_do_not_meet():
    """act (1 log), refused, reflect, act | plan, act: states start, 1 log, 1 log; 1 log; start."""
    first, second = trajectory("paoaoaoa"), trajectory("paoa")
    first.turns[0].anchor = "1 log"
    refusal = StepResult("No action found.", 0.0, False, False, {"parse_error": "No action found."})
    first.turns, later = first.turns[:2], first.turns[2:]
    take_result(first, first.turns[1], refusal)
    first.turns += later
    first.turns[2].kind, second.turns[0].kind = "reflect", "plan"
    anchors = anchors_of([first, second])
    assert [anchors[0, t].item() for t in (1, 3, 5, 7)] == [0, 1, 2, 3]
    assert [anchors[1, t].item() for t in (1, 3)] == [4, 0]
    assert first.turns[1].anchor == "1 log"


def test_two_trajectories_as_tensors():
    batch = make_batch([trajectory("ppaoaa", 3, [0.25, 0.5]), trajectory("paa", 7, [1.0])], PAD)
    assert batch.input_ids.tolist() == [[40, 41, 42, 43, 44, 45], [80, 81, 82, PAD, PAD, PAD]]
    assert batch.loss_mask.tolist() == [[0, 0, 1, 0, 1, 1], [0, 1, 1, 0, 0, 0]]
    assert batch.token_rewards.tolist() == [[0, 0, 0.25, 0, 0, 0.5], [0, 0, 1, 0, 0, 0]]
    assert batch.rollout_log_probs.tolist() == [
        [0, 0, -0.375, 0, -0.625, -0.75],
        [0, -0.25, -0.375, 0, 0, 0],
    ]
    assert batch.lengths.tolist() == [6, 3] and batch.group_ids.tolist() == [3, 7]
    assert batch.input_ids.dtype == batch.group_ids.dtype == torch.int64
    assert batch.loss_mask.dtype == batch.rollout_log_probs.dtype == torch.float32
    assert len(batch) == 2


def test_a_final_end_of_turn_stays_in_the_loss_where_it_is_also_the_padding():
    """Trap 21: a mask computed from the ids would drop it."""
    short = trajectory("ppa", 0, [1.0])
    short.input_ids[-1] = PAD
    batch = make_batch([short, trajectory("ppaoa", 1)], PAD)
    assert batch.input_ids[0, 2:].tolist() == [PAD] * 3
    assert batch.loss_mask[0].tolist() == batch.token_rewards[0].tolist() == [0, 0, 1, 0, 0]
    assert batch.rows([0]).input_ids.shape == (1, 3)


@given(lengths_and_budget)
def test_micro_batches_hold_each_row_once_and_as_many_rows_as_the_limits_allow(case):
    lengths, max_tokens = case
    cuts = cut_by_length(lengths, max_tokens)

    def fits(rows):
        """Whether these rows are within the budget and the allowed padding."""
        padded = len(rows) * max(lengths[row] for row in rows)
        tokens = sum(lengths[row] for row in rows)
        return padded <= max_tokens and tokens >= (1 - MAX_PADDING) * padded

    assert sorted(row for rows in cuts for row in rows) == list(range(len(lengths)))
    assert [lengths[row] for rows in cuts for row in rows] == sorted(lengths, reverse=True)
    assert all(fits(rows) or len(rows) == 1 for rows in cuts)
    assert not any(fits([*rows, following[0]]) for rows, following in pairwise(cuts))


def fields_of(batch: Batch, row: int) -> list:
    """All data of one row, without its padding."""
    n = int(batch.lengths[row])
    tokens = [batch.input_ids, batch.loss_mask, batch.rollout_log_probs, batch.token_rewards]
    return [x[row, :n].tolist() for x in tokens] + [n, int(batch.group_ids[row])]


@given(st.permutations(range(4)), st.integers(1, 4), st.integers(1, 30))
def test_group_ids_rewards_and_masks_travel_with_their_row(order, num_rows, max_tokens):
    """Trap 22: reordering, selecting and cutting into micro-batches does not mix up rows."""
    batch = make_batch(TRAJECTORIES, PAD)
    selected = order[:num_rows]
    part = batch.rows(selected)
    assert [fields_of(part, i) for i in range(len(part))] == [fields_of(batch, i) for i in selected]
    assert part.input_ids.shape[1] == max(int(batch.lengths[i]) for i in selected)
    for index in cut_by_length(part.lengths.tolist(), max_tokens):
        micro = part.rows(index)
        for i, row in enumerate(index):
            assert fields_of(micro, i) == fields_of(batch, selected[row])


def batch_of(*drawings):
    return make_batch([trajectory(drawing) for drawing in drawings], PAD)


def test_an_opening_ends_at_a_difference_or_at_a_sampled_token():
    assert opening_length(batch_of("ppaa", "ppa", "ppao")) == 2  # the sampled tokens are equal
    assert opening_length(batch_of("ppo", "ppoa")) == 3  # the shorter row ends
    batch = batch_of("pppa", "pppa", "pppa")
    batch.input_ids[2, 1] = 7
    assert opening_length(batch) == 1


@pytest.mark.parametrize("max_tokens", [1, 8, 12, 100])
def test_packed_micro_batches_hold_one_group_each(max_tokens):
    batch = make_batch(TRAJECTORIES * 2, PAD)
    cuts = cut_micro_batches(batch, range(8), max_tokens, share_prefix=True)
    assert sorted(row for rows in cuts for row in rows) == list(range(8))
    for rows in cuts:
        assert len({int(batch.group_ids[row]) for row in rows}) == 1
        p = opening_length(batch.rows(rows))
        length = p + sum(int(batch.lengths[row]) - p for row in rows)
        assert length <= max_tokens or len(rows) == 1


def test_a_group_that_needs_several_passes_is_cut_evenly():
    """Eight samples of 3 tokens after an opening of 2. A limit of 20 tokens would give 6 and 2."""
    batch = batch_of(*["ppaaa"] * 8)
    cases = [(8, 20, [4, 4]), (8, 25, [4, 4]), (8, 26, [8]), (7, 11, [3, 3, 1])]
    for num_rows, limit, sizes in cases:
        cuts = cut_micro_batches(batch, range(num_rows), limit, share_prefix=True)
        assert [len(rows) for rows in cuts] == sizes


def test_each_process_gets_a_micro_batch_if_possible():
    """More processes never lead to fewer or larger micro-batches."""
    batch = batch_of(*["ppaa"] * 4)
    assert cut_micro_batches(batch, range(4), 100) == [[0, 1, 2, 3]]
    assert cut_micro_batches(batch, range(4), 100, num_ranks=2) == [[0, 1], [2, 3]]
    assert cut_micro_batches(batch, [3, 1, 0], 100, num_ranks=3) == [[3], [1], [0]]
    assert cut_micro_batches(batch, range(4), 8, num_ranks=2) == [[0, 1], [2, 3]]
    assert cut_micro_batches(batch, range(4), 4, num_ranks=8) == [[0], [1], [2], [3]]


@pytest.mark.parametrize(
    ("max_tokens", "cuts"),
    [
        (48, [[0, 1, 4, 5, 2, 3]]),
        (32, [[0, 1, 4, 5], [2, 3]]),
        (31, [[0, 1], [4, 5], [2, 3]]),
    ],
)
def test_a_micro_batch_holds_pairs_of_similar_length(max_tokens, cuts):
    batch = batch_of("ppaaaaaa", "ppaa", "ppaaa", "pa", "ppaaaaaa", "ppaaaa")
    batch.ref_sums = torch.zeros(6)
    assert cut_micro_batches(batch, range(6), max_tokens) == cuts


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("budget", [1, 8, 16, 10_000])
def test_a_pair_is_never_split(budget, share):
    """The loss of a pair is not a sum over rows."""
    batch = make_batch(TRAJECTORIES * 2, PAD)
    batch.ref_sums = torch.zeros(8)
    cuts = cut_micro_batches(batch, range(8), budget, share)
    assert sorted(row for rows in cuts for row in rows) == list(range(8))
    for rows in cuts:
        assert all(b == a + 1 and a % 2 == 0 for a, b in zip(rows[::2], rows[1::2]))
        longest = int(batch.lengths[rows].max())
        assert len(rows) == 2 or (len(rows) * longest <= budget and not share)
