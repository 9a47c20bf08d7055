"""evaluate.py --run: a run of train.py is measured as it measures itself."""

import json
from dataclasses import asdict, replace

import pytest

from config import Config, complete
from envs import load_tasks
from reporting.evalconfig import as_in_run, evaluation_options, trained_on


def a_run(folder, **options):
    """What a run leaves that an evaluation asks for."""
    config = complete(replace(Config(), env="textcraft", model="tiny", rounds=(3, 5), **options))
    (folder / "checkpoints" / "step_000002").mkdir(parents=True)
    (folder / "checkpoints" / "step_000004").mkdir()
    (folder / "config.json").write_text(json.dumps({"config": asdict(config)}))
    return config


def test_a_run_is_measured_as_it_measures_itself(tmp_path):
    config = a_run(tmp_path, prompt='[{"role": "system", "content": "Craft."}]')
    own = as_in_run(str(tmp_path), set())
    assert own.model.endswith("checkpoints/step_000004") and own.max_rounds == (5,)
    assert (own.env, own.prompt, own.tasks) == ("textcraft", config.prompt, "short_test")
    assert own.subtasks == ()
    for name in ("max_tokens_per_turn", "max_trajectory_tokens", "temperature", "engine"):
        assert getattr(own, name) == getattr(config, name)
    (tmp_path / "checkpoints" / "best").symlink_to("step_000002")
    assert as_in_run(str(tmp_path), set()).model.endswith("checkpoints/best")


def test_a_runs_seed_and_samples_are_the_evaluations(tmp_path):
    a_run(tmp_path, seed=7, eval_samples=4)
    own = as_in_run(str(tmp_path), set())
    assert (own.seed, own.samples) == (7, 4)


def test_another_world_than_the_runs_has_its_own_words_and_turns(tmp_path):
    a_run(tmp_path, prompt='[{"role": "system", "content": "Craft."}]')
    other = as_in_run(str(tmp_path), {"env"}, "babyai")
    assert (other.env, other.prompt, other.max_rounds, other.tasks) == ("babyai", None, (), None)
    own = as_in_run(str(tmp_path), {"env"}, "textcraft")  # named or not, the same tasks
    assert own == as_in_run(str(tmp_path), set())


def test_a_run_without_held_out_tasks_is_measured_on_those_it_trains_on(tmp_path):
    a_run(tmp_path, eval_every=0, eval_tasks=None, tasks="family_train", subtasks=("depth 2",))
    own = as_in_run(str(tmp_path), set())
    assert (own.tasks, own.subtasks) == ("family_train", ("depth 2",))
    known = load_tasks("textcraft", None, own.tasks, own.subtasks)
    assert trained_on(own, known) == len(known) > 0  # and replay.py calls them so
    others = [task for task in load_tasks("textcraft", "test") if task not in known]
    assert trained_on(own, [*others, known[0]]) == 1
    assert trained_on(replace(own, run=None), known) == 0


def test_what_is_given_beside_a_run_wins(tmp_path, monkeypatch):
    a_run(tmp_path)
    monkeypatch.setattr("reporting.evalconfig.check_model", lambda *_: None)
    monkeypatch.setattr("reporting.evalconfig.check_length", lambda *_: None)
    words = ["--run", str(tmp_path), "--split", "test", "--max-rounds", "7", "9"]
    config = evaluation_options(words, "evaluate.py")
    assert (config.tasks, config.split, config.subtasks) == (None, "test", ())
    assert config.max_rounds == (7, 9) and config.max_tokens_per_turn == 80


def test_a_folder_that_is_no_run_or_has_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"--run \S+ holds no run"):
        as_in_run(str(tmp_path), set())
    a_run(tmp_path)
    for folder in (tmp_path / "checkpoints").iterdir():
        folder.rmdir()
    with pytest.raises(ValueError, match="has no checkpoint yet"):
        as_in_run(str(tmp_path), set())


@pytest.mark.parametrize(
    ("method", "name", "is_known"),
    [("sft", "data", False), ("dpo", "pairs", False), ("agentevol", "data", True)],
)
def test_a_run_that_files_teach_has_not_seen_its_worlds_training_list(
    tmp_path, method, name, is_known
):
    """Its options name the list all the same."""
    a_run(tmp_path, tasks="family_train")
    saved = json.loads((tmp_path / "config.json").read_text())
    saved = {"method": method, "config": saved["config"] | {name: ["mine.jsonl"]}}
    (tmp_path / "config.json").write_text(json.dumps(saved))
    known = load_tasks("textcraft", None, "family_train", ())
    assert trained_on(as_in_run(str(tmp_path), set()), known) == (len(known) if is_known else 0)
