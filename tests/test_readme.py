"""README.md, RESULTS.md and docs/ say what is there: files, options, commands, tests, figures."""

import json
import os
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from statistics import fmean

import pytest

import replay
from agentevol import EvolConfig
from config import Config, checked, read_command_line, with_preset
from dpo import DpoConfig
from envs import load_tasks
from envs.babyai.env import BabyAI
from envs.common import oracle_turns
from envs.sciworld.__main__ import MAX_TURNS
from envs.sciworld.tasks import find_task
from envs.searchqa.questions import own_questions
from envs.server import parse
from recipes import miniature_plan, pushed, worlds
from recipes.common import difference, mean_over_seeds, percent, pooled_at
from recipes.evidence import at, brackets, common_budget, compare, end, over_seeds, shares, start
from recipes.learns_report import analyse, held_out_table, read_results
from recipes.miniature_report import passes
from recipes.published import analyse_test, split_table
from reporting.evalconfig import EvalConfig
from reporting.table import header
from run.methodworker import MethodConfig
from sft import SftConfig
from tools.setup_env import SETS
from update import SHARING_PAYS
from warmstart import StartConfig

USED = "train/trajectories_used"
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
README = (ROOT / "README.md").read_text(encoding="utf-8")
MEASURED = (ROOT / "RESULTS.md").read_text(encoding="utf-8")
PAGES = {
    page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8")
    for page in [ROOT / "README.md", ROOT / "RESULTS.md", *sorted((ROOT / "docs").glob("*.md"))]
}
OPTIONS = {
    "train.py": Config,
    "evaluate.py": EvalConfig,
    "warmstart.py": StartConfig,
    "sft.py": SftConfig,
    "dpo.py": DpoConfig,
    "agentevol.py": EvolConfig,
}


def rows(heading: str, page: str = "README.md") -> list[list[str]]:
    """Cells of the first table under a heading."""
    section = PAGES[page].split(heading, 1)[1].split("\n#", 1)[0]
    table = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_the_file_map_names_every_file_of_the_lesson_and_every_wing() -> None:
    named = [row[0].strip("`") for row in rows("## Read it") if row[0].endswith(".py`")]
    assert sorted(named) == sorted({p.name for p in ROOT.glob("*.py")} - {"conftest.py"})
    section = README.split("## Read it", 1)[1].split("\n## ", 1)[0]
    wings = {p.parent.name for p in ROOT.glob("*/*.py") if not p.parent.name.startswith(".")}
    assert {f"{name}/" for name in wings} <= set(re.findall(r"`(\w+/)`", section))


@pytest.mark.parametrize("page", [name for name in PAGES if name.startswith("docs/")])
def test_a_page_of_docs_names_tests_that_exist(page: str) -> None:
    named = re.findall(r"`(tests/\w+\.py)::(\w+)`", PAGES[page])
    assert len(named) >= {"docs/differences.md": 30}.get(page, 1)
    missing = [
        f"{file}::{name}" for file, name in named if f"def {name}(" not in (ROOT / file).read_text()
    ]
    assert missing == []


def test_the_table_of_defaults_shows_the_defaults() -> None:
    cpu, gpu = with_preset("laptop"), with_preset("paper")
    for option, on_cpu, on_gpu in rows("### Defaults"):
        for name in re.findall(r"`--([a-z-]+)`", option):
            field = name.replace("-", "_")
            for config, shown in ((cpu, on_cpu), (gpu, on_gpu)):
                value = getattr(config, field)
                values = value if isinstance(value, tuple) else (value,)
                for v in values:
                    text = f"{v:g}" if isinstance(v, float) else str(v)
                    assert text in shown or str(v) in shown, f"--{name} is {v}, README says {shown}"


def flags_known_to(script: str) -> set[str]:
    """What a command may be given: options of the two that have a dataclass, literals of others."""
    if script in OPTIONS:
        names = {f.name.replace("_", "-") for f in fields(OPTIONS[script])}
        return {f"--{no}{name}" for name in names for no in ("", "no-")}
    folder = (ROOT / script).parents[script.endswith("__main__.py")]
    sources = [path.read_text(encoding="utf-8") for path in folder.glob("*.py")]
    known = set(re.findall(r'"(--[a-z-]+)"', "".join(sources)))
    return known | flags_known_to("train.py") if script.startswith("recipes/") else known


def test_the_page_of_files_says_every_option_of_a_server_with_its_default() -> None:
    told = vars(parse(["--env", "textcraft"]))
    source = (ROOT / "envs/options.py").read_text(encoding="utf-8")
    flags = set(re.findall(r'"(--[a-z-]+)"', source)) - {"--env"}
    section = PAGES["docs/files.md"].split("## What a server", 1)[1]
    rows = [line.split("|")[1:3] for line in section.splitlines() if line.startswith("| `--")]
    said = {flag: row[1] for row in rows for flag in re.findall(r"`(--[a-z-]+)`", row[0])}
    assert said.keys() == flags
    for flag, default in said.items():
        value = told.get(flag[2:].replace("-", "_"))
        shown = value if isinstance(value, str | None) else f"{value:,.0f}".replace("36,", "36")
        assert (shown or "two a session, and 256") in default, flag


def in_files(module: re.Match[str]) -> str:
    path = f"{module[1]}/{module[2]}"
    return f"{path}/__main__.py" if (ROOT / path).is_dir() else f"{path}.py"


@pytest.mark.parametrize("page", PAGES)
def test_every_command_exists_and_knows_the_flags_that_are_given_to_it(page: str) -> None:
    text = re.sub(r"-m (\w+)\.(\w+)", in_files, PAGES[page])  # -m envs.server
    start = r"(?:\bpython|\baccelerate launch|\btorchrun)\b[^`\n#]*?"
    commands = re.findall(start + r"([\w/]+\.py)([^`\n#]*)", text.replace("\\\n", ""))
    for script, words in commands:
        if "NAME" not in script:  # any world's
            assert (ROOT / script).exists(), script
            assert set(re.findall(r"--[a-z-]+", words)) <= flags_known_to(script), words
    assert page.startswith("docs/") or len(commands) > 10


def test_the_upload_commands_have_flags_that_hf_knows() -> None:
    lines = re.findall(r"^hf upload (.*)", PAGES["docs/checkpoints.md"], flags=re.M)
    assert len(lines) == 2
    asked = [str(Path(sys.executable).with_name("hf")), "upload", "--help"]
    known = subprocess.run(asked, capture_output=True, text=True, timeout=120, check=True).stdout
    assert set(re.findall(r"--[a-z-]+", " ".join(lines))) <= set(re.findall(r"--[a-z-]+", known))


