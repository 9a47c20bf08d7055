"""scale/default_models.py: small models are built reproducibly; others are checked before a run."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from config import Misuse
from scale import default_models
from scale.default_models import (
    SHAPES,
    check_length,
    check_model,
    has_weights,
    model_config,
    resolve_model,
)

ROOT = Path(__file__).resolve().parent.parent


def test_the_tiny_model_is_the_same_in_two_processes(tmp_path):
    """Its weights come from a fixed seed and its tokenizer from a fixed corpus. PYTHONHASHSEED has
    no effect."""
    command = (
        "import sys, pathlib; from scale import default_models; "
        "default_models.build_tiny(pathlib.Path(sys.argv[1]))"
    )
    models = []
    for hash_seed in "01":
        subprocess.run(
            [sys.executable, "-c", command, str(tmp_path / hash_seed)],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            check=True,
        )
        models.append({p.name: p.read_bytes() for p in (tmp_path / hash_seed).iterdir()})
    assert {"tokenizer.json", "model.safetensors", "config.json"} <= models[0].keys()
    assert models[0] == models[1]


@pytest.mark.parametrize("name", SHAPES)
def test_the_sizes_in_shapes_are_those_of_the_models(name):
    config = json.loads((Path(resolve_model(name)) / "config.json").read_text())
    assert {key: config[key] for key in SHAPES[name]} == SHAPES[name]


def model_in(folder, **config):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def refusal(name):
    with pytest.raises(Misuse) as error:
        check_model(str(name))
    return str(error.value)


def test_a_hub_model_is_refused_unless_its_weights_are_cached_or_the_hub_has_it(
    tmp_path, monkeypatch
):
    import huggingface_hub.constants

    def unreachable(url, timeout):
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", unreachable)
    refs = tmp_path / "models--some--model" / "refs"
    refs.mkdir(parents=True)
    (refs / "main").write_text("abc")
    path = model_in(refs.parent / "snapshots" / "abc", max_position_embeddings=77)
    check_model("some/model")
    assert resolve_model("some/model") == str(path)
    assert model_config("some/model")["max_position_embeddings"] == 77
    assert "ConnectionError: no route" in refusal("other/model")
    (path / "model.safetensors").unlink()
    refusal("some/model")  # a cached config.json is not enough
    monkeypatch.setattr(default_models, "_config_from_hub", lambda name: path / "config.json")
    check_model("some/model")
    assert resolve_model("some/model") == "some/model"


def test_an_interrupted_download_is_not_a_model(tmp_path):
    """The weights of a large model are several files, which an index lists."""
    parts = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    index = {"weight_map": {"a": parts[0], "b": parts[1], "c": parts[1]}}
    (tmp_path / parts[0]).touch()
    assert not has_weights(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert not has_weights(tmp_path)
    (tmp_path / parts[1]).touch()
    assert has_weights(tmp_path)


def test_an_error_names_what_is_missing_in_a_folder(tmp_path):
    best = model_in(tmp_path / "run" / "checkpoints" / "best")
    assert f"did you mean {best}?" in refusal(tmp_path / "run")
    folder = model_in(tmp_path / "x")
    check_model(str(folder))
    (folder / "model.safetensors").unlink()
    assert "contains no weights" in refusal(folder)
    (folder / "config.json").write_text("{")
    assert "contains no config.json" in refusal(folder)
    (folder / "adapter_config.json").write_text("{}")
    assert "merge the adapters into their base model first" in refusal(folder)
    for name in ("", "a/b/c", "http://h/m"):
        assert "neither a folder that exists nor a hub id" in refusal(name)


def test_more_tokens_than_the_model_has_positions_are_refused(tmp_path):
    check_length("tiny", 8192)
    with pytest.raises(Misuse, match=r"--max-trajectory-tokens 8193.*8192 positions"):
        check_length("tiny", 8193)
    stretched = {"rope_type": "yarn", "factor": 4.0}
    long = model_in(tmp_path / "a", max_position_embeddings=9, rope_scaling=stretched)
    check_length(str(long), 30)
    check_length(str(model_in(tmp_path / "b")), 10**9)  # its config.json has no number of positions
