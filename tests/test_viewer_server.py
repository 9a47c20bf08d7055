"""viewer/server.py and viewer/export.py: sources, overview, lists, one trajectory, search, and
requests that are refused."""

import json
import os
import re
import shutil
from pathlib import Path

import pytest
from fastapi.testclient import TestClient
from made_run import append, hostile_line

from viewer.export import export, keep_newest
from viewer.overview import headline
from viewer.server import create_app
from viewer.sources import NoSource, open_source

HOST, TOKEN = "127.0.0.1:8610", "0123456789abcdef"


@pytest.fixture
def run(made_run, tmp_path):
    return shutil.copytree(made_run, tmp_path / "run")


def client_of(*paths, **options):
    sources = [open_source(n, path) for n, path in enumerate(paths)]
    app = create_app(sources, TOKEN, **options)
    client = TestClient(app, base_url=f"http://{HOST}", raise_server_exceptions=False)
    assert client.get("/", params={"token": TOKEN}).status_code == 200  # sets the cookie
    return client


def ask(client, path, status=200):
    response = client.get(f"/api/{path}")
    assert response.status_code == status, response.text
    return response.json()


def test_sources_list_their_files_in_order_and_the_overview_has_every_metric(run):
    client = client_of(run)
    (source,) = ask(client, "sources")["sources"]
    names = [file["name"] for file in source["files"]]
    assert names == ["eval_000000", "step_000001", "step_000002", "eval_000003", "step_000003"]
    assert source["kind"] == "run" and [file["step"] for file in source["files"]] == [0, 1, 2, 3, 3]
    assert [(f["count"], f["broken"]) for f in source["files"]] == [(n, 0) for n in (6, 6, 6, 6, 7)]
    rows = ask(client, "list/0/step_000003")["rows"]
    groups = ask(client, "groups/0/step_000003")["groups"]
    assert [group["rows"] for group in groups] == [rows[:3], rows[3:6], rows[6:]]
    overview = ask(client, "overview/0")
    assert overview["series"]["train/success_rate"][0][0] == 1
    assert overview["series"].keys() == overview["glossary"].keys()
    assert "policy/loss" not in overview["series"]  # it is never finite
    assert [e["step"] for e in overview["evaluations"]] == [0, 3] and overview["alarms"] == []
    assert "held-out tasks solved at step 3" in overview["headline"][0]
    alarm = {"step": 0, "severity": "warn", "name": "held_out", "text": "step 0: held_out: so"}
    append(run / "alarms.jsonl", alarm)
    assert ask(client_of(run), "overview/0")["alarms"] == [alarm]
    rows = [json.dumps({"step": i, "train/success_rate": 1.7e308}) for i in range(1, 11)]
    (run / "metrics.jsonl").write_text("\n".join(rows))
    assert "inf %" in " ".join(ask(client_of(run), "overview/0")["headline"])


def test_a_trajectory_has_the_tokens_and_numbers_of_its_file(run):
    view = ask(client_of(run), "trajectory/0/step_000003/1")
    line = json.loads((run / "trajectories/step_000003.jsonl").read_text().splitlines()[1])
    pieces = [view["opening_tokens"]]
    for turn, recorded in zip(view["turns"], line["turns"], strict=True):
        assert all(turn["action_tokens"]["mask"])
        assert "".join(turn["action_tokens"]["text"]).startswith("Thought:")
        assert turn["state"] == recorded["state"] and turn["thought"] and turn["action"]
        pieces += [turn["action_tokens"], turn["observation_tokens"]]
    for name, column in (
        ("ids", "input_ids"),
        ("mask", "loss_mask"),
        ("log_prob", "rollout_log_probs"),
        ("advantage", "advantages"),
    ):
        assert [value for piece in pieces for value in piece[name]] == line[column]
    assert view["opening"] == line["messages"][:2] and view["first_state"]["goal"]
    assert [row["line"] for row in view["group"]] == [0, 1, 2]
    assert view["parts_at"] == {"0": 1, "2": 2}  # samples waste 0, 1 and 2 turns at the start
    assert (view["previous"], view["next"], view["can_reenact"]) == (0, 2, True)
    assert view["command"] == f"python -m envs.textcraft --task-index {line['task_id'][10:]}"
    texts = [turn["value"] for turn in view["agenttraj"]["conversations"]]
    assert texts == [message["content"] for message in line["messages"]]