def test_every_flag_beside_a_key_of_the_published_system_exists() -> None:
    table = " ".join(row[1] for row in rows("## Its keys and ours", "docs/differences.md"))
    assert set(re.findall(r"--[a-z-]+", table)) <= flags_known_to("train.py")


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_links_to_is_there(page: str) -> None:
    linked = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)|<img src=\"([^\"]+)\"", PAGES[page])
    for path in (a or b for a, b in linked):
        assert ((ROOT / page).parent / path).exists(), path
    anchors = re.findall(r"\]\((?:RESULTS\.md|README\.md)?#([\w-]+)\)", PAGES[page])
    headings = re.findall(r"^#+ (.*)", "\n".join(PAGES.values()), flags=re.M)
    slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert set(anchors) <= slugs


def test_the_rows_shown_from_a_run_have_the_columns_of_the_table() -> None:
    (shown,) = re.findall(r"^ +step +return.*", README, flags=re.M)
    assert shown == header()


def test_what_set_up_asks_for_is_what_is_said() -> None:
    assert f"(set-up asks for {SETS['cpu'].disk_gb} GB free)" in README.replace("\n", " ")


def test_the_port_of_replay_is_the_one_that_the_pages_forward() -> None:
    for page in (README, replay.__doc__ or ""):
        assert f"ssh -L {replay.PORT}:127.0.0.1:{replay.PORT} HOST" in page


def test_the_short_results_are_those_of_the_long_page() -> None:
    short = rows("## Results")
    for row, env in zip(short, ("textcraft", "babyai", "sciworld", "searchqa"), strict=True):
        assert f"| {env} | all | {' | '.join(row[1:])} |" in MEASURED
    section = README.split("## Results", 1)[1].split("\n## ", 1)[0].replace("\n", " ")
    section = section.replace(" points [", " [")
    figures = re.findall(r"[+-]?\d+\.\d \[[^\]]*\]|\d+\.\d %", section)
    assert len(figures) >= 3 * 3 + 3
    said = MEASURED.replace("\n", " ").replace(" points [", " [")
    with_interval = [re.escape(re.sub(" %$", " [", figure)) for figure in figures]
    assert [f for f in with_interval if not re.search(rf"(?<![\d.]){f}", said)] == []


def test_every_part_of_the_results_names_the_command_that_gave_it() -> None:
    for section in MEASURED.split("\n## ")[1:]:
        assert re.search(r"`(python \w+/\w+\.py|make train)", section), section[:40]
    table = MEASURED.split("\n## The parts", 1)[1]
    named: list[str] = []
    for row in re.findall(r"^\| .*", table, flags=re.M)[1:]:
        figure, command = row.strip("| ").split(" | ")[-2:]
        named = re.findall(r"[\w/]+\.py", command) or named
        assert ".py" in command or command.startswith("the same"), figure
        assert [name for name in named if not (ROOT / name).exists()] == []
        if named[0].startswith("benchmarks/"):
            assert set(re.findall(r"--[a-z-]+", command)) <= flags_known_to(named[0]), command


def test_the_learning_table_is_the_one_that_the_committed_runs_give() -> None:
    results = read_results(ROOT / "recipes" / "results" / "learns")
    assert [line for line in held_out_table(analyse(results)) if line not in MEASURED] == []


def test_the_table_of_the_published_split_is_the_one_that_the_committed_runs_give() -> None:
    arms = analyse(read_results(ROOT / "recipes" / "results" / "learns"))["arms"]
    tables = {arm: split_table(row["test"]) for arm, row in arms.items() if row["test"]}
    assert list(tables) == ["rl"], "RESULTS.md speaks of one arm"
    assert [line for line in tables["rl"] if line not in MEASURED] == []


def test_what_is_said_of_the_published_split_is_what_was_played() -> None:
    runs = read_results(ROOT / "recipes" / "results" / "learns")["rl"]
    (tests,) = [run["test"] for run in runs if run["test"]]
    before, after = tests["before"], tests["after"]
    assert (before["samples"], before["max_rounds"]) == (after["samples"], 30) == (1, 30)
    crafted = [each["crafted_ingredient"]["depth 2"] for each in (before, after)]
    goals = before["rows"]["depth 2"]["items"]
    said = f"of the {goals} episodes at depth 2, {crafted[0]} craft an ingredient before the run"
    assert f"{said} and {crafted[1]} after it" in MEASURED.replace("\n", " ")


def test_the_hours_that_the_recipes_name_are_those_of_the_committed_runs() -> None:
    arms = read_results(ROOT / "recipes" / "results" / "learns")
    usual = [run["hours"] for arm in ("rl", "sft") for run in arms[arm]]
    (shuffled,) = [run["hours"] for run in arms["shuffled"]]
    said = f"{min(usual):.1f} to {max(usual):.1f} hours a run, `shuffled` {shuffled:.1f}"
    assert said in (ROOT / "recipes" / "README.md").read_text(encoding="utf-8")


def test_what_is_said_of_the_learning_runs_is_what_they_gave() -> None:
    results = read_results(ROOT / "recipes" / "results" / "learns")
    minus = analyse(results)["rl_minus"]["sft"]
    value, low, high = (100 * minus[name] for name in ("value", "low", "high"))
    told = f"{value:+.1f} points [{low:+.1f}, {high:+.1f}]"
    assert f"RL minus it, with the same seed, is {told}" in MEASURED
    runs = results["rl"]
    ends = [row["train/success_rate"] for run in runs for row in run["curve"][-10:]]
    assert f"it ends at {100 * sum(ends) / len(ends):.0f} %" in MEASURED


def test_what_is_said_of_the_shuffled_control_is_what_it_gave() -> None:
    runs = read_results(ROOT / "recipes" / "results" / "learns")["shuffled"]
    assert len(runs) == 1, "RESULTS.md speaks of one seed"
    after = {e["step"]: 100 * e["avg"]["value"] for e in runs[0]["held_out"]}
    assert f"{after[15]:.1f} and {after[30]:.1f} % after 15 and 30 steps" in MEASURED


def hours_of(runs: list[dict]) -> str:
    """How long runs of some seeds took, the quickest and the slowest."""
    hours = [f"{run['hours']:.1f}" for run in sorted(runs, key=lambda run: run["hours"])]
    return f"{hours[0]} to {hours[-1]} hours"


