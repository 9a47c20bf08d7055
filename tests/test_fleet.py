"""sampling/fleet.py: against scripted servers; a real one is in tests/long/test_fleet.py."""

import contextlib
import math
import time
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from test_chatapi import ScriptedServer, fails
from test_engines import finish, run
from test_processes import module, until

from engines import EngineError, Generation, SamplingSettings
from sampling import fleet
from sampling.fleet import FleetEngine, Served, serve_command, start_servers

__all__ = ["module"]  # a fixture
SERVED = Served("my/model", 512)
SETTINGS = SamplingSettings(max_tokens=4, temperature=0.7, stop_token_ids=(2, 9))


class FakeServer(ScriptedServer):
    """Answers as vLLM 0.32 in development mode; a completion repeats its prompt's last ids.

    `script[path]` holds answers to give instead, each once. Completions wait while `holds`.
    """

    def __init__(self, seed):
        super().__init__()
        self.config = {"seed": seed, "logprobs_mode": "processed_logprobs"}
        self.script, self.is_dead, self.holds = {}, False, False

    def reply(self, path, body):
        path = path.partition("?")[0]
        if path == "/v1/completions":
            time.sleep(0.05)  # so that requests sent together overlap
            while self.holds and not self.is_dead:
                time.sleep(0.005)
        if self.script.get(path):
            return self.script[path].pop(0)
        return None if self.is_dead else (200, {}, self.usual(path, body))

    def usual(self, path, body):
        if path == "/v1/completions":
            return completion(body["prompt"][-body["max_tokens"] :])
        return {
            "/health": "",
            "/server_info": {"vllm_config": {"model_config": self.config}},
            "/collective_rpc": {"results": [None]},
            "/reset_prefix_cache": {"success": True},
        }[path]

    @property
    def asked(self):
        return [path for path, _, _ in self.requests]

    @property
    def prompts(self):
        return [body["prompt"] for path, _, body in self.requests if path == "/v1/completions"]


def completion(ids, reason="length"):
    log_probs = {"token_logprobs": [-(n + 1) / 7 for n in range(len(ids))]}
    choice = {"token_ids": ids, "finish_reason": reason, "logprobs": log_probs, "text": "never"}
    return {"choices": [choice]}


def hold(*servers, holds=True):
    for server in servers:
        server.holds = holds


@pytest.fixture
def servers():
    with FakeServer(0) as first, FakeServer(1) as second:
        yield [first, second]
        hold(first, second, holds=False)


@pytest.fixture
def engine(servers, tmp_path):
    engine = FleetEngine([s.url for s in servers], tmp_path / "weights", SERVED)
    for server in servers:
        server.requests.clear()
    yield engine
    engine.close()


def submit(engine, numbers):
    """A request r0 with the prompt [0], and so on."""
    for n in numbers:
        engine.submit(f"r{n}", [n], SETTINGS)


def weights_of(value=1.0):
    """A state dict with a tied head, as PyTorch gives it: two names, one memory."""
    embedding = torch.full((4, 3), value).bfloat16()
    return {"embed": embedding, "norm": torch.randn(3, 2).T, "lm_head.weight": embedding}


# --- Sampling ------------------------------------------------------------------------------------


def test_ids_and_log_probs_come_back_exactly_as_the_server_gave_them(engine, servers):
    """And a request leaves nothing to the model's generation_config.json."""
    done = run(engine, a=([5, 6, 7, 8, 9], SETTINGS))["a"]
    assert done == Generation("a", [6, 7, 8, 9], [-1 / 7, -2 / 7, -3 / 7, -4 / 7], "length")
    ((_, _, body),) = servers[0].requests
    asked = {"max_tokens": 4, "temperature": 0.7, "stop_token_ids": [2, 9]}
    assert body == asked | fleet.PLAIN | {
        "prompt": [5, 6, 7, 8, 9],
        "logprobs": 0,
        "return_token_ids": True,
    }
    for server in servers:
        server.script["/v1/completions"] = [(200, {}, completion([4, 2], "stop"))]
    done = run(engine, b=([5, 6], SETTINGS))["b"]
    assert done == Generation("b", [4, 2], [-1 / 7, -2 / 7], "stop")  # the stop token is kept


