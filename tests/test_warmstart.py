"""warmstart.py: only actions are learned, once per model, data and settings; shipped starts are
found."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from toy_env import fresh_process_state

import warmstart
from chat import ChatTemplate
from config import complete, options
from data import demonstrations, play_demonstrations
from envs import load_tasks
from models import load_policy, load_tokenizer
from scale import distributed
from scale.default_models import resolve_model
from update import Learner
from warmstart import SftSettings

TASKS = load_tasks("textcraft", split="train")
SETTINGS = SftSettings(num_demonstrations=8, batch_size=4)


# --- Training -------------------------------------------------------------------------------------


def test_the_training_loop_equals_a_literal_one():
    """Two steps of a literal loop: one forward pass over the rows, the mean over action tokens,
    gradient clipping, and a learning rate that falls to a tenth."""
    settings = replace(SETTINGS, batch_size=3, epochs=1, learning_rate=1e-2)
    tiny = resolve_model("tiny")
    records = play_demonstrations("textcraft", list(TASKS), count=6, seed=0)
    batch = warmstart.batch_of(ChatTemplate(load_tokenizer(tiny)), records, settings, pad_id=0)
    policy, plain = load_policy(tiny), load_policy(tiny)
    start = torch.cat([p.detach().flatten() for p in plain.parameters()])
    reported = []
    with fresh_process_state():
        adamw = torch.optim.AdamW(policy.parameters(), lr=1.0, weight_decay=0.0)
        learner = Learner(distributed.make_accelerator("bf16"), policy, adamw)
        losses = warmstart.imitate(learner, batch, settings, reported.append)
    assert reported == losses
    optimizer = torch.optim.AdamW(plain.parameters(), weight_decay=0.0)
    order = torch.randperm(len(batch), generator=torch.Generator().manual_seed(settings.seed))
    for step, loss_of_step in enumerate(losses):
        part = batch.rows(order[3 * step : 3 * step + 3].tolist())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            log_probs, _ = plain(part.input_ids, part.loss_mask)
        loss = -(log_probs * part.loss_mask).sum() / part.loss_mask.sum()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.param_groups[0]["lr"] = 1e-2 * (1 - 0.9 * step / 2)
        optimizer.step()
        optimizer.zero_grad()
        assert loss_of_step == pytest.approx(float(loss.detach()), rel=0.02)
    # Adam makes a full step even from a gradient near 0, whose sign depends on rounding.
    changes = [torch.cat([p.flatten() for p in m.parameters()]) - start for m in (policy, plain)]
    assert torch.cosine_similarity(*changes, dim=0) > 0.98


# --- Cached, or shipped with the project ----------------------------------------------------------


def warm(tasks, settings=SETTINGS, model="tiny", accelerator=None):
    def demonstrate():
        return demonstrations("textcraft", tasks, settings.num_demonstrations, settings.seed)

    return warmstart.warm_start(model, "textcraft", demonstrate, settings, accelerator)


def test_a_warm_start_is_trained_once_per_model_data_and_settings(empty_cache, monkeypatch):
    trained = []

    def train_and_save(folder, model, records, settings, accelerator):
        trained.append((model, settings))
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(warmstart, "train_and_save", train_and_save)
    tasks = TASKS[:4]
    folders = {
        warm(tasks),
        warm(tasks),
        warm(tasks, model="smollm2-135m"),
        warm(TASKS[4:8]),
        warm(tasks, replace(SETTINGS, seed=1)),
    }
    assert len(folders) == len(trained) == 4


def test_shipped_adapters_are_used_only_for_the_same_model_data_and_settings(
    empty_cache, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(warmstart, "STARTS", tmp_path / "starts")
    settings = replace(SETTINGS, num_demonstrations=4, epochs=8, lora_rank=2, learning_rate=2e-2)
    records = demonstrations("textcraft", TASKS[:4], 4, 0)
    with fresh_process_state():
        accelerator = distributed.make_accelerator("no")
        warmstart.train_and_save(tmp_path / "trained", "tiny", records, settings, accelerator)
    (tmp_path / "starts").mkdir()
    folder = (tmp_path / "trained/adapter").rename(tmp_path / "starts/tiny-textcraft")
    (tmp_path / "trained/sft.json").rename(folder / "sft.json")
    assert warmstart.settings_for("tiny", "textcraft") == settings
    assert warmstart.shipped_adapters("tiny", "textcraft", records[:3], settings) is None
    assert (
        warmstart.shipped_adapters("tiny", "textcraft", records, replace(settings, seed=1)) is None
    )
    monkeypatch.setattr(warmstart, "train_and_save", None)
    with fresh_process_state():
        merged = warm(TASKS[:4], settings, accelerator=distributed.make_accelerator("no"))
    assert "shipped with the project" in capsys.readouterr().out
    unpacked, trained, base = (
        load_policy(path).lm.state_dict()
        for path in (merged, str(tmp_path / "trained"), resolve_model("tiny"))
    )
    for name, weight in trained.items():  # adapters and weights are rounded to bfloat16
        moved = (weight - base[name]).abs().max()
        assert (unpacked[name] - weight).abs().max() <= 0.02 * moved + 2**-8 * weight.abs().max()
    assert any((trained[name] - base[name]).abs().max() > 1e-3 for name in trained)
    config = options("textcraft", model="tiny")
    assert warmstart.known_outcomes(config, merged) == {}
    (folder / "outcomes.json").write_text('{"textcraft_31": [3, 8]}')
    assert warmstart.known_outcomes(config, merged) == {"textcraft_31": [3, 8]}
    for other in (replace(config, warm_start="never"), replace(config, env="babyai")):
        assert warmstart.known_outcomes(other, merged) == {}
    (Path(merged) / "sft.json").touch()  # as if it had been trained on this machine
    assert warmstart.known_outcomes(config, merged) == {}


@pytest.mark.parametrize("env", ["textcraft", pytest.param("webarena", marks=pytest.mark.long)])
def test_the_default_run_finds_its_shipped_warm_start(empty_cache, monkeypatch, env):
    """Its key contains the demonstrations, so new texts of the environment make it stale."""
    builders = []
    monkeypatch.setattr(warmstart, "resolve_model", lambda name: name)
    monkeypatch.setattr(warmstart, "build_folder", lambda folder, make: builders.append(make))
    config = complete(options(env, model="smollm2-135m"))
    warmstart.start_model(config, accelerator=None)
    assert builders[0].func is warmstart.merge_adapters, "rebuild recipes/starts, see its README"
