"""replay.py: the command line and the output in a terminal."""

import os
import shutil
import socket

import pytest
from made_run import HOSTILE, hostile_line

import replay


def test_a_path_that_cannot_be_shown_is_reported_in_one_line(
    made_run, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.json").write_text("[{]")
    (tmp_path / "notes.txt").write_text("x")
    for argv, message in (
        (["\x1b[31mnowhere"], "⟨U+001B⟩[31mnowhere: no such file"),
        (["empty"], "neither a run"),
        ([str(made_run.parent)], "it contains runs: run"),
        (["bad.json"], "is not JSON"),
        (["notes.txt"], "neither .jsonl"),
        ([str(made_run), "--text", "--trajectory", "s000003-t0001-k77"], "s000003-t0001-k00"),
        ([str(made_run), "--text", "--file", "step_9"], "has no step_9"),
        (["--text"], "there is no run in runs/"),
    ):
        assert replay.main(argv) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1


def test_a_port_in_use_and_a_missing_key_are_misuse(made_run, capsys):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        assert replay.main([str(made_run), "--port", str(port)]) == 2
    assert "--port 0 uses a free one" in capsys.readouterr().err
    with pytest.raises(SystemExit) as system_exit:
        replay.main(["--api-base", "http://a", "--api-model", "m", "--api-key-env", "NOSUCH"])
    assert system_exit.value.code == 2 and "NOSUCH" in capsys.readouterr().err


def test_the_terminal_shows_the_newest_run_its_failures_and_a_trajectory(
    made_run, tmp_path, monkeypatch, capsys
):
    for name in ("old", "mine", "older"):
        shutil.copytree(made_run, tmp_path / "runs" / name)
        if name != "mine":
            os.utime(tmp_path / "runs" / name / "config.json", (1, 1))
    monkeypatch.chdir(tmp_path)
    assert replay.main(["--text", "--failures", "--file", "step_000001"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("mine: textcraft")
    assert "held-out tasks solved" in output and "s000001-t0000-k02" in output
    assert " success " not in output  # --failures
    assert replay.main(["--text", "--trajectory", "s000001-t0000-k02"]) == 0
    output = capsys.readouterr().out
    assert "action 1  Thought:" in output and "Goal:" in output and "return" in output
    assert "oracle  Thought:" in output  # what it would have done in the first, wasted turn


def test_a_trajectory_is_found_in_the_named_file_or_the_newest(made_run):
    """An evaluation and the training step after it use the same ids."""
    (source,) = replay.open_sources([made_run])
    assert replay.find(source, "s000003-t0000-k02") == ("step_000003", 2)
    assert replay.find(source, "s000003-t0000-k02", "eval_000003") == ("eval_000003", 1)


def test_text_from_a_model_cannot_control_the_terminal(tmp_path, capsys):
    path = tmp_path / "hostile.jsonl"
    path.write_text("".join(hostile_line(n, text) for n, text in enumerate(HOSTILE)))
    assert replay.main([str(path), "--text"]) == 0
    for number in range(len(HOSTILE)):
        assert replay.main([str(path), "--text", "--trajectory", f"h{number}"]) == 0
    output = capsys.readouterr().out
    assert all(c == "\n" or c.isprintable() for c in output)
