"""formats.py: an action can be said in three ways, and a text that says none gets its reason."""

import json
from types import SimpleNamespace

import pytest
from fakes import family_tokenizer

import formats
from chat import ChatTemplate
from data import encode
from envclient import StepResult, connect
from envs import ParseError, get_env
from envs.common import action_line, tool
from formats import Code, FunctionCalling, React
from sampling.chatapi import message_text
from trajectory import RolloutHandler

STYLES = ("hermes", "llama", "mistral")
EVERY = [React(), React(2), *(FunctionCalling(style=style) for style in STYLES), Code()]
FAMILIES = {"qwen2.5": "hermes", "llama3.1": "llama", "mistral0.3": "mistral"}
TEXTCRAFT = get_env("textcraft")
ACTIONS = {
    "textcraft": ["get 2 oak log", "craft 1 cake using 3 milk bucket, 2 sugar", "inventory"],
    "babyai": ["turn left", "turn right", "move forward", "drop", "go to red ball 1", "toggle"]
    + ["pickup blue key 1", "go through red door 1", "toggle and go through grey door 2"],
    "sciworld": ["look around", "look at metal pot (in kitchen)", "use metal pot on stove", "0"]
    + ["drop block", "examine substance in cup", "pour cup in art studio in cup containing ink"]
    + ["use thermometer", "pick up orange in bowl", "focus on a seed", "go to hallway", "wait1"],
    "searchqa": ["<search> Who wrote Ulysses? </search>", "<answer> James Joyce </answer>"],
    "webarena": ["click [4]", "type [3] [a] [b]] [0]", "stop []", "press [Control+a]", "go_back"]
    + ['type [3] [say "hi"\n] [1]', "select [9] [Price: low to high]", "goto [http://gitlab.com]"],
}


@pytest.mark.parametrize("env", ACTIONS)
@pytest.mark.parametrize("written", EVERY, ids=repr)
def test_every_format_says_every_action_so_that_it_is_read_again(env, written):
    if written.max_actions > 1 and formats.problem_of_format(env, "react", 2):
        pytest.skip("this environment has no Action lines")
    env_class = get_env(env)
    for action in ACTIONS[env]:
        for thought in ("", "It may help."):
            assert written.parse(env_class, written.say(env_class, thought, action)) == [action]


def hermes(call):
    return f"<tool_call>\n{call if isinstance(call, str) else json.dumps(call)}\n</tool_call>"


def get(**arguments):
    return hermes({"name": "get", "arguments": arguments})


def python(code):
    return f"```python\n{code}\n```"


GET = {"name": "get", "arguments": {"count": 2, "item": "log"}}


@pytest.mark.parametrize(
    ("written", "text", "reason"),
    [
        (FunctionCalling(), "I get a log.", "No call found"),
        (FunctionCalling(), "<think>hm", "does not end"),
        (FunctionCalling(), hermes('{"name": "get"'), "is not JSON"),
        (FunctionCalling(), hermes("[" * 5000), "is not JSON"),
        (FunctionCalling(), hermes('"x" ' * 30_000), "characters, at most"),
        (FunctionCalling(), hermes('{"name": "get", "arguments": {"count": ' + "9" * 5000), "JSON"),
        (FunctionCalling(), hermes([1]), 'is not {"name"'),
        (FunctionCalling(), hermes(GET | {"name": ["get"]}), 'is not {"name"'),
        (FunctionCalling(), hermes(GET | {"arguments": "2 log"}), 'is not {"name"'),
        (FunctionCalling(), hermes(GET | {"name": "fly"}), "no function 'fly'; choose from get"),
        (FunctionCalling(), get(count=2), "needs the argument"),
        (FunctionCalling(), get(count=2, item="log", all=True), "no argument 'all'"),
        (FunctionCalling(), get(count=True, item="log"), "count is True, expected an integer"),
        (FunctionCalling(), 2 * hermes(GET), "Got 2 actions, expected one"),
        (FunctionCalling(2), 3 * hermes(GET), "Got 3 actions, expected at most 2"),
        (FunctionCalling(style="mistral"), hermes(GET), r"Write one as \[TOOL_CALLS\]"),
        (FunctionCalling(style="mistral"), "[TOOL_CALLS] []", "The list of calls is empty"),
        (Code(), python(f"get(count=0x{'f' * 4000}, item='log')"), "A number is too large"),
        (Code(), "get(count=2, item='log')", "No code found"),
        (Code(), python(""), "The code is empty"),
        (Code(), python("get(count=2"), "not Python"),
        (Code(), python("(" * 9000), "not Python"),
        (Code(), python("-" * 9000 + "1"), "not Python|not UnaryOp"),
        (Code(), python("# " + "x" * 100_000), "characters, at most"),
        (Code(), python("import os"), "not Import"),
        (Code(), python("os.system('ls')"), "not Attribute"),
        (Code(), python("[get(2, 'log') for _ in 'ab']"), "not ListComp"),
        (Code(), python("get(2, open('/etc/passwd').read())"), "literal text or number, not Call"),
        (Code(), python("get(2, 'log', 3)"), "takes 2 arguments, but got 3"),
        (Code(), python("get(2, item=b'log')"), "item is b'log', expected text"),
        (Code(), python("inventory()\ninventory()"), "Got 2 actions, expected one"),
        (React(2), "Action: inventory\n" * 3, "Got 3 actions, expected at most 2"),
        (React(1), "Thought: Action: inventory\nAction: inventory", "Got 2 'Action:' lines"),
        (React(2), "I do nothing.", "No action found"),
    ],
)
def test_a_text_without_an_action_gets_the_reason(written, text, reason):
    with pytest.raises(ParseError, match=reason):
        written.parse(TEXTCRAFT, text)