def test_the_default_runs_of_the_other_methods_are_the_committed_ones() -> None:
    folder = ROOT / "recipes" / "results"
    assert [line for line in worlds.methods_table(folder) if line not in MEASURED] == []
    (sft,), preferred, evolved = runs = [
        worlds.results_of(folder / "worlds/methods", name) for name in worlds.METHODS
    ]
    dpo, agentevol = preferred[0], evolved[0]
    assert [len(seeds) for seeds in runs] == [1, 2, 3]
    assert "three runs of `agentevol.py`, two of `dpo.py`, one of `sft.py`" in MEASURED
    assert f"({hours_of([run for seeds in runs for run in seeds])} of steps" in MEASURED
    assert f"{sft['steps']} steps on {sft['config']['num_demonstrations']} demonst" in MEASURED
    size = dpo["config"]
    tries = size["tasks_per_iteration"] * size["group_size"] * size["iterations"]
    assert size["group_size"] == 8 and size["iterations"] == 6
    said = f"plays {size['tasks_per_iteration']} tasks eight times each, six times in all"
    counts = [count for run in preferred for count in run["pairs"]]
    pairs = f"with {min(counts)} to {max(counts)} pairs each time"
    assert f"{said} ({tries:,} tries), {pairs}" in MEASURED

    def gain(run: dict) -> float:
        before, after = (run["held_out"][at]["avg"]["value"] for at in (0, -1))
        return float(100 * (after - before))

    gains = [gain(run) for run in preferred]
    assert "With seed 0 it gains {:.1f} points, with seed 1 {:.1f}".format(*gains) in MEASURED

    def solved(runs: list[dict], at: int) -> int:
        tries, solved = zip(*(run["played"][at]["depth 1"] for run in runs), strict=True)
        return round(100 * sum(solved) / sum(tries))

    last, first = ([solved([run], at) for run in preferred] for at in (-1, 0))
    told = "they solve {} and {} % of depth 1's tries, after {} and {} %".format(*last, *first)
    assert told in MEASURED
    gains = [gain(run) for run in evolved]
    assert "It gains {:.1f}, {:.1f} and {:.1f} points".format(*gains) in MEASURED
    rows = [line.split(" | ") for line in worlds.methods_table(folder)]
    (together,) = (row[-1].strip(" |") for row in rows if "agentevol" in row[0] and row[1] == "all")
    seeds = over_seeds(gains)
    of_seeds = "(over the three seeds [{low:+.1f}, {high:+.1f}])".format(**seeds)
    assert f"points, {together} together {of_seeds}" in MEASURED
    (both,) = (row[-1].strip(" |") for row in rows if "dpo" in row[0] and row[1] == "all")
    assert f", {both} together, and it learns what it plays" in MEASURED
    told = "{} % of depth 1's tries in its first iteration and {} % in its last".format(
        *(solved(evolved, at) for at in (0, -1))
    )
    assert told in MEASURED
    earlier = [
        gain(json.loads((folder / f"worlds/methods/rests/{name}.json").read_text()))
        for name in ("agentevol-textcraft-0", "dpo-textcraft-0", "dpo-textcraft-1")
    ]
    told = "`agentevol.py` gained {:.1f} points with seed 0, `dpo.py` {:.1f} and {:.1f}"
    assert told.format(*earlier) in MEASURED
    assert [line for line in worlds.tried_methods_table(folder) if line not in MEASURED] == []
    assert sum(sum(tries for tries, _ in each.values()) for each in dpo["played"]) == tries
    # At a rate that teaches depth 1, the difference alone unlearns depth 2 within two iterations.
    for name, deep in (("4-iterations-4e-5", [41, 0]), ("16-iterations-4e-5", [22, 5, 0, 0, 0])):
        tried = json.loads((folder / f"worlds/methods/tried/dpo-{name}.json").read_text())
        assert tried["config"]["sft_coef"] == 0 and tried["config"]["mini_batch_size"] == 16
        assert [each["depth 2"][1] for each in tried["played"]] == deep
    size, sets = agentevol["config"], [each for run in evolved for each in run["evolved"]]
    added = [count for parts in sets for origin, (count, _) in parts.items() if " " in origin]
    tries = size["tasks_per_iteration"] * size["group_size"] * size["iterations"]
    assert size["iterations"] == len(agentevol["evolved"]) == 3
    said = f"{min(added)} to {max(added)} of its own successes to {sets[0]['demonstration'][0]}"
    assert f"{said} demonstrations, three times ({tries:,} tries)" in MEASURED
    own = {"mini_batch_size", "learning_rate", "steps"}
    own |= {field.name for kind in (DpoConfig, EvolConfig) for field in fields(kind)} - {
        field.name for field in fields(MethodConfig)
    }
    for run, kind in ((dpo, DpoConfig), (agentevol, EvolConfig)):
        for field in fields(kind):
            if field.name in own and not isinstance(field.default, tuple):
                assert run["config"][field.name] == field.default, field.name
    fast = json.loads((folder / "worlds/methods/tried/agentevol-last-1e-4.json").read_text())
    before, best, after = (f"{100 * each['success']:.1f}" for each in fast["held_out"])
    assert f"held out {before}, {best} after 8 steps,\n{after} after 16" in MEASURED
    # What a trial's row says to type is what was run.
    apart = {"run_dir", "eval_every", "save_every", "eval_start_samples", "resume", "engine_url"}
    for path in sorted((folder / "worlds/methods/tried").glob("*.json")):
        tried = json.loads(path.read_text())
        kind = {"dpo": DpoConfig, "agentevol": EvolConfig}[tried["method"]]
        words = ["--preset", "laptop", *tried["options"].split()]
        asked = asdict(checked(read_command_line(words, kind)[0]))
        for name, value in tried["config"].items():
            if name in asked.keys() - apart:
                found = list(asked[name]) if isinstance(asked[name], tuple) else asked[name]
                assert found == value, (path.name, name)
    rows = [row for row in worlds.methods_table(folder) if "| all |" in row]
    told = [[float(x) for x in re.findall(r"[+-][0-9.]+", row)[-3:]] for row in rows]
    assert all(low > 0 for _, low, _ in told)
    for what, place in (("dpo.py", 1), ("agentevol.py", 2)):
        assert f"{told[place][0]:.0f} points ({what})" in README


