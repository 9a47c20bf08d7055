"""The code stays readable: no circular imports, and every function fits on one screen."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LISTED = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True)
SOURCES = [
    path
    for path in map(Path, LISTED.stdout.split())
    if path.parts[0] not in ("tests", "stubs") and (ROOT / path).exists()
]
MODULES = {".".join(path.with_suffix("").parts).removesuffix(".__init__"): path for path in SOURCES}


def imports_of(name: str) -> set[str]:
    """The project's modules that `name` imports, also inside functions, but not only for types."""
    tree = ast.parse((ROOT / MODULES[name]).read_text(encoding="utf-8"))
    skipped = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body
        for child in ast.walk(statement)
    }
    names = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {module for module in names if module in MODULES and module != name}


def test_there_are_no_circular_imports():
    imports = {name: imports_of(name) for name in MODULES}
    assert sum(map(len, imports.values())) > 200
    while leaves := {name for name, modules in imports.items() if not modules & imports.keys()}:
        for name in leaves:
            del imports[name]
    cycles = {name: sorted(modules & imports.keys()) for name, modules in imports.items()}
    assert cycles == {}


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_a_function_fits_on_one_screen(path):
    text = (ROOT / path).read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= 80, f"{node.name} is {length} lines long"


def test_imports_obey_tach_toml_which_names_every_module():
    check = subprocess.run(
        [sys.executable, "-m", "tach", "check"], cwd=ROOT, capture_output=True, text=True
    )
    assert check.returncode == 0, check.stdout + check.stderr
    rules = (ROOT / "tach.toml").read_text(encoding="utf-8")
    roots = {path.stem for path in SOURCES if len(path.parts) == 1} - {"conftest"}
    assert [name for name in sorted(roots) if f'path = "{name}"' not in rules] == []
