"""rollout.py: exact tokens and masks, budgets, and trajectories when something fails."""

import contextlib
import json
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from fakes import (
    FakeClient,
    FakePool,
    ScriptedEngine,
    byte_tokenizer,
    draw,
    ids_of,
    observe,
    requests_of,
    settings_of,
    word_tokenizer,
)
from hypothesis import given
from hypothesis import strategies as st

from chat import ChatTemplate
from engines import EngineError
from envclient import EnvConnectionError, EnvPool, EnvServerError, EnvTimeout
from envs import Task
from envs.textcraft.env import TextCraft
from models import load_tokenizer
from rollout import (
    THREAD_NAME,
    RolloutLog,
    RolloutRequest,
    TaskOutcomes,
    TooManyEnvFailures,
    check_failures,
    collect,
    draw_indices,
    draw_requests,
    draw_uncertain,
    sampling_seed,
)
from scale.default_models import resolve_model

ROOT = Path(__file__).resolve().parent.parent
WORDS = word_tokenizer()


@pytest.fixture(scope="module")
def chat():
    """A template for a tokenizer with one id per word."""
    return ChatTemplate(WORDS)


def saying(*texts):
    """A policy that says texts[n] in turn n, regardless of its prompt."""
    end_of_turn = ids_of("<e>")[0]

    def answer(request_id, prompt_ids):
        return ids_of(texts[prompt_ids.count(end_of_turn) // 2 - 1])

    return answer


def playing(*results):
    """An environment that answers results[n - 1] to the n-th turn of any episode."""
    return lambda task_index, turn, text: results[turn - 1]


def failing(num_failures, error=None):
    """An environment whose first `num_failures` calls of step raise, over all sessions."""
    failures_left = [num_failures]
    error = error or EnvServerError("the environment failed", "http://fake/step", 500)

    def play(task_index, turn, text):
        if failures_left[0]:
            failures_left[0] -= 1
            raise error
        return observe("open", 1.0, terminated=True)

    return play


# -------------------------------------------------------------------------- tokens and masks


def test_three_turns_have_exactly_this_mask(chat):
    """Also trap 7: the second turn is cut at 3 tokens. Its end-of-turn has mask 0; it is played."""
    pool = FakePool(playing(observe("bright"), observe("no"), observe("home", 1.0, True)))
    engine = ScriptedEngine(saying("light lamp<e>", "go north go take<e>", "open door<e>"))
    (handler,) = collect(engine, pool, chat, requests_of(1), settings_of(max_tokens_per_turn=3))
    assert draw(handler, WORDS) == (
        "<s> system ⏎ rules <e> ⏎ <s> user ⏎ dark <e> ⏎ <s> assistant ⏎ "
        "[light] [lamp] [<e>] ⏎ <s> user ⏎ bright <e> ⏎ <s> assistant ⏎ "
        "[go] [north] [go] <e> ⏎ <s> user ⏎ no <e> ⏎ <s> assistant ⏎ "
        "[open] [door] [<e>]"
    ).split(" ")
    assert [turn.action_text for turn in handler.turns] == [
        "light lamp",
        "go north go",
        "open door",
    ]
    spans = [handler.loss_mask[slice(*turn.action_span)] for turn in handler.turns]
    assert spans == [[1, 1, 1]] * 3 and sum(handler.loss_mask) == 9
    assert handler.stop_reason == "success" and handler.total_return == 1.0
    sampled = [x for x, m in zip(handler.rollout_log_probs, handler.loss_mask) if m]
    assert sampled == [-1 / 8, -2 / 8, -3 / 8] * 3, "the sampler's log-probs"
    assert {x for x, m in zip(handler.rollout_log_probs, handler.loss_mask) if not m} == {0.0}


def test_every_prompt_is_a_prefix_of_the_next_and_of_the_trajectory():
    """Trap 6, with a byte tokenizer: the sampled text, encoded again, gives different ids."""
    tokenizer = load_tokenizer(resolve_model("tiny"))
    chat = ChatTemplate(tokenizer)
    letters = [i for c in "get 1 stick" for i in tokenizer.encode(c, add_special_tokens=False)]
    assert tokenizer.encode(tokenizer.decode(letters), add_special_tokens=False) != letters
    pool = FakePool(lambda task_index, turn, text: observe(f"{text}? no"))
    engine = ScriptedEngine(lambda request_id, prompt_ids: [*letters, chat.end_of_turn])
    (handler,) = collect(engine, pool, chat, requests_of(1), settings_of())
    prompts = [prompt for _, prompt, _ in engine.requests]
    assert len(prompts) == 3
    for prompt, longer in zip(prompts, [*prompts[1:], handler.input_ids]):
        assert longer[: len(prompt)] == prompt
    for turn, prompt in zip(handler.turns, prompts):
        start, end = turn.action_span
        assert start == len(prompt)
        assert handler.input_ids[start:end] == [*letters, chat.end_of_turn]
        assert turn.action_text == "get 1 stick"


def test_a_turn_that_ends_with_the_end_of_sequence_gets_an_end_of_turn_with_mask_0():
    """For models whose end-of-sequence token differs from the template's end-of-turn token."""
    chat = ChatTemplate(byte_tokenizer(eos="<|endoftext|>"))
    end_of_text = chat.tokenizer.eos_token_id
    pool = FakePool(playing(observe("home", 1.0, True)))
    engine = ScriptedEngine(lambda *_: [*chat.plain("go"), end_of_text])
    (handler,) = collect(engine, pool, chat, requests_of(1), settings_of())
    assert handler.input_ids[-2:] == [end_of_text, chat.end_of_turn]
    assert handler.loss_mask[-2:] == [1, 0] and handler.num_cut_turns == 0
    assert handler.turns[0].action_text == "go"


# --------------------------------------------------------------------------------- budgets


def test_a_turn_that_the_trajectory_budget_cuts_is_not_played(chat):
    """Trap 10: the budget has 18 tokens, and the winning answer would need 19."""
    steps = []
    pool = FakePool(lambda *turn: steps.append(turn) or observe("home", 1.0, True))
    engine = ScriptedEngine(saying("open door<e>"))
    (handler,) = collect(engine, pool, chat, requests_of(1), settings_of(max_trajectory_tokens=18))
    assert draw(handler, WORDS)[-3:] == ["[open]", "[door]", "<e>"]
    assert handler.stop_reason == "length" and handler.truncated and not handler.terminated
    assert not steps and handler.total_return == 0.0 and not handler.success
    assert handler.is_valid and not pool.open and handler.num_cut_turns == 1

    (handler,) = collect(engine, pool, chat, requests_of(1), settings_of(max_trajectory_tokens=19))
    assert handler.stop_reason == "success" and len(steps) == 1 and handler.total_return == 1.0
    assert handler.num_cut_turns == 0
    (handler,) = collect(engine, pool, chat, requests_of(1), settings_of(max_tokens_per_turn=2))
    assert handler.num_cut_turns == 1, "without its stop token, although the turn is played"


@pytest.mark.parametrize("budget", range(10, 60))
def test_no_budget_is_exceeded_and_no_reward_comes_after_it(chat, budget):
    pool = FakePool(
        playing(observe("bright", 0.25), observe("no", 0.25), observe("home", 0.5, True))
    )
    engine = ScriptedEngine(saying("light lamp<e>", "go north go take<e>", "open door<e>"))
    settings = settings_of(max_tokens_per_turn=4, max_trajectory_tokens=budget)
    (handler,) = collect(engine, pool, chat, requests_of(1), settings)
    assert len(handler.input_ids) <= budget or not any(handler.loss_mask)
    assert all(end <= budget for _, end in (turn.action_span for turn in handler.turns))
    assert handler.stop_reason in ("length", "failure")
    if budget < 16:  # trap 4: an empty trajectory is dropped and counted, never averaged
        assert handler.turns == [] and not handler.is_valid and engine.requests == []
    assert not pool.open


@pytest.mark.parametrize(
    ("budget", "requests"),
    [
        (29, [(15, 13)]),  # 18 + 10 for the observation leave no room for a token and its end
        (30, [(15, 14), (28, 1)]),
        (31, [(15, 15), (28, 2)]),
    ],
)
def test_an_observation_is_appended_if_a_token_and_its_end_fit_after_it(chat, budget, requests):
    pool = FakePool(playing(observe("bright", 0.5), observe("home", 0.5, True)))
    engine = ScriptedEngine(saying("light lamp<e>", "open door<e>"))
    settings = settings_of(max_trajectory_tokens=budget)
    (handler,) = collect(engine, pool, chat, requests_of(1), settings)
    assert [(len(ids), s.max_tokens) for _, ids, s in engine.requests] == requests
    assert handler.stop_reason == "length" and handler.total_return == 0.5
    assert len(handler.input_ids) == (budget if len(requests) > 1 else 18)


@pytest.mark.parametrize(
    ("last", "stop_reason", "terminated", "success"),
    [
        (observe("home", 1.0, terminated=True), "success", True, True),
        (observe("no", 0.0, terminated=True), "failure", True, False),
        (observe("no", 0.5, truncated=True), "env_limit", False, False),
        (observe("no", 0.5), "max_rounds", False, False),
        (observe("no", 1.0, truncated=True, success=True), "env_limit", False, True),
        (observe("no " * 500, 1.0, success=True), "length", False, True),  # does not fit
    ],
)
def test_the_stop_reason_follows_from_the_last_answer(chat, last, stop_reason, terminated, success):
    pool = FakePool(playing(observe("dark"), last))
    engine = ScriptedEngine(saying("wait<e>", "wait<e>"))
    requests = requests_of(1, max_rounds=3 if stop_reason == "length" else 2)
    (handler,) = collect(engine, pool, chat, requests, settings_of())
    assert handler.stop_reason == stop_reason and len(handler.turns) == 2
    assert (handler.terminated, handler.truncated) == (terminated, not terminated)
    assert handler.success is success and handler.is_valid
    assert handler.messages[-1]["role"] == "assistant"  # the last observation is not appended
    assert handler.turns[-1].observation_text == last.observation
    assert not pool.open


# ----------------------------------------------------------------------------- the event loop


def test_a_slow_environment_delays_only_itself(chat):
    """Trap 9: the slow step returns only after all other episodes have ended."""
    fast_done, ended_ids, wait_results = threading.Event(), [], []

    def play(task_index, turn, text):
        if task_index == 0 and turn == 1:
            wait_results.append(fast_done.wait(timeout=60))
        return observe("no")

    def progress(handler):
        ended_ids.append(handler.task_id)
        if len(ended_ids) == 3:
            fast_done.set()

    engine, log = ScriptedEngine(saying("wait<e>", "wait<e>", "wait<e>")), RolloutLog(progress)
    handlers = collect(engine, FakePool(play), chat, requests_of(4), settings_of(), log)
    assert 0 < log.engine_idle_s < log.seconds < 120
    assert wait_results == [True]
    assert ended_ids[-1] == "fake_0"
    assert [h.task_id for h in handlers] == ["fake_0", "fake_1", "fake_2", "fake_3"]
    assert all(len(h.turns) == 3 for h in handlers)


def test_at_most_max_open_episodes_are_open(chat):
    """A new episode starts when another one ends, until all are played."""
    starts, ends, num_open = [], [], []

    def on_reset(task_index):
        starts.append(task_index)
        num_open.append(len(starts) - len(ends))
        return "dark"

    pool = FakePool(playing(*[observe("no")] * 3), on_reset)
    engine = ScriptedEngine(saying("wait<e>", "wait<e>", "wait<e>"), max_open=3)
    handlers = collect(engine, pool, chat, requests_of(10), settings_of(), RolloutLog(ends.append))
    assert [h.task_id for h in handlers] == [f"fake_{i}" for i in range(10)]
    assert all(len(h.turns) == 3 for h in handlers) and max(num_open) == 3
    assert sorted(starts[:3]) == [0, 1, 2] and sorted(starts) == list(range(10))


def test_each_part_of_the_key_changes_the_seed():
    base = (3, 1, "fake_0", 0, 0)
    keys = [base, (4, 1, "fake_0", 0, 0), (3, 2, "fake_0", 0, 0), (3, 1, "fake_1", 0, 0)]
    keys += [(3, 1, "fake_0", 1, 0), (3, 1, "fake_0", 0, 1), (3, 11, "fake_0", 0, 0)]
    seeds = {sampling_seed(*key) for key in keys}
    assert len(seeds) == 7 and all(0 <= seed < 2**63 for seed in seeds)
    assert sampling_seed(*base) == 4994733517405576116  # the same on any machine


def test_every_turn_is_sampled_at_the_temperature_with_a_seed_of_its_own(chat):
    """The seed is that of (run, step, task, sample, turn)."""
    engine = ScriptedEngine(saying("wait<e>", "wait<e>", "wait<e>"))
    settings = settings_of(temperature=0.7, seed=5)
    requests = requests_of(2, num_samples=2, step=4)
    collect(engine, FakePool(playing(*[observe("no")] * 3)), chat, requests, settings)
    assert {sampling.temperature for *_, sampling in engine.requests} == {0.7}
    assert sorted(sampling.seed for *_, sampling in engine.requests) == sorted(
        sampling_seed(5, 4, f"fake_{task}", sample, turn)
        for task in range(2)
        for sample in range(2)
        for turn in range(3)
    )


def test_an_episode_begins_at_its_task_with_its_seed(chat, monkeypatch):
    resets, reset = [], FakeClient.reset

    def noted(client, task_index, seed=0):
        resets.append((task_index, seed))
        return reset(client, task_index, seed)

    monkeypatch.setattr(FakeClient, "reset", noted)
    requests = [replace(r, seed=70 + r.group_id) for r in requests_of(2)]
    pool, engine = FakePool(playing(observe("home", 1.0, True))), ScriptedEngine(saying("go<e>"))
    collect(engine, pool, chat, requests, settings_of())
    assert sorted(resets) == [(0, 70), (1, 71)]


def test_the_oracle_is_asked_before_every_act(chat, monkeypatch):
    monkeypatch.setattr(FakeClient, "oracle", lambda c: ("why", f"go {c.num_turns}"), raising=False)
    monkeypatch.setattr(FakeClient, "say", lambda client, *words: " ".join(words), raising=False)
    engine, pool = ScriptedEngine(saying(*["wait<e>"] * 3)), FakePool(playing(*[observe("no")] * 3))
    (handler,) = collect(engine, pool, chat, requests_of(1), settings_of(ask_oracle=True))
    assert [turn.advice for turn in handler.turns] == ["why go 0", "why go 1", "why go 2"]


# -------------------------------------------------------------------------------- failures


def test_an_episode_whose_step_fails_starts_over_once_from_reset(chat):
    pool = FakePool(failing(1))
    engine = ScriptedEngine(saying("open door<e>"))
    (handler,) = collect(engine, pool, chat, requests_of(1), settings_of())
    assert handler.stop_reason == "success" and handler.error is None and handler.is_valid
    assert len(handler.turns) == 1 and handler.loss_mask.count(1) == 3
    assert pool.num_opened == 2 and not pool.open
    assert [ids for _, ids, _ in engine.requests] == [handler.input_ids[:15]] * 2


def test_an_episode_that_fails_twice_is_an_env_error_and_not_in_the_loss(chat):
    """Trap 5: AgentGym-RL gives it return 0 and trains on it."""
    pool = FakePool(failing(2, error=EnvTimeout("silent for 60 s", "http://fake/step")))
    engine = ScriptedEngine(saying("open door<e>"))
    (handler,) = collect(engine, pool, chat, requests_of(1), settings_of())
    assert handler.stop_reason == "env_error" and not handler.is_valid
    assert handler.truncated and not handler.terminated
    assert handler.error == "http://fake/step: silent for 60 s"
    assert pool.num_opened == 2 and not pool.open


@pytest.mark.parametrize(("num_failures", "stop_reason"), [(2, "success"), (3, "env_error")])
def test_reset_is_attempted_three_times(chat, num_failures, stop_reason):
    failures_left = [num_failures]

    def on_reset(task_index):
        failures_left[0] -= 1
        if failures_left[0] >= 0:
            raise EnvServerError("no browser", "http://fake/reset", 500)
        return "dark"

    pool = FakePool(playing(observe("home", 1.0, True)), on_reset)
    engine = ScriptedEngine(saying("open door<e>"))
    (handler,) = collect(engine, pool, chat, requests_of(1), settings_of())
    assert handler.stop_reason == stop_reason and pool.num_opened == 3 and not pool.open
    assert handler.is_valid == (stop_reason == "success")


def test_a_reset_that_fails_after_its_opening_leaves_nothing_of_it(chat, monkeypatch):
    failures = [EnvServerError("no path", "http://fake/oracle", 500)]

    def oracle(client):
        if failures:
            raise failures.pop()
        return "why", "open door"

    monkeypatch.setattr(FakeClient, "oracle", oracle, raising=False)
    monkeypatch.setattr(FakeClient, "say", lambda client, *words: " ".join(words), raising=False)
    played = [
        collect(
            ScriptedEngine(saying("open door<e>")),
            FakePool(playing(observe("home", 1.0, True))),
            chat,
            requests_of(1),
            settings_of(ask_oracle=True),
        )[0]
        for _ in range(2)
    ]
    assert not failures and played[0].input_ids == played[1].input_ids
    assert played[0].turns[0].advice == "why open door"


def test_too_many_failures_raise_an_error_that_names_the_server(chat):
    def play(task_index, turn, text):
        if task_index < 2:
            url = f"http://10.0.0.{6 + task_index}:36005/step"
            raise EnvServerError("no browser", url, 500, "chrome died")
        return observe("home", 1.0, terminated=True)

    engine = ScriptedEngine(saying("open door<e>"))
    handlers = collect(
        engine, FakePool(play), chat, requests_of(8), settings_of(max_env_failures=0.25)
    )
    assert [h.stop_reason for h in handlers] == ["env_error"] * 2 + ["success"] * 6
    assert [h.is_valid for h in handlers] == [False] * 2 + [True] * 6
    log = RolloutLog()
    with pytest.raises(TooManyEnvFailures, match="2 of 8") as error:
        settings = settings_of(max_env_failures=0.2)
        collect(engine, FakePool(play), chat, requests_of(8), settings, log)
    assert "--max-env-failures 20%" in str(error.value)
    assert "http://10.0.0.7:36005/step: no browser [HTTP 500: chrome died]" in str(error.value)
    assert len(str(error.value).splitlines()) == 1 and len(log.trajectories) == 8


def test_lost_trajectories_are_counted_per_environment_and_as_a_share_of_all(chat):
    """One of nine is lost, which the limit allows, but it is the only one of its environment."""
    engine, pool = ScriptedEngine(saying("open door<e>")), FakePool(failing(2))
    (failure,) = collect(engine, pool, chat, requests_of(1), settings_of())
    successes = [replace(failure, stop_reason="success", env="other") for _ in range(8)]
    check_failures([failure, *(replace(t, env=failure.env) for t in successes)], limit=0.2)
    with pytest.raises(TooManyEnvFailures, match="1 of 1 trajectories of fake were lost"):
        check_failures([failure, *successes], limit=0.2)
    check_failures([failure], limit=0.25, total=4)  # the others have not ended yet
    with pytest.raises(TooManyEnvFailures, match="1 of 3 trajectories were lost"):
        check_failures([failure], limit=0.25, total=3)


@pytest.mark.parametrize("place", ["reset", "step", "policy"])
def test_a_bug_in_a_thread_or_in_the_engine_surfaces_and_does_not_hang(chat, place):
    def bug(*_):
        return 1 // 0

    pool = FakePool(
        bug if place == "step" else playing(observe("no")),
        bug if place == "reset" else lambda task_index: "dark",
    )
    engine = ScriptedEngine(bug if place == "policy" else saying("wait<e>"))
    with pytest.raises(ZeroDivisionError):
        collect(engine, pool, chat, requests_of(3), settings_of())
    assert engine.aborted
    wait_for_threads()
    assert not pool.open


def wait_for_threads():
    """Wait until no environment call is running."""
    for thread in threading.enumerate():
        if thread.name.startswith(THREAD_NAME):
            thread.join(timeout=10)


def stop_when(condition, error):
    """An `on_poll` for ScriptedEngine that raises as soon as the condition is true."""

    def on_poll():
        if condition():
            raise error
        time.sleep(1e-3)

    return on_poll


@pytest.mark.parametrize("error", [EngineError("out of memory"), KeyboardInterrupt()])
def test_an_engine_error_or_ctrl_c_saves_ended_trajectories_and_closes_every_session(chat, error):
    """The engine fails when task 0 has ended and tasks 1 and 2 are being sampled."""
    handlers = []
    pool = FakePool(lambda *_: observe("home", 1.0, terminated=True))
    engine = ScriptedEngine(
        saying("open door<e>"),
        is_ready=lambda request_id: "t0000" in request_id,
        on_poll=stop_when(lambda: len(handlers) == 1 and pool.num_opened == 3, error),
    )
    with pytest.raises(type(error)):
        collect(
            engine, pool, chat, requests_of(3), settings_of(), RolloutLog(trajectories=handlers)
        )
    reasons = {"fake_0": "success"}
    if isinstance(error, EngineError):
        reasons |= {"fake_1": "engine_error", "fake_2": "engine_error"}
        assert {h.error for h in handlers[1:]} == {"out of memory"}
    assert {h.task_id: h.stop_reason for h in handlers} == reasons
    assert [h.is_valid for h in handlers] == [True] + [False] * (len(handlers) - 1)
    assert engine.aborted and engine.num_running == 0
    wait_for_threads()
    assert not pool.open


@pytest.mark.parametrize("call", ["open", "reset", "step"])
def test_a_session_with_a_running_call_is_closed_when_the_run_stops(chat, call):
    """Ctrl-C during an environment call: its thread must not continue or open another session."""
    is_waiting, can_continue = threading.Event(), threading.Event()

    def wait(current_call, task_index=0):
        if call == current_call and task_index == 0 and not is_waiting.is_set():
            is_waiting.set()
            assert can_continue.wait(timeout=60)

    pool = FakePool(
        lambda task_index, *_: wait("step", task_index) or observe("no"),
        on_reset=lambda task_index: wait("reset", task_index) or "dark",
        on_open=lambda: wait("open"),
    )
    engine = ScriptedEngine(
        saying("wait<e>"),
        is_ready=lambda request_id: call == "step" and "t0000" in request_id,
        on_poll=stop_when(is_waiting.is_set, KeyboardInterrupt()),
    )
    with pytest.raises(KeyboardInterrupt):
        collect(engine, pool, chat, requests_of(2), settings_of())
    can_continue.set()
    wait_for_threads()
    assert not pool.open and pool.num_opened <= 2


# ------------------------------------------------------------------------- a server that restarts


@contextlib.contextmanager
def server_process(port=0):
    """The address of an environment server that a test can kill."""
    command = [sys.executable, "-m", "envs.server", "--env", "textcraft", "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        yield re.search(r"http://\S+", process.stdout.readline())[0]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_server_that_restarts_during_a_rollout_does_not_mix_up_sessions():
    """Trap 23: replayed in a new environment, each trajectory gets the same observations."""
    chat = ChatTemplate(byte_tokenizer())
    indices = list(range(140, 164))  # plans of several turns, all with different recipes
    plans = {}
    for index in indices:
        env = TextCraft()
        env.reset(index)
        plans[index] = [f"Action: {action}" for action in env.state_for_people()["plan"]]
    request_ids = []

    def answer(request_id, prompt_ids):
        request_ids.append(request_id)
        if len(request_ids) == 36:  # every episode has started
            server.close()  # kills the server process
            server.enter_context(server_process(url.rpartition(":")[2]))
        turn = prompt_ids.count(chat.end_of_turn) // 2 - 1
        plan = plans[indices[int(request_id[9:13])]]
        return chat.action(plan[min(turn, len(plan) - 1)])

    requests = [
        RolloutRequest(Task(f"textcraft_{i}", i, "depth 1"), n, 0, seed=0, step=1, max_rounds=8)
        for n, i in enumerate(indices)
    ]
    settings = settings_of(env_workers=16, max_tokens_per_turn=4000, max_trajectory_tokens=20_000)
    with contextlib.ExitStack() as server:
        url = server.enter_context(server_process())
        with EnvPool("textcraft", [url], timeout_s=20) as pool:
            handlers = collect(ScriptedEngine(answer), pool, chat, requests, settings)
    assert all(h.is_valid for h in handlers)  # because an episode starts over once
    for handler in handlers:
        env = TextCraft()
        first_observation = env.reset(int(handler.task_id.rpartition("_")[2]), handler.seed)
        assert handler.messages[-2 * len(handler.turns)]["content"] == first_observation
        for turn in handler.turns:
            observation, reward, *_ = env.step(env.parse(turn.action_text))
            assert (turn.observation_text, turn.reward) == (observation, reward)


# -------------------------------------------------------------------------- trajectory line


def test_a_line_is_json_and_has_every_field_of_the_contract(chat):
    pool = FakePool(playing(observe("no", 0.25, parse_error="no"), observe("home", 0.75, True)))
    engine = ScriptedEngine(saying("wait<e>", "open door<e>"))
    (handler,) = collect(
        engine, pool, chat, requests_of(1, step=3), settings_of(record_state=True, weight_version=2)
    )
    line = json.loads(json.dumps(handler.to_line(), allow_nan=False))
    assert set(line) >= {
        *("trajectory_id", "step", "env", "task_id", "subtask", "group_id", "seed", "max_rounds"),
        *("messages", "input_ids", "loss_mask", "rollout_log_probs", "advantages", "turns"),
        *("return", "success", "terminated", "truncated", "stop_reason", "weight_version"),
        "used_in_loss",
    }
    assert line["trajectory_id"] == "s000003-t0000-k00" and line["weight_version"] == 2
    assert line["return"] == 1.0 and line["advantages"] is None and line["used_in_loss"] is False
    first, second = line["turns"]
    assert set(first) == {
        *("action_span", "action_text", "observation_text", "reward", "parse_error"),
        *("advice", "anchor", "kind", "generate_s", "env_s", "state"),
    }
    assert first["action_span"] == [15, 17] and first["action_text"] == "wait"
    assert (first["reward"], first["parse_error"], second["parse_error"]) == (0.25, "no", None)
    assert first["state"] == {"turn": 1} and second["state"] == {"turn": 2}
    assert 0 < first["generate_s"] < 60 and 0 < first["env_s"] < 60
    assert [m["role"] for m in line["messages"]] == ["system", *["user", "assistant"] * 2]
    assert line["messages"][3]["content"] == "no"  # the policy reads the parse error
    assert not any(name.startswith("_") for name in line)


def test_an_episode_that_starts_over_does_not_block_the_steps_of_others(chat):
    """Its new session may have to wait until another episode ends (429). If the restart used the
    only thread for steps, that episode could never end."""
    other_ended, failures = threading.Event(), []

    def play(task_index, turn, text):
        if task_index == 0 and not failures:
            failures.append(1)
            raise EnvConnectionError("gone", "http://fake/step")
        other_ended.set()
        return observe("home", 1.0, True)

    def on_open():
        if failures and pool.num_opened == 2:
            assert other_ended.wait(10), "the restart blocks the thread for steps"

    pool = FakePool(play, on_open=on_open)
    engine = ScriptedEngine(saying("open door<e>"))
    handlers = collect(engine, pool, chat, requests_of(2), settings_of(env_workers=1))
    assert [h.stop_reason for h in handlers] == ["success", "success"]


# ---------------------------------------------------------------- which tasks a step plays


def test_a_task_that_is_drawn_twice_gets_new_sample_numbers():
    """The sampler's random numbers depend on step, task and sample number only (rollout.py)."""
    tasks = [Task(f"t_{n}", n, "", "textcraft") for n in range(3)]
    requests = draw_requests(1, tasks, 7, 4, seed=0, step=1, horizons={"textcraft": 5})
    assert len({r.group_id for r in requests}) == 7
    assert len({(r.task.task_id, r.sample) for r in requests}) == len(requests) == 28
    requests = draw_requests(1, tasks, 3, 4, seed=0, step=1, horizons={"textcraft": 5})
    assert sorted({r.sample for r in requests}) == [0, 1, 2, 3]


def test_a_group_shares_the_seed_of_its_position_in_the_run():
    """Each position has a different seed, so a task that is drawn again is a new instance."""
    tasks = [Task(f"t_{n}", n, "", "textcraft") for n in range(3)]
    draws = [
        draw_requests(t, tasks, 2, 2, seed, step=9, horizons={"textcraft": 5})
        for seed, t in ((0, 1), (0, 2), (7, 3))
    ]
    seeds = [[(r.group_id, r.seed) for r in requests] for requests in draws]
    assert seeds[0] == [(0, 0), (0, 0), (1, 1), (1, 1)]
    assert seeds[1] == [(0, 2), (0, 2), (1, 3), (1, 3)]
    assert seeds[2] == [(0, 7_000_025), (0, 7_000_025), (1, 7_000_026), (1, 7_000_026)]
    assert {(r.step, r.max_rounds) for r in draws[2]} == {(9, 5)}


@given(
    envs=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 3)), min_size=1, max_size=3),
    size=st.integers(1, 7),
    key=st.text(max_size=3),
)
def test_each_environment_plays_all_its_tasks_before_one_is_repeated(envs, size, key):
    counts, weights = [count for count, _ in envs], [weight for _, weight in envs]
    pairs = [pair for t in range(1, 9) for pair in draw_indices(t, counts, size, key, weights)]
    assert len(pairs) == 8 * size
    for start in range(0, len(pairs) - sum(weights) + 1, sum(weights)):
        env_counts = Counter(env for env, _ in pairs[start : start + sum(weights)])
        assert [env_counts[env] for env in range(len(envs))] == weights
    for env, count in enumerate(counts):
        indices = [index for pair_env, index in pairs if pair_env == env]
        for start in range(0, len(indices) - count + 1, count):
            assert sorted(indices[start : start + count]) == list(range(count))


