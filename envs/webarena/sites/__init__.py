"""The five sites, served on one port. Each session has its own host names and sees its own rows.

    http://shop-TOKEN.test/search?q=lamp      the shop of the session with this token
    http://cms-TOKEN.test/admin/orders        the same shop's administration: same rows

The policy sees the names in PUBLIC instead. The rows of all sites are built once, into SQLite files
in the cache. A session reads these files until it changes a row. Then it gets its own copy in
memory, so that any number of sessions can change the same rows without seeing each other.

    sites = Sites()
    token = sites.open()
    sites.base_url("map", token)              "http://map-TOKEN.test"
    sites.query(token, "map", "SELECT name FROM places")
    sites.close(token)

`python -m envs.webarena.sites --port 8000` opens a session for people. Read next: engine.py.
"""

import hashlib
import re
import secrets
import socket
import sqlite3
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from envs.webarena.sites import admin, forge, forum, map, shop
from envs.webarena.sites.engine import Site, money, respond, slug
from run.files import build_folder, cache_dir

# The first label of a site's host name, before the session's token.
HOSTS = {"shop": shop.SITE, "cms": admin.SITE, "forum": forum.SITE, "forge": forge.SITE}
HOSTS["map"] = map.SITE
SITES = tuple(site.name for site in HOSTS.values())
PUBLIC = {
    "shopping": "http://onestopmarket.com",
    "shopping_admin": "http://luma.com/admin",
    "reddit": "http://reddit.com",
    "gitlab": "http://gitlab.com",
    "map": "http://openstreetmap.org",
}
# Browsers resolve *.localhost to this machine; *.test is for browsers that are told the address.
HOST_NAME = re.compile(r"(?P<site>[a-z]+)-(?P<token>[0-9a-f]{32})\.(test|localhost)(:\d+)?")


def site_named(name: str) -> Site:
    return next(site for site in HOSTS.values() if site.name == name)


def build_masters() -> dict[str, Path]:
    """The SQLite files of all sites; built if the cache has none from this version of the code."""
    here = Path(__file__).parent
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(here.glob("*.py"))))
    folder = cache_dir().absolute() / "webarena" / digest.hexdigest()[:16]
    data = {site.data.name: site.data for site in HOSTS.values()}

    def build(new: Path) -> None:
        for one in data.values():
            one.build(new / f"{one.name}.sqlite")

    if not folder.is_dir():
        build_folder(folder, build)
    return {name: folder / f"{name}.sqlite" for name in data}


def connect(address: str) -> sqlite3.Connection:
    """Open a database that any thread may use, one at a time, with the functions of our SQL."""
    database = sqlite3.connect(address, uri=True, check_same_thread=False)
    database.row_factory = sqlite3.Row
    for function, arguments in ((money, 1), (slug, 1), (map.road, 4), (map.minutes, 2)):
        database.create_function(function.__name__, arguments, function, deterministic=True)
    return database


def read_only(path: Path) -> str:
    """The address of a database file that nobody changes."""
    return f"{path.as_uri()}?mode=ro&immutable=1"


def open_masters() -> dict[str, sqlite3.Connection]:
    return {name: connect(read_only(path)) for name, path in build_masters().items()}


class Session:
    """The rows of one session: the masters', and its own copy of those that it has changed."""

    def __init__(self, masters: Mapping[str, sqlite3.Connection]) -> None:
        self._masters = masters
        self._copies: dict[str, sqlite3.Connection] = {}

    def query(self, data: str, sql: str, parameters: Any = ()) -> list[sqlite3.Row]:
        return self._connection(data).execute(sql, parameters).fetchall()

    def write(self, data: str, statements: Sequence[str], parameters: Mapping) -> int:
        """Execute all statements, or none if one fails; returns the id of the last new row."""
        if data not in self._copies:
            copy = connect(":memory:")
            self._masters[data].backup(copy)
            self._copies[data] = copy
        with self._copies[data] as connection:
            for statement in statements:
                cursor = connection.execute(statement, parameters)
        return cursor.lastrowid or 0

    def close(self) -> None:
        for copy in self._copies.values():
            copy.close()

    def _connection(self, data: str) -> sqlite3.Connection:
        return self._copies.get(data) or self._masters[data]


class Sites:
    """A server of all sites in a thread; see the module docstring. All methods are thread-safe."""

    def __init__(self, port: int = 0) -> None:
        self._masters = open_masters()
        self._sessions: dict[str, Session] = {}
        self._lock = threading.Lock()  # SQLite connections are used by one thread at a time
        listener = socket.create_server(("127.0.0.1", port), backlog=1024)
        self.port: int = listener.getsockname()[1]
        options: dict[str, Any] = {"interface": "asgi3", "lifespan": "off", "log_level": "error"}
        config = uvicorn.Config(self._answer, timeout_graceful_shutdown=1, **options)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=self._server.run, args=([listener],), name="webarena sites", daemon=True
        )
        self._thread.start()

    def open(self) -> str:
        """Open a session; from now on its hosts exist. Returns its token."""
        token = secrets.token_hex(16)
        self._sessions[token] = Session(self._masters)
        return token

    def close(self, token: str) -> None:
        with self._lock:
            self._sessions.pop(token).close()

    def base_url(self, site: str, token: str) -> str:
        """The session's counterpart of PUBLIC[site], without the port."""
        label = next(label for label, of_label in HOSTS.items() if of_label.name == site)
        return f"http://{label}-{token}.test{site_named(site).root}"

    def query(
        self, token: str, site: str, sql: str, parameters: Sequence = ()
    ) -> list[sqlite3.Row]:
        """Rows as this session sees them."""
        with self._lock:
            return self._sessions[token].query(site_named(site).data.name, sql, parameters)

    def log_in(self, site: str) -> tuple[str, str]:
        """User and password of the site's account; both are "" for the map, which has none."""
        return site_named(site).account

    def sign_in(self, site: str) -> dict[str, str]:
        """The cookies of a browser that has signed in to the site's account."""
        user, _ = self.log_in(site)
        return {"user": user} if user else {}

    def shutdown(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        for token in list(self._sessions):
            self.close(token)
        for master in self._masters.values():
            master.close()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        match = HOST_NAME.fullmatch(request.headers.get("host", ""))
        form = (await request.body()).decode("utf-8", "replace")
        with self._lock:
            session = self._sessions.get(match["token"]) if match else None
            if not match or not session or match["site"] not in HOSTS:
                response: Response = PlainTextResponse("This site does not exist.", 404)
            else:
                site, user = HOSTS[match["site"]], request.cookies.get("user", "")
                path, query = scope["path"], request.url.query
                response = respond(site, session, request.method, path, query, form, user)
        await response(scope, receive, send)
