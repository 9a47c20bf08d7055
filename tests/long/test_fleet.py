"""sampling/fleet.py with one real vLLM server of the tiny model."""

import json
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from test_distributed import launch
from test_engines import checkpoint, finish, lm, prompt_of, run, trainer_log_probs, with_noise
from toy_env import flags, options, read_metrics

from engines import EngineError, SamplingSettings
from sampling.fleet import FleetEngine, Served, start_servers

__all__ = ["checkpoint", "lm"]  # fixtures
pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]


def test_a_real_server_samples_what_the_trainer_scores_before_and_after_new_weights(
    checkpoint, lm, tmp_path
):
    """Trap 20, over HTTP: read from a folder without the tied head, vLLM keeps the old one."""
    with ExitStack() as stack:
        devices = [0] if torch.cuda.is_available() else ["cpu"]
        served = Served(checkpoint, 512, "float32")
        urls = stack.enter_context(start_servers(served, devices))
        engine = FleetEngine(urls, tmp_path / "weights", served)
        stack.callback(engine.close)

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

        # The embedding alone: with a stale head everything is off, with other stale weights little.
        assert lm.config.tie_word_embeddings
        embedding_changed = type(lm)(lm.config)
        embedding_changed.load_state_dict(lm.state_dict())
        with torch.no_grad():
            weight = embedding_changed.get_input_embeddings().weight
            noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(6))
            weight.add_(noise, alpha=0.04)
        all_changed = type(lm)(lm.config)
        all_changed.load_state_dict(lm.state_dict())
        for changed in (embedding_changed.eval(), with_noise(all_changed.eval(), seed=7), lm):
            assert "lm_head.weight" in changed.state_dict()
            engine.load_weights(changed.state_dict().items())
            assert_trainer_agrees(changed)

        # Ends at a stop token, which is kept; an aborted request leaves nothing behind.
        greedy = run(engine, a=(prompt_of(8), SamplingSettings(8, 0.0)))["a"].token_ids
        stop = greedy[3]
        sampling = SamplingSettings(8, 0.0, stop_token_ids=(stop,))
        done = run(engine, a=(prompt_of(8), sampling))["a"]
        assert done.token_ids == greedy[: greedy.index(stop) + 1] and done.finish_reason == "stop"
        engine.submit("long", prompt_of(8), SamplingSettings(480))
        engine.poll()
        engine.abort()
        engine.load_weights(lm.state_dict().items())
        assert_trainer_agrees(lm)
        engine.submit("too long", prompt_of(600), SamplingSettings(4))
        with pytest.raises(EngineError, match=r"HTTP 400.*512"):
            finish(engine)


def test_two_trainer_processes_share_a_server_that_gets_each_steps_weights(tmp_path):
    settings = options(
        tmp_path,
        "http://127.0.0.1:9",
        env="textcraft",
        engine="vllm",
        engine_devices=("cpu",),
        algorithm="reinforce_plus_plus",
        entropy_coef=0.01,
        learning_rate=1e-3,
        steps=2,
        max_tokens_per_turn=8,
        max_trajectory_tokens=1000,
    )
    del settings["env_addr"]
    ids = tmp_path / "ids.json"
    ids.write_text(json.dumps([{"item_id": "textcraft_31"}, {"item_id": "textcraft_32"}]))
    code, stdout, stderr = launch("train.py", *flags(**settings), timeout=500)
    assert code == 0, stdout + stderr
    lines = read_metrics(settings["run_dir"])
    assert [line["policy/optimizer_steps"] for line in lines] == [1, 1]
    for line in lines:
        assert line["sampler/log_prob_diff_mean"] < 0.05
        assert line["sync/log_prob_diff_mean"] < 0.05
    assert not any((Path(settings["run_dir"]) / "weights").glob("*"))
