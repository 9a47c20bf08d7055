"""recipes/methods.py: its arms are command lines that the programs take, its turns count those of a
teacher, its table puts the methods beside RL."""

import json
from pathlib import Path

import pytest
from test_miniature import result, write

from agentevol import EvolConfig
from chat import ChatTemplate
from config import checked, read_command_line
from data import from_agenttraj
from dpo import DpoConfig
from models import load_tokenizer
from recipes import laboratory, methods
from recipes.common import read_json
from recipes.evidence import end, start
from sft import SftConfig

ROOT = Path(__file__).resolve().parents[1]
TAUGHT = 10.2  # turns that an episode of the teacher costs, his failures included
KINDS = {kind.program: kind for kind in (SftConfig, DpoConfig, EvolConfig)}


@pytest.mark.parametrize("name", methods.ARMS)
def test_every_arm_is_a_command_line_that_its_program_takes(name, tmp_path):
    arm, run_dir = methods.ARMS[name], tmp_path / f"{name}-1"
    if arm.shown:
        cost = methods.show(methods.shown_file(run_dir), 20, seed=1)
        shown = json.loads(methods.shown_file(run_dir).read_text())
        turns = [t for each in shown for t in each["conversations"] if t["from"] == "gpt"]
        assert len(shown) == 20 and 20 * cost >= len(turns)
        assert methods.show(methods.shown_file(run_dir), 20, seed=1) == cost
        methods.show(methods.shown_file(run_dir), 21, seed=1)  # of another plan: made anew
        assert len(json.loads(methods.shown_file(run_dir).read_text())) == 21
    words, kind = methods.arguments_of(arm, 1, run_dir), KINDS[arm.program]
    config = checked(read_command_line(words, kind)[0])
    assert config.model.endswith("tiny-babyai") and config.warm_start == "never"
    assert config.rounds == (4,) and config.evaluation_rounds == 16
    assert (config.steps, config.seed, config.mini_batch_size) == (arm.steps, 1, 64)
    assert config.steps % config.eval_every == 0  # the last evaluation is one of the curve's
    assert config.ignore_returns == (name == "unweighted") if arm.program == "agentevol.py" else 1


def origins(result):
    """How many trajectories each iteration has added."""
    last = result["evolved"][-1]
    assert all(weight == pytest.approx(0.92, abs=0.005) for _, weight in list(last.values())[1:])
    assert 3 * last["demonstration"][0] == pytest.approx(sum(n for n, _ in last.values()), rel=0.1)
    return [count for origin, (count, _) in last.items() if origin != "demonstration"]


