"""vLLM as an `Engine`, in the trainer's own process: continuous batching and a prefix cache.

The rollout loop calls vLLM's `step()` itself, so requests come and go between any two tokens. On a
GPU sampler and trainer share the card: the sampler sleeps during the update and wakes in two parts,
so that gathering new weights and the cache never need memory at the same time:

    sleep             --                 --           the card is the trainer's
    wake "weights"    garbage            --
    load              new weights        --           one parameter at a time, from all ranks
    wake "kv_cache"   new weights        empty        sampling goes on

NOTE: between the first and the last line vLLM would answer noise, without an error, so requests are
refused until weights have come. Read next: `scale/sync.py`; `sampling/fleet.py`, vLLM elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import torch

from engines import (
    Engine,
    EngineError,
    Generation,
    Ids,
    SamplingSettings,
    TransformersEngine,
    Weights,
)
from run import clock
from scale.default_models import model_config
from scale.memory import SEQUENCES, cpu_cache_bytes, shape_of

# Tokens in a block of keys and values; only full blocks are kept for the next turn. vLLM's default
# of 128 would read 64 tokens again per turn, where a turn writes 30; below 32 its kernels are slow.
CPU_BLOCK = 32


class VLLMEngine:
    """vLLM in this process: a turn costs only its new tokens.

    `SamplingSettings.seed` is not used: the batch a request lands in depends on timing, and with it
    the last bits of the logits, so no seed makes a vLLM run repeatable. The engine's own `seed`
    makes runs differ from each other.

    Args:
        model_path: Hugging Face checkpoint; its weights are the first ones served.
        max_model_len: longest trajectory in tokens, the prompt included.
        kv_cache_bytes: on a GPU None lets vLLM take `gpu_memory_utilization`.
        enforce_eager: start without compiling: a minute sooner on a CPU, and a quarter slower.
    Raises:
        EngineError: vLLM is not installed or does not start.
    """

    def __init__(
        self,
        model_path: str,
        max_model_len: int,
        dtype: str = "bfloat16",
        max_num_seqs: int = SEQUENCES,
        kv_cache_bytes: int | None = None,
        gpu_memory_utilization: float = 0.5,
        seed: int = 0,
        enforce_eager: bool = False,
    ) -> None:
        self._on_gpu = torch.cuda.is_available()
        # Read by vLLM at its import: the engine core in this process, no log, no reports.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        options: dict[str, Any] = {}
        if not self._on_gpu:
            # Pinned threads would keep the trainer, in the same process, on vLLM's cores.
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
            shape = shape_of(model_path, model_config(model_path) or {})
            kv_cache_bytes = kv_cache_bytes or cpu_cache_bytes(
                shape, max_model_len, max_num_seqs, dtype
            )
            options["block_size"] = CPU_BLOCK
        if kv_cache_bytes:
            options["kv_cache_memory_bytes"] = kv_cache_bytes
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            # One engine per process, on that process's card; vLLM's default is the first card.
            options["distributed_executor_backend"] = "external_launcher"
        clock.return_freed()  # by a warm start in this process
        try:
            with _quiet():
                from vllm import LLM, SamplingParams
                from vllm.sampling_params import RequestOutputKind

                self._llm = LLM(
                    model=model_path,
                    dtype=dtype,
                    max_model_len=max_model_len,
                    max_num_seqs=max_num_seqs,
                    gpu_memory_utilization=gpu_memory_utilization,
                    enable_prefix_caching=True,
                    logprobs_mode="processed_logprobs",
                    enable_sleep_mode=self._on_gpu,
                    seed=seed,
                    enforce_eager=enforce_eager,
                    disable_log_stats=True,
                    **options,
                )
        except ImportError as error:
            raise EngineError(
                f"vLLM cannot be imported ({error}); run `make setup`, or use --engine transformers"
            ) from error
        except Exception as error:
            raise EngineError(f"vLLM did not start with {model_path}: {error}") from error
        self._params, self._final_only = SamplingParams, RequestOutputKind.FINAL_ONLY
        cache = self._llm.llm_engine.vllm_config.cache_config
        # What the cache holds at full length, which few trajectories reach.
        self.max_open = max(max_num_seqs, int(cache.kv_cache_max_concurrency or 0))
        self._running: set[str] = set()
        self._is_asleep = False
        self._has_weights = True  # False from sleep() until new ones have come in full

    @property
    def num_running(self) -> int:
        return len(self._running)

    def submit(self, request_id: str, prompt_ids: Ids, sampling: SamplingSettings) -> None:
        if not self._has_weights:
            raise EngineError(f"vLLM has no weights for {request_id}: it slept, or loading failed")
        params = self._params(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            stop_token_ids=list(sampling.stop_token_ids),
            logprobs=0,  # of the sampled token alone
            flat_logprobs=True,  # lists of numbers, not a dict per token
            detokenize=False,
            output_kind=self._final_only,
            skip_clone=True,
        )
        prompt = {"prompt_token_ids": list(prompt_ids)}
        with _engine_error(f"vLLM refused request {request_id}"):
            self._llm.llm_engine.add_request(request_id, prompt, params)
        self._running.add(request_id)

    def poll(self) -> list[Generation]:
        """One engine step: one token for every running request, or a piece of a prefill."""
        if not self._running:
            return []
        with _engine_error("vLLM failed in a step"):
            outputs = self._llm.llm_engine.step()
        finished = []
        for output in outputs:
            if not output.finished:
                continue
            self._running.discard(output.request_id)
            best = output.outputs[0]
            ids, log_probs = list(best.token_ids), list(best.logprobs.logprobs)
            if best.finish_reason not in ("stop", "length") or not ids:
                raise EngineError(f"{output.request_id}: vLLM ended it with {best.finish_reason}")
            finished.append(Generation(output.request_id, ids, log_probs, best.finish_reason))
        return finished

    def abort(self) -> None:
        """Drop every running request."""
        self._llm.llm_engine.abort_request(list(self._running))
        self._running.clear()

    def load_weights(self, weights: Weights) -> None:
        """Replace the weights in place; a sleeping engine wakes. No request may be running.

        NOTE: `weights` must hold every name of the state dict. A tied output head that is missing
        stays as it was, without an error (log-probs were off by 0.02 to 1.9 nats).

        Raises:
            EngineError: vLLM does not take the weights, or has no memory.
        """
        self._has_weights = False
        with _engine_error("vLLM did not take the new weights"):
            if self._is_asleep:
                clock.return_freed()
                self._llm.wake_up(tags=["weights"])
            stream = {"weights_iterator": iter(weights)}
            self._llm.llm_engine.collective_rpc("reload_weights", kwargs=stream)
            if self._is_asleep:
                self._llm.wake_up(tags=["kv_cache"])
            self._is_asleep, clock.asleep_bytes = False, 0
            if self._llm.reset_prefix_cache() is False:
                raise EngineError("keys and values of the old weights are in use")
        self._has_weights = True

    def sleep(self) -> None:
        """Free the GPU for the update, the weights too: new ones come anyway. CPU: nothing.

        No request may be running: vLLM would drop it silently.
        """
        if self._on_gpu and not self._is_asleep:
            self._is_asleep, self._has_weights = True, False
            clock.return_freed()  # vLLM does so too; now the difference below is the sampler's
            free, _ = torch.cuda.mem_get_info()
            # vLLM asserts that memory became free: another process may have taken it meanwhile.
            with _engine_error("vLLM cannot give its memory back"):
                self._llm.sleep(level=2)
            clock.asleep_bytes = max(torch.cuda.mem_get_info()[0] - free, 0)

    def close(self) -> None:
        """End vLLM. Left to the garbage collector, it would shut down the process groups of the
        next engine ("... group is not initialized")."""
        self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        clock.asleep_bytes = 0


@contextlib.contextmanager
def _engine_error(what: str) -> Iterator[None]:
    """vLLM's own exceptions share no base class."""
    try:
        yield
    except Exception as error:
        raise EngineError(f"{what}: {str(error) or repr(error)}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide what a library writes to stderr, C++ included; show it if the block fails."""
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException:
            held.seek(0)
            os.write(stderr, held.read()[-4000:])
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


def make_engine(
    kind: str, model_path: str, max_model_len: int, deterministic: bool = False, **options: Any
) -> Engine:
    """`--engine`'s sampler, running; `deterministic` needs "transformers"."""
    if kind == "vllm":
        return VLLMEngine(model_path, max_model_len, **options)
    # The float32 reference on a CPU; on a GPU it samples as vLLM would.
    on_gpu = torch.cuda.is_available() and not deterministic
    dtype = getattr(torch, options.get("dtype", "bfloat16"))
    return TransformersEngine(
        model_path,
        dtype=dtype if on_gpu else torch.float32,
        deterministic=deterministic,
        device="cuda" if on_gpu else "cpu",
    )
