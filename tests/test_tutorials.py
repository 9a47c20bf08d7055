"""The tutorials are a way through: in order, linked, and with pictures of what is there now.

Their code blocks are run by conftest.py; here is what surrounds the blocks.
"""

import re
from dataclasses import fields
from pathlib import Path
from xml.etree import ElementTree

import pytest

from config import Config
from reporting.metrics import GLOSSARY
from reporting.sentinels import RULES
from reporting.table import header
from tutorials.pictures import health, replay, svg, system, tokens
from tutorials.pictures.draw import FOLDER, PICTURES

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "tutorials").glob("*.md"))
TEXTS = {page.stem: page.read_text(encoding="utf-8") for page in PAGES}
HEALTHY = TEXTS.get("10_is_my_run_healthy", "")


@pytest.fixture(scope="module")
def drawn():
    return {name: draw().text() for name, draw in PICTURES.items()}


# --------------------------------------------------------------------------------------- pictures


def test_every_committed_picture_is_what_the_code_draws_today(drawn):
    assert {path.stem for path in FOLDER.glob("*.svg")} == set(drawn)
    stale = [n for n, text in drawn.items() if (FOLDER / f"{n}.svg").read_bytes() != text.encode()]
    assert stale == [], "python -m tutorials.pictures.draw"


def test_every_picture_is_small_named_and_inside_its_frame(drawn):
    for name, text in drawn.items():
        assert len(text) < 40_000
        sheet = ElementTree.fromstring(text)
        names = [element.tag.rpartition("}")[2] for element in sheet]
        assert names[0] == "title" and len(sheet[0].text) > 30
        width, height = float(sheet.get("width")), float(sheet.get("height"))
        for element in sheet:
            if element.tag.endswith("}text"):
                size, x = float(element.get("font-size")), float(element.get("x"))
                length = len(element.text) * size * svg.CHAR  # an upper bound for prose
                left = (
                    x - {None: 0, "middle": length / 2, "end": length}[element.get("text-anchor")]
                )
                assert left >= 8, (name, element.text)
                assert left + length <= width - 8, (name, element.text)
                assert size <= float(element.get("y")) <= height - 8, (name, element.text)


def luminance(colour: str) -> float:
    """WCAG 2's relative luminance of #rrggbb."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return sum(share * c for share, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("colours", [svg.DAY, svg.NIGHT], ids=["day", "night"])
def test_letters_and_lines_stand_out_from_what_they_stand_on_by_day_and_by_night(colours):
    def contrast(one: str, other: str) -> float:
        low, high = sorted((luminance(one), luminance(other)))
        return (high + 0.05) / (low + 0.05)

    sheet = colours["sheet"][0]
    for role in ("sheet", "prompt", "action", "observation", "box"):
        assert contrast(colours[role][2], colours[role][0]) >= 4.5, role
    for role in ("soft", "action", "good", "bad"):
        assert contrast(colours[role][2], sheet) >= 4.5, role
    for role in ("soft", "action", "observation", "good", "bad"):
        assert contrast(colours[role][1], sheet) >= 3, role


def test_the_strip_of_the_mask_is_the_trajectory_of_the_lesson():
    strip, trajectory = tokens.episode()
    assert [token.mask for token in strip] == trajectory.loss_mask
    assert [token.kind == "action" for token in strip] == [token.mask == 1 for token in strip]
    said = tokens.given("01_one_trajectory", "said")
    assert [turn.action_text for turn in trajectory.turns] == said
    observed = "".join(token.text for token in strip if token.kind == "observation")
    assert observed.endswith("Goal:·craft·crimson·hyphae.Got·4·crimson·stem")


def test_the_bars_of_credit_are_the_numbers_that_the_lesson_prints(drawn):
    lines = re.findall(r"^\d\.\d \[(.*)\]$", TEXTS["02_advantages"], re.MULTILINE)
    printed = [float(number) for line in lines for number in line.split(", ")]
    shown = [f"{number:+.3g}" for number in printed if number]
    labels = re.findall(r">([+−][\d.]+)<", drawn["credit"])
    assert labels == ["+0.707"] * 4 + ["−0.707"] * 3 + shown
    assert len(lines) == 3


def test_a_lesson_that_no_longer_says_what_its_picture_shows_is_named():
    with pytest.raises(LookupError, match=r"02_advantages\.md binds nothing to said"):
        tokens.given("02_advantages", "said")


def test_the_loop_has_the_seven_banners_of_train_py():
    assert [banner[0] for banner in system.banners()] == list("1234567")


def test_only_what_the_held_out_tasks_say_stops_the_shuffled_run():
    healthy, shuffled = (health.alarms_of(health.run_of(name)) for name, _ in health.RUNS.values())
    assert healthy == []
    said = [(step, alarm.name, alarm.severity) for step, alarm in shuffled]
    assert said == [(45, "held_out", "warn"), (60, "held_out", "stop")]


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
    drawn = [f"pictures/{name}.svg" for name in PICTURES]
    photographed = [f"pictures/{name}" for name in replay.VIEWS]
    measured = ["learns/learns.png", "miniature/controls.png", "miniature/horizons.png"]
    measured = [f"../recipes/results/{name}" for name in measured]
    assert sorted(link for _, link in shown) == sorted(drawn + photographed + measured)
    assert [link for words, link in shown if len(words) < 80] == []


def test_the_lesson_on_health_explains_every_column_and_every_sentinel():
    cells = re.findall(r"^\| `([^`]+)` \|", HEALTHY, re.MULTILINE)
    heads = re.split(r"\s{2,}", header().strip())
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
