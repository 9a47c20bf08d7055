"""A rollout among servers that fail, fill up, hang or hide: nothing waits for ever, nothing that
was played is lost, and one bad server does not cost what a good one would have played."""

import contextlib
import logging
import os
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import requests
import torch
from fakes import FakePool, ScriptedEngine, byte_tokenizer, observe, requests_of, settings_of
from fastapi.testclient import TestClient
from test_rollout import (
    ROOMY,
    SOLVE_31,
    WORDS,
    byte_policy,
    saying,
    server_in_a_thread,
    server_process,
    textcraft_request,
)

from chat import ChatTemplate
from engines import EngineError, SamplingSettings, TransformersEngine
from envclient import EnvPool, EnvServerError, connect
from envs.server import create_app
from envs.textcraft.env import TextCraft
from rollout import RolloutLog, collect

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def chat():
    return ChatTemplate(byte_tokenizer())


@pytest.fixture(autouse=True)
def quiet():
    """Worlds that fail here write tracebacks."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def outcomes(handlers):
    return Counter(handler.stop_reason for handler in handlers)


def test_an_episode_that_has_lost_its_session_does_not_keep_it_from_others(chat):
    """All that play lose a step at once, and more wait for their places than there are threads to
    wait in: each of those threads waited for a session of an episode that waited for a thread."""
    left = [3]

    class Blips(TextCraft):
        def step(self, action):
            if left[0]:
                left[0] -= 1
                raise RuntimeError("the backend is away")
            return super().step(action)

    all_open = threading.Event()

    def is_ready(name):
        if len(pool._clients) >= 4:
            all_open.set()
        return all_open.is_set()

    engine = ScriptedEngine(byte_policy(chat, *SOLVE_31), is_ready)
    wanted = [textcraft_request(31, group_id=n) for n in range(12)]
    with (
        server_in_a_thread(env_class=Blips, max_sessions=4) as url,
        EnvPool("textcraft", [url], busy_wait_s=0.5) as pool,
    ):
        give_up = threading.Timer(60, pool.close)
        give_up.start()
        handlers = collect(engine, pool, chat, wanted, settings_of(**ROOMY, env_workers=2))
        give_up.cancel()
    assert left == [0] and outcomes(handlers) == {"success": 12}


class Unseen(TextCraft):
    """A server of it opens sessions and resets none."""

    WIRE = type("Quiet", (type(TextCraft.WIRE),), {"shows_task_at_create": False})()

    def reset(self, task_index, seed=0):
        raise RuntimeError("no display")


def test_a_server_that_resets_nothing_does_not_get_every_try(chat):
    """Its sessions end at once, so that it is always the one with the fewest."""
    wanted = [textcraft_request(31, group_id=n) for n in range(24)]
    began = {}

    def is_ready(name):
        if time.monotonic() - began.setdefault(name, time.monotonic()) < 0.5:
            time.sleep(0.01)
            return False
        return bool(began.pop(name))

    engine = ScriptedEngine(byte_policy(chat, *SOLVE_31), is_ready, max_open=8)
    with (
        server_in_a_thread(env_class=Unseen) as bad,
        server_in_a_thread() as good,
        EnvPool("textcraft", [bad, good]) as pool,
    ):
        handlers = collect(engine, pool, chat, wanted, settings_of(**ROOMY))
    assert outcomes(handlers) == {"success": 24}


def test_a_full_server_is_waited_for_though_another_is_dead(chat):
    policy = byte_policy(chat, *SOLVE_31)

    def slowly(*request):
        time.sleep(0.05)
        return policy(*request)

    wanted = [textcraft_request(31, group_id=n) for n in range(12)]
    with server_in_a_thread(max_sessions=3) as full, server_process() as (dead, process):
        pool = EnvPool("textcraft", [dead, full], busy_wait_s=0.3, dead_wait_s=0.3)
        with pool:
            for client in [pool.client(), pool.client()]:
                client.close()
            process.kill()
            process.wait()
            handlers = collect(ScriptedEngine(slowly), pool, chat, wanted, settings_of(**ROOMY))
    assert outcomes(handlers) == {"success": 12}


def test_who_only_tries_to_get_a_place_is_nobody_to_wait_for(chat):
    """Somebody else has them all: each that waited saw the others' attempts as sessions of ours."""
    wanted = [textcraft_request(31, group_id=n) for n in range(32)]
    engine = ScriptedEngine(byte_policy(chat, *SOLVE_31))
    with (
        server_in_a_thread(max_sessions=1) as url,
        connect("textcraft", url) as stranger,
        EnvPool("textcraft", [url], busy_wait_s=0.4) as pool,
    ):
        stranger.reset(0)
        assert not pool.addresses.is_in_use()
        settings = settings_of(**ROOMY, max_env_failures=1.0)
        handlers = collect(engine, pool, chat, wanted, settings)
        assert not pool.addresses.is_in_use() and not pool.addresses.all[0].load
    assert outcomes(handlers) == {"env_error": 32}
    assert "full for 0.4 s" in handlers[0].error


