"""What recipes share: a run of one of the programs, and the record that is kept of it.

A record holds how the run was started (command, commit, hardware, options), a row for each step,
and each task's result in every held-out evaluation. evidence.py compares records.
"""

import contextlib
import datetime
import json
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from agentevol import EvolConfig  # noqa: E402
from config import CHANGEABLE_ON_RESUME, Config, Misuse, checked, read_command_line  # noqa: E402
from dpo import DpoConfig  # noqa: E402
from run.checkpoint import steps_saved  # noqa: E402
from run.files import write_text  # noqa: E402
from sft import SftConfig  # noqa: E402
from trajectory import LOST  # noqa: E402

COMMITTED = ROOT / "recipes" / "results"
CURVE = (
    *("train/return_mean", "train/success_rate", "train/turns_mean", "train/parse_error_rate"),
    *("train/groups", "train/groups_zero_variance", "train/trajectories_used"),
    *("horizon/max_rounds", "policy/loss", "policy/entropy", "policy/grad_norm"),
    "data/policy_tokens",
)
Result = dict[str, Any]


def write_json(path: Path, content: Any) -> None:
    """Whole or not at all; paths inside the checkout are written relative to it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(content, indent=1).replace(f"{ROOT}/", "") + "\n")
    print(f"wrote {path}", flush=True)


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a .jsonl file; none if there is no file."""
    if not path.exists():
        return []
    # NOTE: not splitlines, which also cuts at U+2028, and JSON leaves that as it is.
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines if line]


def markdown(titles: str, rows: Sequence[Sequence[Any]]) -> list[str]:
    """The lines of a table.

    >>> print(*markdown("arm | goals", [("rl", 63)]), sep="\\n")
    | arm | goals |
    |---|---|
    | rl | 63 |
    """
    rule = "|" + "---|" * (titles.count("|") + 1)
    return [f"| {titles} |", rule, *(f"| {' | '.join(map(str, row))} |" for row in rows)]


def exit_on_interrupt(main: Callable[[], None]) -> None:
    try:
        main()
    except KeyboardInterrupt:
        print("stopped; the same command continues from the last checkpoint", file=sys.stderr)
        sys.exit(130)


def run(command: Sequence[str]) -> None:
    """Run a command of this project, and end with its exit code if it fails."""
    print(f"$ {shlex.join(command)}", flush=True)
    if code := subprocess.run(command, cwd=ROOT).returncode:
        raise SystemExit(code)


def run_program(program: str, arguments: Sequence[str], run_dir: Path) -> None:
    """train.py or another method's program, from its last checkpoint if it has one. A run that was
    started with other options is refused, complete or not."""
    words = [*arguments, "--run-dir", str(run_dir)]
    if (run_dir / "config.json").exists():
        words.append("--resume")
        kinds = {kind.program: kind for kind in (Config, SftConfig, DpoConfig, EvolConfig)}
        try:
            with contextlib.chdir(ROOT):
                options = checked(read_command_line(words, kinds[program])[0])
        except Misuse as error:
            raise SystemExit(f"{run_dir}: {error}") from None
        if max(steps_saved(run_dir), default=0) >= options.steps:
            print(f"{run_dir} is complete", flush=True)
            return
    run([sys.executable, program, *words])


def require_alike(results: Sequence[Result]) -> Sequence[Result]:
    """The results, which may be pooled: the options that they share are equal, except the seed and
    what changes nothing that is learned. ValueError names what differs."""
    # Lists of tasks were renamed; demonstrations lie beside the run, which makes the option that
    # counts them idle. Results are paired by task in any case.
    free = CHANGEABLE_ON_RESUME - {"steps", "learning_rate_decay_steps"}
    free |= {"seed", "config", "tasks", "eval_tasks", "data", "num_demonstrations"}
    configs = [r["config"] | {"steps": r["steps"]} for r in results if "config" in r]
    for config in configs[1:]:
        shared = sorted((config.keys() & configs[0].keys()) - free)
        if differ := [name for name in shared if config[name] != configs[0][name]]:
            values = ", ".join(f"{n} {configs[0][n]} and {config[n]}" for n in differ)
            raise ValueError(f"runs that differ in more than the seed cannot be pooled: {values}")
    return results


def record(run_dir: Path) -> Result:
    """What is kept of a run.

    A row of the curve adds to the metrics what was spent so far: seconds (without evaluations and
    files), turns, the turns of failed episodes, sampled tokens, and successful episodes.

    Raises:
        SystemExit: the run was not evaluated at its beginning and at its end.
    """
    about = read_json(run_dir / "config.json")
    steps = about["config"]["steps"]
    timings = {row["step"]: row for row in read_lines(run_dir / "timings.jsonl")}
    spent = dict.fromkeys(("turns", "failed_turns", "tokens", "successes", "seconds"), 0.0)
    curve = []
    for row in read_lines(run_dir / "metrics.jsonl"):
        if not (step := row["step"]):
            continue
        for line in read_lines(run_dir / "trajectories" / f"step_{step:06d}.jsonl"):
            spent["turns"] += len(line["turns"])
            spent["failed_turns"] += 0 if line["success"] else len(line["turns"])
            spent["tokens"] += sum(line["loss_mask"])
            spent["successes"] += line["success"]
        took = timings.get(step, {})  # lost if the run was killed right after a checkpoint
        spent["seconds"] += took.get("time/step_s", 0.0)
        spent["seconds"] -= sum(took.get(f"time/{name}_s", 0.0) for name in ("eval", "save"))
        kept = {name: round(row[name], 5) for name in CURVE if row.get(name) is not None}
        curve.append({"step": step} | {n: round(v, 1) for n, v in spent.items()} | kept)
    held_out = [evaluation(path) for path in sorted((run_dir / "eval").glob("step_*.json"))]
    evaluated = [summary["step"] for summary in held_out]
    if evaluated[:1] != [0] or evaluated[-1] != steps:
        raise SystemExit(f"{run_dir} was evaluated at steps {evaluated}, expected 0 to {steps}")
    about_run = ("command", "git_commit", "hardware", "versions", "begun", "config")
    step_seconds = [row["time/step_s"] for row in timings.values() if "time/step_s" in row]
    peaks = [row["memory/peak_bytes"] for row in timings.values() if "memory/peak_bytes" in row]
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **{key: about[key] for key in about_run if key in about},
        "steps": steps,
        "hours": round(sum(step_seconds) / 3600, 3),
        "peak_gb": round(max(peaks) / 1e9, 2) if peaks else None,
        "curve": curve,
        "held_out": held_out,
    }


def evaluation(path: Path) -> Result:
    """A held-out evaluation: by task the share solved, and the turns that each sample took (0: not
    solved)."""
    summary = read_json(path)
    turns: dict[str, list[int]] = {}
    played = path.parents[1] / "trajectories" / f"eval_{summary['step']:06d}.jsonl"
    for line in read_lines(played):
        if line["stop_reason"] not in LOST:
            solved_in = len(line["turns"]) if line["success"] else 0
            turns.setdefault(line["task_id"], []).append(solved_in)
    return {
        "step": summary["step"],
        "samples": summary["samples"],
        "avg": summary["overall"]["avg"],
        "items": {task_id: item["avg"] for task_id, item in summary["items"].items()},
        "solved_in": turns,
    }
