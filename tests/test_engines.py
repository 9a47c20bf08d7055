"""engines.py: a sampler reports the log-probs that the trainer computes."""

import copy
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from engines import EngineError, SamplingSettings, TransformersEngine, sample
from models import PolicyModel, load_causal_lm, load_tokenizer
from scale.default_models import resolve_model


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """The tiny model with noise added, because without it all tokens are about equally likely."""
    tiny = resolve_model("tiny")
    lm = with_noise(load_causal_lm(tiny), seed=1)
    folder = tmp_path_factory.mktemp("checkpoint")
    lm.save_pretrained(folder)
    load_tokenizer(tiny).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def lm(checkpoint):
    """The trainer's copy of the weights, float32."""
    return load_causal_lm(checkpoint).eval()


def with_noise(lm, seed):
    """The same model after a random change of every matrix, also of its tied head."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in lm.parameters():
            if p.ndim == 2:
                p.add_(torch.randn(p.shape, generator=generator), alpha=0.04)
    return lm


def changed(lm):
    """Two models with other weights. The first only has another embedding and thereby another tied
    head (trap 20). A stale head changes all predictions, other stale weights only a little."""
    embedding, all_weights = copy.deepcopy(lm), with_noise(copy.deepcopy(lm), seed=7)
    weight = embedding.get_input_embeddings().weight
    with torch.no_grad():
        generator = torch.Generator().manual_seed(6)
        weight.add_(torch.randn(weight.shape, generator=generator), alpha=0.04)
    assert lm.config.tie_word_embeddings and "lm_head.weight" in embedding.state_dict()
    return embedding, all_weights


def prompt_of(length, seed=0):
    """Ids without the model's three special tokens."""
    return torch.randint(3, 1024, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def trainer_log_probs(lm, prompt_ids, token_ids, temperature):
    """Log-probs of the same tokens, as the update computes them."""
    input_ids = torch.tensor([prompt_ids + token_ids])
    mask = torch.tensor([[0] * len(prompt_ids) + [1] * len(token_ids)])
    return PolicyModel(lm)(input_ids, mask, temperature)[0][0, len(prompt_ids) :]


def run(engine, **requests):
    """{name: Generation} of {name: (prompt_ids, SamplingSettings)}, all submitted at once."""
    for name, (prompt_ids, sampling) in requests.items():
        engine.submit(name, prompt_ids, sampling)
    assert engine.num_running == len(requests)
    return finish(engine)


def finish(engine):
    """Poll until all requests are finished: {name: Generation}."""
    results = {}
    while engine.num_running:
        results |= {generation.request_id: generation for generation in engine.poll()}
    return results


# ----------------------------------------------------------------------------------- sample


def test_tokens_are_sampled_from_the_softmax_at_the_temperature():
    logits = torch.tensor([1.0, 0.0, -1.0, 2.0])
    generator = torch.Generator().manual_seed(0)
    for temperature in (0.5, 1.0, 2.0):
        expected = (logits / temperature).softmax(-1)
        samples = [sample(logits, temperature, generator) for _ in range(4000)]
        counts = torch.bincount(torch.tensor([token for token, _ in samples]), minlength=4)
        torch.testing.assert_close(counts / 4000, expected, atol=0.03, rtol=0)
        for token, log_prob in samples[:50]:
            assert log_prob == pytest.approx(float(expected[token].log()), abs=1e-5)
    assert sample(logits, 0.0, generator) == (3, 0.0)  # the most probable one


# ------------------------------------------------------------------------------ transformers


@pytest.fixture
def plain(checkpoint):
    return TransformersEngine(checkpoint)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_equal_those_of_a_forward_pass_also_in_a_padded_batch(plain, lm, temperature):
    prompts = {f"r{n}": prompt_of(n, seed=n) for n in (5, 17, 40)}
    sampling = SamplingSettings(12, temperature, seed=3)
    results = run(plain, **{name: (ids, sampling) for name, ids in prompts.items()})
    for name, ids in prompts.items():
        expected = trainer_log_probs(lm, ids, results[name].token_ids, temperature)
        actual = torch.tensor(results[name].log_probs)
        torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
        assert len(results[name].token_ids) == 12 and results[name].finish_reason == "length"


def test_generation_ends_at_a_stop_token_or_at_the_limit(plain):
    prompt = prompt_of(8)
    greedy = run(plain, a=(prompt, SamplingSettings(8, 0.0)))["a"].token_ids
    stop = greedy[3]
    first = greedy.index(stop)
    request = (prompt_of(20, seed=1), SamplingSettings(8, 0.0))
    results = run(plain, a=(prompt, SamplingSettings(8, 0.0, stop_token_ids=(stop,))), b=request)
    assert results["a"].token_ids == greedy[: first + 1] and results["a"].finish_reason == "stop"
    assert len(results["a"].log_probs) == first + 1
    assert len(results["b"].token_ids) == 8 and results["b"].finish_reason == "length"
    results = run(plain, a=(prompt, SamplingSettings(first + 1, 0.0, stop_token_ids=(stop,))))
    assert results["a"].finish_reason == "stop", "the stop token came exactly at the limit"


def test_deterministic_sampling_depends_only_on_the_request(checkpoint):
    engine = TransformersEngine(checkpoint, deterministic=True)
    requests = {
        f"r{n}": (prompt_of(n, seed=n), SamplingSettings(10, 1.0, seed=n)) for n in (4, 11, 25)
    }
    together = run(engine, **requests)
    backwards = run(engine, **dict(reversed(requests.items())))
    assert together == backwards
    for name, request in requests.items():
        assert run(engine, **{name: request})[name] == together[name]
    prompt = requests["r4"][0]
    other_seed = run(engine, r4=(prompt, SamplingSettings(10, 1.0, seed=5)))["r4"]
    assert other_seed.token_ids != together["r4"].token_ids


def test_requests_beyond_the_batch_wait_for_the_next_poll(checkpoint):
    engine = TransformersEngine(checkpoint, max_batch=2)
    for name in "abc":
        engine.submit(name, prompt_of(4), SamplingSettings(2, 0.0))
    assert [g.request_id for g in engine.poll()] == ["a", "b"] and engine.num_running == 1
    engine.submit("d", prompt_of(4), SamplingSettings(2, 0.0))
    assert [g.request_id for g in engine.poll()] == ["c", "d"]
    assert engine.poll() == []
    engine.submit("e", prompt_of(4), SamplingSettings(2, 0.0))
    engine.abort()
    assert engine.num_running == 0 and engine.poll() == []


def test_missing_and_unknown_weights_are_an_error(plain, lm):
    """Trap 20: otherwise a weight could stay stale without notice."""
    weights = lm.state_dict()
    name = "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(EngineError, match=f"has stale weights: 1 not sent, first: {name}"):
        plain.load_weights((n, p) for n, p in weights.items() if n != name)
    with pytest.raises(EngineError, match="weight model.extra is not part"):
        plain.load_weights([*weights.items(), ("model.extra", torch.zeros(1))])


def test_a_failure_of_the_model_is_an_engine_error_unless_memory_runs_out(plain):
    memory = torch.OutOfMemoryError("CUDA out of memory")
    for error, raised in ((RuntimeError("shapes differ"), EngineError), (memory, type(memory))):
        plain.lm = Mock(side_effect=error)
        plain.submit("a", [1, 2], SamplingSettings(max_tokens=2))
        with pytest.raises(raised):
            plain.poll()
        plain.abort()
    # An argmax over NaN would return id 0.
    plain.lm = lambda **_: SimpleNamespace(past_key_values=None, logits=logits)
    for temperature in (1.0, 0.0):
        sampling = SamplingSettings(max_tokens=1, temperature=temperature)
        logits = torch.full((1, 1, 8), float("nan"))
        plain.submit("a", [1, 2], sampling)
        with pytest.raises(EngineError, match="not finite"):
            plain.poll()
        plain.abort()
        logits = torch.tensor([[[0.0, float("-inf"), 1.0]]])  # id 1 is never sampled
        plain.submit("b", [1, 2], sampling)
        assert plain.poll()[0].token_ids[0] in (0, 2)
