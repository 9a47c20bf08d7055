"""Lets pytest run every Python block of README.md and tutorials/*.md, in order, as tests.

The blocks of a page share one namespace, as if typed into one session, and run from the repository
root. Lines after `>>>` must print what the page shows. A block after `<!-- skip: next -->` does not
run. A slow tutorial has a file name that ends in `slow`, such as `11_learning_slow.md`, and
`make test-slow` runs it. If the packages of an environment are not installed, its pages are skipped
with a message; if the variable CI is set, they fail.
"""

import importlib.util
import os
import signal
from pathlib import Path

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

from envs import settings_of

# If a shell starts pytest in the background, Ctrl-C is ignored here and in all child processes.
signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parent
# Page -> its environment, if that needs additional packages.
ENV_OF_PAGE = {
    "08_a_grid_world": "babyai",
    "09_a_science_lab": "sciworld",
    "13_deep_search": "searchqa",
    "17_a_web_browser": "webarena",
}


def _enter_root(namespace: dict) -> None:
    namespace["__name__"] = "__tutorial__"
    namespace["_cwd_before"] = os.getcwd()
    os.chdir(ROOT)


def _leave_root(namespace: dict) -> None:
    os.chdir(namespace["_cwd_before"])


pytest_collect_file = Sybil(
    parsers=[PythonCodeBlockParser(), SkipParser()],
    patterns=["README.md", "tutorials/*.md"],
    setup=_enter_root,
    teardown=_leave_root,
).pytest()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.suffix == ".md" and item.path.stem.endswith("slow"):
            item.add_marker("slow")
        env = ENV_OF_PAGE.get(item.path.stem) if item.path.suffix == ".md" else None
        missing = _what_is_missing(env) if env else ""
        if missing and os.environ.get("CI") != "true":
            item.add_marker(pytest.mark.skip(reason=missing))


def _what_is_missing(env: str) -> str:
    """What an environment needs that is not installed; "" if it has everything."""
    package = settings_of(env).package
    if package and importlib.util.find_spec(package) is None:
        return f"{package} is not installed: make setup ENV={env}"
    if env == "webarena":
        from envs.webarena.browser import BrowserMissing, find_browser

        try:
            find_browser()
        except BrowserMissing as error:
            return str(error)
    return ""
