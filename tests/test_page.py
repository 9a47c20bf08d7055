"""The page of replay.py in a real browser: its contents, its keys, and that no written text runs.

Without Chromium these tests are skipped; with CI=true they fail instead.
"""

import contextlib
import json
import os
import shutil
import socket
import threading
import time

import pytest
import uvicorn
from axe_playwright_python.sync_playwright import Axe
from made_run import HOSTILE, PLAYED, add_step, hostile_line, make_run
from playwright.sync_api import sync_playwright

from trajectory import from_line
from viewer.export import export
from viewer.play import Environments, Play
from viewer.server import create_app
from viewer.sources import open_source


@pytest.fixture(scope="module")
def chromium():
    """A headless Chromium: $CHROMIUM or the system's."""
    names = ("chromium", "chromium-browser", "google-chrome")
    path = os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, names)), None)
    if path is None:
        missing = "no Chromium: apt-get install chromium, or name one in $CHROMIUM"
        (pytest.fail if os.environ.get("CI") == "true" else pytest.skip)(f"NOT TESTED: {missing}")
    # In a container, root does not have the rights that the sandbox needs.
    arguments = ["--disable-gpu", *([] if os.geteuid() else ["--no-sandbox"])]
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("run") / "made", steps=4, turns=3)


@pytest.fixture
def serve():
    """A function that starts replay.py's server in this process, on a free port."""
    with contextlib.ExitStack() as stack:

        def start(path, play=None):
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            app = create_app([open_source(0, path)], "secret", play)
            server = uvicorn.Server(uvicorn.Config(app, log_level="error", ws="none"))
            thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
            thread.start()
            stack.callback(thread.join, 10)
            stack.callback(setattr, server, "should_exit", True)
            return f"http://127.0.0.1:{listener.getsockname()[1]}/?token=secret"

        yield start


@pytest.fixture(params=[("light", 1280)])
def tab(chromium, request):
    """A browser tab with a colour scheme and width. The test fails if the page logs an error."""
    scheme, width = request.param
    context = chromium.new_context(color_scheme=scheme, viewport={"width": width, "height": 900})
    page = context.new_page()
    page.problems, page.requested_urls = [], []
    page.on("console", lambda m: m.type in ("error", "warning") and page.problems.append(m.text))
    page.on("pageerror", lambda error: page.problems.append(str(error)))
    page.on("request", lambda request: page.requested_urls.append(request.url))
    yield page
    problems = list(page.problems)
    context.close()
    assert problems == []


def open_at(page, url, wait_for="h1"):
    page.goto("about:blank")
    page.goto(url)
    page.wait_for_selector(f"main {wait_for}")


def until(page, expression, *argument, seconds=30):
    """Wait until a JavaScript expression is true. The page's Content-Security-Policy forbids
    Playwright's wait_for_function."""
    deadline = time.monotonic() + seconds
    while not page.evaluate(expression, *argument):
        assert time.monotonic() < deadline, expression
        page.wait_for_timeout(100)


def assert_accessible(page):
    violations = Axe().run(page).response["violations"]
    assert not violations, [(v["id"], [n["html"][:120] for n in v["nodes"]]) for v in violations]


def test_a_user_goes_from_the_first_screen_to_a_failure_with_a_filter_and_keys(serve, run, tab):
    url = serve(run)
    open_at(tab, url, ".goes-wrong li")
    assert "secret" not in tab.url
    assert "held-out tasks solved" in tab.inner_text(".headline")
    assert tab.locator(".uplot").count() >= 4 and "failures in" in tab.inner_text(".goes-wrong")
    open_at(tab, f"{url}#/0/step_000004", "table.trajectories tbody tr")
    rows = tab.locator("table.trajectories tbody tr")
    assert rows.count() == 7
    tab.get_by_label("outcome", exact=False).select_option("failed")
    until(tab, "document.querySelectorAll('table.trajectories tbody tr').length < 7")
    assert "outcome=failed" in tab.url
    rows.first.locator("a").click()
    tab.wait_for_selector(".turns")
    line = int(tab.url.rsplit("/", 1)[1].split("?")[0])
    recorded = open_source(0, run).lines("step_000004").read(line)
    assert not recorded["success"]
    for turn in range(2, len(recorded["turns"]) + 1):
        tab.keyboard.press("ArrowRight")
        tab.wait_for_url(f"**/{line}/{turn}")
    tab.keyboard.press("Home")
    tab.wait_for_url(f"**/{line}/1")
    tab.keyboard.press("]")
    tab.wait_for_url(f"**/step_000004/{line + 1}")


