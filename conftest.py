"""What pytest runs besides tests/: every Python block of README.md and tutorials/*.md, in order.

The blocks of one document share one namespace, as if typed into one session, and run from the
repository root; `>>>` lines must print what the page shows. A block after `<!-- skip: next -->` is
shown only. A tutorial whose blocks take long has `slow` in its file name's stem, as in
`11_learning_slow.md`, and is run by `make test-slow`. Pages about a world whose packages are not
installed are skipped, and say so; with CI set they fail.
"""

import importlib.util
import os
import signal
from pathlib import Path

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

from envs import settings_of

# A shell that starts us in the background ignores Ctrl-C for us and for all we start.
signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parent
# Page -> the world that it plays in, where that needs packages of its own.
PLAYS_IN = {
    "08_a_grid_world": "babyai",
    "09_a_science_lab": "sciworld",
    "13_deep_search": "searchqa",
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
        env = PLAYS_IN.get(item.path.stem) if item.path.suffix == ".md" else None
        package = settings_of(env).package if env else None
        missing = package and importlib.util.find_spec(package) is None
        if missing and os.environ.get("CI") != "true":
            reason = f"{package} is not installed: make setup ENV={env}"
            item.add_marker(pytest.mark.skip(reason=reason))