def test_the_table_of_another_world_is_the_one_that_the_committed_run_gives() -> None:
    by_env = worlds.read_results(ROOT / "recipes" / "results")
    assert [line for line in worlds.table(by_env) if line not in MEASURED] == []
    said = MEASURED.replace("\n", " ")
    recipes = (ROOT / "recipes" / "README.md").read_text(encoding="utf-8")
    for env, what, others in (
        ("babyai", "tasks of GoTo and Pickup", "with other seeds"),
        ("sciworld", "easy tasks of these kinds", "of ScienceWorld's test variations"),
    ):
        run = by_env[env][0]  # RESULTS.md speaks of its options
        config = run["config"]
        train, test = (load_tasks(env, file=config[name]) for name in ("tasks", "eval_tasks"))
        assert f"rained on {len(train)} {what}" in said
        assert f"ested on {len(test)} {others}, {config['eval_samples']} samples each" in said
        shape = f"{config['tasks_per_step']} tasks x {config['group_size']} samples"
        assert (
            f"{config['steps']} steps of GRPO, {shape}, at most {config['rounds'][0]} turns" in said
        )
        assert f"--env {env} --seed 0` runs or resumes it ({hours_of(by_env[env])}" in said
    most = max(run.get("peak_gb") or 0 for run in by_env["sciworld"])
    assert f"({most:.1f} in SciWorld)" in README
    hours = {env: hours_of(found) for env, found in by_env.items()}
    for env, name in (("babyai", "BabyAI"), ("sciworld", "SciWorld"), ("searchqa", "SearchQA")):
        assert f"{hours[env]} for {name}" in recipes


def test_what_is_said_of_deep_searchs_run_is_what_it_gave() -> None:
    runs = worlds.read_results(ROOT / "recipes" / "results")["searchqa"]
    said, measured = " ".join(README.split()), " ".join(MEASURED.split())
    config, first, last = runs[0]["config"], pooled_at(runs, 0), pooled_at(runs, -1)
    assert (
        f"{config['steps']} steps of GRPO, {config['tasks_per_step']} tasks x "
        f"{config['group_size']} samples, at most {config['rounds'][0]} turns, on "
        f"{len(load_tasks('searchqa', file=config['tasks'])):,} questions of one hop"
    ) in measured
    gain = percent(difference(first, last), signed=True)
    ends = [f"{100 * fmean(each.values()):.1f}" for each in (first, last)]
    ways = [[run["held_out"][at]["avg"]["value"] for at in (0, -1)] for run in runs]
    of_seeds = " and ".join(f"{100 * (after - before):+.1f}" for before, after in ways)
    assert f"from {ends[0]} to {ends[1]} % ({gain}; by seed {of_seeds})" in measured
    tested = analyse_test("searchqa", runs)
    lesson = (ROOT / "tutorials" / "13_deep_search.md").read_text(encoding="utf-8")
    assert f"{ends[0]} % of 100 questions about other countries before, {ends[1]} % after" in lesson
    bridges = [f"{100 * tested['bridge'][when]['value']:.0f} %" for when in ("before", "after")]
    assert "{} of the bridges\nbefore and {} after".format(*bridges) in lesson
    assert [line for line in split_table(tested) if line not in MEASURED] == []
    samples = {(r["held_out"][0]["samples"], r["test"]["before"]["samples"]) for r in runs}
    assert samples == {(2, 1)}, "a third sample"
    tests = [
        mean_over_seeds([r["test"][when]["items"] for r in runs]) for when in ("before", "after")
    ]
    before, after = (
        {i: (2 * share + tested_too[i]) / 3 for i, share in each.items()}
        for tested_too, each in zip(tests, (first, last), strict=True)
    )
    pooled = [f"{100 * fmean(items.values()):.1f}" for items in (before, after)]
    third = percent(difference(before, after), signed=True)
    assert f"from {pooled[0]} to {pooled[1]} % ({third})" in measured
    assert f"makes its gain [{third.split()[0]}]" in said
    kinds = ("bridge", "border")
    turns = [r["test"]["after"]["rows"][kind]["turns_mean"] for r in runs for kind in kinds]
    assert f"after {min(turns):.1f} to {max(turns):.1f} turns, one search" in measured
    used = [
        fmean(rows) for rows in zip(*([row[USED] for row in r["curve"]] for r in runs), strict=True)
    ]
    early = fmean(row["train/success_rate"] for r in runs for row in r["curve"][:10])
    assert f"in {100 * early:.0f} % of the episodes" in measured
    assert f"{fmean(used[:10]):.0f} of the 32 trajectories of a step taught" in measured
    assert f"in the first ten steps, {fmean(used[10:]):.0f} after that." in measured
    assert f"--env searchqa --seed 0` runs or resumes it ({hours_of(runs)}" in measured


def test_what_is_said_of_make_train_is_what_its_runs_gave() -> None:
    runs = worlds.read_results(ROOT / "recipes" / "results")["textcraft"]
    measured, said = MEASURED.replace("\n", " "), README.replace("\n", " ")
    config = with_preset("laptop")
    for run in runs:  # none of another default
        own = {name: run["config"][name] for name in ("steps", "group_size", "learning_rate")}
        assert own == {name: getattr(config, name) for name in own}
        assert run["config"]["tasks"] == "short_train"
    train, test = (load_tasks("textcraft", file=f"short_{part}") for part in ("train", "test"))
    shape = f"{config.tasks_per_step} goals x {config.group_size} samples"
    assert (
        f"{config.steps} steps of GRPO, {shape}, at most {config.rounds[0]} turns, from" in measured
    )
    assert f"Trained on {len(train)} goals of" in measured
    assert f"tested on {len(test)} goals of families that share no thing with them" in measured
    rates = [[row["train/success_rate"] for row in run["curve"]] for run in runs]
    first, last = (
        100 * fmean(r for rate in rates for r in rate[part]) for part in (slice(5), slice(-5, None))
    )
    shown = f"from {first:.0f} % in the first five steps to {last:.0f} % in the last five"
    assert shown in measured
    *others, last_one = (f"{run['step_s']:.0f}" for run in runs)
    seconds = f"{', '.join(others)} and {last_one}"
    peak = max(run["peak_gb"] for run in runs)
    assert f"{seconds} s a step (medians)" in measured and f"at most {peak:.1f} GB" in measured
    assert f"A step took {seconds} s" in said and f"Memory: {peak:.1f} GB at most" in said
    tested = analyse_test("textcraft", worlds.tested_runs({"textcraft": runs}, "textcraft"))
    assert [line for line in split_table(tested) if line not in MEASURED] == []
    gained = 100 * tested["all"]["difference"]["value"]
    assert (
        gained < 15
        and f"The goal was 15 points on this split: missed, with {gained:.0f}." in measured
    )
    by_depth = worlds.analyse("textcraft", runs)
    ones, twos = (100 * by_depth[f"depth {d}"]["difference"]["value"] for d in (1, 2))
    assert f"Depth 1 rises by {ones:.0f} points and depth 2 by {twos:.0f};" in said
    count = {2: "two", 3: "three"}[len(runs)]
    assert f"`make train` has {count}," in said and f"({count.title()} seeds for TextCraft" in said
    gains = [[end["avg"]["value"] for end in run["held_out"]] for run in runs]
    tests = [
        [run["test"][at]["rows"]["all"]["avg"]["value"] for at in ("before", "after")]
        for run in runs
    ]
    for what in (gains, tests):
        by_seed = [each[-1] - each[0] for each in what]
        *others, last_one = (f"{100 * gain:+.1f}" for gain in by_seed)
        assert f"{', '.join(others)} and {last_one}" in measured
        assert brackets(over_seeds(by_seed), signed=True) in measured
    for step, place in ((0, 0), (config.steps, -1)):  # what seed 0 printed
        avg = runs[0]["held_out"][place]["avg"]
        shown = f"{avg['value']:.1%} [{avg['low']:.1%}, {avg['high']:.1%}], {len(test)} tasks"
        assert f"step {step}: held-out success {shown}" in said


