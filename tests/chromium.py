"""A headless Chromium: $CHROMIUM, that of `playwright install chromium`, or the system's."""

import os
import shutil
from contextlib import contextmanager
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome")
# No request but those of the pages that are opened.
ARGUMENTS = (
    *("--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)


class NoChromium(RuntimeError):
    """There is none; the message says how to get one."""


@contextmanager
def browser():
    """Playwright's browser, closed when the block ends. Raises: NoChromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        own = playwright.chromium.executable_path
        path = os.environ.get("CHROMIUM") or (own if Path(own).is_file() else None)
        path = path or next(filter(None, map(shutil.which, NAMES)), None)
        if path is None:
            raise NoChromium("no Chromium: apt-get install chromium, or name one in $CHROMIUM")
        # The sandbox needs rights that root in a container lacks.
        sandbox = [] if os.geteuid() else ["--no-sandbox"]
        opened = playwright.chromium.launch(executable_path=path, args=[*ARGUMENTS, *sandbox])
        try:
            yield opened
        finally:
            opened.close()
