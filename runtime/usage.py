"""What a command line may say: `--help` by topic, and a sentence for what cannot be read.

A dataclass is a command line (runtime/cli.py). Its comments are the topics, the docstring below a
field is what its option means; both are read from the source, so that they stand in one place.

Read next: `config.py`.
"""

from __future__ import annotations

import ast
import difflib
import inspect
import shutil
import textwrap
import types
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

from config import flag

WIDTH, INDENT = 100, 30  # columns of a line at most, and where what an option means begins


class Option(NamedTuple):
    """A field of a dataclass, as a person reads it."""

    name: str
    kind: Any  # int, float, str, bool, or a tuple of choices
    is_list: bool
    topic: str
    meaning: str

    @property
    def flag(self) -> str:
        return flag(self.name)

    @property
    def takes(self) -> str:
        """What stands behind the flag, in capitals; "" behind a switch."""
        if self.kind is bool:
            return ""
        named = {int: "N", float: "X", str: "TEXT"}
        word = named.get(self.kind) or "{" + ",".join(map(str, self.kind)) + "}"
        return f"{word} ..." if self.is_list else word


@cache
def options_of(config_class: type) -> dict[str, Option]:
    """The options of a command line by field, the class's own before those that it inherits."""
    hints, found = get_type_hints(config_class), dict[str, Option]()
    known = {field.name for field in fields(config_class)}
    for part in filter(is_dataclass, config_class.__mro__):
        for name, topic, meaning in _written_in(part):
            if name in known and name not in found:
                kind, is_list = _kind(hints[name])
                found[name] = Option(name, kind, is_list, topic, meaning)
    return found


def _written_in(part: type) -> Iterator[tuple[str, str, str]]:
    """(field, topic, meaning) as a class's source has them; without a comment above them the topic
    is what its docstring says first."""
    source = textwrap.dedent(inspect.getsource(part))
    body = ast.parse(source).body[0].body  # type: ignore[attr-defined]
    said = (part.__doc__ or "").split("\n\n")[0].split(";")[0].rstrip(".")
    topics = [
        (number, line.strip("# "))
        for number, line in enumerate(source.splitlines(), 1)
        if line.startswith("    # ")
    ]
    for node, after in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            text = after.value.value if _is_text(after) else ""
            above = [topic for number, topic in topics if number < node.lineno]
            yield node.target.id, (above or [said])[-1], " ".join(text.split())


def _is_text(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str)


def _kind(hint: Any) -> tuple[Any, bool]:
    """(int, float, str, bool or a tuple of choices; whether several are taken)."""
    if get_origin(hint) in (Union, types.UnionType):
        hint = next(each for each in get_args(hint) if each is not type(None))
    if get_origin(hint) is tuple:
        return _kind(get_args(hint)[0])[0], True
    return (get_args(hint), False) if get_origin(hint) is Literal else (hint, False)


# --------------------------------------------------------------------------------------- reading


