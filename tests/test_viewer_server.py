"""What replay.py's server answers: sources, overview, lists, one trajectory, search; and whom it
refuses. The export holds the same answers in one file."""

import json
import shutil

import pytest
from fastapi.testclient import TestClient
from made_run import HOSTILE, add_step, append, hostile_line, make_run

from trajectory import from_line
from viewer.export import bundle, export
from viewer.server import create_app, page_files
from viewer.sources import NoSource, open_source

HOST = "127.0.0.1:8610"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("run") / "made")


@pytest.fixture
def run(made, tmp_path):
    return shutil.copytree(made, tmp_path / "run")


def client_of(*paths, **options):
    sources = [open_source(n, path) for n, path in enumerate(paths)]
    app = create_app(sources, **options)
    client = TestClient(app, base_url=f"http://{HOST}", raise_server_exceptions=False)
    client.token = app.state.token
    return client


def ask(client, path, status=200):
    response = client.get(f"/api/{path}")
    assert response.status_code == status, response.text
    return response.json()


# ------------------------------------------------------------------------------------- what it says


def test_sources_list_their_files_in_order(run):
    (source,) = ask(client_of(run), "sources")["sources"]
    names = [file["name"] for file in source["files"]]
    assert names == ["eval_000000", "step_000001", "step_000002", "eval_000003", "step_000003"]
    assert source["kind"] == "run" and source["env"] == "textcraft"
    assert [file["step"] for file in source["files"]] == [0, 1, 2, 3, 3]
    assert [(f["count"], f["broken"]) for f in source["files"]] == [(n, 0) for n in (6, 6, 6, 6, 7)]


def test_the_overview_has_every_metric_with_its_sentence(run):
    found = ask(client_of(run), "overview/0")
    assert found["series"]["train/success_rate"][0][0] == 1
    assert found["series"].keys() == found["glossary"].keys()
    assert "policy/loss" not in found["series"]  # never finite
    assert found["horizons"] == [[1, 3], [2, 4], [3, 5]]
    assert found["phases"]["rollout"] == [[1, 2.0], [2, 2.0], [3, 2.0]]
    assert [e["step"] for e in found["evaluations"]] == [0, 3]
    assert "held-out tasks solved at step 3" in found["headline"][0]
    assert any("1 trajectories were lost" in sentence for sentence in found["headline"])


def test_alarms_are_those_the_run_has_kept_or_else_what_the_sentinels_say(run):
    for step in range(4, 40):
        append(run / "metrics.jsonl", {"step": step, "policy/entropy": 0.4 if step < 20 else 1e-6})
    alarms = ask(client_of(run), "overview/0")["alarms"]
    assert {alarm["name"] for alarm in alarms} == {"entropy_floor"} and alarms[0]["step"] >= 20
    kept = {"step": 0, "severity": "warn", "name": "held_out", "text": "step 0: held_out: so"}
    append(run / "alarms.jsonl", kept)
    append(run / "alarms.jsonl", {"step": 1, "name": "of a later version"})
    assert ask(client_of(run), "overview/0")["alarms"] == [kept]


def test_lists_are_filtered_and_sorted_by_the_heads(run):
    client = client_of(run)
    whole = ask(client, "list/0/step_000003")
    assert whole["total"] == whole["matching"] == 7 and whole["broken"] == 0
    for query, keeps in (
        ("outcome=solved", lambda r: r["success"]),
        ("outcome=lost", lambda r: r["stop_reason"] == "env_error"),
        ("min_turns=2&max_turns=3", lambda r: 2 <= r["num_turns"] <= 3),
        ("task=CRAFT_0", lambda r: r["task_id"] == "textcraft_0"),
        ("min_return=0.5", lambda r: r["return"] >= 0.5),
        ("parse_errors=1", lambda r: r["parse_errors"]),
        ("stop_reason=max_rounds&subtask=nothing", lambda r: False),
    ):
        found = ask(client, f"list/0/step_000003?{query}")["rows"]
        assert found == [row for row in whole["rows"] if keeps(row)], query
    turns = [r["num_turns"] for r in ask(client, "list/0/step_000003?sort=-num_turns")["rows"]]
    assert turns == sorted(turns, reverse=True) and len(set(turns)) > 1
    page = ask(client, "list/0/step_000003?offset=5&limit=10")
    assert page["matching"] == 7 and page["rows"] == whole["rows"][5:]
    ask(client, "list/0/step_000003?sort=password", 400)
    ask(client, "list/0/step_000003?min_return=abc", 400)


