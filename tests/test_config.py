"""config.py: presets, one line for each misuse, options saved in a run and read back."""

import json
import math
import re
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from toy_env import Letters, registered

import config as config_module
import evaluate
import train
from advantages import ESTIMATORS
from agentevol import EvolConfig
from config import (
    PAPER,
    Config,
    Misuse,
    RunConfig,
    checked,
    complete,
    flag,
    held_out_tasks,
    notes,
    options,
    parse_command_line,
    prompt_of,
    read_command_line,
    saved_config,
    tasks_of,
    with_absolute_paths,
    with_preset,
    with_prompt,
)
from dpo import PREFERENCES, DpoConfig
from envs import ENVS
from evaluate import EvalConfig
from scale.default_models import SMALL_MODELS
from scale.precision import FORMATS
from sft import SftConfig


def parse_and_check(words, kind=Config):
    """The checked options of a command line."""
    return checked(parse(words, kind))


def parse(words, kind=Config):
    """The options of a command line, not checked."""
    return read_command_line(words.split(), kind)[0]


# --- Flags, help, choices -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Config, SftConfig, DpoConfig, EvolConfig, EvalConfig])
def test_help_explains_every_option_with_its_default(kind, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "1000")
    with pytest.raises(SystemExit):
        parse_command_line(kind, ["--help"], "program")
    paragraphs = re.split(r"\n  (?=--)", capsys.readouterr().out)
    help_of = {text.replace(",", " ").split()[0]: text for text in paragraphs}
    for field in fields(kind):
        words = re.split(r"\s\s+", help_of[flag(field.name)])[1:]
        assert re.search(r"\w.*\(default: ", " ".join(words)), field.name


def choices(kind, name):
    return get_args(get_type_hints(kind)[name])


def test_choices_and_algorithm_groups_match_the_tables_of_the_modules():
    assert set(choices(Config, "algorithm")) == set(ESTIMATORS), "--algorithm and ESTIMATORS differ"
    assert choices(DpoConfig, "loss") == tuple(PREFERENCES)
    assert choices(Config, "precision") == ("auto", *FORMATS)


# --- Defaults -------------------------------------------------------------------------------------


@pytest.mark.parametrize("env", ENVS)
def test_every_preset_fits_every_environment_and_short_lists_do_not_overlap(env):
    for preset in ("paper", "one-gpu", "none", "laptop"):
        config = complete(with_preset(preset, env))
        config.check()
        assert config.env == env
        assert complete(config) == config, "completing is idempotent, as resuming needs"
    train_tasks, held_out = tasks_of(config), held_out_tasks(config)
    assert not {t.task_id for t in train_tasks} & {t.task_id for t in held_out}
    assert {t.subtask for t in held_out} <= {t.subtask for t in train_tasks}
    assert len(train_tasks) > len(held_out) > 40


@pytest.mark.parametrize(
    ("argv", "env"),
    [
        ("--seed 3 --env=sciworld", "sciworld"),
        ("--env textcraft babyai --seed 3", "textcraft+babyai"),
        ("--seed 3", "textcraft"),
    ],
)
def test_the_environment_on_the_command_line_determines_the_defaults(argv, env):
    assert parse(argv) == replace(with_preset("laptop", env), seed=3)
    assert parse(f"{argv} --group-size 3").group_size == 3 != with_preset("laptop", env).group_size


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


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"round": (3,)}, "LAPTOP or PAPER has unknown options: {'round'}"),
        ({"rounds": 3}, "LAPTOP: rounds 3: Input should be a valid array"),
        ({"group_size": "8"}, "LAPTOP: group_size '8': Input should be a valid integer"),
        ({"rounds"}, "LAPTOP {'rounds'}: Input should be a valid dictionary"),
    ],
)
def test_unusable_presets_of_an_environment_are_misuse(monkeypatch, values, problem):
    monkeypatch.setattr(Letters, "LAPTOP", values, raising=False)
    with registered(), pytest.raises(ValueError, match=re.escape(problem)):
        with_preset("laptop", "letters")


def test_the_one_gpu_preset_counts_its_epochs_in_steps():
    c = with_preset("one-gpu")
    epoch = len(tasks_of(c)) / c.tasks_per_step
    assert c.reset_adapter_every == 4 * epoch
    assert c.steps_scaling_inter == math.ceil(15 * epoch) and c.rounds == (10, 20, 30)


