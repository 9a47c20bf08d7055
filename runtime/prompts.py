"""Another prompt than the world's own: `--prompt FILE`, of train.py and evaluate.py.

    a JSON list of {"role", "content"}    the messages before the first observation
    any other text                        in place of the world's instruction, its first message

What the option holds after `with_prompt` is the messages themselves, as JSON: config.json then has
the text that was trained with, and a resumed run needs no file and notices another one.

Read next: `chat.py`, which makes token ids of them.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Protocol, TypeVar

from chat import is_sound
from config import Misuse
from envs import get_env, names_of, problem_of_messages

Messages = list[dict[str, str]]
MAX_BYTES = 100_000  # of a prompt: a file of this size is another one than was meant


class HasPrompt(Protocol):
    """Options of a program that takes --prompt."""

    @property
    def env(self) -> str: ...

    @property
    def prompt(self) -> str | None: ...


Options = TypeVar("Options", bound=HasPrompt)


def with_prompt(config: Options) -> Options:
    """The options with the text of --prompt in place of its file; a second time changes nothing.

    Raises:
        Misuse: no such file, or nothing that can stand before a first observation.
    """
    given = config.prompt
    if given is None or given.lstrip().startswith("["):
        return config
    if len(names_of(config.env)) > 1:
        return config  # which runtime/mixture.py refuses
    messages = _messages(_read(given), given, config.env)
    return replace(config, prompt=json.dumps(messages, ensure_ascii=False))  # type: ignore[type-var]


def prompt_of(config: HasPrompt) -> Messages | None:
    """The messages that replace the world's; None: its own."""
    return json.loads(config.prompt) if config.prompt else None


def _read(file: str) -> str:
    try:
        if Path(file).stat().st_size > MAX_BYTES:
            raise Misuse(f"--prompt {file} is larger than {MAX_BYTES} bytes; is it a prompt?")
        return Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise Misuse(f"--prompt {file} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise Misuse(f"--prompt {file} is not text in UTF-8 ({error})") from error


def _messages(text: str, file: str, env: str) -> Messages:
    """The messages that a file's text stands for."""
    if not text.strip():
        raise Misuse(f"--prompt {file} is empty")
    if not text.lstrip().startswith("["):
        first, *others = get_env(env).PROMPT
        return [first | {"content": text.strip()}, *others]
    try:
        messages = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise Misuse(f"--prompt {file} begins like JSON and is none ({error})") from error
    kind = 'expected a JSON list of {"role": ..., "content": ...}'
    for message in messages or [None]:
        texts = [message.get(key) for key in ("role", "content")] if _is_object(message) else []
        if len(texts) != 2 or not all(isinstance(each, str) and is_sound(each) for each in texts):
            raise Misuse(f"--prompt {file}: {kind}, got {json.dumps(message)[:80]}")
    if problem := problem_of_messages(messages):
        raise Misuse(f"--prompt {file}: {problem}")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _is_object(value: object) -> bool:
    return isinstance(value, dict)
