"""get_env and load_tasks: environments in envs/ or anywhere on PYTHONPATH, and their id lists."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from toy_env import Letters, registered

import envs
from envclient import EnvError, connect, local_server
from envs import (
    NotResetError,
    ParseError,
    Task,
    TaskIndexError,
    call_static,
    env_name,
    get_env,
    load_tasks,
    settings_of,
)
from run.rundir import command_of

ROOT = Path(__file__).parent.parent
COIN = """
from envs.textcraft.env import TextCraft


class Coin(TextCraft):
    PROMPT = [{"role": "system", "content": "Say heads or tails."}]
    num_tasks = staticmethod(lambda: 4)
    subtask = staticmethod(lambda task_index: "coin")

    def reset(self, task_index, seed=0):
        return f"Coin {task_index} is thrown."

    def step(self, action):
        info = {"success": action == "heads", "score": float(action == "heads")}
        return "It is heads.", info["score"], True, False, info

    def oracle(self):
        return "It is always heads.", "heads"

    def state_for_people(self):
        return {}


World = Coin
"""

BAD = r"exec('class Bad(BaseException): __str__ = None\nraise Bad')"


@pytest.fixture
def coin_file(tmp_path, monkeypatch):
    """The file of the environment `far.coin:Coin`, in a new folder on PYTHONPATH."""
    (tmp_path / "far" / "ids").mkdir(parents=True)
    for split, indices in {"train": (0, 1, 2), "test": (3,)}.items():
        ids = [{"item_id": f"coin_{index}"} for index in indices]
        (tmp_path / "far" / "ids" / f"coin_{split}.json").write_text(json.dumps(ids))
    (tmp_path / "far" / "__init__.py").touch()
    (tmp_path / "far" / "coin.py").write_text(COIN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "far" / "coin.py"
    for name in ("far", "far.coin"):
        sys.modules.pop(name, None)


# ---- environments


def test_every_folder_is_an_environment_and_the_first_three_keep_their_order(tmp_path):
    first_names = [*envs.ENVS][:3]
    assert first_names == ["textcraft", "babyai", "sciworld"]
    assert [settings_of(env).horizon for env in first_names] == [30, 20, 30]
    for name in ("zoo", "sciworld", "textcraft", "maze"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").touch()
    (tmp_path / "ids").mkdir()
    (tmp_path / "server.py").touch()
    assert envs.envs_in(tmp_path) == {
        name: f"envs.{name}:World" for name in ("textcraft", "sciworld", "maze", "zoo")
    }


def test_an_environment_outside_the_repository_is_listed_served_and_played(coin_file):
    env = "far.coin:Coin"
    assert env_name(env) == "coin" == settings_of(env).id_prefixes[0]
    assert [task.task_id for task in load_tasks(env)] == [f"coin_{index}" for index in range(4)]
    assert [task.task_index for task in load_tasks(env, "train")] == [0, 1, 2]
    (task,) = load_tasks(env, file="test")
    assert task == Task("coin_3", 3, "coin", "coin")
    with local_server(env) as url, connect(env, url) as client:
        assert client.reset(task.task_index) == "Coin 3 is thrown."
        result = client.step(get_env(env).say(*client.oracle()))
        assert (result.reward, result.terminated) == (1.0, True)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "minecraft",
            "unknown environment 'minecraft'; choose one of: babyai, .*textcraft, webarena; or",
        ),
        ("nowhere.coin:Coin", "No module named 'nowhere'.*; is its folder on PYTHONPATH"),
        ("far.coin:Penny", "far.coin has no class Penny"),
        ("pathlib:Path", "the class lacks PROMPT, WIRE, .*oracle"),
    ],
)
def test_an_unknown_environment_is_a_one_line_error(coin_file, name, message):
    with pytest.raises(ValueError, match=message) as error:
        get_env(name)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("PROMPT = [", "WIRE, PROMPT = None, [", "WIRE that is not a Wire"),
        ('"role": "system"', '"role": "user"', "the roles are user; expected system"),
        ("staticmethod(lambda: 4)", "lambda self: 4", "__init__ or num_tasks, which take no"),
        ("staticmethod(lambda: 4)", "staticmethod(lambda: '4')", "returns '4' from num_tasks()"),
        ('lambda task_index: "coin"', "lambda task_index: task_index", "0 from subtask()"),
        ('lambda task_index: "coin"', "['coin'].__getitem__", "fails in subtask() (IndexError"),
        ('lambda task_index: "coin"', "(['coin'] * 3).__getitem__", "subtask() (IndexError"),
        ("Say heads", "\\ud800", "half of a surrogate pair"),
        (
            "World = Coin",
            f"Coin.parse = lambda _: {BAD}\nWorld = Coin",
            "(Bad: <exception str() fa",
        ),
        ("World = Coin", "World = Coin(", "cannot be imported (SyntaxError"),
        ("World = Coin", "raise SystemExit", "cannot be imported (SystemExit"),
        ("def oracle", "parse = staticmethod(str.split)\n\n    def oracle", "[] from parse()"),
        ("def oracle", "def say(self, *_):\n        pass\n\n    def oracle", "None from say()"),
        ("def oracle", "def variant(self):\n        pass\n\n    def oracle", "in variant() (TypeE"),
        ("def oracle", "def __init__(self, size):\n        pass\n\n    def oracle", "'size'"),
        ("def oracle", "HORIZON = 'ten'\n\n    def oracle", "HORIZON 'ten': Input should be a"),
        ("World = Coin", "Coin.TOOLS, World = [{}], Coin", "TOOLS that are not a list"),
        ("World = Coin", "Coin.TOOLS, World = Coin.TOOLS[0], Coin", "TOOLS that are not a list"),
        ("World = Coin", "Coin.RULES, World = None, Coin", "TOOLS but no RULES"),
        (
            "World = Coin",
            "from envs import Tool\nWorld = Coin\nCoin.TOOLS = [Tool('say', 'say {side}')]",
            "the tool say: 'say {side}' needs other arguments than none",
        ),
        (
            "World = Coin",
            "from envs.common import tool\nWorld = Coin\nCoin.TOOLS = [tool('say {n:.2f}')]",
            "the tool say: 'say {n:.2f}' may use only {x} and {x:d}",
        ),
    ],
)
def test_a_class_with_an_unusable_member_is_a_one_line_error(coin_file, old, new, message):
    assert old in COIN
    coin_file.write_text(COIN.replace(old, new))
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        settings_of("far.coin:Coin")
        load_tasks("far.coin:Coin", "train", subtasks=["coin"])
    assert str(error.value).startswith("environment far.coin:Coin: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("method", "old", "new", "message"),
    [
        ("state", "return {}", "return {'x': {1}}", "JSON cannot hold a set"),
        ("state", "return {}", "return []", "Coin.state_for_people() returns []; expected a dict"),
        ("oracle", '"It is always heads.", "heads"', '"ba"', "returns 'ba'; expected a thought"),
        ("step", 'return "It is heads."', "return 42", "42 (int) as observation"),
        ("step", 'return "It is heads."', '"It is heads."', "returns None; expected observation"),
        ("step", "info = {", "super().reset(999)\n        info = {", "step() raises TaskIndexErr"),
        (
            "step",
            "World = Coin",
            "Coin.open_shared = lambda: setattr(Coin, 'step', len)",
            "returns 5;",
        ),
        (
            "step",
            'return "It is heads."',
            "import numpy\n        return numpy.ones(2)",
            "(ndarray) as observation",
        ),
        (
            "step",
            'return "It is heads."',
            'return "é" * 200_000',
            "bytes as JSON; the limit is 1048576",
        ),
        ("step", 'info["score"], True', "float('nan'), True", "returns the reward nan; expected a"),
        ("step", 'info["score"], True', "10**5000, True", "step() returns what cannot be sent"),
        (
            "step",
            "def oracle",
            "parse = staticmethod(lambda t: None if 's' in t else t)\n\n    def oracle",
            "returns None from parse()",
        ),
        ("step", 'info["score"], True', "-0.1, True", "should return rewards that sum to 0..1"),
        ("step", 'action == "heads",', "1,", "1 as info['success']; expected a bool"),
        (
            "step",
            "info = {",
            "raise SystemExit(3)\n        info = {",
            "SystemExit: 3 at far.coin, li",
        ),
    ],
)
def test_an_invalid_result_is_a_failure_of_the_environment(coin_file, method, old, new, message):
    assert old in COIN
    coin_file.write_text(COIN.replace(old, new))
    with connect("far.coin:Coin", "local") as client:
        client.reset(0)
        with pytest.raises(EnvError, match=re.escape(message)):
            client.step("Action: heads") if method == "step" else getattr(client, method)()
        client.reset(0)
        if method != "step":  # the other methods do not change the episode
            assert client.step("Action: heads").terminated


def test_half_surrogate_pairs_in_the_texts_of_a_class_are_replaced():
    def parse(text):
        raise ParseError(text)

    with pytest.raises(ParseError, match="^�$"):
        call_static(SimpleNamespace(parse=parse), "parse", "\ud800")
    assert call_static(SimpleNamespace(say=str), "say", "\ud800") == "�"


def test_the_path_to_an_environment_may_be_relative(coin_file, monkeypatch):
    """The server of a run is another process, in another folder."""
    monkeypatch.chdir(coin_file.parent.parent.parent)
    monkeypatch.setenv("PYTHONPATH", coin_file.parent.parent.name)
    with local_server("far.coin:Coin") as url, connect("far.coin:Coin", url) as client:
        assert client.reset(0) == "Coin 0 is thrown."
    assert f"PYTHONPATH={coin_file.parent.parent} " in command_of("train.py")


# ---- id lists


class Search(Letters):
    ID_PREFIXES = ("nq", "2wiki_multi")


def test_an_environment_may_allow_other_prefixes_of_task_ids(tmp_path):
    path = tmp_path / "some.json"
    path.write_text('[{"item_id": "nq_5"}, {"item_id": "2wiki_multi_1"}]')
    with registered(Search, "search"):
        assert [task.task_index for task in load_tasks("search", file=path)] == [5, 1]
        path.write_text('[{"item_id": "search_5"}]')
        with pytest.raises(ValueError, match="expected 'nq_N' or '2wiki_multi_N' with N below 8"):
            load_tasks("search", file=path)


def test_load_tasks_keeps_the_order_and_filters_subtasks(tmp_path):
    path = tmp_path / "some.json"
    ids = [{"item_id": f"textcraft_{index}", "conversations": []} for index in (533, 3, 140)]
    path.write_text(json.dumps(ids))
    tasks = load_tasks("textcraft", file=path)
    assert tasks[0] == Task("textcraft_533", 533, "depth 4", "textcraft")
    assert [task.task_index for task in tasks] == [533, 3, 140]
    filtered = load_tasks("textcraft", file=path, subtasks=["depth 1", "depth 2"])
    assert [task.task_index for task in filtered] == [3, 140]
    assert len(load_tasks("textcraft")) == 544


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("[", "is not JSON"),
        ('[{"item_id": 3}]', 'is not an id list; expected .*"babyai_0"'),
        ('[{"item_id": "babyai_99999"}]', "'babyai_99999' is not a task of babyai"),
        ('[{"item_id": "babyai_1"}, {"item_id": "babyai_1"}]', "is listed twice"),
        ("[]", "it has no tasks"),
    ],
)
def test_a_bad_id_list_is_a_one_line_error_that_names_the_file(tmp_path, content, message):
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(ValueError, match=message) as error:
        load_tasks("babyai", file=path)
    assert str(path) in str(error.value) and "\n" not in str(error.value)


def test_misuse_of_load_tasks_names_the_choices():
    with pytest.raises(ValueError, match="choose from: family_test, family_train, short_test"):
        load_tasks("textcraft", "validation")
    with pytest.raises(ValueError, match="choose from: depth 1, depth 2, depth 3, depth 4"):
        load_tasks("textcraft", "test", subtasks=["depth 5"])
    with pytest.raises(ValueError, match="no such file; lists of textcraft: family_test"):
        load_tasks("textcraft", file="absent.json")


def test_the_lists_of_an_environment_can_be_named_in_any_folder(tmp_path, monkeypatch):
    expected = load_tasks("babyai", "train")
    monkeypatch.chdir(tmp_path)
    paths = ("ids/babyai_train.json", "/elsewhere/ids/babyai_train.json")
    for name in ("train", "babyai_train", "babyai_train.json", *paths):
        assert load_tasks("babyai", file=name) == expected
    (tmp_path / "train").write_text('[{"item_id": "babyai_5"}]')
    assert [task.task_index for task in load_tasks("babyai", file="train")] == [5]


@pytest.mark.parametrize("env", ["textcraft", "babyai"])
def test_a_bad_task_index_and_a_missing_reset_raise_their_errors(env):
    if settings_of(env).package:
        pytest.importorskip(settings_of(env).package)
    session = get_env(env)()
    for index in (-1, 10**30):  # a negative index must not count from the end
        with pytest.raises(TaskIndexError, match=f"{index} does not exist"):
            session.reset(index)
    for method in (session.oracle, session.available_actions, session.state_for_people):
        with pytest.raises(NotResetError):
            method()