def test_the_paper_preset_has_learning_rates_for_large_models():
    """They are those of AgentGym's scripts (agentenv/examples/)."""
    for kind, rate in ((SftConfig, 1e-5), (EvolConfig, 1e-5), (DpoConfig, 5e-7)):
        assert with_preset("paper", "textcraft", kind).learning_rate == rate
        assert with_preset("laptop", "textcraft", kind).learning_rate == kind.learning_rate


def test_the_machine_determines_the_preset_unless_the_model_is_small_or_it_is_set(monkeypatch):
    monkeypatch.setattr(config_module, "has_gpu", lambda: True)
    assert parse("") == options() == with_preset("paper")
    for model in SMALL_MODELS:
        expected = replace(with_preset("laptop"), model=model)
        assert parse(f"--model {model}") == options(model=model) == expected
    none = Config(preset="none", env="babyai")
    assert parse("--preset none --env babyai") == options("babyai", preset="none") == none


def test_task_lists_follow_from_the_model_unless_tasks_are_set():
    short = complete(Config())
    assert (short.tasks, short.split) == ("short_train", None)
    for config in (Config(model="Qwen/Qwen2.5-3B-Instruct"), with_preset("none")):
        assert complete(config) == replace(config, split="train")
    for changes in (dict(tasks="mine.json"), dict(split="test")):
        config = Config(**changes, subtasks=("depth 2",))
        assert complete(config) == config
    assert complete(replace(with_preset("paper"), tasks="family_train")).split is None


def test_evaluation_uses_the_longest_horizon_and_fewer_samples_at_the_start():
    config = Config(rounds=(3, 5, 9), eval_samples=4)
    assert (config.evaluation_rounds, replace(config, eval_rounds=4).evaluation_rounds) == (9, 4)
    assert [config.samples_at(step) for step in (0, 20, 60)] == [1, 4, 4]
    assert replace(config, eval_samples=1, eval_start_samples=3).samples_at(0) == 1


# --- Misuse: exit code 2, one line on stderr, nothing left behind ---------------------------------

