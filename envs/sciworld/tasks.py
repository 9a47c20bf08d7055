"""The list of ScienceWorld's tasks with their kinds, variations and topics; needs no Java.

ScienceWorld has 30 kinds of task ("boil", "find-plant", ...). Each kind has many *variations*, for
example with other substances or rooms. The task indices are grouped by kind, one block per kind:

    index     0 .. 29       boil, variations 0 .. 29
    index    30 .. 59       melt, variations 0 .. 29
    ...
    index  4639 .. 7206     the seven kinds that AgentGym leaves out: growing, planes, genetics
    index  7207 .. 14413    all of these again, in the easy mode: doors and containers are open,
                            and the agent may teleport

The first 4,639 are AgentGym's items, in AgentGym's order. A kind's id ("1-2") starts with the
number of its topic. Evaluation tables list topics as sub-tasks. ScienceWorld defines a split: in
each block the first variations are for training, the next ones for development, the last ones for
testing.

    >>> find_task(30)
    (Kind(number='1-2', name='melt', num_train=14, num_dev=7, num_test=9), 0)
    >>> topic(4638), topic(4639)
    ('Biology', 'Growth')
    >>> find_task(easy(30)) == find_task(30), is_easy(easy(30)), is_easy(30)
    (True, True, False)
"""

from bisect import bisect
from itertools import accumulate
from typing import NamedTuple

TOPICS = (
    "Matter Measurement Electricity Classification Growth Chemistry Biology Biology Forces Genetics"
).split()  # topics 1 to 10; a kind's number begins with its topic's
BENCHMARK_TOPICS = ("Measurement", "Electricity", "Classification", "Chemistry", "Biology")
MAX_ACTIONS, MAX_ACTIONS_LONG = 100, 200  # per episode: in the benchmark's topics, in the others


class Kind(NamedTuple):
    """One of ScienceWorld's 30 kinds of task, with its number of variations in each split."""

    number: str
    name: str
    num_train: int
    num_dev: int
    num_test: int

    @property
    def num_variations(self) -> int:
        return self.num_train + self.num_dev + self.num_test

    @property
    def topic(self) -> str:
        return TOPICS[int(self.number.partition("-")[0]) - 1]


KINDS = (
    Kind("1-1", "boil", 14, 7, 9),
    Kind("1-2", "melt", 14, 7, 9),
    Kind("1-3", "freeze", 14, 7, 9),
    Kind("1-4", "change-the-state-of-matter-of", 14, 7, 9),
    Kind("2-1", "use-thermometer", 270, 135, 135),
    Kind("2-2", "measure-melting-point-known-substance", 218, 109, 109),
    Kind("2-3", "measure-melting-point-unknown-substance", 150, 75, 75),
    Kind("3-1", "power-component", 10, 5, 5),
    Kind("3-2", "power-component-renewable-vs-nonrenewable-energy", 10, 5, 5),
    Kind("3-3", "test-conductivity", 450, 225, 225),
    Kind("3-4", "test-conductivity-of-unknown-substances", 300, 150, 150),
    Kind("4-1", "find-living-thing", 150, 75, 75),
    Kind("4-2", "find-non-living-thing", 150, 75, 75),
    Kind("4-3", "find-plant", 150, 75, 75),
    Kind("4-4", "find-animal", 150, 75, 75),
    Kind("6-1", "chemistry-mix", 16, 8, 8),
    Kind("6-2", "chemistry-mix-paint-secondary-color", 18, 9, 9),
    Kind("6-3", "chemistry-mix-paint-tertiary-color", 18, 9, 9),
    Kind("7-1", "lifespan-longest-lived", 62, 31, 32),
    Kind("7-2", "lifespan-shortest-lived", 62, 31, 32),
    Kind("7-3", "lifespan-longest-lived-then-shortest-lived", 62, 31, 32),
    Kind("8-1", "identify-life-stages-1", 6, 3, 5),
    Kind("8-2", "identify-life-stages-2", 4, 2, 4),
    # AgentGym leaves out the following kinds.
    Kind("5-1", "grow-plant", 62, 31, 33),
    Kind("5-2", "grow-fruit", 62, 31, 33),
    Kind("9-1", "inclined-plane-determine-angle", 84, 42, 42),
    Kind("9-2", "inclined-plane-friction-named-surfaces", 692, 346, 348),
    Kind("9-3", "inclined-plane-friction-unnamed-surfaces", 80, 40, 42),
    Kind("10-1", "mendelian-genetics-known-plant", 60, 30, 30),
    Kind("10-2", "mendelian-genetics-unknown-plant", 240, 120, 120),
)
# STARTS[i] is the index of the first variation of KINDS[i]; the last entry counts all variations.
STARTS = tuple(accumulate((kind.num_variations for kind in KINDS), initial=0))
NUM_VARIATIONS = STARTS[-1]
NUM_TASKS = 2 * NUM_VARIATIONS  # every variation in the normal and in the easy mode


def find_task(task_index: int) -> tuple[Kind, int]:
    """The kind and the variation of a task."""
    variation = task_index % NUM_VARIATIONS
    block = bisect(STARTS, variation) - 1
    return KINDS[block], variation - STARTS[block]


def easy(task_index: int) -> int:
    """The index of the same variation in the easy mode."""
    return task_index % NUM_VARIATIONS + NUM_VARIATIONS


def is_easy(task_index: int) -> bool:
    return task_index >= NUM_VARIATIONS


def topic(task_index: int) -> str:
    return find_task(task_index)[0].topic


def max_actions(task_index: int) -> int:
    """Number of actions after which an episode is truncated."""
    return MAX_ACTIONS if topic(task_index) in BENCHMARK_TOPICS else MAX_ACTIONS_LONG
