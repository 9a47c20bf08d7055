"""Set-up: make `.venv` hold exactly the pinned packages, once.

`make` runs this before anything else. The first time it creates `.venv` and installs a requirement
set into it; every later time it compares one hash and returns, without pip and without the network:

    fingerprint = sha256(requirement files without their comments, stubs)  ==  .venv/setup.json ?

Two sets exist: `cpu` (requirements.txt) and, where `nvidia-smi` lists a GPU, `cuda`
(requirements-cuda.txt). The cpu set is installed from its lock with `--no-deps`: there is nothing
to resolve, and nothing comes that the lock does not name, so no CUDA package. One pin needs more
care: `torch==2.13.0+cpu`, the build without CUDA, is not on every machine's package index. In this
order, each only if the one before found nothing:

    1  pip  torch==2.13.0+cpu
    2  uv   torch==2.13.0 with --torch-backend=cpu, which knows where the CPU builds are
    3  pip  torch==2.13.0, the default build, with several GB of CUDA packages; a line says so

All that is written lies in `.venv`, log and temporary files included; only pip's own cache is
outside. Standard library only: this file runs before there is anything else. What goes wrong ends
in one line that says what to do, and the end of the log if pip failed.

Run: `make setup`, or `python3.11 tools/setup_env.py [--set cpu|cuda] [--env NAME]`.
Read next: requirements.txt, stubs/README.md.
"""

import sys

SUPPORTED = (3, 11), (3, 13)  # first and last minor version that the pins have wheels for
if not SUPPORTED[0] <= sys.version_info[:2] <= SUPPORTED[1]:
    sys.exit(
        f"error: this is Python {sys.version_info[0]}.{sys.version_info[1]}, the pinned packages "
        "need 3.11 to 3.13 (tested: 3.11); run `make setup PYTHON=/path/to/python3.11`"
    )

import argparse  # noqa: E402 - an older Python gets the line above first
import errno  # noqa: E402
import hashlib  # noqa: E402
import importlib.util  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import platform  # noqa: E402
import re  # noqa: E402
import shutil  # noqa: E402
import subprocess  # noqa: E402
import time  # noqa: E402
from dataclasses import dataclass, field  # noqa: E402
from pathlib import Path  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
UV = "uv==0.13.8"  # installed only when pip does not find the CPU build of torch
DEFAULT_TORCH_GB = 8  # free disk to install the default build of torch and its CUDA packages


class SetupError(Exception):
    """What stops the set-up, in words for the person at the terminal."""


class NotOnIndex(SetupError):
    """No package index that answers has such a version for this Python."""


@dataclass(frozen=True)
class RequirementSet:
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
        """Hash of what decides the installed packages: comments and blank lines do not count."""
        files = [root / self.requirements, root / self.lock]
        files += [root / stub / "pyproject.toml" for stub in self.stubs(root)]
        text = "\n\n".join("\n".join(requirement_lines(file)) for file in files)
        return hashlib.sha256(text.encode()).hexdigest()


SETS = {
    "cpu": RequirementSet("cpu", "requirements.txt", "requirements-lock-cpu.txt", disk_gb=6),
    "cuda": RequirementSet(
        "cuda", "requirements-cuda.txt", "requirements-lock-cuda.txt", disk_gb=20
    ),
}


def requirement_lines(file: Path) -> list[str]:
    """The lines of a requirement file that say something, without their comments."""
    lines = (re.sub(r"(^|\s+)#.*", "", line).strip() for line in file.read_text().splitlines())
    return [line for line in lines if line]


def has_gpu() -> bool:
    """True where `nvidia-smi -L` lists a GPU."""
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return listed.returncode == 0 and "GPU" in listed.stdout


