"""scale/memory.py: a run that cannot fit is refused before anything is loaded."""

from dataclasses import replace

import pytest
import torch

import models
from benchmarks.gpu import random_batch, random_policy
from config import Config, Misuse, Objective, with_preset
from dpo import DpoConfig
from scale import memory
from scale.default_models import model_config
from scale.distributed import make_accelerator
from scale.memory import (
    GIB,
    Room,
    Shape,
    check_room,
    cpu_cache_bytes,
    cpu_room,
    keep_for_backward,
    needed,
    sampler_share,
    shape_of,
)
from sft import SftConfig
from update import Learner, update_policy

LAPTOP, PAPER = with_preset("laptop"), with_preset("paper")
QWEN_3B = Shape("3B", 151936, 2048, 11008, 36, 16, 2)
TINY = Shape("tiny", 1024, 256, 704, 4, 4, 2)


@pytest.fixture(autouse=True)
def one_process_without_tcmalloc(monkeypatch):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "LD_PRELOAD"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def is_3b(monkeypatch):
    """Every model has the shape of Qwen2.5-3B."""
    monkeypatch.setattr(memory, "shape_of", lambda *_: QWEN_3B)
    monkeypatch.setattr(memory, "model_config", lambda name: {})


def machine(gib, free=None, is_gpu=False):
    what = "the GPU" if is_gpu else "this machine"
    return Room(gib * GIB, (gib if free is None else free) * GIB, what, is_gpu)


def bytes_of(config, is_gpu=False, shape=None):
    return needed(config, shape or shape_of("", model_config(config.model)), is_gpu)


def test_the_laptops_run_needs_what_it_was_measured_to_take(monkeypatch):
    need = bytes_of(replace(LAPTOP, max_tokens_per_micro_batch=1024))
    assert need.state == pytest.approx(16 * 134.5e6, rel=0.01)
    assert 7.5e9 < need.peak < 10e9  # 9.1 GB measured
    monkeypatch.setenv("LD_PRELOAD", "/usr/lib/x86_64-linux-gnu/libtcmalloc_minimal.so.4 ")
    assert 7.2e9 < bytes_of(LAPTOP).peak < 8.6e9  # 7.2 and 7.8 GB in recipes/results/worlds


def test_the_sampler_gets_the_part_of_a_card_that_the_trainer_leaves(is_3b, monkeypatch):
    """The weights, moments and reference of 3B are 46 GiB: half of an 80 GB card is not free."""
    held = bytes_of(PAPER, True, QWEN_3B).held
    assert held == pytest.approx(16 * QWEN_3B.parameters)  # 20 bytes each, less the gradients' 4
    for gib in (79.1, 94.0):
        share = sampler_share(PAPER, machine(gib, is_gpu=True))
        copies = 2 * QWEN_3B.parameters  # autocast's, as the trainer scores after a sync
        assert 0.25 < share < 0.5 and held + copies + share * gib * GIB < 0.95 * gib * GIB
    assert sampler_share(PAPER, machine(140.0, is_gpu=True)) == 0.5
    assert sampler_share(PAPER, machine(24.0)) == 0.5  # a CPU
    adapters = replace(PAPER, lora_rank=16)  # autocast keeps no copies of frozen weights
    assert sampler_share(adapters, machine(24.0, is_gpu=True)) > 0.4
    monkeypatch.setenv("WORLD_SIZE", "2")
    gathered = 4 * QWEN_3B.root_parameters  # FSDP's, of policy and reference
    expected = 1 - (memory.MARGIN * held / 2 + gathered) / (40 * GIB) - memory.CONTEXT
    assert sampler_share(PAPER, machine(40.0, is_gpu=True)) == pytest.approx(expected)


def test_a_sampler_that_never_sleeps_and_pairs_that_stay_together_are_counted():
    plain = bytes_of(replace(PAPER, engine="transformers"), True, QWEN_3B)
    vllm = bytes_of(replace(PAPER, engine="vllm"), True, QWEN_3B)
    assert plain.peak - vllm.peak == pytest.approx(2 * QWEN_3B.parameters)
    pair = replace(DpoConfig(), max_trajectory_tokens=4096, max_tokens_per_micro_batch=1024)
    two_rows = replace(SftConfig(), max_trajectory_tokens=4096, max_tokens_per_micro_batch=8192)
    assert bytes_of(pair, True, QWEN_3B).peak == bytes_of(two_rows, True, QWEN_3B).peak


def test_what_fits_is_silent_what_may_not_is_a_warning_what_cannot_is_refused():
    peak = bytes_of(LAPTOP).peak / GIB
    assert check_room(LAPTOP, machine(2 * peak)) is None
    for near in (machine(2 * peak, free=0.9 * peak), machine(0.9 * peak)):
        assert "memory may not suffice" in check_room(LAPTOP, near)
    with pytest.raises(Misuse, match="out of memory.*--gradient-checkpointing"):
        check_room(LAPTOP, machine(0.7 * peak))


