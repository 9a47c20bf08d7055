"""Writes tests/data/trl.json: losses and gradients of TRL's trainers on one small batch, which
test_losses.py compares with ours. Run it in an environment of its own: pip install trl==1.16.0"""

import json
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch
import trl
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer

# name -> options of TRL's trainer; `constant` divides by 100 tokens, as TOKENS_PER_TRAJECTORY does
CASES = {
    "grpo": {"loss_type": "grpo", "beta": 0.1},
    "tokens": {"loss_type": "bnpo", "beta": 0.1},
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "dr_grpo": {"loss_type": "dr_grpo", "max_completion_length": 100},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.05},
    "entropy": {"loss_type": "bnpo", "entropy_coef": 0.01, "_entropy_bonus_enabled": True},
    "rloo": {},
}


def trainer_of(log_probs: torch.Tensor, entropy: torch.Tensor, options: dict) -> SimpleNamespace:
    """As much of a trainer as `_compute_loss` reads; the model's output is given."""
    accelerator = SimpleNamespace(
        num_processes=1,
        sync_gradients=True,
        gather=lambda x: x,
        gather_for_metrics=lambda x: x,
        reduce=lambda x, reduction: x,
    )
    fixed = {
        "args": SimpleNamespace(delta=None, steps_per_generation=1, use_bias_correction_kl=False),
        "accelerator": accelerator,
        "model": SimpleNamespace(training=True),
        "_metrics": defaultdict(MagicMock),
        "_get_per_token_logps_and_entropies": lambda *args, **kwargs: (log_probs, entropy, None),
        "current_gradient_accumulation_steps": 1,
        "importance_sampling_level": "token",
        "epsilon_low": 0.2,
        "epsilon_high": options.get("epsilon_low", 0.2),
        "top_entropy_quantile": 1.0,
        "beta": 0.0,
        "off_policy_mask_threshold": None,
    }
    off = ("aux_loss_enabled", "use_vllm", "_entropy_bonus_enabled", "use_adaptive_entropy")
    return SimpleNamespace(**{**dict.fromkeys(off, False), **fixed, **options})


def main() -> None:
    torch.manual_seed(0)
    rows, columns = 4, 9
    lengths = torch.tensor([9, 7, 4, 8])
    completion = (torch.arange(columns) < lengths[:, None]).long()
    tool = torch.ones(rows, columns, dtype=torch.long)
    tool[0, 3:5] = tool[1, 2:6] = tool[3, 0] = 0  # observations between the policy's turns
    new, old, ref = (-torch.rand(rows, columns) * 2 for _ in range(3))
    numbers = {
        "log_probs": new,
        "old_log_probs": new + 0.3 * torch.randn(rows, columns),
        "ref_log_probs": ref,
        "entropy": torch.rand(rows, columns),
        "advantages": torch.tensor([1.2, -0.7, 0.4, -0.9]),
        "loss_mask": completion * tool,
    }
    results = {}
    for name, options in CASES.items():
        log_probs = numbers["log_probs"].clone().requires_grad_()
        entropy = numbers["entropy"].clone().requires_grad_()
        mask = numbers["loss_mask"]
        inputs = {
            "prompt_ids": torch.zeros(rows, 1).long(),
            "prompt_mask": torch.ones(rows, 1).long(),
            "completion_ids": torch.zeros(rows, columns).long(),
            "completion_mask": mask,
            "advantages": numbers["advantages"],
            "old_per_token_logps": numbers["old_log_probs"],
            "ref_per_token_logps": numbers["ref_log_probs"],
            "num_items_in_batch": mask.sum(),
            "old_logps": (log_probs.detach() * mask).sum(1),
        }
        trainer = trainer_of(log_probs, entropy, options)
        kind = RLOOTrainer if name == "rloo" else GRPOTrainer
        loss = kind._compute_loss(trainer, None, inputs)
        loss.backward()
        results[name] = {"loss": loss.item(), "gradient": log_probs.grad.tolist()}
    data = {"trl": trl.__version__, "input": {k: v.tolist() for k, v in numbers.items()}}
    path = Path(__file__).parent / "data" / "trl.json"
    path.write_text(json.dumps(data | {"cases": results}) + "\n")


if __name__ == "__main__":
    main()
