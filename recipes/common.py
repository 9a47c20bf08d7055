"""What recipes share: how runs are started and kept, and how results are compared goal by goal.

The unit of every interval is the goal: goals are resampled, a goal's value is its mean over samples
and seeds, and differences are paired by goal.
"""

import argparse
import datetime
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from reporting.scoring import bootstrap, paired_bootstrap  # noqa: E402
from run.files import write_text  # noqa: E402

RESULTS = ROOT / "recipes" / "results"
CURVE = (
    "train/return_mean",
    "train/success_rate",
    "train/turns_mean",
    "train/trajectories_used",
    "policy/loss",
    "policy/entropy",
    "policy/grad_norm",
    "data/policy_tokens",
)

Result = dict[str, Any]


# ------------------------------------------------------------------------------------ command lines


@dataclass(frozen=True)
class Recipe:
    """A recipe's two commands, `run` and `report`."""

    name: str
    about: str | None  # its docstring
    results: Path  # where its results lie if --results does not say otherwise
    add_options: Callable[[argparse.ArgumentParser], None]  # those of `run`
    run: Callable[[argparse.Namespace, Sequence[str]], None]  # with options that are train.py's
    report: Callable[[Path], str]

    def main(self, argv: Sequence[str] | None = None) -> int:
        """The exit code: 0 done, 2 misuse, 130 stopped by Ctrl-C."""
        parser = argparse.ArgumentParser(description=(self.about or "").splitlines()[0])
        commands = parser.add_subparsers(dest="command", required=True)
        running = commands.add_parser("run", help="run, or go on with what was stopped")
        self.add_options(running)
        running.add_argument("--seed", type=int, default=0)
        running.add_argument(
            "--runs", type=Path, default=Path("runs") / self.name, help="where runs lie"
        )
        reporting = commands.add_parser("report", help="table and figure of the results present")
        for each in (running, reporting):
            each.add_argument("--results", type=Path, default=self.results)
        options, extra = parser.parse_known_args(argv)

        def work() -> None:
            if options.command == "run":
                os.chdir(ROOT)
                self.run(options, extra)
            elif extra:
                raise ValueError(f"unknown arguments: {' '.join(extra)}")
            else:
                print(self.report(options.results))

        return exit_code(self.name, work)


def exit_code(name: str, work: Callable[[], None]) -> int:
    """Do a recipe's work: 0 done, 2 misuse, 130 stopped by Ctrl-C; the last two say so."""
    try:
        work()
    except ValueError as error:
        print(f"{name}.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; the same command goes on from the last checkpoint", file=sys.stderr)
        return 130
    return 0


def load_config(arguments: Sequence[str], kind: Any = None) -> Any:
    """The options that train.py, or the program of this `kind` of options, makes of these
    arguments."""
    from config import Config, checked, read_command_line

    return checked(read_command_line(arguments, kind or Config)[0])


def planned(arguments: Sequence[str], kind: Any = None) -> Any:
    """The options of a run that begins with these arguments, or has begun: a program refuses a
    --run-dir that holds a run."""
    if "--run-dir" not in arguments:
        return load_config(arguments, kind)
    at = list(arguments).index("--run-dir")
    return load_config([*arguments[:at], *arguments[at + 2 :]], kind)


def run(command: Sequence[str]) -> None:
    """A command of this project, shown before it runs.

    Raises:
        SystemExit: it did not end well; its message is above.
    """
    print(f"$ {shlex.join(command)}", flush=True)
    code = subprocess.run(command, cwd=ROOT).returncode
    if code:
        raise SystemExit(code)


def require_begun_with(asked: Any, run_dir: Path) -> None:
    """Refuse to go on with a run, or to take its result, under options that it was not begun with.

    Args:
        asked: the options, as a new run would have them.
    Raises:
        ValueError: names those that differ.
    """
    from config import changed, flag, saved_config

    saved = saved_config(str(run_dir), type(asked))
    if other := [name for name in changed(asked, saved) if name != "config"]:
        told = ", ".join(f"{flag(name)} {getattr(saved, name)}" for name in other)
        raise ValueError(f"{run_dir} was begun with {told}: give the same, or other --runs")


