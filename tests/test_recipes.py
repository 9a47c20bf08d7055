"""The recipes: runs and their records, evidence, tables, and the scripts of large runs."""

import json
import math
import os
import random
import re
import shlex
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import measure_memory
import pytest
import yaml

from agentevol import EvolConfig
from agents import Agent
from config import PAPER, Config, checked, complete, parse_command_line, read_command_line
from dpo import DpoConfig
from envclient import connect
from envs.babyai.env import BabyAI
from evaluate import EvalConfig
from formats import React
from recipes import common, evidence, laboratory, memory, miniature, tables
from scale.memory import card_bytes, transient_bytes
from sft import SftConfig
from trajectory import Trajectory, Turn

ROOT = Path(__file__).resolve().parent.parent
RECIPES = ROOT / "recipes"
CONFIGS = {config.program: config for config in (Config, SftConfig, DpoConfig, EvolConfig)}


def test_a_record_has_the_totals_of_a_run_and_the_turns_of_every_solved_goal(tmp_path):
    def write(name, *lines):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("".join(json.dumps(line) + "\n" for line in lines))

    def line(success, turns, reason="success"):
        row = {"task_id": "a", "success": success, "stop_reason": reason, "loss_mask": [0, 1, 1]}
        return row | {"turns": [{}] * turns}

    write("config.json", {"config": {"steps": 2}, "command": "train.py"})
    write("metrics.jsonl", {"step": 0}, {"step": 1, "policy/loss": 0.5}, {"step": 2})
    write("timings.jsonl", {"step": 1, "time/step_s": 9.0, "time/cpu_s": 3.0})  # step 2 is missing
    write("trajectories/step_000001.jsonl", line(True, 2), line(False, 3, "max_rounds"))
    for step, success in ((0, False), (2, True)):
        for folder, suffix, turns in (("", "", 2), ("temperature_0.3/", "_temperature_0.3", 1)):
            write(f"eval/{folder}step_{step:06d}.json", {"step": step, "samples": 2})
            lines = line(success, turns), line(False, 1, "env_error")
            write(f"trajectories/eval_{step:06d}{suffix}.jsonl", *lines)
    record = common.record(tmp_path)
    totals = {"turns": 5, "tokens": 4, "cpu_seconds": 3.0}
    assert record["curve"] == [{"step": 1, **totals, "policy/loss": 0.5}, {"step": 2, **totals}]
    assert [e["solved_in"] for e in record["held_out"]] == [{"a": [0]}, {"a": [2]}]
    assert [e["solved_in"] for e in record["held_out_at"]["0.3"]] == [{"a": [0]}, {"a": [1]}]
    (tmp_path / "eval/step_000002.json").unlink()
    with pytest.raises(SystemExit, match="expected 0 to 2"):
        common.record(tmp_path)


def test_an_existing_run_is_resumed_unless_it_is_complete(tmp_path, monkeypatch, capsys):
    calls, words = [], ["--seed", "1", "--model", "tiny"]
    monkeypatch.setattr(common, "run", calls.append)
    common.run_program("dpo.py", words, tmp_path)
    (tmp_path / "config.json").write_text('{"config": {"steps": 5}}')
    common.run_program("dpo.py", words, tmp_path)
    command = ["dpo.py", *words, "--run-dir", str(tmp_path)]
    assert [call[1:] for call in calls] == [command, [*command, "--resume"]]
    (tmp_path / "checkpoints/step_000005").mkdir(parents=True)
    common.run_program("dpo.py", words, tmp_path)
    assert "is complete" in capsys.readouterr().out and len(calls) == 2


def test_only_runs_that_differ_in_nothing_but_their_seed_are_pooled():
    runs = [
        {"steps": 5, "config": {"seed": seed, "learning_rate": rate, "data": [f"{seed}.json"]}}
        for seed, rate in ((0, 1e-4), (1, 1e-4), (2, 1e-5))
    ]
    assert common.require_alike(runs[:2]) == runs[:2]
    with pytest.raises(ValueError, match="learning_rate 0.0001 and 1e-05"):
        common.require_alike(runs)
    with pytest.raises(ValueError, match="steps 5 and 6"):
        common.require_alike([runs[0], runs[1] | {"steps": 6}])
    for loss_agg in ("token-mean", "seq-mean"):  # the older run has no such option
        newer = runs[1] | {"config": runs[1]["config"] | {"loss_agg": loss_agg}}
        if loss_agg == Config().loss_agg:
            common.require_alike([runs[0], newer])
        else:
            with pytest.raises(ValueError, match=f"loss_agg {Config().loss_agg} and {loss_agg}"):
                common.require_alike([runs[0], newer])


