"""sampling/fleet.py with one real vLLM server of the tiny model."""

from contextlib import closing

import pytest
import torch
from test_engines import changed, checkpoint, finish, lm, prompt_of, run, trainer_log_probs

from batching import Batch
from engines import EngineError, SamplingSettings
from models import load_tokenizer
from sampling.fleet import FleetEngine, ServerOptions, TeacherServer, start_servers

from .test_distributed import run_with_vllm

__all__ = ["checkpoint", "lm"]  # fixtures
pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def fleet(checkpoint):
    """One running server: its options and its address."""
    options = ServerOptions(checkpoint, 1001, "float32")
    with start_servers(options, [0] if torch.cuda.is_available() else ["cpu"]) as urls:
        yield options, urls


def test_log_probs_of_a_real_server_equal_the_trainers_before_and_after_new_weights(
    fleet, lm, tmp_path
):
    """Trap 20, over HTTP: if the folder lacks the tied head, vLLM keeps the old one."""
    options, urls = fleet
    with closing(FleetEngine(urls, tmp_path / "weights", options)) as engine:

        def assert_trainer_agrees(lm):
            prompts = {f"r{n}": prompt_of(n, seed=n) for n in (5, 17, 300)}
            sampling = SamplingSettings(24, temperature=0.7)
            generations = run(engine, **{name: (ids, sampling) for name, ids in prompts.items()})
            for name, ids in prompts.items():
                actual = torch.tensor(generations[name].log_probs)
                expected = trainer_log_probs(lm, ids, generations[name].token_ids, 0.7)
                assert actual.shape == expected.shape
                assert (actual - expected).abs().max() < 1e-4

        assert_trainer_agrees(lm)
        assert_trainer_agrees(lm)  # now the prompts' keys and values are cached

        for new_lm in (*changed(lm), lm):
            engine.load_weights(new_lm.state_dict().items())
            assert_trainer_agrees(new_lm)

        # A teacher's scores of given tokens, at temperature 1
        teacher = TeacherServer(urls[0], load_tokenizer(options.model_path), max_tokens=40)
        ids = torch.tensor([prompt_of(40, seed=1), prompt_of(40, seed=2)])
        zeros, lengths = torch.zeros(ids.shape), torch.tensor([40, 31])
        scores = teacher.score(Batch(ids, zeros, zeros, zeros, lengths, lengths))
        for row, length in enumerate(lengths.tolist()):
            first, *rest = ids[row, :length].tolist()
            expected = trainer_log_probs(lm, [first], rest, 1.0)
            assert (scores[row, 1:length] - expected).abs().max() < 1e-4

        # Sampling ends at a stop token, and an aborted request has no after-effects.
        greedy = run(engine, a=(prompt_of(8), SamplingSettings(8, 0.0)))["a"].token_ids
        sampling = SamplingSettings(8, 0.0, stop_token_ids=(greedy[3],))
        generation = run(engine, a=(prompt_of(8), sampling))["a"]
        assert generation.token_ids == greedy[: greedy.index(greedy[3]) + 1]
        assert generation.finish_reason == "stop"
        engine.submit("long", prompt_of(8), SamplingSettings(480))
        engine.poll()
        engine.abort()
        engine.load_weights(lm.state_dict().items())
        assert_trainer_agrees(lm)
        engine.submit("too long", prompt_of(1100), SamplingSettings(4))
        with pytest.raises(EngineError, match=r"HTTP 400.*1001"):
            finish(engine)


def test_two_trainer_processes_share_a_server_that_gets_each_steps_weights(fleet, tmp_path):
    _, urls = fleet
    run_dir, _ = run_with_vllm(tmp_path, engine_url=urls)
    assert not (run_dir / "weights").exists()
