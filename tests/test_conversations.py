"""conversations.py: files of conversations and runs are read, or their problem is named."""

import json
from pathlib import Path

import pytest
from test_data import PROMPT, chat, episode_messages, sampled_trajectory

import conversations
from conversations import read_records
from data import encode, to_agenttraj

__all__ = ["chat"]  # a fixture
RECORDS = [to_agenttraj(f"textcraft_{n}", episode_messages(n), 2) for n in range(3)]
GOOD = json.dumps(RECORDS[0])


def write(path, text):
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
def test_a_file_is_a_list_or_has_one_object_per_line(tmp_path, form):
    assert read(write(tmp_path / "a.json", form(RECORDS))) == RECORDS


def test_a_record_without_an_id_gets_its_own_task(tmp_path):
    """This also holds for a list on one line, and for files of equal names in two folders."""
    shards = [tmp_path / name / "train.json" for name in ("a", "b")]
    for shard in shards:
        shard.parent.mkdir()
        shard.write_text(json.dumps([{"messages": episode_messages(1)}] * 2))
    assert [r["item_id"] for r in read(shards[0])] == ["train.json:1", "train.json:2"]
    ids = [r["item_id"] for r in read(*shards)]
    assert ids == [f"{shard}:{number}" for shard in shards for number in (1, 2)]


def test_message_weights_ids_seeds_and_returns_are_read_but_not_a_records_weight(tmp_path):
    turns, messages = RECORDS[0]["conversations"], episode_messages(1)
    messages[2] |= {"weight": 0, "id": "m2", "tool_calls": None, "num_tokens": 7}
    records = [
        {"messages": messages, "id": 7, "seed": 3, "return": 0.5, "weight": 9},
        {"id": "x", "item_id": None, "conversations": turns},
        {"id": "x", "item_id": "y", "conversations": turns, "reward": 0},  # AgentGym's name
    ]
    result = read(write(tmp_path / "a.jsonl", "\n".join(map(json.dumps, records))))
    assert [record["item_id"] for record in result] == ["7", "x", "y"]
    assert [record.get("return") for record in result] == [0.5, None, 0]
    assert result[0]["seed"] == 3 and "weight" not in result[0]
    assert [t["loss"] for t in result[0]["conversations"]] == [False, False, False, False, True]


def with_turns(*turns, **extra):
    names = ("from", "loss", "value")
    turns = [turn if isinstance(turn, dict) else dict(zip(names, turn)) for turn in turns]
    return {"item_id": "x", "conversations": turns} | extra


OK = (("human", None, "a"), ("gpt", True, "b"))
TOOLS = [{"type": "function", "function": {"name": "get"}}]
WRONG = [
    ('{"item_id": ', "not JSON"),
    ('{"prompt": 1, "text": 2}', "['prompt', 'text']: expected"),
    ('{"messages": [{"role": ["tool"]}]}', "message 0 has role ['tool']"),
    *(
        ({"messages": [{"role": role, "content": "", key: value}]}, f"message 0 has {key}")
        for role, key, value in (
            ("assistant", "tool_calls", [1]),
            ("assistant", "reasoning_content", "It may rain."),
            ("user", "images", ["a.png"]),
            ("assistant", "weight", "0"),
            ("assistant", "train", False),
            ("user", "mask", 1),
            ("assistant", "loss_weight", 0),
        )
    ),
    (
        with_turns(("human", None, "a"), {"from": "gpt", "value": "b", "loss": "no"}),
        "has loss",
    ),
    (with_turns({"from": "human", "value": "a", "function_call": {"a": 1}}), "has function_call"),
    (with_turns(*OK, tools=[1], weight=0, label=False), "has tools, weight, label, which is not"),
    (
        with_turns(OK[0], {"from": "gpt", "loss": True, "value": "b", "tools": TOOLS}),
        "turn 1 has tools, which is not read",
    ),
    *(
        (with_turns({"from": "human", "value": "a", "tools": tools}, OK[1]), "not descriptions of")
        for tools in (5, [{"name": "get"}], [{"function": {"name": 1}}])
    ),
    (with_turns(*OK, weight="0"), "has weight, which is not read"),
    (with_turns(*OK, messages=[1]), "expected"),
    (with_turns(*OK, seed=[1]), '"seed" is [1], expected an integer'),
    (with_turns(*OK, seed="7"), "\"seed\" is '7'"),
    (with_turns(("human", None, ["a"])), "join its texts into one"),
    (with_turns({"from": "gpt", "value": "b", "ids": ["q"]}), "ids that are not token ids"),
    (with_turns(), "conversation x has nothing to learn from"),
    (with_turns(*OK, ("gpt", True, "c")), "turn 2 is from gpt, expected human"),
    (with_turns(("human", None, "a"), ("gpt", None, "b")), 'set "loss": true on the gpt turns'),
    (with_turns(("gpt", True, "a")), "no observation precedes"),
    (with_turns(("human", None, "\ud83d")), "half of a surrogate pair"),  # trap 24
    (with_turns(*OK[:1], {"from": "gpt", "value": "b", "name": "\ud83d"}), "half of a surrogate"),
    ('{"trajectory_id": "1", "turns": [1]}', "not a line of a run's"),
    (with_turns(*OK, **{"return": "1"}), '"return" is'),
    (with_turns(*OK, **{"return": float("nan")}), '"return" is'),
]


