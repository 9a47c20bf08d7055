"""scale/default_models.py: built once, aside, and the same on every machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from scale import default_models
from scale.default_models import resolve_model

ROOT = Path(__file__).resolve().parent.parent


def test_a_model_is_built_once_and_kept_in_the_cache(monkeypatch, tmp_path):
    built = []

    def build(folder):
        built.append(folder)
        (folder / "config.json").write_text("{}")

    monkeypatch.setenv("AGENT_RL_CACHE", str(tmp_path))
    monkeypatch.setattr(default_models, "build_tiny", build)
    assert resolve_model("tiny") == resolve_model("tiny") == str(tmp_path / "models" / "tiny")
    assert len(built) == 1 and built[0] != tmp_path / "models" / "tiny"
    assert (tmp_path / "models" / "tiny" / "config.json").read_text() == "{}"


def test_a_build_that_fails_leaves_nothing_that_looks_like_a_model(monkeypatch, tmp_path):
    def build(folder):
        (folder / "config.json").write_text("{}")
        raise OSError("disk full")

    monkeypatch.setenv("AGENT_RL_CACHE", str(tmp_path))
    monkeypatch.setattr(default_models, "build_tiny", build)
    with pytest.raises(OSError, match="disk full"):
        resolve_model("tiny")
    assert list((tmp_path / "models").iterdir()) == []


def test_a_model_that_another_process_built_meanwhile_is_kept(monkeypatch, tmp_path):
    def build(folder):
        (folder / "config.json").write_text("ours")
        (tmp_path / "models" / "tiny").mkdir()
        (tmp_path / "models" / "tiny" / "config.json").write_text("theirs")

    monkeypatch.setenv("AGENT_RL_CACHE", str(tmp_path))
    monkeypatch.setattr(default_models, "build_tiny", build)
    assert (Path(resolve_model("tiny")) / "config.json").read_text() == "theirs"
    assert [p.name for p in (tmp_path / "models").iterdir()] == ["tiny"]


def test_any_other_name_is_a_path_or_a_hub_id():
    assert resolve_model("Qwen/Qwen2.5-3B-Instruct") == "Qwen/Qwen2.5-3B-Instruct"


def test_the_tiny_model_is_the_same_in_two_processes(tmp_path):
    """Weights from a fixed seed, the tokenizer from a fixed corpus, whatever hashes to what."""
    command = (
        "import sys, pathlib; from runtime import default_models; "
        "default_models.build_tiny(pathlib.Path(sys.argv[1]))"
    )
    folders = [tmp_path / "0", tmp_path / "1"]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", command, str(folder)],
            cwd=ROOT,
            env={**os.environ, "PYTHONHASHSEED": folder.name},
        )
        for folder in folders
    ]
    assert [process.wait() for process in processes] == [0, 0]
    names = sorted(path.name for path in folders[0].iterdir())
    assert {"tokenizer.json", "model.safetensors", "config.json"} <= set(names)
    assert names == sorted(path.name for path in folders[1].iterdir())
    for name in names:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes(), name
