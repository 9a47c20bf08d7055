"""The environment server: AgentGym's wire format, separate sessions, limits and clear errors."""

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import requests
from fastapi.testclient import TestClient
from toy_env import Letters

from envs import VERSION, Wire
from envs.server import LOCAL_NAMES, create_app, main
from envs.textcraft.env import TextCraft

ROOT = Path(__file__).parent.parent
JSON = {"content-type": "application/json"}


@contextlib.contextmanager
def textcraft(**options):
    with TestClient(create_app("textcraft", first_id=0, **options)) as client:
        yield client


@pytest.fixture
def client():
    with textcraft() as client:
        yield client


def assert_error(response, status, error, hint=""):
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error", "hint"}
    assert error in body["error"] and hint in body["hint"] and body["hint"]


class SlowEnv(Letters):
    """Its actions sleep or fail. It is not fast, so the server calls it in threads."""

    IS_FAST = False
    NUM_TURNS = 1000
    num_open = 0

    def __init__(self):
        super().__init__()
        self.lock = threading.Lock()
        type(self).num_open += 1

    def step(self, action):
        assert self.lock.acquire(blocking=False), "two requests inside one session"
        try:
            if action == "break":
                raise RuntimeError("the environment fell over")
            if action.startswith("sleep "):
                time.sleep(float(action.removeprefix("sleep ")))
            super().step(action)
            return str(self.turn), 0.25, False, action == "limit", {"success": False}
        finally:
            self.lock.release()

    def close(self):
        type(self).num_open -= 1


@contextlib.contextmanager
def slow_env(**options):
    SlowEnv.num_open = 0
    with TestClient(create_app("slow", env_class=SlowEnv, first_id=0, **options)) as client:
        yield client


def start(client, task_index=0):
    session_id = client.post("/create", json={}).json()["id"]
    assert client.post("/reset", json={"id": session_id, "data_idx": task_index}).status_code == 200
    return session_id


# ---- wire format


def test_agentgyms_client_gets_the_paths_fields_and_types_that_it_expects(client):
    assert client.get("/").json() == "This is environment TextCraft."
    for expected_id in (0, 1):
        answer = client.post("/create", json={"minecraft_dir": "agentenv_textcraft/"}).json()
        assert set(answer) == {"id", "observation", "done", "reward"}
        assert answer["id"] == expected_id and type(answer["id"]) is int
        assert answer["observation"] == TextCraft().reset(expected_id)
        assert answer["done"] is False and answer["reward"] == 0
    reset = client.post("/reset", json={"id": 0, "data_idx": 31}).json()
    assert reset["id"] == 0 and reset["done"] is False and reset["reward"] == 0
    assert reset["observation"] == TextCraft().reset(31)
    assert client.get("/observation?id=0").json() == reset["observation"]
    step = client.post("/step", json={"id": 0, "action": "get 4 crimson stem"}).json()
    assert step["observation"] == "Got 4 crimson stem" == client.get("/observation?id=0").json()
    assert type(step["reward"]) is int and step["reward"] == 0 and step["done"] is False
    action = "craft 3 crimson hyphae using 4 crimson stem"
    final = client.post("/step", json={"id": 0, "action": action}).json()
    assert type(final["reward"]) is int and final["reward"] == 1 and final["done"] is True
    assert client.get("/detail?id=0").json() == {
        "observation": "Crafted 3 minecraft:crimson_hyphae",
        "done": True,
        "reward": 1,
        "deleted": False,
    }
    assert client.post("/close", json={"id": 0}).json() is True
    assert client.post("/close", json={"id": 0}).json() is False
    assert client.post("/create").json()["id"] == 2  # a number is never reused
    assert client.post("/reset", json={"id": 2}).json()["observation"] == TextCraft().reset(0)
    health = client.get("/health").json()
    assert health["env"] == "textcraft" and health["live_sessions"] == 2


