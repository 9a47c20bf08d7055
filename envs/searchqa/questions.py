"""The numbered list of SearchQA's questions: published ones and ours about the World Factbook.

        0 ..  51,712   the test questions of seven data sets, from nq to bamboogle
   51,713 .. 221,327   the training questions of nq and hotpotqa
  221,328 ..           the Factbook questions, in the order of questions.jsonl

The published questions are files from FlashRAG (https://arxiv.org/abs/2405.13576), the same files
that Search-R1 uses. The user puts them into the folder SEARCHQA_QUESTIONS_PATH. A line is read when
it is needed:

    {"id": "test_0", "question": "who got the first nobel prize ...", "golden_answers": [...]}

A Factbook question has a plan: the searches that lead to its answer. For each step, a passage must
show one of the values in `finds`, in the corpus's spelling. If the last step has no `finds`, its
value is the first golden answer. (The answer to a comparison is a name, but its two steps must show
the figures.)

    {"kind": "bridge", "split": "train", "question": "What is the currency of the country whose
     capital is Nairobi?", "golden_answers": ["Kenyan shillings", "Kenyan shilling", ...], "plan":
     [{"queries": ["capital name Nairobi", ...], "finds": ["Kenya"]}, {"queries": [...]}]}

A program wrote the Factbook questions (commit e80bf8e, envs/searchqa/generate.py). It read facts
from the book and made questions that chain one to three facts, or that compare two figures. It kept
a question only if
- it is unambiguous, and its text does not contain its answer;
- no passage that shows the bridge (the intermediate country) also contains the answer;
- at each step, one of BM25's top three passages for one of the step's queries shows the value.
Only a few questions share the same answer. Each country is used either only for training (seven in
ten) or only for testing.

Id lists in ids/, written once by write_ids() at commit 7b8c4ed:

    train, test                 one hop, bridge, border and three hops, mixed; 350 in test. They
                                have no comparisons, because a guess solves half of those
    single_train, single_test   the one-hop questions of these lists, a curriculum for a laptop
    comparison_test             comparisons of countries that are in no training list
    wiki_test                   published questions at regular intervals, as many per data set as in
                                AgentGym-RL's test list, whose selection is not public
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
FACTBOOK_FILE = Path(__file__).with_name("questions.jsonl")
KINDS = ("one hop", "bridge", "border", "three hops", "comparison")


class Published(NamedTuple):
    """A published data set: its question numbers, start <= number < stop, and its file."""

    kind: str  # the name in reporting/leaderboard.py
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
FIRST_FACTBOOK = PUBLISHED[-1].stop


class Step(NamedTuple):
    """One search of a plan."""

    queries: tuple[str, ...]  # the best one first; the others use other words
    finds: tuple[str, ...]  # values; a passage must show one of them


@dataclass(frozen=True)
class Question:
    question: str
    golden_answers: tuple[str, ...]  # the corpus's spelling first
    kind: str  # one of KINDS, or a published data set
    plan: tuple[Step, ...] = ()  # empty for published questions
    split: str = "test"  # "train" or "test"; Factbook questions only


def num_questions() -> int:
    """Number of questions. Published ones count even if their files are missing."""
    return FIRST_FACTBOOK + len(factbook_questions())


def find_question(index: int) -> Question:
    """Any question by its number. LookupError if the file of a published one is missing."""
    if index < FIRST_FACTBOOK:
        return published_question(index)
    return factbook_questions()[index - FIRST_FACTBOOK]


def kind_of(index: int) -> str:
    """The sub-task of a question. Does not read the file of a published question."""
    if index < FIRST_FACTBOOK:
        return data_set_of(index).kind
    return factbook_questions()[index - FIRST_FACTBOOK].kind


@cache
def factbook_questions() -> tuple[Question, ...]:
    """The questions of questions.jsonl, in order."""
    # Not splitlines(): an answer can contain a character that Unicode counts as a line break.
    lines = FACTBOOK_FILE.read_text(encoding="utf-8").rstrip("\n").split("\n")
    return tuple(_factbook_question(json.loads(line)) for line in lines)


def _factbook_question(entry: dict[str, Any]) -> Question:
    golden = tuple(entry["golden_answers"])
    plan = tuple(
        Step(tuple(step["queries"]), tuple(step.get("finds", golden[:1]))) for step in entry["plan"]
    )
    return Question(entry["question"], golden, entry["kind"], plan, entry["split"])


def data_set_of(index: int) -> Published:
    """The data set of a published question.

    >>> [data_set_of(index).file for index in (3609, 3610, 221_327)]
    ['nq_test.jsonl', 'triviaqa_test.jsonl', 'hotpotqa_train.jsonl']
    """
    return PUBLISHED[bisect_right(PUBLISHED, index, key=lambda data_set: data_set.start) - 1]


open_lines = cache(Lines)


def published_question(index: int) -> Question:
    """Read a published question from the file of its data set."""
    data_set = data_set_of(index)
    folder = os.environ.get(FOLDER_VARIABLE)
    path = Path(folder or "", data_set.file)
    if not folder or not path.is_file():
        raise LookupError(
            f"question {index} needs {path}, which does not exist; set {FOLDER_VARIABLE} to the "
            "folder of the question files"
        )
    lines = open_lines(path)
    number, size = index - data_set.start, data_set.stop - data_set.start
    if len(lines) > size:
        raise LookupError(
            f"{path} ({FOLDER_VARIABLE}) has {len(lines)} lines, but the data set has {size} "
            "questions; the file is another split"
        )
    entry = lines.read(number)
    question, golden = entry.get("question"), entry.get("golden_answers")
    golden = [golden] if isinstance(golden, str) else golden
    if not isinstance(question, str) or not isinstance(golden, list) or not golden:
        raise lines.error(number, 'expected a string "question" and a list "golden_answers"')
    question = question.strip().removesuffix("?") + "?"
    return Question(question, tuple(map(str, golden)), data_set.kind)
