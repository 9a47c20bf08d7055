"""The page of replay.py in a real browser: what it shows, that keys work, that nothing runs.

Without a Chromium these tests are skipped; with CI=true they fail.
"""

import json
import math
import os
import shutil
import socket
import threading
import time
from pathlib import Path

import pytest
import uvicorn
from axe_playwright_python.sync_playwright import Axe
from made_run import HOSTILE, add_step, hostile_line, make_run
from played import FOLDER
from playwright.sync_api import sync_playwright

from trajectory import from_line
from viewer.export import export
from viewer.play import Environments, Play
from viewer.server import create_app
from viewer.sources import open_source

# No request but those of the pages that are opened.
ARGUMENTS = (
    *("--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
)


@pytest.fixture(scope="module")
def chromium():
    """A headless Chromium: $CHROMIUM, that of `playwright install chromium`, or the system's."""
    with sync_playwright() as playwright:
        own = playwright.chromium.executable_path
        names = ("chromium", "chromium-browser", "google-chrome")
        path = os.environ.get("CHROMIUM") or (own if Path(own).is_file() else None)
        path = path or next(filter(None, map(shutil.which, names)), None)
        if path is None:
            missing = "no Chromium: apt-get install chromium, or name one in $CHROMIUM"
            (pytest.fail if os.environ.get("CI") else pytest.skip)(f"NOT TESTED: {missing}")
        # The sandbox needs rights that root in a container lacks.
        sandbox = [] if os.geteuid() else ["--no-sandbox"]
        opened = playwright.chromium.launch(executable_path=path, args=[*ARGUMENTS, *sandbox])
        yield opened
        opened.close()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("run") / "made", steps=4, turns=3)


class Served:
    """replay.py's server in this process, on a free port."""

    def __init__(self, sources, play=None):
        self.socket = socket.create_server(("127.0.0.1", 0))
        port = self.socket.getsockname()[1]
        app = create_app([open_source(n, p) for n, p in enumerate(sources)], play)
        self.server = uvicorn.Server(uvicorn.Config(app, log_level="error", ws="none"))
        self.thread = threading.Thread(target=self.server.run, args=([self.socket],), daemon=True)
        self.thread.start()
        self.url = f"http://127.0.0.1:{port}/"

    def stop(self):
        self.server.should_exit = True
        self.thread.join(10)


@pytest.fixture
def serve():
    running = []

    def start(*sources, **options):
        running.append(Served(sources, **options))
        return running[-1].url

    yield start
    for server in running:
        server.stop()


@pytest.fixture
def tab(chromium):
    """A page that notes what goes wrong on it; nothing may."""
    context = chromium.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    page.problems, page.asked = [], []
    page.on("console", lambda m: m.type in ("error", "warning") and page.problems.append(m.text))
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.on("request", lambda request: page.asked.append(request.url))
    yield page
    problems = list(page.problems)
    context.close()
    assert problems == []


def open_at(page, url, wait_for="h1"):
    page.goto(url)
    page.wait_for_selector(f"main {wait_for}")
    return page


def until(page, expression, *argument, seconds=30):
    """Wait until a JavaScript expression is true. The page's policy forbids what Playwright's own
    wait_for_function does."""
    end = time.monotonic() + seconds
    while not page.evaluate(expression, *argument):
        assert time.monotonic() < end, expression
        page.wait_for_timeout(100)


def assert_accessible(page):
    found = Axe().run(page).response["violations"]
    assert not found, [(v["id"], [n["html"][:120] for n in v["nodes"]][:3]) for v in found]


# ---------------------------------------------------------------------------------- what it shows


def test_from_the_first_screen_to_a_failure_by_filter_and_by_keys(serve, made, tab):
    url = serve(made)
    open_at(tab, url, ".goes-wrong li")
    assert "held-out tasks solved" in tab.inner_text(".headline")
    assert tab.locator(".uplot").count() >= 4 and "Failures" in tab.inner_text(".goes-wrong")
    open_at(tab, f"{url}#/0/step_000004", "table.trajectories tbody tr")
    rows = tab.locator("table.trajectories tbody tr")
    assert rows.count() == 7
    tab.get_by_label("outcome", exact=False).select_option("failed")
    until(tab, "document.querySelectorAll('table.trajectories tbody tr').length < 7")
    assert "outcome=failed" in tab.url
    rows.first.locator("a").click()
    tab.wait_for_selector(".turns")
    line = int(tab.url.rsplit("/", 1)[1].split("?")[0])
    recorded = open_source(0, made).lines("step_000004").read(line)
    assert not recorded["success"] and recorded["turns"][0]["action_text"].split("Action: ")[1]
    for turn in range(2, len(recorded["turns"]) + 1):
        tab.keyboard.press("ArrowRight")
        tab.wait_for_url(f"**/{line}/{turn}")
    tab.keyboard.press("Home")
    tab.wait_for_url(f"**/{line}/1")
    tab.keyboard.press("]")
    tab.wait_for_url(f"**/step_000004/{line + 1}")


