"""The engine of all sites: pages without JavaScript, made from declarations.

A page has a heading and parts. It can be about one row of a table, and it can have forms: a form
sends its fields to its own page, which executes the form's SQL and leads to the next page. The
schema's constraints check what users enter.

    SITE = Site("shopping", "shop", "http://onestopmarket.com", "Shop", nav={"Cart": "/cart"})
    SITE.page(
        "/products/{slug}", "{name}",
        Facts("description, price $, category /categories/{category}"),
        Form("Add to cart", {"Quantity": "123"}, "REPLACE INTO cart VALUES (:id, :quantity)",
             then="/cart"),
        row="SELECT * FROM products WHERE slug = :slug"
    )

:names in SQL and {names} in texts are the parts of the path, the query, the columns of the row, and
the fields of the form ("New price" is :new_price); `user` and `today` also exist. `Listing` is a
table with filters, sorting and pages, all in the query of the URL:
/search?keyword=lamp&price_to=20&sort_by=Rating&page=2.

Everything is deterministic: the rows come from a seeded generator, and the date is always TODAY.

Read next: envs/webarena/sites/shop.py.
"""

import random
import re
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date, timedelta
from math import isqrt
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlencode

import jinja2
from starlette.responses import HTMLResponse, RedirectResponse, Response

TODAY = "2026-06-15"
ROWS_PER_PAGE = 12
SPEEDS = {"car": 50, "bike": 15, "foot": 5}  # kilometers in an hour

Rows = Iterator[tuple[str, tuple]]  # table, values; the value None becomes the row's number


def recent_day(random: random.Random, num_days: int) -> str:
    """One of the last `num_days` days."""
    return str(date.fromisoformat(TODAY) - timedelta(random.randrange(num_days)))


def invent_people(random: random.Random, number: int) -> list[str]:
    """Different names of people."""
    first = "Ada Ben Clara David Elena Felix Grace Hugo Iris Jonas Kira Leo Mona Nils Olga Paul"
    last = "Abbott Brandt Castell Dorsey Egan Fischer Gomez Hale Ivanov Jansen Keller Lindt Moss"
    return random.sample([f"{a} {b}" for a in first.split() for b in last.split()], number)


# --------------------------------------------------------------------------------- rows and SQL


def money(cents: int) -> str:
    """
    >>> money(123456)
    '$1,234.56'
    """
    return f"${cents / 100:,.2f}"


