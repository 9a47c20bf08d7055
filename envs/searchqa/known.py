"""How a question can name a country without its name: by what is true of no other, or by a border.

    known_as(Kenya)   "the country whose capital is Nairobi", "the country formerly known as ..."
    neighbor(Kenya)   Ethiopia, with which it shares its longest land border

Each comes with the search that a plan needs for it.

Read next: envs/searchqa/generate.py.
"""

import re
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache

from envs.searchqa import aliases, wording
from envs.searchqa.facts import Country, countries, occurs, raw
from envs.searchqa.readers import without_accents
from envs.searchqa.text import normalize

ALIKE = 0.8  # SequenceMatcher's ratio from which two values could be taken for each other
NEAR_NAME = 0.65  # the same of a word and a word of the country's names: it gives it away
MARGIN = 1.03  # of the longest border over the second


@dataclass(frozen=True)
class PlannedStep:
    """A search for `shows` under the field's label on the page of `country`."""

    country: Country
    label: str
    queries: tuple[str, ...]
    shows: str


@cache
def known_as(country: Country) -> tuple[tuple[str, str, PlannedStep], ...]:
    """(field, "the country whose capital is Nairobi", the search for it), ..."""
    kind = "territory" if country.is_territory else "country"
    known = []
    for field, answers in country.facts.items():
        words = wording.FIELDS[field]
        value = answers[0]
        if not words.clause or gives_away(country, field) or not is_alone(country, field):
            continue
        if field == "symbol" and value[0].isupper():
            continue  # "the Mount Triglav"
        shown = value
        if field == "currency":  # "pula", not "pulas"
            units = (each for each in answers[1:] if " " not in each and not each.isupper())
            shown = next(units, value)
        if field == "former" and re.search(wording.NEEDS_ARTICLE, shown):
            shown = f"the {shown}"
        clause = words.clause.format(shown)
        queries = (
            f"{words.topics[0]} {value}",
            f"{value} {words.topics[1]}",
            f"{kind} {clause}",
        )
        step = PlannedStep(country, words.label, queries, value)
        known.append((field, f"the {kind} {clause}", step))
    return tuple(known)


def gives_away(country: Country, field: str) -> bool:
    """Whether a value is much like the name of the country, or of its people."""
    said = without_accents(country.facts[field][0]).lower()
    return any(
        word[:4] == other[:4] or SequenceMatcher(None, word, other).ratio() > NEAR_NAME
        for word in re.findall(r"[a-z]{4,}", said)
        for other in country.words
    )


def is_alone(country: Country, field: str) -> bool:
    """Whether no other page has the value in the field, or one much like it."""
    value = country.facts[field][0]
    others = [text for code, text in raw(field).items() if code != country.code]
    if field in ("code", "prefix", "independence"):  # short, or a date: alike says nothing
        return not any(occurs(value, text) for text in others)
    told = [
        word
        for word in normalize(value).split()
        if len(word) > 3 and word.title() not in aliases.PEAKS
    ]
    if field in ("highest", "symbol", "currency") and not told:
        return False
    for text in others:
        if any(occurs(answer, text) for answer in country.facts[field]):
            return False
        if field in ("highest", "symbol") and any(occurs(word, text) for word in told):
            return False
    closed = normalize(value).replace(" ", "")
    return not any(_is_like(closed, part) for text in others for part in _parts(text))


@cache
def _parts(text: str) -> tuple[str, ...]:
    return tuple(
        normalize(part).replace(" ", "") for part in re.split(r'[;,()"]| \d', text) if part
    )


@cache
def _is_like(one: str, two: str) -> bool:
    matcher = SequenceMatcher(None, one, two, autojunk=False)
    return (
        matcher.real_quick_ratio() > ALIKE
        and matcher.quick_ratio() > ALIKE
        and matcher.ratio() > ALIKE
    )


@cache
def neighbor(country: Country) -> tuple[Country, PlannedStep] | None:
    """With whom a country has its longest border, and the search for it."""
    if not country.borders or country.code in ("fr", "nl"):  # with theirs far away, or without?
        return None
    (name, longest), *others = country.borders
    title = aliases.WRITTEN.get(name, name)
    other = next((each for each in countries() if each.title == title), None)
    if other is None or (others and longest < MARGIN * others[0][1]):
        return None
    queries = tuple(f"{country.short} {topic}" for topic in wording.BORDER.topics)
    return other, PlannedStep(country, wording.BORDER.label, queries, name)


def bordering(country: Country, other: Country, name: str) -> str:
    kind = "territory" if other.is_territory else "country"
    sentence = wording.LONGEST_BORDER if len(country.borders) > 1 else wording.ONLY_BORDER
    return sentence.format(kind=kind, name=name)
