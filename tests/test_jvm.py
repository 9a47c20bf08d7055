"""Java processes: seats are distributed, dead or hanging ones are replaced, none outlives us."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from test_processes import is_alive, wait_until

from envs.sciworld.jvm import JavaMissing, JvmLost, JvmPool

pytest.importorskip("scienceworld", reason="NOT TESTED: make setup ENV=sciworld")

ROOT = Path(__file__).parent.parent
PATIENT_S = 60.0


@pytest.fixture(scope="module")
def pool():
    """A pool of two processes. The time limit is long, because starting and loading classes takes
    a second on a quiet machine and much more on a busy one."""
    pool = JvmPool(2, heap="256m", time_limit_s=PATIENT_S)
    yield pool
    pool.close()


def look(sim):
    sim.load("find-plant", 0, "", False)
    return sim.step("look around")


def test_seats_are_distributed_and_a_killed_process_is_replaced_without_harm_to_the_other(pool):
    seats = [pool.seat() for _ in range(4)]
    first, second = seats[:2]
    assert [seat.jvm for seat in seats] == [first.jvm, second.jvm] * 2
    assert first.jvm is not second.jvm
    seats.pop().release()
    seats.append(pool.seat())
    assert seats[-1].jvm is second.jvm
    assert second.call(look)
    first.jvm.process.kill()
    for _ in range(2):
        with pytest.raises(JvmLost, match="the Java process of this session died with -9"):
            first.call(look)
    with pytest.raises(Exception, match="ClassNotFound"):  # an error in Java ends nothing
        second.call(lambda sim: sim.getClass().forName("absent"))
    assert first.is_lost and not second.is_lost
    assert second.call(lambda sim: sim.step("inventory")).startswith("In your inventory")
    first.release()
    replacement = pool.seat()
    assert replacement.jvm not in (first.jvm, second.jvm) and replacement.call(look)
    for seat in (*seats[1:], replacement):
        seat.release()


def test_a_process_that_hangs_is_killed_after_the_time_limit_and_replaced(pool):
    seat = pool.seat()
    assert seat.call(look)
    client = seat.jvm._gateway._gateway_client
    seat.jvm._time_limit_s = client.gateway_parameters.read_timeout = 1.0  # classes are loaded
    client.deque.clear()  # connections with the old limit
    os.kill(seat.jvm.process.pid, signal.SIGSTOP)
    start_time = time.monotonic()
    with pytest.raises(JvmLost, match="gave no answer within 1 s and was killed"):
        seat.call(look)
    assert 0.9 < time.monotonic() - start_time < 20
    assert not is_alive(seat.jvm.process.pid)
    seat.release()
    seat = pool.seat()
    assert seat.call(look)
    with pytest.raises(KeyboardInterrupt):  # by Ctrl-C, while Java still works
        seat.call(Mock(side_effect=KeyboardInterrupt))
    assert seat.is_lost
    seat.release()


def test_a_java_that_does_not_start_and_a_bad_setting_are_clear_errors(monkeypatch):
    with pytest.raises(JavaMissing, match="did not start: .*initialization of VM"):
        JvmPool(1, heap="99999999g").seat()
    monkeypatch.setenv("SCIWORLD_CALL_TIMEOUT_S", "1.5")
    assert JvmPool.from_environment().time_limit_s == 1.5
    monkeypatch.setenv("SCIWORLD_HEAP", "lots")
    with pytest.raises(ValueError, match="SCIWORLD_HEAP is 'lots'; expected a size such as 512m"):
        JvmPool.from_environment()


def test_a_java_process_ends_with_us_even_if_we_are_killed():
    program = (
        "import time\n"
        "from envs.sciworld.jvm import JvmPool\n"
        "pool = JvmPool(1, heap='128m')\n"
        "seat = pool.seat()\n"
        "print(seat.jvm.process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    run = [sys.executable, "-c", program]
    with subprocess.Popen(run, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        pid = int(parent.stdout.readline())
        assert is_alive(pid)
        parent.kill()
        wait_until(lambda: not is_alive(pid))
