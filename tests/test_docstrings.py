"""Every `>>>` example in the project's docstrings prints the output shown."""

import doctest
import importlib.util
import os
from pathlib import Path

import pytest

from envs import ENVS, settings_of

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = "run scale sampling reporting viewer envs tools recipes benchmarks".split()
SOURCES = [*ROOT.glob("*.py"), *(p for d in FOLDERS for p in (ROOT / d).rglob("*.py"))]
MODULES = sorted(
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for file in SOURCES
    if ">>> " in file.read_text() and file.name != "conftest.py"
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_print_the_output_shown(name):
    env = name.split(".")[1] if name.startswith("envs.") else ""
    package = settings_of(env).package if env in ENVS else None
    if package and os.environ.get("CI") != "true" and not importlib.util.find_spec(package):
        pytest.skip(f"NOT TESTED: make setup ENV={env}")
    results = doctest.testmod(importlib.import_module(name), report=True)
    assert results.attempted > 0
    assert results.failed == 0
