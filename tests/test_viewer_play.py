"""Live environments: recorded episodes played again, and play by hand."""

import json
import sys

import pytest
from played import COUNT, FOLDER
from test_viewer_server import client_of

from envclient import AllServersDown
from trajectory import from_line
from viewer.play import Environments, Play, PlayError, reenact
from viewer.sources import open_source


@pytest.fixture(scope="module")
def environments():
    environments = Environments()
    yield environments
    environments.close()


def recorded(env):
    return [json.loads(line) for line in (FOLDER / f"{env}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "env", ["textcraft", "babyai", pytest.param("sciworld", marks=pytest.mark.long)]
)
def test_fifty_recorded_episodes_played_again_say_the_same(environments, env):
    if package := {"babyai": "minigrid", "sciworld": "scienceworld"}.get(env):
        pytest.importorskip(package)
    lines = recorded(env)
    assert len(lines) == COUNT and sum(len(line["turns"]) for line in lines) > 2 * COUNT
    for line in lines:
        found = reenact(environments, line, None)
        assert found["same"], (line["trajectory_id"], found["first_difference"])
        assert len(found["states"]) == len(line["turns"]) and found["first_state"]


def test_where_the_world_says_something_else_it_stops_and_says_so(environments):
    line = recorded("textcraft")[0]
    line["turns"][1]["observation_text"] = "You win."
    found = reenact(environments, line, None)
    assert not found["same"] and len(found["states"]) == 2
    assert (found["first_difference"]["turn"], found["first_difference"]["then"]) == (2, "You win.")
    line["messages"][1]["content"] = "another goal"
    found = reenact(environments, line, None)
    assert found["first_difference"]["turn"] == 0 and found["states"] == []


def test_a_turn_that_the_budget_cut_was_never_played(environments):
    line = recorded("textcraft")[0] | {"stop_reason": "length"}
    line["turns"][-1]["observation_text"] = ""
    found = reenact(environments, line, None)
    assert found["same"] and len(found["states"]) == len(line["turns"]) - 1


@pytest.mark.parametrize(
    ("env", "task_id"),
    [("textcraft", ""), ("textcraft", "textcraft_99999999"), ("this:Zen", "this:Zen_3")],
)
def test_an_unknown_task_is_refused_and_a_file_does_not_decide_what_is_imported(
    environments, env, task_id
):
    with pytest.raises(PlayError):
        reenact(environments, recorded("textcraft")[0] | {"env": env, "task_id": task_id}, None)
    assert "this" not in sys.modules


@pytest.mark.parametrize(("env", "package"), [("textcraft", None), ("searchqa", "bm25s")])
def test_the_task_that_the_page_proposes_can_be_played(environments, tmp_path, env, package):
    """Of SearchQA the first indices are questions that a user may not have."""
    if package:
        pytest.importorskip(package)
    play = Play(environments, tmp_path)
    (about,) = [world for world in play.list_environments()["worlds"] if world["env"] == env]
    assert 0 <= about["first"] <= about["last"] and about["tasks"] > 50
    assert play.new(env, about["first"])["observation"]


class Model:
    """A chat server that always says the same."""

    model = "echo"

    def complete(self, messages, max_tokens, temperature, seed):
        assert messages[-1]["role"] == "user"
        return "Thought: let me see.\nAction: inventory"


def test_a_goal_is_played_by_hand_by_the_oracle_and_by_a_model_and_kept(environments, tmp_path):
    run = tmp_path / "a.jsonl"
    run.write_text((FOLDER / "textcraft.jsonl").read_text())
    play = Play(environments, tmp_path / "out", Model())  # type: ignore[arg-type]
    client = client_of(run, play=play)
    client.headers["X-Replay-Token"] = client.token

    def ask(what, status=200, **body):
        response = client.post(f"/api/play/{what}", json=body)
        assert response.status_code == status, response.text
        return response.json()

    listed = ask("worlds")
    assert listed["model"] == "echo" and {"textcraft"} <= {w["env"] for w in listed["worlds"]}
    at = ask("new", env="textcraft", task_index=3)
    name = at["session"]
    assert at["turns"] == [] and not at["done"] and "inventory" in at["available"]
    at = ask("step", session=name, action="inventory")
    assert at["turns"][0]["action"] == "inventory" and at["state"]["num_turns"] == 1
    at = ask("model", session=name)
    assert at["turns"][1]["thought"] == "let me see."
    while not at["done"]:
        at = ask("step", session=name, action=ask("oracle", session=name)["action"])
    assert at["success"] and at["reward"] == 1.0 and at["available"] is None
    assert "has ended" in ask("step", 409, session=name, action="look")["error"]
    path = tmp_path / "out" / "played.jsonl"
    assert ask("save", session=name) == {"path": str(path)}
    t = from_line(json.loads(path.read_text()))
    assert t.success and t.first_state and t.turns[0].state and t.turns[-1].reward == 1.0
    source = open_source(0, path)
    assert reenact(environments, source.lines("played").read(0), None)["same"]
    assert "is closed" in ask("oracle", 409, session=name)["error"]
    assert "not one of the environments" in ask("new", 409, env="chess", task_index=0)["error"]
    ask("new", 409, env="textcraft", task_index=10**9)
    ask("new", 400, env="textcraft", task_index=-1)
    ask("nothing", 404)


def test_an_environment_whose_server_died_is_started_anew(environments, tmp_path, monkeypatch):
    def none_left(pool):
        raise AllServersDown("no server answers", "http://127.0.0.1:1")

    play = Play(environments, tmp_path)
    play.new("textcraft", 3)
    with monkeypatch.context() as patch:
        patch.setattr("envclient.EnvPool.client", none_left)
        with pytest.raises(PlayError, match="try again"):
            play.new("textcraft", 3)
    assert play.new("textcraft", 3)["turns"] == []


def test_the_page_can_have_an_episode_played_again(environments, tmp_path):
    client = client_of(FOLDER / "textcraft.jsonl", play=Play(environments, tmp_path / "out"))
    client.headers["X-Replay-Token"] = client.token
    body = {"source": 0, "file": "textcraft", "line": 4}
    assert client.post("/api/reenact", json=body).json()["same"]
    assert client.post("/api/reenact", json=body | {"line": 999}).status_code == 404
    assert client.post("/api/reenact", json=body | {"line": "x"}).status_code == 400
    no_model = client.post("/api/play/model", json={"session": "x"})
    assert "--api-base" in no_model.json()["error"]
