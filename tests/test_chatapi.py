"""The message loop against a real environment and a chat server that follows a script."""

import contextlib
import json
import threading
import time
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from envclient import LOCAL, EnvClient, EnvPool, EnvServerError
from envs import Task
from envs.textcraft.env import TextCraft
from rollout import RolloutRequest, RolloutSettings
from sampling.chatapi import ApiError, ApiRefused, ChatApi, Stopped, collect_api


class ScriptedServer(ThreadingHTTPServer):
    """`reply(path, body) -> (status, headers, object or text)`; None hangs up."""

    def __init__(self):
        outer, self.requests = self, []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                body = json.loads(
                    self.rfile.read(int(self.headers.get("Content-Length", 0))) or "{}"
                )
                outer.requests.append((self.path, self.headers, body))
                if answer := outer.reply(self.path, body):
                    status, headers, content = answer
                    data = content if isinstance(content, str) else json.dumps(content)
                    self.send_response(status)
                    for name, value in headers.items():
                        self.send_header(name, value)
                    self.send_header("Content-Length", str(len(data)))
                    self.end_headers()
                    self.wfile.write(data.encode())

            do_POST = do_GET

            def log_message(self, *_):
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    def handle_error(self, *_):
        """The client hung up."""

    def __exit__(self, *exception):
        self.shutdown()
        self.server_close()


class ChatServer(ScriptedServer):
    """An OpenAI-like server; `answer(body)` is the script."""

    def __init__(self, answer):
        super().__init__()
        self.reply = lambda path, body: answer(body)


@pytest.fixture
def serve():
    with contextlib.ExitStack() as stack:

        def start(*script):
            """A function, or answers one by one; the last one answers all that follow."""
            left, lock = list(script), threading.Lock()

            def next_answer(_):
                with lock:
                    return left.pop(0) if len(left) > 1 else left[0]

            answer = script[0] if callable(script[0]) else next_answer
            return stack.enter_context(ChatServer(answer))

        yield start


def says(content):
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


def test_a_request_has_the_form_that_such_servers_take(serve):
    server = serve(says("hi"))
    for key, expected in ((None, None), ("given", "Bearer given")):
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
    half = "ok \ud83d"  # of a character, cut by max_tokens
    api = api_of(serve(says(None), says(parts), says(half)))
    assert [ask(api) for _ in range(3)] == ["", "Action: look", "ok \ufffd"]


def test_what_may_pass_is_asked_again_until_the_retries_end(serve):
    troubles = [fails(500, "oops"), fails(408), fails(429, Retry_After="soon"), fails(200, {})]
    troubles += [fails(200, "<html>bad gateway</html>"), fails(200, "[" * 100_000)]
    server = serve(*troubles, says("hi"))
    assert ask(api_of(server, max_retries=6)) == "hi"
    assert len(server.requests) == 7
    server = serve(fails(500, "out of\nmemory"))
    with pytest.raises(ApiError, match=r"chat/completions .* in 4 attempts; HTTP 500: out of mem"):
        ask(api_of(server))
    assert len(server.requests) == 4


def test_retry_after_is_waited_for_unless_the_run_is_stopped(serve):
    began = time.monotonic()
    assert ask(api_of(serve(fails(429, Retry_After="0.4"), says("hi")))) == "hi"
    assert time.monotonic() - began >= 0.4
    api = api_of(serve(fails(500, Retry_After="60")))
    threading.Timer(0.1, api.stop).start()
    for _ in range(2):
        with pytest.raises(Stopped):
            ask(api)


def test_an_address_where_nobody_answers_is_refused_at_once_unless_it_has_answered(serve):
    with pytest.raises(ApiRefused, match="no server answers.*--api-base"):
        ask(ChatApi("http://127.0.0.1:9", "m"))
    server = serve(says("hi"))
    api = api_of(server)
    assert ask(api) == "hi"
    server.__exit__()
    with pytest.raises(ApiError, match=r"in 4 attempts; .*refused"):
        ask(api)


def test_what_will_never_pass_is_asked_once(serve):
    """And a redirect is not followed: the key would go wherever it leads."""
    for answer, reason in (
        (fails(401, "no such model"), "HTTP 401: no such model"),
        (fails(307, Location="http://elsewhere/v1"), "HTTP 307.*redirect to 'http://elsewhere/v1'"),
    ):
        server = serve(answer)
        with pytest.raises(ApiRefused, match=reason):
            ask(api_of(server))
        assert len(server.requests) == 1


def test_a_server_that_wants_the_newer_name_of_the_limit_gets_it_from_then_on(serve):
    def answer(body):
        if "max_tokens" in body:
            return fails(400, "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens'")
        return says("hi")

    server = serve(answer)
    api = api_of(server)
    assert [ask(api), ask(api)] == ["hi", "hi"]
    asked = [[name for name in body if name.startswith("max_")] for _, _, body in server.requests]
    assert asked == [["max_tokens"], ["max_completion_tokens"], ["max_completion_tokens"]]


