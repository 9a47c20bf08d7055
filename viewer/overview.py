"""The first screen: is the run learning, and what goes wrong? From its logs and trajectories alone.

Read next: server.py.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from reporting.logs import ALARMS
from reporting.metrics import GLOSSARY
from reporting.sentinels import Sentinels
from trajectory import LOST, STOP_REASONS
from viewer.sources import EvaluationSource, Source, read_json, read_log
from viewer.trajectories import Lines, split_action, turns_of

Series = dict[str, list[tuple[int, float | None]]]
SOME = 5  # steps that a sentence averages over
IGNORED = ("run_dir", "resume", "out", "command")  # options that say where, not what
MAX_ENTRIES = 6  # of each list of what goes wrong
MAX_EXAMPLES = 8  # lines of each entry
MAX_FAILURES = 400  # that are read in full
MAX_TEXT = 300  # characters


def overview(source: Source) -> dict[str, Any]:
    """What the first screen shows of a source."""
    is_folder = source.path.is_dir()
    rows = read_log(source.path / "metrics.jsonl") if is_folder else []
    timings = read_log(source.path / "timings.jsonl") if is_folder else []
    config = source.config()
    series, times = series_of(rows), series_of(timings)
    evaluations = evaluations_of(source)
    alarms = alarms_of(source.path, rows)
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
        "phases": {
            name.removeprefix("time/").removesuffix("_s"): points
            for name, points in times.items()
            if name.startswith("time/") and name != "time/step_s"
        },
        "alarms": alarms,
        "options": config,
    }


def series_of(rows: Iterable[Mapping[str, Any]]) -> Series:
    """name -> (step, number) of every row that has it; None was not finite.

    >>> series_of([{"step": 1, "a": 0.5}, {"step": 2, "a": None, "b": "text"}])
    {'a': [(1, 0.5), (2, None)]}
    """
    series: Series = {}
    for row in rows:
        for name, value in row.items():
            if name != "step" and (value is None or isinstance(value, (int, float))):
                series.setdefault(name, []).append((row["step"], value))
    return {n: points for n, points in series.items() if any(v is not None for _, v in points)}


def changes(points: Sequence[tuple[int, float | None]]) -> list[tuple[int, float]]:
    """Where a series takes another value.

    >>> changes([(1, 5), (2, 5), (3, 10)])
    [(1, 5), (3, 10)]
    """
    changed: list[tuple[int, float]] = []
    for step, value in points:
        if value is not None and (not changed or changed[-1][1] != value):
            changed.append((step, value))
    return changed


def evaluations_of(source: Source) -> list[dict[str, Any]]:
    """Held-out success at each evaluated step, overall and by sub-task, with intervals."""
    if isinstance(source, EvaluationSource):
        paths = [file.path.parent / "eval.json" for file in source.files()]
    else:
        paths = sorted((source.path / "eval").glob("step_*.json"))
    return [found for path in paths if (found := evaluation(read_json(path)))]


def evaluation(scores: Mapping[str, Any]) -> dict[str, Any] | None:
    """An evaluation file in short; None if it holds no numbers."""
    try:
        return {
            "step": scores.get("step", 0),
            "env": scores.get("env"),
            "overall": scores["overall"]["avg"],
            "pass": scores["overall"].get("pass") if scores.get("samples", 1) != 1 else None,
            "samples": scores.get("samples"),
            "trained_on": scores.get("trained_on", 0),
            "subtasks": {n: row["avg"] for n, row in scores.get("subtasks", {}).items()},
        }
    except (KeyError, TypeError, AttributeError):
        return None


def alarms_of(path: Path, rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The alarms that the run has kept; if it kept none, what the sentinels say of its numbers."""
    if (path / ALARMS).exists():
        fields = ("severity", "name", "text")
        kept = read_log(path / ALARMS)
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


def differing(sources: Sequence[Source]) -> dict[str, list[Any]]:
    """Options in which the sources differ, a value for each source."""
    configs = [source.config() for source in sources]
    names = dict.fromkeys(name for config in configs for name in config if name not in IGNORED)
    values = {name: [config.get(name) for config in configs] for name in names}
    return {
        name: options
        for name, options in values.items()
        if len({json.dumps(value, sort_keys=True) for value in options}) > 1
    }


# --------------------------------------------------------------------------------------- in words


