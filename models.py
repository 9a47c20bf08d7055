"""The networks: a policy that scores tokens, and a critic that scores states.

A policy π_θ is a causal language model. Training asks it only how probable each sampled token was,
and how uncertain the policy was there. `PolicyModel.forward` answers exactly that

    log_probs[b, t] = log π_θ(input_ids[b, t] | input_ids[b, <t])
                    = log softmax(logits[b, t-1] / τ)[input_ids[b, t]]

for the tokens with loss_mask 1, with τ the temperature the sampler used, and 0 everywhere else. In
a multi-turn trajectory most tokens are prompts and observations, so the output head, the largest
matrix of a small model (28M of SmolLM2's 135M parameters), runs on policy tokens alone.

The critic of PPO is the same architecture with a value head: values[b, t] = V(state before token
t), read from the hidden state at t-1, so that it does not see the token it is the baseline of.

Shapes: B rows (trajectories), T tokens (padded on the right), H hidden size, V vocabulary, N policy
tokens in the batch. Read next: `engines.py`.
"""

from __future__ import annotations

import copy
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint

from losses import entropy_from_logits

# Logits that exist at a time, in bytes. On a CPU few enough for the C library to keep the buffer:
# a larger one goes back to the kernel and is faulted in again, page by page, at every use.
HEAD_BYTES = {"cpu": 24 << 20}
TREE = "tree"  # the name of tree_attention among a model's attention implementations
MAX_GAP = 0.01  # nats between two ways to score a token; in float32 they agree to 1e-5
NOT_PLAIN = ("sliding_window", "softcap", "s_aux")  # what some models' layers hand to attention


