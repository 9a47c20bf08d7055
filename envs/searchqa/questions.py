"""Every question that SearchQA can ask, by its number, and which train and which test.

        0 ..  51,712   the test questions of seven data sets, from nq to bamboogle
   51,713 .. 221,327   the training questions of nq and hotpotqa
  221,328 ..           ours, in the order of questions.jsonl

The published ones are files of FlashRAG (https://arxiv.org/abs/2405.13576), as Search-R1 uses them,
that a user puts into the folder SEARCHQA_QUESTIONS_PATH; they are read line by line, not loaded:

    {"id": "test_0", "question": "who got the first nobel prize ...", "golden_answers": [...]}

Ours come with a plan, the searches that lead to the answer. A step's passage must show one of its
`finds`, the form in which the corpus has it; the last step's is the first golden answer where the
file names none. (A comparison's answer is a name, but its two steps must show the figures.)

    {"kind": "bridge", "split": "train", "question": "What is the currency of the country whose
     capital is Nairobi?", "golden_answers": ["Kenyan shillings", "Kenyan shilling", ...], "plan":
     [{"queries": ["capital name Nairobi", ...], "finds": ["Kenya"]}, {"queries": [...]}]}

How ours were made: a program (commit e80bf8e, envs/searchqa/generate.py) read facts out of the
World Factbook and asked for them in one to three steps, or compared two figures. A question was
kept if it has one reading, its answer does not stand in it, no passage that shows the bridge holds
the answer too, and for each step a query's first three passages by BM25 show what it looks for. No
answer belongs to many questions. Countries are for training or for testing (three in ten).

Id lists of ids/, written by `python -m envs.searchqa --write-ids`:

    train, test                 one hop, bridge, border and three hops, mixed; 350 of test. Without
                                comparisons, as a guess solves half of them
    single_train, single_test   the questions of one hop in those, a curriculum for a laptop
    comparison_test             comparisons of countries that no list trains on
    wiki_test                   published questions, evenly spaced: as many of each data set as
                                AgentGym-RL's test has. Which ones it took is not public
"""

import json
import os
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from envs.common import write_id_lists
from envs.searchqa.corpus import CorpusError, Lines

FOLDER_VARIABLE = "SEARCHQA_QUESTIONS_PATH"
OWN_FILE = Path(__file__).with_name("questions.jsonl")
KINDS = ("one hop", "bridge", "border", "three hops", "comparison")


class Published(NamedTuple):
    """A data set's numbers, `start` <= number < `stop`, and the file that holds its questions."""

    kind: str  # as reporting/leaderboard.py has it
    start: int
    stop: int
    file: str


PUBLISHED = (
    Published("NQ", 0, 3_610, "nq_test.jsonl"),
    Published("TriviaQA", 3_610, 14_923, "triviaqa_test.jsonl"),
    Published("PopQA", 14_923, 29_190, "popqa_test.jsonl"),
    Published("HotpotQA", 29_190, 36_595, "hotpotqa_test.jsonl"),
    Published("2WikiMultihopQA", 36_595, 49_171, "2wikimultihopqa_test.jsonl"),
    Published("Musique", 49_171, 51_588, "musique_test.jsonl"),
    Published("Bamboogle", 51_588, 51_713, "bamboogle_test.jsonl"),
    Published("NQ", 51_713, 130_881, "nq_train.jsonl"),
    Published("HotpotQA", 130_881, 221_328, "hotpotqa_train.jsonl"),
)
FIRST_OWN = PUBLISHED[-1].stop


class Step(NamedTuple):
    """One search of a plan."""

    queries: tuple[str, ...]  # the best first; the others say the same in other words
    finds: tuple[str, ...]  # its passage shows one of these


@dataclass(frozen=True)
class Question:
    question: str
    golden_answers: tuple[str, ...]  # the corpus's form first
    kind: str  # one of KINDS, or a published data set
    plan: tuple[Step, ...] = ()  # none for published ones


def num_questions() -> int:
    """Published ones count, whether their files are here or not."""
    return FIRST_OWN + len(kinds())


