"""config.py: defaults that fit the machine, one line for a mistake, options kept and read back."""

import json
import subprocess
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import get_args, get_type_hints

import pytest
import torch

import agentevol
import config as config_module
import dpo
import evaluate
import sft
import train
from advantages import ESTIMATORS
from agentevol import EvolConfig
from config import (
    PAPER,
    USED_BY,
    Config,
    Misuse,
    RunConfig,
    as_kept,
    checked,
    complete,
    notes,
    options,
    options_from,
    parse_command_line,
    preset_of,
    prompt_of,
    read_command_line,
    saved_config,
    with_preset,
    with_prompt,
)
from dpo import DpoConfig
from envs import ENVS, get_env, id_lists, load_tasks, settings_of
from scale import default_models
from scale.default_models import SMALL_MODELS
from sft import SftConfig

ROOT = Path(__file__).parents[1]
CONTRACT = (
    "env tasks split subtasks env_addr model engine engine_url algorithm rounds_scheduler rounds "
    "steps_scaling_inter steps tasks_per_step group_size mini_batch_size ppo_epochs "
    "max_tokens_per_micro_batch max_tokens_per_turn max_trajectory_tokens temperature "
    "learning_rate critic_learning_rate clip_ratio gamma lam kl_coef kl_loss_coef kl_estimator "
    "entropy_coef sampler_is_cap skip_zero_variance max_sync_error eval_every eval_tasks "
    "eval_samples eval_rounds save_every keep_last run_dir resume seed deterministic record_state "
    "warm_start preset config prompt stop_at precision log_to lora_rank engine_devices on_collapse "
    "shuffle_rewards gradient_checkpointing share_prefix"
)


def asked(words, kind=Config):
    """The options that a command line asks for, checked."""
    words = words.split() if isinstance(words, str) else words
    return checked(read_command_line(words, kind)[0])


# --- What there is to set -------------------------------------------------------------------------


def test_the_promised_flags_exist_and_help_explains_each(capsys):
    assert set(CONTRACT.split()) <= {field.name for field in fields(Config)}
    with pytest.raises(SystemExit) as stop:
        parse_command_line(Config, ["--help"], "train.py", with_preset("paper"))
    text = capsys.readouterr().out
    assert stop.value.code == 0
    source = (ROOT / "config.py").read_text().splitlines()
    for field in fields(Config):
        assert "--" + field.name.replace("_", "-") in text, field.name
        where = next(i for i, line in enumerate(source) if line.startswith(f"    {field.name}: "))
        assert source[where + 1].strip().startswith('"""'), field.name
    assert "[paper:" in text and f"(default: {PAPER['max_tokens_per_turn']})" in text


def test_the_choices_are_those_of_the_tables():
    assert get_args(get_type_hints(Config)["algorithm"]) == tuple(ESTIMATORS)
    assert {n for n, e in ESTIMATORS.items() if e.needs_group} == set(config_module.GROUPED)
    assert {n for n, e in ESTIMATORS.items() if e.needs_critic} == set(config_module.WITH_CRITIC)
    batch = SimpleNamespace(
        token_rewards=torch.tensor([[0.0, 1.0], [0.0, 3.0]]),
        values=torch.tensor([[0.5, 0.0], [0.0, 0.5]]),
        loss_mask=torch.ones(2, 2),
        group_ids=torch.zeros(2, dtype=torch.int64),
    )
    for option, discounts in {"gamma": (0.5, 1.0), "lam": (1.0, 0.5)}.items():
        for name, estimator in ESTIMATORS.items():
            plain, changed = (estimator.estimate(batch, *d)[0] for d in ((1.0, 1.0), discounts))
            assert torch.equal(plain, changed) == (name not in USED_BY[option]), (name, option)


# --- Defaults -------------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch):
    monkeypatch.setattr(config_module, "has_gpu", lambda: True)


@pytest.mark.parametrize("env", ENVS)
@pytest.mark.parametrize("preset", ["laptop", "paper", "none"])
def test_every_preset_passes_the_check_in_every_environment(preset, env):
    config = complete(with_preset(preset, env))
    config.check()
    assert config.env == env
    assert load_tasks(config.env, config.split, config.tasks, config.subtasks)


