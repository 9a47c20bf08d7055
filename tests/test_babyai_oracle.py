"""BabyAI's oracle: how often it wins, in how many turns; that it ends, recovers, disturbs nothing.

Measured over 40 levels x 10 seeds (the slow test): 399 of 400 solved. The one left, level 7 with
seed 6, cannot be won: its goal lies in a locked room together with the only key to it.
"""

import os
import random
import statistics
import time
from collections import Counter

import pytest

if os.environ.get("CI") != "true":  # there a missing one is an error
    pytest.importorskip("minigrid", reason="NOT TESTED: make setup ENV=babyai")

from fastapi.testclient import TestClient
from minigrid.utils.baby_ai_bot import BabyAIBot, DisappearedBoxError

from envclient import connect, local_server
from envs import OracleLost
from envs.babyai.env import BabyAI
from envs.babyai.levels import LEVELS, SUBTASKS, task_index_of
from envs.babyai.oracle import MAX_READS, Bot, Pilot, Stuck
from envs.babyai.world import DONE, DROP, PICKUP, Level
from envs.server import create_app

UNWINNABLE = task_index_of(7, 6)
MAX_TURNS = 100  # the longest of the 400 has 78


def solve(env: BabyAI, max_turns: int = MAX_TURNS) -> list[str]:
    """Plays the oracle to the end of a running episode; returns its actions."""
    actions = []
    while env.available_actions():
        assert len(actions) < max_turns, actions
        thought, action = env.oracle()
        assert "\n" not in thought and "Action:" not in thought
        assert BabyAI.parse(f"Thought: {thought}\nAction: {action}") == action
        assert action in env.available_actions()
        actions.append(action)
        env.step(action)
    return actions


def is_solved(env: BabyAI) -> bool:
    return env.state_for_people()["success"]


def shape(level: Level) -> tuple:
    """All that can be seen of a level."""
    carrying = level.env.carrying and level.env.carrying.encode()
    grid = level.env.grid.encode().tolist()
    return level.position, level.direction, carrying, grid, level.history, level.env.step_count


# ---- how often it wins


@pytest.mark.parametrize("number", range(1, 41))
def test_the_oracle_solves_a_task_of_every_level(number):
    env = BabyAI()
    env.reset(task_index_of(number, 9))
    solve(env)
    assert is_solved(env)


def test_tasks_in_plain_view_take_a_turn_or_two():
    env = BabyAI()
    turns = []
    for number in (1, 2, 3, 4, 5, 9, 10, 11, 13, 14, 19, 20, 30):
        for seed in range(4):
            env.reset(task_index_of(number, seed))
            turns.append(len(solve(env)))
            assert is_solved(env)
    assert statistics.median(turns) == 1 and max(turns) <= 7


def play_over_wire(client, task_index: int) -> tuple[bool, int, float]:
    """(success, turns, return) of the oracle through an EnvClient."""
    client.reset(task_index)
    total = 0.0
    for turn in range(1, MAX_TURNS + 1):
        thought, action = client.oracle()
        result = client.step(f"Thought: {thought}\nAction: {action}")
        assert not result.observation.startswith("Not possible")
        total += result.reward
        if result.terminated or result.truncated:
            return result.info["success"], turn, total
    return False, MAX_TURNS, total


def test_the_oracle_wins_over_http():
    with local_server("babyai") as url, connect("babyai", url) as client:
        for number in (1, 12, 16, 22, 26, 28):
            success, _, total = play_over_wire(client, task_index_of(number, 1))
            assert success and 0 < total <= 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_oracle_solves_all_winnable_tasks_of_ten_seeds_over_http():
    turns: dict[int, list[int]] = {number: [] for number in range(1, 41)}
    lost = []
    with local_server("babyai") as url, connect("babyai", url, timeout_s=60) as client:
        for seed in range(10):
            for number in range(1, 41):
                task_index = task_index_of(number, seed)
                if task_index == UNWINNABLE:
                    continue
                success, num_turns, total = play_over_wire(client, task_index)
                assert 0 <= total <= 1
                if success:
                    turns[number].append(num_turns)
                else:
                    lost.append((number, seed))
    assert lost == []
    for number, counts in turns.items():
        print(LEVELS[number - 1], statistics.median(counts), max(counts))
    within_20 = {
        name: sum(
            n <= 20 for i, name_i in enumerate(SUBTASKS, 1) if name_i == name for n in turns[i]
        )
        for name in ("GoTo", "Pickup", "ActionObjDoor", "FindObjS7", "OneRoomS20", "SynthLoc")
    }
    print(within_20)
    assert sum(within_20.values()) >= 0.9 * 179