def test_every_option_of_a_committed_run_exists():
    """Otherwise a new run, which lacks the option, could not be pooled with it."""
    known = {field.name for config in common.CLASSES for field in fields(config)}
    known |= common.RETIRED.keys()
    for path in common.COMMITTED.rglob("*-[0-9].json"):
        assert common.read_json(path).get("config", {}).keys() <= known, path


@pytest.mark.parametrize("name", [n for n, arm in miniature.ARMS.items() if ".py" in arm.program])
def test_the_program_of_every_arm_accepts_its_options(name, tmp_path, monkeypatch):
    monkeypatch.setattr("config.check_package", lambda env: None)  # no episode is played
    arm, data = miniature.ARMS[name], tmp_path / "demonstrations.json"
    data.write_text("[]")
    words = miniature.arguments_of(arm, 1, data)
    # Weights that are made when an arm needs them.
    made = [miniature.BETTER, *map(miniature.start_folder, miniature.WAYS)]
    words = ["recipes/starts/tiny-babyai" if word in made else word for word in words]
    options = checked(read_command_line(words, CONFIGS[arm.program])[0])
    lists = [Path(path).stem for path in (options.tasks, options.eval_tasks)]
    if "long_train" in lists:
        assert options.evaluation_rounds == 24
        assert lists[1] in ("long_held_out", "long_development")
    else:
        rounds = {"plan": 15, "reflect": 8}  # a plan is a turn, too; two attempts
        assert options.evaluation_rounds == rounds.get(name, 16)
        assert lists[0] == "train" and lists[1] in ("held_out", "evaluated", "development")
    assert ("development" in lists[1]) == (arm.seeds == (miniature.PILOT_SEED,) and "-at-" in name)
    assert (options.steps, options.seed) == (arm.steps, 1)


def test_horizons_are_compared_at_equal_updates_two_temperatures_and_rates_chosen_apart():
    """Trap 33. The mazes that choose a rate are evaluated beside the held-out ones, not among
    them."""
    arms, lists = miniature.ARMS, laboratory.lists()
    assert {arms[name].steps for name in ("short", *miniature.OFTEN)} == {miniature.SHORT_STEPS}
    rated = [arms[miniature.at_rate(n, r)] for n in miniature.HORIZONS for r in miniature.RATES]
    for arm in rated:
        name = Path(arm.options[arm.options.index("--eval-tasks") + 1]).stem
        assert {*lists["development"]} <= {*lists[name]} > {*lists["held_out"]}
    chosen = [choice.make(choice.rates[0]) for choice in miniature.CHOICES.values()]
    for arm in (*rated, *chosen, *(arms[name] for name in miniature.OFTEN)):
        where = arm.options.index("--eval-temperatures")
        assert arm.options[where + 1 : where + 3] == ("1", "0.3")


def solving(start, end):
    """An evaluation before and one after training, each of ten episodes on one development maze."""
    shares = [{"development": {"babyai_1": [9] * n + [0] * (10 - n)}} for n in (start, end)]
    return {"curve": [], "held_out": shares}


@pytest.mark.parametrize(
    ("ends", "best", "falls"), [((5, 2), 0, 1), ((1, 2), 1, 0), ((3, 6), 1, 2)]
)
def test_pilots_choose_the_best_rate_or_the_lowest_that_falls(ends, best, falls):
    for name, rates in (("grow", (3e-5, 1e-4)), ("hot-grow", (3e-4, 5e-4, None))):
        pilots = zip(miniature.pilots_of(name), ends, strict=True)
        results = {(arm, miniature.PILOT_SEED): solving(5, end) for arm, end in pilots}
        chosen = rates[best if name == "grow" else falls]
        assert miniature.best_rate(name, results) == chosen
        results.popitem()
        assert miniature.best_rate(name, results) is None


