"""data.py: conversations become the tokens that sampling would have made; an oracle shows them."""

from pathlib import Path

import pytest
from fakes import FakePool, ScriptedEngine
from toy_env import NAME, Letters, registered, serve

import data
from chat import ChatTemplate
from data import (
    OracleStyle,
    candidates,
    demonstrations,
    encode,
    play_demonstrations,
    to_agenttraj,
)
from envclient import StepResult
from envs import OracleLost, load_tasks
from envs.common import action_line
from envs.textcraft.env import TextCraft
from formats import record_of
from models import load_tokenizer
from rollout import RolloutRequest, RolloutSettings, collect
from scale.default_models import resolve_model
from trajectory import RolloutHandler

PROMPT = [{"role": "system", "content": "You are to craft."}]


@pytest.fixture(scope="module")
def chat():
    return ChatTemplate(load_tokenizer(resolve_model("tiny")))


@pytest.fixture(autouse=True)
def own_cache(request, monkeypatch, tmp_path):
    if "chat" not in request.fixturenames:
        monkeypatch.setenv("AGENT_RL_CACHE", str(tmp_path / "cache"))


def said(number):
    """Messages of an episode of two turns."""
    texts = (f"Goal {number}.", "Action: look", "You see a log.", "Action: get 1 oak log")
    roles = ("user", "assistant") * 2
    return PROMPT + [{"role": r, "content": t} for r, t in zip(roles, texts, strict=True)]


# --- Tokens (traps 6 and 8) ----------------------------------------------------------------------


def sampled(chat, number, reward, stop="success"):
    """A trajectory whose actions were sampled letter by letter: no tokenizer encodes them so."""
    handler = RolloutHandler(f"{number}", 1, "textcraft", f"textcraft_{number}", "", 0, 0, 2)
    _, opening, *turns = said(number)
    handler.start(chat, PROMPT, opening["content"])
    for turn in turns:
        if turn["role"] == "user":
            handler.add_observation(chat, turn["content"])
            continue
        ids = [i for letter in turn["content"] for i in chat.plain(letter)] + [chat.end_of_turn]
        handler.add_action(chat, ids, [-0.1] * len(ids))
    handler.turns[-1].reward = reward
    handler.stop(stop)
    return handler


@pytest.mark.parametrize(
    ("ids", "is_exact"), [("Action: look", True), ("Other", False), ([10**9], False), ([], False)]
)
def test_ids_are_taken_where_this_tokenizer_reads_them_as_the_text(chat, ids, is_exact):
    ids = chat.action(ids) if isinstance(ids, str) else ids
    turn = {"from": "gpt", "loss": True, "value": "Action: look", "ids": ids}
    record = {"item_id": "x", "conversations": [{"from": "human", "value": "Goal."}, turn]}
    example = encode(chat, record)
    assert example.is_reencoded == (ids != [] and not is_exact)


def test_an_action_that_a_limit_cut_does_not_teach_to_stop_there(chat):
    handler = RolloutHandler("1", 1, "textcraft", "textcraft_1", "", 0, 0, 2)
    handler.start(chat, PROMPT, "Goal.")
    ids = chat.action("Action: get 1")[:-1]
    handler.add_action(chat, ids, [-0.1] * len(ids))
    handler.stop("max_rounds")
    again = encode(chat, record_of(handler)).trajectory
    assert (again.input_ids, again.loss_mask) == (handler.input_ids, handler.loss_mask)
    assert again.loss_mask[-1] == 0


@pytest.fixture(scope="module")
def shown():
    return play_demonstrations("textcraft", load_tasks("textcraft", "train"), 8, 0)


def actions_of(record):
    return [turn["value"] for turn in record["conversations"] if turn["from"] == "gpt"]


def test_a_demonstration_is_encoded_exactly_as_the_same_episode_is_when_sampled(chat, shown):
    record = max(shown, key=lambda r: len(actions_of(r)))
    task = next(t for t in load_tasks("textcraft", "train") if t.task_id == record["item_id"])
    world, script = TextCraft(), iter(actions_of(record))

    def play(task_index, turn, text):
        return StepResult(*world.step(world.parse(text)))

    class Pool(FakePool):
        env = "textcraft"

        def client(self, avoid=()):
            client = super().client(avoid)
            client.prompt = TextCraft.PROMPT
            return client

    pool = Pool(play, on_reset=lambda index: world.reset(index, seed=0))
    engine = ScriptedEngine(lambda name, prompt: chat.action(next(script)))
    request = RolloutRequest(task, group_id=0, sample=0, seed=0, step=1, max_rounds=50)
    settings = RolloutSettings(max_tokens_per_turn=200, max_trajectory_tokens=4000)
    (sampled,) = collect(engine, pool, chat, [request], settings)
    handler = encode(chat, record).trajectory
    assert sampled.success and len(handler.turns) > 3
    assert handler.input_ids == sampled.input_ids
    assert handler.loss_mask == sampled.loss_mask
    assert handler.messages == sampled.messages
    assert to_agenttraj(handler.task_id, handler.messages) == record