# ---- that it ends


def test_a_bot_that_goes_in_circles_is_stopped_and_given_a_start():
    """UnlockToUnlock: minigrid's bot plans for the nearest locked door, whose key it does not know,
    for ever; the key at its feet is for the other one."""
    level = Level(29, 4)
    bot, move = Bot(level), None
    with pytest.raises(Stuck):
        while not level.ended:
            move = bot.replan(move)
            level.act(move)
    assert len(level.history) < 10
    started = time.monotonic()
    env = BabyAI()
    env.reset(task_index_of(29, 4))
    solve(env)
    assert is_solved(env) and time.monotonic() - started < 30


def test_what_the_bot_needs_is_far_below_its_bound(monkeypatch):
    most = 0
    replan = Bot.replan

    def counted(self, action_taken=None):
        nonlocal most
        move = replan(self, action_taken)
        most = max(most, self._counted.reads)
        return move

    monkeypatch.setattr(Bot, "replan", counted)
    env = BabyAI()
    for number in (6, 12, 18, 22, 25, 27, 28, 32, 34, 38):
        env.reset(task_index_of(number, 2))
        solve(env)
        assert is_solved(env)
    assert 5 < most < MAX_READS / 3


def test_the_search_is_minigrids_own_in_every_tie(monkeypatch):
    ours, theirs = Bot._breadth_first_search, BabyAIBot._breadth_first_search
    num_searches = 0

    def both(self, initial_states, accept_fn, ignore_blockers):
        nonlocal num_searches
        found = ours(self, initial_states, accept_fn, ignore_blockers)
        expected = theirs(self, initial_states, accept_fn, ignore_blockers)
        assert found == expected and list(found[2]) == list(expected[2])
        num_searches += 1
        return found

    monkeypatch.setattr(Bot, "_breadth_first_search", both)
    monkeypatch.setattr("envs.babyai.oracle.BOT_ERRORS", (Stuck, DisappearedBoxError))
    env = BabyAI()
    for number in (7, 18, 28):
        env.reset(task_index_of(number, 0))
        solve(env)
    assert num_searches > 500


def test_a_mission_that_cannot_be_won_is_given_up_with_an_error_of_our_own():
    level = Level(7, 6)
    goal = level.env.instrs.desc.obj_set[0]
    grid = level.env.grid
    things = [thing for thing in grid.grid if thing is not None]
    (locked,) = [t for t in things if t.type == "door" and t.is_locked]
    keys = [t for t in things if t.type == "key" and t.color == locked.color]
    assert not any(thing.contains for thing in things)
    reached, todo = set(), [level.position]
    while todo:  # everywhere, through all doors but the locked one, over all things
        x, y = todo.pop()
        thing = grid.get(x, y)
        if (x, y) not in reached and thing is not locked and not (thing and thing.type == "wall"):
            reached.add((x, y))
            todo += [(x + 1, y), (x - 1, y), (x, y + 1), (x, y - 1)]
    assert len(reached) > 100
    assert all(tuple(thing.cur_pos) not in reached for thing in [goal, *keys])
    env = BabyAI()
    env.reset(UNWINNABLE)
    with pytest.raises(OracleLost, match="no way to 'go to the grey key' is known from here"):
        solve(env)
    assert env.step("turn left")[0].startswith("You turn left.")


# ---- that it answers from the state at hand and disturbs nothing