FILTERS = {
    "outcome=solved": lambda row: row["success"],
    "outcome=lost": lambda row: row["stop_reason"] == "env_error",
    "min_turns=2&max_turns=3": lambda row: 2 <= row["num_turns"] <= 3,
    "task=CRAFT_0": lambda row: row["task_id"] == "textcraft_0",
    "min_return=0.5": lambda row: row["return"] >= 0.5,
    "parse_errors=1": lambda row: row["parse_errors"],
    "stop_reason=max_rounds&subtask=nothing": lambda row: False,
}


def test_lists_are_filtered_sorted_and_cut_into_pages(serve, made, tab):
    tab.goto(serve(made))
    all_rows = open_source(0, made).lines("step_000004").rows

    def select(query, **changes):
        return tab.evaluate(
            """async ([all, query, changes]) => {
                const { selectRows } = await import("/page/rows.js");
                const address = Object.fromEntries(new URLSearchParams(query));
                return selectRows(all, { ...address, ...changes });
            }""",
            [all_rows, query, {"limit": 200} | changes],
        )

    for query, keeps in FILTERS.items():
        assert select(query)["rows"] == [row for row in all_rows if keeps(row)], query
    turns = [row["num_turns"] for row in select("sort=-num_turns")["rows"]]
    assert turns == sorted(turns, reverse=True) and len(set(turns)) > 1
    page = select("", offset=5, limit=10)
    assert page["total"] == page["matching"] == 7 and page["rows"] == all_rows[5:]
    all_rows = [all_rows[0] | {"task_id": name} for name in ("t_10", None, "t_9")]
    assert [row["task_id"] for row in select("sort=task_id")["rows"]] == ["t_9", "t_10", None]


def test_tokens_have_the_files_masks_and_numbers(serve, made, tab):
    open_at(tab, f"{serve(made)}#/0/step_000003/1/1", ".turns")
    recorded = open_source(0, made).lines("step_000003").read(1)
    tab.keyboard.press("t")
    tab.wait_for_selector(".tokens .token.policy")
    told = tab.evaluate("[...document.querySelectorAll('.tokens .token')].map(t => t.className)")
    assert [int("policy" in name) for name in told] == recorded["loss_mask"]
    tokens = tab.locator(".tokens .token")
    for place in (0, recorded["loss_mask"].index(1), len(recorded["input_ids"]) - 1):
        tokens.nth(place).hover()
        tip = tab.locator("[role=tooltip]:visible").inner_text()
        assert f"id {recorded['input_ids'][place]}" in tip
        if recorded["loss_mask"][place]:
            numbers = [float(line.split()[-1].replace("−", "-")) for line in tip.splitlines()]
            log_prob = recorded["rollout_log_probs"][place]
            assert math.isclose(numbers[1], log_prob, abs_tol=1e-3)
            assert math.isclose(numbers[2], math.exp(log_prob), abs_tol=1e-3)
            assert numbers[3] == recorded["advantages"][place]
        else:
            assert "log-prob" not in tip
    text = "".join(tab.locator(".tokens .token.policy").all_inner_texts())
    assert text.startswith("Thought:")


def test_a_step_that_is_written_while_one_looks_appears(serve, tmp_path, tab):
    run = make_run(tmp_path / "run", steps=2, turns=3)
    config = json.loads((run / "config.json").read_text())
    config["config"]["steps"] = 9
    (run / "config.json").write_text(json.dumps(config))
    open_at(tab, serve(run), ".goes-wrong li")
    assert "step 2" in tab.inner_text(".goes-wrong")
    line = open_source(0, run).lines("step_000001").read(0)
    add_step(run, 3, [from_line(line | {"success": False})])
    until(tab, "document.querySelector('.goes-wrong').innerText.includes('step 3')")


# ------------------------------------------------------------------------------ worlds that answer


@pytest.fixture(scope="module")
def environments():
    environments = Environments()
    yield environments
    environments.close()


