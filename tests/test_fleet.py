"""sampling/fleet.py: against scripted servers, and one real vLLM server of the tiny model."""

import importlib.util
import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_engines import checkpoint, finish, lm, prompt_of, run, trainer_log_probs, with_noise

from engines import EngineError, Generation, SamplingSettings
from run import processes
from sampling import fleet, servers
from sampling.fleet import FleetEngine
from sampling.servers import Served, serve_command, start_servers

ROOT = Path(__file__).parents[1]
SERVED = Served("my/model", 512)
SETTINGS = SamplingSettings(max_tokens=4, temperature=0.7, stop_token_ids=(2, 9))

__all__ = ["checkpoint", "lm"]  # fixtures


# --- A server that does what a test tells it to --------------------------------------------------


class FakeServer:
    """Answers as vLLM 0.32 in development mode; a completion repeats its prompt's last ids.

    `script[path]` holds answers to give instead, each once: (status, body), or "hang up".
    Completions wait until `free` is set. `log` holds (path, fields) as received.
    """

    def __init__(self, port=0, seed=0, mode="processed_logprobs", dev=True):
        self.config = {"seed": seed, "logprobs_mode": mode}
        self.dev, self.script, self.log, self.num_hung_up = dev, {}, [], 0
        self.name = "my/model"
        self.free = threading.Event()
        self.free.set()
        self.connections = set()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def setup(self):
                fake.connections.add(self.request)
                super().setup()

            def do_GET(self):
                fake.answer(self)

            do_POST = do_GET

            def log_message(self, *args):
                pass

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request, client_address):
                pass  # the test's end, or what it is about

        self.server = Server(("127.0.0.1", port), Handler)
        self.port = self.server.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()

    def answer(self, handler):
        path = handler.path.partition("?")[0]
        fields = json.loads(handler.rfile.read(int(handler.headers["Content-Length"] or 0)) or "{}")
        self.log.append((handler.path, fields))
        if path == "/v1/completions":
            self.wait(handler)
        script = self.script.get(path)
        answer = script.pop(0) if script else self.usual(path, fields)
        if answer == "hang up":
            handler.connection.close()
            return
        status, body = answer
        data = (body if isinstance(body, str) else json.dumps(body)).encode()
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        handler.wfile.write(data)

    def wait(self, handler):
        """Until the test frees the completion; counts a client that does not wait so long."""
        handler.connection.settimeout(0.01)
        while not self.free.is_set():
            try:
                if not handler.connection.recv(1):
                    self.num_hung_up += 1
                    raise ConnectionAbortedError
            except TimeoutError:
                continue

    def usual(self, path, fields):
        if path == "/health":
            return 200, ""
        if path == "/v1/models":
            return 200, {"object": "list", "data": [{"id": self.name, "root": "my/model"}]}
        if path == "/v1/completions" and fields["model"] != self.name:
            return 404, {"error": {"message": f"The model `{fields['model']}` does not exist."}}
        if path == "/v1/completions":
            answer = completion(fields["prompt"][-fields["max_tokens"] :])
            return 200, {"model": self.name, **answer}
        if not self.dev:
            return 404, {"detail": "Not Found"}
        return 200, {
            "/server_info": {"vllm_config": {"model_config": self.config}},
            "/collective_rpc": {"results": [None]},
            "/reset_prefix_cache": {"success": True},
        }[path]

    @property
    def prompts(self):
        return [f["prompt"] for path, f in self.log if path == "/v1/completions"]

    def die(self):
        """As a killed process: nobody listens, open connections break."""
        self.server.shutdown()
        self.server.server_close()
        for connection in self.connections:
            try:
                connection.shutdown(2)
            except OSError:
                continue
        self.free.set()


def completion(ids, reason="length"):
    log_probs = {"token_logprobs": [-(n + 1) / 7 for n in range(len(ids))]}
    choice = {"token_ids": ids, "finish_reason": reason, "logprobs": log_probs, "text": "never"}
    return {"choices": [choice]}


@contextmanager
def fakes(count, **options):
    servers = [FakeServer(seed=seed, **options) for seed in range(count)]
    try:
        yield servers
    finally:
        for server in servers:
            server.die()


