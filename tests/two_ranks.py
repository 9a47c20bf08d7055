"""An update on a fixed batch, which tests/test_distributed.py runs as one process and as two.

    python tests/two_ranks.py OUT CASES          one process
    torchrun --nproc-per-node 2 ... OUT CASES    two processes, sharded

Rank 0 writes OUT: metrics, all parameters in full, and the bytes that each rank holds.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))

import dpo
import update
from advantages import gae, grpo
from batching import Batch
from config import Objective
from dpo import DpoConfig
from models import CriticModel, PolicyModel
from scale import distributed
from scale.lora import add_lora, merged_weights, restart_adapters
from scale.memory import keep_for_backward
from update import Learner, score_critic, score_policy, update_critic, update_policy
from warmstart import SftSettings, imitate

SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2)
HEADS = dict(num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True)
OBJECTIVE = Objective(
    mini_batch_size=64,
    max_tokens_per_micro_batch=40,
    max_grad_norm=1e9,
    share_prefix=False,
    entropy_coef=0.01,
    kl_loss_coef=0.1,
)
DEFAULT = ("grpo", 0, {}, "sgd")
# name -> algorithm, LoRA rank, changes to the objective, optimizer
CASES = {
    "grpo": DEFAULT,
    "grpo lora": ("grpo", 4, {}, "sgd"),
    "reset lora": ("grpo", 4, {}, "sgd"),
    "ppo": ("ppo", 0, {"share_prefix": True}, "sgd"),
    "ppo lora": ("ppo", 4, {}, "sgd"),
    "shared": ("grpo", 0, {"share_prefix": True, "max_tokens_per_micro_batch": 10_000}, "sgd"),
    "epochs": ("grpo", 0, {"ppo_epochs": 2, "mini_batch_size": 4}, "slow sgd"),
    # Three updates, so that ratios are not 1.
    "sequence": (
        "grpo",
        0,
        {"ratio": "sequence", "loss_agg": "seq-mean", "clip_ratio": 0.01, "mini_batch_size": 4},
        "slow sgd",
    ),
    "dapo": (
        "grpo",
        0,
        {"clip_ratio_high": 0.28, "loss_agg": "constant", "mini_batch_size": 4},
        "sgd",
    ),
    "adam": ("grpo", 0, {"max_grad_norm": 0.1}, "adamw"),
    "checkpointing": DEFAULT,
    "one row": DEFAULT,  # only two rows, one for each of two ranks
    "imitation": ("imitation", 0, {}, "sgd"),
    "imitation lora": ("imitation", 4, {}, "sgd"),
    "preferences": ("preferences", 0, {}, "sgd"),
    "preferences shared": ("preferences", 4, {"share_prefix": True}, "sgd"),
    "not finite": ("grpo", 0, {"max_tokens_per_micro_batch": 14}, "sgd"),
}


def make_policy(lora_rank: int = 0, seed: int = 0) -> PolicyModel:
    torch.manual_seed(seed)
    policy = PolicyModel(Qwen2ForCausalLM(Qwen2Config(**SIZES, **HEADS, initializer_range=0.3)))
    if lora_rank:
        add_lora(policy.lm, lora_rank, seed=1)
        generator = torch.Generator().manual_seed(3)
        for p in policy.parameters():  # if B stayed zero, A would have no gradient
            if p.requires_grad:
                p.data = torch.randn(p.shape, generator=generator) * 0.1
    return policy


def make_batch() -> Batch:
    """Eleven rows in groups of 5, 4 and 2, with lengths from 5 to 16: nothing divides evenly."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([12, 5, 9, 7, 12, 6, 16, 8, 10, 5, 11])
    groups = torch.tensor([0, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2])
    rows, width = len(lengths), int(lengths.max())
    ids = torch.randint(3, 64, (rows, width), generator=generator)
    for group in groups.unique():
        ids[groups == group, :3] = ids[(groups == group).nonzero()[0], :3]
    mask = torch.zeros(rows, width)
    for row, length in enumerate(lengths.tolist()):
        mask[row, 3 + row % 2 : length] = 1
        ids[row, length:] = 0
    noise = torch.randn(rows, width, generator=generator) * 0.1
    rewards = torch.zeros(rows, width)
    for row, length in enumerate(lengths.tolist()):
        rewards[row, length - 1] = float(row % 3 == 0)
    return Batch(ids, mask, (noise - 4) * mask, rewards, lengths, groups)