def headline(
    series: Series, evaluations: Sequence[Mapping[str, Any]], alarms: Sequence[Any]
) -> list[str]:
    """At most four sentences that say how it goes."""
    sentences = [held_out_sentence(evaluations), training_sentence(series)]
    if not evaluations:
        sentences.reverse()
    if alarms:
        last = alarms[-1]
        others = f" ({len(alarms)} alarms in all)" if len(alarms) > 1 else ""
        sentences.append(f"Alarm at step {last['step']}: {last['text']}{others}")
    if lost := sum(v or 0 for _, v in series.get("train/env_failures", [])):
        reasons = " or ".join(LOST)
        sentences.append(f"{lost:.0f} trajectories were lost to a server or sampler ({reasons}).")
    return [sentence for sentence in sentences if sentence]


def held_out_sentence(evaluations: Sequence[Mapping[str, Any]]) -> str:
    if not evaluations:
        return "No held-out tasks were evaluated."
    evaluations = [e for e in evaluations if e["overall"].get("value") is not None]
    if not evaluations:
        return "No held-out episode could be measured: all were lost."
    first, last = evaluations[0], evaluations[-1]
    num_trained = last.get("trained_on", 0)
    kind = f"tasks, {num_trained} of them trained on," if num_trained else "held-out tasks"
    now = f"{percent(last['overall'])} of {last['overall'].get('items', '?')} {kind} solved"
    if first is last:
        return f"{now}{at_step(last)}."
    if first.get("env") != last.get("env"):
        return f"{len(evaluations)} environments evaluated."
    best = max(evaluations, key=lambda e: e["overall"]["value"])
    peak = "" if best is last else f"; best was {percent(best['overall'])}{at_step(best)}"
    when = "first measured" if first.get("step") else "before training"
    return f"{now}{at_step(last)}; {when} {percent(first['overall'])}{at_step(first)}{peak}."


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
    interval = "" if low is None or high is None else f" [{100 * low:.0f}, {100 * high:.0f}]"
    return f"{100 * estimate['value']:.0f} %{interval}"


def at_step(scores: Mapping[str, Any]) -> str:
    return f" at step {scores['step']}" if scores.get("step") else ""


# -------------------------------------------------------------------------------- what goes wrong


def what_goes_wrong(lines: Lines) -> dict[str, Any]:
    """Of the failed episodes of a file: the last observation, repeated actions, and why they ended.
    Episodes lost to the infrastructure are not failures of the policy."""
    stop_reasons, success = lines.columns["stop_reason"], lines.columns["success"]
    valid = [n for n in range(len(lines)) if stop_reasons[n] not in LOST]
    failed = [n for n in valid if success[n] is False]
    observations: dict[str, list[int]] = defaultdict(list)
    repeats: Counter[str] = Counter()
    repeated_in: dict[str, list[int]] = defaultdict(list)
    for number in failed[:MAX_FAILURES]:
        turns = turns_of(lines.read(number))
        if text := last_observation(turns):
            observations[text].append(number)
        for text, times in repeated_actions(turns).items():
            repeats[text] += times
            repeated_in[text].append(number)
    stops: dict[str, list[int]] = defaultdict(list)
    for number in failed:
        stops[str(stop_reasons[number])].append(number)
    return {
        "episodes": len(valid),
        "failures": len(failed),
        "observations": entries({text: (len(n), n) for text, n in observations.items()}),
        "repeated": entries({text: (times, repeated_in[text]) for text, times in repeats.items()}),
        "stops": entries({text: (len(n), n) for text, n in stops.items()}),
    }


def entries(counts: Mapping[str, tuple[int, list[int]]]) -> list[dict[str, Any]]:
    """The most frequent texts, with examples."""
    ordered = sorted(counts.items(), key=lambda item: (-item[1][0], item[0]))[:MAX_ENTRIES]
    return [{"text": t, "count": n, "lines": lines[:MAX_EXAMPLES]} for t, (n, lines) in ordered]


def last_observation(turns: Iterable[Mapping[str, Any]]) -> str:
    texts = [str(turn.get("observation_text") or "").strip() for turn in turns]
    return next((text[:MAX_TEXT] for text in reversed(texts) if text), "")


def repeated_actions(turns: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Actions that an episode repeated immediately, and how often.

    >>> repeated_actions([{"action_text": "Action: look"}] * 3 + [{"action_text": "Action: go"}])
    {'look': 2}
    """
    texts = [str(turn.get("action_text") or "") for turn in turns]
    actions = [(split_action(text)[1] or "")[:MAX_TEXT] for text in texts]
    return dict(Counter(b for a, b in zip(actions, actions[1:], strict=False) if a == b and b))
