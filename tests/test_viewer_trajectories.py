"""The index of a trajectory file: heads alone; files that grow, shrink and are broken."""

import json
import os

import pytest
from made_run import hostile_line, make_run

from trajectory import HEAD_END, from_line
from viewer.trajectories import (
    COLUMNS,
    Lines,
    head_of,
    open_lines,
    opening_of,
    row_of,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("run") / "made")


def test_a_head_is_what_the_whole_line_says(run):
    for raw in (run / "trajectories/step_000003.jsonl").read_text().splitlines():
        line = json.loads(raw)
        assert head_of(raw.encode()) == {name: line[name] for name in COLUMNS}
        assert len(raw[: raw.index(HEAD_END)]) < 1000
        assert line["num_turns"] == len(line["turns"])
        assert json.loads(from_line(line).to_json()) == line
        tokens_first = {"input_ids": line.pop("input_ids")} | line  # as older files have it
        assert head_of(json.dumps(tokens_first).encode()) == row_of(line)


def test_a_text_that_looks_like_the_end_of_a_head_is_not_one():
    line = json.loads(hostile_line(0, 'x,"messages":[]'))
    assert head_of(json.dumps(line).encode())["error"] == 'x,"messages":[]'


def test_a_file_that_grows_is_read_on_and_a_half_line_waits(run, tmp_path, monkeypatch):
    whole = (run / "trajectories/step_000003.jsonl").read_bytes().splitlines(keepends=True)
    path = tmp_path / "growing.jsonl"
    path.write_bytes(whole[0] + whole[1][:50])
    lines = Lines(path)
    assert (len(lines), lines.broken, lines.indexed) == (1, 0, len(whole[0]))
    with open(path, "ab") as file:
        file.write(whole[1][50:] + whole[2].rstrip(b"\n"))  # the last line has no end yet
    parsed = []
    monkeypatch.setattr(
        "viewer.trajectories.head_of", lambda line, real=head_of: parsed.append(line) or real(line)
    )
    lines.refresh()
    lines.refresh()
    assert len(lines) == 3 and len(parsed) == 2  # what was read before is not read again
    assert lines.read(2)["trajectory_id"] == json.loads(whole[2])["trajectory_id"]


@pytest.mark.parametrize("by", ["truncation", "replacement", "a longer replacement", "copy"])
def test_a_file_that_was_cut_back_or_replaced_is_read_again(run, tmp_path, by):
    """`cp` keeps the inode, and two evaluations of the same tasks begin alike."""
    whole = (run / "trajectories/step_000002.jsonl").read_bytes().splitlines(keepends=True)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"".join(whole[:3]))
    lines = Lines(path)
    if by == "truncation":
        os.truncate(path, len(whole[0]))
        expected = whole[:1]
    elif by == "copy":
        expected = [*whole[:2], whole[2].replace(b"s000002", b"s000007")]
        path.write_bytes(b"".join(expected))
    else:
        expected = whole[3:] if by == "replacement" else whole[3:] + whole
        other = tmp_path / "b.jsonl"
        other.write_bytes(b"".join(expected))
        other.replace(path)
    lines.refresh()
    names = [lines.row(n)["trajectory_id"] for n in range(len(lines))]
    assert names == [json.loads(line)["trajectory_id"] for line in expected]


def test_broken_lines_are_skipped_and_counted(run, tmp_path):
    good = (run / "trajectories/step_000001.jsonl").read_bytes().splitlines(keepends=True)[0]
    path = tmp_path / "broken.jsonl"
    path.write_bytes(
        b"\n[1]\n" + good + b'{"trajectory_id": \n{"turns":[1]}\n\xff\xfe\n' + good + b"{"
    )
    lines = Lines(path)
    assert (len(lines), lines.broken) == (2, 4)
    assert lines.read(1) == json.loads(good)
    for number in ("NaN", "1e999"):
        path.write_text(f'{{"turns": [], "return": {number}, "success": false}}\n')
        assert Lines(path).row(0)["return"] is None


def test_conversations_are_lines_too(tmp_path):
    turns = [
        {"from": "human", "loss": None, "value": "rules"},
        {"from": "gpt", "loss": False, "value": "OK"},
        {"from": "human", "loss": None, "value": "dark"},
        {"from": "gpt", "loss": True, "value": "Action: light"},
        {"from": "human", "loss": None, "value": "bright"},
    ]
    record = {"item_id": "world_7", "conversations": turns}
    (tmp_path / "a.json").write_text(json.dumps([record, {"no": 1}, record]))
    (tmp_path / "a.jsonl").write_text(json.dumps(record) + "\n")
    as_list, as_lines = open_lines(tmp_path / "a.json"), open_lines(tmp_path / "a.jsonl")
    assert (len(as_list), as_list.broken, len(as_lines)) == (2, 1, 1)
    assert as_list.row(1) | {"line": 0} == as_lines.row(0)
    assert as_lines.row(0)["task_id"] == "world_7" and as_lines.row(0)["num_turns"] == 1
    line = as_list.read(1)
    assert line["turns"] == [{"action_text": "Action: light", "observation_text": "bright"}]
    assert [m["content"] for m in opening_of(line)] == ["rules", "OK", "dark"]


def test_the_opening_ends_before_the_first_turn_even_if_the_prompt_holds_answers():
    messages = [{"role": r, "content": c} for r, c in (("system", "a"), ("assistant", "OK"))]
    messages += [{"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]
    line = {"messages": messages, "turns": [{"action_text": "c"}]}
    assert opening_of(line) == messages[:3]
    assert opening_of({"messages": [7, None], "turns": None}) == []
