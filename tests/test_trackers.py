"""reporting/trackers.py: a copy of each step's row and nothing else, one curve however often the
run was resumed, and no package that is not asked for."""

import importlib.machinery
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from toy_env import flags, options, read_metrics, serve, train_main

import config
from config import Config, Misuse
from reporting.metrics import GLOSSARY, MetricsLogger
from reporting.trackers import TrackerError, Trackers
from runtime.checks import check


class FakeRun:
    """What both modules hand out; `rows` outlives it, as a dashboard does."""

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
    """A module of that name: `runs`, what each init was given, and `rows`, what it has got."""
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


def steps_of(module):
    return [step for step, _ in module.rows]


def log_steps(run_dir, names, steps, resume_step=None, **config):
    """What a session does in each step; the logger, still open."""
    trackers = Trackers(names, run_dir, config, resume_step)
    logger = MetricsLogger(run_dir, resume_step, trackers=trackers)
    for step in steps:
        metrics = {"train/return_mean": step / 10, "policy/loss": float("nan")}
        logger.log(step, metrics)
        logger.show_step(step, metrics, {"time/step_s": 1.5})
    return logger


def test_a_row_holds_metrics_and_timings_and_what_is_no_number_is_left_out(tmp_path, fake):
    run_dir = tmp_path / "run"
    log_steps(run_dir, [fake.name], [1], env="textcraft", rounds=(2, 4)).close()
    ((step, row),) = fake.rows
    assert step == 1
    assert {k: v for k, v in row.items() if k != "step"} == {
        "train/return_mean": 0.1, "time/step_s": 1.5,
    }  # fmt: skip
    (run,) = fake.runs
    assert not run.is_open
    assert run.options["config"] == {"env": "textcraft", "rounds": [2, 4]}
    assert run.options["project"] == "agentgym-rl" and "run" in run.options["name"]


def test_nothing_of_the_machine_or_the_code_is_sent(tmp_path, fake):
    log_steps(tmp_path, [fake.name], []).close()
    options = fake.runs[0].options
    if fake.name == "wandb":
        settings = options["settings"]
        off = ("disable_git", "disable_code", "x_disable_meta", "x_disable_stats")
        assert all(getattr(settings, name) for name in (*off, "x_disable_machine_info"))
        assert (settings.save_code, settings.console) == (False, "off")
        assert settings.host == "hidden"
        assert not settings.x_save_requirements
    else:
        assert options["auto_log_cpu"] is options["auto_log_gpu"] is False


def test_a_resumed_run_goes_on_with_the_same_curve_and_repeats_nothing(tmp_path, fake):
    """Saved after step 2, killed after step 4, resumed, killed again, resumed."""
    log_steps(tmp_path, [fake.name], [1, 2, 3, 4]).close()
    log_steps(tmp_path, [fake.name], [3], resume_step=2).close()
    log_steps(tmp_path, [fake.name], [3, 4, 5, 6], resume_step=2).close()
    assert steps_of(fake) == [1, 2, 3, 4, 5, 6]
    names = {run.options.get("id", run.options["name"]) for run in fake.runs}
    assert len(names) == 1 and {run.options["resume"] for run in fake.runs} == {"allow"}


def test_steps_that_a_tracker_lacks_are_sent_from_the_log(tmp_path, fake):
    """It was not asked for at first, or the run was killed between logging a step and its row."""
    log_steps(tmp_path, [], [1, 2]).close()
    logger = log_steps(tmp_path, [], [], resume_step=2)
    logger.log(3, {"train/return_mean": 0.3})
    logger.close()
    log_steps(tmp_path, [fake.name], [4], resume_step=3).close()
    assert steps_of(fake) == [1, 2, 3, 4]
    assert [row["train/return_mean"] for _, row in fake.rows] == [0.1, 0.2, 0.3, 0.4]
    assert "time/step_s" in fake.rows[1][1] and "time/step_s" not in fake.rows[2][1]


def test_an_evaluation_made_up_for_joins_its_step(tmp_path, fake):
    logger = log_steps(tmp_path, [fake.name], [1, 2])
    logger.amend(2, {"eval/avg": 0.5})
    logger.close()
    assert steps_of(fake) == [1, 2, 2]
    assert fake.rows[-1][1]["eval/avg"] == 0.5


def test_a_tracker_that_fails_in_mid_run_is_left_out_with_one_line(
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
    assert lines == [f"--log-to {fake.name} failed and is left out: ConnectionError: gone"]


def test_a_tracker_that_does_not_start_is_one_line(tmp_path, fake):
    def refuse(**_):
        raise PermissionError("no key\nlog in first")

    fake.init = refuse
    with pytest.raises(TrackerError, match=f"--log-to {fake.name} does not start: .*no key log in"):
        Trackers([fake.name], tmp_path)


@pytest.mark.parametrize("content", ["", "[]", "{}"])
def test_a_broken_note_of_what_was_sent_is_named(tmp_path, fake, content):
    (tmp_path / "trackers.json").write_text(content)
    with pytest.raises(TrackerError, match=f"{tmp_path}/trackers.json is broken"):
        Trackers([fake.name], tmp_path)


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "trackio"])
def test_a_package_that_is_missing_is_misuse_with_the_command_that_installs_it(monkeypatch, name):
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    with pytest.raises(Misuse, match=f"--log-to {name} needs the package: pip install {name}"):
        check(config.complete(Config(log_to=(name,))))


def test_without_the_option_no_package_is_imported_and_no_file_is_written(tmp_path, fake):
    log_steps(tmp_path, [], [1]).close()
    assert fake.runs == [] and not (tmp_path / "trackers.json").exists()


def test_a_training_run_sends_each_step_and_its_options_and_a_resume_goes_on(tmp_path, fake):
    with serve() as url:
        settings = options(tmp_path, url, steps=1, log_to=(fake.name,))
        assert train_main(flags(**settings)) == 0
        run_dir = settings["run_dir"]
        assert train_main(["--resume", "--run-dir", run_dir, "--steps", "2"]) == 0
    assert steps_of(fake) == [1, 2]
    for (_, row), line in zip(fake.rows, read_metrics(run_dir), strict=True):
        assert set(row) - {"step"} <= set(GLOSSARY)
        assert line.items() - {("step", line["step"])} <= row.items() | {
            (k, v) for k, v in line.items() if v is None
        }
    saved = json.loads((Path(run_dir) / "config.json").read_text())["config"]
    assert fake.runs[1].options["config"] == saved


# --- The real one --------------------------------------------------------------------------------


def test_tensorboard_reads_one_curve_back(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log_steps(tmp_path, ["tensorboard"], [1, 2, 3, 4], env="textcraft").close()
    log_steps(tmp_path, ["tensorboard"], [3, 4, 5], resume_step=2).close()
    events = accumulator.EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    drawn = [(e.step, e.value) for e in events.Scalars("train/return_mean")]
    assert drawn == [(n, pytest.approx(n / 10)) for n in range(1, 6)]
    assert "policy/loss" not in events.Tags()["scalars"]
    (text, *_) = events.Tensors("config/text_summary")
    assert b"textcraft" in text.tensor_proto.string_val[0]