FILES = {
    "twice.json": '[{"item_id": "textcraft_0"}, {"item_id": "textcraft_0"}]',
    "own.txt": "Craft it.",
    "user.json": '[{"role": "user", "content": "Craft it."}]',
    "half_pair.json": '[{"role": "system", "content": "\\ud83d"}]',
    "call.json": '[{"role": "system", "content": "", "tool_calls": [1]}]',
    "newer.json": '{"config": {"seed": 1, "aperture": 8}}',
    "half.json": '{"steps": 2.5}',
    "run/config.json": '{"config": {"seed": 3, "model": "tiny"}}',
    "damaged/config.json": "{",
    "model/config.json": '{"model_type": "llama"}',
    "empty": "",  # not a folder
}
STEPWISE = "--rounds-scheduler scaling_inter_stepwise"
# Arguments of train.py -> what its line must contain.
MISUSE = {
    # parsing
    "--steps ten": "--steps",
    "--tasks-per-stepp 3": "did you mean --tasks-per-step?",
    # ranges
    "--gamma 1.5 --algorithm ppo": "--gamma 1.5",
    "--stop-at 0": "--stop-at",
    "--env-addr local http://127.0.0.1:1": "--env-addr local is not a server",
    "--learning-rate 0": "--learning-rate 0.0 must be above 0",
    "--learning-rate nan": "--learning-rate nan must be above 0",
    "--temperature 3": "--temperature 3.0 must be between 0 and 2",
    "--eval-temperatures 0.3 0.30000001": "--eval-temperatures has the same temperature twice",
    "--temperature 0.001": "--temperature 0.001 must be at least 0.01",
    f"--seed {10**20}": "must be between 0 and 4,294,967,295",
    f"--steps {10**20}": "must be between 0 and 1,000,000",
    f"--rounds 3 {10**9}": "--rounds 1000000000 must be between 0 and 1,000,000",
    f"--max-tokens-per-micro-batch {10**20}": "must be between 0 and 1,000,000,000",
    "--sampler-is-cap 1e300": "--sampler-is-cap 1e+300",
    "--subtasks": "--subtasks needs at least one value",
    # contradictions
    "--sampler-is-cap 0.5": "--sampler-is-cap 0.5",
    "--dual-clip 1": "--dual-clip 1.0 must be 0 (off) or above 1",
    "--group-size 1": "--group-size 1",
    "--algorithm gigpo --group-size 1": "--group-size 1: gigpo compares samples",
    "--gae-unit turn": "--gae-unit turn needs --algorithm ppo",
    "--algorithm distill": "--algorithm distill and --teacher need each other",
    "--algorithm distill --teacher nowhere": "--teacher",
    "--algorithm distill --teacher http://me:key@host:8000": "--teacher expected http://HOST",
    "--algorithm distill --teacher http://h:8000 --temperature 0.5": "scores at --temperature 1",
    "--algorithm distill --teacher tiny --kl-coef 0.1": "--kl-coef changes rewards",
    "--keep-uncertain 0": "--keep-uncertain must be above 0",
    "--algorithm ppo --group-size 1 --keep-uncertain 0.5": "--group-size 2 or more",
    "--algorithm ppo --dynamic-sampling 2": "--dynamic-sampling compares samples; ppo does not",
    "--clip-ratio-high 0.1": "--clip-ratio-high 0.1 is below --clip-ratio",
    "--overlong-penalty 9999": "--overlong-penalty must be at most",
    "--agent reflect --attempts 1": "--agent reflect needs at least two --attempts",
    "--action-format json": "--action-format",
    "--reset-adapter-every 2": "needs LoRA adapters: set --lora-rank",
    "--max-tokens-per-turn 2000": "--max-tokens-per-turn 2000",
    "--kl-loss-coef 0.1 --kl-estimator k1": "--kl-estimator k1",
    "--rounds 3 6": "--rounds 3 6",
    STEPWISE: "never changes",
    "--engine-url http://a:1 --engine-devices 0": "--engine-url and --engine-devices",
    "--engine-url http://a:1 --engine transformers": "need --engine vllm",
    "--engine-devices 0 --deterministic": "without --deterministic",
    "--stop-at 0.9 --eval-every 0": "--stop-at",
    # environments and tasks
    "--env minecraft": "unknown environment 'minecraft'",
    "--tasks twice.json": "twice.json",
    "--eval-tasks nosuch.json": "nosuch.json",
    "--env-addr localhost": "--env-addr",
    "--env sciworld --env-addr local": "--env-addr local: sciworld",
    "--env textcraft babyai --tasks train": "--tasks needs a single environment",
    "--env textcraft babyai --env-weights 1": "--env-weights",
    "--env textcraft babyai --env-addr http://a:1": "as in textcraft=http://host",
    # models
    "--model model": "contains no weights",
    "--warm-start nosuch": "--warm-start nosuch",
    "--model tiny --max-trajectory-tokens 8192": "--max-trajectory-tokens 8193",
    # files and directories
    "--run-dir run": "--run-dir run already holds a run",
    "--run-dir empty/run": "--run-dir empty/run",
    "--resume": "--resume needs --run-dir",
    "--resume --run-dir damaged": "--run-dir damaged: config.json cannot be read",
    "--resume --run-dir run --seed 4": "leave out --seed",
    "--config nosuch.json": "--config nosuch.json",
    "--config newer.json --preset none": "--config and --preset",
    "--config newer.json": "no option aperture",
    "--config half.json": "steps 2.5",
    "--prompt user.json": "the roles are",
    "--prompt own.txt --action-format code": "replaces the text that describes the actions",
    "--prompt half_pair.json": "surrogates not allowed",
    "--prompt call.json": "got {'role': 'system'",
    **{f"--{name} /dev/null": "a regular file" for name in ("prompt", "config", "tasks")},
}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """FILES in the working folder."""
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("words", "expected"), MISUSE.items(), ids=MISUSE)
def test_misuse_prints_one_line_and_creates_no_file(folder, capsys, words, expected):
    before = set(folder.rglob("*"))
    assert train.command_line(words.split()) == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and expected in line, line
    assert set(folder.rglob("*")) == before


