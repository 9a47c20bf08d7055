"""The message loop against a real environment and a chat server that follows a script."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from envclient import EnvConnectionError, EnvServerError, NotSupported, StepResult
from envs import Task
from envs.textcraft.env import TextCraft
from rollout import RolloutRequest, RolloutSettings, TooManyEnvFailures
from sampling.chatapi import ApiError, ApiRefused, ChatApi, Stopped, collect_api

GARBAGE = "<html>bad gateway</html>"


class ChatServer:
    """An OpenAI-like server; `answer(body) -> (status, headers, object or text)` is the script."""

    def __init__(self, answer):
        self.answer, self.requests, self.lock = answer, [], threading.Lock()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with outer.lock:
                    outer.requests.append((self.path, self.headers, body))
                status, headers, content = outer.answer(body)
                data = content if isinstance(content, bytes | str) else json.dumps(content)
                data = data.encode() if isinstance(data, str) else data
                self.send_response(status)
                for name, value in headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_):
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def close(self):
        self.http.shutdown()
        self.http.server_close()


@pytest.fixture
def serve():
    servers = []

    def start(*script):
        """Each entry answers one request; the last one answers all that follow."""
        if callable(script[0]):
            answer = script[0]
        else:
            left, lock = list(script), threading.Lock()

            def answer(_):
                with lock:
                    return left.pop(0) if len(left) > 1 else left[0]

        servers.append(ChatServer(answer))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


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


def test_a_request_has_the_form_that_such_servers_take(serve, monkeypatch, tmp_path):
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
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


@pytest.mark.parametrize(
    ("base", "url"),
    [
        ("http://h:1/", "http://h:1/v1/chat/completions"),
        ("http://h:1/v1", "http://h:1/v1/chat/completions"),
        ("https://h/v1beta/openai/", "https://h/v1beta/openai/chat/completions"),
    ],
)
def test_a_base_url_is_taken_as_openai_clients_take_it(base, url):
    assert ChatApi(base, "m").url == url


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (None, ""),
        (["a part"], ""),
        ([{"type": "text", "text": "Action: "}, {"type": "text", "text": "look"}], "Action: look"),
        ("ok \ud83d", "ok \ufffd"),  # half a character, cut by max_tokens
    ],
)
def test_the_text_of_an_answer(serve, content, text):
    assert ask(api_of(serve(says(content)))) == text


@pytest.mark.parametrize(
    "trouble",
    [
        *(fails(500, "oops"), fails(503), fails(429), fails(408), (200, {}, GARBAGE)),
        *((200, {}, {}), (200, {}, "[" * 100_000)),
        *(fails(429, Retry_After=value) for value in ("soon", "-1", "nan")),
    ],
)
def test_what_may_pass_is_asked_again(serve, trouble):
    server = serve(trouble, trouble, says("hi"))
    assert ask(api_of(server)) == "hi"
    assert len(server.requests) == 3


def test_retry_after_is_waited_for_unless_the_run_is_stopped(serve):
    began = time.monotonic()
    assert ask(api_of(serve(fails(429, Retry_After="0.4"), says("hi")))) == "hi"
    assert time.monotonic() - began >= 0.4
    api = api_of(serve(fails(500, Retry_After="60")))
    threading.Timer(0.1, api.stop).start()
    with pytest.raises(Stopped):
        ask(api)
    with pytest.raises(Stopped):
        ask(api)


def test_retries_end_with_the_url_the_status_and_the_body(serve):
    server = serve(fails(500, "out of\nmemory"))
    with pytest.raises(ApiError, match=r"chat/completions .* in 4 attempts; HTTP 500: out of mem"):
        ask(api_of(server))
    assert len(server.requests) == 4


def test_a_silent_server_is_an_error_and_not_a_hang(serve):
    def silent(_):
        time.sleep(1.0)
        return says("too late")

    with pytest.raises(ApiError, match="no answer within"):
        ask(api_of(serve(silent), timeout_s=0.1, max_retries=0))


def test_nobody_at_an_address_is_told_at_once_but_not_of_a_server_that_has_answered(serve):
    with pytest.raises(ApiRefused, match="nobody answers.*--api-base"):
        ask(ChatApi("http://127.0.0.1:9", "m"))
    server = serve(says("hi"))
    api = api_of(server)
    assert ask(api) == "hi"
    server.close()
    with pytest.raises(ApiError, match=r"in 4 attempts; .*refused"):
        ask(api)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        *((fails(status, "no such model"), "no such model") for status in (400, 401, 404, 422)),
        # Not followed: the key would go wherever the answer says.
        (fails(307, Location="http://elsewhere/v1"), "leads to 'http://elsewhere/v1'"),
    ],
)
def test_what_will_never_pass_is_asked_once(serve, answer, said):
    server = serve(answer)
    with pytest.raises(ApiRefused, match=f"HTTP {answer[0]}.*{said}"):
        ask(api_of(server))
    assert len(server.requests) == 1


def test_the_proxy_of_the_environment_is_asked(serve, monkeypatch):
    proxy = serve(says("hi"))
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", proxy.url)
    assert ask(ChatApi("http://chat.invalid/v1", "m", api_key="given")) == "hi"
    path, headers, _ = proxy.requests[0]
    assert path == "http://chat.invalid/v1/chat/completions"
    assert (headers["Host"], headers["Authorization"]) == ("chat.invalid", "Bearer given")


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


class LocalClient:
    """An EnvClient without HTTP; `trouble(what, n)` may raise before the n-th call."""

    base_url, prompt = "http://fake", TextCraft.PROMPT

    def __init__(self, trouble):
        self.env, self.trouble, self.calls = TextCraft(), trouble, 0

    def reset(self, task_index, seed=0):
        self.trouble("reset")
        return self.env.reset(task_index, seed)

    def step(self, text):
        self.trouble("step")
        try:
            action = TextCraft.parse(text)
        except ValueError as error:
            return StepResult(str(error), 0.0, False, False, {"parse_error": str(error)})
        return StepResult(*self.env.step(action))

    def state(self):
        self.trouble("state")
        return self.env.state_for_people()

    def close(self):
        return True


class LocalPool:
    env = "textcraft"

    def __init__(self, trouble=lambda what: None):
        self.trouble = trouble

    def client(self, avoid=()):
        return LocalClient(self.trouble)


def oracle_answer(body):
    """A perfect player: finds the task by its first observation and replays its own actions."""
    env, said = TextCraft(), [m["content"] for m in body["messages"] if m["role"] == "assistant"]
    first = next(m["content"] for m in body["messages"] if m["content"].startswith("Crafting"))
    task_index = next(i for i in range(544) if env.reset(i) == first)
    env.reset(task_index)
    for text in said:
        env.step(TextCraft.parse(text))
    thought, action = env.oracle()
    return says(f"Thought: {thought}\nAction: {action}")


TASKS = [Task(f"textcraft_{i}", i, TextCraft.subtask(i)) for i in (0, 5, 40)]


def requests_of(tasks, samples=1, max_rounds=20):
    numbered = [(g, t, k) for g, t in enumerate(tasks) for k in range(samples)]
    return [RolloutRequest(t, g, k, 0, 0, max_rounds) for g, t, k in numbered]


def settings_of(**options):
    defaults = {"max_tokens_per_turn": 64, "max_trajectory_tokens": 4096}
    return RolloutSettings(**{**defaults, "env_workers": 4, "max_env_failures": 1.0, **options})


def test_a_perfect_player_solves_every_task_and_its_line_has_the_contract_fields(serve):
    seen = []
    trajectories = collect_api(
        api_of(serve(oracle_answer)), LocalPool(), requests_of(TASKS), settings_of(), seen.append
    )
    assert [t.task_id for t in trajectories] == [task.task_id for task in TASKS]
    assert {t.stop_reason for t in trajectories} == {"success"}
    assert all(t.success and t.terminated and not t.truncated for t in trajectories)
    assert {t.trajectory_id for t in seen} == {t.trajectory_id for t in trajectories}
    for t in trajectories:
        line = json.loads(json.dumps(t.to_line()))
        assert line["return"] == 1.0
        assert line["input_ids"] is None and line["loss_mask"] is None
        roles = [m["role"] for m in line["messages"]]
        played = roles[len(TextCraft.PROMPT) :]
        assert played == ["user", "assistant"] * len(t.turns)
        assert [turn["reward"] for turn in line["turns"]] == [0.0] * (len(t.turns) - 1) + [1.0]


def test_states_are_recorded_where_the_server_has_them(serve):
    def asked(what):
        if what == "state":
            raise NotSupported("/state", "http://env")

    for trouble, expected in ((lambda what: None, True), (asked, False)):
        pool = LocalPool(trouble)
        (t,) = collect_api(
            api_of(serve(oracle_answer)),
            pool,
            requests_of(TASKS[:1]),
            settings_of(record_state=True),
        )
        assert t.success
        assert [turn.state is not None for turn in t.turns] == [expected] * len(t.turns)


def test_the_turn_limit_ends_an_episode_of_unparsable_answers(serve):
    server = serve(says(None))
    requests = requests_of(TASKS[:2], 3, max_rounds=3)
    for t in collect_api(api_of(server), LocalPool(), requests, settings_of()):
        assert (t.stop_reason, t.truncated, t.success, t.is_valid) == (
            *("max_rounds", True, False, True),
        )
        assert [turn.action_text for turn in t.turns] == [""] * 3
        assert all(turn.parse_error for turn in t.turns) and t.total_return == 0.0
        assert t.messages[-1]["role"] == "assistant"  # no unanswered observation is kept
    assert len({body["seed"] for _, _, body in server.requests}) == 6  # one for each sample


@pytest.mark.parametrize(
    ("answer", "stop_reason"),
    [
        (fails(400, "maximum context length is 9"), "length"),
        (fails(400, "filtered"), "engine_error"),  # or a server that rejects its model's words
        (fails(422, "filtered"), "engine_error"),
        (fails(500, "cannot"), "engine_error"),
    ],
)
def test_what_fails_in_one_episode_ends_that_episode_alone(serve, answer, stop_reason):
    bad_goal = TextCraft().reset(TASKS[1].task_index).splitlines()[-1]

    def script(body):
        if len(body["messages"]) > 3 and any(bad_goal in m["content"] for m in body["messages"]):
            return answer
        return oracle_answer(body)

    api = api_of(serve(script), max_retries=1)
    ended = collect_api(api, LocalPool(), requests_of(TASKS), settings_of())
    assert [t.stop_reason for t in ended] == ["success", stop_reason, "success"]
    if stop_reason == "engine_error":
        assert answer[2] in ended[1].error and not ended[1].is_valid


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (fails(401, "bad key"), "bad key"),
        (fails(400, "max_tokens=512: the context length is 256"), "smaller --max-tokens-per-turn"),
    ],
)
def test_a_refusal_of_the_first_request_stops_the_run_at_once(serve, answer, said):
    server = serve(answer)
    requests, settings = requests_of(TASKS, 20), settings_of(env_workers=1)
    with pytest.raises(ApiRefused, match=said):
        collect_api(api_of(server), LocalPool(), requests, settings)
    assert len(server.requests) <= 2


def test_too_many_lost_trajectories_stop_the_run_early_with_the_last_error(serve):
    server = serve(fails(500, "on fire"))
    with pytest.raises(TooManyEnvFailures, match="2 of 12 .* HTTP 500: on fire"):
        collect_api(
            api_of(server, max_retries=0),
            LocalPool(),
            requests_of(TASKS, 4),
            settings_of(max_env_failures=0.1, env_workers=1),
        )


class Fails:
    """Raises the given error at the given calls of one kind."""

    def __init__(self, kind, at, error):
        self.kind, self.at, self.error, self.calls = kind, at, error, 0

    def __call__(self, what):
        if what == self.kind:
            self.calls += 1
            if self.calls in self.at:
                raise self.error("it broke", "http://env")


@pytest.mark.parametrize(
    ("kind", "at", "error", "stop_reason"),
    [
        ("reset", {1, 2}, EnvConnectionError, "success"),
        ("reset", {1, 2, 3}, EnvConnectionError, "env_error"),
        ("step", {1}, EnvServerError, "success"),
        ("step", {2}, EnvServerError, "success"),
        ("step", {1, 2}, EnvServerError, "env_error"),
    ],
)
def test_a_failing_environment_is_tried_again_and_then_the_trajectory_is_lost(
    serve, kind, at, error, stop_reason
):
    (t,) = collect_api(
        api_of(serve(oracle_answer)),
        LocalPool(Fails(kind, at, error)),
        requests_of(TASKS[2:]),
        settings_of(),
    )
    assert t.stop_reason == stop_reason
    if stop_reason == "success":  # and the turns of the broken attempt are gone
        assert [m["role"] for m in t.messages].count("assistant") == len(t.turns)
        assert t.total_return == 1.0
    else:
        assert "it broke" in t.error and not t.success


def test_a_bug_in_a_thread_surfaces_instead_of_hanging(serve):
    def bug(what):
        raise ZeroDivisionError(what)

    with pytest.raises(ZeroDivisionError):
        collect_api(api_of(serve(says("x"))), LocalPool(bug), requests_of(TASKS), settings_of())