def test_a_trajectory_is_shown_token_by_token_as_its_file_has_it(run):
    client = client_of(run)
    found = ask(client, "trajectory/0/step_000003/1")
    line = json.loads((run / "trajectories/step_000003.jsonl").read_text().splitlines()[1])
    pieces = [found["opening_tokens"]]
    for turn in found["turns"]:
        pieces += [turn["action_tokens"], turn["observation_tokens"]]
    for name, column in (
        ("ids", "input_ids"),
        ("mask", "loss_mask"),
        ("log_prob", "rollout_log_probs"),
        ("advantage", "advantages"),
    ):
        assert [value for piece in pieces for value in piece[name]] == line[column]
    for turn, recorded in zip(found["turns"], line["turns"], strict=True):
        assert all(turn["action_tokens"]["mask"])
        assert "".join(turn["action_tokens"]["text"]).startswith("Thought:")
        assert turn["state"] == recorded["state"] and turn["thought"] and turn["action"]
    assert found["opening"] == line["messages"][:2] and found["first_state"]["goal"]
    assert [row["line"] for row in found["group"]] == [0, 1, 2]
    assert found["parts_at"] == {"0": 1, "2": 2}  # none, one, two turns wasted at the beginning
    assert (found["previous"], found["next"], found["can_reenact"]) == (0, 2, True)
    assert found["command"] == f"python -m envs.textcraft --task-index {line['task_id'][10:]}"
    said = [turn["value"] for turn in found["agenttraj"]["conversations"]]
    assert said == [message["content"] for message in line["messages"]]


def test_without_a_tokenizer_there_are_ids_and_without_tokens_nothing(run):
    shutil.rmtree(run / "tokenizer")
    tokens = ask(client_of(run), "trajectory/0/step_000003/1")["opening_tokens"]
    assert tokens["text"] is None and len(tokens["ids"]) > 10
    path = run / "trajectories/step_000001.jsonl"
    line = json.loads(path.read_text().splitlines()[0])
    line |= dict.fromkeys(("input_ids", "loss_mask", "rollout_log_probs", "advantages"))
    for turn in line["turns"]:
        turn["action_span"] = None
    path.write_text(json.dumps(line) + "\n")
    found = ask(client_of(run), "trajectory/0/step_000001/0")
    assert found["opening_tokens"] is None and found["turns"][0]["action_tokens"] is None


def test_a_trajectory_that_was_lost_before_its_first_turn_says_why(run):
    found = ask(client_of(run), "trajectory/0/step_000003/6")
    assert found["turns"] == [] and found["opening"] == [] and not found["can_reenact"]
    assert "connection refused" in found["row"]["error"]


def test_what_goes_wrong_counts_the_failures_and_leads_to_them(run):
    found = ask(client_of(run), "wrong/0/step_000001")
    rows = ask(client_of(run), "list/0/step_000001?outcome=failed")["rows"]
    assert found["failures"] == len(rows) > 0 and found["episodes"] == 6
    assert ask(client_of(run), "wrong/0/step_000003")["episodes"] == 6  # of seven: one was lost
    assert found["stops"] == [
        {"text": "max_rounds", "count": len(rows), "lines": [row["line"] for row in rows]}
    ]
    again = {entry["text"]: entry for entry in found["repeated"]}
    assert again["inventory"]["count"] >= 1  # by the samples that waste two turns


def test_a_search_finds_what_was_said_where_and_says_how_far_it_is(run):
    client = client_of(run)
    response = client.get("/api/search/0", params={"text": "INVENTORY"})
    told = [json.loads(line) for line in response.text.splitlines()]
    hits = [one["hit"] for one in told if "hit" in one]
    assert told[-1] == {"done": True, "hits": len(hits), "cut": False}
    assert {hit["turn"] for hit in hits} <= {0, 1} and "inventory" in hits[0]["excerpt"]
    for hit in hits[:3]:
        turns = ask(client, f"trajectory/0/{hit['file']}/{hit['line']}")["turns"]
        assert hit["turn"] == 0 or "inventory" in turns[hit["turn"] - 1]["action_text"].lower()
    nothing = client.get("/api/search/0", params={"text": "zzzz"}).text.splitlines()
    assert json.loads(nothing[-1]) == {"done": True, "hits": 0, "cut": False}


