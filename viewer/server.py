"""The page and its data over HTTP, for the person who started replay.py.

    GET  /                            the page; /page/NAME its files
    GET  /api/sources                 all sources and their files
    GET  /api/version                 a number that changes when there is something new to show
    GET  /api/overview/S              curves, evaluations, alarms of source S
    GET  /api/{list,groups}/S/FILE    short fields of all trajectories, as a list or by group
    GET  /api/wrong/S/FILE            a summary of the failures
    GET  /api/trajectory/S/FILE/LINE  one trajectory
    GET  /api/search/S?text=          lines of JSON: hits and progress
    POST /api/reenact/S/FILE/LINE  /api/play/...      live environments (play.py)

Security: text from a model, an environment or a web site is only shown, never run. The page cannot
request arbitrary paths: S is a number and FILE a name that the source lists. Other users of this
machine and other web pages can neither read the data nor play: every request needs a token (first
in the address that replay.py prints, then in a cookie), and a request with an Origin must come from
this page. The Content-Security-Policy lets the page load nothing from elsewhere.

Read next: page/app.js.
"""

from __future__ import annotations

import json
import secrets
import time
import zlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from fastapi import FastAPI, Request
from fastapi.responses import FileResponse, HTMLResponse, Response, StreamingResponse
from fastapi.staticfiles import StaticFiles

from viewer.overview import differing_options, overview, summarize_failures
from viewer.play import Play, PlayError, reenact
from viewer.sources import Source
from viewer.trajectories import Lines, groups_of, search, trajectory_view

PAGE = Path(__file__).parent / "page"
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
        "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
# HTTP status of an exception. RecursionError: a state is nested too deeply to be written as JSON.
STATUS = {PlayError: 409, LookupError: 404, OSError: 404, ValueError: 400, RecursionError: 400}
# The answers about a whole file, from its index.
FILE_VIEWS: dict[str, Callable[[Lines], Any]] = {
    "list": lambda lines: {"rows": lines.rows},
    "groups": lambda lines: {"groups": groups_of(lines)},
    "wrong": summarize_failures,
}
NO_TOKEN = "Open the address that replay.py printed when it started: it ends with a token."
MAX_HITS = 500  # of a search
PROGRESS_S = 0.2  # between two progress lines of a search


def as_json(content: Any) -> str:
    """JSON in ASCII, because a model's text can contain half a surrogate pair."""
    return json.dumps(content, allow_nan=False, separators=(",", ":"))


def answer(content: Any, status: int = 200) -> Response:
    return Response(as_json(content), status, media_type="application/json")


def create_app(sources: Sequence[Source], token: str, play: Play | None = None) -> FastAPI:
    """The web app, for requests with the token; without `play` it has no live environments."""
    app = FastAPI(title="replay", docs_url=None, redoc_url=None, openapi_url=None)
    app.middleware("http")(partial(guard, token))
    for kind, status in STATUS.items():
        app.add_exception_handler(kind, partial(report, status))
    app.mount("/page", StaticFiles(directory=PAGE))
    app.get("/")(lambda: FileResponse(PAGE / "index.html"))
    add_data(app, sources, can_play=play is not None)
    if play is not None:
        add_play(app, sources, play)
    return app


async def guard(
    token: str, request: Request, proceed: Callable[[Request], Awaitable[Response]]
) -> Response:
    """Answer only requests with the token and from our own page; add the security headers."""
    host, origin = request.headers.get("host", ""), request.headers.get("origin")
    cookie = f"replay-{host.rpartition(':')[2]}"  # browsers send cookies to all ports of a machine
    tokens = request.query_params.get("token", ""), request.cookies.get(cookie, "")
    if not any(secrets.compare_digest(t.encode(), token.encode()) for t in tokens):
        is_data = request.url.path.startswith("/api/")
        response = answer({"error": NO_TOKEN}, 403) if is_data else HTMLResponse(NO_TOKEN, 403)
    elif origin is not None and urlsplit(origin).netloc != host:
        response = answer({"error": "this server only answers requests from its own page"}, 403)
    else:
        response = await proceed(request)
        response.set_cookie(cookie, token, httponly=True, samesite="lax")
    response.headers.update(HEADERS)
    return response