def require_alike(results: Sequence[Result]) -> Sequence[Result]:
    """The results, which may be pooled: what was learned, and how, is the same but for the seed.

    Raises:
        ValueError: names what differs.
    """
    from config import CHANGEABLE

    # The lists of tasks have been renamed; results are paired by task in any case.
    free = CHANGEABLE - {"steps", "learning_rate_decay_steps"}
    free |= {"seed", "config", "tasks", "eval_tasks", "data"}  # demonstrations lie by the run
    configs = [r.get("config", {}) | {"steps": r["steps"]} for r in results if "steps" in r]
    if all(config.get("data") for config in configs):
        free |= {"num_demonstrations"}  # without effect beside them; its default has changed
    for config in configs[1:]:
        names = sorted((config.keys() & configs[0].keys()) - free)
        if other := [name for name in names if config[name] != configs[0][name]]:
            told = ", ".join(f"{name} {configs[0][name]} and {config[name]}" for name in other)
            raise ValueError(f"runs that differ in more than the seed must not be pooled: {told}")
    return results


def steps_done(run_dir: Path) -> int:
    """Steps that a run has saved."""
    from run.checkpoint import steps_saved

    return max(steps_saved(run_dir), default=0)


def train(arguments: Sequence[str], run_dir: Path, steps: int, kind: Any = None) -> None:
    """train.py, or the program of this `kind` of options, with these arguments, from its last
    checkpoint if there is one.

    Raises:
        ValueError: the run that is there was begun with other options.
    """
    if (run_dir / "config.json").exists():
        require_begun_with(planned(arguments, kind), run_dir)
        if steps_done(run_dir) >= steps:
            print(f"{run_dir} is complete ({steps} steps)", flush=True)
            return
        arguments = ["--resume", "--run-dir", str(run_dir), "--steps", str(steps)]
    run([sys.executable, kind.program if kind else "train.py", *arguments])


# ------------------------------------------------------------------------------------------- files


def write_json(path: Path, content: Any) -> None:
    """Whole or not at all; paths inside the checkout lose its place on this machine."""
    write_text(path, json.dumps(content, indent=1).replace(f"{ROOT}/", "") + "\n")


def write_result(path: Path, result: Result) -> None:
    """What a run came to."""
    write_json(path, result)
    print(f"wrote {path}", flush=True)


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a .jsonl file; none where there is no file."""
    if not path.exists():
        return []
    # NOTE: not splitlines, which also cuts at U+2028, and JSON leaves that as it is.
    lines = path.read_text(encoding="utf-8").split("\n")
    return [json.loads(line) for line in lines if line]


def results_of(folder: Path, name: str) -> list[Result]:
    """`<name>-<seed>.json` of a folder, by seed."""
    return [read_json(path) for path in sorted(folder.glob(f"{name}-*.json"))]


def item_shares(summary: Mapping[str, Any]) -> dict[str, float]:
    """task_id -> share of its samples that were solved, of an evaluation's summary."""
    return {task_id: item["avg"] for task_id, item in summary["items"].items()}


def read_evaluations(run_dir: Path) -> list[dict[str, Any]]:
    """Held-out evaluations of a run: step, mean with interval, share and mean return by goal."""
    found = []
    for path in sorted((run_dir / "eval").glob("step_*.json")):
        summary = read_json(path)
        overall = summary["overall"]
        found.append(
            {"step": summary["step"], "avg": overall["avg"], "pass": overall["pass"]}
            | {"samples": summary["samples"], "items": item_shares(summary)}
            | {"returns": {i: item["return_mean"] for i, item in summary["items"].items()}}
        )
    return found


def circumstances_of(run_dir: Path) -> Result:
    """How a run was started, or last gone on with, and on what; `begun`: if it was gone on with."""
    about = read_json(run_dir / "config.json")
    kept = ("command", "git_commit", "hardware", "versions", "begun")
    return {key: about[key] for key in kept if key in about}


def costs_of(run_dir: Path) -> Result:
    """Hours of all steps, seconds of the median one, and the most memory that a process held."""
    timings = read_lines(run_dir / "timings.jsonl")
    seconds = [row["time/step_s"] for row in timings if "time/step_s" in row]
    peaks = [row["memory/peak_bytes"] for row in timings if "memory/peak_bytes" in row]
    return {
        "hours": round(sum(seconds) / 3600, 2) or None,
        "step_s": round(median(seconds), 1) if seconds else None,
        "peak_gb": round(max(peaks) / 1e9, 2) if peaks else None,
    }


