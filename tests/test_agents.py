"""agents.py: plans and reflections are sampled and stay in view, but no environment reads them."""

from dataclasses import replace

import pytest
from fakes import (
    FakeClient,
    FakePool,
    ScriptedEngine,
    draw,
    family_tokenizer,
    ids_of,
    observe,
    requests_of,
    settings_of,
    word_tokenizer,
)
from test_rollout import playing, saying

import agents
from agents import Agent
from chat import ChatTemplate
from reporting.scoring import summarize
from rollout import collect

WORDS = word_tokenizer()


@pytest.fixture(autouse=True)
def short_texts(monkeypatch):
    """Texts in words of the tokenizer."""
    for name, text in {"PLAN": "wait", "ACT": "go", "REFLECT": "no", "AGAIN": "home"}.items():
        monkeypatch.setattr(agents, name, text)


def played(agent, texts, play, max_rounds=2, **settings):
    """The trajectory of a policy that says `texts` in turn."""
    pool = FakePool(play)
    requests = requests_of(1, max_rounds=max_rounds)
    engine, limits = ScriptedEngine(saying(*texts)), settings_of(agent=agent, **settings)
    (handler,) = collect(engine, pool, ChatTemplate(WORDS), requests, limits)
    return handler


def test_a_plan_is_sampled_and_not_played():
    heard = []

    def play(task_index, turn, text):
        heard.append((turn, text))
        return observe("bright", float(turn == 2), turn == 2)

    handler = played(Agent("plan"), ("go north<e>", "open door<e>", "take lamp<e>"), play)
    assert draw(handler, WORDS) == (
        "<s> system ⏎ rules <e> ⏎ <s> user ⏎ dark ⏎ wait <e> ⏎ <s> assistant ⏎ "
        "[go] [north] [<e>] ⏎ <s> user ⏎ go <e> ⏎ <s> assistant ⏎ "
        "[open] [door] [<e>] ⏎ <s> user ⏎ bright <e> ⏎ <s> assistant ⏎ "
        "[take] [lamp] [<e>]"
    ).split(" ")
    assert heard == [(1, "open door"), (2, "take lamp")]
    assert [turn.kind for turn in handler.turns] == ["plan", "act", "act"]
    assert (handler.stop_reason, handler.total_return, handler.num_acts) == ("success", 1.0, 2)
    curve = summarize([handler], 1, [1, 2])["rounds_curve"]  # a plan is not one of the turns
    assert [(row["avg"]["value"], row["return_mean"]) for row in curve] == [(0, 0), (1, 1)]


def test_a_reflection_starts_the_task_again_in_the_same_sequence():
    """The first attempt ends at the limit of two turns, the second with the task."""

    def play(task_index, turn, text):
        return observe("bright", 1.0, True) if text == "open door" else observe("dark")

    texts = ("go<e>", "take<e>", "lamp no<e>", "open door<e>")
    handler = played(Agent("reflect", 2), texts, play)
    assert draw(handler, WORDS) == (
        "<s> system ⏎ rules <e> ⏎ <s> user ⏎ dark <e> ⏎ <s> assistant ⏎ "
        "[go] [<e>] ⏎ <s> user ⏎ dark <e> ⏎ <s> assistant ⏎ "
        "[take] [<e>] ⏎ <s> user ⏎ dark ⏎ no <e> ⏎ <s> assistant ⏎ "
        "[lamp] [no] [<e>] ⏎ <s> user ⏎ home ⏎ dark <e> ⏎ <s> assistant ⏎ "
        "[open] [door] [<e>]"
    ).split(" ")
    assert [turn.kind for turn in handler.turns] == ["act", "act", "reflect", "act"]
    assert (handler.stop_reason, handler.success, handler.num_acts) == ("success", True, 1)


def test_a_template_that_strips_thoughts_keeps_the_reflection_in_view():
    """Rendering Qwen3's conversation again would drop the thought; the sequence keeps it."""
    chat = ChatTemplate(family_tokenizer("qwen3"))
    texts = iter(("<think>go</think>take", "<think>no</think>lamp", "open"))

    def answer(request_id, prompt_ids):
        ids = chat.tokenizer.encode(next(texts), add_special_tokens=False)
        return [*ids, chat.end_of_turn]

    pool = FakePool(playing(observe("dark", 0.0, True)))
    settings = settings_of(agent=Agent("reflect", 2), max_tokens_per_turn=40)
    (handler,) = collect(ScriptedEngine(answer), pool, chat, requests_of(1), settings)
    sampled = [i for i, m in zip(handler.input_ids, handler.loss_mask) if m]
    assert chat.tokenizer.decode(sampled) == (
        "<think>go</think>take<|im_end|><think>no</think>lamp<|im_end|>open<|im_end|>"
    )
    whole = chat.tokenizer.decode(handler.input_ids)
    assert whole.index("<think>go</think>take") < whole.index("dark\nno") < whole.index("lamp")
    assert handler.stop_reason == "failure"


def test_an_attempt_earns_only_what_exceeds_the_best_one_before():
    scores = iter([(0.25, False), (0.25, True), (0.25, False), (0.0, False), (0.5, True)])

    def play(task_index, turn, text):
        reward, is_over = next(scores)
        return observe("dark", reward, is_over, success=False)

    texts = ("go<e>", "take<e>", "no<e>", "go<e>", "go<e>", "go<e>")
    handler = played(Agent("reflect", 2), texts, play, max_rounds=9)
    assert [turn.reward for turn in handler.turns] == [0.25, 0.25, 0.0, 0.0, 0.0, 0.25]
    assert (handler.total_return, handler.stop_reason) == (0.75, "failure")
    first, _ = summarize([handler], 1, [1, 9])["rounds_curve"]  # of each attempt
    assert first["return_mean"] == 0.25


def test_attempts_end_with_success_with_their_number_or_with_the_token_budget():
    lost = playing(observe("dark", 0.0, True))
    handler = played(Agent("reflect", 3), ("go<e>", "no<e>") * 3, lost)
    assert [turn.kind for turn in handler.turns] == ["act", "reflect"] * 2 + ["act"]
    won = playing(observe("dark", 1.0, True))
    assert len(played(Agent("reflect", 3), ("go<e>",), won).turns) == 1
    handler = played(Agent("reflect", 9), ("go<e>", "no<e>") * 9, lost, max_trajectory_tokens=60)
    assert (handler.stop_reason, len(handler.input_ids) <= 60) == ("length", True)
    assert ids_of("<e>")[0] in handler.input_ids


def test_every_attempt_begins_with_the_seed_of_the_episode(monkeypatch):
    seeds = []
    monkeypatch.setattr(FakeClient, "reset", lambda c, i, seed=0: seeds.append(seed) or "dark")
    monkeypatch.setattr(FakeClient, "score", 0.0, raising=False)
    requests = [replace(r, seed=7) for r in requests_of(1)]
    engine = ScriptedEngine(saying("go<e>", "no<e>", "go<e>"))
    pool = FakePool(playing(*[observe("dark", 0.0, True)] * 2))
    settings = settings_of(agent=Agent("reflect", 2))
    collect(engine, pool, ChatTemplate(WORDS), requests, settings)
    assert seeds == [7, 7]