async def report(status: int, _: Request, error: Exception) -> Response:
    return answer({"error": f"not found: {error}" if status == 404 else str(error)}, status)


# ------------------------------------------------------------------------------------------- data


def describe(sources: Sequence[Source], can_play: bool) -> dict[str, Any]:
    """The data that the page loads first."""
    return {
        "version": version_of(sources),
        "live": any(source.is_live() for source in sources),
        "can_play": can_play,
        "differing": differing_options(sources),
        "sources": [
            {"id": source.number, "name": source.name, "kind": source.kind}
            | {"files": source.listing(), "status": source.status()}
            for source in sources
        ],
    }


def version_of(sources: Sequence[Source]) -> int:
    return zlib.crc32("\n".join(source.state() for source in sources).encode())


def add_data(app: FastAPI, sources: Sequence[Source], can_play: bool) -> None:
    @app.get("/api/sources")
    def all_sources() -> Response:
        return answer(describe(sources, can_play))

    @app.get("/api/version")
    def version() -> Response:
        return answer({"version": version_of(sources)})

    @app.get("/api/overview/{number}")
    def overview_of(number: int) -> Response:
        return answer(overview(sources[number]))

    @app.get("/api/{kind}/{number}/{name}")
    def file_view(kind: str, number: int, name: str) -> Response:
        return answer(FILE_VIEWS[kind](sources[number].lines(name)))

    @app.get("/api/trajectory/{number}/{name}/{line}")
    def trajectory(number: int, name: str, line: int) -> Response:
        return answer(trajectory_view(sources[number], name, line))

    @app.get("/api/search/{number}")
    def hits(number: int, text: str) -> Response:
        lines = (as_json(line) + "\n" for line in search_source(sources[number], text))
        return StreamingResponse(lines, media_type="application/x-ndjson")


def search_source(source: Source, text: str) -> Iterator[dict[str, Any]]:
    """Hits in all files of a source, newest file first, and progress events between them."""
    files = source.files()[::-1]
    total_bytes = sum(file.path.stat().st_size for file in files)
    earlier_bytes, num_hits, last_progress = 0, 0, 0.0
    for file in files:
        for num_bytes, hit in search(source.lines(file.name), text):
            if hit:
                num_hits += 1
                yield {"hit": {"file": file.name, **hit}}
            if num_hits == MAX_HITS:
                yield {"done": True, "hits": num_hits, "cut": True}
                return
            if time.monotonic() - last_progress > PROGRESS_S:
                last_progress = time.monotonic()
                yield {"progress": [earlier_bytes + num_bytes, total_bytes]}
        earlier_bytes += file.path.stat().st_size
    yield {"done": True, "hits": num_hits, "cut": False}


# ------------------------------------------------------------------------------------------- play


def add_play(app: FastAPI, sources: Sequence[Source], play: Play) -> None:
    # FastAPI runs these in threads, so a slow environment does not block the page.
    @app.post("/api/reenact/{number}/{name}/{line}")
    def reenact_line(number: int, name: str, line: int) -> Response:
        source = sources[number]
        return answer(reenact(play.environments, source.lines(name).read(line), source.env))

    @app.post("/api/play/{command}")
    def run_command(command: str, body: dict[str, Any]) -> Response:
        commands: dict[str, Callable[[], Any]] = {
            "worlds": play.list_environments,
            "new": lambda: play.new(body["env"], body["task_index"]),
            "step": lambda: play.step(body["session"], body["action"]),
            "oracle": lambda: play.oracle(body["session"]),
            "model": lambda: play.let_model_act(body["session"]),
            "save": lambda: play.save(body["session"]),
            "close": lambda: play.close(body["session"]),
        }
        return answer(commands[command]())
