"""The tutorials are numbered and linked, and their links and pictures exist.

conftest.py runs their code blocks; the tests here check the text around the blocks.
"""

import re
from dataclasses import fields
from pathlib import Path

import pytest

from config import Config
from reporting.metrics import GLOSSARY
from reporting.sentinels import RULES
from run.progress import table_header

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "tutorials").glob("*.md"))
TEXTS = {page.stem: page.read_text(encoding="utf-8") for page in PAGES}
HEALTH_LESSON = TEXTS.get("10_is_my_run_healthy", "")


# ------------------------------------------------------------------------------------------ pages


def test_tutorials_are_numbered_and_linked_in_the_order_to_read_them():
    assert [stem[:2] for stem in TEXTS] == [f"{n:02}" for n in range(1, len(TEXTS) + 1)]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\(tutorials/(\w+)\.md\)", readme)
    assert links[-len(TEXTS) :] == list(TEXTS)  # the complete list is last in the README
    next_stems = [*list(TEXTS)[1:], None]
    for text, next_stem in zip(TEXTS.values(), next_stems, strict=True):
        last_paragraph = text.rstrip().rpartition("\n\n")[2]
        assert last_paragraph.startswith("Next: " if next_stem else "Read next: "), last_paragraph
        assert next_stem is None or f"({next_stem}.md)" in last_paragraph


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_tutorial_says_how_to_run_it_and_its_links_lead_somewhere(page):
    text = TEXTS[page.stem]
    opening = text.split("\n## ")[0].replace("\n", " ")
    assert f"python -m pytest tutorials/{page.name}`" in opening
    assert text.startswith(f"# {page.stem[:2]}. ")
    assert "## Change this and predict what happens" in text
    links = re.findall(r"\]\(([^)#]+)\)", text)
    assert links
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_lesson_on_health_explains_every_column_and_every_sentinel():
    cells = re.findall(r"^\| `([^`]+)` \|", HEALTH_LESSON, re.MULTILINE)
    columns = re.split(r"\s{2,}", table_header().strip())
    assert columns[0] == "step" and set(columns) <= set(cells)
    assert set(RULES) <= set(cells)


def test_the_lesson_on_health_names_metrics_and_options_that_exist():
    names = re.findall(r"`([a-z]+(?:/[a-z_]+)+)`", HEALTH_LESSON)
    assert len(names) > 10
    folders = {"checkpoints", "trajectories", "eval"}
    unknown = [n for n in names if n not in GLOSSARY and n.partition("/")[0] not in folders]
    assert unknown == []
    options = set(re.findall(r"`(--[a-z-]+)", HEALTH_LESSON))
    options -= {"--compare"}  # evaluate.py's
    config_options = {"--" + field.name.replace("_", "-") for field in fields(Config)}
    assert options - config_options == set()