def test_asking_changes_neither_the_episode_nor_later_answers():
    asked, silent = BabyAI(), BabyAI()
    for number in (6, 16, 22, 23, 25, 28):
        first = asked.reset(task_index_of(number, 4))
        assert first == silent.reset(task_index_of(number, 4))
        for _ in range(12):
            if not asked.available_actions():
                break
            before = shape(asked._level)
            answer = asked.oracle()
            assert answer == asked.oracle() and shape(asked._level) == before
            assert asked.step(answer[1]) == silent.step(answer[1])
        if silent.available_actions():  # asked for the first time, in the middle
            assert silent.oracle() == asked.oracle()


def test_the_oracles_own_level_is_at_every_turn_the_one_of_the_episode():
    generator = random.Random(3)
    env = BabyAI()
    for number in (8, 18, 25, 28, 34, 37):
        env.reset(task_index_of(number, 5))
        for turn in range(14):
            if not env.available_actions():
                break
            thought_action = env.oracle()
            assert shape(env._oracle._pilot.level) == shape(env._level)
            action = (
                generator.choice(env.available_actions()) if turn % 3 == 2 else thought_action[1]
            )
            env.step(action)


def random_start(number: int, seed: int, num_actions: int = 10) -> BabyAI:
    """An episode after random actions; it starts over whenever one of them ends it."""
    generator = random.Random(f"{number} {seed}")
    env = BabyAI()
    env.reset(task_index_of(number, seed))
    for _ in range(num_actions):
        env.step(generator.choice(env.available_actions()))
        if not env.available_actions():
            env.reset(task_index_of(number, seed))
    return env


def solved_after_random_play(numbers, seeds) -> Counter:
    outcomes = Counter()
    for number in numbers:
        for seed in seeds:
            env = random_start(number, seed)
            try:
                solve(env)
            except OracleLost:
                outcomes["lost"] += 1
            except AssertionError:
                outcomes["circles"] += 1
            else:
                outcomes["solved" if is_solved(env) else "failed"] += 1
    return outcomes


def test_the_oracle_recovers_from_ten_random_actions():
    outcomes = solved_after_random_play([1, 3, 5, 8, 11, 13, 19, 20, 22, 23, 25, 26, 28, 30], [0])
    assert outcomes["solved"] >= 0.9 * outcomes.total(), outcomes


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_oracle_recovers_from_ten_random_actions_on_every_level():
    """119 of 120; in the other one a box that the mission names was opened and is gone."""
    outcomes = solved_after_random_play(range(1, 41), [1, 2, 3])
    assert outcomes["solved"] >= 117, outcomes


def test_what_was_picked_up_against_the_plan_is_put_down():
    env = BabyAI()
    env.reset(0)
    env.step("pickup grey key 1")
    solve(env)
    assert is_solved(env)
    pilot = Pilot(1, 0)  # the bot alone: told of a pickup, it wants to drop
    level = Level(1, 0)
    for primitive in env._level.history[: env._level.history.index(PICKUP) + 1]:
        pilot.tell(primitive)
        level.act(primitive)
    assert shape(pilot.level) == shape(level) and pilot.move != DONE
    moves = []
    while not pilot.level.ended:
        moves.append(pilot.move)
        pilot.tell(pilot.move)
    assert DROP in moves and pilot.level.reward > 0


def test_the_server_answers_when_the_oracle_is_lost():
    with TestClient(create_app("babyai", first_id=0)) as client:
        client.post("/create")
        client.post("/reset", json={"id": 0, "data_idx": UNWINNABLE})
        status = 200
        for _ in range(MAX_TURNS):
            answer = client.get("/oracle", params={"id": 0})
            status = answer.status_code
            if status != 200:
                break
            client.post("/step", json={"id": 0, "action": answer.json()["action"]})
        assert status == 409 and "no way to 'go to the grey key'" in answer.json()["error"]
        step = client.post("/step", json={"id": 0, "action": "turn left"})
        assert step.status_code == 200  # the episode goes on without it
        assert client.post("/reset", json={"id": 0, "data_idx": 0}).status_code == 200
