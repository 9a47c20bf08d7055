"""Retrieval: BM25 scores and ties, and the retriever that uses a service."""

import hashlib
import importlib.util
import json
import math
import os
import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from unittest.mock import Mock

import numpy as np
import pytest

# Not imported: it imports numba, and vLLM does not start in a process with numba.
if os.environ.get("CI") != "true" and not importlib.util.find_spec("bm25s"):
    pytest.skip("NOT TESTED: make setup ENV=searchqa", allow_module_level=True)

from envs.http import Answer, ConnectionLost, ExchangeTimeout, HttpClient
from envs.searchqa import retrieval
from envs.searchqa.retrieval import (
    BM25,
    Remote,
    RetrievalError,
    Scored,
    open_retriever,
    top_indices,
    words,
)
from envs.searchqa.text import Passage

pytestmark = pytest.mark.usefixtures("empty_cache")


class ListCorpus(list):
    """A corpus in a list."""

    @property
    def fingerprint(self):
        return hashlib.sha256(repr(list(self)).encode()).hexdigest()


def corpus_of(*titles_and_texts):
    return ListCorpus(Passage(number, *entry) for number, entry in enumerate(titles_and_texts))


def random_corpus(num_passages, seed=0, num_words=60):
    """A corpus of few different words, in which many passages have equal scores."""
    rng = random.Random(seed)
    lexicon = [f"word{number}" for number in range(num_words)]
    return corpus_of(
        *(
            (rng.choice(lexicon), " ".join(rng.choices(lexicon, k=rng.randrange(4))))
            for _ in range(num_passages)
        )
    )


BOOK = corpus_of(
    ("Kenya - Economy", "Currency: Kenyan shilling (KES)"),
    ("Norway - Economy", "Currency: Norwegian krone"),
    ("Kenya - Government", "Capital: Nairobi"),
    ("Côte d'Ivoire - Government", "Capital: Yamoussoukro"),
    ("Nauru", "It is an island whose flag has a star"),
)


def write_corpus(path, corpus):
    lines = ({"contents": f'"{passage.title}"\n{passage.text}'} for passage in corpus)
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def numbers(scored):
    return [passage.number for passage, _ in scored]


def slow_scores(corpus, query):
    """BM25 from its formula, as a loop over words and passages."""
    word_counts = [Counter(words(title) * 3 + words(text)) for _, title, text in corpus]
    mean = sum(counts.total() for counts in word_counts) / len(word_counts)
    scores = [0.0] * len(word_counts)
    for word in set(words(query)):
        num_passages = sum(word in counts for counts in word_counts)
        idf = math.log(1 + (len(word_counts) - num_passages + 0.5) / (num_passages + 0.5))
        for index, counts in enumerate(word_counts):
            length = 1.5 * (1 - 0.75 + 0.75 * counts.total() / mean)
            scores[index] += idf * counts[word] / (counts[word] + length)
    return scores


def test_scores_follow_the_formula_with_three_times_the_title():
    corpus = random_corpus(200)
    for query in ("word1", "word2 word3 word4", "word5 nothing word5"):
        scores = [0.0] * len(corpus)
        for passage, score in BM25(corpus).search(query, len(corpus)):
            scores[passage.number] = score
        assert scores == pytest.approx(slow_scores(corpus, query), abs=1e-5)


def test_top_indices_equal_those_of_a_stable_sort():
    rng = np.random.default_rng(0)
    arrays = [rng.integers(0, 4, rng.integers(1, 30)) for _ in range(200)]
    arrays += [rng.integers(0, 9_000, 4_000), np.maximum(0, rng.integers(-99, 3, 4_000))]
    for scores in (array.astype(np.float32) for array in arrays):
        for top_k in (1, 2, 5, 40):
            expected = np.argsort(-scores, kind="stable")[:top_k]
            assert top_indices(scores, top_k).tolist() == expected.tolist()


