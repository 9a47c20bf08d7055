"""The oracle: a teacher that follows a question's plan and knows no more than it has been shown.

    What is the currency of the country whose anthem is "Ee Mungu Nguvu Yetu"?

            queries                                its passage must show
    step 1  anthem Ee Mungu Nguvu Yetu, ...        Kenya
    step 2  Kenya currency, ...                    Kenyan shilling

The plan names Kenya, but the oracle searches for it only once a passage of this episode named it:
imitating a teacher that knows more than it was told teaches guessing. A passage counts for a step
if its search has all words of one of the step's queries ("Kenya" in a passage about tea is no
anthem). What a search did not show is searched for in other words, until there are none left.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from envs import OracleLost
from envs.searchqa.questions import Question, Step
from envs.searchqa.text import Passage, normalize, written


class Search(NamedTuple):
    """What was searched for in an episode, and the passages as far as they were shown."""

    query: str
    passages: tuple[Passage, ...]


class Finding(NamedTuple):
    """Where a passage shows what a step looks for."""

    value: str
    place: int  # of the passage among those of its search, from 1
    search: Search

    def told(self, searches: Sequence[Search]) -> str:
        is_news = self.search is searches[-1]
        return f"Doc {self.place} shows {self.value}." if is_news else f"I found {self.value}."


def next_move(question: Question, searches: Sequence[Search], query_chars: int) -> tuple[str, str]:
    """A short thought (what was found, what is missing) and the next action.

    `searches` are those of the episode, each query cut to `query_chars`.
    """
    if not question.plan:
        raise OracleLost("this question has no plan; the oracle knows those of envs/searchqa alone")
    found: list[Finding] = []
    for planned in question.plan:
        queries = tuple(query[:query_chars] for query in planned.queries)
        step = planned._replace(queries=queries)
        finding = next(findings(step, searches), None)
        if finding is None:
            return _search_on(question, found, step, searches)
        found.append(finding)
    if question.kind == "comparison":  # of what was found, so that no passage holds the answer
        thought = " ".join(finding.told(searches) for finding in found)
        return f"{thought} I compare.", written("answer", question.golden_answers[0])
    return f"{found[-1].told(searches)} Nothing is missing.", written("answer", found[-1].value)


def _search_on(
    question: Question, found: Sequence[Finding], step: Step, searches: Sequence[Search]
) -> tuple[str, str]:
    tried = {normalize(search.query) for search in searches}
    queries = [query for query in step.queries if normalize(query) not in tried]
    if not queries:
        raise OracleLost(f"no search shows step {len(found) + 1} of {len(question.plan)}")
    missing = _missing(question, len(found))
    if len(queries) < len(step.queries):
        thought = f"The {missing} is still missing. I search in other words."
    elif found:
        thought = f"{found[-1].told(searches)} Now the {missing} is missing."
    else:
        thought = f"The {missing} is missing."
    return thought, written("search", queries[0])


def _missing(question: Question, num_found: int) -> str:
    """What a step looks for, as its thought calls it."""
    if question.kind == "comparison":
        return "second figure" if num_found else "first figure"
    if num_found + 1 == len(question.plan):
        return "answer"
    return "next country" if num_found else "country"


def findings(step: Step, searches: Sequence[Search]) -> Iterator[Finding]:
    """What the searches for a step have shown of what it looks for, its first name first."""
    needed = [_words(query) for query in step.queries]
    of_step = [
        search for search in searches if any(words <= _words(search.query) for words in needed)
    ]
    for value in step.finds:
        for search in of_step:
            shown = [
                (-_likeness(passage, search.query), place)
                for place, passage in enumerate(search.passages, start=1)
                if shows(passage, value)
            ]
            yield from (Finding(value, place, search) for _, place in sorted(shown))


def _likeness(passage: Passage, query: str) -> int:
    """How much a passage is about a query, so that a mention elsewhere is not shown for it."""
    asked = _words(query)
    return len(asked & _words(passage.title)) + len(asked & _words(passage.text))


def shows(passage: Passage, value: str) -> bool:
    """Whether a passage holds these words, one after the other.

    >>> shows(Passage(0, "Kenya - Economy", "Currency: Kenyan shillings (KES)"), "shilling")
    False
    """
    return any(f" {normalize(value)} " in f" {normalize(text)} " for text in passage[1:])


def _words(query: str) -> set[str]:
    return set(normalize(query).split())
