"""The index of a trajectory file: heads alone; files that change and are broken."""

import json
import time

import pytest
from made_run import hostile_line, make_run

from trajectory import HEAD_END
from viewer.sources import open_source
from viewer.trajectories import head_of, index, open_lines, opening_of, split_action


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("run") / "made")


def test_a_head_is_what_the_whole_line_says(run):
    for raw in (run / "trajectories/step_000003.jsonl").read_text().splitlines():
        line = json.loads(raw)
        head = head_of(raw.encode())
        assert head == {name: line[name] for name in head} and head["num_turns"] is not None
        assert len(raw[: raw.index(HEAD_END)]) < 1000
        tokens_first = {"input_ids": line.pop("input_ids")} | line
        assert head_of(json.dumps(tokens_first).encode()) == head
    line = json.loads(hostile_line(0, 'x,"messages":[]'))  # as the end of a head looks
    assert head_of(json.dumps(line).encode())["error"] == 'x,"messages":[]'


def test_a_file_that_grew_or_was_replaced_is_read_again_and_a_half_line_waits(run, tmp_path):
    """`cp` keeps name and inode, and two evaluations of the same tasks have the same size."""
    whole = (run / "trajectories/step_000002.jsonl").read_bytes().splitlines(keepends=True)
    path = tmp_path / "a.jsonl"
    path.write_bytes(whole[0])
    source = open_source(0, path)
    other = whole[1].replace(b"s000002", b"s000007")
    for content in (
        [whole[0], whole[1][:50]],
        [whole[0], whole[1].rstrip(b"\n")],
        [whole[0], other],
        [whole[0]],
    ):
        path.write_bytes(b"".join(content))
        lines = source.lines("a")
        wholes = [json.loads(line) for line in content if len(line) > 50]
        assert [lines.read(n) for n in range(len(lines))] == wholes
        assert [row["trajectory_id"] for row in lines.rows] == [w["trajectory_id"] for w in wholes]
        assert lines.broken == 0 and source.lines("a") is lines


def test_broken_lines_are_skipped_and_counted(run, tmp_path):
    good = (run / "trajectories/step_000001.jsonl").read_bytes().splitlines(keepends=True)[0]
    odd = good.replace(b'"step":1,', b'"step":[1],')
    path = tmp_path / "broken.jsonl"
    path.write_bytes(b"\n[1]\n" + good + b'{"a": \n{"turns":[1]}\n\xff\xfe\n' + odd + good)
    lines = index(path)
    assert (len(lines), lines.broken) == (2, 5)
    assert lines.read(1) == json.loads(good) and lines.rows[1]["line"] == 1
    path.write_bytes(good.replace(b'"return":1.0', b'"return":NaN'))
    assert index(path).rows[0]["return"] is None


def test_conversations_are_lines_too(tmp_path):
    turns = [
        {"from": "human", "loss": None, "value": "rules"},
        {"from": "gpt", "loss": False, "value": "OK"},
        {"from": "human", "loss": None, "value": "dark"},
        {"from": "gpt", "loss": True, "value": "Action: light"},
        {"from": "human", "loss": None, "value": "bright"},
    ]
    record = {"item_id": "world_7", "conversations": turns}
    (tmp_path / "a.json").write_text(json.dumps([record, record]))
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n")
    as_list, as_lines = open_lines(tmp_path / "a.json"), open_lines(tmp_path / "a.jsonl")
    assert (len(as_list), len(as_lines)) == (2, 1) and as_list.rows[0] == as_lines.rows[0]
    assert as_lines.rows[0]["task_id"] == "world_7" and as_lines.rows[0]["num_turns"] == 1
    line = as_list.read(1)
    assert line["turns"] == [{"action_text": "Action: light", "observation_text": "bright"}]
    assert [m["content"] for m in opening_of(line)] == ["rules", "OK", "dark"]


def test_a_long_odd_answer_takes_no_time():
    began = time.perf_counter()
    for text in (" " * 50_000, "<search>" * 2_000, "Thought:" + "\n" * 50_000):
        split_action(text + "x")
    assert time.perf_counter() - began < 1