def test_any_query_gets_passages():
    retriever = BM25(BOOK)
    assert [numbers(retriever.search(q, 1)) for q in ("CAPITAL Kenya?", "Cote")] == [[2], [3]]
    for query in ("", "?!", "zzzzz", "\ud83d"):  # no known word: the first passages
        assert retriever.search(query, 2) == [Scored(BOOK[0], 0.0), Scored(BOOK[1], 0.0)]
    assert len(retriever.search("zzzzz", 99)) == len(BOOK)
    retriever = BM25(random_corpus(2000, num_words=400))
    query = " ".join(f"word{number % 400}" for number in range(14_000))  # 100 kB
    known_words = " ".join(f"word{number}" for number in range(retrieval.MAX_QUERY_WORDS))
    assert retriever.search(query, 3) == retriever.search(known_words, 3)


def test_the_threads_of_a_server_can_share_an_index():
    index, queries = BM25(random_corpus(300)), [f"word{n} word{n + 1}" for n in range(60)]
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(lambda query: index.search(query, 3), queries))
    assert answers == [index.search(query, 3) for query in queries]


def test_the_environment_variables_choose_the_retriever(tmp_path, monkeypatch):
    path = write_corpus(tmp_path / "wiki.jsonl", BOOK)
    monkeypatch.setenv("SEARCHQA_CORPUS_PATH", str(path))
    assert numbers(open_retriever().search("Nairobi", 1)) == [2]
    monkeypatch.setenv("SEARCHQA_RETRIEVAL_URL", "http://127.0.0.1:9/retrieve")
    assert isinstance(open_retriever(), Remote)
    monkeypatch.setenv("SEARCHQA_RETRIEVAL_METHOD", "bm25")
    assert isinstance(open_retriever(), BM25)
    monkeypatch.setenv("SEARCHQA_RETRIEVAL_METHOD", "dense")
    with pytest.raises(RetrievalError, match="is 'dense'; choose bm25, .*Search-R1's own service"):
        open_retriever()


@pytest.fixture
def service(monkeypatch):
    """A mock of HTTP exchanges; its `side_effect` holds the answers."""
    service = Mock()
    monkeypatch.setattr(HttpClient, "ask", service)
    monkeypatch.setattr(Remote, "PAUSES_S", (0.01, 0.01, 0.01))
    return service


def reply(status, content):
    return Answer(status, {}, json.dumps(content).encode())


URL = "http://127.0.0.1:9"
DOCUMENT = {"id": "2", "contents": '"Kenya"\nA republic'}
SCORED = {"document": DOCUMENT, "score": 1.5}
GOOD = reply(200, {"result": [[SCORED, DOCUMENT, {"id": "doc-7", "contents": "no title"}]]})


def test_remote_sends_and_reads_search_r1s_format(service):
    service.side_effect = [GOOD]
    assert Remote(f"{URL}/retrieve").search("Nairobi", 3) == [
        Scored(Passage(-1, "Kenya", "A republic"), 1.5),
        Scored(Passage(-1, "Kenya", "A republic"), 0.0),
        Scored(Passage(-1, "", "no title"), 0.0),
    ]
    method, path, body, *_ = service.call_args.args
    assert (method, path) == ("POST", "/retrieve")
    assert json.loads(body) == {"queries": ["Nairobi"], "topk": 3, "return_scores": True}


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (Answer(200, {}, b"<html>hello</html>"), "not in Search-R1's"),
        (reply(200, {"result": [[{"document": None}, {}]]}), "not in Search-R1's"),
        (reply(200, {"result": [[SCORED] * 2] * 2}), "not in Search-R1's"),
        (reply(200, {"result": [[SCORED]]}), "expected 2 passages, got 1"),
        (Answer(422, {}, b"x\ny"), "HTTP 422: x y"),
        (ExchangeTimeout("no answer within 25 s"), "no answer within 25 s"),
    ],
)
def test_an_unusable_answer_is_a_one_line_error_without_retries(service, answer, message):
    service.side_effect = [answer]
    with pytest.raises(RetrievalError) as error:
        Remote(URL).search("query", 2)
    text = str(error.value)
    assert message in text and URL in text and "\n" not in text


def test_a_lost_connection_and_a_5xx_are_retried_a_few_times(service):
    service.side_effect = [ConnectionLost("refused"), reply(503, "loading"), GOOD]
    assert len(Remote(URL).search("Nairobi", 2)) == 2
    service.side_effect = [ConnectionLost("refused")] * 4
    with pytest.raises(RetrievalError, match="refused"):
        Remote(URL).search("Nairobi", 2)
