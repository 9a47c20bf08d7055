"""The engine of all sites: pages without JavaScript, made from declarations.

A site is a `Data`, the tables and a function that fills them, and a `Site` with pages and changes.
A page answers GET with a heading and parts; it can be about one row. A change answers POST: SQL,
and the address to show next. The schema's constraints check what users enter.

    SITE = Site("shopping", "Shop", DATA, nav={"Cart": "/cart"})
    SITE.page(
        "/products/{slug}", "{name}",
        Facts("price $, category /categories/{category}"),
        Form("/cart/add", "Add to cart", {"Quantity": ()}, {"product": "{id}"}),
        row="SELECT * FROM products WHERE slug = :slug"
    )
    SITE.change("/cart/add", "REPLACE INTO cart VALUES (:product, :quantity)", then="/cart")

:names in SQL and {names} in texts are the parts of the path, the query, the fields of the form, and
the columns of the row; `user` and `today` also exist. `Listing` is a table with search, filters,
sorting and pages, all in the query of the URL: /search?q=lamp&price_to=20&sort=rating&page=2.

Everything is deterministic: the rows come from a seeded generator, and the date is always TODAY.

Read next: envs/webarena/sites/shop.py.
"""

import random
import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, timedelta
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from urllib.parse import parse_qsl, urlencode

import jinja2
from starlette.responses import HTMLResponse, RedirectResponse, Response

TODAY = "2026-06-15"
ROWS_PER_PAGE = 12
MAX_WORDS = 20  # of a search; SQLite limits the depth of an expression


Rows = Iterator[tuple[str, tuple]]  # table, values; the value None becomes the row's number


class Data(NamedTuple):
    """The tables of a site. Sites can share one Data."""

    name: str
    schema: str
    make_rows: Callable[[random.Random], Rows]

    def build(self, path: Path) -> None:
        """Write the database file; the rows are the same on every machine."""
        database = sqlite3.connect(path)
        database.executescript(self.schema)
        for table, values in self.make_rows(random.Random(self.name)):
            marks = ", ".join("?" * len(values))
            database.execute(f"INSERT INTO {table} VALUES ({marks})", values)
        database.commit()
        database.close()


class Database(Protocol):
    """The rows that one session sees. `write` executes all statements or none, and returns the
    number of the inserted row."""

    def query(self, data: str, sql: str, parameters: Any = ()) -> list[sqlite3.Row]: ...

    def write(self, data: str, statements: Sequence[str], parameters: Any) -> int: ...


def recent_day(random: random.Random, num_days: int) -> str:
    """One of the last `num_days` days."""
    return str(date.fromisoformat(TODAY) - timedelta(random.randrange(num_days)))


def invent_people(random: random.Random, number: int) -> list[str]:
    """Different names of people."""
    first = "Ada Ben Clara David Elena Felix Grace Hugo Iris Jonas Kira Leo Mona Nils Olga Paul"
    last = "Abbott Brandt Castell Dorsey Egan Fischer Gomez Hale Ivanov Jansen Keller Lindt Moss"
    return random.sample([f"{a} {b}" for a in first.split() for b in last.split()], number)


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


# --------------------------------------------------------------------------------- parts of a page


class Text(NamedTuple):
    text: str


class Links(NamedTuple):
    links: Mapping[str, str]  # text -> address
    title: str = ""


class Facts(NamedTuple):
    """A table of names and values. The id of a value is the name of its column: #price."""

    columns: str  # of the page's row; see `cells`


class Field(NamedTuple):
    """An input; with `options`, which are pairs of value and text, a selection."""

    label: str
    options: Sequence[tuple[str, str]] = ()
    value: str = ""

    @property
    def name(self) -> str:
        short = {"Keyword": "q", "Sort by": "sort"}
        return short.get(self.label) or slug(self.label).replace("-", "_")


class Form(NamedTuple):
    action: str  # "": the page's own address
    button: str
    fields: Mapping[str, Sequence[str]] = {}  # label -> options, if it is a selection
    hidden: Mapping[str, str] = {}
    method: str = "post"


class Filter(NamedTuple):
    """A restriction of a listing: a selection if it has `options`, otherwise a lower and an upper
    limit. `scale` converts an entered number to the column's unit; without it the limits are text,
    such as dates."""

    label: str
    column: str
    options: Sequence[str] = ()
    test: str = "="
    scale: int = 0


class Listing(NamedTuple):
    """A table of the rows of `sql`. The first of `sorts` is the default."""

    columns: str  # see `cells`
    sql: str
    search: str = ""  # SQL: what the field "Keyword" searches
    filters: Sequence[Filter] = ()
    sorts: Mapping[str, str] = {}  # name -> SQL order
    title: str = ""
    button: Form | None = None  # in each row