def test_answers_also_have_the_fields_that_our_client_reads(client):
    session_id = start(client, 31)
    reset = client.post("/reset", json={"id": session_id, "data_idx": 31, "seed": 5}).json()
    assert reset["observation"] == TextCraft().reset(31, seed=5)
    extras = {"terminated": False, "truncated": False, "subtask": "depth 1"}
    assert extras.items() <= reset.items()
    actions = client.get(f"/available_actions?id={session_id}").json()
    assert actions == ["get 4 crimson stem", "inventory"]
    oracle = client.get(f"/oracle?id={session_id}").json()
    assert set(oracle) == {"thought", "action"} and oracle["action"] == actions[0]
    response = client.post("/step", content=b'{"id": 0, "action": "\\ud800"}', headers=JSON)
    assert response.json()["observation"] == "Could not execute \ud800"
    step = client.post("/step", json={"id": session_id, "action": oracle["action"]}).json()
    assert step["info"] == {"success": False, "score": 0, "anchor": "4 crimson_stem"}
    assert extras.items() <= step.items()
    state = client.get(f"/state?id={session_id}").json()
    assert state["inventory"] == {"crimson stem": 4} and state["num_turns"] == 2


def test_a_wire_can_use_points_numpy_numbers_and_additional_paths():
    class PointsWire(Wire):
        has_score, points = True, 100
        paths = {"/where": ("GET", "where"), "/both": ("STEP", "place")}

    class Points(SlowEnv):
        WIRE = PointsWire()
        where = staticmethod(lambda: "here")
        place = staticmethod(lambda: {"where": "here"})

        def step(self, action):
            info = {"success": np.bool_(True), "score": np.int64(25)}
            return "seen", np.float32(0.25), np.bool_(False), False, info

    with TestClient(create_app("points", env_class=Points)) as client:
        session_id = start(client)
        assert client.get(f"/where?id={session_id}").json() == "here"
        answer = client.post("/both", json={"id": session_id, "action": "x"}).json()
        assert (answer["reward"], answer["score"], answer["where"]) == (25, 25, "here")
        assert (answer["terminated"], answer["info"]["success"]) == (False, True)


def test_shared_resources_are_opened_before_the_first_request_and_closed_at_the_end(caplog):
    events = []

    class Sharing(SlowEnv):
        open_shared = staticmethod(lambda: events.append("open"))
        close_shared = staticmethod(lambda: events.append("close") or 1 // 0)

        def close(self):
            events.append("session closed")

    with TestClient(create_app("sharing", env_class=Sharing)) as client:
        assert events == ["open"]
        start(client)
    assert events == ["open", "session closed", "close"]
    assert "fails in close_shared() (ZeroDivisionError" in caplog.text


# ---- errors


def test_unknown_sessions_and_tasks_are_404_and_requests_in_the_wrong_order_409(client):
    def post(path, **fields):
        return client.post(path, json=fields)

    assert_error(post("/step", id=7, action="inventory"), 404, "session 7 does not", "/create")
    assert_error(client.get("/state?id=7"), 404, "session 7 does not exist", "/create")
    assert_error(client.get("/commands?id=0"), 404, "GET /commands: Not Found")
    post("/create")
    assert_error(post("/step", id=0, action="inventory"), 409, "has no episode", "/reset")
    assert_error(client.get("/oracle?id=0"), 409, "has no episode", "/reset")
    post("/reset", id=0, data_idx=31)
    post("/step", id=0, action="get 4 crimson stem")
    assert_error(post("/reset", id=0, data_idx=544), 404, "task index 544 does not exist")
    final = post("/step", id=0, action="craft 3 crimson hyphae using 4 crimson stem")
    assert final.json()["reward"] == 1, "the failed reset left the episode unchanged"
    assert_error(post("/step", id=0, action="inventory"), 409, "is over", "/reset")
    assert post("/reset", id=0, data_idx=31).status_code == 200
    assert post("/step", id=0, action="inventory").status_code == 200


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (b"[" * 100_000, "JSON"),
        (b"[]", "body"),
        (b'{"id": 0}', "body.action: Field required"),
        (b'{"id": true, "action": "inventory"}', "body.id"),
        (b'{"id": ' + b"1" * 5000 + b', "action": "x"}', "JSON"),
    ],
)
def test_a_malformed_request_is_422_and_names_the_field(client, body, error):
    assert_error(client.post("/step", content=body, headers=JSON), 422, error)
    assert_error(client.get("/observation?id=x"), 422, "id: expected int")


