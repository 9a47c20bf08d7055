"""WebArena's browser: waiting, tabs, hard cases, and sessions that do not disturb each other."""

import asyncio
import threading
import time
from unittest.mock import Mock
from urllib.parse import urlsplit

import pytest
from webarena_site import require_browser, serving

from envs.webarena import session as session_module
from envs.webarena.actions import read
from envs.webarena.browser import Addresses, Browser, BrowserMissing, find_browser
from envs.webarena.session import MAX_POPUPS, MAX_TABS, Session

COUNTER = """<title>Page {n}</title><h1>page {n}</h1><a href='/count?n={next}'>next</a>
<form action=/count><label>N <input name=n></label><button>Go</button></form>"""
LINKS = """<title>Links</title><a href='http://example.com/'>outside</a>
<a href='http://shop-other.test/'>other session</a><a href='file:///etc/passwd'>file</a>
<a href=/x.bin>download</a><a href=/never>never</a>
<a href=/count target=_blank>window</a>
<button onclick='if (confirm("Sure?")) document.title = "Yes"'>ask</button>
<img src='http://127.0.0.1:PORT/seen'>"""
PAGES = {
    "/alerts": "<button onclick='while (true) alert(1)'>b</button>",
    "/windows": "<button onclick='while (true) window.open(\"/count\")'>b</button>",
    "/loop": "<button onclick='while (true);'>b</button>",
    "/loop_at_start": "<script>while (true);</script>",
    "/text": "<title>Big</title><p>" + "word " * 1_000_000,
    "/nodes": "<title>Many</title>" + "<i>a</i>" * 100_000,
    "/never_ready": "<p>text</p><script src=/never></script>",
    "/fetch": """<button onclick='fetch("/count?n=2").then(r => r.text()).then(
        () => setTimeout(() => o.textContent = "late", 100))'>b</button>
        <p id=o></p><script></script>""",
    "/timer": "<p id=o></p><script>setInterval(() => o.textContent += '.', 20)</script>",
    "/stay": """<a href=/count>out</a><input>
        <script>onbeforeunload = e => e.preventDefault()</script>""",
    "/form": """<label>Sort <select onchange='o.textContent = this.value'><option value=1>one
        <option value=2>two  x</select></label><label>Name <input></label><p id=o></p>
        <a href=# onmouseover='o.textContent = "over"' onclick='return false'>menu</a>
        <p style='height: 2000px'>tall</p>
        <button onclick='o.textContent = "sent"'>Order</button>""",
}


def answer(host, path):
    PATHS.append(path)
    parts = urlsplit(path)
    n = int(parts.query.removeprefix("n=") or 0)
    if parts.path in ("/never", "/count"):
        time.sleep(30 if parts.path == "/never" else (0, 0.02, 0.1, 0.2)[n % 4])
    return PAGES.get(parts.path) or COUNTER.format(n=n, next=n + 1)


PATHS = []


@pytest.fixture(scope="module")
def shared_browser():
    """A browser that knows only the site."""
    require_browser()
    with serving(answer) as port:
        PAGES["/links"] = LINKS.replace("PORT", str(port))
        browser = Browser(f"MAP *.test 127.0.0.1:{port}, MAP * ~NOTFOUND")
        yield browser
        browser.close()


class Player:
    """A session that opens a page and plays actions."""

    def __init__(self, browser, path, token):
        self.browser = browser
        addresses = Addresses({"http://shop.com": f"http://shop-{token}.test"})
        self.session = Session(browser, addresses)
        self.page = browser.call(self.session.open([f"http://shop-{token}.test{path}"]))

    def play(self, text):
        """Play an action; an element can be named by its name instead of its number."""
        for node in self.page.nodes:
            if node.element_id and node.name:
                text = text.replace(f"[{node.name}]", f"[{node.element_id}]", 1)
        action = read(text)
        node = self.page.element(action.number)
        answer = self.browser.call(self.session.step(action, node))
        self.page, self.problem, self.notes = answer
        return self.page.text


