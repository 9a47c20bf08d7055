"""sampling/fleet.py with scripted servers; tests/long/test_fleet.py uses a real one."""

import contextlib
import math
import time
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from test_chatapi import ScriptedServer, fails
from test_engines import finish, run
from test_processes import module, wait_until

from batching import Batch
from engines import EngineError, Generation, SamplingSettings
from sampling import fleet
from sampling.fleet import FleetEngine, ServerOptions, serve_command, start_servers

__all__ = ["module"]  # a fixture
OPTIONS = ServerOptions("my/model", 512)
SETTINGS = SamplingSettings(max_tokens=4, temperature=0.7, stop_token_ids=(2, 9))


class FakeServer(ScriptedServer):
    """Answers like vLLM 0.32 in development mode; a completion repeats its prompt's last ids.

    `script[path]` lists answers to give instead, one per request. Completions wait while
    `is_blocked`.
    """

    def __init__(self, seed):
        super().__init__()
        self.config = {"seed": seed, "logprobs_mode": "processed_logprobs"}
        self.script, self.is_dead, self.is_blocked = {}, False, False

    def reply(self, path, body):
        path = path.partition("?")[0]
        if path == "/v1/completions":
            time.sleep(0.05)  # so that requests sent together overlap
            while self.is_blocked and not self.is_dead:
                time.sleep(0.005)
        if self.script.get(path):
            return self.script[path].pop(0)
        return None if self.is_dead else (200, {}, self.default_answer(path, body))

    def default_answer(self, path, body):
        if path == "/v1/completions":
            return completion(body["prompt"][-body["max_tokens"] :])
        return {
            "/health": "",
            "/server_info": {"vllm_config": {"model_config": self.config}},
            "/collective_rpc": {"results": [None]},
            "/reset_prefix_cache": {"success": True},
        }[path]

    @property
    def paths(self):
        return [path for path, _, _ in self.requests]

    @property
    def prompts(self):
        return [body["prompt"] for path, _, body in self.requests if path == "/v1/completions"]


def completion(ids, reason="length"):
    log_probs = {"token_logprobs": [-(n + 1) / 7 for n in range(len(ids))]}
    choice = {"token_ids": ids, "finish_reason": reason, "logprobs": log_probs, "text": "never"}
    return {"choices": [choice]}


def block(*servers, is_blocked=True):
    for server in servers:
        server.is_blocked = is_blocked


@pytest.fixture
def servers():
    with FakeServer(0) as first, FakeServer(1) as second:
        yield [first, second]
        block(first, second, is_blocked=False)


@pytest.fixture
def engine(servers, tmp_path):
    engine = FleetEngine([s.url for s in servers], tmp_path / "weights", OPTIONS)
    for server in servers:
        server.requests.clear()
    yield engine
    engine.close()


def submit(engine, numbers):
    """Submit request r0 with the prompt [0], r1 with [1], and so on, for these numbers."""
    for n in numbers:
        engine.submit(f"r{n}", [n], SETTINGS)


def weights_of(value=1.0):
    """A state dict with a tied head, as PyTorch returns it: two names for one tensor."""
    embedding = torch.full((4, 3), value).bfloat16()
    return {"embed": embedding, "norm": torch.randn(3, 2).T, "lm_head.weight": embedding}


# --- A teacher -----------------------------------------------------------------------------------


class FakeTokenizer:
    @staticmethod
    def encode(text, add_special_tokens):
        return [7] * len(text)


def scored(ids):
    """vLLM's answer: for each token but the first, its log-prob and that of the likeliest."""
    tokens = [{str(i): {"logprob": -i / 10}, "999": {"logprob": -0.1}} for i in ids[1:]]
    return {"choices": [{"prompt_logprobs": [None, *tokens]}]}


def teacher_answer(path, body):
    return {"tokens": [7] * len(body["prompt"])} if path == "/tokenize" else scored(body["prompt"])


