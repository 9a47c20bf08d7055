"""Engines: who turns prompts into sampled token ids.

An engine owns a full copy of the policy's weights and knows nothing of trajectories, environments
or rewards. Token ids go in; token ids and the log-probability each had when it was drawn come out:

    submit(request_id, prompt_ids, sampling)   put a request in; returns at once
    poll() -> [Generation, ...]                work for a moment, return what has finished
    load_weights((name, tensor), ...)          replace the weights, drop what was cached of the old
    sleep() / wake()                           give the memory back for the update / take it again

Requests are added while others run: nothing here has rounds.

The log-probs are those of the distribution the token was drawn from, after the temperature τ:
    log μ(y_t) = log softmax(logits / τ)[y_t]
vLLM's default reports the raw ones, before temperature (hence `logprobs_mode` below); for any τ
other than 1 the importance ratio π/μ of the first update would not be near 1, without an error.

`VLLMEngine` runs vLLM inside this process, its `step()` called by our loop. `TransformersEngine` is
the plain reference: one forward a token, readable from top to bottom. Its deterministic mode draws
every sequence alone from its own seeded generator, so that a trajectory depends on nothing but
(weights, prompt, seed): tests and exact resume stand on it.

Read next: `rollout.py`, the loop that feeds an engine.
"""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

Weights = Iterable[tuple[str, torch.Tensor]]
Ids = Sequence[int]  # of tokens


class EngineError(RuntimeError):
    """The sampler failed; the training step cannot go on."""


@dataclass(frozen=True)
class SamplingSettings:
    """How a turn is sampled: `max_tokens` ids at most, at τ, ended by any of `stop_token_ids`."""

    max_tokens: int
    temperature: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Generation:
    """A finished request: sampled ids (the stop token too), the log-prob of each, why it ended."""

    request_id: str
    token_ids: list[int]
    log_probs: list[float]
    finish_reason: str  # "stop": a stop token was sampled; "length": max_tokens ran out


class Engine(Protocol):
    """What the rollout loop needs of a sampler."""

    @property
    def num_running(self) -> int:
        """Requests submitted and not yet returned by `poll`."""

    def submit(self, request_id: str, prompt_ids: Ids, sampling: SamplingSettings) -> None: ...
    def poll(self) -> list[Generation]: ...
    def abort(self) -> None: ...
    def load_weights(self, weights: Weights) -> None: ...
    def sleep(self) -> None: ...
    def wake(self) -> None: ...
    def close(self) -> None: ...


