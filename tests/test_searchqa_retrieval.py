"""Retrieval: rankings by words, ties; the service, and the retriever that asks one."""

import hashlib
import importlib.util
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from starlette.testclient import TestClient

# Looked for, not imported: it brings numba, beside which vLLM does not start.
if os.environ.get("CI") != "true" and not importlib.util.find_spec("bm25s"):
    pytest.skip("NOT TESTED: make setup ENV=searchqa", allow_module_level=True)

from envs.http import Answer, ConnectionLost, ExchangeTimeout, HttpClient
from envs.searchqa import retrieval
from envs.searchqa.corpus import CorpusError
from envs.searchqa.retrieval import (
    BM25,
    Remote,
    RetrievalError,
    Scored,
    create_app,
    open_retriever,
    top_indices,
    words,
)
from envs.searchqa.text import Passage, contents

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.usefixtures("empty_cache")


class Listed(list):
    """A corpus in a list."""

    @property
    def fingerprint(self):
        return hashlib.sha256(repr(list(self)).encode()).hexdigest()


def corpus_of(*titles_and_texts):
    return Listed(Passage(number, *each) for number, each in enumerate(titles_and_texts))


def random_corpus(num_passages, seed=0, num_words=60):
    """Few different words, so that many passages are equally good."""
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
    lines = ({"id": str(passage.number), "contents": contents(passage)} for passage in corpus)
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def numbers(scored):
    return [passage.number for passage, _ in scored]


def slow_scores(corpus, query):
    """BM25 by its formula, a loop over words and passages."""
    bags = [Counter(words(title) * 3 + words(text)) for _, title, text in corpus]
    mean = sum(bag.total() for bag in bags) / len(bags)
    scores = [0.0] * len(bags)
    for word in set(words(query)):
        holding = sum(word in bag for bag in bags)
        idf = math.log(1 + (len(bags) - holding + 0.5) / (holding + 0.5))
        for place, bag in enumerate(bags):
            length = 1.5 * (1 - 0.75 + 0.75 * bag.total() / mean)
            scores[place] += idf * bag[word] / (bag[word] + length)
    return scores


def test_scores_are_those_of_the_formula_with_the_title_three_times():
    corpus = random_corpus(200)
    for query in ("word1", "word2 word3 word4", "word5 nothing word5"):
        scores = [0.0] * len(corpus)
        for passage, score in BM25(corpus).search(query, len(corpus)):
            scores[passage.number] = score
        assert scores == pytest.approx(slow_scores(corpus, query), abs=1e-5)


def test_best_is_a_stable_sort_of_everything():
    rng = np.random.default_rng(0)
    draws = [rng.integers(0, 4, rng.integers(1, 30)) for _ in range(200)]
    draws += [rng.integers(0, 9_000, 4_000), np.maximum(0, rng.integers(-99, 3, 4_000))]
    for scores in (draw.astype(np.float32) for draw in draws):
        for top_k in (1, 2, 5, 40):
            expected = np.argsort(-scores, kind="stable")[:top_k]
            assert top_indices(scores, top_k).tolist() == expected.tolist()


def test_any_query_gets_passages():
    retriever = BM25(BOOK)
    assert [numbers(retriever.search(q, 1)) for q in ("CAPITAL Kenya?", "Cote")] == [[2], [3]]
    for query in ("", "?!", "zzzzz", "\ud83d"):  # without a known word the first ones
        assert retriever.search(query, 2) == [Scored(BOOK[0], 0.0), Scored(BOOK[1], 0.0)]
    assert len(retriever.search("zzzzz", 99)) == len(BOOK)
    retriever = BM25(random_corpus(2000, num_words=400))
    query = " ".join(f"word{number % 400}" for number in range(14_000))  # 100 kB
    first = " ".join(f"word{number}" for number in range(retrieval.MAX_QUERY_WORDS))
    assert retriever.search(query, 3) == retriever.search(first, 3)


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