@pytest.mark.parametrize(("content", "message"), WRONG)
def test_an_error_names_the_problem_and_its_line(tmp_path, content, message):
    text = content if isinstance(content, str) else json.dumps(content)
    file = write(tmp_path / "a.jsonl", f"{GOOD}\n{text}\n{GOOD}")
    with pytest.raises(ValueError) as error:
        read(file)
    problem = str(error.value)
    assert problem.startswith(f"{file}, line 2") and message in problem and "\n" not in problem


def test_other_files_and_folders_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"a.json, line 2 is not JSON"):
        read(write(tmp_path / "a.json", f"[{GOOD},\n{GOOD}"))
    with pytest.raises(ValueError, match="is it a run?"):
        read(tmp_path)
    (tmp_path / "b.jsonl").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ValueError, match="as UTF-8 text"):
        read(tmp_path / "b.jsonl")
    with pytest.raises(ValueError, match="give a regular file"):
        read(Path("/dev/null"))


# --- Trajectories of a run (trap 6) ---------------------------------------------------------------


def run_of(path, *steps):
    for step, handlers in enumerate(steps, start=1):
        file = path / "trajectories" / f"step_{step:06d}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        write(file, "".join(handler.to_json() for handler in handlers))
    return path


EXAMPLE = [{"role": "user", "content": "You craft."}, {"role": "assistant", "content": "OK."}]


@pytest.mark.parametrize("prompt", [PROMPT, EXAMPLE], ids=["rules", "a prompt with an example"])
def test_a_sampled_trajectory_is_read_back_with_the_same_ids(tmp_path, chat, prompt):
    handler = sampled_trajectory(chat, 1, 1.0, prompt=prompt)
    (record,) = read(run_of(tmp_path / "run", [handler]))
    assert record == conversations.record_of(handler)
    assert (record["item_id"], record["return"], record["seed"]) == ("textcraft_1", 1.0, 0)
    example = encode(chat, record)
    again = example.trajectory
    assert (again.input_ids, again.loss_mask) == (handler.input_ids, handler.loss_mask)
    assert again.messages == handler.messages and not example.is_reencoded
    assert read(write(tmp_path / "record.json", json.dumps([record]))) == [record]


def test_a_run_yields_its_valid_training_trajectories(tmp_path, chat):
    second = sampled_trajectory(chat, 2, 0.25, "failure")
    second.turns[0].reward = 0.1
    path = run_of(
        tmp_path / "run",
        [sampled_trajectory(chat, 1, 1.0), second],
        [sampled_trajectory(chat, 3, 1.0, "env_error"), sampled_trajectory(chat, 4, 0.5)],
    )
    held_out = path / "trajectories" / "eval_000002.jsonl"
    write(held_out, sampled_trajectory(chat, 5, 1.0).to_json())
    records = read(path)
    assert [r["item_id"] for r in records] == ["textcraft_1", "textcraft_2", "textcraft_4"]
    assert [r["return"] for r in records] == [1.0, 0.35, 0.5]
    assert [r["item_id"] for r in read(held_out)] == ["textcraft_5"]  # if the file is named