def run_of(solved, updates=True):
    """A made-up run of `growth` or `hot`: how many of ten goals it solves at its start and end."""
    goals = [f"babyai_{index}" for index in laboratory.lists()["long_held_out"][::14]]
    held_out = [
        {
            "step": step,
            "samples": 2,
            "solved_in": {g: [5 * (i < n)] * 2 for i, g in enumerate(goals)},
        }
        for step, n in zip((0, 44), solved)
    ]
    metrics = ("groups_mixed", "groups", "success_rate", "stop/max_rounds", "cut_turn_rate")
    row = {f"train/{name}": 0.5 for name in metrics} | {"cpu_seconds": 60}
    row |= {"policy/entropy": 0.3, "policy/kl": 0.1} if updates else {}
    config = {"model": "far", "eval_rounds": 24, "learning_rate": 1e-3}
    curve = [row | {"step": step, "turns": 100 * step} for step in range(1, 45)]
    common_part = {"seed": 0, "config": config, "git_commit": "abcdefgh", "curve": curve}
    return common_part | {"held_out": held_out, "held_out_at": {"0.3": held_out}}


def test_the_report_shows_arms_that_collapsed_and_none_that_is_unfinished(monkeypatch):
    runs = {(arm, seed): run_of((6, 8)) for arm in miniature.HOT for seed in miniature.SEEDS}
    monkeypatch.setattr(tables, "laboratory_results", lambda uncommitted: runs)
    tables.evaluations_of.cache_clear()
    report = tables.TABLES["hot"]
    assert any("Result: +0.0" in line for line in report())
    ends = enumerate((0, 8, 0))
    runs |= {("hot-cap24", seed): run_of((6, end), updates=False) for seed, end in ends}
    lines = report()
    assert any(
        line.startswith("| hot-cap24 | 0.001 | 100 |") and "| - | - |" in line for line in lines
    )
    (first,) = [line for line in lines if line.startswith("Primary comparison")]
    low, high = re.search(r"seeds \[([+-][\d.]+), ([+-][\d.]+)\]", first).groups()
    assert float(high) - float(low) > 60  # the runs of the arm that fell are far apart
    runs |= {
        (arm, seed): run_of((6, 0), updates=False)
        for arm in miniature.HOT
        for seed in miniature.SEEDS
    }
    assert report()  # all collapsed
    del runs["hot-grow", 1]
    assert report() == []
    tables.evaluations_of.cache_clear()


def test_a_collapse_is_found_where_success_stays_below_half():
    def run(*success):
        rows = [{"train/success_rate": x, "turns": 10.0 * i} for i, x in enumerate(success)]
        return {"curve": rows}

    high, low = [0.8] * 5, [0.1] * 5
    assert tables.collapse(run(*high, *low, *high)) == 0
    assert tables.collapse(run(*high, *low)) == 70  # steps 3 to 7 are the first below half
    assert tables.collapse(run(*low, *high, *low)) == 0


def test_the_teachers_turns_count_when_its_episodes_are_used():
    sft = miniature.Arm(program="sft.py", num_demonstrations=150)
    rows = [{"turns": 0.0, "train/trajectories_used": 64} for _ in range(3)]
    miniature.add_teacher_turns({"curve": rows}, sft, turns=2.0)
    assert [row["turns"] for row in rows] == [128.0, 256.0, 300.0]
    rows = [{"turns": 10.0}, {"turns": 10.0}]
    miniature.add_teacher_turns({"curve": rows}, miniature.ARMS["agentevol"], turns=2.0)
    assert [row["turns"] for row in rows] == [1034.0, 1034.0]


# --------------------------------------------------------------------------------------- evidence


def runs_with(*shares):
    """Runs that solved each goal in this share of two samples."""
    return [{"shares": dict(zip("abcd", goals, strict=True))} for goals in shares]


def read(run):
    return run["shares"]


def test_runs_cannot_agree_more_closely_than_their_evaluations():
    equal = runs_with((0.5,) * 4, (0.5,) * 4, (0.5,) * 4)
    opposite = runs_with((0.0,) * 4, (1.0,) * 4)
    noise = math.sqrt(4 * 0.25) / 4  # two samples: p (1 - p) / (2 - 1) for each of four goals
    assert evidence.spread([equal], read, samples=2) == evidence.Spread(noise, 2)
    both = evidence.spread([equal, opposite], read, samples=2)
    assert both == evidence.Spread(math.sqrt(0.5 / 3), 3)  # pooled: (0 + 2 · 0.5²) / (2 + 1)


