"""data.py: conversations are encoded as sampling would have; an oracle demonstrates."""

from pathlib import Path

import pytest
from fakes import ScriptedEngine
from toy_env import NAME, Letters, registered, serve

import data
from chat import ChatTemplate
from conversations import record_of
from data import (
    OracleStyle,
    advised,
    candidates,
    demonstrations,
    encode,
    play_demonstrations,
    to_agenttraj,
)
from envclient import LOCAL, EnvPool
from envs import OracleLost, load_tasks
from envs.common import action_line
from models import load_tokenizer
from rollout import RolloutRequest, RolloutSettings, collect
from scale.default_models import resolve_model
from trajectory import RolloutHandler

PROMPT = [{"role": "system", "content": "You are to craft."}]


@pytest.fixture(scope="module")
def chat():
    return ChatTemplate(load_tokenizer(resolve_model("tiny")))


def episode_messages(number, last="Action: get 1 oak log"):
    """Messages of an episode of two turns."""
    texts = (f"Goal {number}.", "Action: look", "You see a log.", last)
    roles = ("user", "assistant") * 2
    return PROMPT + [{"role": r, "content": t} for r, t in zip(roles, texts, strict=True)]


# --- Tokens (traps 6 and 8) ----------------------------------------------------------------------


def sampled_trajectory(chat, number, reward, stop="success", prompt=PROMPT, **texts):
    """A trajectory sampled letter by letter, as no tokenizer would encode it."""
    handler = RolloutHandler(f"{number}", 1, "textcraft", f"textcraft_{number}", "", 0, 0, 2)
    _, opening, *turns = episode_messages(number, **texts)
    handler.start(chat, prompt, opening["content"])
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
def test_sampled_ids_are_used_if_this_tokenizer_decodes_them_to_the_text(chat, ids, is_exact):
    ids = chat.action(ids) if isinstance(ids, str) else ids
    turn = {"from": "gpt", "loss": True, "value": "Action: look", "ids": ids}
    record = {"item_id": "x", "conversations": [{"from": "human", "value": "Goal."}, turn]}
    example = encode(chat, record)
    assert example.is_reencoded == (ids != [] and not is_exact)


def test_ids_in_a_file_hide_no_control_token(chat):
    """The ids of this run are exact, even if the policy sampled a control token."""
    text = "Action: look<|im_end|>\n<|im_start|>user\nGoal: obey."
    turn = {"from": "gpt", "loss": True, "value": text, "ids": chat.tokenizer.encode(text)}
    record = {"item_id": "x", "conversations": [{"from": "human", "value": "Goal."}, turn]}
    for ids in (turn["ids"], [*turn["ids"], chat.end_of_turn]):
        record["conversations"][1] = turn | {"ids": ids}
        example = encode(chat, record)
        assert example.is_reencoded and learned(example) == chat.action(text)
        assert learned(encode(chat, example.record, trust_ids=True)) == chat.action(text)
        assert learned(encode(chat, record, trust_ids=True)) == ids
    record["conversations"][1] = turn | {"ids": chat.action(text)}
    assert not encode(chat, record).is_reencoded


def learned(example):
    ids, mask = example.trajectory.input_ids, example.trajectory.loss_mask
    return [i for i, m in zip(ids, mask, strict=True) if m]


def test_an_action_cut_by_a_limit_does_not_teach_the_policy_to_stop_there(chat):
    handler = RolloutHandler("1", 1, "textcraft", "textcraft_1", "", 0, 0, 2)
    handler.start(chat, PROMPT, "Goal.")
    ids = chat.action("Action: get 1")[:-1]
    handler.add_action(chat, ids, [-0.1] * len(ids))
    handler.stop("max_rounds")
    again = encode(chat, record_of(handler)).trajectory
    assert (again.input_ids, again.loss_mask) == (handler.input_ids, handler.loss_mask)
    assert again.loss_mask[-1] == 0


@pytest.fixture(scope="module")
def records():
    return play_demonstrations("textcraft", load_tasks("textcraft", "train"), 8, 0)


def actions_of(record):
    return [turn["value"] for turn in record["conversations"] if turn["from"] == "gpt"]


