"""The World Factbook as facts: what regular expressions find in its fields, where they find all.

    "Capital": "Tripoli (Tarabulus)"                 capital   Tripoli, or Tarabulus
    "Currency": "Kenyan shillings (KES) per ..."     currency  Kenyan shillings, or Kenyan shilling,
                                                               or shilling, or KES
    "border countries": "Ethiopia 867 km; ..."       borders   (Ethiopia, 867), ...

A fact is its answers: first the form in which the corpus has it, then what else is right. Better no
fact than a wrong one: a field that says more than one thing (two capitals, a date with a second one
behind it, an anthem beside another) gives none. So do pages of places where nobody lives.

Read next: envs/searchqa/aliases.py, envs/searchqa/generate.py.
"""

import re
from dataclasses import dataclass
from functools import cache
from typing import Any

from envs.searchqa import aliases
from envs.searchqa.corpus import plain, read_book, title_of
from envs.searchqa.readers import (
    READERS,
    Fact,
    with_own_unit,
    without_accents,
    without_repeats,
)
from envs.searchqa.text import normalize

# Field -> where a page has it.
PATHS = {
    "capital": "Government/Capital/name",
    "code": "Communications/Internet country code",
    "demonym": "People and Society/Nationality/noun",
    "currency": "Economy/Exchange rates/Currency",
    "highest": "Geography/Elevation/highest point",
    "prefix": "Transportation/Civil aircraft registration country code prefix",
    "independence": "Government/Independence",
    "ruler": "Government/Independence",
    "holiday": "Government/National holiday",
    "holiday_date": "Government/National holiday",
    "anthem": "Government/National anthem(s)/title",
    "former": "Government/Country name/former",
    "symbol": "Government/National symbol(s)",
    "buyer": "Economy/Exports - partners",
    "supplier": "Economy/Imports - partners",
    "export": "Economy/Exports - commodities",
    "local": "Government/Country name/local short form",
}
NUMBER_PATHS = {
    "area": "Geography/Area/total ",
    "population": "People and Society/Population/total",
    "coastline": "Geography/Coastline",
    "airports": "Transportation/Airports",
    "age": "People and Society/Median age/total",
}
ADJECTIVE = "People and Society/Nationality/adjective"
BORDERS = "Geography/Land boundaries/border countries"

WRITTEN_ONE_WAY = ("code", "prefix")  # others too as "Port au Prince", "St. George's"

# Nobody lives there, or the page is about more than one place.
SKIPPED = set("at ax ay bq bv cr dx ee fs hm ip jn pf pg sv sx um wq xx".split())


@dataclass(frozen=True, eq=False)  # there is one of each
class Country:
    code: str
    title: str  # in the titles of its passages
    name: str  # in a sentence: "the Gambia"
    is_territory: bool
    words: frozenset[str]  # that give it away: of its names and its people's
    facts: dict[str, Fact]
    borders: tuple[tuple[str, float], ...]  # (neighbor as written, km)
    numbers: dict[str, tuple[float, str]]  # field -> (value, as written)

    @property
    def names(self) -> Fact:
        """By which its passages or its neighbors' know it."""
        return without_repeats([self.title, *aliases.COUNTRIES.get(self.title, ())])

    @property
    def short(self) -> str:
        """In a query."""
        return re.sub(r" \(.*\)$", "", self.title) if self.code != "cf" else "Congo Brazzaville"


@cache
def countries() -> tuple[Country, ...]:
    """Every country and territory that questions may be about, by its code."""
    return tuple(_country(code, page) for code, page in read_book().items() if code not in SKIPPED)


@cache
def raw(field: str) -> dict[str, str]:
    """Code -> what the book's page has in a field, on all pages."""
    path = {**PATHS, **NUMBER_PATHS, "borders": BORDERS}[field]
    return {code: text for code, page in read_book().items() if (text := at(page, path))}


def at(page: dict[str, Any], path: str) -> str:
    """The plain text of a field, "" if the page has none."""
    value: Any = page
    for key in path.split("/"):
        value = value.get(key, {}) if isinstance(value, dict) else {}
    return plain(value.get("text", "")) if isinstance(value, dict) else ""


def occurs(answer: str, text: str) -> bool:
    """Whether the words of an answer follow each other in a text, both normalised.

    >>> occurs("Kenyan shillings", "Currency: Kenyan shillings (KES)"), occurs("la", "Lagos")
    (True, False)
    """
    return f" {normalize(answer)} " in f" {normalize(text)} "


def _country(code: str, page: dict[str, Any]) -> Country:
    title = title_of(code, page)
    short = re.sub(r" \(.*\)$", "", title).replace("The ", "")
    facts: dict[str, Fact] = {}
    for field, path in PATHS.items():
        text = at(page, path)
        found = READERS[field](code, text) if text else ()
        if found:
            more = [*aliases.ANSWERS.get(found[0], ()), *map(without_accents, found)]
            if field not in WRITTEN_ONE_WAY:
                more += [re.sub("[-/]", " ", form) for form in found]
                more += [form.replace("Saint ", "St. ") for form in found]
            forms = without_repeats([*found, *more])
            # The first is one that the corpus has: a part in brackets may stand inside the name.
            first = next((form for form in forms if occurs(form, text)), forms[0])
            facts[field] = without_repeats([first, *forms])
    names = page["Government"]["Country name"]
    adjective = at(page, ADJECTIVE)
    if "currency" in facts:
        people = at(page, PATHS["demonym"])
        facts["currency"] = with_own_unit(facts["currency"], adjective, people, short)
    told = [title, adjective, at(page, PATHS["demonym"])]
    told += [plain(part["text"]) for key, part in names.items() if key.startswith("conventional")]
    told += [at(page, PATHS["local"])] if "local" not in facts else []
    words = without_accents(" ".join(told)).lower()
    read = {field: read_number(at(page, path)) for field, path in NUMBER_PATHS.items()}
    return Country(
        code,
        title,
        f"the {short}" if short in aliases.WITH_ARTICLE or short.endswith("Islands") else short,
        at(page, PATHS["independence"]).startswith("none")
        or bool(at(page, "Government/Dependency status"))
        or code in ("gz", "we", "wi"),
        frozenset(re.findall(r"[a-z]{4,}", words)) - aliases.TELL_NOTHING,
        facts,
        read_borders(at(page, BORDERS)),
        {field: number for field, number in read.items() if number},
    )


def read_borders(text: str) -> tuple[tuple[str, float], ...]:
    """
    >>> read_borders("Spain (Ceuta) 8 km and Spain (Melilla) 10.5 km; Algeria 1941 km")
    (('Algeria', 1941.0), ('Spain', 18.5))
    """
    lengths: dict[str, float] = {}
    for name, km in re.findall(r"([A-Z][A-Za-z' -]*?)(?: \([^()]*\))? ([\d,.]+) km", text):
        lengths[name] = lengths.get(name, 0) + float(km.replace(",", ""))
    return tuple(sorted(lengths.items(), key=lambda border: (-border[1], border[0])))


def read_number(text: str) -> tuple[float, str] | None:
    """A number with its unit and nothing beside it but the year.

    >>> read_number("1.284 million sq km"), read_number("95 (2025)")
    ((1284000.0, '1.284 million sq km'), (95.0, '95'))
    """
    match = re.fullmatch(
        r"([\d,.]+)( million)?( sq km| km| years)?(?: \(20\d\d(?: est\.)?\))?", text
    )
    if not match:
        return None
    value = float(match[1].replace(",", "")) * (1_000_000 if match[2] else 1)
    return (value, f"{match[1]}{match[2] or ''}{match[3] or ''}") if value else None
