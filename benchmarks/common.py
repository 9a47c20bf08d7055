"""Helpers shared by the benchmarks: options, medians, result files."""

import argparse
import datetime
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from run.files import write_json
from run.rundir import provenance


def make_parser(docstring: str | None, repeats: int) -> argparse.ArgumentParser:
    """The command-line parser of a benchmark. `repeats` is the default of --repeats."""
    parser = argparse.ArgumentParser(description=(docstring or "").splitlines()[0])
    parser.add_argument(
        "--repeats", type=int, default=repeats, help=f"number of repeats (default: {repeats})"
    )
    parser.add_argument(
        "--out", type=Path, help="result file; if not given, a file in runs/benchmarks"
    )
    return parser


def write_result(options: argparse.Namespace, name: str, content: dict[str, Any]) -> None:
    """Write the measurements with date, versions, commit, hardware and command."""
    path = options.out or ROOT / "runs" / "benchmarks" / name
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    write_json(path, {"date": date} | provenance() | content, indent=2)


def median(values: Iterable[float], digits: int) -> float:
    """The rounded median over repeats. Take ratios within a repeat, because speed drifts."""
    return round(statistics.median(values), digits)