def test_what_is_said_of_the_trials_is_what_they_gave() -> None:
    """And of how hard failures pull: the mean over tokens is no worse than the one over rows."""
    folder = ROOT / "recipes" / "results"
    assert [line for line in worlds.tried_table(folder) if line not in MEASURED] == []
    trial = json.loads((folder / "worlds/tried/textcraft-seq-mean.json").read_text())
    pulls = trial["default_pulls"]
    away = -pulls["advantage_below_0_per_token"] / pulls["advantage_above_0_per_token"]
    longer = pulls["policy_tokens_of_a_failure"] / pulls["policy_tokens_of_a_success"]
    assert f"pull {away:.1f} times as hard as the successes" in MEASURED.replace("\n", " ")
    assert 1.7 < longer < 2, "are nearly twice as long"
    cells = {
        line.split("`")[1]: [float(x) for x in re.findall(r"[\d.]+", line.split("|", 3)[3])]
        for line in worlds.tried_table(folder)[2:]
    }
    for option, (solved, by_default, teach, as_many, entropy, usual) in cells.items():
        if option == "--learning-rate 1e-4":
            assert solved < by_default - 15 and teach < as_many / 3 and entropy < usual / 2
        elif option == "1,152 demonstrations":
            assert solved > 1.5 * by_default and teach > as_many
        elif option.endswith(" 2e-4"):
            assert solved < by_default - 5 and min(entropy / usual, teach / as_many) > 1.6
        else:
            assert abs(solved - by_default) < 3, option
    rate = json.loads((folder / "worlds/tried/textcraft-rate-1e-4.json").read_text())["curve"]
    parts = [rate[:10], rate[-10:]]
    first, last = (fmean(row["train/success_rate"] for row in part) for part in parts)
    assert abs(first - last) < 0.05, "it stays where it began"
    assert rate[9]["policy/entropy"] < rate[0]["policy/entropy"] / 2, "within ten steps"
    default = json.loads((folder / "worlds/textcraft-0.json").read_text())["config"]
    assert default["tasks_per_step"] * default["group_size"] == 64, "of 64"


def test_what_is_said_of_the_earlier_run_and_of_each_kind_of_science_task() -> None:
    folder = ROOT / "recipes" / "results" / "worlds"
    earlier = json.loads((folder / "earlier/sciworld-0.json").read_text())
    runs = worlds.read_results(ROOT / "recipes" / "results")["sciworld"]
    ends = [f"{100 * earlier['held_out'][at]['avg']['value']:.1f}" for at in (0, -1)]
    assert f"went from {ends[0]} to {ends[1]} %" in MEASURED.replace("\n", " ")
    before, after = (pooled_at(runs, at) for at in (0, -1))
    kinds = defaultdict[str, list[str]](list)
    for task_id in runs[0]["held_out"][0]["items"]:
        kinds[find_task(int(task_id.partition("_")[2]))[0].name].append(task_id)
    parts = []
    for name, ids in kinds.items():
        called = name.removeprefix("find-").removeprefix("lifespan-").replace("-", " ")
        called = called.replace("non living", "non-living")
        shares = [100 * fmean(items[i] for i in ids) for items in (before, after)]
        parts.append(f"{called} {shares[0]:.0f} to {shares[1]:.0f} %")
    said = MEASURED.replace("\n", " ")
    assert f"By kind: {', '.join(parts)}." in said
    first, last = ([run["held_out"][at]["avg"]["value"] for run in runs] for at in (0, -1))
    gains = [after - before for before, after in zip(first, last, strict=True)]
    told, span = ", ".join(f"{100 * g:+.1f}" for g in gains), brackets(over_seeds(gains), True)
    assert f"By seed: {told} points (Student's interval {span})" in said

    def of_kind(seed: int, kind: str) -> list[float]:
        held_out = runs[seed]["held_out"]
        return [100 * fmean(held_out[at]["items"][i] for i in kinds[kind]) for at in (0, -1)]

    moved = {s: (of_kind(s, "find-animal"), of_kind(s, "find-non-living-thing")) for s in (0, 1)}
    assert moved[0][1] == [0, 0]
    assert "Of seed 0's animals {:.0f} % became {:.0f}".format(*moved[0][0]) in said
    assert "of seed 1's animals {:.0f} % became {:.0f}".format(*moved[1][0]) in said
    assert "of its non-living things {:.0f} % became {:.0f}.".format(*moved[1][1]) in said
    assert f"that the oracle solves within {MAX_TURNS} turns" in said
    used = [
        fmean(each) for each in zip(*([x[USED] for x in r["curve"]] for r in runs), strict=True)
    ]
    per_step = runs[0]["config"]["tasks_per_step"] * runs[0]["config"]["group_size"]
    assert (
        f"Of the {per_step} trajectories of a step {fmean(used[:10]):.0f} taught something "
        f"in the first ten steps, {fmean(used[10:]):.0f} after that." in said
    )


