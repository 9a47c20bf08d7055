"""The Dockerfile copies what set-up reads before set-up runs, and keeps out what is made here."""

import re
import shutil
from pathlib import Path

from run.rundir import circumstances
from tools.setup_env import SETS, known_environments

ROOT = Path(__file__).resolve().parent.parent
LINES = (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines()


def copied_before_setup(to: Path) -> None:
    """What the COPY lines above the first `make setup` put into the image."""
    first = next(i for i, line in enumerate(LINES) if "make setup" in line)
    for line in LINES[:first]:
        if line.startswith("COPY "):
            *sources, target = line.split()[1:]
            for pattern in sources:
                found = list(ROOT.glob(pattern))
                assert found, f"{pattern} is not there"
                for path in found:
                    if path.is_dir():
                        shutil.copytree(path, to / target)
                    else:
                        (to / target).mkdir(parents=True, exist_ok=True)
                        shutil.copy(path, to / target)


def test_set_up_finds_in_the_image_all_that_decides_what_it_installs(tmp_path: Path) -> None:
    copied_before_setup(tmp_path)
    cpu = SETS["cpu"]
    assert cpu.fingerprint(tmp_path) == cpu.fingerprint(ROOT)
    assert known_environments(tmp_path) == ["textcraft"]
    assert not (ROOT / "envs/textcraft/requirements.txt").exists()
    copied, here = ((root / "tools/setup_env.py").read_text() for root in (tmp_path, ROOT))
    assert copied == here
    assert "tools/setup_env.py" in (tmp_path / "Makefile").read_text()


def test_the_image_has_a_python_that_set_up_accepts() -> None:
    (version,) = re.findall(r"^FROM python:(\d\.\d+)-slim", "\n".join(LINES), flags=re.M)
    assert f"python{version}" in (ROOT / "Makefile").read_text()


def test_what_is_made_here_stays_out_of_the_image() -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    made = [line.strip("/") for line in (ROOT / ".gitignore").read_text().splitlines()]
    missing = [name for name in made if not {name, f"**/{name}"} & set(ignored)]
    assert missing == []
    assert ".git" in ignored


def test_a_run_starts_where_git_is_not_installed(tmp_path: Path, monkeypatch) -> None:
    """In the image it is not: the commit is then unknown."""
    (tmp_path / "sh").symlink_to("/bin/sh")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert circumstances()["git_commit"] is None
