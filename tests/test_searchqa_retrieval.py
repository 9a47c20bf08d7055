"""Retrieval: rankings by words, ties, the cache; the service, and the retriever that asks one."""

import contextlib
import hashlib
import json
import math
import os
import random
import re
import shutil
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
from fastapi.testclient import TestClient

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
        ("Yamoussoukro", 3),
        ("flag", 4),
    ],
)
def test_the_passage_that_shares_rare_words_comes_first(bm25s, query, number):
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


def test_scores_are_those_of_the_formula_with_the_title_three_times(bm25s):
    corpus = random_corpus(200)
    for query in ("word1", "word2 word3 word4", "word5 nothing word5"):
        scores = [0.0] * len(corpus)
        for passage, score in BM25(corpus).search(query, len(corpus)):
            scores[passage.number] = score
        assert scores == pytest.approx(slow_scores(corpus, query), abs=1e-5)


def test_equally_good_passages_come_in_the_order_of_their_numbers_however_many_are_asked_for(bm25s):
    retriever = BM25(random_corpus(500))
    queries = ["word1", "word2 word3", "word4 word4", "word5 word6 word7 word8"]
    for query in queries:
        whole = retriever.search(query, 500)
        order = sorted(whole, key=lambda each: (-each.score, each.passage.number))
        assert whole == order
        assert len({each.score for each in whole}) < 250  # many ties
        for top_k in (1, 2, 3, 7, 50, 499, 1000):
            assert retriever.search(query, top_k) == order[:top_k]


def test_best_is_a_stable_sort_of_everything():
    rng = np.random.default_rng(0)
    draws = [rng.integers(0, 4, rng.integers(1, 30)) for _ in range(200)]
    draws += [rng.integers(0, 9_000, 4_000), np.maximum(0, rng.integers(-99, 3, 4_000))]
    for scores in (draw.astype(np.float32) for draw in draws):
        for top_k in (1, 2, 5, 40):
            expected = np.argsort(-scores, kind="stable")[:top_k]
            assert best(scores, top_k).tolist() == expected.tolist()


@pytest.mark.parametrize("query", ["", " \n", "?!", "zzzzz", "x", "\ud83d", "\x00", "日本"])
def test_a_query_without_a_known_word_gets_the_first_passages(bm25s, query):
    assert BM25(BOOK).search(query, 2) == [Scored(BOOK[0], 0.0), Scored(BOOK[1], 0.0)]


def test_a_query_of_100_kb_counts_so_many_words(bm25s):
    corpus = random_corpus(2000, num_words=400)
    retriever = BM25(corpus)
    query = " ".join(f"word{number % 400}" for number in range(14_000))
    found = retriever.search(query, 3)
    first = " ".join(f"word{number}" for number in range(retrieval.MAX_QUERY_WORDS))
    assert len(query) > 100_000
    assert found == retriever.search(first, 3)


def test_a_corpus_smaller_than_top_k_is_found_whole_and_an_empty_one_refused(bm25s):
    assert sorted(numbers(BM25(BOOK).search("Kenya", 99))) == [0, 1, 2, 3, 4]
    with pytest.raises(RetrievalError, match="the corpus has no passages"):
        BM25(corpus_of())


def test_a_damaged_index_is_named_in_one_line(bm25s):
    folder = BM25(BOOK).folder
    scores = folder / "data.csc.index.npy"
    scores.write_bytes(scores.read_bytes()[:40])
    with pytest.raises(RetrievalError, match=r"bm25-\w+ is damaged \(.*\); delete it") as caught:
        BM25(BOOK)
    assert "\n" not in str(caught.value)


def test_a_missing_package_is_said_with_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "bm25s", None)
    with pytest.raises(RetrievalError, match="bm25s is not installed; run `make setup"):
        BM25(BOOK)


def test_who_builds_an_index_builds_it_alone_and_deletes_what_a_killed_one_left(bm25s):
    first = BM25(BOOK)
    left = first.folder.parent / f".new-abc-{first.folder.name}"
    left.mkdir()
    (left / "ids").write_bytes(b"gigabytes")
    BM25(BOOK)
    assert left.exists()  # nothing is built
    shutil.rmtree(first.folder)
    built, build = [], retrieval._build

    def slow(corpus, new):
        built.append(new)
        time.sleep(0.2)
        build(corpus, new)

    with pytest.MonkeyPatch.context() as patch, ThreadPoolExecutor(3) as pool:
        patch.setattr(retrieval, "_build", slow)
        list(pool.map(lambda _: BM25(BOOK), range(3)))
    assert len(built) == 1 and not left.exists()


