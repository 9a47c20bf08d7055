"""TextCraft: reproducible texts, AgentGym's task numbers and rules, an oracle that always wins."""

import importlib
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest

from envs import EpisodeEndedError, load_tasks
from envs.textcraft.env import TextCraft
from envs.textcraft.recipes import FIRST_FILES, recipe_book

ROOT = Path(__file__).parent.parent
NUM_TASKS = 544


def solve(env: TextCraft, max_actions: int = 60) -> list[str]:
    """Play the oracle to the end and return its actions."""
    actions = []
    terminated = False
    while not terminated:
        assert len(actions) < max_actions, f"not solved by {actions}"
        actions.append(env.oracle()[1])
        observation, reward, terminated, truncated, info = env.step(actions[-1])
        assert observation.startswith(("Got ", "Crafted ")), (actions[-1], observation)
        assert reward == info["score"] == float(terminated) and info["success"] is terminated
        assert not truncated
    return actions


def test_goals_have_the_published_depth_blocks():
    depths = [recipe_book().depth(goal) for goal in recipe_book().goals]
    assert Counter(depths) == {1: 140, 2: 280, 3: 113, 4: 11} and depths == sorted(depths)
    assert [TextCraft.subtask(index) for index in range(NUM_TASKS)] == [
        f"depth {depth}" for depth in depths
    ]


def test_same_id_and_seed_give_the_same_texts_for_any_hash_seed_and_directory_order():
    program = (
        "import contextlib, hashlib, os, random, sys\n"
        "listdir, scandir, is_reversed = os.listdir, os.scandir, sys.argv[1] == 'reversed'\n"
        "def order(entries): return sorted(entries, key=os.fspath, reverse=is_reversed)\n"
        "os.listdir = lambda *a: order(listdir(*a))\n"
        "os.scandir = lambda *a: contextlib.nullcontext(order(scandir(*a)))\n"
        "from envs.textcraft.env import TextCraft\n"
        "env, digest = TextCraft(), hashlib.sha256()\n"
        "for index in range(544):\n"
        "    for seed in (0, 7):\n"
        "        random.seed(sys.argv[1])\n"
        "        digest.update(env.reset(index, seed).encode())\n"
        "print(digest.hexdigest())\n"
    )
    for hash_seed, order in (("0", "sorted"), ("1", "reversed")):
        process = subprocess.run(
            [sys.executable, "-c", program, order],
            env=os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        )
        digest = "ac192e0c72a4c9839b55cd291edbbc20b1ead387326989c4d569d28be6d65811"
        assert process.stdout.strip() == digest


def test_a_reset_does_not_use_the_global_random_numbers():
    """Trap 19: threads share them, and a trainer that plays in its own process uses them, too."""
    state = random.getstate()
    TextCraft().reset(31, seed=7)
    assert random.getstate() == state


def test_our_step_answers_like_the_package_that_agentgym_uses():
    """Play random legal and illegal actions in both environments, with the same goals."""
    reference_env = importlib.import_module("textcraft.env")
    data = Path(reference_env.__file__).parent / "data"
    names = sorted(path.name for path in (data / "recipes").glob("*.json"))
    names = [*FIRST_FILES, *(name for name in names if name not in FIRST_FILES)]
    with mock.patch("os.listdir", return_value=names):
        reference = reference_env.TextCraft(data)
    book = recipe_book()
    assert ["minecraft:" + goal for goal in book.goals] == [
        goal
        for goal, _ in sorted(reference.crafting_tree.item_recipes_min_depth(1), key=lambda x: x[1])
    ]
    generator = random.Random(0)
    names = sorted(book.items) + sorted(book.groups) + ["unobtainium", ""]
    env, answers = TextCraft(), Counter()
    for index in generator.sample(range(NUM_TASKS), 150):
        env.reset(index)
        reference.goal, reference.inventory = "minecraft:" + book.goals[index], {}
        for _ in range(60):
            name, count = generator.choice(names).replace("_", " "), generator.randrange(4)
            action = generator.choice(
                [
                    env.oracle()[1],
                    generator.choice(env.available_actions()),
                    f"get {count} {name}",
                    f"craft {name} using {count} {name}",
                    f"craft 1 {name} using {name}",
                    f"craft {count} {name} using 1 stick, 2 oak planks",
                    f"craft 1 {name} using ",
                    "inventory now",
                    f"look {name}",
                    env.oracle()[1].replace("using 1", "using 2"),
                ]
            )
            with mock.patch("builtins.print"):
                expected, reward, terminated, _, _ = reference.step(action)
            observation, *rest = env.step(action)
            answers[observation.split()[0] + str(terminated)] += 1
            if expected.startswith("Could not find a valid recipe for ItemTag"):
                assert observation.startswith("Could not find a valid recipe for ")
            elif expected == "Could not find enough items to craft None":  # a group as the output
                assert observation.startswith("Could not find enough items to craft minecraft:")
            else:
                assert observation == expected, action
            assert rest[:2] == [reward, terminated], action
            if terminated:
                break
    assert min(answers[key] for key in ("GotFalse", "CraftedFalse", "CraftedTrue")) > 50
    assert min(answers[key] for key in ("CouldFalse", "WrongFalse", "Inventory:False")) > 50