class VLLMEngine:
    """vLLM in this process: continuous batching and a prefix cache: a turn pays for new tokens.

    `SamplingSettings.seed` is not used: which requests share a batch depends on timing, and with it
    the last bits of the logits, so that no seed makes a vLLM run repeatable. The engine's own
    `seed` makes runs differ from each other; `--deterministic` is the mode that repeats.

    Args:
        model_path: Hugging Face checkpoint; its weights are the first ones served.
        max_model_len: longest trajectory in tokens, the prompt included.
        dtype: "bfloat16" or "float32".
        kv_cache_bytes: memory for keys and values; on a GPU None lets vLLM take
            `gpu_memory_utilization`.
    Raises:
        EngineError: vLLM is not installed or does not start.
    """

    def __init__(
        self,
        model_path: str,
        max_model_len: int,
        dtype: str = "bfloat16",
        max_num_seqs: int = 64,
        kv_cache_bytes: int | None = None,
        gpu_memory_utilization: float = 0.5,
        seed: int = 0,
    ) -> None:
        on_gpu = torch.cuda.is_available()
        # Read by vLLM at its import: the engine core in this process, no chatter, no reports.
        os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "CRITICAL")
        os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
        if not on_gpu:
            # Thread pinning would leave the trainer, which shares this process, on vLLM's cores.
            os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
            kv_cache_bytes = kv_cache_bytes or 2 << 30
        try:
            with _quiet():
                from vllm import LLM, SamplingParams
                from vllm.sampling_params import RequestOutputKind
        except ImportError as error:
            raise EngineError(
                f"vLLM cannot be imported ({error}); run `make setup`, or use --engine transformers"
            ) from error
        self._params, self._final_only = SamplingParams, RequestOutputKind.FINAL_ONLY
        options: dict[str, Any] = (
            {"kv_cache_memory_bytes": kv_cache_bytes} if kv_cache_bytes else {}
        )
        if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
            # One engine per process, on that process's card; by itself vLLM takes the first card.
            options["distributed_executor_backend"] = "external_launcher"
        try:
            with _quiet():
                self._llm = LLM(
                    model=model_path,
                    dtype=dtype,
                    max_model_len=max_model_len,
                    max_num_seqs=max_num_seqs,
                    gpu_memory_utilization=gpu_memory_utilization,
                    enable_prefix_caching=True,
                    logprobs_mode="processed_logprobs",
                    enable_sleep_mode=on_gpu,
                    seed=seed,
                    disable_log_stats=True,
                    **options,
                )
        except Exception as error:
            raise EngineError(f"vLLM did not start with {model_path}: {error}") from error
        self._running: set[str] = set()
        self._asleep = False

    @property
    def num_running(self) -> int:
        return len(self._running)

    def submit(self, request_id: str, prompt_ids: Ids, sampling: SamplingSettings) -> None:
        params = self._params(
            max_tokens=sampling.max_tokens,
            temperature=sampling.temperature,
            stop_token_ids=list(sampling.stop_token_ids),
            logprobs=0,  # of the sampled token alone
            detokenize=False,
            output_kind=self._final_only,
        )
        try:
            self._llm.llm_engine.add_request(
                request_id, {"prompt_token_ids": list(prompt_ids)}, params
            )
        except Exception as error:  # vLLM's own classes share no base
            raise EngineError(f"vLLM refused request {request_id}: {error}") from error
        self._running.add(request_id)

    def poll(self) -> list[Generation]:
        """One engine step: one token for every running request, or a piece of a prefill."""
        if not self._running:
            return []
        try:
            outputs = self._llm.llm_engine.step()
        except Exception as error:
            raise EngineError(f"vLLM failed in a step: {error}") from error
        finished = []
        for output in outputs:
            if not output.finished:
                continue
            self._running.discard(output.request_id)
            best = output.outputs[0]
            ids = list(best.token_ids)
            log_probs = [
                entry[i].logprob for entry, i in zip(best.logprobs or [], ids, strict=True)
            ]
            finished.append(
                Generation(output.request_id, ids, log_probs, best.finish_reason or "length")
            )
        return finished

    def abort(self) -> None:
        """Drop every running request (after an error or Ctrl-C)."""
        self._llm.llm_engine.abort_request(list(self._running))
        self._running.clear()

    def load_weights(self, weights: Weights) -> None:
        """Replace the weights in place.

        NOTE: `weights` must hold every name of the state dict, the tied output head included.
        Without its name a tied head stays as it was, and there is no error (log-probs were off by
        0.02 to 1.9 nats); the trainer therefore also compares log-probs after each sync.
        """
        self._llm.llm_engine.collective_rpc(
            "reload_weights", kwargs={"weights_iterator": iter(weights)}
        )
        self._llm.reset_prefix_cache()  # keys and values of the old weights

    def sleep(self) -> None:
        """Free the GPU for the update, the weights too: new ones come anyway. CPU: nothing."""
        if torch.cuda.is_available() and not self._asleep:
            self._llm.sleep(level=2)
            self._asleep = True

    def wake(self) -> None:
        if self._asleep:
            self._llm.wake_up()
            self._asleep = False

    def close(self) -> None:
        self._running.clear()
        if self._llm is not None:
            # NOTE: dropping the reference is not enough: collected later, vLLM shuts down then,
            # and with it the process groups of the next engine ("... group is not initialized").
            self._llm.llm_engine.engine_core.shutdown()
        self._llm = None


