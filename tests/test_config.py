"""config.py: presets, one line for a mistake, options saved in a run and read back."""

import json
import math
import re
import subprocess
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import get_args, get_type_hints

import pytest
import torch

import config as config_module
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
    flag,
    held_out_tasks,
    notes,
    options,
    options_from,
    parse_command_line,
    preset_of,
    prompt_of,
    read_command_line,
    saved_config,
    tasks_of,
    with_preset,
    with_prompt,
)
from dpo import PREFERENCES, DpoConfig
from envs import ENVS, id_lists
from evaluate import EvalConfig
from losses import kl_estimate
from scale import default_models
from scale.default_models import SMALL_MODELS
from scale.precision import FORMATS
from schedulers import FixedRoundsScheduler, StepRoundsScheduler, make_scheduler
from sft import SftConfig

ROOT = Path(__file__).parents[1]
PROMISED = (
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


# --- Flags, help, choices -------------------------------------------------------------------------


def parse(words, kind=Config):
    """The options of a command line, not checked."""
    return read_command_line(words.split(), kind)[0]


@pytest.mark.parametrize("kind", [Config, SftConfig, DpoConfig, EvolConfig, EvalConfig])
def test_help_explains_every_option_with_its_default(kind, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit) as stop:
        parse_command_line(kind, ["--help"], "program")
    text = capsys.readouterr().out
    assert stop.value.code == 0
    for field in fields(kind):
        option = re.escape(flag(field.name))
        assert re.search(rf"{option}[ ,].*[^ ] +[^ ].*\(default: ", text), field.name
    assert kind is not Config or set(PROMISED.split()) <= {field.name for field in fields(kind)}


def choices(kind, name):
    return get_args(get_type_hints(kind)[name])


def test_the_choices_are_those_of_the_tables():
    assert choices(Config, "algorithm") == tuple(ESTIMATORS)
    assert choices(DpoConfig, "loss") == tuple(PREFERENCES)
    assert choices(Config, "precision") == ("auto", *FORMATS)
    a, b = torch.tensor([[-1.0]]), torch.tensor([[-3.0]])
    estimates = [kl_estimate(a, b, name).item() for name in choices(Config, "kl_estimator")]
    assert estimates == pytest.approx([2.0, 2.0, math.exp(-2) + 1])
    schedulers = [make_scheduler(name, [3], 5) for name in choices(Config, "rounds_scheduler")]
    assert [type(s) for s in schedulers] == [FixedRoundsScheduler, StepRoundsScheduler]


def test_an_option_belongs_to_the_algorithms_that_look_at_it():
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


@pytest.mark.parametrize("env", ENVS)
@pytest.mark.parametrize("preset", ["laptop", "paper", "none"])
def test_every_preset_passes_the_check_in_every_environment(preset, env):
    config = complete(with_preset(preset, env))
    config.check()
    assert config.env == env
    assert tasks_of(config)


@pytest.mark.parametrize("env", ENVS)
def test_the_short_tasks_of_an_environment_are_split_and_of_the_same_sub_tasks(env):
    config = complete(with_preset("laptop", env))
    train_tasks, held_out = tasks_of(config), held_out_tasks(config)
    assert not {t.task_id for t in train_tasks} & {t.task_id for t in held_out}
    unseen = [t for t in held_out if t.subtask not in {task.subtask for task in train_tasks}]
    assert [t.subtask for t in unseen] == (["depth 3"] if env == "textcraft" else [])
    assert len(train_tasks) > len(held_out) > 40


@pytest.mark.parametrize(
    ("argv", "env"),
    [
        ("--env babyai --seed 3", "babyai"),
        ("--seed 3 --env=sciworld", "sciworld"),
        ("--seed 3 --env textcraft babyai", "textcraft+babyai"),
        ("--seed 3", "textcraft"),
    ],
)
def test_the_environment_on_the_command_line_decides_the_defaults(argv, env):
    assert parse(argv) == replace(with_preset("laptop", env), seed=3)
    config = parse(f"{argv} --group-size 3")
    assert config.group_size == 3 != with_preset("laptop", env).group_size


def test_the_paper_preset_has_the_papers_schedule_and_batch():
    assert with_preset("paper") == replace(Config(preset="paper"), **PAPER)
    for env, shape in {
        "textcraft": ((10, 20, 30), 32, 8),
        "babyai": ((6, 13, 20), 32, 4),
        "sciworld": ((10, 20, 30), 16, 8),
    }.items():
        c = with_preset("paper", env)
        assert (c.rounds, c.tasks_per_step, c.group_size) == shape
        assert c.mini_batch_size == 8 * c.group_size  # the paper counts tasks: 8


@pytest.mark.parametrize("env", ["textcraft", "textcraft+babyai"])
def test_with_a_gpu_the_other_methods_have_rates_for_large_models(env):
    """As AgentGym's scripts have them (agentenv/examples/); a small model keeps its own."""
    names = ("learning_rate", "beta", "sft_coef")
    for kind, numbers in ((SftConfig, (1e-5,)), (EvolConfig, (1e-5,)), (DpoConfig, (5e-7, 0.5, 0))):
        large, small = (with_preset(preset, env, kind) for preset in ("paper", "laptop"))
        assert tuple(getattr(large, n) for n in names if hasattr(large, n)) == numbers
        assert small.learning_rate == kind.learning_rate >= 4 * large.learning_rate
        assert (large.steps, large.mini_batch_size) == (kind.steps, kind.mini_batch_size)


def test_the_machine_decides_the_preset_unless_the_model_is_small_or_it_is_named(monkeypatch):
    monkeypatch.setattr(config_module, "has_gpu", lambda: True)
    assert preset_of("Qwen/Qwen2.5-3B-Instruct") == "paper"
    assert parse("") == options() == with_preset("paper")
    for model in SMALL_MODELS:
        expected = replace(with_preset("laptop"), model=model)
        assert parse(f"--model {model}") == options(model=model) == expected
    for preset in ("laptop", "none"):
        config = parse(f"--preset {preset} --env babyai")
        assert config == options("babyai", preset=preset) == with_preset(preset, "babyai")
    assert with_preset("none", "babyai") == Config(preset="none", env="babyai")


def test_lists_follow_from_the_model_unless_tasks_are_named():
    short = complete(Config())
    assert (short.tasks, short.split) == ("short_train", None)
    for long in (Config(model="Qwen/Qwen2.5-3B-Instruct"), with_preset("none")):
        assert complete(long) == replace(long, split="train")
    for given in (dict(tasks="mine.json"), dict(split="test")):
        config = Config(**given, subtasks=("depth 2",))
        assert complete(config) == config
    assert complete(replace(with_preset("paper"), tasks="family_train")).split is None


@pytest.mark.parametrize("config", [Config(), Config(deterministic=True), with_preset("paper")])
def test_complete_is_idempotent_as_a_resumed_run_needs(config):
    assert complete(complete(config)) == complete(config)
    assert not config.deterministic or complete(config).engine == "transformers"


def test_evaluation_has_the_longest_horizon_and_fewer_samples_at_the_start():
    config = Config(rounds=(3, 5, 9), eval_samples=4)
    assert (config.evaluation_rounds, replace(config, eval_rounds=4).evaluation_rounds) == (9, 4)
    assert [config.samples_at(step) for step in (0, 20, 60)] == [1, 4, 4]
    assert replace(config, eval_samples=1, eval_start_samples=3).samples_at(0) == 1


# --- Misuse: exit code 2, one line on stderr, nothing left behind ---------------------------------

FILES = {
    "twice.json": '[{"item_id": "textcraft_0"}, {"item_id": "textcraft_0"}]',
    "user.json": '[{"role": "user", "content": "Craft it."}]',
    "newer.json": '{"config": {"seed": 1, "aperture": 8}}',
    "run/config.json": '{"config": {"seed": 3, "model": "tiny"}}',
    "damaged/config.json": "{",
    "model/config.json": '{"model_type": "llama"}',
    "empty": "",
}
STEPWISE = "--rounds-scheduler scaling_inter_stepwise"
# The words of train.py -> what its line must name.
MISUSE = {
    # cannot be read
    "--steps ten": "--steps",
    "--seed": "--seed",
    "--seed 1 2": "2",
    "--algorithm a2c": "--algorithm",
    "--preset dev": "--preset",
    "--no-seed": "--no-seed",
    "--tasks-per-stepp 3": "did you mean --tasks-per-step?",
    # out of range; what must be above 0 is below
    "--gamma 1.5 --algorithm ppo": "--gamma 1.5",
    "--stop-at nan": "--stop-at nan",
    "--stop-at 0": "--stop-at 0",
    "--subtasks": "--subtasks takes at least one value",
    "--kl-coef -0.1": "--kl-coef -0.1",
    "--sampler-is-cap 0.5": "--sampler-is-cap 0.5",
    # contradictions
    "--group-size 1": "--group-size 1",
    "--max-tokens-per-turn 2000": "--max-tokens-per-turn 2000",
    "--kl-target 0.1": "--kl-target",
    "--kl-loss-coef 0.1 --kl-estimator k1": "--kl-estimator k1",
    "--rounds 3 6": "--rounds 3 6",
    "--rounds": "--rounds",
    STEPWISE: "never changes",
    "--engine-url http://a:1 --engine-devices 0": "--engine-url and --engine-devices",
    "--engine-url http://a:1 --engine transformers": "leave out --engine transformers",
    "--engine-devices 0 --deterministic": "leave out --deterministic",
    "--engine-devices 0 0": "--engine-devices 0 0",
    "--stop-at 0.9 --eval-every 0": "--stop-at",
    # environments and tasks
    "--env minecraft": "unknown environment 'minecraft'",
    "--tasks twice.json": "twice.json",
    "--eval-tasks nosuch.json": "nosuch.json",
    "--eval-subtasks prime": "prime",
    "--env-addr localhost": "--env-addr",
    "--env-addr local http://a:1": "--env-addr local",
    "--env sciworld --env-addr local": "--env-addr local: sciworld",
    "--engine-url a:1": "--engine-url",
    "--env textcraft textcraft": "twice",
    "--env textcraft babyai --tasks train": "--tasks belongs to one environment",
    "--env textcraft babyai --env-weights 1": "--env-weights 1",
    "--env textcraft babyai --env-weights 1 0": "--env-weights 1 0",
    "--env textcraft --env-weights 2": "--env-weights 2",
    "--env textcraft babyai --env-addr http://a:1": "say whose it is, textcraft=http://host",
    "--env textcraft babyai --env-addr babyai=nix": "is not an address",
    f"--env textcraft babyai {STEPWISE}": "never changes",
    # models
    "--model model": "holds no weights",
    "--warm-start nosuch": "--warm-start nosuch",
    "--warm-start model": "--warm-start model",
    "--model tiny --max-trajectory-tokens 8192": "--max-trajectory-tokens 8193",
    # files and directories
    "--run-dir run": "--run-dir run holds a run",
    "--run-dir empty/run": "--run-dir empty/run",
    "--resume": "--resume needs --run-dir",
    "--resume --run-dir nosuch": "--run-dir nosuch",
    "--resume --run-dir damaged": "--run-dir damaged: config.json cannot be read",
    "--resume --run-dir run --seed 4": "leave out --seed",
    "--config nosuch.json": "--config nosuch.json",
    "--config newer.json --preset none": "--config and --preset",
    "--prompt user.json": "--prompt user.json",
}


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


@pytest.mark.parametrize(("words", "named"), MISUSE.items(), ids=MISUSE)
def test_misuse_is_one_line_and_leaves_nothing(folder, capsys, words, named):
    before = content(folder)
    assert train.command_line(words.split()) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and named in line, line
    assert content(folder) == before


def test_another_methods_run_is_not_resumed(folder, capsys):
    assert sft.command_line("--resume --run-dir run".split()) == 2
    assert "holds a run of rl, not of sft.py" in capsys.readouterr().err


@pytest.mark.parametrize("program", ["train.py", "evaluate.py"])
def test_misuse_of_a_program_is_one_line_without_a_traceback(tmp_path, program):
    command = [sys.executable, str(ROOT / program), "--seed", "x"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr.count("\n"), list(tmp_path.iterdir())) == (2, 1, [])
    assert "--seed" in done.stderr


@pytest.mark.parametrize("name", config_module.POSITIVE)
def test_what_must_be_above_zero_says_so(name):
    for value in (0, -1, math.nan, math.inf):
        with pytest.raises(Misuse, match=f"^{flag(name)} {value} must be above 0"):
            replace(Config(), **{name: value}).check()


# --- Notes: allowed, but perhaps not meant --------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "noted"),
    [
        ("--gamma 0.9 --lam 0.9 --algorithm reinforce_plus_plus", "--lam"),
        ("--critic-learning-rate 1e-5 --value-clip 0.2", "--critic-learning-rate --value-clip"),
        ("--no-skip-zero-variance --algorithm ppo", "--no-skip-zero-variance"),
        ("--steps-scaling-inter 5", "--steps-scaling-inter"),
        ("--kl-estimator k2", "--kl-estimator"),
        ("--tasks family_train --split train", "--split"),
        ("--eval-every 0 --eval-samples 2", "--eval-samples"),
        ("--mini-batch-size 65", "--mini-batch-size"),
        ("--algorithm ppo --gamma 0.9 --lam 0.9 --kl-loss-coef 0.1 --kl-estimator k2", ""),
        ("--deterministic --engine transformers --mini-batch-size 64 --eval-samples 2", ""),
    ],
)
def test_an_option_that_is_given_and_has_no_effect_is_a_note(argv, noted):
    _, lines = read_command_line(argv.split(), Config)
    assert [line.split()[0] for line in lines] == noted.split()


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (f"{STEPWISE} --rounds 2 4 --steps 100", "reaches 4 turns after step 100"),
        ("--split train --eval-tasks short_test", "85 of the 129 held-out tasks are also trained"),
        (f"{STEPWISE} --rounds 2 4 --steps 101", None),
    ],
)
def test_what_is_perhaps_not_meant_is_a_note(argv, words):
    lines = list(notes(asked(f"--model tiny {argv}")))
    assert [words in line for line in lines] == ([True] if words else [])


