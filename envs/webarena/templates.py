"""Makes the tasks of our sites from templates.toml.

A template is an intent with gaps, and SQL whose rows fill the gaps:

    [shop_cart]
    sites = "shopping"                     the task starts at the first site
    intent = "Put {quantity} pieces of the {name} into my cart."
    sql = "SELECT id, name, slug, 2 + id % 8 AS quantity FROM catalog"
    plan = [                               where, and what to do there:
        "type Search products = {name}",       anywhere: enter a text and press Enter
        "/search click {name}",                at this path: click a link
        "/products/{slug} choose Quantity = {quantity}",
        "/products/{slug} press Add to cart",  a button; first the fields above it are filled in
    ]
    done = "/cart sees link {name}"        where the plan ends, and a node that the page must have
    rows = ["SELECT product, quantity FROM cart", "{id}", "{quantity}"]

The last line is the evaluator: SQL that must find exactly one row, this one. The others:

    answer = ["{price}"]                   the answer includes all of these, and few other words
    exact = "{count}"                      the answer is exactly this
    opens = true                           the last page is the one in `done`, exactly
    page = ["/users/marvin", "#bio", "{bio}"]
                                           afterwards, this page has this text at this CSS selector

"map:/search" is a path of another site. SQL sees the tables of all sites. A template's SQL must
select rows with one right answer only: no ties, no names that occur twice. A seeded generator
chooses `limit` of the rows, so the tasks are the same on every machine.

Read next: envs/webarena/tasks.py, which numbers the tasks, and envs/webarena/oracle.py.
"""

import random
import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import closing
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote_plus

from envs.webarena.evaluators import words_of
from envs.webarena.oracle import Step
from envs.webarena.sites import PUBLIC, open_master

FILE = Path(__file__).with_name("templates.toml")
INSTANCES = 15  # tasks of a template that has no `limit`
MORE_WORDS = 3  # An answer may have so many more words than the reference: evaluators.has_words.
LINE = re.compile(r"(?:([a-z_]*:?/\S*) )?(click|press|type|fill|choose|goto) (.*)")
ROLES = {"click": "link", "press": "button", "choose": "combobox", "goto": ""}


class Instance(NamedTuple):
    """A task of ours."""

    template: str
    task: dict[str, Any]  # in WebArena's format
    plan: tuple[Step, ...]


def make_instances() -> list[Instance]:
    """All tasks, in the order of their numbers."""
    instances: list[Instance] = []
    for name, all_filled in fill_templates().items():
        all_filled.sort(key=lambda filled: repr(filled.row))  # SQLite's order is not defined
        random.Random(name).shuffle(all_filled)
        by_intent = {filled.intent: filled for filled in all_filled}
        limit = all_filled[0].template.get("limit", INSTANCES)
        for filled in list(by_intent.values())[:limit]:
            instances.append(Instance(name, filled.task(), tuple(filled.plan())))
    return instances


def fill_templates() -> dict[str, list["Filled"]]:
    """Each template, by its name, with each row of its SQL."""
    templates = tomllib.loads(FILE.read_text(encoding="utf-8"))
    with closing(open_master()) as database:
        return {
            name: [Filled(template, dict(row)) for row in database.execute(template["sql"])]
            for name, template in templates.items()
        }


class Filled:
    """A template whose gaps are filled from a row."""

    def __init__(self, template: Mapping[str, Any], row: dict[str, Any]) -> None:
        self.template, self.row = template, row
        self.sites = template["sites"].split()
        self.intent = self.text(template["intent"])

    def text(self, pattern: str) -> str:
        return pattern.format(**self.row)

    def url(self, pattern: str) -> str:
        """The public URL of an address; values are quoted."""
        site, _, path = pattern.rpartition(":")
        values = {name: quote_plus(str(value), safe="/") for name, value in self.row.items()}
        return f"{PUBLIC[site or self.sites[0]]}{path.format(**values)}"

    def task(self) -> dict[str, Any]:
        intent = self.template["intent"]
        return {
            "sites": self.sites,
            "start_url": PUBLIC[self.sites[0]],
            "require_login": self.sites != ["map"],
            "intent": self.intent,
            "intent_template": re.sub(r"\{(\w+)\}", r"{{\1}}", intent),
            "instantiation_dict": {n: self.row[n] for n in re.findall(r"\{(\w+)\}", intent)},
            "eval": self.evaluation(),
        }

    def evaluation(self) -> dict[str, Any]:
        template, kind = self.template, "string_match"
        more: dict[str, Any] = {"reference_answers": None, "reference_url": "", "program_html": []}
        if "answer" in template:
            phrases = list(map(self.text, template["answer"]))
            more["reference_answers"] = {"must_include": phrases}
            more["max_words"] = len(words_of(" ".join(phrases))) + MORE_WORDS
        elif "exact" in template:
            more["reference_answers"] = {"exact_match": self.text(template["exact"])}
        elif "opens" in template:
            kind, more["url_note"] = "url_match", "EXACT"
            more["reference_url"] = self.url(template["done"])
        elif "page" in template:
            address, selector, text = template["page"]
            locator = f"document.querySelector('{selector}').outerText"
            contents = {"exact_match": self.text(text)}
            check = {"url": self.url(address), "locator": locator, "required_contents": contents}
            kind, more["program_html"] = "program_html", [check]
        else:
            sql, *values = map(self.text, template["rows"])
            row = [int(value) if re.fullmatch(r"-?\d+", value) else value for value in values]
            kind, more["database"] = "database", [{"sql": sql, "expected": [row]}]
        return {"eval_types": [kind]} | more

    def plan(self) -> Iterator[Step]:
        """The oracle plays the last step that fits the page. Within a form, the fields are filled
        in from the first to the last, so they are turned around: the button becomes the first."""
        matches = [LINE.fullmatch(line) for line in self.template["plan"]]
        lines = [match.groups() for match in matches if match]
        for _, group in groupby(lines, key=lambda line: line[0]):
            yield from reversed([self.step(*line) for line in group])
        where, _, node = self.template["done"].partition(" sees ")
        role, _, name = self.text(node).partition(" ")
        references = self.evaluation()["reference_answers"] or {}
        answer = references.get("exact_match") or ", ".join(references.get("must_include", ()))
        goal = f"The answer is {answer}." if answer else "The task is done."
        yield Step(goal, self.url(where), "stop", role, name, answer)

    def step(self, where: str | None, verb: str, what: str) -> Step:
        name, _, text = (self.text(part) for part in what.partition(" = "))
        goal = f"I enter {text} as {name}." if text else f"I {verb} {name}."
        if verb == "goto":
            name, text = "", PUBLIC[name]
        place, role = self.url(where) if where else "", ROLES.get(verb, "textbox")
        return Step(goal, place, "click" if verb == "press" else verb, role, name, text)
