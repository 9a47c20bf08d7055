"""run/progress.py: whoever waits sees a line every 30 s, and how long it still takes."""

import math
import threading
from types import SimpleNamespace

import pytest

from reporting.metrics import GLOSSARY
from run import progress
from run.progress import EVERY_S, RECENT, TimeLeft, phase, playing, table_row


@pytest.fixture
def wait(monkeypatch):
    """The clock stands still until this many seconds pass; then it is looked at."""
    now, look = [1000.0], progress._look
    monkeypatch.setattr(progress, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress, "_screen", progress._Screen())
    monkeypatch.setattr(progress, "_look", lambda: None)  # the thread does not look by itself

    def wait(seconds):
        now[0] += seconds
        look()

    progress.spoke()
    return wait


# --- A line every 30 s ---------------------------------------------------------------------------


def test_a_line_comes_every_thirty_seconds_and_says_how_far_it_is(wait, capsys):
    with phase("warm start", 10, "steps") as tick:
        wait(EVERY_S - 1)
        assert capsys.readouterr().out == ""
        wait(1)
        assert capsys.readouterr().out == "warm start: 0/10 steps\n"
        tick(0.9)
        wait(EVERY_S)  # too early to estimate the rest
        assert capsys.readouterr().out == "warm start: 1/10 steps\n"
        tick(4.1, loss="0.41")
        progress.spoke()  # a row of the table counts as a line
        wait(EVERY_S - 1)
        assert capsys.readouterr().out == ""
        progress.heading("step 3/60, 41 min left")
        wait(1)
        line = "step 3/60, 41 min left: warm start: 5/10 steps, loss 0.41, 2 min left\n"
        assert capsys.readouterr().out == line
        tick(6)  # more than was to be done
        wait(EVERY_S)
        assert capsys.readouterr().out.endswith(" 0 s left\n")
    for label in ("log-probs", "update"):  # short phases, one after the other, are not silent
        with phase(label):
            wait(20)
    assert capsys.readouterr().out.endswith(": update: 20 s so far\n")
    wait(100)
    assert capsys.readouterr().out == ""


def test_the_innermost_phase_speaks_and_one_without_a_name_does_not(wait, capsys):
    with playing("outer", 4) as on_end:
        on_end(SimpleNamespace(success=True))
        with phase("inner", 8, "pieces"):
            wait(30)
        assert capsys.readouterr().out == "inner: 0/8 pieces\n"
        with phase("", 8, "pieces") as tick:
            tick()
            wait(30)
        assert capsys.readouterr().out == "outer: 1/4 episodes, solved 1, 3 min left\n"


def test_other_processes_are_silent_and_a_reader_that_has_gone_ends_nothing(
    wait, capsys, monkeypatch
):
    monkeypatch.setenv("RANK", "1")
    with phase("rollout", 4, "episodes") as tick:
        wait(60)
        tick(success="50%")
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("RANK", "0")

    def write(text):
        raise BrokenPipeError

    monkeypatch.setattr("sys.stdout", SimpleNamespace(write=write))
    with phase("update", 4, "trajectories"):
        wait(30)


def test_the_thread_looks_by_itself_while_a_phase_is_open(monkeypatch):
    looked = threading.Event()
    monkeypatch.setattr(progress, "_look", looked.set)
    with phase("update"):
        assert looked.wait(timeout=30)


# --- How long the run still takes ----------------------------------------------------------------


def test_steps_left_and_evaluations_due_are_what_is_left():
    left = TimeLeft(60, [20, 40, 60])
    left.note({"time/eval_s": 50.0})
    assert left.after(0) is None  # no step was timed
    left.note({"time/step_s": 60.0, "time/eval_s": 50.0})  # its evaluation is counted once
    assert left.after(1) == 59 * 10 + 3 * 50
    assert left.after(20) == 40 * 10 + 2 * 50  # the one after step 20 is over
    assert left.after(60) == 0
    # One slow step moves nothing, and a horizon that grew is noticed.
    left = TimeLeft(100)
    for seconds in (*[10.0] * 9, 500.0):
        left.note({"time/step_s": seconds})
    assert left.after(10) == 900
    for _ in range(RECENT):
        left.note({"time/step_s": 20.0})
    assert left.after(20) == 1600


# --- What is printed -----------------------------------------------------------------------------


def test_every_row_is_as_wide_as_its_heading_and_fits_120_columns():
    assert {name for _, name, *_ in progress.COLUMNS} - {"signal"} <= set(GLOSSARY)
    groups = {"train/groups": 128, "train/groups_zero_variance": 16}
    longest = {"policy/loss": -123.4567, "policy/grad_norm": 1234.567, "policy/kl": math.nan}
    rows = [table_row(1, {}), table_row(1000, groups | longest, 1000, left_s=25.5 * 86400)]
    assert {len(row) for row in rows} == {len(progress.table_header())} and len(rows[0]) < 120
    assert rows[0].split() == ["1"] + ["-"] * (len(progress.COLUMNS) + 1)
    assert rows[1].split()[0] == "1000/1000" and rows[1].endswith(" 25.5 days")
    assert "112/128" in rows[1] and "nan" not in rows[1]
