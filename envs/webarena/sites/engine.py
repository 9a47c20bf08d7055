"""The engine of all sites: pages without JavaScript, made from declarations.

A site is a `Data`, the tables and a function that fills them, and a `Site` with pages and changes.
A page is a function that answers GET with a heading and parts. A change answers POST: SQL with the
names of form fields, and the address to show next. The schema's constraints check what users enter.

    SITE = Site("shopping", "Shop", DATA, nav={"Cart": "/cart"})

    @SITE.page("/products/{slug}")
    def product(visit, slug):
        row = visit.row("SELECT * FROM products WHERE slug = ?", slug)
        form = Form("/cart/set", "Add to cart", [Field("Quantity", "quantity")], {"id": row["id"]})
        return Page(row["name"], Facts({"Price": money(row["price"])}), form)

    SITE.change("/cart/set", "INSERT OR REPLACE INTO cart VALUES (:id, :quantity)", then="/cart")

`Listing` is a table with search, filters, sorting and pages, all written in the query of the URL:
/search?q=lamp&price_to=20&sort=price-low-to-high&page=2.

Everything is deterministic: the rows come from a seeded generator, and the date is always TODAY.

Read next: envs/webarena/sites/shop.py.
"""

import random
import re
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, timedelta
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import parse_qsl, urlencode

import jinja2
from starlette.responses import HTMLResponse, RedirectResponse, Response

TODAY = "2026-06-15"
ROWS_PER_PAGE = 12


class Data(NamedTuple):
    """The tables of a site. Sites can share one Data."""

    name: str
    schema: str
    make_rows: Callable[[random.Random], Mapping[str, Sequence[tuple]]]

    def build(self, path: Path) -> None:
        """Write the database file; the rows are the same on every machine."""
        database = sqlite3.connect(path)
        database.executescript(self.schema)
        for table, rows in self.make_rows(random.Random(self.name)).items():
            marks = ", ".join("?" * len(rows[0]))
            database.executemany(f"INSERT INTO {table} VALUES ({marks})", rows)
        database.commit()
        database.close()


class Database(Protocol):
    """The rows that one session sees."""

    def query(self, data: str, sql: str, parameters: Any = ()) -> list[sqlite3.Row]: ...

    def write(self, data: str, statements: Sequence[str], parameters: Mapping) -> int: ...


def day_before(random: random.Random, last: str, num_days: int) -> str:
    """One of the `num_days` days that end with `last`."""
    return str(date.fromisoformat(last) - timedelta(random.randrange(num_days)))


def money(cents: int) -> str:
    """
    >>> money(123456)
    '$1,234.56'
    """
    return f"${cents / 100:,.2f}"


def slug(name: str) -> str:
    """
    >>> slug("Price: low to high")
    'price-low-to-high'
    """
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


# ---------------------------------------------------------------------------------- parts of a page


class Text(NamedTuple):
    text: str


class Link(NamedTuple):
    text: str
    href: str


class Links(NamedTuple):
    title: str
    links: Sequence[tuple[str, str]]  # text, address


class Facts(NamedTuple):
    """A table of names and values; the id of a value is its name: #ship-to."""

    facts: Mapping[str, Any]


class Field(NamedTuple):
    """An input: a selection if it has `options`, a text area if it has several rows."""

    label: str
    name: str
    value: Any = ""
    options: Sequence[str | tuple[str, str]] = ()  # texts, or pairs of value and text
    rows: int = 1


class Form(NamedTuple):
    action: str
    button: str
    fields: Sequence[Field] = ()
    hidden: Mapping[str, Any] = {}  # sent with the fields
    method: str = "post"
    title: str = ""


class Filter(NamedTuple):
    """A restriction of a listing: a selection if it has `options`, otherwise a lower and an upper
    limit. `scale` converts an entered number to the column's unit; without it the limits are text,
    such as dates."""

    label: str
    column: str
    options: Sequence[str] = ()
    test: str = "= ?"
    scale: int = 0


class Listing(NamedTuple):
    """A table of the rows of `sql`. `columns` maps a heading to "column", "column $" for cents,
    "column /products/{slug}" for a link, or a function of the row. The first of `sorts`, which map
    what the user chooses to an SQL order, is the default."""

    columns: Mapping[str, str | Callable[[sqlite3.Row], Any]]
    sql: str
    parameters: Sequence = ()
    search: str = ""  # columns that the field "Keyword" searches, joined by ||
    filters: Sequence[Filter] = ()
    sorts: Mapping[str, str] = {}
    title: str = ""


