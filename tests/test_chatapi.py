"""The message loop against a real environment and a chat server that follows a script."""

import gzip
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from envclient import EnvConnectionError, EnvServerError, NotSupported, StepResult
from envs import Task
from envs.textcraft.env import TextCraft
from rollout import RolloutRequest, RolloutSettings, TooManyEnvFailures
from sampling.chatapi import ApiError, ApiRefused, ChatApi, ContextFull, Stopped, collect_api

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
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 0.01)


def api_of(server, **options):
    return ChatApi(server.url, "some-model", **{"max_retries": 3, **options})


def ask(api):
    return api.complete([{"role": "user", "content": "hello"}], 16, 1.0, seed=3)


# ---------------------------------------------------------------------- one request


def test_a_request_has_the_form_that_such_servers_take(serve):
    server = serve(says("hi"))
    assert ask(api_of(server, api_key="secret")) == "hi"
    path, headers, body = server.requests[0]
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == "Bearer secret"
    assert body == {
        "model": "some-model",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 16,
        "temperature": 1.0,
        "seed": 3,
    }


def test_without_a_key_none_is_sent_and_a_key_is_never_shown(serve):
    server = serve(says("hi"))
    ask(api_of(server))
    assert "Authorization" not in server.requests[0][1]
    assert "secret" not in repr(api_of(server, api_key="secret"))


def test_nothing_of_the_users_openai_account_or_machine_goes_to_another_server(serve, monkeypatch):
    for name in ("API_KEY", "ADMIN_KEY", "ORG_ID", "PROJECT_ID", "BASE_URL"):
        monkeypatch.setenv(f"OPENAI_{name}", "http://secret")
    monkeypatch.setenv("OPENAI_CUSTOM_HEADERS", "Authorization: secret\nX-Mine: secret")
    server = serve(says("hi"))
    for key in (None, "given"):
        ask(api_of(server, api_key=key))
    for (_, headers, _), expected in zip(server.requests, (None, "Bearer given")):
        assert headers["Authorization"] == expected
        assert "secret" not in str(headers)
        assert not {"x-stainless-os", "x-stainless-runtime"} & {name.lower() for name in headers}


def test_an_entry_of_netrc_is_neither_sent_nor_stronger_than_the_key(serve, monkeypatch, tmp_path):
    (tmp_path / "netrc").write_text("machine 127.0.0.1 login me password secret\n")
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    server = serve(says("hi"))
    for key in (None, "given"):
        ask(api_of(server, api_key=key))
    sent = [headers["Authorization"] for _, headers, _ in server.requests]
    assert sent == [None, "Bearer given"]


@pytest.mark.parametrize(
    ("base", "url"),
    [
        ("http://h:1", "http://h:1/v1/chat/completions"),
        ("http://h:1/", "http://h:1/v1/chat/completions"),
        ("http://h:1/v1", "http://h:1/v1/chat/completions"),
        ("https://h/v1beta/openai/", "https://h/v1beta/openai/chat/completions"),
    ],
)
def test_a_base_url_is_taken_as_openai_clients_take_it(base, url):
    assert ChatApi(base, "m").url == url


@pytest.mark.parametrize(
    "trouble",
    [
        *(
            fails(500, "oops"),
            fails(503),
            fails(429),
            fails(408),
            (200, {}, GARBAGE),
            (200, {}, {}),
        ),
        (200, {}, "[" * 100_000),
    ],
)
def test_what_may_pass_is_asked_again(serve, trouble):
    server = serve(trouble, trouble, says("hi"))
    assert ask(api_of(server)) == "hi"
    assert len(server.requests) == 3


def test_retry_after_is_waited_for(serve):
    server = serve(fails(429, Retry_After="0.4"), says("hi"))
    began = time.monotonic()
    assert ask(api_of(server)) == "hi"
    assert time.monotonic() - began >= 0.4


def test_retries_end_with_the_url_the_status_and_the_body(serve):
    server = serve(fails(500, "out of\nmemory"))
    with pytest.raises(ApiError, match=r"chat/completions .* in 4 attempts; HTTP 500: out of mem"):
        ask(api_of(server))
    assert len(server.requests) == 4


def test_a_silent_server_is_an_error_and_not_a_hang(serve):
    def silent(_):
        time.sleep(1.0)
        return says("too late")

    with pytest.raises(ApiError, match="ReadTimeout"):
        ask(api_of(serve(silent), timeout_s=0.1, max_retries=0))


def test_an_address_at_which_nobody_listens_is_told_at_once(monkeypatch):
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 60)
    with pytest.raises(ApiRefused, match="nobody answers.*--api-base"):
        ask(ChatApi("http://127.0.0.1:9", "m"))


def test_a_server_that_has_answered_before_is_asked_again(serve):
    server = serve(says("hi"))
    api = api_of(server)
    assert ask(api) == "hi"
    server.close()
    with pytest.raises(ApiError, match=r"in 4 attempts; ConnectError: .*refused"):
        ask(api)