def test_agentgyms_opening_by_human_and_gpt_and_a_turn_without_loss_are_not_learned(chat):
    said = [
        ("human", None, "You are to craft."),
        ("gpt", False, "OK."),
        ("human", None, "Goal: craft stick."),
        ("gpt", True, "Action: get 1 stick"),
        ("human", None, "Got 1 stick"),
        ("gpt", False, "Action: wait"),
        ("human", None, "Nothing happens"),
    ]
    turns = [dict(zip(("from", "loss", "value"), turn, strict=True)) for turn in said]
    example = encode(chat, {"item_id": "x", "conversations": turns})
    handler = example.trajectory
    assert [m["role"] for m in handler.messages] == ["user", "assistant"] * 3
    assert [t.action_text for t in handler.turns] == ["Action: get 1 stick", "Action: wait"]
    start, end = handler.turns[0].action_span
    assert sum(handler.loss_mask) == sum(handler.loss_mask[start:end]) == end - start
    opening, turns = example.parts
    assert [who for who, _ in opening] == ["human", "gpt", "human"]
    assert turns == tuple((who, text) for who, _, text in said[3:6])


# --- Oracles --------------------------------------------------------------------------------------


class Told(Letters):
    """Letters that are told by an action line, as an oracle's are."""

    parse = staticmethod(action_line)


def test_demonstrations_are_kept_for_the_same_tasks_count_seed_and_source(monkeypatch):
    played = []
    shown = [{"item_id": "x"}]
    monkeypatch.setattr(data, "play_demonstrations", lambda *given: played.append(given) or shown)
    with registered():
        tasks = load_tasks(NAME)
        first = (tasks, 5, 0)
        for given in (first, first, (tasks[1:], 5, 0), (tasks, 6, 0), (tasks, 5, 1)):
            demonstrations(NAME, *given)
        assert len(played) == 4
        monkeypatch.setattr(data, "source_of", lambda env: "changed")
        demonstrations(NAME, tasks, 5, 0)
    assert len(played) == 5


def test_the_source_of_an_environment_is_all_its_files(monkeypatch):
    """Demonstrations of questions that were written anew are other ones."""
    hashes = {data.source_of("searchqa"), data.source_of("searchqa"), data.source_of("textcraft")}
    read_bytes, lines = Path.read_bytes, "questions.jsonl"
    monkeypatch.setattr(Path, "read_bytes", lambda p: b"" if p.name == lines else read_bytes(p))
    assert len(hashes | {data.source_of("searchqa")}) == 3


class Unlucky(Told):
    """The oracle fails or knows no move at every task with an even number."""

    def oracle(self):
        if self.task_index % 4 == 0:
            raise OracleLost("no move is known")
        return "", "abc" if self.task_index % 2 else "xyz"


class Shaky(Told):
    """Fails once."""

    left = [1]

    def oracle(self):
        if self.left:
            raise RuntimeError(f"no more memory {self.left.pop()}")
        return super().oracle()


def test_an_environment_that_fails_once_does_not_end_the_warm_start():
    with serve(Shaky) as url:
        assert len(play_demonstrations(NAME, load_tasks(NAME), 8, 0, [url])) == 8
    assert not Shaky.left


def test_failures_are_left_out_and_made_up_for_and_an_oracle_that_always_fails_ends():
    with serve(Told) as url:  # eight tasks, and the seed changes nothing: none is shown twice
        assert len(play_demonstrations(NAME, load_tasks(NAME), 12, 0, [url])) == 8
    with serve(Unlucky) as url:
        found = play_demonstrations(NAME, load_tasks(NAME), 4, 0, [url])
        assert [int(record["item_id"][-1]) % 2 for record in found] == [1] * 4
        with pytest.raises(ValueError, match="solved none of 12"):
            demonstrations(NAME, load_tasks(NAME, subtasks=["even"]), 3, 0, [url])


def test_sub_tasks_take_turns_and_a_task_comes_again_with_the_next_seed():
    with registered():
        pairs = list(candidates(load_tasks(NAME), count=4, seed=7))
    assert [task.subtask for task, _ in pairs] == ["even", "odd"] * 8
    assert len({(task.task_index, seed) for task, seed in pairs}) == 16
    assert [seed for _, seed in pairs] == [7] * 8 + [8] * 8


# --- Wrong moves that are shown and not imitated --------------------------------------------------


def test_slips_are_right_later_or_were_right_before_and_are_not_imitated():
    tasks = load_tasks("textcraft", "short_train")
    clean = play_demonstrations("textcraft", tasks, 24, 0)
    slipped = demonstrations("textcraft", tasks, 24, 0, style=OracleStyle(slips=0.4))
    assert demonstrations("textcraft", tasks, 24, 0) == clean, "kept apart"
    assert [record["item_id"] for record in slipped] == [record["item_id"] for record in clean]
    assert all(turn["loss"] is not False for record in clean for turn in record["conversations"])
    wrong = failed = 0
    for record, model in zip(slipped, clean, strict=True):
        turns = record["conversations"]
        for turn, answer in zip(turns, [*turns[1:], {"value": ""}]):
            if turn["from"] == "gpt" and not turn["loss"]:
                wrong += 1
                failed += answer["value"].startswith("Could not")
                assert turn["value"] in actions_of(model)
    assert wrong > 20 and failed > 0.3 * wrong, (wrong, failed)