class Page:
    def __init__(self, title: str, *parts: Any) -> None:
        self.title, self.parts = title, parts


# --------------------------------------------------------------------------------- sites and visits


class Refusal(Exception):
    """A request that cannot be answered; the user reads the message."""


class NotFound(Refusal):
    """There is no such page or row."""


class SignInNeeded(Exception):
    """The page is for users who have signed in."""


@dataclass
class Visit:
    """One request: its address, what was entered, the user, and the rows of the user's session."""

    site: "Site"
    database: Database
    path: str
    query: dict[str, str]
    form: dict[str, str]
    user: str  # "" for a guest

    def rows(self, sql: str, *parameters: Any) -> list[sqlite3.Row]:
        return self.database.query(self.site.data.name, sql, parameters)

    def row(self, sql: str, *parameters: Any) -> sqlite3.Row:
        """The first row. Raises NotFound if there is none."""
        for row in self.rows(sql, *parameters):
            return row
        raise NotFound("This page does not exist.")

    @property
    def member(self) -> str:
        """The user. Raises SignInNeeded for a guest."""
        if not self.user:
            raise SignInNeeded
        return self.user


@dataclass
class Site:
    name: str  # as in WebArena's JSON
    title: str
    data: Data
    nav: Mapping[str, str]  # text -> address, on every page
    search: str = ""  # label of the search field on every page, which leads to /search
    root: str = ""  # begins every path
    account: tuple[str, str] = ("", "")  # the user and the password; a site can have no account
    is_private: bool = False  # all pages need the account
    routes: list[tuple[str, re.Pattern, Callable]] = field(default_factory=list)

    def page(self, path: str, method: str = "GET") -> Callable:
        """Register the function that makes a page; {names} in `path` become its arguments."""
        pattern = re.compile(self.root + re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", path))

        def register(function: Callable) -> Callable:
            self.routes.append((method, pattern, function))
            return function

        return register

    def change(self, path: str, *statements: str, then: str = "") -> None:
        """Register a change of rows. In the statements, :names are fields of the form and names in
        `path`; :user and :today also exist. `then`, by default `path`, can use the same {names},
        and {id}, the number of the inserted row."""

        def act(visit: Visit, **names: str) -> str:
            values = {name: entry.strip() for name, entry in visit.form.items()}
            if empty := [name for name, entry in values.items() if not entry]:
                raise Refusal(f"The field {empty[0]} is empty.")
            values |= {**names, "user": visit.member, "today": TODAY}
            try:
                number = visit.database.write(self.data.name, statements, values)
            except sqlite3.IntegrityError as error:
                raise Refusal(f"The entry is not accepted ({error}).") from error
            return self.root + (then or path).format(**values | {"id": number})

        self.page(path, "POST")(act)

    def answer(self, method: str, visit: Visit) -> Page | str:
        """The page, or the address of the next one."""
        if visit.path == f"{self.root}/login" and self.account[0]:
            return sign_in(visit) if method == "POST" else SIGN_IN
        if self.is_private and not visit.user:
            raise SignInNeeded
        for of_method, pattern, function in self.routes:
            if of_method == method and (match := pattern.fullmatch(visit.path.rstrip("/"))):
                return function(visit, **match.groupdict())
        raise NotFound("This page does not exist.")


SIGN_IN = Page(
    "Sign in", Form("", "Sign in", [Field("User name", "user"), Field("Password", "password")])
)


def sign_in(visit: Visit) -> str:
    if (visit.form.get("user"), visit.form.get("password")) != visit.site.account:
        raise Refusal("The user name or the password is wrong.")
    visit.user = visit.site.account[0]
    return visit.query.get("next", f"{visit.site.root}/")


# ----------------------------------------------------------------------------------------- listings


def select_rows(visit: Visit, listing: Listing) -> dict[str, Any]:
    """What the template shows of a listing: controls, rows of the current page, links to others."""
    controls: list[Field] = []
    tests: list[tuple[str, str | int]] = []  # an SQL condition, and the entry that it compares with

    def entry(label: str, name: str, options: Sequence[tuple[str, str]] = ()) -> str:
        controls.append(Field(label, name, visit.query.get(name, ""), options))
        return visit.query.get(name, "")

    if listing.search:
        words = entry("Keyword", "q").split()
        tests += [(f"{listing.search} LIKE ?", f"%{word}%") for word in words]
    for label, column, options, test, scale in listing.filters:
        name = slug(label).replace("-", "_")
        if options:
            choices = [("", "Any"), *((option, option) for option in options)]
            tests.append((f"{column} {test}", entry(label, name, choices)))
        for end, sign in () if options else (("from", ">="), ("to", "<=")):
            limit = entry(f"{label} {end}", f"{name}_{end}")
            tests.append((f"{column} {sign} ?", to_unit(limit, scale) if scale else limit))
    sorts = {slug(name): (name, order) for name, order in listing.sorts.items()}
    choices = [(key, name) for key, (name, _) in sorts.items()]
    sort = entry("Sort by", "sort", choices) if len(choices) > 1 else ""
    _, order = sorts.get(sort) or next(iter(sorts.values()), ("", "1"))
    tests = [(test, limit) for test, limit in tests if limit]
    where = " AND ".join(test for test, _ in tests) or "1"
    values = [*listing.parameters, *(limit for _, limit in tests)]
    count = visit.rows(f"SELECT count(*) FROM ({listing.sql}) WHERE {where}", *values)[0][0]
    num_pages = max(1, -(-count // ROWS_PER_PAGE))
    number = visit.query.get("page", "")
    page = min(max(int(number), 1), num_pages) if re.fullmatch(r"[0-9]{1,9}", number) else 1
    first = (page - 1) * ROWS_PER_PAGE
    order_by = f"ORDER BY {order} LIMIT {ROWS_PER_PAGE} OFFSET {first}"
    rows = visit.rows(f"SELECT * FROM ({listing.sql}) WHERE {where} {order_by}", *values)
    return {
        "controls": controls,
        "count": f"{count} result" + "s" * (count != 1),
        "page": f"page {page} of {num_pages}" if num_pages > 1 else "",
        "cells": [[cell(row, column) for column in listing.columns.values()] for row in rows],
        "links": [
            (label, "?" + urlencode(visit.query | {"page": str(other)}))
            for label, other in (("Previous page", page - 1), ("Next page", page + 1))
            if 1 <= other <= num_pages
        ],
    }


def to_unit(entry: str, scale: int) -> str | int:
    """A number that the user entered, times `scale`; "" stays as it is."""
    try:
        return round(float(entry) * scale) if entry else ""
    except (ValueError, OverflowError) as error:
        raise Refusal(f"{entry!r:.40} is not a number.") from error


def cell(row: sqlite3.Row, column: str | Callable[[sqlite3.Row], Any]) -> Any:
    """What a column of a listing, see there, shows for a row."""
    if callable(column):
        return column(row)
    name, _, form = column.partition(" ")
    if form == "$":
        return money(row[name])
    return Link(row[name], form.format(**dict(row))) if form else row[name]


# ------------------------------------------------------------------------------------------ answers

TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).with_name("templates")),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
)


