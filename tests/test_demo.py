"""`make demo`: what it starts from is what its command says, and its curve rises."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from envs import load_tasks
from recipes import careless
from recipes.common import change, percent
from reporting.scoring import bootstrap
from warmstart import STARTS, hash_of

ROOT = Path(__file__).resolve().parent.parent
WORLDS = ROOT / "recipes/results/worlds"
START = STARTS / "tiny-careless"


def test_the_start_was_made_by_the_command_beside_it():
    about = json.loads((START / "sft.json").read_text())
    command = (STARTS / "README.md").read_text(encoding="utf-8")
    count = int(command.split("--count ")[1].split()[0])
    records, _ = careless.demonstrate(load_tasks("textcraft", "train"), count, careless.ERROR, 0)
    assert about["records"] == hash_of(records)
    for words, name in (("--batch-size 16", "batch_size"), ("--epochs 1", "epochs")):
        assert words in command and about["settings"][name] == int(words.split()[1])


def test_make_demo_runs_the_committed_options():
    assert "train.py --config recipes/demo.json" in (ROOT / "Makefile").read_text()
    options = json.loads((ROOT / "recipes/demo.json").read_text())
    assert (ROOT / options["model"]) == START and (ROOT / options["prompt"]).exists()


def test_what_the_page_says_of_the_first_steps_is_what_the_runs_gave():
    found = json.loads((ROOT / "recipes/results/starts/first_steps.json").read_text())
    page = " ".join((STARTS / "README.md").read_text(encoding="utf-8").split())
    for run in [*found["runs"], *found["float32"]]:
        before, after = (100 * run[w]["overall"]["avg"]["value"] for w in ("before", "after"))
        low, high = (100 * run["after"]["overall"]["avg"][n] for n in ("low", "high"))
        said = f"from {before:.1f} to {after:.1f} % [{low:.1f}, {high:.1f}]"
        assert f"seed {run['seed']} went {said}" in page or f"seed {run['seed']} {said}" in page
    assert [run["seed"] for run in found["runs"]] == [0, 1, 2]


def test_what_the_page_says_of_short_goals_is_what_was_played():
    found = json.loads((ROOT / "recipes/results/starts/short_goals.json").read_text())
    without, slipped = found["slips 0.0"], found["slips 0.3"]
    silent = found["slips 0.3, no thoughts"]
    page = (STARTS / "README.md").read_text(encoding="utf-8")
    assert rows_of(without["items"], slipped["items"]) <= set(page.splitlines())
    assert rows_of(slipped["items"], silent["items"]) <= set(page.splitlines())
    more = found["1,152 demonstrations"]
    assert rows_of(silent["items"], more["items"]) <= set(page.splitlines())
    tried = json.loads((WORLDS / "tried/textcraft-1152-demonstrations.json").read_text())
    default = json.loads((WORLDS / "textcraft-0.json").read_text())
    results = (ROOT / "RESULTS.md").read_text(encoding="utf-8")
    both = [[percent(e["avg"]) for e in run["held_out"][:2]] for run in (tried, default)]
    assert [e["step"] for run in (tried, default) for e in run["held_out"][:2]] == [0, 25] * 2
    for texts in both:
        for text in texts:
            assert text.replace(" [", " % [") in page, text
            assert text.split()[0] in results
    for each in (without, slipped, silent, more):
        looped = each["failed with three or more repeated actions"]
        assert f"{looped} of {each['failed']}" in page
    tokens = (slipped["tokens a turn"], silent["tokens a turn"])
    assert "With them a turn takes {} tokens, without them {}".format(*tokens) in page
    lesson = (ROOT / "tutorials/14_imitation.md").read_text(encoding="utf-8")
    assert f"for {tokens[1]:.0f} tokens a turn in place of {tokens[0]:.0f}" in lesson
    about = json.loads((STARTS / "smollm2-135m-textcraft/sft.json").read_text())["settings"]
    assert f"--num-demonstrations {about['num_demonstrations']} --slips {about['slips']}" in page


def test_what_the_page_says_of_sciworlds_start_is_what_was_played():
    found = json.loads((ROOT / "recipes/results/starts/sciworld_kinds.json").read_text())
    items, about = found["items"], found["start"]["settings"]
    page = (ROOT / "recipes/starts/README.md").read_text(encoding="utf-8")
    kinds: dict[str, list[float]] = {}
    for item in items.values():
        kinds.setdefault(item["kind"], []).append(item["avg"])
    kinds["all"] = [item["avg"] for item in items.values()]
    assert len(kinds) == 8 and len(kinds["all"]) == 280
    for kind, shares in kinds.items():
        name = re.sub("^(find|lifespan)-", "", kind).replace("-", " ")
        mixed = sum(0 < share < 1 for share in shares)
        assert f"| {name} | {len(shares)} | {percent(bootstrap(shares))} | {mixed} |" in page
    command = page.split("python warmstart.py --env sciworld")[1].split("```")[0]
    assert f"--num-demonstrations {about['num_demonstrations']} --slips {about['slips']}" in command


def rows_of(before, after):
    """The lines of a table: depth 1, depth 2, all."""
    lines = set()
    for kind in ("depth 1", "depth 2", "all"):
        own = [
            {i: item["avg"] for i, item in items.items() if kind in ("all", item["subtask"])}
            for items in (before, after)
        ]
        row = change(*own)
        shares = " | ".join(percent(row[name]) for name in ("before", "after"))
        lines.add(f"| {kind} | {shares} | {percent(row['difference'], signed=True)} |")
    return lines


@pytest.mark.long
def test_the_demos_curve_rises(tmp_path):
    run = tmp_path / "run"
    command = [sys.executable, "train.py", "--config", "recipes/demo.json", "--run-dir", str(run)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    assert ended.returncode == 0, ended.stderr[-2000:]
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    success = [row["train/success_rate"] for row in rows]
    assert len(success) == 28
    assert sum(success[-10:]) / 10 > sum(success[:10]) / 10  # seen: 0.66 and 0.53
    assert (run / "reward.png").exists() and "reward.png" in ended.stdout
