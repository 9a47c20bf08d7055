"""WebArena as an environment: on the wire, with the oracle, and when something fails."""

import json
import os
import signal
import threading
from contextlib import closing
from dataclasses import replace

import pytest
from starlette.testclient import TestClient
from test_webarena_tasks import solve
from webarena_site import require_browser, serving

from envclient import connect, local_server
from envs import EpisodeEndedError, OracleLost, TaskIndexError
from envs.server import create_app
from envs.webarena import WebArena, tasks
from envs.webarena.browser import BrowserLost
from envs.webarena.env import PUBLIC, WebArenaWire
from envs.webarena.oracle import Step, next_move
from envs.webarena.tree import Node, Page

FIRST = tasks.NUM_OFFICIAL
ADMIN = PUBLIC["SHOPPING_ADMIN"]


@pytest.fixture(scope="module", autouse=True)
def _browser():
    require_browser()
    yield
    WebArena.close_shared()


@pytest.fixture
def env():
    env = WebArena()
    yield env
    env.close()


# ---- episodes


def test_a_wrong_answer_or_too_many_turns_end_the_episode_without_a_reward(env, monkeypatch):
    env.reset(FIRST)
    observation, reward, terminated, _, info = env.step("stop [I do not know]")
    assert (reward, terminated, info["success"]) == (0, True, False)
    assert observation.endswith("PREVIOUS ACTION: stop [I do not know]")
    assert env.available_actions() == []
    monkeypatch.setattr("envs.webarena.env.MAX_TURNS", 2)
    for last, end in (("scroll [down]", (0, False, True)), ("stop []", (0, True, False))):
        env.reset(FIRST)
        assert [env.step(action)[1:4] for action in ("fly", last)] == [(0, False, False), end]
        with pytest.raises(EpisodeEndedError):
            env.step("stop []")


def test_malformed_actions_and_absent_elements_are_told_and_the_episode_goes_on(env):
    first = env.reset(FIRST)
    for text in ("", "look", "click [a]", "```stop"):
        observation, reward, terminated, *_, info = env.step(text)
        assert (reward, terminated) == (0, False)
        assert info["error"] and info["error"] in observation.rpartition("PREVIOUS ACTION: ")[2]
    observation, *_, info = env.step("click [99]")
    assert observation.endswith("click [99]. There is no such element on this screen.")
    assert info["failed"]
    assert observation.rpartition("\n")[0] == first.rpartition("\n")[0], "the page is the same"
    observation, *_ = env.step("<think>```stop```?</think>I click. ```click [2]```")
    assert "PREVIOUS ACTION: click [2] where [2] is link '" in observation


def test_two_sessions_read_the_same_texts_and_do_not_see_each_others_changes(env):
    indices = range(FIRST, tasks.num_tasks())
    index = next(i for i in indices if "database" in tasks.task(i)["eval"]["eval_types"])
    with closing(WebArena()) as other:
        first = env.reset(index)
        assert other.reset(index) == first
        solve(env, index)
        assert other.step("stop []")[1] == 0, "nothing has changed for the other session"
        assert env.reset(index) == first
        rewards = [env.step(action)[1] for action in ("scroll [down]", "stop []")]
        assert rewards == [0, 0], "a reset undoes all changes"
    assert len(env._browser.chromium.contexts) == 1
    env.close()
    with pytest.raises(KeyError):  # its rows are gone
        env.query("SELECT 1")


def test_people_see_a_screenshot_and_the_element_that_was_acted_on(env):
    env.reset(FIRST)
    env.step("click [1]")
    state = env.state_for_people()
    left, top, width, height = state["acted_on"]
    assert 0 <= left < 1280 and 0 <= top < 720 and width > 0 and height > 0
    assert state["screenshot"].startswith("data:image/jpeg;base64,")
    assert len(state["screenshot"]) < 200_000
    assert state["url"] == env.url and ".test" not in str(state)