def test_several_actions_may_stand_on_lines_of_their_own_or_behind_the_thought():
    text = "Thought: Two logs. Action: get 2 log\n Action: inventory"
    assert React(2).parse(TEXTCRAFT, text) == ["get 2 log", "inventory"]


def test_the_environments_own_parser_has_the_last_word():
    text = get(count=2, item="log\nAction: inventory")
    with pytest.raises(ParseError, match="2 'Action:' lines"):
        FunctionCalling().parse(TEXTCRAFT, text)
    assert Code().parse(TEXTCRAFT, python("get(2, 'Oak-log!')")) == ["get 2 Oaklog"]


def test_several_actions_are_played_until_one_fails_or_ends_the_episode():
    with connect("textcraft", "local", action_format=Code(4)) as client:
        client.reset(31)  # craft 3 crimson hyphae using 4 crimson stem
        stem = "get(2, 'crimson stem')"
        result = client.step(python(f"{stem}\nget(1, 'nothing')\n{stem}"))
        note = "Action 2 of 3 failed, so the others were not played."
        assert result.observation == f"Could not find nothing\n{note}"
        craft = "craft('3 crimson hyphae', '4 crimson stem')"
        result = client.step(python(f"{stem}\n{craft}\ninventory()"))
        assert (result.observation, result.reward) == ("Crafted 3 minecraft:crimson_hyphae", 1.0)
        assert result.terminated


@pytest.mark.parametrize("info", [{"failed": True}, {"rejected": True}])
def test_the_state_after_a_failed_action_is_the_one_after_the_actions_before_it(monkeypatch, info):
    """The message of a failure is the same in many states."""
    answers = [("The door opens.", {}), ("No such action.", info)]
    results = iter([StepResult(text, 0.0, False, False, info) for text, info in answers])
    with connect("textcraft", "local", action_format=Code(2)) as client:
        client.reset(31)
        monkeypatch.setattr(client, "_play", lambda action: next(results))
        result = client.step(python("get(1, 'door')\nget(1, 'xyzzy')"))
    assert result.info["anchor"] == "The door opens." and "failed" not in result.info


