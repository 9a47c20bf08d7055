"""`python -m envs.textcraft`: play in the terminal; `--write-ids` writes the id lists again.

textcraft_test, textcraft_train   The split that AgentGym-RL publishes. The 100 test ids, four
    ranges of indices, are exact. Which parts of depths 2 and 3 the 374 training ids are is not
    published: ours are drawn with a fixed seed, in proportion to the two ranges.
textcraft_family_test, textcraft_family_train   In the split above nearly every test goal has a
    twin in training (oak door, birch door). Here all variants of a thing are on one side. Training
    ids are a subset of textcraft_train; families without such a goal are for testing. Of many
    random assignments we keep the one with the most equal lengths of oracle plans at each depth.
textcraft_short_test, textcraft_short_train   Goals of the family lists that the oracle makes in at
    most five turns; the default run plays them.
"""

import random
from collections import Counter
from pathlib import Path

from envs.common import command_line, write_id_lists
from envs.textcraft.env import TextCraft
from envs.textcraft.recipes import recipe_book

SEED = 0
TEST_RANGES = ((0, 31), (140, 181), (420, 445), (533, 536))  # half open, one for each depth
TRAIN_DEPTH_1, TRAIN_DEPTH_4 = range(31, 140), [537]
TRAIN_DEPTH_2, NUM_TRAIN_DEPTH_2 = range(181, 420), 193  # 193 : 71 = 239 : 88
TRAIN_DEPTH_3, NUM_TRAIN_DEPTH_3 = range(445, 533), 71
MIN_FAMILY_TRAIN_DEPTH_1, MIN_FAMILY_TEST_DEPTH_1 = 68, 62  # of 140
MAX_TURNS = 5  # of the oracle, on short goals
NUM_TRIALS, TRAIN_SHARE = 20_000, 0.7  # share of the assignable families

VARIANT_WORDS = set(
    "dark oak spruce birch jungle acacia crimson warped stripped wooden "  # woods
    "white orange magenta light blue yellow lime pink gray cyan purple brown green red black "
    "stone cobblestone granite diorite andesite blackstone sandstone quartz purpur prismarine "
    "nether end brick bricks mossy polished smooth cut chiseled cracked "  # stones and their cuts
    "iron gold golden diamond netherite leather".split()  # materials
)


def family(item: str) -> str:
    """The last word of a name that is not a wood, a colour, a stone or a material.

    >>> [family(item) for item in ("dark_oak_fence_gate", "light_blue_bed", "cut_sandstone")]
    ['gate', 'bed', 'material']
    """
    words = [word for word in item.split("_") if word not in VARIANT_WORDS]
    return words[-1] if words else "material"


def published_split() -> tuple[list[int], list[int]]:
    """(train, test) indices."""
    generator = random.Random(f"textcraft train {SEED}")
    test = [index for start, stop in TEST_RANGES for index in range(start, stop)]
    train = [
        *TRAIN_DEPTH_1,
        *sorted(generator.sample(TRAIN_DEPTH_2, NUM_TRAIN_DEPTH_2)),
        *sorted(generator.sample(TRAIN_DEPTH_3, NUM_TRAIN_DEPTH_3)),
        *TRAIN_DEPTH_4,
    ]
    return train, test


def plan_length(task_index: int) -> int:
    env = TextCraft()
    env.reset(task_index)
    return len(env.state_for_people()["plan"])


def family_split() -> tuple[list[int], list[int]]:
    """(train, test) indices of the split by families."""
    book = recipe_book()
    trainable = set(published_split()[0])
    families = [family(goal) for goal in book.goals]
    depths = [book.depth(goal) for goal in book.goals]
    lengths = [plan_length(index) for index in range(len(book.goals))]
    assignable = sorted({families[index] for index in trainable})
    generator = random.Random(f"textcraft families {SEED}")
    best_cost, best = float("inf"), (list[int](), list[int]())
    for _ in range(NUM_TRIALS):
        train_families = {name for name in assignable if generator.random() < TRAIN_SHARE}
        sides: tuple[list[int], list[int]] = ([], [])
        for index, name in enumerate(families):
            if name not in train_families:
                sides[1].append(index)
            elif index in trainable:
                sides[0].append(index)
        counts = [Counter(depths[index] for index in side) for side in sides]
        if counts[0][1] < MIN_FAMILY_TRAIN_DEPTH_1 or counts[1][1] < MIN_FAMILY_TEST_DEPTH_1:
            continue
        cost = 0.0
        for depth in (1, 2, 3):
            sums = [sum(lengths[i] for i in side if depths[i] == depth) for side in sides]
            if not (counts[0][depth] and counts[1][depth]):
                break
            cost += abs(sums[0] / counts[0][depth] - sums[1] / counts[1][depth])
        else:
            if cost < best_cost:
                best_cost, best = cost, sides
    return best


def write_ids(folder: Path | None = None) -> dict[Path, int]:
    """Writes the lists; returns how many ids each file holds."""
    train, test = published_split()
    family_train, family_test = family_split()
    lists = {"train": train, "test": test, "family_train": family_train, "family_test": family_test}
    for name, goals in (("short_train", family_train), ("short_test", family_test)):
        lists[name] = [index for index in goals if plan_length(index) <= MAX_TURNS]
    return write_id_lists("textcraft", lists, folder)


if __name__ == "__main__":
    command_line(TextCraft, "textcraft", task_index=140, write_ids=write_ids)
