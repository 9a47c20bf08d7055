"""vLLM as an `Engine`, in the trainer's process: continuous batching and a prefix cache.

The rollout loop calls vLLM's `step()` directly, so requests can start and end between any two
tokens. On a GPU, sampler and trainer share the memory. The sampler sleeps during the update and
wakes in two stages, so that gathered weights and the cache never need memory at the same time:

    call              weights            cache
    sleep             --                 --           the trainer can use the memory
    wake "weights"    garbage            --
    load              new weights        --           one parameter at a time, from all ranks
    wake "kv_cache"   new weights        empty        sampling continues

NOTE: from `sleep` until the end of `wake "kv_cache"` vLLM would silently sample noise.
Therefore `submit` refuses requests during that time.

Read next: `scale/sync.py`; `sampling/fleet.py` for vLLM on other GPUs.
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
from run.progress import phase
from scale.default_models import model_config
from scale.memory import SEQUENCES, cpu_cache_bytes, shape_of

# Tokens per block of keys and values. Only full blocks are cached for the next turn: with vLLM's
# default of 128, each turn would recompute 64 tokens on average to sample 30 new ones. Below 32,
# vLLM's kernels are slow.
CPU_BLOCK = 32


class VLLMEngine:
    """vLLM in this process. Earlier turns are cached, so a turn computes only its new tokens.

    `SamplingSettings.seed` is ignored, because a seed cannot make a vLLM run repeatable: timing
    decides which requests share a batch, and that changes the last bits of the logits. The engine
    has its own `seed`, so that runs differ from each other.

    Args:
        model_path: Hugging Face checkpoint with the initial weights.
        max_model_len: longest trajectory in tokens, including the prompt.
        enforce_eager: do not compile: a CPU starts a minute sooner, but runs a quarter slower.
    Raises:
        EngineError: vLLM is not installed or does not start.
    """

    num_samplers = 1

    def __init__(
        self,
        model_path: str,
        max_model_len: int,
        dtype: str = "bfloat16",
        max_num_seqs: int = SEQUENCES,
        gpu_memory_utilization: float = 0.5,
        seed: int = 0,
        enforce_eager: bool = False,
    ) -> None:
        self._on_gpu = torch.cuda.is_available()
        # vLLM reads these at import: run the engine core in this process, no log, no usage reports.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        options: dict[str, Any] = {}
        if not self._on_gpu:
            # Do not pin threads: the trainer in this process would be pinned to the same cores.
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
            shape = shape_of(model_path, model_config(model_path))
            num_bytes = cpu_cache_bytes(shape, max_model_len, max_num_seqs, dtype)
            options |= {"block_size": CPU_BLOCK, "kv_cache_memory_bytes": num_bytes}
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            # One engine per process, on that process's GPU; by default vLLM uses the first GPU.
            options["distributed_executor_backend"] = "external_launcher"
        clock.release_memory()  # left over from a warm start in this process
        compiling = "" if enforce_eager else "vLLM compiles the model, for one to two minutes"
        hint = "`make setup` installs vLLM; --engine transformers works without it"
        failure = f"vLLM did not start with {model_path} ({hint})"
        with _engine_error(failure), phase(compiling), _quiet():
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
        self._params, self._final_only = SamplingParams, RequestOutputKind.FINAL_ONLY
        cache = self._llm.llm_engine.vllm_config.cache_config
        # The number of full-length trajectories that fit in the cache; most are shorter.
        self.max_open = max(max_num_seqs, int(cache.kv_cache_max_concurrency or 0))
        self._running: set[str] = set()
        self._is_asleep = False
        self._has_weights = True  # False from sleep() until all new weights are loaded

    @property
    def num_running(self) -> int:
        return len(self._running)

    def submit(self, request_id: str, prompt_ids: Ids, sampling: SamplingSettings) -> None:
        if not self._has_weights:
            raise EngineError(
                f"vLLM has no weights to sample {request_id} with: it is asleep, or loading failed"
            )
        prompt = {"prompt_token_ids": list(prompt_ids)}
        with _engine_error(f"vLLM refused request {request_id}"):
            params = self._params(
                max_tokens=sampling.max_tokens,
                temperature=sampling.temperature,
                stop_token_ids=list(sampling.stop_token_ids),
                logprobs=0,  # only of the sampled token
                flat_logprobs=True,  # lists of numbers instead of a dict per token
                detokenize=False,
                output_kind=self._final_only,
                skip_clone=True,
            )
            self._llm.llm_engine.add_request(request_id, prompt, params)
        self._running.add(request_id)

    def poll(self) -> list[Generation]:
        """Run one engine step: one token for every running request, or part of a prefill. Returns
        the requests that finished."""
        if not self._running:
            return []
        with _engine_error("vLLM failed in a step"):
            outputs = self._llm.llm_engine.step()
        generations = []
        for output in outputs:
            if not output.finished:
                continue
            self._running.discard(output.request_id)
            sample = output.outputs[0]
            ids, log_probs = list(sample.token_ids), list(sample.logprobs.logprobs)
            if sample.finish_reason not in ("stop", "length") or not ids:
                raise EngineError(f"vLLM ended {output.request_id} with {sample.finish_reason}")
            generations.append(Generation(output.request_id, ids, log_probs, sample.finish_reason))
        return generations

    def abort(self) -> None:
        """Drop every running request."""
        self._llm.llm_engine.abort_request(list(self._running))
        self._running.clear()

    def load_weights(self, weights: Weights) -> None:
        """Replace the weights in place and wake a sleeping engine. No request may be running.

        NOTE: `weights` must contain every name of the state dict. A tied output head whose name is
        missing silently keeps its old values (log-probs were off by 0.02 to 1.9 nats).

        Raises:
            EngineError: vLLM rejects the weights, or runs out of memory.
        """
        self._has_weights = False
        with _engine_error("vLLM failed to load the new weights"):
            if self._is_asleep:
                clock.release_memory()
                self._llm.wake_up(tags=["weights"])
            stream = {"weights_iterator": iter(weights)}
            self._llm.llm_engine.collective_rpc("reload_weights", kwargs=stream)
            if self._is_asleep:
                self._llm.wake_up(tags=["kv_cache"])
            self._is_asleep, clock.asleep_bytes = False, 0
            if self._llm.reset_prefix_cache() is False:
                raise EngineError("a running request uses keys and values of the old weights")
        self._has_weights = True

    def sleep(self) -> None:
        """Free the GPU's memory for the update, including the weights: new ones will be loaded.
        Does nothing on a CPU. No request may be running: vLLM would drop it silently.
        """
        if self._on_gpu and not self._is_asleep:
            self._is_asleep, self._has_weights = True, False
            clock.release_memory()  # first, so that the difference below is only the sampler's
            free, _ = torch.cuda.mem_get_info()
            # vLLM asserts that free memory grew; this fails if another process takes it first.
            with _engine_error("vLLM cannot free its memory"):
                self._llm.sleep(level=2)
            clock.asleep_bytes = max(torch.cuda.mem_get_info()[0] - free, 0)

    def close(self) -> None:
        """Shut vLLM down now. The garbage collector would do it later and destroy the process
        groups of the next engine ("... group is not initialized")."""
        self._llm.llm_engine.engine_core.shutdown()
        del self._llm
        clock.asleep_bytes = 0


@contextlib.contextmanager
def _engine_error(message: str) -> Iterator[None]:
    """Turn any exception into an EngineError; vLLM's exceptions have no common base class."""
    try:
        yield
    except Exception as error:
        raise EngineError(f"{message}: {str(error) or repr(error)}") from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hide output to stderr, even of C++ code; print its end if the block fails."""
    stderr = os.dup(2)
    with tempfile.TemporaryFile() as output:
        os.dup2(output.fileno(), 2)
        try:
            yield
        except BaseException:
            output.seek(0)
            os.write(stderr, output.read()[-4000:])
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)


def make_engine(
    kind: str, model_path: str, max_model_len: int, deterministic: bool = False, **options: Any
) -> Engine:
    """Start the sampler named by `--engine`; `deterministic` needs "transformers"."""
    if kind == "vllm":
        return VLLMEngine(model_path, max_model_len, **options)
    # float32 on a CPU, as the reference; on a GPU the dtype that vLLM would use.
    on_gpu = torch.cuda.is_available() and not deterministic
    dtype = getattr(torch, options.get("dtype", "bfloat16"))
    return TransformersEngine(
        model_path,
        dtype=dtype if on_gpu else torch.float32,
        deterministic=deterministic,
        device="cuda" if on_gpu else "cpu",
    )