def test_the_papers_run_fits_a_large_card_only_with_recomputation(is_3b):
    assert check_room(PAPER, machine(79, is_gpu=True)) is None
    with pytest.raises(Misuse, match="--gradient-checkpointing"):
        check_room(replace(PAPER, gradient_checkpointing=False), machine(79, is_gpu=True))


@pytest.mark.parametrize("is_gpu", [False, True])
@pytest.mark.parametrize(
    ("option", "value"),
    [("max_tokens_per_micro_batch", 1536), ("gradient_checkpointing", True), ("lora_rank", 16)],
)
def test_what_is_advised_takes_less(option, value, is_gpu):
    c = replace(PAPER, max_trajectory_tokens=1536, gradient_checkpointing=False)
    smaller = replace(c, **{option: value})
    assert bytes_of(smaller, is_gpu, QWEN_3B).peak < bytes_of(c, is_gpu, QWEN_3B).peak


def test_a_critic_and_a_reference_are_counted():
    plain, ppo, kl = (
        bytes_of(replace(LAPTOP, **changes)).state
        for changes in ({}, {"algorithm": "ppo"}, {"kl_coef": 0.1})
    )
    assert ppo == 2 * plain
    assert kl == pytest.approx(plain * 20 / 16)


def test_cards_share_the_state_and_processes_of_a_machine_add_up(monkeypatch):
    card, here = bytes_of(PAPER, True, QWEN_3B), bytes_of(LAPTOP)
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert bytes_of(PAPER, True, QWEN_3B).state == card.state / 8
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert bytes_of(LAPTOP).state == here.state
    assert bytes_of(LAPTOP).peak > 2 * here.peak


def test_the_slice_of_logits_that_is_counted_is_the_one_that_is_taken():
    assert models.HEAD_BYTES == {"cpu": memory.CPU_HEAD_BYTES}


def test_an_unknown_architecture_passes(monkeypatch):
    monkeypatch.setattr(memory, "model_config", lambda name: {"n_embd": 768, "n_layer": 12})
    assert check_room(Config(model="gpt2"), machine(0.001)) is None
    assert shape_of("moe", model_config("tiny") | {"num_experts": 8}) is None


def test_the_memory_is_the_machines_or_its_containers_if_that_is_less(tmp_path):
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    meminfo = tmp_path / "proc/meminfo"
    meminfo.parent.mkdir()
    meminfo.write_text("MemTotal: 8000000 kB\nMemFree: 1 kB\nMemAvailable: 6000000 kB\n")
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("1000000000\n")
    assert cpu_room(tmp_path) == Room(8_192_000_000, 6_144_000_000, "this machine", False)
    (group / "memory.max").write_text("4000000000\n")
    assert cpu_room(tmp_path) == Room(4_000_000_000, 3_000_000_000, "this container", False)
    meminfo.unlink()
    assert cpu_room(tmp_path) is None


@pytest.mark.parametrize(("dtype", "factor"), [("bfloat16", 1), ("float32", 2)])
def test_the_samplers_cache_on_a_cpu(dtype, factor):
    shape = shape_of("smollm2-135m", model_config("smollm2-135m"))
    token = 4 * 30 * 3 * 64 * factor
    assert cpu_cache_bytes(shape, 1536, 64, dtype) == 64 * 1536 * token // 4
    assert cpu_cache_bytes(shape, 100_000, 1, dtype) > 100_000 * token  # one always fits
    assert cpu_cache_bytes(TINY, 3072, 64, dtype) == memory.SMALL_CACHE
    assert cpu_cache_bytes(None, 1536, 64, dtype) == memory.CPU_CACHE_AT_MOST


# ------------------------------------------------------------------------- what a layer keeps


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
    kept = {}
    optimizer.register_step_pre_hook(
        lambda *_: kept.update({n: p.grad.clone() for n, p in model.named_parameters()})
    )
    update_policy(learner, batch, Objective(mini_batch_size=2, share_prefix=share_prefix))
    return kept


@pytest.mark.parametrize("share_prefix", [False, True])
@pytest.mark.parametrize("bf16", [False, True])
def test_gradients_are_the_same_to_the_bit_whatever_is_kept(share_prefix, bf16):
    expected = gradients("all", share_prefix, bf16)
    assert any(g.abs().sum() > 0 for g in expected.values())
    for keep in ("products", "inputs"):
        actual = gradients(keep, share_prefix, bf16)
        assert all(torch.equal(expected[name], actual[name]) for name in expected)
