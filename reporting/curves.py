"""What the files of a run hold, to be drawn.

Read next: reporting/plots.py.
"""

import json
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

from envs import env_name
from reporting.logs import read_log


@dataclass(frozen=True)
class RunFiles:
    """A run as it lies on disk.

    Attributes:
        options: of config.json; empty where there is none.
        metrics, timings: the rows of the two logs.
        evaluations: the overall results of `eval/step_*.json`, by step, none beyond the last row.
        method: of config.json; "rl" where it does not say.
    """

    path: Path
    options: dict[str, Any]
    metrics: list[dict[str, Any]]
    timings: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    method: str = "rl"

    @property
    def last_step(self) -> int:
        return self.metrics[-1]["step"] if self.metrics else 0

    def series(self, name: str) -> list[tuple[int, float]]:
        """(step, value) of a metric where it has a value."""
        return [(row["step"], row[name]) for row in self.metrics if row.get(name) is not None]

    def held_out(self, name: str) -> list[tuple[int, dict[str, Any]]]:
        """(step, estimate) of the evaluations: avg or pass."""
        return [(e["step"], e["overall"][name]) for e in self.evaluations]

    def worlds(self) -> list[str]:
        """The worlds of a run that plays several, in the order of their names; else none."""
        begins = "train/return_mean/"
        names = {name for row in self.metrics for name in row if name.startswith(begins)}
        return sorted(name.removeprefix(begins) for name in names)

    def held_out_in(self, world: str) -> list[tuple[int, dict[str, Any]]]:
        """(step, estimate of avg) of the evaluations in one of several worlds."""
        return [
            (e["step"], row["avg"])
            for e in self.evaluations
            for env, row in e.get("worlds", {}).items()
            if world in (env, env_name(env))
        ]

    def turns_played(self) -> dict[int, float]:
        """Step -> thousands of turns that training trajectories have had when it ended."""
        o = self.options  # of a method that plays now and then, only those steps have turns
        tasks = o.get("tasks_per_step") or o.get("tasks_per_iteration", 1)
        episodes = tasks * o.get("group_size", 1)
        turns = [(row.get("train/turns_mean") or 0.0) * episodes / 1000 for row in self.metrics]
        return self._by_step(self.metrics, turns)

    def hours(self) -> dict[int, float]:
        """Step -> hours that the steps have taken when it ended, evaluations among them."""
        seconds = [(row.get("time/step_s") or 0.0) / 3600 for row in self.timings]
        return self._by_step(self.timings, seconds)

    @staticmethod
    def _by_step(rows: list[dict[str, Any]], values: list[float]) -> dict[int, float]:
        sums = accumulate(values)
        return {0: 0.0} | {row["step"]: total for row, total in zip(rows, sums, strict=True)}


def read_run(run_dir: str | Path) -> RunFiles:
    """
    The files of a run.

    Raises:
        FileNotFoundError: it has no metrics.jsonl.
        ValueError: one of the files is none of a run's.
    """
    path = Path(run_dir)
    options: dict[str, Any] = {}
    method = "rl"
    if (path / "config.json").exists():
        saved = json.loads((path / "config.json").read_text(encoding="utf-8"))
        options, method = saved.get("config", saved), saved.get("method", method)
    metrics = read_log(path / "metrics.jsonl")
    timings = read_log(path / "timings.jsonl") if (path / "timings.jsonl").exists() else []
    found = (json.loads(each.read_text(encoding="utf-8")) for each in path.glob("eval/step_*.json"))
    # A run that was cut back on resume may hold evaluations of steps that it will do again.
    last = metrics[-1]["step"] if metrics else 0
    evaluations = sorted((e for e in found if e["step"] <= last), key=lambda e: e["step"])
    return RunFiles(path, options, metrics, timings, evaluations, method)
