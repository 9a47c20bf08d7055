"""Set-up: make `.venv` hold exactly the pinned packages, once.

`make` runs this before anything else. The first time it creates `.venv` and installs a requirement
set; every later time it compares one hash with `.venv/setup.json` and returns.

There are two sets: `cpu` (requirements.txt) and, where `nvidia-smi` lists a GPU, `cuda`
(requirements-cuda.txt). The cpu set is installed from its lock with `--no-deps`, so nothing comes
that the lock does not name. `torch==2.13.0+cpu`, the build without CUDA, is not on every machine's
package index, so three ways are tried in this order:

    1  pip  torch==2.13.0+cpu
    2  uv   torch==2.13.0 with --torch-backend=cpu, which knows where the CPU builds are
    3  pip  torch==2.13.0, the default build, with several GB of CUDA packages; a line says so

Only the standard library is used: this file runs before anything is installed. A failure ends in
one line that says what to do, followed by the end of pip's log.

Run: `make setup`, or `python3.11 tools/setup_env.py [--set cpu|cuda] [--env NAME]`.
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
UV = "uv==0.13.8"  # installed only when pip does not find the CPU build of torch
DEFAULT_TORCH_GB = 8  # free disk to install the default build of torch and its CUDA packages


class SetupError(Exception):
    """Stops the set-up with a message for the person at the terminal."""


class NotOnIndex(SetupError):
    """No package index that answers has such a version for this Python."""


def requirement_lines(file: Path) -> list[str]:
    """The lines of a requirement file without comments and blank lines."""
    lines = (re.sub(r"(^|\s+)#.*", "", line).strip() for line in file.read_text().splitlines())
    return [line for line in lines if line]


class RequirementSet(NamedTuple):
    """A requirement file, the lock that fixes its versions, the free disk to install it."""

    name: str
    requirements: str
    lock: str
    disk_gb: float

    def stubs(self, root: Path = ROOT) -> list[str]:
        """Paths of the empty distributions among the requirements: `./stubs/NAME`."""
        lines = requirement_lines(root / self.requirements)
        return [line for line in lines if line.startswith("./")]

    def fingerprint(self, root: Path = ROOT) -> str:
        """Hash of everything that decides the installed packages, comments left out."""
        files = [root / self.requirements, root / self.lock]
        files += [root / stub / "pyproject.toml" for stub in self.stubs(root)]
        text = "\n\n".join("\n".join(requirement_lines(file)) for file in files)
        return hashlib.sha256(text.encode()).hexdigest()


SETS = {
    "cpu": RequirementSet("cpu", "requirements.txt", "requirements-lock-cpu.txt", 6),
    "cuda": RequirementSet("cuda", "requirements-cuda.txt", "requirements-lock-cuda.txt", 20),
}


def has_gpu() -> bool:
    """True where `nvidia-smi -L` lists a GPU."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listed.returncode == 0 and "GPU" in listed.stdout