def test_lists_are_filtered_sorted_and_split_into_pages(serve, run, tab):
    tab.goto(serve(run))
    all_rows = open_source(0, run).lines("step_000004").rows

    def select(query, **changes):
        return tab.evaluate(
            """async ([all, query, changes]) => {
                const { selectRows } = await import("/page/rows.js");
                const address = Object.fromEntries(new URLSearchParams(query));
                return selectRows(all, { ...address, ...changes });
            }""",
            [all_rows, query, {"limit": 200} | changes],
        )

    for query, matches in {
        "outcome=solved": lambda row: row["success"],
        "outcome=lost": lambda row: row["stop_reason"] == "env_error",
        "min_turns=2&max_turns=3": lambda row: 2 <= row["num_turns"] <= 3,
        "task=CRAFT_0": lambda row: row["task_id"] == "textcraft_0",
        "stop_reason=max_rounds&subtask=nothing": lambda row: False,
    }.items():
        assert select(query)["rows"] == [row for row in all_rows if matches(row)], query
    turns = [row["num_turns"] for row in select("sort=-num_turns")["rows"]]
    assert turns == sorted(turns, reverse=True) and len(set(turns)) > 1
    page = select("", offset=5, limit=10)
    assert page["total"] == page["matching"] == 7 and page["rows"] == all_rows[5:]
    all_rows = [all_rows[0] | {"task_id": name} for name in ("t_10", None, "t_9")]
    assert [row["task_id"] for row in select("sort=task_id")["rows"]] == ["t_9", "t_10", None]
    assert [row["task_id"] for row in select("sort=-task_id")["rows"]] == ["t_10", "t_9", None]


def test_tokens_have_the_masks_and_numbers_of_the_file(serve, run, tab):
    open_at(tab, f"{serve(run)}#/0/step_000003/1/1", ".turns")
    recorded = open_source(0, run).lines("step_000003").read(1)
    tab.keyboard.press("t")
    tab.wait_for_selector(".tokens .token.policy")
    names = tab.evaluate("[...document.querySelectorAll('.tokens .token')].map(t => t.className)")
    assert [int("policy" in name) for name in names] == recorded["loss_mask"]
    index = recorded["loss_mask"].index(1)
    tab.locator(".tokens .token").nth(index).hover()
    tooltip = tab.locator("[role=tooltip]:visible").inner_text().replace("−", "-")
    numbers = [float(line.split()[-1]) for line in tooltip.splitlines()]
    expected = [recorded["input_ids"][index], recorded["rollout_log_probs"][index]]
    assert numbers[:2] == pytest.approx(expected, abs=1e-3)


def test_a_new_step_appears_while_the_page_is_open(serve, tmp_path, tab):
    run = make_run(tmp_path / "run", steps=2, turns=3)
    config = json.loads((run / "config.json").read_text())
    config["config"]["steps"] = 9
    (run / "config.json").write_text(json.dumps(config))
    open_at(tab, serve(run), ".goes-wrong li")
    assert "step 2" in tab.inner_text(".goes-wrong")
    line = open_source(0, run).lines("step_000001").read(0)
    add_step(run, 3, [from_line(line | {"success": False})])
    until(tab, "document.querySelector('.goes-wrong').innerText.includes('step 3')")