@contextmanager
def fleet_of(servers, tmp_path, **options):
    """A FleetEngine on fake servers; they forget what it asked at its start."""
    with ExitStack() as stack:
        urls = [server.url for server in servers]
        engine = FleetEngine(urls, tmp_path / "weights", SERVED, **options)
        stack.callback(engine.close)
        for server in servers:
            server.log.clear()
        yield engine


@pytest.fixture
def two(tmp_path):
    """(engine, its two servers)"""
    with fakes(2) as servers, fleet_of(servers, tmp_path) as engine:
        yield engine, servers


def until(condition):
    give_up_at = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.005)


def hold(servers):
    for server in servers:
        server.free.clear()


def weights_of(value=1.0):
    """A state dict with a tied head, as PyTorch gives it: two names, one memory."""
    embedding = torch.full((4, 3), value)
    return {"embed": embedding, "norm": torch.full((3,), value), "lm_head.weight": embedding}


# --- Sampling ------------------------------------------------------------------------------------


def test_ids_and_log_probs_come_back_exactly_as_the_server_gave_them(two):
    engine, servers = two
    done = run(engine, a=([5, 6, 7, 8, 9], SETTINGS))["a"]
    assert done == Generation("a", [6, 7, 8, 9], [-1 / 7, -2 / 7, -3 / 7, -4 / 7], "length")
    servers[0].script["/v1/completions"] = [(200, completion([4, 2], "stop"))]
    servers[1].script["/v1/completions"] = [(200, completion([4, 2], "stop"))]
    done = run(engine, b=([5, 6], SETTINGS))["b"]
    assert done == Generation("b", [4, 2], [-1 / 7, -2 / 7], "stop"), "the stop token is kept"


def test_a_request_leaves_nothing_to_the_models_generation_config(two):
    engine, servers = two
    run(engine, a=([5, 6, 7], SETTINGS))
    ((path, fields),) = servers[0].log
    assert path == "/v1/completions"
    assert fields == {
        "model": "my/model",
        "prompt": [5, 6, 7],
        "max_tokens": 4,
        "temperature": 0.7,
        "stop_token_ids": [2, 9],
        "logprobs": 0,
        "return_token_ids": True,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
    }


def test_each_request_goes_to_the_server_with_the_fewest_in_flight(two):
    engine, servers = two
    hold(servers)
    for n in range(8):
        engine.submit(f"r{n}", [n], SETTINGS)
    until(lambda: [len(s.prompts) for s in servers] == [4, 4])
    servers[1].free.set()
    while engine.num_running > 4:  # those of the other server come back
        engine.poll()
    for n in range(8, 12):
        engine.submit(f"r{n}", [n], SETTINGS)
    until(lambda: [len(s.prompts) for s in servers] == [4, 8])
    servers[0].free.set()
    assert finish(engine) and engine.num_running == 0


def test_a_trajectory_stays_where_its_earlier_turns_are_cached_unless_others_are_idle(
    two, monkeypatch
):
    engine, servers = two
    monkeypatch.setattr(fleet, "STAY_FOR", 2)
    run(engine, a=([1], SETTINGS), b=([2], SETTINGS))
    run(engine, b=([2, 3], SETTINGS))
    assert [2, 3] in servers[1].prompts, "the other server is as free, and first"
    hold(servers)
    for n in range(3):
        engine._homes[f"r{n}"] = engine._servers[1]
        engine.submit(f"r{n}", [9, n], SETTINGS)
    engine.submit("b", [2, 3, 4], SETTINGS)
    until(lambda: [2, 3, 4] in servers[0].prompts)
    assert engine._homes["b"] is engine._servers[0]


def test_poll_waits_for_an_answer_but_not_long(two):
    engine, servers = two
    assert engine.poll() == []
    servers[0].free.clear()
    engine.submit("a", [5], SETTINGS)
    began = time.monotonic()
    assert engine.poll() == [] and 0.04 < time.monotonic() - began < 5
    threading.Timer(0.02, servers[0].free.set).start()
    assert finish(engine)["a"].token_ids == [5]