class Environment:
    """A virtual environment and the record of what was installed into it."""

    def __init__(self, path: Path = ROOT / ".venv", root: Path = ROOT) -> None:
        self.path, self.root = path, root
        self.python, self.log = path / "bin" / "python", path / "setup.log"
        self.stamp = path / "setup.json"
        try:
            self.record: dict[str, str] = json.loads(self.stamp.read_text())
        except (OSError, ValueError):
            self.record = {}

    def holds(self, chosen: RequirementSet) -> bool:
        """True if the set was installed to the end and is unchanged since."""
        fingerprint = chosen.fingerprint(self.root)
        return self.record.get(chosen.name) == fingerprint and os.access(self.python, os.X_OK)

    def write_record(self, record: dict[str, str]) -> None:
        self.record = record
        self.stamp.write_text(json.dumps(record, indent=1) + "\n")

    def create(self) -> None:
        """Create the virtual environment, or check that the one there works. Raises SetupError."""
        if not self.path.exists():
            if not (importlib.util.find_spec("venv") and importlib.util.find_spec("ensurepip")):
                raise SetupError(
                    f"{sys.executable} has no venv or no ensurepip module; on Debian and Ubuntu: "
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
        """Run a command, its output to the log.

        Raises:
            SetupError: it failed; the message ends with the last lines of its output.
        """
        temporary = self.path / "tmp"  # wheels are unpacked here: /tmp may be small
        temporary.mkdir(exist_ok=True)
        variables = dict(os.environ, TMPDIR=str(temporary), UV_NO_CACHE="1")
        variables["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
        variables.pop("PIP_USER", None)  # pip refuses it inside a venv
        with self.log.open("a+") as log:
            log.write(f"\n$ {' '.join(map(str, command))}\n")
            log.flush()
            start = log.tell()
            ended = subprocess.run(
                command, stdout=log, stderr=subprocess.STDOUT, env=variables, cwd=self.root
            )
            log.seek(start)
            output = log.read()
        shutil.rmtree(temporary, ignore_errors=True)
        if ended.returncode != 0:
            raise explain_failure(output, ended.returncode, self.log)

    def pip_install(self, *arguments: str | Path) -> None:
        """`pip install` into this environment; see `run`."""
        pip = [str(self.python), "-m", "pip", "install", "--no-input", "--progress-bar=off"]
        self.run(*pip, *arguments)


def explain_failure(output: str, code: int, log: Path) -> SetupError:
    """The error of a failed installer: one line on why, then the end of its output."""
    kind = SetupError
    if "No space left on device" in output:
        reason = "the disk is full; free some space and run again, it goes on where it stopped"
    elif "from versions: none" in output:
        kind = NotOnIndex
        reason = "no package index answers, or none has it; check the network and pip's settings"
    elif missing := re.findall(r"No matching distribution found for (\S+)", output):
        kind = NotOnIndex
        reason = f"the package index of this machine has no {missing[-1]} for this Python"
    else:
        reason = f"the installer ended with exit code {code}"
    last = [line[:200] for line in output.strip().splitlines() if "notice" not in line][-4:]
    return kind("\n    ".join([f"{reason}; the whole log is {log}, its end:", *last]))


def check_disk(folder: Path, needed_gb: float, what: str) -> None:
    free_gb = shutil.disk_usage(folder).free / 1e9
    if free_gb < needed_gb:
        raise SetupError(
            f"{folder} has {free_gb:.1f} GB free, {what} {needed_gb:g} GB; "
            "free some space or move the checkout"
        )


def install_torch(environment: Environment, pin: str) -> str:
    """Install torch, without CUDA if possible; return the way that worked: pip, uv or default.

    Args:
        pin: `torch==VERSION+cpu`.
    """
    version = pin.partition("+")[0]
    try:
        environment.pip_install("--no-deps", pin)
        return "pip"
    except NotOnIndex:  # another failure, such as a full disk, would also stop the ways below
        print(f"setup: pip finds no {pin}; trying uv, which looks for CPU builds elsewhere")
    try:
        environment.pip_install(UV)
        python = str(environment.python)
        uv = [str(environment.path / "bin" / "uv"), "pip", "install", "--python", python]
        environment.run(*uv, "--no-deps", "--torch-backend=cpu", version)
        return "uv"
    except SetupError:
        print(
            f"setup: uv finds none either; installing the default build of {version}: "
            "it runs on a CPU, but brings several GB of CUDA packages"
        )
    check_disk(environment.root, DEFAULT_TORCH_GB, f"the default build of {version} needs")
    # NOTE: with its dependencies, or `import torch` fails: libcudart.so: cannot open shared object.
    environment.pip_install(version)
    return "default"


def install(environment: Environment, chosen: RequirementSet) -> None:
    """Bring the environment to the set: minutes the first time, seconds for a small change."""
    environment.create()
    environment.write_record({})  # an interrupted run must not look finished
    if chosen.name == "cuda":
        environment.pip_install("-r", chosen.requirements)
        return
    pins = requirement_lines(environment.root / chosen.lock)
    torch = next(pin for pin in pins if pin.startswith("torch=="))
    others = environment.path / "setup-pins.txt"
    others.write_text("\n".join(pin for pin in pins if pin != torch) + "\n")
    environment.pip_install("--no-deps", "-r", others)
    stubs = chosen.stubs(environment.root)
    environment.pip_install("--no-deps", "--no-index", "--no-build-isolation", *stubs)
    # NOTE: torch last: the default build needs another triton, and the lock would put its own back.
    install_torch(environment, torch)


def install_extras(environment: Environment, chosen: RequirementSet, env: str) -> None:
    """Install the packages of one environment: envs/NAME/requirements.txt, where there is one."""
    extras = environment.root / "envs" / env / "requirements.txt"
    if not extras.exists():
        return
    text = "\n".join(requirement_lines(extras))
    key, value = f"env {env}", hashlib.sha256(text.encode()).hexdigest()
    if environment.record.get(key) != value:
        print(f"setup: installing the packages of {env}", flush=True)
        environment.pip_install("-r", extras, "-c", chosen.lock)
        environment.write_record({**environment.record, key: value})


def setup(set_name: str, env: str, environment: Environment) -> None:
    """Install the set and the environments' extras unless they are there already."""
    if set_name == "auto":  # keep the set that is there: asking for a GPU takes a second
        set_name = next((name for name, one in SETS.items() if environment.holds(one)), "")
        if set_name == "cpu" and any(Path("/dev").glob("nvidia[0-9]*")):
            print("setup: .venv holds the cpu set, for the GPU here: make setup SET=cuda")
        set_name = set_name or ("cuda" if has_gpu() else "cpu")
    chosen = SETS[set_name]
    names = sorted(path.parent.name for path in (environment.root / "envs").glob("*/__init__.py"))
    for name in env.split():  # module:Class is the user's own, packages included
        if name not in names and ":" not in name:
            raise SetupError(f"there is no environment {name!r}; known: {', '.join(names)}")
    if not environment.holds(chosen):
        if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
            raise SetupError(
                f"this machine is {platform.system()} {platform.machine()}, "
                "the pinned packages are built for Linux x86_64"
            )
        check_disk(environment.root, chosen.disk_gb, f"the {chosen.name} packages need")
        started = time.monotonic()
        count = len(requirement_lines(environment.root / chosen.lock))
        print(
            f"setup: installing {count} pinned packages ({set_name} set), a few minutes the first "
            f"time; log: {environment.log}",
            flush=True,
        )
        install(environment, chosen)
        environment.write_record({chosen.name: chosen.fingerprint(environment.root)})
        seconds = time.monotonic() - started
        print(f"setup: done in {seconds:.0f} s; to use it here: . .venv/bin/activate", flush=True)
    for name in env.split():
        install_extras(environment, chosen, name)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Create .venv with the pinned packages, once.")
    choices = ["auto", *SETS]
    parser.add_argument("--set", choices=choices, default="auto", help="auto: cuda with a GPU")
    parser.add_argument("--env", default="textcraft", help="also what these environments need")
    options = parser.parse_args(arguments)
    try:
        setup(options.set, options.env, Environment())
    except (SetupError, OSError) as error:
        is_full = isinstance(error, OSError) and error.errno == errno.ENOSPC
        advice = "free some disk space and run again: " if is_full else ""
        print(f"error: {advice}{error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nerror: interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