def test_a_teacher_scores_each_row_and_a_request_that_fails_is_repeated(servers, monkeypatch):
    monkeypatch.setattr(fleet.time, "sleep", lambda seconds: None)
    server = servers[0]
    server.default_answer = teacher_answer
    teacher = fleet.TeacherServer(server.url, FakeTokenizer(), 20)
    assert server.prompts == [[7] * 20]  # the longest trajectory is tried at once
    server.requests.clear()
    server.script["/v1/completions"] = [(500, {}, "out of memory")]
    ids, lengths = torch.tensor([[5, 6, 7, 8], [5, 9, 0, 0]]), torch.tensor([4, 2])
    zeros = torch.zeros(2, 4)
    scores = teacher.score(Batch(ids, zeros, zeros, zeros, lengths, lengths))
    expected = torch.tensor([[0, -0.6, -0.7, -0.8], [0, -0.9, 0, 0]])
    torch.testing.assert_close(scores, expected)
    # Both rows are asked at once, so either can be the one that fails and is asked again.
    assert len(server.prompts) == 3
    assert set(map(tuple, server.prompts)) == {(5, 6, 7, 8), (5, 9)}


@pytest.mark.parametrize(
    ("answer", "error", "message"),
    [
        ({"tokens": [1, 2]}, ValueError, "has another tokenizer than the policy"),
        ({"choices": []}, EngineError, "does not answer /tokenize like vLLM"),
        (
            {"tokens": [7] * len(fleet.PROBE), "choices": [{"prompt_logprobs": None}]},
            EngineError,
            "does not answer with prompt_logprobs like vLLM",
        ),
    ],
)
def test_a_teacher_with_another_tokenizer_and_another_server_are_refused(
    servers, answer, error, message
):
    servers[0].default_answer = lambda path, body: answer
    with pytest.raises(error, match=message):
        fleet.TeacherServer(servers[0].url, FakeTokenizer(), 20)


# --- Sampling ------------------------------------------------------------------------------------


def test_ids_and_log_probs_are_exactly_those_of_the_server(engine, servers):
    """The request also sets every value that vLLM could take from generation_config.json."""
    generation = run(engine, a=([5, 6, 7, 8, 9], SETTINGS))["a"]
    assert generation == Generation("a", [6, 7, 8, 9], [-1 / 7, -2 / 7, -3 / 7, -4 / 7], "length")
    ((_, _, body),) = servers[0].requests
    settings = {"max_tokens": 4, "temperature": 0.7, "stop_token_ids": [2, 9]}
    assert body == settings | fleet.PLAIN_SAMPLING | {
        "prompt": [5, 6, 7, 8, 9],
        "logprobs": 0,
        "return_token_ids": True,
    }
    for server in servers:
        server.script["/v1/completions"] = [(200, {}, completion([4, 2], "stop"))]
    generation = run(engine, b=([5, 6], SETTINGS))["b"]
    assert generation == Generation("b", [4, 2], [-1 / 7, -2 / 7], "stop")  # keeps the stop token


def test_a_request_goes_to_the_least_busy_server_but_a_trajectory_stays_where_it_is_cached(
    engine, servers
):
    block(*servers)
    submit(engine, range(6))
    wait_until(lambda: [len(s.prompts) for s in servers] == [3, 3])
    block(servers[1], is_blocked=False)
    while engine.num_running > 3:  # the requests at servers[1] finish
        engine.poll()
    (n, *_), *_ = servers[1].prompts
    submit(engine, range(6, 9))
    wait_until(lambda: [len(s.prompts) for s in servers] == [3, 6])
    block(servers[0], is_blocked=False)
    finish(engine)
    run(engine, **{f"r{n}": ([n, n], SETTINGS)})
    assert [n, n] in servers[1].prompts  # although servers[0] is equally free and comes first


def test_abort_disconnects_and_an_aborted_name_can_be_used_again(engine, servers):
    block(*servers)
    submit(engine, range(6))
    wait_until(lambda: len(servers[0].prompts) == len(servers[1].prompts) == 3)
    engine.abort()
    assert engine.num_running == 0 and engine.poll() == []
    wait_until(lambda: not any(server.num_running for server in engine._servers))
    block(*servers, is_blocked=False)
    assert run(engine, r0=([7], SETTINGS))["r0"].token_ids == [7]
    run(engine, a=([1], SETTINGS), b=([2], SETTINGS))  # neither server was excluded
    assert {len(s.prompts) for s in servers} == {4, 5}


