"""The files, options, commands, tests and links that README.md, RESULTS.md and docs/ name exist."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from agentevol import EvolConfig
from config import Config, with_preset
from dpo import DpoConfig
from evaluate import EvalConfig
from sft import SftConfig

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {
    page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8")
    for page in [ROOT / "README.md", ROOT / "RESULTS.md", *sorted((ROOT / "docs").glob("*.md"))]
}
OPTIONS = {
    "train.py": Config,
    "evaluate.py": EvalConfig,
    "sft.py": SftConfig,
    "dpo.py": DpoConfig,
    "agentevol.py": EvolConfig,
}


def rows(heading: str, page: str = "README.md") -> list[list[str]]:
    """The cells of the first table under a heading."""
    section = PAGES[page].split(heading, 1)[1].split("\n#", 1)[0]
    table = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_the_file_map_names_every_root_file_and_every_folder() -> None:
    named = [row[0].strip("`") for row in rows("## Read it") if row[0].endswith(".py`")]
    assert sorted(named) == sorted({p.name for p in ROOT.glob("*.py")} - {"conftest.py"})
    section = README.split("## Read it", 1)[1].split("\n## ", 1)[0]
    folders = {p.parent.name for p in ROOT.glob("*/*.py") if not p.parent.name.startswith(".")}
    assert {f"{name}/" for name in folders} <= set(re.findall(r"`(\w+/)`", section))


@pytest.mark.parametrize("page", PAGES)
def test_the_tests_that_a_page_names_exist(page: str) -> None:
    for file, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGES[page]):
        assert (ROOT / file).exists(), file
        assert f"def {name}" in (ROOT / file).read_text(), f"{file}::{name}"


def test_the_table_of_defaults_shows_the_defaults() -> None:
    cpu, gpu = with_preset("laptop"), with_preset("paper")
    for option, on_cpu, on_gpu in rows("## Defaults", "docs/commands.md"):
        for name in re.findall(r"`--([a-z-]+)`", option):
            field = name.replace("-", "_")
            for config, cell in ((cpu, on_cpu), (gpu, on_gpu)):
                value = getattr(config, field)
                values = value if isinstance(value, tuple) else (value,)
                for v in values:
                    text = f"{v:g}" if isinstance(v, float) else str(v)
                    assert text in cell or str(v) in cell, f"--{name} is {v}, the page says {cell}"


def flags_of(script: str) -> set[str]:
    """The flags of a program: the fields of its options, or the flags in its source."""
    if script in OPTIONS:
        names = {f.name.replace("_", "-") for f in fields(OPTIONS[script])}
        return {f"--{no}{name}" for name in names for no in ("", "no-")}
    folder = (ROOT / script).parents[script.endswith("__main__.py")]
    flags = {flag for path in folder.glob("*.py") for flag in flags_of_file(path)}
    return flags | flags_of("train.py") if script.startswith("recipes/") else flags


def test_docs_files_lists_every_option_of_the_environment_server() -> None:
    section = PAGES["docs/files.md"].split("## Options of the environment server", 1)[1]
    named = re.findall(r"`(--[a-z-]+)`", "".join(re.findall(r"^\| `--.*?\|", section, flags=re.M)))
    assert set(named) == flags_of_file(ROOT / "envs/server.py") - {"--env"}


def flags_of_file(path: Path) -> set[str]:
    return set(re.findall(r'"(--[a-z-]+)"', path.read_text(encoding="utf-8")))


def in_files(module: re.Match[str]) -> str:
    path = f"{module[1]}/{module[2]}"
    return f"{path}/__main__.py" if (ROOT / path).is_dir() else f"{path}.py"


@pytest.mark.parametrize("page", PAGES)
def test_every_command_exists_and_has_the_flags_it_is_given(page: str) -> None:
    text = re.sub(r"-m (\w+)\.(\w+)", in_files, PAGES[page])  # -m envs.server
    start = r"(?:\bpython|\buv run|\baccelerate launch|\btorchrun)\b[^`\n#]*?"
    commands = re.findall(start + r"([\w/]+\.py)([^`\n#]*)", text.replace("\\\n", ""))
    for script, words in commands:
        if "NAME" not in script:  # a placeholder
            assert (ROOT / script).exists(), script
            assert set(re.findall(r"--[a-z-]+", words)) <= flags_of(script), words
    assert page.startswith("docs/") or len(commands) > 5


def test_every_flag_beside_a_key_of_the_published_system_exists() -> None:
    table = " ".join(row[1] for row in rows("## Its keys and ours", "docs/differences.md"))
    assert set(re.findall(r"--[a-z-]+", table)) <= flags_of("train.py")


@pytest.mark.parametrize("page", PAGES)
def test_every_link_leads_somewhere(page: str) -> None:
    linked = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)|<img src=\"([^\"]+)\"", PAGES[page])
    for path in (a or b for a, b in linked):
        assert ((ROOT / page).parent / path).exists(), path
    anchors = re.findall(r"\]\((?:RESULTS\.md|README\.md)?#([\w-]+)\)", PAGES[page])
    headings = re.findall(r"^#+ (.*)", "\n".join(PAGES.values()), flags=re.M)
    slugs = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert set(anchors) <= slugs