@dataclass
class Environment:
    """A virtual environment and the record of what was installed into it."""

    path: Path = ROOT / ".venv"
    root: Path = ROOT
    record: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        try:
            self.record = json.loads(self.stamp.read_text())
        except (OSError, ValueError):
            self.record = {}

    @property
    def python(self) -> Path:
        return self.path / "bin" / "python"

    @property
    def stamp(self) -> Path:
        return self.path / "setup.json"

    @property
    def log(self) -> Path:
        return self.path / "setup.log"

    def holds(self, chosen: RequirementSet) -> bool:
        """True if the set was installed to the end and is unchanged since."""
        fingerprint = chosen.fingerprint(self.root)
        return self.record.get(chosen.name) == fingerprint and os.access(self.python, os.X_OK)

    def write_record(self, record: dict[str, object]) -> None:
        self.record = record
        self.stamp.write_text(json.dumps(record, indent=1) + "\n")  # half of it reads as nothing

    def create(self) -> None:
        """Make the directory a virtual environment with pip, or check that the one there is usable.

        Raises:
            SetupError: this Python cannot make one, or the one there is broken or too old.
        """
        if not self.path.exists():
            if not (importlib.util.find_spec("venv") and importlib.util.find_spec("ensurepip")):
                raise SetupError(
                    f"{sys.executable} has no venv or no ensurepip module; on Debian and Ubuntu: "
                    f"apt-get install python3.{sys.version_info[1]}-venv"
                )
            print(
                f"setup: creating {self.path} with Python {platform.python_version()}", flush=True
            )
            command = [sys.executable, "-m", "venv", str(self.path)]
            made = subprocess.run(command, capture_output=True, text=True)
            if made.returncode != 0:
                shutil.rmtree(self.path, ignore_errors=True)
                last = (made.stdout + made.stderr).strip().splitlines()[-1:] or ["no output"]
                raise SetupError(f"{sys.executable} -m venv {self.path} failed: {last[0]}")
        probe = "import sys, pip; print(*sys.version_info[:2])"
        try:
            found = subprocess.run([self.python, "-c", probe], capture_output=True, text=True)
            version = tuple(int(part) for part in found.stdout.split())
        except (OSError, ValueError):
            version = ()
        if not version:
            raise SetupError(
                f"{self.path} is no working virtual environment with pip; delete it and run again"
            )
        if not SUPPORTED[0] <= version <= SUPPORTED[1]:
            raise SetupError(
                f"{self.path} is of Python {version[0]}.{version[1]}, the pinned packages need "
                "3.11 to 3.13; delete it and run again"
            )

    def run(self, *command: str | Path) -> str:
        """Run a command, its output to the log; return the output.

        Raises:
            SetupError: it failed; the message ends with the last lines of its output.
        """
        temporary = self.path / "tmp"  # wheels are unpacked here: /tmp may be small, and is outside
        temporary.mkdir(exist_ok=True)
        variables = dict(os.environ, TMPDIR=str(temporary), UV_NO_CACHE="1")
        variables["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
        variables.pop("PIP_USER", None)  # what pip refuses inside a venv
        output = []
        progress = Progress()
        with (
            self.log.open("a") as log,
            subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                env=variables,
                cwd=self.root,
            ) as process,
        ):
            log.write(f"\n$ {' '.join(map(str, command))}\n")
            assert process.stdout is not None  # for the type checker: stdout=PIPE above
            for line in process.stdout:
                log.write(line)
                output.append(line)
                progress.show(line)
        progress.clear()
        shutil.rmtree(temporary, ignore_errors=True)
        if process.returncode != 0:
            raise explain_failure("".join(output), process.returncode, self.log)
        return "".join(output)

    def pip_install(self, *arguments: str | Path) -> str:
        """`pip install` into this environment; see `run`."""
        pip = [str(self.python), "-m", "pip", "install", "--no-input", "--progress-bar=off"]
        return self.run(*pip, *arguments)


@dataclass
class Progress:
    """What pip is doing, on one line that is written over; silent without a terminal."""

    count: int = 0

    def show(self, line: str) -> None:
        if sys.stdout.isatty() and line.startswith(("Collecting ", "Processing ", "Installing ")):
            self.count += 1
            print(f"\r{self.count:4d}  {line.strip()[:70]:70}", end="", flush=True)

    def clear(self) -> None:
        if self.count:
            print(f"\r{'':76}\r", end="", flush=True)


def explain_failure(output: str, code: int, log: Path) -> SetupError:
    """The error of a failed installer: one line on why, then the end of its output."""
    kind = SetupError
    if "No space left on device" in output:
        reason = "the disk is full; free some space and run again, it goes on where it stopped"
    elif "from versions: none" in output:
        kind = NotOnIndex
        reason = "no package index answers, or none has it; check the network and pip's settings"
    elif "No matching distribution found for" in output:
        kind = NotOnIndex
        missing = re.findall(r"No matching distribution found for (\S+)", output)[-1]
        reason = f"the package index of this machine has no {missing} for this Python"
    else:
        reason = f"the installer ended with exit code {code}"
    last = [line[:200] for line in output.strip().splitlines() if "notice" not in line][-4:]
    return kind("\n    ".join([f"{reason}; the whole log is {log}, its end:", *last]))


