"""Options: defaults that fit the machine, what follows from what, and contradictions refused."""

import inspect
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import get_args, get_type_hints

import pytest

import config as config_module
from advantages import ESTIMATORS
from agentevol import EvolConfig
from config import (
    PAPER,
    SMALL_MODELS,
    Config,
    Objective,
    complete,
    options,
    preset_of,
    with_preset,
)
from dpo import DpoConfig
from envs import ENVS, get_env, load_tasks, settings_of
from runtime import checks, usage
from runtime.checks import check, remarks
from runtime.cli import parse_command_line, say_remarks, starting_from, training_options
from sft import SftConfig

ROOT = Path(__file__).parents[1]
CONTRACT = (
    "env tasks split subtasks env_addr model engine engine_url algorithm rounds_scheduler rounds "
    "steps_scaling_inter steps tasks_per_step group_size mini_batch_size ppo_epochs "
    "max_tokens_per_micro_batch max_tokens_per_turn max_trajectory_tokens temperature "
    "learning_rate critic_learning_rate clip_ratio gamma lam kl_coef kl_loss_coef kl_estimator "
    "entropy_coef sampler_is_cap skip_zero_variance max_sync_error eval_every eval_tasks "
    "eval_samples eval_rounds save_every keep_last run_dir resume seed deterministic record_state "
    "warm_start preset config prompt stop_at"
)


def help_text(capsys):
    with pytest.raises(SystemExit) as stop:
        parse_command_line(Config, ["--help"], "train.py")
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_the_promised_flags_exist():
    assert set(CONTRACT.split()) <= {field.name for field in fields(Config)}


def test_help_names_every_flag_with_its_meaning(capsys):
    text = help_text(capsys)
    for field in fields(Config):
        assert "--" + field.name.replace("_", "-") in text, field.name
    assert "[paper:" in text
    files = [(ROOT / name).read_text().splitlines() for name in ("config.py",)]
    lines = [line for file in files for line in file]
    for field in fields(Config):  # the docstring below a field is its help
        where = next(i for i, line in enumerate(lines) if line.startswith(f"    {field.name}: "))
        assert lines[where + 1].strip().startswith('"""'), field.name


@pytest.mark.parametrize("env", ENVS)
@pytest.mark.parametrize("preset", ["laptop", "paper", "none"])
def test_every_preset_passes_the_check_in_every_world(preset, env):
    config = complete(with_preset(preset, env))
    check(config)
    assert config.env == env
    assert load_tasks(config.env, config.split, config.tasks, config.subtasks)


@pytest.mark.parametrize("env", ENVS)
def test_the_short_tasks_of_an_environment_are_split_and_of_the_same_sub_tasks(env):
    config = complete(with_preset("laptop", env))
    train = load_tasks(env, None, config.tasks, config.subtasks)
    held_out = load_tasks(env, None, config.eval_tasks, config.subtasks)
    assert not {t.task_id for t in train} & {t.task_id for t in held_out}
    unseen = [t for t in held_out if t.subtask not in {task.subtask for task in train}]
    assert [t.subtask for t in unseen] == (["depth 3"] if env == "textcraft" else [])
    assert len(train) > len(held_out) > 40


@pytest.mark.parametrize(
    ("argv", "env"),
    [
        (["--env", "babyai", "--steps", "3"], "babyai"),
        (["--steps", "3", "--env=sciworld"], "sciworld"),
        (["--env-addr", "http://a:1"], "textcraft"),
        (["--env"], "textcraft"),
        ([], "textcraft"),
    ],
)
def test_the_environment_on_the_command_line_decides_the_defaults(argv, env):
    assert starting_from(argv).env == env


def test_a_flag_that_is_given_wins_over_the_environments_default():
    argv = ["--env", "sciworld", "--rounds", "3"]
    config = parse_command_line(Config, argv, "train.py", starting_from(argv))
    assert config.rounds == (3,)
    assert config.group_size == with_preset("laptop", "sciworld").group_size
    assert config.group_size != Config().group_size


def test_with_a_gpu_an_environment_has_the_papers_schedule_and_batch():
    shapes = {}
    for env in ("textcraft", "babyai", "sciworld"):
        config = with_preset("paper", env)
        shapes[env] = (config.rounds, config.tasks_per_step, config.group_size)
        assert config.learning_rate == PAPER["learning_rate"]
        assert config.mini_batch_size == 8 * config.group_size  # the paper counts tasks: 8
    assert shapes == {
        "textcraft": ((10, 20, 30), 32, 8),
        "babyai": ((6, 13, 20), 32, 4),
        "sciworld": ((10, 20, 30), 16, 8),
    }
    assert settings_of("textcraft").paper == {}  # PAPER is its own