@pytest.mark.parametrize(("family", "style"), FAMILIES.items())
def test_a_model_reads_and_writes_calls_as_its_family_was_trained(family, style):
    tokenizer = family_tokenizer(family)
    written = formats.action_format("function_calling", 1, tokenizer.chat_template)
    assert written == FunctionCalling(style=style, in_template=True)
    chat, prompt = ChatTemplate(tokenizer), written.prompt(TEXTCRAFT)
    handler = RolloutHandler("a", 0, "", "a", "", 0, 0, 3)
    handler.start(chat, prompt, "Goal: a log.")
    chat_text = tokenizer.decode(handler.input_ids)
    messages = [{k: m[k] for k in ("role", "content")} for m in handler.messages]
    rendered = tokenizer.apply_chat_template(
        messages, tools=prompt[0]["tools"], tokenize=False, add_generation_prompt=True
    )
    assert chat_text == rendered
    text = written.say(TEXTCRAFT, "", "get 2 oak log")
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert chat.is_action(ids)
    turn = handler.add_action(chat, [*ids, chat.end_of_turn], [0.0] * (len(ids) + 1))
    assert turn.action_text.strip() == text  # Mistral's begins with a blank
    assert written.parse(TEXTCRAFT, turn.action_text) == ["get 2 oak log"]


def test_a_demonstration_keeps_the_tools_of_its_prompt():
    chat = ChatTemplate(family_tokenizer("qwen2.5"))
    written = FunctionCalling(in_template=True)
    from data import as_turn

    opening = [as_turn(message, None) for message in written.prompt(TEXTCRAFT)]
    opening.append({"from": "human", "loss": None, "value": "Goal: a log."})
    action = written.say(TEXTCRAFT, "", "get 1 log")
    turns = [*opening, {"from": "gpt", "loss": True, "value": action}]
    example = encode(chat, {"item_id": "a", "conversations": turns})
    handler = RolloutHandler("a", 0, "", "a", "", 0, 0, 3)
    handler.start(chat, written.prompt(TEXTCRAFT), "Goal: a log.")
    assert example.trajectory.input_ids[: len(handler.input_ids)] == handler.input_ids


def test_a_template_without_tools_gets_them_as_text_and_one_that_drops_them_is_refused():
    template = family_tokenizer("phi3").chat_template
    written = formats.action_format("function_calling", 1, template)
    assert written == FunctionCalling()
    assert "craft(output: str, inputs: str)" in written.prompt(TEXTCRAFT)[0]["content"]
    chat = ChatTemplate(family_tokenizer("phi3"))
    with pytest.raises(ValueError, match="drops tools: get is not in the prompt"):
        chat.opening(FunctionCalling(in_template=True).prompt(TEXTCRAFT), "Goal: a log.")


def test_a_chat_servers_calls_are_read_as_text():
    call = {"function": {"name": "get", "arguments": '{"count": 2, "item": "log"}'}}
    message = {"content": "Two logs.", "tool_calls": [call]}
    body = json.dumps({"choices": [{"message": message}]}).encode()
    text = message_text(SimpleNamespace(status=200, body=body))
    assert text == f"Two logs.\n{hermes(GET)}"
    assert FunctionCalling().parse(TEXTCRAFT, text) == ["get 2 log"]
    for arguments in ("", None, {}):  # some servers send no text for no arguments
        message["tool_calls"] = [{"function": {"name": "inventory", "arguments": arguments}}]
        body = json.dumps({"choices": [{"message": message}]}).encode()
        text = message_text(SimpleNamespace(status=200, body=body))
        assert FunctionCalling().parse(TEXTCRAFT, text) == ["inventory"]


def test_an_environment_without_tools_has_only_its_own_format(monkeypatch):
    monkeypatch.delattr(TEXTCRAFT, "TOOLS")
    assert "lists no TOOLS" in formats.problem_of_format("textcraft", "code", 1)
    assert formats.problem_of_format("textcraft", "react", 1) is None
    assert "no 'Action:' lines" in formats.problem_of_format("searchqa", "react", 2)


@pytest.mark.parametrize("written", [FunctionCalling(), Code()])
def test_a_negative_integer_is_an_integer(monkeypatch, written):
    monkeypatch.setattr(TEXTCRAFT, "TOOLS", (tool("move {x:d} {y:d}"),))
    monkeypatch.setattr(TEXTCRAFT, "parse", staticmethod(action_line))
    text = written.say(TEXTCRAFT, "", "move -1 20")
    assert written.parse(TEXTCRAFT, text) == ["move -1 20"]


def test_an_action_that_the_environment_rejects_is_told_beside_the_call():
    call = {"name": "press", "arguments": {"keys": ""}}
    with pytest.raises(ParseError, match=r"press\(keys: str\) gives 'press \[\]'. Cannot read"):
        FunctionCalling().parse(get_env("webarena"), hermes(call))