def test_an_address_that_holds_a_password_is_refused_without_repeating_it():
    with pytest.raises(ValueError, match="--api-key-env") as caught:
        ChatApi("http://me:s3cret@host", "m")
    assert "s3cret" not in str(caught.value)


def test_a_redirect_is_not_followed_but_told(serve):
    """The key would go wherever the answer says, and each hop may take a time-out."""
    server = serve(fails(307, Location="http://elsewhere/v1/chat/completions"))
    with pytest.raises(ApiRefused, match="HTTP 307.*leads to 'http://elsewhere/v1/chat/comp"):
        ask(api_of(server, api_key="secret"))
    assert len(server.requests) == 1


def test_an_answer_that_was_compressed_unasked_is_none(serve):
    packed = gzip.compress(json.dumps(says("hi")[2]).encode())
    server = serve((200, {"Content-Encoding": "gzip"}, packed))
    with pytest.raises(ApiError, match="encoded"):
        ask(api_of(server, max_retries=0))
    assert "Accept-Encoding" not in server.requests[0][1] or (
        server.requests[0][1]["Accept-Encoding"] == "identity"
    )


def test_the_proxy_of_the_environment_is_asked(serve, monkeypatch):
    proxy = serve(says("hi"))
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("http_proxy", proxy.url)
    assert ask(ChatApi("http://chat.invalid/v1", "m", api_key="given")) == "hi"
    path, headers, _ = proxy.requests[0]
    assert path == "http://chat.invalid/v1/chat/completions"
    assert (headers["Host"], headers["Authorization"]) == ("chat.invalid", "Bearer given")


def test_a_stop_ends_a_question_under_way(serve):
    asked, answered = threading.Event(), threading.Event()

    def waits(_):
        asked.set()
        answered.wait(20)
        return says("too late")

    api = api_of(serve(waits), timeout_s=20.0)
    with ThreadPoolExecutor(1) as threads:
        question = threads.submit(ask, api)
        assert asked.wait(10)
        began = time.monotonic()
        api.stop()
        assert isinstance(question.exception(timeout=15), (ApiError, Stopped))
        assert time.monotonic() - began < 10
    answered.set()


@pytest.mark.parametrize("status", [400, 401, 403, 404, 422])
def test_what_will_never_pass_is_asked_once(serve, status):
    server = serve(fails(status, "no such model"))
    with pytest.raises(ApiRefused, match=f"HTTP {status}: no such model"):
        ask(api_of(server))
    assert len(server.requests) == 1


def test_a_full_context_has_its_own_error(serve):
    body = {"error": {"message": "This model's maximum context length is 4096 tokens."}}
    with pytest.raises(ContextFull):
        ask(api_of(serve(fails(400, json.dumps(body)))))


@pytest.mark.parametrize("content", [None, ["a part"]])
def test_an_answer_without_text_is_the_empty_string(serve, content):
    server = serve(says(content))
    assert ask(api_of(server)) == ""
    assert len(server.requests) == 1


def test_half_a_character_cut_by_max_tokens_can_be_sent_again_and_written(serve):
    server = serve((200, {}, '{"choices": [{"message": {"content": "ok \\ud83d"}}]}'))
    text = ask(api_of(server))
    assert text == "ok \ufffd"
    text.encode("utf-8")


@pytest.mark.parametrize("value", ["²", "soon", "-1", "nan", ""])
def test_a_retry_after_that_is_no_number_is_no_error(serve, value):
    server = serve(fails(429, Retry_After=value), says("hi"))
    assert ask(api_of(server)) == "hi"


def test_waiting_for_a_retry_ends_when_the_run_is_stopped(serve):
    api = api_of(serve(fails(500, Retry_After="60")))
    threading.Timer(0.1, api.stopped.set).start()
    began = time.monotonic()
    with pytest.raises(Stopped):
        ask(api)
    assert time.monotonic() - began < 5.0


def test_after_the_stop_nothing_is_asked(serve):
    server = serve(says("hi"))
    api = api_of(server)
    api.stop()
    with pytest.raises(Stopped):
        ask(api)
    assert server.requests == []


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


def test_the_line_has_the_same_fields_as_a_trajectory_of_token_ids(serve):
    from trajectory import RolloutHandler

    (t,) = collect_api(
        api_of(serve(oracle_answer)), LocalPool(), requests_of(TASKS[:1]), settings_of()
    )
    reference = RolloutHandler("s", 0, "textcraft", "textcraft_0", "depth 1", 0, 0, 20).to_line()
    assert set(reference) - set(t.to_line()) <= {"error"}


def test_the_turn_limit_stops_and_no_unanswered_observation_is_kept(serve):
    (t,) = collect_api(
        api_of(serve(says("Action: inventory"))),
        LocalPool(),
        requests_of(TASKS[:1], max_rounds=3),
        settings_of(),
    )
    assert (t.stop_reason, t.truncated, t.success, len(t.turns)) == ("max_rounds", True, False, 3)
    assert t.messages[-1]["role"] == "assistant"