def test_no_default_names_a_sub_task_that_the_environment_lacks():
    for env in ENVS:
        world, subtasks = get_env(env), settings_of(env).laptop.get("subtasks", ())
        assert set(subtasks) <= {world.subtask(index) for index in range(world.num_tasks())}


def test_with_a_gpu_the_defaults_are_the_papers():
    config = with_preset("paper")
    assert config == replace(Config(preset="paper"), **PAPER)
    assert (config.rounds, config.steps_scaling_inter) == ((10, 20, 30), 100)
    assert (config.learning_rate, config.kl_loss_coef) == (1e-6, 1e-3)
    assert config.evaluation_rounds == 30


@pytest.mark.parametrize("env", ["textcraft", "textcraft+babyai"])
def test_with_a_gpu_the_other_methods_have_rates_for_large_models(env):
    """As AgentGym's scripts have them (agentenv/examples/); a small model keeps its own."""
    names = ("learning_rate", "beta", "sft_coef")
    for kind, numbers in ((SftConfig, (1e-5,)), (EvolConfig, (1e-5,)), (DpoConfig, (5e-7, 0.5, 0))):
        large, small = (with_preset(preset, env, kind) for preset in ("paper", "laptop"))
        assert tuple(getattr(large, n) for n in names if hasattr(large, n)) == numbers
        assert small.learning_rate == kind.learning_rate >= 4 * large.learning_rate
        assert (large.steps, large.mini_batch_size) == (kind.steps, kind.mini_batch_size)
        said = " ".join(" ".join(inspect.getsource(each) for each in kind.__mro__[:-1]).split())
        for name, value in kind.large.items():
            assert getattr(large, name) == value
            number = f"{value:g}".replace("e-0", "e-") if isinstance(value, float) else value
            part = said[said.index(f" {name}: ") :]
            assert f"[paper: {number}]" in part[: part.index('""" ', part.index('"""') + 3)], name


def test_the_small_models_train_and_evaluate_on_families_that_do_not_overlap():
    config = complete(Config())
    train = load_tasks("textcraft", None, config.tasks, config.subtasks)
    held_out = load_tasks("textcraft", None, config.eval_tasks, config.subtasks)
    assert {task.subtask for task in train} == {"depth 1", "depth 2"}
    assert not {t.task_id for t in train} & {t.task_id for t in held_out}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"engine_url": ("http://a:1",), "engine_devices": ("2",)}, "exclude each other"),
        ({"engine_url": ("http://a:1",), "engine": "transformers"}, "leave out --engine trans"),
        ({"engine_devices": ("2",), "deterministic": True}, "leave out --deterministic"),
        ({"lora_rank": -1}, "--lora-rank -1 must not be negative"),
    ],
)
def test_engines_and_adapters_that_cannot_be_are_one_line(options, words):
    with pytest.raises(ValueError, match=words) as error:
        check(complete(Config(**options)))
    assert "\n" not in str(error.value)


def test_a_large_model_trains_on_the_environments_own_split():
    config = complete(Config(model="Qwen/Qwen2.5-3B-Instruct"))
    assert (config.tasks, config.split, config.subtasks) == (None, "train", ())


@pytest.mark.parametrize("given", [dict(tasks="mine.json"), dict(split="test")])
def test_named_tasks_are_taken_as_they_are(given):
    config = Config(**given, subtasks=("depth 2",))
    assert complete(config) == config


def test_what_complete_fills_in_it_does_not_change_again():
    """A resumed run completes the options that it saved."""
    for config in (Config(), Config(deterministic=True), with_preset("paper")):
        assert complete(complete(config)) == complete(config)


def test_deterministic_runs_sample_with_transformers():
    assert complete(Config(deterministic=True)).engine == "transformers"


def test_the_objective_takes_its_numbers_from_the_options():
    config = Config(clip_ratio=0.3, ppo_epochs=2, temperature=0.7, max_tokens_per_micro_batch=9)
    assert isinstance(config, Objective)
    assert {f.name for f in fields(Objective)} < {f.name for f in fields(Config)}
    assert config.num_optimizer_steps(65) == 4


def test_evaluation_has_the_longest_horizon_of_training_unless_told():
    assert Config(rounds=(3, 5, 9)).evaluation_rounds == 9
    assert Config(rounds=(3, 5, 9), eval_rounds=4).evaluation_rounds == 4


