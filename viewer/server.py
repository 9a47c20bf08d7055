"""The page and its data over HTTP, for browsers on this machine.

    GET  /                            the page; /page/NAME its files
    GET  /api/sources  /api/version   the sources, and a number that grows when there is more to see
    GET  /api/overview/S              curves, evaluations, alarms of source S
    GET  /api/{list,groups,wrong}/S/FILE       trajectories by their heads; what fails
    GET  /api/trajectory/S/FILE/LINE  one trajectory
    GET  /api/search/S?text=          lines of JSON: hits and progress
    POST /api/reenact  /api/play/...  live environments (play.py)

Text that a model, an environment or a web site wrote is only ever shown as text, and no path comes
from the page: S is a number and FILE a name that the source lists. Other web pages can neither read
nor play: the Host must be this machine, a POST must come from this page and carry the token that
only this page was given, and the Content-Security-Policy lets the page load nothing else.

Read next: page/app.js.
"""

from __future__ import annotations

import hmac
import json
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI, Request
from fastapi.responses import Response, StreamingResponse

from viewer.overview import differing, overview, what_goes_wrong
from viewer.play import Play, PlayError, reenact
from viewer.sources import Source, size_of
from viewer.trajectories import Filter, groups_of, list_rows, search, trajectory_view

PAGE = Path(__file__).parent / "page"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
STATUS = {  # of an answer, by what was raised; the first class that fits
    PlayError: 409,
    KeyError: 404,
    IndexError: 404,
    LookupError: 409,
    OSError: 409,
    ValueError: 400,
}
MAX_HITS = 500  # of a search
PROGRESS_S = 0.2  # between two progress lines of a search
MAX_ROWS = 1_000  # of a list at a time
LOCAL_NAMES = ("127.0.0.1", "localhost")


def as_json(content: Any) -> str:
    """ASCII, since a model may have written half a surrogate pair. Raises ValueError for infinity,
    which a damaged file may hold as 1e999."""
    return json.dumps(content, allow_nan=False, separators=(",", ":"), default=str)


def answer(content: Any, status: int = 200) -> Response:
    return Response(as_json(content), status, media_type="application/json")


class Library:
    """The sources, and a version number of all that can be seen."""

    def __init__(self, sources: list[Source]) -> None:
        self.sources = sources
        self._version, self._state = 0, ""

    def version(self) -> int:
        state = "\n".join(source.state() for source in self.sources)
        if state != self._state:
            self._state, self._version = state, self._version + 1
        return self._version

    def __getitem__(self, number: int) -> Source:
        if not 0 <= number < len(self.sources):
            raise IndexError(f"source {number}")
        return self.sources[number]

    def describe(self, can_play: bool) -> dict[str, Any]:
        return {
            "version": self.version(),
            "live": any(source.is_live() for source in self.sources),
            "can_play": can_play,
            "sources": [describe(source) for source in self.sources],
            "differing": differing(self.sources) if len(self.sources) > 1 else {},
        }


def describe(source: Source) -> dict[str, Any]:
    about = {"id": source.number, "name": source.name, "kind": source.kind, "env": source.env}
    return about | {"files": source.listing(), "status": source.status()}


def create_app(sources: list[Source], play: Play | None = None) -> FastAPI:
    """The app; without `play` nothing can be played."""
    app = FastAPI(title="replay", docs_url=None, redoc_url=None, openapi_url=None)
    library, token = Library(sources), secrets.token_urlsafe(24)
    app.state.token = token
    app.middleware("http")(partial(guard, token))
    for kind, status in STATUS.items():
        app.add_exception_handler(kind, partial(report, status))
    add_page(app, token)
    add_data(app, library, can_play=play is not None)
    if play is not None:
        add_play(app, library, play)
    return app


async def guard(
    token: str, request: Request, proceed: Callable[[Request], Awaitable[Response]]
) -> Response:
    """Answer this server's own page only; every answer carries the policy."""
    problem = refusal(token, request)
    response = answer({"error": problem}, 403) if problem else await proceed(request)
    response.headers.update(HEADERS)
    return response


def refusal(token: str, request: Request) -> str:
    """Why a request is refused; "" if it is not."""
    host = request.headers.get("host", "")
    # The port is not compared: behind an SSH tunnel it is another one.
    if host.partition(":")[0].lower() not in LOCAL_NAMES:
        return "this server answers only under its own address"
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != host:
        return "the request comes from another web page"
    given = request.headers.get("x-replay-token", "")
    if request.method not in ("GET", "HEAD") and not hmac.compare_digest(
        given.encode(), token.encode()
    ):
        return "the page's token is missing; reload the page"
    return ""


async def report(status: int, _: Request, error: Exception) -> Response:
    if status == 404:
        return answer({"error": f"not found: {error.args[0] if error.args else ''}"}, status)
    return answer({"error": str(error), "hint": ""}, status)


