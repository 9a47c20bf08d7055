"""runtime/saved.py: options read back, for --resume and --config."""

import json
from dataclasses import asdict, replace

import pytest

import train
from config import Config, Misuse, complete, with_preset
from envs import id_lists
from run import shell
from runtime.cli import starting_from, training_options
from runtime.saved import OF_ONE_RUN, as_kept, check_goes_on, options_from, saved_config


def keep(folder, config):
    """What a run leaves."""
    folder.mkdir(exist_ok=True)
    file = folder / "config.json"
    file.write_text(json.dumps({"config": asdict(config), "versions": {}, "command": "train.py"}))
    return str(file)


def test_a_runs_options_are_the_defaults_of_the_next_and_the_command_line_wins(tmp_path):
    first = replace(complete(with_preset("laptop", "babyai")), seed=7, rounds=(2, 4), steps=9)
    file = keep(tmp_path / "run", replace(first, run_dir=str(tmp_path / "run"), resume=True))
    config = starting_from(["--config", file, "--steps", "3"])
    assert config == replace(first, config=file), "and neither its directory nor its --resume"
    argv = ["--config", file, "--steps", "3", "--rounds-scheduler", "scaling_inter_stepwise"]
    config = training_options(argv, "train.py", "")
    assert (config.seed, config.rounds, config.steps) == (7, (2, 4), 3)
    assert (config.env, config.tasks) == ("babyai", first.tasks)


def test_a_few_options_in_a_file_stand_on_the_preset_that_they_ask_for(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text('{"preset": "paper", "env": "babyai", "learning_rate": 3e-6}')
    config = starting_from(["--config", str(file)])
    assert config == replace(with_preset("paper", "babyai"), learning_rate=3e-6, config=str(file))
    assert starting_from(["--config", str(file), "--env", "sciworld"]).max_tokens_per_turn == 200


def test_every_option_comes_back_as_it_was(tmp_path):
    config = replace(
        with_preset("paper"),
        subtasks=("depth 1",),
        eval_subtasks=(),
        env_addr=("http://a:1",),
        kl_target=0.5,
        stop_at=0.9,
        algorithm="ppo",
        log_to=(),
    )
    values = options_from(keep(tmp_path, config))
    assert values == {n: v for n, v in asdict(config).items() if n not in OF_ONE_RUN}
    assert saved_config(str(tmp_path)) == replace(config, run_dir=str(tmp_path), resume=True)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "is not a run's config.json"),
        ("[]", "it holds no options"),
        ("{}", "it holds no options"),
        ("\xff", "is not a run's config.json"),
        ('{"config": {"depth_of_field": 3, "aperture": 1}}', "aperture, depth_of_field"),
        ('{"versions": {}, "git_commit": null}', "no option of this version"),
        ('{"steps": "ten"}', "steps 'ten'"),
        ('{"steps": 2.5}', "steps 2.5"),
        ('{"resume": 1}', "resume 1"),
        ('{"rounds": 6}', "rounds 6"),
        ('{"algorithm": "a2c"}', "algorithm 'a2c'"),
        ('{"env": null}', "env None"),
    ],
)
def test_a_file_that_holds_no_options_of_this_version_is_one_line(tmp_path, content, said):
    file = tmp_path / "config.json"
    file.write_text(content, encoding="latin-1")
    with pytest.raises(Misuse, match=said) as error:
        options_from(str(file))
    assert str(file) in str(error.value) and "\n" not in str(error.value)


def test_a_run_of_a_newer_version_is_not_resumed_with_its_options_dropped(tmp_path):
    (tmp_path / "config.json").write_text('{"config": {"seed": 1, "aperture": 2}}')
    with pytest.raises(Misuse, match=r"config\.json holds what is no option .* aperture"):
        saved_config(str(tmp_path))


@pytest.mark.parametrize("argv", [["--config", "x.json", "--preset", "none"], ["--config", "no"]])
def test_a_file_and_a_preset_exclude_each_other_and_a_file_must_be_there(argv):
    with pytest.raises(Misuse, match="--config"):
        starting_from(argv)


def test_a_resumed_run_takes_no_other_runs_options(tmp_path):
    file = keep(tmp_path / "run", complete(Config(model="tiny")))
    argv = ["--resume", "--run-dir", str(tmp_path / "run"), "--config", file]
    with pytest.raises(Misuse, match="leave out --config"):
        training_options(argv, "train.py", "")


def test_a_resumed_run_notices_another_prompt_and_takes_the_same_one(tmp_path):
    (tmp_path / "prompt").write_text("Craft it.")
    argv = ["--model", "tiny", "--prompt", str(tmp_path / "prompt")]
    first = training_options(argv, "train.py", "")
    keep(tmp_path / "run", first)
    again = ["--resume", "--run-dir", str(tmp_path / "run")]
    assert training_options(again, "train.py", "").prompt == first.prompt
    given = [*again, "--prompt", str(tmp_path / "prompt")]
    assert training_options(given, "train.py", "").prompt == first.prompt
    (tmp_path / "prompt").write_text("Craft it now.")
    with pytest.raises(Misuse, match="leave out --prompt"):
        training_options(given, "train.py", "")


