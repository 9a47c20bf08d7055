"""Our questions: facts of the World Factbook, asked for in one step, two or three.

    one hop       What is the currency of Kenya?
    bridge        What is the currency of the country whose capital is Nairobi?
    border        ... of the country with which Kenya shares its longest land border?
    three hops    ... of the country with which the country whose capital is Nairobi shares its ...?
    comparison    Which has the larger population, Kenya or Chad?

A question is kept if it has one reading and can be answered by searching:
    - what makes a country known (a capital, a date) occurs in that field of no other page, and
      nothing much like it does; and it does not give the country away ("Rwanda nziza");
    - the answer does not stand in the question;
    - no passage that shows the bridge holds the answer too, and the bridge's name is none;
    - for each step of the plan there is a query whose first three passages, by BM25, show what the
      step looks for under its label on the page of the step's country.
Its countries are all for training or all for testing (three in ten, by a hash of their code): no
training question asks about a country that a test question asks about.

No answer is that of many questions: without searching, "China" must not be a good guess. Where
there are more questions than wanted, a hash decides which are kept, so that the file is the same on
every machine. Write it again:  python -m envs.searchqa --write-questions

Read next: envs/searchqa/questions.py, which reads them.
"""

import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from pathlib import Path

from envs.searchqa import wording
from envs.searchqa.corpus import factbook_corpus
from envs.searchqa.facts import Country, countries, occurs
from envs.searchqa.known import PlannedStep, bordering, known_as, neighbor
from envs.searchqa.questions import KINDS, OWN_FILE
from envs.searchqa.text import exact_match, normalize
from run import files

TEST_SHARE = 3  # of 10
TOP_K = 3
MOST = {  # questions of a kind, (train, test)
    "one hop": (1400, 680),
    "bridge": (1500, 600),
    "border": (700, 250),
    "three hops": (180, 80),
    "comparison": (280, 120),
}
SAME_ANSWER = 0.012  # of the questions of a kind and split have the same answer, or three of them
RATIO = 1.25  # of two compared figures, at least
# Asked for by what tells much the same.
TOO_NEAR = {
    ("independence", "holiday_date"),
    ("independence", "ruler"),
    ("holiday", "holiday_date"),
    ("former", "local"),
    ("local", "former"),
}
HOPS = ("bridge", "border", "three hops")
NUM_QUERIES = 2  # kept of each step


@dataclass(frozen=True)
class Draft:
    question: str
    golden_answers: tuple[str, ...]
    kind: str
    field: str
    countries: tuple[Country, ...]  # all that it asks about
    steps: tuple[PlannedStep, ...]
    finds: tuple[str, ...]  # of each step, "" if it is the first golden answer

    @property
    def split(self) -> str:
        """ "train", "test", or "" if it mixes them."""
        splits = {split_of(country) for country in self.countries}
        return splits.pop() if len(splits) == 1 else ""


def write_questions(path: Path = OWN_FILE) -> dict[str, int]:
    """Writes the file; returns how many questions of each kind it holds."""
    drafts = chosen()
    files.write_text(path, "".join(f"{_line(draft)}\n" for draft in drafts))
    return dict(Counter(draft.kind for draft in drafts))


@cache
def chosen() -> tuple[Draft, ...]:
    """The questions of the file, in its order: by kind, then training before test."""
    groups: dict[tuple[str, str], list[Draft]] = defaultdict(list)
    for draft in answerable(all_drafts()):
        groups[draft.kind, draft.split].append(draft)
    return tuple(
        draft
        for kind in KINDS
        for most, split in zip(MOST[kind], ("train", "test"))
        for draft in _some(groups[kind, split], most)
    )


def _some(drafts: Iterable[Draft], most: int) -> list[Draft]:
    counts: Counter[str] = Counter()
    kept: list[Draft] = []
    for draft in sorted(drafts, key=lambda draft: _hash(draft.question)):
        answer = normalize(draft.golden_answers[0])
        if counts[answer] < max(3, SAME_ANSWER * most) and len(kept) < most:
            counts[answer] += 1
            kept.append(draft)
    return kept


def _line(draft: Draft) -> str:
    """Opens with kind and split, which questions.py reads without parsing the rest."""
    plan = [
        {"queries": step.queries} | ({"finds": [finds]} if finds else {})
        for step, finds in zip(draft.steps, draft.finds)
    ]
    entry = {
        "kind": draft.kind,
        "split": draft.split,
        "question": draft.question,
        "golden_answers": draft.golden_answers,
        "plan": plan,
    }
    return json.dumps(entry, ensure_ascii=False, separators=(",", ":"))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def split_of(country: Country) -> str:
    """ "train" or "test", by its two-letter code."""
    share = int(_hash(f"searchqa {country.code}"), 16) % 10
    return "test" if share < TEST_SHARE else "train"


# Drafts.


def all_drafts() -> Iterator[Draft]:
    """Every question that keeps the rules, but for those that need the corpus."""
    for draft in (*_one_hop(), *_bridges(), *_borders(), *_three_hops(), *_comparisons()):
        asked = draft.question.replace("?", "")
        golden = tuple(answer for answer in draft.golden_answers if not occurs(answer, asked))
        all_hidden = len(golden) == len(draft.golden_answers)
        golden = _beyond_bridge(draft, golden)
        # "Mount Kenya" has a right form that stands in its question; of two hops that is a hint.
        is_hint = draft.kind != "one hop" and not all_hidden
        if not draft.split:
            continue
        if draft.kind == "comparison":
            yield draft
        elif not is_hint and golden[:1] == draft.golden_answers[:1]:
            yield replace(draft, golden_answers=golden)


