"""SearchQA's oracle, which follows a question's plan but uses only facts from shown passages.

    What is the currency of the country whose anthem is "Ee Mungu Nguvu Yetu"?

            queries                                a passage must show
    step 1  anthem Ee Mungu Nguvu Yetu, ...        Kenya
    step 2  Kenya currency, ...                    Kenyan shilling

The plan contains the name Kenya, but the oracle uses it only after a passage of this episode has
shown it. A policy that imitates an oracle with more knowledge would learn to guess. A passage
counts for a step only if the query that found it has all words of one of the step's queries:
"Kenya" in a passage about tea does not answer a question about an anthem. If a search does not show
the fact, the oracle tries the step's next query, until there are none left.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from envs import OracleLost
from envs.searchqa.questions import Question, Step
from envs.searchqa.text import Passage, normalize, write_tag


class Search(NamedTuple):
    """A search of the episode, with the passages as the policy saw them."""

    query: str
    passages: tuple[Passage, ...]


class Finding(NamedTuple):
    """A passage that shows a value that a step looks for."""

    value: str
    position: int  # of the passage in the results of its search, from 1
    search: Search

    def sentence(self, searches: Sequence[Search]) -> str:
        is_new = self.search is searches[-1]
        return f"Doc {self.position} shows {self.value}." if is_new else f"I found {self.value}."


def next_move(question: Question, searches: Sequence[Search], query_chars: int) -> tuple[str, str]:
    """A short thought (the latest finding, the missing fact) and the next action.

    `searches` are the searches of the episode; their queries were cut to `query_chars`.
    """
    if not question.plan:
        raise OracleLost("this question has no plan; only questions about the Factbook have one")
    facts: list[Finding] = []
    for plan_step in question.plan:
        queries = tuple(query[:query_chars] for query in plan_step.queries)
        step = plan_step._replace(queries=queries)
        finding = next(findings(step, searches), None)
        if finding is None:
            return _next_search(question, facts, step, searches)
        facts.append(finding)
    if question.kind == "comparison":  # the passages show the figures, but not the answer
        thought = " ".join(fact.sentence(searches) for fact in facts)
        return f"{thought} I compare.", write_tag("answer", question.golden_answers[0])
    thought = f"{facts[-1].sentence(searches)} Nothing is missing."
    return thought, write_tag("answer", facts[-1].value)


def _next_search(
    question: Question, facts: Sequence[Finding], step: Step, searches: Sequence[Search]
) -> tuple[str, str]:
    past_queries = {normalize(search.query) for search in searches}
    queries = [query for query in step.queries if normalize(query) not in past_queries]
    if not queries:
        raise OracleLost(f"no search shows step {len(facts) + 1} of {len(question.plan)}")
    missing_fact = _missing_fact(question, len(facts))
    if len(queries) < len(step.queries):
        thought = f"The {missing_fact} is still missing. I search in other words."
    elif facts:
        thought = f"{facts[-1].sentence(searches)} Now the {missing_fact} is missing."
    else:
        thought = f"The {missing_fact} is missing."
    return thought, write_tag("search", queries[0])


def _missing_fact(question: Question, num_facts: int) -> str:
    """The name of the fact that the next step looks for, for its thought."""
    if question.kind == "comparison":
        return "second figure" if num_facts else "first figure"
    if num_facts + 1 == len(question.plan):
        return "answer"
    return "next country" if num_facts else "country"


def findings(step: Step, searches: Sequence[Search]) -> Iterator[Finding]:
    """The passages that were found by a search for this step and show one of its values. Passages
    with the step's first value come first; among these, the passages that match their query
    best."""
    query_words = [_words(query) for query in step.queries]
    step_searches = [
        search for search in searches if any(words <= _words(search.query) for words in query_words)
    ]
    for value in step.finds:
        for search in step_searches:
            matches = [
                (-_overlap(passage, search.query), position)
                for position, passage in enumerate(search.passages, start=1)
                if shows(passage, value)
            ]
            yield from (Finding(value, position, search) for _, position in sorted(matches))


def _overlap(passage: Passage, query: str) -> int:
    """The number of query words in a passage. If it is high, the passage is probably about the
    query and does not only mention the value."""
    query_words = _words(query)
    return len(query_words & _words(passage.title)) + len(query_words & _words(passage.text))


def shows(passage: Passage, value: str) -> bool:
    """Whether a passage contains these words, one after the other.

    >>> shows(Passage(0, "Kenya - Economy", "Currency: Kenyan shillings (KES)"), "shilling")
    False
    """
    return any(f" {normalize(value)} " in f" {normalize(text)} " for text in passage[1:])


def _words(query: str) -> set[str]:
    return set(normalize(query).split())