def test_quotes_and_other_letters_are_found_although_json_writes_them_otherwise(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text(hostile_line(0, 'say "héllo"\nagain'))
    client = client_of(path)
    for text in ('"hÉllo"', 'O"\nagain', 'say "'):
        told = client.get("/api/search/0", params={"text": text.strip()}).text.splitlines()
        assert json.loads(told[-1])["hits"] == 1, text


def test_a_run_that_grows_has_a_new_version_and_what_came(run):
    client = client_of(run)
    before = ask(client, "version")["version"]
    assert ask(client, "version")["version"] == before
    line = open_source(0, run).lines("step_000001").read(0)
    append(run / "trajectories/step_000003.jsonl", line | {"task_id": "textcraft_999"})
    assert ask(client, "version")["version"] == before + 1
    assert ask(client, "list/0/step_000003")["total"] == 8
    add_step(run, 4, [from_line(line)])
    assert ask(client, "version")["version"] == before + 2
    assert ask(client, "sources")["sources"][0]["files"][-1]["name"] == "step_000004"


def test_an_evaluation_and_plain_files_are_sources_too_and_their_options_are_compared(
    run, tmp_path
):
    folder = tmp_path / "evaluation"
    folder.mkdir()
    shutil.copy(run / "trajectories/eval_000003.jsonl", folder / "trajectories.jsonl")
    shutil.copy(run / "eval/step_000003.json", folder / "eval.json")
    (folder / "config.json").write_text(json.dumps({"seed": 3, "out": "elsewhere"}))
    client = client_of(folder, run / "trajectories/step_000001.jsonl")
    first, second = ask(client, "sources")["sources"]
    assert ask(client, "sources")["differing"] == {"seed": [3, None]}
    assert (first["kind"], second["kind"]) == ("evaluation", "file")
    assert ask(client, "overview/0")["evaluations"][0]["overall"]["items"] == 3
    assert ask(client, "overview/1")["series"] == {}
    assert ask(client, "list/1/step_000001")["total"] == 6


def test_hostile_text_is_answered_as_it_is(tmp_path):
    path = tmp_path / "hostile.jsonl"
    path.write_text("".join(hostile_line(n, text) for n, text in enumerate(HOSTILE)))
    client = client_of(path)
    for row, text in zip(ask(client, "list/0/hostile")["rows"], HOSTILE, strict=True):
        assert row["task_id"] == row["subtask"] == row["error"] == text
        shown = ask(client, f"trajectory/0/hostile/{row['line']}")
        assert shown["turns"][0]["state"]["goal"] == text
    assert ask(client, "wrong/0/hostile")["failures"] == len(HOSTILE)
    assert len(ask(client, "groups/0/hostile")["groups"]) == len(HOSTILE)


# ---------------------------------------------------------------------------------- whom it refuses


def test_nothing_that_a_page_sends_is_a_path(run):
    client = client_of(run)
    for name in ("..%2fconfig.json", "%2fetc%2fpasswd", "nothing", "step_000001.jsonl"):
        assert client.get(f"/api/list/0/{name}").status_code == 404
        assert client.get(f"/page/{name}").status_code == 404
    for path in ("api/overview/1", "api/overview/-1", "api/trajectory/0/step_000001/99"):
        assert client.get(f"/{path}").status_code in (404, 422)


def test_only_its_own_page_is_answered(run):
    client = client_of(run)
    assert "script-src 'self'" in client.get("/nothing").headers["content-security-policy"]
    for host in ("evil.example:8610", "127.0.0.1.evil.example", "x127.0.0.1:80", ""):
        assert client.get("/api/sources", headers={"Host": host}).status_code == 403
    for host in ("127.0.0.1:9000", "localhost", "LOCALHOST:80"):  # behind a tunnel
        assert client.get("/api/sources", headers={"Host": host}).status_code == 200
    other = {"Origin": "http://evil.example"}
    assert client.get("/api/sources", headers=other).status_code == 403
    assert client.get("/api/sources", headers={"Origin": f"http://{HOST}"}).status_code == 200
    body = {"source": 0, "file": "step_000001", "line": 0}
    assert client.post("/api/reenact", json=body).status_code == 403
    wrong = {"X-Replay-Token": "guess"}
    assert client.post("/api/reenact", json=body, headers=wrong).status_code == 403
    right = {"X-Replay-Token": client.token}
    assert client.post("/api/reenact", json=body, headers=right).status_code == 404  # no play
    assert client.post("/api/reenact", json=body, headers=right | other).status_code == 403


# -------------------------------------------------------------------------------------- the export


def test_an_export_holds_the_newest_groups_whole_and_refuses_to_grow_without_end(run, tmp_path):
    out = tmp_path / "page.html"
    size = export([open_source(0, run)], out, 4, 200)
    assert size == out.stat().st_size
    data = out.read_text().partition('id="replay-data">')[2].partition("</script>")[0]
    answers = json.loads(data)
    lines = sorted(path for path in answers if path.startswith("trajectory/"))
    assert lines == [f"trajectory/0/step_000003/{n}" for n in range(6)]  # two groups of three
    (file,) = answers["sources"]["sources"][0]["files"]
    assert (file["name"], file["count"]) == ("step_000003", 6)
    assert answers["trajectory/0/step_000003/5"]["next"] is None
    out.unlink()
    with pytest.raises(NoSource, match="give --limit N"):
        export([open_source(0, run)], out, None, 0)
    assert not out.exists()


def test_every_module_of_the_page_is_in_the_bundle():
    script = bundle("app.js")
    assert script.isascii()
    for name in page_files():
        assert not name.endswith(".js") or f'MODULES["{name}"] = ' in script, name
