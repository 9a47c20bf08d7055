"""The number format: measured once, remembered, overruled by who knows better."""

import json

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
def test_auto_takes_what_was_faster_and_measures_once(cache, monkeypatch, faster, slower):
    calls = []

    def timed():
        calls.append(1)
        return {faster: 1.0, slower: 1.64}

    monkeypatch.setattr(precision, "time_formats", timed)
    for _ in range(2):
        chosen = precision.choose("auto")
        assert chosen.format == faster
        assert f"1.6 times as fast as {slower}" in chosen.why
    assert len(calls) == 1


@pytest.mark.parametrize("broken", ["", "{", '{"another processor": {"bf16": 1}}'])
def test_a_cache_of_no_use_is_measured_anew(cache, monkeypatch, broken):
    cache.write_text(broken)
    monkeypatch.setattr(precision, "time_formats", lambda: {"bf16": 2.0, "fp32": 1.0})
    assert precision.choose("auto").format == "fp32"
    assert {"bf16": 2.0, "fp32": 1.0} in json.loads(cache.read_text()).values()


def test_a_busy_machine_measures_what_a_quiet_one_does(cache, monkeypatch):
    """Two threads that wait for each other beside other processes made fp32 seem the faster one,
    for good. So one thread, and the time that it had the processor for."""
    clock = {"wall": 0.0, "processor": 0.0, "threads": []}
    forward = torch.nn.Linear.forward

    def held_up(layer, x):
        is_bf16 = torch.is_autocast_enabled("cpu")
        clock["processor"] += 1.0 if is_bf16 else 2.0
        clock["wall"] += 9.0 if is_bf16 else 2.0
        clock["threads"].append(torch.get_num_threads())
        return forward(layer, x)

    monkeypatch.setattr(torch.nn.Linear, "forward", held_up)
    monkeypatch.setattr("time.process_time", lambda: clock["processor"])
    monkeypatch.setattr("time.perf_counter", lambda: clock["wall"])
    monkeypatch.setattr(precision, "REPEATS", 1)
    threads = torch.get_num_threads()
    assert precision.choose("auto").format == "bf16"
    assert set(clock["threads"]) == {1} and torch.get_num_threads() == threads


def test_what_was_asked_for_is_not_measured(cache, monkeypatch):
    monkeypatch.setattr(precision, "time_formats", lambda: pytest.fail("measured"))
    assert precision.choose("bf16").format == "bf16"
    assert precision.choose("fp32").format == "fp32"
    assert precision.choose("auto", deterministic=True).format == "fp32"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for has, chosen in ((True, "bf16"), (False, "fp32")):  # a T4 only emulates it
        monkeypatch.setattr(
            torch.cuda,
            "is_bf16_supported",
            lambda including_emulation=True, has=has: has or including_emulation,
        )
        assert precision.choose("auto").format == chosen
    assert not cache.exists()


def test_both_formats_are_really_timed_and_no_random_number_is_used_up(cache):
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    seconds = precision.time_formats()
    assert torch.equal(torch.rand(4), expected)
    assert set(seconds) == {"bf16", "fp32"} and min(seconds.values()) > 0


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_a_format_decides_what_products_are_computed_in(name, dtype):
    chosen = precision.choose(name)
    assert getattr(torch, chosen.dtype) == dtype
    layer = torch.nn.Linear(4, 4)
    with make_accelerator(chosen.autocast).autocast():
        assert layer(torch.ones(1, 4)).dtype == dtype
    assert layer.weight.dtype == torch.float32  # master weights stay
