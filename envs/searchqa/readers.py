"""One field of the World Factbook -> its answers: a regular expression each.

    read_currency("ke", "Kenyan shillings (KES) per US dollar -")
    ('Kenyan shillings', 'Kenyan shilling', 'KES')

A reader takes a country's code and the field's plain text, and gives the answers, the book's own
form among them, or () where the text says more than one thing, or not clearly.

Read next: envs/searchqa/facts.py.
"""

import calendar
import re
import unicodedata
from collections.abc import Callable, Sequence

from envs.searchqa import aliases
from envs.searchqa.corpus import read_book, title_of
from envs.searchqa.text import normalize

Fact = tuple[str, ...]

# The package keeps one anthem of countries with two (Denmark), and often it is the royal one.
ROYAL_ANTHEMS = set("aa da gl lu no nn sw th".split())
# A capital that nobody governs from, or that the book itself does not settle.
UNSETTLED_CAPITALS = set("by bm ek is mh tl nr ho".split())


def names_of(written: str) -> Fact:
    """All names of a country that a table of the book calls so.

    >>> names_of("S. Korea")
    ('S. Korea', 'South Korea', 'Republic of Korea', 'Korea, South')
    """
    title = aliases.WRITTEN.get(written, written)
    return without_repeats([written, title, *aliases.COUNTRIES.get(title, ())])


def without_repeats(answers: Sequence[str]) -> Fact:
    """What differs after normalisation, in order.

    >>> without_repeats([".ke", "ke", "", "KE (Kenya)"])
    ('.ke', 'KE (Kenya)')
    """
    first: dict[str, str] = {}
    for answer in answers:
        if normalize(answer):
            first.setdefault(normalize(answer), answer)
    return tuple(first.values())


def without_accents(text: str) -> str:
    return "".join(c for c in unicodedata.normalize("NFD", text) if not unicodedata.combining(c))


def read_capital(code: str, text: str) -> Fact:
    if code in UNSETTLED_CAPITALS or re.search(r"capital|official|administer", text):
        return ()
    if code == "md":
        return ("Chisinau", "Kishinev", "Chișinău")
    text = text.split("; note")[0]
    if ";" in text:
        return ()
    name, _, inside = text.partition(" (")
    others = [] if re.search(r"\b(on|city)\b", inside) else re.split(r"[/,] ?", inside.strip(")"))
    if code == "up":
        others = ["Kiev"]
    return (name, *others)


def read_code(code: str, text: str) -> Fact:
    return (text,) if re.fullmatch(r"\.[a-z]{2}", text) else ()


def read_demonym(code: str, text: str) -> Fact:
    """
    >>> read_demonym("ke", "Kenyan(s)")
    ('Kenyans', 'Kenyan')
    >>> read_demonym("lt", "Mosotho (singular), Basotho (plural)")
    ('Basotho', 'Mosotho')
    """
    if code in ("tw", "wz", "wf", "hk", "mc", "sb", "cq"):
        return ()
    if code in aliases.IRREGULAR_PEOPLE:
        return aliases.IRREGULAR_PEOPLE[code]
    text = re.sub(r" \((US \w+|colloquial|singular and plural|collective plural)\)", "", text)
    pair = re.fullmatch(r"([\w-]+) \(singular\), ([\w-]+) \(plural\)", text)
    if pair:
        return pair[2], pair[1]
    forms = text.split(" or ")
    if text == "none" or not all(re.fullmatch(r"[\w' -]+(\(s\))?", form) for form in forms):
        return ()
    return tuple(
        variant
        for form in forms
        for variant in (
            (form.replace("(s)", "s"), form[:-3])
            if "(s)" in form
            else (form, "" if form.endswith(("ese", "s")) else f"{form}s")
        )
    )


def read_currency(code: str, text: str) -> Fact:
    match = re.match(r"(.+?)(?: \(([A-Z]{2,3})[A-Z/]*\))? per US dollar", text)
    if not match or " or " in match[1] or code == "zi":  # Zimbabwe's has been replaced
        return ()
    name, short = match[1], match[2] or ""
    if without_accents(name) in aliases.CURRENCIES:
        return (name, *aliases.CURRENCIES[without_accents(name)], short)
    *before, unit = name.split()
    single = aliases.SINGULAR.get(unit, unit.removesuffix("s"))
    return (name, " ".join([*before, single]), short)


