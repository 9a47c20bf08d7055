"""BabyAI: AgentGym's task numbers, text actions, minigrid's verdicts, and an oracle that wins,
recovers from random play and does not change the episode."""

import contextlib
import json
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("minigrid", reason="NOT TESTED: make setup ENV=babyai")

from minigrid.core.world_object import Ball, Door, Key, Wall
from starlette.testclient import TestClient

from envs import EpisodeEndedError, OracleLost, load_tasks
from envs.babyai.env import BabyAI
from envs.babyai.levels import LEVELS, level_and_seed, task_index_of
from envs.babyai.world import (
    CHECK,
    DIRECTIONS,
    DONE,
    FORWARD,
    TOGGLE,
    Impossible,
    Level,
    View,
    available,
    perform,
    remaining_parts,
)
from envs.server import create_app

ROOT = Path(__file__).parent.parent


def put(level: Level, thing, ahead: int, right: int = 0) -> None:
    """Place an object at this position relative to the agent."""
    level.env.put_obj(thing, *View(level).absolute((ahead, right, 0))[0])


def empty_room(direction: int = 0) -> Level:
    """The room of level 1 with only the goal, a red ball at (2, 2), and the agent at (3, 3).
    Directions: 0 right, 1 down, 2 left, 3 up."""
    level = Level(1, 0)
    for x in range(1, 7):
        for y in range(1, 7):
            thing = level.env.grid.get(x, y)
            if thing is not None and thing.color == "grey":
                level.env.grid.set(x, y, None)
    level.env.agent_pos, level.env.agent_dir = (3, 3), direction
    return level


def goal_at(level: Level, ahead: int, right: int) -> None:
    """Move the red ball of the goal to this position relative to the agent."""
    description = level.env.instrs.desc
    ball = description.obj_set[0]
    level.env.grid.set(*ball.cur_pos, None)
    put(level, ball, ahead, right)
    description.obj_poss = [ball.cur_pos]


def test_task_indices_are_agentgyms_levels_and_seeds():
    assert len(LEVELS) == len(set(LEVELS)) == 40
    for number, name in {1: "GoToRedBallGrey-v0", 23: "PutNextS7N4Carrying-v0"}.items():
        assert LEVELS[number - 1] == "BabyAI-" + name
    for task_index in (0, 39, 40, 83, BabyAI.num_tasks() - 1):
        assert task_index_of(*level_and_seed(task_index)) == task_index
    assert level_and_seed(83) == (4, 2)


def test_a_trainer_can_use_the_class_without_minigrid_and_reset_names_the_remedy():
    program = (
        "import sys\n"
        "for name in ('minigrid', 'gymnasium', 'PIL', 'numpy'): sys.modules[name] = None\n"
        "from envs import get_env, load_tasks\n"
        "env = get_env('babyai')\n"
        "print(len(load_tasks('babyai', 'test')), env.parse('Action: Go to red ball 1.'))\n"
        "env().reset(0)\n"
    )
    command = [sys.executable, "-c", program]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert process.stdout == "90 go to red ball 1\n"
    message = "BabyAI needs gymnasium, which is not installed; run `make setup ENV=babyai`\n"
    assert process.stderr.endswith(message)


def test_the_oracle_plays_and_explains_an_episode():
    env = BabyAI()
    assert env.reset(25).startswith("Your goal: open the door\nYou see: no objects.\n")
    turns, observation = [], ""
    while env.available_actions():
        turns.append(env.oracle())
        observation, reward, *_ = env.step(turns[-1][1])
    assert turns == [
        ("I do not see the door, so I turn right to look for it.", "turn right"),
        ("There may be a key in yellow box 1, so I go to yellow box 1.", "go to yellow box 1"),
        ("There may be a key in yellow box 1, so I toggle.", "toggle"),
        (
            "I need purple key 1 to open a locked door, so I pick up purple key 1.",
            "pickup purple key 1",
        ),
        ("I want to open the purple door, so I turn right.", "turn right"),
        (
            "I see purple door 1, which is my goal, so I toggle and go through purple door 1.",
            "toggle and go through purple door 1",
        ),
    ]
    assert (observation, reward) == ("You open purple door 1.\nThe goal is reached.", 0.975)
    with pytest.raises(EpisodeEndedError):
        env.step("turn left")
    assert env.state_for_people()["success"]


def test_available_actions_work_and_other_actions_change_nothing():
    generator = random.Random(2)
    counts = Counter()
    for number in range(1, 41, 4):
        level = Level(number, 1)
        for _ in range(4):
            view = View(level)
            actions = available(level, view)
            assert len(set(actions)) == len(actions) and actions.pop() == CHECK
            candidates = {*actions, "move forward", "toggle", "drop"}
            for verb in ("go to", "pickup", "go through", "toggle and go through"):
                candidates |= {f"{verb} {entry.name}" for entry in view.objects}
            for action in sorted(candidates):
                replay = Level(number, 1)
                for primitive in level.history:
                    replay.act(primitive)
                try:
                    perform(replay, View(replay), action)
                except Impossible:
                    assert action not in actions and state_of(replay) == state_of(level)
                else:
                    assert action in actions and len(replay.history) > len(level.history)
                counts[action.split()[0], action in actions] += 1
            perform(level, view, generator.choice(actions))
            if level.is_over:
                break
    for verb in ("pickup", "toggle", "move", "drop", "go"):
        assert min(counts[verb, True], counts[verb, False]) > 3, (verb, counts)


