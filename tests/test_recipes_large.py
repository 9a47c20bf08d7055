"""The recipes of large runs: their commands are parsed by the project's own parsers, their numbers
compared with the paper's, and what a CPU can run of them is run (marked slow)."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import measure_memory
import pytest
import yaml

from config import PAPER, Config, complete, parse_command_line
from evaluate import EvalConfig
from recipes import memory

ROOT = Path(__file__).resolve().parent.parent
RECIPES = ROOT / "recipes"
YAML = ("fsdp2.yaml", "fsdp2_cpu.yaml")
SCRIPTS = ("textcraft_3b.sh", "slurm.sh")
ON_A_CPU = pytest.mark.skipif(
    shutil.which("nvidia-smi") is not None, reason="vLLM of the GPU packages has no CPU part"
)


def script(name, tmp_path, *arguments, cards=None, **variables):
    """A recipe run with stand-ins for nvidia-smi, srun and scontrol on its PATH."""
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir(exist_ok=True)
    lines = "".join(f"{card}\\n" for card in cards or ())
    listed = f"printf '{lines}'" if cards else "exit 9"
    # Both nodes on this machine, one after the other when nothing is really run.
    srun = 'shift 2; for n in $(seq 0 $((SLURM_NNODES - 1))); do SLURM_NODEID=$n "$@" &\n'
    srun += 'pids="$pids $!"; [ "$DRY_RUN" = 1 ] && wait; done\n'
    srun += 'code=0; for p in $pids; do wait $p || code=$?; done; [ "$DRY_RUN" ] || exit $code'
    for command, body in (
        ("nvidia-smi", listed),
        ("srun", srun),
        ("scontrol", "printf '127.0.0.1\\nother\\n'"),
    ):
        (bin_dir / command).write_text(f"#!/bin/bash\n{body}\n")
        (bin_dir / command).chmod(0o755)
    inherited = {k: v for k, v in os.environ.items() if k not in ("SMOKE", "DRY_RUN", "MODEL")}
    path = f"{bin_dir}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    given = {"RUN_DIR": str(tmp_path / "run"), "RESULT": str(tmp_path / "result"), **variables}
    return subprocess.run(
        ["bash", str(RECIPES / name), *arguments],
        env=inherited | given | {"PATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


def commands(ended):
    """The commands that a recipe showed, as lists of words."""
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return [shlex.split(line[2:]) for line in ended.stdout.splitlines() if line.startswith("$ ")]


def the(program, shown):
    """Arguments of the only command that runs `program`."""
    (command,) = (c for c in shown if program in c)
    place = command.index(program)
    return command[:place], command[place + 1 :]


def train_config(arguments, default=None):
    config = complete(parse_command_line(Config, arguments, "train.py", default or Config()))
    config.check()
    return config


def launched(before, after):
    """What `accelerate launch` makes of its part of a command."""
    from accelerate.commands.launch import launch_command_parser

    assert before[0].endswith("accelerate") and before[1] == "launch"
    parsed = launch_command_parser().parse_args([*before[2:], "train.py", *after])
    assert (parsed.training_script, parsed.training_script_args) == ("train.py", after)
    assert (ROOT / parsed.config_file).exists()
    return parsed


def slurm(tmp_path, *arguments, **variables):
    given = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "x"}
    return script("slurm.sh", tmp_path, *arguments, **(given | variables))


# ------------------------------------------------------------------------------- accelerate configs


@pytest.mark.parametrize("name", YAML)
def test_accelerate_knows_every_key_of_its_config_files(name):
    from accelerate.commands.config.config_args import load_config_from_file
    from accelerate.utils import DistributedType

    config = load_config_from_file(str(RECIPES / name))
    assert config.distributed_type == DistributedType.FSDP
    assert config.main_process_port == 0


@pytest.mark.parametrize("name", YAML)
def test_accelerate_config_files_say_what_the_trainer_relies_on(name):
    config = yaml.safe_load((RECIPES / name).read_text())
    on_gpus = name == "fsdp2.yaml"
    assert config["num_processes"] == (8 if on_gpus else 2)
    assert config["num_machines"] == 1
    assert config["mixed_precision"] == "bf16"
    assert config.get("use_cpu", False) is not on_gpus
    fsdp = config["fsdp_config"]
    assert fsdp["fsdp_version"] == 2
    assert fsdp["fsdp_reshard_after_forward"] is True
    assert fsdp["fsdp_offload_params"] is False
    assert fsdp["fsdp_state_dict_type"] == "SHARDED_STATE_DICT"
    # True, accelerate's default, would fill the model with zeros on all ranks but the first.
    assert fsdp["fsdp_cpu_ram_efficient_loading"] is False


SHARDED = """
import json, sys
import torch
from safetensors.torch import load_file
from scale import distributed
from scale.default_models import resolve_model
from models import load_policy
path = resolve_model("tiny")
distributed.join()
model = distributed.shard(distributed.make_accelerator("bf16"), load_policy(path))
saved = load_file(path + "/model.safetensors")
same = [torch.equal(distributed.whole(p.detach()), saved[name.removeprefix("lm.")].float())
        for name, p in model.named_parameters()]
