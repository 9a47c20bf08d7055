"""models.py compared with the direct computation: all logits and one softmax."""

import contextlib
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    Qwen2Config,
    Qwen2ForCausalLM,
)

import models
from models import (
    CriticModel,
    PolicyModel,
    describe,
    load_causal_lm,
    load_critic,
    load_policy,
    load_tokenizer,
    save_policy,
    stop_ids_of,
)
from scale.default_models import CHATML, check_length, check_model, resolve_model

MASK = torch.tensor(
    [[0, 0, 1, 1, 0, 0, 1, 1, 1], [0, 1, 0, 0, 1, 1, 0, 0, 0], [0, 0, 0, 1, 1, 0, 0, 0, 0]]
)


def test_a_model_is_trained_without_its_dropout(tmp_path):
    """Dropout would make scores random: DPO's reference, the held-out loss, the initial ratio."""
    config = GPT2Config(vocab_size=40, n_embd=16, n_layer=1, n_head=2)
    assert config.resid_pdrop == config.attn_pdrop == config.embd_pdrop == 0.1
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    policy = load_policy(str(tmp_path)).train()
    ids = torch.randint(40, MASK.shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        first, second = (policy(ids, MASK)[0] for _ in range(2))
    assert torch.equal(first, second)


def test_all_stop_ids_of_a_checkpoint_are_used(tmp_path):
    assert stop_ids_of(str(tmp_path)) == ()
    for eos, ids in ((7, (7,)), ([7, 9], (7, 9)), (None, ())):
        GenerationConfig(eos_token_id=eos).save_pretrained(tmp_path)
        assert stop_ids_of(str(tmp_path)) == ids
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": ["x"]}')
    with pytest.raises(ValueError, match="cannot be interpreted as an integer"):
        stop_ids_of(str(tmp_path))


def small_lm(tied=True):
    """A causal LM with a few thousand weights, large enough for clearly different predictions."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=40,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            tie_word_embeddings=tied,
            initializer_range=0.5,
        )
        return Qwen2ForCausalLM(config).eval()


@pytest.fixture
def lm():
    return small_lm()


@pytest.fixture
def input_ids():
    return torch.randint(0, 40, MASK.shape, generator=torch.Generator().manual_seed(1))


def plain_log_probs(lm, input_ids, temperature):
    """log_probs and entropy (B, T) from the logits of the full sequence, 0 in column 0."""
    logits = lm(input_ids=input_ids).logits.float() / temperature  # (B, T, V)
    log_probs = logits.log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)  # (B, T)
    of_tokens = log_probs[:, :-1].gather(-1, input_ids[:, 1:, None]).squeeze(-1)  # (B, T-1)
    pad = torch.nn.functional.pad
    return pad(of_tokens, (1, 0)), pad(entropy[:, :-1], (1, 0))


# ----------------------------------------------------------------------------------- policy


@pytest.mark.parametrize("temperature", [1.0, 0.7, 1.5])
@pytest.mark.parametrize("head_chunk", [1, 3, 1024])
def test_log_probs_and_entropy_are_those_of_a_softmax_over_all_logits(
    lm, input_ids, temperature, head_chunk, monkeypatch
):
    monkeypatch.setitem(models.HEAD_BYTES, "cpu", head_chunk * 4 * 40)  # vocabulary 40
    log_probs, entropy = PolicyModel(lm)(input_ids, MASK, temperature)
    expected, expected_entropy = plain_log_probs(lm, input_ids, temperature)
    torch.testing.assert_close(log_probs, expected * MASK, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, expected_entropy * MASK, atol=1e-5, rtol=1e-5)
    assert log_probs.dtype == entropy.dtype == torch.float32
    with torch.no_grad():
        torch.testing.assert_close(PolicyModel(lm)(input_ids, MASK, temperature)[0], log_probs)


@pytest.mark.parametrize("head_chunk", [2, 1024])
def test_gradients_are_those_of_a_softmax_over_all_logits(lm, input_ids, head_chunk, monkeypatch):
    """The backward pass runs the head again, in slices, and their gradients add up."""
    monkeypatch.setitem(models.HEAD_BYTES, "cpu", head_chunk * 4 * 40)  # vocabulary 40
    weights = torch.randn(MASK.shape, generator=torch.Generator().manual_seed(2))

    def gradients(log_probs, entropy):
        lm.zero_grad()
        ((log_probs + 0.1 * entropy) * MASK * weights).sum().backward()
        return [p.grad.clone() for p in lm.parameters()]

    expected = gradients(*plain_log_probs(lm, input_ids, 0.7))
    actual = gradients(*PolicyModel(lm)(input_ids, MASK, 0.7))
    assert any(g.abs().max() > 0.1 for g in expected)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)


# ----------------------------------------------------------------------------------- critic


def critic_of(lm):
    critic = CriticModel(lm.base_model)
    torch.nn.init.normal_(critic.value_head.weight, generator=torch.Generator().manual_seed(3))
    return critic


def test_the_value_before_a_token_comes_from_the_hidden_state_to_its_left(lm, input_ids):
    critic = critic_of(lm)
    values = critic(input_ids, MASK)
    hidden = lm.base_model(input_ids=input_ids).last_hidden_state
    outputs = critic.value_head(hidden).squeeze(-1)
    expected = torch.nn.functional.pad(outputs[:, :-1], (1, 0)) * MASK
    torch.testing.assert_close(values, expected)


def test_a_new_critic_predicts_zero_and_learns(lm, input_ids):
    critic = CriticModel(lm.base_model)
    values = critic(input_ids, MASK)
    assert not values.any() and values.dtype == torch.float32
    ((values - 1) ** 2).sum().backward()
    assert critic.value_head.weight.grad.abs().max() > 0


# --------------------------------------------------------------------- loading and saving


@pytest.fixture(scope="module")
def tiny():
    return resolve_model("tiny")


@pytest.mark.parametrize("tied", [True, False])
def test_a_saved_policy_loads_with_transformers_and_scores_the_same(
    tied, tiny, input_ids, tmp_path
):
    policy = PolicyModel(small_lm(tied))
    before = {name: p.clone() for name, p in policy.lm.state_dict().items()}
    save_policy(policy, load_tokenizer(tiny), tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.bfloat16 and loaded.config.tie_word_embeddings == tied
    assert set(loaded.state_dict()) == set(before)
    for name, saved in loaded.state_dict().items():
        assert torch.equal(saved, before[name].to(torch.bfloat16)), name
    for p in policy.parameters():
        p.data = p.data.bfloat16().float()
    expected, _ = plain_log_probs(policy.lm, input_ids, 1.0)
    actual, _ = plain_log_probs(load_causal_lm(str(tmp_path)), input_ids, 1.0)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=1e-5)
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == CHATML


def test_a_folder_without_a_model_is_refused_in_one_line(tmp_path):
    for load in (load_causal_lm, load_tokenizer):
        with pytest.raises(ValueError, match=f"--model {tmp_path} cannot be loaded") as failure:
            load(str(tmp_path))
        assert len(str(failure.value).splitlines()) == 1


def test_a_damaged_checkpoint_is_refused_in_one_line(tiny, tmp_path):
    """transformers would give missing weights random values."""
    folder = shutil.copytree(tiny, tmp_path / "model")
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"lack 1 weights, for example model.layers.0.mlp.up_proj"):
        load_policy(str(folder))
    (folder / "config.json").write_text('{"model_type": "qwen2", "text_config": 5}')
    with pytest.raises(ValueError, match=r"^--model .* cannot be loaded; .*$"):
        load_policy(str(folder))


def test_code_that_comes_with_a_checkpoint_is_never_run(tiny, tmp_path, monkeypatch):
    """transformers asks on stdin by default, where `yes |` answers."""
    folder, marker = tmp_path / "model", tmp_path / "was_run"
    shutil.copytree(tiny, folder)
    (folder / "code.py").write_text(f"open({str(marker)!r}, 'w')\nclass Config: pass\n")
    code = {"AutoConfig": "code.Config", "AutoTokenizer": ["code.Tokenizer", None]}
    for name in ("config.json", "tokenizer_config.json"):
        fields = json.loads((folder / name).read_text())
        fields |= {"model_type": "unknown", "auto_map": code}
        (folder / name).write_text(json.dumps(fields))
    monkeypatch.setattr("builtins.input", lambda prompt: "y")
    for load in (load_policy, load_critic, load_tokenizer, stop_ids_of):
        with contextlib.suppress(ValueError):  # the tokenizer needs no code
            load(str(folder))
    assert not marker.exists()
    with pytest.raises(ValueError, match="needs its own code, which is never run here"):
        check_model(str(folder))


def test_a_tokenizer_without_a_chat_template_is_refused(tiny, tmp_path):
    tokenizer = load_tokenizer(tiny)
    tokenizer.chat_template = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no chat template; use an instruct model"):
        load_tokenizer(str(tmp_path))


# ------------------------------------------------------------------------- other architectures

SMALL = {
    **{"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0},
    **{"bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.3},
}
FAMILIES = {  # family -> (options, can samples share their opening?)
    "llama": ({}, True),
    "granite": ({"logits_scaling": 8.0}, True),
    "cohere": ({"logit_scale": 0.25}, True),
    "gemma2": ({"head_dim": 8, "final_logit_softcapping": 2.0}, False),
    "phi3": ({"sliding_window": 6}, False),
    "lfm2": ({"layer_types": ["conv", "full_attention"]}, False),
}


def of_family(name):
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **SMALL, **FAMILIES[name][0])
    return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize("family", FAMILIES)
def test_log_probs_equal_those_of_the_model_in_every_family(family, tmp_path):
    """A model that would mix samples in a packed row is refused."""
    lm = of_family(family)
    lm.save_pretrained(tmp_path)
    can_share = FAMILIES[family][1]
    refused = pytest.raises(ValueError, match="--no-share-prefix")
    with contextlib.nullcontext() if can_share else refused:
        load_policy(str(tmp_path))
    policy = load_policy(str(tmp_path), share_prefix=False)
    ids = torch.randint(97, MASK.shape, generator=torch.Generator().manual_seed(1))
    log_probs = lm.eval()(input_ids=ids, use_cache=False).logits.log_softmax(-1)[:, :-1]
    expected = log_probs.gather(-1, ids[:, 1:, None]).squeeze(-1) * MASK[:, 1:]
    torch.testing.assert_close(policy.eval()(ids, MASK)[0][:, 1:], expected, atol=1e-5, rtol=0)


def test_the_text_part_of_a_model_of_texts_and_images_is_trained(tmp_path):
    """A part of its config has the sizes and the dropout."""
    torch.manual_seed(0)
    text = SMALL | {"head_dim": 8, "attention_dropout": 0.5}
    vision = {"hidden_size": 12, "intermediate_size": 8, "num_hidden_layers": 1, "image_size": 16}
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    policy, critic = load_policy(str(tmp_path), share_prefix=False), load_critic(str(tmp_path))
    ids = torch.randint(97, MASK.shape, generator=torch.Generator().manual_seed(1))
    expected, _ = plain_log_probs(policy.lm.eval(), ids, 0.7)
    actual = policy.train()(ids, MASK, 0.7)[0]
    torch.testing.assert_close(actual, expected * MASK, atol=1e-5, rtol=1e-5)
    assert critic.train()(ids, MASK).shape == MASK.shape
    assert describe(str(tmp_path)).endswith("2 layers, vocabulary 97")
    with pytest.raises(ValueError, match="has only 131072 positions"):
        check_length(str(tmp_path), 131073)


def test_a_model_that_transforms_its_logits_in_an_unknown_way_is_refused(tmp_path, monkeypatch):
    of_family("granite").save_pretrained(tmp_path)
    monkeypatch.setattr(models, "final_logits", lambda config, logits: logits)
    with pytest.raises(ValueError, match="not a plain softmax"):
        load_policy(str(tmp_path), share_prefix=False)


def test_a_checkpoint_with_a_temperature_and_without_do_sample_can_be_saved(tmp_path):
    lm = of_family("llama")
    lm.save_pretrained(tmp_path / "in")
    (tmp_path / "in/generation_config.json").write_text('{"temperature": 0.9, "top_p": 0.6}')
    policy = load_policy(str(tmp_path / "in"))
    tokenizer = AutoTokenizer.from_pretrained(resolve_model("tiny"))
    save_policy(policy, tokenizer, tmp_path / "out")
    assert GenerationConfig.from_pretrained(tmp_path / "out").temperature == 0.9
    load_policy(str(tmp_path / "out"))