@pytest.mark.parametrize("command", [train.command_line, evaluate.main])
def test_vllm_cannot_be_chosen_where_it_is_not_installed(command, capsys, monkeypatch):
    monkeypatch.setattr("config.DEFAULT_ENGINE", "transformers")
    assert command(["--engine", "vllm"]) == 2
    assert "vLLM is not installed; use --engine transformers" in capsys.readouterr().err


# --- Notes: possible, but perhaps a mistake -------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "flags"),
    [
        ("--gamma 0.9 --lam 0.9 --algorithm reinforce_plus_plus", "--lam"),
        ("--steps-scaling-inter 5 --kl-estimator k2", "--steps-scaling-inter --kl-estimator"),
        ("--eval-every 0 --eval-samples 2", "--eval-samples"),
        ("--mini-batch-size 65", "--mini-batch-size"),
        ("--engine transformers --enforce-eager", "--enforce-eager"),
        ("--algorithm distill --teacher tiny --shuffle-rewards", "--shuffle-rewards"),
        ("--attempts 3", "--attempts"),
        ("--mini-batch-size 32 --keep-uncertain 0.5 --ratio sequence", "--ratio"),
        ("--mini-batch-size 32 --keep-uncertain 0.6 --ratio sequence", ""),
        ("--algorithm distill --teacher oracle --mini-batch-size 8 --ratio sequence", "--ratio"),
        ("--algorithm gigpo --no-skip-zero-variance", "--skip-zero-variance"),
        ("--algorithm ppo --gamma 0.9 --lam 0.9 --kl-loss-coef 0.1 --kl-estimator k2", ""),
    ],
)
def test_options_without_effect_are_noted(argv, flags):
    _, lines = read_command_line(argv.split(), Config)
    assert [line.split()[0] for line in lines] == flags.split()


def test_probable_mistakes_are_noted(folder):
    for argv, words in (
        (f"{STEPWISE} --rounds 2 4 --steps 100", "the last of --rounds begins only after step 100"),
        ("--split train --eval-tasks short_test", "49 of the 84 held-out tasks are also trained"),
    ):
        (line,) = notes(parse_and_check(f"--model tiny {argv}"))
        assert words in line
    assert not list(notes(parse_and_check(f"--model tiny {STEPWISE} --rounds 2 4 --steps 101")))
    Path("run/config.json").write_text('{"config": {"env": "babyai"}}')
    (line,) = notes(parse_and_check("--model tiny --env textcraft --data run", SftConfig))
    assert "was played in babyai" in line


# --- Options saved in a run and read back ---------------------------------------------------------


def save(folder, config):
    """Write the config.json of a run."""
    folder.mkdir(exist_ok=True)
    content = {"config": asdict(config), "method": config.method}
    (folder / "config.json").write_text(json.dumps(content))
    return str(folder / "config.json")