def test_what_is_said_of_sciworlds_other_start_is_what_its_two_runs_gave() -> None:
    folder = ROOT / "recipes/results/worlds/earlier"
    runs = {
        name: json.loads((folder / f"sciworld-slips-{name}-0.json").read_text())
        for name in ("grpo", "rloo")
    }
    said = " ".join(MEASURED.split())
    ends = {
        name: [f"{100 * e['avg']['value']:.1f}" for e in run["held_out"]]
        for name, run in runs.items()
    }
    assert (
        "steps of GRPO went from {} to {} % ({} after 20)".format(
            ends["grpo"][0], ends["grpo"][2], ends["grpo"][1]
        )
        in said
    )
    assert (
        "from {} to {} ({} after 20)".format(ends["rloo"][0], ends["rloo"][2], ends["rloo"][1])
        in said
    )
    last = [runs[name]["held_out"][-1]["items"] for name in ("grpo", "rloo")]
    apart = percent(difference(*last), signed=True).replace(" [", " points [")
    assert f"RLOO minus GRPO {apart}" in said
    both = [json.loads((folder / f"sciworld-slips-{n}-0-pushed.json").read_text()) for n in runs]
    assert [
        line for line in pushed.table(both[0]["rows"], "focus on") if line not in MEASURED
    ] == []
    counts = [[row[who]["trajectories"] for row in both[1]["rows"]] for who in ("said", "not said")]
    assert sum(counts[1]) == 1 and f"all but one of {sum(counts[0])} name something" in said
    lesson = " ".join((ROOT / "tutorials/02_advantages.md").read_text(encoding="utf-8").split())
    end = both[0]["rows"][-1]
    for column, words in (
        ("return", "{:.2f} and the others {:.2f}"),
        ("divided", "{:+.2f} and {:+.2f}"),
        ("plain", "{:+.2f} and {:+.2f}"),
    ):
        text = words.format(end["said"][column], end["not said"][column]).replace("-", "−")
        assert text in lesson, text
    kinds = defaultdict[str, list[str]](list)
    before, after = (runs["rloo"]["held_out"][at]["items"] for at in (0, -1))
    for task_id in before:
        kinds[find_task(int(task_id.partition("_")[2]))[0].name].append(task_id)
    for name, ids in kinds.items():
        called = name.removeprefix("find-").removeprefix("lifespan-").replace("-", " ")
        called = called.replace("non living", "non-living")
        shares = [100 * fmean(items[i] for i in ids) for items in (before, after)]
        assert f"{called} {shares[0]:.0f} to {shares[1]:.0f} %" in said, called


def test_what_is_said_of_search_in_a_grid_world_is_what_the_committed_run_gave() -> None:
    if os.environ.get("CI") != "true":
        pytest.importorskip("minigrid", reason="NOT TESTED: make setup ENV=babyai")
    runs = worlds.read_results(ROOT / "recipes" / "results")["babyai"]
    assert len(runs) == 3 and "Three seeds for TextCraft and BabyAI" in README
    before, after = (pooled_at(runs, position) for position in (0, -1))
    env, groups = BabyAI(), defaultdict[int, list[str]](list)
    for task_id in before:
        groups[oracle_turns(env, int(task_id.partition("_")[2]), at_most=3)].append(task_id)
    parts = [
        f"{turns}: {100 * fmean(before[i] for i in ids):.0f} to "
        f"{100 * fmean(after[i] for i in ids):.0f} %"
        for turns, ids in sorted(groups.items())
    ]
    assert f"by the turns that the oracle needs: {', '.join(parts)}." in MEASURED.replace("\n", " ")


def test_a_shuffled_run_plays_more_turns_in_as_many_steps_as_the_caption_says() -> None:
    results = miniature_plan.read_results(miniature_plan.FOLDER)
    ends = {arm: [results[arm, s]["curve"][-1] for s in range(3)] for arm in ("short", "shuffled")}
    assert len({row["step"] for rows in ends.values() for row in rows}) == 1
    assert min(r["turns"] for r in ends["shuffled"]) > max(r["turns"] for r in ends["short"])


def test_the_defaults_for_gpus_are_the_papers_but_for_two() -> None:
    said = "the paper's numbers (but for `--sampler-is-cap` and `--eval-samples`)"
    config, helped = with_preset("paper"), (ROOT / "config.py", ROOT / "losses.py")
    text = "".join(path.read_text(encoding="utf-8") for path in helped)
    assert said in README and "0 switches them off [paper: none]" in text
    assert "per held-out task (trajectories) [paper: 1]" in text
    assert (config.sampler_is_cap, config.eval_samples) == (2.0, 4)


def test_what_is_said_of_horizons_is_what_the_laboratory_measured() -> None:
    results = miniature_plan.read_results(miniature_plan.FOLDER)
    arms = miniature_plan.runs_behind("horizons", results)
    every = [r for runs in arms.values() for r in runs]
    assert {len(runs) for runs in arms.values()} == {3}
    said = " ".join(README.split())
    for most, other in ((4, "long"), (16, "short"), (4, "short"), (16, "long")):
        reading = at(common_budget(every, "turns"), "turns", most)
        told = compare(arms["stepwise"], arms[other], reading, reading)
        seeds = re.findall(r"seeds \[([+-][\d.]+), ([+-][\d.]+)\]", told)
        assert len(seeds) == 1 and told in MEASURED, told
        assert all(float(low) < 0 < float(high) for low, high in seeds), "they settle an order"
    for most, other in ((4, "short"), (16, "long")):
        reading = at(common_budget(every, "turns"), "turns", most)
        began, ours, theirs = (
            fmean(mean_over_seeds([read(r) for r in runs]).values())
            for read, runs in (
                (partial(start, within=most), every),
                (reading, arms["stepwise"]),
                (reading, arms[other]),
            )
        )
        kept = f"{100 * (ours - began) / (theirs - began):.0f} % of what {other} gains in {most}"
        assert kept in said
        share, _, _ = kept.partition("of what")
        lesson = (ROOT / "tutorials" / "04_horizon.md").read_text(encoding="utf-8")
        for page in (MEASURED, lesson):
            assert f"{share}of what `{other}` gains" in " ".join(page.split())


def test_what_is_said_of_the_weak_teacher_is_what_the_laboratory_measured() -> None:
    results = miniature_plan.read_results(miniature_plan.FOLDER)
    runs = miniature_plan.runs_behind("teacher", results)
    last, late = partial(end, within=4), partial(end, within=16)
    told = compare(runs["rl"], runs["imitation"], last, last)
    assert f"RL ends {told} points above further imitation of it" in " ".join(README.split())

    def share(arm: str, read: Callable[..., dict[str, float]]) -> float:
        return fmean(mean_over_seeds([read(r) for r in runs[arm]]).values())

    begun = [r for arm in ("rl", "imitation") for r in runs[arm]]
    in_12 = fmean(mean_over_seeds([start(r, 12) for r in begun]).values())
    by_two = fmean(mean_over_seeds([passes(r["held_out"][0], 2) for r in begun]).values())
    assert abs(share("rl", last) - in_12) < 0.01  # "as many as the start in 12"
    assert abs(share("rl", late) - by_two) < 0.01  # "in one sample as many as the start in two"