@pytest.fixture(scope="module")
def environments():
    environments = Environments()
    yield environments
    environments.close()


@pytest.mark.parametrize(
    ("env", "package", "selector"),
    [
        ("textcraft", "textcraft", ".world li"),
        ("babyai", "minigrid", "svg.grid-picture"),
        pytest.param("sciworld", "scienceworld", ".world li", marks=pytest.mark.long),
    ],
)
def test_an_episode_is_re_enacted_and_its_states_are_drawn(
    serve, environments, tmp_path, tab, env, package, selector
):
    pytest.importorskip(package, reason=f"make setup ENV={env}")
    url = serve(PLAYED / f"{env}.jsonl", Play(environments, tmp_path))
    open_at(tab, f"{url}#/0/{env}/0", ".picture")
    tab.get_by_role("button", name="Re-enact").click()
    tab.wait_for_selector(f".picture .canvas {selector}", timeout=90_000)
    assert "every observation equals the recorded one" in tab.inner_text(".picture")
    before = tab.inner_html(".picture .canvas")
    tab.keyboard.press("End")
    until(tab, "html => document.querySelector('.picture .canvas').innerHTML !== html", before)
    assert_accessible(tab)


def test_live_play_with_the_oracle_solves_a_task(serve, environments, tmp_path, tab):
    url = serve(PLAYED / "textcraft.jsonl", Play(environments, tmp_path))
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


@pytest.mark.parametrize("tab", [("light", 400), ("dark", 1280)], indirect=True)
def test_an_export_opens_from_disk_sends_no_requests_and_is_accessible(run, tmp_path, tab):
    export([open_source(0, run)], tmp_path / "page.html", None)
    for route in ("#/0", "#/0/step_000004", "#/0/step_000004?group=1", "#/0/step_000004/1/2"):
        open_at(tab, (tmp_path / "page.html").as_uri() + route)
        tab.wait_for_timeout(400)
        tab.keyboard.press("t")  # shows tokens in a trajectory
        tab.wait_for_timeout(200)
        assert_accessible(tab)
        overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert tab.evaluate(overflow) <= 0, route
        assert len(tab.inner_text("main")) > 100
    assert tab.locator(".tokens").count() > 1
    assert all(url.startswith(("file:", "about:", "data:")) for url in tab.requested_urls)
    assert len([url for url in tab.requested_urls if url.startswith("file:")]) == 4  # the page
    assert tab.get_by_role("button", name="Re-enact").count() == 0


@pytest.mark.parametrize("is_served", [True, False])
def test_text_from_models_and_files_never_runs(serve, tmp_path, tab, is_served):
    run = tmp_path / "<img src=x onerror='window.pwned=1'>"
    (run / "trajectories").mkdir(parents=True)
    lines = "".join(hostile_line(n, text) for n, text in enumerate(HOSTILE))
    (run / "trajectories" / "<b>step_1<b>.jsonl").write_text(lines)
    (run / "config.json").write_text(json.dumps({"config": {t: t for t in HOSTILE}}))
    export([open_source(0, run)], tmp_path / "page.html", None)
    base = serve(run) if is_served else (tmp_path / "page.html").as_uri()
    file = "%3Cb%3Estep_1%3Cb%3E"
    routes = ["#/0", f"#/0/{file}", f"#/0/{file}?group=1"]
    for route in [*routes, *(f"#/0/{file}/{n}/1" for n in range(len(HOSTILE)))]:
        open_at(tab, base + route)
        tab.wait_for_timeout(150)
        assert tab.evaluate("window.pwned") is None, route
        assert tab.evaluate("document.querySelectorAll('main img').length") == 0
        links = tab.evaluate("[...document.querySelectorAll('a')].map(a => a.getAttribute('href'))")
        assert all(link.startswith("#") for link in links), links
        text = tab.inner_text("body")
        assert not any(ord(c) < 32 and c not in "\n\t" for c in text), route
        assert not any(c in text for c in "\u202e\u2066\x9b"), route