@pytest.fixture
def open_page(shared_browser):
    players = []

    def open_page(path, token="mine"):
        players.append(Player(shared_browser, path, token))
        return players[-1]

    yield open_page
    for player in players:
        shared_browser.call(player.session.close())


@pytest.fixture
def short_limits(monkeypatch):
    for name in ("ACT_S", "LOAD_S", "LOOK_S"):
        monkeypatch.setattr(session_module, name, 2.0)


# ---- actions and waiting


def test_every_click_and_form_is_followed_by_its_page(open_page):
    """The site answers after 0 to 0.2 s; nothing in the browser waits for a fixed time."""
    player = open_page("/count")
    player.play("go_back")
    assert player.problem == "There is no page to go back to."
    for n in range(1, 13):
        assert f"heading 'page {n}'" in player.play("click [next]")
        assert player.page.url == f"http://shop.com/count?n={n}"
    for n in (3, 7, 2, 5):
        assert f"heading 'page {n}'" in player.play(f"type [N] [{n}]")
    assert "page 2" in player.play("go_back")
    assert "page 5" in player.play("go_forward")
    player.play("go_forward")
    assert player.problem == "There is no page to go forward to."


def test_fields_options_keys_and_the_mouse(open_page):
    player = open_page("/form")
    assert "textbox 'Name' value: 'tea' focused" in player.play("type [Name] [tea] [0]")
    assert "value: 'tea two'" in player.play("type [Name] [\ntwo] [0]")  # does not press Enter
    player.play("press [ctrl+a]")
    assert "value" not in player.play("press [Backspace]").partition("Name")[2]
    assert "value: 'two x'" in player.play("select [Sort] [two x]")
    assert "StaticText '2'" in player.page.text
    player.play("select [Sort] [three]")
    assert player.problem == "There is no option 'three'. The options are: 'one', 'two x'."
    assert "StaticText 'over'" in player.play("hover [menu]")
    assert "Order" not in player.page.text and "(more below" in player.page.text
    player.play("scroll [down]")
    player.play("scroll [down]")
    assert "(more above" in player.page.text
    assert player.page.find("button", "Order").element_id
    player.play("click [Order]")
    assert "StaticText 'sent'" in player.play("press [Control+Home]")


def test_a_busy_browser_still_tells_the_title(open_page, monkeypatch):
    send = session_module.Tab.send

    async def slow_send(tab, method, **arguments):
        if method == "Target.getTargetInfo":
            await asyncio.sleep(1.5)
        return await send(tab, method, **arguments)

    monkeypatch.setattr(session_module.Tab, "send", slow_send)
    assert open_page("/count?n=1").page.text.startswith("Tab 0 (current): Page 1\n")


def test_requests_and_late_changes_are_waited_for_but_not_forever(open_page):
    assert "StaticText 'late'" in open_page("/fetch").play("click [b]")
    start = time.monotonic()
    open_page("/timer")
    assert time.monotonic() - start < session_module.MAX_QUIET_S + 8


def test_tabs(open_page):
    player = open_page("/count?n=1")
    assert player.play("new_tab").startswith("Tab 0: Page 1 | Tab 1 (current): about:blank\n\n")
    player.play("goto [http://shop.com/count?n=2]")
    assert player.play("tab_focus [0]").startswith("Tab 0 (current): Page 1 | Tab 1: Page 2\n\n")
    player.play("tab_focus [2]")
    assert player.problem == "There is no tab 2."
    assert player.play("close_tab").startswith("Tab 0 (current): Page 2\n")
    assert player.play("close_tab").startswith("Tab 0 (current): about:blank\n")
    for _ in range(MAX_TABS):
        player.play("new_tab")
    assert player.problem == f"{MAX_TABS} tabs are open, the maximum."
    player.play("goto [http://shop.com/links]")
    player.play("click [window]")
    assert player.notes == f"A new tab was closed, because {MAX_TABS} are open."


# ---- what a page can do


