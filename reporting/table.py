"""The table that a run prints: one line a step, at most 120 characters with one environment. Each
method has its own columns.

Read next: reporting/metrics.py, which defines the numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from run.progress import duration

Columns = tuple[tuple[str, str, str], ...]  # heading, name, format

# "signal": groups that carry signal / groups.
COLUMNS: Columns = (
    ("return", "train/return_mean", "8.3f"),
    ("success", "train/success_rate", "8.1%"),
    ("turns", "train/turns_mean", "6.1f"),
    ("signal", "signal", "7"),
    ("loss", "policy/loss", "9.4f"),
    ("kl", "policy/kl", "9.5f"),
    ("entropy", "policy/entropy", "8.3f"),
    ("grad", "policy/grad_norm", "8.3f"),
    ("rollout s", "time/rollout_s", "10.1f"),
    ("update s", "time/update_s", "9.1f"),
    ("eval", "eval/avg", "7.1%"),
)
_RETURN, _SUCCESS, _, _, _LOSS, _, _ENTROPY, _GRAD, _, *_TIMES = COLUMNS
_IMITATION = (_LOSS, _ENTROPY, _GRAD, ("epoch", "data/epoch", "7.2f"))
COLUMNS_OF: dict[str, Columns] = {
    "rl": COLUMNS,
    "sft": (*_IMITATION, ("held-out loss", "eval/loss", "13.4f"), *_TIMES),
    "dpo": (
        _LOSS,
        ("margin", "preference/margin", "8.3f"),
        ("ordered", "preference/accuracy", "8.1%"),
        ("log-prob chosen", "preference/chosen_log_prob", "15.2f"),
        ("rejected", "preference/rejected_log_prob", "9.2f"),
        _GRAD,
        _RETURN,
        *_TIMES,
    ),
    "agentevol": (_RETURN, _SUCCESS, ("set", "data/evolving", "6"), *_IMITATION, *_TIMES),
}
STEP, LEFT = 9, 10  # widths of "1000/1000" and "25.5 days"
HEADER_EVERY = 20


def columns_of(method: str, envs: Sequence[str] = ()) -> Columns:
    """A method's columns. With several environments the return in each replaces the mean return and
    success.

    >>> [head for head, *_ in columns_of("rl", ["textcraft", "babyai"])][:3]
    ['textcraft', 'babyai', 'turns']
    """
    if len(envs) < 2:
        return COLUMNS_OF[method]
    returns = [(env, f"train/return_mean/{env}", "8.3f") for env in envs]
    columns: list[tuple[str, str, str]] = []
    for column in COLUMNS_OF[method]:
        columns += returns if column == _RETURN else [] if column == _SUCCESS else [column]
    return tuple(columns)


def header(columns: Columns = COLUMNS) -> str:
    """The heading of the table that `row` prints."""
    cells = [head.rjust(_width(head, spec)) for head, _, spec in columns]
    return "".join(["step".rjust(STEP), *cells, "left".rjust(LEFT)])


def row(
    step: int,
    values: Mapping[str, Any],
    last_step: int | None = None,
    left_s: float | None = None,
    columns: Columns = COLUMNS,
) -> str:
    """One aligned line; "-" stands for what is missing or not finite.

    Args:
        values: metrics and timings by name.
        last_step: of the run; the first cell is then 12/60.
        left_s: seconds that the run still takes.
    """
    cells = [(str(step) if last_step is None else f"{step}/{last_step}").rjust(STEP)]
    for head, name, spec in columns:
        cells.append(_cell(values, name, spec).rjust(_width(head, spec)))
    return "".join([*cells, (duration(left_s) if left_s else "-").rjust(LEFT)])


def _cell(values: Mapping[str, Any], name: str, spec: str) -> str:
    if name == "signal" and values.get("train/groups") is not None:
        flat = values.get("train/groups_zero_variance", 0)
        return f"{values['train/groups'] - flat}/{values['train/groups']}"
    value = values.get(name)
    if value is None or not math.isfinite(value):
        return "-"
    return format(value, spec).strip()


def _width(head: str, spec: str) -> int:
    return max(len(head) + 2, int(spec.split(".")[0]) + 1)
