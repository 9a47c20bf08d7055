"""The index of a trajectory file: heads alone; files that grow, shrink and are broken."""

import json
import os

import pytest
from made_run import HOSTILE, hostile_line, make_run

from trajectory import COUNTED, HEAD_END, from_line
from viewer import lines as viewer_lines
from viewer.lines import COLUMNS, Lines, head_of, opening_of, row_of
from viewer.sources import Conversations, open_lines


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("run") / "made")


def old_order(line):
    """As lines were written once: tokens first, and nothing counted."""
    tokens = ("input_ids", "loss_mask", "rollout_log_probs", "advantages", "weight_version")
    rest = {n: v for n, v in line.items() if n not in tokens and n not in COUNTED}
    return {n: line[n] for n in tokens} | rest | {"return": line["return"]}


def test_a_head_is_what_the_whole_line_says(run):
    text = (run / "trajectories/step_000003.jsonl").read_text()
    assert len(text.splitlines()) == 7
    for raw in text.splitlines():
        line = json.loads(raw)
        head = head_of(raw.encode())
        assert head == head_of(json.dumps(old_order(line)).encode())
        assert head == {name: line[name] for name in COLUMNS}
        assert len(raw[: raw.index(HEAD_END)]) < 1000
        for order in (line, old_order(line)):
            assert json.loads(from_line(order).to_json()) == line


def test_the_counted_fields_are_what_they_count(run):
    lines = Lines.open(run / "trajectories/step_000003.jsonl")
    for number in range(len(lines)):
        row, line = lines.row(number), lines.read(number)
        assert row["num_turns"] == len(line["turns"])
        assert row["num_tokens"] == len(line["input_ids"])
        expected = {True: 1.0, False: -1.0}[row["success"]] if row["num_turns"] else None
        assert row["advantage"] == expected
    assert lines.row(6)["stop_reason"] == "env_error" and lines.row(6)["error"]


def test_a_text_that_looks_like_the_end_of_a_head_is_none():
    line = json.loads(hostile_line(0, 'x,"messages":[]'))
    assert head_of(json.dumps(line).encode())["error"] == 'x,"messages":[]'


def test_a_file_that_grows_is_read_on_and_a_half_line_waits(run, tmp_path, monkeypatch):
    whole = (run / "trajectories/step_000003.jsonl").read_bytes().splitlines(keepends=True)
    path = tmp_path / "growing.jsonl"
    path.write_bytes(whole[0] + whole[1][:50])
    lines = Lines.open(path)
    assert (len(lines), lines.broken, lines.indexed) == (1, 0, len(whole[0]))
    with open(path, "ab") as file:
        file.write(whole[1][50:] + whole[2].rstrip(b"\n"))  # the last has no end of line yet
    parsed = []
    monkeypatch.setattr(
        viewer_lines, "head_of", lambda line, real=head_of: parsed.append(line) or real(line)
    )
    lines.refresh()
    assert len(lines) == 3 and len(parsed) == 2  # what was read before is not read again
    lines.refresh()
    assert len(parsed) == 2
    assert lines.read(2)["trajectory_id"] == json.loads(whole[2])["trajectory_id"]


def test_a_file_that_was_copied_over_one_that_begins_alike_is_read_anew(run, tmp_path):
    """As `cp` and scp do it: the inode stays, and two evaluations of the same tasks begin alike."""
    whole = (run / "trajectories/step_000002.jsonl").read_bytes()
    path = tmp_path / "eval.jsonl"
    path.write_bytes(whole)
    lines = Lines.open(path)
    last = whole.rindex(b"\n", 0, -1) + 1
    other = whole[:last] + whole[last:].replace(b"s000002", b"s000007")
    assert len(other) == len(whole) and other[:4096] == whole[:4096]
    path.write_bytes(other)
    lines.refresh()
    assert lines.row(len(lines) - 1)["trajectory_id"].startswith("s000007")