held = distributed.gather(sum(distributed.local(p).numel() for p in model.parameters()))
distributed.say(json.dumps([all(same), len(same), held, torch.get_num_threads()]))
distributed.meet()
distributed.leave()
"""


@pytest.mark.slow
def test_two_processes_hold_the_whole_model_between_them_and_its_saved_weights(tmp_path):
    (tmp_path / "sharded.py").write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{SHARDED}"
    )
    command = [sys.executable, "-m", "accelerate.commands.launch"]
    command += ["--config_file", str(RECIPES / "fsdp2_cpu.yaml")]
    command += ["--num_cpu_threads_per_process", "1", str(tmp_path / "sharded.py")]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    same, count, held, threads = json.loads(ended.stdout.strip().splitlines()[-1])
    assert (same, threads) == (True, 1)
    assert count > 40
    total = measure_memory.SMALL["tiny"].parameters
    assert held == [total / 2, total / 2]


# ---------------------------------------------------------------------------------- textcraft_3b.sh


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_are_bash(name):
    subprocess.run(["bash", "-n", str(RECIPES / name)], check=True)


def test_the_run_has_the_papers_settings(tmp_path):
    shown = commands(script("textcraft_3b.sh", tmp_path, cards=[81559] * 8, DRY_RUN="1"))
    before, after = the("train.py", shown)
    config = train_config(after)  # from the defaults of a CPU: nothing is left to the machine
    not_used = {"critic_learning_rate"}  # grpo has no critic
    for name, value in PAPER.items():
        if name not in not_used:
            assert getattr(config, name) == value, name
    assert config.algorithm == "grpo"
    assert (config.clip_ratio, config.temperature, config.kl_estimator) == (0.2, 1.0, "k3")
    assert config.evaluation_rounds == 30
    assert config.gradient_checkpointing and config.lora_rank == 0
    launch = launched(before, after)
    assert (launch.config_file, launch.num_processes) == ("recipes/fsdp2.yaml", 8)


def test_the_test_is_the_published_split_with_thirty_turns(tmp_path):
    shown = commands(script("textcraft_3b.sh", tmp_path, cards=[81559] * 8, DRY_RUN="1"))
    tests = [c[c.index("evaluate.py") + 1 :] for c in shown if "evaluate.py" in c]
    configs = [parse_command_line(EvalConfig, arguments, "evaluate.py") for arguments in tests]
    for config in configs:
        config.check()
        assert (config.env, config.split, config.samples) == ("textcraft", "test", 1)
        assert config.max_rounds == (30,)
        assert config.max_tokens_per_turn == PAPER["max_tokens_per_turn"]
        assert config.max_trajectory_tokens == PAPER["max_trajectory_tokens"]
    assert [config.model for config in configs] == [
        PAPER["model"],
        str(tmp_path / "run/checkpoints/best"),
    ]
    assert shown[0] == ["make", "--no-print-directory", "setup"]


@pytest.mark.parametrize(
    ("cards", "processes", "changes"),
    [
        ([81559] * 16, 8, {}),
        ([81559] * 5, 4, {}),
        ([24576] * 8, 8, {}),
        ([40960] * 5, 4, {}),
        ([143771] * 2, 2, {}),
        ([183359], 1, {}),
        ([143771], 1, {}),
        ([81559], 1, {"lora_rank": 64, "learning_rate": 1e-5}),
        ([46068], 1, {"lora_rank": 64, "learning_rate": 1e-5}),  # sold as 48 GB
    ],
)
def test_the_run_fits_itself_to_the_gpus(tmp_path, cards, processes, changes):
    shown = commands(script("textcraft_3b.sh", tmp_path, cards=cards, DRY_RUN="1"))
    before, after = the("train.py", shown)
    if processes > 1:
        assert launched(before, after).num_processes == processes
    else:
        assert before == [".venv/bin/python"]
    config = train_config(after)
    assert config.gradient_checkpointing
    assert config.tasks_per_step % processes == 0
    for name in ("lora_rank", "learning_rate"):
        assert getattr(config, name) == changes.get(name, {**vars(Config()), **PAPER}[name])
    assert config.max_tokens_per_micro_batch >= config.max_trajectory_tokens


@pytest.mark.parametrize(
    ("cards", "line"),
    [
        (None, "no GPU answers (nvidia-smi); this recipe needs one of 40 GB or several."),
        ([16384] * 8, "8 x 16384 MiB is too little for a 3B model"),
        ([24576], "1 x 24576 MiB is too little for a 3B model"),
    ],
)
def test_a_machine_that_is_too_small_is_told_so(tmp_path, cards, line):
    ended = script("textcraft_3b.sh", tmp_path, cards=cards, DRY_RUN="1")
    assert ended.returncode == 1
    assert line in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def test_the_cards_that_the_script_asks_for_are_those_of_the_arithmetic():
    text = (RECIPES / "textcraft_3b.sh").read_text()
    cards = {name: int(mib) for name, mib in re.findall(r"\bCARD_(\w+)=(\d+)", text)}
    shape = memory.QWEN["3B"]
    for devices, tokens in ((8, 16384), (4, 16384), (2, 16384), (1, 10752)):
        needed = memory.card_bytes(shape, tokens, devices) / 2**20
        assert needed <= cards[str(devices)], devices
    assert memory.card_bytes(shape, 10752, 1, lora_rank=64) / 2**20 <= cards["LORA"]


def test_a_run_that_exists_is_resumed_and_one_that_is_done_is_not_run_again(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "config.json").write_text("{}")
    (run_dir / "test_before").mkdir()
    (run_dir / "test_before/eval.json").write_text('{"complete": true}')
    ended = script("textcraft_3b.sh", tmp_path, cards=[81559] * 8, DRY_RUN="1")
    _, after = the("train.py", commands(ended))
    assert after == ["--resume", "--run-dir", str(run_dir)]
    assert f"done before: {run_dir}/test_before" in ended.stdout
    last = run_dir / "checkpoints/step_000300/trainer_state"
    last.mkdir(parents=True)
    (last / "state.json").write_text("{}")
    ended = script("textcraft_3b.sh", tmp_path, cards=[81559] * 8, DRY_RUN="1")
    assert not [c for c in commands(ended) if "train.py" in c]


def test_the_smoke_test_changes_numbers_and_no_command(tmp_path):
    real = commands(script("textcraft_3b.sh", tmp_path, cards=[81559] * 8, DRY_RUN="1"))
    smoke = commands(script("textcraft_3b.sh", tmp_path, SMOKE="1", DRY_RUN="1"))
    before, after = the("train.py", smoke)
    assert launched(before, after).config_file == "recipes/fsdp2_cpu.yaml"
    config, real_config = train_config(after), train_config(the("train.py", real)[1])
    assert (config.model, config.steps, config.engine) == ("tiny", 2, "vllm")
    kept = ("env", "split", "warm_start", "algorithm", "rounds_scheduler", "learning_rate")
    kept += ("kl_loss_coef", "entropy_coef", "eval_tasks", "run_dir")
    for name in kept:
        assert getattr(config, name) == getattr(real_config, name), name
    assert [c[:2] for c in smoke if "train.py" not in c] == [
        c[:2] for c in real if "train.py" not in c
    ]


@ON_A_CPU
@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_the_smoke_test_walks_to_its_last_line_and_a_second_walk_has_nothing_left(tmp_path):
    ended = script("textcraft_3b.sh", tmp_path, SMOKE="1")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-1] == f"done: {tmp_path}/result.md"
    assert "in parts on 2 processes" in ended.stdout
    result = json.loads((tmp_path / "result.json").read_text())
    assert "smoke" in result["settings"]
    assert result["after"]["complete"] and result["after"]["overall"]["items"] == 3
    held = {i["item_id"] for i in json.loads((tmp_path / "run/held_out.json").read_text())}
    published = set()
    for split in ("train", "test"):
        ids = json.loads((ROOT / f"envs/textcraft/ids/textcraft_{split}.json").read_text())
        published |= {i["item_id"] for i in ids}
    assert held and not held & published
    again = script("textcraft_3b.sh", tmp_path, SMOKE="1")
    assert not [c for c in commands(again) if "train.py" in c or "evaluate.py" in c]


def test_what_the_script_imports_is_there():
    text = (RECIPES / "textcraft_3b.sh").read_text()
    lines = re.findall(r"^(?:from [\w.]+ )?import .*", text, re.M)
    assert len(lines) >= 6
    exec("\n".join(lines), {})


def test_the_result_page_says_that_it_was_not_run_as_long_as_there_is_no_result():
    page = (RECIPES / "results/textcraft_3b.md").read_text()
    was_run = (RECIPES / "results/textcraft_3b.json").exists()
    assert ("Not run yet" in page) is not was_run


# ----------------------------------------------------------------------------------------- slurm.sh


def test_every_node_launches_its_part_with_a_server_of_its_own(tmp_path):
    shown = commands(slurm(tmp_path, "--subtasks", "depth 1", "depth 2", DRY_RUN="1"))
    trains = [c for c in shown if "train.py" in c]
    for node, command in enumerate(trains):
        before, after = the("train.py", [command])
        launch = launched(before, after)
        assert (launch.num_machines, launch.num_processes) == (2, 16)
        assert (launch.machine_rank, launch.main_process_ip) == (node, "127.0.0.1")
        config = train_config(after)
        assert config.env_addr == (f"http://127.0.0.1:{36005 + node}",)
        assert config.subtasks == ("depth 1", "depth 2")
        assert config.run_dir == str(tmp_path / "run")
    servers = [c for c in shown if "envs.server" in c]
    assert [c[-2] for c in servers] == ["36005", "36006"]


def test_servers_elsewhere_are_used_instead(tmp_path):
    addresses = "http://a:1 http://b:2"
    shown = commands(slurm(tmp_path, DRY_RUN="1", ENV_ADDR=addresses))
    assert not [c for c in shown if "envs.server" in c]
    for command in shown:
        assert train_config(the("train.py", [command])[1]).env_addr == tuple(addresses.split())


def test_a_job_whose_run_exists_goes_on_with_it(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.json").write_text("{}")
    shown = commands(slurm(tmp_path, "--steps", "9", DRY_RUN="1", ENV_ADDR="http://a:1"))
    for command in shown:
        _, after = the("train.py", [command])
        assert after == ["--resume", "--run-dir", f"{tmp_path}/run", "--env-addr", "http://a:1"]


def test_outside_of_a_job_it_says_how_to_submit_it(tmp_path):
    ended = slurm(tmp_path, SLURM_JOB_ID="")
    assert ended.returncode == 2
    assert "sbatch recipes/slurm.sh" in ended.stderr


@ON_A_CPU
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_nodes_of_one_process_train_together(tmp_path):
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    options = "--model tiny --warm-start never --steps 1 --tasks-per-step 2 --group-size 2"
    options += " --rounds 2 --max-tokens-per-turn 16 --eval-every 0 --no-skip-zero-variance"
    on_a_cpu = {"CONFIG": "recipes/fsdp2_cpu.yaml", "GPUS_PER_NODE": "1", "PORT": port}
    ended = slurm(tmp_path, *options.split(), **on_a_cpu)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "in parts on 2 processes" in ended.stdout
    policy = tmp_path / "run/checkpoints/step_000001/trainer_state/policy"
    assert {p.name for p in policy.glob("*.distcp")} == {"__0_0.distcp", "__1_0.distcp"}


# ------------------------------------------------------------------------------------------- README


def test_the_page_on_recipes_names_every_file_and_flags_that_exist():
    page = (RECIPES / "README.md").read_text(encoding="utf-8")
    for name in (
        *YAML,
        *SCRIPTS,
        "memory.py",
        "results/memory.md",
        "results/textcraft_3b.md",
    ):
        assert f"`{name}`" in page, name
    table = (memory.RESULTS / "memory.md").read_text(encoding="utf-8").splitlines()
    rows = [line for line in page.splitlines() if re.match(r"\| [\d.]+B \|", line)]
    assert rows and set(rows) <= set(table)
    flags = {"--" + f.name.replace("_", "-") for f in fields(Config)}
    for line in re.findall(r"train\.py (--.*)", page):
        assert set(re.findall(r"--[a-z-]+", line)) <= flags