@pytest.mark.parametrize(
    ("config", "env", "noted"),
    [
        ('{"config": {"env": "babyai"}}', "textcraft", ["was played in babyai"]),
        ('{"config": {"env": "babyai"}}', "babyai", ["was played by smollm2-135m"]),
        ("[]", "babyai", []),  # not a run's config.json
    ],
)
def test_a_run_of_another_environment_to_learn_from_is_a_note(config, env, noted, folder):
    Path("run/config.json").write_text(config)
    lines = list(notes(asked(f"--model tiny --env {env} --data run", SftConfig)))
    assert len(lines) == len(noted) and all(w in line for w, line in zip(noted, lines, strict=True))


# --- Options saved in a run and read back ---------------------------------------------------------


def save(folder, config):
    """What a run leaves."""
    folder.mkdir(exist_ok=True)
    content = {"config": asdict(config), "method": config.method}
    (folder / "config.json").write_text(json.dumps(content))
    return str(folder / "config.json")


def test_a_runs_options_are_the_defaults_of_the_next_and_the_command_line_wins(tmp_path):
    first = replace(complete(with_preset("laptop", "babyai")), seed=7, rounds=(2, 4), steps=9)
    file = save(tmp_path / "run", replace(first, run_dir=str(tmp_path / "run"), resume=True))
    config = asked(f"--config {file} --steps 3 {STEPWISE}")
    changes = dict(steps=3, rounds_scheduler="scaling_inter_stepwise", config=file)
    assert config == replace(first, **changes), "and neither its directory nor its --resume"
    shared = parse(f"--config {file}", SftConfig)  # another method: what all methods share
    assert (shared.env, shared.seed, shared.rounds) == ("babyai", 7, (4,))
    assert shared.learning_rate == SftConfig.learning_rate