def test_an_object_behind_a_door_stops_the_walk_in_the_doorway():
    level = empty_room()
    for right in (-2, -1, 1, 2, 3):
        put(level, Wall("grey"), 2, right)
    put(level, Door("green"), 2)
    put(level, Ball("blue"), 3)
    assert "blue ball 1" not in View(level).by_name  # the closed door hides it
    assert perform(level, View(level), "toggle and go through green door 1") == (
        "You open and go through green door 1 but stop in the doorway: a blue ball is in the way."
    )
    assert level.history == [FORWARD, TOGGLE, FORWARD]
    assert View(level).words().startswith("You stand in the open green door.\nYou see: blue ball 1")


def test_a_walk_stops_when_the_mission_ends_or_the_steps_are_used_up():
    env = BabyAI()
    env.reset(0)
    env._level.env.max_steps = 3
    observation, reward, terminated, truncated, info = env.step("go to red ball 1")
    assert observation == "You stop on the way to red ball 1.\nAll 3 steps are used up."
    assert (reward, terminated, truncated, info["success"]) == (0.0, False, True, False)
    assert env.state_for_people()["steps"] == 3
    level = empty_room()  # a walk past the goal, which is one step ahead for a moment
    goal_at(level, 2, 0)
    put(level, Key("blue"), 2, 1)
    assert perform(level, View(level), "go to blue key 1") == "You stop on the way to blue key 1."
    assert level.history == [FORWARD] and level.terminated and level.reward > 0
    level = empty_room()  # a walk to a goal that the agent faces already
    goal_at(level, 1, 0)
    assert perform(level, View(level), "go to red ball 1") == "You go to red ball 1."
    assert level.history == [DONE] and level.terminated and level.reward > 0


def test_an_impossible_action_gives_the_reason_and_costs_nothing():
    env = BabyAI()
    env.reset(0)
    actions = json.dumps(env.available_actions())
    for action, reason in {
        "go to purple ball 1": "no purple ball 1 is in view",
        "drop": "you carry nothing",
        "x" * 1_000_000: "'too long' is no action",
        "": "there is no action",
    }.items():
        observation, *rest = env.step(action)
        assert observation == f"Not possible: {reason}.\nAvailable actions: {actions}"
        assert rest[:3] == [0.0, False, False] and rest[3].pop("anchor") == env._level.state
        assert rest[3] == {"success": False, "score": 0.0, "failed": True}
    assert env.state_for_people()["steps"] == 0
    state = env._level.state
    assert env.step("turn right")[4]["anchor"] != state
    assert env.step("turn left")[4]["anchor"] == state


def open_door(level: Level, color: str) -> None:
    """Put the agent in front of the door of this color and toggle the door."""
    env = level.env
    (door,) = [t for t in env.grid.grid if isinstance(t, Door) and t.color == color]
    (x, y), room = door.cur_pos, env.room_from_pos(*level.position)
    for direction, (dx, dy) in enumerate(DIRECTIONS):
        place = (x - dx, y - dy)
        if room.pos_inside(*place) and env.grid.get(*place) is None:
            env.agent_pos, env.agent_dir = place, direction
    level.act(TOGGLE)


def order_of_doors(level: Level) -> list[str]:
    return [part.desc.color for part in remaining_parts(level.env.instrs)]


def test_only_a_wrong_door_fails_a_mission_of_two_doors():
    kinds = set()
    for seed in range(30):
        level, wrong_level = Level(16, seed), Level(16, seed)
        if len(doors := order_of_doors(level)) < 2:
            continue
        instructions = level.env.instrs
        kinds.add(type(instructions).__name__)
        open_door(level, doors[0])
        verdicts = (instructions.a_done, instructions.b_done)
        assert not level.is_over and "failure" in verdicts  # minigrid's verdict is wrong
        assert order_of_doors(level) == doors[1:]
        open_door(level, doors[1])
        assert level.terminated and level.reward > 0.9
        open_door(wrong_level, doors[1])
        assert wrong_level.terminated and wrong_level.reward == 0, seed
    assert kinds == {"BeforeInstr", "AfterInstr"}


def test_the_server_answers_with_agentgyms_fields():
    with TestClient(create_app("babyai", first_id=0)) as client:
        assert client.get("/").json() == "This is environment BabyAI."
        assert client.post("/create").json() == {"id": 0}
        assert client.post("/reset", json={"id": 0}).status_code == 422  # data_idx is required
        answer = client.post("/reset", json={"id": 0, "data_idx": 0}).json()
        assert answer.pop("observation").startswith("Your goal: go to the red ball\nYou see: ")
        start = {"reward": 0, "score": 0, "done": False, "deleted": False}
        assert (start | {"subtask": "GoTo"}).items() <= answer.items()
        answer = client.get("/observation", params={"id": 0}).json()
        assert answer.keys() == {"observation", *start} and start.items() <= answer.items()
        picture = client.post("/render", json={"id": 0}).json()
        assert picture.startswith("data:image/png;base64,")
        action = client.get("/oracle", params={"id": 0}).json()["action"]
        answer = client.post("/step", json={"id": 0, "action": action}).json()
        assert answer["done"] and answer["score"] == answer["reward"] == 1 - 0.9 * 8 / 64