def test_abort_hangs_up_and_an_aborted_name_may_be_used_again(two):
    engine, servers = two
    hold(servers)
    for n in range(6):
        engine.submit(f"r{n}", [n], SETTINGS)
    until(lambda: len(servers[0].prompts) == len(servers[1].prompts) == 3)
    engine.abort()
    assert engine.num_running == 0 and engine.poll() == []
    until(lambda: servers[0].num_hung_up == servers[1].num_hung_up == 3)
    until(lambda: [s.num_in_flight for s in engine._servers] == [0, 0])
    for server in servers:
        server.free.set()
    assert run(engine, r0=([7], SETTINGS))["r0"].token_ids == [7]
    assert not any(s.lost for s in engine._servers)


# --- What fails ----------------------------------------------------------------------------------


def test_requests_of_a_server_that_dies_are_answered_by_another(two, capfd):
    engine, (dying, other) = two
    hold([dying, other])
    for n in range(6):
        engine.submit(f"r{n}", [n], SETTINGS)
    until(lambda: len(dying.prompts) == len(other.prompts) == 3)
    other.free.set()
    dying.die()
    done = finish(engine)
    assert {name: g.token_ids for name, g in done.items()} == {f"r{n}": [n] for n in range(6)}
    assert len(other.prompts) == 6
    assert capfd.readouterr().err.count(f"left out until weights reach it again: {dying.url}") == 1


def test_a_server_that_died_is_used_again_only_once_it_has_the_weights(two):
    """A server that comes back holds the weights it was started with."""
    engine, (dying, other) = two
    dying.die()
    run(engine, a=([5], SETTINGS), b=([6], SETTINGS))
    back = FakeServer(port=dying.port)
    try:
        run(engine, c=([5], SETTINGS), d=([6], SETTINGS))
        assert back.log == []
        engine.load_weights(weights_of().items())
        paths = ["/v1/models", "/collective_rpc", "/reset_prefix_cache"]
        assert [path for path, _ in back.log] == paths
        run(engine, e=([5], SETTINGS), f=([6], SETTINGS))
        assert len(back.prompts) == 1 and len(other.prompts) == 5
    finally:
        back.die()


def test_when_no_server_is_left_the_error_says_what_happened_at_each(two):
    engine, servers = two
    hold(servers)
    engine.submit("a", [5], SETTINGS)
    until(lambda: servers[0].prompts)
    for server in servers:
        server.die()
    with pytest.raises(EngineError, match="none of the 2 servers is left") as caught:
        finish(engine)
    for server in servers:
        assert f"{server.url}: POST /v1/completions was not answered" in str(caught.value)
    engine.abort()
    with pytest.raises(EngineError, match="none of the 2 servers is left"):
        engine.submit("b", [5], SETTINGS)
    assert engine.num_running == 0


@pytest.mark.parametrize("answer", ["hang up", (500, "oops"), (429, ""), (200, "<html>")])
def test_a_failure_of_a_healthy_server_is_tried_again_and_the_server_kept(two, answer):
    engine, servers = two
    servers[0].script["/v1/completions"] = [answer]
    assert run(engine, a=([5], SETTINGS))["a"].token_ids == [5]
    assert len(servers[1].prompts) == 1, "on the other one"
    run(engine, b=([6], SETTINGS), c=([7], SETTINGS))
    assert len(servers[0].prompts) == 2


def test_a_request_that_fails_everywhere_is_given_up(tmp_path):
    with fakes(1) as (server,), fleet_of([server], tmp_path) as engine:
        server.script["/v1/completions"] = [(503, "no room")] * 9
        engine.submit("a", [5], SETTINGS)
        with pytest.raises(EngineError, match=r"4 tries failed.*HTTP 503: no room"):
            finish(engine)
        assert len(server.prompts) == fleet.NUM_TRIES


def test_a_server_that_ends_a_request_because_it_goes_down_has_not_answered_it(two):
    engine, servers = two
    servers[0].script["/v1/completions"] = [(200, completion([5], "abort"))]
    assert run(engine, a=([6], SETTINGS))["a"].token_ids == [6]