def find_question(index: int) -> Question:
    """Any question by its number; LookupError for a published one that is not here."""
    return published(index) if index < FIRST_OWN else own_questions()[index - FIRST_OWN]


def kind_of(index: int) -> str:
    """The sub-task of a number, without reading its question."""
    return data_set_of(index).kind if index < FIRST_OWN else kinds()[index - FIRST_OWN]


def data_set_of(index: int) -> Published:
    """
    >>> [data_set_of(index).file for index in (3609, 3610, 221_327)]
    ['nq_test.jsonl', 'triviaqa_test.jsonl', 'hotpotqa_train.jsonl']
    """
    if not 0 <= index < FIRST_OWN:
        raise IndexError(f"{index} is no published question; they are 0 .. {FIRST_OWN - 1}")
    return PUBLISHED[bisect_right(PUBLISHED, index, key=lambda data_set: data_set.start) - 1]


@cache
def own_questions() -> tuple[Question, ...]:
    """All of questions.jsonl, in order."""
    return tuple(_own(json.loads(line)) for line in _own_lines())


def kinds() -> tuple[str, ...]:
    """The kind of each of ours."""
    return _opening(0)


def splits() -> tuple[str, ...]:
    """Of each of ours, "train" or "test"."""
    return _opening(1)


@cache
def _opening(place: int) -> tuple[str, ...]:
    # Each line opens {"kind": "bridge", "split": "train", ...: what lists ask for, without parsing.
    return tuple(line.split('"', 8)[3 + 4 * place] for line in _own_lines())


def _own_lines() -> list[str]:
    # Not splitlines(): an answer may hold a character that Unicode calls a line's end.
    return OWN_FILE.read_text(encoding="utf-8").rstrip("\n").split("\n")


def _own(entry: dict[str, Any]) -> Question:
    golden = tuple(entry["golden_answers"])
    plan = tuple(
        Step(tuple(step["queries"]), tuple(step.get("finds", golden[:1]))) for step in entry["plan"]
    )
    return Question(entry["question"], golden, entry["kind"], plan)


def published(index: int) -> Question:
    """A question of a published data set, from its file."""
    data_set = data_set_of(index)
    folder = os.environ.get(FOLDER_VARIABLE)
    if not folder:
        raise LookupError(
            f"question {index} is of {data_set.file}: set {FOLDER_VARIABLE} to the folder with it"
        )
    path = Path(folder) / data_set.file
    if not path.is_file():
        raise LookupError(f"question {index} is of {path}, which is not there ({FOLDER_VARIABLE})")
    state = path.stat()
    lines = _open_lines(path, state.st_size, state.st_mtime_ns)
    number, size = index - data_set.start, data_set.stop - data_set.start
    if len(lines) > size:
        raise LookupError(
            f"{path} ({FOLDER_VARIABLE}) has {len(lines)} lines, its data set {size} "
            "questions: it is another split"
        )
    if number >= len(lines):
        raise LookupError(
            f"question {index} is line {number + 1} of {path} ({FOLDER_VARIABLE}), "
            f"which has {len(lines)}"
        )
    return _published(lines.read(number), data_set.kind, lambda what: lines.error(number, what))


@cache
def _open_lines(path: Path, size: int, changed_ns: int) -> Lines:
    """`size` and `changed_ns` have a file read anew that was replaced."""
    return Lines(path)


def _published(entry: dict[str, Any], kind: str, error: Callable[[str], CorpusError]) -> Question:
    question, golden = entry.get("question"), entry.get("golden_answers")
    if not isinstance(question, str) or not question.strip():
        raise error('no text under "question"')
    golden = [golden] if isinstance(golden, str) else golden
    if not isinstance(golden, list) or not golden or not all(isinstance(a, str) for a in golden):
        raise error('no list of texts under "golden_answers"')
    question = question.strip()
    return Question(question if question.endswith("?") else f"{question}?", tuple(golden), kind)


# Id lists.

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
    """Ids of published test questions.

    >>> wiki_test()[:2], len(wiki_test())
    (['nq_0', 'nq_72'], 400)
    """
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