# ------------------------------------------------------------------------- episodes


@cache
def task_of_goal():
    """The goal, which is the last line of a first observation, -> the task's index."""
    return {TextCraft().reset(i).splitlines()[-1]: i for i in range(544)}


def task_index_of(body):
    first = next(m["content"] for m in body["messages"] if m["content"].startswith("Crafting"))
    return task_of_goal()[first.splitlines()[-1]]


def oracle_answer(body):
    """A perfect player: finds the task by its first observation and replays its own actions."""
    env = TextCraft()
    env.reset(task_index_of(body))
    for message in body["messages"]:
        if message["role"] == "assistant":
            env.step(TextCraft.parse(message["content"]))
    thought, action = env.oracle()
    return says(f"Thought: {thought}\nAction: {action}")


TASKS = [Task(f"textcraft_{i}", i, TextCraft.subtask(i)) for i in (0, 5, 40)]


def play(server, tasks=TASKS, samples=1, max_rounds=20, **options):
    """`collect_api` of `samples` of each task."""
    retries = options.pop("max_retries", 1)
    requests = [
        RolloutRequest(task, group, k, 0, 0, max_rounds)
        for group, task in enumerate(tasks)
        for k in range(samples)
    ]
    settings = {"max_tokens_per_turn": 64, "max_trajectory_tokens": 4096, "env_workers": 4}
    settings |= {"max_env_failures": 1.0} | options
    api = api_of(server, max_retries=retries)
    with EnvPool("textcraft", [LOCAL]) as pool:
        return collect_api(api, pool, requests, RolloutSettings(**settings))


def test_a_perfect_player_solves_every_task_and_its_line_has_the_contract_fields(serve):
    trajectories = play(serve(oracle_answer), record_state=True)
    assert [t.task_id for t in trajectories] == [task.task_id for task in TASKS]
    for t in trajectories:
        assert (t.stop_reason, t.success, t.truncated) == ("success", True, False)
        line = json.loads(json.dumps(t.to_line()))
        assert line["return"] == 1.0
        assert all(turn["state"] for turn in line["turns"])
        assert line["input_ids"] is None and line["loss_mask"] is None
        played = [m["role"] for m in line["messages"]][len(TextCraft.PROMPT) :]
        assert played == ["user", "assistant"] * len(t.turns)
        assert [turn["reward"] for turn in line["turns"]] == [0.0] * (len(t.turns) - 1) + [1.0]


def test_the_turn_limit_ends_an_episode_of_unparsable_answers(serve):
    server = serve(says(None))
    for t in play(server, TASKS[:2], samples=3, max_rounds=3):
        assert (t.stop_reason, t.truncated, t.success) == ("max_rounds", True, False)
        assert t.is_valid and [turn.action_text for turn in t.turns] == [""] * 3
        assert all(turn.parse_error for turn in t.turns) and t.total_return == 0.0
        assert t.messages[-1]["role"] == "assistant"  # no unanswered observation is kept
    assert len({body["seed"] for _, _, body in server.requests}) == 6  # one for each sample


def test_what_fails_in_one_episode_ends_that_episode_alone(serve):
    answers = {
        TASKS[0].task_index: fails(400, "maximum context length is 9"),
        TASKS[1].task_index: fails(400, "filtered"),  # or a server that rejects its model's words
    }

    def script(body):
        has_begun = len(body["messages"]) > 3
        return (has_begun and answers.get(task_index_of(body))) or oracle_answer(body)

    ended = play(serve(script))
    assert [t.stop_reason for t in ended] == ["length", "engine_error", "success"]
    assert "filtered" in ended[1].error and not ended[1].is_valid


def test_a_refusal_of_the_first_request_stops_the_run_at_once(serve):
    server = serve(fails(400, "max_tokens=512: the context length is 256"))
    with pytest.raises(ApiRefused, match="smaller --max-tokens-per-turn"):
        play(server, samples=20, env_workers=1)
    assert len(server.requests) <= 2


@pytest.mark.parametrize(("at", "stop_reason"), [({2}, "success"), ({2, 3}, "env_error")])
def test_a_failing_environment_is_tried_again_and_then_the_trajectory_is_lost(
    serve, monkeypatch, at, stop_reason
):
    calls, working = [], EnvClient.step

    def failing(*arguments, **options):
        calls.append(1)
        if len(calls) in at:
            raise EnvServerError("it broke", "http://env")
        return working(*arguments, **options)

    monkeypatch.setattr(EnvClient, "step", failing)
    (t,) = play(serve(oracle_answer), TASKS[2:])
    assert t.stop_reason == stop_reason
    if stop_reason == "success":  # and the turns of the broken attempt are gone
        assert [m["role"] for m in t.messages].count("assistant") == len(t.turns)
        assert t.total_return == 1.0
    else:
        assert "it broke" in t.error and not t.success