@pytest.mark.parametrize(
    ("env", "package", "drawn"),
    [
        ("textcraft", "textcraft", ".world li"),
        ("babyai", "minigrid", "svg.grid-picture"),
        pytest.param("sciworld", "scienceworld", ".world li", marks=pytest.mark.long),
    ],
)
def test_an_episode_is_played_again_and_its_world_drawn(
    serve, environments, tmp_path, tab, env, package, drawn
):
    pytest.importorskip(package, reason=f"make setup ENV={env}")
    url = serve(FOLDER / f"{env}.jsonl", play=Play(environments, tmp_path))
    open_at(tab, f"{url}#/0/{env}/0", ".picture")
    tab.get_by_role("button", name="Re-enact").click()
    tab.wait_for_selector(f".picture .canvas {drawn}", timeout=90_000)
    assert "every observation came out as before" in tab.inner_text(".picture")
    before = tab.inner_html(".picture .canvas")
    tab.keyboard.press("End")
    until(tab, "html => document.querySelector('.picture .canvas').innerHTML !== html", before)
    assert_accessible(tab)


def test_a_goal_is_played_by_the_oracle(serve, environments, tmp_path, tab):
    url = serve(FOLDER / "textcraft.jsonl", play=Play(environments, tmp_path))
    open_at(tab, f"{url}#/play/textcraft/3", "input[list]")
    for _ in range(12):
        if tab.locator(".over").count():
            break
        turns = tab.locator(".turns .turn-title").count()
        tab.get_by_role("button", name="Ask the oracle").click()
        until(tab, "document.querySelector('input[list]').value !== ''")
        tab.get_by_role("button", name="Act", exact=True).click()
        until(tab, "n => document.querySelectorAll('.turns .turn-title').length > n", turns)
    assert "solved" in tab.inner_text(".over")
    tab.get_by_role("button", name="Save").click()
    until(tab, "document.body.innerText.includes('Saved to')")
    assert json.loads((tmp_path / "played.jsonl").read_text())["success"]


# ------------------------------------------------------------------------------------- one file


def test_an_export_opens_from_disk_and_asks_for_nothing(made, tmp_path, tab):
    out = tmp_path / "page.html"
    size = export([open_source(0, made)], out, None)
    assert size == out.stat().st_size
    for route in ("#/0", "#/0/step_000004", "#/0/step_000004?group=1", "#/0/step_000004/1/2"):
        tab.goto("about:blank")
        open_at(tab, out.as_uri() + route, "h1")
        until(tab, "document.querySelector('main').innerText.length > 100")
    assert tab.locator(".turns").count() == 1
    assert all(url.startswith(("file:", "about:", "data:")) for url in tab.asked)
    assert len([url for url in tab.asked if url.startswith("file:")]) == 4  # the page itself
    assert tab.get_by_role("button", name="Re-enact").count() == 0


# ------------------------------------------------------------------------------------ hostile text


@pytest.mark.parametrize("how", ["served", "exported"])
def test_nothing_that_was_written_runs(serve, tmp_path, tab, how):
    run = tmp_path / "<img src=x onerror='window.pwned=1'>"
    (run / "trajectories").mkdir(parents=True)
    lines = "".join(hostile_line(n, text) for n, text in enumerate(HOSTILE))
    (run / "trajectories" / "<b>step_1<b>.jsonl").write_text(lines)
    (run / "config.json").write_text(json.dumps({"config": {t: t for t in HOSTILE}}))
    if how == "served":
        base = serve(run)
    else:
        export([open_source(0, run)], tmp_path / "page.html", None)
        base = (tmp_path / "page.html").as_uri()
    file = "%3Cb%3Estep_1%3Cb%3E"
    routes = ["#/0", f"#/0/{file}", f"#/0/{file}?group=1"]
    routes += [f"#/0/{file}/{n}/1" for n in range(len(HOSTILE))]
    for route in routes:
        tab.goto("about:blank")
        open_at(tab, base + route)
        tab.wait_for_timeout(150)
        assert tab.evaluate("window.pwned") is None, route
        assert tab.evaluate("document.querySelectorAll('main img').length") == 0
        links = tab.evaluate("[...document.querySelectorAll('a')].map(a => a.getAttribute('href'))")
        assert all(link.startswith("#") for link in links), links
        written = tab.inner_text("body")
        assert not any(ord(c) < 32 and c not in "\n\t" for c in written), route
        assert not any(c in written for c in "\u202e\u2066\x9b"), route


# -------------------------------------------------------------------------------- for everybody


@pytest.mark.parametrize(("scheme", "width"), [("light", 400), ("dark", 1280)])
def test_every_view_can_be_read_by_everybody(serve, made, chromium, scheme, width):
    context = chromium.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})
    page = context.new_page()
    base = serve(made)
    for route in ("#/0", "#/0/step_000004", "#/0/step_000004?group=1", "#/0/step_000004/1/2"):
        page.goto("about:blank")
        open_at(page, base + route)
        page.wait_for_timeout(400)
        if route.endswith("/2"):
            page.keyboard.press("t")
            page.wait_for_timeout(200)
        assert_accessible(page)
        overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert page.evaluate(overflow) <= 0, route
    context.close()
