"""The house stays readable: no circle of imports, no function beyond one screen."""

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
    """The project's modules that `name` imports, inside functions too, for types alone not."""
    tree = ast.parse((ROOT / MODULES[name]).read_text(encoding="utf-8"))
    skipped = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
        for statement in node.body
        for child in ast.walk(statement)
    }
    found = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {other for other in found if other in MODULES and other != name}


def test_no_module_imports_itself_by_a_circle():
    arrows = {name: imports_of(name) for name in MODULES}
    assert sum(map(len, arrows.values())) > 200
    while leaves := {name for name, used in arrows.items() if not used & arrows.keys()}:
        for name in leaves:
            del arrows[name]
    in_a_circle = {name: sorted(used & arrows.keys()) for name, used in arrows.items()}
    assert in_a_circle == {}


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_a_function_fits_on_one_screen(path):
    text = (ROOT / path).read_text(encoding="utf-8")
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or 0) - node.lineno + 1
            assert length <= 80, f"{node.name} is {length} lines long"


def test_the_arrows_of_tach_toml_hold_and_name_every_module():
    done = subprocess.run(
        [sys.executable, "-m", "tach", "check"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    named = (ROOT / "tach.toml").read_text(encoding="utf-8")
    roots = {path.stem for path in SOURCES if len(path.parts) == 1} - {"conftest"}
    assert [name for name in sorted(roots) if f'path = "{name}"' not in named] == []