def test_a_request_goes_to_the_least_busy_server_but_a_trajectory_stays_where_it_is_cached(
    engine, servers
):
    hold(*servers)
    submit(engine, range(6))
    until(lambda: [len(s.prompts) for s in servers] == [3, 3])
    hold(servers[1], holds=False)
    while engine.num_running > 3:  # those of the other server come back
        engine.poll()
    (n, *_), *_ = servers[1].prompts
    submit(engine, range(6, 9))
    until(lambda: [len(s.prompts) for s in servers] == [3, 6])
    hold(servers[0], holds=False)
    finish(engine)
    run(engine, **{f"r{n}": ([n, n], SETTINGS)})
    assert [n, n] in servers[1].prompts  # the other server is first and as free


def test_abort_hangs_up_and_an_aborted_name_may_be_used_again(engine, servers):
    hold(*servers)
    submit(engine, range(6))
    until(lambda: len(servers[0].prompts) == len(servers[1].prompts) == 3)
    engine.abort()
    assert engine.num_running == 0 and engine.poll() == []
    until(lambda: not any(server.num_running for server in engine._servers))
    hold(*servers, holds=False)
    assert run(engine, r0=([7], SETTINGS))["r0"].token_ids == [7]
    run(engine, a=([1], SETTINGS), b=([2], SETTINGS))  # and neither server was lost
    assert {len(s.prompts) for s in servers} == {4, 5}


# --- Failures ------------------------------------------------------------------------------------


def test_a_server_that_dies_is_used_again_only_once_it_has_the_weights(engine, servers, capfd):
    """Another one answers its requests; back again, it holds the weights it was started with."""
    dying, other = servers
    hold(dying, other)
    submit(engine, range(6))
    until(lambda: len(dying.prompts) == len(other.prompts) == 3)
    hold(other, holds=False)
    dying.is_dead = True
    done = finish(engine)
    assert {name: g.token_ids for name, g in done.items()} == {f"r{n}": [n] for n in range(6)}
    assert len(other.prompts) == 6
    assert f"{dying.url}: POST /v1/completions failed" in capfd.readouterr().err
    dying.is_dead = dying.holds = False
    dying.requests.clear()
    run(engine, c=([5], SETTINGS), d=([6], SETTINGS))
    assert dying.requests == []
    engine.load_weights(weights_of().items())
    run(engine, e=([5], SETTINGS), f=([6], SETTINGS))
    weights = ["/health", "/collective_rpc", "/reset_prefix_cache"]
    assert dying.asked == [*weights, "/v1/completions"]
    for server in servers:
        server.is_dead = True
    submit(engine, [7])
    with pytest.raises(EngineError, match="none of the servers is left") as caught:
        finish(engine)
    assert all(server.url in str(caught.value) for server in servers)


PASSING = [None, fails(500), fails(429), fails(200, "<html>"), (200, {}, completion([5], "abort"))]


def test_a_failure_of_a_healthy_server_is_tried_again_and_the_server_kept(engine, servers):
    for n, answer in enumerate(PASSING, start=1):
        servers[0].script["/v1/completions"] = [answer]
        assert run(engine, **{f"r{n}": ([n], SETTINGS)})[f"r{n}"].token_ids == [n]
        assert len(servers[0].prompts) == len(servers[1].prompts) == n


def test_a_request_is_given_up_after_some_tries_or_at_once_if_no_server_would_take_it(
    engine, servers
):
    for answer, num_tries in ((fails(503, "no room"), fleet.NUM_TRIES), (fails(400, "long"), 1)):
        for server in servers:
            server.script["/v1/completions"] = [answer] * 9
            server.requests.clear()
        submit(engine, [5])
        with pytest.raises(EngineError, match=f"HTTP {answer[0]}: {answer[2]}"):
            finish(engine)
        assert sum(len(server.prompts) for server in servers) == num_tries


def test_a_server_that_falls_silent_is_left_out(servers, tmp_path, monkeypatch):
    monkeypatch.setattr(fleet, "TIMEOUT_S", 0.5)
    engine = FleetEngine([s.url for s in servers], tmp_path, SERVED)
    hold(servers[0])
    assert run(engine, a=([5], SETTINGS))["a"].token_ids == [5]
    run(engine, b=([5], SETTINGS), c=([6], SETTINGS))
    assert len(servers[0].prompts) == 1
    engine.close()


