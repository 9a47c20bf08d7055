"""sampling/chatapi.py: the message loop with a real environment and a scripted chat server."""

import contextlib
import json
import threading
import time
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import quote

import pytest

from agents import AGAIN, REFLECT, Agent
from envclient import LOCAL, EnvClient, EnvPool, EnvServerError
from envs import Task
from envs.textcraft.env import TextCraft
from formats import REACT, FunctionCalling, call_of
from rollout import RolloutRequest, RolloutSettings, sampling_seed
from sampling.chatapi import ApiError, ApiRefused, ChatApi, Stopped, collect_api


class ScriptedServer(ThreadingHTTPServer):
    """`reply(path, body) -> (status, headers, object or text)`; None closes the connection.
    `answer(body)` is a reply that does not depend on the path."""

    request_queue_size = 128  # with 5, connections of a busy machine wait a second

    def __init__(self, answer=None, port=0):
        outer, self.requests = self, []
        if answer:
            self.reply = lambda path, body: answer(body)

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                body = json.loads(
                    self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}"
                )
                outer.requests.append((self.path, self.headers, body))
                if answer := outer.reply(self.path, body):
                    status, headers, content = answer
                    text = content if isinstance(content, str) else json.dumps(content)
                    data = text.encode()
                    self.send_response(status)
                    for name, value in headers.items():
                        self.send_header(name, value)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data)

            do_POST = do_GET

            def log_message(self, *_):
                pass

        super().__init__(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def handle_error(self, *_):
        """The client closed the connection."""

    def __exit__(self, *exception):
        self.shutdown()
        self.server_close()


@pytest.fixture
def serve():
    with contextlib.ExitStack() as stack:

        def start(*script):
            """`script`: a function, or a sequence of answers, of which the last one is repeated."""
            answers, lock = list(script), threading.Lock()

            def next_answer(_):
                with lock:
                    return answers.pop(0) if len(answers) > 1 else answers[0]

            answer = script[0] if callable(script[0]) else next_answer
            return stack.enter_context(ScriptedServer(answer))

        yield start


def completion(content):
    return 200, {}, {"choices": [{"message": {"role": "assistant", "content": content}}]}


def fails(status, body="", **headers):
    return status, {name.replace("_", "-"): value for name, value in headers.items()}, body


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr("sampling.chatapi.FIRST_WAIT_S", 0.01)


def api_of(server, **options):
    return ChatApi(server.url, "some-model", **{"max_retries": 3, **options})


def ask(api):
    return api.complete([{"role": "user", "content": "hello"}], 16, 1.0, seed=3)


# ---------------------------------------------------------------------- one request


def test_a_request_has_the_format_of_chat_servers(serve):
    server = serve(completion("hi"))
    for key, expected in ((None, None), ("secret", "Bearer secret")):
        assert ask(api_of(server, api_key=key)) == "hi"
        path, headers, body = server.requests[-1]
        assert (path, headers["Authorization"]) == ("/v1/chat/completions", expected)
    assert body == {
        "model": "some-model",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 16,
        "temperature": 1.0,
        "seed": 3,
    }
    api_of(server).complete([{"role": "assistant", "content": ""}], 16, 1.0, seed=2**40 + 1)
    body = server.requests[-1][2]
    assert body["messages"] == [{"role": "assistant", "content": " "}]  # never empty
    assert body["seed"] == 2**40 % 2**31 + 1
    assert ChatApi("https://h/v1b/openai/", "m").url == "https://h/v1b/openai/chat/completions"


def test_the_text_of_an_answer(serve):
    parts = [{"type": "text", "text": "Action: "}, {"type": "text", "text": "look"}, "?"]
    cut_text = "ok \ud83d"  # max_tokens cut a character
    api = api_of(serve(completion(None), completion(parts), completion(cut_text)))
    assert [ask(api) for _ in range(3)] == ["", "Action: look", "ok \ufffd"]


def test_transient_failures_are_retried_until_the_retries_are_used_up(serve):
    failures = [fails(500, "oops"), fails(408), fails(429, Retry_After="soon"), fails(200, {})]
    failures += [fails(200, "<html>bad gateway</html>"), fails(200, "[" * 100_000)]
    server = serve(*failures, completion("hi"))
    assert ask(api_of(server, max_retries=6)) == "hi"
    assert len(server.requests) == 7
    server = serve(fails(500, "out of\nmemory"))
    with pytest.raises(ApiError, match=r"chat/completions .* in 4 attempts; HTTP 500: out of mem"):
        ask(api_of(server))
    assert len(server.requests) == 4


def test_retry_after_is_honoured_unless_the_run_is_stopped(serve):
    start = time.monotonic()
    assert ask(api_of(serve(fails(429, Retry_After="0.4"), completion("hi")))) == "hi"
    assert time.monotonic() - start >= 0.4
    api = api_of(serve(fails(500, Retry_After="60")))
    threading.Timer(0.1, api.stop).start()
    for _ in range(2):
        with pytest.raises(Stopped):
            ask(api)


def test_an_address_without_a_server_is_refused_immediately_unless_it_answered_before(serve):
    with pytest.raises(ApiRefused, match="no server answers.*--api-base"):
        ask(ChatApi("http://127.0.0.1:9", "m"))
    server = serve(completion("hi"))
    api = api_of(server)
    assert ask(api) == "hi"
    server.__exit__()
    with pytest.raises(ApiError, match=r"in 4 attempts; .*refused"):
        ask(api)


def test_a_request_that_can_never_succeed_is_sent_only_once(serve):
    """A redirect is not followed either, because its target would get the API key."""
    for answer, reason in (
        (fails(401, "no such model"), "HTTP 401: no such model"),
        (fails(307, Location="http://elsewhere/v1"), "HTTP 307.*redirect to 'http://elsewhere/v1'"),
    ):
        server = serve(answer)
        with pytest.raises(ApiRefused, match=reason):
            ask(api_of(server))
        assert len(server.requests) == 1


def test_a_key_that_a_server_echoes_is_never_quoted(serve):
    key = "sk-test/0123456789+abc"
    escaped = json.dumps(key).replace("/", "\\/").replace("+", "\\u002B")
    for echo in (key, escaped, quote(key, safe=""), "-" * 290 + key):
        for answer in (fails(401, echo), fails(500, echo), fails(307, Location=echo)):
            with pytest.raises(ApiError) as error:
                ask(api_of(serve(answer), api_key=key, max_retries=0))
            assert "***" in str(error.value) and "sk-" not in str(error.value)
    assert ask(api_of(serve(completion(f"Bearer {key}")), api_key=key)) == "Bearer ***"
    assert ask(api_of(serve(completion("an EMPTY box")), api_key="EMPTY")) == "an EMPTY box"


def test_a_server_that_needs_the_newer_name_of_max_tokens_gets_it_in_later_requests(serve):
    def answer(body):
        if "max_tokens" in body:
            return fails(400, "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens'")
        return completion("hi")

    server = serve(answer)
    api = api_of(server)
    assert [ask(api), ask(api)] == ["hi", "hi"]
    names = [[name for name in body if name.startswith("max_")] for _, _, body in server.requests]
    assert names == [["max_tokens"], ["max_completion_tokens"], ["max_completion_tokens"]]


# ------------------------------------------------------------------------- episodes


@cache
def task_of_goal():
    """Last line of the first observation (the goal) -> task index."""
    return {TextCraft().reset(i).splitlines()[-1]: i for i in range(544)}


def task_index_of(body):
    messages = [message["content"] for message in body["messages"]]
    first_observation = next(text for text in messages if text.startswith("Crafting"))
    return task_of_goal()[first_observation.splitlines()[-1]]


def oracle_answer(body):
    """A perfect model: finds the task by the first observation, replays its earlier actions, and
    asks the oracle."""
    env = TextCraft()
    env.reset(task_index_of(body))
    for message in body["messages"]:
        if message["role"] == "assistant":
            env.step(TextCraft.parse(message["content"]))
    thought, action = env.oracle()
    return completion(f"Thought: {thought}\nAction: {action}")


TASKS = [Task(f"textcraft_{i}", i, TextCraft.subtask(i)) for i in (0, 5, 40)]


def play(server, tasks=TASKS, samples=1, max_rounds=20, action_format=REACT, **options):
    """Run `collect_api` with `samples` episodes of each task."""
    retries, env_seed = options.pop("max_retries", 1), options.pop("env_seed", 0)
    requests = [
        RolloutRequest(task, group, k, env_seed, 0, max_rounds)
        for group, task in enumerate(tasks)
        for k in range(samples)
    ]
    settings = {"max_tokens_per_turn": 64, "max_trajectory_tokens": 4096, "env_workers": 4}
    settings |= {"max_env_failures": 1.0} | options
    api = api_of(server, max_retries=retries)
    with EnvPool("textcraft", [LOCAL], action_format=action_format) as pool:
        return collect_api(api, pool, requests, RolloutSettings(**settings))


def test_a_perfect_model_solves_every_task_and_its_line_has_the_contract_fields(serve):
    trajectories = play(serve(oracle_answer), record_state=True)
    assert [t.task_id for t in trajectories] == [task.task_id for task in TASKS]
    for t in trajectories:
        assert (t.stop_reason, t.success, t.truncated) == ("success", True, False)
        line = json.loads(json.dumps(t.to_line()))
        assert line["return"] == 1.0
        assert line["first_state"] and all(turn["state"] for turn in line["turns"])
        assert line["input_ids"] is None and line["loss_mask"] is None
        roles = [m["role"] for m in line["messages"]][len(TextCraft.PROMPT) :]
        assert roles == ["user", "assistant"] * len(t.turns)
        assert [turn["reward"] for turn in line["turns"]] == [0.0] * (len(t.turns) - 1) + [1.0]


def test_functions_are_offered_with_the_request_and_calls_are_played(serve):
    """The server takes the calls out of the text; the conversation goes on with them as text."""

    def answer(body):
        env = TextCraft()
        env.reset(task_index_of(body))
        for message in body["messages"]:
            if message["role"] == "assistant":
                env.step(*FunctionCalling().parse(TextCraft, message["content"]))
        name, arguments = call_of(TextCraft, env.oracle()[1])
        call = {"type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        return 200, {}, {"choices": [{"message": {"content": None, "tool_calls": [call]}}]}

    server = serve(answer)
    trajectories = play(server, action_format=FunctionCalling(in_template=True))
    assert [t.stop_reason for t in trajectories] == ["success"] * len(TASKS)
    body = server.requests[0][2]
    assert [tool["function"]["name"] for tool in body["tools"]] == ["get", "craft", "inventory"]
    assert {key for message in body["messages"] for key in message} == {"role", "content"}


def test_a_model_behind_a_server_reflects_and_tries_again(serve):
    def answer(body):
        if body["messages"][-1]["content"].startswith(AGAIN):
            return completion("Action: get 4 crimson stem")
        return completion("I had no stems." if REFLECT in body["messages"][-1]["content"] else "?")

    agent = Agent("reflect", attempts=2)
    (t,) = play(serve(answer), [Task("textcraft_31", 31, "depth 1")], max_rounds=1, agent=agent)
    assert [turn.kind for turn in t.turns] == ["act", "reflect", "act"]
    assert t.turns[-1].observation_text == "Got 4 crimson stem"
    assert (t.stop_reason, t.turns[0].parse_error is None) == ("max_rounds", False)


def test_the_turn_limit_ends_an_episode_of_unparsable_answers(serve):
    server = serve(completion(None))
    tasks = TASKS[1:]  # the last one has other distractors with another seed
    options = {"temperature": 0.3, "seed": 7, "env_seed": 5}
    for t in play(server, tasks, samples=3, max_rounds=3, **options):
        first_observation = TextCraft().reset(tasks[t.group_id].task_index, seed=5)
        assert t.messages[len(TextCraft.PROMPT)]["content"] == first_observation
        assert (t.stop_reason, t.truncated, t.success) == ("max_rounds", True, False)
        assert t.is_valid and [turn.action_text for turn in t.turns] == [""] * 3
        assert all(turn.parse_error for turn in t.turns) and t.total_return == 0.0
        assert t.messages[-1]["role"] == "assistant"  # the last observation is not appended
    bodies = [body for _, _, body in server.requests]
    keys = [(7, 0, task.task_id, sample, 0) for task in tasks for sample in range(3)]
    assert {body["seed"] for body in bodies} == {sampling_seed(*key) % 2**31 for key in keys}
    assert {(body["temperature"], body["max_tokens"]) for body in bodies} == {(0.3, 64)}


def test_a_failure_in_one_episode_ends_only_that_episode(serve):
    answers = {
        TASKS[0].task_index: fails(400, "maximum context length is 9"),
        TASKS[1].task_index: fails(400, "filtered"),
    }

    def script(body):
        has_turns = len(body["messages"]) > 3
        return (has_turns and answers.get(task_index_of(body))) or oracle_answer(body)

    trajectories = play(serve(script))
    assert [t.stop_reason for t in trajectories] == ["length", "engine_error", "success"]
    assert "filtered" in trajectories[1].error and not trajectories[1].is_valid


def test_a_refusal_of_the_first_request_stops_the_run_immediately(serve):
    server = serve(fails(400, "max_tokens=512: the context length is 256"))
    with pytest.raises(ApiRefused, match="smaller --max-tokens-per-turn"):
        play(server, samples=20, env_workers=1)
    assert len(server.requests) <= 2


@pytest.mark.parametrize(
    ("method", "failing_calls", "stop_reason"),
    [
        ("step", {2}, "success"),
        ("step", {2, 3}, "env_error"),
        ("reset", {1, 2}, "success"),
        ("reset", {1, 2, 3}, "env_error"),
    ],
)
def test_an_episode_whose_environment_fails_is_retried_and_then_lost(
    serve, monkeypatch, method, failing_calls, stop_reason
):
    calls, original = [], getattr(EnvClient, method)

    def failing(*arguments, **options):
        calls.append(options)
        if len(calls) in failing_calls:
            raise EnvServerError("it broke", "http://env")
        return original(*arguments, **options)

    num_avoided, open_client = [], EnvPool.client

    def client(pool, avoid=()):
        num_avoided.append(len(avoid))
        return open_client(pool, avoid)

    monkeypatch.setattr(EnvClient, method, failing)
    monkeypatch.setattr(EnvPool, "client", client)
    (t,) = play(serve(oracle_answer), TASKS[2:])
    assert t.stop_reason == stop_reason
    assert num_avoided[:2] == [0, 1], "a retry prefers another server"
    if stop_reason == "success":  # without the turns of the first attempt
        assert [m["role"] for m in t.messages].count("assistant") == len(t.turns)
        assert t.total_return == 1.0
    else:
        assert "it broke" in t.error and not t.success