def test_the_id_lists_have_agentgyms_sizes_and_subtasks_and_share_no_seed():
    names = ("test", "train", "simple_test", "simple_train")
    ids = {name: [task.task_index for task in load_tasks("babyai", name)] for name in names}
    assert [len(ids[name]) for name in names] == [90, 810, 74, 178]
    counts = {"GoTo": 55, "Pickup": 15, "ActionObjDoor": 5, "FindObjS7": 5, "OneRoomS20": 5}
    assert Counter(map(BabyAI.subtask, ids["test"])) == counts | {"SynthLoc": 5}
    assert {index // 40 for index in ids["test"]} == {*range(5)}
    assert {index // 40 for index in ids["train"]} == {*range(5, 50)}
    assert {*ids["simple_train"]} <= {*ids["train"]}
    assert not {*ids["simple_test"]} & {*ids["train"]}


# ---- the oracle

LONGEST = 100  # the longest of 400 episodes has 78 turns


def solve(env: BabyAI) -> bool:
    """Play the oracle to the end of a running episode; return whether it wins."""
    num_turns = 0
    while env.available_actions():
        num_turns += 1
        assert num_turns <= LONGEST
        thought, action = env.oracle()
        assert "\n" not in thought and "Action:" not in thought
        assert BabyAI.parse(f"Thought: {thought}\nAction: {action}") == action
        assert action in env.available_actions()
        env.step(action)
    return env.state_for_people()["success"]


def state_of(level: Level) -> tuple:
    """The state of a level, for comparisons."""
    carrying = level.env.carrying and level.env.carrying.encode()
    grid = level.env.grid.encode().tolist()
    return level.position, level.direction, carrying, grid, level.history, level.env.step_count


# In level 29 with seed 4, minigrid's bot would plan for ever to open the nearest locked door: the
# only key that it knows fits another one.
@pytest.mark.parametrize(("number", "seed"), [*((n, 9) for n in range(1, 41)), (29, 4)])
def test_the_oracle_solves_a_task_of_every_level(number, seed):
    env = BabyAI()
    env.reset(task_index_of(number, seed))
    assert solve(env)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(9))
def test_the_oracle_solves_nine_more_tasks_of_every_level(seed):
    """Level 7 with seed 6 cannot be won: its goal is in a locked room, together with the only key
    to that room."""
    for number in range(1, 41):
        if (number, seed) != (7, 6):
            test_the_oracle_solves_a_task_of_every_level(number, seed)


def test_the_oracle_raises_an_error_if_the_mission_cannot_be_won_any_more():
    env = BabyAI()
    assert env.reset(task_index_of(17, 1)).startswith("Your goal: pick up a grey box\n")
    while "toggle" not in env.available_actions():
        env.step(env.oracle()[1].replace("pickup", "go to"))
    assert "nothing is in it" in env.step("toggle")[0]
    with pytest.raises(OracleLost):
        env.oracle()
    assert env.step("turn left")[0].startswith("You turn left.")


def test_asking_the_oracle_changes_neither_the_episode_nor_later_answers():
    env, unasked_env = BabyAI(), BabyAI()
    for number in (6, 16, 22, 23, 25, 28):
        observation = env.reset(task_index_of(number, 4))
        assert observation == unasked_env.reset(task_index_of(number, 4))
        for _ in range(12):
            if not env.available_actions():
                break
            state = state_of(env._level)
            answer = env.oracle()
            assert answer == env.oracle() and state_of(env._level) == state
            assert env.step(answer[1]) == unasked_env.step(answer[1])
        if unasked_env.available_actions():  # the first question, in the middle of the episode
            assert unasked_env.oracle() == env.oracle()


def num_solved_after_random_play(numbers, seed) -> int:
    """Number of these levels in which the oracle wins after ten random actions."""
    num_solved = 0
    for number in numbers:
        generator, env = random.Random(f"{number} {seed}"), BabyAI()
        env.reset(task_index_of(number, seed))
        for _ in range(10):
            env.step(generator.choice(env.available_actions()))
            if not env.available_actions():
                env.reset(task_index_of(number, seed))
        with contextlib.suppress(OracleLost):
            num_solved += solve(env)
    return num_solved


def test_the_oracle_recovers_from_ten_random_actions():
    numbers = [1, 3, 5, 8, 11, 13, 19, 20, 22, 23, 25, 26, 28, 30]
    assert num_solved_after_random_play(numbers, seed=0) >= 13


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_oracle_recovers_from_ten_random_actions_on_every_level():
    """It solved 119 of 120; in the remaining one, a box that the mission needs was already gone."""
    assert sum(num_solved_after_random_play(range(1, 41), seed) for seed in (1, 2, 3)) >= 117
