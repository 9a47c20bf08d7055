"""What layers keep for the backward pass changes memory and nothing else."""

import measure_memory
import pytest
import torch

from benchmarks.gpu import random_batch, random_policy
from losses import Objective
from scale.distributed import make_accelerator
from scale.recompute import keep_for_backward, what_to_keep
from update import Learner, update_policy

SHAPE = measure_memory.SMALL["tiny"]


def gradients(keep, share_prefix=False, bf16=False):
    torch.manual_seed(0)
    model = random_policy(SHAPE)
    keep_for_backward(model, keep)
    batch = random_batch(SHAPE, 96)
    if share_prefix:  # one group with one opening
        batch.group_ids[:] = 0
        batch.input_ids[1, :60] = batch.input_ids[0, :60]
    learner = Learner(
        make_accelerator("bf16" if bf16 else "no"),
        model,
        torch.optim.SGD(model.parameters(), lr=0.0),
    )
    kept = {}
    learner.optimizer.register_step_pre_hook(
        lambda *_: kept.update({n: p.grad.clone() for n, p in model.named_parameters()})
    )
    update_policy(learner, batch, Objective(mini_batch_size=2, share_prefix=share_prefix))
    return kept


@pytest.mark.parametrize("keep", ["products", "inputs"])
@pytest.mark.parametrize("share_prefix", [False, True])
@pytest.mark.parametrize("bf16", [False, True])
def test_gradients_are_the_same_to_the_bit(keep, share_prefix, bf16):
    expected = gradients("all", share_prefix, bf16)
    found = gradients(keep, share_prefix, bf16)
    assert expected and all(torch.equal(expected[name], found[name]) for name in expected)
    assert any(g.abs().sum() > 0 for g in expected.values())


def test_each_way_keeps_less_than_the_one_before():
    peaks = [
        measure_memory.measure(SHAPE, tokens=256, keep=keep)["transient"]
        for keep in ("all", "products", "inputs")
    ]
    assert peaks[0] > 1.2 * peaks[1] > 1.2 * 1.2 * peaks[2]


def test_a_cpu_keeps_products_and_a_card_all_unless_asked_for_less():
    cpu, card = torch.device("cpu"), torch.device("cuda")
    assert what_to_keep(False, cpu) == "products"
    assert what_to_keep(False, card) == "all"
    assert what_to_keep(True, cpu) == what_to_keep(True, card) == "inputs"
