"""The code stays readable: every function fits on one screen, and tach knows every module."""

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LISTED = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True)
SOURCES = [
    path
    for path in map(Path, LISTED.stdout.split())
    if path.parts[0] not in ("tests", "stubs") and (ROOT / path).exists()
]


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_a_function_fits_on_one_screen(path):
    text = (ROOT / path).read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= 80, f"{node.name} is {length} lines long"


def test_tach_toml_names_every_module():
    rules = (ROOT / "tach.toml").read_text(encoding="utf-8")
    roots = {path.stem for path in SOURCES if len(path.parts) == 1} - {"conftest"}
    assert [name for name in sorted(roots) if f'path = "{name}"' not in rules] == []