def with_own_unit(currency: Fact, adjective: str, people: str, country: str) -> Fact:
    """Where a country has a unit of its own, this needs no adjective, or has the country's:
    "shilling" for Kenyan shillings, "Polish zloty" for zlotych."""
    before, _, unit = currency[0].rpartition(" ")
    if unit.startswith("euro") or without_accents(currency[0]) in aliases.CURRENCIES:
        return currency
    single = aliases.SINGULAR.get(unit, unit.removesuffix("s"))
    own = {word[:4].lower() for word in f"{adjective} {people} {country}".split()}
    if not before:
        whose = re.split(r"[;,(]| or ", adjective)[0].strip()
        whose = whose if whose[:3] == country[:3] else country  # in Macau they are Chinese
        return without_repeats([*currency, f"{whose} {single}"])
    if before.split()[-1][:4].lower() in own:
        return without_repeats([*currency, unit, single])
    return currency


def read_highest(code: str, text: str) -> Fact:
    """
    >>> read_highest("wa", "Konigstein on Brandberg 2,573 m")
    ('Konigstein on Brandberg', 'Konigstein', 'Mount Konigstein')
    >>> read_highest("up", "Hora Hoverla 2,061 m")
    ('Hora Hoverla', 'Hoverla', 'Mount Hoverla')
    """
    match = re.match(r"(.+?) ([\d,]+)(?: m\b|$)", re.sub(r" \([^)]*\)", "", text))
    inside = re.findall(r"\(([^)]*)\)", text.split(" m")[0])
    if not match or code in ("is", "it", "nl", "mh", "vt", "sa") or text.count(" m;") > 1:
        return ()
    name = match[1]
    if not re.match(r"[A-Z]", name) or re.search(r"[,;]| and |[a-z]\d|\d\w* k?m", name):
        return ()
    word = r"(?:[A-Z][\w'.-]*|a-\w+)"
    others = [each for each in inside if re.fullmatch(rf"{word}(?: {word})*", each)]
    others = [] if code == "sp" else others  # there it is the island
    forms = [*name.split("/"), *others]
    forms += [form.partition(" on ")[0] for form in forms]
    tops = [form for form in forms if " on " not in form]
    bare = [_without_mount(form) for form in tops]
    mounts = [f"Mount {form}" for form in bare if " " not in form]
    return without_repeats([name, *forms, *bare, *mounts])


def _without_mount(name: str) -> str:
    first, _, rest = name.partition(" ")
    rest = re.sub(r"^(?:de la|de|da|del|du|la|le|ad|an|ech|es) ", "", rest)
    return rest if first in aliases.PEAKS and rest else name.removesuffix(" Volcano")


def read_prefix(code: str, text: str) -> Fact:
    return (text,) if re.fullmatch(r"[A-Z0-9]{1,4}(-[A-Z]{1,2})?", text) else ()


_DATE = rf"(\d{{1,2}}) ({'|'.join(calendar.month_name[1:])})"


def _dates(match: re.Match[str], year: str) -> Fact:
    day, month = match[1], match[2]
    return f"{day} {month} {year}".strip(), f"{month} {day} {year}".strip()


def read_independence(code: str, text: str) -> Fact:
    match = re.fullmatch(rf"{_DATE} (\d{{4}})(?: \(from [^();]*\))?", text)
    plain_gain = "(" in text or code == "li"  # Italy has a date, but was nobody's
    return _dates(match, match[3]) if match and plain_gain and code != "as" else ()


def read_ruler(code: str, text: str) -> Fact:
    match = re.fullmatch(rf"{_DATE} \d{{4}} \(from ([^();]*)\)", text)
    name = match[3].removeprefix("the ") if match else ""
    return names_of(name) if name in aliases.RULERS else ()


_HOLIDAY = re.compile(rf"([^,;()]+)(?: \(([^()]*)\))?, {_DATE}(?: \((\d{{4}})\))?")


def read_holiday(code: str, text: str) -> Fact:
    match = _HOLIDAY.fullmatch(text)
    if not match or re.search(" of |Independence|Birthday|National Day$", match[1]):
        return ()
    if match[1] in aliases.COMMON_HOLIDAYS:
        return ()
    inside = (match[2] or "").removeprefix("or ")
    return (match[1], inside if inside.endswith("Day") else "")


