"""Demonstrations: played once over HTTP, kept, and asked of the servers that were named."""

from pathlib import Path

import pytest
from toy_env import NAME, Letters, registered, serve

import demonstrations as module
from conversations import read_conversations
from demonstrations import Manner, candidates, demonstrations, play_demonstrations
from envclient import EnvError, NotSupported, StepOutsideEpisode, connect
from envs import OracleLost, load_tasks
from envs.common import action_line


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setenv("AGENT_RL_CACHE", str(tmp_path / "cache"))


class Told(Letters):
    """Letters that are told by an action line, as an oracle's are."""

    parse = staticmethod(action_line)


def letters(count, urls, seed=0):
    return demonstrations(NAME, load_tasks(NAME), count, seed, urls)


def test_an_oracle_is_asked_once_and_its_demonstrations_are_kept(tmp_path):
    with serve(Told) as url:
        first = letters(5, [url])
    with registered(Told):  # no server is left: what comes now comes from the disk
        assert letters(5, [url]) == first
    assert len(first) == 5
    (file,) = (tmp_path / "cache/demonstrations").rglob("agenttraj.json")
    assert list(read_conversations([file])) == first
    texts = [turn["value"] for turn in first[0]["conversations"] if turn["from"] == "gpt"]
    assert texts == ["Thought: a is in the first half.\nAction: abc"] * Letters.NUM_TURNS


def test_other_tasks_counts_seeds_or_another_source_of_the_world_are_played_anew(monkeypatch):
    turns = [{"from": who, "loss": who == "gpt", "value": "a"} for who in ("human", "gpt")]
    shown = {"item_id": "letters_0", "conversations": turns}
    played = []
    monkeypatch.setattr(
        module,
        "play_demonstrations",
        lambda *arguments: played.append(arguments) or [shown],
    )
    with registered():
        tasks = load_tasks(NAME)
        for arguments in ((tasks, 5, 0), (tasks, 5, 0), (tasks[1:], 5, 0), (tasks, 6, 0)):
            demonstrations(NAME, *arguments)
        demonstrations(NAME, tasks, 5, 1)
        assert len(played) == 4
        monkeypatch.setattr(module, "source_of", lambda env: "changed")
        demonstrations(NAME, tasks, 5, 0)
    assert len(played) == 5


def test_questions_of_a_world_are_part_of_its_source(monkeypatch):
    """Demonstrations of questions that were written anew are other ones."""
    before, read = module.source_of("searchqa"), Path.read_bytes
    lines = "questions.jsonl"
    monkeypatch.setattr(Path, "read_bytes", lambda p: b"" if p.name == lines else read(p))
    assert module.source_of("searchqa") != before


def test_the_source_of_a_world_is_all_its_files():
    hashes = {module.source_of("textcraft"), module.source_of("textcraft")}
    with registered():
        hashes.add(module.source_of(NAME))
    assert len(hashes) == 2


class Unlucky(Told):
    """The oracle fails at every task with an even number."""

    def oracle(self):
        return "", "abc" if self.task_index % 2 else "xyz"


def test_failures_are_left_out_and_made_up_for_and_a_world_that_always_fails_ends():
    with serve(Unlucky) as url:
        found = play_demonstrations(NAME, load_tasks(NAME), 4, 0, [url])
        assert len(found) == 4
        assert all(int(record["item_id"].rpartition("_")[2]) % 2 for record in found)
        with pytest.raises(ValueError, match="solved none of 12"):
            demonstrations(NAME, load_tasks(NAME, subtasks=["even"]), 3, 0, [url])


class Five(Told):
    """Twenty tasks in five sub-tasks."""

    num_tasks = staticmethod(lambda: 20)
    subtask = staticmethod(lambda task_index: "abcde"[task_index % 5])


def test_no_sub_task_is_left_out_however_many_there_are():
    with serve(Five) as url:
        found = play_demonstrations(NAME, load_tasks(NAME), 20, 0, [url])
    assert sorted(int(record["item_id"].rpartition("_")[2]) for record in found) == [*range(20)]


def test_the_same_episode_is_not_shown_twice():
    with serve(Told) as url:  # eight tasks, and the seed changes nothing
        found = play_demonstrations(NAME, load_tasks(NAME), 12, 0, [url])
    assert len(found) == 8


class Lost(Told):
    """The oracle knows no move in odd tasks."""

    def oracle(self):
        if self.task_index % 2:
            raise OracleLost("no move is known")
        return super().oracle()


def test_an_oracle_that_is_lost_costs_its_task_and_nothing_else():
    with serve(Lost) as url:
        found = play_demonstrations(NAME, load_tasks(NAME), 4, 0, [url])
        assert [int(record["item_id"].rpartition("_")[2]) % 2 for record in found] == [0] * 4
        client = connect(NAME, url)
        client.reset(1)
        with pytest.raises(StepOutsideEpisode, match="the oracle has no answer: no move is known"):
            client.oracle()
        assert client.step("Action: abc").reward > 0  # the episode is as it was
        client.close()


