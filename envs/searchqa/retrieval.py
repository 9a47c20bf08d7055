"""Retrieval: which passages of a corpus a query finds, by words here or by asking a service;
and that service.

    BM25(passage) = Σ over the query's words of idf · tf / (tf + k1 (1 - b + b · length / mean))

with a word's count tf in the passage, Lucene's idf, k1 = 1.5, b = 0.75 (Robertson and Zaragoza,
2009). The title counts three times: a text often only says "it". Scores are cached and mapped.
Equally good passages come in the order of the corpus, so a query without a known word gets the
first ones: nothing that a policy writes is an error.

Environment variables (envs/searchqa/README.md): SEARCHQA_RETRIEVAL_METHOD, bm25 or remote (default:
remote if a URL is given); SEARCHQA_CORPUS_PATH; SEARCHQA_RETRIEVAL_URL, of a service in Search-R1's
format: the one below, which lets many env servers share one index, or Search-R1's own, which also
retrieves by meaning.

    POST /retrieve  {"queries": ["flag of Kenya"], "topk": 3, "return_scores": true}
                    -> {"result": [[{"document": {"id", "contents"}, "score"}, ..], ..]}
                    -> without return_scores the documents alone: [[{"id", "contents"}, ..], ..]
    GET  /          -> {"retriever": "BM25", "passages": 12309}

Errors are status codes with {"error", "hint"}.  Run it:  python -m envs.searchqa.retrieval
"""

import argparse
import hashlib
import json
import os
import re
import signal
import sys
import threading
import time
import unicodedata
from array import array
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from pydantic import BaseModel, Field, StrictBool, StrictInt, StrictStr, ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from envs.http import JSON_HEADERS, ConnectionLost, ExchangeError, HttpClient, checked_url, parse
from envs.searchqa.corpus import Corpus, open_corpus
from envs.searchqa.text import Passage, contents, passage_of
from envs.server import Guard, hosts_of, leave, listen_on, serve
from envs.sessions import Answer, error_answer
from run.files import build_folder, cache_dir

TITLE_TIMES = 3
MAX_QUERY_WORDS = 64  # different known ones that count: a query of 100 kB must not cost seconds
MAX_QUERY_CHARS = 20_000  # read of one text: accents are taken off before words are counted
_WORD = re.compile(r"\w\w+")
_FORMAT = 1  # of the cache; another number whenever `words` changes
PROGRAM = "envs.searchqa.retrieval"
MAX_BODY_BYTES = 4_000_000
DEFAULT_TOP_K = 3


class RetrievalError(RuntimeError):
    """There are no passages, and it is not the query's fault; the message is one line."""


class Scored(NamedTuple):
    passage: Passage
    score: float  # higher is better


# -------------------------------------------------------------------------------------------- BM25


def words(text: str) -> list[str]:
    """What BM25 counts: two letters or more, in lower case, without accents.

    >>> words("The Côte d'Ivoire's GDP, in 2023")
    ['the', 'cote', 'ivoire', 'gdp', 'in', '2023']
    """
    if not text.isascii():
        decomposed = unicodedata.normalize("NFKD", text)
        text = "".join(char for char in decomposed if not unicodedata.combining(char))
    return _WORD.findall(text.lower())


class BM25:
    """Passages by the words that they share with a query; the index is built once and cached."""

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus
        # A search in a large corpus takes 4 bytes a passage, and a server has many sessions.
        self._at_once = threading.Semaphore(os.cpu_count() or 1)
        bm25s = _bm25s()
        key = json.dumps([_FORMAT, corpus.fingerprint, bm25s.__version__])
        digest = hashlib.sha256(key.encode()).hexdigest()[:16]
        folder = cache_dir() / "searchqa" / f"bm25-{digest}"
        if not folder.is_dir():
            build_folder(folder, lambda new: _build(corpus, new))
        self._index = bm25s.BM25.load(folder, mmap=True, show_progress=False)

    def search(self, query: str, top_k: int) -> list[Scored]:
        known = self._index.vocab_dict
        ids = list(
            dict.fromkeys(known[word] for word in words(query[:MAX_QUERY_CHARS]) if word in known)
        )
        if not ids:
            first = range(min(top_k, len(self.corpus)))
            return [Scored(self.corpus[number], 0.0) for number in first]
        # Sorted, since the last bit of a sum depends on its order, and ties on the last bit.
        with self._at_once:
            scores = self._index.get_scores_from_ids(sorted(ids[:MAX_QUERY_WORDS]))
            places = best(scores, top_k)
        return [Scored(self.corpus[int(place)], float(scores[place])) for place in places]


