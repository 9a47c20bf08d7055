"""Retrieval as a service, in Search-R1's format, so that many env servers share one index.

    env server ── Remote ──┐
    env server ── Remote ──┼── POST /retrieve ── one index, in the memory of one process
    Search-R1  ────────────┘

    POST /retrieve  {"queries": [..], "topk": 3, "return_scores": true}
                    -> {"result": [[{"document": {"id", "contents"}, "score"}, ..], ..]}
                    -> without return_scores the documents alone: [[{"id", "contents"}, ..], ..]
    GET  /          -> {"retriever": "BM25", "passages": 12309}

Errors are status codes with {"error": what was got, "hint": what to do}: 422 for a body that is not
that, 413 for one that is too large, 500 where the search itself fails, and those of envs/server.py.

Run it:  python -m envs.searchqa.retrieval --port 8000
Which retriever it serves is said by the environment variables of envs/searchqa/retrieval.py.
"""

import argparse
import os
import signal
import socket
import sys
from collections.abc import Callable, Sequence

import anyio
import anyio.to_thread
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, StrictBool, StrictInt, StrictStr
from starlette.exceptions import HTTPException

from envs.searchqa.ranking import RetrievalError, Retriever, Scored
from envs.searchqa.remote import MAX_PASSAGES, contents
from envs.server import Guard, hosts_of, listen_on, serve
from envs.sessions import Answer, ApiError, error_answer

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
    # As many searches at once as can run: one in a large corpus takes 4 bytes a passage.
    at_once = anyio.CapacityLimiter(os.cpu_count() or 1)

    @app.get("/")
    async def health() -> Answer:
        corpus = getattr(retriever, "corpus", None)  # a Remote has none
        num_passages = None if corpus is None else len(corpus)
        return Answer({"retriever": type(retriever).__name__, "passages": num_passages})

    @app.post("/retrieve")
    async def retrieve(body: Body) -> Answer:
        top_k = DEFAULT_TOP_K if body.topk is None else body.topk
        _check(len(body.queries), top_k)
        lists = await anyio.to_thread.run_sync(
            retriever.scored, body.queries, top_k, limiter=at_once
        )
        return Answer({"result": [_documents(found, body.return_scores) for found in lists]})

    _add_error_handlers(app)
    return app


def _check(num_queries: int, top_k: int) -> None:
    if top_k < 1:
        raise ApiError(422, f"topk is {top_k}", "ask for one passage or more")
    if num_queries * top_k > MAX_PASSAGES:
        asked = f"{num_queries} queries with {top_k} passages each"
        raise ApiError(422, asked, f"ask for at most {MAX_PASSAGES} passages at once")


def _documents(found: Sequence[Scored], with_scores: bool) -> list[dict]:
    documents = [{"id": str(passage.number), "contents": contents(passage)} for passage, _ in found]
    if not with_scores:
        return documents
    return [
        {"document": document, "score": score} for document, (_, score) in zip(documents, found)
    ]


def _add_error_handlers(app: FastAPI) -> None:
    """Every error leaves as {"error", "hint"}."""

    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Answer:
        return error_answer(error.status, error.error, error.hint)

    @app.exception_handler(RetrievalError)
    @app.exception_handler(ValueError)  # a line of the corpus that is none
    async def failed(_: Request, error: Exception) -> Answer:
        print(f"envs.searchqa.retrieval: {error}", file=sys.stderr, flush=True)
        return error_answer(500, str(error), "the service's operator has to mend this")

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
        status = 422 if error.status_code == 400 else error.status_code  # 400: no JSON at all
        where = f"{request.method} {request.url.path}: {error.detail}"
        return error_answer(status, where, "POST /retrieve searches, GET / says what in")


def main(open_retriever: Callable[[], Retriever], arguments: list[str] | None = None) -> int:
    """The command line; returns the exit code.

    Args: open_retriever: called once the port is ours.
    """
    parser = argparse.ArgumentParser(
        prog="python -m envs.searchqa.retrieval",
        description="Serve retrieval in Search-R1's format. Which: by environment variables, see "
        "envs/searchqa/README.md.",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    parser.add_argument("--port", type=int, default=8000, help="0 takes a free one")
    options = parser.parse_args(arguments)
    if not 0 <= options.port < 65_536:
        parser.error(f"--port {options.port}: a port is a number of 0 to 65535")
    # While an index is being made: what is unfinished is taken away on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with listen_on(options.host, options.port) as listener:
            return _serve(open_retriever(), listener, options.host)
    except (OSError, ImportError, RuntimeError, ValueError) as error:
        print(f"envs.searchqa.retrieval: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _serve(retriever: Retriever, listener: socket.socket, host: str) -> int:
    """Until SIGTERM or Ctrl-C; returns the exit code."""
    app = create_app(retriever, hosts_of(host))
    about = f"retriever {type(retriever).__name__}"
    return serve(app, host, listener, "envs.searchqa.retrieval", about)