def test_config_takes_another_runs_options_and_the_command_line_overrides_them(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(config_module, "check_package", lambda env: None)  # not played
    first = replace(complete(with_preset("laptop", "babyai")), seed=7, rounds=(2, 4), steps=9)
    file = save(tmp_path / "run", replace(first, run_dir=str(tmp_path / "run"), resume=True))
    config = parse_and_check(f"--config {file} --steps 3 {STEPWISE}")
    changes = dict(steps=3, rounds_scheduler="scaling_inter_stepwise", config=file)
    assert config == replace(first, **changes), "without its --run-dir and --resume"
    shared = parse(f"--config {file}", SftConfig)  # another method: only shared options
    assert (shared.env, shared.seed, shared.rounds) == ("babyai", 7, (4,))
    assert shared.learning_rate == SftConfig.learning_rate


def test_a_file_with_a_few_options_builds_on_the_preset_that_it_sets(tmp_path):
    file = tmp_path / "mine.json"
    file.write_text('{"preset": "paper", "env": "babyai", "learning_rate": 3e-6}')
    config = parse(f"--config {file}")
    assert config == replace(with_preset("paper", "babyai"), learning_rate=3e-6, config=str(file))
    assert parse(f"--config {file} --env sciworld").max_tokens_per_turn == 200


def test_a_resumed_run_keeps_its_options_except_its_length(tmp_path):
    run = tmp_path / "run"
    file = save(run, parse_and_check("--model tiny"))
    again = f"--resume --run-dir {run}"
    longer = parse_and_check(f"{again} --steps 600")
    assert (longer.steps, longer.learning_rate_decay_steps) == (600, 50), "the decay is unchanged"
    for change in ("--learning-rate 1e-3", f"--config {file}"):
        with pytest.raises(Misuse, match=f"leave out {change.split()[0]}"):
            parse_and_check(f"{again} {change}")
    for name in ("step_000010", "step_000020.bak"):  # the second is a user's copy
        (run / "checkpoints" / name).mkdir(parents=True)
    assert parse_and_check(f"{again} --steps 10").steps == 10
    with pytest.raises(Misuse, match="--steps 9: this run is at step 10"):
        parse_and_check(f"{again} --steps 9")


def test_a_resumed_run_can_leave_the_servers_that_it_used(tmp_path):
    run = tmp_path / "run"
    servers = "--engine-url http://a:1 --env-addr http://b:1"
    save(run, parse_and_check(f"--model tiny {servers}"))
    again = f"--resume --run-dir {run}"
    here = parse_and_check(f"{again} --engine-url --env-addr --log-to")
    assert (here.engine_url, here.env_addr, here.log_to) == ((), (), ())
    moved = parse_and_check(f"{again} --engine-devices 0")
    assert (moved.engine_url, moved.engine_devices) == ((), ("0",))


def test_a_teacher_on_a_server_may_have_moved_when_a_run_is_resumed(tmp_path):
    run = tmp_path / "run"
    first = parse_and_check("--model tiny --algorithm distill --teacher http://a:8000")
    save(run, first)
    moved = parse_and_check(f"--resume --run-dir {run} --teacher http://b:8000")
    assert moved.teacher == "http://b:8000"
    with pytest.raises(Misuse, match="leave out --teacher"):
        parse_and_check(f"--resume --run-dir {run} --teacher oracle")
    assert "policy/entropy" not in first.ignored_by_sentinels
    assert "policy/entropy" in replace(first, teacher="oracle").ignored_by_sentinels


def test_a_run_resumed_from_another_folder_reads_the_files_that_it_began_with(
    tmp_path, monkeypatch
):
    """Two folders have files with equal names and different contents."""
    old, new = tmp_path / "old", tmp_path / "new"
    for folder, index in ((old, 0), (new, 5)):
        folder.mkdir()
        (folder / "ids.json").write_text(json.dumps([{"item_id": f"textcraft_{index}"}]))
        (folder / "prompt.txt").write_text(f"Craft it {folder.name}.")
    (old / "step_1").mkdir()
    (old / "step_1" / "config.json").write_text('{"model_type": "llama"}')
    (old / "step_1" / "model.safetensors").touch()
    (old / "best").symlink_to("step_1")  # while that run continues, the link can change
    files = "--tasks ids.json --eval-tasks family_test --prompt prompt.txt"
    argv = f"{files} --model best --warm-start ./best --preset laptop"
    monkeypatch.chdir(old)
    first = parse_and_check(argv)
    assert (first.tasks, first.eval_tasks) == (f"{old}/ids.json", "family_test")
    assert first.model == first.warm_start == f"{old}/step_1"
    assert with_absolute_paths(first) == first
    save(new / "run", first)
    monkeypatch.chdir(new)
    resumed = parse_and_check("--resume --run-dir run")
    assert resumed == replace(first, run_dir="run", resume=True)
    assert saved_config("run", RunConfig).tasks == first.tasks
    with pytest.raises(Misuse, match="leave out --tasks --prompt, or"):
        parse_and_check(f"--resume --run-dir run {files}")


def test_a_prompt_file_replaces_the_instruction_or_all_messages(tmp_path):
    file = tmp_path / "prompt"
    config = Config(prompt=str(file))
    file.write_text("Craft it.\n")
    with_text = with_prompt(config)
    assert prompt_of(with_text) == [{"role": "system", "content": "Craft it."}]
    assert with_prompt(with_text) is with_text
    roles = ("system", "user", "assistant")
    dialogue = [{"role": role, "content": f"Text of the {role}."} for role in roles]
    file.write_text(json.dumps(dialogue))
    assert prompt_of(with_prompt(config)) == dialogue
