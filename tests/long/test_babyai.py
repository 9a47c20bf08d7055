"""Long tests of BabyAI: the oracle on ten seeds of every level.

The oracle solved 399 of 400 tasks (40 levels x 10 seeds). The remaining one, level 7 with seed 6,
cannot be won: its goal is in a locked room, together with the only key to that room.
"""

from itertools import product

import pytest

pytest.importorskip("minigrid", reason="NOT TESTED: make setup ENV=babyai")

from test_babyai import LONGEST, num_solved_after_random_play

from envclient import connect, local_server
from envs.babyai.levels import SUBTASKS, task_index_of
from reporting.leaderboard import PAPER

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
    """In the paper's sub-tasks, nine of ten times within its limit of 20 turns."""
    failures, is_short = [], []
    with local_server("babyai") as url, connect("babyai", url, timeout_s=60) as client:
        for seed, number in product(range(10), range(1, 41)):
            task_index = task_index_of(number, seed)
            if task_index == UNWINNABLE:
                continue
            success, num_turns, total = play_over_wire(client, task_index)
            assert 0 <= total <= 1
            if not success:
                failures.append((number, seed))
            if SUBTASKS[number - 1] in PAPER["babyai"].subtasks:
                is_short.append(success and num_turns <= 20)
    assert failures == [] and sum(is_short) >= 0.9 * len(is_short)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_oracle_recovers_from_ten_random_actions_on_every_level():
    """It solved 119 of 120; in the remaining one, a box that the mission needs was already gone."""
    assert sum(num_solved_after_random_play(range(1, 41), seed) for seed in (1, 2, 3)) >= 117
