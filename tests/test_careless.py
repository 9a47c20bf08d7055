"""The careless teacher: the oracle where it does not err, and erring as often as it is told."""

import json
import random

import pytest

from envs import load_tasks
from envs.textcraft.env import TextCraft
from recipes import careless

TASKS = load_tasks("textcraft", split="train")
COMMANDS = ["craft 4 stick using 2 planks", "craft 1 chest using 8 planks, 1 stick"]


def actions(record):
    return [t["value"] for t in record["conversations"] if t["from"] == "gpt"]


def test_without_errors_it_plays_the_oracles_moves():
    world, prompt = TextCraft(), []
    for task in TASKS[:20]:
        record, _ = careless.play(world, task.task_index, prompt, 0.0, random.Random(0))
        world.reset(task.task_index, seed=random.Random(0).randrange(10**9))
        for text in actions(record):
            assert text == f"Action: {world.oracle()[1]}"
            *_, ended, _, _ = world.step(world.parse(text))
        assert ended


def test_wrong_moves_are_of_three_kinds_and_an_amount_is_too_small():
    rng = random.Random(0)
    moves = {careless.wrong_move("get 3 planks", COMMANDS, rng) for _ in range(200)}
    fetched = {"get 2 planks", "get 8 planks", "get 1 stick"}
    assert moves == {"get 1 planks", "get 2 planks", *COMMANDS, *fetched}
    moves = {careless.wrong_move("craft 1 chest using 1 log", COMMANDS, rng) for _ in range(200)}
    assert moves == {*COMMANDS, *fetched}  # there is no amount to get wrong


def test_it_errs_as_often_as_it_is_told():
    world, rng = TextCraft(), random.Random(0)
    wrong = total = 0
    for task in TASKS[:100]:
        start = rng.getstate()
        record, _ = careless.play(world, task.task_index, [], 0.3, rng)
        after, replay = rng.getstate(), random.Random()
        replay.setstate(start)
        world.reset(task.task_index, seed=replay.randrange(10**9))
        for text in actions(record):
            wrong += text != f"Action: {world.oracle()[1]}"
            total += 1
            world.step(world.parse(text))
        rng.setstate(after)
    assert 0.2 < wrong / total < 0.33  # a wrong move is sometimes the oracle's own


def test_demonstrations_repeat_by_seed_are_solved_and_keep_their_shares():
    records, turns = careless.demonstrate(TASKS, 60, 0.3, seed=1)
    assert records == careless.demonstrate(TASKS, 60, 0.3, seed=1)[0]
    assert records != careless.demonstrate(TASKS, 60, 0.3, seed=2)[0]
    assert {name: len(played) for name, played in turns.items()}.keys() == careless.SHARES.keys()
    assert sum(n <= careless.MAX_TURNS for played in turns.values() for n in played) == 60
    assert len(turns["depth 1"]) > len(turns["depth 2"]) > len(turns["depth 3"]) > 0


def test_the_command_writes_what_sft_reads(tmp_path, capsys):
    from data import read_records

    out = tmp_path / "demos.json"
    argv = ["--out", str(out), "--count", "5", "--subtasks", "depth 1"]
    assert careless.main(argv) == 0
    assert "| depth 1 | 5 |" in capsys.readouterr().out
    prompt = json.loads(careless.PROMPT_FILE.read_text())
    for record in read_records([out]):
        assert record["conversations"][0]["value"] == prompt[0]["content"]
    with pytest.raises(SystemExit) as stopped:
        careless.main(["--out", str(out), "--error", "1"])
    assert stopped.value.code == 2
