"""Makes the tasks of our sites from templates.toml.

A template is an intent with gaps, and SQL whose rows fill the gaps:

    [shop_cart]
    sites = "shopping"                     the task starts at the first site
    intent = "Put {quantity} pieces of the {name} into my cart."
    sql = "SELECT id, name, slug, 2 + id % 8 AS quantity FROM shop.catalog"
    plan = [                               where, and what to do there:
        "type Search products = {name}",       anywhere: enter a text and press Enter
        "/search click {name}",                at this path: click a link
        "/products/{slug} choose Quantity = {quantity}",
        "/products/{slug} press Add to cart",  a button; first the fields above it are filled in
    ]
    done = "/cart sees link {name}"        where the plan ends, and a node that the page must have
    rows = ["shopping", "SELECT product, quantity FROM cart", "{id}", "{quantity}"]

The last line is the evaluator: SQL of a site that must find exactly one row, this one. The others:

    answer = "{price}"                     the answer includes this, or all texts of a list
    exact = "{count}"                      the answer is exactly this
    opens = true                           the last page is the one in `done`
    page = ["/wishes", "main", "{name}"]   afterwards, this page has this text at this CSS selector

"map:/search" is a path of another site. The tables of all sites are visible to the SQL. It must
select rows with one right answer only: no ties, no names that occur twice. A seeded generator
chooses `limit` of the rows, so the tasks are the same on every machine.

Read next: envs/webarena/tasks.py, which numbers the tasks, and envs/webarena/oracle.py.
"""

import random
import re
import sqlite3
import tomllib
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, quote_plus

from envs.webarena.oracle import Step, anywhere, at, both, holds, shows
from envs.webarena.sites import PUBLIC, build_masters, connect, read_only
from envs.webarena.tree import Page

FILE = Path(__file__).with_name("templates.toml")
INSTANCES = 14  # tasks of a template that has no `limit`
LINE = re.compile(r"(?:([a-z_]*:?/\S*) )?(click|press|type|fill|choose|goto|sees) (.*)")
Condition = Callable[[Page], bool]


class Instance(NamedTuple):
    """A task of ours."""

    template: str
    sites: list[str]
    intent_template: str
    values: Mapping[str, Any]
    evaluation: dict[str, Any]
    plan: tuple[Step, ...]


def make_instances() -> list[Instance]:
    """All tasks, in the order of their numbers."""
    database = open_all()
    instances: list[Instance] = []
    for name, template in read_templates().items():
        rows = [dict(row) for row in database.execute(template["sql"])]
        rows.sort(key=repr)  # versions of SQLite could order them differently
        random.Random(name).shuffle(rows)
        by_intent = {template["intent"].format(**row): row for row in rows}
        for row in list(by_intent.values())[: template.get("limit", INSTANCES)]:
            filled = Filled(template, row)
            parts = template["sites"].split(), template["intent"], row
            instances.append(Instance(name, *parts, filled.evaluation(), tuple(filled.plan())))
    database.close()
    return instances


def read_templates() -> dict[str, dict[str, Any]]:
    return tomllib.loads(FILE.read_text(encoding="utf-8"))


def open_all() -> sqlite3.Connection:
    """One connection to the tables of all sites: shop.products, map.places, ..."""
    database = connect(":memory:")
    for name, path in build_masters().items():
        database.execute(f"ATTACH '{read_only(path)}' AS {name}")
    return database


class Filled:
    """A template whose gaps are filled from a row."""

    def __init__(self, template: Mapping[str, Any], row: Mapping[str, Any]) -> None:
        self.template, self.row = template, row
        self.site = template["sites"].split()[0]

    def text(self, pattern: str) -> str:
        return pattern.format(**self.row)

    def address(self, pattern: str) -> tuple[str, str]:
        """The site of an address, and its path and query with the values quoted."""
        site, colon, path = pattern.rpartition(":")
        values = {name: quote_plus(str(value), safe="/") for name, value in self.row.items()}
        return site or self.site, path.format(**values)

    def url(self, pattern: str) -> str:
        site, path = self.address(pattern)
        return f"{PUBLIC[site]}{path}"

    def at(self, pattern: str) -> Condition:
        site, path = self.address(pattern)
        path, _, query = path.partition("?")
        return at(PUBLIC[site].removeprefix("http://") + path, **dict(parse_qsl(query)))

    def evaluation(self) -> dict[str, Any]:
        """The "eval" of a task in WebArena's format."""
        template, kind = self.template, "string_match"
        check: dict[str, Any]
        more: dict[str, Any] = {"reference_answers": None, "reference_url": "", "program_html": []}
        if "answer" in template:
            answers = template["answer"]
            patterns = answers if isinstance(answers, list) else [answers]
            more["reference_answers"] = {"must_include": [self.text(p) for p in patterns]}
        elif "exact" in template:
            more["reference_answers"] = {"exact_match": self.text(template["exact"])}
        elif "opens" in template:
            kind, more["url_note"] = "url_match", "GOLD in PRED"
            more["reference_url"] = self.url(template["done"])
        elif "page" in template:
            address, selector, text = template["page"]
            locator = f"document.querySelector('{selector}').outerText"
            url, contents = self.url(address), {"must_include": [self.text(text)]}
            check = {"url": url, "locator": locator, "required_contents": contents}
            kind, more["program_html"] = "program_html", [check]
        else:
            site, sql, *patterns = template["rows"]
            values = [self.text(pattern) for pattern in patterns]
            row = [int(value) if re.fullmatch(r"-?\d+", value) else value for value in values]
            check = {"site": site, "sql": self.text(sql), "expected": [row]}
            kind, more["database"] = "database", [check]
        return {"eval_types": [kind]} | more

    def plan(self) -> Iterator[Step]:
        """The oracle plays the last step that fits the page. Within a form, the fields are filled
        in from the first to the last, so they are turned around: the button becomes the first."""
        matches = [re.fullmatch(LINE, line) for line in self.template["plan"]]
        lines = [match.groups() for match in matches if match]
        for _, group in groupby(lines, key=lambda line: line[0]):
            yield from reversed([self.step(*line) for line in group])
        where, _, node = self.template["done"].partition(" sees ")
        role, _, name = self.text(node).partition(" ")
        is_done = both(self.at(where), shows(role, name)) if node else self.at(where)
        references = self.evaluation()["reference_answers"] or {}
        answer = references.get("exact_match") or ", ".join(references.get("must_include", ()))
        goal = f"The answer is {answer}." if answer else "The task is done."
        yield Step(goal, is_done, ("stop", answer))

    def step(self, where: str | None, verb: str, what: str) -> Step:
        name, _, entry = (self.text(part) for part in what.partition(" = "))
        act: tuple[str, ...]
        when = self.at(where) if where else anywhere
        if verb == "goto":
            return Step(f"I go on at {PUBLIC[name]}.", when, ("goto", PUBLIC[name]))
        if verb in ("click", "press"):
            role = "link" if verb == "click" else "button"
            return Step(f"I {verb} {name}.", when, ("click", role, name))
        role = "combobox" if verb == "choose" else "textbox"
        act = ("select", role, name, entry)
        if verb != "choose":
            act = ("type", role, name, entry, str(int(verb == "type")))
        if verb != "type":  # which sends the form, so the field may hold the text already
            when = both(when, lacks(role, name, entry))
        return Step(f"I enter {entry} as {name}.", when, act)


def lacks(role: str, name: str, value: str) -> Condition:
    is_held = holds(role, name, value)
    return lambda page: not is_held(page)
