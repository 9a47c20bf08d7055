"""SearchQA over HTTP: AgentGym's client at our server, our client at AgentGym's."""

import json
import os
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

if os.environ.get("CI") != "true":
    pytest.importorskip("bm25s", reason="NOT TESTED: make setup ENV=searchqa")

from envclient import StepOutsideEpisode, connect, local_server
from envs.searchqa import SearchQA
from envs.searchqa.env import WRONG
from envs.searchqa.questions import FIRST_OWN, own_questions
from envs.searchqa.text import INSTRUCTIONS, INVALID, exact_match, say

BRIDGE = FIRST_OWN + [question.kind for question in own_questions()].index("bridge")


@pytest.fixture(scope="module")
def server():
    with local_server("searchqa", max_sessions=64) as url:
        yield url


# ---- a client that knows nothing but AgentGym's format, at our server


class TheirClient:
    """What AgentGym's client of this world does: all that the policy wrote goes to the server, and
    every prompt comes from /observation."""

    def __init__(self, http):
        self.http = http
        self.env_idx = self.post("/create", id=0)
        assert isinstance(self.env_idx, int) and not isinstance(self.env_idx, bool)

    def post(self, path, **body):
        answer = self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def observe(self):
        answer = self.http.get("/observation", params={"env_idx": self.env_idx})
        assert answer.status_code == 200 and isinstance(answer.json(), str)
        return answer.json()

    def reset(self, item_id):
        answer = self.post("/reset", env_idx=self.env_idx, id=item_id)
        assert isinstance(answer, str)
        return answer

    def step(self, text):
        answer = self.post("/step", env_idx=self.env_idx, action=text)
        assert isinstance(answer["observation"], str) and isinstance(answer["done"], bool)
        assert isinstance(answer["reward"], int | float) and "info" in answer
        return answer["observation"], answer["reward"], answer["done"]

    def close(self):
        return self.post("/close", env_idx=self.env_idx)


@pytest.fixture
def client(server):
    with httpx.Client(base_url=server, timeout=30) as http:
        yield TheirClient(http)


def test_agentgyms_client_plays_whole_episodes_at_our_server(client):
    assert client.http.get("/").json() == "ok"
    teacher = SearchQA()  # over the same corpus, in this process
    prompt = client.reset(BRIDGE)
    question = teacher.reset(BRIDGE)
    assert prompt == client.observe() == f"{INSTRUCTIONS}\n\n{question}"
    for text in ("I do not know.", "<search> a <answer> b </search> </answer>", ""):
        observation, reward, done = client.step(text)
        assert (observation.startswith(INVALID), reward, done) == (True, 0, False)
    while not done:
        text = f"<think>It is so.</think> {say(*teacher.oracle())} <answer> no </answer><|im_end|>"
        observation, reward, done = client.step(text)
        assert observation == client.observe() == teacher.step(text)[0]
        assert reward == float(done)
    assert client.reset(BRIDGE + 1) == client.observe()
    assert client.step("<answer> nobody </answer>") == (WRONG, 0, True)
    assert client.close() is True and client.close() is False
    SearchQA.close_shared()


# ---- our client at a server that answers as AgentGym's does


class TheirServer:
    """AgentGym's SearchQA server as WIRE.md has it: bare answers, an answer that is wrong does not
    end the episode, 500 for whatever goes wrong."""

    PROMPT = "You must think first. Example: <answer> Beijing </answer>. \n\n Question: "
    TASKS = (("who won the war?", "nobody"), ("What comes after Question: one?", "two"))

    def __init__(self):
        self.episodes, self.log = {}, []
        theirs = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1

            def log_message(self, *_):
                pass

            def answer(self):
                content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                body = json.loads(content or "{}")
                path, _, query = self.path.partition("?")
                if query:
                    body = {"env_idx": int(query.removeprefix("env_idx="))}
                theirs.log.append((path, body))
                try:
                    status, content = 200, json.dumps(getattr(theirs, path[1:] or "root")(**body))
                except AttributeError:
                    status, content = 404, '{"detail": "Not Found"}'
                except Exception:
                    status, content = 500, "Internal Server Error"
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content.encode())

            do_GET = do_POST = answer

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def root(self):
        return "ok"

    def create(self, id):
        self.TASKS[id]
        self.episodes[len(self.episodes)] = None
        return len(self.episodes) - 1

    def reset(self, env_idx, id, seed=None):
        question, golden = self.TASKS[id]
        self.episodes[env_idx] = {"observation": self.PROMPT + question, "golden": golden}
        return self.episodes[env_idx]["observation"]

    def step(self, env_idx, action):
        episode = self.episodes[env_idx]
        match = re.search(r"<(search|answer)>(.*?)</\1>", action, re.DOTALL)
        reward, done = 0, False
        if match is None:
            episode["observation"] = "Your previous action is invalid. If you want to search, ..."
        elif match[1] == "search":
            episode["observation"] = f"<information>Doc 1(Title: T) {match[2]}</information>"
        elif exact_match(match[2], [episode["golden"]]):
            reward, done = 1.0, True
            episode["observation"] = "Congratulations!"
        else:
            episode["observation"] = "Sorry, your answer is incorrect. Please try again."
        answer = {"observation": episode["observation"], "reward": reward, "done": done}
        return answer | {"info": None}

    def observation(self, env_idx):
        return self.episodes[env_idx]["observation"]

    def close(self, env_idx):
        return self.episodes.pop(env_idx, None) is not None


@pytest.fixture
def theirs():
    server = TheirServer()
    yield server
    server.http.shutdown()
    server.http.server_close()


def test_our_client_plays_whole_episodes_at_agentgyms_server(theirs):
    with connect("searchqa", theirs.url) as client:
        assert client.served_env() is None  # it has no /health
        assert client.reset(0) == "Question: who won the war?"
        assert client.observation() == TheirServer.PROMPT + "who won the war?"
        result = client.step("I look. <search>war</search> <answer> no </answer>")
        assert result.observation == "<information>Doc 1(Title: T)  war </information>"
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
    assert theirs.log[1] == ("/create", {"id": 0})
    steps = [body["action"] for path, body in theirs.log if path == "/step"]
    assert steps[0] == "<search> war </search>"
