"""viewer/trajectories.py: the index of a file, files that change, broken lines."""

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


def test_a_head_has_the_short_fields_of_its_line(run):
    for raw in (run / "trajectories/step_000003.jsonl").read_text().splitlines():
        line = json.loads(raw)
        head = head_of(raw.encode())
        assert head == {name: line[name] for name in head} and head["num_turns"] is not None
        assert len(raw[: raw.index(HEAD_END)]) < 1000
        tokens_first = {"input_ids": line.pop("input_ids")} | line
        assert head_of(json.dumps(tokens_first).encode()) == head
    line = json.loads(hostile_line(0, 'x,"messages":[]'))  # looks like the end of a head
    assert head_of(json.dumps(line).encode())["error"] == 'x,"messages":[]'


def test_a_file_that_changed_is_indexed_again_and_an_incomplete_line_is_ignored(run, tmp_path):
    """`cp` does not change name and inode, and evaluations of the same tasks have equal size."""
    first, second, *_ = (
        (run / "trajectories/step_000002.jsonl").read_bytes().splitlines(keepends=True)
    )
    path = tmp_path / "a.jsonl"
    path.write_bytes(first)
    source = open_source(0, path)
    for content in (
        [first, second[:50]],
        [first, second.rstrip(b"\n")],
        [first, second.replace(b"s000002", b"s000007")],
        [first],
    ):
        path.write_bytes(b"".join(content))
        lines = source.lines("a")
        expected = [json.loads(line) for line in content if len(line) > 50]
        assert [lines.read(n) for n in range(len(lines))] == expected
        ids = [line["trajectory_id"] for line in expected]
        assert [row["trajectory_id"] for row in lines.rows] == ids
        assert lines.broken == 0 and source.lines("a") is lines


def test_broken_lines_are_skipped_and_counted(run, tmp_path):
    good = (run / "trajectories/step_000001.jsonl").read_bytes().splitlines(keepends=True)[0]
    bad_type = good.replace(b'"step":1,', b'"step":[1],')
    path = tmp_path / "broken.jsonl"
    path.write_bytes(b"\n[1]\n" + good + b'{"a": \n{"turns":[1]}\n\xff\xfe\n' + bad_type + good)
    lines = index(path)
    assert (len(lines), lines.broken) == (2, 5)
    assert lines.read(1) == json.loads(good) and lines.rows[1]["line"] == 1
    path.write_bytes(good.replace(b'"return":1.0', b'"return":NaN'))
    assert index(path).rows[0]["return"] is None


def test_agenttraj_conversations_are_read_as_trajectories(tmp_path):
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
    json_file, jsonl_file = open_lines(tmp_path / "a.json"), open_lines(tmp_path / "a.jsonl")
    assert (len(json_file), len(jsonl_file)) == (2, 1) and json_file.rows[0] == jsonl_file.rows[0]
    assert jsonl_file.rows[0]["task_id"] == "world_7" and jsonl_file.rows[0]["num_turns"] == 1
    line = json_file.read(1)
    assert line["turns"] == [{"action_text": "Action: light", "observation_text": "bright"}]
    assert [m["content"] for m in opening_of(line)] == ["rules", "OK", "dark"]


def test_splitting_a_long_strange_answer_is_fast():
    start = time.perf_counter()
    for text in (" " * 50_000, "<search>" * 2_000, "Thought:" + "\n" * 50_000):
        split_action(text + "x")
    assert time.perf_counter() - start < 1
