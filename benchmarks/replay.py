"""How long replay.py lets one wait on a large run: against reading its files whole.

A run is made up: 1,000 steps of 100 trajectories, each of 6 turns and some 500 tokens, in the real
format; more than a gigabyte. Its files are dropped from the page cache before each repeat, and
replay.py is started anew with an empty cache folder. Then the page's own questions are asked:

    first screen   sources, overview, and what goes wrong in the newest file
    a step's list  of a step that nobody has looked at
    one            opened in that step
    a search       for a word that is in one trajectory, over all files
    whole          every file read and parsed line by line, in another process

    states         what --record-state adds to a turn of each world: the 50 recorded episodes of
                   tests/data/played once more, a state asked for after each turn

    goals: first screen 2 s and 10 x faster than reading whole; list 0.3 s; one 0.2 s; peak memory
    below a tenth of the files

Run it:  python benchmarks/replay.py [--trajectories 100000]      ten minutes; 1.4 GB of disk
It prints a table and writes benchmarks/results/replay.json.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from benchmarks import common  # noqa: E402

GROUP, PER_STEP, TURNS, TOKENS = 8, 100, 6, 500
WORD = "obsidian-heart"  # in one trajectory alone
EXPORTED = 200
READ_WHOLE = (
    "import json,sys,time,pathlib\n"
    "began=time.perf_counter()\n"
    "for p in sorted(pathlib.Path(sys.argv[1]).rglob('*.jsonl')):\n"
    "    for line in open(p, encoding='utf-8'): json.loads(line)\n"
    "print(time.perf_counter()-began)"
)


def make_up(folder: Path, count: int) -> int:
    """Write the run; returns the bytes of its trajectories."""
    rng, size = random.Random(0), 0
    options = {"env": "textcraft", "model": "tiny", "algorithm": "grpo", "steps": count // PER_STEP}
    (folder / "trajectories").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"config": options}))
    names = [f"train/{n}" for n in ("success_rate", "return_mean", "turns_mean")]
    names += [f"policy/metric_{i}" for i in range(30)]
    templates = [line_of(rng) for _ in range(64)]
    with open(folder / "metrics.jsonl", "w") as log:
        for step in range(1, count // PER_STEP + 1):
            row = {"step": step} | {name: rng.random() for name in names}
            log.write(json.dumps(row) + "\n")
            lines = [
                rng.choice(templates)
                .replace("NAME", f"s{step:06d}-t{i // GROUP:04d}-k{i % GROUP:02d}")
                .replace('"STEP"', str(step))
                .replace('"GROUP"', str(i // GROUP))
                for i in range(PER_STEP)
            ]
            if step == count // PER_STEP // 2:
                lines[7] = lines[7].replace("oak", WORD, 1)
            text = "".join(lines)
            (folder / f"trajectories/step_{step:06d}.jsonl").write_text(text)
            size += len(text)
    return size


def line_of(rng: random.Random) -> str:
    """A trajectory's line with places for what differs."""
    words = "get craft oak log planks stick crafting table using iron ingot inventory".split()

    def say(n: int) -> str:
        return " ".join(rng.choices(words, k=n))

    success = rng.random() < 0.5
    turns, messages = [], [{"role": "system", "content": say(120)}]
    messages.append({"role": "user", "content": say(60)})
    for i in range(TURNS):
        text, observation = f"Thought: {say(10)}\nAction: {say(4)}", say(12)
        span = [200 + i * 50, 230 + i * 50]
        turn: dict[str, Any] = {"action_span": span, "action_text": text}
        turn |= {"observation_text": observation, "reward": 0.0, "parse_error": None}
        turns.append(turn | {"generate_s": 0.4, "env_s": 0.001, "state": None})
        messages += [
            {"role": "assistant", "content": text},
            {"role": "user", "content": observation},
        ]
    line = {
        **{"trajectory_id": "NAME", "step": "STEP", "env": "textcraft"},
        **{"task_id": f"textcraft_{rng.randrange(500)}", "subtask": f"depth {rng.randrange(1, 4)}"},
        **{"group_id": "GROUP", "seed": 0, "max_rounds": TURNS, "success": success},
        **{"terminated": success, "truncated": not success},
        **{"stop_reason": "success" if success else "max_rounds", "used_in_loss": True},
        **{"error": None, "weight_version": 0, "return": float(success), "num_turns": TURNS},
        **{"num_tokens": TOKENS, "parse_errors": 0, "advantage": 0.5},
        **{"messages": messages, "turns": turns, "first_state": None},
        "input_ids": [rng.randrange(49152) for _ in range(TOKENS)],
        "loss_mask": [int(i >= 200 and (i - 200) % 50 < 30) for i in range(TOKENS)],
        "rollout_log_probs": [round(-rng.random(), 7) for _ in range(TOKENS)],
        "advantages": [0.5] * TOKENS,
    }
    return json.dumps(line, separators=(",", ":")) + "\n"


