"""Picture of lesson 10: a healthy run and one that fell apart, from the committed results."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from reporting.plots import running_mean
from reporting.sentinels import Alarm, Sentinels
from tutorials.pictures.svg import Sheet

RESULTS = Path(__file__).resolve().parents[2] / "recipes/results/learns"
RUNS = {"rl": ("rl-0", "observation"), "shuffled": ("shuffled-0", "action")}


def run_of(name: str) -> dict[str, Any]:
    """A committed run: `curve`, one row a step; `held_out`, its evaluations; `config`."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def alarms_of(run: Mapping[str, Any]) -> list[tuple[int, Alarm]]:
    """What the sentinels would have said of a committed run: (step, alarm)."""
    held_out = {point["step"]: {"eval/avg": point["avg"]["value"]} for point in run["held_out"]}
    sentinels = Sentinels()
    sentinels.check(0, held_out[0])
    return [
        (row["step"], alarm)
        for row in run["curve"]
        for alarm in sentinels.check(row["step"], row | held_out.get(row["step"], {}))
    ]


class Panel:
    """One number over the steps of both runs."""

    def __init__(self, sheet: Sheet, x: float, y: float, title: str, top: float) -> None:
        self.sheet, self.x, self.y, self.top = sheet, x, y, top
        self.width, self.height = 234.0, 128.0
        sheet.write(x, y - 10, title, size=12, bold=True)
        for share in (0.0, 0.5, 1.0):
            line = y + self.height * (1 - share)
            sheet.line([(x, line), (x + self.width, line)], "faint", width=1)
            sheet.write(x - 6, line + 4, f"{top * share:g}", "soft", 10, "end")
        for step in (0, 15, 30, 45, 60):
            sheet.write(self.at(step, 0)[0], y + self.height + 15, f"{step}", "soft", 10, "middle")

    def at(self, step: float, value: float) -> tuple[float, float]:
        y = self.y + self.height * (1 - min(value / self.top, 1))
        return self.x + self.width * step / 60, y

    def curve(self, steps: Sequence[int], values: Sequence[float], role: str) -> None:
        """Faint: every step; heavy: the mean of it and the four before."""
        self.sheet.line([self.at(*point) for point in zip(steps, values, strict=True)], role, 0.5)
        means = running_mean(values, 5)
        self.sheet.line([self.at(*point) for point in zip(steps, means, strict=True)], role, 2.2)


def health() -> Sheet:
    """Lesson 10: six numbers of the log, of a run that learns and of one with shuffled rewards."""
    sheet = Sheet(900, 468, "Six logged numbers of a healthy run and of one that fell apart")
    sheet.write(24, 30, "Which numbers knew?", size=15, bold=True)
    for start, role, words in (
        (230.0, "observation", "healthy: GRPO, seed 0"),
        (440.0, "action", "the same with shuffled rewards: it collapses"),
    ):
        sheet.line([(start, 26), (start + 26, 26)], role, 2.6)
        sheet.write(start + 34, 30, words, size=12)
    panels = {
        name: Panel(sheet, 58 + 286 * (n % 3), 84 + 204 * (n // 3), title, top)
        for n, (name, title, top) in enumerate(
            (
                ("held_out", "held-out success", 1.0),
                ("train/success_rate", "training success", 1.0),
                ("signal", "trajectories that teach, of 64", 64.0),
                ("policy/entropy", "entropy (nats a token)", 0.3),
                ("policy/grad_norm", "gradient norm", 0.6),
                ("train/turns_mean", "turns, of at most 6", 6.0),
            )
        )
    }
    for name, role in RUNS.values():
        run = run_of(name)
        for metric, panel in panels.items():
            key = "train/trajectories_used" if metric == "signal" else metric
            rows = [row for row in run["curve"] if row.get(key) is not None]
            if rows:
                panel.curve([row["step"] for row in rows], [row[key] for row in rows], role)
        panel = panels["held_out"]
        points = [(each["step"], each["avg"]) for each in run["held_out"]]
        sheet.line([panel.at(step, avg["value"]) for step, avg in points], role, 2.2)
        for step, avg in points:
            ends = [panel.at(step, avg[end]) for end in ("low", "high")]
            sheet.line(ends, role, 1)
            x, y = panel.at(step, avg["value"])
            sheet.box(x - 3, y - 3, 6, 6, role)
        for step, alarm in alarms_of(run):
            x, y = panel.at(step, alarm.value)
            sheet.write(x - 6, y + 14, alarm.severity, "bad", 11.5, "end", bold=True)
    sheet.write(
        876, 454, "training step; faint: each step, heavy: mean of five", "soft", 10.5, "end"
    )
    return sheet