def test_the_draws_of_an_environment_do_not_depend_on_other_environments():
    indices = [index for t in range(1, 7) for _, index in draw_indices(t, [5], 2, "0")]
    pairs = [pair for t in range(1, 7) for pair in draw_indices(t, [5, 3], 4, "0", [1, 1])]
    assert [index for env, index in pairs if env == 0] == indices


# ------------------------------------------------------------ tasks whose outcome is least certain


def test_tasks_are_drawn_in_proportion_to_their_variance_and_without_replacement():
    """Worked by hand for variances 2, 1, 1: the first task is 0 with probability 1/2, and task 1
    then follows 0 with 1/2, or 0 follows 1 with 2/3: 1/2 · 1/2 + 1/4 · 2/3 = 5/12."""
    num_draws = 10_000
    draws = [draw_uncertain(t, [[2, 1, 1]], 2, "0") for t in range(1, num_draws + 1)]
    first = Counter(draw[0][1] for draw in draws)
    pairs = Counter(frozenset(index for _, index in draw) for draw in draws)
    tolerance = 0.02  # four standard deviations of a share of 1/2
    for task, expected in {0: 1 / 2, 1: 1 / 4, 2: 1 / 4}.items():
        assert first[task] / num_draws == pytest.approx(expected, abs=tolerance)
    for pair, expected in {(0, 1): 5 / 12, (0, 2): 5 / 12, (1, 2): 1 / 6}.items():
        assert pairs[frozenset(pair)] / num_draws == pytest.approx(expected, abs=tolerance)


