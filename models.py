"""Two networks: the policy gives log-probabilities of tokens, the critic gives values of states.

The policy π_θ is a causal language model. For training we need two numbers per sampled token: its
log-probability and the entropy of the distribution that it comes from. `PolicyModel.forward`
computes both for tokens with loss_mask 1 and returns 0 for all others:

    log_probs[b, t] = log π_θ(input_ids[b, t] | input_ids[b, <t])
                    = log softmax(logits[b, t-1] / τ)[input_ids[b, t]]

τ is the temperature of the sampler. Most tokens of a multi-turn trajectory are prompts and
observations. The output head is the largest matrix of a small model (28M of SmolLM2's 135M
parameters), so it runs only on policy tokens.

The critic of PPO has the same architecture with a value head: values[b, t] = V(state before token
t). It uses the hidden state at t-1, because a baseline must not depend on the token itself.

Shapes: B rows (trajectories), T tokens (padded on the right), H hidden size, V vocabulary, N policy
tokens in the batch. Read next: `engines.py`, the samplers.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from functools import partial
from operator import index
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.attention.bias import causal_lower_right
from torch.utils.checkpoint import checkpoint

from losses import entropy_from_logits
from scale.default_models import model_config

# Maximum bytes of logits in memory. On a CPU, the limit is small enough for the C library to reuse
# the buffer; a larger buffer goes back to the kernel and is allocated page by page at every use.
HEAD_BYTES = {"cpu": 24 << 20}
TREE = "tree"  # name of tree_attention among a model's attention implementations
MAX_GAP = 0.01  # most nats between two ways to score a token; in float32 they agree to 1e-5
UNSUPPORTED = ("sliding_window", "softcap", "s_aux")  # attention options of some models


class PolicyModel(nn.Module):
    """A causal LM that returns log-probs and entropies of policy tokens.

    `forward` includes the output head, so FSDP sees a single root module and gathers its
    parameters before any of them is used.
    """

    resets_adapters = False  # with --reset-adapter-every the base weights change, too

    def __init__(self, lm: Any, share_prefix: bool = True) -> None:
        """Args: share_prefix: use `tree_attention`, which supports packed rows, in all layers."""
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
            loss_mask: (B, T), 1 on tokens that the policy sampled. Column 0 must be 0, because no
                hidden state predicts its token.
            temperature: the sampler's τ > 0.
            position_ids, parts, source: describe a packed row (`scale/prefix.py`). Without them,
                positions are 0..T-1, attention is causal and token t is predicted from t-1.
        Returns:
            log_probs and entropy in nats, (B, T) float32 each, 0 where loss_mask is 0.
        """
        packed = {} if parts is None else {"position_ids": position_ids, "parts": parts}
        if packed and self.lm.config._attn_implementation != TREE:
            raise ValueError("a packed row needs a PolicyModel created with share_prefix=True")
        out = self.lm.get_decoder()(input_ids=input_ids, use_cache=False, **packed)
        hidden = out.last_hidden_state  # (B, T, H)
        mask = loss_mask.bool()  # (B, T)
        rows, columns = mask.nonzero(as_tuple=True)  # (N,) each
        sources = columns - 1 if source is None else source[rows, columns]
        states, targets = hidden[rows, sources], input_ids[rows, columns]  # (N, H), (N,)
        vocabulary = self.lm.config.get_text_config().vocab_size  # V
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
            log_probs = log_probs.masked_scatter(mask, torch.cat([p[0] for p in pieces]))
            entropy = entropy.masked_scatter(mask, torch.cat([p[1] for p in pieces]))
        return log_probs, entropy

    def _score(
        self, states: torch.Tensor, targets: torch.Tensor, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(N, H), (N,) -> log-prob and entropy of each target, (N,) float32."""
        config, head = self.lm.config.get_text_config(), self.lm.get_output_embeddings()
        logits = final_logits(config, head(states).float()) / temperature  # (N, V)
        log_probs = logits.gather(-1, targets[:, None]).squeeze(-1) - logits.logsumexp(-1)  # (N,)
        return log_probs, entropy_from_logits(logits)


def final_logits(config: Any, logits: torch.Tensor) -> torch.Tensor:
    """Transform the head's logits as some model families do: Granite divides them, Cohere
    multiplies them, Gemma applies a soft cap. `check_scores` rejects a model that does more."""
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
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention that also supports packed rows, where it follows a tree. The model's layers
    call it through transformers' AttentionInterface.

    A packed row (scale/prefix.py) is an opening P followed by samples that continue it. We compute
    attention once for P, and once per sample over P and the sample itself. For both shapes,
    scaled_dot_product_attention has a fast kernel. A mask over the full row would cost L².

    Args:
        query: (1, A, L, D), A heads of D dimensions; key and value: (1, A_kv, L, D), where A is a
            multiple of A_kv.
        attention_mask: must be None; padding is on the right, where a causal model never looks.
        parts: (p, n_1, ..., n_B) of a packed row; None: ordinary rows (B, A, T, D).
    Returns:
        (1, L, A, D), and None instead of attention weights.
    Raises:
        ValueError: the model needs attention that is not plain and causal.
    """
    unsupported = [name for name in UNSUPPORTED if options.get(name) is not None]
    if attention_mask is not None or unsupported:
        raise ValueError(
            "prefix sharing supports only plain causal attention, but this model's layers need "
            f"{' and '.join(unsupported) or 'a mask'}: use --no-share-prefix"
        )
    # Under autocast the rotary embedding promotes query and key to float32, but not value.
    query, key = query.to(value.dtype), key.to(value.dtype)
    if key.shape[1] != query.shape[1]:  # grouped-query attention: several heads share a key
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
            # With a mask, a CPU also computes the masked entries; with `is_causal` it skips them.
            # So after a short opening it is faster to recompute the opening's rows and drop them.
            q = torch.cat([queries[0], q], dim=2)
            outputs.append(attend(q, k, v, is_causal=True)[:, :, p:])
        else:
            outputs.append(attend(q, k, v, attn_mask=_mask_after_opening(q.shape[2], p, q.device)))
    return torch.cat(outputs, dim=2).transpose(1, 2), None


def _mask_after_opening(n: int, p: int, device: torch.device) -> torch.Tensor:
    """The mask (n, p + n) of a sample of n tokens after an opening of p tokens.

    GPU kernels recognise `causal_lower_right` and never build the mask. A CPU builds the mask in
    any case, so there we create it directly: `causal_lower_right` is a tensor subclass, which
    cannot be created on a CPU while selective checkpointing traces all operations.
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
        # A new critic predicts 0, the return of a failed task.
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    def forward(self, input_ids: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
        """Values (B, T) float32: values[b, t] = V(tokens before t), 0 where loss_mask is 0."""
        hidden = self.backbone(input_ids=input_ids, use_cache=False).last_hidden_state  # (B, T, H)
        values = self.value_head(hidden).squeeze(-1).float()  # (B, T)  value after token t
        values = torch.nn.functional.pad(values[:, :-1], (1, 0))  # (B, T)  value before token t
        return torch.where(loss_mask.bool(), values, 0.0)


def load_causal_lm(path: str, dtype: torch.dtype = torch.float32) -> Any:
    """A causal LM from a local path or hub id, without dropout; ValueError if it cannot be loaded.

    With dropout, the trainer's policy would differ from the sampler's, and the ratio of an update
    would not start at 1.
    """
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    # By default, transformers would ask on stdin whether to run code that comes with a checkpoint.
    options: dict[str, Any] = {"trust_remote_code": False}
    with _loading(path):
        config = AutoConfig.from_pretrained(path, **options)
        config._attn_implementation = None  # a file may name a kernel on the hub, which is code too
        # A model of texts and images has a config for each; only the text part is trained.
        text = config.get_text_config()
        dropouts = [name for name in vars(text) if name.endswith(("dropout", "pdrop"))]
        text.update({name: 0.0 for name in dropouts if getattr(text, name)})
        options |= {"config": config, "dtype": dtype, "output_loading_info": True}
        lm, report = AutoModelForCausalLM.from_pretrained(path, **options)
        if missing := sorted(report["missing_keys"]):  # tied weights are not among them
            raise ValueError(f"its files lack {len(missing)} weights, for example {missing[0]}")
    return lm


@contextlib.contextmanager
def _loading(path: str) -> Iterator[None]:
    """Turn an error that a checkpoint's files cause in this block into a ValueError of one line.
    transformers does not check the files, so damaged ones raise errors of any class."""
    try:
        yield
    except Exception as error:
        if isinstance(error, (MemoryError, RuntimeError)) and "memory" in repr(error).lower():
            raise  # `run.clock.advice` reports it
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        choices = "smollm2-135m, tiny, a checkpoint folder or a hub id"
        raise ValueError(f"--model {path} cannot be loaded; give {choices} ({reason})") from error


def load_policy(path: str, share_prefix: bool = True) -> PolicyModel:
    """The policy with float32 master weights; autocast computes in lower precision.

    Raises:
        ValueError: the model cannot be loaded, or `check_scores` rejects it.
    """
    policy = PolicyModel(load_causal_lm(path), share_prefix)
    check_scores(policy, path, share_prefix)
    return policy


@torch.no_grad()
def check_scores(policy: PolicyModel, path: str, share_prefix: bool) -> None:
    """ValueError if PolicyModel's log-probs differ from the model's; called before training.

    PolicyModel assumes that log-probs are a softmax of `final_logits`. For packed rows it assumes
    that only attention mixes tokens; a convolution would mix one sample with the next.
    """
    vocabulary = policy.lm.config.get_text_config().vocab_size
    ids = torch.randint(vocabulary, (2, 10), generator=torch.Generator())
    ids[1, :4] = ids[0, :4]  # one opening of four tokens, two samples of six
    mask = torch.ones_like(ids)
    mask[:, :4] = 0
    # The packed row P a b: the position of each token, and the column that predicts it.
    packed = {"parts": (4, 6, 6), "position_ids": torch.tensor([[*range(10), *range(4, 10)]])}
    packed["source"] = torch.tensor([[0, *range(9), 3, *range(10, 15)]])
    row = torch.cat([ids[:1], ids[1:, 4:]], dim=1)
    row_mask = torch.tensor([[0] * 4 + [1] * 12])
    was_training = policy.training
    policy.eval()
    try:
        logits = policy.lm(input_ids=ids, use_cache=False).logits.float()
        direct = logits[:, 3:-1].log_softmax(-1).gather(-1, ids[:, 4:, None]).squeeze(-1)  # (2, 6)
        if not (policy(ids, mask)[0][:, 4:] - direct).abs().max() < MAX_GAP:
            raise ValueError(
                f"--model {path}: its log-probs are not a plain softmax of its output head, so "
                "training would use wrong values. Choose another model"
            )
        if share_prefix:
            shared = policy(row, row_mask, **packed)[0][0, 4:].view(2, 6)
            if not (shared - direct).abs().max() < MAX_GAP:
                raise ValueError(
                    f"--model {path} mixes tokens outside attention, so samples packed into one "
                    "row would influence each other: use --no-share-prefix"
                )
    finally:
        policy.train(was_training)


def load_critic(path: str) -> CriticModel:
    """A critic that starts as a copy of the policy's body."""
    return CriticModel(load_causal_lm(path).get_decoder())


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a checkpoint; ValueError if it has no chat template."""
    from transformers import AutoTokenizer

    with _loading(path):
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    if not tokenizer.chat_template:
        raise ValueError(
            f"the tokenizer of {path} has no chat template; use an instruct model, "
            "or add chat_template.jinja to the checkpoint"
        )
    return tokenizer


def stop_ids_of(path: str) -> tuple[int, ...]:
    """Stop ids in the checkpoint's generation_config.json, which vLLM uses too; () if none."""
    from transformers import GenerationConfig

    ids = None
    with _loading(path):
        with contextlib.suppress(OSError):  # there is no such file
            ids = GenerationConfig.from_pretrained(path).eos_token_id
        ids = tuple(map(index, ids if isinstance(ids, list) else [] if ids is None else [ids]))
    return ids


def save_policy(
    policy: PolicyModel,
    tokenizer: Any,
    folder: Path,
    weights: dict[str, torch.Tensor] | None = None,
) -> None:
    """Write a Hugging Face checkpoint in bfloat16, which transformers and vLLM can load.

    The sampler runs in bfloat16; the float32 master weights are part of `trainer_state/`.

    Args:
        weights: a full state dict in bfloat16; None: the weights of the model.
    """
    if weights is None:
        weights = {
            name: p.detach().to(torch.bfloat16) for name, p in policy.lm.state_dict().items()
        }
    _fix_generation_config(policy.lm)
    policy.lm.save_pretrained(folder, state_dict=weights)
    # NOTE: save_pretrained writes the module's dtype, float32, and vLLM would then use float16.
    config = copy.deepcopy(policy.lm.config)
    config.dtype = torch.bfloat16
    config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _fix_generation_config(lm: Any) -> None:
    """Set do_sample if a checkpoint has a temperature but not do_sample: transformers loads such a
    checkpoint with a warning, but refuses to save it."""
    generation = getattr(lm, "generation_config", None)
    if generation is None:
        return
    try:
        generation.validate(strict=True)
    except ValueError:
        generation.do_sample = True


def num_parameters(module: nn.Module) -> int:
    """Number of parameters of a module; tied parameters count once."""
    return sum(p.numel() for p in module.parameters())


def num_trainable(module: nn.Module) -> int:
    """Number of parameters that are trained."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def describe(path: str) -> str:
    """One line about a checkpoint for the log: architecture, number of layers, vocabulary size."""
    config = model_config(path)
    architecture = (config.get("architectures") or ["?"])[0]
    layers, vocabulary = config.get("num_hidden_layers", "?"), config.get("vocab_size", "?")
    return f"{architecture}, {layers} layers, vocabulary {vocabulary}"
