"""
The benchmark table compares one model's scores in every environment with the paper's numbers.

The paper (arXiv 2509.08755) reports these success rates (%), all for Qwen2.5-Instruct models:

    base 3B, base 7B    before any training
    AG-3B, AG-7B        trained at a fixed horizon
    SI-7B               trained with ScalingInter-RL; the only one reported per sub-task

Its numbers are for one sample per task at temperature 1, with at most `max_rounds` turns, over
`items` tasks, without intervals. "!" marks a row whose number of tasks differs from the paper's;
other differences are listed below the table. The authors do not say how many tasks a sub-task has;
the counts in `PAPER` are the ones that fit all their percentages. If an environment could not be
measured, or only in part, its row gives the reason.

Read next: evaluate.py (`--env all`).
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from reporting.compare import OPTIONAL_SETTINGS, percent

MODELS = ("base 3B", "base 7B", "AG-3B", "AG-7B", "SI-7B")
PAPER_TEMPERATURE = 1.0
REASON = "not measured: "


@dataclass(frozen=True)
class Paper:
    """The paper's numbers for one environment."""

    items: int  # number of test tasks
    max_rounds: int  # turn limit in the paper's evaluation scripts
    success: tuple[float, ...]  # %, in the order of MODELS
    subtasks: Mapping[str, tuple[int, float]]  # name -> number of test tasks, SI-7B in %
    ours: str = ""  # how our environment differs (a key of benchmark.json)

    def row(self, name: str) -> tuple[int, tuple[float | None, ...]]:
        """Number of tasks and success per model, for a sub-task or "all"; 0 tasks if unknown."""
        if name == "all":
            return self.items, self.success
        items, success = self.subtasks.get(name, (0, None))
        return items, (None,) * (len(MODELS) - 1) + (success,)


# fmt: off
PAPER = {
    "textcraft": Paper(
        100, 30, (14.0, 42.0, 75.0, 89.0, 91.0),
        {"depth 1": (31, 100.0), "depth 2": (41, 97.6), "depth 3": (25, 76.0),
         "depth 4": (3, 33.3)},
        "the test ids are the published ranges",
    ),
    "babyai": Paper(
        90, 20, (52.2, 66.7, 93.3, 92.2, 96.7),
        {"GoTo": (55, 100.0), "Pickup": (15, 93.3), "ActionObjDoor": (5, 100.0),
         "FindObjS7": (5, 80.0), "OneRoomS20": (5, 80.0), "SynthLoc": (5, 100.0)},
        "an episode ends as soon as its mission is done, the test ids are our own",
    ),
    "sciworld": Paper(
        200, 30, (1.0, 1.5, 22.5, 50.5, 57.0),
        {"Measurement": (53, 34.0), "Electricity": (83, 55.4), "Classification": (44, 88.6),
         "Chemistry": (5, 0.0), "Biology": (15, 73.3)},
        "success is a score of 100, the test ids are our own",
    ),
    "searchqa": Paper(
        400, 30, (13.5, 18.8, 25.8, 34.0, 38.3),
        {"NQ": (50, 52.0), "TriviaQA": (50, 70.0), "PopQA": (50, 46.0), "HotpotQA": (50, 42.0),
         "2WikiMultihopQA": (50, 44.0), "Bamboogle": (50, 24.0), "Musique": (100, 14.0)},
        "other questions over another corpus, an episode ends with its first answer",
    ),
    "webarena": Paper(
        50, 15, (10.0, 9.8, 18.0, 22.0, 26.0),  # the paper prints 9.8, impossible with 50 tasks
        {"Shopping": (15, 33.3), "CMS": (15, 26.7), "Maps": (10, 20.0),
         "GitLab and Reddit": (10, 20.0)},  # two sub-tasks, printed as one column
    ),
}
# fmt: on

Summary = Mapping[str, Any]  # the result of scoring.summarize


@dataclass
class Benchmark:
    """One model's scores: a summary per environment, or the reason why there is none."""

    model: str
    samples: int
    temperature: float
    seed: int
    families: dict[str, Summary | str] = field(default_factory=dict)

    @property
    def summaries(self) -> dict[str, Summary]:
        return {env: s for env, s in self.families.items() if not isinstance(s, str)}


def differences(benchmark: Benchmark) -> list[str]:
    """Reasons why the measured numbers are not comparable to the paper's, one per line."""
    lines = []
    if benchmark.summaries and benchmark.temperature != PAPER_TEMPERATURE:
        lines.append(f"temperature {benchmark.temperature:g}; the paper's is {PAPER_TEMPERATURE:g}")
    for env, summary in benchmark.summaries.items():
        lost, rounds = summary["lost"], summary["max_rounds"][-1]
        if lost["trajectories"]:
            count = f"{lost['trajectories']} of {lost['of']}"
            lines.append(f"{env}: {count} episodes were lost to infrastructure and left out")
        for name in OPTIONAL_SETTINGS:
            if name in summary:
                lines.append(f"{env}: {name.replace('_', ' ')} {summary[name]}; not in the paper")
        if env not in PAPER:
            continue
        counts = {
            name: (_num_tasks(row), PAPER[env].row(name)[0]) for name, row in _rows(env, summary)
        }
        others = [f"{name}: {n}, not {paper}" for name, (n, paper) in counts.items() if n != paper]
        if others:
            lines.append(f"{env}: number of tasks differs from the paper's ({'; '.join(others)})")
        if rounds != PAPER[env].max_rounds:
            lines.append(f"{env}: up to {rounds} turns; {PAPER[env].max_rounds} in the paper")
    return lines


