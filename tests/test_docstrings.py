"""Every `>>>` example in the docstrings of the project's modules prints what it shows."""

import doctest
import importlib
from pathlib import Path

import pytest

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
    results = doctest.testmod(importlib.import_module(name), report=True)
    assert results.attempted > 0
    assert results.failed == 0
