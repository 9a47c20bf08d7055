"""Engines sample: a prompt goes in, sampled token ids and their log-probabilities come out.

An engine has a full copy of the policy's weights. It does not know about trajectories, environments
or rewards. Its interface:

    submit(request_id, prompt_ids, sampling)   add a request and return immediately
    poll() -> [Generation, ...]                do some work, return the finished requests
    load_weights((name, tensor), ...)          replace the weights and clear the cache
    sleep()                                    free memory for the update, until new weights are
                                               loaded

New requests can be added while others run.

The log-probs are those of the distribution that the token was sampled from, after temperature τ:
    log μ(y_t) = log softmax(logits / τ)[y_t]
By default vLLM reports log-probs before temperature, so we set its `logprobs_mode`. Otherwise, for
τ other than 1, the importance ratio π/μ of the first update would silently be far from 1.

`TransformersEngine` is the simple reference: one forward pass per token. In deterministic mode it
samples every sequence separately with a seeded generator. A trajectory then depends only on
(weights, prompt, seed), which tests and exact resume rely on. Training normally uses vLLM in the
same process (`sampling/vllm_engine.py`) or on vLLM servers (`sampling/fleet.py`).

Read next: config.py. `run/worker.py` connects engine, trainer and environments.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from run.errors import EngineError

Weights = Iterable[tuple[str, torch.Tensor]]
Ids = Sequence[int]  # token ids


@dataclass(frozen=True)
class SamplingSettings:
    """Settings for one turn; sampling stops at any of `stop_token_ids` or after `max_tokens`."""

    max_tokens: int
    temperature: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Generation:
    """A finished request: the sampled ids, including the stop token, and their log-probs."""

    request_id: str
    token_ids: list[int]
    log_probs: list[float]
    finish_reason: str  # "stop": a stop token was sampled; "length": max_tokens was reached


class Engine(Protocol):
    """The interface that the rollout loop needs from a sampler.

    `max_open`: maximum number of unfinished trajectories, including those waiting for their
    environment. With more, the cache could lose their tokens between turns. None: no limit.
    """

    num_samplers: int = 1  # with weights of their own; idle ones are used in turn

    @property
    def max_open(self) -> int | None: ...
    @property
    def num_running(self) -> int:
        """Number of requests submitted but not yet returned by `poll`."""

    def submit(self, request_id: str, prompt_ids: Ids, sampling: SamplingSettings) -> None: ...
    def poll(self) -> list[Generation]: ...
    def abort(self) -> None: ...
    def load_weights(self, weights: Weights) -> None: ...
    def sleep(self) -> None: ...
    def close(self) -> None: ...


class TransformersEngine:
    """Plain Hugging Face decoding: batches of left-padded prompts, one forward pass per token.

    `poll` decodes up to `max_batch` waiting requests until they are finished. In deterministic mode
    the batch size is 1: batching changes the order of floating-point sums, which sometimes changes
    a sampled token.
    """

    max_open = 64  # there is no cache, but an environment session that idles too long is closed
    num_samplers = 1

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
        try:
            return self._decode(batch) if batch else []
        except torch.OutOfMemoryError:
            raise  # run/clock.py adds advice
        except RuntimeError as error:
            raise EngineError(f"transformers failed while sampling: {error}") from error

    @torch.no_grad()
    def _decode(self, batch: list[tuple[str, list[int], SamplingSettings]]) -> list[Generation]:
        width = max(len(ids) for _, ids, _ in batch)
        padded = [[0] * (width - len(ids)) + ids for _, ids, _ in batch]
        is_real = [[0] * (width - len(ids)) + [1] * len(ids) for _, ids, _ in batch]
        input_ids = torch.tensor(padded, device=self.device)  # (B, T)
        attention_mask = torch.tensor(is_real, device=self.device)  # (B, T)
        generators = [
            torch.Generator().manual_seed(s.seed if s.seed is not None else time.time_ns())
            for _, _, s in batch
        ]
        tokens: list[list[int]] = [[] for _ in batch]
        log_probs: list[list[float]] = [[] for _ in batch]
        reasons = [""] * len(batch)  # "": not finished
        cache, positions = None, (attention_mask.cumsum(-1) - 1).clamp(min=0)
        while "" in reasons:
            out = self.lm(
                input_ids=input_ids,
                attention_mask=attention_mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            cache, logits = out.past_key_values, out.logits[:, -1].float().cpu()  # (B, V)
            next_ids = []
            for row, (_, _, sampling) in enumerate(batch):
                if reasons[row]:
                    next_ids.append(0)
                    continue
                token, log_prob = sample(logits[row], sampling.temperature, generators[row])
                tokens[row].append(token)
                log_probs[row].append(log_prob)
                next_ids.append(token)
                if token in sampling.stop_token_ids:
                    reasons[row] = "stop"
                elif len(tokens[row]) >= sampling.max_tokens:
                    reasons[row] = "length"
            input_ids = torch.tensor(next_ids, device=self.device)[:, None]  # (B, 1)
            attention_mask = torch.nn.functional.pad(attention_mask, (0, 1), value=1)
            positions = positions[:, -1:] + 1
        return [
            Generation(request_id, tokens[row], log_probs[row], reasons[row])
            for row, (request_id, _, _) in enumerate(batch)
        ]

    def abort(self) -> None:
        self._waiting.clear()

    def load_weights(self, weights: Weights) -> None:
        state = self.lm.state_dict()
        missing = set(state)
        with torch.no_grad():
            for name, tensor in weights:
                if name not in state:
                    raise EngineError(f"weight {name} is not part of the sampler's model")
                state[name].copy_(tensor)
                missing.discard(name)
        if missing:
            raise EngineError(
                f"the sampler has stale weights: {len(missing)} not sent, first: {min(missing)}"
            )

    def sleep(self) -> None:
        """Nothing to free: keys and values exist only during one `poll`."""

    def close(self) -> None:
        self._waiting.clear()


def sample(
    logits: torch.Tensor, temperature: float, generator: torch.Generator
) -> tuple[int, float]:
    """Sample one id from softmax(logits / τ); τ = 0 returns the most probable id.

    Args:
        logits: (V,) float32.
    Returns:
        The id and its log-prob under the distribution that it was sampled from (0.0 if τ = 0,
        because the choice is deterministic).
    Raises:
        EngineError: a logit is NaN or +inf, so there is no distribution.
    """
    if not logits.max().isfinite():  # the maximum is NaN if any logit is; -inf means probability 0
        raise EngineError("the model's logits are not finite: its weights are broken")
    if temperature == 0:
        return int(logits.argmax()), 0.0
    log_probs = (logits / temperature).log_softmax(-1)  # (V,)
    token = int(torch.multinomial(log_probs.exp(), 1, generator=generator))
    return token, float(log_probs[token])