def _bm25s() -> Any:
    """The package, imported only where an index is used: it brings numba, and vLLM does not start
    in a process that has imported it (0.32: its search for kernels stumbles over llvmlite's)."""
    try:
        return import_module("bm25s")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"SearchQA needs {error.name}, which is not installed; run `make setup ENV=searchqa`"
        ) from error


def best(scores: np.ndarray, top_k: int) -> np.ndarray:
    """Places of the highest scores, the highest first, equal ones in order of their place.

    >>> best(np.array([0.5, 2.0, 0.5, 0.5, 3.0]), top_k=3).tolist()
    [4, 1, 0]
    """
    top_k = min(top_k, len(scores))
    # Most passages share no word with a query, and a partition is slow among equal zeros.
    places = np.flatnonzero(scores > 0)
    if len(places) < top_k:
        places = np.arange(len(scores))
    candidates = scores[places]
    places = places[candidates >= np.partition(candidates, -top_k)[-top_k]]
    return places[np.argsort(-scores[places], kind="stable")[:top_k]]


def _build(corpus: Corpus, folder: Path) -> None:
    """Write the index of `corpus`, the words of each passage as numbers."""
    vocabulary: dict[str, int] = {}
    documents = []
    said = time.monotonic()
    for number in range(len(corpus)):
        _, title, text = corpus[number]
        passage_words = words(title) * TITLE_TIMES + words(text)
        ids = (vocabulary.setdefault(word, len(vocabulary)) for word in passage_words)
        documents.append(array("i", ids))
        if time.monotonic() > said + 10:
            said = time.monotonic()
            _say(f"indexing the corpus: {100 * number // len(corpus)} % read")
    index = _bm25s().BM25()
    index.scores = index.build_index_from_ids(
        range(len(vocabulary)), documents, show_progress=False
    )
    index.vocab_dict = vocabulary
    index.save(folder, show_progress=False)


