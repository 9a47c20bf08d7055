"""The parts of the benchmarks that decide what their figures mean."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest
import torch
from toy_env import fresh_process_state

from benchmarks import (
    common,
    groups,
    methods,
    prefix,
    rollout,
    server,
    trl_dpo,
    update,
    weight_sync,
)
from config import Objective
from scale.prefix import opening_length

ROOT = Path(__file__).resolve().parent.parent
FILES = [path for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text()]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_benchmark_starts_and_knows_the_flags_that_are_said_of_it(path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [path.name, "--help"])
    with pytest.raises(SystemExit) as ended:
        import_module(f"benchmarks.{path.stem}").main()
    assert ended.value.code == 0
    pages = [path, ROOT / "README.md", ROOT / "RESULTS.md", ROOT / "benchmarks/README.md"]
    said = "".join(page.read_text(encoding="utf-8") for page in pages)
    flags = re.findall(
        r"--[a-z-]+", " ".join(re.findall(rf"benchmarks/{path.name}([^`\n]*)", said))
    )
    assert set(flags) <= set(re.findall(r"--[a-z-]+", capsys.readouterr().out))


def form(content):
    """Names and types of a result, without what is measured."""
    if isinstance(content, dict):
        return {name: form(value) for name, value in content.items() if name != "versions"}
    if isinstance(content, list):
        return [form(value) for value in content[:1]]
    return float if isinstance(content, (int, float)) else type(content)


@pytest.mark.parametrize(
    ("module", "name", "words"),
    [
        (update, "update_tiny", "--tasks 1 --samples 2 --repeats 1"),
        (server, "server", "--seconds 0.2 --live 4 --cycles 10"),
        pytest.param(prefix, "prefix-smollm2-135m", "--quick --repeats 1", marks=pytest.mark.slow),
    ],
)
def test_a_small_run_writes_the_form_of_the_committed_result(
    module, name, words, tmp_path, monkeypatch
):
    out = tmp_path / "out.json"
    monkeypatch.setattr(sys, "argv", ["it", *words.split(), "--out", str(out)])
    monkeypatch.setattr("update.SHARING_PAYS", 0.1)  # what prefix.py changes is put back
    with fresh_process_state():
        assert module.main() == 0
    written, committed = (
        form(json.loads(path.read_text())) for path in (out, common.RESULTS / f"{name}.json")
    )
    for part in ("git_commit", "command"):  # newer than one of the committed results
        written.pop(part), committed.pop(part, None)
    if module is prefix:
        written["summary"].pop("crossover"), committed["summary"].pop("crossover")
    assert written == committed


@pytest.mark.parametrize("spread", [0.0, 0.5])
@pytest.mark.parametrize("share", prefix.SHARES)
def test_a_constructed_group_saves_the_share_it_was_asked_for(share, spread):
    p, owns = groups.shape(share, 256, spread)
    batch = groups.construct(p, owns, groups=2, vocabulary=1024)
    assert opening_length(batch.rows(range(8))) == p
    assert abs(int(batch.lengths.sum()) - 16 * 256) <= 16
    on = Objective(max_tokens_per_micro_batch=4096)
    facts = prefix.facts_of(batch, on, replace(on, share_prefix=False))
    assert facts["saved"] == pytest.approx(share, abs=0.005)
    if not spread:
        assert facts["unshared_padding"] == 0


def test_a_share_that_no_opening_can_save_is_refused():
    with pytest.raises(ValueError, match=r"at most 0\.875"):
        groups.shape(0.9, 256)


def test_the_last_crossing_counts_and_cases_without_a_time_are_left_out():
    points = [(0.3, 1.2), (0.0, 1.01), (0.1, 0.9), (0.2, 1.1)]  # in any order
    assert prefix.crossover(points)["at"] == pytest.approx(0.15)
    assert prefix.crossover([])["at"] is None
    assert prefix.summarize({"cases": [{"name": "equal", "repeats": []}]})["rows"] == []


def test_bytes_held_are_seen_until_the_last_view_is_gone():
    def stream():
        for i in range(4):
            yield str(i), torch.zeros(100 * (i + 1))  # 400, 800, 1200, 1600 bytes

    def taken(keep):
        held, kept = weight_sync.Held(), []
        watched = held.watch(stream())
        while True:
            try:
                _, tensor = next(watched)
            except StopIteration:
                return held
            if keep:
                kept.append(tensor[:1])  # a view holds all of the memory
            del tensor

    one_at_a_time = taken(keep=False)
    assert (one_at_a_time.total, one_at_a_time.largest, one_at_a_time.peak) == (4000, 1600, 1600)
    assert taken(keep=True).peak == 4000


def test_ratios_are_taken_within_a_repeat_and_then_their_median():
    def repeat(engine, collect, lockstep):
        seconds = {"engine": engine, "collect": collect, "lockstep": lockstep}
        return {"tail": {k: {"tokens": 100, "seconds": s, "idle_s": 0} for k, s in seconds.items()}}

    # The machine is twice as slow in the second repeat; the ratios do not notice.
    row = rollout.summarize([repeat(1, 2, 6), repeat(2, 4, 12), repeat(1, 4, 4)])["tail"]
    assert (row["ratio_to_engine"], row["ratio_to_lockstep"]) == (0.5, 3.0)


def test_the_benchmark_world_is_slow_at_the_same_steps_for_the_same_seed(monkeypatch):
    def slept(seed):
        seconds = []
        monkeypatch.setattr(rollout.time, "sleep", seconds.append)
        world = rollout.Delay()
        world.reset(list(rollout.LATENCIES).index("tail"), seed)
        for _ in range(400):
            world.step("x")
        return seconds

    assert slept(1) == slept(1)
    assert slept(1) != slept(2)
    assert set(slept(1)) == {0.0, 2.0}
    assert 4 <= slept(1).count(2.0) <= 40  # 5 % of 400 are 20


@pytest.mark.parametrize("name", ["trl_step.py", "trl_dpo.py"])
def test_a_trl_benchmark_without_trl_is_one_line_that_says_how_to_install_it(name):
    code = (
        "import importlib.metadata as m, runpy, sys\n"
        "def version(name): raise m.PackageNotFoundError(name)\n"
        "m.version = version\n"
        f"sys.argv = ['{name}']\n"
        f"runpy.run_path('benchmarks/{name}', run_name='__main__')\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 1
    assert len(ended.stderr.strip().splitlines()) == 1
    assert "pip install 'trl==1.16.*' datasets" in ended.stderr
    assert ended.stderr.startswith(f"{name} needs trl")


def test_trl_gets_the_pairs_token_for_token():
    batch = groups.construct(5, (7, 9), 3, vocabulary=50)
    batch.ref_sums = -batch.loss_mask.sum(1)
    columns = trl_dpo.columns_of(batch)
    assert {len(values) for values in columns.values()} == {3}
    for pair in range(3):
        for side, row in (("chosen", 2 * pair), ("rejected", 2 * pair + 1)):
            ids = columns["prompt_ids"][pair] + columns[f"{side}_ids"][pair]
            assert ids == batch.input_ids[row, : batch.lengths[row]].tolist()
            assert columns[f"ref_{side}_logps"][pair] == float(batch.ref_sums[row])


def test_the_page_says_of_the_methods_what_was_measured():
    page = (ROOT / "RESULTS.md").read_text(encoding="utf-8")
    for model in ("tiny", "smollm2-135m"):
        file = ROOT / f"benchmarks/results/methods_{model}.json"
        summary = json.loads(file.read_text(encoding="utf-8"))["summary"]
        ratios = {name: case["ratio"] for name, case in summary.items()}
        assert (
            "{imitate} and {dpo} (goal 0.9); {shared} (goal 1.2: missed)".format(**ratios) in page
        )
    measured = json.loads((ROOT / "benchmarks/results/trl_dpo.json").read_text(encoding="utf-8"))
    assert measured["settings"]["pairs"] == 16
    said = "{faster} (goal 1.5); {memory} (goal: below 1)".format(**measured["summary"])
    assert said in page
    padded, packed = 2 * (methods.OPENING + methods.OWN), methods.OPENING + 2 * methods.OWN
    assert padded / packed == 1.2  # "all that can be saved"


def test_the_page_says_of_replay_what_was_measured():
    found = json.loads((ROOT / "benchmarks/results/replay.json").read_text(encoding="utf-8"))
    page = (ROOT / "RESULTS.md").read_text(encoding="utf-8")
    section = page.partition("## Looking at a large run")[2].partition("\n## ")[0]
    m, export = found["medians"], found["export"]
    for said in (
        f"{found['trajectories']:,} trajectories",
        f"{found['bytes'] / 1e6:,.0f} MB",
        f"| {m['start_s']:.2f} s |",
        f"| {m['first_screen_s']:.3f} s |",
        f"| {m['list_s']:.4f} s; {m['one_s']:.4f} s |",
        f"| {m['search_s']:.2f} s |",
        f"| {m['whole_s']:.1f} s: {found['whole_over_first_screen']:.1f} times",
        f"| {m['peak_bytes'] / 1e6:.0f} MB, {100 * found['memory_share']:.1f} % of the files |",
        f"| {export['seconds']:.1f} s, {export['megabytes']:.2f} MB |",
    ):
        assert said in section, said
    for state in found["states"].values():
        assert (
            f"{1000 * state['state_s']:.2g} ms and {state['state_bytes'] / 1000:.2g} kB" in section
        )
    # the goals of the benchmark
    assert m["first_screen_s"] < 2 and found["whole_over_first_screen"] > 10
    assert m["list_s"] < 0.3 and m["one_s"] < 0.2 and found["memory_share"] < 0.1
