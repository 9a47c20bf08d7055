"""Misuse, command by command: exit code 2, one line on stderr that names what was wrong, in less
than two seconds, and nothing left behind.

The seconds are of the processor, not of the clock, and what costs them is named: on a busy machine
a refusal takes longer, and imports no more than on a quiet one.
"""

import json
import os
import resource
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from refusals import content

ROOT = Path(__file__).resolve().parents[1]
MOST_S = 2.0

# What a folder holds in which the commands are given. `...` below stands for nothing else.
FILES = {
    "ids.json": '[{"item_id": "textcraft_0"}]',
    "twice.json": '[{"item_id": "textcraft_0"}, {"item_id": "textcraft_0"}]',
    "babyai_ids.json": '[{"item_id": "babyai_3"}]',
    "beyond.json": '[{"item_id": "textcraft_999999"}]',
    "empty.json": "[]",
    "object.json": '{"a": 1}',
    "broken.json": '[{"item_id"',
    "prompt.txt": "Craft it.",
    "user.json": '[{"role": "user", "content": "Craft it."}]',
    "newer.json": '{"config": {"seed": 1, "aperture": 8}}',
    "steps.json": '{"config": {"steps": "ten"}}',
    "mine.json": '{"config": {"seed": 3}}',
    "run/config.json": '{"config": {"seed": 3, "model": "tiny"}}',
    "damaged/config.json": "{",
    "model/config.json": '{"model_type": "llama"}',
    "traj.json": '[{"item_id": "textcraft_0"}]',
    "eval.json": '{"items": {}}',
    "file": "",
}

