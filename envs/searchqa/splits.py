"""Which questions are for training and which for testing: the id lists of ids/.

Six lists, written by `python -m envs.searchqa --write-ids`, the same on every machine. Which of our
questions may train is fixed with them (envs/searchqa/generate.py): no training question asks about
a country that a test question asks about.

searchqa_train, searchqa_test   One hop, bridge, border and three hops, mixed: all that may train,
    and 350 of the others. Comparisons are in neither, as a guess solves half of them.

searchqa_single_train, searchqa_single_test   A curriculum for a laptop: the questions of one hop in
    the two lists above.

searchqa_comparison_test   Comparisons of countries that no list trains on.

searchqa_wiki_test   Published questions, for who has their files: as many of each data set as
    AgentGym-RL's test has, evenly spaced. Which ones it took is not public as a rule, so this is
    our choice. Ids begin with the data set, as AgentGym's do.

    >>> wiki_test()[:2], len(wiki_test())
    (['nq_0', 'nq_72'], 400)

Read next: envs/searchqa/questions.py.
"""

from collections.abc import Sequence
from pathlib import Path

from envs.common import write_id_lists
from envs.searchqa.questions import FIRST_OWN, PUBLISHED, kinds, splits

NUM_TEST = {"one hop": 100, "bridge": 100, "border": 100, "three hops": 50}
NUM_WIKI, NUM_MUSIQUE = 50, 100


def spaced(indices: Sequence[int], count: int) -> list[int]:
    """`count` of them at equal distances.

    >>> spaced(range(10, 20), 3)
    [10, 13, 16]
    """
    return [indices[place * len(indices) // count] for place in range(count)]


def ours(kind: str, split: str) -> list[int]:
    """Our questions of this kind that are for "train" or for "test"."""
    both = enumerate(zip(kinds(), splits(), strict=True), start=FIRST_OWN)
    return [index for index, each in both if each == (kind, split)]


def wiki_test() -> list[str]:
    """Ids of published test questions."""
    tests = [each for each in PUBLISHED if each.file.endswith("_test.jsonl")]
    return [
        f"{each.file.removesuffix('_test.jsonl')}_{index}"
        for each in tests
        for index in spaced(
            range(each.start, each.stop), NUM_MUSIQUE if each.kind == "Musique" else NUM_WIKI
        )
    ]


def write_ids(folder: Path | None = None) -> dict[Path, int]:
    """Writes the six lists; returns how many ids each file holds."""
    train = [index for kind in NUM_TEST for index in ours(kind, "train")]
    test = {kind: spaced(ours(kind, "test"), count) for kind, count in NUM_TEST.items()}
    lists: dict[str, Sequence[int | str]] = {
        "train": train,
        "test": [index for indices in test.values() for index in indices],
        "single_train": ours("one hop", "train"),
        "single_test": test["one hop"],
        "comparison_test": ours("comparison", "test"),
        "wiki_test": wiki_test(),
    }
    return write_id_lists("searchqa", lists, folder)
