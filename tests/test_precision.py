"""scale/precision.py: the number format is measured once and stored; options override it."""

import pytest
import torch

from scale import precision
from scale.distributed import make_accelerator


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("AGENT_RL_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return tmp_path / "precision.json"


@pytest.mark.parametrize(("faster", "slower"), [("bf16", "fp32"), ("fp32", "bf16")])
def test_auto_chooses_the_faster_format_and_measures_once(cache, monkeypatch, faster, slower):
    calls = []

    def time_formats():
        calls.append(1)
        return {faster: 1.0, slower: 1.64}

    monkeypatch.setattr(precision, "time_formats", time_formats)
    cache.write_text("{")  # a damaged file
    for _ in range(2):
        choice = precision.choose("auto")
        assert choice.format == faster
        assert f"1.6 times as fast as {slower}" in choice.reason
    assert len(calls) == 1


def test_formats_are_timed_by_processor_seconds_on_one_thread(cache, monkeypatch):
    """On a busy machine, two threads wait for each other, and fp32 could seem faster."""
    clock = {"wall": 0.0, "processor": 0.0, "threads": set()}
    forward = torch.nn.Linear.forward

    def slow_forward(layer, x):
        is_bf16 = torch.is_autocast_enabled("cpu")
        clock["processor"] += 1.0 if is_bf16 else 2.0
        clock["wall"] += 9.0 if is_bf16 else 2.0
        clock["threads"].add(torch.get_num_threads())
        return forward(layer, x)

    monkeypatch.setattr(torch.nn.Linear, "forward", slow_forward)
    monkeypatch.setattr("time.process_time", lambda: clock["processor"])
    monkeypatch.setattr("time.perf_counter", lambda: clock["wall"])
    monkeypatch.setattr(precision, "REPEATS", 1)
    threads, random = torch.get_num_threads(), torch.get_rng_state()
    assert precision.choose("auto").format == "bf16"
    assert clock["threads"] == {1} and torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), random)


def test_a_given_format_is_not_measured(cache, monkeypatch):
    monkeypatch.setattr(precision, "time_formats", lambda: pytest.fail("measured"))
    assert precision.choose("bf16").format == "bf16"
    assert precision.choose("fp32").format == "fp32"
    assert precision.choose("auto", deterministic=True).format == "fp32"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for is_native, expected in ((True, "bf16"), (False, "fp32")):  # a T4 only emulates bfloat16
        monkeypatch.setattr(
            torch.cuda,
            "is_bf16_supported",
            lambda including_emulation=True, native=is_native: native or including_emulation,
        )
        assert precision.choose("auto").format == expected
    assert not cache.exists()


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_the_format_sets_the_dtype_of_products(name, dtype):
    choice = precision.choose(name)
    assert getattr(torch, choice.dtype) == dtype
    layer = torch.nn.Linear(4, 4)
    with make_accelerator(choice.autocast).autocast():
        assert layer(torch.ones(1, 4)).dtype == dtype
    assert layer.weight.dtype == torch.float32  # master weights do not change
