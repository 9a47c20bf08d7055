"""viewer/play.py: recorded episodes that are re-enacted, and episodes that a person plays."""

import json
import sys

import pytest
from made_run import PLAYED
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


def recorded_lines(env):
    return [json.loads(line) for line in (PLAYED / f"{env}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "env", ["textcraft", "babyai", pytest.param("sciworld", marks=pytest.mark.long)]
)
def test_fifty_re_enacted_episodes_have_the_recorded_observations(environments, env):
    if package := {"babyai": "minigrid", "sciworld": "scienceworld"}.get(env):
        pytest.importorskip(package)
    lines = recorded_lines(env)
    assert len(lines) == 50 and sum(len(line["turns"]) for line in lines) > 2 * 50
    for line in lines:
        result = reenact(environments, line, None)
        assert result["first_difference"] is None, line["trajectory_id"]
        assert len(result["states"]) == len(line["turns"]) and result["first_state"]


def test_re_enacting_stops_at_the_first_difference_and_at_a_turn_cut_by_the_token_budget(
    environments,
):
    line = recorded_lines("textcraft")[0] | {"stop_reason": "length"}
    line["turns"][-1]["observation_text"] = ""  # the last turn was never played
    result = reenact(environments, line, None)
    assert result["first_difference"] is None and len(result["states"]) == len(line["turns"]) - 1
    other_seed = reenact(environments, line | {"seed": 1}, None)  # other distractors
    assert other_seed["first_difference"]["turn"] == 0
    line["turns"][1]["observation_text"] = "You win."
    result = reenact(environments, line, None)
    difference = result["first_difference"]
    assert (difference["turn"], difference["then"], len(result["states"])) == (2, "You win.", 2)
    line["messages"][1]["content"] = "another goal"
    result = reenact(environments, line, None)
    assert result["first_difference"]["turn"] == 0 and result["states"] == []


def test_a_plan_or_a_reflection_is_not_played_again(environments):
    line = recorded_lines("textcraft")[0]
    line["turns"][0]["kind"] = "plan"
    with pytest.raises(PlayError, match="these turns are plans, reflections or actions"):
        reenact(environments, line, None)


def test_a_file_cannot_choose_which_module_is_imported(environments):
    line = recorded_lines("textcraft")[0]
    for env, task_id in (("textcraft", "textcraft_99999999"), ("this:Zen", "this:Zen_3")):
        with pytest.raises(PlayError):
            reenact(environments, line | {"env": env, "task_id": task_id}, None)
    assert "this" not in sys.modules


def test_the_default_task_of_the_page_can_be_played(environments, tmp_path, bm25s):
    """In SearchQA the first indices are questions that are not always installed."""
    play = Play(environments, tmp_path)
    (fields,) = [e for e in play.list_environments()["worlds"] if e["env"] == "searchqa"]
    assert play.new("searchqa", fields["first"])["observation"]


class Model:
    """A chat model that always gives the same answer."""

    model = "echo"

    def complete(self, messages, max_tokens, temperature, seed):
        assert messages[-1]["role"] == "user"
        return "Thought: let me see.\nAction: inventory"


def test_a_person_the_oracle_and_a_model_play_an_episode_that_is_saved_and_re_enacted(
    environments, tmp_path
):
    play = Play(environments, tmp_path, Model())  # type: ignore[arg-type]
    client = client_of(PLAYED / "textcraft.jsonl", play=play)

    def ask(command, status=200, **body):
        response = client.post(f"/api/play/{command}", json=body)
        assert response.status_code == status, response.text
        return response.json()

    answer = ask("worlds")
    assert answer["model"] == "echo" and {"textcraft"} <= {w["env"] for w in answer["worlds"]}
    game = ask("new", env="textcraft", task_index=3)
    session = game["session"]
    assert game["turns"] == [] and not game["done"] and "inventory" in game["available"]
    game = ask("step", session=session, action="inventory")
    assert game["turns"][0]["action"] == "inventory" and game["state"]["num_turns"] == 1
    game = ask("model", session=session)
    assert game["turns"][1]["thought"] == "let me see."
    while not game["done"]:
        game = ask("step", session=session, action=ask("oracle", session=session)["action"])
    assert game["success"] and game["reward"] == 1.0 and game["available"] is None
    assert "has ended" in ask("step", 409, session=session, action="look")["error"]
    path = tmp_path / "played.jsonl"
    assert ask("save", session=session) == {"path": str(path)}
    t = from_line(json.loads(path.read_text()))
    assert t.success and t.first_state and t.turns[0].state and t.turns[-1].reward == 1.0
    line = open_source(0, path).lines("played").read(0)
    assert reenact(environments, line, None)["first_difference"] is None
    assert "is closed" in ask("oracle", 409, session=session)["error"]
    ask("new", 409, env="textcraft", task_index=10**9)
    play.model = None
    assert "--api-base" in ask("model", 409, session=session)["error"]
    assert client.post("/api/reenact/0/textcraft/4").json()["first_difference"] is None
    assert client.post("/api/reenact/0/textcraft/999").status_code == 404


def test_an_environment_whose_server_died_is_started_again(environments, tmp_path, monkeypatch):
    def all_down(pool):
        raise AllServersDown("no server answers", "http://127.0.0.1:1")

    play = Play(environments, tmp_path)
    play.new("textcraft", 3)
    with monkeypatch.context() as patch:
        patch.setattr("envclient.EnvPool.client", all_down)
        with pytest.raises(PlayError, match="try again"):
            play.new("textcraft", 3)
    assert play.new("textcraft", 3)["turns"] == []
