"""viewer/trajectories.py: the index of a file, files that change, broken lines."""

import json
import time
from functools import reduce
from operator import getitem

from replay import list_text, trajectory_text
from trajectory import LIST_FIELDS
from viewer.overview import summarize_failures
from viewer.server import as_json
from viewer.sources import open_source
from viewer.trajectories import (
    groups_of,
    open_lines,
    opening_of,
    search,
    split_action,
    trajectory_view,
)


def test_a_line_with_a_field_of_another_type_is_shown_or_skipped_and_counted(made_run, tmp_path):
    first, text, *_ = (made_run / "trajectories/step_000003.jsonl").read_text().splitlines()
    line, path = json.loads(text), tmp_path / "a.jsonl"
    fields = [(name,) for name in line] + [("turns", 0, name) for name in line["turns"][0]]
    fields += [("messages", 0), ("messages", 0, "role"), ("messages", 0, "content"), ("turns", 0)]
    fields += [("turns", 0, "action_span", 0), *((name, 9) for name in LIST_FIELDS)]
    lines = [
        first,
        text.replace('"seed":0', '"seed":1e999'),
        text.replace('"step":', '"step":NaN,"a":'),
    ]
    for *names, last in fields:
        for value in (None, True, 5, -1, 10**400, "text", [], ["x"], [None], {}, {"a": 1}):
            changed = json.loads(text)
            reduce(getitem, names, changed)[last] = value
            lines.append(json.dumps(changed))
    lines += ["null", "[1]", "1" * 5000, '{"turns":[1]}', '{"a": ', "[" * 10_000 + "]" * 10_000]
    path.write_bytes("\n".join(lines).encode() + b"\n\n\xff\xfe\n")
    source = open_source(0, path)
    index = source.lines("a")
    assert len(index) + index.broken == len(lines) + 1 and 0.3 < index.broken / len(lines) < 0.9
    assert index.read(0) == json.loads(first) and index.rows[1]["line"] == 1
    as_json([index.rows, groups_of(index), summarize_failures(index)])
    list_text(source, "a", only_failures=False)
    assert len([hit for _, hit in search(index, "a") if hit]) == len(index)
    for number, row in enumerate(index.rows):
        row["group_id"] = None  # or every view would read all lines
        as_json(trajectory_view(source, "a", number))
        trajectory_text(source, "a", number)


def test_a_file_that_changed_is_indexed_again_and_an_incomplete_line_is_ignored(made_run, tmp_path):
    """`cp` does not change name and inode, and evaluations of the same tasks have equal size."""
    first, second, *_ = (
        (made_run / "trajectories/step_000002.jsonl").read_bytes().splitlines(keepends=True)
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
    pieces = (" ", "\n", "<", "<search>", "<answer>", "<search></answer>", "<think>", "Action:")
    for piece in pieces:
        text = piece * (100_000 // len(piece))
        split_action(text + "x")
    assert time.perf_counter() - start < 1