def test_sub_tasks_take_turns_and_a_task_comes_again_with_the_next_seed():
    with registered():
        pairs = list(candidates(load_tasks(NAME), count=4, seed=7))
    assert len(pairs) == 16
    assert [task.subtask for task, _ in pairs] == ["even", "odd"] * 8
    assert len({(task.task_index, seed) for task, seed in pairs}) == 16
    assert [seed for _, seed in pairs] == [7] * 8 + [8] * 8


def test_a_server_without_an_oracle_is_named_and_nothing_is_kept(tmp_path):
    async def no_oracle(request, call_next):
        if request.url.path == "/oracle":
            from starlette.responses import JSONResponse

            return JSONResponse({"detail": "Not Found"}, 404)
        answer = await call_next(request)
        del answer.headers["Answer-Seal"]  # nor have AgentGym's servers a seal
        return answer

    with serve(Told, middleware=no_oracle) as url, pytest.raises(NotSupported, match="/oracle"):
        letters(2, [url])
    with registered(), pytest.raises(EnvError):
        letters(2, ["http://127.0.0.1:9"])
    assert [p for p in (tmp_path / "cache").rglob("*") if p.is_file()] == []


# --- Wrong moves that are shown and not imitated --------------------------------------------------


def test_slips_are_what_is_right_later_or_was_right_before_and_are_not_imitated():
    tasks = load_tasks("textcraft", "short_train")
    clean = play_demonstrations("textcraft", tasks, 24, 0)
    found = play_demonstrations("textcraft", tasks, 24, 0, manner=Manner(slips=0.4))
    assert [record["item_id"] for record in found] == [record["item_id"] for record in clean]
    assert all(turn["loss"] is not False for record in clean for turn in record["conversations"])
    wrong = failed = 0
    for record, shown in zip(found, clean, strict=True):
        right = [turn["value"] for turn in shown["conversations"] if turn["from"] == "gpt"]
        turns = record["conversations"]
        for place, turn in enumerate(turns):
            if turn["from"] == "gpt" and not turn["loss"]:
                wrong += 1
                assert turn["value"] in right
                answer = turns[place + 1]["value"] if place + 1 < len(turns) else ""
                failed += answer.startswith("Could not")
    assert wrong > 20 and failed > 0.3 * wrong, (wrong, failed)


def test_the_same_slips_every_time_and_their_demonstrations_are_kept_apart():
    tasks = load_tasks("textcraft", "short_train")[:6]
    first = demonstrations("textcraft", tasks, 6, 0, manner=Manner(slips=0.5))
    assert play_demonstrations("textcraft", tasks, 6, 0, manner=Manner(slips=0.5)) == first
    assert demonstrations("textcraft", tasks, 6, 0) != first


class Strict(Told):
    """One wrong letter ends the episode."""

    def oracle(self):
        return "", "abc" if self.turn == 0 else "def"

    def step(self, action):
        wanted = "abc" if self.turn == 0 else "def"
        observation, reward, ended, truncated, info = super().step(action)
        if action != wanted:
            self.turn, ended, info = self.NUM_TURNS, True, {"success": False, "score": 0.0}
        return observation, reward, ended, truncated, info


class Open(Told):
    """The last letters, at any time, solve it; the oracle spells out both."""

    NUM_TURNS = 2

    def oracle(self):
        return "", "abc" if self.turn == 0 else "def"

    def step(self, action):
        observation, reward, ended, truncated, info = super().step(action)
        if action == "def":
            self.turn, ended, info = self.NUM_TURNS, True, {"success": True, "score": 1.0}
        return observation, reward, ended, truncated, info


def test_a_slip_that_solves_the_task_is_no_demonstration(tmp_path):
    """Its only move would not be imitated: nothing to learn from, and the file unreadable."""
    with serve(Open) as url:
        for _ in range(2):  # played, and read back
            found = demonstrations(NAME, load_tasks(NAME), 5, 0, [url], manner=Manner(slips=0.6))
    said = [[t for t in record["conversations"] if t["from"] == "gpt"] for record in found]
    assert found and all(any(turn["loss"] for turn in turns) for turns in said)
    assert any(not turn["loss"] for turns in said for turn in turns), "some slip and go on"


def test_a_slip_that_loses_the_task_costs_the_demonstration_and_nothing_else():
    with serve(Strict) as url:
        found = play_demonstrations(NAME, load_tasks(NAME), 4, 0, [url], manner=Manner(slips=0.5))
    texts = [turn["value"] for record in found for turn in record["conversations"][2::2]]
    assert len(found) == 4 and {text[-3:] for text in texts} == {"abc", "def"}
    assert all(turn["loss"] is not False for record in found for turn in record["conversations"])
