"""scale/memory.py: a run that does not fit into memory is refused before anything is loaded."""

from dataclasses import replace

import pytest
import torch

from benchmarks.gpu import random_batch, random_policy
from config import Config, Misuse, Objective, with_preset
from scale import memory
from scale.default_models import model_config
from scale.distributed import make_accelerator
from scale.memory import (
    GIB,
    DeviceMemory,
    Shape,
    check_memory,
    choose_keep,
    cpu_cache_bytes,
    keep_for_backward,
    required_bytes,
    sampler_share,
    shape_of,
    state_of,
)
from update import Learner, update_policy

LAPTOP, PAPER = with_preset("laptop"), with_preset("paper")
QWEN_3B = Shape("3B", 151936, 2048, 11008, 36, 16, 2)
TINY = Shape("tiny", 1024, 256, 704, 4, 4, 2)
SMOL = shape_of("smollm2-135m", model_config("smollm2-135m"))


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def is_3b(monkeypatch):
    """Every model has the shape of Qwen2.5-3B."""
    monkeypatch.setattr(memory, "shape_of", lambda *_: QWEN_3B)
    monkeypatch.setattr(memory, "model_config", lambda name: {})


def machine(gib):
    return DeviceMemory(gib * GIB, is_gpu=False)


def card(gib):
    return DeviceMemory(gib * GIB, is_gpu=True)


def test_the_estimate_for_the_laptop_agrees_with_a_measurement():
    assert sum(state_of(LAPTOP, SMOL).values()) == pytest.approx(16 * 134.5e6, rel=0.01)
    taught = replace(LAPTOP, algorithm="distill", teacher="smollm2-135m")
    more = sum(state_of(taught, SMOL).values()) - sum(state_of(LAPTOP, SMOL).values())
    assert more == pytest.approx(4 * 134.5e6, rel=0.01)
    adapted = replace(LAPTOP, lora_rank=8)
    critic = replace(adapted, algorithm="ppo")  # it has no adapters
    more = sum(state_of(critic, SMOL).values()) - sum(state_of(adapted, SMOL).values())
    assert more == pytest.approx(16 * 134.5e6, rel=0.01)
    config = replace(LAPTOP, max_tokens_per_micro_batch=1024)
    assert 7.5e9 < required_bytes(config, SMOL, machine(16)) < 10e9  # 9.1 GB measured


def test_the_sampler_gets_the_memory_of_a_card_that_the_trainer_does_not_need(is_3b, monkeypatch):
    """The weights, moments and reference of 3B are 46 GiB: half of an 80 GB card is not free."""
    state = 16 * QWEN_3B.parameters  # 20 bytes per parameter without 4 for the gradient
    for gib in (79.1, 94.0):
        share = sampler_share(PAPER, card(gib))
        copies = 2 * QWEN_3B.parameters  # autocast's copies, when the trainer scores after a sync
        assert 0.25 < share < 0.5 and state + copies + share * gib * GIB < 0.95 * gib * GIB
    assert sampler_share(PAPER, card(140.0)) == sampler_share(PAPER, machine(24.0)) == 0.5

    monkeypatch.setenv("WORLD_SIZE", "2")
    gathered = 4 * QWEN_3B.root_parameters  # by FSDP, of policy and reference
    expected = 1 - (memory.MARGIN * state / 2 + gathered) / (40 * GIB) - memory.CONTEXT
    assert sampler_share(PAPER, card(40.0)) == pytest.approx(expected)


def test_only_a_run_that_clearly_does_not_fit_is_refused(is_3b):
    required = required_bytes(LAPTOP, QWEN_3B, machine(1)) / GIB
    check_memory(LAPTOP, machine(0.9 * required))
    with pytest.raises(Misuse, match="out of memory.*--gradient-checkpointing, --lora-rank 16"):
        check_memory(LAPTOP, machine(0.7 * required))
    check_memory(PAPER, card(79))
    with pytest.raises(Misuse, match="--gradient-checkpointing"):
        check_memory(replace(PAPER, gradient_checkpointing=False), card(79))


