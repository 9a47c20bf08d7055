"""scale/lora.py: a policy starts as the base model, trains only adapters, and merges into a normal
model."""

import json

import pytest
import torch
from safetensors.torch import load_file
from test_prefix import make
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from config import Objective
from models import load_policy
from scale.default_models import resolve_model
from scale.lora import (
    adapters_off,
    add_lora,
    is_adapter,
    load_adapter,
    merged_weights,
    restart_adapters,
    save_adapter,
)
from update import forward_policy

RANK, ALPHA = 3, 9
PLAIN, SHARED = Objective(share_prefix=False), Objective(share_prefix=True)


@pytest.fixture(scope="module")
def tiny():
    return resolve_model("tiny")


@pytest.fixture(scope="module")
def batch():
    """Two samples of one task: a common opening of 11 tokens, followed by 6 and 9 tokens."""
    generator = torch.Generator().manual_seed(1)

    def ids(n):
        return torch.randint(3, 1000, (n,), generator=generator).tolist()

    return make([ids(11)], [[ids(6), ids(9)]])


def adapted(path, change=True, seed=0):
    """The tiny policy with adapters; with `change`, B is not 0, as after an update."""
    policy = load_policy(path)
    add_lora(policy.lm, RANK, seed, ALPHA)
    if change:
        change_adapters(policy)
    return policy


def change_adapters(policy):
    generator = torch.Generator().manual_seed(2)
    for name, p in policy.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(p, std=0.05, generator=generator)


@torch.no_grad()
def log_probs(policy, batch, objective=PLAIN):
    return forward_policy(policy, batch, objective, "cpu")[0]


def adapters(lm):
    return {name: tensor.clone() for name, tensor in lm.state_dict().items() if is_adapter(name)}


# ------------------------------------------------------------------------------- training


@pytest.mark.parametrize("objective", [PLAIN, SHARED])
def test_at_the_start_and_with_adapters_off_the_policy_is_the_base(tiny, batch, objective):
    base, start, policy = load_policy(tiny), adapted(tiny, change=False), adapted(tiny)
    expected = log_probs(base, batch, objective)
    assert torch.equal(log_probs(start, batch, objective), expected)
    changed = log_probs(policy, batch, objective)
    assert (changed - expected).abs().max() > 1e-2
    with adapters_off(policy):
        assert torch.equal(log_probs(policy, batch, objective), expected)
    with pytest.raises(KeyError), adapters_off(policy):
        raise KeyError
    assert torch.equal(log_probs(policy, batch, objective), changed)
    assert all(p.requires_grad == is_adapter(name) for name, p in policy.named_parameters())


def test_a_step_changes_all_adapters_and_not_the_base_model(tiny, batch):
    policy = adapted(tiny)
    before = log_probs(policy, batch)
    parameters = [p for p in policy.parameters() if p.requires_grad]
    assert sum(p.numel() for p in parameters) == RANK * 4 * (
        2 * (256 + 256) + 2 * (256 + 128) + 3 * (256 + 704)  # q o, k v, gate up down: in + out
    )
    (-forward_policy(policy, batch, SHARED, "cpu")[0].sum()).backward()
    for name, p in policy.named_parameters():
        assert (p.grad is not None and p.grad.abs().max() > 0) == is_adapter(name), name
    torch.optim.SGD(parameters, lr=0.003).step()
    assert log_probs(policy, batch).sum() > before.sum() + 1e-3
    with adapters_off(policy):
        assert torch.equal(log_probs(policy, batch), log_probs(load_policy(tiny), batch))


def test_adapters_depend_only_on_the_seed_and_the_global_random_state_is_unchanged(tiny):
    torch.manual_seed(5)
    first = adapters(adapted(tiny, change=False, seed=7).lm)
    policy = load_policy(tiny)
    torch.manual_seed(9)
    expected = torch.rand(3)
    torch.manual_seed(9)
    add_lora(policy.lm, RANK, seed=7)
    assert torch.equal(torch.rand(3), expected)
    second, third = adapters(policy.lm), adapters(adapted(tiny, change=False, seed=8).lm)
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
        if ".lora_A." in name:
            assert not torch.equal(tensor, third[name]), name
            bound = tensor.shape[1] ** -0.5
            assert 0.9 * bound < tensor.abs().max() <= bound, name
        else:
            assert not tensor.any(), name


