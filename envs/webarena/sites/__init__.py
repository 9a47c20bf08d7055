"""The five sites, served on one port. Each session has its own host names and sees its own rows.

    http://shop-TOKEN.test/search?keyword=lamp  the shop of the session with this token
    http://cms-TOKEN.test/admin/orders          the same shop's administration: same rows

The policy sees the names in PUBLIC instead. The rows of all sites are built once, into an SQLite
file in the cache. A session reads this file until it changes a row. Then it gets its own copy in
memory, so that any number of sessions can change the same rows without seeing each other. A session
is signed in to all sites.

    sites = Sites()
    token = sites.open()
    sites.base_url("map", token)              "http://map-TOKEN.test"
    sites.query(token, "SELECT name FROM places")
    sites.close(token)

`python -m envs.webarena.sites --port 8000` opens a session for people. Read next: engine.py.
"""

import hashlib
import random
import re
import secrets
import socket
import sqlite3
import threading
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import uvicorn
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from envs.webarena.sites import admin, forge, forum, map, shop
from envs.webarena.sites.engine import Session, connect
from run.files import build_folder, cache_dir

SITES = {module.SITE.name: module.SITE for module in (shop, admin, forum, forge, map)}
PUBLIC = {name: site.public for name, site in SITES.items()}
# Browsers resolve *.localhost to this machine; *.test is for browsers that are told the address.
HOST_NAME = re.compile(r"(?P<label>[a-z]+)-(?P<token>[0-9a-f]{32})\.(test|localhost)(:\d+)?")


def build_rows(path: Path) -> None:
    """Write the database file of all sites; the rows are the same on every machine."""
    database = sqlite3.connect(path)
    for name, module in {"shop": shop, "forum": forum, "forge": forge, "map": map}.items():
        database.executescript(module.SCHEMA)
        for table, values in module.make_rows(random.Random(name)):
            marks = ", ".join("?" * len(values))
            database.execute(f"INSERT INTO {table} VALUES ({marks})", values)
    database.commit()
    database.close()


def open_master() -> sqlite3.Connection:
    """The rows of all sites; built if the cache has none from this version of the code."""
    here = Path(__file__).parent
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in sorted(here.glob("*.py"))))
    folder = cache_dir().absolute() / "webarena" / digest.hexdigest()[:16]
    if not folder.is_dir():
        build_folder(folder, lambda new: build_rows(new / "sites.sqlite"))
    return connect(f"{(folder / 'sites.sqlite').as_uri()}?mode=ro&immutable=1")


class Sites:
    """A server of all sites in a thread; see the module docstring. All methods are thread-safe."""

    def __init__(self, port: int = 0) -> None:
        self._master = open_master()
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
        self._sessions[token] = Session(self._master)
        return token

    def close(self, token: str) -> None:
        with self._lock:
            self._sessions.pop(token).close()

    def base_url(self, site: str, token: str) -> str:
        """The session's counterpart of PUBLIC[site], without the port."""
        return f"http://{SITES[site].label}-{token}.test{urlsplit(PUBLIC[site]).path}"

    def query(self, token: str, sql: str) -> list[sqlite3.Row]:
        """Rows as this session sees them."""
        with self._lock:
            return self._sessions[token].query(sql)

    def shutdown(self) -> None:
        self._server.should_exit = True
        self._thread.join()
        for token in list(self._sessions):
            self.close(token)
        self._master.close()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        match = HOST_NAME.fullmatch(request.headers.get("host", ""))
        form = (await request.body()).decode("utf-8", "replace")
        site = next((s for s in SITES.values() if match and s.label == match["label"]), None)
        with self._lock:
            session = self._sessions.get(match["token"]) if match else None
            if not site or not session:
                response: Response = PlainTextResponse("This site does not exist.", 404)
            else:
                path, query = scope["path"], request.url.query
                response = site.respond(session, request.method, path, query, form)
        await response(scope, receive, send)
