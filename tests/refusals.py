"""What programs do with command lines that they refuse: each a process of its own, forked from one
that has imported what options are read with, so that two hundred of them take seconds.

    python tests/refusals.py FOLDER < cases.json > refusals.json

A case is [program, its words]; FOLDER's content is what each of them finds in its own copy.
"""

import json
import os
import resource
import runpy
import shlex
import shutil
import signal
import sys
import tempfile
import traceback
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("torch", "transformers", "vllm")  # seconds each; no refusal needs them
PATIENCE_S = 120  # for a program that does not refuse and begins to work


def content(folder):
    """Every file of a folder with its content, every folder with None."""
    return {
        str(path.relative_to(folder)): None if path.is_dir() else path.read_bytes()
        for path in folder.rglob("*")
    }


def cpu_seconds():
    """Of this process and of those that it has waited for."""
    both = (resource.getrusage(of) for of in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(used.ru_utime + used.ru_stime for used in both)


def become(program, words):
    """Run it as `python PROGRAM WORDS` would; its exit code."""
    sys.argv = [program, *words]
    try:
        if program.endswith(".py"):
            sys.path.insert(0, str(ROOT))
            runpy.run_path(str(ROOT / program), run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        return stop.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def refusal(program, words, files):
    """What is seen of one case from outside, and what it has imported."""
    with tempfile.TemporaryDirectory() as scratch:
        here, said = Path(scratch, "here"), Path(scratch, "said")
        shutil.copytree(files, here)
        before = content(here)
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            signal.alarm(PATIENCE_S)
            os.chdir(here)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
            code = become(program, words)
            sys.stderr.flush()
            heavy = [name for name in HEAVY if name in sys.modules]
            found = {"code": code, "heavy": heavy, "cpu_s": cpu_seconds()}
            os.write(writing, json.dumps(found).encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as answer:
            text = answer.read()
        os.waitpid(child, 0)
        found = json.loads(text or '{"code": "killed", "heavy": [], "cpu_s": 0}')
        now = content(here)
        changed = sorted(name for name in before | now if before.get(name, 0) != now.get(name, 0))
        return found | {"stderr": said.read_text(), "changed": changed}


def main():
    sys.path.insert(0, str(ROOT))
    for shared in ("tyro", "reporting.evalconfig", "warmstart", "run.methodworker"):
        import_module(shared)

    files, started_s = Path(sys.argv[1]), cpu_seconds()
    found = []
    for program, line in json.load(sys.stdin):
        one = refusal(program, shlex.split(line), files)
        found.append(one | {"cpu_s": round(one["cpu_s"] + started_s, 2)})  # as if it were alone
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
