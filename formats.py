"""Three ways in which a policy writes an action: ReAct, a function call, or a line of code.

An environment's own action is a line of text, such as "craft 4 oak planks using 1 oak log". The
policy can write it in three formats (--action-format); all three say the same:

    react               Thought: I have a log.
                        Action: craft 4 oak planks using 1 oak log
    function_calling    I have a log.
                        <tool_call>
                        {"name": "craft", "arguments": {"output": "4 oak planks", ...}}
                        </tool_call>
    code                I have a log.
                        ```python
                        craft(output="4 oak planks", inputs="1 oak log")
                        ```

ReAct is the environment's own prompt and parser. The other two follow from its TOOLS: each tool
has a template, which turns a call into a line and, read backwards, a line into a call. So every
format has three parts: `prompt` explains it, `say` writes a thought and an action (for
demonstrations), and `parse` reads the actions in the policy's text. For every action of an
environment, `parse(say(thought, action)) == [action]`.

A model that was trained to call functions expects their description where its chat template puts
it, and writes a call in its own style. `function_calling` reads the style in the template; a
template without tools gets the description as text and Hermes' style.

The text is untrusted. JSON is read by `json`, and code by `ast`: a call may hold only literals, and
nothing that the policy wrote is executed (AgentGym calls `eval`).

Read next: agents.py. Lesson: tutorials/18_ways_to_act.md.
"""

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from envs import ParseError, Tool, call_static, get_env
from envs.common import action_in, without_thought

Name = Literal["react", "function_calling", "code"]
Style = Literal["hermes", "llama", "mistral"]
MAX_CALL = 10_000  # characters
MAX_NUMBER = 10**18
SINGLE = "Think briefly, then call one of these functions"
SEVERAL = "Think briefly, then call up to {} of these functions; they run in order until one fails"


@dataclass(frozen=True)
class React:
    """The environment's own prompt and parser, as in the paper."""

    name: ClassVar[Name] = "react"
    max_actions: int = 1

    def prompt(self, env_class: Any) -> list[dict[str, Any]]:
        if self.max_actions == 1:
            return env_class.PROMPT
        more = f"Instead of one action you may write up to {self.max_actions} lines 'Action: ...'; "
        more += "they are played in order until one fails."
        first, *examples = env_class.PROMPT
        return [first | {"content": f"{first['content']}\n{more}"}, *examples]

    def say(self, env_class: Any, thought: str, action: str) -> str:
        return call_static(env_class, "say", thought, action)

    def parse(self, env_class: Any, model_text: str) -> list[str]:
        if self.max_actions == 1:
            return [action_in(env_class, model_text)]
        before, *lines = re.split("(?=Action:)", without_thought(model_text))
        lines = lines or [before]  # the environment's parser says what is missing
        check_number(len(lines), self.max_actions)
        return [call_static(env_class, "parse", line) for line in lines]


