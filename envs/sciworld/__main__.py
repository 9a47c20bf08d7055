"""`python -m envs.sciworld`: play in the terminal; `--write-ids` writes the id lists again.

The lists obey ScienceWorld's own split (envs/sciworld/tasks.py).

sciworld_test, sciworld_train   AgentGym-RL's sizes: 200 test ids with its counts for each topic,
    2,120 training ids of the same topics in proportion to their training variations. Which
    variations it took is not published; ours are drawn with a fixed seed. Inside a topic each kind
    of task has its share and at least one id.
sciworld_short_test, sciworld_short_train   A curriculum for a laptop: easy tasks that the oracle
    solves within 6 actions, as many of each kind, of finding a living thing, a non-living thing, a
    plant or an animal, and of comparing life spans. Writing them takes Java some minutes.
"""

import random
from collections.abc import Callable, Mapping
from itertools import islice
from pathlib import Path

from envs.common import command_line, oracle_turns, write_id_lists
from envs.sciworld.env import SciWorld
from envs.sciworld.tasks import BENCHMARK_TOPICS, KINDS, Kind, easy, test_indices, train_indices

SEED = 0
NUM_TEST = dict(zip(BENCHMARK_TOPICS, (53, 83, 44, 5, 15)))
NUM_TRAIN = 2120
SHORT_KINDS = tuple(k for k in KINDS if k.topic == "Classification" or k.number.startswith("7-"))
MAX_TURNS = 6  # of the short lists
TRAIN_PER_KIND, TEST_PER_KIND = 40, 10


def shares(sizes: Mapping[str, int], count: int) -> dict[str, int]:
    """`count` split in proportion to `sizes`, at least one each, by largest remainder.

    >>> shares({"a": 5, "b": 4, "c": 1}, 4)
    {'a': 2, 'b': 1, 'c': 1}
    """
    total = sum(sizes.values())
    exact = {name: size * count / total for name, size in sizes.items()}
    whole = {name: max(1, int(part)) for name, part in exact.items()}
    while sum(whole.values()) != count:
        step = 1 if sum(whole.values()) < count else -1
        movable = [n for n in whole if (whole[n] < sizes[n] if step > 0 else whole[n] > 1)]
        furthest = max(movable, key=lambda name: step * (exact[name] - whole[name]))
        whole[furthest] += step
    return whole


def draw(split: str, counts: dict[str, int], indices_of: Callable[[Kind], range]) -> list[int]:
    """So many task indices of each topic, of each of its kinds in proportion."""
    generator, drawn = random.Random(f"sciworld {split} {SEED}"), list[int]()
    for topic, count in counts.items():
        indices = {kind.name: indices_of(kind) for kind in KINDS if kind.topic == topic}
        numbers = shares({name: len(each) for name, each in indices.items()}, count)
        drawn += sorted(
            i for name in indices for i in generator.sample(indices[name], numbers[name])
        )
    return drawn


def benchmark_split() -> tuple[list[int], list[int]]:
    """(train, test) indices with AgentGym-RL's sizes."""
    sizes = {t: sum(kind.num_train for kind in KINDS if kind.topic == t) for t in NUM_TEST}
    train = draw("train", shares(sizes, NUM_TRAIN), train_indices)
    return train, draw("test", NUM_TEST, test_indices)


def short_split() -> tuple[list[int], list[int]]:
    """(train, test) indices of the split for a laptop."""
    generator = random.Random(f"sciworld short {SEED}")
    env = SciWorld()

    def short_ones(indices: range, count: int) -> list[int]:
        """`count` of `indices` in the easy mode, or all that are short."""
        shuffled = [easy(index) for index in generator.sample(indices, len(indices))]
        found = (i for i in shuffled if oracle_turns(env, i, at_most=MAX_TURNS) <= MAX_TURNS)
        return list(islice(found, count))

    try:
        train = [i for kind in SHORT_KINDS for i in short_ones(train_indices(kind), TRAIN_PER_KIND)]
        test = [i for kind in SHORT_KINDS for i in short_ones(test_indices(kind), TEST_PER_KIND)]
    finally:
        env.close()
        SciWorld.close_shared()
    return sorted(train), sorted(test)


def write_ids(folder: Path | None = None) -> dict[Path, int]:
    """Writes the four lists; returns how many ids each file holds."""
    train, test = benchmark_split()
    short_train, short_test = short_split()
    lists = {"train": train, "test": test, "short_train": short_train, "short_test": short_test}
    return write_id_lists("sciworld", lists, folder)


if __name__ == "__main__":
    command_line(SciWorld, "sciworld", task_index=2936, write_ids=write_ids)
