"""`python -m envs.babyai`: play in the terminal; `--write-ids` writes the id lists again.

babyai_test, babyai_train   AgentGym-RL's sizes, 90 tests and 810 for training: 18 levels with seeds
    0 to 4 and 5 to 49, inferred from the published counts (envs/babyai/levels.py).
babyai_simple_test, babyai_simple_train   A curriculum for a laptop: tasks of GoTo and Pickup that
    the oracle solves in 1, 2 or 3 turns, as many of each as far as a level has them. No test task
    has a training seed, or starts like a training task (same goal, same view).
"""

from collections import Counter
from pathlib import Path

from envs.babyai.env import BabyAI
from envs.babyai.levels import SUBTASKS, task_index_of
from envs.common import command_line, oracle_turns, write_id_lists

TESTED = ("GoTo", "Pickup", "ActionObjDoor", "FindObjS7", "OneRoomS20", "SynthLoc")
SIMPLE = ("GoTo", "Pickup")
TEST_SEEDS, TRAIN_SEEDS = range(5), range(5, 50)
MORE_TEST_SEEDS = range(50, 70)  # for the simple split, whose test is larger
MAX_TURNS = 3  # of the simple split
TRAIN_OF_EACH, TEST_OF_EACH = 5, 2  # tasks of each level and number of turns


def levels_of(subtasks: tuple[str, ...]) -> list[int]:
    return [number for number, name in enumerate(SUBTASKS, 1) if name in subtasks]


def published_split() -> tuple[list[int], list[int]]:
    """(train, test) indices, seed by seed.

    >>> [task_index % 40 + 1 for task_index in published_split()[1][:12]]
    [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 17]
    """
    numbers = levels_of(TESTED)
    train, test = (
        [task_index_of(number, seed) for seed in seeds for number in numbers]
        for seeds in (TRAIN_SEEDS, TEST_SEEDS)
    )
    return train, test


def simple_split() -> tuple[list[int], list[int]]:
    """(train, test) indices of the split for a laptop."""
    env = BabyAI()
    train, test = list[int](), list[int]()
    starts = set[str]()
    for side, seeds, of_each in (
        (train, TRAIN_SEEDS, TRAIN_OF_EACH),
        (test, [*TEST_SEEDS, *MORE_TEST_SEEDS], TEST_OF_EACH),
    ):
        for number in levels_of(SIMPLE):
            counts: Counter[int] = Counter()  # by number of turns
            for task_index in (task_index_of(number, seed) for seed in seeds):
                turns = oracle_turns(env, task_index, at_most=MAX_TURNS)
                if turns > MAX_TURNS or counts[turns] == of_each:
                    continue
                start = env.reset(task_index)
                if side is train:
                    starts.add(start)
                elif start in starts:
                    continue
                counts[turns] += 1
                side.append(task_index)
    return sorted(train), sorted(test)


def write_ids(folder: Path | None = None) -> dict[Path, int]:
    """Writes the four lists; returns how many ids each file holds."""
    train, test = published_split()
    simple_train, simple_test = simple_split()
    lists = {"train": train, "test": test, "simple_train": simple_train, "simple_test": simple_test}
    return write_id_lists("babyai", lists, folder)


if __name__ == "__main__":
    command_line(BabyAI, "babyai", task_index=0, write_ids=write_ids)
