"""SearchQA over HTTP: AgentGym's client at our server, our client at AgentGym's."""

import json
import os

import pytest
from starlette.testclient import TestClient

if os.environ.get("CI") != "true":
    pytest.importorskip("bm25s", reason="NOT TESTED: make setup ENV=searchqa")

from envclient import StepOutsideEpisode, connect
from envs.http import Answer, Line
from envs.searchqa import SearchQA
from envs.searchqa.env import WRONG
from envs.searchqa.questions import FIRST_OWN, own_questions
from envs.searchqa.text import INSTRUCTIONS, INVALID, say
from envs.server import create_app

BRIDGE = FIRST_OWN + [question.kind for question in own_questions()].index("bridge")


def test_agentgyms_client_plays_whole_episodes_at_our_server():
    """It sends all that the policy wrote, and reads every prompt from /observation."""
    teacher = SearchQA()  # over the same corpus
    with TestClient(create_app("searchqa")) as http:
        assert http.get("/").json() == "ok"
        session = http.post("/create", json={"id": 0}).json()
        assert type(session) is int

        def post(path, **body):
            answer = http.post(path, json={"env_idx": session, **body})
            assert answer.status_code == 200, answer.text
            return answer.json()

        def observe():
            return http.get("/observation", params={"env_idx": session}).json()

        prompt = post("/reset", id=BRIDGE)
        question = teacher.reset(BRIDGE)
        assert prompt == observe() == f"{INSTRUCTIONS}\n\n{question}"
        answer = post("/step", action="I do not know.")
        assert answer["observation"].startswith(INVALID) and "info" in answer
        assert answer["reward"] == 0 and answer["done"] is False
        while not answer["done"]:
            thought, action = teacher.oracle()
            text = (
                f"<think>It is so.</think> {say(thought, action)} <answer> no </answer><|im_end|>"
            )
            answer = post("/step", action=text)
            assert answer["observation"] == observe() == teacher.step(text)[0]
            assert answer["reward"] == float(answer["done"])
        assert post("/reset", id=BRIDGE + 1) == observe()
        answer = post("/step", action="<answer> nobody </answer>")
        assert (answer["observation"], answer["reward"], answer["done"]) == (WRONG, 0, True)
        assert post("/close") is True and post("/close") is False


# ---- our client at a server that answers as AgentGym's does: bare answers, an answer that is wrong
# does not end the episode

PROMPT = "You must think first. Example: <answer> Beijing </answer>. \n\n Question: "


def of_step(observation, reward=0, done=False):
    return {"observation": observation, "reward": reward, "done": done, "info": None}


def test_our_client_plays_whole_episodes_at_agentgyms_server(monkeypatch):
    asked = []
    answers = {
        "/create": [0],
        "/reset": [f"{PROMPT}who won the war?", f"{PROMPT}What comes after Question: one?"],
        "/observation": [f"{PROMPT}who won the war?"],
        "/step": [
            of_step("<information>Doc 1(Title: T) war </information>"),
            of_step("Sorry, your answer is incorrect. Please try again."),
            of_step("Congratulations!", 1.0, True),
        ],
        "/close": [True],
    }

    def ask(line, method, path, content=None, headers=None, timeout_s=None):
        path = path.partition("?")[0]
        asked.append((path, json.loads(content or "null")))
        if path not in answers:
            return Answer(404, {}, b'{"detail": "Not Found"}')
        return Answer(200, {}, json.dumps(answers[path].pop(0)).encode())

    monkeypatch.setattr(Line, "ask", ask)
    with connect("searchqa", "http://127.0.0.1:9") as client:
        assert client.served_env() is None  # it has no /health
        assert client.reset(0) == "Question: who won the war?"
        assert client.observation() == f"{PROMPT}who won the war?"
        result = client.step("I look. <search>war</search> <answer> no </answer>")
        assert result.observation == "<information>Doc 1(Title: T) war </information>"
        assert result[1:4] == (0.0, False, False)
        assert client.step("<search>war").info["parse_error"].startswith(INVALID)
        wrong = client.step("<answer> somebody </answer>")
        assert wrong[1:4] == (0.0, False, False) and not wrong.info["success"]
        right = client.step("<answer> Nobody. </answer>")
        assert right[1:4] == (1.0, True, False) and right.info == {"success": True, "score": 1.0}
        with pytest.raises(StepOutsideEpisode):
            client.step("<answer> nobody </answer>")
        assert client.reset(1) == "Question: What comes after Question: one?"
        assert client.close() is True
    assert ("/create", {"id": 0}) in asked
    steps = [body["action"] for path, body in asked if path == "/step"]
    assert steps[0] == "<search> war </search>"