@pytest.mark.parametrize(
    "name",
    "steps tasks_per_step group_size mini_batch_size ppo_epochs max_tokens_per_micro_batch "
    "max_tokens_per_turn max_trajectory_tokens temperature learning_rate critic_learning_rate "
    "max_grad_norm clip_ratio value_clip max_sync_error eval_samples save_every keep_last".split(),
)
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_what_must_be_above_zero_says_so(name, value):
    flag = "--" + name.replace("_", "-")
    with pytest.raises(ValueError, match=f"^{flag} {value} must be above 0"):
        check(replace(Config(), **{name: value}))


@pytest.mark.parametrize(
    "changes",
    [
        dict(kl_coef=float("nan")),
        dict(entropy_coef=float("nan")),
        dict(learning_rate=float("inf")),
        dict(temperature=float("inf")),
        dict(eval_rounds=0),
        dict(eval_rounds=-1),
    ],
    ids=str,
)
def test_numbers_that_no_run_can_use_are_refused(changes):
    (name,) = changes
    with pytest.raises(ValueError, match="--" + name.replace("_", "-")):
        check(replace(Config(), **changes))


# --- Presets --------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(config_module, "has_gpu", lambda: True)


def test_a_card_brings_the_papers_settings(gpu):
    assert preset_of() == preset_of("Qwen/Qwen2.5-3B-Instruct") == "paper"
    assert starting_from([]) == options() == with_preset("paper")


@pytest.mark.parametrize("model", SMALL_MODELS)
def test_a_small_model_brings_its_settings_to_a_machine_with_a_card(gpu, model):
    config = starting_from(["--model", model])
    assert config == with_preset("laptop")
    chosen = options(model=model)
    assert (chosen.warm_start, chosen.learning_rate) == ("auto", Config.learning_rate)
    assert chosen.max_trajectory_tokens < 8192, "the positions that both models have"


def test_a_preset_that_is_named_wins_over_the_machine(gpu):
    argv = ["--preset", "laptop", "--env", "babyai"]
    assert starting_from(argv) == with_preset("laptop", "babyai")
    assert options("babyai", preset="laptop") == with_preset("laptop", "babyai")
    assert starting_from(["--preset=none", "--model", "tiny"]) == Config(preset="none")


def test_no_preset_is_each_options_own_default_in_every_world():
    for env in ENVS:
        assert with_preset("none", env) == Config(preset="none", env=env)
        assert complete(with_preset("none", env)).split == "train"


def test_tasks_that_are_named_replace_the_papers_split():
    assert complete(replace(with_preset("paper"), tasks="family_train")).split is None


def test_help_stands_under_the_topics_of_the_options_and_shows_the_presets_values(capsys):
    with pytest.raises(SystemExit):
        parse_command_line(Config, ["--help"], "train.py", with_preset("paper"))
    lines = capsys.readouterr().out.splitlines()
    topics = [line for line in lines if line[:1].isupper()]
    assert {"The world and its tasks", "The model", "The algorithm", "Limits"} <= set(topics)
    assert len(topics) < 12 and len(lines) < 200 and max(map(len, lines)) <= 100
    at = next(n for n, line in enumerate(lines) if line.startswith("  --max-tokens-per-turn"))
    assert "(default: 512)" in " ".join(lines[at : at + 2])


@pytest.fixture
def torch_for_a_card(tmp_path):
    """A folder with a torch that is made for a card, and cannot be imported; and the card."""
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text("raise ImportError('--help imported torch')")
    (tmp_path / "torch/version.py").write_text("cuda: Optional[str] = '12.8'\n")
    (tmp_path / "nvidia0").touch()
    return tmp_path


def test_the_choices_are_those_of_the_tables():
    assert get_args(get_type_hints(Config)["algorithm"]) == tuple(ESTIMATORS)
    assert {n for n, e in ESTIMATORS.items() if e.needs_group} == set(config_module.GROUPED)
    assert {n for n, e in ESTIMATORS.items() if e.needs_critic} == set(config_module.WITH_CRITIC)


