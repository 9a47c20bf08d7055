"""sampling/fleet.py with one real vLLM server of the tiny model."""

from contextlib import closing

import pytest
import torch
from test_engines import changed, checkpoint, finish, lm, prompt_of, run, trainer_log_probs

from engines import EngineError, SamplingSettings
from sampling.fleet import FleetEngine, Served, start_servers

from .test_distributed import run_with_vllm

__all__ = ["checkpoint", "lm"]  # fixtures
pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def served(checkpoint):
    """What the server runs, and its address."""
    served = Served(checkpoint, 1001, "float32")
    with start_servers(served, [0] if torch.cuda.is_available() else ["cpu"]) as urls:
        yield served, urls


def test_a_real_server_samples_what_the_trainer_scores_before_and_after_new_weights(
    served, lm, tmp_path
):
    """Trap 20, over HTTP: read from a folder without the tied head, vLLM keeps the old one."""
    with closing(FleetEngine(served[1], tmp_path / "weights", served[0])) as engine:

        def assert_trainer_agrees(lm):
            prompts = {f"r{n}": prompt_of(n, seed=n) for n in (5, 17, 300)}
            sampling = SamplingSettings(24, temperature=0.7)
            done = run(engine, **{name: (ids, sampling) for name, ids in prompts.items()})
            for name, ids in prompts.items():
                actual = torch.tensor(done[name].log_probs)
                expected = trainer_log_probs(lm, ids, done[name].token_ids, 0.7)
                assert actual.shape == expected.shape
                assert (actual - expected).abs().max() < 1e-4

        assert_trainer_agrees(lm)
        assert_trainer_agrees(lm)  # now the prompts' keys and values are cached

        for new in (*changed(lm), lm):
            engine.load_weights(new.state_dict().items())
            assert_trainer_agrees(new)

        # Ends at a stop token; an aborted request leaves nothing behind.
        greedy = run(engine, a=(prompt_of(8), SamplingSettings(8, 0.0)))["a"].token_ids
        sampling = SamplingSettings(8, 0.0, stop_token_ids=(greedy[3],))
        done = run(engine, a=(prompt_of(8), sampling))["a"]
        assert done.token_ids == greedy[: greedy.index(greedy[3]) + 1]
        assert done.finish_reason == "stop"
        engine.submit("long", prompt_of(8), SamplingSettings(480))
        engine.poll()
        engine.abort()
        engine.load_weights(lm.state_dict().items())
        assert_trainer_agrees(lm)
        engine.submit("too long", prompt_of(1100), SamplingSettings(4))
        with pytest.raises(EngineError, match=r"HTTP 400.*1001"):
            finish(engine)


def test_two_trainer_processes_share_a_server_that_gets_each_steps_weights(served, tmp_path):
    run_dir, _ = run_with_vllm(tmp_path, engine_url=served[1])
    assert not (run_dir / "weights").exists()