# -------------------------------------------------------------------------------- page and data


def page_files() -> dict[str, Path]:
    """The files of the page, by name."""
    paths = (path for path in sorted(PAGE.rglob("*")) if path.suffix in TYPES)
    return {path.relative_to(PAGE).as_posix(): path for path in paths}


def add_page(app: FastAPI, token: str) -> None:
    files = page_files()

    @app.get("/")
    def index() -> Response:
        html = files["index.html"].read_text(encoding="utf-8")
        meta = '<meta name="replay-token" content="'
        return Response(html.replace(f'{meta}"', f'{meta}{token}"'), media_type="text/html")

    @app.get("/page/{name:path}")
    def file(name: str) -> Response:
        path = files[name]
        return Response(path.read_bytes(), media_type=TYPES[path.suffix])


def add_data(app: FastAPI, library: Library, can_play: bool) -> None:
    @app.get("/api/sources")
    def sources() -> Response:
        return answer(library.describe(can_play))

    @app.get("/api/version")
    def version() -> Response:
        return answer({"version": library.version()})

    @app.get("/api/overview/{number}")
    def overview_of(number: int) -> Response:
        return answer(overview(library[number]))

    @app.get("/api/list/{number}/{name}")
    def rows(number: int, name: str, request: Request) -> Response:
        query = {name: value for name, value in request.query_params.items() if value}
        offset, limit = int(query.get("offset", 0)), int(query.get("limit", 200))
        limit = min(limit, MAX_ROWS)
        chosen, sort = filter_of(query), query.get("sort", "line")
        return answer(list_rows(library[number].lines(name), chosen, sort, offset, limit))

    @app.get("/api/groups/{number}/{name}")
    def groups(number: int, name: str) -> Response:
        return answer({"groups": groups_of(library[number].lines(name))})

    @app.get("/api/wrong/{number}/{name}")
    def wrong(number: int, name: str) -> Response:
        return answer(what_goes_wrong(library[number].lines(name)))

    @app.get("/api/trajectory/{number}/{name}/{line}")
    def trajectory(number: int, name: str, line: int) -> Response:
        return answer(trajectory_view(library[number], name, line))

    @app.get("/api/search/{number}")
    def hits(number: int, text: str = "") -> Response:
        lines = (as_json(line).encode() + b"\n" for line in search_source(library[number], text))
        return StreamingResponse(lines, media_type="application/x-ndjson")


def filter_of(query: dict[str, str]) -> Filter:
    """Raises: ValueError if a limit is not a number."""
    given: dict[str, Any] = {f.name: query[f.name] for f in fields(Filter) if f.name in query}
    for name in given:
        if name.startswith(("min_", "max_")):
            given[name] = float(given[name])
    return Filter(**given)


def search_source(source: Source, text: str) -> Iterator[dict[str, Any]]:
    """Hits in all files of a source, newest first, with progress between them."""
    files = list(reversed(source.files())) if text.strip() else []
    total = sum(size_of(file.path) for file in files)
    before, hits, told = 0, 0, 0.0
    for file in files:
        for done, hit in search(source.lines(file.name), text):
            if hit:
                hits += 1
                yield {"hit": {"file": file.name, **hit}}
            if hits == MAX_HITS:
                yield {"done": True, "hits": hits, "cut": True}
                return
            if time.monotonic() - told > PROGRESS_S:
                told = time.monotonic()
                yield {"progress": [before + done, total]}
        before += size_of(file.path)
    yield {"done": True, "hits": hits, "cut": False}


# ------------------------------------------------------------------------------------------- play


def add_play(app: FastAPI, library: Library, play: Play) -> None:
    # FastAPI runs these in threads, so the page is served while an environment takes its time.
    @app.post("/api/reenact")
    def reenact_line(body: dict[str, Any]) -> Response:
        source = library[whole_number(body, "source")]
        line = source.lines(str(body.get("file"))).read(whole_number(body, "line"))
        return answer(reenact(play.environments, line, source.env))

    @app.post("/api/play/{what}")
    def act(what: str, body: dict[str, Any]) -> Response:
        session = str(body.get("session"))
        actions: dict[str, Callable[[], Any]] = {
            "worlds": play.list_environments,
            "new": lambda: play.new(str(body.get("env")), whole_number(body, "task_index")),
            "show": lambda: play.show(session),
            "step": lambda: play.step(session, str(body.get("action", ""))),
            "oracle": lambda: play.oracle(session),
            "model": lambda: play.let_model_act(session),
            "save": lambda: play.save(session),
            "close": lambda: play.close(session),
        }
        return answer(actions[what]())


def whole_number(body: dict[str, Any], name: str) -> int:
    value = body.get(name)
    if not isinstance(value, int) or value < 0:
        raise ValueError(f"{name} must be a whole number from 0 on")
    return value
