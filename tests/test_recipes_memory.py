"""What fits where: the formulas of scale/memory.py against updates and what was committed."""

import json
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import measure_memory
import pytest

from benchmarks import gpu
from recipes import memory
from scale.memory import state_bytes, transient_bytes

ROOT = Path(__file__).resolve().parent.parent
RECIPES = ROOT / "recipes"


def test_shapes_have_the_published_numbers_of_parameters():
    counts = {name: shape.parameters for name, shape in memory.QWEN.items()}
    assert counts == {
        "0.5B": 494_032_768,
        "1.5B": 1_543_714_304,
        "3B": 3_085_938_688,
        "7B": 7_615_616_512,
    }


@pytest.mark.parametrize("keep", ["all", "products", "inputs"])
@pytest.mark.parametrize("rank", [0, 4])
def test_the_formulas_are_what_an_update_of_tiny_holds(rank, keep):
    shape = measure_memory.SMALL["tiny"]
    found = measure_memory.measure(shape, tokens=256, lora_rank=rank, keep=keep)
    state = memory.state_bytes(shape, 1, rank)
    for part in measure_memory.STATE:
        assert found[part] == state[part], part
    expected = transient_bytes(shape, 256, 1, rank, keep, 24 << 20)
    assert found["transient"] == pytest.approx(expected, rel=0.15)


@pytest.mark.slow
def test_two_processes_hold_what_the_formulas_give_each_of_them():
    shape = measure_memory.SMALL["tiny"]
    found = measure_memory.measure_in_two(shape, 128, 8)
    state = memory.state_bytes(shape, 2, 8)
    assert found == {part: state[part] for part in measure_memory.STATE}


@pytest.mark.parametrize(("rank", "keep"), [(0, "all"), (0, "inputs"), (4, "all"), (4, "inputs")])
def test_activations_of_several_devices_are_those_of_a_model_in_bfloat16(rank, keep):
    """What 128 tokens more take, so that weights and their copies do not matter."""
    shape = measure_memory.SMALL["tiny"]

    def more(peak):
        return peak(256) - peak(128)

    def measured(tokens):
        found = measure_memory.measure(shape, tokens, rank, keep, bfloat16=True)
        return found["transient"]

    def formula(tokens):
        return transient_bytes(shape, tokens, 2, rank, keep, 24 << 20)

    assert more(measured) == pytest.approx(more(formula), rel=0.1)


def test_tiny_is_the_model_of_that_name():
    from scale.default_models import resolve_model

    config = json.loads((Path(resolve_model("tiny")) / "config.json").read_text())
    shape = measure_memory.SMALL["tiny"]
    assert (config["vocab_size"], config["hidden_size"]) == (shape.vocab, shape.hidden)
    assert (config["intermediate_size"], config["num_hidden_layers"]) == (
        shape.intermediate,
        shape.layers,
    )


def test_the_committed_table_was_measured_and_agrees_with_the_formulas_of_today():
    saved = json.loads((memory.RESULTS / "memory.json").read_text())
    assert saved["arithmetic"] == json.loads(json.dumps(memory.arithmetic_rows()))
    page = (memory.RESULTS / "memory.md").read_text(encoding="utf-8")
    parts = measure_memory.report(saved["measured"]), memory.report(saved["arithmetic"])
    assert page == "".join(parts)
    assert {row["devices"] for row in saved["measured"]} == {1, 2}
    for row in saved["measured"]:
        found, formula = row["measured"], row["formula"]
        for part in ("weights", "gradients", "moments"):
            assert found[part] == formula[part], row
        if "transient" in found:
            assert found["transient"] == pytest.approx(formula["transient"], rel=0.1), row


