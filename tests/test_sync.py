"""scale/sync.py: all weights are sent, one at a time, and a stale weight is noticed (trap 20)."""

import math
import weakref
from dataclasses import replace

import pytest
import torch

from engines import TransformersEngine
from models import load_policy
from scale import sync
from scale.default_models import resolve_model

OPENINGS = [[5, 6, 7, 8, 9], [11, 12, 13]]


@pytest.fixture
def policy():
    """The tiny model after a step that changed every weight."""
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


def test_sampler_and_trainer_differ_before_a_sync_and_agree_after_it(policy, engine):
    (before,) = differences(policy, engine)
    assert before > 0.1
    num_bytes = sync.send_weights(policy, engine, torch.float32)
    (after,) = differences(policy, engine)
    assert after < 1e-5
    assert num_bytes == 4 * sum(t.numel() for t in policy.lm.state_dict().values())
    assert sync.check([after], 0.01, step=1) == after


def test_one_stale_weight_is_noticed(policy, engine):
    """For example the tied head, which vLLM does not update when it reloads weights from a path."""
    load = engine.load_weights

    def load_all_but_one(weights):
        state = engine.lm.state_dict()
        load((n, state[n].clone() if n == "model.norm.weight" else t) for n, t in weights)

    engine.load_weights = load_all_but_one
    sync.send_weights(policy, engine, torch.float32)
    after = differences(policy, engine)
    assert after[0] > 1e-3
    with pytest.raises(sync.SyncError, match="step 7, sampler and trainer differ by .* 0.001"):
        sync.check(after, 0.001, step=7)


def test_every_sampler_gets_a_sample_and_the_worst_one_counts(policy, engine):
    sync.send_weights(policy, engine, torch.float32)
    submitted, submit, poll = [], engine.submit, engine.poll

    def poll_with_a_stale_sampler():
        return [
            replace(g, log_probs=[x - 0.5 for x in g.log_probs]) if g.request_id == "4" else g
            for g in poll()
        ]

    engine.num_samplers, engine.poll = 5, poll_with_a_stale_sampler
    engine.submit = lambda name, ids, sampling: submitted.append(ids) or submit(name, ids, sampling)
    (difference,) = differences(policy, engine)
    assert submitted == [OPENINGS[n % 2] for n in range(5)]
    assert difference == pytest.approx(0.5, abs=1e-4)


def test_an_error_names_the_rank_whose_sampler_differs():
    for bad in (math.nan, math.inf, 0.5):
        with pytest.raises(sync.SyncError, match="trainer of rank 2 differ by"):
            sync.check([0.001, 0.002, bad], 0.1, step=1)
    assert sync.check([0.001, 0.003], 0.1, step=1) == pytest.approx(0.002)


def test_weights_are_sent_one_at_a_time(policy, engine):
    """A weight is freed before the next is made, so there is never a second copy of the model."""
    max_alive = 0

    def load(weights):
        nonlocal max_alive
        alive = []
        for _, tensor in weights:
            alive = [ref for ref in alive if ref() is not None] + [weakref.ref(tensor)]
            max_alive = max(max_alive, len(alive))
            del tensor

    engine.load_weights = load
    sync.send_weights(policy, engine, torch.bfloat16)
    assert max_alive <= 2  # the current weight and the one before it