def test_a_difference_has_an_interval_for_goals_kinds_and_seeds():
    before = runs_with((0.5, 0.5, 0.5, 0.5))
    after = runs_with((1.0, 1.0, 0.5, 0.5), (1.0, 1.0, 0.5, 0.5))
    arguments = (after, before, read, read, str, evidence.Spread(0.1, 2))  # each goal is a kind
    difference = evidence.compare(*arguments)
    for estimate in vars(difference).values():
        assert estimate["value"] == pytest.approx(0.25)
    assert difference.kinds["high"] == pytest.approx(0.25 + 3.182 * 0.1443, abs=1e-3)
    assert difference.seeds["high"] == pytest.approx(0.25 + 4.303 * 0.1 * math.sqrt(1.5), abs=1e-3)
    from_start = evidence.compare(*arguments, is_start=True)
    assert from_start.seeds["high"] == pytest.approx(0.25 + 4.303 * 0.1 * math.sqrt(0.5), abs=1e-3)


# ------------------------------------------------------------------------------------- laboratory


def test_held_out_goals_are_not_in_training_or_demonstrations():
    used = [*laboratory.SEEDS.values(), laboratory.TEACHER_SEEDS]
    assert len({seed for seeds in used for seed in seeds}) == sum(map(len, used))  # no overlap
    for name, goals in laboratory.lists().items():
        rows = json.loads((laboratory.FOLDER / f"{name}.json").read_text())
        assert [row["item_id"] for row in rows] == [f"babyai_{index}" for index in goals]


