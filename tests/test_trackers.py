"""reporting/trackers.py: trackers receive each step's row and nothing else, and a resumed run
continues its curve. Packages that no option names are not imported."""

import importlib.machinery
import sys
from types import ModuleType, SimpleNamespace

import pytest

from reporting.metrics import MetricsLogger
from reporting.trackers import TrackerError, Trackers


class FakeRun:
    """The run object that both fake modules return; `rows` is kept after it ends."""

    def __init__(self, rows, options):
        self.rows, self.options, self.is_open = rows, options, True

    def define_metric(self, name, step_metric):
        self.options["x"] = (name, step_metric)

    def log(self, row, step=None):
        assert self.is_open
        self.rows.append((row["step"] if step is None else step, row))

    def finish(self):
        self.is_open = False


@pytest.fixture(params=["wandb", "trackio"])
def fake(request, monkeypatch):
    """A fake module of that name. `runs` records the arguments of each init; `rows`, all rows."""
    module = ModuleType(request.param)
    module.__spec__ = importlib.machinery.ModuleSpec(request.param, None)
    module.name, module.runs, module.rows = request.param, [], []
    module.Settings = lambda **settings: SimpleNamespace(**settings)

    def init(**options):
        module.runs.append(FakeRun(module.rows, options))
        return module.runs[-1]

    module.init = init
    monkeypatch.setitem(sys.modules, request.param, module)
    return module


def log_steps(run_dir, names, steps, resume_step=None, **config):
    """Log steps as a session does; returns the open logger."""
    trackers = Trackers(names, run_dir, config, resume_step)
    logger = MetricsLogger(run_dir, resume_step, trackers=trackers)
    for step in steps:
        metrics = {"train/return_mean": step / 10, "policy/loss": float("nan")}
        logger.log(step, metrics)
        logger.show_step(step, metrics, {"time/step_s": 1.5})
    return logger


def test_a_row_has_metrics_and_timings_but_only_values_that_are_numbers(tmp_path, fake):
    run_dir = tmp_path / "run"
    log_steps(run_dir, [fake.name], [1], env="textcraft", rounds=(2, 4)).close()
    ((step, row),) = fake.rows
    assert step == 1
    assert row | {"step": 1} == {"step": 1, "train/return_mean": 0.1, "time/step_s": 1.5}
    (run,) = fake.runs
    assert not run.is_open
    assert run.options["config"] == {"env": "textcraft", "rounds": [2, 4]}
    assert run.options["project"] == "agentgym-rl" and "run" in run.options["name"]
    if fake.name == "wandb":  # nothing about the machine or the code is sent
        settings = run.options["settings"]
        assert settings.disable_git and settings.disable_code and settings.x_disable_machine_info


def test_a_resumed_run_continues_the_same_curve(tmp_path, fake):
    """An evaluation that is repeated after a resume is added to its step."""
    log_steps(tmp_path, [fake.name], [1, 2]).close()
    logger = log_steps(tmp_path, [fake.name], [3], resume_step=2)
    logger.amend(3, {"eval/avg": 0.5})
    logger.close()
    assert [step for step, _ in fake.rows] == [1, 2, 3, 3]
    assert fake.rows[-1][1]["eval/avg"] == 0.5
    names = {run.options.get("id", run.options["name"]) for run in fake.runs}
    assert len(names) == 1 and {run.options["resume"] for run in fake.runs} == {"allow"}


def test_a_tracker_that_fails_prints_one_line_and_the_run_continues_without_it(
    tmp_path, fake, monkeypatch, capsys
):
    logger = log_steps(tmp_path, [fake.name], [1])

    def fail(*_, **__):
        raise ConnectionError("gone")

    monkeypatch.setattr(FakeRun, "log", fail)
    capsys.readouterr()
    for step in (2, 3):
        logger.show_step(step, {"train/return_mean": 0.5}, {})
    logger.close()
    lines = [x for x in capsys.readouterr().out.splitlines() if "log-to" in x]
    assert lines == [f"--log-to {fake.name} failed and is now off: ConnectionError: gone"]
    fake.init = fail
    with pytest.raises(TrackerError, match=f"--log-to {fake.name} cannot start: .*gone"):
        Trackers([fake.name], tmp_path, {})