def words_of(argv: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    """Each flag with what stands behind it; what comes before all flags belongs to "".

    >>> list(words_of(["--rounds", "3", "6", "--seed=1", "--resume"]))
    [('--rounds', ['3', '6']), ('--seed', ['1']), ('--resume', [])]
    """
    name, values = "", list[str]()
    for word in argv:
        if not word.startswith("--"):
            values.append(word)
            continue
        if name or values:
            yield name, values
        name, has_value, value = word.partition("=")
        name, values = name.replace("_", "-"), [value] if has_value else []
    if name or values:
        yield name, values


def named(config_class: type, argv: Sequence[str]) -> dict[str, list[str]]:
    """The fields that a command line names, each with the words behind its flag."""
    found = {}
    known = options_of(config_class)
    for name, values in words_of(argv):
        field = name.removeprefix("--").replace("-", "_")
        switch = field.removeprefix("no_")
        if field in known:
            found[field] = values
        elif switch in known:
            found[switch] = values
    return found


def has_empty_list(config_class: type, argv: Sequence[str]) -> bool:
    """Whether an option that takes a list stands there with nothing behind it."""
    known = {option.flag: option for option in options_of(config_class).values()}
    lists = {name for name, option in known.items() if option.is_list}
    return any(name in lists and not values for name, values in words_of(argv))


def problem(config_class: type, argv: Sequence[str]) -> str | None:
    """Why a command line cannot be read, in a sentence; None where nothing is found."""
    known = {option.flag: option for option in options_of(config_class).values()}
    switches = {f"--no-{name[2:]}": o for name, o in known.items() if o.kind is bool}
    for name, values in words_of(argv):
        if not name:
            return f"{values[0]} is no option; options begin with --"
        option = known.get(name) or switches.get(name)
        if option is None:
            alike = difflib.get_close_matches(name, [*known, *switches], n=1, cutoff=0.7)
            return f"there is no {name}" + (f"; did you mean {alike[0]}?" if alike else "")
        said = _unreadable(option, name, values)
        if said:
            return said
    return None


def _unreadable(option: Option, name: str, values: list[str]) -> str | None:
    if option.kind is bool:
        return f"{name} takes no value, got {' '.join(values)}" if values else None
    if option.is_list:
        if not values:
            return f"{name} takes at least one value, got none; leave it out for its default"
        wrong = [value for value in values if not _is_a(option.kind, value)]
        expected = {int: "whole numbers", float: "numbers"}
    else:
        if len(values) != 1:
            got = " ".join(values) or "none"
            return f"{name} takes one value ({option.takes}), got {got}"
        wrong = [value for value in values if not _is_a(option.kind, value)]
        expected = {int: "a whole number", float: "a number"}
    if not wrong:
        return None
    what = expected.get(option.kind) or f"one of {', '.join(map(str, option.kind))}"
    return f"{name} {' '.join(values)}: {wrong[0]!r} does not do, expected {what}"


def _is_a(kind: Any, word: str) -> bool:
    if isinstance(kind, tuple):
        return word in (*map(str, kind), "None")
    try:
        kind(word)
    except ValueError:
        return word == "None"  # of an option without a value; the parser knows which
    return True


# ----------------------------------------------------------------------------------------- --help


def help_text(
    config_class: type, prog: str, description: str, default: Any = None, notes: str = ""
) -> str:
    """All options by topic, with what they mean and their defaults: those of `default`."""
    default = default if default is not None else config_class()
    width = min(WIDTH, shutil.get_terminal_size((WIDTH, 40)).columns)
    lines = [f"usage: {prog} [--option value ...]", "", *textwrap.wrap(description, width)]
    topics = dict[str, list[Option]]()
    for option in options_of(config_class).values():
        topics.setdefault(option.topic, []).append(option)
    for topic, options in topics.items():
        lines += ["", topic]
        for option in options:
            lines += _entry(option, getattr(default, option.name), width)
    return "\n".join([*lines, *(["", *textwrap.wrap(notes, width)] if notes else [])])


def _entry(option: Option, value: Any, width: int) -> Iterator[str]:
    """An option's lines: the flag, and beside it, or below where it is long, what it means."""
    shown = f"{value:g}" if isinstance(value, float) else str(value)
    if isinstance(value, tuple):
        shown = " ".join(map(str, value))
    if value is True:
        shown = f"on; --no-{option.flag[2:]} switches it off"
    head = f"  {option.flag} {option.takes}".rstrip()
    hidden = value is False or value is None or value in ("", ())
    text = option.meaning + ("" if hidden else f" (default: {shown})")
    lines = textwrap.wrap(text, width - INDENT, break_long_words=False) or [""]
    if len(head) + 2 > INDENT:
        yield head
        head = ""
    yield f"{head:{INDENT}}{lines[0]}".rstrip()
    yield from (" " * INDENT + line for line in lines[1:])
