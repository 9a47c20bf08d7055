"""The actions of WebArena: from the policy's text to an action and back.

The policy writes its reasoning and then one action between triple backticks; INSTRUCTIONS lists the
actions.

    >>> parse("The cart is behind this link. ```click [12]```")
    'click [12]'
    >>> parse("```type [3] [kettle]```")
    'type [3] [kettle] [1]'

All but `select` is WebArena's grammar. There, a click on a <select> opens a list that a headless
browser does not draw.
"""

import re
from dataclasses import dataclass

from envs import ParseError, Tool

INSTRUCTIONS = """You do a task on web sites in a browser. The observation shows the page as a tree.
[4] is the number of an element. Each turn is one action:
click [id]: click an element
type [id] [text] [1]: click a field, type into it and press Enter; with [0] without Enter
select [id] [option]: choose an option of a combobox
hover [id]: move the mouse over an element
press [keys]: press a key or a combination, as in press [Control+a]
scroll [down] or scroll [up]: by one screen
goto [address], go_back, go_forward: change the page
new_tab, tab_focus [number], close_tab: change the tab
stop [answer]: the task is done; the answer is short, or empty if none is asked for
Think briefly, then write one action between triple backticks, as in ```click [4]```."""
RULES = """You do a task on web sites in a browser. The observation shows the page as a tree.
[4] is the number of an element."""
_ELEMENT = {"id": "number of the element"}
TOOLS = (
    Tool("click", "click [{id:d}]", "click an element", _ELEMENT),
    Tool(
        "type",
        "type [{id:d}] [{text}] [{enter:d}]",
        "click a field and type into it",
        _ELEMENT | {"text": "what to type", "enter": "1 to press Enter afterwards, or 0"},
    ),
    Tool(
        "select",
        "select [{id:d}] [{option}]",
        "choose an option of a combobox",
        _ELEMENT | {"option": "its text"},
    ),
    Tool("hover", "hover [{id:d}]", "move the mouse over an element", _ELEMENT),
    Tool("press", "press [{keys}]", "press keys", {"keys": "as in Enter or Control+a"}),
    Tool("scroll", "scroll [{direction}]", "by one screen", {"direction": "down or up"}),
    Tool("goto", "goto [{address}]", "open a page", {"address": "http://..."}),
    *(Tool(action, action) for action in ("go_back", "go_forward", "new_tab", "close_tab")),
    Tool("tab_focus", "tab_focus [{number:d}]", "change to a tab", {"number": "of the tab"}),
    Tool("stop", "stop [{answer}]", "end the task", {"answer": "short; empty if none is asked"}),
)
MAX_TEXT = 2000  # characters to type; each is a key press
BLOCK = re.compile(r"```(.*?)```", re.DOTALL)
# What follows the name of an action: how it is written, and how it is read. WebArena accepts text
# behind the action, so we do, too.
_ID, _TEXT = r"\[(?P<number>\d{1,9})\]", r"\[(?P<text>.*)\]"
_FORMS = {
    "click": ("[{number}]", _ID),
    "hover": ("[{number}]", _ID),
    "type": (
        "[{number}] [{text}] [{enter:d}]",
        rf"{_ID} *\[(?P<text>.*?)\](?: *\[(?P<enter>-?\d+)\])?$",
    ),
    "select": ("[{number}] [{text}]", rf"{_ID} *{_TEXT}"),
    "press": ("[{text}]", r"\[(?P<text>[^\]]+|\])\]"),
    "scroll": ("[{text}]", r"\[?(?P<text>down|up)\]?"),
    "goto": ("[{text}]", r"\[(?P<text>[^\]\s]+)\]"),
    "go_back": ("", ""),
    "go_forward": ("", ""),
    "new_tab": ("", ""),
    "tab_focus": ("[{number}]", _ID),
    "close_tab": ("", ""),
    "stop": ("[{text}]", rf"(?:{_TEXT})?"),
}
_EXAMPLES = {"press": "Enter", "scroll": "down", "goto": "http://..."}  # of texts
# Keys by their names in lower case. Meta is Control, because agents know the shortcuts of a Mac.
_KEYS = {
    name.lower(): name
    for name in (
        *("Control", "Shift", "Alt", "Enter", "Escape", "Tab", "Backspace", "Delete", "Home"),
        *("End", "PageUp", "PageDown", "ArrowUp", "ArrowDown", "ArrowLeft", "ArrowRight"),
    )
} | {"ctrl": "Control", "meta": "Control", "cmd": "Control", "esc": "Escape", "return": "Enter"}


@dataclass(frozen=True)
class Action:
    kind: str  # "click"
    number: int = 0  # of an element or a tab
    text: str = ""  # to type; an option, keys, a direction, an address, an answer
    enter: bool = False  # press Enter after typing

    def __str__(self) -> str:
        """The text from which `read` reads this action."""
        form, _ = _FORMS[self.kind]
        return f"{self.kind} {form.format_map(vars(self))}".strip()


def read(text: str) -> Action:
    """Read one action. Raises ParseError with the problem.

    >>> read("press [ctrl+a]")
    Action(kind='press', number=0, text='Control+a', enter=False)
    """
    text = text.strip()
    kind = re.split(r"[\s\[]", text, maxsplit=1)[0]
    if kind not in _FORMS:
        names = ", ".join(_FORMS)
        raise ParseError(f"There is no action {kind[:40]!r}. The actions are {names}.")
    form, pattern = _FORMS[kind]
    match = re.match(pattern, text[len(kind) :].lstrip(" "), re.DOTALL)
    if not match:
        usage = form.format(number="id", text=_EXAMPLES.get(kind, "text"), enter=1)
        raise ParseError(f"Cannot read {text[:80]!r}. Write {kind} {usage}; an id is a number.")
    fields = match.groupdict()
    number, content = int(fields.get("number") or 0), fields.get("text") or ""
    if kind == "type":
        if len(content) > MAX_TEXT:
            raise ParseError(f"The text to type is too long; at most {MAX_TEXT} characters.")
        if fields["enter"] not in (None, "0", "1"):
            raise ParseError("The last number of type is 1 to press Enter, or 0.")
        return Action(kind, number, content, enter=fields["enter"] != "0")
    return Action(kind, number, _keys(content) if kind == "press" else content.strip())


def _keys(combination: str) -> str:
    """The names that Playwright uses: "ctrl+A" is "Control+A"."""
    parts = [part.strip() for part in re.findall(r"[^+]+|\+$", combination.strip())]
    if not any(parts):
        raise ParseError("There is no key. Write press [Enter] or [Control+a].")
    return "+".join(_KEYS.get(part.lower(), part) for part in parts if part)


def action_text(model_text: str) -> str:
    """The text in the only pair of triple backticks; ParseError if there is none or another one.

    AgentGym's server plays the first of several actions. Then nothing that follows it can be wrong,
    and RL teaches the policy to write backticks until its turn is cut.
    """
    match = BLOCK.search(model_text)
    if not match:
        raise ParseError("No action found. Write it between triple backticks: ```click [12]```")
    if model_text.count("```") > 2:
        raise ParseError("Found more than one text between triple backticks. Write one action.")
    return match[1].strip()


def parse(model_text: str) -> str:
    """The action in the policy's text, in the form that `say` writes."""
    return str(read(action_text(model_text)))


def say(thought: str, action: str) -> str:
    """Write a thought and an action as text that `parse` reads."""
    thought, action = (text.replace("```", "'''") for text in (thought, action))
    return f"{thought}\n```{action}```" if thought else f"```{action}```"
