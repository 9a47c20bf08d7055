"""The retriever that asks another process, in Search-R1's format, so that servers share one index.

    POST /retrieve  {"queries": ["flag of Kenya"], "topk": 3, "return_scores": true}
    -> {"result": [[{"document": {"id": "7", "contents": "\\"Kenya\\"\\nA.."}, "score": 9.1}, ..]]}

The service may be somebody else's, so its answer is bounded and checked before it is used. One that
lacks passages is refused as well: a policy that looks things up in nothing would be scored.

Read next: envs/searchqa/service.py, the other end.
"""

import json
import time
from collections.abc import Sequence
from typing import Any

from envs.http import JSON_HEADERS, ExchangeError, Line, Lost, checked_url, parse
from envs.searchqa.ranking import QueryError, RetrievalError, Retriever, Scored
from envs.searchqa.text import Passage, passage_of

MAX_PASSAGES = 10_000  # in one answer: some 10 MB


def contents(passage: Passage) -> str:
    """A passage as a line of Search-R1's corpus holds it.

    >>> contents(Passage(0, "Kenya", "A republic."))
    '"Kenya"\\nA republic.'
    """
    if not passage.title and "\n" not in passage.text:
        return passage.text
    return f'"{passage.title}"\n{passage.text}'


class Remote(Retriever):
    """Passages from a service that speaks Search-R1's format.

    A lost connection and a 5xx are repeated for a few seconds: a search changes nothing.

    Args:
        url: http://HOST:PORT; a final /retrieve may stand there.
        timeout_s: the longest that one search may take, repetitions included.
        max_bytes: of one answer.
    Raises:
        RetrievalError: `url` is no address.
    """

    PAUSES_S = (0.2, 0.5, 1.0, 2.0)  # before each repetition
    # All that wait, so that nobody waits for more than two searches, the one under way and its own:
    # 50 s at most, less than a client waits for its step.
    MAX_BATCH = 4096

    def __init__(self, url: str, timeout_s: float = 25.0, max_bytes: int = 16 << 20) -> None:
        try:
            self.url = checked_url(url, "SEARCHQA_RETRIEVAL_URL").removesuffix("/retrieve")
        except ValueError as error:
            raise RetrievalError(str(error)) from error
        self._timeout_s = timeout_s
        self._line = Line(self.url, timeout_s, max_bytes)

    def scored(self, queries: Sequence[str], top_k: int) -> list[list[Scored]]:
        """As `Retriever.scored`; an answer that is not what was asked for is a RetrievalError."""
        size = max(1, MAX_PASSAGES // top_k)
        parts = [queries[start : start + size] for start in range(0, len(queries), size)]
        return [found for part in parts for found in self._scored(part, top_k)]

    def _scored(self, queries: Sequence[str], top_k: int) -> list[list[Scored]]:
        body = json.dumps({"queries": list(queries), "topk": top_k, "return_scores": True})
        answer = self._ask(body.encode())
        try:
            result = parse(answer)["result"]
            lists = [[_scored_of(document) for document in found] for found in result]
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            got = answer[:200].decode(errors="replace")
            raise self._error(f"the answer is not Search-R1's ({error!r}): {got!r}") from error
        shortest = min(map(len, lists), default=0)
        if len(lists) != len(queries) or shortest < top_k:
            lacking = self._error(
                f"asked for {top_k} passages for each of {len(queries)} queries, got {len(lists)} "
                f"lists, the shortest of {shortest}"
            )
            is_of_some = len(lists) == len(queries) and max(map(len, lists)) >= top_k
            raise QueryError(str(lacking)) if is_of_some else lacking
        return [found[:top_k] for found in lists]

    def _ask(self, body: bytes) -> bytes:
        """The body of the answer, whose status is 200."""
        end = time.monotonic() + self._timeout_s
        for pause_s in (*self.PAUSES_S, self._timeout_s):
            left_s = end - time.monotonic()
            try:
                answer = self._line.ask("POST", "/retrieve", body, JSON_HEADERS, left_s)
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
        raise TypeError("contents is no string")
    # A corpus may call its lines something else.
    place = int(number) if number.isascii() and number.isdigit() and len(number) < 19 else -1
    return Scored(passage_of(place, text), float(document.get("score", 0.0)))
