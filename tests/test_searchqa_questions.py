"""SearchQA's questions: ours and what they promise, and the published files."""

import json
from collections import Counter

import pytest

from envs.searchqa.corpus import CorpusError
from envs.searchqa.questions import (
    FIRST_OWN,
    PUBLISHED,
    Question,
    find_question,
    kind_of,
    num_questions,
    own_questions,
    published,
)
from envs.searchqa.text import normalize


def within(answer, text):
    return f" {normalize(answer)} " in f" {normalize(text)} "


def test_there_are_as_many_of_each_kind_as_promised_and_three_in_ten_for_testing():
    counts = Counter(each.kind for each in own_questions())
    assert counts["one hop"] >= 2000
    assert counts["bridge"] + counts["border"] >= 3000
    assert counts["three hops"] >= 200
    tests = Counter(each.kind for each in own_questions() if each.split == "test")
    assert all(0.25 < tests[kind] / counts[kind] < 0.35 for kind in counts)


def test_every_question_is_one_of_its_own_and_its_answer_does_not_stand_in_it():
    questions = own_questions()
    assert len({question.question for question in questions}) == len(questions)
    for each in questions:
        assert each.question.endswith("?") and "  " not in each.question
        golden = [normalize(answer) for answer in each.golden_answers]
        assert all(golden) and len(set(golden)) == len(golden), each
        if each.kind != "comparison":
            told = [a for a in each.golden_answers if within(a, each.question.replace("?", ""))]
            assert not told, each


def test_plans_have_a_step_for_each_hop_and_end_with_the_answer():
    hops = {"one hop": 1, "bridge": 2, "border": 2, "three hops": 3, "comparison": 2}
    for each in own_questions():
        assert len(each.plan) == hops[each.kind]
        assert all(step.queries and step.finds for step in each.plan)
        if each.kind == "comparison":
            assert all(step.finds[0][0].isdigit() for step in each.plan)
        else:
            assert each.plan[-1].finds == each.golden_answers[:1]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where published files are looked for; a cache of its own."""
    monkeypatch.setenv("SEARCHQA_QUESTIONS_PATH", str(tmp_path))
    monkeypatch.setenv("AGENT_RL_CACHE", str(tmp_path / "cache"))
    return tmp_path


def write(folder, name, num_lines):
    entries = ({"question": f"{name} {n} ", "golden_answers": ["a"]} for n in range(num_lines))
    (folder / name).write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))


def test_each_number_is_a_line_of_its_data_sets_file_and_ours_follow_the_last(folder):
    for data_set in PUBLISHED:
        write(folder, data_set.file, 3)
        for number in range(3):
            expected = Question(f"{data_set.file} {number}?", ("a",), data_set.kind)
            assert find_question(data_set.start + number) == expected
        with pytest.raises(LookupError, match=f"{data_set.file} has no line 4, it has 3"):
            find_question(data_set.start + 3)
    assert find_question(FIRST_OWN) == own_questions()[0]
    assert kind_of(FIRST_OWN) == "one hop" and kind_of(num_questions() - 1) == "comparison"


def test_a_missing_file_names_the_variable_and_the_file(folder, monkeypatch):
    said = r"popqa_test\.jsonl, which is not there; SEARCHQA_QUESTIONS_PATH names the folder"
    for _ in range(2):
        with pytest.raises(LookupError, match=said):
            published(15_000)
        monkeypatch.delenv("SEARCHQA_QUESTIONS_PATH", raising=False)


def test_a_file_of_another_split_is_refused(folder):
    """Its lines would be served as questions of the test."""
    write(folder, "bamboogle_test.jsonl", 126)
    with pytest.raises(LookupError, match="has 126 lines, its data set 125 questions: it is ano"):
        published(51_588)


@pytest.mark.parametrize(
    "line",
    [
        "{",
        '{"golden_answers": ["a"]}',
        '{"question": "q"}',
        '{"question": "q", "golden_answers": []}',
    ],
)
def test_a_broken_question_is_named_by_its_line(folder, line):
    (folder / "musique_test.jsonl").write_text(line)
    with pytest.raises(CorpusError, match="musique_test.jsonl, line 1: no "):
        published(49_171)
