"""Retrieval: rankings by words, ties, the cache; the service, and the retriever that asks one."""

import contextlib
import hashlib
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from starlette.testclient import TestClient

if os.environ.get("CI") != "true":
    pytest.importorskip("bm25s", reason="NOT TESTED: make setup ENV=searchqa")

from envs.searchqa import retrieval
from envs.searchqa.retrieval import (
    BM25,
    Remote,
    RetrievalError,
    Scored,
    best,
    create_app,
    open_retriever,
    words,
)
from envs.searchqa.text import Passage, contents

ROOT = Path(__file__).resolve().parents[1]
pytestmark = pytest.mark.usefixtures("own_cache")


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


# -------------------------------------------------------------------------------------------- BM25


@pytest.mark.parametrize(
    ("query", "number"),
    [
        ("currency of Kenya", 0),
        ("CAPITAL Kenya?", 2),
        ("capital of Cote d'Ivoire", 3),
        ("flag", 4),
    ],
)
def test_the_passage_that_shares_rare_words_comes_first(query, number):
    assert numbers(BM25(BOOK).search(query, 1)) == [number]


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
            assert best(scores, top_k).tolist() == expected.tolist()


@pytest.mark.parametrize("query", ["", "?!", "zzzzz", "\ud83d", "日本"])
def test_a_query_without_a_known_word_gets_the_first_passages(query):
    assert BM25(BOOK).search(query, 2) == [Scored(BOOK[0], 0.0), Scored(BOOK[1], 0.0)]
    assert len(BM25(BOOK).search(query, 99)) == len(BOOK)


def test_a_query_of_100_kb_counts_so_many_words():
    retriever = BM25(random_corpus(2000, num_words=400))
    query = " ".join(f"word{number % 400}" for number in range(14_000))
    first = " ".join(f"word{number}" for number in range(retrieval.MAX_QUERY_WORDS))
    assert retriever.search(query, 3) == retriever.search(first, 3)
    started = time.monotonic()
    retriever.search("e\u0301" * 500_000, 3)  # accents are taken off its beginning alone
    assert time.monotonic() - started < 5


# ------------------------------------------------------------------------------------------ which


def test_the_environment_variables_choose_the_retriever(tmp_path, monkeypatch):
    path = write_corpus(tmp_path / "wiki.jsonl", BOOK)
    monkeypatch.setenv("SEARCHQA_CORPUS_PATH", str(path))
    assert numbers(open_retriever().search("Nairobi", 1)) == [2]
    monkeypatch.setenv("SEARCHQA_RETRIEVAL_METHOD", "remote")
    with pytest.raises(RetrievalError, match="remote with a SEARCHQA_RETRIEVAL_URL"):
        open_retriever()
    monkeypatch.setenv("SEARCHQA_RETRIEVAL_URL", "http://127.0.0.1:9/retrieve")
    assert isinstance(open_retriever(), Remote)
    monkeypatch.delenv("SEARCHQA_RETRIEVAL_METHOD")
    assert isinstance(open_retriever(), Remote)
    monkeypatch.setenv("SEARCHQA_RETRIEVAL_METHOD", "bm25")
    assert isinstance(open_retriever(), BM25)
    monkeypatch.setenv("SEARCHQA_RETRIEVAL_METHOD", "dense")
    with pytest.raises(RetrievalError, match="is 'dense'; choose bm25, .*Search-R1's own"):
        open_retriever()


# -------------------------------------------------------------------------------- the service


@pytest.fixture
def client():
    return TestClient(create_app(BM25(BOOK)))