def test_a_server_that_falls_silent_is_left_out(tmp_path):
    with fakes(2) as servers, fleet_of(servers, tmp_path, timeout_s=1.5) as engine:
        servers[0].free.clear()
        assert run(engine, a=([5], SETTINGS))["a"].token_ids == [5]
        assert "no answer within 1.5 s" in engine._servers[0].lost
        servers[0].free.set()


def test_a_request_that_no_server_would_take_is_an_error_at_once(two):
    engine, servers = two
    refused = {"error": {"message": "longer than the context of 512"}}
    servers[0].script["/v1/completions"] = [(400, refused)]
    engine.submit("a", [5] * 600, SETTINGS)
    with pytest.raises(EngineError, match=r"HTTP 400: .*longer than the context") as caught:
        finish(engine)
    assert servers[0].url in str(caught.value) and servers[1].prompts == []


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"token_ids": None}, "returned 0 ids and 0 log-probs"),
        ({"logprobs": None}, "is it vLLM 0.32"),
        ({"token_ids": []}, "0 ids and 2 log-probs"),
        ({"token_ids": [5, 6, 7]}, "3 ids and 2 log-probs"),
        ({"logprobs": {"token_logprobs": [-0.1]}}, "2 ids and 1 log-probs"),
        ({"finish_reason": "error"}, "a reason to end"),
        ({"logprobs": {"token_logprobs": [-0.1, None]}}, "the log-prob None"),
        ({"logprobs": {"token_logprobs": [-0.1, "-1"]}}, "the log-prob '-1'"),
        ({"logprobs": {"token_logprobs": [-0.1, 0.5]}}, "the log-prob 0.5, expected .* up to 0"),
        ({"logprobs": {"token_logprobs": [-0.1, float("nan")]}}, "NaN is not a finite number"),
        ({"logprobs": {"token_logprobs": [-0.1, -math.inf]}}, "-Infinity is not a finite"),
        ({"token_ids": [5, -1]}, "the token id -1, expected 0 to"),
        ({"token_ids": [5, 1 << 31]}, "the token id 2147483648"),
        ({"token_ids": [5, 6.0]}, "the token id 6.0"),
        ({"token_ids": [5, True]}, "the token id True"),
        (completion([5] * 5)["choices"][0], "5 tokens, 4 were asked for"),
    ],
)
def test_an_answer_without_one_good_log_prob_for_each_good_id_is_an_error(two, changed, said):
    engine, servers = two
    answer = completion([5, 6])
    answer["choices"][0].update(changed)
    servers[0].script["/v1/completions"] = [(200, answer)]
    engine.submit("a", [5], SETTINGS)
    with pytest.raises(EngineError, match=said):
        finish(engine)


def test_token_ids_are_those_of_the_model_where_it_is_at_hand(tmp_path):
    (tmp_path / "config.json").write_text('{"vocab_size": 10}')
    with fakes(1) as (server,):
        engine = FleetEngine([server.url], tmp_path / "weights", Served(str(tmp_path), 512))
        assert run(engine, a=([9], SETTINGS))["a"].token_ids == [9]
        engine.submit("b", [10], SETTINGS)
        with pytest.raises(EngineError, match="the token id 10, expected 0 to 9"):
            finish(engine)
        engine.close()


def test_a_log_prob_of_one_rounding_above_0_is_one(two):
    engine, servers = two
    answer = completion([5])
    answer["choices"][0]["logprobs"]["token_logprobs"] = [1e-6]
    servers[0].script["/v1/completions"] = [(200, answer)]
    assert run(engine, a=([5], SETTINGS))["a"].log_probs == [1e-6]


def test_a_long_answer_is_read_where_a_long_one_was_asked_for(tmp_path):
    with fakes(1) as (server,), fleet_of([server], tmp_path) as engine:
        padded = {**completion([5]), "padding": "x" * 1_200_000}
        server.script["/v1/completions"] = [(200, padded)] * 9
        done = run(engine, a=([5], SamplingSettings(1000)))
        assert done["a"].token_ids == [5]
        engine.submit("b", [5], SamplingSettings(10))
        with pytest.raises(EngineError, match="4 tries failed.*larger than"):
            finish(engine)