@pytest.mark.parametrize("way", miniature.WAYS)
def test_the_teacher_reads_what_the_policy_will_read(way):
    pytest.importorskip("minigrid", reason="NOT TESTED: make setup ENV=babyai")
    agent = {"plan": Agent("plan"), "reflect": Agent("reflect", attempts=2)}.get(way, Agent())
    max_actions = laboratory.MAX_ACTIONS if way == "several" else 1
    client = connect("babyai", "local", action_format=React(max_actions))
    rng, env = random.Random(0), BabyAI()
    for index in laboratory.lists()["held_out"][::30]:
        record, success = laboratory.play(env, index, rng, error=0.4, way=way)
        turns = record["conversations"][1:]
        assert [turn["from"] for turn in turns] == ["human", "gpt"] * (len(turns) // 2)
        limit = laboratory.CARELESS_TURNS if way == "reflect" else len(turns)
        t = Trajectory(
            "t", 0, "babyai", record["item_id"], "", group_id=0, seed=0, max_rounds=limit
        )
        text = agent.opening(t, client.reset(index))
        for read, written in zip(turns[::2], turns[1::2], strict=True):
            assert text == read["value"]
            t.turns.append(turn := Turn((0, 0), written["value"], kind=t.next_kind))
            if turn.kind == "reflect":
                t.max_rounds = len(turns)
            text = agent.next_text(t, turn, client, index)
        assert t.success == success


# -------------------------------------------------------------------------------- tables, memory


@pytest.mark.parametrize("page", tables.PAGES)
def test_the_tables_of_a_page_match_the_committed_results(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    assert "<!-- table " in text
    assert tables.with_tables(text) == text, "out of date: run python recipes/tables.py"


@pytest.mark.parametrize(("rank", "keep"), [(0, "all"), (0, "inputs"), (4, "products")])
def test_the_memory_formulas_match_an_update_of_the_tiny_model(rank, keep):
    shape = measure_memory.TINY
    num_bytes = measure_memory.measure(shape, tokens=256, lora_rank=rank, keep=keep)
    state = memory.state_bytes(shape, 1, rank)
    assert {part: num_bytes[part] for part in measure_memory.STATE} == {
        part: state[part] for part in measure_memory.STATE
    }
    expected = transient_bytes(shape, 256, 1, rank, keep, 24 << 20)
    assert num_bytes["transient"] == pytest.approx(expected, rel=0.15)


# ------------------------------------------------------------------------- scripts of large runs


def script(name, tmp_path, *arguments, cards=(), **variables):
    """Run a script with replacements for nvidia-smi, srun and scontrol on its PATH."""
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir(exist_ok=True)
    lines = "".join(f"{card}\\n" for card in cards)
    nvidia_smi = f"printf '{lines}'" if cards else "exit 9"
    # Both nodes run on this machine; in a dry run one after the other.
    srun = 'shift 2; for n in $(seq 0 $((SLURM_NNODES - 1))); do SLURM_NODEID=$n "$@" &\n'
    srun += 'pids="$pids $!"; [ "$DRY_RUN" = 1 ] && wait; done\n'
    srun += 'code=0; for p in $pids; do wait $p || code=$?; done; [ "$DRY_RUN" ] || exit $code'
    for command, body in (
        ("nvidia-smi", nvidia_smi),
        ("srun", srun),
        ("scontrol", "printf '127.0.0.1\\nother\\n'"),
    ):
        (bin_dir / command).write_text(f"#!/bin/bash\n{body}\n")
        (bin_dir / command).chmod(0o755)
    inherited = {k: v for k, v in os.environ.items() if k not in ("SMOKE", "DRY_RUN", "MODEL")}
    path = f"{bin_dir}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    folders = {"RUN_DIR": str(tmp_path / "run"), "RESULT": str(tmp_path / "result")}
    return subprocess.run(
        ["bash", str(RECIPES / name), *arguments],
        env=inherited | folders | variables | {"PATH": path},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


def slurm(tmp_path, *arguments, **variables):
    job = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "x"}
    return script("slurm.sh", tmp_path, *arguments, **(job | variables))


def train_3b(tmp_path, *cards):
    """A dry run of the 3B script on a machine whose GPUs have `cards` MiB of memory."""
    return script("textcraft_3b.sh", tmp_path, cards=cards, DRY_RUN="1")


def printed_commands(process):
    """The commands that a script printed, as lists of words."""
    assert process.returncode == 0, process.stdout + process.stderr
    return [shlex.split(line[2:]) for line in process.stdout.splitlines() if line.startswith("$ ")]


def split_at(program, commands):
    """The words before and after `program` in the only command that runs it."""
    (command,) = (c for c in commands if program in c)
    position = command.index(program)
    return command[:position], command[position + 1 :]


def train_config(arguments):
    config = complete(parse_command_line(Config, arguments, "train.py", Config()))
    config.check()
    return config


def launch_options(before, after):
    """The options of `accelerate launch` in a command that is split at train.py."""
    from accelerate.commands.launch import launch_command_parser

    assert before[0].endswith("accelerate") and before[1] == "launch"
    return launch_command_parser().parse_args([*before[2:], "train.py", *after])


@pytest.mark.parametrize("name", ["fsdp2.yaml", "fsdp2_cpu.yaml"])
def test_the_accelerate_config_files_have_the_settings_that_the_trainer_needs(name):
    fsdp = yaml.safe_load((RECIPES / name).read_text())["fsdp_config"]
    assert (fsdp["fsdp_version"], fsdp["fsdp_state_dict_type"]) == (2, "SHARDED_STATE_DICT")
    # True, accelerate's default, would fill the model with zeros on all ranks but the first.
    assert fsdp["fsdp_cpu_ram_efficient_loading"] is False


def test_the_3b_run_has_the_papers_settings_and_is_tested_on_the_published_split(tmp_path):
    commands = printed_commands(train_3b(tmp_path, *[81559] * 8))
    before, after = split_at("train.py", commands)
    config = train_config(after)  # on top of the CPU defaults, so the script must set everything
    for name, value in PAPER.items():
        if name != "critic_learning_rate":  # grpo has no critic
            assert getattr(config, name) == value, name
    assert (config.algorithm, config.clip_ratio, config.evaluation_rounds) == ("grpo", 0.2, 30)
    launch = launch_options(before, after)
    assert (launch.config_file, launch.num_processes) == ("recipes/fsdp2.yaml", 8)
    tests = [c[c.index("evaluate.py") + 1 :] for c in commands if "evaluate.py" in c]
    assert len(tests) == 2
    for words in tests:
        test = parse_command_line(EvalConfig, words, "evaluate.py")
        assert (test.env, test.split, test.samples) == ("textcraft", "test", 1)
        assert test.max_rounds == (30,)


@pytest.mark.parametrize(
    ("cards", "processes", "lora"),
    [([81559] * 16, 8, 0), ([40960] * 5, 4, 0), ([143771], 1, 0), ([46068], 1, 64)],
)
def test_the_3b_run_adapts_to_the_gpus(tmp_path, cards, processes, lora):
    before, after = split_at("train.py", printed_commands(train_3b(tmp_path, *cards)))
    if processes > 1:
        assert launch_options(before, after).num_processes == processes
    config = train_config(after)
    assert config.gradient_checkpointing and config.tasks_per_step % processes == 0
    assert (config.lora_rank, config.learning_rate) == (lora, 1e-5 if lora else 1e-6)
    assert config.max_tokens_per_micro_batch >= config.max_trajectory_tokens


def test_a_machine_that_is_too_small_gets_a_clear_error(tmp_path):
    for cards, text in ((), "reports no GPU"), ([16384] * 8, "8 x 16384 MiB is too little"):
        process = train_3b(tmp_path, *cards)
        assert process.returncode == 1 and text in process.stderr


def test_the_cards_that_the_script_requires_are_large_enough_by_the_formulas():
    text = (RECIPES / "textcraft_3b.sh").read_text()
    cards = {name: int(mib) for name, mib in re.findall(r"\bCARD_(\w+)=(\d+)", text)}
    for devices, tokens in ((8, 16384), (4, 16384), (2, 16384), (1, 10752)):
        min_mib = card_bytes(memory.QWEN["3B"], tokens, devices) / 2**20
        assert min_mib <= cards[str(devices)], devices
    assert card_bytes(memory.QWEN["3B"], 10752, 1, lora_rank=64) / 2**20 <= cards["LORA"]


def test_the_3b_script_imports_only_what_exists():
    text = (RECIPES / "textcraft_3b.sh").read_text()
    for line in re.findall(r"^(?:from|import) .*", text, re.MULTILINE):
        exec(line, {})


def test_an_existing_3b_run_is_resumed_and_a_finished_one_is_not_run_again(tmp_path):
    run_dir = tmp_path / "run"
    (run_dir / "test_before").mkdir(parents=True)
    (run_dir / "config.json").write_text("{}")
    (run_dir / "test_before/eval.json").write_text('{"complete": true}')
    process = train_3b(tmp_path, 143771)
    _, after = split_at("train.py", printed_commands(process))
    assert after == ["--resume", "--run-dir", str(run_dir)]
    assert f"done before: {run_dir}/test_before" in process.stdout
    last = run_dir / "checkpoints/step_000300/trainer_state"
    last.mkdir(parents=True)
    (last / "state.json").write_text("{}")
    process = train_3b(tmp_path, 143771)
    assert not [c for c in printed_commands(process) if "train.py" in c]


def test_every_node_starts_its_own_processes_and_its_own_server(tmp_path):
    commands = printed_commands(slurm(tmp_path, "--subtasks", "depth 1", "depth 2", DRY_RUN="1"))
    for node, command in enumerate(c for c in commands if "train.py" in c):
        before, after = split_at("train.py", [command])
        launch = launch_options(before, after)
        assert (launch.num_machines, launch.num_processes) == (2, 16)
        assert (launch.machine_rank, launch.main_process_ip) == (node, "127.0.0.1")
        config = train_config(after)
        assert config.env_addr == (f"http://127.0.0.1:{36005 + node}",)
        assert config.subtasks == ("depth 1", "depth 2")
    assert [c[-2] for c in commands if "envs.server" in c] == ["36005", "36006"]


def test_a_job_resumes_an_existing_run_with_its_own_server_addresses(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.json").write_text("{}")
    process = slurm(tmp_path, "--steps", "9", DRY_RUN="1", ENV_ADDR="http://a:1")
    commands = printed_commands(process)
    assert not [c for c in commands if "envs.server" in c]
    for command in commands:
        _, after = split_at("train.py", [command])
        assert after == ["--resume", "--run-dir", f"{tmp_path}/run", "--env-addr", "http://a:1"]
    process = slurm(tmp_path, SLURM_JOB_ID="")  # outside a job
    assert process.returncode == 2 and "sbatch recipes/slurm.sh" in process.stderr
