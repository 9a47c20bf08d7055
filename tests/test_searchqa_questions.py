"""SearchQA's questions: their numbers, and the published files."""

import json

import pytest

from envs.searchqa.questions import (
    FIRST_FACTBOOK,
    PUBLISHED,
    Question,
    factbook_questions,
    find_question,
    kind_of,
    num_questions,
    published_question,
)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of the published files, with an empty cache."""
    monkeypatch.setenv("SEARCHQA_QUESTIONS_PATH", str(tmp_path))
    monkeypatch.setenv("AGENT_RL_CACHE", str(tmp_path / "cache"))
    return tmp_path


def write_questions(folder, name, num_lines):
    entries = ({"question": f"{name} {n} ", "golden_answers": ["a"]} for n in range(num_lines))
    (folder / name).write_text("".join(f"{json.dumps(entry)}\n" for entry in entries))


def test_numbers_are_lines_of_the_data_sets_files_followed_by_the_factbook_questions(folder):
    for data_set in PUBLISHED:
        write_questions(folder, data_set.file, 3)
        for number in range(3):
            expected = Question(f"{data_set.file} {number}?", ("a",), data_set.kind)
            assert find_question(data_set.start + number) == expected
        with pytest.raises(LookupError, match=f"{data_set.file} has no line 4; it has 3"):
            find_question(data_set.start + 3)
    assert find_question(FIRST_FACTBOOK) == factbook_questions()[0]
    assert kind_of(FIRST_FACTBOOK) == "one hop" and kind_of(num_questions() - 1) == "comparison"


def test_a_file_of_another_split_is_an_error(folder):
    write_questions(folder, "bamboogle_test.jsonl", 126)
    with pytest.raises(LookupError, match="126 lines, but the data set has 125 questions"):
        published_question(51_588)
