"""TextCraft: the same texts everywhere, AgentGym's numbering and semantics, an oracle that wins."""

import importlib
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from unittest import mock

import pytest

import envs
from envs import (
    EpisodeEndedError,
    load_tasks,
)
from envs.textcraft.__main__ import VARIANT_WORDS, family, plan_length, write_ids
from envs.textcraft.env import TextCraft
from envs.textcraft.recipes import FIRST_FILES, recipe_book

ROOT = Path(__file__).parent.parent
NUM_TASKS = 544


def solve(env: TextCraft, max_actions: int = 60) -> list[str]:
    """Plays the oracle to the end; returns its actions."""
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


# ---- goals and their numbers


def test_goals_have_the_published_depth_blocks():
    depths = [recipe_book().depth(goal) for goal in recipe_book().goals]
    assert Counter(depths) == {1: 140, 2: 280, 3: 113, 4: 11}
    assert depths == sorted(depths)
    assert [TextCraft.subtask(index) for index in (0, 139, 140, 419, 420, 532, 533, 543)] == [
        f"depth {depth}" for depth in (1, 1, 2, 2, 3, 3, 4, 4)
    ]


def test_same_id_and_seed_give_the_same_texts_for_any_hash_seed_and_directory_order():
    program = (
        "import contextlib, hashlib, os, random\n"
        "if {reverse}:\n"
        "    listdir, scandir = os.listdir, os.scandir\n"
        "    def reverse(entries): return sorted(entries, key=os.fspath, reverse=True)\n"
        "    os.listdir = lambda *a: reverse(listdir(*a))\n"
        "    os.scandir = lambda *a: contextlib.nullcontext(reverse(scandir(*a)))\n"
        "random.seed({seed})\n"
        "from envs.textcraft.env import TextCraft\n"
        "env, digest = TextCraft(), hashlib.sha256()\n"
        "for index in range(544):\n"
        "    for seed in (0, 7):\n"
        "        digest.update(env.reset(index, seed).encode())\n"
        "print(digest.hexdigest())\n"
    )
    digests = set()
    for hash_seed, reverse in (("0", False), ("1", True), ("12345", False)):
        done = subprocess.run(
            [sys.executable, "-c", program.format(reverse=reverse, seed=hash_seed)],
            env=os.environ | {"PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=True,
        )
        digests.add(done.stdout.strip())
    assert digests == {"ac192e0c72a4c9839b55cd291edbbc20b1ead387326989c4d569d28be6d65811"}


def test_episodes_neither_read_nor_disturb_the_global_random_generator():
    env = TextCraft()
    random.seed(1)
    first, expected = env.reset(300, seed=4), random.random()
    random.seed(1)
    assert random.random() == expected
    random.seed(2)
    assert env.reset(300, seed=4) == first


# ---- what actions do


def test_our_step_answers_like_the_package_that_agentgym_copied():
    """Random play, legal and illegal, in step with textcraft.env.TextCraft on the same goal."""
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
    nothing = (0.0, False, False, {"success": False, "score": 0.0})
    assert env.step("inventory") == ("Inventory: You are not carrying anything.", *nothing)
    assert env.step("get 5 crimson stem") == ("Got 5 crimson stem", *nothing)
    assert env.step("inventory") == ("Inventory: [crimson stem] (5) ", *nothing)
    assert env.step("craft 3 crimson hyphae using 5 crimson stem") == (
        "Could not find a valid recipe for crimson hyphae from these items",
        *nothing,
    )
    assert env.step("craft 3 crimson hyphae using 4 crimson stem") == (
        "Crafted 3 minecraft:crimson_hyphae",
        1.0,
        True,
        False,
        {"success": True, "score": 1.0},
    )
    with pytest.raises(EpisodeEndedError):
        env.step("inventory")
    assert env.state_for_people()["inventory"] == {"crimson stem": 1, "crimson hyphae": 3}


@pytest.mark.parametrize(
    "action", ["", "\n", "get", "get 1" + "0" * 5000 + " stick", "\ud800", "craft"]
)
def test_text_that_is_no_action_is_answered_and_changes_nothing(action):
    env = TextCraft()
    env.reset(0)
    observation, reward, terminated, _, _ = env.step(action)
    assert observation == f"Could not execute {action}" and reward == 0 and not terminated
    assert env.state_for_people()["inventory"] == {}


def test_every_available_action_succeeds_and_no_listed_recipe_that_would_is_missing():
    generator = random.Random(3)
    env, copy = TextCraft(), TextCraft()
    num_crafts = 0
    for index in generator.sample(range(NUM_TASKS), 60):
        first = env.reset(index)
        listed = [line for line in first.splitlines() if line.startswith("craft ")]
        history: list[str] = []
        for _ in range(12):
            available = env.available_actions()
            assert len(set(available)) == len(available)
            for action in {*available, *listed}:
                copy.reset(index)
                for earlier in history:
                    copy.step(earlier)
                works = copy.step(action)[0].startswith(("Got", "Crafted", "Inventory"))
                assert works == (action in available), (action, history)
                num_crafts += works and action.startswith("craft")
            history.append(generator.choice(available))
            if env.step(history[-1])[2]:
                break
    assert num_crafts > 100


# ---- the oracle


def test_the_oracle_solves_every_goal_by_the_listed_commands():
    env = TextCraft()
    lengths = {}
    for index in range(NUM_TASKS):
        listed = env.reset(index)
        lengths[index] = len(solve(env))
        plan_lines = [line for line in listed.splitlines() if line.startswith("craft")]
        assert len(plan_lines) == len(set(plan_lines))
        assert lengths[index] == plan_length(index)
    assert max(lengths.values()) == 48 and recipe_book().goals[max(lengths, key=lengths.get)] == (
        "netherite_block"
    )
    assert sum(length > 30 for length in lengths.values()) == 1
    assert max(lengths[index] for index in range(140)) == 4


def test_the_oracle_reaches_the_goal_from_whatever_play_has_left_in_the_inventory():
    generator = random.Random(5)
    env = TextCraft()
    for index in range(0, NUM_TASKS, 2):
        env.reset(index)
        terminated = False
        for _ in range(10):
            if not terminated:
                terminated = env.step(generator.choice(env.available_actions()))[2]
        if not terminated:
            before = len(env.state_for_people()["plan"])
            assert len(solve(env, max_actions=before)) == before


# ---- parsing


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("Thought: I need logs.\nAction: get 1 oak log", "get 1 oak log"),
        ("Action:get 1 oak log", "get 1 oak log"),
        ("Action:\n  get 1 oak log\nThat is all.", "get 1 oak log"),
        ("Action: `get 1   oak_log`.", "get 1 oaklog"),
        ("Action: craft 4 x using 1 a,  2 b!", "craft 4 x using 1 a, 2 b"),
    ],
)
def test_parse_takes_the_action_line_and_drops_other_characters(text, action):
    assert TextCraft.parse(text) == action