def test_a_failure_of_the_environment_is_500_and_stays_in_its_session():
    with slow_env() as client:
        first, second = start(client), start(client)
        response = client.post("/step", json={"id": first, "action": "break"})
        assert_error(response, 500, "RuntimeError: the environment fell over", "reset")
        # Its state is unknown, so it needs a reset. The other session continues.
        after = client.post("/step", json={"id": first, "action": "x"})
        assert_error(after, 409, "has no episode")
        step = client.post("/step", json={"id": second, "action": "limit"}).json()
        assert (step["done"], step["truncated"], step["terminated"]) == (True, True, False)
        assert client.post("/reset", json={"id": first, "data_idx": 1}).status_code == 200
        assert client.post("/step", json={"id": first, "action": "x"}).status_code == 200


# ---- limits


def test_more_sessions_than_the_limit_are_429_until_one_is_closed():
    with textcraft(max_sessions=2) as client:
        start(client), start(client)
        response = client.post("/create", json={})
        assert_error(response, 429, "2 sessions are open", "--max-sessions")
        assert response.headers["retry-after"] == "1"
        client.post("/close", json={"id": 0})
        assert client.post("/create", json={}).status_code == 200


def test_only_idle_sessions_are_closed():
    with slow_env(idle_timeout_s=0.6) as client:
        idle, active = start(client), start(client)
        deadline = time.monotonic() + 1.5
        while time.monotonic() < deadline:
            assert client.get(f"/observation?id={active}").status_code == 200
            time.sleep(0.05)
        assert_error(client.get(f"/observation?id={idle}"), 404, "does not exist", "0.6 s")
        assert client.get("/health").json()["live_sessions"] == SlowEnv.num_open == 1


def test_a_session_whose_step_takes_longer_than_the_idle_time_is_not_closed():
    with slow_env(idle_timeout_s=1.0) as client:
        session = start(client)
        client.post("/step", json={"id": session, "action": "sleep 1.6"})
        assert client.post("/step", json={"id": session, "action": "x"}).status_code == 200


def test_an_evicted_session_that_hangs_while_closing_delays_no_other():
    release = threading.Event()

    class Sticky(SlowEnv):
        def close(self):
            release.wait(60)

    app = create_app("sticky", env_class=Sticky, max_sessions=1, idle_timeout_s=0.1)
    with TestClient(app) as client:
        assert client.post("/create").status_code == 200
        time.sleep(0.3)
        assert client.post("/create").status_code == 200
        release.set()


# ---- concurrency


def test_slow_steps_and_requests_that_wait_for_them_delay_no_other_session():
    """200 requests, more than there are threads, wait for one slow session."""

    async def scenario() -> None:
        import httpx

        transport = httpx.ASGITransport(app=create_app("slow", env_class=SlowEnv))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as http:
            slow, quick = [(await http.post("/create")).json()["id"] for _ in range(2)]
            for session_id in (slow, quick):
                await http.post("/reset", json={"id": session_id, "data_idx": 0})
            body = {"id": slow, "action": "sleep 0.01"}
            queue = [asyncio.create_task(http.post("/step", json=body)) for _ in range(200)]
            await asyncio.sleep(0.05)
            for _ in range(5):
                answer = await http.post("/step", json={"id": quick, "action": "x"})
                assert answer.status_code == 200
            assert not all(task.done() for task in queue)
            await asyncio.gather(*queue)

    asyncio.run(scenario())


def test_a_session_is_closed_after_the_steps_that_were_sent_before():
    with slow_env() as client, ThreadPoolExecutor(2) as pool:
        session_id = start(client)
        slow = {"id": session_id, "action": "sleep 0.4"}
        steps = []
        for _ in range(2):
            steps.append(pool.submit(client.post, "/step", json=slow))
            time.sleep(0.1)
        assert client.post("/close", json={"id": session_id}).json() is True
        assert [step.result().json()["observation"] for step in steps] == ["1", "2"]
        assert_error(client.post("/step", json=slow), 404, "does not exist")
        assert SlowEnv.num_open == 0