def test_a_session_whose_first_task_cannot_be_shown_is_closed():
    """Its number was told to nobody."""

    class Holey(TextCraft):
        def reset(self, task_index, seed=0):
            if task_index % 4 == 1:
                raise RuntimeError("its file is missing")
            return super().reset(task_index, seed)

    app = create_app("textcraft", env_class=Holey, max_sessions=3)
    with TestClient(app, base_url="http://localhost") as client:
        codes = []
        for _ in range(16):
            answer = client.post("/create")
            codes.append(answer.status_code)
            if answer.status_code == 200:
                client.post("/close", json={"id": answer.json()["id"]})
        assert Counter(codes) == {200: 12, 500: 4}
        assert client.get("/health").json()["live_sessions"] == 0


def test_what_was_played_to_its_end_is_kept_when_the_engine_refuses_another():
    """Their last answers lay behind that of the one that was refused."""
    chat, refused_first = ChatTemplate(WORDS), threading.Event()

    def play(task_index, turn, text):
        if task_index == 0:  # during the engine's next step
            time.sleep(0.1)
            refused_first.set()
            return observe("no")
        refused_first.wait(10)
        time.sleep(0.1)
        return observe("home", 1.0, True)

    class Refusing(ScriptedEngine):
        def submit(self, request_id, prompt_ids, sampling):
            super().submit(request_id, prompt_ids, sampling)
            if len(prompt_ids) > 16:
                raise EngineError("none of the servers is left")

        def abort(self):
            super().abort()
            raise RuntimeError("it is gone")

    # The last of them keeps the engine busy, so that the answers of all others come in together.
    engine = Refusing(
        saying("open door<e>", "open door<e>"),
        is_ready=lambda name: len(engine.asked) == 7 and "t0006" not in name,
        on_poll=lambda: time.sleep(0.5),
    )
    log, told = RolloutLog(), []
    log.on_end = told.append
    with pytest.raises(EngineError, match="none of the servers"):
        collect(engine, FakePool(play), chat, requests_of(7), settings_of(), log)
    assert engine.aborted and told == log.ended
    ended = {handler.task_id: handler.stop_reason for handler in log.ended}
    played = {f"fake_{n}": "success" for n in range(1, 6)}
    assert ended == played | {"fake_0": "engine_error", "fake_6": "engine_error"}


def test_a_picture_that_fails_loses_no_turn():
    """The turn was played: to play the episode again would change what is learned."""
    chat, asked = ChatTemplate(WORDS), []

    def on_state(task_index, turn):
        asked.append(turn)
        raise EnvServerError("the renderer failed", "http://fake/state", 500)

    pool = FakePool(lambda *_: observe("home", 1.0, True), on_state=on_state)
    engine = ScriptedEngine(saying("open door<e>"))
    (handler,) = collect(engine, pool, chat, requests_of(1), settings_of(record_state=True))
    assert handler.stop_reason == "success" and pool.num_opened == 1 and asked == [0, 1]