def test_a_gpu_took_what_the_formulas_of_today_say():
    found = json.loads((ROOT / "benchmarks/results/gpu-3B.json").read_text())
    assert found["hardware"]["gpus"] == ["NVIDIA H200"]
    assert [row["way"] for row in found["update"]] == list(gpu.WAYS)
    shape = memory.QWEN["3B"]
    for row in found["update"]:
        has_lora, in_parts, keep, _ = gpu.WAYS[row["way"]]
        rank = memory.LORA_RANK if has_lora else 0
        state = sum((state_bytes(shape, 1, rank) | {"reference": 0}).values())
        rest = transient_bytes(shape, row["tokens"], 2 if in_parts else 1, rank, keep)
        assert row["state_gb"] == round(state / 1e9, 2), row
        assert row["peak_gb"] == pytest.approx((state + rest) / 1e9, rel=0.06), row
    for name, rows in found["runs"].items():
        assert all(row["sync/log_prob_diff_mean"] < 0.05 for row in rows), name
    readme = (RECIPES / "README.md").read_text(encoding="utf-8")
    ratios = [row["ratio"] for row in found["update"]]
    assert f"peaks of {min(ratios):.2f} to {max(ratios):.2f} of the formula's" in readme
    used = {row["way"]: f"{row['share_of_peak_flops']:.0%}" for row in found["update"]}
    assert used["full, checkpointing"] == "40%" and "40 % of the card's arithmetic" in readme
    seconds = {
        name: statistics.median(row["time/update_s"] for row in rows[1:])
        for name, rows in found["runs"].items()
    }
    lesson = (ROOT / "tutorials/10_is_my_run_healthy.md").read_text(encoding="utf-8")
    said = f"{seconds['LoRA']:.1f} s for an update\nof a 3B model with adapters"
    assert said in lesson and f"and {seconds['full']:.1f} s for one of all weights" in lesson
    lora = [int(used[way][:-1]) for way in used if way.startswith("LoRA")]
    assert f"{min(lora)} to {max(lora)} with LoRA" in readme


@pytest.mark.long
def test_the_gpu_benchmark_walks_all_its_ways_on_a_processor(tmp_path):
    command = [sys.executable, "benchmarks/gpu.py", "--shape", "tiny", "--context", "256"]
    command += ["--repeats", "1", "--run-steps", "2", "--out", str(tmp_path / "gpu.json")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stderr[-2000:]
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert [row["way"] for row in found["update"]] == list(gpu.WAYS)
    assert all(row["state_gb"] == row["state_formula_gb"] for row in found["update"])
    assert {name: len(rows) for name, rows in found["runs"].items()} == {"full": 2, "LoRA": 2}
    assert "| LoRA, checkpointing, FSDP2 | 256 |" in ended.stdout
    page = memory.measured_on_gpu(found | {"hardware": {"gpus": ["a card"]}})
    assert page.startswith("One a card") and "half of it being the sampler's: full 0.0 GiB" in page


def test_the_gpu_benchmark_refuses_a_large_model_without_a_gpu(tmp_path):
    with pytest.raises(SystemExit, match="no GPU that torch can use; --shape tiny"):
        gpu.main(["--out", str(tmp_path / "gpu.json")])
    assert not list(tmp_path.iterdir())


def test_what_is_written_is_what_was_there_where_nothing_has_changed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(memory, "RESULTS", tmp_path)
    for name in ("memory.md", "memory.json"):
        shutil.copy(RECIPES / "results" / name, tmp_path)
    monkeypatch.setattr(sys, "argv", ["memory.py", "--write"])
    memory.main()
    page = (RECIPES / "results/memory.md").read_text(encoding="utf-8")
    assert (tmp_path / "memory.md").read_text(encoding="utf-8") == page == capsys.readouterr().out
    before, after = (
        json.loads((folder / "memory.json").read_text())
        for folder in (RECIPES / "results", tmp_path)
    )
    for part in ("measured", "arithmetic"):
        assert before[part] == after[part]


def test_checkpointing_lora_and_more_devices_never_need_more():
    for shape in memory.QWEN.values():
        for tokens in memory.CONTEXTS:
            for devices in memory.DEVICES:
                full = memory.update_bytes(shape, tokens, devices)
                assert full < memory.update_bytes(shape, tokens, devices, keep="all")
                assert memory.update_bytes(shape, tokens, devices, memory.LORA_RANK) < full
            sizes = [memory.update_bytes(shape, tokens, devices) for devices in memory.DEVICES]
            assert sizes == sorted(sizes, reverse=True)


FILES = ("train.py", "run/worker.py", "scale/sync.py")


def test_the_table_knows_that_the_sampler_leaves_the_card():
    text = "".join((ROOT / f).read_text() for f in ("train.py", "run/worker.py", "scale/sync.py"))
    assert re.search(r"engine\.sleep\(", text) and "self.rest()" in text
    assert "leaves it during the update" in memory.report([])