# ---- command line


@contextlib.contextmanager
def server_process(*flags):
    command = [sys.executable, "-m", "envs.server", "--env", "textcraft", "--port", "0", *flags]
    process = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        line = process.stdout.readline()
        assert line.startswith("listening on http://"), line + process.stderr.read()
        yield process, line
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def server_url():
    with server_process() as (_, line):
        yield line.split()[2]


@pytest.mark.parametrize(("stop_signal", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_the_server_prints_its_address_and_stops_at_a_signal(stop_signal, code):
    with server_process() as (process, line):
        url = line.split()[2]
        assert line == f"listening on {url} (env textcraft, version {VERSION})\n"
        assert url.startswith("http://127.0.0.1:")
        with requests.Session() as http:  # an open keep-alive connection must not delay the exit
            http.post(f"{url}/create", json={}, timeout=10)
            process.send_signal(stop_signal)
            out, err = process.communicate(timeout=10)
        assert (process.returncode, out, err) == (code, "", "")


def test_a_body_over_the_limit_is_413_over_a_real_connection(server_url):
    large_body = b'{"id": 0, "action": "' + b"x" * 3_000_000 + b'"}'
    for body in (large_body, (large_body[i : i + 65536] for i in range(0, len(large_body), 65536))):
        response = requests.post(f"{server_url}/step", data=body, headers=JSON, timeout=30)
        assert_error(response, 413, "larger than 1000000 bytes")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--env", "minecraft"],
            "choose one of: babyai, sciworld, searchqa, textcraft, webarena; or give",
        ),
        (["--env", "textcraft", "--port", "70000"], "--port 70000"),
        (["--env", "textcraft", "--idle-timeout-s", "nan"], "--idle-timeout-s"),
    ],
)
def test_a_usage_error_is_one_line_and_exit_code_2(flags, message, capsys):
    with pytest.raises(SystemExit) as error:
        main(flags)
    output = capsys.readouterr()
    assert error.value.code == 2 and output.out == ""
    assert message in output.err and output.err.count("\n") == 1


Unopened = type("Unopened", (Letters,), {"open_shared": lambda self: None})


def test_a_port_in_use_and_a_failing_open_shared_are_one_line_and_exit_code_1(capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = str(listener.getsockname()[1])
        assert main(["--env", "textcraft", "--port", port]) == 1
        assert main(["--env", "test_server:Unopened", "--port", port]) == 1
    in_use, unopened = capsys.readouterr().err.splitlines()
    assert f"127.0.0.1:{port}" in in_use and "127.0.0.1" not in unopened
    assert "test_server:Unopened: the class fails in open_shared() (TypeError" in unopened


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Host": "localhost:36005"}, 200),
        ({"Host": "[::1]:36005"}, 200),
        ({"Origin": "http://evil.example"}, 403),
        ({"Host": "rebound.example:36005"}, 403),
    ],
)
def test_requests_of_web_pages_are_refused(headers, status):
    app = create_app("textcraft", hosts=LOCAL_NAMES)
    with TestClient(app, base_url="http://127.0.0.1:36005") as client:
        for method, path in (("POST", "/create"), ("GET", "/health")):
            assert client.request(method, path, headers=headers).status_code == status
        assert client.get("/health").json()["live_sessions"] == (status == 200)


def test_a_server_exits_at_a_signal_although_its_environment_hangs(monkeypatch):
    """Python would wait for the thread in which the environment hangs."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'tests'}:{ROOT}")
    with server_process("--env", "test_server:SlowEnv") as (process, line):
        url = line.split()[2]
        session = requests.post(f"{url}/create", json={}, timeout=30).json()["id"]
        requests.post(f"{url}/reset", json={"id": session, "data_idx": 1}, timeout=30)
        with contextlib.suppress(requests.RequestException):
            step = {"id": session, "action": "sleep 600"}
            requests.post(f"{url}/step", json=step, timeout=1)
        process.terminate()
        assert process.wait(60) == 0
