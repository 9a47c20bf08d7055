"""The parts of the benchmarks that decide what their figures mean."""

import doctest

import pytest
import torch

from benchmarks import common, groups, prefix, rollout, trl_step, update, weight_sync
from losses import Objective
from runtime.prefix import opening_length


@pytest.mark.parametrize("module", [common, groups, prefix, rollout, trl_step, update, weight_sync])
def test_examples_in_docstrings_print_what_they_show(module):
    results = doctest.testmod(module)
    assert results.attempted > 0
    assert results.failed == 0


@pytest.mark.parametrize("spread", [0.0, 0.5])
@pytest.mark.parametrize("share", prefix.SHARES)
def test_a_constructed_group_saves_the_share_it_was_asked_for(share, spread):
    p, owns = groups.shape(share, 256, spread)
    batch = groups.construct(p, owns, groups=2, vocabulary=1024)
    assert opening_length(batch.rows(range(8))) == p
    assert abs(int(batch.lengths.sum()) - 16 * 256) <= 16
    on = Objective(max_tokens_per_micro_batch=4096)
    facts = prefix.facts_of(
        batch, on, Objective(max_tokens_per_micro_batch=4096, share_prefix=False)
    )
    assert facts["saved"] == pytest.approx(share, abs=0.005)
    if not spread:
        assert facts["unshared_padding"] == 0


def test_a_share_that_no_opening_can_save_is_refused():
    with pytest.raises(ValueError, match=r"at most 0\.875"):
        groups.shape(0.9, 256)


def test_the_last_crossing_counts_and_cases_without_a_time_are_left_out():
    points = [(0.3, 1.2), (0.0, 1.01), (0.1, 0.9), (0.2, 1.1)]  # in any order
    assert prefix.crossover(points)["at"] == pytest.approx(0.15)
    assert prefix.crossover([])["at"] is None
    assert prefix.summarize({"cases": [{"name": "equal", "repeats": []}]})["rows"] == []


def test_bytes_held_are_seen_until_the_last_view_is_gone():
    def stream():
        for i in range(4):
            yield str(i), torch.zeros(100 * (i + 1))  # 400, 800, 1200, 1600 bytes

    def taken(keep):
        held, kept = weight_sync.Held(), []
        watched = held.watch(stream())
        while True:
            try:
                _, tensor = next(watched)
            except StopIteration:
                return held
            if keep:
                kept.append(tensor[:1])  # a view holds all of the memory
            del tensor

    one_at_a_time = taken(keep=False)
    assert (one_at_a_time.total, one_at_a_time.largest, one_at_a_time.peak) == (4000, 1600, 1600)
    assert taken(keep=True).peak == 4000