def test_a_few_options_in_a_file_stand_on_the_preset_that_they_ask_for(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text('{"preset": "paper", "env": "babyai", "learning_rate": 3e-6}')
    config = parse(f"--config {file}")
    assert config == replace(with_preset("paper", "babyai"), learning_rate=3e-6, config=str(file))
    assert parse(f"--config {file} --env sciworld").max_tokens_per_turn == 200


def test_every_option_comes_back_as_it_was(tmp_path):
    config = replace(
        with_preset("paper"), env_addr=("http://a:1",), eval_subtasks=(), stop_at=0.9, kl_target=0.5
    )
    values = options_from(save(tmp_path, config), Config)
    assert values == {n: v for n, v in asdict(config).items() if n not in config_module.OF_ONE_RUN}
    saved = replace(config, run_dir=str(tmp_path), resume=True)
    assert saved_config(str(tmp_path), Config) == saved
    assert saved_config(str(tmp_path), RunConfig).env_addr == saved.env_addr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "it holds no options"),
        ("{}", "it holds no options"),
        ("\xff", "cannot be read"),
        ('{"config": {"depth_of_field": 3, "aperture": 1}}', "aperture, depth_of_field"),
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
    for where, read in ((file, options_from), (tmp_path, saved_config)):
        with pytest.raises(Misuse, match=f"{where}.*{words}") as error:
            read(str(where), Config)
        assert "\n" not in str(error.value)