class TransformersEngine:
    """Plain Hugging Face decoding: batches of left-padded prompts, one forward pass a token.

    `poll` takes up to `max_batch` waiting requests and decodes them to the end. In deterministic
    mode each is decoded alone: batching changes the order of floating-point sums, and with it, now
    and then, a token.
    """

    def __init__(
        self,
        model_path: str,
        dtype: torch.dtype = torch.float32,
        deterministic: bool = False,
        max_batch: int = 32,
        device: str = "cpu",
    ) -> None:
        from models import load_causal_lm

        self.lm = load_causal_lm(model_path, dtype).to(device).eval()
        self.device, self.max_batch = device, 1 if deterministic else max_batch
        self._waiting: list[tuple[str, list[int], SamplingSettings]] = []

    @property
    def num_running(self) -> int:
        return len(self._waiting)

    def submit(self, request_id: str, prompt_ids: Ids, sampling: SamplingSettings) -> None:
        self._waiting.append((request_id, list(prompt_ids), sampling))

    def poll(self) -> list[Generation]:
        batch, self._waiting = self._waiting[: self.max_batch], self._waiting[self.max_batch :]
        return self._decode(batch) if batch else []

    @torch.no_grad()
    def _decode(self, batch: list[tuple[str, list[int], SamplingSettings]]) -> list[Generation]:
        width = max(len(ids) for _, ids, _ in batch)
        input_ids = torch.tensor(
            [[0] * (width - len(ids)) + ids for _, ids, _ in batch], device=self.device
        )  # (B, T)
        attention_mask = torch.tensor(
            [[0] * (width - len(ids)) + [1] * len(ids) for _, ids, _ in batch]
        )
        attention_mask = attention_mask.to(self.device)  # (B, T)
        generators = [
            torch.Generator().manual_seed(s.seed if s.seed is not None else time.time_ns())
            for _, _, s in batch
        ]
        tokens: list[list[int]] = [[] for _ in batch]
        log_probs: list[list[float]] = [[] for _ in batch]
        reasons: list[str | None] = [None] * len(batch)
        cache, positions = None, (attention_mask.cumsum(-1) - 1).clamp(min=0)
        while None in reasons:
            out = self.lm(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache, logits = out.past_key_values, out.logits[:, -1].float().cpu()  # (B, V)
            chosen = []
            for row, (_, _, sampling) in enumerate(batch):
                if reasons[row] is not None:
                    chosen.append(0)
                    continue
                token, log_prob = sample(logits[row], sampling.temperature, generators[row])
                tokens[row].append(token)
                log_probs[row].append(log_prob)
                chosen.append(token)
                if token in sampling.stop_token_ids:
                    reasons[row] = "stop"
                elif len(tokens[row]) >= sampling.max_tokens:
                    reasons[row] = "length"
            input_ids = torch.tensor(chosen, device=self.device)[:, None]  # (B, 1)
            attention_mask = torch.nn.functional.pad(attention_mask, (0, 1), value=1)
            positions = positions[:, -1:] + 1
        return [
            Generation(request_id, tokens[row], log_probs[row], reasons[row] or "length")
            for row, (request_id, _, _) in enumerate(batch)
        ]

    def abort(self) -> None:
        self._waiting.clear()

    def load_weights(self, weights: Weights) -> None:
        own = self.lm.state_dict()
        missing = set(own)
        with torch.no_grad():
            for name, tensor in weights:
                if name not in own:
                    raise EngineError(f"weight {name} is not part of the sampler's model")
                own[name].copy_(tensor)
                missing.discard(name)
        if missing:
            raise EngineError(
                f"weights left stale, {len(missing)} not sent, first: {sorted(missing)[0]}"
            )

    def sleep(self) -> None:
        """Nothing to free: keys and values live only inside one `poll`."""

    def wake(self) -> None:
        """Nothing to take back."""

    def close(self) -> None:
        self._waiting.clear()


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hold back what a library's start writes to stderr, C++ included; show it if it fails."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException:
            held.seek(0)
            os.write(kept, held.read()[-4000:])
            raise
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)


def sample(
    logits: torch.Tensor, temperature: float, generator: torch.Generator
) -> tuple[int, float]:
    """Draw one id from softmax(logits / τ); τ = 0 takes the most probable one.

    Args:
        logits: (V,) float32.
    Returns:
        The id and its log-prob under the distribution it was drawn from (0.0 when τ = 0: there was
        no choice).
    """
    if temperature == 0:
        return int(logits.argmax()), 0.0
    log_probs = (logits / temperature).log_softmax(-1)  # (V,)
    token = int(torch.multinomial(log_probs.exp(), 1, generator=generator))
    return token, float(log_probs[token])


def make_engine(
    kind: str, model_path: str, max_model_len: int, deterministic: bool = False, **options: Any
) -> Engine:
    """`vllm` or `transformers` -> a running engine; `deterministic` needs `transformers`."""
    if deterministic and kind != "transformers":
        raise ValueError(
            "--deterministic needs --engine transformers: vLLM's batches depend on timing"
        )
    if kind == "vllm":
        return VLLMEngine(model_path, max_model_len, **options)
    if kind == "transformers":
        # TransformersEngine is the float32 reference on a CPU; on a GPU it samples in bfloat16.
        on_gpu = torch.cuda.is_available() and not deterministic
        return TransformersEngine(
            model_path,
            dtype=torch.bfloat16 if on_gpu else torch.float32,
            deterministic=deterministic,
            device="cuda" if on_gpu else "cpu",
        )
    raise ValueError(f"--engine {kind} is unknown; use vllm or transformers")