# --- Failures ------------------------------------------------------------------------------------


def test_a_server_that_dies_is_used_again_only_after_it_has_the_weights(engine, servers, capfd):
    """The other server takes over its requests. After a restart it has old weights."""
    dying, healthy = servers
    block(dying, healthy)
    submit(engine, range(6))
    wait_until(lambda: len(dying.prompts) == len(healthy.prompts) == 3)
    block(healthy, is_blocked=False)
    dying.is_dead = True
    generations = finish(engine)
    assert {r: g.token_ids for r, g in generations.items()} == {f"r{n}": [n] for n in range(6)}
    assert len(healthy.prompts) == 6
    assert f"{dying.url}: POST /v1/completions failed" in capfd.readouterr().err
    dying.is_dead = dying.is_blocked = False
    dying.requests.clear()
    run(engine, c=([5], SETTINGS), d=([6], SETTINGS))
    assert dying.requests == []
    engine.load_weights(weights_of().items())
    run(engine, e=([5], SETTINGS), f=([6], SETTINGS))
    reload_paths = ["/health", "/collective_rpc", "/reset_prefix_cache"]
    assert dying.paths == [*reload_paths, "/v1/completions"]
    for server in servers:
        server.is_dead = True
    submit(engine, [7])
    with pytest.raises(EngineError, match="none of the servers can be used") as error:
        finish(engine)
    assert all(server.url in str(error.value) for server in servers)


TRANSIENT_FAILURES = [None, fails(500), fails(429), fails(200, "<html>")]
TRANSIENT_FAILURES += [(200, {}, completion([5], "abort"))]


def test_a_failed_request_is_retried_and_a_healthy_server_stays_in_use(engine, servers):
    for n, answer in enumerate(TRANSIENT_FAILURES, start=1):
        servers[0].script["/v1/completions"] = [answer]
        assert run(engine, **{f"r{n}": ([n], SETTINGS)})[f"r{n}"].token_ids == [n]
        assert len(servers[0].prompts) == len(servers[1].prompts) == n


def test_a_failing_request_is_retried_but_not_if_every_server_would_refuse_it(engine, servers):
    cases = ((fails(503, "no room"), fleet.NUM_ATTEMPTS), (fails(400, "long"), 1))
    for answer, num_attempts in cases:
        for server in servers:
            server.script["/v1/completions"] = [answer] * 9
            server.requests.clear()
        submit(engine, [5])
        with pytest.raises(EngineError, match=f"HTTP {answer[0]}: {answer[2]}"):
            finish(engine)
        assert sum(len(server.prompts) for server in servers) == num_attempts


def test_idle_servers_are_used_in_turn_so_that_a_sync_can_check_each(engine, servers):
    assert engine.num_samplers == 2
    for n in range(4):
        run(engine, **{f"{n}": ([n], SETTINGS)})
    assert [len(server.prompts) for server in servers] == [2, 2]


def test_a_server_that_hangs_is_excluded(servers, tmp_path, monkeypatch):
    monkeypatch.setattr(fleet, "TIMEOUT_S", 0.5)
    engine = FleetEngine([s.url for s in servers], tmp_path, OPTIONS)
    block(servers[0])
    assert run(engine, a=([5], SETTINGS))["a"].token_ids == [5]
    run(engine, b=([5], SETTINGS), c=([6], SETTINGS))
    assert len(servers[0].prompts) == 1
    engine.close()


