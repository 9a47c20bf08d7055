"""--env-addr local: an environment in this process behaves like one behind HTTP."""

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
from envs.local import LOCAL
from envs.sessions import MAX_BODY_BYTES


def both_clients(env_class=Letters):
    """A client over HTTP and one in this process."""
    with serve(env_class) as url, connect(NAME, url) as http, connect(NAME, LOCAL) as local:
        yield http
        yield local


class Brittle(Letters):
    """It fails at the action "m"."""

    def step(self, action):
        if action == "m":
            raise RuntimeError("the environment broke")
        return super().step(action)


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda c: c.reset(8), UnknownTask),
        (lambda c: c._request("GET", "/nothing", {}), NotSupported),
        (lambda c: c.step("m"), EnvServerError),
        (lambda c: (c._call("POST", "/close"), c.step("a")), SessionLost),
    ],
)
def test_errors_are_the_same_as_over_http(call, kind):
    errors = []
    for client in both_clients(Brittle):
        client.reset(0)
        with pytest.raises(kind) as error:
            call(client)
        assert client.base_url in error.value.url
        errors.append((error.value.problem, error.value.status))
    assert errors[0] == errors[1]


def test_answers_are_the_same_as_over_http():
    answers = [
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
        for client in both_clients()
    ]
    assert answers[0] == answers[1]
    assert "rejected" in answers[0][5].info


class Counting(Letters):
    """It counts the threads that are in step() at the same time."""

    num_inside, max_inside, lock = 0, 0, threading.Lock()

    def step(self, action):
        with self.lock:
            Counting.num_inside += 1
            Counting.max_inside = max(Counting.max_inside, Counting.num_inside)
        os.sched_yield()
        with self.lock:
            Counting.num_inside -= 1
        return super().step(action)


def test_only_one_thread_at_a_time_calls_a_fast_environment():
    def episode(task):
        with pool.client() as client:
            first = client.reset(task)
            return first, client.step("abc").reward, client.step("xyz").terminated

    with registered(Counting), EnvPool(NAME, [LOCAL]) as pool, ThreadPoolExecutor(16) as threads:
        results = list(threads.map(episode, [n % 8 for n in range(200)]))
    assert results == [(f"craft {n % 8}", 0.5, True) for n in range(200)]
    assert Counting.max_inside == 1


class Slow(Letters):
    IS_FAST = False
    is_inside, may_continue = threading.Event(), threading.Event()

    def step(self, action):
        self.is_inside.set()
        assert self.may_continue.wait(10)
        return super().step(action)


def test_closing_a_session_waits_for_its_running_call():
    """After Ctrl-C the pool closes sessions in which threads still play."""
    with registered(Slow), EnvPool(NAME, [LOCAL]) as pool, ThreadPoolExecutor(2) as threads:
        client = pool.client()
        client.reset(0)
        step = threads.submit(client.step, "abc")
        assert Slow.is_inside.wait(10)
        closing = threads.submit(pool.close)
        time.sleep(0.1)
        assert not closing.done()
        Slow.may_continue.set()
        closing.result(10)
        assert step.result(10).reward == 0.5
