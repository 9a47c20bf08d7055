"""run/progress.py: a progress line every 30 s, the time left, and the table's rows."""

import math
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

from reporting.metrics import GLOSSARY
from run import progress
from run.progress import EVERY_S, RECENT, TimeLeft, phase, playing, table_row


@pytest.fixture
def wait(monkeypatch):
    """A function that moves a fake clock forward and then prints the line if it is due."""
    now, print_if_due = [1000.0], progress._print_if_due
    monkeypatch.setattr(progress, "monotonic", lambda: now[0])
    monkeypatch.setattr(progress, "_screen", progress._Screen())
    monkeypatch.setattr(progress, "_print_if_due", lambda: None)  # the thread prints nothing

    def wait(seconds):
        now[0] += seconds
        print_if_due()

    progress.restart_interval()
    return wait


# --- A line every 30 s ---------------------------------------------------------------------------


def test_a_line_every_thirty_seconds_shows_the_progress(wait, capsys):
    with phase("warm start", 10, "steps") as tick:
        wait(EVERY_S - 1)
        assert capsys.readouterr().out == ""
        wait(1)
        assert capsys.readouterr().out == "warm start: 0/10 steps\n"
        tick(0.9)
        wait(EVERY_S)  # too early to estimate the rest
        assert capsys.readouterr().out == "warm start: 1/10 steps\n"
        tick(4.1, loss="0.41")
        progress.restart_interval()  # as after a row of the table
        wait(EVERY_S - 1)
        assert capsys.readouterr().out == ""
        progress.heading("step 3/60, 41 min left")
        wait(1)
        line = "step 3/60, 41 min left: warm start: 5/10 steps, loss 0.41, 2 min left\n"
        assert capsys.readouterr().out == line
        tick(6)  # 11 of 10 steps
        wait(EVERY_S)
        assert capsys.readouterr().out.endswith(" 0 s left\n")
    for label in ("log-probs", "update"):  # the 30 s run on through short phases
        with phase(label):
            wait(20)
    assert capsys.readouterr().out.endswith(": update: 20 s so far\n")
    wait(100)
    assert capsys.readouterr().out == ""


def test_the_innermost_phase_with_a_label_is_printed(wait, capsys):
    with playing("outer", 4) as on_end:
        on_end(SimpleNamespace(success=True))
        with phase("inner", 8, "pieces"):
            wait(30)
        assert capsys.readouterr().out == "inner: 0/8 pieces\n"
        with phase("", 8, "pieces") as tick:
            tick()
            wait(30)
        assert capsys.readouterr().out == "outer: 1/4 episodes, solved 1, 3 min left\n"


def test_only_rank_0_prints_and_a_closed_pipe_does_not_end_the_run(wait, capsys, monkeypatch):
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


def test_a_thread_prints_while_a_phase_is_open(monkeypatch):
    was_called = threading.Event()
    monkeypatch.setattr(progress, "_print_if_due", was_called.set)
    with phase("update"):
        assert was_called.wait(timeout=30)


# --- Time left -----------------------------------------------------------------------------------


def test_the_time_left_is_that_of_the_remaining_steps_and_evaluations():
    time_left = TimeLeft(60, [20, 40, 60])
    time_left.note({"time/eval_s": 50.0})
    assert time_left.after(0) is None  # no step was timed
    time_left.note({"time/step_s": 60.0, "time/eval_s": 50.0})  # the 60 s include the 50 s
    assert time_left.after(1) == 59 * 10 + 3 * 50
    assert time_left.after(20) == 40 * 10 + 2 * 50  # the evaluation after step 20 is done
    assert time_left.after(60) == 0
    # One slow step changes nothing; a longer horizon does.
    time_left = TimeLeft(100)
    for seconds in (*[10.0] * 9, 500.0):
        time_left.note({"time/step_s": seconds})
    assert time_left.after(10) == 900
    for _ in range(RECENT):
        time_left.note({"time/step_s": 20.0})
    assert time_left.after(20) == 1600


# --- A terminal that closes ----------------------------------------------------------------------

PRINTS = """
import sys
from run.progress import output_that_can_close

with output_that_can_close():
    sys.stdin.read()  # until the test has closed our output
    for stream in (sys.stdout, sys.stderr, sys.stdout, sys.stderr):
        print("-" * 100_000, file=stream, flush=True)
"""


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_a_program_continues_if_the_reader_of_its_output_is_gone(closed):
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", PRINTS], text=True, **pipes) as process:
        getattr(process, closed).close()
        process.stdin.close()
        output = (process.stderr if closed == "stdout" else process.stdout).read()
    assert process.returncode == 0
    (note,) = [line for line in output.splitlines() if not line.startswith("---")]
    assert "is closed; the program continues" in note and output.count("-" * 100_000) == 2


# --- The table -----------------------------------------------------------------------------------


def test_every_row_is_as_wide_as_the_header_and_fits_120_columns():
    assert {name for _, name, *_ in progress.COLUMNS} - {"signal"} <= set(GLOSSARY)
    groups = {"train/groups": 128, "train/groups_zero_variance": 16}
    longest = {"policy/loss": -123.4567, "policy/grad_norm": 1234.567, "policy/kl": math.nan}
    rows = [table_row(1, {}), table_row(1000, groups | longest, 1000, left_s=25.5 * 86400)]
    assert {len(row) for row in rows} == {len(progress.table_header())} and len(rows[0]) < 120
    assert rows[0].split() == ["1"] + ["-"] * (len(progress.COLUMNS) + 1)
    assert rows[1].split()[0] == "1000/1000" and rows[1].endswith(" 25.5 days")
    assert "112/128" in rows[1] and "nan" not in rows[1]