def read_holiday_date(code: str, text: str) -> Fact:
    match = _HOLIDAY.fullmatch(text)
    if not match:
        return ()
    date = re.search(_DATE, match[0])
    assert date is not None  # _HOLIDAY holds one
    with_year = _dates(date, match[5]) if match[5] else ()
    return (*_dates(date, ""), *with_year)


def read_anthem(code: str, text: str) -> Fact:
    match = re.fullmatch(r'"([^"]+),?" ?(?:\(([^()]+)\))?', text)
    if not match or code in ROYAL_ANTHEMS:
        return ()
    if match[1] in aliases.SHARED_ANTHEMS and code not in aliases.SHARED_ANTHEMS[match[1]]:
        return ()
    translated = (match[2] or "").strip('"')
    return (match[1], "" if normalize(translated) == "national anthem" else translated)


def read_former(code: str, text: str) -> Fact:
    """
    >>> read_former("id", "Netherlands East Indies (Dutch East Indies), Netherlands New Guinea")
    ('Netherlands East Indies', 'Netherlands New Guinea', 'Dutch East Indies')
    """
    others = re.findall(r" \(([A-Z][^()]*)\)", text)
    text = re.sub(r" \([^()]*\)", "", text)
    if re.search(r"[;:\[\]]| and Territor| is | Districts?\b|sometimes", text) or len(text) > 130:
        return ()
    if code in ("ec", "fp", "iv", "mo"):  # names of a city and of parts; the one in our title
        return ()
    own = re.sub(r" \(.*\)$", "", title_of(code, read_book()[code])).lower()
    forms = text.split(", ")
    told = [form for form in forms if own[:5] not in form.lower()]
    return (*told, *(form for form in forms if form not in told), *others) if told else ()


def read_symbol(code: str, text: str) -> Fact:
    """
    >>> read_symbol("lt", "mokorotio (Basotho hat)")
    ('mokorotio', 'Basotho hat')
    """
    name = re.sub(r"^an? ", "", re.sub(r" \([^()]*\)", "", text))
    if re.search(r"[,;\d]| and | with | over | on | of |official|star|sun|cross", name.lower()):
        return ()
    if len(name.split()) > 4:
        return ()
    others = re.findall(
        r" \(((?!bird|mythical|type|an? |the |breed|from|citrus|antelope|crown|native)[^()]*)\)$",
        text,
    )
    return (name, *others, *aliases.SYMBOLS.get(name, ()))


def _largest_partner(text: str) -> Fact:
    shares = re.findall(r"(?:^|, )([A-Z][^%\d]*?) (\d+(?:\.\d+)?)%", text)
    if len(shares) < 2 or float(shares[0][1]) <= float(shares[1][1]) or "," in shares[0][0]:
        return ()
    return names_of(shares[0][0])


def read_export(code: str, text: str) -> Fact:
    match = re.match(r"([a-z][a-z ]+?)(?:, [^()]*)? \(2023\)$", text)
    return (match[1], *aliases.GOODS.get(match[1], ())) if match and " and " not in match[1] else ()


def read_local(code: str, text: str) -> Fact:
    name = re.fullmatch(r"[A-Z][\w' -]+", text)
    own = without_accents(title_of(code, read_book()[code])).lower()
    plain_name = without_accents(text).lower()
    if not name or " or " in text or len(text) < 4:
        return ()
    return () if plain_name[:4] in own or own[:4] in plain_name else (text,)


READERS: dict[str, Callable[[str, str], Fact]] = {
    "capital": read_capital,
    "code": read_code,
    "demonym": read_demonym,
    "currency": read_currency,
    "highest": read_highest,
    "prefix": read_prefix,
    "independence": read_independence,
    "ruler": read_ruler,
    "holiday": read_holiday,
    "holiday_date": read_holiday_date,
    "anthem": read_anthem,
    "former": read_former,
    "symbol": read_symbol,
    "buyer": lambda code, text: _largest_partner(text),
    "supplier": lambda code, text: _largest_partner(text),
    "export": read_export,
    "local": read_local,
}