# ---- id lists and load_tasks


def test_the_committed_id_lists_are_what_the_command_writes(tmp_path):
    for path in write_ids(tmp_path):
        assert path.read_bytes() == (envs.ids_dir("textcraft") / path.name).read_bytes()


def test_the_published_split_is_reproduced():
    test = [task.task_index for task in load_tasks("textcraft", "test")]
    assert test == [*range(31), *range(140, 181), *range(420, 445), *range(533, 536)]
    train = load_tasks("textcraft", "train")
    indices = {task.task_index for task in train}
    assert len(indices) == 374 and not indices & set(test)
    assert indices <= {*range(31, 140), *range(181, 420), *range(445, 533), 537}
    assert Counter(task.subtask for task in train) == {
        "depth 1": 109,
        "depth 2": 193,
        "depth 3": 71,
        "depth 4": 1,
    }


def test_the_family_split_shares_no_family_and_no_published_test_goal_with_training():
    goals = recipe_book().goals
    sides = [load_tasks("textcraft", f"family_{side}") for side in ("train", "test")]
    families = [{family(goals[task.task_index]) for task in side} for side in sides]
    assert not families[0] & families[1]
    train_ids = {task.task_id for task in load_tasks("textcraft", "train")}
    assert {task.task_id for task in sides[0]} <= train_ids
    num_depth_1 = [sum(task.subtask == "depth 1" for task in side) for side in sides]
    assert num_depth_1[0] >= 68 and num_depth_1[1] >= 62
    # No two goals that differ in wood, colour, stone or material only are on different sides.
    bare = [
        {tuple(w for w in goals[t.task_index].split("_") if w not in VARIANT_WORDS) for t in side}
        for side in sides
    ]
    assert not bare[0] & bare[1]
    for depth in ("depth 1", "depth 2", "depth 3"):
        lengths = [[plan_length(t.task_index) for t in s if t.subtask == depth] for s in sides]
        means = [sum(side) / len(side) for side in lengths]
        assert abs(means[0] - means[1]) < 0.25, depth