# -------------------------------------------------------------------------- merging and saving


def test_after_a_restart_the_merged_model_is_the_base_of_new_adapters(tiny, batch):
    policy = adapted(tiny)
    before, old, merged = (
        log_probs(policy, batch),
        adapters(policy.lm),
        dict(merged_weights(policy.lm)),
    )
    restart_adapters(policy.lm, seed=1)
    with adapters_off(policy):  # the new reference
        torch.testing.assert_close(log_probs(policy, batch), before, atol=1e-4, rtol=0)
    assert all(torch.equal(w, merged[name]) for name, w in merged_weights(policy.lm))
    for name, tensor in adapters(policy.lm).items():
        assert not torch.equal(tensor, old[name]), name
        assert tensor.any() == (".lora_A." in name), name


@pytest.mark.parametrize("tied", [True, False])
def test_merged_weights_are_a_normal_model_with_its_head_and_the_same_output(tiny, batch, tied):
    policy, plain = load_policy(tiny), load_policy(tiny)
    if not tied:
        policy.lm.lm_head.weight = nn.Parameter(policy.lm.lm_head.weight + 1)
        plain.lm.lm_head.weight = nn.Parameter(plain.lm.lm_head.weight.clone())
    state = {name: tensor.clone() for name, tensor in policy.lm.state_dict().items()}
    without_lora = dict(merged_weights(policy.lm))
    assert all(torch.equal(without_lora[name], tensor) for name, tensor in state.items())
    add_lora(policy.lm, RANK)
    change_adapters(policy)
    merged = dict(merged_weights(policy.lm))
    assert list(merged) == list(state)
    assert torch.equal(merged["lm_head.weight"], state["lm_head.weight"])
    plain.lm.load_state_dict(merged)
    for objective in (PLAIN, SHARED):
        expected = log_probs(policy, batch, objective)
        torch.testing.assert_close(log_probs(plain, batch, objective), expected, atol=1e-4, rtol=0)
    changed = {name for name, w in merged.items() if not torch.equal(w, state[name])}
    linear = {f"{n}.weight" for n, m in plain.lm.named_modules() if isinstance(m, nn.Linear)}
    assert changed == linear - {"lm_head.weight"}


def test_adapters_of_a_bfloat16_model_are_float32_and_merge_into_bfloat16(tiny):
    lm = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16)
    add_lora(lm, RANK)
    assert {p.dtype for p in lm.parameters() if p.requires_grad} == {torch.float32}
    assert {tensor.dtype for _, tensor in merged_weights(lm)} == {torch.bfloat16}


@pytest.mark.filterwarnings("error")
def test_peft_loads_a_saved_adapter_and_computes_the_same(tiny, tmp_path):
    from peft import PeftModel, get_peft_model_state_dict

    policy = adapted(tiny)
    save_adapter(policy.lm, tmp_path, tiny)
    base = AutoModelForCausalLM.from_pretrained(tiny)
    ids = torch.arange(3, 40)[None]  # (1, T)
    with torch.no_grad():
        expected = policy.lm(input_ids=ids).logits
        loaded = PeftModel.from_pretrained(base, tmp_path)
        actual = loaded(input_ids=ids).logits
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert set(tensors) == set(get_peft_model_state_dict(loaded))
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["target_modules"] == sorted(config["target_modules"])  # the same in every run
    assert config["base_model_name_or_path"] == tiny and config["inference_mode"] is True
    assert (config["r"], config["lora_alpha"]) == (RANK, ALPHA)
    assert policy.lm.peft_config["default"].inference_mode is False  # still in training


def test_saved_adapters_are_loaded_only_into_a_model_that_they_fit(tiny, batch, tmp_path):
    policy, new_policy = adapted(tiny), load_policy(tiny)
    save_adapter(policy.lm, tmp_path, tiny)
    load_adapter(new_policy.lm, tmp_path)
    assert torch.equal(log_probs(new_policy, batch), log_probs(policy, batch))
    config = AutoConfig.from_pretrained(tiny)
    config.num_hidden_layers = 1
    with pytest.raises(ValueError, match="do not fit Qwen2"):
        load_adapter(AutoModelForCausalLM.from_config(config), tmp_path)
