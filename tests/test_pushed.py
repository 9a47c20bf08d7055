"""recipes/pushed.py: which way advantages push a behaviour, from the trajectories of a run."""

import json

import pytest

from recipes import pushed
from recipes.pushed import report


def write_step(run, step, *trajectories):
    """Each is (group, return, action, sub-task, stop_reason)."""
    path = run / f"trajectories/step_{step:06d}.jsonl"
    path.parent.mkdir(exist_ok=True)
    names = ("group_id", "return", "action", "subtask", "stop_reason")
    lines = [dict(zip(names, t, strict=True)) for t in trajectories]
    for line in lines:
        line["turns"] = [{"action_text": "Action: look"}, {"action_text": line.pop("action")}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


FOCUS, WAIT = "Action: focus on egg", "Action: wait"


@pytest.fixture
def run(tmp_path):
    # Two groups in which nobody solves and who waits loses less, one in which who focuses solves.
    for step in (1, 2):
        write_step(
            tmp_path,
            step,
            *[(0, 0.17, FOCUS, "a", "failure"), (0, 0.25, WAIT, "a", "max_rounds")],
            *[(1, 0.17, FOCUS, "a", "failure"), (1, 0.25, WAIT, "a", "max_rounds")],
            *[(2, 1.0, FOCUS, "a", "success"), (2, 0.25, WAIT, "a", "max_rounds")],
            *[(3, 0.25, WAIT, "a", "max_rounds"), (3, 0.25, WAIT, "a", "max_rounds")],
            *[(4, 1.0, WAIT, "b", "success"), (4, 0.0, FOCUS, "b", "failure")],
            (2, 0.0, WAIT, "a", "env_error"),
        )
    return tmp_path


def test_the_division_turns_the_sign_where_small_differences_are_many(run):
    (row,) = report(run, "focus on", (), "a")
    assert row["steps"] == [1, 2]
    said, others = row["said"], row["not said"]
    assert (said["trajectories"], others["trajectories"]) == (6, 10)  # one was lost in each step
    assert said["return"] == pytest.approx((0.17 + 0.17 + 1) / 3, abs=1e-3)
    assert said["return"] > others["return"] == 0.25
    # By hand: two members differ by d, so that the advantages are ±d/2, divided ±1/√2.
    assert said["plain"] == pytest.approx((-0.04 - 0.04 + 0.375) / 3, abs=1e-3)
    assert said["divided"] == pytest.approx(-(0.5**0.5) / 3, abs=1e-3)
    assert others["divided"] == -said["divided"], "the group of equal returns counts for nothing"


def test_stretches_begin_at_the_steps_and_every_sub_task_counts_unless_one_is_named(run):
    rows = report(run, "focus on", (2,), None)
    assert [row["steps"] for row in rows] == [[1, 1], [2, 2]]
    assert [row["said"]["trajectories"] for row in rows] == [4, 4]
    nobody = report(run, "never said", (), None)[0]
    assert nobody["said"] == {"trajectories": 0, "return": None, "divided": None, "plain": None}


def test_the_table_is_printed_and_the_numbers_written(run, capsys):
    file = run / "pushed.json"
    words = [str(run), "--says", "focus on", "--subtask", "a", "--out", str(file)]
    assert pushed.main(words) == 0
    assert "| 1 to 2 | `focus on` | 6 | 0.45 | -0.236 | +0.098 |" in capsys.readouterr().out
    assert json.loads(file.read_text())["rows"] == report(run, "focus on", (), "a")


def test_what_is_no_run_is_one_line(tmp_path, capsys):
    assert pushed.main([str(tmp_path), "--says", "x"]) == 2
    said = capsys.readouterr().err
    assert "holds no trajectories" in said and said.count("\n") == 1