def test_a_server_whose_place_another_has_taken_is_left_out(two):
    """Its samples would be of other weights, and our weights would go to it."""
    engine, servers = two
    servers[0].name = "a/stranger"
    run(engine, a=([5], SETTINGS))
    assert "another server than at the start" in engine._servers[0].lost
    servers[0].log.clear()
    engine.load_weights(weights_of().items())
    assert [path for path, _ in servers[0].log] == ["/v1/models"]
    assert "its model is 'a/stranger', not 'my/model'" in engine._servers[0].lost
    servers[0].name = "my/model"
    engine.load_weights(weights_of().items())
    assert engine._servers[0].lost is None
    servers[0].script["/v1/completions"] = [(200, {"model": "a/stranger", **completion([5])})]
    assert run(engine, b=([6], SETTINGS))["b"].token_ids == [6]
    assert "its model is 'a/stranger'" in engine._servers[0].lost


@pytest.mark.parametrize("answer", [{}, {"data": []}, {"data": [{}]}, {"data": 5}])
def test_what_names_no_model_is_no_server(tmp_path, answer):
    with fakes(1) as (server,), pytest.raises(EngineError, match="names no model; is it vLLM"):
        server.script["/v1/models"] = [(200, answer)]
        start(tmp_path, server.url)


@pytest.mark.parametrize("info", [{"vllm_config": 5}, {"vllm_config": {"model_config": []}}])
def test_a_server_that_says_little_about_itself_is_taken(tmp_path, info):
    with fakes(1) as (server,):
        server.script["/server_info"] = [(200, info)]
        start(tmp_path, server.url)


def test_a_bug_in_a_thread_surfaces_in_the_loop(two, monkeypatch):
    engine, _ = two
    monkeypatch.setattr(servers, "_generation", lambda *args: 1 / 0)
    engine.submit("a", [5], SETTINGS)
    with pytest.raises(ZeroDivisionError):
        finish(engine)


# --- What is found at the start ------------------------------------------------------------------


def start(tmp_path, *urls):
    FleetEngine(urls, tmp_path, SERVED).close()


def test_an_address_without_a_server_is_an_error_with_the_command_to_start_one(tmp_path):
    with fakes(1) as (server,):
        server.die()
        with pytest.raises(EngineError, match=r"GET /health was not answered") as caught:
            start(tmp_path, server.url)
    command = serve_command(SERVED, host="127.0.0.1", port=server.port)
    assert server.url in str(caught.value) and str(caught.value).endswith(command)


def test_a_server_without_development_mode_is_an_error_with_the_command_to_start_one(tmp_path):
    said = "expected vLLM with VLLM_SERVER_DEV_MODE=1"
    with fakes(1, dev=False) as (server,), pytest.raises(EngineError, match=said):
        start(tmp_path, server.url)
    with fakes(1) as (server,), fleet_of([server], tmp_path) as engine:
        server.dev = False  # started again by somebody
        with pytest.raises(EngineError, match=r"/collective_rpc .*start it with\n  VLLM_SERVER"):
            engine.load_weights(weights_of().items())


def test_log_probs_before_temperature_are_refused(tmp_path):
    said = "raw_logprobs, expected processed_logprobs"
    with fakes(1, mode="raw_logprobs") as (server,), pytest.raises(EngineError, match=said):
        start(tmp_path, server.url)


def test_servers_that_would_sample_the_same_tokens_are_refused(tmp_path):
    with fakes(2) as servers:
        servers[1].config["seed"] = 0
        with pytest.raises(EngineError, match="both run with --seed 0"):
            start(tmp_path, *[server.url for server in servers])


def test_an_address_is_http_and_given_once(tmp_path):
    with pytest.raises(ValueError, match="'gpu1' is not an address"):
        start(tmp_path, "gpu1")
    for urls in ([], ["http://a:1", "http://a:1/"]):
        with pytest.raises(ValueError, match="one or more different addresses"):
            start(tmp_path, *urls)


# --- Weights -------------------------------------------------------------------------------------


def read(folder):
    return [load_file(file) for file in sorted(folder.iterdir())]


