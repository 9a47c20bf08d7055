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

Id lists of ids/, made once by write_ids() of commit 7b8c4ed:

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
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from envs.searchqa.corpus import Lines

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
    split: str = "test"  # "train" or "test", of ours


def num_questions() -> int:
    """Published ones count, whether their files are here or not."""
    return FIRST_OWN + len(own_questions())


def find_question(index: int) -> Question:
    """Any question by its number; LookupError for a published one that is not here."""
    return published(index) if index < FIRST_OWN else own_questions()[index - FIRST_OWN]


def kind_of(index: int) -> str:
    """The sub-task of a number, without reading a published question."""
    if index < FIRST_OWN:
        return data_set_of(index).kind
    return own_questions()[index - FIRST_OWN].kind


@cache
def own_questions() -> tuple[Question, ...]:
    """All of questions.jsonl, in order."""
    # Not splitlines(): an answer may hold a character that Unicode calls a line's end.
    lines = OWN_FILE.read_text(encoding="utf-8").rstrip("\n").split("\n")
    return tuple(_own(json.loads(line)) for line in lines)


def _own(entry: dict[str, Any]) -> Question:
    golden = tuple(entry["golden_answers"])
    plan = tuple(
        Step(tuple(step["queries"]), tuple(step.get("finds", golden[:1]))) for step in entry["plan"]
    )
    return Question(entry["question"], golden, entry["kind"], plan, entry["split"])


def data_set_of(index: int) -> Published:
    """
    >>> [data_set_of(index).file for index in (3609, 3610, 221_327)]
    ['nq_test.jsonl', 'triviaqa_test.jsonl', 'hotpotqa_train.jsonl']
    """
    return PUBLISHED[bisect_right(PUBLISHED, index, key=lambda data_set: data_set.start) - 1]


open_lines = cache(Lines)


def published(index: int) -> Question:
    """A question of a published data set, from its file."""
    data_set = data_set_of(index)
    folder = os.environ.get(FOLDER_VARIABLE)
    path = Path(folder or "", data_set.file)
    if not folder or not path.is_file():
        raise LookupError(
            f"question {index} is of {path}, which is not there; {FOLDER_VARIABLE} names the folder"
        )
    lines = open_lines(path)
    number, size = index - data_set.start, data_set.stop - data_set.start
    if len(lines) > size:
        raise LookupError(
            f"{path} ({FOLDER_VARIABLE}) has {len(lines)} lines, its data set {size} "
            "questions: it is another split"
        )
    entry = lines.read(number)
    question, golden = entry.get("question"), entry.get("golden_answers")
    golden = [golden] if isinstance(golden, str) else golden
    if not isinstance(question, str) or not isinstance(golden, list) or not golden:
        raise lines.error(number, 'no text "question" or no list "golden_answers"')
    question = question.strip().removesuffix("?") + "?"
    return Question(question, tuple(map(str, golden)), data_set.kind)