def test_a_trajectory_lost_before_its_first_turn_has_an_error_and_is_not_a_failure(run):
    client = client_of(run)
    view = ask(client, "trajectory/0/step_000003/6")
    assert view["turns"] == [] and view["opening"] == [] and not view["can_reenact"]
    assert "connection refused" in view["row"]["error"]
    assert ask(client, "wrong/0/step_000003")["episodes"] == 6
    summary = ask(client, "wrong/0/step_000001")
    lines = [r["line"] for r in ask(client, "list/0/step_000001")["rows"] if r["success"] is False]
    assert summary["failures"] == len(lines) > 0
    assert summary["stops"] == [{"text": "max_rounds", "count": len(lines), "lines": lines}]
    assert "inventory" in {entry["text"] for entry in summary["repeated"]}
    turns = [ask(client, f"trajectory/0/step_000001/{line}")["turns"] for line in lines]
    last_texts = {failed[-1]["observation_text"].strip() for failed in turns}
    assert {entry["text"] for entry in summary["observations"]} == last_texts


def test_the_headline_compares_the_last_success_with_the_first_and_the_best():
    scores = {0: 0.2, 5: 0.8, 10: 0.5}
    evaluations = [{"step": n, "overall": {"value": x, "items": 9}} for n, x in scores.items()]
    series = {"train/success_rate": [(n, n / 10) for n in range(1, 11)]}
    held_out, training = headline(series, evaluations, [])
    assert re.findall(r"\d+ %", held_out) == ["50 %", "20 %", "80 %"] and "at step 5." in held_out
    assert re.findall(r"\d+ %", training) == ["30 %", "80 %"]