def test_a_card_is_there_if_the_system_shows_it_and_torch_is_made_for_it(
    torch_for_a_card, monkeypatch, tmp_path_factory
):
    def found(is_there=True):
        where = torch_for_a_card if is_there else tmp_path_factory.mktemp("dev")
        return config_module.has_gpu(where)

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    origin = str(torch_for_a_card / "torch/__init__.py")
    spec = SimpleNamespace(origin=origin)
    monkeypatch.setattr(config_module.importlib.util, "find_spec", lambda name: spec)
    assert found() is True and found(is_there=False) is False
    for hidden in ("", "-1"):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert found() is False
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    assert found() is True
    (torch_for_a_card / "torch/version.py").write_text("cuda: Optional[str] = None\n")
    assert found() is False


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--rounds", "ten"], "--rounds ten: 'ten' does not do, expected whole numbers"),
        (["--rounds", "3", "6", "x"], "--rounds 3 6 x: 'x' does not do"),
        (["--seed", "x"], "--seed x: 'x' does not do, expected a whole number"),
        (["--gamma=x"], "--gamma x: 'x' does not do, expected a number"),
        (["--engine", "foo"], "expected one of vllm, transformers"),
        (["--seed"], "--seed takes one value (N), got none"),
        (["--model", "a", "b"], "--model takes one value (TEXT), got a b"),
        (["--resume", "yes"], "--resume takes no value, got yes"),
        (["--tasks-per-stepp", "3"], "there is no --tasks-per-stepp; did you mean --tasks-per-"),
        (["--no-seed"], "there is no --no-seed"),
        (["seed", "3"], "seed is no option; options begin with --"),
        (["--steps", "None"], "--steps"),
    ],
)
def test_what_cannot_be_read_is_a_sentence_that_names_it(argv, said, capsys):
    with pytest.raises(SystemExit) as stop:
        parse_command_line(Config, argv, "train.py")
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and said in err and "see --help" in err


# --- What is allowed and perhaps not meant --------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (SftConfig, ["--data"]),
        (DpoConfig, ["--data"]),
        (DpoConfig, ["--expert", "mine.jsonl", "--experience"]),
    ],
)
def test_a_run_of_another_world_to_learn_from_is_a_note(kind, words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.jsonl").touch()
    Path("a_run").mkdir()
    Path("a_run/config.json").write_text('{"config": {"env": "babyai"}}')
    for env, notes in (("textcraft", 1), ("babyai", 0)):
        argv = ["--model", "tiny", "--env", env, *words, "a_run"]
        say_remarks(training_options(argv, kind.program, "", kind), argv)
        lines = capsys.readouterr().out.splitlines()
        said = f"note: {words[-1]} {tmp_path / 'a_run'} played babyai, and this run plays {env}: "
        assert [line.startswith(said) for line in lines] == [True] * notes
    Path("a_run/config.json").write_text("[]")  # somebody else's file: no concern of this note
    say_remarks(training_options(argv, kind.program, "", kind), argv)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (
            "--rounds-scheduler scaling_inter_stepwise --rounds 2 4 --steps 100",
            "--rounds 2 4 reaches 4 turns after step 100, this run ends with step 100",
        ),
        ("--eval-every 0 --eval-samples 2 --eval-rounds 3", "--eval-samples --eval-rounds wait"),
        ("--mini-batch-size 65", "--mini-batch-size 65 is more than a step's 64 trajectories"),
        ("--split train --eval-tasks short_test", "85 of the 129 held-out tasks are also trained"),
    ],
)
def test_what_is_allowed_and_perhaps_not_meant_is_a_note(argv, said, capsys, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    argv = ["--model", "tiny", *argv.split()]
    say_remarks(training_options(argv, "train.py", ""), argv)
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("note: ") and said in line
    monkeypatch.setenv("RANK", "1")
    say_remarks(training_options(argv, "train.py", ""), argv)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "argv",
    [
        "",
        "--rounds-scheduler scaling_inter_stepwise --rounds 2 4 --steps 101",
        "--eval-every 1 --eval-samples 2",
        "--mini-batch-size 64",
        "--algorithm ppo --gamma 0.9 --lam 0.9 --value-clip 0.2",
        "--kl-loss-coef 0.1 --kl-estimator k2",
        "--deterministic --engine transformers",
    ],
)
def test_what_has_an_effect_passes_without_a_word(argv):
    argv = ["--model", "tiny", *argv.split()]
    assert remarks(training_options(argv, "train.py", ""), usage.named(Config, argv)) == []


def test_memory_that_may_not_suffice_is_a_note(monkeypatch):
    monkeypatch.setattr(checks, "check_room", lambda config: "memory may not suffice: ...")
    assert remarks(Config(model="tiny")) == ["memory may not suffice: ..."]


def test_the_evaluation_that_somebody_waits_for_is_the_smaller():
    config = Config(eval_samples=4)
    assert [config.samples_at(step) for step in (0, 20, 60)] == [1, 4, 4]
    assert replace(config, eval_start_samples=4).samples_at(0) == 4
    assert replace(config, eval_samples=1, eval_start_samples=3).samples_at(0) == 1