@pytest.mark.parametrize("by", ["truncation", "replacement", "a longer replacement"])
def test_a_file_that_was_cut_back_or_replaced_is_read_anew(run, tmp_path, by):
    whole = (run / "trajectories/step_000002.jsonl").read_bytes().splitlines(keepends=True)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"".join(whole[:3]))
    lines = Lines.open(path)
    assert len(lines) == 3
    if by == "truncation":
        os.truncate(path, len(whole[0]))
        expected = whole[:1]
    else:
        expected = whole[3:] if by == "replacement" else whole[3:] + whole
        other = tmp_path / "b.jsonl"
        other.write_bytes(b"".join(expected))
        other.replace(path)
    lines.refresh()
    names = [lines.row(n)["trajectory_id"] for n in range(len(lines))]
    assert names == [json.loads(line)["trajectory_id"] for line in expected]


def test_broken_lines_are_passed_over_and_counted(run, tmp_path):
    good = (run / "trajectories/step_000001.jsonl").read_bytes().splitlines(keepends=True)[0]
    path = tmp_path / "broken.jsonl"
    path.write_bytes(b"\n[1]\n" + good + b'{"trajectory_id": \n{"a":1}\n\xff\xfe\n' + good + b"{")
    lines = Lines.open(path)
    assert (len(lines), lines.broken) == (2, 4)
    assert lines.read(1) == json.loads(good)


def test_numbers_that_json_has_no_word_for_are_holes(tmp_path):
    path = tmp_path / "nan.jsonl"
    path.write_text('{"turns": [], "return": NaN, "success": false}\n')
    assert Lines.open(path).row(0)["return"] is None


def test_the_index_of_a_large_file_is_kept_and_trusted_only_for_that_file(
    run, tmp_path, monkeypatch
):
    monkeypatch.setenv("AGENT_RL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(viewer_lines, "WORTH_KEEPING", 1000)
    path = tmp_path / "large.jsonl"
    whole = (run / "trajectories/step_000003.jsonl").read_bytes()
    path.write_bytes(whole)
    first = Lines.open(path)
    monkeypatch.setattr(viewer_lines, "head_of", lambda line: pytest.fail("read again"))
    again = Lines.open(path)
    assert again == first and len(again) == 7
    monkeypatch.undo()
    monkeypatch.setenv("AGENT_RL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(viewer_lines, "WORTH_KEEPING", 1000)
    changed = whole.replace(b"s000003", b"s000009")
    other = tmp_path / "other.jsonl"
    other.write_bytes(changed)
    other.replace(path)
    assert Lines.open(path).row(0)["trajectory_id"].startswith("s000009")
    (kept,) = (tmp_path / "cache" / "replay").iterdir()
    kept.write_text("no index at all")
    assert len(Lines.open(path)) == 7


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
    assert isinstance(as_list, Conversations) and (len(as_list), as_list.broken) == (2, 1)
    assert as_list.row(1) | {"line": 0} == as_lines.row(0)
    assert as_lines.row(0)["task_id"] == "world_7" and as_lines.row(0)["num_turns"] == 1
    assert as_list.read(1) == as_lines.read(0) == record


def test_the_opening_ends_before_the_first_turn_even_if_the_prompt_holds_answers():
    messages = [{"role": r, "content": c} for r, c in (("system", "a"), ("assistant", "OK"))]
    messages += [{"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]
    line = {"messages": messages, "turns": [{"action_text": "c"}]}
    assert opening_of(line) == messages[:3]
    assert opening_of({"messages": messages[:3], "turns": []}) == messages[:3]
    assert opening_of({"messages": [7, None], "turns": None}) == []


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_is_a_line_like_any_other(tmp_path, text):
    path = tmp_path / "hostile.jsonl"
    path.write_text(hostile_line(0, text) * 2)
    lines = Lines.open(path)
    assert len(lines) == 2 and lines.row(1)["task_id"] == text


@pytest.mark.parametrize("line", [{}, {"turns": 1}, {"turns": [1]}, {"conversations": 3}])
def test_what_is_no_trajectory_has_no_row(line):
    assert row_of(line) is None