# The command's words -> what its line must name.
TRAIN = {
    # words that cannot be read
    "--steps ten": "--steps ten",
    "--rounds 3 x": "--rounds 3 x",
    "--learning-rate fast": "--learning-rate fast",
    "--seed": "--seed takes one value",
    "--seed 1 2": "--seed takes one value",
    "--engine sglang": "--engine sglang",
    "--algorithm a2c": "--algorithm a2c",
    "--resume yes": "--resume takes no value",
    "--tasks-per-stepp 3": "did you mean --tasks-per-step?",
    "--max-rounds 3": "there is no --max-rounds",
    "textcraft": "textcraft is no option",
    "-v": "-v is no option",
    "--preset desktop": "--preset desktop",
    "--model tiny --steps None": "--steps",
    # numbers out of range
    "--steps 0": "--steps 0",
    "--group-size -1": "--group-size -1",
    "--temperature 0": "--temperature 0",
    "--temperature inf": "--temperature inf",
    "--learning-rate nan": "--learning-rate nan",
    "--gamma 1.5 --algorithm ppo": "--gamma 1.5",
    "--max-env-failures 2": "--max-env-failures 2",
    "--seed -1": "--seed -1",
    "--kl-coef -0.1": "--kl-coef -0.1",
    "--sampler-is-cap 0.5": "--sampler-is-cap 0.5",
    "--eval-rounds 0": "--eval-rounds 0",
    "--eval-every -1": "--eval-every -1",
    "--stop-at 1.5": "--stop-at 1.5",
    "--stop-at nan": "--stop-at nan",
    "--lora-rank -4": "--lora-rank -4",
    "--keep-last 0": "--keep-last 0",
    # options that contradict each other
    "--group-size 1": "--group-size 1",
    "--max-tokens-per-turn 2000": "--max-tokens-per-turn 2000",
    "--kl-target 0.1": "--kl-target",
    "--kl-loss-coef 0.1 --kl-estimator k1": "--kl-estimator k1",
    "--rounds 3 6": "--rounds 3 6",
    "--rounds 6 3 --rounds-scheduler scaling_inter_stepwise": "--rounds 6 3",
    "--rounds-scheduler scaling_inter_stepwise": "--rounds 7",
    "--rounds 0": "--rounds 0",
    "--rounds": "--rounds",
    "--rounds 3 6 --rounds-scheduler scaling_inter_stepwise --steps-scaling-inter 0": (
        "--steps-scaling-inter 0"
    ),
    "--engine-url http://a:1 --engine-devices 0": "--engine-url and --engine-devices",
    "--engine-url http://a:1 --engine transformers": "leave out --engine transformers",
    "--engine-devices 0 --deterministic": "leave out --deterministic",
    "--engine-devices 0 0": "--engine-devices 0 0",
    "--stop-at 0.9 --eval-every 0": "--stop-at",
    "--resume": "--resume needs --run-dir",
    # options without effect
    "--gamma 0.9": (
        "--gamma has no effect here: leave it out with --algorithm grpo; it works with --algorithm "
        "ppo or reinforce_plus_plus"
    ),
    "--gamma 0.9 --critic-learning-rate 1e-5 --lam 0.9 --seed 1": (
        "grpo; it works with --algorithm ppo; --critic-learning-rate has no effect here: leave it "
        "out with --algorithm grpo; it works with --algorithm ppo"
    ),
    "--gamma 0.9 --algorithm rloo": "--gamma has no effect",
    "--lam 0.9": "--lam has no effect",
    "--lam 0.9 --algorithm reinforce_plus_plus": "--lam has no effect",
    "--critic-learning-rate 1e-5": "--critic-learning-rate has no effect",
    "--value-clip 0.2": "--value-clip has no effect",
    "--steps-scaling-inter 5": "--steps-scaling-inter has no effect",
    "--kl-estimator k2": "--kl-estimator has no effect",
    "--no-skip-zero-variance --algorithm ppo": (
        "--no-skip-zero-variance has no effect here: leave it out with --algorithm ppo; it works "
        "with --algorithm grpo or rloo"
    ),
    "--deterministic --engine vllm": "--engine has no effect",
    "--tasks ids.json --split train": "--split has no effect",
    # worlds and tasks
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
    "--split dev": "--split dev",
    "--subtasks prime": "prime",
    "--eval-tasks nosuch.json": "nosuch.json",
    "--eval-subtasks prime": "prime",
    "--env-addr localhost": "--env-addr",
    "--env-addr ftp://a:1": "--env-addr",
    "--env-addr http://a:1 http://a:1": "--env-addr http://a:1 http://a:1",
    "--env-addr local http://a:1": "--env-addr local",
    "--env sciworld --env-addr local": "--env-addr local: sciworld",
    "--engine-url a:1": "--engine-url",
    # models
    "--model qwen2.5-3b": "--model qwen2.5-3b",
    "--model Qwen/Qwen2.5-3B-Instruct": "--model Qwen/Qwen2.5-3B-Instruct",
    "--model run": "--model run",
    "--model model": "holds no weights",
    "--model file": "--model file is a file",
    "--model /tmp/nope/nope": "--model /tmp/nope/nope",
    "--warm-start nosuch": "--warm-start nosuch",
    "--warm-start model": "--warm-start model",
    "--model tiny --max-trajectory-tokens 8192": "--max-trajectory-tokens 8193",
    "--max-trajectory-tokens 100000": "--max-trajectory-tokens",
    # files and directories
    "--run-dir run": "--run-dir run holds a run",
    "--run-dir file": "--run-dir file",
    "--run-dir file/run": "--run-dir file/run",
    "--resume --run-dir nosuch": "--run-dir nosuch",
    "--resume --run-dir damaged": "damaged/config.json",
    "--resume --run-dir run --seed 4": "leave out --seed",
    "--config nosuch.json": "--config nosuch.json",
    "--config broken.json": "--config broken.json",
    "--config ids.json": "--config ids.json",
    "--config newer.json": "aperture",
    "--config steps.json": "steps 'ten'",
    "--config mine.json --preset none": "--config and --preset",
    "--prompt nosuch.txt": "--prompt nosuch.txt",
    "--prompt file": "--prompt file is empty",
    "--prompt user.json": "--prompt user.json",
    "--prompt broken.json": "--prompt broken.json",
    "--prompt .": "--prompt .",
}
EVALUATE = {
    "--max-rounds ten": "--max-rounds ten",
    "--max-rounds 0": "--max-rounds 0",
    "--samples 0": "--samples 0",
    "--samples": "--samples takes one value",
    "--limit 0": "--limit 0",
    "--seed -1": "--seed -1",
    "--temperature -1": "--temperature -1",
    "--temperature 0 --samples 4": "--temperature 0",
    "--rounds 3": "there is no --rounds; did you mean --max-rounds?",
    "--engine sglang": "--engine sglang",
    "--env minecraft": "minecraft",
    "--tasks nosuch.json": "nosuch.json",
    "--tasks ids.json --split test": "--tasks ids.json and --split test",
    "--subtasks prime": "prime",
    "--model qwen2.5-3b": "--model qwen2.5-3b",
    "--model run": "--model run",
    "--model tiny --max-trajectory-tokens 9000": "--max-trajectory-tokens 9000",
    "--model tiny --api-base http://a:1 --api-model b": "--api-base",
    "--api-base http://a:1": "--api-base and --api-model",
    "--api-base a:1 --api-model b": "--api-base",
    "--api-base http://a:1 --api-model b --api-key-env NO_SUCH_KEY": "NO_SUCH_KEY",
    "--env-addr localhost:36005": "--env-addr",
    "--env all --tasks ids.json": "--tasks",
    "--env all --prompt prompt.txt": "--prompt",
    "--out run": "--out run",
    "--resume": "--resume",
    "--compare eval.json": "--compare",
    "--compare nosuch.json nosuch.json": "nosuch.json",
    "--compare ids.json object.json": "ids.json",
    "--prompt nosuch.txt": "--prompt nosuch.txt",
}
SFT = {
    "--epochs 0": "--epochs 0",
    "--epochs many": "--epochs many",
    "--learning-rate 0": "--learning-rate 0",
    "--num-demonstrations 0": "--num-demonstrations 0",
    "--lora-rank -1": "--lora-rank -1",
    "--seed -1": "--seed -1",
    "--out run": "--out run exists",
    "--data nosuch.json": "--data nosuch.json",
    "--data broken.json": "broken.json",
    "--data traj.json": "traj.json",
    "--data empty.json": "empty.json",
    "--data .": "--data .",
    "--model qwen2.5-3b": "--model qwen2.5-3b",
    "--model run": "--model run",
    "--tasks nosuch.json": "nosuch.json",
    "--env minecraft": "minecraft",
    "--subtasks prime": "prime",
    "--demonstrations 3": "there is no --demonstrations",
}
SERVER = {
    "": "--env",
    "--env minecraft": "minecraft",
    "--env textcraft --port 99999": "--port 99999",
    "--env textcraft --port http": "--port",
    "--env textcraft --max-sessions 0": "--max-sessions",
    "--env textcraft --idle-timeout-s -1": "--idle-timeout-s",
    "--env textcraft --threads 3": "--threads",
}
CASES = [
    (program, words, named)
    for program, table in (
        ("train.py", TRAIN),
        ("evaluate.py", EVALUATE),
        ("warmstart.py", SFT),
        ("envs.server", SERVER),
    )
    for words, named in table.items()
]
# Some of them, as a user starts them; and two programs more.
PROGRAMS = [
    ("train.py --steps ten", "--steps ten"),
    ("train.py --gamma 0.9", "--gamma has no effect"),
    ("train.py --model qwen2.5-3b", "--model qwen2.5-3b"),
    ("train.py --tasks nosuch.json", "nosuch.json"),
    ("train.py --run-dir run", "--run-dir run holds a run"),
    ("train.py --config newer.json", "aperture"),
    ("train.py --prompt user.json", "--prompt user.json"),
    ("evaluate.py --max-rounds ten", "--max-rounds ten"),
    ("evaluate.py --model run", "--model run"),
    ("evaluate.py --tasks nosuch.json", "nosuch.json"),
    ("warmstart.py --data nosuch.json", "--data nosuch.json"),
    ("sft.py --data nosuch.json", "--data nosuch.json is not there"),
    ("dpo.py --beta 0", "--beta 0 must be above 0"),
    ("agentevol.py --steps 95", "--steps 95 cannot be cut"),
    ("-m envs.server --env minecraft", "minecraft"),
    ("-m reporting.plots nosuch", "nosuch"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """FILES, as the commands find them where they are given."""
    folder = tmp_path_factory.mktemp("misuse")
    for name, text in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.fixture(scope="module")
def refusals(folder):
    """(program, words) -> what was seen of it (tests/refusals.py)."""
    cases = [(program, words) for program, words, _ in CASES]
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/refusals.py"), str(folder)],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        env=without_hub(),
        check=True,
    )
    return dict(zip(cases, json.loads(done.stdout), strict=True))


def without_hub():
    """An environment in which no hub can be reached, and no card is seen."""
    return os.environ | {"HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}


@pytest.mark.parametrize(
    ("program", "words", "named"), [pytest.param(*case, id=" ".join(case[:2])) for case in CASES]
)
def test_misuse_is_one_line_at_once_and_leaves_nothing(refusals, program, words, named):
    found = refusals[program, words]
    assert found["code"] == 2, found
    line = found["stderr"]
    assert line.count("\n") == 1 and line.endswith("\n"), line
    assert named in line and "Traceback" not in line
    assert found["changed"] == []
    assert found["heavy"] == []
    assert found["cpu_s"] < MOST_S


@pytest.mark.parametrize(("words", "named"), PROGRAMS)
def test_programs_refuse_misuse_alone_as_they_do_side_by_side(folder, words, named):
    def cpu_seconds():
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    before, began_s = content(folder), cpu_seconds()
    program, *rest = shlex.split(words)
    start = [program] if program == "-m" else [str(ROOT / program)]
    environment = without_hub() | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, *start, *rest]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder)
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1 and named in done.stderr, done.stderr
    assert content(folder) == before
    assert cpu_seconds() - began_s < MOST_S


def test_there_are_many_ways_to_go_wrong_and_the_files_are_what_they_are_taken_for():
    assert len(CASES) > 150
    assert json.loads(FILES["ids.json"])
