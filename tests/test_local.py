"""--env-addr local: a world in this process is played as one behind HTTP."""

import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from toy_env import NAME, Letters, registered, serve

from envclient import (
    EnvPool,
    EnvServerError,
    NotSupported,
    SessionLost,
    UnknownTask,
    connect,
)
from envs.local import LOCAL, check_local
from envs.sessions import MAX_BODY_BYTES


def both(env_class=Letters):
    """A client over HTTP and one in this process."""
    with serve(env_class) as url, connect(NAME, url) as http, connect(NAME, LOCAL) as local:
        yield http
        yield local


class Brittle(Letters):
    """It breaks at the word that is not to be said."""

    def step(self, action):
        if action == "m":
            raise RuntimeError("the world broke")
        return super().step(action)


@pytest.mark.parametrize(
    ("what", "kind"),
    [
        (lambda c: c.reset(8), UnknownTask),
        (lambda c: c._request("GET", "/nothing", {}), NotSupported),
        (lambda c: c.step("m"), EnvServerError),
        (lambda c: (c._call("POST", "/close"), c.step("a")), SessionLost),
    ],
)
def test_errors_are_those_of_a_server(what, kind):
    errors = []
    for client in both(Brittle):
        client.reset(0)
        with pytest.raises(kind) as error:
            what(client)
        assert client.base_url in error.value.url
        errors.append((error.value.problem, error.value.status))
    assert errors[0] == errors[1]


def test_what_a_client_may_ask_is_what_a_server_answers():
    asked = [
        (
            client.reset(3, seed=5),
            client.observation(),
            client.available_actions(),
            client.state(),
            client.oracle(),
            client.step("a" * MAX_BODY_BYTES),
            client.step("abc"),
            client.close(),
            client.close(),
        )
        for client in both()
    ]
    assert asked[0] == asked[1]
    assert "rejected" in asked[0][5].info


class Counting(Letters):
    """It counts the threads inside it."""

    inside, most, lock = 0, 0, threading.Lock()

    def step(self, action):
        with self.lock:
            Counting.inside += 1
            Counting.most = max(Counting.most, Counting.inside)
        os.sched_yield()
        with self.lock:
            Counting.inside -= 1
        return super().step(action)


def test_a_fast_environment_is_called_by_one_thread_at_a_time_and_each_client_has_its_own():
    def episode(task):
        with pool.client() as client:
            first = client.reset(task)
            return first, client.step("abc").reward, client.step("xyz").terminated

    with registered(Counting), EnvPool(NAME, [LOCAL]) as pool, ThreadPoolExecutor(16) as threads:
        ended = list(threads.map(episode, [n % 8 for n in range(200)]))
    assert ended == [(f"craft {n % 8}", 0.5, True) for n in range(200)]
    assert Counting.most == 1


class Slow(Letters):
    IS_FAST = False
    inside, go_on = threading.Event(), threading.Event()

    def step(self, action):
        self.inside.set()
        assert self.go_on.wait(10)
        return super().step(action)


def test_who_closes_a_session_waits_for_its_call_under_way():
    """After Ctrl-C the pool closes what a thread still plays."""
    with registered(Slow), EnvPool(NAME, [LOCAL]) as pool, ThreadPoolExecutor(2) as threads:
        client = pool.client()
        client.reset(0)
        step = threads.submit(client.step, "abc")
        assert Slow.inside.wait(10)
        closing = threads.submit(pool.close)
        time.sleep(0.1)
        assert not closing.done()
        Slow.go_on.set()
        closing.result(10)
        assert step.result(10).reward == 0.5


def test_a_world_with_a_process_of_its_own_says_so():
    with pytest.raises(ValueError, match="sciworld needs a server"):
        check_local("sciworld")
    check_local("babyai")
