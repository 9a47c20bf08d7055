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
import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
import unicodedata
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import anyio
import anyio.to_thread
import numpy as np
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, StrictBool, StrictInt, StrictStr
from starlette.exceptions import HTTPException

from envs.http import JSON_HEADERS, ExchangeError, Line, Lost, checked_url, parse
from envs.searchqa.corpus import Corpus, open_corpus
from envs.searchqa.text import Passage, contents, passage_of
from envs.server import Guard, hosts_of, leave, listen_on, serve
from envs.sessions import Answer, ApiError, error_answer
from run.files import ASIDE, build_folder, cache_dir, make_folder

TITLE_TIMES = 3
MAX_QUERY_WORDS = 64  # different known ones that count: a query of 100 kB must not cost seconds
MAX_QUERY_CHARS = 20_000  # read of one text: accents are taken off before words are counted
MAX_PASSAGES = 10_000  # in one answer of a service: some 10 MB
_WORD = re.compile(r"\w\w+")
_FORMAT = 1  # of the cache; another number whenever `words` changes
PROGRAM = "envs.searchqa.retrieval"
DEFAULT_TOP_K = 3
MAX_BODY_BYTES = 4_000_000


class RetrievalError(RuntimeError):
    """There are no passages, and it is not the query's fault; the message is one line."""


class Scored(NamedTuple):
    passage: Passage
    score: float  # higher is better


class Retriever(Protocol):
    def search(self, query: str, top_k: int) -> list[Scored]:
        """The best passages, the best first: `top_k`, or all of a smaller corpus."""


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
        bm25s = _bm25s()
        if not len(corpus):
            raise RetrievalError("the corpus has no passages")
        self.corpus = corpus
        # A search in a large corpus takes 4 bytes a passage, and a server has many sessions.
        self._at_once = threading.Semaphore(os.cpu_count() or 1)
        key = json.dumps([_FORMAT, corpus.fingerprint, bm25s.__version__])
        digest = hashlib.sha256(key.encode()).hexdigest()[:16]
        self.folder = cache_dir() / "searchqa" / f"bm25-{digest}"
        if not self.folder.is_dir():
            _build_once(self.folder, corpus)
        try:
            self._index = bm25s.BM25.load(self.folder, mmap=True, show_progress=False)
            num_indexed = self._index.scores["num_docs"]
        except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
            why = " ".join(str(error).split())
            raise RetrievalError(f"{self.folder} is damaged ({why}); delete it") from error
        if num_indexed != len(corpus):
            raise RetrievalError(
                f"{self.folder} indexes {num_indexed} passages, the corpus has {len(corpus)}; "
                "delete it"
            )

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


def best(scores: np.ndarray, top_k: int) -> np.ndarray:
    """Places of the highest scores, the highest first, equal ones in order of their place.

    >>> best(np.array([0.5, 2.0, 0.5, 0.5, 3.0]), top_k=3).tolist()
    [4, 1, 0]
    """
    top_k = min(top_k, len(scores))
    # Most passages share no word with a query, and a partition is slow among thousands of equal
    # zeros: look only at those above the minimum, if they are enough.
    places = np.flatnonzero(scores > scores.min())
    if len(places) < top_k:
        places = np.arange(len(scores))
    candidates = scores[places]
    least = np.partition(candidates, len(candidates) - top_k)[len(candidates) - top_k]
    above = np.flatnonzero(candidates > least)
    above = above[np.argsort(-candidates[above], kind="stable")]
    equal = np.flatnonzero(candidates == least)[: top_k - len(above)]
    return places[np.concatenate([above, equal])]


def _bm25s() -> Any:
    try:
        return import_module("bm25s")
    except ModuleNotFoundError as error:
        hint = "run `make setup ENV=searchqa`"
        raise RetrievalError(f"the package {error.name} is not installed; {hint}") from error