class EndsWith(LocalPool):
    """Every step is answered with one result."""

    def __init__(self, result):
        self.result = result

    def client(self, avoid=()):
        client = LocalClient(lambda what: None)
        client.step = lambda text: self.result
        return client


@pytest.mark.parametrize("cut_by", ["env_limit", "max_rounds"])
@pytest.mark.parametrize("success", [True, False])
def test_an_episode_that_is_cut_keeps_what_the_environment_calls_success(serve, cut_by, success):
    result = StepResult("on", 0.5, False, cut_by == "env_limit", {"success": success})
    (t,) = collect_api(
        api_of(serve(says("x"))),
        EndsWith(result),
        requests_of(TASKS[:1], max_rounds=1),
        settings_of(),
    )
    assert (t.stop_reason, t.success, t.truncated, t.terminated) == (cut_by, success, True, False)


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


def test_answers_without_text_are_unparsable_actions_with_reward_0(serve):
    (t,) = collect_api(
        api_of(serve(says(None))), LocalPool(), requests_of(TASKS[:1], 1, 2), settings_of()
    )
    assert t.is_valid and t.stop_reason == "max_rounds"
    assert all(turn.parse_error and turn.action_text == "" for turn in t.turns)
    assert t.total_return == 0.0


def test_a_full_context_ends_the_episode_with_length(serve):
    server = serve(says("Action: inventory"), fails(400, "maximum context length is 9"))
    (t,) = collect_api(api_of(server), LocalPool(), requests_of(TASKS[:1]), settings_of())
    assert (t.stop_reason, len(t.turns), t.is_valid) == ("length", 1, True)


@pytest.mark.parametrize("status", [400, 422])
def test_a_refusal_in_the_middle_of_an_episode_loses_that_episode_alone(serve, status):
    """A content filter, or a server that does not take back what its model said."""
    bad_goal = TextCraft().reset(TASKS[1].task_index).splitlines()[-1]

    def answer(body):
        if len(body["messages"]) > 3 and any(bad_goal in m["content"] for m in body["messages"]):
            return fails(status, "filtered")
        return oracle_answer(body)

    ended = collect_api(api_of(serve(answer)), LocalPool(), requests_of(TASKS), settings_of())
    assert [t.stop_reason for t in ended] == ["success", "engine_error", "success"]
    assert "filtered" in ended[1].error


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


def test_a_text_in_parts_is_that_text_and_what_was_empty_is_not_sent_empty(serve):
    server = serve(says([{"type": "text", "text": "Action: "}, {"type": "text", "text": "look"}]))
    api = api_of(server)
    assert ask(api) == "Action: look"
    api.complete([{"role": "assistant", "content": ""}], 16, 1.0, seed=2**40 + 1)
    body = server.requests[-1][2]
    assert body["messages"] == [{"role": "assistant", "content": " "}]
    assert body["seed"] == 2**40 % 2**31 + 1


def test_a_request_that_no_context_holds_is_refused_and_is_no_failure_of_the_model(serve):
    server = serve(fails(400, "max_tokens=512: this model's maximum context length is 256"))
    with pytest.raises(ApiRefused, match="smaller --max-tokens-per-turn"):
        collect_api(api_of(server), LocalPool(), requests_of(TASKS[:1]), settings_of())


def test_the_samples_of_a_task_are_asked_for_with_different_seeds(serve):
    server = serve(says("Action: inventory"))
    collect_api(api_of(server), LocalPool(), requests_of(TASKS[:2], 3, 1), settings_of())
    assert len({body["seed"] for _, _, body in server.requests}) == 6


def test_a_chat_server_that_gives_up_loses_the_trajectory_and_not_the_others(serve):
    lost_goal = TextCraft().reset(TASKS[1].task_index).splitlines()[-1]

    def answer(body):
        if any(lost_goal in m["content"] for m in body["messages"]):
            return fails(500, "cannot")
        return oracle_answer(body)

    trajectories = collect_api(
        api_of(serve(answer), max_retries=1), LocalPool(), requests_of(TASKS), settings_of()
    )
    assert [t.stop_reason for t in trajectories] == ["success", "engine_error", "success"]
    assert "HTTP 500: cannot" in trajectories[1].error
    assert not trajectories[1].is_valid


def test_too_many_lost_trajectories_stop_the_run_early_with_the_last_error(serve):
    server = serve(fails(500, "on fire"))
    with pytest.raises(TooManyEnvFailures, match="2 of 12 .* HTTP 500: on fire"):
        collect_api(
            api_of(server, max_retries=0),
            LocalPool(),
            requests_of(TASKS, 4),
            settings_of(max_env_failures=0.1, env_workers=1),
        )


def test_a_wrong_key_stops_the_run_at_once(serve):
    server = serve(fails(401, "bad key"))
    with pytest.raises(ApiRefused, match="HTTP 401: bad key"):
        collect_api(api_of(server), LocalPool(), requests_of(TASKS, 20), settings_of(env_workers=1))
    assert len(server.requests) <= 2


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