def test_who_goes_on_further_than_meant_stretches_the_fall_of_the_rate_and_nothing_else(tmp_path):
    keep(tmp_path / "run", training_options(["--model", "tiny"], "train.py", ""))
    again = ["--resume", "--run-dir", str(tmp_path / "run"), "--steps", "600"]
    assert training_options(again, "train.py", "").learning_rate_decay_steps < 600
    stretched = training_options([*again, "--learning-rate-decay-steps", "600"], "train.py", "")
    assert (stretched.steps, stretched.learning_rate_decay_steps) == (600, 600)
    with pytest.raises(Misuse, match="leave out --learning-rate"):
        training_options([*again, "--learning-rate", "1e-3"], "train.py", "")


# --- From another folder -------------------------------------------------------------------------


@pytest.fixture
def two_folders(tmp_path, monkeypatch):
    """Two with files of the same names and other content; the first is where we are."""
    for name, index in (("here", 0), ("there", 5)):
        (tmp_path / name).mkdir()
        for file in ("ids.json", "held_out.json", "family_train", "textcraft_test.json"):
            (tmp_path / name / file).write_text(json.dumps([{"item_id": f"textcraft_{index}"}]))
            index += 1
        (tmp_path / name / "prompt.txt").write_text(f"Craft it {name}.")
    model = tmp_path / "here/model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "llama"}')
    (model / "model.safetensors").touch()
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here", tmp_path / "there"


FILES = ["--tasks", "ids.json", "--eval-tasks", "held_out.json", "--prompt", "prompt.txt"]


def test_a_run_that_goes_on_from_another_folder_reads_the_files_that_it_began_with(
    two_folders, monkeypatch
):
    here, there = two_folders
    argv = [*FILES, "--model", "model", "--warm-start", "./model"]
    first = training_options([*argv, "--preset", "laptop"], "train.py", "")
    assert (first.tasks, first.eval_tasks) == (f"{here}/ids.json", f"{here}/held_out.json")
    assert first.model == first.warm_start == f"{here}/model"
    keep(there / "run", first)
    monkeypatch.chdir(there)
    again = training_options(["--resume", "--run-dir", "run"], "train.py", "")
    assert again == replace(first, run_dir="run", resume=True)
    with pytest.raises(Misuse, match="leave out --tasks --prompt --eval-tasks, or"):
        training_options(["--resume", "--run-dir", "run", *FILES], "train.py", "")
    monkeypatch.chdir(here)
    given = ["--resume", "--run-dir", str(there / "run"), *argv]
    assert training_options(given, "train.py", "") == replace(again, run_dir=str(there / "run"))


def test_a_list_of_the_world_is_kept_by_its_name_and_a_file_by_its_path(two_folders):
    def kept(tasks):
        return as_kept(Config(tasks=tasks)).tasks

    here, _ = two_folders
    assert kept(str(id_lists("textcraft")["family_train"])) == "family_train"
    assert kept("family_test") == kept("textcraft_family_test.json") == "family_test"
    for file in ("family_train", "textcraft_test.json"):
        assert kept(file) == f"{here}/{file}", "there is such a file"
    for tasks in ("family_test", "ids.json"):
        once = as_kept(Config(tasks=tasks))
        assert as_kept(once) == once
    with pytest.raises(Misuse, match="nosuch.json: no such file"):
        kept("nosuch.json")


def test_a_file_with_the_name_of_the_worlds_list_is_not_read_in_its_place(two_folders, tmp_path):
    keep(tmp_path / "run", complete(Config(model="tiny", tasks="family_train")))
    with pytest.raises(Misuse, match="own list by --tasks family_train, and in this folder lies"):
        saved_config(str(tmp_path / "run"))
    (two_folders[0] / "family_train").unlink()
    assert saved_config(str(tmp_path / "run")).tasks == "family_train"


def test_from_python_too_a_runs_files_are_kept_by_their_whole_path(two_folders, monkeypatch):
    here, _ = two_folders
    seen = []

    def stop(config, make_worker):
        seen.append(config)
        raise Misuse("enough")

    monkeypatch.setattr(shell, "check_here", lambda config: None)
    monkeypatch.setattr(train, "at_work", stop)
    for resume in (False, True):
        with pytest.raises(Misuse, match="enough"):
            train.train(Config(tasks="ids.json", run_dir="run", resume=resume))
        keep(here / "run", seen[0])
    assert [config.tasks for config in seen] == [f"{here}/ids.json"] * 2
    with pytest.raises(Misuse, match="leave out --seed"):
        train.train(Config(tasks="ids.json", run_dir="run", resume=True, seed=1))


def test_a_run_is_not_told_to_end_before_where_it_is(tmp_path):
    for name in ("step_000010", "step_000020.bak"):  # the second is somebody's copy
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    config = replace(Config(), run_dir=str(tmp_path), resume=True)
    for steps in (10, 11):
        check_goes_on(replace(config, steps=steps))
    with pytest.raises(Misuse, match="--steps 9: 10 steps of this run are done; give 10 or more"):
        check_goes_on(replace(config, steps=9))