def forget(folder: Path) -> None:
    """Drop the files from the page cache, as far as the system lets one."""
    for path in folder.rglob("*"):
        if path.is_file():
            with open(path, "rb") as file:
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@contextlib.contextmanager
def served(folder: Path, cache: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """replay.py on a free port; its address and process."""
    command = [sys.executable, str(ROOT / "replay.py"), str(folder), "--port", "0", "--no-browser"]
    environment = os.environ | {"AGENT_RL_CACHE": str(cache)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        try:
            yield line.split()[1], process
        finally:
            process.terminate()


def ask(base: str, path: str) -> Any:
    with urllib.request.urlopen(f"{base}api/{path}") as answer:
        return answer.read()


def peak_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))


def measure(folder: Path, steps: int, repeat: int) -> dict[str, float]:
    """One repeat: everything cold."""
    found: dict[str, float] = {}

    def timed(name: str, *paths: str) -> bytes:
        began = time.perf_counter()
        answers = [ask(base, path) for path in paths]
        found[f"{name}_s"] = time.perf_counter() - began
        return answers[-1]

    step = f"step_{steps // 3 + repeat:06d}"
    with tempfile.TemporaryDirectory() as cache:
        forget(folder)
        began = time.perf_counter()
        with served(folder, Path(cache)) as (base, process):
            found["start_s"] = time.perf_counter() - began
            timed("first_screen", "sources", "overview/0", f"wrong/0/step_{steps:06d}")
            timed("list", f"list/0/{step}")
            timed("one", f"trajectory/0/{step}/42")
            told = timed("search", f"search/0?text={WORD}").splitlines()
            assert json.loads(told[-1])["hits"] == 1, told[-1]
            found["progress_lines"] = sum(b'"progress"' in line for line in told)
            found["peak_bytes"] = peak_bytes(process.pid)
    forget(folder)
    whole = [sys.executable, "-c", READ_WHOLE, str(folder)]
    found["whole_s"] = float(subprocess.run(whole, capture_output=True, text=True).stdout)
    return found


def export(folder: Path) -> dict[str, float]:
    out = folder.parent / "page.html"
    command = [sys.executable, str(ROOT / "replay.py"), str(folder), "--export", str(out)]
    seconds = common.seconds_of(
        lambda: subprocess.run([*command, "--limit", str(EXPORTED)], check=True)
    )
    return {"trajectories": EXPORTED, "seconds": seconds, "megabytes": out.stat().st_size / 1e6}


def states(env: str) -> dict[str, float]:
    """Seconds of a step and of a state over HTTP, and the state's bytes as JSON; medians."""
    from rollout import state_of
    from viewer.play import Environments
    from viewer.trajectories import Lines, task_of, turns_of

    found: dict[str, list[float]] = {"step_s": [], "state_s": [], "state_bytes": []}
    environments = Environments()
    with contextlib.closing(environments), contextlib.closing(environments.client(env)) as client:
        lines = Lines(ROOT / "tests" / "data" / "played" / f"{env}.jsonl")
        for number in range(len(lines)):
            line = lines.read(number)
            task = task_of(line, env)
            assert task is not None
            client.reset(task[1], seed=line["seed"])
            for turn in turns_of(line):
                text = turn["action_text"]
                began = time.perf_counter()
                client.step(text)
                stepped = time.perf_counter()
                state = state_of(client)
                found["state_s"].append(time.perf_counter() - stepped)
                found["step_s"].append(stepped - began)
                found["state_bytes"].append(len(json.dumps(state)))
    return {name: common.median(figures, 5) for name, figures in found.items()}


def main() -> int:
    parser: argparse.ArgumentParser = common.arguments(__doc__, 3, "replay.json")
    parser.add_argument("--trajectories", type=int, default=100_000)
    parser.add_argument("--worlds", nargs="*", default=["textcraft", "babyai", "sciworld"])
    options = parser.parse_args()
    results = common.Results(options.out, "replay.json")
    folder = Path(tempfile.mkdtemp(prefix="replay-")) / "run"
    try:
        size = make_up(folder, options.trajectories)
        steps = options.trajectories // PER_STEP
        repeats = [measure(folder, steps, repeat) for repeat in range(options.repeats)]
        medians = {n: common.median((r[n] for r in repeats), 4) for n in repeats[0]}
        exported = export(folder)
    finally:
        shutil.rmtree(folder.parent)
    shown = {env: states(env) for env in options.worlds}
    ratio = medians["whole_s"] / medians["first_screen_s"]
    rows = [("files, MB", f"{size / 1e6:.0f}")]
    rows += [(name, f"{value:.3g}") for name, value in medians.items()]
    rows += [("whole over first screen", f"{ratio:.1f}")]
    rows += [(f"export, {name}", f"{value:.3g}") for name, value in exported.items()]
    rows += [(f"{env}, {n}", f"{v:.3g}") for env, found in shown.items() for n, v in found.items()]
    common.show(rows)
    results.write(
        {
            "trajectories": options.trajectories,
            "bytes": size,
            "medians": medians,
            "whole_over_first_screen": ratio,
            "memory_share": medians["peak_bytes"] / size,
            "export": exported,
            "states": shown,
            "repeats": repeats,
        }
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
