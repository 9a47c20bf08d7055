"""Retrieval: find the passages for a query, with BM25 in this process or through a service.

    BM25(passage) = Σ over the query's words of idf · tf / (tf + k1 (1 - b + b · length / mean))

where tf is the number of times that a word occurs in the passage, idf is Lucene's, k1 = 1.5 and
b = 0.75 (Robertson and Zaragoza, 2009). Words of the title count three times, because the text
often says only "it". The scores are cached and memory-mapped. Passages with equal scores keep the
order of the corpus, so a query without a known word gets the first passages. No query that a policy
writes causes an error.

Environment variables (envs/searchqa/README.md): SEARCHQA_RETRIEVAL_METHOD is bm25 or remote; the
default is remote if there is a URL. SEARCHQA_CORPUS_PATH names the corpus. SEARCHQA_RETRIEVAL_URL
is the address of a service in Search-R1's format, such as its own, which retrieves by meaning:

    POST /retrieve  {"queries": ["flag of Kenya"], "topk": 3, "return_scores": true}
                    -> {"result": [[{"document": {"id", "contents"}, "score"}, ..], ..]}
"""

import hashlib
import json
import os
import re
import sys
import threading
import time
import unicodedata
from array import array
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from envs.http import JSON_HEADERS, ConnectionLost, ExchangeError, HttpClient, checked_url, parse
from envs.searchqa.corpus import Corpus, open_corpus
from envs.searchqa.text import Passage, passage_of
from run.files import build_folder, cache_dir

TITLE_WEIGHT = 3
MAX_QUERY_WORDS = 64  # different known words; otherwise a query of 100 kB could take seconds
MAX_QUERY_CHARS = 20_000  # limits the work before words are counted, such as removing accents
_WORD = re.compile(r"\w\w+")
_FORMAT = 1  # version of the cache; increase it when `words` changes


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