def test_an_answer_without_a_finite_log_prob_for_each_id_is_an_error(engine, servers):
    one_too_many, not_finite = completion([5]), completion([5])
    one_too_many["choices"][0]["token_ids"] = [5, 6]
    not_finite["choices"][0]["logprobs"] = {"token_logprobs": [math.nan]}
    for n, answer in enumerate([one_too_many, completion([]), not_finite, {"choices": [{}]}]):
        for server in servers:
            server.script["/v1/completions"] = [(200, {}, answer)]
        submit(engine, [n])
        with pytest.raises(EngineError, match="is it vLLM"):
            finish(engine)


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({}, "is not a vLLM"),
        ({"seed": 0, "logprobs_mode": "raw_logprobs"}, "raw_logprobs"),
        ({"seed": 1, "logprobs_mode": "processed_logprobs"}, "runs with --seed 1, like another"),
    ],
)
def test_a_server_with_wrong_options_is_an_error_with_the_right_command(
    servers, tmp_path, config, problem
):
    servers[0].config = config
    with pytest.raises(EngineError, match=problem) as error:
        FleetEngine([s.url for s in servers], tmp_path, OPTIONS)
    assert str(error.value).endswith(serve_command(OPTIONS, servers[0].server_port))


# --- Weights -------------------------------------------------------------------------------------


def test_every_server_loads_the_exact_weights_and_clears_its_prefix_cache(engine, servers):
    servers[0].script["/reset_prefix_cache"] = [fails(200, {"success": False})] * 2  # still in use
    weights = weights_of()
    engine.load_weights(weights.items())
    (folder,) = engine.weights_dir.iterdir()
    for server, resets in zip(servers, (3, 1), strict=True):
        assert server.paths == ["/health", "/collective_rpc", *["/reset_prefix_cache"] * resets]
        body = server.requests[1][2]
        assert body == {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
    tensors = {}
    for file in folder.iterdir():
        tensors |= load_file(file)
    assert tensors.keys() == weights.keys()
    for name, tensor in weights.items():
        assert tensors[name].dtype == tensor.dtype and torch.equal(tensors[name], tensor)
    engine.load_weights(weights_of(2).items())
    (newer,) = engine.weights_dir.iterdir()
    assert newer != folder
    engine.close()
    assert not engine.weights_dir.exists()


def test_a_server_that_cannot_load_the_weights_is_excluded(engine, servers, monkeypatch):
    monkeypatch.setattr(fleet, "RESET_WAIT_S", 0.1)
    unreadable, in_use = fails(500, "Repo id must be in the form"), fails(200, {"success": False})
    script = {"/collective_rpc": [unreadable], "/reset_prefix_cache": [in_use] * 9}
    for path, answers in script.items():
        servers[0].script[path] = answers
        engine.load_weights(weights_of().items())
        run(engine, a=([5], SETTINGS), b=([6], SETTINGS))
        assert servers[0].prompts == []
    for server in servers:
        server.script["/collective_rpc"] = [unreadable]
    with pytest.raises(EngineError, match=r"does that path exist(.|\n)*Repo id must be"):
        engine.load_weights(weights_of().items())


# --- Starting servers ----------------------------------------------------------------------------


def test_each_gpu_gets_a_server_with_a_different_seed(monkeypatch):
    processes = []

    @contextlib.contextmanager
    def child(module, *arguments, env):
        processes.append((arguments, env))
        yield SimpleNamespace(wait_until=lambda is_up, timeout_s: None)

    monkeypatch.setattr(fleet, "child", child)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "1")  # under torchrun
    with start_servers(OPTIONS, [2, "3"], seed=7) as urls:
        assert len(set(urls)) == 2
    for (arguments, env), url, gpu, seed in zip(processes, urls, "23", "78", strict=True):
        assert env["CUDA_VISIBLE_DEVICES"] == gpu and "LOCAL_RANK" not in env
        options = dict(zip(arguments, arguments[1:], strict=False))
        assert url.endswith(":" + options["--port"])
        assert (options["--seed"], options["--model"]) == (seed, "my/model")
        assert options["--logprobs-mode"] == "processed_logprobs"


def test_the_error_for_a_server_that_does_not_start_shows_its_output(monkeypatch, module):
    monkeypatch.setattr(fleet, "SERVER_MODULE", module("raise SystemExit('no such card')"))
    with pytest.raises(EngineError, match="no such card"), start_servers(OPTIONS, ["cpu"]):
        pytest.fail("the server must not start")