@pytest.mark.parametrize("env", ENVS)
def test_the_short_tasks_of_an_environment_are_split_and_of_the_same_sub_tasks(env):
    config = complete(with_preset("laptop", env))
    train_tasks = load_tasks(env, None, config.tasks, config.subtasks)
    held_out = load_tasks(env, None, config.eval_tasks, config.subtasks)
    assert not {t.task_id for t in train_tasks} & {t.task_id for t in held_out}
    unseen = [t for t in held_out if t.subtask not in {task.subtask for task in train_tasks}]
    assert [t.subtask for t in unseen] == (["depth 3"] if env == "textcraft" else [])
    assert len(train_tasks) > len(held_out) > 40


def test_no_default_names_a_sub_task_that_the_environment_lacks():
    for env in ENVS:
        world, subtasks = get_env(env), settings_of(env).laptop.get("subtasks", ())
        assert set(subtasks) <= {world.subtask(index) for index in range(world.num_tasks())}


@pytest.mark.parametrize(
    ("argv", "env"),
    [
        ("--env babyai --steps 3", "babyai"),
        ("--steps 3 --env=sciworld", "sciworld"),
        ("--env-addr http://a:1", "textcraft"),
        ("--env textcraft babyai --resume", "textcraft+babyai"),
        ("", "textcraft"),
    ],
)
def test_the_environment_on_the_command_line_decides_the_defaults(argv, env):
    config, _ = read_command_line(argv.replace("--resume", "--seed 1").split())
    changes = {name: getattr(config, name) for name in ("steps", "seed", "env_addr")}
    assert config == replace(with_preset("laptop", env), **changes)


def test_a_flag_that_is_given_wins_over_the_environments_default():
    config, _ = read_command_line(["--env", "sciworld", "--rounds", "3"])
    assert config.rounds == (3,)
    assert config.group_size == with_preset("laptop", "sciworld").group_size != Config.group_size


def test_the_paper_preset_has_the_papers_schedule_and_batch():
    assert with_preset("paper") == replace(Config(preset="paper"), **PAPER)
    shapes = {}
    for env in ("textcraft", "babyai", "sciworld"):
        config = with_preset("paper", env)
        shapes[env] = (config.rounds, config.tasks_per_step, config.group_size)
        assert config.mini_batch_size == 8 * config.group_size  # the paper counts tasks: 8
    assert shapes == {
        "textcraft": ((10, 20, 30), 32, 8),
        "babyai": ((6, 13, 20), 32, 4),
        "sciworld": ((10, 20, 30), 16, 8),
    }


@pytest.mark.parametrize("env", ["textcraft", "textcraft+babyai"])
def test_with_a_gpu_the_other_methods_have_rates_for_large_models(env):
    """As AgentGym's scripts have them (agentenv/examples/); a small model keeps its own."""
    names = ("learning_rate", "beta", "sft_coef")
    for kind, numbers in ((SftConfig, (1e-5,)), (EvolConfig, (1e-5,)), (DpoConfig, (5e-7, 0.5, 0))):
        large, small = (with_preset(preset, env, kind) for preset in ("paper", "laptop"))
        assert tuple(getattr(large, n) for n in names if hasattr(large, n)) == numbers
        assert small.learning_rate == kind.learning_rate >= 4 * large.learning_rate
        assert (large.steps, large.mini_batch_size) == (kind.steps, kind.mini_batch_size)


def test_a_gpu_brings_the_papers_settings_and_a_small_model_its_own(gpu):
    assert preset_of() == preset_of("Qwen/Qwen2.5-3B-Instruct") == "paper"
    assert read_command_line([])[0] == options() == with_preset("paper")
    for model in SMALL_MODELS:
        config, _ = read_command_line(["--model", model])
        assert config == options(model=model) == replace(with_preset("laptop"), model=model)


def test_a_preset_that_is_named_wins_over_the_machine(gpu):
    config, _ = read_command_line(["--preset", "laptop", "--env", "babyai"])
    assert config == options("babyai", preset="laptop") == with_preset("laptop", "babyai")
    for env in ENVS:  # none: each option's own default
        assert with_preset("none", env) == Config(preset="none", env=env)
        assert complete(with_preset("none", env)).split == "train"