def test_the_service_answers_in_search_r1s_format(client):
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
    assert client.post("/retrieve", json={"queries": []}).json() == {"result": []}
    assert client.get("/").json() == {"retriever": "BM25", "passages": 5}


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"not json", "JSON"),
        (b"[]", "Input should be an object"),
        (b"{}", "queries"),
        (b'{"queries": "Kenya"}', "queries"),
        (b'{"queries": [1]}', "queries.0"),
        (b'{"queries": ["a"], "topk": 0}', "topk"),
        (b'{"queries": ["a"], "topk": "3"}', "topk"),
    ],
)
def test_a_bad_request_is_422_with_what_was_wrong(client, body, said):
    answer = client.post("/retrieve", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422
    assert said in answer.json()["error"]
    assert answer.json()["hint"]


def test_a_broken_line_of_the_corpus_is_500_with_its_number(client, monkeypatch):
    def search(query, top_k):
        raise ValueError("wiki.jsonl, line 7: no JSON")

    monkeypatch.setattr(BM25, "search", lambda self, *query: search(*query))
    answer = client.post("/retrieve", json={"queries": ["bad"]})
    assert (answer.status_code, answer.json()["error"]) == (500, "wiki.jsonl, line 7: no JSON")


@contextlib.contextmanager
def scripted(*answers):
    """A server that gives these answers, (status, body) each or None to hang up, the last for ever;
    yields its URL and what it was asked."""
    left, asked = list(answers), []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            asked.append((self.path, json.loads(body)))
            answer = left.pop(0) if len(left) > 1 else left[0]
            if answer is None:
                self.close_connection = True
                return
            status, content = answer
            content = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            with contextlib.suppress(OSError):
                self.wfile.write(content)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def document(number, score=None, **other):
    inner = {"id": str(number), "contents": contents(BOOK[number])} | other
    return inner if score is None else {"document": inner, "score": score}


def unnumbered(number):
    """A passage as a service names it: its line in the corpus is not known."""
    return BOOK[number]._replace(number=-1)


GOOD = (200, {"result": [[document(2, 1.5), document(0, 0.5)]]})


def test_remote_asks_and_reads_search_r1s_format():
    with scripted(GOOD) as (url, asked):
        found = Remote(f"{url}/retrieve").search("Nairobi", 2)
        assert found == [Scored(unnumbered(2), 1.5), Scored(unnumbered(0), 0.5)]
    body = {"queries": ["Nairobi"], "topk": 2, "return_scores": True}
    assert asked == [("/retrieve", body)]


def test_remote_takes_documents_without_titles_scores_and_numbers():
    documents = [{"id": "doc-7", "title": "ignored", "contents": "no title"}, {"contents": ""}]
    with scripted((200, {"result": [documents]})) as (url, _):
        found = Remote(url).search("query", 2)
    assert found == [Scored(Passage(-1, "", "no title"), 0.0), Scored(Passage(-1, "", ""), 0.0)]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((200, b"<html>hello</html>"), "not Search-R1's"),
        ((200, [1]), "not Search-R1's"),
        ((200, {"results": []}), "not Search-R1's"),
        ((200, {"result": ["text"]}), "not Search-R1's"),
        ((200, {"result": [[{"document": None}, {}]]}), "not Search-R1's"),
        ((200, {"result": [[document(0, 0.5, contents=7)] * 2]}), "not Search-R1's"),
        ((200, {"result": [[document(0, "high")] * 2]}), "not Search-R1's"),
        ((200, {"result": [[document(0)] * 2] * 2}), "not Search-R1's"),
        ((200, {"result": [[document(0)]]}), "got 1"),
        ((200, b" " * 300_000), "larger than 200000 bytes"),
        ((422, b"x\ny"), "HTTP 422"),
    ],
)
def test_an_answer_that_is_none_is_refused_at_once_in_one_line(answer, said):
    with scripted(answer) as (url, asked):
        with pytest.raises(RetrievalError) as caught:
            Remote(url, max_bytes=200_000).search("query", 2)
        assert len(asked) == 1
    message = str(caught.value)
    assert said in message and url in message and "SEARCHQA_RETRIEVAL_URL" in message
    assert "\n" not in message and len(message) < 700


def test_a_lost_connection_and_a_5xx_are_repeated(monkeypatch):
    monkeypatch.setattr(Remote, "PAUSES_S", (0.01, 0.01, 0.01))
    with scripted(None, (503, b"loading"), GOOD) as (url, asked):
        assert len(Remote(url).search("Nairobi", 2)) == 2
        assert len(asked) == 3


def test_a_service_that_is_down_is_an_error_within_seconds():
    with scripted(GOOD) as (url, _):
        pass
    with pytest.raises(RetrievalError, match=f"{url} .SEARCHQA_RETRIEVAL_URL.: .*refused"):
        Remote(url, timeout_s=0.5).search("query", 2)
    with scripted((500, {"error": "it broke"})) as (url, asked):
        with pytest.raises(RetrievalError, match="HTTP 500: .*it broke"):
            Remote(url, timeout_s=1.0).search("query", 2)
        assert len(asked) > 1


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
            assert match, line
            remote = Remote(match[1])
            with ThreadPoolExecutor(12) as pool:  # one retriever, the sessions of an env server
                answers = list(pool.map(lambda query: remote.search(query, 3), queries))
            local = BM25(corpus)
            for query, answer in zip(queries, answers):
                expected = local.search(query, 3)
                assert [score for _, score in answer] == [score for _, score in expected]
                assert [each.text for each, _ in answer] == [each.text for each, _ in expected]
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 0
        finally:
            process.kill()


def test_a_service_that_cannot_be_says_why_in_one_line(tmp_path, monkeypatch, capsys):
    path = tmp_path / "wiki.jsonl"
    path.write_text('{"id": "0", "contents": "\\"A\\"\\nfine"}\n{"id": 1\n')
    handler = signal.getsignal(signal.SIGTERM)
    try:
        for corpus, said in (
            (path, f"{path}, line 2: no JSON"),
            (tmp_path / "none", f"No such file or directory: '{tmp_path / 'none'}'"),
        ):
            monkeypatch.setenv("SEARCHQA_CORPUS_PATH", str(corpus))
            assert retrieval.main(["--port", "0"]) == 1
            wrote = capsys.readouterr().err
            assert said in wrote and wrote.count("\n") == 1
        with pytest.raises(SystemExit, match="2"):
            retrieval.main(["--port", "99999"])
        assert "a port is a number" in capsys.readouterr().err
    finally:
        signal.signal(signal.SIGTERM, handler)
