"""A fleet: samplers that are vLLM servers, on other cards or other machines, behind one `Engine`.

One machine is outgrown in two directions: the trainer by sharding (FSDP), the sampler by copies of
the model that answer over HTTP. The rollout loop sees no difference, `FleetEngine` is an `Engine`:

                     ┌── POST /v1/completions, token ids in, ids and log-probs out ──> server 0
    submit ── least ─┤                                                                 server 1
              busy   └──────────────────────────────────────────────────────────────>  ...
    poll   <── what has come back, of any server
    load_weights ──> shards in a folder ──> POST /collective_rpc reload_weights {folder} ──> all

Two ways to get servers (`sampling/servers.py`): `--engine-devices 2 3` starts one per card of
this machine for as long as the run lasts; or start them anywhere with the line that `serve_command`
prints, and give `--engine-url` their addresses.

What has to be exact, and what goes wrong in silence where it is not:

* Ids. Text never comes back: ids decoded and encoded again are other ids than were sampled.
* Log-probs. log μ(y_t) = log softmax(logits / τ)[y_t] needs `--logprobs-mode processed_logprobs`;
  the default is before temperature. A server in another mode is refused.
* The distribution. A model's generation_config.json may hold top_p or top_k, and the server applies
  what a request leaves open. Each request therefore names every setting.
* Seeds. Servers with one `--seed` draw one stream of random numbers: two samples of a task, on two
  servers, come out equal token for token, and their group has no spread. They are refused.
* Weights. Every server must hold the newest. One that fails is left out until the next
  `load_weights`, also if it is back at once: restarted, it serves the weights it was started with.
  For the same reason, load weights before the first request to servers that others have used.

The weights go through a folder that the trainer and all servers see under one path (a disk, NFS):
no common process group, no match of versions, no card that belongs to two processes. It costs one
write and one read per step. NCCL transfer saves both, and is a path that no CPU can test.

A dead server costs its requests, not the run: they are sent to another. The endpoints that change
weights exist only in vLLM's development mode and ask nobody's name: keep the fleet in a network
that you trust.

Of a trainer's many processes each samples from the whole fleet; rank 0 alone writes the weights and
has them loaded, and tells the others which servers hold them.

Read first: `engines.py`. Read next: `rollout.py`.
"""

from __future__ import annotations

import contextlib
import queue
import shutil
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from engines import EngineError, Generation, SamplingSettings, Weights
from envs.exchange import Line, checked_url
from run.files import new_folder, sweep
from sampling.servers import HEALTH_TIMEOUT_S, Served, Server, ServerFailed
from scale import distributed

NUM_TRIES = 4  # servers that one request is sent to before the run stops
POLL_WAIT_S = 0.05  # how long `poll` waits when nothing has come back
NUM_THREADS = 64  # requests in flight at a time, per server
SHARD_BYTES = 1 << 30  # of weights held at a time while they are written
# A trajectory goes back to the server that has its earlier turns in its prefix cache, unless that
# one has this many requests more than another.
STAY_FOR = 4

# The distribution as the model gives it. What a request leaves out is taken from the model's
# generation_config.json.
PLAIN = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
PLAIN |= {"presence_penalty": 0.0, "frequency_penalty": 0.0}


@dataclass(eq=False)
class _Request:
    request_id: str
    body: dict[str, Any]
    server: Server
    dropped: bool = False
    line: Line | None = field(default=None, repr=False)


_Answer = tuple[_Request, Generation | Exception]