def test_lists_follow_from_the_model_unless_tasks_are_named():
    short = complete(Config())
    assert (short.tasks, short.split) == ("short_train", None)
    large = complete(Config(model="Qwen/Qwen2.5-3B-Instruct"))
    assert (large.tasks, large.split, large.subtasks) == (None, "train", ())
    for given in (dict(tasks="mine.json"), dict(split="test")):
        config = Config(**given, subtasks=("depth 2",))
        assert complete(config) == config
    assert complete(replace(with_preset("paper"), tasks="family_train")).split is None


def test_what_complete_fills_in_it_does_not_change_again():
    """A resumed run completes the options that it saved."""
    for config in (Config(), Config(deterministic=True), with_preset("paper")):
        assert complete(complete(config)) == complete(config)
    assert complete(Config(deterministic=True)).engine == "transformers"


def test_evaluation_has_the_longest_horizon_and_fewer_samples_at_the_start():
    config = Config(rounds=(3, 5, 9), eval_samples=4)
    assert (config.evaluation_rounds, replace(config, eval_rounds=4).evaluation_rounds) == (9, 4)
    assert [config.samples_at(step) for step in (0, 20, 60)] == [1, 4, 4]
    assert replace(config, eval_samples=1, eval_start_samples=3).samples_at(0) == 1


# --- Misuse: exit code 2, one line on stderr, nothing left behind ---------------------------------

