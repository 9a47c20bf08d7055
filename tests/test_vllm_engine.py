"""sampling/vllm_engine.py: sleep, waking and weights, with a fake vLLM on a fake GPU."""

import sys
import types
from types import SimpleNamespace

import pytest
import torch
from test_engines import run

from engines import EngineError, Generation, SamplingSettings
from run import clock
from sampling.vllm_engine import VLLMEngine

WEIGHTS = [("a", torch.zeros(1)), ("b", torch.zeros(1))]
SETTINGS = SamplingSettings(4, stop_token_ids=(3,))


class FakeLLM:
    """The parts of vLLM's LLM that VLLMEngine uses: logs its calls and always samples [7, 8]."""

    calls: list = []
    failing_call: tuple = ()
    free_bytes = 0  # of the GPU
    FREED_BYTES = 50  # by sleep

    def __init__(self, **options):
        assert options["enable_sleep_mode"]
        self.llm_engine = self
        self.engine_core = SimpleNamespace(shutdown=lambda: None)
        cache = SimpleNamespace(kv_cache_max_concurrency=80.9)
        self.vllm_config = SimpleNamespace(cache_config=cache)
        self.submitted = []

    def _log(self, *call):
        self.calls.append(call)
        if call == self.failing_call:
            raise AssertionError("out of memory")

    def add_request(self, request_id, prompt, params):
        self.submitted.append((request_id, params))

    def step(self):
        requests, self.submitted = self.submitted, []
        log_probs = SimpleNamespace(token_ids=[7, 8], logprobs=[-0.5, -0.25])
        sample = SimpleNamespace(token_ids=[7, 8], logprobs=log_probs, finish_reason="stop")
        return [
            SimpleNamespace(request_id=request_id, finished=True, outputs=[sample])
            for request_id, _ in requests
        ]

    def sleep(self, level):
        self._log("sleep", level)
        FakeLLM.free_bytes += FakeLLM.FREED_BYTES

    def wake_up(self, tags):
        self._log("wake_up", *tags)

    def collective_rpc(self, method, kwargs):
        for name, _ in kwargs["weights_iterator"]:
            self._log(method, name)

    def reset_prefix_cache(self):
        self._log("reset_prefix_cache")


@pytest.fixture
def engine(monkeypatch):
    """A VLLMEngine with FakeLLM on a fake GPU."""
    fake = types.ModuleType("vllm")
    fake.LLM, fake.SamplingParams = FakeLLM, SimpleNamespace
    settings = types.ModuleType("vllm.sampling_params")
    settings.RequestOutputKind = SimpleNamespace(FINAL_ONLY="final only")
    monkeypatch.setitem(sys.modules, "vllm", fake)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", settings)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (FakeLLM.free_bytes, 100))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: FakeLLM.calls.append(("empty_cache",)))
    monkeypatch.setattr(clock, "asleep_bytes", 0)
    for name, value in {"free_bytes": 30, "calls": [], "failing_call": ()}.items():
        monkeypatch.setattr(FakeLLM, name, value)
    return VLLMEngine("nowhere", 512)


def test_a_sleeping_sampler_allocates_its_cache_only_after_new_weights_are_loaded(engine):
    """The weights, the cache and the gathered tensors would not fit at the same time. torch's
    cached memory must be released too, because vLLM's allocator cannot use it."""
    engine.sleep()
    engine.sleep()  # does nothing

    def weights():
        for name, tensor in WEIGHTS:
            FakeLLM.calls.append(("gather", name))
            yield name, tensor

    engine.load_weights(weights())
    assert engine._llm.calls == [
        ("empty_cache",),  # before vLLM starts
        ("empty_cache",),
        ("sleep", 2),
        ("empty_cache",),
        ("wake_up", "weights"),
        *(("gather", "a"), ("reload_weights", "a")),
        *(("gather", "b"), ("reload_weights", "b")),
        ("wake_up", "kv_cache"),
        ("reset_prefix_cache",),
    ]
    engine.load_weights(iter(WEIGHTS))  # already awake
    assert FakeLLM.calls.count(("wake_up", "weights")) == 1


def test_the_peak_does_not_count_memory_that_a_sleeping_sampler_has_freed(engine, monkeypatch):
    """torch still counts it as allocated: an update was reported to use 146 of 150 GB."""
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 90)
    peaks = [clock.peak()]
    for change in (engine.sleep, lambda: engine.load_weights(WEIGHTS), engine.sleep, engine.close):
        change()
        peaks.append(clock.peak())
    peak_asleep = 90 - FakeLLM.FREED_BYTES
    assert peaks == [90, peak_asleep, 90, peak_asleep, 90]


def test_requests_are_refused_from_sleep_until_all_new_weights_are_loaded(engine, monkeypatch):
    """vLLM would sample noise without an error."""
    engine.sleep()
    for call in (("wake_up", "weights"), ("reload_weights", "b"), ("wake_up", "kv_cache")):
        monkeypatch.setattr(FakeLLM, "failing_call", call)
        with pytest.raises(EngineError, match="out of memory"):
            engine.load_weights(iter(WEIGHTS))
        with pytest.raises(EngineError, match="vLLM has no weights"):
            engine.submit("a", [1, 2], SETTINGS)
    monkeypatch.setattr(FakeLLM, "failing_call", ())
    engine.load_weights(iter(WEIGHTS))
    expected = {"a": Generation("a", [7, 8], [-0.5, -0.25], "stop")}
    assert run(engine, a=([1, 2], SETTINGS)) == expected


def test_max_open_is_the_capacity_of_the_cache_but_at_least_max_num_seqs(engine):
    assert engine.max_open == 80  # FakeLLM's cache holds 80.9 full-length trajectories
    assert VLLMEngine("nowhere", 512, max_num_seqs=128).max_open == 128