def test_the_lessons_say_how_long_the_laboratorys_runs_took_and_where_entropy_began() -> None:
    lessons = {n: next(ROOT.glob(f"tutorials/{n}_*.md")).read_text("utf-8") for n in (10, 12, 14)}
    results = miniature_plan.read_results(miniature_plan.FOLDER)
    minutes = sorted(60 * r["hours"] for (arm, _), r in results.items() if arm != "teacher")
    assert f"{minutes[0]:.0f} to {minutes[-1]:.0f} minutes each" in lessons[12]
    _, _, table = MEASURED.partition("<!-- miniature teacher -->")
    rows = [line.split("|")[1:4] for line in table.splitlines() if line.startswith("| ")]
    took = {arm.strip(): f"{float(cell):.0f}" for arm, seeds, cell in rows if "0 1 2" in seeds}
    said = "{imitation}, {filtered} and {rl}".format(**took)
    assert f"about as many minutes ({said})" in lessons[14]
    assert f"it came out at {said} minutes" in MEASURED
    by_env = worlds.read_results(ROOT / "recipes" / "results")

    def begins(runs: Iterable[dict]) -> list[float]:
        found = sorted(run["curve"][0]["policy/entropy"] for run in runs)
        return [found[0], found[-1]]

    others = [run for env in ("babyai", "sciworld", "searchqa") for run in by_env[env]]
    said = "{:.2f} to {:.2f} nats in BabyAI".format(*begins(others))
    assert said in lessons[10]
    assert "{:.1f} to {:.1f} in TextCraft".format(*begins(by_env["textcraft"])) in lessons[10]
    short = begins(results["short", seed] for seed in range(5))
    assert "{:.1f} to {:.1f} in the laboratory".format(*short) in lessons[10]


def test_what_is_said_of_when_to_widen_is_what_its_table_says() -> None:
    _, _, table = MEASURED.partition("<!-- miniature widening -->")
    table, _, _ = table.partition("<!-- end widening -->")
    rows = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("| ")]
    cells = {row[0].strip(): [cell.split()[0] for cell in row[2:5]] for row in rows if row[2:]}
    soon, late = ([cells[arm][n] for arm in ("early", "stepwise", "late")] for n in (0, 2))
    assert soon == sorted(soon, key=float)
    said = " ".join(MEASURED.split())
    assert "within 4 turns: {}, {} and {} %.".format(*soon) in said
    ends = sorted(late, key=float)
    assert f"the three end alike, at {ends[0]} to {ends[-1]} %." in said
    told = [line for line in table.splitlines() if "minus stepwise" in line]
    for line in told:
        over_goals, over_seeds = re.findall(r"\[([-+.\d]+), ([-+.\d]+)\]", line)
        assert (float(over_goals[0]) * float(over_goals[1]) > 0) == ("in 4 turns" in line)
        assert float(over_seeds[0]) < 0 < float(over_seeds[1])
    assert len(told) == 4


def test_the_answers_of_the_lesson_on_experiments_are_right() -> None:
    said = (ROOT / "tutorials" / "12_an_experiment.md").read_text(encoding="utf-8")
    results = miniature_plan.read_results(miniature_plan.FOLDER)
    last = partial(end, within=16)
    for seed in (0, 2):
        gap = difference(last(results["short", seed]), last(results["stepwise", seed]))
        assert f"{100 * gap['value']:+.1f}" in said and brackets(gap, signed=True) in said
    gains = {}
    for arm in ("short", "stepwise", "long"):
        runs = [
            [100 * fmean(shares(e, 16).values()) for e in results[arm, seed]["held_out"]]
            for seed in range(3)
        ]
        gains[arm] = f"{fmean(max(run) - run[-1] for run in runs):.1f}"
    best = (
        "by {short} points in the mean of three seeds, `stepwise` by {stepwise}, `long` by {long}"
    )
    assert best.format(**gains) in said.replace("\n", " ")


def test_estimators_gain_what_the_pages_say_and_are_not_told_apart() -> None:
    results = miniature_plan.read_results(miniature_plan.FOLDER)
    names = ("grpo", "rloo", "reinforce_plus_plus", "ppo")
    runs = {name: [results[name, seed] for seed in miniature_plan.SEEDS] for name in names}
    in_4 = {name: [partial(of, within=4) for of in (start, end)] for name in names}
    gains = [
        100 * fmean(fmean(last(r).values()) - fmean(first(r).values()) for r in runs[name])
        for name, (first, last) in in_4.items()
    ]
    assert (round(min(gains)), round(max(gains))) == (14, 17)
    for name in names[1:]:
        reading = partial(end, within=4)
        told = compare(runs["grpo"], runs[name], reading, reading)
        intervals = re.findall(r"\[([+-][\d.]+), ([+-][\d.]+)\]", told)
        assert len(intervals) == 2
        assert all(float(low) < 0 < float(high) for low, high in intervals)


def test_the_number_of_questions_is_that_of_the_file() -> None:
    assert f"{len(own_questions()):,} questions over the CIA World Factbook" in README


@pytest.mark.parametrize("method", ["bm25", "dense"])
def test_the_tables_of_deep_search_are_those_of_the_committed_runs(method: str) -> None:
    found = json.loads((RESULTS / f"searchqa-{method}.json").read_text())["kinds"]
    assert found
    for kind, row in found.items():
        shares = " | ".join(f"{row[name]:.2f}" for name in ("no_search", "raw", "oracles"))
        line = (
            f"| {kind} | {row['questions']} | {shares} | {row['oracle']:.3f} | {row['turns']:.2f} |"
        )
        assert line in MEASURED


def test_the_line_on_searchqas_server_is_that_of_the_committed_run() -> None:
    found = json.loads((RESULTS / "environments-searchqa.json").read_text())
    added, gained = (
        found["memory"]["rss_mb_of_sessions"],
        found["leak"]["rss_mb_growth_second_half"],
    )
    built, batched = found["retrieval"]["built"], found["retrieval"]["batched"]
    assert sum(gained.values()) == 0.0
    assert (
        f"{found['ratio']} times the steps/s (goal 0.5); {added} MB (goal 20); none; "
        f"{built:.0f} times faster (goal 3); {batched} times (goal 4: missed" in MEASURED
    )


@pytest.mark.parametrize(("name", "after"), [("rollout", ""), ("rollout-32", "to be decoded, ")])
def test_the_rollout_figures_are_those_of_the_committed_run(name: str, after: str) -> None:
    summary = json.loads((RESULTS / f"{name}.json").read_text())["summary"]
    none, waiting = (summary[latency]["ratio_to_engine"] for latency in ("none", "100 ms"))
    assert f"{after}{none:.2f} and {waiting:.2f}" in MEASURED
    if name == "rollout":
        assert f"| {summary['tail']['ratio_to_lockstep']:.1f} times |" in MEASURED


