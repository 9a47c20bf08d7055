"""One headless Chromium for all sessions of a server, and the thread that drives it.

A browser for each session would need 300 MB and a second to start. A *context* is a private window
(own cookies, own tabs) of a browser that already runs: it opens in 50 ms.

    session 0 ── call() ──┐                       ┌── context 0: tabs ── http://shop-TOKEN0.test
    session 1 ── call() ──┼── thread: event loop ─┼── context 1: tabs ── http://cms-TOKEN1.test
    session 2 ── call() ──┘   (Playwright)        └── context 2: tabs

Thread: Playwright's objects belong to one event loop. It runs in one thread; `call` hands it a
    coroutine and waits. A slow page delays only its own session.
Failure: If the browser dies, running calls raise BrowserLost, and the next reset starts another.
Safety: Host names resolve only to the sites: `*.test` to the port of our own sites, the hosts of
    the official sites if they are configured, and nothing else. A session also refuses requests
    outside its own sites (session.py).

Read next: envs/webarena/session.py.
"""

import asyncio
import contextlib
import os
import re
import shutil
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar
from urllib.parse import urlsplit

T = TypeVar("T")
START_S = 30.0  # to start the browser
CALL_S = 50.0  # one call of a session; a client waits 60 s
CLOSE_S = 5.0
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
ARGUMENTS = (
    *("--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-extensions"),
    "--disable-smooth-scrolling",  # a key such as PageDown takes effect at once
)


class BrowserLost(RuntimeError):
    def __init__(self) -> None:
        super().__init__("the browser of this session has ended; a reset starts another one")


class BrowserMissing(RuntimeError):
    """No browser is installed, or it does not start."""


class CannotAct(Exception):
    """An action had no effect; the policy reads the message."""


def find_browser() -> str:
    """The path of a Chromium. BrowserMissing if there is none."""
    if path := os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, NAMES)), None):
        return path
    hint = "apt-get install chromium-headless-shell, or name one in $CHROMIUM"
    raise BrowserMissing(f"found no Chromium on the PATH; {hint}")


class Browser:
    """One Chromium process and the thread that drives it.

    Args:
        resolver_rules: which host names exist, as in Chromium's --host-resolver-rules.

    Raises BrowserMissing if it does not start.
    """

    def __init__(self, resolver_rules: str) -> None:
        path = find_browser()
        self._ended = threading.Event()
        self._opened = contextlib.AsyncExitStack()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        try:
            self._run(self._launch(path, resolver_rules), START_S)
        except Exception as error:
            self.close()
            text = str(error) or type(error).__name__
            # Playwright's message holds what the browser printed, in lines "[pid=7][err] ...".
            lines = dict.fromkeys(re.findall(r"\[err\] (.*)", text))
            reason = " ".join(lines) or text.partition("\n")[0]
            raise BrowserMissing(f"{path} does not start: {reason[:300]}") from error

    async def _launch(self, path: str, resolver_rules: str) -> None:
        from playwright.async_api import async_playwright

        playwright = await self._opened.enter_async_context(async_playwright())
        is_root = os.geteuid() == 0  # Chromium's sandbox does not work as root
        self.chromium = await playwright.chromium.launch(
            executable_path=path,
            chromium_sandbox=not is_root,
            args=[*ARGUMENTS, f"--host-resolver-rules={resolver_rules}"],
            ignore_default_args=["--disable-popup-blocking"],  # a page in a loop opens none
            handle_sigint=False,  # Ctrl-C ends our program, which closes the browser
            handle_sigterm=False,
            handle_sighup=False,
        )
        self._opened.push_async_callback(lambda: asyncio.wait_for(self.chromium.close(), CLOSE_S))
        self.chromium.on("disconnected", lambda _: self._ended.set())

    @property
    def has_ended(self) -> bool:
        return self._ended.is_set()

    def call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the browser's thread and return its result. Raises BrowserLost if the
        browser has ended or ends meanwhile, TimeoutError after CALL_S seconds."""
        if self.has_ended:
            coroutine.close()
            raise BrowserLost
        try:
            result = self._run(coroutine, CALL_S)
        except CannotAct:
            raise
        except BaseException as error:
            # The error of a closed tab can come before the news that the browser has ended.
            if self._ended.wait(0.5):
                raise BrowserLost from error
            raise
        if self.has_ended:
            raise BrowserLost
        return result

    def _run(self, coroutine: Coroutine[Any, Any, T], limit_s: float) -> T:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(limit_s)
        finally:
            future.cancel()

    def close(self) -> None:
        """End the browser, its driver and the thread."""
        self._ended.set()
        with contextlib.suppress(Exception):
            self._run(self._opened.aclose(), 2 * CLOSE_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._loop.close()


class Addresses:
    """The real addresses of a session's sites, and the public ones that the policy reads.

    >>> addresses = Addresses({"http://luma.com/admin": "http://cms-5.test/admin"})
    >>> addresses.to_real("http://luma.com/admin/orders?page=2")
    'http://cms-5.test/admin/orders?page=2'
    >>> addresses.to_public("Not found: http://cms-5.test/x, on cms-5.test")
    'Not found: http://luma.com/x, on luma.com'
    """

    def __init__(self, real_by_public: dict[str, str]) -> None:
        origins = {_origin(public): _origin(real) for public, real in real_by_public.items()}
        hosts = {url.partition("//")[2]: real.partition("//")[2] for url, real in origins.items()}
        self.origins = tuple(origins.values())
        self._sites = list(real_by_public)
        self._real = _longest_first(origins | real_by_public)
        pairs = self._real | hosts
        self._public = _longest_first({real: public for public, real in pairs.items()})
        self._pattern = re.compile("|".join(map(re.escape, self._public)))

    def to_public(self, text: str) -> str:
        return self._pattern.sub(lambda match: self._public[match[0]], text)

    def to_real(self, url: str) -> str:
        """The real address of a public one. Raises CannotAct if it is not on one of the sites."""
        url = url if "://" in url else f"http://{url}"
        for public, real in self._real.items():
            rest = url[len(public) :]
            if url.startswith(public) and (not rest or rest[0] in "/?#"):
                return real + rest
        sites = ", ".join(self._sites)
        raise CannotAct(f"The address {url[:200]} is not on one of the sites: {sites}.")


def _origin(url: str) -> str:
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def _longest_first(addresses: dict[str, str]) -> dict[str, str]:
    """One site's address can begin with another one's."""
    return dict(sorted(addresses.items(), key=lambda pair: -len(pair[0])))