def test_a_step_with_more_tasks_than_the_list_plays_all_before_one_is_repeated():
    indices = [index for _, index in draw_uncertain(3, [[0.25, 0.01, 0.25]], 7, "0")]
    assert sorted(indices[:3]) == sorted(indices[3:6]) == [0, 1, 2] and indices[6] == indices[0]


def test_uncertainty_decides_within_an_environment_and_the_weights_decide_between_them():
    draws = [draw_uncertain(t, [[1e-9, 1e-9], [1, 1, 1]], 4, "0", [2, 1]) for t in (1, 2, 3)]
    expected = [draw_indices(t, [2, 3], 4, "0", [2, 1]) for t in (1, 2, 3)]
    assert [[env for env, _ in d] for d in draws] == [[env for env, _ in d] for d in expected]


def outcomes_of(**successes):
    """One trajectory per success or failure of each task; None: lost to the infrastructure."""
    return [
        SimpleNamespace(task_id=task, is_valid=success is not None, success=bool(success))
        for task, of_task in successes.items()
        for success in of_task
    ]


def test_old_outcomes_count_half_whenever_a_task_is_played_again_and_lost_ones_do_not_count():
    outcomes = TaskOutcomes({"mixed": [4, 8], "waiting": [1, 8], "lost": [2, 8]})
    saved = outcomes.state_dict()
    outcomes.update(outcomes_of(mixed=[True, False, None, True], lost=[None] * 4, new=[False] * 4))
    outcomes.update(outcomes_of(new=[True] * 2))
    expected = {"mixed": [4, 7], "waiting": [1, 8], "lost": [2, 8], "new": [2, 4]}
    assert outcomes.counts == expected
    outcomes.load_state_dict(saved)
    assert outcomes.counts == {"mixed": [4, 8], "waiting": [1, 8], "lost": [2, 8]}


def test_new_tasks_come_first_and_a_task_that_always_failed_is_not_forgotten():
    tasks = [Task(f"t_{n}", n, "", "textcraft") for n in range(3)]
    outcomes, draws = TaskOutcomes({}), Counter()
    for _ in range(9):
        outcomes.update(outcomes_of(t_0=[False] * 8, t_1=[True] * 8))
    for t in range(1, 1001):
        (request,) = draw_requests(t, tasks, 1, 1, 0, t, {"textcraft": 5}, outcomes=outcomes)
        draws[request.task.task_id] += 1
    assert draws["t_2"] > 4 * max(draws["t_0"], draws["t_1"])
    assert min(draws["t_0"], draws["t_1"]) > 1000 / 20
