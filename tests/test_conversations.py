"""conversations.py: what others have collected, line by line, and what a run has sampled, exactly.
How a conversation is encoded: test_warmstart.py."""

import json
import tracemalloc

import pytest

import conversations
from chat import ChatTemplate
from conversations import from_agenttraj, has_exact_ids, read_conversations, to_agenttraj
from models import load_tokenizer
from scale.default_models import resolve_model
from trajectory import RolloutHandler

PROMPT = [{"role": "system", "content": "You are to craft."}]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(resolve_model("tiny"))


@pytest.fixture(scope="module")
def chat(tokenizer):
    return ChatTemplate(tokenizer)


def said(number, blanks=""):
    """Messages of an episode of two turns."""
    texts = (f"Goal {number}.{blanks}", "Action: look", "You see a log.", "Action: get 1 oak log")
    roles = ("user", "assistant") * 2
    return PROMPT + [{"role": r, "content": t} for r, t in zip(roles, texts, strict=True)]


RECORDS = [to_agenttraj(f"textcraft_{n}", said(n)) for n in range(7)]


def written(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def read(*paths, **options):
    return list(read_conversations(paths, **options))


FORMS = {
    "a list": json.dumps,
    "a list, indented": lambda records: json.dumps(records, indent=2),
    "a list between blanks": lambda records: f"\n\n {json.dumps(records)}\n ",
    "a line each": lambda records: "\n".join(json.dumps(r) for r in records),
    "a line each, and empty ones": lambda records: "\n\n".join(map(json.dumps, records)) + "\n\n",
    "with a byte-order mark": lambda records: "\ufeff" + json.dumps(records),
}


@pytest.mark.parametrize("chunk", [1, 7, 100, 1 << 20])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_a_file_holds_the_same_however_it_is_cut(tmp_path, monkeypatch, form, chunk):
    monkeypatch.setattr(conversations, "CHUNK", max(chunk, 4))
    assert read(written(tmp_path / "a.json", FORMS[form](RECORDS))) == RECORDS


def test_messages_are_learned_from_but_where_they_weigh_nothing(tmp_path):
    messages = said(3)
    messages[2]["weight"] = 0
    file = tmp_path / "a.jsonl"
    written(file, json.dumps({"messages": said(1)}) + "\n" + json.dumps({"messages": messages}))
    first, second = read(file)
    assert [t["loss"] for t in first["conversations"]] == [False, False, True, False, True]
    assert [t["loss"] for t in second["conversations"]] == [False, False, False, False, True]
    assert (first["item_id"], second["item_id"]) == ("a.jsonl:1", "a.jsonl:2")


def test_what_has_no_id_is_of_a_task_of_its_own(tmp_path):
    """Also where a list stands on one line, and where shards in two folders have one name."""
    shards = [tmp_path / name / "train.json" for name in ("a", "b")]
    for shard in shards:
        shard.parent.mkdir()
        shard.write_text(json.dumps([{"messages": said(1)}] * 2))
    assert [r["item_id"] for r in read(shards[0])] == ["train.json:1", "train.json:2"]
    both = [r["item_id"] for r in read_conversations(shards)]
    assert both == [f"{shard}:{place}" for shard in shards for place in (1, 2)]


def test_the_id_of_other_formats_and_the_seed_are_kept(tmp_path):
    turns = RECORDS[0]["conversations"]
    lines = [
        {"messages": said(1), "id": 7, "seed": 3, "return": 0.5},
        {"id": "x", "conversations": turns},
        {"id": "x", "item_id": None, "conversations": turns},
        {"id": "x", "item_id": "y", "conversations": turns},
    ]
    found = read(written(tmp_path / "a.jsonl", "\n".join(map(json.dumps, lines))))
    assert [record["item_id"] for record in found] == ["7", "x", "x", "y"]
    assert (found[0]["seed"], found[0]["return"]) == (3, 0.5)


@pytest.mark.parametrize(
    "damage", [{"messages": None}, {"messages": 5}, {"input_ids": 5}, {"turns": [5]}, {"turns": 5}]
)
def test_a_damaged_line_of_a_run_is_named(tmp_path, chat, damage):
    line = json.loads(sampled(chat, 1, 1.0).to_json()) | damage
    file = written(tmp_path / "a.jsonl", json.dumps(line))
    with pytest.raises(ValueError, match="line 1: no line of a run's trajectories"):
        read(file)


def sampled(chat, number, reward, stop="success", spelled=True):
    """A trajectory whose actions were sampled letter by letter: no tokenizer encodes them so."""
    handler = RolloutHandler(f"{number}", 1, "textcraft", f"textcraft_{number}", "", 0, 0, 2)
    _, opening, *turns = said(number)
    handler.start(chat, PROMPT, opening["content"])
    for turn in turns:
        if turn["role"] == "user":
            handler.add_observation(chat, turn["content"])
            continue
        ids = chat.action(turn["content"])
        if spelled:
            ids = [i for letter in turn["content"] for i in chat.plain(letter)] + ids[-1:]
        handler.add_action(chat, ids, [-0.1] * len(ids))
    handler.turns[-1].reward = reward
    handler.stop(stop)
    return handler


def run_of(path, *steps):
    for step, handlers in enumerate(steps, start=1):
        file = path / "trajectories" / f"step_{step:06d}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        written(file, "".join(each.to_json() for each in handlers))
    return path


def test_what_a_policy_sampled_comes_back_with_the_very_ids(tmp_path, chat):
    handler = sampled(chat, 1, 1.0)
    (record,) = read(run_of(tmp_path / "run", [handler]))
    assert record["item_id"] == "textcraft_1"
    again = from_agenttraj(chat, record)
    assert (again.input_ids, again.loss_mask) == (handler.input_ids, handler.loss_mask)
    assert again.messages == handler.messages
    for turn in record["conversations"]:
        turn.pop("ids", None)
    assert len(from_agenttraj(chat, record).input_ids) < len(handler.input_ids)


def test_what_a_run_earned_comes_with_it(tmp_path, chat):
    first, second = sampled(chat, 1, 1.0), sampled(chat, 2, 0.25, "failure")
    second.turns[0].reward = 0.5
    records = read(run_of(tmp_path / "run", [first, second]))
    assert [record["return"] for record in records] == [1.0, 0.75]
    assert [list(r) for r in records] == [["item_id", "conversations", "return", "seed"]] * 2
    # Written and read again it is the same, and can be chosen by what it earned.
    kept = written(tmp_path / "kept.json", json.dumps(records))
    assert read(kept) == records
    assert read(kept, min_return=1.0) == records[:1]


def test_a_run_whose_return_is_no_number_is_refused(tmp_path, chat):
    line = sampled(chat, 1, 0.125).to_json()
    for reward in ("NaN", "Infinity", "1" + "0" * 400, '"1"'):
        path = run_of(tmp_path / "run", [])
        written(path / "trajectories" / "step_000001.jsonl", line.replace("0.125", reward))
        with pytest.raises(ValueError, match="line 1: no line of a run's trajectories"):
            read(path)


def test_records_of_files_are_chosen_by_their_returns_where_they_have_one(tmp_path):
    lines = [
        RECORDS[0] | {"return": 1},
        RECORDS[1] | {"return": 0.25},
        {"messages": said(2), "return": 1 - 1e-12},
        {"messages": said(3), "item_id": "x", "return": -1.0},
    ]
    file = written(tmp_path / "a.jsonl", "\n".join(map(json.dumps, lines)))
    everything = read(file)
    assert everything[:2] == lines[:2]
    assert [record["return"] for record in everything] == [1, 0.25, 1 - 1e-12, -1.0]
    assert [r["item_id"] for r in read(file, min_return=1.0)] == ["textcraft_0", "a.jsonl:3"]
    written(file, "\n".join(map(json.dumps, [*lines, RECORDS[4]])))
    assert len(read(file)) == 5
    with pytest.raises(
        ValueError, match="line 5: --min-return asks for a return, which this lacks"
    ):
        read(file, min_return=0.0)


def test_what_agentgym_calls_reward_is_a_return(tmp_path):
    """Without it every expert counted as better, and a failure as a demonstration."""
    lines = [RECORDS[0] | {"reward": 0}, RECORDS[1] | {"reward": 0.5, "return": 1.0}]
    file = written(tmp_path / "a.jsonl", "\n".join(map(json.dumps, lines)))
    assert [conversations.return_of(record) for record in read(file)] == [0.0, 1.0]
    assert [r["item_id"] for r in read(file, min_return=0.5)] == [RECORDS[1]["item_id"]]


@pytest.mark.parametrize("form", [RECORDS[0], {"messages": said(1)}], ids=["AgentTraj", "messages"])
@pytest.mark.parametrize(
    "wrong", ['"1"', "null", "true", "NaN", "-Infinity", "1" + "0" * 400, "[1]"]
)
def test_a_return_that_is_no_finite_number_is_named(tmp_path, form, wrong):
    text = json.dumps(form)[:-1] + f', "return": {wrong}}}'
    file = written(tmp_path / "a.jsonl", f"{GOOD}\n{text}")
    with pytest.raises(ValueError, match='"return" is .*, expected a finite number') as error:
        read(file)
    name = form.get("item_id", "a.jsonl:2")
    assert str(error.value).startswith(f"{file}, line 2: conversation {name}: ")
    assert len(str(error.value)) < len(str(file)) + 150


def test_records_without_a_return_stay_as_they_are_byte_for_byte(tmp_path):
    """Warm starts are kept under the hash of their demonstrations."""
    text = json.dumps(RECORDS)
    assert json.dumps(read(written(tmp_path / "a.json", text))) == text


def test_an_action_that_a_limit_cut_does_not_teach_to_stop_there(tmp_path, chat):
    handler = RolloutHandler("1", 1, "textcraft", "textcraft_1", "", 0, 0, 2)
    handler.start(chat, PROMPT, "Goal.")
    ids = chat.action("Action: get 1")[:-1]
    handler.add_action(chat, ids, [-0.1] * len(ids))
    handler.stop("max_rounds")
    again = from_agenttraj(chat, read(run_of(tmp_path / "run", [handler]))[0])
    assert (again.input_ids, again.loss_mask) == (handler.input_ids, handler.loss_mask)
    assert again.loss_mask[-1] == 0


def test_ids_of_another_tokenizer_are_not_taken(chat):
    turn = {"from": "gpt", "loss": True, "value": "Action: look", "ids": chat.action("Other")}
    assert not has_exact_ids(chat, turn)
    assert not has_exact_ids(chat, turn | {"ids": [10**9]})
    assert not has_exact_ids(chat, turn | {"ids": []})
    assert has_exact_ids(chat, turn | {"ids": chat.action("Action: look")})


def test_of_a_run_only_what_was_played_earned_enough_and_was_trained_on(tmp_path, chat):
    path = run_of(
        tmp_path / "run",
        [sampled(chat, 1, 1.0), sampled(chat, 2, 0.25, "failure")],
        [sampled(chat, 3, 1.0, "env_error"), sampled(chat, 4, 0.5)],
    )
    held_out = path / "trajectories" / "eval_000002.jsonl"
    written(held_out, sampled(chat, 5, 1.0).to_json())
    almost = sampled(chat, 1, 0.1)
    almost.turns[0].reward, almost.turns[1].reward = 0.6, 0.39999999999999997
    assert len(read(run_of(tmp_path / "other", [almost]), min_return=1.0)) == 1
    names = [record["item_id"] for record in read(path)]
    assert names == ["textcraft_1", "textcraft_2", "textcraft_4"]
    assert [r["item_id"] for r in read(path, min_return=0.5)] == ["textcraft_1", "textcraft_4"]
    assert [r["item_id"] for r in read(held_out)] == ["textcraft_5"]  # asked for by name
    both = read(path, written(tmp_path / "a.json", json.dumps(RECORDS)))
    assert len(both) == 3 + len(RECORDS)


def with_turns(*turns):
    return {
        "item_id": "x",
        "conversations": [dict(zip(("from", "loss", "value"), t)) for t in turns],
    }


def with_ids(ids):
    record = with_turns(("human", None, "a"), ("gpt", True, "b"))
    record["conversations"][1]["ids"] = ids
    return record


GOOD = json.dumps(RECORDS[0])
WRONG = {
    "broken JSON": ('{"item_id": ', "line 2 is no JSON"),
    "a missing field": ('{"item_id": "x"}', "line 2: ['item_id']: expected"),
    "another object": ('{"prompt": 1, "text": 2}', "line 2: ['prompt', 'text']: expected"),
    "no object": ("3", "line 2: '3': expected"),
    "an unknown role": ('{"messages": [{"role": "tool"}]}', "message 0 has the role 'tool'"),
    "an unknown speaker": (with_turns(("tool", None, "a")), "conversation x: turn 0 must be from"),
    "a message without text": ('{"messages": [{"role": "user"}]}', "turn 0 must be from"),
    "an empty conversation": (with_turns(), "conversation x is empty"),
    "no messages": ('{"messages": []}', "is empty"),
    "roles that do not alternate": (
        with_turns(("human", None, "a"), ("gpt", True, "b"), ("gpt", True, "c")),
        "turn 2 is from gpt, expected human",
    ),
    "no turn with loss": (with_turns(("human", None, "a"), ("gpt", None, "b")), "no gpt turn"),
    "nothing before": (with_turns(("gpt", True, "a")), "no observation stands before"),
    "half a trajectory": ('{"trajectory_id": "1"}', "no line of a run's trajectories"),
    "turns that are none": ('{"trajectory_id": "1", "turns": [1]}', "no line of a run's"),
    "a role that is a list": ('{"messages": [{"role": ["user"]}]}', "message 0 has the role"),
    "a speaker that is an object": (with_turns(({}, None, "a")), "turn 0 must be from"),
    "half a surrogate pair": (with_turns(("human", None, "\ud83d")), "half of a surrogate pair"),
    **{
        f"ids that are {what}": (with_ids(ids), "turn 1: ids must be a list of token ids")
        for what, ids in (("words", ["a"]), ("negative", [-1]), ("a number", 7), ("true", [True]))
    },
    "long keys": (json.dumps({"a\nb" * 1000: 1}), "expected {"),
    "nested without end": ('{"a": ' + "[" * 100_000, "line 2 is no JSON"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_wrong_is_named_with_its_line(tmp_path, case):
    content, message = WRONG[case]
    text = content if isinstance(content, str) else json.dumps(content)
    file = written(tmp_path / "a.jsonl", f"{GOOD}\n{text}\n{GOOD}")
    with pytest.raises(ValueError) as error:
        read(file)
    told = str(error.value)
    assert told.startswith(f"{file}, line 2") and message in told and "\n" not in told


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"[{GOOD},\n{GOOD},\n {{]", "line 3: no JSON"),
        (f"[{GOOD},\n{GOOD}", "line 2: the list does not end with ]"),
        (f"[\n{GOOD},\n3]", "line 3: '3': expected"),
        ("[" * 100_000, "line 1: nested too deep"),
        (f"[{GOOD}]\n[{GOOD}]", "something stands behind the list's end"),
        (f"[{GOOD}] x", "something stands behind the list's end"),
        (f"[{GOOD}\n {GOOD}]", "line 2: expected , or ], got '{'"),
        (f"[,{GOOD}]", "line 1: no JSON"),
        (f"[{GOOD},]", "line 1: no JSON"),
        (f"[{GOOD},\n{'1' * 5000}]", "line 2: no JSON"),
    ],
)
def test_what_is_wrong_in_a_list_is_named_with_its_line(tmp_path, text, message):
    with pytest.raises(ValueError, match="a.json, ") as error:
        read(written(tmp_path / "a.json", text))
    assert message in str(error.value)