# ------------------------------------------------------------------------------------------ which


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"SEARCHQA_RETRIEVAL_METHOD": "BM25"}, "is 'BM25'; choose bm25"),
        ({"SEARCHQA_RETRIEVAL_METHOD": "remote"}, "needs SEARCHQA_RETRIEVAL_URL"),
        ({"SEARCHQA_RETRIEVAL_METHOD": "dense"}, "Search-R1's own server"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, said):
    with pytest.raises(RetrievalError, match=said):
        open_retriever(settings)


def test_the_settings_choose_the_retriever(bm25s, tmp_path):
    path = write_corpus(tmp_path / "wiki.jsonl", BOOK)
    retriever = open_retriever({"SEARCHQA_CORPUS_PATH": str(path)})
    assert isinstance(retriever, BM25)
    assert numbers(retriever.search("Nairobi", 1)) == [2]
    url = "http://127.0.0.1:9/retrieve"
    assert isinstance(open_retriever({"SEARCHQA_RETRIEVAL_URL": url}), Remote)
    both = {"SEARCHQA_RETRIEVAL_URL": url, "SEARCHQA_RETRIEVAL_METHOD": "bm25"}
    assert isinstance(open_retriever(both | {"SEARCHQA_CORPUS_PATH": str(path)}), BM25)


# -------------------------------------------------------------------------------- the service


class Broken:
    def search(self, query, top_k):
        raise RetrievalError("it broke")


