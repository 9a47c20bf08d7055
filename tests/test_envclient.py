"""envclient.py: client and pool, with a scripted server, AgentGym's format and our server."""

import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import parse_qsl, urlsplit

import pytest
from test_chatapi import ScriptedServer

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
from envs import ParseError
from envs.common import without_thought
from formats import React

ROOT = Path(__file__).parents[1]
ACTION = "Thought: look.\nAction: inventory"
STEP = {"observation": "Got 1 oak log", "reward": 0, "done": False}
DEFAULT_ANSWERS = {
    "/reset": (200, {"id": 0, "observation": "Goal: craft stick.", "done": False, "reward": 0}),
    "/step": (200, STEP),
    "/observation": (200, '"Got 1 oak log"'),
    "/close": (200, True),
}
NOT_FOUND = (404, {"detail": "Not Found"})


# --- A scripted server ---------------------------------------------------------------------------


class EnvServer(ScriptedServer):
    """Answers like AgentGym's TextCraft server, or with the next entry of `script[path]`: (status,
    content). Text is sent unchanged; for "hang" and "hang up" it sends no answer.
    """

    def __init__(self, port=0):
        self.script, self.num_sessions, self.released = {}, 0, threading.Event()
        super().__init__(port=port)

    def reply(self, path, body):
        path = path.partition("?")[0]
        status, content = DEFAULT_ANSWERS.get(path, NOT_FOUND)
        if self.script.get(path):
            status, content = self.script[path].pop(0)
        elif path == "/create":
            status, content = 200, {"id": self.num_sessions}
            self.num_sessions += 1
        if content == "hang":
            self.released.wait(10)
        return None if content in ("hang", "hang up") else (status, {}, content)

    @property
    def log(self):
        """(path, fields) of each request."""
        requests = [(urlsplit(path), body) for path, _, body in self.requests]
        return [(url.path, body or dict(parse_qsl(url.query))) for url, body in requests]

    def count(self, path):
        return sum(logged_path == path for logged_path, _ in self.log)

    def close(self):
        self.released.set()
        self.__exit__()


def scripted_server():
    server = EnvServer()
    yield server
    server.close()


server = pytest.fixture(scripted_server, name="server")
server_2 = pytest.fixture(scripted_server, name="server_2")


@pytest.fixture
def client(server):
    """A client in the middle of an episode."""
    with connect("textcraft", server.url, timeout_s=2.0) as client:
        client.reset(0)
        yield client


# --- AgentGym's wire format ----------------------------------------------------------------------


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


def play_script(server, env, *steps):
    """The results of actions for which AgentGym's server of `env` answers with `steps`."""
    server.script["/step"] = [(200, {"observation": "x", **step}) for step in steps]
    with connect(env, server.url, timeout_s=2.0) as client:
        client.reset(0)
        return [client.step("Action: look around") for _ in steps]


def test_an_episode_of_agentgyms_babyai_ends_with_its_first_reward(server):
    """The server itself continues after a reward of 0.5 or less, and pays again at the goal."""
    unpaid, paid = play_script(
        server,
        "babyai",
        {"reward": 0, "score": 0, "done": False},
        {"reward": 0.4, "score": 0.4, "done": False},
    )
    assert unpaid[1:4] == (0.0, False, False)
    assert paid[1:4] == (0.4, True, False)
    assert paid.info == {"success": True, "score": 0.4}


