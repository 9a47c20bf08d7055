"""run/progress.py: who waits sees a bar on a terminal, a line every 30 s elsewhere."""

import contextlib
import io
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from run import progress as phases
from run.progress import EVERY_S, Phase, duration, phase, playing

ROOT = Path(__file__).resolve().parents[1]


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still, a thread that looks at nothing, and a line that nobody said."""
    monkeypatch.setattr(phases, "_line", phases.Line())
    monkeypatch.setattr(phases, "LOOK_S", 60.0)
    return Clock()


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Episode:
    def __init__(self, success):
        self.success = success


def wait(clock, seconds):
    """The clock goes on, and the innermost phase looks at it."""
    clock.now += seconds
    for each in list(phases._line.open):
        each.beat()


# --- What a line says ----------------------------------------------------------------------------


def test_a_line_says_how_far_it_is_how_it_goes_and_what_is_left(clock):
    warm = Phase("warm start", 32, "steps", clock)
    assert warm.line() == "warm start: 0/32 steps"
    for _ in range(12):
        clock.now += 9
        warm.tick(loss="0.41")
    assert warm.line() == "warm start: 12/32 steps, loss 0.41, 3 min left"
    phases.heading("step 3/60, 41 min left")
    assert warm.line().startswith("step 3/60, 41 min left: warm start: 12/32")


def test_the_first_few_of_many_tell_nothing_of_the_rest(clock):
    rollout = Phase("rollout", 100, "episodes", clock)
    clock.now += 60
    rollout.tick(9)
    assert rollout.left_s() is None
    rollout.tick(1)
    assert rollout.left_s() == pytest.approx(540)
    rollout.tick(100)  # more than was to be done
    assert rollout.left_s() == 0


def test_a_phase_that_counts_nothing_says_how_long_it_takes(clock):
    sync = Phase("weight sync", None, "", clock)
    clock.now += 45
    assert sync.line() == "weight sync: 45 s so far"


def test_an_episode_that_ended_shows_the_success_so_far(clock, capsys):
    with playing("rollout", 4) as on_end:
        for success in (True, False, False):
            on_end(Episode(success))
        assert phases._line.open[0].line().startswith("rollout: 3/4 episodes, solved 1")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(89.4, "89 s"), (90, "2 min"), (5399, "90 min"), (5400, "1.5 h"), (259200, "3.0 days")],
)
def test_durations_at_the_edges_of_their_units(seconds, text):
    assert duration(seconds) == text


# --- When it is said -----------------------------------------------------------------------------


def test_without_a_terminal_there_is_a_line_every_thirty_seconds_and_none_in_between(clock, capsys):
    with phase("warm start", 10, "steps", clock) as tick:
        wait(clock, EVERY_S - 1)
        assert capsys.readouterr().out == ""
        wait(clock, 1)
        assert capsys.readouterr().out == "warm start: 0/10 steps\n"
        tick(5)
        wait(clock, EVERY_S - 1)
        assert capsys.readouterr() == ("", "")
        wait(clock, 1)
        assert capsys.readouterr() == ("warm start: 5/10 steps, 60 s left\n", "")
    wait(clock, 100)
    assert capsys.readouterr().out == ""


def test_short_phases_of_a_run_one_after_the_other_are_not_silent(clock, capsys):
    phases.heading("step 3/60")
    phases._line.spoke_at = clock()
    for label in ("log-probs", "update"):
        with phase(label, clock=clock):
            wait(clock, 20)
    assert capsys.readouterr().out == "step 3/60: update: 20 s so far\n"


def test_the_tables_row_counts_as_a_line(clock, capsys, monkeypatch):
    monkeypatch.setattr("time.monotonic", clock)
    with phase("rollout", 4, "episodes", clock):
        clock.now += 29
        phases.spoke()
        wait(clock, 29)
        assert capsys.readouterr().out == ""
        wait(clock, 1)
        assert capsys.readouterr().out != ""


def test_the_innermost_phase_speaks(clock, capsys):
    with phase("outer", 4, "parts", clock):
        with phase("inner", 8, "pieces", clock):
            wait(clock, 30)
        assert capsys.readouterr().out == "inner: 0/8 pieces\n"
        wait(clock, 30)
        assert capsys.readouterr().out == "outer: 0/4 parts\n"
        with phase("", 8, "pieces", clock) as tick:
            tick()
            wait(clock, 30)
        assert capsys.readouterr().out == "outer: 0/4 parts\n"


def test_only_the_first_process_speaks(clock, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with phase("rollout", 4, "episodes", clock) as tick:
        wait(clock, 60)
        tick(success="50%")
    assert capsys.readouterr() == ("", "")


# --- Where it is said ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stdout", "stderr", "has_lines", "has_bar"),
    [
        (Terminal, Terminal, False, True),
        (io.StringIO, Terminal, True, True),  # train.py > log
        (Terminal, io.StringIO, True, False),  # train.py 2> errors
        (io.StringIO, io.StringIO, True, False),  # train.py 2>&1 | tee log
    ],
)
def test_a_bar_where_stderr_is_a_terminal_and_lines_unless_both_are(
    clock, monkeypatch, stdout, stderr, has_lines, has_bar
):
    out, err = stdout(), stderr()
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", err)
    with phase("update", 4, "trajectories", clock) as tick:
        tick(1.6)
        wait(clock, 30)
    assert ("update: 2/4 trajectories" in out.getvalue()) == has_lines
    assert ("update" in err.getvalue()) == has_bar
    if has_bar:
        assert " 2/4 [" in err.getvalue()


def test_a_terminal_without_a_size_has_a_bar_too():
    code = "import time; from run.progress import phase\n"
    code += "with phase('update', 4, 'steps') as tick: tick(2); time.sleep(0.2); tick(1)"
    master, slave = os.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, stdout=slave, stderr=slave
    ) as process:
        os.close(slave)
        shown = b""
        with contextlib.suppress(OSError):  # its end, as Linux tells it
            while part := os.read(master, 4096):
                shown += part
    os.close(master)
    assert process.returncode == 0 and b"3/4 [" in shown


def test_what_counts_nothing_has_a_line_on_a_terminal_too(clock, monkeypatch):
    out, err = Terminal(), Terminal()
    monkeypatch.setattr("sys.stdout", out)
    monkeypatch.setattr("sys.stderr", err)
    with phase("starting the sampler", clock=clock):
        wait(clock, 30)
    assert (out.getvalue(), err.getvalue()) == ("starting the sampler: 30 s so far\n", "")


def test_a_reader_that_has_gone_does_not_end_the_phase(clock, monkeypatch):
    class Gone(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    monkeypatch.setattr("sys.stdout", Gone())
    with phase("update", 4, "trajectories", clock):
        wait(clock, 30)


# --- The thread ----------------------------------------------------------------------------------


def test_the_thread_looks_by_itself_and_ends_with_the_phase(monkeypatch):
    looked, threads = threading.Event(), threading.active_count()
    monkeypatch.setattr(phases, "LOOK_S", 0.01)
    monkeypatch.setattr(Phase, "beat", lambda self: looked.set())
    with pytest.raises(ZeroDivisionError), phase("update"):
        assert looked.wait(timeout=30)
        raise ZeroDivisionError
    assert threading.active_count() == threads
    assert phases._line.open == []
