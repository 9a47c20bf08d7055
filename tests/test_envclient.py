"""The HTTP client against a scripted flaky server, one that speaks as AgentGym's, and ours."""

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest

from envclient import (
    AllServersDown,
    EnvConnectionError,
    EnvError,
    EnvPool,
    EnvProtocolError,
    EnvServerError,
    EnvTimeout,
    NotSupported,
    SessionLost,
    StepOutsideEpisode,
    TooManySessions,
    connect,
    local_server,
)

ROOT = Path(__file__).parents[1]
ACTION = "Thought: look.\nAction: inventory"
STEP = {"observation": "Got 1 oak log", "reward": 0, "done": False}
USUAL = {
    "/reset": (200, {"id": 0, "observation": "Goal: craft stick.", "done": False, "reward": 0}),
    "/step": (200, STEP),
    "/observation": (200, "Got 1 oak log"),
    "/close": (200, True),
}
NOT_FOUND = (404, {"detail": "Not Found"})


# --- A server that does what a test tells it to --------------------------------------------------


class Flaky(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # one packet an answer: two would wait 40 ms for each other

    def log_message(self, *_):
        pass

    def do_POST(self):
        path, _, query = self.path.partition("?")
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fields = dict(p.split("=") for p in query.split("&")) if query else {}
        self.server.log.append((path, json.loads(body) if body else fields))
        is_scripted = bool(self.server.script.get(path))
        status, content = self.server.next_answer(path)
        self.close_connection = content in ("hang", "hang up")
        if content == "hang":
            self.server.released.wait(10)
        elif content != "hang up":
            is_text = is_scripted and isinstance(content, str)
            answer = (content if is_text else json.dumps(content)).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

    do_GET = do_POST


class FlakyServer(ThreadingHTTPServer):
    """Answers as AgentGym's TextCraft server, or with what `script[path]` holds: (status, content),
    used up once. Content is JSON, or text to send as it is; "hang" and "hang up" are ways of not
    answering. `log` holds (path, fields).
    """

    daemon_threads = True
    request_queue_size = 128  # with 5, connections of a busy machine wait a second

    def __init__(self, port=0):
        super().__init__(("127.0.0.1", port), Flaky)
        self.script, self.log, self.num_sessions = {}, [], 0
        self.released = threading.Event()
        self.port = self.server_address[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def next_answer(self, path):
        if self.script.get(path):
            return self.script[path].pop(0)
        if path == "/create":
            self.num_sessions += 1
            return 200, {"id": self.num_sessions - 1}
        return USUAL.get(path, NOT_FOUND)

    def count(self, path):
        return sum(logged == path for logged, _ in self.log)

    def close(self):
        self.released.set()
        self.shutdown()
        self.server_close()


def running():
    flaky = FlakyServer()
    yield flaky
    flaky.close()


server = pytest.fixture(running, name="server")
other = pytest.fixture(running, name="other")


@pytest.fixture
def playing(server):
    """A client in the middle of an episode."""
    with connect("textcraft", server.url, timeout_s=2.0) as client:
        client.reset(0)
        yield client


# --- AgentGym's own wire -------------------------------------------------------------------------


def test_an_episode_with_agentgyms_server_sends_exactly_its_fields(server):
    server.script["/step"] = [
        (200, {"observation": "Got 1 oak log", "reward": 0, "done": False}),
        (200, {"observation": "Crafted 4 minecraft:stick", "reward": 1, "done": True}),
    ]
    with connect("textcraft", server.url) as client:
        assert client.reset(31) == "Goal: craft stick."
        first = client.step("Thought: a log.\nAction: get 1 oak log")
        assert first == ("Got 1 oak log", 0.0, False, False, {"success": False, "score": 0.0})
        last = client.step("Thought: done.\nAction: craft 4 stick using 2 oak planks")
        assert last[:4] == ("Crafted 4 minecraft:stick", 1.0, True, False)
        assert last.info == {"success": True, "score": 1.0}
        assert client.observation() == "Got 1 oak log"
        with pytest.raises(NotSupported, match="/state: this server has no /state"):
            client.state()
    assert server.log == [
        ("/create", {}),
        ("/reset", {"id": 0, "data_idx": 31, "seed": 0}),
        ("/step", {"id": 0, "action": "get 1 oak log"}),
        ("/step", {"id": 0, "action": "craft 4 stick using 2 oak planks"}),
        ("/observation", {"id": "0"}),
        ("/state", {"id": "0"}),
        ("/close", {"id": 0}),
    ]


def scripted(server, env, *steps):
    """The results of one action after the other on AgentGym's server of `env`."""
    server.script["/step"] = [(200, {"observation": "x", **step}) for step in steps]
    with connect(env, server.url, timeout_s=2.0) as client:
        client.reset(0)
        return [client.step("Action: look around") for _ in steps]


def test_agentgyms_babyai_is_over_when_it_has_paid(server):
    """It plays on after a reward of 0.5 or less, and pays again for standing at the goal."""
    nothing, paid = scripted(
        server,
        "babyai",
        {"reward": 0, "score": 0, "done": False},
        {"reward": 0.4, "score": 0.4, "done": False},
    )
    assert nothing[1:4] == (0.0, False, False)
    assert paid[1:4] == (0.4, True, False)
    assert paid.info == {"success": True, "score": 0.4}


def test_agentgyms_sciworld_counts_what_is_above_the_best_so_far(server):
    """Its score falls to -100 at a wrong focus, and "reset task" lets it be earned twice."""
    first = {"task_description": "Boil water.", "observation": "A room."}
    server.script["/reset"] = [(200, first)] * 2
    with connect("sciworld", server.url, timeout_s=2.0) as client:
        assert client.reset(0) == "Boil water.\nA room."
    results = scripted(
        server,
        "sciworld",
        {"reward": 50, "score": 50, "done": False},
        {"reward": -50, "score": 0, "done": False},
        {"reward": 60, "score": 60, "done": False},
        {"reward": -160, "score": -100, "done": True},
    )
    assert [round(result.reward, 9) for result in results] == [0.5, 0.0, 0.1, 0.0]
    assert [result.terminated for result in results] == [False, False, False, True]
    assert not results[-1].info["success"]


def test_done_is_terminated_unless_the_server_tells_the_two_apart(server):
    apart = {"done": True, "terminated": False, "truncated": True}
    (theirs,) = scripted(server, "textcraft", {"reward": 0, "done": True})
    (ours,) = scripted(server, "textcraft", {"reward": 0, **apart})
    assert (theirs[2:4], ours[2:4]) == ((True, False), (False, True))


def test_score_adds_up_this_episodes_rewards_and_the_servers_info_wins(server, playing):
    part = STEP | {"reward": 0.25}
    server.script["/step"] = [(200, part), (200, part), (200, part | {"info": {"score": 70}})]
    assert [playing.step(ACTION).info["score"] for _ in range(3)] == [0.25, 0.5, 70]
    playing.reset(1)
    server.script["/step"] = [(200, part | {"reward": 0.6})] * 2
    assert playing.step(ACTION).info["score"] == 0.6
    with pytest.raises(EnvProtocolError, match="sum to 1.2"):  # more than 1 over the episode
        playing.step(ACTION)


# --- What the policy got wrong: reward 0, and the episode goes on --------------------------------


def test_a_text_that_cannot_be_played_earns_0_and_the_episode_goes_on(server, playing):
    unread = playing.step("I think I will craft something.")
    assert server.count("/step") == 0, "the server is not asked"
    assert unread.observation == unread.info["parse_error"] and "Action" in unread.observation
    server.script["/step"] = [(413, {"error": "the body has 1000001 bytes", "hint": "be brief"})]
    refused = playing.step(ACTION)
    assert refused.observation == refused.info["rejected"]
    assert "1000001 bytes; be brief" in refused.observation
    assert unread[1:4] == refused[1:4] == (0.0, False, False)
    assert playing.step(ACTION).observation == "Got 1 oak log"


# --- What the server got wrong: one named error each, with address, status and body --------------

PAYS = STEP | {"terminated": False, "truncated": False, "info": {"success": False}}
# what the server answers, the error that it is, words in its message
FAILURES = [
    ((0, "hang"), EnvTimeout, "no answer within 0.2 s"),
    ((0, "hang up"), EnvConnectionError, "is the server running"),
    ((500, {"error": "KeyError: 'stick'", "hint": "see the log"}), EnvServerError, "KeyError"),
    ((200, {"error": "The id 0 is not valid."}), SessionLost, "The id 0"),  # AgentGym's words
    ((200, {"error": "The task with environment 0 has been deleted."}), SessionLost, "deleted"),
    ((200, {"error": "list index out of range"}), EnvProtocolError, "reports an error: list index"),
    ((200, "<html><body>Welcome to nginx</body></html>"), EnvProtocolError, "not JSON"),
    # Not the policy's doing: a proxy's limit, another field.
    ((413, "<html>413 Request Entity Too Large</html>"), EnvProtocolError, "413"),
    ((422, {"detail": [{"msg": "Field required"}]}), EnvProtocolError, "Field required"),
    # Each of these was trained on in the past, or ended the run with a traceback.
    ((200, STEP | {"observation": None}), EnvProtocolError, "'observation'"),
    ((200, STEP | {"observation": "x" * 1_100_000}), EnvProtocolError, "larger than 1048576"),
    ((200, STEP | {"reward": "1"}), EnvProtocolError, "number 'reward'"),
    ((200, STEP | {"reward": 10**400}), EnvProtocolError, "a finite number"),
    ((200, STEP | {"reward": -5}), EnvProtocolError, "sum to -5"),
    ((200, {"observation": "o", "reward": 0}), EnvProtocolError, "'done'"),
    ((200, PAYS | {"truncated": "false"}), EnvProtocolError, "'truncated' that is true or false"),
    ((200, PAYS | {"info": {"success": "false"}}), EnvProtocolError, "'success'"),
]


@pytest.mark.parametrize(("answer", "error", "words"), FAILURES)
def test_a_failed_step_raises_its_own_error_once_and_is_never_repeated(
    server, playing, answer, error, words
):
    playing.timeout_s = 0.2 if answer[1] == "hang" else 2.0
    server.script["/step"] = [answer]
    with pytest.raises(EnvError) as caught:
        playing.step(ACTION)
    assert type(caught.value) is error
    assert words in str(caught.value) and server.url + "/step" in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert caught.value.status in (answer[0], None)
    with pytest.raises(StepOutsideEpisode):  # what the world did is unknown: no second guess
        playing.step(ACTION)
    assert server.count("/step") == 1
    playing.timeout_s = 2.0
    assert playing.reset(0) == "Goal: craft stick."


# --- Sessions and misuse -------------------------------------------------------------------------


def test_a_server_that_is_full_has_done_nothing_and_is_asked_again(server, playing):
    server.script["/step"] = server.script["/reset"] = [(429, {"error": "slow down"})] * 2
    assert playing.step(ACTION).observation and playing.reset(0)
    assert server.count("/step") == 3


def test_one_client_tries_a_server_that_hangs_and_the_others_go_elsewhere(server, other):
    with pool_over(server, other, timeout_s=2.0, back_off_s=0.05, dead_wait_s=1.0) as pool:
        hung = next(a for a in pool.addresses if a.url == server.url)
        hung.rest_s, server.script["/create"] = 0.05, [(200, "hang")] * 9
        with ThreadPoolExecutor(4) as threads:
            tries = [threads.submit(pool.client) for _ in range(5)]
            assert {each.result().base_url for each in tries} == {other.url}
    assert server.count("/create") == 1


def test_reset_opens_a_new_session_for_one_that_the_server_has_forgotten(server, playing):
    server.script["/reset"] = [(404, {"error": "session 0 does not exist", "hint": "POST /create"})]
    assert playing.reset(5) == "Goal: craft stick."
    assert server.log[-1] == ("/reset", {"id": 1, "data_idx": 5, "seed": 0})


def test_a_client_says_when_it_is_used_out_of_turn_and_closes_once(server):
    client = connect("textcraft", server.url)
    with pytest.raises(StepOutsideEpisode, match=r"call reset\(\)"):
        client.step("no action either")
    client.reset(0)
    server.script["/step"] = [(200, STEP | {"reward": 1, "done": True})]
    assert client.step(ACTION).terminated
    with pytest.raises(StepOutsideEpisode):
        client.step(ACTION)
    assert server.count("/step") == 1
    assert (client.close(), client.close(), server.count("/close")) == (True, False, 1)
    with pytest.raises(ValueError, match="this client is closed"):
        client.reset(0)


# --- Pool ----------------------------------------------------------------------------------------


@contextmanager
def pool_over(*urls, **options):
    defaults = {"timeout_s": 2.0, "dead_wait_s": 0.0, "back_off_s": 0.2, "busy_wait_s": 0.3}
    with EnvPool("textcraft", [getattr(u, "url", u) for u in urls], **defaults | options) as pool:
        yield pool


def test_new_clients_go_where_the_fewest_are(server, other):
    with pool_over(server, other) as pool:
        clients = [pool.client() for _ in range(6)]
        assert Counter(c.base_url for c in clients) == {server.url: 3, other.url: 3}
        for client in clients:
            if client.base_url == server.url:
                client.close()
        assert {pool.client().base_url for _ in range(3)} == {server.url}
    assert server.count("/close") + other.count("/close") == 9, "pool.close() closes what is open"


def test_traffic_leaves_a_dead_server_and_comes_back_when_it_is_restarted(server, other):
    revived = []
    timer = threading.Timer(0.4, lambda: revived.append(FlakyServer(port=other.port)))
    with pool_over(server, other, dead_wait_s=10.0) as pool:
        assert {pool.client().base_url for _ in range(2)} == {server.url, other.url}
        other.close()
        assert {pool.client().base_url for _ in range(6)} == {server.url}
        server.close()
        timer.start()
        assert pool.client().base_url == other.url, "the pool waits for one that has worked"
    timer.join()
    revived[0].close()


def test_when_every_server_is_full_the_pool_waits_and_then_says_so(server):
    full = (429, {"error": "8 sessions are open"})
    with pool_over(server, busy_wait_s=2.0) as pool:
        server.script["/create"] = [full, full]
        assert pool.client().base_url == server.url
    with pool_over(server) as pool:
        server.script["/create"] = [full] * 999
        with pytest.raises(TooManySessions, match=r"full for 0.3 s.*8 sessions are open"):
            pool.client()


def test_when_all_are_dead_one_error_names_each_with_its_last_error(server, other):
    server.close()
    other.script["/create"] = [(500, {"error": "no recipes found"})] * 99
    with pool_over(server, other) as pool, pytest.raises(AllServersDown) as caught:
        pool.client()  # one cannot be reached, the other cannot create
    text = str(caught.value)
    assert "no textcraft server can be used" in text
    assert f"\n  {server.url}/create" in text and "refused" in text
    assert f"\n  {other.url}/create" in text and "no recipes found" in text


# --- An early end --------------------------------------------------------------------------------


def test_many_sessions_at_a_server_that_hangs_are_closed_in_one_time_out(server, monkeypatch):
    """One after the other, as a loop that Ctrl-C has ended does: 5 of them took five time-outs."""
    monkeypatch.setattr("envclient.CLOSE_TIMEOUT_S", 1.0)
    with pool_over(server, timeout_s=30.0) as pool:
        clients = [pool.client() for _ in range(5)]
        server.script["/close"] = [(0, "hang")] * 99
        started = time.monotonic()
        assert [client.close() for client in clients] == [False] * 5
        assert time.monotonic() - started < 4.0
    assert server.count("/close") == 1, "one was told in vain, and the others were not"


def test_closing_a_client_in_mid_step_does_not_blame_its_server(server):
    """Ctrl-C in a rollout: the other sessions of the same server are still told to close."""
    with pool_over(server, timeout_s=30.0) as pool, ThreadPoolExecutor(1) as threads:
        stepping, idle = pool.client(), pool.client()
        stepping.reset(0)
        server.script["/step"] = [(0, "hang")]
        step = threads.submit(stepping.step, ACTION)
        while server.count("/step") == 0:
            time.sleep(0.02)
        assert stepping.close() is True
        assert isinstance(step.exception(timeout=5), EnvConnectionError)
        assert pool.addresses[0].rest_s == 0
        assert idle.close() is True


def test_clients_count_a_crash_once_and_wait_for_no_address_that_never_worked(server, monkeypatch):
    """A mistyped port cost a minute: 10 s at each of three tries, for every episode."""
    server.close()
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr("envclient.time", clock)
    monkeypatch.setattr("envclient.FIRST_WAIT_S", 0.0)
    pauses = []
    with (
        ThreadPoolExecutor(16) as threads,
        pool_over(server, back_off_s=1.0, dead_wait_s=10.0) as pool,
    ):
        (address,) = pool.addresses
        for _ in range(5):
            tries = [threads.submit(pool.client) for _ in range(16)]
            assert {type(each.exception(timeout=10)) for each in tries} == {AllServersDown}
            pauses.append(address.rests_until - clock.now)
            clock.now = address.rests_until
    assert pauses == [1.0, 2.0, 4.0, 5.0, 5.0]


def test_a_pool_refuses_no_address_and_the_same_twice():
    for urls in ([], ["http://a:1", "http://a:1/"]):
        with pytest.raises(ValueError, match="give each server's address once"):
            EnvPool("textcraft", urls)


# --- A server for the length of a block ----------------------------------------------------------


def test_ctrl_c_in_the_terminal_does_not_reach_the_server():
    """A run finishes its step and saves after Ctrl-C; the terminal signals the whole group."""
    code = (
        "import os, signal, time\nfrom envclient import connect, local_server\n"
        "with local_server('textcraft') as url, connect('textcraft', url) as client:\n"
        "    try:\n        os.killpg(0, signal.SIGINT)\n        time.sleep(60)\n"
        "    except KeyboardInterrupt:\n        print(client.reset(0)[:8])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, cwd=ROOT, start_new_session=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout.strip() == "Crafting", done.stderr


def test_a_server_of_another_world_is_noticed_before_anything_is_played():
    with local_server("textcraft") as url:
        with EnvPool("babyai", [url]) as pool, pytest.raises(EnvError, match="serves textcraft"):
            pool.client()
        with EnvPool("textcraft", [url]) as pool:
            assert pool.client().reset(0)
