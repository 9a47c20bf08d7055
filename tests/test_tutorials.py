"""The tutorials are a way through: in order, linked, and with pictures of what is there now.

Their code blocks are run by conftest.py; here is what surrounds the blocks.
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
HEALTHY = TEXTS.get("10_is_my_run_healthy", "")


# ------------------------------------------------------------------------------------------ pages


def test_tutorials_are_numbered_and_linked_in_the_order_to_read_them():
    assert [stem[:2] for stem in TEXTS] == [f"{n:02}" for n in range(1, len(TEXTS) + 1)]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    linked = re.findall(r"\(tutorials/(\w+)\.md\)", readme)
    assert linked[-len(TEXTS) :] == list(TEXTS)  # the list of all; prose before it names some
    for (_, text), following in zip(TEXTS.items(), [*list(TEXTS)[1:], None], strict=True):
        last = text.rstrip().rpartition("\n\n")[2]
        assert last.startswith("Next: " if following else "Read next: "), last
        assert following is None or f"({following}.md)" in last


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_exercise_has_its_answer(page):
    exercises = TEXTS[page.stem].split("## Change this and predict what happens")[1]
    asked, answers = exercises.split("<details><summary>Answers</summary>")
    numbers = [re.findall(r"^(\d)\. ", part, re.MULTILINE) for part in (asked, answers)]
    assert numbers[0] == numbers[1] == [str(n + 1) for n in range(len(numbers[0]))]


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


def test_every_picture_is_shown_once_with_words_for_who_cannot_see_it():
    shown = [each for text in TEXTS.values() for each in re.findall(r"!\[([^]]*)\]\((.*?)\)", text)]
    pictures = [f"pictures/{path.name}" for path in (ROOT / "tutorials/pictures").iterdir()]
    pictures = [path for path in pictures if path.endswith((".svg", ".png"))]
    measured = ["learns/learns.png", "miniature/controls.png", "miniature/horizons.png"]
    measured = [f"../recipes/results/{name}" for name in measured]
    assert sorted(link for _, link in shown) == sorted(pictures + measured)
    assert [link for words, link in shown if len(words) < 80] == []


def test_the_lesson_on_health_explains_every_column_and_every_sentinel():
    cells = re.findall(r"^\| `([^`]+)` \|", HEALTHY, re.MULTILINE)
    heads = re.split(r"\s{2,}", table_header().strip())
    assert heads[0] == "step" and set(heads) <= set(cells)
    assert set(RULES) <= set(cells)


def test_the_lesson_on_health_names_metrics_and_options_that_exist():
    names = re.findall(r"`([a-z]+(?:/[a-z_]+)+)`", HEALTHY)
    assert len(names) > 10
    folders = {"checkpoints", "trajectories", "eval"}
    wrong = [n for n in names if n not in GLOSSARY and n.partition("/")[0] not in folders]
    assert wrong == []
    options = set(re.findall(r"`(--[a-z-]+)", HEALTHY))
    options -= {"--compare"}  # evaluate.py's
    known = {"--" + field.name.replace("_", "-") for field in fields(Config)}
    assert options - known == set()
