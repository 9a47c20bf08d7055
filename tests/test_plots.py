"""reporting/plots.py draws what was logged, and nothing that was not."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from reporting.metrics import MetricsLogger
from reporting.plots import BLUE, figure, plot, plot_estimates, running_mean

ROOT = Path(__file__).resolve().parent.parent


def estimate(value):
    return {"value": value, "low": value - 0.1, "high": value + 0.1}


@pytest.fixture
def drawn(monkeypatch):
    """The figures that were saved."""
    from matplotlib.figure import Figure

    figures, savefig = [], Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *a, **k: (figures.append(self), savefig(self, *a, **k))
    )
    return figures


def test_the_plot_draws_what_was_logged(tmp_path, drawn):
    with MetricsLogger(tmp_path) as logger:
        for step in range(1, 13):
            logger.log(
                step,
                {
                    "train/return_mean": step / 12,
                    "train/success_rate": None if step == 4 else step / 12,
                    "train/turns_mean": 3.0,
                    "horizon/max_rounds": 6 if step <= 6 else 10,
                    "policy/entropy": 0.5,
                    "policy/kl": 0.01 * step,
                },
            )
    (tmp_path / "eval").mkdir()
    for step in (6, 12, 18):  # step 18 was evaluated by a run that was cut back to step 12
        overall = {"avg": estimate(step / 20), "pass": estimate(0.8)}
        (tmp_path / "eval" / f"step_{step:06d}.json").write_text(
            json.dumps({"step": step, "samples": 4, "overall": overall})
        )
    (tmp_path / "config.json").write_text(
        json.dumps(
            {
                "env": "textcraft",
                "algorithm": "grpo",
                "rounds": [6, 10],
                "rounds_scheduler": "fixed",
            }
        )
    )
    assert plot(tmp_path) == tmp_path / "reward.png"
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
    names = {"metrics.jsonl", "timings.jsonl", "config.json", "eval", "reward.png"}
    assert {path.name for path in tmp_path.iterdir()} == names

    figure = drawn[0]
    assert figure.get_suptitle() == "textcraft · grpo · fixed 6 10   (12 steps)"
    lines = {line.get_label(): line for axis in figure.axes for line in axis.get_lines()}
    assert list(lines["avg@4, 95 % interval over tasks"].get_xdata()) == [6, 12]
    assert list(lines["horizon (max_rounds)"].get_ydata()) == [6] * 6 + [10] * 6
    assert list(lines["success"].get_xdata()) == [1, 2, 3, 5, 6, 7, 8, 9, 10, 11, 12]
    assert all(axis.get_xlabel() == "training step" for axis in figure.axes[:4])
    assert figure.axes[4].get_ylabel() == "KL (nats per token)"


def test_without_a_kl_term_there_is_no_empty_axis_for_it(tmp_path, drawn):
    with MetricsLogger(tmp_path) as logger:
        logger.log(1, {"policy/entropy": 0.5, "policy/kl": None})
    plot(tmp_path)
    assert len(drawn[0].axes) == 4


def test_a_run_without_any_step_still_draws(tmp_path):
    MetricsLogger(tmp_path).close()
    assert plot(tmp_path).stat().st_size > 1000


def test_estimates_are_drawn_in_percent_where_they_have_a_value(tmp_path, drawn):
    points = [{"turns": n, **estimate(n / 10)} for n in (2, 4)]
    points.insert(1, {"turns": 3, "value": None, "low": None, "high": None})
    path = tmp_path / "figures" / "curve.png"
    plot_estimates(path, [("base", BLUE, points)], "turns", ("turns", "solved, %"), "a note")
    assert [file.name for file in path.parent.iterdir()] == ["curve.png"]
    (axis,) = drawn[0].axes
    (line,) = axis.get_lines()
    assert (line.get_label(), line.get_color()) == ("base", BLUE)
    assert list(line.get_xdata()) == [2, 4]
    assert list(line.get_ydata()) == pytest.approx([20, 40])
    bars = [path.vertices[:, 1] for path in axis.collections[1].get_paths()]
    assert [list(bar) for bar in bars] == [pytest.approx([10, 30]), pytest.approx([30, 50])]
    assert (axis.get_xlabel(), axis.get_ylabel()) == ("turns", "solved, %")


def test_a_figure_that_fails_leaves_the_old_picture(tmp_path):
    path = tmp_path / "curve.png"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), figure(path, (2, 2)):
        raise ZeroDivisionError
    assert path.read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["curve.png"]


def test_the_running_mean_never_looks_ahead():
    assert running_mean([0.0] * 5 + [1.0] * 5, window=3)[:6] == [0.0] * 5 + [pytest.approx(1 / 3)]


def test_the_command_line_draws_and_refuses_misuse_in_one_line(tmp_path):
    with MetricsLogger(tmp_path) as logger:
        logger.log(1, {"train/return_mean": 0.5})

    def run(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "reporting.plots", *arguments],
            cwd=ROOT,
            capture_output=True,
            text=True,
        )

    assert run(str(tmp_path)).stdout.strip() == str(tmp_path / "reward.png")
    assert run().returncode == 2
    missing = run(str(tmp_path / "nowhere"))
    assert (missing.returncode, len(missing.stderr.splitlines())) == (1, 1)
