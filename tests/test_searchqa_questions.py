"""SearchQA's questions: ours and what they promise, and the published files."""

import json
from collections import Counter
from pathlib import Path

import pytest

from envs.searchqa.corpus import CorpusError
from envs.searchqa.questions import (
    FIRST_OWN,
    KINDS,
    OWN_FILE,
    PUBLISHED,
    Question,
    find_question,
    kind_of,
    kinds,
    num_questions,
    own_questions,
    published,
    splits,
)
from envs.searchqa.text import normalize

ROOT = Path(__file__).resolve().parents[1]


def within(answer, text):
    return f" {normalize(answer)} " in f" {normalize(text)} "


def test_there_are_as_many_of_each_kind_as_promised():
    counts = Counter(kinds())
    assert set(counts) == set(KINDS)
    assert counts["one hop"] >= 2000
    assert counts["bridge"] + counts["border"] >= 3000
    assert counts["three hops"] >= 200
    assert OWN_FILE.stat().st_size < 2_000_000
    for kind in KINDS:
        tests = sum(split == "test" for split, each in zip(splits(), kinds()) if each == kind)
        assert 0.25 < tests / counts[kind] < 0.35


def test_kinds_and_splits_are_read_without_parsing_and_are_those_of_the_lines():
    entries = [json.loads(line) for line in OWN_FILE.read_text("utf-8").rstrip("\n").split("\n")]
    assert kinds() == tuple(entry["kind"] for entry in entries)
    assert splits() == tuple(entry["split"] for entry in entries)
    assert [question.question for question in own_questions()] == [e["question"] for e in entries]
    assert len(own_questions()) == len(kinds()) == num_questions() - FIRST_OWN


def test_every_question_is_one_of_its_own_and_well_formed():
    questions = own_questions()
    assert len({question.question for question in questions}) == len(questions)
    for each in questions:
        assert each.question.endswith("?")
        assert each.question[0].isupper()
        assert "  " not in each.question
        assert len({normalize(answer) for answer in each.golden_answers}) == len(
            each.golden_answers
        ), each
        assert all(normalize(answer) for answer in each.golden_answers)
        assert not set("<>;") & set("".join((each.question, *each.golden_answers))), each


def test_plans_have_a_step_for_each_hop_and_end_with_the_answer():
    hops = {"one hop": 1, "bridge": 2, "border": 2, "three hops": 3, "comparison": 2}
    for each in own_questions():
        assert len(each.plan) == hops[each.kind]
        assert all(step.queries and step.finds for step in each.plan)
        if each.kind == "comparison":
            assert all(step.finds[0][0].isdigit() for step in each.plan)
        else:
            assert each.plan[-1].finds == each.golden_answers[:1]


def test_no_answer_stands_in_its_question():
    for each in own_questions():
        if each.kind != "comparison":
            told = [a for a in each.golden_answers if within(a, each.question.replace("?", ""))]
            assert not told, each


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SEARCHQA_QUESTIONS_PATH", str(tmp_path / "data"))
    monkeypatch.setenv("AGENT_RL_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    for data_set in PUBLISHED:
        lines = [
            json.dumps(
                {"id": f"x_{n}", "question": f"{data_set.file} {n} ", "golden_answers": ["a"]}
            )
            for n in range(data_set.stop - data_set.start)
        ]
        if data_set.stop - data_set.start > 20_000:
            lines = lines[:3]
        (tmp_path / "data" / data_set.file).write_text("\n".join(lines) + "\n")
    return tmp_path / "data"


def test_the_first_of_ours_follows_the_last_published_one(folder):
    assert find_question(FIRST_OWN) == own_questions()[0]
    assert kind_of(FIRST_OWN) == "one hop"
    assert kind_of(num_questions() - 1) == "comparison"
    assert find_question(2).question == "nq_test.jsonl 2?"
    for index in (-1, FIRST_OWN):
        with pytest.raises(IndexError, match="no published question"):
            published(index)
    with pytest.raises(IndexError):
        find_question(num_questions())


def test_a_missing_file_names_the_variable_and_the_file(folder, monkeypatch):
    (folder / "popqa_test.jsonl").unlink()
    with pytest.raises(
        LookupError, match=r"popqa_test\.jsonl, which is not there \(SEARCHQA_QUEST"
    ):
        published(15_000)
    monkeypatch.delenv("SEARCHQA_QUESTIONS_PATH")
    with pytest.raises(LookupError, match=r"hotpotqa_train\.jsonl: set SEARCHQA_QUESTIONS_PATH"):
        published(200_000)


def test_a_replaced_file_is_read_anew(folder):
    assert published(51_588).golden_answers == ("a",)
    line = {"question": "new?", "golden_answers": "one text"}
    (folder / "bamboogle_test.jsonl").write_text(json.dumps(line))
    assert published(51_588) == Question("new?", ("one text",), "Bamboogle", ())
    with pytest.raises(LookupError, match="line 2 of .*bamboogle_test.jsonl .*which has 1"):
        published(51_589)


def test_a_file_of_another_split_is_refused(folder):
    """Its lines would be served as questions of the test."""
    line = json.dumps({"question": "q?", "golden_answers": ["a"]}) + "\n"
    (folder / "bamboogle_test.jsonl").write_text(line * 126)
    with pytest.raises(LookupError, match="has 126 lines, its data set 125 questions: it is ano"):
        published(51_588)


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("{", "no JSON"),
        ('{"golden_answers": ["a"]}', 'no text under "question"'),
        ('{"question": " ", "golden_answers": ["a"]}', 'no text under "question"'),
        ('{"question": "q", "golden_answers": []}', 'no list of texts under "golden_answers"'),
        ('{"question": "q", "golden_answers": [1]}', 'no list of texts under "golden_answers"'),
        ('{"question": "q"}', 'no list of texts under "golden_answers"'),
    ],
)
def test_a_broken_question_is_named_by_its_line(folder, line, what):
    (folder / "musique_test.jsonl").write_text(line)
    with pytest.raises(CorpusError, match=f"musique_test.jsonl, line 1: {what}"):
        published(49_171)
