"""What strangers cost the server: half requests end, others play on, all is as before."""

import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import requests
import uvicorn
from test_server import SlowWorld, server_process

from envs.limits import MAX_HEAD_BYTES, bounded_protocol, end_unread_answers
from envs.server import create_app
from envs.textcraft.env import TextCraft

ROOT = Path(__file__).parent.parent
HALF = b"POST /step HTTP/1.1\r\nHost: localhost\r\nContent-Length: 40\r\n"
WHOLE = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"


@contextlib.contextmanager
def bounded_server(max_connections=100, timeout_s=30.0, env_class=SlowWorld):
    """(host, port) of a server in a thread, and the server."""
    app = create_app("slow", env_class=env_class, first_id=0, request_timeout_s=timeout_s)
    protocol = bounded_protocol(max_connections, timeout_s)
    config = uvicorn.Config(app, http=protocol, ws="none", log_level="critical")
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        end_unread_answers(listener, timeout_s)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # soon full
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield listener.getsockname(), server
        finally:
            server.should_exit = True
            thread.join()


def connect(address):
    return socket.create_connection(address, timeout=20)


def read_all(connection):
    """What comes until the server ends the connection."""
    pieces = []
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            pieces.append(piece)
    return b"".join(pieces)


def wait_for(condition, seconds=60.0):
    """The first answer of `condition` that is true."""
    give_up_at = time.monotonic() + seconds
    while not (answer := condition()):
        assert time.monotonic() < give_up_at
        time.sleep(0.01)
    return answer


def is_served(address):
    with connect(address) as connection:
        connection.sendall(WHOLE)
        return connection.recv(20).startswith(b"HTTP/1.1 200")


# ---- what does not arrive


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        (b"", b""),
        (b"\r\n", b""),
        (HALF, b""),
        (HALF + b"\r\n", b"408"),
        (HALF + b'\r\n{"id": 0', b"408"),
        (b"POST /nowhere HTTP/1.1\r\nContent-Length: 9\r\n\r\n", b"408"),
    ],
    ids=["nothing", "a line break", "half a head", "no body", "half a body", "to no path"],
)
def test_a_request_that_does_not_arrive_ends_after_the_timeout_and_not_before(sent, status):
    with bounded_server(timeout_s=0.5) as (address, _), connect(address) as connection:
        began = time.monotonic()
        connection.sendall(sent)
        answer = read_all(connection)
        assert time.monotonic() - began > 0.4
        assert answer[9:12] == status
        if status:
            head, _, body = answer.partition(b"\r\n\r\n")
            assert b"connection: close" in head
            assert set(json.loads(body)) == {"error", "hint"} and b"0.5 s" in body


@pytest.mark.parametrize("drip", [b"P", b"X: y\r\n"], ids=["a byte", "a line"])
@pytest.mark.parametrize("first", [b"", WHOLE], ids=["at first", "after an answer"])
def test_a_head_that_drips_ends_too(first, drip):
    with bounded_server(timeout_s=0.5) as (address, _), connect(address) as connection:
        if first:
            connection.sendall(first)
            assert connection.recv(65536).startswith(b"HTTP/1.1 200")
        connection.sendall(b"GET /health HTTP/1.1\r\n" if b":" in drip else b"")
        connection.settimeout(0.02)
        give_up_at = time.monotonic() + 15
        with pytest.raises(OSError), contextlib.suppress(TimeoutError):
            while time.monotonic() < give_up_at:
                connection.sendall(drip)
                with contextlib.suppress(TimeoutError):
                    if connection.recv(1) == b"":
                        raise ConnectionResetError


def test_a_head_without_an_end_is_cut_at_its_limit():
    with bounded_server() as (address, _), connect(address) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nX: ")
        with contextlib.suppress(ConnectionError):
            for _ in range(1000):  # 64 MB
                connection.sendall(b"x" * MAX_HEAD_BYTES)
            pytest.fail("the server read on")
        assert is_served(address)


def test_what_runs_long_is_not_a_request_that_does_not_arrive():
    with bounded_server(timeout_s=1.0) as (address, _), requests.Session() as http:
        url = "http://{}:{}".format(*address)
        session_id = http.post(url + "/create", timeout=20).json()["id"]
        http.post(url + "/reset", json={"id": session_id}, timeout=20)
        body = {"id": session_id, "action": "sleep 2.5"}
        assert http.post(url + "/step", json=body, timeout=20).json()["observation"] == "1"


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux has it")
def test_answers_that_nobody_reads_end_with_their_connection():
    """Thousands of requests, no answer taken: buffers fill, and the server waits to write on."""
    with bounded_server(timeout_s=0.5) as (address, server), socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(address)
        connection.settimeout(0.1)
        wait_for(lambda: server.server_state.connections)
        asked, sent = WHOLE * 100, 0
        give_up_at = time.monotonic() + 60
        while server.server_state.connections:
            assert time.monotonic() < give_up_at
            with contextlib.suppress(TimeoutError, ConnectionError):
                sent = (sent + connection.send(asked[sent:])) % len(asked)


# ---- too many


def test_beyond_max_connections_those_that_asked_nothing_make_room():
    with bounded_server(max_connections=4) as (address, _), contextlib.ExitStack() as stack:
        idle = [stack.enter_context(connect(address)) for _ in range(12)]
        for connection in idle[:6]:
            with contextlib.suppress(ConnectionError):
                connection.sendall(HALF)
        assert all(is_served(address) for _ in range(20))
        assert read_all(idle[0]) == b""  # the oldest has gone