def test_what_cannot_be_asked_of_a_file_is_said(tmp_path):
    file = written(tmp_path / "a.jsonl", GOOD)
    with pytest.raises(ValueError, match="a run's lines have one"):
        read(file, min_return=1.0)
    with pytest.raises(ValueError, match="is it a run?"):
        read(tmp_path)
    (tmp_path / "b.jsonl").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ValueError, match="not text in UTF-8"):
        read(tmp_path / "b.jsonl")


@pytest.mark.parametrize("as_list", [True, False])
def test_a_large_file_is_read_as_it_is_used(tmp_path, as_list):
    """50 MB, with a tenth of that in memory; a file without an end is given up."""
    record = json.dumps(to_agenttraj("x", said(1, blanks=" " * 10_000)))
    file = tmp_path / "a.json"
    begin, between, end = ("[", ",\n", "]") if as_list else ("", "\n", "")
    written(file, begin + between.join([record] * 5_000) + end)
    assert file.stat().st_size > 50e6
    tracemalloc.start()
    try:
        assert sum(1 for _ in read_conversations([file])) == 5_000
        assert tracemalloc.get_traced_memory()[1] < 6e6
    finally:
        tracemalloc.stop()


def test_a_text_without_an_end_is_given_up(tmp_path, monkeypatch):
    monkeypatch.setattr(conversations, "CHUNK", 1_000)
    monkeypatch.setattr(conversations, "LONGEST", 10_000)
    file = written(tmp_path / "a.json", '[{"item_id": "' + "x" * 1_000_000)
    with pytest.raises(ValueError, match="line 1: no JSON"):
        read(file)


def test_an_empty_list_and_an_empty_file_hold_nothing(tmp_path):
    assert read(written(tmp_path / "a.json", " [ \n ] ")) == []
    assert read(written(tmp_path / "b.jsonl", "")) == []
