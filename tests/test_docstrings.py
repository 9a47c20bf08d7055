"""Every `>>>` example in the docstrings of the project's modules prints what it shows."""

import doctest
import importlib.util
import os
from pathlib import Path

import pytest

from envs import ENVS, settings_of

ROOT = Path(__file__).resolve().parent.parent
WINGS = "run scale sampling reporting viewer envs tools recipes benchmarks".split()
SOURCES = [*ROOT.glob("*.py"), *(p for d in WINGS for p in (ROOT / d).rglob("*.py"))]
MODULES = sorted(
    ".".join(file.relative_to(ROOT).with_suffix("").parts)
    for file in SOURCES
    if ">>> " in file.read_text() and file.name != "conftest.py"
)


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_print_what_they_show(name):
    world = name.split(".")[1] if name.startswith("envs.") else ""
    package = settings_of(world).package if world in ENVS else None
    if package and os.environ.get("CI") != "true" and not importlib.util.find_spec(package):
        pytest.skip(f"NOT TESTED: make setup ENV={world}")
    results = doctest.testmod(importlib.import_module(name), report=True)
    assert results.attempted > 0
    assert results.failed == 0