def cells(columns: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of a row: "name", or "price $" for cents, or "name /address/{slug}" for a link.

    >>> cells("stock, price $, name /products/{id}", {"stock": 1, "price": 5, "name": "a", "id": 7})
    {'stock': 1, 'price': '$0.05', 'name': {'text': 'a', 'href': '/products/7'}}
    """
    texts = {}
    for column in columns.split(", "):
        name, _, style = column.partition(" ")
        texts[name] = money(values[name]) if style == "$" else values[name]
        if style.startswith("/"):
            texts[name] = {"text": values[name], "href": style.format_map(values)}
    return texts


def as_dict(part: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """A part as the template reads it: with its kind, "text", "facts", ..., and with the values."""

    def fill(pattern: Any) -> Any:
        return pattern.format_map(values) if isinstance(pattern, str) else pattern

    content = {name: fill(value) for name, value in part._asdict().items()}
    if isinstance(part, Form):
        content["fields"] = [
            Field(label, [(option, option) for option in options])
            for label, options in part.fields.items()
        ]
    if isinstance(part, Facts):
        content["facts"] = cells(part.columns, values)
    for name in ("hidden", "links"):
        if name in content:
            content[name] = {fill(key): fill(value) for key, value in content[name].items()}
    return {"kind": type(part).__name__.lower()} | content


# -------------------------------------------------------------------------------- sites and visits


class Refusal(Exception):
    """A request that cannot be answered; the user reads the message."""


class NotFound(Refusal):
    """There is no such page or row."""


class SignInNeeded(Exception):
    """The page is for users who have signed in."""


class Values(dict):
    """The values of a request by name; a name that is missing is empty."""

    def __missing__(self, name: str) -> str:
        return ""


class Visit(NamedTuple):
    """One request and the rows of its session."""

    site: "Site"
    database: Database
    query: dict[str, str]
    values: Values

    def rows(self, sql: str, values: Mapping[str, Any]) -> list[sqlite3.Row]:
        return self.database.query(self.site.data.name, sql, values)


Shown = tuple[str, list[dict[str, Any]]]  # a heading, and parts for the template


@dataclass
class Site:
    name: str  # as in WebArena's JSON
    title: str
    data: Data
    nav: Mapping[str, str]  # text -> address, on every page
    search: str = ""  # label of the search field on every page, which leads to /search
    root: str = ""  # begins every path of the site
    account: tuple[str, str] = ("", "")  # the user and the password; a site can have no account
    is_private: bool = False  # all pages need the account
    routes: list[tuple[str, re.Pattern, Callable]] = field(default_factory=list)

    def page(self, path: str, title: str, *parts: Any, row: str = "") -> None:
        """Register a page. {names} in `path` are parts of the path."""

        def show(visit: Visit) -> Shown:
            values = visit.values
            if row:
                rows = visit.rows(row, values)
                if not rows:
                    raise NotFound("There is no such entry.")
                values |= dict(rows[0])
            listings = (
                select_rows(visit, part) if isinstance(part, Listing) else {} for part in parts
            )
            return title.format_map(values), [
                as_dict(part, values) | more for part, more in zip(parts, listings)
            ]

        self._add("GET", path, show)

    def change(self, path: str, *statements: str, then: str = "") -> None:
        """Register a change of rows. `then`, by default `path`, is the page to show next; in it,
        {new} is the number of an inserted row."""

        def act(visit: Visit) -> str:
            if not visit.values["user"]:
                raise SignInNeeded
            if empty := [name for name, value in visit.values.items() if not value]:
                raise Refusal(f"The field {empty[0]} is empty.")
            try:
                number = visit.database.write(self.data.name, statements, visit.values)
            except sqlite3.IntegrityError as error:
                raise Refusal(f"The entry is not accepted ({error}).") from error
            return self.root + (then or path).format_map(visit.values | {"new": number})

        self._add("POST", path, act)

    def _add(self, method: str, path: str, answer: Callable[[Visit], Shown | str]) -> None:
        pattern = re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", path)
        self.routes.append((method, re.compile(self.root + pattern), answer))

    def answer(self, method: str, path: str, visit: Visit) -> Shown | str:
        """The page, or the address of the next one."""
        if path == f"{self.root}/login" and method == "GET":
            return "Sign in", [as_dict(SIGN_IN, {})]
        if path == f"{self.root}/login":
            if (visit.values["user_name"], visit.values["password"]) != self.account:
                raise Refusal("The user name or the password is wrong.")
            visit.values["user"] = self.account[0]
            return visit.query.get("next", f"{self.root}/")
        if self.is_private and not visit.values["user"]:
            raise SignInNeeded
        for of_method, pattern, function in self.routes:
            if of_method == method and (match := pattern.fullmatch(path)):
                visit.values.update(match.groupdict())
                return function(visit)
        raise NotFound("There is no such page.")


SIGN_IN = Form("", "Sign in", {"User name": (), "Password": ()})


# ---------------------------------------------------------------------------------------- listings


def select_rows(visit: Visit, listing: Listing) -> dict[str, Any]:
    """What the template shows of a listing: controls, rows of the current page, links to others."""
    controls: list[Field] = []
    tests: list[str] = []  # SQL conditions
    values = Values(visit.values)

    def entry(label: str, options: Sequence[tuple[str, str]] = ()) -> str:
        control = Field(label, options)
        value = visit.query.get(control.name, "")
        controls.append(control._replace(value=value))
        return value

    def restrict(test: str, limit: Any) -> None:
        if limit != "":
            values[f"limit{len(tests)}"] = limit
            tests.append(f"{test} :limit{len(tests)}")

    words = entry("Keyword").split() if listing.search else []
    for word in words[:MAX_WORDS]:
        restrict(f"{listing.search} LIKE", f"%{word}%")
    for label, column, options, test, scale in listing.filters:
        if options:
            choices = [("", "Any"), *((option, option) for option in options)]
            restrict(f"{column} {test}", entry(label, choices))
        for end, sign in () if options else (("from", ">="), ("to", "<=")):
            limit = entry(f"{label} {end}")
            restrict(f"{column} {sign}", to_unit(limit, scale) if scale else limit)
    orders = {slug(name): order for name, order in listing.sorts.items()}
    choices = [(slug(name), name) for name in listing.sorts]
    sort = entry("Sort by", choices) if len(choices) > 1 else ""
    order = orders.get(sort) or next(iter(orders.values()), "1")
    selected = f"FROM ({listing.sql}) WHERE {' AND '.join(tests) or '1'}"
    count = visit.rows(f"SELECT count(*) {selected}", values)[0][0]
    num_pages = max(1, -(-count // ROWS_PER_PAGE))
    number = visit.query.get("page", "")
    page = min(max(int(number), 1), num_pages) if re.fullmatch(r"[0-9]{1,9}", number) else 1
    limits = f"LIMIT {ROWS_PER_PAGE} OFFSET {(page - 1) * ROWS_PER_PAGE}"
    rows = visit.rows(f"SELECT * {selected} ORDER BY {order} {limits}", values)

    def button(row: dict[str, Any]) -> dict[str, Any]:
        return {"change": as_dict(listing.button, row)} if listing.button else {}

    return {
        "controls": controls,
        "count": f"{count} result" + "s" * (count != 1),
        "page": f"page {page} of {num_pages}" if num_pages > 1 else "",
        "rows": [cells(listing.columns, dict(row)) | button(dict(row)) for row in rows],
        "pages": {
            label: "?" + urlencode(visit.query | {"page": str(other)})
            for label, other in (("Previous page", page - 1), ("Next page", page + 1))
            if 1 <= other <= num_pages
        },
    }


def to_unit(entry: str, scale: int) -> str | int:
    """A number that the user entered, times `scale`; "" stays as it is."""
    if not entry:
        return ""
    if not re.fullmatch(r"-?[0-9]{1,9}(\.[0-9]{1,9})?", entry):
        raise Refusal(f"{entry!r:.40} is not a number.")
    return round(float(entry) * scale)


# ----------------------------------------------------------------------------------------- answers

LOADER = jinja2.FileSystemLoader(Path(__file__).with_name("templates"))
TEMPLATES = jinja2.Environment(
    loader=LOADER, autoescape=True, trim_blocks=True, lstrip_blocks=True, auto_reload=False
)


def respond(
    site: Site, database: Database, method: str, path: str, query: str, form: str, user: str
) -> Response:
    """Answer a request. `user` is a cookie. It can be trusted: a session has one browser."""
    entries = dict(parse_qsl(query))
    if method == "GET" and len(entries) < len(parse_qsl(query, keep_blank_values=True)):
        # A GET form also sends its empty fields. Without them, a list has one address only.
        return RedirectResponse(f"{path}?{urlencode(entries)}".rstrip("?"), 303)
    fields = {name: entry.strip() for name, entry in parse_qsl(form, keep_blank_values=True)}
    member = site.account[0] if user == site.account[0] else ""
    values = Values(entries | fields | {"user": member, "today": TODAY})
    status = 200
    try:
        answer = site.answer(method, path.rstrip("/"), Visit(site, database, entries, values))
    except SignInNeeded:
        return RedirectResponse(f"{site.root}/login?{urlencode({'next': path})}", 303)
    except Refusal as refusal:
        status = 404 if isinstance(refusal, NotFound) else 422
        title = "Not found" if status == 404 else "Please check your entry"
        answer = title, [{"kind": "text", "text": str(refusal)}]
    if isinstance(answer, str):
        response: Response = RedirectResponse(answer, 303)
        if values["user"] != member:
            response.set_cookie("user", values["user"])
        return response
    template = TEMPLATES.get_template("page.html")
    title, parts = answer
    html = template.render(site=site, title=title, parts=parts, user=values["user"])
    return HTMLResponse(html, status)