def test_dialogs_downloads_and_new_windows_are_told(open_page, monkeypatch):
    player = open_page("/links")
    for _ in range(MAX_POPUPS + 1):  # so many in ONE action would close the tab
        player.play("click [ask]")
    assert player.notes == "A dialog said 'Sure?' and was dismissed."
    player.play("click [download]")
    assert player.notes == "The download of 'x.bin' was refused."
    with monkeypatch.context() as patch:
        patch.setattr(player.session._context, "new_page", Mock(side_effect=OSError("busy")))
        player.play("new_tab")
    assert player.problem == "The browser reports: busy."
    assert "Tab 0 (current): Links | Tab 1: Page 0" in player.play("click [window]")
    assert player.notes == "A new tab 1 was opened."
    player = open_page("/stay")
    player.play("type [2] [x] [0]")
    assert "page 0" in player.play("click [out]"), "a page cannot hold a visitor"


def test_other_addresses_are_refused_and_nothing_is_sent(open_page):
    player = open_page("/links")
    for address in ("file:///etc/passwd", "http://shop-other.test", "shop.com.net", "chrome://gpu"):
        player.play(f"goto [{address}]")
        assert "is not on one of the sites: http://shop.com." in player.problem
    for name, address in (("outside", "http://example.com/"), ("other session", "shop-other.test")):
        player.play(f"click [{name}]")
        assert address in player.notes and "is not on the sites" in player.notes
    player.play("click [file]")
    assert player.page.url == "http://shop.com/links" and "root:" not in player.page.text
    assert "/seen" not in PATHS, "the page's image is on this machine, but on no site"


def test_an_element_that_is_gone_is_told(open_page):
    player = open_page("/links")
    page = player.session.tab.page
    player.browser.call(page.evaluate("document.querySelector('a').remove()"))
    assert "outside" not in player.play("click [outside]")
    assert player.problem == "The element [1] link 'outside' is no longer on the page."


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("/alerts", "A dialog said '1' and was dismissed. The page opened dialogs or windows in a"),
        ("/windows", "The page opened dialogs or windows in a loop, so its tab was closed."),
        ("/loop", "The page did not respond, so its tab was closed."),
    ],
)
def test_a_page_in_a_loop_is_closed_and_other_sessions_go_on(open_page, short_limits, path, reason):
    other = open_page("/count", token="b2")
    player = open_page(path)
    thread = threading.Thread(target=player.play, args=("click [b]",))
    thread.start()
    num_steps = 0
    while thread.is_alive():
        num_steps += 1
        assert f"page {num_steps}'" in other.play("click [next]")
    assert reason in player.notes
    assert num_steps >= 1
    assert player.page.url == "about:blank", "the tab was replaced by an empty one"
    player.play("goto [http://shop.com/loop_at_start]")
    assert "did not respond" in player.problem + player.notes
    assert "page 0" in player.play("goto [http://shop.com/count]")


def test_a_page_that_does_not_load(open_page, short_limits):
    player = open_page("/links")
    player.play("goto [http://shop.com/never]")
    assert player.problem == "The page did not open: Timeout 2000ms exceeded."
    player.play("click [never]")
    assert player.notes == "The page did not finish loading within 2 s."
    assert "StaticText 'text'" in player.play("goto [http://shop.com/never_ready]")
    assert player.notes == "The page did not finish loading within 2 s."
    player.play("press [Tab]")
    assert player.notes == "", "its loading was stopped, so the next action does not wait again"
    player.play("goto [http://shop.com/count?n=x]")  # the site fails
    assert player.problem.endswith(" net::ERR_EMPTY_RESPONSE at http://shop.com/count?n=x.")


@pytest.mark.parametrize("path", ["/text", "/nodes"])
def test_a_page_that_is_too_large_is_told_and_can_be_left(open_page, path):
    player = open_page("/links")
    assert "(this page is too large to be shown:" in player.play(f"goto [http://shop.com{path}]")
    assert "link 'outside'" in player.play("go_back")


def test_a_missing_browser_is_one_line_with_the_command(monkeypatch):
    monkeypatch.delenv("CHROMIUM", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(BrowserMissing, match="apt-get install chromium-headless-shell, or name"):
        find_browser()
    monkeypatch.setenv("CHROMIUM", "/bin/false")
    with pytest.raises(BrowserMissing, match="/bin/false does not start: [^\n]*$"):
        Browser("")
