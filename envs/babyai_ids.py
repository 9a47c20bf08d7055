"""Which BabyAI tasks are for training and which for testing: the id lists of envs/ids.

Two splits, both written by `python -m envs.babyai --write-ids`, the same on every machine.

babyai_test, babyai_train   AgentGym-RL's sizes: 90 tests in six sub-tasks (GoTo 55, Pickup 15,
    ActionObjDoor, FindObjS7, OneRoomS20, SynthLoc 5 each) and 810 for training. The published ids
    are not reproduced: 18 levels with seeds 0 to 4 and seeds 5 to 49 fit the counts of both lists
    (envs/babyai_levels.py says which levels, and that this is an inference).

babyai_simple_test, babyai_simple_train   A curriculum for a laptop: tasks of the sub-tasks GoTo and
    Pickup that the oracle solves within 6 turns. What counts is how hard a task is, not its level:
    from the ball in plain view (1 turn) to a search through rooms that was lucky. Training tasks
    are those of training seeds, an equal number of each level (fewer where a level has fewer short
    ones); test tasks have seeds that occur in no training list, and none of them starts like a
    training task (same goal, same view).

        >>> [task_index % 40 + 1 for task_index in published_split()[1][:12]]
        [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 17]

The oracle needs minigrid; reading the lists does not. Read next: envs/babyai_oracle.py.
"""

from pathlib import Path

from envs import IDS_DIR
from envs.babyai import BabyAI
from envs.babyai_levels import SUBTASKS, task_index_of
from envs.common import write_id_lists

TESTED = ("GoTo", "Pickup", "ActionObjDoor", "FindObjS7", "OneRoomS20", "SynthLoc")
SIMPLE = ("GoTo", "Pickup")
TEST_SEEDS, TRAIN_SEEDS = range(5), range(5, 50)
MORE_TEST_SEEDS = range(50, 70)  # for the simple split, whose test is larger
MAX_TURNS = 6
TRAIN_PER_LEVEL, TEST_PER_LEVEL = 15, 6  # of the simple split


def levels_of(subtasks: tuple[str, ...]) -> list[int]:
    """The numbers (1..40) of the levels of these sub-tasks."""
    return [number for number, name in enumerate(SUBTASKS, 1) if name in subtasks]


def published_split() -> tuple[list[int], list[int]]:
    """(train, test) indices, seed by seed."""
    numbers = levels_of(TESTED)
    train, test = (
        [task_index_of(number, seed) for seed in seeds for number in numbers]
        for seeds in (TRAIN_SEEDS, TEST_SEEDS)
    )
    return train, test


def num_turns(env: BabyAI, task_index: int) -> int:
    """How many actions the oracle takes from the start; MAX_TURNS + 1 if more than MAX_TURNS."""
    env.reset(task_index)
    for turn in range(1, MAX_TURNS + 1):
        _, _, terminated, truncated, info = env.step(env.oracle()[1])
        if terminated or truncated:
            return turn if info["success"] else MAX_TURNS + 1
    return MAX_TURNS + 1


def simple_split() -> tuple[list[int], list[int]]:
    """(train, test) indices of the split for a laptop."""
    env = BabyAI()
    train: list[int] = []
    test: list[int] = []
    starts: set[str] = set()
    for side, seeds, per_level in (
        (train, [*TRAIN_SEEDS], TRAIN_PER_LEVEL),
        (test, [*TEST_SEEDS, *MORE_TEST_SEEDS], TEST_PER_LEVEL),
    ):
        for number in levels_of(SIMPLE):
            chosen: list[int] = []
            for task_index in (task_index_of(number, seed) for seed in seeds):
                if len(chosen) < per_level and num_turns(env, task_index) <= MAX_TURNS:
                    start = env.reset(task_index)
                    if side is train:
                        starts.add(start)
                    if side is train or start not in starts:
                        chosen.append(task_index)
            side += chosen
    return sorted(train), sorted(test)


def write_ids(folder: Path = IDS_DIR) -> dict[Path, int]:
    """Writes the four lists; returns how many ids each file holds."""
    train, test = published_split()
    simple_train, simple_test = simple_split()
    lists = {"train": train, "test": test, "simple_train": simple_train, "simple_test": simple_test}
    return write_id_lists("babyai", lists, folder)