def test_the_service_answers_in_search_r1s_format_or_says_what_was_wrong(monkeypatch):
    client = TestClient(create_app(BM25(BOOK)))
    body = {"queries": ["currency of Kenya", "Nairobi"], "topk": 2, "return_scores": True}
    first, second = client.post("/retrieve", json=body).json()["result"]
    document = {"id": "0", "contents": '"Kenya - Economy"\nCurrency: Kenyan shilling (KES)'}
    assert first[0]["document"] == document
    assert first[0]["score"] > first[1]["score"] > 0
    assert second[0]["document"]["id"] == "2"
    body["return_scores"] = False
    assert client.post("/retrieve", json=body).json()["result"][0][0] == document
    found = client.post("/retrieve", json={"queries": ["Kenya"]}).json()["result"]
    assert [len(each) for each in found] == [3]  # as many as Search-R1 asks for
    assert client.get("/").json() == {"retriever": "BM25", "passages": 5}
    for content, said in ((b"not json", "JSON"), (b'{"queries": [1]}', "queries.0")):
        answer = client.post("/retrieve", content=content)
        assert answer.status_code == 422 and said in answer.json()["error"]
    broken = CorpusError("wiki.jsonl, line 7: not JSON")
    monkeypatch.setattr(BM25, "search", Mock(side_effect=broken))
    answer = client.post("/retrieve", json=body)
    assert (answer.status_code, answer.json()["error"]) == (500, str(broken))


@pytest.fixture
def service(monkeypatch):
    """In the place of HTTP exchanges; `side_effect` holds the answers."""
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


def test_remote_asks_and_reads_search_r1s_format(service):
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
    ("answer", "said"),
    [
        (Answer(200, {}, b"<html>hello</html>"), "not in Search-R1's"),
        (reply(200, {"result": [[{"document": None}, {}]]}), "not in Search-R1's"),
        (reply(200, {"result": [[SCORED] * 2] * 2}), "not in Search-R1's"),
        (reply(200, {"result": [[SCORED]]}), "expected 2 passages, got 1"),
        (Answer(422, {}, b"x\ny"), "HTTP 422: x y"),
        (ExchangeTimeout("no answer within 25 s"), "no answer within 25 s"),
    ],
)
def test_an_answer_that_is_none_is_refused_at_once_in_one_line(service, answer, said):
    service.side_effect = [answer]
    with pytest.raises(RetrievalError) as caught:
        Remote(URL).search("query", 2)
    message = str(caught.value)
    assert said in message and URL in message and "\n" not in message


def test_a_lost_connection_and_a_5xx_are_repeated_so_many_times(service):
    service.side_effect = [ConnectionLost("refused"), reply(503, "loading"), GOOD]
    assert len(Remote(URL).search("Nairobi", 2)) == 2
    service.side_effect = [ConnectionLost("refused")] * 4
    with pytest.raises(RetrievalError, match="refused"):
        Remote(URL).search("Nairobi", 2)


def test_env_servers_search_through_a_service_that_sigterm_ends(tmp_path):
    corpus = random_corpus(300)
    path = write_corpus(tmp_path / "wiki.jsonl", corpus)
    queries = [f"word{number} word{number + 1}" for number in range(60)]
    command = [sys.executable, "-m", "envs.searchqa.retrieval", "--port", "0"]
    settings = os.environ | {"SEARCHQA_CORPUS_PATH": str(path)}
    with subprocess.Popen(command, cwd=ROOT, env=settings, text=True, stdout=-1) as process:
        try:
            line = process.stdout.readline()
            match = re.match(r"listening on (http://\S+) \(retriever BM25\)", line)
            remote, local = Remote(match[1]), BM25(corpus)
            with ThreadPoolExecutor(12) as pool:  # one retriever, the sessions of an env server
                answers = list(pool.map(lambda query: remote.search(query, 3), queries))
            for query, answer in zip(queries, answers):
                expected = [(each.passage.text, each.score) for each in local.search(query, 3)]
                assert [(each.passage.text, each.score) for each in answer] == expected
            remote._http.close()
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        finally:
            process.kill()


def test_a_service_that_cannot_be_says_why_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(signal, "signal", Mock())
    monkeypatch.setenv("SEARCHQA_CORPUS_PATH", str(tmp_path / "none"))
    assert retrieval.main(["--port", "0"]) == 1
    wrote = capsys.readouterr().err
    assert f"No such file or directory: '{tmp_path / 'none'}'" in wrote and wrote.count("\n") == 1
