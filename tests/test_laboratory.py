"""The laboratory: its goals, its teacher, and that its start is what its command makes."""

import json
import random
import statistics

import pytest

from envs import load_tasks
from envs.babyai.env import BabyAI
from recipes import laboratory
from recipes.common import read_json
from recipes.laboratory import FOLDER, PLAYED, SEEDS, TEACHER_SEEDS, TIERS
from warmstart import hash_of


def test_what_is_held_out_is_neither_trained_on_nor_shown():
    lists = {
        n: {t.task_id for t in load_tasks("babyai", None, str(FOLDER / f"{n}.json"))} for n in SEEDS
    }
    assert not lists["train"] & lists["held_out"]
    assert not {*SEEDS["train"], *SEEDS["held_out"]} & set(TEACHER_SEEDS)
    assert (len(lists["train"]), len(lists["held_out"])) == (40 * 10, 15 * 10)
    for name, seeds in SEEDS.items():
        assert lists[name] == {f"babyai_{index}" for index in laboratory.goals(seeds)}


def test_every_goal_is_of_one_kind():
    kinds = [laboratory.tier_of(f"babyai_{index}") for index in laboratory.goals([0])]
    assert {kind: kinds.count(kind) for kind in PLAYED} == {k: len(v) for k, v in PLAYED.items()}
    assert all(set(levels) <= set(TIERS[kind]) for kind, levels in PLAYED.items())


@pytest.fixture
def world():
    pytest.importorskip("minigrid", reason="make setup ENV=babyai")
    from envs.babyai.env import BabyAI

    return BabyAI()


def actions(record):
    return [t["value"] for t in record["conversations"] if t["from"] == "gpt"]


def test_without_errors_the_teacher_is_the_oracle_and_with_them_it_takes_longer(world):
    index = laboratory.goals([100])[6]
    perfect, solved = laboratory.show(world, index, random.Random(0), error=0.0)
    world.reset(index)
    for text in actions(perfect):
        assert text == f"Action: {world.oracle()[1]}"
        *_, ended, _, info = world.step(world.parse(text))
    assert solved and ended and info["success"]
    careless = [laboratory.show(world, index, random.Random(seed))[0] for seed in range(10)]
    turns = [len(actions(record)) for record in careless]
    assert sum(turns) / 10 > len(actions(perfect))
    cut, solved = laboratory.show(world, index, random.Random(0), turns=1)
    assert len(actions(cut)) == 1 and not solved


def test_far_goals_take_the_teacher_longest(world):
    records, table, _ = laboratory.demonstrate(30, seed=1)
    assert records == laboratory.demonstrate(30, seed=1)[0]
    assert len(records) == 30
    within = {line.split(" | ")[0].strip("| "): line.split(" | ") for line in table.splitlines()}
    assert float(within["near"][2]) > float(within["middle"][2]) >= float(within["far"][2])
    assert all(json.dumps(record["conversations"][0]).count("Reach the goal") for record in records)


@pytest.mark.long  # two minutes of play each
@pytest.mark.parametrize(
    ("name", "count", "kinds"),
    [("tiny-babyai", 4_000, tuple(TIERS)), ("tiny-babyai-near", 12_000, ("near",))],
)
def test_the_starts_were_made_by_the_commands_beside_them(world, name, count, kinds):
    about = read_json(laboratory.START.parent / name / "sft.json")
    records, *_ = laboratory.demonstrate(count, kinds=kinds)
    assert about["records"] == hash_of(records)
    assert about["settings"]["batch_size"] == 16 and about["settings"]["epochs"] == 1


def test_as_many_held_out_goals_begin_like_one_that_is_trained_on_as_is_said():
    world = BabyAI()

    def beginnings(name):
        near = [
            i for i in laboratory.goals(SEEDS[name]) if laboratory.tier_of(f"babyai_{i}") == "near"
        ]
        return [world.reset(index) for index in near]

    held_out, trained_on = beginnings("held_out"), set(beginnings("train"))
    assert (len(held_out), sum(each in trained_on for each in held_out)) == (90, 2)
    said = " ".join(laboratory.__doc__.split())
    assert "of the 90 near goals held out two begin like one that is trained on" in said


def test_the_pages_say_how_many_moves_the_oracle_needs(world):
    needed = {"near": [], "middle": []}
    for index in laboratory.goals(SEEDS["held_out"]):
        record, solved = laboratory.show(world, index, random.Random(0), error=0.0)
        assert solved
        needed[laboratory.tier_of(f"babyai_{index}")].append(len(actions(record)))
    near, middle = needed["near"], needed["middle"]
    assert (min(near), max(near), len(middle)) == (1, 3, 60)
    most, median = max(middle), round(statistics.median(middle))
    soon = sum(moves <= 4 for moves in middle)
    root = FOLDER.parent.parent
    readme = (root / "README.md").read_text(encoding="utf-8")
    assert f"up to {most} moves, {median} in the median ({soon} of the 60 at most 4)" in readme
    lesson = (root / "tutorials/04_horizon.md").read_text(encoding="utf-8")
    assert f"middle ones up to {most}, {median} in the median; {soon} of the 60 at" in lesson
    results = (root / "RESULTS.md").read_text(encoding="utf-8")
    assert f"(near) or up to {most}, {median} in the median, {soon} of 60 at most 4" in results
