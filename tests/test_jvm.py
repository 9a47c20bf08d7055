"""Java processes: seats are spread, what dies or hangs is replaced, nothing outlives us."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from envs.sciworld import jvm
from envs.sciworld.jvm import JavaMissing, JvmLost, JvmPool

ROOT = Path(__file__).parent.parent
PATIENT_S = 60.0


@pytest.fixture(scope="module", autouse=True)
def _java():
    """A skip, or with CI=true an error, where Java or ScienceWorld is missing."""
    try:
        jvm.find_jar(), jvm.find_java()
    except JavaMissing as error:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(f"NOT TESTED: {error}")


@pytest.fixture(scope="module")
def two():
    """Two processes, patient while they start and load classes: a second on a quiet machine, many
    on a busy one."""
    pool = JvmPool(2, heap="256m", time_limit_s=PATIENT_S)
    yield pool
    pool.close()


def look(world):
    world.load("find-plant", 0, "", False)
    return world.step("look around")


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_seats_are_spread_and_a_killed_process_is_replaced_while_the_other_goes_on(two):
    seats = [two.seat() for _ in range(4)]
    a, b = seats[:2]
    assert [seat.jvm for seat in seats] == [a.jvm, b.jvm, a.jvm, b.jvm] and a.jvm is not b.jvm
    seats.pop().release()
    seats.append(two.seat())
    assert seats[-1].jvm is b.jvm
    assert b.call(look)
    a.jvm.process.kill()
    for _ in range(2):
        with pytest.raises(JvmLost, match="the Java process of this session died with -9"):
            a.call(look)
    assert a.is_lost and not b.is_lost
    assert b.call(lambda world: world.step("inventory")).startswith("In your inventory")
    a.release()
    new = two.seat()
    assert new.jvm is not a.jvm and new.jvm is not b.jvm and new.call(look)
    for seat in (*seats[1:], new):
        seat.release()


def test_a_process_that_hangs_is_killed_after_the_time_limit_and_replaced(two):
    seat = two.seat()
    assert seat.call(look)
    client = seat.jvm._gateway._gateway_client
    seat.jvm._time_limit_s = client.gateway_parameters.read_timeout = 1.0  # warm by now
    client.deque.clear()  # connections with the old limit
    os.kill(seat.jvm.process.pid, signal.SIGSTOP)
    started = time.monotonic()
    with pytest.raises(JvmLost, match="gave no answer within 1 s and was killed"):
        seat.call(look)
    assert 0.9 < time.monotonic() - started < 20
    assert not is_running(seat.jvm.process.pid)
    seat.release()
    seat = two.seat()
    assert seat.call(look)
    seat.release()


def test_what_is_missing_or_wrong_is_named(monkeypatch):
    with pytest.raises(JavaMissing, match="did not start: .*initialization of VM"):
        JvmPool(1, heap="99999999g").seat()
    monkeypatch.setenv("SCIWORLD_HEAP", "lots")
    with pytest.raises(ValueError, match="SCIWORLD_HEAP is 'lots'; expected a size such as 512m"):
        JvmPool.from_environment()


def test_no_java_process_outlives_us_even_when_we_are_killed():
    program = (
        "import time\n"
        "from envs.sciworld.jvm import JvmPool\n"
        "pool = JvmPool(1, heap='128m')\n"
        "seat = pool.seat()\n"
        "print(seat.jvm.process.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    run = [sys.executable, "-c", program]
    with subprocess.Popen(run, cwd=ROOT, stdout=subprocess.PIPE, text=True) as owner:
        pid = int(owner.stdout.readline())
        assert is_running(pid)
        owner.kill()
        give_up_at = time.monotonic() + 10
        while is_running(pid) and time.monotonic() < give_up_at:
            time.sleep(0.05)
        assert not is_running(pid)
