"""The benchmark's table: the paper's numbers add up, and what is not comparable says so."""

from collections import Counter

import pytest
from test_scoring import episode_of

from envs import load_tasks
from reporting.leaderboard import MODELS, PAPER, Benchmark, differences, format_markdown, to_json
from reporting.scoring import summarize

# ------------------------------------------------------------------ the paper's numbers


def test_the_subtasks_add_up_and_every_percentage_is_a_whole_number_of_tasks():
    """One sample per task: a slip in a digit or in a count of tasks shows."""
    for env, paper in PAPER.items():
        assert sum(items for items, _ in paper.subtasks.values()) == paper.items
        family = [(paper.items, success) for success in paper.success]
        for items, success in [*family, *paper.subtasks.values()]:
            solved = items * success / 100
            is_whole = abs(solved - round(solved)) <= items * 0.05 / 100 + 1e-9
            # Printed as 9.8, which no count of 50 gives.
            assert is_whole or (env, success) == ("webarena", 9.8), (env, success)


@pytest.mark.parametrize("env", ["textcraft", "babyai"])
def test_our_test_split_has_the_papers_subtasks_with_as_many_tasks(env):
    counts = Counter(task.subtask for task in load_tasks(env, "test"))
    assert counts == {name: items for name, (items, _) in PAPER[env].subtasks.items()}


# ---------------------------------------------------------------------------- the table


def played(counts, solved=lambda i: i % 2 == 0, samples=1, max_rounds=(30,), lost=0):
    """A summary: `counts` {sub-task: tasks}, every task played `samples` times."""
    episodes = [
        episode_of(f"{name}_{i}", 2, solved(i), subtask=name)
        for name, count in counts.items()
        for i in range(count)
        for _ in range(samples)
    ]
    for episode in episodes[:lost]:
        episode.stop_reason = "env_error"
    return summarize(episodes, samples, max_rounds)


def whole(env):
    """The summary of a family played as the paper plays it."""
    paper = PAPER[env]
    counts = {name: items for name, (items, _) in paper.subtasks.items()}
    return played(counts, max_rounds=(paper.max_rounds,))


def benchmark(samples=1, temperature=1.0, **families):
    return Benchmark("tiny", samples, temperature, 0, families)


def rows_of(markdown):
    """{(family, sub-task): {column: cell}}"""
    lines = [line for line in markdown.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    head, _, *rows = cells
    assert {len(row) for row in rows} == {len(head)}
    return {(row[0], row[1]): dict(zip(head, row)) for row in rows}


@pytest.mark.parametrize("env", PAPER)
def test_an_environment_played_as_the_paper_does_stands_beside_it_without_a_mark(env):
    table = benchmark(**{env: whole(env)})
    assert differences(table) == [] and "!" not in format_markdown(table)
    rows = rows_of(format_markdown(table))
    assert [name for _, name in rows] == [*PAPER[env].subtasks, "all"]
    printed = [rows[env, "all"][model] for model in MODELS]
    assert printed == [f"{success:.1f}" for success in PAPER[env].success]


def test_other_tasks_horizon_temperature_and_lost_episodes_are_marked_and_said():
    craft = played({"depth 1": 31, "depth 2": 2, "depth 5": 1}, samples=2)
    counts = {name: items for name, (items, _) in PAPER["babyai"].subtasks.items()}
    short = played(counts, max_rounds=(5, 10), samples=2, lost=1)
    table = benchmark(textcraft=craft, babyai=short, mars="no | Java", temperature=0.5, samples=2)
    rows = rows_of(format_markdown(table))
    items = {name: row["items"] for (env, name), row in rows.items() if env == "textcraft"}
    assert items == {
        "depth 1": "31", "depth 2": "2 !", "depth 3": "0 !", "depth 4": "0 !",
        "depth 5": "1 !", "all": "34 !",
    }  # fmt: skip
    assert rows["textcraft", "depth 3"]["avg@2 % [95 %]"] == "-"
    assert "pass@2 % [95 %]" in rows["babyai", "all"]
    assert ("mars", "not measured: no / Java") in rows
    assert differences(table) == [
        "temperature 0.5, the paper's is 1",
        "textcraft: other tasks than the paper's test (depth 2 2 of 41, depth 3 0 of 25, "
        "depth 4 0 of 3, depth 5 1 of 0, all 34 of 100)",
        "babyai: 1 of 180 episodes were lost to infrastructure and left out",
        "babyai: up to 10 turns, in the paper 20",
    ]
    assert all(f"! not comparable: {line}" in format_markdown(table) for line in differences(table))
    content = to_json(table)["families"]
    assert content["textcraft"]["paper"]["subtasks"]["depth 2"] == (41, 97.6)
    assert content["mars"] == {"not_measured": "no | Java", "paper": None}