def respond(
    site: Site, database: Database, method: str, path: str, query: str, form: str, user: str
) -> Response:
    """Answer a request. `user` is a cookie. It can be trusted: a session has one browser."""
    entries = dict(parse_qsl(query))
    if method == "GET" and len(entries) < len(parse_qsl(query, keep_blank_values=True)):
        # A GET form also sends its empty fields. Without them, a list has one address only.
        return RedirectResponse(f"{path}?{urlencode(entries)}".rstrip("?"), 303)
    fields = dict(parse_qsl(form, keep_blank_values=True))
    is_member = user and user == site.account[0]
    visit, status = Visit(site, database, path, entries, fields, user if is_member else ""), 200
    try:
        page = site.answer(method, visit)
        parts = [] if isinstance(page, str) else [as_dict(visit, part) for part in page.parts]
    except SignInNeeded:
        return RedirectResponse(f"{site.root}/login?{urlencode({'next': path})}", 303)
    except Refusal as refusal:
        is_missing = isinstance(refusal, NotFound)
        status = 404 if is_missing else 422
        page = Page("Not found" if is_missing else "Please check your entry")
        parts = [as_dict(visit, Text(str(refusal)))]
    if isinstance(page, str):
        response: Response = RedirectResponse(page, 303)
        if visit.user != user:
            response.set_cookie("user", visit.user)
        return response
    template = TEMPLATES.get_template("page.html")
    return HTMLResponse(template.render(site=site, page=page, parts=parts, user=visit.user), status)


def as_dict(visit: Visit, part: Any) -> dict[str, Any]:
    """A part as the template reads it, with its kind: "text", "facts", "listing", ..."""
    more = select_rows(visit, part) if isinstance(part, Listing) else {}
    return {"kind": type(part).__name__.lower()} | part._asdict() | more
