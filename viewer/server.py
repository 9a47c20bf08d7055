"""The page and its data over HTTP, for the browser of this machine alone.

    GET  /                            the page; /page/NAME its files
    GET  /api/sources  /api/version   what there is, and a number that grows when there is more
    GET  /api/overview/S              curves, evaluations, alarms of source S
    GET  /api/list/S/FILE  groups  wrong       trajectories by their heads; what fails
    GET  /api/trajectory/S/FILE/LINE  one, whole
    GET  /api/search/S?text=          lines of JSON as they are found, with progress between
    GET  /media/S/FILE/NAME           pictures that states refer to
    POST /api/reenact  /api/play/...  worlds that are played (play.py)

What a model, a world or a web site wrote is shown as text, and nothing that a page sends is a path:
S is a number, FILE a name that the source lists. Another web page can neither read nor play: the
request's Host must be this server's, a POST must come from its own page and hold the token that
only this page was given, and the Content-Security-Policy lets the page load and ask nothing else.

Read next: page/app.js.
"""

from __future__ import annotations

import hmac
import json
import math
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
from starlette.exceptions import HTTPException

from envs.limits import name_in
from run.media import FOLDER, PATH, texts_changed
from viewer.overview import differing, overview
from viewer.play import Play, PlayError, Worlds, reenact
from viewer.sources import RunSource, Source, mtime, size_of
from viewer.trajectories import Filter, groups_of, list_rows, one
from viewer.wrong import may_hold, search, what_goes_wrong

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
MOST_HITS = 500  # of a search
PROGRESS_S = 0.2  # between two words of a search about how far it is
MOST_LIMIT = 1_000  # rows of a list at a time
LOCAL_NAMES = ("127.0.0.1", "localhost", "[::1]")


def as_json(content: Any) -> str:
    """In ASCII, so that half a surrogate in what a model wrote is no error; a number that is not
    finite, which a file may hold (1e999) and a browser does not read, becomes null."""
    told = partial(json.dumps, ensure_ascii=True, separators=(",", ":"), default=str)
    try:
        return told(content, allow_nan=False)
    except ValueError:
        return told(finite(json.loads(told(content))))


def finite(content: Any) -> Any:
    """The same JSON value without infinities and NaN."""
    if isinstance(content, dict):
        return {name: finite(value) for name, value in content.items()}
    if isinstance(content, list):
        return [finite(value) for value in content]
    return content if not isinstance(content, float) or math.isfinite(content) else None


def answer(content: Any, status: int = 200) -> Response:
    return Response(as_json(content), status, media_type="application/json")


class Library:
    """The sources, and a version of all that can be seen."""

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
            raise HTTPException(404, f"there is no source {number}")
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
    status = ""
    if isinstance(source, RunSource):
        steps = source.config().get("steps")
        status = f"{source.last_step()} of {steps} steps" if steps else ""
        if source.is_live():
            age = time.time() - mtime(source.path / "metrics.jsonl")
            status += f", written {age:.0f} s ago"
    return {
        "id": source.number,
        "name": source.name,
        "kind": source.kind,
        "env": source.env,
        "files": source.listing(),
        "status": status,
    }


def create_app(
    sources: list[Source], worlds: Worlds | None = None, play: Play | None = None
) -> FastAPI:
    """The app, which answers to names of this machine alone.

    Without `play` and `worlds` nothing is played.
    """
    app = FastAPI(title="replay", docs_url=None, redoc_url=None, openapi_url=None)
    library, token = Library(sources), secrets.token_urlsafe(24)
    app.state.token = token
    app.middleware("http")(guard(token))
    add_errors(app)
    add_page(app, token)
    add_reading(app, library, can_play=play is not None)
    if play is not None and worlds is not None:
        add_playing(app, library, worlds, play)
    return app


Next = Callable[[Request], Awaitable[Response]]


def guard(token: str) -> Callable[[Request, Next], Awaitable[Response]]:
    """Only this server's page is answered; every answer says what the page may do."""

    async def check(request: Request, proceed: Next) -> Response:
        refused = why_refused(request, token)
        response = answer({"error": refused, "hint": ""}, 403) if refused else None
        response = response or await proceed(request)
        response.headers.update(HEADERS)
        return response

    return check


def why_refused(request: Request, token: str) -> str:
    host = request.headers.get("host", "")
    # Not the port: behind an SSH tunnel it is another one.
    if name_in(host) not in LOCAL_NAMES:
        return "this server answers to its own address alone"
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != host:
        return "another web page asks"
    if request.method in ("GET", "HEAD"):
        return ""
    given = request.headers.get("x-replay-token", "")
    if not hmac.compare_digest(given.encode(), token.encode()):
        return "the page's token is missing; reload the page"
    return ""


def add_errors(app: FastAPI) -> None:
    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> Response:
        return answer({"error": str(error.detail), "hint": ""}, error.status_code)

    @app.exception_handler(PlayError)
    async def play_error(_: Request, error: PlayError) -> Response:
        return answer({"error": str(error), "hint": ""}, 409)

    @app.exception_handler(KeyError)
    @app.exception_handler(IndexError)
    async def unknown(_: Request, error: Exception) -> Response:
        what = f"there is no {error.args[0] if error.args else 'such thing'!r} here"
        return answer({"error": what, "hint": "go back to the overview"}, 404)

    @app.exception_handler(LookupError)
    @app.exception_handler(OSError)
    async def changed(_: Request, error: Exception) -> Response:
        return answer({"error": str(error), "hint": "reload the page"}, 409)

    @app.exception_handler(ValueError)
    async def misuse(_: Request, error: ValueError) -> Response:
        return answer({"error": str(error), "hint": ""}, 400)