def test_where_all_connections_are_at_work_one_more_is_told_429():
    may_go_on, at_work = threading.Event(), threading.Semaphore(0)

    class Gate(SlowWorld):
        def step(self, action):
            at_work.release()
            assert may_go_on.wait(60)
            return super().step(action)

    server = bounded_server(max_connections=2, env_class=Gate)
    with server as (address, _), ThreadPoolExecutor(2) as pool:
        url = "http://{}:{}".format(*address)

        def post(path, **body):
            return requests.post(url + path, json=body, timeout=90).json()

        ids = [post("/create")["id"] for _ in range(2)]
        for session_id in ids:
            post("/reset", id=session_id)
        running = [pool.submit(post, "/step", id=session_id, action="x") for session_id in ids]
        assert all(at_work.acquire(timeout=60) for _ in ids)
        answer = requests.get(url + "/health", timeout=20)
        may_go_on.set()
        assert answer.status_code == 429
        assert answer.headers["retry-after"] and answer.headers["connection"] == "close"
        assert "--max-connections" in answer.json()["hint"]
        assert [step.result()["observation"] for step in running] == ["1", "1"]
        assert wait_for(lambda: requests.get(url + "/health", timeout=20).status_code == 200)


@contextlib.contextmanager
def limited_server(ulimit, *flags):
    """(process, url) of a server that the shell allows fewer open files."""
    command = [sys.executable, "-m", "envs.server", "--env", "textcraft", "--port", "0", *flags]
    process = subprocess.Popen(
        ["bash", "-c", f'{ulimit} && exec "$@"', "-", *command],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process, process.stdout.readline().split()[2]
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("ulimit", "says"),
    [("ulimit -Sn 100", ""), ("ulimit -n 200", "warning: 100 connections at once, not 2304")],
    ids=["the soft limit is raised", "the hard limit is kept to"],
)
def test_more_connections_than_open_files_are_survived(ulimit, says):
    with limited_server(ulimit) as (process, url), contextlib.ExitStack() as stack:
        address = (urlsplit(url).hostname, urlsplit(url).port)
        for _ in range(400):
            stack.enter_context(connect(address))
        assert all(is_served(address) for _ in range(5))
        held = len(os.listdir(f"/proc/{process.pid}/fd"))
        assert held > 400 if not says else held <= 200
        process.terminate()
        _, err = process.communicate(timeout=20)
        assert says in err and process.returncode == 0


# ---- all of it at once


def latency_ms(http, url, body, num):
    """Median of `num` requests, in ms."""
    times = []
    for _ in range(num):
        began = time.perf_counter()
        assert http.post(url + "/step", json=body, timeout=30).status_code == 200
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times)


def resident_mb(process):
    pages = Path(f"/proc/{process.pid}/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE") / 1e6


def besieged(num_half_open, num_hostile, num_measured):
    """What a client of a server measures before, while and after somebody means it no good."""
    with server_process("--request-timeout-s", "5") as (process, line), requests.Session() as http:
        url = line.split()[2]
        world, found = TextCraft(), {}
        session_id = http.post(url + "/create", json={}, timeout=30).json()["id"]
        first = http.post(url + "/reset", json={"id": session_id, "data_idx": 140}, timeout=30)
        assert first.json()["observation"] == world.reset(140)
        body = {"id": session_id, "action": "inventory"}
        latency_ms(http, url, body, num_measured)  # warm
        found["before_ms"] = latency_ms(http, url, body, num_measured)
        num_files, found["rss_before_mb"] = process_files(process), resident_mb(process)
        command = [sys.executable, "tests/hostile.py", url, str(num_half_open), str(num_hostile)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        with subprocess.Popen(command, cwd=ROOT, **pipes) as hostile:
            assert hostile.stdout.readline() == "ready\n"
            found["while_ms"] = latency_ms(http, url, body, num_measured)
            out, _ = hostile.communicate(timeout=200)
        found |= json.loads(out)
        found["after_ms"] = latency_ms(http, url, body, num_measured)
        found["rss_after_mb"] = resident_mb(process)
        health = requests.get(url + "/health", timeout=30).json()
        assert health["live_sessions"] == 1
        wait_for(lambda: process_files(process) <= num_files + 2)
        observation = ""
        for action in world.state_for_people()["plan"]:  # the episode is as it was
            observation, reward, *_ = world.step(action)
            body = {"id": session_id, "action": action}
            answer = http.post(url + "/step", json=body, timeout=30).json()
            assert (answer["observation"], answer["reward"]) == (observation, reward)
        assert reward == 1
    return found


def process_files(process):
    return len(os.listdir(f"/proc/{process.pid}/fd"))


def test_a_server_under_attack_serves_the_others_and_is_as_before_afterwards():
    found = besieged(num_half_open=100, num_hostile=100, num_measured=300)
    assert found["half_open_held"] == 0
    assert not any(status.startswith("5") for status in found["answers"]), found
    assert found["while_ms"] < 5 * max(found["before_ms"], found["after_ms"]), found
    assert found["rss_after_mb"] < found["rss_before_mb"] + 64


@pytest.mark.slow
def test_a_thousand_half_askedand_a_hundred_hostile_ones_at_most_double_the_latency():
    found = besieged(num_half_open=1000, num_hostile=100, num_measured=3000)
    print(found)
    assert found["half_open_held"] == 0
    assert not any(status.startswith("5") for status in found["answers"]), found
    assert found["while_ms"] < 2 * max(found["before_ms"], found["after_ms"]), found
    assert found["rss_after_mb"] < found["rss_before_mb"] + 64


def test_help_groups_and_explains_the_limits():
    command = [sys.executable, "-m", "envs.server", "--help"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60).stdout
    _, sessions, asked = shown.replace("\nrequests:", "\nsessions:").split("\nsessions:\n")
    for flag in ("--max-sessions", "--idle-timeout-s"):
        assert flag in sessions
    for flag in ("--max-body-bytes", "--request-timeout-s", "--max-connections"):
        assert flag in asked and "default:" in asked