def test_a_solved_task_word_for_word():
    env = TextCraft()
    assert env.reset(31) == (
        "Crafting commands:\ncraft 3 crimson hyphae using 4 crimson stem\n\n"
        "Goal: craft crimson hyphae."
    )
    text = "Thought: why\nAction: get `5 crimson   stem`.\nDone."
    assert env.parse(text) == "get 5 crimson stem"
    no_recipe = "Could not find a valid recipe for crimson hyphae from these items"
    for action, observation in {
        "": "Could not execute ",
        "get 1" + "0" * 5000 + " stick": "Could not execute get 1" + "0" * 5000 + " stick",
        "\ud800": "Could not execute \ud800",
        "inventory": "Inventory: You are not carrying anything.",
        "get 5 crimson stem": "Got 5 crimson stem",
        "craft 3 crimson hyphae using 5 crimson stem": no_recipe,
    }.items():
        failure_info = {"success": False, "score": 0.0}
        failure_info |= {"failed": True} if observation.startswith("Could not") else {}
        failure_info["anchor"] = "5 crimson_stem" if "5 crimson" in action else ""
        assert env.step(action) == (observation, 0.0, False, False, failure_info)
    success_info = {"success": True, "score": 1.0, "anchor": "3 crimson_hyphae, 1 crimson_stem"}
    result = env.step("craft 3 crimson hyphae using 4 crimson stem")
    assert result == ("Crafted 3 minecraft:crimson_hyphae", 1.0, True, False, success_info)
    with pytest.raises(EpisodeEndedError):
        env.step("inventory")
    assert env.state_for_people()["inventory"] == {"crimson stem": 1, "crimson hyphae": 3}


def test_the_available_actions_are_exactly_those_that_succeed():
    generator = random.Random(3)
    env, copy = TextCraft(), TextCraft()
    num_crafts = 0
    for index in generator.sample(range(NUM_TASKS), 25):
        commands = [line for line in env.reset(index).splitlines() if line.startswith("craft ")]
        history: list[str] = []
        for _ in range(12):
            available = env.available_actions()
            assert len(set(available)) == len(available)
            for action in {*available, *commands}:
                copy.reset(index)
                for past_action in history:
                    copy.step(past_action)
                succeeds = copy.step(action)[0].startswith(("Got", "Crafted", "Inventory"))
                assert succeeds == (action in available), (action, history)
                num_crafts += succeeds and action.startswith("craft")
            history.append(generator.choice(available))
            if env.step(history[-1])[2]:
                break
    assert num_crafts > 40


def test_the_oracle_solves_every_goal_in_the_number_of_turns_that_it_plans():
    env, lengths = TextCraft(), []
    for index in range(NUM_TASKS):
        commands = env.reset(index).splitlines()
        assert len(commands) == len(set(commands))
        lengths.append(len(env.state_for_people()["plan"]))
        assert len(solve(env)) == lengths[-1]
    assert max(lengths[:140]) == 4
    assert [n for n in lengths if n > 30] == [48]
    assert recipe_book().goals[lengths.index(48)] == "netherite_block"


def test_the_oracle_reaches_the_goal_after_random_play():
    generator = random.Random(5)
    env = TextCraft()
    for index in range(0, NUM_TASKS, 4):
        env.reset(index)
        if not any(env.step(generator.choice(env.available_actions()))[2] for _ in range(10)):
            plan_length = len(env.state_for_people()["plan"])
            solve(env, max_actions=plan_length + 3)  # ties can break otherwise


def test_the_id_lists_are_the_published_split_and_splits_by_family_and_length():
    names = [f"{kind}{side}" for kind in ("", "family_", "short_") for side in ("train", "test")]
    ids = {name: {t.task_index for t in load_tasks("textcraft", name)} for name in names}
    assert ids["test"] == {*range(31), *range(140, 181), *range(420, 445), *range(533, 536)}
    assert len(ids["train"]) == 374 and not ids["train"] & ids["test"]
    assert ids["short_train"] | ids["family_train"] <= ids["train"]
    assert not ids["short_test"] & ids["test"]
    unlisted = ids["short_test"] - ids["train"]
    assert (len(ids["short_train"]), len(ids["short_test"]), len(unlisted)) == (200, 84, 35)

    def families(indices):
        return {recipe_book().goals[index].split("_")[-1] for index in indices}  # "door"

    assert not families(ids["family_train"]) & families(ids["family_test"])
    assert not families(ids["short_train"]) & families(ids["short_test"] - unlisted)