def test_a_resumed_run_keeps_its_options_but_for_how_far_it_goes(tmp_path):
    run = tmp_path / "run"
    file = save(run, asked("--model tiny"))
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
    save(there / "run", first)
    monkeypatch.chdir(there)
    again = asked("--resume --run-dir run")
    assert again == replace(first, run_dir="run", resume=True)
    with pytest.raises(Misuse, match="leave out --tasks --prompt --eval-tasks, or"):
        asked(f"--resume --run-dir run {files}")
    monkeypatch.chdir(here)
    run = str(there / "run")
    assert asked(f"--resume --run-dir {run} {argv}") == replace(again, run_dir=run)


def test_a_list_of_the_environment_is_kept_by_its_name_and_a_file_by_its_path(two_folders):
    here, _ = two_folders
    for given, kept in (
        (str(id_lists("textcraft")["family_train"]), "family_train"),
        ("textcraft_family_test.json", "family_test"),
        ("family_train", f"{here}/family_train"),  # there is such a file
        ("ids.json", f"{here}/ids.json"),
    ):
        assert as_kept(Config(tasks=given)).tasks == kept
    once = as_kept(Config(tasks="ids.json"))
    assert as_kept(once) == once


def test_a_link_is_kept_as_what_it_leads_to(tmp_path):
    """`checkpoints/best` of a run that goes on is another folder tomorrow."""
    (tmp_path / "step_1").mkdir()
    (tmp_path / "best").symlink_to("step_1")
    kept = as_kept(Config(model=f"{tmp_path}/best", warm_start=f"{tmp_path}/best"))
    assert kept.model == kept.warm_start == f"{tmp_path}/step_1"