def check_machine(chosen: RequirementSet, path: Path) -> None:
    """Refuse, before anything is downloaded, a machine on which the set cannot be installed."""
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise SetupError(
            f"this machine is {platform.system()} {platform.machine()}, "
            "the pinned packages are built for Linux x86_64"
        )
    check_disk(path.parent, chosen.disk_gb, f"the {chosen.name} packages need")


def check_disk(folder: Path, needed_gb: float, what: str) -> None:
    free_gb = shutil.disk_usage(folder).free / 1e9
    if free_gb < needed_gb:
        raise SetupError(
            f"{folder} has {free_gb:.1f} GB free, {what} {needed_gb:g} GB; "
            "free some space or move the checkout"
        )


def install_torch(environment: Environment, pin: str) -> str:
    """Install torch, without CUDA if it can be had; return the way: pip, uv or default.

    Args:
        pin: `torch==VERSION+cpu`.

    Raises:
        SetupError: not even the default build could be installed.
    """
    version = pin.partition("+")[0]
    try:
        environment.pip_install("--no-deps", pin)
        return "pip"
    except NotOnIndex:  # another failure, a full disk say, goes up: nothing below would do better
        print(
            f"setup: pip finds no {pin}; trying uv, which looks for CPU builds elsewhere",
            flush=True,
        )
    try:
        environment.pip_install(UV)
        python = str(environment.python)
        uv = [str(environment.path / "bin" / "uv"), "pip", "install", "--python", python]
        environment.run(*uv, "--no-deps", "--torch-backend=cpu", version)
        return "uv"
    except SetupError:
        print(
            f"setup: uv finds none either; installing the default build of {version}: "
            "it runs on a CPU, but brings several GB of CUDA packages",
            flush=True,
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
    environment.pip_install(
        "--no-deps", "--no-index", "--no-build-isolation", *chosen.stubs(environment.root)
    )
    # NOTE: torch last: the default build needs another triton, and the lock would put its own back.
    install_torch(environment, torch)


def known_environments(root: Path = ROOT) -> list[str]:
    """The folders of envs/ that are worlds; nothing is imported, as nothing is installed yet."""
    return sorted(path.parent.name for path in (root / "envs").glob("*/__init__.py"))


def install_extras(environment: Environment, chosen: RequirementSet, env: str) -> None:
    """Install what one environment alone needs: envs/NAME/requirements.txt, where there is one."""
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
    """Install the set and the environment's extras unless they are there already."""
    if set_name == "auto":  # keep what is there: asking for the GPU takes a second
        set_name = next((name for name, one in SETS.items() if environment.holds(one)), "")
        if set_name == "cpu" and any(Path("/dev").glob("nvidia[0-9]*")):
            print("setup: .venv holds the cpu set, for the GPU here: make setup SET=cuda")
        set_name = set_name or ("cuda" if has_gpu() else "cpu")
    chosen = SETS[set_name]
    names = known_environments(environment.root)
    for each in env.split():  # module:Class is the user's own, packages included
        if each not in names and ":" not in each:
            raise SetupError(f"there is no environment {each!r}; known: {', '.join(names)}")
    if not environment.holds(chosen):
        check_machine(chosen, environment.path)
        started = time.monotonic()
        count = len(requirement_lines(environment.root / chosen.lock))
        print(
            f"setup: installing {count} pinned packages ({set_name} set), a few minutes the first "
            f"time; log: {environment.log}",
            flush=True,
        )
        install(environment, chosen)
        environment.write_record({chosen.name: chosen.fingerprint(environment.root)})
        took = f"{time.monotonic() - started:.0f} s"
        print(f"setup: done in {took}; to use it here: . .venv/bin/activate", flush=True)
    for each in env.split():
        install_extras(environment, chosen, each)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Create .venv with the pinned packages, once.")
    choices = ["auto", *SETS]
    parser.add_argument("--set", choices=choices, default="auto", help="auto: cuda with a GPU")
    parser.add_argument("--env", default="textcraft", help="install what these worlds need too")
    options = parser.parse_args(arguments)
    try:
        setup(options.set, options.env, Environment())
    except OSError as error:
        advice = "free some disk space and run again: " if error.errno == errno.ENOSPC else ""
        print(f"error: {advice}{error}", file=sys.stderr)
        return 1
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(
            "\nerror: interrupted; the same command goes on where this one stopped", file=sys.stderr
        )
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
