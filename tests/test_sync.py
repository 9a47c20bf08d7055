"""Weight sync: every weight arrives, one at a time, and one that does not is noticed (trap 20)."""

import math
import weakref

import pytest
import torch

from engines import TransformersEngine
from models import load_policy
from scale import sync
from scale.default_models import resolve_model

OPENINGS = [[5, 6, 7, 8, 9], [11, 12, 13]]


@pytest.fixture
def policy():
    """The tiny model after a step that moved every weight."""
    policy = load_policy(resolve_model("tiny")).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in policy.parameters():
            p.add_(torch.randn(p.shape, generator=generator), alpha=0.05)
    return policy


@pytest.fixture
def engine():
    """A sampler with the weights from before that step."""
    return TransformersEngine(resolve_model("tiny"))


def differences(policy, engine):
    return sync.compare(policy, engine, OPENINGS, temperature=0.7, device="cpu", seed=3)


def test_before_the_sync_the_two_differ_and_after_it_they_agree(policy, engine):
    (before,) = differences(policy, engine)
    assert before > 0.1
    num_bytes = sync.send_weights(policy, engine, torch.float32)
    (after,) = differences(policy, engine)
    assert after < 1e-5
    assert num_bytes == 4 * sum(t.numel() for t in policy.lm.state_dict().values())
    assert sync.check([after], 0.01, step=1) == after


def test_one_stale_weight_is_noticed(policy, engine):
    """The tied head, say, which vLLM leaves at its old values when it reloads from a path."""
    load = engine.load_weights

    def load_all_but_one(weights):
        own = engine.lm.state_dict()
        load((n, own[n].clone() if n == "model.norm.weight" else t) for n, t in weights)

    engine.load_weights = load_all_but_one
    sync.send_weights(policy, engine, torch.float32)
    found = differences(policy, engine)
    assert found[0] > 1e-3
    with pytest.raises(sync.SyncError, match="step 7, sampler and trainer differ by .* 0.001"):
        sync.check(found, 0.001, step=7)


def test_the_rank_whose_sampler_is_off_is_named():
    for bad in (math.nan, math.inf, 0.5):
        with pytest.raises(sync.SyncError, match="trainer of rank 2 differ by"):
            sync.check([0.001, 0.002, bad], 0.1, step=1)
    assert sync.check([0.001, 0.003], 0.1, step=1) == pytest.approx(0.002)


def test_one_weight_exists_at_a_time(policy, engine):
    """What was sent is dropped before the next is put together; a second copy never exists."""
    most = 0

    def load(weights):
        nonlocal most
        alive = []
        for _, tensor in weights:
            alive = [ref for ref in alive if ref() is not None] + [weakref.ref(tensor)]
            most = max(most, len(alive))
            del tensor

    engine.load_weights = load
    sync.send_weights(policy, engine, torch.bfloat16)
    assert most <= 2  # the one that is handed over and the one before it