def record(run_dir: Path, steps: int) -> Result:
    """What is kept of a run of train.py: circumstances, options, curve, held-out evaluations.

    Raises:
        SystemExit: it was not evaluated at its beginning and at its end.
    """
    held_out = read_evaluations(run_dir)
    at = [evaluation["step"] for evaluation in held_out]
    if at[:1] != [0] or at[-1] != steps:
        raise SystemExit(f"{run_dir}/eval holds steps {at}, expected 0 to {steps}")
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **circumstances_of(run_dir),
        "config": read_json(run_dir / "config.json")["config"],
        "steps": steps,
        **costs_of(run_dir),
        "curve": [
            {"step": row["step"]} | {name: row[name] for name in CURVE if row.get(name) is not None}
            for row in read_lines(run_dir / "metrics.jsonl")
        ],
        "held_out": held_out,
    }


# --------------------------------------------------------------------------------- goals and seeds


def mean_over_seeds(results: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Goals that every seed has a value for -> the mean over seeds.

    >>> mean_over_seeds([{"a": 0.0, "b": 1.0}, {"a": 1.0}])
    {'a': 0.5}
    """
    if not results:
        return {}
    common = set.intersection(*(set(items) for items in results))
    return {item: sum(r[item] for r in results) / len(results) for item in sorted(common)}


def of_both(ours: Sequence[Result], others: Sequence[Result]) -> tuple[list[Result], list[Result]]:
    """The results of both sides whose seeds both have, by seed: what can be compared while runs
    are missing."""
    sides = [{result["seed"]: result for result in side} for side in (ours, others)]
    common = sorted(sides[0].keys() & sides[1].keys())
    return [sides[0][seed] for seed in common], [sides[1][seed] for seed in common]


def pooled_at(results: Sequence[Result], position: int, measure: str = "items") -> dict[str, float]:
    """Each goal's mean over seeds in the first (0) or last (-1) held-out evaluation."""
    return mean_over_seeds([result["held_out"][position][measure] for result in results])


def pooled_curve(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Steps that all seeds evaluated, with the pooled mean and its interval over goals."""
    by_seed = [{e["step"]: e["items"] for e in result["held_out"]} for result in results]
    curve = []
    for step in sorted(set.intersection(*(set(seed) for seed in by_seed))):
        items = mean_over_seeds([seed[step] for seed in by_seed])
        curve.append({"step": step, **bootstrap(list(items.values()))})
    return curve


def difference(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, Any]:
    """Paired bootstrap over the goals that both have."""
    both = before.keys() & after.keys()
    return paired_bootstrap({i: before[i] for i in both}, {i: after[i] for i in both})


def change(before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, Any]:
    """Mean before, mean after, mean difference, each with its interval."""
    return {
        "before": bootstrap(list(before.values())),
        "after": bootstrap(list(after.values())),
        "difference": difference(before, after),
    }


# ------------------------------------------------------------------------------------------- words


def percent(estimate: Mapping[str, Any], signed: bool = False) -> str:
    """`54.1 [48.0, 60.1]`, in percent or points."""
    if estimate["value"] is None:
        return "-"
    sign = "+" if signed else ""
    value, low, high = (f"{100 * estimate[key]:{sign}.1f}" for key in ("value", "low", "high"))
    return f"{value} [{low}, {high}]"


def markdown(titles: str, rows: Iterable[Sequence[Any]]) -> list[str]:
    """The lines of a table.

    >>> print(*markdown("arm | goals", [("rl", 63)]), sep="\\n")
    | arm | goals |
    |---|---|
    | rl | 63 |
    """
    rule = "|" + "---|" * (titles.count("|") + 1)
    return [f"| {titles} |", rule, *(f"| {' | '.join(map(str, row))} |" for row in rows)]


def change_cells(row: Mapping[str, Any]) -> list[str]:
    """Goals, before, after, difference: four cells of a table."""
    cells = [percent(row["before"]), percent(row["after"])]
    return [str(row["difference"]["items"]), *cells, percent(row["difference"], signed=True)]