def test_the_default_runs_seconds_and_bytes_are_those_of_the_committed_run() -> None:
    found = json.loads((RESULTS / "default_run.json").read_text())["summary"]
    names = ("rollout_s", "update_s", "step_s", "generated_tokens_per_s", "trained_tokens_per_s")
    for way, row in (
        ("bf16", "bfloat16, the C library's malloc"),
        ("fp32", "float32, the C library's malloc"),
        ("bf16 tcmalloc", "bfloat16, tcmalloc: as it is where that is installed"),
    ):
        digits = (1, 1, 1, 0, 0)
        cells = [f"{found[way][n]:.{d}f}" for n, d in zip(names, digits, strict=True)]
        assert f"| {row} | {' | '.join(cells)} | {found[way]['peak_gb']:.2f} |" in MEASURED
    plain, better = found["bf16"], found["bf16 tcmalloc"]
    trained, sampled = (better[n] / plain[n] for n in reversed(names[3:]))
    assert (
        f"trains {trained:.2f} times as many tokens a second and samples {sampled:.2f}" in MEASURED
    )
    more = plain["peak_gb"] - better["peak_gb"]
    assert f"about {more:.0f} GB more without" in README.replace("\n", " ")


def test_the_figures_against_trl_are_those_of_the_committed_run() -> None:
    document = json.loads((RESULTS / "trl_step.json").read_text())
    times = [document["summary"]["trl_over_ours"][f"{n}_s"] for n in ("rollout", "update", "step")]
    ours, theirs = (document["summary"][side]["step_s"] for side in ("ours", "trl"))
    single = [r["trl"]["step_s"] / r["ours"]["step_s"] for r in document["repeats"]]
    assert "{:.1f}, {:.1f} and {:.1f} times faster".format(*times) in MEASURED
    assert f"({ours:.0f} s against {theirs:.0f} s, medians of three" in MEASURED
    assert f"single repeats {min(single):.1f} to {max(single):.0f}," in MEASURED
    assert len(single) == 3
    trained = {side: document["summary"][side]["trained_trajectories"] for side in ("ours", "trl")}
    assert f"the {trained['ours']} trajectories that teach, TRL all {trained['trl']}" in MEASURED
    per_token = 1 / document["summary"]["trl_over_ours"]["trained_per_s"]
    ours, theirs = (document["summary"][side]["trained_per_s"] for side in ("ours", "trl"))
    assert per_token == pytest.approx(ours / theirs, rel=0.02)
    assert f"per trained token the update is {ours / theirs:.1f} times faster" in MEASURED


def test_the_figures_against_trl_on_equal_work_are_those_of_the_committed_run() -> None:
    document = json.loads((RESULTS / "trl_step-equal.json").read_text())
    assert document["settings"]["train_on_all"]
    summary = document["summary"]
    times = [summary["trl_over_ours"][f"{n}_s"] for n in ("rollout", "update", "step")]
    ours, theirs = (summary[side]["step_s"] for side in ("ours", "trl"))
    single = [r["trl"]["step_s"] / r["ours"]["step_s"] for r in document["repeats"]]
    assert "{:.1f}, {:.1f} and {:.1f} times faster".format(*times) in MEASURED
    assert f"({ours:.0f} s against {theirs:.0f} s, medians of five" in MEASURED
    assert f"single repeats {min(single):.1f} to {max(single):.1f})" in MEASURED
    assert len(single) == 5
    assert {r[side]["trained_trajectories"] for r in document["repeats"] for side in r} == {16}
    assert f"{times[2]:.1f} times faster than TRL's on equal work" in README.replace("\n", " ")


def test_the_figures_of_the_environments_servers_are_those_of_the_committed_runs() -> None:
    documents = {
        env: json.loads((RESULTS / f"environments-{env}.json").read_text())
        for env in ("babyai", "sciworld")
    }
    sciworld, babyai = documents["sciworld"], documents["babyai"]
    per_session = (
        f"{sciworld['memory']['rss_mb_per_session']:g} MB against "
        f"{sciworld['memory_other']['rss_mb_per_session']:g} MB"
    )
    grown = sciworld["leak"]["rss_mb_growth_second_half"]["java"]
    assert f"{sciworld['ratio']:g} times the steps/s (goal {sciworld['goal']:g})" in MEASURED
    assert (
        f"{per_session}; {grown:g} MB of {sciworld['leak']['rss_mb'][-1]['java']:,.0f}" in MEASURED
    )
    grown = babyai["leak"]["rss_mb_growth_second_half"]["python"]
    assert f"{babyai['ratio']:g} times the steps/s (goal 1); {grown:g} MB" in MEASURED


def test_the_weight_sync_figures_are_those_of_the_committed_run() -> None:
    document = json.loads((RESULTS / "weight_sync-smollm2-135m.json").read_text())
    summary, difference = document["summary"], document["log_prob_difference"]
    megabytes = document["bytes"]["sent"] / 1e6
    assert f"135M model into vLLM, {megabytes:.0f} MB in bfloat16" in MEASURED
    times = f"{summary['stream_s']:.2f} s; {summary['checkpoint_over_stream']:.1f} times faster"
    assert f"{times}; {100 * summary['held_share']:.0f} % of the weights" in MEASURED
    stale, synced, loaded = (difference[name] for name in ("stale", "synced", "as_loaded"))
    said = f"{stale:.2f} and {synced:.2f} nats a token ({loaded:.2f} before the weights"
    assert said in MEASURED


def test_the_prefix_figures_are_those_of_the_committed_run_and_so_is_the_switch() -> None:
    document = json.loads((RESULTS / "prefix-smollm2-135m.json").read_text())
    real = {row["name"]: row["ratio"] for row in document["summary"]["rows"]}
    first, whole = real["first turn"], real["whole"]
    assert f"| {first:.1f} and {whole:.1f} times (goal 2" in MEASURED
    faster = {
        case["saved"]: all(r["shared_s"] < r["unshared_s"] for r in case["repeats"])
        for case in document["cases"]
    }
    assert all(faster[saved] for saved in faster if saved >= 0.14)
    assert not all(faster[saved] for saved in faster if saved < SHARING_PAYS)
    assert all(len(case["repeats"]) == 2 for case in document["cases"])
    assert "case that saves 14 % of the tokens or more" in MEASURED
    assert f"`update.py` shares from {100 * SHARING_PAYS:.0f} % on" in MEASURED