def slug(name: str) -> str:
    """
    >>> slug("Acorn & Sons")
    'acorn-sons'
    """
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def road(x1: int, y1: int, x2: int, y2: int) -> float:
    """Kilometers by road, which is a quarter longer than the straight line between two points in
    meters. Integers until the end, so that it is the same on every machine.

    >>> road(0, 0, 3000, 4000)
    6.3
    """
    straight = isqrt((x1 - x2) ** 2 + (y1 - y2) ** 2)
    return (straight * 5 // 4 + 50) // 100 / 10


def minutes(km: float, mode: str) -> int:
    """Travel time.

    >>> minutes(6.3, "foot")
    76
    """
    return max(1, round(km * 60 / SPEEDS[mode]))


def connect(address: str) -> sqlite3.Connection:
    """Open a database that any thread may use, one at a time, with the functions of our SQL."""
    database = sqlite3.connect(address, uri=True, check_same_thread=False)
    database.row_factory = sqlite3.Row
    for function, arguments in ((money, 1), (slug, 1), (road, 4), (minutes, 2)):
        database.create_function(function.__name__, arguments, function, deterministic=True)
    return database


class Session:
    """The rows of one session: the master's, and after its first change a copy of its own."""

    def __init__(self, master: sqlite3.Connection) -> None:
        self._master = self._database = master

    @property
    def has_copy(self) -> bool:
        return self._database is not self._master

    def query(self, sql: str, values: Any = ()) -> list[sqlite3.Row]:
        return self._database.execute(sql, values).fetchall()

    def write(self, statements: Sequence[str], values: Any = ()) -> int:
        """Execute all statements, or none if one fails; returns the id of the last new row."""
        if not self.has_copy:
            self._database = connect(":memory:")
            self._master.backup(self._database)
        with self._database:
            for statement in statements:
                cursor = self._database.execute(statement, values)
        return cursor.lastrowid or 0

    def close(self) -> None:
        if self.has_copy:
            self._database.close()


# --------------------------------------------------------------------------------- parts of a page


class Refusal(Exception):
    """A request that cannot be answered; the user reads the message."""

    def __init__(self, status: int, title: str, problem: str) -> None:
        super().__init__(problem)
        self.status, self.title = status, title


class Values(dict):
    """The values of a request by name; a name that is missing is empty."""

    def __missing__(self, name: str) -> str:
        return ""


class Visit(NamedTuple):
    """One request and the rows of its session."""

    session: Session
    query: Mapping[str, str]
    values: Values


def field_name(label: str) -> str:
    """The name of a field in URLs and SQL: "Sort by" is sort_by."""
    return label.lower().replace(" ", "_")


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


class Links(NamedTuple):
    links: Mapping[str, str]  # text -> address
    title: str = ""

    def view(self, visit: Visit) -> dict[str, Any]:
        """What the template shows of this part."""
        return {text: address.format_map(visit.values) for text, address in self.links.items()}


class Facts(NamedTuple):
    """A table of names and values. The id of a value is the name of its column: #price."""

    columns: str  # of the page's row; see `cells`

    def view(self, visit: Visit) -> dict[str, Any]:
        return cells(self.columns, visit.values)


class Form(NamedTuple):
    button: str
    fields: Mapping[str, Sequence[str]]  # label -> options, if it is a selection
    sql: str | Sequence[str]
    then: str = ""  # the next page, by default the same; {new} is the number of an inserted row

    def view(self, visit: Visit) -> Mapping[str, Sequence[str]]:
        return self.fields

    def send(self, visit: Visit, entries: Mapping[str, str], path: str) -> str:
        """Execute the SQL; returns the address of the next page."""
        names = map(field_name, self.fields)
        values = Values(visit.values | {name: entries.get(name, "").strip() for name in names})
        if empty := [label for label in self.fields if not values[field_name(label)]]:
            raise Refusal(422, "Please check your entry", f"The field {empty[0]} is empty.")
        statements = [self.sql] if isinstance(self.sql, str) else self.sql
        try:
            number = visit.session.write(statements, values)
        except sqlite3.IntegrityError as error:
            problem = f"The entry is not accepted ({error})."
            raise Refusal(422, "Please check your entry", problem) from error
        return (self.then or path).format_map(values | {"new": number})


class Filter(NamedTuple):
    """A field that restricts a listing if it is not empty."""

    label: str
    options: Sequence[str] = ()
    test: str = ""  # SQL, "price <= :price_to"; by default, the column of this name must be equal


def keyword(column: str) -> Filter:
    """Rows whose column has these words in this order."""
    return Filter("Keyword", test=f"{column} LIKE '%' || replace(:keyword, ' ', '%') || '%'")


class Listing(NamedTuple):
    """A table of the rows of `sql`. The first of `sorts` is the default."""

    columns: str  # see `cells`
    sql: str
    filters: Sequence[Filter] = ()
    sorts: Mapping[str, str] = {}  # name -> SQL order
    title: str = ""

    def view(self, visit: Visit) -> dict[str, Any]:
        """Fields, rows of the current page, links to the others."""
        session, query, values = visit
        fields: dict[str, Sequence[str]] = {}
        tests: list[str] = []
        for label, options, test in self.filters:
            name = field_name(label)
            fields[label] = ("", *options) if options else ()
            if query.get(name):
                tests.append(test or f"{name} = :{name}")
        if len(self.sorts) > 1:
            fields["Sort by"] = tuple(self.sorts)
        order = self.sorts.get(query.get("sort_by", ""), next(iter(self.sorts.values()), "1"))
        selected = f"FROM ({self.sql}) WHERE {' AND '.join(tests) or '1'}"
        count = session.query(f"SELECT count(*) {selected}", values)[0][0]
        num_pages = max(1, -(-count // ROWS_PER_PAGE))
        number = query.get("page", "")
        page = min(max(int(number), 1), num_pages) if re.fullmatch("[0-9]{1,9}", number) else 1
        limits = f"LIMIT {ROWS_PER_PAGE} OFFSET {(page - 1) * ROWS_PER_PAGE}"
        rows = session.query(f"SELECT * {selected} ORDER BY {order} {limits}", values)
        return {
            "fields": fields,
            "count": f"{count} result{'s' * (count != 1)}, page {page} of {num_pages}",
            "rows": [cells(self.columns, dict(row)) for row in rows],
            "pages": {
                label: f"?{urlencode({**query, 'page': other})}"
                for label, other in (("Previous page", page - 1), ("Next page", page + 1))
                if 1 <= other <= num_pages
            },
        }


# ------------------------------------------------------------------------------------------- sites

TEMPLATES = jinja2.Environment(
    loader=jinja2.FileSystemLoader(Path(__file__).parent),
    autoescape=True,
    trim_blocks=True,
    lstrip_blocks=True,
)
TEMPLATES.filters["field_name"] = field_name


class Page(NamedTuple):
    pattern: re.Pattern  # of its path
    title: str
    parts: Sequence[Links | Facts | Form | Listing]
    row: str  # SQL that finds the row which the page is about


@dataclass
class Site:
    name: str  # as in WebArena's JSON
    label: str  # first part of the host name
    public: str  # the address that the policy sees
    title: str
    nav: Mapping[str, str]  # text -> address, on every page
    search: str = ""  # label of the search field on every page, which leads to /search
    user: str = ""  # who has signed in
    pages: list[Page] = field(default_factory=list)

    def page(self, path: str, title: str, *parts: Any, row: str = "") -> None:
        """Register a page. {names} in `path` are parts of the path."""
        pattern = re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", path))
        self.pages.append(Page(pattern, title, parts, row))

    def respond(self, session: Session, method: str, path: str, query: str, form: str) -> Response:
        """Answer a request: a page, or after a form the way to the next one."""
        entries, path = dict(parse_qsl(query)), path.rstrip("/")
        visit = Visit(session, entries, Values(entries, user=self.user, today=TODAY))
        try:
            page = self._find(path, visit)
            if method == "POST":
                sent = dict(parse_qsl(form, keep_blank_values=True))
                for part in page.parts:
                    if isinstance(part, Form) and part.button == sent.get("button"):
                        return RedirectResponse(part.send(visit, sent, path) or "/", 303)
            parts = [(type(part).__name__, part, part.view(visit)) for part in page.parts]
            return self._show(page.title.format_map(visit.values), parts, visit)
        except sqlite3.Error as error:  # a keyword of 50 kB, or a sum beyond 64 bits
            title, problem, status = "This cannot be shown", str(error), 400
        except Refusal as refusal:
            title, problem, status = refusal.title, str(refusal), refusal.status
        return self._show(title, [("Facts", None, {"problem": problem})], visit, status)

    def _find(self, path: str, visit: Visit) -> Page:
        """The page at a path; adds the values of its path and row."""
        for page in self.pages:
            if match := page.pattern.fullmatch(path):
                visit.values.update(match.groupdict())
                rows = visit.session.query(page.row or "SELECT 1", visit.values)
                if rows:
                    visit.values.update(dict(rows[0]))
                    return page
        raise Refusal(404, "Not found", "There is no such page.")

    def _show(self, title: str, parts: Sequence, visit: Visit, status: int = 200) -> Response:
        template = TEMPLATES.get_template("page.html")
        html = template.render(site=self, title=title, parts=parts, query=visit.query)
        return HTMLResponse(html, status)