FILES = {
    "ids.json": '[{"item_id": "textcraft_0"}]',
    "twice.json": '[{"item_id": "textcraft_0"}, {"item_id": "textcraft_0"}]',
    "babyai_ids.json": '[{"item_id": "babyai_3"}]',
    "beyond.json": '[{"item_id": "textcraft_999999"}]',
    "empty.json": "[]",
    "object.json": '{"a": 1}',
    "broken.json": '[{"item_id"',
    "user.json": '[{"role": "user", "content": "Craft it."}]',
    "newer.json": '{"config": {"seed": 1, "aperture": 8}}',
    "steps.json": '{"config": {"steps": "ten"}}',
    "run/config.json": '{"config": {"seed": 3, "model": "tiny"}}',
    "damaged/config.json": "{",
    "model/config.json": '{"model_type": "llama"}',
    "empty": "",
}
STEPWISE = "--rounds-scheduler scaling_inter_stepwise"
# A program's words -> what its line must name.
TRAIN = {
    # cannot be read
    "--steps ten": "--steps",
    "--rounds 3 x": "--rounds",
    "--seed": "--seed",
    "--seed 1 2": "2",
    "--algorithm a2c": "--algorithm",
    "--no-seed": "--no-seed",
    "--tasks-per-stepp 3": "did you mean --tasks-per-step?",
    "textcraft": "textcraft",
    "--split dev": "--split",
    # out of range
    "--temperature inf": "--temperature inf",
    "--learning-rate nan": "--learning-rate nan",
    "--gamma 1.5 --algorithm ppo": "--gamma 1.5",
    "--seed -1": "--seed -1",
    "--kl-coef -0.1": "--kl-coef -0.1",
    "--sampler-is-cap 0.5": "--sampler-is-cap 0.5",
    "--eval-rounds 0": "--eval-rounds 0",
    "--stop-at nan": "--stop-at nan",
    "--keep-last 0": "--keep-last 0",
    # contradictions
    "--group-size 1": "--group-size 1",
    "--max-tokens-per-turn 2000": "--max-tokens-per-turn 2000",
    "--kl-target 0.1": "--kl-target",
    "--kl-loss-coef 0.1 --kl-estimator k1": "--kl-estimator k1",
    "--rounds 3 6": "--rounds 3 6",
    f"--rounds 6 3 {STEPWISE}": "--rounds 6 3",
    STEPWISE: "never changes",
    "--rounds 0": "--rounds 0",
    "--rounds": "--rounds",
    f"--rounds 3 6 {STEPWISE} --steps-scaling-inter 0": "--steps-scaling-inter 0",
    "--engine-url http://a:1 --engine-devices 0": "--engine-url and --engine-devices",
    "--engine-url http://a:1 --engine transformers": "leave out --engine transformers",
    "--engine-devices 0 --deterministic": "leave out --deterministic",
    "--engine-devices 0 0": "--engine-devices 0 0",
    "--stop-at 0.9 --eval-every 0": "--stop-at",
    "--resume": "--resume needs --run-dir",
    # environments and tasks
    "--env minecraft": "unknown environment 'minecraft'",
    "--env nosuch.module:World": "nosuch",
    "--env json:JSONDecoder": "the class lacks",
    "--tasks nosuch.json": "nosuch.json",
    "--tasks empty.json": "empty.json",
    "--tasks object.json": "object.json",
    "--tasks broken.json": "broken.json",
    "--tasks twice.json": "twice.json",
    "--tasks beyond.json": "beyond.json",
    "--tasks babyai_ids.json": "babyai_ids.json",
    "--tasks .": "id list .",
    "--subtasks prime": "prime",
    "--eval-tasks nosuch.json": "nosuch.json",
    "--eval-subtasks prime": "prime",
    "--env-addr localhost": "--env-addr",
    "--env-addr http://a:1 http://a:1": "--env-addr http://a:1 http://a:1",
    "--env-addr local http://a:1": "--env-addr local",
    "--env sciworld --env-addr local": "--env-addr local: sciworld",
    "--engine-url a:1": "--engine-url",
    "--env textcraft textcraft": "twice",
    "--env textcraft nix": "unknown environment 'nix'",
    "--env textcraft babyai --tasks train": "--tasks belongs to one environment",
    "--env textcraft babyai --env-weights 1": "--env-weights 1",
    "--env textcraft babyai --env-weights 1 0": "--env-weights 1 0",
    "--env textcraft --env-weights 2": "--env-weights 2",
    "--env textcraft babyai --env-addr http://a:1": "say whose it is, textcraft=http://host",
    "--env textcraft babyai --env-addr babyai=nix": "is not an address",
    f"--env textcraft babyai {STEPWISE}": "never changes",
    # models
    "--model qwen2.5-3b": "--model qwen2.5-3b",
    "--model run": "--model run",
    "--model model": "holds no weights",
    "--warm-start nosuch": "--warm-start nosuch",
    "--warm-start model": "--warm-start model",
    "--model tiny --max-trajectory-tokens 8192": "--max-trajectory-tokens 8193",
    # files and directories
    "--run-dir run": "--run-dir run holds a run",
    "--run-dir empty/run": "--run-dir empty/run",
    "--resume --run-dir nosuch": "--run-dir nosuch",
    "--resume --run-dir damaged": "damaged/config.json",
    "--resume --run-dir run --seed 4": "leave out --seed",
    "--config nosuch.json": "--config nosuch.json",
    "--config broken.json": "--config broken.json",
    "--config newer.json": "aperture",
    "--config steps.json": "steps 'ten'",
    "--config ids.json --preset none": "--config and --preset",
    "--prompt nosuch.txt": "--prompt nosuch.txt",
    "--prompt user.json": "--prompt user.json",
}
OTHERS = [
    (evaluate.main, "--rounds 3", "did you mean --max-rounds?"),
    (evaluate.main, "--temperature 0 --samples 4", "--temperature"),
    (evaluate.main, "--model run", "--model run"),
    (evaluate.main, "--prompt user.json", "--prompt user.json"),
    (evaluate.main, "--out run", "--out run"),
    (sft.command_line, "--data nosuch.json", "--data nosuch.json"),
    (sft.command_line, "--resume --run-dir run", "holds a run of rl"),
    (dpo.command_line, "--beta 0", "--beta"),
    (agentevol.command_line, "--steps 95", "--steps 95 cannot be cut"),
]
CASES = [
    *((train.command_line, words, named) for words, named in TRAIN.items()),
    *OTHERS,
]