def test_a_search_finds_texts_and_their_turns(run, tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(hostile_line(0, 'say "héllo"\nagain'))
    client = client_of(run, path)

    def hits(source, text):
        response = client.get(f"/api/search/{source}", params={"text": text})
        *events, last = map(json.loads, response.text.splitlines())
        hits = [event["hit"] for event in events if "hit" in event]
        assert last == {"done": True, "hits": len(hits), "cut": False}
        return hits

    hit = hits(0, "ACTION: INVENTORY")[0]
    turns = ask(client, f"trajectory/0/{hit['file']}/{hit['line']}")["turns"]
    assert turns[hit["turn"] - 1]["action"] == "inventory" and "inventory" in hit["excerpt"]
    assert hits(0, "zzzz") == [] and hits(0, "items that")[0]["turn"] == 0  # before the first turn
    for text in ('"hÉllo"', 'O"\nagain', "say"):  # JSON escapes the first two
        assert len(hits(1, text)) == 1, text
    view = ask(client, "trajectory/1/a/0")
    assert view["opening_tokens"] is None and view["turns"][0]["action_tokens"] is None


def test_evaluations_and_plain_files_are_sources_and_their_options_are_compared(run, tmp_path):
    folder = tmp_path / "evaluation"
    folder.mkdir()
    shutil.copy(run / "trajectories/eval_000003.jsonl", folder / "trajectories.jsonl")
    shutil.copy(run / "eval/step_000003.json", folder / "eval.json")
    (folder / "config.json").write_text(json.dumps({"seed": 3, "out": "elsewhere"}))
    client = client_of(folder, run / "trajectories/step_000001.jsonl")
    site = ask(client, "sources")
    assert [source["kind"] for source in site["sources"]] == ["evaluation", "file"]
    assert site["differing"] == {"seed": [3, None]}
    assert ask(client, "overview/0")["evaluations"][0]["overall"]["items"] == 3
    assert ask(client, "overview/1")["series"] == {}
    # A single file uses the tokenizer of its run.
    assert ask(client, "trajectory/0/trajectories/0")["opening_tokens"]["text"] is None
    assert ask(client, "trajectory/1/step_000001/0")["opening_tokens"]["text"]


def test_the_page_cannot_request_a_path(run):
    client = client_of(run)
    for name in ("..%2fconfig.json", "%2fetc%2fpasswd", "step_000001.jsonl"):
        ask(client, f"list/0/{name}", 404)
        assert client.get(f"/page/{name}").status_code == 404
    for path in ("overview/1", "trajectory/0/step_000001/99"):
        ask(client, path, 404)


def test_only_the_page_itself_with_the_token_is_answered(run):
    client = client_of(run)
    browser = TestClient(client.app, base_url="http://localhost:9000")  # behind a tunnel
    for headers in ({}, {"Cookie": "replay-9000=x"}, {"Cookie": f"replay-8610={TOKEN}"}):
        for path in ("", "page/app.js", "api/sources", "nothing", "?token=", "?token=%C3%A9"):
            answer = browser.get(f"/{path}", headers=headers)
            assert answer.status_code == 403 and "address that replay.py printed" in answer.text
        assert browser.post("/api/play/worlds", headers=headers).status_code == 403
    cookie = browser.get("/", params={"token": TOKEN}).headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=lax" in cookie
    assert browser.get("/api/sources").status_code == 200
    assert "script-src 'self'" in client.get("/nothing").headers["content-security-policy"]
    for origin, status in (("http://evil.example", 403), ("null", 403), (f"http://{HOST}", 200)):
        assert client.get("/api/sources", headers={"Origin": origin}).status_code == status
        play_status = client.post("/api/play/worlds", headers={"Origin": origin}).status_code
        assert play_status == (404 if status == 200 else 403)  # this app has no live play


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "damaged"])
def test_only_regular_files_in_the_folder_of_a_run_are_read(run, tmp_path, kind):
    """A stranger's run could show this machine's files, in an export too, or block the page."""
    line = json.loads(hostile_line(0, "SECRET")) | {"config": {"env": "SECRET"}}
    (tmp_path / "secret").write_text(json.dumps(line) + "\n")
    make = {
        "link": lambda path: path.symlink_to(tmp_path / "secret"),
        "pipe": os.mkfifo,
        "folder": Path.mkdir,
        "damaged": lambda path: path.write_bytes(b'[1]\n{"step": [1], "time/rollout_s": 1}\n\xff'),
    }[kind]
    shutil.move(run / "eval", tmp_path / "linked")
    (run / "eval").symlink_to(tmp_path / "linked")
    names = ("config.json", "timings.jsonl", "alarms.jsonl", "tokenizer/tokenizer.json")
    for name in (*names, "trajectories/step_000004.jsonl"):
        (run / name).unlink(missing_ok=True)
        make(run / name)
    (run / "trajectories" / os.fsdecode(b"caf\xe9.jsonl")).write_text(hostile_line(0, "SECRET"))
    client = client_of(run)
    overview = ask(client, "overview/0")
    assert overview["step"] == 3 and not overview["evaluations"] and not overview["alarms"]
    assert overview["options"] == {} and "time/rollout_s" not in overview["series"]
    assert ask(client, "trajectory/0/step_000003/1")["opening_tokens"]["text"] is None
    export([open_source(0, run)], tmp_path / "page.html", None)
    assert "SECRET" not in (tmp_path / "page.html").read_text()


def test_an_export_contains_the_newest_complete_groups_and_its_size_is_limited(
    run, tmp_path, monkeypatch
):
    out = tmp_path / "page.html"
    assert export([open_source(0, run)], out, 3) == out.stat().st_size
    data = out.read_text().partition('id="replay-data">')[2].partition("</script>")[0]
    answers = json.loads(data)
    lines = sorted(path for path in answers if path.startswith("trajectory/"))
    assert lines == [f"trajectory/0/step_000003/{n}" for n in range(4)]  # the last two groups
    source = open_source(0, Path(__file__).parent / "data/played/textcraft.jsonl")
    keep_newest(source, 1)
    assert [row["trajectory_id"] for row in source.lines("textcraft").rows] == ["played-49"]
    (file,) = answers["sources"]["sources"][0]["files"]
    assert (file["name"], file["count"]) == ("step_000003", 4)
    assert answers["trajectory/0/step_000003/3"]["next"] is None
    out.unlink()
    monkeypatch.setattr("viewer.export.MAX_MEGABYTES", 0)
    with pytest.raises(NoSource, match="give --limit N"):
        export([open_source(0, run)], out, None)
    assert not out.exists()