def test_the_page_has_the_table_of_the_committed_runs():
    page = (ROOT / "RESULTS.md").read_text(encoding="utf-8")
    assert "\n".join(methods.table(methods.runs_in(methods.FOLDER))) in page
    found = methods.runs_in(methods.FOLDER)
    seeds = {name: [result["seed"] for result in found[name]] for name in methods.ARMS}
    assert "Two seeds of `dpo`, three of `own`, one of the others" in page
    several = {"dpo": [0, 1], "own": [0, 1, 2]}
    assert seeds == {name: several.get(name, [0]) for name in methods.ARMS}
    rows = [line.split(" | ") for line in methods.table(methods.runs_in(methods.FOLDER))]
    in_4 = {
        row[0].strip("| "): float(row[2].split()[0])
        for row in rows
        if len(row) > 3 and row[1] == "3"
    }
    ends = [value for name, value in in_4.items() if name in methods.ESTIMATORS]
    assert len(ends) == 4 and f"come to {min(ends)} to {max(ends)} % with as many turns" in page
    pairs = [count for result in found["dpo"] for count in result["pairs"]]
    assert f"prefers {min(pairs)} to {max(pairs)} pairs of it each time" in page
    own = [count for result in found["agentevol"] for count in origins(result)]
    assert f"the policy's own {min(own)} to {max(own)} successes count 0.92" in page
    lost, regained, few, many = (
        told.split()[0].lstrip("+-")
        for told in (
            methods.points(found["cloning"], found["cloning"], start).split("in 16 turns ")[1],
            methods.points(found["agentevol"], found["cloning"], end).split("in 16 turns ")[1],
            *methods.points(found["agentevol"], found["unweighted"], end).split(" turns ")[1:],
        )
    )
    assert (
        f"cost {lost} points within 16 turns, and what it explores makes up for {regained}" in page
    )
    assert f"stands {few} and {many}\npoints lower" in page
    sizes = [count for count, _ in found["few"][0]["evolved"][-1].values()]
    assert f"With {sizes[0]} of his episodes among {sum(sizes):,} (`few`)" in page
    tried = read_json(methods.FOLDER / "tried" / "few_at_1e-3-0.json")
    assert "--iterations 2 --steps 120 --learning-rate 1e-3" in tried["command"]
    for runs, before, words in (
        (found["few"], "it ends at ", " against its start"),
        (found["last"], "(`last`), at ", ";"),
        ([tried], "tried once, at ", ": the intervals of all have 0 in them"),
    ):
        gains = methods.points(runs, runs, start).split(" turns ")[1:]
        ends = [each.split(" (")[0] for each in gains]
        assert f"{before}{' and '.join(ends)}{words}" in page
        assert all("goals [-" in each and ", +" in each for each in gains)
    (_, gained), (behind, ahead) = (
        methods.points(found["dpo"], found[other], where).split(" turns ")[1:]
        for other, where in (("dpo", start), ("grpo", end))
    )
    told = [each.split(" (")[0] for each in (gained, ahead)]
    assert f"hardly moved: {told[0]} against its start, {told[1]} against GRPO" in page
    assert "goals [+" in gained and "seeds [+" in gained
    assert "goals [+" in ahead and behind.startswith("-") and ", -" in behind.split(";")[0]
    (few, many), (against_dpo, _), (_, later) = (
        methods.points(found["own"], found[other], where).split(" turns ")[1:]
        for other, where in (("own", start), ("dpo", end), ("dpo", end))
    )
    assert f"it gains {few.split(' (')[0]}, as far as `dpo`" in page and "goals [+" in few
    assert f"it does not ({many.split(' (')[0]}, an interval around 0)" in page
    assert "goals [-" in many and ", +" in many and "goals [-" in against_dpo
    assert later.startswith("-") and ", -" in later
    lesson = (ROOT / "tutorials/16_evolution.md").read_text(encoding="utf-8")
    assert f"gained {few.split(' (')[0].strip('+')} points at the horizon" in lesson
    (run,) = methods.FOLDER.glob("sft-*.json")
    curve = json.loads(run.read_text())["curve"]
    learned = sum(row["train/trajectories_used"] for row in curve)
    assert f"{learned:,.0f} more lessons of the careless teacher" in page
    assert 0 < methods.ARMS["sft"].shown - learned < 0.001 * methods.ARMS["sft"].shown + 1


def test_methods_spend_about_as_many_turns_as_short_in_all():
    turns = 198 * 180  # of `short`: turns a step, steps
    for name in ("dpo", "agentevol", "few", "last", "own"):
        words = methods.ARMS[name].words
        iterations, tasks, samples = (
            int(words[words.index(f"--{option}") + 1])
            for option in ("iterations", "tasks-per-iteration", "group-size")
        )
        shown = methods.ARMS[name].shown * TAUGHT
        assert iterations * tasks * samples * 3.1 + shown == pytest.approx(turns, rel=0.15)
    assert methods.ARMS["sft"].shown * TAUGHT == pytest.approx(turns, rel=0.15)
    assert methods.ARMS["sft"].steps * 64 == methods.ARMS["sft"].shown, "each seen once"