def run(case: str) -> dict:
    algorithm, lora_rank, changes, kind = CASES[case]
    objective = replace(OBJECTIVE, **changes)
    accelerator = distributed.make_accelerator("no")
    device = accelerator.device
    batch = make_batch()
    if case == "one row":
        batch = batch.rows([0, 1])

    def make_learner(model: torch.nn.Module) -> Learner:
        if case == "checkpointing":
            keep_for_backward(model, "inputs")
        model = distributed.shard(accelerator, model.train())
        parameters = [p for p in model.parameters() if p.requires_grad]
        make = torch.optim.AdamW if kind == "adamw" else torch.optim.SGD
        return Learner(accelerator, model, make(parameters, lr=1.0 if kind == "sgd" else 0.01))

    learner = make_learner(make_policy(lora_rank))
    policy, optimizer = learner.model, learner.optimizer
    reference = distributed.shard(accelerator, make_policy().eval().requires_grad_(False))
    batch.old_log_probs = score_policy(policy, batch, objective, device)
    batch.ref_log_probs = score_policy(reference, batch, objective, device)
    metrics = {}
    critic = None
    if algorithm == "preferences":
        batch = batch.rows([0, 1, 2, 3, 5, 6, 9, 10])  # four pairs for two ranks
        batch.group_ids = torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])
        batch.ref_sums = (batch.ref_log_probs * batch.loss_mask).sum(1) - 1
        metrics |= dpo.prefer(learner, batch, objective, DpoConfig(sft_coef=0.5, loss="ipo"))
    elif algorithm == "imitation":
        settings = SftSettings(epochs=1, batch_size=64, max_tokens=40, learning_rate=1.0)
        metrics["losses"] = imitate(learner, batch, settings)[0]
    elif algorithm == "ppo":
        critic = CriticModel(make_policy().lm.base_model)
        torch.nn.init.normal_(
            critic.value_head.weight, generator=torch.Generator().manual_seed(1), std=0.1
        )
        critic_learner = make_learner(critic)
        critic = critic_learner.model
        batch.values = score_critic(critic, batch, objective, device)
        batch.advantages, batch.returns = gae(batch.token_rewards, batch.values, batch.loss_mask)
        metrics |= update_critic(critic_learner, batch, objective)
    else:
        batch.advantages, _ = grpo(batch.token_rewards, batch.loss_mask, batch.group_ids)
    if case == "not finite":
        batch.advantages[3] = torch.nan
    if algorithm in ("grpo", "ppo"):
        metrics |= update_policy(learner, batch, objective, loss_scale=0.5)
    if case == "reset lora":
        restart_adapters(policy.lm, seed=2)
    models = {"policy": policy} | ({"critic": critic} if critic is not None else {})
    weights = {
        f"{name}.{n}": distributed.full_tensor(p.detach()).clone()
        for name, model in models.items()
        for n, p in model.named_parameters()
    }
    moments = [m for state in optimizer.state.values() for m in state.values() if m.ndim]
    num_bytes = {
        "parameters": sum(distributed.local_part(p).numel() * 4 for p in policy.parameters()),
        "optimizer": sum(distributed.local_part(m).numel() * 4 for m in moments),
    }
    kinds = {type(p).__name__ for model in models.values() for p in model.parameters()}
    merged = {f"merged.{n}": w.clone() for n, w in merged_weights(policy.lm)}
    return {
        "metrics": metrics,
        "weights": weights | merged,
        "scores": {"old": batch.old_log_probs, "ref": batch.ref_log_probs},
        "held": distributed.gather(num_bytes),
        "kinds": sorted(kinds),
        "ranks": distributed.world_size(),
    }


def main() -> None:
    out, cases = Path(sys.argv[1]), json.loads(sys.argv[2])
    distributed.join()
    update.MIN_SHARED = 0.0  # share even the shortest prefix
    for case in cases:
        result = run(case)
        if distributed.rank() == 0:
            torch.save(result, out / f"{case}.pt")
    distributed.barrier()
    distributed.leave()


if __name__ == "__main__":
    main()