class FleetEngine:
    """Many vLLM servers as one `Engine`.

    `SamplingSettings.seed` is not used, as in `VLLMEngine`; the servers' own seeds differ.

    Args:
        urls: http://HOST:PORT of each server.
        weights_dir: folder that this process writes and every server reads, under this path.
        served: what the servers run; said in the command of an error.
        timeout_s: the longest that one generation, or one reload, may take.
    Raises:
        EngineError: a server does not answer, is no vLLM, lacks development mode, reports log-probs
            before temperature, or shares its seed with another. The message has the command to
            start it.
        ValueError: a URL is none, or is given twice.
    """

    max_open: int  # as many again as are in flight: nobody here knows the size of their caches

    def __init__(
        self,
        urls: Sequence[str],
        weights_dir: str | Path,
        served: Served,
        timeout_s: float = 600.0,
    ) -> None:
        self._servers = [
            Server(checked_url(url, "--engine-url"), served, i, timeout_s)
            for i, url in enumerate(urls)
        ]
        if not urls or len({s.url for s in self._servers}) < len(urls):
            raise ValueError(f"expected one or more different addresses, got {list(urls)}")
        # NOTE: absolute, not resolved: a link may lead elsewhere on the server's machine.
        self.weights_dir = Path(weights_dir).absolute()
        self._lock = threading.Lock()  # of `lost`, `num_in_flight`, `dropped` and `line`
        self._running: dict[str, _Request] = {}
        self._homes: dict[str, Server] = {}  # where a trajectory's last turn was sampled
        self._answers: queue.SimpleQueue[_Answer] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(NUM_THREADS * len(self._servers))
        self.max_open = 2 * NUM_THREADS * len(self._servers)
        self._written: Path | None = None
        seeds = list(self._threads.map(Server.check, self._servers))
        for server, seed in zip(self._servers, seeds, strict=True):
            if seed is not None and seeds.count(seed) > 1:
                what = f"{server.url} and another server both run with --seed {seed}"
                raise server.misfit(f"{what} and would sample the same tokens")

    @property
    def num_running(self) -> int:
        return len(self._running)

    # ------------------------------------------------------------------------------- sampling

    def submit(
        self, request_id: str, prompt_ids: Sequence[int], sampling: SamplingSettings
    ) -> None:
        body = {
            "prompt": list(prompt_ids),
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "stop_token_ids": list(sampling.stop_token_ids),
            "return_token_ids": True,
            "logprobs": 0,  # of the sampled token alone
            **PLAIN,
        }
        request = _Request(request_id, body, self._choose(request_id))
        self._running[request_id] = request
        self._threads.submit(self._work, request)

    def poll(self) -> list[Generation]:
        """What has come back; waits up to 50 ms when nothing has."""
        finished: list[Generation] = []
        wait = POLL_WAIT_S if self._running else 0.0
        while True:
            try:
                request, outcome = self._answers.get(timeout=0.0 if finished else wait)
            except queue.Empty:
                return finished
            if self._running.get(request.request_id) is not request:
                continue  # aborted
            if isinstance(outcome, Exception):
                raise outcome
            del self._running[request.request_id]
            finished.append(outcome)

    def abort(self) -> None:
        """Drop every running request; a server stops decoding when its client hangs up."""
        with self._lock:
            for request in self._running.values():
                request.dropped = True
                if request.line is not None:
                    request.line.hang_up()
        self._running.clear()

    def _work(self, request: _Request) -> None:
        """In a thread: send one request, to one server after another if need be."""
        outcome: Generation | Exception
        try:
            outcome = self._sample(request)
        except Exception as error:  # a bug in a thread must surface in the loop
            outcome = error
        with self._lock:
            request.server.num_in_flight -= 1
        self._answers.put((request, outcome))

    def _sample(self, request: _Request) -> Generation:
        def opened(line: Line) -> None:
            with self._lock:
                request.line = line
                if request.dropped:
                    line.hang_up()

        for left in reversed(range(NUM_TRIES)):
            server = request.server
            try:
                return server.sample(request.request_id, request.body, opened)
            except ServerFailed as error:
                if request.dropped:
                    break
                if not left:
                    raise EngineError(f"{NUM_TRIES} tries failed, the last one: {error}") from error
                self._note_failure(server, error)
                request.server = self._choose(request.request_id, leave=server)
        raise EngineError(f"{request.request_id} was aborted")

    def _choose(self, request_id: str, leave: Server | None = None) -> Server:
        """The server with the fewest requests in flight takes one more, `leave` has one less."""
        with self._lock:
            usable = [s for s in self._servers if s.lost is None]
            if not usable:
                last = "\n".join(f"  {s.lost}" for s in self._servers)
                raise EngineError(f"none of the {len(self._servers)} servers is left:\n{last}")
            server = min(usable, key=lambda s: (s is leave, s.num_in_flight))
            home = self._homes.get(request_id, server)
            if home is not leave and home.lost is None:
                server = home if home.num_in_flight <= server.num_in_flight + STAY_FOR else server
            self._homes[request_id] = server
            server.num_in_flight += 1
            if leave is not None:
                leave.num_in_flight -= 1
            return server

    def _note_failure(self, server: Server, error: ServerFailed) -> None:
        """Leave a server out unless it says at once that it is well (a connection may break)."""
        if not error.is_lost:
            with contextlib.suppress(ServerFailed):
                server.call("GET", "/health", timeout_s=HEALTH_TIMEOUT_S)
                return
        self._lose(server, str(error))

    def _lose(self, server: Server, why: str) -> None:
        with self._lock:
            first, server.lost = server.lost is None, why
        if first:
            print(f"server left out until weights reach it again: {why}", file=sys.stderr)

    # -------------------------------------------------------------------------------- weights

    def load_weights(self, weights: Weights) -> None:
        """Replace the weights of every server. Collective.

        NOTE: `weights` must hold every name of the state dict, the tied output head included: vLLM
        0.32 keeps the old head, without an error, when a folder lacks it (log-probs off by nats).
        """
        folder: Path | None = None
        if distributed.rank() == 0:
            folder = self.write_weights(weights)
        else:
            for _ in weights:  # each is put together from all ranks
                pass

        def reload() -> list[str | None]:
            assert folder is not None
            self.reload(folder)
            return [server.lost for server in self._servers]

        lost = distributed.first("loading weights into the servers", reload)
        for server, why in zip(self._servers, lost, strict=True):
            server.lost = why
        self._homes.clear()

    def write_weights(self, weights: Weights) -> Path:
        """Write safetensors shards of at most 1 GB, one in memory at a time; remove older folders.

        The folder gets its name when it is complete. It is not flushed: no weights need outlive a
        power cut here, the checkpoints do.
        """
        from safetensors import SafetensorError
        from safetensors.torch import save_file

        sweep(self.weights_dir)
        old = list(self.weights_dir.glob("weights-*"))
        folder = self.weights_dir / f"weights-{time.time_ns()}"
        new = new_folder(folder)
        num_shards = 0
        for num_shards, shard in enumerate(shards(weights), start=1):
            file = new / f"model-{num_shards:05d}.safetensors"
            try:
                save_file(shard, file, metadata={"format": "pt"})
            except SafetensorError as error:
                raise EngineError(f"{file} could not be written: {error}; make room") from error
        if not num_shards:
            raise EngineError("no weights were given")
        self._written = new.rename(folder)
        for path in old:
            shutil.rmtree(path, ignore_errors=True)
        return self._written

    def reload(self, folder: str | Path) -> None:
        """Every server reads `folder` and forgets what it cached of the old weights.

        Servers that were lost are tried again; one that cannot read is left out.
        Raises:
            EngineError: requests are running, a server lacks development mode, or none has read.
        """
        if self._running:
            raise EngineError(
                f"{len(self._running)} requests are running: their tokens would be of old and new "
                "weights; poll or abort them before new weights are loaded"
            )
        list(self._threads.map(lambda server: self._reload_one(server, str(folder)), self._servers))
        self._homes.clear()
        if all(s.lost is not None for s in self._servers):
            last = "\n".join(f"  {s.lost}" for s in self._servers)
            raise EngineError(
                f"no server has read the weights in {folder}; is it there, under this path, on "
                f"every server's machine?\n{last}"
            )

    def _reload_one(self, server: Server, folder: str) -> None:
        try:
            server.reload(folder)
        except ServerFailed as error:
            self._lose(server, str(error))
        else:
            server.lost = None

    def sleep(self) -> None:
        """Nothing: the servers' cards are their own, the update does not need their memory."""

    def close(self) -> None:
        """Hang up and remove the weights that were written; the servers go on."""
        self.abort()
        self._threads.shutdown(wait=False, cancel_futures=True)
        if self._written is not None:
            shutil.rmtree(self._written, ignore_errors=True)


def shards(weights: Weights) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors on the CPU, at most 1 GB at a time; each part is emptied for the next."""
    shard: dict[str, torch.Tensor] = {}
    num_bytes = 0
    for name, tensor in weights:
        size = tensor.numel() * tensor.element_size()
        if shard and num_bytes + size > SHARD_BYTES:
            yield shard
            shard.clear()
            num_bytes = 0
        # A copy: safetensors refuses tensors that share memory, as a tied head does.
        shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        num_bytes += size
    if shard:
        yield shard