def _say(text: str) -> None:
    print(f"envs.searchqa: {text}", file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------------ Remote


class Remote:
    """Passages from a service that speaks Search-R1's format.

    A lost connection and a 5xx are repeated, at most for `timeout_s` altogether. Fewer passages
    than asked for are an error: otherwise a policy that searches in nothing would be scored.
    """

    PAUSES_S = (0.2, 0.5, 1.0, 2.0)  # before each repetition

    def __init__(self, url: str, timeout_s: float = 25.0, max_bytes: int = 16 << 20) -> None:
        self.url = checked_url(url, "SEARCHQA_RETRIEVAL_URL").removesuffix("/retrieve")
        self._timeout_s = timeout_s
        self._http = HttpClient(self.url, timeout_s, max_bytes)

    def search(self, query: str, top_k: int) -> list[Scored]:
        body = json.dumps({"queries": [query], "topk": top_k, "return_scores": True})
        answer = self._ask(body.encode())
        try:
            (documents,) = parse(answer)["result"]
            passages = [_scored_of(document) for document in documents]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            got = answer[:200].decode(errors="replace")
            raise self._error(f"the answer is not Search-R1's ({error!r}): {got!r}") from error
        if len(passages) < top_k:
            raise self._error(f"asked for {top_k} passages, got {len(passages)}")
        return passages[:top_k]

    def _ask(self, body: bytes) -> bytes:
        """The body of the answer, whose status is 200."""
        end = time.monotonic() + self._timeout_s
        for pause_s in (*self.PAUSES_S, self._timeout_s):
            try:
                remaining_s = end - time.monotonic()
                answer = self._http.ask("POST", "/retrieve", body, JSON_HEADERS, remaining_s)
                if answer.status == 200:
                    return answer.body
                problem = f"HTTP {answer.status}: {answer.text[:200]}"
                may_pass = answer.status >= 500
            except ExchangeError as error:
                problem = str(error)
                may_pass = isinstance(error, ConnectionLost)
            if not may_pass or time.monotonic() + pause_s >= end:
                break
            time.sleep(pause_s)
        raise self._error(problem)

    def _error(self, problem: str) -> RetrievalError:
        where = f"the retrieval service {self.url} (SEARCHQA_RETRIEVAL_URL)"
        return RetrievalError(f"{where}: {' '.join(problem.split())}")


def _scored_of(document: dict[str, Any]) -> Scored:
    """{"document": {"id", "contents"}, "score"} of an answer, or a document without its score."""
    text = document.get("document", document)["contents"]
    return Scored(passage_of(-1, text), float(document.get("score", 0.0)))


# ------------------------------------------------------------------------------------------- which


def open_retriever() -> BM25 | Remote:
    """The retriever that the environment variables name; RetrievalError if there is none."""
    url = os.environ.get("SEARCHQA_RETRIEVAL_URL")
    method = os.environ.get("SEARCHQA_RETRIEVAL_METHOD") or ("remote" if url else "bm25")
    if method == "remote" and url:
        return Remote(url)
    if method == "bm25":
        return BM25(open_corpus(os.environ.get("SEARCHQA_CORPUS_PATH") or None))
    raise RetrievalError(
        f"SEARCHQA_RETRIEVAL_METHOD is {method!r}; choose bm25, or remote with a "
        "SEARCHQA_RETRIEVAL_URL (retrieval by meaning is such a service: Search-R1's own)"
    )


# -------------------------------------------------------------------------------- the service


class Body(BaseModel):
    """Of POST /retrieve."""

    queries: list[StrictStr]
    topk: StrictInt | None = Field(None, ge=1)
    return_scores: StrictBool = False


def create_app(retriever: BM25, hosts: frozenset[str] = frozenset()) -> Starlette:
    """The app that serves `retriever` to requests for these hosts; none: any."""

    async def health(_: Request) -> Answer:
        return Answer({"retriever": "BM25", "passages": len(retriever.corpus)})

    async def retrieve(request: Request) -> Response:
        try:
            body = Body.model_validate_json(await request.body())
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            hint = 'send {"queries": ["..."], "topk": 3, "return_scores": true}'
            return error_answer(422, f"{where}: {first['msg']}", hint)

        def search() -> list[list[dict]]:
            top_k = body.topk or DEFAULT_TOP_K
            passages = [retriever.search(query, top_k) for query in body.queries]
            return [_documents(each, body.return_scores) for each in passages]

        try:
            return Answer({"result": await run_in_threadpool(search)})
        except (OSError, ValueError) as error:  # a broken line of the corpus
            _say(str(error))
            return error_answer(500, str(error), "the service's operator has to repair this")

    return Starlette(
        routes=[Route("/", health), Route("/retrieve", retrieve, methods=["POST"])],
        middleware=[Middleware(Guard, hosts=hosts, max_bytes=MAX_BODY_BYTES)],
    )


def _documents(passages: list[Scored], with_scores: bool) -> list[dict]:
    documents = [{"id": str(each.number), "contents": contents(each)} for each, _ in passages]
    if not with_scores:
        return documents
    scores = [score for _, score in passages]
    return [{"document": each, "score": score} for each, score in zip(documents, scores)]


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {PROGRAM}",
        description="Serve BM25 over SEARCHQA_CORPUS_PATH (or the Factbook) in Search-R1's format.",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    options = parser.parse_args(arguments)
    if not 0 <= options.port < 65_536:
        parser.error(f"--port {options.port}: a port is a number of 0 to 65535")
    # While an index is being built: a SystemExit removes the unfinished one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with listen_on(options.host, options.port) as listener:
            corpus = open_corpus(os.environ.get("SEARCHQA_CORPUS_PATH") or None)
            app = create_app(BM25(corpus), hosts_of(options.host))
            return serve(app, options.host, listener, PROGRAM, "retriever BM25")
    except (OSError, ImportError, RuntimeError, ValueError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    leave(main())