def test_an_answer_without_one_finite_log_prob_for_each_id_is_an_error(engine, servers):
    one_too_many, not_finite = completion([5]), completion([5])
    one_too_many["choices"][0]["token_ids"] = [5, 6]
    not_finite["choices"][0]["logprobs"] = {"token_logprobs": [math.nan]}
    for n, answer in enumerate([one_too_many, completion([]), not_finite, {"choices": [{}]}]):
        servers[0].script["/v1/completions"] = [(200, {}, answer)]
        submit(engine, [n])
        with pytest.raises(EngineError, match="is it vLLM"):
            finish(engine)


@pytest.mark.parametrize(
    ("config", "what"),
    [
        ({}, "is not a vLLM"),
        ({"seed": 0, "logprobs_mode": "raw_logprobs"}, "raw_logprobs"),
        ({"seed": 1, "logprobs_mode": "processed_logprobs"}, "runs with --seed 1, as another"),
    ],
)
def test_an_unfit_server_is_an_error_with_the_command_to_start_one(servers, tmp_path, config, what):
    servers[0].config = config
    with pytest.raises(EngineError, match=what) as caught:
        FleetEngine([s.url for s in servers], tmp_path, SERVED)
    assert str(caught.value).endswith(serve_command(SERVED, servers[0].server_port))


# --- Weights -------------------------------------------------------------------------------------


def test_every_server_reads_the_exact_weights_and_forgets_the_old_prefixes(engine, servers):
    servers[0].script["/reset_prefix_cache"] = [fails(200, {"success": False})] * 2  # still held
    weights = weights_of()
    engine.load_weights(weights.items())
    (folder,) = engine.weights_dir.iterdir()
    for server, resets in zip(servers, (3, 1), strict=True):
        assert server.asked == ["/health", "/collective_rpc", *["/reset_prefix_cache"] * resets]
        body = server.requests[1][2]
        assert body == {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    written = {}
    for file in folder.iterdir():
        written |= load_file(file)
    assert written.keys() == weights.keys()
    for name, tensor in weights.items():
        assert written[name].dtype == tensor.dtype and torch.equal(written[name], tensor)
    engine.load_weights(weights_of(2).items())
    (newer,) = engine.weights_dir.iterdir()
    assert newer != folder
    engine.close()
    assert not engine.weights_dir.exists()


def test_a_server_that_cannot_read_the_weights_samples_no_more(engine, servers, monkeypatch):
    monkeypatch.setattr(fleet, "RESET_WAIT_S", 0.1)
    unread, held = fails(500, "Repo id must be in the form"), fails(200, {"success": False})
    for path, answers in {"/collective_rpc": [unread], "/reset_prefix_cache": [held] * 9}.items():
        servers[0].script[path] = answers
        engine.load_weights(weights_of().items())
        run(engine, a=([5], SETTINGS), b=([6], SETTINGS))
        assert servers[0].prompts == []
    for server in servers:
        server.script["/collective_rpc"] = [unread]
    with pytest.raises(EngineError, match=r"under this path(.|\n)*Repo id must be"):
        engine.load_weights(weights_of().items())


# --- Servers of our own --------------------------------------------------------------------------


def test_each_card_gets_a_server_with_a_seed_of_its_own(monkeypatch):
    started = []

    @contextlib.contextmanager
    def child(module, *words, env):
        started.append((words, env))
        yield SimpleNamespace(wait_until=lambda is_up, timeout_s: None)

    monkeypatch.setattr(fleet, "child", child)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "1")  # under torchrun
    with start_servers(SERVED, [2, "3"], seed=7) as urls:
        assert len(set(urls)) == 2
    for (words, env), url, card, seed in zip(started, urls, "23", "78", strict=True):
        assert env["CUDA_VISIBLE_DEVICES"] == card and "LOCAL_RANK" not in env
        options = dict(zip(words, words[1:], strict=False))
        assert url.endswith(":" + options["--port"])
        assert (options["--seed"], options["--model"]) == (seed, "my/model")
        assert options["--logprobs-mode"] == "processed_logprobs"


def test_a_server_that_does_not_start_is_an_error_with_what_it_wrote(monkeypatch, module):
    monkeypatch.setattr(fleet, "SERVER_MODULE", module("raise SystemExit('no such card')"))
    with pytest.raises(EngineError, match="no such card"), start_servers(SERVED, ["cpu"]):
        pytest.fail("it is not up")
