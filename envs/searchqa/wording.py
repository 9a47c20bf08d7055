"""How questions and searches are worded: one entry for each field of envs/searchqa/facts.py.

    Wording.question   "What is the capital of {}?"     {} is "Kenya", or "the country whose ..."
    Wording.clause     "whose capital is {}"            what makes a country known by this field
    Wording.label      "Capital:"                       opens the field in the corpus's passages
    Wording.topics     "capital name", ...              for queries, in the corpus's words

A query names the country and a topic ("Kenya capital name"), or a topic and what is known of the
country ("capital name Nairobi").

Read next: envs/searchqa/generate.py.
"""

from typing import NamedTuple


class Wording(NamedTuple):
    label: str
    topics: tuple[str, ...]
    question: str
    clause: str = ""  # "": a country is not told by it


FIELDS = {
    "capital": Wording(
        "Capital:",
        ("capital name", "capital name geographic coordinates"),
        "What is the capital of {}?",
        "whose capital is {}",
    ),
    "code": Wording(
        "Internet country code:",
        ("internet country code", "communications internet users"),
        "What is the internet country code of {}?",
        "whose internet country code is {}",
    ),
    "demonym": Wording(
        "Nationality:",
        ("nationality noun", "nationality adjective"),
        "What are the people of {} called?",
    ),
    "currency": Wording(
        "Exchange rates:",
        ("currency exchange rates", "currency per US dollar"),
        "What is the currency of {}?",
        "whose currency is the {}",
    ),
    "highest": Wording(
        "Elevation:",
        ("highest point elevation", "elevation lowest point"),
        "What is the highest point in {}?",
        "whose highest point is {}",
    ),
    "prefix": Wording(
        "Civil aircraft registration country code prefix:",
        (
            "transportation aircraft prefix",
            "civil aircraft registration prefix",
            "civil aircraft airports heliports",
        ),
        "What is the civil aircraft registration prefix of {}?",
        "whose civil aircraft registration prefix is {}",
    ),
    "independence": Wording(
        "Independence:",
        ("independence from", "independence national holiday"),
        "On what date did {} gain independence?",
        "that gained independence on {}",
    ),
    "ruler": Wording(
        "Independence:",
        ("independence from", "independence national holiday"),
        "From which power did {} gain independence?",
    ),
    "holiday": Wording(
        "National holiday:",
        ("national holiday", "independence national holiday"),
        "What is the national holiday of {} called?",
        "whose national holiday is {}",
    ),
    "holiday_date": Wording(
        "National holiday:",
        ("national holiday", "independence national holiday"),
        "On what date is the national holiday of {} celebrated?",
    ),
    "anthem": Wording(
        "National anthem(s):",
        ("national anthem title", "national anthem lyrics music"),
        "What is the title of the national anthem of {}?",
        'whose national anthem is "{}"',
    ),
    "former": Wording(
        "Country name:",
        ("country name former", "former name conventional long form"),
        "What is a former name of {}?",
        "formerly known as {}",
    ),
    "symbol": Wording(
        "National symbol(s):",
        ("national symbol", "national symbol colors flag"),
        "What is the national symbol of {}?",
        "whose national symbol is the {}",
    ),
    "buyer": Wording(
        "Exports - partners:",
        ("exports partners", "top export partners"),
        "Which trading partner buys the largest share of the exports of {}?",
    ),
    "supplier": Wording(
        "Imports - partners:",
        ("imports partners", "top import partners"),
        "Which trading partner supplies the largest share of the imports of {}?",
    ),
    "export": Wording(
        "Exports - commodities:",
        ("exports commodities", "top export commodities"),
        "What is the most valuable export commodity of {}?",
    ),
    "local": Wording(
        "Country name:",
        ("country name local short form", "local long form country name"),
        "What is the local short name of {}?",
        "whose local short name is {}",
    ),
}
# "Which {}, Kenya or Chad?"
COMPARED = {
    "area": Wording("Area:", ("area total", "area land water"), "has the larger total area"),
    "population": Wording(
        "Population:",
        ("population nationality ethnic groups", "people and society population"),
        "has the larger population",
    ),
    "coastline": Wording(
        "Coastline:",
        ("geography coastline", "coastline maritime claims"),
        "has the longer coastline",
    ),
    "airports": Wording(
        "Airports:", ("number of airports", "airports transportation"), "has more airports"
    ),
    "age": Wording("Median age:", ("median age total", "median age"), "has the higher median age"),
}
BORDER = Wording(
    "Land boundaries:", ("land boundaries border countries", "border countries total km"), ""
)
LONGEST_BORDER = "the {kind} with which {name} shares its longest land border"
ONLY_BORDER = "the only {kind} with which {name} shares a land border"
NEEDS_ARTICLE = (
    r"^(?:Union|Kingdom) of|(?:Islands|Indies|Republic|Coast|Protectorate|States|Hebrides|Empire)$"
)