HUNG = """
import time
from envs.textcraft.env import TextCraft
class Hung(TextCraft):
    IS_FAST = False
    def step(self, action):
        time.sleep(600)
"""


def test_a_server_leaves_when_told_though_its_world_hangs(tmp_path):
    """Python waits for the thread in which the world hangs; nobody would wait for the server."""
    (tmp_path / "hung_world.py").write_text(HUNG)
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-m", "envs.server", "--env", "hung_world:Hung", "--port", "0"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, **pipes)
    try:
        url = re.search(r"http://\S+", process.stdout.readline())[0]
        session = requests.post(f"{url}/create", json={}, timeout=30).json()["id"]
        requests.post(f"{url}/reset", json={"id": session, "data_idx": 31}, timeout=30)
        with contextlib.suppress(requests.RequestException):
            told = {"id": session, "action": "inventory"}
            requests.post(f"{url}/step", json=told, timeout=1)
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.communicate()


def test_a_world_that_lacks_a_library_is_one_line(tmp_path):
    (tmp_path / "lacking_world.py").write_text(
        "from envs.textcraft.env import TextCraft\n"
        "class Lacking(TextCraft):\n"
        "    @staticmethod\n"
        "    def num_tasks():\n"
        "        raise ImportError('libGL.so.1: cannot open shared object file')\n"
    )
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}"}
    command = [sys.executable, "-m", "envs.server", "--env", "lacking_world:Lacking"]
    done = subprocess.run(
        [*command, "--port", "0"], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("envs.server: cannot serve") and "libGL.so.1" in done.stderr


def test_an_evicted_session_that_hangs_when_it_is_closed_keeps_nobody_waiting(monkeypatch):
    monkeypatch.setattr("envs.sessions.CLOSE_WAIT_S", 0.2)
    release = threading.Event()

    class Sticky(TextCraft):
        IS_FAST = False

        def close(self):
            release.wait(60)

    app = create_app("textcraft", env_class=Sticky, max_sessions=2, idle_timeout_s=0.1)
    with TestClient(app, base_url="http://localhost") as client:
        try:
            for _ in range(2):
                assert client.post("/create").status_code == 200
            time.sleep(0.3)
            began = time.monotonic()
            assert client.post("/create").status_code == 200
            assert time.monotonic() - began < 20
        finally:
            release.set()


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_logits_that_are_no_numbers_are_an_engine_error(temperature):
    """At temperature 0 the most probable of them was id 0, and an evaluation had a number."""
    engine = TransformersEngine.__new__(TransformersEngine)
    engine.device, engine.max_batch, engine._waiting = "cpu", 4, []

    class Out:
        past_key_values = None
        logits = torch.full((1, 1, 8), float("nan"))

    engine.lm = lambda **_: Out
    engine.submit("a", [1, 2], SamplingSettings(max_tokens=2, temperature=temperature))
    with pytest.raises(EngineError, match="not finite"):
        engine.poll()
    Out.logits = torch.tensor([[[0.0, float("-inf"), 1.0]]])  # a masked id is one never drawn
    engine.submit("b", [1, 2], SamplingSettings(max_tokens=1, temperature=temperature))
    assert engine.poll()[0].token_ids[0] in (0, 2)


def test_what_fails_in_the_model_is_an_engine_error_but_memory_is_not():
    engine = TransformersEngine.__new__(TransformersEngine)
    engine.device, engine.max_batch, engine._waiting = "cpu", 4, []
    for error, expected in (
        (RuntimeError("shapes differ"), EngineError),
        (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError),
    ):

        def fail(error=error, **_):
            raise error

        engine.lm = fail
        engine.submit("a", [1, 2], SamplingSettings(max_tokens=2, temperature=1.0))
        with pytest.raises(expected):
            engine.poll()
