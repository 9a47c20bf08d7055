"""What a run says of itself while it works: what will happen, what is happening, how long yet."""

import contextlib
import re
from types import SimpleNamespace

import pytest
from toy_env import flags, fresh_process_state, options, serve, train_main

import evaluate
import warmstart
from envs import load_tasks
from evaluate import EvalConfig
from reporting import metrics
from run import progress as phases


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """A run of three steps, resumed to a fourth: for each what it printed, and headings and phases
    in their order."""
    tmp_path = tmp_path_factory.mktemp("said")
    log, out = [], []
    with pytest.MonkeyPatch.context() as patch:
        heading, init = phases.heading, phases.Phase.__init__

        def note_phase(self, label, *rest):
            log.append(label)
            init(self, label, *rest)

        def note_heading(text):
            log.append(text)
            heading(text)

        patch.setattr(phases, "heading", note_heading)
        patch.setattr(phases.Phase, "__init__", note_phase)
        patch.setattr(metrics, "plot", lambda run_dir: None)
        patch.setattr("builtins.print", lambda *words, **_: out.append(" ".join(map(str, words))))
        with serve() as url:
            first = options(tmp_path, url, steps=3, eval_every=2, eval_samples=1, ppo_epochs=2)
            for settings in (first, first | {"steps": 4, "resume": True}):
                log.append("a run")
                out.append("a run")
                assert train_main(flags(**settings)) == 0
    return tmp_path / "run", log, out


def runs_of(lines):
    """The lines of each run."""
    second = lines.index("a run", 1)
    return lines[1:second], lines[second + 1 :]


def test_its_first_lines_say_what_will_happen(said):
    run_dir, _, out = said
    note, *lines = runs_of(out)[0]
    assert note.startswith("note: 8 of the 8 held-out tasks are also trained on")
    assert lines[0].startswith("run: 3 steps of grpo, each of 2 tasks x 2 samples, at most 2 turns")
    assert lines[0].endswith(str(run_dir))
    assert lines[2].startswith("tasks: 8 of letters to train on; 8 held out, 1 samples of each")


def test_whatever_takes_long_is_a_phase_of_a_step(said):
    first, _ = runs_of(said[1])
    assert first[:4] == [
        "loading the models",
        "starting the sampler",
        "step 0/3",
        "held-out evaluation",
    ]
    steps = [n for n, label in enumerate(first) if label.startswith("step ") and n > 2]
    assert first[steps[0] + 1 : steps[1]] == [
        *("rollout", "log-probs", "update", "weight sync", "saving")
    ]
    assert "held-out evaluation" in first[steps[1] : steps[2]]
    assert first[-1] == ""  # whatever comes next in this process is no part of the run


def test_from_the_second_step_on_it_says_how_long_it_takes_and_resumed_from_the_first(said):
    first, second = (
        [label for label in lines if label.startswith("step ")] for lines in runs_of(said[1])
    )
    assert first[:2] == ["step 0/3", "step 1/3"]
    patterns = [rf"step {n}/3, [\d.]+ (s|min) left" for n in (2, 3)]
    assert all(map(re.fullmatch, patterns, first[2:]))
    assert len(first) == 4
    assert [bool(re.fullmatch(r"step 4/4, [\d.]+ (s|min) left", line)) for line in second] == [True]


def test_the_row_of_a_step_says_which_of_how_many_and_how_long_yet(said):
    rows = [line.split() for line in said[2] if re.match(r" +\d+/\d ", line)]
    assert [row[0] for row in rows] == ["1/3", "2/3", "3/3", "4/4"]
    assert [row[-1] for row in rows][2:] == ["-", "-"]
    assert all(row[-1] in ("s", "min") for row in rows[:2])


def test_an_evaluation_by_hand_is_a_phase_that_counts_episodes(monkeypatch, tmp_path):
    shown = []

    @contextlib.contextmanager
    def playing(label, total):
        shown.append((label, total))
        yield shown.append

    episode = SimpleNamespace(trajectory_id="s000000-t0000-k00", success=True)
    episode.to_json, episode.first_state, episode.turns = lambda: "{}\n", None, []
    monkeypatch.setattr(evaluate, "playing", playing)
    monkeypatch.setattr(evaluate, "summarize", lambda *_, **__: {})
    monkeypatch.setattr(evaluate, "plot_evaluation", lambda *_: None)
    pool = SimpleNamespace(env="textcraft")
    config = EvalConfig(env="textcraft", samples=3, model="tiny")
    tasks = load_tasks("textcraft", "test")[:2]
    evaluate.measure(config, lambda *words: words[-1](episode), pool, tasks, tmp_path)
    assert shown == [("evaluation in textcraft", 6), episode]


def test_a_warm_start_shows_its_server_its_demonstrations_and_its_steps(monkeypatch, tmp_path):
    shown, init = [], phases.Phase.__init__

    def note(self, *words):
        shown.append(self)
        init(self, *words)

    monkeypatch.setattr(phases.Phase, "__init__", note)
    monkeypatch.setenv("AGENT_RL_CACHE", str(tmp_path / "cache"))  # nothing was played before
    argv = ["--model", "tiny", "--num-demonstrations", "4", "--epochs", "1", "--batch-size", "2"]
    with fresh_process_state():
        assert warmstart.command_line([*argv, "--out", str(tmp_path / "warm")]) == 0
    assert [(phase.label, phase.done, phase.total) for phase in shown] == [
        ("starting a server of textcraft", 0, None),
        ("demonstrations", 4, 4),
        ("warm start", 2, 2),
    ]
    assert re.fullmatch(r"\d+\.\d{3}", shown[-1].figures["loss"])