def _build_once(folder: Path, corpus: Corpus) -> None:
    """Build the index unless another process does: that one is waited for. Remains of a process
    that was killed are deleted first; for Wikipedia they are gigabytes."""
    make_folder(folder.parent)
    lock = folder.with_suffix(".lock")
    with lock.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("another process indexes the corpus; this one waits for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        for remains in folder.parent.glob(f"{ASIDE}*-{folder.name}"):
            shutil.rmtree(remains, ignore_errors=True)
        try:
            if not folder.is_dir():
                build_folder(folder, lambda new: _build(corpus, new))
        finally:
            lock.unlink(missing_ok=True)


def _build(corpus: Corpus, new: Path) -> None:
    """Write the index of `corpus` to the folder `new`."""
    vocabulary: dict[str, int] = {}
    lengths = np.zeros(len(corpus), np.int64)
    said = time.monotonic()
    with (new / "ids").open("wb") as file:
        for number in range(len(corpus)):
            _, title, text = corpus[number]
            passage_words = words(title) * TITLE_TIMES + words(text)
            ids = [vocabulary.setdefault(word, len(vocabulary)) for word in passage_words]
            file.write(np.array(ids, np.int32).tobytes())
            lengths[number] = len(ids)
            if time.monotonic() > said + 10:
                said = time.monotonic()
                _say(f"indexing the corpus: {100 * number // len(corpus)} % read")
    if not vocabulary:
        raise RetrievalError("no passage of the corpus has a word")
    documents = _Documents(new / "ids", lengths)
    index = _bm25s().BM25()
    index.scores = index.build_index_from_ids(
        range(len(vocabulary)), documents, show_progress=False
    )
    index.vocab_dict = vocabulary
    index.save(new, show_progress=False)
    (new / "ids").unlink()


class _Documents:
    """The words of each passage as numbers, read from a file, so that they need no memory: bm25s
    goes through them three times."""

    def __init__(self, path: Path, lengths: np.ndarray) -> None:
        self._path, self._lengths = path, lengths

    def __len__(self) -> int:
        return len(self._lengths)

    def __iter__(self) -> Iterator[list[int]]:
        with self._path.open("rb") as file:
            for length in self._lengths.tolist():
                yield np.frombuffer(file.read(4 * length), np.int32).tolist()


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
        try:
            self.url = checked_url(url, "SEARCHQA_RETRIEVAL_URL").removesuffix("/retrieve")
        except ValueError as error:
            raise RetrievalError(str(error)) from error
        self._timeout_s = timeout_s
        self._line = Line(self.url, timeout_s, max_bytes)

    def search(self, query: str, top_k: int) -> list[Scored]:
        body = json.dumps({"queries": [query], "topk": top_k, "return_scores": True})
        answer = self._ask(body.encode())
        try:
            (documents,) = parse(answer)["result"]
            passages = [_scored_of(document) for document in documents]
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            got = answer[:200].decode(errors="replace")
            raise self._error(f"the answer is not Search-R1's ({error!r}): {got!r}") from error
        if len(passages) < top_k:
            raise self._error(f"asked for {top_k} passages, got {len(passages)}")
        return passages[:top_k]

    def _ask(self, body: bytes) -> bytes:
        """The body of the answer, whose status is 200."""
        end = time.monotonic() + self._timeout_s
        for pause_s in (*self.PAUSES_S, self._timeout_s):
            remaining_s = end - time.monotonic()
            try:
                answer = self._line.ask("POST", "/retrieve", body, JSON_HEADERS, remaining_s)
                if answer.status == 200:
                    return answer.body
                problem = f"HTTP {answer.status}: {answer.text[:200]}"
                if answer.status < 500:
                    break
            except ExchangeError as error:
                problem = str(error)
                if not isinstance(error, Lost):
                    break
            if time.monotonic() + pause_s >= end:
                break
            time.sleep(pause_s)
        raise self._error(problem)

    def _error(self, problem: str) -> RetrievalError:
        where = f"the retrieval service {self.url} (SEARCHQA_RETRIEVAL_URL)"
        return RetrievalError(f"{where}: {' '.join(problem.split())}")


def _scored_of(document: dict[str, Any]) -> Scored:
    """{"document": {"id", "contents"}, "score"} of an answer, or a document without its score."""
    inner = document.get("document", document)
    number, text = str(inner.get("id", "")), inner["contents"]
    if not isinstance(text, str):
        raise TypeError("contents is not a string")
    # A corpus may call its lines something else.
    place = int(number) if number.isascii() and number.isdigit() and len(number) < 19 else -1
    return Scored(passage_of(place, text), float(document.get("score", 0.0)))


# ------------------------------------------------------------------------------------------- which


def open_retriever(settings: Mapping[str, str] = os.environ) -> Retriever:
    """The retriever that the environment variables (or `settings`) name.

    Raises:
        RetrievalError: there is no such method, or it cannot be had.
    """
    url = settings.get("SEARCHQA_RETRIEVAL_URL")
    method = settings.get("SEARCHQA_RETRIEVAL_METHOD") or ("remote" if url else "bm25")
    if method == "remote":
        if not url:
            raise RetrievalError("SEARCHQA_RETRIEVAL_METHOD=remote needs SEARCHQA_RETRIEVAL_URL")
        return Remote(url)
    if method != "bm25":
        raise RetrievalError(
            f"SEARCHQA_RETRIEVAL_METHOD is {method!r}; choose bm25 or remote (retrieval by meaning "
            "is a remote service: Search-R1's own server)"
        )
    return BM25(open_corpus(settings.get("SEARCHQA_CORPUS_PATH") or None))


# -------------------------------------------------------------------------------- the service


class Body(BaseModel):
    """Of POST /retrieve."""

    queries: list[StrictStr]
    topk: StrictInt | None = None
    return_scores: StrictBool = False


def create_app(retriever: Retriever, hosts: frozenset[str] = frozenset()) -> FastAPI:
    """The app that serves `retriever` to requests for these hosts; none: any."""
    app = FastAPI(title="Retrieval in Search-R1's format")
    app.add_middleware(Guard, hosts=hosts, max_bytes=MAX_BODY_BYTES)
    # As many searches at once as there are cores: one in a large corpus takes 4 bytes a passage.
    at_once = anyio.CapacityLimiter(os.cpu_count() or 1)

    @app.get("/")
    async def health() -> Answer:
        corpus = getattr(retriever, "corpus", None)  # a Remote has none
        num_passages = None if corpus is None else len(corpus)
        return Answer({"retriever": type(retriever).__name__, "passages": num_passages})

    @app.post("/retrieve")
    async def retrieve(body: Body) -> Answer:
        top_k = DEFAULT_TOP_K if body.topk is None else body.topk
        if top_k < 1:
            raise ApiError(422, f"topk is {top_k}", "ask for one passage or more")
        if len(body.queries) * top_k > MAX_PASSAGES:
            asked = f"{len(body.queries)} queries with {top_k} passages each"
            raise ApiError(422, asked, f"ask for at most {MAX_PASSAGES} passages at once")

        def search() -> list[list[dict]]:
            return [
                _documents(retriever.search(query, top_k), body.return_scores)
                for query in body.queries
            ]

        return Answer({"result": await anyio.to_thread.run_sync(search, limiter=at_once)})

    _add_error_handlers(app)
    return app


def _documents(passages: list[Scored], with_scores: bool) -> list[dict]:
    documents = [{"id": str(each.number), "contents": contents(each)} for each, _ in passages]
    if not with_scores:
        return documents
    scores = [score for _, score in passages]
    return [{"document": each, "score": score} for each, score in zip(documents, scores)]


def _add_error_handlers(app: FastAPI) -> None:
    """Every error leaves as {"error", "hint"}."""

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Answer:
        return error_answer(error.status, error.error, error.hint)

    @app.exception_handler(RetrievalError)
    @app.exception_handler(ValueError)  # a broken line of the corpus
    async def search_failed(_: Request, error: Exception) -> Answer:
        print(f"{PROGRAM}: {error}", file=sys.stderr, flush=True)
        return error_answer(500, str(error), "the service's operator has to repair this")

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> Answer:
        problems = [
            f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}"
            for item in error.errors()
        ]
        hint = 'send {"queries": ["..."], "topk": 3, "return_scores": true}'
        return error_answer(422, "; ".join(problems[:5]), hint)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Answer:
        status = 422 if error.status_code == 400 else error.status_code  # 400: not JSON at all
        where = f"{request.method} {request.url.path}: {error.detail}"
        return error_answer(status, where, "POST /retrieve searches, GET / says what in")


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {PROGRAM}",
        description="Serve retrieval in Search-R1's format; environment variables choose the "
        "retriever, see envs/searchqa/README.md.",
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
            retriever = open_retriever()
            app = create_app(retriever, hosts_of(options.host))
            about = f"retriever {type(retriever).__name__}"
            return serve(app, options.host, listener, PROGRAM, about)
    except (OSError, ImportError, RuntimeError, ValueError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    leave(main())
