"""Was the task solved? String, URL, page content and database, as in WebArena."""

from collections.abc import Sequence
from typing import Any, Protocol


class Final(Protocol):
    """What an evaluator may look at when the episode has ended."""

    url: str  # of the current tab, as the policy sees it

    def read(self, url: str, locator: str) -> str:
        """The text at `locator` of the page at `url` ("last": the current page)."""

    def query(self, site: str, sql: str) -> Sequence[Sequence[Any]]:
        """Rows of a site's database, as this session sees it."""


def evaluate(evaluation: dict[str, Any], answer: str, final: Final) -> float:
    """The product of the evaluators in a task's "eval": 1.0 or 0.0.

    Ours is {"eval_types": ["database"], "database": [{"site", "sql", "expected": [[...]]}]}; the
    rows must be equal, in order.
    """
    raise NotImplementedError