def test_weights_are_written_exactly_in_shards_that_are_held_one_at_a_time(two, monkeypatch):
    engine, _ = two
    weights = {f"w{n}": torch.randn(5, n + 1).bfloat16() for n in range(4)}
    weights["tied"] = weights["w0"]
    weights["transposed"] = torch.randn(2, 3).T
    monkeypatch.setattr(fleet, "SHARD_BYTES", 30)
    folder = engine.write_weights(weights.items())
    shards = read(folder)
    assert [list(shard) for shard in shards] == [
        ["w0", "w1"],
        ["w2"],
        ["w3"],
        ["tied"],
        ["transposed"],
    ]
    together = {name: tensor for shard in shards for name, tensor in shard.items()}
    assert together.keys() == weights.keys()
    for name, tensor in weights.items():
        assert together[name].dtype == tensor.dtype and torch.equal(together[name], tensor)


def test_a_folder_of_weights_has_its_name_only_when_it_is_complete(two):
    engine, _ = two

    def broken():
        yield "a", torch.zeros(3)
        raise RuntimeError("gathering failed")

    first = engine.write_weights(weights_of(1.0).items())
    with pytest.raises(RuntimeError, match="gathering failed"):
        engine.write_weights(broken())
    with pytest.raises(EngineError, match="no weights"):
        engine.write_weights([])
    assert list(engine.weights_dir.glob("weights-*")) == [first]
    second = engine.write_weights(weights_of(2.0).items())
    assert list(engine.weights_dir.iterdir()) == [second], "what is old or incomplete is removed"
    assert torch.equal(read(second)[0]["lm_head.weight"], weights_of(2.0)["embed"])
    engine.close()
    assert list(engine.weights_dir.iterdir()) == []