def test_the_teachers_failures_are_counted_and_all_his_episodes_fit():
    shown, _, turns = laboratory.demonstrate(600, seed=3)
    taken = [sum(turn["from"] == "gpt" for turn in each["conversations"]) for each in shown]
    assert turns > 1.05 * sum(taken) and turns / 600 == pytest.approx(TAUGHT, rel=0.1)
    chat = ChatTemplate(load_tokenizer(str(ROOT / "recipes/starts/tiny-babyai")))
    longest = max(shown, key=lambda each: len(each["conversations"]))
    assert len(longest["conversations"]) >= 60
    limit = int(methods.TURNS[methods.TURNS.index("--max-trajectory-tokens") + 1])
    assert len(from_agenttraj(chat, longest).input_ids) < limit


def test_a_teachers_turns_are_counted_when_they_are_learned():
    curve = [{"turns": 0.0, "train/trajectories_used": 64} for _ in range(3)]
    sft = methods.Arm("sft.py", (), 3, shown=150)
    methods.count_shown(made := {"curve": curve}, sft, turns=2.0)
    assert [row["turns"] for row in made["curve"]] == [128.0, 256.0, 300.0]
    curve = [{"turns": 10.0}, {"turns": 10.0, "train/trajectories_used": 9}]
    methods.count_shown(made := {"curve": curve}, methods.ARMS["agentevol"], turns=2.0)
    assert [row["turns"] for row in made["curve"]] == [1034.0, 1034.0]
    methods.count_shown(made := {"curve": [{"turns": 7.0}]}, methods.ARMS["dpo"], turns=0.0)
    assert made["curve"][0]["turns"] == 7.0


def test_the_table_puts_them_beside_rl_at_the_turns_that_all_have_played(tmp_path):
    own, others = tmp_path / "own", tmp_path / "others"
    for folder in (own, others):
        folder.mkdir()
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- miniature methods -->\n<!-- end methods -->\nb\n")
    with pytest.raises(ValueError, match="is empty; run"):
        methods.report(own, page, others)
    sets = [{"demonstration": [4, 1.0]}, {"demonstration": [4, 1.0], "iteration 2": [3, 0.9]}]
    for seed in (0, 1):
        evolved = result("agentevol", seed, [0, 0], [2, 2], turns=(100, 200)) | {"evolved": sets}
        write(own, evolved)
    last = [{"demonstration": [4, 1.0], f"iteration {n}": [n, 1.0]} for n in (7, 8)]
    write(own, result("last", 0, [0, 0], [2, 2], turns=(100, 200)) | {"evolved": last})
    write(own, result("cloning", 0, [0, 0], [0, 2], turns=(10, 20)))
    write(others, *(result("rloo", s, [0, 0], [0, 9], turns=(150, 300)) for s in (0, 1, 2)))
    said = methods.report(own, page, others)
    assert "after 200 turns, a teacher's included" in said
    assert "| agentevol | 2 | 100.0" in said and "| rloo | 3 | 0.0" in said
    assert "| cloning |" not in said and "agentevol minus cloning, at their ends" in said
    assert "| 1 | 4 | 4 x 1.00 |  |\n| 2 | 7 | 4 x 1.00 | 3 x 0.90 |" in said
    assert "What last joined to 4 demonstrations, seed 0, by iteration: 7 8." in said
    assert said in page.read_text() and (own / "methods.png").exists()


def test_what_each_iteration_learned_from_is_recorded(tmp_path):
    line = '{{"origin": "{}", "weight": {}, "conversations": ["a\u2028b"]}}\n'
    first = [("demonstration", 1.0), ("iteration 1", 0.5)]
    for number, parts in enumerate((first, [*first, ("iteration 1", 1.0)]), start=1):
        text = "".join(line.format(*each) for each in parts)
        (tmp_path / f"iteration_00{number}.jsonl").write_text(text, encoding="utf-8")
        (tmp_path / f"iteration_00{number}.json").write_text("{}")
    one = [1, 1.0]
    assert methods.evolved(tmp_path) == [
        {"demonstration": one, "iteration 1": [1, 0.5]},
        {"demonstration": one, "iteration 1": [2, 0.75]},
    ]
