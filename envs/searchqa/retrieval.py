"""Retrieval: find the passages for a query, with BM25 in this process or through a service.

    BM25(passage) = Σ over the query's words of idf · tf / (tf + k1 (1 - b + b · length / mean))

where tf is the number of times that a word occurs in the passage, idf is Lucene's, k1 = 1.5 and
b = 0.75 (Robertson and Zaragoza, 2009). Words of the title count three times, because the text
often says only "it". The scores are cached and memory-mapped. Passages with equal scores keep the
order of the corpus, so a query without a known word gets the first passages. No query that a policy
writes causes an error.

Environment variables (envs/searchqa/README.md): SEARCHQA_RETRIEVAL_METHOD is bm25 or remote; the
default is remote if there is a URL. SEARCHQA_CORPUS_PATH names the corpus. SEARCHQA_RETRIEVAL_URL
is the address of a service in Search-R1's format: either the one below, which lets many environment
servers share one index, or Search-R1's own, which can also retrieve by meaning.

    POST /retrieve  {"queries": ["flag of Kenya"], "topk": 3, "return_scores": true}
                    -> {"result": [[{"document": {"id", "contents"}, "score"}, ..], ..]}
                    -> without return_scores, only documents: [[{"id", "contents"}, ..], ..]
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

TITLE_WEIGHT = 3
MAX_QUERY_WORDS = 64  # different known words; otherwise a query of 100 kB could take seconds
MAX_QUERY_CHARS = 20_000  # limits the work before words are counted, such as removing accents
_WORD = re.compile(r"\w\w+")
_FORMAT = 1  # version of the cache; increase it when `words` changes
PROGRAM = "envs.searchqa.retrieval"
MAX_BODY_BYTES = 4_000_000
DEFAULT_TOP_K = 3


class RetrievalError(RuntimeError):
    """The retriever or its service failed. The message is one line."""


class Scored(NamedTuple):
    passage: Passage
    score: float  # higher is better


# -------------------------------------------------------------------------------------------- BM25


def words(text: str) -> list[str]:
    """The words that BM25 counts: at least two letters, in lower case, without accents.

    >>> words("The Côte d'Ivoire's GDP, in 2023")
    ['the', 'cote', 'ivoire', 'gdp', 'in', '2023']
    """
    if not text.isascii():
        # Each character alone: sorting a long run of accents takes quadratic time.
        decomposed = (unicodedata.normalize("NFKD", char) for char in text)
        text = "".join(c for part in decomposed for c in part if not unicodedata.combining(c))
    return _WORD.findall(text.lower())


class BM25:
    """Ranks passages by the words that they share with a query. The index is built once."""

    def __init__(self, corpus: Corpus) -> None:
        self.corpus = corpus
        # A search needs 4 bytes per passage, and a server has many sessions, so few run at a time.
        self._search_slots = threading.Semaphore(os.cpu_count() or 1)
        bm25s = _bm25s()
        key = json.dumps([_FORMAT, corpus.fingerprint, bm25s.__version__])
        digest = hashlib.sha256(key.encode()).hexdigest()[:16]
        folder = cache_dir() / "searchqa" / f"bm25-{digest}"
        if not folder.is_dir():
            build_folder(folder, lambda new: _build(corpus, new))
        self._index = bm25s.BM25.load(folder, mmap=True, show_progress=False)

    def search(self, query: str, top_k: int) -> list[Scored]:
        vocabulary = self._index.vocab_dict
        query_words = [word for word in words(query[:MAX_QUERY_CHARS]) if word in vocabulary]
        ids = list(dict.fromkeys(vocabulary[word] for word in query_words))
        if not ids:
            first_numbers = range(min(top_k, len(self.corpus)))
            return [Scored(self.corpus[number], 0.0) for number in first_numbers]
        # Sorted, because the order of a sum changes its last bit, which can break a tie.
        with self._search_slots:
            scores = self._index.get_scores_from_ids(sorted(ids[:MAX_QUERY_WORDS]))
            numbers = top_indices(scores, top_k)
        return [Scored(self.corpus[int(number)], float(scores[number])) for number in numbers]


def _bm25s() -> Any:
    """Import the package, only where an index is used. It imports numba, and vLLM 0.32 does not
    start in a process with numba: its search for kernels fails at llvmlite."""
    try:
        return import_module("bm25s")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"SearchQA needs {error.name}, which is not installed; run `make setup ENV=searchqa`"
        ) from error


def top_indices(scores: np.ndarray, top_k: int) -> np.ndarray:
    """Indices of the highest scores, the highest first. Equal scores keep their order.

    >>> top_indices(np.array([0.5, 2.0, 0.5, 0.5, 3.0]), top_k=3).tolist()
    [4, 1, 0]
    """
    top_k = min(top_k, len(scores))
    # Most passages share no word with a query, and np.partition is slow on many equal zeros.
    indices = np.flatnonzero(scores > 0)
    if len(indices) < top_k:
        indices = np.arange(len(scores))
    candidates = scores[indices]
    indices = indices[candidates >= np.partition(candidates, -top_k)[-top_k]]
    return indices[np.argsort(-scores[indices], kind="stable")[:top_k]]


def _build(corpus: Corpus, folder: Path) -> None:
    """Write the index of `corpus`. A passage is a list of word numbers."""
    vocabulary: dict[str, int] = {}
    documents = []
    log_time = time.monotonic()
    for number in range(len(corpus)):
        _, title, text = corpus[number]
        passage_words = words(title) * TITLE_WEIGHT + words(text)
        ids = (vocabulary.setdefault(word, len(vocabulary)) for word in passage_words)
        documents.append(array("i", ids))
        if time.monotonic() > log_time + 10:
            log_time = time.monotonic()
            _log(f"indexing the corpus: {100 * number // len(corpus)} % read")
    index = _bm25s().BM25()
    index.scores = index.build_index_from_ids(
        range(len(vocabulary)), documents, show_progress=False
    )
    index.vocab_dict = vocabulary
    index.save(folder, show_progress=False)


def _log(text: str) -> None:
    print(f"envs.searchqa: {text}", file=sys.stderr, flush=True)


# ------------------------------------------------------------------------------------------ Remote


class Remote:
    """Gets passages from a service in Search-R1's format.

    After a lost connection or a 5xx, a request is retried, for at most `timeout_s` in total. Fewer
    than `top_k` passages are an error, because the policy would be scored on a broken search.
    """

    PAUSES_S = (0.2, 0.5, 1.0, 2.0)  # before the retries

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
            excerpt = answer[:200].decode(errors="replace")
            problem = f"the answer is not in Search-R1's format ({error!r}): {excerpt!r}"
            raise self._error(problem) from error
        if len(passages) < top_k:
            raise self._error(f"expected {top_k} passages, got {len(passages)}")
        return passages[:top_k]

    def _ask(self, body: bytes) -> bytes:
        """Send a request, with retries; return the body of an answer with status 200."""
        end = time.monotonic() + self._timeout_s
        for pause_s in (*self.PAUSES_S, self._timeout_s):
            try:
                remaining_s = end - time.monotonic()
                answer = self._http.ask("POST", "/retrieve", body, JSON_HEADERS, remaining_s)
                if answer.status == 200:
                    return answer.body
                problem = f"HTTP {answer.status}: {answer.text[:200]}"
                is_temporary = answer.status >= 500
            except ExchangeError as error:
                problem = str(error)
                is_temporary = isinstance(error, ConnectionLost)
            if not is_temporary or time.monotonic() + pause_s >= end:
                break
            time.sleep(pause_s)
        raise self._error(problem)

    def _error(self, problem: str) -> RetrievalError:
        service = f"the retrieval service {self.url} (SEARCHQA_RETRIEVAL_URL)"
        return RetrievalError(f"{service}: {' '.join(problem.split())}")


def _scored_of(document: dict[str, Any]) -> Scored:
    """Read {"document": {"id", "contents"}, "score"}, or a document without a score."""
    text = document.get("document", document)["contents"]
    return Scored(passage_of(-1, text), float(document.get("score", 0.0)))


# -------------------------------------------------------------------------- choice of the retriever


def open_retriever() -> BM25 | Remote:
    """The retriever that the environment variables choose. RetrievalError if they are wrong."""
    url = os.environ.get("SEARCHQA_RETRIEVAL_URL")
    method = os.environ.get("SEARCHQA_RETRIEVAL_METHOD") or ("remote" if url else "bm25")
    if method == "remote" and url:
        return Remote(url)
    if method == "bm25":
        return BM25(open_corpus(os.environ.get("SEARCHQA_CORPUS_PATH") or None))
    raise RetrievalError(
        f"SEARCHQA_RETRIEVAL_METHOD is {method!r}; choose bm25, or remote with a "
        "SEARCHQA_RETRIEVAL_URL (for retrieval by meaning, run Search-R1's own service)"
    )


# ----------------------------------------------------------------------------------------- service


class Body(BaseModel):
    """The body of POST /retrieve."""

    queries: list[StrictStr]
    topk: StrictInt | None = Field(None, ge=1)
    return_scores: StrictBool = False


def create_app(retriever: BM25, hosts: frozenset[str] = frozenset()) -> Starlette:
    """The app that serves `retriever`. It answers only requests whose Host header is in `hosts`;
    with an empty set it answers all."""

    async def health(_: Request) -> Answer:
        return Answer({"retriever": "BM25", "passages": len(retriever.corpus)})

    async def retrieve(request: Request) -> Response:
        try:
            body = Body.model_validate_json(await request.body())
        except ValidationError as error:
            first = error.errors()[0]
            field = ".".join(str(part) for part in first["loc"])
            hint = 'send {"queries": ["..."], "topk": 3, "return_scores": true}'
            return error_answer(422, f"{field}: {first['msg']}", hint)

        def search() -> list[list[dict]]:
            top_k = body.topk or DEFAULT_TOP_K
            results = [retriever.search(query, top_k) for query in body.queries]
            return [_documents(passages, body.return_scores) for passages in results]

        try:
            return Answer({"result": await run_in_threadpool(search)})
        except (OSError, ValueError) as error:  # for example a broken line of the corpus
            _log(str(error))
            return error_answer(500, str(error), "the operator of the service has to fix this")

    return Starlette(
        routes=[Route("/", health), Route("/retrieve", retrieve, methods=["POST"])],
        middleware=[Middleware(Guard, hosts=hosts, max_bytes=MAX_BODY_BYTES)],
    )


def _documents(passages: list[Scored], with_scores: bool) -> list[dict]:
    documents = [{"id": str(p.number), "contents": contents(p)} for p, _ in passages]
    if not with_scores:
        return documents
    scores = [score for _, score in passages]
    return [{"document": document, "score": score} for document, score in zip(documents, scores)]


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {PROGRAM}",
        description="Serve BM25 over SEARCHQA_CORPUS_PATH (or the Factbook) in Search-R1's format.",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to bind (default: 127.0.0.1)")
    parser.add_argument(
        "--port", type=int, default=8000, help="port; 0 picks a free one (default: 8000)"
    )
    options = parser.parse_args(arguments)
    if not 0 <= options.port < 65_536:
        parser.error(f"--port {options.port} is not a port; choose 0 to 65535")
    # SIGTERM while the index is built: a SystemExit removes the unfinished folder.
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
