"""Which Chromium a program here may drive, found in the order of who chose it.

    $CHROMIUM            a path that somebody gave
    Playwright's own     what `playwright install chromium` has put there
    the system's         chromium, chromium-browser or google-chrome on the PATH

Read next: `tests/test_page.py`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
# It asks nobody for anything but what a page asks for.
ARGUMENTS = (
    *("--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)


class NoChromium(RuntimeError):
    """There is none; the message says how to get one."""


def find_chromium(playwright: Any = None) -> str:
    """The path of a Chromium.

    Args:
        playwright: what `sync_playwright()` yields; without it its own Chromium is not looked for.
    Raises: NoChromium.
    """
    chosen = os.environ.get("CHROMIUM")
    if chosen:
        if os.access(chosen, os.X_OK) and Path(chosen).is_file():
            return chosen
        raise NoChromium(f"$CHROMIUM names {chosen}, which is no program that can be run")
    if playwright is not None and Path(playwright.chromium.executable_path).is_file():
        return str(playwright.chromium.executable_path)
    for name in NAMES:
        if found := shutil.which(name):
            return found
    raise NoChromium(
        "no Chromium is here: apt-get install chromium, or playwright install chromium, "
        "or name one in $CHROMIUM"
    )


@contextmanager
def browser() -> Iterator[Any]:
    """A headless browser of Playwright's, closed when the block ends.

    Raises: NoChromium.
    """
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        path = find_chromium(playwright)
        # The sandbox needs rights that root in a container has not; what is opened is ours.
        sandbox = [] if os.geteuid() else ["--no-sandbox"]
        opened = playwright.chromium.launch(executable_path=path, args=[*ARGUMENTS, *sandbox])
        try:
            yield opened
        finally:
            opened.close()