def test_a_killed_browser_ends_its_sessions_and_the_next_reset_starts_another(env):
    env.reset(FIRST)
    browser = env._browser

    async def process_id():
        devtools = await browser.chromium.new_browser_cdp_session()
        processes = (await devtools.send("SystemInfo.getProcessInfo"))["processInfo"]
        return next(process["id"] for process in processes if process["type"] == "browser")

    with closing(WebArena()) as other:
        other.reset(FIRST)
        field = env._page.find("textbox", "Search products").element_id
        threading.Timer(0.2, os.kill, (browser.call(process_id()), signal.SIGKILL)).start()
        for session in (env, other):
            with pytest.raises(BrowserLost, match="has ended; a reset starts another one"):
                session.step(f"type [{field}] [{'x' * 2000}] [0]")  # takes seconds
    solve(env, FIRST)
    assert env._browser is not browser


# ---- official tasks


def test_official_tasks_are_refused_until_what_they_need_is_there(env, monkeypatch, tmp_path):
    references = {"fuzzy_match": ["x"]}
    task = {
        "intent": "?",
        "start_url": PUBLIC["GITLAB"],
        "storage_state": "./.auth/gitlab_state.json",
        "eval": {"eval_types": ["string_match"], "reference_answers": references},
    }
    monkeypatch.setattr(tasks, "task", lambda index: task)
    with pytest.raises(TaskIndexError, match="name a chat server in WEBARENA_JUDGE_URL"):
        env.reset(0)
    monkeypatch.setenv("WEBARENA_JUDGE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("WEBARENA_AUTH", str(tmp_path))
    with pytest.raises(TaskIndexError, match="gitlab_state.json, which WebArena's auto_login.py"):
        env.reset(0)


def test_official_sites_are_shown_under_their_public_names(env, monkeypatch, tmp_path):
    def answer(host, path):
        own = f"http://{host}"
        return f"<title>{own}</title><p>Clone {own}/x.git</p><a href={own}/next>next</a>"

    evaluation = {"eval_types": ["url_match"], "reference_url": f"{ADMIN}/orders?page=2"}
    start = f"{PUBLIC['GITLAB']}/a |AND| {PUBLIC['REDDIT']}"
    task = {"intent": "?", "start_url": start, "storage_state": "a/b.json", "eval": evaluation}
    cookie = {"name": "user", "value": "ann", "domain": "gitlab.localhost", "path": "/"}
    (tmp_path / "b.json").write_text(json.dumps({"cookies": [cookie]}))
    monkeypatch.setenv("WEBARENA_AUTH", str(tmp_path))
    monkeypatch.setattr(tasks, "task", lambda index: task)
    WebArena.close_shared()  # the browser knows only the hosts that were configured at its start
    with serving(answer) as port:
        for name in PUBLIC:
            path = "/admin" if name == "SHOPPING_ADMIN" else ""
            host = f"{name.lower().replace('_', '-')}.localhost:{port}"
            monkeypatch.setenv(name, f"http://{host}{path}")
        observation = env.reset(0)
        assert "Tab 0 (current): http://gitlab.com | Tab 1: http://reddit.com\n\n" in observation
        assert "StaticText 'Clone http://gitlab.com/x.git'" in observation
        locator, script = "document.title + document.cookie", "document.cookie = 'x=1'"
        assert env.read("last", locator, [script]) == "http://gitlab.comuser=ann; x=1"
        assert env.read("http://reddit.com/x", "document.title", ()) == "http://reddit.com"
        observation, *_ = env.step("click [1]")
        assert "URL: http://gitlab.com/next\n" in observation and "Tab 2" not in observation
        assert "URL: http://luma.com/x\n" in env.step("goto [http://luma.com/x]")[0]
        observation, *_ = env.step(f"goto [{ADMIN}/orders?page=2]")
        assert "localhost" not in observation
        assert env.step("stop []")[1] == 1
        env.close()
    WebArena.close_shared()


# ---- the oracle's rules


def test_the_oracle_plays_the_last_step_that_applies():
    plan = [
        Step("open", "", "click", "link", "Orders"),
        Step("search", "http://shop.com/orders", "type", "textbox", "Search", "tea"),
        Step("add", "http://shop.com/orders?q=tea", "fill", "textbox", "Price", "5"),
        Step("done", "http://shop.com/done", "stop", "heading", "Paid", "5"),
    ]
    search, price = Node("textbox", "Search", element_id=2), Node("textbox", "Price", element_id=3)

    def move(url, *nodes, previous=""):
        return next_move(Page(url, nodes), plan, "http://shop.com", previous)[1]

    orders, found = "http://shop.com/orders/?page=2", "http://shop.com/orders?page=2&q=tea"
    assert move("http://shop.com", Node("link", "Orders", element_id=7)) == "click [7]"
    assert move(orders, search, price) == "type [2] [tea] [1]"
    assert move(found, search, price) == "type [3] [5] [0]"
    assert move(found, search, replace(price, value="5")) == "type [2] [tea] [1]"
    assert move("http://shop.com/done", Node("heading", "Paid")) == "stop [5]"
    assert move("http://shop.com/done") == move("http://shop.com/x") == "goto [http://shop.com]"
    with pytest.raises(OracleLost):
        move("http://shop.com", previous="goto [http://shop.com]")
    # A field with other text is cleared first, and with the same text it is sent.
    other, focused = replace(search, value="kettle"), {"focused": True}
    assert move(orders, other) == "click [2]"
    other = replace(other, states=focused)
    assert move(orders, other) == "press [Control+a]"
    assert move(orders, other, previous="press [Control+a]") == "press [Backspace]"
    assert move(orders, replace(other, value="tea")) == "press [Enter]"
    # An element outside the viewport is scrolled to.
    for top, action in {900: "scroll [down]", -300: "scroll [up]", 710: "press [PageDown]"}.items():
        assert move("http://shop.com/x", Node("link", "Orders", box=(0, top, 50, 20))) == action


# ---- the wire


def test_the_exchange_is_that_of_agentgyms_client():
    with TestClient(create_app("webarena", first_id=4)) as client:
        assert client.get("/").json() == "ok"
        assert client.post("/create").json() == {"env_idx": 4}
        assert client.get("/list_envs").json() == [4]
        answer = client.post("/reset", json={"env_idx": 4, "seed": 0, "idx": FIRST}).json()
        task = tasks.task(FIRST)
        assert (answer["sites"], answer["object"]) == (task["sites"], task["intent"])
        prompt = client.get("/observation", params={"env_idx": 4}).json()
        assert prompt.startswith(f"OBSERVATION:\n{answer['observation']}\nURL: http://")
        text = "In summary, the next action I will perform is ```stop [nothing]```"
        answer = client.post("/step", json={"env_idx": 4, "action": text}).json()
        assert (answer["reward"], answer["terminated"], answer["truncated"]) == (0, True, False)
        assert client.post("/close", json={"env_idx": 4}).json() == {"closed": "closed"}
        assert client.get("/list_envs").json() == []


def test_our_client_plays_over_http():
    with local_server("webarena") as url, connect("webarena", url) as client:
        assert client.reset(FIRST).startswith("OBSERVATION:\nTab 0 (current): ")
        result = client.step(WebArena.say("I do not know.", "stop [nothing]"))
        assert (result.reward, result.terminated, result.info["success"]) == (0.0, True, False)
        assert client.close() is True


def test_answers_of_agentgyms_server_are_read():
    wire = WebArenaWire()
    with pytest.raises(ValueError, match="the report that the browser failed"):
        wire.first_observation({"observation": "TimeoutError", "sites": "Error", "object": "Error"})
    info = {"page": {"url": "http://x", "content": "<html>"}, "fail_error": ""}
    step = {"reward": 0.5, "terminated": False, "truncated": False, "info": info}
    assert wire.outcome(step, 0.0) == (0, False, False, {"success": False, "score": 0})
    outcome = wire.outcome(step | {"reward": 1.0, "terminated": True, "info": None}, 0.0)
    assert outcome == (1, True, False, {"success": True, "score": 1})