def test_the_advised_options_need_less_memory_and_extra_models_need_more(monkeypatch):
    plain = replace(
        PAPER, max_trajectory_tokens=1536, gradient_checkpointing=False, kl_loss_coef=0.0
    )
    for device in (card(79), machine(79)):
        peak = required_bytes(plain, QWEN_3B, device)
        for option, value, is_more in (
            ("max_tokens_per_micro_batch", 1536, False),
            ("gradient_checkpointing", True, False),
            ("lora_rank", 16, False),
            ("algorithm", "ppo", True),
            ("kl_coef", 0.1, True),
        ):
            changed = required_bytes(replace(plain, **{option: value}), QWEN_3B, device)
            assert (changed > peak) == is_more and changed != peak, (option, device)
    awake = required_bytes(replace(plain, engine="transformers"), QWEN_3B, card(79))
    extra = awake - required_bytes(plain, QWEN_3B, card(79))
    assert extra == pytest.approx(2 * QWEN_3B.parameters, rel=0.01), "a sampler that never sleeps"
    peak, state = required_bytes(LAPTOP, SMOL, machine(16)), sum(state_of(PAPER, QWEN_3B).values())
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert sum(state_of(PAPER, QWEN_3B).values()) == state / 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert required_bytes(LAPTOP, SMOL, machine(16)) > 2 * peak


def test_an_unknown_architecture_is_accepted(monkeypatch):
    monkeypatch.setattr(memory, "model_config", lambda name: {"n_embd": 768, "n_layer": 12})
    check_memory(Config(model="gpt2"), machine(0.001))
    assert shape_of("moe", model_config("tiny") | {"num_experts": 8}) is None


def test_the_samplers_cache_on_a_cpu():
    token = 4 * 30 * 3 * 64
    assert cpu_cache_bytes(SMOL, 1536, 64, "bfloat16") == 64 * 1536 * token // 4
    assert cpu_cache_bytes(SMOL, 1536, 64, "float32") == 64 * 1536 * token // 2
    assert cpu_cache_bytes(SMOL, 100_000, 1, "bfloat16") > 100_000 * token  # a sequence always fits
    assert cpu_cache_bytes(TINY, 3072, 64, "bfloat16") == memory.SMALL_CACHE
    assert cpu_cache_bytes(None, 1536, 64, "bfloat16") == memory.MAX_CPU_CACHE


# ----------------------------------------------------------- tensors kept for the backward pass


def test_a_cpu_recomputes_only_for_models_that_are_not_small():
    assert choose_keep(False, False, 3_000_000) == "all"
    assert choose_keep(False, False, 135_000_000) == "products"
    assert choose_keep(False, True, 135_000_000) == "all"


def gradients(keep, share_prefix=False, bf16=False):
    torch.manual_seed(0)
    model = random_policy(TINY)
    keep_for_backward(model, keep)
    batch = random_batch(TINY, 96)
    if share_prefix:  # one group with one opening
        batch.group_ids[:] = 0
        batch.input_ids[1, :60] = batch.input_ids[0, :60]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    learner = Learner(make_accelerator("bf16" if bf16 else "no"), model, optimizer)
    result = {}
    optimizer.register_step_pre_hook(
        lambda *_: result.update({n: p.grad.clone() for n, p in model.named_parameters()})
    )
    update_policy(learner, batch, Objective(mini_batch_size=2, share_prefix=share_prefix))
    return result


@pytest.mark.parametrize("share_prefix", [False, True])
@pytest.mark.parametrize("bf16", [False, True])
def test_gradients_are_bitwise_equal_for_every_choice_of_kept_tensors(share_prefix, bf16):
    expected = gradients("all", share_prefix, bf16)
    assert any(g.abs().sum() > 0 for g in expected.values())
    for keep in ("products", "inputs"):
        actual = gradients(keep, share_prefix, bf16)
        assert all(torch.equal(expected[name], actual[name]) for name in expected)