# --- Another prompt -------------------------------------------------------------------------------

SYSTEM = {"role": "system", "content": "Be brief."}
DIALOGUE = [SYSTEM, {"role": "user", "content": "Craft."}, {"role": "assistant", "content": "Yes."}]


def prompted(tmp_path, content):
    (tmp_path / "prompt").write_bytes(content)
    return with_prompt(Config(prompt=str(tmp_path / "prompt")))


def test_a_text_replaces_the_environments_instruction_and_a_list_its_messages(tmp_path):
    assert prompt_of(with_prompt(Config())) is None
    text = prompted(tmp_path, b"Craft it.\n")
    assert prompt_of(text) == [{"role": "system", "content": "Craft it."}]
    assert with_prompt(text) is text
    assert prompt_of(prompted(tmp_path, json.dumps(DIALOGUE).encode())) == DIALOGUE


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"  \n", "is empty"),
        (b"\xff\xfe", "cannot be read"),
        (b"[", "cannot be read"),
        (b"[" * 100_000, "cannot be read"),
        (b"[]", "expected a list"),
        (b'[{"role": "system", "content": 3}]', "expected a list"),
        (b'[{"role": "system", "content": "\\ud83d"}]', "surrogates"),
        (json.dumps([*DIALOGUE, SYSTEM]).encode(), "the roles are"),
    ],
)
def test_what_cannot_stand_before_an_observation_is_refused(tmp_path, content, words):
    with pytest.raises(Misuse, match=f"--prompt .*{words}") as error:
        prompted(tmp_path, content)
    assert "\n" not in str(error.value)
