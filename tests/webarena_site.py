"""What the tests with Chromium share: a site of their own, and the reason why they are skipped."""

import os
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from envs.webarena.browser import BrowserMissing, find_browser


def require_browser():
    """Skip a test if there is no Chromium; fail if CI is set."""
    try:
        find_browser()
    except BrowserMissing as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f"NOT TESTED: {error}")


@contextmanager
def serving(answer):
    """Serve a site whose pages are `answer(host, path)`; its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = answer(self.headers["Host"], self.path).encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            if self.path.endswith(".bin"):
                self.send_header("Content-Disposition", "attachment")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.daemon_threads = True
        server.block_on_close = False
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()