class PolicyModel(nn.Module):
    """A causal LM that returns log-probs and entropies of the policy's own tokens.

    It wraps the whole model, head included, in one `forward`, so that a sharding wrapper around it
    (FSDP) sees a single root whose parameters are gathered before any of them is used.
    """

    def __init__(self, lm: Any, share_prefix: bool = True) -> None:
        """Args: share_prefix: packed rows will come; the model's own attention is replaced."""
        from transformers import AttentionInterface

        super().__init__()
        if share_prefix:
            AttentionInterface.register(TREE, tree_attention)
            lm.set_attn_implementation(TREE)
        self.lm = lm

    def forward(
        self,
        input_ids: torch.Tensor,
        loss_mask: torch.Tensor,
        temperature: float = 1.0,
        position_ids: torch.Tensor | None = None,
        parts: tuple[int, ...] | None = None,
        source: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probs and entropies of the tokens with loss_mask 1.

        Args:
            input_ids: (B, T) int64, padded on the right with any id. A causal model never looks to
                the right, so padding needs no attention mask.
            loss_mask: (B, T) 1 on tokens the policy sampled; column 0 must be 0 (nothing predicts
                it).
            temperature: the sampler's τ > 0.
            position_ids, parts, source: of a packed row, see `scale/prefix.py`; without them
                positions are 0..T-1, attention is causal and token t is predicted from t-1.
        Returns:
            log_probs (B, T) float32 and entropy (B, T) float32 in nats, both 0 where loss_mask is
            0.
        """
        packed = {} if parts is None else {"position_ids": position_ids, "parts": parts}
        if packed and self.lm.config._attn_implementation != TREE:
            raise ValueError("a packed row needs a PolicyModel made with share_prefix=True")
        out = self.lm.base_model(input_ids=input_ids, use_cache=False, **packed)
        hidden = out.last_hidden_state  # (B, T, H)
        chosen = loss_mask.bool()  # (B, T)
        rows, columns = chosen.nonzero(as_tuple=True)  # (N,) each
        before = columns - 1 if source is None else source[rows, columns]
        states, targets = hidden[rows, before], input_ids[rows, columns]  # (N, H), (N,)
        vocabulary = self.lm.config.vocab_size  # V
        chunk = max(1, HEAD_BYTES.get(hidden.device.type, 512 << 20) // (4 * vocabulary))
        pieces = [
            checkpoint(self._score, h, y, temperature, use_reentrant=False)
            if torch.is_grad_enabled()
            else self._score(h, y, temperature)
            for h, y in zip(states.split(chunk), targets.split(chunk), strict=True)
        ]
        shape, device = input_ids.shape, input_ids.device
        log_probs = torch.zeros(shape, dtype=torch.float32, device=device)  # (B, T)
        entropy = torch.zeros_like(log_probs)
        if len(states):
            log_probs = log_probs.masked_scatter(chosen, torch.cat([p[0] for p in pieces]))
            entropy = entropy.masked_scatter(chosen, torch.cat([p[1] for p in pieces]))
        return log_probs, entropy

    def _score(
        self, states: torch.Tensor, targets: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(N, H), (N,) -> log-prob and entropy of each target, (N,) float32; logits live here."""
        logits = final_logits(self.lm.config, self.lm.get_output_embeddings()(states).float())
        logits = logits / temperature  # (N, V)
        log_probs = logits.gather(-1, targets[:, None]).squeeze(-1) - logits.logsumexp(-1)  # (N,)
        return log_probs, entropy_from_logits(logits)


def final_logits(config: Any, logits: torch.Tensor) -> torch.Tensor:
    """What some families do to the output head's logits: Granite divides them, Cohere multiplies
    them, Gemma caps them softly. `check_scores` refuses a model that does something else."""
    if scale := getattr(config, "logits_scaling", None):
        logits = logits / scale
    if scale := getattr(config, "logit_scale", None):
        logits = logits * scale
    if cap := getattr(config, "final_logit_softcapping", None):
        logits = cap * torch.tanh(logits / cap)
    return logits


def tree_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    parts: tuple[int, ...] | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention, in a packed row along a tree: what a layer of the model calls, through
    transformers' AttentionInterface.

    A packed row (scale/prefix.py) is an opening P and the samples that go on from it. One
    attention for P and one for each sample over (P, itself) are each of a shape that
    scaled_dot_product_attention has a fast kernel for; a mask over the whole row would cost L².

    Args:
        query: (1, A, L, D), A heads of D dimensions; key and value: (1, A_kv, L, D), A a
            multiple of A_kv.
        attention_mask: None; the trainer pads on the right, where a causal model never looks.
        parts: (p, n_1, ..., n_B) of a packed row; None: ordinary rows (B, A, T, D).
    Returns:
        (1, L, A, D) and None in place of attention weights.
    Raises:
        ValueError: the model asks for attention that is not plain and causal.
    """
    unknown = [name for name in NOT_PLAIN if others.get(name) is not None]
    if attention_mask is not None or unknown:
        raise ValueError(
            "sharing openings knows plain causal attention only; this model's layers want "
            f"{' and '.join(unknown) or 'a mask'}: use --no-share-prefix"
        )
    # Under autocast the rotary embedding has promoted two of the three to float32.
    query, key = query.to(value.dtype), key.to(value.dtype)
    if key.shape[1] != query.shape[1]:  # grouped-query attention: several heads read one key
        repeats = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    attend = partial(torch.nn.functional.scaled_dot_product_attention, scale=scaling)
    if parts is None:
        return attend(query, key, value, is_causal=True).transpose(1, 2), None
    queries, keys, values = (x.split(parts, dim=2) for x in (query, key, value))
    p = parts[0]
    outputs = [attend(queries[0], keys[0], values[0], is_causal=True)]
    for q, k, v in zip(queries[1:], keys[1:], values[1:], strict=True):
        k, v = torch.cat([keys[0], k], dim=2), torch.cat([values[0], v], dim=2)  # (1, A, p + n, D)
        if q.device.type == "cpu" and q.shape[2] > 2 * p:
            # A CPU computes all that a mask hides, but skips what `is_causal` does: behind a short
            # opening it is less work to ask for the opening's rows again and to drop them.
            q = torch.cat([queries[0], q], dim=2)
            outputs.append(attend(q, k, v, is_causal=True)[:, :, p:])
        else:
            outputs.append(attend(q, k, v, attn_mask=_to_the_left(q.shape[2], p, q.device)))
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def _to_the_left(n: int, p: int, device: torch.device) -> torch.Tensor:
    """The mask (n, p + n) of a sample that goes on from an opening of p tokens.

    A GPU's kernels know this shape by name and never see the mask. On a CPU it is made either way,
    and a name would be a subclass of tensor, which cannot be made where backward's recomputation
    watches every operation.
    """
    if device.type == "cpu":
        return torch.ones(n, p + n, dtype=torch.bool).tril(p)
    return causal_lower_right(n, p + n)


class CriticModel(nn.Module):
    """The policy's architecture with a value head: V(state) before every policy token."""

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self.backbone = backbone
        self.value_head = nn.Linear(backbone.config.hidden_size, 1)
        # A fresh critic predicts 0, the return of a failed task.
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(self, input_ids: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
        """values (B, T) float32: values[b, t] = V(tokens before t), 0 where loss_mask is 0."""
        hidden = self.backbone(input_ids=input_ids, use_cache=False).last_hidden_state  # (B, T, H)
        values = self.value_head(hidden).squeeze(-1).float()  # (B, T), value after token t
        values = torch.nn.functional.pad(values[:, :-1], (1, 0))  # (B, T), value before token t
        return torch.where(loss_mask.bool(), values, 0.0)


def load_causal_lm(path: str, dtype: torch.dtype = torch.float32) -> Any:
    """A causal LM from a local path or hub id; ValueError with what to do when there is none.

    Without dropout: what is scored must be what was sampled, and an update's ratio starts at 1.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(path)
        dropouts = [name for name in vars(config) if name.endswith(("dropout", "pdrop"))]
        config.update({name: 0.0 for name in dropouts if getattr(config, name)})
        return AutoModelForCausalLM.from_pretrained(path, config=config, dtype=dtype)
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ValueError(_no_model(path, error)) from error


def load_policy(path: str, share_prefix: bool = True) -> PolicyModel:
    """The policy in float32: master weights, autocast does the rest.

    Raises:
        ValueError: there is no such model, or this file does not score its tokens as it does.
    """
    policy = PolicyModel(load_causal_lm(path), share_prefix)
    check_scores(policy, path, share_prefix)
    return policy


@torch.no_grad()
def check_scores(policy: PolicyModel, path: str, share_prefix: bool) -> None:
    """Refuse a model whose log-probs would be others than its own, before anything is trained.

    The code above assumes that log-probs are a softmax of `final_logits` and that tokens of a
    packed row meet only in attention (convolutions carry one sample into the next).
    """
    ids = torch.randint(policy.lm.config.vocab_size, (2, 10), generator=torch.Generator())
    ids[1, :4] = ids[0, :4]  # one opening of four tokens, two samples of six
    mask = torch.ones_like(ids)
    mask[:, :4] = 0
    # The row P a b: which position each token has, and behind which token it is predicted.
    packed = {"parts": (4, 6, 6), "position_ids": torch.tensor([[*range(10), *range(4, 10)]])}
    packed["source"] = torch.tensor([[0, *range(9), 3, *range(10, 15)]])
    row = torch.cat([ids[:1], ids[1:, 4:]], dim=1)
    row_mask = torch.tensor([[0] * 4 + [1] * 12])
    was_training = policy.training
    policy.eval()
    try:
        logits = policy.lm(input_ids=ids, use_cache=False).logits.float()
        own = logits[:, 3:-1].log_softmax(-1).gather(-1, ids[:, 4:, None]).squeeze(-1)  # (2, 6)
        if not (policy(ids, mask)[0][:, 4:] - own).abs().max() < MAX_GAP:
            raise ValueError(
                f"--model {path}: its log-probs are not a plain softmax of its output head; "
                "training would learn from wrong ones. Take another model"
            )
        if share_prefix:
            together = policy(row, row_mask, **packed)[0][0, 4:].view(2, 6)
            if not (together - own).abs().max() < MAX_GAP:
                raise ValueError(
                    f"--model {path} mixes tokens elsewhere than in attention, so that samples "
                    "packed into one row would see each other: use --no-share-prefix"
                )
    finally:
        policy.train(was_training)


def load_critic(path: str) -> CriticModel:
    """A critic that starts as a copy of the policy's body."""
    return CriticModel(load_causal_lm(path).base_model)


def load_tokenizer(path: str) -> Any:
    """The tokenizer beside a checkpoint; ValueError when it has no chat template."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(_no_model(path, error)) from error
    if not tokenizer.chat_template:
        raise ValueError(
            f"the tokenizer of {path} has no chat template; use an instruct model, "
            "or add chat_template.jinja to the checkpoint"
        )
    return tokenizer


def stop_ids_of(path: str) -> tuple[int, ...]:
    """Ids that end a turn by the checkpoint's generation_config.json, one or several, at which vLLM
    stops too; () if it has none."""
    from transformers import GenerationConfig

    try:
        ids = GenerationConfig.from_pretrained(path).eos_token_id
    except (OSError, ValueError, KeyError):
        return ()
    return tuple(ids) if isinstance(ids, list) else () if ids is None else (ids,)


def save_policy(
    policy: PolicyModel,
    tokenizer: Any,
    folder: Path,
    weights: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write a Hugging Face checkpoint that transformers and vLLM load unchanged, in bfloat16.

    bfloat16 is what the sampler runs in; the float32 master weights are part of `trainer_state/`.

    Args:
        weights: every name of the state dict in one piece, bfloat16; None: the model's own.
    """
    if weights is None:
        weights = {
            name: p.detach().to(torch.bfloat16) for name, p in policy.lm.state_dict().items()
        }
    _mend_sampling(policy.lm)
    policy.lm.save_pretrained(folder, state_dict=weights)
    # NOTE: save_pretrained writes the module's own dtype, float32, and vLLM would serve float16.
    config = copy.deepcopy(policy.lm.config)
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _mend_sampling(lm: Any) -> None:
    """A checkpoint may come with a temperature and without do_sample: transformers loads it with a
    warning, and refuses to save it."""
    generation = getattr(lm, "generation_config", None)
    if generation is None:
        return
    try:
        generation.validate(strict=True)
    except ValueError:
        generation.do_sample = True


def _no_model(path: str, error: Exception) -> str:
    first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return (
        f"--model {path} is neither smollm2-135m, tiny, a checkpoint folder, "
        f"nor a model that can be fetched: {first}"
    )


def num_parameters(module: nn.Module) -> int:
    """Parameters of a module, tied ones counted once."""
    return sum(p.numel() for p in module.parameters())


def num_trainable(module: nn.Module) -> int:
    """Those that an optimizer moves."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def describe(path: str) -> str:
    """One line about a checkpoint for the log: architecture, layers, vocabulary."""
    config = (
        json.loads((Path(path) / "config.json").read_text())
        if Path(path, "config.json").exists()
        else {}
    )
    kind = config.get("architectures", ["?"])[0]
    layers, words = config.get("num_hidden_layers", "?"), config.get("vocab_size", "?")
    return f"{kind}, {layers} layers, vocabulary {words}"