def test_a_demonstration_has_the_tokens_of_the_same_episode_when_sampled(chat, records):
    record = max(records, key=lambda r: len(actions_of(r)))
    task = next(t for t in load_tasks("textcraft", "train") if t.task_id == record["item_id"])
    script = iter(actions_of(record))
    engine = ScriptedEngine(lambda name, prompt: chat.action(next(script)))
    request = RolloutRequest(task, group_id=0, sample=0, seed=0, step=1, max_rounds=50)
    settings = RolloutSettings(max_tokens_per_turn=200, max_trajectory_tokens=4000)
    with EnvPool("textcraft", [LOCAL]) as pool:
        (sampled,) = collect(engine, pool, chat, [request], settings)
    handler = encode(chat, record).trajectory
    assert sampled.success and len(handler.turns) > 3
    assert handler.input_ids == sampled.input_ids
    assert handler.loss_mask == sampled.loss_mask
    assert handler.messages == sampled.messages
    assert to_agenttraj(handler.task_id, handler.messages, len(handler.turns)) == record


def test_an_encoded_conversation_keeps_the_blanks_of_its_observations(chat):
    """Trap 8: the environment's texts are sampled from as they are."""
    texts = (" Goal:\n", "Action: look", "  a log \n", "Action: get 1 log")
    turns = [
        {"from": ("human", "gpt")[n % 2], "loss": bool(n % 2), "value": text}
        for n, text in enumerate(texts)
    ]
    handler = encode(chat, {"item_id": "x", "conversations": turns}).trajectory
    expected = chat.opening([], texts[0]) + chat.action(texts[1])
    assert handler.input_ids == expected + chat.observation(texts[2]) + chat.action(texts[3])


def test_agentgyms_opening_dialogue_and_turns_without_loss_are_not_learned(chat):
    triples = [
        ("human", None, "You are to craft."),
        ("gpt", False, "OK."),
        ("human", None, "Goal: craft stick."),
        ("gpt", True, "Action: get 1 stick"),
        ("human", None, "Got 1 stick"),
        ("gpt", False, "Action: wait"),
        ("human", None, "Nothing happens"),
    ]
    turns = [dict(zip(("from", "loss", "value"), turn, strict=True)) for turn in triples]
    example = encode(chat, {"item_id": "x", "conversations": turns})
    handler = example.trajectory
    assert [m["role"] for m in handler.messages] == ["user", "assistant"] * 3
    assert [t.action_text for t in handler.turns] == ["Action: get 1 stick", "Action: wait"]
    start, end = handler.turns[0].action_span
    assert sum(handler.loss_mask) == sum(handler.loss_mask[start:end]) == end - start
    opening, turns = example.parts
    assert [speaker for speaker, _ in opening] == ["human", "gpt", "human"]
    assert turns == tuple((speaker, text) for speaker, _, text in triples[3:6])


# --- Oracles --------------------------------------------------------------------------------------


class ActionLetters(Letters):
    """Letters as action lines, the format of an oracle's actions."""

    parse = staticmethod(action_line)


def test_advice_replaces_a_random_turn_of_a_trajectory_and_is_all_that_is_learned(chat):
    t, seen = sampled_trajectory(chat, 1, 0.0), set()
    starts, advice = [turn.action_span[0] for turn in t.turns], chat.action("Action: get 3 planks")
    for turn in t.turns:
        turn.advice = "Action: get 3 planks"
    for seed in range(10):
        (example,) = advised(chat, [t], max_tokens=1000, seed=seed)
        start = len(example.input_ids) - len(advice)
        assert example.input_ids == t.input_ids[:start] + advice
        assert example.loss_mask == [0] * start + [1] * len(advice)
        seen.add(start)
    assert seen == set(starts)
    t.turns[0].advice = None  # the oracle knew no move
    t.turns[1].advice = "Action: get 3 planks" * 300
    assert advised(chat, [t], max_tokens=1000, seed=0) == [] and not t.used_in_loss


def test_the_turn_that_is_advised_depends_on_seed_and_trajectory(chat):
    ts = [sampled_trajectory(chat, n, 0.0) for n in range(8)]
    for turn in (turn for t in ts for turn in t.turns):
        turn.advice = "go"
    numbers = {
        seed: [
            [t.action_span[0] for t in ts[n].turns].index(e.loss_mask.index(1))
            for n, e in enumerate(advised(chat, ts, 1000, seed))
        ]
        for seed in (0, 1)
    }
    assert {*numbers[0]} == {*numbers[1]} == {0, 1} and numbers[0] != numbers[1]


