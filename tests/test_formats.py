"""formats.py: what others have collected and what a run has sampled, or what is wrong with it."""

import json

import pytest
from test_data import chat, said, sampled

import formats
from data import encode, to_agenttraj
from formats import read_records

__all__ = ["chat"]  # a fixture
RECORDS = [to_agenttraj(f"textcraft_{n}", said(n)) for n in range(3)]
GOOD = json.dumps(RECORDS[0])


def written(path, text):
    path.write_text(text, encoding="utf-8")
    return path


def read(*paths):
    return list(read_records(paths))


@pytest.mark.parametrize(
    "form",
    [
        json.dumps,
        lambda records: f"\n {json.dumps(records, indent=2)}\n ",
        lambda records: "\r\n\n".join(map(json.dumps, records)) + "\n\n",
        lambda records: "\ufeff" + json.dumps(records),
    ],
)
def test_a_file_is_a_list_or_has_an_object_on_each_line(tmp_path, form):
    assert read(written(tmp_path / "a.json", form(RECORDS))) == RECORDS


def test_a_record_without_an_id_is_a_task_of_its_own(tmp_path):
    """Also where a list stands on one line, and where shards in two folders have one name."""
    shards = [tmp_path / name / "train.json" for name in ("a", "b")]
    for shard in shards:
        shard.parent.mkdir()
        shard.write_text(json.dumps([{"messages": said(1)}] * 2))
    assert [r["item_id"] for r in read(shards[0])] == ["train.json:1", "train.json:2"]
    both = [r["item_id"] for r in read(*shards)]
    assert both == [f"{shard}:{place}" for shard in shards for place in (1, 2)]


def test_weights_of_messages_ids_seeds_and_returns_are_read_and_of_a_record_no_weight(tmp_path):
    turns, messages = RECORDS[0]["conversations"], said(1)
    messages[2]["weight"] = 0
    records = [
        {"messages": messages, "id": 7, "seed": 3, "return": 0.5, "weight": 9},
        {"id": "x", "item_id": None, "conversations": turns},
        {"id": "x", "item_id": "y", "conversations": turns, "reward": 0},  # AgentGym's name
    ]
    found = read(written(tmp_path / "a.jsonl", "\n".join(map(json.dumps, records))))
    assert [record["item_id"] for record in found] == ["7", "x", "y"]
    assert [record.get("return") for record in found] == [0.5, None, 0]
    assert found[0]["seed"] == 3 and "weight" not in found[0]
    assert [t["loss"] for t in found[0]["conversations"]] == [False, False, False, False, True]


def with_turns(*turns, **more):
    names = ("from", "loss", "value")
    turns = [turn if isinstance(turn, dict) else dict(zip(names, turn)) for turn in turns]
    return {"item_id": "x", "conversations": turns} | more


OK = (("human", None, "a"), ("gpt", True, "b"))
WRONG = [
    ('{"item_id": ', "not JSON"),
    ('{"prompt": 1, "text": 2}', "['prompt', 'text']: expected"),
    ('{"messages": [{"role": ["tool"]}]}', "message 0 has role ['tool']"),
    ('{"messages": [{"role": "assistant", "tool_calls": [1]}]}', "message 0 has tool_calls"),
    (with_turns(("human", None, ["a"])), "join the texts of its parts"),
    (with_turns({"from": "gpt", "value": "b", "ids": ["q"]}), "ids that are not token ids"),
    (with_turns(), "conversation x has nothing to learn from"),
    (with_turns(*OK, ("gpt", True, "c")), "turn 2 is from gpt, expected human"),
    (with_turns(("human", None, "a"), ("gpt", None, "b")), 'mark the gpt turns to learn with "los'),
    (with_turns(("gpt", True, "a")), "no observation before"),
    (with_turns(("human", None, "\ud83d")), "half of a surrogate pair"),
    ('{"trajectory_id": "1", "turns": [1]}', "not a line of a run's"),
    (with_turns(*OK, **{"return": "1"}), '"return" is'),
    (with_turns(*OK, **{"return": float("nan")}), '"return" is'),
]


@pytest.mark.parametrize(("content", "message"), WRONG)
def test_what_is_wrong_is_named_with_its_place(tmp_path, content, message):
    text = content if isinstance(content, str) else json.dumps(content)
    file = written(tmp_path / "a.jsonl", f"{GOOD}\n{text}\n{GOOD}")
    with pytest.raises(ValueError) as error:
        read(file)
    problem = str(error.value)
    assert problem.startswith(f"{file}, line 2") and message in problem and "\n" not in problem


def test_a_file_or_folder_that_is_none_of_these_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"a.json, line 2 is not JSON"):
        read(written(tmp_path / "a.json", f"[{GOOD},\n{GOOD}"))
    with pytest.raises(ValueError, match="is it a run?"):
        read(tmp_path)
    (tmp_path / "b.jsonl").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ValueError, match="not text in UTF-8"):
        read(tmp_path / "b.jsonl")


# --- What a run has sampled (trap 6) --------------------------------------------------------------


def run_of(path, *steps):
    for step, handlers in enumerate(steps, start=1):
        file = path / "trajectories" / f"step_{step:06d}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        written(file, "".join(each.to_json() for each in handlers))
    return path


def test_what_a_policy_sampled_comes_back_with_the_very_ids(tmp_path, chat):
    handler = sampled(chat, 1, 1.0)
    (record,) = read(run_of(tmp_path / "run", [handler]))
    assert record == formats.record_of(handler)
    assert (record["item_id"], record["return"], record["seed"]) == ("textcraft_1", 1.0, 0)
    example = encode(chat, record)
    again = example.trajectory
    assert (again.input_ids, again.loss_mask) == (handler.input_ids, handler.loss_mask)
    assert again.messages == handler.messages and not example.is_reencoded
    assert read(written(tmp_path / "kept.json", json.dumps([record]))) == [record]


def test_of_a_run_all_that_ended_and_was_trained_on(tmp_path, chat):
    second = sampled(chat, 2, 0.25, "failure")
    second.turns[0].reward = 0.1
    path = run_of(
        tmp_path / "run",
        [sampled(chat, 1, 1.0), second],
        [sampled(chat, 3, 1.0, "env_error"), sampled(chat, 4, 0.5)],
    )
    held_out = path / "trajectories" / "eval_000002.jsonl"
    written(held_out, sampled(chat, 5, 1.0).to_json())
    records = read(path)
    assert [r["item_id"] for r in records] == ["textcraft_1", "textcraft_2", "textcraft_4"]
    assert [r["return"] for r in records] == [1.0, 0.35, 0.5]
    assert [r["item_id"] for r in read(held_out)] == ["textcraft_5"]  # asked for by name
