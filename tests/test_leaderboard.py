"""The benchmark's table: the paper's numbers add up, and what is not comparable says so."""

import importlib.util
import json

import pytest
from test_scoring import episode_of

from envs import ENVS, ids_dir, load_tasks
from reporting.leaderboard import MODELS, PAPER, Benchmark, differences, format_markdown, to_json
from reporting.scoring import summarize

# ------------------------------------------------------------------ the paper's numbers


@pytest.mark.parametrize("paper", PAPER.values(), ids=PAPER)
def test_the_subtasks_of_a_family_add_up_to_it(paper):
    counts = [items for items, _ in paper.subtasks.values()]
    assert sum(counts) == paper.items
    mean = sum(items * success for items, success in paper.subtasks.values()) / paper.items
    assert mean == pytest.approx(paper.success[MODELS.index("SI-7B")], abs=0.05 + 0.05)


@pytest.mark.parametrize(
    ("items", "success"),
    [
        pytest.param(items, success, id=f"{env} {name} {success}")
        for env, paper in PAPER.items()
        for name, items, success in [
            *((model, paper.items, x) for model, x in zip(MODELS, paper.success, strict=True)),
            *((name, *row) for name, row in paper.subtasks.items()),
        ]
        if (env, name) != ("webarena", "base 7B")  # printed as 9.8, which no count of 50 gives
    ],
)
def test_every_percentage_is_a_whole_number_of_tasks(items, success):
    """One sample per task: a slip in a digit or in a count of tasks shows."""
    solved = items * success / 100
    assert abs(solved - round(solved)) <= items * 0.05 / 100 + 1e-9


def has_test_split(env):
    module = importlib.util.find_spec(ENVS[env].partition(":")[0])
    return module is not None and (ids_dir(env) / f"{env}_test.json").exists()


@pytest.mark.parametrize("env", [env for env in ENVS if env in PAPER and has_test_split(env)])
def test_our_test_split_has_the_papers_subtasks_with_as_many_tasks(env):
    split = {"searchqa": "wiki_test"}.get(env, "test")  # our own questions are other ones
    counts = {}
    for task in load_tasks(env, split):
        counts[task.subtask] = counts.get(task.subtask, 0) + 1
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


def test_a_small_table_is_markdown_whose_columns_are_aligned():
    table = benchmark(babyai="boom | no\nJava", letters=played({"odd": 4}))
    lines = format_markdown(table).splitlines()
    assert lines[:2] == ["# tiny: 1 per task, temperature 1, seed 0", ""]
    assert [" ".join(line.split()) for line in lines[2:7] if "---" not in line] == [
        "| family | sub-task | items | avg@1 % [95 %] | paper's items "
        "| base 3B | base 7B | AG-3B | AG-7B | SI-7B |",
        "| babyai | not measured: boom / no Java | | | 90 | 52.2 | 66.7 | 93.3 | 92.2 | 96.7 |",
        "| letters | odd | 4 | 50.0 [0.0, 100.0] | | | | | | |",
        "| letters | all | 4 | 50.0 [0.0, 100.0] | | | | | | |",
    ]
    assert len({len(line) for line in lines[2:7] if "not measured" not in line}) == 1


def test_other_tasks_are_marked_in_their_rows_and_said_below():
    table = benchmark(textcraft=played({"depth 1": 31, "depth 2": 2, "depth 5": 1}))
    rows = rows_of(format_markdown(table))
    items = {name: row["items"] for (_, name), row in rows.items()}
    assert items == {
        "depth 1": "31", "depth 2": "2 !", "depth 3": "0 !", "depth 4": "0 !",
        "depth 5": "1 !", "all": "34 !",
    }  # fmt: skip
    assert rows["textcraft", "depth 3"]["avg@1 % [95 %]"] == "-"
    assert differences(table) == [
        "textcraft: other tasks than the paper's test (depth 2 2 of 41, depth 3 0 of 25, "
        "depth 4 0 of 3, depth 5 1 of 0, all 34 of 100)"
    ]
    assert f"! not comparable: {differences(table)[0]}" in format_markdown(table)


def test_another_horizon_or_temperature_and_lost_episodes_are_said():
    counts = {name: items for name, (items, _) in PAPER["babyai"].subtasks.items()}
    short = played(counts, max_rounds=(5, 10), samples=2, lost=1)
    table = benchmark(babyai=short, temperature=0.5, samples=2)
    assert differences(table) == [
        "temperature 0.5, the paper's is 1",
        "babyai: 1 of 180 episodes were lost to infrastructure, they are in no number",
        "babyai: up to 10 turns, the paper's 20",
    ]
    assert "pass@2 % [95 %]" in rows_of(format_markdown(table))["babyai", "all"]


def test_json_holds_the_numbers_unrounded_and_the_papers():
    content = to_json(benchmark(textcraft=whole("textcraft"), mars="no Java"))
    content = json.loads(json.dumps(content, allow_nan=False))
    textcraft = content["families"]["textcraft"]
    assert textcraft["subtasks"]["depth 1"]["avg"]["value"] == 16 / 31
    assert textcraft["paper"]["subtasks"]["depth 2"] == [41, 97.6]
    assert content["families"]["mars"] == {"not_measured": "no Java", "paper": None}
    assert content["differences"] == [] and content["model"] == "tiny"