def page_files() -> dict[str, Path]:
    """What is served of the page, by name."""
    found = (path for path in sorted(PAGE.rglob("*")) if path.suffix in TYPES)
    return {path.relative_to(PAGE).as_posix(): path for path in found}


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


def add_reading(app: FastAPI, library: Library, can_play: bool) -> None:
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
        q = dict(request.query_params)
        offset, limit = whole(q.get("offset"), 0), whole(q.get("limit"), 200)
        lines = library[number].lines(name)
        found = list_rows(
            lines, filter_of(q), q.get("sort") or "line", offset, min(limit, MOST_LIMIT)
        )
        return answer(found)

    @app.get("/api/groups/{number}/{name}")
    def groups(number: int, name: str) -> Response:
        return answer({"groups": groups_of(library[number].lines(name))})

    @app.get("/api/wrong/{number}/{name}")
    def wrong(number: int, name: str) -> Response:
        return answer(what_goes_wrong(library[number].lines(name)))

    @app.get("/api/trajectory/{number}/{name}/{line}")
    def trajectory(number: int, name: str, line: int) -> Response:
        return answer(with_media(one(library[number], name, line), f"media/{number}/{name}"))

    @app.get("/api/search/{number}")
    def found(number: int, text: str = "") -> Response:
        return StreamingResponse(searched(library[number], text), media_type="application/x-ndjson")

    @app.get("/media/{number}/{name}/{picture}")
    def media(number: int, name: str, picture: str) -> Response:
        if not PATH.fullmatch(f"{FOLDER}/{picture}"):
            raise HTTPException(404, "no such picture")
        path = {file.name: file.path for file in library[number].files()}[name]
        content = (path.parent / FOLDER / picture).read_bytes()
        return Response(content, media_type=f"image/{picture.rpartition('.')[2]}")


def with_media(content: Any, base: str) -> Any:
    """States' paths of pictures, from where the page asks for them."""

    def moved(text: str) -> str:
        found = PATH.fullmatch(text)
        return f"{base}/{found[1]}" if found else text

    return texts_changed(content, moved)


def whole(text: str | None, default: int) -> int:
    """A number that is not negative; ValueError."""
    if not text:
        return default
    if not text.isdecimal():
        raise ValueError(f"{text!r} is no whole number")
    return int(text[:12])


def filter_of(query: dict[str, str]) -> Filter:
    """The filter that a query asks for; what it does not know is left out.

    Raises: ValueError: a limit is no number.
    """
    given: dict[str, Any] = {f.name: query[f.name] for f in fields(Filter) if query.get(f.name)}
    for name in ("min_return", "max_return", "min_turns", "max_turns"):
        if name in given:
            given[name] = float(given[name])
    if "parse_errors" in given:
        given["parse_errors"] = given["parse_errors"] not in ("0", "false")
    return Filter(**given)


def searched(source: Source, text: str) -> Iterator[bytes]:
    """A search over all files of a source, newest first, told while it goes on."""
    files = list(reversed(source.files()))
    total, before, hits, told = sum(size_of(f.path) for f in files), 0, 0, 0.0
    for file in files if text.strip() else []:
        for done, hit in search(source.lines(file.name), text) if may_hold(file.path, text) else ():
            if hit:
                hits += 1
                yield line_of({"hit": {"file": file.name, **hit}})
            if time.monotonic() - told > PROGRESS_S:
                told = time.monotonic()
                yield line_of({"progress": [before + done, total]})
            if hits == MOST_HITS:
                yield line_of({"done": True, "hits": hits, "cut": True})
                return
        before += size_of(file.path)
        if time.monotonic() - told > PROGRESS_S:
            told = time.monotonic()
            yield line_of({"progress": [before, total]})
    yield line_of({"done": True, "hits": hits, "cut": False})


def line_of(content: dict[str, Any]) -> bytes:
    return (as_json(content) + "\n").encode()


def add_playing(app: FastAPI, library: Library, worlds: Worlds, play: Play) -> None:
    @app.post("/api/reenact")
    async def again(request: Request) -> Response:
        body = await body_of(request)
        source = library[number_in(body, "source")]
        lines = source.lines(str(body.get("file")))
        line = lines.read(number_in(body, "line"))
        return answer(await threaded(reenact, worlds, line, source.env))

    @app.post("/api/play/{what}")
    async def played(what: str, request: Request) -> Response:
        body = await body_of(request)
        session = str(body.get("session"))
        acts: dict[str, Callable[[], Any]] = {
            "worlds": play.list_worlds,
            "new": lambda: play.new(str(body.get("env")), number_in(body, "task_index")),
            "show": lambda: play.show(session),
            "step": lambda: play.step(session, str(body.get("action", ""))),
            "oracle": lambda: play.oracle(session),
            "model": lambda: play.let_model_move(session),
            "save": lambda: play.save(session),
            "close": lambda: play.close(session),
        }
        return answer(await threaded(acts[what]))


async def threaded(call: Callable[..., Any], *arguments: Any) -> Any:
    """Worlds take their time; the page is served meanwhile."""
    import anyio.to_thread

    return await anyio.to_thread.run_sync(lambda: call(*arguments))


async def body_of(request: Request) -> dict[str, Any]:
    try:
        body = await request.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        raise HTTPException(400, "the body is no JSON object")
    return body


def number_in(body: dict[str, Any], name: str) -> int:
    value = body.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise HTTPException(400, f"{name} must be a whole number from 0 on")
    return value
