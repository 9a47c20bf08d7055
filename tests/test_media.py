"""Pictures of states lie beside the trajectories, once each; the tokenizer lies in the run."""

import base64
import json

import pytest
from fastapi.testclient import TestClient
from made_run import START, play

from chat import ChatTemplate
from envs import load_tasks
from models import load_tokenizer
from run.media import put_pictures_beside
from run.rundir import Run
from trajectory import Trajectory, Turn
from viewer.export import export
from viewer.server import create_app
from viewer.sources import RunSource, open_source

PICTURE = base64.b64encode(b"\x89PNG\r\n\x1a\n a picture").decode()
ADDRESS = f"data:image/png;base64,{PICTURE}"


def trajectory_with(*states):
    t = Trajectory("t", 0, "w", "w_0", "", 0, 0, 1)
    t.first_state, *rest = states
    t.turns = [Turn((0, 1), "a", state=state) for state in rest]
    return t


def test_a_picture_is_one_file_however_many_turns_show_it(tmp_path):
    other = base64.b64encode(b"another").decode()
    states = ({"screenshot": ADDRESS}, {"parts": [ADDRESS, {"x": 1}]}, None)
    t = trajectory_with(*states, {"screenshot": f"data:image/jpeg;base64,{other}"})
    put_pictures_beside(t, tmp_path)
    name = t.first_state["screenshot"]
    assert t.turns[0].state == {"parts": [name, {"x": 1}]} and t.turns[1].state is None
    assert (tmp_path / name).read_bytes() == base64.b64decode(PICTURE)
    files = sorted(path.suffix for path in (tmp_path / "media").iterdir())
    assert files == [".jpeg", ".png"]


@pytest.mark.parametrize(
    "text", ["data:image/svg+xml;base64,AAAA", "data:image/png;base64,!", "see data:image/png", ""]
)
def test_what_is_no_picture_stays_text(tmp_path, text):
    t = trajectory_with({"goal": text})
    put_pictures_beside(t, tmp_path)
    assert t.first_state == {"goal": text} and not (tmp_path / "media").exists()


def test_a_runs_trajectories_are_written_with_their_pictures_beside(tmp_path):
    run = Run(tmp_path, is_new=True)
    run.write_trajectories("step_000001", [trajectory_with({"screenshot": ADDRESS})])
    line = json.loads((tmp_path / "trajectories/step_000001.jsonl").read_text())
    assert (tmp_path / "trajectories" / line["first_state"]["screenshot"]).is_file()
    run.close()


def test_an_export_carries_the_pictures_and_the_server_has_them(tmp_path):
    (tmp_path / "run").mkdir()
    run = Run(tmp_path / "run", is_new=True)
    run.write_trajectories("step_000001", [trajectory_with({"screenshot": ADDRESS}, None)])
    run.close()
    source = open_source(0, tmp_path / "run")
    export([source], tmp_path / "page.html", None, 200)
    assert ADDRESS in (tmp_path / "page.html").read_text()
    client = TestClient(create_app([source]), base_url="http://localhost")
    shown = client.get("/api/trajectory/0/step_000001/0").json()
    picture = client.get(f"/{shown['first_state']['screenshot']}")
    assert picture.content == base64.b64decode(PICTURE)


def test_the_tokenizer_in_a_run_gives_each_token_its_text(tmp_path):
    tokenizer = load_tokenizer(str(START))
    run = Run(tmp_path, is_new=True)
    run.keep_tokenizer(tokenizer)
    run.keep_tokenizer(None)  # it is there: nothing is asked of it
    run.close()
    task = load_tasks("textcraft", "test")[0]
    t = play(ChatTemplate(tokenizer), task, step=1, group=0, sample=0, turns=3)
    texts = RunSource(0, tmp_path).text_of(t.input_ids)
    assert "".join(texts) == tokenizer.decode(t.input_ids)
    start, end = t.turns[0].action_span
    assert "".join(texts[start:end]).startswith(t.turns[0].action_text)
