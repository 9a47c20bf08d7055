"""Long tests of BabyAI: the oracle on ten seeds of every level.

The oracle solved 399 of 400 tasks (40 levels x 10 seeds). The remaining one, level 7 with seed 6,
cannot be won: its goal is in a locked room, together with the only key to that room.
"""

import statistics

import pytest

pytest.importorskip("minigrid", reason="NOT TESTED: make setup ENV=babyai")

from test_babyai import LONGEST, num_solved_after_random_play

from envclient import connect, local_server
from envs.babyai.levels import LEVELS, SUBTASKS, task_index_of

UNWINNABLE = task_index_of(7, 6)


def play_over_wire(client, task_index: int) -> tuple[bool, int, float]:
    """Play the oracle through an EnvClient; return (success, turns, return)."""
    client.reset(task_index)
    total = 0.0
    for turn in range(1, LONGEST + 1):
        thought, action = client.oracle()
        result = client.step(f"Thought: {thought}\nAction: {action}")
        assert not result.observation.startswith("Not possible")
        total += result.reward
        if result.terminated or result.truncated:
            return result.info["success"], turn, total
    return False, LONGEST, total


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_oracle_solves_all_winnable_tasks_of_ten_seeds_over_http():
    turns: dict[int, list[int]] = {number: [] for number in range(1, 41)}
    failures = []
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
                    failures.append((number, seed))
    assert failures == []
    for number, counts in turns.items():
        print(LEVELS[number - 1], statistics.median(counts), max(counts))
    num_short = {
        name: sum(
            n <= 20 for i, name_i in enumerate(SUBTASKS, 1) if name_i == name for n in turns[i]
        )
        for name in ("GoTo", "Pickup", "ActionObjDoor", "FindObjS7", "OneRoomS20", "SynthLoc")
    }
    print(num_short)
    assert sum(num_short.values()) >= 0.9 * 179


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_oracle_recovers_from_ten_random_actions_on_every_level():
    """It solved 119 of 120; in the remaining one, a box that the mission needs was already gone."""
    assert sum(num_solved_after_random_play(range(1, 41), seed) for seed in (1, 2, 3)) >= 117