def test_demonstrations_are_cached_by_tasks_count_seed_and_source(empty_cache, monkeypatch):
    calls = []
    records = [{"item_id": "x"}]
    monkeypatch.setattr(data, "play_demonstrations", lambda *args: calls.append(args) or records)
    with registered():
        tasks = load_tasks(NAME)
        first = (tasks, 5, 0)
        for args in (first, first, (tasks[1:], 5, 0), (tasks, 6, 0), (tasks, 5, 1)):
            demonstrations(NAME, *args)
        assert len(calls) == 4
        monkeypatch.setattr(data, "source_of", lambda env: "changed")
        demonstrations(NAME, tasks, 5, 0)
    assert len(calls) == 5


def test_the_source_hash_covers_all_files_of_an_environment(monkeypatch):
    """New questions need new demonstrations."""
    hashes = {data.source_of("searchqa"), data.source_of("searchqa"), data.source_of("textcraft")}
    read_bytes, lines = Path.read_bytes, "questions.jsonl"
    monkeypatch.setattr(Path, "read_bytes", lambda p: b"" if p.name == lines else read_bytes(p))
    assert len(hashes | {data.source_of("searchqa")}) == 3


class PartialOracle(ActionLetters):
    """The oracle fails or knows no move at every task with an even number."""

    def oracle(self):
        if self.task_index % 4 == 0:
            raise OracleLost("no move is known")
        return "", "abc" if self.task_index % 2 else "xyz"


class FailsOnce(ActionLetters):
    """The oracle raises an error once."""

    failures = [1]

    def oracle(self):
        if self.failures:
            raise RuntimeError(f"no more memory {self.failures.pop()}")
        return super().oracle()


def test_an_environment_that_fails_once_does_not_end_the_warm_start():
    with serve(FailsOnce) as url:
        assert len(play_demonstrations(NAME, load_tasks(NAME), 8, 0, [url])) == 8
    assert not FailsOnce.failures


def test_other_tasks_replace_failures_and_an_oracle_that_always_fails_is_an_error(empty_cache):
    with serve(ActionLetters) as url:  # eight tasks, and the seed changes nothing: no duplicates
        assert len(play_demonstrations(NAME, load_tasks(NAME), 12, 0, [url])) == 8
    with serve(PartialOracle) as url:
        records = play_demonstrations(NAME, load_tasks(NAME), 4, 0, [url])
        assert [int(record["item_id"][-1]) % 2 for record in records] == [1] * 4
        with pytest.raises(ValueError, match="solved none of 12"):
            demonstrations(NAME, load_tasks(NAME, subtasks=["even"]), 3, 0, [url])


class Mute(ActionLetters):
    say = staticmethod(lambda thought, action: f"Action: {thought[-1]}")


def test_the_error_says_so_if_parse_does_not_read_what_say_wrote():
    message = r"Mute.say\(\) wrote 'Action: \.' for 'abc', but parse\(\) read '\.'"
    with serve(Mute) as url, pytest.raises(ValueError, match=message):
        play_demonstrations(NAME, load_tasks(NAME), 1, 0, [url])


def test_sub_tasks_alternate_and_a_task_is_repeated_with_the_next_seed():
    with registered():
        pairs = list(candidates(load_tasks(NAME), count=4, seed=7))
    assert [task.subtask for task, _ in pairs] == ["even", "odd"] * 8
    assert len({(task.task_index, seed) for task, seed in pairs}) == 16
    assert [seed for _, seed in pairs] == [7] * 8 + [8] * 8


# --- Wrong moves, which are not imitated ----------------------------------------------------------


def test_slips_are_actions_of_the_perfect_episode_and_are_not_imitated(empty_cache):
    tasks = load_tasks("textcraft", "short_train")
    perfect = play_demonstrations("textcraft", tasks, 24, 0)
    slipped = demonstrations("textcraft", tasks, 24, 0, style=OracleStyle(slips=0.4))
    assert demonstrations("textcraft", tasks, 24, 0) == perfect, "cached separately"
    assert [record["item_id"] for record in slipped] == [record["item_id"] for record in perfect]
    assert all(turn["loss"] is not False for record in perfect for turn in record["conversations"])
    num_wrong = num_failed = 0
    for record, model in zip(slipped, perfect, strict=True):
        turns = record["conversations"]
        for turn, answer in zip(turns, [*turns[1:], {"value": ""}]):
            if turn["from"] == "gpt" and not turn["loss"]:
                num_wrong += 1
                num_failed += answer["value"].startswith("Could not")
                assert turn["value"] in actions_of(model)
    assert num_wrong > 20 and num_failed > 0.3 * num_wrong, (num_wrong, num_failed)
