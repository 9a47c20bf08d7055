"""Data for the first screen, from logs and trajectories: is the run learning, and how does it fail?

Read next: server.py.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from types import NoneType
from typing import Any

from reporting.logs import ALARMS
from reporting.metrics import GLOSSARY
from trajectory import LOST
from viewer.sources import Source
from viewer.trajectories import NUMBER, Lines, fits, split_action

Series = dict[str, list[tuple[int, float | None]]]
NUM_AVERAGED = 5  # steps that a sentence averages over
IGNORED = ("run_dir", "resume", "out", "command")  # options without effect on the results
MAX_ENTRIES = 6  # in each list of a summary of failures
MAX_EXAMPLES = 8  # line numbers in each entry
MAX_FAILURES = 400  # failed trajectories that are read in full
MAX_TEXT = 300  # characters
# The fields of an evaluation that are read here.
ESTIMATE = dict.fromkeys(("value", "low", "high", "items"), NUMBER)
GROUP = {"avg": ESTIMATE, "pass": (ESTIMATE, NoneType)}
SCORES = {"samples": int, "overall": GROUP, "subtasks": dict, "step": NUMBER, "trained_on": NUMBER}


def overview(source: Source) -> dict[str, Any]:
    """The data of a source for the first screen."""
    rows = source.rows("metrics.jsonl")
    series = series_of(rows) | series_of(source.rows("timings.jsonl"))
    alarms = [row for row in source.rows(ALARMS) if fits(row, {"text": str})]
    evaluations = evaluations_of(source)
    config = source.config()
    return {
        "name": source.name,
        "env": source.env,
        **{option: config.get(option) for option in ("model", "algorithm", "steps")},
        "step": rows[-1]["step"] if rows else None,
        "headline": headline(series, evaluations, alarms),
        "series": series,
        "glossary": {name: GLOSSARY[name] for name in series if name in GLOSSARY},
        "evaluations": evaluations,
        "alarms": alarms,
        "options": config,
    }


def series_of(rows: Iterable[Mapping[str, Any]]) -> Series:
    """name -> (step, value) of every row that has this metric; None stands for NaN or infinity.

    >>> series_of([{"step": 1, "a": 0.5}, {"step": 2, "a": None, "b": "text"}])
    {'a': [(1, 0.5), (2, None)]}
    """
    series: Series = {}
    for row in rows:
        for name, value in row.items():
            if name != "step" and fits(value, NUMBER):
                series.setdefault(name, []).append((row["step"], value))
    return {n: points for n, points in series.items() if any(v is not None for _, v in points)}


def evaluations_of(source: Source) -> list[dict[str, Any]]:
    """Held-out success at each evaluated step, overall and by sub-task, with intervals."""
    return [
        {
            "step": scores.get("step", 0),
            "env": scores.get("env"),
            "overall": scores["overall"]["avg"],
            "pass": scores["overall"].get("pass") if scores["samples"] > 1 else None,
            "samples": scores["samples"],
            "trained_on": scores.get("trained_on", 0),
            "subtasks": {n: g["avg"] for n, g in scores["subtasks"].items() if fits(g, GROUP)},
        }
        for scores in source.objects(*source.evaluations)
        if fits(scores, SCORES)
    ]


def differing_options(sources: Sequence[Source]) -> dict[str, list[Any]]:
    """The options in which the sources differ: name -> its value in each source."""
    configs = [source.config() for source in sources]
    names = dict.fromkeys(name for config in configs for name in config if name not in IGNORED)
    values = {name: [config.get(name) for config in configs] for name in names}
    return {
        name: options
        for name, options in values.items()
        if len({json.dumps(value, sort_keys=True) for value in options}) > 1
    }


# --------------------------------------------------------------------------------------- sentences


def headline(
    series: Series, evaluations: Sequence[Mapping[str, Any]], alarms: Sequence[Any]
) -> list[str]:
    """Up to four sentences about the state of the run."""
    sentences = [held_out_sentence(evaluations), training_sentence(series)]
    if not evaluations:
        sentences.reverse()
    if alarms:
        last = alarms[-1]
        total = f" ({len(alarms)} alarms in total)" if len(alarms) > 1 else ""
        sentences.append(f"Alarm at step {last['step']}: {last['text']}{total}")
    if num_lost := sum(v or 0 for _, v in series.get("train/env_failures", [])):
        reasons = " or ".join(LOST)
        sentences.append(
            f"{num_lost:.0f} trajectories were lost to a server or sampler ({reasons})."
        )
    return [sentence for sentence in sentences if sentence]


def held_out_sentence(evaluations: Sequence[Mapping[str, Any]]) -> str:
    if not evaluations:
        return "There was no evaluation on held-out tasks."
    evaluations = [e for e in evaluations if e["overall"].get("value") is not None]
    if not evaluations:
        return "All held-out episodes were lost, so there is no held-out success rate."
    first, last = evaluations[0], evaluations[-1]
    num_trained = last.get("trained_on", 0)
    kind = f"tasks, {num_trained} of them trained on," if num_trained else "held-out tasks"
    result = f"{percent(last['overall'])} of {last['overall'].get('items', '?')} {kind} solved"
    if first is last:
        return f"{result}{at_step(last)}."
    if first.get("env") != last.get("env"):
        return f"Evaluated on {len(evaluations)} environments."
    best = max(evaluations, key=lambda e: e["overall"]["value"])
    peak = "" if best is last else f"; best was {percent(best['overall'])}{at_step(best)}"
    start = "first measured" if first.get("step") else "before training"
    return f"{result}{at_step(last)}; {start} {percent(first['overall'])}{at_step(first)}{peak}."


def training_sentence(series: Series) -> str:
    values = [v for _, v in series.get("train/success_rate", []) if v is not None]
    if not values:
        return ""
    if len(values) < 2 * NUM_AVERAGED:
        return f"Solved in training: {100 * values[-1]:.0f} % in the last step."
    ends = values[:NUM_AVERAGED], values[-NUM_AVERAGED:]
    first, last = (sum(end) / NUM_AVERAGED for end in ends)  # fmean raises if the sum is infinite
    return (
        f"Solved in training: {100 * first:.0f} % in the first {NUM_AVERAGED} steps, "
        f"{100 * last:.0f} % in the last {NUM_AVERAGED}."
    )


def percent(estimate: Mapping[str, Any]) -> str:
    low, high = estimate.get("low"), estimate.get("high")
    interval = "" if low is None or high is None else f" [{100 * low:.0f}, {100 * high:.0f}]"
    return f"{100 * estimate['value']:.0f} %{interval}"


def at_step(scores: Mapping[str, Any]) -> str:
    return f" at step {scores['step']}" if scores.get("step") else ""


# --------------------------------------------------------------------------------------- failures


def summarize_failures(lines: Lines) -> dict[str, Any]:
    """A file's failed episodes, counted by last observation, repeated action and stop reason.
    Episodes lost to the infrastructure do not count, since they are not the policy's failures."""
    valid = [row for row in lines.rows if row["stop_reason"] not in LOST]
    failures = [row for row in valid if row["success"] is False]
    stops, observations, repeated = (defaultdict[str, list[int]](list) for _ in range(3))
    for row in failures:
        stops[str(row["stop_reason"])].append(row["line"])
    for number in [row["line"] for row in failures[:MAX_FAILURES]]:
        turns = lines.read(number)["turns"]
        if text := last_observation(turns):
            observations[text].append(number)
        for action in repeated_actions(turns):
            repeated[action].append(number)
    return {
        "episodes": len(valid),
        "failures": len(failures),
        "observations": most_frequent(observations),
        "repeated": most_frequent(repeated),
        "stops": most_frequent(stops),
    }


def most_frequent(lines_of: Mapping[str, Sequence[int]]) -> list[dict[str, Any]]:
    """The most frequent texts, each with the numbers of its first lines in the file."""
    entries = sorted(lines_of.items(), key=lambda item: (-len(item[1]), item[0]))[:MAX_ENTRIES]
    return [
        {"text": text, "count": len(lines), "lines": sorted(set(lines))[:MAX_EXAMPLES]}
        for text, lines in entries
    ]


def last_observation(turns: Sequence[Mapping[str, Any]]) -> str:
    texts = [turn["observation_text"].strip() for turn in turns]
    return next((text[:MAX_TEXT] for text in reversed(texts) if text), "")


def repeated_actions(turns: Iterable[Mapping[str, Any]]) -> list[str]:
    """Actions that repeat the action before them.

    >>> repeated_actions([{"action_text": "Action: look"}] * 3 + [{"action_text": "Action: go"}])
    ['look', 'look']
    """
    actions = [(split_action(turn["action_text"])[1] or "")[:MAX_TEXT] for turn in turns]
    return [b for a, b in pairwise(actions) if a == b and b]
