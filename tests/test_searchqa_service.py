"""Retrieval as a service, and the retriever that asks one: ours, somebody else's, a broken one."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from retrieval_fakes import BOOK, Recorder, batched, numbers, random_corpus, write_corpus

from envs.searchqa import service
from envs.searchqa.ranking import QueryError, RetrievalError, Scored
from envs.searchqa.remote import Remote, contents
from envs.searchqa.retrieval import BM25, open_retriever
from envs.searchqa.service import create_app
from envs.searchqa.text import Passage, passage_of

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.usefixtures("own_cache")


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


def test_a_body_that_is_too_large_is_413_and_another_path_404(client):
    body = {"queries": ["x" * (service.MAX_BODY_BYTES + 1)]}
    assert client.post("/retrieve", json=body).status_code == 413
    assert client.post("/search", json={}).status_code == 404
    assert client.get("/retrieve").status_code == 405


def test_a_page_in_a_browser_is_refused(client):
    answer = client.post("/retrieve", json={"queries": []}, headers={"Origin": "http://evil"})
    assert answer.status_code == 403


def test_a_search_that_fails_is_500_with_the_reason():
    client = TestClient(create_app(Recorder()), raise_server_exceptions=False)
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
        found = Remote(f"{url}/retrieve").scored(["Nairobi"], 2)
        assert found == [[Scored(BOOK[2], 1.5), Scored(BOOK[0], 0.5)]]
        assert Remote(url).search([], 2) == []
    body = {"queries": ["Nairobi"], "topk": 2, "return_scores": True}
    assert asked == [("/retrieve", body)]


def test_remote_asks_in_parts_for_more_than_one_answer_may_hold():
    """32 queries of many passages gather in a `Batcher`: alone each would be answered."""
    parts = [{"result": [[document(n % 5)] * 400 for n in part]} for part in (range(25), range(7))]
    with scripted(*((200, part) for part in parts)) as (url, asked):
        found = Remote(url).search([f"q{n}" for n in range(32)], 400)
    assert [len(body["queries"]) for _, body in asked] == [25, 7]
    assert [passages[0] for passages in found] == [BOOK[n % 5] for n in (*range(25), *range(7))]


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
        assert Remote(url).search(["query"], 1) == [[passage]]


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
        ((200, {"result": [[document(0, 0.5, contents=7)] * 2]}), "contents is no string"),
        ((200, {"result": [[document(0, "high")] * 2]}), "not Search-R1's"),
        ((200, {"result": [[document(0, float("nan"))] * 2]}), "not Search-R1's"),
        ((200, {"result": []}), "got 0 lists"),
        ((200, {"result": [[document(0)] * 2] * 2}), "got 2 lists"),
        ((200, {"result": [[document(0)]]}), "the shortest of 1"),
        ((200, {"result": [[]]}), "the shortest of 0"),
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
            Remote(url, max_bytes=200_000).search(["query"], 2)
        assert len(asked) == 1
    message = str(caught.value)
    assert said in message and url in message and "SEARCHQA_RETRIEVAL_URL" in message
    assert "\n" not in message and len(message) < 700


def test_a_query_that_finds_too_little_among_others_is_told_from_a_service_that_lacks_passages():
    few, enough = [document(0)], [document(0), document(1)]
    for lists, of_one in (([few, enough], True), ([few, few], False), ([enough], False)):
        with (
            scripted((200, {"result": lists})) as (url, _),
            pytest.raises(RetrievalError) as caught,
        ):
            Remote(url).search(["?", "Kenya"], 2)
        assert isinstance(caught.value, QueryError) == of_one


def test_a_passage_without_a_title_leaves_as_it_came():
    for line in ("only text", '"Kenya"\ntext', '""\ntwo\nlines'):
        assert contents(passage_of(0, line)) == line


def test_a_lost_connection_and_a_5xx_are_repeated(monkeypatch):
    monkeypatch.setattr(Remote, "PAUSES_S", (0.01, 0.01, 0.01))
    with scripted(None, (503, b"loading"), GOOD) as (url, asked):
        assert numbers(Remote(url).search(["Nairobi"], 2)[0]) == [2, 0]
        assert len(asked) == 3


def test_a_service_that_is_down_is_an_error_within_seconds():
    with scripted(GOOD) as (url, _):
        pass
    began = time.monotonic()
    with pytest.raises(RetrievalError, match=f"{url} .SEARCHQA_RETRIEVAL_URL.: .*refused"):
        Remote(url).search(["query"], 2)
    assert 1 < time.monotonic() - began < 10
    with scripted((500, {"error": "it broke"})) as (url, asked):
        with pytest.raises(RetrievalError, match="HTTP 500: .*it broke"):
            Remote(url, timeout_s=1.0).search(["query"], 2)
        assert len(asked) > 1


def test_a_service_that_is_slow_is_an_error_after_the_time_out():
    with scripted(GOOD, sleep_s=6.0) as (url, asked):
        began = time.monotonic()
        with pytest.raises(RetrievalError, match=r"no answer within 0\.3"):
            Remote(url, timeout_s=0.3).search(["query"], 2)
        assert time.monotonic() - began < 5
        assert len(asked) == 1


def test_half_a_surrogate_pair_travels_in_both_directions():
    with scripted((200, {"result": [[document(0, contents="\ud83d")]]})) as (url, asked):
        assert Remote(url).search(["a \ud83d b"], 1)[0][0].text == "\N{REPLACEMENT CHARACTER}"
    assert asked[0][1]["queries"] == ["a \ud83d b"]


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


def test_several_env_servers_share_a_service_that_sigterm_ends(bm25s, tmp_path):
    corpus = random_corpus(300)
    path = write_corpus(tmp_path / "wiki.jsonl", corpus)
    own = BM25(corpus)
    queries = [f"word{number} word{number + 1}" for number in range(60)]
    with serving(path) as (url, process), contextlib.ExitStack() as stack:
        # Each with the batcher of its own that an env server has.
        settings = {"SEARCHQA_RETRIEVAL_URL": url}
        batchers = [stack.enter_context(batched(open_retriever(settings))) for _ in range(3)]
        with ThreadPoolExecutor(12) as pool:
            found = list(
                pool.map(
                    lambda number: batchers[number % 3].search_one(queries[number], 3), range(60)
                )
            )
        assert found == own.search(queries, 3)
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        with pytest.raises(RetrievalError, match="SEARCHQA_RETRIEVAL_URL"):
            Remote(url, timeout_s=0.5).search(queries, 3)


def test_a_service_that_cannot_be_says_why_in_one_line(bm25s, tmp_path, monkeypatch, capsys):
    path = tmp_path / "wiki.jsonl"
    path.write_text('{"id": "0", "contents": "\\"A\\"\\nfine"}\n{"id": 1\n')
    monkeypatch.setenv("SEARCHQA_CORPUS_PATH", str(path))
    handler = signal.getsignal(signal.SIGTERM)
    try:
        for name, value, said in (
            ("SEARCHQA_RETRIEVAL_METHOD", "bm25", f"{path}, line 2: no JSON"),
            ("SEARCHQA_RETRIEVAL_METHOD", "elastic", "choose bm25, dense"),
            ("SEARCHQA_CORPUS_PATH", str(tmp_path / "none"), f"{tmp_path / 'none'} cannot be read"),
        ):
            monkeypatch.setenv("SEARCHQA_RETRIEVAL_METHOD", "bm25")
            monkeypatch.setenv(name, value)
            assert service.main(open_retriever, ["--port", "0"]) == 1
            wrote = capsys.readouterr().err
            assert said in wrote and wrote.count("\n") == 1
        with pytest.raises(SystemExit, match="2"):
            service.main(open_retriever, ["--port", "99999"])
        assert "a port is a number" in capsys.readouterr().err
    finally:
        signal.signal(signal.SIGTERM, handler)
