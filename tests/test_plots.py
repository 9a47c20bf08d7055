"""reporting/plots.py: the figures contain the logged data, and nothing else."""

import json

import pytest

from reporting.metrics import MetricsLogger
from reporting.plots import plot, plot_evaluation


def estimate(value):
    return {"value": value, "low": value - 0.1, "high": value + 0.1}


@pytest.fixture
def saved_figures(monkeypatch):
    """The figures that a test saves."""
    from matplotlib.figure import Figure

    figures, savefig = [], Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *a, **k: (figures.append(self), savefig(self, *a, **k))
    )
    return figures


def test_an_evaluation_is_drawn_over_turns_and_over_samples(tmp_path, saved_figures):
    summary = {
        "samples": 2,
        "overall": {"items": 3},
        "rounds_curve": [{"max_rounds": n, "avg": estimate(n / 10)} for n in (2, 4)],
        "pass_curve": [{"k": k, **estimate(k / 4)} for k in (1, 2)],
    }
    missing = {"value": None, "low": None, "high": None}
    summary["rounds_curve"].insert(1, {"max_rounds": 3, "avg": missing})
    plot_evaluation(summary, tmp_path / "curves.png")
    turns_axis, samples_axis = saved_figures[0].axes
    assert list(turns_axis.get_lines()[0].get_xdata()) == [2, 4]
    assert list(samples_axis.get_lines()[0].get_ydata()) == [0.25, 0.5]
    bars = [path.vertices[:, 1] for path in turns_axis.collections[1].get_paths()]
    assert [list(bar) for bar in bars] == [pytest.approx([0.1, 0.3]), pytest.approx([0.3, 0.5])]


def test_the_plot_draws_the_logged_metrics(tmp_path, saved_figures):
    constants = {"train/turns_mean": 3.0, "train/groups": 4, "train/groups_zero_variance": 1}
    logger = MetricsLogger(tmp_path)
    for step in range(1, 13):
        row = {"train/return_mean": step / 12, "policy/entropy": 0.5, "policy/kl": 0.01 * step}
        row["train/success_rate"] = None if step == 4 else step / 12
        row["horizon/max_rounds"] = 6 if step <= 6 else 10
        logger.log(step, constants | row)
    (tmp_path / "eval").mkdir()
    for step, samples, avg, pass_rate in ((0, 1, 0.1, 0.1), (6, 4, 0.3, 0.8), (12, 4, 0.6, 0.8)):
        overall = {"avg": estimate(avg), "pass": estimate(pass_rate)}
        result = {"step": step, "samples": samples, "overall": overall}
        (tmp_path / "eval" / f"step_{step:06d}.json").write_text(json.dumps(result))
    options = {"env": "textcraft", "algorithm": "grpo", "rounds": [6, 10]}
    options["rounds_scheduler"] = "fixed"
    (tmp_path / "config.json").write_text(json.dumps({"config": options}))
    assert plot(tmp_path) == tmp_path / "reward.png"
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")
    names = {"metrics.jsonl", "timings.jsonl", "config.json", "eval", "reward.png"}
    assert {path.name for path in tmp_path.iterdir()} == names

    figure = saved_figures[0]
    assert figure.get_suptitle() == "textcraft · grpo · up to 6, 10 turns   (12 steps)"
    lines = {line.get_label(): line for axis in figure.axes for line in axis.get_lines()}
    assert list(lines["held-out tasks: avg@4, 95 % interval"].get_xdata()) == [0, 6, 12]
    # Step 0's evaluation drew one sample, so that it has no pass@4.
    assert list(lines["held-out tasks: pass@4"].get_ydata()) == [0.8, 0.8]
    assert list(lines["limit"].get_ydata()) == [6] * 6 + [10] * 6
    assert list(lines["training: success"].get_xdata()) == [1, 2, 3, 5, 6, 7, 8, 9, 10, 11, 12]
    assert list(lines["share of groups"].get_ydata()) == [0.75] * 12
    stages = {text.get_text().strip(): text.get_position()[0] for text in figure.axes[0].texts}
    assert stages == {"up to 6 turns": 0.5, "up to 10 turns": 6.5}
    assert all(axis.get_xlabel() == "training step" for axis in figure.axes[:4])
    assert list(lines["KL"].get_xdata()) == list(range(1, 13))


def test_equal_returns_and_successes_are_drawn_as_one_curve(tmp_path, saved_figures):
    MetricsLogger(tmp_path).log(1, {"train/return_mean": 0.5, "train/success_rate": 0.5})
    plot(tmp_path)
    axes = saved_figures[0].axes
    assert len(axes) == 4  # there is no KL axis, since no KL was logged
    assert axes[0].get_legend_handles_labels()[1] == ["training: return (bold: running mean)"]
    assert [axis.texts[0].get_text() for axis in axes[1:]] == ["no data yet"] * 3