def to_json(benchmark: Benchmark) -> dict[str, Any]:
    """The content of benchmark.json: the table's numbers, not rounded, and the paper's."""
    content = asdict(benchmark) | {"differences": differences(benchmark)}
    for env, summary in benchmark.families.items():
        keys = ("max_rounds", "overall", "subtasks", "lost")
        content["families"][env] = (
            {"not_measured": summary}
            if isinstance(summary, str)
            else {key: summary[key] for key in keys}
        ) | {"paper": asdict(PAPER[env]) if env in PAPER else None}
    return content


def format_markdown(benchmark: Benchmark) -> str:
    """The table in Markdown, aligned for reading in a terminal."""
    b = benchmark
    rows = [[cell.replace("|", "/") for cell in row] for row in _table(b)]
    widths = [
        max(3, *(len(row[i]) for row in rows if i != 1 or not row[1].startswith(REASON)))
        for i in range(len(rows[0]))
    ]
    rows.insert(1, ["---", "---", *("-" * (w - 1) + ":" for w in widths[2:])])
    table = [
        [cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))]
        for row in rows
    ]
    samples = f"{b.samples} sample{'s' * (b.samples > 1)} per task"
    title = f"# {b.model}: {samples}, temperature {b.temperature:g}, seed {b.seed}"
    lines = [f"| {' | '.join(cells)} |" for cells in table]
    notes = [line for note in _notes(b) for line in ("", note)]
    return "\n".join([title, "", *lines, *notes]) + "\n"


def _table(benchmark: Benchmark) -> list[list[str]]:
    """The cells: a header row, then for each environment its sub-tasks and "all"."""
    k = benchmark.samples
    scores = {"avg": f"avg@{k} % [95 %]"} | ({"pass": f"pass@{k} % [95 %]"} if k > 1 else {})
    rows = [["environment", "sub-task", "tasks", *scores.values(), "paper's tasks", *MODELS]]
    for env, summary in benchmark.families.items():
        if isinstance(summary, str):
            reason = " ".join(summary.split())
            if len(reason) > 200:  # keep both ends: a traceback ends with the error
                reason = f"{reason[:100]} ... {reason[-100:]}"
            rows.append(
                [env, REASON + reason, *[""] * (1 + len(scores)), *_paper_cells(env, "all")]
            )
            continue
        for name, row in _rows(env, summary):
            is_other_count = env in PAPER and _num_tasks(row) != PAPER[env].row(name)[0]
            items = f"{_num_tasks(row)} !" if is_other_count else str(_num_tasks(row))
            cells = [percent(row[key]) if row else "-" for key in scores]
            rows.append([env, name, items, *cells, *_paper_cells(env, name)])
    return rows


def _notes(benchmark: Benchmark) -> list[str]:
    turns = [f"{env} {summary['max_rounds'][-1]}" for env, summary in benchmark.summaries.items()]
    notes = [f"{env}: {PAPER[env].ours}" for env in benchmark.families if env in PAPER]
    return [
        *(f"! not comparable: {line}" for line in differences(benchmark)),
        *([f"Maximum number of turns per episode: {', '.join(turns)}."] if turns else []),
        "The paper's numbers: success in %, one sample per task at temperature 1 (arXiv "
        "2509.08755); the number of tasks per sub-task is inferred from its percentages.",
        *([f"Differences of our environments: {'; '.join(notes)}."] if notes else []),
    ]


def _rows(env: str, summary: Summary) -> list[tuple[str, Summary | None]]:
    """(name, row): the paper's sub-tasks in its order, then other sub-tasks, then "all"."""
    subtasks = summary["subtasks"]
    paper_subtasks = PAPER[env].subtasks if env in PAPER else {}
    names = dict.fromkeys([*paper_subtasks, *subtasks])
    return [*((name, subtasks.get(name)) for name in names), ("all", summary["overall"])]


def _num_tasks(row: Summary | None) -> int:
    return row["items"] if row else 0


def _paper_cells(env: str, name: str) -> list[str]:
    """The cells on the right: the paper's number of tasks, and its success per model."""
    if env not in PAPER:
        return [""] * (1 + len(MODELS))
    items, success = PAPER[env].row(name)
    return [str(items), *("" if number is None else f"{number:.1f}" for number in success)]