def test_every_server_reads_the_folder_and_forgets_the_old_prefixes(two):
    engine, servers = two
    servers[0].script["/reset_prefix_cache"] = [(200, {"success": False})] * 2  # still held
    engine.load_weights(weights_of().items())
    (folder,) = engine.weights_dir.iterdir()
    for server, resets in zip(servers, (3, 1), strict=True):
        _, (path, fields), *others = server.log
        assert path == "/collective_rpc"
        assert fields == {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        assert others == [("/reset_prefix_cache", {})] * resets


def test_weights_are_not_changed_under_a_running_request(two):
    engine, servers = two
    servers[0].free.clear()
    engine.submit("a", [5], SETTINGS)
    with pytest.raises(EngineError, match="1 requests are running"):
        engine.load_weights(weights_of().items())
    engine.abort()
    engine.load_weights(weights_of().items())


def test_a_server_that_cannot_read_the_weights_samples_no_more(two):
    engine, servers = two
    servers[0].script["/collective_rpc"] = [(500, "Repo id must be in the form")]
    engine.load_weights(weights_of().items())
    run(engine, a=([5], SETTINGS), b=([6], SETTINGS))
    assert servers[0].prompts == [] and len(servers[1].prompts) == 2
    for server in servers:
        server.script["/collective_rpc"] = [(500, "Repo id must be in the form")]
    with pytest.raises(EngineError, match=r"is it there, under this path(.|\n)*Repo id must be"):
        engine.load_weights(weights_of().items())


def test_a_prefix_cache_that_stays_leaves_the_server_out(two, monkeypatch):
    engine, servers = two
    monkeypatch.setattr("sampling.servers.RESET_WAIT_S", 0.1)
    servers[1].script["/reset_prefix_cache"] = [(200, {"success": False})] * 99
    engine.load_weights(weights_of().items())
    assert [s.lost is None for s in engine._servers] == [True, False]


# --- Servers of our own --------------------------------------------------------------------------

# Stands in for vLLM: says what it was started with, then is healthy.
STAND_IN = """
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        said = {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "LOCAL_RANK")}
        said["pid"] = os.getpid()
        said["words"] = sys.argv[1:]
        name = os.environ.get("STRANGER") or sys.argv[sys.argv.index("--served-model-name") + 1]
        said["data"] = [{"id": name}]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(said).encode())
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def said_by(url):
    return servers.Server(url, SERVED, 0).call("GET", "/", timeout_s=5)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_each_card_gets_a_server_with_a_seed_of_its_own(monkeypatch):
    monkeypatch.setattr(processes, "_RUN_WHILE_STDIN_IS_OPEN", STAND_IN)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("LOCAL_RANK", "1")  # under torchrun
    with start_servers(SERVED, [2, "3"], seed=7, options=["--swap", "0"]) as urls:
        said = [said_by(url) for url in urls]
        assert [s["CUDA_VISIBLE_DEVICES"] for s in said] == ["2", "3"]
        assert [s["LOCAL_RANK"] for s in said] == [None, None]
        for url, s, seed in zip(urls, said, ("7", "8"), strict=True):
            words = s["words"]
            assert words[words.index("--seed") + 1] == seed
            assert words[words.index("--logprobs-mode") + 1] == "processed_logprobs"
            assert words[:3] == [servers.SERVER_MODULE, "--model", "my/model"]
            assert words[-2:] == ["--swap", "0"]
            assert words[words.index("--served-model-name") + 1].startswith("sampler-")
            assert "--enforce-eager" not in words and url.startswith("http://127.0.0.1:")
    assert not any(is_alive(s["pid"]) for s in said)


def test_a_stranger_on_the_port_does_not_pass_for_the_server_that_was_started(monkeypatch):
    monkeypatch.setattr(processes, "_RUN_WHILE_STDIN_IS_OPEN", STAND_IN)
    monkeypatch.setenv("STRANGER", "my/model")
    with pytest.raises(EngineError, match="another process listens at .*model is 'my/model'"):
        started(["cpu"])


def started(devices, **options):
    with start_servers(SERVED, devices, **options):
        pytest.fail("it is not up")


def test_a_server_that_does_not_start_is_an_error_with_what_it_wrote(monkeypatch):
    monkeypatch.setattr(processes, "_RUN_WHILE_STDIN_IS_OPEN", "raise SystemExit('no such card')")
    with pytest.raises(EngineError, match=r"exited with 1 at its start:\nno such card"):
        started(["cpu"])
    waits = "import time; print('loading', flush=True); time.sleep(60)"
    monkeypatch.setattr(processes, "_RUN_WHILE_STDIN_IS_OPEN", waits)
    with pytest.raises(EngineError, match=r"not up after 0.5 s:\nloading"):
        started(["cpu"], start_timeout_s=0.5)
    with pytest.raises(ValueError, match="one device or more"):
        started([])


def test_servers_end_with_their_parent_even_when_it_is_killed(tmp_path):
    thread, _, _ = processes._RUN_WHILE_STDIN_IS_OPEN.partition("runpy.run_module(")
    parent = f"""
import time
from run import processes
from sampling import servers
processes._RUN_WHILE_STDIN_IS_OPEN = {thread + STAND_IN!r}
with servers.start_servers(servers.Served("my/model", 512), ["cpu"]) as (url,):
    print(url, flush=True)
    time.sleep(60)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", parent], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    try:
        pid = said_by(process.stdout.readline().strip())["pid"]
        assert is_alive(pid)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()
    until(lambda: not is_alive(pid))


# --- A real server -------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_real_server_samples_what_the_trainer_scores_before_and_after_new_weights(
    checkpoint, lm, tmp_path
):
    """Trap 20, over HTTP: read from a folder without the tied head, vLLM keeps the old one."""
    if importlib.util.find_spec("vllm") is None:
        if os.environ.get("CI"):
            pytest.fail("vLLM is not installed, and CI may not skip its tests: run `make setup`")
        pytest.skip("vLLM is not installed: run `make setup`")
    kv_cache = ["--kv-cache-memory-bytes", str(64 << 20)]
    with ExitStack() as stack:
        began = time.monotonic()
        devices = [0] if torch.cuda.is_available() else ["cpu"]
        served = Served(checkpoint, 512, "float32")
        urls = stack.enter_context(start_servers(served, devices, options=kv_cache))
        print(f"started in {time.monotonic() - began:.1f} s")
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

        # The embedding alone: were all else stale, nobody would notice; a stale head, at once.
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
            began = time.monotonic()
            engine.load_weights(changed.state_dict().items())
            print(f"reloaded in {time.monotonic() - began:.2f} s")
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