def _beyond_bridge(draft: Draft, golden: tuple[str, ...]) -> tuple[str, ...]:
    """What takes the last hop: who found only the country must not be paid for its name. ("Mount
    Kenya, or Kenya". A code or a former name that is also a name is the answer all the same.)"""
    if draft.kind not in HOPS or draft.field in ("code", "former"):
        return golden
    return tuple(each for each in golden if not exact_match(each, draft.countries[-1].names))


def _asked(
    country: Country,
    phrase: str,
    kind: str,
    before: Sequence[PlannedStep] = (),
    finds: Sequence[str] = (),
    known_by: str = "",
) -> Iterator[Draft]:
    """Every fact of a country, which the question calls `phrase`."""
    asked_about = tuple(dict.fromkeys([*(step.country for step in before), country]))
    for field, answers in country.facts.items():
        if field == known_by or (known_by, field) in TOO_NEAR:
            continue
        words = wording.FIELDS[field]
        queries = tuple(f"{country.short} {topic}" for topic in words.topics)
        step = PlannedStep(country, words.label, queries, answers[0])
        yield Draft(
            words.question.format(phrase),
            answers,
            kind,
            field,
            asked_about,
            (*before, step),
            (*finds, ""),
        )


def _one_hop() -> Iterator[Draft]:
    for country in countries():
        yield from _asked(country, country.name, "one hop")


def _bridges() -> Iterator[Draft]:
    for country in countries():
        for field, phrase, step in known_as(country):
            yield from _asked(country, phrase, "bridge", [step], [country.title], field)


def _borders() -> Iterator[Draft]:
    for country in countries():
        border = neighbor(country)
        if border:
            other, step = border
            phrase = bordering(country, other, country.name)
            yield from _asked(other, phrase, "border", [step], [step.shows])


def _three_hops() -> Iterator[Draft]:
    for country in countries():
        border = neighbor(country)
        if not border:
            continue
        other, step = border
        for _, phrase, first in known_as(country):
            whole = bordering(country, other, phrase)
            yield from _asked(
                other, whole, "three hops", [first, step], [country.title, step.shows]
            )


def _comparisons() -> Iterator[Draft]:
    for field, words in wording.COMPARED.items():
        for pair in combinations([each for each in countries() if field in each.numbers], 2):
            (one, _), (two, _) = (country.numbers[field] for country in pair)
            if (
                max(one, two) < RATIO * min(one, two)
                or _hash(f"{field} {pair[0].code} {pair[1].code}") > "04"
            ):
                continue
            first, second = pair if _hash(pair[0].code + field + pair[1].code) < "8" else pair[::-1]
            winner = pair[0] if one > two else pair[1]
            steps = tuple(
                PlannedStep(
                    country,
                    words.label,
                    tuple(f"{country.short} {topic}" for topic in words.topics),
                    country.numbers[field][1],
                )
                for country in (first, second)
            )
            name = re.sub("^the ", "", winner.name)
            yield Draft(
                f"Which {words.question}, {first.name} or {second.name}?",
                tuple(dict.fromkeys([name, *winner.names])),
                "comparison",
                field,
                (first, second),
                steps,
                tuple(step.shows for step in steps),
            )


# What the corpus can answer.


@cache
def pages() -> dict[str, tuple[tuple[int, str], ...]]:
    """Country's title -> its passages, (number, text)."""
    found = defaultdict(list)
    for number, title, text in factbook_corpus():
        found[title.rsplit(" - ", 1)[0]].append((number, text))
    return {title: tuple(passages) for title, passages in found.items()}


@cache
def showing(step: PlannedStep) -> set[int]:
    """The passages that show what a step looks for."""
    return {
        number
        for number, text in pages()[step.country.title]
        if step.label in text and occurs(step.shows, text.partition(step.label)[2])
    }


def answerable(drafts: Iterable[Draft]) -> Iterator[Draft]:
    """Those whose every step has a query that works; such a query comes first."""
    kept = list(drafts)
    steps = list(dict.fromkeys(step for draft in kept for step in draft.steps))
    works = working_steps(steps)
    for draft in kept:
        if all(step in works for step in draft.steps) and not is_seen_at_once(draft):
            yield replace(draft, steps=tuple(works[step] for step in draft.steps))


def is_seen_at_once(draft: Draft) -> bool:
    """Whether a passage that shows the last bridge holds the answer too, under its label or
    elsewhere ("largest concentration is Willemstad"): that is one hop."""
    if draft.kind not in HOPS:
        return False
    bridge, last = draft.steps[-2:]
    texts = dict(pages()[bridge.country.title])
    return any(occurs(last.shows, texts[number]) for number in showing(bridge))


def working_steps(steps: Sequence[PlannedStep]) -> dict[PlannedStep, PlannedStep]:
    """Step -> the same with the first query that works in front; those without one are missing."""
    from envs.searchqa.retrieval import BM25

    retriever = BM25(factbook_corpus())
    works: dict[PlannedStep, PlannedStep] = {}
    places = {step: showing(step) for step in steps}
    for turn in range(max(len(step.queries) for step in steps)):
        left = [
            step
            for step in steps
            if step not in works and places[step] and turn < len(step.queries)
        ]
        found = retriever.search([step.queries[turn] for step in left], TOP_K)
        for step, passages in zip(left, found):
            if places[step] & {passage.number for passage in passages}:
                best = step.queries[turn]
                others = sorted((query for query in step.queries if query != best), key=len)
                works[step] = replace(step, queries=(best, *others)[:NUM_QUERIES])
    return works
