"""sampling/vllm_engine.py asleep and awake, over a fake vLLM on a fake GPU."""

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
    """vLLM's LLM as far as VLLMEngine knows it: keeps the order of calls, answers [7, 8]."""

    calls: list = []
    fails: tuple = ()  # the call that raises
    free = 0  # bytes of the card
    GIVEN_BACK = 50  # by sleep

    def __init__(self, **options):
        assert options["enable_sleep_mode"]
        self.llm_engine = self
        self.engine_core = SimpleNamespace(shutdown=lambda: None)
        cache = SimpleNamespace(kv_cache_max_concurrency=80.9)
        self.vllm_config = SimpleNamespace(cache_config=cache)
        self.submitted = []

    def _note(self, *call):
        self.calls.append(call)
        if call == self.fails:
            raise AssertionError("out of memory")

    def add_request(self, request_id, prompt, params):
        self.submitted.append((request_id, params))

    def step(self):
        done, self.submitted = self.submitted, []
        flat = SimpleNamespace(token_ids=[7, 8], logprobs=[-0.5, -0.25])
        output = SimpleNamespace(token_ids=[7, 8], logprobs=flat, finish_reason="stop")
        return [SimpleNamespace(request_id=n, finished=True, outputs=[output]) for n, _ in done]

    def sleep(self, level):
        self._note("sleep", level)
        FakeLLM.free += FakeLLM.GIVEN_BACK

    def wake_up(self, tags):
        self._note("wake_up", *tags)

    def collective_rpc(self, method, kwargs):
        for name, _ in kwargs["weights_iterator"]:
            self._note(method, name)

    def reset_prefix_cache(self):
        self._note("reset_prefix_cache")


@pytest.fixture
def engine(monkeypatch):
    """A VLLMEngine over FakeLLM that believes in a GPU."""
    fake = types.ModuleType("vllm")
    fake.LLM, fake.SamplingParams = FakeLLM, SimpleNamespace
    settings = types.ModuleType("vllm.sampling_params")
    settings.RequestOutputKind = SimpleNamespace(FINAL_ONLY="final only")
    monkeypatch.setitem(sys.modules, "vllm", fake)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", settings)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (FakeLLM.free, 100))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: FakeLLM.calls.append(("empty_cache",)))
    monkeypatch.setattr(clock, "asleep_bytes", 0)
    for name, value in {"free": 30, "calls": [], "fails": ()}.items():
        monkeypatch.setattr(FakeLLM, name, value)
    return VLLMEngine("nowhere", 512)


def test_a_sleeping_sampler_takes_its_cache_back_only_when_new_weights_are_in(engine):
    """Weights, cache and the tensors being gathered would not fit side by side, nor what torch has
    cached: vLLM's allocator cannot use it."""
    engine.sleep()
    engine.sleep()  # nothing more to free

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
    engine.load_weights(iter(WEIGHTS))  # awake: nothing to wake
    assert FakeLLM.calls.count(("wake_up", "weights")) == 1


def test_a_peak_leaves_out_what_a_sleeping_sampler_has_given_back(engine, monkeypatch):
    """torch still counts it as allocated: an update was said to take 146 GB of a card of 150."""
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 90)
    peaks = [clock.peak()]
    for change in (engine.sleep, lambda: engine.load_weights(WEIGHTS), engine.sleep, engine.close):
        change()
        peaks.append(clock.peak())
    asleep = 90 - FakeLLM.GIVEN_BACK
    assert peaks == [90, asleep, 90, asleep, 90]


def test_nothing_is_sampled_between_sleep_and_all_of_the_new_weights(engine, monkeypatch):
    """vLLM would answer noise, without an error."""
    engine.sleep()
    for fails in (("wake_up", "weights"), ("reload_weights", "b"), ("wake_up", "kv_cache")):
        monkeypatch.setattr(FakeLLM, "fails", fails)
        with pytest.raises(EngineError, match="out of memory"):
            engine.load_weights(iter(WEIGHTS))
        with pytest.raises(EngineError, match="vLLM has no weights"):
            engine.submit("a", [1, 2], SETTINGS)
    monkeypatch.setattr(FakeLLM, "fails", ())
    engine.load_weights(iter(WEIGHTS))
    expected = {"a": Generation("a", [7, 8], [-0.5, -0.25], "stop")}
    assert run(engine, a=([1, 2], SETTINGS)) == expected


def test_as_many_trajectories_may_be_open_as_the_cache_holds_and_no_fewer_than_run(engine):
    assert engine.max_open == 80  # of FakeLLM's cache: 80.9 of the longest
    assert VLLMEngine("nowhere", 512, max_num_seqs=128).max_open == 128