@dataclass(frozen=True)
class FunctionCalling:
    """A JSON object with the name of a function and its arguments."""

    name: ClassVar[Name] = "function_calling"
    max_actions: int = 1
    style: Style = "hermes"
    in_template: bool = False  # the chat template describes the tools; else the prompt's text does

    def prompt(self, env_class: Any) -> list[dict[str, Any]]:
        text = f"{env_class.RULES}\n{instruction(self.max_actions)}"
        if self.in_template:
            tools = [schema(tool) for tool in env_class.TOOLS]
            return [{"role": "system", "content": f"{text}.", "tools": tools}]
        example = _call_text(self.style, [{"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}])
        lines = (f"{text}:", *signatures(env_class), "Write a call as", example)
        return [{"role": "system", "content": "\n".join(lines)}]

    def say(self, env_class: Any, thought: str, action: str) -> str:
        name, arguments = call_of(env_class, action)
        call = _call_text(self.style, [{"name": name, "arguments": arguments}])
        return f"{thought}\n{call}" if thought else call

    def parse(self, env_class: Any, model_text: str) -> list[str]:
        calls = _read_calls(self.style, without_thought(model_text))
        check_number(len(calls), self.max_actions)
        return [action_of(env_class, *_name_and_arguments(call)) for call in calls]


@dataclass(frozen=True)
class Code:
    """A line of Python that calls a function with literal arguments."""

    name: ClassVar[Name] = "code"
    max_actions: int = 1

    def prompt(self, env_class: Any) -> list[dict[str, Any]]:
        lines = (f"{env_class.RULES}\n{instruction(self.max_actions)}:", *signatures(env_class))
        example = "Write the call as\n```python\nNAME(ARGUMENT=VALUE)\n```"
        return [{"role": "system", "content": "\n".join((*lines, example))}]

    def say(self, env_class: Any, thought: str, action: str) -> str:
        name, arguments = call_of(env_class, action)
        # What json.dumps writes for a text or an integer is also Python.
        written = (f"{key}={json.dumps(x, ensure_ascii=False)}" for key, x in arguments.items())
        block = f"```python\n{name}({', '.join(written)})\n```"
        return f"{thought}\n{block}" if thought else block

    def parse(self, env_class: Any, model_text: str) -> list[str]:
        match = re.search(r"```(?:python|py)?\s*\n(.*?)```", without_thought(model_text), re.DOTALL)
        if not match:
            raise ParseError("No code found. Write a call between ```python and ```.")
        calls = list(map(_call_in, _statements(match[1])))
        check_number(len(calls), self.max_actions)
        return [action_of(env_class, *_with_names(env_class, *call)) for call in calls]


ActionFormat = React | FunctionCalling | Code
FORMATS: Mapping[str, type[ActionFormat]] = {
    kind.name: kind for kind in (React, FunctionCalling, Code)
}
REACT = React()


def action_format(name: str, max_actions: int, chat_template: str | None = None) -> ActionFormat:
    """The format with this name.

    Args:
        chat_template: the tokenizer's; only function_calling depends on it.
    """
    if name != FunctionCalling.name:
        return FORMATS[name](max_actions)
    styles: dict[str, Style] = {"<tool_call>": "hermes", "[TOOL_CALLS]": "mistral"}
    styles['"parameters": '] = "llama"
    for mark, style in styles.items():
        if chat_template and "tools" in chat_template and mark in chat_template:
            return FunctionCalling(max_actions, style, in_template=True)
    return FunctionCalling(max_actions)


def problem_of_format(env: str, name: str, max_actions: int) -> str | None:
    """Why an environment's actions cannot be written in this format, or None."""
    env_class = get_env(env)
    if name != React.name and not hasattr(env_class, "TOOLS"):
        return f"{env} lists no TOOLS; use react, or add them (tutorials/18_ways_to_act.md)"
    written = call_static(env_class, "say", "It may help.", "look")
    if name == React.name and max_actions > 1 and "Action: " not in written:
        return f"{env} writes no 'Action:' lines, so a turn has one action; use another format"
    return None


# ------------------------------------------------------------------- calls and an action's own text


def action_of(env_class: Any, name: str, arguments: Mapping[str, Any]) -> str:
    """The environment's action for a call. Raises ParseError for an unknown function, for arguments
    that are missing, unknown or of another type, and if the environment rejects the text."""
    tools: dict[str, Tool] = {tool.name: tool for tool in env_class.TOOLS}
    if name not in tools:
        raise ParseError(f"There is no function {name[:60]!r}; choose from {', '.join(tools)}.")
    tool = tools[name]
    if missing := [key for key in tool.arguments if key not in arguments]:
        raise ParseError(f"{name} needs the argument {missing[0]!r}: {signature(tool)}")
    if unknown := [key for key in arguments if key not in tool.arguments]:
        raise ParseError(f"{name} has no argument {unknown[0][:60]!r}: {signature(tool)}")
    for key, value in arguments.items():
        kind = int if tool.is_integer(key) else str
        if type(value) is not kind:
            expected = "an integer" if kind is int else "text"
            raise ParseError(f"{name}: {key} is {value!r:.60}, expected {expected}.")
    action = tool.template.format_map(arguments)
    try:
        return call_static(env_class, "parse", call_static(env_class, "say", "", action))
    except ParseError as problem:  # may speak of the environment's own format
        raise ParseError(f"{signature(tool)} gives {action[:60]!r}. {problem}") from None


def call_of(env_class: Any, action: str) -> tuple[str, dict[str, Any]]:
    """The inverse: the function and the arguments that give this action. ValueError if none does.

    >>> call_of(get_env("textcraft"), "get 2 oak log")
    ('get', {'count': 2, 'item': 'oak log'})
    """
    for tool in env_class.TOOLS:
        parts = re.split(r"\{(\w+)(?::d)?\}", tool.template)  # text, name, text, name, ...
        pattern = "".join(
            re.escape(part) if i % 2 == 0 else r"(-?\d+)" if tool.is_integer(part) else "(.*?)"
            for i, part in enumerate(parts)
        )
        if match := re.fullmatch(pattern, action, re.DOTALL):
            values = zip(parts[1::2], match.groups(), strict=True)
            return tool.name, {k: int(v) if tool.is_integer(k) else v for k, v in values}
    raise ValueError(f"no tool of {env_class.__name__} writes {action!r:.80}")


def check_number(number: int, limit: int) -> None:
    if number > limit:
        most = "one action" if limit == 1 else f"at most {limit} actions"
        raise ParseError(f"Got {number} actions, expected {most}. Write {most}.")


# ----------------------------------------------------------------------------- describing the tools


def instruction(max_actions: int) -> str:
    return SINGLE if max_actions == 1 else SEVERAL.format(max_actions)


def signature(tool: Tool) -> str:
    """
    >>> signature(get_env("textcraft").TOOLS[0])
    'get(count: int, item: str)'
    """
    kinds = (f"{key}: {'int' if tool.is_integer(key) else 'str'}" for key in tool.arguments)
    return f"{tool.name}({', '.join(kinds)})"


def signatures(env_class: Any) -> list[str]:
    """A line for each function: its signature, what it does, and what its arguments mean."""
    notes = [
        "; ".join(filter(None, [tool.about, *(f"{k}: {v}" for k, v in tool.arguments.items())]))
        for tool in env_class.TOOLS
    ]
    pairs = zip(env_class.TOOLS, notes, strict=True)
    return [f"{signature(tool)}  # {note}" if note else signature(tool) for tool, note in pairs]


def schema(tool: Tool) -> dict[str, Any]:
    """The description of a function in OpenAI's format, which chat templates expect."""
    properties = {
        key: {"type": "integer" if tool.is_integer(key) else "string", "description": about}
        for key, about in tool.arguments.items()
    }
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    function = {"name": tool.name, "description": tool.about, "parameters": parameters}
    return {"type": "function", "function": function}


# ------------------------------------------------------------------------------- calls as JSON


def _call_text(style: Style, calls: Sequence[Mapping[str, Any]]) -> str:
    """Calls as the models of a family write them."""
    texts = [json.dumps(call, ensure_ascii=False) for call in calls]
    if style == "mistral":
        return f"[TOOL_CALLS] [{', '.join(texts)}]"
    if style == "llama":  # Llama 3 says "parameters"
        renamed = ({"name": call["name"], "parameters": call["arguments"]} for call in calls)
        return "; ".join(json.dumps(call, ensure_ascii=False) for call in renamed)
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)


def _read_calls(style: Style, text: str) -> list[Any]:
    """The JSON of each call in the policy's text. Raises ParseError."""
    example = _call_text(style, [{"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}])
    starts = {"hermes": "<tool_call>", "llama": '{"name"', "mistral": "[TOOL_CALLS]"}
    _, found, rest = text.partition(starts[style])
    if not found:
        raise ParseError(f"No call found. Write one as {example}")
    if len(rest) > MAX_CALL:
        raise ParseError(f"The call has {len(rest)} characters, at most {MAX_CALL} are read.")
    if style == "hermes":
        return [_json(part.partition("</tool_call>")[0]) for part in rest.split("<tool_call>")]
    if style == "mistral":
        calls = _json(rest)
        if calls == []:
            raise ParseError(f"The list of calls is empty. Write one as {example}")
        return calls if isinstance(calls, list) else [calls]
    return [_json(part) for part in re.split(r"(?<=\})\s*;\s*(?=\{\"name\")", found + rest)]


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ParseError(f"The call {text.strip()[:80]!r} is not JSON ({error}).") from None


def _name_and_arguments(call: Any) -> tuple[str, dict[str, Any]]:
    fields = call if isinstance(call, dict) else {}
    name, arguments = fields.get("name"), fields.get("arguments", fields.get("parameters", {}))
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ParseError(f'The call {call!r:.80} is not {{"name": ..., "arguments": {{...}}}}.')
    return name, arguments


# ------------------------------------------------------------------------------- calls as code


def _statements(code: str) -> list[ast.stmt]:
    if len(code) > MAX_CALL:
        raise ParseError(f"The code has {len(code)} characters, at most {MAX_CALL} are read.")
    try:
        statements = ast.parse(code).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ParseError(f"The code is not Python ({str(error)[:120]}).") from None
    if not statements:
        raise ParseError("The code is empty. Write a call between ```python and ```.")
    return statements


def _call_in(statement: ast.stmt) -> tuple[str, list[Any], dict[str, Any]]:
    """The name, the positional and the named arguments of a call. Raises ParseError for all other
    code, without executing any."""
    call = statement.value if isinstance(statement, ast.Expr) else statement
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        kind = type(call.func if isinstance(call, ast.Call) else call).__name__
        raise ParseError(f"Only calls such as NAME(ARGUMENT=VALUE) can be played, not {kind}.")
    named = {str(keyword.arg): _literal(keyword.value) for keyword in call.keywords}
    return call.func.id, list(map(_literal, call.args)), named


def _literal(node: ast.expr) -> Any:
    """The value of a literal. A negative number is a literal behind an operator."""
    sign = 1
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node, sign = node.operand, -1
    value: Any = getattr(node, "value", None)
    if not isinstance(node, ast.Constant) or (sign < 0 and type(value) is not int):
        kind = type(node).__name__
        raise ParseError(f"An argument must be a literal text or number, not {kind}.")
    if isinstance(value, int) and value > MAX_NUMBER:
        raise ParseError("A number is too large.")  # Python refuses to print some
    return value if sign > 0 else -value


def _with_names(
    env_class: Any, name: str, values: Sequence[Any], named: Mapping[str, Any]
) -> tuple[str, dict[str, Any]]:
    """Give positional arguments the names that the function's signature has in these places."""
    names = next((tuple(tool.arguments) for tool in env_class.TOOLS if tool.name == name), ())
    if names and len(values) > len(names):
        raise ParseError(f"{name} takes {len(names)} arguments, but got {len(values)}.")
    return name, dict(zip(names, values)) | dict(named)