def test_agentgyms_sciworld_pays_only_for_a_score_above_the_best_so_far(server):
    """Its score falls to -100 at a wrong focus, and after "reset task" it can be earned again."""
    answer = {"task_description": "Boil water.", "observation": "A room."}
    server.script["/reset"] = [(200, answer)] * 2
    with connect("sciworld", server.url, timeout_s=2.0) as client:
        assert client.reset(0) == "Boil water.\nA room."
    results = play_script(
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


def test_done_means_terminated_unless_the_server_sends_terminated_and_truncated(server):
    fields = {"done": True, "terminated": False, "truncated": True}
    (agentgym_result,) = play_script(server, "textcraft", {"reward": 0, "done": True})
    (our_result,) = play_script(server, "textcraft", {"reward": 0, **fields})
    assert (agentgym_result[2:4], our_result[2:4]) == ((True, False), (False, True))


def test_score_is_the_sum_of_rewards_unless_the_server_sends_a_score(server, client):
    answer = STEP | {"reward": 0.25}
    with_score = answer | {"info": {"score": 70, "parse_error": True, "rejected": {}}}
    server.script["/step"] = [(200, answer), (200, answer), (200, with_score)]
    infos = [client.step(ACTION).info for _ in range(3)]
    assert infos == [{"success": False, "score": score} for score in (0.25, 0.5, 70)]
    client.reset(1)
    server.script["/step"] = [(200, answer | {"reward": 0.6})] * 2
    assert client.step(ACTION).info["score"] == 0.6
    with pytest.raises(EnvProtocolError, match="not to 1.2"):  # more than 1 over the episode
        client.step(ACTION)


def test_the_rewards_of_several_actions_are_added(server):
    """Trap 16: the last one must not replace the others."""
    server.script["/step"] = [(200, STEP | {"reward": r}) for r in (0.25, 0.5, 0)]
    with connect("textcraft", server.url, action_format=React(3)) as client:
        client.reset(0)
        result = client.step("Action: inventory\n" * 3)
        assert result.reward == client.score == 0.75


# --- Mistakes of the policy: reward 0, and the episode continues ---------------------------------


def test_a_text_that_cannot_be_played_earns_0_and_the_episode_continues(server, client):
    unparsed = client.step("I think I will craft something.")
    thought = client.step("<think>I could write Action: fly")
    assert "Write </think>" in thought.observation == thought.info["parse_error"]
    assert server.count("/step") == 0, "nothing is sent to the server"
    assert unparsed.observation == unparsed.info["parse_error"] and "Action" in unparsed.observation
    server.script["/step"] = [(413, {"error": "the body has 1000001 bytes", "hint": "be brief"})]
    refused = client.step(ACTION)
    assert refused.observation == refused.info["rejected"]
    assert "1000001 bytes; be brief" in refused.observation
    assert unparsed[1:4] == refused[1:4] == (0.0, False, False)
    assert client.step(ACTION).observation == "Got 1 oak log"
    client.step(f"<think>Action: fly?</think> Action: swim? No.</think>\n{ACTION}")
    assert server.log[-1] == ("/step", {"id": 0, "action": "inventory"}), "thoughts are not played"


def test_a_thought_between_the_marks_of_any_model_is_not_played():
    marks = """<THINK> </THINK> <thinking> </thinking> <thought> </thought> <reasoning> </reasoning>
    <seed:think> </seed:think> [THINK] [/THINK] ◁think▷ ◁/think▷ <|channel>thought <channel|>
    <|begin_of_thought|> <|end_of_thought|> <|START_THINKING|> <|END_THINKING|>
    <|channel|>analysis<|message|> <|channel|>final<|message|>""".split()
    for begin, end in zip(marks[::2], marks[1::2], strict=True):
        assert without_thought(f"{begin}Action: fly?{end}a{begin}{end}{ACTION}") == ACTION
        with pytest.raises(ParseError, match="does not end"):
            without_thought(f"{begin}{end}{begin}{ACTION}")


# --- Failures of the server: one error class each, with address, status and body -----------------

PAYS = STEP | {"terminated": False, "truncated": False, "info": {"success": False}}
# The server's answer, the error class, words in the message.
FAILURES = [
    ((0, "hang"), EnvTimeout, "no answer within 0.2 s"),
    ((0, "hang up"), EnvConnectionError, "is the server running"),
    ((500, {"error": "KeyError: 'stick'", "hint": "see the log"}), EnvServerError, "KeyError"),
    ((200, {"error": "The id 0 is not valid."}), SessionLost, "The id 0"),  # AgentGym's words
    ((200, {"error": "The task with environment 0 has been deleted."}), SessionLost, "deleted"),
    ((200, {"error": "list index out of range"}), EnvProtocolError, "reports an error: list index"),
    ((200, "<html><body>Welcome to nginx</body></html>"), EnvProtocolError, "not JSON"),
    # Not mistakes of the policy: a proxy's limit, a missing field.
    ((413, "<html>413 Request Entity Too Large</html>"), EnvProtocolError, "413"),
    ((422, {"detail": [{"msg": "Field required"}]}), EnvProtocolError, "Field required"),
    # In the past, each of these was trained on or ended the run with a traceback.
    ((200, '"Got 1 oak log"'), EnvProtocolError, "'observation'"),
    ((200, STEP | {"observation": None}), EnvProtocolError, "'observation'"),
    ((200, STEP | {"observation": "x" * 1_100_000}), EnvProtocolError, "larger than 1048576"),
    ((200, STEP | {"reward": "1"}), EnvProtocolError, "number 'reward'"),
    ((200, STEP | {"reward": 10**400}), EnvProtocolError, "a finite number"),
    ((200, STEP | {"reward": -5}), EnvProtocolError, "not to -5; a penalty must not"),
    ((200, {"observation": "o", "reward": 0}), EnvProtocolError, "'done'"),
    ((200, PAYS | {"truncated": "false"}), EnvProtocolError, "'truncated' that is true or false"),
    ((200, PAYS | {"info": {"success": "false"}}), EnvProtocolError, "'success'"),
]


@pytest.mark.parametrize(("answer", "error", "words"), FAILURES)
def test_a_failed_step_raises_its_own_error_once_and_is_never_repeated(
    server, client, answer, error, words
):
    client.timeout_s = 0.2 if answer[1] == "hang" else 2.0
    server.script["/step"] = [answer]
    with pytest.raises(EnvError) as error_info:
        client.step(ACTION)
    message = str(error_info.value)
    assert type(error_info.value) is error
    assert words in message and server.url + "/step" in message
    assert len(message) < 1000
    assert error_info.value.status in (answer[0], None)
    with pytest.raises(StepOutsideEpisode):  # the environment's state is unknown
        client.step(ACTION)
    assert server.count("/step") == 1
    client.timeout_s = 2.0
    assert client.reset(0) == "Goal: craft stick."


# --- Sessions and misuse -------------------------------------------------------------------------


def test_a_request_to_a_full_server_is_repeated(server, client):
    """A full server has done nothing, so repeating even a /step is safe."""
    server.script["/step"] = server.script["/reset"] = [(429, {"error": "slow down"})] * 2
    assert client.step(ACTION).observation and client.reset(0)
    assert server.count("/step") == 3


def test_only_one_client_tests_a_server_that_hangs(server, server_2):
    with pool_over(server, server_2, timeout_s=2.0, back_off_s=0.05, dead_wait_s=1.0) as pool:
        address = next(a for a in pool.addresses if a.url == server.url)
        address.pause_s, server.script["/create"] = 0.05, [(200, "hang")] * 9
        with ThreadPoolExecutor(4) as threads:
            futures = [threads.submit(pool.client) for _ in range(5)]
            assert {future.result().base_url for future in futures} == {server_2.url}
    assert server.count("/create") == 1


def test_reset_opens_a_new_session_if_the_server_has_lost_the_old_one(server, client):
    server.script["/reset"] = [(404, {"error": "session 0 does not exist", "hint": "POST /create"})]
    assert client.reset(5) == "Goal: craft stick."
    assert server.log[-1] == ("/reset", {"id": 1, "data_idx": 5, "seed": 0})


def test_a_step_outside_an_episode_is_an_error_and_close_is_sent_once(server):
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


def test_new_clients_go_to_the_server_with_the_fewest_clients(server, server_2):
    with pool_over(server, server_2) as pool:
        clients = [pool.client() for _ in range(6)]
        assert Counter(c.base_url for c in clients) == {server.url: 3, server_2.url: 3}
        for client in clients:
            if client.base_url == server.url:
                client.close()
        assert {pool.client().base_url for _ in range(3)} == {server.url}
    assert server.count("/close") + server_2.count("/close") == 9, "pool.close() closes the rest"


def test_a_dead_server_is_avoided_and_used_again_after_a_restart(server, server_2):
    restarted = []
    timer = threading.Timer(0.4, lambda: restarted.append(EnvServer(port=server_2.server_port)))
    with pool_over(server, server_2, dead_wait_s=10.0) as pool:
        assert {pool.client().base_url for _ in range(2)} == {server.url, server_2.url}
        server_2.close()
        assert {pool.client().base_url for _ in range(6)} == {server.url}
        server.close()
        timer.start()
        assert pool.client().base_url == server_2.url, "the pool waits, since it worked before"
    timer.join()
    restarted[0].close()


def test_if_every_server_is_full_the_pool_waits_and_then_raises_an_error(server):
    full = (429, {"error": "8 sessions are open"})
    with pool_over(server, busy_wait_s=2.0) as pool:
        server.script["/create"] = [full, full]
        assert pool.client().base_url == server.url
    with pool_over(server) as pool:
        server.script["/create"] = [full] * 999
        with pytest.raises(TooManySessions, match=r"full for 0.3 s.*8 sessions are open"):
            pool.client()


def test_if_all_servers_are_down_the_error_has_the_last_error_of_each(server, server_2):
    server.close()
    server_2.script["/create"] = [(500, {"error": "no recipes found"})] * 99
    with pool_over(server, server_2) as pool, pytest.raises(AllServersDown) as error:
        pool.client()
    text = str(error.value)
    assert "no textcraft server can be used" in text
    assert f"\n  {server.url}/create" in text and "refused" in text
    assert f"\n  {server_2.url}/create" in text and "no recipes found" in text


# --- An early end --------------------------------------------------------------------------------


def test_closing_many_sessions_on_a_server_that_hangs_takes_only_one_time_out(server, monkeypatch):
    """After Ctrl-C the loop closes them one by one; in the past each took a time-out."""
    monkeypatch.setattr("envclient.CLOSE_TIMEOUT_S", 1.0)
    with pool_over(server, timeout_s=30.0) as pool:
        clients = [pool.client() for _ in range(5)]
        server.script["/close"] = [(0, "hang")] * 99
        start = time.monotonic()
        assert [client.close() for client in clients] == [False] * 5
        assert time.monotonic() - start < 4.0
    assert server.count("/close") == 1, "after the first time-out no further /close is sent"


def test_closing_a_client_during_a_step_does_not_count_as_a_failure_of_its_server(server):
    """After Ctrl-C in a rollout, the server's other sessions still get their /close."""
    with pool_over(server, timeout_s=30.0) as pool, ThreadPoolExecutor(1) as threads:
        busy_client, idle_client = pool.client(), pool.client()
        busy_client.reset(0)
        server.script["/step"] = [(0, "hang")]
        step = threads.submit(busy_client.step, ACTION)
        while server.count("/step") == 0:
            time.sleep(0.02)
        assert busy_client.close() is True
        assert isinstance(step.exception(timeout=5), EnvConnectionError)
        assert pool.addresses[0].pause_s == 0
        assert idle_client.close() is True


def test_a_crash_counts_once_and_the_pool_does_not_wait_for_an_address_that_never_worked(
    server, monkeypatch
):
    """In the past a mistyped port cost a minute: 10 s for each of three resets of every episode."""
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
            futures = [threads.submit(pool.client) for _ in range(16)]
            assert {type(f.exception(timeout=10)) for f in futures} == {AllServersDown}
            pauses.append(address.paused_until - clock.now)
            clock.now = address.paused_until
    assert pauses == [1.0, 2.0, 4.0, 5.0, 5.0]


def test_a_pool_needs_at_least_one_address_and_no_duplicates():
    for urls in ([], ["http://a:1", "http://a:1/"]):
        with pytest.raises(ValueError, match="give each server's address once"):
            EnvPool("textcraft", urls)


# --- A local server ------------------------------------------------------------------------------


def test_ctrl_c_in_the_terminal_does_not_reach_the_server():
    """A run finishes its step after Ctrl-C, but the terminal signals the full process group."""
    code = (
        "import os, signal, time\nfrom envclient import connect, local_server\n"
        "with local_server('textcraft') as url, connect('textcraft', url) as client:\n"
        "    try:\n        os.killpg(0, signal.SIGINT)\n        time.sleep(60)\n"
        "    except KeyboardInterrupt:\n        print(client.reset(0)[:8])\n"
    )
    process = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, cwd=ROOT, start_new_session=True, timeout=60, check=False,
    )  # fmt: skip
    assert process.stdout.strip() == "Crafting", process.stderr


def test_a_server_of_the_wrong_environment_is_noticed_before_the_first_episode():
    with local_server("textcraft") as url:
        with EnvPool("babyai", [url]) as pool, pytest.raises(EnvError, match="serves textcraft"):
            pool.client()
        with EnvPool("textcraft", [url]) as pool:
            assert pool.client().reset(0)
