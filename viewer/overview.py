"""The first screen: is it learning, and what does it do wrong? From a run's logs alone.

Read next: wrong.py, the second half of the question.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from reporting.logs import ALARMS
from reporting.metrics import GLOSSARY
from reporting.sentinels import Sentinels
from trajectory import LOST, STOP_REASONS
from viewer.lines import parse
from viewer.sources import EvaluationSource, Source, read_json

Series = dict[str, list[tuple[int, float | None]]]
SOME = 5  # steps that a sentence averages over


def overview(source: Source) -> dict[str, Any]:
    """What the first screen shows of a source; see the routes in server.py."""
    rows = read_rows(source.path / "metrics.jsonl") if source.path.is_dir() else []
    timings = read_rows(source.path / "timings.jsonl") if source.path.is_dir() else []
    config = source.config()
    series, times = series_of(rows), series_of(timings)
    evaluations = evaluations_of(source)
    alarms = alarms_of(source.path, rows)
    phases = {
        name.removeprefix("time/").removesuffix("_s"): points
        for name, points in times.items()
        if name.startswith("time/") and name != "time/step_s"
    }
    return {
        "name": source.name,
        "env": source.env,
        "model": config.get("model"),
        "algorithm": config.get("algorithm"),
        "step": rows[-1]["step"] if rows else None,
        "steps": config.get("steps"),
        "headline": headline(series, evaluations, alarms),
        "series": series | times,
        "glossary": {name: GLOSSARY[name] for name in series | times if name in GLOSSARY},
        "evaluations": evaluations,
        "horizons": changes(series.get("horizon/max_rounds", [])),
        "stop_reasons": {
            reason: series[f"train/stop/{reason}"]
            for reason in STOP_REASONS
            if any(value for _, value in series.get(f"train/stop/{reason}", []))
        },
        "phases": phases,
        "alarms": alarms,
        "options": config,
    }


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The steps of a log; a broken line, which a crash or a copy may leave, is passed over."""
    try:
        text = path.read_bytes()
    except OSError:
        return []
    rows = (parse(line) for line in text.splitlines())
    return [row for row in rows if row is not None and isinstance(row.get("step"), int)]


def series_of(rows: Iterable[Mapping[str, Any]]) -> Series:
    """name -> (step, number) of every row that has it; a null was not finite.

    >>> series_of([{"step": 1, "a": 0.5}, {"step": 2, "a": None, "b": "text"}])
    {'a': [(1, 0.5), (2, None)]}
    """
    found: Series = {}
    for row in rows:
        for name, value in row.items():
            if name != "step" and (value is None or is_number(value)):
                found.setdefault(name, []).append((row["step"], value))
    return {name: points for name, points in found.items() if any(v is not None for _, v in points)}


def is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def changes(points: Sequence[tuple[int, float | None]]) -> list[tuple[int, float]]:
    """Where a series takes another value.

    >>> changes([(1, 5), (2, 5), (3, 10)])
    [(1, 5), (3, 10)]
    """
    found: list[tuple[int, float]] = []
    for step, value in points:
        if value is not None and (not found or found[-1][1] != value):
            found.append((step, value))
    return found


# --------------------------------------------------------------------------------- evaluations


def evaluations_of(source: Source) -> list[dict[str, Any]]:
    """Held-out success at each evaluated step, overall and by sub-task, with intervals."""
    if isinstance(source, EvaluationSource):
        paths = [file.path.parent / "eval.json" for file in source.files()]
    else:
        paths = sorted((source.path / "eval").glob("step_*.json"))
    found = (evaluation(read_json(path)) for path in paths)
    return [one for one in found if one is not None]


def evaluation(scores: Mapping[str, Any]) -> dict[str, Any] | None:
    """An eval file's numbers in short; None if it holds none."""
    overall = scores.get("overall")
    if not isinstance(overall, dict) or not isinstance(overall.get("avg"), dict):
        return None
    subtasks = scores.get("subtasks")
    return {
        "step": scores.get("step", 0),
        "env": scores.get("env"),
        "overall": overall["avg"],
        "pass": overall.get("pass") if scores.get("samples", 1) != 1 else None,
        "samples": scores.get("samples"),
        "trained_on": scores.get("trained_on", 0),
        "subtasks": {
            name: found["avg"]
            for name, found in (subtasks if isinstance(subtasks, dict) else {}).items()
            if isinstance(found, dict) and isinstance(found.get("avg"), dict)
        },
    }


