"""Engines: who turns prompts into sampled token ids.

An engine owns a full copy of the policy's weights and knows nothing of trajectories, environments
or rewards. Token ids go in; token ids and the log-probability each had when it was drawn come out:

    submit(request_id, prompt_ids, sampling)   put a request in; returns at once
    poll() -> [Generation, ...]                work for a moment, return what has finished
    load_weights((name, tensor), ...)          replace the weights, drop what was cached of the old
    sleep()                                    give the memory back for the update; only new weights
                                               wake it

Requests are added while others run: nothing here has rounds.

The log-probs are those of the distribution the token was drawn from, after the temperature τ:
    log μ(y_t) = log softmax(logits / τ)[y_t]
vLLM's default reports the raw ones, before temperature (hence its `logprobs_mode`); for any τ
other than 1 the importance ratio π/μ of the first update would not be near 1, without an error.

`TransformersEngine` is the plain reference: one forward pass per token. In its deterministic mode
every sequence is drawn alone from its own seeded generator, so that a trajectory depends only on
(weights, prompt, seed): tests and exact resume rely on it. Training uses `sampling/vllm_engine.py`,
vLLM inside this process; `sampling/fleet.py` asks vLLM servers elsewhere.

Read next: `run/worker.py`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from run.errors import EngineError

Weights = Iterable[tuple[str, torch.Tensor]]
Ids = Sequence[int]  # of tokens


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
    """What the rollout loop needs of a sampler.

    `max_open`: trajectories that may be open at once, those in their environments included, so that
    what each has said stays in the cache from turn to turn; None: any number.
    """

    @property
    def max_open(self) -> int | None: ...
    @property
    def num_running(self) -> int:
        """Requests submitted and not yet returned by `poll`."""

    def submit(self, request_id: str, prompt_ids: Ids, sampling: SamplingSettings) -> None: ...
    def poll(self) -> list[Generation]: ...
    def abort(self) -> None: ...
    def load_weights(self, weights: Weights) -> None: ...
    def sleep(self) -> None: ...
    def close(self) -> None: ...


class TransformersEngine:
    """Plain Hugging Face decoding: batches of left-padded prompts, one forward pass a token.

    `poll` takes up to `max_batch` waiting requests and decodes them to the end. In deterministic
    mode each is decoded alone: batching changes the order of floating-point sums, and with it, now
    and then, a token.
    """

    max_open = 64  # nothing is kept between turns; but who waits long for a turn loses its session

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
            raise  # whose advice is clock.py's
        except RuntimeError as error:
            raise EngineError(f"transformers failed in a step: {error}") from error

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
        reasons = [""] * len(batch)  # "": not ended
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
            chosen = []
            for row, (_, _, sampling) in enumerate(batch):
                if reasons[row]:
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
            Generation(request_id, tokens[row], log_probs[row], reasons[row])
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

    def close(self) -> None:
        self._waiting.clear()


def sample(
    logits: torch.Tensor, temperature: float, generator: torch.Generator
) -> tuple[int, float]:
    """Draw one id from softmax(logits / τ); τ = 0 takes the most probable one.

    Args:
        logits: (V,) float32.
    Returns:
        The id and its log-prob under the distribution it was drawn from (0.0 when τ = 0: there was
        no choice).
    Raises:
        EngineError: a logit is NaN or infinite: there is no distribution.
    """
    if not logits.max().isfinite():  # NaN anywhere makes the largest NaN; -inf is probability 0
        raise EngineError("the model's logits are not finite: its weights are broken")
    if temperature == 0:
        return int(logits.argmax()), 0.0
    log_probs = (logits / temperature).log_softmax(-1)  # (V,)
    token = int(torch.multinomial(log_probs.exp(), 1, generator=generator))
    return token, float(log_probs[token])
