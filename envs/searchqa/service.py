"""Retrieval as a service, in Search-R1's format, so that many env servers share one index.

    env server ── Remote ──┐
    env server ── Remote ──┼── POST /retrieve ── one index, in the memory of one process
    Search-R1  ────────────┘

    POST /retrieve  {"queries": [..], "topk": 3, "return_scores": true}
                    -> {"result": [[{"document": {"id", "contents"}, "score"}, ..], ..]}
                    -> without return_scores the documents alone: [[{"id", "contents"}, ..], ..]
    GET  /          -> {"retriever": "BM25", "passages": 12309}

Errors are status codes with {"error": what was got, "hint": what to do}: 422 for a malformed body,
413 for one that is too large, 500 where the search itself fails, and those of envs/server.py.

Run it:  python -m envs.searchqa.retrieval --port 8000
Environment variables choose the retriever: envs/searchqa/retrieval.py.
"""

import argparse
import os
import signal
import sys

import anyio
import anyio.to_thread
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, StrictBool, StrictInt, StrictStr
from starlette.exceptions import HTTPException

from envs.searchqa.retrieval import (
    MAX_PASSAGES,
    RetrievalError,
    Retriever,
    Scored,
    open_retriever,
)
from envs.searchqa.text import contents
from envs.server import Guard, hosts_of, listen_on, serve
from envs.sessions import Answer, ApiError, error_answer

PROGRAM = "envs.searchqa.retrieval"
DEFAULT_TOP_K = 3
MAX_BODY_BYTES = 4_000_000


class Body(BaseModel):
    """Of POST /retrieve."""

    queries: list[StrictStr]
    topk: StrictInt | None = None
    return_scores: StrictBool = False


def create_app(retriever: Retriever, hosts: frozenset[str] = frozenset()) -> FastAPI:
    """The app that serves `retriever`.

    Args:
        hosts: names that it answers to, as a request's Host; none: any.
    """
    app = FastAPI(title="Retrieval in Search-R1's format")
    app.add_middleware(Guard, hosts=hosts, max_bytes=MAX_BODY_BYTES)
    # As many searches at once as there are cores: one in a large corpus takes 4 bytes a passage.
    at_once = anyio.CapacityLimiter(os.cpu_count() or 1)

    @app.get("/")
    async def health() -> Answer:
        corpus = getattr(retriever, "corpus", None)  # a Remote has none
        num_passages = None if corpus is None else len(corpus)
        return Answer({"retriever": type(retriever).__name__, "passages": num_passages})

    @app.post("/retrieve")
    async def retrieve(body: Body) -> Answer:
        top_k = DEFAULT_TOP_K if body.topk is None else body.topk
        if top_k < 1:
            raise ApiError(422, f"topk is {top_k}", "ask for one passage or more")
        if len(body.queries) * top_k > MAX_PASSAGES:
            asked = f"{len(body.queries)} queries with {top_k} passages each"
            raise ApiError(422, asked, f"ask for at most {MAX_PASSAGES} passages at once")

        def search() -> list[list[dict]]:
            return [
                _documents(retriever.search(query, top_k), body.return_scores)
                for query in body.queries
            ]

        return Answer({"result": await anyio.to_thread.run_sync(search, limiter=at_once)})

    _add_error_handlers(app)
    return app


def _documents(passages: list[Scored], with_scores: bool) -> list[dict]:
    documents = [{"id": str(each.number), "contents": contents(each)} for each, _ in passages]
    if not with_scores:
        return documents
    scores = [score for _, score in passages]
    return [{"document": each, "score": score} for each, score in zip(documents, scores)]


def _add_error_handlers(app: FastAPI) -> None:
    """Every error leaves as {"error", "hint"}."""

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Answer:
        return error_answer(error.status, error.error, error.hint)

    @app.exception_handler(RetrievalError)
    @app.exception_handler(ValueError)  # a broken line of the corpus
    async def search_failed(_: Request, error: Exception) -> Answer:
        print(f"{PROGRAM}: {error}", file=sys.stderr, flush=True)
        return error_answer(500, str(error), "the service's operator has to repair this")

    @app.exception_handler(RequestValidationError)
    async def malformed(_: Request, error: RequestValidationError) -> Answer:
        problems = [
            f"{'.'.join(str(part) for part in item['loc'])}: {item['msg']}"
            for item in error.errors()
        ]
        hint = 'send {"queries": ["..."], "topk": 3, "return_scores": true}'
        return error_answer(422, "; ".join(problems[:5]), hint)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Answer:
        status = 422 if error.status_code == 400 else error.status_code  # 400: not JSON at all
        where = f"{request.method} {request.url.path}: {error.detail}"
        return error_answer(status, where, "POST /retrieve searches, GET / says what in")


def main(arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog=f"python -m {PROGRAM}",
        description="Serve retrieval in Search-R1's format; environment variables choose the "
        "retriever, see envs/searchqa/README.md.",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    options = parser.parse_args(arguments)
    if not 0 <= options.port < 65_536:
        parser.error(f"--port {options.port}: a port is a number of 0 to 65535")
    # While an index is being built: a SystemExit removes the unfinished one.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with listen_on(options.host, options.port) as listener:
            retriever = open_retriever()
            app = create_app(retriever, hosts_of(options.host))
            about = f"retriever {type(retriever).__name__}"
            return serve(app, options.host, listener, PROGRAM, about)
    except (OSError, ImportError, RuntimeError, ValueError) as error:
        print(f"{PROGRAM}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