def content(folder):
    """Every file of a folder with its content, every folder with None."""
    return {path: None if path.is_dir() else path.read_bytes() for path in folder.rglob("*")}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """FILES in the working folder, and a model hub that has nothing."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(default_models, "_ask_hub", lambda name: "is not at the hub")
    return tmp_path


@pytest.mark.parametrize(
    ("command", "words", "named"),
    [pytest.param(*case, id=f"{case[0].__module__} {case[1]}") for case in CASES],
)
def test_misuse_is_one_line_and_leaves_nothing(folder, capsys, command, words, named):
    before = content(folder)
    assert command(words.split()) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and named in line, line
    assert content(folder) == before


@pytest.mark.parametrize("program", ["train.py", "evaluate.py"])
def test_misuse_of_a_program_is_one_line_without_a_traceback(tmp_path, program):
    command = [sys.executable, str(ROOT / program), "--seed", "x"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n"), list(tmp_path.iterdir())) == (2, 1, [])
    assert "--seed" in done.stderr


@pytest.mark.parametrize("name", config_module.POSITIVE)
@pytest.mark.parametrize("value", [0, -1, float("nan"), float("inf")])
def test_what_must_be_above_zero_says_so(name, value):
    with pytest.raises(Misuse, match=f"^--{name.replace('_', '-')} {value} must be above 0"):
        replace(Config(), **{name: value}).check()


def test_misuse_from_python_is_an_exception(folder):
    with pytest.raises(Misuse, match="--group-size 1"):
        train.train(options(group_size=1))


# --- Notes: allowed, and perhaps not meant --------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "noted"),
    [
        ("--gamma 0.9", "gamma"),
        ("--gamma 0.9 --lam 0.9 --algorithm reinforce_plus_plus", "lam"),
        ("--critic-learning-rate 1e-5 --value-clip 0.2", "critic_learning_rate value_clip"),
        ("--no-skip-zero-variance --algorithm ppo", "no_skip_zero_variance"),
        ("--steps-scaling-inter 5", "steps_scaling_inter"),
        ("--kl-estimator k2", "kl_estimator"),
        ("--tasks family_train --split train", "split"),
        ("--eval-every 0 --eval-samples 2 --eval-rounds 3", "eval_samples eval_rounds"),
        ("--mini-batch-size 65", "mini_batch_size"),
        ("--algorithm ppo --gamma 0.9 --lam 0.9 --value-clip 0.2", ""),
        ("--kl-loss-coef 0.1 --kl-estimator k2", ""),
        ("--deterministic --engine transformers --mini-batch-size 64", ""),
        ("--eval-every 1 --eval-samples 2", ""),
    ],
)
def test_an_option_that_is_given_and_has_no_effect_is_a_note(argv, noted):
    _, lines = read_command_line(argv.split())
    flags = [line.split()[0].removeprefix("--").replace("-", "_") for line in lines]
    assert flags == noted.split()
    assert all("has no effect here" in line for line in lines)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (f"{STEPWISE} --rounds 2 4 --steps 100", "reaches 4 turns after step 100"),
        ("--split train --eval-tasks short_test", "85 of the 129 held-out tasks are also trained"),
        (f"{STEPWISE} --rounds 2 4 --steps 101", None),
        ("", None),
    ],
)
def test_what_is_perhaps_not_meant_is_a_note(argv, words):
    lines = list(notes(asked(f"--model tiny {argv}")))
    assert [words in line for line in lines] == ([True] if words else [])


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (SftConfig, ["--data"]),
        (DpoConfig, ["--expert", "mine.jsonl", "--experience"]),
    ],
)
def test_a_run_of_another_environment_to_learn_from_is_a_note(kind, words, folder):
    Path("mine.jsonl").touch()
    for config, env, is_noted in (
        ('{"config": {"env": "babyai"}}', "textcraft", True),
        ('{"config": {"env": "babyai"}}', "babyai", True),  # another model played it
        ("[]", "babyai", False),  # not a run's config.json
    ):
        Path("run/config.json").write_text(config)
        lines = list(notes(asked(["--model", "tiny", "--env", env, *words, "run"], kind)))
        assert [words[-1] in line for line in lines] == [True] * is_noted


# --- Options kept in a run and read back ----------------------------------------------------------


def keep(folder, config):
    """What a run leaves."""
    folder.mkdir(exist_ok=True)
    file = folder / "config.json"
    content = {"config": asdict(config), "method": config.method}
    file.write_text(json.dumps(content))
    return str(file)


def test_a_runs_options_are_the_defaults_of_the_next_and_the_command_line_wins(tmp_path):
    first = replace(complete(with_preset("laptop", "babyai")), seed=7, rounds=(2, 4), steps=9)
    file = keep(tmp_path / "run", replace(first, run_dir=str(tmp_path / "run"), resume=True))
    config = asked(f"--config {file} --steps 3 {STEPWISE}")
    changes = dict(steps=3, rounds_scheduler="scaling_inter_stepwise", config=file)
    assert config == replace(first, **changes), "and neither its directory nor its --resume"


def test_another_methods_run_gives_what_all_methods_share(tmp_path):
    first = replace(with_preset("laptop", "babyai"), rounds=(2, 4), seed=7, learning_rate=3e-6)
    config, _ = read_command_line(["--config", keep(tmp_path / "run", first)], SftConfig)
    assert (config.env, config.seed, config.rounds) == ("babyai", 7, (4,))
    assert config.learning_rate == SftConfig.learning_rate


def test_a_few_options_in_a_file_stand_on_the_preset_that_they_ask_for(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text('{"preset": "paper", "env": "babyai", "learning_rate": 3e-6}')
    config, _ = read_command_line(["--config", str(file)])
    assert config == replace(with_preset("paper", "babyai"), learning_rate=3e-6, config=str(file))
    config, _ = read_command_line(["--config", str(file), "--env", "sciworld"])
    assert config.max_tokens_per_turn == 200


def test_every_option_comes_back_as_it_was(tmp_path):
    config = replace(
        with_preset("paper"),
        subtasks=("depth 1",),
        eval_subtasks=(),
        env_addr=("http://a:1",),
        kl_target=0.5,
        stop_at=0.9,
        algorithm="ppo",
    )
    values = options_from(keep(tmp_path, config))
    assert values == {n: v for n, v in asdict(config).items() if n not in config_module.OF_ONE_RUN}
    kept = replace(config, run_dir=str(tmp_path), resume=True)
    assert saved_config(str(tmp_path)) == kept
    shared = saved_config(str(tmp_path), RunConfig)
    assert (shared.env_addr, shared.stop_at) == (kept.env_addr, kept.stop_at)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "cannot be read"),
        ("[]", "it holds no options"),
        ("{}", "it holds no options"),
        ("\xff", "cannot be read"),
        ('{"config": {"depth_of_field": 3, "aperture": 1}}', "aperture, depth_of_field"),
        ('{"versions": {}, "git_commit": null}', "git_commit, versions"),
        ('{"steps": 2.5}', "steps 2.5"),
        ('{"resume": 1}', "resume 1"),
        ('{"rounds": 6}', "rounds 6"),
        ('{"algorithm": "a2c"}', "algorithm 'a2c'"),
        ('{"env": null}', "env None"),
    ],
)
def test_a_file_that_holds_no_options_of_this_version_is_one_line(tmp_path, text, words):
    file = tmp_path / "config.json"
    file.write_text(text, encoding="latin-1")
    with pytest.raises(Misuse, match=words) as error:
        options_from(str(file))
    assert str(file) in str(error.value) and "\n" not in str(error.value)
    with pytest.raises(Misuse):
        saved_config(str(tmp_path))


def test_a_resumed_run_keeps_its_options_but_for_how_far_it_goes(tmp_path):
    run = tmp_path / "run"
    file = keep(run, asked("--model tiny"))
    again = f"--resume --run-dir {run}"
    assert asked(f"{again} --steps 600").learning_rate_decay_steps < 600
    stretched = asked(f"{again} --steps 600 --learning-rate-decay-steps 600")
    assert (stretched.steps, stretched.learning_rate_decay_steps) == (600, 600)
    for other in ("--learning-rate 1e-3", f"--config {file}"):
        with pytest.raises(Misuse, match=f"leave out {other.split()[0]}"):
            asked(f"{again} {other}")
    for name in ("step_000010", "step_000020.bak"):  # the second is somebody's copy
        (run / "checkpoints" / name).mkdir(parents=True)
    assert asked(f"{again} --steps 10").steps == 10
    with pytest.raises(Misuse, match="--steps 9: this run has done 10"):
        asked(f"{again} --steps 9")
    with pytest.raises(Misuse, match="leave out --seed"):
        train.train(replace(asked(again), seed=1))


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


def test_a_run_resumed_from_another_folder_reads_the_files_that_it_began_with(
    two_folders, monkeypatch
):
    here, there = two_folders
    files = "--tasks ids.json --eval-tasks held_out.json --prompt prompt.txt"
    argv = f"{files} --model model --warm-start ./model"
    first = asked(f"{argv} --preset laptop")
    assert (first.tasks, first.eval_tasks) == (f"{here}/ids.json", f"{here}/held_out.json")
    assert first.model == first.warm_start == f"{here}/model"
    keep(there / "run", first)
    monkeypatch.chdir(there)
    again = asked("--resume --run-dir run")
    assert again == replace(first, run_dir="run", resume=True)
    with pytest.raises(Misuse, match="leave out --tasks --prompt --eval-tasks, or"):
        asked(f"--resume --run-dir run {files}")
    monkeypatch.chdir(here)
    run = str(there / "run")
    assert asked(f"--resume --run-dir {run} {argv}") == replace(again, run_dir=run)


def test_a_list_of_the_environment_is_kept_by_its_name_and_a_file_by_its_path(two_folders):
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


def test_a_link_is_kept_as_what_it_leads_to(tmp_path):
    """`checkpoints/best` of a run that goes on is another folder tomorrow."""
    for step in (1, 2):
        (tmp_path / f"step_{step}").mkdir()
    (tmp_path / "best").symlink_to("step_1")
    best = str(tmp_path / "best")
    kept = as_kept(Config(model=best, warm_start=best))
    assert kept.model == kept.warm_start == str(tmp_path / "step_1")


# --- Another prompt -------------------------------------------------------------------------------

SYSTEM = {"role": "system", "content": "Be brief."}
DIALOGUE = [SYSTEM, {"role": "user", "content": "Craft."}, {"role": "assistant", "content": "Yes."}]


def prompted(tmp_path, text):
    file = tmp_path / "prompt"
    file.write_text(text, encoding="utf-8")
    return with_prompt(Config(prompt=str(file)))


def test_a_text_replaces_the_environments_instruction_and_a_list_its_messages(tmp_path):
    assert prompt_of(with_prompt(Config())) is None
    text = prompted(tmp_path, "Craft it.\n")
    assert prompt_of(text) == [{"role": "system", "content": "Craft it."}]
    assert with_prompt(text) is text
    assert prompt_of(prompted(tmp_path, json.dumps(DIALOGUE))) == DIALOGUE


def test_a_resumed_run_notices_another_prompt_and_takes_the_same_one(tmp_path):
    (tmp_path / "prompt").write_text("Craft it.")
    argv = f"--prompt {tmp_path / 'prompt'}"
    first = asked(f"--model tiny {argv}")
    keep(tmp_path / "run", first)
    again = f"--resume --run-dir {tmp_path / 'run'}"
    assert asked(again).prompt == asked(f"{again} {argv}").prompt == first.prompt
    (tmp_path / "prompt").write_text("Craft it now.")
    with pytest.raises(Misuse, match="leave out --prompt"):
        asked(f"{again} {argv}")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("  \n", "is empty"),
        ("[", "cannot be read"),
        ("[" * 100_000, "cannot be read"),
        ("[]", "expected a list"),
        ("[1]", "expected a list"),
        ('[{"role": "system"}]', "expected a list"),
        ('[{"role": "system", "content": 3}]', "expected a list"),
        ('[{"role": "system", "content": "\\ud83d"}]', "surrogates"),
        ('[{"role": "user", "content": "a"}]', "the roles are user; expected"),
        (json.dumps([*DIALOGUE, SYSTEM]), "the roles are"),
    ],
)
def test_what_cannot_stand_before_an_observation_is_refused(tmp_path, text, words):
    with pytest.raises(Misuse, match=words) as error:
        prompted(tmp_path, text)
    assert "--prompt" in str(error.value) and "\n" not in str(error.value)


def test_a_prompt_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "latin").write_bytes(b"\xff\xfe")
    for name in ("nosuch", "latin", "."):
        with pytest.raises(Misuse, match=f"--prompt .*{name}"):
            with_prompt(Config(prompt=str(tmp_path / name)))