# ------------------------------------------------------------------------------------ in words


def alarms_of(path: Path, rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What the sentinels said while the run went on; of a run that did not keep it, what they say
    of its numbers."""
    if (path / ALARMS).exists():
        fields = ("severity", "name", "text")
        kept = read_rows(path / ALARMS)
        return [row for row in kept if all(isinstance(row.get(field), str) for field in fields)]
    sentinels, alarms = Sentinels(), []
    for row in rows:
        numbers = {name: v for name, v in row.items() if isinstance(v, int | float)}
        for alarm in sentinels.check(row["step"], numbers):
            alarms.append(
                {"step": row["step"], "severity": alarm.severity, "name": alarm.name}
                | {"text": alarm.message}
            )
    return alarms


def headline(
    series: Series, evaluations: Sequence[Mapping[str, Any]], alarms: Sequence[Any]
) -> list[str]:
    """At most four sentences that say how it goes."""
    said = [held_out_sentence(evaluations), training_sentence(series)]
    if not evaluations:  # what there is comes first
        said.reverse()
    if alarms:
        last = alarms[-1]
        others = f" ({len(alarms)} alarms in all)" if len(alarms) > 1 else ""
        said.append(f"Alarm at step {last['step']}: {last['text']}{others}")
    lost = sum(v or 0 for _, v in series.get("train/env_failures", []))
    if lost:
        said.append(
            f"{lost:.0f} trajectories were lost to a server or the sampler ({' or '.join(LOST)})."
        )
    return [sentence for sentence in said if sentence]


def held_out_sentence(evaluations: Sequence[Mapping[str, Any]]) -> str:
    if not evaluations:
        return "Nothing held out was evaluated."
    evaluations = [e for e in evaluations if e["overall"].get("value") is not None]
    if not evaluations:
        return "No held-out episode could be measured: all were lost."
    first, last = evaluations[0], evaluations[-1]
    known = last.get("trained_on", 0)
    kind = f"tasks, {known} of them trained on," if known else "held-out tasks"
    now = f"{percent(last['overall'])} of {last['overall'].get('items', '?')} {kind} solved"
    if first is last:
        return f"{now}{at_step(last)}."
    if first.get("env") != last.get("env"):
        return f"{len(evaluations)} environments evaluated."
    best = max(evaluations, key=lambda e: e["overall"]["value"])
    peak = "" if best is last else f"; best was {percent(best['overall'])}{at_step(best)}"
    at_first = "before training " if not first.get("step") else "first measured "
    earlier = f"{at_first}{percent(first['overall'])}{at_step(first)}"
    return f"{now}{at_step(last)}; {earlier}{peak}."


def training_sentence(series: Series) -> str:
    values = [v for _, v in series.get("train/success_rate", []) if v is not None]
    if not values:
        return ""
    if len(values) < 2 * SOME:
        return f"Solved in training: {100 * values[-1]:.0f} % in the last step."
    first, last = fmean(values[:SOME]), fmean(values[-SOME:])
    return (
        f"Solved in training: {100 * first:.0f} % in the first {SOME} steps, "
        f"{100 * last:.0f} % in the last {SOME}."
    )


def percent(estimate: Mapping[str, Any]) -> str:
    low, high = estimate.get("low"), estimate.get("high")
    if low is None or high is None:
        return f"{100 * estimate['value']:.0f} %"
    return f"{100 * estimate['value']:.0f} % [{100 * low:.0f}, {100 * high:.0f}]"


def at_step(one: Mapping[str, Any]) -> str:
    return f" at step {one['step']}" if one.get("step") else ""


def differing(sources: Sequence[Source]) -> dict[str, list[Any]]:
    """Options in which runs differ, a value for each source; where it goes says nothing."""
    configs = [source.config() for source in sources]
    names = dict.fromkeys(name for config in configs for name in config)
    ignored = ("run_dir", "resume", "out", "command")
    values = {n: [config.get(n) for config in configs] for n in names if n not in ignored}
    return {
        name: found
        for name, found in values.items()
        if len({json.dumps(value, sort_keys=True) for value in found}) > 1
    }