@pytest.fixture
def client(bm25s):
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
        (b"[]", "body"),
        (b"{}", "queries"),
        (b'{"queries": "Kenya"}', "queries"),
        (b'{"queries": [1]}', "queries.0"),
        (b'{"queries": ["a"], "topk": 0}', "topk is 0"),
        (b'{"queries": ["a"], "topk": -3}', "topk is -3"),
        (b'{"queries": ["a"], "topk": "3"}', "topk"),
        (b'{"queries": ["a"], "topk": 10001}', "1 queries with 10001 passages"),
        (b'{"queries": ["a"], "return_scores": 3}', "return_scores"),
        (b"\xff\xfe", "JSON"),
    ],
)
def test_a_bad_request_is_422_with_what_was_wrong(client, body, said):
    answer = client.post("/retrieve", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422
    assert said in answer.json()["error"]
    assert answer.json()["hint"]


def test_a_search_that_fails_is_500_with_the_reason():
    client = TestClient(create_app(Broken()), raise_server_exceptions=False)
    answer = client.post("/retrieve", json={"queries": ["bad"]})
    assert answer.status_code == 500
    assert answer.json()["error"] == "it broke"


@contextlib.contextmanager
def scripted(*answers, sleep_s=0.0):
    """A server that gives these answers, (status, body) each or None to hang up, the last for ever;
    yields its URL and what it was asked."""
    left, asked = list(answers), []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            asked.append((self.path, json.loads(body)))
            answer = left.pop(0) if len(left) > 1 else left[0]
            time.sleep(sleep_s)
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


GOOD = (200, {"result": [[document(2, 1.5), document(0, 0.5)]]})


def test_remote_asks_and_reads_search_r1s_format():
    with scripted(GOOD) as (url, asked):
        found = Remote(f"{url}/retrieve").search("Nairobi", 2)
        assert found == [Scored(BOOK[2], 1.5), Scored(BOOK[0], 0.5)]
    body = {"queries": ["Nairobi"], "topk": 2, "return_scores": True}
    assert asked == [("/retrieve", body)]


@pytest.mark.parametrize(
    ("inner", "passage"),
    [
        ({"contents": '"A "quoted" title"\ntext'}, Passage(0, 'A "quoted" title', "text")),
        ({"contents": "Bare title\ntext\nmore"}, Passage(0, "Bare title", "text\nmore")),
        ({"contents": "no title at all"}, Passage(0, "", "no title at all")),
        ({"contents": ""}, Passage(0, "", "")),
        ({"id": "doc-7"}, BOOK[0]._replace(number=-1)),
        ({"id": 0, "title": "ignored"}, BOOK[0]),
    ],
)
def test_remote_takes_what_services_call_a_document(inner, passage):
    with scripted((200, {"result": [[document(0, **inner)]]})) as (url, _):
        assert [each.passage for each in Remote(url).search("query", 1)] == [passage]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ((200, b"<html>hello</html>"), "not Search-R1's"),
        ((200, b""), "not Search-R1's"),
        ((200, [1]), "not Search-R1's"),
        ((200, {"results": []}), "not Search-R1's"),
        ((200, {"result": 7}), "not Search-R1's"),
        ((200, {"result": ["text"]}), "not Search-R1's"),
        ((200, {"result": [[7, 8]]}), "not Search-R1's"),
        ((200, {"result": [[{"document": None}, {}]]}), "not Search-R1's"),
        ((200, {"result": [[{"id": "0"}, {"id": "1"}]]}), "not Search-R1's"),
        ((200, {"result": [[document(0, 0.5, contents=7)] * 2]}), "contents is not a string"),
        ((200, {"result": [[document(0, "high")] * 2]}), "not Search-R1's"),
        ((200, {"result": [[document(0, float("nan"))] * 2]}), "not Search-R1's"),
        ((200, {"result": []}), "not Search-R1's"),
        ((200, {"result": [[document(0)] * 2] * 2}), "not Search-R1's"),
        ((200, {"result": [[document(0)]]}), "got 1"),
        ((200, {"result": [[]]}), "got 0"),
        ((200, b"[" * 100_000), "not Search-R1's"),
        ((200, b" " * 300_000), "larger than 200000 bytes"),
        ((404, {"detail": "Not Found"}), "HTTP 404"),
        ((422, b"x\ny"), "HTTP 422"),
        ((307, b""), "HTTP 307"),
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
        assert numbers(Remote(url).search("Nairobi", 2)) == [2, 0]
        assert len(asked) == 3


def test_a_service_that_is_down_is_an_error_within_seconds():
    with scripted(GOOD) as (url, _):
        pass
    with pytest.raises(RetrievalError, match=f"{url} .SEARCHQA_RETRIEVAL_URL.: .*refused"):
        Remote(url).search("query", 2)
    with scripted((500, {"error": "it broke"})) as (url, asked):
        with pytest.raises(RetrievalError, match="HTTP 500: .*it broke"):
            Remote(url, timeout_s=1.0).search("query", 2)
        assert len(asked) > 1


@pytest.mark.parametrize("url", ["", "localhost:80", "ftp://a", "http://me:secret@host"])
def test_what_is_no_address_is_refused_without_repeating_a_secret(url):
    with pytest.raises(RetrievalError, match="SEARCHQA_RETRIEVAL_URL") as caught:
        Remote(url)
    assert "secret" not in str(caught.value)


@contextlib.contextmanager
def serving(path, *flags):
    """`python -m envs.searchqa.retrieval` over the corpus in `path`; yields its URL and process."""
    command = [sys.executable, "-m", "envs.searchqa.retrieval", "--port", "0", *flags]
    settings = {"SEARCHQA_CORPUS_PATH": str(path), "SEARCHQA_RETRIEVAL_METHOD": "bm25"}
    process = subprocess.Popen(
        command, cwd=ROOT, env=os.environ | settings, text=True, stdout=subprocess.PIPE
    )
    try:
        line = process.stdout.readline()
        match = re.match(r"listening on (http://\S+) \(retriever BM25\)", line)
        assert match, line
        yield match[1], process
    finally:
        process.kill()
        process.communicate()


def test_env_servers_search_through_a_service_that_sigterm_ends(bm25s, tmp_path):
    corpus = random_corpus(300)
    path = write_corpus(tmp_path / "wiki.jsonl", corpus)
    queries = [f"word{number} word{number + 1}" for number in range(60)]
    with serving(path) as (url, process):
        remote = open_retriever({"SEARCHQA_RETRIEVAL_URL": url})
        with ThreadPoolExecutor(12) as pool:  # one retriever, the sessions of an env server
            answers = list(pool.map(lambda query: remote.search(query, 3), queries))
        assert answers == [BM25(corpus).search(query, 3) for query in queries]
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        with pytest.raises(RetrievalError, match="SEARCHQA_RETRIEVAL_URL"):
            Remote(url, timeout_s=0.5).search("query", 3)


def test_a_service_that_cannot_be_says_why_in_one_line(bm25s, tmp_path, monkeypatch, capsys):
    path = tmp_path / "wiki.jsonl"
    path.write_text('{"id": "0", "contents": "\\"A\\"\\nfine"}\n{"id": 1\n')
    monkeypatch.setenv("SEARCHQA_CORPUS_PATH", str(path))
    handler = signal.getsignal(signal.SIGTERM)
    try:
        for name, value, said in (
            ("SEARCHQA_RETRIEVAL_METHOD", "bm25", f"{path}, line 2: no JSON"),
            ("SEARCHQA_RETRIEVAL_METHOD", "elastic", "choose bm25 or remote"),
            ("SEARCHQA_CORPUS_PATH", str(tmp_path / "none"), f"{tmp_path / 'none'} cannot be read"),
        ):
            monkeypatch.setenv("SEARCHQA_RETRIEVAL_METHOD", "bm25")
            monkeypatch.setenv(name, value)
            assert retrieval.main(["--port", "0"]) == 1
            wrote = capsys.readouterr().err
            assert said in wrote and wrote.count("\n") == 1
        with pytest.raises(SystemExit, match="2"):
            retrieval.main(["--port", "99999"])
        assert "a port is a number" in capsys.readouterr().err
    finally:
        signal.signal(signal.SIGTERM, handler)
